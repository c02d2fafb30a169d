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

use super::frame::{EthernetAddresses, Segment, Tuple, before};
use super::interfaces::{LINGER, RECEIVE_BUFFER, SEGMENTS_IN_FLIGHT, STALL};
use super::receive::safe_segment;
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

// How much to send, and when to retransmit.
//
// Implements RFC 6298 (retransmission timeout), RFC 5681 (slow start, congestion avoidance, fast retransmit), RFC
// 3465 (slow start by bytes), RFC 6582 (NewReno: recovery from several losses without SACK) and RFC 6928 (initial
// window). There are no timestamps:
// one segment at a time is measured, and retransmitted segments are not measured (Karn's algorithm, RFC 6298 §3).

/// Minimum and initial timeout. RFC 6298 asks for 1 s, which suits a wide area network; here the guest is on the same
/// host, less than a millisecond away. Linux also uses 200 ms.
pub(super) const RTO_MIN: Duration = Duration::from_millis(200);
/// Maximum timeout. RFC 6298 asks for at least 60 s. Here a round trip takes less than a millisecond, and a guest
/// that returns after a pause gets a retransmission soon.
pub(super) const RTO_MAX: Duration = Duration::from_secs(4);
const GRANULARITY: Duration = Duration::from_millis(1);
/// Duplicate acknowledgements that indicate a loss (RFC 5681 §3.2).
const DUPLICATES: u8 = 3;
/// Limit of doublings; the timeout then has reached its maximum anyway.
const BACKOFF_MAX: u8 = 5;
/// Consecutive timeouts after which the kernel no longer handles acknowledgements for a connection. Either the
/// retransmitted data has not been acknowledged, or the kernel has consumed the acknowledgement.
const UNHEARD_AFTER: u8 = 2;
/// Consecutive timeouts that indicate a link too narrow for our segments: the first number applies before a segment of
/// that size has arrived, the second after. Loss alone rarely causes three in a row.
const TOO_LONG_AFTER: (u8, u8) = (2, 4);

/// Congestion control and timing of the data we send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recovery {
    size: u32,
    window: u32,
    threshold: u32,
    duplicates: u8,
    /// True between a loss and the acknowledgement of all data that was then in flight.
    is_recovering: bool,
    /// The number after all data in flight at the last loss.
    recover: u32,
    backoff: u8,
    /// A full-sized segment has been acknowledged.
    fits: bool,
    /// Bytes of the segment that is assumed too long for the link, until an acknowledgement arrives.
    lost: Option<u32>,
    /// A shorter segment has arrived after a longer one was lost repeatedly.
    narrow: bool,
    smoothed: Option<Duration>,
    variation: Duration,
    /// The measured segment: the number after it, and when it was sent.
    timed: Option<(u32, Duration)>,
    last_sent: Duration,
}

impl Recovery {
    /// Creates the state for segments of `size` bytes, the first numbered `first`.
    pub(super) fn new(size: u32, first: u32) -> Self {
        Self {
            size,
            window: initial_window(size),
            threshold: u32::MAX,
            duplicates: 0,
            is_recovering: false,
            recover: first,
            backoff: 0,
            fits: false,
            lost: None,
            narrow: false,
            smoothed: None,
            variation: Duration::ZERO,
            timed: None,
            last_sent: Duration::ZERO,
        }
    }

    /// Limit of bytes in flight.
    pub(super) fn window(&self) -> u32 {
        self.window.min(SEGMENTS_IN_FLIGHT * self.size)
    }

    /// The retransmission timeout (RFC 6298 §2).
    pub(super) fn timeout(&self) -> Duration {
        let rto = match self.smoothed {
            Some(smoothed) => smoothed + (self.variation * 4).max(GRANULARITY),
            None => RTO_MIN,
        };
        (rto.clamp(RTO_MIN, RTO_MAX) * (1 << self.backoff)).min(RTO_MAX)
    }

