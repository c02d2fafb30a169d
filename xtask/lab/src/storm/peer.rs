//! The subjects of a storm, and the peers among them.

mod haproxy;
mod network;
mod nginx;
mod process;
mod pve_imds;
#[cfg(test)]
mod tests;

use anyhow::Result;
use bytes::Bytes;
use haproxy::{Form, Haproxy};
use metadata_common::mac::Mac;
use nginx::Nginx;
use pve_imds::PveImds;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::netns::Namespace;

/// A guest as a subject sees it.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) tap: String,
    pub(crate) mac: Mac,
    pub(crate) address: Ipv4Addr,
    pub(crate) pages: Vec<Page>,
}
/// A request of the sequence and its answer.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    /// GET, or PUT for a token.
    pub(crate) method: String,
    /// The path. Guests replace [`OWN_MAC`] in it by their MAC.
    pub(crate) path: String,
    pub(crate) status: u16,
    pub(crate) content_type: String,
    /// The body, shared by guests with equal bodies.
    pub(crate) body: Bytes,
}

/// The placeholder for the guest's MAC in a page's path, in lower case with colons (EC2's
/// `network/interfaces/macs/<mac>/`). A guest that requests another guest's MAC need not get a correct answer.
pub(crate) const OWN_MAC: &str = "{mac}";

/// A subject of a storm, which serves the guests' pages on their taps. Subjects alternate in one run on the same taps.
/// The taps start in the node's namespace: up, and without bridge, program or address.
pub(crate) trait Subject {
    /// Returns the name in tables and files.
    fn name(&self) -> &'static str;

    /// Returns name and version of the measured program.
    fn version(&self) -> Result<String>;

    /// Does the work that is not repeated each round: writes documents and makes configurations.
    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()>;

    /// Whether its documents may differ from the agent's. Guests then check only the status and length of an answer.
    fn makes_its_own_documents(&self) -> bool {
        false
    }

    /// Serves on the taps; returns when all guests would get answers.
    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>>;
}

/// A disturbance of a server while guests boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// The server is killed and started again at once.
    Kill9,
    /// Another server takes over from it.
    TakeOver,
}

/// A running subject. Dropping it also stops it and frees the taps.
pub(crate) trait Running: Send {
    /// Returns the processes of the subject, for CPU time and memory.
    fn pids(&self) -> Vec<u32>;

    /// Returns the agent's run directory; `None` for other servers.
    fn run_directory(&self) -> Option<PathBuf> {
        None
    }

    /// Returns the process that signs identity tokens, if there is one. [`pids`](Self::pids) includes it.
    fn signer(&self) -> Option<u32> {
        None
    }

    /// Returns the median time to attach one tap, if the server reports it.
    fn attached_in(&self) -> Option<Duration> {
        None
    }

    /// Disturbs the server while guests boot; returns when the disturbance is over.
    fn disturb(&mut self, what: Disturbance) -> Result<()> {
        anyhow::bail!("only xdp-imds supports {what:?}")
    }

    /// Ends the servers, and leaves the taps as they were before.
    fn stop(self: Box<Self>) -> Result<()>;
}

/// The names of all peers.
pub(crate) const PEERS: [&str; 4] = ["nginx", "haproxy", "neutron", PVE_IMDS];
/// The name of the peer whose program the user names.
pub(crate) use pve_imds::NAME as PVE_IMDS;

/// Returns the peer with this name. Peers with a proxy per network distribute the guests over `networks` networks.
/// `pve_imds` is the program of pve-imds; without it that peer is `None`.
pub(crate) fn named(name: &str, networks: usize, pve_imds: Option<&Path>) -> Option<Box<dyn Subject>> {
    match name {
        "nginx" => Some(Box::new(Nginx::default())),
        "haproxy" => Some(Box::new(Haproxy::new(Form::Answers, networks))),
        "neutron" => Some(Box::new(Haproxy::new(Form::Forwards, networks))),
        PVE_IMDS => Some(Box::new(PveImds::new(pve_imds?))),
        _ => None,
    }
}

/// The environment of a subject.
pub(crate) struct Scene<'a> {
    /// The node, whose namespace has the taps.
    pub(crate) node: &'a Namespace,
    /// The guests.
    pub(crate) tenants: &'a [Tenant],
    /// Number of cores that a server may use.
    pub(crate) cores: usize,
    /// The cores that a server is pinned to, if it is pinned.
    pub(crate) pinned: Option<&'a [usize]>,
}
