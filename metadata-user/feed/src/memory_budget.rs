//! The memory accounts of records.
//!
//! The agent runs in a control group, and the kernel kills it beyond the memory limit. So the agent charges each record
//! before it renders it, and refuses one that does not fit. All others stay served, and a record that grew too much
//! keeps its former version. Freed memory admits refused records.
//!
//! A charge is an upper estimate ([`Weight`]), which the bench `render_cost` compares with the allocations. Bytes that
//! several records share, such as a common vendor-data, are stored once and charged once.

pub mod cgroup;

use bytes::Bytes;
use foldhash::fast::RandomState;
use metadata_common::share::{FairShare, ShareReport, Tenant};
use metadata_content::record::{Dialect, PayloadEncoding, Record};
use metadata_content::source::RecordSource;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher as _;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};
use tokio::sync::watch;

use crate::registry::RecordId;

/// Bytes for records if neither the configuration nor a control group sets a limit.
pub const DEFAULT_BYTES: usize = 2 << 30;
/// Least bytes for records in a small control group: about 300 VMs with small user-data.
pub const LEAST_BYTES: usize = 16 << 20;
/// Most bytes for records that a configuration may name.
pub const MOST_BYTES: usize = 1 << 40;
/// Bytes of the control group for everything else: the program, tables, VMIs (at most 32 MiB), pages of the API
/// server's lists, and records during rendering.
pub const RESERVED_BYTES: usize = 128 << 20;
/// Bytes of the control group for each worker: up to 64 MiB of AF_XDP frames, 8 MiB of queued frames, the connections,
/// and a share of two pools of 64 MiB. The pools hold incomplete requests and unread computed answers, and fill only
/// under attack.
pub const WORKER_BYTES: usize = 144 << 20;

/// Bytes for records in a control group of `limit` bytes, with this number of workers. An eighth of the rest stays
/// free for fragmentation and for former versions during replacement.
#[must_use]
pub fn within(limit: Option<u64>, workers: u32) -> usize {
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else { return DEFAULT_BYTES };
    let workers = usize::try_from(workers).unwrap_or(usize::MAX);
    let rest = limit.saturating_sub(RESERVED_BYTES.saturating_add(WORKER_BYTES.saturating_mul(workers)));
    (rest - rest / 8).max(LEAST_BYTES)
}

/// Bytes of records that each tenant may have while the limit is not reached: the part of the limit, and the least. A
/// small VM takes 100 KiB.
const FLOOR_PART: usize = 64;
const FLOOR_LEAST: usize = 256 << 10;

/// The memory for records is exhausted, or its tenant's share is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error(
    "it would take {} of memory, and of {} for all records {} are taken, by {tenant} {} of the {} that are its share; a \
     version that is served stays. Raise `record_memory` and the agent's memory limit, serve fewer dialects \
     (`serve.dialects`), or shrink user-data",
    Size(*wants), Size(*limit), Size(*used), Size(*held), Size(*share)
)]
pub struct MemoryExhausted {
    /// Bytes the record needs beyond those of its former version.
    pub wants: usize,
    /// Bytes that all records use.
    pub used: usize,
    /// Bytes that all records may use.
    pub limit: usize,
    /// Whose record it is.
    pub tenant: Tenant,
    /// Bytes that its tenant uses.
    pub held: usize,
    /// Bytes that its tenant may use now.
    pub share: usize,
}

/// Formats bytes as KiB or MiB.
struct Size(usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 => write!(f, "{} MiB", bytes.div_ceil(1 << 20)),
            bytes => write!(f, "{} KiB", bytes.div_ceil(1 << 10)),
        }
    }
}

/// The use of memory by records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that records may use.
    pub limit: usize,
    /// Bytes that records use.
    pub used: usize,
    /// Refused records since the start.
    pub refusals: u64,
}

/// The memory accounts of all records. The feeds reserve memory before they publish a record, and the node confirms the
/// records it holds.
#[derive(Debug)]
pub struct MemoryBudget {
    ledger: Mutex<Ledger>,
    freed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Ledger {
    share: FairShare,
    refusals: u64,
    charges: HashMap<RecordId, MemoryCharge>,
    contents: HashMap<Content, Shared>,
    /// The shares that feeds have reported.
    reported: BTreeMap<&'static str, ShareReport>,
    /// The smallest amount ever refused. Freeing less than this admits no record, so it is not announced.
    least_refused: Option<usize>,
}

/// Bytes that several records share. Their tenants pay equal parts of them, so that nobody is charged for what others
/// have, and two tenants that share a content pay no less together than one alone.
#[derive(Debug, Default)]
struct Shared {
    bytes: usize,
    /// How many records of each tenant have them.
    records: BTreeMap<Tenant, usize>,
}

impl Shared {
    /// The part of each tenant.
    fn part(&self) -> usize {
        self.bytes.div_ceil(self.records.len().max(1))
    }

