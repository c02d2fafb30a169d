//! The way of a frame: from an AF_XDP ring to a connection of a guest, and back by the hub tap.
//!
//! [`afxdp`] → [`link`] → [`stack`], which speaks TCP and hands connections to a [`stack::Service`]. [`worker`] owns the
//! thread, the clock and the waiting; nothing from `link` inwards knows a file descriptor or reads a clock. [`sandbox`]
//! gives up the system calls and capabilities that a thread does not need.
//!
//! Nothing here knows HTTP, records, aya or an async runtime.

pub mod afxdp;
pub mod link;
pub mod mtu;
pub mod sandbox;
pub mod stack;
pub mod worker;
