//! Laws of the snapshot reader, which hold for every file in place of the snapshot of records.
//!
//! The fuzz target and the test that replays its corpus share this file. Each input is read unchanged, and again with
//! a correct last line, because chance does not produce a valid digest.
#![cfg_attr(not(test), no_main)]

use std::path::Path;
use std::sync::Arc;

use metadata_content::record::RecordLimits;
use metadata_feed::snapshot::{self, SnapshotError};
use sha2::{Digest as _, Sha256};

/// Longest file tried, in bytes.
const LONGEST: usize = 64 << 10;
/// Bytes of the input that no message may repeat; a shorter match may be a coincidence.
const QUOTED: usize = 16;
/// A directory where writing needs no disk.
const IN_MEMORY: &str = "/dev/shm";

/// Asserts every law on one file.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    if input.len() > LONGEST {
        return;
    }
    let base = Path::new(IN_MEMORY);
    let base = if base.is_dir() { base.to_owned() } else { std::env::temp_dir() };
    let room = tempfile::tempdir_in(base).expect("a directory");
    let path = room.path().join(snapshot::FILE);
    if read(&path, input) {
        // A file one byte longer or shorter is not valid.
        let (_, less) = input.split_last().expect("what is good has bytes");
        assert!(!read(&path, less), "valid without its last byte");
        assert!(!read(&path, &[input, b" "].concat()), "valid with one more byte");
    }
    let mut whole = input.to_vec();
    if whole.last() != Some(&b'\n') {
        whole.push(b'\n');
    }
    let records =
        whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count().saturating_sub(1);
    let digest: String = Sha256::digest(&whole).iter().map(|byte| format!("{byte:02x}")).collect();
    whole.extend(format!("{{\"records\":{records},\"sha256\":\"{digest}\"}}\n").into_bytes());
    read(&path, &whole);
}

/// True if a file is a snapshot. A valid one must have the same content after writing it again; the error for an
/// invalid one must not quote its content.
fn read(path: &Path, bytes: &[u8]) -> bool {
    std::fs::write(path, bytes).expect("a file");
    match snapshot::read(path, &RecordLimits::DEFAULT) {
        Ok(mut records) => {
            let shared: Vec<_> =
                records.iter().map(|one| (one.id.clone(), Arc::new(one.record.clone()))).collect();
            let written = snapshot::write(path, &shared, &snapshot::Origins::new()).expect("it is written");
            assert_eq!((written.records, written.left_out), (records.len(), 0));
            let mut again = snapshot::read(path, &RecordLimits::DEFAULT).expect("what was written is read");
            // The directory comes from the agent's configuration.
            records.iter_mut().for_each(|one| one.from = None);
            records.sort_by(|a, b| a.id.cmp(&b.id));
            again.sort_by(|a, b| a.id.cmp(&b.id));
            assert_eq!(again, records, "the content differs after writing it again");
            true
        }
        Err(error) => {
            assert!(
                matches!(error, SnapshotError::Damaged { .. } | SnapshotError::Version { .. }),
                "{error}"
            );
            let message = format!("{error} {error:?}").replace(&path.display().to_string(), "");
            let quoted = bytes.windows(QUOTED).any(|part| {
                std::str::from_utf8(part).is_ok_and(|part| message.contains(part) && !part.trim().is_empty())
            });
            assert!(!quoted, "the message quotes the file: {message}");
            false
        }
    }
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
