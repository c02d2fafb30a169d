//! The memory accounts of records.
//!
//! The agent runs in a control group, and the kernel kills it beyond the memory limit. So the agent charges each record
//! before it renders it, and refuses one that does not fit. All others stay served, and a record that grew too much
//! keeps its former version. Freed memory admits refused records.
//!
//! A charge is an upper estimate ([`Weight`]), which the bench `render_cost` compares with the allocations. Octets that
//! several records share, such as a common vendor-data, are stored once and charged once.

pub mod cgroup;
mod weight;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::registry::RecordId;
use metadata_content::record::Record;
use metadata_content::source::Source;
use weight::Content;
#[cfg(feature = "kubevirt")]
pub(crate) use weight::length;
pub use weight::{RECORD_OCTETS, TEXT_FACTOR, Weight};

/// Octets for records if neither the configuration nor a control group sets a limit.
pub const DEFAULT_OCTETS: usize = 2 << 30;
/// Least octets for records in a small control group: about 300 VMs with small user-data.
pub const LEAST_OCTETS: usize = 16 << 20;
/// Octets of the control group for everything else: the program, tables, VMIs (at most 32 MiB), pages of the API
/// server's lists, and records during rendering.
pub const RESERVED_OCTETS: usize = 128 << 20;
/// Octets of the control group for each worker: up to 64 MiB of AF_XDP frames, 8 MiB of queued frames, the connections,
/// and a share of two pools of 64 MiB. The pools hold incomplete requests and unread computed answers, and fill only
/// under attack.
pub const WORKER_OCTETS: usize = 144 << 20;

/// Octets for records in a control group of `limit` octets, with this number of workers. An eighth of the rest stays
/// free for fragmentation and for former versions during replacement.
#[must_use]
pub fn within(limit: Option<u64>, workers: u32) -> usize {
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else { return DEFAULT_OCTETS };
    let workers = usize::try_from(workers).unwrap_or(usize::MAX);
    let rest = limit.saturating_sub(RESERVED_OCTETS.saturating_add(WORKER_OCTETS.saturating_mul(workers)));
    (rest - rest / 8).max(LEAST_OCTETS)
}

/// The memory for records is exhausted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error(
    "it would take {} of memory, and of {} for all records {} are taken; a version that is served stays. Raise \
     `record_memory` and the agent's memory limit, serve fewer dialects (`serve.dialects`), or shrink user-data",
    Size(*wants), Size(*limit), Size(*used)
)]
pub struct NoRoom {
    /// Octets the record needs beyond those of its former version.
    pub wants: usize,
    /// Octets that all records use.
    pub used: usize,
    /// Octets that all records may use.
    pub limit: usize,
}

/// Formats octets as KiB or MiB.
struct Size(usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            octets if octets >= 1 << 20 => write!(f, "{} MiB", octets.div_ceil(1 << 20)),
            octets => write!(f, "{} KiB", octets.div_ceil(1 << 10)),
        }
    }
}

/// The use of memory by records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Octets that records may use.
    pub limit: usize,
    /// Octets that records use.
    pub used: usize,
    /// Refused records since the start.
    pub refusals: u64,
}

/// The memory accounts of all records. The feeds reserve memory before they publish a record, and the node confirms the
/// records it holds.
#[derive(Debug)]
pub struct Room {
    ledger: Mutex<Ledger>,
    freed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Ledger {
    usage: Usage,
    charges: HashMap<RecordId, Charge>,
    /// Shared octets: the number of records that share them, and the octets charged.
    contents: HashMap<Content, (usize, usize)>,
    /// The smallest amount ever refused. Freeing less than this admits no record, so it is not announced.
    least_refused: Option<usize>,
}

#[derive(Clone, Debug)]
struct Charge {
    weight: Weight,
    /// True once the node holds the record, and false while it is in the queue.
    arrived: bool,
}

impl Room {
    /// Creates empty accounts of `limit` octets.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        let usage = Usage { limit, ..Usage::default() };
        let ledger = Mutex::new(Ledger { usage, ..Ledger::default() });
        Arc::new(Self { ledger, freed: watch::Sender::new(0) })
    }

