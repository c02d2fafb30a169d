//! NICs and addresses in the forms that several dialects use.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::Value;

use crate::record::network::{Address, AddressMethod, Network};
use crate::record::values::{Cidr, NicMac};
use crate::record::{Nic, Record, Role};

/// Returns the NICs that the hypervisor provides, with index and MAC. The guest creates VLANs and bonds itself, and few
/// dialects can describe them.
pub(super) fn given(network: &Network) -> impl Iterator<Item = (usize, &Nic, NicMac)> {
    let given = |nic: &Nic| nic.vlan.is_none() && nic.bond.is_none();
    let nics = network.nics.iter().enumerate();
    nics.filter(move |(_, nic)| given(nic)).filter_map(|(n, nic)| Some((n, nic, nic.mac?)))
}

/// Returns the known addresses of one version, including the expected leases of DHCP.
pub(super) fn known(nic: &Nic, version: IpVersion) -> impl Iterator<Item = (&Address, Cidr)> {
    let known = nic.addresses.iter().filter_map(|address| Some((address, address.address?)));
    known.filter(move |(_, cidr)| IpVersion::of(cidr.address) == version)
}

/// IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IpVersion {
    V4,
    V6,
}

impl IpVersion {
    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the version of an entry whose address may be unknown.
    pub(super) fn of_entry(entry: &Address) -> Self {
        match (entry.method, entry.address) {
            (AddressMethod::Dhcp4, _) => Self::V4,
            (AddressMethod::Dhcp6 | AddressMethod::Slaac, _) => Self::V6,
            (AddressMethod::Static, cidr) => cidr.map_or(Self::V4, |cidr| Self::of(cidr.address)),
        }
    }
}

/// Returns whether the NIC has addresses of this version, known or not.
pub(super) fn speaks(nic: &Nic, version: IpVersion) -> bool {
    nic.addresses.iter().any(|address| IpVersion::of_entry(address) == version)
}

/// Returns whether the VM has IPv6 addresses only. Its documents then omit all IPv4 members.
pub(super) fn only_ipv6(network: &Network) -> bool {
    let any = |version| network.nics.iter().any(|nic| speaks(nic, version));
    any(IpVersion::V6) && !any(IpVersion::V4)
}

/// Returns the netmask of an IPv4 prefix length.
pub(super) fn netmask(prefix: u8) -> Ipv4Addr {
    u32::MAX.checked_shl(32_u32.saturating_sub(prefix.into())).unwrap_or(0).into()
}

/// Returns the first address of the network, with the prefix length.
pub(super) fn network_of(cidr: Cidr) -> Cidr {
    let address = match cidr.address {
        IpAddr::V4(address) => (address & netmask(cidr.prefix)).into(),
        IpAddr::V6(address) => {
            let bits = u128::MAX.checked_shl(128_u32.saturating_sub(cidr.prefix.into())).unwrap_or(0);
            (address & Ipv6Addr::from(bits)).into()
        }
    };
    Cidr { address, ..cidr }
}

/// Returns the gateway; empty without one.
pub(super) fn gateway(address: &Address) -> String {
    address.gateway.map(|gateway| gateway.to_string()).unwrap_or_default()
}

/// Returns `public` or `private`.
pub(super) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Public => "public",
        Role::Private => "private",
    }
}

/// Returns the resolvers as a list of strings.
pub(super) fn resolvers(network: &Network) -> Value {
    network.dns.iter().map(ToString::to_string).collect()
}

/// Returns the public keys as a list of strings.
pub(super) fn public_keys(record: &Record) -> Value {
    record.ssh_keys.iter().map(|key| key.key.as_str()).collect()
}

/// Returns the labels as a list of strings.
pub(super) fn labels(record: &Record) -> Value {
    record.labels.iter().map(|label| label.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::{netmask, network_of};
    use crate::record::values::Cidr;

    #[test]
    fn a_prefix_length_determines_netmask_and_first_address() {
        for (address, prefix, first, mask) in [
            ("10.1.2.3", 0, "0.0.0.0", "0.0.0.0"),
            ("10.1.2.3", 9, "10.0.0.0", "255.128.0.0"),
            ("10.1.2.3", 24, "10.1.2.0", "255.255.255.0"),
            ("10.1.2.3", 32, "10.1.2.3", "255.255.255.255"),
        ] {
            let cidr = Cidr { address: address.parse().expect(address), prefix };
            assert_eq!(network_of(cidr).to_string(), format!("{first}/{prefix}"));
            assert_eq!(netmask(prefix).to_string(), mask);
        }
        for (prefix, first) in [(0, "::"), (64, "2001:db8::"), (128, "2001:db8::15")] {
            let cidr = Cidr { address: "2001:db8::15".parse().expect("an address"), prefix };
            assert_eq!(network_of(cidr).to_string(), format!("{first}/{prefix}"));
        }
    }
}
