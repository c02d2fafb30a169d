//! The mounts that a process sees (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

/// The mounts that this process sees.
pub const OWN: &str = "/proc/self/mountinfo";

/// A line: `36 35 0:33 /root /mount/point rw,noatime shared:1 - bpf bpf rw,mode=700`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// The number of the mount.
    pub id: u64,
    /// The mount that this one is mounted on.
    pub parent: u64,
    /// Numbers of the device, `major:minor`.
    pub device: String,
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// Where it is mounted.
    pub at: PathBuf,
    /// The kind of file system.
    pub kind: String,
    /// Options of the file system, separated by commas.
    pub options: String,
}

impl MountEntry {
    /// The mounts in the text of a mountinfo file. Lines of another form are left out.
    pub fn all(text: &str) -> impl Iterator<Item = Self> {
        text.lines().filter_map(Self::parse)
    }

    fn parse(line: &str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut system = system.split(' ');
        let kind = system.next()?.to_owned();
        let options = system.nth(1).unwrap_or_default().to_owned();
        let mut words = mount.split(' ');
        let id = words.next()?.parse().ok()?;
        let parent = words.next()?.parse().ok()?;
        let device = words.next()?.to_owned();
        let (root, at) = (unescaped(words.next()?), unescaped(words.next()?));
        Some(Self { id, parent, device, root, at, kind, options })
    }

    /// True if the file system has an option, as a hierarchy of cgroup version 1 has its controllers.
    #[must_use]
    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|word| word == option)
    }
}

/// A path in which the kernel wrote blanks and backslashes as `\` and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|code| std::str::from_utf8(code).ok());
        let code = code.filter(|_| *first == b'\\').and_then(|code| u8::from_str_radix(code, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::{MountEntry, unescaped};
    use std::path::Path;

    #[test]
    fn octal_escapes_are_characters_again() {
        for (text, path) in
            [("/a", "/a"), ("/a\\040b\\134c", "/a b\\c"), ("/a\\9", "/a\\9"), ("/a\\", "/a\\")]
        {
            assert_eq!(unescaped(text), Path::new(path));
        }
    }

    #[test]
    fn a_line_has_its_fields_and_other_lines_are_left_out() {
        let text = "nonsense\n- cgroup2\n31 25 0:27 /a /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup - rw,memory\n";
        let found: Vec<_> = MountEntry::all(text).collect();
        let [mount] = &found[..] else { panic!("{found:?}") };
        assert_eq!((mount.id, mount.parent, &*mount.device, &*mount.kind), (31, 25, "0:27", "cgroup"));
        assert_eq!((&*mount.root, &*mount.at), (Path::new("/a"), Path::new("/sys/fs/cgroup/memory")));
        assert!(mount.has("memory") && !mount.has("mem") && !mount.has("cpu"));
    }
}
