//! The facts that the checks judge. They are plain data, so that tests can describe any node.

use std::collections::BTreeMap;
use std::path::PathBuf;

use metadata_common::port::PortName;
use metadata_control::status::{AttachmentStatus, MacMismatch, RefusedRecord};
use metadata_feed::check::Check;
use metadata_signer::Algorithm;
use metadata_steer::SteeringMode;
use metadata_steer::probe::{AddressUse, DeviceState, Feature, PinnedLink, ProbeError, ProbeResult, Search};

/// All facts about a node, collected for one configuration.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The part of the agent's configuration that the checks need.
    pub wanted: ConfigFacts,
    /// The kernel's version, features and settings.
    pub kernel: Kernel,
    /// This process. The checks assume that the agent has the same permissions and limits.
    pub process: ProcessFacts,
    /// The directory in which the agent pins eBPF links and maps; `None` if it pins nothing.
    pub pins: Option<PinFacts>,
    /// The agent's directories with their purposes: `records`, `state` and `run`.
    pub directories: Vec<(&'static str, Directory)>,
    /// The configuration file; `None` without one.
    pub config_file: Option<Directory>,
    /// The records in the directory of records; `None` if no such directory is configured.
    pub records: Option<RecordFacts>,
    /// Directories with parts of records that users may read who must not.
    pub exposed: Vec<ExposedFile>,
    /// Other agents, conflicts and losses on the node.
    pub node: NodeFacts,
    /// The ports that the configuration and the records name.
    pub ports: Vec<PortFacts>,
    /// What the configured sources of records need, each judged by itself.
    pub sources: Vec<Check>,
    /// What the issuer of identity tokens needs; `None` on a node without one.
    pub identity: Option<IssuerFacts>,
}

/// What the issuer of identity tokens needs.
#[derive(Clone, Debug)]
pub struct IssuerFacts {
    /// The directory of keys.
    pub directory: PathBuf,
    /// The configured algorithm.
    pub algorithm: Algorithm,
    /// The keys that the signer can use, or the reason why there are none.
    pub keys: Result<IdentityKeyFacts, String>,
    /// Days until the certificate for documents expires, `None` if it has expired, or the reason why it cannot be used;
    /// `None` without one.
    pub certificate: Option<Result<Option<u64>, String>>,
}

/// The keys of identity tokens in their directory.
#[derive(Clone, Debug)]
pub struct IdentityKeyFacts {
    /// Number of keys that can be used.
    pub count: usize,
    /// Why other files are not keys.
    pub skipped: Vec<String>,
    /// Whether the signer makes keys itself.
    pub made_here: bool,
}

/// The part of the configuration that the checks need.
#[derive(Clone, Debug)]
pub struct ConfigFacts {
    /// The kind of eBPF program that redirects frames from ports to the agent.
    pub steer: SteeringMode,
    /// The prefix of the names of the hub's devices. Ports exchange frames with the agent through these devices.
    pub hub: String,
    /// Number of worker threads. Each has its own hub.
    pub workers: u32,
    /// Memory that the agent locks for frames, in bytes.
    pub locked_memory: u64,
    /// Names of the configured sources of records, except the directory of records.
    pub feeds: Vec<&'static str>,
    /// Whether taps without a record are closed too (`guard: all`).
    pub guards_all: bool,
    /// The configured file of token keys, if it does not exist.
    pub missing_token_key: Option<PathBuf>,
}

/// The kernel's version, features and settings.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The release that uname(2) returns, such as `6.1.0-13-amd64`.
    pub release: String,
    /// Whether the kernel has each feature. An error means that the test had no result.
    pub features: Vec<(Feature, ProbeResult)>,
    /// Names of functions that the eBPF programs call and the kernel lacks (bpf-helpers(7)).
    pub missing_helpers: Result<Vec<&'static str>, ProbeError>,
    /// The result of the rehearsal, which runs the first steps of serving in a temporary network namespace.
    pub rehearsal: Result<(), ProbeError>,
    /// The content of `/sys/kernel/security/lockdown`, such as `[none] integrity confidentiality`. The kernel encloses
    /// the current mode in brackets. `None` if the file cannot be read.
    pub lockdown: Option<String>,
    /// The sysctl `kernel.unprivileged_bpf_disabled`; `None` if it cannot be read.
    pub unprivileged_bpf: Option<String>,
    /// The result of opening `/dev/net/tun`.
    pub tun: Result<(), ProbeError>,
}

