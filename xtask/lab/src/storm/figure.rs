//! The figures of a round: one list for the report's tables and for comparisons.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::cpu::{MeasuredCase, MeasuredSubject, Results, Round, Settings, Spread};
use super::lab;
use super::report::show;

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Microseconds.
    Time,
    /// Bytes.
    Memory,
    /// Events per second.
    Rate,
    /// A number of events.
    Count,
    /// A fraction of 1.
    Share,
}

/// One figure of a round.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) unit: Unit,
    /// The fraction by which medians must differ for a comparison to call it a change. A figure with `None` is shown
    /// but never judged, because one slow request in thousands decides it.
    pub(crate) threshold: Option<f64>,
    of: fn(&Round, &Settings) -> Option<f64>,
}

/// All figures, the most significant first.
pub(crate) const FIGURES: &[Figure] = &[
    Figure {
        name: "failed requests",
        unit: Unit::Count,
        threshold: Some(0.0),
        of: |r, _| Some(r.failures as f64),
    },
    Figure {
        name: "host CPU / request",
        unit: Unit::Time,
        threshold: Some(0.05),
        of: |r, _| per_request(r, r.cpu.host_us()),
    },
    Figure {
        name: "server CPU / request",
        unit: Unit::Time,
        threshold: Some(0.05),
        of: |r, _| per_request(r, r.cpu.server_user_us + r.cpu.server_system_us),
    },
    Figure { name: "requests / s", unit: Unit::Rate, threshold: Some(0.1), of: |r, _| rate(r) },
    Figure {
        name: "request p50",
        unit: Unit::Time,
        threshold: Some(0.1),
        of: |r, _| r.request.quantile(0.5),
    },
    Figure {
        name: "request p90",
        unit: Unit::Time,
        threshold: Some(0.1),
        of: |r, _| r.request.quantile(0.9),
    },
    Figure {
        name: "request p99",
        unit: Unit::Time,
        threshold: Some(0.2),
        of: |r, _| r.request.quantile(0.99),
    },
    Figure {
        name: "kernel answers",
        unit: Unit::Share,
        threshold: None,
        of: |r, _| r.kernel.as_ref().map(|it| it.count() as f64 / r.requests.max(1) as f64),
    },
    Figure {
        name: "kernel answer p99",
        unit: Unit::Time,
        threshold: Some(0.2),
        of: |r, _| r.kernel.as_ref()?.quantile(0.99),
    },
    Figure { name: "request p99.9", unit: Unit::Time, threshold: None, of: |r, _| r.request.quantile(0.999) },
    Figure { name: "request max", unit: Unit::Time, threshold: None, of: |r, _| r.request.quantile(1.0) },
    Figure { name: "boot p50", unit: Unit::Time, threshold: Some(0.1), of: |r, _| r.boot.quantile(0.5) },
    Figure { name: "boot p90", unit: Unit::Time, threshold: Some(0.1), of: |r, _| r.boot.quantile(0.9) },
    Figure { name: "boot p99", unit: Unit::Time, threshold: Some(0.2), of: |r, _| r.boot.quantile(0.99) },
    Figure { name: "boot p99.9", unit: Unit::Time, threshold: None, of: |r, _| r.boot.quantile(0.999) },
    Figure { name: "boot max", unit: Unit::Time, threshold: None, of: |r, _| r.boot.quantile(1.0) },
    Figure {
        name: "server memory / VM",
        unit: Unit::Memory,
        threshold: Some(0.05),
        of: |r, s| per_vm(r.memory.server_bytes, s),
    },
    Figure {
        name: "kernel memory / VM",
        unit: Unit::Memory,
        threshold: Some(0.1),
        of: |r, s| r.memory.kernel_bytes.filter(|_| s.vms > 0).map(|bytes| bytes as f64 / f64::from(s.vms)),
    },
    Figure {
        name: "ready / VM",
        unit: Unit::Time,
        threshold: Some(0.1),
        of: |r, s| (s.vms > 0 && r.ready_us > 0.0).then(|| r.ready_us / f64::from(s.vms)),
    },
    Figure { name: "attach / tap", unit: Unit::Time, threshold: Some(0.1), of: |r, _| r.attach_us },
    Figure {
        name: "idle share of a core",
        unit: Unit::Share,
        threshold: None,
        of: |r, _| r.idle.filter(|idle| idle.wall_us > 0.0).map(|idle| idle.server_us / idle.wall_us),
    },
    Figure { name: "flood frames / s", unit: Unit::Count, threshold: None, of: |r, _| r.flood_per_second },
    Figure {
        name: "requests repeated",
        unit: Unit::Count,
        threshold: None,
        of: |r, _| (!r.events.is_empty() || r.retries > 0).then_some(r.retries as f64),
    },
    Figure {
        name: "asked of Nova / boot",
        unit: Unit::Count,
        threshold: Some(0.05),
        of: |r, _| r.asked_of_nova.map(|asked| asked as f64 / r.boots.max(1) as f64),
    },
    Figure {
        name: "asked ahead / VM",
        unit: Unit::Count,
        threshold: None,
        of: |r, s| r.asked_ahead.filter(|_| s.vms > 0).map(|asked| asked as f64 / f64::from(s.vms)),
    },
    Figure {
        name: "answered, no agent",
        unit: Unit::Count,
        threshold: None,
        of: |r, _| Some(r.without_agent?.answered as f64),
    },
    Figure {
        name: "waiting, no agent",
        unit: Unit::Count,
        threshold: None,
        of: |r, _| Some(r.without_agent?.waiting as f64),
    },
    Figure {
        name: "missed, no agent",
        unit: Unit::Count,
        threshold: Some(0.0),
        of: |r, _| Some(r.without_agent?.missed as f64),
    },
    Figure {
        name: "longest event",
        unit: Unit::Time,
        threshold: None,
        of: |r, _| r.events.iter().map(|event| event.took_us).reduce(f64::max),
    },
    Figure {
        name: "segments sent again",
        unit: Unit::Count,
        threshold: None,
        of: |r, _| (r.requests > 0).then_some(r.retransmissions as f64),
    },
];

