//! State that the threads of a soak share: when to end, when to pause, and the counts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// The most breaches that are kept as text. Further ones are only counted.
const BREACHES_KEPT: usize = 20;
/// The longest time until a sleeping thread notices the end of the soak.
const WAKE_INTERVAL: Duration = Duration::from_millis(50);

/// The shared state.
pub(super) struct Shared {
    /// True once the soak must end.
    over: AtomicBool,
    /// True after SIGINT or SIGTERM.
    pub(super) interrupted: Arc<AtomicBool>,
    /// Threads hold it for reading while they send frames or make changes. Whoever holds it for writing has paused them
    /// all.
    calm: RwLock<()>,
    /// Odd while no agent runs.
    disturbances: AtomicU64,
    /// Odd during a takeover.
    handovers: AtomicU64,
    breaches: Mutex<Vec<String>>,
    pub(super) counts: Counts,
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counts of what happened so far.
        #[derive(Debug, Default)]
        pub(super) struct Counts {
            $($(#[doc = $doc])+ pub(super) $name: AtomicU64,)+
        }

        impl Counts {
            /// Returns each count with its name.
            pub(super) fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)+]
            }
        }
    };
}

counts! {
    /// Boots of steady guests.
    boots,
    /// Requests of steady guests that were answered correctly.
    requests,
    /// Requests of steady guests that failed while no agent ran, or that were sent on a kept connection just as the
    /// previous agent closed it. A client repeats the latter (RFC 9112 §9.3.1).
    interrupted,
    /// Requests of steady guests that failed for another reason.
    failed,
    /// Changes to taps and records of roaming guests.
    changes,
    /// Crawls of roaming guests that got the right answers after a change.
    verified,
    /// Crawls of roaming guests before the change took effect, or during a restart.
    early,
    /// Frames sent by hostile guests.
    hostile_frames,
    /// Connections opened by hostile guests.
    hostile_connections,
    /// Agents ended by SIGTERM.
    stops,
    /// Agents ended by SIGKILL.
    kills,
    /// Agents ended by a takeover.
    takeovers,
    /// Expectations that were not met.
    breaches,
}

impl Shared {
    pub(super) fn new(interrupted: Arc<AtomicBool>) -> Self {
        Self {
            over: AtomicBool::new(false),
            interrupted,
            calm: RwLock::new(()),
            disturbances: AtomicU64::new(0),
            handovers: AtomicU64::new(0),
            breaches: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// Whether all threads must end.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.interrupted.load(Ordering::Relaxed)
    }

    /// Makes all threads end.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Allows the caller to send frames and make changes while it holds the guard.
    pub(super) fn busy(&self) -> RwLockReadGuard<'_, ()> {
        self.calm.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all threads pause, and keeps them paused while the caller holds the guard.
    pub(super) fn calm(&self) -> RwLockWriteGuard<'_, ()> {
        self.calm.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the agent ends. The next call records that an agent serves again.
    pub(super) fn disturb(&self) {
        self.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the start of a takeover. The next call records its end.
    pub(super) fn hand_over(&self) {
        self.handovers.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the current numbers of disturbances and takeovers.
    pub(super) fn mark(&self) -> Mark {
        let [disturbances, handovers] =
            [&self.disturbances, &self.handovers].map(|count| count.load(Ordering::SeqCst));
        Mark { disturbances, handovers }
    }

    /// Whether an agent served all the time since the mark.
    pub(super) fn was_undisturbed_since(&self, mark: Mark) -> bool {
        mark.disturbances.is_multiple_of(2) && mark.disturbances == self.mark().disturbances
    }

    /// Whether the same agent served all the time since the mark.
    pub(super) fn was_one_since(&self, mark: Mark) -> bool {
        mark.handovers.is_multiple_of(2) && mark == self.mark()
    }

    /// Records an expectation that was not met, and prints it.
    pub(super) fn breach(&self, what: String) {
        add(&self.counts.breaches, 1);
        // It may quote what a hostile guest sent.
        eprintln!("BREACH: {}", metadata_common::printable::Printable(&what));
        let mut breaches = self.breaches.lock().unwrap_or_else(PoisonError::into_inner);
        if breaches.len() < BREACHES_KEPT {
            breaches.push(what);
        }
    }

    /// Returns the recorded breaches.
    pub(super) fn breaches(&self) -> Vec<String> {
        self.breaches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sleeps, at most until the end of the soak.
    pub(super) fn sleep(&self, long: Duration) {
        let mut remaining = long;
        while !remaining.is_zero() && !self.is_over() {
            let step = remaining.min(WAKE_INTERVAL);
            std::thread::sleep(step);
            remaining -= step;
        }
    }
}

/// The numbers of disturbances and takeovers at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    disturbances: u64,
    handovers: u64,
}

/// Adds `more` to a count.
pub(super) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// Ends the soak when dropped, so that a panic in one thread ends the others.
pub(super) struct EndsWithMe<'a>(pub(super) &'a Shared);

impl Drop for EndsWithMe<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
