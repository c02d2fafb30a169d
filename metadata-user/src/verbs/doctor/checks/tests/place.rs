//! Tests the checks of directories and the node.

use super::super::super::facts::{
    AgentSilence, Directory, ExposedFile, Facts, FileSystem, IdentityKeyFacts, OtherRecords, PathFacts,
    PinFacts, RecordFacts,
};
use super::super::super::{Check, CheckStatus};
use super::{all, directory, healthy, judge, refused, room, wrong};
use metadata_control::status::{AttachmentStatus, ExpectedMac, MacMismatch, RefusedRecord};
use metadata_feed::directory::lacking_credential;
use metadata_feed::state::token_file;
use metadata_steer::probe::{AddressUse, PinnedLink};

#[test]
fn directories_of_pins_and_files_are_checked() {
    use CheckStatus::{Fail, Warn};
    fn pins(facts: &mut Facts) -> &mut PinFacts {
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
            "no bpffs",
            |f| pins(f).file_system = room(false),
            "pins.bpffs",
            Fail,
            &["mount -t bpf", "--no-pins"],
        ),
        (
            "a read-only bpffs",
            |f| pins(f).file_system.as_mut().expect("one").read_only = true,
            "pins.bpffs",
            Fail,
            &["remount,rw"],
        ),
        (
            "a pinned link without a device",
            |f| pins(f).links = Ok(vec![PinnedLink { name: "port-1-7-9".into(), ifindex: Some(0) }]),
            "pins.links",
            Warn,
            &["port-1-7-9", "release"],
        ),
        (
            "pins of a user other than the agent that is to start",
            |f| pins(f).owner = Some(999),
            "pins.owner",
            Fail,
            &["user 999", "an agent of user 0 does not start", "chown -R 0: /sys/fs/bpf/xdp-imds"],
        ),
        (
            "pins of a user other than the running agent",
            |f| {
                f.directories[1].1.found = Ok(Some(PathFacts { directory: true, mode: 0o700, owner: 999 }));
                f.directories[2].1.found = f.directories[1].1.found.clone();
                (f.node.agent, f.node.agent_user) = (Some(7), Some(999));
            },
            "pins.owner",
            Fail,
            &["user 0", "chown -R 999: "],
        ),
        (
            "pins of an agent with another run directory and another hub",
            |f| pins(f).are_of_another = true,
            "pins.agent",
            Fail,
            &["another agent", "/sys/fs/bpf/xdp-imds", "another --pins, --run and --hub"],
        ),
        ("pins of another version", |f| pins(f).versions.push("v2".into()), "pins.versions", Warn, &["v2"]),
        (
            "no directory of records",
            |f| f.directories[0].1.found = Ok(None),
            "directory",
            Fail,
            &["records", "--records"],
        ),
        (
            "a directory of records that every user can write",
            |f| f.directories[0].1 = directory(0o777),
            "directory",
            Warn,
            &["0777", "chmod 0750"],
        ),
        (
            "a state directory open to other users",
            |f| *state(f) = directory(0o775),
            "directory",
            Warn,
            &["0775", "chmod 0700"],
        ),
        (
            "a run directory open to other users",
            |f| f.directories[2].1 = directory(0o777),
            "directory",
            Fail,
            &["run", "0777", "chmod 0700"],
        ),
        (
            "a file in place of the directory of records",
            |f| f.directories[0].1.found = Ok(Some(PathFacts { directory: false, mode: 0o600, owner: 0 })),
            "directory",
            Fail,
            &["records", "not a directory"],
        ),
        (
            "two records with one MAC on a port",
            |f| {
                f.records = Some(RecordFacts {
                    conflicts: vec!["b.yaml: 52:54… ".into()],
                    ..RecordFacts::default()
                })
            },
            "records.mac",
            Fail,
            &["b.yaml", "gets no metadata"],
        ),
        (
            "two records for one VM",
            |f| {
                let pair = ("a.yaml".into(), "b.yaml".into(), "7c0f1a52".into());
                f.records = Some(RecordFacts { same_vm: vec![pair], ..RecordFacts::default() });
            },
            "records.vm",
            Warn,
            &["a.yaml and b.yaml", "7c0f1a52"],
        ),
        ("a full file system", |f| state_room(f).free = 4_096, "directory", Fail, &["4 KiB"]),
        ("a nearly full file system", |f| state_room(f).free = 2 << 20, "directory", Warn, &["2 MiB"]),
        (
            "a read-only state directory",
            |f| state_room(f).read_only = true,
            "directory",
            Fail,
            &["read-only", "ReadWritePaths="],
        ),
        (
            "a directory of records of another user",
            |f| {
                let found = PathFacts { directory: true, mode: 0o750, owner: 999 };
                f.directories[0].1.found = Ok(Some(found));
            },
            "directory",
            Warn,
            &["user 999, who can add records", "chown 0"],
        ),
        (
            "a file in place of the state directory",
            |f| state(f).found = Ok(Some(PathFacts { directory: false, mode: 0o600, owner: 0 })),
            "directory",
            Fail,
            &["not a directory"],
        ),
        (
            "a state directory of another user",
            |f| state(f).found = Ok(Some(PathFacts { directory: true, mode: 0o700, owner: 1_000 })),
            "directory",
            Warn,
            &["user 1000", "chown 0"],
        ),
        (
            "a state directory without permission",
            |f| state(f).found = Err(refused()),
            "directory",
            Fail,
            &["not permitted"],
        ),
        (
            "an invalid record",
            |f| {
                let bad = vec![("b.yaml".into(), "b.yaml:2: no".into())];
                f.records =
                    Some(RecordFacts { count: 2, refused: bad, refused_count: 1, ..RecordFacts::default() });
            },
            "records",
            Warn,
            &["one of 2 records cannot be served: b.yaml: b.yaml:2", "xdp-imds check"],
        ),
        (
            "no valid record",
            |f| {
                let bad = vec![("b.yaml".into(), "b.yaml:2: no".into())];
                f.records =
                    Some(RecordFacts { count: 1, refused: bad, refused_count: 1, ..RecordFacts::default() });
            },
            "records",
            Warn,
            &["the only record cannot be served: b.yaml"],
        ),
        (
            "a credential that cannot be read",
            |f| {
                let lacking = lacking_credential("a.yaml", "/r/a.iam: expected JSON");
                f.records.as_mut().expect("some").lacking = vec![lacking];
            },
            "records.credentials",
            Warn,
            &["a.yaml: the VM gets no credential: /r/a.iam: expected JSON"],
        ),
        (
            "a record that every user can read",
            |f| f.records.as_mut().expect("some").open_files = vec![("/r/a.yaml".into(), 0o644)],
            "records.mode",
            Warn,
            &["/r/a.yaml has mode 0644", "chmod 0640 /r/a.yaml"],
        ),
        ("no directory of records configured", |f| f.records = None, "records", Warn, &["--records"]),
    ]);
    // All belongs to the user of the agent, which is not that of this process.
    let mut facts = healthy();
    let of_agent = Ok(Some(PathFacts { directory: true, mode: 0o700, owner: 999 }));
    (facts.directories[1].1.found, facts.directories[2].1.found) = (of_agent.clone(), of_agent);
    facts.pins.as_mut().expect("pins").owner = Some(999);
    let checks = all(&facts);
    let owners: Vec<_> = wrong(&checks).iter().map(|check| (check.name, check.status)).collect();
    assert_eq!(owners, [("pins.owner", Warn), ("directory", Warn), ("directory", Warn)], "no agent runs");
    (facts.node.agent, facts.node.agent_user) = (Some(7), Some(999));
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "an agent of that user runs");
    let mut facts = healthy();
    facts.pins = None;
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "pins are turned off");
    (facts.records, facts.wanted.feeds) = (None, vec!["the API"]);
    facts.ports.clear();
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "records come from the API");
}

