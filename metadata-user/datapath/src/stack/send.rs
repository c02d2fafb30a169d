//! Sends a connection's output: segments cut from the queue, one or many in a frame, FIN with the last of them, and
//! acknowledgements.

use bytes::Bytes;
use smallvec::SmallVec;
use std::io::IoSlice;
use std::time::Duration;

use super::config::{PIECES_PER_CONNECTION, SEGMENTS_IN_FLIGHT};
use super::emit::{FrameBuilder, HOP_LIMIT, Header};
use super::frame::{FIN, PSH, RST, before};
use super::interfaces::{LONG_MAX, Transmit, work_of};
use super::receive::safe_segment;
use super::tcb::Tcb;

/// Limit of segments sent in one turn: all that may be in flight, and one retransmission.
const SEGMENTS_PER_TURN: u32 = SEGMENTS_IN_FLIGHT + 1;

/// Where a connection sends its segments.
pub(super) struct FrameWriter<'a> {
    pub(super) workshop: &'a mut FrameBuilder,
    pub(super) out: &'a mut dyn Transmit,
}

impl Tcb {
    /// Runs the retransmission timer if it is due. All data in flight then counts as lost; returns whether there was
    /// any.
    pub(super) fn expire(&mut self, now: Duration, outlet: &mut FrameWriter<'_>) -> bool {
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

    /// Sends a zero-window probe: as much as fits a window too small for normal sending, but at least one byte (RFC
    /// 9293 §3.8.6.1).
    fn probe(&mut self, now: Duration, outlet: &mut FrameWriter<'_>) {
        let bytes = self.queued().min(self.window).min(self.size);
        let header = self.count(self.nxt, bytes.max(1), false, now);
        self.emit(header, bytes.max(1), outlet);
        self.recovery.forget_timing();
        // A byte beyond the window does not advance `nxt`: the guest may drop it.
        self.nxt = self.nxt.wrapping_add(bytes);
    }

    /// Sends all allowed output and any due acknowledgement, and sets the timer. `last` is called before the final
    /// segment of the current output is sent, because the guest may answer before the write returns. Returns false if
    /// output is deferred because the allowance is used up.
    pub(super) fn output(
        &mut self,
        now: Duration,
        outlet: &mut FrameWriter<'_>,
        last: impl FnOnce(&Self),
    ) -> bool {
        let (mut last, mut complete) = (Some(last), true);
        if std::mem::take(&mut self.resend) {
            let bytes = self.queued().min(self.size);
            let fin = self.closing && bytes == self.queued() && self.max == self.after_fin();
            let header = self.count(self.una, bytes, fin, now);
            self.emit(header, bytes, outlet);
        }
        for _ in 0..SEGMENTS_PER_TURN {
            let Some((bytes, fin)) = self.next_segment() else { break };
            complete = outlet.workshop.may_send();
            if !complete {
                break;
            }
            let header = self.count(self.nxt, bytes, fin, now);
            self.nxt = self.nxt.wrapping_add(bytes + u32::from(fin));
            if self.is_all_sent()
                && let Some(last) = last.take()
            {
                last(self);
            }
            self.emit(header, bytes, outlet);
        }
        if self.ack_due {
            self.bare(0, outlet);
        }
        let waits = self.flight() > 0 || self.queued() > 0;
        self.timer = waits.then(|| self.timer.unwrap_or(now + self.recovery.timeout()));
        complete
    }

    /// Bytes of the next frame, and whether it carries FIN; `None` if nothing can be sent now. More than one segment's
    /// bytes only if the guest's device takes long frames.
    fn next_segment(&self) -> Option<(u32, bool)> {
        let end = self.outbox.end();
        if before(end, self.nxt) {
            return None;
        }
        let unsent = end.wrapping_sub(self.nxt);
        let usable = self.window.min(self.recovery.window()).saturating_sub(self.nxt.wrapping_sub(self.una));
        let mut bytes = unsent.min(usable);
        if bytes > self.size {
            bytes = self.at_once(bytes);
        }
        // Only the last segment of an answer is short.
        if bytes > self.size && bytes < unsent {
            bytes -= bytes % self.size;
        }
        let fin = self.closing && bytes == unsent;
        // Sends no tiny segments into a small window (RFC 9293 §3.8.6.2.1). The last segment of an answer does not
        // wait for acknowledgements.
        let worth = bytes >= self.size || bytes == unsent || bytes >= self.largest / 2;
        (fin || (bytes > 0 && worth)).then_some((bytes, fin))
    }

    /// How many of these bytes the next frame carries. A retransmission carries one segment, because a device may have
    /// dropped the frame for its length.
    fn at_once(&self, bytes: u32) -> u32 {
        if !self.takes_long || self.nxt != self.max {
            return self.size;
        }
        bytes.min(LONG_MAX / self.size * self.size).min(self.outbox.run(self.nxt)).max(self.size)
    }

    /// Records a segment as sent, first or again. Returns its header.
    fn count(&mut self, seq: u32, bytes: u32, fin: bool, now: Duration) -> Header<'static> {
        let data_end = seq.wrapping_add(bytes);
        let next = data_end.wrapping_add(u32::from(fin));
        if seq == self.max {
            self.recovery.sent(next, now, self.max == self.una);
        } else {
            self.recovery.forget_timing();
        }
        if before(self.max, next) {
            self.max = next;
        }
        let push = if bytes > 0 && data_end == self.outbox.end() { PSH } else { 0 };
        self.header(push | if fin { FIN } else { 0 }, seq)
    }

