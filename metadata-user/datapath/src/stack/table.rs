//! Connections of all ports and recently closed flows, found by flow, bounded, each stored once; and their timers.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use super::connection::{ConnectionRank, StackConnection};
use super::frame::{Segment, before};

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

// A connection in TIME-WAIT: four numbers and no exchange.
//
// RFC 9293 §3.6.1, §3.10.7.4: the side that closed first answers a retransmitted FIN until the other side must have
// received the acknowledgement. Here the side that closed last does the same. Only the remembered numbers
// distinguish a retransmission of a connection's first segment from a new connection, since its number is sufficient
// proof of a handshake. A SYN for the four-tuple starts a new connection at once (Scaleway's client always uses
// source port 1).

/// How long the first segment of a closed connection may still be a retransmission. The guest has received the answer
/// and is one frame away. A later segment belongs to a new connection with the same numbers, which simple stacks reuse;
/// the kernel has answered its SYN.
const ECHO: Duration = Duration::from_secs(1);

/// The sequence numbers of a closed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Our next sequence number, and the guest's.
    pub(super) next: (u32, u32),
    /// Both initial sequence numbers, the guest's first.
    pub(super) initial: (u32, u32),
}

impl Numbers {
    /// Whether the connection has used the segment's numbers. The mark of a first segment has only 16 bits, so any
    /// segment may match it by chance and still be a retransmission.
    pub(super) fn cover(&self, segment: &Segment<'_>) -> bool {
        let is_between = |number, initial, next| !before(next, number) && before(initial, number);
        let is_acknowledged = |ack| is_between(ack, self.initial.1, self.next.0);
        is_between(segment.seq, self.initial.0, self.next.1) && segment.ack.is_some_and(is_acknowledged)
    }
}

/// One four-tuple in TIME-WAIT.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeWait {
    pub(super) until: Duration,
    pub(super) numbers: Numbers,
    /// A SYN has arrived since, so a first segment with the old numbers belongs to a new connection.
    pub(super) reopened: bool,
}

impl TimeWait {
    /// Whether a repeated first segment starts a new connection: a SYN has arrived since, or the guest's last FIN is
    /// too long ago for a retransmission. `kept` is the time in TIME-WAIT after that FIN.
    pub(super) fn gives_way(&self, now: Duration, kept: Duration) -> bool {
        self.reopened || self.until.saturating_sub(kept) + ECHO <= now
    }
}

// Distinguishes a forgotten connection from one whose first segment is still in transit.
//
// In both cases a segment arrives that is not its connection's first, and no agent holds the connection. A guest
// whose first segment was lost retransmits that one before all others (RFC 6298 §5.4). It sends a later segment at
// most once more, as a tail loss probe (RFC 8985 §7). A segment that arrives for the third time is therefore the
// oldest unacknowledged one, and its connection is gone. The stack then sends a reset (RFC 9293 §3.10.7.1), so that
// the guest need not wait for its timeout.

/// Limit of remembered flows. Each has one place, given by its number; a newer flow replaces an older one.
pub(super) const REMEMBERED: usize = 256;
/// Arrivals of a segment after which its connection counts as forgotten.
pub(super) const TIMES: u8 = 3;
/// How long a segment is remembered. Guests wait at most a minute before they retransmit.
const MEMORY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Heard {
    flow: u64,
    seq: u32,
    times: u8,
    last: Duration,
}

/// The last segments that arrived too early or too late.
pub(super) struct StraySegments([Option<Heard>; REMEMBERED]);

impl StraySegments {
    pub(super) fn new() -> Self {
        Self([None; REMEMBERED])
    }

    /// Records a segment. Returns true if it has arrived so often that no earlier one will follow.
    pub(super) fn is_certain(&mut self, now: Duration, flow: Flow, seq: u32) -> bool {
        let flow = flow.number();
        let place = &mut self.0[flow as usize % REMEMBERED];
        let same = place.filter(|heard| heard.flow == flow && heard.seq == seq && now <= heard.last + MEMORY);
        let times = same.map_or(0, |heard| heard.times) + 1;
        let is_certain = times >= TIMES;
        *place = (!is_certain).then_some(Heard { flow, seq, times, last: now });
        is_certain
    }
}

// Timers: a hierarchical wheel (Varghese and Lauck 1987, scheme 7) with a tick of one millisecond.
//
// There are five levels of 64 wheel slots. One slot of a level spans a full turn of the level below. Setting or
// removing a timer takes a few writes, whatever their number; finding the next timer reads five words. The number of
// timers is fixed, each has a number, and each is in at most one place.

const LEVELS: usize = 5;
const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
const HEADS: u32 = (LEVELS * SLOTS) as u32;
/// The wheel's range in ticks, twelve days: a turn of the last level, less the current slot and the one before it. A
/// timer beyond it is set to the end of the range and set again there.
const REACH: u64 = (SLOTS as u64 - 2) << ((LEVELS as u32 - 1) * BITS);

/// A link of a ring. The first [`HEADS`] nodes are the slots, which hold no timer.
#[derive(Clone, Copy)]
struct Node {
    at: u64,
    previous: u32,
    next: u32,
}

