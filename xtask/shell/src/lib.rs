//! Runs other programs, as this user or as root, and holds what `cargo xtask` shares with the programs it starts.

pub mod architecture;
pub mod tools;

use anyhow::{Context as _, Result, bail, ensure};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use variables::BUILT;

/// Returns the exit code of a verb, and prints its error with all causes. There is no backtrace even if
/// `RUST_BACKTRACE` asks for one: an error names what to do, and a panic still has one.
pub fn exit_code(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the top directory of the project.
pub fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("this crate is two directories below the project")
}

/// Variables that `cargo run` sets for the program that it runs, by their first characters.
const OF_CARGO_RUN: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];

/// Returns a Cargo command that runs at the top of the project.
///
/// It does not inherit the variables that describe this program's package: build scripts depend on them, so crates would
/// be built again whenever somebody uses Cargo with and without `cargo xtask` by turns.
pub fn cargo<W: AsRef<OsStr>>(words: impl IntoIterator<Item = W>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words).current_dir(top());
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| OF_CARGO_RUN.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
    command
}

/// Returns the Cargo command that builds the agent for tests. It has the features that users get, and the profile of the
/// tests, which share most of its dependencies.
pub fn tested_agent() -> Command {
    cargo(["build", "--profile", "test", "--package", "metadata-user", "--bin", "xdp-imds"])
}

/// Returns the path of a program of `cargo xtask` if `cargo xtask ci` has built it for its steps.
pub fn built(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os(BUILT).map(|_| target().join("debug").join(program))?;
    path.is_file().then_some(path)
}

/// Returns Cargo's target directory.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| top().join("target"), |dir| top().join(dir))
}

/// Returns how many bytes a user may still write to the file system of a path.
///
/// # Errors
/// Fails if the path cannot be asked.
pub fn free(path: &Path) -> Result<u64> {
    let state = rustix::fs::statvfs(path)?;
    Ok(state.f_bavail.saturating_mul(state.f_frsize))
}

/// Prints a command on standard error and runs it. An exit status other than zero is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("cannot run {shown}"))?;
    ensure!(status.success(), "{shown}: {status}");
    Ok(())
}

