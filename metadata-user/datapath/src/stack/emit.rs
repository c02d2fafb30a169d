//! Builds and sends frames: TCP segments and echo replies.

use smoltcp::wire::{IpProtocol, IpRepr};
use std::io::IoSlice;
use std::net::IpAddr;

use super::config::MTU;
use super::frame::{
    ACK, ETHERNET, EthernetAddresses, HEADER, IPV4, IPV6, RST, Segment, TCP, Tuple, checksums,
};
use super::interfaces::{Long, Transmit};

/// Default hop limit; Linux uses the same.
pub(super) const HOP_LIMIT: u8 = 64;

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const DONT_FRAGMENT: u8 = 0x40;

/// The buffer in which frames are built, and the count of frames sent.
pub(super) struct FrameBuilder {
    frame: Box<[u8; ETHERNET + MTU]>,
    pub(super) sent: u64,
    /// Answer segments that may still be sent before output is deferred.
    allowance: u32,
}

/// The allowance of a stack that never defers output.
const NO_LIMIT: u32 = u32::MAX;

impl FrameBuilder {
    pub(super) fn new() -> Self {
        Self { frame: Box::new([0; ETHERNET + MTU]), sent: 0, allowance: NO_LIMIT }
    }

    /// Allows this many answer segments.
    pub(super) fn allow(&mut self, segments: u32) {
        self.allowance = segments;
    }

    /// Whether another answer segment may be sent.
    pub(super) fn may_send(&self) -> bool {
        self.allowance > 0
    }

    /// Counts an answer frame of this much work against the allowance.
    pub(super) fn spend(&mut self, work: u32) {
        if self.allowance != NO_LIMIT {
            self.allowance = self.allowance.saturating_sub(work);
        }
    }

    /// Builds a frame with `build`, which returns its length, and sends it.
    pub(super) fn send(&mut self, out: &mut dyn Transmit, build: impl FnOnce(&mut [u8]) -> usize) {
        let length = build(&mut self.frame[..]);
        out.send(&self.frame[..length]);
        self.sent += 1;
    }

    /// Sends the payload behind the headers that `build` makes, in segments of `segment` bytes. `build` returns the
    /// length of the headers and the offset of the TCP header.
    pub(super) fn send_long(
        &mut self,
        out: &mut dyn Transmit,
        is_ipv4: bool,
        payload: &[IoSlice<'_>],
        segment: u16,
        build: impl FnOnce(&mut [u8]) -> (usize, usize),
    ) {
        let (length, tcp_at) = build(&mut self.frame[..]);
        let (headers, tcp_at) = (&self.frame[..length], tcp_at as u16);
        out.send_long(&Long { headers, tcp_at, is_ipv4, payload, segment });
        self.sent += 1;
    }
}

/// The header of a segment to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header<'a> {
    pub(super) seq: u32,
    /// `None` leaves the ACK bit clear.
    pub(super) ack: Option<u32>,
    /// The control bits without ACK.
    pub(super) flags: u8,
    pub(super) window: u16,
    /// A multiple of four bytes.
    pub(super) options: &'a [u8],
}