/// Nodes by number; a node is linked to itself until it is linked to others. Both links are stored XORed with their
/// own node, so that a new node is all zero. The kernel then provides memory only for touched pages.
struct Nodes(Vec<[u64; 2]>);

impl Nodes {
    fn new(count: u32) -> Self {
        Self(vec![[0; 2]; count as usize])
    }

    fn get(&self, node: u32) -> Node {
        let [at, links] = self.0[node as usize];
        Node { at, previous: (links >> 32) as u32 ^ node, next: links as u32 ^ node }
    }

    fn set(&mut self, node: u32, Node { at, previous, next }: Node) {
        self.0[node as usize] = [at, u64::from(previous ^ node) << 32 | u64::from(next ^ node)];
    }

    fn set_next(&mut self, node: u32, next: u32) {
        self.set(node, Node { next, ..self.get(node) });
    }

    fn set_previous(&mut self, node: u32, previous: u32) {
        self.set(node, Node { previous, ..self.get(node) });
    }
}

/// A set of numbered timers.
pub(super) struct Wheel {
    nodes: Nodes,
    /// The slots of each level that hold timers, one bit each.
    occupied: [u64; LEVELS],
    /// All timers up to this tick have been returned.
    elapsed: u64,
}

/// The first whole millisecond at or after `at`.
fn tick(at: Duration) -> u64 {
    let part = u64::from(at.subsec_nanos().div_ceil(1_000_000));
    at.as_secs().saturating_mul(1_000).saturating_add(part)
}

/// The last whole millisecond at or before `now`.
fn ticks_gone(now: Duration) -> u64 {
    now.as_secs().saturating_mul(1_000).saturating_add(u64::from(now.subsec_millis()))
}

impl Wheel {
    /// Creates a wheel with the timers 0 to `timers - 1`, none of them set.
    pub(super) fn new(timers: usize) -> Self {
        Self { nodes: Nodes::new(HEADS + timers as u32), occupied: [0; LEVELS], elapsed: 0 }
    }

    /// Sets a timer to the first millisecond at or after `at`. A timer with an earlier time stays there, because one
    /// early wake-up costs less than moving the timer on each call.
    pub(super) fn set(&mut self, timer: u32, at: Duration) {
        let (node, at) = (timer + HEADS, tick(at));
        let set = self.nodes.get(node);
        if set.next != node && set.at <= at {
            return;
        }
        self.unlink(node);
        self.link(node, at);
    }

    /// Clears a timer, if it is set.
    pub(super) fn clear(&mut self, timer: u32) {
        self.unlink(timer + HEADS);
    }

    /// Removes and returns a due timer; `None` if no timer is due.
    pub(super) fn pop(&mut self, now: Duration) -> Option<u32> {
        let now = ticks_gone(now);
        while let Some((level, slot, start)) = self.first().filter(|(.., start)| *start <= now) {
            self.elapsed = self.elapsed.max(start);
            let head = (level * SLOTS + slot) as u32;
            if level == 0 {
                let node = self.nodes.get(head).next;
                self.unlink(node);
                return Some(node - HEADS);
            }
            // The whole slot moves down at once, since a timer left behind would be late. Each timer moves once per
            // level.
            while self.nodes.get(head).next != head {
                let node = self.nodes.get(head).next;
                self.unlink(node);
                self.link(node, self.nodes.get(node).at);
            }
        }
        self.elapsed = self.elapsed.max(now);
        None
    }

    /// The latest time of the next call: never after the next timer, and earlier at most once per level.
    pub(super) fn next(&self) -> Option<Duration> {
        self.first().map(|(.., start)| Duration::from_millis(start))
    }

    /// The earliest slot with timers: level, number, and first tick.
    fn first(&self) -> Option<(usize, usize, u64)> {
        // A slot of a lower level is always earlier than those of a higher level.
        (0..LEVELS).find(|level| self.occupied[*level] != 0).map(|level| {
            let shift = level as u32 * BITS;
            let here = self.elapsed >> shift & (SLOTS as u64 - 1);
            let ahead = self.occupied[level].rotate_right(here as u32).trailing_zeros();
            let slot = (here as usize + ahead as usize) % SLOTS;
            (level, slot, ((self.elapsed >> shift) + u64::from(ahead)) << shift)
        })
    }

    fn link(&mut self, node: u32, at: u64) {
        let when = at.clamp(self.elapsed, self.elapsed.saturating_add(REACH));
        // The level is that of the highest digit in which `when` differs from the current tick.
        let differs = (self.elapsed ^ when) | (SLOTS as u64 - 1);
        let level = ((u64::BITS - 1 - differs.leading_zeros()) / BITS).min(LEVELS as u32 - 1);
        let slot = (when >> (level * BITS)) as usize % SLOTS;
        self.occupied[level as usize] |= 1 << slot;
        let head = level * SLOTS as u32 + slot as u32;
        let last = self.nodes.get(head).previous;
        self.nodes.set(node, Node { at, previous: last, next: head });
        self.nodes.set_next(last, node);
        self.nodes.set_previous(head, node);
    }

