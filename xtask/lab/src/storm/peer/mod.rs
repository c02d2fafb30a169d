//! What is measured, and the peers it is measured against.

mod haproxy;
mod network;
mod nginx;
mod process;
mod site;
#[cfg(test)]
mod tests;

use anyhow::Result;
use bytes::Bytes;
use metadata_common::mac::Mac;
use std::net::Ipv4Addr;
use std::time::Duration;
use support::netns::Namespace;

use haproxy::{Form, Haproxy};
use nginx::Nginx;

/// A guest as a peer sees it.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) tap: String,
    pub(crate) mac: Mac,
    pub(crate) address: Ipv4Addr,
    pub(crate) pages: Vec<Page>,
}
/// A request of the sequence and how it is answered.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    /// GET; PUT for a token.
    pub(crate) method: String,
    /// Guests ask for their own MAC where this says [`OWN_MAC`].
    pub(crate) path: String,
    pub(crate) status: u16,
    pub(crate) content_type: String,
    /// Shared where guests' bodies are equal.
    pub(crate) body: Bytes,
}

/// In a page's path: the asking guest's MAC, in lower case with colons (EC2's
/// `network/interfaces/macs/<mac>/`). A guest that asks for another's MAC need not be answered well.
pub(crate) const OWN_MAC: &str = "{mac}";

/// What is measured: something that serves the guests' pages on their taps. Subjects alternate in one run on
/// the same taps: up, in the node's namespace, with no bridge, no program, no address.
pub(crate) trait Subject {
    /// The name in tables and files.
    fn name(&self) -> &'static str;

    /// What was measured: name and version of the program.
    fn version(&self) -> Result<String>;

    /// Whatever need not be repeated each round: documents written, configuration made.
    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()>;

    /// Takes the taps and serves; returns when all guests would be answered.
    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>>;
}

/// What can be done to a server while guests boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// It is killed, and started again at once.
    Kill9,
    /// Another one takes over from it.
    TakeOver,
}

/// A subject that serves. Dropping it stops it too, and frees the taps.
pub(crate) trait Running: Send {
    /// Processes whose CPU time and memory are the subject's.
    fn pids(&self) -> Vec<u32>;

    /// What attaching one tap took, the median, if the server tells.
    fn attached_in(&self) -> Option<Duration> {
        None
    }

    /// Does something to the server while guests boot; returns when it is over.
    fn disturb(&mut self, what: Disturbance) -> Result<()> {
        anyhow::bail!("{what:?} is for our own agent alone")
    }

    /// Ends the servers, and leaves the taps as they were before.
    fn stop(self: Box<Self>) -> Result<()>;
}

/// Names of the peers there are.
pub(crate) const PEERS: [&str; 3] = ["nginx", "haproxy", "neutron"];

/// The peer of this name; those with a proxy per network share the guests out to `networks`.
pub(crate) fn named(name: &str, networks: usize) -> Option<Box<dyn Subject>> {
    match name {
        "nginx" => Some(Box::new(Nginx::default())),
        "haproxy" => Some(Box::new(Haproxy::new(Form::Answers, networks))),
        "neutron" => Some(Box::new(Haproxy::new(Form::Forwards, networks))),
        _ => None,
    }
}

/// Where subjects work.
pub(crate) struct Scene<'a> {
    /// The node: its namespace has the taps.
    pub(crate) node: &'a Namespace,
    /// The guests.
    pub(crate) tenants: &'a [Tenant],
    /// Cores a server may use.
    pub(crate) cores: usize,
    /// Cores a server is pinned to, if it is.
    pub(crate) pinned: Option<&'a [usize]>,
}
