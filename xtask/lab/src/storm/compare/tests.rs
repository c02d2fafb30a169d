//! Tests of comparisons, with made-up results.

use super::{Verdict, arrangements, compare, differences, judge, probability, run};
use crate::storm::cpu::{Case, Cpu, Distribution, Environment, Results, Round, SCHEMA, Settings, Subject};

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
    let subject = |&(name, costs, failures): &(&str, &[f64], u64)| Subject {
        name: name.into(),
        rounds: costs.iter().map(|&cost| round(cost, failures)).collect(),
    };
    let settings = Settings { dialect: "nocloud".into(), vms: 100, ..Settings::default() };
    let environment =
        Environment { kernel: "6.18".into(), cores: 2, commit: "abc".into(), ..Environment::default() };
    let cases = vec![Case { settings, subjects: subjects.iter().map(subject).collect() }];
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
