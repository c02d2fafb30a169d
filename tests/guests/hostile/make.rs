//! Builds the attacker's frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use metadata_base::addresses;
use metadata_common::mac::Mac;
use metadata_common::wire::{ethernet, ipv4, ipv6, protocol, tcp};
use support::arena::ATTACKER;
use support::record::Identity;
use support::{checksum, frames};

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
