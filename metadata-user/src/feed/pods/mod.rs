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
//! Nothing a pod can write to is trusted: no link is followed out of a volume ([`volumes`]) or to another socket,
//! and all names are checked before they become part of a path.

mod names;
mod uid;
mod volumes;

use metadata_common::mac::Mac;

pub use names::{NicNames, names_of};
pub use uid::{NotAPod, PodUid};
pub use volumes::{Files, KEY_OCTETS, MAX_KEYS, VOLUME_OCTETS, VolumeError, Volumes};

/// A pod whose launcher runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its uid.
    pub uid: PodUid,
    /// The launcher's process id.
    pub pid: u32,
    /// The network namespace, as [`PortName::netns`](crate::port::PortName::netns) names it: `/proc/<pid>/ns/net`.
    pub netns: String,
    /// Devices by which guests can be reached, by name.
    pub taps: Vec<Tap>,
    /// All other Ethernet devices but the loopback, by name.
    pub nics: Vec<PodNic>,
}

/// A guest's end in a pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// The interface name.
    pub ifname: String,
    /// Of which kind.
    pub kind: TapKind,
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
