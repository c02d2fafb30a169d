//! Writes the image layout: blobs named by their digest, a manifest for each architecture and an index
//! (<https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md>).

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use shell::architecture::Architecture;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use tar::{Builder, EntryType, Header};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The time and revision of the source that an image is built from.
#[derive(Debug)]
pub(crate) struct About {
    /// The time of the commit; `SOURCE_DATE_EPOCH` overrides it. It is 1970 for a tree without history.
    created: OffsetDateTime,
    /// The commit, if the tree has no uncommitted changes.
    revision: Option<String>,
}

impl About {
    /// Reads time and revision of a source tree from git.
    pub(crate) fn of(top: &Path) -> Result<Self> {
        let git = |words: &[&str]| {
            let output = Command::new("git").arg("-C").arg(top).args(words).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let is_clean = git(&["status", "--porcelain"]).is_some_and(|changes| changes.is_empty());
        let seconds = match std::env::var("SOURCE_DATE_EPOCH").ok() {
            Some(text) => text.parse::<u32>().context("expected Unix seconds in SOURCE_DATE_EPOCH")?,
            None => git(&["log", "-1", "--format=%ct"]).and_then(|text| text.parse().ok()).unwrap_or(0),
        };
        let created = OffsetDateTime::from_unix_timestamp(seconds.into())?;
        Ok(Self { created, revision: git(&["rev-parse", "HEAD"]).filter(|_| is_clean) })
    }

    /// A tree of this time, in Unix seconds, without history.
    #[cfg(test)]
    pub(crate) fn at(seconds: u32) -> Self {
        let created = OffsetDateTime::from_unix_timestamp(seconds.into()).expect("a time");
        Self { created, revision: None }
    }

    /// The time in Unix seconds.
    pub(crate) fn epoch(&self) -> u64 {
        self.created.unix_timestamp().unsigned_abs()
    }

    /// Returns the time as RFC 3339 has it.
    fn created(&self) -> String {
        self.created.format(&Rfc3339).expect("every u32 of seconds is before the year 10000")
    }

    fn labels(&self) -> Value {
        let mut labels = json!({
            "org.opencontainers.image.title": "xdp-imds",
            "org.opencontainers.image.description": "The instance metadata service of a hypervisor node",
            "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
            "org.opencontainers.image.source": "https://github.com/xdp-imds/xdp-imds",
            "org.opencontainers.image.documentation": "https://github.com/xdp-imds/xdp-imds#readme",
            "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
            "org.opencontainers.image.created": self.created(),
        });
        if let Some(revision) = &self.revision {
            labels["org.opencontainers.image.revision"] = json!(revision);
        }
        labels
    }
}

/// The blobs of an image for one architecture.
#[derive(Debug)]
pub(crate) struct Image {
    architecture: Architecture,
    layer: Layer,
    config: Vec<u8>,
    manifest: Vec<u8>,
    /// Bytes of the agent's binary.
    pub(super) binary: usize,
    /// SHA-256 of the agent's binary, in hexadecimal.
    pub(super) program: String,
}

impl Image {
    /// Makes the image of one layer. `binary` is the size of the agent's binary, `program` its SHA-256.
    pub(super) fn new(
        about: &About,
        architecture: Architecture,
        layer: Layer,
        binary: usize,
        program: String,
    ) -> Self {
        let config = json!({
            "architecture": architecture.short(),
            "os": "linux",
            "created": about.created(),
            "config": {
                "Entrypoint": ["/usr/bin/xdp-imds"],
                "Cmd": ["--help"],
                "Env": ["PATH=/usr/bin"],
                "WorkingDir": "/",
                "Labels": about.labels(),
            },
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer.tar)]},
            "history": [{"created": about.created(), "created_by": "cargo xtask image"}],
        });
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config),
            "layers": [descriptor(LAYER, &layer.gzip)],
            "annotations": about.labels(),
        });
        Self { architecture, layer, config, manifest: manifest.to_string().into_bytes(), binary, program }
    }

    /// Returns the digest of the manifest, which names the image.
    pub(super) fn digest(&self) -> String {
        digest(&self.manifest)
    }

    /// Returns the bytes of the compressed layer.
    pub(super) fn compressed(&self) -> usize {
        self.layer.gzip.len()
    }

    /// Describes the image in an index.
    fn descriptor(&self) -> Value {
        let mut entry = descriptor(MANIFEST, &self.manifest);
        entry["platform"] = json!({"architecture": self.architecture.short(), "os": "linux"});
        entry
    }
}

