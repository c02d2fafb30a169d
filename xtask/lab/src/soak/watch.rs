//! Samples everything that could leak.

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};
use support::agent::{Agent, Metrics};
use support::netns::Namespace;
use support::objects::Objects;

use super::Shared;
use crate::storm::report;
use crate::storm::report::STYLE;
use crate::storm::report::chart::{Attribute, Axis, Curve, Drawing, Plot, Scale, Xml};

/// The prefix of the names of the hubs' inner ends.
const INNER: &str = "imds-i";
/// The prefix of the names of all hub devices.
const HUB: &str = "imds-";
/// The longest time until frames under way have arrived, counters are published, and objects that the kernel frees
/// later (RCU, workqueues, a closed AF_XDP socket) have disappeared.
const SETTLE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// The values found while no guest sends.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct SoakSample {
    /// Seconds since the start of the soak.
    pub(super) at_s: f64,
    /// The agent's resident memory without mapped files, in bytes.
    pub(super) rss_bytes: u64,
    /// Descriptors except those of eBPF objects.
    pub(super) fds: u64,
    pub(super) threads: u64,
    /// Network namespaces that the agent holds by descriptors.
    pub(super) namespaces: u64,
    pub(super) programs: u64,
    pub(super) maps: u64,
    pub(super) links: u64,
    /// Links of the agent that are on no device, or on a device with another link of the same program.
    pub(super) idle_links: u64,
    /// Objects that any agent of this soak held, that the current one does not hold, and that are still in the kernel.
    pub(super) orphans: u64,
    pub(super) hub_devices: u64,
    pub(super) ports: u64,
    pub(super) identities: u64,
    pub(super) records: u64,
    pub(super) connections: u64,
    /// Frames received so far, and frames that no counter accounts for.
    pub(super) frames: u64,
    pub(super) unaccounted: u64,
}

/// Reads one value of a sample.
pub(super) type SoakFigure = fn(&SoakSample) -> u64;

/// Takes samples, and remembers the objects that agents have held.
pub(super) struct SoakWatch {
    began: Instant,
    ever: Objects,
    /// The process id of the current agent and the counters at its first sample. Pinned maps may hold counts of earlier
    /// agents.
    first: Option<(u32, Ledger)>,
}

impl SoakWatch {
    pub(super) fn new(began: Instant) -> Self {
        Self { began, ever: Objects::default(), first: None }
    }

    /// Records the objects that the agent holds, so that later calls can check that they disappear.
    pub(super) fn note(&mut self, pid: u32) -> Result<Objects> {
        let held = Objects::held_by(pid)?;
        self.ever.add(&held);
        Ok(held)
    }

