//! Tests the checks of directories, the node and ports.

use super::super::super::facts::{Directory, Facts, FileSystem, Found, Pins, Records};
use super::super::super::{Check, Status};
use super::super::all;
use super::{directory, healthy, judge, program, refused, room, the_tap, wrong};
use metadata_steer::probe::{AddressUse, Filter, PinnedLink, Place, Search};

#[test]
fn directories_of_pins_and_files_are_checked() {
    use Status::{Fail, Warn};
    fn pins(facts: &mut Facts) -> &mut Pins {
        facts.pins.as_mut().expect("pins")
    }
    fn state(facts: &mut Facts) -> &mut Directory {
        &mut facts.directories[1].1
    }
    fn state_room(facts: &mut Facts) -> &mut FileSystem {
        state(facts).file_system.as_mut().expect("a file system")
    }
    judge(&[
        (
            "unmounted",
            |f| pins(f).file_system = room(false),
            "pins.bpffs",
            Fail,
            &["mount -t bpf", "--no-pins"],
        ),
        (
            "read-only",
            |f| pins(f).file_system.as_mut().expect("one").read_only = true,
            "pins.bpffs",
            Fail,
            &["remount,rw"],
        ),
        (
            "stale",
            |f| pins(f).links = Ok(vec![PinnedLink { name: "port-1-7-9".into(), ifindex: Some(0) }]),
            "pins.links",
            Warn,
            &["port-1-7-9", "release"],
        ),
        ("other version", |f| pins(f).versions.push("v2".into()), "pins.versions", Warn, &["v2"]),
        ("no records", |f| f.directories[0].1.found = Ok(None), "directory", Fail, &["records", "--records"]),
        (
            "anybody's records",
            |f| f.directories[0].1 = directory(0o777),
            "directory",
            Warn,
            &["0777", "chmod 0750"],
        ),
        ("open state", |f| *state(f) = directory(0o755), "directory", Warn, &["0755", "chmod 0700"]),
        ("full", |f| state_room(f).free = 4_096, "directory", Fail, &["4 KiB"]),
        ("nearly full", |f| state_room(f).free = 2 << 20, "directory", Warn, &["2 MiB"]),
        ("read-only state", |f| state_room(f).read_only = true, "directory", Fail, &["read-only"]),
        (
            "a file",
            |f| state(f).found = Ok(Some(Found { directory: false, mode: 0o600, owner: 0 })),
            "directory",
            Fail,
            &["not a directory"],
        ),
        (
            "somebody's",
            |f| state(f).found = Ok(Some(Found { directory: true, mode: 0o700, owner: 1_000 })),
            "directory",
            Warn,
            &["user 1000", "chown 0"],
        ),
        ("refused", |f| state(f).found = Err(refused()), "directory", Fail, &["not permitted"]),
        (
            "a bad record",
            |f| {
                let bad = vec![("b.yaml".into(), "b.yaml:2: no".into())];
                f.records = Some(Records { count: 2, refused: bad, refused_count: 1, unreadable: None });
            },
            "records",
            Warn,
            &["1 of 2 records", "b.yaml:2", "xdp-imds check"],
        ),
        ("none named", |f| f.records = None, "records", Warn, &["--records"]),
    ]);
    let mut facts = healthy();
    facts.pins = None;
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "pins are turned off");
    (facts.records, facts.wanted.feeds) = (None, vec!["the API"]);
    facts.ports.clear();
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "records come from the API");
}

#[test]
fn the_node_is_checked() {
    use Status::{Fail, Warn};
    fn address(facts: &mut Facts) -> &mut AddressUse {
        &mut facts.node.addresses.as_mut().expect("uses")[0]
    }
    judge(&[
        ("an agent", |f| f.node.agent = Some(42), "agent", Warn, &["42", "--takeover"]),
        (
            "foreign",
            |f| f.node.hub = Ok(vec![("imds-in".into(), "dummy".into())]),
            "hub",
            Fail,
            &["imds-in", "--hub"],
        ),
        (
            "another's",
            |f| f.node.hub = Ok(vec![("imds-tap".into(), "tap".into())]),
            "hub",
            Fail,
            &["another agent", "--run"],
        ),
        ("own", |f| address(f).own = true, "address", Warn, &["169.254.169.254", "guard: all"]),
        ("routed", |f| address(f).routed = Some(16), "address", Warn, &["/16"]),
        (
            "answered",
            |f| address(f).neighbour = Some("fa:16:3e:00:00:01".into()),
            "address",
            Warn,
            &["fa:16:3e"],
        ),
        ("ring full", |f| f.node.ring_full = 7, "hub.namespaces", Warn, &["7 frames", "steer: auto"]),
        ("veth full", |f| f.node.veth_full = 7, "hub.ring", Warn, &["7 steered", "workers"]),
        ("unseen", |f| f.node.addresses = Err(refused()), "address", Warn, &["not permitted"]),
    ]);
    for (what, spoil) in [
        ("left over", (|f| f.node.hub = Ok(vec![("imds-in".into(), "veth".into())])) as fn(&mut Facts)),
        ("ended", |f| f.node.stale_socket = Some("/run/xdp-imds/control.sock".into())),
    ] {
        let mut facts = healthy();
        spoil(&mut facts);
        assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "{what}");
    }
}

