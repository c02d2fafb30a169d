//! The number of a namespace is free only after it is proven that no program sends frames with it.

use crate::node::{ALICE, BOB, Bridged, Node, ask, pinned, port, start_in};
use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_steer::Steering;
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::privileged;
use support::tap::Tap;

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

#[test]
fn a_namespace_gets_no_number_whose_former_pin_could_not_be_removed() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_number_stays_taken_across_a_restart_while_its_pin_is_there() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_number_is_used_again_once_its_program_is_off() {
    if !privileged::or_skip() {
        return;
    }
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
