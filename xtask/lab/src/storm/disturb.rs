//! Events that disturb the agent in the middle of a storm, and their durations.

use super::model::Disturbed;
use super::peer::{Disturbance, Running};
use anyhow::{Context as _, Result};
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How often a guest repeats a failed request, a second apart, if the storm has events or the node signs the answers.
/// cloud-init's clients repeat at least as often.
pub(super) const RETRIES: u8 = 5;

/// A disturbance, and its time since the start of a storm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Event {
    what: Disturbance,
    after: Duration,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.what {
            Disturbance::Kill9 => "kill9",
            Disturbance::TakeOver => "takeover",
        };
        write!(f, "{name}@{}", self.after.as_secs_f64())
    }
}

/// Parses `kill9@SECONDS` or `takeover@SECONDS`.
pub(super) fn read(text: &str) -> Result<Event, String> {
    let parts = text.split_once('@').and_then(|(name, seconds)| {
        let what = match name {
            "kill9" => Disturbance::Kill9,
            "takeover" => Disturbance::TakeOver,
            _ => return None,
        };
        let after = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        Some(Event { what, after })
    });
    parts.ok_or_else(|| "expected kill9@SECONDS or takeover@SECONDS".into())
}

/// Formats all events as on the command line.
pub(super) fn shown(events: &[Event]) -> String {
    events.iter().map(Event::to_string).collect::<Vec<_>>().join(",")
}

/// Causes each event when it is due, until the storm is over. Dropping the other end of `over` ends the storm.
pub(super) fn all(
    running: &mut dyn Running,
    events: &[Event],
    over: &Receiver<()>,
) -> Result<Vec<Disturbed>> {
    let began = Instant::now();
    let mut done = Vec::new();
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.after);
    for event in events {
        match over.recv_timeout(event.after.saturating_sub(began.elapsed())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
        let started = Instant::now();
        running.disturb(event.what).with_context(|| event.to_string())?;
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        done.push(Disturbed { event: event.to_string(), took_us });
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::{all, read, shown};
    use crate::storm::peer::{Disturbance, Running};
    use anyhow::Result;
    use std::sync::mpsc::{Sender, channel};

    /// Records its disturbances. A takeover ends the storm.
    struct Noted(Vec<Disturbance>, Option<Sender<()>>);

    impl Running for Noted {
        fn pids(&self) -> Vec<u32> {
            Vec::new()
        }

        fn disturb(&mut self, what: Disturbance) -> Result<()> {
            self.0.push(what);
            self.1.take_if(|_| what == Disturbance::TakeOver);
            Ok(())
        }

        fn stop(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_shown_as_it_was_given() {
        for text in ["kill9@0.5", "takeover@2"] {
            assert_eq!(read(text).map(|event| event.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "kill9", "kill9@", "kill9@-1", "kill9@nan", "reboot@1"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn events_are_sorted_by_time_and_none_follows_the_end() {
        let events = ["takeover@0.02", "kill9@0", "kill9@3600"].map(|text| read(text).expect("an event"));
        assert_eq!(shown(&events), "takeover@0.02,kill9@0,kill9@3600");
        let (over, end) = channel::<()>();
        let mut running = Noted(Vec::new(), Some(over));
        let done = all(&mut running, &events, &end).expect("all done");
        assert_eq!(running.0, [Disturbance::Kill9, Disturbance::TakeOver]);
        assert_eq!(
            done.iter().map(|done| done.event.as_str()).collect::<Vec<_>>(),
            ["kill9@0", "takeover@0.02"]
        );
    }
}
