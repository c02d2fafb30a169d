//! A stand-in for virt-launcher: a process of that name in a pod's namespace and control group. It listens on the
//! launcher's socket.
#![expect(unsafe_code, reason = "the child must listen between fork and exec")]

use anyhow::{Context as _, Result, ensure};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::{Cgroups, Driver, Kubelet};
use crate::netns::Namespace;
use crate::privilege::QEMU;

/// Time limit of a stand-in in seconds, in case its test does not end it. The longest user is an hour of soak.
const LIFE: &str = "7200";
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
}

impl Default for How {
    /// The properties of a launcher on a node with systemd.
    fn default() -> Self {
        Self { listens: true, group: Some(Driver::Systemd), name: "virt-launcher" }
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
    /// Starts a stand-in in a pod's namespace.
    ///
    /// # Errors
    /// When it cannot be started, or cannot listen.
    pub fn start(ns: &Namespace, kubelet: &Kubelet, cgroups: &Cgroups, uid: &str, how: How) -> Result<Self> {
        let room = tempfile::tempdir()?;
        fs::set_permissions(room.path(), Permissions::from_mode(0o755))?;
        let program: PathBuf = room.path().join(how.name);
        symlink("/bin/sleep", &program)?;
        let sockets = kubelet.sockets(uid)?;
        fs::set_permissions(kubelet.pods(), Permissions::from_mode(0o755))?;
        chown(&sockets, Some(QEMU), Some(QEMU))?;
        let mut command = Command::new(&program);
        command.arg(LIFE).uid(QEMU).gid(QEMU).current_dir(&sockets);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
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
