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
//! `sys` maps memory and holds the chunks and their owners, and `ring` has the rings and reads the sockets of all
//! queues of a device as one. This file sets a socket up and binds it. `all_sent` belongs to no socket, but is also
//! memory shared with the kernel: the state of connections. Only `sys`, `ring` and `all_sent` contain unsafe code.
//!
//! References: Linux `Documentation/networking/af_xdp.rst`
//! (<https://docs.kernel.org/networking/af_xdp.html>), `net/xdp/xsk.c`, `net/xdp/xsk_queue.h`.

mod all_sent;
mod common_uses;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod ring;
mod sys;

pub use all_sent::{AllSentTable, ForeignConnections};
pub use common_uses::CommonUseTable;
pub use ring::{MIN_QUEUE_RING, Queues};

use ring::{Consumer, Producer, RingCell};
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_xdp_rx_ring_size, set_xdp_umem_completion_ring_size, set_xdp_umem_fill_ring_size, set_xdp_umem_reg,
    xdp_mmap_offsets, xdp_statistics,
};
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_UMEM_PGOFF_FILL_RING, XdpDesc, XdpRingOffset,
    XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use sys::{Mapping, Umem, UmemFrame};

use crate::GROUP;

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
    Open(#[source] Errno),
    /// The frame memory could not be mapped or pinned.
    #[error(
        "cannot give the kernel memory for the frames of a socket: {source}; grant CAP_IPC_LOCK, or lift the limit on \
         locked memory (LimitMEMLOCK=infinity)"
    )]
    Memory {
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
    /// The kernel's layout of a ring does not match the memory it mapped for it.
    #[error("the kernel's layout of the {ring} ring does not match its mapping: report this with `uname -a`")]
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
    Statistics(#[source] Errno),
}

impl AfxdpError {
    /// True if the kernel did not lock the frame memory for want of CAP_IPC_LOCK. Without it the memory counts against
    /// RLIMIT_MEMLOCK, and beyond that the kernel says ENOBUFS, as for nothing else here (`xdp_umem_account_pages` in
    /// net/xdp/xdp_umem.c).
    #[must_use]
    pub fn is_lock_denied(&self) -> bool {
        matches!(self, Self::Memory { source: Errno::NOBUFS })
    }
}

// An AF_XDP socket: opened, sized, mapped, filled and bound in one call, or not at all.

/// Minimum number of places in the RX ring.
pub const MIN_RX_RING: u32 = 64;
/// Maximum number of places in the RX ring, and of chunks.
pub const MAX_RX_RING: u32 = 1 << 16;
/// Bytes that the kernel keeps free before the frame in each chunk (`XDP_PACKET_HEADROOM`, `linux/bpf.h`).
pub const HEADROOM: u32 = 256;

/// `bind(2)` requires a completion ring even for a socket that only receives (`xsk_validate_queues`,
/// `net/xdp/xsk.c`). One place is the minimum; the ring is never mapped or used.
const COMPLETION_RING: u32 = 1;
/// How often to retry a queue that is still in use, and the pause between attempts: 2 s in total. A closed socket's
/// queue became free after 12–24 ms; on a busy machine it takes longer.
const BIND_ATTEMPTS: u32 = 500;
const BIND_PAUSE: Duration = Duration::from_millis(4);

/// Sizes of a socket. Its memory is `chunks` × `chunk_size` bytes, pinned from the start (32 MiB by default).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketConfig {
    /// Places in the RX ring: frames that can wait for the worker. A power of two from [`MIN_RX_RING`] to
    /// [`MAX_RX_RING`]. A thousand VMs that booted at once overflowed 2,048. Further frames are dropped and counted
    /// as `ring_full`, and the guests retransmit.
    pub rx_ring: u32,
    /// Chunks of frame memory, at least `rx_ring` and at most [`MAX_RX_RING`]. More than `rx_ring` has no benefit:
    /// the caller holds a chunk only while it reads a frame.
    pub chunks: u32,
    /// Bytes in a chunk, 2,048 or 4,096. The kernel drops a frame longer than this less [`HEADROOM`] and counts it
    /// as `dropped`.
    pub chunk_size: u32,
}

