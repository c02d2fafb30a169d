//! An agent takes over from a running agent (`--takeover`). Without that option it refuses to start beside it.

use crate::node::{ALICE, BOB, Bridged, ask, config, pinned, port, start_in, steered};
use metadata_links::error::LinkError;
use metadata_steer::{PinsError, PreviousAgent, SteerConfig, SteerError, release};
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::privileged;

#[test]
fn a_second_agent_on_the_same_pins_is_refused_and_the_error_names_takeover() {
    if !privileged::or_skip() {
        return;
    }
    let node = Bridged::start();
    let elsewhere = Namespace::new("steer").expect("a namespace");
    let error = start_in(&elsewhere, &pinned(&node.bpffs)).err().expect("a refusal");
    assert!(matches!(error, SteerError::Pins(PinsError::InUse { .. })), "{error}");
    assert!(error.to_string().contains("--takeover"), "{error}");
    let error = release(&node.bpffs.pins(), false).expect_err("a refusal");
    assert!(matches!(error, PinsError::InUse { .. }), "{error}");
    node.assert_closed();
}

#[test]
fn a_running_agent_on_the_other_side_is_an_error_that_names_takeover() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    ns.ip("tuntap add imds-t32 mode tap").expect("a tap");
    let error = start_in(&ns, &config()).err().expect("a refusal");
    assert!(matches!(error, SteerError::Link(LinkError::HubInUse { .. })), "{error}");
    assert!(error.to_string().contains("--takeover"), "{error}");
}

#[test]
fn a_takeover_changes_nothing_until_it_moves_all_ports_at_once() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let mut old = node.steering.take().expect("it runs");
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
    assert_eq!((old.hubs().side(), new.hubs().side(), old.maps().key()), (0, 1, new.maps().key()));
    assert_eq!(new.hubs().all()[0].number, 32);
    new.attach(&node.name).expect("found");
    new.bind(&node.name, ALICE, 7).expect("found");
    let refused = new.bind(&node.name, BOB, 8).expect_err("the takeover is not done");
    assert!(matches!(refused, SteerError::TakingOver { .. }), "{refused}");
    // Meanwhile the first agent attaches another port.
    let (late, late_name) = port(&node.ns, "tap2", &node.ns);
    assert!(new.attach(&late_name).is_err(), "the takeover is not done");
    old.attach(&late_name).expect("attached");
    old.bind(&late_name, BOB, 9).expect("bound");
    assert_eq!(old.maps().inherited_state().expect("readable").map(|agent| agent.side), Some(0));

    new.take_over_all().expect("taken over");
    assert_eq!(new.maps().inherited_state().expect("readable").map(|agent| agent.side), Some(1));
    let mut slots: Vec<_> = new.identities().iter().map(|bound| bound.slot).collect();
    slots.sort_unstable();
    assert_eq!(slots, [7, 9]);
    new.attach(&late_name).expect("attached");
    assert_eq!(new.attachments().bound_on(&late_name), [(BOB, 9)]);
    old.leave();
    node.assert_closed();
    let before = steered(&new);
    ask(&node.from, ALICE);
    ask(&late, BOB);
    assert_eq!(steered(&new), before + 2, "frames of both must be steered to hubs that exist");
    new.finish_take_over().expect("finished");
    new.bind(&node.name, BOB, 8).expect("bound after the takeover");
    let links = node.ns.ip("-o link").expect("the list of links");
    assert!(!links.contains("imds-out") && links.contains("imds-o32"), "{links}");
    // The next agent starts on the first side again, however this one ended.
    drop(new);
    let name = node.name.clone();
    let next = node.restart();
    assert_eq!(next.hubs().side(), 0);
    next.attach(&name).expect("attached");
    assert_eq!(next.attachments().bound_on(&name), [(ALICE, 7), (BOB, 8)]);
}

#[test]
fn an_identity_unbound_during_a_takeover_is_released_after_it() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let mut old = node.steering.take().expect("it runs");
    old.bind(&node.name, BOB, 8).expect("bound");
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
    new.attach(&node.name).expect("found");
    new.unbind(8).expect("deferred");
    assert_eq!(old.identities().len(), 2);
    new.take_over_all().expect("taken over");
    assert_eq!(new.attachments().bound_on(&node.name), [(ALICE, 7)]);
    old.leave();
    let before = steered(&new);
    ask(&node.from, BOB);
    ask(&node.from, ALICE);
    assert_eq!(steered(&new), before + 1);
}

#[test]
fn a_takeover_without_pins_of_a_running_agent_is_refused() {
    if !privileged::or_skip() {
        return;
    }
    let bpffs = Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    for (pins, side) in [(None, 1), (Some(bpffs.pins()), 1), (Some(bpffs.pins()), 2)] {
        let config = SteerConfig { pins, adopt: PreviousAgent::TakeOver { side }, ..config() };
        let error = start_in(&ns, &config).err().expect("a refusal");
        let expected = match (&config.pins, side) {
            (None, _) => matches!(error, SteerError::TakeOverWithoutPins),
            (_, 2) => matches!(error, SteerError::Side { found: 2 }),
            _ => matches!(error, SteerError::Pins(PinsError::NothingToTakeOver { .. })),
        };
        assert!(expected, "{error}");
    }
}

#[test]
fn the_next_agent_removes_remaining_hubs_of_both_sides() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    // When an agent is killed, the veth of its hub remains and the tap does not.
    ns.ip_batch(
        "link add imds-o33 type veth peer name imds-i33\nlink add imds-o5 type veth peer name imds-i5\n",
    )
    .expect("a remaining veth");
    let _node = start_in(&ns, &config()).expect("steering starts");
    let links = ns.ip("-o link").expect("the list of links");
    assert!(!links.contains("imds-o33") && !links.contains("imds-o5"), "{links}");
}
