//! One registry for the records of all sources.
//!
//! Feeds tell of records by names of their own; here they meet. Records of different sources with one `vm.uuid` are of
//! one VM: those of the highest source are in force, the others wait, shadowed, until it goes. Of one source several
//! may be in force: a VM that moves within its node is there twice for a while.
//!
//! A record that is refused leaves the last good one, and nothing here reads a clock, a file or the network: an event
//! goes in, and what changes for guests comes out.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use metadata_common::mac::Mac;

use crate::FeedEvent;
use metadata_base::port::PortName;
use metadata_content::record::Record;
use metadata_content::record::values::Uuid;
use metadata_content::source::Source;

/// Most records of one source; those beyond are refused.
pub const MAX_RECORDS: usize = 16_384;
/// Most records of one source that are refused and have never been good; those beyond are counted and not named.
pub const MAX_REFUSED: usize = 1_024;

/// What a record is called: its source and its name there. The order is that of sources, then of names: of two records
/// that claim one identity the first keeps it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId {
    /// Where it comes from.
    pub source: Source,
    /// Its name there.
    pub key: Arc<str>,
}

impl RecordId {
    /// The record of a source by its name there.
    #[must_use]
    pub fn new(source: Source, key: &str) -> Self {
        Self { source, key: key.into() }
    }
}

/// Files by their name, others with their source before it: no file has a `/` in its name, so no two are alike.
impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            Source::File => f.write_str(&self.key),
            source => write!(f, "{}/{}", source.name(), self.key),
        }
    }
}

impl From<&str> for RecordId {
    /// The record of a file, by its name.
    fn from(key: &str) -> Self {
        Self::new(Source::File, key)
    }
}

/// What changes for guests.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A record is in force now, in the place of what was under its name.
    Put(RecordId, Arc<Record>),
    /// A record is to come, and these will ask for it.
    Expect(RecordId, Vec<(PortName, Mac)>),
    /// A record is not in force any more, or not expected.
    Drop(RecordId),
}

/// What has become of a record here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It counts.
    InForce,
    /// One of a higher source counts.
    Shadowed {
        /// The first of those.
        by: RecordId,
    },
    /// It has never been good.
    Rejected,
}

/// A record as it is held.
#[derive(Debug, Default)]
struct Held {
    /// The last good one.
    record: Option<Arc<Record>>,
    /// Why what came later is refused.
    refused: Option<String>,
    /// The round in which its source told of it.
    round: u64,
}

/// The records of all sources.
#[derive(Debug, Default)]
pub struct Registry {
    held: BTreeMap<RecordId, Held>,
    /// Records that are to come; as many of a source as it may have.
    expected: BTreeSet<RecordId>,
    /// Good records by VM, the first of which decides whose are in force.
    by_vm: BTreeMap<Uuid, BTreeSet<RecordId>>,
    /// By source: how many are held, and in which round it tells them.
    sources: BTreeMap<Source, Told>,
    refusals: u64,
    limits: Limits,
}

#[derive(Debug, Default)]
struct Told {
    records: usize,
    refused: usize,
    round: u64,
}

