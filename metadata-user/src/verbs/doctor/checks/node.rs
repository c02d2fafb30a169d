//! Checks the node: other agents, the names of the hub's devices, lost frames, other uses of the served addresses, the
//! clock and the processors.

use std::net::IpAddr;

use super::super::facts::{AgentSilence, OtherRecords};
use super::super::{Check, CheckStatus, Facts, NodeFacts};
use super::count;
use metadata_common::printable::counted;
use metadata_control::status::{MacMismatch, RefusedRecord};
use metadata_steer::probe::{AddressUse, PinnedLink};

/// Maximum number of the running agent's problems that are printed.
const PROBLEMS: usize = 16;

/// 2026-01-01 UTC in seconds since 1970. A correct clock shows a later time.
const EARLIEST: u64 = 1_767_225_600;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Facts { node, wanted, process, .. } = facts;
    let mut checks = vec![agent(node), hub(node, &wanted.hub)];
    checks.extend(libvirt(node));
    checks.extend(closed(facts));
    checks.extend(attachments(node));
    checks.extend(node.mac_mismatches.iter().map(mac_mismatch));
    // The names of files have no source and no slash. The directory of records shows them, if it is checked.
    let others = node.refused.iter().filter(|one| facts.records.is_none() || one.record.contains('/'));
    checks.extend(others.map(refused));
    checks.extend(ring(node));
    checks.extend(namespaces(node));
    checks.extend(addresses(node, wanted.guards_all));
    checks.extend(bridge(node));
    checks.push(clock(process.unix_time));
    checks.push(workers(wanted.workers as usize, process.cpus));
    checks
}

fn agent(node: &NodeFacts) -> Check {
    let name = "agent";
    match (node.agent, &node.stale_socket) {
        (Some(pid), _) if let Some(AgentSilence { hangs, reason }) = &node.silence => {
            let check = if *hangs { Check::fail } else { Check::warn };
            check(
                name,
                format!("an agent (process {pid}) runs with this run directory, but {reason}"),
                "an agent that answers",
                "`journalctl -u xdp-imds` may say why. Restart it (`systemctl restart xdp-imds`; another one: kill it and start \
                 it again): taps stay closed meanwhile. The checks here that need the agent are left out",
            )
        }
        (Some(pid), _) => Check::ok(
            name,
            format!(
                "an agent (process {pid}) runs with this run directory; another takes over with `serve --takeover`, \
                 or has its own --run, --pins and --hub{}",
                node.other_records.as_ref().map(with_other_records).unwrap_or_default()
            ),
        ),
        (None, Some(path)) => {
            let found = format!(
                "no agent runs with this run directory; the next start replaces the old socket {}",
                path.display()
            );
            Check::ok(name, found)
        }
        (None, None) => Check::ok(name, "no agent runs with this run directory"),
    }
}

/// Says that the records of a running agent are not those that are checked.
fn with_other_records(OtherRecords { checked, read }: &OtherRecords) -> String {
    let read = match read {
        Some(read) => format!("the records in {}", read.display()),
        None => "no directory of records".into(),
    };
    format!(
        ". It reads {read}, and {} is checked here: what it serves is left out. `xdp-imds doctor` with the agent's own \
         configuration or options has that too",
        checked.display()
    )
}

/// Programs that outlived their agent keep the taps closed: guests get no answer until an agent runs.
fn closed(facts: &Facts) -> Option<Check> {
    let pins = facts.pins.as_ref()?;
    let links = pins.links.as_ref().ok()?;
    // Other links are of the hub's devices.
    let is_of_a_tap = |link: &&PinnedLink| link.ifindex != Some(0) && link.name.starts_with("port-");
    let closed = links.iter().filter(is_of_a_tap).count();
    // An agent with another run directory holds its pins, and the hub has taps while it runs.
    let runs = facts.node.agent.is_some()
        || pins.are_of_another
        || facts.node.hub.as_ref().is_ok_and(|devices| devices.iter().any(|(_, kind)| kind == "tap"));
    (!runs && closed > 0).then(|| {
        Check::fail(
            "agent.closed",
            format!(
                "no agent runs, and programs of one that has ended close {}: guests there get no metadata",
                count(closed, "tap")
            ),
            "a running agent",
            "Start the agent (`systemctl start xdp-imds`; `journalctl -u xdp-imds` says why it ended), or open the taps by \
             `xdp-imds release`",
        )
    })
}

