//! `xdp-imds check`: validates the records of a directory and prints what they would serve.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use metadata_common::port::PortName;
use metadata_common::printable::Printable;
use metadata_content::dialect;
use metadata_content::record::values::NicMac;
use metadata_content::record::{
    FieldPosition, Nic, Owner, PathStep, Record, RecordError, RecordLimits, Warning,
};
use metadata_content::store::{Endpoint, Host, Interner, Responses, Route, VmState};
use metadata_feed::{FeedError, directory};
use metadata_steer::check_port_name;

use super::Exit;

/// The name and version of the JSON format. The version increases when a member is removed or changes its meaning.
pub const SCHEMA: &str = "check/1";

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Records that can be served.
    #[serde(rename = "served")]
    pub good: usize,
    /// Records that cannot be served, and conflicts between records.
    pub errors: usize,
    /// Problems that do not prevent serving.
    pub warnings: usize,
}

impl From<Findings> for Exit {
    fn from(findings: Findings) -> Self {
        if findings.errors == 0 { Self::Done } else { Self::Failure }
    }
}

/// The JSON document.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    #[serde(flatten)]
    findings: Findings,
    records: Vec<CheckedRecord>,
}

/// A record and what is wrong with it.
#[derive(Serialize)]
struct CheckedRecord {
    file: String,
    /// False if an error prevents it.
    served: bool,
    #[serde(flatten)]
    content: Option<Content>,
    findings: Vec<Finding>,
}

/// What a good record serves.
#[derive(Serialize)]
struct Content {
    vm: CheckedVm,
    nics: Vec<CheckedNic>,
    dialects: Vec<CheckedDialect>,
    /// Every path, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    paths: Option<Vec<Row>>,
}

#[derive(Serialize)]
struct CheckedVm {
    name: String,
    uuid: String,
}

/// A NIC that the hypervisor provides.
#[derive(Serialize)]
struct CheckedNic {
    mac: Option<String>,
    /// `IFNAME[@NETNS]`, as `--port` takes it; `None` if that or the configuration is to name the port of the MAC.
    port: Option<String>,
}

#[derive(Serialize)]
struct CheckedDialect {
    name: &'static str,
    host: &'static str,
    paths: usize,
    /// The first path, as a URL.
    first: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Warning,
    Error,
}

/// One problem, with its place.
#[derive(Debug, Serialize)]
struct Finding {
    level: Level,
    /// Line and column, counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<usize>,
    /// The field, such as `network.nics[0].mac`.
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    /// What is wrong, and the remedy.
    message: String,
    /// The message with its location, as it is printed.
    #[serde(skip)]
    line_text: String,
}

impl Finding {
    /// `text` begins with the place, if there is one.
    fn new(level: Level, place: Option<&FieldPosition>, text: String) -> Self {
        let start = place.map(|place| format!("{place}: ")).unwrap_or_default();
        let position = place.and_then(|place| place.position);
        let field = place.map(|place| place.field.clone()).filter(|field| !field.is_empty());
        let message = text.strip_prefix(&start).unwrap_or(&text).to_owned();
        let (line, column) = (position.map(|at| at.0), position.map(|at| at.1));
        Self { level, line, column, field, message, line_text: text }
    }

    fn at(level: Level, place: FieldPosition, message: impl fmt::Display) -> Self {
        let text = format!("{place}: {message}");
        Self::new(level, Some(&place), text)
    }
}

