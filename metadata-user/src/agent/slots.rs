//! Which slot an identity has.

use std::collections::{HashMap, VecDeque};

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;

use crate::port::PortName;

/// A MAC on a port: who a guest is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdentityName {
    /// The port.
    pub port: PortName,
    /// The MAC that speaks there.
    pub mac: Mac,
}

/// Every slot is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {0} slots are in use: this node cannot serve another network interface")]
pub struct SlotsExhausted(pub u32);

/// Hands out slots. A freed slot goes to the end of the queue, so that a frame still under way for its
/// last holder finds it empty, not somebody else's.
#[derive(Debug)]
pub struct Slots {
    held: HashMap<IdentityName, Slot>,
    free: VecDeque<Slot>,
    count: u32,
}

impl Slots {
    /// A table of `count` slots, all free.
    #[must_use]
    pub fn new(count: u32) -> Self {
        Self { held: HashMap::new(), free: (0..count).collect(), count }
    }

    /// The slot of an identity, taken now if it has none.
    ///
    /// # Errors
    /// No slot is free.
    pub fn take(&mut self, who: &IdentityName) -> Result<Slot, SlotsExhausted> {
        if let Some(&slot) = self.held.get(who) {
            return Ok(slot);
        }
        let slot = self.free.pop_front().ok_or(SlotsExhausted(self.count))?;
        self.held.insert(who.clone(), slot);
        Ok(slot)
    }

    /// Gives an identity's slot back, if it has one.
    pub fn release(&mut self, who: &IdentityName) -> Option<Slot> {
        let slot = self.held.remove(who)?;
        self.free.push_back(slot);
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::{IdentityName, Slots, SlotsExhausted};
    use crate::port::PortName;
    use metadata_common::mac::Mac;

    fn who(last: u8) -> IdentityName {
        IdentityName { port: PortName::local("tap0"), mac: Mac([0x52, 0x54, 0, 0, 0, last]) }
    }

    #[test]
    fn an_identity_keeps_its_slot() {
        let mut slots = Slots::new(4);
        let first = slots.take(&who(1)).expect("a free slot");
        slots.take(&who(2)).expect("a free slot");
        assert_eq!(slots.take(&who(1)), Ok(first));
    }

    #[test]
    fn a_freed_slot_is_the_last_to_be_given_out() {
        let mut slots = Slots::new(3);
        let first = slots.take(&who(1)).expect("a free slot");
        assert_eq!(slots.release(&who(1)), Some(first));
        let next: Vec<_> = (2..5).map(|n| slots.take(&who(n)).expect("a free slot")).collect();
        assert_eq!(next, [1, 2, first]);
    }

    #[test]
    fn a_full_table_refuses_and_recovers() {
        let mut slots = Slots::new(1);
        slots.take(&who(1)).expect("a free slot");
        assert_eq!(slots.take(&who(2)), Err(SlotsExhausted(1)));
        slots.release(&who(1));
        assert!(slots.take(&who(2)).is_ok());
    }
}
