//! The snapshot: a file of valid records, for sources that are unavailable when the agent starts.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::feeds;
use crate::config::Config;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;
use metadata_feed::FeedEvent;
use metadata_feed::registry::RecordId;
use metadata_feed::snapshot::{self, SnapshotError, WriteResult};
use metadata_state::save_queue::{SaveQueue, StateFile};

/// How long records must not change before the snapshot is written.
const SETTLE: Duration = Duration::from_secs(2);
/// Longest time from a change until the snapshot is written.
const LATEST: Duration = Duration::from_secs(30);

/// The snapshot file, and the sources whose records come from it.
pub(super) struct Snapshots {
    path: Option<PathBuf>,
    /// The first and the last change since the snapshot was written.
    changed: Option<(Instant, Instant)>,
    saves: SaveQueue,
    /// The sources whose records come from the snapshot.
    sources: BTreeSet<RecordSource>,
}

impl Snapshots {
    pub(super) fn new(config: &Config, saves: SaveQueue) -> Self {
        let path = config.state.as_ref().map(|state| state.join(snapshot::FILE));
        // Each agent writes it once, though no record changes: an earlier release may have written records that no
        // longer belong in it.
        let now = Instant::now();
        let changed = path.as_deref().is_some_and(Path::exists).then_some((now, now));
        Self { path, changed, saves, sources: BTreeSet::new() }
    }

    /// Reads the records of unavailable sources. Returns none if there is no snapshot.
    pub(super) fn read_for_absent_sources(&mut self, config: &Config) -> Vec<(RecordId, Record)> {
        let away = feeds::away(config);
        let Some(path) = self.path.as_ref().filter(|_| !away.is_empty()) else { return Vec::new() };
        match snapshot::read(path, &config.record_limits()) {
            Ok(mut records) => {
                records.retain(|(id, _)| away.contains_key(&id.source));
                for (source, reason) in &away {
                    let records = records.iter().filter(|(id, _)| id.source == *source).count();
                    warn!(
                        source = source.name(),
                        records,
                        "{reason}; serving from the snapshot {} until the records are back",
                        path.display()
                    );
                }
                self.sources = away.into_keys().collect();
                records
            }
            Err(SnapshotError::Absent { .. }) => Vec::new(),
            Err(error) => {
                warn!("{error}");
                Vec::new()
            }
        }
    }

    /// True while records of the snapshot are served.
    pub(super) fn are_served(&self) -> bool {
        !self.sources.is_empty()
    }

    /// The sources whose records come from the snapshot.
    pub(super) fn sources(&self) -> &BTreeSet<RecordSource> {
        &self.sources
    }

    /// Notes the present time if an event changes records of the snapshot.
    pub(super) fn on_event(&mut self, source: RecordSource, event: &FeedEvent) {
        if source.is_in_snapshot() && matches!(event, FeedEvent::Upsert { .. } | FeedEvent::Remove { .. }) {
            let now = Instant::now();
            self.changed = Some(self.changed.map_or((now, now), |(first, _)| (first, now)));
        }
    }

    /// Ends the use of the snapshot for a source that has listed all its records.
    pub(super) fn on_synced(&mut self, source: RecordSource) {
        if self.sources.remove(&source) {
            info!(source = source.name(), "the records are back; the snapshot is no longer served");
        }
    }

    /// Queues the snapshot if it is due and no source's records come from it.
    pub(super) fn write_if_due(&mut self, records: impl FnOnce() -> Vec<(RecordId, Arc<Record>)>) {
        let is_due =
            |(first, last): (Instant, Instant)| last.elapsed() >= SETTLE || first.elapsed() >= LATEST;
        if self.changed.is_some_and(is_due) {
            self.write(records);
        }
    }

    /// Queues the snapshot if records have changed since the last one, and no source's records come from it.
    pub(super) fn write(&mut self, records: impl FnOnce() -> Vec<(RecordId, Arc<Record>)>) {
        if self.are_served() || self.changed.is_none() {
            return;
        }
        let Some(path) = self.path.clone() else { return };
        self.changed = None;
        let records = records();
        self.saves.submit(StateFile::Snapshot, move || write(&path, &records));
    }
}

fn write(path: &Path, records: &[(RecordId, Arc<Record>)]) -> io::Result<()> {
    match snapshot::write(path, records)? {
        WriteResult { records, left_out: 0 } => debug!(records, "snapshot written to {}", path.display()),
        WriteResult { records, left_out } => warn!(
            records,
            left_out,
            "the snapshot {} has no room for all records: the others are not served after a restart without their source",
            path.display()
        ),
    }
    Ok(())
}
