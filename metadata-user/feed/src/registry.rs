//! The registry: the records of all sources, and which of them are in force.
//!
//! Each feed names its records by its own keys. Records with the same owner ([`Record::owner`]) belong to one VM, even
//! from different sources. A UUID that two VMs share does not join them. Those of the highest source are in force. The
//! others stay shadowed until they are the highest. One source may have several records of a VM in force, because a VM
//! that migrates within its node exists twice for a while.
//!
//! A refused record leaves the last good one in force. This module uses no clock, file or network: events go in, and
//! changes for guests come out.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::ops::Deref;
use std::sync::Arc;

use metadata_common::mac::Mac;
use metadata_common::share::{FairShare, Tenant};

use crate::{FeedEvent, RejectedVm};
use metadata_common::port::PortName;
use metadata_content::record::{Owner, Record};
use metadata_content::source::{Authorship, RecordSource};

/// Most records of one source; the registry refuses the rest.
pub const MAX_RECORDS: usize = 16_384;
/// Most refused records of one source without a good version; the registry counts the rest without keeping their names.
pub const MAX_REFUSED: usize = 1_024;

/// Refused records that each tenant has kept by name while the limit is not reached.
pub const REFUSED_FLOOR: usize = 16;
/// Most bytes of the reason that is kept of a refused record.
pub const REASON_BYTES: usize = 2 << 10;

/// A record's source and its key there. The order is by source, then by key; if two records claim one identity, the
/// first in this order keeps it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId {
    /// The feed that published it.
    pub source: RecordSource,
    /// The key within the source.
    pub key: Arc<str>,
}

impl RecordId {
    /// The id of a source's record.
    #[must_use]
    pub fn new(source: RecordSource, key: &str) -> Self {
        Self { source, key: key.into() }
    }

    /// Whose record it is.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        match self.source.authorship() {
            Authorship::Namespaces => Tenant::namespace(self.key.split('/').next().unwrap_or_default()),
            Authorship::Vms => Tenant::Vm(Arc::clone(&self.key)),
            Authorship::Operator => Tenant::Operator,
        }
    }
}

/// A file's key alone, or `source/key`. The two forms cannot collide, because no file name contains `/`.
impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            RecordSource::File => f.write_str(&self.key),
            source => write!(f, "{}/{}", source.name(), self.key),
        }
    }
}

impl From<&str> for RecordId {
    /// The id of a file's record.
    fn from(key: &str) -> Self {
        Self::new(RecordSource::File, key)
    }
}

/// Ids in their order. Nearly all of these sets have one id, for which a `BTreeSet` takes the memory of eleven.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SortedIds(Vec<RecordId>);

impl SortedIds {
    /// Adds an id, unless it is there.
    pub fn insert(&mut self, id: &RecordId) {
        if let Err(at) = self.0.binary_search(id) {
            self.0.reserve_exact(1);
            self.0.insert(at, id.clone());
        }
    }

    /// Removes an id, if it is there.
    pub fn remove(&mut self, id: &RecordId) {
        if let Ok(at) = self.0.binary_search(id) {
            self.0.remove(at);
        }
    }
}

impl Deref for SortedIds {
    type Target = [RecordId];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// A change for guests.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The record is in force, in place of the former one of this id.
    Put(RecordId, Arc<Record>),
    /// A record of this id will follow, with these identities.
    Expect(RecordId, Vec<(PortName, Mac)>),
    /// The record is no longer in force, or no longer expected.
    Drop(RecordId),
}

/// The state of a record in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordStanding {
    /// It is served.
    InForce,
    /// A record of a higher source is served instead.
    Shadowed {
        /// The first of the records in force.
        by: RecordId,
    },
    /// No version of it was ever good.
    Rejected,
}

/// A record in the registry.
#[derive(Debug, Default)]
struct HeldRecord {
    /// The last good version.
    record: Option<Arc<Record>>,
    /// Why the latest version was refused, if it was.
    refused: Option<String>,
    /// The VM of a record without a good version, if its source tells it.
    vm: Option<Box<RejectedVm>>,
    /// The round in which its source last published it.
    round: u64,
}

/// The records of all sources.
#[derive(Debug, Default)]
pub struct Registry {
    held: BTreeMap<RecordId, HeldRecord>,
    /// Expected records; the limit of good records applies to them too.
    expected: BTreeSet<RecordId>,
    /// Good records by VM. The source of the first decides which are in force.
    by_vm: BTreeMap<Owner, SortedIds>,
    /// The counts and the current round of each source.
    sources: BTreeMap<RecordSource, SourceCounts>,
    refusals: u64,
    limits: Limits,
}

#[derive(Debug)]
struct SourceCounts {
    records: usize,
    /// Refused records without a good version. Their names are kept, and tenants share the limit.
    refused: FairShare,
    round: u64,
}

impl Default for SourceCounts {
    fn default() -> Self {
        Self { records: 0, refused: FairShare::new(MAX_REFUSED, REFUSED_FLOOR), round: 0 }
    }
}

