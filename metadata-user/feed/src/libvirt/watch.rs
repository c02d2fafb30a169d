//! The agent's side: watches the directory that the hook writes to.

use std::path::{Path, PathBuf};

use super::DIRECTORY;
use crate::publisher::Publisher;
use crate::source::{Source, SourceContext, SourceTask};
use crate::{FeedError, directory};
use metadata_content::record::RecordLimits;
use metadata_content::source::RecordSource;

/// The records that libvirt's hook writes into a directory.
pub struct HookDirectory(PathBuf);

impl HookDirectory {
    /// The directory below a run directory.
    #[must_use]
    pub fn of(run: &Path) -> Self {
        Self(run.join(DIRECTORY))
    }
}

impl Source for HookDirectory {
    fn kind(&self) -> RecordSource {
        RecordSource::Hook
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        Box::pin(watch(self.0.clone(), context.limits, publisher))
    }

    fn is_reread(&self) -> bool {
        true
    }
}

/// Watches the hook's records like [`directory::watch`], and what it refused. A record's key is its domain's UUID.
///
/// # Errors
/// The errors of [`directory::watch`].
pub async fn watch(dir: PathBuf, limits: RecordLimits, tx: impl Into<Publisher>) -> Result<(), FeedError> {
    directory::watch_with_refusals(dir, limits, tx.into().named(uuid)).await
}

/// A file's name without its extension.
fn uuid(name: String) -> String {
    name.rsplit_once('.').map_or(name.clone(), |(uuid, _)| uuid.to_owned())
}

#[cfg(test)]
mod tests {
    use super::watch;
    use crate::FeedEvent;
    use crate::directory::{REFUSAL, REFUSAL_BYTES};
    use metadata_content::record::RecordLimits;
    use std::time::Duration;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    const LONG: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn records_have_their_domains_uuid_as_key() {
        let room = tempfile::tempdir().expect("a directory");
        let uuid = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
        let path = room.path().join(format!("{uuid}.json"));
        std::fs::write(&path, "{}").expect("written");
        let (tx, mut events) = mpsc::channel(8);
        let watching = tokio::spawn(watch(room.path().to_owned(), RecordLimits::DEFAULT, tx));
        let mut next = async || timeout(LONG, events.recv()).await.expect("in time").expect("an event");
        let refused = next().await;
        assert!(matches!(&refused, FeedEvent::Rejected { key, .. } if key == uuid), "{refused:?}");
        assert!(matches!(next().await, FeedEvent::Synced));
        std::fs::remove_file(&path).expect("removed");
        let removed = next().await;
        assert!(matches!(&removed, FeedEvent::Remove { key } if key == uuid), "{removed:?}");
        // What the hook refused: without a record, of a good record, of a record that becomes good, and no longer.
        let good = include_str!("../../../../tests/vectors/record.yaml");
        let refusal = path.with_extension(REFUSAL);
        let good = serde_yaml::from_str::<serde_json::Value>(good).expect("YAML").to_string();
        let refused = |next: FeedEvent, reason: &str| {
            let FeedEvent::Rejected { key, error } = next else { panic!("{next:?}") };
            assert_eq!((key.as_str(), error.to_string().as_str()), (uuid, reason));
        };
        std::fs::write(&refusal, "domain web: first\n").expect("written");
        assert!(matches!(next().await, FeedEvent::Remove { .. }));
        refused(next().await, "domain web: first");
        std::fs::write(&path, &good).expect("written");
        assert!(matches!(next().await, FeedEvent::Upsert { .. }), "the record is good");
        refused(next().await, "domain web: first");
        std::fs::write(&refusal, "x".repeat(3 * REFUSAL_BYTES)).expect("written");
        assert!(matches!(next().await, FeedEvent::Upsert { .. }));
        refused(next().await, &"x".repeat(REFUSAL_BYTES));
        std::fs::remove_file(&refusal).expect("removed");
        let again = next().await;
        assert!(
            matches!(&again, FeedEvent::Upsert { key, .. } if key == uuid),
            "nothing is refused: {again:?}"
        );
        // No other file of that ending is read.
        std::fs::write(room.path().join("web.refused"), "no").expect("written");
        std::fs::remove_file(&path).expect("removed");
        assert!(matches!(next().await, FeedEvent::Remove { .. }));
        drop(events);
        timeout(LONG, watching).await.expect("in time").expect("no panic").expect("a good end");
    }
}
