//! Loads one file and the sources of its record.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::io as io_error;
use crate::record_part::{self, TOO_OPEN};
use crate::{FeedError, RejectedVm};
use metadata_content::parser;
use metadata_content::record::values::is_uuid;
use metadata_content::record::vm::FileSource;
use metadata_content::record::{CREDENTIAL_BYTES, Credential, Record, RecordLimits, Warning};

/// SHA-256 of a record's text and sources.
pub(super) type RecordDigest = [u8; 32];

/// Hashed in place of an unreadable credential's length; no file has this length.
const ABSENT: [u8; 8] = [0xff; 8];

/// The result of loading one file.
#[derive(Debug)]
pub struct LoadedFile {
    /// The record with its payloads and credentials, and its warnings; or the reason why it is invalid.
    pub record: Result<(Record, Vec<Warning>), FeedError>,
    /// The file and its sources that are more open than 0640, and their modes.
    pub open_files: Vec<(PathBuf, u32)>,
    /// Why credentials of the record are missing, a sentence each. They are among the warnings too.
    pub lacking: Vec<String>,
    /// The first path component of each source.
    pub(super) sources: BTreeSet<String>,
    /// The subdirectories that hold sources, relative to the directory.
    pub(super) below: BTreeSet<PathBuf>,
    /// The digest of everything that was read; `None` if a part was unreadable.
    pub(super) digest: Option<RecordDigest>,
    /// The file is a symbolic link that leads nowhere.
    pub(super) dangling: bool,
    /// Why the program that writes these records refused a later version of this one.
    pub(super) refusal: Option<String>,
    /// False if there is only such a refusal.
    pub(super) exists: bool,
    /// The VM of a record that cannot be used, if the file or the refusal tells it.
    pub(super) vm: Option<RejectedVm>,
}

/// The ending of a file that says why the program that writes records refused a version of one.
pub const REFUSAL: &str = "refused";

/// How such a file begins: the VM's name follows, and `: `.
pub const REFUSED_VM: &str = "domain ";

/// Most bytes of such a file that are read.
pub const REFUSAL_BYTES: usize = 2 << 10;

/// The record that a refusal is about: both have the same name but for its ending. Hooks name records by UUIDs.
fn refused(name: &str) -> Option<String> {
    let (uuid, ending) = name.rsplit_once('.')?;
    (ending == REFUSAL && is_uuid(uuid)).then(|| format!("{uuid}.json"))
}

/// The text of the refusal of a record, if there is one.
fn refusal(dir: &Path, name: &str) -> Option<String> {
    let path = dir.join(name).with_extension(REFUSAL);
    match record_part::read(&path, REFUSAL_BYTES) {
        Ok(bytes) => bytes.map(|mut bytes| {
            bytes.truncate(REFUSAL_BYTES);
            String::from_utf8_lossy(&bytes).trim_end().to_owned()
        }),
        Err(error) => Some(format!("{}: cannot read why the record was refused: {error}", path.display())),
    }
}

/// The VM that a refusal is about.
fn refused_vm(name: &str, reason: &str) -> Option<RejectedVm> {
    let (vm, _) = reason.strip_prefix(REFUSED_VM)?.split_once(": ")?;
    let (uuid, _) = name.rsplit_once('.')?;
    Some(RejectedVm { name: vm.into(), uuid: uuid.into(), owner: None })
}

/// What a feed reads of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectoryContent {
    /// Records.
    Records,
    /// Records, and why versions of them were refused.
    RecordsAndRefusals,
}

/// How long to gather changes after the first one, because editors replace a file in several steps.
const SETTLE: Duration = Duration::from_millis(50);

impl DirectoryContent {
    /// How long to gather changes after the first one. A program renames whole files into place, and anyone who ran it
    /// expects to see its record.
    pub(super) fn settle(self) -> Duration {
        match self {
            Self::Records => SETTLE,
            Self::RecordsAndRefusals => Duration::ZERO,
        }
    }

    /// The name of the record that a file is, or is about.
    pub(super) fn record(self, name: &str) -> Option<String> {
        match self {
            _ if is_record(name) => Some(name.to_owned()),
            Self::Records => None,
            Self::RecordsAndRefusals => refused(name),
        }
    }

