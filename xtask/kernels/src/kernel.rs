//! Where kernels come from: Debian's archive, or files.

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use shell::architecture::Architecture as Processor;
use std::fs;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use testbed::netns::run;
use testbed::packages::{Packages, With};

/// A kernel that can be booted.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// The name in the table.
    pub(crate) name: String,
    pub(crate) image: PathBuf,
    /// The directory that has `lib/modules`, if any.
    pub(crate) root: Option<PathBuf>,
    /// The agent must refuse to serve on it.
    pub(crate) refused: bool,
}

/// A kernel of a Debian suite.
struct Debian {
    name: &'static str,
    suite: &'static str,
    refused: bool,
}

/// The kernels that have names, old before new.
const DEBIAN: [Debian; 4] = [
    // Older than the agent supports.
    Debian { name: "5.10", suite: "bullseye", refused: true },
    Debian { name: "6.1", suite: "bookworm", refused: false },
    Debian { name: "6.12", suite: "trixie", refused: false },
    Debian { name: "newest", suite: "trixie-backports", refused: false },
];

/// The names of Debian's kernels.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    DEBIAN.iter().map(|kernel| kernel.name)
}

/// Returns the kernel of a name or a path. `work` is a directory for what is unpacked.
pub(crate) fn find(
    word: &str,
    architecture: Architecture,
    modules: Option<&Path>,
    work: &Path,
) -> Result<Kernel> {
    if let Some(debian) = DEBIAN.iter().find(|kernel| kernel.name == word) {
        return from_debian(debian, architecture);
    }
    let path = Path::new(word);
    let Ok(metadata) = fs::metadata(path) else {
        let names: Vec<_> = names().collect();
        bail!("`{word}` is neither a kernel's name ({}) nor a file or directory", names.join(", "));
    };
    let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let name =
        file.strip_prefix("vmlinuz-").or_else(|| file.strip_suffix(".deb")).unwrap_or(&file).to_owned();
    let (image, mut root) = if metadata.is_dir() {
        (image(path)?, Some(path.to_owned()))
    } else if file.ends_with(".deb") {
        let root = unpack(path, &work.join(&name))?;
        (image(&root)?, Some(root))
    } else {
        (path.to_owned(), None)
    };
    if let Some(modules) = modules {
        let is_package = modules.extension().is_some_and(|extension| extension == "deb");
        root = Some(if is_package { unpack(modules, &work.join("modules"))? } else { modules.to_owned() });
    }
    Ok(Kernel { name, image, root, refused: false })
}

/// Downloads the kernel for clouds, which is smaller than the others and has all that the agent needs.
fn from_debian(debian: &Debian, architecture: Architecture) -> Result<Kernel> {
    // The package of this name only depends on that of the newest revision. Since Linux 6.19 that one, too, only
    // depends on two others: the kernel, and its modules.
    let newest = format!("?reverse-depends(?exact-name(linux-image-cloud-{}))", architecture.debian());
    let names = "?or(?name(^linux-binary-), ?name(^linux-modules-))";
    let parts = format!("?and({names}, ?reverse-depends({newest}))");
    let package = format!("?or({newest}, {parts})");
    let packages =
        Packages::get_for(Some(architecture.debian()), debian.suite, &[package.as_str()], With::Nothing)
            .with_context(|| format!("cannot get the kernel of Debian's {}", debian.suite))?;
    let root = packages.root().to_owned();
    Ok(Kernel { name: debian.name.into(), image: image(&root)?, root: Some(root), refused: debian.refused })
}

/// The kernel's image in an unpacked package: in `/boot`, or since Linux 6.19 beside the modules.
fn image(root: &Path) -> Result<PathBuf> {
    let modules = entries(&root.join("lib/modules"));
    let files = modules.iter().flat_map(|release| entries(release)).chain(entries(&root.join("boot")));
    let is_image =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"));
    let found = files.filter(is_image).min();
    found.with_context(|| format!("no vmlinuz in {0}/boot and in {0}/lib/modules", root.display()))
}

/// The entries of a directory; none if it cannot be read.
fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn unpack(package: &Path, to: &Path) -> Result<PathBuf> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(to)?;
    run(Command::new("dpkg-deb").arg("--extract").args([package, to]))?;
    // Since Debian 13 the modules are in /usr/lib.
    if !to.join("lib").exists() && to.join("usr/lib").exists() {
        std::os::unix::fs::symlink("usr/lib", to.join("lib"))?;
    }
    ensure!(to.join("lib/modules").is_dir(), "{} has no modules of a kernel", package.display());
    Ok(to.to_owned())
}

