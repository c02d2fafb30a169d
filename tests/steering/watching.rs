//! Reports from the kernel: devices that appear and disappear, and the log lines of the programs.

use metadata_common::mac::Mac;
use metadata_common::maps::{ANSWER_LINK, MAX_SLOTS};
use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_datapath::afxdp::{Queues, SocketConfig};
use metadata_links::devices::{Changed, DeviceEvent, LinkWatch};
use metadata_links::error::LinkError;
use metadata_steer::{
    AnswerPath, AttachmentFault, DeviceLookup, HUB_MTU, HUB_QUEUES, Hub, PortLimits, PreviousAgent,
    RELEASE_GRACE, SteerConfig, SteerError, Steering, SteeringMode, exists, release,
};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::netns::Namespace;
use support::tap::{Shape, Tap, set_gro};
use support::{objects, privileged};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::node::{
    ALICE, BOB, Bridged, Node, ask, config, pinned, port, receives, start_in, steered, within,
};

const PATIENCE: Duration = Duration::from_secs(10);
/// Wait after which something counts as not happening.
const MOMENT: Duration = Duration::from_millis(100);

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

async fn quiet(watch: &mut LinkWatch) {
    // A new device keeps changing for a moment (carrier, queueing).
    while timeout(MOMENT, watch.changed()).await.is_ok() {}
}

/// Collects the devices that a watch reports until no change follows for [`MOMENT`].
async fn devices(watch: &mut LinkWatch) -> Vec<DeviceEvent> {
    let mut all = Vec::new();
    while let Ok(changed) = timeout(MOMENT, watch.changed()).await {
        match changed.expect("the watch does not end") {
            Changed::Devices(devices) => all.extend(devices),
            Changed::Unknown => panic!("the watch lost changes"),
        }
    }
    all
}

#[privileged::test]
fn a_created_changed_or_deleted_device_is_reported() {
    let ns = Namespace::new("watch").expect("a namespace");
    runtime().block_on(async {
        let mut watch = LinkWatch::open(Some(ns.name())).expect("a watch");
        for change in ["link add tap0 type bridge", "link set tap0 up", "link del tap0"] {
            ns.ip(change).expect("a change");
            let changed = timeout(PATIENCE, watch.changed()).await;
            assert!(matches!(changed, Ok(Ok(_))), "{change}: {changed:?}");
            quiet(&mut watch).await;
        }
    });
}

#[privileged::test]
fn a_recreated_tap_of_the_same_name_and_index_is_another_device() {
    const IFINDEX: u32 = 4_711;
    let mut node = Node::start();
    let make = || Tap::create_at(&node.ns, "tap0", Shape::default(), IFINDEX).expect("a tap");
    let name = PortName::local("tap0");
    let mut taps = vec![make()];
    node.steering.attach(&name).expect("attached");
    for closed in [false, true] {
        // A bridge reports a device that leaves it as removed, but the device still exists.
        let (bridged, recreated) = runtime().block_on(async {
            let mut watch = LinkWatch::open(Some(node.ns.name())).expect("a watch");
            node.ns.ip_batch("link add br0 type bridge\nlink set tap0 master br0\n").expect("a bridge");
            node.ns.ip_batch("link set tap0 nomaster\nlink del br0\n").expect("no bridge");
            let bridged = devices(&mut watch).await;
            node.ns.ip("link del tap0").expect("the tap is deleted");
            taps.push(make());
            (bridged, devices(&mut watch).await)
        });
        bridged.iter().for_each(|device| node.steering.attachments_mut().mark_deleted(device));
        assert_eq!(
            node.ns.run_in(|| node.steering.attachments().find(&name)).expect("a look-up"),
            DeviceLookup::Attached
        );
        recreated.iter().for_each(|device| node.steering.attachments_mut().mark_deleted(device));
        assert_eq!(
            node.ns.run_in(|| node.steering.attachments().find(&name)).expect("a look-up"),
            DeviceLookup::Other
        );
        let attached = if closed { node.steering.attach_closed(&name) } else { node.steering.attach(&name) };
        attached.expect("the new one is attached");
        assert_eq!(
            node.ns.run_in(|| node.steering.attachments().find(&name)).expect("a look-up"),
            DeviceLookup::Attached
        );
        let shown = node.ns.ip("link show tap0").expect("the tap");
        assert!(shown.contains("xdp"), "{shown}");
    }
}

