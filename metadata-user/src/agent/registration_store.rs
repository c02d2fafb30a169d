//! Files of registered records, one for each record, in the state directory.
//!
//! A feed repeats its records at every startup, but a VM is registered by the API only once. Each registered record is
//! therefore on disk, complete and synced, before the client gets its answer. The files contain payloads and
//! credentials, so they have mode 0600.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use tracing::warn;

use metadata_common::printable::hex;
use metadata_content::record::{Record, RecordLimits};
use metadata_content::source::RecordSource;
use metadata_feed::registry::{MAX_RECORDS, RecordId};
use metadata_feed::state::{FileHeader, StateFileKind, private_file};

/// The directory's name in the state directory.
pub(super) const DIRECTORY: &str = "instances";
/// Limit on a file, in bytes.
pub(super) const MAX_BYTES: usize = 16 << 20;

const FORM: StateFileKind = StateFileKind { kind: "instance", version: 1, oldest: 1, bytes: MAX_BYTES };

#[derive(Serialize, Deserialize)]
struct StoredRecord<'a> {
    #[serde(flatten)]
    head: FileHeader,
    source: RecordSource,
    name: String,
    #[serde(borrow)]
    record: &'a RawValue,
}

/// The directory of registered records. With `None`, records are lost when the agent ends.
#[derive(Clone, Debug)]
pub(super) struct RegistrationStore(Option<PathBuf>);

impl RegistrationStore {
    /// The shelf in a state directory; without one, nothing is stored.
    pub(super) fn below(state: Option<&Path>) -> Self {
        Self(state.map(|state| state.join(DIRECTORY)))
    }

    /// Writes a record, as JSON of [`Record::to_json`], and replaces the record of that name.
    ///
    /// # Errors
    /// If the file cannot be written. The old record stays.
    pub(super) fn put(&self, id: &RecordId, json: String) -> io::Result<()> {
        let Some(directory) = &self.0 else { return Ok(()) };
        private_file::make_directory(directory)?;
        let stored = StoredRecord {
            head: FORM.head(),
            source: id.source,
            name: id.key.as_ref().into(),
            record: &RawValue::from_string(json)?,
        };
        let path = directory.join(file_of(id));
        FORM.spare_other_version(&path)?;
        private_file::replace(&path, &serde_json::to_vec(&stored)?)
    }

    /// True if there is a file of this record, or if nothing is stored.
    pub(super) fn has(&self, id: &RecordId) -> bool {
        self.0.as_ref().is_none_or(|directory| directory.join(file_of(id)).exists())
    }

    /// Removes a record, if it exists.
    ///
    /// # Errors
    /// If the file may still exist. The record may be served again after a restart.
    pub(super) fn remove(&self, id: &RecordId) -> io::Result<()> {
        let Some(directory) = &self.0 else { return Ok(()) };
        let path = directory.join(file_of(id));
        if private_file::remove(&path)? { private_file::sync_directory(&path) } else { Ok(()) }
    }

    /// Reads every record that can be read.
    pub(super) fn read(&self, limits: &RecordLimits) -> Vec<(RecordId, Record)> {
        self.read_all(limits).records
    }

    /// Reads every record, and tells which are missing because the system could not read them. Files that cannot be used
    /// stay in place, and a warning is logged.
    pub(super) fn read_all(&self, limits: &RecordLimits) -> StoredRecords {
        let mut stored = StoredRecords::default();
        let Some(directory) = &self.0 else { return stored };
        let paths = match list(directory) {
            Ok(paths) => paths,
            Err(error) => {
                warn!(
                    "registered records cannot be listed: {}: {error}; those that were read before stay in force",
                    directory.display()
                );
                stored.is_partial = true;
                return stored;
            }
        };
        let mut counts = BTreeMap::new();
        for path in paths {
            match read(&path, limits) {
                Ok((id, record)) => {
                    let count: &mut usize = counts.entry(id.source).or_default();
                    if *count == MAX_RECORDS {
                        warn!("{}: not served: expected at most {MAX_RECORDS} records", path.display());
                        continue;
                    }
                    *count += 1;
                    stored.records.push((id, record));
                }
                Err(Unusable::System(error)) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    warn!(
                        "{}: not read: {error}; a version that was read before stays in force",
                        path.display()
                    );
                    stored.unread.insert(name, error.to_string());
                }
                Err(reason @ Unusable::Content(_)) => {
                    warn!(
                        "{}: not served: {reason}; register the VM again, or remove the file",
                        path.display()
                    );
                }
            }
        }
        stored
    }
}

/// The records of the directory.
#[derive(Debug, Default)]
pub(super) struct StoredRecords {
    pub(super) records: Vec<(RecordId, Record)>,
    /// Why files could not be read, by their names. The files may be good.
    unread: BTreeMap<String, String>,
    /// The directory could not be listed, so any record may be missing.
    pub(super) is_partial: bool,
}

