//! A BPF file system of a test's own, in which links and maps are pinned.

use crate::netns::run;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

const PREFIX: &str = "xdp-imds-bpffs-";

/// A mounted bpffs. Dropping it unmounts it, and with that everything pinned there goes.
#[derive(Debug)]
pub struct Bpffs {
    directory: PathBuf,
}

impl Bpffs {
    /// Mounts one under the directory for temporary files. Those of earlier runs whose process is no longer alive are removed.
    ///
    /// # Errors
    /// When it cannot be mounted.
    pub fn mount() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("{PREFIX}{}-{number}", std::process::id()));
        std::fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let bpffs = Self { directory };
        run(Command::new("mount").args(["-t", "bpf", "-o", "mode=0700", "bpf"]).arg(&bpffs.directory))?;
        Ok(bpffs)
    }

    /// A directory on it, not made yet.
    #[must_use]
    pub fn pins(&self) -> PathBuf {
        self.directory.join("pins")
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// The names of the links pinned in [`Bpffs::pins`], sorted, none if there is no such directory.
    #[must_use]
    pub fn links(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.pins().join("v1/links")).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Those of programs on ports.
    #[must_use]
    pub fn port_links(&self) -> Vec<String> {
        self.links().into_iter().filter(|name| name.starts_with("port")).collect()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.directory) {
            eprintln!("{} stays behind: {error:#}", self.directory.display());
        }
    }
}

fn remove(directory: &Path) -> Result<()> {
    // Lazily: a process that is just ending may still have something of it open.
    let unmounted = run(Command::new("umount").arg("--lazy").arg(directory));
    std::fs::remove_dir(directory).or_else(|error| unmounted.map(drop).and(Err(error.into())))
}

fn sweep() {
    for entry in std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse::<u32>().ok());
        if let Some(pid) = owner
            && !Path::new("/proc").join(pid.to_string()).exists()
            && let Err(error) = remove(&entry.path())
        {
            eprintln!("left-over {}: {error:#}", entry.path().display());
        }
    }
}
