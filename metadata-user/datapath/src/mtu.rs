//! The MTU of each guest's device, by slot: steering writes it, the stack reads it.

use metadata_common::maps::Slot;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A table of MTUs shared by the control side and workers. Clones share one table. It takes four octets per slot.
#[derive(Clone, Default)]
pub struct Mtus(Arc<[AtomicU32]>);

impl Mtus {
    /// Creates a table for slots 0 to `slots - 1` with all MTUs unknown. The default table has no slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        Self((0..slots).map(|_| AtomicU32::new(0)).collect())
    }

    /// Sets the MTU of a slot's device: the octets of its longest IP packet, or 0 if unknown. A slot beyond the table
    /// is ignored.
    pub fn set(&self, slot: Slot, mtu: u32) {
        if let Some(entry) = self.0.get(slot as usize) {
            // Relaxed: the value carries no other data, and TCP retransmits a segment sized for the old MTU.
            entry.store(mtu, Ordering::Relaxed);
        }
    }

    /// The MTU of a slot's device in octets; 0 if unknown.
    #[must_use]
    pub fn get(&self, slot: Slot) -> u32 {
        self.0.get(slot as usize).map_or(0, |entry| entry.load(Ordering::Relaxed))
    }
}

impl std::fmt::Debug for Mtus {
    /// Shows the number of slots.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mtus({} slots)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::Mtus;

    #[test]
    fn clones_share_one_table_and_slots_beyond_it_have_no_mtu() {
        let (writer, none) = (Mtus::new(2), Mtus::default());
        let reader = writer.clone();
        assert_eq!(reader.get(1), 0);
        writer.set(1, 1_450);
        writer.set(2, 1_280);
        none.set(0, 1_280);
        assert_eq!([reader.get(0), reader.get(1), reader.get(2), none.get(0)], [0, 1_450, 0, 0]);
    }
}
