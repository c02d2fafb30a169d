//! Checks ports: whether the device exists, is suitable, and carries no programs of others.

use metadata_common::maps::program;

use super::super::{Check, CheckStatus, Facts, PortFacts};
use super::count;
use metadata_common::port::PortName;
use metadata_common::printable::counted;
use metadata_steer::probe::{DeviceLocation, DeviceState, Feature, ProbeError, Program, Search};
use metadata_steer::{HUB_MTU, SteeringMode, is_hub_device};

/// Recommended minimum length of a tap's ring, in frames. Eight connections have ten segments in flight each (RFC 6928
/// §2). This number is doubled for the guest's other traffic. The kernel's default is 500 or 1,000.
const LEAST_RING: u32 = 160;
/// What a device without a kind is called.
const PHYSICAL: &str = "physical device";
/// The default MTU of guests, in bytes.
const USUAL_MTU: u32 = 1_500;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let feeds = &facts.wanted.feeds;
    if facts.ports.is_empty() && !feeds.is_empty() {
        let found = format!("no port yet; records from {} will name ports", feeds.join(" and "));
        return vec![Check::ok("port", found)];
    }
    if facts.ports.is_empty() && facts.records.as_ref().is_some_and(|records| records.count == 0) {
        let found =
            "no port yet; records will name ports: files in the directory, or those of libvirt's hook";
        return vec![Check::ok("port", found)];
    }
    if facts.ports.is_empty() {
        let remedy =
            "Name a port with --port IFNAME[@NETNS], with `ports:`, or with network.nics[].port in a record";
        return vec![Check::warn(
            "port",
            "neither the configuration nor a record names a port",
            "at least one port",
            remedy,
        )];
    }
    facts.ports.iter().flat_map(|port| one(facts, port)).collect()
}

/// Returns a check for each problem of a port, or one `ok` check if the port has no problem.
fn one(facts: &Facts, port: &PortFacts) -> Vec<Check> {
    let device = match &port.device {
        Ok(Some(device)) => device,
        // One of that name in another namespace is of another agent: nobody must name it.
        _ if is_hub_device(&facts.wanted.hub, &port.name.ifname) => {
            let found = format!(
                "{} is the name of a device of an xdp-imds hub, which carries the frames of all guests",
                port.name.ifname
            );
            let remedy = "Name the VM's tap; `ip -brief link` lists them";
            return vec![Check::fail("port.device", found, "the tap of one VM", remedy).of(&port.name)];
        }
        Ok(None) => return vec![absent(&port.name, None, port.elsewhere.as_ref()).of(&port.name)],
        Err(failure) => {
            return vec![absent(&port.name, Some(failure), port.elsewhere.as_ref()).of(&port.name)];
        }
    };
    let kind = kind(device);
    let is_none = kind.as_ref().is_some_and(|check| check.status == CheckStatus::Fail);
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
    // What the checks above found is the reason.
    if checks.iter().all(|check| check.status != CheckStatus::Fail) {
        checks.extend(in_error(facts, &port.name));
    }
    if checks.is_empty() {
        checks.push(Check::ok("port", well(facts, &port.name, device)).of(&port.name));
    }
    checks
}

/// The running agent cannot serve a port, whatever its device looks like.
fn in_error(facts: &Facts, name: &PortName) -> Option<Check> {
    let shown = name.to_string();
    let (_, reason) = facts.node.port_errors.iter().find(|(port, _)| *port == shown)?;
    let remedy = "Do what the reason says. After a change of `pins`, or if a file system was mounted over them, the programs may be \
                  those of the agent before: put the pins back (`umount` what lies over them), or stop the agent, run \
                  `xdp-imds release --pins` with the directory before, and start it again";
    let found = format!("the running agent does not serve it: {reason}");
    Some(Check::fail("port.served", found, "a port that the running agent serves", remedy).of(name))
}

