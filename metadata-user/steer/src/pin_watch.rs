//! Notices at once that the directory of the pins was removed or that another file system hides it. The rounds of
//! [`Steering::check`](crate::Steering::check) find the same, but later.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::fs::File;
use std::future::pending;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::mounts::{INIT, OWN};
use super::pins::is_bpffs;

/// Time from a change to the end of [`PinWatch::changed`]. Removing a directory takes several steps, which a
/// directory made again in between would fail; and a node that mounts file systems all the time wakes nobody more often.
const SETTLE: Duration = Duration::from_millis(500);
/// Bytes of one read of events.
const BUFFER_BYTES: usize = 4 << 10;

/// Watches the configured directory of pins by inotify(7), and mount tables by poll(2).
pub struct PinWatch {
    /// The directory, and the one above if that is on a bpffs too.
    directories: Vec<PathBuf>,
    /// `None` if the kernel has no more instances for this user.
    names: Option<AsyncFd<OwnedFd>>,
    own: Option<AsyncFd<File>>,
    init: Option<AsyncFd<File>>,
    /// The directories may be others than those that are watched.
    is_stale: bool,
    /// When a change that was noticed is to be reported.
    due: Option<Instant>,
}

impl PinWatch {
    /// Begins to watch. What cannot be watched is left to the rounds. Call it in a runtime.
    #[must_use]
    pub fn open(pins: Option<&Path>) -> Self {
        let above = pins.and_then(Path::parent).filter(|above| is_bpffs(above).unwrap_or_default());
        let directories: Vec<_> = pins.into_iter().chain(above).map(Path::to_owned).collect();
        let is_wanted = !directories.is_empty();
        Self {
            directories,
            names: is_wanted.then(|| unless_failed(names())).flatten(),
            own: is_wanted.then(|| unless_failed(mounts(OWN))).flatten(),
            init: is_wanted.then(|| unless_failed(mounts(INIT))).flatten(),
            is_stale: true,
            due: None,
        }
    }

    /// Waits until something has changed in these directories or in a mount table; forever if nothing can be watched. A
    /// cancelled wait loses no change.
    pub async fn changed(&mut self) {
        let due = match self.due {
            Some(due) => due,
            None => {
                if std::mem::take(&mut self.is_stale) {
                    self.follow();
                }
                tokio::select! {
                    () = named(self.names.as_ref()) => {}
                    () = mounted(self.own.as_ref()) => {}
                    () = mounted(self.init.as_ref()) => {}
                }
                *self.due.insert(Instant::now() + SETTLE)
            }
        };
        tokio::time::sleep_until(due).await;
        self.due = None;
        self.is_stale = true;
    }

    /// Watches the directories that are there now.
    fn follow(&self) {
        let Some(names) = &self.names else { return };
        let mask = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE
            | WatchFlags::ONLYDIR;
        for directory in &self.directories {
            if let Err(error) = inotify::add_watch(names, directory, mask) {
                tracing::debug!(directory = %directory.display(), %error, "not watched");
            }
        }
    }
}

fn names() -> io::Result<AsyncFd<OwnedFd>> {
    let names = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    watched(names, Interest::READABLE)
}

fn mounts(table: &str) -> io::Result<AsyncFd<File>> {
    watched(File::open(table)?, Interest::PRIORITY)
}

#[expect(deprecated, reason = "the descriptor is owned, so it stays open, and the alternative is unsafe")]
fn watched<T: AsRawFd>(file: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(file, interest)
}

fn unless_failed<T>(opened: io::Result<T>) -> Option<T> {
    opened
        .inspect_err(|error| tracing::debug!(%error, "changes of the pins are found by comparison only"))
        .ok()
}

/// Waits for events of directories, and takes them.
async fn named(names: Option<&AsyncFd<OwnedFd>>) {
    let Some(names) = names else { return pending().await };
    let mut events = [0; BUFFER_BYTES];
    loop {
        let Ok(mut ready) = names.readable().await else { return pending().await };
        match ready.try_io(|names| Ok(rustix::io::read(names, &mut events)?)) {
            Ok(Ok(_)) => return,
            // Without events the rounds remain.
            Ok(Err(_)) => return pending().await,
            Err(_would_block) => {}
        }
    }
}

/// Waits for a change of a mount table.
async fn mounted(table: Option<&AsyncFd<File>>) {
    let Some(table) = table else { return pending().await };
    match table.ready(Interest::PRIORITY).await {
        Ok(mut ready) => ready.clear_ready(),
        Err(_) => pending().await,
    }
}
