//! Connections that have sent all their output, in memory shared with the kernel's `port` program (`ALL_SENT`).
//!
//! User space posts a connection once all its output is sent. The kernel program then receives the guest's
//! acknowledgement and FIN on its behalf. Two connections may share one entry. The later one takes it: what the
//! kernel received for the earlier one is read just before, and the earlier one's segments go to user space again.
//!
//! Neither side waits for the other, and the kernel program has no barriers. x86 loads in program order, arm64 does
//! not, so what one side reads may be of several states of the entry. Correctness needs no order, only whole fields:
//!
//! - The kernel may combine one connection's flow with another's numbers. It then takes a segment of the first only if
//!   that has exactly the second's two numbers, of 32 bits each. A guest that knows both loses a segment of its own.
//! - The kernel may store into an entry that has become another connection's. User space believes such a number only
//!   if it equals what this connection has sent (32 bits that the other guest does not know).
//! - User space may see the FIN's mark before the acknowledgement's. The FIN's mark implies the other.
//!
//! An entry's flow is cleared before its numbers are written, and set after, so that such mixes last for a few loads.
#![expect(unsafe_code, reason = "entries lie in memory shared with the kernel")]

use metadata_common::cookie::Flow;
use metadata_common::maps::{ALL_SENT, AllSent, AnsweredConnection};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::sys::Mapping;
use crate::stack::{AckLedger, DisplacedConnection, KernelReceipt, KernelSegment, KernelTurn};
use cell::AtomicEntry;

mod cell;
/// The atomics that `cell` uses. A thread model replaces this module with its own types.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<AtomicEntry>() == size_of::<AllSent>());
    assert!(offset_of!(AtomicEntry, flow) == offset_of!(AllSent, flow));
    assert!(offset_of!(AtomicEntry, sent) == offset_of!(AllSent, sent));
    assert!(offset_of!(AtomicEntry, received) == offset_of!(AllSent, received));
    assert!(offset_of!(AtomicEntry, finished) == offset_of!(AllSent, finished));
    assert!(offset_of!(AtomicEntry, opened) == offset_of!(AllSent, opened));
    assert!(offset_of!(AtomicEntry, held) == offset_of!(AllSent, held));
    assert!(offset_of!(AtomicEntry, acknowledged) == offset_of!(AllSent, acknowledged));
    assert!(offset_of!(AtomicEntry, closed) == offset_of!(AllSent, closed));
};

/// The mapped table. Each worker has its own mapping; all map the same memory.
///
/// A post or a look-up touches one cache line and makes no system call.
#[derive(Debug)]
pub struct AllSentTable {
    cells: NonNull<AtomicEntry>,
    /// Owned so that `cells` stays valid.
    _memory: Mapping,
    /// The connections that the kernel has answered, and their mapping.
    answered: Option<(NonNull<AtomicAnswered>, Mapping)>,
}

// SAFETY: the address points into the mapping that this struct owns and moves with, and a cell consists of atomics.
unsafe impl Send for AllSentTable {}

impl AllSentTable {
    /// Maps the whole table from its descriptor: 2 MiB that the kernel has allocated anyway.
    pub fn map(table: BorrowedFd<'_>) -> Result<Self, Errno> {
        Self::inside(Mapping::shared(table, 0, ALL_SENT as usize * size_of::<AtomicEntry>())?)
    }

    fn inside(memory: Mapping) -> Result<Self, Errno> {
        let cells = memory.at(0, ALL_SENT as usize).ok_or(Errno::FAULT)?;
        Ok(Self { cells, _memory: memory, answered: None })
    }

    /// Maps the table of connections that the kernel has answered, too.
    pub fn and_answered(self, table: BorrowedFd<'_>) -> Result<Self, Errno> {
        let memory = Mapping::shared(table, 0, ALL_SENT as usize * size_of::<AtomicAnswered>())?;
        let first = memory.at(0, ALL_SENT as usize).ok_or(Errno::FAULT)?;
        Ok(Self { answered: Some((first, memory)), ..self })
    }

