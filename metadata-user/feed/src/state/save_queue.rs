//! Writes of the files that outlive the agent. What cannot be written stays queued, and is tried again after a pause.
//!
//! One queue for all files: each has at most one write in it, because a later write replaces an earlier one. The writes
//! take turns. What a guest wrote is therefore acknowledged before it is on disk, and it stays in memory until it is
//! there: a full disk, a read-only mount or lost permissions delay it, and [`SaveQueue::unsaved`] names it meanwhile.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use tokio::sync::Notify;
use tokio::time::Instant;

/// How long to gather changes before a write. It limits how often a guest can cause one.
pub const SAVE_PAUSE: Duration = Duration::from_millis(250);
/// Pause after the first failure of a file. Each further failure doubles it.
pub const RETRY_FIRST: Duration = Duration::from_millis(500);
/// Longest pause between two attempts to write a file.
pub const RETRY_MOST: Duration = Duration::from_secs(15);
/// How many unwritten files a report names; it counts the others.
pub const NAMED_MOST: usize = 8;

/// A file that outlives the agent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateFile {
    /// What a VM wrote.
    Mailbox(Box<str>),
    /// The keys of session tokens.
    TokenKeys,
    /// The last good records.
    Snapshot,
    /// The dialects that guests asked for.
    Dialects,
    /// The requests that the kernel answers.
    Requests,
    /// The events of VMs.
    Events,
    /// The last known VMIs.
    Vmis,
}

impl StateFile {
    /// Returns whether nobody can deliver again what the file holds: what a guest wrote, and the events that an operator
    /// announced to guests, with their acknowledgements.
    #[must_use]
    pub fn is_irreplaceable(&self) -> bool {
        matches!(self, Self::Mailbox(_) | Self::Events)
    }
}

impl fmt::Display for StateFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mailbox(vm) => write!(f, "data that VM {vm} wrote"),
            Self::TokenKeys => f.write_str("token keys"),
            Self::Snapshot => f.write_str("the snapshot of records"),
            Self::Dialects => f.write_str("the dialects that guests use"),
            Self::Requests => f.write_str("the requests that the kernel answers"),
            Self::Events => f.write_str("the events of VMs"),
            Self::Vmis => f.write_str("the last known VMIs"),
        }
    }
}

/// Files that could not be written, as one line for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsavedFiles {
    /// Number of files.
    pub count: usize,
    /// The first [`NAMED_MOST`] files.
    pub named: Vec<StateFile>,
    /// How long the first of them has not been written.
    pub since: Duration,
    /// Why the first of them was not written.
    pub reason: String,
}

impl fmt::Display for UnsavedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, named, since, reason } = self;
        write!(f, "not on disk for {} s: ", since.as_secs())?;
        for (at, file) in named.iter().enumerate() {
            write!(f, "{}{file}", if at == 0 { "" } else { ", " })?;
        }
        if *count > named.len() {
            write!(f, " and {} more", count - named.len())?;
        }
        write!(f, ": {reason}; make room in the state directory or correct its permissions")
    }
}

type Write = Box<dyn FnMut() -> io::Result<()> + Send>;

/// The last failure of a file.
struct Failure {
    since: Instant,
    reason: String,
    pause: Duration,
    /// When to try again.
    at: Instant,
}

#[derive(Default)]
struct Queue {
    writes: BTreeMap<StateFile, Write>,
    /// Files whose last write failed.
    failures: BTreeMap<StateFile, Failure>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Held during a write.
    turn: Mutex<()>,
    wake: Notify,
    failed: AtomicU64,
}

/// The queue of writes. Its clones are the same queue.
#[derive(Clone, Default)]
pub struct SaveQueue(Arc<Shared>);

impl fmt::Debug for SaveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SaveQueue").finish_non_exhaustive()
    }
}

