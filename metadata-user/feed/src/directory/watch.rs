//! Watches one directory, and its subdirectories that hold records' sources, by inotify(7).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};

use super::io as io_error;
use crate::FeedError;

/// Bytes of one read of events.
const BUFFER_BYTES: usize = 16 << 10;
/// Most names to gather. For more names, a scan of the whole directory costs less.
const MAX_NAMES: usize = 1_024;
/// Most events to take in a row before the feed handles them.
const MAX_EVENTS: usize = 4_096;
/// Most subdirectories to watch. The feed reads a source in any other only when its record changes.
const MAX_BELOW: usize = 4_096;
/// What the feed needs from the directory, for errors.
const WATCHED: &str = "a directory that can be watched";
/// The link that Kubernetes renames to change all files of a mounted Secret or ConfigMap at once.
const KUBERNETES_DATA: &str = "..data";

#[derive(Debug, Default)]
pub(crate) struct DirectoryChanges {
    /// Names that were written, renamed or deleted.
    pub(crate) names: BTreeSet<String>,
    /// Set if anything may have changed.
    pub(crate) all: bool,
    /// Set if the directory itself has gone.
    pub(crate) gone: bool,
}

impl DirectoryChanges {
    fn is_empty(&self) -> bool {
        !self.all && !self.gone && self.names.is_empty()
    }
}

pub(crate) struct DirectoryWatch {
    dir: PathBuf,
    events: EventStream<Vec<u8>>,
    root: WatchDescriptor,
    /// Watched subdirectories, relative to the directory.
    below: BTreeMap<PathBuf, WatchDescriptor>,
    /// The watched subdirectories by watch descriptor.
    by_watch: HashMap<WatchDescriptor, PathBuf>,
    /// The changes since the last report.
    gathered: DirectoryChanges,
}

impl DirectoryWatch {
    /// Starts watching. The caller opens the watch before it reads the directory, so that it misses no change.
    pub(crate) fn open(dir: &Path) -> Result<Self, FeedError> {
        let unwatched = |error| io_error(dir, WATCHED, error);
        let inotify = Inotify::init().map_err(unwatched)?;
        let root = inotify.watches().add(dir, mask()).map_err(unwatched)?;
        let events = inotify.into_event_stream(vec![0; BUFFER_BYTES]).map_err(unwatched)?;
        let (below, by_watch) = (BTreeMap::new(), HashMap::new());
        Ok(Self { dir: dir.to_owned(), events, root, below, by_watch, gathered: DirectoryChanges::default() })
    }

    /// Watches these subdirectories. Returns true if one is new, because its content may have changed before.
    ///
    /// Skips a directory that cannot be watched. Its files are unreadable too, and when it appears, its name changes in
    /// the directory above.
    pub(super) fn follow(&mut self, below: &BTreeSet<PathBuf>) -> bool {
        let mut new = false;
        for path in below {
            if self.below.contains_key(path) || self.below.len() >= MAX_BELOW {
                continue;
            }
            // Two paths of one directory share a watch, and the first path names its events.
            let added = self.events.watches().add(self.dir.join(path), mask()).ok();
            let added = added.filter(|watch| *watch != self.root && !self.by_watch.contains_key(watch));
            if let Some(watch) = added {
                self.by_watch.insert(watch.clone(), path.clone());
                self.below.insert(path.clone(), watch);
                new = true;
            }
        }
        new
    }

    /// Waits for a change, then gathers changes for `settle`. A cancelled wait loses none.
    pub(crate) async fn changed(&mut self, settle: Duration) -> Result<DirectoryChanges, FeedError> {
        while self.gathered.is_empty() {
            let event = self.events.next().await;
            self.take(event)?;
        }
        tokio::time::sleep(settle).await;
        for _ in 0..MAX_EVENTS {
            match self.events.next().now_or_never() {
                Some(event) => self.take(event)?,
                None => break,
            }
        }
        Ok(std::mem::take(&mut self.gathered))
    }

