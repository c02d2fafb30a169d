//! `xdp-imds check`: what a directory of records would serve, before a guest asks.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::dialect;
use crate::feed::directory;
use crate::port::PortName;
use crate::record::values::{NicMac, Uuid};
use crate::record::{Record, Step, Warning};
use crate::store::{Condition, Interner, Responses, Route};

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Records that can be served.
    pub good: usize,
    /// Records that cannot, and conflicts between records that can.
    pub errors: usize,
    /// Things that are probably not meant.
    pub warnings: usize,
}

impl From<Findings> for ExitCode {
    fn from(findings: Findings) -> Self {
        if findings.errors == 0 { Self::SUCCESS } else { Self::FAILURE }
    }
}

/// Checks the records in a directory, or one record file: writes what would be served to `out`, warnings
/// and errors with file and line to `err`.
///
/// # Errors
/// When `path` cannot be read, or the results cannot be written. Bad records are [`Findings`].
pub fn run(path: &Path, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<Findings> {
    let (dir, names) = records(path)?;
    let mut check =
        Check { dir, interner: Interner::new(), seen: Seen::default(), findings: Findings::default() };
    for name in &names {
        check.record(name, out, err)?;
    }
    let Findings { good, errors, warnings } = check.findings;
    if names.is_empty() {
        writeln!(out, "no records (*.yaml, *.yml, *.json) in {}", path.display())?;
    } else {
        writeln!(out, "{good} served, {}, {}", count(errors, "error"), count(warnings, "warning"))?;
    }
    Ok(check.findings)
}

fn records(path: &Path) -> anyhow::Result<(PathBuf, Vec<String>)> {
    if !path.is_file() {
        return Ok((path.to_owned(), directory::names(path)?.into_iter().collect()));
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{}: expected a file name in UTF-8", path.display()))?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir.to_owned(), vec![name.to_owned()]))
}

fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// What earlier records claimed, and which record did.
#[derive(Default)]
struct Seen {
    uuids: HashMap<Uuid, String>,
    macs: HashMap<NicMac, Vec<(Option<PortName>, String)>>,
}

struct Check {
    dir: PathBuf,
    interner: Interner,
    seen: Seen,
    findings: Findings,
}

impl Check {
    fn record(&mut self, name: &str, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<()> {
        let Some(loaded) = directory::load(&self.dir, name) else { return Ok(()) };
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
        self.unrendered(&record, &path, err)?;
        self.conflicts(&record, name, &path, err)?;
        if self.findings.errors > before {
            return Ok(());
        }
        self.findings.good += 1;
        let responses = dialect::render(&record, &mut self.interner);
        print(name, &record, &responses, out)
    }

    fn warn(&mut self, err: &mut dyn Write, warning: impl std::fmt::Display) -> io::Result<()> {
        self.findings.warnings += 1;
        writeln!(err, "warning: {warning}")
    }

    fn fail(&mut self, err: &mut dyn Write, error: impl std::fmt::Display) -> io::Result<()> {
        self.findings.errors += 1;
        writeln!(err, "error: {error}")
    }

    fn unrendered(&mut self, record: &Record, path: &Path, err: &mut dyn Write) -> io::Result<()> {
        for (n, name) in record.serve.dialects.iter().flatten().enumerate() {
            if !dialect::rendered(*name) {
                let field = ["serve".into(), "dialects".into(), n.into()];
                let message = format!("this version does not serve {}: its paths are 404", name.as_str());
                self.warn(err, Warning { place: place(path, &field), message })?;
            }
        }
        Ok(())
    }

    /// A VM is known by its MAC on its port, and by its UUID: no two records may claim the same.
    fn conflicts(&mut self, record: &Record, name: &str, path: &Path, err: &mut dyn Write) -> io::Result<()> {
        if let Some(other) = self.seen.uuids.insert(record.vm.uuid.clone(), name.to_owned()) {
            let place = place(path, &["vm".into(), "uuid".into()]);
            let remedy = "give each VM its own";
            self.fail(
                err,
                format_args!("{place}: {} is already the UUID of {other}; {remedy}", record.vm.uuid),
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
                    self.fail(err, format_args!("{message}; a VM is known by its MAC on its port"))?;
                }
                (_, Some((_, other)), _) => {
                    let message = format!("{mac} is also in {other}; this works only on different ports");
                    self.warn(err, Warning { place: place(path, &field), message })?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The place of a field in a file; without position when it can no longer be read.
fn place(path: &Path, field: &[Step]) -> crate::record::Place {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    Record::locate(&path.to_string_lossy(), &text, field)
}

/// One row of a record's table.
struct Row<'a> {
    path: &'a str,
    status: String,
    content_type: String,
    octets: String,
    needs: String,
}

impl<'a> Row<'a> {
    fn new((path, route): (&'a str, &Route)) -> Self {
        let response = route.response();
        let head = String::from_utf8_lossy(response.head());
        let content_type = head.lines().find_map(|line| line.strip_prefix("Content-Type: "));
        Self {
            path,
            status: response.status().0.to_string(),
            content_type: content_type.unwrap_or("-").to_owned(),
            octets: response.body().len().to_string(),
            needs: needs(route),
        }
    }
}

/// What a request must have, in words.
fn needs(route: &Route) -> String {
    let words = route.guards().iter().map(|guard| match guard.condition {
        Condition::HeaderIs { name, value } => format!("needs {name}: {value}"),
        Condition::HeaderAbsent { name } => format!("refused with {name}"),
    });
    words.collect::<Vec<_>>().join(", ")
}

fn print(name: &str, record: &Record, responses: &Responses, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{name}: {} ({})", record.vm.name, record.vm.uuid)?;
    for nic in record.network.nics.iter().filter(|nic| nic.vlan.is_none() && nic.bond.is_none()) {
        let port = nic.port.as_ref().map(PortName::from);
        let mac = nic.mac.map(|mac| mac.to_string()).unwrap_or_default();
        match port {
            Some(port) => writeln!(out, "  NIC {mac} on {port}")?,
            None => writeln!(out, "  NIC {mac}, served where --port or the configuration names its MAC")?,
        }
    }
    let rows: Vec<Row<'_>> = responses.routes().map(Row::new).collect();
    let width = |of: fn(&Row<'_>) -> usize| rows.iter().map(of).max().unwrap_or(0);
    let path = width(|row| row.path.len());
    let content_type = width(|row| row.content_type.len());
    let octets = width(|row| row.octets.len());
    for row in &rows {
        let line = format!(
            "  GET, HEAD  {:path$}  {}  {:content_type$}  {:>octets$} octets  {}",
            row.path, row.status, row.content_type, row.octets, row.needs
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::{Findings, run};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    const FULL: &str = include_str!("../../tests/vectors/record.yaml");
    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

    fn put(dir: &Path, name: &str, text: &str) {
        let path = dir.join(name);
        std::fs::write(&path, text).expect("the record is written");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o640)).expect("the mode is set");
    }

    /// A directory of records, checked; its path is left out of what was written.
    fn checked(records: &[(&str, String)]) -> (Findings, String, String) {
        let dir = tempfile::tempdir().expect("a directory is made");
        for (name, text) in records {
            put(dir.path(), name, text);
        }
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let findings = run(dir.path(), &mut out, &mut err).expect("the directory can be read");
        let text = |octets| {
            let text = String::from_utf8(octets).expect("text is written");
            text.replace(&format!("{}/", dir.path().display()), "")
        };
        (findings, text(out), text(err))
    }

    /// Another VM than the full record's, on a port.
    fn other(uuid: &str, mac: &str, port: &str) -> String {
        let text = FULL.replacen(UUID, uuid, 1).replacen("52:54:00:12:34:57", "52:54:00:99:99:99", 1);
        let nic = format!("\"{mac}\"\n    port: {{ifname: {port}}}");
        text.replacen("\"52:54:00:12:34:56\"", &nic, 1)
    }

    #[test]
    fn a_good_record_is_shown_as_what_it_answers() {
        let (findings, out, err) = checked(&[("web.yaml", FULL.to_owned())]);
        assert_eq!((findings, err.as_str()), (Findings { good: 1, ..Findings::default() }, ""));
        let wanted = "\
web.yaml: web-1 (7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d)
  NIC 52:54:00:12:34:56, served where --port or the configuration names its MAC
  NIC 52:54:00:12:34:57, served where --port or the configuration names its MAC
  GET, HEAD  /                   200  text/plain; charset=utf-8  274 octets
  GET, HEAD  /healthz            200  text/plain; charset=utf-8    2 octets
  GET, HEAD  /v1/identity        200  application/json            68 octets  refused with X-Forwarded-For, needs Metadata: true
  GET, HEAD  /v1/meta-data       200  text/yaml; charset=utf-8   281 octets
  GET, HEAD  /v1/network-config  200  text/yaml; charset=utf-8   354 octets
  GET, HEAD  /v1/token           200  application/json            82 octets  refused with X-Forwarded-For, needs Metadata: true
  GET, HEAD  /v1/user-data       200  application/octet-stream    44 octets
  GET, HEAD  /v1/vendor-data     200  application/octet-stream    17 octets

1 served, 0 errors, 0 warnings
";
        assert_eq!(out, wanted);
    }

    #[test]
    fn bad_records_are_named_by_line_and_the_others_still_shown() {
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
    fn two_records_cannot_be_one_vm() {
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
    fn dialects_that_are_not_served_are_pointed_out() {
        let text = FULL.replacen("absent_seed: 204", "dialects: [nocloud, eve]", 1);
        let (findings, _, err) = checked(&[("a.yaml", text)]);
        assert_eq!(findings, Findings { good: 1, errors: 0, warnings: 1 });
        assert!(
            err.starts_with("warning: a.yaml:51:23: serve.dialects[1]: this version does not serve eve"),
            "{err}"
        );
    }

    #[test]
    fn one_file_can_be_checked_alone_and_an_empty_directory_is_said_to_be_empty() {
        let dir = tempfile::tempdir().expect("a directory is made");
        let mut out = Vec::new();
        let findings = run(dir.path(), &mut out, &mut Vec::new()).expect("the directory can be read");
        assert_eq!(findings, Findings::default());
        assert!(out.starts_with(b"no records"));
        put(dir.path(), "a.yaml", FULL);
        put(dir.path(), "b.yaml", "nothing");
        let findings = run(&dir.path().join("a.yaml"), &mut Vec::new(), &mut Vec::new());
        assert_eq!(findings.expect("the file can be read").good, 1);
        assert!(run(&dir.path().join("none"), &mut Vec::new(), &mut Vec::new()).is_err());
    }
}
