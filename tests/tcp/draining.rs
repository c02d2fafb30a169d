//! A draining service loses no request and no answer, closes every connection within its limit, and claims its
//! flows.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metadata_common::cookie::Flow;
use metadata_datapath::stack::{DRAIN_LIMIT, ServedFlows, Stack, StackConfig, Transmit};
use metadata_user::service::MetadataService;
use smoltcp::wire::TcpControl::{Fin, None as Bare};
use support::pattern::{Answered, Pattern, bytes, responses, stack};
use support::raw::{ACK, Raw, Segment};
use support::wire::{CLIENT, Client, Faults, Habits, Rng, SERVICE, World, at};

const SOON: Duration = Duration::from_secs(1);
const GET: &[u8] = b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\n\r\n";
const GET_AND_CLOSE: &[u8] = b"GET /close HTTP/1.1\r\nHost: x\r\n\r\n";

fn world(habits: Habits) -> (World<MetadataService<Pattern>>, Arc<Pattern>) {
    let (stack, pattern) = stack(StackConfig::default());
    (World::new(stack, Client::new(3, habits), Faults::NONE, 0), pattern)
}

fn drain(world: &mut World<MetadataService<Pattern>>) {
    let now = world.now();
    world.stack.drain(now, DRAIN_LIMIT, Some(Box::new(Claimed::default())));
}

fn answers(world: &World<MetadataService<Pattern>>, talk: usize) -> Vec<Answered> {
    responses(&world.client.talks[talk].received, &[])
}

fn says_close(answer: &Answered) -> bool {
    answer.head.to_ascii_lowercase().contains("\r\nconnection: close\r\n")
}

/// Collects the flows that the stack claims to serve itself.
#[derive(Clone, Default)]
struct Claimed(Arc<Mutex<Vec<u64>>>);

impl Claimed {
    fn flows(&self) -> Vec<u64> {
        self.0.lock().expect("no panic").clone()
    }
}

impl ServedFlows for Claimed {
    fn claim(&mut self, flow: u64) {
        self.0.lock().expect("no panic").push(flow);
    }

    fn renounce(&mut self, flow: u64) {
        self.0.lock().expect("no panic").retain(|claimed| *claimed != flow);
    }
}

#[test]
fn a_drain_closes_an_idle_connection_at_once_and_a_used_one_after_a_grace() {
    for (idle, wait, ended) in [
        (SOON, Duration::from_millis(5), true),
        (Duration::ZERO, Duration::from_millis(100), false),
        (Duration::ZERO, Duration::from_millis(300), true),
    ] {
        let (mut world, _) = world(Habits::default());
        let talk = world.client.begin(40_000, GET);
        world.run(SOON, |world| !answers(world, talk).is_empty());
        world.wait(idle);
        drain(&mut world);
        world.wait(wait);
        assert_eq!(world.client.talks[talk].ended, ended, "idle for {idle:?}, then {wait:?}");
        assert_eq!(answers(&world, talk).len(), 1);
    }
}

#[test]
fn a_request_during_the_grace_is_answered_with_connection_close() {
    let (mut world, _) = world(Habits::default());
    let talk = world.client.begin(40_000, GET);
    world.run(SOON, |world| !answers(world, talk).is_empty());
    drain(&mut world);
    world.wait(Duration::from_millis(100));
    world.client.transmit(talk, GET);
    world.client.close(talk);
    world.wait(SOON);
    let answers = answers(&world, talk);
    assert_eq!(answers.iter().map(says_close).collect::<Vec<_>>(), [false, true]);
    assert!(world.client.is_over(talk) && world.client.talks[talk].ended);
    assert_eq!((world.stack.left(), world.stack.stats().cut_short), (0, 0));
}

#[test]
fn connections_made_while_draining_are_served_and_closed() {
    let (mut world, _) = world(Habits::default());
    drain(&mut world);
    let talk = world.client.begin(40_000, GET);
    world.wait(SOON);
    assert!(says_close(&answers(&world, talk)[0]) && world.client.talks[talk].ended);
}

#[test]
fn a_request_in_parts_is_answered_even_if_it_starts_during_the_drain() {
    for (is_before, name) in [(true, "made before"), (false, "made while draining")] {
        let (mut world, _) = world(Habits::default());
        let before = is_before.then(|| world.client.begin(40_000, GET));
        world.wait(Duration::from_millis(1));
        drain(&mut world);
        let (first, rest) = GET.split_at(10);
        let talk = match before {
            Some(talk) => {
                world.client.transmit(talk, first);
                talk
            }
            None => world.client.begin(40_000, first),
        };
        world.wait(SOON);
        world.client.transmit(talk, rest);
        world.wait(SOON);
        let last = answers(&world, talk).pop().unwrap_or_else(|| panic!("{name}: no answer"));
        assert_eq!((last.status, says_close(&last)), (200, true), "{name}");
    }
}