impl Figure {
    /// Returns the figure with this name.
    ///
    /// # Panics
    /// Panics if there is none; names are constants.
    pub(crate) fn named(name: &str) -> &'static Self {
        FIGURES.iter().find(|figure| figure.name == name).expect("a figure of this name")
    }

    /// Returns the figure's value in each round that has one.
    pub(crate) fn values(&self, subject: &MeasuredSubject, settings: &Settings) -> Vec<f64> {
        subject.rounds.iter().filter_map(|round| (self.of)(round, settings)).collect()
    }

    /// Returns the rounds whose mean is the median that [`spread`](Self::spread) returns: the middle one, or the two in
    /// the middle. A drawing of them agrees with the tables.
    pub(crate) fn middle<'a>(&self, subject: &'a MeasuredSubject, settings: &Settings) -> Vec<&'a Round> {
        let value = |round: &'a Round| (self.of)(round, settings).filter(|value| value.is_finite());
        let mut rounds: Vec<_> =
            subject.rounds.iter().filter_map(|round| value(round).map(|value| (value, round))).collect();
        rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        let places = rounds.len().saturating_sub(1) / 2..rounds.len() / 2 + 1;
        rounds.get(places).unwrap_or_default().iter().map(|(_, round)| *round).collect()
    }

    /// Returns median and range over the rounds that have a value.
    pub(crate) fn spread(&self, subject: &MeasuredSubject, settings: &Settings) -> Option<Spread> {
        Spread::of(self.values(subject, settings).into_iter())
    }

    /// Whether the figure must always be 0. The first deviation breaks the promise, however rare.
    pub(crate) fn is_promise(&self) -> bool {
        self.threshold == Some(0.0)
    }

    /// Whether the figure is CPU time per request, which short rounds do not have.
    fn is_cost(&self) -> bool {
        self.name.ends_with("CPU / request")
    }

    /// Whether a higher value is better.
    pub(crate) fn higher_is_better(&self) -> bool {
        self.unit == Unit::Rate
    }
}

