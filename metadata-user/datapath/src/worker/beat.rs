//! The sign of life a worker gives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A worker that has been silent for longer is stuck: it publishes at least every [`super::MAX_SLEEP`].
pub const SILENCE: Duration = Duration::from_secs(5);

/// In place of a time: the worker's thread is over.
const ENDED: u64 = u64::MAX;

/// When a worker gave a sign of life last. Reading it waits for nobody and takes nothing from the worker.
#[derive(Clone, Debug)]
pub struct Heartbeat(Arc<Beat>);

#[derive(Debug)]
struct Beat {
    start: Instant,
    /// Milliseconds from the start.
    at: AtomicU64,
}

/// What is wrong with a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Silence {
    /// Its thread is over.
    #[error("has ended")]
    Ended,
    /// Its thread does not come round.
    #[error("has been silent for {0:.1?}, {SILENCE:?} at most is normal")]
    Stuck(Duration),
}

impl Default for Heartbeat {
    /// Of a worker that starts now.
    fn default() -> Self {
        Self(Arc::new(Beat { start: Instant::now(), at: AtomicU64::new(0) }))
    }
}

impl Heartbeat {
    /// The worker is alive at `mono` after its start.
    pub(super) fn beat(&self, mono: Duration) {
        // Relaxed: the time carries nothing but itself.
        self.0.at.store(millis(mono), Ordering::Relaxed);
    }

    /// The worker's thread is over.
    pub fn end(&self) {
        self.0.at.store(ENDED, Ordering::Relaxed);
    }

    /// When the worker started.
    pub(super) fn start(&self) -> Instant {
        self.0.start
    }

    /// How long ago the last sign was; `None` when the thread is over.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let at = self.0.at.load(Ordering::Relaxed);
        (at != ENDED).then(|| self.0.start.elapsed().saturating_sub(Duration::from_millis(at)))
    }

    /// What is wrong, if anything is.
    ///
    /// # Errors
    /// The worker has ended, or not been heard of for longer than [`SILENCE`].
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

/// Says that the thread is over, however it ends.
pub(super) struct LastBeat(pub(super) Heartbeat);

impl Drop for LastBeat {
    fn drop(&mut self) {
        self.0.end();
    }
}
