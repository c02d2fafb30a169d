//! What the agent can observe of a virt-launcher pod on its node: its launcher, its taps, its volumes and its end.
//!
//! Neither a process with a reused PID nor one of another pod is taken for the launcher. When a pod ends, its namespace
//! vanishes.

use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_datapath::sandbox::{SandboxMode, SandboxStage};
use metadata_feed::pods::{
    NicNames, Pod, PodDirectories, PodEvent, PodUid, Pods, TapKind, VolumeError, names_of,
};
use metadata_links::netns::forget_process;
use metadata_steer::{DeviceLookup, SteerConfig, Steering, exists};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::future::Future;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use support::agent::{Agent, PortArgument, arguments_with_pins};
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, Spec};
use support::netns::Namespace;
use support::pod::{
    Binding, Cgroups, Driver, How, Kubelet, Launcher, Plugin, PodNetwork, fresh_uid, is_there, vmi_uid,
};
use support::privilege::QEMU;
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

// A node with pods, and the events about them.

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(20);
/// Wait after which something counts as not happening. The agent searches for a pod every 50 ms.
const MOMENT: Duration = Duration::from_millis(500);
/// The MAC of the pod's NIC. With either binding the guest has the same MAC.
const MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x0a]);

type Events = Receiver<(PodUid, PodEvent)>;