// The processors that are emulated, and what differs between them.

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
            // bytes that the kernel has just patched, as it does whenever an XDP program is attached, and the kernel
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

// Builds the agent and the test programs, without symbols, because they lie in the guest's memory.

/// The programs of one architecture.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) agent: PathBuf,
    /// Test programs by the name of their directory in `tests/`.
    pub(crate) tests: Vec<(String, PathBuf)>,
}

/// Settings of the build for arm64. The programs lie in the guest's memory, so they have no symbols: as flags, because a
/// profile would build macros and build scripts again. Tests and agent share dependencies at one level of optimisation.
const SETTINGS: [(&str, &str); 3] = [
    ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUSTFLAGS", "-Cdebuginfo=none -Cstrip=symbols"),
    ("CARGO_PROFILE_TEST_OPT_LEVEL", "0"),
    ("CARGO_INCREMENTAL", "0"),
];
/// The agent and the tests in one build, without what only clusters need, so that dependencies are built once.
const WITHOUT_CLUSTER: [&str; 8] = [
    "build",
    "--package",
    "metadata-user",
    "--package",
    "xdp-imds-tests",
    "--no-default-features",
    "--features",
    "xdp-imds-tests/privileged",
];

/// Builds the agent and these test programs.
pub(crate) fn build(architecture: Architecture, names: &[&str], work: &Path) -> Result<Programs> {
    let tests = names.iter().flat_map(|name| ["--test", name]);
    let built = match architecture {
        // With the features of the whole workspace, so that nothing is built again that `cargo xtask test` built.
        Architecture::Amd64 => {
            let mut agent = shell::tested_agent();
            let mut test = shell::cargo(["test", "--no-run", "--workspace"]);
            [executables(&mut agent)?, executables(test.args(tests))?].concat()
        }
        Architecture::Arm64 => {
            Processor::Arm.prepare()?;
            let mut cargo = shell::cargo(WITHOUT_CLUSTER);
            executables(
                cargo
                    .args(["--target", Processor::Arm.triple(), "--bin", "xdp-imds"])
                    .args(tests)
                    .envs(SETTINGS),
            )?
        }
    };
    let find = |name: &str| {
        let found = built.iter().find(|(of, _)| of == name);
        found.map(|(_, path)| path.clone()).with_context(|| format!("Cargo built no program `{name}`"))
    };
    let directory = work.join(format!("programs-{}", architecture.debian()));
    fs::create_dir_all(&directory)?;
    let ready = |name: &str| match architecture {
        Architecture::Amd64 => strip(&find(name)?, &directory.join(name)),
        Architecture::Arm64 => find(name),
    };
    let tests = names.iter().map(|&name| Ok((name.to_owned(), ready(name)?))).collect::<Result<_>>()?;
    Ok(Programs { agent: ready("xdp-imds")?, tests })
}

/// Runs Cargo, and returns the names and paths of the programs it built.
fn executables(cargo: &mut Command) -> Result<Vec<(String, PathBuf)>> {
    cargo.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = cargo.spawn().context("cannot run cargo")?;
    let output = child.stdout.take().context("the output of cargo is piped")?;
    let mut built = Vec::new();
    for line in BufReader::new(output).lines() {
        built.extend(executable(&line?));
    }
    let status = child.wait()?;
    ensure!(status.success(), "cargo: {status}");
    Ok(built)
}

/// Reads a message of Cargo; `None` unless it tells of a program.
fn executable(line: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let path = message["executable"].as_str()?;
    Some((message["target"]["name"].as_str()?.to_owned(), path.into()))
}

fn strip(from: &Path, to: &Path) -> Result<PathBuf> {
    shell::tools::ensure(&[("strip", "binutils")])?;
    run(Command::new("strip").arg("-o").args([to, from]))?;
    Ok(to.to_owned())
}

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn only_messages_of_programs_have_a_path() {
        for (line, expected) in [
            (
                r#"{"reason":"compiler-artifact","target":{"name":"doctor"},"executable":"/t/doctor-1"}"#,
                Some("doctor"),
            ),
            (r#"{"reason":"compiler-artifact","target":{"name":"libc"},"executable":null}"#, None),
            (r#"{"reason":"build-finished","success":true}"#, None),
            ("no JSON", None),
        ] {
            assert_eq!(executable(line).map(|(name, _)| name).as_deref(), expected, "{line}");
        }
    }
}
