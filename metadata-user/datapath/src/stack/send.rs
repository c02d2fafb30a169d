//! Sends a connection's output: segments cut from the queue, one or many in a frame, FIN with the last of them, and
//! acknowledgements.

use bytes::Bytes;
use smallvec::SmallVec;
use smoltcp::wire::{IpProtocol, IpRepr};
use std::io::IoSlice;
use std::net::IpAddr;
use std::time::Duration;

use super::frame::{
    ACK, ETHERNET, EthernetAddresses, FIN, HEADER, IPV4, IPV6, PSH, RST, Segment, TCP, Tuple, before,
    checksums,
};
use super::interfaces::{LONG_MAX, Long, MTU, PIECES_PER_CONNECTION, SEGMENTS_IN_FLIGHT, Transmit, work_of};
use super::receive::safe_segment;
use super::tcb::Tcb;

/// Limit of segments sent in one turn: all that may be in flight, and one retransmission.
const SEGMENTS_PER_TURN: u32 = SEGMENTS_IN_FLIGHT + 1;

/// Where a connection sends its segments.
pub(super) struct FrameWriter<'a> {
    pub(super) workshop: &'a mut FrameBuilder,
    pub(super) out: &'a mut dyn Transmit,
}

impl Tcb {
    /// Runs the retransmission timer if it is due. All data in flight then counts as lost; returns whether there was
    /// any.
    pub(super) fn expire(&mut self, now: Duration, outlet: &mut FrameWriter<'_>) -> bool {
        if self.timer.is_none_or(|timer| now < timer) {
            return false;
        }
        self.timer = None;
        let is_lost = self.nxt != self.una;
        if is_lost {
            // A guest's link may be narrower than the MTU that a container in the guest uses, and a tap drops too
            // long frames silently (RFC 2923 §2.1).
            if self.recovery.is_too_long() {
                self.size = self.size.min(safe_segment(self.tuple.remote.0.is_ipv4()).into());
                self.recovery.too_long(self.size, self.flight());
            }
            self.recovery.timed_out(self.max, self.flight());
            self.nxt = self.una;
            // The guest's device may not take long frames although the control side believes that it does.
            self.takes_long &= !self.recovery.is_unheard();
        } else {
            self.recovery.probed();
        }
        if self.next_segment().is_none() && self.queued() > 0 {
            self.probe(now, outlet);
        }
        is_lost
    }

    /// Sends a zero-window probe: as much as fits a window too small for normal sending, but at least one byte (RFC
    /// 9293 §3.8.6.1).
    fn probe(&mut self, now: Duration, outlet: &mut FrameWriter<'_>) {
        let bytes = self.queued().min(self.window).min(self.size);
        let header = self.count(self.nxt, bytes.max(1), false, now);
        self.emit(header, bytes.max(1), outlet);
        self.recovery.forget_timing();
        // A byte beyond the window does not advance `nxt`: the guest may drop it.
        self.nxt = self.nxt.wrapping_add(bytes);
    }

    /// Sends all allowed output and any due acknowledgement, and sets the timer. `last` is called before the final
    /// segment of the current output is sent, because the guest may answer before the write returns. Returns false if
    /// output is deferred because the allowance is used up.
    pub(super) fn output(
        &mut self,
        now: Duration,
        outlet: &mut FrameWriter<'_>,
        last: impl FnOnce(&Self),
    ) -> bool {
        let (mut last, mut complete) = (Some(last), true);
        if std::mem::take(&mut self.resend) {
            let bytes = self.queued().min(self.size);
            let fin = self.closing && bytes == self.queued() && self.max == self.after_fin();
            let header = self.count(self.una, bytes, fin, now);
            self.emit(header, bytes, outlet);
        }
        for _ in 0..SEGMENTS_PER_TURN {
            let Some((bytes, fin)) = self.next_segment() else { break };
            complete = outlet.workshop.may_send();
            if !complete {
                break;
            }
            let header = self.count(self.nxt, bytes, fin, now);
            self.nxt = self.nxt.wrapping_add(bytes + u32::from(fin));
            if self.is_all_sent()
                && let Some(last) = last.take()
            {
                last(self);
            }
            self.emit(header, bytes, outlet);
        }
        if self.ack_due {
            self.bare(0, outlet);
        }
        let waits = self.flight() > 0 || self.queued() > 0;
        self.timer = waits.then(|| self.timer.unwrap_or(now + self.recovery.timeout()));
        complete
    }

