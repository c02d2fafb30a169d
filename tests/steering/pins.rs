//! What is pinned outlives the agent: ports stay closed, and the next agent goes on where the last one was.

use crate::node::{ALICE, BOB, ask, ask_for, config, delete, gets, gets_nothing, port, start_in, within};
use metadata_base::port::PortName;
use metadata_common::cookie::Key;
use metadata_common::mac::Mac;
use metadata_common::verdict::Verdict;
use metadata_links::error::LinkError;
use metadata_steer::{Adopt, By, Mode, PinsError, Released, SteerConfig, SteerError, Steering, release};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::privileged;
use support::tap::Tap;

/// An address that is nobody's business.
const ELSEWHERE: [u8; 4] = [10, 0, 2, 99];

fn pinned(bpffs: &Bpffs) -> SteerConfig {
    SteerConfig { pins: Some(bpffs.pins()), key: Key([4, 2]), ..config() }
}

/// A node with two taps on a bridge: what the first sends to all and may leave it arrives at the second.
struct Bridged {
    steering: Option<Steering>,
    from: Tap,
    to: Tap,
    name: PortName,
    ns: Namespace,
    bpffs: Bpffs,
}

impl Bridged {
    /// With an agent that has the first tap, and Alice bound there as slot 7.
    fn start_with(change: impl FnOnce(&mut SteerConfig)) -> Self {
        let bpffs = Bpffs::mount().expect("a bpffs");
        let ns = Namespace::new("steer").expect("a namespace");
        let (from, name) = port(&ns, "tap0", &ns);
        let (to, _) = port(&ns, "tap1", &ns);
        ns.ip_batch(
            "link add br0 type bridge\nlink set br0 up\nlink set tap0 master br0\nlink set tap1 master br0\n",
        )
        .expect("a bridge");
        let mut config = pinned(&bpffs);
        change(&mut config);
        let mut steering = start_in(&ns, &config).expect("steering starts");
        ns.run_in(|| {
            steering.attach(&name).expect("attached");
            steering.bind(&name, ALICE, 7).expect("bound");
        });
        Self { steering: Some(steering), from, to, name, ns, bpffs }
    }

    fn start() -> Self {
        Self::start_with(|_| {})
    }

    fn end(&mut self) {
        drop(self.steering.take());
    }

    fn restart(&mut self) -> &mut Steering {
        let next = start_in(&self.ns, &pinned(&self.bpffs)).expect("the next agent starts");
        self.steering.insert(next)
    }

    /// Nothing for a metadata address leaves the port, from whomever; what is for others does.
    fn assert_closed(&self) {
        for mac in [ALICE, BOB] {
            ask(&self.from, mac);
            assert!(gets_nothing(&self.to, Mac::BROADCAST), "{mac} asked, and it was heard");
            ask_for(&self.from, mac, ELSEWHERE);
            assert!(gets(&self.to, Mac::BROADCAST), "{mac} asked for somebody else, and was not heard");
        }
    }

    /// True once what is for a metadata address leaves the port; the kernel takes a program off a little later.
    fn is_open(&self) -> bool {
        let heard = || {
            ask(&self.from, ALICE);
            (!gets_nothing(&self.to, Mac::BROADCAST)).then_some(())
        };
        within(Duration::from_secs(5), heard).is_some()
    }
}

fn steered(steering: &Steering) -> u64 {
    steering.counters().expect("counters").get(Verdict::SteerArp)
}