impl Default for SocketConfig {
    fn default() -> Self {
        Self { rx_ring: 8_192, chunks: 8_192, chunk_size: 4_096 }
    }
}

impl SocketConfig {
    fn check(&self) -> Result<(), AfxdpError> {
        let refuse = |what, expected, found| Err(AfxdpError::Size { what, expected, found });
        if !(self.rx_ring.is_power_of_two() && (MIN_RX_RING..=MAX_RX_RING).contains(&self.rx_ring)) {
            return refuse("rx_ring", "a power of two from 64 to 65536", self.rx_ring);
        }
        if !(self.rx_ring..=MAX_RX_RING).contains(&self.chunks) {
            return refuse("chunks", "from rx_ring to 65536", self.chunks);
        }
        if ![2_048, 4_096].contains(&self.chunk_size) {
            return refuse("chunk_size", "2048 or 4096", self.chunk_size);
        }
        Ok(())
    }

    /// One place per chunk, so that the ring can always take a chunk back.
    fn fill_ring(&self) -> u32 {
        self.chunks.next_power_of_two()
    }
}

/// Counters of one socket since it was bound. The socket lost `dropped` + `ring_full` frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketStats {
    /// Frames lent to the caller.
    pub frames: u64,
    /// Bytes in the lent frames.
    pub bytes: u64,
    /// Descriptors from the kernel that failed validation. A value other than 0 is a kernel bug: please report it.
    pub bad_descriptors: u64,
    /// `rx_dropped`: frames too long for a chunk, or that arrived while the fill ring was empty.
    pub dropped: u64,
    /// `rx_ring_full`: frames that arrived while the RX ring was full. The worker is too slow or the ring too small.
    pub ring_full: u64,
    /// `rx_fill_ring_empty_descs`: times the kernel found no chunk; these frames are also in `dropped`.
    pub fill_ring_empty: u64,
    /// `rx_invalid_descs`: addresses in the fill ring that the kernel refused. A value other than 0 is a bug in this
    /// module.
    pub invalid_fill: u64,
}

impl SocketStats {
    /// The sums of two sockets' counters.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            frames: self.frames.wrapping_add(other.frames),
            bytes: self.bytes.wrapping_add(other.bytes),
            bad_descriptors: self.bad_descriptors.wrapping_add(other.bad_descriptors),
            dropped: self.dropped.wrapping_add(other.dropped),
            ring_full: self.ring_full.wrapping_add(other.ring_full),
            fill_ring_empty: self.fill_ring_empty.wrapping_add(other.fill_ring_empty),
            invalid_fill: self.invalid_fill.wrapping_add(other.invalid_fill),
        }
    }
}

/// A bound AF_XDP socket for receiving.
#[derive(Debug)]
pub struct Socket {
    // Fields drop in this order. A ring mapping keeps the socket open after `close(2)`, so the rings are unmapped
    // first; then closing releases the queue.
    receiver: Receiver,
    fd: OwnedFd,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace on receive queue `queue` of interface `ifindex`. It
    /// uses copy mode, the only mode a veth offers. Frames arrive once an XDP program on that interface redirects
    /// them to an XSKMAP entry with this socket.
    ///
    /// If another socket has just released the queue, this waits for it for at most 2 s.
    ///
    /// It needs CAP_NET_RAW to open the socket, CAP_IPC_LOCK (or a limit on locked memory of `chunks` × `chunk_size`)
    /// to pin the memory, and a kernel whose AF_XDP has the options set here.
    ///
    /// # Errors
    /// [`AfxdpError`], by the step that failed; no socket or memory remains.
    pub fn bind(ifindex: u32, queue: u32, config: &SocketConfig) -> Result<Self, AfxdpError> {
        config.check()?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(AddressFamily::XDP, SocketType::RAW, flags, None).map_err(AfxdpError::Open)?;
        let memory = |source| AfxdpError::Memory { source };
        let (umem, frames) = Umem::new(config.chunks, config.chunk_size).map_err(memory)?;
        register(fd.as_fd(), &umem, config.chunk_size).map_err(memory)?;
        let (fill, rx) = rings(fd.as_fd(), config)?;
        // The fill ring is filled before the first frame can arrive.
        let receiver = Receiver::new(umem, frames, fill, rx);
        let socket = Self { receiver, fd };
        socket.claim(ifindex, queue)?;
        Ok(socket)
    }

