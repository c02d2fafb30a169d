//! Shares the worker's time fairly between slots rather than between frames.
//!
//! ```text
//!  ring ── arrived ──┬─ work left in this turn, and nothing of the slot waits ── engine, at once
//!                    ├─ else ── the slot's queue ─┬─ fresh: slots within a small allowance
//!                    └─ too many wait: dropped    └─ crowd: all others, deficit round robin
//!  serve ── a quantum of work for fresh slots, one visit of the crowd, and so on until the turn's work is done
//! ```
//!
//! The unit of work is a frame, received or sent. A long frame counts by its bytes ([`Long::work`]). Most of a
//! request's cost is the system call for each frame sent and the steps before the stack for each frame received. A
//! visited slot does at most [`QUANTUM`] of work, or one long frame more. The rest
//! waits for its next visit: frames in this module, output in the slot's connections ([`Engine::go_on`]). A slot that
//! causes little work waits only for a turn and a visit or two, however many slots cause as much as they can. If more
//! frames arrive than can be served, the slots with the longest queues lose frames (Shreedhar and Varghese 1995; RFC
//! 8290 §4 for the separate line of slots that cause little work).
//!
//! Only waiting frames are copied, and frames wait only if a slot causes too much work.

use metadata_common::maps::{MAX_SLOTS, Slot};
use std::collections::VecDeque;
use std::time::Duration;

use super::Engine;
use crate::link::{FrameSource, LinkReceiver};
use crate::stack::{Long, Transmit};
use metadata_common::time::Now;

/// Limit of frames received per turn while none waits. It bounds the delay of the engine's timers.
pub const BATCH: usize = 64;
/// Limit of frames received per turn while some wait. Reading and queueing a frame costs a tenth of serving it, and a
/// modest slot's frame may stand behind those of a greedy slot.
pub const LOOK_AHEAD: usize = 512;
/// Limit of waiting frames, over all slots. No slot may hold more frames than there are free places. Some places
/// therefore stay free for other slots, however many are greedy.
pub const WAITING: usize = 2048;
/// Limit of work per turn done at once, and again for waiting slots: about 16 µs each.
pub const WORK_PER_TURN: u32 = 32;
/// Limit of work for one slot in one visit, and of its work done at once in one turn.
pub const QUANTUM: u32 = 16;
/// Idle time that earns a slot one unit of work ahead of the crowd. A slot with at most 2,000 units a second, several
/// hundred requests, is always fresh.
pub const FRESH_EVERY: Duration = Duration::from_micros(500);
/// Work that a slot may cause in one burst and still be fresh: a boot with fifty requests.
pub const FRESH_BURST: u32 = 256;

/// Longest frame that can wait, in bytes. A UMEM chunk holds no longer one.
const FRAME_MAX: usize = 4096;

/// The line that a slot stands in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    /// Nothing of the slot waits.
    #[default]
    None,
    Fresh,
    Crowd,
}

/// Scheduling state of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    /// When the slot's full allowance is restored, by `Now::mono`.
    whole_at: Duration,
    /// The slot's waiting frames: the places of the first and the last, each plus one, and their number.
    first: u32,
    last: u32,
    frames: u32,
    /// Work the slot may do before the next slot of the crowd is visited.
    credit: i32,
    /// The last turn in which the slot had work done at once, and how much.
    turn: u32,
    done: u32,
    line: Line,
    /// The engine holds deferred output of the slot.
    owes: bool,
}

impl Flow {
    fn is_fresh(&self, now: Duration) -> bool {
        self.whole_at <= now + FRESH_EVERY * FRESH_BURST
    }

    fn charge(&mut self, now: Duration, work: u32) {
        self.whole_at = self.whole_at.max(now) + FRESH_EVERY * work;
    }
}

