//! A node with pinned maps and the agents that run on it.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use aya::maps::{HashMap, Map, MapData};
use serde_json::Value;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::record::{Identity, replace};

use super::talk::Taker;

/// Limit for each wait. Only a failure reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time until the previous agent exits: 30 s for its guests, and a margin.
pub(crate) const LEAVES_WITHIN: Duration = Duration::from_secs(40);

/// A node with pinned maps, and the records of its guests.
pub(crate) struct Node {
    pub(crate) records: tempfile::TempDir,
    pub(crate) bpffs: Bpffs,
    pub(crate) host: Host,
}

impl Node {
    pub(crate) fn new() -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let bpffs = Bpffs::mount().expect("a bpffs");
        Self { records, bpffs, host: Host::new().expect("a node") }
    }

    pub(crate) fn write(&self, identity: &Identity, change: impl FnOnce(&mut Value)) {
        let mut record = serde_json::from_str(&identity.record(1)).expect("a record");
        change(&mut record);
        replace(&identity.path(self.records.path()), &record.to_string()).expect("a record file");
    }

    pub(crate) fn agent(&self, guests: &[Identity], more: &[&str]) -> Agent<'_> {
        let port = |guest: &Identity| PortArgument::new(Host::tap_name(guest), guest.mac);
        self.agent_in(self.host.ns(), guests.iter().map(port).collect(), more)
    }

    /// Starts an agent in its own namespace, as in a pod. The taps are in another namespace.
    pub(crate) fn pod<'a>(&self, ns: &'a Namespace, guests: &[Identity], more: &[&str]) -> Agent<'a> {
        let port =
            |guest: &Identity| PortArgument::new(Host::tap_name(guest), guest.mac).within(self.host.ns());
        self.agent_in(ns, guests.iter().map(port).collect(), more)
    }

    pub(crate) fn agent_in<'a>(
        &self,
        ns: &'a Namespace,
        ports: Vec<PortArgument>,
        more: &[&str],
    ) -> Agent<'a> {
        let mut words = agent::arguments_with_pins(self.records.path(), &ports, &self.bpffs.pins());
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary().expect("the agent is built"), ns, words).expect("an agent")
    }

    /// Slot, hub and draining hub of each identity in the kernel's table, by key.
    pub(crate) fn identities(&self) -> BTreeMap<[u8; 16], [u32; 3]> {
        let map = MapData::from_pin(self.bpffs.pins().join("v1/maps/IDENTITIES")).expect("a pinned map");
        let map: HashMap<_, [u8; 16], [u32; 4]> =
            HashMap::try_from(Map::HashMap(map)).expect("a table of identities");
        let entries = map.iter().map(|entry| entry.expect("an entry"));
        entries.map(|(key, [slot, hub, drain, _])| (key, [slot, hub, drain])).collect()
    }

    pub(crate) fn claims(&self) -> usize {
        let map = MapData::from_pin(self.bpffs.pins().join("v1/maps/DRAINING")).expect("a pinned map");
        let map: HashMap<_, u64, u32> = HashMap::try_from(Map::HashMap(map)).expect("a table of claims");
        map.keys().count()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.records.path().join("run/takeover.sock")
    }

    pub(crate) fn taker(&self) -> Taker {
        let stream = UnixStream::connect(self.socket()).expect("an agent listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Taker(BufReader::new(stream))
    }
}

/// Where the taps are.
pub(crate) enum Place {
    /// In the agents' namespace.
    Home,
    /// In another namespace. The agents steer with classifiers, because XDP cannot redirect out of that namespace.
    Pod(Namespace),
}

impl Place {
    pub(crate) fn pod() -> Self {
        Self::Pod(Namespace::new("agent").expect("a namespace"))
    }

    pub(crate) fn agent<'a>(&'a self, node: &'a Node, guests: &[Identity], more: &[&str]) -> Agent<'a> {
        match self {
            Self::Home => node.agent(guests, more),
            Self::Pod(ns) => node.pod(ns, guests, &[more, &["--steer", "tcx"]].concat()),
        }
    }
}

/// A node with one guest and its record. The guest uses the TCP of its kernel.
pub(crate) fn one_guest(change: impl FnOnce(&mut Value)) -> (Node, Guest) {
    let node = Node::new();
    let guest = Guest::boot(&node.host, &Spec::of(&Identity::of(0))).expect("a guest");
    node.write(guest.identity(), change);
    (node, guest)
}
