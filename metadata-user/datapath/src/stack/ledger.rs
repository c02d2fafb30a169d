//! Connections that only wait for acknowledgements: the stack posts them to the kernel programs, and reads what these
//! received.

use metadata_common::cookie::Flow;
use metadata_common::maps::AllSent;

/// What the kernel has received on the stack's behalf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// The acknowledgement number; valid only if it equals the number posted.
    pub acknowledged: u32,
    /// The same number, once the guest's FIN has been answered.
    pub closed: u32,
}

/// A connection whose entry another connection has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Displaced {
    /// The connection's [`Flow::number`].
    pub flow: u64,
    /// What the kernel received for it until then.
    pub heard: Heard,
}

/// A table like the kernel's `ALL_SENT`. Another connection may take an entry at any time, and entries may be late.
///
/// No method may block or fail: segments of connections that are not posted go to user space.
pub trait Ledger {
    /// Records the start of a connection. Until its release, the kernel leaves SYNs and the ends of handshakes with
    /// its entry to the stack.
    fn hold(&mut self, flow: Flow);
    /// Records the end of a connection: withdraws it and ends [`hold`](Self::hold). Called once for each `hold`.
    fn release(&mut self, flow: Flow);
    /// Whether the kernel has answered a SYN of this flow since a connection with its entry started. A SYN of another
    /// flow with the same entry may have overwritten this.
    fn is_opened(&self, flow: Flow) -> bool;
    /// Posts a connection that has sent all its output. [`AllSent::acknowledged`] and [`AllSent::closed`] start with
    /// numbers that mean nothing was received; they must be stored before the other fields. Returns the connection
    /// whose entry it took.
    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<Displaced>;
    /// Reads what the kernel received for a connection; `None` if its entry is empty or holds another connection.
    fn look(&self, flow: Flow) -> Option<Heard>;
    /// Withdraws a connection from the kernel, if it is posted.
    fn withdraw(&mut self, flow: Flow);
}

/// An empty ledger: user space handles every acknowledgement.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLedger;

impl Ledger for NoLedger {
    fn hold(&mut self, _: Flow) {}

    fn release(&mut self, _: Flow) {}

    fn is_opened(&self, _: Flow) -> bool {
        false
    }

    fn post(&mut self, _: Flow, _: AllSent) -> Option<Displaced> {
        None
    }

    fn look(&self, _: Flow) -> Option<Heard> {
        None
    }

    fn withdraw(&mut self, _: Flow) {}
}
