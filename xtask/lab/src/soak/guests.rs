//! The guests of a soak: roaming, steady and hostile ones.
//!
//! Roaming guests come first. Their taps and records change all the time, and after each change the answers must be those of the
//! current record.

use anyhow::{Context as _, Result, bail};
use metadata_common::mac::Mac;
use std::path::Path;
use std::time::{Duration, Instant};
use support::guest::METADATA;
use support::netns::Namespace;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

use super::{Mark, Place, Shared, add};
use crate::storm::crawl::Dialect;
use crate::storm::guest::tcp::{ACK, Ends, Header, Incoming, PSH, RST, SYN};
use crate::storm::guest::{Arrival, Failure, Orders, Plan, Pump, Tally, tcp};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestChange {
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

const CHANGES: [GuestChange; 8] = [
    GuestChange::Recreate,
    GuestChange::Rename,
    GuestChange::Move,
    GuestChange::Mtu,
    GuestChange::Down,
    GuestChange::Update,
    GuestChange::Replace,
    GuestChange::Spoil,
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
        super::write(places.records, &self.identity, self.generation, &self.place)
    }

    fn ns<'a>(&self, places: &Places<'a>) -> &'a Namespace {
        if self.place.netns.is_some() { places.side } else { places.node }
    }

    fn make_tap(&mut self, places: &Places<'_>) -> Result<()> {
        let (ns, name) = (self.ns(places), &self.place.ifname);
        let tap = support::eventually(NAME_PATIENCE, || Tap::create(ns, name, Shape::default()))?;
        ns.ip(&format!("link set {name} up"))?;
        self.tap = Some(tap);
        Ok(())
    }

    fn change(&mut self, places: &Places<'_>, change: GuestChange, random: &mut fastrand::Rng) -> Result<()> {
        let name = self.place.ifname.clone();
        match change {
            GuestChange::Recreate => {
                self.tap = None;
                self.make_tap(places)
            }
            GuestChange::Rename => {
                self.tap = None;
                self.renamed += 1;
                self.place.ifname = format!("roam{}-{}", self.identity.number, self.renamed % 1_000);
                self.make_tap(places)?;
                self.write(places)
            }
            GuestChange::Move => {
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
            GuestChange::Mtu => {
                let mtu = MTUS[random.usize(..MTUS.len())];
                self.ns(places).ip(&format!("link set {name} mtu {mtu}")).map(drop)
            }
            GuestChange::Down => {
                let ns = self.ns(places);
                ns.ip(&format!("link set {name} down"))?;
                std::thread::sleep(Duration::from_millis(random.u64(..50)));
                ns.ip(&format!("link set {name} up")).map(drop)
            }
            GuestChange::Update => {
                self.generation += 1;
                self.write(places)
            }
            GuestChange::Replace => {
                std::fs::remove_file(self.identity.path(places.records))
                    .context("cannot remove its record")?;
                std::thread::sleep(Duration::from_millis(random.u64(..300)));
                self.generation += 1;
                self.write(places)
            }
            GuestChange::Spoil => {
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
        after: GuestChange,
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
        super::plan(places.records, &bodies, Dialect::Nocloud, std::slice::from_ref(&self.identity))
    }
}

/// Crawls once and returns the failures of its requests.
fn crawled(pump: &mut Pump<'_>, plan: &Plan, seed: u64) -> Result<Vec<Failure>> {
    pump.load(plan.clone())?;
    let orders = Orders { guests: 1, seed: seed ^ fastrand::u64(..), ..Orders::default() };
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

// Steady guests. Their taps and records never change, so none of their requests may fail.

/// The guests keep their connections between requests in one of this many rounds.
const KEEP_ALIVE_EVERY: u64 = 3;
/// Some guests read slowly in one of this many rounds.
const SLOW_EVERY: u64 = 4;
/// Frames are lost in one of this many rounds.
const LOSS_EVERY: u64 = 5;
/// The share of frames lost in such a round, in each direction.
const LOSS: f64 = 0.005;
/// The guests begin within this number of seconds.
const RAMP: f64 = 0.3;

/// Crawls on all taps, with one plan after the other, until the soak is over.
pub(super) fn crawl(shared: &Shared, taps: &[Tap], plans: &[Plan], seed: u64) -> Result<()> {
    let mut pump = Pump::new(taps)?;
    for round in 0.. {
        if shared.is_over() {
            return Ok(());
        }
        let busy = shared.busy();
        let mark = shared.mark();
        pump.load(plans[round as usize % plans.len()].clone())?;
        let orders = Orders {
            guests: taps.len(),
            arrival: Arrival::Ramp(RAMP),
            keep_alive: round % KEEP_ALIVE_EVERY == 1,
            loss: if round % LOSS_EVERY == 2 { LOSS } else { 0.0 },
            slow: if round % SLOW_EVERY == 3 { taps.len() / 4 } else { 0 },
            seed: seed.wrapping_add(round),
            ..Orders::default()
        };
        let (tally, _) = pump.storm(&orders, &mut |_, _| {})?;
        drop(busy);
        count(shared, &tally, mark, orders.keep_alive);
    }
    Ok(())
}

/// Whether a request failed because of wrong bytes, not because of missing ones.
pub(super) fn is_about_bytes(failure: Failure) -> bool {
    matches!(failure, Failure::Head | Failure::Length | Failure::Body | Failure::Checksum)
}

fn count(shared: &Shared, tally: &Tally, mark: Mark, kept: bool) {
    add(&shared.counts.boots, tally.boots);
    add(&shared.counts.requests, tally.requests);
    let closed = |failure: &Failure| matches!(failure, Failure::Cut | Failure::Reset);
    let only_closed = kept && !shared.was_one_since(mark) && tally.reasons.keys().all(closed);
    if tally.failed == 0 {
    } else if shared.was_undisturbed_since(mark) && !only_closed {
        add(&shared.counts.failed, tally.failed);
        shared.breach(format!(
            "{} requests of steady guests failed while an agent served (kept connections: {kept}): {:?}",
            tally.failed, tally.reasons
        ));
    } else {
        add(&shared.counts.interrupted, tally.failed);
    }
    // Wrong bytes are a breach even while no agent serves.
    let strange = tally.reasons.iter().filter(|(reason, _)| is_about_bytes(**reason));
    for (reason, times) in strange {
        shared.breach(format!("steady guests got wrong bytes: {reason:?}, {times} times"));
    }
}

// Hostile guests. Each attacks in one way, as fast as its share of a core allows.

/// Pause between two turns of all hostile guests.
const TURN: Duration = Duration::from_millis(10);
/// Turns of one cycle of a flood.
const TIDE: u64 = 200;
/// Turns of a cycle in which a flood sends. It comes in bursts.
const FLOOD: u64 = 20;
/// Frames per turn of a flood.
const FLOOD_FRAMES: usize = 256;
/// Frames per turn of garbage.
const GARBAGE_FRAMES: usize = 16;
/// Connections opened in a turn.
const OPENED: usize = 2;
/// Connections are opened in one of this many turns.
const OPEN_EVERY: u64 = 5;
/// The most frames read in a turn.
const READ: usize = 64;
/// The receive window of a slow reader, in bytes.
const SLOW_WINDOW: u16 = 1;
/// The destination MAC. Any MAC reaches the service, because frames are steered by their IP destination.
const ANY_MAC: Mac = Mac([0x02, 0, 0xa9, 0xfe, 0, 0]);

/// A way to attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Harm {
    /// SYNs from every port, in bursts.
    Flood,
    /// Malformed frames, mostly to metadata addresses.
    Garbage,
    /// Connections that begin a request and never finish it.
    Hoard,
    /// Requests whose answers are never read.
    Slow,
    /// Endless requests, and resets in the middle of answers.
    Bomb,
}

pub(super) const HARMS: [Harm; 5] = [Harm::Flood, Harm::Garbage, Harm::Hoard, Harm::Slow, Harm::Bomb];

/// A hostile guest and its tap.
pub(super) struct Hostile {
    tap: Tap,
    ends: Ends,
    harm: Harm,
    random: fastrand::Rng,
    frame: Vec<u8>,
}

impl Hostile {
    pub(super) fn new(tap: Tap, identity: &Identity, harm: Harm, seed: u64) -> Self {
        let ends =
            Ends { mac: identity.mac, address: identity.address, server: METADATA, server_mac: ANY_MAC };
        let random = fastrand::Rng::with_seed(seed ^ u64::from(identity.number));
        Self { tap, ends, harm, random, frame: Vec::new() }
    }

    fn turn(&mut self, number: u64, shared: &Shared, buffer: &mut [u8]) {
        let mut sent = 0;
        let mut opened = 0;
        match self.harm {
            Harm::Flood if number % TIDE < FLOOD => {
                for _ in 0..FLOOD_FRAMES {
                    sent += self.syn();
                }
            }
            Harm::Garbage => {
                for _ in 0..GARBAGE_FRAMES {
                    sent += self.garbage();
                }
            }
            Harm::Hoard | Harm::Slow | Harm::Bomb if number.is_multiple_of(OPEN_EVERY) => {
                for _ in 0..OPENED {
                    sent += self.syn();
                    opened += 1;
                }
            }
            _ => {}
        }
        for _ in 0..READ {
            let Ok(Some(length)) = self.tap.receive(0, buffer) else { break };
            sent += self.answer(&buffer[..length]);
        }
        add(&shared.counts.hostile_frames, sent);
        add(&shared.counts.hostile_connections, opened);
    }

    fn syn(&mut self) -> u64 {
        let (port, seq) = (self.random.u16(1_024..), self.random.u32(..));
        self.send(&Header { port, seq, flags: SYN, window: 64_240, timestamps: Some((1, 0)), ack: 0 }, b"")
    }

    fn send(&mut self, header: &Header, payload: &[u8]) -> u64 {
        self.frame.clear();
        tcp::segment(&mut self.frame, &self.ends, header, &[], payload, false);
        u64::from(self.tap.send(0, &self.frame).unwrap_or(false))
    }

    /// Sends a frame that was valid before random changes.
    fn garbage(&mut self) -> u64 {
        let header = Header {
            port: self.random.u16(..),
            seq: self.random.u32(..),
            ack: self.random.u32(..),
            flags: self.random.u8(..64),
            window: self.random.u16(..),
            timestamps: self.random.bool().then(|| (self.random.u32(..), self.random.u32(..))),
        };
        let length = self.random.usize(..1_400);
        self.frame.clear();
        match self.random.u8(..8) {
            0 => tcp::who_has(&mut self.frame, &self.ends),
            1 => self.frame.extend((0..self.random.usize(14..1_500)).map(|_| self.random.u8(..))),
            _ => {
                let payload = vec![b'x'; length];
                tcp::segment(&mut self.frame, &self.ends, &header, &[], &payload, false);
            }
        }
        for _ in 0..self.random.usize(..4) {
            let at = self.random.usize(..self.frame.len());
            self.frame[at] ^= 1 << self.random.u8(..8);
        }
        // A tap accepts no frame without a complete Ethernet header.
        let length = self.frame.len();
        if self.random.u8(..4) == 0 {
            self.frame.truncate(self.random.usize(14..=length));
        }
        u64::from(self.tap.send(0, &self.frame).unwrap_or(false))
    }

    /// Attacks the service in reply to a frame from it.
    fn answer(&mut self, frame: &[u8]) -> u64 {
        let Incoming::Tcp(header, _) = tcp::read(frame, &self.ends, false) else { return 0 };
        if header.flags & (SYN | ACK) != SYN | ACK {
            return match self.harm {
                Harm::Bomb if self.random.u8(..4) == 0 => {
                    let (port, seq) = (header.port, header.ack);
                    self.send(&Header { port, seq, flags: RST, ..Header::default() }, b"")
                }
                _ => 0,
            };
        }
        let mut reply = Header {
            port: header.port,
            seq: header.ack,
            ack: header.seq.wrapping_add(1),
            flags: ACK | PSH,
            window: 512,
            timestamps: header.timestamps.map(|(value, _)| (2, value)),
        };
        match self.harm {
            Harm::Hoard => self.send(&reply, b"GET /v1/meta-data HTTP/1.1\r\nHost: metadata\r\nX-Wait: "),
            Harm::Slow => {
                reply.window = SLOW_WINDOW;
                self.send(&reply, b"GET /v1/user-data HTTP/1.1\r\nHost: metadata\r\n\r\n")
            }
            Harm::Bomb => {
                let mut sent = 0;
                for _ in 0..4 {
                    let requests = b"GET /v1/user-data HTTP/1.1\r\nHost: metadata\r\n\r\n".repeat(20);
                    sent += self.send(&reply, &requests);
                    reply.seq = reply.seq.wrapping_add(requests.len() as u32);
                }
                sent
            }
            Harm::Flood | Harm::Garbage => 0,
        }
    }
}

/// Runs all hostile guests until the soak is over.
pub(super) fn harm(shared: &Shared, guests: &mut [Hostile]) -> Result<()> {
    let mut buffer = vec![0; 2_048];
    for number in 0.. {
        if shared.is_over() {
            break;
        }
        {
            let _busy = shared.busy();
            for guest in &mut *guests {
                guest.turn(number, shared, &mut buffer);
            }
        }
        std::thread::sleep(TURN);
    }
    Ok(())
}
