//! Quiet guests in namespaces other than the agent's: XDP is detached, and a ring carries their frames to the worker.

use crate::node::{
    ALICE, BOB, Node, SERVED, ask, ask_for, config, port, receives, receives_nothing, start_in, within,
};
use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_STEERED, RING_BYTES, RING_FRESH, RING_RECORDS};
use metadata_common::port::PortName;
use metadata_common::stamp::stamp;
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;
use metadata_datapath::link::FrameSource as _;
use metadata_steer::{PortLimits, QUIET, Ring, SteerConfig, Steering, SteeringMode, SteeringProgram};
use std::time::{Duration, Instant};
use support::frames::{self, SERVED_V4};
use support::netns::Namespace;
use support::privileged;
use support::tap::{Shape, Tap};

/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A pod with two bridged taps. The first is an attached port with Alice bound as slot 0.
struct Pod {
    alices: Tap,
    other: Tap,
    name: PortName,
    ns: Namespace,
}

impl Pod {
    fn new(steering: &mut Steering, home: &Namespace) -> Self {
        let ns = Namespace::new("pod").expect("a namespace");
        let (alices, name) = port(&ns, "tap0", home);
        let (other, _) = port(&ns, "tap1", home);
        ns.ip_batch(
            "link add br0 type bridge\nlink set br0 up\nlink set tap0 master br0\nlink set tap1 master br0\n",
        )
        .expect("a bridge");
        steering.attach(&name).expect("attached");
        steering.bind(&name, ALICE, 0).expect("bound");
        Self { alices, other, name, ns }
    }

    fn has_xdp(&self) -> bool {
        self.ns.ip("link show tap0").expect("the tap").contains("xdp")
    }

    /// Waits until XDP is detached: a child of another test may hold a copy of the closed link until it calls `execve`.
    fn is_off_xdp(&self) -> bool {
        within(PATIENCE, || (!self.has_xdp()).then_some(())).is_some()
    }
}

/// Takes all frames out of a ring.
fn frames_in(ring: &mut Ring) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    ring.receive(usize::MAX, |group| frames.extend(group.iter().map(|frame| frame.to_vec())));
    frames
}

fn count(node: &Node, verdict: Verdict) -> u64 {
    node.steering.maps().counters().expect("counters").get(verdict)
}

fn steered_by(mode: SteeringMode, limits: PortLimits) -> SteerConfig {
    SteerConfig { mode, limits, ..config() }
}

#[privileged::test]
fn xdp_is_detached_from_a_quiet_guest_in_a_pod_and_attached_when_it_is_active() {
    let mut node = Node::start_with(&steered_by(SteeringMode::Auto, PortLimits::default()));
    let pod = Pod::new(&mut node.steering, &node.ns);
    let mut ring = node.steering.hubs_mut().take_ring(0).expect("this kernel has rings");
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let look = |node: &mut Node, at: Duration| {
        node.steering.follow_guests(start + at);
        node.steering.attachments().steered_by(&pod.name)
    };
    assert_eq!(look(&mut node, Duration::ZERO), Some(SteeringProgram::Xdp));
    assert!(pod.has_xdp());
    assert_eq!(look(&mut node, QUIET), Some(SteeringProgram::Tcx));
    assert!(pod.is_off_xdp(), "XDP is still attached");

    ask(&pod.alices, ALICE);
    node.expect_count(Verdict::RingDelivered, 1);
    let [frame] = &frames_in(&mut ring)[..] else { panic!("one frame") };
    assert_eq!(frame.len(), 42, "the frame must have its original length");
    assert_eq!(frame[6..12], stamp(0).0, "the source must be the stamp");
    node.answer(0);
    assert!(receives(&pod.alices, ALICE), "the answer must arrive through the hub");
    assert!(receives_nothing(&pod.other, Mac::BROADCAST), "a request for the service left the tap");
    ask_for(&pod.alices, ALICE, [10, 0, 2, 2]);
    assert!(receives(&pod.other, Mac::BROADCAST), "ordinary traffic must pass");
    assert_eq!(
        look(&mut node, QUIET * 2),
        Some(SteeringProgram::Tcx),
        "one request does not count as a boot"
    );

    (0..100).for_each(|_| ask(&pod.alices, ALICE));
    assert_eq!(look(&mut node, QUIET * 2 + second), Some(SteeringProgram::Xdp));
    assert!(pod.has_xdp());
    ask(&pod.alices, ALICE);
    node.expect_count(Verdict::SocketDropAbsent, 1);
    node.expect_count(Verdict::RingDelivered, 101);
    assert_eq!(look(&mut node, QUIET * 3 + second), Some(SteeringProgram::Tcx), "the guest is quiet again");
}

