//! `xdp-imds register`, `ls`, `get`, `rm` and `clear`.

mod lookup;

use anyhow::{Context as _, bail};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use metadata_common::printable::{Printable, printable};
use metadata_common::time;
use metadata_content::record::{Credential, Record, RecordLimits};
use metadata_content::source::RecordSource;
use metadata_control::instances::{
    self, Instance, InstancePort, InstanceVm, RegistrationConditions, RegistrationError, RegistrationOutcome,
    is_name,
};
use metadata_control::order::natural;
use metadata_control::status::{ClientError, GuestState, InstanceState};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(super) use lookup::{find, is_changeable};

use super::options::Agent;
use super::{Exit, ExitError, options};
use crate::output;
use lookup::{not_removable, nothing_written, or_unknown};

/// What an instance without a port lacks.
const UNPLACED: &str = "none: name the NIC's `port` in the record, or the port of its MAC with `ports` of the \
                        configuration or --port";
/// Pause before the next request to an agent that is busy.
const PAUSE: Duration = Duration::from_millis(200);

/// The options of `xdp-imds register`.
#[derive(clap::Args, Debug)]
pub struct Register {
    /// The VM's record in YAML or JSON; `-` is standard input.
    ///
    /// Files that it names in `source` are read from its directory.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// The instance's name in the API [default: the VM's name in the record].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Wait until all ports of the VM are attached; it can boot then.
    ///
    /// If the agent is still starting, waits for it first.
    #[arg(long)]
    wait: bool,
    /// Maximum wait, up to 60s.
    ///
    /// Seconds (`5`), or a number with a unit (`5s`, `500ms`, `1m`).
    #[arg(long, value_name = "TIME", default_value = "5s", requires = "wait", value_parser = timeout)]
    timeout: Duration,
    /// Register only if no instance has this name.
    #[arg(long, conflicts_with = "if_match")]
    new: bool,
    /// Replace only an instance with this tag, as `get` prints it, with or without its quotes.
    #[arg(long, value_name = "ETAG", value_parser = entity_tag)]
    if_match: Option<String>,
    #[command(flatten)]
    common: CommonArgs,
}

/// Reads a [`RecordSource`] by its name.
pub(super) fn source_parser() -> impl TypedValueParser<Value = RecordSource> {
    let word = |source: RecordSource| {
        let title = source.title().split_at(1);
        let help = format!("{}{}; a record's name is {}", title.0.to_uppercase(), title.1, source.names());
        PossibleValue::new(source.name()).help(help)
    };
    let words = PossibleValuesParser::new(RecordSource::ALL.map(word));
    words.map(|name| RecordSource::of(&name).unwrap_or_default())
}

/// The options of `xdp-imds ls`.
#[derive(clap::Args, Debug)]
pub struct LsArgs {
    /// List only instances of this source.
    #[arg(long, value_name = "SOURCE", value_parser = source_parser())]
    source: Option<RecordSource>,
    #[command(flatten)]
    common: CommonArgs,
}

/// The options of `xdp-imds get`.
#[derive(clap::Args, Debug)]
pub struct GetArgs {
    /// The instance's name, `SOURCE/NAME`, or the name, UUID, port or MAC of its VM.
    #[arg(value_name = "NAME")]
    name: String,
    /// The instance's source [default: `api`, or the only one that has the name].
    #[arg(long, value_name = "SOURCE", value_parser = source_parser())]
    source: Option<RecordSource>,
    #[command(flatten)]
    common: CommonArgs,
}

