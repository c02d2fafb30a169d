//! The feed of a directory: each file is the record of one VM.
//!
//! Every visible `*.yaml`, `*.yml` and `*.json` file is a record, and its name is the key. Writers should write a file
//! elsewhere in the same file system and rename it. The feed reads a file written in place when the writer closes it. A
//! record's `source` names a file beside it or in a subdirectory. The feed reads the record again when that file
//! changes, even if all files of a directory change at once, as in a token volume of Kubernetes.
//!
//! An invalid file leaves the last good record in force, and so does a symbolic link that leads nowhere. If the
//! directory vanishes, all records stay until it is back. If a credential is unreadable, the feed publishes the record
//! without it, with a warning.
//!
//! The feed remembers only a digest of each record, so that it publishes no unchanged record twice.

mod load;
mod watch;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use load::{DirectoryContent, names_of};
pub use load::{LoadedFile, REFUSAL, REFUSAL_BYTES, REFUSED_VM, files, load, names};
use metadata_common::printable::counted;
use metadata_content::record::{Record, RecordLimits};
use metadata_content::source::RecordSource;
use tracing::debug;
pub(crate) use watch::{DirectoryChanges, DirectoryWatch};

use super::publisher::{MemoryFreed, Publisher};
use super::source::{Source, SourceContext, SourceTask};
use super::{FeedError, FeedEvent, blocking};

/// Most records in a directory. A scan reads them in the order of names, and the feed refuses the rest.
pub const MAX_RECORDS: usize = 16_384;
/// Most files that a scan reads at once. Parsing takes most of an agent's start with thousands of records.
const LOADS_AT_ONCE: usize = 8;
/// How often to look whether a symbolic link that led nowhere leads to a file. Nothing tells what happens elsewhere.
const FOLLOW_LINKS: Duration = Duration::from_secs(2);
/// How long to wait before the next attempt to read a directory.
const RETRY: Duration = Duration::from_secs(1);

/// A directory of records that the configuration names.
pub struct RecordDirectory(PathBuf);

impl RecordDirectory {
    /// The directory at a path.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self(path)
    }
}

impl Source for RecordDirectory {
    fn kind(&self) -> RecordSource {
        RecordSource::File
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        let dir = self.0.clone();
        Box::pin(async move {
            loop {
                match watch(dir.clone(), context.limits.clone(), publisher.clone()).await {
                    Err(error) if context.is_patient && !publisher.is_closed() => {
                        debug!("{error}");
                        publisher.set_outage(Some(format!(
                            "{error}; its records stay in force until it can be read again"
                        )));
                    }
                    ended => return ended,
                }
                tokio::time::sleep(RETRY).await;
            }
        })
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.0)
    }

    fn try_read(&self) -> Result<(), FeedError> {
        names(&self.0).map(drop)
    }

    fn is_reread(&self) -> bool {
        true
    }
}

/// Watches `dir` and publishes its records until the receiver is dropped. Refuses records beyond `limits`.
///
/// Publishes all records first, then [`FeedEvent::Synced`], then changes. If the kernel's event queue overflows, or
/// another directory replaces this one, it compares everything and publishes `Synced` again.
///
/// # Errors
/// [`FeedError::Io`] if the directory cannot be watched or read at startup. Later the feed waits until it is back.
pub async fn watch(dir: PathBuf, limits: RecordLimits, tx: impl Into<Publisher>) -> Result<(), FeedError> {
    watch_at_most(MAX_RECORDS, dir, limits, tx.into()).await
}

/// Like [`watch()`], for a directory in which a program also leaves the reasons why it refused versions of records. A
/// reason is a file with the name of the record and the ending [`REFUSAL`]. The last good version stays in force, and
/// the reason is published with it.
pub(crate) async fn watch_with_refusals(
    dir: PathBuf,
    limits: RecordLimits,
    tx: Publisher,
) -> Result<(), FeedError> {
    watch_content(DirectoryContent::RecordsAndRefusals, MAX_RECORDS, dir, limits, tx).await
}

