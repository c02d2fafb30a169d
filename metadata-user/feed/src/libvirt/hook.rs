//! `xdp-imds libvirt-hook`, the program that libvirt runs at each event of a domain.
//!
//! The program never writes to standard output, because libvirt would take that for a new domain definition. It always
//! exits with 0: any other code keeps a domain from starting, and kills a running one when libvirtd restarts. The
//! host's log has its actions and errors. Standard error also says what needed no action, for anyone who runs it by
//! hand.
//!
//! What it refuses is also in a file beside the record, from which the agent's status has it. The next good version
//! of the record, or the end of the domain, removes that file.

use clap::Args;
use metadata_common::printable::Printable;
use metadata_common::run::{DEFAULT_RUN, SOCKET};
use metadata_content::record::{Record, RecordLimits, Warning};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{Read, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use super::domain::{Composition, LibvirtDomain, SkippedInterface, TapNames, shown};
use super::{DEFAULT_FILES, DIRECTORY, LibvirtError, NAMESPACE, XML_BYTES, domain, io_error, remedy};
use crate::directory::{REFUSAL, REFUSAL_BYTES, REFUSED_VM};
use crate::record_part;
use crate::state::private_file;

/// Longest run of the hook; the domain waits for it.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The widest limits of a record. The agent's configuration decides how much of them applies.
const LIMITS: RecordLimits = RecordLimits {
    metadata_keys: RecordLimits::METADATA_KEYS_MOST,
    metadata_chars: RecordLimits::METADATA_CHARS_MOST,
    ..RecordLimits::DEFAULT
};

/// The verb on the command line.
pub const VERB: &str = "libvirt-hook";

/// libvirt's arguments, and the directories.
#[derive(Args, Clone, Debug)]
pub struct HookArgs {
    /// The agent's run directory; the record goes to hook.d in it.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_RUN)]
    pub run: PathBuf,
    /// The directory with parts of records: UUID.yaml for a domain, defaults.yaml for all.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_FILES)]
    pub files: PathBuf,
    /// Make a record for every domain, even without metadata or a file.
    #[arg(long)]
    pub every_domain: bool,
    /// The domain's name.
    #[arg(value_name = "GUEST")]
    pub guest: OsString,
    /// The event: prepare, start, started, stopped, release, migrate, reconnect, …
    #[arg(value_name = "OPERATION")]
    pub operation: OsString,
    /// Whether the event begins or ends.
    #[arg(value_name = "SUBOPERATION")]
    pub suboperation: OsString,
    /// The reason, or `-`.
    #[arg(value_name = "EXTRA")]
    pub extra: Vec<OsString>,
}

/// The hook's action for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Write or update the domain's record.
    Write(TapNames),
    /// Remove the record.
    Remove,
    /// Do nothing.
    Nothing,
}

impl Action {
    /// The action for an event. libvirt creates taps between `prepare` and `start`, and they remain when libvirtd
    /// restarts (`reconnect`). `stopped` and `release` both end a domain, in an order that depends on libvirt's
    /// version.
    fn of(operation: &str, suboperation: &str) -> Self {
        match (operation, suboperation) {
            ("prepare" | "migrate", "begin") => Self::Write(TapNames::ToBeMade),
            ("start" | "started" | "reconnect", "begin") => Self::Write(TapNames::Made),
            ("stopped" | "release", "end") => Self::Remove,
            _ => Self::Nothing,
        }
    }
}

/// True if the command line starts the hook, even with invalid arguments. The program then prints nothing.
#[must_use]
pub fn is_asked(words: impl IntoIterator<Item = OsString>) -> bool {
    words.into_iter().nth(1).is_some_and(|verb| verb == VERB)
}

/// Runs the hook's action and logs the result. Ends the process after [`TIMEOUT`].
pub fn run(arguments: &HookArgs) {
    let log = Log::new(Path::new(SYSLOG), &arguments.guest.to_string_lossy());
    let watched = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(TIMEOUT);
        std::process::exit(0);
    });
    if let Err(error) = watched {
        log.say(Severity::Warning, &format!("cannot limit the time of this hook: {error}"));
    }
    let done = catch_unwind(AssertUnwindSafe(|| work(arguments, &mut io::stdin().lock(), &log)));
    match done {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            let advice = advice(&error, &arguments.guest.to_string_lossy());
            log.say(Severity::Error, &format!("its metadata was not updated: {error}{advice}"));
        }
        Err(_) => log.say(
            Severity::Error,
            "its metadata was not updated: the hook failed; please report this fault of xdp-imds",
        ),
    }
}