#[test]
fn a_port_stays_closed_when_its_agent_ends_and_the_next_one_goes_on() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.assert_closed();
    let key = node.steering.as_ref().map(Steering::key);
    for _ in 0..3 {
        node.end();
        node.assert_closed();
        let name = node.name.clone();
        let next = node.restart();
        assert!(next.has_left());
        assert_eq!(Some(next.key()), key);
        let before = next.identities();
        assert_eq!(before.iter().map(|bound| (bound.mac, bound.slot)).collect::<Vec<_>>(), [(ALICE, 7)]);
        next.attach(&name).expect("attached");
        assert_eq!(next.bound_on(&name), [(ALICE, 7)]);
        next.bind(&name, ALICE, 7).expect("bound as before");
        assert_eq!(next.identities(), before);
        assert!(next.give_up_left([]).expect("nothing is wanted").is_empty());
        let asked = steered(next);
        node.assert_closed();
        let next = node.steering.as_ref().expect("it runs");
        assert_eq!(steered(next), asked + 1, "Alice is steered, Bob is not");
    }
    assert_eq!(node.bpffs.port_links().len(), 1);
}

#[test]
fn a_guest_of_the_last_agent_is_steered_before_it_is_named_again() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let next = node.restart();
    let before = steered(next);
    ask(&node.from, ALICE);
    let next = node.steering.as_ref().expect("it runs");
    assert_eq!(steered(next), before + 1);
}

#[test]
fn what_nobody_names_is_given_up_with_its_slots() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let next = node.restart();
    assert_eq!(next.give_up_left([]).expect("nothing is wanted"), [7]);
    assert!(!next.has_left() && next.identities().is_empty());
    assert!(node.bpffs.port_links().is_empty());
    assert!(node.is_open());
}

#[test]
fn what_is_wanted_and_not_attached_yet_is_not_given_up() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let name = node.name.clone();
    let next = node.restart();
    assert_eq!(next.left_on(&name).expect("its tap is there"), [(ALICE, 7)]);
    assert!(next.give_up_left([&name]).expect("its tap is there").is_empty());
    assert_eq!(next.left_on(&name).expect("its tap is there"), [(ALICE, 7)]);
    node.assert_closed();
}

#[test]
fn a_tap_that_went_while_no_agent_ran_is_forgotten() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    node.ns.ip("link del tap0").expect("the tap goes");
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    let next = node.restart();
    next.attach(&name).expect("the new tap of that name is attached");
    assert!(next.bound_on(&name).is_empty(), "nobody is bound on it");
    assert_eq!(next.give_up_left([]).expect("nothing is wanted"), [7]);
    assert_eq!(node.bpffs.port_links().len(), 1, "{:?}", node.bpffs.port_links());
    delete(tap, &node.ns);
}

#[test]
fn a_device_of_the_same_index_is_attached_anew() {
    if !privileged::or_skip() {
        return;
    }
    let bpffs = Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    let mut steering = start_in(&ns, &pinned(&bpffs)).expect("steering starts");
    let veth = "link add dev veth7 index 77 type veth peer name far7\nlink set veth7 up\nlink set far7 up\n";
    let name = PortName::local("veth7");
    ns.ip_batch(veth).expect("a veth");
    steering.attach(&name).expect("attached");
    steering.bind(&name, ALICE, 7).expect("bound");
    drop(steering);
    ns.ip("link del veth7").expect("it goes");
    ns.ip_batch(veth).expect("a veth of the same index");
    let mut next = start_in(&ns, &pinned(&bpffs)).expect("the next agent starts");
    next.attach(&name).expect("attached");
    next.bind(&name, ALICE, 7).expect("bound");
    let shown = ns.ip("link show veth7").expect("the veth");
    assert!(shown.contains("xdp"), "{shown}");
    assert_eq!(bpffs.port_links().len(), 1);
}

#[test]
fn without_pins_nothing_stays() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start_with(|config| config.pins = None);
    node.assert_closed();
    node.end();
    assert!(node.is_open());
    assert!(!node.bpffs.pins().exists());
}

#[test]
fn pins_are_private_and_so_is_their_directory() {
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
fn a_directory_others_may_write_to_is_refused() {
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
fn damaged_maps_are_replaced_and_the_port_is_closed_all_the_time() {
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
            "{what}: the next has the new maps"
        );
    }
}

