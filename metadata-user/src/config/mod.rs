//! The configuration file and its defaults.
//!
//! Everything has a default; a file names only what differs. Command line options win over the file.
//!
//! ```yaml
//! records: /etc/xdp-imds/records.d
//! ports:
//! - {ifname: vnet0, mac: "52:54:00:12:34:56"}
//! - {ifname: tap0, netns: /proc/4242/ns/net}
//! addresses: [169.254.169.254, "fd00:ec2::254"]   # these, and none of the others served by default
//! limits: {frames_per_second: 10000, burst: 2048, connections_per_second: 200, connection_burst: 512}
//! metadata: {keys: 16, chars: 256}
//! api: {group: vmm}
//! audit: {to: /var/log/xdp-imds/audit.log, sample: 16, max_megabytes: 64, keep: 4}
//! ```
mod limits;
mod port;
mod read;
mod sections;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::Deserialize;

use metadata_base::addresses;
use metadata_base::run::DEFAULT_RUN;
use metadata_content::record;
#[cfg(feature = "kubevirt")]
use metadata_feed::kubevirt;
use metadata_feed::room;
use metadata_serve::audit::AuditConfig;
use metadata_steer::{Guarded, Limits, Mode};

pub use port::PortSpec;
pub use read::{ConfigError, workers};
pub use sections::{ApiConfig, MetadataLimits, Sandbox};

/// Where state is kept unless the configuration says otherwise.
pub const DEFAULT_STATE: &str = "/var/lib/xdp-imds";

/// Where links and maps are pinned unless the configuration says otherwise: below the bpffs that systemd mounts.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/xdp-imds";

/// What the agent runs with.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Directory of VM records, one file each. Default: none; must come from here or the command line, unless there is
    /// `api`.
    pub records: Option<PathBuf>,
    /// Registration of VMs at the control socket, which is there in any case. Named here, though it be empty (`{}`), it
    /// does without a directory of records.
    pub api: Option<ApiConfig>,
    /// Ports to own besides those that records name.
    pub ports: Vec<PortSpec>,
    /// Metadata addresses served on every port, at most [`metadata_common::maps::MAX_SERVED`] of a family. Default:
    /// [`addresses::ALL`], each with what asks there. A list here replaces the default, so that an address
    /// left out stays whoever's it is: frames for it pass untouched, which the kernel decides.
    pub addresses: Vec<IpAddr>,
    /// IPv4 addresses for which ARP is answered while IP sent to them passes: next hops that guests are told
    /// to reach a served address by. They count with `addresses`. Default (`None`):
    /// [`addresses::SCALEWAY_NEXT_HOP`] where [`addresses::SCALEWAY`] is served, else none.
    pub arp_only: Option<Vec<Ipv4Addr>>,
    /// What one port may send towards the service; enforced in the kernel.
    pub limits: Limits,
    /// Memory that all records may take, rendered, in octets or as text (`"512MiB"`), at least
    /// [`room::LEAST_OCTETS`]. Records beyond are refused. Default (`None`): what [`room::within`] leaves of the control
    /// group's memory limit, as it is when the configuration is read; [`room::DEFAULT_OCTETS`] without one.
    #[serde(deserialize_with = "read::octets_field")]
    pub record_memory: Option<usize>,
    /// How much a record's custom `metadata` may hold; records with more are refused.
    pub metadata: MetadataLimits,
    /// By which program ports are steered; `auto` by default, which `cargo xtask traffic` shows to cost guests
    /// least.
    pub steer: Mode,
    /// Which taps without a record are closed, so that nothing for a metadata address leaves them: `all`, in the agent's
    /// namespace and those it serves ports in, or `none` (default). Not for an agent that shares its namespace with
    /// another: it would close the other's taps.
    pub guard: Guarded,
    /// Prefix of the hub's device names, 1 to 11 octets; two agents in one namespace need two.
    pub hub: String,
    /// Where to serve Prometheus metrics; `None` (default) serves none.
    pub metrics: Option<SocketAddr>,
    /// Where requests are written down; nowhere by default.
    pub audit: AuditConfig,
    /// Directory of what outlives the agent: token keys, and what guests wrote. Made with mode 0700.
    /// `null` keeps nothing: tokens end with the agent, and one-shot passwords are given out again.
    pub state: Option<PathBuf>,
    /// Directory on a bpffs below which links and maps are pinned, so that ports stay closed and guests keep their slots
    /// while no agent runs. `null` pins nothing: when the agent ends, taps are as if there never was one. Two
    /// agents on a node need two.
    pub pins: Option<PathBuf>,
    /// Directory of sockets by which the running agent is reached. Made with mode 0700. Two agents on a node need two.
    pub run: PathBuf,
    /// How long an agent that is stopped serves what is going on, in seconds; 0 cuts all off at once. A second signal
    /// ends the wait.
    pub drain_seconds: u32,
    /// What to log, as `--log`, which wins; `None` is `info`.
    pub log: Option<String>,
    /// File with the token key of several nodes, made by `xdp-imds token-key` and looked after by others, so that tokens hold
    /// after a migration. Default: none; without it, or until it is there, the key in `state` counts.
    pub token_key: Option<PathBuf>,
    /// Age at which the token key is replaced, in days; tokens of the last one stay good until they expire.
    pub rotate_token_key_days: u32,
    /// How long a worker with nothing to do keeps polling before it sleeps, in microseconds. The kernel wakes it
    /// as fast as anybody, so this pays only for guests that ask again within that time, and costs them its CPU.
    pub spin_us: u32,
    /// Let the kernel answer what needs no memory on ports that are taps, so that user space sees little more
    /// than requests. `false` steers everything, which a capture on the hub then shows.
    pub answer_in_kernel: bool,
    /// Threads that answer, 1 to [`metadata_steer::HUBS_OF_A_SIDE`], each with a hub of its own, among which the guests are spread.
    #[serde(deserialize_with = "read::workers_field")]
    pub workers: u32,
    /// How VMs of KubeVirt are found and served; `None` (default) looks for none.
    #[cfg(feature = "kubevirt")]
    pub kubevirt: Option<kubevirt::Options>,
    /// Whether the agent gives up system calls and capabilities that serving does not need; `on` by default.
    pub sandbox: Sandbox,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            records: None,
            api: None,
            ports: Vec::new(),
            addresses: addresses::ALL.to_vec(),
            arp_only: None,
            limits: Limits::default(),
            steer: Mode::default(),
            record_memory: None,
            metadata: MetadataLimits::default(),
            guard: Guarded::default(),
            hub: "imds".into(),
            metrics: None,
            audit: AuditConfig::default(),
            state: Some(DEFAULT_STATE.into()),
            pins: Some(DEFAULT_PINS.into()),
            run: DEFAULT_RUN.into(),
            drain_seconds: 5,
            log: None,
            token_key: None,
            rotate_token_key_days: 30,
            spin_us: 0,
            answer_in_kernel: true,
            workers: 1,
            #[cfg(feature = "kubevirt")]
            kubevirt: None,
            sandbox: Sandbox::On,
        }
    }
}

