//! Releases from the Python package registry, installed below a directory of the build.

use anyhow::{Context as _, Result};
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::netns::run;

/// The distribution's interpreter. Another one on PATH can be in a home directory that a guest or another user does
/// not see.
pub const PYTHON: &str = "/usr/bin/python3";

/// Installs the releases that `requirements` names with their hashes, unless this was done before. Returns the
/// directory, `<below>/<name>-<digest>`; the digest changes with the requirements and the interpreter.
///
/// pip accepts wheels only, so that the installation runs no code of the packages.
///
/// # Errors
/// When Python or pip is missing, the registry is out of reach, or a file does not have its hash.
pub fn install(requirements: &str, below: &Path, name: &str) -> Result<PathBuf> {
    let version =
        run(Command::new(PYTHON).arg("--version")).context("`apt-get install python3` installs Python")?;
    let mut hasher = DefaultHasher::new();
    (requirements, version).hash(&mut hasher);
    let root = below.join(format!("{name}-{:016x}", hasher.finish()));
    if root.is_dir() {
        return Ok(root);
    }
    fs::create_dir_all(below).with_context(|| format!("cannot create {}", below.display()))?;
    let aside =
        tempfile::tempdir_in(below).with_context(|| format!("cannot write to {}", below.display()))?;
    let (list, tree) = (aside.path().join("requirements.txt"), aside.path().join("tree"));
    fs::write(&list, requirements)?;
    let mut pip = Command::new(PYTHON);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries=2",
        "--disable-pip-version-check",
        "--no-compile",
    ]);
    pip.args(["--root-user-action=ignore", "--require-hashes", "--no-deps", "--only-binary=:all:"]);
    pip.arg("--target").arg(&tree).arg("--requirement").arg(&list);
    run(&mut pip).context("`apt-get install python3-pip` installs pip")?;
    if let Err(error) = fs::rename(&tree, &root)
        && !root.is_dir()
    {
        // The error counts only if no other program has installed them in the meantime.
        return Err(error).with_context(|| format!("cannot put {} in place", root.display()));
    }
    Ok(root)
}
