//! Vultr: one JSON document, some of it as texts, and Ignition's user-data.
//!
//! cloud-init (`sources/helpers/vultr.py`) applies `cloud_interfaces` unchanged if it exists. Otherwise it builds its
//! network configuration from `interfaces` and adds its own resolvers. So `cloud_interfaces` always exists, except for
//! versions before 23.1, which read it as a list and fail. Those configure further NICs by their IPv4 address, and
//! fail without one, unless the NIC is `unconfigured`.

use std::net::IpAddr;

use serde_json::Value;

use super::common::{
    IpVersion, cloud_init, gateway, given, known, payload_texts, public_key_lines, public_keys, role_name,
    speaks,
};
use super::document::PartKind;
use super::network_config::{Resolvers, version_1};
use super::route_builder::{JSON, RouteBuilder, TEXT, computed};
use super::{Description, Mount, digitalocean};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::record::values::NicMac;
use crate::record::{Nic, Record};
use crate::store::Methods;

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/v1.json"),
        Mount::open("/v1/hostname"),
        Mount::open("/v1/instance-v2-id"),
        Mount::open("/v1/instanceid"),
        Mount::open("/v1/interfaces"),
        Mount::open("/v1/public-keys"),
        Mount::open("/v1/region"),
        Mount::open("/user-data"),
    ],
    "`DataSourceVultr`; systemd-imdsd",
    render,
);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let texts = payload_texts(record);
    match texts {
        Some((user_data, vendor_data)) => {
            let document = routes.document(&document(record, user_data, vendor_data));
            let response = routes.own(JSON, document.body());
            let about = "the document, without cloud_interfaces for cloud-init before 23.1";
            let whole = computed(about, move |call| {
                if cloud_init(call.request).is_none_or(|version| version >= TAKES_INTERFACES) {
                    return response.clone();
                }
                let body = document.root().json_without("cloud_interfaces");
                Response::new(StatusCode(200), Some(JSON), &[], body)
            });
            routes.live("/v1.json", Methods::READ, &[], whole);
        }
        None => {
            let unread = routes.unread();
            routes.open("/v1.json", unread);
        }
    }
    routes.text("/v1/hostname", record.hostname.short.as_str());
    routes.text("/v1/instanceid", record.numeric_id().to_string());
    routes.text("/v1/instance-v2-id", record.vm.uuid.as_str());
    routes.text("/v1/region", "regioncode");
    routes.text("/v1/region/regioncode", record.region_code());
    let document = routes.document(&interfaces(record));
    // A tree of texts. An index lists its names, those of indexes with a final slash.
    let interfaces = computed("a text of the interfaces in /v1.json", move |call| {
        match document.at(call.rest).map(|node| (node.form(), digitalocean::text(node))) {
            // An unknown address is an empty text in the document.
            None => Response::error(StatusCode(404), &[]),
            Some((PartKind::Scalar, text)) if text.is_empty() => Response::error(StatusCode(404), &[]),
            Some((_, text)) => Response::new(StatusCode(200), Some(TEXT), &[], text),
        }
    });
    routes.live_below("/v1/interfaces", Methods::READ, &[], interfaces);
    routes.text("/v1/public-keys", public_key_lines(record));
    if let Some(user_data) = &record.user_data {
        let user_data = routes.payload(user_data);
        routes.open("/user-data/user-data", user_data);
    }
    for (path, version) in
        [("/v1/interfaces/0/ipv4/address", IpVersion::V4), ("/v1/interfaces/0/ipv6/address", IpVersion::V6)]
    {
        if let Some(address) = public(record, version) {
            routes.text(path, address.to_string());
        }
    }
}

/// Returns the public address of the first NIC, for systemd; the NIC's own address if none is translated to it.
fn public(record: &Record, version: IpVersion) -> Option<IpAddr> {
    let (_, nic, _) = given(&record.network).next()?;
    let (address, cidr) = known(nic, version).next()?;
    let translated = address.public.map(|public| public.0);
    Some(translated.filter(|public| public.is_ipv4() == (version == IpVersion::V4)).unwrap_or(cidr.address))
}

/// First version of cloud-init that reads `cloud_interfaces` correctly.
const TAKES_INTERFACES: (u32, u32) = (23, 1);

