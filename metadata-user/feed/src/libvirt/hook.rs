//! `xdp-imds libvirt-hook`: what libvirt runs when a domain's life turns.
//!
//! Whatever happens it says nothing on standard output, which libvirt takes for a new domain, and ends with 0: any
//! other code keeps a domain from starting, and kills one that runs when libvirtd comes back. What it did, and
//! what was wrong, is in the host's log.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::Value;

use super::domain::{self, Domain, Skipped, Taps};
use super::syslog::{self, Log, Severity};
use super::{DEFAULT_FILES, DIRECTORY, LibvirtError, XML_OCTETS, compose, io_error};
use metadata_base::run::DEFAULT_RUN;
use metadata_content::record::{Limits, Record, Warning};
use metadata_state::private_file;

/// Longest the hook may take: libvirt waits for it with the domain.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// What a record may hold at most: how much of that is allowed is the agent's to say.
const LIMITS: Limits = Limits {
    metadata_keys: Limits::METADATA_KEYS_MOST,
    metadata_chars: Limits::METADATA_CHARS_MOST,
    ..Limits::DEFAULT
};

/// The verb's name.
pub const VERB: &str = "libvirt-hook";

/// The words libvirt gives, and where things are.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// The directory of the agent's sockets; the record goes to hook.d in it.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_RUN)]
    pub run: PathBuf,
    /// Directory of parts of records, UUID.yaml for a domain and defaults.yaml for all.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_FILES)]
    pub files: PathBuf,
    /// Make a record of every domain, also of those with neither metadata nor file.
    #[arg(long)]
    pub every_domain: bool,
    /// The domain's name.
    #[arg(value_name = "GUEST")]
    pub guest: OsString,
    /// What happens to it: prepare, start, started, stopped, release, migrate, reconnect, …
    #[arg(value_name = "OPERATION")]
    pub operation: OsString,
    /// Whether it begins or ends.
    #[arg(value_name = "SUBOPERATION")]
    pub suboperation: OsString,
    /// Why, or `-`.
    #[arg(value_name = "EXTRA")]
    pub extra: Vec<OsString>,
}

/// What a hook does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Makes the domain's record, or makes it anew.
    Write(Taps),
    /// Takes it away.
    Remove,
    /// Nothing.
    Nothing,
}

impl Action {
    /// What is to be done when this happens. Taps are made between `prepare` and `start`, and are still there when
    /// libvirtd comes back (`reconnect`). The last two both come at a domain's end; which is first depends on its age.
    fn of(operation: &str, suboperation: &str) -> Self {
        match (operation, suboperation) {
            ("prepare" | "migrate", "begin") => Self::Write(Taps::ToBeMade),
            ("start" | "started" | "reconnect", "begin") => Self::Write(Taps::Made),
            ("stopped" | "release", "end") => Self::Remove,
            _ => Self::Nothing,
        }
    }
}

/// True when the command line is a hook's: whatever is wrong with it, the answer is silence.
#[must_use]
pub fn is_asked(words: impl IntoIterator<Item = OsString>) -> bool {
    words.into_iter().nth(1).is_some_and(|verb| verb == VERB)
}

/// Does what is to be done and says so in the log. Ends the process when that takes longer than [`PATIENCE`].
pub fn run(arguments: &Arguments) {
    let log = Log::new(Path::new(syslog::SOCKET), &arguments.guest.to_string_lossy());
    let watched = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(PATIENCE);
        std::process::exit(0);
    });
    if let Err(error) = watched {
        log.say(Severity::Warning, &format!("nothing bounds the time of this hook: {error}"));
    }
    let done = catch_unwind(AssertUnwindSafe(|| work(arguments, &mut io::stdin().lock(), &log)));
    match done {
        Ok(Ok(())) => {}
        Ok(Err(error)) => log.say(Severity::Error, &format!("its metadata is not as it should be: {error}")),
        Err(_) => log.say(
            Severity::Error,
            "its metadata is not as it should be: a fault of xdp-imds, please report it",
        ),
    }
}

/// Reads the domain and does what is to be done.
fn work(arguments: &Arguments, input: &mut impl Read, log: &Log) -> Result<(), LibvirtError> {
    let words = [&arguments.operation, &arguments.suboperation].map(|word| word.to_string_lossy());
    let action = Action::of(&words[0], &words[1]);
    if action == Action::Nothing {
        return Ok(());
    }
    let mut octets = Vec::new();
    // One more than is taken: the parser then knows that it is too much.
    let read = input.take(XML_OCTETS as u64 + 1).read_to_end(&mut octets);
    read.map_err(|error| io_error(Path::new("standard input"), "a domain's XML", error))?;
    let room = arguments.run.join(DIRECTORY);
    match action {
        Action::Write(taps) => write(&Domain::parse(&octets, taps)?, &room, arguments, log),
        Action::Remove => remove(&path(&room, &domain::uuid(&octets)?), log),
        Action::Nothing => Ok(()),
    }
}

