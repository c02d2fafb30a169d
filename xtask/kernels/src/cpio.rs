//! Writes an initramfs: a cpio archive in the format `newc` (Documentation/driver-api/early-userspace/buffer-format.rst).

use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path};

/// The kernel reads a file's size as 32 bits.
const LARGEST_FILE: u64 = u32::MAX as u64;
const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_777;
/// The name of the entry that ends an archive.
const END: &str = "TRAILER!!!";

/// An archive under construction. Everything in it belongs to root.
pub(crate) struct Archive<W> {
    out: W,
    entries: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub(crate) fn new(out: W) -> Self {
        Self { out, entries: 0, directories: BTreeSet::new() }
    }

    /// Adds a file with this content, and the directories above it.
    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<()> {
        let mut content = content;
        self.entry(name, REGULAR | mode, content.len() as u64, &mut content)
    }

    /// Adds a copy of a file with its permissions.
    pub(crate) fn copy(&mut self, name: &str, from: &Path) -> Result<()> {
        let file = fs::File::open(from).with_context(|| format!("cannot read {}", from.display()))?;
        let metadata = file.metadata()?;
        self.entry(name, REGULAR | (metadata.permissions().mode() & 0o777), metadata.size(), file)
    }

    /// Adds a directory, and those above it.
    pub(crate) fn directory(&mut self, name: &str) -> Result<()> {
        if name.is_empty() || !self.directories.insert(name.to_owned()) {
            return Ok(());
        }
        self.entry(name, DIRECTORY, 0, std::io::empty())
    }

    /// Adds a tree below the archive's root. Devices and other special files are left out.
    pub(crate) fn tree(&mut self, from: &Path) -> Result<()> {
        self.below(from, Path::new(""))
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Result<W> {
        self.entry(END, 0, 0, std::io::empty())?;
        Ok(self.out)
    }

    fn below(&mut self, from: &Path, at: &Path) -> Result<()> {
        let directory = from.join(at);
        let entries =
            fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?;
        let mut names = entries.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            let at = at.join(name);
            let (path, name) = (from.join(&at), text(&at)?);
            let metadata = fs::symlink_metadata(&path)?;
            if metadata.is_dir() {
                self.directory(&name)?;
                self.below(from, &at)?;
            } else if metadata.is_symlink() {
                let target = text(&fs::read_link(&path)?)?;
                self.entry(&name, SYMLINK, target.len() as u64, target.as_bytes())?;
            } else if metadata.is_file() {
                self.copy(&name, &path)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, size: u64, content: impl std::io::Read) -> Result<()> {
        ensure!(size <= LARGEST_FILE, "{name} has {size} octets, but an initramfs holds files below 4 GiB");
        if let Some((above, _)) = name.rsplit_once('/') {
            self.directory(above)?;
        }
        self.entries += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        let fields = [self.entries, mode, 0, 0, links, 0, size as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        let mut head = String::from("070701");
        for field in fields {
            head += &format!("{field:08x}");
        }
        head += name;
        self.out.write_all(head.as_bytes())?;
        // The name ends with a zero octet.
        self.pad(head.len() as u64 + 1, 1)?;
        let copied = std::io::copy(&mut content.take(size), &mut self.out)?;
        ensure!(copied == size, "{name} became shorter while it was read");
        self.pad(size, 0)
    }

    /// Writes `least` zero octets, and more up to a multiple of four.
    fn pad(&mut self, len: u64, least: u64) -> Result<()> {
        let zeros = least + len.next_multiple_of(4) - len;
        Ok(self.out.write_all(&[0; 4][..zeros as usize])?)
    }
}

fn text(path: &Path) -> Result<String> {
    ensure!(!path.components().any(|part| part == Component::CurDir), "`{}` has a `.`", path.display());
    Ok(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn every_entry_begins_at_a_multiple_of_four() {
        for len in 0..5 {
            let mut archive = Archive::new(Vec::new());
            archive.file("d/name", 0o644, &vec![b'x'; len]).expect("a file");
            archive.file("e", 0o755, b"").expect("a file");
            let octets = archive.finish().expect("an archive");
            let heads: Vec<_> = octets.windows(6).enumerate().filter(|(_, at)| at == b"070701").collect();
            // The directory, both files, the end.
            assert_eq!(heads.len(), 4, "{len} octets");
            assert!(heads.iter().all(|(at, _)| at % 4 == 0), "{len} octets: {heads:?}");
            assert_eq!(octets.len() % 4, 0, "{len} octets");
        }
    }

    #[test]
    fn an_entry_has_its_mode_its_size_and_its_content() {
        let mut archive = Archive::new(Vec::new());
        archive.file("init", 0o755, b"#!/bin/sh").expect("a file");
        let octets = archive.finish().expect("an archive");
        let field = |at: usize| {
            let digits = std::str::from_utf8(&octets[6 + 8 * at..14 + 8 * at]).expect("digits");
            u32::from_str_radix(digits, 16).expect("a number")
        };
        assert_eq!((field(1), field(6), field(11)), (0o100_755, 9, 5));
        // The head has 110 octets.
        assert_eq!((&octets[110..116], &octets[116..125]), (&b"init\0\0"[..], &b"#!/bin/sh"[..]));
    }

    #[test]
    fn a_tree_keeps_its_links_and_each_directory_comes_once() {
        let room = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(room.path().join("usr/bin")).expect("directories");
        std::fs::write(room.path().join("usr/bin/sh"), "shell").expect("a file");
        std::os::unix::fs::symlink("usr/bin", room.path().join("bin")).expect("a link");
        let mut archive = Archive::new(Vec::new());
        archive.tree(room.path()).expect("a tree");
        archive.directory("usr/bin").expect("a directory");
        let octets = archive.finish().expect("an archive");
        let text = String::from_utf8_lossy(&octets);
        for (name, times) in [("usr/bin/sh\0", 1), ("bin\0usr/bin", 0), ("usr\0", 1)] {
            assert_eq!(text.matches(name).count(), times, "{name:?} in {text:?}");
        }
        assert!(text.contains("bin\0\0\0usr/bin"), "{text:?}");
    }
}
