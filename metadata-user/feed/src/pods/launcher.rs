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
//!
//! KubeVirt's controller starts every launcher with `--name NAME --uid UID --namespace NAMESPACE` of its VMI, and
//! virt-launcher-monitor passes these arguments on. A process without a `--uid` is not a launcher, or not one yet: a
//! process that was just forked shows the command line of its parent until it executes its program.

use metadata_content::record::values::is_uuid;
use metadata_links::error::LinkError;
use metadata_links::netns::NamespaceReservation;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};
use tokio::net::UnixStream;

use super::volumes::directory;
use super::{PodUid, VolumeError, is_uid};

/// The directory of the launcher's socket, below the pod's directory.
const SOCKETS: &str = "volumes/kubernetes.io~empty-dir/sockets";
const SOCKET: &str = "launcher-sock";
/// The names of the launcher and of its parent, cut to fifteen bytes.
const NAMES: [&str; 2] = ["virt-launcher", "virt-launcher-m"];
/// The argument of the launcher with the UID of its VMI.
const UID_ARGUMENT: &str = "--uid";
/// Most bytes of a command line to read. KubeVirt's has a few hundred before the values that a tenant may choose.
const COMMAND_LINE: u64 = 16 << 10;

/// A running process that belongs to the pod.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) pid: u32,
    /// The UID of the VMI that it runs.
    pub(super) vmi: String,
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
    #[error("connecting is refused: {0}; a socket of another user needs CAP_DAC_OVERRIDE")]
    Refused(io::Error),
    #[error("the listener is in another process namespace; the agent needs `hostPID: true`")]
    Unseen,
    #[error("process {pid} is not in the pod's control group{}", found.as_ref().map(|pod| format!(", but in that of pod {pod}")).unwrap_or_default())]
    Foreign { pid: u32, found: Option<PodUid> },
    #[error(
        "expected `{UID_ARGUMENT}` and the UID of a VMI on the command line of process {pid}, found none; KubeVirt \
         starts each launcher with them"
    )]
    Unnamed { pid: u32 },
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
    for pid in processes(&group) {
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
    let line =
        command_line(pid).map_err(Reason::io(format!("cannot read the command line of process {pid}")));
    let meant = NamespaceReservation::of(pid)?.ok_or(Reason::Ended)?;
    // If it has ended, what was read may belong to another process.
    if has_ended(&pidfd).map_err(Reason::io(format!("cannot check process {pid}")))? {
        return Err(Reason::Ended);
    }
    match pod_of(&groups?) {
        Some(found) if found == *pod => {}
        found => return Err(Reason::Foreign { pid, found }),
    }
    let vmi = vmi_of(&line?).ok_or(Reason::Unnamed { pid })?;
    Ok(Launcher { pid, vmi, pidfd, meant })
}

/// The start of a process's command line.
fn command_line(pid: u32) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    fs::File::open(format!("/proc/{pid}/cmdline"))?.take(COMMAND_LINE).read_to_end(&mut line)?;
    Ok(line)
}

/// The UID of the VMI that a launcher runs, from its `/proc/PID/cmdline` (proc_pid_cmdline(5)). The first `--uid`
/// counts: a value that follows may be a tenant's, such as that of `--libvirt-log-filters`.
pub(super) fn vmi_of(line: &[u8]) -> Option<String> {
    let mut words = line.split(|byte| *byte == 0).map(|word| std::str::from_utf8(word).unwrap_or_default());
    let uid = loop {
        match words.next()?.strip_prefix(UID_ARGUMENT) {
            Some("") => break words.next()?,
            Some(rest) => {
                if let Some(uid) = rest.strip_prefix('=') {
                    break uid;
                }
            }
            None => {}
        }
    };
    is_uid(uid).then(|| uid.to_owned())
}

