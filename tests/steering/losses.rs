//! Steering counts each frame that a device refuses or has no room for, by device.

use super::node::{ALICE, BOB, Node, ask, config, port, receives, within};
use metadata_common::maps::ANSWER_LINK;
use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_datapath::afxdp::{Queues, SocketConfig};
use metadata_steer::{AnswerPath, HUB_QUEUES, PortLimits, SteerConfig, Steering};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::netns::Namespace;
use support::privileged;
use support::tap::{Tap, set_gro};

const PATIENCE: Duration = Duration::from_secs(10);
/// Length of a tap's ring, in frames.
const RING: u64 = 8;
/// Limits that admit every frame.
const UNLIMITED: PortLimits =
    PortLimits { frames_per_second: 0, burst: 0, connections_per_second: 0, connection_burst: 0 };

/// Attaches a tap with an empty ring of [`RING`] frames, which its guest does not read.
fn port_with_short_ring(node: &mut Node) -> Tap {
    // The kernel must put no frame of its own into the ring.
    node.ns.sysctl("ipv6/conf/default/disable_ipv6", "1").expect("IPv6 is off");
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.ns.ip(&format!("link set tap0 txqueuelen {RING}")).expect("a short ring");
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 3).expect("bound");
    node.steering.inspect_devices();
    tap
}

#[test]
fn an_answer_that_the_full_ring_of_a_tap_refuses_is_counted() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let _tap = port_with_short_ring(&mut node);
    for _ in 0..20 {
        node.answer(3);
    }
    node.expect_count(Verdict::HubDelivered, 20);
    node.steering.inspect_devices();
    assert_eq!(node.steering.losses().ports, 20 - RING);
}

#[test]
fn a_kernel_answer_that_the_full_ring_of_a_tap_refuses_is_counted() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start_with(&SteerConfig { answers: ANSWER_LINK, ..config() });
    let tap = port_with_short_ring(&mut node);
    for _ in 0..20 {
        ask(&tap, ALICE);
    }
    node.expect_count(Verdict::AnswerArp, 20);
    node.steering.inspect_devices();
    assert_eq!(node.steering.losses().ports, 20 - RING);
    // The count remains when the port is detached.
    node.steering.detach(&PortName::local("tap0")).expect("detached");
    node.steering.inspect_devices();
    assert_eq!(node.steering.losses().ports, 20 - RING);
}

/// Floods a hub from `senders` taps while a thread reads its sockets as a worker does.
///
/// Returns the numbers of frames sent, delivered to a socket, and counted as lost by the veth.
fn flood(queues: u32, senders: u32, frames: u64) -> (u64, u64, u64) {
    let mut node = Node::start_with(&SteerConfig { limits: UNLIMITED, queues, ..config() });
    let taps: Vec<Tap> = (0..senders)
        .map(|slot| {
            let (tap, name) = port(&node.ns, &format!("tap{slot}"), &node.ns);
            node.steering.attach(&name).expect("attached");
            node.steering.bind(&name, ALICE, slot).expect("bound");
            tap
        })
        .collect();
    let hub = node.steering.hubs().all()[0].clone();
    let bind = || Queues::bind(hub.inner_ifindex, hub.queues, &SocketConfig::default());
    let mut sockets = node.ns.run_in(bind).expect("sockets");
    for (queue, socket) in sockets.descriptors() {
        node.steering.maps_mut().register_socket(hub.number, queue, socket).expect("registered");
    }
    let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if sockets.receive(64, |_| ()) == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        });
        let senders: Vec<_> = taps
            .iter()
            .map(|tap| {
                scope.spawn(|| {
                    (0..frames).for_each(|_| ask(tap, ALICE));
                    sent.fetch_add(frames, Ordering::Relaxed);
                })
            })
            .collect();
        senders.into_iter().for_each(|sender| sender.join().expect("a sender"));
        done.store(true, Ordering::Relaxed);
        reader.join().expect("the reader");
    });
    let sent = sent.load(Ordering::Relaxed);
    let mut seen = (0, 0);
    // Some frames may still be in transit.
    let _ = within(PATIENCE, || {
        node.steering.inspect_devices();
        let delivered = node.steering.maps().counters().expect("counters").get(Verdict::SocketDelivered);
        seen = (delivered, node.steering.losses().hubs[0].veth_full);
        (seen.0 + seen.1 >= sent - sent / 1_000).then_some(())
    });
    let (delivered, lost) = seen;
    println!(
        "{queues} queues, {senders} senders: sent {sent}, delivered {delivered}, veth_full {lost}, {:?}",
        sockets.stats()
    );
    (sent, delivered, lost)
}

#[test]
fn a_storm_of_many_senders_loses_no_frame_before_the_sockets() {
    if !privileged::or_skip() {
        return;
    }
    let cpus = u32::try_from(std::thread::available_parallelism().map_or(1, usize::from)).unwrap_or(1);
    let (sent, delivered, lost) = flood(cpus.min(HUB_QUEUES), 2 * cpus, 50_000);
    assert_eq!((delivered, lost), (sent, 0));
}

#[test]
fn frames_that_a_full_veth_refuses_are_counted() {
    if !privileged::or_skip() {
        return;
    }
    let (sent, delivered, lost) = flood(1, 8, 100_000);
    // CPUs that count at the same time may lose a few counts.
    assert!(lost <= sent - delivered, "{lost} of {}", sent - delivered);
    assert!(10 * lost >= 8 * (sent - delivered), "{lost} of {}", sent - delivered);
}

