//! Checks the capabilities, limits and restrictions of this process.

use super::super::{Check, Facts, ProcessFacts};
use super::count;

const DAC_READ_SEARCH: u32 = 2;
const NET_ADMIN: u32 = 12;
const NET_RAW: u32 = 13;
const IPC_LOCK: u32 = 14;
const SYS_PTRACE: u32 = 19;
const SYS_ADMIN: u32 = 21;
const PERFMON: u32 = 38;
const BPF: u32 = 39;

/// File descriptors that an agent uses apart from its workers, ports and other network namespaces.
const FILES: u64 = 64;
/// File descriptors per worker, for its hub, programs and AF_XDP sockets.
const FILES_OF_A_WORKER: u64 = 16;
/// File descriptors per port: the eBPF links of the XDP program and of the classifier.
const FILES_OF_A_PORT: u64 = 2;
/// File descriptors per network namespace with ports, except the agent's own: two for programs, one to watch the
/// devices, one in reserve.
const FILES_OF_A_NAMESPACE: u64 = 4;
/// Recommended minimum for the limit on open files. With a lower limit, the agent could not attach many more ports.
const FILES_TO_GROW: u64 = 4_096;

/// A capability that the agent needs.
struct NeededCapability {
    /// The name of the check.
    check: &'static str,
    /// The name of the capability.
    name: &'static str,
    /// The number of the capability.
    number: u32,
    /// The number of another capability that includes this one, if there is one.
    within: Option<u32>,
    /// What the agent needs the capability for.
    what_for: &'static str,
}

/// The capabilities that the agent needs on every node.
const ALWAYS: [NeededCapability; 5] = [
    NeededCapability {
        check: "capability.bpf",
        name: "CAP_BPF",
        number: BPF,
        within: Some(SYS_ADMIN),
        what_for: "eBPF maps and programs",
    },
    NeededCapability {
        check: "capability.perfmon",
        name: "CAP_PERFMON",
        number: PERFMON,
        within: Some(SYS_ADMIN),
        what_for: "eBPF programs that compare pointers",
    },
    NeededCapability {
        check: "capability.net_admin",
        name: "CAP_NET_ADMIN",
        number: NET_ADMIN,
        within: None,
        what_for: "XDP programs and the hub's devices",
    },
    NeededCapability {
        check: "capability.net_raw",
        name: "CAP_NET_RAW",
        number: NET_RAW,
        within: None,
        what_for: "the AF_XDP socket",
    },
    NeededCapability {
        check: "capability.sys_admin",
        name: "CAP_SYS_ADMIN",
        number: SYS_ADMIN,
        within: None,
        what_for: "a private bpffs, and ports in other namespaces",
    },
];

/// The name of the check that this process is like the agent's. If it fails, no other check was made.
pub(crate) const USER: &str = "user";

/// Checks that this process is like the agent's: root's, or with capabilities of the agent. Anything else that an
/// ordinary user could be told would be about that user and not about the agent; `None` if there is no problem.
pub(crate) fn user(process: &ProcessFacts) -> Option<Check> {
    let sets = process.capabilities?;
    let is_agent = ALWAYS.iter().any(|needed| sets.effective & (1 << needed.number) != 0);
    (process.uid != 0 && !is_agent).then(|| {
        Check::fail(
            USER,
            format!("this is user {}, who has none of the agent's privileges; nothing else was checked", process.uid),
            "the agent's user and privileges",
            "Run as root: `sudo xdp-imds doctor`, or where the agent runs, for example with `kubectl exec` in its pod",
        )
    })
}

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let ProcessFacts { capabilities, .. } = &facts.process;
    let mut checks = Vec::new();
    if capabilities.is_none() {
        let remedy = "Mount /proc. Without it, only the kernel's errors show which capability is missing";
        checks.push(Check::warn(
            "capability",
            "/proc/self/status cannot be read",
            "the capability sets of this process",
            remedy,
        ));
    } else {
        checks.extend(ALWAYS.iter().map(|needed| always(facts, needed)));
        checks.extend([ipc_lock(facts), sys_ptrace(facts), dac_read_search(facts)]);
    }
    checks.extend([user_namespace(&facts.process), seccomp(&facts.process), open_files(facts)]);
    checks
}

