//! Laws of the steering policy, which hold for every sequence of bytes a guest may send as a frame.
//!
//! The fuzz target and the test that replays its corpus share this file. The laws compare the policy with smoltcp's
//! parsers.
#![cfg_attr(not(test), no_main)]

use metadata_common::answer::{Reply, answer};
use metadata_common::classify::{ServedAddresses, classify};
use metadata_common::cookie::Flow;
use metadata_common::decide::{Bucket, Decision, Tables, decide};
use metadata_common::mac::Mac;
use metadata_common::maps::{
    ANSWER_LINK, ANSWER_TCP, AllSent, FIN_ENDS, FIN_ENDS_BOTH, FIN_IS_NEWS, Identity, Port,
};
use metadata_common::verdict::{Fate, Verdict};
use smoltcp::wire::{
    ArpPacket, ArpRepr, EthernetFrame, EthernetProtocol, Icmpv6Packet, IpProtocol, Ipv4Packet, Ipv6Packet,
    NdiscRepr,
};
use support::kernel::{Book, KEY};
use support::{checksum, raw};

const GUEST: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);
const SERVED_V4: [u8; 4] = [169, 254, 169, 254];
const NEXT_HOP: [u8; 4] = [62, 210, 0, 1];
const SERVED_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xa9, 0xfe, 0xa9, 0xfe];

/// A node with one guest on one port. It serves one address of each family and answers ARP for a next hop, or it
/// serves nothing.
struct Node {
    serving: bool,
}

impl ServedAddresses for Node {
    fn serves_v4(&self, address: [u8; 4]) -> bool {
        self.serving && address == SERVED_V4
    }

    fn serves_v6(&self, address: [u8; 16]) -> bool {
        self.serving && address == SERVED_V6
    }

    fn answers_arp(&self, address: [u8; 4]) -> bool {
        self.serving && (address == NEXT_HOP || address == SERVED_V4)
    }
}

struct Unlimited;

impl Bucket for Unlimited {
    fn load(&self) -> Port {
        Port::with_limit(0, 0)
    }

    fn store(&self, _: u64) {}
    fn store_connections(&self, _: u64) {}
    fn tally(&self, _: u64) {}
}

impl Tables for Node {
    type Bucket = Unlimited;

    fn port(&self) -> Option<Unlimited> {
        Some(Unlimited)
    }

