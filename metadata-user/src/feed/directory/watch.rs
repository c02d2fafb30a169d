//! inotify(7) on one directory.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};

use super::io as io_error;
use crate::feed::FeedError;

/// Octets of events read at once.
const BUFFER_OCTETS: usize = 16 << 10;
/// Names gathered before it is cheaper to look at the whole directory.
const MAX_NAMES: usize = 1_024;
/// Events taken in a row before what was gathered is handled.
const MAX_EVENTS: usize = 4_096;
/// What the feed wants of the directory.
const WATCHED: &str = "a directory that can be watched";
/// What Kubernetes renames when it changes all files of a mounted Secret or ConfigMap at once.
const KUBERNETES_DATA: &str = "..data";

/// What has happened to a directory.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Names that were written, renamed or deleted.
    pub(super) names: BTreeSet<String>,
    /// Anything may have changed.
    pub(super) all: bool,
    /// The directory itself has gone.
    pub(super) gone: bool,
}

pub(super) struct Watch {
    dir: PathBuf,
    events: EventStream<Vec<u8>>,
}

impl Watch {
    /// Starts watching. Open the watch before reading the directory, and nothing is missed between.
    pub(super) fn open(dir: &Path) -> Result<Self, FeedError> {
        let unwatched = |error| io_error(dir, WATCHED, error);
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let inotify = Inotify::init().map_err(unwatched)?;
        inotify.watches().add(dir, mask).map_err(unwatched)?;
        let events = inotify.into_event_stream(vec![0; BUFFER_OCTETS]).map_err(unwatched)?;
        Ok(Self { dir: dir.to_owned(), events })
    }

    /// Waits for changes, and after the first one for `settle` longer.
    pub(super) async fn changed(&mut self, settle: Duration) -> Result<Changes, FeedError> {
        let mut changes = Changes::default();
        while !(changes.all || changes.gone || !changes.names.is_empty()) {
            let event = self.events.next().await;
            self.take(event, &mut changes)?;
        }
        tokio::time::sleep(settle).await;
        for _ in 0..MAX_EVENTS {
            match self.events.next().now_or_never() {
                Some(event) => self.take(event, &mut changes)?,
                None => break,
            }
        }
        Ok(changes)
    }

    fn take(&self, event: Option<io::Result<EventOwned>>, changes: &mut Changes) -> Result<(), FeedError> {
        let event = event.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
        let event = event.map_err(|error| io_error(&self.dir, WATCHED, error))?;
        note(&self.dir, event.mask, event.name.as_deref(), changes);
        Ok(())
    }
}

fn note(dir: &Path, mask: EventMask, name: Option<&OsStr>, changes: &mut Changes) {
    if mask
        .intersects(EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT)
    {
        changes.gone = true;
    }
    if mask.contains(EventMask::Q_OVERFLOW) {
        changes.all = true;
    }
    let Some(name) = name.and_then(OsStr::to_str) else { return };
    // A file that is just being written says so again when it is closed; links never do.
    if mask.contains(EventMask::CREATE) && !is_link(&dir.join(name)) {
        return;
    }
    changes.all |= name == KUBERNETES_DATA || changes.names.len() >= MAX_NAMES;
    changes.names.insert(name.to_owned());
}

fn is_link(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
}

#[cfg(test)]
mod tests {
    use super::{Changes, MAX_NAMES, note};
    use inotify::EventMask;
    use std::ffi::OsStr;
    use std::path::Path;

    fn noted(events: &[(EventMask, &str)]) -> Changes {
        let mut changes = Changes::default();
        for (mask, name) in events {
            let name = (!name.is_empty()).then(|| OsStr::new(*name));
            note(Path::new("/nonexistent"), *mask, name, &mut changes);
        }
        changes
    }

    #[test]
    fn a_lost_queue_means_that_anything_may_have_changed() {
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

    #[test]
    fn a_directory_that_goes_is_noticed_however_it_goes() {
        let masks = [EventMask::DELETE_SELF, EventMask::MOVE_SELF, EventMask::UNMOUNT, EventMask::IGNORED];
        assert!(masks.iter().all(|mask| noted(&[(*mask, "")]).gone));
    }
}
