//! A ring between two sides: the producer writes cells and advances its cursor; the consumer reads them and advances
//! its own. Both cursors are `u32`, run freely and wrap. A cell's index is the cursor modulo the size.
//!
//! The protocol and its barriers are those of `net/xdp/xsk_queue.h`
//! (<https://github.com/torvalds/linux/blob/v6.12/net/xdp/xsk_queue.h#L38-L76>). That file names its four steps A to
//! D, as do the comments below at our half of them:
//!
//! ```text
//!  producer                                  consumer
//!    load consumer   (A)                       load-acquire producer  (C)
//!    store cells                               load cells
//!    store-release producer  (B)               store-release consumer (D)
//! ```
#![expect(unsafe_code, reason = "cells and cursors lie in memory shared with the kernel")]

use rustix::event::epoll;
use rustix::net::xdp::{XdpDesc, XdpRingOffset};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::AfxdpError;
use super::sys::Mapping;
use super::{Socket, SocketConfig, SocketStats};

/// A type that a ring may carry.
///
/// # Safety
/// Every bit pattern must be a valid value: the other side writes cells, and reading one must be sound whatever it
/// holds.
pub(super) unsafe trait RingCell: Copy {}
// SAFETY: an integer.
unsafe impl RingCell for u64 {}
// SAFETY: `repr(C)`, three integers (the third is a bit set that keeps unknown bits), no padding (asserted below).
unsafe impl RingCell for XdpDesc {}
const _: () = assert!(size_of::<XdpDesc>() == 16);

/// The memory of one ring, and the addresses of its parts.
#[derive(Debug)]
struct Ring<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    cells: NonNull<T>,
    size: u32,
    /// Owned so that the three addresses above stay valid.
    _memory: Mapping,
}

// SAFETY: the addresses point into the mapping that this struct owns and moves with. Cells are `Copy` values without
// ties to a thread, and each side's half of the protocol requires `&mut`.
unsafe impl<T: RingCell> Send for Ring<T> {}

impl<T: RingCell> Ring<T> {
    /// `None` unless the whole layout lies inside `memory`, is aligned, and `size` is a power of two.
    fn new(memory: Mapping, layout: &XdpRingOffset, size: u32) -> Option<Self> {
        Some(Self {
            producer: memory.at(layout.producer, 1)?,
            consumer: memory.at(layout.consumer, 1)?,
            cells: memory.at(layout.desc, usize::try_from(size).ok()?)?,
            size: size.is_power_of_two().then_some(size)?,
            _memory: memory,
        })
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: `new` checked that the word is aligned and inside the mapping, which lives as long as `self`. Both
        // sides access it only with atomic operations.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: like `producer`.
        unsafe { self.consumer.as_ref() }
    }

    fn cell(&self, cursor: u32) -> NonNull<T> {
        let index = (cursor & (self.size - 1)) as usize;
        // SAFETY: the index is below `size`, and `new` checked that `size` cells lie inside the mapping.
        unsafe { self.cells.add(index) }
    }

    /// Bytes that a mapping needs for `size` cells in this layout.
    fn bytes(layout: &XdpRingOffset, size: u32) -> Option<usize> {
        let cells = u64::from(size).checked_mul(size_of::<T>() as u64)?;
        usize::try_from(layout.desc.checked_add(cells)?).ok()
    }
}

/// Bytes to map for a ring of `size` cells of `T`; `None` if the layout exceeds the address space.
pub(super) fn bytes<T: RingCell>(layout: &XdpRingOffset, size: u32) -> Option<usize> {
    Ring::<T>::bytes(layout, size)
}

/// The producing half; we produce into the fill ring.
#[derive(Debug)]
pub(super) struct Producer<T> {
    ring: Ring<T>,
    /// Our cursor: the next cell to write. Ahead of the shared cursor by the cells not yet published.
    next: u32,
    /// The consumer's cursor when last read. It only advances, so an old value can only make the ring look fuller.
    consumed: u32,
}

impl<T: RingCell> Producer<T> {
    /// Starts to produce at the current cursors.
    pub(super) fn new(memory: Mapping, layout: &XdpRingOffset, size: u32) -> Option<Self> {
        let ring = Ring::new(memory, layout, size)?;
        // Relaxed: only we write this cursor, so we read our own last store.
        let next = ring.producer().load(Ordering::Relaxed);
        // Acquire: like (A).
        let consumed = ring.consumer().load(Ordering::Acquire);
        Some(Self { ring, next, consumed })
    }

