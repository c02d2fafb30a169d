//! VMs that arrive by live migration: QEMU and its taps run on this node while the configuration is still at the node
//! that the VM leaves. qemu-server moves the file when the VM runs here.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::load::VMID_MOST;

/// Most nodes of a cluster that are asked for a configuration. Proxmox VE supports fewer.
const NODES: usize = 128;
/// Devices of the network namespace of the thread that reads it (proc_net(5)): two lines of heads, then a line for each
/// device, with its name before a colon.
const DEVICES: &str = "/proc/thread-self/net/dev";

/// Returns the numbers of the VMs whose taps are in the agent's network namespace.
///
/// # Errors
/// The devices cannot be read.
pub(super) fn with_taps() -> io::Result<BTreeSet<u32>> {
    Ok(of_devices(&std::fs::read_to_string(DEVICES)?))
}

fn of_devices(lines: &str) -> BTreeSet<u32> {
    lines
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter_map(|(name, _)| vmid_of_tap(name.trim()))
        .collect()
}

/// The number of the VM that a tap belongs to: `tap<vmid>i<n>`.
fn vmid_of_tap(name: &str) -> Option<u32> {
    let (digits, nic) = name.strip_prefix("tap")?.split_once('i')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|octet| octet.is_ascii_digit());
    let vmid = digits.parse().ok().filter(|vmid: &u32| (1..=VMID_MOST).contains(vmid))?;
    (is_number(nic) && vmid.to_string() == digits).then_some(vmid)
}

/// Returns the configuration of a VM at another node of the cluster, `nodes/NODE/qemu-server` beside this node's
/// directory, or at this one by now; `None` if no node has one.
///
/// # Errors
/// A node's directory cannot be read, so it is unknown whether it has one.
pub(super) fn elsewhere(directory: &Path, vmid: u32) -> io::Result<Option<PathBuf>> {
    let Some(cluster) = directory.parent() else { return Ok(None) };
    let nodes = match std::fs::read_dir(cluster.join("nodes")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        nodes => nodes?,
    };
    let name = format!("{vmid}.conf");
    // This node comes last: a file that moves here during the search would be found nowhere.
    let nodes = nodes.take(NODES).map(|node| node.map(|node| node.path().join("qemu-server")));
    for place in nodes.chain([Ok(directory.to_owned())]) {
        let path = place?.join(&name);
        if path.try_exists()? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::{elsewhere, of_devices, vmid_of_tap, with_taps};

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
    fn vms_are_found_by_the_devices_of_the_namespace() {
        let devices =
            "Inter-|   Receive\n face |bytes\n    lo:       0\ntap101i0: 12\ntap101i1:0\n tap7i0: 1\n";
        assert_eq!(of_devices(devices), [7, 101].into());
        with_taps().expect("the kernel's list can be read");
    }

    #[test]
    fn a_configuration_is_found_at_whichever_node_has_it() {
        let cluster = tempfile::tempdir().expect("a directory");
        let own = cluster.path().join("qemu-server");
        let elsewhere = |vmid| elsewhere(&own, vmid).expect("readable");
        assert_eq!(elsewhere(100), None, "not a cluster");
        let there = cluster.path().join("nodes/b/qemu-server");
        std::fs::create_dir_all(cluster.path().join("nodes/a")).expect("a node");
        std::fs::create_dir_all(&there).expect("a node");
        assert_eq!(elsewhere(100), None);
        std::fs::write(there.join("100.conf"), "").expect("written");
        assert_eq!(elsewhere(100), Some(there.join("100.conf")));
        assert_eq!(elsewhere(10), None);
        std::fs::create_dir(&own).expect("a directory");
        std::fs::write(own.join("10.conf"), "").expect("moved here");
        assert_eq!(elsewhere(10), Some(own.join("10.conf")));
    }

    #[test]
    fn a_node_that_cannot_be_read_is_no_node_without_the_vm() {
        let cluster = tempfile::tempdir().expect("a directory");
        std::fs::write(cluster.path().join("nodes"), "").expect("a file in place of the directory");
        elsewhere(&cluster.path().join("qemu-server"), 100).expect_err("nothing is known");
    }
}
