//! Receiving a frame allocates nothing unless the frame starts a connection or a request.

use std::alloc::System;

use metadata_datapath::stack::{StackConfig, Transmit};
use smoltcp::wire::TcpControl::{Fin, Rst};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use support::pattern::stack;
use support::raw::{Raw, Reply, Segment};
use support::wire::at;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Discards all frames.
struct Nowhere;

impl Transmit for Nowhere {
    fn send(&mut self, _: &[u8]) {}
}

#[test]
fn frames_that_start_no_connection_or_request_allocate_nothing() {
    const GET: &[u8] = b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut raw = Raw::new(stack(StackConfig::default()).0);
    let next = raw.connect(1);
    let replies = raw.send(&Segment::ack(1, 1001, next).with(GET));
    let answered = |reply: &Reply| reply.seq.wrapping_add(reply.payload.len() as u32);
    let (seq, end) = (1001 + GET.len() as u32, answered(&replies[0]));
    let frames = [
        ("a SYN", Segment::syn(2, 5)),
        (
            "a SYN for a closed port",
            Segment { destination: (Segment::syn(2, 5).destination.0, 81), ..Segment::syn(2, 5) },
        ),
        ("the end of a handshake", Segment::ack(1, 1001, next)),
        ("a segment of no connection", Segment::ack(3, 5, 5).with(b"x")),
        ("an acknowledgement of part of an answer", Segment::ack(1, seq, end - 5)),
        ("a repeated acknowledgement", Segment::ack(1, seq, end - 5)),
        ("an acknowledgement of octets that were not sent", Segment::ack(1, seq, end + 5)),
        ("a repeated request", Segment::ack(1, 1001, next).with(GET)),
        ("a segment after a gap", Segment::ack(1, seq + 10, end).with(b"x")),
        ("an acknowledgement of the whole answer", Segment::ack(1, seq, end)),
        ("a stray reset", Segment::ack(1, seq + 1, end).control(Rst)),
        ("a FIN", Segment::ack(1, seq, end).control(Fin)),
    ];
    for (name, segment) in frames {
        let frame = segment.frame(raw.slot);
        let region = Region::new(ALLOCATOR);
        raw.stack.receive(at(raw.now), raw.slot, &frame, &mut Nowhere);
        assert_eq!(region.change().allocations + region.change().reallocations, 0, "{name}");
    }
    let region = Region::new(ALLOCATOR);
    for _ in 0..100 {
        raw.now += std::time::Duration::from_millis(50);
        raw.stack.step(at(raw.now), &mut Nowhere);
    }
    assert_eq!(region.change().allocations, 0, "timers");
}
