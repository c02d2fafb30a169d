//! The maps between kernel and user space: names, limits, keys and values.
//!
//! Only integers and byte arrays cross this boundary, every padding byte is a named field, and each
//! layout is asserted while compiling.

use crate::cookie::Key;

/// Index of one identity (a port and a MAC) in every per-guest table, kernel and user side.
pub type Slot = u32;

/// Identities one node can hold: slots run from 0 to `MAX_SLOTS - 1`.
pub const MAX_SLOTS: u32 = 16_384;

/// Ports (taps) one node can own.
pub const MAX_PORTS: u32 = 16_384;

/// Hubs one node can run, one worker each.
pub const MAX_HUBS: u32 = 64;

/// Receive queues of one hub at most: each has a ring of the veth and an AF_XDP socket of its own.
pub const HUB_QUEUES: u32 = 8;

/// Where the socket of a hub's queue stands in `SOCKETS`; `None` for a queue no hub has.
#[inline(always)]
#[must_use]
pub const fn socket_index(hub: u32, queue: u32) -> Option<u32> {
    if queue < HUB_QUEUES && hub < MAX_HUBS { Some(hub * HUB_QUEUES + queue) } else { None }
}

/// Metadata addresses of one family a node can serve, next hops on the way to them included.
pub const MAX_SERVED: u32 = 32;

/// Connections the kernel can acknowledge for user space at a time: a power of two. Two that fall on one entry
/// take turns, and the other's segments go to user space as if there were no table.
pub const ALL_SENT: u32 = 65_536;

/// Connections of an agent that is leaving which can be told from those of the one that follows: as many as
/// [`ALL_SENT`]. One too many goes to the follower, which resets it.
pub const MAX_DRAINING: u32 = 65_536;

/// The value of a flow in `DRAINING`.
pub const CLAIMED: u32 = 1;

/// Octets of frames under trace that wait for their reader; one event takes [`Event`](crate::trace::Event) and 8.
pub const EVENT_BYTES: u32 = 256 * 1024;

/// Octets of the longest frame a hub takes: more than any guest's MTU, and what a veth runs XDP natively on.
pub const MAX_STEERED: u32 = 3_400 + crate::wire::ethernet::HEADER as u32;

/// Octets of the ring that takes steered frames from namespaces a classifier cannot redirect out of, one for each hub: room
/// for 1,800 first segments or 75 of the longest frames.
pub const RING_BYTES: u32 = 256 * 1024;

/// Octets in front of a frame in a ring: its length, in the machine's order.
pub const RING_HEADER: usize = 8;

/// What records of a ring hold, the length in front included: a handshake's segments, most requests, and the longest frame
/// that is steered. The kernel reserves constant sizes only.
pub const RING_RECORDS: [usize; 3] = [136, 648, MAX_STEERED as usize + 2 + RING_HEADER];

/// Frames that a port may have sent beyond its rate and still use the second half of a ring: half of each ring is for
/// guests that have asked for little.
pub const RING_FRESH: u64 = 64;

/// Shortest segments the kernel may be asked to cut a steered frame into: every host takes this much (RFC 9293
/// §3.7.1), so no client offers less.
pub const MIN_SEGMENT: u32 = 536;

/// The value of an address that is served.
pub const SERVED: u32 = 1;

/// The value of an IPv4 address for which ARP is answered and nothing else: a next hop guests have been told
/// to reach a served address by, which is somebody else's.
pub const ARP_ONLY: u32 = 2;

/// [`AllSent::finished`]: user space must hear of the guest's FIN.
pub const FIN_IS_NEWS: u16 = 0;

/// [`AllSent::finished`]: our FIN is among what was sent, so the guest's ends the connection.
pub const FIN_ENDS: u16 = 1;

/// [`AllSent::finished`]: we wait for the guest alone, and should it finish there is nothing to do but to finish
/// too. Most clients close first, after an answer on a connection that might have gone on.
pub const FIN_ENDS_BOTH: u16 = 2;

/// A bit of [`Port::answers`]: ARP and neighbour solicitations.
pub const ANSWER_LINK: u64 = 1;

/// A bit of [`Port::answers`]: what of TCP needs no memory.
pub const ANSWER_TCP: u64 = 2;

/// Where the MTU stands in [`Port::answers`]; the bits below are for what is answered.
const MTU_SHIFT: u32 = 32;

