//! A virt-launcher pod as its node sees it: a network namespace with a tap, a listening launcher process, the volumes
//! that kubelet has written, and a control group named by the pod's uid.
//!
//! ```text
//!  node's namespace        pod's namespace, masquerade          pod's namespace, bridge
//!  ┌──────────────┐        ┌──────────────────────────┐         ┌─────────────────────────────┐
//!  │ veth7 ───────┼────────┼─ eth0     k6t-eth0 ─ tap0│         │ eth0-nic ─ k6t-eth0 ─ tap0  │
//!  └──────────────┘        └──────────────────────────┘         │ eth0 (dummy, the pod's MAC) │
//!                                                               └─────────────────────────────┘
//! ```
//!
//! The node's end of the veth pair is deleted with the pod's namespace. Tests use this to detect the end of the
//! namespace.
#![expect(unsafe_code, reason = "the child must listen between fork and exec")]

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use metadata_feed::pods::NicNames;
use metadata_links::mounts::{self, MountEntry};
use std::fs::Permissions;
use std::io::{PipeReader, PipeWriter};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use std::{fs, io};

use crate::eventually;
use crate::netns::{self, Namespace};
use crate::privilege::QEMU;
use crate::tap::{Shape, Tap};

/// The UID of the VMI that a pod's stand-in runs, unless the test chooses another.
#[must_use]
pub fn vmi_uid(pod: &str) -> String {
    format!("vmi-{pod}")
}

/// A uid that no other pod of this test run has.
#[must_use]
pub fn fresh_uid() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:08x}-8a55-4c8e-9d53-{number:012x}", std::process::id())
}

// Control groups of pods as kubelet creates them, below a separate group of this machine.

/// Limit for retries of a group's removal, which fails while its processes end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The cgroup driver of kubelet, which decides how groups are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `kubepods-burstable-pod<uid>.slice`, with underscores.
    Systemd,
    /// `pod<uid>`.
    Cgroupfs,
}

/// A control group (version 2) that contains the pods' groups. Dropping it removes all of them.
#[derive(Debug)]
pub struct Cgroups {
    root: PathBuf,
}

impl Cgroups {
    /// Creates the group.
    ///
    /// # Errors
    /// When no cgroup2 is mounted, or it is not writable.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = mounted()?.join(format!("xdp-imds-{}-{number}", std::process::id()));
        fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
        Ok(Self { root })
    }

    /// The reason why tests cannot create groups, if there is one.
    #[must_use]
    pub fn missing() -> Option<String> {
        Self::new().err().map(|error| format!("it cannot make control groups: {error:#}"))
    }

    /// The path of the group.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Moves a process into the group of a pod's container.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn put(&self, driver: Driver, uid: &str, pid: u32) -> Result<()> {
        let container = self.root.join(match driver {
            Driver::Systemd => {
                let uid = uid.replace('-', "_");
                format!(
                    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/\
                     cri-containerd-0123.scope/container"
                )
            }
            Driver::Cgroupfs => format!("kubepods/besteffort/pod{uid}/0123"),
        });
        fs::create_dir_all(&container).with_context(|| format!("cannot make {}", container.display()))?;
        fs::write(container.join("cgroup.procs"), pid.to_string())
            .with_context(|| format!("cannot put process {pid} into {}", container.display()))
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        if let Err(error) = eventually(PATIENCE, || Ok(remove(&self.root)?)) {
            eprintln!("cannot remove the control groups at {}: {error:#}", self.root.display());
        }
    }
}

/// Removes a group and those below it by rmdir(2), innermost first. The files in a group need not be deleted.
fn remove(group: &Path) -> io::Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

/// The mount point of cgroup version 2 (proc_pid_mountinfo(5)).
fn mounted() -> Result<PathBuf> {
    let mounts = fs::read_to_string(mounts::OWN)?;
    let mount = MountEntry::all(&mounts).find(|mount| mount.kind == "cgroup2");
    Ok(mount.context("no cgroup2 is mounted")?.at)
}

// A simulated kubelet directory of pods, with volumes in kubelet's layout.

