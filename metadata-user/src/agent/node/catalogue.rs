//! The wanted state: the records of all sources, and the plan made of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_content::mailbox::Mailbox;
use metadata_content::record::event::{EventRefused, ScheduledEvent, VmEvents};
use metadata_content::record::{Owner, Record, RecordLimits};
use metadata_content::source::RecordSource;
use metadata_content::store::Responses;
use metadata_feed::memory_budget::{MemoryBudget, MemoryExhausted};
use metadata_feed::registry::{Change, MAX_RECORDS, RecordId, Registry};
use metadata_feed::state::mailboxes::Mailboxes;
use metadata_feed::state::save_queue::{SaveQueue, UnsavedFiles};
use metadata_feed::{FeedError, FeedEvent};
use tracing::{debug, warn};

use super::answers::Renderer;
use crate::agent::plan::{ActiveRecords, Plan};
use crate::agent::registration_store::RegistrationStore;
use crate::agent::slots::IdentityName;
use crate::agent::state::{NodeState, unix_now};
use crate::config::{Config, PortSpec};
use crate::metrics::BackgroundCounters;

/// The records of all sources, and the plan made of those in force.
pub(crate) struct RecordCatalogue {
    registry: Registry,
    /// Memory that records use, and its limit.
    room: Arc<MemoryBudget>,
    /// The records in force.
    records: ActiveRecords,
    plan: Plan,
    renderer: Renderer,
    state: NodeState,
    registered: RegisteredRecords,
    /// Conflicts that were logged.
    conflicts: HashSet<String>,
    refusals: RefusalLog,
}

/// What [`RecordCatalogue::clear_guest_data`] has done.
#[derive(Debug)]
pub(crate) struct ClearedData {
    /// The owner of the VM's state.
    pub(crate) vm: Owner,
    /// Whether the guest had written anything.
    pub(crate) found: bool,
    /// The queue that writes the removal.
    pub(crate) saves: SaveQueue,
}

/// What to do with the events of a VM.
#[derive(Debug)]
pub(crate) enum EventChange {
    /// Read them.
    Look,
    /// Add an event, or replace the one of its id.
    Add(ScheduledEvent),
    /// Cancel the event of this id.
    Cancel(String),
}

impl EventChange {
    /// Makes the change for the instance-id of the VM's record. Returns whether anything has changed.
    ///
    /// # Errors
    /// [`EventRefused`]: nothing has changed.
    pub(crate) fn apply(
        self,
        events: &VmEvents,
        instance: &str,
        now_unix: u64,
    ) -> Result<bool, EventRefused> {
        match self {
            Self::Look => Ok(false),
            Self::Add(event) => events.add(instance, event, now_unix),
            Self::Cancel(event) => events.cancel(&event, now_unix),
        }
    }
}

/// What [`RecordCatalogue::change_events`] has done.
#[derive(Debug)]
pub(crate) struct ChangedEvents {
    /// Whether anything has changed.
    pub(crate) changed: bool,
    /// The VM's mailbox, which has all of its events.
    pub(crate) mailbox: Arc<Mailbox>,
    /// The owner of the VM's state.
    pub(crate) vm: Owner,
    /// The queue that writes the change.
    pub(crate) saves: SaveQueue,
}

/// Ports whose plan may have changed, for [`NodePorts::touch`](super::NodePorts::touch).
#[must_use]
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TouchedPorts {
    /// Ports of records that arrived or changed. The measured wait of their guests begins now.
    pub(super) named: BTreeSet<PortName>,
    /// Other ports.
    pub(super) others: BTreeSet<PortName>,
}

impl RecordCatalogue {
    /// Creates a catalogue without records.
    #[must_use]
    pub(crate) fn new(state: NodeState, room: Arc<MemoryBudget>, configured: &[PortSpec]) -> Self {
        Self {
            registry: Registry::default(),
            room,
            records: ActiveRecords::new(),
            plan: Plan::new(configured),
            renderer: Renderer::new(),
            state,
            registered: RegisteredRecords::default(),
            conflicts: HashSet::new(),
            refusals: RefusalLog::default(),
        }
    }

