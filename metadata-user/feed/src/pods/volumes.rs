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
use futures_util::StreamExt as _;
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};
use metadata_content::store::Interner;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat2, readlinkat, statat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, io};
use tokio::sync::Notify;

use super::{PodEvent, PodUid, Sender, is_volume};

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
        "{}: expected what kubelet writes, found a link that leads out of the volume; it is not followed: find \
         out what made it",
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
    #[error("{}: cannot read: {error}; this needs root or CAP_DAC_READ_SEARCH, and the kubelet's directory as it is on the node", path.display())]
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

// Reports when kubelet writes volumes: watches each by inotify(7) for the rename of `..data`.
//
// One inotify instance serves all pods, because a user may have 128 instances but thousands of watches.

/// Bytes of one read of events.
const BUFFER_BYTES: usize = 16 << 10;
/// How often to look for volumes that kubelet has not written yet.
const AGAIN: Duration = Duration::from_secs(1);

/// The volumes to watch, shared with [`super::Pods`].
#[derive(Clone, Debug, Default)]
pub(super) struct WatchedVolumes(Arc<Board>);

#[derive(Debug, Default)]
struct Board {
    list: Mutex<List>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct List {
    volumes: BTreeMap<PodUid, BTreeSet<String>>,
    /// Pods with a changed set of volumes.
    changed: BTreeSet<PodUid>,
}

impl WatchedVolumes {
    /// Sets the volumes to watch of a pod.
    pub(super) fn set(&self, pod: &PodUid, volumes: BTreeSet<String>) {
        let mut list = self.0.list.lock().unwrap_or_else(PoisonError::into_inner);
        if volumes.is_empty() {
            list.volumes.remove(pod);
        } else {
            list.volumes.insert(pod.clone(), volumes);
        }
        list.changed.insert(pod.clone());
        self.0.changed.notify_one();
    }

    /// The next pod with a changed set of volumes, and the set.
    fn next(&self) -> Option<(PodUid, BTreeSet<String>)> {
        let mut list = self.0.list.lock().unwrap_or_else(PoisonError::into_inner);
        let pod = list.changed.pop_first()?;
        let volumes = list.volumes.get(&pod).cloned().unwrap_or_default();
        Some((pod, volumes))
    }
}

/// A pod's volume.
type Key = (PodUid, String);

/// The state of a volume.
#[derive(Default)]
struct Volume {
    watch: Option<WatchDescriptor>,
    /// Set once its first content was reported.
    told: bool,
    /// Set once its trouble was reported.
    complained: bool,
}

/// Watches volumes until the receiver is dropped.
pub(super) struct VolumeWatch {
    pods: PathBuf,
    wanted: WatchedVolumes,
    tell: Sender,
    events: EventStream<Vec<u8>>,
    volumes: BTreeMap<Key, Volume>,
    by_watch: HashMap<WatchDescriptor, Key>,
    /// Volumes to look for again.
    missing: BTreeSet<Key>,
}

/// The receiver of events was dropped.
struct ReceiverDropped;

impl VolumeWatch {
    pub(super) fn new(pods: PathBuf, wanted: WatchedVolumes, tell: Sender) -> io::Result<Self> {
        let events = Inotify::init()?.into_event_stream(vec![0; BUFFER_BYTES])?;
        let (volumes, by_watch, missing) = (BTreeMap::new(), HashMap::new(), BTreeSet::new());
        Ok(Self { pods, wanted, tell, events, volumes, by_watch, missing })
    }

    pub(super) async fn run(mut self) {
        let mut again = tokio::time::interval(AGAIN);
        again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let wanted = Arc::clone(&self.wanted.0);
            let done = tokio::select! {
                () = wanted.changed.notified() => self.follow().await,
                Some(event) = self.events.next() => self.take(event).await,
                _ = again.tick(), if !self.missing.is_empty() => {
                    let missing = std::mem::take(&mut self.missing);
                    self.look_for(missing).await
                }
                () = self.tell.closed() => Err(ReceiverDropped),
            };
            if done.is_err() {
                return;
            }
        }
    }

    /// Starts and ends watches until they match the wanted volumes.
    async fn follow(&mut self) -> Result<(), ReceiverDropped> {
        while let Some((pod, wanted)) = self.wanted.next() {
            let first = (pod.clone(), String::new());
            let known = self.volumes.range(first..).take_while(|((of, _), _)| *of == pod);
            let known: BTreeSet<String> = known.map(|((_, volume), _)| volume.clone()).collect();
            for volume in known.difference(&wanted) {
                self.drop_volume(&(pod.clone(), volume.clone()));
            }
            let new: BTreeSet<Key> =
                wanted.difference(&known).map(|volume| (pod.clone(), volume.clone())).collect();
            for key in &new {
                self.volumes.insert(key.clone(), Volume::default());
            }
            self.look_for(new).await?;
        }
        Ok(())
    }