/// The volume plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// A Secret.
    Secret,
    /// A ConfigMap.
    ConfigMap,
    /// A projected volume, for example of service account tokens.
    Projected,
}

impl Plugin {
    const fn directory(self) -> &'static str {
        match self {
            Self::Secret => "kubernetes.io~secret",
            Self::ConfigMap => "kubernetes.io~configmap",
            Self::Projected => "kubernetes.io~projected",
        }
    }
}

/// A directory of pods.
#[derive(Debug)]
pub struct Kubelet {
    room: tempfile::TempDir,
    count: AtomicU32,
}

impl Kubelet {
    /// An empty directory.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn new() -> Result<Self> {
        Ok(Self { room: tempfile::tempdir()?, count: AtomicU32::new(0) })
    }

    /// The path of the directory; on a node it is `/var/lib/kubelet/pods`.
    #[must_use]
    pub fn pods(&self) -> &Path {
        self.room.path()
    }

    /// The path of a volume.
    #[must_use]
    pub fn volume(&self, uid: &str, plugin: Plugin, name: &str) -> PathBuf {
        self.pods().join(uid).join("volumes").join(plugin.directory()).join(name)
    }

    /// The directory of a pod's launcher socket; creates it if necessary.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn sockets(&self, uid: &str) -> Result<PathBuf> {
        let path = self.pods().join(uid).join("volumes/kubernetes.io~empty-dir/sockets");
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// Writes or replaces a volume by one rename, like kubelet's atomic writer.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, uid: &str, plugin: Plugin, name: &str, keys: &[(&str, &[u8])]) -> Result<()> {
        let volume = self.volume(uid, plugin, name);
        let dir = format!("..2026_05_01_10_00_00.{}", self.count.fetch_add(1, Ordering::Relaxed));
        let before = fs::read_link(volume.join("..data")).ok();
        fs::create_dir_all(volume.join(&dir)).with_context(|| format!("cannot make {}", volume.display()))?;
        for (key, bytes) in keys {
            fs::write(volume.join(&dir).join(key), bytes)?;
        }
        symlink(&dir, volume.join("..data_tmp"))?;
        fs::rename(volume.join("..data_tmp"), volume.join("..data"))?;
        for (key, _) in keys {
            match symlink(format!("..data/{key}"), volume.join(key)) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
                _ => {}
            }
        }
        if let Some(before) = before {
            fs::remove_dir_all(volume.join(before))?;
        }
        Ok(())
    }

    /// Removes the directory of a pod.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn remove(&self, uid: &str) -> Result<()> {
        Ok(fs::remove_dir_all(self.pods().join(uid))?)
    }
}

// A stand-in for virt-launcher: a process of that name in a pod's namespace and control group. It listens on the
// launcher's socket, and its command line names its VMI as KubeVirt's does.

/// What a stand-in executes: it reads [`INPUT`]. The shell does that itself, so no other process keeps the pod's
/// namespace.
const SCRIPT: &str = "read -r end";
/// The input of all stand-ins. Nobody writes to it, and it ends with this process.
static INPUT: LazyLock<(PipeReader, PipeWriter)> = LazyLock::new(|| io::pipe().expect("a pipe"));
/// File name of the socket.
const SOCKET: &[u8] = b"launcher-sock";

/// Properties by which the agent finds a stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct How {
    /// Whether it listens on its socket.
    pub listens: bool,
    /// Driver of its pod's control group; `None` leaves it in the test's group.
    pub group: Option<Driver>,
    /// The process name.
    pub name: &'static str,
    /// Whether its command line names its VMI.
    pub names_vmi: bool,
}

impl Default for How {
    /// The properties of a launcher on a node with systemd.
    fn default() -> Self {
        Self { listens: true, group: Some(Driver::Systemd), name: "virt-launcher", names_vmi: true }
    }
}

/// A running stand-in. It runs as the user of KubeVirt's guests. Dropping it kills the process.
#[derive(Debug)]
pub struct Launcher {
    child: Child,
    /// Directory of the symlink that gives the process its name.
    _room: tempfile::TempDir,
}

