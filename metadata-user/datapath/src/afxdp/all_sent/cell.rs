//! One entry, and the order in which its fields are read and written.
//!
//! A model of threads includes this file as it stands, with atomics that try every order the memory model allows.

use super::sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use super::{AllSent, Displaced, Heard};

/// An entry as both sides reach it: [`AllSent`], field by field.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Cell {
    pub(super) flow: AtomicU64,
    pub(super) sent: AtomicU32,
    pub(super) received: AtomicU32,
    pub(super) finished: AtomicU16,
    pub(super) opened: AtomicU16,
    pub(super) held: AtomicU32,
    pub(super) acknowledged: AtomicU32,
    pub(super) closed: AtomicU32,
}

impl Cell {
    fn heard(&self) -> Heard {
        Heard {
            acknowledged: self.acknowledged.load(Ordering::Relaxed),
            closed: self.closed.load(Ordering::Relaxed),
        }
    }

    /// Puts a connection here; what was heard of another one that was, if it was.
    pub(super) fn post(&self, entry: AllSent) -> Option<Displaced> {
        let AllSent { flow: number, sent, received, finished, acknowledged, closed, .. } = entry;
        // No name, then what says nothing, then the numbers, then the name: in this order for the compiler and
        // for x86. The kernel's loads have none to pair with.
        let before = self.flow.swap(0, Ordering::AcqRel);
        let displaced = Displaced { flow: before, heard: self.heard() };
        self.acknowledged.store(acknowledged, Ordering::Release);
        self.closed.store(closed, Ordering::Release);
        self.sent.store(sent, Ordering::Release);
        self.received.store(received, Ordering::Release);
        self.finished.store(finished, Ordering::Release);
        // Another worker may have written here meanwhile, and better no entry than half of each. Names are swapped,
        // not stored: so the later of two names has seen the earlier, and with it all numbers that came before it.
        self.flow.swap(number, Ordering::AcqRel);
        let now = [&self.sent, &self.received].map(|field| field.load(Ordering::Relaxed));
        if now != [sent, received] || self.finished.load(Ordering::Relaxed) != finished {
            self.flow.store(0, Ordering::Release);
        }
        (before != 0 && before != number).then_some(displaced)
    }

    /// What was heard of a connection, if it is the one that is here.
    pub(super) fn look(&self, flow: u64) -> Option<Heard> {
        (self.flow.load(Ordering::Acquire) == flow).then(|| self.heard())
    }

    /// Counts a connection that user space begins to hold here, and forgets the SYN that opened it.
    pub(super) fn hold(&self) {
        self.opened.store(0, Ordering::Relaxed);
        self.held.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts it as held no longer.
    pub(super) fn release(&self) {
        self.held.fetch_sub(1, Ordering::AcqRel);
    }

    /// True when the kernel has answered a SYN of the flow with this mark since a connection began here.
    pub(super) fn is_opened(&self, mark: u16) -> bool {
        self.opened.load(Ordering::Relaxed) == mark
    }

    /// Takes a connection away, if it is the one that is here.
    pub(super) fn withdraw(&self, flow: u64) {
        if self.flow.load(Ordering::Relaxed) == flow {
            self.flow.store(0, Ordering::Release);
        }
    }
}
