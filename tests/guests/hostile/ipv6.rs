//! IPv6 packets for the served addresses in every form except a plain request, and neighbour discovery.

use std::net::Ipv6Addr;

use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{ipv6, neighbour, protocol};
use support::arena::{Case, Kind};
use support::frames::{self, OTHER_V6, SERVED_V6, SOLICITED, with};

use super::make::{datagram6, mac, ping6, served_v6, syn6, to_all_v6, v6};

/// Extension headers (IANA "IPv6 Extension Header Types"), each 8 bytes long and followed by TCP.
const EXTENSIONS: [(&str, u8); 9] = [
    ("hop-by-hop options", protocol::HOP_BY_HOP),
    ("a routing header", protocol::ROUTING),
    ("esp", protocol::ESP),
    ("an authentication header", protocol::AH),
    ("destination options", protocol::DESTINATION_OPTIONS),
    ("a mobility header", protocol::MOBILITY),
    ("host identity", protocol::HIP),
    ("shim6", protocol::SHIM6),
    ("an experiment", protocol::EXPERIMENT_1),
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = protocols();
    cases.extend(extensions());
    cases.extend(discovery());
    cases.extend(cut());
    cases
}

fn protocols() -> Vec<Case> {
    let all = served_v6().len();
    let of = |number: u8| to_all_v6(move |to| datagram6(to, number, &[0; 24]));
    let icmp = |kind: u8| to_all_v6(move |to| datagram6(to, protocol::ICMPV6, &[kind, 0, 0, 0, 0, 0, 0, 0]));
    let closed = |port: u16| to_all_v6(move |to| syn6(to, port));
    let version = |byte: u8| to_all_v6(move |to| with(syn6(to, 80), 0, &[byte]));
    let length =
        |bytes: u16| vec![v6(&with(syn6(SERVED_V6, 80), ipv6::PAYLOAD_LENGTH, &bytes.to_be_bytes()))];
    vec![
        Case::of("udp to every v6 address", of(protocol::UDP), DropIpv6Udp),
        Case::of("sctp to every v6 address", of(132), DropIpv6Protocol),
        Case::of("no next header to every v6 address", of(59), DropIpv6Protocol),
        Case::of("ipv4 in ipv6 to every address", of(4), DropIpv6Protocol),
        Case::of("icmp of ipv4 over ipv6", of(protocol::ICMP), DropIpv6Protocol),
        Case::of("ping to every v6 address", to_all_v6(ping6), SteerIpv6Icmp).answered(&[(Kind::Echo, all)]),
        Case::of("unsolicited v6 echo replies", icmp(129), SteerIpv6Icmp),
        Case::of("packets too big", icmp(2), SteerIpv6Icmp),
        Case::of("router advertisements to the service", icmp(134), SteerIpv6Icmp),
        Case::of("ssh to every v6 address", closed(22), SteerIpv6Tcp).answered(&[(Kind::Reset, all)]),
        Case::of("http to every v6 address", closed(80), AnswerSyn)
            .by_tcx(SteerIpv6Tcp)
            .answered(&[(Kind::SynAck, all)]),
        Case::of("version 4 in an ipv6 frame", version(0x45), DropIpv6Malformed),
        Case::of("version 15", version(0xf0), DropIpv6Malformed),
        Case::of("a v6 length beyond the frame", length(1_400), SteerIpv6Tcp),
        Case::of("a v6 length of 0", length(0), SteerIpv6Tcp),
        Case::of("from no v6 address", from(Ipv6Addr::UNSPECIFIED), SteerIpv6Tcp),
        Case::of("from a v6 group", from(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)), SteerIpv6Tcp),
    ]
}

fn from(address: Ipv6Addr) -> Vec<Vec<u8>> {
    vec![v6(&with(syn6(SERVED_V6, 22), ipv6::SOURCE, &address.octets()))]
}