    /// Frees the entries of connections that the kernel answered last more than [`ALL_SENT_IDLE_MS`] ago. Returns the
    /// number of those that it still owns.
    ///
    /// [`ALL_SENT_IDLE_MS`]: metadata_common::maps::ALL_SENT_IDLE_MS
    pub fn free_idle(&self, now_ns: u64) -> u64 {
        let mut owned = 0;
        for index in 0..ALL_SENT {
            let cell = self.place(index);
            let flow = cell.kernels();
            if flow == 0 {
                continue;
            }
            if self
                .answered_at(index)
                .is_some_and(|answered| answered.flow == flow && !answered.is_idle(now_ns))
            {
                owned += 1;
            } else {
                cell.withdraw(flow);
            }
        }
        owned
    }

    /// What the kernel knows of a connection that it has answered.
    fn answered(&self, flow: Flow) -> Option<AnsweredConnection> {
        self.answered_at(flow.index()).filter(|answered| answered.flow == flow.number())
    }

    fn answered_at(&self, index: u32) -> Option<AnsweredConnection> {
        let (first, _) = self.answered.as_ref()?;
        let index = (index & (ALL_SENT - 1)) as usize;
        // SAFETY: the index is below ALL_SENT, and `and_answered` checked that this many aligned entries lie in the
        // mapping.
        let entry = unsafe { first.add(index) };
        // SAFETY: as above; the mapping lives as long as `self`, all its bytes are initialised, and both sides access
        // them as whole integers.
        Some(unsafe { entry.as_ref() }.load())
    }

    /// Resets the count of held connections in every entry, because the agent that counted them has ended.
    pub fn release_all(&self) {
        for index in 0..ALL_SENT {
            self.place(index).held.store(0, Ordering::Release);
        }
    }

    fn cell(&self, flow: Flow) -> &AtomicEntry {
        self.place(flow.index())
    }

    fn place(&self, index: u32) -> &AtomicEntry {
        let index = (index & (ALL_SENT - 1)) as usize;
        // SAFETY: the index is below ALL_SENT, and `inside` checked that this many aligned cells lie in the mapping.
        let cell = unsafe { self.cells.add(index) };
        // SAFETY: as above; the mapping lives as long as `self`, all its bytes are initialised, and both sides
        // access them as whole integers.
        unsafe { cell.as_ref() }
    }
}

impl AckLedger for AllSentTable {
    fn hold(&mut self, flow: Flow) {
        self.cell(flow).hold();
    }

    fn release(&mut self, flow: Flow) {
        self.cell(flow).withdraw(flow.number());
        self.cell(flow).release();
    }

    fn is_opened(&self, flow: Flow) -> bool {
        self.cell(flow).is_opened(flow.mark())
    }

    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<DisplacedConnection> {
        self.cell(flow).post(entry)
    }

    fn look(&self, flow: Flow) -> Option<KernelReceipt> {
        self.cell(flow).look(flow.number())
    }

    fn take_over(&mut self, flow: Flow, segment: KernelSegment) -> KernelTurn {
        let (number, cell) = (flow.number(), self.cell(flow));
        if cell.kernels() != number {
            return KernelTurn::Unknown;
        }
        let numbers = || AllSent {
            sent: cell.sent.load(Ordering::Relaxed),
            received: cell.received.load(Ordering::Relaxed),
            acknowledged: cell.acknowledged.load(Ordering::Relaxed),
            opened: cell.opened.load(Ordering::Relaxed),
            ..AllSent::default()
        };
        let (posted, answered) = (numbers(), self.answered(flow));
        let turn = KernelTurn::after(&posted, flow.mark(), segment, answered);
        if matches!(turn, KernelTurn::Kernels { .. }) {
            return turn;
        }
        cell.withdraw(number);
        // The kernel may have answered the guest's next copy of the segment meanwhile.
        let AllSent { sent, received, .. } = numbers();
        if (sent, received) == (posted.sent, posted.received) {
            turn
        } else {
            KernelTurn::Kernels { first: None }
        }
    }