/// The options of `xdp-imds rm`.
#[derive(clap::Args, Debug)]
pub struct Rm {
    /// The instance's name.
    #[arg(value_name = "NAME")]
    name: String,
    /// Remove only an instance with this tag, as `get` prints it, with or without its quotes.
    #[arg(long, value_name = "ETAG", value_parser = entity_tag)]
    if_match: Option<String>,
    /// Exit with 0 even if there is no such instance.
    #[arg(long, conflicts_with = "if_match")]
    force: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// The options of `xdp-imds clear`.
#[derive(clap::Args, Debug)]
pub struct Clear {
    #[command(flatten)]
    vm: VmArgs,
}

/// The VM that a verb changes, and its agent.
#[derive(clap::Args, Debug)]
pub(super) struct VmArgs {
    /// The instance's name or `SOURCE/NAME`; where no tenant chooses them, also the name, UUID, port or MAC of its VM.
    #[arg(value_name = "NAME")]
    pub(super) name: String,
    /// The instance's source [default: `api`, or the only one that has the name].
    #[arg(long, value_name = "SOURCE", value_parser = source_parser())]
    pub(super) source: Option<RecordSource>,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

/// The options of all these verbs.
#[derive(clap::Args, Debug)]
pub(super) struct CommonArgs {
    #[command(flatten)]
    pub(super) agent: Agent,
    /// Print JSON, for problems too.
    #[arg(long)]
    json: bool,
}

/// Longest wait, as of the API.
const TIMEOUT_MOST: Duration = Duration::from_secs(60);

fn timeout(text: &str) -> Result<Duration, String> {
    time::span_within(text, Duration::ZERO..=TIMEOUT_MOST)
}

/// An entity tag in the form of HTTP (RFC 9110 section 8.8.3). Shells take its quotes away.
fn entity_tag(text: &str) -> Result<String, String> {
    let text = text.trim();
    let is_whole = text == "*" || text.ends_with('"') && (text.starts_with('"') || text.starts_with("W/\""));
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"');
    match text {
        text if is_whole => Ok(text.into()),
        text if is_plain => Ok(format!("\"{text}\"")),
        _ => Err("expected a tag as `xdp-imds get` prints it, such as \"0a1b\"".into()),
    }
}

impl Register {
    /// Registers a VM. Returns the exit code.
    ///
    /// # Errors
    /// The record cannot be read, or `out` cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        let record = read(&self.file)?;
        let name = self.name.clone().unwrap_or_else(|| record.vm.name.to_string());
        if !is_name(&name) {
            let text = format!(
                "`{}` cannot be the name of an instance: give another with --name, of letters, digits and `-._~:@`, \
                 in parts joined by `/`, none of them `.` or `..`",
                Printable(&name)
            );
            return Err(ExitError::new(Exit::Usage, text).into());
        }
        let json = record.to_json().context("the record")?;
        let run = self.common.agent.run()?;
        let until = Instant::now() + self.timeout;
        let done = loop {
            let wait = self.wait.then(|| until.saturating_duration_since(Instant::now()));
            let matches = self.if_match.as_deref();
            let conditions = RegistrationConditions { matches, is_new: self.new, wait };
            match instances::put(&run, &name, &json, &conditions) {
                // The agent limits the number of requests that wait. With --wait, one that is still starting will
                // listen.
                Err(failure)
                    if Instant::now() + PAUSE < until
                        && (failure.status() == Some(503) || self.wait && is_no_agent(&failure)) =>
                {
                    std::thread::sleep(PAUSE);
                }
                done => break done,
            }
        };
        // An agent of an earlier release does not say what it did.
        let done = done.map(|(instance, created)| Instance {
            change: instance.change.or(created.then_some(RegistrationOutcome::Registered)),
            ..instance
        });
        self.common.finish(out, done, |instance, out| {
            let done = instance.change.unwrap_or(RegistrationOutcome::Replaced).words();
            writeln!(out, "{}: {done}, {}", Printable(&name), instance.state.name())?;
            ports(&instance.ports, out)
        })
    }
}

/// True if no agent listens.
fn is_no_agent(failure: &RegistrationError) -> bool {
    matches!(failure, RegistrationError::Client(ClientError::NoAgent { .. }))
}

impl LsArgs {
    /// Lists instances. Returns the exit code.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        let listed = instances::list(&self.common.agent.run()?, self.source);
        self.common.finish(out, listed, |instances, out| table(instances, out))
    }
}