    /// Takes the parts of all tenants back, applies a change, and charges the new parts.
    fn change(&mut self, share: &mut FairShare, change: impl FnOnce(&mut Self)) {
        let part = self.part();
        self.records.keys().for_each(|tenant| share.release(tenant, part));
        change(self);
        let part = self.part();
        self.records.keys().for_each(|tenant| share.charge(tenant, part));
    }
}

#[derive(Clone, Debug)]
struct MemoryCharge {
    weight: Weight,
    /// True once the node holds the record, and false while it is in the queue.
    arrived: bool,
}

impl MemoryBudget {
    /// Creates empty accounts of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        let ledger = Mutex::new(Ledger { share: FairShare::new(limit, floor(limit)), ..Ledger::default() });
        Arc::new(Self { ledger, freed: watch::Sender::new(0) })
    }

    /// Sets the limit. Records beyond it stay, but no further one is admitted.
    pub fn set_limit(&self, limit: usize) {
        let mut ledger = self.ledger();
        ledger.share.set_limit(limit, floor(limit));
        self.announce(ledger);
    }

    /// The current use.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let ledger = self.ledger();
        let (limit, used) = (ledger.share.limit(), ledger.share.used());
        Usage { limit, used, refusals: ledger.refusals }
    }

    /// Bytes that are free for the operator's records.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free_for(&Tenant::Operator)
    }

    /// Bytes that are free for a tenant's records.
    #[must_use]
    pub fn free_for(&self, tenant: &Tenant) -> usize {
        self.ledger().share.free_for(tenant)
    }

    /// How tenants share the limits that this process keeps: that of memory, and those that feeds have reported.
    #[must_use]
    pub fn shares(&self) -> Vec<ShareReport> {
        let ledger = self.ledger();
        let memory = ShareReport::of("record_memory", &ledger.share);
        std::iter::once(memory).chain(ledger.reported.values().cloned()).collect()
    }

    /// Reports how tenants share a limit of a feed.
    pub fn report(&self, report: ShareReport) {
        self.ledger().reported.insert(report.limit, report);
    }

    /// Reserves memory for a record, in place of the charge under its id.
    ///
    /// # Errors
    /// [`MemoryExhausted`]; the former charge stays.
    pub fn take(&self, id: &RecordId, record: &Record) -> Result<(), MemoryExhausted> {
        let weight = Weight::of(record);
        let mut ledger = self.ledger();
        let before = ledger.share.used();
        let taken = ledger.take(id, weight, false);
        if ledger.share.used() < before {
            self.announce(ledger);
        }
        taken
    }

    /// Checks whether a record would fit in place of the charge under its id.
    ///
    /// # Errors
    /// [`MemoryExhausted`] if it would not.
    pub fn fits(&self, id: &RecordId, record: &Record) -> Result<(), MemoryExhausted> {
        let weight = Weight::of(record);
        let mut ledger = self.ledger();
        let former = ledger.charges.get(id).cloned();
        ledger.take(id, weight, false)?;
        ledger.remove(id);
        former.into_iter().for_each(|former| ledger.add(id, former));
        Ok(())
    }

    /// Confirms that the node holds a record. Reserves its memory if its feed has not.
    ///
    /// # Errors
    /// [`MemoryExhausted`]; the former charge stays.
    pub fn arrive(&self, id: &RecordId, record: &Record) -> Result<(), MemoryExhausted> {
        let weight = Weight::of(record);
        let mut ledger = self.ledger();
        if let Some(charge) = ledger.charges.get_mut(id).filter(|charge| charge.weight == weight) {
            charge.arrived = true;
            return Ok(());
        }
        let before = ledger.share.used();
        let taken = ledger.take(id, weight, true);
        if ledger.share.used() < before {
            self.announce(ledger);
        }
        taken
    }

    /// Releases the charge under an id.
    pub fn give_back(&self, id: &RecordId) {
        let mut ledger = self.ledger();
        ledger.remove(id);
        self.announce(ledger);
    }

    /// Releases the charges of a source's records that the node no longer holds. Those of queued records stay.
    pub fn keep_only(&self, source: RecordSource, holds: impl Fn(&RecordId) -> bool) {
        self.give_back_all(|id, charge| id.source == source && charge.arrived && !holds(id));
    }

    /// Releases the charges of a source's queued records, after its feed has ended.
    pub fn forget_pending(&self, source: RecordSource) {
        self.give_back_all(|id, charge| id.source == source && !charge.arrived);
    }

    fn give_back_all(&self, goes: impl Fn(&RecordId, &MemoryCharge) -> bool) {
        let mut ledger = self.ledger();
        let gone = ledger.charges.iter().filter(|(id, charge)| goes(id, charge));
        let gone: Vec<_> = gone.map(|(id, _)| id.clone()).collect();
        for id in &gone {
            ledger.remove(id);
        }
        self.announce(ledger);
    }

    /// A counter that changes when a refused record may fit.
    #[must_use]
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.freed.subscribe()
    }

    /// Announces freed memory if it suffices for a refused record.
    fn announce(&self, ledger: MutexGuard<'_, Ledger>) {
        let free = ledger.share.free_for(&Tenant::Operator);
        let enough = ledger.least_refused.is_some_and(|least| least <= free);
        drop(ledger);
        if enough {
            self.freed.send_modify(|count| *count += 1);
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    fn take(&mut self, id: &RecordId, weight: Weight, arrived: bool) -> Result<(), MemoryExhausted> {
        let tenant = id.tenant();
        let (before, held) = (self.share.used(), self.share.held(&tenant));
        let free = self.share.free_for(&tenant);
        let former = self.remove(id);
        let arrived = arrived || former.as_ref().is_some_and(|former| former.arrived);
        self.add(id, MemoryCharge { weight, arrived });
        // What it takes of the limit, and of its tenant's share; contents that others have may count in one alone.
        let wants = self.share.used().saturating_sub(before);
        let of_tenant = self.share.held(&tenant).saturating_sub(held);
        if wants.max(of_tenant) <= free || (wants == 0 && of_tenant == 0) {
            return Ok(());
        }
        self.remove(id);
        former.into_iter().for_each(|former| self.add(id, former));
        let wants = wants.max(of_tenant);
        self.refusals += 1;
        self.least_refused = Some(self.least_refused.map_or(wants, |least| least.min(wants)));
        let share = held + free;
        Err(MemoryExhausted { wants, used: before, limit: self.share.limit(), tenant, held, share })
    }

    fn add(&mut self, id: &RecordId, charge: MemoryCharge) {
        let tenant = id.tenant();
        self.share.charge(&tenant, charge.weight.own());
        for (content, bytes) in charge.weight.contents() {
            self.contents.entry(*content).or_default().change(&mut self.share, |shared| {
                // The charge of a content depends on the record's dialects; the largest charge counts.
                shared.bytes = shared.bytes.max(*bytes);
                *shared.records.entry(tenant.clone()).or_default() += 1;
            });
        }
        self.charges.insert(id.clone(), charge);
    }

    fn remove(&mut self, id: &RecordId) -> Option<MemoryCharge> {
        let (charge, tenant) = (self.charges.remove(id)?, id.tenant());
        self.share.release(&tenant, charge.weight.own());
        for (content, _) in charge.weight.contents() {
            let Some(shared) = self.contents.get_mut(content) else { continue };
            shared.change(&mut self.share, |shared| {
                if let Some(records) = shared.records.get_mut(&tenant) {
                    *records -= 1;
                    if *records == 0 {
                        shared.records.remove(&tenant);
                    }
                }
            });
            if shared.records.is_empty() {
                self.contents.remove(content);
            }
        }
        Some(charge)
    }
}

/// What each tenant may have whatever others have, of a limit.
fn floor(limit: usize) -> usize {
    (limit / FLOOR_PART).max(FLOOR_LEAST)
}

// Estimates from above how much memory a rendered record takes.

/// Bytes of any record and its responses: routes, heads, tables, a slot, a mailbox.
pub const RECORD_BYTES: usize = 20 << 10;
/// Copies of a record's text (JSON, without payloads): the record itself, and the dialects' documents.
pub const TEXT_FACTOR: usize = 10;
/// Bytes of a payload's allocations beside its content.
const CONTENT_BYTES: usize = 512;

/// Bytes that wrap gzip data in a text field.
const WRAPPING: usize = 128;

/// Distinguishes contents by a keyed hash, which no guest can predict. Two contents that collide by chance would be
/// charged once.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// Bytes that several records may share, by hash and length.
type Content = (u64, usize);

/// The memory of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    own: usize,
    contents: Vec<(Content, usize)>,
}