    /// Binds, and waits for a previous owner to release the queue. A failed `bind(2)` leaves the socket unchanged.
    fn claim(&self, ifindex: u32, queue: u32) -> Result<(), AfxdpError> {
        // No XDP_USE_NEED_WAKEUP: in copy mode the kernel reads the fill ring without a wake-up and clears the flag
        // only for transmit (`net/xdp/xsk.c`), so it would save nothing here.
        let address = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_COPY, ifindex, queue);
        let begun = Instant::now();
        for _ in 0..BIND_ATTEMPTS {
            match bind(&self.fd, &address) {
                Ok(()) => return Ok(()),
                Err(Errno::BUSY) => std::thread::sleep(BIND_PAUSE),
                Err(source) => return Err(AfxdpError::Bind { ifindex, queue, source }),
            }
        }
        Err(AfxdpError::Busy { ifindex, queue, waited: begun.elapsed() })
    }

    /// Lends up to `max` received frames to `f`, oldest first, and returns their memory to the kernel; returns how
    /// many it lent. Never blocks.
    pub fn receive(&mut self, max: usize, f: impl FnMut(&[&[u8]])) -> usize {
        self.receiver.receive(max, f)
    }

    /// The counters of this socket and of the kernel; takes one system call.
    ///
    /// # Errors
    /// [`AfxdpError::Statistics`] if the kernel does not provide its counters.
    pub fn stats(&self) -> Result<SocketStats, AfxdpError> {
        let kernel = xdp_statistics(&self.fd).map_err(AfxdpError::Statistics)?;
        let ours = self.receiver.received();
        Ok(SocketStats {
            frames: ours.frames,
            bytes: ours.bytes,
            bad_descriptors: ours.bad_descriptors,
            dropped: kernel.rx_dropped,
            ring_full: kernel.rx_ring_full.unwrap_or(0),
            fill_ring_empty: kernel.rx_fill_ring_empty_descs.unwrap_or(0),
            invalid_fill: kernel.rx_invalid_descs,
        })
    }
}