    /// Returns objects that agents held and that stay in the kernel after [`SETTLE`]. `holder` is the running agent.
    pub(super) fn orphans(&mut self, holder: Option<u32>) -> Result<Objects> {
        let end = Instant::now() + SETTLE;
        loop {
            let held = holder.map_or_else(|| Ok(Objects::default()), |pid| self.note(pid))?;
            let remaining = self.ever.without(&held).among(&Objects::in_kernel());
            if remaining.is_empty() || Instant::now() >= end {
                // Objects that have disappeared need not be remembered.
                self.ever = held;
                self.ever.add(&remaining);
                return Ok(remaining);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes a complete sample. The caller has paused all guests.
    pub(super) fn sample(&mut self, agent: &Agent<'_>, node: &Namespace) -> Result<SoakSample> {
        let pid = agent.pid();
        let first = self.first.filter(|(of, _)| *of == pid).map(|(_, first)| first);
        let (metrics, ledger, unaccounted) = settled(agent, node, first)?;
        if first.is_none() {
            self.first = Some((pid, ledger));
        }
        let orphans = self.orphans(Some(pid))?;
        let held = self.note(pid)?;
        let gauge = |name: &str| value(&metrics, name);
        let (fds, namespaces) = descriptors(pid)?;
        Ok(SoakSample {
            at_s: self.began.elapsed().as_secs_f64(),
            rss_bytes: resident(pid)?,
            fds,
            threads: count(&format!("/proc/{pid}/task"))?,
            namespaces,
            programs: held.programs.len() as u64,
            maps: held.maps.len() as u64,
            links: held.links.len() as u64,
            idle_links: held.idle_links() as u64,
            orphans: orphans.len() as u64,
            hub_devices: hub_devices(node)?,
            ports: gauge("xdp_imds_ports")?,
            identities: gauge("xdp_imds_identities")?,
            records: gauge("xdp_imds_records")?,
            connections: gauge("xdp_imds_stack_connections")?,
            frames: gauge("xdp_imds_received_frames_total")?,
            unaccounted,
        })
    }
}

/// Returns the metrics, the ledger and the number of unaccounted frames, once all frames since the first sample are
/// accounted for, or after [`SETTLE`]. Without a first sample it waits until no counter changes.
fn settled(agent: &Agent<'_>, node: &Namespace, first: Option<Ledger>) -> Result<(Metrics, Ledger, u64)> {
    let end = Instant::now() + SETTLE;
    let mut before = None;
    loop {
        // A retransmission may be counted between two reads. It is enough that the counters agree once.
        let lost_by_device = dropped(node)?;
        let metrics = agent.metrics()?;
        let ledger = Ledger::read(&metrics, lost_by_device)?;
        let unaccounted = match first {
            Some(first) => ledger.since(&first).unaccounted(),
            None => 0,
        };
        let rests = first.is_some() || before == Some(ledger);
        if unaccounted == 0 && rests || Instant::now() >= end {
            if unaccounted > 0 {
                eprintln!("unaccounted frames: {:?}", first.map(|first| ledger.since(&first)));
            }
            return Ok((metrics, ledger, unaccounted));
        }
        before = Some(ledger);
        std::thread::sleep(PAUSE);
    }
}

/// Frames counted at each place, in the order of their path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ledger {
    /// Frames that `port` sent to the hub.
    steered: u64,
    /// Frames that `socket` gave to a socket, and those for which there was none.
    delivered: u64,
    absent: u64,
    /// Frames that the hub device dropped, including those for which the socket had no room.
    lost_by_device: u64,
    /// Frames that the socket received, and those that it dropped.
    received: u64,
    lost_at_socket: u64,
    /// Frames that the link rejected.
    lost_at_link: u64,
    /// Frames that the stack received.
    stack: u64,
    /// Frames that the hub tap accepted, and frames that reached `hub`.
    sent: u64,
    hub: u64,
}

impl Ledger {
    fn read(metrics: &Metrics, lost_by_device: u64) -> Result<Self> {
        let lost = |reasons: &[&str]| -> u64 {
            let of = metrics.samples().iter().filter(|sample| {
                sample.name == "xdp_imds_receive_lost_frames_total"
                    && sample.label("reason").is_some_and(|reason| reasons.contains(&reason))
            });
            of.map(|sample| sample.value as u64).sum()
        };
        Ok(Self {
            steered: metrics.frames("steer_")?,
            delivered: metrics.frames("socket_delivered")? + metrics.frames("ring_delivered")?,
            absent: metrics.frames("socket_drop_absent")? + metrics.frames("ring_drop_")?,
            lost_by_device,
            received: value(metrics, "xdp_imds_received_frames_total")?,
            lost_at_socket: lost(&["ring_full", "dropped"]),
            lost_at_link: lost(&["runt", "unstamped", "slot_out_of_range", "over_share"]),
            stack: value(metrics, "xdp_imds_stack_received_total")?,
            sent: value(metrics, "xdp_imds_sent_frames_total")?,
            hub: metrics.frames("hub_")?,
        })
    }

    /// Returns the growth since `first`.
    fn since(&self, first: &Self) -> Self {
        let since = |of: fn(&Self) -> u64| of(self).saturating_sub(of(first));
        Self {
            steered: since(|ledger| ledger.steered),
            delivered: since(|ledger| ledger.delivered),
            absent: since(|ledger| ledger.absent),
            lost_by_device: since(|ledger| ledger.lost_by_device),
            received: since(|ledger| ledger.received),
            lost_at_socket: since(|ledger| ledger.lost_at_socket),
            lost_at_link: since(|ledger| ledger.lost_at_link),
            stack: since(|ledger| ledger.stack),
            sent: since(|ledger| ledger.sent),
            hub: since(|ledger| ledger.hub),
        }
    }

    /// Counts frames that were seen at one place, but neither seen nor counted as lost at the next.
    fn unaccounted(&self) -> u64 {
        let at_device = self.steered.abs_diff(self.delivered + self.absent);
        // The device counts frames that the socket refused, and frames for which it had no room itself.
        let unexplained = at_device.saturating_sub(self.lost_by_device.saturating_sub(self.lost_at_socket));
        unexplained
            + self.delivered.abs_diff(self.received + self.lost_at_socket)
            + self.received.abs_diff(self.stack + self.lost_at_link)
            + self.sent.abs_diff(self.hub)
    }
}

/// Returns the sum of a metric over all its labels.
fn value(metrics: &Metrics, name: &str) -> Result<u64> {
    let mut found = metrics.samples().iter().filter(|sample| sample.name == name).peekable();
    ensure!(found.peek().is_some(), "the agent has no metric {name}");
    Ok(found.map(|sample| sample.value as u64).sum())
}

/// Returns the number of frames that the hubs' inner ends have dropped.
fn dropped(node: &Namespace) -> Result<u64> {
    let table = node.run_in(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    let mut ends = table.lines().filter(|line| line.trim_start().starts_with(INNER)).peekable();
    ensure!(ends.peek().is_some(), "there is no hub");
    // The columns of received frames begin with bytes, packets, errors, dropped (Linux: net/core/net-procfs.c).
    let dropped = |line: &str| line.split_once(':')?.1.split_whitespace().nth(3)?.parse::<u64>().ok();
    ends.map(|line| dropped(line).context("cannot parse /proc/net/dev")).sum()
}

/// Returns the number of hub devices in the agent's namespace.
pub(super) fn hub_devices(node: &Namespace) -> Result<u64> {
    let table = node.run_in(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    Ok(table.lines().filter(|line| line.trim_start().starts_with(HUB)).count() as u64)
}

/// Returns the number of a process's descriptors except those of eBPF objects, and how many of them are namespaces.
fn descriptors(pid: u32) -> Result<(u64, u64)> {
    let (mut all, mut namespaces) = (0, 0);
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        // Links come and go as guests become quiet, so they are counted separately.
        all += u64::from(!target.starts_with("anon_inode:bpf"));
        namespaces += u64::from(target.starts_with("net:[") || target.starts_with("/run/netns/"));
    }
    Ok((all, namespaces))
}

fn count(directory: &str) -> Result<u64> {
    Ok(std::fs::read_dir(directory).with_context(|| format!("cannot list {directory}"))?.count() as u64)
}

/// Returns resident memory without mapped files, in bytes.
fn resident(pid: u32) -> Result<u64> {
    crate::storm::cpu::resident(pid).with_context(|| format!("cannot read the memory of process {pid}"))
}

// The bounds of a soak: what may grow, by how much, and why.

/// Descriptors. Reading the configuration, entering a namespace and watching a file each need one more for a moment.
const FDS: u64 = 4;
/// Threads. The control side's runtime starts them for file access and ends them after some idle time.
const THREADS: u64 = 4;
/// Namespaces held. The agent may be entering one.
const NAMESPACES: u64 = 1;
/// Programs that the agent loads for the first quiet guest of a namespace, at any time of its life: the classifier of its
/// own namespace, the one behind the stubs of all others, and the stub of the second namespace.
const PROGRAMS: u64 = 3;
/// The maps of such a program that no other has: its constants and a ring.
const MAPS: u64 = 2 * PROGRAMS;
/// Links beyond those of ports and hub. Traffic and changes pause while they are counted, so every tap is attached.
const LINKS: u64 = 0;
/// Links of one port (XDP's and the classifier's), and links of the hub.
const LINKS_OF_PORT: u64 = 2;
const LINKS_OF_HUB: u64 = 2;
/// Devices beyond the hub's own, which are made at the start.
const DEVICES: u64 = 0;
/// Kernel objects of a previous agent that the current agent does not hold.
const ORPHANS: u64 = 0;
/// Frames that no counter accounts for.
const UNACCOUNTED: u64 = 0;
/// Growth of memory along its trend line. The allocator may take this much while tables reach their largest size. A
/// leak of 100 bytes in each of the thousands of crawls, changes and hostile connections of a minute would exceed it
/// by far.
const GROWTH_BYTES: f64 = (4 << 20) as f64;
/// Growth of memory per minute, checked once the soak is long enough for a slope to be significant. A node that grows
/// by this much gains 0.5 GiB in a week.
const SLOPE_BYTES: f64 = (48 << 10) as f64;
/// The least number of minutes for the slope to be checked. Over shorter times it depends more on the allocator than on
/// leaks.
const SLOPE_MINUTES: f64 = 8.0;

/// A bound and the value found.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SoakVerdict {
    pub(super) bound: &'static str,
    pub(super) found: f64,
    pub(super) most: f64,
    pub(super) unit: &'static str,
}

impl SoakVerdict {
    pub(super) fn holds(&self) -> bool {
        self.found <= self.most
    }
}

/// Devices of a hub: two ends of a veth and two taps (Linux 6.6; one tap before).
pub(super) const HUB_DEVICES: u64 = 4;

/// Checks the samples of one agent's life, taken after its warm-up, against the bounds.
pub(super) fn judge(samples: &[SoakSample], guests: u64) -> Vec<SoakVerdict> {
    let spread = |of: SoakFigure| {
        let values = samples.iter().map(of);
        (values.clone().max().unwrap_or(0) - values.min().unwrap_or(0)) as f64
    };
    let most = |of: &dyn Fn(&SoakSample) -> u64| samples.iter().map(of).max().unwrap_or(0) as f64;
    let links = LINKS_OF_PORT * guests + LINKS_OF_HUB;
    let verdict = |bound, found, most: u64, unit| SoakVerdict { bound, found, most: most as f64, unit };
    let mut verdicts = vec![
        verdict("open descriptors vary by", spread(|sample| sample.fds), FDS, ""),
        verdict("threads vary by", spread(|sample| sample.threads), THREADS, ""),
        verdict("namespaces held vary by", spread(|sample| sample.namespaces), NAMESPACES, ""),
        verdict("programs vary by", spread(|sample| sample.programs), PROGRAMS, ""),
        verdict("maps vary by", spread(|sample| sample.maps), MAPS, ""),
        verdict("links beyond two per port", most(&|sample| sample.links.saturating_sub(links)), LINKS, ""),
        verdict("links on no device, or twice on one", most(&|sample| sample.idle_links), LINKS, ""),
        verdict("objects held by no process", most(&|sample| sample.orphans), ORPHANS, ""),
        verdict(
            "hub devices missing or beyond four",
            most(&|sample| sample.hub_devices.abs_diff(HUB_DEVICES)),
            DEVICES,
            "",
        ),
        verdict("frames unaccounted for", most(&|sample| sample.unaccounted), UNACCOUNTED, ""),
        verdict("difference of ports and taps", most(&|sample| sample.ports.abs_diff(guests)), 0, ""),
        verdict("difference of records and guests", most(&|sample| sample.records.abs_diff(guests)), 0, ""),
        verdict(
            "difference of slots and records",
            most(&|sample| sample.identities.abs_diff(sample.records)),
            0,
            "",
        ),
    ];
    let (slope, minutes) = memory_slope(samples);
    let growth = SoakVerdict {
        bound: "memory grows in total, along its trend, by",
        found: slope * minutes,
        most: GROWTH_BYTES,
        unit: "B",
    };
    verdicts.push(growth);
    if minutes >= SLOPE_MINUTES {
        let bound = "memory grows per minute by";
        verdicts.push(SoakVerdict { bound, found: slope, most: SLOPE_BYTES, unit: "B" });
    }
    verdicts
}

/// Returns the slope of the least-squares line through all memory samples, in bytes per minute, and the minutes that
/// they span.
pub(super) fn memory_slope(samples: &[SoakSample]) -> (f64, f64) {
    let points = || samples.iter().map(|sample| (sample.at_s / 60.0, sample.rss_bytes as f64));
    let count = samples.len().max(1) as f64;
    let (x, y) = points().fold((0.0, 0.0), |(x, y), point| (x + point.0 / count, y + point.1 / count));
    let (over, under) = points().fold((0.0, 0.0), |(over, under), point| {
        (over + (point.0 - x) * (point.1 - y), under + (point.0 - x).powi(2))
    });
    let span = samples.last().zip(samples.first()).map_or(0.0, |(last, first)| last.at_s - first.at_s) / 60.0;
    (if under > 0.0 { over / under } else { 0.0 }, span)
}

// The results of a soak: a table, a page with charts, and JSON.

/// The results of one soak.
#[derive(Debug, Serialize)]
pub(super) struct SoakReport {
    seed: u64,
    taps: u64,
    minutes: f64,
    counts: Vec<(&'static str, u64)>,
    verdicts: Vec<SoakVerdict>,
    breaches: Vec<String>,
    /// Samples of the last agent's life, taken after its warm-up.
    samples: Vec<SoakSample>,
}

/// The page of a report: whether every bound held, the text and the drawings.
pub(super) fn report_page(title: &str, broken: &[String], text: String, drawings: &[Drawing]) -> String {
    let mut xml = Xml::default();
    xml.verbatim("<!DOCTYPE html>\n");
    let root: [Attribute<'_>; 2] = [("lang", &"en"), ("xmlns", &"http://www.w3.org/1999/xhtml")];
    xml.within("html", &root, |xml| {
        xml.within("head", &[], |xml| {
            xml.empty("meta", &[("charset", &"utf-8")]);
            xml.line("title", &[], format!("xdp-imds: {}", title.to_lowercase()));
            xml.within("style", &[], |xml| xml.verbatim(STYLE));
        });
        xml.within("body", &[], |xml| {
            xml.line("h1", &[], title);
            if broken.is_empty() {
                xml.line("p", &[("class", &"lead")], "Every bound held.");
            }
            broken.iter().for_each(|what| xml.line("p", &[("class", &"bad")], what));
            xml.line("pre", &[], text);
            drawings.iter().for_each(|drawing| drawing.figure(xml, None));
        });
    });
    xml.finish()
}

/// Writes a file of a report.
pub(super) fn write_file(path: &Path, text: String) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

impl SoakReport {
    pub(super) fn new(seed: u64, taps: u64, minutes: f64, samples: Vec<SoakSample>, shared: &Shared) -> Self {
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
            report::memory(slope)
        );
        let _ = writeln!(text, "{:<40} {:>14} {:>14}", "bound", "found", "at most");
        for verdict in &self.verdicts {
            let SoakVerdict { bound, found, most, unit } = verdict;
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
        if let Some(path) = json {
            write_file(path, serde_json::to_string_pretty(self)? + "\n")?;
        }
        if let Some(path) = page {
            write_file(path, self.page())?;
        }
        Ok(())
    }

    fn page(&self) -> String {
        report_page("Soak", &self.broken(), self.text(), &self.drawings())
    }

    fn drawings(&self) -> [Drawing; 2] {
        let curve = |subject, name: &str, of: SoakFigure| {
            let point = |sample: &SoakSample| (sample.at_s / 60.0, of(sample) as f64);
            Curve { subject, name: name.into(), points: self.samples.iter().map(point).collect() }
        };
        let minutes = || Axis {
            title: "minutes since the start",
            scale: Scale::linear(self.samples.iter().map(|sample| sample.at_s / 60.0)),
            label: report::number,
        };
        let counted: [(&str, SoakFigure); 5] = [
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
                    label: report::memory,
                },
                curves: vec![curve(0, "memory", |sample| sample.rss_bytes)],
                marked: true,
            }),
            Drawing::Plot(Plot {
                title: "Objects the agent holds".into(),
                x: minutes(),
                y: Axis { title: "number", scale: Scale::linear(most), label: report::number },
                curves: (0..).zip(counted).map(|(at, (name, of))| curve(at, name, of)).collect(),
                marked: true,
            }),
        ]
    }
}

fn shown(value: f64, unit: &str) -> String {
    if unit == "B" { report::memory(value) } else { report::number(value) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::{HUB_DEVICES, Ledger, SoakReport, SoakVerdict, judge, memory_slope};
    use crate::soak::Shared;
    use crate::soak::watch::SoakSample;

    const RIGHT: Ledger = Ledger {
        steered: 1_000,
        delivered: 900,
        absent: 50,
        lost_by_device: 80,
        received: 870,
        lost_at_socket: 30,
        lost_at_link: 20,
        stack: 850,
        sent: 400,
        hub: 400,
    };

    #[test]
    fn counts_from_before_the_first_sample_are_ignored() {
        let later = Ledger { steered: 1_010, delivered: 910, received: 880, stack: 860, ..RIGHT };
        assert_eq!(later.since(&RIGHT).unaccounted(), 0);
        let odd = Ledger { received: 0, stack: 0, lost_at_link: 0, ..RIGHT };
        assert_eq!(odd.since(&odd).unaccounted(), 0);
        assert_eq!(Ledger { stack: 861, ..later }.since(&RIGHT).unaccounted(), 1);
    }

    #[test]
    fn a_frame_missing_at_any_place_is_unaccounted_for() {
        assert_eq!(RIGHT.unaccounted(), 0);
        for wrong in [
            Ledger { steered: 1_001, ..RIGHT },
            Ledger { received: 869, stack: 849, ..RIGHT },
            Ledger { stack: 849, ..RIGHT },
            Ledger { stack: 851, ..RIGHT },
            Ledger { hub: 399, ..RIGHT },
            Ledger { lost_by_device: 79, ..RIGHT },
        ] {
            assert_eq!(wrong.unaccounted(), 1, "{wrong:?}");
        }
    }

    const GUESTS: u64 = 64;

    fn minutes(grow: impl Fn(u64) -> SoakSample) -> Vec<SoakSample> {
        let usual = SoakSample {
            rss_bytes: 50 << 20,
            fds: 90,
            threads: 5,
            namespaces: 2,
            programs: 4,
            maps: 14,
            links: 66,
            hub_devices: HUB_DEVICES,
            ports: GUESTS,
            identities: GUESTS,
            records: GUESTS,
            ..SoakSample::default()
        };
        let at = |n: u64| {
            let more = grow(n);
            SoakSample {
                at_s: n as f64 * 60.0,
                rss_bytes: usual.rss_bytes + more.rss_bytes,
                fds: usual.fds + more.fds,
                threads: usual.threads + more.threads,
                programs: usual.programs + more.programs,
                maps: usual.maps + more.maps,
                links: usual.links + more.links,
                idle_links: more.idle_links,
                orphans: more.orphans,
                hub_devices: usual.hub_devices + more.hub_devices,
                namespaces: usual.namespaces + more.namespaces,
                ports: usual.ports + more.ports,
                identities: usual.identities + more.identities,
                records: usual.records + more.records,
                unaccounted: more.unaccounted,
                ..usual.clone()
            }
        };
        (0..12).map(at).collect()
    }

    fn broken(samples: &[SoakSample]) -> Vec<&'static str> {
        judge(samples, GUESTS).iter().filter(|it| !it.holds()).map(|it| it.bound).collect()
    }

    #[test]
    fn steady_or_noisy_values_break_no_bound() {
        assert_eq!(broken(&minutes(|_| SoakSample::default())), Vec::<&str>::new());
        let noise =
            minutes(|n| SoakSample { rss_bytes: (n * 7_919) % 100_000, fds: n % 3, ..SoakSample::default() });
        assert_eq!(broken(&noise), Vec::<&str>::new());
    }

    #[test]
    fn each_leak_breaks_its_own_bound() {
        type Leak = fn(u64) -> SoakSample;
        let leaks: [(&str, Leak); 11] = [
            ("open descriptors vary by", |n| SoakSample { fds: n, ..SoakSample::default() }),
            ("threads vary by", |n| SoakSample { threads: n, ..SoakSample::default() }),
            ("namespaces held vary by", |n| SoakSample { namespaces: n, ..SoakSample::default() }),
            ("programs vary by", |n| SoakSample { programs: n / 2, ..SoakSample::default() }),
            ("maps vary by", |n| SoakSample { maps: n, ..SoakSample::default() }),
            ("links beyond two per port", |n| SoakSample { links: n * 6, ..SoakSample::default() }),
            ("links on no device, or twice on one", |n| SoakSample {
                idle_links: n / 11,
                ..SoakSample::default()
            }),
            ("objects held by no process", |n| SoakSample { orphans: n / 11, ..SoakSample::default() }),
            ("hub devices missing or beyond four", |n| SoakSample {
                hub_devices: n / 11,
                ..SoakSample::default()
            }),
            ("frames unaccounted for", |n| SoakSample { unaccounted: n / 11, ..SoakSample::default() }),
            ("memory grows per minute by", |n| SoakSample {
                rss_bytes: n * (60 << 10),
                ..SoakSample::default()
            }),
        ];
        for (bound, leak) in leaks {
            assert_eq!(broken(&minutes(leak)), [bound]);
        }
        let slots = minutes(|n| SoakSample { identities: n, ..SoakSample::default() });
        assert_eq!(broken(&slots), ["difference of slots and records"]);
        let jump = minutes(|n| SoakSample { rss_bytes: n * (500 << 10), ..SoakSample::default() });
        assert!(broken(&jump).contains(&"memory grows in total, along its trend, by"));
    }

    #[test]
    fn the_slope_of_a_line_is_found() {
        let line = minutes(|n| SoakSample { rss_bytes: n * 6_000, ..SoakSample::default() });
        let (slope, span) = memory_slope(&line);
        assert!((slope - 6_000.0).abs() < 1e-6, "{slope}");
        assert!((span - 11.0).abs() < 1e-9, "{span}");
        assert_eq!(memory_slope(&line[..1]), (0.0, 0.0));
        assert_eq!(memory_slope(&[]), (0.0, 0.0));
    }

    #[test]
    fn a_bound_holds_up_to_and_including_its_value() {
        let at = |found| SoakVerdict { bound: "b", found, most: 4.0, unit: "" };
        assert!(at(4.0).holds() && !at(4.1).holds() && !at(f64::NAN).holds());
    }

    fn report(leak: u64) -> SoakReport {
        let sample = |n: u64| SoakSample {
            at_s: n as f64 * 60.0,
            rss_bytes: 50 << 20,
            fds: 90 + n * leak,
            ports: 64,
            identities: 64,
            records: 64,
            hub_devices: HUB_DEVICES,
            ..SoakSample::default()
        };
        let shared = Shared::new(Arc::new(AtomicBool::new(false)));
        SoakReport::new(7, 64, 10.0, (0..10).map(sample).collect(), &shared)
    }

    #[test]
    fn a_broken_bound_is_shown_with_its_value() {
        assert_eq!(report(0).broken(), Vec::<String>::new());
        assert_eq!(report(1).broken(), ["open descriptors vary by 9, 4 at most"]);
        assert!(report(1).text().contains("BROKEN"));
    }

    #[test]
    fn the_page_is_well_formed_with_and_without_samples() {
        let nothing = SoakReport { samples: Vec::new(), ..report(0) };
        for page in [report(1).page(), nothing.page()] {
            let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
            roxmltree::Document::parse_with_options(&page, options).expect("XML");
        }
    }
}