/// Lets a test that needs a certain PID run alone, because the whole machine shares the PIDs.
static TURNS: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held, not read")]
enum Turn {
    Among(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// The namespace of a node, and its files and control groups of pods.
struct Node {
    _turn: Turn,
    ns: Namespace,
    kubelet: Kubelet,
    cgroups: Cgroups,
}

impl Node {
    fn new() -> Self {
        Self::at(Turn::Among(TURNS.read().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Like [`new`](Self::new), but no other test of this program starts a process meanwhile.
    fn alone() -> Self {
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

    fn places(&self) -> PodDirectories {
        self.places_without_groups(self.cgroups.root())
    }

    fn places_without_groups(&self, cgroups: &Path) -> PodDirectories {
        PodDirectories { pods: self.kubelet.pods().into(), cgroups: cgroups.into() }
    }

    fn launch(&self, ns: &Namespace, uid: &PodUid, how: How) -> Launcher {
        Launcher::start(ns, &self.kubelet, &self.cgroups, uid.as_str(), how).expect("a launcher")
    }
}

/// True when the calling test may run.
#[track_caller]
fn allowed() -> bool {
    privileged::or_skip() && privileged::or_skip_for(Cgroups::missing().as_deref())
}

fn uid() -> PodUid {
    fresh_uid().parse().expect("a uid")
}

fn primary() -> NicNames {
    names_of("default", None).remove(0)
}

fn no_volumes() -> BTreeSet<String> {
    BTreeSet::new()
}

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(test)
}

fn follow(places: PodDirectories, uid: &PodUid) -> (Pods, Events) {
    let (mut pods, events) = Pods::start(places).expect("an inotify");
    pods.watch(uid, no_volumes()).expect("room for it");
    (pods, events)
}

/// The next event other than [`PodEvent::Absent`].
async fn next_event(events: &mut Events) -> PodEvent {
    loop {
        match timeout(PATIENCE, events.recv()).await {
            Ok(Some((_, PodEvent::Absent))) => {}
            Ok(Some((_, event))) => return event,
            other => panic!("no event: {other:?}"),
        }
    }
}

/// Waits for an event with a pod for which `holds` is true.
async fn pod_where(events: &mut Events, holds: impl Fn(&Pod) -> bool) -> Pod {
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
async fn expect_no_event(events: &mut Events) {
    while let Ok(event) = timeout(MOMENT, events.recv()).await {
        assert!(matches!(event, Some((_, PodEvent::Absent))), "{event:?}");
    }
}

/// The names of a pod's taps.
fn taps(pod: &Pod) -> Vec<&str> {
    pod.taps.iter().map(|tap| tap.ifname.as_str()).collect()
}

// The agent finds the launcher of a pod and mistakes no other process for it.

const NOWHERE: &str = "/nonexistent";

#[privileged::test(allowed)]
fn a_launcher_is_found_by_its_socket_even_if_its_path_is_long() {
    let (node, uid) = (Node::new(), uid());
    let pod = Namespace::new("pod").expect("a namespace");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(Path::new(NOWHERE)), &uid);
        expect_no_event(&mut events).await;
        let launcher = node.launch(&pod, &uid, How::default());
        let PodEvent::Found(found) = next_event(&mut events).await else { panic!("not found") };
        assert_eq!((&found.uid, found.pid, &found.netns), (&uid, launcher.pid(), &launcher.netns()));
        let path = node.kubelet.sockets(uid.as_str()).expect("a directory").join("launcher-sock");
        assert!(path.as_os_str().len() > 100, "{}", path.display());
    });
}

#[privileged::test(allowed)]
fn an_absent_launcher_is_reported_once() {
    let (node, uid) = (Node::new(), uid());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let event = timeout(PATIENCE, events.recv()).await;
        assert!(matches!(&event, Ok(Some((pod, PodEvent::Absent))) if *pod == uid), "{event:?}");
        let again = timeout(MOMENT, events.recv()).await;
        assert!(again.is_err(), "{again:?}");
    });
}

#[privileged::test(allowed)]
fn a_launcher_that_does_not_listen_is_found_by_control_group_and_name() {
    let node = Node::new();
    let pod = Namespace::new("pod").expect("a namespace");
    for driver in [Driver::Systemd, Driver::Cgroupfs] {
        let uid = uid();
        let how = How { listens: false, group: Some(driver), ..How::default() };
        run(async {
            let (_pods, mut events) = follow(node.places(), &uid);
            // The pod's pause process starts before the launcher.
            let _pause = node.launch(&pod, &uid, How { name: "pause", ..how });
            expect_no_event(&mut events).await;
            let launcher = node.launch(&pod, &uid, how);
            let PodEvent::Found(found) = next_event(&mut events).await else { panic!("not found") };
            assert_eq!(found.pid, launcher.pid(), "{driver:?}");
        });
    }
}

#[privileged::test(allowed)]
fn no_process_of_another_pod_is_mistaken_for_the_launcher() {
    let node = Node::new();
    let [mine, theirs] = [uid(), uid()];
    let pod = Namespace::new("pod").expect("a namespace");
    // The other pod's launcher listens at this pod's path, and an outdated cgroup tree lists it for this pod.
    let other = node.launch(&pod, &theirs, How::default());
    let place = node.kubelet.sockets(mine.as_str()).expect("a directory").join("launcher-sock");
    let socket = node.kubelet.sockets(theirs.as_str()).expect("a directory").join("launcher-sock");
    fs::hard_link(socket, &place).expect("another name");
    let stale = tempfile::tempdir().expect("a directory");
    let group = stale.path().join("kubepods").join(format!("pod{mine}"));
    fs::create_dir_all(&group).expect("a group");
    fs::write(group.join("cgroup.procs"), format!("{}\n", other.pid())).expect("written");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(stale.path()), &mine);
        expect_no_event(&mut events).await;
    });
    // The same tree also lists this pod's launcher.
    let launcher = node.launch(&pod, &mine, How::default());
    fs::write(group.join("cgroup.procs"), format!("{}\n{}\n", other.pid(), launcher.pid())).expect("written");
    fs::remove_file(place).expect("removed");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(stale.path()), &mine);
        let PodEvent::Found(found) = next_event(&mut events).await else { panic!("not found") };
        assert_eq!(found.pid, launcher.pid());
    });
}

#[privileged::test(allowed)]
fn a_process_that_names_no_vmi_is_no_launcher_and_one_that_does_is_found_with_it() {
    let node = Node::new();
    let pod = Namespace::new("pod").expect("a namespace");
    for listens in [true, false] {
        let uid = uid();
        let how = How { listens, ..How::default() };
        run(async {
            let (_pods, mut events) = follow(node.places(), &uid);
            let nameless = node.launch(&pod, &uid, How { names_vmi: false, ..how });
            expect_no_event(&mut events).await;
            nameless.end().expect("it runs");
            let launcher = node.launch(&pod, &uid, how);
            let PodEvent::Found(found) = next_event(&mut events).await else { panic!("not found") };
            assert_eq!((found.pid, found.vmi), (launcher.pid(), vmi_uid(uid.as_str())), "{listens}");
        });
    }
}

