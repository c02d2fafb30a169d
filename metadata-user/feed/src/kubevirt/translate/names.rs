//! The possible names of a NIC's devices in its pod.

use std::collections::BTreeSet;

use crate::kubevirt::vmi::Vmi;
use crate::pods::names_of;

/// The possible names of a NIC's devices, the most likely first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Its tap.
    pub(super) taps: Vec<String>,
    /// The pod's NIC, from which the guest takes its MAC if the VMI gives none.
    pub(super) pod_nics: Vec<String>,
}

/// Returns the device names of the NIC on a network of the VMI.
///
/// KubeVirt before 0.59 numbers secondary networks; later versions hash the network's name. Each name stays for the
/// life of the VM, through migrations too. Only the VMI's status shows which scheme applies, and it arrives late.
pub(super) fn names(vmi: &Vmi, network: &str) -> Names {
    let told = vmi.status.interfaces.iter().find(|there| there.name.as_deref() == Some(network));
    let told = told.and_then(|there| there.pod_interface_name.clone()).filter(|name| !name.is_empty());
    let mut secondary = vmi.spec.networks.iter().filter(|network| network.is_secondary());
    let at = secondary.position(|there| there.name == network);
    let usual = names_of(network, at.map(|at| at + 1));
    // The primary tap's name is fixed; the others derive from the pod NIC's name.
    let by_status = told.as_deref().filter(|_| at.is_some()).and_then(|nic| nic.get(3..));
    let by_status = by_status.map(|rest| format!("tap{rest}"));
    Names {
        taps: distinct(by_status.into_iter().chain(usual.iter().map(|names| names.tap.clone()))),
        pod_nics: distinct(told.into_iter().chain(usual.into_iter().map(|names| names.pod))),
    }
}

/// Removes duplicates: the names from the status usually equal the derived ones.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::names;
    use crate::kubevirt::vmi::Vmi;
    use serde_json::json;

    #[test]
    fn a_nic_is_found_under_every_name_kubevirt_gives() {
        let vmi = Vmi::from_value(json!({
            "spec": {"networks": [
                {"name": "red", "multus": {"networkName": "r"}},
                {"name": "pod", "pod": {}},
                {"name": "blue", "multus": {"networkName": "b"}},
                {"name": "green", "multus": {"networkName": "g"}},
            ]},
            "status": {"interfaces": [
                {"name": "green", "podInterfaceName": "net3"},
                {"podInterfaceName": "docker0"},
            ]},
        }))
        .expect("a VMI");
        // printf red | sha256sum
        let cases: [(&str, &[&str], &[&str]); 4] = [
            ("pod", &["tap0"], &["eth0"]),
            ("red", &["tapb1f51a511f1", "tap1"], &["podb1f51a511f1", "net1"]),
            ("blue", &["tap16477688c0e", "tap2"], &["pod16477688c0e", "net2"]),
            ("green", &["tap3", "tapba4788b226a"], &["net3", "podba4788b226a"]),
        ];
        for (network, taps, pod_nics) in cases {
            let names = names(&vmi, network);
            assert_eq!(names.taps, taps, "{network}");
            assert_eq!(names.pod_nics, pod_nics, "{network}");
        }
    }

    #[test]
    fn the_primary_networks_tap_has_a_fixed_name() {
        let vmi = Vmi::from_value(json!({
            "spec": {"networks": [{"name": "udn", "multus": {"networkName": "u", "default": true}}]},
            "status": {"interfaces": [{"name": "udn", "podInterfaceName": "ovn-udn1"}]},
        }))
        .expect("a VMI");
        let names = names(&vmi, "udn");
        assert_eq!(names.taps, ["tap0"]);
        assert_eq!(names.pod_nics, ["ovn-udn1", "eth0"]);
    }
}
