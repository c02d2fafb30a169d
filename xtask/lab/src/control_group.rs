//! Control groups for processes under measurement, in either version (Linux: Documentation/admin-guide/cgroup-v2.rst).

use anyhow::{Context as _, Result, bail};
use metadata_links::mounts::{MountEntry, OWN};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::eventually;

/// The longest time until a group without processes can be removed.
const REMOVED_WITHIN: Duration = Duration::from_secs(10);
/// Names of groups begin with this. The use of the group and the id of the process that made it follow.
const PREFIX: &str = "xdp-imds-lab-";

/// The version of control groups that has a controller on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CgroupVersion {
    V1,
    V2,
}

/// A control group. Removed on drop, which waits until no process is in it.
#[derive(Debug)]
pub(crate) struct ControlGroup {
    path: PathBuf,
    pub(crate) version: CgroupVersion,
}

impl ControlGroup {
    /// Makes a group of a controller, for the use `name`.
    ///
    /// # Errors
    /// Fails if this machine has no such controller.
    pub(crate) fn new(controller: &str, name: &str) -> Result<Self> {
        let (parent, version) = find(controller)?;
        sweep(&parent);
        let path = parent.join(format!("{PREFIX}{name}-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make the control group {}", path.display()))?;
        Ok(Self { path, version })
    }

    /// Makes a group whose processes share the processors with others by this weight, as in `cpu.weight`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn with_weight(name: &str, weight: u32) -> Result<Self> {
        let group = Self::new("cpu", name)?;
        match group.version {
            CgroupVersion::V1 => group.write("cpu.shares", &shares(weight).to_string())?,
            CgroupVersion::V2 => group.write("cpu.weight", &weight.to_string())?,
        }
        Ok(group)
    }

    /// The file that takes the ids of processes.
    pub(crate) fn processes(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Moves a process into the group.
    pub(crate) fn add(&self, pid: u32) -> Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    pub(crate) fn read(&self, file: &str) -> Result<String> {
        let path = self.path.join(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    pub(crate) fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        if let Err(error) = eventually(REMOVED_WITHIN, || Ok(fs::remove_dir(&self.path)?)) {
            eprintln!("cannot remove the control group {}: {error:#}", self.path.display());
        }
    }
}

/// Returns a weight in the unit of version 1. The kernel converts `cpu.weight` in the same way (Linux:
/// kernel/sched/core.c).
fn shares(weight: u32) -> u32 {
    (weight * 1_024 + 50) / 100
}

/// Removes groups whose maker was killed. A group with processes stays.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let name = name.strip_prefix(PREFIX).and_then(|name| name.rsplit_once('-'));
        let maker = name.and_then(|(_, pid)| pid.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // An agent that outlived its maker is in it; its group is removed once it ends.
            _ = fs::remove_dir(entry.path());
        }
    }
}

/// Returns a directory for groups of a controller.
fn find(controller: &str) -> Result<(PathBuf, CgroupVersion)> {
    let mounts: Vec<_> = MountEntry::all(&fs::read_to_string(OWN)?).collect();
    let has_controller = |root: &Path| {
        let controllers = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
        controllers.split_whitespace().any(|it| it == controller)
    };
    let v2 = mounts.iter().find(|mount| mount.kind == "cgroup2").filter(|mount| has_controller(&mount.at));
    let v1 = || mounts.iter().find(|mount| mount.kind == "cgroup" && mount.has(controller));
    let v2 = v2.map(|mount| (mount.at.clone(), CgroupVersion::V2));
    if let Some(found) = v2.or_else(|| v1().map(|mount| (mount.at.clone(), CgroupVersion::V1))) {
        return Ok(found);
    }
    bail!(
        "this machine has no control groups with the controller `{controller}`; mount cgroup2 with `+{controller}` in \
         the root's cgroup.subtree_control"
    )
}

#[cfg(test)]
mod tests {
    use super::shares;

    #[test]
    fn weights_of_both_versions_mean_the_same() {
        assert_eq!([1, 2, 100, 10_000].map(shares), [10, 20, 1_024, 102_400]);
    }
}
