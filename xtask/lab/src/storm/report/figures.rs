//! Makes drawings from results.

use super::chart::{Axis, Bars, Curve, Drawing, Plot};
use super::scale::Scale;
use super::units;
use crate::storm::figure::{Figure, Unit};
use crate::storm::model::{Case, Cpu, Distribution, Results, Round, Spread, Subject};
use std::array;

/// The most points of a curve, more than a screen can show.
const MAX_POINTS: usize = 500;
/// The most nines of a tail that are shown.
const MAX_NINES: u8 = 6;

/// Returns the subjects of a run in the order of their first appearance, which determines their colours.
pub(super) fn subjects(results: &Results) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for subject in results.cases.iter().flat_map(|case| &case.subjects) {
        if !names.contains(&subject.name.as_str()) {
            names.push(&subject.name);
        }
    }
    names
}

/// Returns the drawings of one case, each with its caption.
pub(super) fn of_case(case: &Case, names: &[&str]) -> Vec<(Drawing, &'static str)> {
    let per_request = |round: &Round| round.request.clone();
    let per_boot = |round: &Round| round.boot.clone();
    vec![
        (
            cpu(case),
            "CPU time of the whole machine per answered request, by user: the median of the table, in the round or \
             the mean of the two rounds that have it. The rest of the host is the kernel's own work: on taps mostly within the guests' system calls, beyond their price \
             on a tap that nothing serves, otherwise in softirqs and kernel threads. The load generator's own work \
             is shown, but not charged to any subject.",
        ),
        (
            finished(case, names),
            "Guests that have all of their documents, by time since the storm began, in each subject's round of \
             median boot p99, of two in the middle the faster one.",
        ),
        (
            distribution("Time of a request", case, names, per_request),
            "From the first SYN of a connection to the last byte of its answer, over all rounds. The vertical axis \
             is the share of requests that took no longer, and each mark divides the rest by ten. Further left is \
             better.",
        ),
        (
            distribution("Time of a whole boot", case, names, per_boot),
            "From a guest's first frame (ARP) to the last byte of its last answer, over all rounds. It is the time \
             for which a booting guest waits for its metadata.",
        ),
    ]
}

/// Returns memory by number of VMs; `None` if no subject has cases with different numbers.
pub(super) fn memory(results: &Results, names: &[&str]) -> Option<(Drawing, &'static str)> {
    let curve = |(place, name): (usize, &&str)| {
        let of = |case: &Case| {
            let subject = case.subjects.iter().find(|subject| subject.name == **name)?;
            let total = |r: &Round| (r.memory.server_bytes + r.memory.kernel_bytes.unwrap_or(0)) as f64;
            let spread = Spread::of(subject.rounds.iter().map(total).filter(|total| *total > 0.0))?;
            Some((f64::from(case.settings.vms), spread.median))
        };
        let mut points: Vec<_> = results.cases.iter().filter_map(of).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Of several cases with the same number of VMs, the most demanding one is shown.
        points.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 = if same { kept.1.max(next.1) } else { kept.1 };
            same
        });
        Curve { subject: place, name: (*name).to_owned(), points }
    };
    let curves: Vec<_> =
        names.iter().enumerate().map(curve).filter(|curve| !curve.points.is_empty()).collect();
    let points = || curves.iter().flat_map(|curve| curve.points.iter().copied());
    if !curves.iter().any(|curve| curve.points.len() > 1) {
        return None;
    }
    let plot = Plot {
        title: "Memory by number of VMs".into(),
        x: Axis {
            title: "VMs attached",
            scale: Scale::linear(points().map(|(x, _)| x)),
            label: units::number,
        },
        y: Axis {
            title: "server and kernel memory",
            scale: Scale::binary(points().map(|(_, y)| y)),
            label: units::memory,
        },
        curves,
        marked: true,
    };
    let caption = "Resident memory of the server's processes, and growth of the kernel's own memory, with all \
                   guests attached. Of several cases with the same number of VMs, the largest is shown.";
    Some((Drawing::Plot(plot), caption))
}

fn place(names: &[&str], subject: &Subject) -> usize {
    names.iter().position(|name| *name == subject.name).unwrap_or(names.len())
}

