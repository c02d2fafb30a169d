//! The interface between TCP and the protocol above it.
//!
//! The stack owns connections and does not know HTTP; [`Service`] and [`Exchange`] know HTTP and no packets. Data to
//! send crosses this interface as immutable shared bytes: TCP keeps the reference until all of them are acknowledged,
//! and slices it again to retransmit.

use bytes::Bytes;
use metadata_common::addresses::Connection;
use metadata_common::cookie::Flow;
use metadata_common::maps::{AllSent, Slot};
use metadata_common::time::Now;
use std::fmt;
use std::io::IoSlice;
use std::net::IpAddr;
use std::time::Duration;

/// Sends complete Ethernet frames to the guest. A frame that cannot be sent is lost, as on any wire.
pub trait Transmit {
    /// Sends one frame.
    fn send(&mut self, frame: &[u8]);
    /// Sends a frame of several segments. Called only for slots whose device
    /// [takes them](crate::guest_devices::GuestDevices::takes_long).
    fn send_long(&mut self, _frame: &Long<'_>) {}
}

/// A TCP frame of several segments, cut behind the hub: by the guest's driver, or by the kernel for a device without
/// segmentation offload.
#[derive(Clone, Copy, Debug)]
pub struct Long<'a> {
    /// The Ethernet, IP and TCP headers of the whole. The TCP checksum is partial.
    pub headers: &'a [u8],
    /// Bytes of the headers before the TCP header.
    pub tcp_at: u16,
    /// True for IPv4, false for IPv6.
    pub is_ipv4: bool,
    /// The payload in pieces, [`LONG_MAX`] bytes at most.
    pub payload: &'a [IoSlice<'a>],
    /// Bytes of payload in each segment but the last.
    pub segment: u16,
}

/// Limit of payload bytes in a [`Long`] frame. The kernel cuts frames of 65,536 bytes and more itself (`gso_max_size`);
/// 74 bytes are for the headers.
pub const LONG_MAX: u32 = 65_535 - 74;

/// The work of sending this many bytes of payload in one frame, in units of [`QUANTUM`](crate::worker::QUANTUM): one
/// for the frame, and one for each 8 KiB that are copied.
pub(super) fn work_of(payload: usize) -> u32 {
    1 + (payload / 8_192) as u32
}

impl Long<'_> {
    /// The work of sending this frame.
    #[must_use]
    pub fn work(&self) -> u32 {
        work_of(self.payload.iter().map(|piece| piece.len()).sum())
    }
}

/// Requests that a service refused because their VM uses more than its share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedRequests {
    /// Refused: the VM already has as many waiting requests as it may.
    pub held: u64,
    /// Refused: the VM's partly received requests already hold as many bytes as they may.
    pub buffered: u64,
    /// Refused: the VM's computed answers that are not yet read already hold as many bytes as they may.
    pub computed: u64,
}

/// Opens an exchange for each new connection.
pub trait Service {
    /// The state of one connection.
    type Exchange: Exchange;
    /// Whether the service listens on this address and port for this slot.
    fn listens(&self, slot: Slot, local: (IpAddr, u16)) -> bool;
    /// Whether the service allows this slot one more connection.
    fn admits(&self, _slot: Slot) -> bool {
        true
    }
    /// The requests refused so far.
    fn refused(&self) -> RefusedRequests {
        RefusedRequests::default()
    }
    /// Reads ahead what the service will touch for these frames, all of which have data. See
    /// [`Stack::read_ahead`](super::Stack::read_ahead). Changes nothing.
    fn read_ahead(&self, _glimpses: &[FramePreview<'_>]) {}
    /// Opens an exchange for a new connection, at the guest's first data or FIN.
    fn open(&mut self, now: Now, connection: Connection) -> Self::Exchange;
    /// Called after each turn with its duration; zero if the turn had no work.
    fn turned(&mut self, _turn: Duration) {}
}

/// What a look at a frame shows before anything is checked.
#[derive(Clone, Copy, Debug)]
pub struct FramePreview<'a> {
    /// The slot that sent the frame.
    pub slot: Slot,
    /// The segment's destination.
    pub local: (IpAddr, u16),
    /// The segment's data.
    pub payload: &'a [u8],
}

/// The next action of the stack for a connection.
#[derive(Clone, PartialEq, Eq)]
pub enum ConnectionAction {
    /// Send these bytes. The stack asks again when there is room for more ([`SEND_AHEAD`](super::SEND_AHEAD),
    /// [`PIECES_PER_CONNECTION`](super::PIECES_PER_CONNECTION)).
    Send(Bytes),
    /// Like `Send`, but no segment with any of these bytes, first sent or retransmitted, has an IP TTL or hop limit
    /// above `hop_limit`. Segments with none of them (SYN-ACK, pure ACKs, FIN) have the usual 64.
    SendWithin {
        /// The bytes to send.
        bytes: Bytes,
        /// 1 to 64; values outside this range are clamped to it.
        hop_limit: u8,
    },
    /// Nothing to send. The stack asks again when bytes arrive, or at the deadline, by the clock of `Now::mono`.
    Wait {
        /// The latest time of the next call of [`Exchange::next`].
        until: Option<Duration>,
    },
    /// All data is handed over: send FIN after it and read no more.
    Close,
    /// Abort the connection with RST.
    Abort,
}

impl fmt::Debug for ConnectionAction {
    /// Shows the length of the data, not the data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(bytes) => write!(f, "Send({} bytes)", bytes.len()),
            Self::SendWithin { bytes, hop_limit } => {
                write!(f, "SendWithin({} bytes, {hop_limit})", bytes.len())
            }
            Self::Wait { until } => f.debug_struct("Wait").field("until", until).finish(),
            Self::Close => f.write_str("Close"),
            Self::Abort => f.write_str("Abort"),
        }
    }
}

