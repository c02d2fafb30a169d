use super::{Reader, ServedAddresses, classify, is_ordinary};
use crate::verdict::{Fate, Verdict};
use crate::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol, snap};
use std::vec::Vec;

const SERVED_V4: [u8; 4] = [169, 254, 169, 254];
const OTHER_V4: [u8; 4] = [10, 0, 2, 2];
const NEXT_HOP: [u8; 4] = [62, 210, 0, 1];
const SERVED_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xa9, 0xfe, 0xa9, 0xfe];
const OTHER_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

struct One;

impl ServedAddresses for One {
    fn serves_v4(&self, address: [u8; 4]) -> bool {
        address == SERVED_V4
    }

    fn serves_v6(&self, address: [u8; 16]) -> bool {
        address == SERVED_V6
    }

    fn answers_arp(&self, address: [u8; 4]) -> bool {
        address == NEXT_HOP || self.serves_v4(address)
    }
}

/// True if a served IPv4 address ends with this byte.
fn ends_served(last: u8) -> bool {
    last == SERVED_V4[3]
}

/// The verdict on a frame. Asserts that a frame that `is_ordinary` accepts passes, whatever the length of its
/// first piece.
fn verdict(frame: &[u8]) -> Verdict {
    let verdict = classify(frame, &One);
    for first in [frame, &frame[..frame.len().min(20)], &frame[..frame.len().min(34)]] {
        assert!(!is_ordinary(first, ends_served) || verdict == Verdict::PassIpv4, "{verdict:?}: {frame:?}");
    }
    verdict
}

#[test]
fn only_plain_ipv4_between_other_addresses_is_ordinary() {
    let plain = ethernet(&[], ethernet::IPV4, &datagram(OTHER_V4, protocol::TCP));
    assert!(is_ordinary(&plain[..], ends_served));
    assert!(!is_ordinary(&plain[..33], ends_served), "a first piece that ends in the header");
    let header = ethernet::HEADER;
    for (name, frame) in [
        ("to a served address", ethernet(&[], ethernet::IPV4, &datagram(SERVED_V4, protocol::TCP))),
        (
            "from one",
            (0..4).fold(plain.clone(), |frame, at| with(frame, header + ipv4::SOURCE + at, SERVED_V4[at])),
        ),
        ("to another that ends like one", with(plain.clone(), header + ipv4::DESTINATION + 3, SERVED_V4[3])),
        ("with options", with(plain.clone(), header, 0x46)),
        ("of another version", with(plain.clone(), header, 0x65)),
        ("behind a tag", ethernet(&[0x8100], ethernet::IPV4, &datagram(OTHER_V4, protocol::TCP))),
        ("of another type", with(plain.clone(), ethernet::TYPE + 1, 6)),
    ] {
        assert!(!is_ordinary(&frame[..], ends_served), "{name}");
    }
}

/// An Ethernet frame between two stations, with the given tags.
fn ethernet(tags: &[u16], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::from([0x52, 0x54, 0, 0, 0, 9, 0x52, 0x54, 0, 0, 0, 1]);
    for tag in tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 7]);
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    frame
}

fn ask_for(target: [u8; 4]) -> Vec<u8> {
    let mut packet = Vec::from([0; arp::LEN]);
    packet[..6].copy_from_slice(&arp::ETHERNET_IPV4);
    packet[arp::OPERATION + 1] = 1;
    packet[arp::TARGET_IP..].copy_from_slice(&target);
    packet
}

fn datagram(destination: [u8; 4], protocol: u8) -> Vec<u8> {
    let mut packet = Vec::from([0; ipv4::HEADER]);
    packet[0] = ipv4::VERSION_IHL;
    packet[ipv4::PROTOCOL] = protocol;
    packet[ipv4::DESTINATION..].copy_from_slice(&destination);
    packet
}

