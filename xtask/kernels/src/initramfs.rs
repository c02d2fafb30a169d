//! The guest's file system, all of it in memory: tools of Debian, modules, programs, `init.sh`.

use anyhow::{Context as _, Result, bail, ensure};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use testbed::netns::run;
use testbed::packages::{Packages, With};

use crate::checks::Check;
use crate::kernel::Architecture;
use crate::kernel::Kernel;
use crate::kernel::Programs;

/// The release of the guest's tools. Its C library runs programs that are linked with an older one.
const SUITE: &str = "trixie";
/// The packages of the tools that tests and `init.sh` run, without their dependencies.
const TOOLS: [&str; 10] =
    ["coreutils", "curl", "dash", "grep", "iproute2", "iputils-ping", "kmod", "mount", "sed", "util-linux"];
const INIT: &str = include_str!("init.sh");
/// The directory of everything that is not Debian's.
const HOME: &str = "xdp-imds";
/// Directories on which `init.sh` mounts file systems, and those that tests need.
const DIRECTORIES: [&str; 7] = ["proc", "sys", "dev", "tmp", "run", "root", "var/lib"];

/// Writes the initramfs of a kernel to a file.
pub(crate) fn write(
    to: &Path,
    kernel: &Kernel,
    architecture: Architecture,
    programs: &Programs,
    checks: &[&Check],
) -> Result<()> {
    let tools = Packages::get_for(Some(architecture.debian()), SUITE, &TOOLS, With::Dependencies)
        .context("cannot get the guest's tools from Debian")?;
    let file = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    let mut archive = Archive::new(BufWriter::new(file));
    archive.tree(tools.root())?;
    for directory in DIRECTORIES {
        archive.directory(directory)?;
    }
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
    let lines: String = checks.iter().map(|check| check.line()).collect();
    archive.file(&format!("{HOME}/checks"), 0o644, lines.as_bytes())?;
    let found = kernel.root.as_deref().map(find).transpose()?.unwrap_or_default();
    let mut list = String::new();
    for module in found {
        let name = module.file_name().context("a module has a name")?.to_string_lossy().into_owned();
        archive.copy(&format!("{HOME}/modules/{name}"), &module)?;
        list += &format!("{name}\n");
    }
    archive.file(&format!("{HOME}/modules.list"), 0o644, list.as_bytes())?;
    archive.copy(&format!("{HOME}/target/debug/xdp-imds"), &programs.agent)?;
    for (name, path) in &programs.tests {
        archive.copy(&format!("{HOME}/target/debug/deps/{name}"), path)?;
    }
    sources(&mut archive)?;
    Ok(archive.finish()?.flush()?)
}

/// Adds the files of the project that tests read, at the path that was compiled into them.
fn sources(archive: &mut Archive<BufWriter<File>>) -> Result<()> {
    let top = shell::top().to_str().context("the project's path is not UTF-8")?.trim_start_matches('/');
    archive.directory(&format!("{top}/tests"))?;
    for name in ["xdp-imds.bpf.o", "port-stub.bpf.o"] {
        let path = format!("metadata-ebpf/prebuilt/{name}");
        archive.copy(&format!("{top}/{path}"), &shell::top().join(&path))?;
    }
    Ok(())
}

// Writes an initramfs: a cpio archive in the format `newc`
// (Documentation/driver-api/early-userspace/buffer-format.rst).

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
        let file = File::open(from).with_context(|| format!("cannot read {}", from.display()))?;
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
        ensure!(size <= LARGEST_FILE, "{name} has {size} bytes, but an initramfs holds files below 4 GiB");
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
        // The name ends with a zero byte.
        self.pad(head.len() as u64 + 1, 1)?;
        let copied = std::io::copy(&mut content.take(size), &mut self.out)?;
        ensure!(copied == size, "{name} became shorter while it was read");
        self.pad(size, 0)
    }

    /// Writes `least` zero bytes, and more up to a multiple of four.
    fn pad(&mut self, len: u64, least: u64) -> Result<()> {
        let zeros = least + len.next_multiple_of(4) - len;
        Ok(self.out.write_all(&[0; 4][..zeros as usize])?)
    }
}

fn text(path: &Path) -> Result<String> {
    ensure!(!path.components().any(|part| part == Component::CurDir), "`{}` has a `.`", path.display());
    Ok(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned())
}

// The kernel modules of a guest.

/// Modules for taps, veths, bridges, classifiers and guests behind vhost-net. A kernel may have some of them built in.
const WANTED: [&str; 8] =
    ["tun", "veth", "bridge", "sch_ingress", "cls_bpf", "macvlan", "dummy", "vhost_net"];