impl Header<'_> {
    /// The reset for a segment of no known connection (RFC 9293 §3.10.7.1).
    pub(super) fn refusal(segment: &Segment<'_>) -> Self {
        let (seq, ack) = match segment.ack {
            Some(ack) => (ack, None),
            None => (0, Some(segment.seq.wrapping_add(segment.length()))),
        };
        Header { seq, ack, flags: RST, window: 0, options: &[] }
    }

    /// Builds the frame of a segment without payload; returns its length.
    pub(super) fn emit(&self, tuple: &Tuple, route: EthernetAddresses, frame: &mut [u8]) -> usize {
        self.emit_with(tuple, route, 0, |_| HOP_LIMIT, frame)
    }

    /// Builds the frame of a segment with `payload` bytes, which `fill` writes; `fill` returns the hop limit.
    /// Headers and payload must fit the MTU. Returns the frame's length.
    pub(super) fn emit_with(
        &self,
        tuple: &Tuple,
        route: EthernetAddresses,
        payload: usize,
        fill: impl FnOnce(&mut [u8]) -> u8,
        frame: &mut [u8],
    ) -> usize {
        let data = tcp_at(tuple) + HEADER + self.options.len();
        let length = data + payload;
        let hop_limit = fill(&mut frame[data..length]);
        let (tcp, pseudo) = self.headers(tuple, route, payload, hop_limit, frame);
        let segment = &mut frame[tcp..length];
        let check = finish(pseudo + sum(segment));
        segment[16..18].copy_from_slice(&check);
        length
    }

    /// Builds the headers of a frame with `payload` bytes that follow separately. The TCP checksum is partial: the sum
    /// of the pseudo-header alone, not complemented (virtio 1.2 §5.1.6.2). Returns the length of the headers and the
    /// offset of the TCP header.
    pub(super) fn emit_long(
        &self,
        tuple: &Tuple,
        route: EthernetAddresses,
        payload: usize,
        hop_limit: u8,
        frame: &mut [u8],
    ) -> (usize, usize) {
        let (tcp, pseudo) = self.headers(tuple, route, payload, hop_limit, frame);
        frame[tcp + 16..tcp + 18].copy_from_slice(&finish(pseudo).map(|byte| !byte));
        (tcp + HEADER + self.options.len(), tcp)
    }

    /// Writes all headers of a segment with `payload` bytes, the TCP checksum as zero. Returns the offset of the TCP
    /// header, and the sum of the pseudo-header.
    fn headers(
        &self,
        tuple: &Tuple,
        route: EthernetAddresses,
        payload: usize,
        hop_limit: u8,
        frame: &mut [u8],
    ) -> (usize, u64) {
        let (tcp, length) = (tcp_at(tuple), HEADER + self.options.len() + payload);
        let pseudo = ip(tuple.local.0, tuple.remote.0, length, hop_limit, &mut frame[..tcp]);
        route.emit(if tuple.remote.0.is_ipv4() { IPV4 } else { IPV6 }, frame);
        let segment = &mut frame[tcp..tcp + HEADER + self.options.len()];
        segment[..2].copy_from_slice(&tuple.local.1.to_be_bytes());
        segment[2..4].copy_from_slice(&tuple.remote.1.to_be_bytes());
        segment[4..8].copy_from_slice(&self.seq.to_be_bytes());
        segment[8..12].copy_from_slice(&self.ack.unwrap_or(0).to_be_bytes());
        segment[12] = ((HEADER + self.options.len()) as u8 / 4) << 4;
        segment[13] = self.flags | if self.ack.is_some() { ACK } else { 0 };
        segment[14..16].copy_from_slice(&self.window.to_be_bytes());
        // The checksum and the urgent pointer.
        segment[16..20].fill(0);
        segment[HEADER..].copy_from_slice(self.options);
        (tcp, pseudo)
    }
}

/// Bytes before the TCP header of a frame to the remote end.
fn tcp_at(tuple: &Tuple) -> usize {
    ETHERNET + if tuple.remote.0.is_ipv4() { IPV4_HEADER } else { IPV6_HEADER }
}

/// Writes the IP header of a TCP segment of `length` bytes; returns the sum of its pseudo-header (RFC 9293 §3.1).
/// Both addresses have the same family, because they come from one packet.
fn ip(from: IpAddr, to: IpAddr, length: usize, hop_limit: u8, frame: &mut [u8]) -> u64 {
    let header = &mut frame[ETHERNET..];
    let tail = [0, TCP, (length >> 8) as u8, length as u8];
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let total = ((IPV4_HEADER + length) as u16).to_be_bytes();
            header[..12].copy_from_slice(&[
                0x45,
                0,
                total[0],
                total[1],
                0,
                0,
                DONT_FRAGMENT,
                0,
                hop_limit,
                TCP,
                0,
                0,
            ]);
            header[12..16].copy_from_slice(&from.octets());
            header[16..20].copy_from_slice(&to.octets());
            let check = finish(sum(&header[..IPV4_HEADER]));
            header[10..12].copy_from_slice(&check);
            sum(&header[12..20]) + sum(&tail)
        }
        _ => {
            let bytes = (length as u16).to_be_bytes();
            header[..8].copy_from_slice(&[0x60, 0, 0, 0, bytes[0], bytes[1], TCP, hop_limit]);
            for (address, at) in [(from, 8), (to, 24)] {
                if let IpAddr::V6(address) = address {
                    header[at..at + 16].copy_from_slice(&address.octets());
                }
            }
            sum(&header[8..40]) + sum(&tail)
        }
    }
}

/// Whether an echo request is complete (type, code, checksum, identifier, sequence number) and its reply fits the
/// MTU.
pub(super) fn fits_echo(source: IpAddr, request: &[u8]) -> bool {
    let header = if source.is_ipv4() { IPV4_HEADER } else { IPV6_HEADER };
    (8..=MTU - header).contains(&request.len())
}

