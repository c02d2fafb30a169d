//! A network in memory: one stack, many clients, and between each of them and it two paths of nodes, each of
//! which does one bad thing to frames.
//!
//! ```text
//!  client ── up: [Mtu] [Drop] [Delay] … ──▶ stack
//!         ◀── down: [TailDrop] [Corrupt] … ──
//! ```
//!
//! Time is virtual and every fault is drawn from one seed, so the same seed gives the same frames at the same
//! times, which [`Network::digest`] tells. A network holds its own law: what goes into a path is delivered, lost
//! by a node that counts it, or still under way.

use metadata_common::mac::Mac;
use metadata_common::stamp::slot_of;
use metadata_datapath::stack::{Service, Stack};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hasher as _};
use std::time::Duration;

use crate::client::Client;
use crate::wire::{Rng, Sent, at};

/// Turns a network may take without virtual time moving: beyond it something spins.
const TURNS_PER_INSTANT: usize = 10_000;
/// Octets of an Ethernet header, which corruption spares: a tap has no noise, and a frame for nobody says nothing.
const ETHERNET: usize = 14;

/// One thing that happens to frames on their way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// All take this long.
    Delay(Duration),
    /// So many in a hundred are lost.
    Drop(u64),
    /// So many in a hundred come twice.
    Duplicate(u64),
    /// So many in a hundred come this much later than the others.
    Reorder(u64, Duration),
    /// So many in a hundred have one bit turned.
    Corrupt(u64),
    /// Longer ones are lost.
    Mtu(usize),
    /// So many octets a second pass; what more than so many octets would wait for is lost.
    TailDrop {
        /// Octets a second.
        rate: u64,
        /// Octets that may wait.
        room: usize,
    },
}

/// A fault at work.
#[derive(Debug)]
struct Node {
    fault: Fault,
    rng: Rng,
    due: BTreeMap<(Duration, u64), Vec<u8>>,
    count: u64,
    waiting: usize,
    free_at: Duration,
    counts: Counts,
}

/// What became of frames on a path, or at one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Put on it.
    pub sent: u64,
    /// Made of others.
    pub doubled: u64,
    /// Gone.
    pub lost: u64,
    /// Arrived at the other end.
    pub delivered: u64,
    /// Changed, and delivered all the same.
    pub corrupted: u64,
}

impl Node {
    fn push(&mut self, now: Duration, mut frame: Vec<u8>) {
        let mut due = now;
        let mut copies = 1;
        match self.fault {
            Fault::Delay(time) => due += time,
            Fault::Drop(chance) if self.rng.percent(chance) => copies = 0,
            Fault::Duplicate(chance) if self.rng.percent(chance) => copies = 2,
            Fault::Reorder(chance, time) if self.rng.percent(chance) => due += time,
            Fault::Corrupt(chance) if frame.len() > ETHERNET && self.rng.percent(chance) => {
                let bit = self.rng.below(8 * (frame.len() - ETHERNET) as u64) as usize;
                frame[ETHERNET + bit / 8] ^= 1 << (bit % 8);
                self.counts.corrupted += 1;
            }
            Fault::Mtu(longest) if frame.len() > longest => copies = 0,
            Fault::TailDrop { room, .. } if self.waiting + frame.len() > room => copies = 0,
            Fault::TailDrop { rate, .. } => {
                self.waiting += frame.len();
                let takes = Duration::from_nanos(frame.len() as u64 * 1_000_000_000 / rate.max(1));
                self.free_at = self.free_at.max(now) + takes;
                due = self.free_at;
            }
            _ => {}
        }
        match copies {
            0 => self.counts.lost += 1,
            2 => self.counts.doubled += 1,
            _ => {}
        }
        for _ in 0..copies {
            self.count += 1;
            self.due.insert((due, self.count), frame.clone());
        }
    }

    fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
        let entry = self.due.first_entry().filter(|entry| entry.key().0 <= now)?;
        let frame = entry.remove();
        if let Fault::TailDrop { .. } = self.fault {
            self.waiting -= frame.len();
        }
        Some(frame)
    }
}

/// Nodes one after the other.
#[derive(Debug)]
pub struct Path {
    nodes: Vec<Node>,
    arrived: VecDeque<Vec<u8>>,
    counts: Counts,
}

