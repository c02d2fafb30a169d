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
pub mod drive;
mod load;
mod translate;
pub mod watch;

#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_content::source::RecordSource;

use crate::FeedError;
use crate::check::{Check, directory_fault};
use crate::publisher::Publisher;
use crate::source::{FailureStreak, Source, SourceContext, SourceHealth, SourceTask};
pub use config::{DEFAULT_DIRECTORY, DEFAULT_FILES, ProxmoxOptions, VmConfig};
pub use load::{reachable, within};
pub use translate::{NICS, ProxmoxTranslation, TranslationInput, translate};
pub use watch::{MAX_VMS, PATIENCE, ProxmoxHealth, ProxmoxProblem, watch};

/// How often the feed looks at the files. A VM whose file arrives by live migration runs before its record is in force
/// for at most this time.
pub const LOOK: Duration = Duration::from_secs(1);

/// An I/O error with its path and the feed's expectation.
fn io_error(path: &Path, expected: &'static str, error: io::Error) -> FeedError {
    FeedError::Io { path: path.to_owned(), expected, error: error.into() }
}

// Proxmox VE as a source of the agent: how it is run, what status says of it, and what it needs on the node.

/// The bit of a directory's mode that pmxcfs takes away while the cluster has no quorum.
const WRITABLE: u32 = 0o200;

/// The VMs of a Proxmox VE node.
pub struct ProxmoxSource {
    options: ProxmoxOptions,
    health: Arc<ProxmoxHealth>,
}

impl ProxmoxSource {
    /// The source with its section of the configuration.
    #[must_use]
    pub fn new(options: ProxmoxOptions) -> Self {
        Self { options, health: Arc::new(ProxmoxHealth::new(Instant::now())) }
    }
}

impl Source for ProxmoxSource {
    fn kind(&self) -> RecordSource {
        RecordSource::Proxmox
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        let (options, health) = (self.options.clone(), Arc::clone(&self.health));
        Box::pin(async move {
            watch(options, context.limits, health, publisher).await;
            Ok(())
        })
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.options.directory)
    }

    fn try_read(&self) -> Result<(), FeedError> {
        reachable(&self.options)
    }

    fn health(&self) -> Option<SourceHealth> {
        let report = self.health.report(Instant::now());
        let directory = self.options.directory.display();
        let failing = report.failing.as_ref().map(|FailureStreak { since, reason, .. }| {
            format!(
                "{directory} has not been readable for {since:.0} s: {reason}; `systemctl status pve-cluster` shows why"
            )
        });
        let read_only = report.read_only.then(|| {
            format!(
                "{directory} is read-only: the cluster has no quorum; `pvecm status` shows which nodes are missing"
            )
        });
        Some(SourceHealth {
            reads: directory.to_string(),
            asked_for: report.asked_for,
            answered: report.looked,
            failing: report.failing,
            notes: report
                .read_only
                .then(|| "read-only: the cluster has no quorum".into())
                .into_iter()
                .collect(),
            problems: failing.into_iter().chain(read_only).collect(),
            ..SourceHealth::default()
        })
    }

    fn preflight(&self) -> Vec<Check> {
        let directory = self.options.directory.clone();
        // The cluster's file system may not answer.
        let found = within(PATIENCE, move || std::fs::metadata(directory));
        let found = found.unwrap_or_else(|| Err(ErrorKind::TimedOut.into()));
        vec![check(&self.options.directory, found.map(|found| (found.is_dir(), found.mode())))]
    }

    fn parts(&self) -> Option<&Path> {
        Some(&self.options.files)
    }
}

/// Judges the directory of configurations, by whether it is a directory and its mode.
fn check(path: &Path, found: io::Result<(bool, u32)>) -> Check {
    const NAME: &str = "proxmox.directory";
    let shown = path.display();
    let is_writable = found.as_ref().is_ok_and(|(_, mode)| mode & WRITABLE != 0);
    match directory_fault(path, found.map(|(is_directory, _)| is_directory)) {
        None if is_writable => {
            Check::ok(NAME, format!("{shown}, the configurations of the VMs on this node"))
        }
        None => Check::warn(
            NAME,
            format!("{shown} is read-only"),
            "a cluster with quorum; without it Proxmox VE changes no VM, and the agent serves them as they are",
            "See `pvecm status`",
        ),
        Some(fault) => Check::fail(
            NAME,
            fault,
            "the directory of the VMs' configurations, which the service pve-cluster mounts",
            "On a node of Proxmox VE see `systemctl status pve-cluster`. Elsewhere remove `proxmox` from the \
             configuration",
        ),
    }
}
