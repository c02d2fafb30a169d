//! Hetzner: a YAML document, the private networks and raw user-data, and leaves for Afterburn and systemd.
//!
//! cloud-init (`DataSourceHetzner.py`) requires every document: an empty list means no private networks, 204 means no
//! user-data. It configures the NICs of private networks by DHCPv4 itself, under the names that they have. So
//! network-config contains the NICs that need more than that, and cloud-init's list of private networks the others.

use std::net::IpAddr;

use bytes::Bytes;
use serde_json::{Map, Value};

use std::time::Duration;

use super::common::{IpVersion, gateway, given, is_cloud_init, known, payload_text, public_keys, speaks};
use super::document::DocumentTree;
use super::network_config::{Resolvers, version_1};
use super::route_builder::{RouteBuilder, YAML};
use super::{Description, Mount, yaml};
use crate::dialect::json::json;
use crate::http::{Body, Response, StatusCode};
use crate::record::network::AddressMethod;
use crate::record::values::NicMac;
use crate::record::{Nic, Record, Role};
use crate::store::Methods;

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/hetzner").waits(Duration::from_millis(1_500))],
    "`DataSourceHetzner`; systemd-imdsd",
    render,
);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let is_listed = |n, nic: &Nic| is_private(record, n) && is_leased(record, nic);
    let mut network_config = version_1(&record.network, Resolvers::Subnets, |n, nic| !is_listed(n, nic));
    name_families(&mut network_config);
    let all = private_networks(record, |_| true);
    let leased = private_networks(record, |nic| is_leased(record, nic));
    let path = "/hetzner/v1/metadata/private-networks";
    let for_others = routes.found(YAML, yaml::document(&all));
    if leased == all {
        routes.open(path, for_others);
    } else {
        let for_cloud_init = routes.found(YAML, yaml::document(&leased));
        let about = "private networks; for cloud-init, without the NICs that are in network-config";
        routes.either(path, &[], about, is_cloud_init, for_cloud_init, for_others);
    }
    let config = routes.found(YAML, yaml::document(&network_config));
    routes.open("/hetzner/v1/metadata/network-config", config);

    let user_data = match &record.user_data {
        Some(payload) => routes.payload(payload),
        None => routes.share(Response::new(StatusCode(204), None, &[], "")),
    };
    routes.open("/hetzner/v1/userdata", user_data.clone());
    // systemd reads user-data at this path, because all its keys have one base path.
    routes.open("/hetzner/v1/metadata/userdata", user_data);

    let leaves = leaves(record);
    let mut document = leaves.clone();
    document.insert("network-config".into(), network_config);
    let whole = whole(record, document, routes);
    let leaves = DocumentTree::of(routes.document(&leaves.into())).with_whole(whole);
    routes.live_below("/hetzner/v1/metadata", Methods::READ, &[], leaves);
}

/// Names the subnets as Hetzner does: a family is a member of its own, and a static subnet of either is `static`. Talos
/// takes no other names, and asks for no lease without `ipv4`.
fn name_families(network_config: &mut Value) {
    let devices = network_config["config"].as_array_mut().into_iter().flatten();
    for subnet in devices.filter_map(|device| device.get_mut("subnets")?.as_array_mut()).flatten() {
        match subnet["type"].as_str() {
            Some("dhcp" | "static") => subnet["ipv4"] = true.into(),
            Some("static6") => subnet["type"] = "static".into(),
            _ => {}
        }
    }
}

/// Returns the members that also exist as leaves.
fn leaves(record: &Record) -> Map<String, Value> {
    let mut leaves = Map::new();
    let mut add = |key: &str, value: Value| leaves.insert(key.to_owned(), value);
    add("instance-id", record.numeric_id().into());
    add("hostname", record.hostname.fqdn().into());
    add("availability-zone", record.placement.zone.as_str().into());
    add("region", record.placement.region.as_str().into());
    add("public-keys", public_keys(record));
    if let Some(address) = public_ipv4(record) {
        add("public-ipv4", address.to_string().into());
    }
    leaves
}

