//! The numbers of one connection (RFC 9293 §3.3.1).
//!
//! There is no state variable: a connection exists from the first segment with something in it, so ESTABLISHED
//! is where it starts, and who has said FIN and heard it acknowledged tells the rest.
//!
//! | our FIN | the guest's FIN | state |
//! |---|---|---|
//! | – | – | ESTABLISHED |
//! | – | heard | CLOSE-WAIT |
//! | sent | – | FIN-WAIT-1 |
//! | acknowledged | – | FIN-WAIT-2 |
//! | sent | heard | CLOSING or LAST-ACK |
//! | acknowledged | heard | over: in `timewait` |

use metadata_common::cookie::Abilities;
use std::time::Duration;

use super::config::{RECEIVE_BUFFER, Timeouts};
use super::frame::Route;
use super::handshake::safe_segment;
use super::outbox::Outbox;
use super::recovery::Recovery;
use super::segment::{Segment, Tuple, before};

/// Distance between two acknowledgements sent only because a segment without payload made no sense here, so
/// that two ends which disagree do not talk about it for ever (RFC 5961 §7, and Linux's measure).
const CHALLENGE_EVERY: Duration = Duration::from_millis(500);

/// A connection's transmission control block.
pub(super) struct Tcb {
    pub(super) tuple: Tuple,
    /// How its guest is reached: taken from each frame, so a changed gateway is followed.
    pub(super) route: Route,
    /// Both initial sequence numbers, the guest's first.
    pub(super) initial: (u32, u32),
    /// SND.UNA.
    pub(super) una: u32,
    /// SND.NXT; goes back when what was sent counts as lost.
    pub(super) nxt: u32,
    /// The number after the last ever sent.
    pub(super) max: u32,
    /// RCV.NXT.
    pub(super) rcv: u32,
    /// The right edge of the window last offered.
    pub(super) edge: u32,
    /// SND.WND, and the largest it ever was.
    pub(super) window: u32,
    pub(super) largest: u32,
    /// SND.WL1. The acknowledgement number that goes with it, SND.WL2, is never behind `una`.
    pub(super) window_seq: u32,
    /// How far the guest's windows are shifted.
    pub(super) scale: u8,
    /// Octets of payload it takes in one segment.
    pub(super) size: u32,
    /// Our side is closed once all in line is sent.
    pub(super) closing: bool,
    /// The guest has sent FIN, and all before it.
    pub(super) guest_finished: bool,
    /// Something is to be acknowledged.
    pub(super) ack_due: bool,
    /// The first octets under way are lost.
    pub(super) resend: bool,
    pub(super) outbox: Outbox,
    /// Received, acknowledged, and not yet taken by the exchange.
    pub(super) held: Vec<u8>,
    pub(super) recovery: Recovery,
    /// When to send again, or to ask about a closed window.
    pub(super) timer: Option<Duration>,
    /// When the guest last acknowledged something, or we began to wait for it to.
    pub(super) progress: Duration,
    challenged: Option<Duration>,
}

impl Tcb {
    /// A connection whose handshake is proved by its first segment.
    /// Its segments have `largest` octets of payload at most.
    pub(super) fn new(
        segment: &Segment<'_>,
        abilities: Abilities,
        largest: u16,
        route: Route,
        now: Duration,
    ) -> Self {
        let ours = segment.ack.unwrap_or(0);
        let is_ipv4 = segment.tuple.remote.0.is_ipv4();
        // A guest that asks for less would have each of its frames answered with many.
        let size = abilities.segment.max(safe_segment(is_ipv4)).min(largest);
        let scale = abilities.scale.unwrap_or(0);
        let window = u32::from(segment.window) << scale;
        Self {
            tuple: segment.tuple,
            route,
            initial: (segment.seq.wrapping_sub(1), ours.wrapping_sub(1)),
            una: ours,
            nxt: ours,
            max: ours,
            rcv: segment.seq,
            edge: segment.seq.wrapping_add(RECEIVE_BUFFER as u32),
            window,
            largest: window,
            window_seq: segment.seq,
            scale,
            size: size.into(),
            closing: false,
            guest_finished: false,
            ack_due: false,
            resend: false,
            outbox: Outbox::new(ours),
            held: Vec::new(),
            recovery: Recovery::new(size.into(), ours),
            timer: None,
            progress: now,
            challenged: None,
        }
    }

