//! The inlet of one pod: creates it on request, restores it, and removes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use metadata_common::mac::Mac;
use tokio::sync::watch;
use tokio::time::Instant;

use super::follow::{RETRY, WatchContext};
use super::{Inlets, PodUid};
use metadata_links::inlet;
use metadata_links::processes::NamespaceReservation;

/// The requested state of a pod's inlet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum InletRequest {
    /// No request yet: a previous agent's inlet stays.
    #[default]
    Unknown,
    /// The pod has an inlet with this source MAC.
    Open(Mac),
    /// The pod has no inlet.
    None,
}

/// The requesting end.
#[derive(Debug)]
pub(super) struct InletRequester {
    wish: watch::Sender<InletRequest>,
    stays: Arc<AtomicBool>,
}

/// The end that carries out requests.
pub(super) struct InletRequests {
    wish: watch::Receiver<InletRequest>,
    stays: Arc<AtomicBool>,
    /// True once the inlet is complete.
    ready: watch::Sender<bool>,
}

/// Creates both ends for one pod.
pub(super) fn wishes(inlets: &Inlets) -> (InletRequester, InletRequests) {
    let (sender, receiver) = watch::channel(InletRequest::default());
    let stays = Arc::new(AtomicBool::new(inlets.stay));
    let (ready, _) = watch::channel(false);
    (
        InletRequester { wish: sender, stays: Arc::clone(&stays) },
        InletRequests { wish: receiver, stays, ready },
    )
}

impl InletRequests {
    /// Whether the inlet is ready, now and at each change.
    pub(super) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }
}

impl InletRequester {
    pub(super) fn wish(&self, mac: Option<Mac>) {
        // Send an equal request too, because the inlet may have been deleted.
        self.wish.send_replace(mac.map_or(InletRequest::None, InletRequest::Open));
    }

    /// The pod is no longer watched: its inlet ends with its task.
    pub(super) fn end(&self) {
        self.stays.store(false, Ordering::Relaxed);
    }
}

/// An inlet of this task. Dropping it removes the inlet, unless inlets stay.
struct OwnedInlet {
    meant: Arc<NamespaceReservation>,
    stays: Arc<AtomicBool>,
}

impl Drop for OwnedInlet {
    fn drop(&mut self) {
        if self.stays.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = inlet::close(&self.meant) {
            // Usually the namespace is gone, and the inlet with it.
            tracing::debug!(netns = self.meant.name(), "cannot remove the inlet: {error}");
        }
    }
}

/// Carries out requests until dropped.
pub(super) async fn tend(
    pod: &PodUid,
    meant: &Arc<NamespaceReservation>,
    wished: InletRequests,
    means: &WatchContext,
) {
    let InletRequests { mut wish, stays, ready } = wished;
    let (mut made, mut complained) = (None, false);
    loop {
        means.inlets.pause.end().await;
        let now = *wish.borrow_and_update();
        let (process, start) = (Arc::clone(meant), Instant::now());
        let done = match now {
            InletRequest::Unknown => Ok(()),
            InletRequest::Open(mac) => {
                let addresses = Arc::clone(&means.inlets);
                made.get_or_insert_with(|| OwnedInlet {
                    meant: Arc::clone(meant),
                    stays: Arc::clone(&stays),
                });
                means.blocking(move || inlet::open(&process, mac, &addresses.addresses)).await
            }
            InletRequest::None => means.blocking(move || inlet::close(&process)).await,
        };
        ready.send_if_modified(|ready| {
            let is = done.is_ok() && matches!(now, InletRequest::Open(_));
            std::mem::replace(ready, is) != is
        });
        let again = match done {
            Ok(()) => {
                tracing::debug!(%pod, ?now, took = ?start.elapsed(), "the inlet matches the request");
                None
            }
            Err(error) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(%pod, "creating the inlet failed, another attempt follows: {error}");
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
                // No further request can arrive, but the pod's inlet stays until the pod ends.
                std::future::pending::<()>().await;
            },
            () = wait => {}
        }
    }
}
