//! Finds a pod's virt-launcher, the process that gives access to the pod's namespaces.
//!
//! There are two ways. The launcher listens on a socket in one of the pod's directories, and the kernel names the
//! listener (`SO_PEERCRED`). It is also among the processes of the pod's control group. The first way needs permission
//! to connect, which for another user's socket is `CAP_DAC_OVERRIDE`. The second works if the node's control groups are
//! mounted.
//!
//! Both ways open a pidfd before they read the process's control group, and check afterwards that the process still
//! runs. So the pidfd and the group belong to one process, and the PID cannot mean another process
//! ([`NamespaceReservation`]).

use metadata_common::printable::hex;
use metadata_links::error::LinkError;
use metadata_links::netns::NamespaceReservation;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sha2::{Digest as _, Sha256};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, fs, io};
use tokio::net::UnixStream;

use super::cgroup::Index;
use super::volumes::directory;
use super::{VolumeError, cgroup};

/// The directory of the launcher's socket, below the pod's directory.
const SOCKETS: &str = "volumes/kubernetes.io~empty-dir/sockets";
const SOCKET: &str = "launcher-sock";
/// The names of the launcher and of its parent, cut to fifteen bytes.
const NAMES: [&str; 2] = ["virt-launcher", "virt-launcher-m"];

/// A running process that belongs to the pod.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    pub(super) meant: NamespaceReservation,
}

/// Why neither way found a launcher.
#[derive(Debug, thiserror::Error)]
#[error("by its socket: {socket}; by its control group: {group}")]
pub(super) struct LauncherAbsent {
    socket: Box<Reason>,
    group: Box<Reason>,
}

/// Why one way found none.
#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error("there is none yet")]
    NotYet,
    #[error("no process is called {} yet", NAMES[0])]
    NoLauncher,
    #[error("it has no listener")]
    Deserted,
    #[error("connecting is refused: {0}; for a socket of another user that takes CAP_DAC_OVERRIDE")]
    Refused(io::Error),
    #[error("the listener is in another process namespace; the agent needs `hostPID: true`")]
    Unseen,
    #[error("process {pid} is not in the pod's control group{}", found.as_ref().map(|pod| format!(", but in that of pod {pod}")).unwrap_or_default())]
    Foreign { pid: u32, found: Option<PodUid> },
    #[error("it has just ended")]
    Ended,
    #[error("{0}")]
    Volume(#[from] VolumeError),
    #[error("{0}")]
    Steer(#[from] LinkError),
    #[error("{action}: {source}")]
    Io { action: String, source: io::Error },
}

impl Reason {
    fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// Finds a pod's launcher. It blocks briefly and needs a tokio runtime.
pub(super) fn find(pods: &Path, index: &Mutex<Index>, pod: &PodUid) -> Result<Launcher, LauncherAbsent> {
    let by_socket = listener(pods, pod).and_then(|pid| hold(pid, pod));
    by_socket.or_else(|socket| {
        by_group(index, pod).map_err(|group| LauncherAbsent { socket: socket.into(), group: group.into() })
    })
}

/// The PID of the listener on the launcher's socket.
fn listener(pods: &Path, pod: &PodUid) -> Result<u32, Reason> {
    let below: PathBuf = [pod.as_str(), SOCKETS].iter().collect();
    let dir = directory(pods, &below)?.ok_or(Reason::NotYet)?;
    // The pod controls the path: it must be a socket itself, not a link to one.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match openat(&dir, SOCKET, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Err(Reason::NotYet),
        file => file.map_err(|errno| Reason::Refused(errno.into()))?,
    };
    let found = fstat(&file).map_err(|errno| Reason::Refused(errno.into()))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(Reason::Refused(io::Error::from_raw_os_error(libc::ENOTSOCK)));
    }
    // The path may exceed an address's 108 bytes, and the pod may replace the file.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let asked = address.and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)?;
        Ok(socket)
    });
    let socket = match asked {
        Err(Errno::CONNREFUSED) => return Err(Reason::Deserted),
        socket => socket.map_err(|errno| Reason::Refused(errno.into()))?,
    };
    // rustix cannot represent PID 0, by which the kernel means a process in another namespace.
    let peer = UnixStream::from_std(socket.into()).and_then(|socket| socket.peer_cred());
    let peer = peer.map_err(Reason::io("cannot see who listens"))?.pid().unwrap_or_default();
    u32::try_from(peer).ok().filter(|pid| *pid != 0).ok_or(Reason::Unseen)
}