/// For the XSKMAP, and for `poll(2)`: readable while the RX ring holds frames.
impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn register(fd: BorrowedFd<'_>, umem: &Umem, chunk_size: u32) -> Result<(), Errno> {
    let region = XdpUmemReg {
        addr: umem.address(),
        len: umem.len() as u64,
        chunk_size,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    set_xdp_umem_reg(fd, region)
}

/// Sizes and maps the rings; the kernel allows this only before `bind(2)`.
fn rings(
    fd: BorrowedFd<'_>,
    config: &SocketConfig,
) -> Result<(Producer<u64>, Consumer<XdpDesc>), AfxdpError> {
    let at = |step| move |source| AfxdpError::Setup { step, source };
    let fill_ring = config.fill_ring();
    set_xdp_umem_fill_ring_size(fd, fill_ring).map_err(at("XDP_UMEM_FILL_RING"))?;
    set_xdp_umem_completion_ring_size(fd, COMPLETION_RING).map_err(at("XDP_UMEM_COMPLETION_RING"))?;
    set_xdp_rx_ring_size(fd, config.rx_ring).map_err(at("XDP_RX_RING"))?;
    let layout = xdp_mmap_offsets(fd).map_err(at("XDP_MMAP_OFFSETS"))?;

    let memory = map::<u64>(fd, "fill", &layout.fr, fill_ring, XDP_UMEM_PGOFF_FILL_RING)?;
    let fill = Producer::new(memory, &layout.fr, fill_ring).ok_or(AfxdpError::Layout { ring: "fill" })?;
    let memory = map::<XdpDesc>(fd, "RX", &layout.rx, config.rx_ring, XDP_PGOFF_RX_RING)?;
    let rx = Consumer::new(memory, &layout.rx, config.rx_ring).ok_or(AfxdpError::Layout { ring: "RX" })?;
    Ok((fill, rx))
}

fn map<T: RingCell>(
    fd: BorrowedFd<'_>,
    ring: &'static str,
    layout: &XdpRingOffset,
    size: u32,
    offset: u64,
) -> Result<Mapping, AfxdpError> {
    let len = ring::bytes::<T>(layout, size).ok_or(AfxdpError::Layout { ring })?;
    Mapping::shared(fd, offset, len).map_err(|source| AfxdpError::Setup { step: "mmap of a ring", source })
}

// Circulates frames: pool → fill ring → kernel → RX ring → lent to the caller → pool.
//
// This module uses rings and frame memory but no socket descriptor, so tests can put a model of the kernel at the
// other ends.

/// Counters of received frames on our side of the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReceiveCounters {
    /// Frames lent to the caller.
    frames: u64,
    /// Bytes in the lent frames.
    bytes: u64,
    /// Descriptors with an address that is not a chunk the kernel owns, or with more bytes than a chunk has.
    bad_descriptors: u64,
}

/// The receive side of a socket, without the socket.
#[derive(Debug)]
struct Receiver {
    fill: Producer<u64>,
    rx: Consumer<XdpDesc>,
    /// Chunks that wait for a place in the fill ring. The ring has at least one place per chunk, so the pool is empty
    /// between calls. Its capacity is all chunks, so it never reallocates.
    pool: Vec<UmemFrame>,
    /// The chunks of the frames that are lent; empty between calls.
    group: Vec<UmemFrame>,
    umem: Umem,
    received: ReceiveCounters,
}

impl Receiver {
    /// Starts by giving all `frames` of `umem` to the kernel.
    fn new(umem: Umem, frames: Vec<UmemFrame>, fill: Producer<u64>, rx: Consumer<XdpDesc>) -> Self {
        let mut receiver = Self {
            fill,
            rx,
            pool: frames,
            group: Vec::with_capacity(GROUP),
            umem,
            received: ReceiveCounters::default(),
        };
        receiver.refill();
        receiver
    }

