//! Describes a frame in one line, and finds the end of its headers.
//!
//! A guest may send any bytes, and the kernel side copies only the start of a frame. The functions skip whatever they
//! cannot parse.

use etherparse::{LaxLinkExtSlice, LaxNetSlice, LaxSlicedPacket, TcpSlice, TransportSlice};
use std::fmt::Write as _;
use std::net::IpAddr;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Bytes of an ARP packet for IPv4 over Ethernet.
const ARP: usize = 28;
/// Bytes of the header of an ICMP message.
const ICMP: usize = 8;

/// The headers of a frame.
#[must_use]
pub fn headers(bytes: &[u8]) -> &[u8] {
    let end = LaxSlicedPacket::from_ethernet(bytes).map_or(ETHERNET, |packet| end_of_headers(bytes, &packet));
    bytes.get(..end).unwrap_or(bytes)
}

fn end_of_headers(bytes: &[u8], packet: &LaxSlicedPacket<'_>) -> usize {
    // The parsed slices point into the frame: their distance from its start is the length before them.
    let before =
        |rest: &[u8]| (rest.as_ptr() as usize).saturating_sub(bytes.as_ptr() as usize).min(bytes.len());
    match (&packet.transport, &packet.net) {
        (Some(TransportSlice::Tcp(tcp)), _) => before(tcp.payload()),
        (Some(TransportSlice::Udp(udp)), _) => before(udp.payload()),
        (Some(TransportSlice::Icmpv4(icmp)), _) => before(icmp.slice()) + ICMP,
        (Some(TransportSlice::Icmpv6(icmp)), _) => before(icmp.slice()) + icmp_headers(icmp.slice()),
        (_, Some(LaxNetSlice::Arp(arp))) => before(arp.slice()) + ARP,
        (_, Some(net)) => net.ip_payload_ref().map_or(ETHERNET, |payload| before(payload.payload)),
        (_, None) => packet.link_exts.iter().map(LaxLinkExtSlice::header_len).sum::<usize>() + ETHERNET,
    }
}

/// Bytes of an ICMP message's header. Neighbour discovery has no payload (RFC 4861 §4).
fn icmp_headers(message: &[u8]) -> usize {
    if matches!(message.first(), Some(133..=137)) { message.len() } else { ICMP }
}

/// The bytes after the headers.
#[must_use]
pub fn payload(bytes: &[u8]) -> &[u8] {
    bytes.get(headers(bytes).len()..).unwrap_or_default()
}

/// Addresses, ports and flags in one line.
#[must_use]
pub fn words(bytes: &[u8]) -> String {
    let Ok(packet) = LaxSlicedPacket::from_ethernet(bytes) else {
        return "less than an Ethernet header".into();
    };
    let mut text = String::new();
    for tag in &packet.link_exts {
        if let LaxLinkExtSlice::Vlan(vlan) = tag {
            _ = write!(text, "vlan {} ", vlan.vlan_identifier().value());
        }
    }
    text.push_str(&match &packet.net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            let header = ip.header();
            let (from, to) = (header.source_addr().into(), header.destination_addr().into());
            let length = usize::from(header.total_len()).saturating_sub(header.slice().len());
            above(from, to, length, ip.is_payload_fragmented(), &packet)
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            let header = ip.header();
            let (from, to) = (header.source_addr().into(), header.destination_addr().into());
            above(from, to, usize::from(header.payload_length()), ip.is_payload_fragmented(), &packet)
        }
        Some(LaxNetSlice::Arp(arp)) => address_resolution(arp),
        None => packet
            .ether_payload()
            .map_or_else(String::new, |it| format!("ethertype {:#06x}", it.ether_type.0)),
    });
    text
}

fn address_resolution(arp: &etherparse::ArpPacketSlice<'_>) -> String {
    let v4 = |address: &[u8]| {
        address.first_chunk::<4>().map_or_else(|| "?".into(), |it| IpAddr::from(*it).to_string())
    };
    let (sender, target) = (v4(arp.sender_protocol_addr()), v4(arp.target_protocol_addr()));
    match arp.operation().0 {
        1 => format!("arp who has {target}? tell {sender}"),
        2 => format!("arp {sender} is here"),
        other => format!("arp operation {other}"),
    }
}

/// Describes the content of an IP packet of `length` bytes.
fn above(from: IpAddr, to: IpAddr, length: usize, fragment: bool, packet: &LaxSlicedPacket<'_>) -> String {
    let pair = |source: u16, destination: u16| match from {
        IpAddr::V4(_) => format!("{from}:{source} → {to}:{destination}"),
        IpAddr::V6(_) => format!("[{from}]:{source} → [{to}]:{destination}"),
    };
    match &packet.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            let length = length.saturating_sub(tcp.header_slice().len());
            format!("{} {}", pair(tcp.source_port(), tcp.destination_port()), segment(tcp, length))
        }
        Some(TransportSlice::Udp(udp)) => {
            let length = udp.length().saturating_sub(8);
            format!("{} udp {length}", pair(udp.source_port(), udp.destination_port()))
        }
        Some(TransportSlice::Icmpv4(icmp)) => {
            format!("{from} → {to} icmp {}/{}", icmp.type_u8(), icmp.code_u8())
        }
        Some(TransportSlice::Icmpv6(icmp)) => {
            let what = match icmp.type_u8() {
                135 => "neighbour solicitation".into(),
                136 => "neighbour advertisement".into(),
                other => format!("icmp6 {other}/{}", icmp.code_u8()),
            };
            format!("{from} → {to} {what}")
        }
        Some(TransportSlice::Igmp(_)) => format!("{from} → {to} igmp"),
        None => {
            let number =
                packet.net.as_ref().and_then(LaxNetSlice::ip_payload_ref).map_or(0, |it| it.ip_number.0);
            let fragment = if fragment { " fragment" } else { "" };
            format!("{from} → {to} protocol {number}{fragment}")
        }
    }
}

