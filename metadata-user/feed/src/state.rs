//! The agent's state on disk. Each file is private, and a write replaces it as a whole or not at all.
//!
//! | below the state directory | content | limit | if the file is unusable |
//! |---|---|---|---|
//! | `token.key` ([`token_file`]) | keys of session tokens | 4 KiB | the file is set aside, and a new key is made; with the wrong permissions, the agent does not start |
//! | `vms/<uuid>.json` ([`mailboxes`]) | what one guest wrote | 4 MiB | the file is set aside, and the guest starts with nothing |
//! | `dialects` ([`asked_dialects`]) | which dialects each guest has asked for | 16 MiB | guests' first answers come some 50 µs later |
//! | `requests` ([`learned_requests`]) | which requests the kernel answers | 1 MiB | workers answer them until guests have sent them again |
//! | `instances/*.json` | one record of the API, with a [`FileHeader`] | 16 MiB | the file stays and is not served |
//! | `records.snapshot` | the last good records, as a [`StateFileKind`] | 256 MiB | rewritten once records are read |
//! | `kubevirt.vmis` | the last known VMIs, as a [`StateFileKind`] | 64 MiB | rewritten once the API server answers |
//!
//! [`private_file`] reads and writes all of them. [`save_queue`] repeats writes that fail.
//!
//! Files with many entries have this format:
//!
//! ```text
//!  {"xdp-imds":"records","version":1}        kind and version
//!  {"key":"web-1.yaml", …}                   one line per entry
//!  {"records":1,"sha256":"…"}                how many entries, and the digest of all bytes before this line
//! ```
//!
//! A file of one entry has kind and version among its fields ([`FileHeader`]), and needs no digest: it is replaced as a
//! whole, and truncated JSON does not parse.

pub mod asked_dialects;
pub mod learned_requests;
pub mod mailboxes;
pub mod private_file;
pub mod save_queue;
pub mod token_file;
pub mod vm_events;

use metadata_common::printable::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::io::{BufRead, BufReader, Read as _, Seek, Write};
use std::path::Path;
use std::{fs, io};

/// Most bytes of the last line.
const TAIL: usize = 128;

/// A kind of state file. The next release of the agent reads the files of this one, so a change of their content needs
/// a new `version`, and `oldest` stays as long as older files can be read.
#[derive(Clone, Copy, Debug)]
pub struct StateFileKind {
    /// What the file holds.
    pub kind: &'static str,
    /// The version of its fields, which this release writes.
    pub version: u32,
    /// The oldest version that this release reads.
    pub oldest: u32,
    /// Limit on the file, in bytes.
    pub bytes: usize,
}

/// Kind and version, as fields of a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHeader {
    #[serde(rename = "xdp-imds")]
    kind: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Tail {
    records: usize,
    sha256: String,
}

/// Why a file of entries cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FormError {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It differs from what was written. The message repeats nothing of its content.
    #[error("expected {0}")]
    Damaged(&'static str),
    /// Another release wrote it, in a version that this one does not read.
    #[error(transparent)]
    Version(#[from] OtherVersion),
}

/// Another release of the agent wrote a file in a version that this one does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected {kind} of version {}, found version {found}, which another release wrote; start a release that reads it, \
     or continue without (the file is not replaced, but renamed to end in `.v{found}` once this release writes its own)",
    versions(*oldest, *newest)
)]
pub struct OtherVersion {
    /// What the file holds.
    pub kind: &'static str,
    /// The version found.
    pub found: u32,
    /// The oldest version that this release reads.
    pub oldest: u32,
    /// The newest version that this release reads.
    pub newest: u32,
}

/// Names a range of versions.
fn versions(oldest: u32, newest: u32) -> String {
    if oldest == newest { newest.to_string() } else { format!("{oldest} to {newest}") }
}

/// Renames the file at `path`, whose version another release reads, so that nothing replaces it.
///
/// # Errors
/// The file cannot be renamed.
pub(crate) fn set_aside(path: &Path, version: u32) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".v{version}"));
    fs::rename(path, &aside)?;
    let kept = Path::new(&aside).display();
    tracing::warn!("{} is of version {version}, which another release reads: kept as {kept}", path.display());
    Ok(())
}

/// What [`StateFileKind::write`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteResult {
    /// Entries in the file.
    pub records: usize,
    /// Entries omitted because of the limit.
    pub left_out: usize,
}

impl StateFileKind {
    /// Returns the kind and version as fields.
    #[must_use]
    pub fn head(&self) -> FileHeader {
        FileHeader { kind: self.kind.to_owned(), version: self.version }
    }