/// Where the record of a domain is.
fn path(room: &Path, uuid: &str) -> PathBuf {
    room.join(format!("{uuid}.json"))
}

/// Makes the record of a domain, or takes away one that its metadata no longer asks for.
fn write(domain: &Domain, room: &Path, arguments: &Arguments, log: &Log) -> Result<(), LibvirtError> {
    let path = path(room, &domain.uuid);
    let Some(mut record) = compose::record(domain, &arguments.files, arguments.every_domain)? else {
        return remove(&path, log);
    };
    // Before taps have names there is nothing to attach, and a record that is there says more.
    if !has_port(&record) && path.exists() {
        return Ok(());
    }
    let old = read(&path);
    let generation = old.as_ref().and_then(|old| old["generation"].as_u64());
    record["generation"] = generation.unwrap_or(0).into();
    if old.as_ref() == Some(&record) {
        return Ok(());
    }
    record["generation"] = generation.map_or_else(now, |generation| generation + 1).into();
    let text = format!("{record:#}\n");
    let checked = Record::parse_within(&LIMITS, &path.to_string_lossy(), &text);
    // One that is refused is put where the agent shows it, but not in the place of a good one.
    if checked.is_ok() || old.is_none() {
        put(room, &path, &text).map_err(|error| io_error(&path, "a record that can be written", error))?;
    }
    let (record, warnings) = checked?;
    tell(domain, &record, &warnings, log);
    Ok(())
}

fn tell(domain: &Domain, record: &Record, warnings: &[Warning], log: &Log) {
    let ports = record.network.nics.iter().filter_map(|nic| nic.port.as_ref());
    let taps: Vec<_> = ports.map(|port| port.ifname.to_string()).collect();
    log.say(
        Severity::Info,
        &match &taps[..] {
            [] => "has a record; no tap of it has a name yet".to_owned(),
            taps => format!("has a record, served on {}", taps.join(", ")),
        },
    );
    for Skipped { interface, reason } in &domain.skipped {
        log.say(Severity::Warning, &format!("{interface} is not served: {reason}"));
    }
    for warning in warnings {
        log.say(Severity::Warning, &warning.to_string());
    }
}

fn has_port(record: &Value) -> bool {
    let nics = record.pointer("/network/nics").and_then(Value::as_array);
    nics.is_some_and(|nics| nics.iter().any(|nic| !nic["port"].is_null()))
}

/// The record that is there, if it can be read.
fn read(path: &Path) -> Option<Value> {
    let octets = compose::read(path, LIMITS.record_octets).ok()??;
    serde_json::from_slice(&octets).ok()
}

fn remove(path: &Path, log: &Log) -> Result<(), LibvirtError> {
    let removed = private_file::remove(path);
    if removed.map_err(|error| io_error(path, "a record that can be removed", error))? {
        log.say(Severity::Info, "its record is gone");
    }
    Ok(())
}

/// Puts a record into the directory, which is made if need be, for whoever owns that.
fn put(room: &Path, path: &Path, text: &str) -> io::Result<()> {
    private_file::make_directory(room)?;
    let owner = fs::metadata(room)?;
    private_file::replace_for(path, text.as_bytes(), Some((owner.uid(), owner.gid())))
}

