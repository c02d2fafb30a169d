//! What of a virt-launcher pod can be seen on its node, without the API server.
//!
//! ```text
//!  <pods>/<uid>/volumes/kubernetes.io~empty-dir/sockets/launcher-sock ── who listens? ─┐
//!  <cgroups>/…/pod<uid>/…/cgroup.procs ── which of them is virt-launcher? ─────────────┤
//!                                                                                      ▼
//!   Gone ◀── pidfd ── the launcher ── /proc/<pid>/ns/net ── devices, and word of changes ──▶ Found, Taps
//!  <pods>/<uid>/volumes/kubernetes.io~{secret,configmap,projected}/<volume>/..data ────────▶ Files
//! ```
//!
//! [`Pods`] is told which pods matter and tells what becomes of each. A process counts as the launcher of a pod
//! only while its control group says so, and its number means that process only: a number that is given again
//! leads nowhere. What is held of a pod's namespace is let go when its launcher ends, before [`PodEvent::Gone`] is
//! told, so that the namespace goes with the pod.
//!
//! Nothing a pod can write to is trusted: no link is followed out of a volume (`volumes`) or to another socket,
//! and all names are checked before they become part of a path.

mod cgroup;
mod files;
mod follow;
mod launcher;
mod names;
mod tend;
mod uid;
mod volumes;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use metadata_common::mac::Mac;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::AbortHandle;

use files::Wanted;
use follow::Means;
use tend::{Wisher, wishes};

use metadata_links::inlet;

pub use follow::AT_FIRST;
pub use names::{NicNames, names_of};
pub use uid::{NotAPod, PodUid};
pub use volumes::{Files, KEY_OCTETS, MAX_KEYS, VOLUME_OCTETS, VolumeError, Volumes};

/// Pods that are followed at most: a node runs a few hundred.
pub const MAX_PODS: usize = 4_096;
/// Volumes of one pod that are watched at most.
pub const MAX_VOLUMES: usize = 64;
/// Events waiting for whoever listens; what is ahead of them waits.
const EVENTS: usize = 1_024;

/// Where kubelet and the kernel keep what is known of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The directory of kubelet's pods.
    pub pods: PathBuf,
    /// Where the node's control groups are mounted.
    pub cgroups: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self { pods: "/var/lib/kubelet/pods".into(), cgroups: "/sys/fs/cgroup".into() }
    }
}

/// What inlets are like ([`inlet`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inlets {
    /// The metadata addresses.
    pub addresses: Vec<IpAddr>,
    /// They outlast the agent, as what is pinned does.
    pub stay: bool,
}

/// Why a pod is not followed.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// There are too many.
    #[error("expected at most {MAX_PODS} pods with VMs on a node, found one more; it is not served")]
    TooManyPods,
    /// One has too many volumes.
    #[error("expected at most {MAX_VOLUMES} volumes with data for one VM, found {found}")]
    TooManyVolumes {
        /// How many.
        found: usize,
    },
    /// Volumes cannot be watched at all.
    #[error("cannot watch volumes: {0}; each agent takes one of `fs.inotify.max_user_instances`")]
    Inotify(io::Error),
}

type Sender = mpsc::Sender<(PodUid, PodEvent)>;

/// The pods that matter. Dropped, it follows none any more and lets go of their namespaces.
pub struct Pods {
    means: Arc<Means>,
    volumes: Volumes,
    followed: HashMap<PodUid, Followed>,
    files: AbortHandle,
}

/// A pod that is followed.
struct Followed {
    task: AbortHandle,
    inlet: Wisher,
}

impl Pods {
    /// Follows no pod yet. What becomes of those that are, is told by the receiver.
    ///
    /// # Errors
    /// [`PodsError::Inotify`].
    ///
    /// # Panics
    /// Outside a tokio runtime, or one without I/O and time.
    pub fn start(places: Places) -> Result<(Self, mpsc::Receiver<(PodUid, PodEvent)>), PodsError> {
        Self::start_with(places, Inlets::default())
    }

    /// The same, with what inlets are like.
    ///
    /// # Errors
    /// As for [`Pods::start`].
    ///
    /// # Panics
    /// As for [`Pods::start`].
    pub fn start_with(
        places: Places,
        inlets: Inlets,
    ) -> Result<(Self, mpsc::Receiver<(PodUid, PodEvent)>), PodsError> {
        let (tell, events) = mpsc::channel(EVENTS);
        let Places { pods, cgroups } = places;
        let wanted = Wanted::default();
        let watch =
            files::Watch::new(pods.clone(), wanted.clone(), tell.clone()).map_err(PodsError::Inotify)?;
        let files = tokio::spawn(watch.run()).abort_handle();
        let volumes = Volumes::new(&pods);
        let looks = Semaphore::new(follow::LOOKS_AT_ONCE);
        let index = Mutex::new(cgroup::Index::new(cgroups));
        let means = Arc::new(Means { pods, index, looks, wanted, inlets: Arc::new(inlets), tell });
        Ok((Self { means, volumes, followed: HashMap::new(), files }, events))
    }

