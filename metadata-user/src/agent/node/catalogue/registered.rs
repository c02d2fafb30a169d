//! Records that clients registered with the agent, through the API or a hook.

use std::collections::BTreeMap;
use std::sync::Arc;

use metadata_content::record::{Record, RecordLimits};
use metadata_content::source::RecordSource;
use metadata_feed::FeedEvent;
use metadata_feed::memory_budget::MemoryExhausted;
use metadata_feed::registry::{MAX_RECORDS, RecordId};

use super::{RecordCatalogue, TouchedPorts};
use crate::agent::registration_store::RegistrationStore;
use crate::agent::slots::IdentityName;

/// Where registered records are stored, and how many there may be.
#[derive(Debug)]
pub(crate) struct RegistrationConfig {
    pub(crate) shelf: RegistrationStore,
    pub(crate) limits: RecordLimits,
    /// Maximum number of records of each source.
    pub(crate) most: usize,
}

/// The registered records' storage and entity tags.
#[derive(Debug)]
pub(super) struct RegisteredRecords {
    shelving: RegistrationConfig,
    etags: BTreeMap<RecordId, Arc<str>>,
}

impl Default for RegisteredRecords {
    fn default() -> Self {
        let shelving = RegistrationConfig {
            shelf: RegistrationStore::below(None),
            limits: RecordLimits::DEFAULT,
            most: MAX_RECORDS,
        };
        Self { shelving, etags: BTreeMap::new() }
    }
}

/// A record and its entity tag.
#[derive(Clone, Debug)]
pub(crate) struct TaggedRecord {
    /// The record.
    pub record: Arc<Record>,
    /// A hash of the record's content, quoted as HTTP writes it.
    pub etag: Arc<str>,
}

/// Why a record cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationConflict {
    /// Another VM's record claims the same MAC on the same port.
    Taken {
        /// The MAC and the port.
        identity: IdentityName,
        /// The other record.
        by: RecordId,
    },
    /// Another record of the same source describes the same VM.
    SameVm {
        /// The other record.
        by: RecordId,
    },
    /// The source has the maximum number of records.
    Full {
        /// The limit.
        most: usize,
    },
    /// The memory for records is used up.
    Memory(MemoryExhausted),
    /// No NIC of the record has a port, so the client would wait for ever.
    Unplaced,
}

impl RecordCatalogue {
    /// Sets where registered records are stored, and reads those stored there.
    pub(crate) fn set_shelf(&mut self, shelving: RegistrationConfig) -> TouchedPorts {
        self.registered = RegisteredRecords { shelving, ..RegisteredRecords::default() };
        self.read_registered()
    }

    /// Sets the limits of records that are registered later.
    pub(crate) fn limit_registered(&mut self, limits: RecordLimits, most: usize) {
        (self.registered.shelving.limits, self.registered.shelving.most) = (limits, most);
    }

    /// Reads token keys, mailboxes and registered records again after the previous agent has saved them.
    pub(crate) fn reload_state(&mut self) -> TouchedPorts {
        self.state.reload();
        let mut touched = self.read_registered();
        // The other agent may have changed the events of any VM.
        touched.merge(self.ports_with_other_events(None));
        touched
    }

    fn read_registered(&mut self) -> TouchedPorts {
        let sources = RecordSource::ALL.into_iter().filter(|source| source.is_kept());
        sources.clone().for_each(|source| self.registry.begin(source));
        self.registered.etags.clear();
        let stored = self.registered.shelving.shelf.read(&self.registered.shelving.limits);
        let mut touched = TouchedPorts::default();
        for (id, record) in stored.into_iter().filter(|(id, _)| id.source.is_kept()) {
            match etag(&record) {
                Ok(etag) => touched.merge(self.register(&id, TaggedRecord { record: record.into(), etag })),
                Err(error) => tracing::warn!(record = %id, "not served: {error}"),
            }
        }
        sources.for_each(|source| touched.merge(self.on_event(source, FeedEvent::Synced)));
        self.log_new_conflicts();
        touched
    }

    /// The entity tag of a registered record.
    #[must_use]
    pub(crate) fn etag_of(&self, id: &RecordId) -> Option<Arc<str>> {
        self.registered.etags.get(id).cloned()
    }

    /// The last valid record of a name.
    #[must_use]
    pub(crate) fn last_record(&self, id: &RecordId) -> Option<Arc<Record>> {
        self.registry.record(id).cloned()
    }

    /// Checks whether a record may be registered under a name. With `waits`, the client will wait for its ports.
    ///
    /// # Errors
    /// [`RegistrationConflict`]: the reason why it may not.
    pub(crate) fn check_admission(
        &self,
        id: &RecordId,
        record: &Record,
        waits: bool,
    ) -> Result<(), RegistrationConflict> {
        let vm = record.owner();
        let same = self.registry.of_vm(&vm).find(|other| other.source == id.source && *other != id);
        if let Some(by) = same {
            return Err(RegistrationConflict::SameVm { by: by.clone() });
        }
        let places = self.plan.places(record);
        if waits && places.is_empty() {
            return Err(RegistrationConflict::Unplaced);
        }
        for identity in places {
            let holder = self.plan.holder(&identity).filter(|holder| *holder != id);
            let other =
                holder.filter(|holder| self.record(holder).is_some_and(|r| r.owner_text() != vm.as_str()));
            if let Some(by) = other.cloned() {
                return Err(RegistrationConflict::Taken { identity, by });
            }
        }
        let most = self.registered.shelving.most;
        if self.registry.record(id).is_none() && self.registry.count(id.source) >= most {
            return Err(RegistrationConflict::Full { most });
        }
        self.room.fits(id, record).map_err(RegistrationConflict::Memory)
    }

    /// Registers a record, and replaces the record of that name.
    pub(crate) fn register(&mut self, id: &RecordId, tagged: TaggedRecord) -> TouchedPorts {
        let TaggedRecord { record, etag } = tagged;
        self.registered.etags.insert(id.clone(), etag);
        let touched = self.on_event(id.source, FeedEvent::Upsert { key: id.key.as_ref().into(), record });
        self.log_new_conflicts();
        touched
    }

    /// Removes the record that is registered under a name.
    pub(crate) fn unregister(&mut self, id: &RecordId) -> TouchedPorts {
        self.registered.etags.remove(id);
        let touched = self.on_event(id.source, FeedEvent::Remove { key: id.key.as_ref().into() });
        self.log_new_conflicts();
        touched
    }
}

impl TouchedPorts {
    fn merge(&mut self, mut other: Self) {
        self.named.append(&mut other.named);
        self.others.append(&mut other.others);
    }
}

/// The entity tag of a record, as HTTP writes it. Records of equal content have equal tags, in YAML or JSON.
///
/// # Errors
/// If a path in the record is not UTF-8.
pub(crate) fn etag(record: &Record) -> serde_json::Result<Arc<str>> {
    use sha2::{Digest as _, Sha256};
    let digest = Sha256::digest(record.to_json()?.as_bytes());
    Ok(format!("\"{}\"", metadata_common::printable::hex(&digest[..16])).into())
}
