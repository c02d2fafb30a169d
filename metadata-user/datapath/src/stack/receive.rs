//! Processes a segment of a connection (RFC 9293 §3.10.7.4, RFC 5961).
//!
//! Out-of-order segments are not buffered: the guest gets an acknowledgement of what is missing at once, and
//! retransmits. Requests are only a segment or two long.

use metadata_common::answer::{SEGMENT_UNSAID_V4, SEGMENT_UNSAID_V6, segment_v4, segment_v6};
use metadata_common::cookie::{CookieKey, Flow, SCALE_MAX, TcpOptions, again, issue};
use std::time::Duration;

use super::config::RECEIVE_BUFFER;
use super::emit::Header;
use super::frame::{ACK, EthernetAddresses, FIN, RST, SYN, Segment, before};
use super::tcb::Tcb;

/// The result of a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SegmentOutcome<'a> {
    /// The next bytes in sequence, possibly none.
    Taken(&'a [u8]),
    /// The guest has reset the connection.
    Reset,
}

const NOTHING: SegmentOutcome<'_> = SegmentOutcome::Taken(&[]);

impl Tcb {
    /// Whether a segment's numbers are plausible for this connection.
    pub(super) fn expects(&self, segment: &Segment<'_>) -> bool {
        let acknowledges = segment.ack.is_none_or(|ack| !before(ack, self.una) && !before(self.max, ack));
        self.accepts(segment) && acknowledges
    }

    /// The acceptability test (RFC 9293 §3.10.7.4, first step). A segment that starts at the next byte is accepted
    /// even if the window is closed.
    fn accepts(&self, segment: &Segment<'_>) -> bool {
        let ahead = segment.seq.wrapping_sub(self.rcv);
        let end = segment.seq.wrapping_add(segment.length());
        ahead < self.receive_window().max(1) || (before(segment.seq, self.rcv) && before(self.rcv, end))
    }

    /// Processes a segment of this connection.
    pub(super) fn arrived<'a>(&mut self, segment: &Segment<'a>, now: Duration) -> SegmentOutcome<'a> {
        let accepted = self.accepts(segment);
        if segment.has(RST) {
            // RFC 5961 §3.2: only a reset with exactly the next number is valid.
            if segment.seq == self.rcv {
                return SegmentOutcome::Reset;
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
    fn take<'a>(&mut self, segment: &Segment<'a>, now: Duration) -> SegmentOutcome<'a> {
        let length = segment.length();
        if length == 0 {
            return NOTHING;
        }
        self.ack_due = true;
        // Earlier bytes are missing, or the segment lies after a FIN.
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
        SegmentOutcome::Taken(fits)
    }

    /// Records that the guest's FIN is next in sequence.
    pub(super) fn finished(&mut self, now: Duration) {
        self.rcv = self.rcv.wrapping_add(1);
        self.guest_finished = true;
        self.progress = now;
    }
}

// Answers a SYN without keeping state.
//
// The kernel programs answer most SYNs by the same rules, so a SYN and its retransmissions get the same number from
// either. SYNs whose four-tuple has a connection always come to the stack.

const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;
const WINDOW_SCALE: u8 = 3;

/// Limit of payload bytes per segment to a device with this MTU; an MTU of 0 means unknown.
pub(super) const fn largest_segment(is_ipv4: bool, mtu: u32) -> u16 {
    if is_ipv4 { segment_v4(mtu) } else { segment_v6(mtu) }
}

/// Payload bytes that every host accepts over IPv4 and every link over IPv6 (RFC 9293 §3.7.1).
pub(super) const fn safe_segment(is_ipv4: bool) -> u16 {
    if is_ipv4 { SEGMENT_UNSAID_V4 } else { SEGMENT_UNSAID_V6 }
}

/// Reads a SYN's options, for a link that takes segments of `largest` bytes. A missing size or size 0 means the size
/// every host accepts. The last of several sizes counts, as in the kernel programs.
pub(super) fn abilities(segment: &Segment<'_>, largest: u16) -> TcpOptions {
    let is_ipv4 = segment.tuple.remote.0.is_ipv4();
    let mut said = TcpOptions { segment: safe_segment(is_ipv4), scale: None };
    let mut rest = segment.options;
    // The loop is bounded: each option takes at least one byte, and there are at most 40.
    while let [kind, after @ ..] = rest {
        match *kind {
            END => break,
            NO_OPERATION => {
                rest = after;
                continue;
            }
            _ => {}
        }
        let Some(option) = after.first().and_then(|length| rest.get(..usize::from(*length))) else { break };
        match option {
            [MAXIMUM_SEGMENT_SIZE, 4, high, low] => {
                said.segment = match u16::from_be_bytes([*high, *low]) {
                    0 => safe_segment(is_ipv4),
                    size => size.min(largest),
                };
            }
            [WINDOW_SCALE, 3, shift] => said.scale = Some((*shift).min(SCALE_MAX)),
            // The option is shorter than its own header, so the next one cannot be found.
            [] | [_] => break,
            _ => {}
        }
        rest = &rest[option.len()..];
    }
    said
}

