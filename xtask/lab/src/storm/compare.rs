//! `cargo xtask storm --compare A.json B.json`: shows what improved or worsened from A to B.
//!
//! The rule below decides what counts as a change. Only the figures of xdp-imds can fail a comparison. The peers are the
//! control: their code is the same in both files, so if their figures changed, the machine changed, and the output says
//! so.

use anyhow::{Result, bail, ensure};
use std::fmt::Write as _;
use std::path::Path;

use super::cpu::{Environment, MeasuredCase, MeasuredSubject, Results, Settings};
use super::figure::{FIGURES, Figure};
use super::lab;
use super::report::show;
use crate::storm::cpu::Spread;

/// The subject that can fail a comparison.
const OURS: &str = "xdp-imds";

/// Reads both files, prints the comparison, and fails if there is a regression.
///
/// # Errors
/// Fails if a file cannot be read, if the files are not comparable (unless `force`), or if B is worse than A.
pub(crate) fn run(before: &Path, after: &Path, force: bool) -> Result<()> {
    let (before, after) = (Results::read(before)?, Results::read(after)?);
    let different = differences(&before, &after);
    ensure!(
        force || different.is_empty(),
        "the files are not comparable:\n  {}\nMeasure both in the same way on the same machine, or compare their \
         common figures with --force",
        different.join("\n  ")
    );
    for difference in &different {
        eprintln!("warning: {difference}");
    }
    let comparison = compare(&before, &after);
    print!("{}", comparison.text());
    let regressions = comparison.regressions();
    if regressions > 0 {
        bail!("{regressions} {}", if regressions == 1 { "regression" } else { "regressions" });
    }
    Ok(())
}

/// Returns each difference of machine or settings that makes figures incomparable.
fn differences(before: &Results, after: &Results) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |what: &str, a: &dyn std::fmt::Display, b: &dyn std::fmt::Display| {
        let (a, b) = (a.to_string(), b.to_string());
        if a != b {
            found.push(format!("{what}: {a} before, {b} after"));
        }
    };
    let (a, b): (&Environment, &Environment) = (&before.environment, &after.environment);
    check("kernel", &a.kernel, &b.kernel);
    check("processor", &a.processor, &b.processor);
    check("cores", &a.cores, &b.cores);
    // The version of xdp-imds may differ, because it is the subject of the comparison.
    for (name, version) in a.versions.iter().filter(|(name, _)| *name != lab::NAME) {
        if let Some(other) = b.versions.get(name) {
            check(name, version, other);
        }
    }
    let missing = |from: &Results, of: &Results, when: &str| {
        let lacks = |case: &&MeasuredCase| !from.cases.iter().any(|other| other.settings == case.settings);
        of.cases
            .iter()
            .filter(lacks)
            .map(|case| format!("only {when}: {}", case.settings))
            .collect::<Vec<_>>()
    };
    found.extend(missing(after, before, "before"));
    found.extend(missing(before, after, "after"));
    for case in &before.cases {
        let Some(other) = after.cases.iter().find(|other| other.settings == case.settings) else { continue };
        let names = |case: &MeasuredCase| {
            case.subjects.iter().map(|subject| subject.name.clone()).collect::<Vec<_>>()
        };
        let (was, is) = (names(case), names(other));
        found.extend(was.iter().filter(|name| !is.contains(name)).map(|name| format!("only before: {name}")));
        found.extend(is.iter().filter(|name| !was.contains(name)).map(|name| format!("only after: {name}")));
    }
    found
}

/// One figure of one subject in one case, before and after.
struct Row {
    case: String,
    subject: String,
    figure: &'static Figure,
    before: Spread,
    after: Spread,
    verdict: Verdict,
}

/// The rows of a comparison, and the commits compared.
struct Comparison {
    commits: (String, String),
    rows: Vec<Row>,
}

fn compare(before: &Results, after: &Results) -> Comparison {
    let mut rows = Vec::new();
    for case in &before.cases {
        let Some(other) = after.cases.iter().find(|other| other.settings == case.settings) else { continue };
        for subject in &case.subjects {
            let Some(now) = other.subjects.iter().find(|now| now.name == subject.name) else { continue };
            rows.extend(FIGURES.iter().filter_map(|figure| row(figure, &case.settings, subject, now)));
        }
    }
    Comparison { commits: (before.environment.commit.clone(), after.environment.commit.clone()), rows }
}

