//! Nodes of all kinds, each with what is to be said of it.

use super::super::facts::{
    Capabilities, Directory, Facts, FileSystem, Found, Kernel, Node, Pins, Port, Process, Records, Resources,
    Wanted,
};
use super::super::{Check, Status};
use super::all;
use crate::port::PortName;
use crate::steer::Mode;
use crate::steer::probe::{AddressUse, Device, Failure, Feature, Filter, PinnedLink, Place, Program, Search};

const ALL_CAPABILITIES: u64 = (1 << 41) - 1;
const SYS_ADMIN: u64 = 1 << 21;
const SYS_PTRACE: u64 = 1 << 19;

fn refused() -> Failure {
    Failure { errno: Some(libc::EPERM), text: "Operation not permitted (os error 1)".into() }
}

fn room(bpf: bool) -> Result<FileSystem, Failure> {
    Ok(FileSystem { at: "/somewhere".into(), bpf, read_only: false, free: 1 << 40 })
}

fn directory(mode: u32) -> Directory {
    let found = Ok(Some(Found { directory: true, mode, owner: 0 }));
    Directory { path: "/some/directory".into(), found, file_system: room(false) }
}

fn tap() -> Device {
    Device {
        ifindex: 7,
        kind: "tap".into(),
        ethernet: true,
        up: true,
        mtu: 1_500,
        queues: 1,
        master: Some(("br0".into(), "bridge".into())),
        xdp: Vec::new(),
        tcx: Some(Vec::new()),
        filters: Vec::new(),
    }
}

fn port(device: Result<Option<Device>, Failure>) -> Port {
    Port { name: PortName::local("tap0"), device, elsewhere: None }
}

fn program(name: &str) -> Program {
    Program { id: 42, name: Some(name.into()) }
}

/// A node on which nothing is wrong.
fn healthy() -> Facts {
    let sets =
        Capabilities { effective: ALL_CAPABILITIES, permitted: ALL_CAPABILITIES, bounding: ALL_CAPABILITIES };
    Facts {
        wanted: Wanted { steer: Mode::Auto, hub: "imds".into(), workers: 1, pinned_memory: 32 << 20 },
        kernel: Kernel {
            release: "6.8.0".into(),
            features: Feature::ALL.map(|feature| (feature, Ok(true))).into(),
            rehearsal: Ok(()),
            lockdown: Some("[none] integrity confidentiality".into()),
            unprivileged_bpf: Some("2".into()),
            tun: Ok(()),
        },
        process: Process {
            uid: 0,
            capabilities: Some(sets),
            seccomp: Some(0),
            initial_user_namespace: true,
            resources: Resources { open_files: Some(65_536), locked_memory: Some(8 << 20) },
            cpus: 4,
            unix_time: 1_790_000_000,
        },
        pins: Some(Pins {
            path: "/sys/fs/bpf/xdp-imds".into(),
            file_system: room(true),
            versions: vec!["v1".into()],
            links: Ok(Vec::new()),
        }),
        directories: vec![
            ("records", directory(0o750)),
            ("state", directory(0o700)),
            ("run", directory(0o700)),
        ],
        records: Some(Records { count: 1, ..Records::default() }),
        node: Node {
            hub: Ok(Vec::new()),
            agent: None,
            stale_socket: None,
            addresses: Ok(vec![AddressUse {
                address: "169.254.169.254".parse().expect("an address"),
                own: false,
                routed: Some(0),
                neighbour: None,
            }]),
            bridge_filter: Some("1".into()),
        },
        ports: vec![port(Ok(Some(tap())))],
    }
}

fn capabilities(facts: &mut Facts) -> &mut Capabilities {
    facts.process.capabilities.as_mut().expect("they are known")
}

fn drop_capability(facts: &mut Facts, bits: u64) {
    let sets = capabilities(facts);
    sets.effective &= !bits;
    sets.permitted &= !bits;
    sets.bounding &= !bits;
}

fn set_feature(facts: &mut Facts, feature: Feature, had: Result<bool, Failure>) {
    facts.kernel.features.iter_mut().filter(|(of, _)| *of == feature).for_each(|(_, it)| *it = had.clone());
}

fn the_tap(facts: &mut Facts) -> &mut Device {
    facts.ports[0].device.as_mut().expect("it was looked at").as_mut().expect("it is there")
}

fn wrong(checks: &[Check]) -> Vec<&Check> {
    checks.iter().filter(|check| check.status != Status::Ok).collect()
}

#[test]
fn nothing_is_wrong_with_a_healthy_node() {
    let checks = all(&healthy());
    assert_eq!(wrong(&checks), Vec::<&Check>::new());
    let names: std::collections::HashSet<_> =
        checks.iter().map(|check| (check.name, &check.subject)).collect();
    assert_eq!(names.len(), checks.len(), "two checks have one name and subject");
}

/// A node with one thing wrong, the check that must say so and how, and words that must be in it.
type Case = (&'static str, fn(&mut Facts), &'static str, Status, &'static [&'static str]);