#[test]
fn a_fault_that_the_running_agent_reports_too_is_shown_once() {
    let restart = "the agent would not start again with the configuration of the last reload";
    let of_configuration = |name, found: &str| vec![Check::fail(name, found, "it", "Correct it")];
    let audit = "cannot write the audit log /no/audit.log: there is no such directory";
    let key = "expected /etc/key to be accessible only to its owner, found mode 0644; run chmod 0600 on it";
    type Case = (&'static str, Vec<Check>, fn(&mut Facts), String, &'static str);
    let cases: [Case; 5] = [
        (
            "a refusal of the configuration that was reloaded",
            of_configuration("audit", audit),
            |_| (),
            format!("{restart}: {audit}; expected a file that the agent can write. Make its directory"),
            "audit",
        ),
        (
            "a file of token keys that others may read",
            of_configuration("token_key", key),
            |_| (),
            format!("the token key stays unchanged: {key}"),
            "token_key",
        ),
        (
            "a state directory on a read-only file system",
            Vec::new(),
            |f| f.directories[1].1.file_system.as_mut().expect("a file system").read_only = true,
            "the state directory /some/directory is on a read-only file system: registrations are refused".into(),
            "directory",
        ),
        (
            "a directory of records that a reload did not find",
            Vec::new(),
            |f| f.directories[0].1.found = Ok(None),
            "the configuration was refused at the last reload, and stays unchanged: cannot read /some/directory: gone"
                .into(),
            "directory",
        ),
        (
            "a credential that cannot be read",
            Vec::new(),
            |f| {
                let lacking = lacking_credential("a.yaml", "/r/a.iam: expected JSON");
                f.records.as_mut().expect("some").lacking = vec![lacking];
            },
            lacking_credential("a.yaml", "/r/a.iam: expected JSON"),
            "records.credentials",
        ),
    ];
    for (what, of_configuration, spoil, problem, name) in cases {
        let mut facts = healthy();
        spoil(&mut facts);
        facts.node.problems = vec![problem, "another fault of /some/file".into()];
        let checks = super::super::all(of_configuration, &facts, true);
        let found: Vec<_> = wrong(&checks).iter().map(|check| check.name).collect();
        assert_eq!(found, [name, "agent.problems"], "{what}: {checks:#?}");
    }
}

