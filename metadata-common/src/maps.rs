//! The maps shared by the kernel and user space: names, limits, keys and values.
//!
//! Only integers and byte arrays cross this boundary. Every padding byte is a named field. The size of each
//! layout is asserted at compile time.

use core::fmt;

use crate::answer::SEGMENT_V4;
use crate::cookie::{CookieKey, TcpOptions};

/// The index of one identity (a port and a MAC) in every per-guest table, in the kernel and in user space.
pub type Slot = u32;

/// Maximum number of identities of a node. Slots run from 0 to `MAX_SLOTS - 1`.
pub const MAX_SLOTS: u32 = 16_384;

/// Maximum number of ports (taps) of a node.
pub const MAX_PORTS: u32 = 16_384;

/// Maximum number of hubs of a node, with one worker each.
pub const MAX_HUBS: u32 = 64;

/// Maximum number of receive queues of a hub. Each queue has its own veth ring and its own AF_XDP socket.
pub const HUB_QUEUES: u32 = 8;

/// The index in `SOCKETS` of the socket of a hub's queue; `None` if the hub or the queue is out of range.
#[inline(always)]
#[must_use]
pub const fn socket_index(hub: u32, queue: u32) -> Option<u32> {
    if queue < HUB_QUEUES && hub < MAX_HUBS { Some(hub * HUB_QUEUES + queue) } else { None }
}

/// Maximum number of metadata addresses of a node per address family, including the next hops towards them.
pub const MAX_SERVED: u32 = 32;

/// Entries of `ALL_SENT`, a power of two: connections for which the kernel acknowledges on behalf of user
/// space. If two connections share an entry, only one of them is posted; the segments of the other go to user
/// space.
pub const ALL_SENT: u32 = 65_536;

/// Maximum number of connections the previous agent can claim, equal to [`ALL_SENT`]. A connection beyond it goes
/// to the new agent, which resets it.
pub const MAX_DRAINING: u32 = 65_536;

/// The value of a flow in `DRAINING`.
pub const CLAIMED: u32 = 1;

/// Size in bytes of the ring of trace events. One event takes the size of [`TraceEvent`](crate::trace::TraceEvent)
/// plus 8.
pub const EVENT_BYTES: u32 = 256 * 1024;

/// Length in bytes of the longest frame a hub accepts. It exceeds any guest's MTU and is the limit up to
/// which a veth runs XDP natively.
pub const MAX_STEERED: u32 = 3_400 + crate::wire::ethernet::HEADER as u32;

/// Bit of an entry of [`name::HOME_DEVICES`]: the device accepts no redirected frames. Interface indexes are
/// positive `i32`, so they never have it.
pub const BARE: u32 = 1 << 31;

/// Size in bytes of a hub's ring. The ring carries steered frames from namespaces out of which a classifier
/// cannot redirect. It has room for 1,800 first segments or 75 of the longest frames.
pub const RING_BYTES: u32 = 256 * 1024;

/// Bytes before a frame in a ring. They hold the frame's length in native byte order.
pub const RING_HEADER: usize = 8;

/// Sizes in bytes of the records in a ring, with the length header. They fit the segments of a handshake,
/// most requests, and the longest steered frame. There are three because the kernel reserves constant sizes
/// only.
pub const RING_RECORDS: [usize; 3] = [136, 648, MAX_STEERED as usize + 2 + RING_HEADER];

/// How many frames beyond its rate a port may have sent and still use the second half of a ring. That half is
/// reserved for guests with little traffic.
pub const RING_FRESH: u64 = 64;

/// The smallest segment size for which a steered frame may be segmented. Every host accepts this size (RFC
/// 9293 §3.7.1), so no client offers less.
pub const MIN_SEGMENT: u32 = 536;

/// Value in `SERVED_V4` and `SERVED_V6`: the address is served.
pub const SERVED: u32 = 1;

/// Value in `SERVED_V4`: ARP for this address is answered, and nothing else. The address is a next hop that
/// guests use to reach a served address, and it belongs to another device.
pub const ARP_ONLY: u32 = 2;

/// [`AllSent::finished`]: the guest's FIN goes to user space.
pub const FIN_IS_NEWS: u16 = 0;

/// [`AllSent::finished`]: our FIN is sent, so the guest's FIN ends the connection.
pub const FIN_ENDS: u16 = 1;

/// [`AllSent::finished`]: our FIN is not sent yet. The kernel sends it together with the acknowledgement of
/// the guest's FIN, which ends the connection. Most clients close first, after the answer on a persistent
/// connection.
pub const FIN_ENDS_BOTH: u16 = 2;

/// [`AllSent::finished`]: as [`FIN_ENDS_BOTH`], on a connection that the kernel has answered by itself. User space does
/// not hold it.
pub const FIN_ENDS_BOTH_KERNEL: u16 = 3;

