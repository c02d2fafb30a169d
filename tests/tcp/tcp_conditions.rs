//! Every answer arrives whole over a bad link.
//!
//! A smoltcp client talks to the stack under test over a link with seeded faults, in virtual time.

use std::time::Duration;

use metadata_datapath::stack::{AckLedger, GuestDevices, NARROW_FOR, Service, StackConfig};
use support::pattern::{bytes, responses, stack};
use support::wire::{Client, Faults, Habits, World};

const BODY: usize = 64 * 1024;
/// If a fifth of all frames is lost in each direction, retransmissions occasionally back off up to a minute.
const LOSSY_LIMIT: Duration = Duration::from_secs(600);
const CLEAN_LIMIT: Duration = Duration::from_secs(5);
/// Time after which the stack has stopped retransmitting its FIN and has freed the idle port.
const SETTLED: Duration = Duration::from_secs(600);

struct Case {
    name: &'static str,
    faults: Faults,
    habits: Habits,
    seeds: u64,
    limit: Duration,
}

fn cases() -> Vec<Case> {
    let base =
        Case { name: "", faults: Faults::NONE, habits: Habits::default(), seeds: 2, limit: CLEAN_LIMIT };
    let habits = Habits::default();
    let slow = Duration::from_millis(20);
    vec![
        Case { name: "clean", ..base },
        Case {
            name: "20 % loss both ways",
            faults: Faults { loss: 20, ..Faults::NONE },
            seeds: 25,
            limit: LOSSY_LIMIT,
            ..base
        },
        Case {
            name: "reordering",
            faults: Faults { reorder: 30, ..Faults::NONE },
            seeds: 20,
            limit: LOSSY_LIMIT,
            ..base
        },
        Case {
            name: "duplication",
            faults: Faults { duplicate: 50, ..Faults::NONE },
            seeds: 20,
            limit: LOSSY_LIMIT,
            ..base
        },
        Case {
            name: "loss, reordering and duplication",
            faults: Faults { loss: 5, duplicate: 10, reorder: 20, ..Faults::NONE },
            seeds: 20,
            limit: LOSSY_LIMIT,
            ..base
        },
        Case {
            name: "50 ms one way",
            faults: Faults { delay: Duration::from_millis(50), ..Faults::NONE },
            ..base
        },
        Case {
            name: "a link too narrow for the segments the guest asked for",
            faults: Faults { longest: 1_464, ..Faults::NONE },
            ..base
        },
        Case { name: "request in segments of one byte", habits: Habits { write: 1, ..habits }, ..base },
        Case { name: "small MTU", habits: Habits { mtu: 576, ..habits }, ..base },
        Case {
            name: "small window",
            habits: Habits { window: 256, read_pause: Duration::from_millis(1), ..habits },
            ..base
        },
        Case {
            name: "slow reader whose window closes and reopens",
            habits: Habits { window: 4096, read: 4096, read_pause: slow * 50, ..habits },
            limit: Duration::from_secs(120),
            ..base
        },
    ]
}

/// A stack that sends long frames to every slot, or none.
fn sending(long: bool) -> StackConfig {
    let devices = GuestDevices::new(8);
    (0..8).for_each(|slot| devices.set_takes_long(slot, long));
    StackConfig { guest_devices: devices, ..StackConfig::default() }
}

#[test]
fn every_answer_arrives_whole_whatever_the_link_does() {
    for case in cases() {
        for seed in 0..case.seeds {
            let (stack, _) = stack(sending(seed % 2 == 1));
            let mut world = World::new(stack, Client::new(3, case.habits), case.faults, seed);
            let request = format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let talk = world.client.begin(40_000, request.as_bytes());
            let done = world.run(case.limit, |world| world.client.talks[talk].ended);
            let received = &world.client.talks[talk].received;
            assert!(
                done,
                "{} (seed {seed}): {} bytes after {:?}",
                case.name,
                received.len(),
                world.now().mono
            );
            let answers = responses(received, &[]);
            assert_eq!(answers.len(), 1, "{} (seed {seed})", case.name);
            assert!(answers[0].body == bytes(BODY), "{} (seed {seed}): the body differs", case.name);

            world.client.close(talk);
            world.wait(SETTLED);
            let stats = world.stack.stats();
            assert_eq!((stats.connections, stats.ports), (0, 0), "{} (seed {seed}): {stats:?}", case.name);
        }
    }
}