#[test]
fn what_is_no_link_is_left_alone_or_replaced() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let links = node.bpffs.pins().join("v1/links");
    std::fs::create_dir(links.join("something")).expect("a directory");
    let maps = node.bpffs.pins().join("v1/maps");
    // A map under the name of a link, which went with its pin.
    let own = node.bpffs.port_links();
    std::fs::rename(maps.join("AGENT"), links.join(&own[0])).expect("renamed over the link");
    assert!(node.is_open());
    let name = node.name.clone();
    node.restart().attach(&name).expect("attached anew");
    node.assert_closed();
    assert!(links.join("something").exists());
    node.end();
    node.assert_closed();
}

#[test]
fn ports_of_another_version_are_taken_over_in_place() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    node.end();
    let pins = node.bpffs.pins();
    std::fs::rename(pins.join("v1"), pins.join("v0")).expect("an older version's");
    let name = node.name.clone();
    let next = node.restart();
    assert!(!next.has_left());
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
fn a_second_agent_on_the_same_pins_is_told_of_takeover() {
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
fn release_takes_everything_off() {
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
    assert_eq!(release(&node.bpffs.pins(), false).expect("nothing is no error"), Released::default());
}

#[test]
fn release_by_force_leaves_a_running_agent_its_ports() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let released = release(&node.bpffs.pins(), true).expect("released");
    assert_eq!(released.links, 2, "the port's and the hub's");
    node.assert_closed();
    let (_tap, name) = port(&node.ns, "tap2", &node.ns);
    let steering = node.steering.as_mut().expect("it runs");
    assert!(steering.attach(&name).is_err(), "there is nowhere to pin it");
    node.end();
    assert!(node.is_open());
}

#[test]
fn the_classifier_is_gone_on_with_and_keeps_the_port_closed() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start_with(|config| config.mode = Mode::Tcx);
    node.assert_closed();
    node.end();
    node.assert_closed();
    let name = node.name.clone();
    // In the mode that has XDP.
    let next = node.restart();
    next.attach(&name).expect("attached");
    assert_eq!(next.steered_by(&name), Some(By::Xdp));
    assert_eq!(node.bpffs.port_links().len(), 1, "{:?}", node.bpffs.port_links());
    node.assert_closed();
    let next = node.steering.as_mut().expect("it runs");
    next.switch(&name, By::Tcx).expect("switched");
    assert!(node.bpffs.port_links()[0].starts_with("port_tcx"));
    node.end();
    node.assert_closed();
}

#[test]
fn a_port_in_another_namespace_is_gone_on_with() {
    if !privileged::or_skip() {
        return;
    }
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
    next.attach(&another).expect("a namespace that is new");
    next.bind(&another, ALICE, 9).expect("bound");
    let netns: std::collections::HashSet<_> = next.identities().iter().map(|bound| bound.netns).collect();
    assert_eq!(netns.len(), 3, "each namespace has a number of its own");
    let before = steered(next);
    ask(&tap, BOB);
    assert_eq!(node.steering.as_ref().map(steered), Some(before + 1));
}

#[test]
fn an_address_no_longer_served_is_passed_by_the_next_agent() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start_with(|config| config.served.push(std::net::IpAddr::from(ELSEWHERE)));
    ask_for(&node.from, ALICE, ELSEWHERE);
    assert!(gets_nothing(&node.to, Mac::BROADCAST));
    node.end();
    node.restart();
    node.assert_closed();
}

