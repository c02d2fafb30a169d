//! Runs the agent with few privileges: as another user, with a few capabilities, and without a way to gain others.

use crate::agent::{self, Agent};
use crate::netns::{Namespace, run};
use anyhow::{Context as _, Result};
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The uid of `nobody` on most systems.
pub const NOBODY: u32 = 65_534;
/// The uid of KubeVirt's guests.
pub const QEMU: u32 = 107;

/// Mounts a /dev/net/tun that every user can open, as udev's default rule makes it. A mount namespace hides it from the
/// machine, and still receives mounts of network namespaces that are named later.
const WITH_TUN: &str =
    "mknod -m 666 \"$1\" c 10 200 && mount --bind \"$1\" /dev/net/tun && shift && exec \"$@\"";

/// The agent's user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// uid 0. At `execve` it has all capabilities of its bounding set.
    Root,
    /// uid 0 without its special treatment (`SECBIT_NOROOT`), with ambient capabilities.
    PlainRoot,
    /// Another user, with ambient capabilities, as systemd's `User=` and `AmbientCapabilities=` make it.
    Nobody,
}

impl User {
    /// The uid.
    #[must_use]
    pub fn uid(self) -> u32 {
        if self == Self::Nobody { NOBODY } else { 0 }
    }
}

/// A copy of the agent that every user can run, and a directory for the device node.
#[derive(Debug)]
pub struct Jail {
    room: tempfile::TempDir,
}

impl Jail {
    /// Copies the agent to a directory that other users can read.
    ///
    /// # Errors
    /// When it has not been built, or cannot be copied.
    pub fn new() -> Result<Self> {
        let room = tempfile::tempdir()?;
        fs::set_permissions(room.path(), Permissions::from_mode(0o755))?;
        let copy = room.path().join("xdp-imds");
        // A child copies it: see `write_script`.
        run(Command::new("cp").arg(agent::binary()?).arg(&copy)).context("cannot copy the agent")?;
        Ok(Self { room })
    }

    /// The agent's file.
    #[must_use]
    pub fn binary(&self) -> PathBuf {
        self.room.path().join("xdp-imds")
    }

    /// Starts the agent as a user with these capabilities (names in lower case, without `CAP_`), and waits until it
    /// serves. The bounding, permitted, inheritable and ambient sets have no others.
    ///
    /// # Errors
    /// As for [`Agent::start`].
    pub fn start<'a>(
        &self,
        ns: &'a Namespace,
        user: User,
        capabilities: &[&str],
        words: Vec<OsString>,
    ) -> Result<Agent<'a>> {
        let node = self.room.path().join("tun");
        if node.exists() {
            fs::remove_file(&node)?;
        }
        let few = capabilities.iter().fold("-all".to_owned(), |list, one| format!("{list},+{one}"));
        let mut all: Vec<OsString> =
            ["--mount", "--propagation", "slave", "sh", "-ec", WITH_TUN, "sh"].map(OsString::from).to_vec();
        all.extend([node.into(), "setpriv".into(), "--clear-groups".into()]);
        if user == User::Nobody {
            all.extend(["--reuid", "65534", "--regid", "65534"].map(OsString::from));
        }
        if user == User::PlainRoot {
            all.push("--securebits=+noroot,+noroot_locked,+no_setuid_fixup".into());
        }
        all.extend([format!("--bounding-set={few}").into(), format!("--inh-caps={few}").into()]);
        if user != User::Root {
            all.push(format!("--ambient-caps={few}").into());
        }
        all.push(self.binary().into());
        all.extend(words);
        // Each program executes the next one by `execve`, so the started process becomes the agent.
        Agent::start_binary(Path::new("unshare"), ns, all)
    }
}

/// The effective capabilities of each thread of a process, by the thread's name.
///
/// # Errors
/// When the process has ended.
pub fn effective(pid: u32) -> Result<Vec<(String, u64)>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim_start_matches(':').trim().to_owned())
                .with_context(|| format!("no {name} in {status}"))
        };
        threads.push((field("Name")?, u64::from_str_radix(&field("CapEff")?, 16)?));
    }
    Ok(threads)
}

/// A field of `/proc/PID/status`.
///
/// # Errors
/// When the process has ended, or the field is missing.
pub fn status(pid: u32, name: &str) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(|value| value.trim().to_owned()).with_context(|| format!("no {name} in {status}"))
}
