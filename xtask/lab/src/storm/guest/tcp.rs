//! One connection that behaves as a Linux guest's: a SYN with Linux's options, delayed acknowledgements, selective
//! acknowledgements of gaps, and retransmission with backoff.
//!
//! Requests are smaller than any MSS and sent one at a time. So there is no send window to track, and at most one of
//! SYN, request and FIN is outstanding.

use metadata_common::mac::Mac;
use std::net::Ipv4Addr;

use crate::storm::guest;

/// Nanoseconds.
pub(crate) type Nanos = u64;
pub(super) const MILLISECOND: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// The time before a SYN is sent again (RFC 6298 §2.1). It doubles each time.
const SYN_RTO: Nanos = SECOND;
/// The least time before another segment is retransmitted: Linux's TCP_RTO_MIN.
const RTO_MIN: Nanos = 200 * MILLISECOND;
/// How often a segment is retransmitted before the connection is given up: Linux's tcp_syn_retries.
const RETRIES: u8 = 6;
/// The delay of an acknowledgement: Linux's TCP_DELACK_MIN.
const DELAYED_ACK: Nanos = 40 * MILLISECOND;
/// Number of first segments of a connection that are acknowledged at once: Linux's TCP_MAX_QUICKACKS.
const QUICK_ACKS: u8 = 16;
/// The receive window of a guest that reads at once, in bytes.
const WINDOW: u32 = 256 << 10;
/// The receive window of a slow reader, in bytes.
const SLOW_WINDOW: u32 = 8 << 10;
/// Bytes that a slow reader reads, and the pause between two reads.
const SLOW_CHUNK: u32 = 4 << 10;
const SLOW_PAUSE: Nanos = 50 * MILLISECOND;
/// The most segments kept out of order. Further ones are discarded.
const EARLY_MOST: usize = 256;
/// The most SACK blocks of an acknowledgement. With timestamps no more fit (RFC 2018 §3).
const SACKS_MOST: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    SynSent,
    Open,
    /// The FIN is sent but not acknowledged.
    FinSent,
    /// The FIN is acknowledged. The server's FIN may be missing.
    FinAcked,
}

/// A segment to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Send {
    Syn,
    Ack,
    /// The current request.
    Request,
    Fin,
    Reset,
}

/// The meaning of a segment for the owner of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Nothing,
    /// The handshake is complete. The owner acknowledges it and sends the request.
    Opened,
    /// Payload arrived. Its first `skip` bytes are old, and the others are the next ones.
    Data {
        skip: usize,
    },
    /// The server has closed its side, and all of its bytes have been delivered.
    Ended,
    /// The server reset the connection.
    Reset,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) port: u16,
    state: State,
    /// The oldest byte that is not acknowledged, and the next one to send.
    unacked: u32,
    next: u32,
    /// Bytes of the outstanding request.
    asked: u32,
    expected: u32,
    ended: bool,
    /// The server's last timestamp, if the server uses timestamps.
    stamp: Option<u32>,
    sent_at: Nanos,
    rto: Nanos,
    retries: u8,
    retransmit_at: Option<Nanos>,
    ack_at: Option<Nanos>,
    quick: u8,
    /// Segments received since the last acknowledgement.
    taken: u8,
    early: Vec<(u32, Vec<u8>)>,
    /// Bytes that a slow reader has not read yet, and the time of its next read; `None` for other guests.
    unread: Option<(u32, Nanos)>,
}

