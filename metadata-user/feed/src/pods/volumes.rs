//! Reads volumes that kubelet has written: Secrets, ConfigMaps, and projected volumes such as tokens.
//!
//! ```text
//! <pods>/<uid>/volumes/kubernetes.io~secret/<volume>/
//!     ..2026_05_01_10_00_00.1/userdata      the content
//!     ..data -> ..2026_05_01_10_00_00.1     replaced by a rename, so that all keys change at once
//!     userdata -> ..data/userdata           the path that containers open
//! ```
//!
//! A read uses the one directory that `..data` names at its start, so that all keys have the same age. `openat2` (Linux
//! 5.6) makes the kernel refuse links out of the volume, and every link on the way to it.

use bytes::Bytes;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat2, readlinkat, statat};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::PodUid;
use super::launcher::is_volume;
use metadata_content::store::Interner;

/// Most keys of a volume.
pub const MAX_KEYS: usize = 256;
/// Most bytes of a key; Kubernetes gives a whole Secret or ConfigMap the same limit.
pub const KEY_BYTES: usize = 1 << 20;
/// Most bytes of a volume; a projected one joins several sources.
pub const VOLUME_BYTES: usize = 4 << 20;

/// Directories of the plugins that write volumes from the API, in the order of search. Volume names are unique within a
/// pod.
const PLUGINS: [&str; 3] = ["kubernetes.io~secret", "kubernetes.io~configmap", "kubernetes.io~projected"];
/// The link to the current content.
pub(super) const DATA: &str = "..data";
/// Most attempts to read a volume that changes during the read.
const ATTEMPTS: usize = 4;

/// The keys of a volume and their content.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct VolumeContent(BTreeMap<String, Bytes>);

impl VolumeContent {
    /// Bytes of all keys and of their names.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.0.iter().map(|(key, bytes)| key.len() + bytes.len()).sum()
    }

    /// Converts it to a plain map.
    #[must_use]
    pub fn into_map(self) -> BTreeMap<String, Bytes> {
        self.0
    }
}

impl Deref for VolumeContent {
    type Target = BTreeMap<String, Bytes>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl fmt::Debug for VolumeContent {
    /// Shows the lengths only, because the content may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(key, bytes)| (key, bytes.len()))).finish()
    }
}

/// The version of a volume's content: the directory that `..data` names. kubelet makes a new one for each change, and
/// never writes into one that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeVersion {
    target: String,
    device: u64,
    inode: u64,
    changed: (i64, u64),
}

/// The result of reading a volume.
#[derive(Debug)]
pub(crate) enum VolumeReading {
    /// kubelet has not written it yet.
    Absent,
    /// Its content is the version that the caller knows.
    Unchanged,
    /// Its content and its version.
    New(VolumeVersion, VolumeContent),
}

/// Why a volume cannot be read. No error repeats its content.
#[derive(Clone, Debug, thiserror::Error)]
pub enum VolumeError {
    /// The name is not a volume's name.
    #[error("expected a volume's name of lower-case letters, digits, hyphens and dots, found `{}`", found.escape_default())]
    Name {
        /// The name.
        found: String,
    },
    /// A link leads out of the volume, or is on the way to it.
    #[error(
        "{}: expected what kubelet writes, found a link that leads out of the volume; it is not followed: look who \
         made it",
        path.display()
    )]
    Outside {
        /// The path of the link.
        path: PathBuf,
    },
    /// A key is not a regular file.
    #[error("{}: expected a regular file, as kubelet writes for each key", path.display())]
    Kind {
        /// The path of the key.
        path: PathBuf,
    },
    /// The volume has too many keys.
    #[error("{}: expected at most {MAX_KEYS} keys, found more; put what the VM needs into a volume of its own", path.display())]
    Keys {
        /// The volume.
        path: PathBuf,
    },
    /// A key or the volume is too large.
    #[error("{}: expected at most {limit} bytes, found more; Kubernetes takes no larger Secret", path.display())]
    Bytes {
        /// The key or the volume.
        path: PathBuf,
        /// The limit in bytes.
        limit: usize,
    },
    /// The kernel refuses a call.
    #[error("{}: cannot read: {error}; it takes root or CAP_DAC_READ_SEARCH, and the kubelet's directory as it is on the node", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        error: Arc<io::Error>,
    },
}

