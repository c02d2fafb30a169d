//! Tests of guests with a server in memory: faults are detected, and lost segments are retransmitted.

use metadata_common::mac::Mac;
use std::collections::{HashMap, VecDeque};

use super::super::cpu::WithoutAgent;
use super::answer::{Body, Expected, Failure, Tally};
use super::boot::Guest;
use super::pump::{Manner, Scratch, Transmit, World};
use super::tcp::tests::{ends, from_server, turned};
use super::tcp::{ACK, FIN, Header, Incoming, MILLISECOND, MSS, Nanos, RST, SYN};
use super::{DESCRIBED, Planned, Requests, SECOND, Stall, StallWatch, Stalls, add, folded, good, tcp};

/// Bytes of the body in every answer.
const LENGTH: usize = 20_000;
/// The longest simulated time of a boot.
const LONGEST: Nanos = 120 * SECOND;

/// A fault of the server, by the number of the frame (from 0). It may change the frame, and drops it by returning
/// false.
type Fault = fn(usize, &mut Vec<u8>) -> bool;

#[derive(Default)]
struct Sent(VecDeque<Vec<u8>>);

impl Transmit for Sent {
    fn send(&mut self, frame: &[u8]) {
        self.0.push_back(frame.to_vec());
    }
}

/// A connection as the server sees it: its next byte, the guest's next byte, and its unacknowledged segments.
struct Served {
    next: u32,
    expected: u32,
    sent: Vec<(u32, Vec<u8>, u8)>,
}

/// A server without timers. It answers every repetition of the guest with its unacknowledged segments.
struct TestServer {
    answer: Vec<u8>,
    connections: HashMap<u16, Served>,
}

impl TestServer {
    fn new(answer: &str) -> Self {
        Self { answer: answer.as_bytes().to_vec(), connections: HashMap::new() }
    }

    fn take(&mut self, frame: &[u8], out: &mut Vec<Vec<u8>>) {
        let guest = ends();
        let server = turned(&guest);
        // As in `from_server`, the ports are swapped.
        let mut frame = frame.to_vec();
        match tcp::read(&frame, &server, false) {
            Incoming::WhoHas(mac, address) => {
                let mut reply = Vec::new();
                tcp::is_at(&mut reply, &server, mac, address);
                out.push(reply);
            }
            Incoming::Tcp(..) => {
                frame[34..38].rotate_left(2);
                let Incoming::Tcp(header, payload) = tcp::read(&frame, &server, false) else { return };
                self.segment(&header, payload, out);
            }
            other => panic!("the guest sent {other:?}"),
        }
    }

    fn segment(&mut self, header: &Header, payload: &[u8], out: &mut Vec<Vec<u8>>) {
        if header.flags & SYN != 0 {
            let served = Served { next: 1_001, expected: header.seq.wrapping_add(1), sent: Vec::new() };
            let ack = served.expected;
            self.connections.insert(header.port, served);
            out.push(frame(header.port, 1_000, ack, SYN | ACK, &[]));
            return;
        }
        if header.flags & RST != 0 {
            // To answer it would have the guest reset again, for the rest of the simulated time.
            self.connections.remove(&header.port);
            return;
        }
        let Some(served) = self.connections.get_mut(&header.port) else { return };
        served.sent.retain(|(seq, bytes, flags)| {
            let end = seq.wrapping_add(bytes.len() as u32 + u32::from(flags & FIN));
            (header.ack.wrapping_sub(end) as i32) < 0
        });
        let new = header.seq == served.expected;
        if !payload.is_empty() && new {
            served.expected = served.expected.wrapping_add(payload.len() as u32);
            for part in self.answer.chunks(usize::from(MSS)) {
                served.sent.push((served.next, part.to_vec(), ACK));
                served.next = served.next.wrapping_add(part.len() as u32);
            }
        }
        if header.flags & FIN != 0 && new {
            served.expected = served.expected.wrapping_add(1);
            served.sent.push((served.next, Vec::new(), FIN | ACK));
            served.next = served.next.wrapping_add(1);
        }
        // An acknowledgement of less than everything may mean a loss, so the first outstanding segment is
        // retransmitted.
        let again = if payload.is_empty() && header.flags & FIN == 0 { 1 } else { usize::MAX };
        for (seq, bytes, flags) in served.sent.iter().take(again) {
            out.push(frame(header.port, *seq, served.expected, *flags, bytes));
        }
        if served.sent.is_empty() && (!payload.is_empty() || header.flags & FIN != 0) {
            out.push(frame(header.port, served.next, served.expected, ACK, &[]));
        }
    }
}

