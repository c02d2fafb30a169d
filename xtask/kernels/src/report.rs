//! The results as a table and as JSON.

use crate::checks::Check;
use crate::kernel::Architecture;
use crate::run::{Outcome, Report};
use std::fmt::Write as _;

/// The verifier's limit on instructions (`BPF_COMPLEXITY_LIMIT_INSNS` in linux/bpf_verifier.h).
const MOST_INSTRUCTIONS: u32 = 1_000_000;

/// What one kernel did.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    pub(crate) kernel: String,
    pub(crate) architecture: Architecture,
    /// From the start of QEMU to its end.
    pub(crate) seconds: u64,
    /// The agent must refuse to serve on this kernel.
    pub(crate) must_refuse: bool,
    /// Why the kernel ran none or not all of the checks, if so.
    pub(crate) trouble: Option<String>,
    #[serde(flatten)]
    pub(crate) report: Report,
}

impl Row {
    /// What is wrong with this row; empty if nothing is.
    pub(crate) fn faults(&self, checks: &[&Check]) -> Vec<String> {
        let mut faults: Vec<String> = self.trouble.iter().cloned().collect();
        if self.must_refuse || !self.report.refused.is_empty() {
            faults.extend(self.refusal_faults());
        } else if self.trouble.is_none() {
            faults.extend(checks.iter().filter_map(|check| self.fault(check)));
        }
        let name = format!("{} {}", self.kernel, self.architecture.debian());
        faults.into_iter().map(|fault| format!("{name}: {fault}")).collect()
    }

    fn fault(&self, check: &Check) -> Option<String> {
        let Some(found) = self.report.of(check.name) else {
            return Some(format!("{} did not run", check.name));
        };
        match found.outcome {
            Outcome::Passed if found.passed != check.tests.len() => {
                Some(format!("{}: {} of {} tests ran", check.name, found.passed, check.tests.len()))
            }
            Outcome::Passed if found.skipped > 0 => {
                Some(format!("{}: {} tests were skipped", check.name, found.skipped))
            }
            Outcome::Passed | Outcome::Absent => None,
            Outcome::Failed => Some(format!("{} failed", check.name)),
            Outcome::Timeout => Some(format!("{} took too long", check.name)),
        }
    }

    /// On a kernel that is too old, `doctor` must say so, and `serve` must end with an error that names `doctor`.
    fn refusal_faults(&self) -> Vec<String> {
        let Report { refused, serve, says, .. } = &self.report;
        let mut faults = Vec::new();
        if !self.must_refuse {
            faults.push(format!("the agent refuses this kernel: {}", refused.join("; ")));
        }
        if refused.is_empty() {
            faults.push("doctor finds nothing to refuse".into());
        }
        if serve.is_none_or(|status| status == 0 || status == 124) {
            faults.push(format!("expected that `serve` ends with an error, found {serve:?}"));
        }
        if !says.iter().any(|line| line.contains("xdp-imds doctor")) {
            faults.push(format!("`serve` names no remedy: {}", says.join(" ")));
        }
        faults
    }

    fn heading(&self) -> String {
        let release = if self.report.release.is_empty() { &self.kernel } else { &self.report.release };
        // Debian's releases end with the architecture.
        let short = release.split('-').next().unwrap_or(release);
        format!("{short} {}", self.architecture.debian())
    }

    fn cell(&self, check: &Check) -> String {
        if !self.report.refused.is_empty() {
            return "refused".into();
        }
        match self.report.of(check.name) {
            None => "–".into(),
            Some(found) => match found.outcome {
                Outcome::Passed if self.fault(check).is_none() => format!("ok {} s", found.seconds),
                Outcome::Passed => "INCOMPLETE".into(),
                Outcome::Absent => "no tcx".into(),
                Outcome::Failed => "FAILED".into(),
                Outcome::Timeout => "TIMEOUT".into(),
            },
        }
    }

    fn instructions(&self, program: &str) -> String {
        let Some(&count) = self.report.instructions.get(program) else { return "–".into() };
        format!("{count} ({:.1} %)", f64::from(count) * 100.0 / f64::from(MOST_INSTRUCTIONS))
    }
}

