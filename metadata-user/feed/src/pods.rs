//! What a node shows of its virt-launcher pods, without the API server.
//!
//! ```text
//!  <pods>/<uid>/volumes/kubernetes.io~empty-dir/sockets/launcher-sock ── listener ─────┐
//!  <cgroups>/…/pod<uid>/…/cgroup.procs ── name virt-launcher ──────────────────────────┤
//!                                                                                      ▼
//!   Gone ◀── pidfd ── the launcher ── /proc/<pid>/ns/net ── devices, by netlink ───────────▶ Found, Taps
//!  <pods>/<uid>/volumes/kubernetes.io~{secret,configmap,projected}/<volume>/..data ────────▶ Files
//! ```
//!
//! The caller of [`Pods`] names the pods to watch, and gets their events. A process counts as a pod's launcher only if
//! its control group belongs to the pod and its command line names the VMI that it runs. A pidfd ensures that the PID
//! still means this process. The watch releases the pod's network namespace when the launcher ends, before it publishes
//! [`PodEvent::Gone`], so that the namespace can end with the pod.
//!
//! This module trusts nothing that a pod can write. It follows no link out of a volume (`volumes`) or to another
//! socket, and checks every name before it becomes part of a path.

mod follow;
mod launcher;
mod volumes;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::{fmt, io};

use metadata_common::mac::Mac;
use metadata_common::printable::hex;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::AbortHandle;

use follow::{InletRequester, WatchContext, wishes};
use volumes::WatchedVolumes;

use crate::source::TakeoverPause;
use metadata_links::inlet;

pub use follow::AT_FIRST;
pub use volumes::{KEY_BYTES, MAX_KEYS, VOLUME_BYTES, VolumeContent, VolumeError, Volumes};
pub(crate) use volumes::{VolumeReading, VolumeVersion};

/// Most pods to watch; a node runs a few hundred.
pub const MAX_PODS: usize = 4_096;
/// Most watched volumes of one pod.
pub const MAX_VOLUMES: usize = 64;
/// Most events in the queue; a full queue makes the watches wait.
const EVENTS: usize = 1_024;

/// The directories of kubelet and of the control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDirectories {
    /// kubelet's directory of pods.
    pub pods: PathBuf,
    /// The mount point of the node's control groups.
    pub cgroups: PathBuf,
}

impl Default for PodDirectories {
    fn default() -> Self {
        Self { pods: "/var/lib/kubelet/pods".into(), cgroups: "/sys/fs/cgroup".into() }
    }
}

/// The settings of inlets ([`inlet`]).
#[derive(Clone, Debug, Default)]
pub struct Inlets {
    /// The metadata addresses that an inlet serves.
    pub addresses: Vec<IpAddr>,
    /// Keep inlets when the agent ends, like pinned programs.
    pub stay: bool,
    /// Leaves inlets to the next agent.
    pub pause: TakeoverPause,
}

/// Why a pod or its volumes cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// The limit of pods is reached.
    #[error("expected at most {MAX_PODS} pods with VMs on a node, found one more; it is not served")]
    TooManyPods,
    /// A pod has too many volumes.
    #[error("expected at most {MAX_VOLUMES} volumes with data for one VM, found {found}")]
    TooManyVolumes {
        /// The number of volumes.
        found: usize,
    },
    /// The kernel refuses an inotify instance.
    #[error("cannot watch volumes: {0}; each agent takes one of `fs.inotify.max_user_instances`")]
    Inotify(io::Error),
}

type Sender = mpsc::Sender<(PodUid, PodEvent)>;

/// The watched pods. Dropping it ends all watches and releases the pods' namespaces.
pub struct Pods {
    means: Arc<WatchContext>,
    volumes: Volumes,
    followed: HashMap<PodUid, WatchedPod>,
    files: AbortHandle,
}

struct WatchedPod {
    task: AbortHandle,
    inlet: InletRequester,
}