/// Capability sets (capabilities(7)). Bit n of a set is the capability with number n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// The capabilities that the kernel uses for permission checks.
    pub effective: u64,
    /// The capabilities that the process can make effective.
    pub permitted: u64,
    /// The capabilities that the process can gain by execve(2).
    pub bounding: u64,
}

/// The permissions and limits of this process.
#[derive(Clone, Debug)]
pub struct ProcessFacts {
    /// The effective user ID.
    pub uid: u32,
    /// The capability sets; `None` if `/proc` cannot be read.
    pub capabilities: Option<Capabilities>,
    /// The seccomp mode: 0 none, 1 strict, 2 filter. `None` if it is unknown.
    pub seccomp: Option<u32>,
    /// True if the process is in the node's initial user namespace, or if its user namespace is unknown.
    pub initial_user_namespace: bool,
    /// The resource limits.
    pub resources: Resources,
    /// Number of processors that the process may run on.
    pub cpus: usize,
    /// The time of the system clock, in seconds since 1970-01-01 UTC.
    pub unix_time: u64,
}

/// Resource limits of a process (getrlimit(2)). `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The hard limit on open files. The agent raises its soft limit to this value.
    pub open_files: Option<u64>,
    /// The soft limit on locked memory, in bytes.
    pub locked_memory: Option<u64>,
}

/// The file system that contains a path. If the path does not exist, the file system that would contain it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The path if it exists, otherwise its nearest ancestor that exists.
    pub at: PathBuf,
    /// True for a bpffs, the file system for pinned eBPF objects.
    pub bpf: bool,
    /// True if it is mounted read-only.
    pub read_only: bool,
    /// Free space, in bytes.
    pub free: u64,
}

/// The directory in which the agent pins eBPF links and maps.
#[derive(Clone, Debug)]
pub struct PinFacts {
    /// The configured path.
    pub path: PathBuf,
    /// The user ID of its owner; `None` if it does not exist, or if its owner cannot be found out.
    pub owner: Option<u32>,
    /// The file system of the path.
    pub file_system: Result<FileSystem, ProbeError>,
    /// The names of the first entries in the directory. Each name is a version of the layout of pins, such as `v1`.
    pub versions: Vec<String>,
    /// The links that are pinned in this agent's version of the layout.
    pub links: Result<Vec<PinnedLink>, ProbeError>,
    /// An agent that does not listen in the run directory runs with these pins. False if that is unknown.
    pub are_of_another: bool,
}

/// A configured directory.
#[derive(Clone, Debug)]
pub struct Directory {
    /// The configured path.
    pub path: PathBuf,
    /// The properties of the path; `None` if it does not exist.
    pub found: Result<Option<PathFacts>, ProbeError>,
    /// Its file system.
    pub file_system: Result<FileSystem, ProbeError>,
}

/// The properties of a path that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathFacts {
    /// True for a directory.
    pub directory: bool,
    /// The mode without the file type.
    pub mode: u32,
    /// The user ID of the owner.
    pub owner: u32,
}

/// A summary of the directory of records.
#[derive(Clone, Debug, Default)]
pub struct RecordFacts {
    /// Number of records, valid and invalid.
    pub count: usize,
    /// Number of valid records by `serve.smbios`.
    pub stamps: BTreeMap<&'static str, usize>,
    /// The names and errors of the first few invalid records.
    pub refused: Vec<(String, String)>,
    /// Number of invalid records.
    pub refused_count: usize,
    /// Records that the agent does not serve because another claims the same MAC on the same port: the first few, a
    /// sentence each.
    pub conflicts: Vec<String>,
    /// Pairs of records whose VM has one owner, the first few, and the owner. The owner is the UUID unless the record
    /// has `vm.owner`.
    pub same_vm: Vec<(String, String, String)>,
    /// Why records lack credentials: the first few, a sentence each.
    pub lacking: Vec<String>,
    /// Files of records and of what they name in `source` that others may read or change: the first few, with their
    /// modes.
    pub open_files: Vec<(PathBuf, u32)>,
    /// The name of the first record that the process has no permission to open.
    pub unreadable: Option<String>,
}

