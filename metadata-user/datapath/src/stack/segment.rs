//! Received TCP segments, and sequence number arithmetic.

use metadata_common::cookie::{Flow, Key};
use metadata_common::maps::Slot;
use std::net::IpAddr;

use super::checksum::{is_sound, pseudo};
use super::frame::{Drop, TCP};

/// Octets of a TCP header without options.
pub(super) const HEADER: usize = 20;

/// The control bits (RFC 9293 §3.1).
pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;

/// Whether `a` is before `b` in the sequence space (RFC 9293 §3.4).
pub(super) fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// The four-tuple of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuple {
    pub(super) remote: (IpAddr, u16),
    pub(super) local: (IpAddr, u16),
}

impl Tuple {
    /// The key of this connection, with the slot included.
    pub(super) fn flow(&self, key: &Key, slot: Slot) -> Flow {
        let [a, b] = self.remote.1.to_be_bytes();
        let [c, d] = self.local.1.to_be_bytes();
        let ports = [a, b, c, d];
        match (self.remote.0, self.local.0) {
            (IpAddr::V4(remote), IpAddr::V4(local)) => {
                Flow::v4(key, slot, remote.octets(), local.octets(), ports)
            }
            (remote, local) => Flow::v6(key, slot, sixteen(remote), sixteen(local), ports),
        }
    }
}

fn sixteen(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// A segment received from a guest.
#[derive(Clone, Copy)]
pub(super) struct Segment<'a> {
    pub(super) tuple: Tuple,
    pub(super) seq: u32,
    /// `None` if the ACK bit is clear.
    pub(super) ack: Option<u32>,
    /// As in the header, not scaled.
    pub(super) window: u16,
    pub(super) flags: u8,
    pub(super) options: &'a [u8],
    pub(super) payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// Parses a TCP header and its payload, if the checksum is correct.
    pub(super) fn read(source: IpAddr, destination: IpAddr, tcp: &'a [u8]) -> Result<Self, Drop> {
        let (header, rest) = tcp.split_first_chunk::<HEADER>().ok_or(Drop::Malformed)?;
        let options = (usize::from(header[12] >> 4) * 4).checked_sub(HEADER).ok_or(Drop::Malformed)?;
        let (options, payload) = rest.split_at_checked(options).ok_or(Drop::Malformed)?;
        let half = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let word = |at: usize| u32::from(half(at)) << 16 | u32::from(half(at + 2));
        if half(0) == 0 || half(2) == 0 {
            return Err(Drop::Malformed);
        }
        if !is_sound(pseudo(source, destination, TCP, tcp.len()), tcp, [header[16], header[17]]) {
            return Err(Drop::Checksum);
        }
        let flags = header[13];
        Ok(Self {
            tuple: Tuple { remote: (source, half(0)), local: (destination, half(2)) },
            seq: word(4),
            ack: (flags & ACK != 0).then(|| word(8)),
            window: half(14),
            flags,
            options,
            payload,
        })
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether the segment opens a connection: SYN without ACK, RST and FIN.
    pub(super) fn opens(&self) -> bool {
        self.flags & (SYN | ACK | RST | FIN) == SYN
    }

    /// Octets that the segment takes in the sequence space (RFC 9293 §3.4).
    pub(super) fn length(&self) -> u32 {
        self.payload.len() as u32 + u32::from(self.has(FIN)) + u32::from(self.has(SYN))
    }
}

#[cfg(test)]
mod tests {
    use super::{Segment, TCP, before, pseudo};
    use crate::stack::checksum::finish;
    use std::net::IpAddr;

    #[test]
    fn sequence_numbers_are_compared_around_the_wrap() {
        for (a, b, is) in
            [(1, 2, true), (2, 1, false), (5, 5, false), (u32::MAX, 0, true), (0, u32::MAX, false)]
        {
            assert_eq!(before(a, b), is, "{a} before {b}");
        }
    }

    #[test]
    fn a_header_that_contradicts_itself_is_refused() {
        let guest = IpAddr::from([10, 0, 0, 1]);
        let mut tcp = [0_u8; 24];
        tcp[1] = 1;
        tcp[3] = 80;
        for (offset, length, good) in
            [(5, 24, true), (6, 24, true), (4, 24, false), (7, 24, false), (5, 19, false)]
        {
            tcp[12] = offset << 4;
            // A partial checksum is correct whatever the rest is.
            let sum = finish(pseudo(guest, guest, TCP, length)).map(|octet| !octet);
            tcp[16..18].copy_from_slice(&sum);
            let read = Segment::read(guest, guest, &tcp[..length]);
            assert_eq!(read.is_ok(), good, "offset {offset} in {length} octets");
        }
        tcp[12] = 5 << 4;
        tcp[3] = 0;
        assert!(Segment::read(guest, guest, &tcp).is_err(), "port 0");
    }
}
