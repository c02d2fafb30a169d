use metadata_common::maps::Slot;
use metadata_common::stamp::stamp;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::{
    BATCH, CONTROL_QUEUE, ControlError, Engine, LOOK_QUEUE, MAX_SLEEP, ORDERS, QUANTUM, Silence, WAKE_QUEUE,
    WORK_PER_TURN, WorkerConfig, WorkerError, WorkerHandle, WorkerLauncher,
};
use crate::afxdp::SocketStats;
use crate::link::{FrameSource, HubTap};
use crate::stack::{ServedFlows, SlotStats, Transmit};
use metadata_common::time::Now;

/// Timeout of a test: far longer than any step takes, so reached only on a fault.
const PATIENCE: Duration = Duration::from_secs(20);

/// A source whose frames are datagrams.
struct Datagrams {
    socket: UnixDatagram,
    frames: u64,
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl FrameSource for Datagrams {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let mut buffer = [0; 2_048];
        for lent in 0..max {
            let Ok(len) = self.socket.recv(&mut buffer) else { return lent };
            self.frames += 1;
            f(&[&buffer[..len]]);
        }
        max
    }

    fn stats(&self) -> Option<SocketStats> {
        Some(SocketStats { frames: self.frames, ..SocketStats::default() })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Receive(Slot, u8),
    /// How many alarms the step found due.
    Step(u32),
    Forget(Slot),
    Wake(Slot),
    Drain(Duration),
    Resume,
    Spare(bool),
    End,
    Dropped,
}

/// Reports each call, answers each frame with itself, and asks for `alarms` further steps.
struct Echo {
    events: Sender<Event>,
    alarms: u32,
    due: Option<Duration>,
    /// The number that `left` returns.
    left: Arc<AtomicUsize>,
    /// If set, each receive waits here first.
    gate: Option<Receiver<()>>,
}

/// The mark of the frame sent for a woken slot.
const WOKEN: u8 = 0xee;

/// The flow claimed in every drain.
const CLAIMED: u64 = 77;

const ALARM: Duration = Duration::from_millis(5);

impl Engine for Echo {
    type Stats = u32;

    fn receive(&mut self, _: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        if let Some(gate) = &self.gate {
            let _closed = gate.recv_timeout(PATIENCE);
        }
        assert_ne!(frame[14], 0xff, "expected by a test");
        let _ = self.events.send(Event::Receive(slot, frame[14]));
        out.send(frame);
    }

    fn step(&mut self, now: Now, _: &mut dyn Transmit) -> Option<Duration> {
        let mut fired = 0;
        if self.due.is_some_and(|due| now.mono >= due) {
            self.alarms -= 1;
            self.due = None;
            fired = 1;
        }
        if self.due.is_none() && self.alarms > 0 {
            self.due = Some(now.mono + ALARM);
        }
        let _ = self.events.send(Event::Step(fired));
        self.due
    }

    fn forget(&mut self, slot: Slot) {
        let _ = self.events.send(Event::Forget(slot));
    }

    fn wake(&mut self, _: Now, slot: Slot, out: &mut dyn Transmit) {
        let _ = self.events.send(Event::Wake(slot));
        out.send(&frame(slot, WOKEN));
    }

    fn drain(&mut self, _: Now, limit: Duration, claims: Option<Box<dyn ServedFlows + Send>>) {
        if let Some(mut claims) = claims {
            claims.claim(CLAIMED);
        }
        let _ = self.events.send(Event::Drain(limit));
    }

    fn resume(&mut self) {
        let _ = self.events.send(Event::Resume);
    }

    fn spare_unknown(&mut self, spare: bool) {
        let _ = self.events.send(Event::Spare(spare));
    }

    fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    fn end(&mut self) {
        let _ = self.events.send(Event::End);
    }

    fn look(&self, slot: Slot) -> SlotStats {
        SlotStats { connections: slot.into(), waiting: 0 }
    }

    fn stats(&self) -> u32 {
        self.alarms
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.events.send(Event::Dropped);
    }
}

/// A worker, the far ends of its socket and tap, and its engine's events.
struct Bench {
    worker: WorkerHandle<u32>,
    guest: UnixDatagram,
    wire: UnixDatagram,
    events: Receiver<Event>,
    left: Arc<AtomicUsize>,
}

impl Bench {
    fn new(config: WorkerConfig, alarms: u32) -> Self {
        Self::with(config, alarms, None, &[])
    }

