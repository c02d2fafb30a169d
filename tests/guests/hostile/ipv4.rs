//! IPv4 packets for the served addresses in every form except a plain request.

use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{ipv4, protocol, tcp};
use support::arena::{Case, Kind};
use support::frames::{self, OTHER_V4, SERVED_V4, with};

use super::make::{altered, datagram, frame, ping, served_v4, syn, to_all_v4, v4, with_options};

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

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = protocols();
    cases.extend(fragments());
    cases.extend(headers());
    cases.extend(sources());
    cases.extend(cut());
    cases
}

fn protocols() -> Vec<Case> {
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

fn cut() -> Vec<Case> {
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
