//! Shows a storm's results as a page for colleagues, and as one image. Each is a single file.
//!
//! Both are XML. The page is also valid HTML. Both have colours for light and dark screens and for paper.

pub(crate) mod chart;

#[cfg(test)]
mod tests;

use chart::{At, Attribute, Axis, Bars, Curve, Drawing, Plot, Scale, WIDTH, Xml};
use std::fmt::Display;
use std::{array, fmt};

use crate::storm::cpu::{
    Cpu, Distribution, Environment, MeasuredCase, MeasuredSubject, Results, Round, Spread,
};
use crate::storm::figure::{FIGURES, Figure, Unit, left_out};

pub(crate) const STYLE: &str = include_str!("report/style.css");
/// Space around the drawings of an image.
const MARGIN: f64 = 20.0;
/// Height of a line of text.
const LINE: f64 = 22.0;

/// Returns the page.
pub(crate) fn html(results: &Results) -> String {
    page(results)
}

/// Returns the most significant case as one SVG image for a README or a slide, with drawings in two columns.
pub(crate) fn svg(results: &Results) -> String {
    let names = subjects(results);
    let case = foremost(results);
    let mut drawings = case.map(|case| of_case(case, &names)).unwrap_or_default();
    drawings.extend(memory_chart(results, &names));
    let drawings: Vec<Drawing> = drawings.into_iter().map(|(drawing, _)| drawing).collect();
    let rows: Vec<&[Drawing]> = drawings.chunks(2).collect();
    let heights: Vec<f64> =
        rows.iter().map(|row| row.iter().map(Drawing::height).fold(0.0, f64::max) + MARGIN).collect();

    let title = case
        .map_or_else(|| "No case was measured".to_owned(), |case| format!("Boot storm: {}", case.settings));
    let heads = case.map(headlines).unwrap_or_default();
    let mut below = case.map(left_out).unwrap_or_default();
    below.extend(environment(results));
    let lines = (1 + heads.len() + below.len()) as f64 * LINE;
    let (width, height) = (2.0 * WIDTH + 3.0 * MARGIN, lines + heights.iter().sum::<f64>() + 3.0 * MARGIN);

    let view = format!("0 0 {} {}", At(width), At(height));
    let mut xml = Xml::default();
    let root: [Attribute<'_>; 3] =
        [("xmlns", &"http://www.w3.org/2000/svg"), ("viewBox", &view), ("role", &"img")];
    xml.within("svg", &root, |xml| {
        xml.line("title", &[], &title);
        xml.within("style", &[], |xml| xml.verbatim(STYLE));
        let back: [Attribute<'_>; 3] = [("class", &"back"), ("width", &"100%"), ("height", &"100%")];
        xml.empty("rect", &back);
        let mut y = MARGIN + 8.0;
        text(xml, &mut y, "title", &title);
        heads.iter().for_each(|words| text(xml, &mut y, "head", words));
        for (row, height) in rows.iter().zip(&heights) {
            for (column, drawing) in row.iter().enumerate() {
                let x = MARGIN + column as f64 * (WIDTH + MARGIN);
                let moved = format!("translate({} {})", At(x), At(y));
                xml.within("g", &[("transform", &moved)], |xml| drawing.draw(xml));
            }
            y += height;
        }
        below.iter().for_each(|words| text(xml, &mut y, "note", words));
    });
    xml.finish()
}

/// Writes a line of text, and moves `y` below it.
fn text(xml: &mut Xml, y: &mut f64, class: &str, words: &str) {
    xml.line("text", &[("class", &class), ("x", &At(MARGIN)), ("y", &At(*y))], words);
    *y += LINE;
}

/// Formats the settings of a case.
impl Display for super::cpu::Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dialect, vms, user_data_bytes, requests_per_boot: _, options } = self;
        let machines = if *vms == 1 { "VM" } else { "VMs" };
        let size = memory(*user_data_bytes as f64);
        write!(f, "{dialect}, {} {machines}, user-data {size}", number(f64::from(*vms)))?;
        options.iter().try_for_each(|(option, value)| write!(f, ", {option} {value}"))
    }
}

/// Returns the numbers of rounds and of requests behind the figures of a case.
fn size(case: &MeasuredCase) -> String {
    let rounds = case.subjects.iter().map(|subject| subject.rounds.len()).max().unwrap_or(0);
    let requests = case.settings.requests_per_boot;
    format!("{rounds} rounds of each subject, alternating; {requests} requests per boot")
}

// Makes drawings from results.

/// The most points of a curve, more than a screen can show.
const MAX_POINTS: usize = 500;
/// The most nines of a tail that are shown.
const MAX_NINES: u8 = 6;

