//! Where records come from.
//!
//! A source is a row of `sources!`, a module of `metadata-feed` that implements its trait `Source`, and a line of the
//! agent's `config::sources`. Reports, the HTTP API, the command line and the checks of `doctor` read these.

use serde::{Deserialize, Serialize};

/// Who writes the records of a source, and so whose share of the node's limits they count for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authorship {
    /// The node's operator.
    Operator,
    /// Tenants; a record's key begins with the tenant's namespace, which the platform has checked.
    Namespaces,
    /// Tenants; each VM is a tenant of its own.
    Vms,
}

/// What is fixed for a source.
#[derive(Clone, Copy, Debug)]
struct SourceTraits {
    /// The name in JSON, in metrics and on the command line.
    name: &'static str,
    /// The name in sentences.
    title: &'static str,
    /// What a record's name is, for the command line's help.
    names: &'static str,
    /// What turns the source on in the configuration file; `None` for one that is always on.
    setting: Option<&'static str>,
    authorship: Authorship,
    is_kept: bool,
    is_in_snapshot: bool,
    shares_payloads: bool,
}

macro_rules! sources {
    ($($(#[$doc:meta])* $source:ident { $($field:ident: $value:expr,)* })*) => {
        /// Where a record comes from, by falling precedence.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum RecordSource {
            $($(#[$doc])* $source,)*
        }

        impl RecordSource {
            /// All sources, by falling precedence.
            pub const ALL: [Self; [$(stringify!($source)),*].len()] = [$(Self::$source),*];

            const fn traits(self) -> SourceTraits {
                match self {
                    $(Self::$source => SourceTraits { $($field: $value,)* },)*
                }
            }
        }
    };
}

sources! {
    /// The local API. The name in the URL identifies the record.
    Api {
        name: "api",
        title: "the API",
        names: "the one in its URL",
        setting: Some("(to register VMs) `api: {}`"),
        authorship: Authorship::Operator,
        is_kept: true,
        is_in_snapshot: false,
        shares_payloads: false,
    }
    /// A directory of files. The file's name identifies the record.
    #[default]
    File {
        name: "file",
        title: "the directory of records",
        names: "the file's",
        setting: Some("`records:`"),
        authorship: Authorship::Operator,
        is_kept: false,
        is_in_snapshot: true,
        shares_payloads: false,
    }
    /// A hypervisor's hook. The VM's UUID identifies the record.
    Hook {
        name: "hook",
        title: "the hook",
        names: "the VM's UUID",
        setting: None,
        authorship: Authorship::Operator,
        is_kept: false,
        is_in_snapshot: false,
        shares_payloads: false,
    }
    /// KubeVirt. Namespace and name identify the record.
    Kubevirt {
        name: "kubevirt",
        title: "KubeVirt",
        names: "the VMI's namespace and name",
        setting: Some("`kubevirt: {}`"),
        authorship: Authorship::Namespaces,
        is_kept: false,
        is_in_snapshot: false,
        shares_payloads: true,
    }
    /// Proxmox VE. The VM's number identifies the record.
    Proxmox {
        name: "proxmox",
        title: "Proxmox VE",
        names: "the VM's number",
        setting: Some("`proxmox: {}`"),
        authorship: Authorship::Vms,
        is_kept: false,
        is_in_snapshot: true,
        shares_payloads: false,
    }
    /// OpenStack. The instance's UUID identifies the record.
    Openstack {
        name: "openstack",
        title: "OpenStack",
        names: "the instance's UUID",
        setting: Some("`openstack:`"),
        authorship: Authorship::Vms,
        is_kept: false,
        is_in_snapshot: true,
        shares_payloads: false,
    }
}

impl RecordSource {
    /// Returns the name in JSON, in metrics and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.traits().name
    }

    /// Returns the name in sentences.
    #[must_use]
    pub fn title(self) -> &'static str {
        self.traits().title
    }

    /// Returns what the name of a record of this source is.
    #[must_use]
    pub fn names(self) -> &'static str {
        self.traits().names
    }

    /// Returns what turns this source on in the configuration file; `None` if it is always on.
    #[must_use]
    pub fn setting(self) -> Option<&'static str> {
        self.traits().setting
    }

    /// Returns who writes the records of this source.
    #[must_use]
    pub fn authorship(self) -> Authorship {
        self.traits().authorship
    }

    /// Returns whether records of this source must be kept on disk: the API gets each record once, while the other
    /// sources deliver all their records at every startup.
    #[must_use]
    pub fn is_kept(self) -> bool {
        self.traits().is_kept
    }

    /// Returns whether tenants of a platform are the authors of this source's records. What such a record says of
    /// itself identifies nobody: its owner is what the platform assigned ([`crate::record::Owner`]).
    #[must_use]
    pub fn is_of_tenants(self) -> bool {
        self.authorship() != Authorship::Operator
    }

    /// Returns whether the snapshot holds the records of this source: the agent starts with them while the source is
    /// unavailable. The others deliver their records at every startup, or keep them in files of their own.
    #[must_use]
    pub fn is_in_snapshot(self) -> bool {
        self.traits().is_in_snapshot
    }

    /// Returns whether the feed of this source keeps its records and shares equal payloads among them.
    #[must_use]
    pub fn shares_payloads(self) -> bool {
        self.traits().shares_payloads
    }

    /// Returns the source with this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::RecordSource;

    #[test]
    fn a_source_has_one_name_everywhere() {
        for source in RecordSource::ALL {
            assert_eq!(serde_json::to_value(source).expect("JSON"), source.name());
            assert_eq!(RecordSource::of(source.name()), Some(source));
        }
    }
}
