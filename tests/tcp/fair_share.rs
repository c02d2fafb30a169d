//! VMs share a worker's time fairly: a modest VM is served fast while a hundred others request all they can.
//!
//! Time is virtual: each step costs the time that was once measured for it. Any machine can therefore overload the
//! worker, and a failure repeats exactly. Everything from the ring to the answers is production code.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metadata_common::maps::Slot;
use metadata_common::stamp::slot_of;
use metadata_common::time::Now;
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::link::{FrameSource, LinkReceiver};
use metadata_datapath::stack::{Stack, StackConfig, StackStats, Transmit};
use metadata_datapath::worker::{Engine, FairScheduler};
use metadata_user::service::MetadataService;
use support::pattern::{Pattern, stack};
use support::raw::Segment;
use support::wire::{Sent, at};

/// Delay from a guest to the ring, and from the tap to a guest.
const WAY: Duration = Duration::from_micros(10);
/// Delay until a sleeping worker runs. With the delays of both directions, a single request takes the measured 51 µs.
const WAKING: Duration = Duration::from_micros(30);
/// Cost of taking a frame from the ring and reading its slot.
const LOOK: Duration = Duration::from_nanos(60);
/// Cost of handling a frame.
const RECEIVE: Duration = Duration::from_nanos(350);
/// Cost of writing a frame to the hub's tap.
const SEND: Duration = Duration::from_nanos(500);
/// Frames the ring holds.
const RING: usize = 8_192;
/// A guest without an answer retransmits after this time.
const PATIENCE: Duration = Duration::from_millis(200);
/// Interval of junk frames; it equals the port's rate limit.
const JUNK_EVERY: Duration = Duration::from_micros(100);
/// Interval of the modest guest's requests.
const ASK_EVERY: Duration = Duration::from_micros(1_700);
/// Time before the measurement, in which greedy guests use up their initial burst.
const WARM_UP: Duration = Duration::from_millis(150);
const TIME: Duration = Duration::from_secs(1);

const MODEST: Slot = 0;
const PORT: u16 = 40_000;
/// Where a frame's TCP header starts.
const TCP: usize = 34;

/// Virtual time, shared by all parts of the simulation.
#[derive(Clone, Default)]
struct Clock(Arc<Mutex<Duration>>);

impl Clock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, time: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += time;
    }

    fn until(&self, moment: Duration) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now = moment.max(*now);
    }
}

/// The ring, and frames on their way to it.
struct Wire {
    ring: VecDeque<Vec<u8>>,
    coming: BTreeMap<(Duration, u64), Vec<u8>>,
    sent: u64,
    lost: u64,
}

impl Wire {
    fn push(&mut self, at: Duration, frame: Vec<u8>) {
        self.sent += 1;
        self.coming.insert((at + WAY, self.sent), frame);
    }

    /// Moves frames that have arrived by `now` into the ring, or counts them lost if it is full.
    fn arrive(&mut self, now: Duration) {
        while let Some(first) = self.coming.first_entry().filter(|first| first.key().0 <= now) {
            let frame = first.remove();
            if self.ring.len() < RING {
                self.ring.push_back(frame);
            } else {
                self.lost += 1;
            }
        }
    }
}

struct Source {
    wire: Rc<RefCell<Wire>>,
    clock: Clock,
    fd: UnixDatagram,
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl FrameSource for Source {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        for lent in 0..max {
            let mut wire = self.wire.borrow_mut();
            wire.arrive(self.clock.now());
            let Some(frame) = wire.ring.pop_front() else { return lent };
            drop(wire);
            self.clock.pass(LOOK);
            f(&[&frame]);
        }
        max
    }

    fn stats(&self) -> Option<SocketStats> {
        None
    }
}

/// The stack. Each frame that it receives costs virtual time.
struct Costly {
    stack: Stack<MetadataService<Pattern>>,
    clock: Clock,
}

impl Engine for Costly {
    type Stats = StackStats;

    fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        self.clock.pass(RECEIVE);
        Engine::receive(&mut self.stack, now, slot, frame, out);
    }

    fn next_pending_slot(&mut self) -> Option<Slot> {
        Engine::next_pending_slot(&mut self.stack)
    }

    fn go_on(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) -> bool {
        Engine::go_on(&mut self.stack, now, slot, out)
    }

    fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration> {
        Engine::step(&mut self.stack, now, out)
    }

    fn forget(&mut self, slot: Slot) {
        self.stack.forget(slot);
    }

    fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        Engine::wake(&mut self.stack, now, slot, out);
    }

    fn stats(&self) -> StackStats {
        self.stack.stats()
    }
}

/// Frames sent to guests, and when.
struct Tap {
    clock: Clock,
    sent: Vec<(Duration, Vec<u8>)>,
}