fn row(
    figure: &'static Figure,
    settings: &Settings,
    before: &MeasuredSubject,
    after: &MeasuredSubject,
) -> Option<Row> {
    let values = (figure.values(before, settings), figure.values(after, settings));
    let spread = |values: &[f64]| Spread::of(values.iter().copied());
    Some(Row {
        case: settings.to_string(),
        subject: before.name.clone(),
        figure,
        before: spread(&values.0)?,
        after: spread(&values.1)?,
        verdict: verdict(figure, &values.0, &values.1),
    })
}

fn verdict(figure: &Figure, before: &[f64], after: &[f64]) -> Verdict {
    // The agent promises that no request fails. The first failure breaks the promise, however rare.
    if figure.is_promise() {
        let (was, is): (f64, f64) = (before.iter().sum(), after.iter().sum());
        match (was > 0.0, is > 0.0) {
            (false, false) => return Verdict::NoDifference,
            (false, true) => return Verdict::Regression,
            (true, false) => return Verdict::Improvement,
            (true, true) => {}
        }
    }
    judge(before, after, figure.threshold, figure.higher_is_better())
}

impl Comparison {
    fn regressions(&self) -> usize {
        self.rows.iter().filter(|row| row.subject == OURS && row.verdict == Verdict::Regression).count()
    }

    /// Returns the table.
    fn text(&self) -> String {
        let mut out = format!("before: {}\nafter:  {}\n", self.commits.0, self.commits.1);
        let mut shown = "";
        let mut subject = "";
        for row in &self.rows {
            if row.case != shown {
                let _ = writeln!(out, "\n{}", row.case);
                (shown, subject) = (&row.case, "");
            }
            let name = if row.subject == subject { "" } else { &row.subject };
            subject = &row.subject;
            let _ = writeln!(out, "  {name:<10} {}", row.text());
        }
        let control: Vec<_> = self.rows.iter().filter(|row| row.subject != OURS && row.changed()).collect();
        if !control.is_empty() {
            let _ = writeln!(
                out,
                "\nFigures of peers changed too, although their code did not: the machine was not the same."
            );
            for row in control {
                let _ = writeln!(out, "  {}, {}: {} {}", row.case, row.subject, row.figure.name, row.ratio());
            }
        }
        if self.rows.is_empty() {
            out.push_str("\nNo case is in both files.\n");
        }
        let _ = write!(
            out,
            "\nratio: after / before, medians of rounds, with the range of all rounds. A change is a difference \
             of\nmedians beyond the figure's threshold, confirmed by a rank test at {} % or, below {} rounds, by \
             disjoint ranges.\n",
            CHANCE * 100.0,
            ENOUGH_ROUNDS
        );
        out
    }
}

impl Row {
    fn changed(&self) -> bool {
        matches!(self.verdict, Verdict::Regression | Verdict::Improvement)
    }

    fn ratio(&self) -> String {
        if self.before.median == 0.0 {
            return if self.after.median == 0.0 { "×1.00".into() } else { "from 0".into() };
        }
        format!("×{:.2}", self.after.median / self.before.median)
    }

    fn text(&self) -> String {
        let value = |spread: &Spread| {
            let [low, median, high] =
                [spread.low, spread.median, spread.high].map(|value| show(self.figure.unit, value));
            format!("{median:>9} ({low} … {high})")
        };
        let verdict = match self.verdict {
            Verdict::Regression => match self.figure.threshold {
                Some(threshold) if threshold > 0.0 => {
                    format!("REGRESSION (more than {} %)", threshold * 100.0)
                }
                _ => "REGRESSION".into(),
            },
            Verdict::Improvement => "improvement".into(),
            Verdict::NoDifference => "no difference".into(),
            Verdict::TooFewRounds => format!("too few rounds (at least {})", FEWEST_ROUNDS),
            Verdict::NotJudged => String::new(),
        };
        let (name, ratio) = (self.figure.name, self.ratio());
        let line = format!(
            "{name:<32} {ratio:>7}  {:<34} {:<34} {verdict}",
            value(&self.before),
            value(&self.after)
        );
        line.trim_end().to_owned()
    }
}

// Decides whether two sets of rounds differ: whether a difference is large enough to matter and too regular for
// chance.
//
// A difference is large enough if the medians differ by more than the figure's threshold. With at least
// [`ENOUGH_ROUNDS`] rounds in each set, it is too regular for chance if the exact two-sided rank test of Mann and
// Whitney (1947) gives a probability of at most [`CHANCE`]. With fewer rounds the test could never give that. Then
// every round of one set must lie beyond every round of the other, and the medians must be further apart than the
// range of either set. Below [`FEWEST_ROUNDS`] there is no verdict.

