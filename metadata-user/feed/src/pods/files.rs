//! Reports when kubelet writes volumes: it watches each by inotify(7) for the rename of `..data`.
//!
//! One inotify instance serves all pods, because a user may have 128 instances but thousands of watches.

use futures_util::StreamExt as _;
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::volumes::{self, DATA};
use super::{PodEvent, PodUid, Sender};

/// Bytes of one read of events.
const BUFFER_BYTES: usize = 16 << 10;
/// How often to look for volumes that kubelet has not written yet.
const AGAIN: Duration = Duration::from_secs(1);

/// The volumes to watch, shared with [`super::Pods`].
#[derive(Clone, Debug, Default)]
pub(super) struct WatchedVolumes(Arc<Board>);

#[derive(Debug, Default)]
struct Board {
    list: Mutex<List>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct List {
    volumes: BTreeMap<PodUid, BTreeSet<String>>,
    /// Pods with a changed set of volumes.
    changed: BTreeSet<PodUid>,
}

impl WatchedVolumes {
    /// Sets the volumes to watch of a pod.
    pub(super) fn set(&self, pod: &PodUid, volumes: BTreeSet<String>) {
        let mut list = self.0.list.lock().unwrap_or_else(PoisonError::into_inner);
        if volumes.is_empty() {
            list.volumes.remove(pod);
        } else {
            list.volumes.insert(pod.clone(), volumes);
        }
        list.changed.insert(pod.clone());
        self.0.changed.notify_one();
    }

    /// The next pod with a changed set of volumes, and the set.
    fn next(&self) -> Option<(PodUid, BTreeSet<String>)> {
        let mut list = self.0.list.lock().unwrap_or_else(PoisonError::into_inner);
        let pod = list.changed.pop_first()?;
        let volumes = list.volumes.get(&pod).cloned().unwrap_or_default();
        Some((pod, volumes))
    }
}

/// A pod's volume.
type Key = (PodUid, String);

/// The state of a volume.
#[derive(Default)]
struct Volume {
    watch: Option<WatchDescriptor>,
    /// Set once its first content was reported.
    told: bool,
    /// Set once its trouble was reported.
    complained: bool,
}

/// Watches volumes until the receiver is dropped.
pub(super) struct VolumeWatch {
    pods: PathBuf,
    wanted: WatchedVolumes,
    tell: Sender,
    events: EventStream<Vec<u8>>,
    volumes: BTreeMap<Key, Volume>,
    by_watch: HashMap<WatchDescriptor, Key>,
    /// Volumes to look for again.
    missing: BTreeSet<Key>,
}

/// The receiver of events was dropped.
struct ReceiverDropped;

impl VolumeWatch {
    pub(super) fn new(pods: PathBuf, wanted: WatchedVolumes, tell: Sender) -> io::Result<Self> {
        let events = Inotify::init()?.into_event_stream(vec![0; BUFFER_BYTES])?;
        let (volumes, by_watch, missing) = (BTreeMap::new(), HashMap::new(), BTreeSet::new());
        Ok(Self { pods, wanted, tell, events, volumes, by_watch, missing })
    }

    pub(super) async fn run(mut self) {
        let mut again = tokio::time::interval(AGAIN);
        again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let wanted = Arc::clone(&self.wanted.0);
            let done = tokio::select! {
                () = wanted.changed.notified() => self.follow().await,
                Some(event) = self.events.next() => self.take(event).await,
                _ = again.tick(), if !self.missing.is_empty() => {
                    let missing = std::mem::take(&mut self.missing);
                    self.look_for(missing).await
                }
                () = self.tell.closed() => Err(ReceiverDropped),
            };
            if done.is_err() {
                return;
            }
        }
    }

    /// Starts and ends watches until they match the wanted volumes.
    async fn follow(&mut self) -> Result<(), ReceiverDropped> {
        while let Some((pod, wanted)) = self.wanted.next() {
            let first = (pod.clone(), String::new());
            let known = self.volumes.range(first..).take_while(|((of, _), _)| *of == pod);
            let known: BTreeSet<String> = known.map(|((_, volume), _)| volume.clone()).collect();
            for volume in known.difference(&wanted) {
                self.drop_volume(&(pod.clone(), volume.clone()));
            }
            let new: BTreeSet<Key> =
                wanted.difference(&known).map(|volume| (pod.clone(), volume.clone())).collect();
            for key in &new {
                self.volumes.insert(key.clone(), Volume::default());
            }
            self.look_for(new).await?;
        }
        Ok(())
    }