/// Says for each subject which figures are of fewer rounds than the others.
pub(crate) fn left_out(case: &MeasuredCase) -> Vec<String> {
    let of_subject = |subject: &MeasuredSubject| {
        let all = subject.rounds.len();
        let mut names: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for figure in FIGURES {
            let values = figure.values(subject, &case.settings);
            let left_out = all - values.iter().filter(|value| value.is_finite()).count();
            // A figure that no round has was not asked for, unless each was too short for it.
            if left_out > 0 && (left_out < all || subject.rounds.iter().any(is_short) && figure.is_cost()) {
                names.entry(left_out).or_default().push(figure.name);
            }
        }
        let short = subject.rounds.iter().filter(|round| is_short(round)).count();
        let of_subject = move |(left_out, names): (usize, Vec<&str>)| {
            let why = if short == left_out && names.iter().all(|name| Figure::named(name).is_cost()) {
                format!(
                    ", in which the machine worked for less than {} ms, too little for its clocks; --seconds makes \
                     rounds longer",
                    LEAST_US / 1e3
                )
            } else {
                ", where nothing was measured".into()
            };
            format!("{}: {} without {left_out} of {all} rounds{why}.", subject.name, names.join(", "))
        };
        names.into_iter().map(of_subject).collect::<Vec<_>>()
    };
    case.subjects.iter().flat_map(of_subject).collect()
}

/// True if a round answered requests in too little time for figures of cost.
fn is_short(round: &Round) -> bool {
    round.requests > 0 && round.cpu.busy_us < LEAST_US
}

/// The least busy time for figures of cost. Clocks tick every 10 ms, so shorter times are too coarse.
const LEAST_US: f64 = 200_000.0;

fn per_request(round: &Round, us: f64) -> Option<f64> {
    (round.requests > 0 && round.cpu.busy_us >= LEAST_US).then(|| us / round.requests as f64)
}

fn rate(round: &Round) -> Option<f64> {
    (round.wall_us > 0.0).then(|| round.requests as f64 * 1e6 / round.wall_us)
}

/// Returns bytes per VM; `None` if there was no measurement.
fn per_vm(bytes: u64, settings: &Settings) -> Option<f64> {
    (settings.vms > 0 && bytes > 0).then(|| bytes as f64 / f64::from(settings.vms))
}

// Formats the table at the end of a run, and the line at the end of a round.

/// Widths of the first column and of the others, in characters.
const FIRST: usize = 22;
const OTHER: usize = 30;

/// Formats a round as one line.
pub(super) fn line(round: &Round) -> String {
    let requests = round.requests.max(1) as f64;
    let ms = |us: Option<f64>| us.unwrap_or(0.0) / 1e3;
    let mut text = format!(
        "{} requests, {} failed, {:.0}/s, p50 {:.2} ms, p99 {:.2} ms, boot p99 {:.1} ms, host {:.1} µs/request, \
         server {:.1} µs/request",
        round.requests,
        round.failures,
        requests / (round.wall_us.max(1.0) / 1e6),
        ms(round.request.quantile(0.5)),
        ms(round.request.quantile(0.99)),
        ms(round.boot.quantile(0.99)),
        round.cpu.host_us() / requests,
        (round.cpu.server_user_us + round.cpu.server_system_us) / requests,
    );
    if let (Some(during), Some(ahead)) = (round.asked_of_nova, round.asked_ahead) {
        let _ = write!(text, ", asked of Nova: {during}, and {ahead} ahead");
    }
    if let Some(signer_us) = round.signer_us {
        let _ = write!(text, ", signer {:.1} µs/request", signer_us / requests);
    }
    if round.retransmissions > 0 {
        let _ = write!(text, ", {} retransmissions", round.retransmissions);
    }
    if round.retries > 0 {
        let _ = write!(text, ", {} repeated", round.retries);
    }
    if let Some(it) = round.without_agent {
        let _ = write!(
            text,
            ", without an agent: {} answered, {} waiting, {} missed",
            it.answered, it.waiting, it.missed
        );
    }
    for event in &round.events {
        let _ = write!(text, ", {} took {:.0} ms", event.event, event.took_us / 1e3);
    }
    for (reason, count) in &round.reasons {
        let _ = write!(text, ", {reason} {count}");
    }
    text
}