fn document(record: &Record, user_data: String, vendor_data: String) -> Value {
    json!({
        "cloud_interfaces": version_1(&record.network, Resolvers::Item, |_, _| true),
        "hostname": record.hostname.short.as_str(),
        "instance-v2-id": record.vm.uuid.as_str(),
        "instanceid": record.numeric_id().to_string(),
        "interfaces": interfaces(record),
        "public-keys": public_keys(record),
        "region": { "regioncode": record.region_code() },
        "user-data": user_data,
        "vendor-data": vendor_data,
    })
}

fn interfaces(record: &Record) -> Value {
    let given = given(&record.network).enumerate();
    given.map(|(position, (n, nic, mac))| interface(record, position == 0, n, nic, mac)).collect()
}

fn interface(record: &Record, is_first: bool, n: usize, nic: &Nic, mac: NicMac) -> Value {
    let mut interface = json!({
        "ipv6": ipv6(nic),
        "mac": mac.to_string(),
        "network-type": role_name(record.role(n)),
    });
    if speaks(nic, IpVersion::V4) || !speaks(nic, IpVersion::V6) {
        interface["ipv4"] = ipv4(nic);
    }
    if let Some(mtu) = nic.mtu {
        interface["mtu"] = mtu.get().into();
    }
    if !is_first && known(nic, IpVersion::V4).next().is_none() {
        interface["unconfigured"] = true.into();
    }
    interface
}

fn ipv4(nic: &Nic) -> Value {
    let mut addresses = known(nic, IpVersion::V4);
    let mut entry = json!({ "address": "", "gateway": "", "netmask": "" });
    if let Some((address, cidr)) = addresses.next() {
        entry["address"] = cidr.address.to_string().into();
        entry["gateway"] = gateway(address).into();
        entry["netmask"] = cidr.netmask().to_string().into();
    }
    let additional = addresses.map(
        |(_, cidr)| json!({ "address": cidr.address.to_string(), "netmask": cidr.netmask().to_string() }),
    );
    entry["additional"] = additional.collect();
    entry
}