    async fn look_for(&mut self, keys: BTreeSet<Key>) -> Result<(), ReceiverDropped> {
        for key in keys {
            if self.is_there(&key) {
                self.say(&key).await?;
            }
        }
        Ok(())
    }

    /// Watches a volume. Returns true if it has content that was not reported yet.
    fn is_there(&mut self, key: &Key) -> bool {
        let Some(known) = self.volumes.get_mut(key) else { return false };
        let (pod, volume) = key;
        let trouble = match volumes::open(&self.pods, pod, volume) {
            Ok(None) => None,
            Ok(Some((dir, _))) => {
                // Watch the opened directory, even if its path now leads to another.
                let path = format!("/proc/self/fd/{}", dir.as_raw_fd());
                let added = self.events.watches().add(&path, mask());
                // Watch first, so that a write in between causes an event.
                let written = volumes::is_written(&dir);
                match added {
                    Ok(watch) => {
                        if known.watch.as_ref() != Some(&watch) {
                            // Another directory was mounted over it.
                            let before = known.watch.replace(watch.clone());
                            before.and_then(|before| self.by_watch.remove(&before));
                            self.by_watch.insert(watch, key.clone());
                        }
                        if !written {
                            self.missing.insert(key.clone());
                        }
                        return written && !std::mem::replace(&mut known.told, true);
                    }
                    Err(error) if written => {
                        let why =
                            "its changes go unnoticed: more may be allowed by `fs.inotify.max_user_watches`";
                        if !std::mem::replace(&mut known.complained, true) {
                            tracing::warn!(%pod, volume, %error, "cannot watch the volume, {why}");
                        }
                        self.missing.insert(key.clone());
                        return !std::mem::replace(&mut known.told, true);
                    }
                    Err(_) => None,
                }
            }
            Err(error) => Some(error),
        };
        if let Some(error) = trouble
            && !std::mem::replace(&mut known.complained, true)
        {
            tracing::warn!(%pod, "{error}");
        }
        self.missing.insert(key.clone());
        false
    }

    fn drop_volume(&mut self, key: &Key) {
        self.missing.remove(key);
        let watch = self.volumes.remove(key).and_then(|volume| volume.watch);
        if let Some(watch) = watch {
            self.by_watch.remove(&watch);
            // Fails if the directory is gone, and its watch with it.
            _ = self.events.watches().remove(watch);
        }
    }

    async fn take(&mut self, event: io::Result<EventOwned>) -> Result<(), ReceiverDropped> {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::warn!(%error, "cannot read changes of volumes");
                tokio::time::sleep(AGAIN).await;
                return Ok(());
            }
        };
        if event.mask.contains(EventMask::Q_OVERFLOW) {
            return self.say_all().await;
        }
        let Some(key) = self.by_watch.get(&event.wd).cloned() else { return Ok(()) };
        let gone = EventMask::IGNORED | EventMask::UNMOUNT | EventMask::DELETE_SELF | EventMask::MOVE_SELF;
        if event.mask.intersects(gone) {
            self.by_watch.remove(&event.wd);
            let volume = self.volumes.entry(key.clone()).or_default();
            (volume.watch, volume.told) = (None, false);
            self.missing.insert(key);
            return Ok(());
        }
        if event.name.as_deref() != Some(OsStr::new(DATA)) {
            return Ok(());
        }
        self.missing.remove(&key);
        self.volumes.entry(key.clone()).or_default().told = true;
        self.say(&key).await
    }

    /// Events were lost, so every volume may have changed.
    async fn say_all(&mut self) -> Result<(), ReceiverDropped> {
        let told = self.volumes.iter().filter(|(_, volume)| volume.told).map(|(key, _)| key.clone());
        for key in told.collect::<Vec<_>>() {
            self.say(&key).await?;
        }
        Ok(())
    }

    async fn say(&self, (pod, volume): &Key) -> Result<(), ReceiverDropped> {
        let event = PodEvent::Files { volume: volume.clone() };
        self.tell.send((pod.clone(), event)).await.map_err(|_| ReceiverDropped)
    }
}

fn mask() -> WatchMask {
    WatchMask::MOVED_TO
        | WatchMask::CREATE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}