fn datagram6(destination: [u8; 16], next_header: u8) -> Vec<u8> {
    let mut packet = Vec::from([0; ipv6::HEADER]);
    packet[0] = ipv6::VERSION << 4;
    packet[ipv6::NEXT_HEADER] = next_header;
    packet[ipv6::HOP_LIMIT] = 255;
    packet[ipv6::DESTINATION..].copy_from_slice(&destination);
    packet
}

fn solicitation(target: [u8; 16]) -> Vec<u8> {
    let group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xfe, 0xa9, 0xfe];
    let mut packet = datagram6(group, protocol::ICMPV6);
    packet.extend([0; neighbour::LEN]);
    packet[ipv6::HEADER] = neighbour::SOLICITATION;
    packet[ipv6::HEADER + neighbour::TARGET..].copy_from_slice(&target);
    packet
}

/// Returns the frame with one byte changed.
fn with(mut frame: Vec<u8>, offset: usize, byte: u8) -> Vec<u8> {
    frame[offset] = byte;
    frame
}

#[test]
fn arp_is_steered_by_its_target() {
    let frame = |packet: &[u8]| ethernet(&[], ethernet::ARP, packet);
    assert_eq!(verdict(&frame(&ask_for(SERVED_V4))), Verdict::SteerArp);
    assert_eq!(verdict(&frame(&ask_for(OTHER_V4))), Verdict::PassArp);
    for (offset, byte) in [(1, 32), (2, 0x86), (4, 8), (5, 16)] {
        assert_eq!(verdict(&frame(&with(ask_for(SERVED_V4), offset, byte))), Verdict::PassArpFormat);
    }
    let ieee802 = |target| verdict(&frame(&with(ask_for(target), 1, 6)));
    assert_eq!(ieee802(SERVED_V4), Verdict::DropArpFormat);
    assert_eq!((ieee802(OTHER_V4), ieee802(NEXT_HOP)), (Verdict::PassArp, Verdict::PassArp));
}

#[test]
fn only_arp_is_steered_for_a_next_hop() {
    assert_eq!(verdict(&ethernet(&[], ethernet::ARP, &ask_for(NEXT_HOP))), Verdict::SteerArp);
    for number in 0..=u8::MAX {
        let frame = ethernet(&[], ethernet::IPV4, &datagram(NEXT_HOP, number));
        assert_eq!(verdict(&frame), Verdict::PassIpv4, "protocol {number}");
    }
}

#[test]
fn served_ipv4_is_steered_if_whole_and_plain_else_dropped() {
    let served = |protocol| datagram(SERVED_V4, protocol);
    let table = [
        ("TCP", served(protocol::TCP), Verdict::SteerIpv4Tcp),
        ("ICMP", served(protocol::ICMP), Verdict::SteerIpv4Icmp),
        ("UDP", served(protocol::UDP), Verdict::DropIpv4Udp),
        ("SCTP", served(132), Verdict::DropIpv4Protocol),
        ("IP in IP", served(4), Verdict::DropIpv4Protocol),
        ("ICMPv6 over IPv4", served(protocol::ICMPV6), Verdict::DropIpv4Protocol),
        ("options", with(served(protocol::TCP), 0, 0x46), Verdict::DropIpv4Options),
        ("all the options", with(served(protocol::TCP), 0, 0x4f), Verdict::DropIpv4Options),
        ("a header of 16", with(served(protocol::TCP), 0, 0x44), Verdict::DropIpv4Malformed),
        ("version 6", with(served(protocol::TCP), 0, 0x65), Verdict::DropIpv4Malformed),
        ("don't fragment", with(served(protocol::TCP), ipv4::FRAGMENT, 0x40), Verdict::SteerIpv4Tcp),
        ("the evil bit", with(served(protocol::TCP), ipv4::FRAGMENT, 0x80), Verdict::SteerIpv4Tcp),
        ("first fragment", with(served(protocol::TCP), ipv4::FRAGMENT, 0x20), Verdict::DropIpv4Fragment),
        ("later fragment", with(served(protocol::TCP), ipv4::FRAGMENT + 1, 1), Verdict::DropIpv4Fragment),
        ("far fragment", with(served(protocol::TCP), ipv4::FRAGMENT, 0x10), Verdict::DropIpv4Fragment),
        ("elsewhere", datagram(OTHER_V4, protocol::TCP), Verdict::PassIpv4),
        ("next address", datagram([169, 254, 169, 253], protocol::TCP), Verdict::PassIpv4),
        ("malformed elsewhere", with(datagram(OTHER_V4, protocol::TCP), 0, 0), Verdict::PassIpv4),
    ];
    for (name, packet, expected) in table {
        assert_eq!(verdict(&ethernet(&[], ethernet::IPV4, &packet)), expected, "{name}");
    }
}