fn ipv6(nic: &Nic) -> Value {
    let mut addresses = known(nic, IpVersion::V6).map(|(_, cidr)| {
        json!({
            "address": cidr.address.to_string(),
            "network": cidr.network().address.to_string(),
            "prefix": cidr.prefix.to_string(),
        })
    });
    let mut entry = addresses.next().unwrap_or_else(|| json!({ "address": "", "network": "", "prefix": "" }));
    entry["additional"] = addresses.collect();
    entry
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, rendered};
    use crate::http::{Method, Response};
    use crate::store::Responses;

    fn get(responses: &Responses, path: &str) -> Response {
        ask_with(responses, Method::Get, path, &[], b"")
    }

    fn document(record: &Value) -> Value {
        serde_json::from_slice(&get(&rendered(record), "/v1.json").body().to_bytes()).expect("JSON")
    }

    #[test]
    fn absent_values_are_empty_and_absent_user_data_is_404_for_ignition() {
        let mut record = full();
        for field in ["user_data", "vendor_data", "ssh_keys", "network"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        let document = document(&record);
        assert_eq!((&document["user-data"], &document["vendor-data"]), (&json!(""), &json!("")));
        assert_eq!((&document["interfaces"], &document["public-keys"]), (&json!([]), &json!([])));
        assert_eq!(document["cloud_interfaces"], json!({"version": 1, "config": []}));
        let responses = rendered(&record);
        assert_eq!(get(&responses, "/user-data/user-data").status().0, 404);
        assert!(get(&responses, "/v1/public-keys").body().is_empty());
    }

    #[test]
    fn all_but_the_first_address_are_additional_and_leaves_are_text() {
        let mut record = full();
        record["ssh_keys"] = json!([{"name": "a", "key": "ssh-rsa A"}, {"name": "b", "key": "ssh-rsa B"}]);
        record["network"]["nics"][0]["addresses"] = json!([
            {"method": "static", "address": "198.51.100.9/24", "gateway": "198.51.100.1"},
            {"method": "static", "address": "198.51.100.10/25"},
            {"method": "static", "address": "2001:db8::15/64"},
            {"method": "static", "address": "2001:db8:1::15/48"},
        ]);
        let interface = document(&record)["interfaces"][0].clone();
        assert_eq!(
            interface["ipv4"],
            json!({
                "address": "198.51.100.9", "gateway": "198.51.100.1", "netmask": "255.255.255.0",
                "additional": [{"address": "198.51.100.10", "netmask": "255.255.255.128"}],
            })
        );
        assert_eq!(
            interface["ipv6"],
            json!({
                "address": "2001:db8::15", "network": "2001:db8::", "prefix": "64",
                "additional": [{"address": "2001:db8:1::15", "network": "2001:db8:1::", "prefix": "48"}],
            })
        );
        let responses = rendered(&record);
        assert_eq!(get(&responses, "/v1/public-keys").body().to_bytes(), "ssh-rsa A\nssh-rsa B");
        assert_eq!(get(&responses, "/v1/instanceid").body().to_bytes(), "12345");
    }

    #[test]
    fn interfaces_are_a_tree_of_texts_without_unknown_values() {
        let mut record = full();
        record["network"]["nics"][0]["addresses"] = json!([
            {"method": "static", "address": "198.51.100.9/24", "gateway": "198.51.100.1"},
            {"method": "static", "address": "198.51.100.10/25"},
        ]);
        let responses = rendered(&record);
        for (path, text) in [
            ("/v1/interfaces", Some("0/\n1/")),
            ("/v1/interfaces/", Some("0/\n1/")),
            ("/v1/interfaces/0/ipv4/gateway", Some("198.51.100.1")),
            ("/v1/interfaces/0/ipv4/additional/0/address", Some("198.51.100.10")),
            ("/v1/interfaces/0/ipv6/address", None),
            ("/v1/interfaces/1/network-type", Some("private")),
            ("/v1/interfaces/2", None),
            ("/v1/region", Some("regioncode")),
        ] {
            let answer = get(&responses, path);
            let found = (answer.status().0 == 200).then(|| answer.body().to_bytes());
            assert_eq!(found.as_deref(), text.map(str::as_bytes), "{path}");
        }
    }

    #[test]
    fn a_nic_without_ipv4_has_no_ipv4_member() {
        let mut record = full();
        record["network"]["nics"] = json!([
            {"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [{"method": "slaac"}]},
            {"id": "n1", "mac": "52:54:00:12:34:57", "addresses": [{"method": "dhcp4"}]},
        ]);
        let document = document(&record);
        assert_eq!(document["interfaces"][0].get("ipv4"), None);
        assert_eq!(document["interfaces"][1]["ipv4"]["address"], "");
    }

    #[test]
    fn a_further_nic_without_a_known_ipv4_address_is_unconfigured_for_cloud_init_before_23_1() {
        let mut record = full();
        record["network"]["nics"] = json!([
            {"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [{"method": "dhcp4"}]},
            {"id": "n1", "mac": "52:54:00:12:34:57", "addresses": [{"method": "dhcp4"}]},
            {"id": "n2", "mac": "52:54:00:12:34:58",
             "addresses": [{"method": "static", "address": "2001:db8::5/64"}]},
            {"id": "n3", "mac": "52:54:00:12:34:59",
             "addresses": [{"method": "static", "address": "192.168.7.5/24"}]},
            {"id": "n4", "mac": "52:54:00:12:34:5a"},
        ]);
        let document = document(&record);
        let interfaces = document["interfaces"].as_array().expect("a list");
        let unconfigured: Vec<_> =
            interfaces.iter().map(|interface| interface["unconfigured"].as_bool()).collect();
        assert_eq!(unconfigured, [None, Some(true), Some(true), None, Some(true)]);
    }

    #[test]
    fn an_unread_payload_delays_the_document() {
        let mut record = full();
        record["user_data"] = json!({"source": {"file": "user-data"}});
        let responses = rendered(&record);
        for (path, status) in [("/v1.json", 503), ("/user-data/user-data", 503), ("/v1/hostname", 200)] {
            assert_eq!(get(&responses, path).status().0, status, "{path}");
        }
    }

    #[test]
    fn cloud_init_before_23_1_gets_no_cloud_interfaces() {
        let responses = rendered(&full());
        for (agent, there) in [
            ("Cloud-Init/22.4.2 - OS: linux Variant: debian", false),
            ("Cloud-Init/23.1", true),
            ("curl/7.88.1", true),
        ] {
            let answer = ask_with(&responses, Method::Get, "/v1.json", &[("User-Agent", agent)], b"");
            let mut document: Value = serde_json::from_slice(&answer.body().to_bytes()).expect("JSON");
            assert_eq!(document["cloud_interfaces"].is_object(), there, "{agent}");
            let whole = self::document(&full());
            document["cloud_interfaces"] = whole["cloud_interfaces"].clone();
            assert_eq!(document, whole, "{agent}");
        }
    }
}
