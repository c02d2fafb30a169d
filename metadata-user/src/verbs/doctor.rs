//! `xdp-imds doctor`: finds what prevents a configuration from working on this node, and prints the remedies.
//!
//! # Overview
//!
//! 1. `gather` collects [`Facts`] about the kernel, this process, directories, ports and the node. It tests a kernel
//!    feature by using it. Nothing that it creates outlives this process.
//! 2. `checks` compares the facts with the needs of the agent and returns [`Check`]s.
//! 3. The checks are printed as lines or JSON.
//!
//! A check fails if the agent would not start, or would not serve a port. A check warns if the agent would serve with a
//! restriction, or if a fact is unknown. In both cases it names the reason and the remedy.

mod checks;
mod facts;
mod gather;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use metadata_common::printable::printable;
use serde::Serialize;

use super::Exit;
use crate::agent::preflight::{self, ConfigRefusal};
use crate::config::{Config, ConfigError};
use crate::verbs::options::{ConfigOverrides, DEFAULT_FILE};
pub use facts::{
    Capabilities, ConfigFacts, Directory, ExposedFile, Facts, FileSystem, Kernel, NodeFacts, PathFacts,
    PinFacts, PortFacts, ProcessFacts, RecordFacts, Resources,
};
pub use metadata_feed::check::{Check, CheckStatus};

/// Where the unit of the packages is, and where one that was installed by hand is.
const UNITS: [&str; 2] = ["/usr/lib/systemd/system/xdp-imds.service", "/etc/systemd/system/xdp-imds.service"];

/// The configuration to check, and how to print the result.
#[derive(Debug)]
pub struct DoctorRequest {
    /// The agent's configuration, or the reason why it cannot be used.
    pub config: Result<Config, ConfigError>,
    /// The configuration file, if there is one.
    pub file: Option<PathBuf>,
    /// Neither options nor the file of the service say what to check.
    pub lacks_file: bool,
    /// Write JSON instead of lines.
    pub json: bool,
}

fn checks(question: &DoctorRequest) -> Vec<Check> {
    let process = gather::process();
    // Another user's view of directories and programs is no statement about the agent.
    if let Some(check) = checks::user(&process) {
        return vec![check];
    }
    let mut checks = vec![checks::configuration(question)];
    // What `serve` refuses before it changes anything.
    let refusals = question.config.as_ref().map(preflight::refusals).unwrap_or_default();
    // Without a file no source is configured, which the first check says.
    let refusals = refusals
        .into_iter()
        .filter(|refusal| !(question.lacks_file && refusal.name == preflight::NO_SOURCES));
    checks.extend(refusals.map(|ConfigRefusal { name, found, expected, remedy, is_denied: _ }| {
        Check::fail(name, found, expected, remedy)
    }));
    // The service's file is for the service, and doctor sees what its unit hides.
    if question.file.as_deref() == Some(Path::new(DEFAULT_FILE))
        && UNITS.iter().any(|unit| Path::new(unit).exists())
    {
        checks.extend(question.config.iter().flat_map(checks::hidden));
    }
    // Without a usable configuration, the other checks use the default configuration.
    let config = question.config.as_ref().ok().cloned().unwrap_or_default();
    let facts = gather::facts(&config, question.file.as_deref(), process);
    checks::all(checks, &facts, question.config.is_ok())
}

/// Runs all checks and prints their results.
///
/// A warning does not change the exit code.
///
/// # Errors
/// The results cannot be written to `out`.
pub fn run(question: &DoctorRequest, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let checks = checks(question);
    if question.json {
        write_json(&checks, out)?
    } else {
        write_lines(&checks, out)?
    }
    Ok(exit(&checks))
}

fn exit(checks: &[Check]) -> Exit {
    let mut failed = checks.iter().filter(|check| check.status == CheckStatus::Fail);
    match failed.next() {
        None => Exit::Done,
        // Nothing was checked, for want of privileges.
        Some(check) if check.name == checks::USER => Exit::Forbidden,
        Some(_) => Exit::Failure,
    }
}

// The command line of `xdp-imds doctor`.

/// The text after the options in `doctor --help`. It explains the printed lines.
pub const LINES: &str = "\
Unless --config, --records or --port says what to serve, it checks /etc/xdp-imds/config.yaml, which the packages \
and manifests install, if there is one. Other options override that file.

Each line shows the result of one check and the state found:
  ok    no problem
  warn  serving works with a restriction, or the result is unknown
  FAIL  serving would fail, at startup or for one port
A line with a problem also shows the state expected and the remedy. Warnings do not change the exit code.";

/// The options of `xdp-imds doctor`.
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    #[command(flatten)]
    options: ConfigOverrides,
    /// Print one JSON document, of the form `doctor/1`.
    #[arg(long)]
    json: bool,
}