impl Pods {
    /// Starts without pods. The receiver gets the events of watched pods.
    ///
    /// # Errors
    /// [`PodsError::Inotify`].
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O and time.
    pub fn start(places: PodDirectories) -> Result<(Self, mpsc::Receiver<(PodUid, PodEvent)>), PodsError> {
        Self::start_with(places, Inlets::default())
    }

    /// Like [`Pods::start`], with settings of inlets.
    ///
    /// # Errors
    /// The errors of [`Pods::start`].
    ///
    /// # Panics
    /// The panics of [`Pods::start`].
    pub fn start_with(
        places: PodDirectories,
        inlets: Inlets,
    ) -> Result<(Self, mpsc::Receiver<(PodUid, PodEvent)>), PodsError> {
        let (tell, events) = mpsc::channel(EVENTS);
        let PodDirectories { pods, cgroups } = places;
        let wanted = WatchedVolumes::default();
        let watch = volumes::VolumeWatch::new(pods.clone(), wanted.clone(), tell.clone())
            .map_err(PodsError::Inotify)?;
        let files = tokio::spawn(watch.run()).abort_handle();
        let volumes = Volumes::new(&pods);
        let looks = Semaphore::new(follow::LOOKS_AT_ONCE);
        let index = Mutex::new(launcher::Index::new(cgroups));
        let means = Arc::new(WatchContext { pods, index, looks, wanted, inlets: Arc::new(inlets), tell });
        Ok((Self { means, volumes, followed: HashMap::new(), files }, events))
    }

    /// Watches a pod, which need not exist yet. A second call for a pod changes its volumes.
    ///
    /// The events are [`PodEvent::Absent`] if the launcher does not run yet, [`PodEvent::Missing`] if it does not after
    /// [`AT_FIRST`], then [`PodEvent::Found`], its changes, and [`PodEvent::Gone`]. [`PodEvent::Files`] names
    /// each volume when it becomes readable and when its content changes.
    ///
    /// # Errors
    /// [`PodsError::TooManyPods`], [`PodsError::TooManyVolumes`]; the call then changes nothing.
    pub fn watch(&mut self, pod: &PodUid, volumes: BTreeSet<String>) -> Result<(), PodsError> {
        if volumes.len() > MAX_VOLUMES {
            return Err(PodsError::TooManyVolumes { found: volumes.len() });
        }
        if self.followed.get(pod).is_none_or(|pod| pod.task.is_finished()) {
            if self.followed.len() >= MAX_PODS {
                self.followed.retain(|_, pod| !pod.task.is_finished());
            }
            if self.followed.len() >= MAX_PODS {
                return Err(PodsError::TooManyPods);
            }
            let (inlet, wished) = wishes(&self.means.inlets);
            let task = tokio::spawn(follow::follow(pod.clone(), Arc::clone(&self.means), wished));
            self.followed.insert(pod.clone(), WatchedPod { task: task.abort_handle(), inlet });
        }
        self.means.wanted.set(pod, volumes);
        Ok(())
    }

    /// Creates the inlet of a watched pod, with this source MAC, or removes it. The result follows as
    /// [`PodEvent::Taps`].
    pub fn inlet(&mut self, pod: &PodUid, mac: Option<Mac>) {
        if let Some(followed) = self.followed.get(pod) {
            followed.inlet.wish(mac);
        }
    }

    /// Stops watching a pod and removes its inlet. The queue may still hold events of it.
    pub fn forget(&mut self, pod: &PodUid) {
        if let Some(followed) = self.followed.remove(pod) {
            followed.inlet.end();
            followed.task.abort();
        }
        self.means.wanted.set(pod, BTreeSet::new());
    }

    /// Reads a pod's volume now, like [`Volumes::read`].
    ///
    /// # Errors
    /// The errors of [`Volumes::read`].
    pub fn read(&self, pod: &PodUid, volume: &str) -> Result<Option<VolumeContent>, VolumeError> {
        self.volumes.read(pod, volume)
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.files.abort();
        for pod in self.followed.values() {
            pod.task.abort();
        }
    }
}