/// Maximum number of published documents. A document takes about 100 bytes of the kernel's memory.
pub const MAX_DOCUMENTS: u32 = 262_144;

/// Maximum number of common documents.
pub const MAX_COMMON_DOCUMENTS: u16 = COMMON_WORDS as u16 * COMMON_BITS;

/// Words of [`CommonUses`].
pub const COMMON_WORDS: usize = 8;

/// Documents of each word of [`CommonUses`]; a power of two, because the verifier loses the range of a quotient.
pub const COMMON_BITS: u16 = 32;

/// Maximum number of distinct responses among the published documents. A response takes about 590 bytes.
pub const MAX_BODIES: u32 = 65_536;

/// Bytes of the longest response, with its head, that has room in the frame of its request.
pub const RESPONSE_BYTES: usize = 512;

/// Maximum number of distinct responses above [`RESPONSE_BYTES`] among the published documents. A response takes 2 KiB.
pub const MAX_LONG_BODIES: u32 = 8_192;

/// Bytes of the longest response that is published, with its head: it is sent in one segment.
pub const LONG_RESPONSE_BYTES: usize = 1_460;

/// Maximum number of counters of answers to requests.
pub const MAX_ANSWER_COUNTERS: u32 = 1_024;

/// Bytes of a session token, which are all in base64.
pub const TOKEN_BYTES: usize = 56;

/// Size in bytes of the ring of records of answers: about 10,000 of them.
pub const RECORD_BYTES: u32 = 256 * 1024;

/// Bytes that stay free in that ring, so that answers on other CPUs find room, too.
pub const RECORD_RESERVE: u64 = 64 * 1024;

/// Time in milliseconds after which a connection that the kernel has answered may be replaced by another one.
pub const ALL_SENT_IDLE_MS: u32 = 75_000;

/// The length in bytes of a value of `Date` (RFC 9110 §5.6.7, IMF-fixdate).
pub const DATE_BYTES: usize = 29;

/// A bit of [`Port::answers`]: answer ARP and neighbour solicitations.
pub const ANSWER_LINK: u64 = 1;

/// A bit of [`Port::answers`]: answer the TCP segments that need no connection state.
pub const ANSWER_TCP: u64 = 2;

/// A bit of [`Port::answers`]: answer requests for published documents.
pub const ANSWER_REQUESTS: u64 = 4;

/// The position of the MTU in [`Port::answers`]. The bits below it select what is answered.
const MTU_SHIFT: u32 = 32;

/// [`Port::answers`] for a device with an MTU of `mtu` bytes; 0 means that the MTU is unknown.
#[inline(always)]
#[must_use]
pub const fn answers_within(answers: u64, mtu: u32) -> u64 {
    answers & (u32::MAX as u64) | (mtu as u64) << MTU_SHIFT
}

/// The MTU in [`Port::answers`], in bytes; 0 if it is unknown.
#[inline(always)]
#[must_use]
pub const fn mtu_of(answers: u64) -> u32 {
    (answers >> MTU_SHIFT) as u32
}

