//! The last good records, in one file, for a start while their source is away.
//!
//! ```text
//!  {"xdp-imds":"records","version":1}
//!  {"source":"file","key":"web-1.yaml","record":{"schema":"vmrecord/1", …}}     one line a record
//!  {"records":1,"sha256":"…"}                                   of all octets before this line
//! ```
//!
//! A line without a source, or with one we do not know, is a file's: earlier agents wrote none.
//!
//! Payloads and credentials are inside, so the file needs none beside it, is as secret as the records, and has mode
//! 0600. It is replaced whole. One that is not exactly as written is not used at all.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};

use crate::private_file;
use crate::record::{Limits, Record};
use crate::registry::{RecordId, Source};

/// The file's name in the state directory.
pub const FILE: &str = "records.snapshot";

/// Octets of the file at most: 16,384 records of 16 KiB. Records beyond are left out, those later in the alphabet first.
pub const MAX_OCTETS: usize = 256 << 20;

const KIND: &str = "records";
const VERSION: u32 = 1;

/// Octets of the last line at most.
const TAIL: usize = 128;

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// There is none.
    #[error("there is no {}", path.display())]
    Absent {
        /// Where it would be.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is not as it was written. Never a word of what is in it.
    #[error("{} is damaged: expected {expected}; it is written anew once records are read", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was not there.
        expected: &'static str,
    },
}

#[derive(Serialize, Deserialize)]
struct Head {
    #[serde(rename = "xdp-imds")]
    kind: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Line<'a> {
    #[serde(default)]
    source: Option<String>,
    key: String,
    #[serde(borrow)]
    record: &'a RawValue,
}

#[derive(Serialize, Deserialize)]
struct Tail {
    records: usize,
    sha256: String,
}

/// What [`write()`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Records in the file.
    pub records: usize,
    /// Records for which there was no room.
    pub left_out: usize,
}

/// Puts records in the place of the snapshot at `path`.
///
/// # Errors
/// The file cannot be written; the one before is still there.
pub fn write(path: &Path, records: &[(RecordId, Arc<Record>)]) -> io::Result<Written> {
    let (octets, written) = encode(records, MAX_OCTETS)?;
    private_file::replace(path, &octets)?;
    Ok(written)
}

/// Reads the snapshot at `path`. A record beyond `limits` is left out, with a warning in the log.
///
/// # Errors
/// [`SnapshotError`] when there is none or it is not whole.
pub fn read(path: &Path, limits: &Limits) -> Result<Vec<(RecordId, Record)>, SnapshotError> {
    let octets = octets(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => SnapshotError::Absent { path: path.into() },
        _ => SnapshotError::Io { path: path.into(), source },
    })?;
    decode(&octets, limits).map_err(|expected| SnapshotError::Damaged { path: path.into(), expected })
}

fn octets(path: &Path) -> io::Result<Vec<u8>> {
    let mut octets = Vec::new();
    // One octet more than there may be says that it is not ours.
    File::open(path)?.take(MAX_OCTETS as u64 + 1).read_to_end(&mut octets)?;
    Ok(octets)
}

fn encode(records: &[(RecordId, Arc<Record>)], limit: usize) -> io::Result<(Vec<u8>, Written)> {
    let mut sorted: Vec<_> = records.iter().collect();
    sorted.sort_unstable_by_key(|(id, _)| id);
    let mut octets = serde_json::to_vec(&Head { kind: KIND.into(), version: VERSION })?;
    octets.push(b'\n');
    let mut written = Written { records: 0, left_out: 0 };
    for (RecordId { source, key }, record) in sorted {
        let record = RawValue::from_string(record.to_json()?)?;
        let line = serde_json::to_vec(&Line {
            source: Some(source.name().into()),
            key: key.as_ref().into(),
            record: &record,
        })?;
        if octets.len() + line.len() + 1 + TAIL > limit {
            written.left_out += 1;
            continue;
        }
        octets.extend(line);
        octets.push(b'\n');
        written.records += 1;
    }
    let tail = Tail { records: written.records, sha256: digest(&octets) };
    octets.extend(serde_json::to_vec(&tail)?);
    octets.push(b'\n');
    Ok((octets, written))
}

fn decode(octets: &[u8], limits: &Limits) -> Result<Vec<(RecordId, Record)>, &'static str> {
    if octets.len() > MAX_OCTETS {
        return Err("at most 256 MiB");
    }
    let whole = octets.strip_suffix(b"\n").ok_or("a last line")?;
    let end = whole.iter().rposition(|octet| *octet == b'\n').ok_or("a last line")? + 1;
    let (body, tail) = whole.split_at(end);
    let tail: Tail = serde_json::from_slice(tail).map_err(|_| "a last line with its digest")?;
    if tail.sha256 != digest(body) {
        return Err("the digest in its last line");
    }
    let mut lines = body.split(|octet| *octet == b'\n').filter(|line| !line.is_empty());
    let head: Head = lines.next().and_then(|line| serde_json::from_slice(line).ok()).ok_or("a first line")?;
    if head.kind != KIND || head.version != VERSION {
        return Err("records of version 1");
    }
    let lines: Vec<&[u8]> = lines.collect();
    if lines.len() != tail.records {
        return Err("as many records as its last line says");
    }
    let mut records = Vec::new();
    for line in lines {
        let Line { source, key, record } =
            serde_json::from_slice(line).map_err(|_| "a record in each line")?;
        // Payloads read from files beside the record do not count as its text, and are inside here.
        let within = Limits { record_octets: MAX_OCTETS, ..limits.clone() };
        match Record::parse_within(&within, "snapshot.json", record.get()) {
            Ok((record, _)) => {
                let source = source.as_deref().and_then(Source::of).unwrap_or_default();
                records.push((RecordId::new(source, &key), record));
            }
            Err(error) => tracing::warn!(record = key, "left out of the snapshot: {error}"),
        }
    }
    Ok(records)
}

