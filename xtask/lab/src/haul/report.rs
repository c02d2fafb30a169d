//! The results of a haul: a table and JSON.

use super::{Found, Job};
use crate::storm::guest::stall::{Stall, seconds};
use anyhow::{Context as _, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

/// The results of one run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    seed: u64,
    limit_s: f64,
    cases: Vec<Case>,
}

/// The results of one case.
#[derive(Debug, Default, Serialize)]
pub(super) struct Case {
    kind: String,
    guests: usize,
    bytes: usize,
    loss: f64,
    asked: u64,
    answered: u64,
    failed: BTreeMap<String, u64>,
    stalls: u64,
    /// Waits beyond the limit that losses explain.
    excused: u64,
    longest_wait_s: f64,
    took_s: f64,
    /// The first stalls, with their segments.
    described: Vec<Stall>,
}

impl Case {
    pub(super) fn new(job: &Job, found: Found, took: Duration) -> Self {
        Self {
            kind: job.kind.to_string(),
            guests: job.guests,
            bytes: job.bytes,
            loss: job.loss,
            asked: job.answers,
            answered: found.answered,
            failed: found.failed,
            stalls: found.stalls.count,
            excused: found.stalls.excused,
            longest_wait_s: seconds(found.stalls.longest),
            took_s: took.as_secs_f64(),
            described: found.stalls.described,
        }
    }

    fn name(&self) -> String {
        format!("{} {} bytes, loss {}", self.kind, self.bytes, self.loss)
    }

    fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Returns the described stalls and the failures as text.
    fn described(&self) -> String {
        let mut text = String::new();
        for stall in &self.described {
            let Stall { connection, answers, seconds, lost, segments, sockets } = stall;
            let name = self.name();
            let _ = writeln!(
                text,
                "\nSTALL {name}: {connection}, {seconds:.1} s, {lost} frames lost, after {answers} answers"
            );
            for line in segments.iter().chain([sockets]) {
                let _ = writeln!(text, "  {line}");
            }
        }
        for (why, times) in &self.failed {
            let _ = writeln!(text, "\nFAILED {}: {why}, {times} times", self.name());
        }
        text
    }
}

impl Report {
    pub(super) fn new(seed: u64, limit_s: f64) -> Self {
        Self { seed, limit_s, cases: Vec::new() }
    }

    pub(super) fn add(&mut self, case: Case) {
        eprintln!("{}: {} of {} answers, {} stalls", case.name(), case.answered, case.asked, case.stalls);
        self.cases.push(case);
    }

    /// Returns one sentence for each case with a stall, a failure or a missing answer.
    pub(super) fn broken(&self) -> Vec<String> {
        let broken = self.cases.iter().filter(|it| it.stalls + it.failures() > 0 || it.answered < it.asked);
        let shown = |case: &Case| {
            let Case { answered, asked, stalls, .. } = case;
            let failures = case.failures();
            format!("{}: {stalls} stalls, {failures} failures, {answered} of {asked} answers", case.name())
        };
        broken.map(shown).collect()
    }

    /// Returns the stalls, then the table.
    pub(super) fn text(&self) -> String {
        let mut text: String = self.cases.iter().map(Case::described).collect();
        let _ = writeln!(text, "\nseed {}; a stall is {} s without progress\n", self.seed, self.limit_s);
        let _ = writeln!(
            text,
            "{:<10} {:>6} {:>8} {:>5} {:>8} {:>6} {:>6} {:>7} {:>8} {:>7} {:>9}",
            "guests",
            "",
            "bytes",
            "loss",
            "answers",
            "failed",
            "stalls",
            "excused",
            "longest",
            "took",
            "per second"
        );
        for case in &self.cases {
            let _ = writeln!(
                text,
                "{:<10} {:>6} {:>8} {:>5} {:>8} {:>6} {:>6} {:>7} {:>6.2} s {:>5.0} s {:>9.0}",
                case.kind,
                case.guests,
                case.bytes,
                case.loss,
                case.answered,
                case.failures(),
                case.stalls,
                case.excused,
                case.longest_wait_s,
                case.took_s,
                case.answered as f64 / case.took_s.max(f64::MIN_POSITIVE),
            );
        }
        text
    }

    /// Writes the JSON file if one is wanted.
    pub(super) fn write(&self, json: Option<&Path>) -> Result<()> {
        let Some(path) = json else { return Ok(()) };
        std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::{Case, Report, Stall};

    #[test]
    fn a_stall_a_failure_or_a_missing_answer_breaks_a_haul() {
        let good = || Case { asked: 5, answered: 5, excused: 3, ..Case::default() };
        let failed = [("read".to_owned(), 1)].into();
        let bad = [Case { stalls: 1, ..good() }, Case { failed, ..good() }, Case { answered: 4, ..good() }];
        for (case, broken) in bad.into_iter().map(|case| (case, 1)).chain([(good(), 0)]) {
            let report = Report { seed: 1, limit_s: 3.0, cases: vec![case] };
            assert_eq!(report.broken().len(), broken, "{report:?}");
        }
    }

    #[test]
    fn a_stall_is_shown_with_its_connection_and_segments() {
        let stall = Stall {
            connection: "10.0.16.0:40000".into(),
            segments: vec!["seq 7".into()],
            ..Stall::default()
        };
        let case = Case { described: vec![stall], ..Case::default() };
        let text = Report { seed: 1, limit_s: 3.0, cases: vec![case] }.text();
        assert!(text.contains("10.0.16.0:40000") && text.contains("seq 7"), "{text}");
    }
}