#[test]
fn a_mebibyte_arrives_whole_and_in_time_through_windows_of_any_size() {
    const MEBIBYTE: usize = 1 << 20;
    let far = Faults { delay: Duration::from_millis(10), ..Faults::NONE };
    // A round trip of 20 ms determines the seconds: one window per round trip, or slow start from ten segments.
    let cases = [
        ("scaled window", 1 << 20, far, 2, 1),
        ("64 KiB", 65_535, far, 2, 2),
        ("one segment at a time", 1460, Faults::NONE, 2, 5),
        ("2 % loss", 1 << 20, Faults { loss: 2, ..far }, 5, 120),
        ("reordering", 1 << 18, Faults { reorder: 5, ..Faults::NONE }, 5, 60),
        ("all at once", 1 << 18, Faults { loss: 3, duplicate: 5, reorder: 5, ..far }, 5, 200),
    ];
    for (name, window, faults, seeds, seconds) in cases {
        for seed in 0..seeds {
            let (stack, _) = stack(sending(seed % 2 == 1));
            let client = Client::new(3, Habits { window, ..Habits::default() });
            let mut world = World::new(stack, client, faults, seed);
            let request = format!("GET /bytes/{MEBIBYTE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let talk = world.client.begin(40_000, request.as_bytes());
            let done = world.run(Duration::from_secs(seconds), |world| world.client.talks[talk].ended);
            let received = &world.client.talks[talk].received;
            assert!(done, "{name} (seed {seed}): {} bytes", received.len());
            assert!(responses(received, &[])[0].body == bytes(MEBIBYTE), "{name} (seed {seed})");
            world.client.close(talk);
            world.wait(SETTLED);
            let stats = world.stack.stats();
            assert_eq!((stats.connections, stats.ports, stats.faults), (0, 0, 0), "{name}: {stats:?}");
        }
    }
}

/// The stack must not mistake losses for a narrow link: it would send three times as many segments, and lose as many
/// more.
#[test]
fn losing_a_fifth_of_all_frames_costs_the_median_guest_only_seconds() {
    const LINKS: u64 = 200;
    let faults = Faults { loss: 20, ..Faults::NONE };
    let mut seconds: Vec<f64> = (0..LINKS)
        .map(|seed| {
            let mut world =
                World::new(stack(StackConfig::default()).0, Client::new(3, Habits::default()), faults, seed);
            let request = format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let talk = world.client.begin(40_000, request.as_bytes());
            assert!(world.run(LOSSY_LIMIT, |world| world.client.talks[talk].ended), "seed {seed}");
            world.now().mono.as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    assert!(median < 8.0, "half of all guests waited longer than {median:.1} s");
}

fn clean_world() -> World<metadata_user::service::MetadataService<support::pattern::Pattern>> {
    let (stack, _) = stack(StackConfig::default());
    World::new(stack, Client::new(3, Habits::default()), Faults::NONE, 0)
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let mut world = clean_world();
    let mut ask = String::new();
    for n in [1, 3000, 0, 20_000, 5] {
        ask.push_str(&format!("GET /bytes/{n} HTTP/1.1\r\nHost: x\r\n\r\n"));
    }
    let talk = world.client.begin(40_000, ask.as_bytes());
    world.run(CLEAN_LIMIT, |world| responses(&world.client.talks[talk].received, &[]).len() == 5);
    let lengths: Vec<_> =
        responses(&world.client.talks[talk].received, &[]).iter().map(|a| a.body.len()).collect();
    assert_eq!(lengths, [1, 3000, 0, 20_000, 5]);
}

#[test]
fn a_flood_of_pipelined_requests_is_answered_in_full() {
    let mut world = clean_world();
    let ask = "GET /bytes/100 HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2000);
    let talk = world.client.begin(40_000, ask.as_bytes());
    world.run(CLEAN_LIMIT, |world| responses(&world.client.talks[talk].received, &[]).len() == 2000);
    assert_eq!(responses(&world.client.talks[talk].received, &[]).len(), 2000);
}

#[test]
fn one_connection_carries_a_hundred_requests() {
    let mut world = clean_world();
    let talk = world.client.begin(40_000, b"");
    for n in 0..100 {
        world.client.transmit(talk, format!("GET /bytes/{n} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let answered =
            |world: &mut World<_>| responses(&world.client.talks[talk].received, &[]).len() == n + 1;
        assert!(world.run(CLEAN_LIMIT, answered), "request {n}");
    }
    assert_eq!(world.stack.stats().accepted, 1);
}

#[test]
fn a_guest_that_closes_its_side_after_the_request_is_still_answered() {
    let mut world = clean_world();
    let talk =
        world.client.begin(40_000, format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
    world.client.close(talk);
    assert!(world.run(CLEAN_LIMIT, |world| world.client.talks[talk].ended));
    assert_eq!(responses(&world.client.talks[talk].received, &[])[0].body.len(), BODY);
    assert!(world.run(SETTLED, |world| world.stack.stats().ports == 0));
}

#[test]
fn a_reset_in_the_middle_of_an_answer_frees_the_connection_at_once() {
    let mut world = clean_world();
    let talk =
        world.client.begin(40_000, format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
    world.run(CLEAN_LIMIT, |world| world.client.talks[talk].received.len() > 8000);
    world.client.abort(talk);
    world.wait(Duration::from_millis(5));
    assert_eq!(world.stack.stats().connections, 0);
}

#[test]
fn a_hundred_and_twenty_connections_at_once_are_all_served() {
    let mut world = clean_world();
    for port in 0..120 {
        world.client.begin(40_000 + port, b"GET /bytes/9000 HTTP/1.0\r\n\r\n");
    }
    let all_ended = |world: &mut World<_>| world.client.talks.iter().all(|talk| talk.ended);
    assert!(world.run(CLEAN_LIMIT, all_ended));
    for talk in &world.client.talks {
        assert_eq!(responses(&talk.received, &[])[0].body, bytes(9000));
    }
}

#[test]
fn a_guest_that_stops_reading_is_reset_and_its_connection_freed() {
    let (stack, _) = stack(StackConfig::default());
    let habits = Habits { window: 2048, read: 1, read_pause: Duration::from_secs(3600), ..Habits::default() };
    let mut world = World::new(stack, Client::new(3, habits), Faults::NONE, 0);
    world.client.begin(40_000, format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
    assert!(world.run(Duration::from_secs(200), |world| world.stack.stats().stalled == 1));
    assert_eq!(world.stack.stats().connections, 0);
}

/// Fetches an answer. Returns the length of the longest frame sent meanwhile, and the time until the answer was whole.
fn fetch<S: Service, L: AckLedger>(world: &mut World<S, L>, port: u16, bytes: usize) -> (usize, Duration) {
    world.sent = Some(Vec::new());
    let start = world.now().mono;
    let request = format!("GET /bytes/{bytes} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let talk = world.client.begin(port, request.as_bytes());
    assert!(world.run(CLEAN_LIMIT, |world| world.client.talks[talk].ended), "port {port}");
    let answers = responses(&world.client.talks[talk].received, &[]);
    assert_eq!(answers[0].body.len(), bytes, "port {port}");
    let took = world.now().mono - start;
    world.client.close(talk);
    world.wait(Duration::from_secs(1));
    let longest = world.sent.take().unwrap_or_default().iter().map(Vec::len).max();
    (longest.unwrap_or(0), took)
}

#[test]
fn a_narrow_link_is_detected_once_and_not_by_each_connection() {
    const NARROW: Faults = Faults { longest: 1_464, ..Faults::NONE };
    const WHOLE: usize = 1_514;
    const SAFE: usize = 14 + 20 + 20 + 536;
    let (stack, _) = stack(StackConfig::default());
    let mut world = World::new(stack, Client::new(3, Habits::default()), NARROW, 1);
    let (longest, first) = fetch(&mut world, 40_000, BODY);
    assert_eq!(longest, WHOLE);
    assert!(first > Duration::from_millis(500), "two timeouts, not {first:?}");
    for port in 40_001..40_005 {
        let (longest, took) = fetch(&mut world, port, BODY);
        assert_eq!(longest, SAFE, "port {port}");
        assert!(took < first / 4, "port {port}: {took:?} after {first:?}");
        // This is longer than a port without connections is usually kept.
        world.wait(Duration::from_secs(40));
    }
    world.wait(NARROW_FOR);
    assert_eq!(world.stack.stats().ports, 0, "the path MTU expires");
    assert_eq!(fetch(&mut world, 40_009, BODY).0, WHOLE, "the path MTU is detected again");
    world.stack.forget(3);
    assert_eq!(fetch(&mut world, 40_010, BODY).0, WHOLE, "forgetting the slot forgets its path MTU");
}

#[test]
fn a_paused_guest_is_not_mistaken_for_one_behind_a_narrow_link() {
    let (stack, _) = stack(StackConfig::default());
    let mut world = World::new(stack, Client::new(3, Habits::default()), Faults::NONE, 1);
    fetch(&mut world, 40_000, BODY);
    let request = format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let talk = world.client.begin(40_001, request.as_bytes());
    world.run(CLEAN_LIMIT, |world| !world.client.talks[talk].received.is_empty());
    // Frames sent in this time wait for the guest, as they would in the ring of its tap.
    world.hold_down(Duration::from_secs(10));
    assert!(world.run(LOSSY_LIMIT, |world| world.client.talks[talk].ended));
    world.client.close(talk);
    world.wait(Duration::from_secs(1));
    assert_eq!(fetch(&mut world, 40_002, BODY).0, 1_514);
}

#[test]
fn segments_fit_the_mtu_of_the_guests_device_even_after_it_changes() {
    const HEADERS: usize = 14 + 20 + 20;
    let devices = GuestDevices::new(8);
    let (stack, _) = stack(StackConfig { guest_devices: devices.clone(), ..StackConfig::default() });
    let mut world = World::new(stack, Client::new(3, Habits::default()), Faults::NONE, 1);
    let cases = [(0, 1460), (1_400, 1360), (1_280, 1220), (1_450, 1400), (68, 536), (9_000, 1460)];
    for ((mtu, size), port) in cases.into_iter().zip(40_000..) {
        devices.set_mtu(3, mtu);
        let (longest, _) = fetch(&mut world, port, BODY);
        assert_eq!(longest, HEADERS + size, "an MTU of {mtu}");
    }
    assert_eq!(fetch(&mut world, 40_100, BODY).0, 1_514);
}
