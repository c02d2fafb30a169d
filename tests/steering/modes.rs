//! XDP and the classifier reach the same verdicts, and a port switches between them without losing a frame.

use crate::node::{
    ALICE, BOB, Node, SERVED, ask, ask_for, config, port, receives, receives_nothing, start_in, within,
};
use metadata_common::mac::Mac;
use metadata_common::maps::MAX_STEERED;
use metadata_common::port::PortName;
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::ethernet;
use metadata_steer::{
    LOOKS_AT_ONCE, PortLimits, QUIET, SWITCHES_AT_ONCE, SteerConfig, SteerError, SteeringMode,
    SteeringProgram,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::frames::{self, GUEST, NEXT_HOP, SERVED_V4, SERVED_V6};
use support::netns::Namespace;
use support::privileged;
use support::tap::{Shape, Tap, VNET_HDR_LEN};

const MODES: [SteeringMode; 2] = [SteeringMode::Xdp, SteeringMode::Tcx];
/// Modes, each with whether the port is in another namespace than the agent.
const MODES_AND_PODS: [(SteeringMode, bool); 4] = [
    (SteeringMode::Xdp, false),
    (SteeringMode::Tcx, false),
    (SteeringMode::Xdp, true),
    (SteeringMode::Tcx, true),
];
const UNLIMITED: PortLimits =
    PortLimits { frames_per_second: 0, burst: 1, connections_per_second: 0, connection_burst: 1 };

fn by(mode: SteeringMode) -> SteerConfig {
    SteerConfig { mode, ..config() }
}

/// Two bridged taps. The first is an attached port with Alice bound as slot 0.
fn bridged(config: &SteerConfig) -> (Node, Tap, Tap, PortName) {
    let mut node = Node::start_with(config);
    let (alices, name) = port(&node.ns, "tap0", &node.ns);
    let (other, _) = port(&node.ns, "tap1", &node.ns);
    node.ns
        .ip_batch(
            "link add br0 type bridge\nlink set br0 up\nlink set tap0 master br0\nlink set tap1 master br0\n",
        )
        .expect("a bridge");
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    (node, alices, other, name)
}

#[test]
fn every_frame_of_the_table_gets_the_same_verdict_from_xdp_and_tcx() {
    if !privileged::or_skip() {
        return;
    }
    for (mode, in_a_pod) in MODES_AND_PODS {
        let config = SteerConfig {
            served: vec![SERVED_V4.into(), SERVED_V6.into()],
            arp_only: vec![NEXT_HOP],
            limits: UNLIMITED,
            ..by(mode)
        };
        let mut node = Node::start_with(&config);
        let pod = Namespace::new("pod").expect("a namespace");
        let (tap, name) = port(if in_a_pod { &pod } else { &node.ns }, "tap0", &node.ns);
        node.steering.attach(&name).expect("attached");
        node.steering.bind(&name, GUEST, 0).expect("bound");
        let mut judged = 0;
        for case in frames::cases() {
            let before = node.steering.maps().counters().expect("counters");
            assert!(tap.send(0, &case.frame).expect("the tap accepts a frame"), "{}", case.name);
            let after = node.steering.maps().counters().expect("counters");
            let moved: Vec<Verdict> = after
                .iter()
                .filter(|(verdict, frames)| before.get(*verdict) != *frames && !counts_delivery(*verdict))
                .map(|(verdict, _)| verdict)
                .collect();
            // The network stack drops a frame that ends within a VLAN tag before a classifier sees it, and a
            // classifier does not count ordinary frames.
            let uncounted = matches!(case.verdict, Verdict::PassTruncated | Verdict::PassIpv4);
            if moved.is_empty() && mode == SteeringMode::Tcx && uncounted {
                continue;
            }
            assert_eq!(moved, [case.verdict], "{mode:?}, {in_a_pod}: {}", case.name);
            judged += 1;
        }
        assert!(judged > 30, "{mode:?}: only {judged} frames were judged");
    }
}

fn counts_delivery(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::SocketDropAbsent | Verdict::SocketDelivered | Verdict::RingDelivered)
}

