//! Reports for the owner of a VMI, as Kubernetes Events.

use std::collections::BTreeMap;

use crate::kubevirt::Vmi;

/// The reason field of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// `ImdsReady`: the VM is served.
    Ready,
    /// `ImdsDegraded`: the VM is not served, or not completely.
    Degraded,
}

impl Reason {
    /// The reason as the Event spells it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ImdsReady",
            Self::Degraded => "ImdsDegraded",
        }
    }

    /// The Event's type: `Normal` or `Warning`.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Ready => "Normal",
            Self::Degraded => "Warning",
        }
    }
}

/// An Event on a VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The VMI's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, so that the Event belongs to this VMI and not to a later one of its name.
    pub uid: String,
    /// Whether the VM is served or degraded.
    pub reason: Reason,
    /// The message for the owner.
    pub message: String,
}

impl Report {
    pub(super) fn of(vmi: &Vmi, reason: Reason, message: String) -> Self {
        let meta = &vmi.metadata;
        let (namespace, name, uid) = (meta.namespace.clone(), meta.name.clone(), meta.uid.clone());
        Self { namespace, name, uid, reason, message }
    }
}

/// How the agent serves each record of the feed, by the record's key.
pub type Services = BTreeMap<String, Service>;

/// How the agent serves a record, as the node's steering shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Service {
    /// Programs are attached to all of its ports, and requests of its identities get answers.
    Ready,
    /// A port does not exist yet, or is about to be attached.
    Waiting,
    /// A port cannot be served: the reason. It may pass by itself.
    Failed(String),
    /// It is served, but frames of another guest or MAC arrive on a port: both MACs.
    Mismatched(String),
}
