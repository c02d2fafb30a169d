use super::{KEY_BYTES, MAX_KEYS, PLUGINS, VOLUME_BYTES, VolumeError, Volumes};
use crate::pods::PodUid;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// A directory of pods, and one volume in it.
struct Kubelet {
    room: tempfile::TempDir,
    uid: PodUid,
    times: usize,
}

impl Kubelet {
    fn new() -> Self {
        let uid = "6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11".parse().expect("a uid");
        Self { room: tempfile::tempdir().expect("a directory"), uid, times: 0 }
    }

    fn volume(&self, plugin: &str) -> PathBuf {
        self.room.path().join(self.uid.as_str()).join("volumes").join(plugin).join("data")
    }

    /// A directory of new contents, not in force yet.
    fn prepare(&mut self, plugin: &str, keys: &[(&str, &[u8])]) -> String {
        self.times += 1;
        let name = format!("..2026_05_01.{}", self.times);
        let dir = self.volume(plugin).join(&name);
        fs::create_dir_all(&dir).expect("a directory");
        for (key, bytes) in keys {
            fs::write(dir.join(key), bytes).expect("written");
        }
        name
    }

    fn write(&mut self, plugin: &str, keys: &[(&str, &[u8])]) {
        let name = self.prepare(plugin, keys);
        let volume = self.volume(plugin);
        symlink(&name, volume.join("..data_tmp")).expect("a link");
        fs::rename(volume.join("..data_tmp"), volume.join("..data")).expect("renamed");
    }

    fn volumes(&self) -> Volumes {
        Volumes::new(self.room.path())
    }

    fn keys(&self) -> Vec<(String, Vec<u8>)> {
        let files = self.volumes().read(&self.uid, "data").expect("readable").expect("there");
        files.iter().map(|(key, bytes)| (key.clone(), bytes.to_vec())).collect()
    }

    fn error(&self) -> VolumeError {
        self.volumes().read(&self.uid, "data").expect_err("refused")
    }
}

#[test]
fn a_volume_of_every_kind_is_read_key_by_key() {
    for plugin in PLUGINS {
        let mut kubelet = Kubelet::new();
        kubelet.write(plugin, &[("userdata", b"#cloud-config"), ("networkdata", b"")]);
        fs::write(kubelet.volume(plugin).join("..data").join("..hidden"), "x").expect("written");
        fs::create_dir(kubelet.volume(plugin).join("..data").join("below")).expect("made");
        let expected =
            [("networkdata".to_owned(), b"".to_vec()), ("userdata".to_owned(), b"#cloud-config".to_vec())];
        assert_eq!(kubelet.keys(), expected, "{plugin}");
    }
}

#[test]
fn a_volume_that_kubelet_has_not_written_is_not_there_yet() {
    let mut kubelet = Kubelet::new();
    let read = |kubelet: &Kubelet| kubelet.volumes().read(&kubelet.uid, "data").expect("no error");
    assert_eq!(read(&kubelet), None, "no pod");
    kubelet.prepare(PLUGINS[0], &[("userdata", b"x")]);
    assert_eq!(read(&kubelet), None, "nothing in force");
    kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
    assert!(read(&kubelet).is_some_and(|files| files.contains_key("userdata")));
    let nowhere = Volumes::new(kubelet.room.path().join("nowhere"));
    assert_eq!(nowhere.read(&kubelet.uid, "data").expect("no error"), None);
}

#[test]
fn a_replaced_volume_is_replaced_as_a_whole() {
    let mut kubelet = Kubelet::new();
    kubelet.write(PLUGINS[0], &[("a", b"1"), ("b", b"1")]);
    kubelet.write(PLUGINS[0], &[("b", b"2"), ("c", b"2")]);
    assert_eq!(kubelet.keys(), [("b".to_owned(), b"2".to_vec()), ("c".to_owned(), b"2".to_vec())]);
}

#[test]
fn no_link_leads_out_of_a_volume() {
    let secret = tempfile::tempdir().expect("a directory");
    fs::write(secret.path().join("shadow"), "somebody else's").expect("written");
    let outside = secret.path().join("shadow");
    let in_force = |kubelet: &Kubelet| kubelet.volume(PLUGINS[0]).join("..data");

    let refused = |what: &str, spoil: &dyn Fn(&Kubelet)| {
        let mut kubelet = Kubelet::new();
        kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
        spoil(&kubelet);
        let error = kubelet.error();
        assert!(matches!(error, VolumeError::Outside { .. }), "{what}: {error}");
    };
    refused("a key by an absolute link", &|kubelet| {
        symlink(&outside, in_force(kubelet).join("stolen")).expect("a link");
    });
    refused("a key by dots", &|kubelet| {
        symlink("../../../../../../../etc/passwd", in_force(kubelet).join("stolen")).expect("a link");
    });
    refused("a key by a magic link", &|kubelet| {
        symlink("/proc/self/environ", in_force(kubelet).join("stolen")).expect("a link");
    });
    for target in [secret.path().to_str().expect("text"), "../data", ".."] {
        refused(target, &|kubelet| {
            fs::remove_file(in_force(kubelet)).expect("removed");
            symlink(target, in_force(kubelet)).expect("a link");
        });
    }
    refused("the volume itself", &|kubelet| {
        let volume = kubelet.volume(PLUGINS[0]);
        fs::remove_dir_all(&volume).expect("removed");
        symlink(secret.path(), &volume).expect("a link");
    });
    refused("the pod's directory", &|kubelet| {
        let pod = kubelet.room.path().join(kubelet.uid.as_str());
        fs::rename(&pod, secret.path().join(format!("pod-{}", fastrand::u64(..)))).expect("moved");
        symlink(secret.path(), &pod).expect("a link");
    });
}

