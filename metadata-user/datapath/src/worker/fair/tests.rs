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
            let heard = bench.engine.heard.iter().filter(|(of, _)| *of == slot).map(|(_, number)| *number);
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
            assert!(is_heard, "{greedy} greedy with {each} frames: asked in turn {asked}, not served in {n}");
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
