//! How the feed's looks at the directory go. The feed writes it; status reads it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The state of the looks.
#[derive(Debug, Default)]
pub struct Outlook(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// When the directory was last read whole.
    looked: Option<Instant>,
    /// When the consecutive failures began, and the last of them.
    failing: Option<(Instant, String)>,
    /// The directory cannot be written: the cluster has no quorum.
    read_only: bool,
}

/// The state at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Seconds since the directory was last read whole; `None` before the first time.
    pub looked: Option<f64>,
    /// For how many seconds looks have failed, and the last reason.
    pub failing: Option<(f64, String)>,
    /// The cluster has no quorum, so Proxmox VE changes no configuration.
    pub read_only: bool,
}

/// What is new after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct News {
    /// Looks failed before, and no longer do.
    pub(super) is_back: bool,
    /// The quorum was lost or found.
    pub(super) quorum: bool,
}

impl Outlook {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the directory was read whole.
    pub(super) fn looked(&self, read_only: bool, now: Instant) -> News {
        let mut inner = self.lock();
        inner.looked = Some(now);
        let quorum = std::mem::replace(&mut inner.read_only, read_only) != read_only;
        News { is_back: inner.failing.take().is_some(), quorum }
    }

    /// Notes a failure. Returns true if the look before did not fail.
    pub(super) fn failed(&self, reason: String, now: Instant) -> bool {
        let mut inner = self.lock();
        let since = inner.failing.as_ref().map(|(since, _)| *since);
        inner.failing = Some((since.unwrap_or(now), reason));
        since.is_none()
    }

    /// The current state.
    #[must_use]
    pub fn report(&self, now: Instant) -> Report {
        let inner = self.lock();
        let ago = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        Report {
            looked: inner.looked.map(ago),
            failing: inner.failing.as_ref().map(|(since, reason)| (ago(*since), reason.clone())),
            read_only: inner.read_only,
        }
    }
}
