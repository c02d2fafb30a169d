//! Roaming guests. Their taps and records change all the time, and after each change the answers must be those of the
//! current record.

use super::script::{self, Place};
use super::shared::{Shared, add};
use super::steady::is_about_bytes;
use crate::storm::crawl::Dialect;
use crate::storm::guest::{Arrival, Failure, Orders, Plan, Pump};
use anyhow::{Context as _, Result, bail};
use std::path::Path;
use std::time::{Duration, Instant};
use support::netns::Namespace;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

/// The longest time until a guest is served after a change, without restarts of the agent. It covers inotify, netlink
/// and the guest's own retransmissions of ARP (five, a second apart) on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two crawls of a guest that is not served yet.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest time until the name of a deleted tap is free. A program that is just being started may hold a copy of
/// the tap's descriptor.
const NAME_PATIENCE: Duration = Duration::from_secs(5);
/// MTUs that a tap may get. None is smaller than the MSS that the guest announces.
const MTUS: [u16; 4] = [1_500, 1_600, 3_000, 9_000];

/// A change to one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Delete its tap and make it again under the same name.
    Recreate,
    /// Delete its tap and make it again under another name.
    Rename,
    /// Move its tap to the other namespace.
    Move,
    /// Change the MTU of its tap.
    Mtu,
    /// Take its tap down for a moment.
    Down,
    /// Change the content of its record.
    Update,
    /// Remove its record, and write another one a moment later.
    Replace,
    /// Write an invalid record, and a valid one a moment later.
    Spoil,
}

const CHANGES: [Change; 8] = [
    Change::Recreate,
    Change::Rename,
    Change::Move,
    Change::Mtu,
    Change::Down,
    Change::Update,
    Change::Replace,
    Change::Spoil,
];

/// Texts that are not valid records.
const SPOILT: [&str; 4] =
    ["", "schema: vmrecord/1\n", "{\"schema\": \"vmrecord/1\", \"vm\": [", "\u{0}\u{1}\u{2}"];

/// The two namespaces that taps may be in, and the directories of a soak.
pub(super) struct Places<'a> {
    /// The agent's namespace.
    pub(super) node: &'a Namespace,
    /// The other namespace.
    pub(super) side: &'a Namespace,
    /// The directory of records.
    pub(super) records: &'a Path,
    /// A directory for temporary files.
    pub(super) scratch: &'a Path,
}

/// A roaming guest, its tap and its record.
pub(super) struct Roamer {
    identity: Identity,
    tap: Option<Tap>,
    place: Place,
    generation: u64,
    renamed: u64,
}

impl Roamer {
    /// Makes a guest with a tap in the agent's namespace and a record.
    pub(super) fn new(places: &Places<'_>, identity: Identity) -> Result<Self> {
        let place = Place { ifname: format!("roam{}", identity.number), netns: None };
        let mut roamer = Self { identity, tap: None, place, generation: 1, renamed: 0 };
        roamer.make_tap(places)?;
        roamer.write(places)?;
        Ok(roamer)
    }

    fn write(&self, places: &Places<'_>) -> Result<()> {
        script::write(places.records, &self.identity, self.generation, &self.place)
    }

