//! The timers of the control loop.

use std::time::{Duration, Instant};

use metadata_serve::audit::COLLECT_EVERY;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::agent::notify;

/// How often to retry what failed, if no link event arrives.
const RETRY: Duration = Duration::from_secs(2);

/// How often to check how guests use their ports.
const GUESTS: Duration = Duration::from_secs(2);

/// How often to check the age of token keys and of mailboxes without a record.
const TEND: Duration = Duration::from_secs(60);

/// The interval of a timer that is not used.
const NEVER: Duration = Duration::from_secs(86_400);

/// A timer that has fired.
pub(super) enum Timer {
    /// Retry what failed.
    Retry,
    /// Check how guests use their ports.
    Guests(Instant),
    /// Rotate old token keys and delete unused mailboxes.
    Tend,
    /// Write audit lines.
    Audit,
    /// Notify the watchdog of the service manager.
    Watchdog,
}

/// The timers. Each fires for the first time immediately.
pub(super) struct Timers {
    retry: Interval,
    guests: Interval,
    tend: Interval,
    audit: Interval,
    watchdog: Interval,
}

impl Timers {
    pub(super) fn new(audits: bool) -> Self {
        let delayed = |every| {
            let mut interval = interval(every);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        };
        Self {
            retry: delayed(RETRY),
            guests: delayed(GUESTS),
            tend: interval(TEND),
            audit: delayed(if audits { COLLECT_EVERY } else { NEVER }),
            watchdog: interval(notify::watchdog().unwrap_or(NEVER)),
        }
    }

    /// Waits for the next timer. Nothing is lost when this is cancelled.
    pub(super) async fn next(&mut self) -> Timer {
        tokio::select! {
            _ = self.retry.tick() => Timer::Retry,
            now = self.guests.tick() => Timer::Guests(now.into_std()),
            _ = self.tend.tick() => Timer::Tend,
            _ = self.audit.tick() => Timer::Audit,
            _ = self.watchdog.tick() => Timer::Watchdog,
        }
    }
}
