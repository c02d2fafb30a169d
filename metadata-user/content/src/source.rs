//! Where records come from.

use serde::{Deserialize, Serialize};

/// Where a record comes from, the highest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The local API: by the name in its URL.
    Api,
    /// A directory of files: by the file's name.
    #[default]
    File,
    /// A hypervisor's hook: by the VM's UUID.
    Hook,
    /// KubeVirt: by namespace and name.
    Kubevirt,
}

impl Source {
    /// Every one, the highest first.
    pub const ALL: [Self; 4] = [Self::Api, Self::File, Self::Hook, Self::Kubevirt];

    /// Its name, as in JSON and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::File => "file",
            Self::Hook => "hook",
            Self::Kubevirt => "kubevirt",
        }
    }

    /// True of those that tell once, so that what they told is kept on disk; feeds tell all they have at every start.
    #[must_use]
    pub fn is_kept(self) -> bool {
        matches!(self, Self::Api)
    }

    /// The source of that name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.name() == name)
    }
}
