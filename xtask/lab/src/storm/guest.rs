//! The load generator: thousands of guests in one thread, each on a real tap whose descriptor it owns.
//!
//! The generator is a process of its own (`cargo xtask storm-guests`, hidden), so that its CPU time can be measured
//! separately. It reads commands as lines of JSON from standard input and writes replies to standard output. It ends at
//! the end of its input, and its taps disappear with it.
//!
//! ```text
//!  pump (epoll, taps, clock) ── boot (one guest: ARP, requests in turn) ── tcp (one connection)
//!                                 ├─ request (request texts)             └─ wire, sum (frames)
//!                                 ├─ world (shared state, sending)
//!                                 └─ answer (checks) ── tally (counts, times)
//! ```

mod answer;
mod boot;
mod pump;
pub(crate) mod tcp;

#[cfg(test)]
mod tests;

pub(crate) use answer::{Answer, Body, Expected, Progress};
pub(super) use answer::{Calls, Outcome};
pub(crate) use answer::{Failure, Tally};
pub(crate) use pump::Pump;
pub(crate) use tcp::{Nanos, SECOND};

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use rustix::event::epoll;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::{BufRead as _, Write as _};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use support::netns::Namespace;
use support::tap::{Shape, Tap};

use super::peer::OWN_MAC;

/// Descriptors in addition to those of taps.
const MORE_DESCRIPTORS: u64 = 256;
/// Descriptors of a tap, and of its rings behind vhost-net: the device, and the signals of both rings.
const DESCRIPTORS_OF_A_TAP: u64 = 1;
const DESCRIPTORS_OF_ITS_RINGS: u64 = 6;

/// How guests are connected with their taps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wires {
    /// A system call for each frame.
    Plain,
    /// A system call for each frame, which has a virtio header.
    VirtioHeader,
    /// The rings of vhost-net.
    VhostNet,
}

/// The taps to make.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The namespace for the taps
    netns: String,
    /// Number of taps, including one for a flooding guest
    taps: usize,
    /// Make taps with a virtio header
    #[arg(long)]
    vnet_hdr: bool,
    /// Make taps with a virtio header, and attach them to vhost-net
    #[arg(long)]
    vhost: bool,
    /// The core to run on
    #[arg(long)]
    cpu: Option<usize>,
}

/// Returns the name of a tap: the one that Proxmox VE gives the first tap of a VM, since pve-imds serves no other.
pub(crate) fn tap_name(number: usize) -> String {
    format!("tap{}i0", FIRST_VM + number)
}

/// The number of the first VM (Proxmox VE's).
const FIRST_VM: usize = 100;

/// The link group of all taps. The kernel deletes a group in one step, but waits for a grace period for each descriptor
/// that closes on its own.
pub(crate) const TAP_GROUP: u32 = 254;

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(cpu) = args.cpu {
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("cannot run on core {cpu}"))?;
    }
    let ns = Namespace::open(&args.netns)?;
    let taps = make_taps(&ns, args)?;
    reply(&Reply::Done)?;
    let mut pump = Pump::new(&taps)?;
    let mut flooder: Option<(Planned, Ipv4Addr)> = None;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Command::Load(path) => {
                let file = std::io::BufReader::new(std::fs::File::open(path)?);
                let plan: Plan = serde_json::from_reader(file)?;
                flooder = plan.guests.last().map(|last| (last.clone(), plan.server));
                pump.load(plan)?;
                reply(&Reply::Done)?;
            }
            Command::Price => reply(&Reply::Priced(prices(&taps[0])?))?,
            Command::Storm(orders) => storm(&mut pump, &taps, flooder.as_ref(), &orders)?,
        }
    }
    Ok(())
}

fn make_taps(ns: &Namespace, args: &Args) -> Result<Vec<Tap>> {
    let each = DESCRIPTORS_OF_A_TAP + if args.vhost { DESCRIPTORS_OF_ITS_RINGS } else { 0 };
    allow_descriptors(args.taps as u64 * each + MORE_DESCRIPTORS)?;
    let shape = Shape { vnet_hdr: args.vnet_hdr || args.vhost, ..Shape::default() };
    let mut lines = String::new();
    let mut taps = Vec::with_capacity(args.taps);
    for number in 0..args.taps {
        let name = tap_name(number);
        writeln!(lines, "link set {name} group {TAP_GROUP} up")?;
        let tap = Tap::create(ns, &name, shape)?;
        if args.vhost {
            tap.attach_vhost()?;
        }
        taps.push(tap);
    }
    ns.ip_batch(&lines)?;
    Ok(taps)
}