    /// Cells that can be pushed now.
    pub(super) fn free(&mut self) -> u32 {
        let seen = self.seen_free();
        if seen > 0 {
            return seen;
        }
        // (A) Acquire, pairs with the consumer's (D): its reads of the released cells come before our writes. The
        // kernel relies on a control dependency here, which Rust's memory model does not have.
        self.consumed = self.ring.consumer().load(Ordering::Acquire);
        self.seen_free()
    }

    /// At most `size` and never wrapped below 0, even if the other side's cursor is invalid.
    fn seen_free(&self) -> u32 {
        self.ring.size.saturating_sub(self.next.wrapping_sub(self.consumed))
    }

    /// Writes a cell that the consumer does not see before [`publish`](Self::publish). Returns false if the ring is
    /// full.
    #[must_use]
    pub(super) fn push(&mut self, value: T) -> bool {
        if self.free() == 0 {
            return false;
        }
        let cell = self.ring.cell(self.next);
        // SAFETY: `cell` lies inside the mapping. It is ours: `free` saw that the consumer has passed it, and the
        // consumer does not reach it again before `publish`.
        unsafe { cell.write_volatile(value) };
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Makes everything pushed visible to the consumer.
    pub(super) fn publish(&mut self) {
        // (B) Release: the cells' contents are visible before the cursor that covers them.
        self.ring.producer().store(self.next, Ordering::Release);
    }
}

/// The consuming half; we consume from the RX ring.
#[derive(Debug)]
pub(super) struct Consumer<T> {
    ring: Ring<T>,
    /// Our cursor: the next cell to read. Ahead of the shared cursor by the cells not yet released.
    next: u32,
    /// The producer's cursor when last read. It only advances, so an old value can only make the ring look emptier.
    produced: u32,
}

impl<T: RingCell> Consumer<T> {
    /// Starts to consume at the current cursors.
    pub(super) fn new(memory: Mapping, layout: &XdpRingOffset, size: u32) -> Option<Self> {
        let ring = Ring::new(memory, layout, size)?;
        // Relaxed: only we write this cursor, so we read our own last store.
        let next = ring.consumer().load(Ordering::Relaxed);
        // Acquire: like (C).
        let produced = ring.producer().load(Ordering::Acquire);
        Some(Self { ring, next, produced })
    }

    /// Takes the next cell, if there is one. The producer gets its place back with [`release`](Self::release).
    pub(super) fn pop(&mut self) -> Option<T> {
        if self.next == self.produced {
            // (C) Acquire, pairs with the producer's (B): its writes to the cells up to its cursor, and to the frames
            // they name, are visible to us.
            self.produced = self.ring.producer().load(Ordering::Acquire);
        }
        if self.next == self.produced {
            return None;
        }
        let cell = self.ring.cell(self.next);
        // SAFETY: `cell` lies inside the mapping and any bits are a `T`. It is ours: the producer's cursor is past
        // it, and the producer does not return to it before `release`. If a faulty producer does, the result is still
        // sound, because all later decisions depend on this single volatile read.
        let value = unsafe { cell.read_volatile() };
        self.next = self.next.wrapping_add(1);
        Some(value)
    }

    /// Returns the places of all popped cells to the producer.
    pub(super) fn release(&mut self) {
        // (D) Release: our reads of the cells complete before the producer sees them as free.
        self.ring.consumer().store(self.next, Ordering::Release);
    }
}

#[cfg(any(test, feature = "model"))]
impl<T: RingCell> Consumer<T> {
    /// Copies of all cells that the producer has published and we have not popped.
    pub(super) fn pending(&self) -> Vec<T> {
        // Acquire: like (C).
        let produced = self.ring.producer().load(Ordering::Acquire);
        let read = |ahead| {
            let cell = self.ring.cell(self.next.wrapping_add(ahead));
            // SAFETY: like `pop`, for a cell between our cursor and the producer's.
            unsafe { cell.read_volatile() }
        };
        (0..produced.wrapping_sub(self.next).min(self.ring.size)).map(read).collect()
    }
}

// Reads the sockets of all queues of one device as one source.

/// Minimum number of RX ring places per queue if there are several: 8 times the size of the veth's ring in front of
/// it.
pub const MIN_QUEUE_RING: u32 = 2_048;

/// One [`Socket`] for each receive queue of a device.
#[derive(Debug)]
pub struct Queues {
    sockets: Vec<Socket>,
    /// Readable while any of the sockets is readable.
    any: OwnedFd,
    /// The queue to read first. Each call starts with the next one, so that a full queue does not starve the others.
    first: usize,
}

impl Queues {
    /// Binds a socket to each of the `queues` receive queues of an interface, like [`Socket::bind`]. They share the
    /// places of `config`, but each has at least [`MIN_QUEUE_RING`].
    ///
    /// # Errors
    /// [`AfxdpError`], by the step that failed; no socket or memory remains.
    pub fn bind(ifindex: u32, queues: u32, config: &SocketConfig) -> Result<Self, AfxdpError> {
        let each = share(queues, config);
        let any = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(AfxdpError::Open)?;
        let mut sockets = Vec::new();
        for queue in 0..queues.max(1) {
            let socket = Socket::bind(ifindex, queue, &each)?;
            epoll::add(&any, &socket, epoll::EventData::new_u64(queue.into()), epoll::EventFlags::IN)
                .map_err(|source| AfxdpError::Setup { step: "epoll_ctl", source })?;
            sockets.push(socket);
        }
        Ok(Self { sockets, any, first: 0 })
    }

