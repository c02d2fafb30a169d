//! Renders a record's network as cloud-init's network-config version 1.

use serde_json::{Map, Value};

use super::addresses::{IpVersion, resolvers};
use crate::dialect::json::json;
use crate::record::Nic;
use crate::record::network::{Address, AddressMethod, Bond, Network, NicRoute};

/// Where resolvers and search domains go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resolvers {
    /// Into a separate item.
    Item,
    /// Into all static subnets, for clients that read every item as a NIC. NetworkManager takes from each only those of
    /// the subnet's family.
    Subnets,
}

/// Renders the NICs that `takes` accepts.
pub(super) fn version_1(
    network: &Network,
    resolvers_in: Resolvers,
    takes: impl Fn(usize, &Nic) -> bool,
) -> Value {
    let nics = network.nics.iter().enumerate().filter(|(n, nic)| takes(*n, nic));
    let mut config: Vec<Value> = nics.map(|(_, nic)| device(network, resolvers_in, nic)).collect();
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

fn search(network: &Network) -> Value {
    network.search.iter().map(ToString::to_string).collect()
}

fn device(network: &Network, resolvers_in: Resolvers, nic: &Nic) -> Value {
    let mut device = Map::new();
    let mut add = |key: &str, value: Value| device.insert(key.to_owned(), value);
    add("name", nic.label().into());
    let kind = match (&nic.bond, &nic.vlan) {
        (Some(bond), _) => {
            add("bond_interfaces", bond.links.iter().map(|id| label(network, id.as_str())).collect());
            add("params", parameters(bond));
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
            Value::Array(routes) => routes.push(route(entry)),
            none => *none = json!([route(entry)]),
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

/// Returns the label of the NIC with this id. Validation ensures that it exists.
fn label<'a>(network: &'a Network, id: &'a str) -> &'a str {
    network.nics.iter().find(|nic| nic.id.as_str() == id).map_or(id, Nic::label)
}

fn parameters(bond: &Bond) -> Value {
    let mut parameters = json!({ "bond-mode": bond.mode.as_str() });
    if let Some(milliseconds) = bond.miimon {
        parameters["bond-miimon"] = milliseconds.into();
    }
    if let Some(policy) = &bond.xmit_hash_policy {
        parameters["bond-xmit-hash-policy"] = policy.as_str().into();
    }
    if let Some(rate) = bond.lacp_rate {
        parameters["bond-lacp-rate"] = rate.as_str().into();
    }
    parameters
}

fn subnet(network: &Network, address: &Address, with_resolvers: bool) -> Value {
    let is_v6 = IpVersion::of_entry(address) == IpVersion::V6;
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

fn route(route: &NicRoute) -> Value {
    let mut entry = json!({ "destination": route.to.to_string(), "gateway": route.via.to_string() });
    if let Some(metric) = route.metric {
        entry["metric"] = metric.into();
    }
    entry
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Resolvers, version_1};
    use crate::dialect::tests::with;

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
