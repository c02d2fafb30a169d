//! A stand-in for virt-launcher: a process of that name which lives in a pod's namespace and control group, and
//! listens on its socket.
#![expect(unsafe_code, reason = "the child has to listen by itself, between fork and exec")]

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

/// Longest a stand-in lives, should its test die before it, in seconds.
const LIFE: &str = "600";
/// The socket's name, in a directory of the pod's.
const SOCKET: &[u8] = b"launcher-sock";

/// How a stand-in is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct How {
    /// It listens on its socket.
    pub listens: bool,
    /// It is in a control group of its pod.
    pub group: Option<Driver>,
    /// What it is called.
    pub name: &'static str,
}

impl Default for How {
    /// As on a node with systemd.
    fn default() -> Self {
        Self { listens: true, group: Some(Driver::Systemd), name: "virt-launcher" }
    }
}

/// A running stand-in, of the user KubeVirt runs guests as. Dropping it ends it.
#[derive(Debug)]
pub struct Launcher {
    child: Child,
    /// Where the link is by which it has its name.
    _room: tempfile::TempDir,
}

impl Launcher {
    /// Starts one in a pod's namespace.
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
            // SAFETY: what it runs between fork and exec is system calls alone.
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

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its network namespace, as a record names it.
    #[must_use]
    pub fn netns(&self) -> String {
        format!("/proc/{}/ns/net", self.pid())
    }

    /// Ends it and waits until it has.
    ///
    /// # Errors
    /// When it had ended by itself.
    pub fn end(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the stand-in had ended by itself");
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // One that was waited for is not signalled again.
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            eprintln!("process {} stays behind: {error}", self.child.id());
        }
    }
}

/// Listens in the working directory, on a descriptor that `exec` keeps.
fn listen() -> io::Result<()> {
    // SAFETY: socket takes no memory of this process.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) };
    // SAFETY: sockaddr_un is plain data for which all zeroes is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(SOCKET) {
        *to = from.cast_signed();
    }
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is of the length stated and outlives the call.
    let bound = unsafe { libc::bind(socket, (&raw const address).cast(), length) };
    // SAFETY: listen takes no memory of this process.
    let listens = unsafe { libc::listen(socket, 8) };
    if bound == 0 && listens == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
