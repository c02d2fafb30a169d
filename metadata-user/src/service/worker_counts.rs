//! Counts answers by dialect and status, and measures their latency.
//!
//! One worker writes, any thread reads, and no thread waits: every count is an atomic that is loaded and stored
//! without a lock, so a count costs a plain increment. A reader loads counts one after the other, so two of them may be
//! a moment apart.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metadata_content::http::StatusCode;
use metadata_content::store::Datasource;

/// Statuses with a count of their own.
const CODES: [u16; 23] = [
    200, 201, 204, 400, 401, 403, 404, 405, 408, 409, 410, 413, 414, 415, 417, 429, 431, 500, 501, 502, 503,
    504, 505,
];
/// Statuses below this limit are looked up in a table.
const CODES_END: usize = 512;

/// Maps a status to its index in [`CODES`]; any other status maps to one past the end.
static PLACES: [u8; CODES_END] = {
    let mut places = [CODES.len() as u8; CODES_END];
    let mut place = 0;
    while place < CODES.len() {
        places[CODES[place] as usize] = place as u8;
        place += 1;
    }
    places
};

/// Upper bounds of the histogram's buckets, in nanoseconds: 50 µs to 1 s.
pub const BOUNDS_NS: [u64; 14] = [
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
];

/// Why a complete request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// Its VM's record has not arrived.
    Record,
    /// Its VM exceeds its request rate.
    Rate,
    /// It is parked until a value changes.
    Change,
}

impl WaitReason {
    /// Every reason.
    pub const ALL: [Self; 3] = [Self::Record, Self::Rate, Self::Change];

    /// The value of the metrics label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::Rate => "rate",
            Self::Change => "change",
        }
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// The request was answered, or began to wait for another reason.
    Released,
    /// The request timed out with 429 or 503, or its connection was closed without an answer.
    Expired,
    /// The guest's connection ended first.
    Left,
}

impl WaitEnd {
    /// Every end.
    pub const ALL: [Self; 3] = [Self::Released, Self::Expired, Self::Left];

    /// The value of the metrics label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Left => "left",
        }
    }
}

/// The counts of one worker.
#[derive(Debug)]
pub struct WorkerCounts {
    answers: [[AtomicU64; CODES.len() + 1]; Datasource::COUNT],
    buckets: [AtomicU64; BOUNDS_NS.len() + 1],
    total_ns: AtomicU64,
    /// Answers sent in the turn that received their request. Their latency is known when the turn ends.
    fresh: AtomicU64,
    waiting: [AtomicU64; WaitReason::ALL.len()],
    ended: [[AtomicU64; WaitEnd::ALL.len()]; WaitReason::ALL.len()],
}

/// Adds to a count. Only the owning thread may call it.
#[inline]
fn add(count: &AtomicU64, more: u64) {
    // Relaxed: no count orders another. No read-modify-write: there is one writer.
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

fn zeroes<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

impl Default for WorkerCounts {
    fn default() -> Self {
        Self {
            answers: std::array::from_fn(|_| zeroes()),
            buckets: zeroes(),
            total_ns: AtomicU64::new(0),
            fresh: AtomicU64::new(0),
            waiting: zeroes(),
            ended: std::array::from_fn(|_| zeroes()),
        }
    }
}

impl WorkerCounts {
    /// Counts an answer passed to TCP. `waited` runs from the start of the turn that received the last byte of the
    /// request. It is zero in that same turn; the latency is then the turn's duration, see [`turned`](Self::turned).
    #[inline]
    pub(super) fn answered(&self, datasource: Datasource, status: StatusCode, waited: Duration) {
        let place = PLACES.get(usize::from(status.0)).map_or(CODES.len(), |place| usize::from(*place));
        add(&self.answers[datasource.index()][place], 1);
        if waited.is_zero() {
            add(&self.fresh, 1);
        } else {
            self.took(1, waited);
        }
    }

    /// Counts answers that the kernel gave, whose latency nobody measures.
    pub(crate) fn answered_elsewhere(&self, datasource: Datasource, status: StatusCode, answers: u64) {
        let place = PLACES.get(usize::from(status.0)).map_or(CODES.len(), |place| usize::from(*place));
        add(&self.answers[datasource.index()][place], answers);
    }

    /// Called after each turn with its duration.
    #[inline]
    pub(super) fn turned(&self, turn: Duration) {
        let fresh = self.fresh.load(Ordering::Relaxed);
        if fresh > 0 {
            self.fresh.store(0, Ordering::Relaxed);
            self.took(fresh, turn);
        }
    }

    fn took(&self, answers: u64, each: Duration) {
        let ns = u64::try_from(each.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_NS.iter().position(|bound| ns <= *bound).unwrap_or(BOUNDS_NS.len());
        add(&self.buckets[bucket], answers);
        add(&self.total_ns, ns.saturating_mul(answers));
    }

    /// Number of answers by dialect and status (0 for an unusual status), without those at 0.
    pub fn answers(&self) -> impl Iterator<Item = (Datasource, u16, u64)> {
        Datasource::all().flat_map(|datasource| {
            let codes = CODES.into_iter().chain([0]);
            let counts = self.answers[datasource.index()].iter().map(|count| count.load(Ordering::Relaxed));
            codes
                .zip(counts)
                .filter(|(_, count)| *count > 0)
                .map(move |(code, count)| (datasource, code, count))
        })
    }

    /// Number of answers by latency: one bucket per bound of [`BOUNDS_NS`], and one beyond them.
    #[must_use]
    pub fn latencies(&self) -> Latencies {
        Latencies {
            buckets: std::array::from_fn(|at| self.buckets[at].load(Ordering::Relaxed)),
            total: Duration::from_nanos(self.total_ns.load(Ordering::Relaxed)),
        }
    }

    /// Number of requests that wait now for this reason.
    #[must_use]
    pub fn waiting(&self, reason: WaitReason) -> u64 {
        self.waiting[reason as usize].load(Ordering::Relaxed)
    }

    /// Number of waits for this reason that ended in this way.
    #[must_use]
    pub fn ended(&self, reason: WaitReason, end: WaitEnd) -> u64 {
        self.ended[reason as usize][end as usize].load(Ordering::Relaxed)
    }
}

/// A histogram of answers by latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Answers by bucket; the last has no upper bound.
    pub buckets: [u64; BOUNDS_NS.len() + 1],
    /// Sum of all latencies.
    pub total: Duration,
}

impl std::ops::Add for Latencies {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let buckets = std::array::from_fn(|at| self.buckets[at] + other.buckets[at]);
        Self { buckets, total: self.total + other.total }
    }
}