/// Waiting frames, each in its own place. The kernel provides memory only for places that were used.
#[derive(Debug)]
struct Frames {
    bytes: Vec<u8>,
    lengths: Vec<u16>,
    /// The next frame of the same slot, plus one, by place.
    next: Vec<u32>,
    free: Vec<u32>,
}

impl Frames {
    fn new() -> Self {
        Self {
            bytes: vec![0; WAITING * FRAME_MAX],
            lengths: vec![0; WAITING],
            next: vec![0; WAITING],
            // Places are taken from the end, so the lowest come first.
            free: (0..WAITING as u32).rev().collect(),
        }
    }

    fn get(&self, place: u32) -> &[u8] {
        let start = place as usize * FRAME_MAX;
        &self.bytes[start..start + usize::from(self.lengths[place as usize])]
    }

    /// Appends a frame to those of its slot; returns false if no place is free for it.
    fn push(&mut self, flow: &mut Flow, frame: &[u8]) -> bool {
        if flow.frames as usize >= self.free.len() || frame.len() > FRAME_MAX {
            return false;
        }
        let Some(place) = self.free.pop() else { return false };
        let start = place as usize * FRAME_MAX;
        self.bytes[start..start + frame.len()].copy_from_slice(frame);
        self.lengths[place as usize] = frame.len() as u16;
        self.next[place as usize] = 0;
        match flow.last.checked_sub(1) {
            Some(last) => self.next[last as usize] = place + 1,
            None => flow.first = place + 1,
        }
        flow.last = place + 1;
        flow.frames += 1;
        true
    }

    /// Takes the first frame of a slot. The caller returns its place with [`release`](Self::release).
    fn pop(&mut self, flow: &mut Flow) -> Option<u32> {
        let place = flow.first.checked_sub(1)?;
        flow.first = self.next[place as usize];
        if flow.first == 0 {
            flow.last = 0;
        }
        flow.frames -= 1;
        Some(place)
    }

    fn release(&mut self, place: u32) {
        self.free.push(place);
    }
}

/// Counts the work of the frames sent.
struct WorkCounter<'a> {
    out: &'a mut dyn Transmit,
    work: u32,
}

impl Transmit for WorkCounter<'_> {
    fn send(&mut self, frame: &[u8]) {
        self.work += 1;
        self.out.send(frame);
    }

    fn send_long(&mut self, frame: &Long<'_>) {
        self.work += frame.work();
        self.out.send_long(frame);
    }
}

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnResult {
    /// Frames received, including dropped ones.
    pub received: usize,
    /// Work done for frames and output, in frames.
    pub work: u32,
    /// True if frames wait or the ring may hold more: the next turn is due at once.
    pub more: bool,
    /// The latest time of the engine's next step, by [`Now::mono`].
    pub due: Option<Duration>,
}

/// Shares a worker's turns between slots.
#[derive(Debug)]
pub struct FairScheduler {
    flows: Vec<Flow>,
    frames: Frames,
    fresh: VecDeque<Slot>,
    crowd: VecDeque<Slot>,
    turn: u32,
    /// Work done in the current turn.
    work: u32,
    dropped: u64,
}

impl Default for FairScheduler {
    fn default() -> Self {
        Self {
            flows: vec![Flow::default(); MAX_SLOTS as usize],
            frames: Frames::new(),
            // Each slot is in a line at most once, so neither line grows beyond this.
            fresh: VecDeque::with_capacity(MAX_SLOTS as usize),
            crowd: VecDeque::with_capacity(MAX_SLOTS as usize),
            turn: 0,
            work: 0,
            dropped: 0,
        }
    }
}

