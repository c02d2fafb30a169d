//! The snapshot: a file of valid records, for sources that are unavailable when the agent starts.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::feeds;
use crate::config::Config;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;
use metadata_feed::FeedEvent;
use metadata_feed::registry::RecordId;
use metadata_feed::snapshot::{self, Origins, SnapshotError, SnapshotRecord, WriteResult};
use metadata_feed::state::save_queue::{SaveQueue, StateFile};

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
    /// Where the sources read their records.
    origins: Origins,
    /// Where they read them once they have listed those of another directory.
    next_origins: Option<Origins>,
}

/// The directories of a configuration's sources.
fn origins(config: &Config) -> Origins {
    // Not what a link points to: that is unknown while the directory is unavailable.
    let absolute = |path: &Path| -> PathBuf {
        // The components leave out a final slash.
        absolute(path).unwrap_or_else(|_| path.to_owned()).components().collect()
    };
    let sources = config.sources().into_iter().filter(|source| source.kind().is_in_snapshot());
    sources
        .filter_map(|source| Some((source.kind(), absolute(source.directory()?).display().to_string())))
        .collect()
}

impl Snapshots {
    pub(super) fn new(config: &Config, saves: SaveQueue) -> Self {
        let path = config.state.as_ref().map(|state| state.join(snapshot::FILE));
        // Each agent writes it once, though no record changes: an earlier release may have written records that no
        // longer belong in it.
        let now = Instant::now();
        let changed = path.as_deref().is_some_and(Path::exists).then_some((now, now));
        Self { path, changed, saves, sources: BTreeSet::new(), origins: origins(config), next_origins: None }
    }