/// The least number of rounds in each set for the rank test to reach [`CHANCE`].
const ENOUGH_ROUNDS: usize = 5;
/// The least number of rounds in each set for a verdict.
const FEWEST_ROUNDS: usize = 3;
/// The probability of ranks at least this uneven if both sets were alike. A comparison has dozens of figures, so with 5
/// % some would always raise a false alarm.
const CHANCE: f64 = 0.01;
/// The most rounds of each set that are ranked. More would add little and overflow the count of arrangements.
const MOST_ROUNDS: usize = 30;

/// The verdict on a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Regression,
    Improvement,
    NoDifference,
    /// Fewer rounds than [`FEWEST_ROUNDS`].
    TooFewRounds,
    /// The figure is shown but not judged.
    NotJudged,
}

/// Judges the rounds `after` against the rounds `before`.
fn judge(before: &[f64], after: &[f64], threshold: Option<f64>, higher_is_better: bool) -> Verdict {
    let Some(threshold) = threshold else { return Verdict::NotJudged };
    let fewest = before.len().min(after.len());
    if fewest < FEWEST_ROUNDS {
        return Verdict::TooFewRounds;
    }
    let (Some(was), Some(is)) = (Spread::of(before.iter().copied()), Spread::of(after.iter().copied()))
    else {
        return Verdict::TooFewRounds;
    };
    let difference = is.median - was.median;
    if difference == 0.0 || difference.abs() <= threshold * was.median.abs() {
        return Verdict::NoDifference;
    }
    let regular = if fewest < ENOUGH_ROUNDS {
        let apart = is.low > was.high || is.high < was.low;
        apart && difference.abs() > (was.high - was.low).max(is.high - is.low)
    } else {
        probability(before, after) <= CHANCE
    };
    match (regular, (difference > 0.0) == higher_is_better) {
        (false, _) => Verdict::NoDifference,
        (true, true) => Verdict::Improvement,
        (true, false) => Verdict::Regression,
    }
}

/// Returns the two-sided probability of ranks at least this uneven, if both sets came from the same distribution.
fn probability(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (&a[..a.len().min(MOST_ROUNDS)], &b[..b.len().min(MOST_ROUNDS)]);
    // This is twice U, so that ties, which count one half, stay whole. Rounding towards the middle avoids false alarms.
    let twice: usize =
        a.iter().map(|x| b.iter().map(|y| 2 * usize::from(x > y) + usize::from(x == y)).sum::<usize>()).sum();
    let pairs = a.len() * b.len();
    let u = twice.min(2 * pairs - twice).div_ceil(2);
    let arrangements = arrangements(a.len(), b.len());
    let all: f64 = arrangements.iter().sum();
    let tail: f64 = arrangements[..=u.min(pairs)].iter().sum();
    (2.0 * tail / all).min(1.0)
}

/// Returns how many arrangements of `m` and `n` values in one row have each value of U. The recurrence removes the
/// greatest value, which belongs to one set or the other.
fn arrangements(m: usize, n: usize) -> Vec<f64> {
    // table[j][u], for the values of the first set so far.
    let mut table: Vec<Vec<f64>> = (0..=n).map(|_| vec![1.0]).collect();
    for i in 1..=m {
        let mut next: Vec<Vec<f64>> = vec![vec![1.0]];
        for j in 1..=n {
            let mut counts = vec![0.0; i * j + 1];
            // The greatest value belongs to the first set: it is above all j values of the other.
            for (u, count) in table[j].iter().enumerate() {
                counts[u + j] += count;
            }
            for (u, count) in next[j - 1].iter().enumerate() {
                counts[u] += count;
            }
            next.push(counts);
        }
        table = next;
    }
    table.swap_remove(n)
}

#[cfg(test)]
mod tests {
    use super::{Verdict, arrangements, compare, differences, judge, probability, run};
    use crate::storm::cpu::{
        Cpu, Distribution, Environment, MeasuredCase, MeasuredSubject, Results, Round, SCHEMA, Settings,
    };