/// Checks one record file, or all of a directory, against `limits`. `hub` is what the names of the agent's own devices
/// begin with; those are no ports. Prints to `out` one line per path if `paths` is true, and otherwise one line per
/// dialect. Prints warnings and errors with file and line to `err`.
///
/// # Errors
/// When `path` cannot be read, or the results cannot be written. Invalid records are [`Findings`].
pub fn run(
    path: &Path,
    limits: &RecordLimits,
    hub: &str,
    paths: bool,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> anyhow::Result<Findings> {
    let findings = each(path, limits, hub, paths, |record| print(&record, out, err))?;
    let Findings { good, errors, warnings } = findings;
    if findings == Findings::default() {
        writeln!(out, "no records (*.yaml, *.yml, *.json) in {}", Printable(path.display()))?;
    } else {
        writeln!(out, "{good} can be served, {}, {}", count(errors, "error"), count(warnings, "warning"))?;
    }
    Ok(findings)
}

/// Like [`run`], but prints one JSON document, which has the warnings and errors too.
///
/// # Errors
/// Those of [`run`].
pub fn run_json(
    path: &Path,
    limits: &RecordLimits,
    hub: &str,
    paths: bool,
    out: &mut dyn Write,
) -> anyhow::Result<Findings> {
    let mut records = Vec::new();
    let findings = each(path, limits, hub, paths, |record| {
        records.push(record);
        Ok(())
    })?;
    serde_json::to_writer_pretty(&mut *out, &Document { schema: SCHEMA, findings, records })?;
    writeln!(out)?;
    Ok(findings)
}

/// Checks the records and hands each to `take`.
fn each(
    path: &Path,
    limits: &RecordLimits,
    hub: &str,
    paths: bool,
    mut take: impl FnMut(CheckedRecord) -> io::Result<()>,
) -> anyhow::Result<Findings> {
    let (dir, names) = directory::files(path)?;
    let (interner, seen) = (Interner::new(), EarlierRecords::default());
    let mut check = Check { dir, limits, hub, paths, interner, seen };
    let mut findings = Findings::default();
    for name in &names {
        let Some(record) = check.record(name) else { continue };
        let errors = record.findings.iter().filter(|finding| finding.level == Level::Error).count();
        findings.good += usize::from(record.served);
        findings.errors += errors;
        findings.warnings += record.findings.len() - errors;
        take(record)?;
    }
    Ok(findings)
}

fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// The owners and MACs of earlier records, with the name of the record.
#[derive(Default)]
struct EarlierRecords {
    owners: HashMap<Owner, String>,
    macs: HashMap<NicMac, Vec<(Option<PortName>, String)>>,
}

struct Check<'a> {
    dir: PathBuf,
    limits: &'a RecordLimits,
    /// What the names of the agent's devices begin with.
    hub: &'a str,
    paths: bool,
    interner: Interner,
    seen: EarlierRecords,
}