impl Weight {
    /// The memory of a record whose payloads are complete.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        let mut text = record.clone();
        let mut contents = Vec::new();
        for payload in [&mut text.user_data, &mut text.vendor_data, &mut text.vendor_data2] {
            let bytes = payload.take().and_then(|payload| payload.bytes());
            contents.extend(bytes.map(|bytes| (bytes, true)));
        }
        contents.extend(text.files.iter_mut().map(|file| (std::mem::take(&mut file.base64.0), false)));
        let mut seen = Vec::with_capacity(contents.len());
        for (bytes, in_documents) in contents {
            let content = (HASHER.hash_one(&bytes[..]), bytes.len());
            if seen.iter().all(|(other, _)| *other != content) {
                seen.push((content, taken(&bytes, in_documents, record)));
            }
        }
        let documents = [text.network.raw.as_ref(), text.network.network_data.as_ref()];
        let mut own = RECORD_BYTES + TEXT_FACTOR * length(&text);
        own += documents.into_iter().flatten().map(held).sum::<usize>();
        // The document of a text is kept beside it, and CloudCIX serves it.
        if let (Some(Value::String(_)), Some(document)) = (&text.network.raw, text.network.raw_document()) {
            own += held(document) + TEXT_FACTOR * length(document);
        }
        Self { own, contents: seen }
    }

    /// Bytes that it shares with no other record.
    #[must_use]
    pub fn own(&self) -> usize {
        self.own
    }

    /// All its bytes, as if it shared nothing.
    #[must_use]
    pub fn alone(&self) -> usize {
        self.own + self.contents.iter().map(|(_, bytes)| bytes).sum::<usize>()
    }

    fn contents(&self) -> &[(Content, usize)] {
        &self.contents
    }
}

