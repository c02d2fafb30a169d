//! `xdp-imds check`: validates the records of a directory and prints what they would serve.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use metadata_base::port::PortName;
use metadata_base::printable::Printable;
use metadata_content::dialect;
use metadata_content::record::values::NicMac;
use metadata_content::record::{Limits, Owner, Record, Step, Warning};
use metadata_content::store::{Endpoint, Host, Interner, Responses, Route, Vm};
use metadata_feed::directory;

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Records that can be served.
    pub good: usize,
    /// Records that cannot be served, and conflicts between records.
    pub errors: usize,
    /// Problems that do not prevent serving.
    pub warnings: usize,
}

impl From<Findings> for ExitCode {
    fn from(findings: Findings) -> Self {
        if findings.errors == 0 { Self::SUCCESS } else { Self::FAILURE }
    }
}

/// Checks one record file, or all of a directory, against `limits`. Prints to `out` one line per path if `paths` is
/// true, and otherwise one line per dialect. Prints warnings and errors with file and line to `err`.
///
/// # Errors
/// When `path` cannot be read, or the results cannot be written. Invalid records are [`Findings`].
pub fn run(
    path: &Path,
    limits: &Limits,
    paths: bool,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> anyhow::Result<Findings> {
    let (dir, names) = directory::files(path)?;
    let (interner, seen, findings) = (Interner::new(), Seen::default(), Findings::default());
    let mut check = Check { dir, limits, paths, interner, seen, findings };
    for name in &names {
        check.record(name, out, err)?;
    }
    let Findings { good, errors, warnings } = check.findings;
    if names.is_empty() {
        writeln!(out, "no records (*.yaml, *.yml, *.json) in {}", Printable(path.display()))?;
    } else {
        writeln!(out, "{good} served, {}, {}", count(errors, "error"), count(warnings, "warning"))?;
    }
    Ok(check.findings)
}

fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// The owners and MACs of earlier records, with the name of the record.
#[derive(Default)]
struct Seen {
    owners: HashMap<Owner, String>,
    macs: HashMap<NicMac, Vec<(Option<PortName>, String)>>,
}

struct Check<'a> {
    dir: PathBuf,
    limits: &'a Limits,
    paths: bool,
    interner: Interner,
    seen: Seen,
    findings: Findings,
}

