//! What documents say of NICs and their addresses, whatever the dialect.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::Value;

use crate::record::network::{Address, Method, Network};
use crate::record::values::{Cidr, NicMac};
use crate::record::{Nic, Record, Role};

/// The NICs the hypervisor gives the VM: VLANs and bonds are made by the guest, and few dialects know them.
pub(super) fn given(network: &Network) -> impl Iterator<Item = (usize, &Nic, NicMac)> {
    let given = |nic: &Nic| nic.vlan.is_none() && nic.bond.is_none();
    let nics = network.nics.iter().enumerate();
    nics.filter(move |(_, nic)| given(nic)).filter_map(|(n, nic)| Some((n, nic, nic.mac?)))
}

/// The addresses of one version that are known, with those DHCP will give.
pub(super) fn known(nic: &Nic, version: Version) -> impl Iterator<Item = (&Address, Cidr)> {
    let known = nic.addresses.iter().filter_map(|address| Some((address, address.address?)));
    known.filter(move |(_, cidr)| Version::of(cidr.address) == version)
}

/// A version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    V4,
    V6,
}

impl Version {
    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The version of an address that may not be known.
    pub(super) fn of_entry(entry: &Address) -> Self {
        match (entry.method, entry.address) {
            (Method::Dhcp4, _) => Self::V4,
            (Method::Dhcp6 | Method::Slaac, _) => Self::V6,
            (Method::Static, cidr) => cidr.map_or(Self::V4, |cidr| Self::of(cidr.address)),
        }
    }
}

/// True when the NIC has addresses of this version, known or not.
pub(super) fn speaks(nic: &Nic, version: Version) -> bool {
    nic.addresses.iter().any(|address| Version::of_entry(address) == version)
}

/// True when the VM has addresses, and all are IPv6: its documents then say nothing of IPv4.
pub(super) fn only_ipv6(network: &Network) -> bool {
    let any = |version| network.nics.iter().any(|nic| speaks(nic, version));
    any(Version::V6) && !any(Version::V4)
}

/// The netmask of an IPv4 prefix.
pub(super) fn netmask(prefix: u8) -> Ipv4Addr {
    u32::MAX.checked_shl(32_u32.saturating_sub(prefix.into())).unwrap_or(0).into()
}

/// The network an address is in.
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

/// The gateway, or nothing.
pub(super) fn gateway(address: &Address) -> String {
    address.gateway.map(|gateway| gateway.to_string()).unwrap_or_default()
}

/// `public` or `private`.
pub(super) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Public => "public",
        Role::Private => "private",
    }
}

/// The resolvers as a list of strings.
pub(super) fn resolvers(network: &Network) -> Value {
    network.dns.iter().map(ToString::to_string).collect()
}

/// The public keys as a list of strings.
pub(super) fn public_keys(record: &Record) -> Value {
    record.ssh_keys.iter().map(|key| key.key.as_str()).collect()
}

/// The labels as a list of strings.
pub(super) fn labels(record: &Record) -> Value {
    record.labels.iter().map(|label| label.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::{netmask, network_of};
    use crate::record::values::Cidr;

    #[test]
    fn networks_of_every_length_have_their_mask_and_first_address() {
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