async fn watch_at_most(
    limit: usize,
    dir: PathBuf,
    limits: RecordLimits,
    tx: Publisher,
) -> Result<(), FeedError> {
    watch_content(DirectoryContent::Records, limit, dir, limits, tx).await
}

async fn watch_content(
    content: DirectoryContent,
    limit: usize,
    dir: PathBuf,
    limits: RecordLimits,
    tx: Publisher,
) -> Result<(), FeedError> {
    let watch = DirectoryWatch::open(&dir)?;
    let freed = tx.freed();
    let (known, crowded_out, dangling) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
    let mut feed = Directory { dir, content, limits, tx, freed, watch, limit, known, crowded_out, dangling };
    let mut told = feed.scan().await?;
    while told.is_ok() {
        let changes = tokio::select! {
            () = feed.tx.closed() => break,
            () = feed.freed.wait() => {
                told = feed.try_again().await;
                continue;
            }
            () = tokio::time::sleep(FOLLOW_LINKS), if !feed.dangling.is_empty() => {
                told = feed.follow_links().await;
                continue;
            }
            changes = feed.watch.changed(feed.content.settle()) => changes,
        };
        told = match changes {
            Ok(changes) if !changes.gone && !changes.all => feed.apply(&changes).await,
            Ok(changes) if !changes.gone => match feed.scan().await {
                Ok(told) => told,
                Err(error) => feed.return_of(Some(error)).await,
            },
            Ok(_) => feed.return_of(None).await,
            Err(error) => feed.return_of(Some(error)).await,
        };
    }
    Ok(())
}

/// Says that a record lacks a credential, in the status and in `doctor`.
#[must_use]
pub fn lacking_credential(record: &str, reason: &str) -> String {
    format!("{record}: the VM gets no credential: {reason}")
}

/// Most records whose missing credentials are reported one by one.
const LACKING_LISTED: usize = 8;

/// The receiver of events was dropped.
struct ReceiverDropped;

/// What the feed remembers of one record.
#[derive(Default)]
struct KnownRecord {
    /// Digest of the last published text and sources.
    digest: Option<load::RecordDigest>,
    /// The first path component of each of its sources.
    sources: BTreeSet<String>,
    /// The warnings that were logged of its last version, among them those of its files' permissions.
    warned: BTreeSet<String>,
    /// Why its credentials are missing.
    lacking: Vec<String>,
}

struct Directory {
    dir: PathBuf,
    content: DirectoryContent,
    /// The limits of one record.
    limits: RecordLimits,
    tx: Publisher,
    freed: MemoryFreed,
    watch: DirectoryWatch,
    /// Most records to publish.
    limit: usize,
    known: BTreeMap<String, KnownRecord>,
    /// Records refused for lack of memory, and the free bytes that each needs.
    crowded_out: BTreeMap<String, usize>,
    /// Records that are symbolic links that lead nowhere.
    dangling: BTreeSet<String>,
}

impl Directory {
    /// Compares the whole directory with the known records.
    async fn scan(&mut self) -> Result<Result<(), ReceiverDropped>, FeedError> {
        let (dir, content) = (self.dir.clone(), self.content);
        let names = blocking(move || names_of(&dir, content)).await?;
        self.tx.set_outage(None);
        Ok(self.told(names).await)
    }

    async fn told(&mut self, names: BTreeSet<String>) -> Result<(), ReceiverDropped> {
        let gone: Vec<String> = self.known.keys().filter(|key| !names.contains(*key)).cloned().collect();
        for key in gone {
            self.remove(key).await?;
        }
        let (dir, content, limits) = (self.dir.clone(), self.content, Arc::new(self.limits.clone()));
        let mut loads = stream::iter(names)
            .map(|name| {
                let (dir, limits) = (dir.clone(), Arc::clone(&limits));
                blocking(move || (content.load(&dir, &name, &limits), name))
            })
            .buffered(LOADS_AT_ONCE);
        while let Some((loaded, name)) = loads.next().await {
            let loaded = self.followed(&name, loaded).await;
            self.take_in(name, loaded).await?;
        }
        self.publish(FeedEvent::Synced).await
    }

