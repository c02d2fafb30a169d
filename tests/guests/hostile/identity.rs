//! Frames that claim another guest's identity.

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::stamp::stamp;
use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{arp, ethernet, ipv4, protocol};
use support::arena::{Case, Kind, OTHERS};
use support::frames::{self, SERVED_V4, SERVED_V6, SOLICITED, with};
use support::record::Identity;

use super::make::{altered, datagram, frame, ping, syn, syn6, v4};

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

pub(crate) fn cases() -> Vec<Case> {
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
pub(crate) fn on_queues(queues: usize) -> Vec<Case> {
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
