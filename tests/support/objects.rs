//! eBPF objects by number: what a process holds, and what is in the kernel at all.
//!
//! Numbers are handed out in turn and not soon again, so an object that a process was once seen to hold can be
//! looked for after the process has ended (Linux: `BPF_PROG_GET_NEXT_ID` and its sisters).
#![expect(unsafe_code, reason = "aya lists objects by opening each, which changes what is looked at")]

use anyhow::{Context as _, Result};
use aya_obj::generated::bpf_cmd;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;

/// Programs, maps and links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Programs.
    pub programs: BTreeSet<u32>,
    /// Maps, those that only a program holds included.
    pub maps: BTreeSet<u32>,
    /// Links.
    pub links: BTreeSet<u32>,
    /// Of links a process holds, where they are: the program and the interface's index. A link whose device has
    /// gone is nowhere.
    pub attached: BTreeSet<(u32, u32)>,
}

impl Objects {
    /// What a process holds by its descriptors, and the maps of the programs among them.
    ///
    /// # Errors
    /// When the process is gone, or is somebody else's.
    pub fn held_by(pid: u32) -> Result<Self> {
        let mut held = Self::default();
        let directory = format!("/proc/{pid}/fdinfo");
        for entry in fs::read_dir(&directory).with_context(|| format!("cannot list {directory}"))? {
            // A descriptor may close between the list and the look.
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

    /// Notes what one descriptor stands for, if it is any of these (Linux: kernel/bpf/syscall.c,
    /// `bpf_prog_show_fdinfo`, `bpf_map_show_fdinfo`, `bpf_link_show_fdinfo`).
    fn note(&mut self, fdinfo: &str) {
        let field = |name: &str| {
            let value = fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.trim().parse::<u32>().ok()
        };
        // A link tells its program's number too, and keeps that program.
        self.programs.extend(field("prog_id"));
        self.maps.extend(field("map_id"));
        self.links.extend(field("link_id"));
        let place = field("prog_id").zip(field("ifindex").filter(|&index| index > 0));
        self.attached.extend(place.filter(|_| field("link_id").is_some()));
    }

    /// Everything in the kernel, whoever it is of.
    ///
    /// Opens nothing: Linux 6.18 keeps a map of programs for ever when somebody opens and closes it by its number just
    /// after its last descriptor went (kernel/bpf/arraymap.c: `prog_array_map_clear` takes a reference for work that is
    /// queued already).
    #[must_use]
    pub fn in_kernel() -> Self {
        Self {
            programs: numbers(bpf_cmd::BPF_PROG_GET_NEXT_ID).collect(),
            maps: numbers(bpf_cmd::BPF_MAP_GET_NEXT_ID).collect(),
            links: numbers(bpf_cmd::BPF_LINK_GET_NEXT_ID).collect(),
            attached: BTreeSet::new(),
        }
    }

    /// Links that are nowhere, or where another one of the same program is too.
    #[must_use]
    pub fn idle_links(&self) -> usize {
        self.links.len() - self.attached.len().min(self.links.len())
    }

    /// Adds others.
    pub fn add(&mut self, other: &Self) {
        self.programs.extend(&other.programs);
        self.maps.extend(&other.maps);
        self.links.extend(&other.links);
        self.attached.extend(&other.attached);
    }

    /// Those of these that are among `others` too.
    #[must_use]
    pub fn among(&self, others: &Self) -> Self {
        Self {
            programs: &self.programs & &others.programs,
            maps: &self.maps & &others.maps,
            links: &self.links & &others.links,
            attached: &self.attached & &others.attached,
        }
    }

    /// Those of these that are not among `others`.
    #[must_use]
    pub fn without(&self, others: &Self) -> Self {
        Self {
            programs: &self.programs - &others.programs,
            maps: &self.maps - &others.maps,
            links: &self.links - &others.links,
            attached: &self.attached - &others.attached,
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.programs.len() + self.maps.len() + self.links.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The numbers of all objects of one kind.
fn numbers(next: bpf_cmd) -> impl Iterator<Item = u32> {
    std::iter::successors(next_number(next, 0), move |&number| next_number(next, number))
}

/// The number after another one.
fn next_number(next: bpf_cmd, after: u32) -> Option<u32> {
    // `start_id`, `next_id` and `open_flags` of the kernel's `union bpf_attr`.
    let mut attributes = [after, 0, 0];
    // SAFETY: the kernel reads and writes these twelve octets, and nothing keeps the pointer.
    let returned = unsafe {
        libc::syscall(libc::SYS_bpf, next as u32, attributes.as_mut_ptr(), size_of_val(&attributes))
    };
    (returned == 0).then_some(attributes[1])
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
    fn descriptors_are_told_apart_by_what_they_say() {
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