/// Describes a port without problems.
fn well(facts: &Facts, name: &PortName, device: &DeviceState) -> String {
    let DeviceState { kind, mtu, queues, master, xdp, tcx, refused, .. } = device;
    let master = master.as_ref().map_or_else(String::new, |(name, kind)| format!(", on {kind} {name}"));
    let steered = xdp.iter().chain(tcx.iter().flatten()).any(is_ours);
    let steered = if steered { ", steered by the running agent" } else { "" };
    let refused =
        if *refused > 0 { format!(", {} refused so far", counted(*refused, "frame")) } else { String::new() };
    let queues = match queues {
        0 | 1 => count(*queues as usize, "queue"),
        _ if kind != "tap" || (facts.wanted.steer == SteeringMode::Tcx && name.netns.is_none()) => {
            count(*queues as usize, "queue")
        }
        // The kernel gives every tap of several queues 256, however many are attached.
        _ => "several queues (answers come by any that is attached; the hypervisor must detach those that the guest \
              does not read, as QEMU does)"
            .to_owned(),
    };
    format!("{kind}, up, MTU {mtu}, {queues}{master}{steered}{refused}")
}

/// Returns the check of a port whose device was not found. `failure` is the error of the query, if it failed.
fn absent(name: &PortName, failure: Option<&ProbeError>, elsewhere: Option<&Search>) -> Check {
    let check = "port.device";
    let found = failure.map_or_else(
        || format!("the port's namespace has no device {}", name.ifname),
        |failure| failure.text.clone(),
    );
    if let Some(ProbeError { errno: Some(libc::EMFILE), .. }) = failure {
        return Check::warn(
            check,
            format!("the device is unknown: {found}"),
            "a tap",
            "Raise the limit on open files first",
        );
    }
    if failure.is_some_and(ProbeError::is_refusal) {
        let remedy = "Give the agent CAP_SYS_ADMIN to enter a namespace, and CAP_SYS_PTRACE \
                      if the namespace belongs to another user's process";
        return Check::fail(check, found, "a namespace that the agent can enter", remedy);
    }
    match elsewhere {
        Some(search) if search.found > 0 => {
            let places: Vec<_> = search.places.iter().map(|place| place_of(&name.ifname, place)).collect();
            let more = if search.found > places.len() { ", …" } else { "" };
            let remedy = search.places.first().map_or_else(String::new, |place| write(&name.ifname, place));
            let expected = format!("{} in the port's namespace", name.ifname);
            Check::fail(check, format!("{found}; {}{more}", places.join(", ")), expected, remedy)
        }
        search => {
            let unseen = search.map_or(0, |search| search.unseen);
            let found = format!("{found}; the search found no {} in other namespaces", name.ifname);
            // A VM that is stopped has no tap.
            if unseen == 0 && failure.is_none_or(|failure| failure.errno == Some(libc::ENOENT)) {
                let until = "the agent attaches the port when its device appears. If the VM runs, correct the port's name";
                return Check::ok(check, format!("{found}; {until}"));
            }
            let unseen = match unseen {
                0 => String::new(),
                number => format!("; namespaces or processes not searched: {number}"),
            };
            Check::warn(
                check,
                format!("{found}{unseen}"),
                "a tap after its VM has started",
                "No action is needed before the VM starts, because the agent attaches the port when its device \
                 appears. If the VM runs, correct the port's name",
            )
        }
    }
}

/// Describes a place where the search found the device.
fn place_of(ifname: &str, DeviceLocation { netns, process }: &DeviceLocation) -> String {
    match (netns, process) {
        (None, _) => format!("{ifname} is in the agent's own namespace"),
        (Some(netns), None) => format!("{ifname} is in namespace {netns}"),
        (Some(netns), Some((pid, called))) => {
            format!("{ifname} is in namespace {netns} (process {pid}, {called})")
        }
    }
}

/// Returns the remedy for a wrong namespace: the right name of the port.
fn write(ifname: &str, DeviceLocation { netns, .. }: &DeviceLocation) -> String {
    match netns {
        None => format!("Write `port: {{ifname: {ifname}}}` in the record, or use --port {ifname}"),
        Some(netns) => {
            format!(
                "Write `port: {{ifname: {ifname}, netns: {netns}}}` in the record, or use --port {ifname}@{netns}"
            )
        }
    }
}