#[test]
fn a_nic_whose_identity_several_records_have_is_reported_once() {
    let of = |refused: &str, kept: &str| {
        format!("{refused}: 52:54:00:00:00:0a on port tap0 already belongs to {kept}; give one another")
    };
    for (what, of_directory, of_agent, found) in [
        ("two files", vec![of("b", "a")], vec![of("b", "a")], vec![of("b", "a")]),
        (
            "two files and a registered VM, which only the agent knows",
            vec![of("b", "a")],
            vec![of("a", "api/z"), of("b", "api/z")],
            vec![of("b", "api/z"), of("a", "api/z")],
        ),
        ("a file that the agent has not read yet", vec![of("b", "a")], vec![], vec![of("b", "a")]),
        (
            "other files, and records of other sources",
            vec![of("b", "a")],
            vec![of("d", "c")],
            vec![of("b", "a"), of("d", "c")],
        ),
    ] {
        let mut facts = healthy();
        facts.records.as_mut().expect("records").conflicts = of_directory;
        facts.node.conflicts = of_agent;
        let checks = all(&facts);
        let reported: Vec<_> = wrong(&checks).iter().map(|check| check.found.clone()).collect();
        assert_eq!(reported, found, "{what}");
    }
}

fn refusal(record: &str) -> RefusedRecord {
    RefusedRecord { record: record.into(), reason: "no such field".into() }
}

