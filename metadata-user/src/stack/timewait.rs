//! What is left of a connection that is over: four numbers, and not a word of the exchange.
//!
//! RFC 9293 §3.6.1, §3.10.7.4: whoever closed first answers a repeated FIN until the other side must have
//! heard. Here whoever closed last does the same, because nothing else tells an echo of a connection's first
//! segment from a new connection: its number is proof enough of a handshake. A SYN for the four-tuple
//! starts anew at once (Scaleway's client always comes from port 1).

use std::time::Duration;

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

/// One four-tuple in TIME-WAIT.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeWait {
    pub(super) until: Duration,
    pub(super) numbers: Numbers,
    /// A SYN has come since, so that even a first segment with the old numbers is a new one.
    pub(super) reopened: bool,
}

impl TimeWait {
    /// True when a first segment that is proof of a handshake with these initial numbers begins a new
    /// connection, of the `kept` that it is remembered after the guest's last FIN.
    pub(super) fn gives_way(&self, initial: (u32, u32), now: Duration, kept: Duration) -> bool {
        let is_rested = self.until.saturating_sub(kept) + ECHO <= now;
        self.reopened || is_rested || self.numbers.initial != initial
    }
}