/// Names of the maps and global constants in the eBPF object.
pub mod name {
    /// `HASH` [`PortKey`](super::PortKey) → [`Port`](super::Port): the ports that the agent owns.
    pub const PORTS: &str = "PORTS";
    /// `HASH` [`IdentityKey`](super::IdentityKey) → [`Identity`](super::Identity): the registered senders of
    /// each port.
    pub const IDENTITIES: &str = "IDENTITIES";
    /// `ARRAY` slot → [`Guest`](super::Guest): the destination of an answer.
    pub const GUESTS: &str = "GUESTS";
    /// `DEVMAP_HASH` slot → ifindex of the guest's port. The entry is inserted from inside the port's
    /// namespace.
    pub const GUEST_DEVICES: &str = "GUEST_DEVICES";
    /// `ARRAY` slot → ifindex of the guest's port if a classifier on the hub's taps reaches its device, else 0. With
    /// the bit [`BARE`](super::BARE) if the device does not accept redirected frames.
    pub const HOME_DEVICES: &str = "HOME_DEVICES";
    /// `DEVMAP` hub number → ifindex of the hub's outer veth.
    pub const HUBS: &str = "HUBS";
    /// `ARRAY` hub number → ifindex of the hub's outer veth, or 0. Classifiers use it in place of `HUBS`,
    /// because the kernel binds a device map to one program type.
    pub const HUB_DEVICES: &str = "HUB_DEVICES";
    /// `XSKMAP` [`socket_index`](super::socket_index) → AF_XDP socket on a queue of the hub's inner veth.
    pub const SOCKETS: &str = "SOCKETS";
    /// `HASH` IPv4 address (4 bytes, wire order) → [`SERVED`](super::SERVED) or
    /// [`ARP_ONLY`](super::ARP_ONLY).
    pub const SERVED_V4: &str = "SERVED_V4";
    /// `HASH` IPv6 address (16 bytes, wire order) → [`SERVED`](super::SERVED).
    pub const SERVED_V6: &str = "SERVED_V6";
    /// The data section `.data.ordinary`, an `ARRAY` of one `[u8; 256]`: 1 for each byte with which no address in
    /// `SERVED_V4` and `SERVED_V6` ends, else 0. Classifiers pass a frame whose addresses end with such bytes. All
    /// bytes are 0 while a trace includes frames that pass.
    pub const ORDINARY: &str = ".data.ordinary";
    /// The constant of the program in that section.
    pub const ORDINARY_SYMBOL: &str = "ORDINARY";
    /// `ARRAY`, mapped into user space: [`Flow::index`](crate::cookie::Flow::index) →
    /// [`AllSent`](super::AllSent).
    pub const ALL_SENT: &str = "ALL_SENT";
    /// `HASH` [`Flow::number`](crate::cookie::Flow::number) → [`CLAIMED`](super::CLAIMED): connections that
    /// the previous agent still serves ([`Identity::drain`](super::Identity::drain)).
    pub const DRAINING: &str = "DRAINING";
    /// `ARRAY` slot → [`Edition`](super::Edition): whether the slot's documents are valid, and its rate.
    pub const EDITIONS: &str = "EDITIONS";
    /// `HASH` [`DocumentKey`](super::DocumentKey) → [`Document`](super::Document): the published answers.
    pub const DOCUMENTS: &str = "DOCUMENTS";
    /// `ARRAY`, mapped into user space: slot → [`CommonUses`](super::CommonUses).
    pub const COMMON_USES: &str = "COMMON_USES";
    /// `ARRAY` slot → [`SlotToken`](super::SlotToken): the session token that the guest uses.
    pub const TOKENS: &str = "TOKENS";
    /// `HASH` [`Document::body`](super::Document::body) → bytes of a response.
    pub const BODIES: &str = "BODIES";
    /// As `BODIES`, for longer responses.
    pub const LONG_BODIES: &str = "LONG_BODIES";
    /// `HASH` 0 → [`ServedDate`](super::ServedDate). A hash replaces a value whole.
    pub const DATE: &str = "DATE";
    /// `ARRAY`, mapped into user space: [`Flow::index`](crate::cookie::Flow::index) →
    /// [`AnsweredConnection`](super::AnsweredConnection).
    pub const ANSWERED: &str = "ANSWERED";
    /// `PERCPU_ARRAY` [`Document::counter`](super::Document::counter) → number of answers.
    pub const ANSWER_COUNTS: &str = "ANSWER_COUNTS";
    /// `RINGBUF` of [`AnswerRecord`](super::AnswerRecord).
    pub const ANSWER_RECORDS: &str = "ANSWER_RECORDS";
    /// `PERCPU_ARRAY` of one frame's sender, passed from `port` to `request`.
    pub const HANDED: &str = "HANDED";
    /// `PERCPU_ARRAY` of one request that `request` is answering.
    pub const ANSWERING: &str = "ANSWERING";
    /// `PROG_ARRAY` of one entry: `request`.
    pub const REQUEST_PROGRAM: &str = "REQUEST_PROGRAM";
    /// `ARRAY` of one [`InheritedState`](super::InheritedState): state that the next agent inherits. No program reads it.
    pub const AGENT: &str = "AGENT";
    /// `PERCPU_ARRAY` verdict → number of frames.
    pub const COUNTERS: &str = "COUNTERS";
    /// `ARRAY` of one [`Trace`](crate::trace::Trace): the filter of the trace.
    pub const TRACE: &str = "TRACE";
    /// `RINGBUF` of [`TraceEvent`](crate::trace::TraceEvent): the traced frames.
    pub const EVENTS: &str = "EVENTS";
    /// `PERCPU_ARRAY` of one [`Scratch`](crate::trace::Scratch): the event under construction.
    pub const TRACED: &str = "TRACED";
    /// `PROG_ARRAY` of one entry: the instance of `port` that the XDP stubs tail-call.
    pub const PORT_PROGRAMS: &str = "PORT_PROGRAMS";
    /// `PROG_ARRAY` of one entry: the instance of `port_tcx` that the classifier stubs tail-call. It is
    /// separate from `PORT_PROGRAMS` because such a map holds programs of one type.
    pub const PORT_CLASSIFIERS: &str = "PORT_CLASSIFIERS";
    /// Returns the file name of a map's pin: bpffs refuses names with dots.
    #[must_use]
    pub fn pin(map: &str) -> &str {
        map.trim_start_matches(".data.")
    }