#[test]
fn the_node_is_checked() {
    use CheckStatus::{Fail, Warn};
    fn address(facts: &mut Facts) -> &mut AddressUse {
        &mut facts.node.addresses.as_mut().expect("uses")[0]
    }
    judge(&[
        (
            "a dead agent whose programs close a tap",
            |f| {
                let link = |name: &str, device| PinnedLink { name: name.into(), ifindex: Some(device) };
                f.pins.as_mut().expect("pins").links =
                    Ok(vec![link("port-1-7-9", 7), link("socket-0-5-8", 5)]);
            },
            "agent.closed",
            Fail,
            &["close one tap", "systemctl start xdp-imds", "release"],
        ),
        (
            "another device with a hub's name",
            |f| f.node.hub = Ok(vec![("imds-in".into(), "dummy".into())]),
            "hub",
            Fail,
            &["imds-in", "--hub"],
        ),
        (
            "the hub of another agent",
            |f| f.node.hub = Ok(vec![("imds-tap".into(), "tap".into())]),
            "hub",
            Fail,
            &["another agent", "--run"],
        ),
        (
            "an address of the node",
            |f| address(f).own = true,
            "address",
            Warn,
            &["169.254.169.254", "guard: all"],
        ),
        ("a route to an address", |f| address(f).routed = Some(32), "address", Warn, &["/32"]),
        ("a route to some link-local addresses", |f| address(f).routed = Some(24), "address", Warn, &["/24"]),
        (
            "a neighbour with an address",
            |f| address(f).neighbour = Some("fa:16:3e:00:00:01".into()),
            "address",
            Warn,
            &["fa:16:3e"],
        ),
        (
            "a full ring buffer",
            |f| f.node.ring_full = 7,
            "hub.namespaces",
            Warn,
            &["7 frames", "steer: auto"],
        ),
        (
            "programs that somebody detached",
            |f| {
                let faults = vec!["2 eBPF programs were detached".into()];
                f.node.attachments = Some(AttachmentStatus { faults, ..AttachmentStatus::default() });
            },
            "agent.attachments",
            Fail,
            &["2 eBPF programs were detached", "SIGHUP"],
        ),
        (
            "a problem of the running agent that no other check has",
            |f| f.node.problems = vec!["the configuration was refused at the last reload".into()],
            "agent.problems",
            Warn,
            &["the running agent says: the configuration was refused", "xdp-imds status"],
        ),
        (
            "records of other sources with one MAC on a port",
            |f| f.node.conflicts = vec!["api/b: 52:54… belongs to web-1.yaml".into()],
            "records.mac",
            Fail,
            &["api/b", "gets no metadata"],
        ),
        (
            "a conflict that the directory shows too",
            |f| {
                f.node.conflicts = vec!["b.yaml: 52:54… belongs to a.yaml".into()];
                f.records.as_mut().expect("records").conflicts = f.node.conflicts.clone();
            },
            "records.mac",
            Fail,
            &["b.yaml"],
        ),
        (
            "no file of token keys",
            |f| f.wanted.missing_token_key = Some("/nope".into()),
            "token_key",
            Warn,
            &["/nope, the file of `token_key`, does not exist", "migrates", "Correct `token_key`"],
        ),
        (
            "a file of token keys that has gone while the running agent uses its keys",
            |f| {
                f.wanted.missing_token_key = Some("/nope".into());
                f.node.missing_token_key = Some("/nope".into());
                let gone = token_file::missing("/nope".as_ref(), true);
                f.node.problems = vec![format!("the token key stays unchanged: {gone}")];
            },
            "token_key",
            Warn,
            &["/nope, the file of `token_key`, is missing: restore it", "put the file there"],
        ),
        (
            "a missing file of token keys beside a running agent that has another one",
            |f| {
                f.wanted.missing_token_key = Some("/nope".into());
                f.node.missing_token_key = Some("/other".into());
            },
            "token_key",
            Warn,
            &["/nope, the file of `token_key`, does not exist"],
        ),
        (
            "a guest with a MAC other than its record's",
            |f| {
                let web = ExpectedMac { mac: "52:54:00:00:00:99".into(), record: Some("web-1.yaml".into()) };
                let mac = "52:54:00:00:00:56".into();
                f.node.mac_mismatches =
                    vec![MacMismatch { port: "vnet0".into(), mac, expected: vec![web], ago: Some(40.2) }];
            },
            "port.mac",
            Warn,
            &[
                "vnet0",
                "52:54:00:00:00:56 are dropped, because web-1.yaml expects 52:54:00:00:00:99",
                "40 s ago",
            ],
        ),
        (
            "a domain whose record the hook refused",
            |f| {
                let reason = "domain web: <metadata> of the domain, line 3: found <nonsense>".into();
                f.node.refused = vec![RefusedRecord { record: "hook/7c0f".into(), reason }];
            },
            "agent.refused",
            Warn,
            &["hook/7c0f", "domain web: <metadata>", "last good record"],
        ),
        (
            "a part of a record that others may read",
            |f| {
                let files = vec![("a.yaml".into(), 0o644)];
                f.exposed = vec![ExposedFile { directory: "/etc/parts".into(), files, count: 2 }];
            },
            "records.parts",
            Warn,
            &["/etc/parts", "2 files", "a.yaml (mode 0644), …", "chmod 0640"],
        ),
        (
            "a configuration that others may write",
            |f| f.config_file.as_mut().expect("a file").found = directory(0o666).found,
            "configuration.mode",
            Warn,
            &["/some/config.yaml has mode 0666", "chmod go-w /some/config.yaml"],
        ),
        (
            "a configuration of another user",
            |f| {
                f.config_file.as_mut().expect("a file").found =
                    Ok(Some(PathFacts { directory: false, mode: 0o600, owner: 1_000 }));
            },
            "configuration.mode",
            Warn,
            &["belongs to user 1000", "chown 0 /some/config.yaml"],
        ),
        (
            "a source that is unavailable, of which the running agent says so too",
            |f| {
                f.sources = vec![Check::fail("some.directory", "/some/pve does not exist", "it", "Mount it")];
                f.node.problems = vec!["/some/pve has not been readable for 9 s: not found".into()];
            },
            "some.directory",
            Fail,
            &["/some/pve does not exist", "Mount it"],
        ),
        (
            "an issuer without keys, of which the running agent says so too",
            |f| {
                f.identity.as_mut().expect("an issuer").keys =
                    Ok(IdentityKeyFacts { count: 0, skipped: Vec::new(), made_here: false });
                f.node.problems = vec!["there is no key: add one to `identity.keys`".into()];
            },
            "identity.keys",
            Fail,
            &["has none"],
        ),
        (
            "a device of the hub that is down, which loses frames like a full ring",
            |f| {
                f.node.agent = Some(42);
                f.node.hub = Ok(vec![("imds-in".into(), "veth".into()), ("imds-tap".into(), "tap".into())]);
                f.node.hub_down = vec!["imds-in".into()];
                f.node.veth_full = 12;
            },
            "hub",
            Fail,
            &["imds-in of the running agent is down", "network manager"],
        ),
        (
            "an agent that hangs",
            |f| {
                f.node.agent = Some(42);
                f.node.silence =
                    Some(AgentSilence { hangs: true, reason: "the agent does not answer".into() });
            },
            "agent",
            Fail,
            &["process 42", "does not answer", "systemctl restart xdp-imds"],
        ),
        (
            "an agent that is about to end",
            |f| {
                f.node.agent = Some(42);
                f.node.silence =
                    Some(AgentSilence { hangs: false, reason: "the agent cannot answer now".into() });
            },
            "agent",
            Warn,
            &["process 42", "cannot answer now"],
        ),
        (
            "a state directory that somebody removed beside the agent",
            |f| {
                f.node.agent = Some(42);
                f.directories[1].1.found = Ok(None);
            },
            "directory",
            Warn,
            &["state", "does not exist although an agent runs", "register the VMs again"],
        ),
        (
            "a libvirt that is older than its hook",
            |f| f.node.libvirt = Some("virtqemud".into()),
            "libvirt.hook",
            Warn,
            &["virtqemud has run since before", "systemctl restart virtqemud"],
        ),
        ("a full veth", |f| f.node.veth_full = 7, "hub.ring", Warn, &["7 steered", "workers"]),
        ("unknown neighbours", |f| f.node.addresses = Err(refused()), "address", Warn, &["not permitted"]),
    ]);
    for (what, spoil) in [
        (
            "devices of a killed agent",
            (|f| f.node.hub = Ok(vec![("imds-in".into(), "veth".into())])) as fn(&mut Facts),
        ),
        ("a running agent", |f| f.node.agent = Some(42)),
        ("the route of link-local addresses of IPv6", |f| {
            let it = AddressUse {
                address: "fe80::a9fe:a9fe".parse().expect("an address"),
                own: false,
                routed: Some(64),
                neighbour: None,
            };
            f.node.addresses.as_mut().expect("uses").push(it);
        }),
        ("the route of zeroconf", |f| address(f).routed = Some(16)),
        ("directories that kubelet made", |f| {
            f.directories[1].1 = directory(0o755);
            f.directories[2].1 = directory(0o755);
        }),
        ("the mark of a forced release", |f| {
            f.pins.as_mut().expect("pins").versions.insert(0, "released".into());
        }),
        ("another service at an address that `guard: all` keeps from all guests", |f| {
            address(f).own = true;
            f.wanted.guards_all = true;
        }),
        ("a refused record of the directory, which the agent reports too", |f| {
            f.node.refused = vec![refusal("web-1.yaml")];
        }),
        ("a socket of an ended agent", |f| f.node.stale_socket = Some("/run/xdp-imds/control.sock".into())),
    ] {
        let mut facts = healthy();
        spoil(&mut facts);
        assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new(), "{what}");
    }
}

