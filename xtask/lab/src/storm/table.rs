//! Formats the table at the end of a run, and the line at the end of a round.

use super::agent;
use super::figure::{FIGURES, Figure, left_out};
use super::model::{Case, Results, Round, Spread, Subject};
use super::report::show;
use std::fmt::Write as _;

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
    if let Some(signer_us) = round.signer_us {
        let _ = write!(text, ", signer {:.1} µs/request", signer_us / requests);
    }
    if round.retransmissions > 0 {
        let _ = write!(text, ", {} retransmissions", round.retransmissions);
    }
    if round.retries > 0 {
        let _ = write!(text, ", {} repeated", round.retries);
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
fn of_case(case: &Case) -> String {
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
    let answered =
        |subject: &Subject| subject.rounds.iter().map(|round| round.requests).sum::<u64>().to_string();
    row("answered requests", case.subjects.iter().map(answered).collect());
    for (name, figure) in [("host CPU ratio", "host CPU / request"), ("boot p99 ratio", "boot p99")] {
        if let Some(ratios) = ratios(case, Figure::named(figure)) {
            row(name, ratios);
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
fn ratios(case: &Case, figure: &Figure) -> Option<Vec<String>> {
    let median = |subject: &Subject| figure.spread(subject, &case.settings).map(|spread| spread.median);
    let ours = case.subjects.iter().find(|subject| subject.name == agent::NAME).and_then(median)?;
    let ratio =
        |subject: &Subject| median(subject).map_or_else(String::new, |it| format!("{:.2}x", it / ours));
    (case.subjects.len() > 1).then(|| case.subjects.iter().map(ratio).collect())
}