    /// Returns a round in which a request costs the host `cost_us` and takes ten times as long.
    fn round(cost_us: f64, failures: u64) -> Round {
        let cpu = Cpu {
            server_user_us: 100_000.0 * cost_us,
            generator_us: 500_000.0,
            busy_us: 500_000.0 + 200_000.0 * cost_us,
            ..Cpu::default()
        };
        let times = |us: f64| Distribution { buckets: vec![(us, 100)], max_us: us };
        Round {
            requests: 100_000,
            failures,
            wall_us: 1e9 * cost_us,
            cpu,
            request: times(10.0 * cost_us),
            boot: times(40.0 * cost_us),
            ..Round::default()
        }
    }

    fn results(subjects: &[(&str, &[f64], u64)]) -> Results {
        let subject = |&(name, costs, failures): &(&str, &[f64], u64)| MeasuredSubject {
            name: name.into(),
            rounds: costs.iter().map(|&cost| round(cost, failures)).collect(),
        };
        let settings = Settings { dialect: "nocloud".into(), vms: 100, ..Settings::default() };
        let environment =
            Environment { kernel: "6.18".into(), cores: 2, commit: "abc".into(), ..Environment::default() };
        let cases = vec![MeasuredCase { settings, subjects: subjects.iter().map(subject).collect() }];
        Results { schema: SCHEMA.into(), environment, cases }
    }

    const STEADY: &[f64] = &[7.0, 7.1, 7.05, 7.2, 7.15];
    const WORSE: &[f64] = &[9.0, 9.1, 9.2, 9.05, 9.15];

    #[test]
    fn changes_for_better_or_worse_are_shown() {
        // Name; costs and failures of each round before; the same after; whether it is a regression; the expected text.
        type Row<'a> = (&'a str, &'a [f64], u64, &'a [f64], u64, bool, &'a str);
        let cases: &[Row<'_>] = &[
            ("stayed", STEADY, 0, STEADY, 0, false, "no difference"),
            ("worse", STEADY, 0, WORSE, 0, true, "REGRESSION (more than 5 %)"),
            ("better", WORSE, 0, STEADY, 0, false, "improvement"),
            ("a first failure", STEADY, 0, STEADY, 1, true, "from 0"),
            ("no failure any more", STEADY, 3, STEADY, 0, false, "improvement"),
            ("one round", &STEADY[..1], 0, &WORSE[..1], 0, false, "too few rounds"),
            ("no round", &[], 0, &[], 0, false, "No case is in both"),
        ];
        for &(name, before, failed, after, fails, regression, says) in cases {
            let comparison =
                compare(&results(&[("xdp-imds", before, failed)]), &results(&[("xdp-imds", after, fails)]));
            let text = comparison.text();
            assert_eq!(comparison.regressions() > 0, regression, "{name}:\n{text}");
            assert!(text.contains(says), "{name}: no `{says}` in\n{text}");
        }
    }

    #[test]
    fn a_change_of_a_peer_is_shown_and_fails_nothing() {
        let before = results(&[("xdp-imds", STEADY, 0), ("nginx", STEADY, 0)]);
        let after = results(&[("xdp-imds", STEADY, 0), ("nginx", WORSE, 2)]);
        let comparison = compare(&before, &after);
        assert_eq!(comparison.regressions(), 0);
        assert!(comparison.text().contains("Figures of peers changed too"), "{}", comparison.text());
        assert!(!compare(&before, &before).text().contains("Figures of peers changed too"));
    }

    #[test]
    fn differences_of_machine_and_settings_are_named() {
        let base = results(&[("xdp-imds", STEADY, 0)]);
        assert_eq!(differences(&base, &base), Vec::<String>::new());
        type Change = fn(&mut Results);
        let changes: &[(Change, &str)] = &[
            (|r| r.environment.kernel = "6.12".into(), "kernel: 6.18 before, 6.12 after"),
            (|r| r.environment.cores = 64, "cores: 2 before, 64 after"),
            (|r| r.environment.processor = "other".into(), "processor"),
            (|r| r.cases[0].settings.vms = 101, "only after: nocloud, 101 VMs"),
            (|r| drop(r.cases[0].settings.options.insert("loss".into(), "1 %".into())), "loss 1 %"),
            (|r| r.cases[0].subjects[0].name = "nginx".into(), "only before: xdp-imds"),
            (|r| r.cases.clear(), "only before: nocloud, 100 VMs"),
        ];
        for (change, says) in changes {
            let mut other = base.clone();
            change(&mut other);
            let found = differences(&base, &other).join("\n");
            assert!(found.contains(says), "no `{says}` in {found}");
        }
    }

