//! What the threads of a soak share: when to stop, when to hold still, and what was counted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// Breaches kept in words; more only count.
const BREACHES_KEPT: usize = 20;
/// How soon a sleeper notices that the soak is over.
const NOTICE: Duration = Duration::from_millis(50);

/// Everything shared.
pub(super) struct Shared {
    /// The soak is over, for whatever reason.
    over: AtomicBool,
    /// Somebody wants it to end: a signal.
    pub(super) interrupted: Arc<AtomicBool>,
    /// Whoever sends frames or changes things holds it for reading; for writing, all is calm.
    calm: RwLock<()>,
    /// Odd while there is no agent.
    disturbances: AtomicU64,
    /// Odd while one agent takes over from another.
    handovers: AtomicU64,
    breaches: Mutex<Vec<String>>,
    pub(super) counts: Counts,
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What was done so far.
        #[derive(Debug, Default)]
        pub(super) struct Counts {
            $($(#[doc = $doc])+ pub(super) $name: AtomicU64,)+
        }

        impl Counts {
            /// Each by name.
            pub(super) fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)+]
            }
        }
    };
}

counts! {
    /// Boots of steady guests.
    boots,
    /// Their requests answered, every octet right.
    requests,
    /// Their requests that failed while there was no agent, or went out on a kept connection just when the agent that
    /// was taken over from closed it: a client asks those again (RFC 9112 §9.3.1).
    interrupted,
    /// Their requests that failed for no such reason.
    failed,
    /// Changes to taps and records of roaming guests.
    changes,
    /// Crawls of roaming guests that were answered rightly after a change.
    verified,
    /// Crawls of roaming guests that came too early, or in the middle of a restart.
    early,
    /// Frames hostile guests sent.
    hostile_frames,
    /// Connections hostile guests opened.
    hostile_connections,
    /// Agents ended by SIGTERM.
    stops,
    /// Agents ended by SIGKILL.
    kills,
    /// Agents that were taken over from.
    takeovers,
    /// Bounds broken.
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

    /// Whether everybody should end.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.interrupted.load(Ordering::Relaxed)
    }

    /// Ends everybody.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// The right to send frames and change things, until it is dropped.
    pub(super) fn busy(&self) -> RwLockReadGuard<'_, ()> {
        self.calm.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody is busy, and keeps it so.
    pub(super) fn calm(&self) -> RwLockWriteGuard<'_, ()> {
        self.calm.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that the agent goes, and once more that one is there again.
    pub(super) fn disturb(&self) {
        self.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// Says that one agent begins to take over from another, and once more that it has.
    pub(super) fn hand_over(&self) {
        self.handovers.fetch_add(1, Ordering::SeqCst);
    }

    /// A mark of the present.
    pub(super) fn mark(&self) -> Mark {
        let [disturbances, handovers] =
            [&self.disturbances, &self.handovers].map(|count| count.load(Ordering::SeqCst));
        Mark { disturbances, handovers }
    }

    /// Whether there was an agent all the time since the mark.
    pub(super) fn was_undisturbed_since(&self, mark: Mark) -> bool {
        mark.disturbances.is_multiple_of(2) && mark.disturbances == self.mark().disturbances
    }

    /// Whether that was one agent, which handed nothing over.
    pub(super) fn was_one_since(&self, mark: Mark) -> bool {
        mark.handovers.is_multiple_of(2) && mark == self.mark()
    }

    /// Notes that something happened that must not.
    pub(super) fn breach(&self, what: String) {
        add(&self.counts.breaches, 1);
        eprintln!("BREACH: {what}");
        let mut breaches = self.breaches.lock().unwrap_or_else(PoisonError::into_inner);
        if breaches.len() < BREACHES_KEPT {
            breaches.push(what);
        }
    }

    /// What must not have happened.
    pub(super) fn breaches(&self) -> Vec<String> {
        self.breaches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sleeps, but not beyond the end.
    pub(super) fn sleep(&self, long: Duration) {
        let mut left = long;
        while !left.is_zero() && !self.is_over() {
            let step = left.min(NOTICE);
            std::thread::sleep(step);
            left -= step;
        }
    }
}

/// What had happened to agents at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    disturbances: u64,
    handovers: u64,
}

/// Adds to a count.
pub(super) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// Ends the soak when it is dropped, so that a thread that panics takes the others with it.
pub(super) struct EndsWithMe<'a>(pub(super) &'a Shared);

impl Drop for EndsWithMe<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