    /// Bytes of the next frame, and whether it carries FIN; `None` if nothing can be sent now. More than one segment's
    /// bytes only if the guest's device takes long frames.
    fn next_segment(&self) -> Option<(u32, bool)> {
        let end = self.outbox.end();
        if before(end, self.nxt) {
            return None;
        }
        let unsent = end.wrapping_sub(self.nxt);
        let usable = self.window.min(self.recovery.window()).saturating_sub(self.nxt.wrapping_sub(self.una));
        let mut bytes = unsent.min(usable);
        if bytes > self.size {
            bytes = self.at_once(bytes);
        }
        // Only the last segment of an answer is short.
        if bytes > self.size && bytes < unsent {
            bytes -= bytes % self.size;
        }
        let fin = self.closing && bytes == unsent;
        // Sends no tiny segments into a small window (RFC 9293 §3.8.6.2.1). The last segment of an answer does not
        // wait for acknowledgements.
        let worth = bytes >= self.size || bytes == unsent || bytes >= self.largest / 2;
        (fin || (bytes > 0 && worth)).then_some((bytes, fin))
    }

    /// How many of these bytes the next frame carries. A retransmission carries one segment, because a device may have
    /// dropped the frame for its length.
    fn at_once(&self, bytes: u32) -> u32 {
        if !self.takes_long || self.nxt != self.max {
            return self.size;
        }
        bytes.min(LONG_MAX / self.size * self.size).min(self.outbox.run(self.nxt)).max(self.size)
    }

    /// Records a segment as sent, first or again. Returns its header.
    fn count(&mut self, seq: u32, bytes: u32, fin: bool, now: Duration) -> Header<'static> {
        let data_end = seq.wrapping_add(bytes);
        let next = data_end.wrapping_add(u32::from(fin));
        if seq == self.max {
            self.recovery.sent(next, now, self.max == self.una);
        } else {
            self.recovery.forget_timing();
        }
        if before(self.max, next) {
            self.max = next;
        }
        let push = if bytes > 0 && data_end == self.outbox.end() { PSH } else { 0 };
        self.header(push | if fin { FIN } else { 0 }, seq)
    }

    /// Sends a frame with this many bytes.
    fn emit(&self, header: Header<'_>, bytes: u32, outlet: &mut FrameWriter<'_>) {
        let Self { tuple, route, outbox, .. } = self;
        outlet.workshop.spend(work_of(bytes as usize));
        if bytes > self.size {
            let mut places = [IoSlice::new(&[]); PIECES_PER_CONNECTION + 1];
            let (count, hop_limit) = outbox.lend(header.seq, bytes, &mut places);
            let (is_ipv4, segment) = (tuple.remote.0.is_ipv4(), self.size as u16);
            return outlet.workshop.send_long(outlet.out, is_ipv4, &places[..count], segment, |frame| {
                header.emit_long(tuple, *route, bytes as usize, hop_limit, frame)
            });
        }
        outlet.workshop.send(outlet.out, |frame| {
            header.emit_with(tuple, *route, bytes as usize, |place| outbox.copy(header.seq, place), frame)
        });
    }

    /// Sends a segment without payload, with the number that the guest expects. The guest may not have accepted the
    /// byte of a zero-window probe.
    fn bare(&mut self, flags: u8, outlet: &mut FrameWriter<'_>) {
        let seq = if self.nxt == self.una { self.nxt } else { self.max };
        let header = self.header(flags, seq);
        outlet.workshop.send(outlet.out, |frame| header.emit(&self.tuple, self.route, frame));
    }

    /// Resets the connection.
    pub(super) fn reset(&mut self, outlet: &mut FrameWriter<'_>) {
        self.bare(RST, outlet);
    }

    fn header(&mut self, flags: u8, seq: u32) -> Header<'static> {
        self.ack_due = false;
        Header { seq, ack: Some(self.rcv), flags, window: self.offer(), options: &[] }
    }
}

