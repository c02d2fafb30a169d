//! Following pods inside the agent's sandbox, with only the capabilities that the DaemonSet grants.

use crate::node::{
    MAC, MOMENT, Node, PATIENCE, allowed, next_event, no_volumes, pod_where, primary, run, uid,
};
use metadata_datapath::sandbox::{SandboxMode, SandboxStage};
use metadata_feed::pods::{PodDirectories, PodEvent, PodUid, Pods, VolumeError};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use support::pod::{Binding, How, Kubelet, Launcher, Plugin, PodNetwork};
use support::privilege::QEMU;
use support::tap::Shape;
use tokio::time::timeout;

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

#[test]
fn the_daemonsets_capabilities_suffice_to_find_follow_and_read_a_pod() {
    if !allowed() {
        return;
    }
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

#[test]
fn a_launchers_socket_needs_cap_dac_override() {
    if !allowed() {
        return;
    }
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

#[test]
fn reading_another_users_token_needs_cap_dac_read_search() {
    if !allowed() {
        return;
    }
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

#[test]
fn a_volume_with_a_link_to_the_outside_is_refused() {
    if !allowed() {
        return;
    }
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