    /// Bytes of frame memory that [`Queues::bind`] pins.
    #[must_use]
    pub fn memory(queues: u32, config: &SocketConfig) -> u64 {
        let each = share(queues, config);
        u64::from(queues.max(1)) * u64::from(each.chunks) * u64::from(each.chunk_size)
    }

    /// The sockets for the XSKMAP, with their queue numbers.
    pub fn descriptors(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>)> {
        (0..).zip(self.sockets.iter().map(AsFd::as_fd))
    }

    /// Lends up to `max` received frames to `f`, oldest first within a queue; returns how many. Never blocks.
    pub fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let count = self.sockets.len();
        let first = self.first;
        self.first = (first + 1) % count;
        let mut lent = 0;
        for at in 0..count {
            if lent == max {
                break;
            }
            lent += self.sockets[(first + at) % count].receive(max - lent, &mut f);
        }
        lent
    }

    /// The sums of all sockets' counters.
    ///
    /// # Errors
    /// [`AfxdpError::Statistics`] if the kernel does not provide a socket's counters.
    pub fn stats(&self) -> Result<SocketStats, AfxdpError> {
        self.sockets.iter().try_fold(SocketStats::default(), |sum, socket| Ok(sum.plus(socket.stats()?)))
    }
}

/// For `poll(2)`: readable while any socket holds frames.
impl AsFd for Queues {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.sockets[..] {
            [only] => only.as_fd(),
            _ => self.any.as_fd(),
        }
    }
}

/// The sizes of each socket if there are several.
fn share(queues: u32, config: &SocketConfig) -> SocketConfig {
    let queues = queues.max(1).next_power_of_two();
    let part = |all: u32| (all / queues).max(MIN_QUEUE_RING.min(all));
    SocketConfig { rx_ring: part(config.rx_ring), chunks: part(config.chunks), ..*config }
}

#[cfg(test)]
mod tests {
    use rustix::net::xdp::XdpRingOffset;
    use std::collections::VecDeque;
    use std::sync::atomic::Ordering;

    use super::super::model::{LAYOUT, ring, rng, rounds};
    use super::super::sys::Mapping;
    use super::{Consumer, Producer, Queues, SocketConfig, bytes, share};

    /// A start value from which the cursors wrap within the first few cells.
    const BELOW_WRAP: u32 = u32::MAX - 2;

    #[test]
    fn cells_arrive_in_order_across_the_wrap_of_the_cursors() {
        let (mut producer, mut consumer) = ring::<u64>(4, BELOW_WRAP);
        for round in 0..5 {
            for cell in 0..4 {
                assert!(producer.push(round * 4 + cell));
            }
            producer.publish();
            for cell in 0..4 {
                assert_eq!(consumer.pop(), Some(round * 4 + cell));
            }
            assert_eq!(consumer.pop(), None);
            consumer.release();
        }
    }

    #[test]
    fn a_full_ring_accepts_nothing_until_places_are_released() {
        let (mut producer, mut consumer) = ring::<u64>(2, BELOW_WRAP);
        assert!(producer.push(1) && producer.push(2) && !producer.push(3));
        producer.publish();
        assert_eq!(consumer.pop(), Some(1));
        assert!(!producer.push(3), "popped but not released");
        consumer.release();
        assert!(producer.push(3) && !producer.push(4));
    }

    #[test]
    fn unpublished_cells_are_not_visible() {
        let (mut producer, mut consumer) = ring::<u64>(4, 0);
        assert!(producer.push(1));
        assert_eq!(consumer.pop(), None);
        producer.publish();
        assert_eq!(consumer.pop(), Some(1));
    }

