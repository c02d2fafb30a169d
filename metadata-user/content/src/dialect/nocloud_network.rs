//! Renders a record's network as cloud-init's network-config version 2, and as Debian's `interfaces`.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::{Map, Value};

use crate::dialect::json::json;
use crate::record::Nic;
use crate::record::network::{Address, AddressMethod, Bond, Network};

/// How a default gateway is written.
///
/// `gateway4` and `gateway6` are the only form that every renderer of cloud-init from 20.4 on understands: until 25.3
/// only netplan's knows the destination `default`, before 23.1 the others make `::/64` of `::/0`, and before 25.3
/// ifupdown's needs net-tools for routes. From 23.1 on cloud-init calls that form deprecated, and its status
/// `degraded`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gateways {
    Members,
    /// Routes, for cloud-init from [`ROUTES_SINCE`] on. ifupdown's renderer gives them no device, so a link-local
    /// gateway stays a member.
    Routes,
}

/// First release of cloud-init that renders default routes right everywhere, but for [`Gateways::Routes`]'s exception.
pub(super) const ROUTES_SINCE: (u32, u32) = (25, 3);

/// Renders network-config version 2 (the netplan form).
pub(super) fn version_2(network: &Network, form: Gateways) -> Value {
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
        addressing(network, nic, form, &mut device);
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

fn addressing(network: &Network, nic: &Nic, form: Gateways, device: &mut Map<String, Value>) {
    if let Some(mtu) = nic.mtu {
        device.insert("mtu".into(), mtu.get().into());
    }
    for (method, key) in [
        (AddressMethod::Dhcp4, "dhcp4"),
        (AddressMethod::Dhcp6, "dhcp6"),
        (AddressMethod::Slaac, "accept-ra"),
    ] {
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
    gateways(nic, form, device);
    let further: Vec<Value> =
        nic.routes.iter().map(|route| entry(nic, route.to.to_string(), route.via.0, route.metric)).collect();
    if !further.is_empty() {
        let routes = device.entry("routes").or_insert_with(|| json!([]));
        routes.as_array_mut().expect("routes are a list").extend(further);
    }
}

fn statics(nic: &Nic) -> impl Iterator<Item = &Address> {
    nic.addresses.iter().filter(|address| address.method == AddressMethod::Static)
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

/// Adds the default gateways. A member has no `on-link`, so a gateway outside the NIC's prefixes is a route in both
/// forms.
fn gateways(nic: &Nic, form: Gateways, device: &mut Map<String, Value>) {
    let is_link_local =
        |gateway: IpAddr| matches!(gateway, IpAddr::V6(address) if address.is_unicast_link_local());
    let mut seen: Vec<IpAddr> = Vec::new();
    for gateway in statics(nic).filter_map(|address| Some(address.gateway?.0)) {
        if seen.contains(&gateway) {
            continue;
        }
        seen.push(gateway);
        let (key, everything) =
            if gateway.is_ipv4() { ("gateway4", "0.0.0.0/0") } else { ("gateway6", "::/0") };
        let is_route = form == Gateways::Routes && !is_link_local(gateway);
        if is_route || device.contains_key(key) || nic.is_off_link(gateway) {
            let routes = device.entry("routes").or_insert_with(|| json!([]));
            let route = entry(nic, everything.to_owned(), gateway, None);
            routes.as_array_mut().expect("routes are a list").push(route);
        } else {
            device.insert(key.into(), gateway.to_string().into());
        }
    }
}

fn entry(nic: &Nic, to: String, via: IpAddr, metric: Option<u32>) -> Value {
    let mut entry = json!({ "to": to, "via": via.to_string() });
    if nic.is_off_link(via) {
        entry["on-link"] = true.into();
    }
    if let Some(metric) = metric {
        entry["metric"] = metric.into();
    }
    entry
}

/// Renders Debian's `interfaces(5)`, the only form that cloud-init before 24.3 accepts over HTTP. Leaves out VLANs and
/// bonds, because their syntax differs between guests, and routes, which cloud-init does not read.
pub(super) fn interfaces(network: &Network) -> String {
    let mut text = String::from("auto lo\niface lo inet loopback\n");
    for nic in network.nics.iter().filter(|nic| nic.vlan.is_none() && nic.bond.is_none()) {
        // cloud-init ignores the family, so it would take `inet6 dhcp` for DHCPv4, and it refuses `inet6 auto`.
        let methods = [AddressMethod::Static, AddressMethod::Dhcp4];
        let mut addresses =
            nic.addresses.iter().filter(|address| methods.contains(&address.method)).peekable();
        if addresses.peek().is_none() {
            write!(text, "\nauto {}\n", nic.label()).expect("writing to a String cannot fail");
            writeln!(text, "iface {} inet manual", nic.label()).expect("writing to a String cannot fail");
        }
        for (n, address) in addresses.enumerate() {
            text.push_str(&stanza(network, nic, n, address));
        }
    }
    text
}

/// Returns the stanza of one address. Further ones belong to aliases such as `eth0:1`: cloud-init refuses a file with
/// two stanzas of one name, even if their families differ.
fn stanza(network: &Network, nic: &Nic, n: usize, address: &Address) -> String {
    let family = if address.is_ipv4() { "inet" } else { "inet6" };
    let how = if address.method == AddressMethod::Static { "static" } else { "dhcp" };
    let alias = if n == 0 { String::new() } else { format!(":{n}") };
    let name = format!("{}{alias}", nic.label());
    let mut lines = vec![format!("\nauto {name}"), format!("iface {name} {family} {how}")];
    if let Some(mac) = nic.mac {
        lines.push(format!("    hwaddress ether {mac}"));
    }
    if let Some(mtu) = nic.mtu {
        lines.push(format!("    mtu {}", mtu.get()));
    }
    if let (AddressMethod::Static, Some(cidr)) = (address.method, address.address) {
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Gateways, interfaces, version_2};
    use crate::dialect::tests::with;

    fn nic(addresses: Value, routes: Value) -> Value {
        json!({"nics": [
            {"id": "n0", "mac": "52:54:00:12:34:56", "addresses": addresses, "routes": routes},
        ]})
    }

    #[test]
    fn a_gateway_has_the_form_that_every_renderer_understands() {
        let fixed = |address: &str, gateway: &str| json!({"method": "static", "address": address, "gateway": gateway});
        for (addresses, wanted) in [
            (vec![fixed("192.0.2.5/24", "192.0.2.1")], json!({"gateway4": "192.0.2.1"})),
            (
                vec![fixed("2001:db8::5/64", "fe80::1"), fixed("192.0.2.5/24", "192.0.2.1")],
                json!({"gateway4": "192.0.2.1", "gateway6": "fe80::1"}),
            ),
            (
                vec![fixed("192.0.2.5/24", "192.0.2.1"), fixed("192.0.2.6/24", "192.0.2.1")],
                json!({"gateway4": "192.0.2.1"}),
            ),
            (
                vec![fixed("192.0.2.5/24", "192.0.2.1"), fixed("198.51.100.5/24", "198.51.100.1")],
                json!({"gateway4": "192.0.2.1", "routes": [{"to": "0.0.0.0/0", "via": "198.51.100.1"}]}),
            ),
            (
                vec![fixed("203.0.113.5/32", "100.64.0.1"), fixed("2001:db8::5/128", "2001:db8:ff::1")],
                json!({"routes": [
                    {"to": "0.0.0.0/0", "via": "100.64.0.1", "on-link": true},
                    {"to": "::/0", "via": "2001:db8:ff::1", "on-link": true},
                ]}),
            ),
        ] {
            let record = with("network", nic(json!(addresses), json!([])));
            let device = version_2(&record.network, Gateways::Members)["ethernets"]["n0"].clone();
            for key in ["gateway4", "gateway6", "routes"] {
                assert_eq!(device.get(key), wanted.get(key), "{key} of {addresses:?}");
            }
        }
    }

    #[test]
    fn a_gateway_is_a_route_for_newer_clients_unless_it_is_link_local() {
        let addresses = json!([
            {"method": "static", "address": "2001:db8::5/64", "gateway": "fe80::1"},
            {"method": "static", "address": "192.0.2.5/24", "gateway": "192.0.2.1"},
            {"method": "static", "address": "2001:db8:1::5/64", "gateway": "2001:db8:1::1"},
        ]);
        let record = with("network", nic(addresses, json!([])));
        let device = version_2(&record.network, Gateways::Routes)["ethernets"]["n0"].clone();
        assert_eq!((device.get("gateway4"), &device["gateway6"]), (None, &json!("fe80::1")));
        let routes = json!([{"to": "0.0.0.0/0", "via": "192.0.2.1"}, {"to": "::/0", "via": "2001:db8:1::1"}]);
        assert_eq!(device["routes"], routes);
    }

    #[test]
    fn a_route_is_on_link_if_no_known_prefix_contains_its_next_hop() {
        let dhcp = json!([{"method": "dhcp4"}, {"method": "static", "address": "192.0.2.5/24"}]);
        let fixed = json!([{"method": "static", "address": "192.0.2.5/24"}]);
        for (addresses, via, on_link) in
            [(&fixed, "192.0.2.9", None), (&fixed, "198.51.100.9", Some(true)), (&dhcp, "198.51.100.9", None)]
        {
            let network = nic(addresses.clone(), json!([{"to": "10.0.0.0/8", "via": via}]));
            let record = with("network", network);
            let device = version_2(&record.network, Gateways::Members)["ethernets"]["n0"].clone();
            assert_eq!(device["routes"][0].get("on-link").and_then(Value::as_bool), on_link, "{via}");
        }
    }

    #[test]
    fn every_stanza_has_a_name_of_its_own() {
        let addresses = json!([
            {"method": "static", "address": "192.0.2.5/24"}, {"method": "static", "address": "2001:db8::5/64"},
        ]);
        let record = with("network", nic(addresses, json!([])));
        let text = interfaces(&record.network);
        let stanzas: Vec<&str> = text.lines().filter(|line| line.starts_with("iface n")).collect();
        assert_eq!(stanzas, ["iface n0 inet static", "iface n0:1 inet6 static"]);
    }
}