#[test]
fn links_inside_a_volume_are_followed() {
    let mut kubelet = Kubelet::new();
    kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
    symlink("userdata", kubelet.volume(PLUGINS[0]).join("..data").join("alias")).expect("a link");
    assert_eq!(kubelet.keys(), [("alias".to_owned(), b"x".to_vec()), ("userdata".to_owned(), b"x".to_vec())]);
}

#[test]
fn a_key_that_is_not_a_file_is_refused_without_blocking() {
    let mut kubelet = Kubelet::new();
    kubelet.write(PLUGINS[0], &[("userdata", b"x")]);
    let pipe = kubelet.volume(PLUGINS[0]).join("..data").join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("a pipe");
    let error = kubelet.error();
    assert!(matches!(error, VolumeError::Kind { .. }), "{error}");
}

#[test]
fn each_limit_is_refused_one_beyond_it() {
    let keys: Vec<String> = (0..=MAX_KEYS).map(|n| format!("k{n}")).collect();
    let few = |n: usize| keys[..n].iter().map(|key| (key.as_str(), b"".as_slice())).collect::<Vec<_>>();
    let bytes = vec![b'x'; KEY_BYTES + 1];
    let whole = |n: usize| keys[..n].iter().map(|key| (key.as_str(), &bytes[1..])).collect::<Vec<_>>();
    let full = VOLUME_BYTES / KEY_BYTES;
    for (fits, beyond) in [
        (few(MAX_KEYS), few(MAX_KEYS + 1)),
        (vec![("a", &bytes[1..])], vec![("a", &bytes[..])]),
        (whole(full), [whole(full), vec![("one-more", b"x")]].concat()),
    ] {
        let mut kubelet = Kubelet::new();
        kubelet.write(PLUGINS[0], &fits);
        assert_eq!(kubelet.keys().len(), fits.len());
        kubelet.write(PLUGINS[0], &beyond);
        let error = kubelet.error();
        assert!(matches!(error, VolumeError::Keys { .. } | VolumeError::Bytes { .. }), "{error}");
    }
}

#[test]
fn invalid_names_are_refused_before_any_access() {
    let kubelet = Kubelet::new();
    for name in ["", "..", "../data", "a/b", "A"] {
        let error = kubelet.volumes().read(&kubelet.uid, name).expect_err(name);
        assert!(matches!(error, VolumeError::Name { .. }), "{error}");
    }
}

#[test]
fn equal_secrets_of_many_pods_share_one_copy() {
    let room = tempfile::tempdir().expect("a directory");
    let volumes = Volumes::new(room.path());
    let secret = vec![b's'; 64 << 10];
    let mut held = Vec::new();
    for n in 0..200 {
        let uid: PodUid = format!("pod-{n}").parse().expect("a uid");
        let volume = room.path().join(uid.as_str()).join("volumes").join(PLUGINS[0]).join("data");
        fs::create_dir_all(volume.join("..1")).expect("a directory");
        fs::write(volume.join("..1").join("userdata"), &secret).expect("written");
        symlink("..1", volume.join("..data")).expect("a link");
        held.push(volumes.read(&uid, "data").expect("readable").expect("there"));
    }
    let places: std::collections::BTreeSet<_> = held.iter().map(|files| files["userdata"].as_ptr()).collect();
    assert_eq!(places.len(), 1, "200 pods hold one copy");
    volumes.sweep();
    assert_eq!(volumes.contents.lock().expect("not poisoned").len(), 1);
    drop(held);
    volumes.sweep();
    assert!(volumes.contents.lock().expect("not poisoned").is_empty());
}

#[test]
fn the_debug_form_of_a_volume_omits_its_content() {
    let mut kubelet = Kubelet::new();
    kubelet.write(PLUGINS[0], &[("password", b"hunter2")]);
    let files = kubelet.volumes().read(&kubelet.uid, "data").expect("readable").expect("there");
    assert_eq!(format!("{files:?}"), r#"{"password": 7}"#);
}
