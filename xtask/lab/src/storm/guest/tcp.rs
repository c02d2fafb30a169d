//! One connection that behaves as a Linux guest's: a SYN with Linux's options, delayed acknowledgements, selective
//! acknowledgements of gaps, and retransmission with backoff.
//!
//! Requests are smaller than any MSS and sent one at a time. So there is no send window to track, and at most one of
//! SYN, request and FIN is outstanding.

use super::wire::{ACK, FIN, Header, RST, SYN, WINDOW_SCALE};

/// Nanoseconds.
pub(crate) type Nanos = u64;
pub(super) const MILLISECOND: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// The time before a SYN is sent again (RFC 6298 §2.1). It doubles each time.
const SYN_RTO: Nanos = SECOND;
/// The least time before another segment is sent again: Linux's TCP_RTO_MIN.
const RTO_MIN: Nanos = 200 * MILLISECOND;
/// How often a segment is sent again before the connection is given up: Linux's tcp_syn_retries.
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
            Send::Request => (ACK | super::wire::PSH, self.unacked),
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
        self.taken = self.taken.saturating_add(bytes.div_ceil(usize::from(super::wire::MSS)).min(2) as u8);
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