impl Check<'_> {
    /// Checks a record; `None` if it has just been removed.
    fn record(&mut self, name: &str) -> Option<CheckedRecord> {
        let loaded = directory::load(&self.dir, name, self.limits)?;
        let path = self.dir.join(name);
        let mut findings = Vec::new();
        for (file, mode) in loaded.open_files {
            let place =
                FieldPosition { source: file.display().to_string(), position: None, field: String::new() };
            let message = format_args!("mode {mode:04o}: records hold secrets; chmod 0640");
            findings.push(Finding::at(Level::Warning, place, message));
        }
        let content = match loaded.record {
            Ok((record, warnings)) => {
                let refused = self.ports(&record, &path);
                let is_new = |warning: &Warning| {
                    refused.iter().all(|port| port.field.as_ref() != Some(&warning.place.field))
                };
                let warnings = warnings.into_iter().filter(is_new);
                findings.extend(
                    warnings.map(|warning| Finding::at(Level::Warning, warning.place, warning.message)),
                );
                findings.extend(refused);
                self.conflicts(&record, name, &path, &mut findings);
                let is_good = !findings.iter().any(|finding| finding.level == Level::Error);
                is_good.then(|| self.content(&record))
            }
            Err(error) => {
                let place = match &error {
                    FeedError::Record(
                        RecordError::Unreadable { place, .. } | RecordError::Refused { place, .. },
                    ) => Some(&**place),
                    _ => None,
                };
                findings.push(Finding::new(Level::Error, place, error.to_string()));
                None
            }
        };
        Some(CheckedRecord { file: name.to_owned(), served: content.is_some(), content, findings })
    }

    fn content(&mut self, record: &Record) -> Content {
        let responses = dialect::render(record, &mut self.interner, VmState::alone(record.owner_text()));
        let nics = record.network.nics.iter().filter(|nic| nic.is_physical());
        let nics = nics.map(|nic| CheckedNic {
            mac: nic.mac.map(|mac| mac.to_string()),
            port: nic.port.as_ref().map(|port| match &port.netns {
                Some(netns) => format!("{}@{netns}", port.ifname),
                None => port.ifname.to_string(),
            }),
        });
        Content {
            vm: CheckedVm { name: record.vm.name.to_string(), uuid: record.vm.uuid.to_string() },
            nics: nics.collect(),
            dialects: dialects(&responses),
            paths: self.paths.then(|| responses.routes().map(Row::new).collect()),
        }
    }

    /// An error for each port that the agent refuses by its name.
    fn ports(&self, record: &Record, path: &Path) -> Vec<Finding> {
        let refused = |(n, nic): (usize, &Nic)| {
            let error = check_port_name(self.hub, &nic.port.as_ref()?.into()).err()?;
            let field = ["network".into(), "nics".into(), n.into(), "port".into(), "ifname".into()];
            Some(Finding::at(Level::Error, place(path, &field), error))
        };
        record.network.nics.iter().enumerate().filter_map(refused).collect()
    }

    /// Reports an owner that an earlier record has too, and a MAC that an earlier record has on the same port.
    /// Warns of an equal MAC if one of the records names no port.
    fn conflicts(&mut self, record: &Record, name: &str, path: &Path, findings: &mut Vec<Finding>) {
        if let Some(other) = self.seen.owners.insert(record.owner(), name.to_owned()) {
            let (field, what, remedy) = match record.vm.owner {
                Some(_) => ("owner", "owner", "give each VM an owner of its own"),
                None => ("uuid", "UUID", "give each VM a UUID of its own"),
            };
            let place = place(path, &["vm".into(), field.into()]);
            let message = format_args!("{} is already the {what} of {other}; {remedy}", record.owner_text());
            findings.push(Finding::at(Level::Error, place, message));
        }
        for (n, nic) in record.network.nics.iter().enumerate() {
            // A VLAN or bond has the MAC of a NIC below it.
            let Some(mac) = nic.mac.filter(|_| nic.is_physical()) else { continue };
            let port = nic.port.as_ref().map(PortName::from);
            let others = self.seen.macs.entry(mac).or_default();
            let same = others.iter().find(|(other, _)| *other == port && port.is_some()).cloned();
            let unclear = others.iter().find(|(other, _)| other.is_none() || port.is_none()).cloned();
            others.push((port.clone(), name.to_owned()));
            let field = ["network".into(), "nics".into(), n.into(), "mac".into()];
            match (same, unclear, port) {
                (Some((_, other)), _, Some(port)) => {
                    let message = format_args!(
                        "{mac} on port {port} already belongs to {other}; each MAC on a port identifies one VM"
                    );
                    findings.push(Finding::at(Level::Error, place(path, &field), message));
                }
                (_, Some((_, other)), _) => {
                    let message = format_args!("{mac} is also in {other}; name different ports in both");
                    findings.push(Finding::at(Level::Warning, place(path, &field), message));
                }
                _ => {}
            }
        }
    }
}

/// The place of a field in a file; without a position if the file can no longer be read.
fn place(path: &Path, field: &[PathStep]) -> FieldPosition {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    Record::locate(&path.to_string_lossy(), &text, field)
}

/// One row of a record's table.
#[derive(Serialize)]
struct Row {
    methods: String,
    path: String,
    /// `None` if the answer is made for each request.
    status: Option<u16>,
    content_type: Option<String>,
    /// Size of the body.
    bytes: Option<usize>,
    remark: String,
}

impl Row {
    fn new((host, path, route): (Host, &str, &Route)) -> Self {
        let below = if route.takes_below() { "/…" } else { "" };
        let host = if host == Host::Metadata { "" } else { host.authority() };
        let mut remarks: Vec<String> =
            route.guards().iter().map(|guard| guard.condition.to_string()).collect();
        remarks.extend(route.header().map(|header| format!("with {header} only")));
        let (status, content_type, bytes) = match route.endpoint() {
            Endpoint::Fixed(response) => (
                Some(response.status().0),
                response.field("Content-Type").map(str::to_owned),
                Some(response.body().len()),
            ),
            Endpoint::Live(live) => {
                remarks.insert(0, live.about().to_owned());
                (None, None, None)
            }
        };
        Self {
            methods: route.allowed().to_string(),
            path: format!("{host}{path}{below}").replacen("//", "/", 1),
            status,
            content_type,
            bytes,
            remark: remarks.join(", "),
        }
    }
}

