//! Builds Afterburn, the metadata agent of Fedora CoreOS and Flatcar, from the package registry into the target
//! directory. Debian has no package of it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The release to build.
pub const VERSION: &str = "5.11.0";

/// Returns Cargo's arguments to install it below `target`. A build without optimisation takes one core two minutes.
#[must_use]
pub fn install(target: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> =
        ["install", "--debug", "--locked", "--quiet", "--no-track"].map(Into::into).into();
    words.extend(["--root".into(), root(target).into()]);
    words.push(format!("afterburn@{VERSION}").into());
    words
}

/// Returns the path of the program below `target`, whether or not it is built.
#[must_use]
pub fn program(target: &Path) -> PathBuf {
    root(target).join("bin/afterburn")
}

fn root(target: &Path) -> PathBuf {
    target.join(format!("afterburn-{VERSION}"))
}
