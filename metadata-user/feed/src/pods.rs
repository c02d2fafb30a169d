//! What a node shows of its virt-launcher pods, without the API server.
//!
//! ```text
//!  <pods>/<uid>/volumes/kubernetes.io~empty-dir/sockets/launcher-sock ── listener ─────┐
//!  <cgroups>/…/pod<uid>/…/cgroup.procs ── name virt-launcher ──────────────────────────┤
//!                                                                                      ▼
//!   Gone ◀── pidfd ── the launcher ── /proc/<pid>/ns/net ── devices, by netlink ───────────▶ Found, Taps
//!  <pods>/<uid>/volumes/kubernetes.io~{secret,configmap,projected}/<volume>/..data ────────▶ Files
//! ```
//!
//! The caller of [`Pods`] names the pods to watch, and gets their events. A process counts as a pod's launcher only if
//! its control group belongs to the pod. A pidfd ensures that the PID still means this process. The watch releases the
//! pod's network namespace when the launcher ends, before it publishes [`PodEvent::Gone`], so that the namespace can
//! end with the pod.
//!
//! This module trusts nothing that a pod can write. It follows no link out of a volume (`volumes`) or to another
//! socket, and checks every name before it becomes part of a path.

mod cgroup;
mod files;
mod follow;
mod inlet_task;
mod launcher;
mod volumes;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use metadata_common::mac::Mac;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::AbortHandle;

use files::WatchedVolumes;
use follow::WatchContext;
use inlet_task::{InletRequester, wishes};

use crate::source::TakeoverPause;
use metadata_links::inlet;

pub use follow::AT_FIRST;
pub use launcher::{NicNames, NotAPod, PodUid, names_of};
pub use volumes::{KEY_BYTES, MAX_KEYS, VOLUME_BYTES, VolumeContent, VolumeError, Volumes};
pub(crate) use volumes::{VolumeReading, VolumeVersion};

/// Most pods to watch; a node runs a few hundred.
pub const MAX_PODS: usize = 4_096;
/// Most watched volumes of one pod.
pub const MAX_VOLUMES: usize = 64;
/// Most events in the queue; a full queue makes the watches wait.
const EVENTS: usize = 1_024;

/// The directories of kubelet and of the control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDirectories {
    /// kubelet's directory of pods.
    pub pods: PathBuf,
    /// The mount point of the node's control groups.
    pub cgroups: PathBuf,
}

impl Default for PodDirectories {
    fn default() -> Self {
        Self { pods: "/var/lib/kubelet/pods".into(), cgroups: "/sys/fs/cgroup".into() }
    }
}

/// The settings of inlets ([`inlet`]).
#[derive(Clone, Debug, Default)]
pub struct Inlets {
    /// The metadata addresses that an inlet serves.
    pub addresses: Vec<IpAddr>,
    /// Keep inlets when the agent ends, like pinned programs.
    pub stay: bool,
    /// Leaves inlets to the next agent.
    pub pause: TakeoverPause,
}

/// Why a pod or its volumes cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// The limit of pods is reached.
    #[error("expected at most {MAX_PODS} pods with VMs on a node, found one more; it is not served")]
    TooManyPods,
    /// A pod has too many volumes.
    #[error("expected at most {MAX_VOLUMES} volumes with data for one VM, found {found}")]
    TooManyVolumes {
        /// The number of volumes.
        found: usize,
    },
    /// The kernel refuses an inotify instance.
    #[error("cannot watch volumes: {0}; each agent takes one of `fs.inotify.max_user_instances`")]
    Inotify(io::Error),
}

type Sender = mpsc::Sender<(PodUid, PodEvent)>;

/// The watched pods. Dropping it ends all watches and releases the pods' namespaces.
pub struct Pods {
    means: Arc<WatchContext>,
    volumes: Volumes,
    followed: HashMap<PodUid, WatchedPod>,
    files: AbortHandle,
}

/// A watched pod.
struct WatchedPod {
    task: AbortHandle,
    inlet: InletRequester,
}

impl Pods {
    /// Starts without pods. The receiver gets the events of watched pods.
    ///
    /// # Errors
    /// [`PodsError::Inotify`].
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O and time.
    pub fn start(places: PodDirectories) -> Result<(Self, mpsc::Receiver<(PodUid, PodEvent)>), PodsError> {
        Self::start_with(places, Inlets::default())
    }

    /// Like [`Pods::start`], with settings of inlets.
    ///
    /// # Errors
    /// The errors of [`Pods::start`].
    ///
    /// # Panics
    /// The panics of [`Pods::start`].
    pub fn start_with(
        places: PodDirectories,
        inlets: Inlets,
    ) -> Result<(Self, mpsc::Receiver<(PodUid, PodEvent)>), PodsError> {
        let (tell, events) = mpsc::channel(EVENTS);
        let PodDirectories { pods, cgroups } = places;
        let wanted = WatchedVolumes::default();
        let watch = files::VolumeWatch::new(pods.clone(), wanted.clone(), tell.clone())
            .map_err(PodsError::Inotify)?;
        let files = tokio::spawn(watch.run()).abort_handle();
        let volumes = Volumes::new(&pods);
        let looks = Semaphore::new(follow::LOOKS_AT_ONCE);
        let index = Mutex::new(cgroup::Index::new(cgroups));
        let means = Arc::new(WatchContext { pods, index, looks, wanted, inlets: Arc::new(inlets), tell });
        Ok((Self { means, volumes, followed: HashMap::new(), files }, events))
    }