#[test]
fn a_tap_in_another_namespace_is_found_and_named() {
    use Status::{Fail, Warn};
    fn lost(facts: &mut Facts, places: Vec<Place>) {
        facts.ports[0].device = Ok(None);
        facts.ports[0].elsewhere = Some(Search { found: places.len(), places, unseen: 0 });
    }
    judge(&[
        ("nowhere", |f| lost(f, Vec::new()), "port.device", Warn, &["tap0", "appears"]),
        (
            "by name",
            |f| lost(f, vec![Place { netns: Some("pod-1".into()), process: None }]),
            "port.device",
            Fail,
            &["in namespace pod-1", "port: {ifname: tap0, netns: pod-1}"],
        ),
        (
            "by process",
            |f| {
                lost(
                    f,
                    vec![Place { netns: Some("/proc/42/ns/net".into()), process: Some((42, "qemu".into())) }],
                )
            },
            "port.device",
            Fail,
            &["process 42, qemu", "netns: /proc/42/ns/net}"],
        ),
        (
            "at home",
            |f| {
                lost(f, vec![Place { netns: None, process: None }]);
                f.ports[0].name.netns = Some("pod-1".into());
            },
            "port.device",
            Fail,
            &["agent's own namespace", "port: {ifname: tap0}"],
        ),
        ("refused", |f| f.ports[0].device = Err(refused()), "port.device", Fail, &["CAP_SYS_PTRACE"]),
        (
            "unseen",
            |f| {
                f.ports[0].device = Ok(None);
                f.ports[0].elsewhere = Some(Search { unseen: 3, ..Search::default() });
            },
            "port.device",
            Warn,
            &["3 places could not"],
        ),
    ]);
}

#[test]
fn an_unsuitable_or_occupied_device_is_reported() {
    use Status::{Fail, Warn};
    fn kind(facts: &mut Facts, kind: &str) {
        the_tap(facts).kind = kind.into();
    }
    fn xdp(facts: &mut Facts, name: &str) {
        the_tap(facts).xdp = vec![program(name)];
    }
    judge(&[
        (
            "another's program",
            |f| xdp(f, "filter"),
            "port.xdp",
            Fail,
            &["tap0", "`filter` (number 42)", "xdp off", "steer: tcx"],
        ),
        ("libxdp", |f| xdp(f, "xdp_dispatcher"), "port.xdp", Fail, &["libxdp", "xdp-loader unload tap0"]),
        ("cilium", |f| xdp(f, "cil_xdp_entry"), "port.xdp", Fail, &["Cilium"]),
        ("another of us", |f| xdp(f, "port"), "port.xdp", Fail, &["another xdp-imds", "release"]),
        (
            "another's classifier",
            |f| the_tap(f).tcx = Some(vec![program("port_tcx")]),
            "port.tcx",
            Fail,
            &["another xdp-imds"],
        ),
        (
            "a classifier",
            |f| the_tap(f).tcx = Some(vec![program("cil_to_host")]),
            "port.tcx",
            Warn,
            &["cil_to_host"],
        ),
        (
            "a filter",
            |f| the_tap(f).filters = vec![Filter { kind: "bpf".into(), name: Some("meter".into()) }],
            "port.tcx",
            Warn,
            &["meter"],
        ),
        ("macvtap", |f| kind(f, "macvtap"), "port.kind", Fail, &["macvtap", "bridge"]),
        ("bridge", |f| kind(f, "bridge"), "port.kind", Fail, &["tap of one VM"]),
        ("veth", |f| kind(f, "veth"), "port.kind", Warn, &["gro on"]),
        (
            "bare veth",
            |f| {
                kind(f, "veth");
                the_tap(f).takes_redirected = Some(false);
            },
            "port.redirect",
            Warn,
            &["classifier", "more CPU time", "gro on"],
        ),
        (
            "bare veth elsewhere",
            |f| {
                kind(f, "veth");
                the_tap(f).takes_redirected = Some(false);
                f.ports[0].name.netns = Some("pod-1".into());
            },
            "port.redirect",
            Fail,
            &["no answer", "gro on"],
        ),
        ("driver", |f| the_tap(f).takes_redirected = Some(false), "port.redirect", Warn, &["tap"]),
        (
            "short ring",
            |f| {
                the_tap(f).ring = 8;
                the_tap(f).refused = 12;
            },
            "port.ring",
            Warn,
            &["8 frames", "refused 12", "ip link set tap0 txqueuelen 1000"],
        ),
        ("physical", |f| kind(f, "physical device"), "port.kind", Warn, &["generic XDP"]),
        ("tun", |f| the_tap(f).ethernet = false, "port.kind", Fail, &["Ethernet"]),
        ("small", |f| the_tap(f).mtu = 1_400, "port.mtu", Warn, &["1400"]),
        ("down", |f| the_tap(f).up = false, "port.up", Warn, &["ip link set tap0 up"]),
        ("none", |f| f.ports.clear(), "port", Warn, &["network.nics[].port"]),
    ]);
}

#[test]
fn programs_of_an_agent_that_runs_or_has_pins_pass() {
    let mut facts = healthy();
    the_tap(&mut facts).xdp = vec![program("port")];
    the_tap(&mut facts).tcx = Some(vec![program("port_tcx")]);
    facts.pins.as_mut().expect("pins").links =
        Ok(vec![PinnedLink { name: "port-1-7-9".into(), ifindex: Some(7) }]);
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new());
}