// The output queue: shared pieces, cut into segments at any byte.
//
// Data is copied only into frames, and a retransmission cuts the pieces again. A piece is dropped once its last
// byte is acknowledged. An answer with a session token has a small hop limit, so that the first router behind the
// guest's own stack (a container's bridge, a proxy) drops it. Each piece has a limit, and a segment uses the
// smallest limit of the pieces it carries.

/// Pieces that a connection stores in itself: head, its tail, and body of an answer. More of them are on the heap.
const OWN_PIECES: usize = 3;

struct Piece {
    bytes: Bytes,
    hop_limit: u8,
}

/// The unacknowledged pieces of one connection.
pub(super) struct SendQueue {
    pieces: SmallVec<[Piece; OWN_PIECES]>,
    /// The sequence number of the first byte of the first piece.
    start: u32,
    /// The sequence number after the last byte of the last piece.
    end: u32,
}

impl SendQueue {
    /// Creates an empty queue whose first byte has the number `start`.
    pub(super) fn new(start: u32) -> Self {
        Self { pieces: SmallVec::new(), start, end: start }
    }

    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Reads the first piece and its reference count.
    pub(super) fn touch(&self) -> u64 {
        self.pieces.first().map_or(0, |piece| u64::from(piece.bytes.is_unique()))
    }

    /// Whether the queue holds [`PIECES_PER_CONNECTION`].
    pub(super) fn is_full(&self) -> bool {
        self.pieces.len() >= PIECES_PER_CONNECTION
    }

    /// Appends a piece; an empty one is ignored. The hop limit is clamped to 1 to 64.
    pub(super) fn push(&mut self, bytes: Bytes, hop_limit: Option<u8>) {
        if !bytes.is_empty() {
            self.end = self.end.wrapping_add(bytes.len() as u32);
            let hop_limit = hop_limit.map_or(HOP_LIMIT, |limit| limit.clamp(1, HOP_LIMIT));
            self.pieces.push(Piece { bytes, hop_limit });
        }
    }

    /// Drops the pieces that end at or before `una`.
    pub(super) fn acknowledged(&mut self, una: u32) {
        let mut done = 0;
        while let Some(piece) = self.pieces.get(done)
            && una.wrapping_sub(self.start) as usize >= piece.bytes.len()
        {
            self.start = self.start.wrapping_add(piece.bytes.len() as u32);
            done += 1;
        }
        self.pieces.drain(..done);
    }

    /// The bytes from number `from` on, piece by piece, each with its hop limit.
    fn from(&self, from: u32) -> impl Iterator<Item = (&[u8], u8)> {
        let mut skip = from.wrapping_sub(self.start) as usize;
        self.pieces.iter().filter_map(move |Piece { bytes, hop_limit }| {
            if skip >= bytes.len() {
                skip -= bytes.len();
                return None;
            }
            Some((&bytes[std::mem::take(&mut skip)..], *hop_limit))
        })
    }

    /// The bytes from number `from` on that one frame may carry: those of pieces with one hop limit.
    pub(super) fn run(&self, from: u32) -> u32 {
        let mut pieces = self.from(from).peekable();
        let limit = pieces.peek().map(|(_, limit)| *limit);
        pieces.take_while(|(_, other)| Some(*other) == limit).map(|(bytes, _)| bytes.len() as u32).sum()
    }

    /// Lends `bytes` bytes from number `from` on, all of which must be in one [`run`](Self::run), as pieces in
    /// `places`. Returns how many pieces, and their hop limit.
    pub(super) fn lend<'a>(
        &'a self,
        from: u32,
        bytes: u32,
        places: &mut [IoSlice<'a>; PIECES_PER_CONNECTION + 1],
    ) -> (usize, u8) {
        let (mut left, mut count, mut smallest) = (bytes as usize, 0, HOP_LIMIT);
        for (place, (piece, hop_limit)) in places.iter_mut().zip(self.from(from)) {
            if left == 0 {
                break;
            }
            let take = piece.len().min(left);
            *place = IoSlice::new(&piece[..take]);
            (left, count, smallest) = (left - take, count + 1, smallest.min(hop_limit));
        }
        (count, smallest)
    }

