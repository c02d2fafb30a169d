//! What a NIC's devices in its pod may be called.

use std::collections::BTreeSet;

use crate::kubevirt::vmi::Vmi;
use crate::pods::names_of;

/// What a NIC's devices may be called, the likeliest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Its tap.
    pub(super) taps: Vec<String>,
    /// The NIC of the pod whose MAC the guest has when it is given none.
    pub(super) pod_nics: Vec<String>,
}

/// The names of the devices of the NIC on a network of the VMI.
///
/// Pods made before KubeVirt 0.59 count their secondary networks, later ones hash the network's name. Both stay what
/// they are as long as the VM runs, through migrations too, and nothing in the VMI tells which it is but, later, its
/// status.
pub(super) fn names(vmi: &Vmi, network: &str) -> Names {
    let told = vmi.status.interfaces.iter().find(|there| there.name.as_deref() == Some(network));
    let told = told.and_then(|there| there.pod_interface_name.clone()).filter(|name| !name.is_empty());
    let mut secondary = vmi.spec.networks.iter().filter(|network| network.is_secondary());
    let at = secondary.position(|there| there.name == network);
    let usual = names_of(network, at.map(|at| at + 1));
    // The primary tap has its name whatever the pod's NIC is called; the others are named after theirs.
    let by_status = told.as_deref().filter(|_| at.is_some()).and_then(|nic| nic.get(3..));
    let by_status = by_status.map(|rest| format!("tap{rest}"));
    Names {
        taps: distinct(by_status.into_iter().chain(usual.iter().map(|names| names.tap.clone()))),
        pod_nics: distinct(told.into_iter().chain(usual.into_iter().map(|names| names.pod))),
    }
}

/// What the status says is mostly what is usual.
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
    fn a_nic_is_looked_for_under_every_name_kubevirt_gives() {
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
    fn the_primary_networks_tap_has_its_name_whatever_the_pods_nic_is_called() {
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
