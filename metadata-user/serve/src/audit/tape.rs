//! A bounded, lock-free queue from a worker to the control side, without allocation on the worker's side.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use metadata_common::maps::{MAX_SLOTS, Slot};

use metadata_base::connection::Connection;
use metadata_content::http::{Method, Status};
use metadata_content::store::{Datasource, Responses};

/// Capacity of a tape: about 50 ms of lines at the highest load, in 1 MiB.
pub const CAPACITY: usize = 4_096;
/// Part of the capacity that is reserved for errors.
pub const RESERVED: usize = CAPACITY / 8;
/// Number of queued items at which sampling of successful answers begins.
const LOADED: usize = CAPACITY / 2;
/// Longest path kept, in octets.
pub const PATH_MAX: usize = 120;

/// An answer for the audit log.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) slot: Slot,
    pub(crate) unix_seconds: u64,
    pub(crate) local: (IpAddr, u16),
    pub(crate) remote: (IpAddr, u16),
    /// Duration of the wait; zero for an answer in the turn that received the request.
    pub(crate) took: Duration,
    pub(crate) method: Method,
    pub(crate) path: Path,
    pub(crate) datasource: Datasource,
    pub(crate) status: Status,
    pub(crate) bytes: u64,
    /// The VM's responses. They name the right VM even if the slot is reused before the line is written.
    pub(crate) responses: Option<Arc<Responses>>,
    /// Set when the entry is recorded: the number of answers it stands for.
    pub(crate) sampled: u32,
}

impl Entry {
    /// Sets slot, endpoints and time; the other fields are empty.
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
    /// The path of a request target as sent. Scheme, authority and query are left out, because they may hold secrets.
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

/// An item of a worker's tape, in order.
#[derive(Debug)]
pub(super) enum Item {
    Answer(Entry),
    /// Duration of a turn that answered requests it received.
    Turn(Duration),
}

/// The tape of one worker. While it is off, which it is at first, it keeps nothing and has no memory.
#[derive(Debug)]
pub struct Tape {
    is_on: AtomicBool,
    /// Made when the tape is first turned on.
    room: OnceLock<TapeRoom>,
    sample: u32,
    /// Answers without a wait were recorded since the end of the last turn.
    fresh: AtomicBool,
    dropped: AtomicU64,
    left_out: AtomicU64,
}

#[derive(Debug)]
struct TapeRoom {
    items: ArrayQueue<Item>,
    /// Per slot: successful answers under load, modulo `sample`.
    counts: Box<[AtomicU16]>,
}

impl Tape {
    /// An empty tape that is off. Under load, one in `sample` answers is recorded.
    #[must_use]
    pub fn new(sample: u32) -> Arc<Self> {
        Arc::new(Self {
            is_on: AtomicBool::new(false),
            room: OnceLock::new(),
            sample: sample.max(1),
            fresh: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        })
    }

    /// Records answers from now on. Allocates on the first call.
    pub fn turn_on(&self) {
        self.room.get_or_init(|| TapeRoom {
            items: ArrayQueue::new(CAPACITY),
            counts: (0..MAX_SLOTS).map(|_| AtomicU16::new(0)).collect(),
        });
        // Relaxed: the worker may see it a turn late, and `room` has its own synchronisation.
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Records no further answers.
    pub fn turn_off(&self) {
        self.is_on.store(false, Ordering::Relaxed);
    }

    /// True if answers are recorded.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Records an answer if there is room. Never waits. Only the worker calls it.
    pub(crate) fn note(&self, mut entry: Entry) {
        let Some(TapeRoom { items, counts }) = self.room.get() else { return };
        let (waiting, is_good) = (items.len(), entry.status < Status(400));
        if is_good && waiting >= LOADED && self.sample > 1 {
            if !self.is_next(counts, entry.slot) {
                return count(&self.left_out);
            }
            entry.sampled = self.sample;
        }
        let has_room = !is_good || waiting < CAPACITY - RESERVED;
        let fresh = entry.took.is_zero();
        if !has_room || items.push(Item::Answer(entry)).is_err() {
            return count(&self.dropped);
        }
        if fresh {
            self.fresh.store(true, Ordering::Relaxed);
        }
    }

    /// Called after each turn of the worker with its duration.
    pub(crate) fn turned(&self, turn: Duration) {
        if self.fresh.load(Ordering::Relaxed) {
            self.fresh.store(false, Ordering::Relaxed);
            if let Some(room) = self.room.get() {
                // If there is no room, the answers get the duration of the next turn that is recorded.
                let _ = room.items.push(Item::Turn(turn));
            }
        }
    }

    /// True for one in `sample` answers of a slot.
    fn is_next(&self, counts: &[AtomicU16], slot: Slot) -> bool {
        let Some(count) = usize::try_from(slot).ok().and_then(|slot| counts.get(slot)) else {
            return true;
        };
        let seen = count.load(Ordering::Relaxed);
        let sample = u16::try_from(self.sample).unwrap_or(u16::MAX);
        count.store((seen + 1) % sample, Ordering::Relaxed);
        seen == 0
    }

    pub(super) fn pop(&self) -> Option<Item> {
        self.room.get()?.items.pop()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}

/// Adds one. Only the owning thread may call it.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}
