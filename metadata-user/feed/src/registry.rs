//! The registry: the records of all sources, and which of them are in force.
//!
//! Each feed names its records by its own keys. Records with the same owner ([`Record::owner`]) belong to one VM, even
//! from different sources. A UUID that two VMs share does not join them. Those of the highest source are in force. The
//! others stay shadowed until they are the highest. One source may have several records of a VM in force, because a VM
//! that migrates within its node exists twice for a while.
//!
//! A refused record leaves the last good one in force, unless its VM has lost a NIC of that one. A record may also be
//! in force while its feed rejects a part of its VM ([`FeedError::Part`]). This module uses no clock, file or network:
//! events go in, and changes for guests come out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Bound, Deref};
use std::sync::Arc;

use metadata_common::mac::Mac;
use metadata_common::share::{FairShare, Tenant};

use crate::{FeedError, FeedEvent, RejectedVm};
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
    /// Why the latest version, or a part of it, was refused, if it was.
    refused: Option<String>,
    /// True if `refused` is about a part, and the rest of the latest version is in `record`.
    is_part: bool,
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
            FeedEvent::RemoveUnless { key, identities } => {
                let id = RecordId::new(source, &key);
                let has_another =
                    |record: &Arc<Record>| record.identities().iter().any(|who| !identities.contains(who));
                match self.record(&id).is_some_and(has_another) {
                    true => self.take(&id),
                    false => Vec::new(),
                }
            }
            FeedEvent::Rejected { key, error } => {
                let id = RecordId::new(source, &key);
                let is_part = matches!(error, FeedError::Part { .. });
                // Counts versions, and this one is in force.
                self.refusals += u64::from(!is_part);
                self.refuse(id.clone(), error.to_string(), is_part);
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

    /// All records whose latest version was refused, or is served in part, with the reason.
    pub fn refused(&self) -> impl Iterator<Item = (&RecordId, &str)> {
        self.held.iter().filter_map(|(id, held)| Some((id, held.refused.as_deref()?)))
    }

    /// The reason, if a record's latest version was refused or is served in part.
    #[must_use]
    pub fn refusal(&self, id: &RecordId) -> Option<&str> {
        self.held.get(id)?.refused.as_deref()
    }

    /// True if a record's [`refusal`](Self::refusal) is about a part of its VM, and the rest of the latest version is
    /// good.
    #[must_use]
    pub fn is_good_in_part(&self, id: &RecordId) -> bool {
        let is_part = |held: &HeldRecord| held.record.is_some() && held.refused.is_some() && held.is_part;
        self.held.get(id).is_some_and(is_part)
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
            self.refusals += 1;
            self.refuse(id, reason, false);
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

    /// Keeps the reason of a refusal. The last good version stays.
    fn refuse(&mut self, id: RecordId, mut reason: String, is_part: bool) {
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
            (held.refused, held.is_part, held.round) = (Some(reason), is_part, round);
        } else if told.refused.admit(&id.tenant(), 1).is_ok() {
            self.held
                .insert(id, HeldRecord { refused: Some(reason), is_part, round, ..HeldRecord::default() });
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::{Change, Limits, RecordId, RecordSource, RecordStanding, Registry};
    use crate::{FeedError, FeedEvent, RejectedVm, VM_TEXT_BYTES};
    use metadata_common::mac::Mac;
    use metadata_common::port::PortName;
    use metadata_content::record::{Owner, Record};

    const A: &str = "7c0f1a52-3b5e-4d1a-9d2c-00000000000a";
    const B: &str = "7c0f1a52-3b5e-4d1a-9d2c-00000000000b";

    fn record(vm: &str, generation: u64) -> Arc<Record> {
        let text = format!(
            "schema: vmrecord/1\ngeneration: {generation}\nvm: {{uuid: {vm}, name: web, \
         project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: web}}\n\
         placement: {{region: r, zone: z}}\n"
        );
        Arc::new(Record::parse("test", &text).expect("a record").0)
    }

    fn upsert(key: &str, vm: &str, generation: u64) -> FeedEvent {
        FeedEvent::Upsert { key: key.into(), record: record(vm, generation) }
    }

    fn remove(key: &str) -> FeedEvent {
        FeedEvent::Remove { key: key.into() }
    }

    fn rejected(key: &str) -> FeedEvent {
        let error = FeedError::Content {
            path: key.into(),
            expected: "a record".into(),
            found: "none".into(),
            remedy: "write one",
        };
        FeedEvent::Rejected { key: key.into(), error }
    }

    fn id(source: RecordSource, key: &str) -> RecordId {
        RecordId::new(source, key)
    }

    /// Changes as words: `+api/a 1`, `-api/a`.
    fn words(changes: &[Change]) -> Vec<String> {
        let word = |change: &Change| match change {
            Change::Put(id, record) => format!("+{id} {}", record.generation),
            Change::Expect(id, identities) => format!("?{id} {}", identities.len()),
            Change::Drop(id) => format!("-{id}"),
        };
        changes.iter().map(word).collect()
    }

    #[test]
    fn an_expected_record_never_replaces_a_good_one() {
        let mut registry = Registry::default();
        let expect = |key: &str| FeedEvent::Expect { key: key.into(), identities: Vec::new() };
        let steps: [(RecordSource, FeedEvent, &[&str]); 8] = [
            (RecordSource::Kubevirt, expect("ns/a"), &["?kubevirt/ns/a 0"]),
            (RecordSource::Kubevirt, upsert("ns/a", A, 1), &["+kubevirt/ns/a 1"]),
            (RecordSource::Kubevirt, expect("ns/a"), &[]),
            (RecordSource::Kubevirt, expect("ns/b"), &["?kubevirt/ns/b 0"]),
            (RecordSource::Kubevirt, remove("ns/b"), &["-kubevirt/ns/b"]),
            (RecordSource::Api, upsert("b", B, 2), &["+api/b 2"]),
            (RecordSource::Kubevirt, expect("ns/b"), &["?kubevirt/ns/b 0"]),
            // The record in force has the ports.
            (RecordSource::Kubevirt, upsert("ns/b", B, 3), &["-kubevirt/ns/b"]),
        ];
        for (n, (source, event, expected)) in steps.into_iter().enumerate() {
            assert_eq!(words(&registry.apply(source, event)), expected, "step {n}");
        }
        // A source that starts again may expect a record of its former run, and that one stays.
        registry.begin(RecordSource::Kubevirt);
        registry.apply(RecordSource::Kubevirt, expect("ns/a"));
        assert_eq!(words(&registry.apply(RecordSource::Kubevirt, FeedEvent::Synced)), [""; 0]);
        assert!(registry.record(&id(RecordSource::Kubevirt, "ns/a")).is_some(), "it is expected");
        assert!(registry.record(&id(RecordSource::Kubevirt, "ns/b")).is_none(), "nobody has told of it");
    }

    #[test]
    fn a_record_goes_once_its_vm_has_lost_one_of_its_nics() {
        let identity = |n: u8| (PortName::local(format!("tap{n}")), Mac([0x52, 0x54, 0, 0, 0, n]));
        let unless = |nics: &[u8]| FeedEvent::RemoveUnless {
            key: "a".into(),
            identities: nics.iter().map(|n| identity(*n)).collect(),
        };
        let nic = |n: u8| {
            format!("{{id: n{n}, mac: '52:54:00:00:00:0{n}', port: {{ifname: tap{n}}}, addresses: []}}")
        };
        let text = format!(
            "schema: vmrecord/1\ngeneration: 1\nvm: {{uuid: {A}, name: web, \
             project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: web}}\n\
             placement: {{region: r, zone: z}}\nnetwork: {{nics: [{}, {}]}}\n",
            nic(1),
            nic(2)
        );
        let two = Arc::new(Record::parse("a", &text).expect("a record").0);
        let mut registry = Registry::default();
        let steps: [(FeedEvent, &[&str]); 7] = [
            (unless(&[]), &[]),
            (FeedEvent::Upsert { key: "a".into(), record: two }, &["+openstack/a 1"]),
            (unless(&[2, 1]), &[]),
            (unless(&[1, 2, 3]), &[]),
            (rejected("a"), &[]),
            (unless(&[1, 3]), &["-openstack/a"]),
            (rejected("a"), &[]),
        ];
        for (n, (event, expected)) in steps.into_iter().enumerate() {
            assert_eq!(words(&registry.apply(RecordSource::Openstack, event)), expected, "step {n}");
        }
        let standing = registry.standing(&id(RecordSource::Openstack, "a"));
        assert_eq!((standing, registry.count(RecordSource::Openstack)), (Some(RecordStanding::Rejected), 0));
    }

    #[test]
    fn the_records_of_a_vms_highest_source_are_in_force() {
        let mut registry = Registry::default();
        let steps: [(RecordSource, FeedEvent, &[&str]); 9] = [
            (RecordSource::Kubevirt, upsert("ns/a", A, 1), &["+kubevirt/ns/a 1"]),
            (RecordSource::Api, upsert("a", A, 2), &["-kubevirt/ns/a", "+api/a 2"]),
            (RecordSource::File, upsert("a.yaml", A, 3), &[]),
            (RecordSource::Kubevirt, upsert("ns/a", A, 4), &[]),
            (RecordSource::Api, upsert("a", A, 5), &["+api/a 5"]),
            (RecordSource::Api, upsert("a", A, 5), &[]),
            (RecordSource::Api, remove("a"), &["-api/a", "+a.yaml 3"]),
            (RecordSource::File, remove("a.yaml"), &["-a.yaml", "+kubevirt/ns/a 4"]),
            (RecordSource::Kubevirt, remove("ns/a"), &["-kubevirt/ns/a"]),
        ];
        for (n, (source, event, expected)) in steps.into_iter().enumerate() {
            assert_eq!(words(&registry.apply(source, event)), expected, "step {n}");
        }
        assert_eq!(registry.ids().count(), 0);
    }

    #[test]
    fn two_records_of_a_vm_by_one_source_are_both_in_force() {
        let mut registry = Registry::default();
        for key in ["ns/a@1", "ns/a@2"] {
            let changes = registry.apply(RecordSource::Kubevirt, upsert(key, A, 1));
            assert_eq!(words(&changes), [format!("+kubevirt/{key} 1")]);
        }
        let changes = registry.apply(RecordSource::Hook, upsert(A, A, 2));
        let expected = ["-kubevirt/ns/a@1", "-kubevirt/ns/a@2", &format!("+hook/{A} 2")];
        assert_eq!(words(&changes), expected);
    }

    #[test]
    fn a_record_that_moves_to_another_vm_unshadows_the_next_source() {
        let mut registry = Registry::default();
        registry.apply(RecordSource::File, upsert("a.yaml", A, 1));
        registry.apply(RecordSource::File, upsert("b.yaml", B, 2));
        registry.apply(RecordSource::Api, upsert("x", A, 3));
        let changes = registry.apply(RecordSource::Api, upsert("x", B, 4));
        assert_eq!(words(&changes), ["-b.yaml", "+api/x 4", "+a.yaml 1"]);
    }

    #[test]
    fn a_record_that_is_refused_leaves_the_last_good_one() {
        let mut registry = Registry::default();
        registry.apply(RecordSource::File, upsert("a.yaml", A, 1));
        let (good, bad) = (id(RecordSource::File, "a.yaml"), id(RecordSource::File, "b.yaml"));
        for key in ["a.yaml", "b.yaml"] {
            assert_eq!(registry.apply(RecordSource::File, rejected(key)), []);
        }
        assert_eq!(registry.standing(&good), Some(RecordStanding::InForce));
        assert!(registry.refusal(&good).is_some_and(|reason| reason.contains("expected a record")));
        assert_eq!(registry.standing(&bad), Some(RecordStanding::Rejected));
        assert_eq!((registry.refusals(), registry.refused().count()), (2, 2));
        assert_eq!(words(&registry.apply(RecordSource::File, upsert("a.yaml", A, 1))), [""; 0], "as it was");
        assert_eq!(words(&registry.apply(RecordSource::File, upsert("b.yaml", B, 1))), ["+b.yaml 1"]);
        assert_eq!((registry.refusals(), registry.refused().count()), (2, 0));
    }

    #[test]
    fn a_record_that_is_good_in_part_is_no_refused_version() {
        let mut registry = Registry::default();
        let id = id(RecordSource::Kubevirt, "ns/a");
        let reject = |registry: &mut Registry, error: FeedError| {
            registry.apply(RecordSource::Kubevirt, FeedEvent::Rejected { key: "ns/a".into(), error })
        };
        let reason = || "NIC `fast`".to_owned();
        reject(&mut registry, FeedError::Part { reason: reason() });
        assert!(!registry.is_good_in_part(&id), "nothing of it is good yet");
        for generation in 1..=2 {
            registry.apply(RecordSource::Kubevirt, upsert("ns/a", A, generation));
            assert_eq!((registry.refusal(&id), registry.is_good_in_part(&id)), (None, false), "{generation}");
            assert_eq!(reject(&mut registry, FeedError::Part { reason: reason() }), []);
            let found = (registry.refusal(&id), registry.is_good_in_part(&id), registry.refusals());
            assert_eq!(found, (Some("NIC `fast`"), true, 0), "{generation}");
        }
        reject(&mut registry, FeedError::Vm { reason: reason() });
        assert_eq!(
            (registry.is_good_in_part(&id), registry.refusals()),
            (false, 1),
            "an earlier version stays"
        );
    }

    #[test]
    fn a_shadowed_record_names_the_record_in_force() {
        let mut registry = Registry::default();
        registry.apply(RecordSource::Kubevirt, upsert("ns/a", A, 1));
        registry.apply(RecordSource::File, upsert("a.yaml", A, 1));
        let standing = |key| registry.standing(&key);
        assert_eq!(standing(id(RecordSource::File, "a.yaml")), Some(RecordStanding::InForce));
        let by = id(RecordSource::File, "a.yaml");
        assert_eq!(standing(id(RecordSource::Kubevirt, "ns/a")), Some(RecordStanding::Shadowed { by }));
        assert_eq!(standing(id(RecordSource::Kubevirt, "a.yaml")), None);
    }

    #[test]
    fn a_round_removes_the_records_its_source_did_not_publish() {
        let mut registry = Registry::default();
        for key in ["a.yaml", "b.yaml"] {
            registry.apply(RecordSource::File, upsert(key, if key == "a.yaml" { A } else { B }, 1));
        }
        registry.apply(RecordSource::File, rejected("c.yaml"));
        registry.apply(RecordSource::Api, upsert("x", A, 1));
        assert_eq!(registry.apply(RecordSource::File, FeedEvent::Synced), [], "nothing began again");
        registry.begin(RecordSource::File);
        // An invalid file leaves the last good record.
        registry.apply(RecordSource::File, rejected("b.yaml"));
        registry.apply(RecordSource::File, upsert("d.yaml", A, 1));
        assert_eq!(registry.apply(RecordSource::Api, FeedEvent::Synced), [], "another's word");
        assert_eq!(registry.apply(RecordSource::File, FeedEvent::Synced), [], "a.yaml was not in force");
        let left: Vec<_> = registry.ids().map(RecordId::to_string).collect();
        assert_eq!(left, ["api/x", "b.yaml", "d.yaml"]);
    }

    #[test]
    fn records_beyond_a_sources_limit_are_refused_and_others_unaffected() {
        let mut registry = Registry { limits: Limits { records: 2, refused: 1 }, ..Registry::default() };
        for (key, changes) in [("a", 1), ("b", 1), ("c", 0), ("d", 0)] {
            assert_eq!(registry.apply(RecordSource::Api, upsert(key, A, 1)).len(), changes, "{key}");
        }
        let refused: Vec<_> = registry.refused().map(|(id, _)| id.to_string()).collect();
        assert_eq!((refused, registry.refusals()), (vec!["api/c".to_owned()], 2), "one more is only counted");
        assert_eq!(registry.apply(RecordSource::Api, upsert("a", A, 2)).len(), 1, "what is there may change");
        assert_eq!(registry.apply(RecordSource::Hook, upsert("e", B, 1)).len(), 1);
        registry.apply(RecordSource::Api, remove("a"));
        assert_eq!(registry.apply(RecordSource::Api, upsert("c", B, 3)).len(), 2, "it shadows the hook's");
        assert_eq!(registry.refused().count(), 0);
        assert_eq!((registry.count(RecordSource::Api), registry.count(RecordSource::Hook)), (2, 1));
    }

    /// In any order of events, the changes leave exactly the records in force that the rule selects.
    #[test]
    fn changes_add_up_to_the_records_in_force() {
        let mut rng = fastrand::Rng::with_seed(11);
        for _ in 0..200 {
            let mut registry = Registry::default();
            let mut all = BTreeMap::new();
            let mut in_force = BTreeMap::new();
            for generation in 0..40 {
                let source = RecordSource::ALL[rng.usize(..RecordSource::ALL.len())];
                let (key, vm) = (["a", "b", "c"][rng.usize(..3)], [A, B][rng.usize(..2)]);
                let event = if rng.u8(..4) == 0 {
                    all.remove(&id(source, key));
                    remove(key)
                } else {
                    all.insert(id(source, key), (vm, generation));
                    upsert(key, vm, generation)
                };
                for change in registry.apply(source, event) {
                    match change {
                        Change::Put(id, record) => drop(in_force.insert(id, record.generation)),
                        Change::Drop(id) => assert!(in_force.remove(&id).is_some(), "{id} was not in force"),
                        Change::Expect(id, _) => panic!("{id} is expected without an event"),
                    }
                }
                let highest = |vm: &str| all.iter().find(|(_, (of, _))| *of == vm).map(|(id, _)| id.source);
                let expected: BTreeMap<_, _> = all
                    .iter()
                    .filter(|(id, (vm, _))| highest(vm) == Some(id.source))
                    .map(|(id, (_, generation))| (id.clone(), *generation))
                    .collect();
                assert_eq!(in_force, expected);
            }
        }
    }

    #[test]
    fn records_of_two_owners_with_one_uuid_are_in_force_apart() {
        let mut registry = Registry::default();
        let owned = |key: &str, owner: Owner| {
            let mut record = (*record(A, 1)).clone();
            record.vm.owner = Some(owner);
            FeedEvent::Upsert { key: key.into(), record: record.into() }
        };
        let of = |namespace| Owner::kubevirt(namespace, "test", "u");
        let front: Owner = serde_json::from_value("kubevirt/b/test/u".into()).expect("an owner");
        let steps: [(RecordSource, FeedEvent, &[&str]); 6] = [
            (RecordSource::Kubevirt, owned("a/test", of("a")), &["+kubevirt/a/test 1"]),
            (RecordSource::Kubevirt, owned("b/test", of("b")), &["+kubevirt/b/test 1"]),
            // A record that names the UUID alone is another VM's.
            (RecordSource::Api, upsert("uuid", A, 2), &["+api/uuid 2"]),
            (RecordSource::Api, owned("front", front), &["-kubevirt/b/test", "+api/front 1"]),
            (RecordSource::Api, remove("front"), &["-api/front", "+kubevirt/b/test 1"]),
            (RecordSource::Kubevirt, remove("a/test"), &["-kubevirt/a/test"]),
        ];
        for (n, (source, event, expected)) in steps.into_iter().enumerate() {
            assert_eq!(words(&registry.apply(source, event)), expected, "step {n}");
        }
    }

    #[test]
    fn refused_records_of_one_namespace_leave_names_for_those_of_another() {
        let mut registry = Registry::default();
        let mut refuse = |key: String| {
            let error = FeedError::Vm { reason: "ä".repeat(10_000) };
            registry.apply(RecordSource::Kubevirt, FeedEvent::Rejected { key, error });
        };
        (0..2 * super::MAX_REFUSED).for_each(|n| refuse(format!("hostile/vm-{n}")));
        refuse("modest/web".into());
        let id = RecordId::new(RecordSource::Kubevirt, "modest/web");
        let reason = registry.refusal(&id).expect("its reason is kept");
        assert!(reason.len() <= super::REASON_BYTES + 3, "{} bytes", reason.len());
        assert_eq!(registry.refused().count(), super::MAX_REFUSED / 2 + 1);
        for n in 0..2 * super::MAX_REFUSED {
            registry.apply(RecordSource::Kubevirt, FeedEvent::Remove { key: format!("hostile/vm-{n}") });
        }
        assert_eq!(registry.refused_share(RecordSource::Kubevirt).map(|share| share.used()), Some(1));
    }

    #[test]
    fn a_record_that_was_never_good_has_the_vm_that_its_source_names() {
        let mut registry = Registry::default();
        let id = RecordId::new(RecordSource::Hook, "a");
        let vm = |name: &str| RejectedVm { name: name.into(), uuid: "7C0F".into(), owner: None };
        let refuse = |registry: &mut Registry, vm: Option<RejectedVm>| {
            let error = FeedError::Vm { reason: "no".into() }.of(vm);
            registry.apply(RecordSource::Hook, FeedEvent::Rejected { key: "a".into(), error });
        };
        refuse(&mut registry, Some(vm("web")));
        assert_eq!((registry.rejected_vm(&id), registry.refusal(&id)), (Some(&vm("web")), Some("no")));
        let found = registry.rejected_vm(&id).expect("a VM");
        for (name, is_its) in [("web", true), ("7c0f", true), ("", false), ("we", false)] {
            assert_eq!(found.is_called(name), is_its, "{name}");
        }
        refuse(&mut registry, Some(vm("db")));
        assert_eq!(registry.rejected_vm(&id), Some(&vm("db")), "it was renamed");
        refuse(&mut registry, None);
        assert_eq!(registry.rejected_vm(&id), None, "its source does not tell");
        refuse(&mut registry, Some(vm("web")));
        registry.apply(RecordSource::Hook, upsert("a", A, 1));
        assert_eq!(registry.rejected_vm(&id), None, "a good version says itself whose it is");
        refuse(&mut registry, Some(vm("db")));
        assert_eq!(registry.rejected_vm(&id), None, "the good version stays");
        for (text, expected) in [
            (serde_json::json!({"vm": {"name": "web", "uuid": "7C0F"}, "schema": 9}), Some(vm("web"))),
            (serde_json::json!({"vm": {"name": "w".repeat(VM_TEXT_BYTES + 1)}}), None),
            (serde_json::json!({"vm": {"uuid": "7C0F"}}), None),
            (serde_json::json!(["vm"]), None),
        ] {
            assert_eq!(RejectedVm::described(&text), expected, "{text}");
        }
    }
}
