//! Steering handles ports that appear and disappear, and leaves nothing behind when it stops.

use crate::node::{
    ALICE, BOB, Node, ask, config, delete, port, receives, receives_nothing, start_in, within,
};
use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_steer::{DeviceLookup, SteerError, exists};
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::time::Duration;
use support::netns::Namespace;
use support::privileged;

fn links(ns: &Namespace) -> String {
    ns.ip("-o link").expect("the list of links").lines().map(|line| format!("{line}\n")).collect()
}

#[test]
fn starting_and_stopping_leaves_no_device() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    let before = links(&ns);
    let steering = start_in(&ns, &config()).expect("steering starts");
    let during = links(&ns);
    for device in ["imds-out", "imds-in", "imds-tap", "imds-gso"] {
        assert!(during.contains(device), "{device} in {during}");
    }
    drop(steering);
    assert_eq!(links(&ns), before);
}

#[test]
fn stopping_removes_the_hubs_devices_while_its_taps_are_open() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    let before = links(&ns);
    let mut steering = start_in(&ns, &config()).expect("steering starts");
    let _taps =
        (steering.hubs_mut().take_tap(0), steering.hubs_mut().take_long_tap(0).expect("a kernel with tcx"));
    drop(steering);
    assert_eq!(links(&ns), before);
}

#[test]
fn the_host_sends_no_frame_of_its_own_on_the_hubs_devices() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::start();
    let addresses = node.ns.ip("-o -6 addr").expect("the list of addresses");
    assert!(!addresses.contains("imds"), "{addresses}");
    let links = links(&node.ns);
    for line in links.lines().filter(|line| line.contains("imds")) {
        assert!(line.contains("NOARP") && !line.contains("MULTICAST") && line.contains("mtu 3400"), "{line}");
    }
    // The `socket` program would have counted any frame of the host.
    std::thread::sleep(Duration::from_millis(200));
    node.expect_count(Verdict::SocketDropAbsent, 0);
}

#[test]
fn no_file_system_is_mounted_for_the_maps() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    // The name of the pod's namespace is a mount too; it exists before the port is attached.
    let bpffs = || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("the list of mounts");
        mounts.lines().filter(|line| line.contains(" - bpf ")).count()
    };
    let before = bpffs();
    let (_tap, name) = port(&pod, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    assert_eq!(bpffs(), before);
}

#[test]
fn a_detached_port_is_restored_and_can_be_attached_again() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    for round in 1..=3 {
        node.steering.attach(&name).expect("attached");
        node.steering.attach(&name).expect("attached twice is no error");
        node.steering.bind(&name, ALICE, 0).expect("bound");
        ask(&tap, ALICE);
        node.expect_count(Verdict::SteerArp, round);
        node.steering.detach(&name).expect("detached");
        node.steering.detach(&name).expect("detached twice is no error");
        assert_eq!(node.steering.attachments().ports().count(), 0);
        // A child of another test may hold a copy of the closed link until it calls `execve`.
        let has_gone = || !node.ns.ip("link show tap0").expect("the tap").contains("xdp");
        assert!(
            within(Duration::from_secs(5), || has_gone().then_some(())).is_some(),
            "the program is still attached"
        );
        ask(&tap, ALICE);
        node.answer(0);
        node.expect_count(Verdict::HubDropNoGuest, round);
        assert!(receives_nothing(&tap, ALICE));
    }
    node.expect_count(Verdict::SteerArp, 3);
}

#[test]
fn a_deleted_tap_detaches_without_error_and_can_be_created_again() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    for ns in [node.ns.name(), pod.name()].map(|name| Namespace::open(name).expect("the namespace")) {
        let (tap, name) = port(&ns, "tap0", &node.ns);
        node.steering.attach(&name).expect("attached");
        node.steering.bind(&name, ALICE, 0).expect("bound");
        delete(tap, &ns);
        assert_eq!(ns.run_in(|| exists(&name)).expect("a look-up"), None);
        node.steering.detach(&name).expect("detached quietly");

        let (tap, name) = port(&ns, "tap0", &node.ns);
        node.steering.attach(&name).expect("attached again");
        node.steering.bind(&name, BOB, 0).expect("bound again");
        node.answer(0);
        assert!(receives(&tap, BOB));
        node.steering.detach(&name).expect("detached");
        delete(tap, &ns);
    }
}

#[test]
fn a_recreated_tap_is_attached_with_no_identity_bound() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    delete(tap, &node.ns);
    let (tap, _) = port(&node.ns, "tap0", &node.ns);
    let error = node.steering.bind(&name, ALICE, 1).expect_err("the port is another device now");
    assert!(matches!(error, SteerError::PortGone { .. }), "{error}");
    node.steering.attach(&name).expect("attached again");
    ask(&tap, ALICE);
    node.expect_count(Verdict::DropUnknownMac, 1);
    node.steering.bind(&name, ALICE, 0).expect("bound again");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SteerArp, 1);
}

#[test]
fn a_renamed_tap_is_attached_under_its_new_name() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.ns.ip_batch("link set tap0 down\nlink set tap0 name tap9\nlink set tap9 up\n").expect("renamed");
    let renamed = PortName::local("tap9");
    node.steering.attach(&renamed).expect("attached under its new name");
    assert_eq!(node.steering.attachments().ports().map(|(name, _)| name).collect::<Vec<_>>(), [&renamed]);
    node.steering.bind(&renamed, ALICE, 0).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SteerArp, 1);
}

