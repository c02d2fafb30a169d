use metadata_common::mac::Mac;
use metadata_common::maps::MAX_SLOTS;
use metadata_common::stamp::stamp;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;

use super::{
    AlternatingSources, FrameError, FrameSource, HEADER_LEN, HubTap, LinkReceiver, LinkStats, MAX_FRAME,
    TapStats, slot_of,
};
use crate::afxdp::SocketStats;
use crate::stack::Transmit as _;

/// A frame of `len` bytes from `source`.
fn frame(source: Mac, len: usize) -> Vec<u8> {
    let mut frame = vec![0xaa; len.max(12)];
    frame[6..12].copy_from_slice(&source.0);
    frame.truncate(len);
    frame
}

#[test]
fn only_a_stamp_within_range_gives_a_slot() {
    for (name, frame, expected) in [
        ("first slot", frame(stamp(0), 60), Ok(0)),
        ("last slot", frame(stamp(MAX_SLOTS - 1), 60), Ok(MAX_SLOTS - 1)),
        ("header only", frame(stamp(7), HEADER_LEN), Ok(7)),
        ("first slot too many", frame(stamp(MAX_SLOTS), 60), Err(FrameError::SlotOutOfRange)),
        ("last slot too many", frame(stamp(u32::MAX), 60), Err(FrameError::SlotOutOfRange)),
        ("a guest's own address", frame(Mac([0x52, 0x54, 0, 1, 2, 3]), 60), Err(FrameError::Unstamped)),
        ("our own address", frame(Mac::SERVICE, 60), Err(FrameError::Unstamped)),
        ("no type", frame(stamp(7), HEADER_LEN - 1), Err(FrameError::Runt)),
        ("no source", frame(stamp(7), 6), Err(FrameError::Runt)),
        ("nothing", vec![], Err(FrameError::Runt)),
    ] {
        assert_eq!(slot_of(&frame), expected, "{name}");
    }
}

/// Lends the given frames.
struct Queue(Vec<Vec<u8>>, UnixDatagram);

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.1.as_fd()
    }
}

impl FrameSource for Queue {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let batch: Vec<_> = self.0.drain(..max.min(self.0.len())).collect();
        batch.iter().for_each(|frame| f(&[frame]));
        batch.len()
    }

    fn stats(&self) -> Option<SocketStats> {
        None
    }
}

#[test]
fn two_sources_alternate_and_neither_starves() {
    let queue = |byte: u8, count: usize| {
        let (end, _) = UnixDatagram::pair().expect("a pair of sockets");
        Queue(vec![vec![byte]; count], end)
    };
    let mut both = AlternatingSources::new(queue(1, 6), queue(2, 100)).expect("two descriptors");
    let mut turn = |max| {
        let mut got = Vec::new();
        let lent = both.receive(max, |group| got.extend(group.iter().map(|frame| frame[0])));
        assert_eq!(lent, got.len());
        got
    };
    assert_eq!(turn(4), [2; 4]);
    assert_eq!(turn(4), [1; 4]);
    assert_eq!(turn(4), [2; 4], "the second source always has more");
    assert_eq!(turn(4), [1, 1, 2, 2], "the other source gets the rest");
    assert!(turn(0).is_empty());
}

#[test]
fn refused_frames_are_counted_by_reason_and_the_rest_pass_in_order() {
    let frames = vec![
        frame(stamp(3), 60),
        frame(Mac::SERVICE, 60),
        frame(stamp(MAX_SLOTS), 60),
        frame(stamp(4), 61),
        frame(stamp(5), 13),
    ];
    let mut link = LinkReceiver::new(Queue(frames, UnixDatagram::unbound().expect("a socket")));
    let mut seen = Vec::new();
    let mut receive =
        |max| link.receive(max, |group| seen.extend(group.iter().map(|(slot, frame)| (*slot, frame.len()))));
    assert_eq!((receive(4), receive(4)), (4, 1));
    assert_eq!(seen, [(3, 60), (4, 61)]);
    assert_eq!(link.stats(), LinkStats { runt: 1, unstamped: 1, slot_out_of_range: 1, over_share: 0 });
}

/// A tap, and the socket where its frames arrive as datagrams.
fn tap() -> (HubTap, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().expect("a pair of sockets");
    ours.set_nonblocking(true).expect("a flag");
    (HubTap::new(ours.into()), theirs)
}

#[test]
fn each_frame_is_one_write() {
    let (mut tap, wire) = tap();
    for len in [HEADER_LEN, 60, MAX_FRAME] {
        let sent = frame(stamp(1), len);
        tap.send(&sent);
        let mut arrived = [0; 2_000];
        let received = wire.recv(&mut arrived).expect("a datagram");
        assert_eq!(arrived[..received], sent);
    }
    let bytes = (HEADER_LEN + 60 + MAX_FRAME) as u64;
    assert_eq!(tap.stats(), TapStats { frames: 3, bytes, ..TapStats::default() });
}

#[test]
fn frames_of_invalid_length_are_not_sent() {
    let (mut tap, wire) = tap();
    for len in [0, HEADER_LEN - 1, MAX_FRAME + 1] {
        tap.send(&vec![0; len]);
    }
    assert_eq!(tap.stats(), TapStats { bad_length: 3, ..TapStats::default() });
    wire.set_nonblocking(true).expect("a flag");
    assert!(wire.recv(&mut [0; 16]).is_err());
}

#[test]
fn frames_lost_to_a_full_queue_are_counted() {
    let (mut tap, _wire) = tap();
    let frame = frame(stamp(1), 1_000);
    for _ in 0..5_000 {
        tap.send(&frame);
    }
    let stats = tap.stats();
    assert!(stats.full > 0, "{stats:?}");
    assert_eq!(stats.frames + stats.full, 5_000, "{stats:?}");
}

#[test]
fn other_failures_are_counted_too() {
    let (mut tap, wire) = tap();
    drop(wire);
    tap.send(&frame(stamp(1), 60));
    assert_eq!(tap.stats(), TapStats { other: 1, ..TapStats::default() });
}