/// Counts one waiting request until it is dropped, then counts how the wait ended.
#[derive(Debug)]
pub(super) struct WaitGuard {
    tally: Arc<WorkerCounts>,
    reason: WaitReason,
    end: WaitEnd,
}

impl WaitGuard {
    pub(super) fn begin(tally: &Arc<WorkerCounts>, reason: WaitReason) -> Self {
        add(&tally.waiting[reason as usize], 1);
        Self { tally: Arc::clone(tally), reason, end: WaitEnd::Left }
    }

    pub(super) fn is_for(&self, reason: WaitReason) -> bool {
        self.reason == reason
    }

    pub(super) fn end(mut self, end: WaitEnd) {
        self.end = end;
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        add(&self.tally.waiting[self.reason as usize], u64::MAX);
        add(&self.tally.ended[self.reason as usize][self.end as usize], 1);
    }
}

#[cfg(test)]
mod tests {
    use super::{BOUNDS_NS, WaitEnd, WaitGuard, WaitReason, WorkerCounts};
    use metadata_content::http::StatusCode;
    use metadata_content::store::Datasource;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn answers_are_counted_by_dialect_and_status() {
        let tally = WorkerCounts::default();
        let ec2 = Datasource::named("ec2");
        for (datasource, status) in [(ec2, 200), (ec2, 200), (ec2, 404), (Datasource::NONE, 418), (ec2, 999)]
        {
            tally.answered(datasource, StatusCode(status), Duration::ZERO);
        }
        let counted: Vec<_> = tally.answers().collect();
        assert_eq!(counted, [(Datasource::NONE, 0, 1), (ec2, 200, 2), (ec2, 404, 1), (ec2, 0, 1)]);
    }

    #[test]
    fn an_answer_takes_as_long_as_its_wait_or_its_turn() {
        let tally = WorkerCounts::default();
        let answered = |waited| tally.answered(Datasource::ANY, StatusCode(200), waited);
        answered(Duration::from_secs(8));
        answered(Duration::ZERO);
        answered(Duration::ZERO);
        assert_eq!(tally.latencies().buckets.iter().sum::<u64>(), 1, "the turn is not over");
        tally.turned(Duration::from_nanos(BOUNDS_NS[1]));
        tally.turned(Duration::from_secs(1));
        let latencies = tally.latencies();
        assert_eq!((latencies.buckets[1], latencies.buckets[BOUNDS_NS.len()]), (2, 1));
        assert_eq!(latencies.total, Duration::from_secs(8) + 2 * Duration::from_nanos(BOUNDS_NS[1]));
    }

    #[test]
    fn a_wait_counts_once_however_it_ends() {
        let tally = Arc::new(WorkerCounts::default());
        let [released, expired, left] = [(); 3].map(|()| WaitGuard::begin(&tally, WaitReason::Record));
        assert_eq!((tally.waiting(WaitReason::Record), tally.waiting(WaitReason::Change)), (3, 0));
        released.end(WaitEnd::Released);
        expired.end(WaitEnd::Expired);
        drop(left);
        assert_eq!(tally.waiting(WaitReason::Record), 0);
        assert_eq!(WaitEnd::ALL.map(|end| tally.ended(WaitReason::Record, end)), [1, 1, 1]);
        assert_eq!(WaitEnd::ALL.map(|end| tally.ended(WaitReason::Rate, end)), [0, 0, 0]);
    }
}