    /// Sends a frame with this many bytes.
    fn emit(&self, header: Header<'_>, bytes: u32, outlet: &mut FrameWriter<'_>) {
        let Self { tuple, route, outbox, .. } = self;
        outlet.workshop.spend(work_of(bytes as usize));
        if bytes > self.size {
            let mut places = [IoSlice::new(&[]); PIECES_PER_CONNECTION + 1];
            let (count, hop_limit) = outbox.lend(header.seq, bytes, &mut places);
            let (is_ipv4, segment) = (tuple.remote.0.is_ipv4(), self.size as u16);
            return outlet.workshop.send_long(outlet.out, is_ipv4, &places[..count], segment, |frame| {
                header.emit_long(tuple, *route, bytes as usize, hop_limit, frame)
            });
        }
        outlet.workshop.send(outlet.out, |frame| {
            header.emit_with(tuple, *route, bytes as usize, |place| outbox.copy(header.seq, place), frame)
        });
    }

    /// Sends a segment without payload, with the number that the guest expects. The guest may not have accepted the
    /// byte of a zero-window probe.
    fn bare(&mut self, flags: u8, outlet: &mut FrameWriter<'_>) {
        let seq = if self.nxt == self.una { self.nxt } else { self.max };
        let header = self.header(flags, seq);
        outlet.workshop.send(outlet.out, |frame| header.emit(&self.tuple, self.route, frame));
    }

    /// Resets the connection.
    pub(super) fn reset(&mut self, outlet: &mut FrameWriter<'_>) {
        self.bare(RST, outlet);
    }

    fn header(&mut self, flags: u8, seq: u32) -> Header<'static> {
        self.ack_due = false;
        Header { seq, ack: Some(self.rcv), flags, window: self.offer(), options: &[] }
    }
}

// The output queue: shared pieces, cut into segments at any byte.
//
// Data is copied only into frames, and a retransmission cuts the pieces again. A piece is dropped once its last
// byte is acknowledged. An answer with a session token has a small hop limit, so that the first router behind the
// guest's own stack (a container's bridge, a proxy) drops it. Each piece has a limit, and a segment uses the
// smallest limit of the pieces it carries.

/// Pieces that a connection stores in itself: head, its tail, and body of an answer. More of them are on the heap.
const OWN_PIECES: usize = 3;

struct Piece {
    bytes: Bytes,
    hop_limit: u8,
}

/// The unacknowledged pieces of one connection.
pub(super) struct SendQueue {
    pieces: SmallVec<[Piece; OWN_PIECES]>,
    /// The sequence number of the first byte of the first piece.
    start: u32,
    /// The sequence number after the last byte of the last piece.
    end: u32,
}

impl SendQueue {
    /// Creates an empty queue whose first byte has the number `start`.
    pub(super) fn new(start: u32) -> Self {
        Self { pieces: SmallVec::new(), start, end: start }
    }

    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Reads the first piece and its reference count.
    pub(super) fn touch(&self) -> u64 {
        self.pieces.first().map_or(0, |piece| u64::from(piece.bytes.is_unique()))
    }

    /// Whether the queue holds [`PIECES_PER_CONNECTION`].
    pub(super) fn is_full(&self) -> bool {
        self.pieces.len() >= PIECES_PER_CONNECTION
    }

    /// Appends a piece; an empty one is ignored. The hop limit is clamped to 1 to 64.
    pub(super) fn push(&mut self, bytes: Bytes, hop_limit: Option<u8>) {
        if !bytes.is_empty() {
            self.end = self.end.wrapping_add(bytes.len() as u32);
            let hop_limit = hop_limit.map_or(HOP_LIMIT, |limit| limit.clamp(1, HOP_LIMIT));
            self.pieces.push(Piece { bytes, hop_limit });
        }
    }

    /// Drops the pieces that end at or before `una`.
    pub(super) fn acknowledged(&mut self, una: u32) {
        let mut done = 0;
        while let Some(piece) = self.pieces.get(done)
            && una.wrapping_sub(self.start) as usize >= piece.bytes.len()
        {
            self.start = self.start.wrapping_add(piece.bytes.len() as u32);
            done += 1;
        }
        self.pieces.drain(..done);
    }

    /// The bytes from number `from` on, piece by piece, each with its hop limit.
    fn from(&self, from: u32) -> impl Iterator<Item = (&[u8], u8)> {
        let mut skip = from.wrapping_sub(self.start) as usize;
        self.pieces.iter().filter_map(move |Piece { bytes, hop_limit }| {
            if skip >= bytes.len() {
                skip -= bytes.len();
                return None;
            }
            Some((&bytes[std::mem::take(&mut skip)..], *hop_limit))
        })
    }

