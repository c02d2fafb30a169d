//! A control group with the memory limit that the DaemonSet sets. Version 2 is used where it controls memory, and
//! version 1 elsewhere.

use anyhow::{Context as _, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use support::eventually::eventually;
use support::tap::Shape;
use support::tap_client::storm_until;

use super::node::{Node, from_secret};

/// The longest time until a group without processes can be removed.
const REMOVED_WITHIN: Duration = Duration::from_secs(10);

/// Names of groups begin with this; the id of the process that made the group follows.
const PREFIX: &str = "xdp-imds-soak-";

/// The version of control groups that limits memory on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A control group for the agent. Removed on drop.
#[derive(Debug)]
pub(super) struct MemoryGroup {
    path: PathBuf,
    version: Version,
}

/// The memory of all processes of the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Anonymous memory, in bytes.
    pub(super) anonymous: u64,
    /// The most memory so far, with file cache and what the kernel charges, in bytes.
    pub(super) peak: u64,
    /// Processes that the kernel has killed because of the limit.
    pub(super) killed: u64,
}

impl MemoryGroup {
    /// Creates the group.
    pub(super) fn new(limit: u64) -> Result<Self> {
        let (parent, version) = controller()?;
        sweep(&parent);
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make the control group {}", path.display()))?;
        let group = Self { path, version };
        let limits: &[&str] = match version {
            Version::One => &["memory.limit_in_bytes"],
            Version::Two => &["memory.max"],
        };
        for file in limits {
            group.write(file, &limit.to_string())?;
        }
        // As for a container of Kubernetes: no swap. A kernel may lack these files.
        let swap = match version {
            Version::One => group.write("memory.swappiness", "0"),
            Version::Two => group.write("memory.swap.max", "0"),
        };
        if let Err(error) = swap {
            eprintln!("swap stays as it is: {error:#}");
        }
        Ok(group)
    }

    /// Describes the limit for the report.
    pub(super) fn kind(&self) -> &'static str {
        match self.version {
            Version::One => "cgroup v1",
            Version::Two => "cgroup v2",
        }
    }

    /// The file that takes the ids of processes.
    pub(super) fn processes(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Reads the group's memory.
    pub(super) fn usage(&self) -> Result<Usage> {
        let stat = self.read("memory.stat")?;
        Ok(match self.version {
            Version::One => Usage {
                anonymous: field(&stat, "total_rss").context("memory.stat has no total_rss")?,
                peak: number(&self.read("memory.max_usage_in_bytes")?),
                killed: field(&self.read("memory.oom_control")?, "oom_kill").unwrap_or_default(),
            },
            Version::Two => Usage {
                anonymous: field(&stat, "anon").context("memory.stat has no anon")?,
                // Linux 5.19
                peak: self.read("memory.peak").map_or(0, |text| number(&text)),
                killed: field(&self.read("memory.events")?, "oom_kill").unwrap_or_default(),
            },
        })
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.path.join(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        if let Err(error) = eventually(REMOVED_WITHIN, || Ok(fs::remove_dir(&self.path)?)) {
            eprintln!("cannot remove the control group {}: {error:#}", self.path.display());
        }
    }
}

/// Removes groups whose process was killed. A group with processes stays.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let maker = name.strip_prefix(PREFIX).and_then(|pid| pid.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // An agent that outlived its maker is in it; its group is removed once it ends.
            _ = fs::remove_dir(entry.path());
        }
    }
}

/// Returns a directory for groups that can limit memory.
fn controller() -> Result<(PathBuf, Version)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    if let Some(root) = mount_point(&mounts, "cgroup2", "")
        && fs::read_to_string(root.join("cgroup.subtree_control"))
            .is_ok_and(|controllers| has_word(&controllers, "memory"))
    {
        return Ok((root, Version::Two));
    }
    match mount_point(&mounts, "cgroup", "memory") {
        Some(root) => Ok((root, Version::One)),
        None => bail!(
            "no control group limits memory here; mount cgroup2 with `+memory` in the root's cgroup.subtree_control"
        ),
    }
}

/// Finds a mount of a type with an option of the file system (proc_pid_mountinfo(5)).
fn mount_point(mounts: &str, kind: &str, option: &str) -> Option<PathBuf> {
    let found = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let is_kind = right.next() == Some(kind);
        let options = right.nth(1).unwrap_or_default();
        let fits = option.is_empty() || options.split(',').any(|word| word == option);
        (is_kind && fits).then(|| left.split(' ').nth(4)).flatten()
    });
    found.map(|path| Path::new(path).to_owned())
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|it| it == word)
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or_default()
}

// The modest tenant: its new VMs, one after the other, and the time until each has its own data.

/// The namespace of the modest tenant.
pub(super) const NAMESPACE: &str = "modest";
/// The longest time until a new VM is served. A VM that is not served by then counts with this time, and as a failure.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The time of one attempt of the guest, as a client of a cloud has it. A guest that boots asks again at once.
const ATTEMPT: Duration = Duration::from_millis(250);
const PATH: &str = "/v1/user-data";

/// Runs a new VM, and returns the time from its VMI and pod to the first answer with its own data. Its pod is complete
/// before: the time that the lab takes to make devices does not count. Gives up once `stop` is true.
pub(super) fn serve_new_vm(node: &Node, stop: &AtomicBool) -> Result<Duration> {
    let pod = node.pod(NAMESPACE)?;
    let text = format!("#cloud-config\n# {}\n", pod.uid);
    pod.user_data(text.as_bytes())?;
    let tap = pod.tap(Shape::default())?;
    let began = Instant::now();
    pod.put(pod.vmi(&from_secret()));
    let outcomes = storm_until(vec![(pod.identity.clone(), tap)], &[PATH], PATIENCE, ATTEMPT, stop);
    let took = began.elapsed();
    let key = pod.key();
    pod.end()?;
    let outcome = outcomes.into_iter().next().context("a storm of one guest has one outcome")?;
    let answers = outcome.answers.with_context(|| format!("{key} was not served within {PATIENCE:?}"))?;
    let answer = answers.first().context("no answer")?;
    let body = String::from_utf8_lossy(&answer.body);
    ensure!(answer.status == 200, "{key} got {}: {body}", answer.status);
    ensure!(body == text, "ISOLATION: {key} got data that is not its own: {body}");
    Ok(took)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{field, mount_point};

    #[test]
    fn the_mount_of_a_controller_is_found_by_type_and_option() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 25 0:27 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
                      32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(mounts, "cgroup", "memory"), Some(PathBuf::from("/sys/fs/cgroup/memory")));
        assert_eq!(mount_point(mounts, "cgroup2", ""), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(mount_point(mounts, "cgroup", "pids"), None);
    }

    #[test]
    fn a_field_is_read_by_its_whole_name() {
        let text = "rss 1\ntotal_rss 20\ntotal_rss_huge 3\n";
        assert_eq!(field(text, "total_rss"), Some(20));
        assert_eq!(field(text, "total"), None);
    }
}
