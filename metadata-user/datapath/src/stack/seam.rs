//! The seam between TCP and what is said over it.
//!
//! The stack owns connections and knows no HTTP; [`Service`] and [`Exchange`] know HTTP and no packets.
//! What is to be sent crosses the seam as immutable shared bytes: TCP keeps the reference until all of them
//! are acknowledged, and slices it again to retransmit.

use bytes::Bytes;
use metadata_common::maps::Slot;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use metadata_base::connection::Connection;
use metadata_base::time::Now;

/// Takes complete Ethernet frames towards the guest. A frame that cannot be sent is lost, as on any wire.
pub trait Transmit {
    /// Sends one frame.
    fn send(&mut self, frame: &[u8]);
}

/// Requests that a service refused because their VM takes more than its share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// More requests waiting than a VM may have.
    pub held: u64,
    /// More octets half received than are kept.
    pub buffered: u64,
    /// More octets computed and not read than are kept.
    pub computed: u64,
}

/// Opens an exchange for each new connection.
pub trait Service {
    /// The state of one connection.
    type Exchange: Exchange;
    /// True when the service listens on this address and port for this slot.
    fn listens(&self, slot: Slot, local: (IpAddr, u16)) -> bool;
    /// True when a slot may have one more connection, as far as the service is concerned.
    fn admits(&self, _slot: Slot) -> bool {
        true
    }
    /// What the service has refused so far.
    fn refused(&self) -> Refused {
        Refused::default()
    }
    /// A connection was established, and the guest has said something on it, or that it has nothing to say.
    fn open(&mut self, now: Now, connection: Connection) -> Self::Exchange;
    /// All that came in together has been dealt with, which took so long.
    fn turned(&mut self, _turn: Duration) {}
}

/// What the stack is to do with a connection next.
#[derive(Clone, PartialEq, Eq)]
pub enum Step {
    /// Send these bytes, and ask again when there is room for more
    /// ([`SEND_AHEAD`](super::SEND_AHEAD), [`PIECES_PER_CONNECTION`](super::PIECES_PER_CONNECTION)).
    Send(Bytes),
    /// The same, but no segment that carries any of these bytes, at first or again, leaves with an IP TTL or
    /// hop limit above `hop_limit`. What carries none of them (SYN-ACK, pure ACKs, FIN) has the usual 64.
    SendWithin {
        /// What to send.
        bytes: Bytes,
        /// 1 to 64; smaller and larger values count as the nearest of these.
        hop_limit: u8,
    },
    /// Nothing to send. Ask again when bytes arrive, or at the deadline (same clock as `Now::mono`).
    Wait {
        /// When to call [`Exchange::next`] again at the latest.
        until: Option<Duration>,
    },
    /// Everything has been handed over: send FIN after it and read no further.
    Close,
    /// Give the connection up: send RST.
    Abort,
}

impl fmt::Debug for Step {
    /// How much is sent, not what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(bytes) => write!(f, "Send({} octets)", bytes.len()),
            Self::SendWithin { bytes, hop_limit } => {
                write!(f, "SendWithin({} octets, {hop_limit})", bytes.len())
            }
            Self::Wait { until } => f.debug_struct("Wait").field("until", until).finish(),
            Self::Close => f.write_str("Close"),
            Self::Abort => f.write_str("Abort"),
        }
    }
}

/// One connection's conversation.
pub trait Exchange {
    /// Takes received bytes, in order; returns how many were taken. What is not taken stays in the
    /// receive window and is offered again after the next [`Step::Wait`].
    fn receive(&mut self, now: Now, bytes: &[u8]) -> usize;
    /// The guest has sent FIN: no more bytes will come (half-close, the answer may still be sent).
    fn finish(&mut self, now: Now);
    /// What to do next; called until it answers [`Step::Wait`], [`Step::Close`] or [`Step::Abort`].
    fn next(&mut self, now: Now) -> Step;
    /// True when it waits for the guest alone, and would close at once, with nothing more said, if the guest
    /// finished now. Then that may happen without it: it is dropped.
    fn is_idle(&self) -> bool {
        false
    }
    /// The service is leaving: close after the answer that is being said or asked for, or soon when there is none,
    /// and say nothing new after `until`. Called again for a drain that begins anew.
    fn drain(&mut self, _now: Now, _until: Duration) {}
    /// The service stays after all.
    fn resume(&mut self) {}
    /// True when it holds a complete request that waits for its answer: for whoever looks.
    fn is_waiting(&self) -> bool {
        false
    }
    /// True, once, when this exchange has changed something that others of its slot may be waiting for.
    /// Asked after each turn of the connection; then the slot's other connections get a turn as by
    /// [`Stack::wake`](super::Stack::wake).
    fn stirs(&mut self) -> bool {
        false
    }
}