impl DoctorArgs {
    /// Reads and validates the configuration.
    #[must_use]
    pub fn question(self) -> DoctorRequest {
        let options = self.options.or_default_file();
        let file = options.file().map(Into::into);
        let lacks_file = !options.names_source();
        let config = options.config().and_then(|config| config.validate().map(|()| config));
        DoctorRequest { config, file, lacks_file, json: self.json }
    }
}

// Prints checks as lines for people, or as JSON for programs.

/// The name and version of the JSON format. The version increases when a member is removed or changes its meaning.
const SCHEMA: &str = "doctor/1";

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: &'static str,
    status: CheckStatus,
    checks: &'a [Check],
}

/// Returns the worst status of all checks; `Ok` for an empty list.
fn worst(checks: &[Check]) -> CheckStatus {
    checks.iter().map(|check| check.status).max().unwrap_or(CheckStatus::Ok)
}

/// Prints one JSON document.
fn write_json(checks: &[Check], out: &mut dyn Write) -> io::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let document = Document { schema: SCHEMA, version, status: worst(checks), checks };
    serde_json::to_writer_pretty(&mut *out, &document)?;
    writeln!(out)
}

/// Prints one line per check, and a last line with the number of checks per status.
fn write_lines(checks: &[Check], out: &mut dyn Write) -> io::Result<()> {
    for check in checks {
        writeln!(out, "{}", line(check))?;
    }
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    writeln!(
        out,
        "{} check{}: {} ok, {} warn, {} FAIL",
        checks.len(),
        if checks.len() == 1 { "" } else { "s" },
        count(CheckStatus::Ok),
        count(CheckStatus::Warn),
        count(CheckStatus::Fail)
    )
}

fn line(check: &Check) -> String {
    let Check { name, subject, status, found, expected, remedy } = check;
    let word = match status {
        CheckStatus::Ok => "ok  ",
        CheckStatus::Warn => "warn",
        CheckStatus::Fail => "FAIL",
    };
    let subject = subject.as_ref().map_or_else(String::new, |subject| format!(" {subject}"));
    let expected = expected.as_ref().map_or_else(String::new, |expected| format!("; expected {expected}"));
    let remedy = remedy.as_ref().map_or_else(String::new, |remedy| format!(". {remedy}"));
    // The name of a file or a program can contain a line break, which must not imitate the line of a check.
    printable(format_args!("{word}  {name}{subject}: {found}{expected}{remedy}"))
}

#[cfg(test)]
mod tests {
    use super::{Exit, checks, exit, line, write_json, write_lines};
    use crate::verbs::doctor::Check;

    #[test]
    fn a_line_shows_the_state_found_the_state_expected_and_the_remedy() {
        let cases = [
            (Check::ok("kernel", "Linux 6.18"), "ok    kernel: Linux 6.18"),
            (
                Check::warn("clock", "1970", "today", "Set it.").of("node"),
                "warn  clock node: 1970; expected today. Set it.",
            ),
            (
                Check::fail("tun", "none\nok    tun: fine", "one", "Load it."),
                "FAIL  tun: none\\u{a}ok    tun: fine; expected one. Load it.",
            ),
        ];
        for (check, expected) in cases {
            assert_eq!(line(&check), expected);
        }
    }

    #[test]
    fn the_json_document_has_the_members_of_its_schema() {
        let checks = [Check::ok("a", "b"), Check::fail("c", "d", "e", "f").of("g")];
        let mut out = Vec::new();
        write_json(&checks, &mut out).expect("written");
        let document: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
        let expected = serde_json::json!({
            "schema": "doctor/1",
            "version": env!("CARGO_PKG_VERSION"),
            "status": "fail",
            "checks": [
                {"name": "a", "status": "ok", "found": "b"},
                {"name": "c", "subject": "g", "status": "fail", "found": "d", "expected": "e", "remedy": "f"},
            ],
        });
        assert_eq!(document, expected);
    }

    #[test]
    fn a_warning_changes_no_exit_code_and_a_user_without_privileges_has_that_of_a_missing_permission() {
        let warned = Check::warn("a", "b", "c", "d");
        for (found, expected) in [
            (vec![Check::ok("a", "b"), warned.clone()], Exit::Done),
            (vec![warned, Check::fail("capability.net_raw", "b", "c", "d")], Exit::Failure),
            (vec![Check::fail(checks::USER, "b", "c", "d")], Exit::Forbidden),
        ] {
            assert_eq!(exit(&found), expected, "{found:?}");
        }
    }

    #[test]
    fn the_last_line_counts_the_checks_by_status() {
        let checks = [Check::fail("c", "d", "e", "f"), Check::ok("a", "b")];
        for (checks, last) in [
            (&checks[..], "\n2 checks: 1 ok, 0 warn, 1 FAIL\n"),
            (&checks[..1], "\n1 check: 0 ok, 0 warn, 1 FAIL\n"),
        ] {
            let mut out = Vec::new();
            write_lines(checks, &mut out).expect("written");
            assert!(String::from_utf8_lossy(&out).ends_with(last), "{last}");
        }
    }
}
