//! The state of a feed's connection to its API server. The feed writes it; status and metrics read it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::source::{FailureStreak, SourceHealth};

/// Why a request to the API server failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// The connection failed or broke, or the server stopped answering.
    Unreachable,
    /// 401 or 403: the token or the role is missing.
    Forbidden,
    /// 404: the cluster does not have the kind.
    NotFound,
    /// 410: the server no longer has the version to continue from.
    Gone,
    /// Any other status, such as 429 or 503.
    Refused,
    /// The response does not match the API.
    Unreadable,
    /// The server ended a watch at once, without an event.
    CutShort,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Unreachable,
        Self::Forbidden,
        Self::NotFound,
        Self::Gone,
        Self::Refused,
        Self::Unreadable,
        Self::CutShort,
    ];

    /// Its name in status and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::Gone => "gone",
            Self::Refused => "refused",
            Self::Unreadable => "unreadable",
            Self::CutShort => "cut_short",
        }
    }

    /// The kind of an HTTP status.
    #[must_use]
    pub fn of_status(code: u16) -> Self {
        match code {
            401 | 403 => Self::Forbidden,
            404 => Self::NotFound,
            410 => Self::Gone,
            _ => Self::Refused,
        }
    }
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", kind.name())]
pub struct ContactError {
    /// The kind of failure.
    pub kind: FailureKind,
    /// The message of the server or the kernel.
    pub reason: String,
}

/// The state of all watches of a feed.
#[derive(Debug)]
pub struct Contact {
    since: Instant,
    inner: Mutex<ContactState>,
}

#[derive(Debug, Default)]
struct ContactState {
    /// The watches by name.
    watches: BTreeMap<&'static str, Watch>,
    failures: BTreeMap<FailureKind, u64>,
}

/// The state of one watch.
#[derive(Debug, Default)]
struct Watch {
    /// When the server last answered usefully.
    answered: Option<Instant>,
    /// When the consecutive failures began, and the last of them.
    failing: Option<(Instant, ContactError)>,
}

impl Contact {
    /// Creates the state of these watches, before their first request.
    #[must_use]
    pub fn new(watches: impl IntoIterator<Item = &'static str>, now: Instant) -> Self {
        let watches = watches.into_iter().map(|name| (name, Watch::default())).collect();
        Self { since: now, inner: Mutex::new(ContactState { watches, ..ContactState::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, ContactState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a useful answer to a watch.
    pub fn answered(&self, watch: &'static str, now: Instant) {
        self.lock().watches.entry(watch).or_default().answered = Some(now);
    }

    /// Notes that a watch works. Returns true if it did not before.
    pub fn works(&self, watch: &'static str, now: Instant) -> bool {
        let mut inner = self.lock();
        let watch = inner.watches.entry(watch).or_default();
        watch.answered = Some(now);
        watch.failing.take().is_some()
    }

    /// Counts a lost history. The feed must list everything again, but the watch has not failed.
    pub fn history_is_gone(&self) {
        *self.lock().failures.entry(FailureKind::Gone).or_default() += 1;
    }

    /// Notes a failed request. Returns true if the previous request did not fail.
    pub fn failed(&self, watch: &'static str, failure: ContactError, now: Instant) -> bool {
        let mut inner = self.lock();
        *inner.failures.entry(failure.kind).or_default() += 1;
        let watch = inner.watches.entry(watch).or_default();
        let since = watch.failing.as_ref().map(|(since, _)| *since);
        watch.failing = Some((since.unwrap_or(now), failure));
        since.is_none()
    }

    /// The current state: that of the worst watch.
    #[must_use]
    pub fn report(&self, now: Instant) -> SourceHealth {
        let inner = self.lock();
        let ago = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        let last = inner.watches.values().map(|watch| watch.answered).min().flatten();
        let failing = inner.watches.values().filter_map(|watch| watch.failing.as_ref());
        let failing = failing.min_by_key(|(since, _)| *since).map(|(since, failure)| FailureStreak {
            since: ago(*since),
            kind: failure.kind.name().into(),
            reason: failure.reason.clone(),
        });
        let count = |kind: &FailureKind| inner.failures.get(kind).copied().unwrap_or_default();
        SourceHealth {
            reads: "the API server".into(),
            asked_for: ago(self.since),
            answered: last.map(ago),
            failing,
            failures: FailureKind::ALL.iter().map(|kind| (kind.name().into(), count(kind))).collect(),
            ..SourceHealth::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Contact, ContactError, FailureKind};
    use std::time::{Duration, Instant};

    fn failure(kind: FailureKind) -> ContactError {
        ContactError { kind, reason: "why".into() }
    }

    #[test]
    fn of_several_watches_the_one_without_an_answer_for_longest_counts() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let contact = Contact::new(["a", "b"], begun);
        contact.answered("a", at(10));
        let report = contact.report(at(15));
        assert_eq!((report.answered, report.asked_for), (None, 15.0), "b has had no answer");
        contact.answered("b", at(20));
        let report = contact.report(at(50));
        assert_eq!(report.answered, Some(40.0));
    }

    #[test]
    fn a_watch_fails_from_its_first_failure_until_it_works() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let contact = Contact::new(["a", "b"], begun);
        assert!(contact.failed("a", failure(FailureKind::Unreachable), at(1)));
        assert!(!contact.failed("a", failure(FailureKind::Forbidden), at(5)));
        assert!(contact.failed("b", failure(FailureKind::Refused), at(6)));
        // A single page of a list does not end the failure.
        contact.answered("a", at(7));
        let failing = contact.report(at(11)).failing.expect("both fail");
        assert_eq!((failing.since, &*failing.kind, &*failing.reason), (10.0, "forbidden", "why"));
        assert!(contact.works("a", at(12)) && !contact.works("a", at(12)));
        assert_eq!(contact.report(at(16)).failing.map(|failing| failing.since), Some(10.0), "b fails");
        assert!(contact.works("b", at(17)));
        assert_eq!(contact.report(at(18)).failing, None);
    }

    #[test]
    fn failures_are_counted_by_kind_and_those_that_never_were_are_zero() {
        let now = Instant::now();
        let contact = Contact::new(["a"], now);
        contact.history_is_gone();
        for code in [401, 403, 404, 410, 429, 503] {
            contact.failed("a", failure(FailureKind::of_status(code)), now);
        }
        let counts = contact.report(now).failures;
        let expected = [
            ("cut_short", 0),
            ("forbidden", 2),
            ("gone", 2),
            ("not_found", 1),
            ("refused", 2),
            ("unreachable", 0),
            ("unreadable", 0),
        ];
        assert_eq!(counts, expected.map(|(name, count)| (name.to_owned(), count)).into());
    }
}