#[test]
fn without_a_takeover_new_connections_are_left_to_the_next_agent() {
    let (mut world, _) = world(Habits::default());
    let held = world.client.begin(40_000, b"GET /bytes/10 HT");
    world.wait(SOON);
    let now = world.now();
    world.stack.drain(now, 2 * SOON, None);
    let late = world.client.begin(40_001, GET);
    world.client.transmit(held, b"TP/1.1\r\nHost: x\r\n\r\n");
    world.wait(SOON);
    assert!(says_close(&answers(&world, held)[0]));
    assert!(answers(&world, late).is_empty() && world.stack.stats().refused_leaving > 0);
    assert_eq!(world.stack.left(), 0, "the late connection does not delay the drain");
    // The next agent has the same cookie key and no state.
    world.stack = stack(StackConfig::default()).0;
    world.wait(2 * SOON);
    assert_eq!((answers(&world, late)[0].status, world.stack.stats().unmatched), (200, 0));
}

#[test]
fn every_pipelined_request_is_answered_and_the_last_answer_closes() {
    let (mut world, pattern) = world(Habits::default());
    pattern.ready.store(false, Ordering::Relaxed);
    let asked =
        [&GET.repeat(3)[..], b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", GET].concat();
    let talk = world.client.begin(40_000, &asked);
    world.wait(SOON);
    drain(&mut world);
    pattern.ready.store(true, Ordering::Relaxed);
    world.wait(SOON);
    let answers = answers(&world, talk);
    assert_eq!(answers.iter().map(says_close).collect::<Vec<_>>(), [false, false, false, false, true]);
    assert!(answers.iter().all(|answer| answer.status == 200));
}

#[test]
fn a_request_in_progress_is_answered_in_full() {
    for (half, rest) in [
        (&b"GET /bytes/10 HT"[..], &b"TP/1.1\r\nHost: x\r\n\r\n"[..]),
        (b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe", b"llo"),
        (b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n", b"hello"),
    ] {
        let (mut world, _) = world(Habits::default());
        let talk = world.client.begin(40_000, half);
        world.wait(SOON);
        drain(&mut world);
        world.wait(SOON);
        assert!(!world.client.talks[talk].ended && world.stack.left() == 1);
        world.client.transmit(talk, rest);
        world.client.close(talk);
        world.wait(SOON);
        let answers = answers(&world, talk);
        let last = answers.last().expect("an answer");
        assert_eq!((last.status, says_close(last)), (200, true));
        assert_eq!(world.stack.left(), 0);
    }
}

#[test]
fn a_request_waiting_for_its_record_is_refused_before_the_drain_limit() {
    let (mut world, pattern) = world(Habits::default());
    pattern.ready.store(false, Ordering::Relaxed);
    let get = world.client.begin(40_000, b"GET /openstack HTTP/1.1\r\nHost: x\r\n\r\n");
    let put =
        world.client.begin(40_001, b"PUT /latest/api/token HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    world.wait(SOON);
    let now = world.now();
    world.stack.drain(now, 4 * SOON, Some(Box::new(Claimed::default())));
    world.wait(2 * SOON);
    assert!([get, put].iter().all(|talk| !world.client.talks[*talk].ended), "the limit is not reached");
    world.wait(2 * SOON);
    let answers = answers(&world, get);
    assert_eq!((answers[0].status, says_close(&answers[0])), (503, true));
    assert!(world.client.talks[put].ended && world.client.talks[put].received.is_empty());
    assert_eq!(world.stack.stats().cut_short, 0);
}

#[test]
fn a_slow_reader_gets_the_whole_answer_and_a_stalled_one_is_cut_off() {
    const LONG: usize = 1 << 20;
    let ask = format!("GET /bytes/{LONG} HTTP/1.1\r\nHost: x\r\n\r\n");
    for (pause, whole) in [(Duration::from_millis(400), true), (Duration::from_secs(600), false)] {
        let (mut world, _) = world(Habits { read_pause: pause, ..Habits::default() });
        let talk = world.client.begin(40_000, ask.as_bytes());
        world.wait(SOON);
        assert_eq!(world.stack.left(), 1);
        drain(&mut world);
        world.client.close(talk);
        let done = world.run(DRAIN_LIMIT + SOON, |world| world.stack.stats().connections == 0);
        assert!(done, "a connection stays open");
        assert_eq!(world.stack.stats().cut_short, u64::from(!whole));
        if whole {
            world.wait(SOON);
            assert_eq!(answers(&world, talk)[0].body, bytes(LONG));
        } else {
            assert!(world.now().mono >= DRAIN_LIMIT, "cut off at {:?}", world.now());
        }
    }
}

#[test]
fn a_drain_neither_awaits_nor_resets_guests_that_keep_their_side_open() {
    let (mut world, _) = world(Habits::default());
    let talk = world.client.begin(40_000, GET);
    world.wait(SOON);
    drain(&mut world);
    world.wait(SOON);
    assert!(world.client.talks[talk].ended, "the service has closed its side");
    assert_eq!((world.stack.left(), world.stack.stats().connections), (0, 1));
    world.sent = Some(Vec::new());
    world.wait(DRAIN_LIMIT);
    assert_eq!((world.sent.as_deref(), world.stack.stats().connections), (Some(&[][..]), 0));
}

#[test]
fn a_cancelled_drain_keeps_connections_open() {
    let (mut world, _) = world(Habits::default());
    let talk = world.client.begin(40_000, b"GET /bytes/10 HT");
    world.wait(SOON);
    drain(&mut world);
    world.wait(SOON);
    world.stack.resume();
    world.client.transmit(talk, b"TP/1.1\r\nHost: x\r\n\r\n");
    world.wait(DRAIN_LIMIT);
    world.client.transmit(talk, GET);
    world.wait(SOON);
    let answers = answers(&world, talk);
    assert_eq!(answers.iter().map(says_close).collect::<Vec<_>>(), [false, false]);
    assert!(!world.client.talks[talk].ended);
}

#[test]
fn a_cancelled_drain_restores_the_usual_timeouts() {
    let (mut world, _) = world(Habits::default());
    let idle = world.client.begin(40_000, GET);
    world.run(SOON, |world| !answers(world, idle).is_empty());
    drain(&mut world);
    let begun = world.client.begin(40_001, &GET[..10]);
    world.wait(Duration::from_millis(1));
    world.stack.resume();
    world.wait(5 * SOON);
    world.client.transmit(begun, &GET[10..]);
    world.client.transmit(idle, GET);
    world.wait(SOON);
    for (talk, count) in [(begun, 1), (idle, 2)] {
        let answers = answers(&world, talk);
        assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), vec![200; count]);
        assert!(!answers.iter().any(says_close) && !world.client.talks[talk].ended);
    }
    world.wait(80 * SOON);
    assert!(world.client.talks[idle].ended && world.client.talks[begun].ended, "idle for 75 s");
}

/// The flow number of a guest port.
fn flow(port: u16) -> u64 {
    let [high, low] = port.to_be_bytes();
    let key = StackConfig::default().cookie_key;
    Flow::v4(&key, 7, CLIENT, SERVICE, [high, low, 0, 80]).number()
}

/// Asserts at each frame that this number of flows is claimed.
struct AfterClaim<'a>(&'a Claimed, usize);

impl Transmit for AfterClaim<'_> {
    fn send(&mut self, _: &[u8]) {
        assert_eq!(self.0.flows().len(), self.1, "a frame before the claim");
    }
}