/// Every case spoils a healthy node, and nothing but the named check may find fault.
fn judge(cases: &[Case]) {
    for (what, spoil, name, status, words) in cases {
        let mut facts = healthy();
        spoil(&mut facts);
        let checks = all(&facts);
        let found = wrong(&checks);
        let [check] = found[..] else { panic!("{what}: {found:?}") };
        assert_eq!((check.name, check.status), (*name, *status), "{what}: {check:?}");
        let (Some(expected), Some(remedy)) = (&check.expected, &check.remedy) else {
            panic!("{what}: {check:?}")
        };
        let said =
            format!("{} {} {expected} {remedy}", check.subject.clone().unwrap_or_default(), check.found);
        for word in *words {
            assert!(said.contains(word), "{what}: no `{word}` in: {said}");
        }
    }
}

#[test]
fn the_kernel_is_judged_by_what_it_can_do() {
    use Status::{Fail, Warn};
    judge(&[
        (
            "too old",
            |f| f.kernel.release = "2.6.78".into(),
            "kernel.version",
            Fail,
            &["2.6.78", "5.15", "Boot"],
        ),
        ("just too old", |f| f.kernel.release = "5.14.9".into(), "kernel.version", Fail, &["too old"]),
        ("no number", |f| f.kernel.release = "six".into(), "kernel.version", Warn, &["six"]),
        ("no XDP", |f| set_feature(f, Feature::Xdp, Ok(false)), "kernel.xdp", Fail, &["CONFIG_NET"]),
        (
            "no devmap",
            |f| set_feature(f, Feature::DeviceMap, Ok(false)),
            "kernel.devmap_hash",
            Fail,
            &["5.4"],
        ),
        (
            "no XSKMAP",
            |f| set_feature(f, Feature::SocketMap, Ok(false)),
            "kernel.xskmap",
            Fail,
            &["XDP_SOCKETS"],
        ),
        (
            "no AF_XDP",
            |f| set_feature(f, Feature::Socket, Ok(false)),
            "kernel.af_xdp",
            Fail,
            &["XDP_SOCKETS"],
        ),
        ("no ring", |f| set_feature(f, Feature::RingBuffer, Ok(false)), "kernel.ring_buffer", Fail, &["5.8"]),
        ("no link", |f| set_feature(f, Feature::Link, Ok(false)), "kernel.xdp_link", Fail, &["5.9"]),
        (
            "no update",
            |f| set_feature(f, Feature::LinkUpdate, Ok(false)),
            "kernel.link_update",
            Fail,
            &["5.9"],
        ),
        ("no BTF", |f| set_feature(f, Feature::Btf, Ok(false)), "kernel.btf", Warn, &["DEBUG_INFO_BTF"]),
        ("no tcx", |f| set_feature(f, Feature::Tcx, Ok(false)), "kernel.tcx", Warn, &["6.6", "bulk"]),
        (
            "no tcx where it is asked for",
            |f| {
                set_feature(f, Feature::Tcx, Ok(false));
                f.wanted.steer = Mode::Tcx;
            },
            "kernel.tcx",
            Fail,
            &["steer: auto"],
        ),
        (
            "refused for no reason of ours",
            |f| set_feature(f, Feature::Bpf, Err(refused())),
            "kernel.bpf",
            Fail,
            &["SELinux", "lockdown"],
        ),
        (
            "no tun",
            |f| f.kernel.tun = Err(Failure { errno: Some(libc::ENOENT), text: "none".into() }),
            "tun",
            Fail,
            &["modprobe"],
        ),
        ("no device", |f| f.kernel.tun = Err(refused()), "tun", Fail, &["DeviceAllow"]),
        (
            "rehearsal",
            |f| f.kernel.rehearsal = Err(Failure::new("cannot make it")),
            "rehearsal",
            Fail,
            &["cannot make it"],
        ),
    ]);
}

#[test]
fn what_a_missing_capability_hides_is_not_held_against_the_kernel() {
    let mut facts = healthy();
    drop_capability(&mut facts, SYS_ADMIN);
    set_feature(&mut facts, Feature::LinkUpdate, Err(refused()));
    let checks = all(&facts);
    let found: Vec<_> = wrong(&checks).iter().map(|check| (check.name, check.status)).collect();
    assert_eq!(found, [("kernel.link_update", Status::Warn), ("capability.sys_admin", Status::Fail)]);
}

#[test]
fn lockdown_is_named_where_the_kernel_refuses() {
    let mut facts = healthy();
    facts.kernel.lockdown = Some("none integrity [confidentiality]".into());
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new());
    facts.kernel.rehearsal = Err(refused());
    let checks = all(&facts);
    let found: Vec<_> = wrong(&checks).iter().map(|check| (check.name, check.status)).collect();
    assert_eq!(found, [("kernel.lockdown", Status::Warn), ("rehearsal", Status::Fail)]);
}

