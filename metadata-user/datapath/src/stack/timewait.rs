//! What is left of a connection that is over: four numbers, and not a word of the exchange.
//!
//! RFC 9293 §3.6.1, §3.10.7.4: whoever closed first answers a repeated FIN until the other side must have
//! heard. Here whoever closed last does the same, because nothing else tells an echo of a connection's first
//! segment from a new connection: its number is proof enough of a handshake. A SYN for the four-tuple
//! starts anew at once (Scaleway's client always comes from port 1).

use std::time::Duration;

use super::segment::{Segment, before};

/// How long the first segment of a connection that is over may still be an echo: its guest has heard the answer, and
/// is a frame away. After that it is of a guest that comes with the same numbers again, as simple ones do, and
/// whose SYN the kernel has answered.
const ECHO: Duration = Duration::from_secs(1);

/// The numbers of a connection that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Our next sequence number, and the guest's.
    pub(super) next: (u32, u32),
    /// Both initial sequence numbers, the guest's first.
    pub(super) initial: (u32, u32),
}

impl Numbers {
    /// True for a segment whose numbers the connection has used. The mark of a first segment has 16 bits, so any of them
    /// can agree with it by chance, and is a repetition all the same.
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
    /// A SYN has come since, so that even a first segment with the old numbers is a new one.
    pub(super) reopened: bool,
}

impl TimeWait {
    /// True when the first segment of the connection, come again, begins a new one: a SYN has come since, or the
    /// guest's last FIN is so long ago that this is no echo. The four-tuple is remembered for `kept` after that FIN.
    pub(super) fn gives_way(&self, now: Duration, kept: Duration) -> bool {
        self.reopened || self.until.saturating_sub(kept) + ECHO <= now
    }
}

#[cfg(test)]
mod tests {
    use super::Numbers;
    use crate::stack::segment::{ACK, Segment, Tuple};
    use std::net::IpAddr;

    #[test]
    fn a_connections_own_numbers_are_told_from_others_also_where_they_wrap() {
        let tuple =
            Tuple { remote: (IpAddr::from([10, 0, 0, 1]), 1), local: (IpAddr::from([10, 0, 0, 2]), 80) };
        for (theirs, ours) in [(1_000, 5_000), (u32::MAX - 50, u32::MAX - 50), (u32::MAX, u32::MAX)] {
            let numbers =
                Numbers { initial: (theirs, ours), next: (ours.wrapping_add(300), theirs.wrapping_add(100)) };
            let cases = [
                ("the first segment", 1, Some(1), true),
                ("one in the middle", 60, Some(200), true),
                ("the last", 100, Some(300), true),
                ("the SYN", 0, Some(1), false),
                ("one ahead", 101, Some(300), false),
                ("an acknowledgement of what was not sent", 60, Some(301), false),
                ("an acknowledgement from before", 60, Some(0), false),
                ("no acknowledgement", 60, None, false),
                ("another handshake's", 1, Some(1 << 23 | 1), false),
            ];
            for (name, seq, ack, covered) in cases {
                let (seq, ack) = (theirs.wrapping_add(seq), ack.map(|ack| ours.wrapping_add(ack)));
                let segment = Segment { tuple, seq, ack, window: 1, flags: ACK, options: &[], payload: &[] };
                assert_eq!(numbers.cover(&segment), covered, "{name} after {theirs}");
            }
        }
    }
}