/// Whether `a` comes before `b` (RFC 9293 §3.4).
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Connection {
    /// Makes a connection that is about to send its SYN.
    pub(super) fn new(port: u16, first: u32, slow: bool, now: Nanos) -> Self {
        Self {
            port,
            state: State::SynSent,
            unacked: first,
            next: first.wrapping_add(1),
            asked: 0,
            expected: 0,
            ended: false,
            stamp: Some(0),
            sent_at: now,
            rto: SYN_RTO,
            retries: 0,
            retransmit_at: Some(now + SYN_RTO),
            ack_at: None,
            quick: QUICK_ACKS,
            taken: 0,
            early: Vec::new(),
            unread: slow.then_some((0, now + SLOW_PAUSE)),
        }
    }

    /// Returns when [`Connection::due`] must be called.
    pub(super) fn wake_at(&self) -> Nanos {
        let read_at = self.unread.filter(|(unread, _)| *unread > 0).map(|(_, at)| at);
        [self.retransmit_at, self.ack_at, read_at].into_iter().flatten().min().unwrap_or(Nanos::MAX)
    }

    /// Whether both sides of a closed connection have ended.
    pub(super) fn is_over(&self) -> bool {
        self.state == State::FinAcked && self.ended
    }

    /// Whether the handshake is incomplete.
    pub(super) fn is_opening(&self) -> bool {
        self.state == State::SynSent
    }

    /// Whether the server has closed its side.
    pub(super) fn is_ended(&self) -> bool {
        self.ended
    }

    /// Records that a request of this length is sent now.
    pub(super) fn ask(&mut self, length: usize, now: Nanos) {
        self.asked = length as u32;
        self.next = self.unacked.wrapping_add(self.asked);
        self.outstanding(now);
    }

    /// Records that a FIN is sent now.
    pub(super) fn close(&mut self, now: Nanos) {
        self.state = State::FinSent;
        // The answer implies that the request arrived. The request is not sent again, even if it was never
        // acknowledged.
        self.unacked = self.next;
        self.asked = 0;
        self.next = self.next.wrapping_add(1);
        self.early.clear();
        self.unread = None;
        self.outstanding(now);
    }

    fn outstanding(&mut self, now: Nanos) {
        self.retries = 0;
        self.retransmit_at = Some(now + self.rto);
    }

    /// Returns the header of a segment. Every segment but a SYN acknowledges.
    pub(super) fn header(&mut self, send: Send, now: Nanos) -> Header {
        let (flags, seq) = match send {
            Send::Syn => (SYN, self.unacked),
            Send::Ack => (ACK, self.next),
            Send::Request => (ACK | PSH, self.unacked),
            Send::Fin => (ACK | FIN, self.unacked),
            Send::Reset => (ACK | RST, self.next),
        };
        self.ack_at = None;
        self.taken = 0;
        let window = match self.unread {
            None => WINDOW,
            Some((unread, _)) => SLOW_WINDOW.saturating_sub(unread),
        };
        // A SYN's window is not scaled (RFC 7323 §2.2).
        let window = if send == Send::Syn { 64_240 } else { (window >> WINDOW_SCALE) as u16 };
        let ack = if send == Send::Syn { 0 } else { self.expected };
        let stamp = self.stamp.map(|stamp| ((now / MILLISECOND) as u32, stamp));
        Header { port: self.port, seq, ack, flags, window, timestamps: stamp }
    }

    /// Collects the ranges received out of order, the lowest first.
    pub(super) fn sacks(&self, out: &mut Vec<(u32, u32)>) {
        out.clear();
        for (seq, bytes) in &self.early {
            let end = seq.wrapping_add(bytes.len() as u32);
            let full = out.len() == SACKS_MOST;
            match out.last_mut() {
                Some(last) if !before(last.1, *seq) => {
                    last.1 = if before(last.1, end) { end } else { last.1 }
                }
                _ if full => return,
                _ => out.push((*seq, end)),
            }
        }
    }

    /// Returns the segment whose timer has expired, or [`Due::GiveUp`] after too many retransmissions.
    pub(super) fn due(&mut self, now: Nanos) -> Due {
        if self.retransmit_at.is_some_and(|at| at <= now) {
            if self.retries == RETRIES {
                return Due::GiveUp;
            }
            self.retries += 1;
            self.rto *= 2;
            self.retransmit_at = Some(now + self.rto);
            return Due::Again(match self.state {
                State::SynSent => Send::Syn,
                State::Open => Send::Request,
                State::FinSent | State::FinAcked => Send::Fin,
            });
        }
        if let Some((unread, at)) = &mut self.unread
            && *at <= now
            && *unread > 0
        {
            *unread = unread.saturating_sub(SLOW_CHUNK);
            *at = now + SLOW_PAUSE;
            return Due::Send(Send::Ack);
        }
        if self.ack_at.is_some_and(|at| at <= now) {
            return Due::Send(Send::Ack);
        }
        Due::Nothing
    }

    /// Handles a segment of this connection. After [`Event::Data`], the owner takes the bytes and calls
    /// [`Connection::took`]. The second value is true if an acknowledgement must be sent, whatever the event.
    pub(super) fn segment(&mut self, header: &Header, payload: &[u8], now: Nanos) -> (Event, bool) {
        if header.flags & RST != 0 {
            return self.reset(header);
        }
        if self.state == State::SynSent {
            return self.opened(header, now);
        }
        if header.flags & SYN != 0 {
            // The SYN-ACK was sent again because our acknowledgement was lost (RFC 9293 §3.10.7.4).
            return (Event::Nothing, true);
        }
        self.acknowledged(header);
        if let Some((value, _)) = header.timestamps
            && !before(self.expected, header.seq)
        {
            self.stamp = self.stamp.map(|_| value);
        }
        let fin = header.flags & FIN != 0;
        if payload.is_empty() && !fin {
            return (Event::Nothing, false);
        }
        if self.state != State::Open {
            return self.after_close(header, payload.len(), fin);
        }
        self.payload(header.seq, payload, fin)
    }

    fn reset(&mut self, header: &Header) -> (Event, bool) {
        let ours = if self.state == State::SynSent {
            header.flags & ACK != 0 && header.ack == self.next
        } else {
            header.seq == self.expected
        };
        (if ours { Event::Reset } else { Event::Nothing }, false)
    }

    fn opened(&mut self, header: &Header, now: Nanos) -> (Event, bool) {
        if header.flags & (SYN | ACK) != SYN | ACK || header.ack != self.next {
            return (Event::Nothing, false);
        }
        self.state = State::Open;
        self.unacked = self.next;
        self.expected = header.seq.wrapping_add(1);
        self.stamp = header.timestamps.map(|(value, _)| value);
        self.retransmit_at = None;
        // RFC 6298 §2.2 with Linux's lower limit of the variance, or §5.7 after a SYN that was sent twice.
        let took = now - self.sent_at;
        self.rto = if self.retries == 0 { took + RTO_MIN.max(2 * took) } else { 3 * SECOND };
        self.retries = 0;
        (Event::Opened, true)
    }

    fn acknowledged(&mut self, header: &Header) {
        if header.flags & ACK == 0 || header.ack != self.next || self.unacked == self.next {
            return;
        }
        self.unacked = self.next;
        self.asked = 0;
        self.retransmit_at = None;
        if self.state == State::FinSent {
            self.state = State::FinAcked;
        }
    }

    /// Handles a segment after the guest has closed. Payload is ignored, but the server's FIN is awaited.
    fn after_close(&mut self, header: &Header, length: usize, fin: bool) -> (Event, bool) {
        let end = header.seq.wrapping_add(length as u32);
        if !before(end, self.expected) {
            self.expected = end.wrapping_add(u32::from(fin && !self.ended));
            self.ended |= fin;
        }
        (Event::Nothing, true)
    }

    fn payload(&mut self, seq: u32, payload: &[u8], fin: bool) -> (Event, bool) {
        let skip = self.expected.wrapping_sub(seq);
        if before(self.expected, seq) {
            self.keep_early(seq, payload);
            return (Event::Nothing, true);
        }
        if skip as usize > payload.len() || (skip as usize == payload.len() && !fin) || self.ended {
            return (Event::Nothing, true);
        }
        let skip = skip as usize;
        self.expected = self.expected.wrapping_add((payload.len() - skip) as u32);
        if let Some((unread, _)) = &mut self.unread {
            *unread += (payload.len() - skip) as u32;
        }
        if fin {
            self.expected = self.expected.wrapping_add(1);
            self.ended = true;
        }
        if payload.len() == skip {
            return (Event::Ended, true);
        }
        (Event::Data { skip }, fin)
    }

    fn keep_early(&mut self, seq: u32, payload: &[u8]) {
        if payload.is_empty() || self.early.len() == EARLY_MOST {
            return;
        }
        let at = self.early.partition_point(|(other, _)| before(*other, seq));
        if self.early.get(at).is_none_or(|(other, _)| *other != seq) {
            self.early.insert(at, (seq, payload.to_vec()));
        }
    }

    /// Returns the next segment that was out of order and has become the next in order.
    pub(super) fn ripe(&mut self) -> Option<(u32, Vec<u8>)> {
        let (seq, _) = self.early.first()?;
        (!before(self.expected, *seq)).then(|| self.early.remove(0))
    }

    /// Whether the payload just taken must be acknowledged at once: every second segment, the first segments of a
    /// connection, and all segments while there is a gap (RFC 5681 §4.2). Other segments are acknowledged a little
    /// later.
    pub(super) fn took(&mut self, bytes: usize, now: Nanos) -> bool {
        // An aggregate counts as the segments in it, at most two.
        self.taken = self.taken.saturating_add(bytes.div_ceil(usize::from(MSS)).min(2) as u8);
        if self.quick > 0 {
            self.quick -= 1;
            return true;
        }
        if self.taken >= 2 || !self.early.is_empty() {
            return true;
        }
        self.ack_at.get_or_insert(now + DELAYED_ACK);
        false
    }
}

