//! Timers: a hierarchical wheel (Varghese and Lauck 1987, scheme 7) with a tick of one millisecond.
//!
//! There are five levels of 64 wheel slots. One slot of a level spans a full turn of the level below. Setting or
//! removing a timer takes a few writes, whatever their number; finding the next timer reads five words. The number of
//! timers is fixed, each has a number, and each is in at most one place.

use std::time::Duration;

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
    use super::{LEVELS, Wheel};
    use std::collections::BTreeMap;
    use std::time::Duration;

    const TIMERS: u32 = 50;

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 20
    }

    #[test]
    fn every_timer_is_returned_in_its_millisecond_and_none_earlier() {
        let mut state = 0x9e37_79b9_u64;
        for reach in [10_u64, 100, 5_000, 300_000, 20_000_000, 1 << 31, 1 << 40] {
            let mut wheel = Wheel::new(TIMERS as usize);
            let mut model = BTreeMap::new();
            let mut now = Duration::from_millis(random(&mut state) % 1_000_000);
            for _ in 0..4_000 {
                let timer = (random(&mut state) % u64::from(TIMERS)) as u32;
                if random(&mut state).is_multiple_of(4) {
                    wheel.clear(timer);
                    model.remove(&timer);
                } else {
                    let at = now + Duration::from_millis(1 + random(&mut state) % reach);
                    wheel.set(timer, at);
                    let set = model.entry(timer).or_insert(at);
                    *set = at.min(*set);
                }
                now += Duration::from_millis(random(&mut state) % (reach / 4 + 1));
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
