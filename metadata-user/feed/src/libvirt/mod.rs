//! The feed of libvirt: one record for each domain, written by libvirt's hook.
//!
//! libvirt runs the scripts in `/etc/libvirt/hooks/qemu.d/` when a domain starts, stops or migrates, and passes the
//! domain's XML on standard input (libvirt, docs/hooks.rst). `xdp-imds libvirt-hook` is one of these scripts. It writes
//! or removes the domain's record in `hook.d` below the agent's run directory. The agent watches `hook.d` like any
//! directory of records. The hook never calls libvirt, because a hook that calls back waits for itself.
//!
//! A record has four sources; each overrides those before it:
//!
//! the domain: name, UUID, architecture, NICs and their taps;
//! 2. `defaults.yaml` in the directory of files, for all domains of the host;
//! 3. the domain's `<metadata>`: an element `instance` of [`NAMESPACE`] ([`instance`] has its form);
//! 4. `<uuid>.yaml` in the directory of files.
//!
//! Files hold part of a record: mappings are merged, lists and payloads replaced, `null` takes a value away, and NICs
//! are found by their MAC or id ([`merge`]). A domain with neither 3 nor 4 gets no record.

pub mod compose;
pub mod domain;
pub mod hook;
pub mod instance;
pub mod merge;
pub mod syslog;
mod watch;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metadata_content::record::RecordError;
pub use watch::watch;

/// The namespace of our element in a domain's `<metadata>`.
pub const NAMESPACE: &str = "https://xdp-imds.dev/libvirt/1";

/// The directory of records below the run directory.
pub const DIRECTORY: &str = "hook.d";

/// Where files with parts of records are unless the command line says otherwise.
pub const DEFAULT_FILES: &str = "/etc/xdp-imds/libvirt";

/// The file with what all domains of the host have in common.
pub const DEFAULTS: &str = "defaults.yaml";

/// Most octets of a domain's XML: libvirt's protocol carries 4 MiB of it (REMOTE_STRING_MAX in
/// src/remote/remote_protocol.x), and formats it anew.
pub const XML_OCTETS: usize = 8 << 20;

/// Most elements, texts and comments in it: a domain with hundreds of devices has some ten thousand.
pub const XML_NODES: u32 = 1 << 18;

/// Fields of a record whose octets may be in a file of their own.
const PAYLOADS: [&str; 3] = ["user_data", "vendor_data", "vendor_data2"];

/// Why there is no record of a domain.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LibvirtError {
    /// The XML is not what libvirt writes.
    #[error("the domain's XML: expected {expected}, found {found}")]
    Xml {
        /// What was expected.
        expected: String,
        /// What came.
        found: String,
    },
    /// Our element in the domain's metadata is not what it should be.
    #[error(
        "<metadata> of the domain, line {line}: expected {expected}, found {found}; change it by `virsh edit`"
    )]
    Instance {
        /// The line in the XML as libvirt writes it.
        line: u32,
        /// What was expected.
        expected: String,
        /// What came.
        found: String,
    },
    /// A file with a part of a record is not what it should be.
    #[error("{}: expected {expected}, found {found}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// Something cannot be read or written.
    #[error("{}: expected {expected}: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the hook wanted of it.
        expected: &'static str,
        /// What the kernel said.
        error: Arc<io::Error>,
    },
    /// What all of it comes to is no record.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// An I/O error with its path.
fn io_error(path: &Path, expected: &'static str, error: io::Error) -> LibvirtError {
    LibvirtError::Io { path: path.to_owned(), expected, error: error.into() }
}