/// [`Port::answers`] for a device whose IP packets have `mtu` octets at most; 0 for one that is not known.
#[inline(always)]
#[must_use]
pub const fn answers_within(answers: u64, mtu: u32) -> u64 {
    answers & (u32::MAX as u64) | (mtu as u64) << MTU_SHIFT
}

/// The MTU in [`Port::answers`]; 0 if it is not known.
#[inline(always)]
#[must_use]
pub const fn mtu_of(answers: u64) -> u32 {
    (answers >> MTU_SHIFT) as u32
}

/// Names of maps and globals, as they stand in the object.
pub mod name {
    /// `HASH` [`PortKey`](super::PortKey) → [`Port`](super::Port): the ports we own.
    pub const PORTS: &str = "PORTS";
    /// `HASH` [`IdentityKey`](super::IdentityKey) → [`Identity`](super::Identity): who may speak on a port.
    pub const IDENTITIES: &str = "IDENTITIES";
    /// `ARRAY` slot → [`Guest`](super::Guest): where an answer goes.
    pub const GUESTS: &str = "GUESTS";
    /// `DEVMAP_HASH` slot → ifindex of the guest's port, inserted from inside the port's namespace.
    pub const GUEST_DEVICES: &str = "GUEST_DEVICES";
    /// `ARRAY` slot → ifindex of the guest's port if the device takes no redirected frames, so that a classifier has
    /// to hand answers to it; else 0.
    pub const BARE_DEVICES: &str = "BARE_DEVICES";
    /// `DEVMAP` hub number → ifindex of the hub's outer veth.
    pub const HUBS: &str = "HUBS";
    /// `ARRAY` hub number → ifindex of the hub's outer veth, 0 for none: `HUBS` for classifiers, since the kernel
    /// keeps device maps to programs of one type.
    pub const HUB_DEVICES: &str = "HUB_DEVICES";
    /// `XSKMAP` [`socket_index`](super::socket_index) → AF_XDP socket on a queue of the hub's inner veth.
    pub const SOCKETS: &str = "SOCKETS";
    /// `HASH` IPv4 address (4 octets, wire order) → [`SERVED`](super::SERVED) or
    /// [`ARP_ONLY`](super::ARP_ONLY).
    pub const SERVED_V4: &str = "SERVED_V4";
    /// `HASH` IPv6 address (16 octets, wire order) → [`SERVED`](super::SERVED).
    pub const SERVED_V6: &str = "SERVED_V6";
    /// `ARRAY` octet → [`SERVED`](super::SERVED) if an address in `SERVED_V4` or `SERVED_V6` ends with it, else 0: so
    /// that the guests' other traffic is not looked up in hashes.
    pub const LAST_OCTETS: &str = "LAST_OCTETS";
    /// `ARRAY`, mapped into user space: [`Flow::index`](crate::cookie::Flow::index) →
    /// [`AllSent`](super::AllSent).
    pub const ALL_SENT: &str = "ALL_SENT";
    /// `HASH` [`Flow::number`](crate::cookie::Flow::number) → [`CLAIMED`](super::CLAIMED): the connections that
    /// still belong to an agent that is leaving ([`Identity::drain`](super::Identity::drain)).
    pub const DRAINING: &str = "DRAINING";
    /// `ARRAY` of one [`Agent`](super::Agent), which no program reads: what the next agent goes on with.
    pub const AGENT: &str = "AGENT";
    /// `PERCPU_ARRAY` verdict → count of frames.
    pub const COUNTERS: &str = "COUNTERS";
    /// `ARRAY` of one [`Trace`](crate::trace::Trace): whose frames are reported.
    pub const TRACE: &str = "TRACE";
    /// `ARRAY` of one u32: not 0 while an agent traces frames that pass too, and classifiers have to look at all of
    /// them. A stub stays when another agent follows, so agents share it, as they do not share `TRACE`.
    pub const TRACE_PASSING: &str = "TRACE_PASSING";
    /// `RINGBUF` of [`Event`](crate::trace::Event): the frames of the guest under trace.
    pub const EVENTS: &str = "EVENTS";
    /// `PERCPU_ARRAY` of one [`Scratch`](crate::trace::Scratch): the event being written.
    pub const TRACED: &str = "TRACED";
    /// `PROG_ARRAY` of one entry: the instance of `port` that stubs go on in.
    pub const PORT_PROGRAMS: &str = "PORT_PROGRAMS";
    /// `PROG_ARRAY` of one entry: the instance of `port_tcx` that classifiers' stubs go on in. A map holds programs of one
    /// type only, so it is not the same as for stubs of XDP.
    pub const PORT_CLASSIFIERS: &str = "PORT_CLASSIFIERS";
    /// All maps of the stubs' object; each is one of the other object's too, or leads to it.
    pub const OF_STUBS: [&str; 5] = [PORT_PROGRAMS, PORT_CLASSIFIERS, LAST_OCTETS, TRACE_PASSING, COUNTERS];
    /// `PROG_ARRAY` hub number → the instance of `ring` that puts frames into that hub's `RING`.
    pub const RINGS: &str = "RINGS";
    /// `RINGBUF` of one hub: frames that a classifier cannot redirect to it, each behind
    /// [`RING_HEADER`](super::RING_HEADER) octets.
    pub const RING: &str = "RING";
    /// Global constant of one program instance: the number the agent gave the namespace it is loaded for.
    pub const NETNS: &str = "NETNS";
    /// Global constant: the [`Key`](crate::cookie::Key) of handshakes, the same as user space has.
    pub const COOKIE_KEY: &str = "COOKIE_KEY";
    /// Global constant of one instance of `socket`: the number of the hub it sits on.
    pub const HUB: &str = "HUB";
}