    #[must_use]
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    #[must_use]
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A record in force.
    #[must_use]
    pub(super) fn record(&self, id: &RecordId) -> Option<&Arc<Record>> {
        self.records.get(id)
    }

    /// The records in force.
    pub(super) fn records(&self) -> impl Iterator<Item = (&RecordId, &Arc<Record>)> {
        self.records.iter()
    }

    /// The memory that all records share.
    #[must_use]
    pub(crate) fn room(&self) -> &Arc<MemoryBudget> {
        &self.room
    }

    /// Time spent on rendering records since the start.
    #[must_use]
    pub(super) fn rendering(&self) -> Duration {
        self.renderer.spent()
    }

    /// Counts of messages to sinks and of mailbox files.
    #[must_use]
    pub(super) fn errands(&self) -> BackgroundCounters {
        self.state.counts()
    }

    /// Every valid record, in force or not, of the sources that start from the snapshot while they are unavailable. The
    /// records of others stay out of the file: they may hold secrets, and nobody would read them.
    #[must_use]
    pub(crate) fn snapshot_records(&self) -> Vec<(RecordId, Arc<Record>)> {
        let records = self.registry.records().filter(|(id, _)| id.source.is_in_snapshot());
        records.map(|(id, record)| (id.clone(), Arc::clone(record))).collect()
    }

    /// The responses of a record in force.
    pub(super) fn responses(&mut self, id: &RecordId) -> Option<Arc<Responses>> {
        let record = self.records.get(id)?;
        Some(self.renderer.responses(id, record, &self.state))
    }

    /// Begins a new listing of a source. Records that the source does not repeat are removed once it is synced.
    pub(crate) fn begin(&mut self, source: RecordSource) {
        self.registry.begin(source);
        self.room.forget_pending(source);
    }

    /// Applies an event of a source.
    pub(super) fn on_event(&mut self, source: RecordSource, event: FeedEvent) -> TouchedPorts {
        let changed = match &event {
            FeedEvent::Upsert { key, .. } | FeedEvent::Remove { key } => Some(RecordId::new(source, key)),
            // Without a record the memory is that of a record in the queue.
            FeedEvent::RemoveUnless { key, .. } => {
                Some(RecordId::new(source, key)).filter(|id| self.registry.record(id).is_some())
            }
            _ => None,
        };
        let synced = matches!(event, FeedEvent::Synced);
        let event = self.admit(source, event);
        let mut touched = TouchedPorts::default();
        for change in self.registry.apply(source, event) {
            match change {
                Change::Put(id, record) => touched.named.append(&mut self.put(id, record)),
                Change::Expect(id, identities) => touched.named.append(&mut self.expect(&id, identities)),
                Change::Drop(id) => touched.others.append(&mut self.remove(&id)),
            }
        }
        if synced {
            let registry = &self.registry;
            self.room.keep_only(source, |id| registry.record(id).is_some());
        }
        if let Some(id) = changed.filter(|id| self.registry.record(id).is_none()) {
            self.room.give_back(&id);
        }
        touched
    }

    /// The UUIDs that several VMs in force share, and their records.
    pub(super) fn shared_uuids(&self) -> BTreeMap<&str, Vec<&RecordId>> {
        let mut of_uuid: BTreeMap<&str, Vec<(&RecordId, &str)>> = BTreeMap::new();
        for (id, record) in &self.records {
            of_uuid.entry(record.vm.uuid.as_str()).or_default().push((id, record.owner_text()));
        }
        of_uuid.retain(|_, records| records.iter().any(|(_, owner)| *owner != records[0].1));
        let ids = |records: Vec<(_, _)>| records.into_iter().map(|(id, _)| id).collect();
        of_uuid.into_iter().map(|(uuid, records)| (uuid, ids(records))).collect()
    }