    /// Records that bytes before `next` were sent for the first time at `now`. `idle` means that nothing else was in
    /// flight.
    pub(super) fn sent(&mut self, next: u32, now: Duration, idle: bool) {
        if self.timed.is_none() {
            self.timed = Some((next, now));
        }
        // After a pause the path's capacity is unknown again (RFC 5681 §4.1).
        if idle && now.saturating_sub(self.last_sent) > self.timeout() {
            self.window = self.window.min(initial_window(self.size));
        }
        self.last_sent = now;
    }

    /// Drops the current round-trip measurement: the segment was retransmitted, or the kernel may have consumed its
    /// acknowledgement.
    pub(super) fn forget_timing(&mut self) {
        self.timed = None;
    }

    /// Records that `acked` bytes up to `una` were acknowledged and `flight` bytes are still in flight. Returns
    /// true if the first of those is lost as well and must be retransmitted (RFC 6582 §3.2).
    pub(super) fn acknowledged(&mut self, una: u32, acked: u32, flight: u32, now: Duration) -> bool {
        self.duplicates = 0;
        self.backoff = 0;
        self.fits |= acked >= self.size;
        // A guest that was only unreachable, and not behind a narrow link, acknowledges the long segment first.
        self.narrow |= self.lost.take().is_some_and(|lost| acked < lost);
        if let Some((_, sent)) = self.timed.filter(|(next, _)| !before(una, *next)) {
            self.measure(now.saturating_sub(sent));
            self.timed = None;
        }
        if self.is_recovering {
            if before(una, self.recover) {
                let deflated = self.window.saturating_sub(acked);
                self.window = if acked >= self.size { deflated + self.size } else { deflated }.max(self.size);
                return true;
            }
            self.is_recovering = false;
            self.window = self.threshold.min(flight.max(self.size) + self.size);
        } else if self.window < self.threshold {
            // A guest acknowledges a long frame once, so slow start counts bytes, not acknowledgements: RFC 3465 §2.2,
            // without its limit, as in Linux. After a timeout one acknowledgement may cover what had arrived before, so
            // the limit is one segment (§2.3).
            let counted = if before(una, self.recover) { acked.min(self.size) } else { acked };
            self.window = self.window.saturating_add(counted);
        } else {
            let share = u64::from(acked) * u64::from(self.size) / u64::from(self.window.max(1));
            self.window = self.window.saturating_add((share as u32).max(1));
        }
        self.window = self.window.min(SEGMENTS_IN_FLIGHT * self.size);
        false
    }

    /// Records a duplicate acknowledgement of `una` with `flight` bytes in flight up to `max`. Returns true if the
    /// first of them counts as lost and must be retransmitted at once (RFC 5681 §3.2, RFC 6582 §3.2).
    pub(super) fn duplicate(&mut self, una: u32, max: u32, flight: u32) -> bool {
        self.duplicates = self.duplicates.saturating_add(1);
        if self.is_recovering {
            self.window = self.window.saturating_add(self.size);
            return false;
        }
        // Duplicates caused by retransmissions before the last recovery ended do not indicate a new loss.
        if self.duplicates != DUPLICATES || before(una, self.recover) {
            return false;
        }
        self.threshold = self.half(flight);
        self.recover = max;
        self.is_recovering = true;
        self.window = self.threshold + u32::from(DUPLICATES) * self.size;
        true
    }

    /// Whether [`UNHEARD_AFTER`] timeouts in a row have passed without an acknowledgement.
    pub(super) fn is_unheard(&self) -> bool {
        self.backoff >= UNHEARD_AFTER
    }

    /// Whether so many timeouts in a row have passed that our segments may be too long for the link.
    pub(super) fn is_too_long(&self) -> bool {
        let (unproved, proved) = TOO_LONG_AFTER;
        self.backoff + 1 >= if self.fits { proved } else { unproved }
    }

