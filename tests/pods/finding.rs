//! The agent finds the launcher of a pod and mistakes no other process for it.

use crate::node::{
    MOMENT, Node, PATIENCE, allowed, expect_no_event, follow, next_event, no_volumes, run, uid,
};
use metadata_common::port::PortName;
use metadata_feed::pods::{PodEvent, Pods};
use metadata_links::netns::forget_process;
use metadata_steer::exists;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;
use support::netns::Namespace;
use support::pod::{Driver, How, Launcher};
use support::privileged;
use tokio::time::timeout;

const NOWHERE: &str = "/nonexistent";

#[test]
fn a_launcher_is_found_by_its_socket_even_if_its_path_is_long() {
    if !allowed() {
        return;
    }
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

#[test]
fn an_absent_launcher_is_reported_once() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let event = timeout(PATIENCE, events.recv()).await;
        assert!(matches!(&event, Ok(Some((pod, PodEvent::Absent))) if *pod == uid), "{event:?}");
        let again = timeout(MOMENT, events.recv()).await;
        assert!(again.is_err(), "{again:?}");
    });
}

#[test]
fn a_launcher_that_does_not_listen_is_found_by_control_group_and_name() {
    if !allowed() {
        return;
    }
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

#[test]
fn no_process_of_another_pod_is_mistaken_for_the_launcher() {
    if !allowed() {
        return;
    }
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

#[test]
fn a_symbolic_link_to_a_launchers_socket_is_not_followed() {
    if !allowed() {
        return;
    }
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