#[privileged::test(allowed)]
fn a_symbolic_link_to_a_launchers_socket_is_not_followed() {
    let (node, uid) = (Node::new(), uid());
    let pod = Namespace::new("pod").expect("a namespace");
    let _launcher = node.launch(&pod, &uid, How::default());
    let sockets = node.kubelet.sockets(uid.as_str()).expect("a directory");
    // The link leads to the right socket, but it could be redirected between the check and the connection.
    fs::rename(sockets.join("launcher-sock"), sockets.join("elsewhere")).expect("renamed");
    symlink("elsewhere", sockets.join("launcher-sock")).expect("a link");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(Path::new(NOWHERE)), &uid);
        expect_no_event(&mut events).await;
        fs::rename(sockets.join("elsewhere"), sockets.join("launcher-sock")).expect("renamed");
        assert!(matches!(next_event(&mut events).await, PodEvent::Found(_)));
    });
}

/// The file with the last PID that the kernel assigned.
const LAST_NUMBER: &str = "/proc/sys/kernel/ns_last_pid";
/// Attempts per PID. Other processes of this machine may take it.
const TRIES: usize = 20;
/// Number of PIDs to try.
const ROUNDS: usize = 50;
/// The unit of a process's start: USER_HZ (proc_pid_stat(5)).
const TICK: Duration = Duration::from_millis(10);

/// Starts launchers until one has the given PID.
fn launch_as(pid: u32, start: impl Fn() -> Launcher) -> Option<Launcher> {
    for _ in 0..TRIES {
        // The thread that starts the launcher gets the PID before it, unless another process is faster.
        fs::write(LAST_NUMBER, (pid - 2).to_string()).expect("the next number");
        let launcher = start();
        if launcher.pid() == pid {
            return Some(launcher);
        }
    }
    None
}

#[test]
fn a_reused_pid_leads_to_no_other_pod() {
    let refused = fs::OpenOptions::new().write(true).open(LAST_NUMBER).err();
    let refused = refused.map(|error| format!("PIDs cannot be reused here: {error}"));
    if !allowed() || !privileged::or_skip_for(refused.as_deref()) {
        return;
    }
    let node = Node::alone();
    let spaces = [0, 1].map(|_| Namespace::new("pod").expect("a namespace"));
    run(async {
        let (mut pods, mut events) = Pods::start(node.places()).expect("an inotify");
        let mut round = async || {
            let first = uid();
            pods.watch(&first, no_volumes()).expect("room for it");
            let launcher = node.launch(&spaces[0], &first, How::default());
            assert!(matches!(next_event(&mut events).await, PodEvent::Found(_)));
            // The agent looks up the port when it attaches the pod's tap.
            let port = PortName { ifname: "tap0".into(), netns: Some(launcher.netns()) };
            node.ns.run_in(|| exists(&port)).expect("the launcher's namespace");
            let (pid, netns) = (launcher.pid(), launcher.netns());
            launcher.end().expect("the launcher ends");
            assert_eq!(next_event(&mut events).await, PodEvent::Gone);
            // A process is known by its start, in ticks. PIDs that are counted up come back much later.
            tokio::time::sleep(2 * TICK).await;
            let second = uid();
            let Some(again) = launch_as(pid, || node.launch(&spaces[1], &second, How::default())) else {
                forget_process(&netns);
                return None;
            };
            Some((again, second, port, netns))
        };
        let mut given = None;
        for _ in 0..ROUNDS {
            given = round().await;
            if given.is_some() {
                break;
            }
        }
        let (again, second, port, netns) = given.expect("a reused PID");
        pods.watch(&second, no_volumes()).expect("room for it");
        // While a record still names the first launcher, its path leads nowhere and the second pod waits.
        let error = node.ns.run_in(|| exists(&port)).expect_err("another process");
        assert!(error.to_string().contains("another process"), "{error}");
        expect_no_event(&mut events).await;
        forget_process(&netns);
        let event = timeout(PATIENCE, events.recv()).await.expect("in time");
        let Some((uid, PodEvent::Found(found))) = event else { panic!("not found: {event:?}") };
        assert_eq!((uid, found.pid), (second, again.pid()));
        assert!(timeout(MOMENT, events.recv()).await.is_err(), "an event of the ended pod");
    });
}