    /// Reads a record, as [`load`] does, and why a version of it was refused.
    pub(super) fn load(self, dir: &Path, name: &str, limits: &RecordLimits) -> Option<LoadedFile> {
        let loaded = load(dir, name, limits);
        let reason = match self {
            Self::Records => None,
            Self::RecordsAndRefusals => refusal(dir, name),
        };
        let Some(reason) = reason else { return loaded };
        let mut hash = Sha256::new_with_prefix(&reason);
        let exists = loaded.is_some();
        let vm = refused_vm(name, &reason);
        let loaded = loaded.unwrap_or_else(|| LoadedFile {
            record: Err(FeedError::Vm { reason: reason.clone() }),
            open_files: Vec::new(),
            lacking: Vec::new(),
            sources: BTreeSet::new(),
            below: BTreeSet::new(),
            digest: Some(RecordDigest::default()),
            dangling: false,
            refusal: None,
            exists,
            vm: None,
        });
        let digest = loaded.digest.map(|digest| {
            hash.update(digest);
            hash.finalize().into()
        });
        Some(LoadedFile { digest, refusal: Some(reason), exists, vm: vm.or(loaded.vm.clone()), ..loaded })
    }
}

/// True for a record's name: `*.yaml`, `*.yml` or `*.json`, not hidden. Editors give their copies other extensions.
fn is_record(name: &str) -> bool {
    let ending = Path::new(name).extension().and_then(OsStr::to_str);
    !name.starts_with('.') && matches!(ending, Some("yaml" | "yml" | "json"))
}

/// Returns the names of the records in a directory.
///
/// # Errors
/// [`FeedError::Io`] if the directory cannot be read.
pub fn names(dir: &Path) -> Result<BTreeSet<String>, FeedError> {
    names_of(dir, DirectoryContent::Records)
}

/// Returns the names of the records in a directory, and of those that other files there are about.
pub(super) fn names_of(dir: &Path, content: DirectoryContent) -> Result<BTreeSet<String>, FeedError> {
    let unreadable = |error| io_error(dir, "a directory that can be read", error);
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        names.extend(entry.file_name().to_str().and_then(|name| content.record(name)));
    }
    Ok(names)
}

/// What may be named by one path.
const EITHER: &str = "a record, or a directory of records";

/// Returns the directory and its records' names; for a file, its directory and its own name.
///
/// # Errors
/// There is neither, the directory cannot be read, or the file's name is not UTF-8.
pub fn files(path: &Path) -> Result<(PathBuf, Vec<String>), FeedError> {
    let found = std::fs::metadata(path).map_err(|error| io_error(path, EITHER, error))?;
    if found.is_dir() {
        return Ok((path.to_owned(), names(path)?.into_iter().collect()));
    }
    if !found.is_file() {
        let error = io::Error::other("neither a regular file nor a directory");
        return Err(io_error(path, EITHER, error));
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        io_error(path, "a file name in UTF-8", io::Error::from(io::ErrorKind::InvalidFilename))
    })?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir.to_owned(), vec![name.to_owned()]))
}

/// Reads the record `name` in `dir` and its sources, within `limits`. Returns `None` if the file does not exist. A link
/// that leads nowhere is a record that cannot be used.
#[must_use]
pub fn load(dir: &Path, name: &str, limits: &RecordLimits) -> Option<LoadedFile> {
    let path = dir.join(name);
    let mut loaded = Loading {
        dir,
        open_files: Vec::new(),
        lacking: Vec::new(),
        sources: BTreeSet::new(),
        below: BTreeSet::new(),
        hash: Sha256::new(),
        whole: true,
        dangling: false,
        vm: None,
    };
    let record = match loaded.read(&path, limits.record_bytes) {
        // If the directory has gone, its records' state is unknown.
        Err(error) if error.kind() == io::ErrorKind::NotFound && dir.is_dir() => {
            let found = record_part::dangling(&path)?;
            (loaded.whole, loaded.dangling) = (false, true);
            Err(FeedError::Content {
                path: path.clone(),
                expected: "a file".into(),
                found,
                remedy: "put the file where the link leads, or remove the link; until then the VM has its last good record, or \
                         none",
            })
        }
        Err(error) => {
            loaded.whole = false;
            Err(io_error(&path, "a file that can be read", error))
        }
        Ok(bytes) => loaded.parse(&path, bytes, limits),
    };
    let digest = loaded.whole.then(|| loaded.hash.clone().finalize().into());
    let Loading { open_files, lacking, sources, below, dangling, vm, .. } = loaded;
    Some(LoadedFile {
        record,
        open_files,
        lacking,
        sources,
        below,
        digest,
        dangling,
        refusal: None,
        exists: true,
        vm,
    })
}

