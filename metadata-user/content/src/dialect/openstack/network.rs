//! `network_data.json`: links, the networks on them, and resolvers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::{Map, Value};

use crate::dialect::json::json;
use crate::record::network::{Address, AddressMethod, Network, NetworkMode, NicRoute};
use crate::record::values::{Cidr, NicMac};
use crate::record::{Nic, Record};

/// Returns the document; `None` in mode `none` and without NICs, because clients read an empty list of links as a guest
/// without NICs.
pub(super) fn network_data(record: &Record) -> Option<Value> {
    let network = &record.network;
    if network.mode == NetworkMode::None || network.nics.is_empty() {
        return None;
    }
    let mut networks = Vec::new();
    for nic in &network.nics {
        let mut routes: Vec<&NicRoute> = nic.routes.iter().collect();
        for address in &nic.addresses {
            let id = networks.len();
            networks.push(network_of(network, nic, address, &mut routes, id));
        }
    }
    Some(json!({
        "links": network.nics.iter().map(|nic| link(network, nic)).collect::<Vec<_>>(),
        "networks": networks,
        "services": services(network),
    }))
}

fn link(network: &Network, nic: &Nic) -> Value {
    let mut link = Map::new();
    let mut add = |key: &str, value: Value| link.insert(key.to_owned(), value);
    add("id", nic.id.as_str().into());
    add("mtu", nic.mtu.map(|mtu| mtu.get()).into());
    let mac: Value = mac(network, nic).map(|mac| mac.to_string()).into();
    if let Some(vlan) = &nic.vlan {
        add("type", "vlan".into());
        add("vlan_link", vlan.link.as_str().into());
        add("vlan_id", vlan.id.get().into());
        add("vlan_mac_address", mac);
        return link.into();
    }
    add("ethernet_mac_address", mac);
    match &nic.bond {
        Some(bond) => {
            add("type", "bond".into());
            add("bond_links", bond.links.iter().map(|id| id.as_str()).collect());
            add("bond_mode", bond.mode.as_str().into());
            // Options are text, as in the bonding driver: a number makes Talos refuse the document (`,string` in Go).
            // cloud-init makes the same of both.
            let named = [
                ("bond_miimon", bond.miimon.map(|milliseconds| milliseconds.to_string().into())),
                (
                    "bond_xmit_hash_policy",
                    bond.xmit_hash_policy.as_ref().map(|policy| policy.as_str().into()),
                ),
                ("bond_lacp_rate", bond.lacp_rate.map(|rate| rate.as_str().into())),
            ];
            for (key, value) in named {
                value.map(|value| add(key, value));
            }
        }
        None => {
            add("type", "phy".into());
            add("vif_id", nic.id.as_str().into());
        }
    }
    link.into()
}

/// Returns the NIC's MAC, or that of the NIC below it, which the kernel would use. Clients require a MAC.
fn mac(network: &Network, nic: &Nic) -> Option<NicMac> {
    let mut nic = nic;
    // A VLAN may be on a bond, and a bond on NICs. A chain longer than the number of NICs is a loop.
    for _ in 0..network.nics.len() {
        if nic.mac.is_some() {
            return nic.mac;
        }
        let bonded = || nic.bond.as_ref().and_then(|bond| bond.links.first());
        let below = nic.vlan.as_ref().map(|vlan| &vlan.link).or_else(bonded)?;
        nic = network.nics.iter().find(|nic| nic.id == *below)?;
    }
    None
}

/// Returns one network: an address and how the guest gets it. Moves the routes of its IP version out of `routes`.
fn network_of(
    network: &Network,
    nic: &Nic,
    address: &Address,
    routes: &mut Vec<&NicRoute>,
    id: usize,
) -> Value {
    let is_v4 = match address.method {
        AddressMethod::Static => address.address.is_some_and(|cidr| cidr.address.is_ipv4()),
        AddressMethod::Dhcp4 => true,
        AddressMethod::Dhcp6 | AddressMethod::Slaac => false,
    };
    let kind = match address.method {
        AddressMethod::Static if is_v4 => "ipv4",
        AddressMethod::Static => "ipv6",
        AddressMethod::Dhcp4 => "ipv4_dhcp",
        // Every client knows this name. The names of the DHCPv6 modes are newer.
        AddressMethod::Dhcp6 => "ipv6_dhcp",
        AddressMethod::Slaac => "ipv6_slaac",
    };
    let mut document = json!({ "id": format!("network{id}"), "link": nic.id.as_str(), "type": kind });
    let mut add = |key: &str, value: Value| document[key] = value;
    // Nova's schema requires it (`nova/api/metadata/network_data_schema.json`).
    add("network_id", nic.network_id.as_ref().map_or_else(|| nic.id.as_str(), |id| id.as_str()).into());
    let is_static = address.method == AddressMethod::Static;
    let of_family = |route: &&NicRoute| route.to.address.is_ipv4() == is_v4;
    let (own, others): (Vec<_>, Vec<_>) = std::mem::take(routes).into_iter().partition(of_family);
    *routes = others;
    let default = address.gateway.filter(|_| is_static).map(|gateway| {
        let any = if is_v4 { "0.0.0.0" } else { "::" };
        json!({ "network": any, "netmask": any, "gateway": gateway.to_string() })
    });
    let listed: Vec<Value> = default.into_iter().chain(own.into_iter().map(route)).collect();
    if is_static || !listed.is_empty() {
        add("routes", listed.into());
    }
    if let Some(cidr) = address.address.filter(|_| is_static) {
        add("ip_address", cidr.address.to_string().into());
        add("netmask", mask(cidr).to_string().into());
        add("services", services(network));
    }
    document
}

fn route(route: &NicRoute) -> Value {
    let mask = mask(route.to);
    let destination: IpAddr = match (route.to.address, mask) {
        (IpAddr::V4(address), IpAddr::V4(mask)) => (address & mask).into(),
        (IpAddr::V6(address), IpAddr::V6(mask)) => (address & mask).into(),
        (address, _) => address,
    };
    let mut entry = json!({
        "network": destination.to_string(),
        "netmask": mask.to_string(),
        "gateway": route.via.to_string(),
    });
    if let Some(metric) = route.metric {
        entry["metric"] = metric.into();
    }
    entry
}

/// Returns the netmask of a prefix, in address form for IPv6 too.
fn mask(cidr: Cidr) -> IpAddr {
    let prefix = u32::from(cidr.prefix);
    match cidr.address {
        IpAddr::V4(_) => Ipv4Addr::from(u32::MAX.checked_shl(32 - prefix).unwrap_or(0)).into(),
        IpAddr::V6(_) => Ipv6Addr::from(u128::MAX.checked_shl(128 - prefix).unwrap_or(0)).into(),
    }
}

fn services(network: &Network) -> Value {
    network.dns.iter().map(|address| json!({ "type": "dns", "address": address.to_string() })).collect()
}