impl GetArgs {
    /// Shows an instance. Returns the exit code.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        let run = self.common.agent.run()?;
        let found = find(&run, self.source, &self.name, Instance::is_called)
            .and_then(|(source, name)| or_unknown(instances::look(&run, source, &name), Some(source), &name));
        self.common.finish(out, found, one)
    }
}

/// The outcome of `rm`, as JSON.
#[derive(Debug, serde::Serialize)]
struct Removal<'a> {
    name: &'a str,
    source: RecordSource,
    removed: bool,
}

/// The outcome of `clear`, as JSON.
#[derive(Debug, serde::Serialize)]
struct Clearance {
    name: String,
    source: RecordSource,
    cleared: bool,
}

impl Rm {
    /// Removes an instance. Returns the exit code.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        let (name, source) = (&*self.name, RecordSource::Api);
        // Without a condition, the answer would not say whether there was anything to remove.
        let conditions = RegistrationConditions {
            matches: Some(self.if_match.as_deref().unwrap_or("*")),
            ..RegistrationConditions::default()
        };
        let run = self.common.agent.run()?;
        let removed = if is_name(name) {
            instances::remove(&run, name, &conditions)
        } else {
            // Nothing can be registered by this name; whether an agent runs matters all the same.
            instances::list(&run, Some(source)).and(Err(not_removable(&run, name)))
        };
        let removed = match removed {
            Ok(()) => Ok(true),
            // The condition that failed is this verb's, not its user's.
            Err(failure) if self.if_match.is_none() && matches!(failure.status(), Some(404 | 412)) => {
                if self.force { Ok(false) } else { Err(not_removable(&run, name)) }
            }
            Err(failure) => Err(failure),
        };
        let removed = removed.map(|removed| Removal { name, source, removed });
        self.common.finish(out, removed, |Removal { name, removed, .. }, out| {
            let done = if *removed { "removed" } else { "nothing to remove, no instance has this name" };
            writeln!(out, "{}: {done}", Printable(name))
        })
    }
}

impl Clear {
    /// Removes what the guest of an instance wrote. Returns the exit code.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        let VmArgs { name, source, common } = &self.vm;
        let run = common.agent.run()?;
        let cleared = find(&run, *source, name, is_changeable).and_then(|(source, name)| {
            instances::clear(&run, source, &name).map_err(|failure| {
                if failure.status() == Some(404) { nothing_written(source, &name) } else { failure }
            })?;
            Ok(Clearance { name, source, cleared: true })
        });
        common.finish(out, cleared, |Clearance { name, .. }, out| {
            writeln!(out, "{}: removed what its guest wrote", Printable(name))
        })
    }
}

impl CommonArgs {
    /// Prints the outcome. Returns its exit code.
    pub(super) fn finish<T: serde::Serialize>(
        &self,
        out: &mut dyn Write,
        done: Result<T, RegistrationError>,
        print: impl FnOnce(&T, &mut dyn Write) -> io::Result<()>,
    ) -> anyhow::Result<Exit> {
        match done {
            Ok(done) if self.json => {
                serde_json::to_writer(&mut *out, &done)?;
                writeln!(out)?;
                Ok(Exit::Done)
            }
            Ok(done) => print(&done, out).map(|()| Exit::Done).map_err(Into::into),
            Err(failure) => {
                match &failure {
                    RegistrationError::Problem(problem) if self.json => {
                        serde_json::to_writer(&mut *out, problem)?;
                        writeln!(out)?;
                    }
                    failure => output::report(failure),
                }
                Ok(Exit::of_failure(&failure))
            }
        }
    }
}

