//! The inlet of one pod: made when it is wished for, and removed when it is not any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use metadata_common::mac::Mac;
use tokio::sync::watch;
use tokio::time::Instant;

use super::follow::{Means, RETRY};
use super::{Inlets, PodUid};
use metadata_links::inlet;
use metadata_links::processes::Meant;

/// What is wished of a pod's inlet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wish {
    /// Nothing is known yet: what a previous agent made stays.
    #[default]
    Unknown,
    /// There is one, and this is the MAC of what it sends.
    Open(Mac),
    /// There is none.
    None,
}

/// Who wishes.
#[derive(Debug)]
pub(super) struct Wisher {
    wish: watch::Sender<Wish>,
    stays: Arc<AtomicBool>,
}

/// Who has the wish done.
pub(super) struct Wished {
    wish: watch::Receiver<Wish>,
    stays: Arc<AtomicBool>,
    /// The inlet is there, with all that belongs to it.
    ready: watch::Sender<bool>,
}

/// Both ends of one pod's wishes.
pub(super) fn wishes(inlets: &Inlets) -> (Wisher, Wished) {
    let (sender, receiver) = watch::channel(Wish::default());
    let stays = Arc::new(AtomicBool::new(inlets.stay));
    let (ready, _) = watch::channel(false);
    (Wisher { wish: sender, stays: Arc::clone(&stays) }, Wished { wish: receiver, stays, ready })
}

impl Wished {
    /// Whether the inlet is ready, now and as it changes.
    pub(super) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }
}

impl Wisher {
    pub(super) fn wish(&self, mac: Option<Mac>) {
        // Also when it is the same: what is there may have been deleted meanwhile.
        self.wish.send_replace(mac.map_or(Wish::None, Wish::Open));
    }

    /// The pod matters no more: its inlet does not outlast the task that tends it.
    pub(super) fn end(&self) {
        self.stays.store(false, Ordering::Relaxed);
    }
}

/// An inlet that was made. Dropped, it is removed unless it stays.
struct Made {
    meant: Arc<Meant>,
    stays: Arc<AtomicBool>,
}

impl Drop for Made {
    fn drop(&mut self) {
        if self.stays.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = inlet::close(&self.meant) {
            // Usually the namespace has gone, and the inlet with it.
            tracing::debug!(netns = self.meant.name(), "the inlet is not removed: {error}");
        }
    }
}

/// Has wishes done until dropped.
pub(super) async fn tend(pod: &PodUid, meant: &Arc<Meant>, wished: Wished, means: &Means) {
    let Wished { mut wish, stays, ready } = wished;
    let (mut made, mut complained) = (None, false);
    loop {
        let now = *wish.borrow_and_update();
        let (process, start) = (Arc::clone(meant), Instant::now());
        let done = match now {
            Wish::Unknown => Ok(()),
            Wish::Open(mac) => {
                let addresses = Arc::clone(&means.inlets);
                made.get_or_insert_with(|| Made { meant: Arc::clone(meant), stays: Arc::clone(&stays) });
                means.blocking(move || inlet::open(&process, mac, &addresses.addresses)).await
            }
            Wish::None => means.blocking(move || inlet::close(&process)).await,
        };
        ready.send_if_modified(|ready| {
            let is = done.is_ok() && matches!(now, Wish::Open(_));
            std::mem::replace(ready, is) != is
        });
        let again = match done {
            Ok(()) => {
                tracing::debug!(%pod, ?now, took = ?start.elapsed(), "the inlet is as wished");
                None
            }
            Err(error) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(%pod, "the inlet is tried again: {error}");
                }
                Some(RETRY)
            }
        };
        let wait = async {
            match again {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = wish.changed() => if changed.is_err() {
                // Nobody wishes any more; the pod is followed until it ends.
                std::future::pending::<()>().await;
            },
            () = wait => {}
        }
    }
}