/// The volumes of all pods. Equal contents share one copy while any user keeps it.
#[derive(Debug)]
pub struct Volumes {
    pods: PathBuf,
    contents: Mutex<Interner>,
}

impl Volumes {
    /// The volumes below kubelet's directory of pods, usually `/var/lib/kubelet/pods`.
    #[must_use]
    pub fn new(pods: impl Into<PathBuf>) -> Self {
        Self { pods: pods.into(), contents: Mutex::new(Interner::new()) }
    }

    /// Reads a pod's volume; `None` if kubelet has not written it yet.
    ///
    /// Blocks for a few file system calls; volumes are in memory (tmpfs) or on the node's disk.
    ///
    /// # Errors
    /// The name is invalid, a link leads out of the volume, a limit is exceeded, or the kernel refuses.
    pub fn read(&self, pod: &PodUid, volume: &str) -> Result<Option<VolumeContent>, VolumeError> {
        Ok(match self.read_new(pod, volume, VOLUME_BYTES, None)? {
            VolumeReading::New(_, files) => Some(self.share(files)),
            VolumeReading::Absent | VolumeReading::Unchanged => None,
        })
    }

    /// Reads a pod's volume of at most `most` bytes, unless its content is still the `known` version.
    ///
    /// # Errors
    /// Like [`read`](Self::read).
    pub(crate) fn read_new(
        &self,
        pod: &PodUid,
        volume: &str,
        most: usize,
        known: Option<&VolumeVersion>,
    ) -> Result<VolumeReading, VolumeError> {
        let mut outcome = Ok(VolumeReading::Absent);
        for _ in 0..ATTEMPTS {
            let Some((dir, path)) = open(&self.pods, pod, volume)? else { return Ok(VolumeReading::Absent) };
            outcome = read_volume(&dir, &path, most.min(VOLUME_BYTES), known);
            // kubelet replaced the content during the read, so the new content exists.
            if !matches!(&outcome, Err(VolumeError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound)
            {
                break;
            }
        }
        outcome
    }

    /// The same files, with the one copy of each content that all users share.
    pub(crate) fn share(&self, files: VolumeContent) -> VolumeContent {
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        VolumeContent(files.0.into_iter().map(|(key, bytes)| (key, contents.bytes(bytes))).collect())
    }

    /// Releases contents without users. [`read`](Self::read) does so too when the table has grown.
    pub fn sweep(&self) {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner).sweep();
    }
}

/// Opens a pod's volume, if it exists, and returns its path for messages. The path may lead elsewhere later.
pub(super) fn open(
    pods: &Path,
    pod: &PodUid,
    volume: &str,
) -> Result<Option<(OwnedFd, PathBuf)>, VolumeError> {
    if !is_volume(volume) {
        return Err(VolumeError::Name { found: volume.chars().take(64).collect() });
    }
    for plugin in PLUGINS {
        let below: PathBuf = [pod.as_str(), "volumes", plugin, volume].iter().collect();
        if let Some(dir) = directory(pods, &below)? {
            return Ok(Some((dir, pods.join(below))));
        }
    }
    Ok(None)
}

/// Opens a directory below kubelet's without following links; `None` if it does not exist.
pub(super) fn directory(pods: &Path, below: &Path) -> Result<Option<OwnedFd>, VolumeError> {
    let root = match File::open(pods) {
        Ok(root) => root,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(VolumeError::Io { path: pods.into(), error: error.into() }),
    };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match open_beneath(&root, below, OFlags::DIRECTORY, resolve) {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(refusal(pods.join(below), errno)),
    }
}

