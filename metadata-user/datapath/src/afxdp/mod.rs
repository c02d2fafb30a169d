//! AF_XDP receive: frames an XDP program redirected to us, in memory the kernel and we share.
//!
//! # The tour
//!
//! One region of memory, the UMEM, is cut into chunks of 4 KiB. Chunks go round:
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
//! **Who owns a chunk when.** From the moment its address is pushed onto the fill ring until its descriptor
//! is popped off the RX ring a chunk is the kernel's, and no reference into it exists. After that it is ours
//! and is a `Frame`, a value that cannot be copied; the caller sees its octets only for the length of one
//! closure call; then the frame goes to the pool and the fill ring. Every chunk is in exactly one of pool,
//! fill ring, kernel, RX ring, lent: `receiver/tests.rs` checks that law under random traffic.
//!
//! **We only receive.** Answers leave by one `write(2)` per frame on the hub tap (`link`), which measured
//! about half the cost of an AF_XDP transmit ring on a veth. So there is no TX ring; the completion ring
//! exists only because `bind(2)` insists and is never mapped.
//!
//! **What the kernel will not do.**
//! - Tell us about loss: a frame that finds the RX ring full, no chunk, or a chunk too small is gone, and only
//!   a counter moves ([`SocketStats`]). Frames longer than a chunk less [`HEADROOM`] are of the last kind.
//! - Check the frame: sender and length are those of the wire; checksums may be partial (virtio offload).
//! - Report a vanished device: after its interface is deleted a socket is merely silent. Watch rtnetlink.
//! - Let go of a queue at `close(2)`: that takes until the ring mappings are gone and 12–24 ms more, so
//!   [`Socket`] unmaps first and [`Socket::bind`] tries again for a bounded time.
//! - Wake us early: a sleeping reader adds some 50 µs to a lone request; `worker` polls adaptively.
//!
//! **Why not a crate.** The ring protocol is the heart of the data path, and three properties are wanted of it
//! at once that were not found together: descriptors validated in release builds, ownership of frames
//! enforced by types and a table rather than by promise, and rings that run without a kernel in tests. System
//! calls, constants and ABI structs do come from a crate, `rustix`.
//!
//! # Files
//!
//! `sys` maps memory, `ring` is one ring, `umem` the chunks and their owners, `receiver` joins them, `socket`
//! sets up and binds, `queues` reads the sockets of a device's queues as one. `all_sent` is no socket's, but memory shared with the kernel as well: what it says of
//! connections. Only `sys`, `ring`, `umem` and `all_sent` contain unsafe code.
//!
//! Reading list: Linux `Documentation/networking/af_xdp.rst`
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
