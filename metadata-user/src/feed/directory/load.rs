//! One file, and the files its record names.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::io as io_error;
use crate::feed::FeedError;
use crate::record::vm::Source;
use crate::record::{Limits, Record, Warning};

/// SHA-256 of a record's text and sources.
pub(super) type Digest = [u8; 32];

/// Group may read, nobody else anything: these bits are more.
const TOO_OPEN: u32 = 0o027;

/// What became of one file.
#[derive(Debug)]
pub struct Loaded {
    /// The record with its payloads read, and its warnings; or why it cannot be used.
    pub record: Result<(Record, Vec<Warning>), FeedError>,
    /// The file's permissions where they are more open than 0640, or those of one of its sources.
    pub open_mode: Option<u32>,
    /// Names in the directory that its sources begin with.
    pub(super) sources: BTreeSet<String>,
    /// Of all that was read; `None` when not all could be.
    pub(super) digest: Option<Digest>,
}

/// True for names of records: `*.yaml`, `*.yml`, `*.json`, not hidden. Editors' copies have other endings.
pub(super) fn is_record(name: &str) -> bool {
    let ending = Path::new(name).extension().and_then(OsStr::to_str);
    !name.starts_with('.') && matches!(ending, Some("yaml" | "yml" | "json"))
}

/// The names of the records in a directory.
///
/// # Errors
/// [`FeedError::Io`] when the directory cannot be read.
pub fn names(dir: &Path) -> Result<BTreeSet<String>, FeedError> {
    let unreadable = |error| io_error(dir, "a directory that can be read", error);
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        names.extend(entry.file_name().into_string().ok().filter(|name| is_record(name)));
    }
    Ok(names)
}

/// Reads the record `name` in `dir`, and the files it names; `None` when there is no such file.
#[must_use]
pub fn load(dir: &Path, name: &str) -> Option<Loaded> {
    let path = dir.join(name);
    let mut loaded =
        Loading { dir, open_mode: None, sources: BTreeSet::new(), hash: Sha256::new(), whole: true };
    let record = match loaded.read(&path, Limits::DEFAULT.record_octets) {
        // A directory that has gone says nothing about its records.
        Err(error) if error.kind() == io::ErrorKind::NotFound && dir.is_dir() => return None,
        Err(error) => {
            loaded.whole = false;
            Err(io_error(&path, "a file that can be read", error))
        }
        Ok(octets) => loaded.parse(&path, octets),
    };
    let digest = loaded.whole.then(|| loaded.hash.finalize().into());
    Some(Loaded { record, open_mode: loaded.open_mode, sources: loaded.sources, digest })
}

struct Loading<'a> {
    dir: &'a Path,
    open_mode: Option<u32>,
    sources: BTreeSet<String>,
    hash: Sha256,
    whole: bool,
}

impl Loading<'_> {
    /// Reads at most one octet more than `limit`: the caller then knows that it was too much.
    fn read(&mut self, path: &Path, limit: usize) -> io::Result<Vec<u8>> {
        // A pipe in the directory must not stop the feed: open without waiting, then look what it is.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        self.look_at(&metadata);
        let mut octets = Vec::new();
        File::take(file, u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1))
            .read_to_end(&mut octets)?;
        // The length first, so that no two sequences of files have one hash.
        self.hash.update(octets.len().to_be_bytes());
        self.hash.update(&octets);
        Ok(octets)
    }

    fn look_at(&mut self, metadata: &Metadata) {
        let mode = metadata.permissions().mode() & 0o7777;
        if mode & TOO_OPEN != 0 {
            self.open_mode = Some(mode);
        }
    }

    fn parse(&mut self, path: &Path, octets: Vec<u8>) -> Result<(Record, Vec<Warning>), FeedError> {
        let text = String::from_utf8(octets).map_err(|error| FeedError::Content {
            path: path.to_owned(),
            expected: "UTF-8 text".into(),
            found: format!("another octet at {}", error.utf8_error().valid_up_to()),
            remedy: "save it as UTF-8; put binary user-data into `base64` or a file named by `source`",
        })?;
        let (mut record, warnings) = Record::parse(&path.to_string_lossy(), &text)?;
        let cap = usize::try_from(record.serve.limits.user_data).unwrap_or(usize::MAX);
        for (field, payload) in record.payloads_mut() {
            let Some(payload) = payload else { continue };
            let Some(source) = payload.source().cloned() else { continue };
            let read = self.resolve(field, &source, cap);
            self.whole &= read.is_ok();
            payload.resolve(read?);
        }
        Ok((record, warnings))
    }

    /// Reads a source. Links are followed, but not out of the directory: a record must not be able to show
    /// a guest some other file of the node.
    fn resolve(&mut self, field: &str, source: &Source, cap: usize) -> Result<Bytes, FeedError> {
        let first = source.file.components().find_map(|part| match part {
            Component::Normal(name) => name.to_str().map(str::to_owned),
            _ => None,
        });
        self.sources.extend(first);
        let path = self.dir.join(&source.file);
        let unreadable =
            |error| io_error(&path, "a file that can be read, named by a record's `source`", error);
        let real = path.canonicalize().map_err(unreadable)?;
        if !real.starts_with(self.dir.canonicalize().map_err(unreadable)?) {
            return Err(FeedError::Content {
                path,
                expected: "a file inside the record's directory".into(),
                found: format!("a link to {}", real.display()),
                remedy: "put the file itself beside the record",
            });
        }
        let octets = self.read(&real, cap).map_err(unreadable)?;
        if octets.len() > cap {
            return Err(FeedError::Content {
                path,
                expected: format!("at most {cap} octets of {field}"),
                found: "more".into(),
                remedy: "shrink it (gzip is taken by cloud-init) or raise serve.limits.user_data",
            });
        }
        Ok(octets.into())
    }
}
