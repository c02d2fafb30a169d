//! Reads and writes a guest's frames: ARP (RFC 826), IPv4 (RFC 791) and TCP (RFC 9293) in Ethernet II.
//!
//! All received frames are checked, as a guest's kernel does unless its NIC has already checked them.

use super::sum;
use metadata_common::mac::Mac;
use std::net::Ipv4Addr;

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
const ARP: usize = 28;
const IPV4: usize = 20;
const TCP: usize = 20;
/// Bytes of the longest TCP header.
const TCP_MOST: usize = 60;
/// Bytes of the longest frame that a guest sends.
pub(crate) const FRAME_MOST: usize = 1514;
/// The MSS that a guest announces in its SYN.
pub(crate) const MSS: u16 = 1460;

const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const PROTOCOL_TCP: u8 = 6;

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;

/// The addresses of both ends of a guest's connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) mac: Mac,
    pub(crate) address: Ipv4Addr,
    pub(crate) server: Ipv4Addr,
    pub(crate) server_mac: Mac,
}

/// The header of a TCP segment. In received segments, the numbers are the server's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// The guest's port.
    pub(crate) port: u16,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
    /// Value and echo of the timestamps (RFC 7323 §3).
    pub(crate) timestamps: Option<(u32, u32)>,
}

/// A received frame, with its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incoming<'a> {
    /// A request for the guest's MAC, with the MAC and address of its sender.
    WhoHas(Mac, Ipv4Addr),
    /// A reply with the server's MAC.
    IsAt(Mac),
    Tcp(Header, &'a [u8]),
    /// A frame with a wrong checksum.
    Damaged,
    /// A frame that does not concern the guest.
    Other,
}

fn be16(from: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([from[at], from[at + 1]])
}

fn be32(from: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([from[at], from[at + 1], from[at + 2], from[at + 3]])
}

fn mac(from: &[u8]) -> Mac {
    Mac([from[0], from[1], from[2], from[3], from[4], from[5]])
}

fn address(from: &[u8]) -> Ipv4Addr {
    Ipv4Addr::new(from[0], from[1], from[2], from[3])
}

/// Reads a frame. `partial` says that the TCP checksum is not complete, as the virtio header shows.
pub(crate) fn read<'a>(frame: &'a [u8], ends: &Ends, partial: bool) -> Incoming<'a> {
    let Some((head, packet)) = frame.split_at_checked(ETHERNET) else { return Incoming::Other };
    match [head[12], head[13]] {
        TYPE_ARP => read_arp(packet, ends),
        TYPE_IPV4 if head[..6] == ends.mac.0 => read_ipv4(packet, ends, partial),
        _ => Incoming::Other,
    }
}

fn read_arp(packet: &[u8], ends: &Ends) -> Incoming<'static> {
    if packet.len() < ARP || packet[..6] != [0, 1, 8, 0, 6, 4] || packet[24..28] != ends.address.octets() {
        return Incoming::Other;
    }
    let (from, from_mac) = (address(&packet[14..]), mac(&packet[8..]));
    match be16(packet, 6) {
        1 => Incoming::WhoHas(from_mac, from),
        2 if from == ends.server => Incoming::IsAt(from_mac),
        _ => Incoming::Other,
    }
}

fn read_ipv4<'a>(packet: &'a [u8], ends: &Ends, partial: bool) -> Incoming<'a> {
    if packet.len() < IPV4 || packet[0] >> 4 != 4 {
        return Incoming::Other;
    }
    let head = usize::from(packet[0] & 15) * 4;
    let total = usize::from(be16(packet, 2));
    // An aggregate of 64 KiB or more has the length 0 (the kernel's BIG TCP). By default taps do not carry such
    // packets.
    if head < IPV4 || total < head || total > packet.len() {
        return Incoming::Other;
    }
    if !sum::good(sum::add(0, &packet[..head])) {
        return Incoming::Damaged;
    }
    let ours = packet[12..16] == ends.server.octets() && packet[16..20] == ends.address.octets();
    // Fragments and other protocols are ignored.
    if !ours || packet[9] != PROTOCOL_TCP || be16(packet, 6) & 0x3fff != 0 {
        return Incoming::Other;
    }
    read_tcp(&packet[head..total], ends, partial)
}

