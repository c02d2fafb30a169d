//! A directory such as kubelet keeps, with the volumes of pods.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// A directory of pods.
#[derive(Debug)]
pub struct Kubelet {
    root: tempfile::TempDir,
}

impl Kubelet {
    /// An empty one.
    ///
    /// # Errors
    /// No directory can be made.
    pub fn new() -> Result<Self> {
        let root = tempfile::tempdir().context("a directory for kubelet")?;
        fs::create_dir(root.path().join("pods"))?;
        Ok(Self { root })
    }

    /// kubelet's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The directory of its pods.
    #[must_use]
    pub fn pods(&self) -> PathBuf {
        self.root.path().join("pods")
    }

    /// Writes a volume as kubelet does: all files aside, then one rename that puts them in force.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, pod: &str, plugin: &str, volume: &str, files: &[(&str, &str)]) -> Result<()> {
        let dir = self.pods().join(pod).join("volumes").join(plugin).join(volume);
        fs::create_dir_all(&dir)?;
        let round = fs::read_dir(&dir)?.count();
        let data = format!("..2026_11_21.{round}");
        fs::create_dir(dir.join(&data))?;
        for (file, text) in files {
            fs::write(dir.join(&data).join(file), text)?;
        }
        let draft = dir.join("..data_tmp");
        symlink(&data, &draft)?;
        fs::rename(draft, dir.join("..data"))?;
        for (file, _) in files.iter().filter(|(file, _)| !dir.join(file).exists()) {
            symlink(Path::new("..data").join(file), dir.join(file))?;
        }
        Ok(())
    }

    /// Writes a Secret's volume.
    ///
    /// # Errors
    /// What the file system says.
    pub fn secret(&self, pod: &str, volume: &str, files: &[(&str, &str)]) -> Result<()> {
        self.write(pod, "kubernetes.io~secret", volume, files)
    }
}
