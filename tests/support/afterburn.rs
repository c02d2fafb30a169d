//! Afterburn, the metadata agent of Fedora CoreOS and Flatcar, built from the package registry below the target
//! directory. Debian has no package of it.

use crate::privileged;
use anyhow::{Context as _, Result, ensure};
use shell::afterburn::{install, program};
use std::path::{Path, PathBuf};

/// The program when the calling test may go on; otherwise it skips as [`privileged::or_skip`] does, for lack of
/// privilege or of the program. A test does not build it itself: it runs as root, and the build runs programs of
/// many packages.
///
/// # Panics
/// When something is missing where no test may skip.
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
    // target/<profile>/deps/<test>: the program serves every profile.
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
