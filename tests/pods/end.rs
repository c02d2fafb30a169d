//! When a launcher ends, its pod's network namespace vanishes: the agent does not keep it alive.

use crate::node::{MAC, Node, PATIENCE, allowed, follow, next_event, pod_where, primary, run, uid};
use metadata_common::port::PortName;
use metadata_feed::pods::PodEvent;
use metadata_links::netns::forget_process;
use metadata_steer::{DeviceLookup, SteerConfig, Steering};
use std::sync::Arc;
use std::time::Duration;
use support::agent::{Agent, PortArgument, arguments_with_pins};
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::netns::Namespace;
use support::pod::network::is_there;
use support::pod::{Binding, How, PodNetwork};
use support::record::Identity;
use support::tap::Shape;

const REQUEST: Duration = Duration::from_secs(2);
const PATH: &str = "/v1/user-data";

/// Waits until the outer end of a pod's NIC vanishes, which happens when the pod's namespace does.
fn expect_vanished(node: &Namespace, outer: &str) {
    eventually(PATIENCE, || {
        anyhow::ensure!(!is_there(node, outer), "the pod's namespace still exists");
        Ok(())
    })
    .expect("the namespace vanishes");
}

#[test]
fn the_end_of_a_launcher_is_reported_and_its_namespace_vanishes_despite_steering() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let config = SteerConfig { served: vec![[169, 254, 169, 254].into()], ..SteerConfig::default() };
    let mut steering = node.ns.run_in(|| Steering::start(&config)).expect("steering starts");
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let outer = network.add_nic(&primary(), MAC).expect("a NIC");
    let tap = network.bind(&primary(), Binding::Bridge, Shape::virtio()).expect("a tap");
    let launcher = node.launch(network.ns(), &uid, How::default());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let pod = pod_where(&mut events, |pod| !pod.taps.is_empty()).await;
        let port = PortName { ifname: "tap0".into(), netns: Some(pod.netns.clone()) };
        steering.attach(&port).expect("attached");
        steering.bind(&port, MAC, 0).expect("bound");

        // From here on only the launcher keeps the namespace alive.
        network.leave_to_its_processes().expect("removed");
        drop(tap);
        assert!(is_there(&node.ns, &outer), "the launcher must keep its namespace alive");
        launcher.end().expect("the launcher ends");
        loop {
            match next_event(&mut events).await {
                PodEvent::Gone => break,
                PodEvent::Taps(pod) => assert!(pod.taps.is_empty(), "{pod:?}"),
                other => panic!("{other:?}"),
            }
        }
        expect_vanished(&node.ns, &outer);
        // Steering was not notified and keeps nothing alive.
        assert!(matches!(
            steering.attachments().find(&port).expect("a look-up"),
            DeviceLookup::Nothing | DeviceLookup::NoNamespace
        ));
        steering.detach(&port).expect("detached");
        forget_process(&pod.netns);
    });
}

#[test]
fn a_pod_that_is_no_longer_followed_does_not_keep_its_namespace() {
    if !allowed() {
        return;
    }
    for drop_all in [false, true] {
        let (node, uid) = (Node::new(), uid());
        let network = PodNetwork::new(&node.ns).expect("a pod");
        let outer = network.add_nic(&primary(), MAC).expect("a NIC");
        let launcher = node.launch(network.ns(), &uid, How::default());
        run(async {
            let (mut pods, mut events) = follow(node.places(), &uid);
            assert!(matches!(next_event(&mut events).await, PodEvent::Found(_)));
            network.leave_to_its_processes().expect("removed");
            if drop_all {
                drop(pods);
            } else {
                pods.forget(&uid);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            launcher.end().expect("the launcher ends");
            expect_vanished(&node.ns, &outer);
        });
    }
}

#[test]
fn an_agent_that_serves_a_pod_releases_its_namespace_when_the_launcher_ends() {
    if !allowed() {
        return;
    }
    let (node, uid, identity) = (Node::new(), uid(), Identity::of(0));
    let bpffs = Bpffs::mount().expect("a bpffs");
    let records = tempfile::tempdir().expect("a directory");
    identity.write(records.path(), 1).expect("a record");
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let outer = network.add_nic(&primary(), identity.mac).expect("a NIC");
    let tap = network.bind(&primary(), Binding::Masquerade, Shape::virtio()).expect("a tap");
    let launcher = node.launch(network.ns(), &uid, How::default());
    let inside = Namespace::new("guest").expect("a namespace");
    let spec = Spec { shape: Shape::virtio(), ..Spec::of(&identity) };
    let guest = Guest::boot_on(Arc::clone(&tap), inside, &spec).expect("a guest");
    let netns = Some(launcher.netns());
    let port = PortArgument { ifname: "tap0".into(), netns, mac: Some(identity.mac) };
    let words = arguments_with_pins(records.path(), &[port], &bpffs.pins());
    let binary = support::agent::binary().expect("the agent");
    let agent = Agent::start_binary(&binary, &node.ns, words).expect("an agent");
    eventually(PATIENCE, || guest.fetch_own(PATH, REQUEST).map(drop))
        .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    assert_eq!(bpffs.port_links().len(), 1, "the program on the tap must be pinned");

    network.leave_to_its_processes().expect("removed");
    // The launcher's guest and the tap that the guest held end with it.
    launcher.end().expect("the launcher ends");
    drop((guest, tap));
    expect_vanished(&node.ns, &outer);
    eventually(PATIENCE, || {
        anyhow::ensure!(bpffs.port_links().is_empty(), "{:?}", bpffs.port_links());
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}
