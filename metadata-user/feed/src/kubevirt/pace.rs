//! How often a watch may ask the API server.
//!
//! A thousand agents share one API server. Each failure in a row doubles the pause before the next request, and each
//! pause is random by half, so that agents which lost the server together do not return together. Only a finished list
//! or a watch that works ends the row: the server may accept requests long before it can answer them.

use std::time::Duration;

/// The limits of one watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The longest pause after the first failure. It doubles with each further failure in a row.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// The longest pause before the next watch when the server has ended one. A server that stops ends those of all
    /// agents at once.
    pub ended: Duration,
    /// How often everything is listed anew, more or less by a tenth, in case a watch has lost something.
    pub relist: Duration,
    /// How long the server keeps one watch open, in whole seconds; up to a tenth is added.
    pub watch: Duration,
    /// A watch without an event that ends sooner is a failure.
    pub short: Duration,
}

/// A pause is at least its longest divided by this.
pub const SPREAD: u32 = 2;

impl Pace {
    /// That of the agent.
    pub const DEFAULT: Self = Self {
        first: Duration::from_millis(200),
        longest: Duration::from_secs(30),
        ended: Duration::from_millis(500),
        relist: Duration::from_secs(600),
        watch: Duration::from_secs(120),
        short: Duration::from_secs(1),
    };

    /// The longest pause after so many failures in a row, one at least.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(doubled).min(self.longest)
    }
}

/// The pauses of one watch.
#[derive(Debug)]
pub(super) struct Pauses {
    pace: Pace,
    /// In a row.
    failures: u32,
    /// A watch has failed since one worked.
    unwatched: bool,
    /// The history was gone since a watch worked.
    gone: bool,
}

impl Pauses {
    pub(super) fn new(pace: Pace) -> Self {
        Self { pace, failures: 0, unwatched: false, gone: false }
    }

    /// A list is finished, which ends a row of lists that failed. A watch that failed is still to work.
    pub(super) fn listed(&mut self) {
        if !self.unwatched && !self.gone {
            self.failures = 0;
        }
    }

    /// A watch works: it has delivered something, or has lasted.
    pub(super) fn works(&mut self) {
        (self.failures, self.unwatched, self.gone) = (0, false, false);
    }

    /// The pause after a list that failed.
    pub(super) fn list_failed(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let longest = self.pace.pause(self.failures);
        between(longest / SPREAD, longest)
    }

    /// The pause after a watch that failed.
    pub(super) fn watch_failed(&mut self) -> Duration {
        self.unwatched = true;
        self.list_failed()
    }

    /// The pause before a list because the history is gone: none the first time, as this is no failure. A server that
    /// forgets at once what it has listed fails.
    pub(super) fn history_is_gone(&mut self) -> Option<Duration> {
        std::mem::replace(&mut self.gone, true).then(|| self.watch_failed())
    }

    /// The pause after a watch that worked and that the server ended.
    pub(super) fn ended(&self) -> Duration {
        between(Duration::ZERO, self.pace.ended)
    }
}

/// A random time of these bounds.
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
    fn a_row_of_failures_ends_once_what_failed_works() {
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
        assert!(pauses.watch_failed() > PACE.first, "a list says nothing of watches");
    }

    #[test]
    fn a_lost_history_costs_no_pause_until_it_is_lost_again_before_a_watch_works() {
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
