//! The results of a soak with hostile tenants: a table, JSON, and a picture.

use super::AttackTally;
use super::node::PATIENCE;
use crate::soak::watch::{report_page, write_file};
use crate::storm::report::chart::{At, Attribute, Axis, Curve, Drawing, Plot, Scale, WIDTH, Xml};
use crate::storm::report::{self, STYLE};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// By how much a new VM may take longer than alone.
pub(super) const SLOWER: f64 = 3.0;
/// What memory may keep beyond its base: a quarter of the base, and at least this. Tables that have grown keep their
/// size, and a VM's state outlives it for ten minutes.
const KEPT_LEAST: u64 = 48 << 20;
/// Space around the drawings.
const MARGIN: f64 = 20.0;

/// A new VM of the modest tenant.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct NewVm {
    /// Seconds since the start of the soak.
    pub(super) at_s: f64,
    /// Time until it was served, or the longest time.
    pub(super) took_ms: f64,
    pub(super) served: bool,
}

/// Anonymous memory of the agent at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct MemorySample {
    pub(super) at_s: f64,
    pub(super) bytes: u64,
}

/// The answers of `/healthz`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Health {
    pub(super) asked: u64,
    /// Probes without a good answer within the kubelet's time.
    pub(super) failed: u64,
    pub(super) slowest_ms: f64,
}

/// What was measured.
#[derive(Debug, Default, Serialize)]
pub(super) struct Measured {
    pub(super) alone: Vec<NewVm>,
    pub(super) attacked: Vec<NewVm>,
    pub(super) after: Vec<NewVm>,
    pub(super) memory: Vec<MemorySample>,
    pub(super) base_bytes: u64,
    /// Anonymous memory once the tenants have gone.
    pub(super) after_bytes: u64,
    /// Seconds until it was there.
    pub(super) settled_s: f64,
    /// The most that the control group was charged with.
    pub(super) peak_bytes: u64,
    /// Processes that the kernel killed because of the limit.
    pub(super) killed: u64,
    /// Seconds after the start of the attacks at which the agent ended.
    pub(super) ended_s: Option<f64>,
    pub(super) health: Health,
    pub(super) events: usize,
}

/// A bound, the value found, and what helps to understand it.
#[derive(Clone, Debug, Serialize)]
struct TenantsVerdict {
    bound: &'static str,
    found: f64,
    most: f64,
    unit: AxisUnit,
    look_at: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum AxisUnit {
    Number,
    Times,
    Bytes,
}

impl TenantsVerdict {
    fn holds(&self) -> bool {
        self.found <= self.most
    }
}

impl AxisUnit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Number => report::number(value),
            Self::Times if value.is_finite() => format!("{value:.2} x"),
            Self::Times => "no VM".into(),
            Self::Bytes => report::memory(value),
        }
    }
}

/// The results of one soak.
#[derive(Debug, Serialize)]
pub(crate) struct TenantsReport {
    minutes: f64,
    limit_bytes: u64,
    limited_by: &'static str,
    attacks: Vec<AttackTally>,
    verdicts: Vec<TenantsVerdict>,
    breaches: Vec<String>,
    measured: Measured,
}

