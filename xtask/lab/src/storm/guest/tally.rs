//! What guests saw: counts, reasons and times.

use super::super::model::Distribution;
use super::stall::Stalls;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Sub-buckets of each doubling of a time: a bucket's bounds are 1/32 apart.
const STEPS: u64 = 32;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// Nobody answered ARP.
    Arp,
    /// No connection.
    Connect,
    /// No octet for too long.
    Silence,
    /// RST.
    Reset,
    /// The connection ended before the answer did.
    Cut,
    /// What came is no HTTP/1.x response.
    Head,
    /// Another status.
    Status,
    /// Another length, or none said.
    Length,
    /// Another guest's octets, or nobody's.
    Body,
    /// A frame came with a wrong checksum. It is thrown away; the request may succeed all the same.
    Checksum,
}

/// Times, counted in buckets that grow with them.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    max_ns: u64,
}

impl Histogram {
    pub(crate) fn add(&mut self, ns: u64) {
        let bucket = bucket(ns);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// As the model has it: bounds in microseconds, no empty buckets.
    fn distribution(&self) -> Distribution {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Distribution {
            buckets: filled.map(|(bucket, &count)| (bound(bucket) as f64 / 1e3, count)).collect(),
            max_us: self.max_ns as f64 / 1e3,
        }
    }
}

/// Below 2 × [`STEPS`] a bucket for each value, then [`STEPS`] for each doubling.
fn bucket(value: u64) -> usize {
    let shift = u64::from((value | STEPS).ilog2() - STEPS.ilog2());
    (shift * STEPS + (value >> shift)) as usize
}

/// The greatest value in a bucket.
fn bound(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / STEPS).saturating_sub(1);
    ((bucket - shift * STEPS + 1) << shift) - 1
}

/// Everything counted in one storm.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) boots: u64,
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) reasons: BTreeMap<Failure, u64>,
    pub(crate) retransmissions: u64,
    /// Requests asked again after they had failed.
    pub(crate) retries: u64,
    pub(crate) request: Histogram,
    pub(crate) boot: Histogram,
    /// When each boot finished, from the storm's start; of the first wave only.
    pub(crate) finished: Vec<u64>,
    pub(crate) calls: Calls,
    pub(crate) stalls: Stalls,
}

/// System calls made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Calls {
    /// Frames written to taps.
    pub(crate) writes: u64,
    /// Reads of taps, those that found nothing included.
    pub(crate) reads: u64,
    /// Waits for taps.
    pub(crate) waits: u64,
}

impl Tally {
    pub(crate) fn fail(&mut self, reason: Failure) {
        self.failed += 1;
        self.note(reason);
    }

    /// Counts a reason without a failed request.
    pub(crate) fn note(&mut self, reason: Failure) {
        *self.reasons.entry(reason).or_default() += 1;
    }

    pub(crate) fn outcome(mut self, wall_ns: u64) -> Outcome {
        self.finished.sort_unstable();
        Outcome {
            boots: self.boots,
            requests: self.requests,
            failures: self.failed,
            reasons: self.reasons,
            retransmissions: self.retransmissions,
            retries: self.retries,
            wall_us: wall_ns as f64 / 1e3,
            request: self.request.distribution(),
            boot: self.boot.distribution(),
            finished: curve(&self.finished),
            calls: self.calls,
            flood: None,
        }
    }
}

/// Points of a curve of boots over time.
const CURVE_POINTS: usize = 200;

/// At most [`CURVE_POINTS`] points, the last always there.
fn curve(finished: &[u64]) -> Vec<(f64, u32)> {
    let step = finished.len().div_ceil(CURVE_POINTS).max(1);
    let point = |n: usize| (finished[n - 1] as f64 / 1e3, n as u32);
    let mut points: Vec<_> = (1..=finished.len()).filter(|n| n % step == 0).map(point).collect();
    if !finished.len().is_multiple_of(step) {
        points.push(point(finished.len()));
    }
    points
}

/// What the generator tells of one storm.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) boots: u64,
    pub(crate) requests: u64,
    pub(crate) failures: u64,
    pub(crate) reasons: BTreeMap<Failure, u64>,
    pub(crate) retransmissions: u64,
    #[serde(default)]
    pub(crate) retries: u64,
    pub(crate) wall_us: f64,
    pub(crate) request: Distribution,
    pub(crate) boot: Distribution,
    pub(crate) finished: Vec<(f64, u32)>,
    pub(crate) calls: Calls,
    pub(crate) flood: Option<Flooded>,
}

/// What the flooding guest did.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Flooded {
    pub(crate) frames: u64,
    pub(crate) wall_us: f64,
    pub(crate) cpu_us: f64,
}

#[cfg(test)]
mod tests {
    use super::{Histogram, bound, bucket, curve};

    #[test]
    fn a_bucket_holds_its_bound_and_the_next_holds_one_more() {
        for n in 0..1_500 {
            assert_eq!(bucket(bound(n)), n);
            assert_eq!(bucket(bound(n) + 1), n + 1);
        }
        for value in [64, 1_000, 123_456_789, u64::from(u32::MAX) * 1_000] {
            let above = bound(bucket(value)) as f64 / value as f64;
            assert!((1.0..1.0 + 1.0 / 32.0).contains(&above), "{value}: {above}");
        }
    }

    #[test]
    fn a_histogram_keeps_every_time_and_the_longest_exactly() {
        let mut histogram = Histogram::default();
        (1..=1_000).for_each(|us| histogram.add(us * 1_000));
        let times = histogram.distribution();
        assert_eq!(times.count(), 1_000);
        assert_eq!(times.max_us, 1_000.0);
        let median = times.quantile(0.5).expect("times");
        assert!((500.0..517.0).contains(&median), "{median}");
    }

    #[test]
    fn a_curve_ends_with_the_last_boot() {
        for boots in [0, 1, 199, 200, 201, 4_000, 4_001] {
            let finished: Vec<u64> = (0..boots).map(|n| n * 1_000).collect();
            let points = curve(&finished);
            assert!(points.len() <= 201, "{}", points.len());
            assert_eq!(points.last().map(|(_, n)| u64::from(*n)).unwrap_or(0), boots);
            assert!(points.is_sorted());
        }
    }
}
