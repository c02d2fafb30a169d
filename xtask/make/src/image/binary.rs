//! Builds the static binary, identical wherever its source lies.

use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target triple of the binary.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-musl";
/// The compiler for musl of the little C code that the agent has (in ring).
const CC: &str = "musl-gcc";

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

    /// Builds the agent with a Cargo profile; returns the path of the binary.
    pub(crate) fn build(&self, profile: &str) -> Result<PathBuf> {
        shell::tools::ensure(&[(CC, "musl-tools")])?;
        ensure_target()?;
        let home = std::env::var_os("CARGO_HOME").map_or_else(
            || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
            PathBuf::from,
        );
        // The last matching rule applies, and the target directory may lie below the source.
        let flags = [
            format!("--remap-path-prefix={}=/xdp-imds", self.top.display()),
            format!("--remap-path-prefix={}=/cargo", home.display()),
            format!("--remap-path-prefix={}=/target", self.target.display()),
            // Debug information would be stripped, so it is not made.
            "-Cdebuginfo=none".into(),
            "-Cstrip=symbols".into(),
        ];
        let mut cargo =
            shell::cargo(["build", "--profile", profile, "--locked", "--package", "metadata-user"]);
        cargo.args(["--bin", "xdp-imds", "--target", TARGET]).current_dir(&self.top);
        cargo.arg("--target-dir").arg(&self.target);
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")).env("CARGO_INCREMENTAL", "0");
        let prefix = format!(
            "-ffile-prefix-map={}=/cargo -ffile-prefix-map={}=/target",
            home.display(),
            self.target.display()
        );
        cargo.env("CC_x86_64_unknown_linux_musl", CC).env("CFLAGS_x86_64_unknown_linux_musl", prefix);
        shell::run(&mut cargo)?;
        let directory = if profile == "dev" { "debug" } else { profile };
        Ok(self.target.join(TARGET).join(directory).join("xdp-imds"))
    }
}

/// Makes rustup install the target's standard library if it is missing.
fn ensure_target() -> Result<()> {
    let mut rustc = Command::new("rustc");
    let output = rustc.args(["--print", "target-libdir", "--target", TARGET]).output()?;
    let directory = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    if output.status.success() && directory.is_dir() {
        return Ok(());
    }
    shell::run(Command::new("rustup").args(["target", "add", TARGET]))
        .with_context(|| format!("the standard library of {TARGET} is missing"))
}