#[test]
fn both_programs_steer_only_the_bound_mac_and_answer_only_its_port() {
    if !privileged::or_skip() {
        return;
    }
    for mode in MODES {
        let (mut node, alices, bobs, name) = bridged(&by(mode));
        let bobs_name = PortName::local("tap1");
        node.steering.attach(&bobs_name).expect("attached");
        node.steering.bind(&bobs_name, BOB, 1).expect("bound");

        ask(&alices, BOB);
        node.expect_count(Verdict::DropUnknownMac, 1);
        ask(&bobs, ALICE);
        node.expect_count(Verdict::DropUnknownMac, 2);
        ask(&alices, ALICE);
        node.expect_count(Verdict::SteerArp, 1);
        node.expect_count(Verdict::SocketDropAbsent, 1);
        node.answer(0);
        assert!(receives(&alices, ALICE), "{mode:?}");
        assert!(receives_nothing(&bobs, Mac::BROADCAST), "{mode:?}: a request for the service left the tap");

        node.steering.unbind(0).expect("unbound");
        ask(&alices, ALICE);
        node.expect_count(Verdict::DropUnknownMac, 3);
        ask_for(&alices, ALICE, [10, 0, 2, 2]);
        assert!(receives(&bobs, Mac::BROADCAST), "{mode:?}: ordinary traffic must pass");

        node.steering.detach(&name).expect("detached");
        ask_for(&alices, ALICE, SERVED);
        assert!(receives(&bobs, Mac::BROADCAST), "{mode:?}: a detached port must pass all frames");
    }
}

#[test]
fn the_classifier_enforces_the_limit_of_each_port() {
    if !privileged::or_skip() {
        return;
    }
    let limits = PortLimits { frames_per_second: 1, burst: 8, ..UNLIMITED };
    let (node, alices, _, _) = bridged(&SteerConfig { limits, ..by(SteeringMode::Tcx) });
    (0..100).for_each(|_| ask(&alices, ALICE));
    let refused = node.steering.maps().counters().expect("counters").get(Verdict::DropOverLimit);
    assert!((2..=92).contains(&refused), "{refused} of 100 frames were refused; the burst is 8");
}

/// A TCP segment of `len` bytes for the service, after a virtio header with the other arguments as fields.
fn tcp_segment(len: usize, kind: u8, header: u16, segment: u16) -> Vec<u8> {
    let mut syn = frames::frame(&[], ethernet::IPV4, &frames::syn(SERVED_V4, 80));
    syn[6..12].copy_from_slice(&ALICE.0);
    syn.resize(len, 0);
    let datagram = u16::try_from(len - 14).expect("it fits IPv4").to_be_bytes();
    syn[16..18].copy_from_slice(&datagram);
    let mut frame = vec![u8::from(kind != 0), kind];
    for field in [header, segment, 34, 16] {
        frame.extend(field.to_le_bytes());
    }
    assert_eq!(frame.len(), VNET_HDR_LEN);
    frame.extend(syn);
    frame
}

