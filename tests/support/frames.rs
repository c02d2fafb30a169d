//! Frames of a guest by name, with the verdict that each must get.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::checksum;
use metadata_common::classify::ServedAddresses;
use metadata_common::mac::Mac;
use metadata_common::verdict::Verdict::{self, *};
use metadata_common::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol, tcp};

/// The guest that sends.
pub const GUEST: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);
/// The destination of its frames, such as its gateway.
pub const GATEWAY: Mac = Mac([0x52, 0x54, 0x00, 0x00, 0x00, 0xfe]);
/// The IPv4 address served.
pub const SERVED_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The IPv6 address served.
pub const SERVED_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe);
/// An IPv4 address for which only ARP is answered.
pub const NEXT_HOP: Ipv4Addr = Ipv4Addr::new(62, 210, 0, 1);
/// An IPv4 address that is not served.
pub const OTHER_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// An IPv6 address that is not served.
pub const OTHER_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
/// The solicited-node multicast group of [`SERVED_V6`] (RFC 4291 §2.7.1).
pub const SOLICITED: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xfffe, 0xa9fe);

/// Length of the shortest frame, without the check sequence (IEEE 802.3-2022 §4.2.3.3).
const MIN_FRAME: usize = 60;

/// Serves [`SERVED_V4`] and [`SERVED_V6`], and answers ARP for [`NEXT_HOP`].
#[derive(Debug)]
pub struct Both;

impl ServedAddresses for Both {
    fn serves_v4(&self, address: [u8; 4]) -> bool {
        address == SERVED_V4.octets()
    }

    fn serves_v6(&self, address: [u8; 16]) -> bool {
        address == SERVED_V6.octets()
    }

    fn answers_arp(&self, address: [u8; 4]) -> bool {
        address == NEXT_HOP.octets() || self.serves_v4(address)
    }
}

/// A frame and its verdict.
#[derive(Debug)]
pub struct Case {
    /// The frame's name.
    pub name: &'static str,
    /// The frame, from the destination MAC on.
    pub frame: Vec<u8>,
    /// The verdict that it must get from `port`.
    pub verdict: Verdict,
}

/// An Ethernet frame from [`GUEST`] to [`GATEWAY`] with these VLAN tags, padded to the shortest length.
#[must_use]
pub fn frame(tags: &[u16], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [GATEWAY.0, GUEST.0].concat();
    for tag in tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 7]);
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    frame.resize(frame.len().max(MIN_FRAME), 0);
    frame
}

/// An ARP request for an address.
#[must_use]
pub fn arp_request(target: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0; arp::LEN];
    packet[..6].copy_from_slice(&arp::ETHERNET_IPV4);
    packet[arp::OPERATION + 1] = 1;
    packet[arp::SENDER_MAC..arp::SENDER_IP].copy_from_slice(&GUEST.0);
    packet[arp::SENDER_IP..arp::TARGET_MAC].copy_from_slice(&[10, 0, 2, 15]);
    packet[arp::TARGET_IP..].copy_from_slice(&target.octets());
    packet
}

/// An IPv4 datagram with its header checksum (RFC 1071) and 20 bytes of payload.
#[must_use]
pub fn datagram(destination: Ipv4Addr, protocol: u8) -> Vec<u8> {
    let mut packet = vec![0; ipv4::HEADER + 20];
    packet[0] = ipv4::VERSION_IHL;
    packet[ipv4::TOTAL_LENGTH + 1] = 40;
    packet[ipv4::TTL] = 64;
    packet[ipv4::PROTOCOL] = protocol;
    packet[ipv4::SOURCE..ipv4::DESTINATION].copy_from_slice(&[10, 0, 2, 15]);
    packet[ipv4::DESTINATION..ipv4::HEADER].copy_from_slice(&destination.octets());
    let words = packet[..ipv4::HEADER].chunks_exact(2);
    let sum: u32 = words.map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    packet[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&checksum.to_be_bytes());
    packet
}

