//! The bounds of a soak: what may grow, by how much, and why.

use super::watch::{Figure, Sample};
use serde::Serialize;

/// Descriptors. Reading the configuration, entering a namespace and watching a file each need one more for a moment.
const FDS: u64 = 4;
/// Threads. The control side's runtime starts them for file access and ends them after some idle time.
const THREADS: u64 = 4;
/// Namespaces held. The agent may be entering one.
const NAMESPACES: u64 = 1;
/// Programs, and maps with their constants and texts. The agent loads the classifier of its own namespace when the
/// first guest becomes quiet. In a soak of one minute this happens in the middle of the agent's life.
const PROGRAMS: u64 = 1;
const MAPS: u64 = 2;
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
pub(super) struct Verdict {
    pub(super) bound: &'static str,
    pub(super) found: f64,
    pub(super) most: f64,
    pub(super) unit: &'static str,
}

impl Verdict {
    pub(super) fn holds(&self) -> bool {
        self.found <= self.most
    }
}

/// Devices of a hub: two ends of a veth and two taps (Linux 6.6; one tap before).
pub(super) const HUB_DEVICES: u64 = 4;

/// Checks the samples of one agent's life, taken after its warm-up, against the bounds.
pub(super) fn judge(samples: &[Sample], guests: u64) -> Vec<Verdict> {
    let spread = |of: Figure| {
        let values = samples.iter().map(of);
        (values.clone().max().unwrap_or(0) - values.min().unwrap_or(0)) as f64
    };
    let most = |of: &dyn Fn(&Sample) -> u64| samples.iter().map(of).max().unwrap_or(0) as f64;
    let links = LINKS_OF_PORT * guests + LINKS_OF_HUB;
    let verdict = |bound, found, most: u64, unit| Verdict { bound, found, most: most as f64, unit };
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
    let growth = Verdict {
        bound: "memory grows in total, along its trend, by",
        found: slope * minutes,
        most: GROWTH_BYTES,
        unit: "B",
    };
    verdicts.push(growth);
    if minutes >= SLOPE_MINUTES {
        let bound = "memory grows per minute by";
        verdicts.push(Verdict { bound, found: slope, most: SLOPE_BYTES, unit: "B" });
    }
    verdicts
}

/// Returns the slope of the least-squares line through all memory samples, in bytes per minute, and the minutes that
/// they span.
pub(super) fn memory_slope(samples: &[Sample]) -> (f64, f64) {
    let points = || samples.iter().map(|sample| (sample.at_s / 60.0, sample.rss_bytes as f64));
    let count = samples.len().max(1) as f64;
    let (x, y) = points().fold((0.0, 0.0), |(x, y), point| (x + point.0 / count, y + point.1 / count));
    let (over, under) = points().fold((0.0, 0.0), |(over, under), point| {
        (over + (point.0 - x) * (point.1 - y), under + (point.0 - x).powi(2))
    });
    let span = samples.last().zip(samples.first()).map_or(0.0, |(last, first)| last.at_s - first.at_s) / 60.0;
    (if under > 0.0 { over / under } else { 0.0 }, span)
}

#[cfg(test)]
mod tests {
    use super::{HUB_DEVICES, Verdict, judge, memory_slope};
    use crate::soak::watch::Sample;

    const GUESTS: u64 = 64;

    fn minutes(grow: impl Fn(u64) -> Sample) -> Vec<Sample> {
        let usual = Sample {
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
            ..Sample::default()
        };
        let at = |n: u64| {
            let more = grow(n);
            Sample {
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

    fn broken(samples: &[Sample]) -> Vec<&'static str> {
        judge(samples, GUESTS).iter().filter(|it| !it.holds()).map(|it| it.bound).collect()
    }

    #[test]
    fn steady_or_noisy_values_break_no_bound() {
        assert_eq!(broken(&minutes(|_| Sample::default())), Vec::<&str>::new());
        let noise = minutes(|n| Sample { rss_bytes: (n * 7_919) % 100_000, fds: n % 3, ..Sample::default() });
        assert_eq!(broken(&noise), Vec::<&str>::new());
    }

    #[test]
    fn each_leak_breaks_its_own_bound() {
        type Leak = fn(u64) -> Sample;
        let leaks: [(&str, Leak); 11] = [
            ("open descriptors vary by", |n| Sample { fds: n, ..Sample::default() }),
            ("threads vary by", |n| Sample { threads: n, ..Sample::default() }),
            ("namespaces held vary by", |n| Sample { namespaces: n, ..Sample::default() }),
            ("programs vary by", |n| Sample { programs: n / 5, ..Sample::default() }),
            ("maps vary by", |n| Sample { maps: n / 3, ..Sample::default() }),
            ("links beyond two per port", |n| Sample { links: n * 6, ..Sample::default() }),
            ("links on no device, or twice on one", |n| Sample { idle_links: n / 11, ..Sample::default() }),
            ("objects held by no process", |n| Sample { orphans: n / 11, ..Sample::default() }),
            ("hub devices missing or beyond four", |n| Sample { hub_devices: n / 11, ..Sample::default() }),
            ("frames unaccounted for", |n| Sample { unaccounted: n / 11, ..Sample::default() }),
            ("memory grows per minute by", |n| Sample { rss_bytes: n * (60 << 10), ..Sample::default() }),
        ];
        for (bound, leak) in leaks {
            assert_eq!(broken(&minutes(leak)), [bound]);
        }
        let slots = minutes(|n| Sample { identities: n, ..Sample::default() });
        assert_eq!(broken(&slots), ["difference of slots and records"]);
        let jump = minutes(|n| Sample { rss_bytes: n * (500 << 10), ..Sample::default() });
        assert!(broken(&jump).contains(&"memory grows in total, along its trend, by"));
    }

    #[test]
    fn the_slope_of_a_line_is_found() {
        let line = minutes(|n| Sample { rss_bytes: n * 6_000, ..Sample::default() });
        let (slope, span) = memory_slope(&line);
        assert!((slope - 6_000.0).abs() < 1e-6, "{slope}");
        assert!((span - 11.0).abs() < 1e-9, "{span}");
        assert_eq!(memory_slope(&line[..1]), (0.0, 0.0));
        assert_eq!(memory_slope(&[]), (0.0, 0.0));
    }

    #[test]
    fn a_bound_holds_up_to_and_including_its_value() {
        let at = |found| Verdict { bound: "b", found, most: 4.0, unit: "" };
        assert!(at(4.0).holds() && !at(4.1).holds() && !at(f64::NAN).holds());
    }
}
