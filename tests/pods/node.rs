//! A node with pods on it, and what is told of them.

use metadata_common::mac::Mac;
use metadata_feed::pods::{NicNames, Places, Pod, PodEvent, PodUid, Pods, names_of};
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

/// For what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// For what must not come: a pod is looked for every 50 ms.
pub(crate) const MOMENT: Duration = Duration::from_millis(500);
/// The pod NIC's, which with either binding is the guest's.
pub(crate) const MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x0a]);

pub(crate) type Events = Receiver<(PodUid, PodEvent)>;

/// Numbers of processes are the whole machine's: who wants a certain one is alone meanwhile.
static TURNS: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held, not looked at")]
enum Turn {
    Among(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// Where pods are, and what the node has of them.
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

    /// While no other test of this program starts a process.
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

    pub(crate) fn places(&self) -> Places {
        self.places_without_groups(self.cgroups.root())
    }

    pub(crate) fn places_without_groups(&self, cgroups: &Path) -> Places {
        Places { pods: self.kubelet.pods().into(), cgroups: cgroups.into() }
    }

    pub(crate) fn launch(&self, ns: &Namespace, uid: &PodUid, how: How) -> Launcher {
        Launcher::start(ns, &self.kubelet, &self.cgroups, uid.as_str(), how).expect("a launcher")
    }
}

/// True when the calling test may go on.
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

pub(crate) fn none() -> BTreeSet<String> {
    BTreeSet::new()
}

pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(test)
}

pub(crate) fn follow(places: Places, uid: &PodUid) -> (Pods, Events) {
    let (mut pods, events) = Pods::start(places).expect("an inotify");
    pods.watch(uid, none()).expect("room for it");
    (pods, events)
}

/// What is told next of a pod that is there.
pub(crate) async fn next(events: &mut Events) -> PodEvent {
    loop {
        match timeout(PATIENCE, events.recv()).await {
            Ok(Some((_, PodEvent::Absent))) => {}
            Ok(Some((_, event))) => return event,
            other => panic!("nothing is told: {other:?}"),
        }
    }
}

/// The pod as it is told once it is so.
pub(crate) async fn once(events: &mut Events, so: impl Fn(&Pod) -> bool) -> Pod {
    let mut last = None;
    loop {
        match timeout(PATIENCE, events.recv()).await {
            Ok(Some((_, PodEvent::Found(pod) | PodEvent::Taps(pod)))) if so(&pod) => return pod,
            Ok(Some((_, event))) => last = Some(event),
            other => panic!("{other:?}; last {last:?}"),
        }
    }
}

/// Nothing is told for a while, but that a launcher is not there.
pub(crate) async fn quiet(events: &mut Events) {
    while let Ok(told) = timeout(MOMENT, events.recv()).await {
        assert!(matches!(told, Some((_, PodEvent::Absent))), "{told:?}");
    }
}

/// The names of a pod's taps.
pub(crate) fn taps(pod: &Pod) -> Vec<&str> {
    pod.taps.iter().map(|tap| tap.ifname.as_str()).collect()
}
