//! Renders a record's network as cloud-init's network-config version 2, and as Debian's `interfaces`.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::{Map, Value};

use crate::dialect::json::json;
use crate::record::Nic;
use crate::record::network::{Address, Bond, Method, Network};

/// Renders network-config version 2 (the netplan form).
pub(super) fn version_2(network: &Network) -> Value {
    let mut document = Map::new();
    document.insert("version".into(), 2.into());
    for nic in &network.nics {
        let mut device = Map::new();
        let section = match (&nic.bond, &nic.vlan) {
            (Some(bond), _) => {
                device.insert("interfaces".into(), labels(network, bond).collect());
                device.insert("parameters".into(), parameters(bond));
                "bonds"
            }
            (None, Some(vlan)) => {
                device.insert("id".into(), vlan.id.get().into());
                device.insert("link".into(), label(network, vlan.link.as_str()).into());
                "vlans"
            }
            (None, None) => "ethernets",
        };
        if section == "ethernets" {
            device.insert("match".into(), json!({ "macaddress": nic.mac.map(|mac| mac.to_string()) }));
            if let Some(name) = &nic.name {
                device.insert("set-name".into(), name.as_str().into());
            }
        } else if let Some(mac) = nic.mac {
            device.insert("macaddress".into(), mac.to_string().into());
        }
        addressing(network, nic, &mut device);
        let section = document.entry(section).or_insert_with(|| Map::new().into());
        section.as_object_mut().expect("sections are mappings").insert(nic.label().into(), device.into());
    }
    document.into()
}

/// Returns the label of the NIC with this id. Validation ensures that it exists.
fn label<'a>(network: &'a Network, id: &'a str) -> &'a str {
    network.nics.iter().find(|nic| nic.id.as_str() == id).map_or(id, Nic::label)
}

fn labels<'a>(network: &'a Network, bond: &'a Bond) -> impl Iterator<Item = &'a str> {
    bond.links.iter().map(|link| label(network, link.as_str()))
}

fn parameters(bond: &Bond) -> Value {
    let mut parameters = Map::new();
    parameters.insert("mode".into(), bond.mode.as_str().into());
    if let Some(milliseconds) = bond.miimon {
        parameters.insert("mii-monitor-interval".into(), milliseconds.into());
    }
    if let Some(policy) = &bond.xmit_hash_policy {
        parameters.insert("transmit-hash-policy".into(), policy.as_str().into());
    }
    if let Some(rate) = bond.lacp_rate {
        parameters.insert("lacp-rate".into(), rate.as_str().into());
    }
    parameters.into()
}

fn addressing(network: &Network, nic: &Nic, device: &mut Map<String, Value>) {
    if let Some(mtu) = nic.mtu {
        device.insert("mtu".into(), mtu.get().into());
    }
    for (method, key) in [(Method::Dhcp4, "dhcp4"), (Method::Dhcp6, "dhcp6"), (Method::Slaac, "accept-ra")] {
        if nic.addresses.iter().any(|address| address.method == method) {
            device.insert(key.into(), true.into());
        }
    }
    let addresses: Vec<Value> =
        statics(nic).filter_map(|address| Some(address.address?.to_string().into())).collect();
    if !addresses.is_empty() {
        device.insert("addresses".into(), addresses.into());
        if let Some(nameservers) = nameservers(network) {
            device.insert("nameservers".into(), nameservers);
        }
    }
    let routes = routes(nic);
    if !routes.is_empty() {
        device.insert("routes".into(), routes.into());
    }
}

fn statics(nic: &Nic) -> impl Iterator<Item = &Address> {
    nic.addresses.iter().filter(|address| address.method == Method::Static)
}

/// Returns resolvers and search domains, for NICs with static addresses.
fn nameservers(network: &Network) -> Option<Value> {
    let mut nameservers = Map::new();
    if !network.dns.is_empty() {
        nameservers.insert("addresses".into(), network.dns.iter().map(ToString::to_string).collect());
    }
    if !network.search.is_empty() {
        nameservers.insert("search".into(), network.search.iter().map(ToString::to_string).collect());
    }
    (!nameservers.is_empty()).then(|| nameservers.into())
}

fn routes(nic: &Nic) -> Vec<Value> {
    let gateways = statics(nic).filter_map(|address| address.gateway).map(|gateway| {
        // Older clients accept `default` for IPv4 only.
        let to = if gateway.0.is_ipv4() { "default" } else { "::/0" };
        json!({ "to": to, "via": gateway.to_string() })
    });
    let further = nic.routes.iter().map(|route| {
        let mut entry = json!({ "to": route.to.to_string(), "via": route.via.to_string() });
        if let (Some(metric), Some(entry)) = (route.metric, entry.as_object_mut()) {
            entry.insert("metric".into(), metric.into());
        }
        entry
    });
    gateways.chain(further).collect()
}

/// Renders Debian's `interfaces(5)`, the only form that cloud-init before 24.3 accepts over HTTP. Leaves out VLANs and
/// bonds, because their syntax differs between guests.
pub(super) fn interfaces(network: &Network) -> String {
    let mut text = String::from("auto lo\niface lo inet loopback\n");
    for nic in network.nics.iter().filter(|nic| nic.vlan.is_none() && nic.bond.is_none()) {
        write!(text, "\nauto {}\n", nic.label()).expect("writing to a String cannot fail");
        for address in &nic.addresses {
            text.push_str(&stanza(network, nic, address));
        }
        if nic.addresses.is_empty() {
            writeln!(text, "iface {} inet manual", nic.label()).expect("writing to a String cannot fail");
        }
    }
    text
}

fn stanza(network: &Network, nic: &Nic, address: &Address) -> String {
    let (family, how) = match (address.method, address.address.map(|cidr| cidr.address)) {
        (Method::Dhcp4, _) => ("inet", "dhcp"),
        (Method::Dhcp6, _) => ("inet6", "dhcp"),
        (Method::Slaac, _) => ("inet6", "auto"),
        (Method::Static, Some(IpAddr::V6(_))) => ("inet6", "static"),
        (Method::Static, _) => ("inet", "static"),
    };
    let mut lines = vec![format!("iface {} {family} {how}", nic.label())];
    if let Some(mac) = nic.mac {
        lines.push(format!("    hwaddress ether {mac}"));
    }
    if let Some(mtu) = nic.mtu {
        lines.push(format!("    mtu {}", mtu.get()));
    }
    if let (Method::Static, Some(cidr)) = (address.method, address.address) {
        lines.push(format!("    address {}", cidr.address));
        lines.push(format!("    netmask {}", netmask(cidr.address, cidr.prefix)));
        lines.extend(address.gateway.map(|gateway| format!("    gateway {gateway}")));
        for (key, values) in
            [("dns-nameservers", listed(&network.dns)), ("dns-search", listed(&network.search))]
        {
            if !values.is_empty() {
                lines.push(format!("    {key} {values}"));
            }
        }
    }
    lines.join("\n") + "\n"
}

fn netmask(address: IpAddr, prefix: u8) -> String {
    match address {
        IpAddr::V4(_) => {
            let bits = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            std::net::Ipv4Addr::from(bits).to_string()
        }
        IpAddr::V6(_) => prefix.to_string(),
    }
}

fn listed<T: ToString>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