/// What to do about an error in the metadata of a domain. Its name is repeated only if a shell takes it as it is.
fn advice(error: &LibvirtError, name: &str) -> String {
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && name.starts_with(|first: char| first.is_ascii_alphanumeric());
    match error {
        LibvirtError::Io { .. } | LibvirtError::Xml { .. } => String::new(),
        _ => format!("; {}", remedy(if is_plain { name } else { "UUID" })),
    }
}

/// Reads the domain, and writes or removes its record.
fn work(arguments: &HookArgs, input: &mut impl Read, log: &Log) -> Result<(), LibvirtError> {
    let words = [&arguments.operation, &arguments.suboperation].map(|word| word.to_string_lossy());
    let action = Action::of(&words[0], &words[1]);
    if action == Action::Nothing {
        log.print(&format!("nothing is to be done at `{} {}`", Printable(&words[0]), Printable(&words[1])));
        return Ok(());
    }
    let mut bytes = Vec::new();
    // The limit and one byte more, so that the parser detects excess.
    let read = input.take(XML_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| io_error(Path::new("standard input"), "a domain's XML", error))?;
    let room = arguments.run.join(DIRECTORY);
    match action {
        Action::Write(taps) => {
            let written = LibvirtDomain::parse(&bytes, taps)
                .and_then(|domain| write(&domain, taps, &room, arguments, log));
            // XML whose domain cannot be told leaves its reason in the log alone.
            if let (Err(error), Ok((name, uuid))) = (&written, domain::named(&bytes)) {
                refuse(&room, &name, &uuid, error, log);
            }
            written
        }
        Action::Remove => {
            let path = path(&room, &domain::uuid(&bytes)?);
            accept(&path)?;
            if !remove(&path, log)? {
                log.print("it had no record");
            }
            Ok(())
        }
        Action::Nothing => Ok(()),
    }
}

/// The path of a domain's record.
fn path(room: &Path, uuid: &str) -> PathBuf {
    room.join(format!("{uuid}.json"))
}

/// Leaves the reason of a refusal beside the record. The agent publishes it as a problem of the domain.
fn refuse(room: &Path, name: &str, uuid: &str, error: &LibvirtError, log: &Log) {
    // The UUID needs no quotes in a shell, whatever the name.
    let remedy = format!("; {}\n", remedy(uuid));
    let mut text = format!("{REFUSED_VM}{}: {error}", shown(name));
    text.truncate(text.floor_char_boundary(REFUSAL_BYTES - remedy.len()));
    text.push_str(&remedy);
    if let Err(error) = put(room, &path(room, uuid).with_extension(REFUSAL), &text) {
        log.say(Severity::Warning, &format!("`xdp-imds status` will not show this: {error}"));
    }
}

/// Removes what [`refuse`] left.
fn accept(path: &Path) -> Result<(), LibvirtError> {
    let path = path.with_extension(REFUSAL);
    let removed = private_file::remove(&path);
    removed.map(drop).map_err(|error| io_error(&path, "a file that can be removed", error))
}

