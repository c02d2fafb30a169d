//! Tests the checks of ports: where their devices are, and what is on them.

use super::super::super::facts::Facts;
use super::super::super::{Check, CheckStatus};
use super::{all, healthy, judge, program, refused, the_tap, wrong};
use metadata_steer::SteeringMode;
use metadata_steer::probe::{DeviceLocation, Filter, PinnedLink, ProbeError, Search};

#[test]
fn the_agents_own_view_of_a_port_counts() {
    use CheckStatus::{Fail, Warn};
    judge(&[
        (
            "a port that looks well and that the agent cannot serve",
            |f| {
                f.node.agent = Some(7);
                f.node.port_errors = vec![("tap0".into(), "cannot attach to tap0: it is taken".into())];
            },
            "port.served",
            Fail,
            &["tap0", "it is taken", "umount", "xdp-imds release"],
        ),
        (
            "a program whose name cannot be read",
            |f| {
                f.node.agent = Some(7);
                the_tap(f).xdp = vec![metadata_steer::probe::Program { id: 42, name: None }];
            },
            "port.xdp",
            Warn,
            &["42", "all capabilities"],
        ),
    ]);
}

#[test]
fn a_tap_in_another_namespace_is_found_and_named() {
    use CheckStatus::{Fail, Warn};
    fn lost(facts: &mut Facts, places: Vec<DeviceLocation>) {
        facts.ports[0].device = Ok(None);
        facts.ports[0].elsewhere = Some(Search { found: places.len(), places, unseen: 0 });
    }
    judge(&[
        (
            "a tap in a namespace with a name",
            |f| lost(f, vec![DeviceLocation { netns: Some("pod-1".into()), process: None }]),
            "port.device",
            Fail,
            &["in namespace pod-1", "port: {ifname: tap0, netns: pod-1}"],
        ),
        (
            "a tap in a namespace without a name",
            |f| {
                lost(
                    f,
                    vec![DeviceLocation {
                        netns: Some("/proc/42/ns/net".into()),
                        process: Some((42, "qemu".into())),
                    }],
                )
            },
            "port.device",
            Fail,
            &["process 42, qemu", "netns: /proc/42/ns/net}"],
        ),
        (
            "a tap in the agent's own namespace",
            |f| {
                lost(f, vec![DeviceLocation { netns: None, process: None }]);
                f.ports[0].name.netns = Some("pod-1".into());
            },
            "port.device",
            Fail,
            &["agent's own namespace", "port: {ifname: tap0}"],
        ),
        (
            "a device of the hub, which another agent has in its namespace",
            |f| {
                lost(f, vec![DeviceLocation { netns: Some("/proc/42/ns/net".into()), process: None }]);
                f.ports[0].name.ifname = "imds-in".into();
            },
            "port.device",
            Fail,
            &["a device of an xdp-imds hub", "Name the VM's tap"],
        ),
        (
            "a namespace without permission",
            |f| f.ports[0].device = Err(refused()),
            "port.device",
            Fail,
            &["CAP_SYS_PTRACE"],
        ),
        (
            "namespaces that were not searched",
            |f| {
                f.ports[0].device = Ok(None);
                f.ports[0].elsewhere = Some(Search { unseen: 3, ..Search::default() });
            },
            "port.device",
            Warn,
            &["not searched: 3"],
        ),
        (
            "an error that says nothing about the device",
            |f| {
                lost(f, Vec::new());
                f.ports[0].device = Err(ProbeError { errno: Some(libc::ENOMEM), text: "no memory".into() });
            },
            "port.device",
            Warn,
            &["no memory", "appears"],
        ),
    ]);
}

#[test]
fn a_port_whose_vm_is_stopped_is_no_problem() {
    let no_namespace = || Err(ProbeError { errno: Some(libc::ENOENT), text: "no namespace pod-1".into() });
    for (what, device) in [("no device", Ok(None)), ("no namespace", no_namespace())] {
        let mut facts = healthy();
        facts.ports[0].device = device;
        facts.ports[0].elsewhere = Some(Search::default());
        let checks = all(&facts);
        assert_eq!(wrong(&checks), Vec::<&Check>::new(), "{what}");
        let found = checks.iter().find(|check| check.name == "port.device").expect("the port's check");
        for word in ["found no tap0", "attaches the port when its device appears", "correct the port's name"]
        {
            assert!(found.found.contains(word), "{what}: no `{word}` in: {}", found.found);
        }
    }
}