/// How much of each source is held.
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
    /// Takes in what a source tells; says what changes for guests.
    pub fn apply(&mut self, source: Source, event: FeedEvent) -> Vec<Change> {
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
                self.refuse(RecordId::new(source, &key), error.to_string());
                Vec::new()
            }
            FeedEvent::Synced => self.sweep(source),
        }
    }

    /// A source begins to tell all it has: with its next [`FeedEvent::Synced`], what it has not told of by then goes.
    pub fn begin(&mut self, source: Source) {
        self.sources.entry(source).or_default().round += 1;
    }

    /// The last good record of that name.
    #[must_use]
    pub fn record(&self, id: &RecordId) -> Option<&Arc<Record>> {
        self.held.get(id)?.record.as_ref()
    }

    /// Every good record, in force or not: what is worth keeping.
    pub fn records(&self) -> impl Iterator<Item = (&RecordId, &Arc<Record>)> {
        self.held.iter().filter_map(|(id, held)| Some((id, held.record.as_ref()?)))
    }

    /// Every record that is known, good or not.
    pub fn ids(&self) -> impl Iterator<Item = &RecordId> {
        self.held.keys()
    }

    /// The same behind one of them.
    pub fn after(&self, id: Option<&RecordId>) -> impl Iterator<Item = &RecordId> {
        let from = id.map_or(Bound::Unbounded, |id| Bound::Excluded(id.clone()));
        self.held.range((from, Bound::Unbounded)).map(|(id, _)| id)
    }

    /// What has become of a record; `None` when there is none of that name.
    #[must_use]
    pub fn standing(&self, id: &RecordId) -> Option<Standing> {
        let Some(record) = &self.held.get(id)?.record else { return Some(Standing::Rejected) };
        let first = self.by_vm.get(&record.vm.uuid)?.first()?;
        let is_first = first.source == id.source;
        Some(if is_first { Standing::InForce } else { Standing::Shadowed { by: first.clone() } })
    }

    /// The good records of a VM, the highest first.
    pub fn of_vm(&self, vm: &Uuid) -> impl Iterator<Item = &RecordId> {
        self.by_vm.get(vm).into_iter().flatten()
    }

    /// Records that are refused as they are now, with the reason.
    pub fn refused(&self) -> impl Iterator<Item = (&RecordId, &str)> {
        self.held.iter().filter_map(|(id, held)| Some((id, held.refused.as_deref()?)))
    }

    /// Why a record is refused as it is now.
    #[must_use]
    pub fn refusal(&self, id: &RecordId) -> Option<&str> {
        self.held.get(id)?.refused.as_deref()
    }

    /// Records refused so far.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    /// Good records of a source.
    #[must_use]
    pub fn count(&self, source: Source) -> usize {
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
        let vm = record.vm.uuid.clone();
        let before = self.in_force([former.as_ref().map(|former| &former.vm.uuid), Some(&vm)]);
        if let Some(former) = &former {
            self.unlist(&former.vm.uuid, &id);
        } else {
            told_of(&mut self.sources, &id).records += 1;
        }
        self.by_vm.entry(vm.clone()).or_default().insert(id.clone());
        let held = self.held.entry(id.clone()).or_default();
        if held.refused.take().is_some() && former.is_none() {
            told_of(&mut self.sources, &id).refused -= 1;
        }
        held.round = round;
        let changed = former.as_ref().is_none_or(|former| **former != *record);
        held.record = Some(record);
        let after = self.in_force([former.as_ref().map(|former| &former.vm.uuid), Some(&vm)]);
        self.changes(&before, &after, Some(&id).filter(|_| changed))
    }

    fn take(&mut self, id: &RecordId) -> Vec<Change> {
        let Some(held) = self.held.remove(id) else { return Vec::new() };
        let told = told_of(&mut self.sources, id);
        let Some(record) = held.record else {
            told.refused -= 1;
            return Vec::new();
        };
        told.records -= 1;
        let vm = Some(&record.vm.uuid);
        let before = self.in_force([vm, None]);
        self.unlist(&record.vm.uuid, id);
        self.changes(&before, &self.in_force([vm, None]), None)
    }

    /// A good record is not set aside for one that is to come.
    fn expect(&mut self, id: RecordId, identities: Vec<(PortName, Mac)>) -> Vec<Change> {
        let full = self.expected.len() >= self.limits.records && !self.expected.contains(&id);
        if full || self.record(&id).is_some() {
            return Vec::new();
        }
        self.expected.insert(id.clone());
        vec![Change::Expect(id, identities)]
    }

    /// What is there under that name stays.
    fn refuse(&mut self, id: RecordId, reason: String) {
        self.refusals += 1;
        let most = self.limits.refused;
        let told = told_of(&mut self.sources, &id);
        let round = told.round;
        if let Some(held) = self.held.get_mut(&id) {
            (held.refused, held.round) = (Some(reason), round);
        } else if told.refused < most {
            told.refused += 1;
            self.held.insert(id, Held { record: None, refused: Some(reason), round });
        }
    }

    /// Takes out what a source has not told of since it began anew.
    fn sweep(&mut self, source: Source) -> Vec<Change> {
        let round = self.sources.entry(source).or_default().round;
        let old = self.held.iter().filter(|(id, held)| id.source == source && held.round < round);
        let old: Vec<_> = old.map(|(id, _)| id.clone()).collect();
        old.iter().flat_map(|id| self.take(id)).collect()
    }

    fn unlist(&mut self, vm: &Uuid, id: &RecordId) {
        if let Some(ids) = self.by_vm.get_mut(vm) {
            ids.remove(id);
            if ids.is_empty() {
                self.by_vm.remove(vm);
            }
        }
    }

    /// The records of some VMs that are in force.
    fn in_force(&self, vms: [Option<&Uuid>; 2]) -> BTreeSet<RecordId> {
        let all = vms.into_iter().flatten().filter_map(|vm| self.by_vm.get(vm));
        let highest = all.flat_map(|ids| {
            let source = ids.first().map(|first| first.source);
            ids.iter().take_while(move |id| Some(id.source) == source)
        });
        highest.cloned().collect()
    }

    /// From what was in force to what is, when one record may have changed, too.
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

fn told_of<'a>(sources: &'a mut BTreeMap<Source, Told>, id: &RecordId) -> &'a mut Told {
    sources.entry(id.source).or_default()
}
