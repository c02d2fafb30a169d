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
