//! Properties that the vectors do not cover.

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