fn allow_descriptors(count: u64) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    if now.current.is_none_or(|current| current >= count) {
        return Ok(());
    }
    let maximum = now.maximum.map(|maximum| maximum.max(count));
    setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum }).with_context(|| {
        format!("cannot raise the limit of open files to {count}; `ulimit -n` shows the present one")
    })
}

fn storm(
    pump: &mut Pump<'_>,
    taps: &[Tap],
    flooder: Option<&(Planned, Ipv4Addr)>,
    orders: &Orders,
) -> Result<()> {
    let stop = AtomicBool::new(false);
    let mut report = |boots, failures| {
        // A reader that ended early must not stop the storm.
        let _ = reply(&Reply::Progress { boots, failures });
    };
    let outcome = std::thread::scope(|scope| {
        let flood = orders.flood.zip(flooder).map(|(flood, (guest, server))| {
            let (tap, stop) = (&taps[taps.len() - 1], &stop);
            scope.spawn(move || pump::run(tap, guest, *server, flood, stop))
        });
        let stormed = pump.storm(orders, &mut report);
        stop.store(true, Ordering::Relaxed);
        let flooded = flood.map(|thread| thread.join().expect("flooding does not panic")).transpose()?;
        let (tally, wall) = stormed?;
        anyhow::Ok(Outcome { flood: flooded, ..tally.outcome(wall) })
    })?;
    reply(&Reply::Stormed(Box::new(outcome)))
}

fn reply(reply: &Reply) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

// The plan of a storm: the guests, their requests and the expected answers.
//
// The storm writes a plan to a file and gives the generator its path. The generator's replies are lines of JSON.

/// The placeholder for the guest's token in a request.
pub(crate) const TOKEN: &str = "{token}";

/// The parts of a case that stay the same from round to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The address of the service.
    pub(crate) server: Ipv4Addr,
    /// The requests of a boot, with their heads. [`TOKEN`] and [`OWN_MAC`] are placeholders in them.
    pub(crate) requests: Vec<String>,
    /// The file with all bodies, one after the other.
    pub(crate) bodies: PathBuf,
    /// The guests, in the order of their taps.
    pub(crate) guests: Vec<Planned>,
}

/// One guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Planned {
    pub(crate) mac: [u8; 6],
    pub(crate) address: Ipv4Addr,
    /// The expected answers, one for each request.
    pub(crate) answers: Vec<Expected>,
}

impl Planned {
    pub(crate) fn mac(&self) -> Mac {
        Mac(self.mac)
    }
}

/// When guests begin to boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) enum Arrival {
    #[default]
    AtOnce,
    /// Evenly over this many seconds.
    Ramp(f64),
    /// At random, with this many per second on average.
    Poisson(f64),
    /// One at a time, with a pause between two requests.
    Lone,
}

/// The kind of a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Flood {
    /// SYNs to the metadata address
    Syn,
    /// Frames of the same size and number to other addresses
    Ordinary,
}

/// The end of an agent during a storm. Guests that then wait for an answer do not prolong the storm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kill {
    pub(crate) pid: u32,
    /// Seconds since the storm's start.
    pub(crate) after: f64,
}

/// The orders for one round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Orders {
    /// Number of guests, counted from the first of the plan.
    pub(crate) guests: usize,
    pub(crate) arrival: Arrival,
    /// Guests boot again until this many seconds have passed. Each guest boots at least once.
    pub(crate) seconds: f64,
    pub(crate) keep_alive: bool,
    /// The service closes each connection first. The requests must ask for it.
    pub(crate) to_the_end: bool,
    /// The service makes its own documents: answers may have any bytes.
    pub(crate) any_bytes: bool,
    /// How often a guest repeats a failed request, a second after the failure, as clients in guests do.
    pub(crate) retries: u8,
    /// The fraction of frames lost in each direction.
    pub(crate) loss: f64,
    /// Number of slow readers, counted from the first guest.
    pub(crate) slow: usize,
    pub(crate) flood: Option<Flood>,
    pub(crate) kill: Option<Kill>,
    /// Seconds without progress that count as a stall; 0 turns the check off.
    pub(crate) stall: f64,
    pub(crate) seed: u64,
}

