//! Assigns slots to identities.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::share::{FairShare, ShareError, Tenant};

use metadata_common::port::PortName;

/// A MAC on a port, which identifies a guest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct IdentityName {
    /// The port.
    pub port: PortName,
    /// The MAC of the guest's frames.
    pub mac: Mac,
}

/// How long a freed slot rests before another identity gets it. By then the worker has forgotten the last holder and
/// received every frame in flight.
pub(super) const SLOT_REST: Duration = Duration::from_secs(1);

/// Identities that each tenant may have while slots are free.
const FLOOR: usize = 64;

/// Why an identity gets no slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SlotError {
    /// Every slot is in use, reserved or resting.
    #[error("all {0} slots are in use: this node cannot serve another network interface")]
    Exhausted(u32),
    /// The tenant has its share of the slots.
    #[error("too many network interfaces on this node: {0}; move VMs of this tenant to other nodes")]
    Share(ShareError),
}

/// Assigns slots to identities. A freed slot goes to the end of the queue and rests for [`SLOT_REST`], so that late
/// frames of its last holder find the slot empty, even if no other slot is free.
#[derive(Debug)]
pub(super) struct Slots {
    held: HashMap<IdentityName, (Slot, Tenant)>,
    share: FairShare,
    free: VecDeque<Slot>,
    /// Freed slots and when each may be assigned again, earliest first.
    resting: VecDeque<(Instant, Slot)>,
    /// Inherited slots whose identities no record has named yet.
    reserved: BTreeSet<Slot>,
    count: u32,
}

impl Slots {
    /// A table of `count` slots, all free.
    #[must_use]
    pub(super) fn new(count: u32) -> Self {
        Self {
            held: HashMap::new(),
            share: FairShare::new(count as usize, FLOOR.min(count as usize)),
            free: (0..count).collect(),
            resting: VecDeque::new(),
            reserved: BTreeSet::new(),
            count,
        }
    }

    /// Returns the slot of an identity, and assigns one if it has none. The slot counts in the share of the tenant.
    ///
    /// # Errors
    /// If every slot is in use, reserved or resting, or the tenant has its share.
    pub(super) fn take(
        &mut self,
        who: &IdentityName,
        tenant: &Tenant,
        now: Instant,
    ) -> Result<Slot, SlotError> {
        if let Some((slot, former)) = self.held.get_mut(who) {
            // Another record has the identity now, which has its slot already.
            if former != tenant {
                self.share.release(former, 1);
                self.share.charge(tenant, 1);
                former.clone_from(tenant);
            }
            return Ok(*slot);
        }
        while let Some((_, slot)) = self.resting.pop_front_if(|(rested, _)| *rested <= now) {
            self.free.push_back(slot);
        }
        if self.free.is_empty() {
            return Err(SlotError::Exhausted(self.count));
        }
        self.share.admit(tenant, 1).map_err(SlotError::Share)?;
        let slot = self.free.pop_front().ok_or(SlotError::Exhausted(self.count))?;
        self.held.insert(who.clone(), (slot, tenant.clone()));
        Ok(slot)
    }

    /// How tenants share the slots.
    #[must_use]
    pub(super) fn share(&self) -> &FairShare {
        &self.share
    }

    /// Reserves slots that the previous agent assigned, until their identities are named. Slots that are held or
    /// reserved stay so.
    pub(super) fn reserve(&mut self, slots: impl IntoIterator<Item = Slot>) {
        let held: HashSet<Slot> = self.held.values().map(|(slot, _)| *slot).collect();
        self.reserved.extend(slots.into_iter().filter(|slot| *slot < self.count && !held.contains(slot)));
        self.free.retain(|slot| !self.reserved.contains(slot));
        self.resting.retain(|(_, slot)| !self.reserved.contains(slot));
    }

    /// Assigns an inherited slot to the identity that had it, if the slot is reserved and the identity has none.
    pub(super) fn claim(&mut self, who: &IdentityName, tenant: &Tenant, slot: Slot) {
        if !self.held.contains_key(who) && self.reserved.remove(&slot) {
            // Its guest was served before.
            self.share.charge(tenant, 1);
            self.held.insert(who.clone(), (slot, tenant.clone()));
        }
    }

    /// Frees a reserved slot whose identity was not named.
    pub(super) fn give_up(&mut self, slot: Slot, now: Instant) {
        if self.reserved.remove(&slot) {
            self.resting.push_back((now + SLOT_REST, slot));
        }
    }

    /// Takes the slot of an identity out of use for good; true if it had one.
    pub(super) fn retire(&mut self, who: &IdentityName) -> bool {
        let retired = self.held.remove(who);
        if let Some((_, tenant)) = &retired {
            self.share.release(tenant, 1);
        }
        retired.is_some()
    }

