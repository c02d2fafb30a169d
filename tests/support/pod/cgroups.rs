//! Control groups of pods, as kubelet makes them: real ones, in a corner of the machine's tree.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::eventually::eventually;

/// Longest a group may stay busy once its processes have ended.
const PATIENCE: Duration = Duration::from_secs(5);

/// How kubelet names groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `kubepods-burstable-pod<uid>.slice`, with underscores.
    Systemd,
    /// `pod<uid>`.
    Cgroupfs,
}

/// A corner of the tree of control groups (version 2). Dropping it removes it.
#[derive(Debug)]
pub struct Cgroups {
    root: PathBuf,
}

impl Cgroups {
    /// Makes one.
    ///
    /// # Errors
    /// Where there is no such tree, or it cannot be written to.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = mounted()?.join(format!("xdp-imds-{}-{number}", std::process::id()));
        fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
        Ok(Self { root })
    }

    /// What keeps tests from making groups, if anything does.
    #[must_use]
    pub fn missing() -> Option<String> {
        Self::new().err().map(|error| format!("it cannot make control groups: {error:#}"))
    }

    /// Where it is.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Puts a process into a container of a pod.
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
            eprintln!("control groups at {} stay behind: {error:#}", self.root.display());
        }
    }
}

/// Groups are removed by rmdir(2), from the innermost: what looks like files in them is not removed.
fn remove(group: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

/// Where version 2 is mounted (proc_pid_mountinfo(5)).
fn mounted() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let line = mounts.lines().find(|line| line.contains(" - cgroup2 ")).context("no cgroup2 is mounted")?;
    Ok(line.split(' ').nth(4).context("a mount without a place")?.into())
}