fn segment(tcp: &TcpSlice<'_>, length: usize) -> String {
    let flags = [
        (tcp.syn(), "SYN"),
        (tcp.fin(), "FIN"),
        (tcp.rst(), "RST"),
        (tcp.psh(), "PSH"),
        (tcp.ack(), "ACK"),
        (tcp.urg(), "URG"),
    ];
    let set: Vec<_> = flags.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
    let flags = if set.is_empty() { "no flags".into() } else { set.join(" ") };
    let (sequence, window) = (tcp.sequence_number(), tcp.window_size());
    format!("{flags} seq {sequence} ack {} win {window} len {length}", tcp.acknowledgment_number())
}

#[cfg(test)]
mod tests {
    use super::{headers, payload, words};
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    const GUEST: [u8; 4] = [10, 0, 0, 5];
    const SERVED: [u8; 4] = [169, 254, 169, 254];
    const SERVED_V6: [u8; 16] = [0xfd, 0, 0x0e, 0xc2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0x54];

    fn built(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut frame = Vec::new();
        write(&mut frame);
        frame
    }

    fn arp() -> Vec<u8> {
        let mut frame = vec![0xff; 6];
        frame.extend([2; 6]);
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([2; 6]);
        frame.extend(GUEST);
        frame.extend([0; 6]);
        frame.extend(SERVED);
        frame
    }

    #[test]
    fn a_frame_is_described_in_a_line_and_split_from_its_payload() {
        let ethernet = || PacketBuilder::ethernet2([2; 6], [4; 6]);
        let vlan = || ethernet().single_vlan(7.try_into().expect("a VLAN"));
        let data = b"secret";
        let cases = [
            (
                built(|frame| {
                    ethernet()
                        .ipv4(GUEST, SERVED, 64)
                        .tcp(40_000, 80, 7, 512)
                        .syn()
                        .write(frame, &[])
                        .expect("a frame")
                }),
                54,
                "10.0.0.5:40000 → 169.254.169.254:80 SYN seq 7 ack 0 win 512 len 0",
            ),
            (
                built(|frame| {
                    vlan()
                        .ipv4(GUEST, SERVED, 64)
                        .tcp(1, 80, 7, 512)
                        .psh()
                        .ack(9)
                        .write(frame, data)
                        .expect("a frame")
                }),
                58,
                "vlan 7 10.0.0.5:1 → 169.254.169.254:80 PSH ACK seq 7 ack 9 win 512 len 6",
            ),
            (
                built(|frame| {
                    ethernet().ipv6(SERVED_V6, SERVED_V6, 64).udp(1, 53).write(frame, data).expect("a frame")
                }),
                62,
                "[fd00:ec2::254]:1 → [fd00:ec2::254]:53 udp 6",
            ),
            (
                built(|frame| {
                    ethernet()
                        .ipv4(GUEST, SERVED, 64)
                        .icmpv4_echo_request(1, 2)
                        .write(frame, data)
                        .expect("a frame")
                }),
                42,
                "10.0.0.5 → 169.254.169.254 icmp 8/0",
            ),
            (arp(), 42, "arp who has 169.254.169.254? tell 10.0.0.5"),
            ([&[2; 12][..], &[0x88, 0xb5], &data[..]].concat(), 14, "ethertype 0x88b5"),
            (vec![1; 5], 5, "less than an Ethernet header"),
        ];
        for (frame, head, text) in cases {
            assert_eq!(words(&frame), text);
            assert_eq!(headers(&frame).len(), head, "{text}");
            assert_eq!(payload(&frame).len(), frame.len() - head, "{text}");
        }
    }

    #[test]
    fn a_cut_frame_is_described_with_its_whole_length() {
        let whole = built(|frame| {
            let tcp =
                PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4(GUEST, SERVED, 64).tcp(1, 80, 7, 512).ack(1);
            tcp.write(frame, &[0; 1_000]).expect("a frame");
        });
        assert!(words(&whole[..256]).ends_with("len 1000"), "{}", words(&whole[..256]));
        assert_eq!(headers(&whole[..256]).len(), 54);
    }

    proptest! {
        #[test]
        fn whatever_a_guest_sends_can_be_told(bytes in proptest::collection::vec(any::<u8>(), 0..256), kind in 0_usize..5) {
            let mut bytes = bytes;
            let types: [[u8; 2]; 5] = [[8, 0], [0x86, 0xdd], [8, 6], [0x81, 0], [0x88, 0xa8]];
            if let Some(place) = bytes.get_mut(12..14) {
                place.copy_from_slice(&types[kind]);
            }
            if let Some(version) = bytes.get_mut(14) {
                *version = if kind == 1 { 0x60 } else { 0x45 };
            }
            prop_assert!(words(&bytes).len() < 300, "a line stays one");
            prop_assert_eq!([headers(&bytes), payload(&bytes)].concat(), bytes);
        }
    }
}
