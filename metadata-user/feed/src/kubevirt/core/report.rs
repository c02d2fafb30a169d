//! What the owner of a VMI is told.

use crate::kubevirt::Vmi;

/// The reason of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// `ImdsReady`
    Ready,
    /// `ImdsDegraded`
    Degraded,
}

impl Reason {
    /// As the Event says it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ImdsReady",
            Self::Degraded => "ImdsDegraded",
        }
    }

    /// The Event's type.
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
    /// Its UID.
    pub uid: String,
    /// Why.
    pub reason: Reason,
    /// In words.
    pub message: String,
}

impl Report {
    pub(super) fn of(vmi: &Vmi, reason: Reason, message: String) -> Self {
        let meta = &vmi.metadata;
        let (namespace, name, uid) = (meta.namespace.clone(), meta.name.clone(), meta.uid.clone());
        Self { namespace, name, uid, reason, message }
    }
}
