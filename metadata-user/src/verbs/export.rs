//! `xdp-imds export` writes a VM's metadata to a disk image, for VMs that boot without a network.
//!
//! Each file of the image is the body that HTTP would serve at one path, byte for byte. A guest that finds such a disk
//! sends no HTTP requests of the same dialect.

use std::fs::File;
use std::io::{Cursor, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hadris_iso::sync::read::PathSeparator;
use hadris_iso::sync::write::options::{CreationFeatures, IsoFormatOptions};
use hadris_iso::sync::write::{InputEntry, InputTree, IsoImageWriter};
use serde_json::{Map, Value};

use metadata_common::addresses;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::dialect;
use metadata_content::http::{Headers, Method, Request, RequestTarget};
use metadata_content::record::{Record, RecordLimits};
use metadata_content::store::path::OPENSTACK_VERSIONS;
use metadata_content::store::{Endpoint, Host, Interner, LiveOutcome, Responses, VmState};
use metadata_feed::directory;
use metadata_feed::state::private_file;

/// The format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// OpenStack's ConfigDrive (label `config-2`; cloud-init `DataSourceConfigDrive.py`, cloudbase-init).
    ConfigDrive,
    /// A NoCloud seed (label `cidata`; cloud-init `DataSourceNoCloud.py`).
    NoCloud,
}

impl ImageFormat {
    /// The volume label by which guests find the disk.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::ConfigDrive => "config-2",
            Self::NoCloud => "cidata",
        }
    }

    fn tree(self, documents: &Documents) -> anyhow::Result<Vec<InputEntry>> {
        match self {
            Self::ConfigDrive => documents.config_drive(),
            Self::NoCloud => documents.nocloud(),
        }
    }
}

