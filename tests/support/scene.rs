//! Nodes that tests of a running agent start from: one guest on a tap, or a VM in each of many namespaces.

use anyhow::{Context as _, Result};
use serde_json::Value;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

use crate::agent::{self, Agent, PortArgument};
use crate::bpffs::Bpffs;
use crate::guest::{Guest, Spec};
use crate::host::Host;
use crate::netns::Namespace;
use crate::record::{Identity, replace};
use crate::tap::{Shape, Tap};
use crate::tap_client::{Outcome, impatient_storm, storm};

/// Longest wait for an answer; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A node with one guest on a tap, and the directory of its record. Its methods panic where the machine refuses.
#[derive(Debug)]
pub struct OneGuest {
    /// The guest.
    pub guest: Guest,
    /// Its node.
    pub host: Host,
    /// The directory of records, which the agent uses for its other files too.
    pub records: TempDir,
}

#[expect(clippy::missing_panics_doc, reason = "the type says when its methods panic")]
impl OneGuest {
    /// Boots a guest that has no record yet.
    #[must_use]
    pub fn boot(identity: &Identity, change: impl FnOnce(Spec) -> Spec) -> Self {
        let host = Host::new().expect("a node");
        let guest = Guest::boot(&host, &change(Spec::of(identity))).expect("a guest");
        Self { guest, host, records: tempfile::tempdir().expect("a directory") }
    }

    /// Boots a guest with a record that the test has changed.
    #[must_use]
    pub fn with_record(change: impl FnOnce(&mut Value)) -> Self {
        let node = Self::boot(&Identity::of(0), |spec| spec);
        node.write(1, change);
        node
    }

    /// Writes the guest's record.
    pub fn write(&self, generation: u64, change: impl FnOnce(&mut Value)) {
        let identity = self.guest.identity();
        let mut record = serde_json::from_str(&identity.record(generation)).expect("a record");
        change(&mut record);
        replace(&identity.path(self.records.path()), &record.to_string()).expect("a record file");
    }

    /// The guest's port, as the agent's command line names it.
    #[must_use]
    pub fn port(&self) -> PortArgument {
        PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac)
    }

    /// A file beside the records.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.records.path().join(name)
    }

    /// Starts an agent that serves the guest.
    #[must_use]
    pub fn agent(&self) -> Agent<'_> {
        self.agent_with(&[])
    }

    /// Starts an agent with further arguments.
    #[must_use]
    pub fn agent_with(&self, more: &[&str]) -> Agent<'_> {
        self.agent_on(self.port(), more)
    }

    fn agent_on(&self, port: PortArgument, more: &[&str]) -> Agent<'_> {
        let mut words = agent::arguments(self.records.path(), &[port]);
        words.extend(more.iter().map(Into::into));
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    /// Starts an agent with this configuration.
    #[must_use]
    pub fn configured(&self, config: &str) -> Agent<'_> {
        self.configured_on(self.port(), config)
    }

    /// Like [`configured`](Self::configured), where the guest's port is another one than its tap on the node.
    #[must_use]
    pub fn configured_on(&self, port: PortArgument, config: &str) -> Agent<'_> {
        let file = self.file("agent.conf");
        std::fs::write(&file, config).expect("a configuration");
        self.agent_on(port, &["--config", &file.to_string_lossy()])
    }

    /// Runs curl in the guest with these arguments; returns status and body.
    #[must_use]
    pub fn curl(&self, words: &[&str]) -> (u16, String) {
        let fetched = self.guest.curl(words, PATIENCE).expect("an answer");
        (fetched.status, fetched.text())
    }
}

/// What the guests ask for.
pub const PATH: &str = "/v1/user-data";

/// A node with one VM in each of many namespaces, and the agents that serve them one after another.
#[derive(Debug)]
pub struct ManyNamespaces {
    /// The node.
    pub host: Host,
    /// The VMs and their taps.
    pub guests: Vec<(Identity, Arc<Tap>)>,
    // The namespaces must live as long as their taps.
    _pods: Vec<Namespace>,
    _records: TempDir,
    _bpffs: Bpffs,
    binary: PathBuf,
    words: Vec<OsString>,
}

impl ManyNamespaces {
    /// Creates `count` namespaces; `more` are further arguments of every agent.
    ///
    /// # Errors
    /// When the machine lacks something for them, or the agent is not built.
    pub fn new(count: u16, more: &[&str]) -> Result<Self> {
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

    /// Starts an agent.
    ///
    /// # Errors
    /// As for [`Agent::start`].
    pub fn agent(&self) -> Result<Agent<'_>> {
        self.agent_with(&[])
    }

    /// Starts an agent with further arguments.
    ///
    /// # Errors
    /// As for [`Agent::start`].
    pub fn agent_with(&self, more: &[&str]) -> Result<Agent<'_>> {
        let words = self.words.iter().cloned().chain(more.iter().map(Into::into)).collect();
        Agent::start_binary(&self.binary, self.host.ns(), words)
    }

    /// Lets every guest request its user-data; returns the time each took, sorted ascending.
    ///
    /// # Errors
    /// When one gets no answer, or another VM's.
    pub fn all_ask(&self, patience: Duration) -> Result<Vec<Duration>> {
        times_of(storm(self.guests.clone(), &[PATH], patience))
    }

    /// Like [`all_ask`](Self::all_ask), but a guest opens a new connection if it has no answer within `attempt`.
    ///
    /// # Errors
    /// As for [`all_ask`](Self::all_ask).
    pub fn all_ask_again(&self, patience: Duration, attempt: Duration) -> Result<Vec<Duration>> {
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