/// Returns the document. Vendor-data is a separate piece of its body, which VMs share.
fn whole(record: &Record, document: Map<String, Value>, routes: &mut RouteBuilder<'_>) -> Response {
    let Some(vendor_data) = payload_text(record.vendor_data.as_ref()) else { return routes.unread() };
    let text = yaml::document(&document.into());
    if record.vendor_data.is_none() {
        return routes.found(YAML, text);
    }
    let vendor_data = routes.yaml_scalar(&vendor_data);
    let newline = Bytes::from_static(b"\n");
    let before = format!("{text}vendor_data: ").into_boxed_str().into_boxed_bytes();
    routes.own(YAML, Body::join([before.into(), vendor_data, newline]))
}

/// Returns the first address that reaches the VM from outside: a translated one, or its own.
fn public_ipv4(record: &Record) -> Option<IpAddr> {
    let public = given(&record.network).filter(|(n, ..)| record.role(*n) == Role::Public);
    let mut addresses = public.flat_map(|(_, nic, _)| known(nic, IpVersion::V4));
    addresses.find_map(|(address, cidr)| {
        let own =
            |address: IpAddr| matches!(address, IpAddr::V4(v4) if !v4.is_private() && !v4.is_link_local());
        let translated = address.public.map(|public| public.0).filter(IpAddr::is_ipv4);
        translated.or_else(|| Some(cidr.address).filter(|address| own(*address)))
    })
}

/// Returns whether DHCPv4 gives the NIC all that it needs. cloud-init sets no MTU on the NICs of private networks. A
/// VLAN or bond needs the NIC below it in its own document, because it refers to that by name.
fn is_leased(record: &Record, nic: &Nic) -> bool {
    nic.addresses.iter().all(|address| address.method == AddressMethod::Dhcp4)
        && nic.routes.is_empty()
        && nic.mtu.is_none()
        && !record.network.carries_another(nic)
}

/// Returns whether the NIC is listed among the private networks, which support IPv4 only.
fn is_private(record: &Record, n: usize) -> bool {
    private_nics(record).any(|(private, ..)| private == n)
}

fn private_nics(record: &Record) -> impl Iterator<Item = (usize, &Nic, NicMac)> {
    let private = |n, nic| record.role(n) == Role::Private && speaks(nic, IpVersion::V4);
    given(&record.network).filter(move |(n, nic, _)| private(*n, nic))
}

