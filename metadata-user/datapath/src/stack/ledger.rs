//! Where the stack tells the kernel which connections only wait to be acknowledged, and reads what it heard.

use metadata_common::cookie::Flow;
use metadata_common::maps::AllSent;

/// What the kernel has heard in our place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// The acknowledgement number; it says something only where it is the number that was posted.
    pub acknowledged: u32,
    /// The same, once the guest's FIN has been answered.
    pub closed: u32,
}

/// A connection that lost its place in the table to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Displaced {
    /// [`Flow::number`] of the connection.
    pub flow: u64,
    /// What was heard of it until then.
    pub heard: Heard,
}

/// A table like the kernel's `ALL_SENT`: entries may be lost at any time to others, and be late.
///
/// Nothing here may wait or fail: what is not posted goes to user space.
pub trait Ledger {
    /// A connection begins: until it is released the kernel leaves SYNs and ends of handshakes with its place to us.
    fn hold(&mut self, flow: Flow);
    /// A connection is over: withdraws it, and ends what [`hold`](Self::hold) began. Called once for each `hold`.
    fn release(&mut self, flow: Flow);
    /// True when the kernel has answered a SYN of this flow since a connection with its place began. The SYN of
    /// another flow with the same place may have hidden it.
    fn is_opened(&self, flow: Flow) -> bool;
    /// All there is to say on this connection is sent. [`AllSent::acknowledged`] and [`AllSent::closed`] are
    /// numbers that say nothing yet, and are to be in the table before the others. Returns whose place it took.
    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<Displaced>;
    /// What was heard of a connection; `None` when the table holds another or none in its place.
    fn look(&self, flow: Flow) -> Option<Heard>;
    /// Takes the connection out of the kernel's hands, if it is there.
    fn withdraw(&mut self, flow: Flow);
}

/// No table: every acknowledgement comes to user space.
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