fn hub(node: &NodeFacts, prefix: &str) -> Check {
    let name = "hub";
    let devices = match &node.hub {
        Ok(devices) => devices,
        Err(failure) => {
            return Check::warn(
                name,
                failure.text.clone(),
                "a list of the hub's devices",
                "Solve this error",
            );
        }
    };
    let listed = |kinds: &[&(String, String)]| {
        kinds.iter().map(|(name, kind)| format!("{name} ({kind})")).collect::<Vec<_>>().join(", ")
    };
    let foreign: Vec<_> = devices.iter().filter(|(_, kind)| kind != "veth" && kind != "tap").collect();
    let taps: Vec<_> = devices.iter().filter(|(_, kind)| kind == "tap").collect();
    if !foreign.is_empty() {
        return Check::fail(
            name,
            format!("another device has a name that the hub needs: {}", listed(&foreign)),
            format!("free names for the hub's devices (prefix {prefix}-)"),
            "Rename the device, or choose another prefix with --hub or `hub:`",
        );
    }
    match (taps.is_empty(), devices.is_empty(), node.agent) {
        (true, true, _) => {
            Check::ok(name, format!("the names of the hub's devices are free (prefix {prefix}-)"))
        }
        (true, false, _) => {
            let all: Vec<_> = devices.iter().collect();
            Check::ok(
                name,
                format!("a killed agent left {}; the next start replaces the devices", listed(&all)),
            )
        }
        (false, _, Some(_)) if !node.hub_down.is_empty() => Check::fail(
            name,
            format!(
                "{} of the running agent is down, or does not have the MTU that the agent set: \
                 its guests get no answer",
                node.hub_down.join(", ")
            ),
            "devices that are up, as the agent made them",
            "Tell the node's network manager to leave the hub's devices alone (the packages do for NetworkManager and \
             systemd-networkd). The agent sets them up again within 30 seconds",
        ),
        (false, _, Some(_)) => Check::ok(name, format!("the running agent uses {}", listed(&taps))),
        (false, _, None) => Check::fail(
            name,
            format!("another agent, with another run directory, uses {}", listed(&taps)),
            format!("free names for the hub's devices (prefix {prefix}-)"),
            "Stop that agent, or give this one another --hub, --run and --pins",
        ),
    }
}

/// A daemon of libvirt that has run since before the hook was installed does not run it.
fn libvirt(node: &NodeFacts) -> Option<Check> {
    let daemon = node.libvirt.as_ref()?;
    Some(Check::warn(
        "libvirt.hook",
        format!(
            "{daemon} has run since before its hook was installed, and looks for hooks only when it starts"
        ),
        "a daemon that runs the hook: else domains get no records",
        format!("Run `systemctl restart {daemon}`; VMs keep running"),
    ))
}

/// Checks that programs and pins are as the running agent made them.
fn attachments(node: &NodeFacts) -> Option<Check> {
    let found = node.attachments.as_ref()?;
    let name = "agent.attachments";
    if !found.faults.is_empty() {
        // Guests of a port whose program was detached get no answer, and `status` ends with 1.
        return Some(Check::fail(
            name,
            found.faults.join("; "),
            "programs, links and pins as the running agent made them",
            "After `xdp-imds release --force` do what it was for, or send SIGHUP (`systemctl reload xdp-imds`). Otherwise find out \
             who detaches programs, sets devices down or changes the bpffs. The agent restores what it can every 30 to 60 \
             seconds, and at once on SIGHUP; what it cannot restore says what to do",
        ));
    }
    let ago = match found.checked {
        Some(ago) => format!("{ago:.0} s ago"),
        None => "not yet".to_owned(),
    };
    Some(Check::ok(name, format!("programs and pins are as the running agent made them (compared {ago})")))
}

/// What the running agent complains of, and no other check.
pub(super) fn problems(node: &NodeFacts, others: &[Check]) -> Vec<Check> {
    let problems: Vec<_> = node.problems.iter().filter(|problem| !is_told(problem, others)).collect();
    let listed = problems.iter().take(PROBLEMS).map(|problem| problem.as_str());
    let more = problems.len().saturating_sub(PROBLEMS);
    let more = (more > 0).then(|| format!("{more} more"));
    let problem = |found: &str| {
        Check::warn(
            "agent.problems",
            format!("the running agent says: {found}"),
            "a running agent without problems",
            "Do what it says; `xdp-imds status` lists a problem until it is fixed",
        )
    };
    listed.chain(more.as_deref()).map(problem).collect()
}

/// Whether another check reports the cause of a problem: the problem names the path that the check is about, quotes
/// what it found, or names the setting that it checks.
fn is_told(problem: &str, others: &[Check]) -> bool {
    fn paths(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split_whitespace().map(|word| word.trim_end_matches([':', ',', ';']));
        words.filter(|word| word.starts_with('/'))
    }
    // A finding begins with the path that it is about.
    let about = |found: &str| paths(found).next().filter(|path| found.starts_with(*path)).map(str::to_owned);
    others.iter().filter(|check| check.status != CheckStatus::Ok).any(|check| {
        problem.contains(&check.found)
            || problem.contains(&format!("`{}`", check.name))
            || about(&check.found).is_some_and(|about| paths(problem).any(|path| path == about))
    })
}

/// A record that the running agent refuses, or that libvirt's hook refused.
fn refused(refused: &RefusedRecord) -> Check {
    let check = Check::warn(
        "agent.refused",
        refused.reason.clone(),
        "a record that can be used",
        "Correct what the reason names; until then the VM has its last good record, or none",
    );
    check.of(&refused.record)
}