/// The action that a connection needs because of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    Send(Send),
    /// A retransmission.
    Again(Send),
    /// The last retransmission has timed out.
    GiveUp,
}

// Reads and writes a guest's frames: ARP (RFC 826), IPv4 (RFC 791) and TCP (RFC 9293) in Ethernet II.
//
// All received frames are checked, as a guest's kernel does unless its NIC has already checked them.

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
    if !guest::good(guest::add(0, &packet[..head])) {
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
    if !partial && !guest::good(guest::add(pseudo(ends, segment.len()), segment)) {
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
    let addresses = guest::add(guest::add(0, &ends.address.octets()), &ends.server.octets());
    // A segment fits into one packet, so its length fits into 16 bits.
    guest::add(addresses, &[0, PROTOCOL_TCP]) + u64::from((length as u16).to_be())
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
    let check = !guest::folded(guest::add(0, &out[ip..tcp]));
    out[ip + 10..ip + 12].copy_from_slice(&check.to_ne_bytes());
    let check = if partial {
        guest::folded(pseudo(ends, length))
    } else {
        !guest::folded(guest::add(pseudo(ends, length), &out[tcp..]))
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

/// The shift of the windows that a guest offers, as Linux has it whose `tcp_rmem` ends at 32 MiB. A server that reads the
/// windows without it sees less than an answer's length.
pub(crate) const WINDOW_SCALE: u8 = 10;

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
