use rustix::net::xdp::{XdpDesc, XdpDescOptions};
use std::collections::VecDeque;

use super::super::model::{Fate, ModelKernel, ring, rng};
use super::super::umem::Umem;
use super::Receiver;

const CHUNK: u32 = 2048;
/// Just below the wrap: every test crosses it.
const START: u32 = u32::MAX - 5;

/// A receiver with `chunks` chunks and an RX ring of `rx_ring` places, and the kernel at its other end.
fn pair(chunks: u32, rx_ring: u32) -> (Receiver, ModelKernel) {
    let (fill, kernel_fill) = ring(chunks.next_power_of_two(), START);
    let (kernel_rx, rx) = ring(rx_ring, START);
    let (umem, frames) = Umem::new(chunks, CHUNK).expect("a small region");
    let receiver = Receiver::new(umem, frames, fill, rx);
    (receiver, ModelKernel { fill: kernel_fill, rx: kernel_rx, list: Vec::new(), chunk_size: CHUNK })
}

/// The law: between calls every chunk is in exactly one place, and the table of holders agrees.
fn assert_conserved(receiver: &Receiver, kernel: &ModelKernel, chunks: u32) {
    let chunk_of = |addr: u64| u32::try_from(addr / u64::from(CHUNK)).expect("a chunk");
    let mut held: Vec<u32> = kernel.fill.pending().into_iter().map(chunk_of).collect();
    held.extend(kernel.list.iter().copied().map(chunk_of));
    held.extend(receiver.rx.pending().iter().map(|descriptor| chunk_of(descriptor.addr)));
    held.sort_unstable();
    assert_eq!(held, receiver.umem.with_kernel().collect::<Vec<_>>(), "chunks of the kernel's");
    assert_eq!(held.len() + receiver.pool.len(), chunks as usize, "chunks in all");
}

#[test]
fn at_the_start_the_kernel_holds_every_chunk() {
    for chunks in [1, 5, 64, 100] {
        let (receiver, kernel) = pair(chunks, 64);
        assert_eq!(kernel.fill.pending().len(), chunks as usize);
        assert!(receiver.pool.is_empty());
        assert_conserved(&receiver, &kernel, chunks);
    }
}

#[test]
fn every_chunk_is_in_one_place_and_every_frame_arrives_once_under_random_traffic() {
    let mut rng = rng();
    for _ in 0..60 {
        let (chunks, rx_ring) = (rng.u32(1..40), 1 << rng.u32(0..6));
        let (mut receiver, mut kernel) = pair(chunks, rx_ring);
        let mut in_flight = VecDeque::new();
        for _ in 0..300 {
            if rng.bool() {
                let mut octets = vec![0; rng.usize(1..2_000)];
                rng.fill(&mut octets);
                let fate = kernel.deliver(&mut receiver.umem, &octets);
                let expected = match () {
                    () if octets.len() > 1_792 => Fate::TooLong,
                    () if in_flight.len() == chunks as usize => Fate::NoChunk,
                    () if in_flight.len() == rx_ring as usize => Fate::RingFull,
                    () => Fate::Queued,
                };
                assert_eq!(fate, expected);
                if fate == Fate::Queued {
                    in_flight.push_back(octets);
                }
            } else {
                let max = rng.usize(0..12);
                let expected = max.min(in_flight.len());
                let lent = receiver.receive(max, |frame| {
                    assert_eq!(Some(frame), in_flight.pop_front().as_deref());
                });
                assert_eq!(lent, expected);
            }
            assert_conserved(&receiver, &kernel, chunks);
        }
        assert_eq!(receiver.received().bad_descriptors, 0);
    }
}

#[test]
fn no_more_than_asked_for_is_lent_at_once() {
    let (mut receiver, mut kernel) = pair(8, 8);
    for _ in 0..8 {
        assert_eq!(kernel.deliver(&mut receiver.umem, &[1; 60]), Fate::Queued);
    }
    assert_eq!(receiver.receive(5, |_| ()), 5);
    assert_eq!(receiver.receive(5, |_| ()), 3);
    assert_eq!(receiver.receive(5, |_| ()), 0);
    assert_eq!((receiver.received().frames, receiver.received().bytes), (8, 480));
}

#[test]
fn bad_descriptors_are_counted_and_cost_nothing_but_themselves() {
    let (mut receiver, mut kernel) = pair(4, 64);
    let foreign = [4 * u64::from(CHUNK), 1 << 40, u64::MAX];
    for addr in foreign {
        assert!(kernel.rx.push(XdpDesc { addr, len: 60, options: XdpDescOptions::empty() }));
    }
    // A chunk it holds, with a length that leads into the next one.
    let chunk = kernel.fill.pop().expect("a chunk");
    kernel.fill.release();
    assert!(kernel.rx.push(XdpDesc { addr: chunk + 256, len: 1_793, options: XdpDescOptions::empty() }));
    assert_eq!(kernel.deliver(&mut receiver.umem, b"a good frame"), Fate::Queued);

    let mut seen = Vec::new();
    assert_eq!(receiver.receive(64, |frame| seen.push(frame.to_vec())), 1);
    assert_eq!(seen, [b"a good frame"]);
    assert_eq!(receiver.received().bad_descriptors, 4);
    assert_conserved(&receiver, &kernel, 4);
}

#[test]
fn a_descriptor_delivered_twice_is_lent_once() {
    let (mut receiver, mut kernel) = pair(4, 64);
    let chunk = kernel.fill.pop().expect("a chunk");
    kernel.fill.release();
    for _ in 0..2 {
        assert!(kernel.rx.push(XdpDesc { addr: chunk, len: 60, options: XdpDescOptions::empty() }));
    }
    kernel.rx.publish();
    assert_eq!(receiver.receive(64, |_| ()), 1);
    assert_eq!(receiver.received().bad_descriptors, 1);
    assert_conserved(&receiver, &kernel, 4);
}

#[test]
fn bad_descriptors_count_towards_the_batch() {
    let (mut receiver, mut kernel) = pair(4, 64);
    for _ in 0..10 {
        assert!(kernel.rx.push(XdpDesc { addr: u64::MAX, len: 60, options: XdpDescOptions::empty() }));
    }
    kernel.rx.publish();
    assert_eq!(receiver.receive(3, |_| ()), 0);
    assert_eq!(receiver.received().bad_descriptors, 3);
}
