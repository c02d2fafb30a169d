//! A minimal TCP for a guest.
//!
//! It has one connection at a time per port, and keeps no segments that arrive out of order. It retransmits after
//! 200 ms, and doubles this time with each retransmission (RFC 6298).

use metadata_common::maps::Slot;
use smoltcp::wire::TcpControl;
use std::time::Duration;
use support::raw::{Reply, SYN_ACK, Segment};

use super::script::{End, Plan, SEGMENT};

pub(super) const SLOT: Slot = 7;

const RTO: Duration = Duration::from_millis(200);
const RTO_MAX: Duration = Duration::from_secs(2);
const WINDOW: u16 = u16::MAX;
const DELAYED_ACK: Duration = Duration::from_millis(40);
/// Time from the end of an answer to the guest's FIN. The stack has not yet read the kernel's table by then.
const LATER: Duration = Duration::from_millis(100);

/// The outcome of a connection, as the guest's program sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The bytes received. Empty if the guest abandoned the connection, because their number is then random.
    pub(super) received: Vec<u8>,
    pub(super) how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Both sides have sent a FIN, and the service has acknowledged the guest's.
    Closed,
    /// The service has reset the connection.
    Reset,
    /// The guest has abandoned the connection.
    Left,
}

/// One connection.
pub(super) struct Talk {
    plan: Plan,
    port: u16,
    /// The guest's sequence numbers: first unacknowledged, next to send, and next to queue.
    una: u32,
    nxt: u32,
    end: u32,
    /// The sequence number of the first byte to send, and the bytes.
    first: u32,
    bytes: Vec<u8>,
    /// Whether a FIN follows the bytes.
    closing: bool,
    /// The next expected sequence number; `None` before the service's SYN.
    rcv: Option<u32>,
    received: Vec<u8>,
    /// Number of answers with a complete head, and the offset at which the last of them ends.
    answers: (usize, usize),
    segments: usize,
    peer_closed: bool,
    timer: Option<Duration>,
    backoff: u32,
    ack_at: Option<Duration>,
    close_at: Option<Duration>,
    how: Option<How>,
}

impl Talk {
    pub(super) fn begin(plan: Plan, port: u16, isn: u32, now: Duration) -> Self {
        let mut talk = Self {
            port,
            una: isn,
            nxt: isn,
            end: isn.wrapping_add(1),
            first: isn.wrapping_add(1),
            bytes: Vec::new(),
            closing: false,
            rcv: None,
            received: Vec::new(),
            answers: (0, 0),
            segments: 0,
            peer_closed: false,
            timer: Some(now),
            backoff: 0,
            ack_at: None,
            close_at: None,
            how: None,
            plan,
        };
        talk.ask();
        if talk.plan.end == End::HalfClose {
            talk.close();
        }
        talk
    }

