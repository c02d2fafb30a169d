//! Describes the result in a few sentences: ratios of medians of xdp-imds and each peer.

use super::units;
use crate::storm::figure::Figure;
use crate::storm::model::{Case, Results, Subject};

/// The subject that the others are compared with.
const OURS: &str = "xdp-imds";

/// The least ratio that counts as a difference.
const SAME: f64 = 1.1;

/// Returns the most significant case: the one with most VMs, then with the smallest user-data.
pub(super) fn foremost(results: &Results) -> Option<&Case> {
    let key = |case: &&Case| (case.settings.vms, std::cmp::Reverse(case.settings.user_data_bytes));
    // Of equal cases the first is returned, so the order of dialects on the command line decides.
    results.cases.iter().rev().max_by_key(key)
}

/// Returns sentences about one case, omitting figures that were not measured.
pub(super) fn headlines(case: &Case) -> Vec<String> {
    let Some(ours) = case.subjects.iter().find(|subject| subject.name == OURS) else {
        return vec![format!("{OURS} was not measured here.")];
    };
    let mut lines = vec![failures(case, ours)];
    let peers: Vec<_> = case.subjects.iter().filter(|subject| subject.name != OURS).collect();
    let vms = f64::from(case.settings.vms);
    for (figure, times, begins, better, worse) in [
        ("host CPU / request", 1.0, "A request costs the host".to_owned(), "less than", "more than"),
        ("boot p99", 1.0, "99 % of boots take at most".to_owned(), "shorter than", "longer than"),
        (
            "server memory / VM",
            vms,
            format!("With {} VMs the server takes", units::number(vms)),
            "less memory than",
            "more memory than",
        ),
    ] {
        let figure = Figure::named(figure);
        let Some(own) = figure.spread(ours, &case.settings) else { continue };
        let compared: Vec<_> = peers
            .iter()
            .filter_map(|peer| {
                let other = figure.spread(peer, &case.settings)?;
                Some(format!("{} with {}", ratio(own.median, other.median, better, worse)?, peer.name))
            })
            .collect();
        let value = super::figures::show(figure.unit, times * own.median);
        let compared = if compared.is_empty() { String::new() } else { format!(": {}", compared.join(", ")) };
        lines.push(format!("{begins} {value}{compared}."));
    }
    lines
}

/// Returns the ratio and its direction in words; `None` if a value is missing.
fn ratio(own: f64, other: f64, better: &str, worse: &str) -> Option<String> {
    if own <= 0.0 || other <= 0.0 {
        return None;
    }
    let (factor, word) = if other >= own { (other / own, better) } else { (own / other, worse) };
    if factor < SAME {
        return Some("about the same".into());
    }
    Some(format!("{} times {word}", units::number((factor * 10.0).round() / 10.0)))
}

fn failures(case: &Case, ours: &Subject) -> String {
    let requests: u64 = ours.rounds.iter().map(|round| round.requests + round.failures).sum();
    let failed = |subject: &Subject| subject.rounds.iter().map(|round| round.failures).sum::<u64>();
    let mut line = match failed(ours) {
        0 => format!("None of {} requests failed", units::number(requests as f64)),
        count => {
            format!("{} of {} requests FAILED", units::number(count as f64), units::number(requests as f64))
        }
    };
    for peer in case.subjects.iter().filter(|peer| peer.name != OURS && failed(peer) > 0) {
        line += &format!("; with {} {} did", peer.name, units::number(failed(peer) as f64));
    }
    line + "."
}
