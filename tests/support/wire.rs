//! A simulated link with faults, and a world of one stack and one smoltcp client at its two ends.
//!
//! Time is virtual and every fault depends on a seed, so a failure can be repeated exactly.

use metadata_common::maps::Slot;
use metadata_common::time::Now;
use metadata_datapath::stack::{AckLedger, Long, NoLedger, Service, Stack, Transmit};
use std::collections::BTreeMap;
use std::time::Duration;

use crate::client::Client;
use crate::cut::cut;
use crate::kernel::Kernel;

/// Virtual unix time at the start of a world: 2026-01-01T00:00:00Z.
pub const EPOCH: u64 = 1_767_225_600;

/// Maximum number of turns at one virtual time. More turns mean an endless loop.
const TURNS_PER_INSTANT: usize = 10_000;

/// splitmix64, a small generator that suffices for faults.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed, or with that of `XDP_IMDS_SEED`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let set = std::env::var("XDP_IMDS_SEED").ok().and_then(|text| text.parse().ok());
        Self(set.unwrap_or(seed))
    }

    /// A generator with this seed, regardless of the environment.
    #[must_use]
    pub fn exactly(seed: u64) -> Self {
        Self(seed)
    }

    /// A separate generator, seeded by this one.
    pub fn fork(&mut self) -> Self {
        Self(self.draw())
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit
    }

    /// True with this probability, in percent.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

/// The faults of a link; probabilities in percent.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Loss.
    pub loss: u64,
    /// Duplication.
    pub duplicate: u64,
    /// Additional delay of up to 20 times `delay`, so that later frames overtake.
    pub reorder: u64,
    /// Delay in one direction.
    pub delay: Duration,
    /// Maximum length of a delivered frame, in bytes.
    pub longest: usize,
}

impl Faults {
    /// A perfect link with a delay of 100 µs in each direction.
    pub const NONE: Self =
        Self { loss: 0, duplicate: 0, reorder: 0, delay: Duration::from_micros(100), longest: usize::MAX };
}

/// One direction of a link.
#[derive(Debug)]
pub struct Link {
    faults: Faults,
    rng: Rng,
    due: BTreeMap<(Duration, u64), Vec<u8>>,
    count: u64,
}

impl Link {
    /// An empty link.
    #[must_use]
    pub fn new(faults: Faults, rng: Rng) -> Self {
        Self { faults, rng, due: BTreeMap::new(), count: 0 }
    }

    /// Sends a frame along the link.
    pub fn push(&mut self, now: Duration, frame: &[u8]) {
        if self.rng.percent(self.faults.loss) || frame.len() > self.faults.longest {
            return;
        }
        let copies = if self.rng.percent(self.faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let extra = if self.rng.percent(self.faults.reorder) { self.rng.below(20) as u32 } else { 0 };
            self.count += 1;
            self.due.insert((now + self.faults.delay * (1 + extra), self.count), frame.to_vec());
        }
    }

    /// The next frame that has arrived.
    pub fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
        let entry = self.due.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(entry.remove())
    }

    /// When the next frame arrives.
    #[must_use]
    pub fn next_at(&self) -> Option<Duration> {
        self.due.first_key_value().map(|(key, _)| key.0)
    }
}

/// Collects the frames that a stack sends.
#[derive(Debug, Default)]
pub struct Sent(pub Vec<Vec<u8>>);

impl Transmit for Sent {
    fn send(&mut self, frame: &[u8]) {
        self.0.push(frame.to_vec());
    }

    fn send_long(&mut self, frame: &Long<'_>) {
        self.0.extend(cut(frame));
    }
}

/// One stack, one client, the link between them, and virtual time.
pub struct World<S: Service, L = NoLedger> {
    /// The stack under test.
    pub stack: Stack<S, L>,
    /// Its guest.
    pub client: Client,
    /// Every frame that the stack has sent, including lost ones; `None` to keep none.
    pub sent: Option<Vec<Vec<u8>>>,
    /// A kernel that answers in front of the stack, if there is one.
    pub kernel: Option<Kernel>,
    slot: Slot,
    now: Duration,
    up: Link,
    down: Link,
    wake: Option<Duration>,
}

impl<S: Service, L: AckLedger> World<S, L> {
    /// A world at time zero.
    pub fn new(stack: Stack<S, L>, client: Client, faults: Faults, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let (up, down) = (Rng::new(rng.draw()), Rng::new(rng.draw()));
        Self {
            stack,
            slot: client.slot(),
            client,
            sent: None,
            kernel: None,
            now: Duration::ZERO,
            up: Link::new(faults, up),
            down: Link::new(faults, down),
            wake: None,
        }
    }

    /// The virtual time.
    pub fn now(&self) -> Now {
        at(self.now)
    }

    /// Advances time until `done` returns true, by `limit` at most. Returns the last result of `done`.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        let mut turns = 0;
        loop {
            if done(self) {
                return true;
            }
            self.turn();
            let next = [self.up.next_at(), self.down.next_at(), self.wake, self.client.wake_at(self.now)];
            match next.into_iter().flatten().min() {
                Some(next) if next > end => {
                    self.now = end;
                    return done(self);
                }
                Some(next) if next > self.now => {
                    self.now = next;
                    turns = 0;
                }
                Some(_) => {
                    turns += 1;
                    assert!(turns < TURNS_PER_INSTANT, "no progress at {:?}", self.now);
                }
                None => {
                    self.now = end;
                    return done(self);
                }
            }
        }
    }

    /// Advances time while the link to the client holds all frames, and delivers them afterwards.
    pub fn hold_down(&mut self, time: Duration) {
        let (now, end) = (self.now, self.now + time);
        let held =
            std::mem::replace(&mut self.down, Link::new(Faults { delay: time, ..Faults::NONE }, Rng::new(0)));
        self.wait(time);
        let mut late = std::mem::replace(&mut self.down, held);
        let mut frames = std::mem::take(&mut self.down.due);
        frames.extend(std::mem::take(&mut late.due));
        // The frames keep their order.
        let mut frames: Vec<_> = frames.into_iter().collect();
        frames.sort_by_key(|((due, count), _)| (*due >= now + time, *count));
        for (_, frame) in frames {
            self.down.count += 1;
            self.down.due.insert((end, self.down.count), frame);
        }
    }

    /// Advances time.
    pub fn wait(&mut self, time: Duration) {
        self.run(time, |_| false);
    }

    /// Processes everything due at this time.
    fn turn(&mut self) {
        let now = at(self.now);
        while let Some(frame) = self.down.pop(self.now) {
            self.client.deliver(frame);
        }
        for frame in self.client.poll(self.now) {
            self.up.push(self.now, &frame);
        }
        let mut sent = Sent::default();
        while let Some(frame) = self.up.pop(self.now) {
            if self.kernel.as_mut().is_some_and(|kernel| kernel.takes(self.slot, &frame, &mut sent)) {
                continue;
            }
            self.stack.receive(now, self.slot, &frame, &mut sent);
        }
        self.wake = self.stack.step(now, &mut sent);
        for frame in sent.0 {
            if let Some(kept) = &mut self.sent {
                kept.push(frame.clone());
            }
            self.down.push(self.now, &frame);
        }
    }
}

/// An instant of virtual time.
#[must_use]
pub fn at(mono: Duration) -> Now {
    Now { mono, unix_seconds: EPOCH + mono.as_secs() }
}
