//! TIME-WAIT without a connection: a closed conversation needs four numbers, not two buffers.
//!
//! RFC 9293 §3.6.1, §3.10.7.4: whoever closed first answers a repeated FIN until the other side must have
//! heard. A SYN for the four-tuple starts anew at once (Scaleway's client always comes from port 1).

use std::collections::VecDeque;
use std::time::Duration;

use super::config::TIME_WAITS_PER_PORT;
use super::connection::Tuple;

/// One closed conversation.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeWait {
    pub(super) tuple: Tuple,
    pub(super) until: Duration,
    /// Our next sequence number, and the guest's.
    pub(super) next: (u32, u32),
}

/// The conversations of one port that closed lately, oldest first.
#[derive(Debug, Default)]
pub(super) struct TimeWaits(VecDeque<TimeWait>);

impl TimeWaits {
    /// Remembers a conversation; at the limit the oldest is forgotten.
    pub(super) fn push(&mut self, wait: TimeWait) {
        if self.0.len() == TIME_WAITS_PER_PORT {
            self.0.pop_front();
        }
        self.0.push_back(wait);
    }

    /// Forgets what has expired. Returns how many are left.
    pub(super) fn expire(&mut self, now: Duration) -> usize {
        self.0.retain(|wait| wait.until > now);
        self.0.len()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn find(&mut self, tuple: &Tuple) -> Option<&mut TimeWait> {
        self.0.iter_mut().find(|wait| wait.tuple == *tuple)
    }

    /// Forgets one four-tuple. True when it was known.
    pub(super) fn remove(&mut self, tuple: &Tuple) -> bool {
        let at = self.0.iter().position(|wait| wait.tuple == *tuple);
        at.is_some_and(|at| self.0.remove(at).is_some())
    }
}