#[privileged::test]
fn only_the_bound_mac_of_a_port_in_a_pod_is_steered() {
    let mut node = Node::start_with(&steered_by(SteeringMode::Tcx, PortLimits::default()));
    // Both taps have the same index: only their namespaces distinguish the guests.
    let (alice, bob) = (Pod::new(&mut node.steering, &node.ns), Pod::new(&mut node.steering, &node.ns));
    node.steering.bind(&bob.name, BOB, 1).expect("bound");
    node.steering.unbind(0).expect("unbound");
    node.steering.bind(&alice.name, ALICE, 0).expect("bound");
    let mut ring = node.steering.hubs_mut().take_ring(0).expect("this kernel has rings");
    ask(&alice.alices, BOB);
    ask(&bob.alices, ALICE);
    ask(&alice.alices, Mac::BROADCAST);
    node.expect_count(Verdict::DropUnknownMac, 3);
    ask(&alice.alices, ALICE);
    ask(&bob.alices, BOB);
    node.expect_count(Verdict::RingDelivered, 2);
    let senders: Vec<_> = frames_in(&mut ring).iter().map(|frame| frame[6..12].to_vec()).collect();
    assert_eq!(senders, [stamp(0).0, stamp(1).0]);
    for pod in [&alice, &bob] {
        assert!(receives_nothing(&pod.other, Mac::BROADCAST), "a request for the service left the tap");
    }
    node.steering.unbind(0).expect("unbound");
    ask(&alice.alices, ALICE);
    node.expect_count(Verdict::DropUnknownMac, 4);
    assert!(frames_in(&mut ring).is_empty());
}

/// A TCP frame of `len` bytes for the service.
fn frame_of(len: usize) -> Vec<u8> {
    let mut frame = frames::frame(&[], ethernet::IPV4, &frames::syn(SERVED_V4, 80));
    frame[6..12].copy_from_slice(&ALICE.0);
    frame.resize(len, 0xa5);
    let datagram = u16::try_from(len - ethernet::HEADER).expect("it fits IPv4").to_be_bytes();
    frame[16..18].copy_from_slice(&datagram);
    frame
}

#[privileged::test]
fn frames_of_every_length_arrive_whole_or_are_counted_as_dropped() {
    let unlimited = PortLimits { frames_per_second: 0, connections_per_second: 0, ..PortLimits::default() };
    let mut node = Node::start_with(&steered_by(SteeringMode::Tcx, unlimited));
    let pod = Namespace::new("pod").expect("a namespace");
    let tap = Tap::create(&pod, "tap0", Shape::default()).expect("a tap");
    pod.ip("link set tap0 mtu 9000 up").expect("up");
    let name = PortName { ifname: "tap0".into(), netns: Some(pod.name().to_owned()) };
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    let mut ring = node.steering.hubs_mut().take_ring(0).expect("this kernel has rings");
    let most = MAX_STEERED as usize;
    let edges = RING_RECORDS.iter().flat_map(|record| [record - 9, record - 8, record - 7]);
    let lengths =
        [60, 74, 1_514, 2_000, most, most + 1, 9_000].into_iter().chain(edges.filter(|at| *at <= most));
    for length in lengths {
        let frame = frame_of(length);
        assert!(tap.send(0, &frame).expect("the tap accepts a frame"), "{length}");
        let mut stamped = frame;
        stamped[6..12].copy_from_slice(&stamp(0).0);
        let expected: &[Vec<u8>] = if length <= most { &[stamped] } else { &[] };
        assert!(frames_in(&mut ring) == expected, "{length}");
    }
    node.expect_count(Verdict::DropOversize, 2);
}

