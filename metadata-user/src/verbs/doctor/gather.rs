//! Collects the facts about the node, the configuration and this process.

mod identity;
mod libvirt;
mod ports;
mod process;
mod room;

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;

use super::facts::{ConfigFacts, Facts, Kernel, NodeFacts, ProcessFacts};
use crate::config::Config;
use metadata_common::port::PortName;
use metadata_datapath::afxdp::{Queues, SocketConfig};
use metadata_feed::state::token_file;
use metadata_steer::{ClosedTaps, SteerConfig, hub_queues, probe};
pub(super) use process::process;

/// Collects all facts for a configuration.
/// `process` was collected first, because the rehearsal raises the soft limit on open files.
pub(super) fn facts(config: &Config, process: ProcessFacts) -> Facts {
    let (records, mut ports) = ports::named(config);
    let (node, served) = node(config);
    ports.extend(served);
    Facts {
        wanted: wanted(config),
        process,
        pins: config.pins.as_deref().map(room::pins),
        directories: room::directories(config),
        records,
        node,
        ports: ports::look(ports),
        sources: config.sources().iter().flat_map(|source| source.preflight()).collect(),
        exposed: room::exposed(config),
        identity: config.identity.as_ref().map(identity::identity),
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
    let text = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
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
    let filter = std::fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables");
    let facts = NodeFacts {
        hub_down: probe::hub_devices_down(&config.hub, config.workers).unwrap_or_default(),
        silence,
        datasources: status.as_ref().map(|status| status.datasources.clone()),
        libvirt: libvirt::too_old(),
        attachments: status.as_ref().map(|status| status.attachments.clone()),
        // No file's name has a slash.
        refused: status
            .iter()
            .flat_map(|status| &status.refused)
            .filter(|one| one.record.contains('/'))
            .cloned()
            .collect(),
        conflicts: status.as_ref().map_or_else(Vec::new, |status| status.conflicts.clone()),
        mac_mismatches: status.map_or_else(Vec::new, |status| status.mac_mismatches),
        hub: probe::hub_devices(&config.hub, config.workers),
        veth_full: probe::veth_full(&config.hub, config.workers).unwrap_or_default(),
        ring_full: config.pins.as_deref().map_or(0, probe::ring_full),
        agent,
        stale_socket,
        addresses: probe::address_uses(&config.addresses),
        bridge_filter: filter.ok().map(|text| text.trim().to_owned()),
    };
    (facts, served)
}