/// A pod with a running launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The pod's UID.
    pub uid: PodUid,
    /// The launcher's PID.
    pub pid: u32,
    /// The UID of the VMI that the launcher runs, from its command line. KubeVirt's controller writes it there, and
    /// nobody changes it later; a VMI's `status.activePods` is only what somebody wrote.
    pub vmi: String,
    /// The network namespace in the form of [`PortName::netns`](metadata_common::port::PortName::netns):
    /// `/proc/<pid>/ns/net`.
    pub netns: String,
    /// The devices that connect guests, by name.
    pub taps: Vec<Tap>,
    /// All other Ethernet devices except the loopback, by name.
    pub nics: Vec<PodNic>,
}

impl Pod {
    /// True once an inlet is ready. Its port is one of the NICs from then on.
    #[must_use]
    pub fn has_inlet(&self) -> bool {
        self.nics.iter().any(|nic| nic.name == inlet::PORT)
    }

    /// True if any part of an inlet exists, even from a previous agent or unfinished.
    #[must_use]
    pub fn has_some_inlet(&self) -> bool {
        self.nics.iter().any(|nic| nic.name == inlet::POD_END)
    }
}

/// A guest's device in a pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// The interface name.
    pub ifname: String,
    /// How the device connects the guest.
    pub kind: TapKind,
    /// The device's MAC. It equals the guest's if the device is the pod's NIC.
    pub mac: Mac,
    /// Open and enabled queues, at least 1. Guests enable more when their driver starts.
    pub queues: u32,
}

/// The kind of a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapKind {
    /// `tun` in tap mode, which can be a port.
    Tap,
    /// `macvtap`. An XDP program on it sees no frame from its guest.
    Macvtap,
}

/// Another device of the pod: the CNI plugin's, its replacement, or a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodNic {
    /// The interface name.
    pub name: String,
    /// The kernel's kind: `veth`, `dummy`, `bridge`, …; `physical device` if there is none.
    pub kind: String,
    /// The device's MAC. With the bridge binding the dummy of the pod NIC's name has the guest's MAC.
    pub mac: Mac,
}

/// An event of a watched pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// A search found no launcher. The search goes on.
    Absent,
    /// The launcher is still missing after [`AT_FIRST`]. The watch sends this once, and the search goes on.
    Missing {
        /// Why the last search failed.
        reason: String,
    },
    /// The launcher runs. Its taps may still be missing.
    Found(Pod),
    /// The taps or NICs have changed, or a tap's number of queues.
    Taps(Pod),
    /// A volume has become readable, or has new content.
    Files {
        /// The volume's name.
        volume: String,
    },
    /// The launcher has ended. No event of the pod follows.
    Gone,
}

// Checks names that become parts of paths.

/// Most bytes of a pod's UID: a UUID has 36, the hash of a static pod 32.
const UID_MAX: usize = 64;
/// Most bytes of a volume's name (a DNS label has 63, a subdomain 253).
const VOLUME_MAX: usize = 253;

/// A pod's UID, which names kubelet's directories: letters, digits and hyphens, at most 64 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

/// Why a text is not a pod's UID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a pod's UID of 1 to {UID_MAX} letters, digits and hyphens, found `{}`", found.escape_default())]
pub struct NotAPod {
    found: String,
}

impl PodUid {
    /// The uid as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PodUid {
    type Err = NotAPod;

