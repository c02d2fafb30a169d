//! The sequence numbers of one connection (RFC 9293 §3.3.1).
//!
//! There is no state variable. A connection exists from its first data segment, so it starts in ESTABLISHED. The
//! later states follow from which FINs were sent, received and acknowledged.
//!
//! | our FIN | the guest's FIN | state |
//! |---|---|---|
//! | – | – | ESTABLISHED |
//! | – | received | CLOSE-WAIT |
//! | sent | – | FIN-WAIT-1 |
//! | acknowledged | – | FIN-WAIT-2 |
//! | sent | received | CLOSING or LAST-ACK |
//! | acknowledged | received | over: in `timewait` |

use metadata_common::cookie::TcpOptions;
use std::time::Duration;

use super::config::{LINGER, RECEIVE_BUFFER, STALL};
use super::frame::EthernetAddresses;
use super::frame::{Segment, Tuple, before};
use super::receive::safe_segment;
use super::recovery::Recovery;
use super::send::SendQueue;

/// Least time between two challenge acknowledgements, sent in answer to unacceptable segments without payload. It
/// keeps two ends that disagree from answering each other forever (RFC 5961 §7; Linux uses the same interval).
const CHALLENGE_EVERY: Duration = Duration::from_millis(500);

/// A connection's transmission control block.
pub(super) struct Tcb {
    pub(super) tuple: Tuple,
    /// How to reach the guest. Updated from each frame, so that it follows a changed gateway.
    pub(super) route: EthernetAddresses,
    /// Both initial sequence numbers, the guest's first.
    pub(super) initial: (u32, u32),
    /// SND.UNA: the oldest unacknowledged number.
    pub(super) una: u32,
    /// SND.NXT: the next number to send; it moves back when sent data counts as lost.
    pub(super) nxt: u32,
    /// The number after the last one ever sent.
    pub(super) max: u32,
    /// RCV.NXT: the next number expected.
    pub(super) rcv: u32,
    /// The right edge of the last window offered.
    pub(super) edge: u32,
    /// SND.WND: the guest's current window, and the largest one so far.
    pub(super) window: u32,
    pub(super) largest: u32,
    /// SND.WL1. The matching acknowledgement number, SND.WL2, is never behind `una`.
    pub(super) window_seq: u32,
    /// The shift of the guest's window scale option (RFC 7323 §2).
    pub(super) scale: u8,
    /// Limit of payload bytes per segment.
    pub(super) size: u32,
    /// The guest's device takes frames of many segments.
    pub(super) takes_long: bool,
    /// Our side closes once all queued output is sent.
    pub(super) closing: bool,
    /// The guest has sent FIN, and all data before it has arrived.
    pub(super) guest_finished: bool,
    /// An acknowledgement is due.
    pub(super) ack_due: bool,
    /// The first bytes in flight are lost.
    pub(super) resend: bool,
    pub(super) outbox: SendQueue,
    /// Received and acknowledged bytes that the exchange has not taken yet.
    pub(super) held: Vec<u8>,
    pub(super) recovery: Recovery,
    /// When to retransmit or to probe a closed window.
    pub(super) timer: Option<Duration>,
    /// The time of the guest's last acknowledgement, or since when we wait for one.
    pub(super) progress: Duration,
    challenged: Option<Duration>,
}

