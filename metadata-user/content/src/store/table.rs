//! The table of slots and their responses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use metadata_common::bucket::take;
use metadata_common::maps::{Port, Slot};

use super::{RequestLimit, Responses, VmState};
use crate::http::Request;
use metadata_common::addresses::Connection;

/// Maximum number of slots of a table: 2²⁰ VMs (8 MiB of pointers).
pub const MAX_SLOTS: u32 = 1 << 20;

/// State of a slot.
#[derive(Clone, Debug)]
pub enum SlotState {
    /// No VM has the slot: answer 404 at once.
    Unknown,
    /// The VM is known, but its record has not arrived: hold the request, then answer 503.
    Expected,
    /// The VM's responses are published.
    Ready(Arc<Responses>),
}

/// The slot is beyond the end of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot} is beyond the table of {slots} slots; start the agent with room for more VMs")]
pub struct SlotOutOfRange {
    /// The requested slot.
    pub slot: Slot,
    /// Number of slots of the table; the first is 0.
    pub slots: u32,
}

/// Maps slots to responses. The control side writes it, and the workers read it without locks.
#[derive(Debug)]
pub struct Store {
    pub(super) table: Box<[ArcSwapOption<Responses>]>,
    /// What a slot holds while its record is expected. Only its address counts, so that one swap changes a slot's
    /// state.
    expected: Arc<Responses>,
    /// Per slot: when its token bucket will be full again, in nanoseconds of `Now::mono`. A new record does not reset
    /// it, so replaced records do not weaken the limit.
    pub(super) buckets: Box<[AtomicU64]>,
}

impl Store {
    /// Creates a table of `slots` slots without a VM, at most [`MAX_SLOTS`].
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let slots = slots.min(MAX_SLOTS);
        Self {
            table: (0..slots).map(|_| ArcSwapOption::empty()).collect(),
            expected: Arc::new(Responses::builder(VmState::alone("")).build()),
            buckets: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        u32::try_from(self.table.len()).unwrap_or(MAX_SLOTS)
    }

    /// Publishes `responses` for `slot`. Later requests get them.
    ///
    /// # Errors
    /// [`SlotOutOfRange`] if the table does not have the slot.
    pub fn publish(&self, slot: Slot, responses: Arc<Responses>) -> Result<(), SlotOutOfRange> {
        self.set(slot, Some(responses))
    }

    /// Replaces `old` by `new` unless `slot` holds something else by now.
    pub fn replace(&self, slot: Slot, old: &Arc<Responses>, new: Arc<Responses>) {
        if let Some(cell) = usize::try_from(slot).ok().and_then(|index| self.table.get(index)) {
            drop(cell.compare_and_swap(old, Some(new)));
        }
    }

    /// Marks `slot` as a VM whose record has not arrived. Replaces published responses.
    ///
    /// # Errors
    /// [`SlotOutOfRange`] if the table does not have the slot.
    pub fn expect(&self, slot: Slot) -> Result<(), SlotOutOfRange> {
        self.set(slot, Some(Arc::clone(&self.expected)))
    }

