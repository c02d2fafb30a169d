use rustix::net::xdp::{XdpDesc, XdpDescOptions};
use std::collections::VecDeque;

use super::super::model::{FrameFate, ModelRig, rng, rounds};
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
    assert!(rig.kernel.rx.push(XdpDesc { addr: chunk + 256, len: 1_793, options: XdpDescOptions::empty() }));
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
        assert!(rig.kernel.rx.push(XdpDesc { addr: u64::MAX, len: 60, options: XdpDescOptions::empty() }));
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
        assert!(matches!(refused, AfxdpError::Size { what, .. } if what == field), "{config:?}: {refused}");
    }
    assert!(fine.check().is_ok());
}
