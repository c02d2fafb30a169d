//! Afterburn, the metadata agent of Fedora CoreOS and Flatcar, built from the package registry below the target
//! directory. Debian has no package of it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The release that is built.
pub const VERSION: &str = "5.11.0";

/// The arguments with which Cargo builds it below `target`. Without optimisation that takes two minutes of one core.
#[must_use]
pub fn install(target: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> =
        ["install", "--debug", "--locked", "--quiet", "--no-track"].map(Into::into).into();
    words.extend(["--root".into(), root(target).into()]);
    words.push(format!("afterburn@{VERSION}").into());
    words
}

/// The built program below a target directory, there or not.
#[must_use]
pub fn program(target: &Path) -> PathBuf {
    root(target).join("bin/afterburn")
}

fn root(target: &Path) -> PathBuf {
    target.join(format!("afterburn-{VERSION}"))
}
