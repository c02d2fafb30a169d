//! Checks the need of Proxmox VE's feed: the directory of configurations.

use super::super::facts::PathFacts;
use super::super::{Check, CheckStatus, Facts};

/// The bit of a directory's mode that pmxcfs takes away while the cluster has no quorum.
const WRITABLE: u32 = 0o200;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(directory) = &facts.proxmox else { return Vec::new() };
    let shown = directory.path.display();
    let found = match &directory.found {
        Ok(Some(PathFacts { directory: true, mode, .. })) if mode & WRITABLE != 0 => {
            let found = format!("{shown}, the configurations of the VMs on this node");
            return vec![Check::ok("proxmox.directory", found)];
        }
        Ok(Some(PathFacts { directory: true, .. })) => {
            let check = Check::fail(
                "proxmox.directory",
                format!("{shown} is read-only"),
                "a cluster with quorum; without it Proxmox VE changes no VM, and the agent serves them as they are",
                "See `pvecm status`",
            );
            return vec![Check { status: CheckStatus::Warn, ..check }];
        }
        Ok(Some(_)) => format!("{shown} is not a directory"),
        Ok(None) => format!("{shown} does not exist"),
        Err(failure) => format!("{shown}: {failure}"),
    };
    vec![Check::fail(
        "proxmox.directory",
        found,
        "the directory of the VMs' configurations, which the service pve-cluster mounts",
        "On a node of Proxmox VE see `systemctl status pve-cluster`. Elsewhere remove `proxmox` from the configuration",
    )]
}
