//! VMs as the local API tells them: what an agent answers at `/v1/instances`, and the verbs that ask.
//!
//! Both sides of the control socket use these types; `openapi.json` beside the agent's handlers describes them.

pub mod client;

use serde::{Deserialize, Serialize};

pub use client::{Failure, NAME_MAX, is_name, path_of};

use crate::status::{GuestState, InstanceState};
use metadata_content::source::Source;

/// Instances told of in one answer; the next answer goes on where it ends.
pub const PAGE: usize = 512;

/// A record as the agent holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Its name within its source.
    pub name: String,
    /// Where it comes from.
    pub source: Source,
    /// What has become of it.
    pub state: InstanceState,
    /// What the VM is served comes from it.
    pub in_force: bool,
    /// The record that is in force instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadowed_by: Option<Name>,
    /// Why what its source told last is refused; what was told before, if it was good, still holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Of the record as it is, for `If-Match`; only where it came by the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// The record's generation, if a good one is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The VM, if a good record is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<Vm>,
    /// Where the VM is to be served.
    pub ports: Vec<Port>,
    /// The record's fields that hold no secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<serde_json::Value>,
    /// The record's other fields: they are there, and are not told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Vec<String>>,
}

/// What a record is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// Its source.
    pub source: Source,
    /// Its name there.
    pub name: String,
}

/// A VM, by its record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
}

/// A NIC's place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// `IFNAME`, or `IFNAME@NETNS`.
    pub port: String,
    /// The NIC's MAC.
    pub mac: String,
    /// What requests from there get.
    pub state: GuestState,
    /// The record that has this MAC on this port, if it is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_by: Option<Name>,
    /// What is wrong with the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Instances, by source and name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Page {
    /// At most [`PAGE`] of them.
    pub instances: Vec<Instance>,
    /// `after` of the question for the next ones, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Why something was not done (RFC 9457).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Which kind: `urn:xdp-imds:` and a word.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind in a few words.
    pub title: String,
    /// The status of the answer.
    pub status: u16,
    /// What was expected, what came, and what to do.
    pub detail: String,
    /// The record in the way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conflict: Option<Name>,
    /// The instance as it is: where it is kept, and not yet as was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered: Option<Box<Instance>>,
}
