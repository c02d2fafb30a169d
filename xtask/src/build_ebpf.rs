//! `cargo xtask build-ebpf`: the committed eBPF object from its source.
//!
//! The object is committed so that the agent builds on stable Rust without LLVM. `--check` rebuilds it
//! and compares byte for byte, so it can never lag its source. Compilers of another version make other
//! bytes from the same source; with those, `--check` says so and runs the verdict tests on the fresh
//! object instead, which the committed one passes as well.

mod object;
mod toolchain;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use toolchain::Toolchain;

/// The target triple of the programs: little-endian, as every node we run on.
const TARGET: &str = "bpfel-unknown-none";
/// The instruction set: 32-bit arithmetic and jumps, which every kernel that can load us has (5.1).
const CPU: &str = "v3";
/// The object, from the top of the project.
const OBJECT: &str = "metadata-ebpf/prebuilt/xdp-imds.bpf.o";
/// What it was built with and how large its programs are.
const RECORD: &str = "metadata-ebpf/prebuilt/toolchain.toml";

/// What to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build aside, and fail unless the committed object is what its source says
    #[arg(long)]
    check: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the project")?;
    let recorded = fs::read_to_string(top.join(RECORD)).unwrap_or_default();
    let toolchain = Toolchain::ensure(&recorded)?;
    eprintln!("building with {}", toolchain.rustc_version);
    if args.check { check(top, &toolchain, &recorded) } else { update(top, &toolchain) }
}

/// Replaces the committed object and its record.
fn update(top: &Path, toolchain: &Toolchain) -> Result<()> {
    let built = build(top, toolchain, &top.join("target/ebpf"))?;
    let object = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    let record = record(toolchain, &object)?;
    write(&top.join(OBJECT), &object)?;
    write(&top.join(RECORD), record.as_bytes())?;
    print!("{record}");
    Ok(())
}

/// Proves that the committed object is what its source says.
fn check(top: &Path, toolchain: &Toolchain, recorded: &str) -> Result<()> {
    let committed = fs::read(top.join(OBJECT)).with_context(|| format!("no committed {OBJECT}"))?;
    let counted = object::instructions(&committed)?;
    ensure!(
        recorded.ends_with(&instruction_table(&counted)),
        "{RECORD} does not give the instruction counts of {OBJECT}; run `cargo xtask build-ebpf` and commit both"
    );
    let aside = tempfile::tempdir().context("no temporary directory")?;
    let built = build(top, toolchain, aside.path())?;
    let fresh = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    if fresh == committed {
        println!("{OBJECT}: {} octets, equal to a fresh build", committed.len());
        return Ok(());
    }
    if recorded.starts_with(&toolchain.record()) {
        bail!(
            "{OBJECT} has {} octets and is not what its source makes now ({} octets, first difference at {}); \
             run `cargo xtask build-ebpf` and commit it",
            committed.len(),
            fresh.len(),
            object::first_difference(&committed, &fresh)
        );
    }
    println!(
        "{OBJECT} was built by other tools, so its bytes cannot be compared. Recorded:\n{recorded}\nHere:\n{}\n\
         Proving by the verdict tests instead that the fresh object decides alike.",
        toolchain.record()
    );
    prove(top, &built).context("the fresh object does not pass the verdict tests")
}

/// Runs the verdict tests against an object.
fn prove(top: &Path, object: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut test = Command::new(cargo);
    test.args(["test", "--package", "xdp-imds-tests", "--test", "verdicts"]).current_dir(top);
    test.env("XDP_IMDS_OBJECT", object).env("XDP_IMDS_REQUIRE_PRIVILEGED", "1");
    toolchain::run(&mut test)
}

/// Builds the programs into a directory, alike from wherever the project lies; where the object is.
fn build(top: &Path, toolchain: &Toolchain, into: &Path) -> Result<PathBuf> {
    let mut cargo = Command::new(&toolchain.cargo);
    clean_environment(&mut cargo);
    let remap = |from: &Path, to: &str| {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(from);
        flag.push("=");
        flag.push(to);
        flag
    };
    let flags = [
        remap(top, "xdp-imds"),
        remap(&toolchain::cargo_home()?, "cargo"),
        remap(&toolchain.sysroot, "rust"),
        format!("-Ctarget-cpu={CPU}").into(),
    ];
    cargo
        .current_dir(top.join("metadata-ebpf"))
        .args(["build", "--release", "--locked", "-Zbuild-std=core", "--target", TARGET])
        .env("CARGO_TARGET_DIR", into)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}".as_ref()))
        .env("PATH", toolchain.path()?)
        .env("RUSTC", &toolchain.rustc)
        // Stable compilers build `core` for a target of tier 3 only if told that they may.
        .env("RUSTC_BOOTSTRAP", "1");
    toolchain::run(&mut cargo)?;
    let made = into.join(TARGET).join("release/xdp-imds");
    let object = fs::read(&made).with_context(|| format!("cannot read {}", made.display()))?;
    let built = into.join("xdp-imds.bpf.o");
    write(&built, &object::with_plain_names(&object)?)?;
    Ok(built)
}

/// Keeps the settings of the Cargo that runs us, and of its rustup, from the one we run.
fn clean_environment(command: &mut Command) {
    const KEPT: [&str; 2] = ["CARGO_HOME", "RUSTUP_HOME"];
    const NETWORK: [&str; 3] = ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR"];
    for (key, _) in std::env::vars_os() {
        let Some(name) = key.to_str() else { continue };
        let theirs = ["CARGO", "RUST", "CLIPPY", "__CARGO"].iter().any(|prefix| name.starts_with(prefix));
        let kept = KEPT.contains(&name) || NETWORK.iter().any(|prefix| name.starts_with(prefix));
        if theirs && !kept {
            command.env_remove(key);
        }
    }
}

/// What stands beside the object.
fn record(toolchain: &Toolchain, object: &[u8]) -> Result<String> {
    Ok(toolchain.record() + &instruction_table(&object::instructions(object)?))
}

fn instruction_table(counted: &[(String, u64)]) -> String {
    let lines = counted.iter().map(|(program, count)| format!("{program} = {count}\n"));
    std::iter::once("\n[instructions]\n".to_owned()).chain(lines).collect()
}

/// Writes a file whole: whoever reads it meanwhile gets the old one.
fn write(path: &Path, octets: &[u8]) -> Result<()> {
    let dir = path.parent().context("a file lies in a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let aside = path.with_extension("new");
    fs::write(&aside, octets).with_context(|| format!("cannot write {}", aside.display()))?;
    fs::rename(&aside, path).with_context(|| format!("cannot replace {}", path.display()))
}
