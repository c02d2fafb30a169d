//! Indirect ways to a served address, and claims to own one. An indirect way would reach a neighbour that has the
//! address; a claim would make a neighbour send its requests to the guest.

use std::net::{Ipv4Addr, Ipv6Addr};

use metadata_common::mac::Mac;
use metadata_common::verdict::Verdict::{self, *};
use metadata_common::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol, snap};
use support::arena::Case;
use support::frames::{self, OTHER_V4, OTHER_V6, SERVED_V4, SERVED_V6, SOLICITED, with};

use super::node::{
    altered, datagram6, frame, mac, served_v4, served_v6, syn, syn6, to_all_v4, to_all_v6, v4, v6,
    with_options,
};

const CUSTOMER: u16 = ethernet::CUSTOMER_TAG;
const SERVICE: u16 = ethernet::SERVICE_TAG;
const OLD: u16 = ethernet::OLD_SERVICE_TAG;
/// Values of the length field, including the maximum (IEEE 802.3-2022 §3.2.6).
const LENGTHS: [u16; 3] = [0, 46, 1_500];
/// A value between the maximum length and the first type, 0x0600. Linux treats it as a length (`eth_proto_is_802_3`,
/// `include/linux/etherdevice.h`).
const NEITHER: u16 = 0x05ff;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = tags();
    cases.extend(lengths());
    cases.extend(claims());
    cases.extend(routes());
    cases.extend(extensions());
    cases
}

fn tags() -> Vec<Case> {
    let behind = |tags: &[u16]| {
        vec![
            frame(tags, ethernet::IPV4, &syn(SERVED_V4, 80)),
            frame(tags, ethernet::IPV6, &syn6(SERVED_V6, 80)),
            frame(tags, ethernet::ARP, &request(SERVED_V4)),
        ]
    };
    let mut cases: Vec<Case> = (3..=ethernet::MAX_TAGS)
        .map(|count| Case::of(format!("{count} tags"), behind(&vec![CUSTOMER; count]), DropVlan))
        .collect();
    let most = ethernet::MAX_TAGS;
    cases.extend([
        Case::of("more tags than are parsed", behind(&vec![CUSTOMER; most + 1]), DropVlanDepth),
        Case::of("far more tags", behind(&[SERVICE; 40]), DropVlanDepth),
        Case::of("an old service tag", behind(&[OLD]), DropVlan),
        Case::of("tags of every kind", behind(&[SERVICE, OLD, CUSTOMER, OLD]), DropVlan),
    ]);
    cases
}

/// A packet behind a length field, LLC and SNAP.
fn behind_a_length(tags: &[u16], length: u16, llc: [u8; 6], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    frame(tags, length, &[&llc[..], &ethertype.to_be_bytes(), packet].concat())
}

fn lengths() -> Vec<Case> {
    let packets = |tags: &[u16], length: u16, llc: [u8; 6]| {
        vec![
            behind_a_length(tags, length, llc, ethernet::IPV4, &syn(SERVED_V4, 80)),
            behind_a_length(tags, length, llc, ethernet::IPV6, &syn6(SERVED_V6, 80)),
            behind_a_length(tags, length, llc, ethernet::ARP, &request(SERVED_V4)),
        ]
    };
    let mut cases: Vec<Case> = LENGTHS
        .iter()
        .map(|length| {
            Case::of(
                format!("llc and snap behind a length of {length}"),
                packets(&[], *length, snap::RFC1042),
                DropSnap,
            )
        })
        .collect();
    let neither = packets(&[], NEITHER, snap::RFC1042);
    cases.extend([
        // The policy does not parse this frame further. No standard defines it, and Linux accepts no IP behind SNAP.
        Case::of("snap behind neither length nor type", neither, PassEthertype).leaving(3),
        Case::of("snap as bridges write it", packets(&[], 46, snap::BRIDGE_TUNNEL), DropSnap),
        Case::of("snap behind a tag", packets(&[CUSTOMER], 46, snap::RFC1042), DropSnap),
        Case::of("snap behind two tags", packets(&[SERVICE, CUSTOMER], 46, snap::RFC1042), DropSnap),
        Case::of(
            "snap around another address",
            vec![behind_a_length(&[], 46, snap::RFC1042, ethernet::IPV4, &syn(OTHER_V4, 80))],
            PassEthertype,
        )
        .leaving(1),
    ]);
    cases
}

fn request(target: Ipv4Addr) -> Vec<u8> {
    with(frames::arp_request(target), arp::SENDER_MAC, &mac().0)
}

