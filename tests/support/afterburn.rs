//! Afterburn, the metadata agent of Fedora CoreOS and Flatcar. It is built from the package registry into the target
//! directory, because Debian does not package it.

use crate::privileged;
use anyhow::{Context as _, Result, ensure};
use shell::afterburn::{install, program};
use std::path::{Path, PathBuf};

/// Returns the program. Skips the test like [`privileged::or_skip`] if privileges or the program are missing. Tests do
/// not build it, because they run as root and the build runs code of many packages.
///
/// # Panics
/// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
#[must_use]
#[track_caller]
pub fn or_skip() -> Option<PathBuf> {
    let ready = match privileged::missing() {
        Some(reason) => Err(reason.to_owned()),
        None => built().map_err(|error| format!("{error:#}")),
    };
    privileged::or_skip_for(ready.as_ref().err().map(String::as_str)).then(|| ready.ok())?
}

fn built() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the running program's own file")?;
    // `own` is target/<profile>/deps/<test>. All profiles share one program.
    let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
    let program = program(target);
    let words: Vec<_> = install(Path::new("target")).iter().map(|word| word.display().to_string()).collect();
    ensure!(
        program.is_file(),
        "afterburn is not built; `cargo xtask test` builds it, and so does `cargo {}`",
        words.join(" ")
    );
    Ok(program)
}