    fn from_str(text: &str) -> Result<Self, NotAPod> {
        if is_uid(text) {
            return Ok(Self(text.into()));
        }
        Err(NotAPod { found: text.chars().take(UID_MAX).collect() })
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// True for a UID: 1 to [`UID_MAX`] letters, digits and hyphens.
fn is_uid(text: &str) -> bool {
    let fits = (1..=UID_MAX).contains(&text.len()) && !text.starts_with('-');
    fits && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// True for a volume name that Kubernetes accepts: lower-case letters, digits, hyphens and dots, without a leading dot.
fn is_volume(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    (1..=VOLUME_MAX).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed)
}

// KubeVirt's names of a network's devices (its `pkg/network/namescheme` and `pkg/network/link`).

/// The tap of the primary network, whatever the name of the pod's NIC.
const PRIMARY_TAP: &str = "tap0";
/// Bytes of the hash in a name, two digits each, without the last digit.
const HASH_BYTES: usize = 6;
/// Digits of the hash in a name.
const HASH_DIGITS: usize = 11;

/// The device names of one network of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicNames {
    /// The CNI plugin's device, or with a bridge binding the dummy that keeps its name and MAC.
    pub pod: String,
    /// The guest's tap.
    pub tap: String,
    /// The bridge between them.
    pub bridge: String,
}

/// The possible device names of a network, the current scheme first, then that of versions that number secondary
/// networks. `ordinal` is the network's position among the VM's secondary ones, from 1; `None` is the primary network.
#[must_use]
pub fn names_of(network: &str, ordinal: Option<usize>) -> Vec<NicNames> {
    let Some(ordinal) = ordinal else {
        return vec![NicNames { pod: "eth0".into(), tap: PRIMARY_TAP.into(), bridge: "k6t-eth0".into() }];
    };
    let hash = network_hash(network);
    let hashed =
        NicNames { pod: format!("pod{hash}"), tap: format!("tap{hash}"), bridge: format!("k6t-{hash}") };
    let numbered = NicNames {
        pod: format!("net{ordinal}"),
        tap: format!("tap{ordinal}"),
        bridge: format!("k6t-net{ordinal}"),
    };
    vec![hashed, numbered]
}

/// The first hex digits of the SHA-256 of a network's name.
fn network_hash(network: &str) -> String {
    let digest = Sha256::digest(network.as_bytes());
    let mut text = hex(&digest[..HASH_BYTES]);
    text.truncate(HASH_DIGITS);
    text
}

#[cfg(test)]
mod tests {
    use super::{
        MAX_PODS, MAX_VOLUMES, PodDirectories, PodEvent, PodUid, Pods, PodsError, UID_MAX, VOLUME_MAX,
        is_volume, names_of,
    };
    use crate::source::{TAKEOVER_PAUSE, TakeoverPause};
    use std::collections::BTreeSet;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};
    use std::time::Duration;
    use tokio::sync::mpsc::Receiver;

    const PATIENCE: Duration = Duration::from_secs(10);
    /// A time in which no event may arrive.
    const QUIET: Duration = Duration::from_millis(300);

    type Events = Receiver<(PodUid, PodEvent)>;