    /// Assumes that segments of more than `size` bytes are too long for the link, with `flight` bytes in flight.
    pub(super) fn too_long(&mut self, size: u32, flight: u32) {
        let lost = self.size.min(flight);
        if lost > size {
            self.lost = Some(lost);
        }
        self.shrink(size);
    }

    /// Returns true once, after the link has proved narrower than the first segments.
    pub(super) fn take_narrow(&mut self) -> bool {
        std::mem::take(&mut self.narrow)
    }

    /// Limits segments to `size` bytes.
    pub(super) fn shrink(&mut self, size: u32) {
        self.size = self.size.min(size);
    }

    /// Records a timeout with `flight` bytes in flight up to `max`: all of them count as lost (RFC 5681 §3.1, RFC
    /// 6298 §5.5).
    pub(super) fn timed_out(&mut self, max: u32, flight: u32) {
        if self.backoff == 0 {
            self.threshold = self.half(flight);
        }
        self.backoff = (self.backoff + 1).min(BACKOFF_MAX);
        self.window = self.size;
        self.recover = max;
        self.is_recovering = false;
        self.duplicates = 0;
        self.timed = None;
    }

    /// Records a zero-window probe and delays the next one.
    pub(super) fn probed(&mut self) {
        self.backoff = (self.backoff + 1).min(BACKOFF_MAX);
        self.timed = None;
    }

    /// Records that the window has opened again and resets the back-off.
    pub(super) fn reopened(&mut self) {
        self.backoff = 0;
    }

    fn half(&self, flight: u32) -> u32 {
        (flight / 2).max(2 * self.size)
    }

    /// Updates the round-trip estimate (RFC 6298 §2.2, §2.3).
    fn measure(&mut self, round: Duration) {
        self.smoothed = Some(match self.smoothed {
            None => {
                self.variation = round / 2;
                round
            }
            Some(smoothed) => {
                self.variation = (self.variation * 3 + smoothed.abs_diff(round)) / 4;
                (smoothed * 7 + round) / 8
            }
        });
    }
}

