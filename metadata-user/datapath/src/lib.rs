//! The data path: frames travel from an AF_XDP ring to a guest's TCP connection, and back through the hub tap.
//!
//! [`afxdp`] receives frames, [`link`] reads the sender's slot, and [`stack`] terminates TCP and hands each
//! connection to a [`stack::Service`]. [`worker`] owns the thread, the clock and the blocking waits; `link` and
//! `stack` neither read a clock nor wait. [`sandbox`] drops the system calls and capabilities that a thread does not
//! need.
//!
//! This crate does not depend on HTTP, records, aya or an async runtime.

pub mod afxdp;
pub mod link;
pub mod sandbox;
pub mod stack;
pub mod worker;

/// Maximum number of frames in a group. The stack reads ahead what all frames of a group will touch
/// ([`Stack::read_ahead`](stack::Stack::read_ahead)). A CPU has about this many reads under way at once.
pub const GROUP: usize = 16;
