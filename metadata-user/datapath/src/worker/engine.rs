//! Implements the worker's engine with the stack.

use std::time::Duration;

use metadata_common::maps::Slot;

use super::{Engine, SEGMENTS_AT_ONCE};
use crate::stack::{Claims, Ledger, Service, SlotStats, Stack, StackStats, Transmit};
use metadata_base::time::Now;

impl<S, L> Engine for Stack<S, L>
where
    S: Service + Send + 'static,
    S::Exchange: Send,
    L: Ledger + Send + 'static,
{
    type Stats = StackStats;

    fn read_ahead(&self, group: &[(Slot, &[u8])]) {
        Stack::read_ahead(self, group);
    }

    fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        // A slot with deferred output sends only in its own visits. If each acknowledgement caused more output, the
        // last waiting acknowledgements would be read so late that the retransmission timer would send data the guest
        // already has.
        self.allow(if self.owes(slot) { 0 } else { SEGMENTS_AT_ONCE });
        Stack::receive(self, now, slot, frame, out);
    }

    fn owing(&mut self) -> Option<Slot> {
        Stack::owing(self)
    }

    fn go_on(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) -> bool {
        self.allow(SEGMENTS_AT_ONCE);
        Stack::go_on(self, now, slot, out)
    }

    fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration> {
        self.allow(SEGMENTS_AT_ONCE);
        Stack::step(self, now, out)
    }

    fn forget(&mut self, slot: Slot) {
        Stack::forget(self, slot);
    }

    fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        self.allow(SEGMENTS_AT_ONCE);
        Stack::wake(self, now, slot, out);
    }

    fn drain(&mut self, now: Now, limit: Duration, claims: Option<Box<dyn Claims + Send>>) {
        Stack::drain(self, now, limit, claims);
    }

    fn resume(&mut self) {
        Stack::resume(self);
    }

    fn spare_unknown(&mut self, spare: bool) {
        Stack::spare_unknown(self, spare);
    }

    fn left(&self) -> usize {
        Stack::left(self)
    }

    fn turned(&mut self, turn: Duration) {
        Stack::turned(self, turn);
    }

    fn look(&self, slot: Slot) -> SlotStats {
        Stack::look(self, slot)
    }

    fn stats(&self) -> StackStats {
        Stack::stats(self)
    }
}