    #[test]
    fn any_sequence_of_operations_agrees_with_a_queue() {
        let mut rng = rng();
        for _ in 0..rounds(200) {
            let size = 1 << rng.u32(0..6);
            let (mut producer, mut consumer) = ring::<u64>(size, u32::MAX - rng.u32(0..2 * size));
            // The expected state: cells written but not published, cells published, and places taken.
            let (mut written, mut visible, mut taken) = (VecDeque::new(), VecDeque::new(), 0);
            let (mut popped, mut next) = (0, 0_u64);
            for _ in 0..500 {
                match rng.u32(0..6) {
                    0 | 1 => {
                        let fits = taken < size;
                        assert_eq!(producer.push(next), fits);
                        if fits {
                            written.push_back(next);
                            taken += 1;
                            next += 1;
                        }
                    }
                    2 => {
                        producer.publish();
                        visible.append(&mut written);
                    }
                    3 | 4 => {
                        let expected = visible.pop_front();
                        assert_eq!(consumer.pop(), expected);
                        popped += u32::from(expected.is_some());
                    }
                    _ => {
                        consumer.release();
                        taken -= std::mem::take(&mut popped);
                    }
                }
                assert_eq!(consumer.pending(), Vec::from(visible.clone()));
            }
        }
    }

    #[test]
    fn two_threads_lose_and_reorder_nothing() {
        const CELLS: u64 = rounds(100_000) as u64;
        let (mut producer, mut consumer) = ring::<u64>(64, BELOW_WRAP);
        let sender = std::thread::spawn(move || {
            for cell in 0..CELLS {
                while !producer.push(cell) {
                    producer.publish();
                    std::thread::yield_now();
                }
            }
            producer.publish();
        });
        let mut expected = 0;
        while expected < CELLS {
            match consumer.pop() {
                Some(cell) => {
                    assert_eq!(cell, expected);
                    expected += 1;
                }
                None => {
                    consumer.release();
                    std::thread::yield_now();
                }
            }
        }
        sender.join().expect("the sender");
    }

    #[test]
    fn an_invalid_consumer_cursor_reads_as_a_full_ring() {
        let (mut producer, consumer) = ring::<u64>(4, 0);
        for cell in 0..4 {
            assert!(producer.push(cell));
        }
        // Ahead of the producer's 4, or further behind than the ring's size.
        for nonsense in [5, u32::MAX, 1 << 31] {
            consumer.ring.consumer().store(nonsense, Ordering::Relaxed);
            assert_eq!(producer.free(), 0, "{nonsense}");
        }
    }

    #[test]
    fn a_layout_that_exceeds_its_memory_is_refused() {
        let fits = |layout: &XdpRingOffset, size| {
            let map = || Mapping::anonymous(4096).expect("a page");
            let both = (Producer::<u64>::new(map(), layout, size), Consumer::<u64>::new(map(), layout, size));
            assert_eq!(both.0.is_some(), both.1.is_some());
            both.0.is_some()
        };
        assert!(fits(&LAYOUT, 256));
        assert!(!fits(&LAYOUT, 512), "cells past the end");
        assert!(!fits(&LAYOUT, 100), "not a power of two");
        assert!(!fits(&LAYOUT, 0), "no cells");
        assert!(!fits(&XdpRingOffset { producer: 4096, ..LAYOUT }, 4), "a cursor past the end");
        assert!(!fits(&XdpRingOffset { consumer: 2, ..LAYOUT }, 4), "an unaligned cursor");
        assert!(!fits(&XdpRingOffset { desc: u64::MAX, ..LAYOUT }, 4), "cells beyond the address space");
        assert_eq!(bytes::<u64>(&XdpRingOffset { desc: u64::MAX, ..LAYOUT }, 4), None);
    }

    #[test]
    fn queues_share_the_places_and_each_has_the_minimum() {
        let all = SocketConfig::default();
        for (queues, each) in [(1, 8_192), (2, 4_096), (3, 2_048), (4, 2_048), (8, 2_048)] {
            let found = share(queues, &all);
            assert_eq!((found.rx_ring, found.chunks), (each, each), "{queues} queues");
            assert_eq!(Queues::memory(queues, &all), u64::from(queues * each) * 4_096);
        }
        let small = SocketConfig { rx_ring: 64, chunks: 64, ..all };
        assert_eq!(share(4, &small).rx_ring, 64);
    }
}
