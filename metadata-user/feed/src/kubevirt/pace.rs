//! How often a watch may send requests to the API server.
//!
//! A thousand agents share one API server. Each failure in a row doubles the pause before the next request. Half of
//! each pause is random, so that agents which lost the server together do not return together. Only a finished list or
//! a working watch resets the pause, because a server may accept requests long before it can answer them.

use std::time::Duration;

/// The limits of one watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The longest pause after the first failure.
    pub first: Duration,
    /// The longest pause after any failure.
    pub longest: Duration,
    /// The longest pause before the next watch after the server ended one. A server that shuts down ends the watches of
    /// all agents at once.
    pub ended: Duration,
    /// The interval of full lists, ± 10 %. They correct what a watch has missed.
    pub relist: Duration,
    /// How long the server keeps one watch open, in whole seconds; the watch adds up to 10 %.
    pub watch: Duration,
    /// A watch that ends sooner and without an event counts as a failure.
    pub short: Duration,
}

/// The shortest pause is the longest one divided by this.
pub const SPREAD: u32 = 2;

impl Pace {
    /// The limits of the agent.
    pub const DEFAULT: Self = Self {
        first: Duration::from_millis(200),
        longest: Duration::from_secs(30),
        ended: Duration::from_millis(500),
        relist: Duration::from_secs(600),
        watch: Duration::from_secs(120),
        short: Duration::from_secs(1),
    };

    /// The longest pause after this many failures in a row, at least one.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(doubled).min(self.longest)
    }
}

/// The state of one watch's pauses.
#[derive(Debug)]
pub(super) struct Pauses {
    pace: Pace,
    /// Failures in a row.
    failures: u32,
    /// Set while a watch has failed since the last one worked.
    unwatched: bool,
    /// Set while the server's history was gone since the last watch worked.
    gone: bool,
}

impl Pauses {
    pub(super) fn new(pace: Pace) -> Self {
        Self { pace, failures: 0, unwatched: false, gone: false }
    }

    /// Ends consecutive failures of lists. Those of watches continue.
    pub(super) fn listed(&mut self) {
        if !self.unwatched && !self.gone {
            self.failures = 0;
        }
    }

    /// Ends the consecutive failures: the watch delivered an event, or lasted.
    pub(super) fn works(&mut self) {
        (self.failures, self.unwatched, self.gone) = (0, false, false);
    }

    /// Returns the pause after a failed list.
    pub(super) fn list_failed(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let longest = self.pace.pause(self.failures);
        between(longest / SPREAD, longest)
    }

    /// Returns the pause after a failed watch.
    pub(super) fn watch_failed(&mut self) -> Duration {
        self.unwatched = true;
        self.list_failed()
    }

    /// Returns the pause before a list after the server lost the history. The first loss is no failure and needs no
    /// pause. Another loss before a watch works counts as a failure.
    pub(super) fn history_is_gone(&mut self) -> Option<Duration> {
        std::mem::replace(&mut self.gone, true).then(|| self.watch_failed())
    }

    /// Returns the pause after the server ended a working watch.
    pub(super) fn ended(&self) -> Duration {
        between(Duration::ZERO, self.pace.ended)
    }
}

/// A random duration between two bounds.
pub(super) fn between(least: Duration, most: Duration) -> Duration {
    least + most.saturating_sub(least).mul_f64(rand::random())
}

#[cfg(test)]
mod tests {
    use super::{Pace, Pauses, SPREAD};
    use std::collections::BTreeSet;
    use std::time::Duration;

    const PACE: Pace = Pace::DEFAULT;

    #[test]
    fn pauses_double_to_a_limit_and_are_random_by_half() {
        let mut pauses = Pauses::new(PACE);
        let mut longest = PACE.first;
        for n in 1..=70 {
            let pause = if n % 2 == 0 { pauses.list_failed() } else { pauses.watch_failed() };
            assert!(pause >= longest / SPREAD && pause <= longest, "{n}: {pause:?} of {longest:?}");
            longest = (longest * 2).min(PACE.longest);
        }
        let all: BTreeSet<_> = (0..8).map(|_| pauses.list_failed()).collect();
        assert!(all.len() > 1, "{all:?}");
        assert_eq!(
            (PACE.pause(0), PACE.pause(1), PACE.pause(u32::MAX)),
            (PACE.first, PACE.first, PACE.longest)
        );
    }

    #[test]
    fn a_row_of_failures_ends_once_the_failed_operation_works() {
        let row = |fail: fn(&mut Pauses) -> Duration| {
            let mut pauses = Pauses::new(PACE);
            (0..9).for_each(|_| _ = fail(&mut pauses));
            pauses
        };
        for (fail, ends) in [
            (Pauses::list_failed as fn(&mut Pauses) -> Duration, Pauses::listed as fn(&mut Pauses)),
            (Pauses::list_failed, Pauses::works),
            (Pauses::watch_failed, Pauses::works),
        ] {
            let mut pauses = row(fail);
            ends(&mut pauses);
            assert!(pauses.list_failed() <= PACE.first);
        }
        let mut pauses = row(Pauses::watch_failed);
        pauses.listed();
        assert!(pauses.watch_failed() > PACE.first, "a list does not reset a watch");
    }

    #[test]
    fn a_history_lost_twice_before_a_watch_works_causes_a_pause() {
        let mut pauses = Pauses::new(PACE);
        assert_eq!(pauses.history_is_gone(), None);
        for failures in 1..20 {
            pauses.listed();
            let pause = pauses.history_is_gone().expect("a pause");
            assert!(pause >= PACE.pause(failures) / SPREAD, "lists in between do not shorten pauses");
        }
        pauses.works();
        assert_eq!(pauses.history_is_gone(), None);
    }
}