/// A SYN to a port over IPv4.
#[must_use]
pub fn syn(destination: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut packet = datagram(destination, protocol::TCP);
    packet[ipv4::HEADER + 2..ipv4::HEADER + 4].copy_from_slice(&port.to_be_bytes());
    packet[ipv4::HEADER + 12..ipv4::HEADER + 14].copy_from_slice(&[0x50, 0x02]);
    summed(packet, ethernet::IPV4)
}

/// The TCP options of a Linux guest's SYN: segments of 1460 bytes, SACK, timestamps, windows shifted by 7.
const OFFERS: [u8; 20] = [2, 4, 0x05, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];

/// A segment without payload from port 40,000 to port 80 over IPv4. A SYN has the options of Linux.
#[must_use]
pub fn tcp(destination: Ipv4Addr, flags: u8) -> Vec<u8> {
    let segment = segment(flags);
    let mut packet = datagram(destination, protocol::TCP);
    packet.truncate(ipv4::HEADER);
    // Each byte of length reduces the checksum by one.
    let more = segment.len() as u16 - 20;
    let checksum = u16::from_be_bytes([packet[ipv4::CHECKSUM], packet[ipv4::CHECKSUM + 1]]);
    packet[ipv4::TOTAL_LENGTH + 1] += more as u8;
    packet[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&(checksum - more).to_be_bytes());
    packet.extend(segment);
    summed(packet, ethernet::IPV4)
}

/// Like [`tcp()`], over IPv6.
#[must_use]
pub fn tcp6(destination: Ipv6Addr, flags: u8) -> Vec<u8> {
    let segment = segment(flags);
    let mut packet = datagram6(destination, protocol::TCP);
    packet.truncate(ipv6::HEADER);
    packet[ipv6::PAYLOAD_LENGTH + 1] = segment.len() as u8;
    packet.extend(segment);
    summed(packet, ethernet::IPV6)
}