/// A pidfd is readable once its process has ended (pidfd_open(2)).
fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let mut look = [PollFd::new(pidfd, PollFlags::IN)];
    Ok(poll(&mut look, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
}

// Finds the processes of a pod: kubelet gives each pod a control group with its UID in the name.
//
// With the systemd driver the name is `…-pod<uid>.slice`, with underscores for the UID's hyphens. With kubelet's own
// driver it is `pod<uid>`. Containers have groups below it, and may create more. So the pod of a path is that of the first
// group with a pod's name.

/// Most groups above pods to search.
pub(super) const GROUPS_ABOVE: usize = 1_024;
/// Deepest level to search; `kubelet.slice/…/kubepods.slice/kubepods-burstable.slice/` has four.
const DEPTH_ABOVE: usize = 6;
/// Most groups of one pod to search.
pub(super) const GROUPS_BELOW: usize = 256;
/// Most processes of one pod to examine.
pub(super) const PROCESSES: usize = 4_096;
/// How long the result of a walk is reused, so that one walk serves many pods that start at once.
const FRESH: Duration = Duration::from_millis(50);

/// The pod of a group, from the group's name.
pub(super) fn pod_named(group: &str) -> Option<PodUid> {
    let uid = match group.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod").map(|(_, uid)| uid)?.replace('_', "-"),
        None => group.strip_prefix("pod")?.to_owned(),
    };
    // `podman`, `podruntime` and others are not pods: a UID is a UUID or a hex hash.
    let is_hash = uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_uuid(&uid) || is_hash { uid.parse().ok() } else { None }
}

/// The pod of a process, from its `/proc/PID/cgroup` (cgroups(7)).
pub(super) fn pod_of(groups: &str) -> Option<PodUid> {
    // Version 1 has one line per hierarchy, and those that kubelet uses agree.
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.filter_map(|path| path.split('/').find_map(pod_named)).next()
}

/// The index of the pods' groups.
#[derive(Debug)]
pub(super) struct Index {
    root: PathBuf,
    pods: HashMap<PodUid, PathBuf>,
    walked: Option<Instant>,
}

impl Index {
    /// Creates the index of the hierarchy mounted there, usually `/sys/fs/cgroup`.
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root, pods: HashMap::new(), walked: None }
    }

    /// The group of a pod, if one exists. For an unknown pod the result may be [`FRESH`] old.
    pub(super) fn group(&mut self, pod: &PodUid) -> io::Result<Option<PathBuf>> {
        if let Some(known) = self.pods.get(pod).filter(|group| group.is_dir()) {
            return Ok(Some(known.clone()));
        }
        if self.walked.is_none_or(|walked| walked.elapsed() >= FRESH) {
            self.pods = walk(&self.root)?;
            self.walked = Some(Instant::now());
        }
        Ok(self.pods.get(pod).cloned())
    }
}

/// Finds the groups of all pods. It skips those of containers and services.
fn walk(root: &Path) -> io::Result<HashMap<PodUid, PathBuf>> {
    let mut pods = HashMap::new();
    let mut level = vec![root.to_owned()];
    let mut groups = 0;
    for _ in 0..DEPTH_ABOVE {
        let mut below = Vec::new();
        for group in level {
            groups += 1;
            if groups > GROUPS_ABOVE {
                let root = root.display();
                tracing::debug!(%root, "more than {GROUPS_ABOVE} control groups: pods in others are not found");
                return Ok(pods);
            }
            match children(&group) {
                Ok(children) => {
                    for (name, path) in children {
                        match pod_named(&name) {
                            Some(pod) => _ = pods.entry(pod).or_insert(path),
                            None if name.ends_with(".scope") || name.ends_with(".service") => {}
                            None => below.push(path),
                        }
                    }
                }
                Err(error) if group == root => return Err(error),
                // The group was removed during the walk.
                Err(_) => {}
            }
        }
        level = below;
    }
    Ok(pods)
}

/// The groups directly in a group, by name.
fn children(group: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let entries = fs::read_dir(group)?.filter_map(Result::ok);
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(groups.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect())
}