    fn ns<'a>(&self, places: &Places<'a>) -> &'a Namespace {
        if self.place.netns.is_some() { places.side } else { places.node }
    }

    fn make_tap(&mut self, places: &Places<'_>) -> Result<()> {
        let (ns, name) = (self.ns(places), &self.place.ifname);
        let tap = support::eventually::eventually(NAME_PATIENCE, || Tap::create(ns, name, Shape::default()))?;
        ns.ip(&format!("link set {name} up"))?;
        self.tap = Some(tap);
        Ok(())
    }

    fn change(&mut self, places: &Places<'_>, change: Change, random: &mut fastrand::Rng) -> Result<()> {
        let name = self.place.ifname.clone();
        match change {
            Change::Recreate => {
                self.tap = None;
                self.make_tap(places)
            }
            Change::Rename => {
                self.tap = None;
                self.renamed += 1;
                self.place.ifname = format!("roam{}-{}", self.identity.number, self.renamed % 1_000);
                self.make_tap(places)?;
                self.write(places)
            }
            Change::Move => {
                let (from, to) = match self.place.netns.take() {
                    None => {
                        self.place.netns = Some(places.side.name().to_owned());
                        (places.node, places.side)
                    }
                    Some(_) => (places.side, places.node),
                };
                from.ip(&format!("link set {name} netns {}", to.name()))?;
                to.ip(&format!("link set {name} up"))?;
                self.write(places)
            }
            Change::Mtu => {
                let mtu = MTUS[random.usize(..MTUS.len())];
                self.ns(places).ip(&format!("link set {name} mtu {mtu}")).map(drop)
            }
            Change::Down => {
                let ns = self.ns(places);
                ns.ip(&format!("link set {name} down"))?;
                std::thread::sleep(Duration::from_millis(random.u64(..50)));
                ns.ip(&format!("link set {name} up")).map(drop)
            }
            Change::Update => {
                self.generation += 1;
                self.write(places)
            }
            Change::Replace => {
                std::fs::remove_file(self.identity.path(places.records))
                    .context("cannot remove its record")?;
                std::thread::sleep(Duration::from_millis(random.u64(..300)));
                self.generation += 1;
                self.write(places)
            }
            Change::Spoil => {
                let text = SPOILT[random.usize(..SPOILT.len())];
                replace(&self.identity.path(places.records), text)?;
                std::thread::sleep(Duration::from_millis(random.u64(..300)));
                self.generation += 1;
                self.write(places)
            }
        }
    }

    /// Crawls until the answers match the record.
    fn verify(
        &self,
        shared: &Shared,
        places: &Places<'_>,
        before: Option<&Plan>,
        now: &Plan,
        after: Change,
    ) -> Result<()> {
        let tap = self.tap.as_ref().context("the roaming guest has no tap")?;
        let mut pump = Pump::new(std::slice::from_ref(tap))?;
        let mut began = Instant::now();
        // Consecutive crawls whose bytes match neither the current record nor the former one.
        let mut mismatches = 0;
        while !shared.is_over() {
            let mark = shared.mark();
            let failures = crawled(&mut pump, now, self.generation)?;
            if failures.is_empty() {
                add(&shared.counts.verified, 1);
                return Ok(());
            }
            add(&shared.counts.early, 1);
            if !shared.was_undisturbed_since(mark) {
                began = Instant::now();
            }
            let bytes = failures.iter().any(|failure| is_about_bytes(*failure));
            let former = match before {
                Some(plan) if bytes => crawled(&mut pump, plan, self.generation)?.is_empty(),
                _ => false,
            };
            // One such crawl can happen between two records: its first request may be answered from the former one.
            mismatches = if bytes && !former { mismatches + 1 } else { 0 };
            if mismatches > 2 {
                shared.breach(format!(
                    "{} got bytes that match neither its record nor its former one after {after:?}",
                    self.identity.hostname
                ));
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                let place = &self.place;
                let link = self.ns(places).ip(&format!("-d link show {}", place.ifname));
                shared.breach(format!(
                    "{} at {place:?} is still not served {PATIENCE:?} after {after:?}: {failures:?}; {link:?}",
                    self.identity.hostname
                ));
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn plan(&self, places: &Places<'_>, file: &str) -> Result<Plan> {
        let bodies = places.scratch.join(file);
        script::plan(places.records, &bodies, Dialect::Nocloud, std::slice::from_ref(&self.identity))
    }
}

/// Crawls once and returns the failures of its requests.
fn crawled(pump: &mut Pump<'_>, plan: &Plan, seed: u64) -> Result<Vec<Failure>> {
    pump.load(plan.clone())?;
    let orders = Orders {
        guests: 1,
        arrival: Arrival::AtOnce,
        seconds: 0.0,
        keep_alive: false,
        retries: 0,
        loss: 0.0,
        slow: 0,
        flood: None,
        stall: 0.0,
        to_the_end: false,
        any_bytes: false,
        seed: seed ^ fastrand::u64(..),
    };
    let (tally, _) = pump.storm(&orders, &mut |_, _| {})?;
    if tally.failed == 0 && tally.requests == 0 {
        bail!("the crawl made no request");
    }
    Ok(if tally.failed == 0 { Vec::new() } else { tally.reasons.into_keys().collect() })
}

/// Changes a random guest at a time until the soak is over.
pub(super) fn roam(
    shared: &Shared,
    places: &Places<'_>,
    roamers: &mut [Roamer],
    pause: Duration,
    seed: u64,
) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    while !shared.is_over() {
        let busy = shared.busy();
        let roamer = &mut roamers[random.usize(..roamers.len())];
        let change = CHANGES[random.usize(..CHANGES.len())];
        let before = roamer.plan(places, "roaming-before")?;
        roamer
            .change(places, change, &mut random)
            .with_context(|| format!("{change:?} of {} at {:?}", roamer.identity.hostname, roamer.place))?;
        add(&shared.counts.changes, 1);
        let now = roamer.plan(places, "roaming-now")?;
        roamer.verify(shared, places, Some(&before), &now, change)?;
        drop(busy);
        shared.sleep(pause);
    }
    Ok(())
}