    /// The bytes from number `from` on that one frame may carry: those of pieces with one hop limit.
    pub(super) fn run(&self, from: u32) -> u32 {
        let mut pieces = self.from(from).peekable();
        let limit = pieces.peek().map(|(_, limit)| *limit);
        pieces.take_while(|(_, other)| Some(*other) == limit).map(|(bytes, _)| bytes.len() as u32).sum()
    }

    /// Lends `bytes` bytes from number `from` on, all of which must be in one [`run`](Self::run), as pieces in
    /// `places`. Returns how many pieces, and their hop limit.
    pub(super) fn lend<'a>(
        &'a self,
        from: u32,
        bytes: u32,
        places: &mut [IoSlice<'a>; PIECES_PER_CONNECTION + 1],
    ) -> (usize, u8) {
        let (mut left, mut count, mut smallest) = (bytes as usize, 0, HOP_LIMIT);
        for (place, (piece, hop_limit)) in places.iter_mut().zip(self.from(from)) {
            if left == 0 {
                break;
            }
            let take = piece.len().min(left);
            *place = IoSlice::new(&piece[..take]);
            (left, count, smallest) = (left - take, count + 1, smallest.min(hop_limit));
        }
        (count, smallest)
    }

    /// Fills `place` with the bytes from number `from` on, all of which must be queued. Returns the hop limit of a
    /// segment that carries them.
    pub(super) fn copy(&self, from: u32, place: &mut [u8]) -> u8 {
        let (mut done, mut smallest) = (0, HOP_LIMIT);
        for (piece, hop_limit) in self.from(from) {
            if done == place.len() {
                break;
            }
            let take = piece.len().min(place.len() - done);
            place[done..done + take].copy_from_slice(&piece[..take]);
            (done, smallest) = (done + take, smallest.min(hop_limit));
        }
        smallest
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use std::io::IoSlice;

    use super::{PIECES_PER_CONNECTION, SendQueue};

    #[test]
    fn a_run_ends_at_another_hop_limit_and_is_lent_without_a_copy() {
        let whole: Vec<u8> = (0..250).collect();
        let mut outbox = SendQueue::new(u32::MAX - 100);
        for (range, limit) in [(0..100, None), (100..180, None), (180..200, Some(1)), (200..250, None)] {
            outbox.push(Bytes::copy_from_slice(&whole[range]), limit);
        }
        for (from, run, pieces, limit) in [
            (0, 180, 2, 64),
            (99, 81, 2, 64),
            (100, 80, 1, 64),
            (185, 15, 1, 1),
            (200, 50, 1, 64),
            (250, 0, 0, 64),
        ] {
            let number = (u32::MAX - 100).wrapping_add(from);
            assert_eq!(outbox.run(number), run, "from {from}");
            let mut places = [IoSlice::new(&[]); PIECES_PER_CONNECTION + 1];
            assert_eq!(outbox.lend(number, run, &mut places), (pieces, limit), "from {from}");
            let lent: Vec<u8> = places[..pieces].iter().flat_map(|piece| piece.iter().copied()).collect();
            assert_eq!(lent, whole[from as usize..(from + run) as usize], "from {from}");
        }
    }

    #[test]
    fn any_cut_has_its_bytes_and_the_smallest_limit_of_its_pieces() {
        // Includes a base where the sequence numbers wrap.
        for base in [0_u32, 1000, u32::MAX - 150] {
            let at = |offset: usize| base.wrapping_add(offset as u32);
            let whole: Vec<u8> = (0..250).collect();
            let mut outbox = SendQueue::new(base);
            let pieces = [(0..100, None), (100..150, Some(1)), (150..200, Some(3)), (200..250, Some(0))];
            for (range, limit) in pieces {
                outbox.push(Bytes::copy_from_slice(&whole[range]), limit);
                outbox.push(Bytes::new(), Some(1));
            }
            assert_eq!(outbox.end(), at(250));
            let cases = [
                (0, 100, 64),
                (0, 101, 1),
                (149, 150, 1),
                (149, 151, 1),
                (150, 151, 3),
                (150, 200, 3),
                (199, 250, 1),
                (0, 250, 1),
            ];
            for (from, to, limit) in cases {
                let mut cut = vec![0; to - from];
                assert_eq!(outbox.copy(at(from), &mut cut), limit, "{from}..{to} from {base}");
                assert_eq!(cut, whole[from..to]);
            }
            outbox.acknowledged(at(149));
            let mut cut = [0; 1];
            assert_eq!((outbox.copy(at(149), &mut cut), cut), (1, [149]));
            outbox.acknowledged(at(150));
            assert_eq!((outbox.copy(at(150), &mut cut), cut, outbox.pieces.len()), (3, [150], 2));
            outbox.acknowledged(at(250));
            assert_eq!((outbox.pieces.len(), outbox.start), (0, at(250)));
        }
    }
}
