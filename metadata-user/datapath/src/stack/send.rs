//! Sends a connection's output: segments cut from the queue, FIN with the last of them, acknowledgements.

use std::time::Duration;

use super::config::SEGMENTS_IN_FLIGHT;
use super::emit::{Header, Workshop};
use super::handshake::safe_segment;
use super::seam::Transmit;
use super::segment::{FIN, PSH, RST, before};
use super::tcb::Tcb;

/// Limit of segments sent in one turn: all that may be in flight, and one retransmission.
const SEGMENTS_PER_TURN: u32 = SEGMENTS_IN_FLIGHT + 1;

/// Where a connection sends its segments.
pub(super) struct Outlet<'a> {
    pub(super) workshop: &'a mut Workshop,
    pub(super) out: &'a mut dyn Transmit,
}

impl Tcb {
    /// Runs the retransmission timer if it is due. All data in flight then counts as lost.
    pub(super) fn expire(&mut self, now: Duration, outlet: &mut Outlet<'_>) {
        if self.timer.is_none_or(|timer| now < timer) {
            return;
        }
        self.timer = None;
        if self.nxt == self.una {
            self.recovery.probed();
        } else {
            // A guest's link may be narrower than the MTU that a container in the guest uses, and a tap drops too
            // long frames silently (RFC 2923 §2.1).
            if self.recovery.is_too_long() {
                self.size = self.size.min(safe_segment(self.tuple.remote.0.is_ipv4()).into());
                self.recovery.too_long(self.size, self.flight());
            }
            self.recovery.timed_out(self.max, self.flight());
            self.nxt = self.una;
        }
        if self.next_segment().is_none() && self.queued() > 0 {
            self.probe(now, outlet);
        }
    }

    /// Sends a zero-window probe: as much as fits a window too small for normal sending, but at least one octet (RFC
    /// 9293 §3.8.6.1).
    fn probe(&mut self, now: Duration, outlet: &mut Outlet<'_>) {
        let octets = self.queued().min(self.window).min(self.size);
        let header = self.count(self.nxt, octets.max(1), false, now);
        self.emit(header, octets.max(1), outlet);
        self.recovery.forget_timing();
        // An octet beyond the window does not advance `nxt`: the guest may drop it.
        self.nxt = self.nxt.wrapping_add(octets);
    }

    /// Sends all allowed output and any due acknowledgement, and sets the timer. `last` is called before the final
    /// segment of the current output is sent, because the guest may answer before the write returns. Returns false if
    /// output is deferred because the allowance is used up.
    pub(super) fn output(
        &mut self,
        now: Duration,
        outlet: &mut Outlet<'_>,
        last: impl FnOnce(&Self),
    ) -> bool {
        let (mut last, mut complete) = (Some(last), true);
        if std::mem::take(&mut self.resend) {
            let octets = self.queued().min(self.size);
            let fin = self.closing && octets == self.queued() && self.max == self.after_fin();
            let header = self.count(self.una, octets, fin, now);
            self.emit(header, octets, outlet);
        }
        for _ in 0..SEGMENTS_PER_TURN {
            let Some((octets, fin)) = self.next_segment() else { break };
            complete = outlet.workshop.may_send();
            if !complete {
                break;
            }
            let header = self.count(self.nxt, octets, fin, now);
            self.nxt = self.nxt.wrapping_add(octets + u32::from(fin));
            if self.is_all_sent()
                && let Some(last) = last.take()
            {
                last(self);
            }
            self.emit(header, octets, outlet);
        }
        if self.ack_due {
            self.bare(0, outlet);
        }
        let waits = self.flight() > 0 || self.queued() > 0;
        self.timer = waits.then(|| self.timer.unwrap_or(now + self.recovery.timeout()));
        complete
    }

    /// Octets of the next segment, and whether it carries FIN; `None` if nothing can be sent now.
    fn next_segment(&self) -> Option<(u32, bool)> {
        let end = self.outbox.end();
        if before(end, self.nxt) {
            return None;
        }
        let unsent = end.wrapping_sub(self.nxt);
        let usable = self.window.min(self.recovery.window()).saturating_sub(self.nxt.wrapping_sub(self.una));
        let octets = unsent.min(usable).min(self.size);
        let fin = self.closing && octets == unsent;
        // Sends no tiny segments into a small window (RFC 9293 §3.8.6.2.1). The last segment of an answer does not
        // wait for acknowledgements.
        let worth = octets == self.size || octets == unsent || octets >= self.largest / 2;
        (fin || (octets > 0 && worth)).then_some((octets, fin))
    }

    /// Records a segment as sent, first or again. Returns its header.
    fn count(&mut self, seq: u32, octets: u32, fin: bool, now: Duration) -> Header<'static> {
        let data_end = seq.wrapping_add(octets);
        let next = data_end.wrapping_add(u32::from(fin));
        if seq == self.max {
            self.recovery.sent(next, now, self.max == self.una);
        } else {
            self.recovery.forget_timing();
        }
        if before(self.max, next) {
            self.max = next;
        }
        let push = if octets > 0 && data_end == self.outbox.end() { PSH } else { 0 };
        self.header(push | if fin { FIN } else { 0 }, seq)
    }

    /// Sends a segment with this many octets.
    fn emit(&self, header: Header<'_>, octets: u32, outlet: &mut Outlet<'_>) {
        let Self { tuple, route, outbox, .. } = self;
        outlet.workshop.spend();
        outlet.workshop.send(outlet.out, |frame| {
            header.emit_with(tuple, *route, octets as usize, |place| outbox.copy(header.seq, place), frame)
        });
    }

    /// Sends a segment without payload, with the number that the guest expects. The guest may not have accepted the
    /// octet of a zero-window probe.
    fn bare(&mut self, flags: u8, outlet: &mut Outlet<'_>) {
        let seq = if self.nxt == self.una { self.nxt } else { self.max };
        let header = self.header(flags, seq);
        outlet.workshop.send(outlet.out, |frame| header.emit(&self.tuple, self.route, frame));
    }

    /// Resets the connection.
    pub(super) fn reset(&mut self, outlet: &mut Outlet<'_>) {
        self.bare(RST, outlet);
    }

    fn header(&mut self, flags: u8, seq: u32) -> Header<'static> {
        self.ack_due = false;
        Header { seq, ack: Some(self.rcv), flags, window: self.offer(), options: &[] }
    }
}