fn kind(device: &DeviceState) -> Option<Check> {
    let (check, kind) = ("port.kind", &device.kind);
    if !device.ethernet {
        let remedy = "Give the VM a tap, which carries Ethernet frames";
        // The kernel reports no kind of the loopback interface.
        let kind = if kind == PHYSICAL { "loopback or point-to-point device" } else { kind };
        return Some(Check::fail(check, format!("this {kind} carries no Ethernet frames"), "a tap", remedy));
    }
    match kind.as_str() {
        "tap" => None,
        // `redirect` reports a veth that accepts no redirected frames.
        "veth" if device.takes_redirected == Some(false) => None,
        "veth" => Some(Check::warn(
            check,
            "the XDP program answers no frames itself on this veth; if the veth's peer stops accepting redirected \
             frames, the agent's answers cost more CPU time or are lost",
            "a tap, or a veth whose peer accepts redirected frames",
            "If the veth leads to a guest's tap, name that tap. Otherwise keep GRO on at the veth's peer \
             (ethtool -K PEER gro on)",
        )),
        "macvtap" | "macvlan" | "ipvtap" | "ipvlan" => Some(Check::fail(
            check,
            format!("programs on this {kind} do not see the guest's frames"),
            "a tap",
            "Connect the VM by a tap and a bridge (KubeVirt: bridge or masquerade binding)",
        )),
        "bridge" | "bond" | "vxlan" | "dummy" => Some(Check::fail(
            check,
            format!("this {kind} belongs to no single guest"),
            "the tap of one VM",
            "Name the VM's tap; `bridge link` lists the taps of a bridge",
        )),
        _ => Some(Check::warn(
            check,
            format!("this {kind} costs more CPU time per frame if its driver supports only generic XDP"),
            "a tap",
            "Name the VM's tap, if the VM has one",
        )),
    }
}

/// True if the program has a name that xdp-imds uses for programs on ports. It belongs to this agent or another one.
fn is_ours(program: &Program) -> bool {
    matches!(
        program.name.as_deref(),
        Some(program::PORT | program::PORT_STUB | program::PORT_TCX | program::PORT_TCX_STUB)
    )
}

/// True if an xdp-imds program on a device can belong to this agent, because this agent runs or has pinned links.
fn is_expected(facts: &Facts) -> bool {
    let pinned = facts.pins.as_ref().and_then(|pins| pins.links.as_ref().ok());
    facts.node.agent.is_some() || pinned.is_some_and(|links| !links.is_empty())
}

/// Checks for an XDP program that does not belong to this agent. A device carries only one XDP program.
fn xdp(facts: &Facts, port: &PortFacts, device: &DeviceState) -> Option<Check> {
    let (check, expected) = ("port.xdp", "no XDP program except the agent's");
    let program = match device.xdp.iter().find(|program| !is_ours(program)) {
        Some(other) => other,
        None if is_expected(facts) => return None,
        None => device.xdp.first()?,
    };
    let Program { id, name } = program;
    // With fewer capabilities than the agent has, the kernel names no programs.
    if name.is_none() && is_expected(facts) {
        return Some(Check::warn(
            check,
            format!("XDP program {id}, whose name cannot be read, is attached: the agent's own, or another"),
            expected,
            "Run doctor as root with all capabilities. `xdp-imds status` says whether the agent serves the port",
        ));
    }
    let name = name.as_deref().unwrap_or_default();
    let shown = if name.is_empty() { "without a name".to_owned() } else { format!("`{name}`") };
    let found = format!("XDP program {shown} (ID {id}) is already attached{}", owner(name));
    let tcx = facts.kernel.features.contains(&(Feature::Tcx, Ok(true)));
    let off = format!(
        "`bpftool prog show id {id}` shows this program, and `ip link set dev {} xdp off`{} removes it",
        port.name.ifname,
        within(&port.name)
    );
    let remedy = match name {
        program::SOCKET | program::HUB => {
            // Anyone who detaches the program ends the service.
            "Name the tap of a VM: this device belongs to a hub of xdp-imds, and its program has to stay"
                .to_owned()
        }
        program::PORT | program::PORT_STUB => {
            "Stop the other agent, or remove its pins with `xdp-imds release`".to_owned()
        }
        "xdp_dispatcher" => {
            format!("Run `xdp-loader unload {} --all`, which removes this program", port.name.ifname)
        }
        name if is_cilium(name) => "Remove the device from Cilium's `devices`".to_owned(),
        _ if tcx => format!("{off}. To keep this program, set `steer: tcx`"),
        _ => off,
    };
    Some(Check::fail(check, found, expected, remedy))
}