/// The memory of a payload: its bytes, and its copies in the dialects' documents. Equal user-data and vendor-data
/// share one content, so the charge includes the copies of both.
fn taken(bytes: &Bytes, in_documents: bool, record: &Record) -> usize {
    let mut taken = bytes.len() + CONTENT_BYTES;
    if !in_documents {
        return taken;
    }
    let served = Dialect::ALL.iter().filter(|dialect| record.serve.serves(**dialect));
    let forms: Vec<PayloadEncoding> =
        served.flat_map(|dialect| [dialect.user_data(), dialect.vendor_data()]).collect();
    // Dialects that carry the payload in the same form share one copy.
    let mut add = |any_of: &[PayloadEncoding], bytes: usize| {
        taken += if forms.iter().any(|form| any_of.contains(form)) { bytes } else { 0 };
    };
    let encoded = as_base64(bytes.len());
    if std::str::from_utf8(bytes).is_ok() {
        add(&[PayloadEncoding::InDocument, PayloadEncoding::InDocumentOrBase64], escaped(bytes));
        add(&[PayloadEncoding::Base64, PayloadEncoding::Base64Text], encoded);
    } else {
        let wrapped = encoded + WRAPPING;
        add(&[PayloadEncoding::Base64, PayloadEncoding::InDocumentOrBase64], encoded);
        add(&[PayloadEncoding::InDocument], wrapped);
        add(&[PayloadEncoding::Text], wrapped);
        add(&[PayloadEncoding::Base64Text], as_base64(wrapped));
    }
    taken
}

/// Bytes of a text as a JSON string.
fn escaped(bytes: &[u8]) -> usize {
    let written = |byte: &u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    };
    bytes.iter().map(written).sum()
}

fn as_base64(bytes: usize) -> usize {
    bytes.div_ceil(3) * 4
}

/// Bytes of a node of a mapping, which has room for eleven members and at least five (`alloc::collections::btree`).
const MAPPING_NODE: usize = 16 + 11 * (size_of::<String>() + size_of::<Value>());
/// Fewest members of a node of a mapping beside the first.
const MAPPING_MEMBERS: usize = 5;