/// Writes the layout of an image to `out`, in place of an older layout. Images for several architectures have an index
/// of their own, which `tag` names, so that each node gets the image for its architecture.
pub(crate) fn write(images: &[Image], out: &Path, tag: &str) -> Result<()> {
    let blobs = out.join("blobs/sha256");
    let marker = out.join("oci-layout");
    if marker.is_file() {
        fs::remove_dir_all(out).with_context(|| format!("cannot replace {}", out.display()))?;
    }
    fs::create_dir_all(&blobs).with_context(|| format!("cannot make {}", blobs.display()))?;
    let put = |blob: &[u8]| {
        let path = blobs.join(sha256(blob));
        fs::write(&path, blob).with_context(|| format!("cannot write {}", path.display()))
    };
    for image in images {
        for blob in [&image.layer.gzip, &image.config, &image.manifest] {
            put(blob)?;
        }
    }
    let mut entry = match images {
        [image] => image.descriptor(),
        images => {
            let inner = index(images.iter().map(Image::descriptor).collect());
            put(&inner)?;
            descriptor(INDEX, &inner)
        }
    };
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
    fs::write(out.join("index.json"), index(vec![entry]))?;
    fs::write(marker, json!({"imageLayoutVersion": "1.0.0"}).to_string())?;
    Ok(())
}

fn index(entries: Vec<Value>) -> Vec<u8> {
    json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).to_string().into_bytes()
}

