//! The heartbeat of a worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A worker whose last heartbeat is older is stuck: it publishes at least every [`super::MAX_SLEEP`].
pub const SILENCE: Duration = Duration::from_secs(5);

/// Stored in place of a time once the worker's thread has ended.
const ENDED: u64 = u64::MAX;

/// The time of a worker's last heartbeat. Reading it neither blocks nor delays the worker.
#[derive(Clone, Debug)]
pub struct Heartbeat(Arc<Beat>);

#[derive(Debug)]
struct Beat {
    start: Instant,
    /// Milliseconds since `start`.
    at: AtomicU64,
}

/// Why a worker fails the liveness check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Silence {
    /// The worker's thread has ended.
    #[error("has ended")]
    Ended,
    /// The worker's thread has not completed a turn for this long.
    #[error("has been silent for {0:.1?}, {SILENCE:?} at most is normal")]
    Stuck(Duration),
}

impl Default for Heartbeat {
    /// The heartbeat of a worker that starts now.
    fn default() -> Self {
        Self(Arc::new(Beat { start: Instant::now(), at: AtomicU64::new(0) }))
    }
}

impl Heartbeat {
    /// Records that the worker is alive at `mono` after its start.
    pub(super) fn beat(&self, mono: Duration) {
        // Relaxed: the time carries no other data.
        self.0.at.store(millis(mono), Ordering::Relaxed);
    }

    /// Records that the worker's thread has ended.
    pub fn end(&self) {
        self.0.at.store(ENDED, Ordering::Relaxed);
    }

    /// When the worker started.
    pub(super) fn start(&self) -> Instant {
        self.0.start
    }

    /// The age of the last heartbeat; `None` if the thread has ended.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let at = self.0.at.load(Ordering::Relaxed);
        (at != ENDED).then(|| self.0.start.elapsed().saturating_sub(Duration::from_millis(at)))
    }

    /// Checks that the worker is alive.
    ///
    /// # Errors
    /// The worker has ended, or its last heartbeat is older than [`SILENCE`].
    pub fn check(&self) -> Result<(), Silence> {
        match self.age() {
            None => Err(Silence::Ended),
            Some(age) if age > SILENCE => Err(Silence::Stuck(age)),
            Some(_) => Ok(()),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(ENDED - 1)
}

/// Records on drop that the thread has ended, whatever the reason.
pub(super) struct LastBeat(pub(super) Heartbeat);

impl Drop for LastBeat {
    fn drop(&mut self) {
        self.0.end();
    }
}
