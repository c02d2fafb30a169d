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
        private_file::replace(&path, &image).with_context(|| format!("writing {}", path.display()))?;
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
    Ok(image.context("writing an ISO 9660 image")?.into_inner())
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
mod tests;
