//! Builds the static agent for a host's machine, or takes one that is built.

use anyhow::{Context as _, Result, bail, ensure};
use shell::tools::{self, Tool};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A machine that the agent can be built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Machine {
    /// The name that uname(1) and Rust use.
    name: &'static str,
    /// The target triple of the static agent.
    triple: &'static str,
    /// The number of the machine in an ELF header (elf.h).
    elf: u16,
    /// The compiler of the little C code that the agent has, on another machine.
    cross: Tool,
}

const MACHINES: [Machine; 2] = [
    Machine {
        name: "x86_64",
        triple: "x86_64-unknown-linux-musl",
        elf: 62,
        cross: ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu libc6-dev-amd64-cross"),
    },
    Machine {
        name: "aarch64",
        triple: "aarch64-unknown-linux-musl",
        elf: 183,
        cross: ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    },
];

impl Machine {
    fn of(name: &str) -> Result<Self> {
        let found = MACHINES.into_iter().find(|machine| machine.name == name);
        found.with_context(|| {
            let known = MACHINES.map(|machine| machine.name).join(" and ");
            format!("the agent is built for {known}, not for {name}; build one and name it by --agent FILE")
        })
    }

    fn is_here(&self) -> bool {
        self.name == std::env::consts::ARCH
    }
}

/// Builds the agent for a machine, as uname(1) names it; returns the path of the binary.
pub(crate) fn build(machine: &str, profile: &str) -> Result<PathBuf> {
    let machine = Machine::of(machine)?;
    let triple = machine.triple;
    let compiler = if machine.is_here() { "musl-gcc" } else { machine.cross.0 };
    if machine.is_here() {
        tools::ensure(&[("musl-gcc", "musl-tools")])?;
    } else {
        ensure!(
            shell::which(compiler).is_some(),
            "missing: {compiler}, which builds for {}; on Debian: apt-get install {}",
            machine.name,
            machine.cross.1
        );
    }
    ensure_target(triple)?;
    let mut flags = vec!["-Cdebuginfo=none".to_owned(), "-Cstrip=symbols".to_owned()];
    if !machine.is_here() {
        // This machine's own compiler cannot link for another one. Start files and C library are Rust's.
        flags.push(format!("-Clinker={compiler}"));
    }
    let target = shell::target().join("load");
    let mut cargo = shell::cargo(["build", "--locked", "--profile", profile]);
    cargo.args(["--package", "metadata-user", "--bin", "xdp-imds", "--target", triple]);
    cargo.arg("--target-dir").arg(&target);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")).env("CARGO_INCREMENTAL", "0");
    cargo.env(format!("CC_{}", triple.replace('-', "_")), compiler);
    shell::run(&mut cargo)?;
    let directory = if profile == "dev" { "debug" } else { profile };
    Ok(target.join(triple).join(directory).join("xdp-imds"))
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

/// Checks that a binary is one for a machine, as uname(1) names it.
pub(crate) fn check(binary: &Path, machine: &str) -> Result<()> {
    let mut head = [0; 20];
    let read = File::open(binary).and_then(|mut file| file.read_exact(&mut head));
    read.with_context(|| format!("cannot read the agent {}", binary.display()))?;
    ensure!(head.starts_with(b"\x7fELF"), "{} is not a program of Linux", binary.display());
    // The order of octets is the fifth of the identification; both machines of the agent are little-endian.
    let found = u16::from_le_bytes([head[18], head[19]]);
    let Some(expected) = MACHINES.into_iter().find(|one| one.name == machine) else { return Ok(()) };
    if found != expected.elf {
        let found = MACHINES.into_iter().find(|one| one.elf == found);
        let found = found.map_or("another machine", |one| one.name);
        bail!("{} is an agent for {found}, and the host is {machine}", binary.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{MACHINES, Machine, check};

    #[test]
    fn a_triple_begins_with_the_name_of_its_machine() {
        for machine in MACHINES {
            assert_eq!(machine.triple.split('-').next(), Some(machine.name));
        }
    }

    #[test]
    fn a_machine_without_an_agent_is_refused_with_a_remedy() {
        let error = Machine::of("riscv64").expect_err("there is none").to_string();
        assert!(error.contains("riscv64") && error.contains("--agent"), "{error}");
    }

    #[test]
    fn only_a_program_for_the_machine_is_accepted() {
        let own = std::env::current_exe().expect("this program");
        let here = std::env::consts::ARCH;
        let other = MACHINES.iter().find(|machine| machine.name != here).expect("another machine").name;
        assert!(check(&own, here).is_ok());
        let error = check(&own, other).expect_err("another machine").to_string();
        assert!(error.contains(here) && error.contains(other), "{error}");
        let script = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(script.path(), "#!/bin/sh\nexec echo xdp-imds\n").expect("a script");
        assert!(check(script.path(), here).is_err());
    }
}
