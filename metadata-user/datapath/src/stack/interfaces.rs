//! What a user of the stack implements, sets and reads: the interface between TCP and the protocol above it, the
//! configuration, and the counters.
//!
//! The stack owns connections and does not know HTTP; [`Service`] and [`Exchange`] know HTTP and no packets. Data to
//! send crosses this interface as immutable shared bytes: TCP keeps the reference until all of them are acknowledged,
//! and slices it again to retransmit.

use bytes::Bytes;
use metadata_common::addresses::Connection;
use metadata_common::cookie::{CookieKey, Flow, TcpOptions};
use metadata_common::maps::{AllSent, AnsweredConnection, MAX_SLOTS, Slot};
use metadata_common::time::Now;
use std::fmt;
use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Sends complete Ethernet frames to the guest. A frame that cannot be sent is lost, as on any wire.
pub trait Transmit {
    /// Sends one frame.
    fn send(&mut self, frame: &[u8]);
    /// Sends a frame of several segments. Called only for slots whose device
    /// [takes them](GuestDevices::takes_long).
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
    /// Send these bytes. The stack asks again when there is room for more ([`SEND_AHEAD`],
    /// [`PIECES_PER_CONNECTION`]).
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

/// The numbers of a segment that the kernel has steered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSegment {
    /// The sequence number.
    pub seq: u32,
    /// The sequence number after the segment.
    pub next: u32,
    /// The acknowledgement number.
    pub ack: Option<u32>,
    /// The segment is a reset.
    pub resets: bool,
}

/// Whose turn it is on a connection that the kernel may have answered by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelTurn {
    /// The kernel has not answered it.
    Unknown,
    /// It is the stack's from now on. The segment follows everything before, and the guest has these abilities.
    Adopted(TcpOptions),
    /// It ends: the guest has reset it, or asks again for an answer that has changed since.
    Reset,
    /// It is the kernel's. The guest repeats this segment if it is needed.
    Kernels {
        /// The sequence number of the connection's first request, if it is known.
        first: Option<u32>,
        /// It [is idle](AnsweredConnection::is_idle).
        is_idle: bool,
    },
    /// It is the kernel's, and the guest asks whether it still exists (RFC 9293 section 3.8.4).
    Probed {
        /// The next sequence number of either side: ours and the guest's.
        next: (u32, u32),
    },
}

impl KernelTurn {
    /// Whose turn it is after this segment, on a connection that the kernel has answered and that is not over. `posted` has
    /// its numbers in `ALL_SENT`, `answered` its entry in `ANSWERED`, and `mark` is its [`Flow::mark`].
    #[must_use]
    pub fn after(
        posted: &AllSent,
        mark: u16,
        segment: KernelSegment,
        answered: Option<AnsweredConnection>,
    ) -> Self {
        let AllSent { sent, received, acknowledged, opened, .. } = *posted;
        let options = answered.unwrap_or(AnsweredConnection::LEAST).options();
        let KernelSegment { seq, next, ack, resets } = segment;
        let has_data = next != seq;
        // The kernel has answered a SYN of this flow after it answered the request: the guest has begun again. If it uses
        // the same initial number, as some do after a reboot, its new request looks like a repeated one.
        let begins = opened == mark && answered.is_some_and(|answered| answered.first == seq);
        match ack {
            _ if resets && seq == received => Self::Reset,
            // A probe is empty or has one byte, and repeats the last number.
            Some(ack)
                if !resets
                    && ack == sent
                    && seq == received.wrapping_sub(1)
                    && (next == seq || next == received) =>
            {
                Self::Probed { next: (sent, received) }
            }
            Some(ack) if !resets && has_data && seq == received && ack == sent => Self::Adopted(options),
            // The kernel could not repeat the answer, and the guest has not received it. If it has, this is a late copy.
            Some(ack)
                if !resets
                    && has_data
                    && !begins
                    && next == received
                    && ack != sent
                    && acknowledged != sent =>
            {
                Self::Reset
            }
            _ => Self::Kernels { first: answered.map(|answered| answered.first), is_idle: false },
        }
    }

    /// Whether the stack may [take the connection over](AckLedger::take_over).
    #[must_use]
    pub const fn is_stacks(self) -> bool {
        matches!(self, Self::Adopted(_) | Self::Reset)
    }
}

