//! Every file of tests is part of a program.
//!
//! Cargo runs only the programs that `tests/Cargo.toml` names (`autotests = false`), and a program has only the modules
//! that it declares. Any other file is never compiled and cannot fail.

use std::fs;
use std::path::{Path, PathBuf};

use super::imports;

/// Files below a directory that neither the manifest names nor the file above them declares.
fn forgotten(top: &Path) -> Vec<PathBuf> {
    let manifest = fs::read_to_string(top.join("Cargo.toml")).expect("a manifest");
    let is_forgotten = |file: &PathBuf| {
        let (stem, directory) = (file.file_stem().expect("a name"), file.parent().expect("a directory"));
        let above = ["main.rs", "lib.rs"].map(|root| directory.join(root));
        let declared = format!("mod {};", stem.display());
        let declares = |file: &PathBuf| fs::read_to_string(file).is_ok_and(|text| text.contains(&declared));
        !manifest.contains(&format!("\"{}\"", file.strip_prefix(top).expect("below the top").display()))
            && !above.contains(file)
            && !above.iter().chain([&directory.with_extension("rs")]).any(declares)
    };
    // The fuzz targets have a manifest of their own.
    let mut files = Vec::new();
    imports::collect(top, &mut files);
    files.retain(|file| !file.starts_with(top.join("fuzz")) && is_forgotten(file));
    files
}

#[test]
fn every_file_of_tests_is_part_of_a_program() {
    assert_eq!(forgotten(Path::new(env!("CARGO_MANIFEST_DIR"))), Vec::<PathBuf>::new());
}

#[test]
fn a_file_that_no_program_has_is_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| {
        let file = directory.path().join(name);
        fs::create_dir_all(file.parent().expect("a directory")).expect("made");
        fs::write(file, text).expect("written");
    };
    put("Cargo.toml", "[[test]]\nname = \"a\"\npath = \"a/main.rs\"\n\n[[test]]\npath = \"b.rs\"\n");
    put("a/main.rs", "mod c;\n");
    for (file, text) in
        [("a/c.rs", "mod d;\n"), ("a/c/d.rs", ""), ("a/c/e.rs", ""), ("b.rs", ""), ("f.rs", "")]
    {
        put(file, text);
    }
    let mut found = forgotten(directory.path());
    found.sort();
    assert_eq!(found, ["a/c/e.rs", "f.rs"].map(|file| directory.path().join(file)));
}