#[test]
fn an_agent_with_other_records_than_those_checked_is_named_with_both() {
    let checked = "/given/records.d";
    for (read, says) in [
        (None, "It reads no directory of records, and /given/records.d is checked here"),
        (
            Some("/own/records.d"),
            "It reads the records in /own/records.d, and /given/records.d is checked here",
        ),
    ] {
        let mut facts = healthy();
        facts.node.agent = Some(42);
        facts.node.other_records = Some(OtherRecords { checked: checked.into(), read: read.map(Into::into) });
        let checks = all(&facts);
        assert_eq!(wrong(&checks), Vec::<&Check>::new(), "{read:?}");
        let agent = checks.iter().find(|check| check.name == "agent").expect("the agent's check");
        assert!(agent.found.contains(says) && agent.found.contains("process 42"), "{agent:?}");
    }
}

#[test]
fn the_agents_refusals_of_files_are_shown_where_no_directory_of_records_is_checked() {
    for (records, shown) in [(true, &["hook/7c0f"][..]), (false, &["web-1.yaml", "hook/7c0f"])] {
        let mut facts = healthy();
        facts.wanted.feeds = vec!["the API"];
        facts.node.refused = vec![refusal("web-1.yaml"), refusal("hook/7c0f")];
        facts.records = facts.records.filter(|_| records);
        let checks = all(&facts);
        let of_agent = checks.iter().filter(|check| check.name == "agent.refused");
        let found: Vec<_> = of_agent.filter_map(|check| check.subject.as_deref()).collect();
        assert_eq!(found, shown, "records are checked: {records}");
    }
}