impl Config {
    /// True when something in it can tell of VMs.
    #[must_use]
    pub fn has_records(&self) -> bool {
        #[cfg(feature = "kubevirt")]
        if self.kubevirt.is_some() {
            return true;
        }
        self.records.is_some() || self.api.is_some()
    }

    /// True where ports in other namespaces are to come: with KubeVirt each VM brings one.
    #[must_use]
    pub fn expects_namespaces(&self) -> bool {
        #[cfg(feature = "kubevirt")]
        return self.kubevirt.is_some();
        #[cfg(not(feature = "kubevirt"))]
        false
    }

    /// `api`, or its defaults.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        self.api.clone().unwrap_or_default()
    }

    /// Octets of memory for all records: `record_memory`, or what the control group leaves.
    #[must_use]
    pub fn record_octets(&self) -> usize {
        self.record_memory.unwrap_or_else(|| room::within(room::cgroup::memory_limit(), self.workers))
    }

    /// What a record may hold.
    #[must_use]
    pub fn record_limits(&self) -> record::Limits {
        let MetadataLimits { keys, chars } = self.metadata;
        record::Limits { metadata_keys: keys, metadata_chars: chars, ..record::Limits::DEFAULT }
    }

    /// The next hops for which ARP is answered: those configured, or what `addresses` calls for.
    #[must_use]
    pub fn next_hops(&self) -> Vec<Ipv4Addr> {
        match &self.arp_only {
            Some(configured) => configured.clone(),
            None if self.addresses.contains(&addresses::SCALEWAY.into()) => {
                vec![addresses::SCALEWAY_NEXT_HOP]
            }
            None => Vec::new(),
        }
    }
}