/// A table like the kernel's `ALL_SENT`. Another connection may take an entry at any time, and entries may be late.
///
/// No method may block or fail: segments of connections that are not posted go to user space.
pub trait AckLedger {
    /// Records the start of a connection. Until its release, the kernel leaves SYNs and the ends of handshakes with
    /// its entry to the stack.
    fn hold(&mut self, flow: Flow);
    /// Records the end of a connection: withdraws it and ends [`hold`](Self::hold). Called once for each `hold`, unless
    /// [`leave`](Self::leave) is.
    fn release(&mut self, flow: Flow);
    /// Ends [`hold`](Self::hold) because the stack ends. A posted connection stays posted: the kernel receives the
    /// guest's FIN also afterwards.
    fn leave(&mut self, flow: Flow) {
        self.release(flow);
    }
    /// Whether the kernel has answered a SYN of this flow since a connection with its entry started. A SYN of another
    /// flow with the same entry may have overwritten this.
    fn is_opened(&self, flow: Flow) -> bool;
    /// Posts a connection that has sent all its output. [`AllSent::acknowledged`] and [`AllSent::closed`] start with
    /// numbers that mean nothing was received; they must be stored before the other fields. Returns the connection
    /// whose entry it took.
    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<DisplacedConnection>;
    /// Reads what the kernel received for a connection; `None` if its entry is empty or holds another connection.
    fn look(&self, flow: Flow) -> Option<KernelReceipt>;
    /// Whose turn it is after a segment of a connection that the kernel may have answered by itself.
    fn kernel_turn(&self, _flow: Flow, _segment: KernelSegment) -> KernelTurn {
        KernelTurn::Unknown
    }
    /// Takes a connection over from the kernel. Call it if [`kernel_turn`](Self::kernel_turn) says of this segment that the
    /// connection is [`Adopted`](KernelTurn::Adopted) or [`Reset`](KernelTurn::Reset). Returns false if the kernel has
    /// handled another segment since: then drop this one, which the guest repeats if it is needed.
    fn take_over(&mut self, _flow: Flow, _segment: KernelSegment) -> bool {
        false
    }
    /// Notes that the stack has answered a SYN of a flow whose connection the kernel has answered. Afterwards
    /// [`is_opened`](Self::is_opened).
    fn reopen(&mut self, _flow: Flow) {}
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

// Limits and configuration of a stack.

/// Limit of bytes that one connection has received but its exchange has not taken; also the largest window offered.
///
/// A guest with segmentation offload may send a whole window in one frame. With the longest headers (14 Ethernet + 60
/// IPv4 + 60 TCP) and the 256 bytes of headroom that XDP reserves, that frame still fits a 4 KiB UMEM chunk. A
/// larger frame would be dropped without being counted.
pub const RECEIVE_BUFFER: usize = 3 * 1024;

/// Bytes handed over but not acknowledged at which the stack stops asking an exchange for more. They are shared and
/// not copied, so this limits how far ahead a pipelining guest is answered, not memory.
pub const SEND_AHEAD: usize = 16 * 1024;

/// Limit of pieces handed over but not acknowledged per connection; further ones wait.
pub const PIECES_PER_CONNECTION: usize = 64;

/// Limit of segments in flight per connection, and so sent in one turn. It bounds the delay that a burst causes to
/// others.
pub const SEGMENTS_IN_FLIGHT: u32 = 128;

/// Longest IP packet the stack sends, in bytes: 1460 bytes of TCP payload over IPv4, 1440 over IPv6.
pub const MTU: usize = 1500;

/// How long a port's new connections start with segments that every host accepts ([`SEGMENT_UNSAID_V4`] or
/// [`SEGMENT_UNSAID_V6`]), after longer ones were lost and a short one arrived. The port's link is then narrower than
/// its device's MTU. The stack forgets this after the period or with the port, and then detects it again.
///
/// [`SEGMENT_UNSAID_V4`]: metadata_common::answer::SEGMENT_UNSAID_V4
/// [`SEGMENT_UNSAID_V6`]: metadata_common::answer::SEGMENT_UNSAID_V6
pub const NARROW_FOR: Duration = Duration::from_secs(300);

/// Connections that every slot can have, however many the others hold.
pub const SHARE: usize = 4;

/// Limit of connections over all ports: the sum of all shares. When all are taken, some slot holds more than its
/// share, or every slot holds exactly its share.
pub const CONNECTIONS: usize = MAX_SLOTS as usize * SHARE;

/// Limit of four-tuples in TIME-WAIT per port. A new one replaces the oldest.
pub const TIME_WAITS_PER_PORT: usize = 128;

/// Limit of four-tuples in TIME-WAIT over all ports. At the limit a port remembers no more until some of its own
/// expire.
pub const TIME_WAITS: usize = 65_536;

/// Time without an acknowledgement while data is outstanding, before a reset. It is long enough for a dozen
/// retransmissions (RFC 6298 §5.5, §5.7).
pub(super) const STALL: Duration = Duration::from_secs(120);

/// Time from the acknowledgement of our FIN to the guest's FIN (FIN-WAIT-2), before a reset.
pub(super) const LINGER: Duration = Duration::from_secs(30);

/// Time in TIME-WAIT (RFC 9293 §3.6.1). It is shorter than 2 MSL, because one tap is the whole network.
pub const TIME_WAIT: Duration = Duration::from_secs(10);

/// Time from the last frame of a port without connections until the port is freed.
pub(super) const PORT_IDLE: Duration = Duration::from_secs(30);

const _: () = assert!(RECEIVE_BUFFER + 14 + 60 + 60 + 256 <= 4096, "a full window must fit a UMEM chunk");

/// Limits and addresses of a [`Stack`](super::Stack).
#[derive(Clone)]
pub struct StackConfig {
    /// The addresses that the stack answers for.
    pub served: Vec<IpAddr>,
    /// Next hops to these addresses. The stack answers only ARP for them.
    pub arp_only: Vec<Ipv4Addr>,
    /// The number of slots; valid slots are 0 to `slots - 1`.
    pub slots: u32,
    /// Limit of ports with current or recent connections. At the limit a new port replaces the longest idle one.
    pub ports: usize,
    /// Limit of connections per port.
    pub connections_per_port: usize,
    /// Limit of connections over all ports. At the limit a new connection replaces an idle one, else one of the slot
    /// that has most.
    pub connections: usize,
    /// Connections that a slot keeps when all are taken, unless they are idle. A slot with fewer gets another one
    /// whatever others hold, if `connections` is at least `share` times `slots`.
    pub share: usize,
    /// Key of the initial sequence numbers. Take it from the system's random source and give the kernel programs the
    /// same key.
    pub cookie_key: CookieKey,
    /// The guests' devices. Their MTUs limit the segment size; an unknown MTU counts as [`MTU`].
    pub guest_devices: GuestDevices,
}

impl Default for StackConfig {
    /// Serves 169.254.169.254 for all slots, with 128 connections per port and [`CONNECTIONS`] in total.
    fn default() -> Self {
        Self {
            served: vec![IpAddr::from([169, 254, 169, 254])],
            arp_only: Vec::new(),
            slots: MAX_SLOTS,
            ports: MAX_SLOTS as usize,
            connections_per_port: 128,
            connections: CONNECTIONS,
            share: SHARE,
            cookie_key: CookieKey([0; 2]),
            guest_devices: GuestDevices::default(),
        }
    }
}

impl fmt::Debug for StackConfig {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackConfig")
            .field("served", &self.served)
            .field("arp_only", &self.arp_only)
            .field("slots", &self.slots)
            .field("ports", &self.ports)
            .field("connections_per_port", &self.connections_per_port)
            .field("connections", &self.connections)
            .field("guest_devices", &self.guest_devices)
            .field("share", &self.share)
            .finish_non_exhaustive()
    }
}