#[privileged::test]
fn devices_of_another_namespace_are_not_reported() {
    let [watched, other] = [0, 1].map(|_| Namespace::new("watch").expect("a namespace"));
    runtime().block_on(async {
        let mut watch = LinkWatch::open(Some(watched.name())).expect("a watch");
        quiet(&mut watch).await;
        other.ip("link add tap0 type bridge").expect("a change");
        assert!(timeout(MOMENT, watch.changed()).await.is_err());
    });
}

#[privileged::test]
fn the_watch_reports_changes_during_and_after_a_storm_of_changes() {
    let ns = Namespace::new("watch").expect("a namespace");
    // The kernel reports changes only of devices that are up.
    ns.ip_batch("link add br0 type bridge\nlink set br0 up\n").expect("a device");
    // This is far more than the socket holds and than one read takes.
    let storm: String = (0..2_000).map(|n| format!("link set br0 alias a{n}\n")).collect();
    runtime().block_on(async {
        let mut watch = LinkWatch::open(Some(ns.name())).expect("a watch");
        ns.ip_batch(&storm).expect("a storm");
        assert!(matches!(timeout(PATIENCE, watch.changed()).await, Ok(Ok(_))));
        quiet(&mut watch).await;
        ns.ip("link add tap0 type bridge").expect("a change");
        assert!(matches!(timeout(PATIENCE, watch.changed()).await, Ok(Ok(_))), "no report after the storm");
    });
}

#[privileged::test]
fn a_port_exists_only_in_the_namespace_of_its_device() {
    let ns = Namespace::new("watch").expect("a namespace");
    ns.ip("link add tap0 index 4242 type bridge").expect("a device");
    let by_name = PortName { ifname: "tap0".into(), netns: Some(ns.name().into()) };
    let by_path = PortName { netns: Some(ns.path().display().to_string()), ..by_name.clone() };
    let local = PortName::local("tap0");
    let missing = PortName { netns: Some("no-such-namespace".into()), ..by_name.clone() };
    for (port, index) in [(&by_name, Some(4242)), (&by_path, Some(4242)), (&missing, None)] {
        assert_eq!(exists(port).expect("a look-up"), index, "{port}");
    }
    assert_eq!(ns.run_in(|| exists(&local)).expect("a look-up"), Some(4242));
    assert_eq!(exists(&local).expect("a look-up"), None, "the test's own namespace has no such device");
}

