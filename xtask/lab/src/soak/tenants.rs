//! `cargo xtask soak --tenants`: tenants that are adversaries, and one that is modest.
//!
//! ```text
//!  attacks ── one thread each: VMIs, Secrets, taps, guests, connections, Proxmox VE's files
//!  modest ─── a new VM at a time: alone, under attack, afterwards
//!  watch ──── /healthz as the kubelet asks, memory of the agent's control group, the agent's process
//!                                                                        └─ report (table, picture, JSON)
//! ```
//!
//! The agent runs as in the DaemonSet: with its memory limit, KubeVirt's VMIs from a simulated API server, and all taps
//! guarded. It also reads the configurations of a simulated Proxmox VE. All of it is in namespaces and control groups of
//! the soak.

mod guests;
mod node;
mod report;

pub(super) use report::TenantsReport;

use anyhow::{Result, bail};
use node::{LOOK, TenantsNode};
use report::{Health, Measured, MemorySample, NewVm, most_after, unserved};
use rustix::process::setpriority_process;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::agent::Agent;

use super::EndsWithMe;
use super::node::has_ended;
use crate::soak::Shared;

/// New VMs of the modest tenant alone, before the attacks.
const ALONE: usize = 9;
/// New VMs after them.
const AFTER: usize = 3;
/// Pause between two new VMs.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest time until memory is back at its base.
const SETTLES_WITHIN: Duration = Duration::from_secs(180);
/// Interval of probes and of samples of memory.
const INTERVAL: Duration = Duration::from_secs(1);
/// The longest time for an answer of `/healthz`: the DaemonSet's `timeoutSeconds`.
const LIVENESS: Duration = Duration::from_secs(5);
/// The longest time until all attacks are prepared. The others begin without one that takes longer.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Time in which memory must not fall for the base to be taken.
const CALM: Duration = Duration::from_secs(3);
/// Changes that the API server keeps for watches.
const HISTORY: usize = 2_000;
/// The nice value of attackers: a node gives the agent its requested share of CPU whatever tenants' processes want.
const NICE: i32 = 5;
/// Interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Lines of the agent's log that explain its end.
const LOG_LINES: usize = 15;

/// What to run.
#[derive(Clone, Debug)]
pub(super) struct TenantsPlan {
    /// The agent's file.
    pub(super) agent: PathBuf,
    /// Length of the attacks.
    pub(super) length: Duration,
    /// Names of the attacks; none means all.
    pub(super) only: Vec<String>,
    /// Memory limit of the agent, in bytes.
    pub(super) limit: u64,
}

/// Runs the soak.
pub(super) fn soak(plan: &TenantsPlan, interrupted: Arc<AtomicBool>) -> Result<TenantsReport> {
    let attacks = chosen(&plan.only).map_err(anyhow::Error::msg)?;
    let node = TenantsNode::new(plan.agent.clone(), plan.limit)?;
    let agent = node.start()?;
    eprintln!(
        "agent {} with {} MiB ({}); {} attacks for {:.1} minutes",
        agent.pid(),
        plan.limit >> 20,
        node.memory.kind(),
        attacks.len(),
        plan.length.as_secs_f64() / 60.0
    );
    let watch = TenantsWatch::new(&node, &agent, Arc::clone(&interrupted));
    let (mut measured, tallies) = std::thread::scope(|scope| {
        let _ends = EndsWithMe(&watch.shared);
        let health = scope.spawn(|| watch.ask_health());
        let memory = scope.spawn(|| watch.sample_memory());
        let measured = measure(&watch, &attacks, plan.length);
        watch.shared.end();
        let (mut measured, tallies) = measured?;
        measured.health = health.join().unwrap_or_default();
        measured.memory = memory.join().unwrap_or_default();
        anyhow::Ok((measured, tallies))
    })?;
    let usage = node.memory.usage()?;
    (measured.peak_bytes, measured.killed) = (usage.peak, usage.killed);
    measured.ended_s = watch.ended();
    measured.events = watch.events.load(Ordering::Relaxed) as usize;
    let breaches = watch.attacks.breaches();
    if measured.ended_s.is_some() {
        let log = agent.log();
        let lines: Vec<_> = log.lines().collect();
        eprintln!("the agent's last lines:\n{}", lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"));
    }
    drop(agent);
    node.release()?;
    if interrupted.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    let limit = (plan.limit, node.memory.kind());
    Ok(TenantsReport::new(plan.length.as_secs_f64() / 60.0, limit, tallies, breaches, measured))
}

/// Watches the agent.
struct TenantsWatch<'a> {
    node: &'a TenantsNode,
    agent: &'a Agent<'a>,
    began: Instant,
    /// Over once nothing is left to watch.
    shared: Shared,
    /// Over once the attacks must end. It keeps the breaches.
    attacks: Shared,
    /// Milliseconds after `began` at which the attacks began and the agent ended; 0 before.
    attacked_at: AtomicU64,
    ended_at: AtomicU64,
    events: AtomicU64,
    /// True once no new VM can be served any more.
    stop: AtomicBool,
}

