//! `cargo xtask build-ebpf`: builds the committed eBPF objects from their source.
//!
//! The objects are committed so that the agent builds on stable Rust without LLVM. `--check` rebuilds them and compares
//! each byte, so that they cannot lag behind their source. Compilers of other versions make other bytes from the same
//! source. With such a compiler, `--check` runs the verdict tests on the fresh objects instead; the committed objects
//! pass the same tests.

use anyhow::{Context as _, Result, bail, ensure};
use object::build::elf::{Builder, SectionData};
use object::elf::SHT_STRTAB;
use object::{
    File, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionIndex, SymbolKind,
};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

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
            first_difference(&committed[at], &fresh[at])
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
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut test = Command::new(cargo);
    test.args(["test", "--package", "xdp-imds-tests", "--test", "steering", "verdicts::"]).current_dir(top);
    test.env("XDP_IMDS_OBJECTS", objects).env("XDP_IMDS_REQUIRE_PRIVILEGED", "1");
    shell::run(&mut test)
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
        remap(&cargo_home()?, "cargo"),
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
    shell::run(&mut cargo)?;
    let named = |name: &&str| {
        let made = into.join(TARGET).join("release").join(name);
        let object = fs::read(&made).with_context(|| format!("cannot read {}", made.display()))?;
        ensure_stack(&object)?;
        let object = with_plain_names(&object)?;
        write(&into.join(file_name(name)), &object)?;
        Ok(object)
    };
    OBJECTS.iter().map(named).collect()
}