#[test]
fn taps_are_not_closed_while_an_agent_with_another_run_directory_serves_them() {
    for (what, spoil, named) in [
        (
            "with this hub",
            (|f| f.node.hub = Ok(vec![("imds-tap".into(), "tap".into())])) as fn(&mut Facts),
            "hub",
        ),
        ("with another hub", |f| f.pins.as_mut().expect("pins").are_of_another = true, "pins.agent"),
    ] {
        let mut facts = healthy();
        facts.node.agent = None;
        facts.pins.as_mut().expect("pins").links =
            Ok(vec![PinnedLink { name: "port-1-7-9".into(), ifindex: Some(7) }]);
        spoil(&mut facts);
        let checks = all(&facts);
        let found: Vec<_> = wrong(&checks).iter().map(|check| check.name).collect();
        assert_eq!(found, [named], "{what}");
    }
}

#[test]
fn the_needs_of_guests_are_those_of_all_sources_beside_an_agent() {
    let mut facts = healthy();
    facts.records = Some(RecordFacts { count: 1, stamps: [("ec2", 1)].into(), ..RecordFacts::default() });
    let stamps = |facts: &Facts| {
        let checks = all(facts).into_iter().filter(|check| check.name == "guests");
        checks
            .map(|check| format!("{}: {}", check.subject.unwrap_or_default(), check.found))
            .collect::<Vec<_>>()
    };
    let found = stamps(&facts);
    assert!(matches!(&found[..], [one] if one.starts_with("ec2: one record, ")), "{found:?}");
    facts.node.datasources = Some([("ec2".into(), 1), ("openstack".into(), 2), ("none".into(), 9)].into());
    let found = stamps(&facts);
    assert!(
        matches!(&found[..], [ec2, other] if ec2.starts_with("ec2: ") && other.starts_with("openstack: 2 records, ")),
        "{found:?}"
    );
}

#[test]
fn what_the_units_sandbox_hides_is_named() {
    let mut config = crate::config::Config::default();
    assert_eq!(super::super::room::hidden(&config), []);
    config.records = Some("/srv/records".into());
    config.audit.to = Some("/rooted/audit.log".into());
    assert_eq!(super::super::room::hidden(&config), []);
    config.records = Some("/home/me/records".into());
    config.state = Some("/run/user/0/state".into());
    config.audit.to = Some("/home/me/audit.log".into());
    let found = super::super::room::hidden(&config);
    let subjects: Vec<_> = found.iter().map(|check| check.subject.clone().unwrap_or_default()).collect();
    assert_eq!(subjects, ["records", "state", "audit"]);
    assert!(found.iter().all(|check| {
        check.status == CheckStatus::Warn
            && check.remedy.as_ref().is_some_and(|remedy| remedy.contains("ProtectHome"))
    }));
}