impl Tcb {
    /// Creates a connection whose handshake is proved by its first segment. Its segments carry at most `largest`
    /// bytes of payload.
    pub(super) fn new(
        segment: &Segment<'_>,
        abilities: TcpOptions,
        largest: u16,
        route: EthernetAddresses,
        now: Duration,
    ) -> Self {
        let ours = segment.ack.unwrap_or(0);
        let is_ipv4 = segment.tuple.remote.0.is_ipv4();
        // A smaller size requested by the guest would make each of its frames cause many answers.
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
            takes_long: false,
            closing: false,
            guest_finished: false,
            ack_due: false,
            resend: false,
            outbox: SendQueue::new(ours),
            held: Vec::new(),
            recovery: Recovery::new(size.into(), ours),
            timer: None,
            progress: now,
            challenged: None,
        }
    }

    /// Limits segments to `largest` bytes of payload.
    pub(super) fn fit(&mut self, largest: u16) {
        if u32::from(largest) < self.size {
            self.size = largest.into();
            self.recovery.shrink(self.size);
        }
    }

    /// Bytes of the sequence space in flight: sent and not acknowledged.
    pub(super) fn flight(&self) -> u32 {
        self.max.wrapping_sub(self.una)
    }

    /// Bytes queued and not acknowledged.
    pub(super) fn queued(&self) -> u32 {
        let end = self.outbox.end();
        if before(self.una, end) { end.wrapping_sub(self.una) } else { 0 }
    }

    /// The sequence number after our FIN.
    pub(super) fn after_fin(&self) -> u32 {
        self.outbox.end().wrapping_add(1)
    }

    /// Whether all current output is sent and nothing is being retransmitted.
    pub(super) fn is_all_sent(&self) -> bool {
        let end = if self.closing { self.after_fin() } else { self.outbox.end() };
        self.nxt == end && self.max == end
    }

    /// Whether the guest has acknowledged our FIN.
    pub(super) fn is_fin_acknowledged(&self) -> bool {
        self.closing && self.una == self.after_fin()
    }

    /// Whether both FINs have been received and acknowledged.
    pub(super) fn is_over(&self) -> bool {
        self.guest_finished && self.is_fin_acknowledged()
    }

    /// Starts to wait for the guest, because there is new output, unless we already wait.
    pub(super) fn begins_to_wait(&mut self, now: Duration) {
        if self.flight() == 0 && self.queued() == 0 {
            self.progress = now;
        }
    }

    /// Closes our side after all queued output.
    pub(super) fn close(&mut self, now: Duration) {
        self.begins_to_wait(now);
        self.closing = true;
        self.held = Vec::new();
    }

    /// Records that the kernel has sent our FIN with nothing queued before it. The kernel answers the guest until the
    /// FIN has arrived.
    pub(super) fn finished_by_proxy(&mut self, now: Duration) {
        self.close(now);
        self.max = self.after_fin();
        self.acknowledged(self.max, now);
    }

    /// When we stop waiting for the guest, if we wait for it.
    pub(super) fn timeout_at(&self) -> Option<Duration> {
        if self.is_fin_acknowledged() {
            return (!self.guest_finished).then(|| self.progress + LINGER);
        }
        let waits = self.flight() > 0 || self.queued() > 0 || self.closing;
        waits.then(|| self.progress + STALL)
    }

    /// Bytes that the guest may still send.
    pub(super) fn receive_window(&self) -> u32 {
        // A FIN takes a sequence number and may lie one beyond the edge.
        if before(self.rcv, self.edge) { self.edge.wrapping_sub(self.rcv) } else { 0 }
    }

    /// The right edge of the window that the free buffer space allows.
    fn roomy_edge(&self) -> u32 {
        self.rcv.wrapping_add((RECEIVE_BUFFER - self.held.len()) as u32)
    }

    /// Whether the window can grow by enough to send an update (RFC 9293 §3.8.6.2.2).
    pub(super) fn is_window_reopened(&self) -> bool {
        self.roomy_edge().wrapping_sub(self.edge) as i32 >= RECEIVE_BUFFER as i32 / 2
    }

    /// The window to offer in the next segment.
    pub(super) fn offer(&mut self) -> u16 {
        if self.held.is_empty() || self.is_window_reopened() {
            self.edge = self.roomy_edge();
        }
        self.receive_window() as u16
    }

    /// Schedules a challenge acknowledgement for an unacceptable segment, at most once per [`CHALLENGE_EVERY`].
    pub(super) fn challenge(&mut self, now: Duration) {
        if self.challenged.is_none_or(|last| last + CHALLENGE_EVERY <= now) {
            self.challenged = Some(now);
            self.ack_due = true;
        }
    }
}

/// The size of a connection without its exchange, held data and queued data: a few cache lines.
const _: () = assert!(size_of::<Tcb>() - size_of::<SendQueue>() <= 6 * 64 - 40, "a connection has grown");
