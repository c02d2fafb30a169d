//! KubeVirt's names of a network's devices (its `pkg/network/namescheme` and `pkg/network/link`).

use metadata_base::hex::hex;
use sha2::{Digest as _, Sha256};

/// The tap of the primary network, whatever the name of the pod's NIC.
const PRIMARY_TAP: &str = "tap0";
/// Octets of the hash in a name, two digits each, without the last digit.
const HASH_OCTETS: usize = 6;
/// Digits of the hash in a name.
const HASH_DIGITS: usize = 11;

/// The device names of one network of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicNames {
    /// The CNI plugin's device, or with a bridge binding the dummy that keeps its name and MAC.
    pub pod: String,
    /// The guest's tap.
    pub tap: String,
    /// The bridge between them.
    pub bridge: String,
}

/// The possible device names of a network, the current scheme first, then that of versions that number secondary
/// networks. `ordinal` is the network's position among the VM's secondary ones, from 1; `None` is the primary network.
#[must_use]
pub fn names_of(network: &str, ordinal: Option<usize>) -> Vec<NicNames> {
    let Some(ordinal) = ordinal else {
        return vec![NicNames { pod: "eth0".into(), tap: PRIMARY_TAP.into(), bridge: "k6t-eth0".into() }];
    };
    let hash = hash(network);
    let hashed =
        NicNames { pod: format!("pod{hash}"), tap: format!("tap{hash}"), bridge: format!("k6t-{hash}") };
    let numbered = NicNames {
        pod: format!("net{ordinal}"),
        tap: format!("tap{ordinal}"),
        bridge: format!("k6t-net{ordinal}"),
    };
    vec![hashed, numbered]
}

/// The first hex digits of the SHA-256 of a network's name.
fn hash(network: &str) -> String {
    let digest = Sha256::digest(network.as_bytes());
    let mut text = hex(&digest[..HASH_OCTETS]);
    text.truncate(HASH_DIGITS);
    text
}

#[cfg(test)]
mod tests {
    use super::names_of;

    #[test]
    fn the_primary_network_has_fixed_names() {
        let names = names_of("default", None);
        assert_eq!(names.len(), 1);
        assert_eq!((&*names[0].tap, &*names[0].bridge), ("tap0", "k6t-eth0"));
    }

    #[test]
    fn secondary_networks_are_named_by_hash_and_formerly_by_number() {
        // printf blue | sha256sum
        let names = names_of("blue", Some(2));
        let all: Vec<_> = names.iter().map(|n| (&*n.pod, &*n.tap, &*n.bridge)).collect();
        assert_eq!(
            all,
            [("pod16477688c0e", "tap16477688c0e", "k6t-16477688c0e"), ("net2", "tap2", "k6t-net2")]
        );
        for name in names.iter().flat_map(|names| [&names.pod, &names.tap, &names.bridge]) {
            assert!(name.len() <= 15, "{name}");
        }
    }
}
