//! `cargo xtask ci`: everything a change must pass, in the order of what fails fastest.

use anyhow::{Result, bail};
use std::process::Command;
use std::time::Instant;

/// No choices: everybody passes the same.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The eBPF crate, which is outside the workspace.
const EBPF: &str = "metadata-ebpf/Cargo.toml";

/// What is only tried is not optimised, which would take a quarter of an hour.
const QUICK: &str = "quick";

/// A step, and how it is done.
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
];

/// Runs the verb: every step, also after a failure, so that one run tells all.
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
    // The agent without what only clusters need.
    let lean = ["clippy", "--package", "metadata-user", "--all-targets", "--no-default-features"];
    shell::run(shell::cargo(lean).args(strict))?;
    // Tests that need neither root nor a cluster.
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

/// Known vulnerabilities. The database comes over the network, and a machine that cannot reach it can still
/// judge everything else: then this says that it did not look.
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

/// README and book say what the code does, and their links lead somewhere.
fn book() -> Result<()> {
    let agent = shell::target().join("debug/xdp-imds");
    xtask(&["book", "--check", "--agent", &agent.to_string_lossy()])
}

/// What is deployed, rendered and held to its schemas.
fn manifests() -> Result<()> {
    xtask(&["manifests"])
}

/// Two builds in two places have one digest, and a container of it serves a guest.
fn image() -> Result<()> {
    xtask(&["image", "--check", "--try", "--profile", QUICK])
}

/// The package has what it should, of the binary of the image, and is installed and purged.
fn package() -> Result<()> {
    xtask(&["deb", "--static", "--profile", QUICK])
}

/// They must build; their laws and seeds are among the tests.
fn fuzz_targets() -> Result<()> {
    let manifest = ["--manifest-path", "tests/fuzz/Cargo.toml"];
    shell::run(shell::cargo(["fmt"]).args(manifest).arg("--check"))?;
    let mut check = shell::cargo(["check", "--locked"]);
    // Beside the workspace's, so that what both need is checked once.
    shell::run(check.args(manifest).arg("--target-dir").arg(shell::target()))
}

/// Unsafe code under Miri, which only comes with nightly toolchains: without one this says that it did not look.
fn miri() -> Result<()> {
    if let Some(missing) = super::miri::missing() {
        eprintln!("NOT CHECKED: {missing}");
        return Ok(());
    }
    xtask(&["miri"])
}

/// A minute of churn, restarts and hostile guests, on the agent the tests have built.
fn soak() -> Result<()> {
    let agent = shell::target().join("debug/xdp-imds");
    xtask(&["soak", "--minutes", "1", "--agent", &agent.to_string_lossy()])
}

/// Another verb, by itself, as a person would run it.
fn xtask(words: &[&str]) -> Result<()> {
    shell::run(Command::new(std::env::current_exe()?).args(words).current_dir(shell::top()))
}