    /// The maps of the stubs' object. Each is shared with the main object or holds programs of it.
    pub const OF_STUBS: [&str; 3] = [PORT_PROGRAMS, PORT_CLASSIFIERS, ORDINARY];
    /// `PROG_ARRAY` hub number → the instance of `ring` that writes to that hub's `RING`.
    pub const RINGS: &str = "RINGS";
    /// `RINGBUF` of one hub: frames that a classifier cannot redirect to the hub, each after
    /// [`RING_HEADER`](super::RING_HEADER) bytes.
    pub const RING: &str = "RING";
    /// Global constant of one program instance: the agent's number for the namespace the instance is loaded
    /// for.
    pub const NETNS: &str = "NETNS";
    /// Global constant: the handshake [`CookieKey`](crate::cookie::CookieKey), which user space also has.
    pub const COOKIE_KEY: &str = "COOKIE_KEY";
    /// Global constant: the [`SipKey`](crate::siphash::SipKey) of the requests that the agent has learned.
    pub const REQUEST_KEY: &str = "REQUEST_KEY";
    /// Global constant: 1 if the agent answers requests in the kernel, otherwise 0.
    pub const ANSWERS_REQUESTS: &str = "ANSWERS_REQUESTS";
    /// Global constant of one instance of `socket`: the number of its hub.
    pub const HUB: &str = "HUB";
}

/// A value of `NETNS`: the stub passes the namespace number with each frame. An XDP stub writes it in native
/// byte order to the first bytes of [`NUMBER_BYTES`] bytes before the frame. A classifier stub writes it
/// to [`NUMBER_WORD`].
pub const IN_FRONT: u32 = u32::MAX;
/// Bytes that an XDP stub adds before a frame.
pub const NUMBER_BYTES: usize = 8;

/// The word of a socket buffer's control block (`cb` of `__sk_buff`) in which a classifier stub passes the
/// namespace number.
pub const NUMBER_WORD: usize = 0;
/// The word in which `port_tcx` passes to `ring` whether the port has sent more than [`RING_FRESH`] frames
/// beyond its rate: 1 or 0.
pub const SPENT_WORD: usize = 1;

/// Names of the programs in the eBPF objects.
pub mod program {
    /// XDP on each VM's tap: classifies, identifies, limits and stamps frames and redirects them to the hub.
    pub const PORT: &str = "port";
    /// XDP on a VM's tap in a namespace other than the agent's: prepends the namespace number and tail-calls
    /// `port`.
    pub const PORT_STUB: &str = "port_stub";
    /// XDP after `port`, for a segment with data: answers a request from the published documents, or redirects it to the
    /// hub.
    pub const REQUEST: &str = "request";
    /// A classifier that does the work of `port` where a VM's frames enter the network stack.
    pub const PORT_TCX: &str = "port_tcx";
    /// A classifier on a VM's tap in a namespace other than the agent's: passes the namespace number and
    /// tail-calls `port_tcx`.
    pub const PORT_TCX_STUB: &str = "port_tcx_stub";
    /// A classifier that `port_tcx` tail-calls for a frame of another namespace: writes it to a hub's ring.
    pub const RING: &str = "ring";
    /// A classifier after `request`, on the hub's inner veth: completes an answer that has no room in the frame of its
    /// request, and sends it to the guest's port.
    pub const REQUEST_TCX: &str = "request_tcx";
    /// XDP on the hub's inner veth: redirects frames to the AF_XDP socket, and passes begun answers to `request_tcx`.
    pub const SOCKET: &str = "socket";
    /// XDP on the hub tap: redirects an answer to the guest's port named by its stamp.
    pub const HUB: &str = "hub";
    /// A classifier after `hub`: delivers answers to ports that do not accept redirected frames.
    pub const HUB_TCX: &str = "hub_tcx";
}

/// The key of a port. Interface indexes are unique within one namespace only, so the key contains the
/// namespace.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortKey {
    /// The agent's number for the namespace (`NETNS` of its program instance).
    pub netns: u32,
    /// The interface index within that namespace.
    pub ifindex: u32,
}

/// The limits, the token buckets and the permitted kernel answers of a port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Cost of one frame in nanoseconds; 0 means no limit.
    pub frame_ns: u64,
    /// Depth of the bucket of frames in nanoseconds.
    pub depth_ns: u64,
    /// State: the time at which the bucket of frames will be full again, in nanoseconds on the monotonic
    /// clock.
    pub full_at_ns: u64,
    /// What the kernel answers by itself, if the device can send a frame back: [`ANSWER_LINK`],
    /// [`ANSWER_TCP`]. The upper half is the device's MTU in bytes ([`answers_within`]), or 0 if the agent
    /// did not write it.
    pub answers: u64,
    /// State: frames steered since the port was registered. Concurrent updates on several CPUs may lose
    /// counts.
    pub steered: u64,
    /// Cost of one SYN in nanoseconds; 0 means no limit.
    pub connection_ns: u64,
    /// Depth of the bucket of new connections in nanoseconds.
    pub connection_depth_ns: u64,
    /// State: the time at which the bucket of new connections will be full again, in nanoseconds on the
    /// monotonic clock.
    pub connections_full_at_ns: u64,
    /// 1 for a closed port, else 0. A closed port has no record; every frame to a served address is dropped.
    pub guarded: u64,
}