/// Locks, even after a panic elsewhere: no operation leaves the queue inconsistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SaveQueue {
    /// Queues a write, and replaces the queued write of this file. Never waits for a disk. If the last write of the
    /// file failed, this one waits for the end of the pause.
    pub fn submit(&self, file: StateFile, write: impl FnMut() -> io::Result<()> + Send + 'static) {
        locked(&self.0.queue).writes.insert(file, Box::new(write));
        self.0.wake.notify_one();
    }

    /// Queues a write that the caller has tried and that failed with `error`. It waits for the end of a pause.
    pub fn submit_failed(
        &self,
        file: StateFile,
        error: &io::Error,
        write: impl FnMut() -> io::Result<()> + Send + 'static,
    ) {
        let mut queue = locked(&self.0.queue);
        queue.writes.insert(file.clone(), Box::new(write));
        self.fail(queue, file, error);
        self.0.wake.notify_one();
    }

    /// Returns whether the last write of a file failed.
    #[must_use]
    pub fn is_unsaved(&self, file: &StateFile) -> bool {
        locked(&self.0.queue).failures.contains_key(file)
    }

    /// Writes everything now, whatever failed before. The call blocks on the disk. Afterwards [`SaveQueue::unsaved`]
    /// names what is not on disk.
    pub fn flush(&self) {
        // A write that another thread has begun is complete, or back in the queue, once it is this thread's turn.
        let turn = locked(&self.0.turn);
        let files: Vec<_> = locked(&self.0.queue).writes.keys().cloned().collect();
        for file in files {
            self.write(file, &turn);
        }
    }

    /// Files that could not be written and that `wanted` selects.
    #[must_use]
    pub fn unsaved(&self, wanted: impl Fn(&StateFile) -> bool) -> Option<UnsavedFiles> {
        let queue = locked(&self.0.queue);
        let failures = || queue.failures.iter().filter(|(file, _)| wanted(file));
        let (_, first) = failures().min_by_key(|(_, failure)| failure.since)?;
        Some(UnsavedFiles {
            count: failures().count(),
            named: failures().map(|(file, _)| file.clone()).take(NAMED_MOST).collect(),
            since: first.since.elapsed(),
            reason: first.reason.clone(),
        })
    }

    /// Number of files that could not be written.
    #[must_use]
    pub fn unsaved_count(&self) -> usize {
        locked(&self.0.queue).failures.len()
    }

    /// Number of failed writes since the start.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.0.failed.load(Ordering::Relaxed)
    }

    /// Writes what is queued, for ever.
    pub async fn run(self) {
        loop {
            match self.due() {
                None => self.0.wake.notified().await,
                Some(at) if at > Instant::now() => {
                    // Whichever comes first: a new write, or the end of a pause.
                    let _ = tokio::time::timeout_at(at, self.0.wake.notified()).await;
                }
                Some(_) => {
                    tokio::time::sleep(SAVE_PAUSE).await;
                    let queue = self.clone();
                    // The task fails only at the end of the runtime, when the agent writes the remaining files itself.
                    let _ = tokio::task::spawn_blocking(move || queue.write_due()).await;
                }
            }
        }
    }

    /// When the next write is due; `None` if the queue is empty.
    fn due(&self) -> Option<Instant> {
        let now = Instant::now();
        let queue = locked(&self.0.queue);
        queue.writes.keys().map(|file| queue.failures.get(file).map_or(now, |failure| failure.at)).min()
    }

    /// Writes each file that is due, once.
    fn write_due(&self) {
        let now = Instant::now();
        let due: Vec<_> = {
            let queue = locked(&self.0.queue);
            let is_due =
                |file: &&StateFile| queue.failures.get(*file).is_none_or(|failure| failure.at <= now);
            queue.writes.keys().filter(is_due).cloned().collect()
        };
        for file in due {
            let turn = locked(&self.0.turn);
            self.write(file, &turn);
        }
    }

    /// Does the queued write of a file. A failed write is queued again, unless a later one has replaced it.
    fn write(&self, file: StateFile, _turn: &MutexGuard<'_, ()>) {
        // The queue is not locked during the write, because guests' requests add to it.
        let Some(mut write) = locked(&self.0.queue).writes.remove(&file) else { return };
        let result = write();
        let mut queue = locked(&self.0.queue);
        match result {
            Ok(()) => {
                if queue.failures.remove(&file).is_some() && queue.failures.is_empty() {
                    drop(queue);
                    tracing::info!("everything that was not on disk has been written");
                }
            }
            Err(error) => {
                queue.writes.entry(file.clone()).or_insert(write);
                self.fail(queue, file, &error);
            }
        }
    }

    /// Notes a failure of a file whose next write is queued.
    fn fail(&self, mut queue: MutexGuard<'_, Queue>, file: StateFile, error: &io::Error) {
        self.0.failed.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let last = queue.failures.remove(&file);
        // One line until everything is written again, so that guests cannot fill the log.
        let is_first = last.is_none() && queue.failures.is_empty();
        let pause = last.as_ref().map_or(RETRY_FIRST, |last| (last.pause * 2).min(RETRY_MOST));
        let since = last.map_or(now, |last| last.since);
        let failure = Failure { since, reason: error.to_string(), pause, at: now + pause };
        queue.failures.insert(file.clone(), failure);
        drop(queue);
        if is_first {
            tracing::warn!(
                "not on disk: {file}: {error}; make room in the state directory or correct its permissions; what is \
                 not on disk is tried again every {} s at the latest",
                RETRY_MOST.as_secs()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::{NAMED_MOST, RETRY_FIRST, RETRY_MOST, SAVE_PAUSE, SaveQueue, StateFile};

    /// A disk that is full or not, and what was written to it.
    #[derive(Clone, Default)]
    struct Disk {
        is_full: Arc<AtomicBool>,
        attempts: Arc<AtomicUsize>,
        contents: Arc<Mutex<Vec<&'static str>>>,
    }

    impl Disk {
        fn full() -> Self {
            let disk = Self::default();
            disk.is_full.store(true, Ordering::Relaxed);
            disk
        }

        fn write(&self, text: &'static str) -> impl FnMut() -> io::Result<()> + Send + 'static {
            let disk = self.clone();
            move || {
                disk.attempts.fetch_add(1, Ordering::Relaxed);
                if disk.is_full.load(Ordering::Relaxed) {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                disk.contents.lock().expect("contents").push(text);
                Ok(())
            }
        }

        fn contents(&self) -> Vec<&'static str> {
            self.contents.lock().expect("contents").clone()
        }
    }

    fn mailbox(n: usize) -> StateFile {
        StateFile::Mailbox(format!("vm-{n}").into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_failed_is_repeated_with_growing_pauses_until_it_succeeds() {
        let (queue, disk) = (SaveQueue::default(), Disk::full());
        let running = tokio::spawn(queue.clone().run());
        queue.submit(mailbox(0), disk.write("first"));
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        let attempts = disk.attempts.load(Ordering::Relaxed);
        let fewest = (3_600 / (RETRY_MOST + SAVE_PAUSE).as_secs().max(1)) as usize - 60;
        assert!((fewest..3_600).contains(&attempts), "{attempts} attempts in an hour");
        let unsaved = queue.unsaved(|_| true).expect("it is reported");
        assert_eq!((unsaved.count, unsaved.named), (1, vec![mailbox(0)]));
        assert!(unsaved.since > Duration::from_secs(3_500), "{:?}", unsaved.since);
        assert_eq!((queue.failed(), queue.unsaved_count()), (attempts as u64, 1));
        disk.is_full.store(false, Ordering::Relaxed);
        tokio::time::sleep(RETRY_MOST + 2 * SAVE_PAUSE).await;
        assert_eq!(disk.contents(), ["first"]);
        assert_eq!((queue.unsaved(|_| true), queue.unsaved_count()), (None, 0));
        running.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_cannot_be_written_delays_no_other_one() {
        let (queue, full, disk) = (SaveQueue::default(), Disk::full(), Disk::default());
        let running = tokio::spawn(queue.clone().run());
        queue.submit(mailbox(0), full.write("never"));
        tokio::time::sleep(RETRY_MOST).await;
        queue.submit(mailbox(1), disk.write("at once"));
        tokio::time::sleep(2 * SAVE_PAUSE).await;
        assert_eq!(disk.contents(), ["at once"]);
        running.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_write_replaces_the_failed_one_and_waits_for_its_pause() {
        let (queue, disk) = (SaveQueue::default(), Disk::full());
        queue.submit(StateFile::Dialects, disk.write("former"));
        queue.flush();
        assert_eq!(disk.attempts.load(Ordering::Relaxed), 1);
        queue.submit(StateFile::Dialects, disk.write("later"));
        disk.is_full.store(false, Ordering::Relaxed);
        let running = tokio::spawn(queue.clone().run());
        tokio::time::sleep(RETRY_FIRST / 2).await;
        assert_eq!(disk.contents(), Vec::<&str>::new());
        tokio::time::sleep(RETRY_FIRST + SAVE_PAUSE).await;
        assert_eq!(disk.contents(), ["later"]);
        running.abort();
    }

    #[test]
    fn a_flush_writes_everything_and_names_what_is_lost() {
        let (queue, full, disk) = (SaveQueue::default(), Disk::full(), Disk::default());
        for n in 0..NAMED_MOST + 3 {
            queue.submit(mailbox(n), full.write("lost"));
        }
        queue.submit(StateFile::Events, full.write("lost"));
        queue.submit(StateFile::Snapshot, full.write("lost"));
        queue.submit(StateFile::Dialects, disk.write("kept"));
        queue.flush();
        assert_eq!(disk.contents(), ["kept"]);
        let unsaved = queue.unsaved(StateFile::is_irreplaceable).expect("it is reported");
        assert_eq!((unsaved.count, unsaved.named.len()), (NAMED_MOST + 4, NAMED_MOST));
        let text = unsaved.to_string();
        for part in ["data that VM vm-0 wrote, ", " and 4 more: ", "make room in the state directory"] {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
        full.is_full.store(false, Ordering::Relaxed);
        queue.flush();
        assert_eq!(queue.unsaved(|_| true), None);
        assert_eq!(full.contents().len(), NAMED_MOST + 5, "each was written once");
    }

    #[test]
    fn a_write_submitted_while_the_former_one_fails_is_the_one_that_is_repeated() {
        let (queue, disk) = (SaveQueue::default(), Disk::default());
        let (again, later) = (queue.clone(), disk.write("later"));
        let mut later = Some(later);
        queue.submit(mailbox(0), move || {
            if let Some(later) = later.take() {
                again.submit(mailbox(0), later);
            }
            Err(io::ErrorKind::StorageFull.into())
        });
        queue.flush();
        assert_eq!(queue.unsaved_count(), 1);
        queue.flush();
        assert_eq!((disk.contents(), queue.unsaved_count()), (vec!["later"], 0));
    }
}
