//! Prints checks as lines for people, or as JSON for programs.

use std::io::{self, Write};

use metadata_common::printable::printable;
use serde::Serialize;

use super::{Check, CheckStatus};

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
pub(super) fn json(checks: &[Check], out: &mut dyn Write) -> io::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let document = Document { schema: SCHEMA, version, status: worst(checks), checks };
    serde_json::to_writer_pretty(&mut *out, &document)?;
    writeln!(out)
}

/// Prints one line per check, and a last line with the number of checks per status.
pub(super) fn lines(checks: &[Check], out: &mut dyn Write) -> io::Result<()> {
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
    use super::{json, line, lines};
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
        json(&checks, &mut out).expect("written");
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
    fn the_last_line_counts_the_checks_by_status() {
        let checks = [Check::fail("c", "d", "e", "f"), Check::ok("a", "b")];
        for (checks, last) in [
            (&checks[..], "\n2 checks: 1 ok, 0 warn, 1 FAIL\n"),
            (&checks[..1], "\n1 check: 0 ok, 0 warn, 1 FAIL\n"),
        ] {
            let mut out = Vec::new();
            lines(checks, &mut out).expect("written");
            assert!(String::from_utf8_lossy(&out).ends_with(last), "{last}");
        }
    }
}