/// Names the usual owner of a program with this name, for the end of a sentence. Empty if the owner is unknown.
fn owner(name: &str) -> &'static str {
    match name {
        program::SOCKET | program::HUB => ", by xdp-imds",
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

/// Checks for classifiers that do not belong to this agent. The agent attaches its classifier before the existing ones.
/// Another program can later put its own classifier first.
fn classifiers(facts: &Facts, device: &DeviceState) -> Option<Check> {
    let tcx = device.tcx.iter().flatten();
    if !is_expected(facts) && tcx.clone().any(is_ours) {
        return Some(Check::fail(
            "port.tcx",
            "the classifier of another xdp-imds is attached",
            "no classifier except the agent's",
            "Stop the other agent, or remove its pins with `xdp-imds release`",
        ));
    }
    if facts.wanted.steer == SteeringMode::Xdp {
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
        "No action is needed while the agent's classifier runs first. If another program puts its classifier \
         first, set `steer: xdp`",
    ))
}

/// Checks the MTU. A redirect drops a frame that is longer than the MTU of the target device.
fn mtu(device: &DeviceState) -> Option<Check> {
    let (check, mtu) = ("port.mtu", device.mtu);
    if mtu < USUAL_MTU {
        Some(Check::warn(
            check,
            format!("the MTU is {mtu} bytes"),
            format!("an MTU of {USUAL_MTU}, or a guest with an MTU of {mtu}"),
            "Make sure that the guest has this MTU too, because longer answers are dropped",
        ))
    } else if device.kind == "veth" && mtu > HUB_MTU {
        Some(Check::warn(
            check,
            format!("the MTU is {mtu} bytes; a veth with such an MTU supports only generic XDP"),
            format!("an MTU of {HUB_MTU} at most"),
            "Lower the MTU if the agent's XDP program takes too much CPU time",
        ))
    } else {
        None
    }
}

/// Checks that the device accepts redirected frames. The agent's answers reach the guest by an XDP redirect to this
/// device. If the device does not accept redirected frames, a tcx classifier delivers the answers, but only to devices
/// in the agent's own namespace.
fn redirect(facts: &Facts, name: &PortName, device: &DeviceState) -> Option<Check> {
    let remedy = match device.kind.as_str() {
        "veth" => "Turn GRO on at the veth's peer: run `ethtool -K PEER gro on` in the peer's namespace",
        _ => "Give the VM a tap",
    };
    let has_tcx = facts.kernel.features.iter().any(|found| matches!(found, (Feature::Tcx, Ok(true))));
    let by_classifier = has_tcx && name.netns.is_none();
    (device.takes_redirected == Some(false)).then(|| {
        let (check, expected) = ("port.redirect", "a device that accepts redirected frames");
        let found = format!("the {} accepts no redirected frames", device.kind);
        if by_classifier {
            let found =
                format!("{found}; a classifier delivers answers, which takes more CPU time per frame");
            Check::warn(check, found, expected, remedy)
        } else {
            Check::fail(check, format!("{found}, so the guest gets no answer"), expected, remedy)
        }
    })
}

/// Checks the length of a tap's ring. A tap drops frames while its ring is full.
fn ring(name: &PortName, device: &DeviceState) -> Option<Check> {
    let DeviceState { ring, refused, .. } = device;
    (device.kind == "tap" && *ring < LEAST_RING).then(|| {
        let lost = if *refused > 0 {
            format!("; the tap has refused {} so far", counted(*refused, "frame"))
        } else {
            String::new()
        };
        let remedy = format!("Run `ip link set {} txqueuelen 1000`{}", name.ifname, within(name));
        Check::warn(
            "port.ring",
            format!("the tap's ring holds {ring} frames{lost}"),
            format!(
                "at least {LEAST_RING} frames, because a lost answer arrives only after a retransmission"
            ),
            remedy,
        )
    })
}

/// Names the namespace in which a command must run, for the text after the command. Empty for the agent's own.
fn within(name: &PortName) -> String {
    name.netns.as_ref().map_or_else(String::new, |netns| format!(" in {netns}"))
}

fn up(name: &PortName, device: &DeviceState) -> Option<Check> {
    (!device.up).then(|| {
        let remedy = format!("Run `ip link set {} up`{}, or start the VM", name.ifname, within(name));
        Check::warn("port.up", format!("the {} is down", device.kind), "a device that is up", remedy)
    })
}
