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
pub mod mtu;
pub mod sandbox;
pub mod stack;
pub mod worker;
