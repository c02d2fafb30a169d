//! All of it behind the agent's fence, with the capabilities a DaemonSet grants and none besides.

use crate::node::{MAC, MOMENT, Node, PATIENCE, allowed, next, none, once, primary, run, uid};
use metadata_datapath::sandbox::{Mode, Stage};
use metadata_feed::pods::{Places, PodEvent, PodUid, Pods, VolumeError};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use support::pod::{Binding, How, Kubelet, Launcher, Plugin, PodNetwork};
use support::privilege::QEMU;
use support::tap::Shape;
use tokio::time::timeout;

/// What the DaemonSet grants.
const GRANTED: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::IPC_LOCK);

/// Runs on a thread with these capabilities, behind the fence of an agent that serves.
fn fenced<T: Send>(capabilities: CapabilitySet, work: impl AsyncFnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let inside = || {
            let sets = CapabilitySets {
                effective: capabilities,
                permitted: capabilities,
                inheritable: CapabilitySet::empty(),
            };
            set_capabilities(None, sets).expect("fewer capabilities");
            for stage in [Stage::Start, Stage::Serve] {
                Mode::On.enter(stage).expect("a fence");
            }
            run(work())
        };
        scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A token as kubelet writes it for a pod that runs as another user.
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
fn a_pod_is_found_followed_and_read_with_what_a_daemonset_grants() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    network.add_nic(&primary(), MAC).expect("a NIC");
    let launcher = node.launch(network.ns(), &uid, How::default());
    write_token(&node.kubelet, &uid, "first");
    // What the node and the pod do meanwhile is done from outside the fence.
    let (ask, asked) = std::sync::mpsc::channel::<&str>();
    let (done, is_done) = std::sync::mpsc::channel();
    let places = node.places();
    std::thread::scope(|scope| {
        let uid = &uid;
        scope.spawn(move || {
            fenced(GRANTED, async move || {
                let (mut pods, mut events) = Pods::start(places).expect("an inotify");
                pods.watch(uid, ["imds-token".to_owned()].into()).expect("room for it");
                let token = |pods: &Pods| {
                    let files = pods.read(uid, "imds-token").expect("readable").expect("there");
                    String::from_utf8_lossy(&files["token"]).into_owned()
                };
                let mut first = [next(&mut events).await, next(&mut events).await];
                first.sort_by_key(|event| matches!(event, PodEvent::Files { .. }));
                assert!(matches!(first, [PodEvent::Found(_), PodEvent::Files { .. }]), "{first:?}");
                assert_eq!(token(&pods), "first");
                let outside = |what| {
                    ask.send(what).expect("somebody listens");
                    is_done.recv().expect("done")
                };
                outside("tap");
                once(&mut events, |pod| pod.taps.len() == 1).await;
                outside("token");
                assert_eq!(next(&mut events).await, PodEvent::Files { volume: "imds-token".into() });
                assert_eq!(token(&pods), "second");
                outside("end");
                assert_eq!(next(&mut events).await, PodEvent::Gone);
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
            done.send(()).expect("somebody waits");
        }
    });
}

#[test]
fn a_launchers_socket_is_of_use_only_with_one_capability_more() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let network = PodNetwork::new(&node.ns).expect("a pod");
    let _launcher = node.launch(network.ns(), &uid, How::default());
    let by_socket = Places { cgroups: "/nonexistent".into(), ..node.places() };
    let found_within = |patience, capabilities| {
        let places = by_socket.clone();
        fenced(capabilities, async || {
            let (mut pods, mut events) = Pods::start(places).expect("an inotify");
            pods.watch(&uid, none()).expect("room for it");
            timeout(patience, next(&mut events)).await.is_ok_and(|event| matches!(event, PodEvent::Found(_)))
        })
    };
    assert!(!found_within(2 * MOMENT, GRANTED), "the socket is another user's");
    assert!(found_within(PATIENCE, GRANTED | CapabilitySet::DAC_OVERRIDE));
}

#[test]
fn a_token_of_another_user_is_read_only_with_the_capability_for_it() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    write_token(&node.kubelet, &uid, "first");
    let read = |capabilities| {
        fenced(capabilities, async || {
            let (pods, _events) = Pods::start(node.places()).expect("an inotify");
            pods.read(&uid, "imds-token").map(|files| files.is_some())
        })
    };
    let error = read(GRANTED - CapabilitySet::DAC_READ_SEARCH).expect_err("refused");
    assert!(error.to_string().contains("CAP_DAC_READ_SEARCH"), "{error}");
    assert!(read(GRANTED).expect("readable"));
}

#[test]
fn a_volume_whose_link_points_out_is_refused() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    write_token(&node.kubelet, &uid, "first");
    let volume = node.kubelet.volume(uid.as_str(), Plugin::Projected, "imds-token");
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("token"), "the node's").expect("written");
    let read = || {
        fenced(GRANTED, async || {
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
