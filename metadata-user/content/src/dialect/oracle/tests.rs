//! Properties that the vectors do not cover.

use serde_json::{Value, json};

use crate::dialect::tests::{ask_with, full, rendered};
use crate::http::{Method, Response};
use crate::store::Responses;

const BEARER: (&str, &str) = ("Authorization", "Bearer Oracle");

fn get(responses: &Responses, path: &str, fields: &[(&str, &str)]) -> Response {
    ask_with(responses, Method::Get, path, fields, b"")
}

fn document(record: &Value, name: &str) -> Value {
    let answer = get(&rendered(record), &format!("/opc/v2/{name}"), &[BEARER]);
    assert_eq!(answer.status().0, 200, "{name}");
    serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
}

#[test]
fn version_2_requires_the_header_and_refuses_proxies_on_every_path() {
    let responses = rendered(&full());
    for path in ["/opc/v2/instance", "/opc/v2/instance/id", "/opc/v2/instance/nope", "/opc/v2/vnics/0"] {
        for (fields, status) in [
            (vec![], 401),
            (vec![("Authorization", "Bearer oracl")], 401),
            (vec![("Authorization", "")], 401),
            (vec![BEARER, ("Forwarded", "for=1.2.3.4")], 403),
            (vec![BEARER, ("x-forwarded-for", "")], 403),
            (vec![BEARER, ("X-Forwarded-Host", "h")], 403),
            (vec![("X-Forwarded-Host", "h")], 403),
        ] {
            assert_eq!(get(&responses, path, &fields).status().0, status, "{path} {fields:?}");
        }
    }
    assert_eq!(get(&responses, "/opc/v2/instance/nope", &[BEARER]).status().0, 404);
    assert_eq!(ask_with(&responses, Method::Put, "/opc/v2/instance", &[BEARER], b"").status().0, 405);
}

#[test]
fn version_1_has_the_same_content_without_a_header_and_can_be_off() {
    let mut record = full();
    let responses = rendered(&record);
    for path in ["instance", "instance/metadata/role", "vnics", "vnics/1/macAddr"] {
        let first = get(&responses, &format!("/opc/v1/{path}"), &[]);
        let second = get(&responses, &format!("/opc/v2/{path}"), &[BEARER]);
        assert_eq!((first.status().0, &first), (200, &second), "{path}");
    }
    record["serve"]["opc_v1"] = json!("off");
    let responses = rendered(&record);
    for path in ["instance", "instance/id", "vnics"] {
        assert_eq!(get(&responses, &format!("/opc/v1/{path}"), &[BEARER]).status().0, 404, "{path}");
    }
}

#[test]
fn generated_keys_override_metadata_and_absent_ones_are_left_out() {
    let mut record = full();
    record["metadata"] = json!({"user_data": "evil", "ssh_authorized_keys": "evil", "role": "web"});
    let metadata = document(&record, "instance/metadata");
    assert!(!metadata.to_string().contains("evil"), "{metadata}");
    record["ssh_keys"] = json!([{"name": "a", "key": "ssh-rsa A"}, {"name": "b", "key": "ssh-rsa B"}]);
    assert_eq!(document(&record, "instance/metadata")["ssh_authorized_keys"], "ssh-rsa A\nssh-rsa B");
    for field in ["user_data", "ssh_keys", "image"] {
        record.as_object_mut().expect("a mapping").remove(field);
    }
    let instance = document(&record, "instance");
    assert_eq!((&instance["metadata"], instance.get("image")), (&json!({"role": "web"}), None));
}

#[test]
fn numeric_fault_domains_are_counted_from_one() {
    for (domain, name) in [
        (Value::Null, "FAULT-DOMAIN-1"),
        (json!("2"), "FAULT-DOMAIN-3"),
        (json!("4294967295"), "FAULT-DOMAIN-4294967296"),
        (json!("rack-7"), "rack-7"),
    ] {
        let mut record = full();
        record["placement"]["fault_domain"] = domain;
        assert_eq!(document(&record, "instance")["faultDomain"], name);
    }
}

#[test]
fn vnics_have_the_known_addresses_of_each_version() {
    let mut record = full();
    record["network"]["nics"] = json!([
        {"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
            {"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"},
            {"method": "static", "address": "2001:db8::16/64"}]},
        {"id": "n1", "mac": "52:54:00:12:34:57", "addresses": [{"method": "dhcp4"}]},
        {"id": "n2", "mac": "52:54:00:12:34:58", "addresses": [{"method": "static", "address": "10.0.0.5/24"}]},
        {"id": "n3", "bond": {"links": ["n0", "n1"], "mode": "802.3ad"}},
    ]);
    let vnics = document(&record, "vnics");
    let expected = json!([
        {
            "ipv6Addresses": ["2001:db8::15", "2001:db8::16"], "ipv6SubnetCidrBlock": "2001:db8::/64",
            "ipv6VirtualRouterIp": "fe80::1", "macAddr": "52:54:00:12:34:56", "subnetCidrBlock": "2001:db8::/64",
            "vlanTag": 0, "vnicId": "eni-d4dd82cf2995e2454",
        },
        {
            "macAddr": "52:54:00:12:34:58", "privateIp": "10.0.0.5", "subnetCidrBlock": "10.0.0.0/24",
            "virtualRouterIp": "", "vlanTag": 2, "vnicId": vnics[1]["vnicId"],
        },
    ]);
    assert_eq!(vnics, expected);
}

#[test]
fn a_first_nic_with_an_unknown_lease_has_a_subnet_and_no_ipv6_router() {
    let leased = json!({"method": "dhcp4"});
    let fixed = json!({"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"});
    for addresses in [json!([]), json!([leased]), json!([leased, fixed])] {
        let mut record = full();
        record["network"]["nics"] = json!([{"id": "n0", "mac": "52:54:00:12:34:56", "addresses": addresses}]);
        let vnic = document(&record, "vnics")[0].clone();
        assert_eq!(vnic["subnetCidrBlock"], "0.0.0.0/0", "{addresses}");
        for absent in ["privateIp", "ipv6VirtualRouterIp", "ipv6SubnetCidrBlock"] {
            assert!(vnic.get(absent).is_none(), "{absent} of {addresses}");
        }
    }
}

#[test]
fn unread_user_data_is_503() {
    let mut record = full();
    record["user_data"] = json!({"source": {"file": "user-data"}});
    let responses = rendered(&record);
    for (path, status) in [("instance", 503), ("instance/metadata/user_data", 503), ("vnics", 200)] {
        assert_eq!(get(&responses, &format!("/opc/v2/{path}"), &[BEARER]).status().0, status, "{path}");
    }
}
