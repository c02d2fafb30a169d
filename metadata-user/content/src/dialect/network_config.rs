//! Renders a record's network as cloud-init's network-config, version 1 or 2, and as Debian's `interfaces`.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::{Map, Value};

use super::common::resolvers;
use super::json::json;
use crate::record::Nic;
use crate::record::network::{Address, AddressMethod, Bond, Network, NicRoute};

// Names that both versions use.

/// Returns the label of the NIC with this id. Validation ensures that it exists.
fn label<'a>(network: &'a Network, id: &'a str) -> &'a str {
    network.nics.iter().find(|nic| nic.id.as_str() == id).map_or(id, Nic::label)
}

/// Returns the labels of the bonded NICs.
fn links(network: &Network, bond: &Bond) -> Value {
    bond.links.iter().map(|link| label(network, link.as_str())).collect()
}

/// Returns the parameters of a bond under these names: mode, link monitoring, hash policy, LACP rate.
fn parameters(bond: &Bond, [mode, miimon, policy, rate]: [&str; 4]) -> Value {
    let mut parameters = json!({});
    parameters[mode] = bond.mode.as_str().into();
    if let Some(milliseconds) = bond.miimon {
        parameters[miimon] = milliseconds.into();
    }
    if let Some(name) = bond.xmit_hash_policy {
        parameters[policy] = name.as_str().into();
    }
    if let Some(name) = bond.lacp_rate {
        parameters[rate] = name.as_str().into();
    }
    parameters
}

/// Returns the destination without host bits, with which the kernel and `route` refuse it.
fn destination(route: &NicRoute) -> String {
    route.to.network().to_string()
}

fn search(network: &Network) -> Value {
    network.search.iter().map(ToString::to_string).collect()
}

// Version 2, the form of netplan.

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

