//! When each port next wants attention: a binary heap that knows where each slot stands in it.
//!
//! One entry per slot at most, so a deadline that moves replaces itself and nothing stale piles up;
//! idle ports cost nothing until theirs is the first.

use metadata_common::maps::Slot;
use std::time::Duration;

const ABSENT: u32 = u32::MAX;

/// Deadlines by slot, the earliest first.
pub(super) struct Deadlines {
    heap: Vec<(Duration, Slot)>,
    place: Vec<u32>,
}

impl Deadlines {
    pub(super) fn new(slots: u32) -> Self {
        Self { heap: Vec::new(), place: vec![ABSENT; slots as usize] }
    }

    pub(super) fn first(&self) -> Option<(Duration, Slot)> {
        self.heap.first().copied()
    }

    /// Sets, moves or (with `None`) removes a slot's deadline. The slot must be below `slots`.
    pub(super) fn set(&mut self, slot: Slot, at: Option<Duration>) {
        let place = self.place[slot as usize];
        match (place, at) {
            (ABSENT, None) => {}
            (ABSENT, Some(at)) => {
                self.heap.push((at, slot));
                self.settle(self.heap.len() - 1);
            }
            (place, Some(at)) => {
                self.heap[place as usize].0 = at;
                self.settle(place as usize);
            }
            (place, None) => {
                self.place[slot as usize] = ABSENT;
                self.heap.swap_remove(place as usize);
                if (place as usize) < self.heap.len() {
                    self.settle(place as usize);
                }
            }
        }
    }

    /// Moves the entry at `at` up or down to where it belongs.
    fn settle(&mut self, mut at: usize) {
        while at > 0 && self.heap[at] < self.heap[(at - 1) / 2] {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        loop {
            let least = [2 * at + 1, 2 * at + 2]
                .into_iter()
                .filter(|child| *child < self.heap.len())
                .min_by_key(|child| self.heap[*child]);
            match least {
                Some(child) if self.heap[child] < self.heap[at] => {
                    self.swap(at, child);
                    at = child;
                }
                _ => break,
            }
        }
        self.place[self.heap[at].1 as usize] = at as u32;
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.place[self.heap[a].1 as usize] = a as u32;
        self.place[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::Deadlines;
    use std::collections::BTreeMap;
    use std::time::Duration;

    #[test]
    fn the_first_deadline_is_the_earliest_one_set_and_not_removed() {
        const SLOTS: u32 = 50;
        let mut deadlines = Deadlines::new(SLOTS);
        let mut model = BTreeMap::new();
        let mut state = 0x9e37_79b9_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let slot = (state >> 33) as u32 % SLOTS;
            let at = (state >> 60 != 0).then(|| Duration::from_millis((state >> 40) % 1000));
            deadlines.set(slot, at);
            match at {
                Some(at) => model.insert(slot, at),
                None => model.remove(&slot),
            };
            assert_eq!(deadlines.first().map(|f| f.0), model.values().min().copied());
            assert_eq!(deadlines.heap.len(), model.len());
        }
    }
}