fn digest(octets: &[u8]) -> String {
    Sha256::digest(octets).iter().map(|octet| format!("{octet:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::{FILE, SnapshotError, Written, decode, encode, read, write};
    use crate::record::{Credential, Limits, Record};
    use crate::registry::{RecordId, Source};
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    fn record(name: &str) -> Record {
        let text = format!(
            r#"{{"schema": "vmrecord/1", "generation": 7,
              "vm": {{"uuid": "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", "name": "{name}",
                     "project": {{"id": "p1", "number": 1, "account": "000000000000"}}}},
              "hostname": {{"short": "{name}"}}, "placement": {{"region": "local", "zone": "local-a"}},
              "admin": {{"user": "root", "password": "correct horse"}},
              "user_data": {{"text": "über\u0000\n"}}, "vendor_data": {{"base64": "AAEC/w=="}},
              "serve": {{"absent_seed": 404, "hop_limit": 3}}, "metadata": {{"a": "b"}},
              "credentials": {{"iam": {{"role": "r", "source": {{"file": "keys.json"}}}}}},
              "sinks": {{"ready": "unix:/run/s.sock:/x"}},
              "network": {{"nics": [{{"id": "n0", "name": "eth0", "mac": "52:54:00:12:34:56",
                "port": {{"ifname": "vnet0"}}, "mtu": 1500,
                "addresses": [{{"method": "static", "address": "192.0.2.5/24", "gateway": "192.0.2.1"}}]}}]}}}}"#
        );
        let (mut record, _) = Record::parse("test.json", &text).expect("a record");
        let keys = br#"{"AccessKeyId": "AK", "SecretAccessKey": "SK", "Token": "TK", "Expiration": "2030-01-01T00:00:00Z"}"#;
        record.credentials.resolve(Credential::Iam, keys).expect("keys");
        record
    }

    fn records(names: &[&str]) -> Vec<(RecordId, Arc<Record>)> {
        let id = |name| RecordId::new(Source::File, &format!("{name}.yaml"));
        names.iter().map(|name| (id(name), Arc::new(record(name)))).collect()
    }

    #[test]
    fn what_is_written_reads_back_without_the_files_beside_it() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join(FILE);
        let written = write(&path, &records(&["b", "a"])).expect("written");
        assert_eq!(written, Written { records: 2, left_out: 0 });
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o600);
        let found = read(&path, &Limits::DEFAULT).expect("read");
        assert_eq!(found.iter().map(|(id, _)| id.to_string()).collect::<Vec<_>>(), ["a.yaml", "b.yaml"]);
        let (mut expected, found) = (record("a"), &found[0].1);
        expected.credentials.iam.as_mut().expect("it has one").source = None;
        assert_eq!(*found, expected);
    }

    #[test]
    fn a_snapshot_with_any_octet_changed_or_cut_is_not_used() {
        let (octets, _) = encode(&records(&["a", "b"]), usize::MAX).expect("encoded");
        assert_eq!(decode(&octets, &Limits::DEFAULT).map(|found| found.len()), Ok(2));
        for at in 0..octets.len() {
            let mut spoilt = octets.clone();
            spoilt[at] ^= 0x01;
            assert!(decode(&spoilt, &Limits::DEFAULT).is_err(), "octet {at}");
            assert!(decode(&octets[..at], &Limits::DEFAULT).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn what_has_no_room_is_left_out_and_counted() {
        let all = records(&["a", "b", "c"]);
        let (whole, _) = encode(&all, usize::MAX).expect("encoded");
        let (octets, written) = encode(&all, whole.len() - 10).expect("encoded");
        assert_eq!(written, Written { records: 2, left_out: 1 });
        assert!(octets.len() < whole.len());
        let found = decode(&octets, &Limits::DEFAULT).expect("whole");
        assert_eq!(found.iter().map(|(id, _)| id.to_string()).collect::<Vec<_>>(), ["a.yaml", "b.yaml"]);
    }

    #[test]
    fn sources_are_kept_and_what_names_none_is_a_files() {
        let kept = [(RecordId::new(Source::Kubevirt, "ns/vm"), Arc::new(record("vm")))];
        let (octets, _) = encode(&kept, usize::MAX).expect("encoded");
        let read = |octets: &[u8]| decode(octets, &Limits::DEFAULT).expect("whole")[0].0.clone();
        assert_eq!(read(&octets), kept[0].0);
        let text = String::from_utf8(octets).expect("text");
        for (now, earlier) in [(r#""source":"kubevirt","#, ""), ("kubevirt", "carrier-pigeon")] {
            let text = text.replace(now, earlier);
            let (body, _) = text.trim_end().rsplit_once('\n').expect("lines");
            let body = format!("{body}\n");
            let digest = super::digest(body.as_bytes());
            let tail = format!("{{\"records\":1,\"sha256\":\"{digest}\"}}\n");
            assert_eq!(read((body + &tail).as_bytes()), RecordId::new(Source::File, "ns/vm"), "{earlier}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_snapshot_is_told_without_what_is_in_it() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join(FILE);
        assert!(matches!(read(&path, &Limits::DEFAULT), Err(SnapshotError::Absent { .. })));
        for text in ["", "correct horse", "correct horse\n{}\n", "\n\n"] {
            std::fs::write(&path, text).expect("written");
            let error = read(&path, &Limits::DEFAULT).expect_err(text);
            assert!(matches!(error, SnapshotError::Damaged { .. }), "{error}");
            assert!(!error.to_string().contains("horse"), "{error}");
        }
    }
}
