//! Ids of the eBPF objects that a process holds, and of all objects in the kernel.
//!
//! The kernel does not reuse an id soon. A test can therefore search for a process's objects after the process has
//! ended (`BPF_PROG_GET_NEXT_ID` and its siblings).
#![expect(unsafe_code, reason = "aya opens each object to list it, which can change the list")]

use anyhow::{Context as _, Result};
use aya::programs::links::{FdLink, PinnedLink};
use aya_obj::generated::bpf_cmd;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::{fmt, fs, io};

/// Sets of programs, maps and links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Programs.
    pub programs: BTreeSet<u32>,
    /// Maps, including those that only a program holds.
    pub maps: BTreeSet<u32>,
    /// Links.
    pub links: BTreeSet<u32>,
    /// Program and interface index of the links that a process holds. A link whose device is gone has no entry.
    pub attached: BTreeSet<(u32, u32)>,
}

impl Objects {
    /// The objects that a process holds by its descriptors, and the maps of its programs.
    ///
    /// # Errors
    /// When the process is gone or belongs to another user.
    pub fn held_by(pid: u32) -> Result<Self> {
        let mut held = Self::default();
        let directory = format!("/proc/{pid}/fdinfo");
        for entry in fs::read_dir(&directory).with_context(|| format!("cannot list {directory}"))? {
            // A descriptor can close after it was listed.
            let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
            held.note(&text);
        }
        for program in aya::programs::loaded_programs().flatten() {
            if held.programs.contains(&program.id()) {
                held.maps.extend(program.map_ids().ok().flatten().unwrap_or_default());
            }
        }
        Ok(held)
    }

    /// Adds the object of a descriptor, if it has one (kernel/bpf/syscall.c: `bpf_prog_show_fdinfo`,
    /// `bpf_map_show_fdinfo`, `bpf_link_show_fdinfo`).
    fn note(&mut self, fdinfo: &str) {
        let field = |name: &str| {
            let value = fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.trim().parse::<u32>().ok()
        };
        // A link also shows its program, which it holds.
        self.programs.extend(field("prog_id"));
        self.maps.extend(field("map_id"));
        self.links.extend(field("link_id"));
        let place = field("prog_id").zip(field("ifindex").filter(|&index| index > 0));
        self.attached.extend(place.filter(|_| field("link_id").is_some()));
    }

    /// All objects in the kernel.
    ///
    /// This function opens no object. If the last descriptor of a program array has just been closed, and the array is
    /// opened by its id and closed again, Linux 6.18 never frees it (kernel/bpf/arraymap.c: `prog_array_map_clear`
    /// takes a reference for work that is already queued).
    #[must_use]
    pub fn in_kernel() -> Self {
        Self {
            programs: numbers(bpf_cmd::BPF_PROG_GET_NEXT_ID).collect(),
            maps: numbers(bpf_cmd::BPF_MAP_GET_NEXT_ID).collect(),
            links: numbers(bpf_cmd::BPF_LINK_GET_NEXT_ID).collect(),
            attached: BTreeSet::new(),
        }
    }

    /// Number of links without a device, or with the same program and device as another link.
    #[must_use]
    pub fn idle_links(&self) -> usize {
        self.links.len() - self.attached.len().min(self.links.len())
    }

    /// Adds the objects of `other`.
    pub fn add(&mut self, other: &Self) {
        self.programs.extend(&other.programs);
        self.maps.extend(&other.maps);
        self.links.extend(&other.links);
        self.attached.extend(&other.attached);
    }

    /// The objects that are also in `others`.
    #[must_use]
    pub fn among(&self, others: &Self) -> Self {
        Self {
            programs: &self.programs & &others.programs,
            maps: &self.maps & &others.maps,
            links: &self.links & &others.links,
            attached: &self.attached & &others.attached,
        }
    }

