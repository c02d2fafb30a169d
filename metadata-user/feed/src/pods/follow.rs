//! Watches one pod, from before its launcher starts until the launcher ends.

use metadata_common::mac::Mac;
use metadata_links::devices::{EthernetDevice, LinkList, LinkWatch};
use metadata_links::error::LinkError;
use metadata_links::inlet;
use metadata_links::netns::NamespaceReservation;
use rustix::fd::OwnedFd;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::launcher::{Index, Launcher};
use super::volumes::WatchedVolumes;
use super::{Inlets, Pod, PodEvent, PodNic, PodUid, Sender, Tap, TapKind, launcher};
use crate::blocking;

/// How long a search may take before a missing launcher counts as a fault.
pub const AT_FIRST: Duration = Duration::from_secs(10);
/// The interval of searches during that time, and afterwards.
const SOON: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_secs(1);
/// How long to gather changes of devices, because a NIC is made in several steps.
const SETTLE: Duration = Duration::from_millis(20);
/// How often to read the devices without an event: the kernel sends none when a guest enables a queue.
const LOOK: Duration = Duration::from_secs(10);
/// How long to wait before the next attempt to read a namespace.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// How many searches and reads may run at once; each occupies a thread.
pub(super) const LOOKS_AT_ONCE: usize = 8;

/// What all watches share.
pub(super) struct WatchContext {
    pub(super) pods: PathBuf,
    pub(super) index: Mutex<Index>,
    pub(super) looks: Semaphore,
    pub(super) wanted: WatchedVolumes,
    pub(super) inlets: Arc<Inlets>,
    pub(super) tell: Sender,
}

/// The receiver of events was dropped.
struct ReceiverDropped;

/// What a pod's launcher is known by.
struct LauncherProcess {
    pid: u32,
    /// The UID of the VMI that it runs.
    vmi: String,
}

/// Watches a pod until its launcher has ended.
pub(super) async fn follow(pod: PodUid, means: Arc<WatchContext>, wished: InletRequests) {
    let Ok((process, pidfd, meant)) = found(&pod, &means).await else { return };
    let ready = wished.ready();
    tokio::select! {
        biased;
        () = end_of(&pidfd) => {}
        ReceiverDropped = tell_of((&pod, &process, &meant), ready, &means) => return,
        () = tend(&pod, &meant, wished, &means) => {}
    }
    // The other future is dropped, and with it the last user of the namespace.
    drop((pidfd, meant));
    means.wanted.set(&pod, [].into());
    tracing::debug!(%pod, pid = process.pid, "the launcher has ended");
    // The receiver may be dropped, which needs no handling here.
    _ = means.tell.send((pod, PodEvent::Gone)).await;
}

/// Searches until the launcher runs. Publishes once that it is absent, and once that it is still missing.
async fn found(
    pod: &PodUid,
    means: &Arc<WatchContext>,
) -> Result<(LauncherProcess, AsyncFd<OwnedFd>, Arc<NamespaceReservation>), ReceiverDropped> {
    let (mut since, mut complained) = (None, false);
    loop {
        let look = {
            let (pod, means) = (pod.clone(), Arc::clone(means));
            move || launcher::find(&means.pods, &means.index, &pod)
        };
        let trouble = match means.blocking(look).await {
            Ok(Launcher { pid, vmi, pidfd, meant }) => match watched(pidfd) {
                Ok(pidfd) => {
                    tracing::debug!(%pod, pid, vmi, "the launcher was found");
                    return Ok((LauncherProcess { pid, vmi }, pidfd, meant.into()));
                }
                Err(error) => error.to_string(),
            },
            Err(absent) => absent.to_string(),
        };
        if since.is_none() {
            means.tell.send((pod.clone(), PodEvent::Absent)).await.map_err(|_| ReceiverDropped)?;
        }
        // The time starts after the first search, because many new pods queue for theirs.
        let start = *since.get_or_insert_with(Instant::now);
        let early = start.elapsed() < AT_FIRST;
        if !early && !std::mem::replace(&mut complained, true) {
            let missing = PodEvent::Missing { reason: trouble };
            means.tell.send((pod.clone(), missing)).await.map_err(|_| ReceiverDropped)?;
        }
        tokio::time::sleep(if early { SOON } else { LATER }).await;
    }
}

