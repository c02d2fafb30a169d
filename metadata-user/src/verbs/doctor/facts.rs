//! What was seen: plain data, so that every check can be shown any node.

use std::path::PathBuf;

use metadata_base::port::PortName;
use metadata_steer::Mode;
use metadata_steer::probe::{AddressUse, Device, Failure, Feature, PinnedLink, Search};

/// Everything the checks look at.
#[derive(Clone, Debug)]
pub struct Facts {
    /// What the agent would run with, as far as checks ask.
    pub wanted: Wanted,
    /// The kernel.
    pub kernel: Kernel,
    /// This process, which the agent would be like.
    pub process: Process,
    /// The place for pins; `None` when nothing is to be pinned.
    pub pins: Option<Pins>,
    /// The directories the agent uses: what for, and what is there.
    pub directories: Vec<(&'static str, Directory)>,
    /// The records; `None` without a directory of them.
    pub records: Option<Records>,
    /// The node around it.
    pub node: Node,
    /// The ports that configuration and records name.
    pub ports: Vec<Port>,
    /// What KubeVirt's feed needs; `None` while it is off.
    pub kubevirt: Option<Kubevirt>,
}

/// What the feed of KubeVirt needs.
#[derive(Clone, Debug)]
pub struct Kubevirt {
    /// The node's name, or why there is none.
    pub node: Result<String, String>,
    /// Why there is no way to the API server, if so; `None` when it is not watched.
    pub api: Option<Result<(), String>>,
    /// kubelet's directory of pods.
    pub pods: Directory,
    /// Where the control groups are mounted.
    pub cgroups: Directory,
    /// The directory of the node hook's socket, when that is on.
    pub hook: Option<Directory>,
}

/// Of the configuration.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// By which program ports are to be steered.
    pub steer: Mode,
    /// The prefix of the hub's devices.
    pub hub: String,
    /// Threads that answer.
    pub workers: u32,
    /// Octets of memory one worker keeps from being swapped.
    pub pinned_memory: u64,
    /// Who tells of VMs beside a directory of records, if anybody.
    pub feeds: Vec<&'static str>,
}

/// The kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What uname(2) says: `6.1.0-13-amd64`.
    pub release: String,
    /// Whether it has each feature.
    pub features: Vec<(Feature, Result<bool, Failure>)>,
    /// What came of beginning to serve in a network namespace of its own.
    pub rehearsal: Result<(), Failure>,
    /// Lockdown, as the kernel writes it: `[none] integrity confidentiality`.
    pub lockdown: Option<String>,
    /// `kernel.unprivileged_bpf_disabled`.
    pub unprivileged_bpf: Option<String>,
    /// Opening `/dev/net/tun`.
    pub tun: Result<(), Failure>,
}

/// Capability sets, a bit for each by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// What counts.
    pub effective: u64,
    /// What can be made to count.
    pub permitted: u64,
    /// What can ever be had.
    pub bounding: u64,
}

/// This process.
#[derive(Clone, Debug)]
pub struct Process {
    /// Whom it runs as.
    pub uid: u32,
    /// Its capabilities; `None` when `/proc` does not tell.
    pub capabilities: Option<Capabilities>,
    /// 0 none, 1 strict, 2 a filter.
    pub seccomp: Option<u32>,
    /// It is in the user namespace the node began with.
    pub initial_user_namespace: bool,
    /// Its limits.
    pub resources: Resources,
    /// Processors it may run on.
    pub cpus: usize,
    /// Seconds since 1970.
    pub unix_time: u64,
}

/// Limits of a process; `None` is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The hard limit on open files, which the agent raises its own to.
    pub open_files: Option<u64>,
    /// Octets that may be kept from being swapped.
    pub locked_memory: Option<u64>,
}

/// The file system something is in, or would be made in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The nearest directory that is there.
    pub at: PathBuf,
    /// It is a bpffs.
    pub bpf: bool,
    /// Nothing can be written.
    pub read_only: bool,
    /// Octets that are free.
    pub free: u64,
}

/// The place for pins.
#[derive(Clone, Debug)]
pub struct Pins {
    /// As configured.
    pub path: PathBuf,
    /// What it is in.
    pub file_system: Result<FileSystem, Failure>,
    /// Versions of the layout that are there.
    pub versions: Vec<String>,
    /// Links of the layout this agent knows.
    pub links: Result<Vec<PinnedLink>, Failure>,
}

/// A directory.
#[derive(Clone, Debug)]
pub struct Directory {
    /// As configured.
    pub path: PathBuf,
    /// What is there; `None` when nothing is.
    pub found: Result<Option<Found>, Failure>,
    /// What it is in.
    pub file_system: Result<FileSystem, Failure>,
}

/// A directory that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// It is a directory.
    pub directory: bool,
    /// Permission bits.
    pub mode: u32,
    /// Whose it is.
    pub owner: u32,
}

/// The records.
#[derive(Clone, Debug, Default)]
pub struct Records {
    /// How many there are.
    pub count: usize,
    /// Those that cannot be served, and why: the first few.
    pub refused: Vec<(String, String)>,
    /// How many cannot be served.
    pub refused_count: usize,
    /// One that cannot be opened for want of permission.
    pub unreadable: Option<String>,
}

/// The node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Devices under the hub's names: name and kind.
    pub hub: Result<Vec<(String, String)>, Failure>,
    /// Steered frames that found the ring of a hub's veth full, since the hub was made.
    pub veth_full: u64,
    /// Frames of quiet guests in other namespaces that found a hub's ring full, since the maps were made.
    pub ring_full: u64,
    /// The agent that answers in the run directory: its process.
    pub agent: Option<u32>,
    /// A socket in the run directory nobody listens on any more.
    pub stale_socket: Option<PathBuf>,
    /// What the node does with the served addresses.
    pub addresses: Result<Vec<AddressUse>, Failure>,
    /// `net.bridge.bridge-nf-call-iptables`.
    pub bridge_filter: Option<String>,
}

/// A port.
#[derive(Clone, Debug)]
pub struct Port {
    /// As it is named.
    pub name: PortName,
    /// Its device, if its namespace has it.
    pub device: Result<Option<Device>, Failure>,
    /// Where else there are devices of that name, when it has not.
    pub elsewhere: Option<Search>,
}