#[test]
fn served_ipv6_is_steered_if_whole_and_plain_else_dropped() {
    let served = |next_header| datagram6(SERVED_V6, next_header);
    let table = [
        ("TCP", served(protocol::TCP), Verdict::SteerIpv6Tcp),
        ("ICMPv6", served(protocol::ICMPV6), Verdict::SteerIpv6Icmp),
        ("UDP", served(protocol::UDP), Verdict::DropIpv6Udp),
        ("SCTP", served(132), Verdict::DropIpv6Protocol),
        ("ICMP over IPv6", served(protocol::ICMP), Verdict::DropIpv6Protocol),
        ("hop-by-hop", served(protocol::HOP_BY_HOP), Verdict::DropIpv6Extension),
        ("routing", served(protocol::ROUTING), Verdict::DropIpv6Extension),
        ("destination options", served(protocol::DESTINATION_OPTIONS), Verdict::DropIpv6Extension),
        ("fragment", served(protocol::FRAGMENT), Verdict::DropIpv6Fragment),
        ("version 4", with(served(protocol::TCP), 0, 0x45), Verdict::DropIpv6Malformed),
        ("elsewhere", datagram6(OTHER_V6, protocol::TCP), Verdict::PassIpv6),
        ("UDP elsewhere", datagram6(OTHER_V6, protocol::UDP), Verdict::PassIpv6),
    ];
    for (name, packet, expected) in table {
        assert_eq!(verdict(&ethernet(&[], ethernet::IPV6, &packet)), expected, "{name}");
    }
}

#[test]
fn solicitations_are_steered_by_their_target() {
    let ours = solicitation(SERVED_V6);
    let table = [
        ("served target", ours.clone(), Verdict::SteerNeighbour),
        ("other target", solicitation(OTHER_V6), Verdict::PassIpv6),
        ("through a router", with(ours.clone(), ipv6::HOP_LIMIT, 254), Verdict::DropNeighbourInvalid),
        ("with a code", with(ours.clone(), ipv6::HEADER + 1, 1), Verdict::DropNeighbourInvalid),
        ("advertisement", with(ours.clone(), ipv6::HEADER, 136), Verdict::DropNeighbourClaim),
        ("cut in the target", ours[..ours.len() - 1].to_vec(), Verdict::PassTruncated),
    ];
    for (name, packet, expected) in table {
        assert_eq!(verdict(&ethernet(&[], ethernet::IPV6, &packet)), expected, "{name}");
    }
}

#[test]
fn vlan_tags_hide_no_frame_for_a_served_address() {
    let for_us = [
        (ethernet::ARP, ask_for(SERVED_V4)),
        (ethernet::IPV4, datagram(SERVED_V4, protocol::TCP)),
        (ethernet::IPV4, datagram(SERVED_V4, protocol::UDP)),
        (ethernet::IPV6, datagram6(SERVED_V6, protocol::TCP)),
        (ethernet::IPV6, solicitation(SERVED_V6)),
    ];
    let tags: [&[u16]; 4] = [&[0x8100], &[0x88a8], &[0x88a8, 0x8100], &[0x8100, 0x8100]];
    for tags in tags {
        for (ethertype, packet) in &for_us {
            assert_eq!(verdict(&ethernet(tags, *ethertype, packet)), Verdict::DropVlan, "{tags:x?}");
        }
        let elsewhere = datagram(OTHER_V4, protocol::TCP);
        assert_eq!(verdict(&ethernet(tags, ethernet::IPV4, &elsewhere)), Verdict::PassVlan, "{tags:x?}");
        assert_eq!(verdict(&ethernet(tags, 0x88cc, &[0; 46])), Verdict::PassVlan, "{tags:x?}");
    }
}