/// Renders network-config version 2.
pub(super) fn version_2(network: &Network, form: Gateways) -> Value {
    let mut document = Map::new();
    document.insert("version".into(), 2.into());
    for nic in &network.nics {
        let mut device = Map::new();
        let section = match (&nic.bond, &nic.vlan) {
            (Some(bond), _) => {
                let names = ["mode", "mii-monitor-interval", "transmit-hash-policy", "lacp-rate"];
                device.insert("interfaces".into(), links(network, bond));
                device.insert("parameters".into(), parameters(bond, names));
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
    for route in &nic.routes {
        add_route(device, entry(nic, destination(route), route.via.0, route.metric));
    }
}

fn statics(nic: &Nic) -> impl Iterator<Item = &Address> {
    nic.addresses.iter().filter(|address| address.method == AddressMethod::Static)
}

/// Returns resolvers and search domains, for NICs with static addresses.
fn nameservers(network: &Network) -> Option<Value> {
    let mut nameservers = Map::new();
    if !network.dns.is_empty() {
        nameservers.insert("addresses".into(), resolvers(network));
    }
    if !network.search.is_empty() {
        nameservers.insert("search".into(), search(network));
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
            add_route(device, entry(nic, everything.to_owned(), gateway, None));
        } else {
            device.insert(key.into(), gateway.to_string().into());
        }
    }
}

fn add_route(device: &mut Map<String, Value>, route: Value) {
    let routes = device.entry("routes").or_insert_with(|| json!([]));
    routes.as_array_mut().expect("routes are a list").push(route);
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

// Version 1.

/// Where resolvers and search domains go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resolvers {
    /// Into a separate item.
    Item,
    /// Into all static subnets, for clients that read every item as a NIC. NetworkManager takes from each only those of
    /// the subnet's family.
    Subnets,
}

/// Renders network-config version 1 of the NICs that `takes` accepts.
pub(super) fn version_1(
    network: &Network,
    resolvers_in: Resolvers,
    takes: impl Fn(usize, &Nic) -> bool,
) -> Value {
    let nics = network.nics.iter().enumerate().filter(|(n, nic)| takes(*n, nic));
    let mut config: Vec<Value> = nics.map(|(_, nic)| device_1(network, resolvers_in, nic)).collect();
    let any = !network.dns.is_empty() || !network.search.is_empty();
    if resolvers_in == Resolvers::Item && any {
        let mut item = json!({ "type": "nameserver", "address": resolvers(network) });
        if !network.search.is_empty() {
            item["search"] = search(network);
        }
        config.push(item);
    }
    json!({ "version": 1, "config": config })
}

fn device_1(network: &Network, resolvers_in: Resolvers, nic: &Nic) -> Value {
    let mut device = Map::new();
    let mut add = |key: &str, value: Value| device.insert(key.to_owned(), value);
    add("name", nic.label().into());
    let kind = match (&nic.bond, &nic.vlan) {
        (Some(bond), _) => {
            let names = ["bond-mode", "bond-miimon", "bond-xmit-hash-policy", "bond-lacp-rate"];
            add("bond_interfaces", links(network, bond));
            add("params", parameters(bond, names));
            "bond"
        }
        (None, Some(vlan)) => {
            add("vlan_id", vlan.id.get().into());
            add("vlan_link", label(network, vlan.link.as_str()).into());
            "vlan"
        }
        (None, None) => "physical",
    };
    add("type", kind.into());
    if let Some(mac) = nic.mac {
        add("mac_address", mac.to_string().into());
    }
    if let Some(mtu) = nic.mtu {
        add("mtu", mtu.get().into());
    }
    let with_resolvers = resolvers_in == Resolvers::Subnets;
    let mut subnets: Vec<Value> =
        nic.addresses.iter().map(|address| subnet(network, address, with_resolvers)).collect();
    if !nic.routes.is_empty() && subnets.is_empty() {
        subnets.push(json!({ "type": "manual" }));
    }
    for entry in &nic.routes {
        let subnet = &mut subnets[carrier(nic, entry)]["routes"];
        match subnet {
            Value::Array(routes) => routes.push(route_1(entry)),
            none => *none = json!([route_1(entry)]),
        }
    }
    if !subnets.is_empty() {
        add("subnets", subnets.into());
    }
    device.into()
}

/// Returns the number of the subnet for a route: the first static one of its family, else the first of its family, else
/// the first. cloud-init's renderer for netplan drops routes of subnets that are not static.
fn carrier(nic: &Nic, route: &NicRoute) -> usize {
    let of_family = |address: &Address| address.is_ipv4() == route.to.address.is_ipv4();
    let is_static = |address: &Address| address.method == AddressMethod::Static && of_family(address);
    let find = |wanted: &dyn Fn(&Address) -> bool| nic.addresses.iter().position(wanted);
    find(&is_static).or_else(|| find(&of_family)).unwrap_or(0)
}

fn subnet(network: &Network, address: &Address, with_resolvers: bool) -> Value {
    let is_v6 = !address.is_ipv4();
    let kind = match (address.method, is_v6) {
        (AddressMethod::Dhcp4, _) => "dhcp",
        (AddressMethod::Dhcp6, _) => "dhcp6",
        (AddressMethod::Slaac, _) => "ipv6_slaac",
        (AddressMethod::Static, false) => "static",
        (AddressMethod::Static, true) => "static6",
    };
    let mut subnet = json!({ "type": kind });
    if is_v6 {
        // Afterburn recognises the IP version only by this member.
        subnet["ipv6"] = true.into();
    }
    let (AddressMethod::Static, Some(cidr)) = (address.method, address.address) else { return subnet };
    subnet["address"] = cidr.to_string().into();
    if let Some(gateway) = address.gateway {
        subnet["gateway"] = gateway.to_string().into();
    }
    if with_resolvers && !network.dns.is_empty() {
        subnet["dns_nameservers"] = resolvers(network);
    }
    if with_resolvers && !network.search.is_empty() {
        subnet["dns_search"] = search(network);
    }
    subnet
}

fn route_1(route: &NicRoute) -> Value {
    let mut entry = json!({ "destination": destination(route), "gateway": route.via.to_string() });
    if let Some(metric) = route.metric {
        entry["metric"] = metric.into();
    }
    entry
}

// Debian's form.

/// Renders Debian's `interfaces(5)`, the only form that cloud-init before 24.3 accepts over HTTP. Leaves out VLANs and
/// bonds, because their syntax differs between guests, and routes, which cloud-init does not read.
pub(super) fn interfaces(network: &Network) -> String {
    let mut text = String::from("auto lo\niface lo inet loopback\n");
    for nic in network.nics.iter().filter(|nic| nic.is_physical()) {
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
        let netmask = if address.is_ipv4() { cidr.netmask().to_string() } else { cidr.prefix.to_string() };
        lines.push(format!("    netmask {netmask}"));
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

fn listed<T: ToString>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Gateways, Resolvers, interfaces, version_1, version_2};
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
    fn a_routes_destination_has_no_host_bits() {
        let addresses = json!([
            {"method": "static", "address": "192.0.2.5/24"}, {"method": "static", "address": "2001:db8::5/64"},
        ]);
        for (to, via, wanted) in [
            ("10.1.2.3/8", "192.0.2.9", "10.0.0.0/8"),
            ("2001:db8:1::5/48", "2001:db8::9", "2001:db8:1::/48"),
            ("10.1.2.3/32", "192.0.2.9", "10.1.2.3/32"),
        ] {
            let record = with("network", nic(addresses.clone(), json!([{"to": to, "via": via}])));
            let device = version_2(&record.network, Gateways::Routes)["ethernets"]["n0"].clone();
            assert_eq!(device["routes"][0]["to"], wanted, "{to}");
            let config = version_1(&record.network, Resolvers::Item, |_, _| true)["config"].clone();
            let subnets = config[0]["subnets"].as_array().expect("a list");
            let mut routes = subnets.iter().filter_map(|subnet| subnet["routes"][0]["destination"].as_str());
            assert_eq!(routes.next(), Some(wanted), "{to}");
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

    fn config(network: Value, resolvers: Resolvers) -> Value {
        let record = with("network", network);
        version_1(&record.network, resolvers, |_, _| true)["config"].clone()
    }

    #[test]
    fn every_method_and_kind_of_nic_has_its_form() {
        let network = json!({"nics": [
            {"id": "n0", "name": "eth0", "mac": "52:54:00:12:34:56"},
            {"id": "n1", "name": "eth1", "mac": "52:54:00:12:34:57", "mtu": 1400, "addresses": [
                {"method": "dhcp4"}, {"method": "dhcp6"}, {"method": "slaac"},
                {"method": "static", "address": "2001:db8::5/64", "gateway": "fe80::1"}]},
            {"id": "n2", "name": "bond0", "bond": {"links": ["n0", "n1"], "mode": "802.3ad", "miimon": 100,
                "xmit_hash_policy": "layer3+4", "lacp_rate": "fast"}},
            {"id": "n3", "name": "v7", "vlan": {"link": "n2", "id": 7},
             "addresses": [{"method": "static", "address": "192.168.7.5/24"}],
             "routes": [{"to": "10.0.0.0/8", "via": "192.168.7.1", "metric": 50}]},
            {"id": "n4", "mac": "52:54:00:12:34:58", "routes": [{"to": "10.1.0.0/16", "via": "10.1.0.1"}]},
        ]});
        let wanted = json!([
            {"type": "physical", "name": "eth0", "mac_address": "52:54:00:12:34:56"},
            {"type": "physical", "name": "eth1", "mac_address": "52:54:00:12:34:57", "mtu": 1400, "subnets": [
                {"type": "dhcp"}, {"type": "dhcp6", "ipv6": true}, {"type": "ipv6_slaac", "ipv6": true},
                {"type": "static6", "ipv6": true, "address": "2001:db8::5/64", "gateway": "fe80::1"}]},
            {"type": "bond", "name": "bond0", "bond_interfaces": ["eth0", "eth1"], "params": {
                "bond-mode": "802.3ad", "bond-miimon": 100, "bond-xmit-hash-policy": "layer3+4",
                "bond-lacp-rate": "fast"}},
            {"type": "vlan", "name": "v7", "vlan_id": 7, "vlan_link": "bond0", "subnets": [
                {"type": "static", "address": "192.168.7.5/24", "routes": [
                    {"destination": "10.0.0.0/8", "gateway": "192.168.7.1", "metric": 50}]}]},
            {"type": "physical", "name": "n4", "mac_address": "52:54:00:12:34:58", "subnets": [
                {"type": "manual", "routes": [{"destination": "10.1.0.0/16", "gateway": "10.1.0.1"}]}]},
        ]);
        assert_eq!(config(network, Resolvers::Item), wanted);
    }

    #[test]
    fn routes_are_in_a_static_subnet_of_their_family() {
        let network = json!({"nics": [{"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
            {"method": "dhcp4"},
            {"method": "dhcp6"},
            {"method": "static", "address": "2001:db8::5/64"},
        ], "routes": [
            {"to": "2001:db8:1::/48", "via": "2001:db8::9"},
            {"to": "10.0.0.0/8", "via": "10.0.0.9"},
            {"to": "2001:db8:2::/48", "via": "2001:db8::9"},
        ]}]});
        let config = config(network, Resolvers::Item);
        let routes: Vec<usize> =
            (0..3).map(|n| config[0]["subnets"][n]["routes"].as_array().map_or(0, Vec::len)).collect();
        assert_eq!(routes, [1, 0, 2]);
    }

    #[test]
    fn resolvers_are_an_item_or_in_every_static_subnet() {
        let nic = |n: u8, address: Value| {
            json!({"id": format!("n{n}"), "mac": format!("52:54:00:12:34:{n:02}"),
            "addresses": [address]})
        };
        let network = json!({"dns": ["10.0.2.3"], "nics": [
            nic(0, json!({"method": "static", "address": "192.0.2.5/24"})),
            nic(1, json!({"method": "static", "address": "192.168.7.5/24"})),
            nic(2, json!({"method": "static", "address": "192.168.8.5/24", "gateway": "192.168.8.1"})),
            nic(3, json!({"method": "dhcp4", "gateway": "192.168.9.1"})),
        ]});
        let items = config(network.clone(), Resolvers::Item);
        assert_eq!(items[4], json!({"type": "nameserver", "address": ["10.0.2.3"]}));
        let subnets = config(network, Resolvers::Subnets);
        let with: Vec<bool> =
            (0..4).map(|n| subnets[n]["subnets"][0].get("dns_nameservers").is_some()).collect();
        assert_eq!((with, subnets.get(4)), (vec![true, true, true, false], None));
        assert!(
            items
                .as_array()
                .expect("a list")
                .iter()
                .all(|item| item["subnets"][0].get("dns_nameservers").is_none())
        );
    }
}
