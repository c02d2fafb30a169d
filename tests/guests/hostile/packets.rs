//! IPv4 packets for the served addresses in every form except a plain request.

use metadata_common::addresses::SCALEWAY_NEXT_HOP;
use metadata_common::verdict::Verdict;
use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol, tcp};
use std::net::Ipv6Addr;
use support::arena::{Case, Kind, Outcome};
use support::frames::{self, OTHER_V4, OTHER_V6, SERVED_V4, SERVED_V6, SOLICITED, with};

use super::node::{
    altered, datagram, datagram6, frame, mac, ping, ping6, served_v4, served_v6, syn, syn6, to_all_v4,
    to_all_v6, v4, v6, with_options,
};

/// IPv4 options padded to whole words (RFC 791 §3.1, RFC 2113, RFC 1108).
const OPTIONS: [(&str, &[u8]); 8] = [
    ("record route", &[7, 7, 4, 0, 0, 0, 0, 0]),
    ("timestamp", &[68, 8, 5, 0, 0, 0, 0, 0]),
    ("router alert", &[148, 4, 0, 0]),
    ("security", &[130, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ("stream", &[136, 4, 0, 1]),
    ("no operation", &[1, 1, 1, 1]),
    ("end of list", &[0, 0, 0, 0]),
    ("length beyond the header", &[7, 39, 4, 0]),
];

pub(crate) fn ipv4_cases() -> Vec<Case> {
    let mut cases = ipv4_protocols();
    cases.extend(fragments());
    cases.extend(headers());
    cases.extend(sources());
    cases.extend(ipv4_cut());
    cases
}

fn ipv4_protocols() -> Vec<Case> {
    let all = served_v4().len();
    let odd = [2, 4, 41, 46, 47, 50, 51, 89, 103, 112, 132, 136, 255];
    let dropped =
        |name: &str, number| Case::of(name, to_all_v4(|to| datagram(to, number, &[0; 24])), DropIpv4Protocol);
    let udp = |port: u16| to_all_v4(move |to| datagram(to, protocol::UDP, &udp_header(port)));
    let icmp = |kind: u8| to_all_v4(move |to| datagram(to, protocol::ICMP, &[kind, 0, 0, 0, 0, 0, 0, 0]));
    let closed = |port: u16| to_all_v4(move |to| syn(to, port));
    vec![
        Case::of("udp to every address", udp(80), DropIpv4Udp),
        Case::of("dns to every address", udp(53), DropIpv4Udp),
        Case::of("http/3 to every address", udp(443), DropIpv4Udp),
        dropped("sctp to every address", 132),
        dropped("udp-lite to every address", 136),
        dropped("gre to every address", 47),
        dropped("ipv6 in ipv4 to every address", 41),
        Case::of(
            "protocols that are not served",
            odd.iter().map(|number| v4(&datagram(SERVED_V4, *number, &[0; 24]))).collect(),
            DropIpv4Protocol,
        ),
        Case::of("ping to every address", to_all_v4(ping), SteerIpv4Icmp).answered(&[(Kind::Echo, all)]),
        Case::of("unsolicited echo replies", icmp(0), SteerIpv4Icmp),
        Case::of("icmp redirects", icmp(5), SteerIpv4Icmp),
        Case::of("icmp unreachables", icmp(3), SteerIpv4Icmp),
        Case::of("icmp timestamps", icmp(13), SteerIpv4Icmp),
        Case::of("ssh to every address", closed(22), SteerIpv4Tcp).answered(&[(Kind::Reset, all)]),
        Case::of("https to every address", closed(443), SteerIpv4Tcp).answered(&[(Kind::Reset, all)]),
        Case::of("port 0 of every address", closed(0), SteerIpv4Tcp),
        Case::of("http to every address", closed(80), AnswerSyn)
            .by_tcx(SteerIpv4Tcp)
            .answered(&[(Kind::SynAck, all)]),
    ]
}

fn udp_header(port: u16) -> Vec<u8> {
    [[0x9c, 0x40], port.to_be_bytes(), [0, 24], [0, 0]].concat().into_iter().chain([0; 16]).collect()
}

/// Sets the flag and offset (in units of 8 bytes) of a fragment.
fn fragment(packet: Vec<u8>, more: bool, offset: u16) -> Vec<u8> {
    altered(packet, ipv4::FRAGMENT, &(u16::from(more) << 13 | offset).to_be_bytes())
}

fn fragments() -> Vec<Case> {
    let of = |more, offset| to_all_v4(move |to| fragment(frames::tcp(to, tcp::SYN), more, offset));
    // The second fragment overlaps the first's TCP header and repeats the port (RFC 3128).
    let overlapping = vec![
        v4(&fragment(frames::tcp(SERVED_V4, tcp::SYN), true, 0)),
        v4(&fragment(datagram(SERVED_V4, protocol::TCP, &[0; 24]), false, 1)),
    ];
    let tiny = vec![
        v4(&fragment(datagram(SERVED_V4, protocol::TCP, &[0x9c, 0x40, 0, 80, 0, 0, 0, 1]), true, 0)),
        v4(&fragment(datagram(SERVED_V4, protocol::TCP, &[0; 32]), false, 1)),
    ];
    let other = |number: u8| vec![v4(&fragment(datagram(SERVED_V4, number, &[0; 24]), true, 0))];
    vec![
        Case::of("first fragments", of(true, 0), DropIpv4Fragment),
        Case::of("middle fragments", of(true, 3), DropIpv4Fragment),
        Case::of("last fragments", of(false, 3), DropIpv4Fragment),
        Case::of("last fragments at the far end", of(false, 0x1fff), DropIpv4Fragment),
        Case::of("overlapping fragments", overlapping, DropIpv4Fragment),
        Case::of("tiny fragments", tiny, DropIpv4Fragment),
        Case::of("a fragment of udp", other(protocol::UDP), DropIpv4Fragment),
        Case::of("a fragment of icmp", other(protocol::ICMP), DropIpv4Fragment),
        Case::of(
            "the reserved flag",
            vec![v4(&altered(syn(SERVED_V4, 80), ipv4::FRAGMENT, &[0x80, 0]))],
            AnswerSyn,
        )
        .by_tcx(SteerIpv4Tcp)
        .answered(&[(Kind::SynAck, 1)]),
    ]
}

fn headers() -> Vec<Case> {
    let optioned = |(name, options): &(&str, &[u8])| {
        let frames = to_all_v4(|to| with_options(&syn(to, 80), options));
        Case::of(format!("option {name}"), frames, DropIpv4Options)
    };
    let first = |byte: u8| to_all_v4(move |to| with(syn(to, 80), 0, &[byte]));
    let length =
        |bytes: u16| vec![v4(&altered(syn(SERVED_V4, 80), ipv4::TOTAL_LENGTH, &bytes.to_be_bytes()))];
    let mut cases: Vec<Case> = OPTIONS.iter().map(optioned).collect();
    cases.extend([
        Case::of(
            "forty bytes of options",
            to_all_v4(|to| with_options(&syn(to, 80), &[1; 40])),
            DropIpv4Options,
        ),
        Case::of("a header of 4 words", first(0x44), DropIpv4Malformed),
        Case::of("a header of 0 words", first(0x40), DropIpv4Malformed),
        Case::of("version 6 in an ipv4 frame", first(0x65), DropIpv4Malformed),
        Case::of("version 0", first(0x05), DropIpv4Malformed),
        Case::of("a length beyond the frame", length(1_400), SteerIpv4Tcp),
        Case::of("a length within the header", length(19), SteerIpv4Tcp),
        Case::of("a length without payload", length(20), SteerIpv4Tcp),
        Case::of(
            "a wrong header checksum",
            vec![v4(&with(syn(SERVED_V4, 80), ipv4::CHECKSUM, &[0xde, 0xad]))],
            SteerIpv4Tcp,
        ),
        Case::of("a ttl of 0", vec![v4(&altered(syn(SERVED_V4, 22), ipv4::TTL, &[0]))], SteerIpv4Tcp)
            .answered(&[(Kind::Reset, 1)]),
    ]);
    cases
}

fn sources() -> Vec<Case> {
    let from = |address: [u8; 4]| vec![v4(&altered(syn(SERVED_V4, 22), ipv4::SOURCE, &address))];
    vec![
        Case::of("from 0.0.0.0", from([0; 4]), SteerIpv4Tcp),
        Case::of("from 255.255.255.255", from([255; 4]), SteerIpv4Tcp),
        Case::of("from a group", from([224, 0, 0, 1]), SteerIpv4Tcp),
    ]
}

fn ipv4_cut() -> Vec<Case> {
    let whole = v4(&syn(SERVED_V4, 80));
    let at =
        |lengths: std::ops::Range<usize>| lengths.map(|length| whole[..length].to_vec()).collect::<Vec<_>>();
    // A packet cut before the end of its destination passes. A longer one is steered, although no stack accepts it.
    let nobodys = at(14..34);
    let leaves = nobodys.len();
    vec![
        Case::of("cut before the destination", nobodys, PassTruncated).leaving(leaves),
        Case::of("cut in the segment", at(34..54), SteerIpv4Tcp),
        Case::of(
            "to its neighbour's address",
            vec![v4(&syn(OTHER_V4, 80)), frame(&[], 0x0800, &ping(OTHER_V4))],
            PassIpv4,
        )
        .leaving(2),
    ]
}

// IPv6 packets for the served addresses in every form except a plain request, and neighbour discovery.

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

pub(crate) fn ipv6_cases() -> Vec<Case> {
    let mut cases = ipv6_protocols();
    cases.extend(extensions());
    cases.extend(discovery());
    cases.extend(ipv6_cut());
    cases
}

fn ipv6_protocols() -> Vec<Case> {
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

fn ipv6_cut() -> Vec<Case> {
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

// Encapsulations of a packet for a served address, and frames that are not IP.

const CUSTOMER: u16 = ethernet::CUSTOMER_TAG;
const SERVICE: u16 = ethernet::SERVICE_TAG;

pub(crate) fn ethernet_cases() -> Vec<Case> {
    let mut cases = tags();
    cases.extend(groups());
    cases.extend(resolution());
    cases.extend(lengths());
    cases
}

/// A packet of every kind for a served address, behind these tags.
fn behind(tags: &[u16]) -> Vec<Vec<u8>> {
    let mut request = frames::arp_request(SERVED_V4);
    request[arp::SENDER_MAC..arp::SENDER_IP].copy_from_slice(&mac().0);
    let mut frames: Vec<_> =
        served_v4().into_iter().map(|to| frame(tags, ethernet::IPV4, &syn(to, 80))).collect();
    frames.extend([
        frame(tags, ethernet::IPV4, &datagram(SERVED_V4, protocol::UDP, &[0; 8])),
        frame(tags, ethernet::IPV4, &ping(SERVED_V4)),
        frame(tags, ethernet::IPV6, &syn6(SERVED_V6, 80)),
        frame(tags, ethernet::IPV6, &frames::solicitation(SOLICITED, SERVED_V6)),
        frame(tags, ethernet::ARP, &request),
    ]);
    frames
}

/// Sets the tag control information (priority and VLAN) of a tagged frame.
fn tagged(frame: Vec<u8>, tag: u16) -> Vec<u8> {
    with(frame, ethernet::HEADER, &tag.to_be_bytes())
}

/// Frames of [`behind`] with a priority tag, which is no VLAN: they count as if they had none.
fn untagged(name: &str, ethertype: u16, tag: u16) -> Case {
    let tag = [ethertype.to_be_bytes(), tag.to_be_bytes()].concat();
    let frames = behind(&[]).into_iter().map(|mut frame| {
        frame.splice(ethernet::TYPE..ethernet::TYPE, tag.iter().copied());
        frame
    });
    let frames = frames.collect();
    let count = served_v4().len();
    let ours = [(DropIpv4Udp, 1), (SteerIpv4Icmp, 1), (SteerNeighbour, 1)];
    let by = |others: &[(Verdict, u64)]| Outcome {
        counts: [others, &ours].concat(),
        hears: vec![(Kind::Arp, 1), (Kind::Advertisement, 1), (Kind::Echo, 1), (Kind::SynAck, count + 1)],
        ..Outcome::default()
    };
    let count = count as u64;
    let by_tcx = by(&[(SteerArp, 1), (SteerIpv4Tcp, count), (SteerIpv6Tcp, 1)]);
    let outcome = by(&[(AnswerArp, 1), (AnswerSyn, count + 1)]);
    Case { outcome, by_tcx: Some(by_tcx), ..Case::of(name, frames, AnswerSyn) }
}

fn tags() -> Vec<Case> {
    let with_tag = |tag: u16| behind(&[CUSTOMER]).into_iter().map(|frame| tagged(frame, tag)).collect();
    let cut = |tags: &[u16], length: usize| {
        vec![frame(tags, ethernet::IPV4, &syn(SERVED_V4, 80))[..length].to_vec()]
    };
    vec![
        Case::of("a vlan tag", behind(&[CUSTOMER]), DropVlan),
        untagged("a priority tag", CUSTOMER, 0xe000),
        untagged("vlan 0", CUSTOMER, 0),
        untagged("a service tag of vlan 0", SERVICE, 0),
        Case::of(
            "two tags of vlan 0",
            {
                let both = |frame| with(tagged(frame, 0), ethernet::HEADER + ethernet::TAG, &[0; 2]);
                behind(&[CUSTOMER, CUSTOMER]).into_iter().map(both).collect()
            },
            DropVlan,
        ),
        Case::of("vlan 4095", with_tag(0x0fff), DropVlan),
        Case::of("a service tag", behind(&[SERVICE]), DropVlan),
        Case::of("a service and a customer tag", behind(&[SERVICE, CUSTOMER]), DropVlan),
        Case::of("two customer tags", behind(&[CUSTOMER, CUSTOMER]), DropVlan),
        Case::of("two service tags", behind(&[SERVICE, SERVICE]), DropVlan),
        Case::of(
            "a tag around another address",
            vec![frame(&[CUSTOMER], ethernet::IPV4, &syn(OTHER_V4, 80))],
            PassVlan,
        )
        .leaving(1),
        // The kernel drops the frame when it removes the tag, before any classifier runs.
        Case {
            by_tcx: Some(Outcome::default()),
            ..Case::of("cut within a tag", cut(&[CUSTOMER], 17), PassTruncated)
        },
    ]
}

fn groups() -> Vec<Case> {
    let to = |group: [u8; 6]| {
        let requests = [syn(SERVED_V4, 80), ping(SERVED_V4)];
        requests.iter().map(|packet| with(v4(packet), 0, &group)).collect::<Vec<_>>()
    };
    vec![
        Case::of("a request to the broadcast mac", to([0xff; 6]), DropGroupDestination),
        Case::of("a request to a multicast group", to([1, 0, 0x5e, 0, 0, 1]), DropGroupDestination),
        Case::of("a request to the bridge group", to([1, 0x80, 0xc2, 0, 0, 0]), DropGroupDestination),
    ]
}

fn request(target: std::net::Ipv4Addr) -> Vec<u8> {
    let mut packet = frames::arp_request(target);
    packet[arp::SENDER_MAC..arp::SENDER_IP].copy_from_slice(&mac().0);
    packet
}

fn resolution() -> Vec<Case> {
    let all = |group: bool| -> Vec<Vec<u8>> {
        let targets = served_v4().into_iter().chain([SCALEWAY_NEXT_HOP]);
        let frame = targets.map(|target| frame(&[], ethernet::ARP, &request(target)));
        frame.map(|frame| if group { with(frame, 0, &[0xff; 6]) } else { frame }).collect()
    };
    let count = served_v4().len() + 1;
    let answered = |name: &str, frames: Vec<Vec<u8>>| {
        let count = frames.len();
        Case::of(name, frames, AnswerArp).by_tcx(SteerArp).answered(&[(Kind::Arp, count)])
    };
    let one = |verdict: Verdict, name: &str, packet: Vec<u8>| {
        Case::of(name, vec![frame(&[], ethernet::ARP, &packet)], verdict)
    };
    let mut cases = vec![
        answered("arp for every address", all(true)),
        answered("arp for every address, to one station", all(false)),
        one(SteerArp, "an arp reply to the service", with(request(SERVED_V4), arp::OPERATION, &[0, 2])),
        one(SteerArp, "an arp with an odd operation", with(request(SERVED_V4), arp::OPERATION, &[0, 9])),
        one(PassArpFormat, "arp of another hardware", with(request(SERVED_V4), 1, &[32])).leaving(1),
        one(DropArpFormat, "arp by IEEE 802", with(request(SERVED_V4), 1, &[6])),
        one(PassArpFormat, "arp of another protocol", with(request(SERVED_V4), 2, &[0x86, 0xdd])).leaving(1),
    ];
    assert_eq!(cases[0].shots.len(), count, "each address must occur once");
    cases.push(one(PassArp, "arp for the gateway", request(OTHER_V4)).leaving(1));
    cases
}

fn lengths() -> Vec<Case> {
    let whole = frame(&[], 0x88b5, &[0; 46]);
    let short = (14..60).map(|length| whole[..length].to_vec()).collect::<Vec<_>>();
    let (count, none) = (short.len(), (0..14).map(|length| whole[..length].to_vec()).collect::<Vec<_>>());
    let tunnel = |name: &str, ethertype: u16, header: &[u8]| {
        let inner = if header.is_empty() { request(SERVED_V4) } else { syn(SERVED_V4, 80) };
        Case::of(name, vec![frame(&[], ethertype, &[header, &inner].concat())], PassEthertype).leaving(1)
    };
    let request = request(SERVED_V4);
    let cut_arp =
        (14..42).map(|length| frame(&[], ethernet::ARP, &request)[..length].to_vec()).collect::<Vec<_>>();
    let cut = cut_arp.len();
    vec![
        Case::of("an incomplete header", none, PassTruncated).refused(),
        // A node ignores a tunnel unless it is the tunnel's other end.
        tunnel("a request within mpls", 0x8847, &[0, 0, 0x11, 0x40]),
        tunnel("a request within pppoe", 0x8864, &[0x11, 0, 0, 1, 0, 42, 0, 0x21]),
        tunnel("a request within a trill header", 0x22f3, &[0; 6]),
        tunnel("rarp for a served address", 0x8035, &[]),
        Case::of("runts of another protocol", short, PassEthertype).leaving(count),
        Case::of("an arp request cut before its target", cut_arp, PassTruncated).leaving(cut),
        Case::of(
            "bytes behind the packet",
            vec![[frame(&[], ethernet::IPV4, &ping(SERVED_V4)), vec![0xa5; 900]].concat()],
            SteerIpv4Icmp,
        )
        .answered(&[(Kind::Echo, 1)]),
    ]
}