#[test]
fn a_capability_is_missed_only_where_it_is_needed_and_the_remedy_fits_how_it_went() {
    use Status::{Fail, Warn};
    let net_raw = "capability.net_raw";
    judge(&[
        (
            "out of bounds",
            |f| drop_capability(f, 1 << 13),
            net_raw,
            Fail,
            &["AF_XDP", "CapabilityBoundingSet="],
        ),
        (
            "another user",
            |f| {
                capabilities(f).effective &= !(1 << 13);
                capabilities(f).permitted &= !(1 << 13);
            },
            net_raw,
            Fail,
            &["AmbientCapabilities="],
        ),
        ("lowered", |f| capabilities(f).effective &= !(1 << 13), net_raw, Fail, &["permitted"]),
        ("no NET_ADMIN", |f| drop_capability(f, 1 << 12), "capability.net_admin", Fail, &["XDP"]),
        ("no SYS_ADMIN", |f| drop_capability(f, SYS_ADMIN), "capability.sys_admin", Fail, &["namespaces"]),
        (
            "no IPC_LOCK",
            |f| drop_capability(f, 1 << 14),
            "capability.ipc_lock",
            Fail,
            &["32 MiB", "LimitMEMLOCK="],
        ),
        (
            "another's process",
            |f| {
                drop_capability(f, SYS_PTRACE);
                f.ports[0].name.netns = Some("/proc/42/ns/net".into());
            },
            "capability.sys_ptrace",
            Warn,
            &["one port"],
        ),
        (
            "records of others",
            |f| {
                drop_capability(f, 1 << 2);
                f.records.as_mut().expect("records").unreadable = Some("web-1.yaml".into());
            },
            "capability.dac_read_search",
            Fail,
            &["web-1.yaml", "chmod 0640"],
        ),
    ]);
    for (what, spoil) in [
        (
            "BPF and PERFMON are part of SYS_ADMIN",
            (|f| drop_capability(f, 1 << 39 | 1 << 38)) as fn(&mut Facts),
        ),
        ("nobody is in /proc", |f| drop_capability(f, SYS_PTRACE)),
        ("records can be read", |f| drop_capability(f, 1 << 2)),
        ("the limit suffices", |f| {
            drop_capability(f, 1 << 14);
            f.process.resources.locked_memory = None;
        }),
        ("neither can be told", |f| f.process.seccomp = None),
    ] {
        let mut facts = healthy();
        spoil(&mut facts);
        assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "{what}");
    }
}

#[test]
fn limits_and_surroundings_of_the_process_are_judged() {
    use Status::{Fail, Warn};
    let files = "limit.open_files";
    judge(&[
        (
            "few files",
            |f| f.process.resources.open_files = Some(64),
            files,
            Fail,
            &["64", "82 for one port", "LimitNOFILE"],
        ),
        (
            "room for no more",
            |f| f.process.resources.open_files = Some(1_024),
            files,
            Warn,
            &["1024", "4096"],
        ),
        (
            "user namespace",
            |f| f.process.initial_user_namespace = false,
            "user_namespace",
            Fail,
            &["rootless"],
        ),
        ("strict seccomp", |f| f.process.seccomp = Some(1), "seccomp", Fail, &["bpf(2)"]),
        ("no /proc", |f| f.process.capabilities = None, "capability", Warn, &["/proc"]),
        ("1970", |f| f.process.unix_time = 60, "clock", Warn, &["tokens"]),
        ("many workers", |f| f.wanted.workers = 5, "workers", Warn, &["5 workers", "workers: 4"]),
    ]);
}

#[test]
fn places_for_pins_and_files_are_judged() {
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
            &["no directory"],
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
}

#[test]
fn the_node_around_is_judged() {
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
fn a_tap_that_is_elsewhere_is_found_and_named_as_a_port() {
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
fn a_device_that_cannot_be_a_port_or_is_taken_is_named_with_its_holder() {
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
        (
            "tcx elsewhere",
            |f| {
                f.wanted.steer = Mode::Tcx;
                f.ports[0].name.netns = Some("pod-1".into());
            },
            "port.tcx",
            Fail,
            &["steer: auto"],
        ),
        ("macvtap", |f| kind(f, "macvtap"), "port.kind", Fail, &["macvtap", "bridge"]),
        ("bridge", |f| kind(f, "bridge"), "port.kind", Fail, &["tap of one VM"]),
        ("veth", |f| kind(f, "veth"), "port.kind", Warn, &["gro on"]),
        ("physical", |f| kind(f, "physical device"), "port.kind", Warn, &["generically"]),
        ("tun", |f| the_tap(f).ethernet = false, "port.kind", Fail, &["Ethernet"]),
        ("small", |f| the_tap(f).mtu = 1_400, "port.mtu", Warn, &["1400"]),
        ("down", |f| the_tap(f).up = false, "port.up", Warn, &["ip link set tap0 up"]),
        ("none", |f| f.ports.clear(), "port", Warn, &["network.nics[].port"]),
    ]);
}

#[test]
fn programs_of_an_agent_that_lives_or_pinned_them_are_as_they_should_be() {
    let mut facts = healthy();
    the_tap(&mut facts).xdp = vec![program("port")];
    the_tap(&mut facts).tcx = Some(vec![program("port_tcx")]);
    facts.pins.as_mut().expect("pins").links =
        Ok(vec![PinnedLink { name: "port-1-7-9".into(), ifindex: Some(7) }]);
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new());
}
