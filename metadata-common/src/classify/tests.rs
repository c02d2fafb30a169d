use super::{Reader, Served, classify};
use crate::verdict::{Fate, Verdict};
use crate::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol};
use std::vec::Vec;

const SERVED_V4: [u8; 4] = [169, 254, 169, 254];
const OTHER_V4: [u8; 4] = [10, 0, 2, 2];
const NEXT_HOP: [u8; 4] = [62, 210, 0, 1];
const SERVED_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xa9, 0xfe, 0xa9, 0xfe];
const OTHER_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

struct One;

impl Served for One {
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

fn verdict(frame: &[u8]) -> Verdict {
    classify(frame, &One)
}

/// An Ethernet frame between two stations, behind the given tags.
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

/// The frame with one octet changed.
fn with(mut frame: Vec<u8>, offset: usize, octet: u8) -> Vec<u8> {
    frame[offset] = octet;
    frame
}

#[test]
fn arp_is_steered_by_its_target() {
    let frame = |packet: &[u8]| ethernet(&[], ethernet::ARP, packet);
    assert_eq!(verdict(&frame(&ask_for(SERVED_V4))), Verdict::SteerArp);
    assert_eq!(verdict(&frame(&ask_for(OTHER_V4))), Verdict::PassArp);
    for (offset, octet) in [(1, 6), (2, 0x86), (4, 8), (5, 16)] {
        assert_eq!(verdict(&frame(&with(ask_for(SERVED_V4), offset, octet))), Verdict::PassArpFormat);
    }
}

#[test]
fn of_a_next_hop_only_arp_is_steered() {
    assert_eq!(verdict(&ethernet(&[], ethernet::ARP, &ask_for(NEXT_HOP))), Verdict::SteerArp);
    for number in 0..=u8::MAX {
        let frame = ethernet(&[], ethernet::IPV4, &datagram(NEXT_HOP, number));
        assert_eq!(verdict(&frame), Verdict::PassIpv4, "protocol {number}");
    }
}

#[test]
fn ipv4_is_steered_whole_and_plain_or_dropped() {
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
fn ipv6_is_steered_whole_and_plain_or_dropped() {
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
        ("advertisement", with(ours.clone(), ipv6::HEADER, 136), Verdict::PassIpv6),
        ("cut in the target", ours[..ours.len() - 1].to_vec(), Verdict::PassTruncated),
    ];
    for (name, packet, expected) in table {
        assert_eq!(verdict(&ethernet(&[], ethernet::IPV6, &packet)), expected, "{name}");
    }
}

#[test]
fn tags_hide_nothing_from_a_served_address() {
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
    let deep = ethernet(&[0x8100; 3], ethernet::IPV4, &datagram(SERVED_V4, protocol::TCP));
    assert_eq!(verdict(&deep), Verdict::PassVlanDepth);
}

#[test]
fn datagrams_sent_to_a_group_of_stations_are_not_answered() {
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
fn a_frame_cut_anywhere_before_its_addresses_passes() {
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
    let known =
        [ethernet::ARP, ethernet::IPV4, ethernet::IPV6, ethernet::CUSTOMER_TAG, ethernet::SERVICE_TAG];
    for ethertype in (0..=u16::MAX).filter(|e| !known.contains(e)) {
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