/// Reads a record with the files that it names, within the largest limits that a configuration can set. The agent
/// checks the record against its own limits.
fn read(path: &Path) -> anyhow::Result<Record> {
    let limits = RecordLimits {
        metadata_keys: RecordLimits::METADATA_KEYS_MOST,
        metadata_chars: RecordLimits::METADATA_CHARS_MOST,
        ..RecordLimits::DEFAULT
    };
    let most = limits.record_bytes as u64 + 1;
    let mut text = String::new();
    if path == Path::new("-") {
        io::stdin().lock().take(most).read_to_string(&mut text).context("standard input")?;
        return parse(&limits, "-", &text);
    }
    // A pipe, as of a shell's `<(…)`, is read as standard input is: nothing is beside it.
    let is_pipe = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe {
        let reading = || format!("cannot read the record {}", path.display());
        let pipe = std::fs::File::open(path).with_context(reading)?;
        pipe.take(most).read_to_string(&mut text).with_context(reading)?;
        return parse(&limits, &path.to_string_lossy(), &text);
    }
    let loaded = options::load_file(path, &limits)?;
    if let [reason, ..] = &loaded.lacking[..] {
        bail!("{reason}; nothing was registered: correct the file, or remove `source` from the record");
    }
    let (record, warnings) = loaded.record?;
    warnings.iter().for_each(output::report);
    Ok(record)
}

/// Reads a record of a text that has no file name to tell its form.
fn parse(limits: &RecordLimits, name: &str, text: &str) -> anyhow::Result<Record> {
    let json = if text.trim_start().starts_with('{') { ".json" } else { "" };
    let record = Record::parse_within(limits, &format!("{name}{json}"), text)?.0;
    let payloads = record.payloads().into_iter().filter_map(|(_, payload)| payload?.source());
    let credentials =
        Credential::ALL.into_iter().filter_map(|credential| record.credentials.source(credential));
    if let Some(source) = payloads.chain(credentials).next() {
        bail!(
            "{name}: expected a record without `source`, found {}: a pipe is in no directory; \
             name the record's file with -f",
            source.file.display()
        );
    }
    Ok(record)
}

fn table(instances: &[Instance], out: &mut dyn Write) -> io::Result<()> {
    let head = ["NAME", "SOURCE", "STATE", "VM", "PORTS"].map(str::to_owned);
    let mut instances: Vec<_> = instances.iter().collect();
    instances
        .sort_by(|one, other| one.source.cmp(&other.source).then_with(|| natural(&one.name, &other.name)));
    let rows = instances.into_iter().map(|instance| {
        let ports: Vec<_> = instance.ports.iter().map(|port| port.port.as_str()).collect();
        let vm = instance.vm.as_ref().map(|vm| vm.name.clone()).unwrap_or_default();
        [
            instance.name.clone(),
            instance.source.name().into(),
            instance.state.name().into(),
            vm,
            ports.join(" "),
        ]
        .map(printable)
    });
    columns(std::iter::once(head).chain(rows).collect(), out)
}

/// Prints rows as a table.
pub(super) fn columns<const N: usize>(rows: Vec<[String; N]>, out: &mut dyn Write) -> io::Result<()> {
    let widths: [usize; N] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or_default());
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

/// Name and UUID of a VM, and its owner if that is not the UUID.
fn described(vm: &InstanceVm) -> String {
    let InstanceVm { name, uuid, owner } = vm;
    let has_own = !owner.is_empty() && owner != uuid;
    let owner = if has_own { format!(", owner {owner}") } else { String::new() };
    // A record that is refused may not tell the UUID.
    if uuid.is_empty() { name.clone() } else { format!("{name}, {uuid}{owner}") }
}