    /// Reads the records of unavailable sources. Returns none if there is no snapshot.
    pub(super) fn read_for_absent_sources(&mut self, config: &Config) -> Vec<(RecordId, Record)> {
        let away = feeds::away(config);
        let Some(path) = self.path.as_ref().filter(|_| !away.is_empty()) else { return Vec::new() };
        match snapshot::read(path, &config.record_limits()) {
            Ok(mut records) => {
                records.retain(|one| away.contains_key(&one.id.source));
                let (records, others): (Vec<_>, Vec<_>) = records.into_iter().partition(|one| {
                    let from = one.from.as_ref();
                    from.is_none_or(|from| self.origins.get(&one.id.source) == Some(from))
                });
                let count = |records: &[SnapshotRecord], source| {
                    records.iter().filter(|one| one.id.source == source).count()
                };
                for (source, reason) in away {
                    let other = others.iter().find(|one| one.id.source == source);
                    let other = other.and_then(|one| one.from.as_deref());
                    let (snapshot, records) = (path.display(), count(&records, source));
                    // Without a record of its own, it is as if there were no snapshot.
                    if let Some(other) = other.filter(|_| records == 0) {
                        warn!(
                            source = source.name(),
                            records = count(&others, source),
                            "{reason}; the records of the snapshot {snapshot} are of {other} and are not served: \
                             correct the directory, or make the new one before the agent starts"
                        );
                        continue;
                    }
                    warn!(
                        source = source.name(),
                        records, "{reason}; serving from the snapshot {snapshot} until the records are back"
                    );
                    self.sources.insert(source);
                }
                records.into_iter().map(|SnapshotRecord { id, record, .. }| (id, record)).collect()
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
        let may_change = matches!(
            event,
            FeedEvent::Upsert { .. } | FeedEvent::Remove { .. } | FeedEvent::RemoveUnless { .. }
        );
        if source.is_in_snapshot() && may_change {
            let now = Instant::now();
            self.changed = Some(self.changed.map_or((now, now), |(first, _)| (first, now)));
        }
    }

    /// Notes where a reloaded configuration has its records. Until they are listed, the records may be of either
    /// directory, and no snapshot is written.
    pub(super) fn on_reload(&mut self, config: &Config) {
        let origins = origins(config);
        self.next_origins = (origins != self.origins).then_some(origins);
        if config.records.is_none() {
            self.settle_origins();
        }
    }

    fn settle_origins(&mut self) {
        if let Some(origins) = self.next_origins.take() {
            self.origins = origins;
            let now = Instant::now();
            self.changed = Some(self.changed.map_or((now, now), |(first, _)| (first, now)));
        }
    }

    /// Ends the use of the snapshot for a source that has listed all its records.
    pub(super) fn on_synced(&mut self, source: RecordSource) {
        if source == RecordSource::File {
            self.settle_origins();
        }
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
        if self.are_served() || self.changed.is_none() || self.next_origins.is_some() {
            return;
        }
        let Some(path) = self.path.clone() else { return };
        self.changed = None;
        let (records, origins) = (records(), self.origins.clone());
        self.saves.submit(StateFile::Snapshot, move || write(&path, &records, &origins));
    }
}

fn write(path: &Path, records: &[(RecordId, Arc<Record>)], origins: &Origins) -> io::Result<()> {
    match snapshot::write(path, records, origins)? {
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

#[cfg(test)]
mod tests {
    use super::Snapshots;
    use crate::config::Config;
    use metadata_content::record::Record;
    use metadata_content::source::RecordSource;
    use metadata_feed::registry::RecordId;
    use metadata_feed::snapshot::{self, Origins};
    use metadata_feed::state::save_queue::SaveQueue;
    use std::path::Path;
    use std::sync::Arc;

    fn records() -> Vec<(RecordId, Arc<Record>)> {
        let text = "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: a, \
                    project: {id: p, number: 1, account: '000000000000'}}\nhostname: {short: a}\n\
                    placement: {region: r, zone: z}\n";
        let record = Record::parse("a", text).expect("a record").0;
        vec![(RecordId::new(RecordSource::File, "a.yaml"), record.into())]
    }

    fn config(state: &Path, records: &Path) -> Config {
        Config { state: Some(state.into()), records: Some(records.into()), ..Config::default() }
    }

    /// Records that an agent with this directory serves from the snapshot, and whether it waits for the directory.
    fn served(state: &Path, records: &Path) -> (usize, bool) {
        let config = config(state, records);
        let mut snapshots = Snapshots::new(&config, SaveQueue::default());
        let served = snapshots.read_for_absent_sources(&config).len();
        (served, snapshots.are_served())
    }

    #[test]
    fn a_snapshot_is_served_in_place_of_its_own_directory_alone() {
        let room = tempfile::tempdir().expect("a directory");
        let at = |name: &str| room.path().join(name);
        let path = at(snapshot::FILE);
        let origins = Origins::from([(RecordSource::File, at("records.d").display().to_string())]);
        snapshot::write(&path, &records(), &origins).expect("written");
        for (name, expected) in [
            ("records.d", (1, true)),
            ("records.d/", (1, true)),
            ("./records.d/.", (1, true)),
            ("record.d", (0, false)),
            ("records.d/below", (0, false)),
        ] {
            assert_eq!(served(room.path(), &at(name)), expected, "{name}");
        }
        // What an earlier release wrote says nothing of a directory.
        snapshot::write(&path, &records(), &Origins::new()).expect("written");
        assert_eq!(served(room.path(), &at("record.d")), (1, true));
    }

    #[test]
    fn a_snapshot_says_the_directory_of_a_reload_once_its_records_are_listed() {
        let room = tempfile::tempdir().expect("a directory");
        let (before, after) = (room.path().join("before"), room.path().join("after"));
        let path = room.path().join(snapshot::FILE);
        let saves = SaveQueue::default();
        let mut snapshots = Snapshots::new(&config(room.path(), &before), saves.clone());
        let write = |snapshots: &mut Snapshots| {
            snapshots.write(records);
            saves.flush();
            served(room.path(), &before).0
        };
        snapshots.on_event(RecordSource::File, &metadata_feed::FeedEvent::Remove { key: "gone.yaml".into() });
        assert_eq!(write(&mut snapshots), 1);
        snapshots.on_reload(&config(room.path(), &after));
        snapshots.on_event(RecordSource::File, &metadata_feed::FeedEvent::Remove { key: "gone.yaml".into() });
        assert_eq!(write(&mut snapshots), 1, "the records may be of either directory");
        snapshots.on_synced(RecordSource::File);
        assert_eq!(write(&mut snapshots), 0);
        assert_eq!(served(room.path(), &after), (1, true), "{}", path.display());
    }
}
