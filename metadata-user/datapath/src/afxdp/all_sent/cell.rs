//! One entry, and the order in which its fields are read and written.
//!
//! A thread model includes this file unchanged, with atomics that try every order the memory model allows.

use super::sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use metadata_common::maps::FIN_ENDS_BOTH_KERNEL;

use super::{AllSent, DisplacedConnection, KernelReceipt};

/// An entry as both sides access it: [`AllSent`] with atomic fields.
#[derive(Debug)]
#[repr(C)]
pub(super) struct AtomicEntry {
    pub(super) flow: AtomicU64,
    pub(super) sent: AtomicU32,
    pub(super) received: AtomicU32,
    pub(super) finished: AtomicU16,
    pub(super) opened: AtomicU16,
    pub(super) held: AtomicU32,
    pub(super) acknowledged: AtomicU32,
    pub(super) closed: AtomicU32,
}

impl AtomicEntry {
    fn heard(&self) -> KernelReceipt {
        KernelReceipt {
            acknowledged: self.acknowledged.load(Ordering::Relaxed),
            closed: self.closed.load(Ordering::Relaxed),
        }
    }

    /// Stores a connection's entry. If it replaces another connection, returns what the kernel received for that one. It
    /// replaces one that the kernel has answered only if that [is idle](metadata_common::maps::AnsweredConnection::is_idle).
    pub(super) fn post(
        &self,
        entry: AllSent,
        is_idle: impl FnOnce(u64) -> bool,
    ) -> Option<DisplacedConnection> {
        let AllSent { flow: number, sent, received, finished, acknowledged, closed, .. } = entry;
        // The kernel hears of the end of its own connection by this entry alone. The stack does without.
        let kernels = self.kernels();
        if kernels != 0 && !is_idle(kernels) {
            return None;
        }
        // Clear the flow, store the numbers that mean nothing was received, store the other numbers, set the flow.
        // Processors keep this order of the stores, but the kernel's loads have no barriers to pair with: arm64 may
        // load the numbers before the flow. The order makes a mix rare; the module says why a mix is harmless.
        let before = self.flow.swap(0, Ordering::AcqRel);
        let displaced = DisplacedConnection { flow: before, heard: self.heard() };
        self.acknowledged.store(acknowledged, Ordering::Release);
        self.closed.store(closed, Ordering::Release);
        self.sent.store(sent, Ordering::Release);
        self.received.store(received, Ordering::Release);
        self.finished.store(finished, Ordering::Release);
        // Another worker may have written here meanwhile, and no entry is better than a mix of both. The flow is
        // swapped rather than stored. The later of two swaps therefore sees the earlier, and with it all numbers
        // stored before it.
        self.flow.swap(number, Ordering::AcqRel);
        let now = [&self.sent, &self.received].map(|field| field.load(Ordering::Relaxed));
        if now != [sent, received] || self.finished.load(Ordering::Relaxed) != finished {
            self.flow.store(0, Ordering::Release);
        }
        (before != 0 && before != number).then_some(displaced)
    }

    /// What the kernel received for a connection, if the entry holds it.
    pub(super) fn look(&self, flow: u64) -> Option<KernelReceipt> {
        (self.flow.load(Ordering::Acquire) == flow).then(|| self.heard())
    }

    /// Counts a connection that user space holds with this entry, and forgets the SYN that opened it.
    pub(super) fn hold(&self) {
        self.opened.store(0, Ordering::Relaxed);
        self.held.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one held connection less.
    pub(super) fn release(&self) {
        self.held.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether the kernel has answered a SYN of the flow with this mark since the last connection with this entry
    /// started.
    pub(super) fn is_opened(&self, mark: u16) -> bool {
        self.opened.load(Ordering::Relaxed) == mark
    }

    /// The connection that the kernel has answered and that is not over; 0 if there is none.
    pub(super) fn kernels(&self) -> u64 {
        let flow = self.flow.load(Ordering::Acquire);
        let is_kernels = self.finished.load(Ordering::Relaxed) == FIN_ENDS_BOTH_KERNEL
            && self.closed.load(Ordering::Relaxed) != self.sent.load(Ordering::Relaxed);
        if is_kernels { flow } else { 0 }
    }

    /// Clears the entry, if it holds this connection.
    pub(super) fn withdraw(&self, flow: u64) {
        if self.flow.load(Ordering::Relaxed) == flow {
            self.flow.store(0, Ordering::Release);
        }
    }
}