    /// Reserves memory for a record. Without memory, the record becomes a rejection. So does a record of a platform's
    /// tenant without the owner that the platform assigned.
    fn admit(&mut self, source: RecordSource, event: FeedEvent) -> FeedEvent {
        match event {
            FeedEvent::Upsert { key, record } if !record.owner().fits(source) => {
                let id = RecordId::new(source, &key);
                warn!(record = %id, owner = record.owner_text(), "refused: the owner is not the platform's");
                let reason = format!("expected the owner that {} assigned, found another", source.name());
                FeedEvent::Rejected { key, error: FeedError::Vm { reason } }
            }
            FeedEvent::Upsert { key, record } => {
                let id = RecordId::new(source, &key);
                let known = self.registry.record(&id);
                // A feed that starts again repeats known records.
                match (known.filter(|known| ***known == *record), self.room.arrive(&id, &record)) {
                    (Some(known), _) => FeedEvent::Upsert { key, record: Arc::clone(known) },
                    (None, Ok(())) => {
                        FeedEvent::Upsert { key, record: self.renderer.compact(source, record) }
                    }
                    (None, Err(no_room)) => {
                        let error = FeedError::Room(no_room);
                        log_refusal(&self.registry, &mut self.refusals, &id, &error);
                        FeedEvent::Rejected { key, error }
                    }
                }
            }
            FeedEvent::Rejected { key, error } => {
                let id = RecordId::new(source, &key);
                log_refusal(&self.registry, &mut self.refusals, &id, &error);
                FeedEvent::Rejected { key, error }
            }
            other => other,
        }
    }

    /// Applies a record that comes into force or has changed.
    fn put(&mut self, id: RecordId, record: Arc<Record>) -> BTreeSet<PortName> {
        debug!(record = %id, generation = record.generation, vm = %record.vm.name, "record in force");
        let touched = self.plan.put(&id, Some(&record));
        if let Some(last) = self.records.insert(id, Arc::clone(&record))
            && last.owner_text() != record.owner_text()
        {
            self.state.on_vm_removed(last.owner());
        }
        touched
    }

    /// Notes that a record is expected: requests of its identities wait for it.
    fn expect(&mut self, id: &RecordId, identities: Vec<(PortName, Mac)>) -> BTreeSet<PortName> {
        debug!(record = %id, "record expected");
        self.plan.expect(id, identities.into_iter().map(|(port, mac)| IdentityName { port, mac }))
    }

    /// Removes a record that is no longer in force.
    fn remove(&mut self, id: &RecordId) -> BTreeSet<PortName> {
        debug!(record = %id, "record removed");
        self.renderer.forget(id);
        if let Some(record) = self.records.remove(id) {
            self.state.on_vm_removed(record.owner());
        }
        self.plan.put(id, None)
    }

    /// Logs the refusals that were held back, if they still hold.
    pub(crate) fn log_held_refusals(&mut self, now: Instant) {
        for (id, line) in self.refusals.due(now, |id| self.registry.refusal(id).is_some()) {
            warn!(record = %id, "{line}");
        }
    }

    /// Applies the configured ports, the memory limit and the age of token keys.
    pub(super) fn configure(&mut self, config: &Config) -> TouchedPorts {
        let (plan, others) = self.plan.reconfigured(&config.ports, &self.records);
        self.plan = plan;
        self.room.set_limit(config.record_bytes());
        self.state.set_rotate_after(config.rotate_token_key_days);
        self.state.follow_given_key();
        TouchedPorts { others, ..TouchedPorts::default() }
    }

    /// Logs conflicts that are new. Call it after records have changed.
    pub(crate) fn log_new_conflicts(&mut self) {
        let conflicts: HashSet<String> = self.plan.conflicts().map(|conflict| conflict.to_string()).collect();
        for conflict in conflicts.difference(&self.conflicts) {
            warn!("record {conflict}");
        }
        self.conflicts = conflicts;
    }

    /// Rotates old token keys, deletes unused mailboxes, and frees unused payloads.
    pub(super) fn tend(&mut self) {
        let known: HashSet<&str> = self.records.values().map(|record| record.owner_text()).collect();
        self.state.tend(&known);
        self.renderer.sweep();
    }

    /// Removes what the guest of a record's VM wrote. The removal is on disk once the queue of [`Self::saves`] is
    /// written. `None` if there is no such record.
    pub(crate) fn clear_guest_data(&self, id: &RecordId) -> Option<ClearedData> {
        let vm = self.registry.record(id)?.owner();
        let found = self.state.clear(&vm);
        Some(ClearedData { vm, found, saves: self.state.saves().clone() })
    }

