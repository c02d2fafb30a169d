//! Detects stalled connections while they stall, and describes their last segments.

use super::tcp::{Nanos, SECOND};
use serde::{Deserialize, Serialize};

/// The most stalls that are described. Further ones are only counted.
pub(crate) const DESCRIBED: usize = 32;
/// The most doublings of a timeout that losses excuse: Linux's tcp_syn_retries.
const DOUBLINGS: u32 = 6;

/// A connection without progress for longer than losses explain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stall {
    /// Address and port of the guest.
    pub(crate) connection: String,
    /// Answers that the guest got before.
    pub(crate) answers: u64,
    /// The length of the stall. If the stall never ended, the time until it was noticed.
    pub(crate) seconds: f64,
    /// Frames lost on purpose during the wait.
    pub(crate) lost: u64,
    /// The last segments, in the order in which the guest saw them.
    pub(crate) segments: Vec<String>,
    /// The sockets as the guest's kernel shows them, if the guest has a kernel.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) sockets: String,
}

/// The first timeout of a connection (RFC 6298 §2.1), and the timeout after a handshake that was sent again (§5.7).
const FIRST_TIMEOUT: Nanos = SECOND;
const TIMEOUT_AFTER_LOSS: Nanos = 3 * SECOND;

/// Returns how long a connection may be without progress if `lost` of its frames were lost: the limit, and the time of
/// as many timeouts in a row, each twice as long as the one before (RFC 6298 §5.5).
fn patience(limit: Nanos, lost: u64, first: Nanos) -> Nanos {
    limit + ((1 << lost.min(DOUBLINGS.into())) - 1) * first
}

/// The state of a guest's current connection.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Frames lost before the last progress.
    lost: u64,
    /// Whether a timeout preceded the last progress.
    timed_out: bool,
    /// The index of the current stall among the described ones.
    stall: Option<usize>,
}

/// All stalls of a storm.
#[derive(Debug, Default)]
pub(crate) struct Stalls {
    pub(crate) count: u64,
    /// The first [`DESCRIBED`] of them.
    pub(crate) described: Vec<Stall>,
    /// Waits beyond the limit that losses explain.
    pub(crate) excused: u64,
    /// The longest wait of all.
    pub(crate) longest: Nanos,
}

impl Watch {
    /// Records progress after a wait. `lost` is the total of lost frames before the progress.
    pub(crate) fn progressed(&mut self, waited: Nanos, lost: u64, limit: Nanos, stalls: &mut Stalls) {
        self.timed_out = lost > self.lost && waited >= FIRST_TIMEOUT;
        self.lost = lost;
        stalls.longest = stalls.longest.max(waited);
        match self.stall.take() {
            // Stalls beyond [`DESCRIBED`] have no description to complete.
            Some(at) => stalls.described.get_mut(at).into_iter().for_each(|it| it.seconds = seconds(waited)),
            None => stalls.excused += u64::from(waited > limit),
        }
    }

    /// Returns the number of frames lost in a wait that has just become too long.
    pub(crate) fn overdue(&self, waited: Nanos, lost: u64, limit: Nanos) -> Option<u64> {
        let lost = lost.saturating_sub(self.lost);
        let first = if self.timed_out { TIMEOUT_AFTER_LOSS } else { FIRST_TIMEOUT };
        (self.stall.is_none() && waited > patience(limit, lost, first)).then_some(lost)
    }

    /// Records the wait as a stall.
    pub(crate) fn stalls(&mut self, stall: Stall, stalls: &mut Stalls) {
        self.stall = Some(stalls.described.len());
        stalls.count += 1;
        if stalls.described.len() < DESCRIBED {
            stalls.described.push(stall);
        }
    }
}

pub(crate) fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / SECOND as f64
}

#[cfg(test)]
mod tests {
    use super::{DESCRIBED, SECOND, Stall, Stalls, Watch};

    const LIMIT: u64 = 3 * SECOND;

    #[test]
    fn a_wait_is_a_stall_unless_losses_explain_it() {
        for (waited, lost, stalls) in
            [(3, 0, false), (4, 0, true), (4, 1, false), (5, 1, true), (10, 3, false)]
        {
            let watch = Watch::default();
            assert_eq!(
                watch.overdue(waited * SECOND, lost, LIMIT).is_some(),
                stalls,
                "{waited} s, {lost} lost"
            );
        }
    }

    #[test]
    fn a_repeated_handshake_excuses_longer_timeouts() {
        for (handshake, lost_then, waited, stalls) in
            [(1, 1, 12, false), (1, 1, 13, true), (0, 0, 7, true), (1, 0, 7, true)]
        {
            let (mut watch, mut found) = (Watch::default(), Stalls::default());
            watch.progressed(handshake * SECOND, lost_then, LIMIT, &mut found);
            let overdue = watch.overdue(waited * SECOND, lost_then + 2, LIMIT);
            assert_eq!(overdue.is_some(), stalls, "{handshake} s, {lost_then} lost, then {waited} s");
        }
    }

    #[test]
    fn a_stall_counts_once_and_lasts_until_progress() {
        let (mut watch, mut stalls) = (Watch::default(), Stalls::default());
        for round in 0..DESCRIBED as u64 + 2 {
            assert_eq!(watch.overdue(4 * SECOND, round, LIMIT), Some(0));
            watch.stalls(Stall::default(), &mut stalls);
            assert_eq!(watch.overdue(5 * SECOND, round, LIMIT), None);
            watch.progressed(6 * SECOND, round + 1, LIMIT, &mut stalls);
        }
        assert_eq!((stalls.count, stalls.described.len()), (DESCRIBED as u64 + 2, DESCRIBED));
        assert!(stalls.described.iter().all(|stall| stall.seconds == 6.0));
        watch.progressed(4 * SECOND, 99, LIMIT, &mut stalls);
        assert_eq!((stalls.excused, stalls.longest), (1, 6 * SECOND));
    }
}