/// A guest whose MAC is not the one in its record gets no answer.
fn mac_mismatch(found: &MacMismatch) -> Check {
    let expected: Vec<_> = found.expected.iter().map(ToString::to_string).collect();
    let why = match &expected[..] {
        [] => "no record has a NIC on this port".to_owned(),
        expected => expected.join(", "),
    };
    let noticed = found.noticed();
    let check = Check::warn(
        "port.mac",
        format!("frames from MAC {} are dropped, because {why}{noticed}", found.mac),
        "a MAC that a record has on this port",
        "Give the NIC in the record the MAC that the guest uses, or have the guest use the NIC's",
    );
    check.of(&found.port)
}

/// Checks for frames lost at the hub's veth. A frame passes the veth's ring first, and then the ring of the AF_XDP
/// socket. The veth's ring is shorter, so it fills first.
fn ring(node: &NodeFacts) -> Option<Check> {
    // A device that is down loses them too, and its check says so.
    (node.veth_full > 0 && node.hub_down.is_empty()).then(|| {
        Check::warn(
            "hub.ring",
            format!(
                "{} lost because the ring of the hub's veth was full, or because its other end was down",
                lost(node.veth_full, "steered frame")
            ),
            "no lost frames",
            "If the number grows, give the agent more `workers` or more CPU time, or lower the `limits` of guests that flood \
             the agent",
        )
    })
}

fn lost(count: u64, what: &str) -> String {
    format!("{} {}", counted(count, what), if count == 1 { "was" } else { "were" })
}

/// Checks for lost frames of guests in other network namespaces. If XDP does not steer such a guest, its frames reach
/// the agent through the hub's BPF ring buffer. Frames are lost if the guest sends more than the agent reads.
fn namespaces(node: &NodeFacts) -> Option<Check> {
    (node.ring_full > 0).then(|| {
        Check::warn(
            "hub.namespaces",
            format!(
                "{} lost in the full BPF ring buffer of the hub, sent by guests in other namespaces",
                lost(node.ring_full, "frame")
            ),
            "no lost frames",
            "Set `steer: auto`, which steers busy guests by XDP. If that mode is set, give the agent more `workers` or \
             more CPU time",
        )
    })
}

fn addresses(node: &NodeFacts, guards_all: bool) -> Vec<Check> {
    let name = "address";
    let uses = match &node.addresses {
        Ok(uses) => uses,
        Err(failure) => {
            return vec![Check::warn(
                name,
                failure.text.clone(),
                "the routes and neighbours of the node",
                "Solve this error",
            )];
        }
    };
    let mut checks: Vec<_> = uses.iter().filter_map(|it| address(it, guards_all)).collect();
    if checks.is_empty() {
        let found = format!("the node itself uses none of the served addresses ({} checked)", uses.len());
        checks.push(Check::ok(name, found));
    }
    checks
}

/// Checks whether the node itself uses a served address. Guests on ports always reach the agent at this address. Other
/// guests may reach another service there.
fn address(it: &AddressUse, guards_all: bool) -> Option<Check> {
    let found = if it.own {
        "the node itself has this address".to_owned()
    } else if let Some(bits) = it.routed.filter(|bits| *bits > 0 && !is_link_local(it.address, *bits)) {
        let by = it.neighbour.as_ref().map_or_else(String::new, |mac| format!(", and {mac} answers there"));
        format!("the node has a route to this address (prefix /{bits}){by}")
    } else if let Some(mac) = &it.neighbour {
        format!("the node has a neighbour with this address ({mac})")
    } else {
        return None;
    };
    if guards_all {
        let found = format!("{found}; `guard: all` keeps the service there from every guest");
        return Some(Check::ok("address", found).of(it.address));
    }
    let check = Check::warn(
        "address",
        format!("{found}, probably for another metadata service"),
        "no other use of the address",
        "No action is needed for guests on ports, which never reach that service. To block that service for guests \
         without a record too, set `guard: all`",
    );
    Some(check.of(it.address))
}

/// True for the route of all link-local addresses, which every interface with IPv6 has, and with zeroconf also IPv4
/// (RFC 4291 section 2.5.6, RFC 3927 section 2.1). It leads to no service.
fn is_link_local(address: IpAddr, bits: u8) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local() && bits == 16,
        IpAddr::V6(address) => address.is_unicast_link_local() && (10..=64).contains(&bits),
    }
}

fn bridge(node: &NodeFacts) -> Option<Check> {
    let value = node.bridge_filter.as_ref().filter(|value| *value != "0")?;
    let found = format!(
        "bridge-nf-call-iptables is {value}, which does not affect steered frames, because they pass no bridge"
    );
    Some(Check::ok("bridge", found))
}

fn clock(unix_time: u64) -> Check {
    let name = "clock";
    if unix_time >= EARLIEST {
        return Check::ok(name, "the clock shows 2026 or later");
    }
    Check::warn(
        name,
        format!("the clock shows {unix_time} seconds since 1970, which is before 2026"),
        "the current time",
        "Set the clock, and start time synchronization before the agent, because the clock decides when tokens expire",
    )
}

fn workers(workers: usize, cpus: usize) -> Check {
    let name = "workers";
    let found = format!("{} on {}", count(workers, "worker"), count(cpus, "processor"));
    if workers <= cpus {
        return Check::ok(name, found);
    }
    Check::warn(name, found, "at most one worker per processor", format!("Set `workers: {cpus}`"))
}
