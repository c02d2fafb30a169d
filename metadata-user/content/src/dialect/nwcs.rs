//! NWCS: one JSON document, and the instance id as a text.
//!
//! cloud-init (`DataSourceNWCS.py`) requires a MAC and a name in every item of the network. So all items are NICs, and
//! the resolvers are in their subnets.

use super::common::{payload_texts, public_keys};
use super::network_config::{Resolvers, version_1};
use super::route_builder::RouteBuilder;
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::record::Record;

pub(super) static DIALECT: Description =
    Description::new(&[Mount::open("/api/v1/metadata")], "`DataSourceNWCS`", render);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let texts = payload_texts(record);
    let whole = match texts {
        Some((user_data, vendor_data)) => routes.json(&json!({
            "hostname": record.hostname.short.as_str(),
            "instance-id": record.vm.uuid.as_str(),
            "machine_type": record.instance_type(),
            "network": version_1(&record.network, Resolvers::Subnets, |_, nic| nic.is_physical()),
            "public-keys": public_keys(record),
            "userdata": user_data,
            "vendordata": vendor_data,
        })),
        None => routes.unread(),
    };
    routes.open("/api/v1/metadata", whole);
    routes.text("/api/v1/metadata/instance-id", record.vm.uuid.as_str());
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, rendered};
    use crate::http::Method;

    fn document(record: &Value) -> (u16, Value) {
        let responses = rendered(record);
        let answer = ask_with(&responses, Method::Get, "/api/v1/metadata", &[], b"");
        (answer.status().0, serde_json::from_slice(&answer.body().to_bytes()).unwrap_or_default())
    }

    #[test]
    fn every_item_of_the_network_is_a_nic_and_resolvers_are_in_its_subnets() {
        let mut record = full();
        let nics = record["network"]["nics"].as_array_mut().expect("NICs");
        nics[0]["addresses"] =
            json!([{"method": "static", "address": "198.51.100.9/24", "gateway": "198.51.100.1"}]);
        nics.push(json!({"id": "v7", "mac": "52:54:00:12:34:57", "vlan": {"link": "n1", "id": 7}}));
        let (_, document) = document(&record);
        let config = document["network"]["config"].as_array().expect("a list").clone();
        let named = |item: &Value| item["name"].is_string() && item["mac_address"].is_string();
        assert_eq!((config.len(), config.iter().all(named)), (2, true));
        let subnet = json!({
            "address": "198.51.100.9/24", "dns_nameservers": ["10.0.2.3"], "dns_search": ["example.internal"],
            "gateway": "198.51.100.1", "type": "static",
        });
        assert_eq!(config[0]["subnets"], json!([subnet]));
        let subnet = json!({
            "address": "192.168.7.5/24", "dns_nameservers": ["10.0.2.3"], "dns_search": ["example.internal"],
            "type": "static",
        });
        assert_eq!(config[1]["subnets"], json!([subnet]));
    }

    #[test]
    fn absent_values_are_empty_and_unread_ones_are_503() {
        let mut record = full();
        for field in ["user_data", "vendor_data", "ssh_keys", "instance_type"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        let (_, bare) = document(&record);
        assert_eq!(
            (&bare["userdata"], &bare["vendordata"], &bare["public-keys"]),
            (&json!(""), &json!(""), &json!([]))
        );
        assert_eq!(bare["machine_type"], "unknown");
        record["user_data"] = json!({"source": {"file": "user-data"}});
        assert_eq!(document(&record).0, 503);
    }
}