/// Returns a table in Markdown: a row for each check and each program, a column for each kernel.
pub(crate) fn table(rows: &[Row], checks: &[&Check]) -> String {
    let mut lines = vec![cells("Check", rows.iter().map(Row::heading))];
    for check in checks {
        lines.push(cells(check.name, rows.iter().map(|row| row.cell(check))));
    }
    let mut programs: Vec<&String> = rows.iter().flat_map(|row| row.report.instructions.keys()).collect();
    programs.sort();
    programs.dedup();
    for program in programs {
        lines.push(cells(&format!("`{program}`"), rows.iter().map(|row| row.instructions(program))));
    }
    lines.push(cells("whole run", rows.iter().map(|row| format!("{} s", row.seconds))));
    let widths: Vec<usize> = (0..=rows.len())
        .map(|at| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0))
        .collect();
    let rule = widths.iter().map(|width| "-".repeat(*width)).collect();
    lines.insert(1, rule);
    let mut text = String::new();
    for line in &lines {
        for (cell, width) in line.iter().zip(&widths) {
            // Writing to a string cannot fail.
            write!(text, "| {cell:width$} ").unwrap_or_default();
        }
        text += "|\n";
    }
    text
}

fn cells(first: &str, others: impl Iterator<Item = String>) -> Vec<String> {
    std::iter::once(first.to_owned()).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::{Row, table};
    use crate::checks::ALL;
    use crate::kernel::Architecture;
    use crate::run::Report;

    fn row(must_refuse: bool, lines: &[&str]) -> Row {
        let mut report = Report::default();
        for line in lines {
            report.read(line);
        }
        Row {
            kernel: "6.1".into(),
            architecture: Architecture::Amd64,
            seconds: 60,
            must_refuse,
            trouble: None,
            report,
        }
    }

    #[test]
    fn only_a_check_whose_tests_all_ran_is_without_fault() {
        // This check has six tests.
        let check = ALL.iter().find(|check| check.name == "AF_XDP").expect("a check");
        for (line, expected) in [
            ("@@ check AF_XDP|passed|9|6|0", ""),
            ("@@ check AF_XDP|absent|0|0|0", ""),
            ("@@ check AF_XDP|passed|9|5|0", "6.1 amd64: AF_XDP: 5 of 6 tests ran"),
            ("@@ check AF_XDP|passed|9|6|1", "6.1 amd64: AF_XDP: 1 tests were skipped"),
            ("@@ check AF_XDP|failed|9|5|0", "6.1 amd64: AF_XDP failed"),
            ("@@ check AF_XDP|timeout|9|0|0", "6.1 amd64: AF_XDP took too long"),
            ("@@ end", "6.1 amd64: AF_XDP did not run"),
        ] {
            assert_eq!(row(false, &[line]).faults(&[check]).join("; "), expected, "{line}");
        }
    }

    #[test]
    fn a_refusal_must_be_expected_and_name_its_remedy() {
        let refused = "@@ refused FAIL kernel.version: Linux 5.10 is too old";
        let says = "@@ says run `xdp-imds doctor`";
        for (must_refuse, lines, faults) in [
            (true, &[refused, "@@ serve 1", says][..], 0),
            (false, &[refused, "@@ serve 1", says], 1),
            (true, &[refused, "@@ serve 1"], 1),
            (true, &[refused, "@@ serve 0", says], 1),
            (true, &[refused, "@@ serve 124", says], 1),
            (true, &["@@ end"], 3),
        ] {
            let found = row(must_refuse, lines).faults(&[]);
            assert_eq!(found.len(), faults, "{lines:?}: {found:?}");
        }
    }

    #[test]
    fn the_table_has_checks_and_shares_of_the_verifiers_limit() {
        let check = ALL.iter().find(|check| check.name == "sandbox").expect("a check");
        let lines = [
            "@@ boot 6.1.0-50-cloud-amd64 9",
            "@@ instructions port 158741",
            "@@ check sandbox|passed|7|2|0",
        ];
        let text = table(&[row(false, &lines)], &[check]);
        assert_eq!(
            text,
            "| Check     | 6.1.0 amd64     |\n\
             | --------- | --------------- |\n\
             | sandbox   | ok 7 s          |\n\
             | `port`    | 158741 (15.9 %) |\n\
             | whole run | 60 s            |\n"
        );
    }
}