impl Check<'_> {
    fn record(&mut self, name: &str, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<()> {
        let Some(loaded) = directory::load(&self.dir, name, self.limits) else { return Ok(()) };
        let path = self.dir.join(name);
        if let Some(mode) = loaded.open_mode {
            self.warn(
                err,
                format_args!("{}: mode {mode:04o}: records hold secrets; chmod 0640", path.display()),
            )?;
        }
        let (record, warnings) = match loaded.record {
            Ok(good) => good,
            Err(error) => return self.fail(err, &error),
        };
        for warning in warnings {
            self.warn(err, &warning)?;
        }
        let before = self.findings.errors;
        self.conflicts(&record, name, &path, err)?;
        if self.findings.errors > before {
            return Ok(());
        }
        self.findings.good += 1;
        let vm = Vm::alone(record.owner_text());
        let responses = dialect::render(&record, &mut self.interner, vm);
        print(name, &record, out)?;
        if self.paths { print_paths(&responses, out) } else { print_dialects(&responses, out) }
    }

    fn warn(&mut self, err: &mut dyn Write, warning: impl std::fmt::Display) -> io::Result<()> {
        self.findings.warnings += 1;
        writeln!(err, "warning: {}", Printable(warning))
    }

    fn fail(&mut self, err: &mut dyn Write, error: impl std::fmt::Display) -> io::Result<()> {
        self.findings.errors += 1;
        writeln!(err, "error: {}", Printable(error))
    }

    /// Reports an owner that an earlier record has too, and a MAC that an earlier record has on the same port.
    /// Warns of an equal MAC if one of the records names no port.
    fn conflicts(&mut self, record: &Record, name: &str, path: &Path, err: &mut dyn Write) -> io::Result<()> {
        if let Some(other) = self.seen.owners.insert(record.owner(), name.to_owned()) {
            let (field, what, remedy) = match record.vm.owner {
                Some(_) => ("owner", "owner", "give each VM an owner of its own"),
                None => ("uuid", "UUID", "give each VM a UUID of its own"),
            };
            let place = place(path, &["vm".into(), field.into()]);
            self.fail(
                err,
                format_args!("{place}: {} is already the {what} of {other}; {remedy}", record.owner_text()),
            )?;
        }
        for (n, nic) in record.network.nics.iter().enumerate() {
            // A VLAN or bond has the MAC of a NIC below it.
            let Some(mac) = nic.mac.filter(|_| nic.vlan.is_none() && nic.bond.is_none()) else { continue };
            let port = nic.port.as_ref().map(PortName::from);
            let others = self.seen.macs.entry(mac).or_default();
            let same = others.iter().find(|(other, _)| *other == port && port.is_some()).cloned();
            let unclear = others.iter().find(|(other, _)| other.is_none() || port.is_none()).cloned();
            others.push((port.clone(), name.to_owned()));
            let field = ["network".into(), "nics".into(), n.into(), "mac".into()];
            match (same, unclear, port) {
                (Some((_, other)), _, Some(port)) => {
                    let place = place(path, &field);
                    let message = format!("{place}: {mac} on port {port} already belongs to {other}");
                    self.fail(err, format_args!("{message}; each MAC on a port identifies one VM"))?;
                }
                (_, Some((_, other)), _) => {
                    let message = format!("{mac} is also in {other}; name different ports in both");
                    self.warn(err, Warning { place: place(path, &field), message })?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The place of a field in a file; without a position if the file can no longer be read.
fn place(path: &Path, field: &[Step]) -> metadata_content::record::Place {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    Record::locate(&path.to_string_lossy(), &text, field)
}

/// One row of a record's table.
struct Row {
    methods: String,
    path: String,
    status: String,
    content_type: String,
    octets: String,
    remark: String,
}

impl Row {
    fn new((host, path, route): (Host, &str, &Route)) -> Self {
        let below = if route.takes_below() { "/…" } else { "" };
        let host = if host == Host::Metadata { "" } else { host.authority() };
        let mut remarks: Vec<String> =
            route.guards().iter().map(|guard| guard.condition.to_string()).collect();
        remarks.extend(route.header().map(|header| format!("with {header} only")));
        let (status, content_type, octets) = match route.endpoint() {
            Endpoint::Fixed(response) => (
                response.status().0.to_string(),
                response.field("Content-Type").unwrap_or("-").to_owned(),
                format!("{} octets", response.body().len()),
            ),
            Endpoint::Live(live) => {
                remarks.insert(0, live.about().to_owned());
                ("live".into(), "-".into(), String::new())
            }
        };
        Self {
            methods: route.allowed().to_string(),
            path: format!("{host}{path}{below}").replacen("//", "/", 1),
            status,
            content_type,
            octets,
            remark: remarks.join(", "),
        }
    }
}

fn print(name: &str, record: &Record, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}: {} ({})", Printable(name), Printable(&record.vm.name), record.vm.uuid)?;
    for nic in record.network.nics.iter().filter(|nic| nic.vlan.is_none() && nic.bond.is_none()) {
        let port = nic.port.as_ref().map(PortName::from);
        let mac = nic.mac.map(|mac| mac.to_string()).unwrap_or_default();
        match port {
            Some(port) => writeln!(out, "  NIC {mac} on {}", Printable(port))?,
            None => writeln!(
                out,
                "  NIC {mac}, served on the port that --port or the configuration gives for its MAC"
            )?,
        }
    }
    Ok(())
}

/// Prints each dialect with its number of paths and its first path.
fn print_dialects(responses: &Responses, out: &mut dyn Write) -> io::Result<()> {
    let mut dialects: Vec<(&str, Host, usize, &str)> = Vec::new();
    for (host, path, route) in responses.routes() {
        match dialects.iter_mut().find(|(name, at, ..)| (*name, *at) == (route.dialect(), host)) {
            Some((_, _, count, _)) => *count += 1,
            None => dialects.push((route.dialect(), host, 1, path)),
        }
    }
    let width = dialects.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    for (name, host, paths, first) in dialects {
        let paths = count(paths, "path");
        writeln!(out, "  {name:width$}  {paths}, such as http://{}{first}", host.authority())?;
    }
    writeln!(out)
}

/// Prints each path.
fn print_paths(responses: &Responses, out: &mut dyn Write) -> io::Result<()> {
    let rows: Vec<Row> = responses.routes().map(Row::new).collect();
    let width = |of: fn(&Row) -> &str| rows.iter().map(|row| of(row).chars().count()).max().unwrap_or(0);
    let (methods, path) = (width(|row| &row.methods), width(|row| &row.path));
    let status = width(|row| &row.status);
    let (content_type, octets) = (width(|row| &row.content_type), width(|row| &row.octets));
    for row in &rows {
        let line = format!(
            "  {:methods$}  {:path$}  {:status$}  {:content_type$}  {:>octets$}  {}",
            row.methods, row.path, row.status, row.content_type, row.octets, row.remark
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::{Findings, run};
    use metadata_content::record::Limits;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    const FULL: &str = include_str!("../../../tests/vectors/record.yaml");
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
        let findings =
            run(dir.path(), &Limits::DEFAULT, false, &mut out, &mut err).expect("the directory can be read");
        let text = |octets| {
            let text = String::from_utf8(octets).expect("text is written");
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
        assert!(out.ends_with("\n1 served, 0 errors, 0 warnings\n"), "{out}");
    }

    #[test]
    fn every_path_is_printed_on_request() {
        let dir = tempfile::tempdir().expect("a directory is made");
        put(dir.path(), "web.yaml", &with_dialects("nocloud, kubevirt"));
        let mut out = Vec::new();
        run(dir.path(), &Limits::DEFAULT, true, &mut out, &mut Vec::new())
            .expect("the directory can be read");
        let out = String::from_utf8(out).expect("text");
        for line in [
            "GET, HEAD  /v1/user-data        200  application/octet-stream    44 octets",
            "GET, HEAD  /healthz             200  text/plain; charset=utf-8    2 octets",
            "application/json            68 octets  refused with X-Forwarded-For, needs Metadata: true",
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
        assert!(out.ends_with("1 served, 1 error, 0 warnings\n"), "{out}");
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
        let findings = run(dir.path(), &Limits::DEFAULT, false, &mut out, &mut Vec::new())
            .expect("the directory can be read");
        assert_eq!(findings, Findings::default());
        assert!(out.starts_with(b"no records"));
        put(dir.path(), "a.yaml", FULL);
        put(dir.path(), "b.yaml", "nothing");
        let findings =
            run(&dir.path().join("a.yaml"), &Limits::DEFAULT, false, &mut Vec::new(), &mut Vec::new());
        assert_eq!(findings.expect("the file can be read").good, 1);
        assert!(
            run(&dir.path().join("none"), &Limits::DEFAULT, false, &mut Vec::new(), &mut Vec::new()).is_err()
        );
    }

    #[test]
    fn the_configuration_limits_custom_keys() {
        let dir = tempfile::tempdir().expect("a directory is made");
        put(dir.path(), "a.yaml", &FULL.replacen("{role: web}", "{a: x, b: xx}", 1));
        for (metadata_keys, metadata_chars, good) in [(2, 2, 1), (1, 2, 0), (2, 1, 0)] {
            let limits = Limits { metadata_keys, metadata_chars, ..Limits::DEFAULT };
            let findings = run(dir.path(), &limits, false, &mut Vec::new(), &mut Vec::new());
            assert_eq!(findings.expect("the directory can be read").good, good, "{limits:?}");
        }
    }
}
