//! The complete decision of each program, over tables that the caller supplies.
//!
//! The kernel programs pass BPF maps, the tests pass plain tables; the order of the checks is the same.
//! `port` checks five things in turn: the frame is for a served address, the port is ours and open, the
//! service accepts this kind of frame, the sender is registered on this port, and the sender's bucket is not
//! empty. Only the port and the source MAC identify the sender.

use crate::bucket;
use crate::classify::{Reader, ServedAddresses, classify};
use crate::mac::Mac;
use crate::maps::{Guest, Identity, Port, Slot};
use crate::stamp;
use crate::verdict::{Fate, Verdict};
use crate::wire::{arp, ethernet, ipv4, ipv6, tcp};

/// The limits and buckets of one port, shared with the other CPUs.
pub trait Bucket {
    /// The current limits and state.
    fn load(&self) -> Port;
    /// Reads only [`Port::guarded`].
    fn is_guarded(&self) -> bool {
        self.load().guarded != 0
    }
    /// Sets [`Port::full_at_ns`].
    fn store(&self, full_at_ns: u64);
    /// Sets [`Port::connections_full_at_ns`].
    fn store_connections(&self, full_at_ns: u64);
    /// Sets [`Port::steered`].
    fn tally(&self, steered: u64);
}

/// What `port` looks up about a frame's port and sender.
pub trait Tables: ServedAddresses {
    /// The limits and buckets of one port.
    type Bucket: Bucket;
    /// The port on which the frame arrived, if it is registered.
    fn port(&self) -> Option<Self::Bucket>;
    /// The identity of a source MAC on that port, if it is registered.
    fn identity(&self, source: Mac) -> Option<Identity>;
    /// Nanoseconds on a monotonic clock.
    fn now_ns(&self) -> u64;
}

/// What `port` does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Leave the frame to the host's network.
    Pass(Verdict),
    /// Discard the frame.
    Drop(Verdict),
    /// Answer the frame in the kernel if [`answer`](crate::answer::answer) can; else stamp it with the slot
    /// and send it to the hub. The last field is [`Port::answers`], the kinds of frame the kernel may answer.
    Steer(Verdict, Identity, u64),
}