// The agent reports taps and NICs of a pod when they appear, change and vanish.

/// True if the device `name` of the pod has the guest's MAC.
fn has_nic(pod: &Pod, name: &str) -> bool {
    pod.nics.iter().any(|nic| nic.name == name && nic.mac == MAC)
}

#[privileged::test(allowed)]
fn both_bindings_show_one_tap_and_the_guests_mac() {
    let node = Node::new();
    for binding in [Binding::Masquerade, Binding::Bridge] {
        let uid = uid();
        let network = PodNetwork::new(&node.ns).expect("a pod");
        network.add_nic(&primary(), MAC).expect("a NIC");
        let _tap = network.bind(&primary(), binding, Shape::virtio()).expect("a tap");
        let _launcher = node.launch(network.ns(), &uid, How::default());
        run(async {
            let (_pods, mut events) = follow(node.places(), &uid);
            let PodEvent::Found(pod) = next_event(&mut events).await else { panic!("not found") };
            let found: Vec<_> =
                pod.taps.iter().map(|tap| (tap.ifname.as_str(), tap.kind, tap.queues)).collect();
            assert_eq!(found, [("tap0", TapKind::Tap, 1)], "{binding:?}");
            assert_ne!(pod.taps[0].mac, Mac::default(), "the kernel assigns a MAC");
            assert!(has_nic(&pod, "eth0"), "{binding:?}: {:?}", pod.nics);
            let bridge = pod.nics.iter().find(|nic| nic.name == "k6t-eth0").expect("a bridge");
            assert_eq!(bridge.kind, "bridge");
            let moved = pod.nics.iter().any(|nic| nic.name == "eth0-nic");
            assert_eq!(moved, binding == Binding::Bridge, "{:?}", pod.nics);
        });
    }
}

#[privileged::test(allowed)]
fn later_and_secondary_taps_and_their_removal_are_reported() {
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let _launcher = node.launch(network.ns(), &uid, How::default());
    let blue = names_of("blue", Some(1)).remove(0);
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let PodEvent::Found(pod) = next_event(&mut events).await else { panic!("not found") };
        assert_eq!((taps(&pod), pod.nics.len()), (vec![], 0));

        network.add_nic(&primary(), MAC).expect("a NIC");
        let _tap = network.bind(&primary(), Binding::Masquerade, Shape::virtio()).expect("a tap");
        pod_where(&mut events, |pod| taps(pod) == ["tap0"]).await;

        network.add_nic(&blue, MAC).expect("a second NIC");
        let tap = network.bind(&blue, Binding::Bridge, Shape::virtio()).expect("a second tap");
        let pod = pod_where(&mut events, |pod| pod.taps.len() == 2).await;
        assert_eq!(taps(&pod), ["tap0", "tap16477688c0e"]);
        assert!(has_nic(&pod, "pod16477688c0e"), "{:?}", pod.nics);

        network.ns().ip("link del tap16477688c0e").expect("unplugged");
        drop(tap);
        pod_where(&mut events, |pod| taps(pod) == ["tap0"]).await;
        expect_no_event(&mut events).await;
    });
}

#[privileged::test(allowed)]
fn a_macvtap_is_reported_as_such_and_not_as_a_tap() {
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    network.add_nic(&primary(), MAC).expect("a NIC");
    let made = network.ns().ip("link add link eth0 name tap0 type macvtap mode bridge");
    let missing = made.err().map(|error| format!("there is no macvtap: {error:#}"));
    if !privileged::or_skip_for(missing.as_deref()) {
        return;
    }
    let _launcher = node.launch(network.ns(), &uid, How::default());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let PodEvent::Found(pod) = next_event(&mut events).await else { panic!("not found") };
        let kinds: Vec<_> = pod.taps.iter().map(|tap| (tap.ifname.as_str(), tap.kind)).collect();
        assert_eq!(kinds, [("tap0", TapKind::Macvtap)]);
    });
}

