//! Collects the facts about the node, the configuration and this process.

mod libvirt;
mod ports;
mod room;

use metadata_common::port::PortName;
use metadata_control::status::AgentStatus;
use metadata_datapath::afxdp::{Queues, SocketConfig};
use metadata_feed::state::token_file;
use metadata_signer::documents::OwnCertificate;
use metadata_signer::{KeyDirectory, Rotation};
use metadata_steer::{ClosedTaps, SteerConfig, hub_queues, probe};
use rustix::process::{Resource, geteuid, getrlimit};
use std::fs;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::SystemTime;

use super::facts::{
    Capabilities, ConfigFacts, Facts, IdentityKeyFacts, IssuerFacts, Kernel, NodeFacts, ProcessFacts,
    Resources,
};
use crate::config::{Config, IdentityConfig};

/// Collects all facts for a configuration and its file.
/// `process` was collected first, because the rehearsal raises the soft limit on open files.
pub(super) fn facts(config: &Config, file: Option<&Path>, process: ProcessFacts) -> Facts {
    let (records, mut ports) = ports::named(config);
    let (node, served) = node(config);
    ports.extend(served);
    Facts {
        wanted: wanted(config),
        process,
        pins: config.pins.as_deref().map(room::pins),
        directories: room::directories(config),
        config_file: file.map(room::directory),
        records,
        node,
        ports: ports::look(ports),
        sources: config.sources().iter().flat_map(|source| source.preflight()).collect(),
        exposed: room::exposed(config),
        identity: config.identity.as_ref().map(identity),
        kernel: kernel(config),
    }
}

fn wanted(config: &Config) -> ConfigFacts {
    ConfigFacts {
        steer: config.steer,
        hub: config.hub.clone(),
        workers: config.workers,
        pinned_memory: Queues::memory(hub_queues(), &SocketConfig::default()),
        feeds: config.platforms(),
        guards_all: config.guard == ClosedTaps::All,
        missing_token_key: config
            .token_key
            .clone()
            .filter(|path| matches!(token_file::given(path), Ok(None))),
    }
}

fn kernel(config: &Config) -> Kernel {
    let text = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let tun = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun");
    Kernel {
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        features: probe::features(),
        missing_helpers: probe::missing_helpers(),
        rehearsal: probe::rehearse(&SteerConfig {
            hub: config.hub.clone(),
            served: config.addresses.clone(),
            arp_only: config.next_hops(),
            mode: config.steer,
            ..SteerConfig::default()
        }),
        lockdown: text("/sys/kernel/security/lockdown"),
        unprivileged_bpf: text("/proc/sys/kernel/unprivileged_bpf_disabled"),
        tun: tun.map(drop).map_err(Into::into),
    }
}

/// The facts about the node, and the ports of the running agent's records, whatever their source.
fn node(config: &Config) -> (NodeFacts, Vec<PortName>) {
    let (agent, stale_socket) = room::agent(&config.run);
    let (status, silence) = match agent.map(|_| room::status(&config.run)) {
        Some(Ok(status)) => (Some(status), None),
        Some(Err(silence)) => (None, Some(silence)),
        None => (None, None),
    };
    let served = status.as_ref().map(ports::served).unwrap_or_default();
    let filter = fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables");
    let facts = NodeFacts {
        hub_down: probe::hub_devices_down(&config.hub, config.workers).unwrap_or_default(),
        silence,
        datasources: status.as_ref().map(|status| status.datasources.clone()),
        libvirt: libvirt::too_old(),
        attachments: status.as_ref().map(|status| status.attachments.clone()),
        port_errors: status.as_ref().map(ports::in_error).unwrap_or_default(),
        // No file's name has a slash.
        refused: status
            .iter()
            .flat_map(|status| &status.refused)
            .filter(|one| one.record.contains('/'))
            .cloned()
            .collect(),
        conflicts: status.as_ref().map_or_else(Vec::new, |status| status.conflicts.clone()),
        problems: status.iter().flat_map(AgentStatus::other_problems).cloned().collect(),
        mac_mismatches: status.map_or_else(Vec::new, |status| status.mac_mismatches),
        hub: probe::hub_devices(&config.hub, config.workers),
        veth_full: probe::veth_full(&config.hub, config.workers).unwrap_or_default(),
        ring_full: config.pins.as_deref().map_or(0, probe::ring_full),
        agent: agent.map(|agent| agent.pid),
        agent_user: agent.and_then(|agent| agent.user),
        stale_socket,
        addresses: probe::address_uses(&config.addresses),
        bridge_filter: filter.ok().map(|text| text.trim().to_owned()),
    };
    (facts, served)
}

/// Seconds of a day.
const DAY: u64 = 86_400;

fn identity(config: &IdentityConfig) -> IssuerFacts {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let certificate = config.certificate.clone().map(|files| {
        let own = OwnCertificate::read(files).map_err(|error| error.to_string())?;
        Ok(own.loaded().until().saturating_sub(now) / DAY)
    });
    IssuerFacts {
        directory: config.keys.clone(),
        algorithm: config.algorithm,
        keys: keys(config),
        certificate,
    }
}

fn keys(config: &IdentityConfig) -> Result<IdentityKeyFacts, String> {
    let made_here = config.rotate_days > 0;
    if made_here && !config.keys.exists() {
        return Ok(IdentityKeyFacts { count: 0, skipped: Vec::new(), made_here });
    }
    // The ages of keys decide nothing here.
    let rotation = Rotation { publish_for: 0, after: None };
    let mut directory = KeyDirectory::new(config.keys.clone(), config.algorithm, rotation);
    let skipped = directory.look().map_err(|error| error.to_string())?;
    let skipped = skipped.iter().map(ToString::to_string).collect();
    Ok(IdentityKeyFacts { count: directory.keys().len(), skipped, made_here })
}

/// The fields of `/proc/self/uid_map` in the initial user namespace: the first user ID inside, the first user ID
/// outside, and the number of user IDs.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

pub(crate) fn process() -> ProcessFacts {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ProcessFacts {
        uid: geteuid().as_raw(),
        capabilities: capabilities(&status),
        seccomp: field(&status, "Seccomp").and_then(|value| value.parse().ok()),
        initial_user_namespace: fs::read_to_string("/proc/self/uid_map")
            .map_or(true, |map| map.split_whitespace().eq(ALL_USERS)),
        resources: Resources {
            open_files: getrlimit(Resource::Nofile).maximum,
            locked_memory: getrlimit(Resource::Memlock).current,
        },
        cpus: std::thread::available_parallelism().map_or(1, Into::into),
        unix_time: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    }
}

fn capabilities(status: &str) -> Option<Capabilities> {
    let set = |name| u64::from_str_radix(field(status, name)?, 16).ok();
    Some(Capabilities { effective: set("CapEff")?, permitted: set("CapPrm")?, bounding: set("CapBnd")? })
}

/// Returns the value of a line `NAME: VALUE` in `/proc/self/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::{Capabilities, capabilities};

    #[test]
    fn the_capability_sets_are_read_from_the_kernels_text() {
        let status = "Name:\tx\nCapInh:\t0000000000000000\nCapPrm:\t00000000000000ff\n\
                      CapEff:\t0000000000001000\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n";
        let sets = Capabilities { effective: 1 << 12, permitted: 0xff, bounding: 0x1ff_ffff_ffff };
        assert_eq!(capabilities(status), Some(sets));
        assert_eq!(capabilities("Name:\tx\n"), None);
    }
}