    #[test]
    fn incomparable_files_are_refused_unless_forced_and_regressions_fail() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |name: &str, results: &Results| {
            let path = directory.path().join(name);
            std::fs::write(&path, serde_json::to_string(results).expect("JSON")).expect("a file");
            path
        };
        let good = write("good", &results(&[("xdp-imds", STEADY, 0)]));
        let worse = write("worse", &results(&[("xdp-imds", WORSE, 0)]));
        let mut moved = results(&[("xdp-imds", STEADY, 0)]);
        moved.environment.cores = 64;
        let moved = write("moved", &moved);
        let mut old = results(&[]);
        old.schema = "xdp-imds-storm/0".into();
        let old = write("old", &old);

        assert!(run(&good, &good, false).is_ok());
        let error = run(&good, &worse, false).expect_err("a regression").to_string();
        assert!(error.ends_with("regressions"), "{error}");
        let error = run(&good, &moved, false).expect_err("a refusal").to_string();
        assert!(error.contains("64 after") && error.contains("--force"), "{error}");
        assert!(run(&good, &moved, true).is_ok());
        let error = run(&good, &old, true).expect_err("a refusal").to_string();
        assert!(error.contains("measure again"), "{error}");
        assert!(run(&good, &directory.path().join("none"), true).is_err());
    }

    #[test]
    fn arrangements_add_up_to_the_binomial_coefficient() {
        for (m, n, all) in [(1, 1, 2.0), (3, 3, 20.0), (4, 4, 70.0), (5, 5, 252.0), (2, 7, 36.0)] {
            let counts = arrangements(m, n);
            assert_eq!(counts.iter().sum::<f64>(), all, "{m}, {n}");
            assert!(counts.iter().eq(counts.iter().rev()), "{m}, {n}: not even: {counts:?}");
        }
    }

    #[test]
    fn probabilities_match_the_published_tables() {
        // Mann and Whitney (1947), table I, doubled: m = n = 5.
        let apart = probability(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((apart - 2.0 / 252.0).abs() < 1e-12, "{apart}");
        let one_swapped = probability(&[1.0, 2.0, 3.0, 4.0, 6.0], &[5.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((one_swapped - 4.0 / 252.0).abs() < 1e-12, "{one_swapped}");
        assert_eq!(probability(&[1.0; 6], &[1.0; 6]), 1.0);
    }

    #[test]
    fn a_difference_must_be_large_and_regular() {
        let five = |by: f64| [100.0, 101.0, 102.0, 103.0, 104.0].map(|value| value * by);
        type Row<'a> = (&'a str, &'a [f64], &'a [f64], Option<f64>, Verdict);
        let cases: &[Row<'_>] = &[
            ("the same", &five(1.0), &five(1.0), Some(0.05), Verdict::NoDifference),
            ("regular and large", &five(1.0), &five(1.1), Some(0.05), Verdict::Regression),
            ("regular and small", &five(1.0), &five(1.045), Some(0.05), Verdict::NoDifference),
            (
                "large and irregular",
                &[100.0, 50.0, 200.0, 80.0, 150.0],
                &[130.0, 60.0, 220.0, 90.0, 140.0],
                Some(0.05),
                Verdict::NoDifference,
            ),
            ("better", &five(1.0), &five(0.5), Some(0.05), Verdict::Improvement),
            (
                "four rounds, apart by more than they spread",
                &five(1.0)[..4],
                &five(1.1)[..4],
                Some(0.05),
                Verdict::Regression,
            ),
            (
                "four rounds, apart by less than they spread",
                &[100.0, 105.0, 106.0, 120.0],
                &[121.0, 122.0, 123.0, 124.0],
                Some(0.05),
                Verdict::NoDifference,
            ),
            ("two rounds", &[100.0, 101.0], &[200.0, 201.0], Some(0.05), Verdict::TooFewRounds),
            ("nothing", &[], &[], Some(0.05), Verdict::TooFewRounds),
            ("not judged", &five(1.0), &five(9.0), None, Verdict::NotJudged),
            ("from nothing to something", &[0.0; 5], &[3.0; 5], Some(0.0), Verdict::Regression),
        ];
        for (name, before, after, threshold, verdict) in cases {
            assert_eq!(judge(before, after, *threshold, false), *verdict, "{name}");
        }
        assert_eq!(judge(&five(1.0), &five(1.5), Some(0.1), true), Verdict::Improvement);
        assert_eq!(judge(&five(1.5), &five(1.0), Some(0.1), true), Verdict::Regression);
    }
}
