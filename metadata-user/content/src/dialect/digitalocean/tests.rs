//! Properties that the vectors do not cover.

use serde_json::{Value, json};

use crate::dialect::tests::{ask_with, full, rendered};
use crate::http::{Method, Response};
use crate::store::Responses;

fn get(responses: &Responses, path: &str) -> Response {
    ask_with(responses, Method::Get, path, &[], b"")
}

fn document(record: &Value) -> Value {
    let answer = get(&rendered(record), "/metadata/v1.json");
    serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
}

#[test]
fn the_tree_equals_the_document() {
    let mut record = full();
    record["ssh_keys"] = json!([{"name": "a", "key": "ssh-rsa A"}, {"name": "b", "key": "ssh-rsa B"}]);
    record["labels"] = json!(["web", "db"]);
    let addresses = record["network"]["nics"][1]["addresses"].as_array_mut().expect("addresses");
    addresses.push(json!({"method": "static", "address": "2001:db8::5/64"}));
    let responses = rendered(&record);
    for (path, text) in [
        ("hostname", "web-1.example.internal"),
        ("region", "local"),
        ("instance_id", "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"),
        ("public-keys", "ssh-rsa A\nssh-rsa B"),
        ("public_keys", "ssh-rsa A\nssh-rsa B"),
        ("tags", "web\ndb"),
        ("dns", "nameservers"),
        ("dns/nameservers", "10.0.2.3"),
        ("features", "dhcp_enabled"),
        ("features/dhcp_enabled", "true"),
        ("floating_ip", "ipv4/"),
        ("floating_ip/ipv4/active", "false"),
        ("reserved_ip", "ipv4/"),
        ("reserved_ip/ipv4/active", "false"),
        ("interfaces", "private/\npublic/"),
        ("interfaces/private", "0/"),
        ("interfaces/private/0", "ipv4/\nipv6/\nmac\ntype"),
        ("interfaces/private/0/ipv4", "gateway\naddress\nnetmask"),
        ("interfaces/private/0/ipv4/netmask", "255.255.255.0"),
        ("interfaces/private/0/ipv6/address", "2001:db8::5"),
        ("interfaces/private/0/ipv6/cidr", "64"),
        ("user_data", "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"),
        ("vendor-data", "#cloud-config\n{}\n"),
    ] {
        let answer = get(&responses, &format!("/metadata/v1/{path}"));
        assert_eq!((answer.status().0, answer.body().to_bytes().as_ref()), (200, text.as_bytes()), "{path}");
    }
    for path in ["droplet_id", "interfaces/public/1", "interfaces/public/0/ipv4/ip_address", "region/x"] {
        assert_eq!(get(&responses, &format!("/metadata/v1/{path}")).status().0, 404, "{path}");
    }
}

#[test]
fn absent_values_are_empty() {
    let mut record = full();
    for field in ["user_data", "vendor_data", "ssh_keys", "labels", "network"] {
        record.as_object_mut().expect("a mapping").remove(field);
    }
    let responses = rendered(&record);
    let names = ["user-data", "user_data", "vendor-data", "vendor_data", "public-keys", "tags", "interfaces"];
    for name in names {
        let answer = get(&responses, &format!("/metadata/v1/{name}"));
        assert_eq!((answer.status().0, answer.body().len()), (200, 0), "{name}");
    }
    let document = document(&record);
    assert_eq!((&document["interfaces"], &document["user_data"]), (&json!({}), &json!("")));
}

#[test]
fn a_vm_without_ipv4_has_no_ipv4_member() {
    let mut record = full();
    record["network"] = json!({"dns": ["fd00::53"], "nics": [{
        "id": "n0", "mac": "52:54:00:12:34:56",
        "addresses": [{"method": "slaac"}, {"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"}],
    }]});
    let document = document(&record);
    let text = document.to_string();
    for word in ["ipv4", "IPv4", "netmask"] {
        assert!(!text.contains(word), "{word} in {text}");
    }
    let address = json!({"ip_address": "2001:db8::15", "cidr": 64, "gateway": "fe80::1"});
    assert_eq!(document["interfaces"]["public"][0]["ipv6"], address);
    let listing = get(&rendered(&record), "/metadata/v1").body().to_bytes();
    assert!(!listing.windows(8).any(|part| part == b"floating"));
}

