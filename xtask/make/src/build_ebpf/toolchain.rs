//! Finds the compiler and linker of the eBPF objects, or installs them, or reports what is missing.

use anyhow::{Context as _, Result, bail, ensure};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's Rust with the source of its standard library, and the LLVM that the linker uses.
const DEBIAN_PACKAGES: [&str; 7] =
    ["rustc-web", "cargo-web", "rust-web-src", "llvm-22-dev", "libpolly-22-dev", "zlib1g-dev", "libzstd-dev"];
/// The directory of that LLVM on Debian. The linker's own search stops at the first `lib64` beside `llvm-config`, which
/// on Debian is `/usr/lib64` and holds no LLVM.
const DEBIAN_LLVM: &str = "/usr/lib/llvm-22";
/// The path of `core`'s source below a sysroot.
const CORE_SOURCE: &str = "lib/rustlib/src/rust/library/core/src/lib.rs";
/// The version of the linker that built the committed objects.
const LINKER_VERSION: &str = "0.13.0";

/// A compiler with the source of `core`, and a linker for eBPF.
pub(super) struct Toolchain {
    /// The path of the compiler.
    pub(super) rustc: PathBuf,
    /// The path of the Cargo that belongs to the compiler.
    pub(super) cargo: PathBuf,
    /// The first line of `rustc --version --verbose`.
    pub(super) rustc_version: String,
    /// The directory with the compiler's libraries.
    pub(super) sysroot: PathBuf,
    /// The version of the compiler's LLVM.
    rustc_llvm: String,
    /// The path of the linker.
    linker: PathBuf,
    /// The version of the linker.
    linker_version: String,
    /// The file name of the LLVM library that the linker uses.
    linker_llvm: String,
}

impl Toolchain {
    /// Finds the tools, preferring those of the record, and installs missing ones where it can.
    pub(super) fn ensure(recorded: &str) -> Result<Self> {
        let (rustc, cargo) = match find_rust(recorded) {
            Some(found) => found,
            None => {
                install_debian_packages()?;
                find_rust(recorded).context("the packages are installed but have no Rust with its source")?
            }
        };
        let linker = match find_linker() {
            Some(found) => found,
            None => {
                install_linker()?;
                find_linker().context("bpf-linker is installed, but no directory of PATH has it")?
            }
        };
        let verbose = output(Command::new(&rustc).args(["--version", "--verbose"]))?;
        let field = |name| verbose.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let version = output(Command::new(&linker).arg("--version"))?;
        Ok(Self {
            rustc_version: verbose.lines().next().unwrap_or_default().to_owned(),
            rustc_llvm: field("LLVM version: ").context("rustc does not show the version of its LLVM")?,
            sysroot: sysroot(&rustc)?,
            linker_version: version.split_whitespace().last().unwrap_or_default().to_owned(),
            linker_llvm: linked_llvm(&linker),
            rustc,
            cargo,
            linker,
        })
    }

    /// Returns the versions of the tools as TOML, the first part of `toolchain.toml`.
    pub(super) fn record(&self) -> String {
        format!(
            "# What made the objects here; written by `cargo xtask build-ebpf`.\n\
             rustc = \"{}\"\nrustc-llvm = \"{}\"\nbpf-linker = \"{}\"\nbpf-linker-llvm = \"{}\"\n",
            self.rustc_version, self.rustc_llvm, self.linker_version, self.linker_llvm
        )
    }

    /// Returns PATH with the linker's directory first. The compiler finds the linker by its name.
    pub(super) fn path(&self) -> Result<OsString> {
        let own = self.linker.parent().map(Path::to_owned);
        Ok(env::join_paths(own.into_iter().chain(search_path()))?)
    }
}