    /// Frees the slot of an identity, if it has one.
    pub(super) fn release(&mut self, who: &IdentityName, now: Instant) -> Option<Slot> {
        let (slot, tenant) = self.held.remove(who)?;
        self.share.release(&tenant, 1);
        self.resting.push_back((now + SLOT_REST, slot));
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::{IdentityName, SLOT_REST, SlotError, Slots};
    use metadata_common::mac::Mac;
    use metadata_common::port::PortName;
    use metadata_common::share::Tenant;
    use std::time::Instant;

    const OPERATOR: Tenant = Tenant::Operator;

    fn who(last: u8) -> IdentityName {
        IdentityName { port: PortName::local("tap0"), mac: Mac([0x52, 0x54, 0, 0, 0, last]) }
    }

    #[test]
    fn an_identity_keeps_its_slot() {
        let (mut slots, now) = (Slots::new(4), Instant::now());
        let first = slots.take(&who(1), &OPERATOR, now).expect("a free slot");
        slots.take(&who(2), &OPERATOR, now).expect("a free slot");
        assert_eq!(slots.take(&who(1), &OPERATOR, now), Ok(first));
    }

    #[test]
    fn a_freed_slot_is_the_last_to_be_assigned_again() {
        let (mut slots, now) = (Slots::new(3), Instant::now());
        let first = slots.take(&who(1), &OPERATOR, now).expect("a free slot");
        assert_eq!(slots.release(&who(1), now), Some(first));
        let next: Vec<_> =
            (2..5).map(|n| slots.take(&who(n), &OPERATOR, now + SLOT_REST).expect("a free slot")).collect();
        assert_eq!(next, [1, 2, first]);
    }

    #[test]
    fn a_freed_slot_rests_even_when_no_other_is_free() {
        let (mut slots, now) = (Slots::new(1), Instant::now());
        let only = slots.take(&who(1), &OPERATOR, now).expect("a free slot");
        slots.release(&who(1), now);
        assert_eq!(slots.take(&who(2), &OPERATOR, now + SLOT_REST / 2), Err(SlotError::Exhausted(1)));
        assert_eq!(slots.take(&who(2), &OPERATOR, now + SLOT_REST), Ok(only));
    }

    #[test]
    fn an_inherited_slot_is_reserved_for_the_identity_that_had_it() {
        let (mut slots, now) = (Slots::new(3), Instant::now());
        slots.reserve([1, 0, 7]);
        assert_eq!(slots.take(&who(1), &OPERATOR, now), Ok(2), "the only slot that is not reserved");
        slots.claim(&who(2), &OPERATOR, 1);
        assert_eq!(slots.take(&who(2), &OPERATOR, now), Ok(1));
        slots.claim(&who(3), &OPERATOR, 1);
        assert_eq!(slots.take(&who(3), &OPERATOR, now), Err(SlotError::Exhausted(3)), "it is taken");
        slots.reserve([1]);
        slots.give_up(1, now);
        assert_eq!(
            slots.take(&who(3), &OPERATOR, now + SLOT_REST),
            Err(SlotError::Exhausted(3)),
            "it is held, not reserved"
        );
        slots.give_up(0, now);
        assert_eq!(slots.take(&who(3), &OPERATOR, now), Err(SlotError::Exhausted(3)), "it rests");
        assert_eq!(slots.take(&who(3), &OPERATOR, now + SLOT_REST), Ok(0));
    }

    #[test]
    fn a_retired_slot_is_assigned_to_nobody_again() {
        let (mut slots, now) = (Slots::new(2), Instant::now());
        let first = slots.take(&who(1), &OPERATOR, now).expect("a free slot");
        assert!(slots.retire(&who(1)));
        assert!(!slots.retire(&who(1)), "it has none now");
        let other = slots.take(&who(1), &OPERATOR, now + SLOT_REST).expect("a free slot");
        assert_ne!(other, first, "not even to an identity of the same name");
        assert_eq!(slots.take(&who(2), &OPERATOR, now + SLOT_REST), Err(SlotError::Exhausted(2)));
    }

    #[test]
    fn a_full_table_refuses_and_recovers() {
        let (mut slots, now) = (Slots::new(1), Instant::now());
        slots.take(&who(1), &OPERATOR, now).expect("a free slot");
        assert_eq!(slots.take(&who(2), &OPERATOR, now), Err(SlotError::Exhausted(1)));
        slots.release(&who(1), now);
        assert!(slots.take(&who(2), &OPERATOR, now + SLOT_REST).is_ok());
    }

    #[test]
    fn a_namespace_that_takes_all_slots_it_gets_leaves_some_for_another() {
        const COUNT: u32 = 1_024;
        let (mut slots, now) = (Slots::new(COUNT), Instant::now());
        let hostile = Tenant::namespace("hostile");
        let nic = |n: u32| IdentityName { port: PortName::local(format!("tap{n}")), mac: Mac::default() };
        let taken = (0..2 * COUNT).filter(|n| slots.take(&nic(*n), &hostile, now).is_ok()).count();
        assert_eq!(taken, COUNT as usize / 2);
        let error = slots.take(&nic(COUNT), &hostile, now).expect_err("it has its share").to_string();
        assert!(error.contains("namespace/hostile holds 512") && error.contains("other nodes"), "{error}");
        slots.take(&nic(2 * COUNT), &Tenant::namespace("modest"), now).expect("a slot");
        // The identity goes to a record of another namespace, and so does the slot.
        slots.take(&nic(0), &Tenant::namespace("modest"), now).expect("its slot");
        assert_eq!(slots.share().held(&hostile), COUNT as usize / 2 - 1);
        slots.release(&nic(0), now);
        assert_eq!(slots.share().held(&Tenant::namespace("modest")), 1);
    }
}