/// Opens for reading without blocking. The kernel asks for another attempt if a rename interferes.
fn open_beneath(dir: impl AsFd, path: &Path, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    for _ in 1..ATTEMPTS {
        match openat2(&dir, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            outcome => return outcome,
        }
    }
    openat2(&dir, path, flags, Mode::empty(), resolve)
}

fn refusal(path: PathBuf, errno: Errno) -> VolumeError {
    match errno {
        Errno::XDEV | Errno::LOOP => VolumeError::Outside { path },
        errno => VolumeError::Io { path, error: Arc::new(errno.into()) },
    }
}

/// True once kubelet has written a volume for the first time.
pub(super) fn is_written(volume: impl AsFd) -> bool {
    statat(volume, DATA, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn read_volume(
    volume: &OwnedFd,
    path: &Path,
    most: usize,
    known: Option<&VolumeVersion>,
) -> Result<VolumeReading, VolumeError> {
    let in_force = match readlinkat(volume, DATA, Vec::new()) {
        Ok(name) => name,
        Err(Errno::NOENT) => return Ok(VolumeReading::Absent),
        Err(Errno::INVAL) => return Err(VolumeError::Kind { path: path.join(DATA) }),
        Err(errno) => return Err(refusal(path.join(DATA), errno)),
    };
    let in_force = in_force.to_str().ok().filter(|name| !name.contains('/') && *name != "..");
    let in_force = in_force.ok_or_else(|| VolumeError::Outside { path: path.join(DATA) })?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let open = |below: &Path, flags| {
        open_beneath(volume, below, flags, resolve).map_err(|errno| refusal(path.join(below), errno))
    };
    let list = open(Path::new(in_force), OFlags::DIRECTORY)?;
    let listed = |errno: Errno| refusal(path.join(in_force), errno);
    let found = fstat(&list).map_err(listed)?;
    let version = VolumeVersion {
        target: in_force.to_owned(),
        device: found.st_dev,
        inode: found.st_ino,
        changed: (found.st_ctime, found.st_ctime_nsec),
    };
    if known == Some(&version) {
        return Ok(VolumeReading::Unchanged);
    }
    let mut files = BTreeMap::new();
    let mut bytes = 0;
    for entry in Dir::new(list).map_err(listed)? {
        let entry = entry.map_err(listed)?;
        let Ok(key) = entry.file_name().to_str() else { continue };
        // kubelet's own entries start with `..`, and no key of a Secret is a directory.
        if key == "." || key.starts_with("..") || entry.file_type() == FileType::Directory {
            continue;
        }
        if files.len() >= MAX_KEYS {
            return Err(VolumeError::Keys { path: path.into() });
        }
        let below = Path::new(in_force).join(key);
        // One byte more than is left shows that the volume is too large.
        let contents = read_key(open(&below, OFlags::empty())?, &path.join(&below), most - bytes)?;
        bytes += contents.len();
        if bytes > most {
            return Err(VolumeError::Bytes { path: path.into(), limit: most });
        }
        files.insert(key.to_owned(), contents);
    }
    Ok(VolumeReading::New(version, VolumeContent(files)))
}

/// Reads a key, but at most `left + 1` of its bytes.
fn read_key(key: OwnedFd, path: &Path, left: usize) -> Result<Bytes, VolumeError> {
    let found = fstat(&key).map_err(|errno| refusal(path.into(), errno))?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => {}
        _ => return Err(VolumeError::Kind { path: path.into() }),
    }
    let mut bytes = Vec::new();
    let most = KEY_BYTES.min(left);
    let read = File::from(key).take(most as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| VolumeError::Io { path: path.into(), error: error.into() })?;
    if bytes.len() > KEY_BYTES {
        return Err(VolumeError::Bytes { path: path.into(), limit: KEY_BYTES });
    }
    Ok(bytes.into())
}

#[cfg(test)]
mod tests;