fn one(instance: &Instance, out: &mut dyn Write) -> io::Result<()> {
    let row = |out: &mut dyn Write, name: &str, value: &str| writeln!(out, "{name:12}{}", Printable(value));
    row(out, "name", &instance.name)?;
    row(out, "source", instance.source.name())?;
    row(out, "state", instance.state.name())?;
    for (name, value) in [
        ("shadowed by", instance.shadowed_by.as_ref().map(|by| format!("{}/{}", by.source.name(), by.name))),
        ("refused", instance.refused.clone()),
        ("vm", instance.vm.as_ref().map(described)),
        ("generation", instance.generation.map(|generation| generation.to_string())),
        ("etag", instance.etag.clone()),
        ("withheld", instance.withheld.as_ref().filter(|fields| !fields.is_empty()).map(|f| f.join(", "))),
    ] {
        value.map_or(Ok(()), |value| row(out, name, &value))?;
    }
    if instance.state == InstanceState::Unplaced {
        row(out, "ports", UNPLACED)?;
    }
    ports(&instance.ports, out)
}

fn ports(ports: &[InstancePort], out: &mut dyn Write) -> io::Result<()> {
    for (n, port) in ports.iter().enumerate() {
        let state = match (&port.held_by, port.state) {
            // What is served there is the other record.
            (Some(_), _) => "not served",
            (None, GuestState::Served) => "served",
            (None, GuestState::Awaited) => "waits for its record",
            (None, GuestState::Gone) => "404, its record has gone",
            (None, GuestState::Unbound) => "not attached",
            (None, GuestState::Unreachable | GuestState::Unserved) => "not served",
        };
        let held = port.held_by.as_ref().map(|by| format!(", held by {}/{}", by.source.name(), by.name));
        let reason = port.reason.as_ref().map(|reason| format!(", {reason}"));
        let name = if n == 0 { "ports" } else { "" };
        let more = [held, reason].into_iter().flatten().collect::<String>();
        let line = format!("{} {} {state}{more}", port.port, port.mac);
        writeln!(out, "{name:12}{}", Printable(line))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{entity_tag, one, read, source_parser, table};
    use metadata_content::source::RecordSource;
    use metadata_control::instances::{Instance, InstancePort, InstanceVm, Name};
    use metadata_control::status::{GuestState, InstanceState};

    #[test]
    fn the_command_line_knows_every_source_by_its_name() {
        let command = clap::Command::new("ls").arg(clap::Arg::new("source").value_parser(source_parser()));
        for source in RecordSource::ALL {
            let found = command.clone().try_get_matches_from(["ls", source.name()]).expect("a source");
            assert_eq!(found.get_one("source"), Some(&source));
        }
        assert!(command.try_get_matches_from(["ls", "post"]).is_err());
    }

    pub(super) fn instance() -> Instance {
        Instance {
            name: "ns/web-1".into(),
            source: RecordSource::Api,
            state: InstanceState::Contested,
            in_force: true,
            shadowed_by: None,
            refused: None,
            etag: Some("\"0a\"".into()),
            generation: Some(7),
            vm: Some(InstanceVm { name: "web-1".into(), uuid: "7c0f".into(), owner: "7c0f".into() }),
            ports: vec![InstancePort {
                port: "vnet0".into(),
                mac: "52:54:00:00:00:01".into(),
                state: GuestState::Unbound,
                held_by: Some(Name { source: RecordSource::File, name: "web.yaml".into() }),
                reason: Some("no such interface yet".into()),
            }],
            change: None,
            record: None,
            withheld: Some(vec!["user_data".into()]),
        }
    }

    #[test]
    fn instances_are_listed_by_source_and_in_the_order_of_names_for_people() {
        let of = |source, name: &str| Instance { source, name: name.into(), ..instance() };
        let files = ["vx1.yaml", "vx10.yaml", "vx2.yaml"].map(|name| of(RecordSource::File, name));
        let all: Vec<_> = [of(RecordSource::Api, "vx3")].into_iter().chain(files).collect();
        let mut out = Vec::new();
        table(&all, &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        let names: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(names, ["NAME", "vx3", "vx1.yaml", "vx2.yaml", "vx10.yaml"], "{text}");
    }

    #[test]
    fn a_record_is_read_from_a_pipe() {
        let room = tempfile::tempdir().expect("a directory");
        let pipe = room.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a pipe");
        for text in [
            "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-00000000000a, name: web, project: \
             {id: p, number: 1, account: '000000000000'}}\nhostname: {short: web}\nplacement: {region: r, zone: z}\n",
            r#"{"schema": "vmrecord/1", "generation": 1, "vm": {"uuid": "7c0f1a52-3b5e-4d1a-9d2c-00000000000a",
            "name": "web", "project": {"id": "p", "number": 1, "account": "000000000000"}},
            "hostname": {"short": "web"}, "placement": {"region": "r", "zone": "z"}}"#,
        ] {
            let record = std::thread::scope(|scope| {
                scope.spawn(|| std::fs::write(&pipe, text).expect("written"));
                read(&pipe).expect("a record")
            });
            assert_eq!(record.vm.name.to_string(), "web");
        }
    }

    #[test]
    fn a_record_whose_sources_cannot_be_read_is_not_sent() {
        let room = tempfile::tempdir().expect("a directory");
        let file = room.path().join("web.yaml");
        let text = "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-00000000000a, name: web, project: \
             {id: p, number: 1, account: '000000000000'}}\nhostname: {short: web}\nplacement: {region: r, zone: z}\n\
             credentials: {iam: {role: r, source: {file: web.iam}}}\n";
        std::fs::write(&file, text).expect("written");
        for content in [None, Some("no JSON")] {
            content
                .iter()
                .for_each(|text| std::fs::write(room.path().join("web.iam"), text).expect("written"));
            let error = read(&file).expect_err("no keys").to_string();
            assert!(error.contains("web.iam") && error.contains("nothing was registered"), "{error}");
            assert!(!error.contains("until then"), "{error}");
        }
        let error =
            super::parse(&super::RecordLimits::DEFAULT, "-", text).expect_err("no directory").to_string();
        assert!(error.contains("found web.iam") && error.contains("-f"), "{error}");
    }

    #[test]
    fn instances_are_listed_in_columns() {
        let shadowed = Instance {
            name: "web.yaml".into(),
            source: RecordSource::File,
            state: InstanceState::Shadowed,
            ports: vec![],
            ..instance()
        };
        let mut out = Vec::new();
        table(&[instance(), shadowed], &mut out).expect("written");
        let expected = "\
NAME      SOURCE  STATE      VM     PORTS
ns/web-1  api     contested  web-1  vnet0
web.yaml  file    shadowed   web-1
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn an_instance_is_printed_with_its_known_fields() {
        let mut out = Vec::new();
        one(&instance(), &mut out).expect("written");
        let expected = "\
name        ns/web-1
source      api
state       contested
vm          web-1, 7c0f
generation  7
etag        \"0a\"
withheld    user_data
ports       vnet0 52:54:00:00:00:01 not served, held by file/web.yaml, no such interface yet
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn an_instance_without_a_port_says_where_to_name_one() {
        let unplaced = Instance { state: InstanceState::Unplaced, ports: vec![], ..instance() };
        let mut out = Vec::new();
        one(&unplaced, &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        let ports: Vec<_> = text.lines().filter(|line| line.starts_with("ports ")).collect();
        assert!(ports.len() == 1 && ports[0].contains("`port` in the record"), "{text}");
    }

    #[test]
    fn a_tag_is_taken_with_and_without_its_quotes() {
        for (text, expected) in
            [("0a1b", "\"0a1b\""), ("\"0a1b\"", "\"0a1b\""), ("W/\"0a\"", "W/\"0a\""), ("*", "*")]
        {
            assert_eq!(entity_tag(text).as_deref(), Ok(expected), "{text}");
        }
        for text in ["", "a b", "a\"b", "\"0a"] {
            assert!(entity_tag(text).is_err(), "{text}");
        }
    }
}
