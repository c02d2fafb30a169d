//! Builds the static agent for a host's machine, or takes one that is built.

use anyhow::{Context as _, Result, bail, ensure};
use shell::architecture::Architecture;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The number of an architecture in an ELF header (elf.h).
fn elf(architecture: Architecture) -> u16 {
    match architecture {
        Architecture::X86 => 62,
        Architecture::Arm => 183,
    }
}

/// Builds the agent for a machine, as uname(1) names it; returns the path of the binary.
pub(crate) fn build(machine: &str, profile: &str) -> Result<PathBuf> {
    let architecture = Architecture::named(machine).context("build an agent, and name it by --agent FILE")?;
    architecture.build_static(profile)
}

/// Checks that a binary is one for a machine, as uname(1) names it.
pub(crate) fn check(binary: &Path, machine: &str) -> Result<()> {
    let mut head = [0; 20];
    let read = File::open(binary).and_then(|mut file| file.read_exact(&mut head));
    read.with_context(|| format!("cannot read the agent {}", binary.display()))?;
    ensure!(head.starts_with(b"\x7fELF"), "{} is not a program of Linux", binary.display());
    // The order of octets is the fifth of the identification; both machines of the agent are little-endian.
    let found = u16::from_le_bytes([head[18], head[19]]);
    let Ok(expected) = Architecture::named(machine) else { return Ok(()) };
    if found != elf(expected) {
        let found = Architecture::ALL.into_iter().find(|one| elf(*one) == found);
        let found = found.map_or("another machine", Architecture::name);
        bail!("{} is an agent for {found}, and the host is {machine}", binary.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{build, check};
    use shell::architecture::Architecture;

    #[test]
    fn a_machine_without_an_agent_is_refused_with_a_remedy() {
        let error = format!("{:#}", build("riscv64", "dev").expect_err("there is none"));
        assert!(error.contains("riscv64") && error.contains("--agent"), "{error}");
    }

    #[test]
    fn only_a_program_for_the_machine_is_accepted() {
        let own = std::env::current_exe().expect("this program");
        let here = std::env::consts::ARCH;
        let other = Architecture::ALL
            .map(Architecture::name)
            .into_iter()
            .find(|name| *name != here)
            .expect("another");
        assert!(check(&own, here).is_ok());
        let error = check(&own, other).expect_err("another machine").to_string();
        assert!(error.contains(here) && error.contains(other), "{error}");
        let script = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(script.path(), "#!/bin/sh\nexec echo xdp-imds\n").expect("a script");
        assert!(check(script.path(), here).is_err());
    }
}