impl TenantsReport {
    pub(super) fn new(
        minutes: f64,
        limit: (u64, &'static str),
        attacks: Vec<AttackTally>,
        breaches: Vec<String>,
        measured: Measured,
    ) -> Self {
        let verdicts = judge(&measured);
        let (limit_bytes, limited_by) = limit;
        Self { minutes, limit_bytes, limited_by, attacks, verdicts, breaches, measured }
    }

    /// Returns one sentence for each broken bound and each breach.
    pub(crate) fn broken(&self) -> Vec<String> {
        let broken = self.verdicts.iter().filter(|verdict| !verdict.holds()).map(|it| {
            let (found, most) = (it.unit.show(it.found), it.unit.show(it.most));
            format!("{}: {found}, {most} at most ({})", it.bound, it.look_at)
        });
        broken.chain(self.breaches.iter().cloned()).collect()
    }

    /// Returns the table.
    pub(crate) fn text(&self) -> String {
        let Measured { alone, attacked, after, health, .. } = &self.measured;
        let mut text = format!(
            "{:.1} minutes, {} attacks, {} of memory ({})\n\n",
            self.minutes,
            self.attacks.len(),
            report::memory(self.limit_bytes as f64),
            self.limited_by
        );
        for AttackTally { attack, about, acts } in &self.attacks {
            let _ = writeln!(text, "{attack:<18} {acts:>9}  {about}");
        }
        let _ = writeln!(
            text,
            "\n{:<28} {:>6} {:>10} {:>10} {:>10} {:>6}",
            "new VM of the modest tenant", "VMs", "median", "p95", "worst", "never"
        );
        for (when, vms) in [("alone", alone), ("under attack", attacked), ("afterwards", after)] {
            let time = |share| match vms.is_empty() {
                true => "-".to_owned(),
                false => report::time(quantile(vms, share) * 1_000.0),
            };
            let unserved = vms.iter().filter(|vm| !vm.served).count();
            let _ = writeln!(
                text,
                "{when:<28} {:>6} {:>10} {:>10} {:>10} {unserved:>6}",
                vms.len(),
                time(0.5),
                time(0.95),
                time(1.0)
            );
        }
        let peak = self.measured.memory.iter().map(|sample| sample.bytes).max().unwrap_or_default();
        let _ = writeln!(
            text,
            "\nanonymous memory: {} before, {} at most, {} {:.0} s after; {} charged at most\n\
             /healthz: {} asked, {} failed, slowest {}\nEvents created: {}\n",
            report::memory(self.measured.base_bytes as f64),
            report::memory(peak as f64),
            report::memory(self.measured.after_bytes as f64),
            self.measured.settled_s,
            report::memory(self.measured.peak_bytes as f64),
            health.asked,
            health.failed,
            report::time(health.slowest_ms * 1_000.0),
            self.measured.events
        );
        let _ = writeln!(text, "{:<52} {:>12} {:>12}", "bound", "found", "at most");
        for verdict in &self.verdicts {
            let (found, most) = (verdict.unit.show(verdict.found), verdict.unit.show(verdict.most));
            let broken = if verdict.holds() { "" } else { "  BROKEN" };
            let _ = writeln!(text, "{:<52} {found:>12} {most:>12}{broken}", verdict.bound);
        }
        for breach in &self.breaches {
            let _ = writeln!(text, "BREACH: {breach}");
        }
        text
    }

    /// Writes the JSON file and the picture, if they are wanted. The picture is an SVG image, or a page with it.
    pub(crate) fn write(&self, json: Option<&Path>, picture: Option<&Path>) -> Result<()> {
        if let Some(path) = json {
            write_file(path, serde_json::to_string_pretty(self)? + "\n")?;
        }
        if let Some(path) = picture {
            let is_image = path.extension().is_some_and(|it| it == "svg");
            write_file(path, if is_image { self.svg() } else { self.page() })?;
        }
        Ok(())
    }

    fn page(&self) -> String {
        report_page("Soak with hostile tenants", &self.broken(), self.text(), &self.drawings())
    }

    fn svg(&self) -> String {
        let drawings = self.drawings();
        let (width, height) =
            (WIDTH + 2.0 * MARGIN, drawings.iter().map(|it| it.height() + MARGIN).sum::<f64>() + MARGIN);
        let view = format!("0 0 {} {}", At(width), At(height));
        let mut xml = Xml::default();
        let root: [Attribute<'_>; 3] =
            [("xmlns", &"http://www.w3.org/2000/svg"), ("viewBox", &view), ("role", &"img")];
        xml.within("svg", &root, |xml| {
            xml.line("title", &[], "Soak with hostile tenants");
            xml.within("style", &[], |xml| xml.verbatim(STYLE));
            let back: [Attribute<'_>; 3] = [("class", &"back"), ("width", &"100%"), ("height", &"100%")];
            xml.empty("rect", &back);
            let mut y = MARGIN;
            for drawing in &drawings {
                let moved = format!("translate({} {})", At(MARGIN), At(y));
                xml.within("g", &[("transform", &moved)], |xml| drawing.draw(xml));
                y += drawing.height() + MARGIN;
            }
        });
        xml.finish()
    }

    fn drawings(&self) -> [Drawing; 2] {
        let Measured { alone, attacked, after, memory, .. } = &self.measured;
        let end = memory.last().map_or(1.0, |sample| sample.at_s / 60.0);
        let minutes = || Axis {
            title: "minutes since the start",
            scale: Scale::linear([end].into_iter()),
            label: report::number,
        };
        let vms = [("alone", alone), ("under attack", attacked), ("afterwards", after)];
        let all = vms.iter().flat_map(|(_, vms)| vms.iter().map(|vm| vm.took_ms * 1_000.0));
        let curve = |subject, (name, vms): (&str, &Vec<NewVm>)| Curve {
            subject,
            name: name.into(),
            points: vms.iter().map(|vm| (vm.at_s / 60.0, vm.took_ms * 1_000.0)).collect(),
        };
        [
            Drawing::Plot(Plot {
                title: "Anonymous memory of the agent".into(),
                x: minutes(),
                y: Axis {
                    title: "bytes",
                    scale: Scale::binary(memory.iter().map(|sample| sample.bytes as f64)),
                    label: report::memory,
                },
                curves: vec![Curve {
                    subject: 0,
                    name: "memory".into(),
                    points: memory.iter().map(|sample| (sample.at_s / 60.0, sample.bytes as f64)).collect(),
                }],
                marked: false,
            }),
            Drawing::Plot(Plot {
                title: "Time until a new VM of the modest tenant is served".into(),
                x: minutes(),
                y: Axis { title: "time", scale: Scale::linear(all), label: report::time },
                curves: (0..).zip(vms).map(|(at, vms)| curve(at, vms)).collect(),
                marked: true,
            }),
        ]
    }
}

/// What memory may be after the tenants have gone.
pub(super) fn most_after(base: u64) -> u64 {
    base + (base / 4).max(KEPT_LEAST)
}

fn judge(measured: &Measured) -> Vec<TenantsVerdict> {
    let Measured { alone, attacked, after, base_bytes, after_bytes, killed, ended_s, health, .. } = measured;
    // Without a new VM under attack nothing is known.
    let ratio = |share| match (quantile(attacked, share), quantile(alone, share)) {
        (_, alone) if alone <= 0.0 => f64::INFINITY,
        (attacked, _) if attacked <= 0.0 => f64::INFINITY,
        (attacked, alone) => attacked / alone,
    };
    let unserved = attacked.iter().chain(after).filter(|vm| !vm.served).count() as f64;
    let by_one = "run each attack alone with --only NAME";
    let verdict = |bound, found, most, unit, look_at| TenantsVerdict { bound, found, most, unit, look_at };
    vec![
        verdict("new VM of the modest tenant, median to alone", ratio(0.5), SLOWER, AxisUnit::Times, by_one),
        verdict("new VM of the modest tenant, p95 to alone", ratio(0.95), SLOWER, AxisUnit::Times, by_one),
        verdict(
            "new VMs not served in time",
            unserved,
            0.0,
            AxisUnit::Number,
            "the last error is on standard error",
        ),
        verdict("ends of the agent", f64::from(u8::from(ended_s.is_some())), 0.0, AxisUnit::Number, by_one),
        verdict(
            "processes killed for memory",
            *killed as f64,
            0.0,
            AxisUnit::Number,
            "the picture shows what memory did before",
        ),
        verdict(
            "/healthz without a good answer within 5 s",
            health.failed as f64,
            0.0,
            AxisUnit::Number,
            "the control thread was busy",
        ),
        verdict(
            "memory after the tenants have gone",
            *after_bytes as f64,
            most_after(*base_bytes) as f64,
            AxisUnit::Bytes,
            "`xdp-imds status` says what is held",
        ),
    ]
}

/// Returns a quantile of the times in milliseconds, by the nearest rank; 0 without VMs.
fn quantile(vms: &[NewVm], share: f64) -> f64 {
    let mut times: Vec<f64> = vms.iter().map(|vm| vm.took_ms).collect();
    times.sort_by(f64::total_cmp);
    let rank = (share * times.len() as f64).ceil().max(1.0) as usize;
    times.get(rank - 1).copied().unwrap_or_default()
}

/// A VM that was not served.
pub(super) fn unserved(at_s: f64) -> NewVm {
    NewVm { at_s, took_ms: PATIENCE.as_secs_f64() * 1_000.0, served: false }
}

#[cfg(test)]
mod tests {
    use super::{Health, Measured, MemorySample, NewVm, TenantsReport, quantile, unserved};

    fn vms(times: &[f64]) -> Vec<NewVm> {
        (0..).zip(times).map(|(at, ms)| NewVm { at_s: f64::from(at), took_ms: *ms, served: true }).collect()
    }

    fn report(change: impl FnOnce(&mut Measured)) -> TenantsReport {
        let mut measured = Measured {
            alone: vms(&[100.0, 120.0, 110.0]),
            attacked: vms(&[200.0, 300.0, 250.0]),
            after: vms(&[100.0]),
            memory: vec![
                MemorySample { at_s: 1.0, bytes: 50 << 20 },
                MemorySample { at_s: 60.0, bytes: 60 << 20 },
            ],
            base_bytes: 50 << 20,
            after_bytes: 60 << 20,
            health: Health { asked: 60, failed: 0, slowest_ms: 3.0 },
            ..Measured::default()
        };
        change(&mut measured);
        TenantsReport::new(1.0, (1_536 << 20, "cgroup v2"), Vec::new(), Vec::new(), measured)
    }

    #[test]
    fn each_broken_bound_is_named_alone() {
        type Change = fn(&mut Measured);
        let cases: [(&str, Change); 6] = [
            ("median", |it| it.attacked = vms(&[350.0, 350.0, 352.0])),
            ("p95", |it| it.attacked = vms(&[100.0, 100.0, 361.0])),
            ("ends of the agent", |it| it.ended_s = Some(4.0)),
            ("killed", |it| it.killed = 1),
            ("/healthz", |it| it.health.failed = 1),
            ("memory after", |it| it.after_bytes = 99 << 20),
        ];
        assert_eq!(report(|_| ()).broken(), Vec::<String>::new());
        for (name, change) in cases {
            let broken = report(change).broken();
            assert!(broken.len() == 1 && broken[0].contains(name), "{name}: {broken:?}");
        }
    }

    #[test]
    fn a_vm_that_is_never_served_counts_with_the_longest_time() {
        let broken = report(|it| it.attacked.push(unserved(9.0))).broken();
        assert!(broken.iter().any(|it| it.contains("not served in time: 1")), "{broken:?}");
        assert_eq!(quantile(&vms(&[3.0, 1.0, 2.0]), 0.5), 2.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn page_and_picture_are_well_formed() {
        for report in [report(|_| ()), report(|it| *it = Measured::default())] {
            for text in [report.page(), report.svg()] {
                let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
                roxmltree::Document::parse_with_options(&text, options).expect("XML");
            }
        }
    }
}