/// A command to the generator, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Load the plan in this file.
    Load(PathBuf),
    /// Measure the cost of system calls, on a tap that nothing serves.
    Price,
    Storm(Orders),
}

/// A reply of the generator, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The command is done. The first such line reports that the taps are made.
    Done,
    Priced(Prices),
    /// Progress of a storm.
    Progress {
        boots: u64,
        failures: u64,
    },
    Stormed(Box<Outcome>),
}

/// The cost of one call without effect, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Prices {
    pub(crate) write: f64,
    pub(crate) read: f64,
    pub(crate) wait: f64,
}

// Measures the cost of the generator's own system calls.
//
// A guest's `write` to its tap does work for the host: it makes the packet, runs XDP or the bridge, and often the
// server's softirq. The storm measures that work. The generator's own share is only the cost of a call that does
// nothing: a `write` that is refused for its length, a `read` that finds no frame, a wait without events. These prices
// are lower bounds and the same for every subject, so they favour none.

/// Calls of one kind in a trial, and number of trials. The cheapest trial counts, because other work on the machine can
/// only add to the cost.
const CALLS: u32 = 20_000;
const TRIALS: u32 = 7;

/// Measures the prices on a tap that has no frames to read.
fn prices(tap: &Tap) -> Result<Prices> {
    let mut buffer = [0; 2_048];
    while tap.receive(0, &mut buffer)?.is_some() {}
    // A tap refuses frames shorter than its own header and Ethernet's (Linux: drivers/net/tun.c).
    ensure!(tap.send(0, &[0]).is_err(), "the tap accepts a frame of one byte");
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poll, tap, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 8];
    Ok(Prices {
        write: price(|| drop(tap.send(0, &[0]))),
        read: price(|| drop(tap.receive(0, &mut buffer))),
        wait: price(|| {
            // The wait returns at once without events.
            let _ = epoll::wait(&poll, &mut events[..], Some(&none));
        }),
    })
}

fn price(mut call: impl FnMut()) -> f64 {
    let trial = |_| {
        let began = Instant::now();
        (0..CALLS).for_each(|_| call());
        began.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    (0..TRIALS).map(trial).fold(f64::INFINITY, f64::min)
}

// Requests as text with placeholders, which differ between guests only in a MAC and a token.

/// Bytes of a MAC in text.
const MAC_TEXT: usize = 17;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Mac,
    Token,
}

/// The requests of a boot.
#[derive(Clone, Debug)]
struct Requests(Vec<Vec<Piece>>);

