//! A node whose agents come and go, and what its guests see.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::Result;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::guest::{Guest, METADATA};
use support::host::{self, Host};
use support::record::Identity;
use support::tap::{Shape, Tap};
use tempfile::TempDir;

/// Time limit of one request.
pub(crate) const REQUEST: Duration = Duration::from_secs(5);
/// Longest wait for something that must happen; only a failing test waits this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const PATH: &str = "/v1/user-data";

/// A node with agents that share one directory of pins.
pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) records: TempDir,
    pub(crate) bpffs: Bpffs,
    pub(crate) ports: Vec<PortArgument>,
}

impl Node {
    pub(crate) fn new(identities: &[Identity]) -> Self {
        let records = tempfile::tempdir().expect("a directory");
        for identity in identities {
            identity.write(records.path(), 1).expect("a record");
        }
        let port = |identity: &Identity| PortArgument::new(Host::tap_name(identity), identity.mac);
        Self {
            host: Host::new().expect("a node"),
            records,
            bpffs: Bpffs::mount().expect("a bpffs"),
            ports: identities.iter().map(port).collect(),
        }
    }

    pub(crate) fn agent(&self) -> Agent<'_> {
        self.agent_for(self.records.path())
    }

    /// Starts an agent for the records in `records`; state and sockets stay in the node's directory.
    pub(crate) fn agent_for(&self, records: &Path) -> Agent<'_> {
        self.agent_with(records, &[])
    }

    /// Like [`Node::agent_for`], with more arguments.
    pub(crate) fn agent_with(&self, records: &Path, more: &[&str]) -> Agent<'_> {
        let mut words = agent::arguments_with_pins(self.records.path(), &self.ports, &self.bpffs.pins());
        let given = words.iter().position(|word| word == "--records").expect("it is given");
        words[given + 1] = records.into();
        words.extend(more.iter().map(Into::into));
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    pub(crate) fn release(&self, more: &[&str]) -> Output {
        let pins = self.bpffs.pins();
        self.release_of("--pins", &pins, more)
    }

    /// Releases the pins that `option` and `path` name.
    pub(crate) fn release_of(&self, option: &str, path: &Path, more: &[&str]) -> Output {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.arg("release").arg(option).arg(path).args(more);
        self.host.ns().output(&mut command).expect("it runs")
    }
}

/// Adds another station to the bridge. It receives broadcasts.
pub(crate) fn broadcast_listener(host: &Host) -> Tap {
    let tap = Tap::create(host.ns(), "ear", Shape::default()).expect("a tap");
    host.ns().ip(&format!("link set ear master {} up", host::BRIDGE)).expect("on the bridge");
    tap
}

/// The number of frames a tap has received that contain the metadata address.
pub(crate) fn metadata_frames(tap: &Tap) -> usize {
    let mut buffer = [0; 2048];
    let mut frames = 0;
    while let Some(len) = tap.receive(0, &mut buffer).expect("the tap is there") {
        frames += usize::from(buffer[..len].windows(4).any(|bytes| bytes == METADATA.octets()));
    }
    frames
}

pub(crate) fn fetch_own(guest: &Guest) -> Result<()> {
    guest.fetch_own(PATH, REQUEST).map(drop)
}
