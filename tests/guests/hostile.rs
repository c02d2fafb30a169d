//! Each frame of a hostile guest gets the expected verdict and only the expected answers. No frame that a node would
//! deliver to a served address reaches the bridge, and the other guests stay served.

mod leaks;
mod node;
mod packets;

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::stamp::stamp;
use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{arp, ethernet, ipv4, protocol, tcp};
use node::{altered, datagram, frame, ping, sized, syn, syn6, v4};
use support::arena::{self, Arena, Case, Kind, OTHERS, Scene};
use support::frames::{self, OTHER_V4, SERVED_V4, SERVED_V6, SOLICITED, with};
use support::record::Identity;
use support::station::Header;
use support::tap::Shape;
use support::{checksum, exposition, privileged, seed};

/// The two ways to steer ports.
const MODES: [&str; 2] = ["steer: xdp\n", "steer: tcx\n"];

/// Runs every case on taps of these shapes, in both modes, then checks that every frame is accounted for. `more` is
/// the number of frames per mode that reach the agent beyond those steered ([`exposition::balance`]).
fn run_cases(label: &str, shapes: &[Shape], cases: &[Case], more: [i64; 2]) {
    let seed = seed();
    fastrand::seed(seed);
    for shape in shapes {
        for (mode, more) in MODES.into_iter().zip(more) {
            let scene = Scene::new(*shape).expect("a node");
            let mut arena = Arena::open(&scene, mode).expect("an arena");
            let label = format!("{label}, {}, {shape:?}", mode.trim());
            arena::run_all(&mut arena, &label, seed, cases);
            arena.others_are_served().unwrap_or_else(|error| panic!("{label}: {error:#}"));
            exposition::balance(&arena.agent, more).unwrap_or_else(|error| panic!("{label}: {error:#}"));
        }
    }
}

#[privileged::test]
fn no_ipv4_packet_for_a_served_address_leaves_the_tap() {
    run_cases("ipv4", &[Shape::default(), Shape::virtio()], &packets::ipv4_cases(), [0; 2]);
}

#[privileged::test]
fn no_ipv6_packet_for_a_served_address_leaves_the_tap() {
    run_cases("ipv6", &[Shape::default(), Shape::virtio()], &packets::ipv6_cases(), [0; 2]);
}

#[privileged::test]
fn no_ethernet_encapsulation_gets_a_packet_for_a_served_address_off_the_tap() {
    run_cases("ethernet", &[Shape::default(), Shape::virtio()], &packets::ethernet_cases(), [0; 2]);
}

#[privileged::test]
fn no_detour_reaches_a_served_address_and_no_claim_to_one_leaves_the_tap() {
    run_cases("leaks", &[Shape::default(), Shape::virtio()], &leaks::cases(), [0; 2]);
}

#[privileged::test]
fn no_odd_segment_gets_more_than_a_reset() {
    run_cases("segments", &[Shape::default()], &segment_cases(), [0; 2]);
}

#[privileged::test]
fn no_guest_offload_gets_a_frame_past_the_policy() {
    run_cases("offloads", &[Shape::virtio()], &offload_cases(), MORE);
}

#[privileged::test]
fn only_the_ports_own_mac_is_served() {
    let queues = Shape { queues: 3, vnet_hdr: true };
    run_cases("identity", &[Shape::default()], &identity_cases(), [0; 2]);
    run_cases("identity", &[queues], &on_queues(queues.queues), [0; 2]);
}

// TCP segments that no client sends.

/// Offsets of the TCP flags and of the data offset in an IPv4 packet.
const FLAGS: usize = ipv4::HEADER + 13;
const OFFSET: usize = ipv4::HEADER + 12;
/// Offset of the TCP checksum in a frame.
const SUM: usize = ethernet::HEADER + ipv4::HEADER + 16;