/// True if the process lacks a capability that the agent needs on every node.
pub(super) fn is_missing_any(facts: &Facts) -> bool {
    ALWAYS
        .iter()
        .any(|needed| !has(facts, needed.number) && !needed.within.is_some_and(|other| has(facts, other)))
}

/// True if the process has this capability, or if its capability sets are unknown.
fn has(facts: &Facts, number: u32) -> bool {
    facts.process.capabilities.is_none_or(|sets| sets.effective & (1 << number) != 0)
}

fn always(facts: &Facts, needed: &NeededCapability) -> Check {
    let NeededCapability { check, name, number, within, what_for } = *needed;
    if within.is_some_and(|other| has(facts, other)) {
        Check::ok(
            check,
            format!("CAP_SYS_ADMIN, which the agent needs anyway, includes {name}, for {what_for}"),
        )
    } else if has(facts, number) {
        Check::ok(check, format!("{name} is effective; the agent needs it for {what_for}"))
    } else {
        missing(facts, check, name, number, what_for)
    }
}

/// Returns the check of a missing capability. The remedy depends on which capability sets lack it.
fn missing(facts: &Facts, check: &'static str, name: &str, number: u32, what_for: &str) -> Check {
    let sets = facts.process.capabilities.unwrap_or_default();
    let bit = 1 << number;
    let plain = name.trim_start_matches("CAP_");
    let (found, remedy) = if sets.permitted & bit != 0 {
        (
            "is permitted but not effective",
            "Keep the capability effective in the program that starts the agent".to_owned(),
        )
    } else if sets.bounding & bit != 0 {
        (
            "is missing",
            format!(
                "Run as root, or add the capability: systemd AmbientCapabilities={name}, \
                 Kubernetes capabilities.add: [{plain}]"
            ),
        )
    } else {
        (
            "is missing, and the bounding set lacks it too",
            format!(
                "Add the capability where the bounding set is reduced: systemd CapabilityBoundingSet={name}, \
                 Kubernetes capabilities.add: [{plain}], docker --cap-add {plain}"
            ),
        )
    };
    Check::fail(check, format!("{name} {found}"), format!("this capability, for {what_for}"), remedy)
}

/// Checks CAP_IPC_LOCK. AF_XDP sockets lock the memory of their frames. Without the capability, this memory counts
/// against the limit on locked memory.
fn ipc_lock(facts: &Facts) -> Check {
    let (check, name) = ("capability.ipc_lock", "CAP_IPC_LOCK");
    let needed = facts.wanted.locked_memory;
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if has(facts, IPC_LOCK) {
        return Check::ok(
            check,
            format!("{name} is effective; the agent locks {} MiB of memory for frames", mib(needed)),
        );
    }
    match facts.process.resources.locked_memory {
        Some(limit) if limit < needed => {
            let what_for = format!(
                "{} MiB of locked memory for frames, because RLIMIT_MEMLOCK allows only {} KiB",
                mib(needed),
                limit >> 10
            );
            let check = missing(facts, check, name, IPC_LOCK, &what_for);
            let remedy = check
                .remedy
                .map(|remedy| format!("{remedy}. Alternative: raise the limit (systemd LimitMEMLOCK=)"));
            Check { remedy, ..check }
        }
        _ => Check::ok(
            check,
            format!("{name} is not needed, because RLIMIT_MEMLOCK allows the {} MiB for frames", mib(needed)),
        ),
    }
}

/// Checks CAP_SYS_PTRACE. The agent needs it to open `/proc/PID/ns/net` of another user's process.
fn sys_ptrace(facts: &Facts) -> Check {
    let (check, name) = ("capability.sys_ptrace", "CAP_SYS_PTRACE");
    let by_process = |name: &metadata_common::port::PortName| {
        name.netns.as_deref().is_some_and(|netns| netns.starts_with("/proc/"))
    };
    let ports = facts.ports.iter().filter(|port| by_process(&port.name));
    let refused = ports.clone().any(|port| matches!(&port.device, Err(failure) if failure.is_refusal()));
    match (has(facts, SYS_PTRACE), ports.count()) {
        (true, _) => Check::ok(
            check,
            format!("{name} is effective; the agent needs it to enter namespaces of other users' processes"),
        ),
        (false, 0) => Check::ok(
            check,
            format!("{name} is missing but not needed, because no port names a namespace in /proc"),
        ),
        (false, _) if refused => {
            missing(facts, check, name, SYS_PTRACE, "namespaces of other users' processes")
        }
        (false, number) => Check::warn(
            check,
            format!(
                "{name} is missing, but the kernel did not refuse access to the namespaces of {}",
                count(number, "port")
            ),
            "this capability, for namespaces of other users' processes",
            "Add the capability if the process of such a namespace (/proc/PID) can run as another user",
        ),
    }
}

