//! The agent's side: the directory that the hook writes to.

use std::path::PathBuf;

use tokio::sync::mpsc;

use crate::feed::{FeedError, FeedEvent, directory};
use crate::record::Limits;

/// Records between the directory and the agent: what waits, waits in the agent's own queue.
const QUEUE: usize = 1;

/// Watches the directory of the hook's records as [`directory::watch`] does. A record's key is its domain's UUID.
///
/// # Errors
/// As for [`directory::watch`].
pub async fn watch(dir: PathBuf, limits: Limits, tx: mpsc::Sender<FeedEvent>) -> Result<(), FeedError> {
    let (told, mut events) = mpsc::channel(QUEUE);
    let forward = async {
        loop {
            let event = tokio::select! {
                () = tx.closed() => return,
                event = events.recv() => event,
            };
            let Some(event) = event else { return };
            if tx.send(renamed(event)).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        ended = directory::watch(dir, limits, told) => ended,
        () = forward => Ok(()),
    }
}

/// The event with its file's name less the ending.
fn renamed(event: FeedEvent) -> FeedEvent {
    let name = |key: String| key.rsplit_once('.').map_or(key.clone(), |(uuid, _)| uuid.to_owned());
    match event {
        FeedEvent::Upsert { key, record } => FeedEvent::Upsert { key: name(key), record },
        FeedEvent::Remove { key } => FeedEvent::Remove { key: name(key) },
        FeedEvent::Rejected { key, error } => FeedEvent::Rejected { key: name(key), error },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::watch;
    use crate::feed::FeedEvent;
    use crate::record::Limits;
    use std::time::Duration;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    const LONG: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn records_go_by_the_uuid_of_their_domain_until_nobody_listens() {
        let room = tempfile::tempdir().expect("a directory");
        let uuid = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
        let path = room.path().join(format!("{uuid}.json"));
        std::fs::write(&path, "{}").expect("written");
        let (tx, mut events) = mpsc::channel(8);
        let watching = tokio::spawn(watch(room.path().to_owned(), Limits::DEFAULT, tx));
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