/// The key of an identity: a MAC on a port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdentityKey {
    /// The port.
    pub port: PortKey,
    /// The source MAC, in wire order.
    pub mac: [u8; 6],
    /// Always zero.
    pub reserved: [u8; 2],
}

/// The slot and the hub of an identity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The slot encoded in the stamp of its frames.
    pub slot: Slot,
    /// The number of its hub, an index into `HUBS`.
    pub hub: u32,
    /// 0, or 1 plus the number of the previous agent's hub. That hub serves the connections the previous
    /// agent has claimed in `DRAINING`.
    pub drain: u32,
    /// Always zero.
    pub reserved: u32,
}

/// State that the next agent inherits, so that it can continue the connections and handshakes of the previous
/// agent.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InheritedState {
    /// The handshake key.
    pub key: CookieKey,
    /// 0 if the agent uses hubs 0 to 31, 1 if it uses hubs 32 to 63.
    pub side: u64,
    /// Always zero.
    pub reserved: u64,
}

/// The guest of a slot: the destination of its answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The guest's MAC, in wire order.
    pub mac: [u8; 6],
    /// 1 if the slot is in use, else 0.
    pub live: u16,
}

/// One entry of `ALL_SENT`, for all connections with the same [`Flow::index`](crate::cookie::Flow::index). At
/// most one of them is posted. For a posted connection, user space has sent everything it has for now, and
/// the kernel handles the guest's acknowledgement and FIN.
///
/// To post, user space writes every field but [`held`](Self::held) and [`opened`](Self::opened). After that
/// the kernel writes [`acknowledged`](Self::acknowledged) and [`closed`](Self::closed). Either side may see a
/// partial update of the other. A partial update is harmless: the kernel acts only on a segment with exactly
/// these numbers, and user space trusts the kernel only if `acknowledged` equals what it has sent. If a frame
/// does not match the entry, the kernel passes it to user space, which can handle every frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllSent {
    /// [`Flow::number`](crate::cookie::Flow::number) of the posted connection; 0 if none is posted.
    pub flow: u64,
    /// SND.NXT: the acknowledgement number that covers everything sent, including our FIN if it is sent.
    pub sent: u32,
    /// RCV.NXT: the sequence number of the guest's next byte.
    pub received: u32,
    /// How the kernel handles the guest's FIN: [`FIN_IS_NEWS`], [`FIN_ENDS`], [`FIN_ENDS_BOTH`] or
    /// [`FIN_ENDS_BOTH_KERNEL`].
    pub finished: u16,
    /// Written by the kernel: [`Flow::mark`](crate::cookie::Flow::mark) of the flow whose SYN it answered
    /// last. User space resets it to 0 when a connection begins.
    pub opened: u16,
    /// Number of connections with this index that user space holds, posted or not. If it is nonzero, the
    /// kernel passes SYNs and the ends of handshakes to user space, because it cannot tell whether they
    /// belong to a new connection or to a held one.
    pub held: u32,
    /// Written by the kernel: the last acknowledgement number it received. It equals [`sent`](Self::sent)
    /// once everything has arrived.
    pub acknowledged: u32,
    /// Written by the kernel: [`sent`](Self::sent), once it has acknowledged the guest's FIN. With
    /// [`FIN_ENDS_BOTH`] it has sent our FIN too.
    pub closed: u32,
}

/// The edition of a slot's documents, and the token bucket of its requests. The bucket counts what the kernel answers;
/// workers have one of their own for the others.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edition {
    /// The number. Its documents are valid if it is odd.
    pub number: u32,
    /// Always zero.
    pub reserved: u32,
    /// Cost of one request in nanoseconds; 0 means no limit.
    pub request_ns: u64,
    /// Depth of the bucket in nanoseconds.
    pub depth_ns: u64,
    /// State: the time at which the bucket will be full again, in nanoseconds on the monotonic clock.
    pub full_at_ns: u64,
}

/// The key of a published document.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DocumentKey {
    /// The slot.
    pub slot: Slot,
    /// The slot's edition that the document belongs to.
    pub edition: u32,
    /// The hash of the request.
    pub request: u64,
}

