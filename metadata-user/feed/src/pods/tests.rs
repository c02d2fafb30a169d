use super::{
    MAX_PODS, MAX_VOLUMES, PodDirectories, PodEvent, PodUid, Pods, PodsError, UID_MAX, VOLUME_MAX, is_volume,
    names_of,
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
    for text in ["6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11", "0d1c5b0f9f0f4f5f8c9e0a1b2c3d4e5f", "A", &longest] {
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
    assert_eq!(all, [("pod16477688c0e", "tap16477688c0e", "k6t-16477688c0e"), ("net2", "tap2", "k6t-net2")]);
    for name in names.iter().flat_map(|names| [&names.pod, &names.tap, &names.bridge]) {
        assert!(name.len() <= 15, "{name}");
    }
}
