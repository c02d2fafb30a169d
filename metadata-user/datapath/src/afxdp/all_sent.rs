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
use metadata_common::maps::{ALL_SENT, ALL_SENT_IDLE_MS, AllSent, AnsweredConnection};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
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

    /// The numbers of a connection that the kernel has answered.
    fn numbers(&self, flow: Flow) -> AllSent {
        let cell = self.cell(flow);
        AllSent {
            sent: cell.sent.load(Ordering::Relaxed),
            received: cell.received.load(Ordering::Relaxed),
            acknowledged: cell.acknowledged.load(Ordering::Relaxed),
            opened: cell.opened.load(Ordering::Relaxed),
            ..AllSent::default()
        }
    }

    /// Whether the kernel has answered a connection of this number, at this index, and then none of its segments for
    /// [`ALL_SENT_IDLE_MS`].
    fn is_idle(&self, index: u32, number: u64) -> bool {
        self.answered_at(index).is_some_and(|answered| answered.flow == number && answered.is_idle(now_ns()))
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

/// The connections in the table that the programs of another agent have answered: this agent does not know when.
#[derive(Debug, Default)]
pub struct ForeignConnections {
    /// By its flow: what the kernel had sent on a connection, and since when no more.
    seen: HashMap<u64, (u32, u64)>,
}

impl ForeignConnections {
    /// Frees the entries of those that were looked at [`ALL_SENT_IDLE_MS`] ago and have sent nothing since. While another
    /// agent starts or ends, its programs answer, too, so its connections may be in use. Returns the number of the others.
    pub fn free_idle(&mut self, table: &AllSentTable, now_ns: u64) -> usize {
        let mut seen = HashMap::new();
        for index in 0..ALL_SENT {
            let cell = table.place(index);
            let flow = cell.kernels();
            if flow == 0 || table.answered_at(index).is_some_and(|answered| answered.flow == flow) {
                continue;
            }
            let sent = cell.sent.load(Ordering::Relaxed);
            let known = self.seen.get(&flow).filter(|(before, _)| *before == sent);
            let since = known.map_or(now_ns, |(_, since)| *since);
            if now_ns.saturating_sub(since) / 1_000_000 > ALL_SENT_IDLE_MS.into() {
                cell.withdraw(flow);
            } else {
                seen.insert(flow, (sent, since));
            }
        }
        self.seen = seen;
        self.seen.len()
    }
}

/// The kernel's time (`bpf_ktime_get_ns`).
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

impl AckLedger for AllSentTable {
    fn hold(&mut self, flow: Flow) {
        self.cell(flow).hold();
    }

    fn release(&mut self, flow: Flow) {
        self.cell(flow).withdraw(flow.number());
        self.cell(flow).release();
    }

    fn leave(&mut self, flow: Flow) {
        self.cell(flow).release();
    }

    fn is_opened(&self, flow: Flow) -> bool {
        self.cell(flow).is_opened(flow.mark())
    }

    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<DisplacedConnection> {
        self.cell(flow).post(entry, |kernels| self.is_idle(flow.index(), kernels))
    }

    fn look(&self, flow: Flow) -> Option<KernelReceipt> {
        self.cell(flow).look(flow.number())
    }

    fn kernel_turn(&self, flow: Flow, segment: KernelSegment) -> KernelTurn {
        if self.cell(flow).kernels() != flow.number() {
            return KernelTurn::Unknown;
        }
        let turn = KernelTurn::after(&self.numbers(flow), flow.mark(), segment, self.answered(flow));
        match turn {
            KernelTurn::Kernels { first, .. } => {
                KernelTurn::Kernels { first, is_idle: self.is_idle(flow.index(), flow.number()) }
            }
            turn => turn,
        }
    }

    fn take_over(&mut self, flow: Flow, segment: KernelSegment) -> bool {
        let posted = self.numbers(flow);
        let turn = KernelTurn::after(&posted, flow.mark(), segment, self.answered(flow));
        if self.cell(flow).kernels() != flow.number() || !turn.is_stacks() {
            return false;
        }
        self.withdraw(flow);
        // The kernel may have answered the guest's next copy of the segment meanwhile.
        let AllSent { sent, received, .. } = self.numbers(flow);
        (sent, received) == (posted.sent, posted.received)
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
        ALL_SENT, AckLedger as _, AllSent, AllSentTable, AnsweredConnection, AtomicAnswered, AtomicEntry,
        DisplacedConnection, ForeignConnections, KernelReceipt, KernelSegment, KernelTurn, Mapping, now_ns,
    };
    use metadata_common::cookie::{CookieKey, Flow};
    use metadata_common::maps::FIN_ENDS_BOTH_KERNEL;
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
        table.hold(flow(1));
        table.post(flow(1), entry(flow(1)));
        table.leave(flow(1));
        assert_eq!(table.cell(flow(1)).held.load(Ordering::Relaxed), 1);
        assert!(
            table.look(flow(1)).is_some(),
            "the kernel receives the guest's FIN after the end of the stack"
        );
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

    const SECOND: u64 = 1_000_000_000;

    /// Has the kernel answer a connection with this number of bytes. Its own agent also knows when.
    fn answer(table: &AllSentTable, flow: Flow, sent: u32, at_ns: Option<u64>) {
        let cell = table.cell(flow);
        cell.sent.store(sent, Ordering::Relaxed);
        cell.received.store(100, Ordering::Relaxed);
        cell.closed.store(sent - 1, Ordering::Relaxed);
        cell.finished.store(FIN_ENDS_BOTH_KERNEL, Ordering::Relaxed);
        cell.flow.store(flow.number(), Ordering::Relaxed);
        if let Some(at_ns) = at_ns {
            let (first, _) = table.answered.as_ref().expect("both tables");
            // SAFETY: the index is below ALL_SENT, and the mapping has that many entries.
            let place = unsafe { first.add(flow.index() as usize) };
            // SAFETY: inside the mapping, which is alive and consists of atomics.
            let place = unsafe { place.as_ref() };
            let known =
                AnsweredConnection::new(flow.number(), at_ns, 1, AnsweredConnection::LEAST.options(), 1);
            place.flow.store(known.flow, Ordering::Relaxed);
            place.at_ms.store(known.at_ms, Ordering::Relaxed);
        }
    }

    /// The table, and the one of connections that the kernel has answered.
    fn both_tables() -> AllSentTable {
        let memory = Mapping::anonymous(ALL_SENT as usize * size_of::<AtomicAnswered>()).expect("two MiB");
        let first = memory.at(0, ALL_SENT as usize).expect("all entries");
        AllSentTable { answered: Some((first, memory)), ..table() }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it looks at all entries several times")]
    fn a_connection_that_another_agent_has_answered_is_freed_once_it_has_sent_nothing_for_75_s() {
        let (table, mut foreign) = (both_tables(), ForeignConnections::default());
        let (own, idle, used) = (flow(1), flow(2), flow(3));
        answer(&table, own, 500, Some(0));
        answer(&table, idle, 500, None);
        answer(&table, used, 500, None);
        let kept = || [own, idle, used].map(|flow| table.cell(flow).kernels() != 0);
        assert_eq!(foreign.free_idle(&table, 1_000 * SECOND), 2, "nobody knows when they were used");
        answer(&table, used, 900, None);
        assert_eq!(foreign.free_idle(&table, 1_070 * SECOND), 2);
        assert_eq!(kept(), [true; 3]);
        assert_eq!(foreign.free_idle(&table, 1_080 * SECOND), 1);
        assert_eq!(kept(), [true, false, true], "the agent's own stays until its entry is needed");
        assert_eq!(foreign.free_idle(&table, 1_200 * SECOND), 0);
        assert_eq!(kept(), [true, false, false]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it searches thousands of flows for two with one entry")]
    fn a_post_takes_the_entry_of_an_answered_connection_only_if_that_is_idle() {
        let other = (2..).map(flow).find(|other| other.index() == flow(1).index()).expect("a collision");
        for (name, at_ns, takes) in [
            ("just answered", Some(now_ns()), false),
            ("idle", Some(now_ns().wrapping_sub(80 * SECOND)), true),
            ("answered by another agent", None, false),
        ] {
            let mut table = both_tables();
            answer(&table, flow(1), 500, at_ns);
            table.post(other, entry(other));
            assert_eq!(table.look(other).is_some(), takes, "{name}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "the clock is a system call")]
    fn a_guest_may_begin_again_where_its_answered_connection_is_idle() {
        for (at_ns, idle) in [(now_ns(), false), (now_ns().wrapping_sub(80 * SECOND), true)] {
            let table = both_tables();
            answer(&table, flow(1), 500, Some(at_ns));
            let segment = KernelSegment { seq: 1, next: 50, ack: Some(9), resets: false };
            let turn = table.kernel_turn(flow(1), segment);
            assert_eq!(turn, KernelTurn::Kernels { first: Some(0), is_idle: idle });
        }
    }

    #[test]
    fn a_connection_is_taken_over_only_with_a_segment_that_is_the_stacks() {
        let mut table = both_tables();
        answer(&table, flow(1), 500, Some(SECOND));
        let request = |seq| KernelSegment { seq, next: seq + 40, ack: Some(500), resets: false };
        assert!(!table.take_over(flow(1), request(7)), "not the next one");
        assert!(table.cell(flow(1)).kernels() != 0, "it stays the kernel's");
        assert!(table.kernel_turn(flow(1), request(100)).is_stacks());
        assert!(table.cell(flow(1)).kernels() != 0, "to ask changes nothing");
        assert!(table.take_over(flow(1), request(100)));
        assert_eq!(table.cell(flow(1)).kernels(), 0);
        assert!(!table.take_over(flow(1), request(100)), "it is the stack's already");
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