/// The processes in a pod's group and below, the lowest PID first.
pub(super) fn processes(group: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    let mut to_see = vec![group.to_owned()];
    let mut seen = 0;
    while let Some(group) = to_see.pop() {
        seen += 1;
        if seen > GROUPS_BELOW || found.len() >= PROCESSES {
            break;
        }
        match fs::read_to_string(group.join("cgroup.procs")) {
            // 0 is a process of another PID namespace.
            Ok(list) => {
                found.extend(list.lines().filter_map(|line| line.parse::<u32>().ok()).filter(|pid| *pid != 0))
            }
            // A threaded group: its threads belong to a process in a group above.
            Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {}
            Err(_) => continue,
        }
        to_see.extend(children(&group).into_iter().flatten().map(|(_, path)| path));
    }
    found.sort_unstable();
    found.truncate(PROCESSES);
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{GROUPS_ABOVE, GROUPS_BELOW, Index, PROCESSES, pod_named, pod_of, processes, vmi_of};
    use crate::pods::PodUid;

    const UID: &str = "6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11";
    const SLICE: &str = "kubepods-burstable-pod6f1b0c1e_8a55_4c8e_9d53_0a5a3f0e7b11.slice";

    fn uid() -> PodUid {
        UID.parse().expect("a uid")
    }

    #[test]
    fn groups_of_pods_are_known_by_name_and_no_others() {
        for name in [SLICE, &format!("pod{UID}"), &SLICE.replace("burstable-", "")] {
            assert_eq!(pod_named(name), Some(uid()), "{name}");
        }
        let hash = "0d1c5b0f9f0f4f5f8c9e0a1b2c3d4e5f";
        assert_eq!(pod_named(&format!("pod{hash}")).expect("a static pod").as_str(), hash);
        for name in
            ["", "pod", "podman", "podruntime.slice", "kubepods.slice", "a-podman.slice", UID, "pod../x"]
        {
            assert_eq!(pod_named(name), None, "{name}");
        }
    }

    #[test]
    fn a_process_belongs_to_the_first_pod_on_its_path() {
        let other = "11111111-2222-3333-4444-555555555555";
        for (groups, pod) in [
            (
                format!("0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-1.scope\n"),
                Some(UID),
            ),
            (format!("0::/kubepods/besteffort/pod{UID}/0123/container\n"), Some(UID)),
            // The path as another cgroup namespace shows it.
            (format!("0::/../../{SLICE}/crio-1.scope/container\n"), Some(UID)),
            // A container cannot claim another pod by creating groups within its own.
            (format!("0::/kubepods/pod{other}/1/pod{UID}\n"), Some(other)),
            (
                format!("12:cpu,cpuacct:/kubepods/pod{UID}/1\n1:name=systemd:/kubepods/pod{UID}/1\n0::/\n"),
                Some(UID),
            ),
            ("0::/system.slice/containerd.service\n".into(), None),
            (format!("0::/user.slice/x{UID}\n"), None),
            (String::new(), None),
        ] {
            assert_eq!(pod_of(&groups).as_ref().map(PodUid::as_str), pod, "{groups}");
        }
    }

    #[test]
    fn the_first_uid_of_a_command_line_is_that_of_the_launchers_vmi() {
        let vmi = "805a71d5-1523-4a06-bc33-9ccc212c819e";
        let since_1_9 = format!(
            "/usr/bin/virt-launcher --qemu-timeout 242s --name mac-1 --uid {vmi} --namespace default \
             --kubevirt-share-dir /var/run/kubevirt --hypervisor kvm --run-as-nonroot"
        );
        let with_tini =
            format!("/usr/bin/tini -- /usr/bin/virt-launcher-monitor --name a --uid {vmi} --namespace b");
        for (line, found) in [
            (since_1_9, Some(vmi)),
            (with_tini, Some(vmi)),
            (format!("virt-launcher --uid={vmi} --namespace b"), Some(vmi)),
            // The value of a VMI's annotation.
            (format!("virt-launcher --name a --uid {vmi} --libvirt-log-filters --uid=other"), Some(vmi)),
            ("virt-launcher --name a --namespace b".into(), None),
            ("virt-launcher --uids other".into(), None),
            ("virt-launcher --uid".into(), None),
            ("virt-launcher --uid=".into(), None),
            ("virt-launcher --uid ../x".into(), None),
            (format!("virt-launcher --uid {}", "a".repeat(65)), None),
            (String::new(), None),
        ] {
            assert_eq!(vmi_of(line.replace(' ', "\0").as_bytes()).as_deref(), found, "{line}");
        }
        assert_eq!(vmi_of(b"virt-launcher\0\xff\0--uid\0a\0").as_deref(), Some("a"));
    }

    #[test]
    fn a_pods_processes_are_found_in_all_its_groups_whichever_driver_made_them() {
        for below in [
            format!("kubepods.slice/kubepods-burstable.slice/{SLICE}"),
            format!("kubepods/besteffort/pod{UID}"),
            format!("kubelet.slice/kubelet-kubepods.slice/{}", SLICE.replace("kubepods", "kubelet-kubepods")),
        ] {
            let root = tempfile::tempdir().expect("a directory");
            let group = root.path().join(&below);
            for (container, list) in
                [("cri-1.scope", "7\n5\n"), ("cri-2.scope/container", "6\n0\n"), ("", "")]
            {
                fs::create_dir_all(group.join(container)).expect("a group");
                fs::write(group.join(container).join("cgroup.procs"), list).expect("written");
            }
            fs::write(group.join("cri-2.scope").join("cgroup.procs"), "").expect("written");
            let mut index = Index::new(root.path().into());
            let found = index.group(&uid()).expect("readable").expect("a group");
            assert_eq!(processes(&found), [5, 6, 7], "{below}");
        }
    }

    #[test]
    fn the_next_walk_finds_new_pods_and_forgets_removed_ones() {
        let root = tempfile::tempdir().expect("a directory");
        let mut index = Index::new(root.path().into());
        assert_eq!(index.group(&uid()).expect("readable"), None);
        let group = root.path().join("kubepods").join(format!("pod{UID}"));
        fs::create_dir_all(&group).expect("a group");
        index.walked = None;
        assert_eq!(index.group(&uid()).expect("readable"), Some(group.clone()));
        fs::remove_dir(&group).expect("removed");
        index.walked = None;
        assert_eq!(index.group(&uid()).expect("readable"), None);
        let mut nowhere = Index::new(root.path().join("nowhere"));
        nowhere.group(&uid()).expect_err("no such directory");
    }

    #[test]
    fn walks_end_at_their_limits() {
        let root = tempfile::tempdir().expect("a directory");
        for n in 0..=GROUPS_ABOVE {
            fs::create_dir_all(root.path().join(format!("aaa/{n}"))).expect("a group");
        }
        let beyond = root.path().join("aaa").join("0").join("b").join("kubepods").join(format!("pod{UID}"));
        fs::create_dir_all(beyond).expect("a group");
        assert_eq!(Index::new(root.path().into()).group(&uid()).expect("readable"), None);

        let pod = tempfile::tempdir().expect("a directory");
        let list: String = (1..=PROCESSES + 1).rev().map(|pid| format!("{pid}\n")).collect();
        fs::write(pod.path().join("cgroup.procs"), list).expect("written");
        let found = processes(pod.path());
        assert_eq!((found.len(), found.last()), (PROCESSES, Some(&(PROCESSES as u32))));

        let pod = tempfile::tempdir().expect("a directory");
        fs::write(pod.path().join("cgroup.procs"), "").expect("written");
        for n in 0..GROUPS_BELOW + 9 {
            let group = pod.path().join(n.to_string());
            fs::create_dir(&group).expect("a group");
            fs::write(group.join("cgroup.procs"), format!("{}\n", n + 1)).expect("written");
        }
        assert_eq!(processes(pod.path()).len(), GROUPS_BELOW - 1);
    }
}
