//! What keeps a VM, or a part of it, from being served.

use crate::room::NoRoom;

/// A problem, in words for its owner. None repeats what a Secret, or user-data, holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Problem {
    /// The pod's launcher is not found, so that no tap of the VM is known.
    #[error("the launcher of pod `{pod}` is not found, and is looked for on: {reason}")]
    Launcher {
        /// The pod's UID.
        pod: String,
        /// Why the last look failed.
        reason: String,
    },
    /// The agent follows too many pods or volumes to follow this one.
    #[error("pod `{pod}`: {reason}")]
    Unfollowed {
        /// The pod's UID.
        pod: String,
        /// Which limit is reached.
        reason: String,
    },
    /// A NIC has no tap by its binding.
    #[error(
        "NIC `{nic}`: binding `{binding}` is not served, for it has no tap; use masquerade, bridge or a plugin with \
         a tap for the NIC that asks for metadata"
    )]
    Binding {
        /// The NIC.
        nic: String,
        /// The binding's name in the VMI.
        binding: String,
    },
    /// A NIC that passt stands for, which is not asked for.
    #[error(
        "NIC `{nic}`: binding `{binding}` is not served, for it has no tap; use masquerade, bridge or a plugin with \
         a tap for the NIC that asks for metadata, or have the agent serve the pod's own sockets by \
         `kubevirt: {{passt: listen}}`"
    )]
    Passt {
        /// The NIC.
        nic: String,
        /// The binding's name in the VMI.
        binding: String,
    },
    /// The way in for what passt sends is not there yet.
    #[error(
        "NIC `{nic}`: its pod has no inlet yet for what passt sends; the agent's log says why if it stays so"
    )]
    Inlet {
        /// The NIC.
        nic: String,
    },
    /// A plugin's device is of another kind.
    #[error(
        "NIC `{nic}`: expected a tap, found `{device}` of another kind: what its guest sends passes no XDP program"
    )]
    NoTap {
        /// The NIC.
        nic: String,
        /// The device.
        device: String,
    },
    /// A plugin has not made a tap yet, and may never.
    #[error("NIC `{nic}`: expected a tap `{}` of binding plugin `{plugin}`, found none yet", taps.join("` or `"))]
    PluginTap {
        /// The NIC.
        nic: String,
        /// The plugin.
        plugin: String,
        /// What the tap may be called.
        taps: Vec<String>,
    },
    /// A NIC's MAC is not known yet.
    #[error("NIC `{nic}`: no `macAddress`, and expected a NIC `{}` in the pod to take it from, found none yet", pod_nics.join("` or `"))]
    NoMac {
        /// The NIC.
        nic: String,
        /// What the pod's NIC may be called.
        pod_nics: Vec<String>,
    },
    /// A NIC's MAC is none.
    #[error("NIC `{nic}`: `macAddress` is no MAC address of one station")]
    BadMac {
        /// The NIC.
        nic: String,
    },
    /// A volume of the pod is not there yet.
    #[error("{field}: volume `{volume}` of the pod is not there yet")]
    Volume {
        /// What is in it.
        field: &'static str,
        /// Its name.
        volume: String,
    },
    /// A volume of the pod cannot be read.
    #[error("{field}: volume `{volume}` of the pod cannot be read: {reason}")]
    Unreadable {
        /// What is in it.
        field: &'static str,
        /// Its name.
        volume: String,
        /// Why.
        reason: String,
    },
    /// A Secret or ConfigMap lacks what it is named for.
    #[error("{field}: expected a key {keys} in volume `{volume}`, found none of them")]
    Key {
        /// What should be there.
        field: &'static str,
        /// The volume.
        volume: String,
        /// Keys that would do.
        keys: &'static str,
    },
    /// No base64.
    #[error("{field}: expected standard base64, found something else")]
    Base64 {
        /// Which field.
        field: &'static str,
    },
    /// More than is served.
    #[error("{field}: expected at most {limit} octets, found {found}")]
    TooLarge {
        /// Which field.
        field: &'static str,
        /// In octets.
        limit: usize,
        /// In octets.
        found: usize,
    },
    /// Network data in a form that no network document can be made of.
    #[error(
        "networkData: expected cloud-init's network-config, version 1 or 2, or OpenStack's network_data.json with links and \
         networks; found another form, which the VM reads from its disk only"
    )]
    NetworkForm,
    /// A custom key that is left out.
    #[error("metaData: key `{key}` is left out: {reason}")]
    Metadata {
        /// The key.
        key: String,
        /// Why.
        reason: &'static str,
    },
    /// A key of a Secret that is no public key.
    #[error("accessCredentials: `{file}` of Secret `{secret}` is left out: expected public keys, one a line")]
    PublicKey {
        /// The Secret.
        secret: String,
        /// Its key.
        file: String,
    },
    /// A service account's token that cannot be given out.
    #[error("token: expected a JWT with an expiry, found something else")]
    Token,
    /// There is no memory for the record.
    #[error("{0}")]
    Room(NoRoom),
    /// The VMI gives a record that is refused.
    #[error("{0}")]
    Record(String),
}

impl Problem {
    /// True for one that keeps the whole VM from being served, until it is put right: a guest that boots with half of
    /// what it should be told never asks for the rest.
    #[must_use]
    pub fn withholds(&self) -> bool {
        matches!(
            self,
            Self::Volume { .. }
                | Self::Unreadable { .. }
                | Self::Key { .. }
                | Self::Base64 { .. }
                | Self::TooLarge { .. }
                | Self::Room(_)
                | Self::Record(_)
        )
    }

    /// True for one that passes by itself in the first moments of a pod.
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
        )
    }
}
