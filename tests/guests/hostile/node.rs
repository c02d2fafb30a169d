//! The worst neighbour: a node that owns every metadata address and answers every frame that reaches it.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use metadata_base::addresses;
use metadata_common::mac::Mac;
use metadata_common::wire::{arp, ethernet, ipv4, ipv6, protocol};
use smoltcp::wire::{Icmpv4Packet, Icmpv6Packet, IpAddress, Ipv4Packet, Ipv6Packet, TcpPacket};
use support::agent::{self, Agent, PortArgument};
use support::arena::{ATTACKER, Case, Scene};
use support::host::{BRIDGE, BRIDGE_MAC, Host};
use support::privileged;
use support::record::Identity;
use support::station::Station;
use support::tap::Shape;
use support::witness::Witness;

/// Time for the node to answer.
const SOON: Duration = Duration::from_millis(5);
/// Time after which the node sends nothing more about earlier frames.
const SILENCE: Duration = Duration::from_millis(200);
/// Known cases that the node still answers while an agent serves.
const LEAKS: [&str; 0] = [];

/// Source addresses of the cases' frames.
const SOURCES: [&str; 2] = ["10.0.2.15", "fe80::"];

/// Gives the node every served address, and neighbour entries for its answers.
fn take_addresses(host: &Host, guest: Mac) -> Result<()> {
    let ns = host.ns();
    ns.sysctl("ipv6/conf/br0/disable_ipv6", "0")?;
    ns.sysctl("ipv6/conf/br0/accept_dad", "0")?;
    for address in addresses::ALL {
        match address {
            IpAddr::V4(v4) => ns.ip(&format!("addr add {v4}/32 dev {BRIDGE}"))?,
            IpAddr::V6(v6) => ns.ip(&format!("-6 addr add {v6}/128 dev {BRIDGE} nodad"))?,
        };
    }
    for source in SOURCES {
        ns.ip(&format!("neigh add {source} lladdr {guest} dev {BRIDGE} nud permanent"))?;
    }
    // Prevents late ICMP errors about incomplete fragments.
    ns.sysctl("ipv4/ipfrag_time", "3600")?;
    ns.sysctl("ipv6/ip6frag_time", "3600")?;
    ns.sysctl("ipv4/icmp_ratelimit", "0")
}

/// True for a frame with a metadata address as its source.
fn is_from_served_address(frame: &[u8]) -> bool {
    let part = |at: usize, length: usize| frame.get(at..at + length).unwrap_or_default();
    let served = |bytes: &[u8]| {
        addresses::ALL.iter().any(|address| match address {
            IpAddr::V4(v4) => bytes == v4.octets(),
            IpAddr::V6(v6) => bytes == v6.octets(),
        })
    };
    let at = ethernet::HEADER;
    match part(ethernet::TYPE, 2) {
        [0x08, 0x06] => served(part(at + arp::SENDER_IP, 4)),
        [0x08, 0x00] => served(part(at + ipv4::SOURCE, 4)),
        [0x86, 0xdd] => served(part(at + ipv6::SOURCE, 16)),
        _ => false,
    }
}

/// Fills in the checksums a node verifies, where a whole segment or message follows IP directly.
fn fill_checksums(frame: &mut [u8]) -> Option<()> {
    let mut at = ethernet::HEADER;
    while matches!(frame.get(at - 2..at)?, [0x81 | 0x91, 0x00] | [0x88, 0xa8]) {
        at += ethernet::TAG;
    }
    let (kind, packet) = frame.split_at_mut(at);
    let (source, destination, number, payload): (IpAddress, IpAddress, u8, &mut [u8]) = match kind[at - 2..] {
        [0x08, 0x00] => {
            let packet = Ipv4Packet::new_checked(packet).ok()?;
            let (source, to, number) = (packet.src_addr(), packet.dst_addr(), packet.next_header().into());
            let (header, end) = (usize::from(packet.header_len()), usize::from(packet.total_len()));
            (source.into(), to.into(), number, packet.into_inner().get_mut(header..end)?)
        }
        [0x86, 0xdd] => {
            let packet = Ipv6Packet::new_checked(packet).ok()?;
            let (source, to, number) = (packet.src_addr(), packet.dst_addr(), packet.next_header().into());
            let (header, end) = (packet.header_len(), packet.total_len());
            (source.into(), to.into(), number, packet.into_inner().get_mut(header..end)?)
        }
        _ => return None,
    };
    match (number, source, destination) {
        (protocol::TCP, ..) => TcpPacket::new_checked(payload).ok()?.fill_checksum(&source, &destination),
        (protocol::ICMP, ..) => Icmpv4Packet::new_checked(payload).ok()?.fill_checksum(),
        (protocol::ICMPV6, IpAddress::Ipv6(source), IpAddress::Ipv6(destination)) => {
            Icmpv6Packet::new_checked(payload).ok()?.fill_checksum(&source, &destination);
        }
        _ => {}
    }
    Some(())
}

/// The cases that the node answers from a metadata address. Unicast frames are readdressed to the node.
fn answered_cases(station: &mut Station, witness: &mut Witness, cases: &[Case]) -> Result<Vec<String>> {
    while {
        std::thread::sleep(SILENCE);
        !witness.observe()?.node.is_empty()
    } {}
    let mut answered = Vec::new();
    for case in cases {
        for shot in &case.shots {
            let mut frame = shot.frame.clone();
            if frame.len() >= ethernet::HEADER && frame[0] & 1 == 0 {
                frame[..Mac::LEN].copy_from_slice(&BRIDGE_MAC.0);
            }
            // Incomplete packets stay unchanged.
            let _ = fill_checksums(&mut frame);
            station.send(&frame)?;
        }
        std::thread::sleep(SOON);
        if witness.observe()?.node.iter().any(|frame| is_from_served_address(frame)) {
            answered.push(case.name.clone());
        }
    }
    Ok(answered)
}

#[test]
fn a_node_that_owns_every_metadata_address_answers_no_guest_from_one() {
    if !privileged::or_skip() {
        return;
    }
    let cases: Vec<Case> = [
        super::ipv4::cases(),
        super::ipv6::cases(),
        super::ethernet::cases(),
        super::leaks::cases(),
        super::segments::cases(),
    ]
    .concat();
    let scene = Scene::new(Shape::default()).expect("a node");
    let identity = Identity::of(ATTACKER);
    let tap = scene.host().tap(&identity, Shape::default()).expect("a tap");
    let mut station = Station::new(tap, identity.mac, identity.address);
    let mut witness = Witness::new(scene.host()).expect("a witness");
    take_addresses(scene.host(), identity.mac).expect("addresses");
    let without = answered_cases(&mut station, &mut witness, &cases).expect("answers");
    assert!(without.len() > 40, "without an agent the node answers only {without:?}");
    for steer in ["steer: xdp\n", "steer: tcx\n"] {
        let ports = [PortArgument::new("tap0", identity.mac)];
        let words = scene.words(steer, &ports).expect("a configuration");
        let agent =
            Agent::start_binary(&agent::binary().expect("the agent is built"), scene.host().ns(), words);
        let _agent = agent.expect("an agent");
        let within = answered_cases(&mut station, &mut witness, &cases).expect("answers");
        assert_eq!(within, LEAKS, "{steer}");
    }
    eprintln!("without an agent the node answers {} of {} cases", without.len(), cases.len());
}