    /// Watches a pod, which need not exist yet. A second call for a pod changes its volumes.
    ///
    /// The events are [`PodEvent::Absent`] if the launcher does not run yet, [`PodEvent::Missing`] if it does not after
    /// [`AT_FIRST`], then [`PodEvent::Found`], its changes, and [`PodEvent::Gone`]. [`PodEvent::Files`] names
    /// each volume when it becomes readable and when its content changes.
    ///
    /// # Errors
    /// [`PodsError::TooManyPods`], [`PodsError::TooManyVolumes`]; the call then changes nothing.
    pub fn watch(&mut self, pod: &PodUid, volumes: BTreeSet<String>) -> Result<(), PodsError> {
        if volumes.len() > MAX_VOLUMES {
            return Err(PodsError::TooManyVolumes { found: volumes.len() });
        }
        if self.followed.get(pod).is_none_or(|pod| pod.task.is_finished()) {
            if self.followed.len() >= MAX_PODS {
                self.followed.retain(|_, pod| !pod.task.is_finished());
            }
            if self.followed.len() >= MAX_PODS {
                return Err(PodsError::TooManyPods);
            }
            let (inlet, wished) = wishes(&self.means.inlets);
            let task = tokio::spawn(follow::follow(pod.clone(), Arc::clone(&self.means), wished));
            self.followed.insert(pod.clone(), WatchedPod { task: task.abort_handle(), inlet });
        }
        self.means.wanted.set(pod, volumes);
        Ok(())
    }

    /// Creates the inlet of a watched pod, with this source MAC, or removes it. The result follows as
    /// [`PodEvent::Taps`].
    pub fn inlet(&mut self, pod: &PodUid, mac: Option<Mac>) {
        if let Some(followed) = self.followed.get(pod) {
            followed.inlet.wish(mac);
        }
    }

    /// Stops watching a pod and removes its inlet. The queue may still hold events of it.
    pub fn forget(&mut self, pod: &PodUid) {
        if let Some(followed) = self.followed.remove(pod) {
            followed.inlet.end();
            followed.task.abort();
        }
        self.means.wanted.set(pod, BTreeSet::new());
    }

    /// Reads a pod's volume now, like [`Volumes::read`].
    ///
    /// # Errors
    /// The errors of [`Volumes::read`].
    pub fn read(&self, pod: &PodUid, volume: &str) -> Result<Option<VolumeContent>, VolumeError> {
        self.volumes.read(pod, volume)
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.files.abort();
        self.followed.values().for_each(|pod| pod.task.abort());
    }
}

/// A pod with a running launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The pod's UID.
    pub uid: PodUid,
    /// The launcher's PID.
    pub pid: u32,
    /// The network namespace in the form of [`PortName::netns`](metadata_common::port::PortName::netns):
    /// `/proc/<pid>/ns/net`.
    pub netns: String,
    /// The devices that connect guests, by name.
    pub taps: Vec<Tap>,
    /// All other Ethernet devices except the loopback, by name.
    pub nics: Vec<PodNic>,
}

impl Pod {
    /// True once an inlet is ready. Its port is one of the NICs from then on.
    #[must_use]
    pub fn has_inlet(&self) -> bool {
        self.nics.iter().any(|nic| nic.name == inlet::PORT)
    }

    /// True if any part of an inlet exists, even from a previous agent or unfinished.
    #[must_use]
    pub fn has_some_inlet(&self) -> bool {
        self.nics.iter().any(|nic| nic.name == inlet::POD_END)
    }
}

/// A guest's device in a pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// The interface name.
    pub ifname: String,
    /// How the device connects the guest.
    pub kind: TapKind,
    /// The device's MAC. It equals the guest's if the device is the pod's NIC.
    pub mac: Mac,
    /// Open and enabled queues, at least 1. Guests enable more when their driver starts.
    pub queues: u32,
}

/// The kind of a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapKind {
    /// `tun` in tap mode, which can be a port.
    Tap,
    /// `macvtap`. An XDP program on it sees no frame from its guest.
    Macvtap,
}

/// Another device of the pod: the CNI plugin's, its replacement, or a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodNic {
    /// The interface name.
    pub name: String,
    /// The kernel's kind: `veth`, `dummy`, `bridge`, …; `physical device` if there is none.
    pub kind: String,
    /// The device's MAC. With the bridge binding the dummy of the pod NIC's name has the guest's MAC.
    pub mac: Mac,
}

/// An event of a watched pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// A search found no launcher. The search goes on.
    Absent,
    /// The launcher is still missing after [`AT_FIRST`]. The watch sends this once, and the search goes on.
    Missing {
        /// Why the last search failed.
        reason: String,
    },
    /// The launcher runs. Its taps may still be missing.
    Found(Pod),
    /// The taps or NICs have changed, or a tap's number of queues.
    Taps(Pod),
    /// A volume has become readable, or has new content.
    Files {
        /// The volume's name.
        volume: String,
    },
    /// The launcher has ended. No event of the pod follows.
    Gone,
}

#[cfg(test)]
mod tests;
