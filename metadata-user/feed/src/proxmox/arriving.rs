//! VMs that arrive by live migration: QEMU and its taps run on this node while the configuration is still at the node
//! that the VM leaves. qemu-server moves the file when the VM runs here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use metadata_links::netlink;

use super::load::VMID_MOST;

/// Most nodes of a cluster that are asked for a configuration. Proxmox VE supports fewer.
const NODES: usize = 128;

/// Returns the numbers of VMs whose taps are in the agent's network namespace. Without an answer of the kernel there are
/// none: such a VM is served when its configuration arrives.
pub(super) fn with_taps() -> BTreeSet<u32> {
    netlink::names().unwrap_or_default().iter().filter_map(|name| vmid_of_tap(name)).collect()
}

/// The number of the VM that a tap belongs to: `tap<vmid>i<n>`.
fn vmid_of_tap(name: &str) -> Option<u32> {
    let (digits, nic) = name.strip_prefix("tap")?.split_once('i')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|octet| octet.is_ascii_digit());
    let vmid = digits.parse().ok().filter(|vmid: &u32| (1..=VMID_MOST).contains(vmid))?;
    (is_number(nic) && vmid.to_string() == digits).then_some(vmid)
}

/// Returns the configuration of a VM at another node of the cluster, `nodes/NODE/qemu-server` beside this node's
/// directory.
pub(super) fn elsewhere(directory: &Path, vmid: u32) -> Option<PathBuf> {
    let nodes = std::fs::read_dir(directory.parent()?.join("nodes")).ok()?;
    let paths = nodes.take(NODES).filter_map(Result::ok);
    paths.map(|node| node.path().join(format!("qemu-server/{vmid}.conf"))).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::{elsewhere, vmid_of_tap};

    #[test]
    fn a_tap_names_its_vm() {
        for (name, vmid) in [
            ("tap100i0", Some(100)),
            ("tap999999999i31", Some(999_999_999)),
            ("tap0100i0", None),
            ("tap0i0", None),
            ("tap1000000000i0", None),
            ("tap100", None),
            ("tap100i", None),
            ("tap100ix", None),
            ("fwpr100p0", None),
            ("tapi0", None),
        ] {
            assert_eq!(vmid_of_tap(name), vmid, "{name}");
        }
    }

    #[test]
    fn a_configuration_is_found_at_whichever_node_has_it() {
        let cluster = tempfile::tempdir().expect("a directory");
        let own = cluster.path().join("qemu-server");
        assert_eq!(elsewhere(&own, 100), None, "not a cluster");
        let there = cluster.path().join("nodes/b/qemu-server");
        std::fs::create_dir_all(cluster.path().join("nodes/a")).expect("a node");
        std::fs::create_dir_all(&there).expect("a node");
        assert_eq!(elsewhere(&own, 100), None);
        std::fs::write(there.join("100.conf"), "").expect("written");
        assert_eq!(elsewhere(&own, 100), Some(there.join("100.conf")));
        assert_eq!(elsewhere(&own, 10), None);
    }
}