#[test]
fn an_unsuitable_or_occupied_device_is_reported() {
    use CheckStatus::{Fail, Warn};
    fn kind(facts: &mut Facts, kind: &str) {
        the_tap(facts).kind = kind.into();
    }
    fn xdp(facts: &mut Facts, name: &str) {
        the_tap(facts).xdp = vec![program(name)];
    }
    judge(&[
        (
            "an unknown XDP program",
            |f| xdp(f, "filter"),
            "port.xdp",
            Fail,
            &["tap0", "`filter` (ID 42)", "xdp off", "steer: tcx"],
        ),
        (
            "a program of libxdp",
            |f| xdp(f, "xdp_dispatcher"),
            "port.xdp",
            Fail,
            &["libxdp", "xdp-loader unload tap0"],
        ),
        ("a program of Cilium", |f| xdp(f, "cil_xdp_entry"), "port.xdp", Fail, &["Cilium"]),
        (
            "a program of another xdp-imds",
            |f| xdp(f, "port"),
            "port.xdp",
            Fail,
            &["another xdp-imds", "release"],
        ),
        (
            "a classifier of another xdp-imds",
            |f| the_tap(f).tcx = Some(vec![program("port_tcx")]),
            "port.tcx",
            Fail,
            &["another xdp-imds"],
        ),
        (
            "an unknown classifier",
            |f| the_tap(f).tcx = Some(vec![program("cil_to_host")]),
            "port.tcx",
            Warn,
            &["cil_to_host"],
        ),
        (
            "a classifier of a queueing discipline",
            |f| the_tap(f).filters = vec![Filter { kind: "bpf".into(), name: Some("meter".into()) }],
            "port.tcx",
            Warn,
            &["meter"],
        ),
        ("a macvtap", |f| kind(f, "macvtap"), "port.kind", Fail, &["macvtap", "bridge"]),
        ("a bridge", |f| kind(f, "bridge"), "port.kind", Fail, &["tap of one VM"]),
        ("a veth", |f| kind(f, "veth"), "port.kind", Warn, &["gro on"]),
        (
            "a veth without GRO",
            |f| {
                kind(f, "veth");
                the_tap(f).takes_redirected = Some(false);
            },
            "port.redirect",
            Warn,
            &["classifier", "more CPU time", "gro on"],
        ),
        (
            "a veth without GRO in another namespace",
            |f| {
                kind(f, "veth");
                the_tap(f).takes_redirected = Some(false);
                f.ports[0].name.netns = Some("pod-1".into());
            },
            "port.redirect",
            Fail,
            &["no answer", "gro on"],
        ),
        (
            "a driver that accepts no redirected frames",
            |f| the_tap(f).takes_redirected = Some(false),
            "port.redirect",
            Warn,
            &["tap"],
        ),
        (
            "a short ring",
            |f| {
                the_tap(f).ring = 8;
                the_tap(f).refused = 12;
            },
            "port.ring",
            Warn,
            &["8 frames", "refused 12", "ip link set tap0 txqueuelen 1000"],
        ),
        ("a physical device", |f| kind(f, "physical device"), "port.kind", Warn, &["generic XDP"]),
        ("a device without Ethernet", |f| the_tap(f).ethernet = false, "port.kind", Fail, &["Ethernet"]),
        (
            "the loopback interface",
            |f| {
                kind(f, "physical device");
                the_tap(f).ethernet = false;
            },
            "port.kind",
            Fail,
            &["this loopback or point-to-point device carries no Ethernet frames"],
        ),
        (
            "a device of a hub",
            |f| the_tap(f).xdp = vec![program("socket")],
            "port.xdp",
            Fail,
            &["by xdp-imds", "Name the tap of a VM", "has to stay"],
        ),
        ("a small MTU", |f| the_tap(f).mtu = 1_400, "port.mtu", Warn, &["1400"]),
        ("a device that is down", |f| the_tap(f).up = false, "port.up", Warn, &["ip link set tap0 up"]),
        ("no port", |f| f.ports.clear(), "port", Warn, &["network.nics[].port"]),
    ]);
}

#[test]
fn a_tap_of_several_queues_is_said_to_answer_by_all_of_them_but_for_classifiers() {
    for (queues, steer, netns, says) in [
        (1, SteeringMode::Auto, None, false),
        (256, SteeringMode::Auto, None, true),
        (256, SteeringMode::Xdp, None, true),
        (256, SteeringMode::Tcx, None, false),
        (256, SteeringMode::Tcx, Some("pod-1"), true),
    ] {
        let mut facts = healthy();
        the_tap(&mut facts).queues = queues;
        facts.wanted.steer = steer;
        facts.ports[0].name.netns = netns.map(Into::into);
        let checks = all(&facts);
        let found = checks.iter().find(|check| check.name == "port").expect("the port's check");
        assert_eq!(
            found.found.contains("detach"),
            says,
            "{queues} queues, {steer:?}, {netns:?}: {}",
            found.found
        );
    }
}

#[test]
fn programs_of_a_running_agent_are_no_problem_and_those_of_a_dead_one_are_its_own() {
    let mut facts = healthy();
    facts.node.agent = Some(42);
    the_tap(&mut facts).xdp = vec![program("port")];
    the_tap(&mut facts).tcx = Some(vec![program("port_tcx")]);
    facts.pins.as_mut().expect("pins").links =
        Ok(vec![PinnedLink { name: "port-1-7-9".into(), ifindex: Some(7) }]);
    assert_eq!(wrong(&all(&facts)), Vec::<&Check>::new());
    facts.node.agent = None;
    let checks = all(&facts);
    let found: Vec<_> = wrong(&checks).iter().map(|check| check.name).collect();
    assert_eq!(found, ["agent.closed"]);
}
