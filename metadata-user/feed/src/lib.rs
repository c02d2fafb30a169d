//! Feeds: the sources of records.
//!
//! A feed finds records, validates them and publishes each change to the agent. Whatever happens to the source, a VM
//! keeps its last good record.

pub mod check;
pub mod contact;
pub mod directory;
pub mod hold;
#[cfg(feature = "kubevirt")]
pub mod kubevirt;
pub mod libvirt;
pub mod listen;
pub mod memory_budget;
pub mod openstack;
#[cfg(feature = "kubevirt")]
pub mod pods;
pub mod proxmox;
pub mod publisher;
pub mod record_part;
pub mod registry;
pub mod snapshot;
pub mod source;
pub mod state;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use metadata_common::mac::Mac;
use metadata_common::run::home_hint;

use crate::memory_budget::MemoryExhausted;
use metadata_common::port::PortName;
use metadata_content::record::{Record, RecordError};

/// Why a feed cannot use a record, or cannot run.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FeedError {
    /// The record is invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The kernel refused an access to a file or directory.
    #[error("{}: expected {expected}: {error}{}", path.display(), home_hint(path, error))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the feed needs from it.
        expected: &'static str,
        /// The kernel's error.
        error: Arc<io::Error>,
    },
    /// A VM is not served, or only by an earlier version of its record.
    #[error("{reason}")]
    Vm {
        /// The fault and its remedy.
        reason: String,
    },
    /// The latest version of the record is in force, but a part of the VM is not served.
    #[error("{reason}")]
    Part {
        /// The fault and its remedy.
        reason: String,
    },
    /// The record exceeds the memory for records.
    #[error(transparent)]
    Room(#[from] MemoryExhausted),
    /// The record of this VM cannot be used.
    #[error("{error}")]
    OfVm {
        /// The VM, as the source names it.
        vm: RejectedVm,
        /// Why.
        error: Box<FeedError>,
    },
    /// A file has the wrong content.
    #[error("{}: expected {expected}, found {found}; {remedy}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: String,
        /// What the file contains instead.
        found: String,
        /// How to correct it.
        remedy: &'static str,
    },
}

/// Most bytes of the name, the UUID or the owner of a VM whose record cannot be used.
pub const VM_TEXT_BYTES: usize = 256;

/// The VM of a record that cannot be used, as far as its source tells: people ask for the VM by these names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RejectedVm {
    /// Its name; empty if it is not known.
    pub name: String,
    /// Its UUID; empty if it is not known.
    pub uuid: String,
    /// The owner, if the record has `vm.owner`.
    pub owner: Option<String>,
}

impl RejectedVm {
    /// The VM that a document describes which is not a valid record. `None` if it has no name, or texts longer than a
    /// VM's.
    #[must_use]
    pub fn described(document: &serde_json::Value) -> Option<Self> {
        let text = |field: &str| document["vm"][field].as_str().unwrap_or_default().to_owned();
        let (name, uuid, owner) = (text("name"), text("uuid"), text("owner"));
        let is_usable =
            !name.is_empty() && [&name, &uuid, &owner].iter().all(|text| text.len() <= VM_TEXT_BYTES);
        is_usable.then(|| Self { name, uuid, owner: Some(owner).filter(|owner| !owner.is_empty()) })
    }

    /// The owner of what the agent would keep for it.
    #[must_use]
    pub fn owner(&self) -> &str {
        self.owner.as_ref().unwrap_or(&self.uuid)
    }

    /// True if people call it by this name, UUID or owner.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        !name.is_empty()
            && (self.name == name || self.uuid.eq_ignore_ascii_case(name) || self.owner() == name)
    }
}

impl FeedError {
    /// The same error about the record of this VM, if the VM is known.
    #[must_use]
    pub fn of(self, vm: Option<RejectedVm>) -> Self {
        match vm {
            Some(vm) => Self::OfVm { vm, error: Box::new(self) },
            None => self,
        }
    }

    /// What was found, for a check that says itself what it expected.
    #[must_use]
    pub fn found(&self) -> String {
        match self {
            Self::Io { path, error, .. } => format!("{}: {error}{}", path.display(), home_hint(path, error)),
            error => error.to_string(),
        }
    }

    /// The VM whose record cannot be used, if the source tells it.
    #[must_use]
    pub fn vm(&self) -> Option<&RejectedVm> {
        if let Self::OfVm { vm, .. } = self { Some(vm) } else { None }
    }
}

/// An event that a feed publishes.
#[derive(Clone, Debug)]
pub enum FeedEvent {
    /// A record is new or has changed. The feed has read its payloads and credentials. A credential that
    /// cannot be read is absent.
    Upsert {
        /// The record's name within the feed.
        key: String,
        /// The complete record.
        record: Arc<Record>,
    },
    /// A record will follow, and these identities belong to it: the agent holds their requests. The event does not
    /// replace a good record, and keeps one of the feed's former run. A later `Upsert`, `Expect` or `Remove` of the key
    /// replaces it.
    Expect {
        /// The record's name within the feed.
        key: String,
        /// The ports and MACs of the record.
        identities: Vec<(PortName, Mac)>,
    },
    /// A record is gone, or is no longer expected.
    Remove {
        /// The record's name within the feed.
        key: String,
    },
    /// A good record goes if it has an identity that is not one of these: its VM has lost that NIC, which may be another
    /// VM's by now. A feed says so before an `Expect` or `Rejected` that would keep the record, also one of the feed's
    /// former run.
    RemoveUnless {
        /// The record's name within the feed.
        key: String,
        /// The ports and MACs that its VM has.
        identities: Vec<(PortName, Mac)>,
    },
    /// A record is invalid or exceeds a limit. Its last good version stays in force. With [`FeedError::Part`] that is
    /// the version just published. An `Upsert` takes the rejection back, so a feed repeats one that still holds.
    Rejected {
        /// The record's name within the feed.
        key: String,
        /// The reason and the remedy.
        error: FeedError,
    },
    /// The feed has published everything that existed at its start, or at its last restart.
    Synced,
}

/// Runs work that waits for a disk or for the kernel on a thread that may wait.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // The task is never cancelled: what is left is its panic.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
