//! What is mounted over the pins, in the agent's own mount namespace and in that of process 1.
//!
//! A service manager may give an agent a mount namespace of its own, where a later mount of the node need not appear.
//! The next agent starts from the mounts of process 1, and then looks for the pins there.

use metadata_links::mounts::MountEntry;
pub(super) use metadata_links::mounts::OWN;
use std::path::{Path, PathBuf};

/// The mounts from which a service manager starts the next agent.
pub(super) const INIT: &str = "/proc/1/mountinfo";

/// Where a path leads: a place in a file system, and the mount through which it leads there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MountedPlace {
    device: String,
    inner: PathBuf,
    kind: String,
    at: PathBuf,
}

/// Why the path of the pins leads elsewhere than to the agent's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PinCover {
    /// The kind of file system that is mounted over it, and where. `None` if the pins' own is unmounted.
    by: Option<(String, PathBuf)>,
    /// The agent itself still sees its directory; the next one will not.
    for_next: bool,
}

impl PinCover {
    /// The sentence for an operator.
    pub(super) fn explain(&self, pins: &Path) -> String {
        let shown = pins.display();
        let whose = match self.for_next {
            true => {
                "to another directory in the mount namespace of process 1, where the next agent starts, than in the agent's"
            }
            false => "to a directory other than the agent's",
        };
        let (why, remedy) = match &self.by {
            Some((kind, at)) => {
                let at = at.display();
                (format!("a {kind} file system was mounted over it at {at}"), format!("run `umount {at}`"))
            }
            None => (
                "its own file system was unmounted".to_owned(),
                "mount the bpffs there again and restart the agent".to_owned(),
            ),
        };
        format!(
            "{shown} leads {whose}: {why}. Guests are served, but the next agent does not find the pins: {remedy}"
        )
    }
}

/// The directory of the pins in the mount namespace of process 1, when the agent opened it.
#[derive(Debug)]
pub(super) struct PinMounts {
    /// The number of its device, as mountinfo has it.
    device: String,
    by_init: Option<PathBuf>,
}

impl PinMounts {
    /// Remembers where a directory is. `number` is that of its device.
    pub(super) fn of(directory: &Path, number: u64) -> Self {
        let device = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let by_init = read(INIT).and_then(|text| place_in(&text, directory));
        // In a container the same path of process 1 may be another directory.
        let by_init = by_init.filter(|place| place.device == device).map(|place| place.inner);
        Self { device, by_init }
    }

    /// Why the agent's own path leads elsewhere, once it does.
    pub(super) fn cover(&self, directory: &Path) -> PinCover {
        let text = read(OWN).unwrap_or_default();
        PinCover { by: self.upper(&text, place_in(&text, directory)), for_next: false }
    }

    /// Why the next agent will find another directory, if that is so.
    pub(super) fn cover_for_next(&self, directory: &Path) -> Option<PinCover> {
        let inner = self.by_init.as_ref()?;
        let text = read(INIT)?;
        let now = place_in(&text, directory);
        let is_same = now.as_ref().is_some_and(|now| now.device == self.device && now.inner == *inner);
        (!is_same).then(|| PinCover { by: self.upper(&text, now), for_next: true })
    }

    /// The mount that leads elsewhere, unless the pins' file system is not mounted any more.
    fn upper(&self, text: &str, place: Option<MountedPlace>) -> Option<(String, PathBuf)> {
        let is_mounted = MountEntry::all(text).any(|one| one.device == self.device);
        place.filter(|_| is_mounted).map(|MountedPlace { kind, at, .. }| (kind, at))
    }
}

fn read(mounts: &str) -> Option<String> {
    std::fs::read_to_string(mounts).ok()
}

