//! The reasons why a VM, or a part of it, is not served.

use super::PublicKeyError;
use crate::memory_budget::MemoryExhausted;

/// Most problems of a VM that are named; the author of a VMI chooses how many it has.
pub const MAX_PROBLEMS: usize = 16;

/// A problem, with a message for the VM's owner. No message repeats the content of a Secret or of user-data.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum VmiProblem {
    /// The pod's launcher is not found, so the VM's taps are unknown.
    #[error("the launcher of pod `{pod}` is not found yet; the agent keeps looking: {reason}")]
    Launcher {
        /// The pod's UID.
        pod: String,
        /// Why the last search failed.
        reason: String,
    },
    /// A limit keeps the agent from watching this pod or one of its volumes.
    #[error("pod `{pod}`: {reason}")]
    Unfollowed {
        /// The pod's UID.
        pod: String,
        /// Which limit is reached.
        reason: String,
    },
    /// The NIC's binding has no tap.
    #[error(
        "NIC `{nic}`: binding `{binding}` is not served because it has no tap; use masquerade, bridge or a plugin with \
         a tap for the NIC that asks for metadata"
    )]
    Binding {
        /// The NIC.
        nic: String,
        /// The binding's name in the VMI.
        binding: String,
    },
    /// The NIC is on passt, and the options do not serve passt.
    #[error(
        "NIC `{nic}`: binding `{binding}` is not served because it has no tap; use masquerade, bridge or a plugin with \
         a tap for the NIC that asks for metadata, or have the agent serve the pod's own sockets by \
         `kubevirt: {{passt: listen}}`"
    )]
    Passt {
        /// The NIC.
        nic: String,
        /// The binding's name in the VMI.
        binding: String,
    },
    /// The inlet for the NIC on passt does not exist yet.
    #[error(
        "NIC `{nic}`: the agent cannot accept passt's connections in its pod yet; if this lasts, the agent's log has the reason"
    )]
    Inlet {
        /// The NIC.
        nic: String,
    },
    /// The plugin's device is not a tap.
    #[error(
        "NIC `{nic}`: expected a tap, found `{device}` of another kind: no XDP program sees its guest's frames"
    )]
    NoTap {
        /// The NIC.
        nic: String,
        /// The device.
        device: String,
    },
    /// The plugin's tap does not exist yet, and may never exist.
    #[error("NIC `{nic}`: expected a tap `{}` of binding plugin `{plugin}`, found none yet", taps.join("` or `"))]
    PluginTap {
        /// The NIC.
        nic: String,
        /// The plugin.
        plugin: String,
        /// The possible names of the tap.
        taps: Vec<String>,
    },
    /// The NIC's MAC is not known yet.
    #[error("NIC `{nic}`: no `macAddress`, and expected a NIC `{}` in the pod to take it from, found none yet", pod_nics.join("` or `"))]
    NoMac {
        /// The NIC.
        nic: String,
        /// The possible names of the pod's NIC.
        pod_nics: Vec<String>,
    },
    /// The NIC's `macAddress` is not a unicast MAC.
    #[error("NIC `{nic}`: `macAddress` is not the MAC address of one station")]
    BadMac {
        /// The NIC.
        nic: String,
    },
    /// A volume of the pod does not exist yet.
    #[error("{field}: volume `{volume}` of the pod does not exist yet")]
    Volume {
        /// The field it is for.
        field: &'static str,
        /// Its name.
        volume: String,
    },
    /// A volume of the pod cannot be read.
    #[error("{field}: volume `{volume}` of the pod cannot be read: {reason}")]
    Unreadable {
        /// The field it is for.
        field: &'static str,
        /// Its name.
        volume: String,
        /// The reason.
        reason: String,
    },
    /// A Secret or ConfigMap lacks the expected key.
    #[error("{field}: expected a key {keys} in volume `{volume}`, found none of them")]
    Key {
        /// The field it is for.
        field: &'static str,
        /// The volume.
        volume: String,
        /// The keys that would serve.
        keys: &'static str,
    },
    /// A field is not base64.
    #[error("{field}: expected standard base64, found something else")]
    Base64 {
        /// The field.
        field: &'static str,
    },
    /// A payload exceeds its limit.
    #[error("{field}: expected at most {limit} bytes, found {found}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// The limit in bytes.
        limit: usize,
        /// The payload's length in bytes.
        found: usize,
    },
    /// The network data is in no known form.
    #[error(
        "networkData: expected cloud-init's network-config, version 1 or 2, or OpenStack's network_data.json with links and \
         networks; found another form, which the VM reads from its disk only"
    )]
    NetworkForm,
    /// A custom metadata key that is omitted.
    #[error("metaData: key `{key}` is omitted: {reason}")]
    Metadata {
        /// The key.
        key: String,
        /// The reason.
        reason: &'static str,
    },
    /// A key of a Secret that is not a public key.
    #[error("accessCredentials: `{file}` of Secret `{secret}` is omitted: expected public keys, one a line")]
    PublicKey {
        /// The Secret.
        secret: String,
        /// The key in the Secret.
        file: String,
    },
    /// The public keys of a Secret, or of all of the VM's Secrets, exceed a limit.
    #[error(
        "accessCredentials: Secret `{secret}`: {reason}; put fewer keys into it, or user-data that fetches them"
    )]
    PublicKeys {
        /// The Secret, the first of those that are too much.
        secret: String,
        /// Which limit is exceeded.
        reason: PublicKeyError,
    },
    /// A VM has more access credentials than a pod may have volumes.
    #[error(
        "accessCredentials: expected at most {limit} Secrets of public keys, found {found}; join some of them"
    )]
    Credentials {
        /// The limit.
        limit: usize,
        /// The number of Secrets.
        found: usize,
    },
    /// Problems beyond the limit of those that are named.
    #[error("and {0} more problems; solve the ones above first")]
    More(usize),
    /// The service account's token is not a JWT with an expiry.
    #[error("token: expected a JWT with an expiry, found something else")]
    Token,
    /// The list of VMIs that an earlier release kept lacks what names the VM's owner.
    #[error("the VM's owner is not known until the API server answers: an earlier release did not keep it")]
    Owner,
    /// The record exceeds the memory for records.
    #[error("{0}")]
    Room(MemoryExhausted),
    /// The record parser refuses the result.
    #[error("{0}")]
    Record(String),
}

