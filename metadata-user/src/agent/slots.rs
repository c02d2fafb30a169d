//! Which slot an identity has.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;

use metadata_base::port::PortName;

/// A MAC on a port: who a guest is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct IdentityName {
    /// The port.
    pub port: PortName,
    /// The MAC that speaks there.
    pub mac: Mac,
}

/// How long a freed slot rests before another identity gets it: far longer than the worker takes to forget
/// the last holder and to see every frame that was still under way for it.
pub(super) const SLOT_REST: Duration = Duration::from_secs(1);

/// Every slot is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {0} slots are in use: this node cannot serve another network interface")]
pub(super) struct SlotsExhausted(pub u32);

/// Hands out slots. A freed slot goes to the end of the queue and rests for [`SLOT_REST`], so that a frame still
/// under way for its last holder finds it empty, not somebody else's, even when no other slot is free.
#[derive(Debug)]
pub(super) struct Slots {
    held: HashMap<IdentityName, Slot>,
    free: VecDeque<Slot>,
    /// Freed slots and when each may be given out; earliest first.
    resting: VecDeque<(Instant, Slot)>,
    /// Slots of an agent before, whose identities have not been named yet.
    reserved: BTreeSet<Slot>,
    count: u32,
}

impl Slots {
    /// A table of `count` slots, all free.
    #[must_use]
    pub(super) fn new(count: u32) -> Self {
        Self {
            held: HashMap::new(),
            free: (0..count).collect(),
            resting: VecDeque::new(),
            reserved: BTreeSet::new(),
            count,
        }
    }

    /// The slot of an identity, taken now if it has none.
    ///
    /// # Errors
    /// No slot is free, or those that are still rest.
    pub(super) fn take(&mut self, who: &IdentityName, now: Instant) -> Result<Slot, SlotsExhausted> {
        if let Some(&slot) = self.held.get(who) {
            return Ok(slot);
        }
        while let Some((_, slot)) = self.resting.pop_front_if(|(rested, _)| *rested <= now) {
            self.free.push_back(slot);
        }
        let slot = self.free.pop_front().ok_or(SlotsExhausted(self.count))?;
        self.held.insert(who.clone(), slot);
        Ok(slot)
    }

    /// Keeps slots that an agent before has given out, until their identities are named. One that is held or kept already
    /// stays so.
    pub(super) fn reserve(&mut self, slots: impl IntoIterator<Item = Slot>) {
        let held: HashSet<Slot> = self.held.values().copied().collect();
        self.reserved.extend(slots.into_iter().filter(|slot| *slot < self.count && !held.contains(slot)));
        self.free.retain(|slot| !self.reserved.contains(slot));
        self.resting.retain(|(_, slot)| !self.reserved.contains(slot));
    }

    /// Gives an identity the slot it had with an agent before, if that slot was kept and it has none.
    pub(super) fn claim(&mut self, who: &IdentityName, slot: Slot) {
        if !self.held.contains_key(who) && self.reserved.remove(&slot) {
            self.held.insert(who.clone(), slot);
        }
    }

    /// Gives up a slot that was kept for an identity nobody named.
    pub(super) fn give_up(&mut self, slot: Slot, now: Instant) {
        if self.reserved.remove(&slot) {
            self.resting.push_back((now + SLOT_REST, slot));
        }
    }

    /// Gives an identity's slot back, if it has one.
    pub(super) fn release(&mut self, who: &IdentityName, now: Instant) -> Option<Slot> {
        let slot = self.held.remove(who)?;
        self.resting.push_back((now + SLOT_REST, slot));
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::{IdentityName, SLOT_REST, Slots, SlotsExhausted};
    use metadata_base::port::PortName;
    use metadata_common::mac::Mac;
    use std::time::Instant;

    fn who(last: u8) -> IdentityName {
        IdentityName { port: PortName::local("tap0"), mac: Mac([0x52, 0x54, 0, 0, 0, last]) }
    }

    #[test]
    fn an_identity_keeps_its_slot() {
        let (mut slots, now) = (Slots::new(4), Instant::now());
        let first = slots.take(&who(1), now).expect("a free slot");
        slots.take(&who(2), now).expect("a free slot");
        assert_eq!(slots.take(&who(1), now), Ok(first));
    }

    #[test]
    fn a_freed_slot_is_the_last_to_be_given_out() {
        let (mut slots, now) = (Slots::new(3), Instant::now());
        let first = slots.take(&who(1), now).expect("a free slot");
        assert_eq!(slots.release(&who(1), now), Some(first));
        let next: Vec<_> =
            (2..5).map(|n| slots.take(&who(n), now + SLOT_REST).expect("a free slot")).collect();
        assert_eq!(next, [1, 2, first]);
    }

    #[test]
    fn a_freed_slot_rests_even_when_no_other_is_free() {
        let (mut slots, now) = (Slots::new(1), Instant::now());
        let only = slots.take(&who(1), now).expect("a free slot");
        slots.release(&who(1), now);
        assert_eq!(slots.take(&who(2), now + SLOT_REST / 2), Err(SlotsExhausted(1)));
        assert_eq!(slots.take(&who(2), now + SLOT_REST), Ok(only));
    }

    #[test]
    fn a_slot_of_an_agent_before_is_kept_for_the_one_who_had_it() {
        let (mut slots, now) = (Slots::new(3), Instant::now());
        slots.reserve([1, 0, 7]);
        assert_eq!(slots.take(&who(1), now), Ok(2), "the only one nobody had");
        slots.claim(&who(2), 1);
        assert_eq!(slots.take(&who(2), now), Ok(1));
        slots.claim(&who(3), 1);
        assert_eq!(slots.take(&who(3), now), Err(SlotsExhausted(3)), "it is taken");
        slots.reserve([1]);
        slots.give_up(1, now);
        assert_eq!(slots.take(&who(3), now + SLOT_REST), Err(SlotsExhausted(3)), "it is held, not kept");
        slots.give_up(0, now);
        assert_eq!(slots.take(&who(3), now), Err(SlotsExhausted(3)), "it rests");
        assert_eq!(slots.take(&who(3), now + SLOT_REST), Ok(0));
    }

    #[test]
    fn a_full_table_refuses_and_recovers() {
        let (mut slots, now) = (Slots::new(1), Instant::now());
        slots.take(&who(1), now).expect("a free slot");
        assert_eq!(slots.take(&who(2), now), Err(SlotsExhausted(1)));
        slots.release(&who(1), now);
        assert!(slots.take(&who(2), now + SLOT_REST).is_ok());
    }
}