/// The limits of one source.
#[derive(Clone, Copy, Debug)]
struct Limits {
    records: usize,
    refused: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { records: MAX_RECORDS, refused: MAX_REFUSED }
    }
}

impl Registry {
    /// Applies an event of a source, and returns the changes for guests.
    pub fn apply(&mut self, source: RecordSource, event: FeedEvent) -> Vec<Change> {
        match event {
            FeedEvent::Upsert { key, record } => {
                let id = RecordId::new(source, &key);
                let expected = self.expected.remove(&id);
                let mut changes = self.put(id.clone(), record);
                let comes = |change: &Change| matches!(change, Change::Put(put, _) if *put == id);
                if expected && !changes.iter().any(comes) {
                    changes.push(Change::Drop(id));
                }
                changes
            }
            FeedEvent::Expect { key, identities } => self.expect(RecordId::new(source, &key), identities),
            FeedEvent::Remove { key } => {
                let id = RecordId::new(source, &key);
                let mut changes = self.take(&id);
                changes.extend(self.expected.remove(&id).then_some(Change::Drop(id)));
                changes
            }
            FeedEvent::Rejected { key, error } => {
                let id = RecordId::new(source, &key);
                self.refuse(id.clone(), error.to_string());
                // A good version says itself whose it is.
                if let Some(held) = self.held.get_mut(&id).filter(|held| held.record.is_none()) {
                    held.vm = error.vm().cloned().map(Box::new);
                }
                Vec::new()
            }
            FeedEvent::Synced => self.sweep(source),
        }
    }

    /// Starts a new round of a source: its next [`FeedEvent::Synced`] removes the records it has not published since.
    pub fn begin(&mut self, source: RecordSource) {
        self.sources.entry(source).or_default().round += 1;
    }

    /// The last good version of a record.
    #[must_use]
    pub fn record(&self, id: &RecordId) -> Option<&Arc<Record>> {
        self.held.get(id)?.record.as_ref()
    }

    /// All good records, in force or not; the snapshot holds them.
    pub fn records(&self) -> impl Iterator<Item = (&RecordId, &Arc<Record>)> {
        self.held.iter().filter_map(|(id, held)| Some((id, held.record.as_ref()?)))
    }

    /// The ids of all records, good or not.
    pub fn ids(&self) -> impl Iterator<Item = &RecordId> {
        self.held.keys()
    }

    /// The ids after one of them, in order.
    pub fn after(&self, id: Option<&RecordId>) -> impl Iterator<Item = &RecordId> {
        let from = id.map_or(Bound::Unbounded, |id| Bound::Excluded(id.clone()));
        self.held.range((from, Bound::Unbounded)).map(|(id, _)| id)
    }

    /// The state of a record; `None` if there is none of that id.
    #[must_use]
    pub fn standing(&self, id: &RecordId) -> Option<RecordStanding> {
        let Some(record) = &self.held.get(id)?.record else { return Some(RecordStanding::Rejected) };
        let first = self.by_vm.get(&record.owner())?.first()?;
        let is_first = first.source == id.source;
        Some(if is_first { RecordStanding::InForce } else { RecordStanding::Shadowed { by: first.clone() } })
    }

    /// The good records of a VM, the highest source first.
    pub fn of_vm(&self, vm: &Owner) -> impl Iterator<Item = &RecordId> {
        self.by_vm.get(vm).into_iter().flat_map(|ids| ids.iter())
    }

    /// All records whose latest version was refused, with the reason.
    pub fn refused(&self) -> impl Iterator<Item = (&RecordId, &str)> {
        self.held.iter().filter_map(|(id, held)| Some((id, held.refused.as_deref()?)))
    }

    /// The reason, if a record's latest version was refused.
    #[must_use]
    pub fn refusal(&self, id: &RecordId) -> Option<&str> {
        self.held.get(id)?.refused.as_deref()
    }

    /// The VM of a record without a good version, if its source tells it.
    #[must_use]
    pub fn rejected_vm(&self, id: &RecordId) -> Option<&RejectedVm> {
        self.held.get(id)?.vm.as_deref()
    }

    /// Refused versions since the start.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    /// How tenants share the refused records of a source that are kept by name.
    #[must_use]
    pub fn refused_share(&self, source: RecordSource) -> Option<&FairShare> {
        self.sources.get(&source).map(|told| &told.refused)
    }

    /// Number of good records of a source.
    #[must_use]
    pub fn count(&self, source: RecordSource) -> usize {
        self.sources.get(&source).map_or(0, |told| told.records)
    }

