//! XDP and the classifier reach the same verdicts, and a port switches between them without losing a frame.

use metadata_common::mac::Mac;
use metadata_common::maps::MAX_STEERED;
use metadata_common::port::PortName;
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::ethernet;
use metadata_steer::probe::{Feature, features, missing_helpers};
use metadata_steer::{
    DeviceLookup, LOOKS_AT_ONCE, PortLimits, QUIET, SWITCHES_AT_ONCE, SteerConfig, SteerError, Steering,
    SteeringMode, SteeringProgram,
};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags, set_capabilities, unshare_unsafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;
use support::frames::{GUEST, NEXT_HOP, SERVED_V4, SERVED_V6};
use support::netns::Namespace;
use support::tap::{Shape, Tap, VNET_HDR_LEN};
use support::{frames, privileged, variants};

use crate::node::{
    ALICE, BOB, Bridged, Node, SERVED, ask, ask_for, config, delete, pinned, port, receives,
    receives_nothing, start_in, within,
};

const MODES: [SteeringMode; 2] = [SteeringMode::Xdp, SteeringMode::Tcx];
/// Modes, each with whether the port is in a namespace other than the agent.
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

#[privileged::test]
fn every_frame_of_the_table_gets_the_same_verdict_from_xdp_and_tcx() {
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

#[privileged::test]
fn both_programs_steer_only_the_bound_mac_and_answer_only_its_port() {
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

#[privileged::test]
fn the_classifier_enforces_the_limit_of_each_port() {
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

#[privileged::test]
fn fragmented_and_oversized_frames_are_steered_or_dropped_but_never_pass() {
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

#[privileged::test]
fn switching_under_load_loses_no_frame_and_leaks_none() {
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

#[privileged::test]
fn a_port_follows_its_guest_from_booting_to_quiet_and_back() {
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

#[privileged::test]
fn quiet_ports_are_switched_a_few_at_a_time_until_all_are() {
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

#[privileged::test]
fn a_port_with_another_agents_classifier_is_refused_by_name() {
    let (node, _alices, _, name) = bridged(&by(SteeringMode::Tcx));
    for mode in [SteeringMode::Xdp, SteeringMode::Tcx, SteeringMode::Auto] {
        let other = SteerConfig { hub: "other".into(), ..by(mode) };
        let mut other = start_in(&node.ns, &other).expect("another hub name is free");
        let error = other.attach(&name).expect_err("the tap belongs to another agent");
        assert!(matches!(error, SteerError::Occupied { .. }), "{error}");
        assert!(error.to_string().contains("port_tcx"), "{error}");
    }
}

// What the agent learns by asking the kernel agrees with what the kernel then does.

/// The index of the loopback, the only device of a new namespace.
const LOOPBACK: u32 = 1;

fn has(feature: Feature) -> bool {
    let found = features().into_iter().find(|(of, _)| *of == feature).expect("each feature is listed").1;
    found.unwrap_or_else(|failure| panic!("{feature:?}: {failure}"))
}

#[privileged::test]
fn the_kernel_attaches_a_classifier_exactly_if_it_is_found_to_have_tcx() {
    let ns = Namespace::new("features").expect("a namespace");
    let attached = ns.run_in(|| variants::attach_empty(LOOPBACK).map(drop));
    assert_eq!(has(Feature::Tcx), attached.is_ok(), "{attached:?}");
}

#[privileged::test]
fn another_classifier_on_the_loopback_does_not_change_the_answer() {
    let ns = Namespace::new("features").expect("a namespace");
    ns.run_in(|| {
        let before = has(Feature::Tcx);
        let _link = variants::attach_empty(LOOPBACK).ok();
        assert_eq!(has(Feature::Tcx), before);
    });
}

#[privileged::test]
fn steering_uses_what_the_kernel_is_found_to_have() {
    let lacking: Vec<_> = features().into_iter().filter(|(_, answer)| *answer != Ok(true)).collect();
    let mut node = Node::start_with(&SteerConfig { mode: SteeringMode::Auto, ..config() });
    assert_eq!(node.steering.hubs_mut().take_long_tap(0).is_some(), has(Feature::Tcx));
    assert_eq!(node.steering.hubs_mut().take_ring(0).is_some(), has(Feature::Tcx));
    let (_tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    let switched = node.steering.switch(&name, SteeringProgram::Tcx);
    assert_eq!(switched.is_ok(), has(Feature::Tcx), "{switched:?}");
    // It has started, so nothing is missing for which there is no substitute.
    assert!(lacking.iter().all(|(feature, _)| feature.words().without.is_some()), "{lacking:?}");
    assert_eq!(missing_helpers(), Ok(Vec::new()));
}

#[privileged::test]
#[expect(unsafe_code, reason = "a thread gets descriptors of its own by unshare(2), which has no safe form")]
fn asking_takes_two_capabilities_and_leaves_nothing_behind() {
    let ns = Namespace::new("features").expect("a namespace");
    let devices = ns.links().expect("a list of devices");
    ns.run_in(|| {
        // SAFETY: this thread uses no descriptor that another thread opens or closes from now on.
        unsafe { unshare_unsafe(UnshareFlags::FILES) }.expect("descriptors of this thread alone");
        let open = || std::fs::read_dir("/proc/thread-self/fd").expect("a list of descriptors").count();
        let before = open();
        let least = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
        let sets = CapabilitySets { effective: least, permitted: least, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets).expect("this thread gives up its other capabilities");
        for (feature, answer) in features() {
            match answer {
                // An AF_XDP socket needs CAP_NET_RAW, and a namespace to attach in CAP_SYS_ADMIN.
                Err(failure) if failure.is_refusal() => {
                    let may = [Feature::Socket, Feature::Link, Feature::LinkUpdate];
                    assert!(may.contains(&feature), "{feature:?}: {failure}");
                }
                answer => assert!(answer.is_ok(), "{feature:?}: {answer:?}"),
            }
        }
        assert_eq!(missing_helpers(), Ok(Vec::new()));
        assert_eq!(open(), before);
    });
    assert_eq!(ns.links().expect("a list of devices"), devices);
}

// The number of a namespace is free only after it is proven that no program sends frames with it.

/// A pod with a tap. The first tap of each pod has the same interface index.
struct Pod {
    _ns: Namespace,
    tap: Tap,
    port: PortName,
}

fn pod(node: &Namespace) -> Pod {
    let ns = Namespace::new("pod").expect("a namespace");
    let (tap, port) = port(&ns, "tap0", node);
    Pod { _ns: ns, tap, port }
}

/// The number of the namespace in which the guest with this slot is bound, and its interface index.
fn place(steering: &Steering, slot: u32) -> (u32, u32) {
    let bound = steering.identities().into_iter().find(|bound| bound.slot == slot).expect("bound");
    (bound.netns, bound.ifindex)
}

#[privileged::test]
fn a_namespace_gets_no_number_whose_former_pin_could_not_be_removed() {
    let bpffs = Bpffs::mount().expect("a bpffs");
    let mut node = Node::start_with(&pinned(&bpffs));
    let (former, next) = (pod(&node.ns), pod(&node.ns));
    node.steering.attach(&former.port).expect("attached");
    node.steering.bind(&former.port, ALICE, 0).expect("bound");
    ask(&former.tap, ALICE);
    node.expect_count(Verdict::SteerArp, 1);
    let (number, ifindex) = place(&node.steering, 0);

    bpffs.set_read_only(true).expect("read-only");
    node.steering.detach(&former.port).expect("detached");
    bpffs.set_read_only(false).expect("writable");
    node.steering.attach(&next.port).expect("attached");
    node.steering.bind(&next.port, ALICE, 1).expect("bound");
    let (other, same) = place(&node.steering, 1);
    assert_eq!(same, ifindex, "the taps must have one index, or the test shows nothing");
    assert_ne!(other, number, "the pin of the former port is still there");

    // The former guest sends with the MAC of the next one.
    ask(&former.tap, ALICE);
    ask(&next.tap, BOB);
    node.expect_count(Verdict::DropUnknownMac, 1);
    node.expect_count(Verdict::SteerArp, 1);
    ask(&next.tap, ALICE);
    node.expect_count(Verdict::SteerArp, 2);
    assert_eq!(node.steering.attachments().retired(), 1);
}

#[privileged::test]
fn a_number_stays_taken_across_a_restart_while_its_pin_is_there() {
    let mut node = Bridged::start();
    let former = pod(&node.ns);
    let steering = node.steering.as_mut().expect("it runs");
    steering.attach(&former.port).expect("attached");
    steering.bind(&former.port, ALICE, 0).expect("bound");
    let (number, ifindex) = place(steering, 0);
    node.bpffs.set_read_only(true).expect("read-only");
    steering.detach(&former.port).expect("detached");
    node.bpffs.set_read_only(false).expect("writable");
    node.end();

    let mut steering = start_in(&node.ns, &pinned(&node.bpffs)).expect("the next agent starts");
    let next = pod(&node.ns);
    steering.attach(&next.port).expect("attached");
    steering.bind(&next.port, ALICE, 0).expect("bound");
    let (other, same) = place(&steering, 0);
    assert_eq!(same, ifindex, "the taps must have one index, or the test shows nothing");
    assert_ne!(other, number, "the pin of the former port is still there");
    let before = steering.maps().counters().expect("counters").get(Verdict::SteerArp);
    ask(&former.tap, ALICE);
    ask(&next.tap, BOB);
    assert_eq!(steering.maps().counters().expect("counters").get(Verdict::SteerArp), before);
    // Nobody names the former port, so its pin goes, and with it the last trace of the number.
    steering.release_inherited([]).expect("released");
    assert!(node.bpffs.port_links().iter().all(|link| !link.starts_with(&format!("port-{number}-"))));
}

#[privileged::test]
fn a_number_is_used_again_once_its_program_is_off() {
    let bpffs = Bpffs::mount().expect("a bpffs");
    let mut node = Node::start_with(&pinned(&bpffs));
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let pod = pod(&node.ns);
        node.steering.attach(&pod.port).expect("attached");
        node.steering.bind(&pod.port, ALICE, 0).expect("bound");
        numbers.push(place(&node.steering, 0).0);
        node.steering.detach(&pod.port).expect("detached");
        ask(&pod.tap, ALICE);
        node.expect_count(Verdict::SteerArp, 0);
    }
    assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
    assert_eq!(node.steering.attachments().retired(), 0);
}

// Port and MAC identify a guest, in whichever namespace the port is.

#[privileged::test]
fn a_bound_guest_reaches_the_hub_and_its_answer_reaches_it() {
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 3).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SteerArp, 1);
    // There is no AF_XDP socket yet: the frame reached only the inner end of the hub's veth.
    node.expect_count(Verdict::SocketDropAbsent, 1);
    node.answer(3);
    assert!(receives(&tap, ALICE), "the answer is addressed to the guest's own MAC");
    node.expect_count(Verdict::HubDelivered, 1);
}

#[privileged::test]
fn a_frame_for_a_registered_socket_counts_as_delivered() {
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    // The socket is bound to no queue and receives nothing, but it is a live entry of the map.
    let socket = node.ns.run_in(|| {
        use rustix::net::{AddressFamily, SocketType, socket};
        socket(AddressFamily::XDP, SocketType::RAW, None).expect("an AF_XDP socket")
    });
    let socket = std::os::fd::AsFd::as_fd(&socket);
    node.steering.maps_mut().register_socket(0, 0, socket).expect("registered");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SocketDelivered, 1);
    node.expect_count(Verdict::SocketDropAbsent, 0);
}

#[privileged::test]
fn a_port_in_another_namespace_is_served_like_a_local_one() {
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    let (tap, name) = port(&pod, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SocketDropAbsent, 1);
    node.answer(0);
    assert!(receives(&tap, ALICE));
}

#[privileged::test]
fn ports_of_equal_index_in_two_namespaces_are_distinct() {
    let mut node = Node::start();
    let pods = [0, 1].map(|_| Namespace::new("pod").expect("a namespace"));
    let ports = pods.each_ref().map(|pod| port(pod, "tap0", &node.ns));
    let indexes = ports.each_ref().map(|(_, name)| metadata_steer::exists(name).expect("a look-up"));
    assert!(indexes[0].is_some() && indexes[0] == indexes[1], "the test needs equal indexes: {indexes:?}");
    let [(first, first_name), (second, second_name)] = &ports;
    for name in [first_name, second_name] {
        node.steering.attach(name).expect("attached");
    }
    node.steering.bind(first_name, ALICE, 1).expect("bound");

    // The same MAC on the same index in the other namespace is unknown.
    ask(second, ALICE);
    node.expect_count(Verdict::DropUnknownMac, 1);
    ask(first, ALICE);
    node.expect_count(Verdict::SteerArp, 1);

    node.steering.bind(second_name, ALICE, 2).expect("bound");
    for (slot, hit, missed) in [(1, first, second), (2, second, first)] {
        node.answer(slot);
        assert!(receives(hit, ALICE), "slot {slot}");
        assert!(receives_nothing(missed, ALICE), "slot {slot} went to the other guest");
    }
}

#[privileged::test]
fn an_unregistered_mac_is_dropped_on_every_port() {
    let mut node = Node::start();
    let ports = ["tap0", "tap1"].map(|ifname| port(&node.ns, ifname, &node.ns));
    for ((_, name), (mac, slot)) in ports.iter().zip([(ALICE, 0), (BOB, 1)]) {
        node.steering.attach(name).expect("attached");
        node.steering.bind(name, mac, slot).expect("bound");
    }
    let [(alices, _), (bobs, _)] = &ports;
    ask(alices, BOB);
    ask(bobs, ALICE);
    node.expect_count(Verdict::DropUnknownMac, 2);
    node.expect_count(Verdict::SteerArp, 0);
}

#[privileged::test]
fn a_slot_bound_to_another_guest_no_longer_serves_the_first() {
    let mut node = Node::start();
    let (alices, alices_name) = port(&node.ns, "tap0", &node.ns);
    let (bobs, bobs_name) = port(&node.ns, "tap1", &node.ns);
    for name in [&alices_name, &bobs_name] {
        node.steering.attach(name).expect("attached");
    }
    node.steering.bind(&alices_name, ALICE, 7).expect("bound");
    node.steering.bind(&bobs_name, BOB, 7).expect("bound again");
    ask(&alices, ALICE);
    node.expect_count(Verdict::DropUnknownMac, 1);
    ask(&bobs, BOB);
    node.expect_count(Verdict::SteerArp, 1);
    node.answer(7);
    assert!(receives(&bobs, BOB));
    assert!(receives_nothing(&alices, ALICE));
}

#[privileged::test]
fn a_guest_bound_to_another_slot_frees_its_first_slot() {
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 1).expect("bound");
    node.steering.bind(&name, ALICE, 2).expect("bound again");
    node.answer(1);
    node.expect_count(Verdict::HubDropNoGuest, 1);
    node.answer(2);
    assert!(receives(&tap, ALICE));
}

#[privileged::test]
fn frames_from_and_answers_to_an_unbound_slot_are_dropped() {
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    node.steering.unbind(0).expect("unbound");
    node.steering.unbind(0).expect("unbound twice is no error");
    ask(&tap, ALICE);
    node.expect_count(Verdict::DropUnknownMac, 1);
    node.answer(0);
    node.expect_count(Verdict::HubDropNoGuest, 1);
    assert!(receives_nothing(&tap, ALICE));
}

#[privileged::test]
fn ordinary_frames_pass_between_ports() {
    let mut node = Node::start();
    let ports = ["tap0", "tap1"].map(|ifname| port(&node.ns, ifname, &node.ns));
    node.ns.ip_batch("link add br0 type bridge\nlink set br0 up\n").expect("a bridge");
    for ((_, name), slot) in ports.iter().zip(0..) {
        node.ns.ip(&format!("link set {} master br0", name.ifname)).expect("enslaved");
        node.steering.attach(name).expect("attached");
        node.steering.bind(name, ALICE, slot).expect("bound");
    }
    let [(from, _), (to, _)] = &ports;
    ask_for(from, ALICE, [10, 0, 2, 2]);
    assert!(receives(to, Mac::BROADCAST), "an ordinary broadcast must cross the bridge");
    node.expect_count(Verdict::PassArp, 1);

    ask_for(from, ALICE, SERVED);
    node.expect_count(Verdict::SteerArp, 1);
    assert!(receives_nothing(to, Mac::BROADCAST), "a request for the service does not cross it");
}

#[privileged::test]
fn namespaces_are_distinguished_and_their_numbers_are_reused() {
    let mut node = Node::start();
    node.steering.prepare_for_namespaces().expect("a program");
    for turn in 1..=2 {
        let pods = [0, 1].map(|_| Namespace::new("pod").expect("a namespace"));
        let [(first, first_name), (second, second_name)] =
            pods.each_ref().map(|pod| port(pod, "tap0", &node.ns));
        for name in [&first_name, &second_name] {
            node.steering.attach(name).expect("attached");
        }
        node.steering.bind(&first_name, ALICE, 1).expect("bound");
        ask(&second, ALICE);
        node.expect_count(Verdict::DropUnknownMac, turn);
        ask(&first, ALICE);
        node.expect_count(Verdict::SteerArp, turn);
        node.answer(1);
        assert!(receives(&first, ALICE) && receives_nothing(&second, ALICE));
        for name in [&first_name, &second_name] {
            node.steering.detach(name).expect("detached");
        }
    }
}

#[privileged::test]
fn identities_are_bound_before_a_prepared_port_has_a_program() {
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    for ns in [node.ns.name(), pod.name()].map(|name| Namespace::open(name).expect("the namespace")) {
        let before = node.steering.maps().counters().expect("counters").get(Verdict::SteerArp);
        let (tap, name) = port(&ns, "tap0", &node.ns);
        assert!(node.steering.prepare(&name).expect("prepared"));
        assert!(!node.steering.prepare(&name).expect("it is known"), "once is enough");
        let found = node.ns.run_in(|| node.steering.attachments().find(&name).ok());
        assert_eq!(found, Some(DeviceLookup::Other), "no program is attached");
        node.steering.bind(&name, ALICE, 0).expect("bound");
        ask(&tap, ALICE);
        node.steering.attach(&name).expect("attached");
        assert_eq!(node.steering.attachments().bound_on(&name), [(ALICE, 0)]);
        ask(&tap, ALICE);
        node.expect_count(Verdict::SteerArp, before + 1);
        node.expect_count(Verdict::DropUnknownMac, 0);
        node.steering.detach(&name).expect("detached");
        assert!(node.steering.prepare(&name).expect("prepared"));
        node.steering.bind(&name, ALICE, 0).expect("bound");
        node.steering.detach(&name).expect("given up");
        assert_eq!(node.steering.identities(), []);
        delete(tap, &ns);
    }
}