/// Each dialect with its number of paths and its first path.
fn dialects(responses: &Responses) -> Vec<CheckedDialect> {
    let mut dialects: Vec<CheckedDialect> = Vec::new();
    for (host, path, route) in responses.routes() {
        let (name, host) = (route.dialect(), host.authority());
        match dialects.iter_mut().find(|dialect| (dialect.name, dialect.host) == (name, host)) {
            Some(dialect) => dialect.paths += 1,
            None => {
                let first = format!("http://{host}{path}");
                dialects.push(CheckedDialect { name, host, paths: 1, first });
            }
        }
    }
    dialects
}

/// Prints a record: its problems to `err`, and what it serves to `out`.
fn print(record: &CheckedRecord, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<()> {
    for Finding { level, line_text, .. } in &record.findings {
        let word = if *level == Level::Error { "error" } else { "warning" };
        writeln!(err, "{word}: {}", Printable(line_text))?;
    }
    let Some(Content { vm, nics, dialects, paths }) = &record.content else { return Ok(()) };
    writeln!(out, "{}: {} ({})", Printable(&record.file), Printable(&vm.name), vm.uuid)?;
    for CheckedNic { mac, port } in nics {
        let mac = mac.as_deref().unwrap_or_default();
        match port {
            Some(port) => writeln!(out, "  NIC {mac} on {}", Printable(port))?,
            None => writeln!(
                out,
                "  NIC {mac}, served on the port that --port or the configuration gives for its MAC"
            )?,
        }
    }
    match paths {
        Some(rows) => print_paths(rows, out)?,
        None => print_dialects(dialects, out)?,
    }
    writeln!(out)
}

/// Prints each dialect with its number of paths and its first path.
fn print_dialects(dialects: &[CheckedDialect], out: &mut dyn Write) -> io::Result<()> {
    let width = dialects.iter().map(|dialect| dialect.name.len()).max().unwrap_or(0);
    dialects.iter().try_for_each(|CheckedDialect { name, paths, first, .. }| {
        writeln!(out, "  {name:width$}  {}, such as {}", count(*paths, "path"), Printable(first))
    })
}

fn print_paths(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    let cells: Vec<[String; 5]> = rows
        .iter()
        .map(|row| {
            let status = row.status.map_or_else(|| "live".into(), |status| status.to_string());
            let content_type = row.content_type.clone().unwrap_or_else(|| "-".into());
            let size = row.bytes.map(|bytes| format!("{bytes} bytes")).unwrap_or_default();
            [row.methods.clone(), row.path.clone(), status, content_type, size]
        })
        .collect();
    let width = |at: usize| cells.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let [methods, path, status, content_type, size] = std::array::from_fn(width);
    for (cell, row) in cells.iter().zip(rows) {
        let line = format!(
            "  {:methods$}  {:path$}  {:status$}  {:content_type$}  {:>size$}  {}",
            cell[0], cell[1], cell[2], cell[3], cell[4], row.remark
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Findings, run, run_json};
    use metadata_content::record::RecordLimits;
    use serde_json::json;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    const FULL: &str = include_str!("../../../tests/vectors/record.yaml");
    /// The prefix of the hub's devices.
    const HUB: &str = "imds";
    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

    fn put(dir: &Path, name: &str, text: &str) {
        let path = dir.join(name);
        std::fs::write(&path, text).expect("the record is written");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o640)).expect("the mode is set");
    }

    /// Checks a directory of records, and removes its path from the output.
    fn checked(records: &[(&str, String)]) -> (Findings, String, String) {
        let dir = tempfile::tempdir().expect("a directory is made");
        for (name, text) in records {
            put(dir.path(), name, text);
        }
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let findings = run(dir.path(), &RecordLimits::DEFAULT, HUB, false, &mut out, &mut err)
            .expect("the directory can be read");
        let text = |bytes| {
            let text = String::from_utf8(bytes).expect("text is written");
            text.replace(&format!("{}/", dir.path().display()), "")
        };
        (findings, text(out), text(err))
    }

    /// A record of another VM, with a port.
    fn other(uuid: &str, mac: &str, port: &str) -> String {
        let text = FULL.replacen(UUID, uuid, 1).replacen("52:54:00:12:34:57", "52:54:00:99:99:99", 1);
        let nic = format!("\"{mac}\"\n    port: {{ifname: {port}}}");
        text.replacen("\"52:54:00:12:34:56\"", &nic, 1)
    }

    /// The full record with these dialects only.
    fn with_dialects(dialects: &str) -> String {
        FULL.replacen("absent_seed: 204", &format!("dialects: [{dialects}]"), 1)
    }

    #[test]
    fn a_valid_record_is_printed_with_its_dialects() {
        let (findings, out, err) = checked(&[("web.yaml", with_dialects("nocloud, kubevirt"))]);
        assert_eq!((findings, err.as_str()), (Findings { good: 1, ..Findings::default() }, ""));
        let wanted = "\
web.yaml: web-1 (7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d)
  NIC 52:54:00:12:34:56, served on the port that --port or the configuration gives for its MAC
  NIC 52:54:00:12:34:57, served on the port that --port or the configuration gives for its MAC
";
        assert!(out.starts_with(wanted), "{out}");
        assert!(
            out.contains("\n  nocloud        4 paths, such as http://169.254.169.254/v1/meta-data\n"),
            "{out}"
        );
        assert!(
            out.contains("\n  kubevirt       3 paths, such as http://169.254.169.254/healthz\n"),
            "{out}"
        );
        assert!(out.ends_with("\n1 can be served, 0 errors, 0 warnings\n"), "{out}");
    }

    #[test]
    fn every_path_is_printed_on_request() {
        let dir = tempfile::tempdir().expect("a directory is made");
        put(dir.path(), "web.yaml", &with_dialects("nocloud, kubevirt"));
        let mut out = Vec::new();
        run(dir.path(), &RecordLimits::DEFAULT, HUB, true, &mut out, &mut Vec::new())
            .expect("the directory can be read");
        let out = String::from_utf8(out).expect("text");
        for line in [
            "GET, HEAD  /v1/user-data        200  application/octet-stream    44 bytes",
            "GET, HEAD  /healthz             200  text/plain; charset=utf-8    2 bytes",
            "application/json            68 bytes  refused with X-Forwarded-For, needs Metadata: true",
        ] {
            let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(squeezed(&out).contains(&squeezed(line)), "{line} is not in\n{out}");
        }
    }

    #[test]
    fn invalid_records_are_reported_by_line_and_others_are_printed() {
        let bad = FULL.replacen("52:54:00:12:34:57", "x", 1);
        let (findings, out, err) = checked(&[("bad.yaml", bad), ("good.yaml", FULL.to_owned())]);
        assert_eq!(findings, Findings { good: 1, errors: 1, warnings: 0 });
        assert!(
            err.starts_with("error: bad.yaml:35:10: network.nics[1].mac: expected the MAC address"),
            "{err}"
        );
        assert!(out.starts_with("good.yaml: "), "{out}");
        assert!(out.ends_with("1 can be served, 1 error, 0 warnings\n"), "{out}");
    }

    #[test]
    fn records_with_equal_vms_conflict() {
        let uuid = "00000000-0000-4000-8000-000000000000";
        for (records, wanted) in [
            (
                [other(UUID, "52:54:00:00:00:01", "tap0"), other(UUID, "52:54:00:00:00:02", "tap1")],
                format!("error: b.yaml:4:9: vm.uuid: {UUID} is already the UUID of a.yaml"),
            ),
            (
                [other(UUID, "52:54:00:00:00:01", "tap0"), other(uuid, "52:54:00:00:00:01", "tap0")],
                "error: b.yaml:27:10: network.nics[0].mac: 52:54:00:00:00:01 on port tap0 already belongs to a.yaml"
                    .into(),
            ),
        ] {
            let [a, b] = records.map(|text| text.replacen("52:54:00:99:99:99", "52:54:00:99:99:98", 1));
            let b = b.replacen("52:54:00:99:99:98", "52:54:00:99:99:97", 1);
            let (findings, _, err) = checked(&[("a.yaml", a), ("b.yaml", b)]);
            assert_eq!(findings, Findings { good: 1, errors: 1, warnings: 0 }, "{err}");
            assert!(err.starts_with(&wanted), "wanted {wanted}\ngot {err}");
        }
    }

    #[test]
    fn a_port_that_serve_refuses_is_an_error_with_its_place() {
        for (port, words) in [
            ("imds-in", Some("imds-in is a device of an xdp-imds hub")),
            ("imds-t1", Some("imds-t1 is a device of an xdp-imds hub")),
            ("lo", Some("lo is the loopback interface")),
            ("lo, netns: vm", Some("lo in vm is the loopback interface")),
            ("imds-in, netns: vm", None),
            ("other-in", None),
        ] {
            let (findings, _, err) = checked(&[("a.yaml", other(UUID, "52:54:00:00:00:01", port))]);
            let good = usize::from(words.is_none());
            assert_eq!(findings, Findings { good, errors: 1 - good, warnings: 0 }, "{port}: {err}");
            let Some(words) = words else { continue };
            let start = "error: a.yaml:";
            assert!(err.starts_with(start) && err.contains("network.nics[0].port.ifname: "), "{err}");
            assert!(err.contains(words), "{err}");
        }
        let dir = tempfile::tempdir().expect("a directory is made");
        put(dir.path(), "a.yaml", &other(UUID, "52:54:00:00:00:01", "mine-in"));
        for (hub, errors) in [("mine", 1), (HUB, 0)] {
            let limits = RecordLimits::DEFAULT;
            let findings = run(dir.path(), &limits, hub, false, &mut Vec::new(), &mut Vec::new());
            assert_eq!(findings.expect("the directory can be read").errors, errors, "{hub}");
        }
    }

    #[test]
    fn one_mac_on_two_ports_is_two_vms() {
        let uuid = "00000000-0000-4000-8000-000000000000";
        let mac = "52:54:00:00:00:01";
        let b = other(uuid, mac, "tap1").replacen("52:54:00:99:99:99", "52:54:00:99:99:98", 1);
        let (findings, _, err) = checked(&[("a.yaml", other(UUID, mac, "tap0")), ("b.yaml", b.clone())]);
        assert_eq!((findings, err.as_str()), (Findings { good: 2, ..Findings::default() }, ""));
        let unnamed = FULL.replacen("52:54:00:12:34:56", mac, 1);
        let (findings, _, err) = checked(&[("a.yaml", unnamed), ("b.yaml", b)]);
        assert_eq!(findings, Findings { good: 2, errors: 0, warnings: 1 });
        assert!(
            err.starts_with("warning: b.yaml:27:10: network.nics[0].mac: 52:54:00:00:00:01 is also in"),
            "{err}"
        );
    }

    #[test]
    fn one_file_can_be_checked_and_an_empty_directory_is_reported() {
        let dir = tempfile::tempdir().expect("a directory is made");
        let mut out = Vec::new();
        let findings = run(dir.path(), &RecordLimits::DEFAULT, HUB, false, &mut out, &mut Vec::new())
            .expect("the directory can be read");
        assert_eq!(findings, Findings::default());
        assert!(out.starts_with(b"no records"));
        put(dir.path(), "a.yaml", FULL);
        put(dir.path(), "b.yaml", "nothing");
        let findings = run(
            &dir.path().join("a.yaml"),
            &RecordLimits::DEFAULT,
            HUB,
            false,
            &mut Vec::new(),
            &mut Vec::new(),
        );
        assert_eq!(findings.expect("the file can be read").good, 1);
        assert!(
            run(
                &dir.path().join("none"),
                &RecordLimits::DEFAULT,
                HUB,
                false,
                &mut Vec::new(),
                &mut Vec::new()
            )
            .is_err()
        );
    }

    #[test]
    fn the_configuration_limits_custom_keys() {
        let dir = tempfile::tempdir().expect("a directory is made");
        put(dir.path(), "a.yaml", &FULL.replacen("{role: web}", "{a: x, b: xx}", 1));
        for (metadata_keys, metadata_chars, good) in [(2, 2, 1), (1, 2, 0), (2, 1, 0)] {
            let limits = RecordLimits { metadata_keys, metadata_chars, ..RecordLimits::DEFAULT };
            let findings = run(dir.path(), &limits, HUB, false, &mut Vec::new(), &mut Vec::new());
            assert_eq!(findings.expect("the directory can be read").good, good, "{limits:?}");
        }
    }

    #[test]
    fn the_json_document_has_the_members_of_its_schema() {
        let dir = tempfile::tempdir().expect("a directory is made");
        put(
            dir.path(),
            "a.yaml",
            &other(UUID, "52:54:00:00:00:01", "tap0").replacen("52:54:00:99:99:99", "x", 1),
        );
        let good = other(UUID, "52:54:00:00:00:01", "tap0@vm").replacen("tap0@vm", "tap0, netns: vm", 1);
        put(dir.path(), "b.yaml", &good.replacen("absent_seed: 204", "dialects: [nocloud, nocloud]", 1));
        let mut out = Vec::new();
        let findings = run_json(dir.path(), &RecordLimits::DEFAULT, HUB, false, &mut out)
            .expect("the directory can be read");
        assert_eq!((findings.good, findings.errors), (1, 1));
        let found: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
        assert_eq!(
            (&found["schema"], &found["served"], &found["errors"], &found["warnings"]),
            (&json!("check/1"), &json!(1), &json!(1), &json!(findings.warnings))
        );
        let [bad, good] = &found["records"].as_array().expect("records")[..] else { panic!("{found}") };
        assert_eq!(
            (&bad["file"], &bad["served"], &bad["vm"]),
            (&json!("a.yaml"), &json!(false), &json!(null))
        );
        let error = &bad["findings"][0];
        let members = ["level", "line", "column", "field"].map(|name| error[name].clone());
        assert_eq!(members, [json!("error"), json!(36), json!(10), json!("network.nics[1].mac")], "{error}");
        assert!(
            error["message"].as_str().is_some_and(|text| text.starts_with("expected the MAC address")),
            "{error}"
        );
        assert_eq!(good["vm"], json!({"name": "web-1", "uuid": UUID}));
        let nic = json!({"mac": "52:54:00:00:00:01", "port": "tap0@vm"});
        assert_eq!(good["nics"][0], nic, "{good}");
        let dialect = json!({
            "name": "nocloud", "host": "169.254.169.254", "paths": 4, "first": "http://169.254.169.254/v1/meta-data"
        });
        let dialects = good["dialects"].as_array().expect("dialects");
        assert!(dialects.contains(&dialect), "{good}");
        assert_eq!(good.get("paths"), None);
        let mut out = Vec::new();
        run_json(dir.path(), &RecordLimits::DEFAULT, HUB, true, &mut out).expect("the directory can be read");
        let found: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
        let rows = found["records"][1]["paths"].as_array().expect("rows");
        assert!(rows.iter().any(|row| row["path"] == "/v1/user-data" && row["status"] == 200), "{found}");
    }

    #[test]
    fn a_record_that_cannot_do_what_it_is_for_is_warned_of_with_its_place() {
        let base = other(UUID, "52:54:00:00:00:01", "tap0");
        let network = base.find("\nnetwork:").expect("a network") + 1;
        let end = base[network..].find("\nmetadata:").map_or(base.len(), |at| network + at + 1);
        let without = format!("{}network: {{}}\n{}", &base[..network], &base[end..]);
        for (text, field, words) in [
            (without, "network", "no NIC"),
            (base.replacen("ssh-ed25519 AAAAC3", "hello AAAAC3", 1), "ssh_keys[0].key", "not a public key"),
        ] {
            let (findings, _, err) = checked(&[("a.yaml", text)]);
            assert_eq!((findings.good, findings.errors), (1, 0), "{err}");
            let line =
                err.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("{words}: {err}"));
            assert!(line.starts_with("warning: a.yaml:") && line.contains(&format!(": {field}: ")), "{line}");
        }
    }
}
