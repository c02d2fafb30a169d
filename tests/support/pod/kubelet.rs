//! A simulated kubelet directory of pods, with volumes in kubelet's layout.

use anyhow::{Context as _, Result};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The volume plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// A Secret.
    Secret,
    /// A ConfigMap.
    ConfigMap,
    /// A projected volume, for example of service account tokens.
    Projected,
}

impl Plugin {
    const fn directory(self) -> &'static str {
        match self {
            Self::Secret => "kubernetes.io~secret",
            Self::ConfigMap => "kubernetes.io~configmap",
            Self::Projected => "kubernetes.io~projected",
        }
    }
}

/// A directory of pods.
#[derive(Debug)]
pub struct Kubelet {
    room: tempfile::TempDir,
    count: AtomicU32,
}

impl Kubelet {
    /// An empty directory.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn new() -> Result<Self> {
        Ok(Self { room: tempfile::tempdir()?, count: AtomicU32::new(0) })
    }

    /// The path of the directory; on a node it is `/var/lib/kubelet/pods`.
    #[must_use]
    pub fn pods(&self) -> &Path {
        self.room.path()
    }

    /// The path of a volume.
    #[must_use]
    pub fn volume(&self, uid: &str, plugin: Plugin, name: &str) -> PathBuf {
        self.pods().join(uid).join("volumes").join(plugin.directory()).join(name)
    }

    /// The directory of a pod's launcher socket; creates it if necessary.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn sockets(&self, uid: &str) -> Result<PathBuf> {
        let path = self.pods().join(uid).join("volumes/kubernetes.io~empty-dir/sockets");
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// Writes or replaces a volume by one rename, like kubelet's atomic writer.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, uid: &str, plugin: Plugin, name: &str, keys: &[(&str, &[u8])]) -> Result<()> {
        let volume = self.volume(uid, plugin, name);
        let dir = format!("..2026_05_01_10_00_00.{}", self.count.fetch_add(1, Ordering::Relaxed));
        let before = fs::read_link(volume.join("..data")).ok();
        fs::create_dir_all(volume.join(&dir)).with_context(|| format!("cannot make {}", volume.display()))?;
        for (key, bytes) in keys {
            fs::write(volume.join(&dir).join(key), bytes)?;
        }
        symlink(&dir, volume.join("..data_tmp"))?;
        fs::rename(volume.join("..data_tmp"), volume.join("..data"))?;
        for (key, _) in keys {
            match symlink(format!("..data/{key}"), volume.join(key)) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error.into()),
                _ => {}
            }
        }
        if let Some(before) = before {
            fs::remove_dir_all(volume.join(before))?;
        }
        Ok(())
    }

    /// Removes the directory of a pod.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn remove(&self, uid: &str) -> Result<()> {
        Ok(fs::remove_dir_all(self.pods().join(uid))?)
    }
}

#[cfg(test)]
mod tests {
    use super::{Kubelet, Plugin};
    use std::fs;

    #[test]
    fn a_rewritten_volume_has_only_the_new_content() {
        let kubelet = Kubelet::new().expect("a directory");
        for turn in [b"1".as_slice(), b"2"] {
            kubelet.write("uid", Plugin::Secret, "data", &[("key", turn)]).expect("written");
            let volume = kubelet.volume("uid", Plugin::Secret, "data");
            assert_eq!(fs::read(volume.join("key")).expect("a key"), turn);
            let names = fs::read_dir(&volume).expect("listed").count();
            assert_eq!(names, 3, "one directory, `..data` and one key");
        }
        kubelet.remove("uid").expect("removed");
        assert_eq!(fs::read_dir(kubelet.pods()).expect("listed").count(), 0);
    }
}
