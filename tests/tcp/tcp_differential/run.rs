//! Runs a script against a stack, with or without the kernel's answers in front of it.

use std::sync::Arc;
use std::time::Duration;

use metadata_datapath::stack::{AckLedger, Stack, StackConfig};
use metadata_serve::MetadataService;
use support::kernel::Kernel;
use support::pattern::Pattern;
use support::raw::{Reply, Segment};
use support::wire::{Link, Rng, Sent, at};

use super::guest::{Outcome, SLOT, Talk};
use super::script::{FIRST_PORT, KEY, Plan, Script};

/// Time for all connections of a script, including retransmissions.
const LIMIT: Duration = Duration::from_secs(300);
/// Time after which the stack has freed all state of a silent guest: it stops retransmitting and idle state expires.
const SETTLED: Duration = Duration::from_secs(300);
/// Maximum number of turns at one instant. More turns mean an endless loop.
const TURNS_PER_INSTANT: usize = 10_000;

pub(super) fn config() -> StackConfig {
    StackConfig { cookie_key: KEY, ..StackConfig::default() }
}

/// The outcome of every connection, by lane; `None` for the first one that did not end in time and all after it.
pub(super) type Outcomes = Vec<Vec<Option<Outcome>>>;

/// A port of the guest and its remaining connections.
struct Lane {
    number: usize,
    plans: std::vec::IntoIter<Plan>,
    talk: Option<Talk>,
    begins: Option<Duration>,
    next: Option<Plan>,
    outcomes: Vec<Option<Outcome>>,
}

impl Lane {
    fn port(&self) -> u16 {
        FIRST_PORT + self.number as u16
    }

    fn is_over(&self) -> bool {
        self.next.is_none() && self.outcomes.last().is_none_or(Option::is_some)
    }

    /// Records how the last connection ended, and begins the next one when it is due.
    fn step(&mut self, now: Duration, out: &mut Vec<Segment>) {
        if let Some(talk) = &mut self.talk {
            talk.step(now, out);
            if let Some(last) = self.outcomes.last_mut().filter(|last| last.is_none()) {
                *last = talk.outcome();
                if last.is_some() {
                    self.next = self.plans.next();
                    self.begins = self.next.as_ref().map(|plan| now + plan.pause());
                }
            }
        }
        if self.begins.is_some_and(|begins| begins <= now) {
            self.begins = None;
            if let Some(plan) = self.next.take() {
                let isn = plan.isn(self.number);
                let mut talk = Talk::begin(plan, self.port(), isn, now);
                talk.step(now, out);
                self.talk = Some(talk);
                self.outcomes.push(None);
            }
        }
    }

    fn wake_at(&self) -> Option<Duration> {
        let talk = self.talk.as_ref().and_then(Talk::wake_at);
        [talk, self.begins].into_iter().flatten().min()
    }
}

/// One guest, one stack, and the link between them.
pub(super) struct World<L: AckLedger> {
    stack: Stack<MetadataService<Pattern>, L>,
    pub(super) kernel: Option<Kernel>,
    lanes: Vec<Lane>,
    up: Link,
    down: Link,
    now: Duration,
}

impl<L: AckLedger> World<L> {
    pub(super) fn new(script: &Script, ledger: L, kernel: Option<Kernel>) -> Self {
        let service = MetadataService::new(Arc::new(Pattern::default()));
        let mut rng = Rng::exactly(script.seed);
        let lanes = script.lanes.iter().enumerate().map(|(number, plans)| {
            let mut plans = plans.clone().into_iter();
            let next = plans.next();
            let begins = Some(Duration::ZERO);
            Lane { number, plans, talk: None, begins, next, outcomes: Vec::new() }
        });
        Self {
            stack: Stack::with_ledger(config(), service, ledger),
            kernel,
            lanes: lanes.collect(),
            up: Link::new(script.faults, rng.fork()),
            down: Link::new(script.faults, rng.fork()),
            now: Duration::ZERO,
        }
    }

    /// Runs the script and waits until the stack has settled. Returns the outcomes and the connections still held.
    pub(super) fn run(&mut self) -> (Outcomes, u64) {
        self.until(LIMIT, |world| world.lanes.iter().all(Lane::is_over));
        let outcomes = self.lanes.iter().map(|lane| lane.outcomes.clone()).collect();
        self.until(self.now + SETTLED, |_| false);
        (outcomes, self.stack.stats().connections)
    }

    fn until(&mut self, end: Duration, done: impl Fn(&Self) -> bool) {
        let mut turns = 0;
        while !done(self) {
            let wake = self.turn();
            let lanes = self.lanes.iter().filter_map(Lane::wake_at);
            let next = lanes.chain(self.up.next_at()).chain(self.down.next_at()).chain(wake).min();
            match next.filter(|next| *next <= end) {
                Some(next) if next > self.now => (self.now, turns) = (next, 0),
                Some(_) => turns += 1,
                None => return self.now = end,
            }
            assert!(turns < TURNS_PER_INSTANT, "no progress at {:?}", self.now);
        }
    }

    /// Processes everything due at this instant. Returns when the stack must be called again.
    fn turn(&mut self) -> Option<Duration> {
        let mut said = Vec::new();
        while let Some(frame) = self.down.pop(self.now) {
            let reply = Reply::read(&frame);
            let lane = self.lanes.iter_mut().find(|lane| lane.port() == reply.ports.1);
            if let Some(talk) = lane.and_then(|lane| lane.talk.as_mut()) {
                talk.arrive(self.now, &reply, &mut said);
            }
        }
        self.lanes.iter_mut().for_each(|lane| lane.step(self.now, &mut said));
        said.iter().for_each(|segment| self.up.push(self.now, &segment.frame(SLOT)));
        let mut sent = Sent::default();
        while let Some(frame) = self.up.pop(self.now) {
            if !self.kernel.as_mut().is_some_and(|kernel| kernel.takes(SLOT, &frame, &mut sent)) {
                self.stack.receive(at(self.now), SLOT, &frame, &mut sent);
            }
        }
        let wake = self.stack.step(at(self.now), &mut sent);
        sent.0.iter().for_each(|frame| self.down.push(self.now, frame));
        wake
    }
}
