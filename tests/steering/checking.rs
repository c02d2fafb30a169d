//! Programs and pins that somebody else takes away are noticed and restored while the agent runs.

use crate::node::{ALICE, Bridged, Node, pinned, port, start_in, steered};
use metadata_links::watch::DeviceEvent;
use metadata_steer::{
    AttachmentFault, HUB_MTU, Hub, PreviousAgent, RELEASE_GRACE, SteerConfig, Steering, SteeringMode, release,
};
use std::path::Path;
use std::time::{Duration, Instant};
use support::objects;
use support::privileged;

/// Runs a whole round of checks, and returns the faults that it shows.
fn check(steering: &mut Steering) -> Vec<String> {
    steering.check_soon();
    steering.check(Instant::now());
    steering.attachments().faults
}

/// Asserts that a round finds exactly one kind of fault, with these words, and the next round none.
fn finds(steering: &mut Steering, fault: AttachmentFault, parts: &[&str]) {
    let before = steering.attachments().found[&fault];
    let faults = check(steering);
    let [line] = &*faults else { panic!("expected one line, found {faults:?}") };
    assert!(parts.iter().all(|part| line.contains(part)), "{line}: expected {parts:?}");
    assert!(steering.attachments().found[&fault] > before, "{:?}", steering.attachments());
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

#[test]
fn a_program_that_somebody_detached_is_attached_again() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn the_program_of_a_hub_that_somebody_detached_is_attached_again() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let hub = node.bpffs.links().into_iter().find(|link| link.starts_with("socket")).expect("a link");
    let pin = node.bpffs.pins().join("v1/links").join(hub);
    objects::detach_pinned(&pin).expect("detached");
    let steering = node.steering.as_mut().expect("it runs");
    finds(steering, AttachmentFault::Detached, &["imds-in", "attached again"]);
    assert!(pin.exists(), "it is pinned");
}

#[test]
fn a_device_of_a_hub_that_somebody_set_down_is_set_up_again() {
    if !privileged::or_skip() {
        return;
    }
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
    assert_eq!(steering.attachments().faults, [""; 0], "the next round is not due");
    let Hub { inner_ifindex: ifindex, inner_name: name, .. } = steering.hubs()[0].clone();
    let cookie = node.ns.run_in(metadata_links::netns::cookie).expect("a cookie");
    steering.note_device(&DeviceEvent { cookie, ifindex, name, gone: false, mtu: None });
    steering.check(Instant::now());
    let faults = steering.attachments().faults;
    assert!(faults.iter().any(|line| line.contains("imds-in")), "{faults:?}");
}

#[test]
fn pins_that_somebody_removed_are_made_again() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let pins = node.bpffs.pins();
    let before = pin_names(&pins);
    remove_pins(&pins);
    let steering = node.steering.as_mut().expect("it runs");
    finds(steering, AttachmentFault::Unpinned, &["pins were removed", "pinned again"]);
    assert_eq!(pin_names(&pins), before);
    outlives(&mut node);
}

#[test]
fn a_removed_directory_of_pins_is_made_again_at_the_next_attach_or_check() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_forced_release_that_is_abandoned_is_undone() {
    if !privileged::or_skip() {
        return;
    }
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
        let faults = steering.attachments().faults;
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
            let faults = steering.attachments().faults;
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

#[test]
fn a_file_system_over_the_pins_is_said_and_hides_them_from_others_only() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_pin_that_cannot_be_made_names_the_error_and_a_remedy() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let (_tap, name) = port(&node.ns, "tap2", &node.ns);
    node.bpffs.set_read_only(true).expect("read-only");
    let steering = node.steering.as_mut().expect("it runs");
    let error = steering.attach(&name).expect_err("it cannot be pinned").to_string();
    assert!(error.contains("Read-only file system") && error.contains("remount,rw"), "{error}");
    node.bpffs.set_read_only(false).expect("writable");
    node.steering.as_mut().expect("it runs").attach(&name).expect("attached");
}

#[test]
fn what_the_next_agent_has_taken_over_is_not_repaired_by_the_former() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let takeover = SteerConfig { adopt: PreviousAgent::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut next = start_in(&node.ns, &takeover).expect("the next agent starts");
    let (name, former) = (node.name.clone(), node.steering.as_mut().expect("it runs"));
    node.ns.run_in(|| {
        next.attach(&name).expect("found");
        assert_eq!(check(&mut next), [""; 0], "it checks nothing before the takeover");
        next.take_over_all().expect("taken over");
    });
    former.handed_over();
    let links = node.bpffs.port_links();
    std::fs::remove_file(node.bpffs.pins().join("v1/links").join(&links[0])).expect("removed");
    assert_eq!(check(former), [""; 0], "the port belongs to the next agent");
    assert!(node.bpffs.port_links().is_empty());
    finds(&mut next, AttachmentFault::Unpinned, &["pinned again"]);
    assert_eq!(node.bpffs.port_links(), links);
}

#[test]
fn a_deleted_device_is_no_fault() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.ns.ip("link del tap0").expect("deleted");
    assert_eq!(check(node.steering.as_mut().expect("it runs")), [""; 0]);
}