impl FairScheduler {
    /// Frames dropped because their slot already held its share of the places.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Runs one turn: receives frames, serves slots within [`WORK_PER_TURN`] at once, serves waiting slots within the
    /// same limit, and steps the engine.
    pub fn turn<S: FrameSource, E: Engine>(
        &mut self,
        now: Now,
        link: &mut LinkReceiver<S>,
        engine: &mut E,
        out: &mut dyn Transmit,
    ) -> TurnResult {
        self.turn = self.turn.wrapping_add(1);
        self.work = 0;
        let most = if self.is_empty() { BATCH } else { LOOK_AHEAD };
        let received = link.receive(most, |group| {
            engine.read_ahead(group);
            for (slot, frame) in group {
                self.arrived(now, *slot, frame, engine, out);
            }
        });
        let end = self.work + WORK_PER_TURN;
        while self.work < end && self.visit(now, engine, out) {}
        let due = engine.step(now, out);
        self.take_on(engine);
        let more = received == most || !self.is_empty();
        TurnResult { received, work: self.work, more, due }
    }

    /// Drops the waiting frames of a slot.
    pub fn forget(&mut self, slot: Slot) {
        let Some(flow) = self.flows.get_mut(slot as usize) else { return };
        while let Some(place) = self.frames.pop(flow) {
            self.frames.release(place);
        }
    }

    fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.crowd.is_empty()
    }

    /// Serves or queues a frame from the ring.
    fn arrived(
        &mut self,
        now: Now,
        slot: Slot,
        frame: &[u8],
        engine: &mut impl Engine,
        out: &mut dyn Transmit,
    ) {
        let is_alone = self.is_empty();
        let Some(flow) = self.flows.get_mut(slot as usize) else { return };
        if flow.turn != self.turn {
            (flow.turn, flow.done) = (self.turn, 0);
        }
        // A fresh slot waits behind other fresh slots that wait already: first come, first served.
        let is_next = is_alone || (self.fresh.is_empty() && flow.is_fresh(now.mono));
        let may = flow.done < QUANTUM && is_next;
        if flow.line == Line::None && may && self.work < WORK_PER_TURN {
            let mut out = WorkCounter { out, work: 0 };
            engine.receive(now, slot, frame, &mut out);
            let work = 1 + out.work;
            flow.done += work;
            flow.charge(now.mono, work);
            self.work += work;
            self.take_on(engine);
            return;
        }
        if !self.frames.push(flow, frame) {
            self.dropped += 1;
            return;
        }
        self.line_up(now, slot);
    }

    /// Puts a slot with waiting work in a line, unless it stands in one.
    fn line_up(&mut self, now: Now, slot: Slot) {
        let flow = &mut self.flows[slot as usize];
        if flow.line != Line::None {
            return;
        }
        if flow.is_fresh(now.mono) && !flow.owes {
            flow.line = Line::Fresh;
            self.fresh.push_back(slot);
        } else {
            self.join_crowd(slot);
        }
    }

    /// Puts a slot that stands in no line at the end of the crowd, if it has waiting work.
    fn join_crowd(&mut self, slot: Slot) {
        let flow = &mut self.flows[slot as usize];
        if flow.line == Line::None && (flow.frames > 0 || flow.owes) {
            flow.line = Line::Crowd;
            flow.credit = QUANTUM as i32;
            self.crowd.push_back(slot);
        }
    }

    /// Lines up the slots whose output the engine has deferred.
    fn take_on(&mut self, engine: &mut impl Engine) {
        while let Some(slot) = engine.next_pending_slot() {
            let Some(flow) = self.flows.get_mut(slot as usize) else { continue };
            flow.owes = true;
            self.join_crowd(slot);
        }
    }

    /// Visits fresh slots for a quantum of work, then the first slot of the crowd; returns false if there was none of
    /// either.
    fn visit(&mut self, now: Now, engine: &mut impl Engine, out: &mut dyn Transmit) -> bool {
        let (start, mut is_any) = (self.work, false);
        while self.work < start + QUANTUM
            && let Some(slot) = self.fresh.pop_front()
        {
            is_any = true;
            self.serve(now, slot, QUANTUM as i32, engine, out);
            // A slot with more than one visit's work belongs to the crowd until nothing of it waits.
            self.flows[slot as usize].line = Line::None;
            self.join_crowd(slot);
        }
        let crowd = self.crowd.pop_front();
        if let Some(slot) = crowd {
            let credit = self.flows[slot as usize].credit;
            let left = if credit > 0 { self.serve(now, slot, credit, engine, out) } else { credit };
            // A visit costs time even if the slot may do nothing, so it counts as work.
            self.work += u32::from(credit <= 0);
            let flow = &mut self.flows[slot as usize];
            if flow.frames > 0 || flow.owes {
                flow.credit = left + QUANTUM as i32;
                self.crowd.push_back(slot);
            } else {
                flow.line = Line::None;
            }
        }
        self.take_on(engine);
        is_any || crowd.is_some()
    }

    /// Does a slot's waiting work while it has credit; returns the remaining credit.
    fn serve(
        &mut self,
        now: Now,
        slot: Slot,
        mut credit: i32,
        engine: &mut impl Engine,
        out: &mut dyn Transmit,
    ) -> i32 {
        let flow = &mut self.flows[slot as usize];
        while credit > 0 && (flow.frames > 0 || flow.owes) {
            let mut out = WorkCounter { out: &mut *out, work: 0 };
            if let Some(place) = self.frames.pop(flow) {
                engine.receive(now, slot, self.frames.get(place), &mut out);
                self.frames.release(place);
            } else {
                flow.owes = engine.go_on(now, slot, &mut out);
            }
            let work = 1 + out.work;
            flow.charge(now.mono, work);
            self.work += work;
            credit -= work as i32;
        }
        credit
    }
}