/// Builds the reply to an echo request that fits (RFC 792, RFC 4443 §4.2): the same bytes except type and checksum.
/// Returns the frame's length.
pub(super) fn echo(
    source: IpAddr,
    destination: IpAddr,
    request: &[u8],
    route: EthernetAddresses,
    frame: &mut [u8],
) -> usize {
    const REPLY: u8 = 0;
    const REPLY_V6: u8 = 129;
    let (protocol, kind) =
        if source.is_ipv4() { (IpProtocol::Icmp, REPLY) } else { (IpProtocol::Icmpv6, REPLY_V6) };
    let ip = IpRepr::new(destination.into(), source.into(), protocol, request.len(), HOP_LIMIT);
    let (start, length) = (ETHERNET + ip.header_len(), ETHERNET + ip.buffer_len());
    ip.emit(&mut frame[ETHERNET..length], &checksums());
    route.emit(if source.is_ipv4() { IPV4 } else { IPV6 }, frame);
    // The ICMPv6 checksum covers the addresses too (RFC 8200 §8.1). They are the last 32 bytes of the header.
    let pseudo = if source.is_ipv4() {
        0
    } else {
        let size = (request.len() as u16).to_be_bytes();
        sum(&frame[start - 32..start]) + sum(&[size[0], size[1], 0, u8::from(protocol)])
    };
    let reply = &mut frame[start..length];
    reply.copy_from_slice(request);
    reply[..4].copy_from_slice(&[kind, 0, 0, 0]);
    let check = finish(pseudo + sum(reply));
    reply[2..4].copy_from_slice(&check);
    length
}

// The internet checksum (RFC 1071).
//
// Words are added in memory order: the sum does not depend on the byte order if the result is stored the same way
// (RFC 1071 §2 B). Adding four bytes at a time to a 64-bit sum needs no carries, and the compiler vectorizes it.
// This is about as fast as caching the sums of frequent payloads.

/// Sum of the pseudo-header for `length` bytes of a protocol above IP (RFC 9293 §3.1, RFC 8200 §8.1). Both addresses
/// have the same family, because they come from one packet.
pub(super) fn pseudo(source: IpAddr, destination: IpAddr, protocol: u8, length: usize) -> u64 {
    let address = |address| match address {
        IpAddr::V4(v4) => sum(&v4.octets()),
        IpAddr::V6(v6) => sum(&v6.octets()),
    };
    let [high, low] = (length as u16).to_be_bytes();
    address(source) + address(destination) + sum(&[0, protocol, high, low])
}

/// Whether the checksum in `field` is correct: complete, or partial. A partial one is the pseudo-header's sum alone,
/// folded and not complemented, as a guest with checksum offload leaves it (virtio 1.2 §5.1.6.2; `CHECKSUM_PARTIAL`
/// in Linux).
pub(super) fn is_sound(pseudo: u64, bytes: &[u8], field: [u8; 2]) -> bool {
    // The complement of two bytes is the same in either byte order.
    finish(pseudo) == field.map(|byte| !byte) || is_complete(pseudo, bytes)
}

/// Whether the bytes' checksum is complete and correct.
pub(super) fn is_complete(pseudo: u64, bytes: &[u8]) -> bool {
    finish(pseudo + sum(bytes)) == [0; 2]
}

/// Sums bytes, the last word padded with zeros. Correct for up to 4 GiB in total.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut sum: u64 = words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    sum += u64::from(u32::from_ne_bytes(last));
    sum
}

/// The two bytes of the checksum field.
pub(super) fn finish(mut sum: u64) -> [u8; 2] {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    (!(sum as u16)).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::{finish, is_complete, is_sound, pseudo, sum};

    const ADDRESSES: [[IpAddr; 2]; 2] = [
        [IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 2, 15)), IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)],
        [IpAddr::V6(std::net::Ipv6Addr::LOCALHOST), IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED)],
    ];

    #[test]
    fn only_complete_and_partial_sums_are_sound() {
        for [source, destination] in ADDRESSES {
            for length in [20, 21, 60, 1_480] {
                let mut bytes: Vec<u8> = (0..length).map(|i| (i * 37) as u8).collect();
                let pseudo = pseudo(source, destination, 6, bytes.len());
                bytes[16..18].fill(0);
                let complete = finish(pseudo + sum(&bytes));
                let partial = finish(pseudo).map(|byte| !byte);
                for field in 0..=u16::MAX {
                    let field = field.to_ne_bytes();
                    bytes[16..18].copy_from_slice(&field);
                    let sound = is_sound(pseudo, &bytes, field);
                    assert_eq!(sound, field == complete || field == partial, "{length}, {field:02x?}");
                    assert_eq!(is_complete(pseudo, &bytes), field == complete, "{length}, {field:02x?}");
                }
            }
        }
    }

    /// The sum word by word, as RFC 1071 §1 defines it.
    fn plain(bytes: &[u8]) -> [u8; 2] {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    }

    #[test]
    fn the_sum_matches_its_definition_at_every_length() {
        let bytes: Vec<u8> = (0..1500_u32).map(|i| (i * 31 + i / 7) as u8).collect();
        for length in 0..bytes.len() {
            assert_eq!(finish(sum(&bytes[..length])), plain(&bytes[..length]), "{length}");
        }
        assert_eq!(finish(sum(&[0xff; 1500])), plain(&[0xff; 1500]));
    }

    #[test]
    fn sums_of_parts_in_multiples_of_four_bytes_add_up() {
        let bytes: Vec<u8> = (0..100).collect();
        assert_eq!(finish(sum(&bytes[..40]) + sum(&bytes[40..])), plain(&bytes));
    }
}