/// Returns the files of the wanted modules and of those they depend on, in the order in which they can be loaded.
/// `root` has `lib/modules/RELEASE`.
pub(crate) fn find(root: &Path) -> Result<Vec<PathBuf>> {
    let above = root.join("lib/modules");
    let Ok(entries) = fs::read_dir(&above) else { return Ok(Vec::new()) };
    let releases = entries.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    let [release] = &releases[..] else {
        bail!("expected modules of one kernel in {}, found {}", above.display(), releases.len());
    };
    shell::tools::ensure(&[("depmod", "kmod")])?;
    let depmod = shell::which("depmod").context("kmod is installed")?;
    let table = run(Command::new(depmod).arg("-n").arg("-b").arg(root).arg(release))?;
    Ok(in_order(&table).into_iter().map(|name| above.join(release).join(name)).collect())
}

/// Reads a table of `depmod`: `kernel/….ko: DEPENDENCY…`, of which the last can be loaded first.
fn in_order(table: &str) -> Vec<String> {
    let lines = table.lines().take_while(|line| !line.starts_with("alias "));
    let modules: HashMap<_, _> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(file, after)| (name(file), (file, after)))
        .collect();
    let mut files: Vec<String> = Vec::new();
    for (file, after) in WANTED.iter().filter_map(|wanted| modules.get(*wanted)) {
        for file in after.split_whitespace().rev().chain([*file]) {
            if !files.iter().any(|known| known == file) {
                files.push(file.to_owned());
            }
        }
    }
    files
}

/// The name of a module in a file, which may be compressed.
fn name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::{Archive, in_order};

    #[test]
    fn every_entry_begins_at_a_multiple_of_four() {
        for len in 0..5 {
            let mut archive = Archive::new(Vec::new());
            archive.file("d/name", 0o644, &vec![b'x'; len]).expect("a file");
            archive.file("e", 0o755, b"").expect("a file");
            let bytes = archive.finish().expect("an archive");
            let heads: Vec<_> = bytes.windows(6).enumerate().filter(|(_, at)| at == b"070701").collect();
            // The directory, both files, the end.
            assert_eq!(heads.len(), 4, "{len} bytes");
            assert!(heads.iter().all(|(at, _)| at % 4 == 0), "{len} bytes: {heads:?}");
            assert_eq!(bytes.len() % 4, 0, "{len} bytes");
        }
    }

    #[test]
    fn an_entry_has_its_mode_its_size_and_its_content() {
        let mut archive = Archive::new(Vec::new());
        archive.file("init", 0o755, b"#!/bin/sh").expect("a file");
        let bytes = archive.finish().expect("an archive");
        let field = |at: usize| {
            let digits = std::str::from_utf8(&bytes[6 + 8 * at..14 + 8 * at]).expect("digits");
            u32::from_str_radix(digits, 16).expect("a number")
        };
        assert_eq!((field(1), field(6), field(11)), (0o100_755, 9, 5));
        // The head has 110 bytes.
        assert_eq!((&bytes[110..116], &bytes[116..125]), (&b"init\0\0"[..], &b"#!/bin/sh"[..]));
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
        let bytes = archive.finish().expect("an archive");
        let text = String::from_utf8_lossy(&bytes);
        for (name, times) in [("usr/bin/sh\0", 1), ("bin\0usr/bin", 0), ("usr\0", 1)] {
            assert_eq!(text.matches(name).count(), times, "{name:?} in {text:?}");
        }
        assert!(text.contains("bin\0\0\0usr/bin"), "{text:?}");
    }

    #[test]
    fn dependencies_come_before_the_modules_that_need_them_and_once() {
        let table = "kernel/net/llc/llc.ko.xz:\n\
                     kernel/net/802/stp.ko.xz: kernel/net/llc/llc.ko.xz\n\
                     kernel/net/bridge/bridge.ko.xz: kernel/net/802/stp.ko.xz kernel/net/llc/llc.ko.xz\n\
                     kernel/net/sched/sch-ingress.ko: kernel/net/llc/llc.ko.xz\n\
                     kernel/net/other.ko:\n\
                     alias tun kernel/drivers/net/tun.ko: wrong\n";
        assert_eq!(
            in_order(table),
            [
                "kernel/net/llc/llc.ko.xz",
                "kernel/net/802/stp.ko.xz",
                "kernel/net/bridge/bridge.ko.xz",
                "kernel/net/sched/sch-ingress.ko"
            ]
        );
    }
}