#[expect(deprecated, reason = "the descriptor is owned, so it stays open, and the alternative is unsafe")]
fn watched(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(pidfd, Interest::READABLE)
}

/// Waits until a process has ended.
async fn end_of(pidfd: &AsyncFd<OwnedFd>) {
    while let Err(error) = pidfd.readable().await {
        tracing::warn!(%error, "cannot wait for the end of a launcher");
        tokio::time::sleep(RETRY).await;
    }
}

/// Publishes a pod's devices, now and at each change.
async fn tell_of(
    (pod, process, meant): (&PodUid, &LauncherProcess, &Arc<NamespaceReservation>),
    mut ready: watch::Receiver<bool>,
    means: &WatchContext,
) -> ReceiverDropped {
    let mut told = None;
    let mut complained = false;
    loop {
        let open = {
            let meant = Arc::clone(meant);
            move || LinkList::open(&meant)
        };
        let told = match means.blocking(open).await {
            Ok(opened) => tell_changes((pod, process, meant), &mut ready, means, opened, &mut told).await,
            Err(error) => Ok(error.to_string()),
        };
        match told {
            Ok(trouble) if !std::mem::replace(&mut complained, true) => {
                tracing::warn!(%pod, pid = process.pid, "cannot read the pod's devices: {trouble}");
            }
            Ok(_) => {}
            Err(deaf) => return deaf,
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Publishes changes until an error, and returns the error.
async fn tell_changes(
    (pod, process, meant): (&PodUid, &LauncherProcess, &NamespaceReservation),
    ready: &mut watch::Receiver<bool>,
    means: &WatchContext,
    (mut list, mut watch): (LinkList, LinkWatch),
    told: &mut Option<Pod>,
) -> Result<String, ReceiverDropped> {
    loop {
        let (back, seen) = means.blocking(move || look(list)).await;
        list = back;
        let seen = match seen {
            Ok(seen) => seen,
            Err(error) => return Ok(error.to_string()),
        };
        let is_ready = *ready.borrow_and_update();
        let seen = seen.into_iter().filter(|seen| is_ready || seen.name != inlet::PORT).collect();
        let now = describe(pod.clone(), process, meant.name(), seen);
        if told.as_ref() != Some(&now) {
            let event =
                if told.is_none() { PodEvent::Found(now.clone()) } else { PodEvent::Taps(now.clone()) };
            means.tell.send((pod.clone(), event)).await.map_err(|_| ReceiverDropped)?;
            *told = Some(now);
        }
        let changed: io::Result<()> = tokio::select! {
            changed = watch.changed() => changed.map(drop),
            // The sender lives as long as this loop.
            _ = ready.changed() => continue,
            () = tokio::time::sleep(LOOK) => continue,
        };
        if let Err(error) = changed {
            return Ok(error.to_string());
        }
        tokio::time::sleep(SETTLE).await;
    }
}

fn look(mut list: LinkList) -> (LinkList, Result<Vec<EthernetDevice>, LinkError>) {
    let seen = list.look();
    (list, seen)
}

fn describe(uid: PodUid, process: &LauncherProcess, netns: &str, seen: Vec<EthernetDevice>) -> Pod {
    let (mut taps, mut nics) = (Vec::new(), Vec::new());
    for EthernetDevice { name, kind, mac, queues } in seen {
        let tap = match &*kind {
            "tap" => Some(TapKind::Tap),
            "macvtap" => Some(TapKind::Macvtap),
            _ => None,
        };
        match tap {
            Some(kind) => taps.push(Tap { ifname: name, kind, mac, queues }),
            None => nics.push(PodNic { name, kind, mac }),
        }
    }
    taps.sort_by(|a, b| a.ifname.cmp(&b.ifname));
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    let LauncherProcess { pid, vmi } = process;
    Pod { uid, pid: *pid, vmi: vmi.clone(), netns: netns.to_owned(), taps, nics }
}

impl WatchContext {
    /// Runs blocking work on a thread, in turn.
    pub(super) async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        // The semaphore is never closed.
        let _turn = self.looks.acquire().await;
        blocking(work).await
    }
}

// The inlet of one pod: creates it on request, restores it, and removes it.

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
                    tracing::warn!(%pod, "creating the inlet failed; the agent tries again: {error}");
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
