//! Reads the report in the console of a guest. `init.sh` writes it, in lines that begin with `@@`.

use std::collections::BTreeMap;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// Every test passed, and none was skipped.
    Passed,
    Failed,
    /// The check took longer than its limit.
    Timeout,
    /// The kernel lacks what the check needs beyond the agent's needs.
    Absent,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Finding {
    pub(crate) check: String,
    pub(crate) outcome: Outcome,
    /// Seconds by the guest's clock.
    pub(crate) seconds: u64,
    /// Numbers of tests.
    pub(crate) passed: usize,
    pub(crate) skipped: usize,
}

/// What a guest has reported so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Report {
    /// The kernel's release, as `uname -r` prints it.
    pub(crate) release: String,
    pub(crate) checks: Vec<Finding>,
    /// Instructions that the verifier processed, by program. Its limit is a million.
    pub(crate) instructions: BTreeMap<String, u32>,
    /// The failing checks of doctor about the kernel. If there are any, no other check ran.
    pub(crate) refused: Vec<String>,
    /// The exit status of `serve` on a kernel that doctor finds unfit, and its last words.
    pub(crate) serve: Option<i32>,
    pub(crate) says: Vec<String>,
    /// The guest ran everything.
    pub(crate) complete: bool,
}

/// The beginning of a line of the report.
const MARK: &str = "@@ ";

impl Report {
    /// Reads a line of the console. Returns what a person should see of it.
    pub(crate) fn read(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end().strip_prefix(MARK)?;
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "boot" => {
                let (release, seconds) = rest.split_once(' ')?;
                self.release = release.to_owned();
                return Some(format!("Linux {release}, up after {seconds} s"));
            }
            "start" => return Some(format!("{rest} …")),
            "check" => {
                let finding = finding(rest)?;
                let shown = match finding.outcome {
                    Outcome::Absent => format!("{}: not on this kernel", finding.check),
                    _ => format!("{}: {:?} after {} s", finding.check, finding.outcome, finding.seconds),
                };
                self.checks.push(finding);
                return Some(shown);
            }
            "instructions" => {
                let (program, count) = rest.split_once(' ')?;
                self.instructions.insert(program.to_owned(), count.parse().ok()?);
            }
            "refused" => {
                self.refused.push(rest.to_owned());
                return Some(rest.to_owned());
            }
            "serve" => self.serve = rest.parse().ok(),
            "says" => {
                self.says.push(rest.to_owned());
                return Some(format!("serve: {rest}"));
            }
            "log" => return Some(format!("  {rest}")),
            "end" => self.complete = true,
            _ => {}
        }
        None
    }

    /// The result of a check; `None` if the guest did not report it.
    pub(crate) fn of(&self, check: &str) -> Option<&Finding> {
        self.checks.iter().find(|finding| finding.check == check)
    }
}

/// Reads `NAME|OUTCOME|SECONDS|PASSED|SKIPPED`.
fn finding(line: &str) -> Option<Finding> {
    let [check, outcome, seconds, passed, skipped] = line.split('|').collect::<Vec<_>>()[..] else {
        return None;
    };
    let outcome = match outcome {
        "passed" => Outcome::Passed,
        "timeout" => Outcome::Timeout,
        "absent" => Outcome::Absent,
        _ => Outcome::Failed,
    };
    Some(Finding {
        check: check.to_owned(),
        outcome,
        seconds: seconds.parse().ok()?,
        passed: passed.parse().ok()?,
        skipped: skipped.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Report};

    fn read(lines: &[&str]) -> Report {
        let mut report = Report::default();
        for line in lines {
            report.read(line);
        }
        report
    }

    #[test]
    fn a_report_is_read_from_the_lines_of_a_console() {
        let report = read(&[
            "[    1.2] a message of the kernel @@ check x|passed|1|1|0",
            "@@ boot 6.1.0-50-cloud-amd64 12.5\r",
            "@@ instructions port 158741",
            "@@ check AF_XDP|passed|14|6|0",
            "@@ check sandbox|failed|3|1|0",
            "@@ check guest|timeout|420|0|0",
            "@@ check tcx|absent|0|0|0",
            "@@ end",
        ]);
        assert_eq!(report.release, "6.1.0-50-cloud-amd64");
        assert_eq!(report.instructions["port"], 158_741);
        let found: Vec<_> =
            report.checks.iter().map(|of| (of.check.as_str(), of.outcome, of.passed)).collect();
        assert_eq!(
            found,
            [
                ("AF_XDP", Outcome::Passed, 6),
                ("sandbox", Outcome::Failed, 1),
                ("guest", Outcome::Timeout, 0),
                ("tcx", Outcome::Absent, 0)
            ]
        );
        assert!(report.complete);
    }

    #[test]
    fn a_refusal_keeps_the_words_of_doctor_and_agent() {
        let report =
            read(&["@@ refused FAIL kernel.version: too old", "@@ serve 1", "@@ says Error: no cookie"]);
        assert_eq!(report.refused, ["FAIL kernel.version: too old"]);
        assert_eq!((report.serve, &report.says[..]), (Some(1), &["Error: no cookie".to_owned()][..]));
        assert!(!report.complete);
    }

    #[test]
    fn a_line_that_is_cut_off_changes_nothing() {
        for line in
            ["@@", "@@ check", "@@ check x|passed|1", "@@ instructions port", "@@ check x|passed|1|?|0"]
        {
            assert_eq!(read(&[line]), Report::default(), "{line}");
        }
    }
}