/// Finds the launcher among the processes of the pod's control group.
fn by_group(index: &Mutex<Index>, pod: &PodUid) -> Result<Launcher, Reason> {
    let group = index.lock().unwrap_or_else(PoisonError::into_inner).group(pod);
    let group = group.map_err(Reason::io("cannot walk the control groups"))?.ok_or(Reason::NotYet)?;
    let mut named = Vec::new();
    for pid in cgroup::processes(&group) {
        let called = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        named.extend(NAMES.iter().position(|name| *name == called.trim_end()).map(|place| (place, pid)));
    }
    named.sort_unstable();
    let mut last = Reason::NoLauncher;
    for (_, pid) in named {
        match hold(pid, pod) {
            Ok(launcher) => return Ok(launcher),
            Err(reason) => last = reason,
        }
    }
    Err(last)
}

/// Opens a process's pidfd if the process belongs to the pod.
fn hold(pid: u32, pod: &PodUid) -> Result<Launcher, Reason> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Reason::Unseen)?;
    let pidfd = match pidfd_open(number, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Err(Reason::Ended),
        pidfd => pidfd
            .map_err(|errno| Reason::io(format!("cannot open a pidfd of process {pid}"))(errno.into()))?,
    };
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"));
    let groups = groups.map_err(Reason::io(format!("cannot read the control group of process {pid}")));
    let meant = NamespaceReservation::of(pid)?.ok_or(Reason::Ended)?;
    // If it has ended, the group that was read may belong to another process.
    if has_ended(&pidfd).map_err(Reason::io(format!("cannot check process {pid}")))? {
        return Err(Reason::Ended);
    }
    match cgroup::pod_of(&groups?) {
        Some(found) if found == *pod => Ok(Launcher { pid, pidfd, meant }),
        found => Err(Reason::Foreign { pid, found }),
    }
}

/// A pidfd is readable once its process has ended (pidfd_open(2)).
fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let mut look = [PollFd::new(pidfd, PollFlags::IN)];
    Ok(poll(&mut look, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
}

// Checks names that become parts of paths.

/// Most bytes of a pod's UID: a UUID has 36, the hash of a static pod 32.
const UID_MAX: usize = 64;
/// Most bytes of a volume's name (a DNS label has 63, a subdomain 253).
const VOLUME_MAX: usize = 253;

/// A pod's UID, which names kubelet's directories: letters, digits and hyphens, at most 64 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

/// Why a text is not a pod's UID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a pod's UID of 1 to {UID_MAX} letters, digits and hyphens, found `{}`", found.escape_default())]
pub struct NotAPod {
    found: String,
}

impl PodUid {
    /// The uid as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PodUid {
    type Err = NotAPod;

    fn from_str(text: &str) -> Result<Self, NotAPod> {
        let fits = (1..=UID_MAX).contains(&text.len()) && !text.starts_with('-');
        if fits && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Ok(Self(text.into()));
        }
        Err(NotAPod { found: text.chars().take(UID_MAX).collect() })
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// True for a volume name that Kubernetes accepts: lower-case letters, digits, hyphens and dots, without a leading dot.
pub(super) fn is_volume(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    (1..=VOLUME_MAX).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed)
}

// KubeVirt's names of a network's devices (its `pkg/network/namescheme` and `pkg/network/link`).

/// The tap of the primary network, whatever the name of the pod's NIC.
const PRIMARY_TAP: &str = "tap0";
/// Bytes of the hash in a name, two digits each, without the last digit.
const HASH_BYTES: usize = 6;
/// Digits of the hash in a name.
const HASH_DIGITS: usize = 11;

/// The device names of one network of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicNames {
    /// The CNI plugin's device, or with a bridge binding the dummy that keeps its name and MAC.
    pub pod: String,
    /// The guest's tap.
    pub tap: String,
    /// The bridge between them.
    pub bridge: String,
}

