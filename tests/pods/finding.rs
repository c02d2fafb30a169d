//! The launcher of a pod is found, and nobody is taken for it.

use crate::node::{MOMENT, Node, PATIENCE, allowed, follow, next, none, quiet, run, uid};
use metadata_base::port::PortName;
use metadata_feed::pods::{PodEvent, Pods};
use metadata_links::processes::forget as forget_process;
use metadata_steer::exists;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use support::netns::Namespace;
use support::pod::{Driver, How, Launcher};
use support::privileged;
use tokio::time::timeout;

const NOWHERE: &str = "/nonexistent";

#[test]
fn a_launcher_is_found_by_its_socket_however_long_its_path() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let pod = Namespace::new("pod").expect("a namespace");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(Path::new(NOWHERE)), &uid);
        quiet(&mut events).await;
        let launcher = node.launch(&pod, &uid, How::default());
        let PodEvent::Found(found) = next(&mut events).await else { panic!("not found") };
        assert_eq!((&found.uid, found.pid, &found.netns), (&uid, launcher.pid(), &launcher.netns()));
        let path = node.kubelet.sockets(uid.as_str()).expect("a directory").join("launcher-sock");
        assert!(path.as_os_str().len() > 100, "{}", path.display());
    });
}

#[test]
fn a_launcher_that_is_not_there_is_told_of_once() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    run(async {
        let (_pods, mut events) = follow(node.places(), &uid);
        let told = timeout(PATIENCE, events.recv()).await;
        assert!(matches!(&told, Ok(Some((pod, PodEvent::Absent))) if *pod == uid), "{told:?}");
        let again = timeout(MOMENT, events.recv()).await;
        assert!(again.is_err(), "{again:?}");
    });
}

#[test]
fn a_launcher_that_does_not_listen_is_found_by_its_control_group_and_its_name() {
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
            // Others of the pod come first: what pauses it, what starts the launcher.
            let _pause = node.launch(&pod, &uid, How { name: "pause", ..how });
            quiet(&mut events).await;
            let launcher = node.launch(&pod, &uid, how);
            let PodEvent::Found(found) = next(&mut events).await else { panic!("not found") };
            assert_eq!(found.pid, launcher.pid(), "{driver:?}");
        });
    }
}

#[test]
fn nobody_of_another_pod_is_taken_for_a_launcher() {
    if !allowed() {
        return;
    }
    let node = Node::new();
    let [mine, theirs] = [uid(), uid()];
    let pod = Namespace::new("pod").expect("a namespace");
    // Theirs listens where mine would, and is listed as mine by a tree that is out of date.
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
        quiet(&mut events).await;
    });
    // The same, were it of mine.
    let launcher = node.launch(&pod, &mine, How::default());
    fs::write(group.join("cgroup.procs"), format!("{}\n{}\n", other.pid(), launcher.pid())).expect("written");
    fs::remove_file(place).expect("removed");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(stale.path()), &mine);
        let PodEvent::Found(found) = next(&mut events).await else { panic!("not found") };
        assert_eq!(found.pid, launcher.pid());
    });
}

#[test]
fn no_link_is_followed_to_a_socket() {
    if !allowed() {
        return;
    }
    let (node, uid) = (Node::new(), uid());
    let pod = Namespace::new("pod").expect("a namespace");
    let _launcher = node.launch(&pod, &uid, How::default());
    let sockets = node.kubelet.sockets(uid.as_str()).expect("a directory");
    // Even to the right one: a link can be turned elsewhere between looking and connecting.
    fs::rename(sockets.join("launcher-sock"), sockets.join("elsewhere")).expect("renamed");
    symlink("elsewhere", sockets.join("launcher-sock")).expect("a link");
    run(async {
        let (_pods, mut events) = follow(node.places_without_groups(Path::new(NOWHERE)), &uid);
        quiet(&mut events).await;
        fs::rename(sockets.join("elsewhere"), sockets.join("launcher-sock")).expect("renamed");
        assert!(matches!(next(&mut events).await, PodEvent::Found(_)));
    });
}

/// What number the next process comes after.
const LAST_NUMBER: &str = "/proc/sys/kernel/ns_last_pid";
/// How often one number is tried, and how many are: others start processes on this machine, and may keep one.
const TRIES: usize = 20;
const ROUNDS: usize = 50;

/// Starts launchers until one has this number.
fn launch_as(pid: u32, start: impl Fn() -> Launcher) -> Option<Launcher> {
    for _ in 0..TRIES {
        // The thread that starts it gets the number before, unless somebody on this machine is faster.
        fs::write(LAST_NUMBER, (pid - 2).to_string()).expect("the next number");
        let launcher = start();
        if launcher.pid() == pid {
            return Some(launcher);
        }
    }
    None
}

#[test]
fn a_number_that_is_given_again_leads_to_neither_pod_by_the_name_of_the_other() {
    let refused = fs::OpenOptions::new().write(true).open(LAST_NUMBER).err();
    let refused = refused.map(|error| format!("no number can be given again here: {error}"));
    if !allowed() || !privileged::or_skip_for(refused.as_deref()) {
        return;
    }
    let node = Node::alone();
    let spaces = [0, 1].map(|_| Namespace::new("pod").expect("a namespace"));
    run(async {
        let (mut pods, mut events) = Pods::start(node.places()).expect("an inotify");
        let mut round = async || {
            let first = uid();
            pods.watch(&first, none()).expect("room for it");
            let launcher = node.launch(&spaces[0], &first, How::default());
            assert!(matches!(next(&mut events).await, PodEvent::Found(_)));
            // As the agent does when it attaches the pod's tap.
            let port = PortName { ifname: "tap0".into(), netns: Some(launcher.netns()) };
            node.ns.run_in(|| exists(&port)).expect("the launcher's namespace");
            let (pid, netns) = (launcher.pid(), launcher.netns());
            launcher.end().expect("it ends");
            assert_eq!(next(&mut events).await, PodEvent::Gone);
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
        let (again, second, port, netns) = given.expect("a number that is given again");
        pods.watch(&second, none()).expect("room for it");
        // While a record still names the first, the name leads nowhere, and the second pod waits.
        let error = node.ns.run_in(|| exists(&port)).expect_err("another process");
        assert!(error.to_string().contains("another process"), "{error}");
        quiet(&mut events).await;
        forget_process(&netns);
        let told = timeout(PATIENCE, events.recv()).await.expect("in time");
        let Some((uid, PodEvent::Found(found))) = told else { panic!("not found: {told:?}") };
        assert_eq!((uid, found.pid), (second, again.pid()));
        assert!(timeout(MOMENT, events.recv()).await.is_err(), "the first pod has ended");
    });
}
