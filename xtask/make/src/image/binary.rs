//! Builds the static binary, identical wherever its source lies.

use super::architecture::Architecture;
use super::pages;
use anyhow::{Context as _, Result, ensure};
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
        shell::tools::ensure(&[architecture.compiler(), architecture.header()])?;
        let (compiler, _) = architecture.compiler();
        let triple = architecture.triple();
        ensure_target(triple)?;
        let home = std::env::var_os("CARGO_HOME").map_or_else(
            || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
            PathBuf::from,
        );
        // The last matching rule applies, and the target directory may lie below the source.
        let mut flags = vec![
            format!("--remap-path-prefix={}=/xdp-imds", self.top.display()),
            format!("--remap-path-prefix={}=/cargo", home.display()),
            format!("--remap-path-prefix={}=/target", self.target.display()),
            // Debug information would be stripped, so it is not made.
            "-Cdebuginfo=none".into(),
            "-Cstrip=symbols".into(),
        ];
        if Architecture::here() != Some(architecture) {
            // It also links, because this machine's own compiler cannot. Start files and C library are Rust's.
            flags.push(format!("-Clinker={compiler}"));
        }
        let mut cargo =
            shell::cargo(["build", "--profile", profile, "--locked", "--package", "metadata-user"]);
        cargo.args(["--bin", "xdp-imds", "--target", triple]).current_dir(&self.top);
        cargo.arg("--target-dir").arg(&self.target);
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")).env("CARGO_INCREMENTAL", "0");
        let prefix = format!(
            "-ffile-prefix-map={}=/cargo -ffile-prefix-map={}=/target",
            home.display(),
            self.target.display()
        );
        let variable = triple.replace('-', "_");
        cargo.env(format!("CC_{variable}"), compiler).env(format!("CFLAGS_{variable}"), prefix);
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
        let directory = if profile == "dev" { "debug" } else { profile };
        self.target.join(architecture.triple()).join(directory)
    }
}

/// Returns the architecture of this machine.
pub(crate) fn native() -> Result<Architecture> {
    Architecture::here().with_context(|| format!("the agent is not built for {}", std::env::consts::ARCH))
}

/// Makes rustup install the target's standard library if it is missing.
fn ensure_target(triple: &str) -> Result<()> {
    let mut rustc = Command::new("rustc");
    let output = rustc.args(["--print", "target-libdir", "--target", triple]).output()?;
    let directory = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    if output.status.success() && directory.is_dir() {
        return Ok(());
    }
    shell::run(Command::new("rustup").args(["target", "add", triple]))
        .with_context(|| format!("the standard library of {triple} is missing"))
}