/// Returns Cargo's home, which has the sources of dependencies.
pub(super) fn cargo_home() -> Result<PathBuf> {
    let set = env::var_os("CARGO_HOME").map(PathBuf::from);
    set.or_else(|| env::home_dir().map(|home| home.join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")
}

/// Prints a command and runs it. An exit status other than zero is an error.
pub(super) fn run(command: &mut Command) -> Result<()> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let shown = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("cannot run {shown}"))?;
    ensure!(status.success(), "{shown}: {status}");
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

fn search_path() -> Vec<PathBuf> {
    env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default()
}

fn which(program: &str) -> Option<PathBuf> {
    search_path().into_iter().map(|dir| dir.join(program)).find(|file| file.is_file())
}

fn sysroot(rustc: &Path) -> Result<PathBuf> {
    Ok(PathBuf::from(output(Command::new(rustc).args(["--print", "sysroot"]))?.trim()))
}

/// Finds a compiler and its Cargo that can build `core`: the system's or rustup's nightly, whichever the record names
/// first.
fn find_rust(recorded: &str) -> Option<(PathBuf, PathBuf)> {
    let system = Some((PathBuf::from("/usr/bin/rustc"), PathBuf::from("/usr/bin/cargo")));
    let rustup = |program| {
        let found = output(Command::new("rustup").args(["which", "--toolchain", "nightly", program])).ok()?;
        Some(PathBuf::from(found.trim()))
    };
    let nightly = rustup("rustc").zip(rustup("cargo"));
    let builds_core = |(rustc, cargo): &(PathBuf, PathBuf)| {
        cargo.is_file() && sysroot(rustc).is_ok_and(|root| root.join(CORE_SOURCE).is_file())
    };
    let is_recorded = |(rustc, _): &(PathBuf, PathBuf)| {
        let version = output(Command::new(rustc).arg("--version")).unwrap_or_default();
        !version.is_empty() && recorded.contains(version.trim())
    };
    let mut found: Vec<_> = [system, nightly].into_iter().flatten().filter(builds_core).collect();
    found.sort_by_key(|tools| !is_recorded(tools));
    found.into_iter().next()
}

fn find_linker() -> Option<PathBuf> {
    let installed = cargo_home().ok().map(|home| home.join("bin/bpf-linker")).filter(|file| file.is_file());
    which("bpf-linker").or(installed)
}

/// Returns the name of the LLVM library that a linker is linked to, which ends in the version.
fn linked_llvm(linker: &Path) -> String {
    let listed = output(Command::new("ldd").arg(linker)).unwrap_or_default();
    let library = listed.split_whitespace().find(|word| word.starts_with("libLLVM"));
    library.unwrap_or("static").to_owned()
}

fn install_debian_packages() -> Result<()> {
    let packages = DEBIAN_PACKAGES.join(" ");
    let root = output(Command::new("id").arg("-u")).is_ok_and(|uid| uid.trim() == "0");
    if which("apt-get").is_none() || !root {
        bail!(
            "no Rust with the source of `core` is installed. Either add one to rustup \
             (`rustup toolchain install nightly --component rust-src`), or on Debian, as root:\n  \
             apt-get install --no-install-recommends {packages}"
        );
    }
    let apt =
        |words: &[&str]| run(Command::new("apt-get").args(words).env("DEBIAN_FRONTEND", "noninteractive"));
    let install = [&["install", "--yes", "--no-install-recommends"][..], &DEBIAN_PACKAGES].concat();
    // Fresh machines have no package lists yet.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
}

fn install_linker() -> Result<()> {
    if !Path::new(DEBIAN_LLVM).is_dir() {
        bail!(
            "bpf-linker is missing, and so is {DEBIAN_LLVM} to build it on. Install bpf-linker {LINKER_VERSION} \
             (https://github.com/aya-rs/bpf-linker#installation), or on Debian, as root:\n  \
             apt-get install --no-install-recommends {}",
            DEBIAN_PACKAGES.join(" ")
        );
    }
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["install", "bpf-linker", "--version", LINKER_VERSION, "--locked"]);
    cargo.args(["--no-default-features", "--features", "llvm-22"]);
    run(cargo.env("LLVM_PREFIX", DEBIAN_LLVM))
}