/// Where generations begin: above those of the domain's life before, whose record is gone.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

    struct Room(tempfile::TempDir);

    impl Room {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn record(&self) -> PathBuf {
            self.0.path().join(format!("run/{DIRECTORY}/{UUID}.json"))
        }

        /// What the hook makes of this operation on a domain with these children of our element and this tap.
        fn hook(&self, words: &str, children: &str, tap: &str) -> Result<Option<Value>, LibvirtError> {
            let element = format!("<instance xmlns='{}'>{children}</instance>", super::super::NAMESPACE);
            self.feed(
                words,
                &format!(
                    "<domain><name>web</name><uuid>{UUID}</uuid><metadata>{element}</metadata><devices>\
                     <interface type='network'><mac address='52:54:00:00:00:01'/><target dev='{tap}'/></interface>\
                     </devices></domain>"
                ),
            )
        }

        fn feed(&self, words: &str, xml: &str) -> Result<Option<Value>, LibvirtError> {
            let mut words = words.split(' ').map(OsString::from);
            let arguments = Arguments {
                run: self.0.path().join("run"),
                files: self.0.path().join("files"),
                every_domain: false,
                guest: "web".into(),
                operation: words.next().expect("an operation"),
                suboperation: words.next().expect("a suboperation"),
                extra: words.collect(),
            };
            work(&arguments, &mut xml.as_bytes(), &Log::new(Path::new("/nonexistent"), "web"))?;
            Ok(read(&self.record()))
        }
    }

    #[test]
    fn each_turn_of_a_domains_life_writes_takes_away_or_leaves() {
        let (made, to_be_made) = (Action::Write(Taps::Made), Action::Write(Taps::ToBeMade));
        let cases = [
            ("prepare", "begin", to_be_made),
            ("migrate", "begin", to_be_made),
            ("start", "begin", made),
            ("started", "begin", made),
            ("reconnect", "begin", made),
            ("stopped", "end", Action::Remove),
            ("release", "end", Action::Remove),
            ("restore", "begin", Action::Nothing),
            ("attach", "begin", Action::Nothing),
            ("start", "end", Action::Nothing),
            ("--help", "", Action::Nothing),
        ];
        for (operation, suboperation, expected) in cases {
            assert_eq!(Action::of(operation, suboperation), expected, "{operation} {suboperation}");
        }
    }

    #[test]
    fn a_domain_has_a_private_record_from_its_start_to_its_end() {
        let room = Room::new();
        let record = room.hook("start begin -", "", "vnet7").expect("hooked").expect("a record");
        assert_eq!(record["network"]["nics"][0]["port"]["ifname"], "vnet7");
        for (path, mode) in [(room.record(), 0o600), (room.record().parent().unwrap().into(), 0o700)] {
            let found = fs::metadata(&path).expect("there").permissions().mode() & 0o7777;
            assert_eq!(found, mode, "{}", path.display());
        }
        assert_eq!(room.hook("stopped end destroyed", "", "vnet7").expect("hooked"), None);
        assert_eq!(
            room.hook("release end destroyed", "", "vnet7").expect("hooked"),
            None,
            "twice is as once"
        );
    }

    #[test]
    fn a_record_changes_and_its_generation_grows_only_with_what_it_says() {
        let room = Room::new();
        let write = |label: &str| {
            let children = format!("<label>{label}</label>");
            room.hook("reconnect begin -", &children, "vnet7").expect("hooked").expect("a record")
        };
        let first = write("a");
        assert_eq!(write("a"), first);
        let second = write("b");
        let generation = |record: &Value| record["generation"].as_u64().expect("a number");
        assert_eq!(generation(&second), generation(&first) + 1);
        assert_eq!(second["labels"][0], "b");
    }

    #[test]
    fn a_record_that_would_be_refused_is_shown_but_never_in_the_place_of_a_good_one() {
        let room = Room::new();
        let bad = "<ssh-key>two\tlines</ssh-key><label>bad</label>";
        room.hook("start begin -", bad, "vnet7").expect_err("no record");
        assert_eq!(read(&room.record()).expect("there for the agent to refuse")["labels"][0], "bad");
        room.hook("start begin -", "<label>good</label>", "vnet7").expect("hooked");
        room.hook("reconnect begin -", bad, "vnet7").expect_err("no record");
        assert_eq!(read(&room.record()).expect("a record")["labels"][0], "good");
        room.hook("reconnect begin -", "<nonsense/>", "vnet7").expect_err("not our form");
        assert_eq!(read(&room.record()).expect("a record")["labels"][0], "good");
    }

    #[test]
    fn a_domain_that_asks_no_longer_has_no_record_any_more() {
        let room = Room::new();
        room.hook("start begin -", "", "vnet7").expect("hooked").expect("a record");
        let bare = format!("<domain><name>web</name><uuid>{UUID}</uuid></domain>");
        assert_eq!(room.feed("reconnect begin -", &bare).expect("hooked"), None);
    }

    #[test]
    fn what_comes_before_taps_have_names_takes_no_port_away() {
        let room = Room::new();
        let early = room.hook("prepare begin -", "", "vnet7").expect("hooked").expect("a record");
        assert!(early["network"]["nics"][0]["port"].is_null());
        let started = room.hook("start begin -", "", "vnet7").expect("hooked");
        assert_eq!(room.hook("migrate begin -", "", "vnet7").expect("hooked"), started);
        let fixed = Room::new().hook("prepare begin -", "", "tap-web").expect("hooked").expect("a record");
        assert_eq!(fixed["network"]["nics"][0]["port"]["ifname"], "tap-web");
    }

    #[test]
    fn the_end_of_a_domain_needs_nothing_of_it_but_its_uuid() {
        let room = Room::new();
        room.hook("start begin -", "", "vnet7").expect("hooked").expect("a record");
        assert_eq!(room.hook("release end -", "<nonsense/>", "vnet7").expect("hooked"), None);
    }

    #[test]
    fn only_a_hooks_command_line_is_answered_with_silence() {
        let cases = [
            ("xdp-imds libvirt-hook --help", true),
            ("xdp-imds libvirt-hook", true),
            ("xdp-imds check libvirt-hook", false),
            ("xdp-imds", false),
        ];
        for (line, expected) in cases {
            assert_eq!(is_asked(line.split(' ').map(OsString::from)), expected, "{line}");
        }
    }
}