/// The conversation over one connection.
pub trait Exchange {
    /// Processes received bytes, in order; returns how many it took. The rest stays in the receive window and is
    /// offered again after the next [`ConnectionAction::Wait`].
    fn receive(&mut self, now: Now, bytes: &[u8]) -> usize;
    /// Reads fields on most of the exchange's cache lines.
    fn touch(&self) -> u64 {
        0
    }
    /// Called when the guest has sent FIN: no more bytes arrive, but the answer may still be sent (half-close).
    fn finish(&mut self, now: Now);
    /// Returns the next action. The stack calls it until it returns [`ConnectionAction::Wait`],
    /// [`ConnectionAction::Close`] or [`ConnectionAction::Abort`].
    fn next(&mut self, now: Now) -> ConnectionAction;
    /// Whether the exchange waits only for the guest, and would close at once without more output if the guest sent
    /// FIN now. If so, the connection may close and the exchange be dropped without a further call.
    fn is_idle(&self) -> bool {
        false
    }
    /// The service is stopping: close after the current answer or request, or soon if there is none, and send nothing
    /// new after `until`. Called again if a new drain starts.
    fn drain(&mut self, _now: Now, _until: Duration) {}
    /// The drain is cancelled: continue as before.
    fn resume(&mut self) {}
    /// Whether the exchange holds a complete request that waits for its answer. Used for inspection.
    fn is_waiting(&self) -> bool {
        false
    }
    /// Returns true once after this exchange has changed something that other exchanges of its slot may wait for. The
    /// stack asks after each turn of the connection. It then runs a turn for the slot's other connections, like
    /// [`Stack::wake`](super::Stack::wake).
    fn stirs(&mut self) -> bool {
        false
    }
}

// Connections that only wait for acknowledgements: the stack posts them to the kernel programs, and reads what these
// received.

/// What the kernel has received on the stack's behalf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelReceipt {
    /// The acknowledgement number; valid only if it equals the number posted.
    pub acknowledged: u32,
    /// The same number, once the guest's FIN has been answered.
    pub closed: u32,
}

/// A connection whose entry another connection has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DisplacedConnection {
    /// The connection's [`Flow::number`].
    pub flow: u64,
    /// What the kernel received for it until then.
    pub heard: KernelReceipt,
}

/// A table like the kernel's `ALL_SENT`. Another connection may take an entry at any time, and entries may be late.
///
/// No method may block or fail: segments of connections that are not posted go to user space.
pub trait AckLedger {
    /// Records the start of a connection. Until its release, the kernel leaves SYNs and the ends of handshakes with
    /// its entry to the stack.
    fn hold(&mut self, flow: Flow);
    /// Records the end of a connection: withdraws it and ends [`hold`](Self::hold). Called once for each `hold`.
    fn release(&mut self, flow: Flow);
    /// Whether the kernel has answered a SYN of this flow since a connection with its entry started. A SYN of another
    /// flow with the same entry may have overwritten this.
    fn is_opened(&self, flow: Flow) -> bool;
    /// Posts a connection that has sent all its output. [`AllSent::acknowledged`] and [`AllSent::closed`] start with
    /// numbers that mean nothing was received; they must be stored before the other fields. Returns the connection
    /// whose entry it took.
    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<DisplacedConnection>;
    /// Reads what the kernel received for a connection; `None` if its entry is empty or holds another connection.
    fn look(&self, flow: Flow) -> Option<KernelReceipt>;
    /// Withdraws a connection from the kernel, if it is posted.
    fn withdraw(&mut self, flow: Flow);
}

/// An empty ledger: user space handles every acknowledgement.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLedger;

impl AckLedger for NoLedger {
    fn hold(&mut self, _: Flow) {}

    fn release(&mut self, _: Flow) {}

    fn is_opened(&self, _: Flow) -> bool {
        false
    }

    fn post(&mut self, _: Flow, _: AllSent) -> Option<DisplacedConnection> {
        None
    }

    fn look(&self, _: Flow) -> Option<KernelReceipt> {
        None
    }

    fn withdraw(&mut self, _: Flow) {}
}
