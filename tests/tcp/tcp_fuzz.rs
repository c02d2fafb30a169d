//! No input harms the stack, and it releases all resources afterwards.

use std::collections::HashMap;
use std::time::Duration;

use metadata_common::mac::Mac;
use metadata_datapath::stack::{StackConfig, StackStats};
use smoltcp::wire::TcpControl;
use support::checksum;
use support::pattern::{responses, stack};
use support::raw::{Raw, Segment};
use support::wire::{Rng, Sent, at};

const SEEDS: u64 = 40;
const FRAMES: usize = 3000;

/// Asserts that no limit is exceeded and no fault occurred. The stack catches panics, so only the counter shows them.
fn holds(stats: &StackStats, config: &StackConfig) {
    assert!(stats.connections <= config.connections as u64, "{stats:?}");
    assert!(stats.ports <= config.ports as u64, "{stats:?}");
    assert_eq!(stats.faults, 0, "{stats:?}");
}

/// A segment with random flags and numbers close to those of a live connection.
fn segment(rng: &mut Rng, port: u16, (ours, theirs): (u32, u32)) -> Segment {
    let near = |rng: &mut Rng, base: u32| match rng.below(8) {
        0 => rng.draw() as u32,
        1 => base.wrapping_sub(rng.below(5000) as u32),
        2 | 3 => base.wrapping_add(rng.below(5000) as u32),
        _ => base,
    };
    let control = match rng.below(12) {
        0 | 1 => TcpControl::Syn,
        2 => TcpControl::Fin,
        3 => TcpControl::Rst,
        4 => TcpControl::Psh,
        _ => TcpControl::None,
    };
    let payload: Vec<u8> = match rng.below(4) {
        0 => b"GET /bytes/5000 HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        1 => b"GET /close HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        2 => (0..rng.below(3500)).map(|_| rng.draw() as u8).collect(),
        _ => Vec::new(),
    };
    Segment {
        to: if rng.percent(10) { Mac::BROADCAST } else { Mac::SERVICE },
        control,
        seq: near(rng, ours),
        ack: (!rng.percent(10)).then(|| near(rng, theirs)),
        window: [0, 1, 500, 65_535][rng.below(4) as usize],
        mss: (control == TcpControl::Syn && rng.percent(70)).then(|| rng.draw() as u16),
        payload,
        ..Segment::syn(port, 0)
    }
}

#[test]
fn hostile_segments_never_harm_the_stack_and_all_resources_are_released() {
    for seed in 0..SEEDS {
        let mut rng = Rng::new(seed);
        let config = StackConfig {
            connections: 6,
            connections_per_port: 3,
            ports: 2,
            slots: 4,
            ..StackConfig::default()
        };
        let mut raw = Raw::new(stack(config.clone()).0);
        // The next sequence numbers of each four-tuple: the guest's and the service's.
        let mut next_numbers = HashMap::new();
        for _ in 0..FRAMES {
            raw.slot = rng.below(5) as u32;
            let port = 1 + rng.below(4) as u16;
            let next = next_numbers.entry((raw.slot, port)).or_insert(None);
            let mut segment = segment(&mut rng, port, next.unwrap_or((1000, 0)));
            if next.is_none() && rng.percent(70) {
                segment =
                    Segment { window: segment.window, mss: segment.mss, ..Segment::syn(port, segment.seq) };
            }
            if let Some(reply) = raw.send(&segment).last() {
                let occupied =
                    reply.payload.len() as u32 + u32::from(reply.flags.0) + u32::from(reply.flags.2);
                *next = (!reply.flags.3).then_some((reply.ack, reply.seq.wrapping_add(occupied)));
            }
            if rng.percent(5) {
                raw.wait(Duration::from_millis([1, 50, 1000, 20_000, 130_000][rng.below(5) as usize]));
            }
            holds(&raw.stack.stats(), &config);
        }
        assert!(raw.stack.stats().accepted > 50, "seed {seed}: {:?}", raw.stack.stats());
        raw.wait(Duration::from_secs(1000));
        let stats = raw.stack.stats();
        assert_eq!(
            (stats.connections, stats.ports, raw.stack.time_waits(), stats.faults),
            (0, 0, 0, 0),
            "seed {seed}: {stats:?}"
        );
    }
}

