//! Tests the checks with the facts of nodes that have no problem, or one problem.

mod place;
mod ports;

use metadata_common::port::PortName;
use metadata_content::record::Smbios;
use metadata_control::status::AttachmentStatus;
use metadata_signer::Algorithm;
use metadata_steer::SteeringMode;
use metadata_steer::probe::{AddressUse, DeviceState, Feature, PinnedLink, ProbeError, Program};

use super::super::CheckStatus::{self, Fail, Warn};
use super::super::facts::{
    Capabilities, ConfigFacts, Directory, Facts, FileSystem, IdentityKeyFacts, IssuerFacts, Kernel,
    NodeFacts, PathFacts, PinFacts, PortFacts, ProcessFacts, RecordFacts, Resources,
};
use super::super::{Check, DoctorRequest};
use super::{configuration, needs};

const ALL_CAPABILITIES: u64 = (1 << 41) - 1;
const SYS_ADMIN: u64 = 1 << 21;
const SYS_PTRACE: u64 = 1 << 19;

fn refused() -> ProbeError {
    ProbeError { errno: Some(libc::EPERM), text: "Operation not permitted (os error 1)".into() }
}

fn room(bpf: bool) -> Result<FileSystem, ProbeError> {
    Ok(FileSystem { at: "/somewhere".into(), bpf, read_only: false, free: 1 << 40 })
}

fn directory(mode: u32) -> Directory {
    let found = Ok(Some(PathFacts { directory: true, mode, owner: 0 }));
    Directory { path: "/some/directory".into(), found, file_system: room(false) }
}

fn tap() -> DeviceState {
    DeviceState {
        ifindex: 7,
        kind: "tap".into(),
        ethernet: true,
        up: true,
        mtu: 1_500,
        queues: 1,
        ring: 1_000,
        refused: 0,
        takes_redirected: Some(true),
        master: Some(("br0".into(), "bridge".into())),
        xdp: Vec::new(),
        tcx: Some(Vec::new()),
        filters: Vec::new(),
    }
}

fn port(device: Result<Option<DeviceState>, ProbeError>) -> PortFacts {
    PortFacts { name: PortName::local("tap0"), device, elsewhere: None }
}

fn program(name: &str) -> Program {
    Program { id: 42, name: Some(name.into()) }
}

/// All checks of a node whose configuration can be used.
fn all(facts: &Facts) -> Vec<Check> {
    super::all(Vec::new(), facts, true)
}

