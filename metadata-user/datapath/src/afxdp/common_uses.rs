//! Which common documents are the answers of each slot, in memory shared with the kernel (`COMMON_USES`).
#![expect(unsafe_code, reason = "the table lies in memory shared with the kernel")]

use metadata_common::maps::{COMMON_BITS, COMMON_WORDS, CommonUses, MAX_SLOTS, Slot};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sys::Mapping;

/// The mapped table. The kernel reads whole words and writes none.
#[derive(Debug)]
pub struct CommonUseTable {
    slots: NonNull<[AtomicU64; COMMON_WORDS]>,
    /// Owned so that `slots` stays valid.
    _memory: Mapping,
}

// SAFETY: the address points into the mapping that this struct owns and moves with, and an entry consists of atomics.
unsafe impl Send for CommonUseTable {}

// SAFETY: shared references access atomics alone.
unsafe impl Sync for CommonUseTable {}

impl CommonUseTable {
    /// Maps the whole table from its descriptor: memory that the kernel has allocated anyway.
    ///
    /// # Errors
    /// If the kernel refuses the mapping.
    pub fn map(table: BorrowedFd<'_>) -> Result<Self, Errno> {
        Self::inside(Mapping::shared(table, 0, MAX_SLOTS as usize * size_of::<CommonUses>())?)
    }

    fn inside(memory: Mapping) -> Result<Self, Errno> {
        let slots = memory.at(0, MAX_SLOTS as usize).ok_or(Errno::FAULT)?;
        Ok(Self { slots, _memory: memory })
    }

    /// Begins an edition of a slot, with no document; nothing happens if there is no such slot.
    pub fn begin(&self, slot: Slot, edition: u32) {
        let Some(words) = self.entry(slot) else { return };
        for (word, value) in words.iter().zip(CommonUses::none(edition).0) {
            word.store(value, Ordering::Release);
        }
    }

    /// Adds the document of this index to those that the slot answers with in the edition that it has begun.
    pub fn add(&self, slot: Slot, index: u16) {
        if let Some(word) = self.word(slot, index) {
            word.fetch_or(CommonUses::bit(index), Ordering::AcqRel);
        }
    }

    /// Takes the document of this index from all slots.
    pub fn forget(&self, index: u16) {
        for slot in 0..MAX_SLOTS {
            if let Some(word) = self.word(slot, index) {
                word.fetch_and(!CommonUses::bit(index), Ordering::AcqRel);
            }
        }
    }

    fn word(&self, slot: Slot, index: u16) -> Option<&AtomicU64> {
        self.entry(slot)?.get(usize::from(index / COMMON_BITS))
    }

    fn entry(&self, slot: Slot) -> Option<&[AtomicU64; COMMON_WORDS]> {
        if slot >= MAX_SLOTS {
            return None;
        }
        // SAFETY: the slot is below MAX_SLOTS, and `inside` checked that this many aligned entries lie in the mapping.
        let entry = unsafe { self.slots.add(slot as usize) };
        // SAFETY: as above; the mapping lives as long as `self`, all its bytes are initialised, and both sides access
        // them as whole words.
        Some(unsafe { entry.as_ref() })
    }
}

#[cfg(test)]
mod tests {
    use super::{COMMON_BITS, COMMON_WORDS, CommonUseTable, CommonUses, MAX_SLOTS, Mapping};
    use metadata_common::maps::MAX_COMMON_DOCUMENTS;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_forgotten_document_is_taken_from_all_slots_and_no_other_is() {
        let memory = Mapping::anonymous(MAX_SLOTS as usize * size_of::<CommonUses>()).expect("memory");
        let table = CommonUseTable::inside(memory).expect("all entries");
        let uses = |edition, index: u16| {
            let mut uses = CommonUses::none(edition);
            uses.0[usize::from(index / COMMON_BITS)] |= CommonUses::bit(index);
            uses
        };
        let read = |slot| {
            let words = table.entry(slot)?.each_ref();
            Some(CommonUses(words.map(|word| word.load(Ordering::Relaxed))))
        };
        for (slot, edition, indices) in [
            (0, 1, &[3, 100][..]),
            (MAX_SLOTS - 1, 7, &[3]),
            (MAX_SLOTS, 9, &[3]),
            (2, 5, &[MAX_COMMON_DOCUMENTS]),
        ] {
            table.begin(slot, edition);
            indices.iter().for_each(|index| table.add(slot, *index));
        }
        table.forget(3);
        assert_eq!(read(0), Some(uses(1, 100)));
        assert_eq!(read(MAX_SLOTS - 1), Some(CommonUses::none(7)));
        assert_eq!(read(2), Some(CommonUses::none(5)), "no document has this index");
        assert_eq!((read(1), read(MAX_SLOTS)), (Some(CommonUses([0; COMMON_WORDS])), None));
    }

    #[test]
    fn a_table_that_is_too_small_is_refused() {
        let memory = Mapping::anonymous(MAX_SLOTS as usize * size_of::<CommonUses>() - 8).expect("memory");
        assert!(CommonUseTable::inside(memory).is_err());
    }
}