#[cfg(test)]
mod tests {
    use super::{BATCH, FairScheduler, LOOK_AHEAD, QUANTUM, WAITING, WORK_PER_TURN, WorkCounter};
    use crate::afxdp::SocketStats;
    use crate::link::{FrameSource, LinkReceiver};
    use crate::stack::{LONG_MAX, Long, Transmit};
    use crate::worker::Engine;
    use metadata_common::maps::Slot;
    use metadata_common::stamp::stamp;
    use metadata_common::time::Now;
    use std::collections::{BTreeMap, BTreeSet, VecDeque};
    use std::io::IoSlice;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    /// A ring of frames.
    struct Ring(VecDeque<Vec<u8>>, UnixDatagram);

    impl AsFd for Ring {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.1.as_fd()
        }
    }

    impl FrameSource for Ring {
        fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
            let count = max.min(self.0.len());
            self.0.drain(..count).for_each(|frame| f(&[&frame]));
            count
        }

        fn stats(&self) -> Option<SocketStats> {
            None
        }
    }

    /// Frame `number` of a slot; it asks for `answers` frames in return.
    fn frame(slot: Slot, number: u32, answers: u8) -> Vec<u8> {
        let mut frame = vec![0; 14];
        frame[6..12].copy_from_slice(&stamp(slot).0);
        frame.extend(number.to_be_bytes());
        frame.push(answers);
        frame
    }

    /// Sends the requested answers: [`QUANTUM`] frames at once and the rest later.
    #[derive(Default)]
    struct Answering {
        heard: Vec<(Slot, u32)>,
        sent: BTreeMap<Slot, u32>,
        owed: BTreeMap<Slot, u32>,
        named: BTreeSet<Slot>,
        unnamed: VecDeque<Slot>,
    }

    impl Answering {
        fn send(&mut self, slot: Slot, frames: u32, out: &mut dyn Transmit) {
            let now = frames.min(QUANTUM);
            (0..now).for_each(|_| out.send(&[]));
            *self.sent.entry(slot).or_default() += now;
            if frames > now {
                *self.owed.entry(slot).or_default() += frames - now;
                if self.named.insert(slot) {
                    self.unnamed.push_back(slot);
                }
            }
        }
    }

    impl Engine for Answering {
        type Stats = ();

        fn receive(&mut self, _: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
            let number = u32::from_be_bytes(*frame[14..].first_chunk().expect("a number"));
            self.heard.push((slot, number));
            self.send(slot, frame[18].into(), out);
        }

        fn next_pending_slot(&mut self) -> Option<Slot> {
            self.unnamed.pop_front()
        }

        fn go_on(&mut self, _: Now, slot: Slot, out: &mut dyn Transmit) -> bool {
            let owed = self.owed.remove(&slot).unwrap_or(0);
            let is_named = self.named.remove(&slot);
            assert!(is_named, "the engine has named slot {slot}");
            self.named.insert(slot);
            self.send(slot, owed, out);
            let more = self.owed.contains_key(&slot);
            if !more {
                self.named.remove(&slot);
            }
            more
        }

        fn step(&mut self, _: Now, _: &mut dyn Transmit) -> Option<Duration> {
            None
        }

        fn forget(&mut self, _: Slot) {}

        fn wake(&mut self, _: Now, _: Slot, _: &mut dyn Transmit) {}

        fn stats(&self) {}
    }

    struct Nowhere;

    impl Transmit for Nowhere {
        fn send(&mut self, _: &[u8]) {}
    }

    struct Bench {
        fair: FairScheduler,
        link: LinkReceiver<Ring>,
        engine: Answering,
        now: Duration,
    }

    impl Bench {
        fn new() -> Self {
            let ring = Ring(VecDeque::new(), UnixDatagram::unbound().expect("a socket"));
            Self {
                fair: FairScheduler::default(),
                link: LinkReceiver::new(ring),
                engine: Answering::default(),
                now: Duration::ZERO,
            }
        }

        /// Runs one turn with these frames; returns true if the next is due at once.
        fn turn(&mut self, frames: impl IntoIterator<Item = Vec<u8>>) -> bool {
            self.now += Duration::from_micros(50);
            self.link.source_mut().0.extend(frames);
            let now = Now { mono: self.now, unix_seconds: 0 };
            let turned = self.fair.turn(now, &mut self.link, &mut self.engine, &mut Nowhere);
            assert!(turned.work <= 2 * WORK_PER_TURN + 6 * (QUANTUM + 1), "{turned:?}");
            turned.more
        }

        fn rest(&mut self) {
            for _ in 0..10_000 {
                if !self.turn([]) {
                    return;
                }
            }
            panic!("more work after 10,000 turns");
        }
    }

    #[test]
    fn every_frame_is_served_once_and_in_order_within_its_slot() {
        for (slots, frames, answers) in [(1, 500, 1), (3, 900, 3), (40, 1_500, 0), (200, 1_000, 2)] {
            let mut bench = Bench::new();
            bench.turn((0..frames).map(|n| frame(n % slots, n, answers)));
            bench.rest();
            assert_eq!((bench.engine.heard.len(), bench.fair.dropped()), (frames as usize, 0));
            for slot in 0..slots {
                let heard =
                    bench.engine.heard.iter().filter(|(of, _)| *of == slot).map(|(_, number)| *number);
                assert!(heard.eq((0..frames).filter(|n| n % slots == slot)), "{slot} of {slots}");
            }
            assert_eq!(bench.fair.frames.free.len(), WAITING);
        }
    }

    #[test]
    fn greedy_slots_get_equal_work_whatever_their_frames_cost() {
        const GREEDY: u32 = 30;
        let mut bench = Bench::new();
        let turns = 4_000;
        for n in 0..turns {
            let one = |slot| frame(slot, n, [0, 3, 12, 60][slot as usize % 4]);
            bench.turn((0..GREEDY).flat_map(|slot| [one(slot), one(slot)]));
        }
        let work = |slot: Slot| {
            let heard = bench.engine.heard.iter().filter(|(of, _)| *of == slot).count() as u32;
            heard + bench.engine.sent.get(&slot).copied().unwrap_or(0)
        };
        // Slots whose frames cost almost nothing may not have enough of them.
        let all: Vec<_> = (0..GREEDY).filter(|slot| slot % 4 > 0).map(work).collect();
        let (least, most) = (all.iter().min().copied(), all.iter().max().copied());
        assert!(most <= least.map(|least| least + least / 5), "{least:?} to {most:?}");
    }

    #[test]
    fn a_modest_slot_is_served_within_three_turns_beside_many_greedy_ones() {
        // The greedy slots first use up their burst; until then they are served like all others.
        const GREEDY_FROM: u32 = 2_500;
        for (greedy, each, answers) in [(100, 4, 1), (100, 2, 60), (200, 2, 1), (10, 50, 10)] {
            let mut bench = Bench::new();
            let mut asked = GREEDY_FROM;
            for n in 0..GREEDY_FROM + 500 {
                let mut frames: Vec<_> =
                    (0..greedy * each).map(|at| frame(1 + at % greedy, n, answers)).collect();
                if n >= GREEDY_FROM && n % 20 == 0 {
                    asked = n;
                    frames.push(frame(0, n, 1));
                }
                // Frames that do not fit the ring are outside this test.
                let queued = bench.link.source().0.len();
                let frames = frames.split_off(frames.len().saturating_sub(LOOK_AHEAD.saturating_sub(queued)));
                bench.turn(frames);
                let is_heard = n < asked + 2 || bench.engine.heard.contains(&(0, asked));
                assert!(
                    is_heard,
                    "{greedy} greedy with {each} frames: asked in turn {asked}, not served in {n}"
                );
            }
        }
    }

    #[test]
    fn a_greedy_slot_fills_half_of_the_places_and_leaves_the_rest_to_others() {
        let mut bench = Bench::new();
        for n in 0..100 {
            bench.turn((0..LOOK_AHEAD as u32).map(|at| frame(1, n * LOOK_AHEAD as u32 + at, 1)));
        }
        let waiting = bench.fair.flows[1].frames as usize;
        assert!(waiting <= WAITING / 2 + 1 && waiting > WAITING / 4, "{waiting}");
        let dropped = bench.fair.dropped();
        bench.link.source_mut().0.clear();
        bench.turn((2..100).map(|slot| frame(slot, 0, 1)));
        assert!(dropped > 0 && bench.fair.dropped() == dropped, "no frame of another slot is dropped");
    }

    #[test]
    fn waiting_frames_of_a_forgotten_slot_are_never_served() {
        let mut bench = Bench::new();
        bench.turn((0..BATCH as u32).map(|n| frame(1, n, 10)));
        let heard = bench.engine.heard.len();
        assert!(heard < BATCH, "{heard}");
        bench.fair.forget(1);
        bench.rest();
        assert_eq!((bench.engine.heard.len(), bench.fair.frames.free.len()), (heard, WAITING));
    }

    #[test]
    fn an_excessively_long_frame_is_dropped_if_it_would_have_to_wait() {
        let mut bench = Bench::new();
        let mut long = frame(1, 99, 0);
        long.resize(5_000, 0);
        bench.turn((0..40).map(|n| frame(1, n, 1)).chain([long]));
        bench.rest();
        assert_eq!((bench.fair.dropped(), bench.engine.heard.len()), (1, 40));
    }

    #[test]
    fn a_long_frame_counts_one_and_one_more_for_each_8_kib() {
        for (bytes, work) in [(2_920, 1), (8_191, 1), (8_192, 2), (LONG_MAX as usize, 8)] {
            let bytes = vec![0; bytes];
            let mut counted = WorkCounter { out: &mut Nowhere, work: 0 };
            let payload = &[IoSlice::new(&bytes)];
            counted.send_long(&Long { headers: &[], tcp_at: 34, is_ipv4: true, payload, segment: 1_460 });
            assert_eq!(counted.work, work, "{} bytes", bytes.len());
        }
    }
}
