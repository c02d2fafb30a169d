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
//! value that cannot be copied. The caller sees its octets only during one closure call. After that the frame returns
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
mod error;
mod queues;
mod receiver;
mod ring;
mod socket;
mod sys;
mod umem;

#[cfg(any(test, feature = "model"))]
pub mod model;

pub use all_sent::AllSentTable;
pub use error::AfxdpError;
pub use queues::{MIN_QUEUE_RING, Queues};
pub use socket::{HEADROOM, MAX_RX_RING, MIN_RX_RING, Socket, SocketConfig, SocketStats};