/// Formats all cases, each as a table.
pub(super) fn text(results: &Results) -> String {
    let mut text = String::new();
    for case in &results.cases {
        let _ = write!(text, "{}", of_case(case));
    }
    let environment = &results.environment;
    let _ = writeln!(
        text,
        "{}, {} cores of {}, commit {}, seed {}",
        environment.kernel, environment.cores, environment.processor, environment.commit, environment.seed
    );
    for note in &environment.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

/// Formats a case's medians, with the lowest and the highest round in brackets.
fn of_case(case: &MeasuredCase) -> String {
    let rounds = case.subjects.iter().map(|subject| subject.rounds.len()).max().unwrap_or(0);
    let mut text = format!("\n{}; medians of {rounds} rounds [lowest..highest]\n\n", case.settings);
    let mut row = |first: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>OTHER$}")).collect();
        let _ = writeln!(text, "{first:<FIRST$}{cells}");
    };
    row("", case.subjects.iter().map(|subject| subject.name.clone()).collect());
    for figure in FIGURES {
        let spreads: Vec<_> =
            case.subjects.iter().map(|subject| figure.spread(subject, &case.settings)).collect();
        if spreads.iter().any(Option::is_some) {
            row(figure.name, spreads.into_iter().map(|spread| cell(figure, spread)).collect());
        }
    }
    let answered = |subject: &MeasuredSubject| {
        subject.rounds.iter().map(|round| round.requests).sum::<u64>().to_string()
    };
    row("answered requests", case.subjects.iter().map(answered).collect());
    for figure in ["host CPU / request", "request p50", "request p99", "boot p50", "boot p99"] {
        if let Some(ratios) = ratios(case, Figure::named(figure)) {
            row(&format!("{} ratio", figure.trim_end_matches(" / request")), ratios);
        }
    }
    for line in left_out(case) {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn cell(figure: &Figure, spread: Option<Spread>) -> String {
    spread.map_or_else(String::new, |Spread { low, median, high }| {
        let show = |value| show(figure.unit, value);
        format!("{} [{}..{}]", show(median), show(low), show(high))
    })
}

/// Returns each subject's median as a multiple of xdp-imds's.
fn ratios(case: &MeasuredCase, figure: &Figure) -> Option<Vec<String>> {
    let median =
        |subject: &MeasuredSubject| figure.spread(subject, &case.settings).map(|spread| spread.median);
    let ours = case.subjects.iter().find(|subject| subject.name == lab::NAME).and_then(median)?;
    let ratio = |subject: &MeasuredSubject| {
        median(subject).map_or_else(String::new, |it| format!("{:.2}x", it / ours))
    };
    (case.subjects.len() > 1).then(|| case.subjects.iter().map(ratio).collect())
}

#[cfg(test)]
mod tests {
    use super::{FIGURES, Figure, LEAST_US, left_out, line};
    use crate::storm::cpu::{
        Cpu, Distribution, MeasuredCase, MeasuredSubject, Round, Settings, WithoutAgent,
    };

    /// Returns a subject with rounds of one request each, which took the host these times.
    fn subject(busy_us: &[f64]) -> MeasuredSubject {
        let round = |busy_us: &f64| Round {
            requests: 1,
            wall_us: 1e6,
            cpu: Cpu { busy_us: *busy_us, ..Cpu::default() },
            ..Round::default()
        };
        MeasuredSubject { name: "x".into(), rounds: busy_us.iter().map(round).collect() }
    }

    #[test]
    fn the_rounds_in_the_middle_have_the_median_of_the_table() {
        let settings = Settings::default();
        for busy in [
            &[3e6][..],
            &[3e6, 1e6],
            &[3e6, 1e6, 2e6],
            &[4e6, 3e6, 1e6, 2e6],
            &[3e6, LEAST_US - 1.0, 1e6, 2e6, 4e6],
            &[3e6, f64::NAN, 1e6],
        ] {
            let (figure, subject) = (Figure::named("host CPU / request"), subject(busy));
            let middle = figure.middle(&subject, &settings);
            let mean = middle.iter().map(|round| round.cpu.host_us()).sum::<f64>() / middle.len() as f64;
            let spread = figure.spread(&subject, &settings).expect("a median");
            assert_eq!(mean, spread.median, "{busy:?}");
        }
        for nothing in [&[][..], &[1.0], &[f64::INFINITY, f64::NAN]] {
            let middle = Figure::named("host CPU / request").middle(&subject(nothing), &settings).len();
            assert_eq!(middle, 0, "{nothing:?}");
        }
    }

    #[test]
    fn rounds_that_a_figure_leaves_out_are_said_with_their_number() {
        let said = |busy: &[f64]| {
            left_out(&MeasuredCase { settings: Settings::default(), subjects: vec![subject(busy)] })
                .join("\n")
        };
        assert_eq!(said(&[3e6, 1e6]), "");
        assert_eq!(said(&[]), "");
        let expected =
            "x: host CPU / request, server CPU / request without 1 of 3 rounds, in which the machine worked";
        let one = said(&[3e6, 1.0, 2e6]);
        assert!(one.starts_with(expected) && one.contains("200 ms"), "{one}");
        assert!(said(&[1.0, 1.0]).contains("without 2 of 2 rounds"), "{}", said(&[1.0, 1.0]));
        let mut partly = subject(&[3e6, 1e6]);
        partly.rounds[0].attach_us = Some(5.0);
        let case = MeasuredCase { settings: Settings::default(), subjects: vec![partly] };
        assert_eq!(left_out(&case), ["x: attach / tap without 1 of 2 rounds, where nothing was measured."]);
    }

    #[test]
    fn an_empty_round_has_no_figure_but_its_failures() {
        let subject = MeasuredSubject { name: "x".into(), rounds: vec![Round::default()] };
        for figure in FIGURES {
            let values = figure.values(&subject, &Settings::default());
            assert_eq!(values.len(), usize::from(figure.name == "failed requests"), "{}", figure.name);
        }
    }

    #[test]
    fn an_agent_that_was_killed_is_said_with_what_it_left_undone() {
        let round = Round {
            requests: 4,
            kernel: Some(Distribution { buckets: vec![(10.0, 3)], max_us: 10.0 }),
            without_agent: Some(WithoutAgent { answered: 3, waiting: 2, missed: 1 }),
            ..Round::default()
        };
        assert!(
            line(&round).ends_with(", without an agent: 3 answered, 2 waiting, 1 missed"),
            "{}",
            line(&round)
        );
        assert_eq!(round.broken(), 1);
        let subject = MeasuredSubject { name: "x".into(), rounds: vec![round] };
        let value = |name| Figure::named(name).values(&subject, &Settings::default())[0];
        let names = ["answered, no agent", "waiting, no agent", "missed, no agent", "kernel answers"];
        assert_eq!(names.map(value), [3.0, 2.0, 1.0, 0.75]);
        assert!(Figure::named("missed, no agent").is_promise());
    }

    #[test]
    fn cost_is_per_answered_request_and_excludes_the_generator() {
        let cpu = Cpu {
            server_user_us: 100_000.0,
            server_system_us: 200_000.0,
            generator_us: 500_000.0,
            busy_us: 1_200_000.0,
            ..Cpu::default()
        };
        let round = Round { requests: 100_000, failures: 7, wall_us: 50e6, cpu, ..Round::default() };
        let subject = MeasuredSubject { name: "x".into(), rounds: vec![round] };
        let value = |name| Figure::named(name).values(&subject, &Settings::default())[0];
        assert_eq!(value("host CPU / request"), 7.0);
        assert_eq!(value("server CPU / request"), 3.0);
        assert_eq!(value("requests / s"), 2_000.0);
        let short = Round { cpu: Cpu { busy_us: LEAST_US - 1.0, ..cpu }, ..subject.rounds[0].clone() };
        let subject = MeasuredSubject { name: "x".into(), rounds: vec![short] };
        assert!(Figure::named("host CPU / request").values(&subject, &Settings::default()).is_empty());
    }
}
