//! Properties that the vectors do not cover.

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
        (json!([{"method": "dhcp4", "address": "10.0.0.9/24", "public": "192.0.2.1"}]), json!("192.0.2.1")),
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
fn each_nic_is_in_one_document_and_private_networks_are_ipv4() {
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
    let config = yaml(&responses, "metadata/network-config");
    let names: Vec<_> =
        config["config"].as_array().expect("a list").iter().map(|nic| nic["name"].clone()).collect();
    assert_eq!(names, ["eth0", "n3"]);
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
