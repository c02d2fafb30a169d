//! Tests the check of what Proxmox VE's feed needs.

use super::super::super::CheckStatus::{Fail, Warn};
use super::super::super::facts::{Directory, Facts, PathFacts};
use super::judge;

fn needs(facts: &mut Facts) -> &mut Directory {
    facts.proxmox.as_mut().expect("the feed is on")
}

#[test]
fn the_directory_of_proxmox_ves_configurations_is_checked() {
    judge(&[
        (
            "not mounted",
            |f| needs(f).found = Ok(None),
            "proxmox.directory",
            Fail,
            &["/some/directory does not exist", "systemctl status pve-cluster"],
        ),
        (
            "a file",
            |f| needs(f).found = Ok(Some(PathFacts { directory: false, mode: 0o644, owner: 0 })),
            "proxmox.directory",
            Fail,
            &["/some/directory is not a directory"],
        ),
        (
            "no quorum",
            |f| needs(f).found = Ok(Some(PathFacts { directory: true, mode: 0o555, owner: 0 })),
            "proxmox.directory",
            Warn,
            &["read-only", "quorum", "pvecm status"],
        ),
    ]);
}
