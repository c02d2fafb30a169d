//! A private BPF file system in which a test pins links and maps.

use crate::netns::run;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

const PREFIX: &str = "xdp-imds-bpffs-";

/// A mounted bpffs. Unmounted on drop, which removes everything pinned in it.
#[derive(Debug)]
pub struct Bpffs {
    directory: PathBuf,
}

impl Bpffs {
    /// Mounts a bpffs in the directory for temporary files. Also removes each bpffs whose process has ended.
    ///
    /// # Errors
    /// Fails if it cannot be mounted.
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

    /// Path for the agent's pins. The agent creates this directory.
    #[must_use]
    pub fn pins(&self) -> PathBuf {
        self.directory.join("pins")
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Makes it read-only, or writable again.
    ///
    /// # Errors
    /// Fails if it cannot be mounted again.
    pub fn set_read_only(&self, read_only: bool) -> Result<()> {
        let how = if read_only { "remount,ro" } else { "remount,rw" };
        run(Command::new("mount").args(["-o", how]).arg(&self.directory)).map(drop)
    }

    /// Mounts another bpffs over this one, until [`Bpffs::uncover`].
    ///
    /// # Errors
    /// Fails if it cannot be mounted.
    pub fn cover(&self) -> Result<()> {
        run(Command::new("mount").args(["-t", "bpf", "-o", "mode=0700", "bpf"]).arg(&self.directory))
            .map(drop)
    }

    /// Removes the bpffs that [`Bpffs::cover`] mounted.
    ///
    /// # Errors
    /// Fails if it cannot be unmounted.
    pub fn uncover(&self) -> Result<()> {
        run(Command::new("umount").arg(&self.directory)).map(drop)
    }

    /// Sorted names of the links pinned in [`Bpffs::pins`]; empty if that directory does not exist.
    #[must_use]
    pub fn links(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.pins().join("v1/links")).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// The names of links that attach programs to ports.
    #[must_use]
    pub fn port_links(&self) -> Vec<String> {
        self.links().into_iter().filter(|name| name.starts_with("port")).collect()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.directory) {
            eprintln!("cannot remove {}: {error:#}", self.directory.display());
        }
    }
}

fn remove(directory: &Path) -> Result<()> {
    // A lazy unmount succeeds even if an ending process still has a file open.
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
            eprintln!("cannot remove left-over {}: {error:#}", entry.path().display());
        }
    }
}