/// In the place of a namespace's number: a stub says it with each frame. One of XDP puts it in front of the frame, as
/// [`NUMBER_OCTETS`] octets that begin with it in the machine's order; a classifier's into [`NUMBER_WORD`].
pub const IN_FRONT: u32 = u32::MAX;
/// Octets in front of a frame that comes from a stub.
pub const NUMBER_OCTETS: usize = 8;

/// The word of a socket buffer's control block (`cb` of `__sk_buff`) in which a classifier's stub says the namespace's
/// number.
pub const NUMBER_WORD: usize = 0;
/// The word in which `port_tcx` says to `ring` that the port has sent more than [`RING_FRESH`] frames beyond its rate: 1,
/// else 0.
pub const SPENT_WORD: usize = 1;

/// Names of the programs in the objects.
pub mod program {
    /// On each VM's tap: classify, identify, limit, stamp, redirect to the hub.
    pub const PORT: &str = "port";
    /// On a VM's tap in another namespace than the agent's: puts the namespace's number in front of the frame and goes on in
    /// `port`.
    pub const PORT_STUB: &str = "port_stub";
    /// A classifier where a VM's frames enter the network stack: does what `port` does.
    pub const PORT_TCX: &str = "port_tcx";
    /// A classifier on a VM's tap in another namespace than the agent's: says the namespace's number and goes on in
    /// `port_tcx`.
    pub const PORT_TCX_STUB: &str = "port_tcx_stub";
    /// A classifier behind `port_tcx` of other namespaces: into the ring of a hub.
    pub const RING: &str = "ring";
    /// On the hub's inner veth: into the AF_XDP socket.
    pub const SOCKET: &str = "socket";
    /// On the hub tap: from the stamp to the guest's port.
    pub const HUB: &str = "hub";
    /// A classifier behind `hub`: hands answers to ports that take no redirected frames.
    pub const HUB_TCX: &str = "hub_tcx";
}

/// A port: interface indexes collide across namespaces, so the namespace is part of the key.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortKey {
    /// The number the agent gave the namespace (its program instance's `NETNS`).
    pub netns: u32,
    /// Interface index within that namespace.
    pub ifindex: u32,
}

/// The limits and the token buckets of a port, and what is answered on it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Nanoseconds one frame costs; 0 means no limit.
    pub frame_ns: u64,
    /// Nanoseconds of credit a full bucket holds.
    pub depth_ns: u64,
    /// State, kernel clock: when the bucket will be full again.
    pub full_at_ns: u64,
    /// What the kernel answers itself, if the device can send a frame back: [`ANSWER_LINK`], [`ANSWER_TCP`]. The
    /// upper half is the device's MTU ([`answers_within`]), an entry of an agent that did not write it has 0 there.
    pub answers: u64,
    /// State: frames steered since the port was registered. CPUs that count at once may count one frame for two.
    pub steered: u64,
    /// Nanoseconds one new connection costs, each SYN being one; 0 means no limit.
    pub connection_ns: u64,
    /// Nanoseconds of credit a full bucket of connections holds.
    pub connection_depth_ns: u64,
    /// State, kernel clock: when the bucket of connections will be full again.
    pub connections_full_at_ns: u64,
    /// 1 for a port that is closed: it has no record, and whatever is for a served address is dropped. Else 0.
    pub guarded: u64,
}

/// A MAC on a port.
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