    /// Changes or reads the events of a record's VM. `None` if there is no such record. The ports are those whose
    /// answers change with them.
    pub(crate) fn change_events(
        &mut self,
        id: &RecordId,
        change: EventChange,
    ) -> Option<(Result<ChangedEvents, EventRefused>, TouchedPorts)> {
        // The state of a VM is its own while its record is in force, and is loaded with that.
        let Some(record) = self.records.get(id) else {
            self.registry.record(id)?;
            return Some((Err(EventRefused::NotInForce), TouchedPorts::default()));
        };
        let vm = self.state.vm(id, record);
        let changed = change.apply(vm.mailbox.events(), record.instance_id(), unix_now());
        let owner = record.owner();
        let mut touched = TouchedPorts::default();
        if changed == Ok(true) {
            self.state.save_events();
            touched = self.ports_with_other_events(Some(&owner));
        }
        let saves = self.state.saves().clone();
        let done = changed.map(|changed| ChangedEvents { changed, mailbox: vm.mailbox, vm: owner, saves });
        Some((done, touched))
    }

    /// The ports whose answers were rendered with other events than those of their VM now, of one VM or of all.
    fn ports_with_other_events(&mut self, vm: Option<&Owner>) -> TouchedPorts {
        let mut others = BTreeSet::new();
        let is_meant = |record: &Record| vm.is_none_or(|vm| record.owner_text() == vm.as_str());
        let meant = self.records.iter().filter(|(_, record)| is_meant(record));
        for (id, record) in meant.filter(|(id, record)| self.renderer.is_outdated(id, record)) {
            others.append(&mut self.plan.put(id, Some(record)));
        }
        TouchedPorts { others, ..TouchedPorts::default() }
    }

    /// Writes everything that is not on disk yet. Returns what the disk refused and nobody can deliver again.
    pub(crate) fn save(&self) -> Option<UnsavedFiles> {
        self.state.save()
    }

    /// The mailboxes of all VMs.
    #[must_use]
    pub(crate) fn mailboxes(&self) -> &Arc<Mailboxes> {
        self.state.mailboxes()
    }

    /// The queue that writes the files of the state directory.
    #[must_use]
    pub(crate) fn saves(&self) -> &SaveQueue {
        self.state.saves()
    }

    /// Troubles with the state directory, for the operator.
    #[must_use]
    pub(super) fn state_troubles(&self) -> Vec<String> {
        self.state.troubles()
    }

    /// The file of the operator's token keys, if it is missing while its keys stay in use.
    pub(super) fn missing_token_key(&self) -> Option<&Path> {
        self.state.missing_given_key()
    }
}

/// What a refusal means for a VM, in words. `is_good` says whether the registry has a good version of the record.
fn effect_of_refusal(is_good: bool, error: &FeedError) -> &'static str {
    match (is_good, error) {
        (true, FeedError::Part { .. }) => "served in part",
        (true, _) => "refused; the last valid record stays in force",
        (false, _) => "refused, so its VM is not served",
    }
}

/// Logs a refusal, unless its record had several lately.
fn log_refusal(registry: &Registry, log: &mut RefusalLog, id: &RecordId, error: &FeedError) {
    let line = format!("{}: {error}", effect_of_refusal(registry.record(id).is_some(), error));
    if let Some(line) = log.admit(id, line, Instant::now()) {
        warn!(record = %id, "{line}");
    }
}

/// Lines about refusals of one record of a tenant within [`REFUSALS_WITHIN`].
const REFUSAL_LINES: u32 = 3;
/// The interval of [`REFUSAL_LINES`], and how long a line is held back at most, beside the interval of looks.
const REFUSALS_WITHIN: Duration = Duration::from_secs(10);

/// The refusals that were logged lately. A tenant has records refused as often as it writes, and each time for another
/// reason; the log has a few of the reasons and then the latest.
#[derive(Debug, Default)]
struct RefusalLog {
    records: HashMap<RecordId, LoggedRefusals>,
}

/// The lines about one record.
#[derive(Debug)]
struct LoggedRefusals {
    begun: Instant,
    /// Lines since `begun`.
    lines: u32,
    /// The latest line, if it was held back.
    held: Option<String>,
}