fn segment_cases() -> Vec<Case> {
    let with_flags = |flags: u8| vec![v4(&with(frames::tcp(SERVED_V4, tcp::ACK), FLAGS, &[flags]))];
    let offset = |words: u8| vec![v4(&with(frames::tcp(SERVED_V4, tcp::SYN), OFFSET, &[words << 4]))];
    let optioned = |options: &[u8]| {
        let mut packet = frames::tcp(SERVED_V4, tcp::SYN);
        packet.truncate(ipv4::HEADER + tcp::HEADER);
        packet.extend(options);
        packet[OFFSET] = ((tcp::HEADER + options.len()) as u8 / 4) << 4;
        vec![v4(&sized(packet))]
    };
    let wrong = |flags| vec![with(v4(&frames::tcp(SERVED_V4, flags)), SUM, &[0xde, 0xad])];
    let mut partial = v4(&frames::tcp(SERVED_V4, tcp::SYN));
    checksum::partial(&mut partial);
    let one = |name: &str, frames| Case::of(name, frames, SteerIpv4Tcp);
    let reset = |name: &str, frames| one(name, frames).answered(&[(Kind::Reset, 1)]);
    let opened = |name: &str, frames| {
        Case::of(name, frames, AnswerSyn).by_tcx(SteerIpv4Tcp).answered(&[(Kind::SynAck, 1)])
    };
    let steered_syn = |name: &str, frames| one(name, frames).answered(&[(Kind::SynAck, 1)]);
    vec![
        reset("no flag at all", with_flags(0)),
        reset("an acknowledgement of nothing", with_flags(tcp::ACK)),
        reset("a fin for no connection", with_flags(tcp::FIN | tcp::ACK)),
        reset("a syn that acknowledges", with_flags(tcp::SYN | tcp::ACK)),
        one("a reset for no connection", with_flags(tcp::RST)),
        one("a reset that acknowledges nothing", with_flags(tcp::RST | tcp::ACK)),
        one("syn and reset", with_flags(tcp::SYN | tcp::RST)),
        one("every flag at once", with_flags(0xff)),
        reset("syn and fin", with_flags(tcp::SYN | tcp::FIN)),
        one("a header of 4 words", offset(4)),
        one("a header beyond the segment", offset(15)),
        opened("an mss of 0", optioned(&[2, 4, 0, 0])),
        opened("an mss of 1", optioned(&[2, 4, 0, 1])),
        opened("a window shifted by 255", optioned(&[2, 4, 5, 180, 3, 3, 255, 0])),
        steered_syn("an option of length 0", optioned(&[2, 0, 0, 0])),
        steered_syn("an option beyond the header", optioned(&[2, 40, 0, 0])),
        one("a syn with a wrong checksum", wrong(tcp::SYN)),
        one("an acknowledgement with a wrong checksum", wrong(tcp::ACK)),
        one("a fin with a wrong checksum", wrong(tcp::FIN | tcp::ACK)),
        opened("a syn with a partial checksum", vec![partial]),
        one("a syn from port 0", vec![v4(&with(frames::tcp(SERVED_V4, tcp::SYN), ipv4::HEADER, &[0, 0]))]),
    ]
}

// Frames whose virtio header asks the host to complete checksums or to segment (virtio 1.2 §5.1.6.2).

const NEEDS_CSUM: u8 = 1;
const TCPV4: u8 = 1;
const UDP: u8 = 3;
const TCPV6: u8 = 4;
const ECN: u8 = 0x80;
/// Offset of TCP in an Ethernet frame, and of the checksum in TCP.
const TCP_SUM: (u16, u16) = (34, 16);

/// Difference between the frames that reach the hub and the frames steered, under XDP and under the classifier. On the
/// classifier's path the kernel cuts two frames into three pieces each.
const MORE: [i64; 2] = [0, 4];

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

fn offload_cases() -> Vec<Case> {
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
        let whole = reset(name, with_partial_checksum(ours(3_000)), header(kind, 1_460, TCP_SUM));
        let cut = whole.clone().answered(&[(Kind::Reset, 3)]).outcome;
        Case { by_tcx: Some(cut), ..whole }
    };
    let (name, beyond) = ("a checksum at the largest offset", header(0, 0, (u16::MAX, u16::MAX)));
    let refusal = refused(name, syn(), beyond).outcome;
    vec![
        opens("a checksum left to the host", header(0, 0, TCP_SUM)).by_tcx(SteerIpv4Tcp),
        // XDP takes a small frame before the kernel parses its virtio header.
        Case { by_tcx: Some(refusal.clone()), ..opens(name, beyond) },
        Case { by_tcx: Some(refusal), ..opens("a checksum in the addresses", header(0, 0, (14, 16))) },
        refused("a checksum behind the frame", syn(), header(0, 0, (1_000, 16))),
        refused("segments of size 0", ours(3_000), header(TCPV4, 0, TCP_SUM)),
        refused("segments of an unknown kind", ours(3_000), header(9, 1_460, TCP_SUM)),
        refused("ipv4 that claims to be ipv6", ours(3_000), header(TCPV6, 1_440, TCP_SUM)),
        case("udp to be cut", DropIpv4Udp, udp(4_000), header(UDP, 1_400, (34, 6))),
        case("a datagram of 9 kB", DropIpv4Udp, udp(9_000), [0; 10]),
        case("a datagram of 65 kB", DropIpv4Udp, udp(65_000), [0; 10]),
        case("20 kB to another address", PassIpv4, segment(OTHER_V4, 20_000), header(TCPV4, 1_460, TCP_SUM))
            .leaving(1),
        cut("segments of 3 kB", TCPV4),
        cut("segments of 3 kB with ecn", TCPV4 | ECN),
        reset("a frame of 3 kB", ours(3_000), [0; 10]),
        Case {
            by_tcx: Some(case("", DropOversize, ours(3_000), [0; 10]).outcome),
            ..reset(
                "3 kB in segments of one byte",
                with_partial_checksum(ours(3_000)),
                header(TCPV4, 1, TCP_SUM),
            )
        },
        case("segments of 60 kB", DropOversize, ours(60_000), header(TCPV4, 1_460, TCP_SUM)),
        case("segments of 3.5 kB", DropOversize, ours(3_500), header(TCPV4, 1_460, TCP_SUM)),
        case("a frame of 9 kB", DropOversize, ours(9_000), [0; 10]),
    ]
}

