//! On any network, every request gets its exact answer or ends cleanly, and only the network loses frames.
//!
//! A seed determines a network: its clients, the faults of their links, and their requests. `XDP_IMDS_SEED=N` repeats
//! the network of seed N.

use metadata_common::mac::Mac;
use metadata_common::stamp::slot_of;
use metadata_datapath::stack::{Service, Stack, StackConfig};
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher as _};
use std::time::Duration;
use support::pattern::{bytes, responses, stack};
use support::wire::{Client, Habits, Rng, Sent, at};
use support::{SEED, seed};

/// Number of networks to draw when no seed is given.
const SEEDS: u64 = 60;
const CLIENTS_MOST: u64 = 12;
const TALKS_MOST: u64 = 4;
/// Length of the longest answer, in bytes.
const ANSWER_MOST: u64 = 40_000;
/// Limit of a simulation.
///
/// Retransmissions back off up to a minute, and the connection of a silent guest is reset after two minutes.
const LIMIT: Duration = Duration::from_secs(1_200);
/// Time after which the stack has forgotten all connections.
const SETTLED: Duration = Duration::from_secs(1_000);
/// The status of the answer if a request did not arrive in time.
const TOO_SLOW: u16 = 408;
const MS: Duration = Duration::from_millis(1);

/// The requests of one client and the faults of its links.
struct Plan {
    habits: Habits,
    up: Vec<Fault>,
    down: Vec<Fault>,
    asked: Vec<usize>,
    /// Whether the link also corrupts frames to the stack. The answers are not checked in this case.
    corrupts_requests: bool,
}

fn faults(rng: &mut Rng) -> Vec<Fault> {
    let all = [
        Fault::Delay(MS * rng.below(60) as u32),
        Fault::Drop(rng.below(12)),
        Fault::Duplicate(rng.below(20)),
        Fault::Reorder(rng.below(25), MS * (1 + rng.below(30) as u32)),
        Fault::TailDrop { rate: 200_000 + rng.below(2_000_000), room: 4_000 + rng.below(60_000) as usize },
        Fault::Mtu(1_514 - rng.below(60) as usize),
    ];
    let mut chosen: Vec<Fault> = all.into_iter().filter(|_| rng.percent(50)).collect();
    // The order is random, because a queue drops other frames before a delay than after it.
    for at in (1..chosen.len()).rev() {
        chosen.swap(at, rng.below(at as u64 + 1) as usize);
    }
    chosen
}

fn plan(rng: &mut Rng) -> Plan {
    let (mut up, mut down) = (faults(rng), faults(rng));
    if rng.percent(40) {
        down.push(Fault::Corrupt(rng.below(10)));
    }
    let corrupts_requests = rng.percent(10);
    if corrupts_requests {
        up.push(Fault::Corrupt(5));
    }
    let window = [1_460, 4_096, 16_384, 65_535, 262_144][rng.below(5) as usize];
    let habits = Habits {
        mtu: [576, 1_280, 1_500][rng.below(3) as usize],
        window,
        write: [usize::MAX, usize::MAX, 7][rng.below(3) as usize],
        read: [usize::MAX, usize::MAX, 2_000][rng.below(3) as usize],
        read_pause: MS * rng.below(5) as u32,
    };
    let asked = (0..1 + rng.below(TALKS_MOST)).map(|_| rng.below(ANSWER_MOST) as usize).collect();
    Plan { habits, up, down, asked, corrupts_requests }
}