impl Launcher {
    /// Starts a stand-in in a pod's namespace. It runs the VMI of [`vmi_uid`].
    ///
    /// # Errors
    /// When it cannot be started, or cannot listen.
    pub fn start(ns: &Namespace, kubelet: &Kubelet, cgroups: &Cgroups, uid: &str, how: How) -> Result<Self> {
        Self::start_for(&vmi_uid(uid), ns, kubelet, cgroups, uid, how)
    }

    /// Like [`Launcher::start`], for the VMI of the UID `vmi`.
    ///
    /// # Errors
    /// The errors of [`Launcher::start`].
    pub fn start_for(
        vmi: &str,
        ns: &Namespace,
        kubelet: &Kubelet,
        cgroups: &Cgroups,
        uid: &str,
        how: How,
    ) -> Result<Self> {
        let room = tempfile::tempdir()?;
        fs::set_permissions(room.path(), Permissions::from_mode(0o755))?;
        let program: PathBuf = room.path().join(how.name);
        symlink("/bin/sh", &program)?;
        let sockets = kubelet.sockets(uid)?;
        fs::set_permissions(kubelet.pods(), Permissions::from_mode(0o755))?;
        chown(&sockets, Some(QEMU), Some(QEMU))?;
        let mut command = Command::new(&program);
        command.args(["-c", SCRIPT, how.name, "--qemu-timeout", "242s", "--name", "vm"]);
        if how.names_vmi {
            command.args(["--uid", vmi]);
        }
        command.args(["--namespace", "shop"]).uid(QEMU).gid(QEMU).current_dir(&sockets);
        command.stdin(INPUT.0.try_clone()?).stdout(Stdio::null()).stderr(Stdio::inherit());
        if how.listens {
            let _ = fs::remove_file(sockets.join("launcher-sock"));
            // SAFETY: between fork and exec, `listen` only makes system calls.
            unsafe { command.pre_exec(listen) };
        }
        let child = ns.spawn(&mut command).context("cannot start the launcher's stand-in")?;
        let launcher = Self { child, _room: room };
        if let Some(driver) = how.group {
            cgroups.put(driver, uid, launcher.pid())?;
        }
        ensure!(!how.listens || sockets.join("launcher-sock").exists(), "the stand-in does not listen");
        Ok(launcher)
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The path of its network namespace in the form that records use.
    #[must_use]
    pub fn netns(&self) -> String {
        format!("/proc/{}/ns/net", self.pid())
    }

    /// Kills it and waits for its end.
    ///
    /// # Errors
    /// When it had already ended.
    pub fn end(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the stand-in had already ended");
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // After a successful wait, `kill` sends no signal.
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            eprintln!("cannot stop process {}: {error}", self.child.id());
        }
    }
}

/// Listens on [`SOCKET`] in the working directory, with a descriptor that stays open across `exec`.
fn listen() -> io::Result<()> {
    // SAFETY: socket takes no pointers.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) };
    // SAFETY: sockaddr_un is plain data, and all zeros are a valid value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(SOCKET) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is of the length stated and outlives the call.
    let bound = unsafe { libc::bind(socket, (&raw const address).cast(), length) };
    // SAFETY: listen takes no pointers.
    let listens = unsafe { libc::listen(socket, 8) };
    if bound == 0 && listens == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

// A pod's network with the bridges, taps and dummies that KubeVirt creates (its `pkg/network/setup/netpod`).

/// How a guest's NIC is connected to the pod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// A bridge that has the guest's gateway address and KubeVirt's fixed MAC. The pod NIC does not change.
    Masquerade,
    /// The pod NIC is renamed and added to the bridge; a dummy takes its name and MAC.
    Bridge,
}

/// A pod's namespace, connected by veth pairs to the node's namespace.
#[derive(Debug)]
pub struct PodNetwork<'a> {
    ns: Namespace,
    node: &'a Namespace,
}

impl<'a> PodNetwork<'a> {
    /// A namespace without a NIC.
    ///
    /// # Errors
    /// As for [`Namespace::new`].
    pub fn new(node: &'a Namespace) -> Result<Self> {
        Ok(Self { ns: Namespace::new("pod")?, node })
    }

