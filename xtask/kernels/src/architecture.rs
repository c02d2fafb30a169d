//! The processors that are emulated, and what differs between them.

use clap::ValueEnum;
use std::fs::{self, File};

/// A processor architecture, by Debian's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Architecture {
    /// x86_64, with the programs that this machine's tests use.
    Amd64,
    /// aarch64, with static programs.
    Arm64,
}

impl Architecture {
    /// Debian's name.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// QEMU's program, and the Debian package that has it.
    pub(crate) fn qemu(self) -> shell::tools::Tool {
        match self {
            Self::Amd64 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Arm64 => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// QEMU's options for machine and processor.
    pub(crate) fn machine(self) -> &'static [&'static str] {
        match self {
            Self::Amd64 if has_kvm() => &["-machine", "q35,accel=kvm", "-cpu", "host"],
            // TCG emulates the vector extensions of newer models slowly. With a thread for each processor it may run
            // octets that the kernel has just patched, as it does whenever an XDP program is attached, and the kernel
            // then stops at a stray int3.
            Self::Amd64 => &["-machine", "q35", "-accel", "tcg,thread=single", "-cpu", "qemu64,-svm"],
            // A server's processor. `max` has features that kernels before 5.17 do not boot with.
            Self::Arm64 => &["-machine", "virt,accel=tcg", "-cpu", "neoverse-n1"],
        }
    }

    /// The kernel's name of the serial console.
    pub(crate) fn console(self) -> &'static str {
        match self {
            Self::Amd64 => "ttyS0",
            Self::Arm64 => "ttyAMA0",
        }
    }
}

/// True if KVM works here. A virtual machine may have `/dev/kvm` without the extensions that KVM needs.
fn has_kvm() -> bool {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    opens && cpu.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
}