struct Loading<'a> {
    dir: &'a Path,
    open_files: Vec<(PathBuf, u32)>,
    lacking: Vec<String>,
    sources: BTreeSet<String>,
    below: BTreeSet<PathBuf>,
    hash: Sha256,
    whole: bool,
    dangling: bool,
    vm: Option<RejectedVm>,
}

impl Loading<'_> {
    /// Reads at most `limit + 1` bytes, so that the caller detects excess.
    fn read(&mut self, path: &Path, limit: usize) -> io::Result<Vec<u8>> {
        let (file, metadata) = record_part::open_regular(path)?;
        self.look_at(path, &metadata);
        let mut bytes = Vec::new();
        File::take(file, u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1))
            .read_to_end(&mut bytes)?;
        // The length goes first, so that different sequences of files have different hashes.
        self.hash.update(bytes.len().to_be_bytes());
        self.hash.update(&bytes);
        Ok(bytes)
    }

    fn look_at(&mut self, path: &Path, metadata: &Metadata) {
        let mode = metadata.permissions().mode() & 0o7777;
        if mode & TOO_OPEN != 0 {
            self.open_files.push((path.to_owned(), mode));
        }
    }

    fn parse(
        &mut self,
        path: &Path,
        bytes: Vec<u8>,
        limits: &RecordLimits,
    ) -> Result<(Record, Vec<Warning>), FeedError> {
        let text = String::from_utf8(bytes).map_err(|error| FeedError::Content {
            path: path.to_owned(),
            expected: "UTF-8 text".into(),
            found: format!("another byte at {}", error.utf8_error().valid_up_to()),
            remedy: "save it as UTF-8; put binary user-data into `base64` or a file named by `source`",
        })?;
        let name = path.to_string_lossy();
        let parsed = Record::parse_within(limits, &name, &text);
        // YAML is a superset of JSON.
        let document = || parser::yaml::<serde_json::Value>(&text).ok();
        self.vm = match &parsed {
            Ok((Record { vm, .. }, _)) => {
                Some(RejectedVm { name: vm.name.to_string(), uuid: vm.uuid.as_str().into(), owner: None })
            }
            Err(_) => document().and_then(|document| RejectedVm::described(&document)),
        };
        let (mut record, mut warnings) = parsed?;
        let cap = usize::try_from(record.serve.limits.user_data).unwrap_or(usize::MAX);
        for (field, payload) in record.payloads_mut() {
            let Some(payload) = payload else { continue };
            let Some(source) = payload.source().cloned() else { continue };
            let read = self.resolve(field, &source, cap);
            self.whole &= read.is_ok();
            payload.resolve(read?);
        }
        for credential in Credential::ALL {
            if let Err(problem) = self.credential(&mut record, credential) {
                let place = Record::locate(&name, &text, &credential.field());
                warnings.push(Warning {
                    place,
                    message: format!("{problem}; until then the VM gets no credential"),
                });
                self.lacking.push(problem);
            }
        }
        Ok((record, warnings))
    }

    /// Reads a credential. A missing one must not keep a VM from booting: the digest counts it as absent, and so
    /// changes once it exists.
    fn credential(&mut self, record: &mut Record, credential: Credential) -> Result<(), String> {
        let Some(source) = record.credentials.source(credential).cloned() else { return Ok(()) };
        match self.resolve("a credential", &source, CREDENTIAL_BYTES) {
            Ok(bytes) => record
                .credentials
                .resolve(credential, &bytes)
                .map_err(|error| format!("{}: {error}", self.dir.join(&source.file).display())),
            Err(error) => {
                self.hash.update(ABSENT);
                Err(error.to_string())
            }
        }
    }

    /// Reads a source. Links may not lead out of the directory, because a record must not give a guest other files of
    /// the node.
    fn resolve(&mut self, field: &str, source: &FileSource, cap: usize) -> Result<Bytes, FeedError> {
        let first = source.file.components().find_map(|part| match part {
            Component::Normal(name) => name.to_str().map(str::to_owned),
            _ => None,
        });
        self.sources.extend(first);
        let above = source.file.ancestors().skip(1).filter(|above| above.components().next().is_some());
        self.below.extend(above.map(Path::to_owned));
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
        let bytes = self.read(&real, cap).map_err(unreadable)?;
        if bytes.len() > cap {
            return Err(FeedError::Content {
                path,
                expected: format!("at most {cap} bytes of {field}"),
                found: "more".into(),
                remedy: "shrink it; for user-data gzip (cloud-init takes it) or serve.limits.user_data helps",
            });
        }
        Ok(bytes.into())
    }
}