/// A published document: the answer of one slot to one request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The key of its bytes in `BODIES`, or in `LONG_BODIES` if they are more than [`RESPONSE_BYTES`]. Numbers are not
    /// used again.
    pub body: u64,
    /// The length of the response in bytes.
    pub length: u16,
    /// The length of its content in bytes.
    pub content: u16,
    /// The offset of the value of `Date`.
    pub date: u16,
    /// The folded sum of its 16-bit words in wire order (RFC 1071), with zeros as the value of `Date`.
    pub sum: u16,
    /// The index of its counter.
    pub counter: u16,
    /// Its index if it is a common document, below [`MAX_COMMON_DOCUMENTS`]; 0 for other documents.
    pub common: u16,
    /// Always zero.
    pub reserved: [u16; 2],
}

/// The common documents that are a slot's answers, too. Each word has the bits of [`COMMON_BITS`] documents, and above
/// them the edition for which they were set. So one load tells that a bit is set and belongs to the edition,
/// in whatever order the two sides' stores and loads of other words become visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonUses(pub [u64; COMMON_WORDS]);

impl CommonUses {
    /// No document, in this edition.
    #[must_use]
    pub const fn none(edition: u32) -> Self {
        Self([Self::tag(edition); COMMON_WORDS])
    }

    /// Returns whether the word with the document of this index has it, in this edition.
    #[inline(always)]
    #[must_use]
    pub const fn has(word: u64, edition: u32, index: u16) -> bool {
        let bit = Self::bit(index);
        word & (bit | !Self::BITS) == bit | Self::tag(edition)
    }

    /// The bit of the document of this index in its word.
    #[inline(always)]
    #[must_use]
    pub const fn bit(index: u16) -> u64 {
        1 << (index % COMMON_BITS)
    }

    const BITS: u64 = (1 << COMMON_BITS) - 1;

    #[inline(always)]
    const fn tag(edition: u32) -> u64 {
        (edition as u64) << COMMON_BITS
    }
}

/// A session token that a worker has accepted from a slot's guest. A request with these bytes in this place may get a
/// document that needs a token. The kernel reads it while user space may be writing it. What it then takes for the token
/// is one that was accepted, or bytes of two that were.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SlotToken {
    /// The monotonic time in nanoseconds until which it is valid.
    pub until_ns: u64,
    /// The edition of the slot for which it was accepted: another VM may have the slot in the next one.
    pub edition: u32,
    /// Bytes from the start of the token to the end of the request.
    pub from_end: u32,
    /// The bytes of the token.
    pub words: [u64; TOKEN_BYTES / 8],
}

/// What all answers to requests have in common.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServedDate {
    /// The value of `Date`.
    pub text: [u8; DATE_BYTES],
    /// 1 if answers are recorded, else 0.
    pub records: u8,
    /// The folded sum of the words of `text`, as if it began at an even offset.
    pub sum: u16,
    /// The monotonic time in nanoseconds until which it is valid. Afterwards requests are steered.
    pub until_ns: u64,
}

/// A connection that the kernel has answered, beside its numbers in [`AllSent`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnsweredConnection {
    /// [`Flow::number`](crate::cookie::Flow::number).
    pub flow: u64,
    /// The monotonic time of the last answer in milliseconds, which wraps after 49 days.
    pub at_ms: u32,
    /// The slot's edition of the last answer.
    pub edition: u32,
    /// The most payload in bytes that the guest accepts in one segment.
    pub segment: u16,
    /// The guest's window shift, or [`NO_SCALE`](Self::NO_SCALE).
    pub scale: u16,
    /// The sequence number of its first request.
    pub first: u32,
}

impl AnsweredConnection {
    /// The value of [`scale`](Self::scale) of a guest that does not scale its window.
    pub const NO_SCALE: u16 = u16::MAX;

    /// A connection of which only the numbers are known. Every guest accepts segments of this size.
    pub const LEAST: Self =
        Self { flow: 0, at_ms: 0, edition: 0, segment: 536, scale: Self::NO_SCALE, first: 0 };

    /// The entry of a connection that is answered now.
    #[inline(always)]
    #[must_use]
    pub const fn new(flow: u64, now_ns: u64, edition: u32, options: TcpOptions, first: u32) -> Self {
        let scale = match options.scale {
            Some(scale) => scale as u16,
            None => Self::NO_SCALE,
        };
        Self { flow, at_ms: milliseconds(now_ns), edition, segment: options.segment, scale, first }
    }

    /// The guest's abilities.
    #[inline(always)]
    #[must_use]
    pub const fn options(&self) -> TcpOptions {
        let scale = if self.scale == Self::NO_SCALE { None } else { Some(self.scale as u8) };
        TcpOptions { segment: self.segment, scale }
    }