fn claims() -> Vec<Case> {
    let arp = |packet: Vec<u8>| with(frame(&[], ethernet::ARP, &packet), 0, &Mac::BROADCAST.0);
    let from = |address: Ipv4Addr, target: Ipv4Addr, operation: u8| {
        let packet = with(request(target), arp::SENDER_IP, &address.octets());
        arp(with(packet, arp::OPERATION, &[0, operation]))
    };
    let all = |make: &dyn Fn(Ipv4Addr) -> Vec<u8>| served_v4().into_iter().map(make).collect::<Vec<_>>();
    let advertisement = |source: Ipv6Addr, target: Ipv6Addr| {
        let packet = frames::solicitation(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), target);
        let packet = with(packet, ipv6::HEADER, &[neighbour::ADVERTISEMENT]);
        v6(&with(packet, ipv6::SOURCE, &source.octets()))
    };
    let v6_from = |source: Ipv6Addr, packet: Vec<u8>| v6(&with(packet, ipv6::SOURCE, &source.octets()));
    let own = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x10);
    vec![
        Case::of("gratuitous arp requests", all(&|ours| from(ours, ours, 1)), DropArpClaim),
        Case::of("gratuitous arp replies", all(&|ours| from(ours, ours, 2)), DropArpClaim),
        Case::of("arp replies that claim", all(&|ours| from(ours, OTHER_V4, 2)), DropArpClaim),
        Case::of("arp requests that claim", all(&|ours| from(ours, OTHER_V4, 1)), DropArpClaim),
        Case::of(
            "advertisements of every address",
            served_v6().into_iter().map(|ours| advertisement(own, ours)).collect(),
            DropNeighbourClaim,
        ),
        Case::of(
            "advertisements from every address",
            served_v6().into_iter().map(|ours| advertisement(ours, OTHER_V6)).collect(),
            DropNeighbourClaim,
        ),
        Case::of(
            "solicitations from every address",
            served_v6()
                .into_iter()
                .map(|ours| v6_from(ours, frames::solicitation(SOLICITED, OTHER_V6)))
                .collect(),
            DropNeighbourClaim,
        ),
        Case::of(
            "router advertisements from a served address",
            vec![v6_from(SERVED_V6, datagram6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), 58, &[134; 16]))],
            DropNeighbourClaim,
        ),
        Case::of(
            "packets from every address",
            all(&|ours| v4(&altered(syn(OTHER_V4, 80), ipv4::SOURCE, &ours.octets()))),
            DropSourceClaim,
        ),
        Case::of(
            "packets from every v6 address",
            served_v6().into_iter().map(|ours| v6_from(ours, syn6(OTHER_V6, 80))).collect(),
            DropSourceClaim,
        ),
        Case::of(
            "packets from a served address to itself",
            to_all_v4(|ours| altered(syn(ours, 80), ipv4::SOURCE, &ours.octets())),
            DropSourceClaim,
        ),
    ]
}

/// A source route option (RFC 791 §3.1) whose pointer is at the first hop.
fn route(kind: u8, hops: &[Ipv4Addr]) -> Vec<u8> {
    let length = 3 + 4 * hops.len();
    let mut option = vec![kind, length as u8, 4];
    hops.iter().for_each(|hop| option.extend(hop.octets()));
    option.resize(length.next_multiple_of(4), 0);
    option
}

/// A routing header (RFC 8754 §2) with all segments left.
fn routing(kind: u8, next: u8, hops: &[Ipv6Addr]) -> Vec<u8> {
    let mut header = vec![next, 2 * hops.len() as u8, kind, hops.len() as u8, 0, 0, 0, 0];
    hops.iter().for_each(|hop| header.extend(hop.octets()));
    header
}