    fn reopen(&mut self, flow: Flow) {
        let cell = self.cell(flow);
        if cell.kernels() == flow.number() {
            cell.opened.store(flow.mark(), Ordering::Relaxed);
        }
    }

    fn withdraw(&mut self, flow: Flow) {
        self.cell(flow).withdraw(flow.number());
    }
}

/// An entry of the table of connections that the kernel has answered (`ANSWERED`), as both sides access it.
#[derive(Debug)]
#[repr(C)]
struct AtomicAnswered {
    flow: AtomicU64,
    at_ms: AtomicU32,
    edition: AtomicU32,
    segment: AtomicU16,
    scale: AtomicU16,
    first: AtomicU32,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<AtomicAnswered>() == size_of::<AnsweredConnection>());
    assert!(offset_of!(AtomicAnswered, flow) == offset_of!(AnsweredConnection, flow));
    assert!(offset_of!(AtomicAnswered, at_ms) == offset_of!(AnsweredConnection, at_ms));
    assert!(offset_of!(AtomicAnswered, edition) == offset_of!(AnsweredConnection, edition));
    assert!(offset_of!(AtomicAnswered, segment) == offset_of!(AnsweredConnection, segment));
    assert!(offset_of!(AtomicAnswered, scale) == offset_of!(AnsweredConnection, scale));
    assert!(offset_of!(AtomicAnswered, first) == offset_of!(AnsweredConnection, first));
};