    /// Checks the kind and version of a file.
    ///
    /// # Errors
    /// [`FormError::Damaged`] for another kind, [`FormError::Version`] for a version that this release does not read.
    pub fn accept(&self, head: &FileHeader) -> Result<(), FormError> {
        let Self { kind, version: newest, oldest, .. } = *self;
        match head.version {
            _ if head.kind != kind => Err(FormError::Damaged("its kind and version in the first line")),
            found if (oldest..=newest).contains(&found) => Ok(()),
            found => Err(OtherVersion { kind, found, oldest, newest }.into()),
        }
    }

    /// Keeps a file of a version that this release does not read: renames it, so that a write does not replace it. Call
    /// it before a write.
    ///
    /// # Errors
    /// The file cannot be read or renamed.
    pub fn spare_other_version(&self, path: &Path) -> io::Result<()> {
        let Some(file) = private_file::open(path)? else { return Ok(()) };
        let mut line = Vec::new();
        self.next_line(&mut BufReader::new(file), &mut line)?;
        match serde_json::from_slice(&line).map(|head| self.accept(&head)) {
            Ok(Err(FormError::Version(OtherVersion { found, .. }))) => set_aside(path, found),
            _ => Ok(()),
        }
    }

    /// Writes entries, each one line of JSON without its end. Those beyond the limit are left out. The file is never in
    /// memory as a whole.
    ///
    /// # Errors
    /// An entry is an error, or writing fails.
    pub fn write(
        &self,
        entries: impl IntoIterator<Item = io::Result<Vec<u8>>>,
        out: impl Write,
    ) -> io::Result<WriteResult> {
        let mut out = DigestWriter { out, bytes: 0, hash: Sha256::new() };
        out.line(&serde_json::to_vec(&self.head())?)?;
        let mut written = WriteResult { records: 0, left_out: 0 };
        for entry in entries {
            let line = entry?;
            if out.bytes + line.len() + 1 + TAIL > self.bytes {
                written.left_out += 1;
                continue;
            }
            out.line(&line)?;
            written.records += 1;
        }
        let tail = Tail { records: written.records, sha256: hex(&out.hash.clone().finalize()) };
        out.line(&serde_json::to_vec(&tail)?)?;
        out.out.flush()?;
        Ok(written)
    }

    /// Checks that the file is complete, then passes each entry to `take`. If `take` cannot use an entry, its error is
    /// the expected content.
    ///
    /// # Errors
    /// [`FormError`].
    pub fn read(
        &self,
        mut file: impl BufRead + Seek,
        mut take: impl FnMut(&[u8]) -> Result<(), &'static str>,
    ) -> Result<(), FormError> {
        self.check(&mut file)?;
        file.rewind()?;
        let mut line = Vec::new();
        self.next_line(&mut file, &mut line)?;
        while self.next_line(&mut file, &mut line)? && !file.fill_buf()?.is_empty() {
            if line.len() > 1 {
                take(&line).map_err(FormError::Damaged)?;
            }
        }
        Ok(())
    }

    /// Compares a file with its first line and its last.
    fn check(&self, file: &mut impl BufRead) -> Result<(), FormError> {
        let damaged = |expected| Err(FormError::Damaged(expected));
        let (mut hash, mut bytes, mut lines) = (Sha256::new(), 0, 0);
        let (mut line, mut last) = (Vec::new(), Vec::new());
        while self.next_line(file, &mut line)? {
            bytes += line.len();
            if bytes > self.bytes {
                return damaged("a smaller file");
            }
            if !last.is_empty() {
                if lines == 0 {
                    let Ok(head) = serde_json::from_slice(&last) else {
                        return damaged("its kind and version in the first line");
                    };
                    self.accept(&head)?;
                }
                hash.update(&last);
                lines += usize::from(last != b"\n");
            }
            std::mem::swap(&mut line, &mut last);
        }
        if !last.ends_with(b"\n") || lines == 0 {
            return damaged("a last line");
        }
        let Ok(tail) = serde_json::from_slice::<Tail>(&last) else {
            return damaged("a last line with its digest");
        };
        if tail.sha256 != hex(&hash.finalize()) || lines != tail.records + 1 {
            return damaged("the digest in its last line");
        }
        Ok(())
    }

    /// Reads a line with its end; returns false at the end of the file. Cuts a line that is longer than a file may be.
    fn next_line(&self, file: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
        line.clear();
        file.take(self.bytes as u64 + 1).read_until(b'\n', line)?;
        Ok(!line.is_empty())
    }
}