fn segment(flags: u8) -> Vec<u8> {
    let options: &[u8] = if flags & tcp::SYN != 0 { &OFFERS } else { &[] };
    let offset = ((tcp::HEADER + options.len()) as u8 / 4) << 4;
    let mut segment = [40_000u16.to_be_bytes(), 80u16.to_be_bytes()].concat();
    segment.extend([1_000u32.to_be_bytes(), 5_000u32.to_be_bytes()].concat());
    segment.extend([offset, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(options);
    segment
}

/// A neighbour solicitation that carries its sender's MAC, as hosts send it.
#[must_use]
pub fn introduced(destination: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let mut packet = solicitation(destination, target);
    packet[ipv6::PAYLOAD_LENGTH + 1] += 8;
    packet.extend([1, 1]);
    packet.extend(GUEST.0);
    summed(packet, ethernet::IPV6)
}

/// An IPv6 datagram with 24 bytes of payload.
#[must_use]
pub fn datagram6(destination: Ipv6Addr, next_header: u8) -> Vec<u8> {
    let mut packet = vec![0; ipv6::HEADER + neighbour::LEN];
    packet[0] = ipv6::VERSION << 4;
    packet[ipv6::PAYLOAD_LENGTH + 1] = 24;
    packet[ipv6::NEXT_HEADER] = next_header;
    packet[ipv6::HOP_LIMIT] = neighbour::HOP_LIMIT;
    packet[ipv6::SOURCE..ipv6::SOURCE + 2].copy_from_slice(&[0xfe, 0x80]);
    packet[ipv6::DESTINATION..ipv6::HEADER].copy_from_slice(&destination.octets());
    packet
}

/// A neighbour solicitation to a multicast group or a host.
#[must_use]
pub fn solicitation(destination: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let mut packet = datagram6(destination, protocol::ICMPV6);
    packet[ipv6::HEADER] = neighbour::SOLICITATION;
    packet[ipv6::HEADER + neighbour::TARGET..].copy_from_slice(&target.octets());
    summed(packet, ethernet::IPV6)
}

/// The packet with a complete checksum of its payload.
fn summed(packet: Vec<u8>, ethertype: u16) -> Vec<u8> {
    let mut frame = [&[0; 12][..], &ethertype.to_be_bytes(), &packet].concat();
    checksum::complete(&mut frame);
    frame.split_off(ethernet::HEADER)
}

/// The packet with the bytes at `offset` replaced. Its checksums do not change.
#[must_use]
pub fn with(mut packet: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    packet[offset..offset + bytes.len()].copy_from_slice(bytes);
    packet
}

/// A frame for the metadata service, which `port` always steers.
#[must_use]
pub fn known_good() -> Vec<u8> {
    frame(&[], ethernet::IPV4, &syn(SERVED_V4, 80))
}

/// Every kind of frame that the policy distinguishes, from a registered guest on a registered port.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut cases = arp_cases();
    cases.extend(ipv4_cases());
    cases.extend(ipv6_cases());
    cases.extend(ethernet_cases());
    cases
}

fn rows(ethertype: u16, rows: impl IntoIterator<Item = (&'static str, Vec<u8>, Verdict)>) -> Vec<Case> {
    let case = |(name, packet, verdict): (_, Vec<u8>, _)| Case {
        name,
        frame: frame(&[], ethertype, packet.as_slice()),
        verdict,
    };
    rows.into_iter().map(case).collect()
}

fn arp_cases() -> Vec<Case> {
    let ours = arp_request(SERVED_V4);
    rows(
        ethernet::ARP,
        [
            ("arp_request", ours.clone(), SteerArp),
            ("arp_probe", with(ours.clone(), arp::SENDER_IP, &[0; 4]), SteerArp),
            ("arp_reply", with(ours.clone(), arp::OPERATION, &[0, 2]), SteerArp),
            ("arp_for_gateway", arp_request(OTHER_V4), PassArp),
            ("arp_for_next_hop", arp_request(NEXT_HOP), SteerArp),
            (
                "arp_sender_is_served",
                with(arp_request(OTHER_V4), arp::SENDER_IP, &[169, 254, 169, 254]),
                DropArpClaim,
            ),
            ("arp_announcement", with(ours.clone(), arp::SENDER_IP, &[169, 254, 169, 254]), DropArpClaim),
            ("arp_ieee_802", with(ours.clone(), 1, &[6]), DropArpFormat),
            ("arp_hardware_not_ethernet", with(ours.clone(), 1, &[32]), PassArpFormat),
            ("arp_protocol_not_ipv4", with(ours.clone(), 2, &[0x86, 0xdd]), PassArpFormat),
            ("arp_address_lengths", with(ours, 4, &[8, 16]), PassArpFormat),
        ],
    )
}

fn ipv4_cases() -> Vec<Case> {
    let ours = syn(SERVED_V4, 80);
    let set = |offset, bytes: &[u8]| with(ours.clone(), offset, bytes);
    rows(
        ethernet::IPV4,
        [
            ("ipv4_syn", ours.clone(), SteerIpv4Tcp),
            ("ipv4_syn_other_port", syn(SERVED_V4, 22), SteerIpv4Tcp),
            ("ipv4_icmp", datagram(SERVED_V4, protocol::ICMP), SteerIpv4Icmp),
            ("ipv4_udp", datagram(SERVED_V4, protocol::UDP), DropIpv4Udp),
            ("ipv4_sctp", datagram(SERVED_V4, 132), DropIpv4Protocol),
            ("ipv4_in_ipv4", datagram(SERVED_V4, 4), DropIpv4Protocol),
            ("ipv4_options", set(0, &[0x46]), DropIpv4Options),
            ("ipv4_longest_options", set(0, &[0x4f]), DropIpv4Options),
            ("ipv4_short_header", set(0, &[0x44]), DropIpv4Malformed),
            ("ipv4_wrong_version", set(0, &[0x65]), DropIpv4Malformed),
            ("ipv4_dont_fragment", set(ipv4::FRAGMENT, &[0x40, 0]), SteerIpv4Tcp),
            ("ipv4_first_fragment", set(ipv4::FRAGMENT, &[0x20, 0]), DropIpv4Fragment),
            ("ipv4_last_fragment", set(ipv4::FRAGMENT, &[0, 1]), DropIpv4Fragment),
            ("ipv4_bad_checksum", set(ipv4::CHECKSUM, &[0, 0]), SteerIpv4Tcp),
            ("ipv4_linux_syn", tcp(SERVED_V4, tcp::SYN), SteerIpv4Tcp),
            ("ipv4_ack", tcp(SERVED_V4, tcp::ACK), SteerIpv4Tcp),
            ("ipv4_fin", tcp(SERVED_V4, tcp::FIN | tcp::ACK), SteerIpv4Tcp),
            ("ipv4_elsewhere", syn(OTHER_V4, 80), PassIpv4),
            ("ipv4_next_hop", syn(NEXT_HOP, 80), PassIpv4),
            ("ipv4_next_hop_icmp", datagram(NEXT_HOP, protocol::ICMP), PassIpv4),
            ("ipv4_next_hop_udp", datagram(NEXT_HOP, protocol::UDP), PassIpv4),
            ("ipv4_neighbouring_address", syn(Ipv4Addr::new(169, 254, 169, 253), 80), PassIpv4),
            ("ipv4_broadcast", datagram(Ipv4Addr::BROADCAST, protocol::UDP), PassIpv4),
            (
                "ipv4_source_is_served",
                with(syn(OTHER_V4, 80), ipv4::SOURCE, &[169, 254, 169, 254]),
                DropSourceClaim,
            ),
            ("ipv4_loose_route", optioned([131, 7, 4, 169, 254, 169, 254, 0]), DropIpv4SourceRoute),
            ("ipv4_strict_route", optioned([1, 137, 7, 4, 169, 254, 169, 254]), DropIpv4SourceRoute),
            ("ipv4_route_elsewhere", optioned([131, 7, 4, 10, 0, 2, 2, 0]), PassIpv4),
            ("ipv4_record_of_route", optioned([7, 7, 4, 169, 254, 169, 254, 0]), PassIpv4),
        ],
    )
}

/// The datagram with one extension header of `8 + 8 * units` bytes.
fn behind(kind: u8, units: u8, packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let mut header = vec![0; 8 + 8 * usize::from(units)];
    header[..2].copy_from_slice(&[packet[ipv6::NEXT_HEADER], units]);
    packet[ipv6::NEXT_HEADER] = kind;
    packet.splice(ipv6::HEADER..ipv6::HEADER, header).for_each(drop);
    packet
}

/// A datagram to another address, with a routing header of this many addresses that ends with `last`.
fn routed(stations: u8, last: Ipv6Addr) -> Vec<u8> {
    let packet = behind(protocol::ROUTING, 2 * stations, &datagram6(OTHER_V6, protocol::TCP));
    with(packet, ipv6::HEADER + 8 + 16 * usize::from(stations - 1), &last.octets())
}

/// A datagram to another address with these bytes as IPv4 options.
fn optioned(options: [u8; 8]) -> Vec<u8> {
    let mut packet = syn(OTHER_V4, 80);
    packet[0] += 2;
    packet.splice(ipv4::HEADER..ipv4::HEADER, options).for_each(drop);
    packet
}

fn ipv6_cases() -> Vec<Case> {
    let ours = solicitation(SOLICITED, SERVED_V6);
    let elsewhere6 = datagram6(OTHER_V6, protocol::TCP);
    let jumbo = behind(protocol::HOP_BY_HOP, 0, &datagram6(SERVED_V6, protocol::TCP));
    let translated = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0xa9fe, 0xa9fe);
    rows(
        ethernet::IPV6,
        [
            ("nd_solicitation", ours.clone(), SteerNeighbour),
            ("nd_solicitation_of_a_host", introduced(SOLICITED, SERVED_V6), SteerNeighbour),
            ("nd_unicast_solicitation", solicitation(SERVED_V6, SERVED_V6), SteerIpv6Icmp),
            ("nd_for_gateway", solicitation(SOLICITED, OTHER_V6), PassIpv6),
            ("nd_forwarded", with(ours.clone(), ipv6::HOP_LIMIT, &[254]), DropNeighbourInvalid),
            ("nd_code", with(ours.clone(), ipv6::HEADER + neighbour::CODE, &[1]), DropNeighbourInvalid),
            ("nd_advertisement", with(ours.clone(), ipv6::HEADER, &[136]), DropNeighbourClaim),
            (
                "nd_from_served",
                with(solicitation(SOLICITED, OTHER_V6), ipv6::SOURCE, &SERVED_V6.octets()),
                DropNeighbourClaim,
            ),
            ("nd_behind_options", behind(protocol::DESTINATION_OPTIONS, 0, &ours), DropIpv6Extension),
            (
                "ipv6_from_served",
                with(elsewhere6.clone(), ipv6::SOURCE, &SERVED_V6.octets()),
                DropSourceClaim,
            ),
            ("ipv6_routed", routed(1, SERVED_V6), DropIpv6Routing),
            ("ipv6_routed_last", routed(4, SERVED_V6), DropIpv6Routing),
            ("ipv6_routed_elsewhere", routed(4, OTHER_V6), PassIpv6),
            ("ipv6_routed_far", routed(ipv6::MAX_SEGMENTS as u8 + 1, OTHER_V6), DropIpv6Routing),
            ("ipv6_options_elsewhere", behind(protocol::HOP_BY_HOP, 0, &elsewhere6), PassIpv6),
            ("ipv6_esp", datagram6(SERVED_V6, protocol::ESP), DropIpv6Extension),
            ("ipv6_ah", datagram6(SERVED_V6, protocol::AH), DropIpv6Extension),
            ("ipv6_jumbogram", with(jumbo, ipv6::PAYLOAD_LENGTH, &[0, 0]), DropIpv6Extension),
            ("ipv6_translated", datagram6(translated, protocol::TCP), DropTranslated),
            ("ipv6_mapped", datagram6(SERVED_V4.to_ipv6_mapped(), protocol::TCP), DropTranslated),
            ("ipv6_translated_elsewhere", datagram6(OTHER_V4.to_ipv6_mapped(), protocol::TCP), PassIpv6),
            ("ipv6_tcp", datagram6(SERVED_V6, protocol::TCP), SteerIpv6Tcp),
            ("ipv6_linux_syn", tcp6(SERVED_V6, tcp::SYN), SteerIpv6Tcp),
            ("ipv6_fin", tcp6(SERVED_V6, tcp::FIN | tcp::ACK), SteerIpv6Tcp),
            ("ipv6_icmp", datagram6(SERVED_V6, protocol::ICMPV6), SteerIpv6Icmp),
            ("ipv6_udp", datagram6(SERVED_V6, protocol::UDP), DropIpv6Udp),
            ("ipv6_sctp", datagram6(SERVED_V6, 132), DropIpv6Protocol),
            ("ipv6_fragment", datagram6(SERVED_V6, protocol::FRAGMENT), DropIpv6Fragment),
            ("ipv6_hop_by_hop", datagram6(SERVED_V6, protocol::HOP_BY_HOP), DropIpv6Extension),
            ("ipv6_routing", datagram6(SERVED_V6, protocol::ROUTING), DropIpv6Extension),
            ("ipv6_destination_options", datagram6(SERVED_V6, 60), DropIpv6Extension),
            ("ipv6_wrong_version", with(datagram6(SERVED_V6, protocol::TCP), 0, &[0x45]), DropIpv6Malformed),
            ("ipv6_elsewhere", datagram6(OTHER_V6, protocol::TCP), PassIpv6),
            ("ipv6_router_solicitation", with(datagram6(OTHER_V6, 58), ipv6::HEADER, &[133]), PassIpv6),
        ],
    )
}

/// A frame with a length in place of the type. The type is in the LLC and SNAP header.
fn snap(tags: &[u16], organisation: u8, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut payload = vec![0xaa, 0xaa, 0x03, 0, 0, organisation];
    payload.extend(ethertype.to_be_bytes());
    payload.extend(packet);
    frame(tags, payload.len() as u16, &payload)
}

fn ethernet_cases() -> Vec<Case> {
    let tcp = syn(SERVED_V4, 80);
    let group = |packet: &[u8], ethertype| with(frame(&[], ethertype, packet), 0, &[0x33]);
    let ns = solicitation(SOLICITED, SERVED_V6);
    let (v4, v6) = (ethernet::IPV4, ethernet::IPV6);
    let cut = |frame: Vec<u8>, len| frame[..len].to_vec();
    let table = [
        ("vlan_tcp", frame(&[0x8100], v4, &tcp), DropVlan),
        ("vlan_service_tag", frame(&[0x88a8], v4, &tcp), DropVlan),
        ("vlan_two_tags", frame(&[0x88a8, 0x8100], v4, &tcp), DropVlan),
        ("vlan_arp", frame(&[0x8100], ethernet::ARP, &arp_request(SERVED_V4)), DropVlan),
        ("vlan_nd", frame(&[0x8100], v6, &ns), DropVlan),
        ("vlan_ipv6", frame(&[0x8100, 0x8100], v6, &datagram6(SERVED_V6, protocol::TCP)), DropVlan),
        ("vlan_elsewhere", frame(&[0x8100], v4, &syn(OTHER_V4, 80)), PassVlan),
        ("vlan_three_tags", frame(&[0x8100; 3], v4, &tcp), DropVlan),
        ("vlan_most_tags", frame(&[0x8100; ethernet::MAX_TAGS], v4, &tcp), DropVlan),
        ("vlan_mixed_tags", frame(&[0x9100, 0x88a8, 0x8100], v6, &ns), DropVlan),
        ("vlan_too_many_tags", frame(&[0x8100; ethernet::MAX_TAGS + 1], v4, &tcp), DropVlanDepth),
        ("vlan_too_many_tags_elsewhere", frame(&[0x88a8; 9], v4, &syn(OTHER_V4, 80)), DropVlanDepth),
        ("vlan_arp_for_next_hop", frame(&[0x8100], ethernet::ARP, &arp_request(NEXT_HOP)), PassVlan),
        ("snap_tcp", snap(&[], 0, v4, &tcp), DropSnap),
        ("snap_bridge_tunnel", snap(&[], 0xf8, v4, &tcp), DropSnap),
        ("snap_arp", snap(&[], 0, ethernet::ARP, &arp_request(SERVED_V4)), DropSnap),
        ("snap_nd", snap(&[0x8100, 0x8100], 0, v6, &ns), DropSnap),
        ("snap_elsewhere", snap(&[], 0, v4, &syn(OTHER_V4, 80)), PassEthertype),
        ("snap_tagged_elsewhere", snap(&[0x8100], 0, v4, &syn(OTHER_V4, 80)), PassVlan),
        ("group_ipv4", group(&tcp, v4), DropGroupDestination),
        ("group_ipv6", group(&datagram6(SERVED_V6, protocol::TCP), v6), DropGroupDestination),
        ("group_nd", group(&ns, v6), SteerNeighbour),
        ("group_arp", group(&arp_request(SERVED_V4), ethernet::ARP), SteerArp),
        ("lldp", frame(&[], 0x88cc, &[0; 46]), PassEthertype),
        ("llc", frame(&[], 46, &[0xaa; 46]), PassEthertype),
        ("cut_after_ethernet", cut(frame(&[], v4, &tcp), 14), PassTruncated),
        ("cut_in_tag", cut(frame(&[0x8100], v4, &tcp), 17), PassTruncated),
        ("cut_in_arp_target", cut(frame(&[], ethernet::ARP, &arp_request(SERVED_V4)), 41), PassTruncated),
        ("cut_in_ipv4_destination", cut(frame(&[], v4, &tcp), 33), PassTruncated),
        ("cut_after_ipv4_header", cut(frame(&[], v4, &tcp), 34), SteerIpv4Tcp),
        ("cut_in_ipv6_destination", cut(frame(&[], v6, &datagram6(SERVED_V6, 6)), 53), PassTruncated),
        ("cut_in_nd_target", cut(frame(&[], v6, &ns), 77), PassTruncated),
        ("cut_after_nd_target", cut(frame(&[], v6, &ns), 78), SteerNeighbour),
    ];
    table.map(|(name, frame, verdict)| Case { name, frame, verdict }).into()
}
