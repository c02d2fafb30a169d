//! `cargo xtask ci`: every check that a change must pass. Checks that fail quickly come first.

use anyhow::{Result, bail};
use shell::architecture::Architecture;
use std::process::Command;
use std::time::Instant;

/// `ci` has no options, so that everybody runs the same checks.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The eBPF crate, which is outside the workspace.
const EBPF: &str = "metadata-ebpf/Cargo.toml";

/// The profile for builds that are only tested: it does not optimise, which would take a quarter of an hour.
const QUICK: &str = "quick";

/// The name of a step, and the function that runs it.
type Step = (&'static str, fn() -> Result<()>);

const STEPS: &[Step] = &[
    ("format", format),
    ("lints", lints),
    ("docs", docs),
    ("bans, licences, sources", deny),
    ("advisories", advisories),
    ("eBPF object", object),
    ("tests", tests),
    ("book", book),
    ("manifests", manifests),
    ("image", image),
    ("Debian package", package),
    ("fuzz targets", fuzz_targets),
    ("Miri", miri),
    ("soak", soak),
    ("hostile tenants", tenants),
    ("kernels", kernels),
];

/// Runs every step, even after a failure, so that one run shows every failure.
pub(crate) fn run(_: &Args) -> Result<()> {
    let mut lines = Vec::new();
    let mut failed = Vec::new();
    for &(name, step) in STEPS {
        eprintln!("\n== {name}");
        let started = Instant::now();
        let outcome = step();
        let seconds = started.elapsed().as_secs();
        match outcome {
            Ok(()) => lines.push(format!("ok      {seconds:>5} s  {name}")),
            Err(error) => {
                lines.push(format!("FAILED  {seconds:>5} s  {name}: {error:#}"));
                failed.push(name);
            }
        }
    }
    eprintln!("\n{}", lines.join("\n"));
    if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join("; ")) }
}

fn format() -> Result<()> {
    shell::run(&mut shell::cargo(["fmt", "--all", "--check"]))?;
    shell::run(&mut shell::cargo(["fmt", "--manifest-path", EBPF, "--check"]))
}

fn lints() -> Result<()> {
    let strict = ["--locked", "--", "--deny", "warnings"];
    shell::run(shell::cargo(["clippy", "--workspace", "--all-targets"]).args(strict))?;
    // The agent without the features that only clusters need.
    let lean = ["clippy", "--package", "metadata-user", "--all-targets", "--no-default-features"];
    shell::run(shell::cargo(lean).args(strict))?;
    // The tests that need neither root nor a cluster.
    let plain = ["clippy", "--package", "xdp-imds-tests", "--all-targets", "--no-default-features"];
    shell::run(shell::cargo(plain).args(strict))?;
    shell::run(shell::cargo(["clippy", "--manifest-path", EBPF]).args(strict))
}

fn docs() -> Result<()> {
    let mut doc = shell::cargo(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"]);
    shell::run(doc.env("RUSTDOCFLAGS", "--deny warnings"))
}

fn deny() -> Result<()> {
    if shell::which("cargo-deny").is_none() {
        bail!("cargo-deny is missing; run `cargo install --locked cargo-deny`");
    }
    shell::run(&mut shell::cargo([
        "deny",
        "--locked",
        "check",
        "--hide-inclusion-graph",
        "bans",
        "licenses",
        "sources",
    ]))
}

/// Checks for known vulnerabilities. The advisory database comes over the network. A machine without network prints
/// `NOT CHECKED` and goes on with the other steps.
fn advisories() -> Result<()> {
    let fetched =
        shell::cargo(["deny", "--locked", "fetch", "db"]).stderr(std::process::Stdio::null()).status();
    if !fetched.is_ok_and(|status| status.success()) {
        eprintln!(
            "NOT CHECKED: the advisory database could not be fetched; run `cargo deny check advisories` online"
        );
        return Ok(());
    }
    shell::run(&mut shell::cargo(["deny", "--locked", "check", "--disable-fetch", "advisories"]))
}

fn object() -> Result<()> {
    xtask(&["build-ebpf", "--check"])
}

fn tests() -> Result<()> {
    xtask(&["test", "--require-privileged"])
}

/// Checks that README and book match the code, and that their links work.
fn book() -> Result<()> {
    let agent = shell::target().join("debug/xdp-imds");
    xtask(&["book", "--check", "--agent", &agent.to_string_lossy()])
}

/// Renders the manifests and validates them against their schemas.
fn manifests() -> Result<()> {
    xtask(&["manifests"])
}

/// Checks that builds in two directories have the same digest, and that a container of the image serves a guest.
fn image() -> Result<()> {
    xtask(&["image", "--check", "--try", "--profile", QUICK])
}

/// Builds the package around the image's binary, checks its contents, installs it and purges it.
fn package() -> Result<()> {
    xtask(&["deb", "--static", "--profile", QUICK])
}

/// Checks that the fuzz targets build. The ordinary tests run their assertions on the seeds.
fn fuzz_targets() -> Result<()> {
    let manifest = ["--manifest-path", "tests/fuzz/Cargo.toml"];
    shell::run(shell::cargo(["fmt"]).args(manifest).arg("--check"))?;
    let mut check = shell::cargo(["check", "--locked"]);
    // The workspace's target directory, so that shared dependencies are checked once.
    shell::run(check.args(manifest).arg("--target-dir").arg(shell::target()))
}

/// Runs unsafe code under Miri, which only nightly toolchains have. Without one it prints `NOT CHECKED`.
fn miri() -> Result<()> {
    if let Some(missing) = super::miri::missing() {
        eprintln!("NOT CHECKED: {missing}");
        return Ok(());
    }
    xtask(&["miri"])
}

/// Soaks the agent that the tests built for a minute, with churn, restarts and hostile guests.
fn soak() -> Result<()> {
    let agent = shell::target().join("debug/xdp-imds");
    xtask(&["soak", "--minutes", "1", "--agent", &agent.to_string_lossy()])
}

/// The attacks that say in half a minute whether tenants are apart and their input is bounded. The others, and all at
/// once, take longer than a change should wait: `cargo xtask soak --tenants --minutes 30` before a release.
const ATTACKS: &str =
    "equal-uuid,equal-uuid-slow,proxmox-uuid,yaml-bomb,proxmox-bomb,render-bomb,record-memory,attributes";

/// Serves a modest tenant among hostile ones, with the agent of the image.
fn tenants() -> Result<()> {
    let here = Architecture::named(std::env::consts::ARCH)?;
    let agent = here.products(&shell::target().join("image-build"), QUICK).join("xdp-imds");
    let agent = agent.to_string_lossy();
    xtask(&["soak", "--tenants", "--minutes", "0.5", "--only", ATTACKS, "--agent", &agent])
}

/// Boots an old and a new kernel, and one for arm64, with the agent that the tests built.
fn kernels() -> Result<()> {
    xtask(&["kernels", "--short", "--kernel", "6.1,newest"])?;
    xtask(&["kernels", "--short", "--kernel", "6.12", "--arch", "arm64"])
}

/// Runs another verb in a process of its own, as a person would.
fn xtask(words: &[&str]) -> Result<()> {
    shell::run(Command::new(std::env::current_exe()?).args(words).current_dir(shell::top()))
}