#[privileged::test(allowed)]
fn queues_that_a_guest_opens_or_closes_later_are_reported() {
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    network.add_nic(&primary(), MAC).expect("a NIC");
    let shape = Shape { queues: 2, vnet_hdr: true };
    let tap = network.bind(&primary(), Binding::Masquerade, shape).expect("a tap");
    let _launcher = node.launch(network.ns(), &uid, How::default());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let queues = |pod: &Pod| pod.taps.first().map(|tap| tap.queues);
        pod_where(&mut events, |pod| queues(pod) == Some(2)).await;
        let more = [0, 1].map(|_| tap.another_queue(network.ns()).expect("another queue"));
        pod_where(&mut events, |pod| queues(pod) == Some(4)).await;
        drop(more);
        pod_where(&mut events, |pod| queues(pod) == Some(2)).await;
    });
}

// Following pods inside the agent's sandbox, with only the capabilities that the DaemonSet grants.

/// The capabilities that the DaemonSet grants.
const GRANTED: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::IPC_LOCK);

/// Runs `work` on a thread with `capabilities`, inside the sandbox of a serving agent.
fn sandboxed<T: Send>(capabilities: CapabilitySet, work: impl AsyncFnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let inside = || {
            let sets = CapabilitySets {
                effective: capabilities,
                permitted: capabilities,
                inheritable: CapabilitySet::empty(),
            };
            set_capabilities(None, sets).expect("fewer capabilities");
            for stage in [SandboxStage::Start, SandboxStage::Serve] {
                SandboxMode::On.enter(stage).expect("a sandbox");
            }
            run(work())
        };
        scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Writes a token as kubelet does for a pod that runs as another user.
fn write_token(kubelet: &Kubelet, uid: &PodUid, token: &str) {
    kubelet
        .write(uid.as_str(), Plugin::Projected, "imds-token", &[("token", token.as_bytes())])
        .expect("written");
    let volume = kubelet.volume(uid.as_str(), Plugin::Projected, "imds-token");
    let token = volume.join("token");
    chown(&token, Some(QEMU), Some(QEMU)).expect("another owner");
    fs::set_permissions(&token, Permissions::from_mode(0o600)).expect("private");
}

#[privileged::test(allowed)]
fn the_daemonsets_capabilities_suffice_to_find_follow_and_read_a_pod() {
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    network.add_nic(&primary(), MAC).expect("a NIC");
    let launcher = node.launch(network.ns(), &uid, How::default());
    write_token(&node.kubelet, &uid, "first");
    // The main thread carries out the actions of the node and the pod outside the sandbox.
    let (ask, asked) = std::sync::mpsc::channel::<&str>();
    let (done, is_done) = std::sync::mpsc::channel();
    let places = node.places();
    std::thread::scope(|scope| {
        let uid = &uid;
        scope.spawn(move || {
            sandboxed(GRANTED, async move || {
                let (mut pods, mut events) = Pods::start(places).expect("an inotify");
                pods.watch(uid, ["imds-token".to_owned()].into()).expect("room for it");
                let token = |pods: &Pods| {
                    let files = pods.read(uid, "imds-token").expect("readable").expect("there");
                    String::from_utf8_lossy(&files["token"]).into_owned()
                };
                let mut first = [next_event(&mut events).await, next_event(&mut events).await];
                first.sort_by_key(|event| matches!(event, PodEvent::Files { .. }));
                assert!(matches!(first, [PodEvent::Found(_), PodEvent::Files { .. }]), "{first:?}");
                assert_eq!(token(&pods), "first");
                let outside = |what| {
                    ask.send(what).expect("the main thread listens");
                    is_done.recv().expect("done")
                };
                outside("tap");
                pod_where(&mut events, |pod| pod.taps.len() == 1).await;
                outside("token");
                assert_eq!(next_event(&mut events).await, PodEvent::Files { volume: "imds-token".into() });
                assert_eq!(token(&pods), "second");
                outside("end");
                assert_eq!(next_event(&mut events).await, PodEvent::Gone);
            });
        });
        let (mut launcher, mut taps) = (Some(launcher), Vec::new());
        for what in asked {
            match what {
                "tap" => {
                    taps.push(network.bind(&primary(), Binding::Masquerade, Shape::virtio()).expect("a tap"))
                }
                "token" => write_token(&node.kubelet, uid, "second"),
                _ => launcher.take().map(Launcher::end).expect("once").expect("it ends"),
            }
            done.send(()).expect("the sandboxed thread waits");
        }
    });
}

#[privileged::test(allowed)]
fn a_launchers_socket_needs_cap_dac_override() {
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let _launcher = node.launch(network.ns(), &uid, How::default());
    let by_socket = PodDirectories { cgroups: "/nonexistent".into(), ..node.places() };
    let found_within = |patience, capabilities| {
        let places = by_socket.clone();
        sandboxed(capabilities, async || {
            let (mut pods, mut events) = Pods::start(places).expect("an inotify");
            pods.watch(&uid, no_volumes()).expect("room for it");
            timeout(patience, next_event(&mut events))
                .await
                .is_ok_and(|event| matches!(event, PodEvent::Found(_)))
        })
    };
    assert!(!found_within(2 * MOMENT, GRANTED), "the socket belongs to another user");
    assert!(found_within(PATIENCE, GRANTED | CapabilitySet::DAC_OVERRIDE));
}

#[privileged::test(allowed)]
fn reading_another_users_token_needs_cap_dac_read_search() {
    let (node, uid) = (Node::new(), uid());
    write_token(&node.kubelet, &uid, "first");
    let read = |capabilities| {
        sandboxed(capabilities, async || {
            let (pods, _events) = Pods::start(node.places()).expect("an inotify");
            pods.read(&uid, "imds-token").map(|files| files.is_some())
        })
    };
    let error = read(GRANTED - CapabilitySet::DAC_READ_SEARCH).expect_err("refused");
    assert!(error.to_string().contains("CAP_DAC_READ_SEARCH"), "{error}");
    assert!(read(GRANTED).expect("readable"));
}

#[privileged::test(allowed)]
fn a_volume_with_a_link_to_the_outside_is_refused() {
    let (node, uid) = (Node::new(), uid());
    write_token(&node.kubelet, &uid, "first");
    let volume = node.kubelet.volume(uid.as_str(), Plugin::Projected, "imds-token");
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("token"), "the node's").expect("written");
    let read = || {
        sandboxed(GRANTED, async || {
            let (pods, _events) = Pods::start(node.places()).expect("an inotify");
            pods.read(&uid, "imds-token")
        })
    };
    let turn = |to: &Path, link: &Path| {
        fs::remove_file(link).expect("removed");
        symlink(to, link).expect("a link");
        let error = read().expect_err("refused");
        assert!(matches!(error, VolumeError::Outside { .. }), "{error}");
    };
    assert!(read().expect("readable").is_some());
    turn(&outside.path().join("token"), &volume.join("..data").join("token"));
    turn(outside.path(), &volume.join("..data"));
}

