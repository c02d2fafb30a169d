//! Waits for a guest to acknowledge an event, so that a host may act after it.
//!
//! A hold has a limit that nothing extends: not the guest, which may be silent, and not the machine's clock, which may be
//! set, because limits count the monotonic clock. The holder stops by dropping the future.

use metadata_content::record::event::VmEvents;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How often to look whether a guest has acknowledged an event.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a guest has said of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestReadiness {
    /// Nothing yet.
    Awaited,
    /// It has acknowledged the event, or the event is over.
    Ready,
    /// No event has this id.
    Unknown,
}

impl GuestReadiness {
    /// What the guest of these events has said of one.
    #[must_use]
    pub fn of(events: &VmEvents, id: &str) -> Self {
        match events.is_awaited(id) {
            Some(true) => Self::Awaited,
            Some(false) => Self::Ready,
            None => Self::Unknown,
        }
    }
}

/// Looks until there is something to tell, and for `limit` at most. Looks once at the end of it, too.
pub async fn within<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + limit;
    loop {
        let (found, now) = (look(), Instant::now());
        if found.is_some() || now >= until {
            return found;
        }
        sleep_until(until.min(now + LOOK_EVERY)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::{GuestReadiness, LOOK_EVERY, within};
    use metadata_content::record::event::VmEvents;
    use std::time::Duration;
    use tokio::time::Instant;

    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_hold_ends_with_the_news_or_exactly_at_its_limit() {
        let start = Instant::now();
        assert_eq!(within(LIMIT, || None::<()>).await, None);
        assert_eq!(start.elapsed(), LIMIT, "nobody said anything");
        let (start, news) = (Instant::now(), Duration::from_secs(2));
        assert_eq!(within(LIMIT, || (start.elapsed() >= news).then_some(7)).await, Some(7));
        assert!(start.elapsed() <= news + LOOK_EVERY, "{:?}", start.elapsed());
        let start = Instant::now();
        assert_eq!(within(Duration::ZERO, || Some(())).await, Some(()));
        assert_eq!(start.elapsed(), Duration::ZERO, "it was there already");
    }

    #[test]
    fn a_guest_is_ready_once_it_said_so_or_nothing_is_pending() {
        let events = VmEvents::default();
        let add = |state: &str| {
            let event = serde_json::json!({"id": "a", "kind": "freeze", "state": state});
            events.add("i", serde_json::from_value(event).expect("an event"), 0).expect("room");
        };
        assert_eq!(GuestReadiness::of(&events, "a"), GuestReadiness::Unknown);
        add("scheduled");
        assert_eq!(GuestReadiness::of(&events, "a"), GuestReadiness::Awaited);
        events.acknowledge("a", 1);
        assert_eq!(GuestReadiness::of(&events, "a"), GuestReadiness::Ready);
        add("completed");
        assert_eq!(GuestReadiness::of(&events, "a"), GuestReadiness::Ready);
        add("scheduled");
        assert_eq!(GuestReadiness::of(&events, "a"), GuestReadiness::Awaited, "it comes again");
    }
}