#[test]
fn a_port_of_a_renamed_namespace_is_attached_under_the_new_name() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    let (tap, first) = port(&pod, "tap0", &node.ns);
    node.steering.attach(&first).expect("attached");
    // The namespace loses its name. From then on the path of a process in it is its name.
    let mut process = pod.spawn(Command::new("sleep").arg("30")).expect("a process inside");
    let second =
        PortName { netns: Some(format!("/proc/{}/ns/net", process.id())), ifname: first.ifname.clone() };
    drop(pod);
    let moved = node.steering.attach(&second).and_then(|()| node.steering.bind(&second, ALICE, 0));
    ask(&tap, ALICE);
    let steered = within(Duration::from_secs(5), || {
        (node.steering.maps().counters().expect("counters").get(Verdict::SteerArp) == 1).then_some(())
    });
    process.kill().expect("killed");
    process.wait().expect("reaped");
    moved.expect("attached and bound under the new name");
    assert!(steered.is_some());
    assert_eq!(node.steering.attachments().ports().map(|(name, _)| name).collect::<Vec<_>>(), [&second]);
}

#[test]
fn a_device_of_equal_index_in_another_namespace_is_not_the_port() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("pod");
    let name = PortName { ifname: "tap0".into(), netns: Some(path.display().to_string()) };
    let pods = [0, 1].map(|_| Namespace::new("pod").expect("a namespace"));
    let _taps = pods.each_ref().map(|pod| port(pod, "tap0", &node.ns));
    let [first, second] = pods.each_ref().map(|pod| format!("/run/netns/{}", pod.name()));
    assert_eq!(node.steering.attachments().find(&name).expect("a look-up"), DeviceLookup::NoNamespace);
    std::os::unix::fs::symlink(first, &path).expect("a name");
    assert_eq!(node.steering.attachments().find(&name).expect("a look-up"), DeviceLookup::Other);
    node.steering.attach(&name).expect("attached");
    assert_eq!(node.steering.attachments().find(&name).expect("a look-up"), DeviceLookup::Attached);
    let index = exists(&name).expect("a look-up");
    std::fs::remove_file(&path).expect("the name is removed");
    std::os::unix::fs::symlink(second, &path).expect("the name means another namespace");
    assert_eq!(exists(&name).expect("a look-up"), index, "both taps have one index");
    assert_eq!(node.steering.attachments().find(&name).expect("a look-up"), DeviceLookup::Other);
}

#[test]
fn an_attached_port_does_not_keep_its_namespace_alive() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    // When a namespace ends, the veth in it and that veth's peer vanish, which the test sees from outside.
    node.ns.ip(&format!("link add probe type veth peer name far netns {}", pod.name())).expect("a probe");
    let (tap, name) = port(&pod, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    drop(tap);
    drop(pod);
    let gone = within(Duration::from_secs(10), || node.ns.ip("link show probe").err());
    assert!(gone.is_some(), "the namespace is still alive");
    assert_eq!(exists(&name).expect("a look-up"), None);
    node.steering.detach(&name).expect("detached quietly");
}

/// Environment variable of the process to be killed: the namespace to start in.
const VICTIM: &str = "XDP_IMDS_TEST_STEERING_VICTIM";

#[test]
fn a_killed_agent_frees_its_guests_and_the_next_agent_starts() {
    if let Ok(name) = std::env::var(VICTIM) {
        steer_until_killed(&Namespace::open(&name).expect("the namespace"));
    }
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    let (from, name) = port(&ns, "tap0", &ns);
    let (to, _) = port(&ns, "tap1", &ns);
    ns.ip_batch(
        "link add br0 type bridge\nlink set br0 up\nlink set tap0 master br0\nlink set tap1 master br0\n",
    )
    .expect("a bridge");
    let test = std::thread::current().name().expect("tests run on threads named after them").to_owned();
    let mut victim = Command::new(std::env::current_exe().expect("this test's path"))
        .args(["--exact", &test, "--nocapture"])
        .env(VICTIM, ns.name())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a second process");
    let stdout = BufReader::new(victim.stdout.take().expect("stdout is piped"));
    let ready = stdout.lines().map_while(Result::ok).any(|line| line.ends_with("ready"));
    ask(&from, ALICE);
    let steered = receives_nothing(&to, Mac::BROADCAST);
    victim.kill().expect("killed");
    victim.wait().expect("reaped");
    assert!(ready && steered, "ready: {ready}, steered: {steered}");

    let detached = within(Duration::from_secs(5), || {
        ns.ip("link show tap0").ok().filter(|shown| !shown.contains("xdp"))
    });
    assert!(detached.is_some(), "the program is still on the tap");
    ask(&from, ALICE);
    assert!(receives(&to, Mac::BROADCAST), "the guest's frames must cross the bridge again");

    let remaining = links(&ns);
    assert!(remaining.contains("imds-out"), "the test needs remaining devices: {remaining}");
    let mut steering = start_in(&ns, &config()).expect("the next agent starts in spite of remaining devices");
    steering.attach(&name).expect("attached");
}

/// Steers until killed, or until the test that waits for it has ended.
fn steer_until_killed(ns: &Namespace) -> ! {
    let mut steering = start_in(ns, &config()).expect("steering starts");
    let name = PortName::local("tap0");
    steering.attach(&name).expect("attached");
    println!("ready");
    std::thread::sleep(Duration::from_secs(30));
    std::io::stdin().read_to_end(&mut Vec::new()).expect("stdin ends");
    panic!("this process was not killed");
}
