//! Hashes the sources of the agent.
//!
//! The hash covers names and content, but no times and no absolute paths. So two trees with the same sources have the
//! same id, with or without Git and in any directory.

use std::fs;
use std::path::{Path, PathBuf};

/// The lock file, for the versions of all dependencies.
const LOCK: &str = "Cargo.lock";
/// Directories and files of the project that determine the agent's behaviour.
const SOURCES: [&str; 5] = [LOCK, "Cargo.toml", "metadata-common", "metadata-ebpf/prebuilt", "metadata-user"];
/// File extensions of sources; they exclude the remains of editors and failed tests.
const KINDS: [&str; 5] = ["json", "o", "rs", "toml", "yaml"];

fn main() {
    let manifest = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("Cargo names the manifest"));
    let top =
        manifest.ancestors().find(|above| above.join(LOCK).is_file()).expect("the project, above this crate");
    let mut files = Vec::new();
    for source in SOURCES {
        // For a directory, Cargo checks all files below it.
        println!("cargo::rerun-if-changed={}", top.join(source).display());
        collect(top, Path::new(source), &mut files);
    }
    // File systems list files in different orders.
    files.sort();
    let mut hash = Fnv::new();
    for file in files {
        let mut content = fs::read(top.join(&file))
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
        if file.as_os_str() == LOCK {
            content = dependencies(&content);
        }
        for part in [file.as_os_str().as_encoded_bytes(), &content] {
            hash.add(&part.len().to_le_bytes());
            hash.add(part);
        }
    }
    println!("cargo::rustc-env=XDP_IMDS_BUILD_ID={:032x}", hash.0);
}

/// Adds the sources at `path`, relative to `top`.
fn collect(top: &Path, path: &Path, files: &mut Vec<PathBuf>) {
    let full = top.join(path);
    if full.is_file() {
        files.push(path.to_owned());
        return;
    }
    let listed =
        fs::read_dir(&full).unwrap_or_else(|error| panic!("cannot list {}: {error}", full.display()));
    for entry in listed {
        let below = path.join(entry.expect("the directory can be listed").file_name());
        let is_source = below.extension().is_some_and(|kind| KINDS.iter().any(|known| kind == *known));
        if is_source || top.join(&below).is_dir() {
            collect(top, &below, files);
        }
    }
}

/// The external packages of a lock file. The manifests cover the dependencies of the project's own packages, and the
/// tests' packages do not change the agent.
fn dependencies(lock: &[u8]) -> Vec<u8> {
    let lock = String::from_utf8_lossy(lock);
    lock.split("[[package]]")
        .filter(|package| package.contains("\nsource = "))
        .collect::<String>()
        .into_bytes()
}

/// FNV-1a with 128 bits. It detects accidental changes; no attacker gains from a collision. A digest crate would delay
/// each build of the agent.
struct Fnv(u128);

impl Fnv {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}
