//! The architectures that the agent is released for, and what builds each of them.

use shell::tools::Tool;

/// An architecture of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Architecture {
    /// 64-bit x86
    #[value(name = "x86_64")]
    X86,
    /// 64-bit Arm
    #[value(name = "aarch64")]
    Arm,
}

impl Architecture {
    /// Every architecture of a release.
    pub(crate) const ALL: [Self; 2] = [Self::X86, Self::Arm];

    /// Returns the architecture of this machine, if the agent is released for it.
    pub(crate) fn here() -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == std::env::consts::ARCH)
    }

    /// Returns the name that Rust, uname(1) and RPM use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86_64",
            Self::Arm => "aarch64",
        }
    }

    /// Returns the name that Debian and OCI use.
    pub(crate) fn short(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// Returns the target triple of the static binary.
    pub(crate) fn triple(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-musl",
            Self::Arm => "aarch64-unknown-linux-musl",
        }
    }

    /// Returns the compiler of the little C code that the agent has (in ring), and its Debian package. The compiler for
    /// another architecture is one for glibc, which does as well: that code calls the C library by standard names only.
    pub(super) fn compiler(self) -> Tool {
        match self {
            _ if Self::here() == Some(self) => ("musl-gcc", "musl-tools"),
            Self::X86 => ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu"),
            Self::Arm => ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
        }
    }

    /// Returns a header of the C library that this compiler needs, and its Debian package.
    pub(super) fn header(self) -> Tool {
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
