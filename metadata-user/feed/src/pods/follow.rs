//! One pod, from before its launcher starts until that ends.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::cgroup::Index;
use super::files::Wanted;
use super::launcher::{self, Launcher};
use super::tend::{Wished, tend};
use super::{Inlets, Pod, PodEvent, PodNic, PodUid, Sender, Tap, TapKind};
use crate::blocking;
use metadata_links::devices::LinkList;
use metadata_links::devices::Seen;
use metadata_links::error::LinkError;
use metadata_links::inlet;
use metadata_links::processes::Meant;
use metadata_links::watch::LinkWatch;

/// How long a launcher is looked for often, before its absence counts as a fault.
pub const AT_FIRST: Duration = Duration::from_secs(10);
/// How often it is looked for during that time, and afterwards.
const SOON: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_secs(1);
/// How long changes of devices are gathered: a NIC is made in several steps.
const SETTLE: Duration = Duration::from_millis(20);
/// How often devices are looked at though nothing was told: the kernel tells of no queue that a guest enables.
const LOOK: Duration = Duration::from_secs(10);
/// How long until a namespace that could not be looked at is tried again.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// How many pods are looked for or at, at once: each takes a thread meanwhile.
pub(super) const LOOKS_AT_ONCE: usize = 8;

/// What following a pod takes.
pub(super) struct Means {
    pub(super) pods: PathBuf,
    pub(super) index: Mutex<Index>,
    pub(super) looks: Semaphore,
    pub(super) wanted: Wanted,
    pub(super) inlets: Arc<Inlets>,
    pub(super) tell: Sender,
}

/// Nobody listens any more.
struct Deaf;

/// Follows a pod until its launcher has ended.
pub(super) async fn follow(pod: PodUid, means: Arc<Means>, wished: Wished) {
    let Ok((pid, pidfd, meant)) = found(&pod, &means).await else { return };
    let ready = wished.ready();
    tokio::select! {
        biased;
        () = end_of(&pidfd) => {}
        Deaf = tell_of((&pod, pid, &meant), ready, &means) => return,
        () = tend(&pod, &meant, wished, &means) => {}
    }
    // What looked at the namespace has been dropped with the other future.
    drop((pidfd, meant));
    means.wanted.set(&pod, [].into());
    tracing::debug!(%pod, pid, "the launcher has ended");
    // Nobody listens: there is nobody to tell.
    _ = means.tell.send((pod, PodEvent::Gone)).await;
}

/// Looks for the launcher until it is there. Reports once that it is not there yet, and once that it is still missing.
async fn found(pod: &PodUid, means: &Arc<Means>) -> Result<(u32, AsyncFd<OwnedFd>, Arc<Meant>), Deaf> {
    let (mut since, mut complained) = (None, false);
    loop {
        let look = {
            let (pod, means) = (pod.clone(), Arc::clone(means));
            move || launcher::find(&means.pods, &means.index, &pod)
        };
        let trouble = match means.blocking(look).await {
            Ok(Launcher { pid, pidfd, meant }) => match watched(pidfd) {
                Ok(pidfd) => {
                    tracing::debug!(%pod, pid, "the launcher was found");
                    return Ok((pid, pidfd, meant.into()));
                }
                Err(error) => error.to_string(),
            },
            Err(absent) => absent.to_string(),
        };
        if since.is_none() {
            means.tell.send((pod.clone(), PodEvent::Absent)).await.map_err(|_| Deaf)?;
        }
        // Since the end of the first look: many pods at once wait for their turns.
        let start = *since.get_or_insert_with(Instant::now);
        let early = start.elapsed() < AT_FIRST;
        if !early && !std::mem::replace(&mut complained, true) {
            let missing = PodEvent::Missing { reason: trouble };
            means.tell.send((pod.clone(), missing)).await.map_err(|_| Deaf)?;
        }
        tokio::time::sleep(if early { SOON } else { LATER }).await;
    }
}

#[expect(
    deprecated,
    reason = "what it warns of cannot befall a descriptor it owns, and the other form is unsafe"
)]
fn watched(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(pidfd, Interest::READABLE)
}

/// Waits until a process has ended.
async fn end_of(pidfd: &AsyncFd<OwnedFd>) {
    while let Err(error) = pidfd.readable().await {
        tracing::warn!(%error, "waiting for the end of a launcher");
        tokio::time::sleep(RETRY).await;
    }
}

/// Tells of a pod's devices, now and as they change.
async fn tell_of(
    (pod, pid, meant): (&PodUid, u32, &Arc<Meant>),
    mut ready: watch::Receiver<bool>,
    means: &Means,
) -> Deaf {
    let mut told = None;
    let mut complained = false;
    loop {
        let open = {
            let meant = Arc::clone(meant);
            move || LinkList::open(&meant)
        };
        let told = match means.blocking(open).await {
            Ok(opened) => tell_changes((pod, pid, meant), &mut ready, means, opened, &mut told).await,
            Err(error) => Ok(error.to_string()),
        };
        match told {
            Ok(trouble) if !std::mem::replace(&mut complained, true) => {
                tracing::warn!(%pod, pid, "devices cannot be looked at: {trouble}");
            }
            Ok(_) => {}
            Err(deaf) => return deaf,
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Tells what differs from what was told, until there is trouble: that is returned.
async fn tell_changes(
    (pod, pid, meant): (&PodUid, u32, &Meant),
    ready: &mut watch::Receiver<bool>,
    means: &Means,
    (mut list, mut watch): (LinkList, LinkWatch),
    told: &mut Option<Pod>,
) -> Result<String, Deaf> {
    loop {
        let (back, seen) = means.blocking(move || look(list)).await;
        list = back;
        let seen = match seen {
            Ok(seen) => seen,
            Err(error) => return Ok(error.to_string()),
        };
        let is_ready = *ready.borrow_and_update();
        let seen = seen.into_iter().filter(|seen| is_ready || seen.name != inlet::PORT).collect();
        let now = describe(pod.clone(), pid, meant.name(), seen);
        if told.as_ref() != Some(&now) {
            let event =
                if told.is_none() { PodEvent::Found(now.clone()) } else { PodEvent::Taps(now.clone()) };
            means.tell.send((pod.clone(), event)).await.map_err(|_| Deaf)?;
            *told = Some(now);
        }
        let changed: io::Result<()> = tokio::select! {
            changed = watch.changed() => changed.map(drop),
            // Its sender lives as long as this is asked.
            _ = ready.changed() => continue,
            () = tokio::time::sleep(LOOK) => continue,
        };
        if let Err(error) = changed {
            return Ok(error.to_string());
        }
        tokio::time::sleep(SETTLE).await;
    }
}

fn look(mut list: LinkList) -> (LinkList, Result<Vec<Seen>, LinkError>) {
    let seen = list.look();
    (list, seen)
}

/// A pod by its devices.
fn describe(uid: PodUid, pid: u32, netns: &str, seen: Vec<Seen>) -> Pod {
    let (mut taps, mut nics) = (Vec::new(), Vec::new());
    for Seen { name, kind, mac, queues } in seen {
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
    Pod { uid, pid, netns: netns.to_owned(), taps, nics }
}

impl Means {
    /// Runs what blocks where it may.
    pub(super) async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        // Never closed: a turn comes.
        let _turn = self.looks.acquire().await;
        blocking(work).await
    }
}