    fn take(&mut self, event: Option<io::Result<EventOwned>>) -> Result<(), FeedError> {
        let changes = &mut self.gathered;
        let event = event.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
        let event = event.map_err(|error| io_error(&self.dir, WATCHED, error))?;
        match self.by_watch.get(&event.wd) {
            Some(path) => {
                // After any event there, the feed reads again the records with a source there.
                let first = path.components().next().and_then(|part| part.as_os_str().to_str());
                changes.names.extend(first.map(str::to_owned));
                if event.mask.intersects(EventMask::IGNORED | EventMask::MOVE_SELF) {
                    self.forget(&event);
                }
            }
            None if event.wd == self.root || event.mask.contains(EventMask::Q_OVERFLOW) => {
                note(&self.dir, event.mask, event.name.as_deref(), changes);
            }
            None => {}
        }
        Ok(())
    }

    /// Forgets a subdirectory that was deleted or renamed.
    fn forget(&mut self, event: &EventOwned) {
        if let Some(path) = self.by_watch.remove(&event.wd) {
            self.below.remove(&path);
        }
        if !event.mask.contains(EventMask::IGNORED) {
            // Fails if the kernel has already removed the watch.
            self.events.watches().remove(event.wd.clone()).ok();
        }
    }
}

/// A change of mode or owner counts too: records hold secrets, and the feed warns of those that others may read.
fn mask() -> WatchMask {
    WatchMask::CLOSE_WRITE
        | WatchMask::ATTRIB
        | WatchMask::MOVED_TO
        | WatchMask::MOVED_FROM
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}

fn note(dir: &Path, mask: EventMask, name: Option<&OsStr>, changes: &mut DirectoryChanges) {
    if mask
        .intersects(EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT)
    {
        changes.gone = true;
    }
    if mask.contains(EventMask::Q_OVERFLOW) {
        changes.all = true;
    }
    let Some(name) = name.and_then(OsStr::to_str) else { return };
    let made = mask.contains(EventMask::CREATE) && !mask.contains(EventMask::ISDIR);
    if made && !is_complete(&dir.join(name)) {
        return;
    }
    changes.all |= name == KUBERNETES_DATA || changes.names.len() >= MAX_NAMES;
    changes.names.insert(name.to_owned());
}

/// True for what sends no other event once it is made: links, FIFOs and sockets. A file in creation is closed later.
fn is_complete(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| !metadata.is_file() || metadata.nlink() > 1)
}

#[cfg(test)]
mod tests {
    use super::{DirectoryChanges, DirectoryWatch, MAX_NAMES, note};
    use inotify::EventMask;
    use std::ffi::OsStr;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::time::Duration;

    fn noted(events: &[(EventMask, &str)]) -> DirectoryChanges {
        let mut changes = DirectoryChanges::default();
        for (mask, name) in events {
            let name = (!name.is_empty()).then(|| OsStr::new(*name));
            note(Path::new("/nonexistent"), *mask, name, &mut changes);
        }
        changes
    }

    #[test]
    fn after_a_queue_overflow_anything_may_have_changed() {
        assert!(noted(&[(EventMask::Q_OVERFLOW, "")]).all);
        assert!(!noted(&[(EventMask::CLOSE_WRITE, "a.yaml")]).all);
    }

    #[test]
    fn more_names_than_are_gathered_mean_the_whole_directory() {
        let names: Vec<String> = (0..=MAX_NAMES).map(|n| format!("{n}.yaml")).collect();
        let events: Vec<_> = names.iter().map(|name| (EventMask::MOVED_TO, name.as_str())).collect();
        assert!(!noted(&events[..MAX_NAMES]).all);
        assert!(noted(&events).all);
    }

    #[test]
    fn a_file_that_is_only_being_created_is_not_read_yet() {
        assert!(noted(&[(EventMask::CREATE, "a.yaml")]).names.is_empty());
    }

    #[tokio::test]
    async fn a_file_whose_mode_alone_changes_is_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a.yaml");
        fs::write(&file, "").expect("a file");
        let mut watch = DirectoryWatch::open(dir.path()).expect("a watch");
        fs::set_permissions(&file, Permissions::from_mode(0o666)).expect("a mode");
        let changed = watch.changed(Duration::ZERO);
        let changes = tokio::time::timeout(Duration::from_secs(20), changed).await.expect("an event");
        assert_eq!(changes.expect("changes").names, ["a.yaml".to_owned()].into());
    }

    #[test]
    fn every_kind_of_removal_of_a_directory_is_noticed() {
        let masks = [EventMask::DELETE_SELF, EventMask::MOVE_SELF, EventMask::UNMOUNT, EventMask::IGNORED];
        assert!(masks.iter().all(|mask| noted(&[(*mask, "")]).gone));
    }
}