fn descriptor(kind: &str, blob: &[u8]) -> Value {
    json!({"mediaType": kind, "digest": digest(blob), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    format!("sha256:{}", sha256(blob))
}

/// Returns the SHA-256 in hexadecimal.
pub(crate) fn sha256(blob: &[u8]) -> String {
    Sha256::digest(blob).iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

// Writes the image's one layer: a tar whose entries are sorted by name and have the same owner and time.

/// A file or directory of the layer.
#[derive(Debug)]
pub(crate) struct LayerEntry {
    path: String,
    mode: u32,
    /// The content; empty for a directory.
    pub(crate) bytes: Vec<u8>,
    is_directory: bool,
}

impl LayerEntry {
    /// Returns a program that everybody may run.
    pub(crate) fn program(path: &str, bytes: Vec<u8>) -> Self {
        Self { path: path.into(), mode: 0o755, bytes, is_directory: false }
    }

    /// Returns a file that everybody may read.
    pub(crate) fn file(path: &str, bytes: Vec<u8>) -> Self {
        Self { path: path.into(), mode: 0o644, bytes, is_directory: false }
    }

    /// Returns a directory that everybody may enter.
    pub(crate) fn directory(path: &str) -> Self {
        Self { path: path.into(), mode: 0o755, bytes: Vec::new(), is_directory: true }
    }
}

/// The bytes of a layer in its two forms.
#[derive(Debug)]
pub(crate) struct Layer {
    /// The form that runtimes unpack. Its digest names the layer (`diff_id`).
    pub(crate) tar: Vec<u8>,
    /// The form that registries store.
    pub(crate) gzip: Vec<u8>,
}

/// Writes the entries and all directories above them. `epoch`, in Unix seconds, is the time of every entry.
pub(crate) fn write_layer(mut entries: Vec<LayerEntry>, epoch: u64) -> Result<Layer> {
    let above: BTreeSet<String> = entries
        .iter()
        .flat_map(|entry| Path::new(&entry.path).ancestors().skip(1))
        .map(|path| path.to_string_lossy().into_owned())
        .filter(|path| !path.is_empty())
        .collect();
    let known: BTreeSet<_> = entries.iter().map(|entry| entry.path.clone()).collect();
    entries.extend(above.difference(&known).map(|path| LayerEntry::directory(path)));
    entries.sort_by(|one, other| one.path.cmp(&other.path));
    let mut tar = Builder::new(Vec::new());
    for entry in &entries {
        let mut header = Header::new_ustar();
        header.set_entry_type(if entry.is_directory { EntryType::Directory } else { EntryType::Regular });
        header.set_mode(entry.mode);
        header.set_size(entry.bytes.len() as u64);
        header.set_mtime(epoch);
        header.set_uid(0);
        header.set_gid(0);
        let path = if entry.is_directory { format!("{}/", entry.path) } else { entry.path.clone() };
        tar.append_data(&mut header, path, &*entry.bytes)?;
    }
    let tar = tar.into_inner()?;
    // The header has no name and no time, so that the same input gives the same output.
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    gzip.write_all(&tar)?;
    Ok(Layer { gzip: gzip.finish()?, tar })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use std::fs;

    use super::{About, Architecture, Image, OffsetDateTime, digest, sha256, write, write_layer};
    use crate::image::layout::LayerEntry;

    fn about(seconds: i64) -> About {
        About {
            created: OffsetDateTime::from_unix_timestamp(seconds).expect("a time"),
            revision: Some("abc".into()),
        }
    }

    #[test]
    fn an_image_is_as_old_as_its_source() {
        for (seconds, text) in [(0, "1970-01-01T00:00:00Z"), (1_700_000_000, "2023-11-14T22:13:20Z")] {
            assert_eq!((about(seconds).created(), about(seconds).epoch()), (text.into(), seconds as u64));
        }
    }

    fn image(architecture: Architecture, program: Vec<u8>) -> Image {
        let (size, name) = (program.len(), sha256(&program));
        let layer = write_layer(vec![LayerEntry::program("usr/bin/xdp-imds", program)], 5).expect("a layer");
        Image::new(&about(5), architecture, layer, size, name)
    }

    /// A written layout.
    struct Written(tempfile::TempDir);

    impl Written {
        fn read(&self, path: &str) -> Vec<u8> {
            fs::read(self.0.path().join("image").join(path)).expect(path)
        }

        /// Reads a blob whose name and size must agree with its descriptor.
        fn blob(&self, of: &Value) -> Vec<u8> {
            let name = of["digest"].as_str().and_then(|text| text.strip_prefix("sha256:")).expect("a digest");
            let bytes = self.read(&format!("blobs/sha256/{name}"));
            assert_eq!(
                (sha256(&bytes), bytes.len() as u64),
                (name.to_owned(), of["size"].as_u64().expect("a size"))
            );
            bytes
        }

        fn json(&self, of: &Value) -> Value {
            serde_json::from_slice(&self.blob(of)).expect("JSON")
        }

        fn index(&self) -> Value {
            serde_json::from_slice(&self.read("index.json")).expect("JSON")
        }
    }

    fn written(images: &[Image], tags: &[&str]) -> Written {
        let room = tempfile::tempdir().expect("a directory");
        for tag in tags {
            write(images, &room.path().join("image"), tag).expect("written");
        }
        Written(room)
    }

    #[test]
    fn a_layout_leads_from_its_index_to_every_blob() {
        let image = image(Architecture::X86, vec![1, 2, 3]);
        let tar = digest(&image.layer.tar);
        // Written twice, because the second layout must replace the first.
        let layout = written(std::slice::from_ref(&image), &["old", "new"]);
        let index = layout.index();
        assert_eq!(index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"], "new");
        assert_eq!(index["manifests"][0]["digest"], image.digest());
        let manifest = layout.json(&index["manifests"][0]);
        let config = layout.json(&manifest["config"]);
        layout.blob(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0], tar);
        assert_eq!(config["config"]["Labels"]["org.opencontainers.image.revision"], "abc");
    }

    #[test]
    fn one_tag_names_the_images_of_all_architectures() {
        let images = Architecture::ALL.map(|one| image(one, one.name().into()));
        let layout = written(&images, &["latest"]);
        let outer = layout.index();
        assert_eq!(outer["manifests"].as_array().map(Vec::len), Some(1));
        assert_eq!(outer["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"], "latest");
        let inner = layout.json(&outer["manifests"][0]);
        for (entry, architecture) in
            inner["manifests"].as_array().expect("a list").iter().zip(["amd64", "arm64"])
        {
            let config = layout.json(&layout.json(entry)["config"]);
            assert_eq!(
                (&entry["platform"]["architecture"], &config["architecture"]),
                (&architecture.into(), &architecture.into())
            );
        }
    }

    fn names(tar: &[u8]) -> Vec<(String, u64, u64)> {
        let mut archive = tar::Archive::new(tar);
        let entries = archive.entries().expect("entries").map(|entry| entry.expect("an entry"));
        let facts = entries.map(|entry| {
            let header = entry.header();
            let path = entry.path().expect("a path").to_string_lossy().into_owned();
            (path, header.mtime().expect("a time"), header.uid().expect("a user"))
        });
        facts.collect()
    }

    #[test]
    fn a_layer_is_the_same_whatever_the_order_of_its_entries() {
        let entries = || {
            vec![
                LayerEntry::program("usr/bin/a", vec![1]),
                LayerEntry::file("etc/b", vec![2]),
                LayerEntry::directory("run"),
            ]
        };
        let first = write_layer(entries(), 7).expect("a layer");
        let mut turned = entries();
        turned.reverse();
        let second = write_layer(turned, 7).expect("a layer");
        assert_eq!((&first.tar, &first.gzip), (&second.tar, &second.gzip));
        let expected =
            ["etc/", "etc/b", "run/", "usr/", "usr/bin/", "usr/bin/a"].map(|path| (path.to_owned(), 7, 0));
        assert_eq!(names(&first.tar), expected);
    }

    #[test]
    fn a_changed_byte_changes_the_layer() {
        let of = |byte| write_layer(vec![LayerEntry::file("a", vec![byte])], 0).expect("a layer").gzip;
        assert_ne!(of(1), of(2));
    }
}