    /// Returns whether another connection may replace it.
    #[inline(always)]
    #[must_use]
    pub const fn is_idle(&self, now_ns: u64) -> bool {
        milliseconds(now_ns).wrapping_sub(self.at_ms) > ALL_SENT_IDLE_MS
    }
}

#[inline(always)]
const fn milliseconds(ns: u64) -> u32 {
    (ns / 1_000_000) as u32
}

/// A record of an answer to a request, for the audit log and those who follow the guests.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerRecord {
    /// The slot.
    pub slot: Slot,
    /// [`Document::counter`].
    pub counter: u16,
    /// [`Document::content`].
    pub content: u16,
    /// The guest's address as it claims it, in wire order.
    pub guest: [u8; 4],
    /// The guest's port, in wire order.
    pub port: [u8; 2],
    /// Always zero.
    pub reserved: [u8; 2],
}

/// Concatenates byte arrays. The result equals the `repr(C)` layout of these types, which have no implicit
/// padding.
macro_rules! join {
    ($($part:expr),+) => {{
        let mut whole = [0; _];
        let mut rest: &mut [u8] = &mut whole;
        $(
            let (place, left) = rest.split_at_mut($part.len());
            place.copy_from_slice(&$part);
            rest = left;
        )+
        let _ = rest;
        whole
    }};
}

impl PortKey {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        join!(self.netns.to_ne_bytes(), self.ifindex.to_ne_bytes())
    }
}

impl Port {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 72] {
        join!(
            self.frame_ns.to_ne_bytes(),
            self.depth_ns.to_ne_bytes(),
            self.full_at_ns.to_ne_bytes(),
            self.answers.to_ne_bytes(),
            self.steered.to_ne_bytes(),
            self.connection_ns.to_ne_bytes(),
            self.connection_depth_ns.to_ne_bytes(),
            self.connections_full_at_ns.to_ne_bytes(),
            self.guarded.to_ne_bytes()
        )
    }
}

impl IdentityKey {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        join!(self.port.to_bytes(), self.mac, self.reserved)
    }
}

impl Identity {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        join!(
            self.slot.to_ne_bytes(),
            self.hub.to_ne_bytes(),
            self.drain.to_ne_bytes(),
            self.reserved.to_ne_bytes()
        )
    }
}

/// The words of a layout without padding.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_ne_bytes(*chunk);
    }
    words
}

impl Edition {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; 4] {
        let bytes: [u8; 32] = join!(
            self.number.to_ne_bytes(),
            [0; 4],
            self.request_ns.to_ne_bytes(),
            self.depth_ns.to_ne_bytes(),
            self.full_at_ns.to_ne_bytes()
        );
        words(&bytes)
    }
}

impl DocumentKey {
    /// The key of the common document for a request. No slot has this number.
    #[inline(always)]
    #[must_use]
    pub const fn common(request: u64) -> Self {
        Self { slot: u32::MAX, edition: 0, request }
    }

    /// The key of a document that only requests with a valid token get, or the key itself. Numbers of editions do not
    /// reach the bit.
    #[inline(always)]
    #[must_use]
    pub const fn with_token(self, has_token: bool) -> Self {
        Self { edition: self.edition | (has_token as u32) << 31, ..self }
    }

    /// The key in the layout of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; 2] {
        let bytes: [u8; 16] =
            join!(self.slot.to_ne_bytes(), self.edition.to_ne_bytes(), self.request.to_ne_bytes());
        words(&bytes)
    }
}

impl Document {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; 3] {
        let bytes: [u8; 24] = join!(
            self.body.to_ne_bytes(),
            self.length.to_ne_bytes(),
            self.content.to_ne_bytes(),
            self.date.to_ne_bytes(),
            self.sum.to_ne_bytes(),
            self.counter.to_ne_bytes(),
            self.common.to_ne_bytes(),
            [0; 4]
        );
        words(&bytes)
    }
}

impl SlotToken {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; 9] {
        let bytes: [u8; 16] =
            join!(self.until_ns.to_ne_bytes(), self.edition.to_ne_bytes(), self.from_end.to_ne_bytes());
        let ([until, place], [a, b, c, d, e, f, g]) = (words(&bytes), self.words);
        [until, place, a, b, c, d, e, f, g]
    }
}

impl fmt::Debug for SlotToken {
    /// Omits the token, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotToken").field("edition", &self.edition).finish_non_exhaustive()
    }
}

impl ServedDate {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; 5] {
        let bytes: [u8; 40] =
            join!(self.text, [self.records], self.sum.to_ne_bytes(), self.until_ns.to_ne_bytes());
        words(&bytes)
    }
}

impl AnswerRecord {
    /// The record in these bytes of the ring; `None` if they have another length.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h, guest @ .., i, j, _, _]: [u8; 16] = *bytes.as_array()?;
        Some(Self {
            slot: u32::from_ne_bytes([a, b, c, d]),
            counter: u16::from_ne_bytes([e, f]),
            content: u16::from_ne_bytes([g, h]),
            guest,
            port: [i, j],
            reserved: [0; 2],
        })
    }
}