#[test]
fn mutated_and_random_frames_never_harm_the_stack() {
    for seed in 0..SEEDS {
        let mut rng = Rng::new(seed);
        let mut raw = Raw::new(stack(StackConfig::default()).0);
        let mut sent = Sent::default();
        for _ in 0..FRAMES {
            let mut frame = segment(&mut rng, 1, (1000, 0)).frame(raw.slot);
            match rng.below(3) {
                0 => frame.truncate(rng.below(frame.len() as u64 + 1) as usize),
                1 => frame = (0..rng.below(200)).map(|_| rng.draw() as u8).collect(),
                _ => {}
            }
            for _ in 0..rng.below(6) {
                if !frame.is_empty() {
                    // Most mutations hit the headers.
                    let at = rng.below(frame.len().min(74) as u64) as usize;
                    frame[at] = rng.draw() as u8;
                }
            }
            repair(&mut frame);
            raw.stack.receive(at(raw.now), raw.slot, &frame, &mut sent);
            raw.now += Duration::from_millis(rng.below(50));
            raw.stack.step(at(raw.now), &mut sent);
            sent.0.clear();
        }
        raw.wait(Duration::from_secs(1000));
        let stats = raw.stack.stats();
        assert_eq!(
            (stats.connections, stats.ports, raw.stack.time_waits(), stats.faults),
            (0, 0, 0, 0),
            "seed {seed}: {stats:?}"
        );
    }
}

/// Corrects the checksums, so that the stack does not drop mutated frames for them.
fn repair(frame: &mut [u8]) {
    if frame.len() >= 34 && frame[12..14] == [8, 0] {
        let header = (usize::from(frame[14] & 0xf) * 4).clamp(20, frame.len() - 14);
        frame[24..26].fill(0);
        let words = frame[14..14 + header].chunks(2);
        let sum: u32 = words.map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let sum = !(folded + (folded >> 16)) as u16;
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    checksum::complete(frame);
}

/// Parts of requests, well-formed or not.
const PIECES: &[&str] = &[
    "GET / HTTP/1.1\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /bytes/100 HTTP/1.1\r\nHost: x\r\n\r\n",
    "HEAD /bytes/5 HTTP/1.1\r\nHost: x\r\n\r\n",
    "PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    "PUT /echo?q HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nT: v\r\n\r\n",
    "PUT /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
    "GET /a%2e HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "\r\n",
    "GET /%ff HTTP/1.1\nHost: x\n\n",
    "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "GET /../ HTTP/1.1\r\nHost: x\r\n\r\n",
    "BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "5\r\n",
    "GET ",
];

fn dialogue(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..1 + rng.below(6) {
        bytes.extend(PIECES[rng.below(PIECES.len() as u64) as usize].bytes());
    }
    for _ in 0..rng.below(4).saturating_sub(1) {
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] = rng.draw() as u8;
    }
    bytes
}

/// All answers of a connection to `bytes`, sent in segments of the sizes that `cut` returns.
fn answers(bytes: &[u8], mut cut: impl FnMut() -> usize) -> Vec<u8> {
    let mut raw = Raw::new(stack(StackConfig::default()).0);
    let theirs = raw.connect(1);
    let (mut sent, mut received, mut ours) = (0, Vec::new(), 1001_u32);
    while sent < bytes.len() {
        let piece = &bytes[sent..bytes.len().min(sent + cut())];
        let ack = theirs.wrapping_add(received.len() as u32);
        let replies = raw.send(&Segment::ack(1, ours, ack).with(piece));
        sent += piece.len();
        ours = ours.wrapping_add(piece.len() as u32);
        for reply in replies.iter().filter(|reply| !reply.flags.3) {
            received.extend(&reply.payload);
        }
        if replies.iter().any(|reply| reply.flags.2 || reply.flags.3) {
            break;
        }
    }
    received
}

#[test]
fn an_exchange_does_not_depend_on_how_its_bytes_are_segmented() {
    for seed in 0..600 {
        let mut rng = Rng::new(seed);
        let bytes = dialogue(&mut rng);
        let whole = answers(&bytes, || 1400);
        let single = answers(&bytes, || 1);
        let shown = String::from_utf8_lossy(&bytes);
        assert!(
            whole == single,
            "seed {seed}: {shown:?}\n{:?}\n{:?}",
            responses(&whole, &[]),
            responses(&single, &[])
        );
        let random = answers(&bytes, || 1 + rng.below(40) as usize);
        assert!(whole == random, "seed {seed}: {shown:?}");
    }
}
