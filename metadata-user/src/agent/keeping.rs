//! The last good records, kept while their source is there and served while it is away.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{debug, info, warn};

use crate::config::Config;
use crate::feed::{FeedError, FeedEvent, directory};
use crate::record::{Limits, Record};
use crate::snapshot::{self, SnapshotError, Written};

/// How long records must have been quiet before they are kept.
const SETTLE: Duration = Duration::from_secs(2);
/// Longest time a change waits for quiet.
const LATEST: Duration = Duration::from_secs(30);
/// How often to look for a source that is away.
const RETRY: Duration = Duration::from_secs(1);

/// The snapshot, and whether it stands in for the source.
pub(super) struct Keeping {
    path: Option<PathBuf>,
    /// The first and the last change since records were kept.
    changed: Option<(Instant, Instant)>,
    writing: Option<JoinHandle<()>>,
    /// Records of the snapshot that the source has not told of, while it stands in.
    unheard: Option<HashSet<String>>,
}

impl Keeping {
    pub(super) fn new(config: &Config) -> Self {
        let path = config.state.as_ref().map(|state| state.join(snapshot::FILE));
        Self { path, changed: None, writing: None, unheard: None }
    }

    /// The records to serve when their source, the directory of the configuration, is away; `None` when it is there, or
    /// when nothing was kept.
    pub(super) fn stand_in(&mut self, config: &Config) -> Option<Vec<(String, Record)>> {
        let (dir, path) = (config.records.as_ref()?, self.path.as_ref()?);
        let away = directory::names(dir).err()?;
        match snapshot::read(path, &config.record_limits()) {
            Ok(records) => {
                warn!(
                    records = records.len(),
                    "{away}; serving from the snapshot {} until the records are back",
                    path.display()
                );
                self.unheard = Some(records.iter().map(|(key, _)| key.clone()).collect());
                Some(records)
            }
            Err(SnapshotError::Absent { .. }) => None,
            Err(error) => {
                warn!("{error}");
                None
            }
        }
    }

    /// True while the snapshot stands in for the source.
    pub(super) fn stands_in(&self) -> bool {
        self.unheard.is_some()
    }

    /// Notes what the source tells.
    pub(super) fn hear(&mut self, event: &FeedEvent) {
        let key = match event {
            FeedEvent::Upsert { key, .. } | FeedEvent::Remove { key } => {
                let now = Instant::now();
                self.changed = Some(self.changed.map_or((now, now), |(first, _)| (first, now)));
                key
            }
            FeedEvent::Expect { key, .. } | FeedEvent::Rejected { key, .. } => key,
            FeedEvent::Synced => return,
        };
        if let Some(unheard) = &mut self.unheard {
            unheard.remove(key);
        }
    }

    /// The source has told all it has: the keys of the snapshot's records that it has not.
    pub(super) fn synced(&mut self) -> HashSet<String> {
        let gone = self.unheard.take();
        if let Some(gone) = &gone {
            info!(gone = gone.len(), "the records are back; the snapshot has done its part");
        }
        gone.unwrap_or_default()
    }

    /// Keeps the records if they have changed and it is time; writes beside the agent.
    pub(super) fn keep(&mut self, records: impl FnOnce() -> Vec<(String, Arc<Record>)>) {
        if self.writing.as_ref().is_some_and(|writing| !writing.is_finished()) {
            return;
        }
        let is_due =
            |(first, last): (Instant, Instant)| last.elapsed() >= SETTLE || first.elapsed() >= LATEST;
        if self.stands_in() || !self.changed.is_some_and(is_due) {
            return;
        }
        let Some(path) = self.path.clone() else { return };
        self.changed = None;
        let records = records();
        self.writing = Some(tokio::task::spawn_blocking(move || write(&path, &records)));
    }

    /// Keeps what has changed, now: for the end of the agent.
    pub(super) async fn keep_now(&mut self, records: impl FnOnce() -> Vec<(String, Arc<Record>)>) {
        if let Some(writing) = self.writing.take()
            && let Err(error) = writing.await
        {
            warn!("keeping the records: {error}");
        }
        if let Some(path) = self.path.as_deref().filter(|_| self.changed.is_some() && !self.stands_in()) {
            write(path, &records());
        }
    }
}

fn write(path: &std::path::Path, records: &[(String, Arc<Record>)]) {
    match snapshot::write(path, records) {
        Ok(Written { records, left_out: 0 }) => debug!(records, "kept in {}", path.display()),
        Ok(Written { records, left_out }) => warn!(
            records,
            left_out,
            "the snapshot {} has no room for all records: those left out are not served if their source is away at a start",
            path.display()
        ),
        Err(error) => warn!("the records are not kept in {}: {error}", path.display()),
    }
}

/// Watches a directory as [`directory::watch`] does; `patiently`, one that is away at the start is waited for.
pub(super) async fn follow(
    dir: PathBuf,
    limits: Limits,
    tx: mpsc::Sender<FeedEvent>,
    patiently: bool,
) -> Result<(), FeedError> {
    loop {
        match directory::watch(dir.clone(), limits.clone(), tx.clone()).await {
            Err(error) if patiently && !tx.is_closed() => debug!("{error}"),
            ended => return ended,
        }
        tokio::time::sleep(RETRY).await;
    }
}
