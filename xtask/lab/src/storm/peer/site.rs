//! The files that a peer serves: the same octets as the agent's, written once for all servers.
//!
//! A document that all guests share is stored once. Of the other documents each guest has its own file,
//! `<directory>/<address>/<number of the document>`, on a file system in memory.

use super::{OWN_MAC, Page, Tenant};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use metadata_common::mac::Mac;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The directory for files, so that reading them needs no disk.
const IN_MEMORY: &str = "/dev/shm";
/// The directory of documents that all guests share.
const SHARED: &str = "all";

/// A path and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The path, which may contain [`OWN_MAC`].
    pub(super) path: String,
    pub(super) method: String,
    pub(super) status: u16,
    pub(super) content_type: String,
    /// The number of the document, which is its file's name.
    pub(super) number: usize,
    /// The body, if it is the same for every guest.
    pub(super) shared: Option<Bytes>,
}

/// The files of all guests, and the paths that they answer.
pub(super) struct Site {
    directory: TempDir,
    entries: Vec<Entry>,
    guests: Vec<(String, Mac)>,
    largest: usize,
}

impl Site {
    /// Writes the pages of all tenants.
    ///
    /// # Errors
    /// Fails if guests differ in more than their bodies, or if files cannot be written.
    pub(super) fn lay_out(tenants: &[Tenant]) -> Result<Self> {
        let base =
            if Path::new(IN_MEMORY).is_dir() { PathBuf::from(IN_MEMORY) } else { std::env::temp_dir() };
        let directory = tempfile::Builder::new().prefix("xdp-imds-storm-").tempdir_in(base)?;
        let first = tenants.first().context("the storm has no guest")?;
        let mut entries = Vec::new();
        let mut numbers = HashMap::new();
        for (number, page) in first.pages.iter().enumerate() {
            // Clients request some paths twice. Those are one entry if their answers are equal.
            if let Some(earlier) = numbers.insert(page.path.as_str(), page) {
                ensure!(
                    (&earlier.method, earlier.status, &earlier.body)
                        == (&page.method, page.status, &page.body),
                    "{} has two different answers; a peer can give only one",
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

    /// Returns the directory of all files. Sockets and configurations may be added to it.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns every path, in the order of the first guest's pages.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the guests: the address, which names the directory, and the MAC.
    pub(super) fn guests(&self) -> &[(String, Mac)] {
        &self.guests
    }

    /// Returns the octets of the largest body.
    pub(super) fn largest(&self) -> usize {
        self.largest
    }

    /// Returns the number of files.
    pub(super) fn files(&self) -> usize {
        let shared = self.entries.iter().filter(|entry| entry.shared.is_some()).count();
        shared + (self.entries.len() - shared) * self.guests.len()
    }

    /// Returns the file that answers `entry` for the guest at this address, or for all guests.
    pub(super) fn file(&self, address: &str, entry: &Entry) -> PathBuf {
        let directory = if entry.shared.is_some() { SHARED } else { address };
        self.directory.path().join(directory).join(entry.number.to_string())
    }
}

/// Returns the entry of one page, after checking that every guest has the page.
fn entry(number: usize, page: &Page, tenants: &[Tenant]) -> Result<Entry> {
    let Page { method, path, status, content_type, body } = page;
    // Paths are written into configurations, so no character in them may end a word or a line.
    let plain = path.replace(OWN_MAC, "");
    ensure!(
        plain.starts_with('/') && plain.bytes().all(|o| o.is_ascii_alphanumeric() || b"/-._~:@".contains(&o)),
        "the path {path} cannot be written in a peer's configuration"
    );
    for tenant in tenants {
        let same = tenant
            .pages
            .get(number)
            .is_some_and(|other| (&other.method, &other.path, other.status) == (method, path, *status));
        ensure!(same, "{path}: the answer of {} differs from the first guest's", tenant.tap);
    }
    let shared = tenants.iter().all(|tenant| tenant.pages[number].body == *body);
    // An answer that is not a file is written into the configuration, once for all guests.
    ensure!(
        shared || *status == 200,
        "{path}: a guest's own body with status {status} cannot be served from a file"
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