/// Bytes that a parsed document takes beyond its text: a list of single digits takes sixteen times its JSON, a mapping
/// of one member a hundred times.
fn held(value: &Value) -> usize {
    match value {
        Value::Array(values) => {
            values.capacity() * size_of::<Value>() + values.iter().map(held).sum::<usize>()
        }
        Value::Object(members) => {
            members.len().div_ceil(MAPPING_MEMBERS) * MAPPING_NODE
                + members.iter().map(|(name, value)| name.capacity() + held(value)).sum::<usize>()
        }
        Value::String(text) => text.capacity(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// Bytes of a value as JSON, without writing the JSON.
pub(crate) fn length(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // A path that is not UTF-8 fails the writer, but only the last few bytes are then missing.
    _ = serde_json::to_writer(&mut count, value);
    count.0
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_BYTES, LEAST_BYTES, MemoryBudget, RESERVED_BYTES, WORKER_BYTES, Weight, within};
    use crate::registry::RecordId;
    use metadata_content::record::Record;
    use metadata_content::source::RecordSource;

    /// A record whose user-data repeats `letter` this many times.
    fn record(letter: &str, bytes: usize) -> Record {
        let text = "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: a, \
                project: {id: p, number: 1, account: '000000000000'}}\nhostname: {short: a}\n\
                placement: {region: r, zone: z}\nserve: {limits: {user_data: 1048576}}\n";
        let mut record = Record::parse("a", text).expect("a good record").0;
        record.user_data = Some(bytes::Bytes::from(letter.repeat(bytes)).into());
        record
    }

    fn id(key: &str) -> RecordId {
        RecordId::new(RecordSource::File, key)
    }

    const LARGE: usize = 100_000;

    #[test]
    fn a_record_beyond_the_limit_is_refused_with_its_size_and_the_setting() {
        let large = record("a", LARGE);
        let room = MemoryBudget::new(Weight::of(&large).alone() + 1_000);
        room.take(&id("a"), &large).expect("there is room for one");
        let refused = room.take(&id("b"), &record("b", LARGE)).expect_err("there is room for one");
        assert_eq!(room.usage().refusals, 1);
        let text = refused.to_string();
        for said in ["record_memory", "KiB of memory", "are taken"] {
            assert!(text.contains(said), "{text}");
        }
    }

    #[test]
    fn a_record_that_grew_too_much_keeps_its_former_charge() {
        let small = record("a", 1_000);
        let room = MemoryBudget::new(Weight::of(&small).alone() + 1_000);
        room.take(&id("a"), &small).expect("room");
        let before = room.usage().used;
        room.take(&id("a"), &record("a", LARGE)).expect_err("no room");
        assert_eq!(room.usage().used, before);
        room.take(&id("a"), &small).expect("the former version is there");
    }

    #[test]
    fn bytes_that_records_share_are_charged_once() {
        let (first, other) = (record("a", LARGE), record("b", LARGE));
        let room = MemoryBudget::new(usize::MAX);
        for key in ["a", "b", "c"] {
            room.take(&id(key), &first).expect("room");
        }
        let weight = Weight::of(&first);
        assert_eq!(room.usage().used, weight.alone() + 2 * weight.own());
        room.take(&id("c"), &other).expect("room");
        assert_eq!(room.usage().used, 2 * weight.alone() + weight.own());
        for key in ["a", "b", "c"] {
            room.give_back(&id(key));
        }
        assert_eq!(room.usage().used, 0);
    }

    #[test]
    fn freed_memory_is_announced_once_it_suffices() {
        let large = record("a", LARGE);
        let room = MemoryBudget::new(Weight::of(&large).alone() + 1_000);
        let freed = room.freed();
        room.take(&id("small"), &record("s", 10)).expect("room");
        room.take(&id("large"), &large).expect_err("no room beside the small one");
        room.take(&id("other"), &record("o", LARGE - 1_000)).expect_err("nor for this");
        assert!(!freed.has_changed().expect("the room is there"));
        room.give_back(&id("small"));
        assert!(freed.has_changed().expect("the room is there"));
        room.take(&id("large"), &large).expect("there is room now");
        // Each release is announced, so that a refused record gets another chance.
        let freed = room.freed();
        room.give_back(&id("large"));
        assert!(freed.has_changed().expect("the room is there"));
    }

    #[test]
    fn charges_of_queued_records_stay_until_their_feed_ends() {
        let room = MemoryBudget::new(usize::MAX);
        let (there, comes) = (record("a", 10), record("b", 10));
        room.take(&id("there"), &there).expect("room");
        room.arrive(&id("there"), &there).expect("room");
        room.take(&id("comes"), &comes).expect("room");
        let both = room.usage().used;
        room.keep_only(RecordSource::File, |_| false);
        assert!(room.usage().used > 0 && room.usage().used < both, "what is on its way stays");
        room.forget_pending(RecordSource::File);
        assert_eq!(room.usage().used, 0);
    }

    /// A record of a VM in a namespace.
    fn of(namespace: &str, name: usize) -> RecordId {
        RecordId::new(RecordSource::Kubevirt, &format!("{namespace}/vm-{name}"))
    }

    #[test]
    fn a_namespace_that_fills_the_memory_leaves_room_for_another() {
        let room = MemoryBudget::new(64 << 20);
        let mut taken = 0;
        for n in 0..200 {
            taken += usize::from(room.take(&of("hostile", n), &record(&n.to_string(), LARGE * 3)).is_ok());
        }
        assert!(taken > 10 && room.usage().used <= 32 << 20, "{taken} records, {:?}", room.usage());
        let refused = room.take(&of("hostile", 999), &record("z", LARGE * 10)).expect_err("it has its share");
        let text = refused.to_string();
        assert!(text.contains("by namespace/hostile") && text.contains("its share"), "{text}");
        // Small and large records of another namespace are admitted.
        room.take(&of("modest", 0), &record("m", 1_000)).expect("a small one");
        room.take(&of("modest", 1), &record("n", LARGE * 3)).expect("a large one");
        let shares = room.shares();
        assert_eq!((shares[0].limit, shares[0].top.len()), ("record_memory", 2));
        assert_eq!(shares[0].top[0].0, of("hostile", 0).tenant());
        assert!(room.free_for(&of("modest", 0).tenant()) > room.free_for(&of("hostile", 0).tenant()));
    }

    #[test]
    fn tenants_pay_equal_parts_of_what_they_share_and_nothing_is_left_of_it() {
        let room = MemoryBudget::new(64 << 20);
        let shared = record("s", LARGE);
        let weight = Weight::of(&shared);
        room.take(&of("a", 0), &shared).expect("room");
        room.take(&of("b", 0), &shared).expect("room");
        room.take(&of("b", 1), &shared).expect("room");
        let content = weight.alone() - weight.own();
        assert!(room.usage().used.abs_diff(content + 3 * weight.own()) <= 2, "{:?}", room.usage());
        let held = room.shares()[0].top.clone();
        assert_eq!(held[0], (of("b", 0).tenant(), content.div_ceil(2) + 2 * weight.own()));
        assert_eq!(held[1], (of("a", 0).tenant(), content.div_ceil(2) + weight.own()));
        for id in [of("b", 0), of("a", 0), of("b", 1)] {
            room.give_back(&id);
        }
        assert_eq!((room.usage().used, room.shares()[0].top.len()), (0, 0));
    }

    #[test]
    fn a_lower_limit_removes_no_record() {
        let large = record("a", LARGE);
        let room = MemoryBudget::new(usize::MAX);
        room.take(&id("a"), &large).expect("room");
        room.set_limit(1);
        room.take(&id("a"), &record("a", LARGE / 2)).expect("it shrinks");
        room.take(&id("b"), &record("b", 1)).expect_err("no room");
    }

    #[test]
    fn the_memory_for_records_follows_the_control_groups_limit() {
        let rest = |limit: usize, workers: usize| {
            let rest = limit - RESERVED_BYTES - WORKER_BYTES * workers;
            rest - rest / 8
        };
        for (limit, workers, expected) in [
            (None, 1, DEFAULT_BYTES),
            (Some(512 << 20), 1, rest(512 << 20, 1)),
            (Some(4_usize << 30), 4, rest(4 << 30, 4)),
            (Some(64 << 20), 1, LEAST_BYTES),
            (Some(0), 32, LEAST_BYTES),
        ] {
            assert_eq!(
                within(limit.map(|limit| limit as u64), workers),
                expected,
                "{limit:?}, {workers} workers"
            );
        }
    }

    #[test]
    fn a_network_text_is_charged_with_what_its_document_holds() {
        const MAPPINGS: usize = 1_000;
        let with = |raw: String| {
            let mut value = serde_json::to_value(record("a", 1)).expect("JSON");
            value["network"]["mode"] = "raw".into();
            value["network"]["raw"] = raw.into();
            Weight::of(&Record::parse("a.json", &value.to_string()).expect("a record").0).alone()
        };
        let text = |member: &str| format!("{{version: 2, a: [{}]}}", vec![member; MAPPINGS].join(","));
        let (mappings, words) = (with(text("{a: 0}")), with(text("xxxxxx")));
        // A mapping of one member takes a node of a tree, whatever is in it.
        assert!(mappings > words + MAPPINGS * 500, "{mappings} and {words}");
    }
}