impl Requests {
    fn new(texts: &[String]) -> Self {
        Self(texts.iter().map(|text| pieces(text)).collect())
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the bytes of one request.
    fn length(&self, request: usize, token: &[u8]) -> usize {
        let length = |piece: &Piece| match piece {
            Piece::Text(text) => text.len(),
            Piece::Mac => MAC_TEXT,
            Piece::Token => token.len(),
        };
        self.0[request].iter().map(length).sum()
    }

    /// Writes one request.
    fn write(&self, out: &mut Vec<u8>, request: usize, mac: Mac, token: &[u8]) {
        for piece in &self.0[request] {
            match piece {
                Piece::Text(text) => out.extend_from_slice(text),
                Piece::Mac => write_mac(out, mac),
                Piece::Token => out.extend_from_slice(token),
            }
        }
    }
}

fn write_mac(out: &mut Vec<u8>, mac: Mac) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (n, byte) in mac.0.into_iter().enumerate() {
        if n > 0 {
            out.push(b':');
        }
        out.extend([DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
}

fn pieces(mut text: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    loop {
        let next = [(OWN_MAC, Piece::Mac), (TOKEN, Piece::Token)].into_iter();
        let next = next.filter_map(|(mark, piece)| Some((text.find(mark)?, mark, piece)));
        let Some((at, mark, piece)) = next.min_by_key(|(at, ..)| *at) else { break };
        pieces.extend([Piece::Text(text[..at].into()), piece]);
        text = &text[at + mark.len()..];
    }
    pieces.push(Piece::Text(text.into()));
    pieces
}

// The Internet checksum (RFC 1071), four bytes at a time, in the machine's own byte order (§2(B)).

/// Adds bytes to a sum. All parts but the last must have an even length.
fn add(sum: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut sum = words.iter().fold(sum, |sum, word| sum + u64::from(u32::from_ne_bytes(*word)));
    if let [first, second, ..] = *rest {
        sum += u64::from(u16::from_ne_bytes([first, second]));
    }
    if rest.len() % 2 == 1 {
        sum += u64::from(u16::from_ne_bytes([rest[rest.len() - 1], 0]));
    }
    sum
}

/// Returns the sum in 16 bits, with carries added.
fn folded(sum: u64) -> u16 {
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    ((sum >> 16) + (sum & 0xffff)) as u16
}

/// Whether a sum over data and checksum shows undamaged data.
fn good(sum: u64) -> bool {
    folded(sum) == 0xffff
}

// Detects stalled connections while they stall, and describes their last segments.

/// The most stalls that are described. Further ones are only counted.
pub(crate) const DESCRIBED: usize = 32;
/// The most doublings of a timeout that losses excuse: Linux's tcp_syn_retries.
const DOUBLINGS: u32 = 6;

/// A connection without progress for longer than losses explain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stall {
    /// Address and port of the guest.
    pub(crate) connection: String,
    /// Answers that the guest got before.
    pub(crate) answers: u64,
    /// The length of the stall. If the stall never ended, the time until it was noticed.
    pub(crate) seconds: f64,
    /// Frames lost on purpose during the wait.
    pub(crate) lost: u64,
    /// The last segments, in the order in which the guest saw them.
    pub(crate) segments: Vec<String>,
    /// The sockets as the guest's kernel shows them, if the guest has a kernel.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) sockets: String,
}

/// The first timeout of a connection (RFC 6298 §2.1), and the timeout after a handshake that was sent again (§5.7).
const FIRST_TIMEOUT: Nanos = SECOND;
const TIMEOUT_AFTER_LOSS: Nanos = 3 * SECOND;

/// Returns how long a connection may be without progress if `lost` of its frames were lost: the limit, and the time of
/// as many timeouts in a row, each twice as long as the one before (RFC 6298 §5.5).
fn patience(limit: Nanos, lost: u64, first: Nanos) -> Nanos {
    limit + ((1 << lost.min(DOUBLINGS.into())) - 1) * first
}

/// The state of a guest's current connection.
#[derive(Debug, Default)]
pub(crate) struct StallWatch {
    /// Frames lost before the last progress.
    lost: u64,
    /// Whether a timeout preceded the last progress.
    timed_out: bool,
    /// The index of the current stall among the described ones.
    stall: Option<usize>,
}

/// All stalls of a storm.
#[derive(Debug, Default)]
pub(crate) struct Stalls {
    pub(crate) count: u64,
    /// The first [`DESCRIBED`] of them.
    pub(crate) described: Vec<Stall>,
    /// Number of waits beyond the limit that lost frames explain, so that they are no stalls.
    pub(crate) excused: u64,
    /// The longest wait of all.
    pub(crate) longest: Nanos,
}

impl StallWatch {
    /// Records progress after a wait. `lost` is the total of lost frames before the progress.
    pub(crate) fn progressed(&mut self, waited: Nanos, lost: u64, limit: Nanos, stalls: &mut Stalls) {
        self.timed_out = lost > self.lost && waited >= FIRST_TIMEOUT;
        self.lost = lost;
        stalls.longest = stalls.longest.max(waited);
        match self.stall.take() {
            // Stalls beyond [`DESCRIBED`] have no description to complete.
            Some(at) => stalls.described.get_mut(at).into_iter().for_each(|it| it.seconds = seconds(waited)),
            None => stalls.excused += u64::from(waited > limit),
        }
    }

    /// Returns the number of frames lost in a wait that has just become too long.
    pub(crate) fn overdue(&self, waited: Nanos, lost: u64, limit: Nanos) -> Option<u64> {
        let lost = lost.saturating_sub(self.lost);
        let first = if self.timed_out { TIMEOUT_AFTER_LOSS } else { FIRST_TIMEOUT };
        (self.stall.is_none() && waited > patience(limit, lost, first)).then_some(lost)
    }

    /// Records the wait as a stall.
    pub(crate) fn stalls(&mut self, stall: Stall, stalls: &mut Stalls) {
        self.stall = Some(stalls.described.len());
        stalls.count += 1;
        if stalls.described.len() < DESCRIBED {
            stalls.described.push(stall);
        }
    }
}

pub(crate) fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / SECOND as f64
}
