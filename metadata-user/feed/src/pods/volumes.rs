//! Volumes as kubelet has written them: Secrets, ConfigMaps, and projected ones such as tokens.
//!
//! ```text
//! <pods>/<uid>/volumes/kubernetes.io~secret/<volume>/
//!     ..2026_05_01_10_00_00.1/userdata      what there is
//!     ..data -> ..2026_05_01_10_00_00.1     renamed over the old one when all of it changes at once
//!     userdata -> ..data/userdata           what containers open
//! ```
//!
//! A volume is read from the one directory that `..data` named at the beginning, so that no two keys are of
//! different times. The kernel is told to follow no link out of the volume (`openat2`, Linux 5.6), and none at all on
//! the way to it.

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
use super::uid::is_volume;
use metadata_content::store::Interner;

/// Keys of a volume at most.
pub const MAX_KEYS: usize = 256;
/// Octets of one key at most: what Kubernetes lets a whole Secret or ConfigMap have.
pub const KEY_OCTETS: usize = 1 << 20;
/// Octets of a volume at most; a projected one joins several sources.
pub const VOLUME_OCTETS: usize = 4 << 20;

/// Directories of the plugins that write volumes from the API, tried in this order. No two volumes of a pod have
/// one name.
const PLUGINS: [&str; 3] = ["kubernetes.io~secret", "kubernetes.io~configmap", "kubernetes.io~projected"];
/// The link to what is in force.
pub(super) const DATA: &str = "..data";
/// How often a volume that changes while it is read is begun anew.
const ATTEMPTS: usize = 4;

/// The keys of a volume and what they hold.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Files(BTreeMap<String, Bytes>);

impl Files {
    /// The same as a plain map.
    #[must_use]
    pub fn into_map(self) -> BTreeMap<String, Bytes> {
        self.0
    }
}

impl Deref for Files {
    type Target = BTreeMap<String, Bytes>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl fmt::Debug for Files {
    /// How long each is: they are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(key, octets)| (key, octets.len()))).finish()
    }
}

/// Why a volume cannot be read. What it holds is never part of it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum VolumeError {
    /// No volume can be called so.
    #[error("expected a volume's name of lower-case letters, digits, hyphens and dots, found `{}`", found.escape_default())]
    Name {
        /// What came.
        found: String,
    },
    /// A link leads out of the volume, or there is one on the way to it.
    #[error(
        "{}: expected what kubelet writes, found a link that leads out of the volume; it is not followed: look who \
         made it",
        path.display()
    )]
    Outside {
        /// What was being opened.
        path: PathBuf,
    },
    /// A key is something else than a file.
    #[error("{}: expected a regular file, as kubelet writes for each key", path.display())]
    Kind {
        /// Which.
        path: PathBuf,
    },
    /// There are too many keys.
    #[error("{}: expected at most {MAX_KEYS} keys, found more; put what the VM needs into a volume of its own", path.display())]
    Keys {
        /// The volume.
        path: PathBuf,
    },
    /// There is too much of it.
    #[error("{}: expected at most {limit} octets, found more; Kubernetes takes no larger Secret", path.display())]
    Octets {
        /// The key or the volume.
        path: PathBuf,
        /// What it may hold.
        limit: usize,
    },
    /// The kernel refuses.
    #[error("{}: cannot read: {error}; it takes root or CAP_DAC_READ_SEARCH, and the kubelet's directory as it is on the node", path.display())]
    Io {
        /// What was being read.
        path: PathBuf,
        /// What it said.
        error: Arc<io::Error>,
    },
}

/// The volumes of all pods. What several of them hold alike is held once while anybody keeps it.
#[derive(Debug)]
pub struct Volumes {
    pods: PathBuf,
    contents: Mutex<Interner>,
}

impl Volumes {
    /// Those below the directory of kubelet's pods, usually `/var/lib/kubelet/pods`.
    #[must_use]
    pub fn new(pods: impl Into<PathBuf>) -> Self {
        Self { pods: pods.into(), contents: Mutex::new(Interner::new()) }
    }

    /// What a pod's volume holds now; `None` when kubelet has not written it yet.
    ///
    /// Blocks for some file system calls; volumes are in memory (tmpfs) or on the node's disk.
    ///
    /// # Errors
    /// A name that is none, a link out of the volume, a limit, or what the kernel says.
    pub fn read(&self, pod: &PodUid, volume: &str) -> Result<Option<Files>, VolumeError> {
        let mut outcome = Ok(None);
        for _ in 0..ATTEMPTS {
            let Some((dir, path)) = open(&self.pods, pod, volume)? else { return Ok(None) };
            outcome = read_volume(&dir, &path);
            // Replaced meanwhile: what it has been replaced by is there.
            if !matches!(&outcome, Err(VolumeError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound)
            {
                break;
            }
        }
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        let share = |files: Files| {
            Files(files.0.into_iter().map(|(key, octets)| (key, contents.octets(octets))).collect())
        };
        outcome.map(|files| files.map(share))
    }

    /// Lets go of contents that nobody keeps; it happens by itself, too, as they grow.
    pub fn sweep(&self) {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner).sweep();
    }
}

/// A pod's volume and its path, if it is there. The path is for people: what it leads to may change.
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

/// A directory below kubelet's, reached by no link; `None` when there is none.
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

/// Opens to read, never waiting. The kernel asks for another try when something on the way is renamed.
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

/// True when kubelet has written a volume's first contents.
pub(super) fn is_written(volume: impl AsFd) -> bool {
    statat(volume, DATA, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn read_volume(volume: &OwnedFd, path: &Path) -> Result<Option<Files>, VolumeError> {
    let in_force = match readlinkat(volume, DATA, Vec::new()) {
        Ok(name) => name,
        Err(Errno::NOENT) => return Ok(None),
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
    let mut files = BTreeMap::new();
    let mut octets = 0;
    for entry in Dir::new(list).map_err(listed)? {
        let entry = entry.map_err(listed)?;
        let Ok(key) = entry.file_name().to_str() else { continue };
        // What begins so is kubelet's own, and a directory holds what no key of a Secret can name.
        if key == "." || key.starts_with("..") || entry.file_type() == FileType::Directory {
            continue;
        }
        if files.len() >= MAX_KEYS {
            return Err(VolumeError::Keys { path: path.into() });
        }
        let below = Path::new(in_force).join(key);
        let contents = read_key(open(&below, OFlags::empty())?, &path.join(&below))?;
        octets += contents.len();
        if octets > VOLUME_OCTETS {
            return Err(VolumeError::Octets { path: path.into(), limit: VOLUME_OCTETS });
        }
        files.insert(key.to_owned(), contents);
    }
    Ok(Some(Files(files)))
}

fn read_key(key: OwnedFd, path: &Path) -> Result<Bytes, VolumeError> {
    let found = fstat(&key).map_err(|errno| refusal(path.into(), errno))?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => {}
        _ => return Err(VolumeError::Kind { path: path.into() }),
    }
    let mut octets = Vec::new();
    let read = File::from(key).take(KEY_OCTETS as u64 + 1).read_to_end(&mut octets);
    read.map_err(|error| VolumeError::Io { path: path.into(), error: error.into() })?;
    if octets.len() > KEY_OCTETS {
        return Err(VolumeError::Octets { path: path.into(), limit: KEY_OCTETS });
    }
    Ok(octets.into())
}

#[cfg(test)]
mod tests;
