//! Connections of all ports and recently closed flows: found by flow, bounded, each stored once.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::connection::{Conn, Rating};
use super::timewait::TimeWait;

/// A hasher that returns its input: flows are already hashes, with a key that guests do not know.
#[derive(Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, octets: &[u8]) {
        for octet in octets {
            self.0 = self.0.rotate_left(8) ^ u64::from(*octet);
        }
    }

    fn write_u64(&mut self, flow: u64) {
        self.0 = flow;
    }
}

/// A map by flow number.
type ByFlow<T> = HashMap<u64, T, BuildHasherDefault<AsIs>>;

/// What refers to a removed connection outside the table.
pub(super) struct Removed {
    pub(super) flow: Flow,
    pub(super) slot: Slot,
    /// The index among its port's connections.
    pub(super) place: usize,
    /// The last rating.
    pub(super) rated: Rating,
}

/// Connections by number, their numbers by flow, and recently closed flows. Every frame looks up a flow, so the index
/// of flows is separate from the connections and small enough to stay in the cache.
pub(super) struct Table<E> {
    conns: Vec<Option<Conn<E>>>,
    free: Vec<u32>,
    numbers: ByFlow<u32>,
    waits: ByFlow<TimeWait>,
    limits: (usize, usize),
}

impl<E> Table<E> {
    /// Creates a table for `conns` connections and `waits` recently closed flows. All of it is reserved at once, so
    /// that nothing moves later. Memory is used only as far as it is filled.
    pub(super) fn new(conns: usize, waits: usize) -> Self {
        Self {
            conns: Vec::with_capacity(conns),
            free: Vec::with_capacity(conns),
            numbers: HashMap::with_capacity_and_hasher(conns, BuildHasherDefault::default()),
            waits: HashMap::with_capacity_and_hasher(waits, BuildHasherDefault::default()),
            limits: (conns, waits),
        }
    }

    pub(super) fn held(&self) -> usize {
        self.numbers.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.held() >= self.limits.0
    }

    /// How many connection numbers have ever been assigned, in use or not.
    pub(super) fn span(&self) -> u32 {
        self.conns.len() as u32
    }

    /// The connection number of a flow.
    pub(super) fn find(&self, flow: u64) -> Option<u32> {
        self.numbers.get(&flow).copied()
    }

    pub(super) fn get(&self, at: u32) -> Option<&Conn<E>> {
        self.conns.get(at as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, at: u32) -> Option<&mut Conn<E>> {
        self.conns.get_mut(at as usize)?.as_mut()
    }

    /// Adds a connection of a flow that has none; returns its number. The caller has checked that there is room.
    pub(super) fn insert(&mut self, conn: Conn<E>) -> u32 {
        let flow = conn.flow.number();
        let at = match self.free.pop() {
            Some(at) => {
                self.conns[at as usize] = Some(conn);
                at
            }
            None => {
                self.conns.push(Some(conn));
                self.conns.len() as u32 - 1
            }
        };
        self.numbers.insert(flow, at);
        at
    }

    /// Removes a connection; returns what refers to it elsewhere. The connection is dropped in its place, because
    /// moving it out would read all its cache lines.
    pub(super) fn remove(&mut self, at: u32) -> Option<Removed> {
        let place = self.conns.get_mut(at as usize)?;
        let Conn { flow, slot, place: index, rated, .. } = *place.as_ref()?;
        *place = None;
        self.free.push(at);
        self.numbers.remove(&flow.number());
        Some(Removed { flow, slot, place: index, rated })
    }

    /// The number of closed flows remembered.
    pub(super) fn waits(&self) -> usize {
        self.waits.len()
    }

    /// The closed flows remembered.
    pub(super) fn waiting(&self) -> impl Iterator<Item = u64> {
        self.waits.keys().copied()
    }

    /// Remembers a closed flow if there is room; returns whether there was.
    pub(super) fn remember(&mut self, flow: Flow, wait: TimeWait) -> bool {
        let has_room = self.waits.len() < self.limits.1;
        if has_room {
            self.waits.insert(flow.number(), wait);
        }
        has_room
    }

    /// The entry of a closed flow.
    pub(super) fn wait(&self, flow: u64) -> Option<TimeWait> {
        self.waits.get(&flow).copied()
    }

    /// The entry of a closed flow, for changes.
    pub(super) fn wait_mut(&mut self, flow: Flow) -> Option<&mut TimeWait> {
        self.waits.get_mut(&flow.number())
    }

    /// Forgets a closed flow; returns whether it was remembered.
    pub(super) fn forget(&mut self, flow: u64) -> bool {
        self.waits.remove(&flow).is_some()
    }
}