/// Removes the settings of the Cargo and rustup that run this program from the environment of the Cargo it starts.
fn clean_environment(command: &mut Command) {
    const KEPT: [&str; 2] = ["CARGO_HOME", "RUSTUP_HOME"];
    const NETWORK: [&str; 3] = ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR"];
    for (key, _) in env::vars_os() {
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
    let counted = objects.iter().map(|object| count_instructions(object)).collect::<Result<Vec<_>>>()?;
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

// Reads and rewrites an eBPF object.

/// Bytes of an instruction (RFC 9669 §3).
const INSTRUCTION: u64 = 8;

/// Returns the programs by name, with their length in instructions.
fn count_instructions(object: &[u8]) -> Result<Vec<(String, u64)>> {
    let file = File::parse(object).context("the object is not an ELF file")?;
    let section = |name| file.section_by_name(name).map(|section| section.index());
    let sections = [section("xdp").context("the object lacks the section `xdp`")?]
        .into_iter()
        .chain(section("classifier"))
        .collect::<Vec<_>>();
    let programs = file.symbols().filter(|symbol| {
        symbol.kind() == SymbolKind::Text
            && symbol.section_index().is_some_and(|index| sections.contains(&index))
    });
    let mut counted = programs
        .map(|symbol| Ok((symbol.name()?.to_owned(), symbol.size() / INSTRUCTION)))
        .collect::<Result<Vec<_>>>()?;
    ensure!(!counted.is_empty(), "the object has no programs");
    counted.sort();
    Ok(counted)
}

/// Bytes of stack that the kernel allows a program and the functions it calls (`MAX_BPF_STACK`).
const MAX_STACK: u64 = 512;
/// Linux 6.1 rounds the stack of each function up to these bytes. Newer kernels round less.
const STACK_UNIT: u64 = 32;
/// The register that points to the end of a function's stack.
const FRAME_POINTER: u8 = 10;

/// Fails if Linux 6.1 would refuse a program because of its stack. The kernel of this machine may allow more.
fn ensure_stack(object: &[u8]) -> Result<()> {
    for (program, depth) in stack_depths(object)? {
        ensure!(
            depth <= MAX_STACK,
            "{program} and the functions it calls take {depth} bytes of stack, but Linux 6.1 allows \
             {MAX_STACK}; move a call out of the deepest chain, or keep values in a map"
        );
    }
    Ok(())
}

/// Returns each program's name and the most bytes of stack that it takes together with the functions it calls, as Linux
/// 6.1 counts them.
fn stack_depths(object: &[u8]) -> Result<Vec<(String, u64)>> {
    let file = File::parse(object).context("the object is not an ELF file")?;
    let functions = functions(&file)?;
    let programs = count_instructions(object)?;
    let depths = programs.into_iter().map(|(program, _)| {
        let at = functions.iter().position(|function| function.name == program);
        let depth = deepest(&functions, at.context("a program is no function")?, functions.len())?;
        Ok((program, depth))
    });
    depths.collect()
}

/// A function of an object.
struct Function {
    name: String,
    section: SectionIndex,
    address: u64,
    /// Bytes of its own stack.
    stack: u64,
    /// The start of each function that it calls.
    calls: Vec<(SectionIndex, u64)>,
}

/// Returns the stack of a function and of what it calls. `levels` bounds the calls inside each other.
fn deepest(functions: &[Function], at: usize, levels: usize) -> Result<u64> {
    ensure!(levels > 0, "{} calls itself", functions[at].name);
    let mut below = 0;
    for called in &functions[at].calls {
        let called = functions.iter().position(|function| (function.section, function.address) == *called);
        let called = called.with_context(|| format!("{} calls no function", functions[at].name))?;
        below = below.max(deepest(functions, called, levels - 1)?);
    }
    Ok(functions[at].stack.max(1).next_multiple_of(STACK_UNIT) + below)
}

/// Reads the functions of an object (RFC 9669 §3 to §5.1).
fn functions(file: &File<'_>) -> Result<Vec<Function>> {
    let text = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0);
    let read = text.map(|symbol| {
        let section = symbol.section_index().context("a function is in no section")?;
        let code = file.section_by_index(section)?;
        let relocations: BTreeMap<_, _> = code.relocations().collect();
        let end = symbol.address() + symbol.size();
        let (mut stack, mut calls) = (0, Vec::new());
        let mut copies = [false; 16];
        for (at, instruction) in (0..).step_by(8).zip(code.data()?.chunks_exact(8)) {
            if !(symbol.address()..end).contains(&at) {
                continue;
            }
            let &[operation, registers, low, high, ref immediate @ ..] = instruction else { continue };
            let (destination, source) = (registers & 0xf, registers >> 4);
            let immediate = i32::from_le_bytes(immediate.try_into()?);
            let lowest = match operation & 7 {
                // LDX, and ST or STX.
                1 if source == FRAME_POINTER => i16::from_le_bytes([low, high]).into(),
                2 | 3 if destination == FRAME_POINTER => i16::from_le_bytes([low, high]).into(),
                // An address on the stack: a copy of the frame pointer, from which the code subtracts.
                7 if operation == 0x07 && copies[usize::from(destination)] => immediate,
                _ => 0,
            };
            stack = stack.max(lowest.min(0).unsigned_abs().into());
            if operation & 7 == 7 {
                copies[usize::from(destination)] = operation == 0xbf && source == FRAME_POINTER;
            }
            // A call of a function of the program.
            if operation == 0x85 && source == 1 {
                let (section, base) = match relocations.get(&at).map(|relocation| relocation.target()) {
                    Some(RelocationTarget::Symbol(index)) => {
                        let symbol = file.symbol_by_index(index)?;
                        (symbol.section_index().context("a call leaves the object")?, symbol.address())
                    }
                    Some(_) => bail!("{} calls no symbol", symbol.name()?),
                    None => (section, at),
                };
                let target = i64::try_from(base)? + (i64::from(immediate) + 1) * INSTRUCTION as i64;
                calls.push((section, u64::try_from(target)?));
            }
        }
        calls.sort_unstable_by_key(|(section, address)| (section.0, *address));
        calls.dedup();
        Ok(Function { name: symbol.name()?.to_owned(), section, address: symbol.address(), stack, calls })
    });
    read.collect()
}

/// Returns the object with plain names for its functions. The compiler's names contain a hash of the project's path.
fn with_plain_names(object: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(object).context("the object is not an ELF file")?;
    for symbol in &mut builder.symbols {
        let plain = std::str::from_utf8(&symbol.name).ok().and_then(|name| {
            let name = rustc_demangle::try_demangle(name).ok()?;
            Some(format!("{name:#}"))
        });
        if let Some(plain) = plain {
            symbol.name = plain.into_bytes().into();
        }
    }
    // LLVM uses one table for the names of sections and of symbols.
    if !builder.sections.iter().any(|section| matches!(section.data, SectionData::SectionString)) {
        let names = builder.sections.add();
        names.name = b".shstrtab"[..].into();
        names.sh_type = SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut renamed = Vec::with_capacity(object.len());
    builder.write(&mut renamed).context("the object cannot be written")?;
    Ok(renamed)
}

/// Returns the offset of the first difference.
fn first_difference(left: &[u8], right: &[u8]) -> usize {
    let common = left.len().min(right.len());
    left.iter().zip(right).position(|(l, r)| l != r).unwrap_or(common)
}

// Finds the compiler and linker of the eBPF objects, or installs them, or reports what is missing.

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
struct Toolchain {
    /// The path of the compiler.
    rustc: PathBuf,
    /// The path of the Cargo that belongs to the compiler.
    cargo: PathBuf,
    /// The first line of `rustc --version --verbose`.
    rustc_version: String,
    /// The directory with the compiler's libraries.
    sysroot: PathBuf,
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
    fn ensure(recorded: &str) -> Result<Self> {
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
    fn record(&self) -> String {
        format!(
            "# What made the objects here; written by `cargo xtask build-ebpf`.\n\
             rustc = \"{}\"\nrustc-llvm = \"{}\"\nbpf-linker = \"{}\"\nbpf-linker-llvm = \"{}\"\n",
            self.rustc_version, self.rustc_llvm, self.linker_version, self.linker_llvm
        )
    }

    /// Returns PATH with the linker's directory first. The compiler finds the linker by its name.
    fn path(&self) -> Result<OsString> {
        let own = self.linker.parent().map(Path::to_owned);
        Ok(env::join_paths(own.into_iter().chain(search_path()))?)
    }
}

/// Returns Cargo's home, which has the sources of dependencies.
fn cargo_home() -> Result<PathBuf> {
    let set = env::var_os("CARGO_HOME").map(PathBuf::from);
    set.or_else(|| env::home_dir().map(|home| home.join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")
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
    let apt = |words: &[&str]| {
        shell::run(Command::new("apt-get").args(words).env("DEBIAN_FRONTEND", "noninteractive"))
    };
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
    shell::run(cargo.env("LLVM_PREFIX", DEBIAN_LLVM))
}

#[cfg(test)]
mod tests {
    use object::{Object as _, ObjectSymbol as _};

    use super::{
        OBJECTS, PREBUILT, count_instructions, ensure_stack, file_name, first_difference, with_plain_names,
    };

    #[test]
    fn the_committed_object_has_its_programs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
        let object = std::fs::read(path).expect("the object is committed");
        let counted = count_instructions(&object).expect("it is an object");
        let names: Vec<_> = counted.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["hub", "hub_tcx", "port", "port_tcx", "request", "request_tcx", "ring", "socket"]);
        assert!(counted.iter().all(|(_, count)| *count > 0), "{counted:?}");
    }

    #[test]
    fn old_kernels_allow_the_stack_of_each_committed_program() {
        for name in OBJECTS {
            let path = shell::top().join(PREBUILT).join(file_name(name));
            let object = std::fs::read(path).expect("the object is committed");
            ensure_stack(&object).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        }
    }

    #[test]
    fn the_committed_object_has_plain_function_names() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
        let object = std::fs::read(path).expect("the object is committed");
        let file = object::File::parse(&*object).expect("it is an object");
        let names: Vec<_> = file.symbols().map(|symbol| symbol.name().expect("text").to_owned()).collect();
        assert!(names.iter().any(|name| name.starts_with("xdp_imds::")), "{names:?}");
        assert!(!names.iter().any(|name| name.starts_with("_R")), "{names:?}");
        assert_eq!(with_plain_names(&object).expect("an object"), object, "nothing else changes");
    }

    #[test]
    fn bytes_that_are_not_an_object_are_refused() {
        assert!(with_plain_names(b"no object").is_err());
        assert!(count_instructions(b"version https://example.org/pointer").is_err());
    }

    #[test]
    fn a_prefix_differs_at_its_end() {
        assert_eq!(first_difference(b"abc", b"abd"), 2);
        assert_eq!(first_difference(b"abc", b"abcd"), 3);
    }
}