#[test]
fn a_frame_with_more_tags_than_are_parsed_is_dropped() {
    for tag in [0x8100, 0x88a8, 0x9100] {
        for destination in [SERVED_V4, OTHER_V4] {
            let frame = |tags| ethernet(&[tag; 7][..tags], ethernet::IPV4, &datagram(destination, 6));
            let looked_into = if destination == SERVED_V4 { Verdict::DropVlan } else { Verdict::PassVlan };
            for tags in 1..=ethernet::MAX_TAGS {
                assert_eq!(verdict(&frame(tags)), looked_into, "{tags} of {tag:#x}");
            }
            assert_eq!(verdict(&frame(ethernet::MAX_TAGS + 1)), Verdict::DropVlanDepth, "{tag:#x}");
        }
    }
}

/// A packet after a length, LLC and SNAP.
fn snap(tags: &[u16], start: [u8; 6], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut payload = Vec::from(start);
    payload.extend(ethertype.to_be_bytes());
    payload.extend(packet);
    ethernet(tags, payload.len() as u16, &payload)
}

#[test]
fn snap_hides_no_frame_for_a_served_address() {
    let v4 = |destination| datagram(destination, protocol::TCP);
    let for_us = [
        (ethernet::IPV4, v4(SERVED_V4)),
        (ethernet::IPV6, datagram6(SERVED_V6, protocol::UDP)),
        (ethernet::IPV6, solicitation(SERVED_V6)),
        (ethernet::ARP, ask_for(SERVED_V4)),
    ];
    for start in [snap::RFC1042, snap::BRIDGE_TUNNEL] {
        for tags in [&[][..], &[0x8100], &[0x88a8, 0x8100]] {
            for (ethertype, packet) in &for_us {
                assert_eq!(verdict(&snap(tags, start, *ethertype, packet)), Verdict::DropSnap, "{tags:x?}");
            }
            let pass = if tags.is_empty() { Verdict::PassEthertype } else { Verdict::PassVlan };
            assert_eq!(verdict(&snap(tags, start, ethernet::IPV4, &v4(OTHER_V4))), pass);
            assert_eq!(verdict(&snap(tags, start, 0x809b, &v4(SERVED_V4))), pass, "another protocol");
        }
    }
    let spanning_tree = [0x42, 0x42, 0x03, 0, 0, 0];
    assert_eq!(verdict(&snap(&[], spanning_tree, ethernet::IPV4, &v4(SERVED_V4))), Verdict::PassEthertype);
}

#[test]
fn tagged_arp_for_a_next_hop_passes() {
    assert_eq!(verdict(&ethernet(&[0x8100], ethernet::ARP, &ask_for(NEXT_HOP))), Verdict::PassVlan);
}

#[test]
fn a_guest_cannot_claim_a_served_address() {
    let arp = |operation, sender: [u8; 4], target| {
        let mut packet = with(ask_for(target), arp::OPERATION + 1, operation);
        packet[arp::SENDER_IP..arp::TARGET_MAC].copy_from_slice(&sender);
        ethernet(&[], ethernet::ARP, &packet)
    };
    for target in [OTHER_V4, SERVED_V4, NEXT_HOP] {
        for operation in [1, 2, 3, 8] {
            assert_eq!(verdict(&arp(operation, SERVED_V4, target)), Verdict::DropArpClaim, "{operation}");
        }
    }
    assert_eq!(verdict(&arp(1, NEXT_HOP, OTHER_V4)), Verdict::PassArp, "the next hop itself sends ARP");

    let from = |mut packet: Vec<u8>| {
        packet[ipv6::SOURCE..ipv6::DESTINATION].copy_from_slice(&SERVED_V6);
        ethernet(&[], ethernet::IPV6, &packet)
    };
    for kind in 130..=140 {
        let message = with(solicitation(OTHER_V6), ipv6::HEADER, kind);
        let claim =
            if (133..=137).contains(&kind) { Verdict::DropNeighbourClaim } else { Verdict::DropSourceClaim };
        assert_eq!(verdict(&from(message)), claim, "type {kind}");
    }
    let advertisement = |target| ethernet(&[], ethernet::IPV6, &with(solicitation(target), 40, 136));
    assert_eq!(verdict(&advertisement(SERVED_V6)), Verdict::DropNeighbourClaim);
    assert_eq!(verdict(&advertisement(OTHER_V6)), Verdict::PassIpv6);
}