    /// Sets the limit. Records beyond it stay, but no further one is admitted.
    pub fn set_limit(&self, limit: usize) {
        let mut ledger = self.ledger();
        ledger.usage.limit = limit;
        self.announce(ledger);
    }

    /// The current use.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.ledger().usage
    }

    /// Octets that are free.
    #[must_use]
    pub fn free(&self) -> usize {
        let usage = self.usage();
        usage.limit.saturating_sub(usage.used)
    }

    /// Reserves memory for a record, in place of the charge under its id.
    ///
    /// # Errors
    /// [`NoRoom`]; the former charge stays.
    pub fn take(&self, id: &RecordId, record: &Record) -> Result<(), NoRoom> {
        let weight = Weight::of(record);
        let mut ledger = self.ledger();
        let before = ledger.usage.used;
        let taken = ledger.take(id, weight, false);
        if ledger.usage.used < before {
            self.announce(ledger);
        }
        taken
    }

    /// Checks whether a record would fit in place of the charge under its id.
    ///
    /// # Errors
    /// [`NoRoom`] if it would not.
    pub fn fits(&self, id: &RecordId, record: &Record) -> Result<(), NoRoom> {
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
    /// [`NoRoom`]; the former charge stays.
    pub fn arrive(&self, id: &RecordId, record: &Record) -> Result<(), NoRoom> {
        let weight = Weight::of(record);
        let mut ledger = self.ledger();
        if let Some(charge) = ledger.charges.get_mut(id).filter(|charge| charge.weight == weight) {
            charge.arrived = true;
            return Ok(());
        }
        let before = ledger.usage.used;
        let taken = ledger.take(id, weight, true);
        if ledger.usage.used < before {
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
    pub fn keep_only(&self, source: Source, holds: impl Fn(&RecordId) -> bool) {
        self.give_back_all(|id, charge| id.source == source && charge.arrived && !holds(id));
    }

    /// Releases the charges of a source's queued records, after its feed has ended.
    pub fn forget_pending(&self, source: Source) {
        self.give_back_all(|id, charge| id.source == source && !charge.arrived);
    }

    fn give_back_all(&self, goes: impl Fn(&RecordId, &Charge) -> bool) {
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
        let free = ledger.usage.limit.saturating_sub(ledger.usage.used);
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
    fn take(&mut self, id: &RecordId, weight: Weight, arrived: bool) -> Result<(), NoRoom> {
        let before = self.usage.used;
        let former = self.remove(id);
        let arrived = arrived || former.as_ref().is_some_and(|former| former.arrived);
        self.add(id, Charge { weight, arrived });
        let Usage { limit, used, .. } = self.usage;
        if used <= limit || used <= before {
            return Ok(());
        }
        self.remove(id);
        former.into_iter().for_each(|former| self.add(id, former));
        let wants = used - before;
        self.usage.refusals += 1;
        self.least_refused = Some(self.least_refused.map_or(wants, |least| least.min(wants)));
        Err(NoRoom { wants, used: before, limit })
    }

    fn add(&mut self, id: &RecordId, charge: Charge) {
        self.usage.used += charge.weight.own();
        for (content, octets) in charge.weight.contents() {
            let (records, taken) = self.contents.entry(*content).or_default();
            *records += 1;
            // The charge of a content depends on the record's dialects; the largest charge counts.
            self.usage.used += octets.saturating_sub(*taken);
            *taken = (*taken).max(*octets);
        }
        self.charges.insert(id.clone(), charge);
    }

    fn remove(&mut self, id: &RecordId) -> Option<Charge> {
        let charge = self.charges.remove(id)?;
        self.usage.used -= charge.weight.own();
        for (content, _) in charge.weight.contents() {
            let Some((records, taken)) = self.contents.get_mut(content) else { continue };
            *records -= 1;
            if *records == 0 {
                self.usage.used -= *taken;
                self.contents.remove(content);
            }
        }
        Some(charge)
    }
}