    async fn apply(&mut self, changes: &DirectoryChanges) -> Result<(), ReceiverDropped> {
        let sources = |name: &String| changes.names.contains(name);
        let dependent = self.known.iter().filter(|(_, known)| known.sources.iter().any(sources));
        let mut names: BTreeSet<String> = dependent.map(|(key, _)| key.clone()).collect();
        names.extend(changes.names.iter().filter_map(|name| self.content.record(name)));
        for name in names {
            self.refresh(name).await?;
        }
        Ok(())
    }

    /// Reads the records again that may fit into memory now.
    async fn try_again(&mut self) -> Result<(), ReceiverDropped> {
        for (name, wants) in self.crowded_out.clone() {
            if wants <= self.tx.free() {
                self.refresh(name).await?;
            }
        }
        Ok(())
    }

    /// Reads the records again whose links lead to a file now.
    async fn follow_links(&mut self) -> Result<(), ReceiverDropped> {
        let (dir, names) = (self.dir.clone(), self.dangling.clone());
        let is_there = move |name: &String| dir.join(name).exists();
        for name in blocking(move || names.into_iter().filter(is_there).collect::<Vec<_>>()).await {
            self.refresh(name).await?;
        }
        Ok(())
    }

    /// Waits until the directory can be watched and read again, then compares everything.
    async fn return_of(&mut self, error: Option<FeedError>) -> Result<(), ReceiverDropped> {
        let dir = self.dir.display().to_string();
        let reason = match error {
            Some(error) => format!("{error}; its records stay in force until it can be read again"),
            None => format!("{dir} was moved or deleted; its records stay in force until it is back"),
        };
        tracing::warn!("{reason}");
        self.tx.set_outage(Some(reason));
        loop {
            if let Ok(opened) = DirectoryWatch::open(&self.dir) {
                self.watch = opened;
                if let Ok(told) = self.scan().await {
                    tracing::info!("{dir} is back: its records are read again");
                    return told;
                }
            }
            tokio::select! {
                () = self.tx.closed() => return Err(ReceiverDropped),
                () = tokio::time::sleep(RETRY) => {}
            }
        }
    }

    /// Reads one record and publishes the result.
    async fn refresh(&mut self, name: String) -> Result<(), ReceiverDropped> {
        let loaded = self.read(&name).await;
        let loaded = self.followed(&name, loaded).await;
        self.take_in(name, loaded).await
    }

    /// Publishes what was read of one record.
    async fn take_in(&mut self, name: String, loaded: Option<LoadedFile>) -> Result<(), ReceiverDropped> {
        let full = self.known.len() >= self.limit && !self.known.contains_key(&name);
        self.dangling.remove(&name);
        let Some(loaded) = loaded else {
            return self.remove(name).await;
        };
        if full {
            let error = FeedError::Content {
                path: self.dir.join(&name),
                expected: format!("at most {} records in a directory", self.limit),
                found: "one more".into(),
                remedy: "remove the records of VMs that are not on this node",
            };
            return self.publish(FeedEvent::Rejected { key: name, error }).await;
        }
        if loaded.dangling {
            self.dangling.insert(name.clone());
        }
        let known = self.known.entry(name.clone()).or_default();
        known.sources = loaded.sources;
        let open = loaded.open_files.iter().map(|(path, mode)| {
            format!("{} has mode {mode:04o}: records hold secrets; chmod 0640", path.display())
        });
        let content = loaded.record.iter().flat_map(|(_, warnings)| warnings).map(ToString::to_string);
        let warned: BTreeSet<String> = open.chain(content).collect();
        // A record is read again when another file changes: what was said of it still holds.
        warned.difference(&known.warned).for_each(|warning| tracing::warn!("{warning}"));
        known.warned = warned;
        if known.lacking != loaded.lacking {
            known.lacking = loaded.lacking;
            self.report_lacking();
        }
        let known = self.known.entry(name.clone()).or_default();
        if loaded.digest.is_some() && known.digest == loaded.digest {
            return Ok(());
        }
        known.digest = loaded.digest;
        if !loaded.exists {
            self.publish(FeedEvent::Remove { key: name.clone() }).await?;
        }
        let vm = loaded.vm;
        let refusal = loaded.refusal.map(|reason| {
            let error = FeedError::Vm { reason }.of(vm.clone());
            FeedEvent::Rejected { key: name.clone(), error }
        });
        let event = match loaded.record {
            Ok((record, _)) => self.admitted(name, record),
            // The program that refused the record knows of what it made it.
            Err(_) if refusal.is_some() => return self.publish_all(refusal).await,
            Err(error) => FeedEvent::Rejected { key: name, error: error.of(vm) },
        };
        self.publish_all([event].into_iter().chain(refusal)).await
    }