/// Counts and digests what it writes.
struct DigestWriter<W> {
    out: W,
    bytes: usize,
    hash: Sha256,
}

impl<W: Write> DigestWriter<W> {
    fn line(&mut self, line: &[u8]) -> io::Result<()> {
        for piece in [line, b"\n"] {
            self.out.write_all(piece)?;
            self.hash.update(piece);
            self.bytes += piece.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::{FileHeader, FormError, StateFileKind, WriteResult};

    const FORM: StateFileKind = StateFileKind { kind: "numbers", version: 3, oldest: 2, bytes: 1 << 10 };

    fn encode(form: StateFileKind, entries: usize) -> (Vec<u8>, WriteResult) {
        let mut bytes = Vec::new();
        let entries = (0..entries).map(|n| Ok(format!("{{\"n\":{n}}}").into_bytes()));
        let written = form.write(entries, &mut bytes).expect("memory takes it");
        (bytes, written)
    }

    fn decode(form: StateFileKind, bytes: &[u8]) -> Result<Vec<String>, FormError> {
        let mut found = Vec::new();
        form.read(Cursor::new(bytes), |line| {
            found.push(String::from_utf8_lossy(line).trim_end().to_owned());
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn a_file_of_entries_has_the_lines_that_every_version_reads() {
        let (bytes, written) = encode(FORM, 2);
        assert_eq!(written, WriteResult { records: 2, left_out: 0 });
        let text = String::from_utf8(bytes.clone()).expect("text");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..3], [r#"{"xdp-imds":"numbers","version":3}"#, r#"{"n":0}"#, r#"{"n":1}"#]);
        assert!(lines[3].starts_with(r#"{"records":2,"sha256":""#), "{text}");
        assert_eq!(decode(FORM, &bytes).expect("whole"), lines[1..3]);
    }

    #[test]
    fn entries_beyond_the_limit_are_left_out_and_counted() {
        let (bytes, written) = encode(FORM, 200);
        assert!(bytes.len() <= FORM.bytes && written.left_out > 0, "{written:?}");
        assert_eq!(written.records + written.left_out, 200);
        assert_eq!(decode(FORM, &bytes).expect("whole").len(), written.records);
    }

    #[test]
    fn a_file_of_another_kind_or_size_is_damaged() {
        let (bytes, _) = encode(FORM, 4);
        let smaller = StateFileKind { bytes: bytes.len() - 1, ..FORM };
        for other in [StateFileKind { kind: "letters", ..FORM }, smaller] {
            let error = decode(other, &bytes).expect_err("another form");
            assert!(matches!(error, FormError::Damaged(_)), "{other:?}: {error}");
        }
    }

    #[test]
    fn versions_within_the_range_are_read_and_the_error_for_others_names_both_and_the_remedy() {
        for (written, is_read) in [(1, false), (2, true), (3, true), (4, false)] {
            let (bytes, _) = encode(StateFileKind { version: written, ..FORM }, 2);
            match decode(FORM, &bytes) {
                Ok(lines) => assert!(is_read && lines.len() == 2, "{written}"),
                Err(FormError::Version(error)) => {
                    let (found, text) = (format!("found version {written}"), error.to_string());
                    let parts = ["numbers of version 2 to 3", &found, "start a release that reads it"];
                    assert!(!is_read && parts.iter().all(|part| text.contains(part)), "{text}");
                }
                Err(error) => panic!("{written}: {error}"),
            }
        }
    }

    #[test]
    fn a_write_spares_a_file_of_another_version_only() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("numbers");
        FORM.spare_other_version(&path).expect("there is no file");
        for (version, kept) in [(2, None), (3, None), (4, Some("numbers.v4")), (1, Some("numbers.v1"))] {
            let (bytes, _) = encode(StateFileKind { version, ..FORM }, 2);
            std::fs::write(&path, &bytes).expect("a file");
            FORM.spare_other_version(&path).expect("no error");
            assert_eq!(path.exists(), kept.is_none(), "{version}");
            if let Some(kept) = kept {
                assert_eq!(std::fs::read(room.path().join(kept)).expect("it is kept"), bytes);
            }
        }
    }

    #[test]
    fn the_fields_of_a_head_are_found_beside_others() {
        let head: FileHeader =
            serde_json::from_str(r#"{"xdp-imds":"numbers","version":3,"n":1}"#).expect("a head");
        assert_eq!(head, FORM.head());
    }
}