/// Writes the record of a domain, or removes one that its metadata no longer asks for.
fn write(
    domain: &LibvirtDomain,
    taps: TapNames,
    room: &Path,
    arguments: &HookArgs,
    log: &Log,
) -> Result<(), LibvirtError> {
    let path = path(room, &domain.uuid);
    let Some(composition) = Composition::read(domain, &arguments.files, arguments.every_domain)? else {
        accept(&path)?;
        if !remove(&path, log)? {
            let file = arguments.files.join(format!("{}.yaml", domain.uuid));
            let text = format!(
                "has no record, because its <metadata> has no <instance> of {NAMESPACE} and there is no {}",
                file.display()
            );
            // The host's log says it at each start: else nobody could tell such a domain from one whose libvirt does not
            // run the hook.
            match taps {
                TapNames::ToBeMade => log.say(Severity::Info, &text),
                TapNames::Made => log.print(&text),
            }
        }
        return Ok(());
    };
    let mut record = composition.record();
    // Without tap names there is no port, and an existing record may have them.
    if !has_port(&record) && path.exists() {
        composition.check(&LIMITS, &0.into())?;
        accept(&path)?;
        log.print("its record stays unchanged until its taps have names");
        return Ok(());
    }
    let old = read(&path);
    let generation = old.as_ref().and_then(|old| old["generation"].as_u64());
    record["generation"] = generation.unwrap_or(0).into();
    let is_new = old.as_ref() != Some(&record);
    if is_new {
        record["generation"] = generation.map_or_else(now, |generation| generation + 1).into();
    }
    let checked = composition.check(&LIMITS, &record["generation"]);
    // An invalid record still goes to the agent, which reports it, unless a good one would be lost.
    if is_new && (checked.is_ok() || old.is_none()) {
        let text = format!("{record:#}\n");
        put(room, &path, &text).map_err(|error| io_error(&path, "a record that can be written", error))?;
    }
    if checked.is_ok() && has_port(&record) && lacks_agent(&arguments.run) {
        let run = arguments.run.display();
        let text =
            format!("no agent runs in {run}, so that nothing is served: run `systemctl start xdp-imds`");
        log.say(Severity::Warning, &text);
    }
    let (record, warnings) = checked?;
    accept(&path)?;
    let exposed = composition.exposed.iter().map(|(path, mode)| {
        let path = path.display();
        format!("{path} has mode {mode:04o}, and parts of records hold secrets: run `chmod 0640 {path}`")
    });
    let skipped = domain.skipped.iter();
    let skipped =
        skipped.map(|SkippedInterface { interface, reason }| format!("{interface} is not served: {reason}"));
    let warnings = warnings.iter().map(Warning::to_string).chain(skipped).chain(exposed);
    let is = if is_new { "has a record" } else { "has an unchanged record" };
    let described = described(is, &record, domain.skipped.is_empty());
    // For anyone who has just changed its metadata with `virsh edit`, and wonders.
    let hint = if is_new { String::new() } else { format!("; {}", remedy(&domain.uuid)) };
    tell(is_new, &format!("{described}{hint}"), warnings, log);
    Ok(())
}

/// What became of a record, and where it is served.
fn described(is: &str, record: &Record, may_have_taps: bool) -> String {
    let ports = record.network.nics.iter().filter_map(|nic| nic.port.as_ref());
    let taps: Vec<_> = ports.map(|port| port.ifname.to_string()).collect();
    match &taps[..] {
        [] if may_have_taps => format!("{is}, and waits for its taps"),
        [] => format!("{is}, and has no tap on this host"),
        taps => format!("{is} for {}", taps.join(", ")),
    }
}

/// Reports a record. The host's log gets each version once.
fn tell(is_new: bool, text: &str, warnings: impl Iterator<Item = String>, log: &Log) {
    let say = |severity, text: &str| if is_new { log.say(severity, text) } else { log.print(text) };
    say(Severity::Info, text);
    for warning in warnings {
        say(Severity::Warning, &warning);
    }
}

/// True if no agent serves what is in this run directory. A socket that this program may not enter tells nothing.
fn lacks_agent(run: &Path) -> bool {
    let connected = UnixStream::connect(run.join(SOCKET));
    connected.is_err_and(|error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    })
}

fn has_port(record: &Value) -> bool {
    let nics = record.pointer("/network/nics").and_then(Value::as_array);
    nics.is_some_and(|nics| nics.iter().any(|nic| !nic["port"].is_null()))
}

/// The existing record, if it is readable.
fn read(path: &Path) -> Option<Value> {
    let bytes = record_part::read(path, LIMITS.record_bytes).ok()??;
    serde_json::from_slice(&bytes).ok()
}

/// Removes a record. Returns false if there is none.
fn remove(path: &Path, log: &Log) -> Result<bool, LibvirtError> {
    let removed = private_file::remove(path);
    let removed = removed.map_err(|error| io_error(path, "a record that can be removed", error))?;
    if removed {
        log.say(Severity::Info, "its record is gone");
    }
    Ok(removed)
}

/// Writes a record into the directory, creating it if needed. The directory's owner gets the file.
fn put(room: &Path, path: &Path, text: &str) -> io::Result<()> {
    private_file::make_directory(room)?;
    let owner = fs::metadata(room)?;
    private_file::replace_for(path, text.as_bytes(), Some((owner.uid(), owner.gid())))
}

/// The first generation of a new record: the Unix time, which exceeds the generations of the domain's removed records.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs())
}

// The host's log. libvirt shows a hook's standard error only at debug level.

/// The datagram socket of syslog and the journal (RFC 3164).
const SYSLOG: &str = "/dev/log";

/// Most bytes of a line: RFC 3164 §4.1 limits a packet to 1024 with its header.
const LINE: usize = 960;