    /// Its segments have so many octets of payload at most from now on.
    pub(super) fn fit(&mut self, largest: u16) {
        if u32::from(largest) < self.size {
            self.size = largest.into();
            self.recovery.shrink(self.size);
        }
    }

    /// Octets of the sequence space sent and not acknowledged.
    pub(super) fn flight(&self) -> u32 {
        self.max.wrapping_sub(self.una)
    }

    /// Octets in line and not acknowledged.
    pub(super) fn queued(&self) -> u32 {
        let end = self.outbox.end();
        if before(self.una, end) { end.wrapping_sub(self.una) } else { 0 }
    }

    /// The number after our FIN.
    pub(super) fn after_fin(&self) -> u32 {
        self.outbox.end().wrapping_add(1)
    }

    /// True when all that there is to say for now is sent, and nothing is being sent again.
    pub(super) fn is_all_sent(&self) -> bool {
        let end = if self.closing { self.after_fin() } else { self.outbox.end() };
        self.nxt == end && self.max == end
    }

    /// True when our side is closed, and the guest knows it.
    pub(super) fn is_fin_acknowledged(&self) -> bool {
        self.closing && self.una == self.after_fin()
    }

    /// True when both sides have closed and know it.
    pub(super) fn is_over(&self) -> bool {
        self.guest_finished && self.is_fin_acknowledged()
    }

    /// Waits for the guest from now on, if it did not before: there is something new to send.
    pub(super) fn begins_to_wait(&mut self, now: Duration) {
        if self.flight() == 0 && self.queued() == 0 {
            self.progress = now;
        }
    }

    /// Closes our side after all that is in line.
    pub(super) fn close(&mut self, now: Duration) {
        self.begins_to_wait(now);
        self.closing = true;
        self.held = Vec::new();
    }

    /// The kernel has sent our FIN, with nothing in line before it, and answers the guest until it has arrived.
    pub(super) fn finished_by_proxy(&mut self, now: Duration) {
        self.close(now);
        self.max = self.after_fin();
        self.acknowledged(self.max, now);
    }

    /// When waiting for the guest ends, if we wait for it.
    pub(super) fn patience(&self, timeouts: &Timeouts) -> Option<Duration> {
        if self.is_fin_acknowledged() {
            return (!self.guest_finished).then(|| self.progress + timeouts.linger);
        }
        let waits = self.flight() > 0 || self.queued() > 0 || self.closing;
        waits.then(|| self.progress + timeouts.stall)
    }

    /// Octets the guest may still send us.
    pub(super) fn receive_window(&self) -> u32 {
        // A FIN takes a number, and may stand just behind the edge.
        if before(self.rcv, self.edge) { self.edge.wrapping_sub(self.rcv) } else { 0 }
    }

    /// The right edge of the window there is room for now.
    fn roomy_edge(&self) -> u32 {
        self.rcv.wrapping_add((RECEIVE_BUFFER - self.held.len()) as u32)
    }

    /// True when the window can grow by enough to be worth a word (RFC 9293 §3.8.6.2.2).
    pub(super) fn is_window_reopened(&self) -> bool {
        self.roomy_edge().wrapping_sub(self.edge) as i32 >= RECEIVE_BUFFER as i32 / 2
    }

    /// The window to offer with the next segment.
    pub(super) fn offer(&mut self) -> u16 {
        if self.held.is_empty() || self.is_window_reopened() {
            self.edge = self.roomy_edge();
        }
        self.receive_window() as u16
    }

    /// Acknowledges where we stand to a guest whose segment made no sense, not too often.
    pub(super) fn challenge(&mut self, now: Duration) {
        if self.challenged.is_none_or(|last| last + CHALLENGE_EVERY <= now) {
            self.challenged = Some(now);
            self.ack_due = true;
        }
    }
}

/// What a connection costs beside its exchange, with nothing held and nothing in line: a few cache lines.
const _: () = assert!(size_of::<Tcb>() <= 6 * 64, "a connection has grown");