    /// Lends up to `max` received frames to `f`, in groups of at most [`GROUP`] and oldest first; returns how many.
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let (mut taken, mut lent) = (0, 0);
        while taken < max {
            let group = GROUP.min(max - taken);
            let popped = self.take(group);
            if popped == 0 {
                break;
            }
            taken += popped;
            lent += self.lend(&mut f);
            self.pool.append(&mut self.group);
        }
        if taken > 0 {
            self.rx.release();
            self.refill();
        }
        self.received.frames += lent as u64;
        lent
    }

    /// Takes up to `most` descriptors from the RX ring; adds their chunks to the group. Returns how many it took.
    fn take(&mut self, most: usize) -> usize {
        for taken in 0..most {
            let Some(descriptor) = self.rx.pop() else { return taken };
            match self.umem.take(descriptor) {
                Some(frame) => self.group.push(frame),
                None => self.received.bad_descriptors += 1,
            }
        }
        most
    }

    /// Lends the group's frames to `f`; returns how many.
    fn lend(&mut self, f: &mut impl FnMut(&[&[u8]])) -> usize {
        let mut lent: [&[u8]; GROUP] = [&[]; GROUP];
        let mut count = 0;
        for frame in &self.group {
            match self.umem.bytes(frame) {
                Some(bytes) => {
                    lent[count] = bytes;
                    count += 1;
                    self.received.bytes += bytes.len() as u64;
                }
                None => self.received.bad_descriptors += 1,
            }
        }
        if count > 0 {
            f(&lent[..count]);
        }
        count
    }

    /// Gives the kernel as many chunks as the fill ring has places.
    fn refill(&mut self) {
        while self.fill.free() > 0
            && let Some(frame) = self.pool.pop()
        {
            let pushed = self.fill.push(self.umem.give(frame));
            debug_assert!(pushed, "a place was free");
        }
        self.fill.publish();
    }

    fn received(&self) -> ReceiveCounters {
        self.received
    }

    /// Chunks in the pool, chunks that the table assigns to the kernel, and chunks in the RX ring.
    #[cfg(any(test, feature = "model"))]
    fn chunks(&self) -> (usize, Vec<u32>, Vec<u64>) {
        let waiting = self.rx.pending().iter().map(|descriptor| descriptor.addr).collect();
        (self.pool.len(), self.umem.with_kernel().collect(), waiting)
    }

    /// The frame memory, for the kernel's side to write to.
    #[cfg(any(test, feature = "model"))]
    fn umem(&mut self) -> &mut Umem {
        &mut self.umem
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::xdp::{XdpDesc, XdpDescOptions};
    use std::collections::VecDeque;

    use super::model::{FrameFate, ModelRig, rng, rounds};
    use super::{AfxdpError, Socket, SocketConfig};
    use crate::GROUP;

    const CHUNK: u32 = 2048;
    /// Just below the wrap, so that every test crosses it.
    const START: u32 = u32::MAX - 5;

    /// A receiver with `chunks` chunks and an RX ring of `rx_ring` places, with a model kernel at the other end.
    fn rig(chunks: u32, rx_ring: u32) -> ModelRig {
        ModelRig::new(chunks, CHUNK, rx_ring, START)
    }

    #[test]
    fn at_the_start_the_kernel_owns_every_chunk() {
        for chunks in [1, 5, 64, 100] {
            let rig = rig(chunks, 64);
            assert_eq!(rig.kernel.fill.pending().len(), chunks as usize);
            assert!(rig.receiver.pool.is_empty());
            rig.assert_conserved();
        }
    }

    #[test]
    fn random_traffic_keeps_every_chunk_in_one_place_and_every_frame_once() {
        let mut rng = rng();
        for _ in 0..rounds(60) {
            let (chunks, rx_ring) = (rng.u32(1..40), 1 << rng.u32(0..6));
            let mut rig = rig(chunks, rx_ring);
            let mut in_flight = VecDeque::new();
            for _ in 0..rounds(300) {
                if rng.bool() {
                    let mut bytes = vec![0; rng.usize(1..2_000)];
                    rng.fill(&mut bytes);
                    let fate = rig.deliver(&bytes);
                    let expected = match () {
                        () if bytes.len() > 1_792 => FrameFate::TooLong,
                        () if in_flight.len() == chunks as usize => FrameFate::NoChunk,
                        () if in_flight.len() == rx_ring as usize => FrameFate::RingFull,
                        () => FrameFate::Queued,
                    };
                    assert_eq!(fate, expected);
                    if fate == FrameFate::Queued {
                        in_flight.push_back(bytes);
                    }
                } else {
                    let max = rng.usize(0..3 * GROUP);
                    let expected = max.min(in_flight.len());
                    let lent = rig.receive(max, |group| {
                        assert!((1..=GROUP).contains(&group.len()));
                        for frame in group {
                            assert_eq!(Some(*frame), in_flight.pop_front().as_deref());
                        }
                    });
                    assert_eq!(lent, expected);
                }
                rig.assert_conserved();
            }
            assert_eq!(rig.receiver.received().bad_descriptors, 0);
        }
    }

    #[test]
    fn at_most_the_requested_number_of_frames_is_lent() {
        let mut rig = rig(8, 8);
        for _ in 0..8 {
            assert_eq!(rig.deliver(&[1; 60]), FrameFate::Queued);
        }
        assert_eq!(rig.receive(5, |_| ()), 5);
        assert_eq!(rig.receive(5, |_| ()), 3);
        assert_eq!(rig.receive(5, |_| ()), 0);
        assert_eq!((rig.receiver.received().frames, rig.receiver.received().bytes), (8, 480));
    }

    #[test]
    fn bad_descriptors_are_counted_and_affect_no_other_frame() {
        let mut rig = rig(4, 64);
        let foreign = [4 * u64::from(CHUNK), 1 << 40, u64::MAX];
        for addr in foreign {
            assert!(rig.kernel.rx.push(XdpDesc { addr, len: 60, options: XdpDescOptions::empty() }));
        }
        // A chunk that the kernel owns, with a length that reaches into the next one.
        let chunk = rig.kernel.fill.pop().expect("a chunk");
        rig.kernel.fill.release();
        assert!(rig.kernel.rx.push(XdpDesc {
            addr: chunk + 256,
            len: 1_793,
            options: XdpDescOptions::empty()
        }));
        assert_eq!(rig.deliver(b"a good frame"), FrameFate::Queued);

        let mut seen = Vec::new();
        assert_eq!(rig.receive(64, |group| seen.extend(group.iter().map(|frame| frame.to_vec()))), 1);
        assert_eq!(seen, [b"a good frame"]);
        assert_eq!(rig.receiver.received().bad_descriptors, 4);
        rig.assert_conserved();
    }

    #[test]
    fn a_descriptor_delivered_twice_is_lent_once() {
        let mut rig = rig(4, 64);
        let chunk = rig.kernel.fill.pop().expect("a chunk");
        rig.kernel.fill.release();
        for _ in 0..2 {
            assert!(rig.kernel.rx.push(XdpDesc { addr: chunk, len: 60, options: XdpDescOptions::empty() }));
        }
        rig.kernel.rx.publish();
        assert_eq!(rig.receive(64, |_| ()), 1);
        assert_eq!(rig.receiver.received().bad_descriptors, 1);
        rig.assert_conserved();
    }

    #[test]
    fn bad_descriptors_count_towards_the_batch() {
        let mut rig = rig(4, 64);
        for _ in 0..10 {
            assert!(rig.kernel.rx.push(XdpDesc {
                addr: u64::MAX,
                len: 60,
                options: XdpDescOptions::empty()
            }));
        }
        rig.kernel.rx.publish();
        assert_eq!(rig.receive(3, |_| ()), 0);
        assert_eq!(rig.receiver.received().bad_descriptors, 3);
    }

    #[test]
    fn sizes_out_of_range_are_refused_before_a_socket_is_opened() {
        let fine = SocketConfig::default();
        for (config, field) in [
            (SocketConfig { rx_ring: 0, ..fine }, "rx_ring"),
            (SocketConfig { rx_ring: 32, ..fine }, "rx_ring"),
            (SocketConfig { rx_ring: 1_000, ..fine }, "rx_ring"),
            (SocketConfig { rx_ring: 1 << 17, ..fine }, "rx_ring"),
            (SocketConfig { chunks: fine.rx_ring - 1, ..fine }, "chunks"),
            (SocketConfig { chunks: u32::MAX, ..fine }, "chunks"),
            (SocketConfig { chunk_size: 0, ..fine }, "chunk_size"),
            (SocketConfig { chunk_size: 8_192, ..fine }, "chunk_size"),
        ] {
            let refused = Socket::bind(0, 0, &config).expect_err("a refusal");
            assert!(
                matches!(refused, AfxdpError::Size { what, .. } if what == field),
                "{config:?}: {refused}"
            );
        }
        assert!(fine.check().is_ok());
    }
}
