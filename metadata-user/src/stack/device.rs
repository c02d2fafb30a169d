//! One frame in, any number out: what smoltcp sees as its device.

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use super::config::MTU;
use super::frame::{ETHERNET, Route, checksums};
use super::reach::{self, Reach};
use super::seam::Transmit;

/// Lends one received IP packet to smoltcp and sends what it answers, framed for one guest.
pub(super) struct Wire<'a> {
    pub(super) received: Option<&'a [u8]>,
    pub(super) route: Route,
    /// Where an outgoing frame is built.
    pub(super) scratch: &'a mut Vec<u8>,
    pub(super) out: &'a mut dyn Transmit,
    /// Frames sent so far.
    pub(super) sent: u64,
    /// Of the last TCP segment sent: the sequence number after it, and its acknowledgement number.
    pub(super) last: Option<(u32, u32)>,
    /// The sequence number after the last SYN sent: that of the first octet of the stream.
    pub(super) first: Option<u32>,
    /// Which octets may not travel far.
    pub(super) reach: Reach,
}

impl<'a> Wire<'a> {
    /// A device that has `received` to lend, and sends by `out`.
    pub(super) fn new(
        received: Option<&'a [u8]>,
        route: Route,
        scratch: &'a mut Vec<u8>,
        out: &'a mut dyn Transmit,
    ) -> Self {
        Self { received, route, scratch, out, sent: 0, last: None, first: None, reach: Reach::default() }
    }
}

impl Device for Wire<'_> {
    type RxToken<'b>
        = Received<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Sending<'b>
    where
        Self: 'b;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, Sending<'_>)> {
        let packet = self.received.take()?;
        Some((Received(packet), self.token()))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(self.token())
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities()
    }
}

/// What the interface is told about its device.
pub(super) fn capabilities() -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = MTU;
    capabilities.checksum = checksums();
    capabilities
}

impl Wire<'_> {
    fn token(&mut self) -> Sending<'_> {
        Sending {
            route: self.route,
            scratch: self.scratch,
            out: self.out,
            sent: &mut self.sent,
            last: &mut self.last,
            first: &mut self.first,
            reach: &self.reach,
        }
    }
}

/// The received packet.
pub(super) struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

/// The right to send one packet.
pub(super) struct Sending<'a> {
    route: Route,
    scratch: &'a mut Vec<u8>,
    out: &'a mut dyn Transmit,
    sent: &'a mut u64,
    last: &'a mut Option<(u32, u32)>,
    first: &'a mut Option<u32>,
    reach: &'a Reach,
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let length = ETHERNET + len;
        if self.scratch.len() < length {
            // Never with the MTU told to smoltcp; cheaper to allow than to argue.
            self.scratch.resize(length, 0);
        }
        let frame = &mut self.scratch[..length];
        let result = f(&mut frame[ETHERNET..]);
        self.route.emit_ip(frame);
        if let Some(Numbers { from, to, next, ack, opens }) = numbers(&frame[ETHERNET..]) {
            *self.last = Some((next, ack));
            if opens {
                *self.first = Some(next);
            }
            if from != to
                && let Some(hop_limit) = self.reach.limit(from, to)
            {
                reach::rewrite(&mut frame[ETHERNET..], hop_limit);
            }
        }
        self.out.send(frame);
        *self.sent += 1;
        result
    }
}

/// The sequence numbers of a TCP segment.
struct Numbers {
    /// Its payload: `from..to`.
    from: u32,
    to: u32,
    /// What follows it: SYN and FIN count as one octet each (RFC 9293 §3.4).
    next: u32,
    ack: u32,
    /// It carries SYN.
    opens: bool,
}

/// Reads the numbers of an IP packet that carries TCP.
fn numbers(packet: &[u8]) -> Option<Numbers> {
    let (header, tcp) = match packet.first()? >> 4 {
        4 => (usize::from(packet[0] & 0xf) * 4, *packet.get(9)? == 6),
        _ => (40, *packet.get(6)? == 6),
    };
    let segment = packet.get(header..).filter(|s| tcp && s.len() >= 20)?;
    let word =
        |at: usize| u32::from_be_bytes([segment[at], segment[at + 1], segment[at + 2], segment[at + 3]]);
    let payload = segment.len().checked_sub(usize::from(segment[12] >> 4) * 4)? as u32;
    let (fin, syn) = (u32::from(segment[13] & 1), u32::from(segment[13] >> 1 & 1));
    let from = word(4).wrapping_add(syn);
    let to = from.wrapping_add(payload);
    Some(Numbers { from, to, next: to.wrapping_add(fin), ack: word(8), opens: syn == 1 })
}