    /// Reserves memory for a record. The feed forgets the digest of a refused one, so that it reads the file again.
    fn admitted(&mut self, name: String, record: Record) -> FeedEvent {
        match self.tx.admit(&name, &record) {
            Ok(()) => {
                self.crowded_out.remove(&name);
                FeedEvent::Upsert { key: name, record: record.into() }
            }
            Err(no_room) => {
                self.known.entry(name.clone()).or_default().digest = None;
                self.crowded_out.insert(name.clone(), no_room.wants);
                FeedEvent::Rejected { key: name, error: FeedError::Room(no_room) }
            }
        }
    }

    /// Reads a record.
    async fn read(&self, name: &str) -> Option<LoadedFile> {
        let (dir, key, limits) = (self.dir.clone(), name.to_owned(), self.limits.clone());
        let content = self.content;
        blocking(move || content.load(&dir, &key, &limits)).await
    }

    /// Watches the directories of a record's sources, and reads the record again if one is new.
    async fn followed(&mut self, name: &str, loaded: Option<LoadedFile>) -> Option<LoadedFile> {
        let loaded = loaded?;
        if self.watch.follow(&loaded.below) {
            return self.read(name).await;
        }
        Some(loaded)
    }

    async fn remove(&mut self, key: String) -> Result<(), ReceiverDropped> {
        self.crowded_out.remove(&key);
        self.dangling.remove(&key);
        match self.known.remove(&key) {
            Some(known) => {
                if !known.lacking.is_empty() {
                    self.report_lacking();
                }
                self.publish(FeedEvent::Remove { key }).await
            }
            None => Ok(()),
        }
    }

    /// Says which VMs lack credentials, for the status.
    fn report_lacking(&self) {
        let lacking = self.known.iter().filter(|(_, known)| !known.lacking.is_empty());
        let lines = lacking.clone().take(LACKING_LISTED).flat_map(|(name, known)| {
            known.lacking.iter().map(move |reason| lacking_credential(name, reason))
        });
        let mut lines: Vec<_> = lines.collect();
        if let more @ 1.. = lacking.count().saturating_sub(LACKING_LISTED) {
            lines.push(format!("{} lack credentials too", counted(more as u64, "more record")));
        }
        self.tx.set_problems(lines);
    }

    async fn publish_all(&self, events: impl IntoIterator<Item = FeedEvent>) -> Result<(), ReceiverDropped> {
        for event in events {
            self.publish(event).await?;
        }
        Ok(())
    }

    async fn publish(&self, event: FeedEvent) -> Result<(), ReceiverDropped> {
        self.tx.publish(event).await.map_err(|_| ReceiverDropped)
    }
}

/// An I/O error with its path and the feed's expectation.
fn io(path: &Path, expected: &'static str, error: std::io::Error) -> FeedError {
    FeedError::Io { path: path.to_owned(), expected, error: error.into() }
}
