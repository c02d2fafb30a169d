//! Instances: the JSON types of the agent's API at `/v1/instances`.
//!
//! The agent and its clients use these types on the control socket. `openapi.json` beside the agent's handlers
//! describes them.

pub mod client;

use serde::{Deserialize, Serialize};

pub use client::{NAME_MAX, RegistrationError, is_name, path_of};

use crate::status::{GuestState, InstanceState};
use metadata_content::source::RecordSource;

/// Most instances in one response; [`Page::next`] continues the list.
pub const PAGE: usize = 512;

/// A record as the agent has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Its name within its source.
    pub name: String,
    /// The source that published it.
    pub source: RecordSource,
    /// The state of the record.
    pub state: InstanceState,
    /// True if the VM is served from this record.
    pub in_force: bool,
    /// The record that is in force instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadowed_by: Option<Name>,
    /// Why the latest version is refused. An earlier good version stays in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// The record's entity tag for `If-Match`; present for source `api` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// The generation of the good version, if one exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The VM of the good version, or of a refused one as far as its source tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<InstanceVm>,
    /// The ports of the record's NICs.
    pub ports: Vec<InstancePort>,
    /// What the registration did; only in its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<RegistrationOutcome>,
    /// The record's fields without secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<serde_json::Value>,
    /// Names of the record's other fields, whose values are secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Vec<String>>,
}

/// What a registration did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistrationOutcome {
    /// There was no record of this name.
    Registered,
    /// The record of this name was the same.
    Unchanged,
    /// It replaced an earlier record of the same VM.
    Replaced,
    /// It replaced the record of another VM, which is no longer registered.
    ReplacedAnother,
}

impl RegistrationOutcome {
    /// Returns the words that follow the record's name in messages.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Unchanged => "unchanged",
            Self::Replaced => "replaced",
            Self::ReplacedAnother => "replaced the record of another VM",
        }
    }
}

impl Instance {
    /// True if `xdp-imds ls` or `status` shows it by this name: its own, with or without its source; the name, UUID or
    /// owner of its VM; the port or MAC of a NIC; the path of its file.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        let is_vm = |vm: &InstanceVm| {
            vm.name == name || vm.uuid.eq_ignore_ascii_case(name) || !vm.owner.is_empty() && vm.owner == name
        };
        let is_port = |port: &InstancePort| {
            port.port == name
                || port.port.split('@').next() == Some(name)
                || port.mac.eq_ignore_ascii_case(name)
        };
        let is_file = self.source == RecordSource::File
            && name.starts_with('/')
            && name.rsplit('/').next() == Some(&self.name);
        !name.is_empty()
            && (self.name == name
                || name.strip_prefix(self.source.name()).and_then(|rest| rest.strip_prefix('/'))
                    == Some(&self.name)
                || self.vm.as_ref().is_some_and(is_vm)
                || self.ports.iter().any(is_port)
                || is_file)
    }
}

/// The name of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// The record's source.
    pub source: RecordSource,
    /// The name within the source.
    pub name: String,
}

/// The VM of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceVm {
    /// Its name.
    pub name: String,
    /// The UUID of its firmware, which another VM may have too.
    pub uuid: String,
    /// The owner of what the agent keeps and derives for it.
    #[serde(default)]
    pub owner: String,
}

/// The port of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstancePort {
    /// `IFNAME`, or `IFNAME@NETNS`.
    pub port: String,
    /// The NIC's MAC.
    pub mac: String,
    /// How requests from this NIC are answered.
    pub state: GuestState,
    /// The other record that has this MAC on this port, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_by: Option<Name>,
    /// The fault of the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A page of instances, in the order of source and name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Page {
    /// At most [`PAGE`] instances.
    pub instances: Vec<Instance>,
    /// The parameter `after` for the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An error of the API (RFC 9457).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ApiProblem {
    /// The kind: `urn:xdp-imds:` and a word.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind in a few words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What was expected, what was found, and the remedy.
    pub detail: String,
    /// The conflicting record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conflict: Option<Name>,
    /// The instance as stored, if it is not attached as requested yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered: Option<Box<Instance>>,
}