    /// The pod's namespace.
    #[must_use]
    pub fn ns(&self) -> &Namespace {
        &self.ns
    }

    /// Adds a pod NIC, like a CNI plugin. Returns the name of the node's end.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn add_nic(&self, names: &NicNames, mac: Mac) -> Result<String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let outer = format!("veth{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let NicNames { pod, .. } = names;
        let inside = self.ns.name();
        self.node.ip(&format!("link add {outer} type veth peer name {pod} netns {inside}"))?;
        self.ns.ip_batch(&format!("link set {pod} address {mac}\nlink set {pod} up\n"))?;
        self.node.ip(&format!("link set {outer} up"))?;
        Ok(outer)
    }

    /// Connects a guest's NIC to a pod NIC: creates the bridge and the tap, and returns the tap.
    ///
    /// # Errors
    /// When there is no such pod NIC, or a name is taken.
    pub fn bind(&self, names: &NicNames, binding: Binding, shape: Shape) -> Result<Arc<Tap>> {
        let NicNames { pod, tap, bridge } = names;
        match binding {
            Binding::Masquerade => self.ns.ip_batch(&format!(
                "link add {bridge} address 02:00:00:00:00:00 type bridge\n\
                 addr add 10.0.2.1/24 dev {bridge}\n\
                 link set {bridge} up\n"
            ))?,
            Binding::Bridge => {
                let mac = self.mac(pod)?;
                // A hashed name has the prefix `pod`. The new name omits it, because it would be too long.
                let moved = format!("{}-nic", pod.strip_prefix("pod").unwrap_or(pod));
                self.ns.ip_batch(&format!(
                    "link set {pod} down\n\
                     link set {pod} name {moved}\n\
                     link add {bridge} type bridge\n\
                     link set {moved} master {bridge}\n\
                     link set {moved} up\n\
                     link set {moved} type bridge_slave learning off\n\
                     addr add 169.254.75.10/32 dev {bridge}\n\
                     link set {bridge} up\n"
                ))?;
                let stand_in = |kind| self.ns.ip(&format!("link add {pod} address {mac} type {kind}"));
                // The kernel may lack dummies. Only the name and the MAC matter.
                stand_in("dummy").or_else(|_| stand_in("bridge"))?;
            }
        }
        let made = Tap::create(&self.ns, tap, shape)?;
        self.ns.ip(&format!("link set {tap} master {bridge} up"))?;
        Ok(Arc::new(made))
    }

    /// The MAC of a device.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn mac(&self, device: &str) -> Result<Mac> {
        let shown = self.ns.ip(&format!("-o link show {device}"))?;
        let mac = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1);
        Ok(mac.context("a device without a MAC")?.parse()?)
    }

    /// Removes the name of the namespace, which then ends with the last process in it.
    ///
    /// # Errors
    /// As for [`Namespace::remove`].
    pub fn leave_to_its_processes(self) -> Result<()> {
        self.ns.remove()
    }
}

/// Whether a device exists in a namespace.
#[must_use]
pub fn is_there(ns: &Namespace, device: &str) -> bool {
    ns.run_in(|| netns::run(Command::new("ip").args(["link", "show", device]))).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Kubelet, Plugin};

    #[test]
    fn a_rewritten_volume_has_only_the_new_content() {
        let kubelet = Kubelet::new().expect("a directory");
        for turn in [b"1".as_slice(), b"2"] {
            kubelet.write("uid", Plugin::Secret, "data", &[("key", turn)]).expect("written");
            let volume = kubelet.volume("uid", Plugin::Secret, "data");
            assert_eq!(fs::read(volume.join("key")).expect("a key"), turn);
            let names = fs::read_dir(&volume).expect("listed").count();
            assert_eq!(names, 3, "one directory, `..data` and one key");
        }
        kubelet.remove("uid").expect("removed");
        assert_eq!(fs::read_dir(kubelet.pods()).expect("listed").count(), 0);
    }
}