/// Simulates one network; returns its digest and its number of frames.
fn simulate(seed: u64) -> (u64, u64) {
    let mut rng = Rng::exactly(seed);
    let plans: Vec<Plan> = (0..1 + rng.below(CLIENTS_MOST)).map(|_| plan(&mut rng)).collect();
    let stations = (0..).zip(&plans).map(|(slot, plan)| {
        let mut client = Client::new(slot, plan.habits);
        for (port, asked) in (40_000..).zip(&plan.asked) {
            let request = format!("GET /bytes/{asked} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let talk = client.begin(port, request.as_bytes());
            client.close(talk);
        }
        Station { client, paths: [Path::new(&plan.up, &mut rng), Path::new(&plan.down, &mut rng)] }
    });
    let stations: Vec<Station> = stations.collect();
    let mut network = Network::new(stack(StackConfig::default()).0, stations);
    // A client has no timers. It waits for ever if the reset of the service was lost, and the network falls quiet.
    let over = network.run(LIMIT, |network| network.is_over() || network.is_quiet());
    network.assert_conserved();
    for (slot, (plan, station)) in plans.iter().zip(&network.stations).enumerate() {
        for (talk, asked) in plan.asked.iter().enumerate() {
            let received = &station.client.talks[talk].received;
            assert_exact_or_clean(&format!("client {slot}, {asked} bytes"), plan, *asked, received);
        }
    }
    assert!(over, "a client still waits after {LIMIT:?}");
    network.run(SETTLED, |_| false);
    network.assert_conserved();
    let stats = network.stack.stats();
    assert_eq!((stats.connections, stats.ports, stats.faults), (0, 0, 0), "{stats:?}");
    let up = network.stations.iter().map(|station| station.paths[0].counts().delivered).sum::<u64>();
    let down = network.stations.iter().map(|station| station.paths[1].counts().sent).sum::<u64>();
    assert_eq!((stats.received, stats.sent), (up, down), "the stack missed frames in its counts");
    (network.digest(), network.frames())
}

/// Asserts that `received` is the answer or the beginning of it.
fn assert_exact_or_clean(who: &str, plan: &Plan, asked: usize, received: &[u8]) {
    if plan.corrupts_requests {
        return;
    }
    let expected = bytes(asked);
    if let Some(answer) = responses(received, &[]).first() {
        if answer.status == TOO_SLOW {
            return;
        }
        assert_eq!(answer.status, 200, "{who}: {}", answer.head);
        assert!(answer.body == expected, "{who}: the body differs");
        return;
    }
    // A reset ended the connection early: the bytes received before must belong to the answer.
    if let Some(head) = received.windows(4).position(|four| four == b"\r\n\r\n") {
        let body = &received[head + 4..];
        assert!(expected.starts_with(body), "{who}: bytes that do not belong to the answer");
    }
}

/// Runs `check` on every seed, or only on the given seed. A failure names the command that repeats it.
fn for_each_seed(test: &str, check: impl Fn(u64) + std::panic::RefUnwindSafe) {
    let given = std::env::var(SEED).ok().map(|_| seed());
    let seeds = given.map_or(0..SEEDS, |seed| seed..seed + 1);
    for seed in seeds {
        let kept = std::panic::catch_unwind(|| check(seed));
        assert!(kept.is_ok(), "repeat with: {}={seed} cargo test -p xdp-imds-tests --test tcp {test}", SEED);
    }
}

#[test]
fn every_request_gets_its_exact_answer_or_ends_cleanly_on_any_network() {
    for_each_seed("every_request", |seed| {
        let (_, frames) = simulate(seed);
        assert!(frames > 10, "a network of {frames} frames is too small");
    });
}

#[test]
fn equal_seeds_give_equal_networks_frame_by_frame() {
    let mut digests = Vec::new();
    for seed in 0..6 {
        let once = simulate(seed);
        assert_eq!(once, simulate(seed), "seed {seed}");
        digests.push(once.0);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 6, "different seeds must give different networks");
}

/// Length of the answer in the table, in bytes.
const TABLE_BODY: usize = 200_000;
/// Number of networks of which each figure is the median.
const TABLE_SEEDS: u64 = 7;
const LOSSES: [u64; 4] = [0, 1, 5, 15];
const ROUND_TRIPS_MS: [u32; 3] = [1, 20, 100];

/// Goodput of one answer in KiB per second of virtual time, by loss in each direction and round trip.
///
/// The figures are the same on every machine. Adapt them after an intended change to how the stack sends answers.
const TABLE: &str = "\
loss     1 ms    20 ms   100 ms
 0 %    26041     1302      260
 1 %    20559     1027      205
 5 %      157      103       48
15 %       40       35       22";

fn goodput(loss: u64, round_trip_ms: u32) -> u64 {
    let one = |seed| {
        let mut rng = Rng::exactly(seed * 1_000 + loss);
        let faults = [Fault::Drop(loss), Fault::Delay(MS * round_trip_ms / 2)];
        let mut client = Client::new(0, Habits { window: 1 << 18, ..Habits::default() });
        let request = format!("GET /bytes/{TABLE_BODY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        client.begin(40_000, request.as_bytes());
        let paths = [Path::new(&faults, &mut rng), Path::new(&faults, &mut rng)];
        let mut network = Network::new(stack(StackConfig::default()).0, vec![Station { client, paths }]);
        let done = network.run(LIMIT, |network| network.stations[0].client.talks[0].ended);
        assert!(done, "loss {loss} %, round trip {round_trip_ms} ms");
        (TABLE_BODY as f64 / 1024.0 / network.now().as_secs_f64()) as u64
    };
    let mut all: Vec<u64> = (0..TABLE_SEEDS).map(one).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

#[test]
fn goodput_by_loss_and_round_trip_is_unchanged() {
    let mut table = String::from("loss");
    for round_trip in ROUND_TRIPS_MS {
        let _ = write!(table, " {:>8}", format!("{round_trip} ms"));
    }
    for loss in LOSSES {
        let _ = write!(table, "\n{loss:>2} %");
        for round_trip in ROUND_TRIPS_MS {
            let _ = write!(table, " {:>8}", goodput(loss, round_trip));
        }
    }
    assert!(table == TABLE, "the figures in KiB per second are now\n{table}\nand were\n{TABLE}");
}

// A network in memory: one stack, many clients, and two paths between the stack and each client. A path consists of
// nodes, each of which causes one kind of fault.
//
// ```text
//  client ── up: [Mtu] [Drop] [Delay] … ──▶ stack
//         ◀── down: [TailDrop] [Corrupt] … ──
// ```
//
// Time is virtual and every fault depends on one seed. The same seed gives the same frames at the same times;
// [`Network::digest`] shows that. A network checks its own balance: each frame that enters a path is delivered, lost
// by a node that counts it, or in transit.

/// Maximum number of turns at one virtual time. More turns mean an endless loop.
const TURNS_PER_INSTANT: usize = 10_000;
/// Bytes of an Ethernet header. Corruption does not change it: a frame that nobody receives tests nothing.
const ETHERNET: usize = 14;

/// A fault of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// Delays every frame by this time.
    Delay(Duration),
    /// Loses this percentage of frames.
    Drop(u64),
    /// Duplicates this percentage of frames.
    Duplicate(u64),
    /// Delays this percentage of frames by this additional time.
    Reorder(u64, Duration),
    /// Flips one bit in this percentage of frames.
    Corrupt(u64),
    /// Loses frames longer than this many bytes.
    Mtu(usize),
    /// Limits the rate. Loses frames that do not fit into the queue.
    TailDrop {
        /// Rate, in bytes per second.
        rate: u64,
        /// Size of the queue, in bytes.
        room: usize,
    },
}

/// A fault and its state.
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

/// Counters of a path or a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Frames that entered.
    pub sent: u64,
    /// Frames added by duplication.
    pub doubled: u64,
    /// Frames lost.
    pub lost: u64,
    /// Frames delivered.
    pub delivered: u64,
    /// Frames changed and delivered.
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

/// A sequence of nodes.
#[derive(Debug)]
pub(crate) struct Path {
    nodes: Vec<Node>,
    arrived: VecDeque<Vec<u8>>,
    counts: Counts,
}

impl Path {
    /// A path with these faults, in this order.
    #[must_use]
    pub(crate) fn new(faults: &[Fault], rng: &mut Rng) -> Self {
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

    /// Sends a frame along the path.
    pub(crate) fn push(&mut self, now: Duration, frame: Vec<u8>) {
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
    pub(crate) fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
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
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.nodes.iter().filter_map(|node| node.due.first_key_value()).map(|(key, _)| key.0).min()
    }

    /// The path's counters.
    #[must_use]
    pub(crate) fn counts(&self) -> Counts {
        self.nodes.iter().fold(self.counts, |sum, node| Counts {
            doubled: sum.doubled + node.counts.doubled,
            lost: sum.lost + node.counts.lost,
            corrupted: sum.corrupted + node.counts.corrupted,
            ..sum
        })
    }

    /// Number of frames in transit.
    #[must_use]
    pub(crate) fn under_way(&self) -> u64 {
        (self.nodes.iter().map(|node| node.due.len()).sum::<usize>() + self.arrived.len()) as u64
    }

    /// Asserts that the counters balance.
    ///
    /// # Panics
    /// When they do not.
    pub(crate) fn assert_conserved(&self) {
        let Counts { sent, doubled, lost, delivered, .. } = self.counts();
        assert_eq!(sent + doubled, lost + delivered + self.under_way(), "{:?}", self.counts());
    }
}

/// One client and its paths.
pub(crate) struct Station {
    /// The client.
    pub client: Client,
    /// The paths to the stack and back.
    pub paths: [Path; 2],
}

/// The stack and all clients.
pub(crate) struct Network<S: Service> {
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
    /// A network at time zero. A client's slot is its index in the list.
    #[must_use]
    pub(crate) fn new(stack: Stack<S>, stations: Vec<Station>) -> Self {
        for (slot, station) in (0..).zip(&stations) {
            assert_eq!(station.client.slot(), slot, "a client's slot is its index");
        }
        Self { stack, stations, now: Duration::ZERO, wake: None, digest: DefaultHasher::new(), frames: 0 }
    }

    /// The virtual time.
    #[must_use]
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// A digest of all frames at both ends of all paths, and of their times.
    #[must_use]
    pub(crate) fn digest(&self) -> u64 {
        self.digest.finish()
    }

    /// Number of frames at both ends of all paths.
    #[must_use]
    pub(crate) fn frames(&self) -> u64 {
        self.frames
    }

    /// Advances time until `done` returns true, by `limit` at most. Returns the last result of `done`.
    ///
    /// # Panics
    /// When frames circulate while the time stands still.
    pub(crate) fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
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
            assert!(turns < TURNS_PER_INSTANT, "no progress at {:?}", self.now);
        }
    }

    /// True if every connection is closed on both sides.
    #[must_use]
    pub(crate) fn is_over(&self) -> bool {
        let clients = self.stations.iter().map(|station| &station.client);
        clients.into_iter().all(|client| (0..client.talks.len()).all(|talk| client.is_over(talk)))
    }

    /// True if frames have moved and nothing else is due.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.frames > 0 && self.next_at().is_none()
    }

    fn next_at(&mut self) -> Option<Duration> {
        let now = self.now;
        let stations = self.stations.iter_mut().flat_map(|Station { client, paths: [up, down] }| {
            [up.next_at(), down.next_at(), client.wake_at(now)]
        });
        stations.chain([self.wake]).flatten().min()
    }

    /// Processes everything due at this time.
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

    /// Asserts the balance of every path.
    ///
    /// # Panics
    /// When a path's counters do not balance.
    pub(crate) fn assert_conserved(&self) {
        self.stations.iter().flat_map(|station| &station.paths).for_each(Path::assert_conserved);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;
    use support::wire::Rng;

    use super::{Fault, Path};

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
    fn each_fault_has_only_its_own_effect() {
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
            let changed = arrived.iter().filter(|(_, frame)| frame.iter().any(|byte| *byte != frame[0]));
            assert_eq!(changed.count() as u64, path.counts().corrupted);
            assert_eq!(path.counts().corrupted > 0, none > 0, "{fault:?}");
        }
    }

    #[test]
    fn delayed_frames_are_overtaken_and_delivered() {
        let (arrived, _) = carried(&[Fault::Reorder(20, MS * 10)], 100);
        let mut order: Vec<u8> = arrived.iter().map(|(_, frame)| frame[0]).collect();
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<u8>>());
    }

    #[test]
    fn a_narrow_link_passes_its_rate_and_loses_frames_beyond_its_queue() {
        // 100 bytes per millisecond enter a link that passes 50. Half of them are lost once 1,000 bytes wait.
        let (arrived, path) = carried(&[Fault::TailDrop { rate: 50_000, room: 1_000 }], 100);
        let Some((last, _)) = arrived.last() else { panic!("nothing arrived") };
        assert_eq!(*last, MS * 2 * arrived.len() as u32);
        assert!((50..65).contains(&arrived.len()), "{}", arrived.len());
        assert_eq!(path.counts().lost as usize, 100 - arrived.len());
    }
}