/// Collects the lines of a subscriber.
#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl io::Write for Printed {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("not poisoned").write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[privileged::test]
fn a_log_line_of_the_kernel_programs_becomes_a_tracing_event() {
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    let printed = Printed::default();
    let writer = printed.clone();
    // The agent itself names the record of such a guest, so the programs' line is of the level debug.
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
    let subscriber = subscriber.with_writer(move || writer.clone()).finish();
    // This sets the subscriber for this thread only, on which the runtime also runs its tasks.
    let _guard = tracing::subscriber::set_default(subscriber);
    let found = runtime().block_on(async {
        node.steering.reports_mut().forward_logs();
        ask(&tap, ALICE);
        let found = async {
            loop {
                let text = String::from_utf8_lossy(&printed.0.lock().expect("not poisoned")).into_owned();
                if text.contains("not registered") {
                    return text;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, found).await
    });
    let text = found.expect("the line about an unregistered guest");
    assert!(text.contains("DEBUG") && text.contains("52:54:00:00:00:a1"), "{text}");
}

// Programs and pins that another program takes away are noticed and restored while the agent runs.

/// Runs a whole round of checks, and returns the faults that it shows.
fn check(steering: &mut Steering) -> Vec<String> {
    steering.check_soon();
    steering.check(Instant::now());
    steering.attachments().last_check().faults
}

/// Asserts that a round finds exactly one kind of fault, with these words, and the next round none.
fn finds(steering: &mut Steering, fault: AttachmentFault, parts: &[&str]) {
    let before = steering.attachments().last_check().found[&fault];
    let faults = check(steering);
    let [line] = &*faults else { panic!("expected one line, found {faults:?}") };
    assert!(parts.iter().all(|part| line.contains(part)), "{line}: expected {parts:?}");
    assert!(
        steering.attachments().last_check().found[&fault] > before,
        "{:?}",
        steering.attachments().last_check()
    );
    assert_eq!(check(steering), [""; 0], "healthy again");
}

fn pin_names(pins: &Path) -> Vec<String> {
    let names = ["links", "maps"].into_iter().flat_map(|directory| {
        std::fs::read_dir(pins.join("v1").join(directory)).into_iter().flatten().flatten()
    });
    let mut names: Vec<_> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn remove_pins(pins: &Path) {
    for directory in ["links", "maps"] {
        for entry in std::fs::read_dir(pins.join("v1").join(directory)).expect("a list").flatten() {
            std::fs::remove_file(entry.path()).expect("removed");
        }
    }
}

/// Asserts that the port is closed while no agent runs, and that the next one inherits Alice.
fn outlives(node: &mut Bridged) {
    node.end();
    node.assert_closed();
    let next = node.restart();
    assert_eq!(next.identities().iter().map(|bound| bound.mac).collect::<Vec<_>>(), [ALICE]);
}

#[privileged::test]
fn a_program_that_somebody_detached_is_attached_again() {
    for mode in [SteeringMode::Xdp, SteeringMode::Tcx] {
        let mut node = Bridged::start_with(|config| config.mode = mode);
        assert_eq!(check(node.steering.as_mut().expect("it runs")), [""; 0]);
        let [link] = &*node.bpffs.port_links() else { panic!("one link") };
        objects::detach_pinned(&node.bpffs.pins().join("v1/links").join(link)).expect("detached");
        assert!(node.is_open(), "{mode:?}: nothing is on the tap");
        let steering = node.steering.as_mut().expect("it runs");
        let before = steered(steering);
        finds(steering, AttachmentFault::Detached, &["1 eBPF program", "tap0", "attached again"]);
        node.assert_closed();
        let now = node.steering.as_ref().map(steered);
        assert_eq!(now, Some(before + 1), "{mode:?}: Alice is steered again");
        outlives(&mut node);
    }
}

#[privileged::test]
fn the_program_of_a_hub_that_somebody_detached_is_attached_again() {
    let mut node = Bridged::start();
    let hub = node.bpffs.links().into_iter().find(|link| link.starts_with("socket")).expect("a link");
    let pin = node.bpffs.pins().join("v1/links").join(hub);
    objects::detach_pinned(&pin).expect("detached");
    let steering = node.steering.as_mut().expect("it runs");
    finds(steering, AttachmentFault::Detached, &["imds-in", "attached again"]);
    assert!(pin.exists(), "it is pinned");
}

#[privileged::test]
fn a_device_of_a_hub_that_somebody_set_down_is_set_up_again() {
    let mut node = Node::start();
    let steering = &mut node.steering;
    assert_eq!(check(steering), [""; 0]);
    for (device, change) in [
        ("imds-in", "down"),
        ("imds-out", "down"),
        ("imds-tap", "down"),
        ("imds-in", "mtu 1500"),
        ("imds-tap", "mtu 1500"),
    ] {
        node.ns.ip(&format!("link set {device} {change}")).expect("set");
        finds(steering, AttachmentFault::Down, &["set down", device, "up again", "network manager"]);
        let shown = node.ns.ip(&format!("link show {device}")).expect("shown");
        assert!(shown.contains(",UP") && shown.contains(&format!("mtu {HUB_MTU}")), "{device}: {shown}");
    }
    // After an event, the devices are looked at before the next round is due.
    node.ns.ip("link set imds-in down").expect("set");
    steering.check(Instant::now());
    assert_eq!(steering.attachments().last_check().faults, [""; 0], "the next round is not due");
    let Hub { inner_ifindex: ifindex, inner_name: name, .. } = steering.hubs().all()[0].clone();
    let cookie = node.ns.run_in(metadata_links::netns::cookie).expect("a cookie");
    steering.note_device(&DeviceEvent { cookie, ifindex, name, gone: false, mtu: None });
    steering.check(Instant::now());
    let faults = steering.attachments().last_check().faults;
    assert!(faults.iter().any(|line| line.contains("imds-in")), "{faults:?}");
}

#[privileged::test]
fn pins_that_somebody_removed_are_made_again() {
    let mut node = Bridged::start();
    let pins = node.bpffs.pins();
    let before = pin_names(&pins);
    remove_pins(&pins);
    let steering = node.steering.as_mut().expect("it runs");
    finds(steering, AttachmentFault::Unpinned, &["pins were removed", "pinned again"]);
    assert_eq!(pin_names(&pins), before);
    outlives(&mut node);
}

#[privileged::test]
fn a_removed_directory_of_pins_is_made_again_at_the_next_attach_or_check() {
    for attaches in [true, false] {
        let mut node = Bridged::start();
        let pins = node.bpffs.pins();
        let before = pin_names(&pins);
        remove_pins(&pins);
        for directory in ["v1/links", "v1/maps", "v1", ""] {
            std::fs::remove_dir(pins.join(directory)).expect("removed");
        }
        let (_tap, name) = port(&node.ns, "tap2", &node.ns);
        let steering = node.steering.as_mut().expect("it runs");
        if attaches {
            steering.attach(&name).expect("attached, although the directory was removed");
            steering.detach(&name).expect("detached");
        }
        check(steering);
        assert_eq!(check(steering), [""; 0]);
        assert_eq!(pin_names(&pins), before);
        outlives(&mut node);
    }
}

#[privileged::test]
fn a_forced_release_that_is_abandoned_is_undone() {
    let mut node = Bridged::start();
    let pins = node.bpffs.pins();
    let before = pin_names(&pins);
    let released = release(&pins, true).expect("released");
    assert!(released.agent_runs);
    let (_tap, name) = port(&node.ns, "tap2", &node.ns);
    let steering = node.steering.as_mut().expect("it runs");
    steering.attach(&name).expect("new ports are attached");
    assert!(!pins.join("v1").exists(), "the agent may end soon, and then the taps are to be open");
    let start = Instant::now();
    for (after, is_pinned) in [(Duration::from_secs(40), false), (RELEASE_GRACE * 2, true)] {
        steering.check(start + after);
        let faults = steering.attachments().last_check().faults;
        assert_eq!(faults.iter().any(|line| line.contains("release --force")), !is_pinned, "{faults:?}");
        assert_eq!(
            faults.len(),
            usize::from(!is_pinned),
            "pins that are made again are no fault: {faults:?}"
        );
        assert_eq!(pins.join("v1").exists(), is_pinned, "{after:?} after the release");
    }
    steering.detach(&name).expect("detached");
    assert_eq!(check(steering), [""; 0]);
    assert_eq!(pin_names(&pins), before);
    // On SIGHUP everything is pinned again, before or after a check has noticed the release.
    for is_noticed in [false, true] {
        release(&pins, true).expect("released");
        let steering = node.steering.as_mut().expect("it runs");
        if is_noticed {
            steering.check(Instant::now() + RELEASE_GRACE * 3);
            let faults = steering.attachments().last_check().faults;
            assert!(faults[0].contains("release --force"), "{faults:?}");
        }
        assert_eq!(check(steering), [""; 0], "noticed: {is_noticed}");
        assert_eq!(pin_names(&pins), before, "noticed: {is_noticed}");
    }
    remove_pins(&pins);
    let steering = node.steering.as_mut().expect("it runs");
    assert_ne!(check(steering), [""; 0], "pins that somebody removes later are a fault");
    outlives(&mut node);
}

#[privileged::test]
fn a_file_system_over_the_pins_is_said_and_hides_them_from_others_only() {
    let mut node = Bridged::start();
    node.bpffs.cover().expect("a second bpffs");
    let (_tap, name) = port(&node.ns, "tap2", &node.ns);
    let steering = node.steering.as_mut().expect("it runs");
    for _ in 0..2 {
        let faults = check(steering);
        let [line] = &*faults else { panic!("expected one line, found {faults:?}") };
        assert!(line.contains("mounted over it") && line.contains("umount"), "{line}");
    }
    steering.attach(&name).expect("attached");
    assert!(!node.bpffs.pins().exists(), "nothing is pinned in the other file system");
    node.bpffs.uncover().expect("unmounted");
    let steering = node.steering.as_mut().expect("it runs");
    assert_eq!(check(steering), [""; 0]);
    steering.detach(&name).expect("detached");
    assert_eq!(node.bpffs.port_links().len(), 1);
    outlives(&mut node);
}

#[privileged::test]
fn a_pin_that_cannot_be_made_names_the_error_and_a_remedy() {
    let mut node = Bridged::start();
    let (_tap, name) = port(&node.ns, "tap2", &node.ns);
    node.bpffs.set_read_only(true).expect("read-only");
    let steering = node.steering.as_mut().expect("it runs");
    let error = steering.attach(&name).expect_err("it cannot be pinned").to_string();
    assert!(error.contains("Read-only file system") && error.contains("remount,rw"), "{error}");
    node.bpffs.set_read_only(false).expect("writable");
    node.steering.as_mut().expect("it runs").attach(&name).expect("attached");
}

#[privileged::test]
fn what_the_next_agent_has_taken_over_is_not_repaired_by_the_former() {
    let mut node = Bridged::start();
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut next = start_in(&node.ns, &takeover).expect("the next agent starts");
    let (name, former) = (node.name.clone(), node.steering.as_mut().expect("it runs"));
    node.ns.run_in(|| {
        next.attach(&name).expect("found");
        assert_eq!(check(&mut next), [""; 0], "it checks nothing before the takeover");
        next.take_over_all().expect("taken over");
    });
    former.leave_to_pins();
    let links = node.bpffs.port_links();
    std::fs::remove_file(node.bpffs.pins().join("v1/links").join(&links[0])).expect("removed");
    assert_eq!(check(former), [""; 0], "the port belongs to the next agent");
    assert!(node.bpffs.port_links().is_empty());
    finds(&mut next, AttachmentFault::Unpinned, &["pinned again"]);
    assert_eq!(node.bpffs.port_links(), links);
}

#[privileged::test]
fn a_deleted_device_is_no_fault() {
    let mut node = Bridged::start();
    node.ns.ip("link del tap0").expect("deleted");
    assert_eq!(check(node.steering.as_mut().expect("it runs")), [""; 0]);
}

// An impossible operation is refused with a reason and changes nothing.

#[privileged::test]
fn a_second_agent_of_the_same_hub_name_is_refused_and_the_first_continues() {
    let mut node = Node::start();
    let error = start_in(&node.ns, &config()).err().expect("the hub name is in use");
    assert!(matches!(error, SteerError::Link(LinkError::HubInUse { .. })), "{error}");
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    node.steering.bind(&name, ALICE, 0).expect("bound");
    ask(&tap, ALICE);
    node.expect_count(Verdict::SocketDropAbsent, 1);
}

#[privileged::test]
fn a_port_of_another_agent_is_refused_by_name() {
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

#[privileged::test]
fn a_foreign_device_with_a_hubs_name_is_not_touched() {
    for device in ["imds-out", "imds-in"] {
        let ns = Namespace::new("steer").expect("a namespace");
        ns.ip(&format!("link add {device} type bridge")).expect("a bridge");
        let error = start_in(&ns, &config()).err().expect("the name is taken");
        assert!(error.to_string().contains("bridge"), "{error}");
        let links = ns.ip("-o link").expect("the list of links");
        assert_eq!(links.matches("imds").count(), 1, "{links}");
    }
}

#[privileged::test]
fn attaching_a_port_under_a_second_name_of_its_namespace_is_refused() {
    let mut node = Node::start();
    let pod = Namespace::new("pod").expect("a namespace");
    let (_tap, by_name) = port(&pod, "tap0", &node.ns);
    let by_path = PortName { netns: Some(pod.path().display().to_string()), ..by_name.clone() };
    node.steering.attach(&by_name).expect("attached");
    let error = node.steering.attach(&by_path).expect_err("it is the same device");
    assert!(matches!(&error, SteerError::SamePort { other, .. } if *other == by_name), "{error}");
    assert_eq!(node.steering.attachments().ports().count(), 1);
}

#[privileged::test]
fn an_impossible_binding_is_refused() {
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

#[privileged::test]
fn a_port_that_does_not_exist_is_refused() {
    let mut node = Node::start();
    let error = node.steering.attach(&PortName::local("tap0")).expect_err("no such device");
    assert!(matches!(error, SteerError::PortGone { .. }), "{error}");
    let elsewhere = PortName { ifname: "tap0".into(), netns: Some("no-such-namespace".into()) };
    let error = node.steering.attach(&elsewhere).expect_err("no such namespace");
    assert!(matches!(error, SteerError::Link(LinkError::Namespace { .. })), "{error}");
    assert_eq!(node.steering.attachments().ports().count(), 0);
}

#[privileged::test]
fn each_port_has_its_own_limit() {
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

#[privileged::test]
fn a_device_without_native_xdp_is_steered_by_generic_xdp() {
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

// Steering counts each frame that a device refuses or has no room for, by device.

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

#[privileged::test]
fn an_answer_that_the_full_ring_of_a_tap_refuses_is_counted() {
    let mut node = Node::start();
    let _tap = port_with_short_ring(&mut node);
    for _ in 0..20 {
        node.answer(3);
    }
    node.expect_count(Verdict::HubDelivered, 20);
    node.steering.inspect_devices();
    assert_eq!(node.steering.losses().ports, 20 - RING);
}

#[privileged::test]
fn a_kernel_answer_that_the_full_ring_of_a_tap_refuses_is_counted() {
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

#[privileged::test]
fn a_storm_of_many_senders_loses_no_frame_before_the_sockets() {
    let cpus = u32::try_from(std::thread::available_parallelism().map_or(1, usize::from)).unwrap_or(1);
    let (sent, delivered, lost) = flood(cpus.min(HUB_QUEUES), 2 * cpus, 50_000);
    assert_eq!((delivered, lost), (sent, 0));
}

#[privileged::test]
fn frames_that_a_full_veth_refuses_are_counted() {
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

#[privileged::test]
fn a_veth_of_another_namespace_is_reached_only_while_its_peer_has_gro_on() {
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

#[privileged::test]
fn a_veth_of_the_agents_namespace_is_reached_with_and_without_gro() {
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

#[privileged::test]
fn a_slot_moved_from_a_bare_veth_to_a_tap_gets_its_answers_there() {
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

#[privileged::test]
fn a_new_device_with_the_index_of_a_deleted_veth_gets_no_answer() {
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
