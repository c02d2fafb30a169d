//! An impossible operation is refused with a reason and changes nothing.

use crate::node::{ALICE, BOB, Node, ask, config, port, start_in};
use metadata_common::mac::Mac;
use metadata_common::maps::MAX_SLOTS;
use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_links::error::LinkError;
use metadata_steer::{PortLimits, SteerConfig, SteerError};
use support::netns::Namespace;
use support::privileged;

#[test]
fn a_second_agent_of_the_same_hub_name_is_refused_and_the_first_continues() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let error = start_in(&node.ns, &config()).err().expect("the hub name is in use");
    assert!(matches!(error, SteerError::Link(LinkError::HubInUse { .. })), "{error}");
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SocketDropAbsent, 1);
}

#[test]
fn a_port_of_another_agent_is_refused_by_name() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    let other = SteerConfig { hub: "other".into(), ..config() };
    let mut other = start_in(&node.ns, &other).expect("another hub name is free");
    let error = other.attach(&name).expect_err("the tap carries a program");
    assert!(matches!(error, SteerError::Occupied { .. }), "{error}");
    assert!(error.to_string().contains("`port`") && error.to_string().contains("tap0"), "{error}");
    assert_eq!(other.attachments().ports().count(), 0);

    node.steering.bind(&name, ALICE, 0).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SteerArp, 1);
    node.steering.detach(&name).expect("detached");
    other.attach(&name).expect("attached once it is free");
}

#[test]
fn a_foreign_device_with_a_hubs_name_is_not_touched() {
    if !privileged::or_skip() {
        return;
    }
    for device in ["imds-out", "imds-in"] {
        let ns = Namespace::new("steer").expect("a namespace");
        ns.ip(&format!("link add {device} type bridge")).expect("a bridge");
        let error = start_in(&ns, &config()).err().expect("the name is taken");
        assert!(error.to_string().contains("bridge"), "{error}");
        let links = ns.ip("-o link").expect("the list of links");
        assert_eq!(links.matches("imds").count(), 1, "{links}");
    }
}

#[test]
fn attaching_a_port_under_a_second_name_of_its_namespace_is_refused() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    let (_tap, by_name) = port(&pod, "tap0", &node.ns);
    let by_path = PortName { netns: Some(pod.path().display().to_string()), ..by_name.clone() };
    node.steering.attach(&by_name).expect("attached");
    let error = node.steering.attach(&by_path).expect_err("it is the same device");
    assert!(matches!(&error, SteerError::SamePort { other, .. } if *other == by_name), "{error}");
    assert_eq!(node.steering.attachments().ports().count(), 1);
}

#[test]
fn an_impossible_binding_is_refused() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let (_tap, name) = port(&node.ns, "tap0", &node.ns);
    let error = node.steering.bind(&name, ALICE, 0).expect_err("not attached yet");
    assert!(matches!(error, SteerError::NotAttached { .. }), "{error}");
    node.steering.attach(&name).expect("attached");
    let error = node.steering.bind(&name, Mac::BROADCAST, 0).expect_err("a group address");
    assert!(matches!(error, SteerError::GroupMac { .. }), "{error}");
    let error = node.steering.bind(&name, ALICE, MAX_SLOTS).expect_err("beyond the tables");
    assert!(matches!(error, SteerError::Slot { slot: MAX_SLOTS }), "{error}");
    node.steering.bind(&name, ALICE, MAX_SLOTS - 1).expect("the last slot is valid");
}

#[test]
fn a_port_that_does_not_exist_is_refused() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let error = node.steering.attach(&PortName::local("tap0")).expect_err("no such device");
    assert!(matches!(error, SteerError::PortGone { .. }), "{error}");
    let elsewhere = PortName { ifname: "tap0".into(), netns: Some("no-such-namespace".into()) };
    let error = node.steering.attach(&elsewhere).expect_err("no such namespace");
    assert!(matches!(error, SteerError::Link(LinkError::Namespace { .. })), "{error}");
    assert_eq!(node.steering.attachments().ports().count(), 0);
}

#[test]
fn each_port_has_its_own_limit() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    let limits = PortLimits { frames_per_second: 1, burst: 8, ..PortLimits::default() };
    let mut steering = start_in(&ns, &SteerConfig { limits, ..config() }).expect("steering starts");
    let ports = ["tap0", "tap1"].map(|ifname| port(&ns, ifname, &ns));
    for ((_, name), (mac, slot)) in ports.iter().zip([(ALICE, 0), (BOB, 1)]) {
        steering.attach(name).expect("attached");
        steering.bind(name, mac, slot).expect("bound");
    }
    let [(alices, _), (bobs, _)] = &ports;
    (0..100).for_each(|_| ask(alices, ALICE));
    let flooded = steering.maps().counters().expect("counters");
    // One second, which admits one more frame, may pass on a busy machine; 90 seconds do not.
    let refused = flooded.get(Verdict::DropOverLimit);
    assert!((2..=92).contains(&refused), "{refused} of 100 frames were refused; the burst is 8");
    ask(bobs, BOB);
    let after = steering.maps().counters().expect("counters");
    assert_eq!(
        after.get(Verdict::SteerArp),
        flooded.get(Verdict::SteerArp) + 1,
        "the neighbour is not limited"
    );
}

#[test]
fn a_device_without_native_xdp_is_steered_by_generic_xdp() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    // A veth supports native XDP only with a small MTU. The tap takes the place of a guest behind the veth's peer.
    let (tap, _) = port(&node.ns, "tap0", &node.ns);
    node.ns
        .ip_batch(
            "link add jumbo mtu 9000 type veth peer name far mtu 9000\nlink set jumbo up\n\
             link add br0 type bridge\nlink set far master br0\nlink set tap0 master br0\n\
             link set far up\nlink set br0 up\n",
        )
        .expect("a veth behind a bridge");
    let jumbo = PortName::local("jumbo");
    node.steering.attach(&jumbo).expect("attached");
    let shown = node.ns.ip("link show jumbo").expect("the veth");
    assert!(shown.contains("xdpgeneric"), "{shown}");
    node.steering.bind(&jumbo, ALICE, 0).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SteerArp, 1);
    node.expect_count(Verdict::SocketDropAbsent, 1);
}
