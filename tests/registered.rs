//! `tests/Cargo.toml` names every test file.
//!
//! Cargo runs only the tests named there (`autotests = false`), so any other file is never compiled and cannot fail.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const MANIFEST: &str = "Cargo.toml";
/// Tables of the manifest that define programs.
const TARGETS: [&str; 2] = ["[[test]]", "[[bench]]"];

/// The paths of all tests and benches in a manifest.
fn named(manifest: &str) -> BTreeSet<String> {
    let mut table = "";
    let mut paths = BTreeSet::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            table = line;
        }
        let path = line.strip_prefix("path = \"").and_then(|rest| rest.strip_suffix('"'));
        paths.extend(path.filter(|_| TARGETS.contains(&table)).map(str::to_owned));
    }
    paths
}

/// The Rust files directly in a directory; files below it are modules of these.
fn files(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("the directory of tests");
    let names =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a name in UTF-8"));
    names.filter(|name| name.ends_with(".rs")).collect()
}

/// Files that the manifest lacks, and entries without a file, each as a message.
fn findings(directory: &Path) -> Vec<String> {
    let manifest = fs::read_to_string(directory.join(MANIFEST)).expect("a manifest");
    let (named, files) = (named(&manifest), files(directory));
    let unnamed =
        files.difference(&named).map(|file| format!("{file} is not in {MANIFEST}: nothing runs it"));
    let absent =
        named.difference(&files).map(|path| format!("{MANIFEST} names {path}, which does not exist"));
    unnamed.chain(absent).collect()
}

#[test]
fn every_test_file_is_registered_and_every_registered_file_exists() {
    let found = findings(Path::new(env!("CARGO_MANIFEST_DIR")));
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn an_unregistered_file_and_an_entry_without_a_file_are_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| fs::write(directory.path().join(name), text).expect("written");
    put(
        MANIFEST,
        "[lib]\npath = \"library.rs\"\n\n[[test]]\nname = \"a\"\npath = \"a.rs\"\n\n[[bench]]\npath = \"b.rs\"\n",
    );
    put("a.rs", "");
    put("forgotten.rs", "");
    assert_eq!(
        findings(directory.path()),
        ["forgotten.rs is not in Cargo.toml: nothing runs it", "Cargo.toml names b.rs, which does not exist"]
    );
}