#[test]
fn no_frame_leaves_with_a_served_source_address() {
    for destination in [OTHER_V4, SERVED_V4, [255; 4]] {
        for protocol in [protocol::TCP, protocol::UDP, protocol::ICMP, 132] {
            let mut packet = datagram(destination, protocol);
            packet[ipv4::SOURCE..ipv4::DESTINATION].copy_from_slice(&SERVED_V4);
            assert_eq!(verdict(&ethernet(&[], ethernet::IPV4, &packet)), Verdict::DropSourceClaim);
        }
    }
    for destination in [OTHER_V6, SERVED_V6] {
        let mut packet = datagram6(destination, protocol::UDP);
        packet[ipv6::SOURCE..ipv6::DESTINATION].copy_from_slice(&SERVED_V6);
        assert_eq!(verdict(&ethernet(&[], ethernet::IPV6, &packet)), Verdict::DropSourceClaim);
    }
}

/// A datagram to another address with these options, padded to whole words.
fn with_options(options: &[u8]) -> Vec<u8> {
    let mut packet = datagram(OTHER_V4, protocol::TCP);
    packet.extend(options);
    packet.resize(packet.len().next_multiple_of(4), 0);
    packet[0] = 0x40 | (packet.len() / 4) as u8;
    packet.resize(60, 0);
    ethernet(&[], ethernet::IPV4, &packet)
}

#[test]
fn no_source_route_leads_through_a_served_address() {
    let route = |kind: u8, hops: &[[u8; 4]]| {
        let mut option = Vec::from([kind, 3 + 4 * hops.len() as u8, 4]);
        option.extend(hops.iter().flatten());
        option
    };
    let padded = |n: usize, option: Vec<u8>| [std::vec![1; n], option].concat();
    for kind in [ipv4::LOOSE_ROUTE, ipv4::STRICT_ROUTE] {
        for hops in [&[SERVED_V4][..], &[OTHER_V4, SERVED_V4], &[SERVED_V4, OTHER_V4]] {
            let frame = with_options(&route(kind, hops));
            assert_eq!(verdict(&frame), Verdict::DropIpv4SourceRoute, "{hops:?}");
        }
        for before in 0..=33 {
            let frame = with_options(&padded(before, route(kind, &[SERVED_V4])));
            assert_eq!(verdict(&frame), Verdict::DropIpv4SourceRoute, "behind {before} bytes");
        }
        assert_eq!(verdict(&with_options(&route(kind, &[OTHER_V4; 9]))), Verdict::PassIpv4);
    }
    assert_eq!(verdict(&with_options(&route(7, &[SERVED_V4]))), Verdict::PassIpv4, "a record of the route");
    assert_eq!(verdict(&with_options(&[148, 4, 0, 0])), Verdict::PassIpv4, "router alert");
}

/// The datagram with these extension headers before its payload; each is its type and its bytes.
fn extended(headers: &[(u8, Vec<u8>)], last: u8, payload: &[u8]) -> Vec<u8> {
    let kinds: Vec<u8> = headers.iter().map(|(kind, _)| *kind).chain([last]).collect();
    let mut packet = datagram6(OTHER_V6, kinds[0]);
    for ((_, header), next) in headers.iter().zip(&kinds[1..]) {
        packet.extend(with(header.clone(), 0, *next));
    }
    packet.extend(payload);
    ethernet(&[], ethernet::IPV6, &packet)
}

