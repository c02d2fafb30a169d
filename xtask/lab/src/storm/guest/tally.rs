//! The counts, failures and times that guests record.

use super::super::model::Distribution;
use super::stall::Stalls;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Buckets for each doubling of a time, so that the bounds of neighbouring buckets differ by 1/32.
const STEPS: u64 = 32;

/// The reason for which a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// ARP got no reply.
    Arp,
    /// No connection was established.
    Connect,
    /// No byte arrived for too long.
    Silence,
    /// An RST arrived.
    Reset,
    /// The connection ended before the answer did.
    Cut,
    /// The answer is not an HTTP/1.x response.
    Head,
    /// The answer has another status.
    Status,
    /// The answer has another length, or announces none.
    Length,
    /// The body has wrong bytes, perhaps another guest's.
    Body,
    /// A frame had a wrong checksum. It is discarded, and the request may still succeed.
    Checksum,
}

/// Times, counted in buckets whose width grows with the time.
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

    /// Returns the model's form: bounds in microseconds, without empty buckets.
    fn distribution(&self) -> Distribution {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Distribution {
            buckets: filled.map(|(bucket, &count)| (bound(bucket) as f64 / 1e3, count)).collect(),
            max_us: self.max_ns as f64 / 1e3,
        }
    }
}

/// Returns the bucket of a value. Values below 2 × [`STEPS`] have a bucket each, and each further doubling has
/// [`STEPS`] buckets.
fn bucket(value: u64) -> usize {
    let shift = u64::from((value | STEPS).ilog2() - STEPS.ilog2());
    (shift * STEPS + (value >> shift)) as usize
}

/// Returns the greatest value of a bucket.
fn bound(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / STEPS).saturating_sub(1);
    ((bucket - shift * STEPS + 1) << shift) - 1
}

/// The counts of one storm.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) boots: u64,
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) reasons: BTreeMap<Failure, u64>,
    pub(crate) retransmissions: u64,
    /// Requests repeated after a failure.
    pub(crate) retries: u64,
    pub(crate) request: Histogram,
    pub(crate) boot: Histogram,
    /// The time at which each boot of the first wave finished, since the storm's start.
    pub(crate) finished: Vec<u64>,
    pub(crate) calls: Calls,
    pub(crate) stalls: Stalls,
}

/// Numbers of system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Calls {
    /// Frames written to taps.
    pub(crate) writes: u64,
    /// Reads of taps, including those without a frame.
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

/// The most points of a curve of finished boots, without the last one.
const CURVE_POINTS: usize = 200;

/// Returns about [`CURVE_POINTS`] points, always including the last.
fn curve(finished: &[u64]) -> Vec<(f64, u32)> {
    let step = finished.len().div_ceil(CURVE_POINTS).max(1);
    let point = |n: usize| (finished[n - 1] as f64 / 1e3, n as u32);
    let mut points: Vec<_> = (1..=finished.len()).filter(|n| n % step == 0).map(point).collect();
    if !finished.len().is_multiple_of(step) {
        points.push(point(finished.len()));
    }
    points
}

/// The generator's report on one storm.
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

/// The counts of the flooding guest.
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
    fn the_next_bucket_begins_after_the_bound_of_a_bucket() {
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