/// Returns the facts of a node without problems.
fn healthy() -> Facts {
    let sets =
        Capabilities { effective: ALL_CAPABILITIES, permitted: ALL_CAPABILITIES, bounding: ALL_CAPABILITIES };
    Facts {
        wanted: ConfigFacts {
            steer: SteeringMode::Auto,
            hub: "imds".into(),
            workers: 1,
            locked_memory: 32 << 20,
            feeds: Vec::new(),
            guards_all: false,
            missing_token_key: None,
        },
        kernel: Kernel {
            release: "6.8.0".into(),
            features: Feature::ALL.map(|feature| (feature, Ok(true))).into(),
            missing_helpers: Ok(Vec::new()),
            rehearsal: Ok(()),
            lockdown: Some("[none] integrity confidentiality".into()),
            unprivileged_bpf: Some("2".into()),
            tun: Ok(()),
        },
        process: ProcessFacts {
            uid: 0,
            capabilities: Some(sets),
            seccomp: Some(0),
            initial_user_namespace: true,
            resources: Resources { open_files: Some(65_536), locked_memory: Some(8 << 20) },
            cpus: 4,
            unix_time: 1_790_000_000,
        },
        pins: Some(PinFacts {
            path: "/sys/fs/bpf/xdp-imds".into(),
            owner: Some(0),
            file_system: room(true),
            versions: vec!["v1".into()],
            links: Ok(Vec::new()),
            are_of_another: false,
        }),
        directories: vec![
            ("records", directory(0o750)),
            ("state", directory(0o700)),
            ("run", directory(0o700)),
        ],
        config_file: Some(Directory { path: "/some/config.yaml".into(), ..directory(0o644) }),
        records: Some(RecordFacts { count: 1, ..RecordFacts::default() }),
        node: NodeFacts {
            hub: Ok(Vec::new()),
            veth_full: 0,
            hub_down: Vec::new(),
            silence: None,
            other_records: None,
            datasources: None,
            libvirt: None,
            ring_full: 0,
            agent: None,
            agent_user: None,
            attachments: None,
            problems: Vec::new(),
            missing_token_key: None,
            mac_mismatches: Vec::new(),
            port_errors: Vec::new(),
            refused: Vec::new(),
            conflicts: Vec::new(),
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
        sources: vec![Check::ok("kubevirt.node", "the agent serves the VMs of node n1")],
        exposed: Vec::new(),
        identity: Some(IssuerFacts {
            directory: "/some/keys".into(),
            algorithm: Algorithm::Es256,
            keys: Ok(IdentityKeyFacts { count: 2, skipped: Vec::new(), made_here: false }),
            certificate: Some(Ok(Some(30))),
        }),
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

fn set_feature(facts: &mut Facts, feature: Feature, had: Result<bool, ProbeError>) {
    facts.kernel.features.iter_mut().filter(|(of, _)| *of == feature).for_each(|(_, it)| *it = had.clone());
}

fn the_tap(facts: &mut Facts) -> &mut DeviceState {
    facts.ports[0].device.as_mut().expect("it was looked at").as_mut().expect("it is there")
}

fn wrong(checks: &[Check]) -> Vec<&Check> {
    checks.iter().filter(|check| check.status != CheckStatus::Ok).collect()
}

#[test]
fn the_file_of_the_service_is_named_if_there_is_nothing_to_check() {
    let file = std::path::PathBuf::from("/some/config.yaml");
    for (file, lacks_file, status, found) in [
        (None, true, Fail, "there is no /etc/xdp-imds/config.yaml"),
        (None, false, CheckStatus::Ok, "no configuration file is given"),
        (Some(file), false, CheckStatus::Ok, "/some/config.yaml can be used"),
    ] {
        let config = Ok(crate::config::Config::default());
        let check = configuration(&DoctorRequest { config, file, lacks_file, json: false });
        assert!(check.status == status && check.found.starts_with(found), "{check:?}");
    }
    let missing = std::path::Path::new("/nonexistent/config.yaml");
    let config = crate::config::Config::read(missing);
    let request = DoctorRequest { config, file: Some(missing.into()), lacks_file: false, json: false };
    let check = configuration(&request);
    let remedy = check.remedy.as_deref().unwrap_or_default();
    assert!(check.status == Fail && remedy.contains("put it there"), "{check:?}");
}

#[test]
fn a_healthy_node_passes_all_checks() {
    let checks = all(&healthy());
    assert_eq!(wrong(&checks), Vec::<&Check>::new());
    let names: std::collections::HashSet<_> =
        checks.iter().map(|check| (check.name, &check.subject)).collect();
    assert_eq!(names.len(), checks.len(), "two checks have one name and subject");
}

/// A node of a platform while its agent runs, as the packages and the manifests make it.
fn installed(feeds: &[&'static str], records: Option<usize>, netns: Option<&str>) -> Facts {
    let mut facts = healthy();
    facts.wanted.feeds = feeds.to_vec();
    facts.records = records.map(|count| RecordFacts { count, ..RecordFacts::default() });
    facts.directories.retain(|(what, _)| *what != "records" || records.is_some());
    (facts.sources, facts.identity) = (Vec::new(), None);
    facts.node.agent = Some(42);
    facts.node.attachments = Some(AttachmentStatus { checked: Some(7.0), ..AttachmentStatus::default() });
    facts.node.hub = Ok(vec![("imds-in".into(), "veth".into()), ("imds-tap".into(), "tap".into())]);
    let link = PinnedLink { name: "port-1-7-9".into(), ifindex: Some(7) };
    facts.pins.as_mut().expect("pins").links = Ok(vec![link]);
    // Every interface with IPv6 has a route of link-local addresses.
    let link_local = |address: &str, bits| AddressUse {
        address: address.parse().expect("an address"),
        own: false,
        routed: Some(bits),
        neighbour: None,
    };
    facts.node.addresses = Ok(vec![link_local("169.254.169.254", 16), link_local("fe80::a9fe:a9fe", 64)]);
    facts.ports[0].name.netns = netns.map(Into::into);
    the_tap(&mut facts).xdp = vec![program("port")];
    facts
}

#[test]
fn a_healthy_node_of_each_platform_is_clean() {
    let all_kinds = healthy();
    let kubevirt = || {
        let mut pod = installed(&["KubeVirt"], Some(0), Some("/proc/42/ns/net"));
        pod.sources = all_kinds.sources.clone();
        // kubelet makes the directories of `hostPath` for everybody to list.
        pod.directories =
            vec![("records", directory(0o755)), ("state", directory(0o755)), ("run", directory(0o755))];
        pod
    };
    let fresh = Facts { ports: Vec::new(), ..installed(&[], Some(0), None) };
    let before = Facts { node: all_kinds.node.clone(), ports: Vec::new(), ..kubevirt() };
    let before = Facts { pins: all_kinds.pins.clone(), ..before };
    for (platform, facts) in [
        ("a host of libvirt", installed(&[], Some(2), None)),
        ("a host of libvirt without a VM", fresh),
        ("a node of KubeVirt", kubevirt()),
        ("a node of KubeVirt before its agent starts", before),
        ("a node of Proxmox VE", installed(&["Proxmox VE"], None, None)),
        ("a hypervisor that registers VMs", installed(&["the API"], None, None)),
    ] {
        assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "{platform}");
    }
}

/// A case: its label, a function that adds one problem to the facts, the name and the status of the check that must
/// report the problem, and words that the check must contain.
type Case = (&'static str, fn(&mut Facts), &'static str, CheckStatus, &'static [&'static str]);

/// Adds the problem of each case to a healthy node. Asserts that the named check reports the problem, and that no other
/// check reports one.
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
fn each_problem_of_the_kernel_is_reported_by_its_check() {
    use CheckStatus::{Fail, Warn};
    judge(&[
        (
            "no functions for ring buffers",
            |f| f.kernel.missing_helpers = Ok(vec!["bpf_ringbuf_output", "bpf_ringbuf_submit"]),
            "kernel.helpers",
            Fail,
            &["bpf_ringbuf_output, bpf_ringbuf_submit", "does not start", "5.8"],
        ),
        (
            "no cookies of namespaces",
            |f| set_feature(f, Feature::NetnsCookie, Ok(false)),
            "kernel.netns_cookie",
            Fail,
            &["SO_NETNS_COOKIE", "does not start", "5.14"],
        ),
        (
            "no reports on devices",
            |f| set_feature(f, Feature::DeviceReports, Ok(false)),
            "kernel.netdev",
            Warn,
            &["counts as served", "No action"],
        ),
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
        (
            "no ring buffer",
            |f| set_feature(f, Feature::RingBuffer, Ok(false)),
            "kernel.ring_buffer",
            Fail,
            &["5.8"],
        ),
        ("no bpf_link", |f| set_feature(f, Feature::Link, Ok(false)), "kernel.xdp_link", Fail, &["5.9"]),
        (
            "no update of a bpf_link",
            |f| set_feature(f, Feature::LinkUpdate, Ok(false)),
            "kernel.link_update",
            Fail,
            &["5.9"],
        ),
        ("no BTF", |f| set_feature(f, Feature::Btf, Ok(false)), "kernel.btf", Warn, &["DEBUG_INFO_BTF"]),
        (
            "no tcx",
            |f| set_feature(f, Feature::Tcx, Ok(false)),
            "kernel.tcx",
            Warn,
            &["NET_XGRESS", "bulk", "No action"],
        ),
        (
            "no tcx, but `steer: tcx`",
            |f| {
                set_feature(f, Feature::Tcx, Ok(false));
                f.wanted.steer = SteeringMode::Tcx;
            },
            "kernel.tcx",
            Fail,
            &["steer: auto"],
        ),
        (
            "bpf(2) refused despite all capabilities",
            |f| set_feature(f, Feature::Bpf, Err(refused())),
            "kernel.bpf",
            Fail,
            &["SELinux", "lockdown"],
        ),
        (
            "no /dev/net/tun",
            |f| f.kernel.tun = Err(ProbeError { errno: Some(libc::ENOENT), text: "none".into() }),
            "tun",
            Fail,
            &["modprobe"],
        ),
        ("/dev/net/tun refused", |f| f.kernel.tun = Err(refused()), "tun", Fail, &["DeviceAllow"]),
        (
            "a failed rehearsal",
            |f| f.kernel.rehearsal = Err(ProbeError::new("cannot make it")),
            "rehearsal",
            Fail,
            &["cannot make it"],
        ),
    ]);
}

#[test]
fn features_decide_and_the_version_of_the_kernel_does_not() {
    for (release, tcx, status) in [
        ("5.14.0-503.el9.x86_64", Ok(true), CheckStatus::Ok),
        ("5.14.0-503.el9.x86_64", Ok(false), Warn),
        ("9.9.9-vendor", Ok(false), Warn),
        ("9.9.9-vendor", Err(ProbeError::new("it cannot be tested")), Fail),
        ("2.6.78", Ok(true), CheckStatus::Ok),
        ("six", Ok(true), CheckStatus::Ok),
    ] {
        let mut facts = healthy();
        facts.kernel.release = release.into();
        set_feature(&mut facts, Feature::Tcx, tcx);
        let checks = all(&facts);
        let of = |name| checks.iter().find(|check| check.name == name).expect("a check");
        assert_eq!(
            (of("kernel.version").status, of("kernel.tcx").status),
            (CheckStatus::Ok, status),
            "{release}"
        );
        assert!(of("kernel.version").found.contains(release));
    }
}

#[test]
fn each_feature_is_listed_with_its_use_and_what_happens_without_it() {
    const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/reference/limits.md"));
    for feature in Feature::ALL {
        let words = feature.words();
        let found = |had| {
            let mut facts = healthy();
            set_feature(&mut facts, feature, Ok(had));
            let check = all(&facts).into_iter().find(|check| check.name == words.check).expect("a check");
            (check.status, format!("{} {}", check.found, check.remedy.unwrap_or_default()))
        };
        let (status, text) = found(true);
        assert!(status == CheckStatus::Ok && text.contains(words.gives), "{text}");
        let (status, text) = found(false);
        let (expected, part) = match words.without {
            Some(without) => (Warn, without),
            None => (Fail, words.comes_with),
        };
        assert!(status == expected && text.contains(part), "{text}");
        assert!(PAGE.contains(&format!("`{}`", words.check)), "the page of limits lacks {}", words.check);
    }
}

#[test]
fn a_missing_capability_makes_a_feature_unknown() {
    let mut facts = healthy();
    drop_capability(&mut facts, SYS_ADMIN);
    set_feature(&mut facts, Feature::LinkUpdate, Err(refused()));
    let checks = all(&facts);
    let found: Vec<_> = wrong(&checks).iter().map(|check| (check.name, check.status)).collect();
    assert_eq!(found, [("kernel.link_update", Warn), ("capability.sys_admin", Fail)]);
}

#[test]
fn lockdown_is_reported_if_the_kernel_refuses() {
    let mut facts = healthy();
    facts.kernel.lockdown = Some("none integrity [confidentiality]".into());
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new());
    facts.kernel.rehearsal = Err(refused());
    let checks = all(&facts);
    let found: Vec<_> = wrong(&checks).iter().map(|check| (check.name, check.status)).collect();
    assert_eq!(found, [("kernel.lockdown", Warn), ("rehearsal", Fail)]);
}

#[test]
fn only_a_needed_capability_is_reported_and_the_remedy_fits_the_cause() {
    let net_raw = "capability.net_raw";
    judge(&[
        (
            "missing in the bounding set",
            |f| drop_capability(f, 1 << 13),
            net_raw,
            Fail,
            &["AF_XDP", "CapabilityBoundingSet="],
        ),
        (
            "missing in the permitted set",
            |f| {
                capabilities(f).effective &= !(1 << 13);
                capabilities(f).permitted &= !(1 << 13);
            },
            net_raw,
            Fail,
            &["AmbientCapabilities="],
        ),
        (
            "missing in the effective set",
            |f| capabilities(f).effective &= !(1 << 13),
            net_raw,
            Fail,
            &["permitted"],
        ),
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
            "a namespace of another user's process",
            |f| {
                drop_capability(f, SYS_PTRACE);
                f.ports[0].name.netns = Some("/proc/42/ns/net".into());
            },
            "capability.sys_ptrace",
            Warn,
            &["one port"],
        ),
        (
            "a record of another user",
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
        ("no port names a namespace in /proc", |f| drop_capability(f, SYS_PTRACE)),
        ("records can be read", |f| drop_capability(f, 1 << 2)),
        ("no limit on locked memory", |f| {
            drop_capability(f, 1 << 14);
            f.process.resources.locked_memory = None;
        }),
        ("unknown seccomp mode", |f| f.process.seccomp = None),
    ] {
        let mut facts = healthy();
        spoil(&mut facts);
        assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "{what}");
    }
}

#[test]
fn limits_and_environment_of_the_process_are_checked() {
    let files = "limit.open_files";
    judge(&[
        (
            "too low a limit on open files",
            |f| f.process.resources.open_files = Some(64),
            files,
            Fail,
            &["64", "82 for one port", "LimitNOFILE"],
        ),
        (
            "a limit that leaves few open files for more ports",
            |f| f.process.resources.open_files = Some(1_024),
            files,
            Warn,
            &["1024", "4096"],
        ),
        (
            "another user namespace",
            |f| f.process.initial_user_namespace = false,
            "user_namespace",
            Fail,
            &["rootless"],
        ),
        ("strict seccomp", |f| f.process.seccomp = Some(1), "seccomp", Fail, &["bpf(2)"]),
        ("no /proc", |f| f.process.capabilities = None, "capability", Warn, &["/proc"]),
        ("a clock in 1970", |f| f.process.unix_time = 60, "clock", Warn, &["tokens"]),
        (
            "more workers than processors",
            |f| f.wanted.workers = 5,
            "workers",
            Warn,
            &["5 workers", "workers: 4"],
        ),
    ]);
}

// Tests the checks of what the issuer of identity tokens needs.

fn issuer(facts: &mut Facts) -> &mut IssuerFacts {
    facts.identity.as_mut().expect("an issuer")
}

fn keys(facts: &mut Facts) -> &mut IdentityKeyFacts {
    issuer(facts).keys.as_mut().expect("a directory")
}

#[test]
fn keys_and_certificate_of_identity_tokens_are_checked() {
    judge(&[
        (
            "no directory",
            |f| issuer(f).keys = Err("cannot read /some/keys: no".into()),
            "identity.keys",
            Fail,
            &["cannot read /some/keys: no", "xdp-imds identity key /some/keys"],
        ),
        (
            "no key",
            |f| keys(f).count = 0,
            "identity.keys",
            Fail,
            &["/some/keys has none", "xdp-imds identity key /some/keys"],
        ),
        (
            "a key that others can read",
            |f| keys(f).skipped = vec!["/some/keys/a.pem is not private".into()],
            "identity.keys",
            Warn,
            &["/some/keys/a.pem is not private", "Mend or remove"],
        ),
        (
            "no key for the algorithm",
            |f| {
                issuer(f).algorithm = Algorithm::Rs256;
                *keys(f) = IdentityKeyFacts {
                    count: 0,
                    skipped: vec!["/some/keys/a.pem: expected a key for RS256, found another".into()],
                    made_here: false,
                };
            },
            "identity.keys",
            Fail,
            &["/some/keys has none for RS256", "a.pem: expected", "openssl genpkey -algorithm RSA", "ES256"],
        ),
        (
            "a certificate of somebody else",
            |f| issuer(f).certificate = Some(Err("found another".into())),
            "identity.certificate",
            Fail,
            &["found another", "identity.certificate"],
        ),
        (
            "the last days of the certificate",
            |f| issuer(f).certificate = Some(Ok(Some(13))),
            "identity.certificate",
            Warn,
            &["expires in 13 days", "Replace the files"],
        ),
        (
            "a certificate that has expired",
            |f| issuer(f).certificate = Some(Ok(None)),
            "identity.certificate",
            Warn,
            &["has expired", "Replace the files"],
        ),
    ]);
}

#[test]
fn a_signer_that_makes_its_keys_needs_none_at_the_start() {
    let mut facts = healthy();
    *keys(&mut facts) = IdentityKeyFacts { count: 0, skipped: Vec::new(), made_here: true };
    assert!(wrong(&all(&facts)).is_empty());
}

#[test]
fn each_datasource_of_smbios_has_its_needs() {
    for stamp in Smbios::all() {
        assert!(needs(stamp).is_some(), "{stamp}");
    }
    assert!(needs("cloudstack").is_some_and(|needs| needs.contains("data-server") && needs.contains("54")));
}