impl AtomicAnswered {
    fn load(&self) -> AnsweredConnection {
        AnsweredConnection {
            flow: self.flow.load(Ordering::Acquire),
            at_ms: self.at_ms.load(Ordering::Relaxed),
            edition: self.edition.load(Ordering::Relaxed),
            segment: self.segment.load(Ordering::Relaxed),
            scale: self.scale.load(Ordering::Relaxed),
            first: self.first.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        ALL_SENT, AckLedger as _, AllSent, AllSentTable, AtomicEntry, DisplacedConnection, KernelReceipt,
        Mapping,
    };
    use metadata_common::cookie::{CookieKey, Flow};
    use std::sync::atomic::{AtomicU32, Ordering};

    fn table() -> AllSentTable {
        let memory = Mapping::anonymous(ALL_SENT as usize * size_of::<AtomicEntry>()).expect("two MiB");
        AllSentTable::inside(memory).expect("all entries")
    }

    fn flow(port: u32) -> Flow {
        Flow::v4(&CookieKey([1, 2]), 3, [10, 0, 0, 1], [169, 254, 169, 254], port.to_be_bytes())
    }

    fn entry(flow: Flow) -> AllSent {
        AllSent {
            flow: flow.number(),
            sent: 7,
            received: 9,
            finished: 1,
            acknowledged: 6,
            closed: 5,
            ..AllSent::default()
        }
    }

    #[test]
    fn a_table_that_is_too_small_is_refused() {
        let memory = Mapping::anonymous((ALL_SENT as usize - 1) * size_of::<AtomicEntry>()).expect("memory");
        assert!(AllSentTable::inside(memory).is_err());
    }

    #[test]
    fn every_flow_has_the_entry_that_the_kernel_reads() {
        let mut table = table();
        for port in 0..if cfg!(miri) { 20 } else { 1_000 } {
            table.post(flow(port), entry(flow(port)));
            // SAFETY: the index is below ALL_SENT, and the mapping has that many entries.
            let place = unsafe { table.cells.add(flow(port).index() as usize) };
            // SAFETY: inside the mapping, which is alive; only this test accesses it.
            let found = unsafe { place.cast::<AllSent>().read() };
            assert_eq!(found, entry(flow(port)));
        }
    }

    #[test]
    fn a_posted_entry_is_read_with_what_the_kernel_has_stored() {
        let mut table = table();
        assert_eq!(table.look(flow(1)), None);
        table.post(flow(1), entry(flow(1)));
        assert_eq!(table.look(flow(1)), Some(KernelReceipt { acknowledged: 6, closed: 5 }));
        table.cell(flow(1)).acknowledged.store(7, Ordering::Relaxed);
        assert_eq!(table.look(flow(1)), Some(KernelReceipt { acknowledged: 7, closed: 5 }));
        table.cell(flow(1)).closed.store(7, Ordering::Relaxed);
        assert_eq!(table.look(flow(1)), Some(KernelReceipt { acknowledged: 7, closed: 7 }));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it searches thousands of flows for two with one entry")]
    fn a_withdrawn_entry_reads_as_none_and_another_flow_cannot_withdraw_it() {
        let mut table = table();
        let other = (2..).map(flow).find(|other| other.index() == flow(1).index()).expect("a collision");
        table.post(flow(1), entry(flow(1)));
        table.withdraw(other);
        assert!(table.look(flow(1)).is_some());
        table.cell(flow(1)).closed.store(7, Ordering::Relaxed);
        assert_eq!(table.post(flow(1), entry(flow(1))), None, "it takes its own entry");
        table.cell(flow(1)).closed.store(7, Ordering::Relaxed);
        let heard = KernelReceipt { acknowledged: 6, closed: 7 };
        assert_eq!(
            table.post(other, entry(other)),
            Some(DisplacedConnection { flow: flow(1).number(), heard })
        );
        assert_eq!(table.look(flow(1)), None);
        assert!(table.look(other).is_some());
        table.withdraw(other);
        assert_eq!(table.look(other), None);
    }

    #[test]
    fn held_connections_are_counted_per_entry_and_released_one_by_one() {
        let mut table = table();
        table.hold(flow(1));
        table.hold(flow(1));
        table.post(flow(1), entry(flow(1)));
        assert_eq!(table.cell(flow(1)).held.load(Ordering::Relaxed), 2, "a post keeps the count");
        table.release(flow(1));
        assert_eq!(table.cell(flow(1)).held.load(Ordering::Relaxed), 1);
        assert_eq!(table.look(flow(1)), None, "a release withdraws the entry");
        table.release_all();
        assert_eq!(table.cell(flow(1)).held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_answered_syn_is_known_by_its_flow_until_a_connection_starts() {
        let mut table = table();
        assert!(!table.is_opened(flow(1)));
        table.cell(flow(1)).opened.store(flow(1).mark(), Ordering::Relaxed);
        assert!(table.is_opened(flow(1)));
        table.hold(flow(1));
        assert!(!table.is_opened(flow(1)));
    }

    /// Waits until `count` threads have called this `round` times.
    fn meet(met: &AtomicU32, round: u32, count: u32) {
        met.fetch_add(1, Ordering::SeqCst);
        for turn in 0_u64.. {
            if met.load(Ordering::SeqCst) >= round * count {
                return;
            }
            // The other thread may need this CPU.
            if turn % 1_000 == 999 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "as above; loom tries every order")]
    fn after_two_concurrent_posts_an_entry_holds_one_or_none() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 100_000 };
        let first = table();
        let other = (2..).map(flow).find(|other| other.index() == flow(1).index()).expect("a collision");
        let (met, mixed) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for (flow, number) in [(flow(1), 1), (other, 2)] {
                let memory = Mapping::anonymous(size_of::<AtomicEntry>()).expect("a page");
                let mut worker = AllSentTable { cells: first.cells, _memory: memory, answered: None };
                let (met, mixed) = (&met, &mixed);
                scope.spawn(move || {
                    let numbers =
                        AllSent { sent: number, received: number, finished: number as u16, ..entry(flow) };
                    for round in 0..ROUNDS {
                        meet(met, 2 * round + 1, 2);
                        worker.post(flow, numbers);
                        meet(met, 2 * round + 2, 2);
                        let cell = worker.cell(flow);
                        let fields = [&cell.sent, &cell.received].map(|field| field.load(Ordering::SeqCst));
                        let finished = cell.finished.load(Ordering::SeqCst).into();
                        let is_ours = [fields[0], fields[1], finished] == [number; 3];
                        if cell.flow.load(Ordering::SeqCst) == flow.number() && !is_ours {
                            mixed.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert_eq!(mixed.into_inner(), 0, "entries with one flow and the numbers of both");
    }
}