/// An extension header with this length field: `8 * (units + 1)` bytes.
fn header(units: u8) -> Vec<u8> {
    with(std::vec![0; 8 + 8 * units as usize], 1, units)
}

fn routing(segments: &[[u8; 16]]) -> Vec<u8> {
    let mut header = header(2 * segments.len() as u8);
    for (place, segment) in header[8..].chunks_mut(16).zip(segments) {
        place.copy_from_slice(segment);
    }
    header
}

#[test]
fn no_routing_header_leads_through_a_served_address() {
    let through = |before: &[(u8, Vec<u8>)], segments: &[[u8; 16]]| {
        let headers = [before, &[(protocol::ROUTING, routing(segments))]].concat();
        verdict(&extended(&headers, protocol::TCP, &[0; 20]))
    };
    let options = |units| (protocol::DESTINATION_OPTIONS, header(units));
    let before = [
        Vec::new(),
        Vec::from([(protocol::HOP_BY_HOP, header(0))]),
        Vec::from([(protocol::HOP_BY_HOP, header(3)), options(1)]),
        Vec::from([(protocol::FRAGMENT, header(0)), (protocol::AH, with(std::vec![0; 24], 1, 4))]),
    ];
    for before in &before {
        for place in 0..ipv6::MAX_SEGMENTS {
            let mut segments = [OTHER_V6; ipv6::MAX_SEGMENTS];
            assert_eq!(through(before, &segments), Verdict::PassIpv6);
            segments[place] = SERVED_V6;
            assert_eq!(through(before, &segments), Verdict::DropIpv6Routing, "segment {place}");
        }
        assert_eq!(through(before, &[OTHER_V6; ipv6::MAX_SEGMENTS + 1]), Verdict::DropIpv6Routing);
    }
    let two = Vec::from([(protocol::ROUTING, routing(&[])), options(0)]);
    assert_eq!(through(&two, &[OTHER_V6]), Verdict::DropIpv6Routing, "two routing headers");
}

#[test]
fn a_chain_of_more_headers_than_are_parsed_is_dropped() {
    let chain = |n| {
        let headers: Vec<_> = (0..n).map(|_| (protocol::DESTINATION_OPTIONS, header(0))).collect();
        verdict(&extended(&headers, protocol::TCP, &[0; 20]))
    };
    assert_eq!(chain(ipv6::MAX_EXTENSIONS), Verdict::PassIpv6);
    assert_eq!(chain(ipv6::MAX_EXTENSIONS + 1), Verdict::DropIpv6Routing);
}

#[test]
fn extension_headers_hide_no_neighbour_discovery() {
    let behind = |kind: u8, target| {
        let message = with(solicitation(target), ipv6::HEADER, kind)[ipv6::HEADER..].to_vec();
        let headers = [(protocol::HOP_BY_HOP, header(0)), (protocol::DESTINATION_OPTIONS, header(1))];
        verdict(&extended(&headers, protocol::ICMPV6, &message))
    };
    assert_eq!(behind(135, SERVED_V6), Verdict::DropIpv6Extension);
    assert_eq!(behind(136, SERVED_V6), Verdict::DropNeighbourClaim);
    assert_eq!((behind(135, OTHER_V6), behind(136, OTHER_V6)), (Verdict::PassIpv6, Verdict::PassIpv6));
    let fragment = with(with(header(0), 2, 0x01), 3, 0x00);
    let middle = extended(&[(protocol::FRAGMENT, fragment)], protocol::ICMPV6, &[135; 24]);
    assert_eq!(verdict(&middle), Verdict::PassIpv6, "a later fragment");
}

