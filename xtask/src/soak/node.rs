//! The node: its namespaces, the agent in one of them, and all guests.

use super::hostile::{HARMS, Hostile};
use super::roam::{Places, Roamer};
use super::script::{self, Place};
use super::shared::{Shared, add};
use super::watch::{Watch, hub_devices};
use crate::storm::crawl::Dialect;
use crate::storm::guest::Plan;
use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use support::agent::{Agent, arguments};
use support::eventually::eventually;
use support::netns::Namespace;
use support::record::Identity;
use support::tap::{Shape, Tap};
use tempfile::TempDir;

/// Of all taps, the shares of steady and of roaming guests; the rest are hostile.
const STEADY: f64 = 0.375;
const ROAMING: f64 = 0.375;
/// Of the steady ones, one in so many lives in the other namespace.
const ASIDE_EVERY: u16 = 6;
/// Files go where reading them needs no disk.
const IN_MEMORY: &str = "/dev/shm";
/// Longest until an agent has attached all taps.
const READY: std::time::Duration = std::time::Duration::from_secs(60);

/// Namespaces and directories.
pub(super) struct Node {
    pub(super) ns: Namespace,
    pub(super) side: Namespace,
    pub(super) files: TempDir,
    pub(super) agent: PathBuf,
    /// Guests that have a tap and a record.
    pub(super) guests: u64,
}

/// Everybody on the node.
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
}

impl Node {
    /// Makes the namespaces.
    pub(super) fn new(agent: PathBuf, guests: u16) -> Result<Self> {
        let base = PathBuf::from(IN_MEMORY);
        let base = if base.is_dir() { base } else { std::env::temp_dir() };
        let files = tempfile::Builder::new().prefix("xdp-imds-soak-").tempdir_in(base)?;
        std::fs::create_dir(files.path().join("records"))?;
        let [ns, side] = ["soak", "soakside"].map(Namespace::new);
        let node = Self { ns: ns?, side: side?, files, agent, guests: guests.into() };
        for ns in [&node.ns, &node.side] {
            // No chatter of the node's own.
            ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        }
        Ok(node)
    }

    /// The directory of records.
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

    /// What roaming guests need to know.
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
            script::write(records, identity, 1, &place)?;
        }
        self.ns.ip_batch(&lines[0])?;
        self.side.ip_batch(&lines[1])?;
        let plan =
            |(dialect, name)| script::plan(records, &self.files.path().join(name), dialect, &identities);
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
            script::write(records, &identity, 1, &Place { ifname, netns: None })?;
            guests.push(Hostile::new(tap, &identity, harm, seed));
        }
        self.ns.ip_batch(&lines)?;
        Ok(guests)
    }

    /// Starts an agent and waits until it has attached every tap that is there.
    pub(super) fn start(&self) -> Result<Agent<'_>> {
        let words = arguments(&self.records(), &[]);
        let agent = Agent::start_binary(&self.agent, &self.ns, words)?;
        eventually(READY, || {
            let metrics = agent.metrics()?;
            let ports = metrics.samples().iter().find(|sample| sample.name == "xdp_imds_ports");
            let ports = ports.context("no metric of ports")?.value as u64;
            // A roaming guest may be without a tap just now.
            ensure!(ports + 1 >= self.guests, "{ports} of {} ports are attached", self.guests);
            Ok(())
        })?;
        Ok(agent)
    }

    /// Ends an agent, sees that nothing of it is left, and starts another.
    pub(super) fn restart<'a>(
        &'a self,
        agent: Agent<'a>,
        ending: Ending,
        watch: &mut Watch,
        shared: &Shared,
    ) -> Result<Agent<'a>> {
        watch.note(agent.pid())?;
        shared.disturb();
        match ending {
            Ending::Stop => {
                let status = agent.stop()?;
                ensure!(status.success(), "the agent ended with {status} after SIGTERM");
                add(&shared.counts.stops, 1);
                let devices = hub_devices(&self.ns)?;
                if devices > 0 {
                    shared.breach(format!("an agent that was told to stop left {devices} hub devices"));
                }
            }
            Ending::Kill => {
                agent.kill()?;
                add(&shared.counts.kills, 1);
            }
        }
        let agent = self.start()?;
        shared.disturb();
        let left = watch.orphans(Some(agent.pid()))?;
        if !left.is_empty() {
            shared.breach(format!("the agent before ({ending:?}) has left {left}"));
        }
        Ok(agent)
    }
}