    async fn look_for(&mut self, keys: BTreeSet<Key>) -> Result<(), ReceiverDropped> {
        for key in keys {
            if self.is_there(&key) {
                self.say(&key).await?;
            }
        }
        Ok(())
    }

    /// Watches a volume. Returns true if it has content that was not reported yet.
    fn is_there(&mut self, key: &Key) -> bool {
        let Some(known) = self.volumes.get_mut(key) else { return false };
        let (pod, volume) = key;
        let trouble = match open(&self.pods, pod, volume) {
            Ok(None) => None,
            Ok(Some((dir, _))) => {
                // Watch the opened directory, even if its path now leads to another.
                let path = format!("/proc/self/fd/{}", dir.as_raw_fd());
                let added = self.events.watches().add(&path, mask());
                // Watch first, so that a write in between causes an event.
                let written = is_written(&dir);
                match added {
                    Ok(watch) => {
                        if known.watch.as_ref() != Some(&watch) {
                            // Another directory was mounted over it.
                            let before = known.watch.replace(watch.clone());
                            before.and_then(|before| self.by_watch.remove(&before));
                            self.by_watch.insert(watch, key.clone());
                        }
                        if !written {
                            self.missing.insert(key.clone());
                        }
                        return written && !std::mem::replace(&mut known.told, true);
                    }
                    Err(error) if written => {
                        let why = "its changes go unnoticed: raise `fs.inotify.max_user_watches`";
                        if !std::mem::replace(&mut known.complained, true) {
                            tracing::warn!(%pod, volume, %error, "cannot watch the volume; {why}");
                        }
                        self.missing.insert(key.clone());
                        return !std::mem::replace(&mut known.told, true);
                    }
                    Err(_) => None,
                }
            }
            Err(error) => Some(error),
        };
        if let Some(error) = trouble
            && !std::mem::replace(&mut known.complained, true)
        {
            tracing::warn!(%pod, "{error}");
        }
        self.missing.insert(key.clone());
        false
    }

    fn drop_volume(&mut self, key: &Key) {
        self.missing.remove(key);
        let watch = self.volumes.remove(key).and_then(|volume| volume.watch);
        if let Some(watch) = watch {
            self.by_watch.remove(&watch);
            // Fails if the directory is gone, and its watch with it.
            _ = self.events.watches().remove(watch);
        }
    }

    async fn take(&mut self, event: io::Result<EventOwned>) -> Result<(), ReceiverDropped> {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::warn!(%error, "cannot read changes of volumes");
                tokio::time::sleep(AGAIN).await;
                return Ok(());
            }
        };
        if event.mask.contains(EventMask::Q_OVERFLOW) {
            return self.say_all().await;
        }
        let Some(key) = self.by_watch.get(&event.wd).cloned() else { return Ok(()) };
        let gone = EventMask::IGNORED | EventMask::UNMOUNT | EventMask::DELETE_SELF | EventMask::MOVE_SELF;
        if event.mask.intersects(gone) {
            self.by_watch.remove(&event.wd);
            let volume = self.volumes.entry(key.clone()).or_default();
            (volume.watch, volume.told) = (None, false);
            self.missing.insert(key);
            return Ok(());
        }
        if event.name.as_deref() != Some(OsStr::new(DATA)) {
            return Ok(());
        }
        self.missing.remove(&key);
        self.volumes.entry(key.clone()).or_default().told = true;
        self.say(&key).await
    }

    /// Events were lost, so every volume may have changed.
    async fn say_all(&mut self) -> Result<(), ReceiverDropped> {
        let told = self.volumes.iter().filter(|(_, volume)| volume.told).map(|(key, _)| key.clone());
        for key in told.collect::<Vec<_>>() {
            self.say(&key).await?;
        }
        Ok(())
    }

    async fn say(&self, (pod, volume): &Key) -> Result<(), ReceiverDropped> {
        let event = PodEvent::Files { volume: volume.clone() };
        self.tell.send((pod.clone(), event)).await.map_err(|_| ReceiverDropped)
    }
}

fn mask() -> WatchMask {
    WatchMask::MOVED_TO
        | WatchMask::CREATE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}

#[cfg(test)]
mod tests {
    use super::{KEY_BYTES, MAX_KEYS, PLUGINS, VOLUME_BYTES, VolumeError, Volumes};
    use crate::pods::PodUid;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    /// A directory of pods, and one volume in it.
    struct Kubelet {
        room: tempfile::TempDir,
        uid: PodUid,
        times: usize,
    }

