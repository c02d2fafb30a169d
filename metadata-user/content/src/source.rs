//! Where records come from.

use serde::{Deserialize, Serialize};

/// Where a record comes from, by falling precedence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordSource {
    /// The local API. The name in the URL identifies the record.
    Api,
    /// A directory of files. The file's name identifies the record.
    #[default]
    File,
    /// A hypervisor's hook. The VM's UUID identifies the record.
    Hook,
    /// KubeVirt. Namespace and name identify the record.
    Kubevirt,
    /// Proxmox VE. The VM's number identifies the record.
    Proxmox,
}

impl RecordSource {
    /// All sources, by falling precedence.
    pub const ALL: [Self; 5] = [Self::Api, Self::File, Self::Hook, Self::Kubevirt, Self::Proxmox];

    /// Returns the name in JSON and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::File => "file",
            Self::Hook => "hook",
            Self::Kubevirt => "kubevirt",
            Self::Proxmox => "proxmox",
        }
    }

    /// Returns whether records of this source must be kept on disk: the API gets each record once, while the other
    /// sources deliver all their records at every start.
    #[must_use]
    pub fn is_kept(self) -> bool {
        matches!(self, Self::Api)
    }

    /// Returns whether tenants of a platform are the authors of this source's records. What such a record says of
    /// itself identifies nobody: its owner is what the platform assigned ([`crate::record::Owner`]).
    #[must_use]
    pub fn is_of_tenants(self) -> bool {
        matches!(self, Self::Kubevirt | Self::Proxmox)
    }

    /// Returns whether the snapshot holds the records of this source: the agent starts with them while the source is
    /// unavailable. The others deliver their records at every start, or keep them in files of their own.
    #[must_use]
    pub fn is_in_snapshot(self) -> bool {
        matches!(self, Self::File | Self::Proxmox)
    }

    /// Returns whether the feed of this source keeps its records and shares equal payloads among them.
    #[must_use]
    pub fn shares_payloads(self) -> bool {
        matches!(self, Self::Kubevirt)
    }

    /// Returns the source with this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.name() == name)
    }
}