/// The initial window in bytes (RFC 6928 §2).
fn initial_window(size: u32) -> u32 {
    (10 * size).min(14_600.max(2 * size))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{RTO_MIN, Recovery};

    const SIZE: u32 = 1000;
    const FIRST: u32 = u32::MAX - 5_000;

    fn number(bytes: u32) -> u32 {
        FIRST.wrapping_add(bytes)
    }

    #[test]
    fn the_window_starts_at_ten_segments_then_doubles_then_grows_by_one_segment() {
        for (size, first) in [(1460, 14_600), (1440, 14_400), (64, 640)] {
            assert_eq!(Recovery::new(size, 0).window(), first);
        }
        let mut recovery = Recovery::new(SIZE, FIRST);
        for n in 1..=10 {
            recovery.acknowledged(number(n * SIZE), SIZE, 0, Duration::ZERO);
        }
        assert_eq!(recovery.window(), 20 * SIZE);
        recovery.threshold = 20 * SIZE;
        for n in 11..=30 {
            recovery.acknowledged(number(n * SIZE), SIZE, 0, Duration::ZERO);
        }
        assert!((20 * SIZE + 900..=21 * SIZE).contains(&recovery.window()), "{}", recovery.window());
    }

    #[test]
    fn the_window_grows_to_its_limit_and_no_further() {
        let mut recovery = Recovery::new(SIZE, FIRST);
        for n in 1..=1_000 {
            recovery.acknowledged(number(n * SIZE), SIZE, 0, Duration::ZERO);
        }
        assert_eq!(recovery.window(), super::SEGMENTS_IN_FLIGHT * SIZE);
    }

    #[test]
    fn three_duplicates_repair_one_loss_and_partial_acknowledgements_the_others() {
        let mut recovery = Recovery::new(SIZE, FIRST);
        let (una, max) = (number(1), number(10 * SIZE));
        assert!(!recovery.duplicate(una, max, 10 * SIZE));
        assert!(!recovery.duplicate(una, max, 10 * SIZE));
        assert!(recovery.duplicate(una, max, 10 * SIZE), "the third");
        assert_eq!(recovery.window(), 8 * SIZE, "half, plus three segments that have left the network");
        assert!(!recovery.duplicate(una, max, 10 * SIZE));
        assert!(recovery.acknowledged(number(4 * SIZE), 4 * SIZE, 6 * SIZE, Duration::ZERO), "partial");
        assert!(!recovery.acknowledged(max, 6 * SIZE, 0, Duration::ZERO));
        assert_eq!(recovery.window(), 2 * SIZE);
        for _ in 0..3 {
            assert!(!recovery.duplicate(number(3 * SIZE), max, SIZE), "before the last loss was repaired");
        }
    }

    #[test]
    fn the_timeout_follows_the_measured_rounds_and_doubles_up_to_its_limit() {
        let mut recovery = Recovery::new(SIZE, FIRST);
        assert_eq!(recovery.timeout(), RTO_MIN);
        recovery.sent(number(SIZE), Duration::ZERO, true);
        recovery.acknowledged(number(SIZE), SIZE, 0, Duration::from_millis(400));
        assert_eq!(recovery.timeout(), Duration::from_millis(1200), "RFC 6298: R + 4 R / 2");
        for doubled in [2400, 4000, 4000, 4000, 4000, 4000, 4000, 4000] {
            recovery.timed_out(number(2 * SIZE), SIZE);
            assert_eq!(recovery.timeout(), Duration::from_millis(doubled));
        }
        assert_eq!(recovery.window(), SIZE);
        recovery.acknowledged(number(2 * SIZE), SIZE, 0, Duration::from_secs(100));
        assert_eq!(recovery.timeout(), Duration::from_millis(1200), "retransmissions are not measured");
    }

    #[test]
    fn segments_count_as_too_long_after_more_timeouts_once_one_has_arrived() {
        for (arrived, timeouts) in [(0, 2), (SIZE - 1, 2), (SIZE, 4)] {
            let mut recovery = Recovery::new(SIZE, FIRST);
            if arrived > 0 {
                recovery.acknowledged(number(arrived), arrived, 0, Duration::ZERO);
            }
            for _ in 1..timeouts {
                assert!(!recovery.is_too_long(), "{arrived} bytes arrived");
                recovery.timed_out(number(5 * SIZE), SIZE);
            }
            assert!(recovery.is_too_long(), "{arrived} bytes arrived");
        }
    }

    #[test]
    fn a_link_is_narrow_if_a_shorter_segment_arrives_after_longer_ones_were_lost() {
        for (name, flight, acked, narrow) in [
            ("the shorter segment", 5 * SIZE, 500, true),
            ("the long segment after all", 5 * SIZE, SIZE, false),
            ("more than the long segment", 5 * SIZE, 2 * SIZE, false),
            ("half of less than two short segments", 900, 500, true),
            ("all of it", 900, 900, false),
            ("a segment that was already short", 400, 400, false),
        ] {
            let mut recovery = Recovery::new(SIZE, FIRST);
            recovery.too_long(500, flight);
            recovery.timed_out(number(flight), flight);
            for expected in [narrow, false] {
                recovery.acknowledged(number(acked), acked, flight - acked, Duration::ZERO);
                assert_eq!(recovery.take_narrow(), expected, "{name}");
            }
        }
    }

    #[test]
    fn a_pause_resets_the_window_to_its_initial_size() {
        let mut recovery = Recovery::new(SIZE, FIRST);
        for n in 1..=20 {
            recovery.acknowledged(number(n * SIZE), SIZE, 0, Duration::ZERO);
        }
        recovery.sent(number(21 * SIZE), Duration::from_millis(100), true);
        assert_eq!(recovery.window(), 30 * SIZE);
        recovery.sent(number(22 * SIZE), Duration::from_secs(100), true);
        assert_eq!(recovery.window(), 10 * SIZE);
    }
}