/// Returns the private networks of the NICs that `takes` accepts, with the numbers that they have among all.
fn private_networks(record: &Record, takes: impl Fn(&Nic) -> bool) -> Value {
    let network = |(id, (n, nic, mac)): (usize, (usize, &Nic, NicMac))| {
        let mut addresses = known(nic, IpVersion::V4);
        let mut entry = json!({
            "interface_num": n + 1,
            "mac_address": mac.to_string(),
            "network_id": id + 1,
            "network_name": nic.network_id.as_ref().map_or(nic.id.as_str(), |id| id.as_str()),
        });
        if let Some((address, cidr)) = addresses.next() {
            let network = cidr.network().to_string();
            entry["ip"] = cidr.address.to_string().into();
            entry["gateway"] = gateway(address).into();
            entry["network"] = network.clone().into();
            entry["subnet"] = network.into();
        }
        entry["alias_ips"] = addresses.map(|(_, cidr)| cidr.address.to_string()).collect();
        entry
    };
    private_nics(record).enumerate().filter(|(_, (_, nic, _))| takes(nic)).map(network).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, parse, render, rendered};
    use crate::http::{Method, Response};
    use crate::store::{Interner, Responses};

    fn get(responses: &Responses, name: &str) -> Response {
        ask_with(responses, Method::Get, &format!("/hetzner/v1/{name}"), &[], b"")
    }

    fn yaml(responses: &Responses, name: &str) -> Value {
        serde_yaml::from_slice(&get(responses, name).body().to_bytes()).expect("YAML")
    }

    fn text(responses: &Responses, name: &str) -> (u16, String) {
        let answer = get(responses, name);
        (answer.status().0, String::from_utf8(answer.body().to_bytes().to_vec()).expect("text"))
    }

    #[test]
    fn leaves_equal_the_members_of_the_document() {
        let responses = rendered(&full());
        for (leaf, value) in [
            ("hostname", "web-1.example.internal"),
            ("region", "local"),
            ("availability-zone", "local-a"),
            ("public-ipv4", "203.0.113.7"),
            ("userdata", "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"),
        ] {
            assert_eq!(text(&responses, &format!("metadata/{leaf}")), (200, value.to_owned()), "{leaf}");
        }
        let document = yaml(&responses, "metadata");
        assert_eq!(yaml(&responses, "metadata/network-config"), document["network-config"]);
        for leaf in ["public-keys/1", "hostname/x", "vendor_data", "nope"] {
            assert_eq!(text(&responses, &format!("metadata/{leaf}")).0, 404, "{leaf}");
        }
    }

    #[test]
    fn vendor_data_reads_back_and_is_held_once_for_all_vms() {
        let mut interner = Interner::new();
        let vendor_data = "#cloud-config\n# é\t\"🚀\" \\ : - \n".repeat(600);
        let pieces: Vec<_> = (0..3)
            .map(|n| {
                let mut record = full();
                record["vm"]["numeric_id"] = json!(n + 1);
                record["vendor_data"] = json!({ "text": vendor_data });
                let responses = render(&parse(&record), &mut interner);
                let document = yaml(&responses, "metadata");
                assert_eq!(
                    (&document["vendor_data"], &document["instance-id"]),
                    (&json!(vendor_data), &json!(n + 1))
                );
                get(&responses, "metadata").body().pieces()[1].as_ptr()
            })
            .collect();
        assert!(pieces.iter().all(|piece| *piece == pieces[0]));
    }

    #[test]
    fn absent_values_are_left_out() {
        let mut record = full();
        for field in ["user_data", "vendor_data", "ssh_keys", "network"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        let responses = rendered(&record);
        let document = yaml(&responses, "metadata");
        let keys: Vec<_> = document.as_object().expect("a mapping").keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            ["availability-zone", "hostname", "instance-id", "network-config", "public-keys", "region"]
        );
        assert_eq!(document["network-config"], json!({"version": 1, "config": []}));
        assert_eq!(text(&responses, "metadata/private-networks"), (200, "[]\n".to_owned()));
        assert_eq!(text(&responses, "metadata/public-keys"), (200, "[]".to_owned()));
        assert_eq!(text(&responses, "metadata/public-ipv4").0, 404);
        for name in ["userdata", "metadata/userdata"] {
            assert_eq!(text(&responses, name), (204, String::new()), "{name}");
        }
    }

    #[test]
    fn the_public_address_is_a_translated_or_a_globally_routed_one() {
        for (addresses, public) in [
            (json!([{"method": "static", "address": "10.0.2.15/24"}]), Value::Null),
            (json!([{"method": "static", "address": "198.51.100.9/24"}]), json!("198.51.100.9")),
            (
                json!([{"method": "dhcp4", "address": "10.0.0.9/24", "public": "192.0.2.1"}]),
                json!("192.0.2.1"),
            ),
            (json!([{"method": "dhcp4"}]), Value::Null),
            (json!([{"method": "static", "address": "2001:db8::1/64"}]), Value::Null),
        ] {
            let mut record = full();
            record["network"]["nics"][0]["addresses"] = addresses.clone();
            let document = yaml(&rendered(&record), "metadata");
            assert_eq!(document.get("public-ipv4").cloned().unwrap_or_default(), public, "{addresses}");
        }
    }

    #[test]
    fn private_networks_are_ipv4_and_all_are_listed_for_other_clients() {
        let mut record = full();
        let nics = record["network"]["nics"].as_array_mut().expect("NICs");
        nics[1]["addresses"] = json!([
            {"method": "static", "address": "192.168.7.5/24", "gateway": "192.168.7.1"},
            {"method": "static", "address": "192.168.7.6/24"},
            {"method": "slaac"},
        ]);
        nics.push(json!({"id": "n2", "mac": "52:54:00:12:34:58", "addresses": [{"method": "dhcp4"}]}));
        nics.push(json!({"id": "n3", "mac": "52:54:00:12:34:59", "addresses": [{"method": "slaac"}]}));
        let responses = rendered(&record);
        let networks = json!([
            {
                "alias_ips": ["192.168.7.6"], "gateway": "192.168.7.1", "interface_num": 2, "ip": "192.168.7.5",
                "mac_address": "52:54:00:12:34:57", "network": "192.168.7.0/24", "network_id": 1,
                "network_name": "net-b", "subnet": "192.168.7.0/24",
            },
            {
                "alias_ips": [], "interface_num": 3, "mac_address": "52:54:00:12:34:58", "network_id": 2,
                "network_name": "n2",
            },
        ]);
        assert_eq!(yaml(&responses, "metadata/private-networks"), networks);
    }

    #[test]
    fn cloud_init_finds_each_nic_in_one_document_and_leases_only_what_dhcpv4_configures() {
        let leased = json!([{"method": "dhcp4"}]);
        let fixed = json!([{"method": "static", "address": "192.168.7.5/24"}]);
        let dual = json!([{"method": "dhcp4"}, {"method": "static", "address": "2001:db8::7/64"}]);
        let route = json!([{"to": "10.0.0.0/8", "via": "192.168.7.1"}]);
        let vlan = json!({"id": "v7", "vlan": {"link": "n1", "id": 7}});
        for (addresses, routes, mtu, vlan, is_leased) in [
            (&leased, json!([]), None, None, true),
            (&fixed, json!([]), None, None, false),
            (&dual, json!([]), None, None, false),
            (&leased, route, None, None, false),
            (&leased, json!([]), Some(1450_u16), None, false),
            (&leased, json!([]), None, Some(vlan), false),
        ] {
            let mut record = full();
            let nics = record["network"]["nics"].as_array_mut().expect("NICs");
            nics[1]["addresses"] = addresses.clone();
            nics[1]["routes"] = routes;
            nics[1].as_object_mut().expect("a NIC").remove("mtu");
            if let Some(mtu) = mtu {
                nics[1]["mtu"] = mtu.into();
            }
            nics.extend(vlan);
            let nics = json!(nics);
            let responses = rendered(&record);
            let path = "/hetzner/v1/metadata/private-networks";
            let agent = ("User-Agent", "Cloud-Init/25.1.4");
            let answer = ask_with(&responses, Method::Get, path, &[agent], b"");
            let networks: Value = serde_yaml::from_slice(&answer.body().to_bytes()).expect("YAML");
            assert_eq!(networks.as_array().map(Vec::len), Some(usize::from(is_leased)), "{nics}");
            let config = yaml(&responses, "metadata/network-config");
            let devices = config["config"].as_array().expect("a list");
            let own = devices.iter().find(|device| device["name"] == "eth1");
            assert_eq!(own.is_some(), !is_leased, "{nics}");
            assert_eq!(own.and_then(|device| device["mtu"].as_u64()), mtu.map(u64::from), "{nics}");
            assert_eq!(yaml(&responses, "metadata")["network-config"], config);
        }
    }

    #[test]
    fn unread_vendor_data_delays_the_document_and_not_the_leaves() {
        let mut record = full();
        record["vendor_data"] = json!({"source": {"file": "vendor-data"}});
        let responses = rendered(&record);
        for (name, status) in [("metadata", 503), ("metadata/hostname", 200), ("userdata", 200)] {
            assert_eq!(text(&responses, name).0, status, "{name}");
        }
    }
}