/// Checks CAP_DAC_READ_SEARCH. The agent needs it to read records for which its user lacks permission.
fn dac_read_search(facts: &Facts) -> Check {
    let (check, name) = ("capability.dac_read_search", "CAP_DAC_READ_SEARCH");
    let unreadable = facts.records.as_ref().and_then(|records| records.unreadable.as_ref());
    let refused = facts.directories.iter().any(|(what, directory)| {
        *what == "records" && matches!(&directory.found, Err(failure) if failure.is_refusal())
    });
    match unreadable {
        _ if has(facts, DAC_READ_SEARCH) => {
            Check::ok(check, format!("{name} is effective; the agent can read records of other users"))
        }
        None if !refused => {
            Check::ok(check, format!("{name} is missing but not needed, because the records can be read"))
        }
        found => {
            let which = found.map_or("the records' directory", |name| name.as_str());
            let lacking = missing(
                facts,
                check,
                name,
                DAC_READ_SEARCH,
                &format!("{which}, which belongs to another user"),
            );
            let remedy = lacking.remedy.map(|remedy| {
                format!("Let the agent's user read the records (chgrp, chmod 0640). Alternative: {remedy}")
            });
            Check { remedy, ..lacking }
        }
    }
}

fn user_namespace(process: &ProcessFacts) -> Check {
    let name = "user_namespace";
    if process.initial_user_namespace {
        return Check::ok(name, "this process is in the node's initial user namespace");
    }
    Check::fail(
        name,
        "this process is in another user namespace, where capabilities do not permit BPF",
        "the node's initial user namespace",
        "Run the agent in the initial user namespace: not in a rootless container, and in Kubernetes with \
         hostUsers: true",
    )
}

fn seccomp(process: &ProcessFacts) -> Check {
    let name = "seccomp";
    match process.seccomp {
        None | Some(0) => Check::ok(name, "no seccomp filter was found"),
        Some(2) => Check::ok(
            name,
            "a seccomp filter is active; the checks of the kernel show whether it forbids bpf(2) or AF_XDP",
        ),
        Some(mode) => Check::fail(
            name,
            format!("the seccomp mode is {mode}, which allows almost no system calls"),
            "no seccomp filter, or a filter that allows bpf(2), setns(2) and AF_XDP",
            "Run the agent with another seccomp profile (Kubernetes seccompProfile: Unconfined, \
             docker --security-opt seccomp=unconfined)",
        ),
    }
}

fn open_files(facts: &Facts) -> Check {
    let name = "limit.open_files";
    let Some(limit) = facts.process.resources.open_files else {
        return Check::ok(name, "no limit on open files");
    };
    let namespaces: std::collections::BTreeSet<_> =
        facts.ports.iter().filter_map(|port| port.name.netns.as_deref()).collect();
    let (ports, namespaces) = (facts.ports.len(), namespaces.len());
    let needed = FILES
        + FILES_OF_A_WORKER * u64::from(facts.wanted.workers)
        + FILES_OF_A_PORT * ports as u64
        + FILES_OF_A_NAMESPACE * namespaces as u64;
    let found = format!("the hard limit of RLIMIT_NOFILE is {limit}");
    let remedy = "Raise the limit: systemd LimitNOFILE=65536, docker --ulimit nofile=65536, ulimit -Hn";
    if limit < needed {
        let expected = format!(
            "at least {needed} for {} in {}",
            count(ports, "port"),
            count(namespaces + 1, "namespace")
        );
        Check::fail(name, found, expected, remedy)
    } else if limit < FILES_TO_GROW.max(needed) {
        Check::warn(
            name,
            found,
            format!("at least {FILES_TO_GROW}, so that the agent can attach more ports"),
            remedy,
        )
    } else {
        Check::ok(name, format!("{found}; the agent needs {needed}"))
    }
}