#[test]
fn fragmented_and_oversized_frames_are_steered_or_dropped_but_never_pass() {
    if !privileged::or_skip() {
        return;
    }
    const TCP: u8 = 1;
    let most = MAX_STEERED as usize;
    // Each case: a frame (its length, GSO type, header length and segment size), the classifier's verdict, and the
    // number of frames that reach the hub.
    let cases = [
        ("whole", tcp_segment(1_514, 0, 0, 0), Verdict::SteerIpv4Tcp, 1),
        ("two segments", tcp_segment(2_000, TCP, 54, 1_448), Verdict::SteerIpv4Tcp, 2),
        ("the longest", tcp_segment(most, 0, 0, 0), Verdict::SteerIpv4Tcp, 1),
        ("one byte too long", tcp_segment(most + 1, 0, 0, 0), Verdict::DropOversize, 0),
        ("only its MACs in the first piece", tcp_segment(9_000, 0, 14, 0), Verdict::DropOversize, 0),
        ("60 KB of segments", tcp_segment(60_000, TCP, 54, 1_448), Verdict::DropOversize, 0),
        ("thousands of segments", tcp_segment(3_000, TCP, 54, 1), Verdict::DropOversize, 0),
    ];
    for (name, frame, verdict, reach) in cases {
        let mut node = Node::start_with(&by(SteeringMode::Tcx));
        let tap = Tap::create(&node.ns, "tap0", Shape::virtio()).expect("a tap");
        let (far, _) = port(&node.ns, "tap1", &node.ns);
        node.ns
            .ip_batch(
                "link set tap0 mtu 9000\nlink set tap0 up\nlink add br0 type bridge\nlink set br0 up\n\
                 link set tap0 master br0\nlink set tap1 master br0\n",
            )
            .expect("a bridge");
        let port = PortName::local("tap0");
        node.steering.attach(&port).expect("attached");
        node.steering.bind(&port, ALICE, 0).expect("bound");
        assert!(tap.send(0, &frame).unwrap_or_else(|error| panic!("{name}: {error}")), "{name}");
        node.expect_count(verdict, 1);
        node.expect_count(Verdict::SocketDropAbsent, reach);
        assert!(receives_nothing(&far, frames::GATEWAY), "{name}: the frame left the tap");
        let passed = node.steering.maps().counters().expect("counters");
        // The host's own frames do not arrive from this tap.
        let passed: u64 = passed.iter().filter(|(v, _)| v.fate() == Fate::Pass).map(|(_, n)| n).sum();
        assert_eq!(passed, 0, "{name}");
    }
}

#[test]
fn switching_under_load_loses_no_frame_and_leaks_none() {
    if !privileged::or_skip() {
        return;
    }
    const SWITCHES: u64 = 200;
    let (mut node, alices, other, name) =
        bridged(&SteerConfig { limits: UNLIMITED, ..by(SteeringMode::Auto) });
    let (stop, sent, arrived) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let mut leaked = false;
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let mut leaked = false;
            while !stop.load(Ordering::Relaxed) {
                ask(&alices, ALICE);
                ask_for(&alices, ALICE, [10, 0, 2, 2]);
                sent.fetch_add(1, Ordering::Relaxed);
                leaked |= drain(&other, &arrived);
            }
            leaked
        });
        let switched = (0..SWITCHES).all(|n| {
            let to = if n % 2 == 0 { SteeringProgram::Tcx } else { SteeringProgram::Xdp };
            // A child of another test may hold a copy of the closed link until it calls `execve`.
            within(Duration::from_secs(5), || node.steering.switch(&name, to).ok()).is_some()
        });
        stop.store(true, Ordering::Relaxed);
        leaked = guest.join().expect("the guest does not panic");
        assert!(switched, "a switch failed for five seconds");
    });
    let sent = sent.into_inner();
    let all = within(Duration::from_secs(5), || {
        leaked |= drain(&other, &arrived);
        (arrived.load(Ordering::Relaxed) >= sent).then_some(())
    });
    assert!(sent > SWITCHES, "only {sent} rounds in {SWITCHES} switches: too few");
    assert!(all.is_some(), "{} of {sent} ordinary frames arrived", arrived.load(Ordering::Relaxed));
    assert!(!leaked, "a request for the service reached a neighbour");
    node.expect_count(Verdict::SteerArp, sent);
    node.expect_count(Verdict::SocketDropAbsent, sent);
}

/// Counts the ordinary requests that arrived; true if a request for the service is among them.
fn drain(tap: &Tap, arrived: &AtomicU64) -> bool {
    let mut buffer = [0; 2_048];
    let mut leaked = false;
    while let Some(len) = tap.receive(0, &mut buffer).expect("the tap is there") {
        if !buffer[..len].starts_with(&Mac::BROADCAST.0) {
            continue;
        }
        match buffer.get(38..42) {
            Some([10, 0, 2, 2]) => _ = arrived.fetch_add(1, Ordering::Relaxed),
            Some(target) => leaked |= target == SERVED,
            None => {}
        }
    }
    leaked
}

