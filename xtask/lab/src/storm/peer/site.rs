//! What a peer serves: the same octets as ours, laid out once for whichever server reads them.
//!
//! A document that all guests share is stored once; of the others each guest has its own file,
//! `<directory>/<address>/<number of the document>`, on a file system in memory.

use super::{OWN_MAC, Page, Tenant};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use metadata_common::mac::Mac;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Files go where reading them needs no disk.
const IN_MEMORY: &str = "/dev/shm";
/// The directory of documents all guests share.
const SHARED: &str = "all";

/// One path and how it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Perhaps with [`OWN_MAC`] in it.
    pub(super) path: String,
    pub(super) method: String,
    pub(super) status: u16,
    pub(super) content_type: String,
    /// Its number: the file's name.
    pub(super) number: usize,
    /// The body, if it is the same for every guest.
    pub(super) shared: Option<Bytes>,
}

/// Files of all guests and the paths they answer.
pub(super) struct Site {
    directory: TempDir,
    entries: Vec<Entry>,
    guests: Vec<(String, Mac)>,
    largest: usize,
}

impl Site {
    /// Lays out the pages of all tenants.
    ///
    /// # Errors
    /// When guests differ in more than their bodies, or files cannot be written.
    pub(super) fn lay_out(tenants: &[Tenant]) -> Result<Self> {
        let base =
            if Path::new(IN_MEMORY).is_dir() { PathBuf::from(IN_MEMORY) } else { std::env::temp_dir() };
        let directory = tempfile::Builder::new().prefix("xdp-imds-storm-").tempdir_in(base)?;
        let first = tenants.first().context("a storm has at least one guest")?;
        let mut entries = Vec::new();
        let mut numbers = HashMap::new();
        for (number, page) in first.pages.iter().enumerate() {
            // Clients ask twice for some; that is one entry, if it is one answer.
            if let Some(earlier) = numbers.insert(page.path.as_str(), page) {
                ensure!(
                    (&earlier.method, earlier.status, &earlier.body)
                        == (&page.method, page.status, &page.body),
                    "{} is answered in two ways; a peer has one answer",
                    page.path
                );
                continue;
            }
            entries.push(entry(number, page, tenants)?);
        }
        let site = Self {
            guests: tenants.iter().map(|tenant| (tenant.address.to_string(), tenant.mac)).collect(),
            largest: tenants.iter().flat_map(|t| &t.pages).map(|page| page.body.len()).max().unwrap_or(0),
            directory,
            entries,
        };
        site.write(tenants)?;
        Ok(site)
    }

    fn write(&self, tenants: &[Tenant]) -> Result<()> {
        let write = |path: PathBuf, body: &[u8]| {
            std::fs::write(&path, body).with_context(|| format!("cannot write {}", path.display()))
        };
        std::fs::create_dir(self.directory.path().join(SHARED))?;
        for entry in &self.entries {
            if let Some(body) = &entry.shared {
                write(self.file(SHARED, entry), body)?;
            }
        }
        for (tenant, (address, _)) in tenants.iter().zip(&self.guests) {
            std::fs::create_dir(self.directory.path().join(address))?;
            for entry in self.entries.iter().filter(|entry| entry.shared.is_none()) {
                write(self.file(address, entry), &tenant.pages[entry.number].body)?;
            }
        }
        Ok(())
    }

    /// Where everything is; sockets and configurations may go there too.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Every path, in the order of the first guest's pages.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Guests: the address, as the directory is named, and the MAC.
    pub(super) fn guests(&self) -> &[(String, Mac)] {
        &self.guests
    }

    /// Octets of the largest body.
    pub(super) fn largest(&self) -> usize {
        self.largest
    }

    /// Files there are.
    pub(super) fn files(&self) -> usize {
        let shared = self.entries.iter().filter(|entry| entry.shared.is_some()).count();
        shared + (self.entries.len() - shared) * self.guests.len()
    }

    /// The file that answers `entry` for the guest at this address, or for all.
    pub(super) fn file(&self, address: &str, entry: &Entry) -> PathBuf {
        let directory = if entry.shared.is_some() { SHARED } else { address };
        self.directory.path().join(directory).join(entry.number.to_string())
    }
}

/// The entry of one page, once every guest has it.
fn entry(number: usize, page: &Page, tenants: &[Tenant]) -> Result<Entry> {
    let Page { method, path, status, content_type, body } = page;
    // Configurations name paths: nothing in them may end a word or a line.
    let plain = path.replace(OWN_MAC, "");
    ensure!(
        plain.starts_with('/') && plain.bytes().all(|o| o.is_ascii_alphanumeric() || b"/-._~:@".contains(&o)),
        "a peer cannot be told of the path {path}"
    );
    for tenant in tenants {
        let same = tenant
            .pages
            .get(number)
            .is_some_and(|other| (&other.method, &other.path, other.status) == (method, path, *status));
        ensure!(same, "{path}: {} is answered otherwise than the first guest", tenant.tap);
    }
    let shared = tenants.iter().all(|tenant| tenant.pages[number].body == *body);
    // What is no file is written into a configuration, once.
    ensure!(
        shared || *status == 200,
        "{path}: a body of its own with status {status} cannot be served from a file"
    );
    Ok(Entry {
        path: path.clone(),
        method: method.clone(),
        status: *status,
        content_type: content_type.clone(),
        number,
        shared: shared.then(|| body.clone()),
    })
}