impl Transmit for Tap {
    fn send(&mut self, frame: &[u8]) {
        self.clock.pass(SEND);
        self.sent.push((self.clock.now(), frame.to_vec()));
    }
}

/// A guest with one connection that requests one document after another.
struct Asker {
    slot: Slot,
    get: Vec<u8>,
    seq: u32,
    ack: u32,
    /// When the outstanding request was sent.
    asked: Option<Duration>,
    received: usize,
    length: usize,
    unacknowledged: usize,
    /// Segments received twice.
    resent: u64,
    last_progress: Duration,
}

impl Asker {
    /// A guest that has completed the handshake.
    fn new(stack: &mut Stack<MetadataService<Pattern>>, slot: Slot, bytes: usize) -> Self {
        let mut sent = Sent::default();
        stack.receive(at(Duration::ZERO), slot, &Segment::syn(PORT, 1_000).frame(slot), &mut sent);
        let answer = sent.0.first().expect("an answer to a SYN");
        let ack = u32::from_be_bytes(*answer[TCP + 4..].first_chunk().expect("a number")).wrapping_add(1);
        Self {
            slot,
            get: format!("GET /bytes/{bytes} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes(),
            seq: 1_001,
            ack,
            asked: None,
            received: 0,
            length: bytes,
            unacknowledged: 0,
            resent: 0,
            last_progress: Duration::ZERO,
        }
    }

    fn ask(&mut self, now: Duration) -> Vec<u8> {
        let frame = Segment::ack(PORT, self.seq, self.ack).with(&self.get).frame(self.slot);
        self.seq = self.seq.wrapping_add(self.get.len() as u32);
        (self.asked, self.received, self.unacknowledged, self.last_progress) = (Some(now), 0, 0, now);
        frame
    }

    fn acknowledge(&mut self) -> Vec<u8> {
        self.unacknowledged = 0;
        Segment::ack(PORT, self.seq, self.ack).frame(self.slot)
    }

    /// Handles a frame; returns the guest's reply, and the duration once the answer is complete.
    fn on_frame(&mut self, now: Duration, frame: &[u8]) -> (Option<Vec<u8>>, Option<Duration>) {
        let payload = frame.len() - TCP - usize::from(frame[TCP + 12] >> 4) * 4;
        let seq = u32::from_be_bytes(*frame[TCP + 4..].first_chunk().expect("a number"));
        if payload == 0 {
            return (None, None);
        }
        if seq != self.ack {
            self.resent += 1;
            return (Some(self.acknowledge()), None);
        }
        self.last_progress = now;
        self.ack = self.ack.wrapping_add(payload as u32);
        self.received += payload;
        self.unacknowledged += 1;
        let push = frame[TCP + 13] & 8 != 0;
        if self.received >= self.length && push {
            let took = self.asked.take().map(|asked| now - asked);
            return (Some(self.acknowledge()), took);
        }
        ((self.unacknowledged >= 2).then(|| self.acknowledge()), None)
    }

    /// Returns a retransmission if the guest has received nothing for [`PATIENCE`].
    fn retransmit(&mut self, now: Duration) -> Option<Vec<u8>> {
        if self.asked.is_none() || now < self.last_progress + PATIENCE {
            return None;
        }
        self.last_progress = now;
        if self.received > 0 {
            return Some(self.acknowledge());
        }
        let start = self.seq.wrapping_sub(self.get.len() as u32);
        Some(Segment::ack(PORT, start, self.ack).with(&self.get).frame(self.slot))
    }
}

/// The times of the modest guest's requests, and the load from the others.
#[derive(Debug)]
struct Outcome {
    asked: usize,
    took: Vec<Duration>,
    lost: u64,
    greedy: u64,
    /// Segments that greedy guests received twice.
    resent: u64,
}

impl Outcome {
    fn percentile(&self, part: usize) -> Duration {
        let mut sorted = self.took.clone();
        sorted.sort();
        sorted[(sorted.len() * part / 100).min(sorted.len() - 1)]
    }
}

/// Runs the modest guest beside `fetchers` guests that fetch 1 MiB repeatedly and `junkers` that send junk.
fn run(fetchers: u32, junkers: u32) -> Outcome {
    let clock = Clock::default();
    let wire = Wire { ring: VecDeque::new(), coming: BTreeMap::new(), sent: 0, lost: 0 };
    let wire = Rc::new(RefCell::new(wire));
    let (mut stack, _) = stack(StackConfig::default());
    let mut guests: BTreeMap<Slot, Asker> = BTreeMap::new();
    guests.insert(MODEST, Asker::new(&mut stack, MODEST, 300));
    for slot in 1..=fetchers {
        guests.insert(slot, Asker::new(&mut stack, slot, 1 << 20));
    }
    let junk: Vec<_> = (fetchers + 1..=fetchers + junkers)
        .map(|slot| Segment::ack(PORT, 77, 99).with(b"junk").frame(slot))
        .collect();
    let fd = UnixDatagram::unbound().expect("a socket");
    let mut link = LinkReceiver::new(Source { wire: Rc::clone(&wire), clock: clock.clone(), fd });
    let mut engine = Costly { stack, clock: clock.clone() };
    let mut tap = Tap { clock: clock.clone(), sent: Vec::new() };
    let mut fair = FairScheduler::default();
    let mut outcome = Outcome { asked: 0, took: Vec::new(), lost: 0, greedy: 0, resent: 0 };
    for guest in guests.values_mut().filter(|guest| guest.slot != MODEST) {
        wire.borrow_mut().push(Duration::ZERO, guest.ask(Duration::ZERO));
    }
    let (mut next_ask, mut next_check, mut next_junk) = (WARM_UP, PATIENCE, vec![]);
    next_junk.extend((0..junkers).map(|n| JUNK_EVERY * n / junkers.max(1)));
    while clock.now() < WARM_UP + TIME {
        let now = clock.now();
        for (next, frame) in next_junk.iter_mut().zip(&junk) {
            while *next <= now {
                wire.borrow_mut().push(*next, frame.clone());
                *next += JUNK_EVERY;
            }
        }
        let modest = guests.get_mut(&MODEST).expect("the modest guest");
        if next_ask <= now && modest.asked.is_none() {
            wire.borrow_mut().push(next_ask, modest.ask(next_ask));
            (next_ask, outcome.asked) = (next_ask + ASK_EVERY, outcome.asked + 1);
        }
        if next_check <= now {
            next_check += PATIENCE / 10;
            let again = guests.values_mut().filter_map(|guest| guest.retransmit(now));
            again.for_each(|frame| wire.borrow_mut().push(now, frame));
        }
        let turned = fair.turn(at(now), &mut link, &mut engine, &mut tap);
        for (left, frame) in tap.sent.drain(..) {
            let to =
                slot_of(metadata_common::mac::Mac(*frame.first_chunk().expect("a MAC"))).expect("a stamp");
            let Some(guest) = guests.get_mut(&to) else { continue };
            let (reply, took) = guest.on_frame(left + WAY, &frame);
            reply.into_iter().for_each(|frame| wire.borrow_mut().push(left + WAY, frame));
            match took {
                Some(took) if to == MODEST => outcome.took.push(took),
                Some(_) => {
                    outcome.greedy += 1;
                    wire.borrow_mut().push(left + WAY, guest.ask(left + WAY));
                }
                None => {}
            }
        }
        if !turned.more && turned.received == 0 {
            let coming = wire.borrow().coming.first_key_value().map(|(key, _)| key.0 + WAKING);
            let junk = next_junk.iter().min().copied();
            let events = [coming, junk, turned.due, Some(next_ask), Some(next_check)];
            clock.until(events.into_iter().flatten().min().unwrap_or(now).max(now + LOOK));
        }
    }
    outcome.lost = wire.borrow().lost;
    outcome.resent = guests.values().map(|guest| guest.resent).sum();
    outcome
}

#[test]
fn a_modest_guest_beside_a_hundred_greedy_ones_takes_less_than_triple_its_time() {
    let alone = run(0, 0).percentile(99);
    for (fetchers, junkers) in [(100, 0), (0, 100), (50, 50), (22, 140)] {
        let outcome = run(fetchers, junkers);
        let (half, most) = (outcome.percentile(50), outcome.percentile(99));
        eprintln!(
            "{fetchers} fetch, {junkers} send junk: p50 {half:?}, p99 {most:?} (alone {alone:?}), {} of {} answered, \
             {} frames lost, {} MiB fetched",
            outcome.took.len(),
            outcome.asked,
            outcome.lost,
            outcome.greedy
        );
        assert!(outcome.asked > 300 && outcome.took.len() + 1 >= outcome.asked, "{outcome:?}");
        assert!(most < alone * 3, "{fetchers} fetch, {junkers} send junk: {most:?}, alone {alone:?}");
    }
}

#[test]
fn segments_are_rarely_resent_to_greedy_guests_whose_acknowledgements_wait() {
    /// At most one segment in this many may be resent, because acknowledgements beyond a VM's queue are dropped.
    const SEGMENTS: u64 = 100_000;
    for fetchers in [50, 200] {
        let Outcome { greedy, resent, .. } = run(fetchers, 0);
        let sent = greedy * (1 << 20) / 1_460;
        assert!(greedy > 100 && resent * SEGMENTS < sent, "{fetchers}: {resent} of {sent}");
    }
}