fn read_tcp<'a>(segment: &'a [u8], ends: &Ends, partial: bool) -> Incoming<'a> {
    if segment.len() < TCP {
        return Incoming::Other;
    }
    let head = usize::from(segment[12] >> 4) * 4;
    if head < TCP || head > segment.len() {
        return Incoming::Other;
    }
    if !partial && !sum::good(sum::add(pseudo(ends, segment.len()), segment)) {
        return Incoming::Damaged;
    }
    let header = Header {
        port: be16(segment, 2),
        seq: be32(segment, 4),
        ack: be32(segment, 8),
        flags: segment[13] & 0x3f,
        window: be16(segment, 14),
        timestamps: timestamps(&segment[TCP..head]),
    };
    Incoming::Tcp(header, &segment[head..])
}

/// Returns the timestamps among the options (RFC 9293 §3.2: kind, length, value; kinds 0 and 1 are single bytes).
fn timestamps(mut options: &[u8]) -> Option<(u32, u32)> {
    loop {
        match *options {
            [0, ..] | [] => return None,
            [1, ref rest @ ..] => options = rest,
            [8, 10, ..] if options.len() >= 10 => return Some((be32(options, 2), be32(options, 6))),
            [_, length, ..] => options = options.get(usize::from(length.max(2))..)?,
            [_] => return None,
        }
    }
}

/// Returns the sum of the pseudo-header: addresses, protocol, length (RFC 9293 §3.1).
fn pseudo(ends: &Ends, length: usize) -> u64 {
    let addresses = sum::add(sum::add(0, &ends.address.octets()), &ends.server.octets());
    // A segment fits into one packet, so its length fits into 16 bits.
    sum::add(addresses, &[0, PROTOCOL_TCP]) + u64::from((length as u16).to_be())
}

/// Writes an ARP request for the server's address.
pub(crate) fn who_has(out: &mut Vec<u8>, ends: &Ends) {
    arp(out, ends, Mac([0xff; 6]), 1, Mac([0; 6]), ends.server);
}

/// Writes an ARP reply with the guest's MAC.
pub(crate) fn is_at(out: &mut Vec<u8>, ends: &Ends, asker: Mac, asked_by: Ipv4Addr) {
    arp(out, ends, asker, 2, asker, asked_by);
}

fn arp(out: &mut Vec<u8>, ends: &Ends, to: Mac, operation: u8, target: Mac, target_address: Ipv4Addr) {
    out.extend(to.0);
    out.extend(ends.mac.0);
    out.extend(TYPE_ARP);
    out.extend([0, 1, 8, 0, 6, 4, 0, operation]);
    out.extend(ends.mac.0);
    out.extend(ends.address.octets());
    out.extend(target.0);
    out.extend(target_address.octets());
}

/// Writes a segment. With `partial` the device completes the TCP checksum, as for a virtio guest. The field then holds
/// the sum of the pseudo-header.
pub(crate) fn segment(
    out: &mut Vec<u8>,
    ends: &Ends,
    header: &Header,
    sacks: &[(u32, u32)],
    payload: &[u8],
    partial: bool,
) {
    out.extend(ends.server_mac.0);
    out.extend(ends.mac.0);
    out.extend(TYPE_IPV4);
    let ip = out.len();
    // Version and length, DSCP, total length, id, DF, TTL 64 as Linux sends, TCP, checksum.
    out.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, PROTOCOL_TCP, 0, 0]);
    out.extend(ends.address.octets());
    out.extend(ends.server.octets());
    let tcp = out.len();
    out.extend(header.port.to_be_bytes());
    out.extend(80u16.to_be_bytes());
    out.extend(header.seq.to_be_bytes());
    out.extend(header.ack.to_be_bytes());
    out.extend([0, header.flags]);
    out.extend(header.window.to_be_bytes());
    out.extend([0; 4]);
    options(out, header, sacks);
    let head = out.len() - tcp;
    debug_assert!(head <= TCP_MOST);
    out[tcp + 12] = (head as u8 / 4) << 4;
    out.extend_from_slice(payload);
    let length = out.len() - tcp;
    let total = (IPV4 + length) as u16;
    out[ip + 2..ip + 4].copy_from_slice(&total.to_be_bytes());
    let check = !sum::folded(sum::add(0, &out[ip..tcp]));
    out[ip + 10..ip + 12].copy_from_slice(&check.to_ne_bytes());
    let check = if partial {
        sum::folded(pseudo(ends, length))
    } else {
        !sum::folded(sum::add(pseudo(ends, length), &out[tcp..]))
    };
    out[tcp + 16..tcp + 18].copy_from_slice(&check.to_ne_bytes());
}