fn routes() -> Vec<Case> {
    let via = |kind: u8, hops: &[Ipv4Addr]| vec![v4(&with_options(&syn(OTHER_V4, 80), &route(kind, hops)))];
    let (loose, strict) = (ipv4::LOOSE_ROUTE, ipv4::STRICT_ROUTE);
    let gateway = Ipv4Addr::new(10, 0, 2, 9);
    let shifted = [&[1, 1, 1][..], &route(loose, &[SERVED_V4])].concat();
    let shifted = [&shifted[..], &[0, 0, 0, 0][..(4 - shifted.len() % 4) % 4]].concat();
    let case = |name: &str, frames| Case::of(name, frames, DropIpv4SourceRoute);
    let routed = |name: &str, frames| Case::of(name, frames, DropIpv6Routing);
    let tcp = syn6(OTHER_V6, 80)[ipv6::HEADER..].to_vec();
    let by = |kind: u8, hops: &[Ipv6Addr]| {
        let payload = [routing(kind, protocol::TCP, hops), tcp.clone()].concat();
        vec![v6(&datagram6(OTHER_V6, protocol::ROUTING, &payload))]
    };
    let elsewhere = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9);
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let behind = |count: usize| {
        let mut payload: Vec<u8> = (1..count).flat_map(|_| options(protocol::DESTINATION_OPTIONS)).collect();
        payload.extend(options(protocol::ROUTING));
        payload.extend(routing(4, protocol::TCP, &[SERVED_V6]));
        payload.extend(&tcp);
        vec![v6(&datagram6(OTHER_V6, protocol::DESTINATION_OPTIONS, &payload))]
    };
    vec![
        case("a loose route through a served address", via(loose, &[SERVED_V4])),
        case("a strict route through a served address", via(strict, &[SERVED_V4])),
        case("a served address at the end of a route", via(loose, &[gateway, gateway, SERVED_V4])),
        case("a served address in the middle of a route", via(strict, &[gateway, SERVED_V4, gateway])),
        case("a route behind padding", vec![v4(&with_options(&syn(OTHER_V4, 80), &shifted))]),
        Case::of(
            "a route to a served address",
            vec![v4(&with_options(&syn(SERVED_V4, 80), &route(loose, &[gateway])))],
            DropIpv4Options,
        ),
        Case::of("a route around served addresses", via(loose, &[gateway]), PassIpv4).leaving(1),
        routed("a routing header through a served address", by(0, &[SERVED_V6])),
        routed("a segment list with a served address", by(4, &[elsewhere, SERVED_V6, elsewhere])),
        routed("mobility to a served address", by(2, &[SERVED_V6])),
        routed("a routing header behind options", behind(1)),
        routed("a routing header behind unusually many options", behind(6)),
        routed("a routing header behind more headers than are parsed", behind(9)),
        Case::of("a routing header around served addresses", by(4, &[elsewhere]), PassIpv6).leaving(1),
    ]
}

/// An IPv6 address that embeds an IPv4 address.
fn standing_for(prefix: u128, shift: u32, address: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(prefix | u128::from(address.to_bits()) << shift)
}

fn extensions() -> Vec<Case> {
    let nat64 = 0x0064_ff9b_u128 << 96;
    let translations: [(&str, u128, u32); 4] = [
        ("translated", nat64, 0),
        ("mapped", 0xffff << 32, 0),
        ("compatible", 0, 0),
        ("6to4", 0x2002 << 112, 80),
    ];
    let mut cases: Vec<Case> = translations
        .into_iter()
        .map(|(name, prefix, shift)| {
            let to = |ours| v6(&syn6(standing_for(prefix, shift, ours), 80));
            Case::of(format!("{name} addresses"), served_v4().into_iter().map(to).collect(), DropTranslated)
        })
        .collect();
    let discovery = |kind: u8, verdict: Verdict, name: &str| {
        let message = with(frames::solicitation(SOLICITED, SERVED_V6)[ipv6::HEADER..].to_vec(), 0, &[kind]);
        let payload = [&[protocol::ICMPV6, 0, 1, 4, 0, 0, 0, 0][..], &message].concat();
        Case::of(name, vec![v6(&datagram6(SOLICITED, protocol::HOP_BY_HOP, &payload))], verdict)
    };
    cases.extend([
        discovery(neighbour::SOLICITATION, DropIpv6Extension, "a solicitation behind options"),
        discovery(neighbour::ADVERTISEMENT, DropNeighbourClaim, "an advertisement behind options"),
        Case::of(
            "udp to translated addresses",
            served_v4()
                .into_iter()
                .map(|ours| v6(&datagram6(standing_for(nat64, 0, ours), protocol::UDP, &[0; 8])))
                .collect(),
            DropTranslated,
        ),
        Case::of(
            "udp to every v6 address behind options",
            to_all_v6(|to| {
                datagram6(
                    to,
                    protocol::DESTINATION_OPTIONS,
                    &[&[protocol::UDP, 0, 1, 4, 0, 0, 0, 0][..], &[0; 8]].concat(),
                )
            }),
            DropIpv6Extension,
        ),
    ]);
    cases
}
