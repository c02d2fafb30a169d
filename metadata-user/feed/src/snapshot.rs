//! The snapshot: the last good records in one file. The agent starts with them while their source is unavailable.
//!
//! ```text
//!  {"xdp-imds":"records","version":1}
//!  {"source":"file","from":"/etc/xdp-imds/records.d","key":"web-1.yaml","record":{"schema":"vmrecord/1", …}}
//!  {"records":1,"sha256":"…"}                                   of all bytes before this line
//! ```
//!
//! Each record has a line, with the directory that it was read from: records of one directory are not served in place of
//! those of another. Earlier versions wrote no directory; such a record counts as one of any directory. Earlier versions wrote no source: a record without a source, or with an unknown source, counts as a file's.
//!
//! The snapshot contains payloads and credentials. So it needs no other file, is as secret as the records, and has mode
//! 0600. It is replaced as a whole. The agent ignores a snapshot that differs from what was written
//! ([`crate::state`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::registry::RecordId;
pub use crate::state::WriteResult;
use crate::state::{FormError, OtherVersion, StateFileKind, private_file};
use metadata_content::record::{Record, RecordLimits};
use metadata_content::source::RecordSource;

/// The file's name in the state directory.
pub const FILE: &str = "records.snapshot";

/// Most bytes of the file: 16,384 records of 16 KiB. Written in the order of ids, without those that do not fit.
pub const MAX_BYTES: usize = 256 << 20;

const FORM: StateFileKind = StateFileKind { kind: "records", version: 1, oldest: 1, bytes: MAX_BYTES };

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// No snapshot exists.
    #[error("there is no {}", path.display())]
    Absent {
        /// The expected path.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file differs from what was written. The message repeats nothing of its content.
    #[error("{} is damaged: expected {expected}; it is rewritten once records are read", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The missing part.
        expected: &'static str,
    },
    /// Another release wrote it, in a version that this one does not read.
    #[error("{}: {source}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The versions.
        source: OtherVersion,
    },
}

#[derive(Serialize, Deserialize)]
struct Line<'a> {
    #[serde(default)]
    source: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    key: String,
    #[serde(borrow)]
    record: &'a RawValue,
}

/// The directory that each source reads its records from, as an absolute path.
pub type Origins = BTreeMap<RecordSource, String>;

/// A record of the snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotRecord {
    /// Its name.
    pub id: RecordId,
    /// The record.
    pub record: Record,
    /// The directory that it was read from; `None` if an earlier release wrote it.
    pub from: Option<String>,
}

/// The ids of a record in a line.
#[derive(Deserialize)]
struct LineIds {
    #[serde(default)]
    source: Option<String>,
    key: String,
    record: IdsOfRecord,
}

#[derive(Deserialize)]
struct IdsOfRecord {
    vm: IdsOfVm,
}

#[derive(Deserialize)]
struct IdsOfVm {
    uuid: String,
    #[serde(default)]
    owner: Option<IgnoredAny>,
}

/// Replaces the snapshot at `path`.
///
/// # Errors
/// The file cannot be written; the former one stays.
pub fn write(path: &Path, records: &[(RecordId, Arc<Record>)], origins: &Origins) -> io::Result<WriteResult> {
    FORM.spare_other_version(path)?;
    private_file::replace_by(path, None, |file| FORM.write(lines(records, origins), BufWriter::new(file)))
}

/// Reads the snapshot at `path`. Skips a record beyond `limits`, and logs a warning.
///
/// # Errors
/// [`SnapshotError`] if no snapshot exists, or if it is damaged.
pub fn read(path: &Path, limits: &RecordLimits) -> Result<Vec<SnapshotRecord>, SnapshotError> {
    decode(open(path)?, limits).map_err(|error| failed(path, error))
}

fn open(path: &Path) -> Result<BufReader<File>, SnapshotError> {
    let file = private_file::open(path).map_err(|error| failed(path, error.into()))?;
    file.map(BufReader::new).ok_or_else(|| SnapshotError::Absent { path: path.into() })
}

fn failed(path: &Path, error: FormError) -> SnapshotError {
    match error {
        FormError::Io(source) => SnapshotError::Io { path: path.into(), source },
        FormError::Damaged(expected) => SnapshotError::Damaged { path: path.into(), expected },
        FormError::Version(source) => SnapshotError::Version { path: path.into(), source },
    }
}

/// Returns the UUIDs of the records in the snapshot at `path` that have no owner besides. Of a platform's tenants only
/// an earlier release wrote such records.
///
/// # Errors
/// [`SnapshotError`] if no snapshot exists, or if it is damaged.
pub fn uuids_as_owners(path: &Path) -> Result<Vec<(RecordId, String)>, SnapshotError> {
    let mut found = Vec::new();
    let file = open(path)?;
    let read = FORM.read(file, |line| {
        let LineIds { source, key, record: IdsOfRecord { vm } } =
            serde_json::from_slice(line).map_err(|_| "a record in each line")?;
        if vm.owner.is_none() {
            let source = source.as_deref().and_then(RecordSource::of).unwrap_or_default();
            found.push((RecordId::new(source, &key), vm.uuid));
        }
        Ok(())
    });
    read.map(|()| found).map_err(|error| failed(path, error))
}