    fn uid(n: usize) -> PodUid {
        format!("6f1b0c1e-8a55-4c8e-9d53-{n:012}").parse().expect("a uid")
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn start(room: &Path) -> (Pods, Events) {
        Pods::start(PodDirectories { pods: room.into(), cgroups: room.join("cgroups") }).expect("an inotify")
    }

    fn volume(room: &Path, pod: &PodUid, name: &str) -> PathBuf {
        room.join(pod.as_str()).join("volumes/kubernetes.io~projected").join(name)
    }

    /// Makes contents current, as kubelet does.
    fn write(room: &Path, pod: &PodUid, name: &str, contents: &str) {
        let volume = volume(room, pod, name);
        let dir = format!("..{}", fastrand::u64(..));
        fs::create_dir_all(volume.join(&dir)).expect("a directory");
        fs::write(volume.join(&dir).join("token"), contents).expect("written");
        symlink(&dir, volume.join("..data_tmp")).expect("a link");
        fs::rename(volume.join("..data_tmp"), volume.join("..data")).expect("renamed");
    }

    /// The next event, without those of the missing launchers.
    async fn next(events: &mut Events) -> Option<(PodUid, PodEvent)> {
        loop {
            match events.recv().await {
                Some((_, PodEvent::Absent)) => {}
                told => return told,
            }
        }
    }

    async fn told(events: &mut Events) -> (PodUid, String) {
        match tokio::time::timeout(PATIENCE, next(events)).await {
            Ok(Some((pod, PodEvent::Files { volume }))) => (pod, volume),
            other => panic!("no word of files: {other:?}"),
        }
    }

    async fn quiet(events: &mut Events) {
        let heard = tokio::time::timeout(QUIET, next(events)).await;
        assert!(heard.is_err(), "{heard:?}");
    }

    fn token(pods: &Pods, pod: &PodUid, volume: &str) -> String {
        let files = pods.read(pod, volume).expect("readable").expect("there");
        String::from_utf8(files["token"].to_vec()).expect("text")
    }

    #[tokio::test]
    async fn a_volume_is_reported_at_first_and_at_each_replacement() {
        let room = tempfile::tempdir().expect("a directory");
        let (mut pods, mut events) = start(room.path());
        write(room.path(), &uid(0), "early", "1");
        pods.watch(&uid(0), names(&["early", "late"])).expect("watched");
        assert_eq!(told(&mut events).await, (uid(0), "early".into()));
        quiet(&mut events).await;
        for turn in ["2", "3"] {
            write(room.path(), &uid(0), "early", turn);
            assert_eq!(told(&mut events).await, (uid(0), "early".into()));
            assert_eq!(token(&pods, &uid(0), "early"), turn);
        }
        write(room.path(), &uid(0), "late", "1");
        assert_eq!(told(&mut events).await, (uid(0), "late".into()));
        quiet(&mut events).await;
    }

    #[tokio::test]
    async fn an_empty_volume_is_reported_once_it_is_written() {
        let room = tempfile::tempdir().expect("a directory");
        let (mut pods, mut events) = start(room.path());
        fs::create_dir_all(volume(room.path(), &uid(0), "optional")).expect("made");
        pods.watch(&uid(0), names(&["optional"])).expect("watched");
        quiet(&mut events).await;
        write(room.path(), &uid(0), "optional", "1");
        assert_eq!(told(&mut events).await, (uid(0), "optional".into()));
    }

    #[tokio::test]
    async fn a_volume_that_is_created_again_is_reported_again() {
        let room = tempfile::tempdir().expect("a directory");
        let (mut pods, mut events) = start(room.path());
        write(room.path(), &uid(0), "token", "1");
        pods.watch(&uid(0), names(&["token"])).expect("watched");
        told(&mut events).await;
        fs::remove_dir_all(volume(room.path(), &uid(0), "token")).expect("removed");
        write(room.path(), &uid(0), "token", "2");
        told(&mut events).await;
        assert_eq!(token(&pods, &uid(0), "token"), "2");
    }

    #[tokio::test]
    async fn only_wanted_volumes_are_reported() {
        let room = tempfile::tempdir().expect("a directory");
        let (mut pods, mut events) = start(room.path());
        for n in 0..2 {
            write(room.path(), &uid(n), "a", "1");
            pods.watch(&uid(n), names(&["a"])).expect("watched");
            assert_eq!(told(&mut events).await, (uid(n), "a".into()));
        }
        write(room.path(), &uid(0), "b", "1");
        pods.watch(&uid(0), names(&["b"])).expect("others");
        assert_eq!(told(&mut events).await, (uid(0), "b".into()));
        pods.forget(&uid(1));
        tokio::time::sleep(QUIET).await;
        for n in 0..2 {
            write(room.path(), &uid(n), "a", "2");
        }
        quiet(&mut events).await;
    }

    #[tokio::test]
    async fn a_link_in_the_place_of_a_volume_is_never_watched() {
        let room = tempfile::tempdir().expect("a directory");
        let (mut pods, mut events) = start(room.path());
        write(room.path(), &uid(1), "theirs", "1");
        let link = volume(room.path(), &uid(0), "mine");
        fs::create_dir_all(link.parent().expect("a directory")).expect("made");
        symlink(volume(room.path(), &uid(1), "theirs"), link).expect("a link");
        pods.watch(&uid(0), names(&["mine"])).expect("watched");
        quiet(&mut events).await;
        write(room.path(), &uid(1), "theirs", "2");
        quiet(&mut events).await;
    }

    #[tokio::test]
    async fn one_pod_beyond_the_limit_is_refused_and_so_are_too_many_volumes() {
        let room = tempfile::tempdir().expect("a directory");
        let (mut pods, _events) = start(room.path());
        let many: BTreeSet<String> = (0..=MAX_VOLUMES).map(|n| format!("v{n}")).collect();
        let error = pods.watch(&uid(0), many).expect_err("too many volumes");
        assert!(matches!(error, PodsError::TooManyVolumes { found } if found == MAX_VOLUMES + 1), "{error}");
        for n in 0..MAX_PODS {
            pods.watch(&uid(n), BTreeSet::new()).expect("room for it");
        }
        let error = pods.watch(&uid(MAX_PODS), BTreeSet::new()).expect_err("too many pods");
        assert!(matches!(error, PodsError::TooManyPods), "{error}");
        pods.watch(&uid(0), names(&["a"])).expect("one that is followed already");
        pods.forget(&uid(1));
        pods.watch(&uid(MAX_PODS), BTreeSet::new()).expect("a place was made");
    }

    #[tokio::test(start_paused = true)]
    async fn inlets_are_left_alone_for_a_while_before_a_takeover() {
        let pause = TakeoverPause::default();
        let ends_within = async |time| tokio::time::timeout(time, pause.end()).await.is_ok();
        assert!(ends_within(Duration::ZERO).await, "no agent is about to take over");
        pause.begin();
        assert!(!ends_within(TAKEOVER_PAUSE / 2).await);
        pause.begin();
        assert!(!ends_within(TAKEOVER_PAUSE * 3 / 4).await, "each call begins again");
        assert!(ends_within(TAKEOVER_PAUSE / 2).await);
    }

    #[test]
    fn only_what_kubelet_names_directories_by_is_a_uid() {
        let longest = "a".repeat(UID_MAX);
        for text in
            ["6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11", "0d1c5b0f9f0f4f5f8c9e0a1b2c3d4e5f", "A", &longest]
        {
            assert_eq!(text.parse::<PodUid>().expect(text).as_str(), text);
        }
        let too_long = "a".repeat(UID_MAX + 1);
        for text in ["", ".", "..", "a/b", "../a", "a\0", "-a", "a b", "ä", &too_long] {
            let error = text.parse::<PodUid>().expect_err(text);
            assert!(error.to_string().contains("hyphens"), "{error}");
        }
    }

    #[test]
    fn only_what_kubernetes_takes_is_a_volume() {
        let longest = "v".repeat(VOLUME_MAX);
        for name in ["imds-token", "cloudinit-udata", "v1.2", &longest] {
            assert!(is_volume(name), "{name}");
        }
        for name in ["", ".", "..", "..data", ".a", "a/b", "A", "a_b", "a\0", &"v".repeat(VOLUME_MAX + 1)] {
            assert!(!is_volume(name), "{name}");
        }
    }

    #[test]
    fn the_primary_network_has_fixed_names() {
        let names = names_of("default", None);
        assert_eq!(names.len(), 1);
        assert_eq!((&*names[0].tap, &*names[0].bridge), ("tap0", "k6t-eth0"));
    }

    #[test]
    fn secondary_networks_are_named_by_hash_and_formerly_by_number() {
        // printf blue | sha256sum
        let names = names_of("blue", Some(2));
        let all: Vec<_> = names.iter().map(|n| (&*n.pod, &*n.tap, &*n.bridge)).collect();
        assert_eq!(
            all,
            [("pod16477688c0e", "tap16477688c0e", "k6t-16477688c0e"), ("net2", "tap2", "k6t-net2")]
        );
        for name in names.iter().flat_map(|names| [&names.pod, &names.tap, &names.bridge]) {
            assert!(name.len() <= 15, "{name}");
        }
    }
}