    /// Fills `place` with the bytes from number `from` on, all of which must be queued. Returns the hop limit of a
    /// segment that carries them.
    pub(super) fn copy(&self, from: u32, place: &mut [u8]) -> u8 {
        let (mut done, mut smallest) = (0, HOP_LIMIT);
        for (piece, hop_limit) in self.from(from) {
            if done == place.len() {
                break;
            }
            let take = piece.len().min(place.len() - done);
            place[done..done + take].copy_from_slice(&piece[..take]);
            (done, smallest) = (done + take, smallest.min(hop_limit));
        }
        smallest
    }
}

// Builds and sends frames: TCP segments and echo replies.

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
    use bytes::Bytes;
    use std::io::IoSlice;
    use std::net::IpAddr;

    use super::{PIECES_PER_CONNECTION, SendQueue, finish, is_complete, is_sound, pseudo, sum};

    #[test]
    fn a_run_ends_at_another_hop_limit_and_is_lent_without_a_copy() {
        let whole: Vec<u8> = (0..250).collect();
        let mut outbox = SendQueue::new(u32::MAX - 100);
        for (range, limit) in [(0..100, None), (100..180, None), (180..200, Some(1)), (200..250, None)] {
            outbox.push(Bytes::copy_from_slice(&whole[range]), limit);
        }
        for (from, run, pieces, limit) in [
            (0, 180, 2, 64),
            (99, 81, 2, 64),
            (100, 80, 1, 64),
            (185, 15, 1, 1),
            (200, 50, 1, 64),
            (250, 0, 0, 64),
        ] {
            let number = (u32::MAX - 100).wrapping_add(from);
            assert_eq!(outbox.run(number), run, "from {from}");
            let mut places = [IoSlice::new(&[]); PIECES_PER_CONNECTION + 1];
            assert_eq!(outbox.lend(number, run, &mut places), (pieces, limit), "from {from}");
            let lent: Vec<u8> = places[..pieces].iter().flat_map(|piece| piece.iter().copied()).collect();
            assert_eq!(lent, whole[from as usize..(from + run) as usize], "from {from}");
        }
    }

    #[test]
    fn any_cut_has_its_bytes_and_the_smallest_limit_of_its_pieces() {
        // Includes a base where the sequence numbers wrap.
        for base in [0_u32, 1000, u32::MAX - 150] {
            let at = |offset: usize| base.wrapping_add(offset as u32);
            let whole: Vec<u8> = (0..250).collect();
            let mut outbox = SendQueue::new(base);
            let pieces = [(0..100, None), (100..150, Some(1)), (150..200, Some(3)), (200..250, Some(0))];
            for (range, limit) in pieces {
                outbox.push(Bytes::copy_from_slice(&whole[range]), limit);
                outbox.push(Bytes::new(), Some(1));
            }
            assert_eq!(outbox.end(), at(250));
            let cases = [
                (0, 100, 64),
                (0, 101, 1),
                (149, 150, 1),
                (149, 151, 1),
                (150, 151, 3),
                (150, 200, 3),
                (199, 250, 1),
                (0, 250, 1),
            ];
            for (from, to, limit) in cases {
                let mut cut = vec![0; to - from];
                assert_eq!(outbox.copy(at(from), &mut cut), limit, "{from}..{to} from {base}");
                assert_eq!(cut, whole[from..to]);
            }
            outbox.acknowledged(at(149));
            let mut cut = [0; 1];
            assert_eq!((outbox.copy(at(149), &mut cut), cut), (1, [149]));
            outbox.acknowledged(at(150));
            assert_eq!((outbox.copy(at(150), &mut cut), cut, outbox.pieces.len()), (3, [150], 2));
            outbox.acknowledged(at(250));
            assert_eq!((outbox.pieces.len(), outbox.start), (0, at(250)));
        }
    }

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
