//! The feed of libvirt: one record for each domain, written by libvirt's hook.
//!
//! libvirt runs the scripts in `/etc/libvirt/hooks/qemu.d/` when a domain starts, stops or migrates, and passes the
//! domain's XML on standard input (libvirt, docs/hooks.rst). `xdp-imds libvirt-hook` is one of these scripts. It writes
//! or removes the domain's record in `hook.d` below the agent's run directory. The agent watches `hook.d` like any
//! directory of records. The hook never calls libvirt, because libvirt waits for the hook: a call would
//! deadlock.
//!
//! A record has four sources; each overrides those before it:
//!
//! 1. the domain: name, UUID, architecture, NICs and their taps;
//! 2. `defaults.yaml` in the directory of files, for all domains of the host;
//! 3. the domain's `<metadata>`: an element `instance` of [`NAMESPACE`] ([`instance`] has its form);
//! 4. `<uuid>.yaml` in the directory of files.
//!
//! The files hold parts of a record ([`crate::record_part`]): mappings merge, lists and payloads replace, `null` removes a
//! value, and MAC or id identify a NIC. A domain with neither 3 nor 4 gets no record.

pub mod domain;
pub mod hook;
pub mod instance;
pub mod nova;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::publisher::Publisher;
use crate::record_part::PartError;
use crate::source::{Source, SourceContext, SourceTask};
use crate::{FeedError, directory};
use metadata_content::record::{RecordError, RecordLimits};
use metadata_content::source::RecordSource;

/// The XML namespace of our element in a domain's `<metadata>`.
pub const NAMESPACE: &str = "https://xdp-imds.dev/libvirt/1";

/// The directory of records below the run directory.
pub const DIRECTORY: &str = "hook.d";

/// Where the packages install the hook's script.
pub const HOOK: &str = "/etc/libvirt/hooks/qemu.d/xdp-imds";
/// The directory of QEMU's hooks.
pub const HOOKS: &str = "/etc/libvirt/hooks/qemu.d";

/// Default directory of files with parts of records.
pub const DEFAULT_FILES: &str = "/etc/xdp-imds/libvirt";

/// Where libvirt keeps what it knows of each running domain of QEMU (`stateDir` in src/qemu/qemu_conf.c).
pub const RUNNING: &str = "/run/libvirt/qemu";

/// Most bytes of a domain's XML. libvirt's protocol carries 4 MiB (REMOTE_STRING_MAX in src/remote/remote_protocol.x),
/// and libvirt then formats the XML again.
pub const XML_BYTES: usize = 8 << 20;

/// Most elements, texts and comments in the XML; a domain with hundreds of devices has about ten thousand.
pub const XML_NODES: u32 = 1 << 18;

/// Most mentions of `xmlns` in the XML; libvirt's own documents have fewer than ten.
pub const XML_NAMESPACES: usize = 256;

/// How an operator changes the metadata of a running domain, as every message and page says it. `virsh edit` changes
/// only what the domain has from its next start on, and `virsh metadata --edit` refuses to change both at once.
#[must_use]
pub fn remedy(domain: &str) -> String {
    format!(
        "change a running domain with `virsh metadata {domain} {NAMESPACE} --key imds --live --edit` (`virsh edit` \
         changes only its next start), or the file; then run `{}`",
        rerun(domain)
    )
}

/// The command that has the hook read the metadata of a running domain and its files again.
#[must_use]
pub fn rerun(domain: &str) -> String {
    format!("virsh dumpxml {domain} | {HOOK} {domain} reconnect begin -")
}

/// Why a domain gets no record.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LibvirtError {
    /// The XML differs from libvirt's format.
    #[error("the domain's XML: expected {expected}, found {found}")]
    Xml {
        /// What was expected.
        expected: String,
        /// What the XML contains instead.
        found: String,
    },
    /// Our element in the domain's metadata is invalid.
    #[error("<metadata> of the domain, line {line}: expected {expected}, found {found}")]
    Instance {
        /// The line in libvirt's formatting of the XML.
        line: u32,
        /// What was expected.
        expected: String,
        /// What the element contains instead.
        found: String,
    },
    /// A file with a part of a record is invalid.
    #[error(transparent)]
    Part(#[from] PartError),
    /// A file cannot be read or written.
    #[error("{}: expected {expected}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the hook needs from it.
        expected: &'static str,
        /// The kernel's error.
        error: Arc<io::Error>,
    },
    /// The assembled record is invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// An I/O error with its path and the hook's expectation.
fn io_error(path: &Path, expected: &'static str, error: io::Error) -> LibvirtError {
    LibvirtError::Io { path: path.to_owned(), expected, error: error.into() }
}

/// The records that libvirt's hook writes into a directory.
pub struct HookDirectory(PathBuf);

impl HookDirectory {
    /// The directory below a run directory.
    #[must_use]
    pub fn of(run: &Path) -> Self {
        Self(run.join(DIRECTORY))
    }
}

impl Source for HookDirectory {
    fn kind(&self) -> RecordSource {
        RecordSource::Hook
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        Box::pin(watch(self.0.clone(), context.limits, publisher))
    }

    fn is_reread(&self) -> bool {
        true
    }
}

/// Watches the hook's records like [`directory::watch`], and what it refused. A record's key is its domain's UUID.
///
/// # Errors
/// The errors of [`directory::watch`].
pub async fn watch(dir: PathBuf, limits: RecordLimits, tx: impl Into<Publisher>) -> Result<(), FeedError> {
    directory::watch_with_refusals(dir, limits, tx.into().named(uuid)).await
}

/// A file's name without its extension.
fn uuid(name: String) -> String {
    name.rsplit_once('.').map_or(name.clone(), |(uuid, _)| uuid.to_owned())
}
