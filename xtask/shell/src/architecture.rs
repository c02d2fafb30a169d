//! The architectures that the agent is released for, and how its static binary is built for each of them.

use crate::tools::{self, Tool};
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// An architecture of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Architecture {
    /// 64-bit x86.
    X86,
    /// 64-bit Arm.
    Arm,
}

impl Architecture {
    /// Every architecture of a release.
    pub const ALL: [Self; 2] = [Self::X86, Self::Arm];

    /// Returns the architecture of this machine, if the agent is released for it.
    #[must_use]
    pub fn here() -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == std::env::consts::ARCH)
    }

    /// Finds an architecture by the name that uname(1) prints.
    ///
    /// # Errors
    /// Fails if the agent is not built for it.
    pub fn named(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|one| one.name() == name);
        found.with_context(|| {
            format!("the agent is built for {} and not for {name}", Self::ALL.map(Self::name).join(" and "))
        })
    }

    /// Returns the name that Rust, uname(1) and RPM use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86_64",
            Self::Arm => "aarch64",
        }
    }

    /// Returns the name that Debian and OCI use.
    #[must_use]
    pub fn short(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// Returns the target triple of the static binary.
    #[must_use]
    pub fn triple(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-musl",
            Self::Arm => "aarch64-unknown-linux-musl",
        }
    }

    /// Installs what builds programs for this architecture: a compiler, and Rust's standard library.
    ///
    /// # Errors
    /// Fails if something is missing and cannot be installed; the error says what to run.
    pub fn prepare(self) -> Result<()> {
        tools::ensure(&[self.compiler(), self.header()])?;
        let triple = self.triple();
        let output = Command::new("rustc").args(["--print", "target-libdir", "--target", triple]).output()?;
        if output.status.success() && Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir() {
            return Ok(());
        }
        crate::run(Command::new("rustup").args(["target", "add", triple]))
            .with_context(|| format!("the standard library of {triple} is missing"))
    }

    /// Returns the command that builds the static agent with a Cargo profile into the directory `target`, with these
    /// flags of rustc and more.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn build_agent(self, profile: &str, target: &Path, mut flags: Vec<String>) -> Result<Command> {
        self.prepare()?;
        let (triple, (compiler, _)) = (self.triple(), self.compiler());
        // Debug information would be stripped, so it is not made.
        flags.extend(["-Cdebuginfo=none".into(), "-Cstrip=symbols".into()]);
        if Self::here() != Some(self) {
            // It also links, because this machine's own compiler cannot. Start files and C library are Rust's.
            flags.push(format!("-Clinker={compiler}"));
        }
        let mut cargo = crate::cargo(["build", "--locked", "--profile", profile]);
        cargo.args(["--package", "metadata-user", "--bin", "xdp-imds", "--target", triple]);
        cargo.arg("--target-dir").arg(target);
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")).env("CARGO_INCREMENTAL", "0");
        cargo.env(format!("CC_{}", self.variable()), compiler);
        Ok(cargo)
    }

    /// Builds the static agent with a Cargo profile, in a directory of its own; returns the path of the binary.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), or if the build fails.
    pub fn build_static(self, profile: &str) -> Result<PathBuf> {
        let target = crate::target().join("load");
        crate::run(&mut self.build_agent(profile, &target, Vec::new())?)?;
        Ok(self.products(&target, profile).join("xdp-imds"))
    }

    /// Returns the directory of what a build with a Cargo profile makes.
    #[must_use]
    pub fn products(self, target: &Path, profile: &str) -> PathBuf {
        target.join(self.triple()).join(if profile == "dev" { "debug" } else { profile })
    }

    /// Returns the triple as the names of environment variables end with it.
    #[must_use]
    pub fn variable(self) -> String {
        self.triple().replace('-', "_")
    }

    /// Returns the compiler of the little C code that the agent has (in ring), and its Debian package. The compiler for
    /// another architecture is one for glibc, which does as well: that code calls the C library by standard names only.
    fn compiler(self) -> Tool {
        match self {
            _ if Self::here() == Some(self) => ("musl-gcc", "musl-tools"),
            Self::X86 => ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu"),
            Self::Arm => ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
        }
    }

    /// Returns a header of the C library that this compiler needs, and its Debian package.
    fn header(self) -> Tool {
        match self {
            _ if Self::here() == Some(self) => ("/usr/include/stdint.h", "libc6-dev"),
            Self::X86 => ("/usr/x86_64-linux-gnu/include/stdint.h", "libc6-dev-amd64-cross"),
            Self::Arm => ("/usr/aarch64-linux-gnu/include/stdint.h", "libc6-dev-arm64-cross"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Architecture;

    #[test]
    fn an_architecture_without_an_agent_is_refused_by_name() {
        let error = Architecture::named("riscv64").expect_err("there is none").to_string();
        assert!(error.contains("riscv64") && error.contains("aarch64"), "{error}");
    }

    #[test]
    fn a_triple_begins_with_the_name_of_its_architecture() {
        for one in Architecture::ALL {
            assert_eq!(one.triple().split('-').next(), Some(one.name()));
        }
    }

    #[test]
    fn another_architecture_is_built_by_its_own_compiler() {
        for one in Architecture::ALL {
            let native = Architecture::here() == Some(one);
            assert_eq!(one.compiler().0 == "musl-gcc", native, "{one:?}");
            assert!(native || one.compiler().0.starts_with(one.name()), "{one:?}");
        }
    }
}