impl StoredRecords {
    /// Why a record is missing although there is a file for it.
    pub(super) fn why_unread(&self, id: &RecordId) -> Option<&str> {
        self.unread.get(&file_of(id)).map(String::as_str)
    }
}

/// Why a file is not used.
#[derive(Debug)]
enum Unusable {
    /// The system cannot read it now.
    System(io::Error),
    /// It is not a record that this agent reads.
    Content(String),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(error) => error.fmt(f),
            Self::Content(reason) => f.write_str(reason),
        }
    }
}

/// The paths of all files of records. Half of a list would remove the VMs of the other half.
fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    // The names of files that are being written begin with a dot.
    let whole = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "json")
            && path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."))
    };
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    Ok(paths.into_iter().filter(whole).collect())
}

pub(super) fn file_of(id: &RecordId) -> String {
    let digest = Sha256::digest(id.key.as_bytes());
    format!("{}-{}.json", id.source.name(), hex(&digest[..16]))
}

/// Reads one record. The error text contains nothing from the file.
fn read(path: &Path, limits: &RecordLimits) -> Result<(RecordId, Record), Unusable> {
    let bytes = private_file::read(path, FORM.bytes).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => Unusable::Content(error.to_string()),
        _ => Unusable::System(error),
    })?;
    let bytes = bytes.ok_or_else(|| Unusable::Content("the file is gone".into()))?;
    parsed(&bytes, limits).map_err(Unusable::Content)
}

fn parsed(bytes: &[u8], limits: &RecordLimits) -> Result<(RecordId, Record), String> {
    let unknown = |_| "expected a file that the agent wrote".to_owned();
    // Another version may have other fields.
    let head = serde_json::from_slice(bytes).map_err(unknown)?;
    FORM.accept(&head).map_err(|error| error.to_string())?;
    let stored: StoredRecord<'_> = serde_json::from_slice(bytes).map_err(unknown)?;
    let within = RecordLimits { record_bytes: FORM.bytes, ..limits.clone() };
    let (record, _) = Record::parse_within(&within, "instance.json", stored.record.get())
        .map_err(|error| error.to_string())?;
    Ok((RecordId::new(stored.source, &stored.name), record))
}

#[cfg(test)]
mod tests {
    use super::{DIRECTORY, FORM, RegistrationStore, file_of, read};
    use metadata_content::record::{Record, RecordLimits};
    use metadata_content::source::RecordSource;
    use metadata_feed::registry::RecordId;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    fn record(name: &str) -> Record {
        let text = format!(
            "schema: vmrecord/1\ngeneration: 1\nvm: {{uuid: 7c0f1a52-3b5e-4d1a-9d2c-00000000000a, name: {name}, \
             project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: web}}\n\
             placement: {{region: r, zone: z}}\nadmin: {{user: root, password: correct horse}}\n\
             user_data: {{base64: AAEC/w==}}\n"
        );
        Record::parse("test", &text).expect("a record").0
    }

    #[test]
    fn a_record_is_read_back_until_it_is_removed() {
        let room = tempfile::tempdir().expect("a directory");
        let shelf = RegistrationStore::below(Some(room.path()));
        assert!(shelf.read(&RecordLimits::DEFAULT).is_empty(), "there is no directory yet");
        let ids = [("ns/a", RecordSource::Api), ("ns/a", RecordSource::Hook), ("ns-a", RecordSource::Api)];
        let ids = ids.map(|(name, source)| RecordId::new(source, name));
        for id in &ids {
            shelf.put(id, record("first").to_json().expect("JSON")).expect("written");
            shelf.put(id, record(&id.key.replace('/', "-")).to_json().expect("JSON")).expect("written");
        }
        let mut found = shelf.read(&RecordLimits::DEFAULT);
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        let expected: Vec<_> =
            [&ids[2], &ids[0], &ids[1]].map(|id| (id.clone(), record(&id.key.replace('/', "-")))).into();
        assert_eq!(found, expected);
        for file in fs::read_dir(room.path().join(DIRECTORY)).expect("listed") {
            let mode = file.expect("a file").metadata().expect("there").permissions().mode() & 0o7777;
            assert_eq!(mode, 0o600);
        }
        for id in &ids {
            assert!(shelf.has(id));
            shelf.remove(id).expect("removed");
            assert!(!shelf.has(id));
            shelf.remove(id).expect("removed before");
        }
        assert!(shelf.read(&RecordLimits::DEFAULT).is_empty());
    }