    /// Takes one token from the bucket of `slot`; returns false if it is empty. Never waits.
    ///
    /// Only the worker that serves the slot calls this, so there is no race.
    #[must_use]
    pub fn admit(&self, slot: Slot, limit: RequestLimit, now: Duration) -> bool {
        let Some(bucket) = usize::try_from(slot).ok().and_then(|index| self.buckets.get(index)) else {
            return false;
        };
        let full_at_ns = bucket.load(Ordering::Relaxed);
        let port = Port { full_at_ns, ..Port::with_limit(limit.per_second, limit.burst) };
        let taken = take(port, u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
        taken.inspect(|full_at_ns| bucket.store(*full_at_ns, Ordering::Relaxed)).is_some()
    }

    /// Clears `slot` and refills its token bucket.
    ///
    /// # Errors
    /// [`SlotOutOfRange`] if the table does not have the slot.
    pub fn withdraw(&self, slot: Slot) -> Result<(), SlotOutOfRange> {
        self.set(slot, None)?;
        if let Some(bucket) = usize::try_from(slot).ok().and_then(|index| self.buckets.get(index)) {
            bucket.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns whether the answer to a request is rendered in advance. Never waits.
    #[must_use]
    pub fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.get(connection.slot) {
            SlotState::Ready(responses) => responses.is_fixed(connection, request),
            SlotState::Expected => false,
            SlotState::Unknown => true,
        }
    }

    /// Returns the state of `slot`; [`SlotState::Unknown`] beyond the end of the table. Never waits.
    #[must_use]
    pub fn get(&self, slot: Slot) -> SlotState {
        let Some(cell) = usize::try_from(slot).ok().and_then(|index| self.table.get(index)) else {
            return SlotState::Unknown;
        };
        match cell.load_full() {
            None => SlotState::Unknown,
            Some(held) if Arc::ptr_eq(&held, &self.expected) => SlotState::Expected,
            Some(responses) => SlotState::Ready(responses),
        }
    }

    fn set(&self, slot: Slot, held: Option<Arc<Responses>>) -> Result<(), SlotOutOfRange> {
        let cell = usize::try_from(slot).ok().and_then(|index| self.table.get(index));
        let cell = cell.ok_or(SlotOutOfRange { slot, slots: self.slots() })?;
        cell.store(held);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_SLOTS, SlotOutOfRange, SlotState, Store};
    use crate::store::{RequestLimit, Responses, VmState};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    fn some() -> Arc<Responses> {
        Arc::new(Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d")).build())
    }

    #[test]
    fn a_slot_goes_from_unknown_to_expected_to_ready_and_back() {
        let store = Store::new(2);
        assert!(matches!(store.get(1), SlotState::Unknown));
        store.expect(1).expect("slot 1 exists");
        assert!(matches!(store.get(1), SlotState::Expected));
        let responses = some();
        store.publish(1, Arc::clone(&responses)).expect("slot 1 exists");
        assert!(matches!(store.get(1), SlotState::Ready(found) if Arc::ptr_eq(&found, &responses)));
        assert!(matches!(store.get(0), SlotState::Unknown), "another slot changed");
        store.withdraw(1).expect("slot 1 exists");
        assert!(matches!(store.get(1), SlotState::Unknown));
    }

    #[test]
    fn a_slot_beyond_the_table_is_an_error_for_writers_and_unknown_to_readers() {
        let store = Store::new(2);
        let refused = SlotOutOfRange { slot: 2, slots: 2 };
        assert_eq!(store.publish(2, some()), Err(refused));
        assert_eq!(store.expect(2), Err(refused));
        assert_eq!(store.withdraw(2), Err(refused));
        assert!(matches!(store.get(2), SlotState::Unknown));
        assert!(matches!(store.get(u32::MAX), SlotState::Unknown));
        assert_eq!(Store::new(u32::MAX).slots(), MAX_SLOTS);
    }

    #[test]
    fn a_slot_may_use_its_burst_at_once_and_its_rate_afterwards() {
        let store = Store::new(2);
        let limit = RequestLimit { per_second: 100, burst: 400 };
        let admitted = |slot, at| (0..1_000).filter(|_| store.admit(slot, limit, at)).count();
        assert_eq!(admitted(0, Duration::from_secs(9)), 400);
        assert_eq!(admitted(1, Duration::from_secs(9)), 400, "each slot has its own bucket");
        assert_eq!(admitted(0, Duration::from_secs(10)), 100);
        store.withdraw(0).expect("slot 0 exists");
        assert_eq!(admitted(0, Duration::from_secs(10)), 400, "the next guest has a full bucket");
        assert!(!store.admit(2, limit, Duration::ZERO), "no such slot");
    }

    #[test]
    fn an_exchange_keeps_the_responses_it_started_with() {
        let store = Store::new(1);
        let before = some();
        store.publish(0, Arc::clone(&before)).expect("slot 0 exists");
        let SlotState::Ready(held) = store.get(0) else { panic!("slot 0 was published") };
        store.publish(0, some()).expect("slot 0 exists");
        assert!(Arc::ptr_eq(&held, &before));
        drop(held);
        assert_eq!(Arc::strong_count(&before), 1, "the store still holds the replaced responses");
    }

    #[test]
    fn readers_see_either_record_while_a_writer_swaps_them() {
        const SWAPS: usize = 2_000;
        let store = Store::new(1);
        let records = [some(), some()];
        store.publish(0, Arc::clone(&records[0])).expect("slot 0 exists");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut reads = 0_usize;
                while !done.load(Ordering::Acquire) || reads == 0 {
                    let SlotState::Ready(found) = store.get(0) else { panic!("the slot was emptied") };
                    assert!(records.iter().any(|r| Arc::ptr_eq(r, &found)));
                    reads += 1;
                }
            });
            for swap in 0..SWAPS {
                store.publish(0, Arc::clone(&records[swap % 2])).expect("slot 0 exists");
            }
            done.store(true, Ordering::Release);
            reader.join().expect("the reader saw only published records");
        });
    }
}
