//! Which NIC of a VM has which slot.

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of slots whose NIC is known. Each NIC of a record may move to another slot once.
const KNOWN_NICS: usize = 64;

/// The slots of one VM, each with the MAC of its NIC.
#[derive(Debug, Default)]
pub(crate) struct SlotNics(Mutex<VecDeque<(Slot, Mac)>>);

impl SlotNics {
    fn nics(&self) -> MutexGuard<'_, VecDeque<(Slot, Mac)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets which NIC has a slot.
    pub(crate) fn set(&self, slot: Slot, mac: Mac) {
        let mut nics = self.nics();
        nics.retain(|(known, _)| *known != slot);
        if nics.len() == KNOWN_NICS {
            nics.pop_front();
        }
        nics.push_back((slot, mac));
    }

    /// The MAC of the NIC that has a slot.
    pub(crate) fn mac(&self, slot: Slot) -> Option<Mac> {
        self.nics().iter().find(|(known, _)| *known == slot).map(|(_, mac)| *mac)
    }

    /// All known slots.
    pub(crate) fn slots(&self) -> Vec<Slot> {
        self.nics().iter().map(|(slot, _)| *slot).collect()
    }
}
