//! A node with one VM in each of many namespaces, and the agents that serve them one after another.

use anyhow::{Context as _, Result};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::host::Host;
use support::netns::Namespace;
use support::record::Identity;
use support::tap::{Shape, Tap};
use support::tap_client::{Outcome, impatient_storm, storm};
use tempfile::TempDir;

pub(crate) const PATH: &str = "/v1/user-data";

pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) guests: Vec<(Identity, Arc<Tap>)>,
    // The namespaces must live as long as their taps.
    _pods: Vec<Namespace>,
    _records: TempDir,
    _bpffs: Bpffs,
    binary: PathBuf,
    words: Vec<OsString>,
}

impl Node {
    /// Creates `count` namespaces; `more` are further arguments of every agent.
    pub(crate) fn new(count: u16, more: &[&str]) -> Result<Self> {
        let (host, records, bpffs) = (Host::new()?, tempfile::tempdir()?, Bpffs::mount()?);
        let (mut pods, mut guests, mut ports) = (Vec::new(), Vec::new(), Vec::new());
        for identity in (0..count).map(Identity::of) {
            let pod = Namespace::new("pod")?;
            let tap = Tap::create(&pod, "tap0", Shape::default())?;
            pod.ip("link set tap0 up")?;
            identity.write(records.path(), 1)?;
            ports.push(PortArgument::new("tap0", identity.mac).within(&pod));
            guests.push((identity, Arc::new(tap)));
            pods.push(pod);
        }
        let mut words = agent::arguments_with_pins(records.path(), &ports, &bpffs.pins());
        words.extend(more.iter().map(Into::into));
        let binary = agent::binary()?;
        Ok(Self { host, guests, _pods: pods, _records: records, _bpffs: bpffs, binary, words })
    }

    pub(crate) fn agent(&self) -> Result<Agent<'_>> {
        self.agent_with(&[])
    }

    /// Starts an agent with further arguments.
    pub(crate) fn agent_with(&self, more: &[&str]) -> Result<Agent<'_>> {
        let words = self.words.iter().cloned().chain(more.iter().map(Into::into)).collect();
        Agent::start_binary(&self.binary, self.host.ns(), words)
    }

    /// Lets every guest request its user-data; returns the time each took, sorted ascending.
    pub(crate) fn all_ask(&self, patience: Duration) -> Result<Vec<Duration>> {
        times_of(storm(self.guests.clone(), &[PATH], patience))
    }

    /// Like [`all_ask`](Self::all_ask), but a guest opens a new connection if it has no answer within `attempt`.
    pub(crate) fn all_ask_again(&self, patience: Duration, attempt: Duration) -> Result<Vec<Duration>> {
        times_of(impatient_storm(self.guests.clone(), &[PATH], patience, attempt))
    }
}

fn times_of(outcomes: Vec<Outcome>) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    for Outcome { identity, answers, took: guest } in outcomes {
        let answers = answers.with_context(|| identity.hostname.clone())?;
        anyhow::ensure!(
            answers[0].body == identity.user_data.as_bytes(),
            "{} got another guest's user-data",
            identity.hostname
        );
        took.push(guest);
    }
    took.sort();
    Ok(took)
}