#[test]
fn taking_over_changes_nothing_before_it_is_done_and_all_of_it_then() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let mut old = node.steering.take().expect("it runs");
    let takeover = SteerConfig { adopt: Adopt::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
    assert_eq!((old.side(), new.side(), old.key()), (0, 1, new.key()));
    assert_eq!(new.hubs()[0].number, 32);
    new.attach(&node.name).expect("found");
    new.bind(&node.name, ALICE, 7).expect("found");
    let refused = new.bind(&node.name, BOB, 8).expect_err("not yet");
    assert!(matches!(refused, SteerError::TakingOver { .. }), "{refused}");
    // Meanwhile the first agent gets one more.
    let (late, late_name) = port(&node.ns, "tap2", &node.ns);
    assert!(new.attach(&late_name).is_err(), "not yet");
    old.attach(&late_name).expect("attached");
    old.bind(&late_name, BOB, 9).expect("bound");
    assert_eq!(old.agent().expect("readable").map(|agent| agent.side), Some(0));

    new.take_over_all().expect("taken over");
    assert_eq!(new.agent().expect("readable").map(|agent| agent.side), Some(1));
    let mut slots: Vec<_> = new.identities().iter().map(|bound| bound.slot).collect();
    slots.sort_unstable();
    assert_eq!(slots, [7, 9]);
    new.attach(&late_name).expect("attached");
    assert_eq!(new.bound_on(&late_name), [(BOB, 9)]);
    old.leave();
    node.assert_closed();
    let before = steered(&new);
    ask(&node.from, ALICE);
    ask(&late, BOB);
    assert_eq!(steered(&new), before + 2, "both are steered to hubs that are there");
    new.finish_take_over().expect("finished");
    new.bind(&node.name, BOB, 8).expect("now it is ours");
    let left = node.ns.ip("-o link").expect("the list of links");
    assert!(!left.contains("imds-out") && left.contains("imds-o32"), "{left}");
    // Killed or not, the one after begins on the first side again.
    drop(new);
    let name = node.name.clone();
    let next = node.restart();
    assert_eq!(next.side(), 0);
    next.attach(&name).expect("attached");
    assert_eq!(next.bound_on(&name), [(ALICE, 7), (BOB, 8)]);
}

#[test]
fn what_is_unwanted_during_a_takeover_goes_after_it() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Bridged::start();
    let mut old = node.steering.take().expect("it runs");
    old.bind(&node.name, BOB, 8).expect("bound");
    let takeover = SteerConfig { adopt: Adopt::TakeOver { side: 1 }, ..pinned(&node.bpffs) };
    let mut new = start_in(&node.ns, &takeover).expect("the second agent starts");
    new.attach(&node.name).expect("found");
    new.unbind(8).expect("put off");
    assert_eq!(old.identities().len(), 2);
    new.take_over_all().expect("taken over");
    assert_eq!(new.bound_on(&node.name), [(ALICE, 7)]);
    old.leave();
    let before = steered(&new);
    ask(&node.from, BOB);
    ask(&node.from, ALICE);
    assert_eq!(steered(&new), before + 1);
}

#[test]
fn only_what_is_pinned_can_be_taken_over() {
    if !privileged::or_skip() {
        return;
    }
    let bpffs = Bpffs::mount().expect("a bpffs");
    let ns = Namespace::new("steer").expect("a namespace");
    for (pins, side) in [(None, 1), (Some(bpffs.pins()), 1), (Some(bpffs.pins()), 2)] {
        let config = SteerConfig { pins, adopt: Adopt::TakeOver { side }, ..config() };
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
fn hubs_of_an_agent_that_was_killed_are_removed_from_either_side() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    // What is left of a hub when its agent is killed: the veth, not the tap.
    ns.ip_batch(
        "link add imds-o33 type veth peer name imds-i33\nlink add imds-o5 type veth peer name imds-i5\n",
    )
    .expect("left over");
    let _node = start_in(&ns, &config()).expect("steering starts");
    let links = ns.ip("-o link").expect("the list of links");
    assert!(!links.contains("imds-o33") && !links.contains("imds-o5"), "{links}");
}

#[test]
fn a_live_agent_on_the_other_side_is_an_error_that_names_takeover() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("steer").expect("a namespace");
    ns.ip("tuntap add imds-t32 mode tap").expect("a tap");
    let error = start_in(&ns, &config()).err().expect("a refusal");
    assert!(matches!(error, SteerError::Link(LinkError::HubInUse { .. })), "{error}");
    assert!(error.to_string().contains("--takeover"), "{error}");
}