impl Path {
    /// A path with these faults, first met first.
    #[must_use]
    pub fn new(faults: &[Fault], rng: &mut Rng) -> Self {
        let node = |fault: &Fault| Node {
            fault: *fault,
            rng: rng.fork(),
            due: BTreeMap::new(),
            count: 0,
            waiting: 0,
            free_at: Duration::ZERO,
            counts: Counts::default(),
        };
        Self { nodes: faults.iter().map(node).collect(), arrived: VecDeque::new(), counts: Counts::default() }
    }

    /// Puts a frame on it.
    pub fn push(&mut self, now: Duration, frame: Vec<u8>) {
        self.counts.sent += 1;
        self.pass(0, now, frame);
    }

    fn pass(&mut self, to: usize, now: Duration, frame: Vec<u8>) {
        match self.nodes.get_mut(to) {
            Some(node) => node.push(now, frame),
            None => self.arrived.push_back(frame),
        }
    }

    /// The next frame that has arrived.
    pub fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
        for at in 0..self.nodes.len() {
            while let Some(frame) = self.nodes[at].pop(now) {
                self.pass(at + 1, now, frame);
            }
        }
        let frame = self.arrived.pop_front()?;
        self.counts.delivered += 1;
        Some(frame)
    }

    /// When the next frame moves.
    #[must_use]
    pub fn next_at(&self) -> Option<Duration> {
        self.nodes.iter().filter_map(|node| node.due.first_key_value()).map(|(key, _)| key.0).min()
    }

    /// What became of its frames.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.nodes.iter().fold(self.counts, |sum, node| Counts {
            doubled: sum.doubled + node.counts.doubled,
            lost: sum.lost + node.counts.lost,
            corrupted: sum.corrupted + node.counts.corrupted,
            ..sum
        })
    }

    /// Frames under way.
    #[must_use]
    pub fn under_way(&self) -> u64 {
        (self.nodes.iter().map(|node| node.due.len()).sum::<usize>() + self.arrived.len()) as u64
    }

    /// Asserts that no frame came from nowhere or went there.
    ///
    /// # Panics
    /// When one did.
    pub fn assert_conserved(&self) {
        let Counts { sent, doubled, lost, delivered, .. } = self.counts();
        assert_eq!(sent + doubled, lost + delivered + self.under_way(), "{:?}", self.counts());
    }
}

/// One client and its paths.
pub struct Station {
    /// The client.
    pub client: Client,
    /// From it to the stack, and back.
    pub paths: [Path; 2],
}

/// Everybody.
pub struct Network<S: Service> {
    /// The stack under test.
    pub stack: Stack<S>,
    /// The clients, by slot.
    pub stations: Vec<Station>,
    now: Duration,
    wake: Option<Duration>,
    digest: DefaultHasher,
    frames: u64,
}

impl<S: Service> Network<S> {
    /// A network at time zero. The clients' slots are their places in the list.
    #[must_use]
    pub fn new(stack: Stack<S>, stations: Vec<Station>) -> Self {
        for (slot, station) in (0..).zip(&stations) {
            assert_eq!(station.client.slot(), slot, "a client is known by its place");
        }
        Self { stack, stations, now: Duration::ZERO, wake: None, digest: DefaultHasher::new(), frames: 0 }
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    /// A number that differs if any frame at either end of any path did, or came at another time.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest.finish()
    }

    /// Frames at either end of all paths.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Lets time pass until `done`, for `limit` at most. True when it was done.
    ///
    /// # Panics
    /// When frames go round without time passing.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        let mut turns = 0;
        loop {
            if done(self) {
                return true;
            }
            self.turn();
            let next = self.next_at().map_or(end, |next| next.min(end));
            if next > self.now {
                (self.now, turns) = (next, 0);
            } else if self.now == end {
                return done(self);
            }
            turns += 1;
            assert!(turns < TURNS_PER_INSTANT, "nothing gets on at {:?}", self.now);
        }
    }

    /// Whether every conversation is closed on both sides.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let clients = self.stations.iter().map(|station| &station.client);
        clients.into_iter().all(|client| (0..client.talks.len()).all(|talk| client.is_over(talk)))
    }

    /// Whether nothing will ever happen any more, and something has.
    pub fn is_quiet(&mut self) -> bool {
        self.frames > 0 && self.next_at().is_none()
    }

    fn next_at(&mut self) -> Option<Duration> {
        let now = self.now;
        let stations = self.stations.iter_mut().flat_map(|Station { client, paths: [up, down] }| {
            [up.next_at(), down.next_at(), client.wake_at(now)]
        });
        stations.chain([self.wake]).flatten().min()
    }

    /// Everything that happens at this instant.
    fn turn(&mut self) {
        let Self { stack, stations, now, wake, digest, frames } = self;
        let mut note = |what: u8, slot: u32, frame: &[u8]| {
            *frames += 1;
            digest.write_u128(now.as_nanos());
            digest.write_u8(what);
            digest.write_u32(slot);
            digest.write(frame);
        };
        let mut sent = Sent::default();
        for (slot, Station { client, paths: [up, down] }) in (0..).zip(stations.iter_mut()) {
            while let Some(frame) = down.pop(*now) {
                note(0, slot, &frame);
                client.deliver(frame);
            }
            for frame in client.poll(*now) {
                note(1, slot, &frame);
                up.push(*now, frame);
            }
            while let Some(frame) = up.pop(*now) {
                note(2, slot, &frame);
                stack.receive(at(*now), slot, &frame, &mut sent);
            }
        }
        *wake = stack.step(at(*now), &mut sent);
        for frame in sent.0 {
            let to = Mac(frame[..6].try_into().expect("a whole header"));
            let slot = slot_of(to).expect("a stamp");
            note(3, slot, &frame);
            stations[slot as usize].paths[1].push(*now, frame);
        }
    }

    /// Asserts the law on every path.
    ///
    /// # Panics
    /// When it is broken.
    pub fn assert_conserved(&self) {
        self.stations.iter().flat_map(|station| &station.paths).for_each(Path::assert_conserved);
    }
}

