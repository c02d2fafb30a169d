//! The directory of pins: its permissions, damage to it, and its release.

use crate::node::{ALICE, Bridged, pinned, port, start_in, steered};
use metadata_steer::{PinsError, PreviousAgent, ReleaseSummary, SteerConfig, SteerError, release};
use std::os::unix::fs::PermissionsExt;
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::privileged;

#[test]
fn pins_and_their_directories_are_accessible_to_the_owner_only() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_pin_directory_that_others_may_write_to_is_refused() {
    if !privileged::or_skip() {
        return;
    }
    let bpffs = Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    std::fs::create_dir(bpffs.pins()).expect("a directory");
    std::fs::set_permissions(bpffs.pins(), PermissionsExt::from_mode(0o777)).expect("open for all");
    let error = start_in(&ns, &pinned(&bpffs)).err().expect("a refusal");
    assert!(matches!(error, SteerError::Pins(PinsError::Exposed { mode: 0o777, .. })), "{error}");
}

#[test]
fn damaged_maps_are_replaced_while_the_port_stays_closed() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn entries_that_are_not_links_are_kept_or_replaced() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn ports_pinned_by_another_version_are_moved_to_this_version() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn an_agent_of_another_version_keeps_its_ports_from_a_start_and_a_takeover() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn release_unpins_all_links_and_maps() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_forced_release_does_not_detach_the_ports_of_a_running_agent() {
    if !privileged::or_skip() {
        return;
    }
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
