//! Circulates frames: pool → fill ring → kernel → RX ring → lent to the caller → pool.
//!
//! This module uses rings and frame memory but no socket descriptor, so tests can put a model of the kernel at the
//! other ends.

use rustix::net::xdp::XdpDesc;

use super::ring::{Consumer, Producer};
use super::umem::{Frame, Umem};
use crate::GROUP;

/// Counters of received frames on our side of the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Received {
    /// Frames lent to the caller.
    pub(super) frames: u64,
    /// Octets in the lent frames.
    pub(super) bytes: u64,
    /// Descriptors with an address that is not a chunk the kernel owns, or with more octets than a chunk has.
    pub(super) bad_descriptors: u64,
}

/// The receive side of a socket, without the socket.
#[derive(Debug)]
pub(super) struct Receiver {
    fill: Producer<u64>,
    rx: Consumer<XdpDesc>,
    /// Chunks that wait for a place in the fill ring. The ring has at least one place per chunk, so the pool is empty
    /// between calls. Its capacity is all chunks, so it never reallocates.
    pool: Vec<Frame>,
    /// The chunks of the frames that are lent; empty between calls.
    group: Vec<Frame>,
    umem: Umem,
    received: Received,
}

impl Receiver {
    /// Starts by giving all `frames` of `umem` to the kernel.
    pub(super) fn new(umem: Umem, frames: Vec<Frame>, fill: Producer<u64>, rx: Consumer<XdpDesc>) -> Self {
        let mut receiver = Self {
            fill,
            rx,
            pool: frames,
            group: Vec::with_capacity(GROUP),
            umem,
            received: Received::default(),
        };
        receiver.refill();
        receiver
    }

    /// Lends up to `max` received frames to `f`, in groups of at most [`GROUP`] and oldest first; returns how many.
    pub(super) fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
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

    pub(super) fn received(&self) -> Received {
        self.received
    }

    /// Chunks in the pool, chunks that the table assigns to the kernel, and chunks in the RX ring.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn chunks(&self) -> (usize, Vec<u32>, Vec<u64>) {
        let waiting = self.rx.pending().iter().map(|descriptor| descriptor.addr).collect();
        (self.pool.len(), self.umem.with_kernel().collect(), waiting)
    }

    /// The frame memory, for the kernel's side to write to.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn umem(&mut self) -> &mut Umem {
        &mut self.umem
    }
}

#[cfg(test)]
mod tests;
