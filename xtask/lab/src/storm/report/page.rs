//! The page: the results in words, drawings and a table for each case.

use super::xml::{Attribute, Xml};
use super::{STYLE, figures, size, units, words};
use crate::storm::figure::{FIGURES, left_out};
use crate::storm::model::{Case, Environment, Results};

/// Returns the whole page.
pub(super) fn page(results: &Results) -> String {
    let names = figures::subjects(results);
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
            if let Some((drawing, caption)) = figures::memory(results, &names) {
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
    match words::foremost(results) {
        None => xml.line("p", &[("class", &"bad")], "No case was measured."),
        Some(case) => {
            xml.line("p", &[("class", &"quiet")], format!("{}:", case.settings));
            xml.within("ul", &[("class", &"lead")], |xml| {
                for line in words::headlines(case) {
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
pub(super) fn environment(results: &Results) -> Vec<String> {
    let Environment { kernel, processor, cores, memory_bytes, commit, started, versions, notes, .. } =
        &results.environment;
    let memory = units::memory(*memory_bytes as f64);
    let mut lines =
        vec![format!("Commit {commit}, {started}. {kernel}; {processor}, {cores} cores, {memory}.")];
    if !versions.is_empty() {
        let all: Vec<_> = versions.iter().map(|(name, version)| format!("{name}: {version}")).collect();
        lines.push(format!("{}.", all.join("; ")));
    }
    lines.extend(notes.iter().cloned());
    lines
}

fn section(xml: &mut Xml, case: &Case, names: &[&str]) {
    xml.line("h2", &[], &case.settings);
    xml.line("p", &[("class", &"quiet")], format!("{}.", size(case)));
    table(xml, case);
    for line in left_out(case) {
        xml.line("p", &[("class", &"bad")], line);
    }
    reasons(xml, case);
    for (drawing, caption) in figures::of_case(case, names) {
        drawing.figure(xml, Some(caption));
    }
}

fn table(xml: &mut Xml, case: &Case) {
    let measured = |figure: &&crate::storm::figure::Figure| {
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
                            let (median, range) = figures::spread(figure, case, subject);
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
fn reasons(xml: &mut Xml, case: &Case) {
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
         attached. xdp-imds and haproxy hold the guests' documents in their own memory. Those of nginx and neutron \
         are files on a file system in memory, which is charged to neither.",
        "Peers are tuned as a careful operator would do it. nginx: a worker per core, sendfile, open files cached, \
         files in memory. haproxy: one for each of several networks, in a namespace of its own, answering from \
         memory by itself. neutron: the same proxies as OpenStack Neutron configures them. They forward requests \
         over a Unix socket to one nginx, where Neutron has a Python program. Bridges flood no frames and have a \
         neighbour entry for every guest.",
    ];
    for line in lines {
        xml.line("p", &[], line);
    }
    if results.environment.seed != 0 {
        xml.line("p", &[], format!("Seed: {}.", results.environment.seed));
    }
}