    fn with(config: WorkerConfig, alarms: u32, gate: Option<Receiver<()>>, waiting: &[Vec<u8>]) -> Self {
        let (socket, guest) = UnixDatagram::pair().expect("a pair");
        let (tap, wire) = UnixDatagram::pair().expect("a pair");
        socket.set_nonblocking(true).expect("a flag");
        tap.set_nonblocking(true).expect("a flag");
        wire.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        for frame in waiting {
            guest.send(frame).expect("room");
        }
        let (sender, events) = channel();
        let left = Arc::new(AtomicUsize::new(0));
        let engine = Echo { events: sender, alarms, due: None, left: Arc::clone(&left), gate };

        let source = Datagrams { socket, frames: 0 };
        let worker =
            WorkerLauncher::spawn(config, source, HubTap::new(tap.into()), engine).expect("a worker");
        Self { worker, guest, wire, events, left }
    }

    /// The next event other than an idle step.
    fn event(&self) -> Event {
        loop {
            match self.events.recv_timeout(PATIENCE).expect("an event in time") {
                Event::Step(0) => {}
                event => return event,
            }
        }
    }

    /// Waits until the published counters satisfy `done`.
    fn until(&self, done: impl Fn(&super::WorkerStats<u32>) -> bool) -> super::WorkerStats<u32> {
        let begun = Instant::now();
        loop {
            let stats = self.worker.stats();
            if done(&stats) {
                return stats;
            }
            assert!(begun.elapsed() < PATIENCE, "{stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn frame(slot: Slot, mark: u8) -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[6..12].copy_from_slice(&stamp(slot).0);
    frame[14] = mark;
    frame
}

fn sleeper() -> WorkerConfig {
    WorkerConfig { spin: Duration::ZERO, ..WorkerConfig::default() }
}

#[test]
fn frames_reach_the_engine_with_their_slot_and_answers_the_tap() {
    let bench = Bench::new(sleeper(), 0);
    for mark in 1..=3 {
        bench.guest.send(&frame(9, mark)).expect("room");
        assert_eq!(bench.event(), Event::Receive(9, mark));
        let mut answer = [0; 100];
        let len = bench.wire.recv(&mut answer).expect("an answer");
        assert_eq!(answer[..len], frame(9, mark));
    }
}

#[test]
fn timers_fire_without_frames() {
    let bench = Bench::new(sleeper(), 3);
    for _ in 0..3 {
        assert_eq!(bench.event(), Event::Step(1));
    }
}

#[test]
fn work_between_two_steps_stays_within_the_limit_of_a_turn() {
    const FRAMES: usize = 3 * BATCH + 11;
    // Each frame has one answer. The sum of: work at once, work of waiting slots, and the excess of the last visit.
    const MOST: usize = (2 * WORK_PER_TURN + QUANTUM) as usize / 2;
    let (ours, _theirs) = UnixStream::pair().expect("a pair");
    let (tap, _wire) = UnixDatagram::pair().expect("a pair");
    tap.set_nonblocking(true).expect("a flag");
    let (sender, events) = channel();
    let engine = Echo { events: sender, alarms: 0, due: None, left: Arc::default(), gate: None };
    let stock = Stock { fd: ours, frames: vec![frame(1, 1); FRAMES] };
    let worker = WorkerLauncher::spawn(sleeper(), stock, HubTap::new(tap.into()), engine).expect("a worker");
    let mut batches = vec![0];
    while batches.iter().sum::<usize>() < FRAMES {
        match events.recv_timeout(PATIENCE).expect("an event in time") {
            Event::Receive(..) => *batches.last_mut().expect("a batch") += 1,
            Event::Step(_) => batches.push(0),
            other => panic!("{other:?}"),
        }
    }
    assert!(batches.iter().all(|batch| *batch <= MOST) && batches.len() <= 20, "{batches:?}");
    worker.stop().expect("a clean end");
}

#[test]
fn a_message_wakes_a_sleeping_worker() {
    let bench = Bench::new(sleeper(), 0);
    let asleep = bench.until(|stats| stats.turns.sleeps > 0 || stats.turns.turns > 0);
    bench.worker.forget(5).expect("room");
    bench.worker.forget(6).expect("room");
    assert_eq!(bench.event(), Event::Forget(5));
    assert_eq!(bench.event(), Event::Forget(6));
    let after = bench.until(|stats| stats.turns.forgotten == 2);
    assert!(after.turns.turns > asleep.turns.turns);
}

#[test]
fn a_wake_reaches_the_engine_with_a_way_to_answer() {
    let bench = Bench::new(sleeper(), 0);
    bench.until(|stats| stats.turns.sleeps > 0 || stats.turns.turns > 0);
    bench.worker.wake(5).expect("room");
    assert_eq!(bench.event(), Event::Wake(5));
    let mut answer = [0; 100];
    let len = bench.wire.recv(&mut answer).expect("an answer");
    assert_eq!(answer[..len], frame(5, WOKEN));
    assert_eq!(bench.until(|stats| stats.turns.woken == 1).turns.forgotten, 0);
}

#[test]
fn a_full_wake_queue_is_an_error_and_leaves_room_to_forget() {
    let (open, gate) = channel();
    let bench = Bench::with(sleeper(), 0, Some(gate), &[frame(1, 1)]);
    let mut sent = 0_u64;
    while bench.worker.wake(3) == Ok(()) {
        sent += 1;
        assert!(sent <= 2 * WAKE_QUEUE as u64, "the queue has no end");
    }
    assert!(sent >= WAKE_QUEUE as u64);
    assert_eq!(bench.worker.wake(3), Err(ControlError::Full));
    bench.worker.forget(3).expect("room of its own");
    drop(open);
    // No one reads the answers here: frames that the tap refuses are lost, as on any wire.
    bench.until(|stats| stats.turns.woken == sent && stats.turns.forgotten == 1);
    bench.worker.wake(3).expect("room again");
}

#[test]
fn a_full_forget_queue_is_an_error_and_loses_no_message() {
    let (open, gate) = channel();
    let bench = Bench::with(sleeper(), 0, Some(gate), &[frame(1, 1)]);
    // The first turn waits in `receive`; from then on nothing is taken off the queue.
    let mut sent = 0;
    while bench.worker.forget(3) == Ok(()) {
        sent += 1;
        assert!(sent <= 2 * CONTROL_QUEUE, "the queue has no end");
    }
    assert!(sent >= CONTROL_QUEUE);
    assert_eq!(bench.worker.forget(3), Err(ControlError::Full));
    drop(open);
    let stats = bench.until(|stats| stats.turns.forgotten >= sent as u64);
    assert_eq!(stats.turns.forgotten, sent as u64);
}

#[test]
fn counters_of_every_part_are_published_before_a_sleep() {
    let bench = Bench::new(sleeper(), 0);
    bench.guest.send(&frame(1, 1)).expect("room");
    bench.guest.send(&[0; 20]).expect("room");
    let stats = bench.until(|stats| stats.socket.frames == 2);
    assert_eq!((stats.tap.frames, stats.tap.bytes, stats.link.unstamped), (1, 60, 1));
    assert!(stats.turns.turns > 0);
}

#[test]
fn a_worker_polls_for_its_spin_time_and_sleeps_without_one() {
    let awake = Bench::new(WorkerConfig { spin: PATIENCE * 1_000, ..WorkerConfig::default() }, 0);
    assert_eq!(awake.until(|stats| stats.turns.turns > 1_000).turns.sleeps, 0);
    let asleep = Bench::new(sleeper(), 20);
    let stats = asleep.until(|stats| stats.turns.sleeps >= 20 && stats.engine == 0);
    assert!(stats.turns.slept >= ALARM * 10, "{stats:?}");
    assert!(stats.turns.slept <= stats.turns.elapsed, "{stats:?}");
}

#[test]
fn stop_and_drop_end_the_thread_and_then_end_and_free_the_engine() {
    let last = |events: Receiver<Event>| {
        let all: Vec<_> = events.try_iter().filter(|event| !matches!(event, Event::Step(_))).collect();
        assert_eq!(all, [Event::End, Event::Dropped]);
    };
    let Bench { worker, events, .. } = Bench::new(sleeper(), 0);
    worker.stop().expect("a clean end");
    last(events);
    let Bench { worker, events, .. } = Bench::new(sleeper(), 0);
    drop(worker);
    last(events);
}

#[test]
fn a_panic_of_the_engine_is_reported() {
    let bench = Bench::new(sleeper(), 0);
    bench.guest.send(&frame(1, 0xff)).expect("room");
    assert_eq!(bench.event(), Event::Dropped);
    let begun = Instant::now();
    while !bench.worker.is_finished() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(bench.worker.forget(1), Err(ControlError::Ended));
    assert!(matches!(bench.worker.stop(), Err(WorkerError::Panicked)));
}

#[test]
fn the_heartbeat_stops_while_a_worker_is_stuck_and_then_continues() {
    let (open, gate) = channel();
    let bench = Bench::with(sleeper(), 0, Some(gate), &[frame(1, 1)]);
    let beat = bench.worker.heartbeat();
    let start = Instant::now();
    while beat.age().expect("a thread") < 2 * MAX_SLEEP {
        assert!(start.elapsed() < PATIENCE, "a stuck worker has a heartbeat");
        std::thread::sleep(Duration::from_millis(10));
    }
    open.send(()).expect("the worker waits");
    while beat.age().expect("a thread") > MAX_SLEEP {
        assert!(start.elapsed() < 2 * PATIENCE, "the worker does not continue");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(open);
    bench.worker.stop().expect("a good end");
    assert_eq!((beat.age(), beat.check()), (None, Err(Silence::Ended)));
}

#[test]
fn look_returns_a_slots_state_and_fails_when_its_queue_is_full() {
    let (open, gate) = channel();
    let bench = Bench::with(sleeper(), 0, Some(gate), &[frame(1, 1)]);
    let mut asked = Vec::new();
    let refused = loop {
        let (reply, answer) = channel();
        match bench.worker.look(asked.len() as Slot, move |held| reply.send(held).expect("this test waits")) {
            Ok(()) => asked.push(answer),
            Err(error) => break error,
        }
        assert!(asked.len() <= 2 * LOOK_QUEUE, "the queue has no end");
    };
    assert_eq!((refused, asked.len() >= LOOK_QUEUE), (ControlError::Full, true));
    drop(open);
    for (slot, answer) in asked.into_iter().enumerate() {
        let held = answer.recv().expect("an answer");
        assert_eq!(held, SlotStats { connections: slot as u64, waiting: 0 });
    }
}

/// A source that lends its frames; its descriptor never becomes readable.
struct Stock {
    fd: UnixStream,
    frames: Vec<Vec<u8>>,
}

impl AsFd for Stock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl FrameSource for Stock {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let batch: Vec<_> = self.frames.drain(..max.min(self.frames.len())).collect();
        batch.iter().for_each(|frame| f(&[frame]));
        batch.len()
    }

    fn stats(&self) -> Option<SocketStats> {
        None
    }
}

#[test]
fn a_closed_source_ends_the_worker_with_the_reason() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let (tap, _wire) = UnixDatagram::pair().expect("a pair");
    let (sender, events) = channel();
    let engine = Echo { events: sender, alarms: 0, due: None, left: Arc::default(), gate: None };
    let worker =
        WorkerLauncher::spawn(sleeper(), Stock { fd: ours, frames: vec![] }, HubTap::new(tap.into()), engine)
            .expect("a worker");
    drop(theirs);
    while events.recv_timeout(PATIENCE).expect("an end in time") != Event::Dropped {}
    assert!(matches!(worker.stop(), Err(WorkerError::SourceGone)));
}

/// Reports each claim to the test.
struct Noted(Sender<u64>);

impl ServedFlows for Noted {
    fn claim(&mut self, flow: u64) {
        // Long enough to detect a worker that does not wait for the claims.
        std::thread::sleep(Duration::from_millis(20));
        self.0.send(flow).expect("the test listens");
    }

    fn renounce(&mut self, _: u64) {}
}

#[test]
fn a_drain_publishes_how_many_remain_once_all_flows_are_claimed() {
    let bench = Bench::new(sleeper(), 0);
    bench.left.store(3, Ordering::Relaxed);
    assert_eq!(bench.worker.left(), None);
    let (claims, claimed) = channel();
    bench.worker.drain(PATIENCE, Some(Box::new(Noted(claims)))).expect("room");
    let left = until(|| bench.worker.left());
    assert_eq!((left, claimed.try_recv()), (3, Ok(CLAIMED)), "no count is published before the claims");
    assert_eq!(bench.event(), Event::Drain(PATIENCE));
    bench.left.store(0, Ordering::Relaxed);
    until(|| bench.worker.left().filter(|left| *left == 0));
    bench.worker.resume().expect("room");
    until(|| bench.worker.left().is_none().then_some(()));
    bench.worker.spare_unknown(true).expect("room");
    assert_eq!([bench.event(), bench.event()], [Event::Resume, Event::Spare(true)]);
}

#[test]
fn orders_beyond_the_queue_are_refused_and_queued_ones_are_obeyed() {
    let (open, gate) = channel();
    let bench = Bench::with(sleeper(), 0, Some(gate), &[frame(1, 1)]);
    let mut told = 0;
    while bench.worker.spare_unknown(told % 2 == 0) == Ok(()) {
        told += 1;
        assert!(told <= 2 * ORDERS, "the queue has no end");
    }
    assert!(told >= ORDERS);
    assert_eq!(bench.worker.resume(), Err(ControlError::Full));
    drop(open);
    let spared = |event: &Event| matches!(event, Event::Spare(_));
    let obeyed: Vec<_> = std::iter::from_fn(|| Some(bench.event())).filter(spared).take(told).collect();
    assert_eq!(obeyed, (0..told).map(|n| Event::Spare(n % 2 == 0)).collect::<Vec<_>>());
}

/// Calls `look` until it returns a value.
fn until<T>(look: impl Fn() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "no value in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}