/// A veth from the agent's namespace or `pod` to a new namespace, attached as a port with Alice bound as slot 3.
fn veth(node: &mut Node, pod: Option<&Namespace>) -> (Namespace, PortName) {
    let guest = Namespace::new("guest").expect("a namespace");
    let here = pod.unwrap_or(&node.ns);
    here.ip(&format!("link add veth0 type veth peer name eth0 netns {}", guest.name())).expect("a veth");
    here.ip("link set veth0 up").expect("up");
    guest.sysctl("ipv6/conf/eth0/disable_ipv6", "1").expect("IPv6 is off");
    guest.ip("link set eth0 up").expect("up");
    let name = PortName { ifname: "veth0".into(), netns: pod.map(|pod| pod.name().to_owned()) };
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 3).expect("bound");
    (guest, name)
}

fn changes(steering: &mut Steering) -> Vec<PortName> {
    within(PATIENCE, || Some(steering.inspect_devices()).filter(|changed| !changed.is_empty()))
        .expect("a change")
}

#[test]
fn a_veth_of_another_namespace_is_reached_only_while_its_peer_has_gro_on() {
    if !privileged::or_skip() {
        return;
    }
    let (mut node, pod) = (Node::start(), Namespace::new("pod").expect("a namespace"));
    let (guest, name) = veth(&mut node, Some(&pod));
    assert_eq!(node.steering.attachments().answer_path(&name), AnswerPath::None, "a bare veth");
    node.answer(3);
    node.expect_count(Verdict::HubDelivered, 1);
    node.steering.inspect_devices();
    assert_eq!(node.steering.losses().hubs[0].tap_dropped, 1, "a frame that cannot be redirected is counted");
    for (word, way) in [("on", AnswerPath::Redirect), ("off", AnswerPath::None), ("on", AnswerPath::Redirect)]
    {
        set_gro(&guest, "eth0", word == "on").expect("the guest may switch GRO");
        assert_eq!(changes(&mut node.steering), std::slice::from_ref(&name), "{word}");
        assert_eq!(node.steering.attachments().answer_path(&name), way, "{word}");
    }
}

/// The number of frames received on the guest's end of a veth.
fn arrived(guest: &Namespace) -> u64 {
    let read = || std::fs::read_to_string("/proc/thread-self/net/dev").expect("counters");
    let all = guest.run_in(read);
    let line = all.lines().find_map(|line| line.trim().strip_prefix("eth0:")).expect("the guest's end");
    line.split_whitespace().nth(1).and_then(|frames| frames.parse().ok()).expect("a count")
}

#[test]
fn a_veth_of_the_agents_namespace_is_reached_with_and_without_gro() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    node.ns.sysctl("ipv6/conf/default/disable_ipv6", "1").expect("IPv6 is off");
    let (guest, name) = veth(&mut node, None);
    let ways = [
        (None, AnswerPath::Classifier),
        (Some(true), AnswerPath::Redirect),
        (Some(false), AnswerPath::Classifier),
    ];
    for (frames, (gro, way)) in (1..).zip(ways) {
        if let Some(on) = gro {
            set_gro(&guest, "eth0", on).expect("the guest may switch GRO");
            assert_eq!(changes(&mut node.steering), std::slice::from_ref(&name), "{gro:?}");
        }
        assert_eq!(node.steering.attachments().answer_path(&name), way, "{gro:?}");
        node.answer(3);
        node.expect_count(Verdict::HubDelivered, frames);
        assert!(within(PATIENCE, || (arrived(&guest) == frames).then_some(())).is_some(), "{gro:?}");
    }
    assert_eq!(node.steering.losses().hubs[0].tap_dropped, 0);
}

#[test]
fn a_slot_moved_from_a_bare_veth_to_a_tap_gets_its_answers_there() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    node.ns.sysctl("ipv6/conf/default/disable_ipv6", "1").expect("IPv6 is off");
    let (guest, _) = veth(&mut node, None);
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, BOB, 3).expect("bound in place of the other");
    node.answer(3);
    assert!(receives(&tap, BOB));
    assert_eq!(arrived(&guest), 0);
}

#[test]
fn a_new_device_with_the_index_of_a_deleted_veth_gets_no_answer() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    node.ns.sysctl("ipv6/conf/default/disable_ipv6", "1").expect("IPv6 is off");
    let (_guest, name) = veth(&mut node, None);
    let ifindex = node.steering.attachments().ports().find(|(port, _)| **port == name).expect("attached").1;
    node.ns.ip("link del veth0").expect("the veth is deleted");
    let next = Namespace::new("next").expect("a namespace");
    let peer = format!("peer name eth0 netns {}", next.name());
    node.ns
        .ip(&format!("link add veth1 index {ifindex} type veth {peer}"))
        .expect("another veth of this index");
    node.ns.ip("link set veth1 up").expect("up");
    next.sysctl("ipv6/conf/eth0/disable_ipv6", "1").expect("IPv6 is off");
    next.ip("link set eth0 up").expect("up");
    node.answer(3);
    node.expect_count(Verdict::HubDropNoDevice, 1);
    assert_eq!(arrived(&next), 0);
}