/// Returns the subjects of a run in the order of their first appearance, which determines their colours.
fn subjects(results: &Results) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for subject in results.cases.iter().flat_map(|case| &case.subjects) {
        if !names.contains(&subject.name.as_str()) {
            names.push(&subject.name);
        }
    }
    names
}

/// Returns the drawings of one case, each with its caption.
fn of_case(case: &MeasuredCase, names: &[&str]) -> Vec<(Drawing, &'static str)> {
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
fn memory_chart(results: &Results, names: &[&str]) -> Option<(Drawing, &'static str)> {
    let curve = |(place, name): (usize, &&str)| {
        let of = |case: &MeasuredCase| {
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
        x: Axis { title: "VMs attached", scale: Scale::linear(points().map(|(x, _)| x)), label: number },
        y: Axis {
            title: "server and kernel memory",
            scale: Scale::binary(points().map(|(_, y)| y)),
            label: memory,
        },
        curves,
        marked: true,
    };
    let caption = "Resident memory of the server's processes, and growth of the kernel's own memory, with all \
                   guests attached. Of several cases with the same number of VMs, the largest is shown.";
    Some((Drawing::Plot(plot), caption))
}

fn place(names: &[&str], subject: &MeasuredSubject) -> usize {
    names.iter().position(|name| *name == subject.name).unwrap_or(names.len())
}

fn distribution(title: &str, case: &MeasuredCase, names: &[&str], of: fn(&Round) -> Distribution) -> Drawing {
    let joined = |subject: &MeasuredSubject| {
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
            label: time,
        },
        y: Axis { title: "share that took no longer", scale: Scale::Tail { nines }, label: share },
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

fn finished(case: &MeasuredCase, names: &[&str]) -> Drawing {
    let curve = |subject: &MeasuredSubject| {
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
        x: Axis { title: "time since the storm began", scale: Scale::linear(times.into_iter()), label: time },
        y: Axis {
            title: "guests finished",
            scale: Scale::linear(std::iter::once(f64::from(case.settings.vms))),
            label: number,
        },
        curves,
        marked: false,
    })
}

fn cpu(case: &MeasuredCase) -> Drawing {
    let figure = Figure::named("host CPU / request");
    let row = |subject: &MeasuredSubject| {
        let middle = figure.middle(subject, &case.settings);
        let Spread { median, .. } = figure.spread(subject, &case.settings)?;
        let parts = |round: &&Round| {
            let Cpu { server_user_us, server_system_us, generator_us, .. } = round.cpu;
            let parts = [server_user_us, server_system_us, round.cpu.rest_us(), generator_us];
            parts.map(|us| us / (round.requests * middle.len() as u64) as f64)
        };
        let sum =
            middle.iter().map(parts).fold([0.0; 4], |sum, parts| array::from_fn(|at| sum[at] + parts[at]));
        let name = format!("{}: {} without the generator", subject.name, time(median));
        Some((name, sum.to_vec()))
    };
    let rows: Vec<_> = case.subjects.iter().filter_map(row).collect();
    let totals: Vec<f64> = rows.iter().map(|(_, parts): &(String, Vec<f64>)| parts.iter().sum()).collect();
    Drawing::Bars(Bars {
        title: "CPU time per request".into(),
        axis: Axis {
            title: "CPU time per request, all cores",
            scale: Scale::linear(totals.into_iter()),
            label: time,
        },
        parts: vec!["server, user", "server, system", "rest of the host", "load generator"],
        rows,
    })
}

/// Formats a figure's value with its unit.
pub(crate) fn show(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Time => time(value),
        Unit::Memory => memory(value),
        Unit::Share => share(value),
        Unit::Rate | Unit::Count => number(value),
    }
}

/// Formats median and range; a dash stands for a missing measurement.
fn spread(figure: &Figure, case: &MeasuredCase, subject: &MeasuredSubject) -> (String, String) {
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

// The page: the results in words, drawings and a table for each case.

/// Returns the whole page.
fn page(results: &Results) -> String {
    let names = subjects(results);
    let mut xml = Xml::default();
    xml.verbatim("<!DOCTYPE html>\n");
    let root: [Attribute<'_>; 2] = [("lang", &"en"), ("xmlns", &"http://www.w3.org/1999/xhtml")];
    xml.within("html", &root, |xml| {
        xml.within("head", &[], |xml| {
            xml.empty("meta", &[("charset", &"utf-8")]);
            let view = "width=device-width, initial-scale=1";
            xml.empty("meta", &[("name", &"viewport"), ("content", &view)]);
            xml.line("title", &[], "xdp-imds: boot storm");
            xml.within("style", &[], |xml| xml.verbatim(STYLE));
        });
        xml.within("body", &[], |xml| {
            introduction(xml, results);
            for case in &results.cases {
                section(xml, case, &names);
            }
            if let Some((drawing, caption)) = memory_chart(results, &names) {
                xml.line("h2", &[], "Memory");
                drawing.figure(xml, Some(caption));
            }
            method(xml, results);
        });
    });
    xml.finish()
}

fn introduction(xml: &mut Xml, results: &Results) {
    xml.line("h1", &[], "Boot storm");
    let guests = "Guests on real taps boot at the same moment and make all requests of cloud-init. Each server \
                  gives the same guests the same bytes on the same taps. Servers run one after the other, in every \
                  round.";
    xml.line("p", &[], guests);
    match foremost(results) {
        None => xml.line("p", &[("class", &"bad")], "No case was measured."),
        Some(case) => {
            xml.line("p", &[("class", &"quiet")], format!("{}:", case.settings));
            xml.within("ul", &[("class", &"lead")], |xml| {
                for line in headlines(case) {
                    xml.line("li", &[], line);
                }
            });
        }
    }
    for line in environment(results) {
        xml.line("p", &[("class", &"quiet")], line);
    }
}

/// Returns lines that describe the machine and the software.
fn environment(results: &Results) -> Vec<String> {
    let Environment { kernel, processor, cores, memory_bytes, commit, started, versions, notes, .. } =
        &results.environment;
    let memory = memory(*memory_bytes as f64);
    let mut lines =
        vec![format!("Commit {commit}, {started}. {kernel}; {processor}, {cores} cores, {memory}.")];
    if !versions.is_empty() {
        let all: Vec<_> = versions.iter().map(|(name, version)| format!("{name}: {version}")).collect();
        lines.push(format!("{}.", all.join("; ")));
    }
    lines.extend(notes.iter().cloned());
    lines
}

fn section(xml: &mut Xml, case: &MeasuredCase, names: &[&str]) {
    xml.line("h2", &[], &case.settings);
    xml.line("p", &[("class", &"quiet")], format!("{}.", size(case)));
    table(xml, case);
    for line in left_out(case) {
        xml.line("p", &[("class", &"bad")], line);
    }
    reasons(xml, case);
    for (drawing, caption) in of_case(case, names) {
        drawing.figure(xml, Some(caption));
    }
}

fn table(xml: &mut Xml, case: &MeasuredCase) {
    let measured = |figure: &&Figure| {
        case.subjects.iter().any(|subject| figure.spread(subject, &case.settings).is_some())
    };
    xml.within("div", &[("class", &"scroll")], |xml| {
        xml.within("table", &[], |xml| {
            xml.line("caption", &[], "Median of the rounds; below it the lowest and the highest round.");
            xml.within("thead", &[], |xml| {
                xml.within("tr", &[], |xml| {
                    xml.line("th", &[], "");
                    for subject in &case.subjects {
                        xml.line("th", &[("scope", &"col")], &subject.name);
                    }
                });
            });
            xml.within("tbody", &[], |xml| {
                for figure in FIGURES.iter().filter(measured) {
                    xml.within("tr", &[], |xml| {
                        xml.line("th", &[("scope", &"row")], figure.name);
                        for subject in &case.subjects {
                            let (median, range) = spread(figure, case, subject);
                            let failed = figure.is_promise()
                                && figure.values(subject, &case.settings).iter().any(|&v| v > 0.0);
                            xml.within("td", &[("class", &if failed { "bad" } else { "" })], |xml| {
                                xml.text(median);
                                xml.within("span", &[("class", &"range")], |xml| xml.text(range));
                            });
                        }
                    });
                }
            });
        });
    });
}

/// Lists the reasons of failed requests.
fn reasons(xml: &mut Xml, case: &MeasuredCase) {
    for subject in &case.subjects {
        for (reason, count) in subject.rounds.iter().flat_map(|round| &round.reasons) {
            xml.line("p", &[("class", &"bad")], format!("{}: {reason} ({count} times)", subject.name));
        }
    }
}

fn method(xml: &mut Xml, results: &Results) {
    xml.line("h2", &[], "Method");
    let lines = [
        "host CPU / request: CPU time of the whole machine during a round, minus the load generator's own, divided \
         by the requests answered. It includes the time of the server's processes and the kernel's work for them in \
         softirqs, wherever they ran. The generator's own time is its time in user mode and the price of its system \
         calls on a tap that nothing serves, measured before the first round.",
        "server CPU / request: the time of the server's processes alone.",
        "rounds: servers are started for each round, in another order each time, and have served no guest before. \
         Guests boot again until the time of the round is over, so most boots of a round are repetitions.",
        "memory: resident memory of the server's processes, and growth of the kernel's memory, with all guests \
         attached. xdp-imds and haproxy hold the guests' documents in their own memory. Those of nginx, and of the \
         nginx that neutron and xdp-imds-nova ask in place of Nova, are files on a file system in memory, which is \
         charged to none.",
        "Peers are tuned as a careful operator would do it. nginx: a worker per core, sendfile, open files cached, \
         files in memory. haproxy: one for each of several networks, in a namespace of its own, answering from \
         memory by itself. neutron: neutron-ovn-metadata-agent and the haproxies that it starts, with real databases, \
         and nginx in place of Nova, whose CPU does not count. neutron-4: the same with 4 workers. xdp-imds-nova: our \
         agent with these databases and this Nova. Bridges flood no frames and have a neighbour entry for every \
         guest.",
    ];
    for line in lines {
        xml.line("p", &[], line);
    }
    if results.environment.seed != 0 {
        xml.line("p", &[], format!("Seed: {}.", results.environment.seed));
    }
}

// Describes the result in a few sentences: ratios of medians of xdp-imds and each peer.

/// The subject that the others are compared with.
const OURS: &str = "xdp-imds";

/// The least ratio that counts as a difference.
const SAME: f64 = 1.1;

/// Returns the most significant case: the one with most VMs, then with the smallest user-data.
fn foremost(results: &Results) -> Option<&MeasuredCase> {
    let key = |case: &&MeasuredCase| (case.settings.vms, std::cmp::Reverse(case.settings.user_data_bytes));
    // Of equal cases the first is returned, so the order of dialects on the command line decides.
    results.cases.iter().rev().max_by_key(key)
}

/// Returns sentences about one case, omitting figures that were not measured.
fn headlines(case: &MeasuredCase) -> Vec<String> {
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
            format!("With {} VMs the server takes", number(vms)),
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
        let value = show(figure.unit, times * own.median);
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
    Some(format!("{} times {word}", number((factor * 10.0).round() / 10.0)))
}

fn failures(case: &MeasuredCase, ours: &MeasuredSubject) -> String {
    let requests: u64 = ours.rounds.iter().map(|round| round.requests + round.failures).sum();
    let failed = |subject: &MeasuredSubject| subject.rounds.iter().map(|round| round.failures).sum::<u64>();
    let mut line = match failed(ours) {
        0 => format!("None of {} requests failed", number(requests as f64)),
        count => {
            format!("{} of {} requests FAILED", number(count as f64), number(requests as f64))
        }
    };
    for peer in case.subjects.iter().filter(|peer| peer.name != OURS && failed(peer) > 0) {
        line += &format!("; with {} {} did", peer.name, number(failed(peer) as f64));
    }
    line + "."
}

// Formats quantities with three digits and a unit.

/// Formats a number with three significant digits, without trailing zeros.
pub(crate) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    let magnitude = if value == 0.0 { 0.0 } else { value.abs().log10().floor() };
    let decimals = (2.0 - magnitude).clamp(0.0, 6.0) as usize;
    let text = format!("{value:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    thousands(text)
}

/// Separates groups of three digits by commas, in numbers of five digits or more.
fn thousands(text: &str) -> String {
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let digits = whole.trim_start_matches('-');
    if digits.len() < 5 {
        return text.to_owned();
    }
    let mut out = String::from(if whole.starts_with('-') { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// Formats a time, given in microseconds.
pub(crate) fn time(us: f64) -> String {
    match us.abs() {
        value if value >= 999_500.0 => format!("{} s", number(us / 1e6)),
        value if value >= 999.5 => format!("{} ms", number(us / 1e3)),
        _ => format!("{} µs", number(us)),
    }
}

/// Formats an amount of memory, given in bytes.
pub(crate) fn memory(bytes: f64) -> String {
    const KIB: f64 = 1024.0;
    match bytes.abs() {
        value if value >= KIB * KIB * KIB => format!("{} GiB", number(bytes / (KIB * KIB * KIB))),
        value if value >= KIB * KIB => format!("{} MiB", number(bytes / (KIB * KIB))),
        value if value >= KIB => format!("{} KiB", number(bytes / KIB)),
        _ => format!("{} B", number(bytes)),
    }
}

/// Formats a fraction of 1 as a percentage, with all of its nines.
pub(crate) fn share(share: f64) -> String {
    let percent = format!("{:.4}", share * 100.0);
    format!("{} %", percent.trim_end_matches('0').trim_end_matches('.'))
}
