//! Processes a segment of a connection (RFC 9293 §3.10.7.4, RFC 5961).
//!
//! Out-of-order segments are not buffered: the guest gets an acknowledgement of what is missing at once, and
//! retransmits. Requests are only a segment or two long.

use std::time::Duration;

use super::segment::{ACK, FIN, RST, SYN, Segment, before};
use super::tcb::Tcb;

/// The result of a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival<'a> {
    /// The next octets in sequence, possibly none.
    Taken(&'a [u8]),
    /// The guest has reset the connection.
    Reset,
}

const NOTHING: Arrival<'_> = Arrival::Taken(&[]);

impl Tcb {
    /// Whether a segment's numbers are plausible for this connection.
    pub(super) fn expects(&self, segment: &Segment<'_>) -> bool {
        let acknowledges = segment.ack.is_none_or(|ack| !before(ack, self.una) && !before(self.max, ack));
        self.accepts(segment) && acknowledges
    }

    /// The acceptability test (RFC 9293 §3.10.7.4, first step). A segment that starts at the next octet is accepted
    /// even if the window is closed.
    fn accepts(&self, segment: &Segment<'_>) -> bool {
        let ahead = segment.seq.wrapping_sub(self.rcv);
        let end = segment.seq.wrapping_add(segment.length());
        ahead < self.receive_window().max(1) || (before(segment.seq, self.rcv) && before(self.rcv, end))
    }

    /// Processes a segment of this connection.
    pub(super) fn arrived<'a>(&mut self, segment: &Segment<'a>, now: Duration) -> Arrival<'a> {
        let accepted = self.accepts(segment);
        if segment.has(RST) {
            // RFC 5961 §3.2: only a reset with exactly the next number is valid.
            if segment.seq == self.rcv {
                return Arrival::Reset;
            }
            if accepted {
                self.challenge(now);
            }
            return NOTHING;
        }
        if !accepted || segment.has(SYN) {
            if segment.length() == 0 || segment.has(SYN) {
                self.challenge(now);
            } else {
                self.ack_due = true;
            }
            return NOTHING;
        }
        let Some(ack) = segment.ack else { return NOTHING };
        if before(self.max, ack) {
            self.challenge(now);
            return NOTHING;
        }
        if !before(ack, self.una) {
            self.on_acknowledgement(ack, segment, now);
        }
        self.take(segment, now)
    }

    /// Processes an acknowledgement and its window.
    fn on_acknowledgement(&mut self, ack: u32, segment: &Segment<'_>, now: Duration) {
        let window = u32::from(segment.window) << self.scale;
        let advances = before(self.una, ack);
        if advances {
            self.acknowledged(ack, now);
        } else if segment.flags & (ACK | FIN) == ACK
            && segment.payload.is_empty()
            && window == self.window
            && self.nxt != self.una
        {
            self.resend |= self.recovery.duplicate(self.una, self.max, self.flight());
        }
        // A segment that acknowledges more has the newer window, whatever its own sequence number. Linux does the
        // same.
        if advances || !before(segment.seq, self.window_seq) {
            if window > self.window && self.nxt == self.una {
                self.timer = None;
                self.recovery.reopened();
            }
            self.window_seq = segment.seq;
            self.window = window;
            self.largest = self.largest.max(window);
        }
    }

    /// Records that the guest has received everything before `ack`.
    pub(super) fn acknowledged(&mut self, ack: u32, now: Duration) {
        let acked = ack.wrapping_sub(self.una);
        self.una = ack;
        if before(self.nxt, ack) {
            self.nxt = ack;
        }
        self.outbox.acknowledged(ack);
        self.progress = now;
        self.timer = None;
        let flight = self.flight();
        self.resend = self.recovery.acknowledged(ack, acked, flight, now) && flight > 0;
    }

    /// Processes payload and FIN.
    fn take<'a>(&mut self, segment: &Segment<'a>, now: Duration) -> Arrival<'a> {
        let length = segment.length();
        if length == 0 {
            return NOTHING;
        }
        self.ack_due = true;
        // Earlier octets are missing, or the segment lies after a FIN.
        if before(self.rcv, segment.seq) || self.guest_finished {
            return NOTHING;
        }
        let known = self.rcv.wrapping_sub(segment.seq) as usize;
        let payload = segment.payload.get(known..).unwrap_or_default();
        let fits = &payload[..payload.len().min(self.receive_window() as usize)];
        self.rcv = self.rcv.wrapping_add(fits.len() as u32);
        if segment.has(FIN) && fits.len() == payload.len() {
            self.finished(now);
        }
        Arrival::Taken(fits)
    }

    /// Records that the guest's FIN is next in sequence.
    pub(super) fn finished(&mut self, now: Duration) {
        self.rcv = self.rcv.wrapping_add(1);
        self.guest_finished = true;
        self.progress = now;
    }
}
