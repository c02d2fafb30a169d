//! The node: its namespaces, the agent in one of them, and all guests.

use super::guests::{HARMS, Hostile, Places, Roamer};
use super::watch::{SoakWatch, hub_devices};
use super::{Place, Shared, add};
use crate::storm::crawl::Dialect;
use crate::storm::guest::Plan;
use crate::storm::peer::in_memory;
use anyhow::{Context as _, Result, ensure};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::agent::{Agent, arguments, arguments_with_pins};
use support::bpffs::Bpffs;
use support::eventually;
use support::netns::Namespace;
use support::record::Identity;
use support::tap::{Shape, Tap};
use tempfile::TempDir;

/// The share of steady guests. Guests that are neither steady nor roaming are hostile.
const STEADY: f64 = 0.375;
/// The share of roaming guests.
const ROAMING: f64 = 0.375;
/// One of this many steady guests has its tap in the second namespace.
const ASIDE_EVERY: u16 = 6;
/// The longest time until an agent has attached all taps.
const READY: Duration = Duration::from_secs(60);
/// The longest time a previous agent may stay after a takeover: 30 s for its guests, and a margin.
const LEAVES_WITHIN: Duration = Duration::from_secs(40);

/// The namespaces and directories of a soak.
pub(super) struct Node {
    pub(super) ns: Namespace,
    pub(super) side: Namespace,
    pub(super) files: TempDir,
    agent: PathBuf,
    /// The directory of pinned links and maps; `None` if nothing is pinned.
    pins: Option<Bpffs>,
    /// Number of guests, each with a tap and a record.
    pub(super) guests: u64,
}

/// All guests of the node.
pub(super) struct Guests {
    pub(super) steady: Vec<Tap>,
    pub(super) plans: Vec<Plan>,
    pub(super) roaming: Vec<Roamer>,
    pub(super) hostile: Vec<Hostile>,
}

/// How an agent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// SIGTERM.
    Stop,
    /// SIGKILL.
    Kill,
    /// The next agent takes over from it.
    Takeover,
}

impl Node {
    /// Makes the namespaces and directories.
    pub(super) fn new(agent: PathBuf, guests: u16, pins: bool) -> Result<Self> {
        let files = in_memory()?;
        std::fs::create_dir(files.path().join("records"))?;
        let [ns, side] = ["soak", "soakside"].map(Namespace::new);
        let pins = pins.then(Bpffs::mount).transpose()?;
        let node = Self { ns: ns?, side: side?, files, agent, pins, guests: guests.into() };
        for ns in [&node.ns, &node.side] {
            // Without IPv6 the node itself sends no frames on the taps.
            ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        }
        Ok(node)
    }

    /// Returns the directory of records.
    pub(super) fn records(&self) -> PathBuf {
        self.files.path().join("records")
    }

    /// Makes all taps and records.
    pub(super) fn populate(&self, records: &Path, seed: u64) -> Result<Guests> {
        let count = self.guests as u16;
        let steady = (f64::from(count) * STEADY) as u16;
        let roaming = (f64::from(count) * ROAMING) as u16;
        let (taps, plans) = self.steady(records, steady)?;
        let places = self.places(records);
        let roamers = (steady..steady + roaming).map(|number| Roamer::new(&places, Identity::of(number)));
        let roaming: Vec<Roamer> = roamers.collect::<Result<_>>()?;
        let hostile = self.hostile(records, steady + roaming.len() as u16..count, seed)?;
        Ok(Guests { steady: taps, plans, roaming, hostile })
    }

    /// Returns the namespaces and directories that roaming guests use.
    pub(super) fn places<'a>(&'a self, records: &'a Path) -> Places<'a> {
        Places { node: &self.ns, side: &self.side, records, scratch: self.files.path() }
    }

    fn steady(&self, records: &Path, count: u16) -> Result<(Vec<Tap>, Vec<Plan>)> {
        let mut taps = Vec::new();
        let mut lines = [String::new(), String::new()];
        let identities: Vec<_> = (0..count).map(Identity::of).collect();
        for identity in &identities {
            let aside = identity.number % ASIDE_EVERY == 0;
            let ns = if aside { &self.side } else { &self.ns };
            let ifname = format!("steady{}", identity.number);
            taps.push(Tap::create(ns, &ifname, Shape::default())?);
            writeln!(lines[usize::from(aside)], "link set {ifname} up")?;
            let place = Place { ifname, netns: aside.then(|| ns.name().to_owned()) };
            super::write(records, identity, 1, &place)?;
        }
        self.ns.ip_batch(&lines[0])?;
        self.side.ip_batch(&lines[1])?;
        let plan =
            |(dialect, name)| super::plan(records, &self.files.path().join(name), dialect, &identities);
        let dialects =
            [(Dialect::Nocloud, "nocloud"), (Dialect::Ec2, "ec2"), (Dialect::Openstack, "openstack")];
        Ok((taps, dialects.into_iter().map(plan).collect::<Result<_>>()?))
    }

