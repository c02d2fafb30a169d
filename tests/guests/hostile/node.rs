//! The worst neighbour: a node that owns every metadata address and answers every frame that reaches it.

use anyhow::Result;
use metadata_common::addresses;
use metadata_common::mac::Mac;
use metadata_common::wire::{arp, ethernet, ipv4, ipv6, protocol, tcp};
use smoltcp::wire::{Icmpv4Packet, Icmpv6Packet, IpAddress, Ipv4Packet, Ipv6Packet, TcpPacket};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;
use support::agent::{self, Agent, PortArgument};
use support::arena::{ATTACKER, Case, Scene, Witness};
use support::host::{BRIDGE, BRIDGE_MAC, Host};
use support::record::Identity;
use support::station::Station;
use support::tap::Shape;
use support::{checksum, frames, privileged};

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

#[privileged::test]
fn a_node_that_owns_every_metadata_address_answers_no_guest_from_one() {
    let cases: Vec<Case> = [
        super::packets::ipv4_cases(),
        super::packets::ipv6_cases(),
        super::packets::ethernet_cases(),
        super::leaks::cases(),
        super::segment_cases(),
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

// Builds the attacker's frames.

/// IPv4 addresses served by default.
pub(crate) fn served_v4() -> Vec<Ipv4Addr> {
    let v4 = |address| match address {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(_) => None,
    };
    addresses::ALL.into_iter().filter_map(v4).collect()
}

/// IPv6 addresses served by default.
pub(crate) fn served_v6() -> Vec<Ipv6Addr> {
    let v6 = |address| match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => Some(v6),
    };
    addresses::ALL.into_iter().filter_map(v6).collect()
}

/// The attacker's MAC.
pub(crate) fn mac() -> Mac {
    Identity::of(ATTACKER).mac
}

/// A frame of the attacker behind these tags. The checksum of an untagged packet is complete.
pub(crate) fn frame(tags: &[u16], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = frames::with(frames::frame(tags, ethertype, payload), ethernet::SOURCE, &mac().0);
    checksum::complete(&mut frame);
    frame
}

/// An IPv4 packet as a frame.
pub(crate) fn v4(packet: &[u8]) -> Vec<u8> {
    frame(&[], ethernet::IPV4, packet)
}

/// An IPv6 packet as a frame.
pub(crate) fn v6(packet: &[u8]) -> Vec<u8> {
    frame(&[], ethernet::IPV6, packet)
}

/// The packet to each served IPv4 address.
pub(crate) fn to_all_v4(packet: impl Fn(Ipv4Addr) -> Vec<u8>) -> Vec<Vec<u8>> {
    served_v4().into_iter().map(|address| v4(&packet(address))).collect()
}

/// The packet to each served IPv6 address.
pub(crate) fn to_all_v6(packet: impl Fn(Ipv6Addr) -> Vec<u8>) -> Vec<Vec<u8>> {
    served_v6().into_iter().map(|address| v6(&packet(address))).collect()
}

/// An IPv4 packet with this payload.
pub(crate) fn datagram(to: Ipv4Addr, number: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = frames::datagram(to, number);
    packet.truncate(ipv4::HEADER);
    packet.extend(payload);
    sized(packet)
}

/// A SYN to a port over IPv4.
pub(crate) fn syn(to: Ipv4Addr, port: u16) -> Vec<u8> {
    frames::with(frames::tcp(to, tcp::SYN), ipv4::HEADER + 2, &port.to_be_bytes())
}

/// The packet with these options after its header.
pub(crate) fn with_options(packet: &[u8], options: &[u8]) -> Vec<u8> {
    assert!(options.len().is_multiple_of(4) && options.len() <= 40, "options fill whole words");
    let mut packet = packet.to_vec();
    packet.splice(ipv4::HEADER..ipv4::HEADER, options.iter().copied());
    packet[0] += (options.len() / 4) as u8;
    sized(packet)
}

/// Corrects the packet's length and header checksum.
pub(crate) fn sized(mut packet: Vec<u8>) -> Vec<u8> {
    let length = packet.len() as u16;
    packet[ipv4::TOTAL_LENGTH..ipv4::TOTAL_LENGTH + 2].copy_from_slice(&length.to_be_bytes());
    summed(packet)
}

/// Corrects the packet's header checksum.
pub(crate) fn summed(mut packet: Vec<u8>) -> Vec<u8> {
    let header = (usize::from(packet[0] & 0xf) * 4).clamp(ipv4::HEADER, packet.len());
    packet[ipv4::CHECKSUM..ipv4::SOURCE].fill(0);
    let words = packet[..header].chunks(2);
    let sum: u32 = words.map(|w| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    packet[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// Replaces bytes from `offset` on and corrects the header checksum.
pub(crate) fn altered(packet: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    summed(frames::with(packet, offset, bytes))
}

/// An echo request.
pub(crate) fn ping(to: Ipv4Addr) -> Vec<u8> {
    datagram(to, protocol::ICMP, &[8, 0, 0, 0, 0, 1, 0, 1, 1, 2, 3, 4])
}

/// An IPv6 packet with this payload.
pub(crate) fn datagram6(to: Ipv6Addr, next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = frames::datagram6(to, next_header);
    packet.truncate(ipv6::HEADER);
    packet[ipv6::PAYLOAD_LENGTH..ipv6::NEXT_HEADER].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    packet.extend(payload);
    packet
}

/// A SYN over IPv6.
pub(crate) fn syn6(to: Ipv6Addr, port: u16) -> Vec<u8> {
    let packet = frames::tcp6(to, tcp::SYN);
    frames::with(packet, ipv6::HEADER + 2, &port.to_be_bytes())
}

/// An echo request over IPv6.
pub(crate) fn ping6(to: Ipv6Addr) -> Vec<u8> {
    datagram6(to, protocol::ICMPV6, &[128, 0, 0, 0, 0, 1, 0, 1, 1, 2, 3, 4])
}