    fn identity(&self, source: Mac) -> Option<Identity> {
        (source == GUEST).then_some(Identity { slot: 1, ..Identity::default() })
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

/// Asserts every law on one frame.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(frame: &[u8]) {
    let node = Node { serving: true };
    let verdict = classify(frame, &node);
    assert_eq!(classify(frame, &node), verdict, "the verdict depends on something else than the frame");

    let unserved = classify(frame, &Node { serving: false });
    // Frames nested more deeply than the parser follows are dropped whatever their destination.
    let beyond = matches!(
        unserved,
        Verdict::DropVlanDepth | Verdict::DropIpv6Routing | Verdict::DropVlan | Verdict::DropSnap
    );
    assert!(unserved.fate() == Fate::Pass || beyond, "{unserved:?} on a node that serves no address");

    if verdict.fate() != Fate::Pass && !beyond {
        let names = |address: &[u8]| frame.windows(address.len()).any(|bytes| bytes == address);
        let named = names(&SERVED_V4) || names(&SERVED_V6) || names(&NEXT_HOP);
        assert!(named, "{verdict:?} though it names no served address");
    }
    if verdict != Verdict::PassTruncated {
        let longer = [frame, &[0xa5; 64]].concat();
        assert_eq!(classify(&longer[..], &node), verdict, "the verdict depends on what follows the headers");
    }
    if asks_for_service(frame) {
        assert_ne!(
            verdict.fate(),
            Fate::Pass,
            "smoltcp finds a served address, but the verdict is {verdict:?}"
        );
    }

    match decide(frame, &node) {
        Decision::Pass(found) | Decision::Drop(found) if found == verdict => {
            assert_ne!(
                verdict.fate(),
                Fate::Steer,
                "{verdict:?} is a pass or a drop, but its fate is to steer"
            );
        }
        Decision::Drop(Verdict::DropUnknownMac) => {
            assert_ne!(frame[6..12], GUEST.0, "the MAC of the registered guest is dropped as unknown");
        }
        Decision::Steer(found, ..) => {
            assert_eq!((found, found.fate()), (verdict, Fate::Steer));
            assert_eq!(frame[6..12], GUEST.0, "another source was steered as the guest");
            assert_answer(frame, found);
            // A mutated frame has wrong checksums and goes to user space; try it with correct ones as well.
            let mut whole = frame.to_vec();
            checksum::complete(&mut whole);
            assert_answer(&whole, found);
        }
        other => panic!("{other:?}, but the policy's verdict is {verdict:?}"),
    }
}

/// Asserts the laws of the kernel's own answers: with the frame's connection posted in each state, and with an
/// empty table.
fn assert_answer(frame: &[u8], steered: Verdict) {
    const SLOT: u32 = 1;
    for finished in [None, Some(FIN_IS_NEWS), Some(FIN_ENDS), Some(FIN_ENDS_BOTH)] {
        let book = Book::default();
        if let (Some(finished), Some((flow, seq, ack))) = (finished, connection(frame, steered, SLOT)) {
            let entry =
                AllSent { flow: flow.number(), sent: ack, received: seq, finished, ..AllSent::default() };
            book.post(flow, entry);
        }
        let mut after = frame.to_vec();
        let Some(reply) = answer(&mut after[..], steered, SLOT, ANSWER_LINK | ANSWER_TCP, &book) else {
            assert_eq!(after, frame, "a frame for user space was changed");
            continue;
        };
        let (verdict, length) = match reply {
            Reply::Absorb(verdict) => {
                assert_eq!(verdict.fate(), Fate::Absorb);
                assert_eq!(after, frame, "a frame that was absorbed was changed");
                continue;
            }
            Reply::Send(verdict, length) => (verdict, length),
        };
        assert_eq!(verdict.fate(), Fate::Answer);
        assert!(length <= frame.len(), "{verdict:?} is longer than what it answers");
        let answer = &after[..length];
        assert_eq!(answer[..6], frame[6..12], "the answer has another destination");
        assert!(
            answer[6..12] == frame[..6] || answer[6..12] == Mac::SERVICE.0,
            "the answer has another source"
        );
        assert_eq!(answer[12..14], frame[12..14]);
        match verdict {
            Verdict::AnswerSyn | Verdict::AnswerFin => {
                // `read` asserts complete checksums.
                let reply = raw::Reply::read(answer);
                assert_eq!((reply.payload.len(), reply.flags.1, reply.flags.3), (0, true, false));
                assert_eq!(reply.flags.0, verdict == Verdict::AnswerSyn);
            }
            Verdict::AnswerArp => {
                let reply = ArpPacket::new_checked(&answer[14..]).expect("an ARP packet");
                assert_eq!(reply.source_hardware_addr(), &Mac::SERVICE.0[..]);
                assert_eq!(reply.source_protocol_addr(), &frame[38..42]);
            }
            Verdict::AnswerNeighbour => {
                let ip = Ipv6Packet::new_checked(&answer[14..]).expect("an IPv6 packet");
                let message = Icmpv6Packet::new_checked(ip.payload()).expect("an ICMPv6 message");
                assert!(message.verify_checksum(&ip.src_addr(), &ip.dst_addr()));
                assert_eq!(ip.src_addr().octets(), SERVED_V6);
            }
            other => panic!("{other:?} is no answer"),
        }
    }
}

/// The connection a frame belongs to, its sequence number and its acknowledgement number. Reads fixed offsets and
/// ignores the frame's lengths.
fn connection(frame: &[u8], steered: Verdict, slot: u32) -> Option<(Flow, u32, u32)> {
    let bytes = |at: usize| frame.get(at..)?.first_chunk().copied();
    let (tcp, flow) = match steered {
        Verdict::SteerIpv4Tcp => (34, Flow::v4(&KEY, slot, bytes(26)?, bytes(30)?, bytes(34)?)),
        Verdict::SteerIpv6Tcp => {
            let addresses: [u8; 32] = frame.get(22..)?.first_chunk().copied()?;
            let (guest, local) = addresses.split_at(16);
            let [guest, local] = [guest, local].map(|half| half.try_into().unwrap_or_default());
            (54, Flow::v6(&KEY, slot, guest, local, bytes(54)?))
        }
        _ => return None,
    };
    Some((flow, u32::from_be_bytes(bytes(tcp + 4)?), u32::from_be_bytes(bytes(tcp + 8)?)))
}

/// True if smoltcp also finds a served address as the destination or target.
fn asks_for_service(frame: &[u8]) -> bool {
    let Ok(frame) = EthernetFrame::new_checked(frame) else {
        return false;
    };
    match frame.ethertype() {
        EthernetProtocol::Arp => asks_arp(frame.payload()),
        EthernetProtocol::Ipv4 => Ipv4Packet::new_checked(frame.payload())
            .is_ok_and(|packet| packet.dst_addr().octets() == SERVED_V4),
        EthernetProtocol::Ipv6 => asks_ipv6(frame.payload()),
        EthernetProtocol::Unknown(_) => false,
    }
}

fn asks_arp(payload: &[u8]) -> bool {
    let packet = ArpPacket::new_checked(payload).and_then(|packet| ArpRepr::parse(&packet));
    match packet {
        Ok(ArpRepr::EthernetIpv4 { target_protocol_addr, .. }) => {
            [SERVED_V4, NEXT_HOP].contains(&target_protocol_addr.octets())
        }
        _ => false,
    }
}

fn asks_ipv6(payload: &[u8]) -> bool {
    let Ok(packet) = Ipv6Packet::new_checked(payload) else {
        return false;
    };
    if packet.dst_addr().octets() == SERVED_V6 {
        return true;
    }
    if packet.next_header() != IpProtocol::Icmpv6 {
        return false;
    }
    let solicitation = Icmpv6Packet::new_checked(packet.payload()).and_then(|m| NdiscRepr::parse(&m));
    match solicitation {
        Ok(NdiscRepr::NeighborSolicit { target_addr, .. }) => target_addr.octets() == SERVED_V6,
        _ => false,
    }
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
