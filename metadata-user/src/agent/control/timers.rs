//! The timers of the control loop.

use std::time::{Duration, Instant};

use crate::service::audit::COLLECT_EVERY;
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
    /// Take the answers that workers have recorded.
    Collect,
    /// Notify the watchdog of the service manager.
    Watchdog,
}

/// The timers. Each fires for the first time immediately.
pub(super) struct Timers {
    retry: Interval,
    guests: Interval,
    tend: Interval,
    /// `None` while workers record no answers.
    collect: Option<Interval>,
    watchdog: Interval,
}

impl Timers {
    pub(super) fn new(collects: bool) -> Self {
        Self {
            retry: delayed(RETRY),
            guests: delayed(GUESTS),
            tend: interval(TEND),
            collect: collects.then(|| delayed(COLLECT_EVERY)),
            watchdog: interval(notify::watchdog().unwrap_or(NEVER)),
        }
    }

    /// Sets whether workers record answers.
    pub(super) fn set_collecting(&mut self, collects: bool) {
        if collects != self.collect.is_some() {
            self.collect = collects.then(|| delayed(COLLECT_EVERY));
        }
    }

    /// Waits for the next timer. Nothing is lost when this is cancelled.
    pub(super) async fn next(&mut self) -> Timer {
        tokio::select! {
            _ = self.retry.tick() => Timer::Retry,
            now = self.guests.tick() => Timer::Guests(now.into_std()),
            _ = self.tend.tick() => Timer::Tend,
            () = tick(&mut self.collect) => Timer::Collect,
            _ = self.watchdog.tick() => Timer::Watchdog,
        }
    }
}

fn delayed(every: Duration) -> Interval {
    let mut interval = interval(every);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Waits for ever without an interval.
async fn tick(interval: &mut Option<Interval>) {
    match interval {
        Some(interval) => _ = interval.tick().await,
        None => std::future::pending().await,
    }
}