impl RefusalLog {
    /// Returns the line if it is to be logged now. Otherwise holds it back in place of the one before.
    fn admit(&mut self, id: &RecordId, line: String, now: Instant) -> Option<String> {
        if !id.source.is_of_tenants() {
            return Some(line);
        }
        if self.records.len() >= MAX_RECORDS && !self.records.contains_key(id) {
            // `status` has it.
            return None;
        }
        let logged =
            self.records.entry(id.clone()).or_insert(LoggedRefusals { begun: now, lines: 0, held: None });
        if now.saturating_duration_since(logged.begun) >= REFUSALS_WITHIN {
            *logged = LoggedRefusals { begun: now, lines: 0, held: None };
        }
        if logged.lines >= REFUSAL_LINES {
            logged.held = Some(line);
            return None;
        }
        logged.lines += 1;
        Some(line)
    }

    /// The lines that were held back and are to be logged now, if their records are still refused.
    fn due(&mut self, now: Instant, is_refused: impl Fn(&RecordId) -> bool) -> Vec<(RecordId, String)> {
        let is_over =
            |logged: &LoggedRefusals| now.saturating_duration_since(logged.begun) >= REFUSALS_WITHIN;
        let over = self.records.extract_if(|_, logged| is_over(logged));
        let held = over.filter_map(|(id, logged)| logged.held.map(|line| (id, line)));
        let held: Vec<_> = held.filter(|(id, _)| is_refused(id)).collect();
        for (id, _) in &held {
            self.records.insert(id.clone(), LoggedRefusals { begun: now, lines: 1, held: None });
        }
        held
    }
}

// Records that clients registered with the agent, through the API or a hook.

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
struct RegisteredRecords {
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