// What the stack needs to know of each guest's device, by slot: steering writes it, the stack reads it.

/// The bit of an entry for a device that takes long answers. No MTU is that large.
const TAKES_LONG: u32 = 1 << 31;

/// A table of devices shared by the control side and workers. Clones share one table. It takes four bytes per slot.
///
/// All accesses are relaxed: an entry carries no other data, and TCP retransmits what was sent by an old entry.
#[derive(Clone, Default)]
pub struct GuestDevices(Arc<[AtomicU32]>);

impl GuestDevices {
    /// Creates a table for slots 0 to `slots - 1`, of whose devices nothing is known. The default table has no slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        Self((0..slots).map(|_| AtomicU32::new(0)).collect())
    }

    /// Sets the MTU of a slot's device: the bytes of its longest IP packet, or 0 if unknown. A slot beyond the table
    /// is ignored.
    pub fn set_mtu(&self, slot: Slot, mtu: u32) {
        self.change(slot, |entry| entry & TAKES_LONG | mtu & !TAKES_LONG);
    }

    /// Sets whether answers of many segments reach a slot's device in one frame. A slot beyond the table is ignored.
    pub fn set_takes_long(&self, slot: Slot, takes: bool) {
        self.change(slot, |entry| if takes { entry | TAKES_LONG } else { entry & !TAKES_LONG });
    }

    /// The MTU of a slot's device in bytes; 0 if unknown.
    #[must_use]
    pub fn mtu(&self, slot: Slot) -> u32 {
        self.entry(slot) & !TAKES_LONG
    }

    /// Whether answers of many segments reach a slot's device in one frame.
    #[must_use]
    pub fn takes_long(&self, slot: Slot) -> bool {
        self.entry(slot) & TAKES_LONG != 0
    }

    fn entry(&self, slot: Slot) -> u32 {
        self.0.get(slot as usize).map_or(0, |entry| entry.load(Ordering::Relaxed))
    }

    /// Only the control side writes, so no write is lost between load and store.
    fn change(&self, slot: Slot, change: impl FnOnce(u32) -> u32) {
        if let Some(entry) = self.0.get(slot as usize) {
            entry.store(change(entry.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for GuestDevices {
    /// Shows the number of slots.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestDevices({} slots)", self.0.len())
    }
}

// Counters and gauges of a stack.

/// Counters since the start, and current gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackStats {
    /// Frames received.
    pub received: u64,
    /// Frames sent.
    pub sent: u64,
    /// ARP requests answered.
    pub arp_answered: u64,
    /// Neighbour solicitations answered.
    pub neighbours_answered: u64,
    /// Echo requests answered.
    pub echoes_answered: u64,
    /// Dropped: truncated, or with contradictory lengths.
    pub dropped_malformed: u64,
    /// Dropped: wrong checksum of an IPv4 header, a TCP segment, an echo request or a neighbour solicitation. The
    /// checksum of a segment or an ICMPv6 message may be partial, as checksum offload leaves it.
    pub dropped_checksum: u64,
    /// Dropped: destination not served, or source address invalid.
    pub dropped_address: u64,
    /// Dropped: IP fragments.
    pub dropped_fragment: u64,
    /// Dropped: neither ARP, neighbour solicitation, TCP nor echo request.
    pub dropped_protocol: u64,
    /// Dropped: the slot is out of range.
    pub dropped_slot: u64,
    /// SYNs answered by the stack; the kernel programs answer most SYNs themselves.
    pub handshakes: u64,
    /// Connections established: first data segments of a handshake that this agent answered.
    pub accepted: u64,
    /// Segments dropped because they arrived before their connection's first segment and are retransmitted after it,
    /// or because their connection is forgotten. Only repeated retransmission distinguishes the two.
    pub dropped_early: u64,
    /// Segments of forgotten connections, retransmitted often enough to be sure. They are answered with RST and also
    /// counted in `unmatched`.
    pub forgotten: u64,
    /// Segments of no known connection, answered with RST (a closed port, or a forgotten connection).
    pub unmatched: u64,
    /// First segments dropped: the port has reached its limit of connections.
    pub refused_port_connections: u64,
    /// First segments dropped: the VM has reached the limit of connections in its record.
    pub refused_vm_connections: u64,
    /// First segments dropped: all connections are taken.
    pub refused_connections: u64,
    /// First segments dropped: all ports are taken and none is idle.
    pub refused_ports: u64,
    /// First segments dropped during a drain: the next agent receives the retransmission.
    pub refused_leaving: u64,
    /// Idle ports replaced by another port.
    pub ports_evicted: u64,
    /// Idle connections reset to make room for another guest's, because all were taken.
    pub connections_evicted: u64,
    /// Slow but not idle connections of a slot above its share, reset to make room for another slot's.
    pub connections_displaced: u64,
    /// Requests that the service refused.
    pub refused: RefusedRequests,
    /// Connections replaced by a new one with the same address and port.
    pub superseded: u64,
    /// Connections reset because the guest acknowledged nothing, or never sent FIN.
    pub stalled: u64,
    /// Times that a guest's acknowledgement was overdue, and the data in flight was sent again.
    pub timed_out: u64,
    /// Connections reset because they did not end within the drain's limit.
    pub cut_short: u64,
    /// Segments of no known connection that were not reset, because they may belong to another agent during a
    /// handover.
    pub spared: u64,
    /// Turns run for waiting connections after a change of their slot.
    pub woken: u64,
    /// Connections that the service aborted.
    pub aborted: u64,
    /// Four-tuples reused out of TIME-WAIT.
    pub time_wait_reused: u64,
    /// Panics in the stack; each cost one slot its connections. Please report them.
    pub faults: u64,
    /// Gauge: ports in use.
    pub ports: u64,
    /// Gauge: open connections.
    pub connections: u64,
}

impl StackStats {
    /// All counters with their names.
    #[must_use]
    pub fn counters(&self) -> [(&'static str, u64); 36] {
        [
            ("received", self.received),
            ("sent", self.sent),
            ("arp_answered", self.arp_answered),
            ("neighbours_answered", self.neighbours_answered),
            ("echoes_answered", self.echoes_answered),
            ("dropped_malformed", self.dropped_malformed),
            ("dropped_checksum", self.dropped_checksum),
            ("dropped_address", self.dropped_address),
            ("dropped_fragment", self.dropped_fragment),
            ("dropped_protocol", self.dropped_protocol),
            ("dropped_slot", self.dropped_slot),
            ("handshakes", self.handshakes),
            ("accepted", self.accepted),
            ("dropped_early", self.dropped_early),
            ("forgotten", self.forgotten),
            ("unmatched", self.unmatched),
            ("refused_port_connections", self.refused_port_connections),
            ("refused_vm_connections", self.refused_vm_connections),
            ("refused_connections", self.refused_connections),
            ("refused_ports", self.refused_ports),
            ("refused_leaving", self.refused_leaving),
            ("ports_evicted", self.ports_evicted),
            ("connections_evicted", self.connections_evicted),
            ("connections_displaced", self.connections_displaced),
            ("refused_held", self.refused.held),
            ("refused_buffered", self.refused.buffered),
            ("refused_computed", self.refused.computed),
            ("superseded", self.superseded),
            ("stalled", self.stalled),
            ("timed_out", self.timed_out),
            ("cut_short", self.cut_short),
            ("spared", self.spared),
            ("woken", self.woken),
            ("aborted", self.aborted),
            ("time_wait_reused", self.time_wait_reused),
            ("faults", self.faults),
        ]
    }

    /// All gauges with their names.
    #[must_use]
    pub fn gauges(&self) -> [(&'static str, u64); 2] {
        [("ports", self.ports), ("connections", self.connections)]
    }
}

/// What the stack holds for one slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Open connections.
    pub connections: u64,
    /// Connections with a complete request that waits for its answer.
    pub waiting: u64,
}

#[cfg(test)]
mod tests {
    use super::GuestDevices;

    #[test]
    fn clones_share_one_table_and_slots_beyond_it_have_no_mtu() {
        let (writer, none) = (GuestDevices::new(2), GuestDevices::default());
        let reader = writer.clone();
        assert_eq!(reader.mtu(1), 0);
        writer.set_mtu(1, 1_450);
        writer.set_mtu(2, 1_280);
        none.set_mtu(0, 1_280);
        assert_eq!([reader.mtu(0), reader.mtu(1), reader.mtu(2), none.mtu(0)], [0, 1_450, 0, 0]);
    }

    #[test]
    fn the_mtu_and_the_way_of_long_answers_change_independently() {
        let devices = GuestDevices::new(1);
        devices.set_takes_long(0, true);
        devices.set_mtu(0, 9_000);
        assert_eq!((devices.mtu(0), devices.takes_long(0), devices.takes_long(1)), (9_000, true, false));
        devices.set_takes_long(0, false);
        assert_eq!((devices.mtu(0), devices.takes_long(0)), (9_000, false));
    }
}
