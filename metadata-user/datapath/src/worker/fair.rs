//! Whose frame is next: the worker's time is shared by slot, not by frame.
//!
//! ```text
//!  ring ── arrived ──┬─ room in this turn, and nothing of the slot waits ── engine, at once
//!                    ├─ else ── the slot's queue ─┬─ fresh: slots within a small allowance
//!                    └─ too many wait: dropped    └─ crowd: all others, deficit round robin
//!  serve ── a quantum of work for fresh slots, one visit of the crowd, and so on until the turn's work is done
//! ```
//!
//! Work is counted in frames, received and sent: a system call for each frame sent, and what comes before the stack
//! for each received, are most of what a request costs. A slot that is visited does [`QUANTUM`] of work at most, and
//! what it has left over waits for its next visit: frames here, output in its connections ([`Engine::go_on`]). So
//! however many slots ask for all they can get, one that asks for little waits for a turn and for a visit or two, and
//! frames beyond what is served are dropped of the slots whose queues are longest (Shreedhar and Varghese 1995;
//! RFC 8290 §4 for a line of their own for slots that ask for little).
//!
//! Only what waits is copied, and nothing waits unless somebody asks for too much.

use metadata_common::maps::{MAX_SLOTS, Slot};
use std::collections::VecDeque;
use std::time::Duration;

use super::Engine;
use crate::link::{FrameSource, Link};
use crate::stack::Transmit;
use metadata_base::time::Now;

/// Frames received per turn at most while none waits: what may delay the engine's timers.
pub const BATCH: usize = 64;
/// The same while some wait. To look at a frame and queue it costs a tenth of what serving it does, and behind those
/// of a greedy slot may be one of a modest slot.
pub const LOOK_AHEAD: usize = 512;
/// Frames that wait at most, of all slots. One slot has no more than there are places left, so that however many are
/// greedy, some stay for the others.
pub const WAITING: usize = 2048;
/// Work done at once, and again for those who wait, per turn: some 16 µs each.
pub const WORK_PER_TURN: u32 = 32;
/// Work of one slot in one visit, and done at once in one turn.
pub const QUANTUM: u32 = 16;
/// How long a slot has to ask for nothing to have one unit of work done before those of the crowd: a slot that has
/// 2,000 units a second or less, several hundred requests, is always fresh.
pub const FRESH_EVERY: Duration = Duration::from_micros(500);
/// Work that a slot may have done at once and stay fresh: a boot with fifty requests.
pub const FRESH_BURST: u32 = 256;

/// Octets of the longest frame that can wait: a UMEM chunk holds none that is longer.
const FRAME_MAX: usize = 4096;

/// Where a slot stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    /// Nothing of it waits.
    #[default]
    None,
    Fresh,
    Crowd,
}

/// What is known of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    /// By `Now::mono`: when its allowance is whole again.
    whole_at: Duration,
    /// Its frames that wait: the first and the last, plus one, and how many.
    first: u32,
    last: u32,
    frames: u32,
    /// Work it may do before the next slot of the crowd is visited.
    credit: i32,
    /// The last turn in which something of it was done at once, and how much.
    turn: u32,
    done: u32,
    line: Line,
    /// The engine has put off output of it.
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

/// Frames that wait, each in a place of its own. The system provides the memory of those that were ever used.
#[derive(Debug)]
struct Frames {
    octets: Vec<u8>,
    lengths: Vec<u16>,
    /// By place: the next frame of its slot, plus one.
    next: Vec<u32>,
    free: Vec<u32>,
}

impl Frames {
    fn new() -> Self {
        Self {
            octets: vec![0; WAITING * FRAME_MAX],
            lengths: vec![0; WAITING],
            next: vec![0; WAITING],
            // The last is used first.
            free: (0..WAITING as u32).rev().collect(),
        }
    }

    fn get(&self, place: u32) -> &[u8] {
        let start = place as usize * FRAME_MAX;
        &self.octets[start..start + usize::from(self.lengths[place as usize])]
    }

    /// Puts a frame behind the others of its slot; false when there is no place for it.
    fn push(&mut self, flow: &mut Flow, frame: &[u8]) -> bool {
        if flow.frames as usize >= self.free.len() || frame.len() > FRAME_MAX {
            return false;
        }
        let Some(place) = self.free.pop() else { return false };
        let start = place as usize * FRAME_MAX;
        self.octets[start..start + frame.len()].copy_from_slice(frame);
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

    /// Takes the first frame of a slot; its place is to be given back by [`release`](Self::release).
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

/// Counts frames on their way out.
struct Counted<'a> {
    out: &'a mut dyn Transmit,
    frames: u32,
}

impl Transmit for Counted<'_> {
    fn send(&mut self, frame: &[u8]) {
        self.frames += 1;
        self.out.send(frame);
    }
}