#[cfg(test)]
mod tests {
    use super::{Fault, Path};
    use crate::wire::Rng;
    use std::time::Duration;

    const MS: Duration = Duration::from_millis(1);

    fn carried(faults: &[Fault], frames: usize) -> (Vec<(Duration, Vec<u8>)>, Path) {
        let mut path = Path::new(faults, &mut Rng::new(7));
        let mut arrived = Vec::new();
        let mut now = Duration::ZERO;
        let mut coming = (0..frames).map(|n| (MS * n as u32, vec![n as u8; 100])).peekable();
        loop {
            while let Some((_, frame)) = coming.next_if(|(at, _)| *at <= now) {
                path.push(now, frame);
            }
            while let Some(frame) = path.pop(now) {
                arrived.push((now, frame));
            }
            path.assert_conserved();
            match path.next_at().into_iter().chain(coming.peek().map(|(at, _)| *at)).min() {
                Some(next) => now = next,
                None => return (arrived, path),
            }
        }
    }

    #[test]
    fn each_fault_does_what_it_says_and_nothing_else() {
        let (all, _) = carried(&[], 100);
        assert_eq!(all.len(), 100);
        let (late, _) = carried(&[Fault::Delay(MS * 5), Fault::Delay(MS * 2)], 100);
        let expected: Vec<_> = (0..100).map(|n| (MS * (n + 7), vec![n as u8; 100])).collect();
        assert_eq!(late, expected);
        for (fault, some, none) in [
            (Fault::Drop(30), 50..90, 0),
            (Fault::Duplicate(30), 110..150, 0),
            (Fault::Mtu(99), 0..1, 0),
            (Fault::Mtu(100), 100..101, 0),
            (Fault::Drop(0), 100..101, 0),
            (Fault::Corrupt(30), 100..101, 1),
        ] {
            let (arrived, path) = carried(&[fault], 100);
            assert!(some.contains(&arrived.len()), "{fault:?}: {}", arrived.len());
            let changed = arrived.iter().filter(|(_, frame)| frame.iter().any(|octet| *octet != frame[0]));
            assert_eq!(changed.count() as u64, path.counts().corrupted);
            assert_eq!(path.counts().corrupted > 0, none > 0, "{fault:?}");
        }
    }

    #[test]
    fn frames_held_back_are_overtaken_and_come_all_the_same() {
        let (arrived, _) = carried(&[Fault::Reorder(20, MS * 10)], 100);
        let mut order: Vec<u8> = arrived.iter().map(|(_, frame)| frame[0]).collect();
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<u8>>());
    }

    #[test]
    fn a_narrow_link_passes_its_rate_and_loses_what_has_no_room() {
        // 100 octets each millisecond into a link that takes 50: half is lost once 1,000 wait.
        let (arrived, path) = carried(&[Fault::TailDrop { rate: 50_000, room: 1_000 }], 100);
        let Some((last, _)) = arrived.last() else { panic!("nothing arrived") };
        assert_eq!(*last, MS * 2 * arrived.len() as u32);
        assert!((50..65).contains(&arrived.len()), "{}", arrived.len());
        assert_eq!(path.counts().lost as usize, 100 - arrived.len());
    }
}