// When a launcher ends, its pod's network namespace vanishes: the agent does not keep it alive.

const REQUEST: Duration = Duration::from_secs(2);
const PATH: &str = "/v1/user-data";

/// Waits until the outer end of a pod's NIC vanishes, which happens when the pod's namespace does.
fn expect_vanished(node: &Namespace, outer: &str) {
    eventually(PATIENCE, || {
        anyhow::ensure!(!is_there(node, outer), "the pod's namespace still exists");
        Ok(())
    })
    .expect("the namespace vanishes");
}

#[privileged::test(allowed)]
fn the_end_of_a_launcher_is_reported_and_its_namespace_vanishes_despite_steering() {
    let (node, uid) = (Node::new(), uid());
    let config = SteerConfig { served: vec![[169, 254, 169, 254].into()], ..SteerConfig::default() };
    let mut steering = node.ns.run_in(|| Steering::start(&config)).expect("steering starts");
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let outer = network.add_nic(&primary(), MAC).expect("a NIC");
    let tap = network.bind(&primary(), Binding::Bridge, Shape::virtio()).expect("a tap");
    let launcher = node.launch(network.ns(), &uid, How::default());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let pod = pod_where(&mut events, |pod| !pod.taps.is_empty()).await;
        let port = PortName { ifname: "tap0".into(), netns: Some(pod.netns.clone()) };
        steering.attach(&port).expect("attached");
        steering.bind(&port, MAC, 0).expect("bound");

        // From here on only the launcher keeps the namespace alive.
        network.leave_to_its_processes().expect("removed");
        drop(tap);
        assert!(is_there(&node.ns, &outer), "the launcher must keep its namespace alive");
        launcher.end().expect("the launcher ends");
        loop {
            match next_event(&mut events).await {
                PodEvent::Gone => break,
                PodEvent::Taps(pod) => assert!(pod.taps.is_empty(), "{pod:?}"),
                other => panic!("{other:?}"),
            }
        }
        expect_vanished(&node.ns, &outer);
        // Steering was not notified and keeps nothing alive.
        assert!(matches!(
            steering.attachments().find(&port).expect("a look-up"),
            DeviceLookup::Nothing | DeviceLookup::NoNamespace
        ));
        steering.detach(&port).expect("detached");
        forget_process(&pod.netns);
    });
}