/// What a turn did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turned {
    /// Frames received, those dropped included.
    pub received: usize,
    /// Work done for frames and output.
    pub work: u32,
    /// Something waits, or may be in the ring still: the next turn is due at once.
    pub more: bool,
    /// When the engine wants its next step at the latest, by [`Now::mono`].
    pub due: Option<Duration>,
}

/// Shares a worker's turns among slots.
#[derive(Debug)]
pub struct Fair {
    flows: Vec<Flow>,
    frames: Frames,
    fresh: VecDeque<Slot>,
    crowd: VecDeque<Slot>,
    turn: u32,
    /// Work done in this turn.
    work: u32,
    dropped: u64,
}

impl Default for Fair {
    fn default() -> Self {
        Self {
            flows: vec![Flow::default(); MAX_SLOTS as usize],
            frames: Frames::new(),
            // No slot is in either twice, so neither grows beyond this.
            fresh: VecDeque::with_capacity(MAX_SLOTS as usize),
            crowd: VecDeque::with_capacity(MAX_SLOTS as usize),
            turn: 0,
            work: 0,
            dropped: 0,
        }
    }
}

impl Fair {
    /// Frames dropped because their slot had more waiting than its part of the places.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// One turn: receives frames, serves slots within [`WORK_PER_TURN`] at once and as much again for those that wait,
    /// and steps the engine.
    pub fn turn<S: FrameSource, E: Engine>(
        &mut self,
        now: Now,
        link: &mut Link<S>,
        engine: &mut E,
        out: &mut dyn Transmit,
    ) -> Turned {
        self.turn = self.turn.wrapping_add(1);
        self.work = 0;
        let most = if self.is_empty() { BATCH } else { LOOK_AHEAD };
        let received = link.receive(most, |slot, frame| self.arrived(now, slot, frame, engine, out));
        let end = self.work + WORK_PER_TURN;
        while self.work < end && self.visit(now, engine, out) {}
        let due = engine.step(now, out);
        self.take_on(engine);
        let more = received == most || !self.is_empty();
        Turned { received, work: self.work, more, due }
    }

    /// Lets go of the frames of a slot.
    pub fn forget(&mut self, slot: Slot) {
        let Some(flow) = self.flows.get_mut(slot as usize) else { return };
        while let Some(place) = self.frames.pop(flow) {
            self.frames.release(place);
        }
    }

    fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.crowd.is_empty()
    }

    /// Takes a frame from the ring.
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
        // Behind another fresh slot that waits, a fresh slot waits too: first come, first served.
        let is_next = is_alone || (self.fresh.is_empty() && flow.is_fresh(now.mono));
        let may = flow.done < QUANTUM && is_next;
        if flow.line == Line::None && may && self.work < WORK_PER_TURN {
            let mut out = Counted { out, frames: 0 };
            engine.receive(now, slot, frame, &mut out);
            let work = 1 + out.frames;
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

    /// Puts a slot of which something waits in line, unless it stands in one.
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

    /// Puts a slot that stands in no line behind the crowd, if something of it waits.
    fn join_crowd(&mut self, slot: Slot) {
        let flow = &mut self.flows[slot as usize];
        if flow.line == Line::None && (flow.frames > 0 || flow.owes) {
            flow.line = Line::Crowd;
            flow.credit = QUANTUM as i32;
            self.crowd.push_back(slot);
        }
    }

    /// Lines up the slots of which the engine has put output off.
    fn take_on(&mut self, engine: &mut impl Engine) {
        while let Some(slot) = engine.owing() {
            let Some(flow) = self.flows.get_mut(slot as usize) else { continue };
            flow.owes = true;
            self.join_crowd(slot);
        }
    }

    /// Visits fresh slots for a quantum of work, and the first of the crowd; false when there is neither.
    fn visit(&mut self, now: Now, engine: &mut impl Engine, out: &mut dyn Transmit) -> bool {
        let (start, mut is_any) = (self.work, false);
        while self.work < start + QUANTUM
            && let Some(slot) = self.fresh.pop_front()
        {
            is_any = true;
            self.serve(now, slot, QUANTUM as i32, engine, out);
            // With more than a visit's worth to do it is of the crowd until nothing of it waits.
            self.flows[slot as usize].line = Line::None;
            self.join_crowd(slot);
        }
        let crowd = self.crowd.pop_front();
        if let Some(slot) = crowd {
            let credit = self.flows[slot as usize].credit;
            let left = if credit > 0 { self.serve(now, slot, credit, engine, out) } else { credit };
            // To look at a slot is not free, however little it may do.
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

    /// Does what waits of a slot while it has credit; returns what is left of that.
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
            let mut out = Counted { out: &mut *out, frames: 0 };
            if let Some(place) = self.frames.pop(flow) {
                engine.receive(now, slot, self.frames.get(place), &mut out);
                self.frames.release(place);
            } else {
                flow.owes = engine.go_on(now, slot, &mut out);
            }
            let work = 1 + out.frames;
            flow.charge(now.mono, work);
            self.work += work;
            credit -= work as i32;
        }
        credit
    }
}

#[cfg(test)]
mod tests;