/// Decides what to do with a frame from a guest.
#[inline(always)]
pub fn decide(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Decision {
    let verdict = classify(frame, tables);
    if matches!(verdict.fate(), Fate::Pass) {
        return Decision::Pass(verdict);
    }
    let Some(bucket) = tables.port() else {
        return Decision::Pass(Verdict::PassForeignPort);
    };
    if bucket.is_guarded() {
        return if is_for_next_hop(frame, verdict, tables) {
            Decision::Pass(Verdict::PassArp)
        } else {
            Decision::Drop(Verdict::DropGuarded)
        };
    }
    if matches!(verdict.fate(), Fate::Drop) {
        return Decision::Drop(verdict);
    }
    let Some(identity) = sender(frame, tables) else {
        return Decision::Drop(Verdict::DropUnknownMac);
    };
    let port = bucket.load();
    if let Err(refused) = charge(frame, verdict, port, &bucket, tables) {
        return Decision::Drop(refused);
    }
    bucket.tally(port.steered.wrapping_add(1));
    Decision::Steer(verdict, identity, port.answers)
}

/// Charges the frame to both buckets, or to neither: a SYN over one limit is not charged to the other. A
/// retransmitted SYN is charged again, because the kernel does not remember the first one. The limit
/// therefore covers first attempts and retransmissions together. The guest's TCP timer repeats a refused SYN.
#[inline(always)]
fn charge<B: Bucket>(
    frame: &(impl Reader + ?Sized),
    verdict: Verdict,
    port: Port,
    bucket: &B,
    tables: &impl Tables<Bucket = B>,
) -> Result<(), Verdict> {
    let opens = opens(frame, verdict) && port.connection_ns != 0;
    if port.frame_ns == 0 && !opens {
        return Ok(());
    }
    let now_ns = tables.now_ns();
    let full_at_ns = bucket::take(port, now_ns).ok_or(Verdict::DropOverLimit)?;
    if opens {
        let full_at_ns = bucket::take_connection(port, now_ns).ok_or(Verdict::DropOverConnectionLimit)?;
        bucket.store_connections(full_at_ns);
    }
    bucket.store(full_at_ns);
    Ok(())
}

/// True for a steered frame that opens a connection.
#[inline(always)]
fn opens(frame: &(impl Reader + ?Sized), verdict: Verdict) -> bool {
    let at = match verdict {
        Verdict::SteerIpv4Tcp => ethernet::HEADER + ipv4::HEADER,
        Verdict::SteerIpv6Tcp => ethernet::HEADER + ipv6::HEADER,
        _ => return false,
    };
    let flags = frame.read_afresh(at + tcp::FLAGS - 1).map(|[_, flags]| flags);
    flags.is_some_and(|flags| flags & (tcp::SYN | tcp::ACK | tcp::RST) == tcp::SYN)
}

/// True for ARP about a next hop towards a served address. That next hop is another device, and a guest on a
/// closed port must still reach it.
#[inline(always)]
fn is_for_next_hop(frame: &(impl Reader + ?Sized), verdict: Verdict, served: &impl ServedAddresses) -> bool {
    let target = ethernet::HEADER + arp::TARGET_IP;
    matches!(verdict, Verdict::SteerArp)
        && frame.read_afresh(target).is_some_and(|target| !served.serves_v4(target))
}

/// The identity of the sender. A group address has none, even if it is registered.
#[inline(always)]
fn sender(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Option<Identity> {
    let source = Mac(frame.read_afresh(ethernet::SOURCE)?);
    if source.is_group() { None } else { tables.identity(source) }
}

/// What `hub` looks up about the guest that receives a frame.
pub trait Guests {
    /// The guest in this slot, whether or not the slot is in use.
    fn guest(&self, slot: Slot) -> Option<Guest>;
}

/// What `hub` does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Discard the frame.
    Drop(Verdict),
    /// Set the destination to this MAC and send the frame to the slot's port.
    Deliver(Slot, Mac),
}

/// Decides what to do with a frame that user space wrote to the hub.
#[inline(always)]
pub fn deliver(frame: &(impl Reader + ?Sized), guests: &impl Guests) -> Delivery {
    if frame.read::<{ ethernet::HEADER }>(0).is_none() {
        return Delivery::Drop(Verdict::HubDropTruncated);
    }
    let Some(destination) = frame.read(ethernet::DESTINATION) else {
        return Delivery::Drop(Verdict::HubDropTruncated);
    };
    let Some(slot) = stamp::slot_of(Mac(destination)) else {
        return Delivery::Drop(Verdict::HubDropUnstamped);
    };
    match guests.guest(slot) {
        Some(guest) if guest.live == 1 => Delivery::Deliver(slot, Mac(guest.mac)),
        _ => Delivery::Drop(Verdict::HubDropNoGuest),
    }
}

#[cfg(test)]
mod tests {
    use super::{Bucket, Decision, Delivery, Guests, Tables, decide, deliver};
    use crate::classify::ServedAddresses;
    use crate::mac::Mac;
    use crate::maps::{Guest, Identity, Port, Slot};
    use crate::stamp::stamp;
    use crate::verdict::Verdict;
    use crate::wire::{arp, ethernet, ipv4, protocol, tcp};
    use core::cell::Cell;
    use std::vec::Vec;

    const SERVED: [u8; 4] = [169, 254, 169, 254];
    const NEXT_HOP: [u8; 4] = [62, 210, 0, 1];
    const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
    const IDENTITY: Identity = Identity { slot: 7, hub: 2, drain: 0, reserved: 0 };

    /// One port with one guest on it.
    struct Node {
        owned: bool,
        registered: Mac,
        port: Cell<Port>,
        now_ns: u64,
    }

    impl Node {
        fn new() -> Self {
            Self { owned: true, registered: GUEST, port: Cell::new(Port::with_limit(1_000, 2)), now_ns: 0 }
        }
    }

    impl ServedAddresses for Node {
        fn serves_v4(&self, address: [u8; 4]) -> bool {
            address == SERVED
        }

        fn serves_v6(&self, _: [u8; 16]) -> bool {
            false
        }

        fn answers_arp(&self, address: [u8; 4]) -> bool {
            address == NEXT_HOP || address == SERVED
        }
    }

    impl<'a> Tables for &'a Node {
        type Bucket = &'a Cell<Port>;

        fn port(&self) -> Option<&'a Cell<Port>> {
            self.owned.then_some(&self.port)
        }

        fn identity(&self, source: Mac) -> Option<Identity> {
            (source == self.registered).then_some(IDENTITY)
        }

        fn now_ns(&self) -> u64 {
            self.now_ns
        }
    }

    impl ServedAddresses for &Node {
        fn serves_v4(&self, address: [u8; 4]) -> bool {
            Node::serves_v4(self, address)
        }

        fn serves_v6(&self, address: [u8; 16]) -> bool {
            Node::serves_v6(self, address)
        }

        fn answers_arp(&self, address: [u8; 4]) -> bool {
            Node::answers_arp(self, address)
        }
    }

    impl Bucket for &Cell<Port> {
        fn load(&self) -> Port {
            self.get()
        }

        fn store(&self, full_at_ns: u64) {
            self.set(Port { full_at_ns, ..self.get() });
        }

        fn store_connections(&self, full_at_ns: u64) {
            self.set(Port { connections_full_at_ns: full_at_ns, ..self.get() });
        }

        fn tally(&self, steered: u64) {
            self.set(Port { steered, ..self.get() });
        }
    }

    fn frame(source: Mac, protocol: u8) -> [u8; 34] {
        let mut frame = [0; 34];
        frame[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&source.0);
        frame[ethernet::TYPE..ethernet::HEADER].copy_from_slice(&ethernet::IPV4.to_be_bytes());
        frame[ethernet::HEADER] = ipv4::VERSION_IHL;
        frame[ethernet::HEADER + ipv4::PROTOCOL] = protocol;
        frame[ethernet::HEADER + ipv4::DESTINATION..].copy_from_slice(&SERVED);
        frame
    }

    fn decision(node: &Node, frame: &[u8]) -> Decision {
        decide(frame, &node)
    }

    const STEERED: Decision = Decision::Steer(Verdict::SteerIpv4Tcp, IDENTITY, 0);

    #[test]
    fn a_registered_sender_is_steered_with_its_identity() {
        assert_eq!(decision(&Node::new(), &frame(GUEST, protocol::TCP)), STEERED);
    }

    #[test]
    fn a_foreign_port_passes_everything() {
        let node = Node { owned: false, ..Node::new() };
        for protocol in [protocol::TCP, protocol::UDP] {
            assert_eq!(decision(&node, &frame(GUEST, protocol)), Decision::Pass(Verdict::PassForeignPort));
        }
    }

    #[test]
    fn an_unregistered_sender_is_dropped() {
        let other = Mac([0x52, 0x54, 0, 0, 0, 2]);
        let dropped = Decision::Drop(Verdict::DropUnknownMac);
        assert_eq!(decision(&Node::new(), &frame(other, protocol::TCP)), dropped);
    }

    #[test]
    fn a_group_address_has_no_identity_even_if_registered() {
        for group in [Mac::BROADCAST, Mac([0x01, 0, 0x5e, 0, 0, 1])] {
            let node = Node { registered: group, ..Node::new() };
            let dropped = Decision::Drop(Verdict::DropUnknownMac);
            assert_eq!(decision(&node, &frame(group, protocol::TCP)), dropped);
        }
    }

    #[test]
    fn refused_frames_are_not_charged() {
        let node = Node::new();
        for source in [GUEST, Mac([2; 6])] {
            assert!(matches!(decision(&node, &frame(source, protocol::UDP)), Decision::Drop(_)));
        }
        assert!(matches!(decision(&node, &frame(Mac([2; 6]), protocol::TCP)), Decision::Drop(_)));
        assert_eq!(node.port.get().full_at_ns, 0);
    }

    #[test]
    fn a_sender_over_its_limit_is_dropped_until_credit_returns() {
        let mut node = Node::new();
        let tcp = frame(GUEST, protocol::TCP);
        let seen: [Decision; 3] = core::array::from_fn(|_| decision(&node, &tcp));
        assert_eq!(seen, [STEERED, STEERED, Decision::Drop(Verdict::DropOverLimit)]);
        node.now_ns = 1_000_000;
        assert_eq!(decision(&node, &tcp), STEERED);
        assert_eq!(decision(&node, &tcp), Decision::Drop(Verdict::DropOverLimit));
    }

    #[test]
    fn other_traffic_is_not_limited() {
        let node = Node { now_ns: 0, ..Node::new() };
        let mut elsewhere = frame(GUEST, protocol::TCP);
        elsewhere[33] = 1;
        for _ in 0..1_000 {
            assert_eq!(decision(&node, &elsewhere), Decision::Pass(Verdict::PassIpv4));
        }
        assert_eq!(decision(&node, &frame(GUEST, protocol::TCP)), STEERED);
    }

    /// A TCP segment from the guest with these flags.
    fn segment(flags: u8) -> Vec<u8> {
        let mut segment = Vec::from(frame(GUEST, protocol::TCP));
        segment.resize(54, 0);
        segment[34 + tcp::FLAGS] = flags;
        segment
    }

    #[test]
    fn new_connections_have_their_own_limit() {
        let mut node = Node::new();
        node.port.set(Port::with_limit(1_000, 100).and_connections(1_000, 2));
        let refused = Decision::Drop(Verdict::DropOverConnectionLimit);
        let syn = segment(tcp::SYN);
        let seen: [Decision; 4] = core::array::from_fn(|_| decision(&node, &syn));
        assert_eq!(seen, [STEERED, STEERED, refused, refused]);
        for flags in [tcp::ACK, tcp::SYN | tcp::ACK, tcp::FIN | tcp::ACK, tcp::RST, tcp::RST | tcp::SYN, 0] {
            assert_eq!(decision(&node, &segment(flags)), STEERED, "flags {flags:#x} open no connection");
        }
        node.now_ns = 1_000_000;
        assert_eq!(decision(&node, &segment(tcp::SYN | 0xc0)), STEERED, "with the bits of RFC 3168");
        assert_eq!(decision(&node, &syn), refused);
    }

    #[test]
    fn a_syn_over_one_limit_is_not_charged_to_the_other() {
        let syn = segment(tcp::SYN);
        let tables = [
            (Port::with_limit(1_000, 10).and_connections(1_000, 1), Verdict::DropOverConnectionLimit),
            (Port::with_limit(1_000, 1).and_connections(1_000, 10), Verdict::DropOverLimit),
        ];
        for (port, verdict) in tables {
            let node = Node::new();
            node.port.set(port);
            assert_eq!(decision(&node, &syn), STEERED);
            let before = node.port.get();
            for _ in 0..100 {
                assert_eq!(decision(&node, &syn), Decision::Drop(verdict));
            }
            assert_eq!(node.port.get(), before);
        }
    }

    #[test]
    fn a_closed_port_drops_frames_for_the_service_and_passes_others() {
        let node = Node::new();
        node.port.set(Port::closed());
        for (source, protocol) in
            [(GUEST, protocol::TCP), (Mac([2; 6]), protocol::TCP), (GUEST, protocol::UDP)]
        {
            let dropped = Decision::Drop(Verdict::DropGuarded);
            assert_eq!(decision(&node, &frame(source, protocol)), dropped, "even for a registered sender");
        }
        let mut elsewhere = frame(GUEST, protocol::TCP);
        elsewhere[33] = 1;
        assert_eq!(decision(&node, &elsewhere), Decision::Pass(Verdict::PassIpv4));
    }

    #[test]
    fn a_closed_port_still_reaches_a_foreign_next_hop() {
        let ask = |target: [u8; 4]| {
            let mut frame = Vec::from(frame(GUEST, 0));
            frame.resize(ethernet::HEADER + arp::LEN, 0);
            frame[ethernet::TYPE..ethernet::HEADER].copy_from_slice(&ethernet::ARP.to_be_bytes());
            frame[ethernet::HEADER..ethernet::HEADER + 6].copy_from_slice(&arp::ETHERNET_IPV4);
            frame[ethernet::HEADER + arp::TARGET_IP..].copy_from_slice(&target);
            frame
        };
        let node = Node::new();
        assert!(matches!(decision(&node, &ask(NEXT_HOP)), Decision::Steer(Verdict::SteerArp, ..)));
        node.port.set(Port::closed());
        assert_eq!(decision(&node, &ask(NEXT_HOP)), Decision::Pass(Verdict::PassArp));
        assert_eq!(decision(&node, &ask(SERVED)), Decision::Drop(Verdict::DropGuarded));
    }

    struct Slots;

    impl Guests for Slots {
        fn guest(&self, slot: Slot) -> Option<Guest> {
            match slot {
                0..=6 => Some(Guest { mac: [0; 6], live: 0 }),
                7 => Some(Guest { mac: GUEST.0, live: 1 }),
                _ => None,
            }
        }
    }

    #[test]
    fn answers_go_to_the_guest_in_their_stamp() {
        let to = |mac: Mac| {
            let mut frame = [0; 60];
            frame[..6].copy_from_slice(&mac.0);
            frame
        };
        let table = [
            ("a live guest", stamp(7), Delivery::Deliver(7, GUEST)),
            ("an empty slot", stamp(6), Delivery::Drop(Verdict::HubDropNoGuest)),
            ("a slot out of range", stamp(u32::MAX), Delivery::Drop(Verdict::HubDropNoGuest)),
            ("not a stamp", GUEST, Delivery::Drop(Verdict::HubDropUnstamped)),
            ("broadcast", Mac::BROADCAST, Delivery::Drop(Verdict::HubDropUnstamped)),
        ];
        for (name, mac, expected) in table {
            assert_eq!(deliver(&to(mac)[..], &Slots), expected, "{name}");
        }
        assert_eq!(deliver(&to(stamp(7))[..13], &Slots), Delivery::Drop(Verdict::HubDropTruncated));
    }
}
