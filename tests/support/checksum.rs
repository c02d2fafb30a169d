//! Completes the checksums of frames that a test has built or changed, or leaves them to the device.

use metadata_datapath::stack::Long;
use smoltcp::wire::{
    Icmpv4Packet, Icmpv6Packet, IpAddress, IpProtocol, Ipv4Address, Ipv4Packet, Ipv6Address, Ipv6Packet,
    TcpPacket,
};
use std::ops::Range;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Bytes of the shortest IPv4 header.
const IPV4: usize = 20;

/// A segment or message: source, destination, protocol, and its position in the frame.
type Upper = (IpAddress, IpAddress, IpProtocol, Range<usize>);

/// Writes the checksum of an IPv4 header without options (RFC 1071), if the frame is long enough.
pub fn header(frame: &mut [u8]) {
    let Some(header) = frame.get_mut(ETHERNET..ETHERNET + IPV4) else { return };
    header[10..12].fill(0);
    let sum = !fold(words(header));
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

/// Writes the checksum of a TCP segment or an ICMP message, if it directly follows the IP header and is complete.
pub fn complete(frame: &mut [u8]) {
    let _ = upper(frame).and_then(|upper| fill(frame, upper));
}

/// Writes only the sum of the pseudo-header into a TCP segment, as a guest with checksum offload does.
pub fn partial(frame: &mut [u8]) {
    let Some((source, destination, IpProtocol::Tcp, bytes)) = upper(frame) else { return };
    let length = bytes.len() as u32;
    let sum = words(&address(source))
        + words(&address(destination))
        + u32::from(u8::from(IpProtocol::Tcp))
        + length;
    frame[bytes][16..18].copy_from_slice(&fold(sum).to_be_bytes());
}

fn upper(frame: &[u8]) -> Option<Upper> {
    let packet = frame.get(ETHERNET..)?;
    let (source, destination, protocol, bytes) = match frame[ETHERNET - 2..ETHERNET] {
        [0x08, 0x00] => {
            let ip = Ipv4Packet::new_checked(packet).ok()?;
            let bytes = usize::from(ip.header_len())..usize::from(ip.total_len());
            (ip.src_addr().into(), ip.dst_addr().into(), ip.next_header(), bytes)
        }
        [0x86, 0xdd] => {
            let ip = Ipv6Packet::new_checked(packet).ok()?;
            let bytes = ip.header_len()..ip.total_len();
            (ip.src_addr().into(), ip.dst_addr().into(), ip.next_header(), bytes)
        }
        _ => return None,
    };
    Some((source, destination, protocol, ETHERNET + bytes.start..ETHERNET + bytes.end))
}

fn fill(frame: &mut [u8], (source, destination, protocol, bytes): Upper) -> Option<()> {
    let bytes = frame.get_mut(bytes)?;
    match (protocol, source, destination) {
        (IpProtocol::Tcp, ..) => TcpPacket::new_checked(bytes).ok()?.fill_checksum(&source, &destination),
        (IpProtocol::Icmp, ..) => Icmpv4Packet::new_checked(bytes).ok()?.fill_checksum(),
        (IpProtocol::Icmpv6, IpAddress::Ipv6(source), IpAddress::Ipv6(destination)) => {
            Icmpv6Packet::new_checked(bytes).ok()?.fill_checksum(&source, &destination);
        }
        _ => {}
    }
    Some(())
}

fn address(address: IpAddress) -> Vec<u8> {
    match address {
        IpAddress::Ipv4(v4) => Ipv4Address::octets(&v4).to_vec(),
        IpAddress::Ipv6(v6) => Ipv6Address::octets(&v6).to_vec(),
    }
}

fn words(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0))).sum()
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

// Cuts long frames into segments, as a kernel or a guest's driver does (Linux: `tcp_gso_segment`).

/// The frames of all segments, with complete checksums.
///
/// # Panics
/// If the frame is malformed: a wrong offset, a short length, a checksum that is not the pseudo-header's sum, or too
/// much payload for one IP packet.
#[must_use]
pub fn cut(long: &Long<'_>) -> Vec<Vec<u8>> {
    let payload: Vec<u8> = long.payload.iter().flat_map(|piece| piece.iter().copied()).collect();
    let tcp_at = usize::from(long.tcp_at);
    assert_eq!(tcp_at, ETHERNET + if long.is_ipv4 { 20 } else { 40 });
    let whole = [long.headers, &payload].concat();
    assert!(whole.len() < 65_536, "the kernel cuts frames of {} bytes itself", whole.len());
    assert_partial(&whole, tcp_at, long.is_ipv4);
    let segments = payload.chunks(long.segment.into());
    let last = segments.len() - 1;
    let first = TcpPacket::new_checked(&whole[tcp_at..]).expect("a TCP segment").seq_number();
    segments
        .enumerate()
        .map(|(n, part)| {
            let mut frame = [long.headers, part].concat();
            let length = frame.len();
            let mut tcp = TcpPacket::new_unchecked(&mut frame[tcp_at..]);
            tcp.set_seq_number(first + n * usize::from(long.segment));
            if n < last {
                tcp.set_fin(false);
                tcp.set_psh(false);
            }
            if long.is_ipv4 {
                let mut ip = Ipv4Packet::new_unchecked(&mut frame[ETHERNET..]);
                ip.set_total_len((length - ETHERNET) as u16);
                ip.fill_checksum();
                let (from, to) = (ip.src_addr(), ip.dst_addr());
                TcpPacket::new_unchecked(ip.payload_mut()).fill_checksum(&from.into(), &to.into());
            } else {
                let mut ip = Ipv6Packet::new_unchecked(&mut frame[ETHERNET..]);
                ip.set_payload_len((length - tcp_at) as u16);
                let (from, to) = (ip.src_addr(), ip.dst_addr());
                TcpPacket::new_unchecked(ip.payload_mut()).fill_checksum(&from.into(), &to.into());
            }
            frame
        })
        .collect()
}

/// Asserts that the length and the checksum are those of the whole: the latter is the sum of the pseudo-header.
fn assert_partial(whole: &[u8], tcp_at: usize, is_ipv4: bool) {
    let length = whole.len() - tcp_at;
    let addresses = if is_ipv4 {
        let ip = Ipv4Packet::new_checked(&whole[ETHERNET..]).expect("an IPv4 packet");
        assert!(ip.verify_checksum() && usize::from(ip.total_len()) == whole.len() - ETHERNET);
        &whole[ETHERNET + 12..ETHERNET + 20]
    } else {
        let ip = Ipv6Packet::new_checked(&whole[ETHERNET..]).expect("an IPv6 packet");
        assert_eq!(usize::from(ip.payload_len()), length);
        &whole[ETHERNET + 8..ETHERNET + 40]
    };
    let words = addresses.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let mut sum = words.sum::<u32>() + 6 + length as u32;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let field = u16::from_be_bytes([whole[tcp_at + 16], whole[tcp_at + 17]]);
    assert_eq!(u32::from(field), sum, "the sum of the pseudo-header");
}