/// The possible device names of a network, the current scheme first, then that of versions that number secondary
/// networks. `ordinal` is the network's position among the VM's secondary ones, from 1; `None` is the primary network.
#[must_use]
pub fn names_of(network: &str, ordinal: Option<usize>) -> Vec<NicNames> {
    let Some(ordinal) = ordinal else {
        return vec![NicNames { pod: "eth0".into(), tap: PRIMARY_TAP.into(), bridge: "k6t-eth0".into() }];
    };
    let hash = hash(network);
    let hashed =
        NicNames { pod: format!("pod{hash}"), tap: format!("tap{hash}"), bridge: format!("k6t-{hash}") };
    let numbered = NicNames {
        pod: format!("net{ordinal}"),
        tap: format!("tap{ordinal}"),
        bridge: format!("k6t-net{ordinal}"),
    };
    vec![hashed, numbered]
}

/// The first hex digits of the SHA-256 of a network's name.
fn hash(network: &str) -> String {
    let digest = Sha256::digest(network.as_bytes());
    let mut text = hex(&digest[..HASH_BYTES]);
    text.truncate(HASH_DIGITS);
    text
}

#[cfg(test)]
mod tests {
    use super::{PodUid, UID_MAX, VOLUME_MAX, is_volume, names_of};

    #[test]
    fn only_what_kubelet_names_directories_by_is_a_uid() {
        let longest = "a".repeat(UID_MAX);
        for text in
            ["6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11", "0d1c5b0f9f0f4f5f8c9e0a1b2c3d4e5f", "A", &longest]
        {
            assert_eq!(text.parse::<PodUid>().expect(text).as_str(), text);
        }
        let too_long = "a".repeat(UID_MAX + 1);
        for text in ["", ".", "..", "a/b", "../a", "a\0", "-a", "a b", "ä", &too_long] {
            let error = text.parse::<PodUid>().expect_err(text);
            assert!(error.to_string().contains("hyphens"), "{error}");
        }
    }

    #[test]
    fn only_what_kubernetes_takes_is_a_volume() {
        let longest = "v".repeat(VOLUME_MAX);
        for name in ["imds-token", "cloudinit-udata", "v1.2", &longest] {
            assert!(is_volume(name), "{name}");
        }
        for name in ["", ".", "..", "..data", ".a", "a/b", "A", "a_b", "a\0", &"v".repeat(VOLUME_MAX + 1)] {
            assert!(!is_volume(name), "{name}");
        }
    }

    #[test]
    fn the_primary_network_has_fixed_names() {
        let names = names_of("default", None);
        assert_eq!(names.len(), 1);
        assert_eq!((&*names[0].tap, &*names[0].bridge), ("tap0", "k6t-eth0"));
    }

    #[test]
    fn secondary_networks_are_named_by_hash_and_formerly_by_number() {
        // printf blue | sha256sum
        let names = names_of("blue", Some(2));
        let all: Vec<_> = names.iter().map(|n| (&*n.pod, &*n.tap, &*n.bridge)).collect();
        assert_eq!(
            all,
            [("pod16477688c0e", "tap16477688c0e", "k6t-16477688c0e"), ("net2", "tap2", "k6t-net2")]
        );
        for name in names.iter().flat_map(|names| [&names.pod, &names.tap, &names.bridge]) {
            assert!(name.len() <= 15, "{name}");
        }
    }
}