/// The facility `LOG_DAEMON` (syslog(3)).
const DAEMON: u8 = 3 << 3;

/// The severity in syslog's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The operator needs to act.
    Error = 3,
    /// A part of the metadata is not served.
    Warning = 4,
    /// Normal operation.
    Info = 6,
}

/// A log on standard error and in syslog. It ignores its own failures.
#[derive(Debug)]
pub struct Log {
    socket: Option<(UnixDatagram, PathBuf)>,
    guest: String,
}

impl Log {
    /// Opens a log of the hook's work for `guest`.
    #[must_use]
    pub fn new(socket: &Path, guest: &str) -> Self {
        // A reader that does not drain the socket must not block a domain.
        let opened = UnixDatagram::unbound().and_then(|own| own.set_nonblocking(true).map(|()| own));
        Self { socket: opened.ok().map(|own| (own, socket.to_owned())), guest: shown(guest) }
    }

    /// Prints a text for anyone who runs the hook by hand, one message for each line. The host's log does not get it,
    /// because libvirt reports every domain again whenever it restarts.
    pub fn print(&self, text: &str) {
        for line in self.lines(text) {
            _ = writeln!(io::stderr(), "xdp-imds: {line}");
        }
    }

    fn lines(&self, text: &str) -> impl Iterator<Item = String> {
        text.lines().filter(|line| !line.is_empty()).map(|line| {
            let mut line = format!("{}: {}", self.guest, Printable(line));
            line.truncate(line.floor_char_boundary(LINE));
            line
        })
    }

