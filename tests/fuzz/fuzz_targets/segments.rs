//! Laws of the TCP stack, which hold for every sequence of segments a guest may send, in any state.
//!
//! The fuzz target and the test that replays its corpus share this file. Eight bytes make a segment:
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | low six bits: FIN, SYN, RST, PSH, ACK, window 0; high two: 0–2 select the port, 3 advances time first |
//! | 1 | the payload: one of a few requests, or that many bytes |
//! | 2, 3 | distance of the sequence number from the next expected one |
//! | 4, 5 | distance of the acknowledgement number from the end of what the service sent |
//! | 6 | the window, in units of 256 bytes |
//! | 7 | time to advance, in units of 40 ms |
#![cfg_attr(not(test), no_main)]

use std::collections::HashMap;
use std::time::Duration;

use metadata_datapath::stack::{RECEIVE_BUFFER, SEGMENTS_IN_FLIGHT, StackConfig};
use smoltcp::wire::TcpControl;
use support::pattern::stack;
use support::raw::{Raw, Reply, Segment};

const SEGMENT: usize = 8;
/// Maximum number of segments in one input.
const SEGMENTS: usize = 256;
const REQUESTS: [&[u8]; 6] = [
    b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /bytes/40000 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /close HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /bytes/3 HTTP/1.1\r\nHost: x\r\n\r\nGET /bytes/4 HTTP/1.1\r\nHost: x\r\n\r\nGET /bytes/5000 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"GET ",
];

/// A guest's state of one four-tuple.
#[derive(Default)]
struct Flow {
    /// The guest's next sequence number and the service's.
    ours: u32,
    theirs: u32,
    /// The service's initial sequence number, and every byte it has sent, by offset.
    initial: u32,
    bytes: HashMap<u32, u8>,
    /// The furthest offset that the guest's windows have allowed.
    allowed: u32,
    /// The connection was opened again. Segments may belong to either connection, so their bytes are not compared.
    mixed: bool,
}

/// Asserts every law on one input.
pub(crate) fn assert_all(input: &[u8]) {
    let config = StackConfig { connections: 2, connections_per_port: 2, slots: 8, ..StackConfig::default() };
    let mut raw = Raw::new(stack(config).0);
    let mut flows: [Flow; 3] = Default::default();
    for bytes in input.as_chunks::<SEGMENT>().0.iter().take(SEGMENTS) {
        let mut replies = Vec::new();
        if bytes[0] >> 6 == 3 {
            replies = raw.wait(Duration::from_millis(40) * u32::from(bytes[7]));
        }
        let port = usize::from(bytes[0] >> 6) % flows.len();
        let flow = &mut flows[port];
        let segment = segment(bytes, port, flow);
        if let Some(ack) = segment.ack {
            let edge = ack.wrapping_add(segment.window.into()).wrapping_sub(flow.initial);
            flow.allowed = flow.allowed.max(edge);
            // The low bits of the initial number encode the guest's own options; it may acknowledge other bits.
            flow.mixed |= (1..128).contains(&(ack.wrapping_sub(1) ^ flow.initial));
        }
        let now = raw.send(&segment);
        assert!(now.len() <= SEGMENTS_IN_FLIGHT as usize + 2, "{} segments in answer to one", now.len());
        replies.extend(now);
        for reply in &replies {
            check_reply(&mut flows[usize::from(reply.ports.1) - 1], reply);
        }
        let stats = raw.stack.stats();
        assert_eq!(stats.faults, 0, "an internal fault");
        assert!(stats.connections <= 2, "{stats:?}");
    }
    raw.wait(Duration::from_secs(1000));
    let stats = raw.stack.stats();
    assert_eq!((stats.connections, stats.ports, raw.stack.time_waits(), stats.faults), (0, 0, 0, 0));
}

fn segment(bytes: &[u8; SEGMENT], port: usize, flow: &Flow) -> Segment {
    let near =
        |base: u32, at: usize| base.wrapping_add(i16::from_be_bytes([bytes[at], bytes[at + 1]]) as u32);
    let flags = bytes[0];
    let control = match (flags & 2 != 0, flags & 4 != 0, flags & 1 != 0) {
        (true, ..) => TcpControl::Syn,
        (_, true, _) => TcpControl::Rst,
        (.., true) => TcpControl::Fin,
        _ => TcpControl::None,
    };
    let choice = usize::from(bytes[1]);
    let payload = REQUESTS
        .get(choice.wrapping_sub(1))
        .map_or_else(|| vec![b'x'; choice * 13], |request| request.to_vec());
    Segment {
        seq: near(flow.ours, 2),
        ack: (flags & 0x10 != 0).then(|| near(flow.theirs, 4)),
        window: if flags & 0x20 != 0 { 0 } else { u16::from(bytes[6]) * 256 },
        ..Segment::syn(port as u16 + 1, 0)
    }
    .control(control)
    .with(if control == TcpControl::Syn { &[] } else { &payload })
}

/// Checks one segment of the service against everything sent before.
fn check_reply(flow: &mut Flow, reply: &Reply) {
    let (syn, ack, fin, rst) = reply.flags;
    assert!(usize::from(reply.window) <= RECEIVE_BUFFER, "a window of {}", reply.window);
    assert!(ack || rst, "only a reset may lack an acknowledgement");
    if rst {
        return;
    }
    let next = reply.seq.wrapping_add(reply.payload.len() as u32 + u32::from(syn) + u32::from(fin));
    if syn {
        if flow.initial != reply.seq {
            let mixed = !flow.bytes.is_empty() || flow.allowed > 0;
            *flow = Flow { initial: reply.seq, allowed: 1, mixed, ..Flow::default() };
        }
        (flow.ours, flow.theirs) = (reply.ack, next);
        return;
    }
    (flow.ours, flow.theirs) = (reply.ack, next);
    if flow.mixed || reply.payload.is_empty() {
        return;
    }
    let from = reply.seq.wrapping_sub(flow.initial);
    for (at, byte) in (from..).zip(&reply.payload) {
        let first = *flow.bytes.entry(at).or_insert(*byte);
        assert_eq!(first, *byte, "byte {at} differs when retransmitted");
    }
    let end = from + reply.payload.len() as u32;
    assert!(end <= flow.allowed.max(from) + 1, "byte {end} is beyond the window, {}", flow.allowed);
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