fn extensions() -> Vec<Case> {
    let one = |(name, number): &(&str, u8)| {
        let header = [&[protocol::TCP, 0, 0, 0, 0, 0, 0, 0][..], &[0; 20]].concat();
        let frames = to_all_v6(|to| datagram6(to, *number, &header));
        Case::of(format!("{name} before tcp"), frames, DropIpv6Extension)
    };
    let fragment = |offset_and_more: u16| {
        let [high, low] = offset_and_more.to_be_bytes();
        let header = [&[protocol::TCP, 0, high, low, 0, 0, 0, 1][..], &[0; 24]].concat();
        to_all_v6(move |to| datagram6(to, protocol::FRAGMENT, &header))
    };
    let chain = || {
        let headers = [
            [protocol::DESTINATION_OPTIONS, 0, 1, 4, 0, 0, 0, 0],
            [protocol::ROUTING, 0, 1, 4, 0, 0, 0, 0],
            [protocol::TCP, 0, 0, 0, 0, 0, 0, 0],
        ];
        to_all_v6(move |to| datagram6(to, protocol::HOP_BY_HOP, &headers.concat()))
    };
    let mut cases: Vec<Case> = EXTENSIONS.iter().map(one).collect();
    cases.extend([
        Case::of("a chain of extension headers", chain(), DropIpv6Extension),
        Case::of("first v6 fragments", fragment(1), DropIpv6Fragment),
        Case::of("middle v6 fragments", fragment(8 << 3 | 1), DropIpv6Fragment),
        Case::of("last v6 fragments", fragment(8 << 3), DropIpv6Fragment),
        Case::of("a fragment that is the whole (RFC 6946)", fragment(0), DropIpv6Fragment),
    ]);
    cases
}

fn discovery() -> Vec<Case> {
    let all = served_v6().len();
    let ours = frames::solicitation(SOLICITED, SERVED_V6);
    let hosts = |to: Ipv6Addr| {
        let mut packet = frames::introduced(SOLICITED, to);
        let at = packet.len() - 6;
        packet[at..].copy_from_slice(&mac().0);
        packet
    };
    let set = |offset, bytes: &[u8]| vec![v6(&with(ours.clone(), offset, bytes))];
    vec![
        Case::of("solicitations for every address", to_all_v6(hosts), AnswerNeighbour)
            .by_tcx(SteerNeighbour)
            .answered(&[(Kind::Advertisement, all)]),
        Case::of("a solicitation that crossed a router", set(ipv6::HOP_LIMIT, &[254]), DropNeighbourInvalid),
        Case::of(
            "a solicitation with a code",
            set(ipv6::HEADER + neighbour::CODE, &[1]),
            DropNeighbourInvalid,
        ),
        Case::of("duplicate address detection of ours", set(ipv6::SOURCE, &[0; 16]), SteerNeighbour)
            .answered(&[(Kind::Advertisement, 1)]),
        Case::of(
            "a solicitation sent to the service alone",
            to_all_v6(|to| frames::solicitation(to, to)),
            SteerIpv6Icmp,
        )
        .answered(&[(Kind::Advertisement, all)]),
    ]
}

fn cut() -> Vec<Case> {
    let whole = v6(&syn6(SERVED_V6, 80));
    let at =
        |lengths: std::ops::Range<usize>| lengths.map(|length| whole[..length].to_vec()).collect::<Vec<_>>();
    let group = |bytes: &[u8], packet: &[u8]| with(v6(packet), 0, bytes);
    let nobodys = at(14..54);
    let leaves = nobodys.len();
    vec![
        Case::of("cut before the v6 destination", nobodys, PassTruncated).leaving(leaves),
        Case::of("cut in the v6 segment", at(54..94), SteerIpv6Tcp),
        Case::of(
            "a v6 request sent to a group",
            vec![
                group(&[0x33, 0x33, 0, 0, 0, 1], &syn6(SERVED_V6, 80)),
                group(&[0xff; 6], &syn6(SERVED_V6, 80)),
                group(&[0x01, 0x00, 0x5e, 0, 0, 1], &ping6(SERVED_V6)),
            ],
            DropGroupDestination,
        ),
        Case::of("to another v6 address", vec![v6(&syn6(OTHER_V6, 80))], PassIpv6).leaving(1),
    ]
}