impl<'a> TenantsWatch<'a> {
    fn new(node: &'a TenantsNode, agent: &'a Agent<'a>, interrupted: Arc<AtomicBool>) -> Self {
        Self {
            node,
            agent,
            began: Instant::now(),
            shared: Shared::new(Arc::clone(&interrupted)),
            attacks: Shared::new(interrupted),
            attacked_at: AtomicU64::new(0),
            ended_at: AtomicU64::new(0),
            events: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    fn at_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    fn at_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn is_alive(&self) -> bool {
        self.ended_at.load(Ordering::Relaxed) == 0
    }

    /// Seconds from the start of the attacks to the agent's end.
    fn ended(&self) -> Option<f64> {
        let [from, to] = [&self.attacked_at, &self.ended_at].map(|at| at.load(Ordering::Relaxed));
        (to > 0).then(|| to.saturating_sub(from) as f64 / 1_000.0)
    }

    /// Asks for `/healthz` as the kubelet does: an answer other than 200, or none within 5 s, is a failure.
    fn ask_health(&self) -> Health {
        let mut health = Health::default();
        while !self.shared.is_over() && self.is_alive() {
            let began = Instant::now();
            let is_good = matches!(self.agent.ask("/healthz"), Ok((200, _))) && began.elapsed() <= LIVENESS;
            // The end of the agent is a finding of its own.
            if has_ended(self.agent.pid()) || self.shared.is_over() {
                break;
            }
            let took_ms = began.elapsed().as_secs_f64() * 1_000.0;
            health.asked += 1;
            health.failed += u64::from(!is_good);
            health.slowest_ms = health.slowest_ms.max(took_ms);
            if !is_good {
                eprintln!("[{:>6.0} s] /healthz: no good answer after {took_ms:.0} ms", self.at_s());
            }
            self.shared.sleep(INTERVAL.saturating_sub(began.elapsed()));
        }
        health
    }

    /// Samples memory, and notices the end of the agent.
    fn sample_memory(&self) -> Vec<MemorySample> {
        let mut samples = Vec::new();
        while !self.shared.is_over() {
            if let Ok(usage) = self.node.memory.usage() {
                samples.push(MemorySample { at_s: self.at_s(), bytes: usage.anonymous });
            }
            self.events.fetch_add(self.node.server.take_events() as u64, Ordering::Relaxed);
            self.node.server.compact(HISTORY);
            if self.is_alive() && has_ended(self.agent.pid()) {
                self.ended_at.store(self.at_ms().max(1), Ordering::Relaxed);
                let killed = self.node.memory.usage().map_or(0, |usage| usage.killed);
                let after = self.ended().unwrap_or_default();
                self.attacks.breach(format!("the agent ended {after:.0} s after the attacks began; {killed} processes were killed for memory"));
                self.attacks.end();
            }
            if self.shared.interrupted.load(Ordering::Relaxed) || !self.is_alive() {
                self.stop.store(true, Ordering::Relaxed);
            }
            // Memory grows fast under attack, and the end of the agent ends the soak.
            self.shared.sleep(INTERVAL / 4);
        }
        samples
    }

    /// Runs a new VM of the modest tenant.
    fn new_vm(&self) -> NewVm {
        let at_s = self.at_s();
        match node::serve_new_vm(self.node, &self.stop) {
            Ok(took) => NewVm { at_s, took_ms: took.as_secs_f64() * 1_000.0, served: true },
            Err(error) => {
                let text = format!("{error:#}");
                eprintln!("[{at_s:>6.0} s] a new VM: {text}");
                if text.contains("ISOLATION") {
                    self.attacks.breach(text);
                }
                unserved(at_s)
            }
        }
    }

    /// Runs new VMs until `is_done`, or until the agent has ended.
    fn new_vms(&self, mut is_done: impl FnMut(usize) -> bool, mut each: impl FnMut(&[NewVm])) -> Vec<NewVm> {
        let mut vms = Vec::new();
        while self.is_alive() && !self.shared.is_over() && !is_done(vms.len()) {
            let vm = self.new_vm();
            // What happens once the agent has ended is no measurement.
            if self.is_alive() {
                vms.push(vm);
            }
            each(&vms);
            self.shared.sleep(PAUSE);
        }
        vms
    }

    fn memory(&self) -> Result<u64> {
        Ok(self.node.memory.usage()?.anonymous)
    }

    /// Returns memory once it has not fallen for some time.
    fn base(&self) -> Result<u64> {
        let (mut least, mut since) = (self.memory()?, Instant::now());
        while since.elapsed() < CALM && !self.shared.is_over() {
            std::thread::sleep(LOOK);
            let now = self.memory()?;
            if now < least {
                (least, since) = (now, Instant::now());
            }
        }
        Ok(least)
    }

    /// Waits until memory is back, and returns it with the seconds that it took.
    fn settle(&self, base: u64) -> Result<(u64, f64)> {
        let began = Instant::now();
        let mut least = self.memory()?;
        while least > most_after(base)
            && began.elapsed() < SETTLES_WITHIN
            && self.is_alive()
            && !self.shared.is_over()
        {
            std::thread::sleep(LOOK);
            least = least.min(self.memory()?);
        }
        Ok((least, began.elapsed().as_secs_f64()))
    }
}

/// Runs the three parts: alone, under attack, afterwards.
fn measure(
    watch: &TenantsWatch<'_>,
    attacks: &[&'static Attack],
    length: Duration,
) -> Result<(Measured, Vec<AttackTally>)> {
    let mut measured = Measured::default();
    // The first VM makes what all share.
    watch.new_vm();
    eprintln!("[{:>6.0} s] alone: {ALONE} new VMs", watch.at_s());
    measured.alone = watch.new_vms(|count| count >= ALONE, |_| ());
    measured.base_bytes = watch.base()?;
    let start = Start::default();
    let grounds: Vec<_> =
        attacks.iter().map(|_| Ground::new(watch.node, &start, &watch.attacks, length)).collect();
    measured.attacked = std::thread::scope(|scope| {
        let _ends = EndsWithMe(&watch.attacks);
        for (attack, ground) in attacks.iter().zip(&grounds) {
            scope.spawn(|| {
                // On Linux this is the calling thread, and what it starts inherits it.
                if let Err(error) = setpriority_process(None, NICE) {
                    eprintln!("attackers keep the lab's priority: {error}");
                }
                if let Err(error) = ground.run(attack)
                    && watch.is_alive()
                {
                    watch.attacks.breach(format!("the lab cannot run the attack {}: {error:#}", attack.name));
                }
            });
        }
        let preparing = Instant::now();
        while start.ready() < attacks.len() && preparing.elapsed() < READY_WITHIN && !watch.attacks.is_over()
        {
            std::thread::sleep(LOOK);
        }
        start.begin();
        let began = Instant::now();
        watch.attacked_at.store(watch.at_ms(), Ordering::Relaxed);
        eprintln!("[{:>6.0} s] attacks begin; memory {} MiB", watch.at_s(), measured.base_bytes >> 20);
        let mut printed = began;
        let vms = watch.new_vms(
            |_| began.elapsed() >= length,
            |vms| {
                if printed.elapsed() >= PROGRESS_INTERVAL {
                    printed = Instant::now();
                    progress(watch, began, length, vms);
                }
            },
        );
        watch.attacks.end();
        eprintln!("[{:>6.0} s] attacks end", watch.at_s());
        vms
    });
    let tally = |(attack, ground): (&&'static Attack, &Ground<'_>)| AttackTally {
        attack: attack.name,
        about: attack.about,
        acts: ground.acts.load(Ordering::Relaxed),
    };
    let tallies = attacks.iter().zip(&grounds).map(tally).collect();
    measured.after = watch.new_vms(|count| count >= AFTER, |_| ());
    (measured.after_bytes, measured.settled_s) = watch.settle(measured.base_bytes)?;
    Ok((measured, tallies))
}

fn progress(watch: &TenantsWatch<'_>, began: Instant, length: Duration, vms: &[NewVm]) {
    let last = vms.last().map_or(0.0, |vm| vm.took_ms);
    let unserved = vms.iter().filter(|vm| !vm.served).count();
    eprintln!(
        "[{:>6.0} of {:.0} s] memory {} MiB; {} new VMs, the last after {last:.0} ms, {unserved} never served",
        began.elapsed().as_secs_f64(),
        length.as_secs_f64(),
        watch.memory().unwrap_or_default() >> 20,
        vms.len()
    );
}

// The attacks, one in each row of [`ATTACKS`]. Each runs in a thread of its own from the first to the last minute, and
// takes away all that it made.

struct Attack {
    /// Its name, as for `--only`.
    name: &'static str,
    /// What it does.
    about: &'static str,
    /// Runs it until the ground says that it is over.
    run: fn(&Ground<'_>) -> Result<()>,
}

macro_rules! attacks {
    ($($name:literal, $about:literal, $run:path;)+) => {
        &[$(Attack { name: $name, about: $about, run: $run },)+]
    };
}

const ATTACKS: &[Attack] = attacks! {
    "equal-uuid", "a VM with the firmware UUID of another tenant's reads and overwrites its state", guests::equal_uuid;
    "equal-uuid-slow", "such a VM holds 140 slow connections in the account that it shares", guests::equal_uuid_slow;
    "yaml-bomb", "800 bytes of networkData with five nested anchors", guests::yaml_bomb;
    "render-bomb", "anchors that pass as a record, and a guest that asks for CloudCIX", guests::render_bomb;
    "ssh-keys", "12 Secrets of 1 MiB of short lines in accessCredentials", guests::ssh_keys;
    "patch-loop", "a patch every 1.5 s to a VMI with two such Secrets", guests::patch_slowly;
    "patch-flood", "patches without a pause to a VMI with two such Secrets", guests::patch_fast;
    "vmi-bytes", "22 VMIs of 1.4 MiB", guests::vmi_bytes;
    "record-memory", "80 VMs with 1 MiB of user-data each", guests::record_memory;
    "taps", "1,500 taps in the namespace of one pod", guests::taps;
    "events", "60 VMIs that fail, each time for another reason", guests::events;
    "refused", "thousands of VMIs whose records are refused", guests::refused;
    "webhook", "300 idle TLS connections to the webhook", guests::idle;
    "slow-connections", "a guest with 140 connections that send a byte now and then", guests::slow_connections;
    "attributes", "two guests that write attributes as fast as they can", guests::attributes;
    "proxmox-uuid", "two VMs of Proxmox VE with one smbios1 UUID", guests::equal_smbios_uuid;
    "proxmox-bomb", "a description of 823 bytes with the same anchors", guests::bomb;
};

fn chosen(names: &[String]) -> Result<Vec<&'static Attack>, String> {
    let find = |name: &String| {
        let found = ATTACKS.iter().find(|attack| attack.name == *name);
        found.ok_or_else(|| {
            let known: Vec<_> = ATTACKS.iter().map(|attack| attack.name).collect();
            format!("no attack is called `{name}`; choose from {}", known.join(", "))
        })
    };
    match names {
        [] => Ok(ATTACKS.iter().collect()),
        names => names.iter().map(find).collect(),
    }
}

/// The common start of all attacks, so that what the lab prepares slows nobody down while the modest tenant is measured.
#[derive(Debug, Default)]
struct Start {
    ready: AtomicUsize,
    begun: AtomicBool,
}

impl Start {
    /// Number of attacks that wait for the start, or have failed.
    fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// Lets all attacks begin.
    fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }
}

/// What one attack has to do with.
struct Ground<'a> {
    node: &'a TenantsNode,
    start: &'a Start,
    /// True once this attack has waited for the start.
    waited: AtomicBool,
    /// Over once the attacks must end.
    attacks: &'a Shared,
    /// Number of harmful acts so far.
    acts: AtomicU64,
    /// Length of the attacks.
    length: Duration,
}

impl<'a> Ground<'a> {
    fn new(node: &'a TenantsNode, start: &'a Start, attacks: &'a Shared, length: Duration) -> Self {
        Self { node, start, waited: AtomicBool::new(false), attacks, acts: AtomicU64::new(0), length }
    }

