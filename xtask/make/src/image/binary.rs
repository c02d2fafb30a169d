//! Builds the static binary, identical wherever its source lies.

use super::pages;
use anyhow::{Context as _, Result, ensure};
use shell::architecture::Architecture;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A source tree of the project.
#[derive(Debug)]
pub(crate) struct Tree {
    top: PathBuf,
    target: PathBuf,
    /// Deletes a copied tree when dropped.
    _copy: Option<tempfile::TempDir>,
}

impl Tree {
    /// Returns the tree that this program was built from.
    pub(crate) fn here() -> Result<Self> {
        Ok(Self { top: shell::top().to_owned(), target: shell::target().join("image-build"), _copy: None })
    }

    /// Copies all tracked and untracked files, including uncommitted changes, to a temporary directory.
    pub(crate) fn copy() -> Result<Self> {
        let room = tempfile::Builder::new().prefix("xdp-imds-elsewhere-").tempdir()?;
        let top = room.path().join("source");
        let listed = Command::new("git")
            .arg("-C")
            .arg(shell::top())
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .output()
            .context("cannot run git")?;
        ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim());
        let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
        for name in names.split_terminator('\0') {
            let (from, to) = (shell::top().join(name), top.join(name));
            // Deleted, but the deletion is not committed yet.
            if !from.exists() {
                continue;
            }
            fs::create_dir_all(to.parent().context("the file's path has no directory")?)?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        Ok(Self { target: room.path().join("target"), top, _copy: Some(room) })
    }

    /// Returns the top directory of the tree.
    pub(crate) fn top(&self) -> &Path {
        &self.top
    }

    /// Returns the Cargo target directory of the tree.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Builds the agent for an architecture with a Cargo profile; returns the path of the binary.
    pub(crate) fn build(&self, architecture: Architecture, profile: &str) -> Result<PathBuf> {
        let home = std::env::var_os("CARGO_HOME").map_or_else(
            || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
            PathBuf::from,
        );
        // The last matching rule applies, and the target directory may lie below the source.
        let flags = vec![
            format!("--remap-path-prefix={}=/xdp-imds", self.top.display()),
            format!("--remap-path-prefix={}=/cargo", home.display()),
            format!("--remap-path-prefix={}=/target", self.target.display()),
        ];
        let prefix = format!(
            "-ffile-prefix-map={}=/cargo -ffile-prefix-map={}=/target",
            home.display(),
            self.target.display()
        );
        let mut cargo = architecture.build_agent(profile, &self.target, flags)?;
        cargo.env(format!("CFLAGS_{}", architecture.variable()), prefix).current_dir(&self.top);
        shell::run(&mut cargo)?;
        Ok(self.products(architecture, profile).join("xdp-imds"))
    }

    /// Writes manual pages and completions beside the binary for an architecture. They are the same for all, so the
    /// binary of this machine writes them; it must be built.
    pub(crate) fn write_pages(&self, architecture: Architecture, profile: &str) -> Result<PathBuf> {
        let native = self.products(native()?, profile).join("xdp-imds");
        pages::write(&native, &self.products(architecture, profile))
    }

    /// Returns the directory of what a build with a Cargo profile makes.
    pub(crate) fn products(&self, architecture: Architecture, profile: &str) -> PathBuf {
        architecture.products(&self.target, profile)
    }
}

/// Returns the architecture of this machine.
pub(crate) fn native() -> Result<Architecture> {
    Architecture::here().with_context(|| format!("the agent is not built for {}", std::env::consts::ARCH))
}