#[test]
fn an_unknown_lease_is_dhcp_without_an_address() {
    let mut record = full();
    record["network"]["nics"][0]["addresses"] = json!([{"method": "dhcp4"}]);
    let document = document(&record);
    assert_eq!(
        document["network"]["interfaces"][0]["ip_addresses"],
        json!([{"dhcp": true, "dns": ["10.0.2.3"], "family": "IPv4", "floating": false, "gateway": ""}])
    );
    assert_eq!(document["interfaces"]["public"], json!([{"mac": "52:54:00:12:34:56", "type": "public"}]));
}

#[test]
fn an_unknown_gateway_is_unspecified_and_gives_cloud_init_no_route() {
    let both = json!([
        {"method": "dhcp4", "address": "10.0.2.15/24"},
        {"method": "static", "address": "2001:db8::15/64"},
    ]);
    let mut record = full();
    for nic in record["network"]["nics"].as_array_mut().expect("NICs") {
        nic["addresses"] = both.clone();
    }
    let responses = rendered(&record);
    for (agent, role, v4, v6) in [
        ("Cloud-Init/25.1", "public", "", ""),
        ("Cloud-Init/25.1", "private", "0.0.0.0", "::"),
        ("", "public", "0.0.0.0", "::"),
        ("", "private", "0.0.0.0", "::"),
    ] {
        let fields = [("User-Agent", agent)];
        let answer = ask_with(&responses, Method::Get, "/metadata/v1.json", &fields, b"");
        let document: Value = serde_json::from_slice(&answer.body().to_bytes()).expect("JSON");
        let nic = &document["interfaces"][role][0];
        let found = [&nic["ipv4"]["gateway"], &nic["ipv6"]["gateway"]];
        assert_eq!(found, [v4, v6], "{agent} about {role}");
    }
}

#[test]
fn only_nics_that_the_hypervisor_provides_are_listed() {
    let mut record = full();
    let nics = record["network"]["nics"].as_array_mut().expect("NICs");
    nics[1]["role"] = json!("public");
    nics.push(json!({"id": "v7", "mac": "52:54:00:12:34:57", "vlan": {"link": "n1", "id": 7}}));
    let document = document(&record);
    let macs = |list: &Value| -> Vec<Value> {
        list.as_array().expect("a list").iter().map(|nic| nic["mac"].clone()).collect()
    };
    let both = [json!("52:54:00:12:34:56"), json!("52:54:00:12:34:57")];
    assert_eq!(macs(&document["interfaces"]["public"]), both);
    assert_eq!(macs(&document["network"]["interfaces"]), both);
    assert_eq!(document["interfaces"].get("private"), None);
}

#[test]
fn an_unread_payload_delays_the_document_and_not_the_tree() {
    let mut record = full();
    record["vendor_data"] = json!({"source": {"file": "vendor-data"}});
    let responses = rendered(&record);
    for (path, status) in [
        ("/metadata/v1.json", 503),
        ("/metadata/v1/vendor-data", 503),
        ("/metadata/v1/user-data", 200),
        ("/metadata/v1/hostname", 200),
    ] {
        assert_eq!(get(&responses, path).status().0, status, "{path}");
    }
}

#[test]
fn digitalocean_and_upcloud_serve_the_same_tree() {
    for (dialect, status) in [("digitalocean", 200), ("upcloud", 200), ("hetzner", 404)] {
        let mut record = full();
        record["serve"]["dialects"] = json!([dialect]);
        assert_eq!(get(&rendered(&record), "/metadata/v1.json").status().0, status, "{dialect}");
    }
}
