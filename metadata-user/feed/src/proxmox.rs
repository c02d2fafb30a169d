//! The feed of a Proxmox VE node: one record for each VM that is on the node, from `/etc/pve/qemu-server/<vmid>.conf`.
//!
//! The directory is a view into the cluster's file system (pmxcfs), which replicates it by corosync. So:
//!
//! - Changes of other nodes raise no event: the feed looks at the files every [`LOOK`].
//! - The mount may be unavailable at startup and later, and each access may wait. No record is removed for that: only a
//!   directory that can be listed, and does not list a VM, says that the VM is gone.
//! - A VM is on the node whose directory has its file. While it migrates live, its taps are on another node too, which
//!   serves it by the file where that still is.
//!
//! A guest gets what Proxmox VE's own cloud-init drive would say ([`drive`]), in every dialect. [`translate()`] says
//! how the parts of a record override each other.

pub mod config;
pub mod custom;
pub mod drive;
mod load;
mod source;
mod translate;
pub mod watch;

#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;
use std::time::Duration;

pub use config::VmConfig;
pub use config::{DEFAULT_DIRECTORY, DEFAULT_FILES, ProxmoxOptions};
pub use load::{reachable, within};
pub use source::ProxmoxSource;
pub use translate::NICS;
pub use translate::{ProxmoxTranslation, TranslationInput, translate};
pub use watch::{MAX_VMS, PATIENCE, watch};
pub use watch::{ProxmoxHealth, ProxmoxProblem};

use crate::FeedError;

/// How often the feed looks at the files. A VM whose file arrives by live migration runs before its record is in force
/// for at most this time.
pub const LOOK: Duration = Duration::from_secs(1);

/// An I/O error with its path and the feed's expectation.
fn io_error(path: &Path, expected: &'static str, error: io::Error) -> FeedError {
    FeedError::Io { path: path.to_owned(), expected, error: error.into() }
}
