//! A connection in TIME-WAIT: four numbers and no exchange.
//!
//! RFC 9293 §3.6.1, §3.10.7.4: the side that closed first answers a retransmitted FIN until the other side must have
//! received the acknowledgement. Here the side that closed last does the same. Only the remembered numbers
//! distinguish a retransmission of a connection's first segment from a new connection, since its number is sufficient
//! proof of a handshake. A SYN for the four-tuple starts a new connection at once (Scaleway's client always uses
//! source port 1).

use metadata_common::cookie::Flow;
use std::time::Duration;

use super::frame::{Segment, before};

/// How long the first segment of a closed connection may still be a retransmission. The guest has received the answer
/// and is one frame away. A later segment belongs to a new connection with the same numbers, which simple stacks reuse;
/// the kernel has answered its SYN.
const ECHO: Duration = Duration::from_secs(1);

/// The sequence numbers of a closed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Our next sequence number, and the guest's.
    pub(super) next: (u32, u32),
    /// Both initial sequence numbers, the guest's first.
    pub(super) initial: (u32, u32),
}

impl Numbers {
    /// Whether the connection has used the segment's numbers. The mark of a first segment has only 16 bits, so any
    /// segment may match it by chance and still be a retransmission.
    pub(super) fn cover(&self, segment: &Segment<'_>) -> bool {
        let is_between = |number, initial, next| !before(next, number) && before(initial, number);
        let is_acknowledged = |ack| is_between(ack, self.initial.1, self.next.0);
        is_between(segment.seq, self.initial.0, self.next.1) && segment.ack.is_some_and(is_acknowledged)
    }
}

/// One four-tuple in TIME-WAIT.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeWait {
    pub(super) until: Duration,
    pub(super) numbers: Numbers,
    /// A SYN has arrived since, so a first segment with the old numbers belongs to a new connection.
    pub(super) reopened: bool,
}

impl TimeWait {
    /// Whether a repeated first segment starts a new connection: a SYN has arrived since, or the guest's last FIN is
    /// too long ago for a retransmission. `kept` is the time in TIME-WAIT after that FIN.
    pub(super) fn gives_way(&self, now: Duration, kept: Duration) -> bool {
        self.reopened || self.until.saturating_sub(kept) + ECHO <= now
    }
}

// Distinguishes a forgotten connection from one whose first segment is still in transit.
//
// In both cases a segment arrives that is not its connection's first, and no agent holds the connection. A guest
// whose first segment was lost retransmits that one before all others (RFC 6298 §5.4). It sends a later segment at
// most once more, as a tail loss probe (RFC 8985 §7). A segment that arrives for the third time is therefore the
// oldest unacknowledged one, and its connection is gone. The stack then sends a reset (RFC 9293 §3.10.7.1), so that
// the guest need not wait for its timeout.

/// Limit of remembered flows. Each has one place, given by its number; a newer flow replaces an older one.
pub(super) const REMEMBERED: usize = 256;
/// Arrivals of a segment after which its connection counts as forgotten.
pub(super) const TIMES: u8 = 3;
/// How long a segment is remembered. Guests wait at most a minute before they retransmit.
const MEMORY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Heard {
    flow: u64,
    seq: u32,
    times: u8,
    last: Duration,
}

/// The last segments that arrived too early or too late.
pub(super) struct StraySegments([Option<Heard>; REMEMBERED]);

impl StraySegments {
    pub(super) fn new() -> Self {
        Self([None; REMEMBERED])
    }

    /// Records a segment. Returns true if it has arrived so often that no earlier one will follow.
    pub(super) fn is_certain(&mut self, now: Duration, flow: Flow, seq: u32) -> bool {
        let flow = flow.number();
        let place = &mut self.0[flow as usize % REMEMBERED];
        let same = place.filter(|heard| heard.flow == flow && heard.seq == seq && now <= heard.last + MEMORY);
        let times = same.map_or(0, |heard| heard.times) + 1;
        let is_certain = times >= TIMES;
        *place = (!is_certain).then_some(Heard { flow, seq, times, last: now });
        is_certain
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::Numbers;
    use crate::stack::frame::{ACK, Segment, Tuple};

    #[test]
    fn a_connections_numbers_differ_from_others_even_where_they_wrap() {
        let tuple =
            Tuple { remote: (IpAddr::from([10, 0, 0, 1]), 1), local: (IpAddr::from([10, 0, 0, 2]), 80) };
        for (theirs, ours) in [(1_000, 5_000), (u32::MAX - 50, u32::MAX - 50), (u32::MAX, u32::MAX)] {
            let numbers =
                Numbers { initial: (theirs, ours), next: (ours.wrapping_add(300), theirs.wrapping_add(100)) };
            let cases = [
                ("the first segment", 1, Some(1), true),
                ("a middle segment", 60, Some(200), true),
                ("the last segment", 100, Some(300), true),
                ("the SYN", 0, Some(1), false),
                ("a segment beyond the last", 101, Some(300), false),
                ("an acknowledgement of unsent data", 60, Some(301), false),
                ("an acknowledgement of an earlier number", 60, Some(0), false),
                ("no acknowledgement", 60, None, false),
                ("a segment of another handshake", 1, Some(1 << 23 | 1), false),
            ];
            for (name, seq, ack, covered) in cases {
                let (seq, ack) = (theirs.wrapping_add(seq), ack.map(|ack| ours.wrapping_add(ack)));
                let segment = Segment { tuple, seq, ack, window: 1, flags: ACK, options: &[], payload: &[] };
                assert_eq!(numbers.cover(&segment), covered, "{name} after {theirs}");
            }
        }
    }
}