#[test]
fn a_port_follows_its_guest_from_booting_to_quiet_and_back() {
    if !privileged::or_skip() {
        return;
    }
    let (mut node, alices, _, name) = bridged(&by(SteeringMode::Auto));
    let start = Instant::now();
    let second = Duration::from_secs(1);
    let mut look = |at: Duration| {
        node.steering.follow_guests(start + at);
        node.steering.attachments().steered_by(&name)
    };
    assert_eq!(look(Duration::ZERO), Some(SteeringProgram::Xdp));
    (0..100).for_each(|_| ask(&alices, ALICE));
    assert_eq!(look(second), Some(SteeringProgram::Xdp), "the guest has just sent requests");
    assert_eq!(look(QUIET), Some(SteeringProgram::Xdp));
    assert_eq!(look(QUIET + second), Some(SteeringProgram::Tcx));
    ask(&alices, ALICE);
    assert_eq!(look(QUIET * 3), Some(SteeringProgram::Tcx), "one request does not count as a boot");
    // A child of another test may hold a copy of the closed link until it calls `execve`.
    let has_gone = || !node.ns.ip("link show tap0").expect("the tap").contains("xdp");
    assert!(within(Duration::from_secs(5), || has_gone().then_some(())).is_some(), "XDP is still attached");
    (0..100).for_each(|_| ask(&alices, ALICE));
    assert_eq!(look(QUIET * 3 + second), Some(SteeringProgram::Xdp));
    assert_eq!(look(QUIET * 4 + second), Some(SteeringProgram::Tcx));
    node.expect_count(Verdict::SteerArp, 201);
    node.expect_count(Verdict::SocketDropAbsent, 201);
}

#[test]
fn quiet_ports_are_switched_a_few_at_a_time_until_all_are() {
    if !privileged::or_skip() {
        return;
    }
    const PORTS: usize = SWITCHES_AT_ONCE * 2 + 3;
    const { assert!(PORTS < LOOKS_AT_ONCE) };
    let mut node = Node::start_with(&by(SteeringMode::Auto));
    let ports: Vec<_> = (0..PORTS).map(|n| port(&node.ns, &format!("tap{n}"), &node.ns)).collect();
    for (_, name) in &ports {
        node.steering.attach(name).expect("attached");
    }
    let start = Instant::now();
    node.steering.follow_guests(start);
    let mut switched = |calls: u32| {
        node.steering.follow_guests(start + QUIET + Duration::from_secs(calls.into()));
        ports
            .iter()
            .filter(|(_, name)| node.steering.attachments().steered_by(name) == Some(SteeringProgram::Tcx))
            .count()
    };
    assert_eq!(switched(0), SWITCHES_AT_ONCE);
    assert_eq!(switched(1), SWITCHES_AT_ONCE * 2);
    assert_eq!(switched(2), PORTS);
    assert_eq!(switched(3), PORTS);
    assert_eq!(node.steering.attachments().ports_by_program(), (0, PORTS));
}

#[test]
fn a_port_with_another_agents_classifier_is_refused_by_name() {
    if !privileged::or_skip() {
        return;
    }
    let (node, _alices, _, name) = bridged(&by(SteeringMode::Tcx));
    for mode in [SteeringMode::Xdp, SteeringMode::Tcx, SteeringMode::Auto] {
        let other = SteerConfig { hub: "other".into(), ..by(mode) };
        let mut other = start_in(&node.ns, &other).expect("another hub name is free");
        let error = other.attach(&name).expect_err("the tap belongs to another agent");
        assert!(matches!(error, SteerError::Occupied { .. }), "{error}");
        assert!(error.to_string().contains("port_tcx"), "{error}");
    }
}