impl VmiProblem {
    /// True for a problem that withholds the whole VM until it is solved. A guest that boots with half of its data
    /// never asks for the rest.
    #[must_use]
    pub fn withholds(&self) -> bool {
        matches!(
            self,
            Self::Volume { .. }
                | Self::Unreadable { .. }
                | Self::Key { .. }
                | Self::Base64 { .. }
                | Self::TooLarge { .. }
                | Self::Owner
                | Self::PublicKeys { .. }
                | Self::Credentials { .. }
                | Self::Room(_)
                | Self::Record(_)
        )
    }

    /// True for a problem that may pass by itself in the first moments of a pod.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Volume { .. }
                | Self::Key { .. }
                | Self::NoMac { .. }
                | Self::PluginTap { .. }
                | Self::Inlet { .. }
                | Self::Launcher { .. }
                | Self::Owner
        )
    }
}

/// The first problems, and how many more there are. Those that withhold the VM come first, so that none of them is
/// lost.
pub(super) fn first_of(mut problems: Vec<VmiProblem>) -> Vec<VmiProblem> {
    if problems.len() > MAX_PROBLEMS {
        problems.sort_by_key(|problem| !problem.withholds());
        let more = problems.len() - MAX_PROBLEMS;
        problems.truncate(MAX_PROBLEMS);
        problems.push(VmiProblem::More(more));
    }
    problems
}