    impl Kubelet {
        fn new() -> Self {
            let uid = "6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11".parse().expect("a uid");
            Self { room: tempfile::tempdir().expect("a directory"), uid, times: 0 }
        }

        fn volume(&self, plugin: &str) -> PathBuf {
            self.room.path().join(self.uid.as_str()).join("volumes").join(plugin).join("data")
        }

        /// A directory of new contents, not in force yet.
        fn prepare(&mut self, plugin: &str, keys: &[(&str, &[u8])]) -> String {
            self.times += 1;
            let name = format!("..2026_05_01.{}", self.times);
            let dir = self.volume(plugin).join(&name);
            fs::create_dir_all(&dir).expect("a directory");
            for (key, bytes) in keys {
                fs::write(dir.join(key), bytes).expect("written");
            }
            name
        }

        fn write(&mut self, plugin: &str, keys: &[(&str, &[u8])]) {
            let name = self.prepare(plugin, keys);
            let volume = self.volume(plugin);
            symlink(&name, volume.join("..data_tmp")).expect("a link");
            fs::rename(volume.join("..data_tmp"), volume.join("..data")).expect("renamed");
        }

        fn volumes(&self) -> Volumes {
            Volumes::new(self.room.path())
        }

        fn keys(&self) -> Vec<(String, Vec<u8>)> {
            let files = self.volumes().read(&self.uid, "data").expect("readable").expect("there");
            files.iter().map(|(key, bytes)| (key.clone(), bytes.to_vec())).collect()
        }

        fn error(&self) -> VolumeError {
            self.volumes().read(&self.uid, "data").expect_err("refused")
        }
    }

    #[test]
    fn a_volume_of_every_kind_is_read_key_by_key() {
        for plugin in PLUGINS {
            let mut kubelet = Kubelet::new();
            kubelet.write(plugin, &[("userdata", b"#cloud-config"), ("networkdata", b"")]);
            fs::write(kubelet.volume(plugin).join("..data").join("..hidden"), "x").expect("written");
            fs::create_dir(kubelet.volume(plugin).join("..data").join("below")).expect("made");
            let expected = [
                ("networkdata".to_owned(), b"".to_vec()),
                ("userdata".to_owned(), b"#cloud-config".to_vec()),
            ];
            assert_eq!(kubelet.keys(), expected, "{plugin}");
        }
    }

    #[test]
    fn a_volume_that_kubelet_has_not_written_is_not_there_yet() {
        let mut kubelet = Kubelet::new();
        let read = |kubelet: &Kubelet| kubelet.volumes().read(&kubelet.uid, "data").expect("no error");
        assert_eq!(read(&kubelet), None, "no pod");
        kubelet.prepare(PLUGINS[0], &[("userdata", b"x")]);
        assert_eq!(read(&kubelet), None, "nothing in force");
        kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
        assert!(read(&kubelet).is_some_and(|files| files.contains_key("userdata")));
        let nowhere = Volumes::new(kubelet.room.path().join("nowhere"));
        assert_eq!(nowhere.read(&kubelet.uid, "data").expect("no error"), None);
    }

    #[test]
    fn a_replaced_volume_is_replaced_as_a_whole() {
        let mut kubelet = Kubelet::new();
        kubelet.write(PLUGINS[0], &[("a", b"1"), ("b", b"1")]);
        kubelet.write(PLUGINS[0], &[("b", b"2"), ("c", b"2")]);
        assert_eq!(kubelet.keys(), [("b".to_owned(), b"2".to_vec()), ("c".to_owned(), b"2".to_vec())]);
    }

    #[test]
    fn no_link_leads_out_of_a_volume() {
        let secret = tempfile::tempdir().expect("a directory");
        fs::write(secret.path().join("shadow"), "somebody else's").expect("written");
        let outside = secret.path().join("shadow");
        let in_force = |kubelet: &Kubelet| kubelet.volume(PLUGINS[0]).join("..data");

        let refused = |what: &str, spoil: &dyn Fn(&Kubelet)| {
            let mut kubelet = Kubelet::new();
            kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
            spoil(&kubelet);
            let error = kubelet.error();
            assert!(matches!(error, VolumeError::Outside { .. }), "{what}: {error}");
        };
        refused("a key by an absolute link", &|kubelet| {
            symlink(&outside, in_force(kubelet).join("stolen")).expect("a link");
        });
        refused("a key by dots", &|kubelet| {
            symlink("../../../../../../../etc/passwd", in_force(kubelet).join("stolen")).expect("a link");
        });
        refused("a key by a magic link", &|kubelet| {
            symlink("/proc/self/environ", in_force(kubelet).join("stolen")).expect("a link");
        });
        for target in [secret.path().to_str().expect("text"), "../data", ".."] {
            refused(target, &|kubelet| {
                fs::remove_file(in_force(kubelet)).expect("removed");
                symlink(target, in_force(kubelet)).expect("a link");
            });
        }
        refused("the volume itself", &|kubelet| {
            let volume = kubelet.volume(PLUGINS[0]);
            fs::remove_dir_all(&volume).expect("removed");
            symlink(secret.path(), &volume).expect("a link");
        });
        refused("the pod's directory", &|kubelet| {
            let pod = kubelet.room.path().join(kubelet.uid.as_str());
            fs::rename(&pod, secret.path().join(format!("pod-{}", fastrand::u64(..)))).expect("moved");
            symlink(secret.path(), &pod).expect("a link");
        });
    }

