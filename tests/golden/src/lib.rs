//! Files in `tests/fixtures/formats`: what each release of the agent writes for another, byte for byte.
//!
//! ```text
//!  tests/fixtures/formats/0.1.0/records.snapshot.v1        RELEASE/FORMAT.vVERSION
//! ```
//!
//! A test writes a sample with today's code and passes it to [`check`], which fails if the bytes differ from those of
//! the same version. A file is never replaced, so a change of bytes needs another version. With [`WRITE`] a version
//! without a file gets one. [`all`] returns the samples of every release, which tests read with today's code.

use std::fs;
use std::path::{Path, PathBuf};

/// The environment variable that lets [`check`] write missing files.
pub const WRITE: &str = "XDP_IMDS_WRITE_FORMATS";

/// A sample of a format.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The release that wrote it first.
    pub release: String,
    /// The version of the format.
    pub version: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/formats")
}

/// The releases that have samples, the oldest first.
///
/// # Panics
/// If the directory cannot be read.
#[must_use]
pub fn releases() -> Vec<String> {
    let mut releases = names(&directory());
    releases
        .sort_by_key(|release| release.split('.').map(|part| part.parse::<u32>().ok()).collect::<Vec<_>>());
    releases
}

/// The samples of a format, of every release, the oldest first.
///
/// # Panics
/// If the files cannot be read.
#[must_use]
pub fn all(format: &str) -> Vec<Sample> {
    of(format, &releases())
}

/// What a release writes: its sample of a format, or that of the last release before it that changed the format.
///
/// # Panics
/// If there is none, or it cannot be read.
#[must_use]
pub fn of_release(format: &str, release: &str) -> Sample {
    let mut releases = releases();
    let at = releases.iter().position(|one| one == release).expect("a release with samples");
    releases.truncate(at + 1);
    of(format, &releases).pop().expect("a sample of this format")
}

fn of(format: &str, releases: &[String]) -> Vec<Sample> {
    let mut samples = Vec::new();
    for release in releases {
        let below = directory().join(release);
        for file in names(&below) {
            let version = file.strip_prefix(format).and_then(|rest| rest.strip_prefix(".v")?.parse().ok());
            if let Some(version) = version {
                let bytes = fs::read(below.join(&file)).expect("a sample can be read");
                samples.push(Sample { release: release.clone(), version, bytes });
            }
        }
    }
    samples
}

/// The sorted names in a directory; empty if there is none.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Compares what today's code writes with the sample of that version.
///
/// # Panics
/// If they differ, or if there is no such sample.
pub fn check(format: &str, version: u32, bytes: &[u8]) {
    let samples = all(format);
    let file = format!("{format}.v{version}");
    match samples.iter().find(|sample| sample.version == version) {
        Some(sample) => assert!(
            sample.bytes == bytes,
            "{file} of release {} differs from what this code writes: raise the version of this format, because \
             another release reads it (docs/src/contribute/release.md)\n{}",
            sample.release,
            String::from_utf8_lossy(bytes)
        ),
        None if std::env::var_os(WRITE).is_some() => {
            let below = directory().join(env!("CARGO_PKG_VERSION"));
            fs::create_dir_all(&below).expect("a directory");
            fs::write(below.join(&file), bytes).expect("a sample can be written");
        }
        None => {
            panic!("there is no sample {file}: `{WRITE}=1 cargo test --workspace --lib formats` writes it")
        }
    }
    let newest = samples.iter().map(|sample| sample.version).max().unwrap_or(version);
    assert!(newest <= version, "{format} has a sample of version {newest}, but this code writes {version}");
}