    /// The objects that are not in `others`.
    #[must_use]
    pub fn without(&self, others: &Self) -> Self {
        Self {
            programs: &self.programs - &others.programs,
            maps: &self.maps - &others.maps,
            links: &self.links - &others.links,
            attached: &self.attached - &others.attached,
        }
    }

    /// The number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.programs.len() + self.maps.len() + self.links.len()
    }

    /// True if there are no objects.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The ids of all objects of one kind.
fn numbers(next: bpf_cmd) -> impl Iterator<Item = u32> {
    std::iter::successors(next_number(next, 0), move |&number| next_number(next, number))
}

/// The lowest id above `after`.
fn next_number(next: bpf_cmd, after: u32) -> Option<u32> {
    // `start_id`, `next_id` and `open_flags` of the kernel's `union bpf_attr`.
    let mut attributes = [after, 0, 0];
    // SAFETY: the kernel reads and writes these twelve bytes and does not keep the pointer.
    let returned = unsafe {
        libc::syscall(libc::SYS_bpf, next as u32, attributes.as_mut_ptr(), size_of_val(&attributes))
    };
    (returned == 0).then_some(attributes[1])
}

/// Detaches a link from its device, whoever holds it, as `bpftool link detach` does.
///
/// # Errors
/// When there is no such link, or the kernel refuses.
pub fn detach(link: u32) -> io::Result<()> {
    let fd = command(bpf_cmd::BPF_LINK_GET_FD_BY_ID, link)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    command(bpf_cmd::BPF_LINK_DETACH, fd.as_raw_fd().cast_unsigned()).map(drop)
}

/// Like [`detach`], by the pin of the link.
///
/// # Errors
/// Like [`detach`].
pub fn detach_pinned(pin: &Path) -> Result<()> {
    let link = FdLink::from(PinnedLink::from_pin(pin)?);
    Ok(detach(link.info()?.id())?)
}

/// A command of bpf(2) whose only argument is a number.
fn command(command: bpf_cmd, argument: u32) -> io::Result<i32> {
    let mut attributes = [argument, 0, 0];
    // SAFETY: the kernel reads these twelve bytes and does not keep the pointer.
    let returned = unsafe {
        libc::syscall(libc::SYS_bpf, command as u32, attributes.as_mut_ptr(), size_of_val(&attributes))
    };
    if returned < 0 {
        Err(io::Error::last_os_error())
    } else {
        i32::try_from(returned).map_err(io::Error::other)
    }
}

impl fmt::Display for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { programs, maps, links, .. } = self;
        write!(f, "programs {programs:?}, maps {maps:?}, links {links:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::Objects;

    #[test]
    fn the_kind_of_a_descriptor_is_read_from_its_fdinfo() {
        let mut objects = Objects::default();
        for fdinfo in [
            "pos:\t0\nflags:\t02\nmap_type:\t1\nmap_id:\t7\nfrozen:\t0\n",
            "pos:\t0\nprog_type:\t6\nprog_id:\t12\nrun_cnt:\t0\n",
            "link_type:\txdp\nlink_id:\t3\nprog_tag:\tab\nprog_id:\t12\nifindex:\t4\n",
            "pos:\t0\nflags:\t02\nmnt_id:\t15\n",
        ] {
            objects.note(fdinfo);
        }
        let expected = Objects {
            programs: [12].into(),
            maps: [7].into(),
            links: [3].into(),
            attached: [(12, 4)].into(),
        };
        assert_eq!(objects, expected);
        assert_eq!(objects.without(&expected).len(), 0);
        assert_eq!(objects.among(&Objects::default()).len(), 0);
        assert_eq!(objects.idle_links(), 0);
        for idle in ["link_id:\t4\nprog_id:\t12\nifindex:\t0\n", "link_id:\t5\nprog_id:\t12\nifindex:\t4\n"] {
            objects.note(idle);
        }
        assert_eq!(objects.idle_links(), 2);
    }
}
