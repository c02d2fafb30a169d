//! From a worker to the control side: bounded, lock-free, and without an allocation on the worker's side.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use metadata_common::maps::{MAX_SLOTS, Slot};

use metadata_base::connection::Connection;
use metadata_content::http::{Method, Status};
use metadata_content::store::{Datasource, Responses};

/// Lines a worker may be ahead of the control side: some 50 ms of the busiest there is, in 1 MiB.
pub const CAPACITY: usize = 4_096;
/// Of these, how many are left for errors.
pub const RESERVED: usize = CAPACITY / 8;
/// Lines from which on good answers are sampled.
const LOADED: usize = CAPACITY / 2;
/// Octets kept of a path.
pub const PATH_MAX: usize = 120;

/// An answer that was given.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) slot: Slot,
    pub(crate) unix_seconds: u64,
    pub(crate) local: (IpAddr, u16),
    pub(crate) remote: (IpAddr, u16),
    /// How long it waited; zero for what was answered in the turn it came in.
    pub(crate) took: Duration,
    pub(crate) method: Method,
    pub(crate) path: Path,
    pub(crate) datasource: Datasource,
    pub(crate) status: Status,
    pub(crate) bytes: u64,
    /// Whose answer it is: exact even if the slot is another's by the time it is written down.
    pub(crate) responses: Option<Arc<Responses>>,
    /// Set when it is noted: it stands for so many.
    pub(crate) sampled: u32,
}

impl Entry {
    /// Who asked, and when; what is still to be filled in is empty.
    pub(crate) fn of(connection: &Connection, unix_seconds: u64) -> Self {
        let Connection { slot, local, remote } = *connection;
        Self {
            slot,
            unix_seconds,
            local,
            remote,
            took: Duration::ZERO,
            method: Method::Other,
            path: Path::default(),
            datasource: Datasource::NONE,
            status: Status(0),
            bytes: 0,
            responses: None,
            sampled: 1,
        }
    }
}

/// The beginning of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    octets: [u8; PATH_MAX],
    length: u8,
}

impl Default for Path {
    fn default() -> Self {
        Self { octets: [0; PATH_MAX], length: 0 }
    }
}

impl Path {
    /// The path of a request target, as it was sent, without scheme, authority and query: those may hold secrets.
    pub(crate) fn of(target: &str) -> Self {
        let target = match target.split_once("://") {
            Some((_, rest)) => rest.find(['/', '?']).map_or("", |at| &rest[at..]),
            None => target,
        };
        let end = target.find(['?', '#']).unwrap_or(target.len());
        let end = target[..end].floor_char_boundary(PATH_MAX);
        let mut path = Self { length: u8::try_from(end).unwrap_or_default(), ..Self::default() };
        path.octets[..end].copy_from_slice(&target.as_bytes()[..end]);
        path
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.octets[..self.length.into()]).unwrap_or_default()
    }
}

/// What a worker notes, in order.
#[derive(Debug)]
pub(super) enum Item {
    Answer(Entry),
    /// A turn with answers of its own took so long.
    Turn(Duration),
}

/// One worker's notes.
#[derive(Debug)]
pub struct Tape {
    items: ArrayQueue<Item>,
    sample: u32,
    /// Good answers of each slot while there was load.
    counts: Box<[AtomicU16]>,
    /// There are answers since the last turn's end.
    fresh: AtomicBool,
    dropped: AtomicU64,
    left_out: AtomicU64,
}

impl Tape {
    /// An empty tape; under load one in `sample` is noted.
    #[must_use]
    pub fn new(sample: u32) -> Arc<Self> {
        Arc::new(Self {
            items: ArrayQueue::new(CAPACITY),
            sample: sample.max(1),
            counts: (0..MAX_SLOTS).map(|_| AtomicU16::new(0)).collect(),
            fresh: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        })
    }

    /// Notes an answer, if there is room. Never waits. Only the worker calls it.
    pub(crate) fn note(&self, mut entry: Entry) {
        let (waiting, is_good) = (self.items.len(), entry.status < Status(400));
        if is_good && waiting >= LOADED && self.sample > 1 {
            if !self.is_next(entry.slot) {
                return count(&self.left_out);
            }
            entry.sampled = self.sample;
        }
        let has_room = !is_good || waiting < CAPACITY - RESERVED;
        let fresh = entry.took.is_zero();
        if !has_room || self.items.push(Item::Answer(entry)).is_err() {
            return count(&self.dropped);
        }
        if fresh {
            self.fresh.store(true, Ordering::Relaxed);
        }
    }

    /// The worker's turn took so long.
    pub(crate) fn turned(&self, turn: Duration) {
        if self.fresh.load(Ordering::Relaxed) {
            self.fresh.store(false, Ordering::Relaxed);
            // Where there is no room the answers wait for the end of the next turn.
            let _ = self.items.push(Item::Turn(turn));
        }
    }

    /// True for one in `sample` of a slot's.
    fn is_next(&self, slot: Slot) -> bool {
        let Some(count) = usize::try_from(slot).ok().and_then(|slot| self.counts.get(slot)) else {
            return true;
        };
        let seen = count.load(Ordering::Relaxed);
        let sample = u16::try_from(self.sample).unwrap_or(u16::MAX);
        count.store((seen + 1) % sample, Ordering::Relaxed);
        seen == 0
    }

    pub(super) fn pop(&self) -> Option<Item> {
        self.items.pop()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}

/// One more; nobody else writes.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}
