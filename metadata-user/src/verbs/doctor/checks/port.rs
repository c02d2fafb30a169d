//! Ports: whether the device exists, has a suitable type and is free.

use metadata_common::maps::program;

use super::super::{Check, Facts, Port, Status};
use super::count;
use metadata_base::port::PortName;
use metadata_steer::probe::{Device, Failure, Feature, Place, Program, Search};
use metadata_steer::{HUB_MTU, Mode};

/// Frames that a tap's ring should hold: eight connections with ten segments in flight each (RFC 6928 §2), doubled for
/// the guest's other traffic. The kernel's default is 500 or 1,000.
const LEAST_RING: u32 = 160;
/// The default MTU of guests.
const USUAL_MTU: u32 = 1_500;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let feeds = &facts.wanted.feeds;
    if facts.ports.is_empty() && !feeds.is_empty() {
        let found = format!("none yet; records of {} will name ports", feeds.join(" and "));
        return vec![Check::ok("port", found)];
    }
    if facts.ports.is_empty() {
        let remedy = "Name ports: --port IFNAME[@NETNS], `ports:`, or network.nics[].port in records";
        return vec![Check::warn(
            "port",
            "neither configuration nor records name a port",
            "at least one port",
            remedy,
        )];
    }
    facts.ports.iter().flat_map(|port| one(facts, port)).collect()
}

/// The problems of a port, or one `ok` check if it has none.
fn one(facts: &Facts, port: &Port) -> Vec<Check> {
    let device = match &port.device {
        Ok(Some(device)) => device,
        Ok(None) => return vec![absent(&port.name, None, port.elsewhere.as_ref()).of(&port.name)],
        Err(failure) => {
            return vec![absent(&port.name, Some(failure), port.elsewhere.as_ref()).of(&port.name)];
        }
    };
    let kind = kind(device);
    let is_none = kind.as_ref().is_some_and(|check| check.status == Status::Fail);
    let wrong = [
        kind,
        xdp(facts, port, device),
        classifiers(facts, device),
        mtu(device),
        up(&port.name, device),
        redirect(facts, &port.name, device).filter(|_| !is_none),
        ring(&port.name, device),
    ];
    let mut checks: Vec<_> = wrong.into_iter().flatten().map(|check| check.of(&port.name)).collect();
    if checks.is_empty() {
        checks.push(Check::ok("port", well(device)).of(&port.name));
    }
    checks
}

fn well(device: &Device) -> String {
    let Device { kind, mtu, queues, master, xdp, tcx, refused, .. } = device;
    let master = master.as_ref().map_or_else(String::new, |(name, kind)| format!(", on {kind} {name}"));
    let steered = xdp.iter().chain(tcx.iter().flatten()).any(is_ours);
    let steered = if steered { ", steered by the running agent" } else { "" };
    let refused = if *refused > 0 { format!(", {refused} frames refused so far") } else { String::new() };
    format!("{kind}, up, MTU {mtu}, {}{master}{steered}{refused}", count(*queues as usize, "queue"))
}

fn absent(name: &PortName, failure: Option<&Failure>, elsewhere: Option<&Search>) -> Check {
    let check = "port.device";
    let found = failure.map_or_else(
        || format!("no device {} in this namespace", name.ifname),
        |failure| failure.text.clone(),
    );
    if let Some(Failure { errno: Some(libc::EMFILE), .. }) = failure {
        return Check::warn(
            check,
            format!("unknown: {found}"),
            "a tap",
            "Raise the limit on open files first",
        );
    }
    if failure.is_some_and(Failure::is_refusal) {
        let remedy = "Give the agent CAP_SYS_ADMIN to enter a namespace, and CAP_SYS_PTRACE \
                      if the namespace belongs to another user's process";
        return Check::fail(check, found, "a namespace that can be entered", remedy);
    }
    match elsewhere {
        Some(search) if search.found > 0 => {
            let places: Vec<_> = search.places.iter().map(|place| place_of(&name.ifname, place)).collect();
            let more = if search.found > places.len() { ", …" } else { "" };
            let remedy = search.places.first().map_or_else(String::new, |place| write(&name.ifname, place));
            let expected = format!("{} in the configured namespace", name.ifname);
            Check::fail(check, format!("{found}; {}{more}", places.join(", ")), expected, remedy)
        }
        search => {
            let unseen = search.map_or(0, |search| search.unseen);
            let unseen = match unseen {
                0 => String::new(),
                number => format!(" ({} could not be searched)", count(number, "place")),
            };
            Check::warn(
                check,
                format!("{found}, nor in any other namespace{unseen}"),
                "a tap, once its VM starts",
                "No action is needed before the VM starts: the port is attached when it appears. Otherwise correct the name",
            )
        }
    }
}