    fn hostile(&self, records: &Path, numbers: std::ops::Range<u16>, seed: u64) -> Result<Vec<Hostile>> {
        let mut guests = Vec::new();
        let mut lines = String::new();
        for (number, harm) in numbers.zip(HARMS.into_iter().cycle()) {
            let identity = Identity::of(number);
            let ifname = format!("hostile{number}");
            let tap = Tap::create(&self.ns, &ifname, Shape::default())?;
            writeln!(lines, "link set {ifname} up")?;
            super::write(records, &identity, 1, &Place { ifname, netns: None })?;
            guests.push(Hostile::new(tap, &identity, harm, seed));
        }
        self.ns.ip_batch(&lines)?;
        Ok(guests)
    }

    /// Returns the ways in which agents end, in their order. Without pins there is no takeover.
    pub(super) fn endings(&self) -> &'static [Ending] {
        match self.pins {
            Some(_) => &[Ending::Stop, Ending::Kill, Ending::Takeover, Ending::Takeover],
            None => &[Ending::Stop, Ending::Kill],
        }
    }

    fn words(&self) -> Vec<OsString> {
        match &self.pins {
            Some(bpffs) => arguments_with_pins(&self.records(), &[], &bpffs.pins()),
            None => arguments(&self.records(), &[]),
        }
    }

    /// Starts an agent and waits until it has attached every tap.
    pub(super) fn start(&self) -> Result<Agent<'_>> {
        self.ready(Agent::start_binary(&self.agent, &self.ns, self.words())?)
    }

    fn ready<'a>(&self, agent: Agent<'a>) -> Result<Agent<'a>> {
        eventually(READY, || {
            let ports = agent.metrics()?.value("xdp_imds_ports");
            let ports = ports.context("the agent has no metric `xdp_imds_ports`")? as u64;
            // One roaming guest may be without a tap at this moment.
            ensure!(ports + 1 >= self.guests, "{ports} of {} ports are attached", self.guests);
            Ok(())
        })?;
        Ok(agent)
    }

    /// Ends the agent, starts the next one, and checks that the previous agent left nothing behind.
    pub(super) fn restart<'a>(
        &'a self,
        agent: Agent<'a>,
        ending: Ending,
        watch: &mut SoakWatch,
        shared: &Shared,
    ) -> Result<Agent<'a>> {
        watch.note(agent.pid())?;
        let next = match ending {
            Ending::Stop => {
                shared.disturb();
                self.stop(agent, shared)?;
                add(&shared.counts.stops, 1);
                let next = self.start()?;
                shared.disturb();
                next
            }
            Ending::Kill => {
                shared.disturb();
                agent.kill()?;
                add(&shared.counts.kills, 1);
                let next = self.start()?;
                shared.disturb();
                next
            }
            // A takeover is no disturbance: no request may fail.
            Ending::Takeover => self.take_over(agent, shared)?,
        };
        let remaining = watch.orphans(Some(next.pid()))?;
        if !remaining.is_empty() {
            shared.breach(format!("the previous agent ({ending:?}) left {remaining}"));
        }
        Ok(next)
    }

    /// Ends an agent with SIGTERM, as a service manager does.
    pub(super) fn stop(&self, agent: Agent<'_>, shared: &Shared) -> Result<()> {
        let status = agent.stop()?;
        ensure!(status.success(), "the agent ended with {status} after SIGTERM");
        let devices = hub_devices(&self.ns)?;
        if devices > 0 {
            shared.breach(format!("an agent left {devices} hub devices after SIGTERM"));
        }
        Ok(())
    }

    fn take_over<'a>(&'a self, agent: Agent<'a>, shared: &Shared) -> Result<Agent<'a>> {
        let mut words = self.words();
        words.push("--takeover".into());
        shared.hand_over();
        let next = self.ready(Agent::start_binary(&self.agent, &self.ns, words)?)?;
        add(&shared.counts.takeovers, 1);
        eventually(LEAVES_WITHIN, || {
            ensure!(
                has_ended(agent.pid()),
                "the previous agent has not ended after a takeover:\n{}",
                agent.log()
            );
            Ok(())
        })?;
        shared.hand_over();
        let log = agent.log();
        let status = agent.stop()?;
        ensure!(status.success(), "the previous agent ended with {status} after a takeover:\n{log}");
        Ok(next)
    }

    /// Removes the pins, which outlive agents.
    pub(super) fn release(&self) -> Result<()> {
        let Some(bpffs) = &self.pins else { return Ok(()) };
        let mut command = Command::new(&self.agent);
        command.arg("release").arg("--pins").arg(bpffs.pins());
        let output = self.ns.output(&mut command)?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "`xdp-imds release`: {}: {errors}", output.status);
        Ok(())
    }
}

/// Whether a child has ended, before anything waits for it (Linux: Documentation/filesystems/proc.rst, `stat`).
pub(super) fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain anything.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    state.is_none_or(|state| matches!(state, 'Z' | 'X'))
}
