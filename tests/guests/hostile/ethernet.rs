//! Encapsulations of a packet for a served address, and frames that are not IP.

use metadata_base::addresses::SCALEWAY_NEXT_HOP;
use metadata_common::verdict::Verdict::{self, *};
use metadata_common::wire::{arp, ethernet, protocol};
use support::arena::{Case, Kind, Outcome};
use support::frames::{self, OTHER_V4, SERVED_V4, SERVED_V6, SOLICITED, with};

use super::make::{datagram, frame, mac, ping, served_v4, syn, syn6, v4};

const CUSTOMER: u16 = ethernet::CUSTOMER_TAG;
const SERVICE: u16 = ethernet::SERVICE_TAG;

pub(crate) fn cases() -> Vec<Case> {
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