    /// Follows a pod, which need not be there yet: tells [`PodEvent::Absent`] if it is not, [`PodEvent::Missing`] if it still is
    /// not after [`AT_FIRST`], [`PodEvent::Found`] once it is, then its changes, then [`PodEvent::Gone`]. These of its volumes are told by [`PodEvent::Files`], each when it can first be read and
    /// when it holds something else; called again for a pod, it changes which.
    ///
    /// # Errors
    /// [`PodsError::TooManyPods`], [`PodsError::TooManyVolumes`]; all is as before then.
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
            self.followed.insert(pod.clone(), Followed { task: task.abort_handle(), inlet });
        }
        self.means.wanted.set(pod, volumes);
        Ok(())
    }

    /// Has a pod that is followed have an inlet, whose frames come from `mac`, or none. What is made shows by
    /// [`PodEvent::Taps`].
    pub fn inlet(&mut self, pod: &PodUid, mac: Option<Mac>) {
        if let Some(followed) = self.followed.get(pod) {
            followed.inlet.wish(mac);
        }
    }

    /// Follows a pod no more, and removes its inlet. An event or two of it may be on their way still.
    pub fn forget(&mut self, pod: &PodUid) {
        if let Some(followed) = self.followed.remove(pod) {
            followed.inlet.end();
            followed.task.abort();
        }
        self.means.wanted.set(pod, BTreeSet::new());
    }

    /// What a pod's volume holds now, as by [`Volumes::read`].
    ///
    /// # Errors
    /// As for [`Volumes::read`].
    pub fn read(&self, pod: &PodUid, volume: &str) -> Result<Option<Files>, VolumeError> {
        self.volumes.read(pod, volume)
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.files.abort();
        self.followed.values().for_each(|pod| pod.task.abort());
    }
}

/// A pod whose launcher runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its uid.
    pub uid: PodUid,
    /// The launcher's process id.
    pub pid: u32,
    /// The network namespace, as [`PortName::netns`](metadata_base::port::PortName::netns) names it: `/proc/<pid>/ns/net`.
    pub netns: String,
    /// Devices by which guests can be reached, by name.
    pub taps: Vec<Tap>,
    /// All other Ethernet devices but the loopback, by name.
    pub nics: Vec<PodNic>,
}

impl Pod {
    /// True once an inlet is ready: until then its port is not among the NICs.
    #[must_use]
    pub fn has_inlet(&self) -> bool {
        self.nics.iter().any(|nic| nic.name == inlet::PORT)
    }

    /// True also for an inlet that this agent has not made, or not made ready.
    #[must_use]
    pub fn has_some_inlet(&self) -> bool {
        self.nics.iter().any(|nic| nic.name == inlet::POD_END)
    }
}

/// A guest's end in a pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// The interface name.
    pub ifname: String,
    /// Of which kind.
    pub kind: TapKind,
    /// The device's own address, which is the guest's where the device is the pod's NIC.
    pub mac: Mac,
    /// Queues that are open and enabled, at least 1. Guests enable more when their driver starts.
    pub queues: u32,
}

/// How a tap is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapKind {
    /// `tun` in tap mode: can be a port.
    Tap,
    /// `macvtap`: what its guest sends never meets a program on it.
    Macvtap,
}

/// A device of the pod: what the CNI plugin made, what took its name, a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodNic {
    /// The interface name.
    pub name: String,
    /// Its kind as the kernel calls it: `veth`, `dummy`, `bridge`, …; `physical device` when it names none.
    pub kind: String,
    /// Its address. With the bridge binding the dummy that took the pod NIC's name has the guest's.
    pub mac: Mac,
}

/// What became of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// Its launcher was looked for and is not there yet, or not any more. It is looked for on.
    Absent,
    /// Its launcher is still not found after [`AT_FIRST`]. Sent once; it is looked for on.
    Missing {
        /// Why the last look failed.
        reason: String,
    },
    /// Its launcher was found. There may be no taps yet.
    Found(Pod),
    /// Its taps or NICs are others now, or a tap's queues.
    Taps(Pod),
    /// A volume can be read, or holds something else now.
    Files {
        /// Its name.
        volume: String,
    },
    /// Its launcher has ended. Nothing more is told of the pod.
    Gone,
}

#[cfg(test)]
mod tests;
