//! The kernel's side, for tests and fuzzers: the other ends of both rings, over memory of this process alone.
//!
//! No kernel is asked for anything, so Miri can follow every access, and a fuzzer makes a rig in microseconds.

use rustix::net::xdp::{XdpDesc, XdpDescOptions, XdpRingOffset};
use std::sync::atomic::Ordering;

use super::receiver::Receiver;
use super::ring::{Cell, Consumer, Producer, bytes};
use super::socket::HEADROOM;
use super::sys::Mapping;
use super::umem::Umem;

/// Cursors on cache lines of their own, cells after them, as `struct xdp_ring` has it.
pub(super) const LAYOUT: XdpRingOffset =
    XdpRingOffset { producer: 0, consumer: 128, desc: 320, flags: Some(192) };

/// Both ends of one ring whose cursors stand at `start`.
pub(super) fn ring<T: Cell>(size: u32, start: u32) -> (Producer<T>, Consumer<T>) {
    let len = bytes::<T>(&LAYOUT, size).expect("a small ring");
    let [ours, theirs] = Mapping::plain(len);
    for offset in [LAYOUT.producer, LAYOUT.consumer] {
        ours.cursor(offset).expect("a cursor inside").store(start, Ordering::Relaxed);
    }
    let producer = Producer::new(ours, &LAYOUT, size).expect("the layout fits");
    let consumer = Consumer::new(theirs, &LAYOUT, size).expect("the layout fits");
    (producer, consumer)
}

/// What became of a frame the model was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It waits in the RX ring.
    Queued,
    /// No chunk is long enough.
    TooLong,
    /// No chunk was free.
    NoChunk,
    /// A chunk was, but the RX ring was full.
    RingFull,
}

/// Delivers frames as `xsk_rcv` and `xsk_flush` do in copy mode.
#[derive(Debug)]
pub(super) struct ModelKernel {
    pub(super) fill: Consumer<u64>,
    pub(super) rx: Producer<XdpDesc>,
    /// Chunks taken from the fill ring for a frame that then found the RX ring full.
    pub(super) list: Vec<u64>,
    pub(super) chunk_size: u32,
}

impl ModelKernel {
    pub(super) fn deliver(&mut self, umem: &mut Umem, octets: &[u8]) -> Fate {
        if octets.len() > (self.chunk_size - HEADROOM) as usize {
            return Fate::TooLong;
        }
        let Some(chunk) = self.list.pop().or_else(|| self.fill.pop()) else { return Fate::NoChunk };
        self.fill.release();
        let addr = chunk + u64::from(HEADROOM);
        umem.write_as_kernel(addr, octets);
        let len = u32::try_from(octets.len()).expect("a frame");
        if !self.rx.push(XdpDesc { addr, len, options: XdpDescOptions::empty() }) {
            self.list.push(chunk);
            return Fate::RingFull;
        }
        self.rx.publish();
        Fate::Queued
    }
}

/// A receiver and the kernel at the other ends of its rings.
#[derive(Debug)]
pub struct Rig {
    pub(super) receiver: Receiver,
    pub(super) kernel: ModelKernel,
    chunks: u32,
}

impl Rig {
    /// A receiver with `chunks` chunks of `chunk_size` octets, all on their way to the kernel, and an RX ring of
    /// `rx_ring` places, a power of two. The cursors of both rings stand at `start`.
    ///
    /// # Panics
    /// When there is no such receiver: no chunk, a chunk without room for a frame, or another ring size.
    #[must_use]
    pub fn new(chunks: u32, chunk_size: u32, rx_ring: u32, start: u32) -> Self {
        assert!(chunks > 0 && chunk_size > HEADROOM, "{chunks} chunks of {chunk_size} octets");
        let (fill, kernel_fill) = ring(chunks.next_power_of_two(), start);
        let (kernel_rx, rx) = ring(rx_ring, start);
        let (umem, frames) = Umem::new(chunks, chunk_size).expect("a small region");
        let receiver = Receiver::new(umem, frames, fill, rx);
        let kernel = ModelKernel { fill: kernel_fill, rx: kernel_rx, list: Vec::new(), chunk_size };
        Self { receiver, kernel, chunks }
    }

    /// A frame comes from the wire.
    pub fn deliver(&mut self, octets: &[u8]) -> Fate {
        self.kernel.deliver(self.receiver.umem(), octets)
    }

    /// A descriptor comes that no kernel should send. False: the RX ring is full.
    pub fn deliver_descriptor(&mut self, addr: u64, len: u32) -> bool {
        let pushed = self.kernel.rx.push(XdpDesc { addr, len, options: XdpDescOptions::empty() });
        self.kernel.rx.publish();
        pushed
    }

    /// Lends up to `max` frames to `f`, as a socket does; returns how many.
    pub fn receive(&mut self, max: usize, f: impl FnMut(&[u8])) -> usize {
        self.receiver.receive(max, f)
    }

    /// Frames lent so far, octets in them, and descriptors that were no good.
    #[must_use]
    pub fn received(&self) -> (u64, u64, u64) {
        let received = self.receiver.received();
        (received.frames, received.bytes, received.bad_descriptors)
    }

    /// Where every chunk is: in the fill ring, on the kernel's own list, in the RX ring, in the pool. Between
    /// calls none is lent.
    #[must_use]
    pub fn places(&self) -> [usize; 4] {
        let (pool, _, waiting) = self.receiver.chunks();
        [self.kernel.fill.pending().len(), self.kernel.list.len(), waiting.len(), pool]
    }

    /// Asserts the law, where the kernel has sent no descriptor it should not: every chunk is in exactly one
    /// place, and the table of holders agrees.
    ///
    /// # Panics
    /// When it does not hold.
    pub fn assert_conserved(&self) {
        let chunk_of = |addr: u64| u32::try_from(addr / u64::from(self.kernel.chunk_size)).expect("a chunk");
        let (pool, with_kernel, waiting) = self.receiver.chunks();
        let fill = self.kernel.fill.pending();
        let mut held: Vec<u32> =
            fill.into_iter().chain(self.kernel.list.iter().copied()).chain(waiting).map(chunk_of).collect();
        held.sort_unstable();
        assert_eq!(held, with_kernel, "chunks of the kernel's");
        assert_eq!(held.len() + pool, self.chunks as usize, "chunks in all");
    }
}

/// The seed of a random test: `XDP_IMDS_SEED`, or a new one; printed either way.
#[cfg(test)]
pub(super) fn rng() -> fastrand::Rng {
    let seed = match std::env::var("XDP_IMDS_SEED") {
        Ok(text) => text.parse().expect("XDP_IMDS_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("XDP_IMDS_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// So many rounds of a random test, a hundredth under Miri, which takes some thousand times as long.
#[cfg(test)]
pub(super) const fn rounds(usual: u32) -> u32 {
    if cfg!(miri) { usual.div_ceil(100) } else { usual }
}