/// Writes an image for each record of a file or directory to `dir`. An image has its record's file name, and only its
/// owner can read it. Prints each image to `out`. Records must keep to `limits`.
///
/// # Errors
/// A record is invalid or does not serve the dialect, or an image cannot be written. Images already written stay.
pub fn run(
    form: ImageFormat,
    records: &Path,
    limits: &RecordLimits,
    dir: &Path,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let (from, names) = directory::files(records)?;
    if names.is_empty() {
        bail!("no records (*.yaml, *.yml, *.json) in {}", records.display());
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for name in names {
        let Some(loaded) = directory::load(&from, &name, limits) else { continue };
        let record = loaded.record?.0;
        let documents = Documents::of(&record);
        let tree = form.tree(&documents).with_context(|| from.join(&name).display().to_string())?;
        let image = image(form, tree)?;
        let path: PathBuf = dir.join(Path::new(&name).with_extension("iso"));
        private_file::replace(&path, &image).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(
            out,
            "{}: {}, label {}, {} bytes",
            path.display(),
            record.vm.name,
            form.label(),
            image.len()
        )?;
    }
    File::open(dir)?.sync_all().with_context(|| format!("syncing {}", dir.display()))
}

fn image(form: ImageFormat, entries: Vec<InputEntry>) -> anyhow::Result<Vec<u8>> {
    let options = IsoFormatOptions {
        volume_name: form.label().to_owned(),
        system_id: Some("LINUX".into()),
        volume_set_id: None,
        publisher_id: None,
        preparer_id: None,
        application_id: Some("xdp-imds".into()),
        sector_size: 2048,
        // Rock Ridge (Linux) and Joliet (Windows) preserve lower case and hyphens in names.
        features: CreationFeatures::extensions(),
        path_separator: PathSeparator::ForwardSlash,
        // Guests compare the label case-sensitively.
        strict_charset: false,
    };
    let tree = InputTree::new(PathSeparator::ForwardSlash, entries);
    let image = IsoImageWriter::create(Cursor::new(Vec::new()), tree, options);
    Ok(image.context("cannot write an ISO 9660 image")?.into_inner())
}

/// The answers of a record.
struct Documents {
    responses: Responses,
}

impl Documents {
    fn of(record: &Record) -> Self {
        let vm = VmState::alone(record.owner_text());
        Self { responses: dialect::render(record, &mut Interner::new(), vm) }
    }

    /// The body of a path whose answer has status 200.
    fn found(&self, path: &str) -> anyhow::Result<Option<Vec<u8>>> {
        let target = RequestTarget { path, query: "" };
        let request = Request { method: Method::Get, target, headers: Headers::new(&[]), body: b"" };
        let address: IpAddr = addresses::METADATA.into();
        let connection = Connection { slot: 0, local: (address, 80), remote: (address, 0) };
        let now = Now { mono: Duration::ZERO, unix_seconds: 0 };
        match self.responses.answer(now, &connection, &request, None) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => match response.status().0 {
                200 => Ok(Some(response.body().to_bytes().to_vec())),
                204 | 404 => Ok(None),
                status => bail!(
                    "the answer at {path} has status {status}; check that the files that the record names exist"
                ),
            },
            LiveOutcome::Park(_) => Ok(None),
        }
    }

    /// Returns a file for each path `dir/name` whose answer has status 200.
    fn files(&self, dir: &str, names: &[&str]) -> anyhow::Result<Vec<InputEntry>> {
        let mut files = Vec::new();
        for name in names {
            if let Some(bytes) = self.found(&format!("{dir}/{name}"))? {
                files.push(InputEntry::file(*name, bytes));
            }
        }
        Ok(files)
    }

    fn nocloud(&self) -> anyhow::Result<Vec<InputEntry>> {
        let mut files = self.files("/v1", &["meta-data", "network-config", "user-data", "vendor-data"])?;
        let has = |files: &[InputEntry], name: &str| files.iter().any(|file| *file.name() == name);
        if !has(&files, "meta-data") {
            bail!("the record does not serve nocloud; add it to serve.dialects");
        }
        if !has(&files, "user-data") {
            // cloud-init ignores a seed without this file (`DataSourceNoCloud.py`).
            files.push(InputEntry::file("user-data", Vec::new()));
        }
        Ok(files)
    }

    fn config_drive(&self) -> anyhow::Result<Vec<InputEntry>> {
        const NAMES: [&str; 5] =
            ["meta_data.json", "network_data.json", "user_data", "vendor_data.json", "vendor_data2.json"];
        let files = self.files("/openstack/latest", &NAMES)?;
        if files.is_empty() {
            bail!("the record does not serve openstack; add it to serve.dialects");
        }
        let content: Vec<&str> = self
            .responses
            .routes()
            .filter(|(host, ..)| *host == Host::Metadata)
            .filter_map(|(_, path, _)| path.strip_prefix("/openstack/content/"))
            .collect();
        let mut openstack = vec![InputEntry::directory("latest", files.clone())];
        openstack.extend(OPENSTACK_VERSIONS.map(|version| InputEntry::directory(version, files.clone())));
        if !content.is_empty() {
            openstack.push(InputEntry::directory("content", self.files("/openstack/content", &content)?));
        }
        let mut tree = vec![InputEntry::directory("openstack", openstack)];
        if let Some(meta_data) = self.ec2_meta_data() {
            let mut files = vec![InputEntry::file("meta-data.json", meta_data.to_string())];
            files.extend(self.files("/latest", &["user-data"])?);
            let versions =
                ["2009-04-04", "latest"].map(|version| InputEntry::directory(version, files.clone()));
            tree.push(InputEntry::directory("ec2", versions.into()));
        }
        Ok(tree)
    }

    /// EC2's tree as one document, as nova writes it to a ConfigDrive. Paths that need a token are left out.
    fn ec2_meta_data(&self) -> Option<Value> {
        let leaves: Vec<(String, &str)> = self
            .responses
            .routes()
            .filter(|(host, _, route)| {
                *host == Host::Metadata
                    && route.guards().iter().all(|guard| guard.condition.asks_for_nothing())
            })
            .flat_map(|(_, path, route)| match route.endpoint() {
                Endpoint::Fixed(response) => match response.body().pieces() {
                    [piece] => vec![(path.to_owned(), std::str::from_utf8(piece).unwrap_or_default())],
                    _ => Vec::new(),
                },
                Endpoint::Live(live) => {
                    live.leaves().into_iter().map(|(below, text)| (format!("{path}{below}"), text)).collect()
                }
            })
            .filter_map(|(path, text)| {
                path.strip_prefix("/latest/meta-data/").map(|path| (path.to_owned(), text))
            })
            .collect();
        let is_directory = |path: &str| {
            leaves.iter().any(|(other, _)| other.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
        };
        let mut document = Map::new();
        for (path, text) in leaves.iter().filter(|(path, _)| !is_directory(path)) {
            let (dirs, leaf) =
                path.rsplit_once('/').map_or((None, path.as_str()), |(dirs, leaf)| (Some(dirs), leaf));
            let mut at = &mut document;
            for dir in dirs.iter().flat_map(|dirs| dirs.split('/')) {
                let below = at.entry(dir).or_insert_with(|| Map::new().into());
                at = below.as_object_mut()?;
            }
            at.insert(leaf.to_owned(), (*text).into());
        }
        (!document.is_empty()).then(|| document.into())
    }
}

#[cfg(test)]
mod tests {
    use super::{ImageFormat, run};
    use hadris_iso::sync::read::IsoImage;
    use metadata_content::record::RecordLimits;
    use serde_json::Value;
    use std::collections::BTreeMap;
    use std::io::Cursor;
    use std::os::unix::fs::PermissionsExt as _;

    const FULL: &str = include_str!("../../../tests/vectors/record.yaml");
    const USER_DATA: &str = "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n";

    fn image(form: ImageFormat, record: &str) -> anyhow::Result<Vec<u8>> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("web.yaml"), record)?;
        std::fs::set_permissions(dir.path().join("web.yaml"), std::fs::Permissions::from_mode(0o640))?;
        let images = dir.path().join("images");
        run(form, &dir.path().join("web.yaml"), &RecordLimits::DEFAULT, &images, &mut Vec::new())?;
        let path = images.join("web.iso");
        let mode = std::fs::metadata(&path)?.permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it holds the record's secrets");
        Ok(std::fs::read(path)?)
    }

    /// Every file of an image, by path.
    fn files(image: Vec<u8>) -> BTreeMap<String, Vec<u8>> {
        let image = IsoImage::open(Cursor::new(image)).expect("an image");
        let mut files = BTreeMap::new();
        let mut dirs = vec![(String::new(), image.root_dir().dir_ref())];
        while let Some((path, dir)) = dirs.pop() {
            for entry in image.open_dir(dir).entries() {
                let entry = entry.expect("an entry");
                if entry.is_special() {
                    continue;
                }
                let path = format!("{path}/{}", entry.display_name());
                match entry.as_dir_ref(&image) {
                    Ok(below) if entry.is_directory() => dirs.push((path, below)),
                    _ => drop(files.insert(path, image.read_file(&entry).expect("a file"))),
                }
            }
        }
        files
    }

    fn label(image: &[u8]) -> String {
        // The primary volume descriptor (ECMA-119 §8.4.7).
        String::from_utf8_lossy(&image[16 * 2048 + 40..16 * 2048 + 72]).trim_end().to_owned()
    }

    #[test]
    fn a_config_drive_holds_what_http_answers() {
        let image = image(ImageFormat::ConfigDrive, FULL).expect("an image");
        assert_eq!(label(&image), "config-2");
        let files = files(image);
        let text = |path: &str| String::from_utf8_lossy(files.get(path).expect(path)).into_owned();
        for version in ["latest", "2012-08-10", "2018-08-27"] {
            assert_eq!(text(&format!("/openstack/{version}/user_data")), USER_DATA);
            let meta_data: Value =
                serde_json::from_str(&text(&format!("/openstack/{version}/meta_data.json")))
                    .expect("meta_data.json is JSON");
            assert_eq!(meta_data["hostname"], "web-1.example.internal");
        }
        let ec2: Value = serde_json::from_str(&text("/ec2/latest/meta-data.json")).expect("JSON");
        assert_eq!(ec2["instance-id"], "i-0f5e8a1b2c3d4e5f6");
        assert_eq!(ec2["placement"]["availability-zone"], "local-a");
        assert!(
            ec2["public-keys"]["0"]["openssh-key"]
                .as_str()
                .is_some_and(|key| key.starts_with("ssh-ed25519 "))
        );
        assert_eq!(text("/ec2/2009-04-04/user-data"), USER_DATA);
        assert!(!ec2.to_string().contains("sk-example"), "credentials need a token");
    }

    #[test]
    fn a_nocloud_seed_has_a_user_data_file_even_without_user_data() {
        let bare =
            FULL.lines().filter(|line| !line.starts_with("user_data:") && !line.starts_with("vendor_data:"));
        let bare: String = bare.map(|line| format!("{line}\n")).collect();
        for (record, user_data, others) in [
            (FULL, USER_DATA, &["/meta-data", "/network-config", "/user-data", "/vendor-data"][..]),
            (bare.as_str(), "", &["/meta-data", "/network-config", "/user-data"][..]),
        ] {
            let image = image(ImageFormat::NoCloud, record).expect("an image");
            assert_eq!(label(&image), "cidata");
            let files = files(image);
            assert_eq!(files.keys().collect::<Vec<_>>(), others);
            assert_eq!(files["/user-data"], user_data.as_bytes());
        }
    }

    #[test]
    fn a_record_that_does_not_serve_the_dialect_is_refused() {
        let record = FULL.replacen("absent_seed: 204", "dialects: [kubevirt]", 1);
        for form in [ImageFormat::NoCloud, ImageFormat::ConfigDrive] {
            let error = image(form, &record).expect_err("nothing to write");
            assert!(format!("{error:#}").contains("add it to serve.dialects"), "{error:#}");
        }
    }
}
