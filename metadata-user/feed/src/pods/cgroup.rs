//! Finds the processes of a pod: kubelet gives each pod a control group with its UID in the name.
//!
//! With the systemd driver the name is `…-pod<uid>.slice`, with underscores for the UID's hyphens. With kubelet's own
//! driver it is `pod<uid>`. Containers have groups below it, and may create more. So the pod of a
//! path is that of the first group with a pod's name.

use rustix::io::Errno;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use super::PodUid;
use metadata_content::record::values::is_uuid;

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
    use super::{GROUPS_ABOVE, GROUPS_BELOW, Index, PROCESSES, pod_named, pod_of, processes};
    use crate::pods::PodUid;
    use std::fs;

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