    fn put(&mut self, id: RecordId, record: Arc<Record>) -> Vec<Change> {
        let told = self.sources.entry(id.source).or_default();
        let former = self.held.get(&id).and_then(|held| held.record.clone());
        if former.is_none() && told.records >= self.limits.records {
            let most = self.limits.records;
            let reason =
                format!("expected at most {most} records of a source, found one more; remove others");
            self.refuse(id, reason);
            return Vec::new();
        }
        let round = told.round;
        let vm = record.owner();
        let former_vm = former.as_ref().map(|former| former.owner());
        let before = self.in_force([former_vm.as_ref(), Some(&vm)]);
        if let Some(former_vm) = &former_vm {
            self.unlist(former_vm, &id);
        } else {
            told_of(&mut self.sources, &id).records += 1;
        }
        self.by_vm.entry(vm.clone()).or_default().insert(&id);
        let held = self.held.entry(id.clone()).or_default();
        if held.refused.take().is_some() && former.is_none() {
            told_of(&mut self.sources, &id).refused.release(&id.tenant(), 1);
        }
        held.round = round;
        let changed = former.as_ref().is_none_or(|former| **former != *record);
        held.record = Some(record);
        held.vm = None;
        let after = self.in_force([former_vm.as_ref(), Some(&vm)]);
        self.changes(&before, &after, Some(&id).filter(|_| changed))
    }

    fn take(&mut self, id: &RecordId) -> Vec<Change> {
        let Some(held) = self.held.remove(id) else { return Vec::new() };
        let told = told_of(&mut self.sources, id);
        let Some(record) = held.record else {
            told.refused.release(&id.tenant(), 1);
            return Vec::new();
        };
        told.records -= 1;
        let vm = record.owner();
        let before = self.in_force([Some(&vm), None]);
        self.unlist(&vm, id);
        self.changes(&before, &self.in_force([Some(&vm), None]), None)
    }

    /// Expects a record, unless a good one of that id exists: that one stays, also after this round.
    fn expect(&mut self, id: RecordId, identities: Vec<(PortName, Mac)>) -> Vec<Change> {
        let round = self.sources.entry(id.source).or_default().round;
        if let Some(held) = self.held.get_mut(&id).filter(|held| held.record.is_some()) {
            held.round = round;
            return Vec::new();
        }
        if self.expected.len() >= self.limits.records && !self.expected.contains(&id) {
            return Vec::new();
        }
        self.expected.insert(id.clone());
        vec![Change::Expect(id, identities)]
    }

    /// Counts a refusal. The last good version stays.
    fn refuse(&mut self, id: RecordId, mut reason: String) {
        self.refusals += 1;
        // A reason may repeat names that a tenant has chosen, of any length.
        if reason.len() > REASON_BYTES {
            reason.truncate(reason.floor_char_boundary(REASON_BYTES));
            reason.push('…');
        }
        let most = self.limits.refused;
        let told = told_of(&mut self.sources, &id);
        told.refused.set_limit(most, REFUSED_FLOOR);
        let round = told.round;
        if let Some(held) = self.held.get_mut(&id) {
            (held.refused, held.round) = (Some(reason), round);
        } else if told.refused.admit(&id.tenant(), 1).is_ok() {
            self.held.insert(id, HeldRecord { record: None, refused: Some(reason), vm: None, round });
        }
    }

    /// Removes the records that a source has not published in this round.
    fn sweep(&mut self, source: RecordSource) -> Vec<Change> {
        let round = self.sources.entry(source).or_default().round;
        let old = self.held.iter().filter(|(id, held)| id.source == source && held.round < round);
        let old: Vec<_> = old.map(|(id, _)| id.clone()).collect();
        old.iter().flat_map(|id| self.take(id)).collect()
    }

    fn unlist(&mut self, vm: &Owner, id: &RecordId) {
        if let Some(ids) = self.by_vm.get_mut(vm) {
            ids.remove(id);
            if ids.is_empty() {
                self.by_vm.remove(vm);
            }
        }
    }

    /// The records of up to two VMs that are in force.
    fn in_force(&self, vms: [Option<&Owner>; 2]) -> BTreeSet<RecordId> {
        let all = vms.into_iter().flatten().filter_map(|vm| self.by_vm.get(vm));
        let highest = all.flat_map(|ids| {
            let source = ids.first().map(|first| first.source);
            ids.iter().take_while(move |id| Some(id.source) == source)
        });
        highest.cloned().collect()
    }

    /// The changes between two states. `changed` is a record with a new version.
    fn changes(
        &self,
        before: &BTreeSet<RecordId>,
        after: &BTreeSet<RecordId>,
        changed: Option<&RecordId>,
    ) -> Vec<Change> {
        let gone = before.difference(after).cloned().map(Change::Drop);
        let come = after.iter().filter(|id| !before.contains(*id) || changed == Some(*id));
        let come = come.filter_map(|id| Some(Change::Put(id.clone(), Arc::clone(self.record(id)?))));
        gone.chain(come).collect()
    }
}

fn told_of<'a>(sources: &'a mut BTreeMap<RecordSource, SourceCounts>, id: &RecordId) -> &'a mut SourceCounts {
    sources.entry(id.source).or_default()
}
