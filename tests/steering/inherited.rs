//! The next agent inherits the pinned ports, identities and programs; until it starts, the ports stay closed.

use crate::node::{
    ALICE, BOB, Bridged, ELSEWHERE, ask, ask_for, delete, pinned, port, receives_nothing, start_in, steered,
};
use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_steer::{Steering, SteeringMode, SteeringProgram};
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::privileged;

#[test]
fn a_port_stays_closed_when_its_agent_ends_and_the_next_inherits_it() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.assert_closed();
    let key = node.steering.as_ref().map(|steering| steering.maps().key());
    for _ in 0..3 {
        node.end();
        node.assert_closed();
        let name = node.name.clone();
        let next = node.restart();
        assert!(next.takeover().has_inherited());
        assert_eq!(Some(next.maps().key()), key);
        let before = next.identities();
        assert_eq!(before.iter().map(|bound| (bound.mac, bound.slot)).collect::<Vec<_>>(), [(ALICE, 7)]);
        next.attach(&name).expect("attached");
        assert_eq!(next.attachments().bound_on(&name), [(ALICE, 7)]);
        next.bind(&name, ALICE, 7).expect("bound as before");
        assert_eq!(next.identities(), before);
        assert!(next.release_inherited([]).expect("no port is wanted").is_empty());
        let asked = steered(next);
        node.assert_closed();
        let next = node.steering.as_ref().expect("it runs");
        assert_eq!(steered(next), asked + 1, "only Alice's frame is steered");
    }
    assert_eq!(node.bpffs.port_links().len(), 1);
}

#[test]
fn an_inherited_guest_is_steered_before_its_port_is_attached() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let next = node.restart();
    let before = steered(next);
    ask(&node.from, ALICE);
    let next = node.steering.as_ref().expect("it runs");
    assert_eq!(steered(next), before + 1);
}

#[test]
fn inherited_ports_that_are_not_wanted_are_released_with_their_slots() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let next = node.restart();
    assert_eq!(next.release_inherited([]).expect("no port is wanted"), [7]);
    assert!(!next.takeover().has_inherited() && next.identities().is_empty());
    assert!(node.bpffs.port_links().is_empty());
    assert!(node.is_open());
}

#[test]
fn an_inherited_port_that_is_wanted_is_kept_before_it_is_attached() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let name = node.name.clone();
    let next = node.restart();
    assert_eq!(next.inherited_on(&name).expect("its tap is there"), [(ALICE, 7)]);
    assert!(next.release_inherited([&name]).expect("its tap is there").is_empty());
    assert_eq!(next.inherited_on(&name).expect("its tap is there"), [(ALICE, 7)]);
    node.assert_closed();
}

#[test]
fn the_identity_of_a_tap_deleted_while_no_agent_ran_is_released() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    node.ns.ip("link del tap0").expect("the tap is deleted");
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    let next = node.restart();
    next.attach(&name).expect("the new tap of that name is attached");
    assert!(next.attachments().bound_on(&name).is_empty(), "nothing must be bound on it");
    assert_eq!(next.release_inherited([]).expect("no port is wanted"), [7]);
    assert_eq!(node.bpffs.port_links().len(), 1, "{:?}", node.bpffs.port_links());
    delete(tap, &node.ns);
}

#[test]
fn a_new_device_with_the_index_of_an_inherited_one_is_attached() {
    if !privileged::or_skip() {
        return;
    }
    let bpffs = Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    let mut steering = start_in(&ns, &pinned(&bpffs)).expect("steering starts");
    let veth = "link add dev veth7 index 77 type veth peer name far7\nlink set veth7 up\nlink set far7 up\n";
    let name = PortName::local("veth7");
    ns.ip_batch(veth).expect("a veth");
    steering.attach(&name).expect("attached");
    steering.bind(&name, ALICE, 7).expect("bound");
    drop(steering);
    ns.ip("link del veth7").expect("the veth is deleted");
    ns.ip_batch(veth).expect("a veth of the same index");
    let mut next = start_in(&ns, &pinned(&bpffs)).expect("the next agent starts");
    next.attach(&name).expect("attached");
    next.bind(&name, ALICE, 7).expect("bound");
    let shown = ns.ip("link show veth7").expect("the veth");
    assert!(shown.contains("xdp"), "{shown}");
    assert_eq!(bpffs.port_links().len(), 1);
}

#[test]
fn an_inherited_classifier_keeps_its_port_closed_and_is_replaced() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start_with(|config| config.mode = SteeringMode::Tcx);
    node.assert_closed();
    node.end();
    node.assert_closed();
    let name = node.name.clone();
    // The next agent steers by XDP.
    let next = node.restart();
    next.attach(&name).expect("attached");
    assert_eq!(next.attachments().steered_by(&name), Some(SteeringProgram::Xdp));
    assert_eq!(node.bpffs.port_links().len(), 1, "{:?}", node.bpffs.port_links());
    node.assert_closed();
    let next = node.steering.as_mut().expect("it runs");
    next.switch(&name, SteeringProgram::Tcx).expect("switched");
    assert!(node.bpffs.port_links()[0].starts_with("port_tcx"));
    node.end();
    node.assert_closed();
}

#[test]
fn a_port_in_another_namespace_is_inherited() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let pod = Namespace::new("pod").expect("a namespace");
    let (tap, name) = port(&pod, "tap0", &node.ns);
    let steering = node.steering.as_mut().expect("it runs");
    steering.attach(&name).expect("attached");
    steering.bind(&name, BOB, 8).expect("bound");
    let numbers = |steering: &Steering| {
        let mut all: Vec<_> = steering.identities().iter().map(|b| (b.slot, b.netns, b.cookie)).collect();
        all.sort_unstable();
        all
    };
    let before = numbers(steering);
    node.end();
    let next = node.restart();
    assert_eq!(numbers(next), before);
    next.attach(&name).expect("attached");
    next.bind(&name, BOB, 8).expect("bound");
    let third = Namespace::new("pod").expect("a namespace");
    let (_other, another) = port(&third, "tap0", &node.ns);
    let next = node.steering.as_mut().expect("it runs");
    next.attach(&another).expect("a port in a new namespace is attached");
    next.bind(&another, ALICE, 9).expect("bound");
    let netns: std::collections::HashSet<_> = next.identities().iter().map(|bound| bound.netns).collect();
    assert_eq!(netns.len(), 3, "each namespace needs a number of its own");
    let before = steered(next);
    ask(&tap, BOB);
    assert_eq!(node.steering.as_ref().map(steered), Some(before + 1));
}

#[test]
fn the_next_agent_passes_frames_for_an_address_it_does_not_serve() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start_with(|config| config.served.push(std::net::IpAddr::from(ELSEWHERE)));
    ask_for(&node.from, ALICE, ELSEWHERE);
    assert!(receives_nothing(&node.to, Mac::BROADCAST));
    node.end();
    node.restart();
    node.assert_closed();
}

#[test]
fn without_pins_nothing_outlives_the_agent() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start_with(|config| config.pins = None);
    node.assert_closed();
    node.end();
    assert!(node.is_open());
    assert!(!node.bpffs.pins().exists());
}
