//! The kernel's side, for tests: the other ends of both rings, over a file mapped twice as the kernel maps
//! its rings into us, so that the two sides share memory but no addresses.

use rustix::net::xdp::{XdpDesc, XdpDescOptions, XdpRingOffset};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;

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
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(len as u64).expect("its length");
    for cursor in [LAYOUT.producer, LAYOUT.consumer] {
        file.write_all_at(&start.to_ne_bytes(), cursor).expect("a cursor");
    }
    let map = || Mapping::shared(file.as_fd(), 0, len).expect("a mapping");
    let producer = Producer::new(map(), &LAYOUT, size).expect("the layout fits");
    let consumer = Consumer::new(map(), &LAYOUT, size).expect("the layout fits");
    (producer, consumer)
}

/// What became of a frame the model was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Queued,
    TooLong,
    NoChunk,
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

/// The seed of a random test: `XDP_IMDS_SEED`, or a new one; printed either way.
pub(super) fn rng() -> fastrand::Rng {
    let seed = match std::env::var("XDP_IMDS_SEED") {
        Ok(text) => text.parse().expect("XDP_IMDS_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("XDP_IMDS_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}
