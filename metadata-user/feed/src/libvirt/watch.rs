//! The agent's side: watches the directory that the hook writes to.

use std::path::PathBuf;

use crate::publisher::Publisher;
use crate::{FeedError, directory};
use metadata_content::record::RecordLimits;

/// Watches the hook's records like [`directory::watch`]. A record's key is its domain's UUID.
///
/// # Errors
/// The errors of [`directory::watch`].
pub async fn watch(dir: PathBuf, limits: RecordLimits, tx: impl Into<Publisher>) -> Result<(), FeedError> {
    directory::watch(dir, limits, tx.into().named(uuid)).await
}

/// A file's name without its extension.
fn uuid(name: String) -> String {
    name.rsplit_once('.').map_or(name.clone(), |(uuid, _)| uuid.to_owned())
}

#[cfg(test)]
mod tests {
    use super::watch;
    use crate::FeedEvent;
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
        drop(events);
        timeout(LONG, watching).await.expect("in time").expect("no panic").expect("a good end");
    }
}