fn frame(port: u16, seq: u32, ack: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    from_server(&ends(), &Header { port, seq, ack, flags, window: 1_000, timestamps: None }, payload)
}

fn body() -> String {
    (0..LENGTH).map(|n| char::from(b'a' + (n / 7 % 26) as u8)).collect()
}

fn answer(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Boots one guest with two requests against a server. `lose` drops the guest's frames by their number.
fn boot(response: &str, manner: Manner, slow: bool, lose: fn(usize) -> bool, fault: Fault) -> (Tally, Nanos) {
    let expected = Expected { status: 200, body: Body::Exactly { offset: 0, length: LENGTH as u64 } };
    let plan = Planned { mac: ends().mac.0, address: ends().address, answers: vec![expected; 2] };
    let requests = Requests::new(&[
        "GET /a HTTP/1.1\r\nHost: x\r\n\r\n".into(),
        "GET /b HTTP/1.1\r\nHost: x\r\n\r\n".into(),
    ]);
    let (bodies, mut scratch) = (body(), Scratch::default());
    let mut tally = Tally { without_agent: Some(WithoutAgent::default()), ..Tally::default() };
    let (mut sent, mut random) = (Sent::default(), fastrand::Rng::with_seed(1));
    let mut guest = Guest::new(plan, ends().server);
    guest.forget(slow, &mut random);
    let mut server = TestServer::new(response);
    let (mut now, mut from_guest, mut to_guest) = (0, 0, 0);
    let mut act = |now, sent: &mut Sent, tally: &mut Tally, act: &mut dyn FnMut(&mut World<'_>)| {
        act(&mut World {
            now,
            manner,
            requests: &requests,
            bodies: bodies.as_bytes(),
            tally,
            out: sent,
            scratch: &mut scratch,
            random: &mut random,
        });
    };
    act(now, &mut sent, &mut tally, &mut |world| guest.boot(world));
    while now < LONGEST && !(guest.is_quiet() && sent.0.is_empty()) {
        now += MILLISECOND;
        let mut out = Vec::new();
        while let Some(frame) = sent.0.pop_front() {
            from_guest += 1;
            if !lose(from_guest - 1) {
                server.take(&frame, &mut out);
            }
        }
        for mut frame in out {
            to_guest += 1;
            if fault(to_guest - 1, &mut frame) {
                act(now, &mut sent, &mut tally, &mut |world| guest.receive(&frame, world));
            }
        }
        if guest.wake_at <= now {
            act(now, &mut sent, &mut tally, &mut |world| guest.due(world));
        }
    }
    (tally, now)
}

fn no_loss(_: usize) -> bool {
    false
}

fn no_fault(_: usize, _: &mut Vec<u8>) -> bool {
    true
}

#[test]
fn a_boot_gets_an_answer_to_every_request() {
    for (keep_alive, slow) in [(false, false), (true, false), (false, true)] {
        let manner = Manner { keep_alive, ..Manner::default() };
        let (tally, _) = boot(&answer(&body()), manner, slow, no_loss, no_fault);
        assert_eq!((tally.requests, tally.failed, tally.retransmissions), (2, 0, 0), "{keep_alive} {slow}");
        assert_eq!((tally.boots, tally.finished.len()), (1, 1));
        assert_eq!(tally.without_agent, Some(WithoutAgent { answered: 2, waiting: 0, missed: 0 }));
    }
}

#[test]
fn a_wrong_byte_anywhere_is_a_failed_request() {
    for at in [0, 1_400, LENGTH - 1] {
        let mut wrong = body().into_bytes();
        wrong[at] = b'!';
        let wrong = String::from_utf8(wrong).expect("text");
        let (tally, _) = boot(&answer(&wrong), Manner::default(), false, no_loss, no_fault);
        assert_eq!((tally.requests, tally.failed), (0, 2), "byte {at}");
        assert_eq!(tally.reasons.get(&Failure::Body), Some(&2), "byte {at}");
    }
}

#[test]
fn a_frame_with_a_wrong_checksum_is_counted_and_ignored() {
    let damage: Fault = |number, frame| {
        if number == 4 {
            let last = frame.len() - 1;
            frame[last] ^= 1;
        }
        true
    };
    let (tally, _) = boot(&answer(&body()), Manner::default(), false, no_loss, damage);
    assert_eq!(tally.reasons.get(&Failure::Checksum), Some(&1));
    assert_eq!((tally.requests, tally.failed), (2, 0));
}

#[test]
fn frames_lost_towards_the_server_are_sent_again() {
    // ARP request, SYN, acknowledgement, request, and every fifth frame.
    let lose: [fn(usize) -> bool; 5] = [|n| n == 0, |n| n == 1, |n| n == 2, |n| n == 3, |n| n % 5 == 4];
    for (number, lose) in lose.into_iter().enumerate() {
        let (tally, _) = boot(&answer(&body()), Manner::default(), false, lose, no_fault);
        assert_eq!((tally.requests, tally.failed), (2, 0), "loss {number}");
        let silent = number == 2;
        assert_eq!(tally.retransmissions == 0, silent, "loss {number}: {}", tally.retransmissions);
    }
}

#[test]
fn frames_lost_towards_the_guest_arrive_in_the_end() {
    for every in [3, 5, 9] {
        let faults: Fault = match every {
            3 => |n, _| n % 3 != 2,
            5 => |n, _| n % 5 != 4,
            _ => |n, _| n % 9 != 8,
        };
        let (tally, now) = boot(&answer(&body()), Manner::default(), false, no_loss, faults);
        assert_eq!((tally.requests, tally.failed), (2, 0), "every {every}th lost");
        assert!(now < LONGEST, "every {every}th lost");
    }
}

#[test]
fn a_silent_network_fails_every_request_with_its_reason() {
    let nothing: Fault = |_, _| false;
    let (tally, now) = boot("", Manner::default(), false, no_loss, nothing);
    assert_eq!(tally.reasons.get(&Failure::Arp), Some(&2));
    assert!(now < 10 * SECOND, "{now}");
    let only_arp: Fault = |n, _| n == 0;
    let (tally, _) = boot("", Manner::default(), false, no_loss, only_arp);
    assert_eq!(tally.reasons.get(&Failure::Connect), Some(&2));
}

#[test]
fn an_answer_that_stops_is_given_up() {
    let (tally, _) = boot(&answer(&body())[..9_000], Manner::default(), false, no_loss, no_fault);
    assert_eq!(tally.reasons.get(&Failure::Silence), Some(&2));
    assert_eq!(tally.without_agent, Some(WithoutAgent { answered: 0, waiting: 2, missed: 0 }));
}

#[test]
fn segments_of_an_old_connection_are_reset() {
    let plan = Planned { mac: ends().mac.0, address: ends().address, answers: Vec::new() };
    let (requests, mut tally) = (Requests::new(&[]), Tally::default());
    let (mut sent, mut scratch, mut random) =
        (Sent::default(), Scratch::default(), fastrand::Rng::with_seed(1));
    let mut guest = Guest::new(plan, ends().server);
    let mut world = World {
        now: 0,
        manner: Manner::default(),
        requests: &requests,
        bodies: &[],
        tally: &mut tally,
        out: &mut sent,
        scratch: &mut scratch,
        random: &mut random,
    };
    let mut known = Vec::new();
    tcp::is_at(&mut known, &turned(&ends()), ends().mac, ends().address);
    guest.receive(&known, &mut world);
    guest.receive(&frame(40_000, 7, 99, FIN | ACK, &[]), &mut world);
    guest.receive(&frame(40_000, 7, 99, RST | ACK, &[]), &mut world);
    assert_eq!(sent.0.len(), 1, "a reset is not answered");
    sent.0[0][34..38].rotate_left(2);
    let Incoming::Tcp(header, _) = tcp::read(&sent.0[0], &turned(&ends()), false) else {
        panic!("no segment")
    };
    assert_eq!((header.flags, header.seq, header.port), (RST, 99, 40_000));
}

#[test]
fn placeholders_are_filled_and_counted() {
    let requests = Requests::new(&["GET /{mac}/x?{mac} t: {token}".into(), "plain".into()]);
    let mac = Mac([0x52, 0x54, 0, 0x0a, 0xbc, 0xff]);
    for (number, expected) in [(0, "GET /52:54:00:0a:bc:ff/x?52:54:00:0a:bc:ff t: secret"), (1, "plain")] {
        let mut out = Vec::new();
        requests.write(&mut out, number, mac, b"secret");
        assert_eq!(String::from_utf8_lossy(&out), expected);
        assert_eq!(requests.length(number, b"secret"), expected.len());
    }
}

#[test]
fn the_example_of_rfc_1071_gives_its_sum() {
    let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    assert_eq!(folded(add(0, &bytes)).to_ne_bytes(), [0xdd, 0xf2]);
}

#[test]
fn sums_of_any_length_agree_with_word_by_word_addition() {
    let bytes: Vec<u8> = (0..=255).cycle().take(1_500).map(|n: u8| n.wrapping_mul(37)).collect();
    for len in [0, 1, 2, 3, 4, 5, 7, 8, 20, 1_459, 1_460] {
        let mut plain = 0u32;
        for pair in bytes[..len].chunks(2) {
            plain += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
            plain = (plain >> 16) + (plain & 0xffff);
        }
        assert_eq!(folded(add(0, &bytes[..len])).to_ne_bytes(), (plain as u16).to_be_bytes(), "{len}");
    }
}

#[test]
fn a_checksum_in_place_makes_all_ones() {
    let mut packet = [0x45, 0, 0, 40, 1, 2, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    let check = !folded(add(0, &packet));
    packet[10..12].copy_from_slice(&check.to_ne_bytes());
    assert!(good(add(0, &packet)));
    packet[3] ^= 1;
    assert!(!good(add(0, &packet)));
}

const LIMIT: u64 = 3 * SECOND;

#[test]
fn a_wait_is_a_stall_unless_losses_explain_it() {
    for (waited, lost, stalls) in [(3, 0, false), (4, 0, true), (4, 1, false), (5, 1, true), (10, 3, false)] {
        let watch = StallWatch::default();
        assert_eq!(watch.overdue(waited * SECOND, lost, LIMIT).is_some(), stalls, "{waited} s, {lost} lost");
    }
}

#[test]
fn a_repeated_handshake_excuses_longer_timeouts() {
    for (handshake, lost_then, waited, stalls) in
        [(1, 1, 12, false), (1, 1, 13, true), (0, 0, 7, true), (1, 0, 7, true)]
    {
        let (mut watch, mut found) = (StallWatch::default(), Stalls::default());
        watch.progressed(handshake * SECOND, lost_then, LIMIT, &mut found);
        let overdue = watch.overdue(waited * SECOND, lost_then + 2, LIMIT);
        assert_eq!(overdue.is_some(), stalls, "{handshake} s, {lost_then} lost, then {waited} s");
    }
}

#[test]
fn a_stall_counts_once_and_lasts_until_progress() {
    let (mut watch, mut stalls) = (StallWatch::default(), Stalls::default());
    for round in 0..DESCRIBED as u64 + 2 {
        assert_eq!(watch.overdue(4 * SECOND, round, LIMIT), Some(0));
        watch.stalls(Stall::default(), &mut stalls);
        assert_eq!(watch.overdue(5 * SECOND, round, LIMIT), None);
        watch.progressed(6 * SECOND, round + 1, LIMIT, &mut stalls);
    }
    assert_eq!((stalls.count, stalls.described.len()), (DESCRIBED as u64 + 2, DESCRIBED));
    assert!(stalls.described.iter().all(|stall| stall.seconds == 6.0));
    watch.progressed(4 * SECOND, 99, LIMIT, &mut stalls);
    assert_eq!((stalls.excused, stalls.longest), (1, 6 * SECOND));
}
