//! What holds for every file somebody may put in the place of the snapshot of records.
//!
//! Shared by the fuzz target and the test that replays its corpus. An input is read as it is, and once more with a last
//! line that is right for it: chance makes no digest.

use std::path::Path;
use std::sync::Arc;

use metadata_content::record::Limits;
use metadata_feed::snapshot::{self, SnapshotError};
use sha2::{Digest as _, Sha256};

/// Longest file looked at.
const LONGEST: usize = 64 << 10;
/// Octets of an input that no message may repeat: fewer may be a coincidence.
const TELLING: usize = 16;
/// Files go where writing them needs no disk.
const IN_MEMORY: &str = "/dev/shm";

/// Asserts every law on one file.
///
/// # Panics
/// When one is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    if input.len() > LONGEST {
        return;
    }
    let base = Path::new(IN_MEMORY);
    let base = if base.is_dir() { base.to_owned() } else { std::env::temp_dir() };
    let room = tempfile::tempdir_in(base).expect("a directory");
    let path = room.path().join(snapshot::FILE);
    if read(&path, input) {
        // One octet more or less is another file.
        let (_, less) = input.split_last().expect("what is good has octets");
        assert!(!read(&path, less), "good without its last octet");
        assert!(!read(&path, &[input, b" "].concat()), "good with one octet more");
    }
    let mut whole = input.to_vec();
    if whole.last() != Some(&b'\n') {
        whole.push(b'\n');
    }
    let records =
        whole.split(|octet| *octet == b'\n').filter(|line| !line.is_empty()).count().saturating_sub(1);
    let digest: String = Sha256::digest(&whole).iter().map(|octet| format!("{octet:02x}")).collect();
    whole.extend(format!("{{\"records\":{records},\"sha256\":\"{digest}\"}}\n").into_bytes());
    read(&path, &whole);
}

/// Whether a file is a snapshot. One that is says the same when it is written anew; one that is not says nothing of
/// what is in it.
fn read(path: &Path, octets: &[u8]) -> bool {
    std::fs::write(path, octets).expect("a file");
    match snapshot::read(path, &Limits::DEFAULT) {
        Ok(records) => {
            let shared: Vec<_> =
                records.iter().map(|(key, record)| (key.clone(), Arc::new(record.clone()))).collect();
            let written = snapshot::write(path, &shared).expect("it is written");
            assert_eq!((written.records, written.left_out), (records.len(), 0));
            let mut again = snapshot::read(path, &Limits::DEFAULT).expect("what was written is read");
            let mut records = records;
            records.sort_by(|(a, _), (b, _)| a.cmp(b));
            again.sort_by(|(a, _), (b, _)| a.cmp(b));
            assert_eq!(again, records, "written anew it says something else");
            true
        }
        Err(error) => {
            assert!(matches!(error, SnapshotError::Damaged { .. }), "{error}");
            let said = format!("{error} {error:?}").replace(&path.display().to_string(), "");
            let told = octets.windows(TELLING).any(|part| {
                std::str::from_utf8(part).is_ok_and(|part| said.contains(part) && !part.trim().is_empty())
            });
            assert!(!told, "what is in the file is in {said}");
            false
        }
    }
}
