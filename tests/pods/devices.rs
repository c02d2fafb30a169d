//! The agent reports taps and NICs of a pod when they appear, change and vanish.

use crate::node::{
    MAC, Node, allowed, expect_no_event, follow, next_event, pod_where, primary, run, taps, uid,
};
use metadata_common::mac::Mac;
use metadata_feed::pods::{Pod, PodEvent, TapKind, names_of};
use support::pod::{Binding, How, PodNetwork};
use support::tap::Shape;

/// True if the device `name` of the pod has the guest's MAC.
fn has_nic(pod: &Pod, name: &str) -> bool {
    pod.nics.iter().any(|nic| nic.name == name && nic.mac == MAC)
}

#[test]
fn both_bindings_show_one_tap_and_the_guests_mac() {
    if !allowed() {
        return;
    }
    let node = Node::new();
    for binding in [Binding::Masquerade, Binding::Bridge] {
        let uid = uid();
        let network = PodNetwork::new(&node.ns).expect("a pod");
        network.add_nic(&primary(), MAC).expect("a NIC");
        let _tap = network.bind(&primary(), binding, Shape::virtio()).expect("a tap");
        let _launcher = node.launch(network.ns(), &uid, How::default());
        run(async {
            let (_pods, mut events) = follow(node.places(), &uid);
            let PodEvent::Found(pod) = next_event(&mut events).await else { panic!("not found") };
            let found: Vec<_> =
                pod.taps.iter().map(|tap| (tap.ifname.as_str(), tap.kind, tap.queues)).collect();
            assert_eq!(found, [("tap0", TapKind::Tap, 1)], "{binding:?}");
            assert_ne!(pod.taps[0].mac, Mac::default(), "the kernel assigns a MAC");
            assert!(has_nic(&pod, "eth0"), "{binding:?}: {:?}", pod.nics);
            let bridge = pod.nics.iter().find(|nic| nic.name == "k6t-eth0").expect("a bridge");
            assert_eq!(bridge.kind, "bridge");
            let moved = pod.nics.iter().any(|nic| nic.name == "eth0-nic");
            assert_eq!(moved, binding == Binding::Bridge, "{:?}", pod.nics);
        });
    }
}

#[test]
fn later_and_secondary_taps_and_their_removal_are_reported() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let _launcher = node.launch(network.ns(), &uid, How::default());
    let blue = names_of("blue", Some(1)).remove(0);
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let PodEvent::Found(pod) = next_event(&mut events).await else { panic!("not found") };
        assert_eq!((taps(&pod), pod.nics.len()), (vec![], 0));

        network.add_nic(&primary(), MAC).expect("a NIC");
        let _tap = network.bind(&primary(), Binding::Masquerade, Shape::virtio()).expect("a tap");
        pod_where(&mut events, |pod| taps(pod) == ["tap0"]).await;

        network.add_nic(&blue, MAC).expect("a second NIC");
        let tap = network.bind(&blue, Binding::Bridge, Shape::virtio()).expect("a second tap");
        let pod = pod_where(&mut events, |pod| pod.taps.len() == 2).await;
        assert_eq!(taps(&pod), ["tap0", "tap16477688c0e"]);
        assert!(has_nic(&pod, "pod16477688c0e"), "{:?}", pod.nics);

        network.ns().ip("link del tap16477688c0e").expect("unplugged");
        drop(tap);
        pod_where(&mut events, |pod| taps(pod) == ["tap0"]).await;
        expect_no_event(&mut events).await;
    });
}

#[test]
fn a_macvtap_is_reported_as_such_and_not_as_a_tap() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    network.add_nic(&primary(), MAC).expect("a NIC");
    let made = network.ns().ip("link add link eth0 name tap0 type macvtap mode bridge");
    let missing = made.err().map(|error| format!("there is no macvtap: {error:#}"));
    if !support::privileged::or_skip_for(missing.as_deref()) {
        return;
    }
    let _launcher = node.launch(network.ns(), &uid, How::default());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let PodEvent::Found(pod) = next_event(&mut events).await else { panic!("not found") };
        let kinds: Vec<_> = pod.taps.iter().map(|tap| (tap.ifname.as_str(), tap.kind)).collect();
        assert_eq!(kinds, [("tap0", TapKind::Macvtap)]);
    });
}

#[test]
fn queues_that_a_guest_opens_or_closes_later_are_reported() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    network.add_nic(&primary(), MAC).expect("a NIC");
    let shape = Shape { queues: 2, vnet_hdr: true };
    let tap = network.bind(&primary(), Binding::Masquerade, shape).expect("a tap");
    let _launcher = node.launch(network.ns(), &uid, How::default());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let queues = |pod: &Pod| pod.taps.first().map(|tap| tap.queues);
        pod_where(&mut events, |pod| queues(pod) == Some(2)).await;
        let more = [0, 1].map(|_| tap.another_queue(network.ns()).expect("another queue"));
        pod_where(&mut events, |pod| queues(pod) == Some(4)).await;
        drop(more);
        pod_where(&mut events, |pod| queues(pod) == Some(2)).await;
    });
}
