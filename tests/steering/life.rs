//! Steering handles ports that appear and disappear, and leaves nothing behind when it stops.

use aya::maps::{HashMap, Map, MapData};
use metadata_common::mac::Mac;
use metadata_common::maps::{ANSWER_LINK, mtu_of};
use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_links::error::LinkError;
use metadata_steer::{
    DeviceLookup, PinsError, PortLimits, PreviousAgent, ReleaseSummary, SteerConfig, SteerError, Steering,
    SteeringMode, SteeringProgram, exists, release,
};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::privileged;

use crate::node::{
    ALICE, BOB, Bridged, ELSEWHERE, Node, ask, ask_for, config, delete, pinned, port, receives,
    receives_nothing, start_in, steered, within,
};

fn links(ns: &Namespace) -> String {
    ns.ip("-o link").expect("the list of links").lines().map(|line| format!("{line}\n")).collect()
}

#[privileged::test]
fn starting_and_stopping_leaves_no_device() {
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

#[privileged::test]
fn stopping_removes_the_hubs_devices_while_its_taps_are_open() {
    let ns = Namespace::new("steer").expect("a namespace");
    let before = links(&ns);
    let mut steering = start_in(&ns, &config()).expect("steering starts");
    let _taps =
        (steering.hubs_mut().take_tap(0), steering.hubs_mut().take_long_tap(0).expect("a kernel with tcx"));
    drop(steering);
    assert_eq!(links(&ns), before);
}

#[privileged::test]
fn the_host_sends_no_frame_of_its_own_on_the_hubs_devices() {
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

#[privileged::test]
#[expect(unsafe_code, reason = "a thread gets mounts of its own by unshare(2), which has no safe form")]
fn no_file_system_is_mounted_for_the_maps() {
    // Other tests mount file systems meanwhile. A thread with mounts of its own sees only what it does itself.
    let thread = std::thread::spawn(|| {
        // SAFETY: this thread shares nothing that it changes: it mounts by paths, and ends with the test.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("mounts of this thread alone");
        let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", flags).expect("mounts that are private");
        let mut node = Node::start();
        let pod = Namespace::new("pod").expect("a namespace");
        // The name of the pod's namespace is a mount too; it exists before the port is attached. A mount copied from
        // another test goes when that test removes the directory, so only new ones count.
        let bpffs = || {
            let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").expect("the list of mounts");
            let mounts = mounts.lines().filter(|line| line.contains(" - bpf ")).map(str::to_owned);
            mounts.collect::<Vec<_>>()
        };
        let before = bpffs();
        let (_tap, name) = port(&pod, "tap0", &node.ns);
        node.steering.attach(&name).expect("attached");
        let new: Vec<_> = bpffs().into_iter().filter(|mount| !before.contains(mount)).collect();
        assert_eq!(new, Vec::<String>::new());
    });
    thread.join().expect("the test in the thread passes");
}

#[privileged::test]
fn a_detached_port_is_restored_and_can_be_attached_again() {
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

#[privileged::test]
fn a_deleted_tap_detaches_without_error_and_can_be_created_again() {
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

#[privileged::test]
fn a_recreated_tap_is_attached_with_no_identity_bound() {
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

#[privileged::test]
fn a_renamed_tap_is_attached_under_its_new_name() {
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

#[privileged::test]
fn a_port_of_a_renamed_namespace_is_attached_under_the_new_name() {
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

#[privileged::test]
fn a_device_of_equal_index_in_another_namespace_is_not_the_port() {
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

#[privileged::test]
fn an_attached_port_does_not_keep_its_namespace_alive() {
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

// The directory of pins: its permissions, damage to it, and its release.

#[privileged::test]
fn pins_and_their_directories_are_accessible_to_the_owner_only() {
    let node = Bridged::start();
    let pins = node.bpffs.pins();
    let mode =
        |path: &std::path::Path| std::fs::metadata(path).expect("it is there").permissions().mode() & 0o7777;
    for directory in [pins.clone(), pins.join("v1"), pins.join("v1/maps"), pins.join("v1/links")] {
        assert_eq!(mode(&directory), 0o700, "{}", directory.display());
    }
    for directory in ["v1/maps", "v1/links"] {
        for file in std::fs::read_dir(pins.join(directory)).expect("a list").flatten() {
            assert_eq!(mode(&file.path()), 0o600, "{}", file.path().display());
        }
    }
}

#[privileged::test]
fn a_pin_directory_that_others_may_write_to_is_refused() {
    let bpffs = Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    std::fs::create_dir(bpffs.pins()).expect("a directory");
    std::fs::set_permissions(bpffs.pins(), PermissionsExt::from_mode(0o777)).expect("open for all");
    let error = start_in(&ns, &pinned(&bpffs)).err().expect("a refusal");
    assert!(matches!(error, SteerError::Pins(PinsError::Exposed { mode: 0o777, .. })), "{error}");
}

#[privileged::test]
fn damaged_maps_are_replaced_while_the_port_stays_closed() {
    type Damage = fn(&std::path::Path);
    let cases: [(&str, Damage); 3] = [
        ("one is missing", |maps| std::fs::remove_file(maps.join("GUESTS")).expect("removed")),
        ("all are missing", |maps| {
            for map in std::fs::read_dir(maps).expect("a list").flatten() {
                std::fs::remove_file(map.path()).expect("removed");
            }
        }),
        ("one has another layout", |maps| {
            std::fs::rename(maps.join("HUBS"), maps.join("IDENTITIES")).expect("renamed");
        }),
    ];
    for (what, damage) in cases {
        let mut node = Bridged::start();
        node.end();
        damage(&node.bpffs.pins().join("v1/maps"));
        let name = node.name.clone();
        node.restart();
        node.assert_closed();
        let next = node.steering.as_mut().expect("it runs");
        assert!(next.identities().is_empty(), "{what}");
        next.attach(&name).expect(what);
        next.bind(&name, ALICE, 3).expect(what);
        let before = steered(next);
        node.assert_closed();
        assert_eq!(node.steering.as_ref().map(steered), Some(before + 1), "{what}");
        node.end();
        let next = node.restart();
        assert_eq!(
            next.identities().first().map(|bound| bound.slot),
            Some(3),
            "{what}: the next agent must inherit the new maps"
        );
    }
}

#[privileged::test]
fn entries_that_are_not_links_are_kept_or_replaced() {
    let mut node = Bridged::start();
    node.end();
    let links = node.bpffs.pins().join("v1/links");
    std::fs::create_dir(links.join("something")).expect("a directory");
    let maps = node.bpffs.pins().join("v1/maps");
    // This puts a map under the name of a link; the link is released with its pin.
    let own = node.bpffs.port_links();
    std::fs::rename(maps.join("AGENT"), links.join(&own[0])).expect("renamed over the link");
    assert!(node.is_open());
    let name = node.name.clone();
    node.restart().attach(&name).expect("attached again");
    node.assert_closed();
    assert!(links.join("something").exists());
    node.end();
    node.assert_closed();
}

#[privileged::test]
fn ports_pinned_by_another_version_are_moved_to_this_version() {
    let mut node = Bridged::start();
    node.end();
    let pins = node.bpffs.pins();
    std::fs::rename(pins.join("v1"), pins.join("v0")).expect("pins of an older version");
    let name = node.name.clone();
    let next = node.restart();
    assert!(!next.takeover().has_inherited());
    next.attach(&name).expect("attached");
    next.bind(&name, ALICE, 1).expect("bound");
    let before = steered(next);
    node.assert_closed();
    assert_eq!(node.steering.as_ref().map(steered), Some(before + 1));
    let theirs = std::fs::read_dir(pins.join("v0/links")).expect("a list").flatten();
    let theirs: Vec<_> = theirs.map(|entry| entry.file_name()).collect();
    assert!(!theirs.iter().any(|name| name.to_string_lossy().starts_with("port")), "{theirs:?}");
    assert_eq!(node.bpffs.port_links().len(), 1);
}

#[privileged::test]
fn an_agent_of_another_version_keeps_its_ports_from_a_start_and_a_takeover() {
    let node = Bridged::start();
    let pins = node.bpffs.pins();
    std::fs::rename(pins.join("v1"), pins.join("v2")).expect("the running agent counts as a newer one");
    let error = start_in(&node.ns, &pinned(&node.bpffs)).err().expect("a refusal");
    assert!(matches!(error, SteerError::Pins(PinsError::InUse { .. })), "{error}");
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let error = start_in(&node.ns, &takeover).err().expect("a refusal");
    assert!(matches!(error, SteerError::Pins(PinsError::NothingToTakeOver { .. })), "{error}");
    for part in ["expected pins of version v1, found v2", "stop it and start this one again"] {
        assert!(error.to_string().contains(part), "no `{part}` in: {error}");
    }
    assert!(!pins.join("v1").exists(), "a refused agent leaves nothing");
    let running = node.steering.as_ref().expect("it runs");
    let before = steered(running);
    node.assert_closed();
    assert_eq!(steered(running), before + 1);
    assert_eq!(running.attachments().bound_on(&node.name), [(ALICE, 7)]);
}

#[privileged::test]
fn release_unpins_all_links_and_maps() {
    let mut node = Bridged::start();
    node.end();
    let released = release(&node.bpffs.pins(), false).expect("released");
    assert_eq!(released.links, 1);
    assert!(released.maps > 10, "{released:?}");
    assert!(node.is_open());
    assert!(!node.bpffs.pins().exists());
    assert_eq!(
        release(&node.bpffs.pins(), false).expect("a missing directory is no error"),
        ReleaseSummary::default()
    );
}

#[privileged::test]
fn a_forced_release_does_not_detach_the_ports_of_a_running_agent() {
    let mut node = Bridged::start();
    let released = release(&node.bpffs.pins(), true).expect("released");
    assert_eq!(released.links, 2, "one link of the port and one of the hub");
    node.assert_closed();
    let (_tap, name) = port(&node.ns, "tap2", &node.ns);
    let steering = node.steering.as_mut().expect("it runs");
    steering.attach(&name).expect("attached without a pin");
    node.end();
    assert!(node.is_open());
    assert!(!node.bpffs.pins().exists());
}

// An agent takes over from a running agent (`--takeover`). Without that option it refuses to start beside it.

#[privileged::test]
fn a_second_agent_on_the_same_pins_is_refused_and_the_error_names_takeover() {
    let node = Bridged::start();
    let elsewhere = Namespace::new("steer").expect("a namespace");
    let error = start_in(&elsewhere, &pinned(&node.bpffs)).err().expect("a refusal");
    assert!(matches!(error, SteerError::Pins(PinsError::InUse { .. })), "{error}");
    assert!(error.to_string().contains("--takeover"), "{error}");
    let error = release(&node.bpffs.pins(), false).expect_err("a refusal");
    assert!(matches!(error, PinsError::InUse { .. }), "{error}");
    node.assert_closed();
}

#[privileged::test]
fn a_running_agent_on_the_other_side_is_an_error_that_names_takeover() {
    let ns = Namespace::new("steer").expect("a namespace");
    ns.ip("tuntap add imds-t32 mode tap").expect("a tap");
    let error = start_in(&ns, &config()).err().expect("a refusal");
    assert!(matches!(error, SteerError::Link(LinkError::HubInUse { .. })), "{error}");
    assert!(error.to_string().contains("--takeover"), "{error}");
}

#[privileged::test]
fn a_takeover_changes_nothing_until_it_moves_all_ports_at_once() {
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

/// The entry of the node's only port in the pinned table, as `metadata_common::maps::Port` lays it out.
fn port_entry(node: &Bridged) -> [u64; 9] {
    let map = MapData::from_pin(node.bpffs.pins().join("v1/maps/PORTS")).expect("a pinned map");
    let map: HashMap<_, [u32; 2], [u64; 9]> =
        HashMap::try_from(Map::HashMap(map)).expect("the table of ports");
    let entries: Vec<_> = map.iter().map(|entry| entry.expect("an entry").1).collect();
    let [entry] = entries[..] else { panic!("one port: {entries:?}") };
    entry
}

#[privileged::test]
fn an_agent_that_prepares_a_takeover_neither_closes_nor_limits_a_port_before_it_owns_it() {
    let mut node = Bridged::start();
    let before = port_entry(&node);
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
    new.attach_closed(&node.name).expect("found");
    let refused = new.set_closed(&node.name, true).expect_err("the port is the other agent's");
    assert!(matches!(refused, SteerError::TakingOver { .. }), "{refused}");
    new.set_closed(&node.name, false).expect("it is open");
    new.set_limits(PortLimits { burst: 7, ..PortLimits::default() }).expect("noted");
    node.ns.ip("link set tap0 mtu 1400").expect("another MTU");
    new.inspect_mtus(None).expect("read");
    assert_eq!(port_entry(&node), before);
    // It gives up, and the first agent serves as before.
    drop(new);
    assert_eq!(port_entry(&node), before);
    let old = node.steering.take().expect("it runs");
    let asked = steered(&old);
    ask(&node.from, ALICE);
    assert_eq!(steered(&old), asked + 1);

    let mut new = start_in(&node.ns, &takeover).expect("another agent starts");
    new.attach_closed(&node.name).expect("found");
    new.take_over_all().expect("taken over");
    old.leave();
    let [.., guarded] = port_entry(&node);
    assert_eq!((guarded, mtu_of(port_entry(&node)[3])), (0, 1_400));
    new.set_closed(&node.name, true).expect("the port is ours");
    let [.., guarded] = port_entry(&node);
    assert_eq!(guarded, 1);
    let asked = steered(&new);
    node.assert_closed();
    assert_eq!(steered(&new), asked, "a closed port serves nobody");
}

#[privileged::test]
fn a_takeover_makes_the_kernel_answer_what_the_next_agent_has_it_answer() {
    let counts = |steering: &Steering| {
        let counters = steering.maps().counters().expect("counters");
        [Verdict::SteerArp, Verdict::AnswerArp].map(|verdict| counters.get(verdict))
    };
    for (before, after) in [(0, ANSWER_LINK), (ANSWER_LINK, 0)] {
        let mut node = Bridged::start_with(|config| config.answers = before);
        let old = node.steering.take().expect("it runs");
        let adopt = PreviousAgent::TakeOver { side: 1 };
        let takeover = SteerConfig { adopt, answers: after, ..pinned(&node.bpffs) };
        let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
        new.attach(&node.name).expect("found");
        new.take_over_all().expect("taken over");
        old.leave();
        let [to_hub, answered] = counts(&new);
        ask(&node.from, ALICE);
        let expected = if after == 0 { [to_hub + 1, answered] } else { [to_hub, answered + 1] };
        assert_eq!(counts(&new), expected, "from {before} to {after}");
    }
}

#[privileged::test]
fn a_takeover_in_another_mode_gives_each_port_the_program_of_that_mode() {
    for (before, after, by) in [
        (SteeringMode::Tcx, SteeringMode::Xdp, SteeringProgram::Xdp),
        (SteeringMode::Xdp, SteeringMode::Tcx, SteeringProgram::Tcx),
    ] {
        let mut node = Bridged::start_with(|config| config.mode = before);
        let old = node.steering.take().expect("it runs");
        let adopt = PreviousAgent::TakeOver { side: 1 };
        let takeover = SteerConfig { adopt, mode: after, ..pinned(&node.bpffs) };
        let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
        new.attach(&node.name).expect("found");
        new.follow_guests(Instant::now());
        assert_ne!(new.attachments().steered_by(&node.name), Some(by), "the port is the other agent's");
        new.take_over_all().expect("taken over");
        old.leave();
        node.assert_closed();
        new.follow_guests(Instant::now());
        assert_eq!(new.attachments().steered_by(&node.name), Some(by), "{after:?}");
        let links = node.bpffs.port_links();
        assert!(
            links.len() == 1 && links[0].starts_with("port_tcx") == (after == SteeringMode::Tcx),
            "{links:?}"
        );
        let asked = steered(&new);
        node.assert_closed();
        assert_eq!(steered(&new), asked + 1, "only Alice's frame is steered");
    }
}

#[privileged::test]
fn an_identity_unbound_during_a_takeover_is_released_after_it() {
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

#[privileged::test]
fn a_takeover_that_failed_at_its_last_steps_is_completed_by_the_next_attempt() {
    let mut node = Bridged::start();
    let mut old = node.steering.take().expect("it runs");
    old.bind(&node.name, BOB, 8).expect("bound");
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
    new.attach(&node.name).expect("found");
    new.unbind(8).expect("deferred");
    // Nothing can be pinned in place of a directory.
    let pin = node.bpffs.pins().join("v1/maps/REQUEST_PROGRAM");
    std::fs::remove_file(&pin).expect("removed");
    std::fs::create_dir(&pin).expect("a directory");
    let error = new.take_over_all().expect_err("the directory is in the way");
    assert!(matches!(error, SteerError::Pins(_)), "{error}");
    assert!(new.takeover().is_running());
    let side =
        |steering: &Steering| steering.maps().inherited_state().expect("readable").map(|agent| agent.side);
    assert_eq!(side(&new), Some(0));
    std::fs::remove_dir(&pin).expect("removed");
    new.take_over_all().expect("taken over");
    assert!(!new.takeover().is_running());
    assert_eq!(side(&new), Some(1));
    assert!(pin.is_file(), "the next agent finds the pin");
    assert_eq!(new.attachments().bound_on(&node.name), [(ALICE, 7)]);
    old.leave();
    let before = steered(&new);
    ask(&node.from, BOB);
    ask(&node.from, ALICE);
    assert_eq!(steered(&new), before + 1);
}

#[privileged::test]
fn a_takeover_without_pins_of_a_running_agent_is_refused() {
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

#[privileged::test]
fn the_next_agent_removes_remaining_hubs_of_both_sides() {
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

// The next agent inherits the pinned ports, identities and programs; until it starts, the ports stay closed.

#[privileged::test]
fn a_port_stays_closed_when_its_agent_ends_and_the_next_inherits_it() {
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

#[privileged::test]
fn an_inherited_guest_is_steered_before_its_port_is_attached() {
    let mut node = Bridged::start();
    node.end();
    let next = node.restart();
    let before = steered(next);
    ask(&node.from, ALICE);
    let next = node.steering.as_ref().expect("it runs");
    assert_eq!(steered(next), before + 1);
}

#[privileged::test]
fn inherited_ports_that_are_not_wanted_are_released_with_their_slots() {
    let mut node = Bridged::start();
    node.end();
    let next = node.restart();
    assert_eq!(next.release_inherited([]).expect("no port is wanted"), [7]);
    assert!(!next.takeover().has_inherited() && next.identities().is_empty());
    assert!(node.bpffs.port_links().is_empty());
    assert!(node.is_open());
}

#[privileged::test]
fn an_inherited_port_that_is_wanted_is_kept_before_it_is_attached() {
    let mut node = Bridged::start();
    node.end();
    let name = node.name.clone();
    let next = node.restart();
    assert_eq!(next.inherited_on(&name).expect("its tap is there"), [(ALICE, 7)]);
    assert!(next.release_inherited([&name]).expect("its tap is there").is_empty());
    assert_eq!(next.inherited_on(&name).expect("its tap is there"), [(ALICE, 7)]);
    node.assert_closed();
}

#[privileged::test]
fn the_identity_of_a_tap_deleted_while_no_agent_ran_is_released() {
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

#[privileged::test]
fn a_new_device_with_the_index_of_an_inherited_one_is_attached() {
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

#[privileged::test]
fn an_inherited_classifier_keeps_its_port_closed_and_is_replaced() {
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

#[privileged::test]
fn a_port_in_another_namespace_is_inherited() {
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

#[privileged::test]
fn the_next_agent_passes_frames_for_an_address_it_does_not_serve() {
    let mut node = Bridged::start_with(|config| config.served.push(std::net::IpAddr::from(ELSEWHERE)));
    ask_for(&node.from, ALICE, ELSEWHERE);
    assert!(receives_nothing(&node.to, Mac::BROADCAST));
    node.end();
    node.restart();
    node.assert_closed();
}

#[privileged::test]
fn without_pins_nothing_outlives_the_agent() {
    let mut node = Bridged::start_with(|config| config.pins = None);
    node.assert_closed();
    node.end();
    assert!(node.is_open());
    assert!(!node.bpffs.pins().exists());
}
