//! `cargo xtask build-ebpf`: builds the committed eBPF objects from their source.
//!
//! The objects are committed so that the agent builds on stable Rust without LLVM. `--check` rebuilds them and compares
//! each byte, so that they cannot lag behind their source. Compilers of other versions make other bytes from the same
//! source. With such a compiler, `--check` runs the verdict tests on the fresh objects instead; the committed objects
//! pass the same tests.

mod object;
mod toolchain;

use anyhow::{Context as _, Result, bail, ensure};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use toolchain::Toolchain;

/// The target triple of the programs: little-endian, as all supported nodes are.
const TARGET: &str = "bpfel-unknown-none";
/// The instruction set: 32-bit arithmetic and jumps. Every kernel that can load the programs has it (since 5.1).
const CPU: &str = "v3";
/// The names of the objects in Cargo.
const OBJECTS: [&str; 2] = ["xdp-imds", "port-stub"];
/// The directory of the committed objects, relative to the top of the project.
const PREBUILT: &str = "metadata-ebpf/prebuilt";
/// The versions of the tools that built the objects, and the sizes of the programs.
const RECORD: &str = "metadata-ebpf/prebuilt/toolchain.toml";

/// Whether to update or to check.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build in a temporary directory, and fail unless the committed objects match their source
    #[arg(long)]
    check: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let top = shell::top();
    let recorded = fs::read_to_string(top.join(RECORD)).unwrap_or_default();
    let toolchain = Toolchain::ensure(&recorded)?;
    eprintln!("building with {}", toolchain.rustc_version);
    if args.check { check(top, &toolchain, &recorded) } else { update(top, &toolchain) }
}

/// Replaces the committed objects and their record.
fn update(top: &Path, toolchain: &Toolchain) -> Result<()> {
    let objects = build(top, toolchain, &top.join("target/ebpf"))?;
    let record = record(toolchain, &objects)?;
    for (name, object) in OBJECTS.iter().zip(&objects) {
        write(&top.join(PREBUILT).join(file_name(name)), object)?;
    }
    write(&top.join(RECORD), record.as_bytes())?;
    print!("{record}");
    Ok(())
}

/// Checks that the committed objects match their source.
fn check(top: &Path, toolchain: &Toolchain, recorded: &str) -> Result<()> {
    let read = |name: &&str| {
        let path = top.join(PREBUILT).join(file_name(name));
        fs::read(&path).with_context(|| format!("no committed {}", path.display()))
    };
    let committed = OBJECTS.iter().map(read).collect::<Result<Vec<_>>>()?;
    ensure!(
        recorded.ends_with(&instruction_table(&instructions(&committed)?)),
        "{RECORD} does not show the instruction counts of the objects; run `cargo xtask build-ebpf` and commit its \
         changes"
    );
    let aside = tempfile::tempdir().context("cannot make a temporary directory")?;
    let fresh = build(top, toolchain, aside.path())?;
    let Some(at) = (0..OBJECTS.len()).find(|at| fresh[*at] != committed[*at]) else {
        let bytes: Vec<_> = committed.iter().map(Vec::len).collect();
        println!("{PREBUILT}: objects of {bytes:?} bytes, equal to a fresh build");
        return Ok(());
    };
    if recorded.starts_with(&toolchain.record()) {
        bail!(
            "{} has {} bytes and differs from its source's build ({} bytes, first difference at {}); run \
             `cargo xtask build-ebpf` and commit it",
            file_name(OBJECTS[at]),
            committed[at].len(),
            fresh[at].len(),
            object::first_difference(&committed[at], &fresh[at])
        );
    }
    println!(
        "Other tools built the objects, so their bytes cannot be compared. Recorded:\n{recorded}\nHere:\n{}\n\
         The verdict tests check instead that the fresh objects reach the same verdicts.",
        toolchain.record()
    );
    prove(top, aside.path()).context("the fresh objects do not pass the verdict tests")
}

fn file_name(object: &str) -> String {
    format!("{object}.bpf.o")
}

/// Runs the verdict tests against the objects in a directory.
fn prove(top: &Path, objects: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut test = Command::new(cargo);
    test.args(["test", "--package", "xdp-imds-tests", "--test", "steering", "verdicts::"]).current_dir(top);
    test.env("XDP_IMDS_OBJECTS", objects).env("XDP_IMDS_REQUIRE_PRIVILEGED", "1");
    toolchain::run(&mut test)
}

/// Builds the objects into a directory and returns them in the order of [`OBJECTS`]. They do not depend on the
/// directory of the project.
fn build(top: &Path, toolchain: &Toolchain, into: &Path) -> Result<Vec<Vec<u8>>> {
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
        // A stable compiler builds `core` for a tier 3 target only with this variable.
        .env("RUSTC_BOOTSTRAP", "1");
    toolchain::run(&mut cargo)?;
    let named = |name: &&str| {
        let made = into.join(TARGET).join("release").join(name);
        let object = fs::read(&made).with_context(|| format!("cannot read {}", made.display()))?;
        let object = object::with_plain_names(&object)?;
        write(&into.join(file_name(name)), &object)?;
        Ok(object)
    };
    OBJECTS.iter().map(named).collect()
}

/// Removes the settings of the Cargo and rustup that run this program from the environment of the Cargo it starts.
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

/// Returns the text of [`RECORD`].
fn record(toolchain: &Toolchain, objects: &[Vec<u8>]) -> Result<String> {
    Ok(toolchain.record() + &instruction_table(&instructions(objects)?))
}

/// Returns the programs of all objects by name, with their length in instructions.
fn instructions(objects: &[Vec<u8>]) -> Result<Vec<(String, u64)>> {
    let counted = objects.iter().map(|object| object::instructions(object)).collect::<Result<Vec<_>>>()?;
    let mut all: Vec<_> = counted.into_iter().flatten().collect();
    all.sort();
    Ok(all)
}

fn instruction_table(counted: &[(String, u64)]) -> String {
    let lines = counted.iter().map(|(program, count)| format!("{program} = {count}\n"));
    std::iter::once("\n[instructions]\n".to_owned()).chain(lines).collect()
}

/// Replaces a file in one step: a reader gets the old file or the new one.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let dir = path.parent().context("the file's path has no directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let aside = path.with_extension("new");
    fs::write(&aside, bytes).with_context(|| format!("cannot write {}", aside.display()))?;
    fs::rename(&aside, path).with_context(|| format!("cannot replace {}", path.display()))
}