/// Files with parts of records, which may hold passwords, that others than their owner and its group may read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExposedFile {
    /// Their directory.
    pub directory: PathBuf,
    /// The first few files and their modes.
    pub files: Vec<(String, u32)>,
    /// Number of files.
    pub count: usize,
}

/// Other agents, conflicts and losses on the node.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// The name and the kind of each device that has a name of the hub's devices.
    pub hub: Result<Vec<(String, String)>, ProbeError>,
    /// Number of steered frames lost because the ring of a hub's veth was full. The count starts when the hub is
    /// created.
    pub veth_full: u64,
    /// Number of frames lost because a hub's BPF ring buffer was full. This ring buffer carries the frames of
    /// guests in other network namespaces that XDP does not steer. The count starts when the agent's maps are created.
    pub ring_full: u64,
    /// The ID of the process that listens on a socket in the run directory; 0 if the kernel does not report the ID.
    /// `None` if no process listens.
    pub agent: Option<u32>,
    /// The user ID of this process when it began to listen; `None` without one.
    pub agent_user: Option<u32>,
    /// The directories of records, if the running agent reads another one than the configuration names. Nothing that
    /// the agent says of its records, ports and guests is here then: it is about other VMs.
    pub other_records: Option<OtherRecords>,
    /// The devices of hubs that are down, or do not have the MTU that the agent set.
    pub hub_down: Vec<String>,
    /// Why the running agent gave no status, and whether it is silent; `None` if it gave one, or if none runs.
    pub silence: Option<AgentSilence>,
    /// Number of good records of all sources by `serve.smbios`, from the running agent.
    pub datasources: Option<BTreeMap<String, u64>>,
    /// The daemon of libvirt that has run since before its hook was installed, and so does not run it.
    pub libvirt: Option<String>,
    /// What the running agent attached and pinned, compared with what the kernel has; `None` without an agent that says
    /// it.
    pub attachments: Option<AttachmentStatus>,
    /// Problems in the running agent's status that no other check reports.
    pub problems: Vec<String>,
    /// The file of token keys that the running agent misses while it uses its keys; `None` if there is none.
    pub missing_token_key: Option<PathBuf>,
    /// The ports of the running agent whose guests use a MAC that no record has there.
    pub mac_mismatches: Vec<MacMismatch>,
    /// The ports that the running agent cannot serve, and its reasons.
    pub port_errors: Vec<(String, String)>,
    /// The records that the running agent refuses, those of files too.
    pub refused: Vec<RefusedRecord>,
    /// Records of all sources that the running agent does not serve because another has their MAC on their port, a
    /// sentence each.
    pub conflicts: Vec<String>,
    /// A socket that a previous agent left in the run directory. `None` if there is no such socket, or if an agent
    /// listens.
    pub stale_socket: Option<PathBuf>,
    /// How the node itself uses each served address.
    pub addresses: Result<Vec<AddressUse>, ProbeError>,
    /// The sysctl `net.bridge.bridge-nf-call-iptables`; `None` if it cannot be read.
    pub bridge_filter: Option<String>,
}

impl Facts {
    /// The user ID of the running agent, or of this process where none runs.
    #[must_use]
    pub fn user(&self) -> u32 {
        self.node.agent_user.unwrap_or(self.process.uid)
    }
}

/// A running agent has other records than those that are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherRecords {
    /// The directory that is checked.
    pub checked: PathBuf,
    /// The directory that the agent reads; `None` if it reads none.
    pub read: Option<PathBuf>,
}

/// An agent that listens and gives no status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentSilence {
    /// It took the request and sent nothing, as one that hangs.
    pub hangs: bool,
    /// The error.
    pub reason: String,
}

/// A port and its device.
#[derive(Clone, Debug)]
pub struct PortFacts {
    /// The name and the network namespace of the port's device.
    pub name: PortName,
    /// The device with this name in this namespace; `None` if there is no such device.
    pub device: Result<Option<DeviceState>, ProbeError>,
    /// The result of a search for this name in all namespaces. `None` if the device was found, so that no search ran.
    pub elsewhere: Option<Search>,
}