#[privileged::test]
fn a_full_ring_counts_drops_and_reserves_half_for_guests_that_send_little() {
    let mut node = Node::start_with(&steered_by(
        SteeringMode::Tcx,
        PortLimits { burst: 65_536, ..PortLimits::default() },
    ));
    let (greedy, modest) = (Pod::new(&mut node.steering, &node.ns), Pod::new(&mut node.steering, &node.ns));
    node.steering.unbind(0).expect("unbound");
    node.steering.bind(&greedy.name, ALICE, 0).expect("bound");
    node.steering.bind(&modest.name, BOB, 1).expect("bound");
    let mut ring = node.steering.hubs_mut().take_ring(0).expect("this kernel has rings");
    // The kernel adds a header of eight bytes to each record.
    let records = u64::from(RING_BYTES) / (RING_RECORDS[0] as u64 + 8);
    (0..records * 2).for_each(|_| ask(&greedy.alices, ALICE));
    let (taken, dropped) = (count(&node, Verdict::RingDelivered), count(&node, Verdict::RingDropFull));
    assert_eq!(taken + dropped, records * 2, "each frame is delivered or dropped");
    assert!(taken <= records / 2 + RING_FRESH + 1, "one guest occupies {taken} of {records} records");
    ask(&modest.alices, BOB);
    node.expect_count(Verdict::RingDelivered, taken + 1);
    assert_eq!(frames_in(&mut ring).len() as u64, taken + 1);

    ask(&greedy.alices, ALICE);
    node.expect_count(Verdict::RingDelivered, taken + 2);
    // Without limits nothing shows which guest sends much, so one guest may fill the whole ring.
    let unlimited = PortLimits { frames_per_second: 0, connections_per_second: 0, ..PortLimits::default() };
    node.steering.set_limits(unlimited).expect("set");
    (0..records * 2).for_each(|_| ask(&greedy.alices, ALICE));
    let all = frames_in(&mut ring).len() as u64;
    assert!((records - 1..=records + 1).contains(&all), "{all} of {records} records");
    ask(&greedy.alices, ALICE);
    assert_eq!(frames_in(&mut ring).len(), 1, "an emptied ring must accept frames again");
}

#[privileged::test]
fn the_next_agent_inherits_and_switches_ports_in_a_pod() {
    let bpffs = support::bpffs::Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    let config = SteerConfig { mode: SteeringMode::Auto, pins: Some(bpffs.pins()), ..config() };
    let mut first = start_in(&ns, &config).expect("steering starts");
    let pod = Pod::new(&mut first, &ns);
    let start = Instant::now();
    first.follow_guests(start);
    first.follow_guests(start + QUIET);
    assert_eq!(first.attachments().steered_by(&pod.name), Some(SteeringProgram::Tcx));
    assert!(pod.is_off_xdp(), "XDP is still attached");
    ask(&pod.alices, ALICE);
    assert_eq!(first.maps().counters().expect("counters").get(Verdict::RingDelivered), 1);
    drop(first);

    // No agent runs: the port stays closed, and ordinary frames pass.
    ask(&pod.alices, ALICE);
    assert!(receives_nothing(&pod.other, Mac::BROADCAST), "a request for the service left the tap");
    ask_for(&pod.alices, ALICE, [10, 0, 2, 2]);
    assert!(receives(&pod.other, Mac::BROADCAST), "ordinary traffic must pass");

    let mut steering = start_in(&ns, &config).expect("steering starts");
    let mut ring = steering.hubs_mut().take_ring(0).expect("this kernel has rings");
    assert!(frames_in(&mut ring).is_empty(), "the ring is new with each agent");
    ask(&pod.alices, ALICE);
    assert_eq!(frames_in(&mut ring).len(), 1, "a frame is steered before the port is attached");
    steering.attach(&pod.name).expect("attached");
    assert_eq!(steering.attachments().steered_by(&pod.name), Some(SteeringProgram::Tcx));
    steering.bind(&pod.name, ALICE, 0).expect("bound");
    ask(&pod.alices, ALICE);
    let [frame] = &frames_in(&mut ring)[..] else { panic!("one frame") };
    assert_eq!(frame[6..12], stamp(0).0);
    assert_eq!(frame[38..42], SERVED);
    steering.switch(&pod.name, SteeringProgram::Xdp).expect("switched");
    assert!(pod.has_xdp());
}
