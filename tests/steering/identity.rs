//! Port and MAC identify a guest, in whichever namespace the port is.

use crate::node::{ALICE, BOB, Node, SERVED, ask, ask_for, delete, port, receives, receives_nothing};
use metadata_common::verdict::Verdict;
use metadata_steer::DeviceLookup;
use support::netns::Namespace;
use support::privileged;

#[test]
fn a_bound_guest_reaches_the_hub_and_its_answer_reaches_it() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_frame_for_a_registered_socket_counts_as_delivered() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_port_in_another_namespace_is_served_like_a_local_one() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn ports_of_equal_index_in_two_namespaces_are_distinct() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn an_unregistered_mac_is_dropped_on_every_port() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_slot_bound_to_another_guest_no_longer_serves_the_first() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_guest_bound_to_another_slot_frees_its_first_slot() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn frames_from_and_answers_to_an_unbound_slot_are_dropped() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn ordinary_frames_pass_between_ports() {
    if !privileged::or_skip() {
        return;
    }
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
    assert!(
        receives(to, metadata_common::mac::Mac::BROADCAST),
        "an ordinary broadcast must cross the bridge"
    );
    node.expect_count(Verdict::PassArp, 1);

    ask_for(from, ALICE, SERVED);
    node.expect_count(Verdict::SteerArp, 1);
    assert!(
        receives_nothing(to, metadata_common::mac::Mac::BROADCAST),
        "a request for the service does not cross it"
    );
}

#[test]
fn namespaces_are_distinguished_and_their_numbers_are_reused() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn identities_are_bound_before_a_prepared_port_has_a_program() {
    if !privileged::or_skip() {
        return;
    }
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