#[test]
fn no_ipv6_address_leads_to_a_served_ipv4_address() {
    let prefixes: [(&str, [u8; 12]); 3] = [
        ("translated", [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("mapped", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]),
        ("compatible", [0; 12]),
    ];
    let to = |address: &[u8]| {
        let packet = datagram6(address.try_into().expect("16 bytes"), protocol::TCP);
        verdict(&ethernet(&[], ethernet::IPV6, &packet))
    };
    for (name, prefix) in prefixes {
        assert_eq!(to(&[&prefix[..], &SERVED_V4].concat()), Verdict::DropTranslated, "{name}");
        assert_eq!(to(&[&prefix[..], &OTHER_V4].concat()), Verdict::PassIpv6, "{name}");
        let near = with(prefix.to_vec(), 5, 1);
        assert_eq!(to(&[&near[..], &SERVED_V4].concat()), Verdict::PassIpv6, "near {name}");
    }
    let tunnelled = |v4: [u8; 4]| [&[0x20, 0x02][..], &v4, &[7; 10]].concat();
    assert_eq!(to(&tunnelled(SERVED_V4)), Verdict::DropTranslated);
    assert_eq!(to(&tunnelled(OTHER_V4)), Verdict::PassIpv6);
}

#[test]
fn datagrams_to_a_group_mac_are_not_answered() {
    let table = [
        (ethernet::IPV4, datagram(SERVED_V4, protocol::TCP), Verdict::DropGroupDestination),
        (ethernet::IPV4, datagram(SERVED_V4, protocol::ICMP), Verdict::DropGroupDestination),
        (ethernet::IPV6, datagram6(SERVED_V6, protocol::TCP), Verdict::DropGroupDestination),
        (ethernet::IPV6, solicitation(SERVED_V6), Verdict::SteerNeighbour),
        (ethernet::ARP, ask_for(SERVED_V4), Verdict::SteerArp),
    ];
    for first in [0x01, 0x33, 0xff] {
        for (ethertype, packet, expected) in &table {
            let frame = with(ethernet(&[], *ethertype, packet), 0, first);
            assert_eq!(verdict(&frame), *expected, "destination {first:02x}:…");
        }
    }
}

#[test]
fn a_frame_that_ends_before_its_addresses_passes() {
    let table = [
        ("ARP", ethernet(&[], ethernet::ARP, &ask_for(SERVED_V4)), 42),
        ("IPv4", ethernet(&[], ethernet::IPV4, &datagram(SERVED_V4, protocol::TCP)), 34),
        ("IPv6", ethernet(&[], ethernet::IPV6, &datagram6(SERVED_V6, protocol::TCP)), 54),
        ("solicitation", ethernet(&[], ethernet::IPV6, &solicitation(SERVED_V6)), 78),
        ("tagged", ethernet(&[0x88a8, 0x8100], ethernet::IPV4, &datagram(SERVED_V4, 6)), 42),
    ];
    for (name, frame, needed) in table {
        assert_eq!(frame.len(), needed, "{name}");
        assert_ne!(verdict(&frame).fate(), Fate::Pass, "{name}");
        for len in 0..needed {
            assert_eq!(verdict(&frame[..len]), Verdict::PassTruncated, "{name} cut to {len}");
        }
    }
}

#[test]
fn every_other_ethertype_passes() {
    let known = [ethernet::ARP, ethernet::IPV4, ethernet::IPV6];
    for ethertype in (0..=u16::MAX).filter(|e| !known.contains(e) && !ethernet::is_tag(*e)) {
        let frame = ethernet(&[], ethertype, &datagram(SERVED_V4, protocol::TCP));
        assert_eq!(verdict(&frame), Verdict::PassEthertype, "{ethertype:#06x}");
    }
}

#[test]
fn reads_end_where_the_frame_does() {
    let frame: &[u8] = &[1, 2, 3];
    assert_eq!(frame.read::<2>(1), Some([2, 3]));
    assert_eq!(frame.read::<2>(2), None);
    assert_eq!(frame.read::<1>(4), None);
    assert_eq!(frame.read::<1>(usize::MAX), None);
}
