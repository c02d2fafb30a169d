//! The kernel's side for tests and fuzzers: the other ends of both rings, in process memory.
//!
//! It makes no system calls, so Miri can check every access, and a fuzzer can create a rig in microseconds.

use rustix::net::xdp::{XdpDesc, XdpDescOptions, XdpRingOffset};
use std::sync::atomic::Ordering;

use super::HEADROOM;
use super::Receiver;
use super::ring::{Consumer, Producer, RingCell, bytes};
use super::sys::Mapping;
use super::sys::Umem;

/// Each cursor on its own cache line and the cells after them, like `struct xdp_ring`.
pub(super) const LAYOUT: XdpRingOffset =
    XdpRingOffset { producer: 0, consumer: 128, desc: 320, flags: Some(192) };

/// Both ends of one ring, with both cursors at `start`.
pub(super) fn ring<T: RingCell>(size: u32, start: u32) -> (Producer<T>, Consumer<T>) {
    let len = bytes::<T>(&LAYOUT, size).expect("a small ring");
    let [ours, theirs] = Mapping::plain(len);
    for offset in [LAYOUT.producer, LAYOUT.consumer] {
        ours.cursor(offset).expect("a cursor inside").store(start, Ordering::Relaxed);
    }
    let producer = Producer::new(ours, &LAYOUT, size).expect("the layout fits");
    let consumer = Consumer::new(theirs, &LAYOUT, size).expect("the layout fits");
    (producer, consumer)
}

/// What happened to a frame delivered to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFate {
    /// The frame waits in the RX ring.
    Queued,
    /// The frame is too long for a chunk.
    TooLong,
    /// No chunk was free.
    NoChunk,
    /// A chunk was free, but the RX ring was full.
    RingFull,
}

/// Delivers frames like `xsk_rcv` and `xsk_flush` in copy mode.
#[derive(Debug)]
pub(super) struct ModelKernel {
    pub(super) fill: Consumer<u64>,
    pub(super) rx: Producer<XdpDesc>,
    /// Chunks taken from the fill ring for frames that then did not fit the RX ring.
    pub(super) list: Vec<u64>,
    pub(super) chunk_size: u32,
}

impl ModelKernel {
    pub(super) fn deliver(&mut self, umem: &mut Umem, bytes: &[u8]) -> FrameFate {
        if bytes.len() > (self.chunk_size - HEADROOM) as usize {
            return FrameFate::TooLong;
        }
        let Some(chunk) = self.list.pop().or_else(|| self.fill.pop()) else { return FrameFate::NoChunk };
        self.fill.release();
        let addr = chunk + u64::from(HEADROOM);
        umem.write_as_kernel(addr, bytes);
        let len = u32::try_from(bytes.len()).expect("a frame");
        if !self.rx.push(XdpDesc { addr, len, options: XdpDescOptions::empty() }) {
            self.list.push(chunk);
            return FrameFate::RingFull;
        }
        self.rx.publish();
        FrameFate::Queued
    }
}

/// A receiver, and a model kernel at the other ends of its rings.
#[derive(Debug)]
pub struct ModelRig {
    pub(super) receiver: Receiver,
    pub(super) kernel: ModelKernel,
    chunks: u32,
}

impl ModelRig {
    /// Creates a receiver with `chunks` chunks of `chunk_size` bytes, all given to the kernel, and an RX ring of
    /// `rx_ring` places, a power of two. The cursors of both rings start at `start`.
    ///
    /// # Panics
    /// If the sizes are invalid: no chunk, a chunk without room for a frame, or a ring size that is not a power of
    /// two.
    #[must_use]
    pub fn new(chunks: u32, chunk_size: u32, rx_ring: u32, start: u32) -> Self {
        assert!(chunks > 0 && chunk_size > HEADROOM, "{chunks} chunks of {chunk_size} bytes");
        let (fill, kernel_fill) = ring(chunks.next_power_of_two(), start);
        let (kernel_rx, rx) = ring(rx_ring, start);
        let (umem, frames) = Umem::new(chunks, chunk_size).expect("a small region");
        let receiver = Receiver::new(umem, frames, fill, rx);
        let kernel = ModelKernel { fill: kernel_fill, rx: kernel_rx, list: Vec::new(), chunk_size };
        Self { receiver, kernel, chunks }
    }

    /// Delivers a frame as if from the wire.
    pub fn deliver(&mut self, bytes: &[u8]) -> FrameFate {
        self.kernel.deliver(self.receiver.umem(), bytes)
    }

    /// Delivers a descriptor that no correct kernel would send. Returns false if the RX ring is full.
    pub fn deliver_descriptor(&mut self, addr: u64, len: u32) -> bool {
        let pushed = self.kernel.rx.push(XdpDesc { addr, len, options: XdpDescOptions::empty() });
        self.kernel.rx.publish();
        pushed
    }

    /// Lends up to `max` frames to `f`, like a socket; returns how many.
    pub fn receive(&mut self, max: usize, f: impl FnMut(&[&[u8]])) -> usize {
        self.receiver.receive(max, f)
    }

    /// Frames lent so far, bytes in them, and invalid descriptors.
    #[must_use]
    pub fn received(&self) -> (u64, u64, u64) {
        let received = self.receiver.received();
        (received.frames, received.bytes, received.bad_descriptors)
    }

    /// How many chunks are in the fill ring, on the kernel's own list, in the RX ring and in the pool. Between calls
    /// none is lent.
    #[must_use]
    pub fn places(&self) -> [usize; 4] {
        let (pool, _, waiting) = self.receiver.chunks();
        [self.kernel.fill.pending().len(), self.kernel.list.len(), waiting.len(), pool]
    }

    /// Asserts that every chunk is in exactly one place and that the table of owners agrees. This holds as long as
    /// only valid descriptors were delivered.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn assert_conserved(&self) {
        let chunk_of = |addr: u64| u32::try_from(addr / u64::from(self.kernel.chunk_size)).expect("a chunk");
        let (pool, with_kernel, waiting) = self.receiver.chunks();
        let fill = self.kernel.fill.pending();
        let mut held: Vec<u32> =
            fill.into_iter().chain(self.kernel.list.iter().copied()).chain(waiting).map(chunk_of).collect();
        held.sort_unstable();
        assert_eq!(held, with_kernel, "chunks that the kernel owns");
        assert_eq!(held.len() + pool, self.chunks as usize, "chunks in total");
    }
}

/// The random generator of a test, seeded with `XDP_IMDS_SEED` or a new seed; prints the seed.
#[cfg(test)]
pub(super) fn rng() -> fastrand::Rng {
    let seed = match std::env::var("XDP_IMDS_SEED") {
        Ok(text) => text.parse().expect("XDP_IMDS_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("XDP_IMDS_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// The rounds of a random test: `usual`, or a hundredth of it under Miri, which is about a thousand times slower.
#[cfg(test)]
pub(super) const fn rounds(usual: u32) -> u32 {
    if cfg!(miri) { usual.div_ceil(100) } else { usual }
}
