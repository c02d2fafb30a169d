//! Finds a pod's virt-launcher, the process that gives access to the pod's namespaces.
//!
//! There are two ways. The launcher listens on a socket in one of the pod's directories, and the kernel names the
//! listener (`SO_PEERCRED`). It is also among the processes of the pod's control group. The first way needs permission
//! to connect, which for another user's socket is `CAP_DAC_OVERRIDE`. The second works if the node's control groups are
//! mounted.
//!
//! Both ways open a pidfd before they read the process's control group, and check afterwards that the process still
//! runs. So the pidfd and the group belong to one process, and the PID cannot mean another process ([`Meant`]).

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

use tokio::net::UnixStream;

use super::cgroup::{self, Index};
use super::volumes::directory;
use super::{PodUid, VolumeError};
use metadata_links::error::LinkError;
use metadata_links::processes::Meant;

/// The directory of the launcher's socket, below the pod's directory.
const SOCKETS: &str = "volumes/kubernetes.io~empty-dir/sockets";
const SOCKET: &str = "launcher-sock";
/// The names of the launcher and of its parent, cut to fifteen octets.
const NAMES: [&str; 2] = ["virt-launcher", "virt-launcher-m"];

/// A running process that belongs to the pod.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    pub(super) meant: Meant,
}

/// Why neither way found a launcher.
#[derive(Debug, thiserror::Error)]
#[error("by its socket: {socket}; by its control group: {group}")]
pub(super) struct Absent {
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
pub(super) fn find(pods: &Path, index: &Mutex<Index>, pod: &PodUid) -> Result<Launcher, Absent> {
    let by_socket = listener(pods, pod).and_then(|pid| hold(pid, pod));
    by_socket.or_else(|socket| {
        by_group(index, pod).map_err(|group| Absent { socket: socket.into(), group: group.into() })
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
    // The path may exceed an address's 108 octets, and the pod may replace the file.
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
    let meant = Meant::of(pid)?.ok_or(Reason::Ended)?;
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
