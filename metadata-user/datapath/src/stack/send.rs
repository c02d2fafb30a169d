//! Sends a connection's output: segments cut from the queue, one or many in a frame, FIN with the last of them, and
//! acknowledgements.

use std::io::IoSlice;
use std::time::Duration;

use super::config::{PIECES_PER_CONNECTION, SEGMENTS_IN_FLIGHT};
use super::emit::{Header, Workshop};
use super::handshake::safe_segment;
use super::seam::{LONG_MAX, Transmit, work_of};
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
    /// Runs the retransmission timer if it is due. All data in flight then counts as lost; returns whether there was
    /// any.
    pub(super) fn expire(&mut self, now: Duration, outlet: &mut Outlet<'_>) -> bool {
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

    /// Octets of the next frame, and whether it carries FIN; `None` if nothing can be sent now. More than one segment's
    /// octets only if the guest's device takes long frames.
    fn next_segment(&self) -> Option<(u32, bool)> {
        let end = self.outbox.end();
        if before(end, self.nxt) {
            return None;
        }
        let unsent = end.wrapping_sub(self.nxt);
        let usable = self.window.min(self.recovery.window()).saturating_sub(self.nxt.wrapping_sub(self.una));
        let mut octets = unsent.min(usable);
        if octets > self.size {
            octets = self.at_once(octets);
        }
        // Only the last segment of an answer is short.
        if octets > self.size && octets < unsent {
            octets -= octets % self.size;
        }
        let fin = self.closing && octets == unsent;
        // Sends no tiny segments into a small window (RFC 9293 §3.8.6.2.1). The last segment of an answer does not
        // wait for acknowledgements.
        let worth = octets >= self.size || octets == unsent || octets >= self.largest / 2;
        (fin || (octets > 0 && worth)).then_some((octets, fin))
    }

    /// How many of these octets the next frame carries. A retransmission carries one segment, because a device may have
    /// dropped the frame for its length.
    fn at_once(&self, octets: u32) -> u32 {
        if !self.takes_long || self.nxt != self.max {
            return self.size;
        }
        octets.min(LONG_MAX / self.size * self.size).min(self.outbox.run(self.nxt)).max(self.size)
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

    /// Sends a frame with this many octets.
    fn emit(&self, header: Header<'_>, octets: u32, outlet: &mut Outlet<'_>) {
        let Self { tuple, route, outbox, .. } = self;
        outlet.workshop.spend(work_of(octets as usize));
        if octets > self.size {
            let mut places = [IoSlice::new(&[]); PIECES_PER_CONNECTION + 1];
            let (count, hop_limit) = outbox.lend(header.seq, octets, &mut places);
            let (is_ipv4, segment) = (tuple.remote.0.is_ipv4(), self.size as u16);
            return outlet.workshop.send_long(outlet.out, is_ipv4, &places[..count], segment, |frame| {
                header.emit_long(tuple, *route, octets as usize, hop_limit, frame)
            });
        }
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
