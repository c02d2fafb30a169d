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
mod plan;
mod pump;
pub(crate) mod stall;
mod sum;
mod tally;
mod tcp;
pub(crate) mod wire;

#[cfg(test)]
mod tests;

pub(crate) use answer::{Answer, Body, Expected, Progress};
pub(crate) use plan::{Arrival, Flood, Orders, Plan, Planned};
pub(super) use plan::{Command, Prices, Reply, TOKEN};
pub(crate) use pump::Pump;
pub(super) use tally::{Calls, Outcome};
pub(crate) use tally::{Failure, Tally};
pub(crate) use tcp::{Nanos, SECOND};

use anyhow::{Context as _, Result};
use std::fmt::Write as _;
use std::io::{BufRead as _, Write as _};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use support::netns::Namespace;
use support::tap::{Shape, Tap};

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
            Command::Price => reply(&Reply::Priced(plan::prices(&taps[0])?))?,
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