/// Where an absolute path without links leads by the text of a mountinfo file.
fn place_in(text: &str, path: &Path) -> Option<MountedPlace> {
    let above: Vec<_> = MountEntry::all(text).filter(|one| path.starts_with(&one.at)).collect();
    let is_root = |one: &&MountEntry| above.iter().all(|other| other.id != one.parent || other.id == one.id);
    let mut now = above.iter().find(is_root)?;
    // Each step goes to a mount on the present one, so there are at most as many as mounts.
    for _ in 0..above.len() {
        let on_it = above.iter().filter(|one| one.parent == now.id && one.id != now.id);
        let Some(next) = on_it.min_by_key(|one| one.at.as_os_str().len()) else { break };
        now = next;
    }
    let MountEntry { device, root, at, kind, .. } = now.clone();
    let inner = root.join(path.strip_prefix(&at).ok()?);
    Some(MountedPlace { device, inner, kind, at })
}

#[cfg(test)]
mod tests {
    use super::{PinCover, PinMounts, place_in};
    use std::path::Path;

    const NODE: &str = "\
        1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
        22 1 0:21 / /sys rw shared:2 - sysfs sysfs rw\n\
        30 22 0:30 / /sys/fs/bpf rw shared:9 - bpf bpf rw,mode=700\n\
        40 1 0:40 / /var/lib/a\\040b rw - tmpfs tmpfs rw\n";

    #[test]
    fn a_path_leads_to_the_uppermost_mount_on_its_way() {
        let cases = [
            ("nothing over it", "", "0:30", "/xdp-imds/v1", "/sys/fs/bpf"),
            (
                "over the first",
                "50 30 0:50 / /sys/fs/bpf rw - bpf bpf rw\n",
                "0:50",
                "/xdp-imds/v1",
                "/sys/fs/bpf",
            ),
            (
                "over the directory in it",
                "50 30 0:50 / /sys/fs/bpf/xdp-imds rw - tmpfs tmpfs rw\n",
                "0:50",
                "/v1",
                "/sys/fs/bpf/xdp-imds",
            ),
            // What was mounted deeper before is out of reach.
            (
                "over a directory above",
                "50 22 0:50 / /sys/fs rw - tmpfs tmpfs rw\n",
                "0:50",
                "/bpf/xdp-imds/v1",
                "/sys/fs",
            ),
            (
                "a directory of the same file system",
                "50 30 0:30 /other /sys/fs/bpf/xdp-imds rw - bpf bpf rw\n",
                "0:30",
                "/other/v1",
                "/sys/fs/bpf/xdp-imds",
            ),
            ("a line of another form", "nonsense\n", "0:30", "/xdp-imds/v1", "/sys/fs/bpf"),
        ];
        let path = Path::new("/sys/fs/bpf/xdp-imds/v1");
        for (what, more, device, inner, at) in cases {
            let found = place_in(&format!("{NODE}{more}"), path).expect("a place");
            assert_eq!((&*found.device, &*found.inner), (device, Path::new(inner)), "{what}");
            assert_eq!(found.at, Path::new(at), "{what}");
        }
        let spaced = place_in(NODE, Path::new("/var/lib/a b/pins")).expect("a place");
        assert_eq!((&*spaced.device, &*spaced.inner), ("0:40", Path::new("/pins")));
        assert_eq!(place_in("", path), None);
    }

    #[test]
    fn a_cover_names_the_mount_and_the_remedy() {
        let pins = PinMounts { device: "0:30".into(), by_init: None };
        let path = Path::new("/sys/fs/bpf/xdp-imds/v1");
        let upper = |text: &str| pins.upper(text, place_in(text, path));
        let covered = format!("{NODE}50 30 0:50 / /sys/fs/bpf rw - bpf bpf rw\n");
        let unmounted: String =
            NODE.lines().filter(|line| !line.contains("0:30")).map(|line| format!("{line}\n")).collect();
        for (text, for_next, parts) in [
            (
                &covered,
                false,
                [
                    "a directory other than the agent's",
                    "bpf file system was mounted over it at /sys/fs/bpf",
                    "`umount /sys/fs/bpf`",
                ],
            ),
            (
                &covered,
                true,
                ["process 1, where the next agent starts", "mounted over it", "`umount /sys/fs/bpf`"],
            ),
            (&unmounted, true, ["process 1", "was unmounted", "restart the agent"]),
        ] {
            let told = PinCover { by: upper(text), for_next }.explain(path);
            assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        }
    }
}
