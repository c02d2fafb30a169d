//! Connections of all ports and recently closed flows: found by flow, bounded, each stored once.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::connection::{ConnectionRank, StackConnection};
use super::timewait::TimeWait;

/// A hasher that returns its input: flows are already hashes, with a key that guests do not know.
#[derive(Default)]
pub(super) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, flow: u64) {
        self.0 = flow;
    }
}

/// A map by flow number.
type ByFlow<T> = HashMap<u64, T, BuildHasherDefault<IdentityHasher>>;

/// What refers to a removed connection outside the table.
pub(super) struct RemovedConnection {
    pub(super) flow: Flow,
    pub(super) slot: Slot,
    /// The index among its port's connections.
    pub(super) place: usize,
    /// The last rating.
    pub(super) rated: ConnectionRank,
}

/// Connections by number, their numbers by flow, and recently closed flows. Every frame looks up a flow, so the index
/// of flows is separate from the connections and small enough to stay in the cache.
pub(super) struct Table<E> {
    conns: Vec<Option<StackConnection<E>>>,
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

    pub(super) fn get(&self, at: u32) -> Option<&StackConnection<E>> {
        self.conns.get(at as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, at: u32) -> Option<&mut StackConnection<E>> {
        self.conns.get_mut(at as usize)?.as_mut()
    }

    /// Adds a connection of a flow that has none; returns its number. The caller has checked that there is room.
    pub(super) fn insert(&mut self, conn: StackConnection<E>) -> u32 {
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
    pub(super) fn remove(&mut self, at: u32) -> Option<RemovedConnection> {
        let place = self.conns.get_mut(at as usize)?;
        let StackConnection { flow, slot, place: index, rated, .. } = *place.as_ref()?;
        *place = None;
        self.free.push(at);
        self.numbers.remove(&flow.number());
        Some(RemovedConnection { flow, slot, place: index, rated })
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

// Linked lists of numbers, and slots ranked by a count. Each operation takes a few writes, whatever the length.
//
// All memory is reserved at the start and zero until used, so that the kernel provides only touched pages.

/// A link to nothing. Other links hold a number plus one.
const NONE: u32 = 0;

/// Numbered lists of numbered items. An item is in at most one list; the owner knows which.
pub(super) struct IndexedLists {
    /// The previous and the next item, by item.
    nodes: Vec<[u32; 2]>,
    /// The first and the last item, by list.
    ends: Vec<[u32; 2]>,
}

impl IndexedLists {
    /// Creates `lists` empty lists for the items 0 to `items - 1`.
    pub(super) fn new(lists: usize, items: usize) -> Self {
        Self { nodes: vec![[NONE; 2]; items], ends: vec![[NONE; 2]; lists] }
    }

    /// The first item of a list.
    pub(super) fn front(&self, list: usize) -> Option<u32> {
        self.ends.get(list).and_then(|ends| ends[0].checked_sub(1))
    }

    /// Appends an item that is in no list.
    pub(super) fn push(&mut self, list: usize, item: u32) {
        let last = std::mem::replace(&mut self.ends[list][1], item + 1);
        self.nodes[item as usize] = [last, NONE];
        match last.checked_sub(1) {
            Some(last) => self.nodes[last as usize][1] = item + 1,
            None => self.ends[list][0] = item + 1,
        }
    }

    /// Removes an item from the list that holds it.
    pub(super) fn remove(&mut self, list: usize, item: u32) {
        let [before, after] = std::mem::take(&mut self.nodes[item as usize]);
        match before.checked_sub(1) {
            Some(before) => self.nodes[before as usize][1] = after,
            None => self.ends[list][0] = after,
        }
        match after.checked_sub(1) {
            Some(after) => self.nodes[after as usize][0] = before,
            None => self.ends[list][1] = before,
        }
    }
}

/// Slots ranked by a count. The slot with the highest count is found at once.
pub(super) struct SlotRanking {
    counts: Vec<u32>,
    /// The slots of each count; the one that has had this count longest is first.
    lists: IndexedLists,
    /// The counts that have slots, one bit each.
    present: Vec<u64>,
}

impl SlotRanking {
    /// Creates a ranking in which every count is 0. Counts above `most` rank as `most`.
    pub(super) fn new(slots: usize, most: usize) -> Self {
        Self {
            counts: vec![0; slots],
            lists: IndexedLists::new(most + 1, slots),
            present: vec![0; most / 64 + 1],
        }
    }

    /// The count of a slot.
    pub(super) fn count(&self, slot: u32) -> usize {
        self.counts.get(slot as usize).map_or(0, |count| *count as usize)
    }

    /// Sets the count of a slot.
    pub(super) fn set(&mut self, slot: u32, count: usize) {
        let most = self.lists.ends.len() - 1;
        let Some(known) = self.counts.get_mut(slot as usize) else { return };
        let (before, count) = (*known as usize, count.min(most));
        if before == count {
            return;
        }
        *known = count as u32;
        if before > 0 {
            self.lists.remove(before, slot);
            if self.lists.front(before).is_none() {
                self.present[before / 64] &= !(1 << (before % 64));
            }
        }
        if count > 0 {
            self.lists.push(count, slot);
            self.present[count / 64] |= 1 << (count % 64);
        }
    }

    /// The slot with the highest count; of several, the one that has had it longest. `None` if all counts are 0.
    pub(super) fn top(&self) -> Option<u32> {
        let (word, bits) = self.present.iter().enumerate().rev().find(|(_, bits)| **bits != 0)?;
        self.lists.front(word * 64 + (u64::BITS - 1 - bits.leading_zeros()) as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::{IndexedLists, SlotRanking};

    fn random(state: &mut u64, below: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % below
    }

    #[test]
    fn lists_keep_the_order_in_which_items_were_added() {
        const ITEMS: u64 = 20;
        let mut state = 7;
        let mut lists = IndexedLists::new(3, ITEMS as usize);
        let mut model: [VecDeque<u32>; 3] = Default::default();
        for _ in 0..5_000 {
            let item = random(&mut state, ITEMS) as u32;
            match model.iter().position(|list| list.contains(&item)) {
                Some(list) => {
                    lists.remove(list, item);
                    model[list].retain(|other| *other != item);
                }
                None => {
                    let list = random(&mut state, 3) as usize;
                    lists.push(list, item);
                    model[list].push_back(item);
                }
            }
            for (list, expected) in model.iter().enumerate() {
                assert_eq!(lists.front(list), expected.front().copied());
            }
        }
    }

    #[test]
    fn the_slot_with_the_highest_count_is_first_and_of_equals_the_oldest() {
        const SLOTS: u64 = 9;
        let mut state = 3;
        for most in [1, 5, 63, 64, 128] {
            let mut ranks = SlotRanking::new(SLOTS as usize, most);
            // Oldest first.
            let mut model: Vec<(u32, usize)> = Vec::new();
            for _ in 0..3_000 {
                let slot = random(&mut state, SLOTS) as u32;
                let count = random(&mut state, most as u64 + 3) as usize;
                ranks.set(slot, count);
                let count = count.min(most);
                if ranks_changed(&model, slot, count) {
                    model.retain(|(other, _)| *other != slot);
                    model.push((slot, count));
                }
                let top = model.iter().map(|(_, count)| *count).max().filter(|count| *count > 0);
                let first = top.and_then(|top| model.iter().find(|(_, count)| *count == top));
                assert_eq!(ranks.top(), first.map(|(slot, _)| *slot));
                assert_eq!(ranks.count(slot), count);
            }
        }
    }

    fn ranks_changed(model: &[(u32, usize)], slot: u32, count: usize) -> bool {
        model.iter().find(|(other, _)| *other == slot).map_or(0, |(_, count)| *count) != count
    }

    #[test]
    fn a_slot_that_does_not_exist_has_count_zero() {
        let mut ranks = SlotRanking::new(2, 4);
        ranks.set(2, 3);
        assert_eq!((ranks.count(2), ranks.top()), (0, None));
    }
}