fn place_of(ifname: &str, Place { netns, process }: &Place) -> String {
    match (netns, process) {
        (None, _) => format!("{ifname} is in the agent's own namespace"),
        (Some(netns), None) => format!("{ifname} is in namespace {netns}"),
        (Some(netns), Some((pid, called))) => {
            format!("{ifname} is in namespace {netns} (process {pid}, {called})")
        }
    }
}

fn write(ifname: &str, Place { netns, .. }: &Place) -> String {
    match netns {
        None => format!("Write `port: {{ifname: {ifname}}}` (--port {ifname})"),
        Some(netns) => {
            format!("Write `port: {{ifname: {ifname}, netns: {netns}}}` (--port {ifname}@{netns})")
        }
    }
}

fn kind(device: &Device) -> Option<Check> {
    let (check, kind) = ("port.kind", &device.kind);
    if !device.ethernet {
        let remedy = "Give the VM a tap, which carries Ethernet frames";
        return Some(Check::fail(check, format!("a {kind} without Ethernet"), "a tap", remedy));
    }
    match kind.as_str() {
        "tap" => None,
        // `redirect` reports this.
        "veth" if device.takes_redirected == Some(false) => None,
        "veth" => Some(Check::warn(
            check,
            "a veth: the kernel answers no frames on it, and answers cost more or are lost if its peer stops accepting \
             redirected frames",
            "a tap, or a veth whose peer accepts redirected frames",
            "If the veth leads to a guest's tap, name the tap; otherwise keep GRO on at the peer \
             (ethtool -K PEER gro on)",
        )),
        "macvtap" | "macvlan" | "ipvtap" | "ipvlan" => Some(Check::fail(
            check,
            format!("a {kind}: its programs do not see the guest's frames"),
            "a tap",
            "Connect the VM by a tap and a bridge (KubeVirt: bridge or masquerade binding)",
        )),
        "bridge" | "bond" | "vxlan" | "dummy" => Some(Check::fail(
            check,
            format!("a {kind}, which belongs to no single guest"),
            "the tap of one VM",
            "Name the VM's tap: `bridge link` lists the taps of a bridge",
        )),
        _ => Some(Check::warn(
            check,
            format!(
                "a {kind}: unless its driver supports XDP, generic XDP steers it at a higher cost per frame"
            ),
            "a tap",
            "Name the VM's tap, if it has one",
        )),
    }
}

fn is_ours(program: &Program) -> bool {
    matches!(
        program.name.as_deref(),
        Some(program::PORT | program::PORT_STUB | program::PORT_TCX | program::PORT_TCX_STUB)
    )
}

/// True if an xdp-imds program on a device can be this agent's: the agent runs, or has pinned links.
fn is_expected(facts: &Facts) -> bool {
    let pinned = facts.pins.as_ref().and_then(|pins| pins.links.as_ref().ok());
    facts.node.agent.is_some() || pinned.is_some_and(|links| !links.is_empty())
}

/// Checks for another XDP program, because a device carries only one.
fn xdp(facts: &Facts, port: &Port, device: &Device) -> Option<Check> {
    let (check, expected) = ("port.xdp", "no XDP program except the agent's");
    let program = match device.xdp.iter().find(|program| !is_ours(program)) {
        Some(other) => other,
        None if is_expected(facts) => return None,
        None => device.xdp.first()?,
    };
    let Program { id, name } = program;
    let name = name.as_deref().unwrap_or_default();
    let found = format!("XDP program `{name}` (number {id}) is already attached{}", owner(name));
    let tcx = facts.kernel.features.contains(&(Feature::Tcx, Ok(true)));
    let off = format!(
        "`bpftool prog show id {id}` shows it, `ip link set dev {} xdp off` removes it",
        port.name.ifname
    );
    let remedy = match name {
        program::PORT | program::PORT_STUB => {
            "Stop the other agent, or remove its pins by `xdp-imds release`".to_owned()
        }
        "xdp_dispatcher" => format!("`xdp-loader unload {} --all` removes it", port.name.ifname),
        name if is_cilium(name) => "Remove the device from Cilium's `devices`".to_owned(),
        _ if tcx => format!("{off}; or keep it and set `steer: tcx`"),
        _ => off,
    };
    Some(Check::fail(check, found, expected, remedy))
}

