//! The memory limit of the control group the agent runs in.

use metadata_links::mounts::{MountEntry, OWN};
use std::path::{Path, PathBuf};

/// This value and larger ones mean no limit: cgroup version 1 writes the largest number of whole pages in an `i64`.
const UNLIMITED: u64 = 1 << 60;

/// The environment variable with the container's memory limit in bytes; Kubernetes sets it by the downward API. A pod
/// that mounts the node's control groups over its own cannot find its limit there.
pub const VARIABLE: &str = "XDP_IMDS_MEMORY_LIMIT";

/// The smallest memory limit in bytes: that of this process's control group, of each group above it, or of
/// [`VARIABLE`]. `None` if none is set or readable.
#[must_use]
pub fn memory_limit() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let files = read(Path::new("/proc/self/cgroup")).zip(read(Path::new(OWN)));
    let found = files.and_then(|(groups, mounts)| limit(&groups, &mounts, &read));
    let given = std::env::var(VARIABLE).ok().and_then(|text| text.trim().parse().ok());
    found.into_iter().chain(given.filter(|limit| *limit > 0)).min()
}

/// Like [`memory_limit`], with the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`, and a function that reads a
/// file.
fn limit(groups: &str, mounts: &str, read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let mounts = MountEntry::all(mounts).filter_map(Hierarchy::of);
    let limits = mounts.flat_map(|hierarchy| {
        let group = groups.lines().find_map(|line| hierarchy.group(line));
        group.into_iter().flat_map(move |group| hierarchy.limits(&group, read)).collect::<Vec<_>>()
    });
    limits.filter(|limit| *limit < UNLIMITED).min()
}

/// A mounted hierarchy with the memory controller.
struct Hierarchy {
    mount: MountEntry,
    /// True for cgroup version 2.
    unified: bool,
}

impl Hierarchy {
    fn of(mount: MountEntry) -> Option<Self> {
        let unified = match &*mount.kind {
            "cgroup2" => true,
            "cgroup" if mount.has("memory") => false,
            _ => return None,
        };
        Some(Self { mount, unified })
    }

    /// The process's group in this hierarchy, from a line of `/proc/self/cgroup` (cgroups(7)):
    /// `0::/group` of version 2, `7:memory:/group` of version 1.
    fn group(&self, line: &str) -> Option<PathBuf> {
        let mut words = line.splitn(3, ':');
        let (number, controllers, group) = (words.next()?, words.next()?, words.next()?);
        let is_ours = match self.unified {
            true => number == "0" && controllers.is_empty(),
            false => controllers.split(',').any(|controller| controller == "memory"),
        };
        is_ours.then(|| group.into())
    }

    /// The limits of a group and of the mounted groups above it.
    fn limits(&self, group: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Vec<u64> {
        // In its own cgroup namespace a container sees its group as the root, and a path of the host does not exist.
        let below = group.strip_prefix(&self.mount.root).unwrap_or(Path::new(""));
        let below = if below.is_absolute() { Path::new("") } else { below };
        let file = if self.unified { "memory.max" } else { "memory.limit_in_bytes" };
        let groups = below.ancestors().map(|group| self.mount.at.join(group).join(file));
        groups.filter_map(|file| read(&file)?.trim().parse().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::limit;
    use std::collections::HashMap;
    use std::path::Path;

    const V2: &str = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "40 30 0:35 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory";
    const V1_OTHER: &str = "41 30 0:36 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct";
    const DOCKER_V1: &str =
        "40 30 0:35 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory";

    #[test]
    fn the_limit_is_the_least_of_the_group_and_those_above() {
        const NONE_V1: &str = "9223372036854771712\n";
        type Files = &'static [(&'static str, &'static str)];
        type Case = (&'static str, &'static str, &'static [&'static str], Files, Option<u64>);
        let cases: [Case; 14] = [
            ("v2", "0::/a/b\n", &[V2], &[("/sys/fs/cgroup/a/b/memory.max", "1000\n")], Some(1000)),
            (
                "v2, a unit of systemd with MemoryMax",
                "0::/system.slice/xdp-imds.service\n",
                &[V2],
                &[
                    ("/sys/fs/cgroup/system.slice/memory.max", "max\n"),
                    ("/sys/fs/cgroup/system.slice/xdp-imds.service/memory.max", "3221225472\n"),
                ],
                Some(3 << 30),
            ),
            (
                "v2, above",
                "0::/a/b\n",
                &[V2],
                &[("/sys/fs/cgroup/a/b/memory.max", "max\n"), ("/sys/fs/cgroup/a/memory.max", "70\n")],
                Some(70),
            ),
            (
                "v2, both",
                "0::/a/b\n",
                &[V2],
                &[("/sys/fs/cgroup/a/b/memory.max", "50\n"), ("/sys/fs/cgroup/a/memory.max", "70\n")],
                Some(50),
            ),
            (
                "v2, a container's own namespace",
                "0::/\n",
                &[V2],
                &[("/sys/fs/cgroup/memory.max", "536870912\n")],
                Some(512 << 20),
            ),
            ("v2, no limit", "0::/a\n", &[V2], &[("/sys/fs/cgroup/a/memory.max", "max\n")], None),
            ("v2, no file, as at the root", "0::/\n", &[V2], &[], None),
            (
                "v1",
                "7:memory:/a\n1:cpu,cpuacct:/b\n",
                &[V1_OTHER, V1],
                &[("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096\n")],
                Some(4096),
            ),
            (
                "v1, no limit",
                "7:memory:/a\n",
                &[V1],
                &[("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", NONE_V1)],
                None,
            ),
            (
                "v1, a container sees its own group",
                "7:memory:/docker/abc\n",
                &[DOCKER_V1],
                &[("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9\n")],
                Some(9),
            ),
            (
                "v1, a path of the host's",
                "7:memory:/elsewhere\n",
                &[DOCKER_V1],
                &[("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9\n")],
                Some(9),
            ),
            (
                "v1 with a v2 beside it",
                "7:memory:/a\n0::/a\n",
                &[V1, "31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"],
                &[("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "8\n")],
                Some(8),
            ),
            (
                "v2, the node's groups over the container's",
                "0::/\n",
                &["30 24 0:26 /../../.. /sys/fs/cgroup ro - cgroup2 cgroup2 rw"],
                &[],
                None,
            ),
            (
                "nothing mounted, and what is no number",
                "0::/a\n",
                &["nonsense", "- cgroup2"],
                &[("/a/memory.max", "x\n")],
                None,
            ),
        ];
        for (name, groups, mounts, files, expected) in cases {
            let files: HashMap<_, _> = files.iter().copied().collect();
            let read = |path: &Path| files.get(path.to_str()?).map(|text| (*text).to_owned());
            assert_eq!(limit(groups, &mounts.join("\n"), &read), expected, "{name}");
        }
    }
}