#[privileged::test(allowed)]
fn a_pod_that_is_no_longer_followed_does_not_keep_its_namespace() {
    for drop_all in [false, true] {
        let (node, uid) = (Node::new(), uid());
        let network = PodNetwork::new(&node.ns).expect("a pod");
        let outer = network.add_nic(&primary(), MAC).expect("a NIC");
        let launcher = node.launch(network.ns(), &uid, How::default());
        run(async {
            let (mut pods, mut events) = follow(node.places(), &uid);
            assert!(matches!(next_event(&mut events).await, PodEvent::Found(_)));
            network.leave_to_its_processes().expect("removed");
            if drop_all {
                drop(pods);
            } else {
                pods.forget(&uid);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            launcher.end().expect("the launcher ends");
            expect_vanished(&node.ns, &outer);
        });
    }
}

#[privileged::test(allowed)]
fn an_agent_that_serves_a_pod_releases_its_namespace_when_the_launcher_ends() {
    let (node, uid, identity) = (Node::new(), uid(), Identity::of(0));
    let bpffs = Bpffs::mount().expect("a bpffs");
    let records = tempfile::tempdir().expect("a directory");
    identity.write(records.path(), 1).expect("a record");
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let outer = network.add_nic(&primary(), identity.mac).expect("a NIC");
    let tap = network.bind(&primary(), Binding::Masquerade, Shape::virtio()).expect("a tap");
    let launcher = node.launch(network.ns(), &uid, How::default());
    let inside = Namespace::new("guest").expect("a namespace");
    let spec = Spec { shape: Shape::virtio(), ..Spec::of(&identity) };
    let guest = Guest::boot_on(Arc::clone(&tap), inside, &spec).expect("a guest");
    let netns = Some(launcher.netns());
    let port = PortArgument { ifname: "tap0".into(), netns, mac: Some(identity.mac) };
    let words = arguments_with_pins(records.path(), &[port], &bpffs.pins());
    let binary = support::agent::binary().expect("the agent");
    let agent = Agent::start_binary(&binary, &node.ns, words).expect("an agent");
    eventually(PATIENCE, || guest.fetch_own(PATH, REQUEST).map(drop))
        .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    assert_eq!(bpffs.port_links().len(), 1, "the program on the tap must be pinned");

    network.leave_to_its_processes().expect("removed");
    // The launcher's guest and the tap that the guest held end with it.
    launcher.end().expect("the launcher ends");
    drop((guest, tap));
    expect_vanished(&node.ns, &outer);
    eventually(PATIENCE, || {
        anyhow::ensure!(bpffs.port_links().is_empty(), "{:?}", bpffs.port_links());
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}
