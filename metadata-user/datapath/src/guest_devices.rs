//! What the stack needs to know of each guest's device, by slot: steering writes it, the stack reads it.

use metadata_common::maps::Slot;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The bit of an entry for a device that takes long answers. No MTU is that large.
const TAKES_LONG: u32 = 1 << 31;

/// A table of devices shared by the control side and workers. Clones share one table. It takes four bytes per slot.
///
/// All accesses are relaxed: an entry carries no other data, and TCP retransmits what was sent by an old entry.
#[derive(Clone, Default)]
pub struct GuestDevices(Arc<[AtomicU32]>);

impl GuestDevices {
    /// Creates a table for slots 0 to `slots - 1`, of whose devices nothing is known. The default table has no slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        Self((0..slots).map(|_| AtomicU32::new(0)).collect())
    }

    /// Sets the MTU of a slot's device: the bytes of its longest IP packet, or 0 if unknown. A slot beyond the table
    /// is ignored.
    pub fn set_mtu(&self, slot: Slot, mtu: u32) {
        self.change(slot, |entry| entry & TAKES_LONG | mtu & !TAKES_LONG);
    }

    /// Sets whether answers of many segments reach a slot's device in one frame. A slot beyond the table is ignored.
    pub fn set_takes_long(&self, slot: Slot, takes: bool) {
        self.change(slot, |entry| if takes { entry | TAKES_LONG } else { entry & !TAKES_LONG });
    }

    /// The MTU of a slot's device in bytes; 0 if unknown.
    #[must_use]
    pub fn mtu(&self, slot: Slot) -> u32 {
        self.entry(slot) & !TAKES_LONG
    }

    /// Whether answers of many segments reach a slot's device in one frame.
    #[must_use]
    pub fn takes_long(&self, slot: Slot) -> bool {
        self.entry(slot) & TAKES_LONG != 0
    }

    fn entry(&self, slot: Slot) -> u32 {
        self.0.get(slot as usize).map_or(0, |entry| entry.load(Ordering::Relaxed))
    }

    /// Only the control side writes, so no write is lost between load and store.
    fn change(&self, slot: Slot, change: impl FnOnce(u32) -> u32) {
        if let Some(entry) = self.0.get(slot as usize) {
            entry.store(change(entry.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
    }
}

impl std::fmt::Debug for GuestDevices {
    /// Shows the number of slots.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestDevices({} slots)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::GuestDevices;

    #[test]
    fn clones_share_one_table_and_slots_beyond_it_have_no_mtu() {
        let (writer, none) = (GuestDevices::new(2), GuestDevices::default());
        let reader = writer.clone();
        assert_eq!(reader.mtu(1), 0);
        writer.set_mtu(1, 1_450);
        writer.set_mtu(2, 1_280);
        none.set_mtu(0, 1_280);
        assert_eq!([reader.mtu(0), reader.mtu(1), reader.mtu(2), none.mtu(0)], [0, 1_450, 0, 0]);
    }

    #[test]
    fn the_mtu_and_the_way_of_long_answers_change_independently() {
        let devices = GuestDevices::new(1);
        devices.set_takes_long(0, true);
        devices.set_mtu(0, 9_000);
        assert_eq!((devices.mtu(0), devices.takes_long(0), devices.takes_long(1)), (9_000, true, false));
        devices.set_takes_long(0, false);
        assert_eq!((devices.mtu(0), devices.takes_long(0)), (9_000, false));
    }
}
