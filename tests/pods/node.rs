//! A node with pods, and the events about them.

use metadata_common::mac::Mac;
use metadata_feed::pods::{NicNames, Pod, PodDirectories, PodEvent, PodUid, Pods, names_of};
use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use support::netns::Namespace;
use support::pod::{Cgroups, How, Kubelet, Launcher, fresh_uid};
use support::privileged;
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

/// Longest wait for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Wait after which something counts as not happening. The agent searches for a pod every 50 ms.
pub(crate) const MOMENT: Duration = Duration::from_millis(500);
/// The MAC of the pod's NIC. With either binding the guest has the same MAC.
pub(crate) const MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x0a]);

pub(crate) type Events = Receiver<(PodUid, PodEvent)>;

/// Lets a test that needs a certain PID run alone, because the whole machine shares the PIDs.
static TURNS: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held, not read")]
enum Turn {
    Among(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// The namespace of a node, and its files and control groups of pods.
pub(crate) struct Node {
    _turn: Turn,
    pub(crate) ns: Namespace,
    pub(crate) kubelet: Kubelet,
    pub(crate) cgroups: Cgroups,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self::at(Turn::Among(TURNS.read().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Like [`new`](Self::new), but no other test of this program starts a process meanwhile.
    pub(crate) fn alone() -> Self {
        Self::at(Turn::Alone(TURNS.write().unwrap_or_else(PoisonError::into_inner)))
    }

    fn at(turn: Turn) -> Self {
        Self {
            _turn: turn,
            ns: Namespace::new("node").expect("a namespace"),
            kubelet: Kubelet::new().expect("a directory"),
            cgroups: Cgroups::new().expect("control groups"),
        }
    }

    pub(crate) fn places(&self) -> PodDirectories {
        self.places_without_groups(self.cgroups.root())
    }

    pub(crate) fn places_without_groups(&self, cgroups: &Path) -> PodDirectories {
        PodDirectories { pods: self.kubelet.pods().into(), cgroups: cgroups.into() }
    }

    pub(crate) fn launch(&self, ns: &Namespace, uid: &PodUid, how: How) -> Launcher {
        Launcher::start(ns, &self.kubelet, &self.cgroups, uid.as_str(), how).expect("a launcher")
    }
}

/// True when the calling test may run.
#[track_caller]
pub(crate) fn allowed() -> bool {
    privileged::or_skip() && privileged::or_skip_for(Cgroups::missing().as_deref())
}

pub(crate) fn uid() -> PodUid {
    fresh_uid().parse().expect("a uid")
}

pub(crate) fn primary() -> NicNames {
    names_of("default", None).remove(0)
}

pub(crate) fn no_volumes() -> BTreeSet<String> {
    BTreeSet::new()
}

pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(test)
}

pub(crate) fn follow(places: PodDirectories, uid: &PodUid) -> (Pods, Events) {
    let (mut pods, events) = Pods::start(places).expect("an inotify");
    pods.watch(uid, no_volumes()).expect("room for it");
    (pods, events)
}

/// The next event other than [`PodEvent::Absent`].
pub(crate) async fn next_event(events: &mut Events) -> PodEvent {
    loop {
        match timeout(PATIENCE, events.recv()).await {
            Ok(Some((_, PodEvent::Absent))) => {}
            Ok(Some((_, event))) => return event,
            other => panic!("no event: {other:?}"),
        }
    }
}

/// Waits for an event with a pod for which `holds` is true.
pub(crate) async fn pod_where(events: &mut Events, holds: impl Fn(&Pod) -> bool) -> Pod {
    let mut last = None;
    loop {
        match timeout(PATIENCE, events.recv()).await {
            Ok(Some((_, PodEvent::Found(pod) | PodEvent::Taps(pod)))) if holds(&pod) => return pod,
            Ok(Some((_, event))) => last = Some(event),
            other => panic!("{other:?}; last {last:?}"),
        }
    }
}

/// Asserts that no event other than [`PodEvent::Absent`] arrives within [`MOMENT`].
pub(crate) async fn expect_no_event(events: &mut Events) {
    while let Ok(event) = timeout(MOMENT, events.recv()).await {
        assert!(matches!(event, Some((_, PodEvent::Absent))), "{event:?}");
    }
}

/// The names of a pod's taps.
pub(crate) fn taps(pod: &Pod) -> Vec<&str> {
    pod.taps.iter().map(|tap| tap.ifname.as_str()).collect()
}