    /// Runs an attack. One that fails before it is ready delays no other.
    fn run(&self, attack: &Attack) -> Result<()> {
        let result = (attack.run)(self);
        if !self.waited.load(Ordering::Relaxed) {
            self.start.ready.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Called by each attack when all is prepared: the first time, waits until the others are ready, too.
    fn wait_for_start(&self) {
        if self.waited.swap(true, Ordering::Relaxed) {
            return;
        }
        self.start.ready.fetch_add(1, Ordering::Relaxed);
        while !self.start.begun.load(Ordering::Relaxed) && !self.is_over() {
            std::thread::sleep(LOOK);
        }
    }

    fn is_over(&self) -> bool {
        self.attacks.is_over()
    }

    fn sleep(&self, long: Duration) {
        self.attacks.sleep(long);
    }

    fn act(&self) {
        self.acts.fetch_add(1, Ordering::Relaxed);
    }

    /// Time that an attack holds what it made before it begins again: several times in each run.
    fn hold(&self) -> Duration {
        (self.length / 4).clamp(Duration::from_secs(10), Duration::from_secs(120))
    }
}

/// The count of one attack in the report.
#[derive(Clone, Debug, Serialize)]
struct AttackTally {
    attack: &'static str,
    about: &'static str,
    acts: u64,
}

// YAML that is small in bytes and large once its aliases are expanded.

/// Number of leaves of the innermost list, and number of aliases of each of four lists around it.
type Shape = (usize, usize);

/// A leaf: a mapping, because a parsed one takes most for its bytes.
const LEAF: &str = "{a},";
/// 800 bytes that expand to 7 million mappings. A parser that counts aliases rather than what they expand to accepts it.
const LARGE: Shape = (137, 15);
/// Smaller: a record with it is accepted, and each parse of it takes some hundred MB.
const MEDIUM: Shape = (50, 11);

/// Returns a network configuration of version 2 with five nested anchors.
fn bomb(shape: Shape) -> String {
    format!("version: 2\nethernets: {{}}\n{}", anchors(shape).join("\n"))
}

/// Returns members of a mapping, each with an anchor that has aliases of the one before.
fn anchors((leaves, width): Shape) -> Vec<String> {
    let mut lines = vec![format!("a: &a [{}]", LEAF.repeat(leaves))];
    for (name, inner) in [("b", "a"), ("c", "b"), ("d", "c"), ("e", "d")] {
        lines.push(format!("{name}: &{name} [{}]", vec![format!("*{inner}"); width].join(",")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{ATTACKS, LARGE, MEDIUM, bomb, chosen};

    #[test]
    fn the_book_lists_every_attack_with_the_same_words() {
        let page = include_str!("../../../../docs/src/contribute/tenants.md");
        for attack in ATTACKS {
            let row = format!("| `{}` | {} |\n", attack.name, attack.about);
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn attacks_have_different_names_and_unknown_names_are_refused() {
        let mut names: Vec<_> = ATTACKS.iter().map(|attack| attack.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ATTACKS.len());
        assert_eq!(chosen(&[]).map(|all| all.len()), Ok(ATTACKS.len()));
        assert_eq!(chosen(&["taps".to_owned()]).map(|some| some.len()), Ok(1));
        assert!(chosen(&["tap".to_owned()]).is_err_and(|error| error.contains("taps, events")));
    }

    #[test]
    fn a_bomb_is_smaller_than_its_name_says() {
        assert!(bomb(LARGE).len() <= 807, "{}", bomb(LARGE).len());
        assert!(bomb(MEDIUM).len() <= 760, "{}", bomb(MEDIUM).len());
    }
}
