//! Frames whose virtio header asks the host to complete checksums or to segment (virtio 1.2 §5.1.6.2).

use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{ipv4, protocol, tcp};
use support::arena::{Case, Kind};
use support::checksum;
use support::frames::{self, OTHER_V4, SERVED_V4};
use support::station::Header;

use super::make::{datagram, sized, v4};

const NEEDS_CSUM: u8 = 1;
const TCPV4: u8 = 1;
const UDP: u8 = 3;
const TCPV6: u8 = 4;
const ECN: u8 = 0x80;
/// Offset of TCP in an Ethernet frame, and of the checksum in TCP.
const SUM: (u16, u16) = (34, 16);

/// Difference between the frames that reach the hub and the frames steered, under XDP and under the classifier. On the
/// classifier's path the kernel cuts two frames into three pieces each.
pub(crate) const MORE: [i64; 2] = [0, 4];

/// A virtio header in host byte order.
fn header(kind: u8, size: u16, (start, offset): (u16, u16)) -> Header {
    let [h0, h1] = 54u16.to_ne_bytes();
    let ([s0, s1], [c0, c1], [o0, o1]) = (size.to_ne_bytes(), start.to_ne_bytes(), offset.to_ne_bytes());
    [NEEDS_CSUM, kind, h0, h1, s0, s1, c0, c1, o0, o1]
}

/// A segment with `bytes` of payload.
fn segment(to: std::net::Ipv4Addr, bytes: usize) -> Vec<u8> {
    let mut packet = frames::tcp(to, tcp::ACK);
    packet.resize(ipv4::HEADER + tcp::HEADER + bytes, b'x');
    v4(&sized(packet))
}

/// The frame with a partial checksum, which the host must complete.
fn with_partial_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    checksum::partial(&mut frame);
    frame
}

pub(crate) fn cases() -> Vec<Case> {
    let syn = || with_partial_checksum(v4(&frames::tcp(SERVED_V4, tcp::SYN)));
    let ours = |bytes| segment(SERVED_V4, bytes);
    let udp = |bytes: usize| v4(&datagram(SERVED_V4, protocol::UDP, &vec![0; bytes]));
    let case = |name: &str, verdict, frame: Vec<u8>, header: Header| {
        Case::of(name, vec![frame], verdict).sent(|shot| shot.header = Some(header))
    };
    let refused = |name: &str, frame, header| case(name, PassTruncated, frame, header).refused();
    let opens = |name: &str, header| case(name, AnswerSyn, syn(), header).answered(&[(Kind::SynAck, 1)]);
    let reset =
        |name: &str, frame, header| case(name, SteerIpv4Tcp, frame, header).answered(&[(Kind::Reset, 1)]);
    // A segment that the classifier steers is cut into pieces before the hub.
    let cut = |name: &str, kind| {
        let whole = reset(name, with_partial_checksum(ours(3_000)), header(kind, 1_460, SUM));
        let cut = whole.clone().answered(&[(Kind::Reset, 3)]).outcome;
        Case { by_tcx: Some(cut), ..whole }
    };
    let (name, beyond) = ("a checksum at the largest offset", header(0, 0, (u16::MAX, u16::MAX)));
    let refusal = refused(name, syn(), beyond).outcome;
    vec![
        opens("a checksum left to the host", header(0, 0, SUM)).by_tcx(SteerIpv4Tcp),
        // XDP takes a small frame before the kernel parses its virtio header.
        Case { by_tcx: Some(refusal.clone()), ..opens(name, beyond) },
        Case { by_tcx: Some(refusal), ..opens("a checksum in the addresses", header(0, 0, (14, 16))) },
        refused("a checksum behind the frame", syn(), header(0, 0, (1_000, 16))),
        refused("segments of size 0", ours(3_000), header(TCPV4, 0, SUM)),
        refused("segments of an unknown kind", ours(3_000), header(9, 1_460, SUM)),
        refused("ipv4 that claims to be ipv6", ours(3_000), header(TCPV6, 1_440, SUM)),
        case("udp to be cut", DropIpv4Udp, udp(4_000), header(UDP, 1_400, (34, 6))),
        case("a datagram of 9 kB", DropIpv4Udp, udp(9_000), [0; 10]),
        case("a datagram of 65 kB", DropIpv4Udp, udp(65_000), [0; 10]),
        case("20 kB to another address", PassIpv4, segment(OTHER_V4, 20_000), header(TCPV4, 1_460, SUM))
            .leaving(1),
        cut("segments of 3 kB", TCPV4),
        cut("segments of 3 kB with ecn", TCPV4 | ECN),
        reset("a frame of 3 kB", ours(3_000), [0; 10]),
        Case {
            by_tcx: Some(case("", DropOversize, ours(3_000), [0; 10]).outcome),
            ..reset("3 kB in segments of one byte", with_partial_checksum(ours(3_000)), header(TCPV4, 1, SUM))
        },
        case("segments of 60 kB", DropOversize, ours(60_000), header(TCPV4, 1_460, SUM)),
        case("segments of 3.5 kB", DropOversize, ours(3_500), header(TCPV4, 1_460, SUM)),
        case("a frame of 9 kB", DropOversize, ours(9_000), [0; 10]),
    ]
}