    /// `None` while the connection is open.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        let received = |how| if how == How::Left { Vec::new() } else { self.received.clone() };
        self.how.map(|how| Outcome { received: received(how), how })
    }

    pub(super) fn wake_at(&self) -> Option<Duration> {
        [self.timer, self.ack_at, self.close_at].into_iter().flatten().min()
    }

    fn ask(&mut self) {
        self.bytes.extend(self.plan.request());
        self.end = self.first.wrapping_add(self.bytes.len() as u32);
    }

    fn close(&mut self) {
        if !self.closing {
            self.closing = true;
            self.end = self.end.wrapping_add(1);
        }
    }

    /// Runs the timers that are due.
    pub(super) fn step(&mut self, now: Duration, out: &mut Vec<Segment>) {
        if self.timer.is_some_and(|timer| timer <= now) {
            self.timer = None;
            if self.nxt != self.una {
                self.backoff += 1;
                self.nxt = self.una;
            }
        }
        if self.close_at.is_some_and(|at| at <= now) {
            self.close_at = None;
            self.close();
        }
        self.send(now, out);
        if self.ack_at.is_some_and(|at| at <= now) {
            self.acknowledge(out);
        }
    }

    fn segment(&self, seq: u32) -> Segment {
        Segment { window: WINDOW, ..Segment::ack(self.port, seq, self.rcv.unwrap_or(0)) }
    }

    fn acknowledge(&mut self, out: &mut Vec<Segment>) {
        self.ack_at = None;
        out.push(self.segment(self.nxt));
    }

    /// Sends everything that is queued: the SYN, or the bytes and the FIN.
    fn send(&mut self, now: Duration, out: &mut Vec<Segment>) {
        let Some(_) = self.rcv else {
            if self.nxt == self.una && self.how.is_none() {
                out.push(Segment { mss: Some(SEGMENT), ..Segment::syn(self.port, self.una) });
                self.nxt = self.first;
                self.arm(now);
            }
            return;
        };
        if self.nxt == self.end {
            return;
        }
        let from = self.nxt.wrapping_sub(self.first) as usize;
        let mut segment = self.segment(self.nxt).with(self.bytes.get(from..).unwrap_or_default());
        if self.closing {
            segment = segment.control(TcpControl::Fin);
        }
        self.ack_at = None;
        out.push(segment);
        self.nxt = self.end;
        self.arm(now);
    }

    fn arm(&mut self, now: Duration) {
        self.timer = Some(now + (RTO * 2_u32.pow(self.backoff.min(6))).min(RTO_MAX));
    }

    /// Processes a segment.
    pub(super) fn arrive(&mut self, now: Duration, reply: &Reply, out: &mut Vec<Segment>) {
        let Some(rcv) = self.rcv else { return self.arrive_in_syn_sent(now, reply, out) };
        let (syn, _, fin, rst) = reply.flags;
        if rst {
            if reply.seq == rcv && self.how.is_none() {
                self.how = Some(How::Reset);
                (self.timer, self.ack_at, self.close_at) = (None, None, None);
            }
            return;
        }
        match (self.how, self.plan.end) {
            (Some(How::Left), End::Reboot(_)) | (Some(How::Reset), _) => return,
            (Some(How::Left), _) => return out.push(self.segment(reply.ack).control(TcpControl::Rst)),
            _ if syn => return self.acknowledge(out),
            _ => {}
        }
        let length = reply.payload.len() as u32 + u32::from(fin);
        let ends_behind = before(rcv, reply.seq.wrapping_add(length));
        let ahead = reply.seq.wrapping_sub(rcv);
        // RFC 9293 §3.10.7.4: a segment outside the window is ignored, including its acknowledgement.
        if ahead >= WINDOW.into() && !(before(reply.seq, rcv) && ends_behind) {
            if length > 0 {
                self.acknowledge(out);
            }
            return;
        }
        let acked = reply.ack.wrapping_sub(self.una);
        if acked > 0 && acked <= self.end.wrapping_sub(self.una) {
            self.una = reply.ack;
            self.nxt = if before(self.nxt, self.una) { self.una } else { self.nxt };
            self.backoff = 0;
            self.timer = None;
            if self.una != self.nxt {
                self.arm(now);
            }
        }
        if !reply.payload.is_empty() || fin {
            self.take(now, reply, rcv, out);
        }
        self.decide(now, out);
        self.send(now, out);
    }

    fn arrive_in_syn_sent(&mut self, now: Duration, reply: &Reply, out: &mut Vec<Segment>) {
        if reply.ack != self.first {
            if self.plan.resets && !reply.flags.3 {
                out.push(
                    Segment { ack: None, ..Segment::ack(self.port, reply.ack, 0) }.control(TcpControl::Rst),
                );
            }
        } else if reply.flags == SYN_ACK {
            self.rcv = Some(reply.seq.wrapping_add(1));
            self.una = self.first;
            (self.timer, self.backoff) = (None, 0);
            self.acknowledge(out);
            self.send(now, out);
        } else if reply.flags.3 {
            self.how = Some(How::Reset);
            self.timer = None;
        }
    }

    /// Accepts payload and FIN with the expected number, and acknowledges them.
    fn take(&mut self, now: Duration, reply: &Reply, rcv: u32, out: &mut Vec<Segment>) {
        let known = rcv.wrapping_sub(reply.seq) as usize;
        let news = reply.payload.get(known..).filter(|news| !news.is_empty() || reply.flags.2);
        let Some(news) = news.filter(|_| !self.peer_closed) else { return self.acknowledge(out) };
        self.segments += 1;
        self.received.extend_from_slice(news);
        self.peer_closed = reply.flags.2;
        self.rcv = Some(rcv.wrapping_add(news.len() as u32 + u32::from(self.peer_closed)));
        if self.plan.delays && self.ack_at.is_none() && !self.peer_closed {
            self.ack_at = Some(now + DELAYED_ACK);
        } else {
            self.acknowledge(out);
        }
    }

    /// Runs the next step of the guest's program.
    fn decide(&mut self, now: Duration, out: &mut Vec<Segment>) {
        match self.plan.end {
            End::Reboot(after) if self.segments >= after => return self.leave(),
            End::Abort(after) if self.segments >= after => {
                out.push(self.segment(self.nxt).control(TcpControl::Rst));
                return self.leave();
            }
            _ => {}
        }
        if self.has_answers() && self.plan.requests > self.answers.0 {
            return self.ask();
        }
        if self.peer_closed || (self.has_answers() && self.plan.end != End::ServiceFirst) {
            match self.plan.end {
                End::Reboot(_) | End::Abort(_) => return self.leave(),
                End::HalfCloseLater if !self.peer_closed => {
                    self.close_at = self.close_at.or(Some(now + LATER)).filter(|_| !self.closing);
                }
                _ => self.close(),
            }
        }
        if self.peer_closed && self.una == self.end {
            self.how = Some(How::Closed);
        }
    }

    fn leave(&mut self) {
        self.how = Some(How::Left);
        (self.timer, self.ack_at, self.close_at) = (None, None, None);
    }

    /// Whether all requests sent have complete answers.
    fn has_answers(&mut self) -> bool {
        loop {
            let (count, end) = self.answers;
            if self.received.len() < end {
                return false;
            }
            if count == self.sent_requests() {
                return true;
            }
            let rest = &self.received[end..];
            let Some(head) = rest.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
            let text = String::from_utf8_lossy(&rest[..head]);
            let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or(0);
            self.answers = (count + 1, end + head + 4 + length);
        }
    }

    fn sent_requests(&self) -> usize {
        self.bytes.len() / self.plan.request().len()
    }
}

fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}
