//! `xdp-imds pages`: writes manual pages and completions of shells, which packages ship.

use anyhow::{Context as _, Result};
use clap::Command;
use clap_complete::Shell;
use std::fs;
use std::path::{Path, PathBuf};

/// The shells, each with the name of its directory.
const SHELLS: [(Shell, &str); 3] = [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")];

/// Writes below `dir` a manual page of the command and of each verb that its help lists (`man1`), and one file of
/// completions for each shell (`bash`, `zsh`, `fish`). The content depends on nothing but the command.
///
/// # Errors
///
/// If a directory or file cannot be written.
pub fn write(mut command: Command, dir: &Path) -> Result<()> {
    let name = command.get_name().to_owned();
    let place = made(dir, "man1")?;
    // First, because completions add a verb `help` to the command.
    clap_mangen::generate_to(command.clone(), &place)
        .with_context(|| format!("cannot write manual pages in {}", place.display()))?;
    for (shell, place) in SHELLS {
        let place = made(dir, place)?;
        clap_complete::generate_to(shell, &mut command, &name, &place)
            .with_context(|| format!("cannot write completions in {}", place.display()))?;
    }
    Ok(())
}

/// Makes a directory below `dir`.
fn made(dir: &Path, name: &str) -> Result<PathBuf> {
    let place = dir.join(name);
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    Ok(place)
}