/// The sequence number that answers a SYN. `largest` is the limit of payload bytes in both directions. The number is
/// never `taken`, the initial number of the flow's current connection.
pub(super) fn number(
    key: &CookieKey,
    flow: Flow,
    largest: u16,
    segment: &Segment<'_>,
    taken: Option<u32>,
) -> u32 {
    let number = issue(key, flow, segment.seq, abilities(segment, largest));
    if taken == Some(number) { again(number) } else { number }
}

/// Builds the SYN-ACK with this sequence number and a maximum segment size of `largest` bytes (RFC 9293 §3.10.7.2).
/// Returns the frame's length.
pub(super) fn answer(
    number: u32,
    largest: u16,
    segment: &Segment<'_>,
    route: EthernetAddresses,
    frame: &mut [u8],
) -> usize {
    let said = abilities(segment, largest);
    let [high, low] = largest.to_be_bytes();
    let options = [MAXIMUM_SEGMENT_SIZE, 4, high, low, NO_OPERATION, WINDOW_SCALE, 3, 0];
    let header = Header {
        seq: number,
        ack: Some(segment.seq.wrapping_add(1)),
        flags: SYN,
        window: RECEIVE_BUFFER as u16,
        // Window scale is offered only if the guest offers it (RFC 7323 §2.2); ours is 0.
        options: if said.scale.is_some() { &options } else { &options[..4] },
    };
    header.emit(&segment.tuple, route, frame)
}

#[cfg(test)]
mod tests {
    use metadata_common::cookie::TcpOptions;
    use std::net::IpAddr;

    use super::abilities;
    use crate::stack::frame::{SYN, Segment, Tuple};

    #[test]
    fn options_are_read_up_to_the_first_malformed_one() {
        let v4 = IpAddr::from([10, 0, 0, 1]);
        let v6 = IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 1]);
        type Case = (&'static str, IpAddr, &'static [u8], (u16, Option<u8>));
        let cases: [Case; 14] = [
            ("none", v4, &[], (536, None)),
            ("none over IPv6", v6, &[], (1220, None)),
            ("a size", v4, &[2, 4, 5, 180], (1460, None)),
            ("an excessive size", v4, &[2, 4, 255, 255], (1460, None)),
            ("an excessive size over IPv6", v6, &[2, 4, 5, 180], (1440, None)),
            ("size 0", v4, &[2, 4, 0, 0], (536, None)),
            ("two sizes", v4, &[2, 4, 5, 180, 2, 4, 4, 0], (1024, None)),
            ("a size, then size 0", v4, &[2, 4, 5, 180, 2, 4, 0, 0], (536, None)),
            ("Linux", v4, &[2, 4, 5, 180, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7], (1460, Some(7))),
            ("an excessive shift", v4, &[3, 3, 200, 0], (536, Some(14))),
            ("after the end", v4, &[0, 2, 4, 5, 180, 0, 0, 0], (536, None)),
            ("length 0", v4, &[9, 0, 2, 4, 5, 180, 0, 0], (536, None)),
            ("length 1", v4, &[9, 1, 2, 4, 5, 180, 0, 0], (536, None)),
            ("truncated", v4, &[1, 1, 2, 4], (536, None)),
        ];
        for (name, guest, options, (size, scale)) in cases {
            let tuple = Tuple { remote: (guest, 1), local: (guest, 80) };
            let segment = Segment { tuple, seq: 1, ack: None, window: 1, flags: SYN, options, payload: &[] };
            let largest = super::largest_segment(guest.is_ipv4(), 0);
            assert_eq!(abilities(&segment, largest), TcpOptions { segment: size, scale }, "{name}");
        }
    }

    #[test]
    fn the_largest_segment_fits_the_mtu() {
        assert_eq!(super::largest_segment(true, 0) as usize, crate::stack::MTU - 40);
        assert_eq!(super::largest_segment(false, 0) as usize, crate::stack::MTU - 60);
    }
}