// Frames that claim another guest's identity.

/// A frame of each served kind, with this source MAC.
fn frames_from(source: Mac) -> Vec<Vec<u8>> {
    let frames = [
        v4(&syn(SERVED_V4, 80)),
        v4(&ping(SERVED_V4)),
        frame(&[], ethernet::IPV6, &syn6(SERVED_V6, 80)),
        frame(&[], ethernet::IPV6, &frames::introduced(SOLICITED, SERVED_V6)),
        frame(&[], ethernet::ARP, &frames::arp_request(SERVED_V4)),
    ];
    frames.into_iter().map(|frame| with(frame, ethernet::SOURCE, &source.0)).collect()
}

fn identity_cases() -> Vec<Case> {
    let other = Identity::of(OTHERS[0]);
    let mut one_bit_off = Identity::of(0).mac;
    one_bit_off.0[5] ^= 0x80;
    let mut group = Identity::of(0).mac;
    group.0[0] |= 1;
    let strangers = [
        ("another guest's mac", other.mac),
        ("its own mac but for one bit", one_bit_off),
        ("its own mac as a group", group),
        ("an all-zero mac", Mac([0; 6])),
        ("the broadcast mac", Mac::BROADCAST),
        ("the service's mac", Mac::SERVICE),
        ("the stamp of its own slot", stamp(0)),
        ("the stamp of another's slot", stamp(1)),
        ("the stamp of the last slot", stamp(Slot::MAX)),
    ];
    let mut cases: Vec<Case> = strangers
        .into_iter()
        .map(|(name, mac)| Case::of(format!("requests from {name}"), frames_from(mac), DropUnknownMac))
        .collect();
    // The source address in the packet does not matter: the answer goes to the port it came from.
    let packet = altered(ping(SERVED_V4), ipv4::SOURCE, &other.address.octets());
    cases.push(
        Case::of("another guest's ip address", vec![v4(&packet)], SteerIpv4Icmp).answered(&[(Kind::Echo, 1)]),
    );
    let lies = with(frames::arp_request(SERVED_V4), arp::SENDER_MAC, &other.mac.0);
    cases.push(
        Case::of("another guest's mac within arp", vec![frame(&[], ethernet::ARP, &lies)], AnswerArp)
            .by_tcx(SteerArp)
            .answered(&[(Kind::Arp, 1)]),
    );
    cases.push(Case::of(
        "another guest's mac and a protocol that is not served",
        vec![with(v4(&datagram(SERVED_V4, protocol::UDP, &[0; 8])), ethernet::SOURCE, &other.mac.0)],
        DropIpv4Udp,
    ));
    cases
}

/// The policy is the same on every queue of a tap.
fn on_queues(queues: usize) -> Vec<Case> {
    let other = Identity::of(OTHERS[0]).mac;
    let mut cases = Vec::new();
    for queue in 0..queues {
        let stolen =
            Case::of(format!("another guest's mac on queue {queue}"), frames_from(other), DropUnknownMac);
        let udp = vec![v4(&datagram(SERVED_V4, protocol::UDP, &[0; 8]))];
        let pings = vec![v4(&ping(SERVED_V4)); 3];
        let strange = Case::of(format!("udp on queue {queue}"), udp, DropIpv4Udp);
        let asked =
            Case::of(format!("pings on queue {queue}"), pings, SteerIpv4Icmp).answered(&[(Kind::Echo, 3)]);
        cases.extend([stolen, strange, asked].map(|case| case.sent(|shot| shot.queue = queue)));
    }
    cases
}
