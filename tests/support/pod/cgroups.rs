//! Control groups of pods as kubelet creates them, below a separate group of this machine.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::eventually::eventually;

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
fn remove(group: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

/// The mount point of cgroup version 2 (proc_pid_mountinfo(5)).
fn mounted() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let line = mounts.lines().find(|line| line.contains(" - cgroup2 ")).context("no cgroup2 is mounted")?;
    Ok(line.split(' ').nth(4).context("a mount without a mount point")?.into())
}