/// The usual owner of a program with this name.
fn owner(name: &str) -> &'static str {
    match name {
        program::PORT | program::PORT_STUB => ", probably by another xdp-imds",
        "xdp_dispatcher" => ", probably by libxdp",
        name if is_cilium(name) => ", probably by Cilium",
        name if name.contains("calico") => ", probably by Calico",
        _ => "",
    }
}

fn is_cilium(name: &str) -> bool {
    name.starts_with("cil_") || name == "bpf_xdp_entry"
}

/// Checks for other classifiers. The agent's runs before existing ones, but another can be placed before it later.
fn classifiers(facts: &Facts, device: &Device) -> Option<Check> {
    let tcx = device.tcx.iter().flatten();
    if !is_expected(facts) && tcx.clone().any(is_ours) {
        return Some(Check::fail(
            "port.tcx",
            "the classifier of another xdp-imds is attached",
            "no classifier except the agent's",
            "Stop the other agent, or remove its pins by `xdp-imds release`",
        ));
    }
    if facts.wanted.steer == Mode::Xdp {
        return None;
    }
    let named = |name: &Option<String>| name.clone().unwrap_or_else(|| "one without a name".into());
    let others = tcx.filter(|program| !is_ours(program)).map(|program| named(&program.name));
    let filters =
        device.filters.iter().map(|filter| named(&filter.name.clone().or(Some(filter.kind.clone()))));
    let others: Vec<_> = others.chain(filters).collect();
    if others.is_empty() {
        return None;
    }
    Some(Check::warn(
        "port.tcx",
        format!("other classifiers are attached: {}", others.join(", ")),
        "no other classifier, or only ones that run after the agent's",
        "No action is needed, because the agent's classifier runs first; set `steer: xdp` if another \
         is placed before it later",
    ))
}

/// Checks the MTU, because a redirect drops frames longer than the MTU of its target.
fn mtu(device: &Device) -> Option<Check> {
    let (check, mtu) = ("port.mtu", device.mtu);
    if mtu < USUAL_MTU {
        Some(Check::warn(
            check,
            format!("{mtu} octets"),
            format!("{USUAL_MTU}, or a guest with an MTU of {mtu}"),
            "Make sure that the guest has this MTU, because longer answers are dropped",
        ))
    } else if device.kind == "veth" && mtu > HUB_MTU {
        Some(Check::warn(
            check,
            format!("{mtu} octets, which limits a veth to generic XDP"),
            format!("{HUB_MTU} at most"),
            "Lower the MTU if steering costs too much",
        ))
    } else {
        None
    }
}

/// Checks that the driver accepts redirected frames, because answers are redirected to the port. If it does not, a
/// classifier delivers the answers, but only in the agent's namespace.
fn redirect(facts: &Facts, name: &PortName, device: &Device) -> Option<Check> {
    let remedy = match device.kind.as_str() {
        "veth" => "Turn GRO on at the other end: `ethtool -K PEER gro on` in its namespace",
        _ => "Give the VM a tap",
    };
    let has_tcx = facts.kernel.features.iter().any(|found| matches!(found, (Feature::Tcx, Ok(true))));
    let by_classifier = has_tcx && name.netns.is_none();
    (device.takes_redirected == Some(false)).then(|| {
        let (check, expected) = ("port.redirect", "a device that accepts redirected frames");
        let found = format!("the {} accepts no redirected frames", device.kind);
        if by_classifier {
            let found =
                format!("{found}: a classifier delivers answers, which takes more CPU time per frame");
            Check::warn(check, found, expected, remedy)
        } else {
            Check::fail(check, format!("{found}: the guest gets no answer"), expected, remedy)
        }
    })
}

/// Checks the length of a tap's ring, because frames beyond it are lost.
fn ring(name: &PortName, device: &Device) -> Option<Check> {
    let Device { ring, refused, .. } = device;
    (device.kind == "tap" && *ring < LEAST_RING).then(|| {
        let lost =
            if *refused > 0 { format!("; the tap refused {refused} frames so far") } else { String::new() };
        let remedy = format!("`ip link set {} txqueuelen 1000`", name.ifname);
        Check::warn(
            "port.ring",
            format!("a ring of {ring} frames{lost}"),
            format!("{LEAST_RING} or more, because lost answers arrive late, after a retransmission"),
            remedy,
        )
    })
}

fn up(name: &PortName, device: &Device) -> Option<Check> {
    (!device.up).then(|| {
        let enter = name.netns.as_ref().map_or_else(String::new, |netns| format!(" in {netns}"));
        let remedy = format!("`ip link set {} up`{enter}, or start its VM", name.ifname);
        Check::warn("port.up", format!("the {} is down", device.kind), "a device that is up", remedy)
    })
}