/// Who an identity is and which hub serves it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The slot stamped on its frames.
    pub slot: Slot,
    /// Index into `HUBS`.
    pub hub: u32,
    /// 0, or one more than the index of the hub of an agent that is leaving and that still serves the connections
    /// it has claimed in `DRAINING`.
    pub drain: u32,
    /// Always zero.
    pub reserved: u32,
}

/// What an agent leaves for the next one, so that the connections and handshakes of one are the other's.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agent {
    /// The key of handshakes.
    pub key: Key,
    /// 0 for hubs 0 to 31, 1 for hubs 32 to 63.
    pub side: u64,
    /// Always zero.
    pub reserved: u64,
}

/// The other way round: the MAC an answer to a slot is sent to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The guest's MAC, in wire order.
    pub mac: [u8; 6],
    /// 1 when the slot is in use, else 0.
    pub live: u16,
}

/// A place for the connections whose [`Flow::index`](crate::cookie::Flow::index) is the same. At most one of them is
/// posted: user space has sent all it has for now, and the kernel takes the guest's acknowledgement, and its FIN, for
/// it.
///
/// User space writes everything but [`held`](Self::held) and [`opened`](Self::opened) when it posts; after that the
/// kernel writes [`acknowledged`](Self::acknowledged) and [`closed`](Self::closed). Either may see half of what the
/// other writes. That is harmless: the kernel acts only on a segment whose numbers are exactly these, and user space
/// believes the kernel only where `acknowledged` is what it has sent. A frame that misses the table goes to user
/// space, which can deal with every frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllSent {
    /// [`Flow::number`](crate::cookie::Flow::number); 0 for nobody.
    pub flow: u64,
    /// SND.NXT: the acknowledgement number that covers all that was sent, our FIN included if there is one.
    pub sent: u32,
    /// RCV.NXT: the sequence number of what the guest says next.
    pub received: u32,
    /// What the guest's FIN is to us: [`FIN_IS_NEWS`], [`FIN_ENDS`] or [`FIN_ENDS_BOTH`].
    pub finished: u16,
    /// The kernel's: [`Flow::mark`](crate::cookie::Flow::mark) of the flow whose SYN it answered last; user space sets
    /// it to 0 when a connection begins.
    pub opened: u16,
    /// Connections with this place that user space holds, posted or not. While there is one, the kernel leaves SYNs
    /// and the ends of handshakes to user space: it cannot tell those of a new connection from those of one it does
    /// not see.
    pub held: u32,
    /// The kernel's: the acknowledgement number it has heard, which is [`sent`](Self::sent) once all arrived.
    pub acknowledged: u32,
    /// The kernel's: [`sent`](Self::sent) once it has acknowledged the guest's FIN, and sent ours with
    /// [`FIN_ENDS_BOTH`].
    pub closed: u32,
}

/// Lays integers and octets out one after the other, as `repr(C)` does with these types.
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
    /// As the kernel reads it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        join!(self.netns.to_ne_bytes(), self.ifindex.to_ne_bytes())
    }
}

impl Port {
    /// As the kernel reads it.
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
    /// As the kernel reads it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        join!(self.port.to_bytes(), self.mac, self.reserved)
    }
}

impl Identity {
    /// As the kernel reads it.
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

impl Guest {
    /// As the kernel reads it.
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
    assert!(size_of::<Agent>() == 32);
    assert!(size_of::<Guest>() == 8);
    assert!(size_of::<AllSent>() == 32);
    assert!(ALL_SENT.is_power_of_two());
    assert!(RING_BYTES.is_power_of_two());
    assert!(RING_RECORDS[2].is_multiple_of(8) && RING_RECORDS[2] >= MAX_STEERED as usize + RING_HEADER);
};

#[cfg(test)]
mod tests {
    use super::{ANSWER_TCP, Guest, Identity, IdentityKey, Port, PortKey, answers_within, mtu_of};

    #[test]
    fn a_port_keeps_its_mtu_beside_what_is_answered_on_it() {
        for mtu in [0, 1_280, 1_500, u32::MAX] {
            let answers = answers_within(ANSWER_TCP, mtu);
            assert_eq!((answers & ANSWER_TCP, mtu_of(answers)), (ANSWER_TCP, mtu));
            assert_eq!(answers_within(answers, 0), ANSWER_TCP, "the former MTU goes");
        }
        assert_eq!(mtu_of(ANSWER_TCP), 0);
    }

    #[test]
    fn bytes_stand_where_the_layout_puts_them() {
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
