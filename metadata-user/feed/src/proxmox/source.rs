//! Proxmox VE as a source of the agent: how it is run, what status says of it, and what it needs on the node.

use metadata_content::source::RecordSource;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::{PATIENCE, ProxmoxHealth, ProxmoxOptions, reachable, watch, within};
use crate::FeedError;
use crate::check::{Check, directory_fault};
use crate::publisher::Publisher;
use crate::source::{FailureStreak, Source, SourceContext, SourceHealth, SourceTask};

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

#[cfg(test)]
mod tests {
    use super::check;
    use crate::check::CheckStatus::{Fail, Ok as Good, Warn};
    use std::io::ErrorKind;
    use std::path::Path;

    #[test]
    fn the_directory_of_configurations_is_checked() {
        for (what, found, status, words) in [
            ("mounted", Ok((true, 0o755)), Good, &["/some/directory"][..]),
            (
                "not mounted",
                Err(ErrorKind::NotFound.into()),
                Fail,
                &["/some/directory does not exist", "systemctl status pve-cluster"],
            ),
            ("a file", Ok((false, 0o644)), Fail, &["/some/directory is not a directory"]),
            ("silent", Err(ErrorKind::TimedOut.into()), Fail, &["/some/directory: timed out"]),
            ("no quorum", Ok((true, 0o555)), Warn, &["read-only", "quorum", "pvecm status"]),
        ] {
            let check = check(Path::new("/some/directory"), found);
            assert_eq!((check.name, check.status), ("proxmox.directory", status), "{what}");
            let said = format!("{} {:?} {:?}", check.found, check.expected, check.remedy);
            assert!(words.iter().all(|word| said.contains(word)), "{what}: {said}");
        }
    }
}
