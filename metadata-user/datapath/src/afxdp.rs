//! Receives over AF_XDP: an XDP program redirects frames into memory shared with the kernel.
//!
//! # Overview
//!
//! One region of memory, the UMEM, is divided into chunks of 4 KiB, which circulate:
//!
//! ```text
//!            ┌───────────────────── user space ─────────────────────┐
//!            │   pool ◄───────────────────────────────── lent       │
//!            │    │ refill                     to a closure ▲       │
//!            └────┼──────────────────────────────────────────┼──────┘
//!          push(B)▼                                          │pop(C)
//!          ┌─────────────┐                            ┌─────────────┐
//!          │  fill ring  │ addresses      descriptors │   RX ring   │
//!          └──────┬──────┘                            └──────▲──────┘
//!                 │             ┌──────── kernel ────────┐   │
//!                 └────────────►│ takes a chunk, copies  ├───┘
//!                               │ one frame into it      │
//!      veth ── XDP `socket` ───►│ (bpf_redirect_map)     │
//!                               └────────────────────────┘
//! ```
//!
//! **Who owns a chunk.** The kernel owns a chunk from the push of its address onto the fill ring until the pop of its
//! descriptor from the RX ring. During that time no reference into the chunk exists. Then we own it as a `Frame`, a
//! value that cannot be copied. The caller sees its bytes only during one closure call. After that the frame returns
//! to the pool and the fill ring. Every chunk is in exactly one place: pool, fill ring, kernel, RX ring or lent.
//! `receiver/tests.rs` checks this under random traffic.
//!
//! **Receive only.** Answers leave with one `write(2)` per frame on the hub tap (`link`). On a veth this cost about
//! half as much as an AF_XDP transmit ring. So there is no TX ring. The completion ring exists only because `bind(2)`
//! requires it, and is never mapped.
//!
//! **Limits of the kernel.**
//! - It does not report loss. A frame is dropped if the RX ring is full, no chunk is free or the chunk is too small,
//!   and only a counter changes ([`SocketStats`]). Frames longer than a chunk less [`HEADROOM`] are too long.
//! - It does not check the frame: sender and length are as on the wire, and checksums may be partial (virtio
//!   offload).
//! - It does not report a removed device: once the interface is deleted, no more frames arrive. Watch rtnetlink.
//! - It does not release a queue at `close(2)`, but only 12–24 ms after the ring mappings are gone. [`Socket`]
//!   therefore unmaps first, and [`Socket::bind`] retries for a limited time.
//! - It does not wake a reader early: a sleeping reader adds about 50 µs to a single request, so `worker` polls
//!   adaptively.
//!
//! **Why not a crate.** The ring protocol is the core of the data path. No existing crate had all three required
//! properties: descriptors validated in release builds, ownership of frames enforced by types and a table rather than
//! by convention, and rings that run without a kernel in tests. System calls, constants and ABI structs come from the
//! crate `rustix`.
//!
//! # Files
//!
//! `sys` maps memory, `ring` is one ring, `umem` holds the chunks and their owners, and `receiver` joins them.
//! `socket` sets up and binds, and `queues` reads the sockets of all queues of a device as one. `all_sent` belongs to
//! no socket, but is also memory shared with the kernel: the state of connections. Only `sys`, `ring`, `umem` and
//! `all_sent` contain unsafe code.
//!
//! References: Linux `Documentation/networking/af_xdp.rst`
//! (<https://docs.kernel.org/networking/af_xdp.html>), `net/xdp/xsk.c`, `net/xdp/xsk_queue.h`.

mod all_sent;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod ring;
mod socket;
mod sys;
mod umem;

pub use all_sent::AllSentTable;
pub use ring::{MIN_QUEUE_RING, Queues};
pub use socket::{HEADROOM, MAX_RX_RING, MIN_RX_RING, Socket, SocketConfig, SocketStats};

use rustix::io::Errno;
use std::time::Duration;

// Why a socket could not be set up. After set-up nothing in this module fails: bad input is counted.

/// Why a socket could not be opened, sized or bound.
#[derive(Debug, thiserror::Error)]
pub enum AfxdpError {
    /// A size in [`SocketConfig`] that the kernel or this module does not support.
    #[error("expected {what} to be {expected}, found {found}: correct the socket's configuration")]
    Size {
        /// The field of the configuration.
        what: &'static str,
        /// The valid values.
        expected: &'static str,
        /// The configured value.
        found: u32,
    },
    /// `socket(2)` failed: a missing privilege, or a kernel without AF_XDP.
    #[error("cannot open an AF_XDP socket: {0}; it needs CAP_NET_RAW and a kernel with CONFIG_XDP_SOCKETS=y")]
    Open(Errno),
    /// The frame memory could not be mapped or pinned.
    #[error(
        "cannot give the kernel {bytes} bytes of frame memory: {source}; grant CAP_IPC_LOCK, raise the limit \
         on locked memory (LimitMEMLOCK=), or configure fewer chunks"
    )]
    Memory {
        /// Size of the region in bytes.
        bytes: usize,
        /// The kernel's error.
        source: Errno,
    },
    /// A step of the set-up between opening and binding failed.
    #[error("AF_XDP set-up failed at {step}: {source}; is this kernel's AF_XDP older than that?")]
    Setup {
        /// The kernel's name of the option or mapping.
        step: &'static str,
        /// The kernel's error.
        source: Errno,
    },
    /// The kernel's layout of a ring does not fit the memory it mapped for it.
    #[error("the kernel's layout of the {ring} ring does not fit its mapping: report this with `uname -a`")]
    Layout {
        /// The ring's name.
        ring: &'static str,
    },
    /// Another socket owns the queue, or owned it until now and the kernel has not released it yet.
    #[error(
        "queue {queue} of interface {ifindex} still belongs to another AF_XDP socket after {waited:?}: stop \
         the other holder (`ss --xdp` names it)"
    )]
    Busy {
        /// The interface's index.
        ifindex: u32,
        /// The receive queue.
        queue: u32,
        /// How long the bind was retried.
        waited: Duration,
    },
    /// `bind(2)` failed for another reason.
    #[error(
        "cannot bind to queue {queue} of interface {ifindex}: {source}; expected an interface of this \
         namespace that has this receive queue"
    )]
    Bind {
        /// The interface's index.
        ifindex: u32,
        /// The receive queue.
        queue: u32,
        /// The kernel's error.
        source: Errno,
    },
    /// The kernel's counters could not be read.
    #[error("cannot read XDP_STATISTICS: {0}; is this kernel's AF_XDP older than that?")]
    Statistics(Errno),
}