/// Writes a SYN's options in Linux's order (net/ipv4/tcp_output.c, tcp_options_write), or timestamps and SACK blocks.
fn options(out: &mut Vec<u8>, header: &Header, sacks: &[(u32, u32)]) {
    let (value, echo) = header.timestamps.unwrap_or_default();
    let times = [value.to_be_bytes(), echo.to_be_bytes()];
    if header.flags & SYN != 0 {
        out.extend([2, 4]);
        out.extend(MSS.to_be_bytes());
        out.extend([4, 2, 8, 10]);
        out.extend(times.as_flattened());
        out.extend([1, 3, 3, WINDOW_SCALE]);
        return;
    }
    if header.timestamps.is_some() {
        out.extend([1, 1, 8, 10]);
        out.extend(times.as_flattened());
    }
    if !sacks.is_empty() {
        out.extend([1, 1, 5, 2 + 8 * sacks.len() as u8]);
        for (from, to) in sacks {
            out.extend(from.to_be_bytes());
            out.extend(to.to_be_bytes());
        }
    }
}

/// The shift of the windows that a guest offers, as Linux usually has it.
pub(crate) const WINDOW_SCALE: u8 = 7;

#[cfg(test)]
pub(crate) mod tests {
    use super::{ACK, Ends, Header, Incoming, PSH, SYN, read, segment, timestamps};
    use metadata_common::mac::Mac;
    use std::net::Ipv4Addr;

    /// Swaps the two ends.
    pub(crate) fn turned(ends: &Ends) -> Ends {
        Ends { mac: ends.server_mac, address: ends.server, server: ends.address, server_mac: ends.mac }
    }

    pub(crate) fn ends() -> Ends {
        Ends {
            mac: Mac([0x52, 0x54, 0, 0x69, 0, 1]),
            address: Ipv4Addr::new(10, 0, 16, 1),
            server: Ipv4Addr::new(169, 254, 169, 254),
            server_mac: Mac([2, 0, 0, 0, 0, 1]),
        }
    }

    /// Makes a frame from the server. `segment` writes the ports of the other direction, so they are swapped.
    pub(crate) fn from_server(ends: &Ends, header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        segment(&mut frame, &turned(ends), header, &[], payload, false);
        // A swap of 16-bit words does not change the checksum.
        frame[34..38].rotate_left(2);
        frame
    }

    #[test]
    fn a_written_segment_is_read_back() {
        let ends = ends();
        for (flags, stamps, len) in [(SYN, Some((7, 0)), 0), (ACK | PSH, Some((8, 9)), 33), (ACK, None, 1)] {
            let header = Header { port: 40_000, seq: 1, ack: 2, flags, window: 3, timestamps: stamps };
            let payload = vec![b'x'; len];
            let frame = from_server(&ends, &header, &payload);
            assert_eq!(read(&frame, &ends, false), Incoming::Tcp(header, &payload), "{flags:#x}");
        }
    }

    #[test]
    fn a_changed_byte_anywhere_in_a_packet_is_detected() {
        let ends = ends();
        let header = Header { port: 40_000, seq: 1, ack: 2, flags: ACK, window: 3, timestamps: None };
        let good = from_server(&ends, &header, b"metadata");
        for at in 14..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(!matches!(read(&bad, &ends, false), Incoming::Tcp(..)), "byte {at}");
        }
    }

    #[test]
    fn a_truncated_frame_is_not_read_beyond_its_end() {
        let ends = ends();
        let header = Header { port: 1, seq: 1, ack: 2, flags: SYN, window: 3, timestamps: Some((1, 2)) };
        let good = from_server(&ends, &header, b"metadata");
        for len in 0..good.len() {
            assert!(!matches!(read(&good[..len], &ends, false), Incoming::Tcp(..)), "{len} bytes");
        }
    }

    #[test]
    fn truncated_options_hold_no_timestamps() {
        for options in [&[8][..], &[8, 10, 1], &[5, 0, 0, 0], &[2, 255], &[1, 1, 1], &[254, 1]] {
            assert_eq!(timestamps(options), None, "{options:?}");
        }
    }
}
