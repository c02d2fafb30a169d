//! The input of the checks. The facts are plain data, so that tests can describe any node.

use std::path::PathBuf;

use metadata_base::port::PortName;
use metadata_steer::Mode;
use metadata_steer::probe::{AddressUse, Device, Failure, Feature, PinnedLink, Search};

/// All facts.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The part of the agent's configuration that checks need.
    pub wanted: Wanted,
    /// The kernel.
    pub kernel: Kernel,
    /// This process. The agent would have the same rights and limits.
    pub process: Process,
    /// The directory of pins; `None` if the agent pins nothing.
    pub pins: Option<Pins>,
    /// The agent's directories, by purpose.
    pub directories: Vec<(&'static str, Directory)>,
    /// The records; `None` if no directory of records is configured.
    pub records: Option<Records>,
    /// The node.
    pub node: Node,
    /// The ports that configuration and records name.
    pub ports: Vec<Port>,
    /// What KubeVirt's feed needs; `None` while it is off.
    pub kubevirt: Option<Kubevirt>,
}

/// The needs of KubeVirt's feed.
#[derive(Clone, Debug)]
pub struct Kubevirt {
    /// The node's name, or the reason why it is unknown.
    pub node: Result<String, String>,
    /// Whether the API server can be addressed, or the reason why not; `None` if the feed does not watch it.
    pub api: Option<Result<(), String>>,
    /// kubelet's directory of pods.
    pub pods: Directory,
    /// The mount of the control groups.
    pub cgroups: Directory,
    /// The directory of the node hook's socket; `None` while the hook is off.
    pub hook: Option<Directory>,
}

/// The part of the configuration that checks need.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The program that steers ports.
    pub steer: Mode,
    /// The prefix of the hub's devices.
    pub hub: String,
    /// Number of workers.
    pub workers: u32,
    /// Locked memory of one worker, in octets.
    pub pinned_memory: u64,
    /// Feeds other than a directory of records.
    pub feeds: Vec<&'static str>,
}

/// The kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The release that uname(2) returns, such as `6.1.0-13-amd64`.
    pub release: String,
    /// For each feature, whether the kernel has it.
    pub features: Vec<(Feature, Result<bool, Failure>)>,
    /// The result of a rehearsal: the start of serving in a temporary network namespace.
    pub rehearsal: Result<(), Failure>,
    /// Lockdown, as the kernel writes it: `[none] integrity confidentiality`.
    pub lockdown: Option<String>,
    /// `kernel.unprivileged_bpf_disabled`.
    pub unprivileged_bpf: Option<String>,
    /// The result of opening `/dev/net/tun`.
    pub tun: Result<(), Failure>,
}

/// Capability sets, a bit for each by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Capabilities in effect.
    pub effective: u64,
    /// Capabilities that the process can put in effect.
    pub permitted: u64,
    /// Upper bound of the capabilities that the process can gain.
    pub bounding: u64,
}

/// This process.
#[derive(Clone, Debug)]
pub struct Process {
    /// The effective user.
    pub uid: u32,
    /// The capabilities; `None` if `/proc` cannot be read.
    pub capabilities: Option<Capabilities>,
    /// The seccomp mode: 0 none, 1 strict, 2 filter.
    pub seccomp: Option<u32>,
    /// True in the node's initial user namespace.
    pub initial_user_namespace: bool,
    /// Its limits.
    pub resources: Resources,
    /// Processors it may run on.
    pub cpus: usize,
    /// Seconds since 1970.
    pub unix_time: u64,
}

/// Limits of a process; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The hard limit of open files. The agent raises its soft limit to it.
    pub open_files: Option<u64>,
    /// The limit of locked memory, in octets.
    pub locked_memory: Option<u64>,
}

/// The file system that contains a path, or would contain it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The nearest directory that exists.
    pub at: PathBuf,
    /// True for a bpffs.
    pub bpf: bool,
    /// True for a read-only mount.
    pub read_only: bool,
    /// Free space, in octets.
    pub free: u64,
}

/// The directory of pins.
#[derive(Clone, Debug)]
pub struct Pins {
    /// The configured path.
    pub path: PathBuf,
    /// Its file system.
    pub file_system: Result<FileSystem, Failure>,
    /// Versions of the layout that exist in it.
    pub versions: Vec<String>,
    /// Links in this agent's version of the layout.
    pub links: Result<Vec<PinnedLink>, Failure>,
}

/// A directory.
#[derive(Clone, Debug)]
pub struct Directory {
    /// The configured path.
    pub path: PathBuf,
    /// Its properties; `None` if it does not exist.
    pub found: Result<Option<Found>, Failure>,
    /// Its file system.
    pub file_system: Result<FileSystem, Failure>,
}

/// A path that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// True for a directory.
    pub directory: bool,
    /// Permission bits.
    pub mode: u32,
    /// The owner.
    pub owner: u32,
}

/// The records.
#[derive(Clone, Debug, Default)]
pub struct Records {
    /// Number of records.
    pub count: usize,
    /// The first few invalid records, with the error.
    pub refused: Vec<(String, String)>,
    /// Number of invalid records.
    pub refused_count: usize,
    /// A record that the process has no permission to open.
    pub unreadable: Option<String>,
}

/// The node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Devices under the hub's names: name and kind.
    pub hub: Result<Vec<(String, String)>, Failure>,
    /// Steered frames lost because the ring of a hub's veth was full, since the hub was created.
    pub veth_full: u64,
    /// Frames of quiet guests in other namespaces lost because a hub's ring was full, since the maps were created.
    pub ring_full: u64,
    /// The process of the agent that listens in the run directory.
    pub agent: Option<u32>,
    /// A socket in the run directory without a listener.
    pub stale_socket: Option<PathBuf>,
    /// The node's own uses of the served addresses.
    pub addresses: Result<Vec<AddressUse>, Failure>,
    /// `net.bridge.bridge-nf-call-iptables`.
    pub bridge_filter: Option<String>,
}

/// A port.
#[derive(Clone, Debug)]
pub struct Port {
    /// The port's name.
    pub name: PortName,
    /// The port's device; `None` if its namespace has none of that name.
    pub device: Result<Option<Device>, Failure>,
    /// Devices of that name in other namespaces, if `device` is `None`.
    pub elsewhere: Option<Search>,
}