    #[test]
    fn links_inside_a_volume_are_followed() {
        let mut kubelet = Kubelet::new();
        kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
        symlink("userdata", kubelet.volume(PLUGINS[0]).join("..data").join("alias")).expect("a link");
        assert_eq!(
            kubelet.keys(),
            [("alias".to_owned(), b"x".to_vec()), ("userdata".to_owned(), b"x".to_vec())]
        );
    }

    #[test]
    fn a_key_that_is_not_a_file_is_refused_without_blocking() {
        let mut kubelet = Kubelet::new();
        kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
        let pipe = kubelet.volume(PLUGINS[0]).join("..data").join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("a pipe");
        let error = kubelet.error();
        assert!(matches!(error, VolumeError::Kind { .. }), "{error}");
    }

    #[test]
    fn each_limit_is_refused_one_beyond_it() {
        let keys: Vec<String> = (0..=MAX_KEYS).map(|n| format!("k{n}")).collect();
        let few = |n: usize| keys[..n].iter().map(|key| (key.as_str(), b"".as_slice())).collect::<Vec<_>>();
        let bytes = vec![b'x'; KEY_BYTES + 1];
        let whole = |n: usize| keys[..n].iter().map(|key| (key.as_str(), &bytes[1..])).collect::<Vec<_>>();
        let full = VOLUME_BYTES / KEY_BYTES;
        for (fits, beyond) in [
            (few(MAX_KEYS), few(MAX_KEYS + 1)),
            (vec![("a", &bytes[1..])], vec![("a", &bytes[..])]),
            (whole(full), [whole(full), vec![("one-more", b"x")]].concat()),
        ] {
            let mut kubelet = Kubelet::new();
            kubelet.write(PLUGINS[0], &fits);
            assert_eq!(kubelet.keys().len(), fits.len());
            kubelet.write(PLUGINS[0], &beyond);
            let error = kubelet.error();
            assert!(matches!(error, VolumeError::Keys { .. } | VolumeError::Bytes { .. }), "{error}");
        }
    }

    #[test]
    fn invalid_names_are_refused_before_any_access() {
        let kubelet = Kubelet::new();
        for name in ["", "..", "../data", "a/b", "A"] {
            let error = kubelet.volumes().read(&kubelet.uid, name).expect_err(name);
            assert!(matches!(error, VolumeError::Name { .. }), "{error}");
        }
    }

    #[test]
    fn equal_secrets_of_many_pods_share_one_copy() {
        let room = tempfile::tempdir().expect("a directory");
        let volumes = Volumes::new(room.path());
        let secret = vec![b's'; 64 << 10];
        let mut held = Vec::new();
        for n in 0..200 {
            let uid: PodUid = format!("pod-{n}").parse().expect("a uid");
            let volume = room.path().join(uid.as_str()).join("volumes").join(PLUGINS[0]).join("data");
            fs::create_dir_all(volume.join("..1")).expect("a directory");
            fs::write(volume.join("..1").join("userdata"), &secret).expect("written");
            symlink("..1", volume.join("..data")).expect("a link");
            held.push(volumes.read(&uid, "data").expect("readable").expect("there"));
        }
        let places: std::collections::BTreeSet<_> =
            held.iter().map(|files| files["userdata"].as_ptr()).collect();
        assert_eq!(places.len(), 1, "200 pods hold one copy");
        volumes.sweep();
        assert_eq!(volumes.contents.lock().expect("not poisoned").len(), 1);
        drop(held);
        volumes.sweep();
        assert!(volumes.contents.lock().expect("not poisoned").is_empty());
    }

    #[test]
    fn the_debug_form_of_a_volume_omits_its_content() {
        let mut kubelet = Kubelet::new();
        kubelet.write(PLUGINS[0], &[("password", b"hunter2")]);
        let files = kubelet.volumes().read(&kubelet.uid, "data").expect("readable").expect("there");
        assert_eq!(format!("{files:?}"), r#"{"password": 7}"#);
    }
}
