//! The node: other agents, the hub's names, use of the addresses, clock and processors.

use super::super::{Check, Facts, Node};
use super::count;
use metadata_steer::probe::AddressUse;

/// 2026-01-01. A correct clock shows a later time.
const EARLIEST: u64 = 1_767_225_600;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Facts { node, wanted, process, .. } = facts;
    let mut checks = vec![agent(node), hub(node, &wanted.hub)];
    checks.extend(ring(node));
    checks.extend(namespaces(node));
    checks.extend(addresses(node));
    checks.extend(bridge(node));
    checks.push(clock(process.unix_time));
    checks.push(workers(wanted.workers as usize, process.cpus));
    checks
}

fn agent(node: &Node) -> Check {
    let name = "agent";
    match (node.agent, &node.stale_socket) {
        (Some(pid), _) => Check::warn(
            name,
            format!("an agent (process {pid}) runs with this run directory"),
            "no agent, before a start",
            "No action is needed to check a running agent. To start another one, stop it, use `serve --takeover`, or give the \
             new one its own --run, --pins and --hub",
        ),
        (None, Some(path)) => {
            let found = format!("no agent; {} of a previous agent will be replaced", path.display());
            Check::ok(name, found)
        }
        (None, None) => Check::ok(name, "no agent runs with this run directory"),
    }
}

fn hub(node: &Node, prefix: &str) -> Check {
    let name = "hub";
    let devices = match &node.hub {
        Ok(devices) => devices,
        Err(failure) => {
            return Check::warn(name, failure.text.clone(), "a list of the hub's devices", "See the error");
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
            format!("{} has the name of a device of the hub", listed(&foreign)),
            format!("names that begin with {prefix}- to be free"),
            "Rename the device, or choose another prefix with --hub or `hub:`",
        );
    }
    match (taps.is_empty(), devices.is_empty(), node.agent) {
        (true, true, _) => Check::ok(name, format!("names that begin with {prefix}- are free")),
        (true, false, _) => {
            let all: Vec<_> = devices.iter().collect();
            Check::ok(name, format!("{}, left by a killed agent, will be replaced", listed(&all)))
        }
        (false, _, Some(_)) => Check::ok(name, format!("{} of the running agent", listed(&taps))),
        (false, _, None) => Check::fail(
            name,
            format!("{} in use: another agent with another run directory has this prefix", listed(&taps)),
            format!("names that begin with {prefix}- to be free"),
            "Stop that agent, or give this one another --hub, --run and --pins",
        ),
    }
}

/// Checks for frames lost at the hub's veth. They pass the veth's ring before the AF_XDP ring, and the veth's ring is
/// shorter.
fn ring(node: &Node) -> Option<Check> {
    (node.veth_full > 0).then(|| {
        Check::warn(
            "hub.ring",
            format!(
                "{} steered frames were lost because the ring of the hub's veth was full",
                node.veth_full
            ),
            "none",
            "Give the agent more `workers` or more CPU, or lower `limits` for guests that flood",
        )
    })
}

/// Checks for lost frames of guests in other namespaces. Frames are lost if such guests send many requests while XDP
/// does not steer them.
fn namespaces(node: &Node) -> Option<Check> {
    (node.ring_full > 0).then(|| {
        Check::warn(
            "hub.namespaces",
            format!(
                "{} frames of guests in other namespaces were lost because the hub's ring was full",
                node.ring_full
            ),
            "none",
            "Set `steer: auto`, which steers busy guests by XDP; otherwise give the agent more `workers` or more CPU",
        )
    })
}

fn addresses(node: &Node) -> Vec<Check> {
    let name = "address";
    let uses = match &node.addresses {
        Ok(uses) => uses,
        Err(failure) => {
            return vec![Check::warn(
                name,
                failure.text.clone(),
                "the routes and neighbours of the node",
                "See the error",
            )];
        }
    };
    let mut checks: Vec<_> = uses.iter().filter_map(address).collect();
    if checks.is_empty() {
        let found = format!("the node itself uses none of the {} served addresses", uses.len());
        checks.push(Check::ok(name, found));
    }
    checks
}

/// Checks whether the node itself uses a served address. Guests on ports always reach the agent. Other guests may reach
/// another service at this address.
fn address(it: &AddressUse) -> Option<Check> {
    let found = if it.own {
        "is an address of the node itself".to_owned()
    } else if let Some(bits) = it.routed.filter(|bits| *bits > 0) {
        let by = it.neighbour.as_ref().map_or_else(String::new, |mac| format!(", where {mac} answers"));
        format!("has a route on the node (/{bits}){by}")
    } else if let Some(mac) = &it.neighbour {
        format!("has the neighbour {mac} on the link")
    } else {
        return None;
    };
    let check = Check::warn(
        "address",
        format!("{found}: another metadata service"),
        "no other use of the address",
        "Guests on ports never reach that service. Set `guard: all` to block it for guests without a record too",
    );
    Some(check.of(it.address))
}

fn bridge(node: &Node) -> Option<Check> {
    let value = node.bridge_filter.as_ref().filter(|value| *value != "0")?;
    let found = format!(
        "bridge-nf-call-iptables is {value}, which has no effect, because steered frames pass no bridge"
    );
    Some(Check::ok("bridge", found))
}

fn clock(unix_time: u64) -> Check {
    let name = "clock";
    if unix_time >= EARLIEST {
        return Check::ok(name, "the time is after the release of this version");
    }
    Check::warn(
        name,
        format!("{unix_time} seconds since 1970, before the release of this version"),
        "the time of day",
        "Set the clock, and start time synchronization before the agent, because tokens expire by the clock",
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