impl Guest {
    /// The value in the layout of the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        join!(self.mac, self.live.to_ne_bytes())
    }
}

const _: () = {
    assert!(size_of::<PortKey>() == 8);
    assert!(size_of::<Port>() == 72);
    assert!(size_of::<IdentityKey>() == 16);
    assert!(size_of::<Identity>() == 16);
    assert!(size_of::<InheritedState>() == 32);
    assert!(size_of::<Guest>() == 8);
    assert!(size_of::<AllSent>() == 32);
    assert!(size_of::<Edition>() == 32);
    assert!(size_of::<DocumentKey>() == 16);
    assert!(size_of::<Document>() == 24);
    assert!(size_of::<ServedDate>() == 40);
    assert!(size_of::<AnsweredConnection>() == 24);
    assert!(size_of::<AnswerRecord>() == 16);
    assert!(ALL_SENT.is_power_of_two());
    assert!(LONG_RESPONSE_BYTES <= SEGMENT_V4 as usize);
    assert!(RING_BYTES.is_power_of_two());
    assert!(RING_RECORDS[2].is_multiple_of(8) && RING_RECORDS[2] >= MAX_STEERED as usize + RING_HEADER);
};

#[cfg(test)]
mod tests {
    use super::{
        ANSWER_TCP, COMMON_BITS, CommonUses, Guest, Identity, IdentityKey, MAX_COMMON_DOCUMENTS, Port,
        PortKey, answers_within, mtu_of,
    };

    #[test]
    fn a_common_document_is_used_in_the_edition_it_was_added_to() {
        let has = |uses: &CommonUses, edition, index: u16| {
            CommonUses::has(uses.0[usize::from(index / COMMON_BITS)], edition, index)
        };
        for index in [0, 1, COMMON_BITS - 1, COMMON_BITS, MAX_COMMON_DOCUMENTS - 1] {
            for edition in [1_u32, 3, u32::MAX] {
                let mut uses = CommonUses::none(edition);
                assert!(!has(&uses, edition, index), "{index} before");
                uses.0[usize::from(index / COMMON_BITS)] |= CommonUses::bit(index);
                let used: Vec<u16> =
                    (0..MAX_COMMON_DOCUMENTS).filter(|other| has(&uses, edition, *other)).collect();
                assert_eq!(used, [index], "edition {edition}");
                for other in [edition.wrapping_add(2), edition.wrapping_sub(2)] {
                    assert!(!has(&uses, other, index), "{index} of edition {edition} in {other}");
                }
            }
        }
    }

    #[test]
    fn the_mtu_and_the_answer_bits_of_a_port_are_independent() {
        for mtu in [0, 1_280, 1_500, u32::MAX] {
            let answers = answers_within(ANSWER_TCP, mtu);
            assert_eq!((answers & ANSWER_TCP, mtu_of(answers)), (ANSWER_TCP, mtu));
            assert_eq!(answers_within(answers, 0), ANSWER_TCP, "a later MTU replaces the former");
        }
        assert_eq!(mtu_of(ANSWER_TCP), 0);
    }

    #[test]
    fn to_bytes_follows_the_map_layout() {
        let port = PortKey { netns: 1, ifindex: 2 };
        assert_eq!(port.to_bytes(), [1u32.to_ne_bytes(), 2u32.to_ne_bytes()].concat()[..]);
        let key = IdentityKey { port, mac: [3, 4, 5, 6, 7, 8], reserved: [0; 2] }.to_bytes();
        assert_eq!(key[..8], port.to_bytes());
        assert_eq!(key[8..], [3, 4, 5, 6, 7, 8, 0, 0]);
        let identity = Identity { slot: 9, hub: 10, drain: 11, reserved: 0 }.to_bytes();
        assert_eq!(identity, [9u32, 10, 11, 0].map(u32::to_ne_bytes).concat()[..]);
        let guest = Guest { mac: [1, 2, 3, 4, 5, 6], live: 1 }.to_bytes();
        assert_eq!(guest[..6], [1, 2, 3, 4, 5, 6]);
        assert_eq!(guest[6..], 1u16.to_ne_bytes());
        let limits = Port {
            frame_ns: 1,
            depth_ns: 2,
            full_at_ns: 3,
            answers: 4,
            steered: 5,
            connection_ns: 6,
            connection_depth_ns: 7,
            connections_full_at_ns: 8,
            guarded: 9,
        };
        assert_eq!(limits.to_bytes(), [1u64, 2, 3, 4, 5, 6, 7, 8, 9].map(u64::to_ne_bytes).concat()[..]);
    }
}