fn distribution(title: &str, case: &Case, names: &[&str], of: fn(&Round) -> Distribution) -> Drawing {
    let joined = |subject: &Subject| {
        let all: Vec<_> = subject.rounds.iter().map(of).collect();
        Distribution::joined(all.iter())
    };
    let all: Vec<_> = case.subjects.iter().map(|subject| (subject, joined(subject))).collect();
    let most = all.iter().map(|(_, times)| times.count()).max().unwrap_or(0);
    let nines = (most.max(10) as f64).log10().ceil().min(f64::from(MAX_NINES)) as u8;
    let curves: Vec<_> = all
        .iter()
        .map(|(subject, times)| Curve {
            subject: place(names, subject),
            name: subject.name.clone(),
            points: cumulated(times),
        })
        .collect();
    let times = curves.iter().flat_map(|curve| curve.points.iter().map(|(x, _)| *x));
    Drawing::Plot(Plot {
        title: title.to_owned(),
        x: Axis {
            title: "time (logarithmic)",
            scale: Scale::log(times.collect::<Vec<_>>().into_iter()),
            label: units::time,
        },
        y: Axis { title: "share that took no longer", scale: Scale::Tail { nines }, label: units::share },
        curves,
        marked: false,
    })
}

/// Returns at most [`MAX_POINTS`] points of the cumulative distribution, and always the last.
fn cumulated(times: &Distribution) -> Vec<(f64, f64)> {
    let count = times.count();
    let mut passed = 0;
    let all: Vec<_> = times
        .buckets
        .iter()
        .map(|&(bound, within)| {
            passed += within;
            (bound.min(times.max_us), passed as f64 / count as f64)
        })
        .collect();
    thinned(all)
}

/// Keeps every n-th point, so that at most [`MAX_POINTS`] remain, and the last one.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let every = points.len().div_ceil(MAX_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    points
        .into_iter()
        .enumerate()
        .filter(|(at, _)| at % every == 0 || *at == last)
        .map(|(_, point)| point)
        .collect()
}

fn finished(case: &Case, names: &[&str]) -> Drawing {
    let curve = |subject: &Subject| {
        let middle = Figure::named("boot p99").middle(subject, &case.settings);
        let finished = middle.first().into_iter().flat_map(|round| &round.finished);
        let points = finished.map(|&(us, boots)| (us, f64::from(boots)));
        let points = std::iter::once((0.0, 0.0)).chain(points).collect();
        Curve { subject: place(names, subject), name: subject.name.clone(), points: thinned(points) }
    };
    let curves: Vec<_> = case.subjects.iter().map(curve).collect();
    let times: Vec<_> = curves.iter().flat_map(|curve| curve.points.iter().map(|(x, _)| *x)).collect();
    Drawing::Plot(Plot {
        title: "Boots finished over time".into(),
        x: Axis {
            title: "time since the storm began",
            scale: Scale::linear(times.into_iter()),
            label: units::time,
        },
        y: Axis {
            title: "guests finished",
            scale: Scale::linear(std::iter::once(f64::from(case.settings.vms))),
            label: units::number,
        },
        curves,
        marked: false,
    })
}

fn cpu(case: &Case) -> Drawing {
    let figure = Figure::named("host CPU / request");
    let row = |subject: &Subject| {
        let middle = figure.middle(subject, &case.settings);
        let Spread { median, .. } = figure.spread(subject, &case.settings)?;
        let parts = |round: &&Round| {
            let Cpu { server_user_us, server_system_us, generator_us, .. } = round.cpu;
            let parts = [server_user_us, server_system_us, round.cpu.rest_us(), generator_us];
            parts.map(|us| us / (round.requests * middle.len() as u64) as f64)
        };
        let sum =
            middle.iter().map(parts).fold([0.0; 4], |sum, parts| array::from_fn(|at| sum[at] + parts[at]));
        let name = format!("{}: {} without the generator", subject.name, units::time(median));
        Some((name, sum.to_vec()))
    };
    let rows: Vec<_> = case.subjects.iter().filter_map(row).collect();
    let totals: Vec<f64> = rows.iter().map(|(_, parts): &(String, Vec<f64>)| parts.iter().sum()).collect();
    Drawing::Bars(Bars {
        title: "CPU time per request".into(),
        axis: Axis {
            title: "CPU time per request, all cores",
            scale: Scale::linear(totals.into_iter()),
            label: units::time,
        },
        parts: vec!["server, user", "server, system", "rest of the host", "load generator"],
        rows,
    })
}

/// Formats a figure's value with its unit.
pub(crate) fn show(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Time => units::time(value),
        Unit::Memory => units::memory(value),
        Unit::Share => units::share(value),
        Unit::Rate | Unit::Count => units::number(value),
    }
}

/// Formats median and range; a dash stands for a missing measurement.
pub(super) fn spread(figure: &Figure, case: &Case, subject: &Subject) -> (String, String) {
    let Some(Spread { low, median, high }) = figure.spread(subject, &case.settings) else {
        return ("–".into(), String::new());
    };
    let range = if low == high {
        String::new()
    } else {
        format!("{} … {}", show(figure.unit, low), show(figure.unit, high))
    };
    (show(figure.unit, median), range)
}