    /// Logs a text, one message for each line.
    pub fn say(&self, severity: Severity, text: &str) {
        for line in self.lines(text) {
            let written = writeln!(io::stderr(), "xdp-imds: {line}");
            let sent = self.socket.as_ref().map(|(own, socket)| {
                let priority = DAEMON | severity as u8;
                let id = std::process::id();
                own.send_to(format!("<{priority}>xdp-imds-hook[{id}]: {line}").as_bytes(), socket)
            });
            drop((written, sent));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::*;

    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

    struct Room(tempfile::TempDir);

    impl Room {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn record(&self) -> PathBuf {
            self.0.path().join(format!("run/{DIRECTORY}/{UUID}.json"))
        }

        /// Runs the hook for an operation on a domain with this tap and these children of our element.
        fn hook(&self, words: &str, children: &str, tap: &str) -> Result<Option<Value>, LibvirtError> {
            let element = format!("<instance xmlns='{}'>{children}</instance>", NAMESPACE);
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
            let arguments = HookArgs {
                run: self.0.path().join("run"),
                files: self.0.path().join("files"),
                every_domain: false,
                guest: "web".into(),
                operation: words.next().expect("an operation"),
                suboperation: words.next().expect("a suboperation"),
                extra: words.collect(),
            };
            work(&arguments, &mut xml.as_bytes(), &Log::new(&self.0.path().join("log"), "web"))?;
            Ok(read(&self.record()))
        }
    }

    #[test]
    fn each_event_of_a_domain_writes_removes_or_keeps_its_record() {
        let (made, to_be_made) = (Action::Write(TapNames::Made), Action::Write(TapNames::ToBeMade));
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
    fn a_records_generation_grows_only_with_its_content() {
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
    fn an_invalid_record_is_written_but_never_over_a_good_one() {
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
    fn what_is_refused_stays_beside_the_record_until_it_is_mended() {
        let room = Room::new();
        let refusal = || fs::read_to_string(room.record().with_extension(REFUSAL)).ok();
        let file = room.0.path().join(format!("files/{UUID}.yaml"));
        fs::create_dir(room.0.path().join("files")).expect("a directory");
        let bad_file = |text: &str| fs::write(&file, text).expect("written");
        type Mend = (&'static str, fn(&Room));
        let mend: [Mend; 3] = [
            ("its good version", |room| {
                room.hook("reconnect begin -", "<label>good</label>", "vnet7").map(drop).expect("hooked");
            }),
            ("its end, whatever its metadata", |room| {
                room.hook("release end -", "<nonsense/>", "vnet7").map(drop).expect("hooked");
            }),
            ("no metadata", |room| {
                let bare = format!("<domain><name>web</name><uuid>{UUID}</uuid></domain>");
                room.feed("reconnect begin -", &bare).map(drop).expect("hooked");
            }),
        ];
        // Also beside a record that is already there, which stays.
        for has_record in [false, true] {
            for (by, mend) in mend {
                for (children, text, said) in [
                    ("<nonsense/>", None, "nonsense"),
                    ("<ssh-key>two\tlines</ssh-key>", None, "ssh_keys"),
                    ("<label>good</label>", Some("- no mapping\n"), "files/7c0f1a52"),
                ] {
                    if has_record {
                        room.hook("start begin -", "<label>good</label>", "vnet7").expect("hooked");
                    }
                    text.map(bad_file).unwrap_or_default();
                    room.hook("reconnect begin -", children, "vnet7").expect_err("refused");
                    room.hook("reconnect begin -", children, "vnet7").expect_err("refused again");
                    let reason = refusal().expect("a reason");
                    assert!(
                        reason.starts_with("domain web: ") && reason.contains(said),
                        "{children} {text:?}: {reason}"
                    );
                    let edit = format!("`virsh metadata {UUID} {NAMESPACE} --key imds --live --edit`");
                    assert!(reason.contains(&edit) && !reason.contains("with `virsh edit`"), "{reason}");
                    assert!(reason.contains(&format!("virsh dumpxml {UUID} | ")), "{reason}");
                    let mode = fs::metadata(room.record().with_extension(REFUSAL)).expect("there").mode();
                    assert_eq!(mode & 0o7777, 0o600);
                    fs::remove_file(&file).ok();
                    mend(&room);
                    assert_eq!(refusal(), None, "{by} does not mend {children}");
                }
            }
        }
    }

    #[test]
    fn a_refusal_is_bounded_whatever_a_domain_is_called() {
        let room = Room::new();
        let name = "ä".repeat(10_000);
        let xml = format!(
            "<domain><name>{name}</name><uuid>{UUID}</uuid><metadata><i:instance xmlns:i='{NAMESPACE}'>\
             <i:{name}/></i:instance></metadata></domain>"
        );
        room.feed("start begin -", &xml).expect_err("refused");
        let text = fs::read(room.record().with_extension(REFUSAL)).expect("a reason");
        assert!(text.len() <= REFUSAL_BYTES, "{} bytes", text.len());
        let error = io_error(Path::new(&name), "nothing", io::ErrorKind::NotFound.into());
        refuse(
            &room.0.path().join("run").join(DIRECTORY),
            &name,
            UUID,
            &error,
            &Log::new(Path::new("/no"), "web"),
        );
        let text = fs::read_to_string(room.record().with_extension(REFUSAL)).expect("UTF-8");
        assert!(
            text.len() <= REFUSAL_BYTES && text.ends_with("reconnect begin -`\n"),
            "{} bytes",
            text.len()
        );
    }

    #[test]
    fn an_invalid_record_that_is_there_is_refused_again() {
        let room = Room::new();
        let bad = "<ssh-key>two\tlines</ssh-key>";
        for _ in 0..2 {
            room.hook("start begin -", bad, "vnet7").expect_err("no record");
        }
    }

    #[test]
    fn a_domain_that_drops_its_metadata_loses_its_record() {
        let room = Room::new();
        room.hook("start begin -", "", "vnet7").expect("hooked").expect("a record");
        let bare = format!("<domain><name>web</name><uuid>{UUID}</uuid></domain>");
        assert_eq!(room.feed("reconnect begin -", &bare).expect("hooked"), None);
    }

    #[test]
    fn an_event_before_the_taps_have_names_removes_no_port() {
        let room = Room::new();
        let early = room.hook("prepare begin -", "", "vnet7").expect("hooked").expect("a record");
        assert!(early["network"]["nics"][0]["port"].is_null());
        let started = room.hook("start begin -", "", "vnet7").expect("hooked");
        assert_eq!(room.hook("migrate begin -", "", "vnet7").expect("hooked"), started);
        let refusal = room.record().with_extension(REFUSAL);
        for (children, is_refused) in
            [("<nonsense/>", true), ("<ssh-key>two\tlines</ssh-key>", true), ("", false)]
        {
            let hooked = room.hook("migrate begin -", children, "vnet7");
            assert_eq!((hooked.is_err(), refusal.exists()), (is_refused, is_refused), "{children}");
        }
        let fixed = Room::new().hook("prepare begin -", "", "tap-web").expect("hooked").expect("a record");
        assert_eq!(fixed["network"]["nics"][0]["port"]["ifname"], "tap-web");
    }

    #[test]
    fn the_log_says_served_of_no_tap_and_warns_if_no_agent_runs() {
        let room = Room::new();
        let syslog = UnixDatagram::bind(room.0.path().join("log")).expect("a socket");
        syslog.set_nonblocking(true).expect("set");
        let said = |words: &str, label: &str| {
            room.hook(words, &format!("<label>{label}</label>"), "vnet7").expect("hooked").expect("a record");
            let mut bytes = [0; 2_048];
            let mut lines = String::new();
            while let Ok(len) = syslog.recv(&mut bytes) {
                lines.push_str(&String::from_utf8_lossy(&bytes[..len]));
                lines.push('\n');
            }
            lines
        };
        let lack = "no agent runs in ";
        let early = said("prepare begin -", "a");
        assert!(early.contains("waits for its taps") && !early.contains(lack), "{early}");
        let alone = said("start begin -", "a");
        assert!(alone.contains("has a record for vnet7") && !alone.contains(", served"), "{alone}");
        assert!(alone.contains(lack) && alone.contains("`systemctl start xdp-imds`"), "{alone}");
        let path = room.0.path().join("run").join(SOCKET);
        let agent = UnixListener::bind(&path).expect("a socket");
        let attended = said("reconnect begin -", "b");
        assert!(attended.contains("has a record for vnet7") && !attended.contains(lack), "{attended}");
        drop(agent);
        assert!(said("reconnect begin -", "c").contains(lack), "the socket of an ended agent");
    }

    #[test]
    fn the_end_of_a_domain_needs_only_its_uuid() {
        let room = Room::new();
        room.hook("start begin -", "", "vnet7").expect("hooked").expect("a record");
        assert_eq!(room.hook("release end -", "<nonsense/>", "vnet7").expect("hooked"), None);
    }

    #[test]
    fn only_the_hooks_command_line_is_silent() {
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

    #[test]
    fn the_log_names_each_start_of_a_domain_without_metadata() {
        let room = Room::new();
        let syslog = UnixDatagram::bind(room.0.path().join("log")).expect("a socket");
        syslog.set_nonblocking(true).expect("set");
        let bare = format!("<domain><name>web</name><uuid>{UUID}</uuid></domain>");
        for (words, is_logged) in
            [("prepare begin -", true), ("start begin -", false), ("reconnect begin -", false)]
        {
            assert_eq!(room.feed(words, &bare).expect("hooked"), None);
            let mut bytes = [0; 2_048];
            let line = syslog.recv(&mut bytes).map(|len| String::from_utf8_lossy(&bytes[..len]).into_owned());
            assert_eq!(line.is_ok_and(|line| line.contains("has no record, because")), is_logged, "{words}");
        }
    }

    #[test]
    fn the_log_says_how_to_change_a_running_domain_by_its_name_if_a_shell_takes_it() {
        let refused = LibvirtError::Instance { line: 1, expected: "a".into(), found: "b".into() };
        let xml = LibvirtError::Xml { expected: "a".into(), found: "b".into() };
        for (error, name, said) in [
            (
                &refused,
                "web-1",
                "`virsh metadata web-1 https://xdp-imds.dev/libvirt/1 --key imds --live --edit`",
            ),
            (&refused, "a b; reboot", "`virsh metadata UUID https"),
            (&refused, "-x", "virsh dumpxml UUID | "),
            (&xml, "web-1", ""),
        ] {
            let advice = advice(error, name);
            assert!(advice.contains(said) && advice.is_empty() == said.is_empty(), "{name}: {advice}");
        }
    }

    #[test]
    fn each_line_is_one_message_with_its_severity() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("log");
        let syslog = UnixDatagram::bind(&path).expect("a socket");
        let log = Log::new(&path, "we\nb");
        log.say(Severity::Error, &format!("one\n\n{}", "ü".repeat(1_000)));
        let id = std::process::id();
        let mut heard = [0; 4_096];
        let mut hear = || {
            let len = syslog.recv(&mut heard).expect("a message");
            String::from_utf8(heard[..len].to_vec()).expect("UTF-8")
        };
        assert_eq!(hear(), format!("<27>xdp-imds-hook[{id}]: we\\nb: one"));
        let long = hear();
        assert!(long.len() < 1_024 && long.ends_with('ü'), "{} bytes", long.len());
    }

    #[test]
    fn a_log_ignores_its_own_failures() {
        Log::new(Path::new("/nonexistent/log"), "web").say(Severity::Info, "nothing");
    }
}
