//! The results of a soak: a table, a page with charts, and JSON.

use super::bounds::{Verdict, judge, memory_slope};
use super::shared::Shared;
use super::watch::{Figure, Sample};
use crate::storm::report::STYLE;
use crate::storm::report::chart::{Axis, Curve, Drawing, Plot};
use crate::storm::report::scale::Scale;
use crate::storm::report::units;
use crate::storm::report::xml::{Attribute, Xml};
use anyhow::{Context as _, Result};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// The results of one soak.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    seed: u64,
    taps: u64,
    minutes: f64,
    counts: Vec<(&'static str, u64)>,
    verdicts: Vec<Verdict>,
    breaches: Vec<String>,
    /// Samples of the last agent's life, taken after its warm-up.
    samples: Vec<Sample>,
}

impl Report {
    pub(super) fn new(seed: u64, taps: u64, minutes: f64, samples: Vec<Sample>, shared: &Shared) -> Self {
        let verdicts = judge(&samples, taps);
        let (counts, breaches) = (shared.counts.all(), shared.breaches());
        Self { seed, taps, minutes, counts, verdicts, breaches, samples }
    }

    /// Returns one sentence for each broken bound and each breach.
    pub(super) fn broken(&self) -> Vec<String> {
        let bounds = self.verdicts.iter().filter(|verdict| !verdict.holds());
        let bounds = bounds.map(|it| {
            format!("{} {}, {} at most", it.bound, shown(it.found, it.unit), shown(it.most, it.unit))
        });
        bounds.chain(self.breaches.iter().cloned()).collect()
    }

    /// Returns the table.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{:.1} minutes, {} taps, seed {}\n\n", self.minutes, self.taps, self.seed);
        for (name, count) in &self.counts {
            let _ = writeln!(text, "{:<40} {count:>14}", name.replace('_', " "));
        }
        let (slope, minutes) = memory_slope(&self.samples);
        let _ = writeln!(
            text,
            "\n{} samples of the last agent over {minutes:.1} minutes; memory {} per minute\n",
            self.samples.len(),
            units::memory(slope)
        );
        let _ = writeln!(text, "{:<40} {:>14} {:>14}", "bound", "found", "at most");
        for verdict in &self.verdicts {
            let Verdict { bound, found, most, unit } = verdict;
            let (found, most) = (shown(*found, unit), shown(*most, unit));
            let broken = if verdict.holds() { "" } else { "  BROKEN" };
            let _ = writeln!(text, "{bound:<40} {found:>14} {most:>14}{broken}");
        }
        for breach in &self.breaches {
            let _ = writeln!(text, "BREACH: {breach}");
        }
        text
    }

    /// Writes the JSON file and the page, if they are wanted.
    pub(super) fn write(&self, json: Option<&Path>, page: Option<&Path>) -> Result<()> {
        let write = |path: &Path, text: String| {
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        if let Some(path) = json {
            write(path, serde_json::to_string_pretty(self)? + "\n")?;
        }
        if let Some(path) = page {
            write(path, self.page())?;
        }
        Ok(())
    }

    fn page(&self) -> String {
        let mut xml = Xml::default();
        xml.verbatim("<!DOCTYPE html>\n");
        let root: [Attribute<'_>; 2] = [("lang", &"en"), ("xmlns", &"http://www.w3.org/1999/xhtml")];
        xml.within("html", &root, |xml| {
            xml.within("head", &[], |xml| {
                xml.empty("meta", &[("charset", &"utf-8")]);
                xml.line("title", &[], "xdp-imds: soak");
                xml.within("style", &[], |xml| xml.verbatim(STYLE));
            });
            xml.within("body", &[], |xml| {
                xml.line("h1", &[], "Soak");
                let broken = self.broken();
                if broken.is_empty() {
                    xml.line("p", &[("class", &"lead")], "Every bound held.");
                }
                broken.iter().for_each(|what| xml.line("p", &[("class", &"bad")], what));
                xml.line("pre", &[], self.text());
                self.drawings().iter().for_each(|drawing| drawing.figure(xml, None));
            });
        });
        xml.finish()
    }

    fn drawings(&self) -> [Drawing; 2] {
        let curve = |subject, name: &str, of: Figure| {
            let point = |sample: &Sample| (sample.at_s / 60.0, of(sample) as f64);
            Curve { subject, name: name.into(), points: self.samples.iter().map(point).collect() }
        };
        let minutes = || Axis {
            title: "minutes since the start",
            scale: Scale::linear(self.samples.iter().map(|sample| sample.at_s / 60.0)),
            label: units::number,
        };
        let counted: [(&str, Figure); 5] = [
            ("descriptors", |sample| sample.fds),
            ("links", |sample| sample.links),
            ("maps", |sample| sample.maps),
            ("programs", |sample| sample.programs),
            ("threads", |sample| sample.threads),
        ];
        let most = counted.iter().flat_map(|(_, of)| self.samples.iter().map(|sample| of(sample) as f64));
        [
            Drawing::Plot(Plot {
                title: "Memory of the agent".into(),
                x: minutes(),
                y: Axis {
                    title: "bytes, without mapped files",
                    scale: Scale::binary(self.samples.iter().map(|sample| sample.rss_bytes as f64)),
                    label: units::memory,
                },
                curves: vec![curve(0, "memory", |sample| sample.rss_bytes)],
                marked: true,
            }),
            Drawing::Plot(Plot {
                title: "Objects the agent holds".into(),
                x: minutes(),
                y: Axis { title: "number", scale: Scale::linear(most), label: units::number },
                curves: (0..).zip(counted).map(|(at, (name, of))| curve(at, name, of)).collect(),
                marked: true,
            }),
        ]
    }
}

fn shown(value: f64, unit: &str) -> String {
    if unit == "B" { units::memory(value) } else { units::number(value) }
}

#[cfg(test)]
mod tests {
    use super::super::bounds::HUB_DEVICES;
    use super::Report;
    use crate::soak::shared::Shared;
    use crate::soak::watch::Sample;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    fn report(leak: u64) -> Report {
        let sample = |n: u64| Sample {
            at_s: n as f64 * 60.0,
            rss_bytes: 50 << 20,
            fds: 90 + n * leak,
            ports: 64,
            identities: 64,
            records: 64,
            hub_devices: HUB_DEVICES,
            ..Sample::default()
        };
        let shared = Shared::new(Arc::new(AtomicBool::new(false)));
        Report::new(7, 64, 10.0, (0..10).map(sample).collect(), &shared)
    }

    #[test]
    fn a_broken_bound_is_shown_with_its_value() {
        assert_eq!(report(0).broken(), Vec::<String>::new());
        assert_eq!(report(1).broken(), ["open descriptors vary by 9, 4 at most"]);
        assert!(report(1).text().contains("BROKEN"));
    }

    #[test]
    fn the_page_is_well_formed_with_and_without_samples() {
        let nothing = Report { samples: Vec::new(), ..report(0) };
        for page in [report(1).page(), nothing.page()] {
            let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
            roxmltree::Document::parse_with_options(&page, options).expect("XML");
        }
    }
}