    fn unlink(&mut self, node: u32) {
        let Node { at, previous, next } = self.nodes.get(node);
        self.nodes.set_next(previous, next);
        self.nodes.set_previous(next, previous);
        self.nodes.set(node, Node { at, previous: node, next: node });
        // The node is alone in its slot only if both neighbours are the slot itself.
        if previous == next && previous < HEADS {
            self.occupied[previous as usize / SLOTS] &= !(1 << (previous as usize % SLOTS));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};
    use std::net::IpAddr;
    use std::time::Duration;

    use super::{IndexedLists, LEVELS, Numbers, SlotRanking, Wheel};
    use crate::stack::frame::{ACK, Segment, Tuple};

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

    #[test]
    fn a_connections_numbers_differ_from_others_even_where_they_wrap() {
        let tuple =
            Tuple { remote: (IpAddr::from([10, 0, 0, 1]), 1), local: (IpAddr::from([10, 0, 0, 2]), 80) };
        for (theirs, ours) in [(1_000, 5_000), (u32::MAX - 50, u32::MAX - 50), (u32::MAX, u32::MAX)] {
            let numbers =
                Numbers { initial: (theirs, ours), next: (ours.wrapping_add(300), theirs.wrapping_add(100)) };
            let cases = [
                ("the first segment", 1, Some(1), true),
                ("a middle segment", 60, Some(200), true),
                ("the last segment", 100, Some(300), true),
                ("the SYN", 0, Some(1), false),
                ("a segment beyond the last", 101, Some(300), false),
                ("an acknowledgement of unsent data", 60, Some(301), false),
                ("an acknowledgement of an earlier number", 60, Some(0), false),
                ("no acknowledgement", 60, None, false),
                ("a segment of another handshake", 1, Some(1 << 23 | 1), false),
            ];
            for (name, seq, ack, covered) in cases {
                let (seq, ack) = (theirs.wrapping_add(seq), ack.map(|ack| ours.wrapping_add(ack)));
                let segment = Segment { tuple, seq, ack, window: 1, flags: ACK, options: &[], payload: &[] };
                assert_eq!(numbers.cover(&segment), covered, "{name} after {theirs}");
            }
        }
    }

    const TIMERS: u32 = 50;

    fn wide_random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 20
    }

    #[test]
    fn every_timer_is_returned_in_its_millisecond_and_none_earlier() {
        let mut state = 0x9e37_79b9_u64;
        for reach in [10_u64, 100, 5_000, 300_000, 20_000_000, 1 << 31, 1 << 40] {
            let mut wheel = Wheel::new(TIMERS as usize);
            let mut model = BTreeMap::new();
            let mut now = Duration::from_millis(wide_random(&mut state) % 1_000_000);
            for _ in 0..4_000 {
                let timer = (wide_random(&mut state) % u64::from(TIMERS)) as u32;
                if wide_random(&mut state).is_multiple_of(4) {
                    wheel.clear(timer);
                    model.remove(&timer);
                } else {
                    let at = now + Duration::from_millis(1 + wide_random(&mut state) % reach);
                    wheel.set(timer, at);
                    let set = model.entry(timer).or_insert(at);
                    *set = at.min(*set);
                }
                now += Duration::from_millis(wide_random(&mut state) % (reach / 4 + 1));
                while let Some(timer) = wheel.pop(now) {
                    let at = model.remove(&timer).expect("it is set");
                    assert!(at <= now, "timer {timer} of {at:?} at {now:?}");
                }
                let first = model.values().min();
                assert!(first.is_none_or(|first| *first > now), "{first:?} is overdue at {now:?}");
                assert_eq!(wheel.next().is_some(), first.is_some());
                let next = wheel.next();
                assert!(next.is_none_or(|next| Some(&next) <= first), "{next:?} for {first:?} at {now:?}");
            }
        }
    }

    #[test]
    fn waiting_for_a_timer_wakes_at_most_once_per_level() {
        for at in [1, 70, 5_000, 600_000, 80_000_000].map(Duration::from_millis) {
            let mut wheel = Wheel::new(1);
            let mut now = Duration::from_millis(12_345);
            let mut wakes = 0;
            assert_eq!(wheel.pop(now), None);
            wheel.set(0, now + at);
            while let Some(next) = wheel.next() {
                assert!(next > now, "the next time is later");
                now = next;
                wakes += 1;
                if wheel.pop(now).is_some() {
                    assert_eq!(now, Duration::from_millis(12_345) + at);
                }
            }
            assert!(wakes <= LEVELS, "{wakes} for {at:?}");
        }
    }

    #[test]
    fn part_of_a_millisecond_counts_as_a_whole_one() {
        for part in [1, 999, 1_000, 999_999].map(Duration::from_nanos) {
            let mut wheel = Wheel::new(1);
            let at = Duration::from_millis(1) + part;
            wheel.set(0, at);
            assert_eq!(wheel.pop(at - Duration::from_nanos(1)), None, "{part:?}");
            assert_eq!(wheel.pop(Duration::from_millis(2)), Some(0), "{part:?}");
        }
    }
}