/// Returns the lines of records, in the order of their names.
fn lines(
    records: &[(RecordId, Arc<Record>)],
    origins: &Origins,
) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    let mut sorted: Vec<_> = records.iter().collect();
    sorted.sort_unstable_by_key(|(id, _)| id);
    sorted.into_iter().map(|(RecordId { source, key }, record)| {
        let record = RawValue::from_string(record.to_json()?)?;
        let (source, from) = (Some(source.name().into()), origins.get(source).cloned());
        Ok(serde_json::to_vec(&Line { source, from, key: key.as_ref().into(), record: &record })?)
    })
}

fn decode(file: impl BufRead + Seek, limits: &RecordLimits) -> Result<Vec<SnapshotRecord>, FormError> {
    // The line includes payloads from other files, which the limit of a record's text does not cover.
    let within = RecordLimits { record_bytes: MAX_BYTES, ..limits.clone() };
    let mut records = Vec::new();
    FORM.read(file, |line| {
        let Line { source, from, key, record } =
            serde_json::from_slice(line).map_err(|_| "a record in each line")?;
        match Record::parse_within(&within, "snapshot.json", record.get()) {
            Ok((record, _)) => {
                let source = source.as_deref().and_then(RecordSource::of).unwrap_or_default();
                records.push(SnapshotRecord { id: RecordId::new(source, &key), record, from });
            }
            Err(error) => tracing::warn!(record = key, "a record of the snapshot was skipped: {error}"),
        }
        Ok(())
    })?;
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::{
        FILE, FORM, FormError, Origins, SnapshotError, SnapshotRecord, StateFileKind, WriteResult, lines,
        read, write,
    };
    use crate::registry::RecordId;
    use metadata_common::printable::hex;
    use metadata_content::record::{Credential, Record, RecordLimits};
    use metadata_content::source::RecordSource;
    use sha2::{Digest as _, Sha256};
    use std::io::Cursor;
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    fn encode(records: &[(RecordId, Arc<Record>)], limit: usize) -> (Vec<u8>, WriteResult) {
        let mut bytes = Vec::new();
        let form = StateFileKind { bytes: limit, ..FORM };
        let written = form.write(lines(records, &origins()), &mut bytes).expect("encoded");
        (bytes, written)
    }

    fn decode(bytes: &[u8]) -> Result<Vec<(RecordId, Record)>, FormError> {
        Ok(named(super::decode(Cursor::new(bytes), &RecordLimits::DEFAULT)?))
    }

    fn named(records: Vec<SnapshotRecord>) -> Vec<(RecordId, Record)> {
        records.into_iter().map(|SnapshotRecord { id, record, .. }| (id, record)).collect()
    }

    fn origins() -> Origins {
        Origins::from([(RecordSource::File, "/nonexistent/records.d".to_owned())])
    }

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
        let id = |name| RecordId::new(RecordSource::File, &format!("{name}.yaml"));
        names.iter().map(|name| (id(name), Arc::new(record(name)))).collect()
    }

    #[test]
    fn a_snapshot_reads_back_without_other_files() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join(FILE);
        let written = write(&path, &records(&["b", "a"]), &origins()).expect("written");
        assert_eq!(written, WriteResult { records: 2, left_out: 0 });
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o600);
        let found = read(&path, &RecordLimits::DEFAULT).expect("read");
        assert!(found.iter().all(|one| one.from == origins().get(&RecordSource::File).cloned()), "{found:?}");
        let found = named(found);
        assert_eq!(found.iter().map(|(id, _)| id.to_string()).collect::<Vec<_>>(), ["a.yaml", "b.yaml"]);
        let (mut expected, found) = (record("a"), &found[0].1);
        expected.credentials.iam.as_mut().expect("it has one").source = None;
        assert_eq!(*found, expected);
    }

    #[test]
    fn formats_of_every_release_are_read() {
        let all = [("a.yaml", RecordSource::File), ("ns/vm", RecordSource::Kubevirt)]
            .map(|(key, source)| (RecordId::new(source, key), Arc::new(record("web-1"))));
        let (bytes, _) = encode(&all, usize::MAX);
        golden::check(FILE, FORM.version, &bytes);
        for sample in golden::all(FILE) {
            let found = decode(&sample.bytes).unwrap_or_else(|error| panic!("{}: {error}", sample.release));
            let mut expected = record("web-1");
            expected.credentials.iam.as_mut().expect("it has one").source = None;
            assert_eq!(
                found,
                all.each_ref().map(|(id, _)| (id.clone(), expected.clone())),
                "{}",
                sample.release
            );
        }
    }

    #[test]
    fn a_snapshot_of_a_later_version_is_refused_and_kept_when_another_is_written() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join(FILE);
        let mut later = Vec::new();
        StateFileKind { version: 2, ..FORM }
            .write(lines(&records(&["a"]), &origins()), &mut later)
            .expect("encoded");
        std::fs::write(&path, &later).expect("a file");
        let error = read(&path, &RecordLimits::DEFAULT).expect_err("a refusal").to_string();
        for part in
            ["records.snapshot", "records of version 1, found version 2", "start a release that reads it"]
        {
            assert!(error.contains(part), "no `{part}` in: {error}");
        }
        write(&path, &records(&["b"]), &origins()).expect("written");
        assert_eq!(read(&path, &RecordLimits::DEFAULT).expect("its own").len(), 1);
        assert_eq!(std::fs::read(room.path().join("records.snapshot.v2")).expect("it is kept"), later);
    }

    #[test]
    fn a_snapshot_that_an_earlier_agent_wrote_is_read() {
        let text = concat!(
            r#"{"xdp-imds":"records","version":1}"#,
            "\n",
            r#"{"source":"kubevirt","key":"ns/vm","record":{"schema":"vmrecord/1","generation":7,"vm":{"#,
            r#""uuid":"7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d","name":"a","project":{"id":"p1","number":1,"#,
            r#""account":"000000000000"}},"hostname":{"short":"a"},"placement":{"region":"local","zone":"local-a"}}}"#,
            "\n",
            r#"{"records":1,"sha256":"a3100b5e39991411a9e125e2a133480cfc8b8dd611c6fa0661691e273039b098"}"#,
            "\n",
        );
        let whole = super::decode(Cursor::new(text), &RecordLimits::DEFAULT).expect("whole");
        assert_eq!(whole[0].from, None, "it did not say where it had read the record");
        let found = decode(text.as_bytes()).expect("whole");
        assert_eq!(found[0].0, RecordId::new(RecordSource::Kubevirt, "ns/vm"));
        assert_eq!(found[0].1.generation, 7);
    }

    #[test]
    fn a_snapshot_with_any_byte_changed_or_cut_is_not_used() {
        let (bytes, _) = encode(&records(&["a", "b"]), usize::MAX);
        assert_eq!(decode(&bytes).expect("whole").len(), 2);
        for at in 0..bytes.len() {
            let mut spoilt = bytes.clone();
            spoilt[at] ^= 0x01;
            assert!(decode(&spoilt).is_err(), "byte {at}");
            assert!(decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn records_beyond_the_snapshots_limit_are_omitted_and_counted() {
        let all = records(&["a", "b", "c"]);
        let (whole, _) = encode(&all, usize::MAX);
        let (bytes, written) = encode(&all, whole.len() - 10);
        assert_eq!(written, WriteResult { records: 2, left_out: 1 });
        assert!(bytes.len() < whole.len());
        let found = decode(&bytes).expect("whole");
        assert_eq!(found.iter().map(|(id, _)| id.to_string()).collect::<Vec<_>>(), ["a.yaml", "b.yaml"]);
    }

    #[test]
    fn sources_read_back_and_a_line_without_one_is_a_files() {
        let kept = [(RecordId::new(RecordSource::Kubevirt, "ns/vm"), Arc::new(record("vm")))];
        let (bytes, _) = encode(&kept, usize::MAX);
        let read = |bytes: &[u8]| decode(bytes).expect("whole")[0].0.clone();
        assert_eq!(read(&bytes), kept[0].0);
        let text = String::from_utf8(bytes).expect("text");
        for (now, earlier) in [(r#""source":"kubevirt","#, ""), ("kubevirt", "carrier-pigeon")] {
            let text = text.replace(now, earlier);
            let (body, _) = text.trim_end().rsplit_once('\n').expect("lines");
            let body = format!("{body}\n");
            let digest = hex(&Sha256::digest(body.as_bytes()));
            let tail = format!("{{\"records\":1,\"sha256\":\"{digest}\"}}\n");
            assert_eq!(
                read((body + &tail).as_bytes()),
                RecordId::new(RecordSource::File, "ns/vm"),
                "{earlier}"
            );
        }
    }

    #[test]
    fn the_error_of_a_snapshot_omits_its_content() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join(FILE);
        assert!(matches!(read(&path, &RecordLimits::DEFAULT), Err(SnapshotError::Absent { .. })));
        for text in ["", "correct horse", "correct horse\n{}\n", "\n\n"] {
            std::fs::write(&path, text).expect("written");
            let error = read(&path, &RecordLimits::DEFAULT).expect_err(text);
            assert!(matches!(error, SnapshotError::Damaged { .. }), "{error}");
            assert!(!error.to_string().contains("horse"), "{error}");
        }
    }
}
