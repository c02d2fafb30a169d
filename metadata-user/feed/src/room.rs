//! How much memory records may take.
//!
//! A node's agent runs in a control group that kills it when it takes too much. So records are counted before they are
//! rendered, and one for which there is no room is refused with a reason, while all others are served on. A record that
//! has grown too much leaves its former version in force. Room that is given back lets refused records in.
//!
//! What is counted is an upper estimate ([`Weight`]), which the bench `render_cost` holds to what is allocated. Octets
//! that several records have in common (a vendor-data of all VMs) are held once and counted once.

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

/// Octets records may take where neither the configuration nor a control group sets a limit.
pub const DEFAULT_OCTETS: usize = 2 << 30;
/// Least octets for records, however small the control group is: about 300 VMs with small user-data.
pub const LEAST_OCTETS: usize = 16 << 20;
/// Octets of the control group that are not for records: the program, tables, VMIs (32 MiB at most), pages of the API
/// server's lists, records that are being rendered.
pub const RESERVED_OCTETS: usize = 128 << 20;
/// Octets of the control group for each worker: up to 64 MiB of AF_XDP frames, 8 MiB of frames that wait, connections, and
/// a part of the 64 MiB each of half requests and of unread computed answers, which only guests that attack come to.
pub const WORKER_OCTETS: usize = 144 << 20;

/// Octets for records in a control group of `limit` octets, for an agent with so many workers. An eighth of what is left
/// is for holes between allocations, and for the former version of a record that is being replaced.
#[must_use]
pub fn within(limit: Option<u64>, workers: u32) -> usize {
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else { return DEFAULT_OCTETS };
    let workers = usize::try_from(workers).unwrap_or(usize::MAX);
    let rest = limit.saturating_sub(RESERVED_OCTETS.saturating_add(WORKER_OCTETS.saturating_mul(workers)));
    (rest - rest / 8).max(LEAST_OCTETS)
}

/// There is no room for a record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error(
    "it would take {} of memory, and of {} for all records {} are taken; a version that is served stays. Raise \
     `record_memory` and the agent's memory limit, serve fewer dialects (`serve.dialects`), or shrink user-data",
    Size(*wants), Size(*limit), Size(*used)
)]
pub struct NoRoom {
    /// Octets the record would take beyond what its former version does.
    pub wants: usize,
    /// Octets all records take.
    pub used: usize,
    /// Octets they may take.
    pub limit: usize,
}

/// Octets, for people.
struct Size(usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            octets if octets >= 1 << 20 => write!(f, "{} MiB", octets.div_ceil(1 << 20)),
            octets => write!(f, "{} KiB", octets.div_ceil(1 << 10)),
        }
    }
}

/// How much room there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Octets records may take.
    pub limit: usize,
    /// Octets they take.
    pub used: usize,
    /// Records for which there was no room, since the start.
    pub refusals: u64,
}

/// The room of all records. Shared between the feeds, which ask before they report a record, and the node, which knows
/// what is held.
#[derive(Debug)]
pub struct Room {
    ledger: Mutex<Ledger>,
    freed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Ledger {
    usage: Usage,
    charges: HashMap<RecordId, Charge>,
    /// Octets that records have in common: how many have them, and what they take.
    contents: HashMap<Content, (usize, usize)>,
    /// The least that was ever refused: less room interests nobody.
    least_refused: Option<usize>,
}

#[derive(Clone, Debug)]
struct Charge {
    weight: Weight,
    /// The node has it; false while it is on its way there.
    arrived: bool,
}

impl Room {
    /// An empty room of so many octets.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        let usage = Usage { limit, ..Usage::default() };
        let ledger = Mutex::new(Ledger { usage, ..Ledger::default() });
        Arc::new(Self { ledger, freed: watch::Sender::new(0) })
    }

    /// Sets the limit. Records beyond it stay; none comes until there is room.
    pub fn set_limit(&self, limit: usize) {
        let mut ledger = self.ledger();
        ledger.usage.limit = limit;
        self.announce(ledger);
    }

    /// How much is taken.
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

    /// Takes room for a record in the place of what was taken under its name.
    ///
    /// # Errors
    /// [`NoRoom`]; what was taken before stays taken.
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

    /// Whether there is room for a record in the place of what was taken under its name.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn fits(&self, id: &RecordId, record: &Record) -> Result<(), NoRoom> {
        let weight = Weight::of(record);
        let mut ledger = self.ledger();
        let former = ledger.charges.get(id).cloned();
        ledger.take(id, weight, false)?;
        ledger.remove(id);
        former.into_iter().for_each(|former| ledger.add(id, former));
        Ok(())
    }

    /// Notes that the node has a record for which its feed took room; takes room where none did.
    ///
    /// # Errors
    /// [`NoRoom`]; what was taken before stays taken.
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

    /// Gives back what was taken under a name.
    pub fn give_back(&self, id: &RecordId) {
        let mut ledger = self.ledger();
        ledger.remove(id);
        self.announce(ledger);
    }

    /// Gives back what records of a source took that the node does not hold. Those on their way stay.
    pub fn keep_only(&self, source: Source, holds: impl Fn(&RecordId) -> bool) {
        self.give_back_all(|id, charge| id.source == source && charge.arrived && !holds(id));
    }

    /// Gives back what records of a source took that were on their way: their feed has ended.
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

    /// Changes whenever there is room for a record that was refused.
    #[must_use]
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.freed.subscribe()
    }

    /// Announces room that has been freed, if it is enough for a record that was refused.
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
            // Of the dialects of all who have it, those that write it most often count.
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