    /// Reads the registered records, and removes those that are not stored any more. What the system cannot read now may
    /// still be there, so the version that was read before stays in force.
    fn read_registered(&mut self) -> TouchedPorts {
        let sources = RecordSource::ALL.into_iter().filter(|source| source.is_kept());
        let stored = self.registered.shelving.shelf.read_all(&self.registered.shelving.limits);
        let mut touched = TouchedPorts::default();
        if !stored.is_partial {
            sources.clone().for_each(|source| self.registry.begin(source));
            let unread: BTreeMap<RecordId, String> = self
                .registered
                .etags
                .keys()
                .filter_map(|id| Some((id.clone(), stored.why_unread(id)?.to_owned())))
                .collect();
            self.registered.etags.retain(|id, _| unread.contains_key(id));
            for (id, reason) in unread {
                let reason = format!("expected to read its file, found: {reason}; register it again");
                let event =
                    FeedEvent::Rejected { key: id.key.as_ref().into(), error: FeedError::Vm { reason } };
                touched.merge(self.on_event(id.source, event));
            }
        }
        for (id, record) in stored.records.into_iter().filter(|(id, _)| id.source.is_kept()) {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::time::Instant;

    use metadata_common::port::PortName;
    use metadata_content::account::{Account, CONNECTIONS_PER_VM, ConnectionUsage, Resource};
    use metadata_content::record::{Dialect, Owner, Record, RecordLimits};
    use metadata_content::source::RecordSource;
    use metadata_content::store::{Responses, VmState};
    use metadata_content::token::TokenKind;
    use metadata_feed::memory_budget::MemoryBudget;
    use metadata_feed::registry::RecordId;
    use metadata_feed::{FeedError, FeedEvent};

    use super::{
        REFUSAL_LINES, REFUSALS_WITHIN, RecordCatalogue, RefusalLog, RegistrationConfig, TouchedPorts,
        effect_of_refusal,
    };
    use crate::agent::registration_store::{self, RegistrationStore};
    use crate::agent::state::NodeState;
    use crate::config::Config;

    fn catalogue() -> RecordCatalogue {
        let config = Config { state: None, ..Config::default() };
        let (state, _errands) = NodeState::open(&config).expect("a state in memory");
        RecordCatalogue::new(state, MemoryBudget::new(config.record_bytes()), &[])
    }

    fn upsert(port: &str, generation: u32) -> FeedEvent {
        let text = format!(
            "schema: vmrecord/1\ngeneration: {generation}\nvm: {{uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: web, \
         project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: web}}\n\
         placement: {{region: r, zone: z}}\ninstance_type: t\nimage: {{id: i}}\n\
         network: {{nics: [{{id: n0, name: eth0, mac: '52:54:00:00:00:0a', port: {{ifname: {port}}}, \
         network_id: n, addresses: [{{method: dhcp4}}]}}]}}\n"
        );
        FeedEvent::Upsert {
            key: "web".into(),
            record: Arc::new(Record::parse("web", &text).expect("a record").0),
        }
    }

    #[test]
    fn a_record_touches_its_old_and_new_ports() {
        let mut catalogue = catalogue();
        let ports = |names: &[&str]| names.iter().map(|name| PortName::local(*name)).collect();
        let named = |names| TouchedPorts { named: ports(names), ..TouchedPorts::default() };
        assert_eq!(catalogue.on_event(RecordSource::File, upsert("tap0", 1)), named(&["tap0"]));
        assert_eq!(catalogue.on_event(RecordSource::File, upsert("tap1", 2)), named(&["tap0", "tap1"]));
        let removed = catalogue.on_event(RecordSource::File, FeedEvent::Remove { key: "web".into() });
        assert_eq!(removed, TouchedPorts { others: ports(&["tap1"]), ..TouchedPorts::default() });
        assert_eq!(catalogue.room().usage().used, 0, "its memory is free again");
    }

    /// A record of KubeVirt with the UUID of [`upsert`].
    fn owned(key: &str, owner: Option<Owner>, port: &str) -> FeedEvent {
        let FeedEvent::Upsert { record, .. } = upsert(port, 1) else { unreachable!("an upsert") };
        let mut record = (*record).clone();
        record.vm.owner = owner;
        FeedEvent::Upsert { key: key.into(), record: record.into() }
    }

    #[test]
    fn vms_that_share_a_uuid_share_nothing_else_and_are_listed() {
        let mut catalogue = catalogue();
        let mut vm = |key: &str, namespace: &str, port: &str| {
            let owner = Owner::kubevirt(namespace, "test", "u");
            let _touched = catalogue.on_event(RecordSource::Kubevirt, owned(key, Some(owner), port));
            let id = RecordId::new(RecordSource::Kubevirt, key);
            catalogue.responses(&id).expect("it is in force").vm().clone()
        };
        let (victim, attacker) = (vm("a/test", "a", "tap0"), vm("b/test", "b", "tap1"));
        let moved = vm("a/test@pod", "a", "tap2");
        victim.mailbox.set_attribute("ns", "key", b"v").expect("small");
        victim.mailbox.post_password(b"p").expect("the first");
        assert_eq!(attacker.mailbox.attribute("ns", "key"), None);
        assert_eq!(attacker.mailbox.posted_password(), "");
        let token = victim.keyring.mint(TokenKind::Aws, &victim.owner, 60, 1);
        assert!(victim.keyring.verify(TokenKind::Aws, &victim.owner, token.as_bytes(), 2));
        assert!(!attacker.keyring.verify(TokenKind::Aws, &attacker.owner, token.as_bytes(), 2));
        let worker = Arc::new(Account::of_worker());
        let open = |_| ConnectionUsage::open(Arc::clone(attacker.mailbox.account()), Arc::clone(&worker));
        let _held: Vec<_> = (0..CONNECTIONS_PER_VM).map(open).collect();
        let has_room = |vm: &VmState| vm.mailbox.account().has_room(Resource::Connections, 1);
        assert_eq!([&attacker, &victim, &moved].map(has_room), [false, true, true]);
        assert!(
            Arc::ptr_eq(&victim.mailbox, &moved.mailbox),
            "a VM that migrates within the node keeps its state"
        );
        let [(_, records)] = &catalogue.shared_uuids().into_iter().collect::<Vec<_>>()[..] else {
            panic!("one UUID is shared")
        };
        let records: Vec<_> = records.iter().map(ToString::to_string).collect();
        assert_eq!(records, ["kubevirt/a/test", "kubevirt/a/test@pod", "kubevirt/b/test"]);
        let _touched = catalogue.on_event(RecordSource::Kubevirt, FeedEvent::Remove { key: "b/test".into() });
        assert!(catalogue.shared_uuids().is_empty(), "two records of one VM are no two VMs");
    }

    #[test]
    fn a_record_of_a_tenant_without_its_platforms_owner_is_refused() {
        let bare: Owner = serde_json::from_str("\"7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d\"").expect("an owner");
        for owner in [None, Some(bare), Some(Owner::proxmox("c", 1, "2"))] {
            let mut catalogue = catalogue();
            let _touched = catalogue.on_event(RecordSource::Kubevirt, owned("a/test", owner.clone(), "tap0"));
            assert!(
                catalogue.record(&RecordId::new(RecordSource::Kubevirt, "a/test")).is_none(),
                "{owner:?}"
            );
            assert_eq!(catalogue.registry().refused().count(), 1);
        }
    }

    #[test]
    fn a_refusal_is_logged_with_what_it_means_for_the_vm() {
        let reason = || "no".to_owned();
        for (is_good, error, expected) in [
            (true, FeedError::Part { reason: reason() }, "served in part"),
            (true, FeedError::Vm { reason: reason() }, "refused; the last valid record stays in force"),
            (false, FeedError::Vm { reason: reason() }, "refused, so its VM is not served"),
            (false, FeedError::Part { reason: reason() }, "refused, so its VM is not served"),
        ] {
            assert_eq!(effect_of_refusal(is_good, &error), expected, "{error:?}");
        }
    }

    #[test]
    fn a_registered_record_that_cannot_be_read_again_stays_in_force_until_its_file_is_gone() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = RegistrationStore::below(Some(directory.path()));
        let ids = [("a", 1), ("b", 2), ("c", 3)].map(|(name, n)| {
            let id = RecordId::new(RecordSource::Api, name);
            let FeedEvent::Upsert { record, .. } = upsert(&format!("tap{n}"), 1) else {
                unreachable!("an upsert")
            };
            let json = record.to_json().expect("JSON").replace("0f5e8a1b2c3d", &format!("{n:012}"));
            store.put(&id, json).expect("stored");
            id
        });
        let mut catalogue = catalogue();
        let shelving = RegistrationConfig { shelf: store, limits: RecordLimits::DEFAULT, most: ids.len() };
        let _touched = catalogue.set_shelf(shelving);
        let below = directory.path().join(registration_store::DIRECTORY);
        let file = |id: &RecordId| below.join(registration_store::file_of(id));
        let served = |catalogue: &RecordCatalogue| {
            ids.each_ref().map(|id| catalogue.record(id).is_some() && catalogue.etag_of(id).is_some())
        };
        assert_eq!(served(&catalogue), [true; 3]);
        // A directory can be opened and not be read.
        fs::remove_file(file(&ids[0])).expect("removed");
        fs::create_dir(file(&ids[0])).expect("a directory");
        fs::remove_file(file(&ids[1])).expect("removed");
        let _touched = catalogue.reload_state();
        assert_eq!(served(&catalogue), [true, false, true]);
        let refusal = catalogue.registry().refusal(&ids[0]).expect("it is told");
        assert!(refusal.contains("expected to read its file"), "{refusal}");
        fs::rename(&below, directory.path().join("aside")).expect("renamed");
        fs::write(&below, "in the way").expect("written");
        let _touched = catalogue.reload_state();
        assert_eq!(served(&catalogue), [true, false, true], "no list, so nothing is known to be gone");
        fs::remove_file(&below).expect("removed");
        let _touched = catalogue.reload_state();
        assert_eq!(served(&catalogue), [false; 3]);
    }

    #[test]
    fn a_record_that_is_refused_again_and_again_has_few_lines_and_then_the_latest() {
        let (mut log, begun) = (RefusalLog::default(), Instant::now());
        let id = RecordId::new(RecordSource::Kubevirt, "a/web");
        let lines = (0..100).filter_map(|n| log.admit(&id, n.to_string(), begun)).count();
        assert_eq!(lines, REFUSAL_LINES as usize);
        let other = RecordId::new(RecordSource::Kubevirt, "b/web");
        assert!(log.admit(&other, "no".into(), begun).is_some(), "another VM's");
        let operators = RecordId::new(RecordSource::File, "web.yaml");
        assert_eq!((0..100).filter_map(|n| log.admit(&operators, n.to_string(), begun)).count(), 100);
        assert!(log.due(begun + REFUSALS_WITHIN / 2, |_| true).is_empty());
        let later = begun + REFUSALS_WITHIN;
        assert_eq!(log.due(later, |_| true), [(id.clone(), "99".to_owned())]);
        // The line counts, and those after it are held back as before.
        let lines = (0..100).filter_map(|n| log.admit(&id, n.to_string(), later)).count();
        assert_eq!(lines, REFUSAL_LINES as usize - 1);
        assert!(log.due(later + REFUSALS_WITHIN, |_| false).is_empty(), "it is refused no longer");
        assert!(log.records.is_empty());
    }

    #[test]
    fn a_record_is_rendered_once_until_it_changes() {
        let mut catalogue = catalogue();
        let id = RecordId::new(RecordSource::File, "web");
        assert!(catalogue.responses(&id).is_none(), "it is not in force");
        let _touched = catalogue.on_event(RecordSource::File, upsert("tap0", 1));
        let first = catalogue.responses(&id).expect("responses");
        let _touched = catalogue.on_event(RecordSource::File, upsert("tap0", 1));
        assert!(Arc::ptr_eq(&first, &catalogue.responses(&id).expect("responses")), "an equal record");
        let _touched = catalogue.on_event(RecordSource::File, upsert("tap0", 2));
        assert!(!Arc::ptr_eq(&first, &catalogue.responses(&id).expect("responses")));
    }

    #[test]
    fn dialects_a_guest_asked_for_are_rendered_in_advance_after_a_change_and_a_restart() {
        let directory = tempfile::tempdir().expect("a directory");
        let config = Config { state: Some(directory.path().to_owned()), ..Config::default() };
        let open = || {
            let (state, _errands) = NodeState::open(&config).expect("a state directory");
            state.take_charge();
            RecordCatalogue::new(state, MemoryBudget::new(config.record_bytes()), &[])
        };
        let responses = |catalogue: &mut RecordCatalogue, generation| {
            let _touched = catalogue.on_event(RecordSource::File, upsert("tap0", generation));
            let id = RecordId::new(RecordSource::File, "web");
            catalogue.responses(&id).expect("responses")
        };
        let has_ec2 = |responses: &Responses| responses.routes().any(|(.., route)| route.dialect() == "ec2");
        let mut catalogue = open();
        let first = responses(&mut catalogue, 1);
        assert!(!has_ec2(&first), "nobody has asked");
        first.vm().mailbox.note_asked([Dialect::Ec2].into_iter().collect());
        assert!(has_ec2(&responses(&mut catalogue, 2)), "after a change");
        assert_eq!(catalogue.save(), None);
        assert!(has_ec2(&responses(&mut open(), 2)), "after a restart");
    }

    #[test]
    fn a_payload_that_its_feed_shares_is_free_once_the_feed_drops_it() {
        let mut catalogue = catalogue();
        let data = bytes::Bytes::from(b"#cloud-config\n".to_vec());
        let FeedEvent::Upsert { record, .. } =
            owned("a/test", Some(Owner::kubevirt("a", "test", "u")), "tap0")
        else {
            unreachable!("an upsert")
        };
        let mut kept = Arc::unwrap_or_clone(record);
        kept.user_data = Some(data.clone().into());
        let kept = Arc::new(kept);
        let event = FeedEvent::Upsert { key: "a/test".into(), record: Arc::clone(&kept) };
        let _touched = catalogue.on_event(RecordSource::Kubevirt, event);
        let id = RecordId::new(RecordSource::Kubevirt, "a/test");
        assert!(Arc::ptr_eq(catalogue.record(&id).expect("in force"), &kept), "one record, not two");
        drop(catalogue.responses(&id).expect("responses"));
        let _touched = catalogue.on_event(RecordSource::Kubevirt, FeedEvent::Remove { key: "a/test".into() });
        catalogue.tend();
        drop(kept);
        assert!(data.is_unique(), "the agent holds it although its VM has gone");
    }
}