#[test]
fn a_drain_claims_open_and_closed_flows_at_once_and_new_ones_before_any_frame() {
    let (stack, _) = stack(StackConfig::default());
    let mut raw = Raw::new(stack);
    for port in 1..=3 {
        let next = raw.connect(port);
        raw.send(&Segment::ack(port, 1001, next).with(GET));
    }
    // The connection from port 4 is closed and in TIME-WAIT.
    let next = raw.connect(4);
    let replies = raw.send(&Segment::ack(4, 1001, next).with(GET_AND_CLOSE));
    let end =
        replies.last().map(|reply| reply.seq.wrapping_add(reply.payload.len() as u32 + 1)).expect("a FIN");
    raw.send(&Segment::ack(4, 1001 + GET_AND_CLOSE.len() as u32, end).control(Fin));
    assert_eq!((raw.stack.stats().connections, raw.stack.time_waits()), (3, 1));
    let claimed = Claimed::default();
    raw.stack.drain(at(raw.now), DRAIN_LIMIT, Some(Box::new(claimed.clone())));
    let mut flows = claimed.flows();
    assert_eq!(flows.pop(), Some(flow(4)), "the closed flow has the least priority");
    flows.sort_unstable();
    let mut expected = [flow(1), flow(2), flow(3)];
    expected.sort_unstable();
    assert_eq!(flows, expected);
    let next = raw.connect(5);
    assert_eq!(claimed.flows().len(), 4, "a handshake claims nothing");
    let first = Segment::ack(5, 1001, next).with(GET).frame(raw.slot);
    raw.stack.receive(at(raw.now), raw.slot, &first, &mut AfterClaim(&claimed, 5));
    assert_eq!(claimed.flows().last(), Some(&flow(5)));
}