    #[test]
    fn formats_of_every_release_are_read() {
        let room = tempfile::tempdir().expect("a directory");
        let shelf = RegistrationStore::below(Some(room.path()));
        let id = RecordId::new(RecordSource::Hook, "ns/web");
        shelf.put(&id, record("web").to_json().expect("JSON")).expect("written");
        let path = room.path().join(DIRECTORY).join(file_of(&id));
        golden::check("instance", FORM.version, &fs::read(&path).expect("bytes"));
        for sample in golden::all("instance") {
            fs::write(&path, &sample.bytes).expect("written");
            assert_eq!(
                shelf.read(&RecordLimits::DEFAULT),
                [(id.clone(), record("web"))],
                "{}",
                sample.release
            );
        }
    }

    #[test]
    fn a_file_of_a_later_version_is_named_and_kept_when_the_vm_is_registered_again() {
        let room = tempfile::tempdir().expect("a directory");
        let shelf = RegistrationStore::below(Some(room.path()));
        let id = RecordId::new(RecordSource::Api, "web");
        let path = room.path().join(DIRECTORY).join(file_of(&id));
        let later = r#"{"xdp-imds":"instance","version":2,"records":["other fields"]}"#;
        fs::create_dir(room.path().join(DIRECTORY)).expect("a directory");
        fs::write(&path, later).expect("written");
        assert!(shelf.read(&RecordLimits::DEFAULT).is_empty());
        let reason = read(&path, &RecordLimits::DEFAULT).expect_err("a refusal").to_string();
        assert!(reason.contains("instance of version 1, found version 2"), "{reason}");
        shelf.put(&id, record("web").to_json().expect("JSON")).expect("written");
        assert_eq!(shelf.read(&RecordLimits::DEFAULT), [(id, record("web"))]);
        assert_eq!(fs::read_to_string(path.with_extension("json.v2")).expect("it is kept"), later);
    }

    #[test]
    fn an_unusable_file_does_not_affect_the_others() {
        let room = tempfile::tempdir().expect("a directory");
        let shelf = RegistrationStore::below(Some(room.path()));
        let id = RecordId::new(RecordSource::Api, "good");
        shelf.put(&id, record("good").to_json().expect("JSON")).expect("written");
        for (name, text) in [
            ("api-0.json", "{"),
            ("api-1.json", r#"{"xdp-imds":"instance","version":2,"source":"api","name":"x","record":{}}"#),
            ("api-2.json", r#"{"xdp-imds":"instance","version":1,"source":"api","name":"x","record":{}}"#),
            (".api-3.json.new", "half"),
        ] {
            fs::write(room.path().join(DIRECTORY).join(name), text).expect("written");
        }
        let found = shelf.read(&RecordLimits::DEFAULT);
        assert_eq!(found.into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [id]);
    }

    #[test]
    fn what_the_system_does_not_read_is_told_from_what_is_not_there() {
        let room = tempfile::tempdir().expect("a directory");
        let shelf = RegistrationStore::below(Some(room.path()));
        let ids = ["a", "b", "c"].map(|name| RecordId::new(RecordSource::Api, name));
        ids.iter().for_each(|id| {
            shelf.put(id, record("a").to_json().expect("JSON")).expect("written");
        });
        let path = |id: &RecordId| room.path().join(DIRECTORY).join(file_of(id));
        // A directory can be opened and not be read.
        fs::remove_file(path(&ids[0])).expect("removed");
        fs::create_dir(path(&ids[0])).expect("a directory");
        fs::write(path(&ids[1]), "{").expect("written");
        let stored = shelf.read_all(&RecordLimits::DEFAULT);
        assert!(!stored.is_partial);
        assert_eq!(stored.records.iter().map(|(id, _)| id).collect::<Vec<_>>(), [&ids[2]]);
        assert_eq!(ids.each_ref().map(|id| stored.why_unread(id).is_some()), [true, false, false]);
        fs::remove_dir_all(room.path().join(DIRECTORY)).expect("removed");
        assert!(!shelf.read_all(&RecordLimits::DEFAULT).is_partial, "there is nothing");
        fs::write(room.path().join(DIRECTORY), "in the way").expect("written");
        assert!(shelf.read_all(&RecordLimits::DEFAULT).is_partial, "nobody knows");
    }

    #[test]
    fn a_failed_write_is_an_error_and_without_a_directory_nothing_is_written() {
        let room = tempfile::tempdir().expect("a directory");
        fs::write(room.path().join(DIRECTORY), "in the way").expect("written");
        let (id, json) = (RecordId::new(RecordSource::Api, "a"), record("a").to_json().expect("JSON"));
        RegistrationStore::below(Some(room.path()))
            .put(&id, json.clone())
            .expect_err("no directory can be made");
        let none = RegistrationStore::below(None);
        none.put(&id, json).expect("kept only in memory");
        assert!(none.read(&RecordLimits::DEFAULT).is_empty());
    }
}