fn show(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// True when this process is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Finds a program on PATH, or in the directories that root's PATH has and a user's often lacks.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(more).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// How this process can become root.
pub enum Root {
    /// This process is root.
    Already,
    /// `sudo` works, perhaps after asking for a password on a terminal.
    Sudo(PathBuf),
    /// This process cannot become root; the reason.
    No(&'static str),
}

/// Finds out how to become root. `sudo` asks for its password here, so that it does not ask during a test.
pub fn root() -> Root {
    if is_root() {
        return Root::Already;
    }
    let Some(sudo) = which("sudo") else { return Root::No("this is not root, and there is no sudo") };
    match Command::new(&sudo).arg("-v").stdout(Stdio::null()).status() {
        Ok(status) if status.success() => Root::Sudo(sudo),
        _ => Root::No("this is not root, and sudo refuses"),
    }
}

/// Returns if this process is root. Otherwise it replaces this process by the same program under sudo, with the same
/// arguments and `more`.
pub fn go_on_as_root(more: &[OsString]) -> Result<()> {
    match root() {
        Root::Already => Ok(()),
        Root::Sudo(sudo) => {
            let own = std::env::current_exe()?;
            let mut command = Command::new(sudo);
            command.arg("--").arg(own).args(std::env::args_os().skip(1)).args(more);
            eprintln!("$ {}", show(&command));
            bail!("cannot run sudo: {}", command.exec())
        }
        Root::No(reason) => {
            let own = std::env::current_exe()?;
            let words: Vec<_> = std::env::args().skip(1).collect();
            let more: Vec<_> = more.iter().map(|word| word.to_string_lossy()).collect();
            bail!(
                "namespaces, taps and XDP need root; {reason}. As root, run:\n  {} {} {}",
                own.display(),
                words.join(" "),
                more.join(" ")
            )
        }
    }
}

/// Builds Afterburn, the metadata agent of Fedora CoreOS and Flatcar, from the package registry into the target
/// directory. Debian has no package of it.
pub mod afterburn {
    use std::ffi::OsString;
    use std::path::{Path, PathBuf};

    /// The release to build.
    pub const VERSION: &str = "5.11.0";

    /// Returns Cargo's arguments to install it below `target`. A build without optimisation takes one core two minutes.
    #[must_use]
    pub fn install(target: &Path) -> Vec<OsString> {
        let mut words: Vec<OsString> =
            ["install", "--debug", "--locked", "--quiet", "--no-track"].map(Into::into).into();
        words.extend(["--root".into(), root(target).into()]);
        words.push(format!("afterburn@{VERSION}").into());
        words
    }

    /// Returns the path of the program below `target`, whether or not it is built.
    #[must_use]
    pub fn program(target: &Path) -> PathBuf {
        root(target).join("bin/afterburn")
    }

    fn root(target: &Path) -> PathBuf {
        target.join(format!("afterburn-{VERSION}"))
    }
}

/// The environment variables that `cargo xtask` and people set for tests and programs.
pub mod variables {
    /// `1` makes a skipped privileged test a failure.
    pub const REQUIRE_PRIVILEGED: &str = "XDP_IMDS_REQUIRE_PRIVILEGED";
    /// The file that collects one line for each privileged test, run or skipped.
    pub const PRIVILEGED_LOG: &str = "XDP_IMDS_PRIVILEGED_LOG";
    /// A checkout of cloud-init to run instead of the distribution's.
    pub const CLOUD_INIT: &str = "XDP_IMDS_CLOUD_INIT";
    /// The seed of randomised tests.
    pub const SEED: &str = "XDP_IMDS_SEED";
    /// Set: a verb's own program prints its help. Otherwise `cargo xtask` prints it from the book, which is made so.
    pub const PROGRAM_HELP: &str = "XDP_IMDS_PROGRAM_HELP";
    /// Set by `cargo xtask ci` for its steps: the programs of all verbs are built, in the directory of the profile `dev`.
    pub const BUILT: &str = "XDP_IMDS_BUILT";
}

/// One-line helps of the verbs that are programs of their own. `cargo xtask --help` and that program show the same.
pub mod verbs {
    /// `cargo xtask book`.
    pub const BOOK: &str =
        "Write the generated pages of the book, check README and book against the code, and build it";
    /// `cargo xtask build-ebpf`.
    pub const BUILD_EBPF: &str =
        "Rebuild the eBPF object from source, or check that the committed one matches its source";
    /// `cargo xtask deb`.
    pub const DEB: &str = "Make the Debian package, check its contents, and install, use and purge it on a disposable copy of this system";
    /// `cargo xtask demo`.
    pub const DEMO: &str = "Run a demo: guests on real taps ask the real agent and get their own metadata";
    /// `cargo xtask dist`.
    pub const DIST: &str = "Make every file of a release for every architecture, reproducible byte for byte: archives, packages, image, bills of materials, checksums";
    /// `cargo xtask guest`.
    pub const GUEST: &str = "Boot a real Debian guest on a served tap and report what its cloud-init did";
    /// `cargo xtask haul`.
    pub const HAUL: &str =
        "Send millions of large answers to two kinds of guests, with and without loss, and fail on any stall";
    /// `cargo xtask image`.
    pub const IMAGE: &str = "Write the agent as an OCI image, reproducible byte for byte";
    /// `cargo xtask kernels`.
    pub const KERNELS: &str =
        "Boot older and newer kernels in QEMU, and run chosen tests of the agent inside";
    /// `cargo xtask lab`.
    pub const LAB: &str = "Keep a lab up: a node and guests to work with by hand";
    /// `cargo xtask load`.
    pub const LOAD: &str =
        "Load or upgrade the agent on this host or on others over ssh, and wait until it serves";
    /// `cargo xtask manifests`.
    pub const MANIFESTS: &str = "Render and check the deployment manifests, without a cluster";
    /// `cargo xtask run`.
    pub const RUN: &str = "Build the agent and run it in the foreground on this host";
    /// `cargo xtask schemas`.
    pub const SCHEMAS: &str = "Make the extract of published schemas that tests check objects against, or check that it is up to date";
    /// `cargo xtask soak`.
    pub const SOAK: &str = "Accelerated soak test: churn, restarts, hostile guests; checks for leaks";
    /// `cargo xtask storm`.
    pub const STORM: &str = "Boot thousands of guests at once on the agent and on peers, and measure";
    /// `cargo xtask traffic`.
    pub const TRAFFIC: &str =
        "Measure what steering costs guests' other traffic, by program and kind of frame";
    /// `cargo xtask unload`.
    pub const UNLOAD: &str =
        "Open the taps of this host or of others, and take away what `load` has put there";
}