/// A connection that reuses the port this late could be cut off in the middle of a request.
#[test]
fn a_claimed_port_reused_late_in_the_drain_is_left_to_the_next_agent() {
    let (stack, _) = stack(StackConfig::default());
    let mut raw = Raw::new(stack);
    let close = |raw: &mut Raw<MetadataService<Pattern>>| {
        let next = raw.connect(1);
        let replies = raw.send(&Segment::ack(1, 1001, next).with(GET_AND_CLOSE));
        let end = replies.last().map(|reply| reply.seq.wrapping_add(reply.payload.len() as u32 + 1))?;
        raw.send(&Segment::ack(1, 1001 + GET_AND_CLOSE.len() as u32, end).control(Fin));
        Some(())
    };
    close(&mut raw).expect("an answer");
    let claimed = Claimed::default();
    raw.stack.drain(at(raw.now), DRAIN_LIMIT, Some(Box::new(claimed.clone())));
    raw.now += DRAIN_LIMIT / 3;
    close(&mut raw).expect("an answer early in the drain");
    assert!(claimed.flows().contains(&flow(1)));
    raw.now += DRAIN_LIMIT / 3;
    assert_eq!(close(&mut raw), None, "no answer");
    assert!(!claimed.flows().contains(&flow(1)), "retransmissions go to the next agent");
}

#[test]
fn flows_of_another_agent_are_not_reset_and_a_late_fin_is_acknowledged() {
    let (stack, _) = stack(StackConfig::default());
    let mut raw = Raw::new(stack);
    let unknown = Segment::ack(1, 5_000, 9_000);
    let is_reset = |raw: &mut Raw<MetadataService<Pattern>>, segment: &Segment| {
        let replies = raw.send(segment);
        replies.iter().any(|reply| reply.flags.3)
    };
    for (control, payload) in [(Bare, GET), (Fin, b"")] {
        assert!(is_reset(&mut raw, &unknown.clone().control(control).with(payload)));
    }
    raw.stack.spare_unknown(true);
    assert!(raw.send(&unknown.clone().with(GET)).is_empty());
    let late = raw.send(&unknown.clone().control(Fin));
    assert_eq!((late.len(), late[0].flags, late[0].seq, late[0].ack), (1, ACK, 9_000, 5_001));
    let mut closed = unknown.clone();
    closed.destination.1 = 81;
    assert!(is_reset(&mut raw, &closed), "no agent listens on this port");
    assert_eq!(raw.stack.stats().spared, 2);
    raw.stack.spare_unknown(false);
    assert!(is_reset(&mut raw, &unknown));
}

#[test]
fn a_drain_at_any_moment_answers_each_request_once_and_ends_in_time() {
    for seed in 0..30 {
        let mut rng = Rng::new(seed);
        println!("seed {seed}");
        let faults = Faults { loss: 3, duplicate: 2, reorder: 5, ..Faults::NONE };
        let (stack, _) = stack(StackConfig::default());
        let mut world: World<MetadataService<Pattern>> =
            World::new(stack, Client::new(3, Habits::default()), faults, seed);
        let mut asked = Vec::new();
        let mut leave = Some(Duration::from_millis(rng.below(400)));
        for n in 0..40 {
            let count = 1 + rng.below(4) as usize;
            let talk = world.client.begin(40_000 + n, &GET.repeat(count));
            asked.push((talk, count));
            world.wait(Duration::from_millis(rng.below(20)));
            if leave.is_some_and(|at| at <= world.now().mono) {
                drain(&mut world);
                leave = None;
            }
        }
        if leave.is_some() {
            drain(&mut world);
        }
        let ended =
            |world: &mut World<MetadataService<Pattern>>| world.client.talks.iter().all(|talk| talk.ended);
        assert!(world.run(DRAIN_LIMIT, ended), "seed {seed}: a connection outlives the limit");
        for (talk, count) in asked {
            world.client.close(talk);
            let answers = answers(&world, talk);
            // A request sent after the answer with `Connection: close` gets no answer, and its client knows that.
            let last = answers.iter().position(says_close).map_or(answers.len(), |last| last + 1);
            assert_eq!(answers.len(), last, "seed {seed}: talk {talk}");
            assert!(answers.len() == count || last < count, "seed {seed}: {} of {count}", answers.len());
        }
        world.run(DRAIN_LIMIT, |world| world.stack.stats().connections == 0);
        let stats = world.stack.stats();
        assert_eq!((stats.connections, stats.cut_short, stats.unmatched), (0, 0, 0), "seed {seed}");
    }
}

#[test]
fn resuming_a_stack_that_does_not_drain_has_no_effect() {
    let (mut stack, _): (Stack<MetadataService<Pattern>>, _) = stack(StackConfig::default());
    stack.resume();
    assert_eq!(stack.left(), 0);
}
