use serde_json::{Value, json};

use crate::dialect::tests::{ask_with, full, rendered};
use crate::http::{Method, Response};
use crate::store::Responses;

fn get(responses: &Responses, path: &str) -> Response {
    ask_with(responses, Method::Get, path, &[], b"")
}

fn document(record: &Value, name: &str) -> Value {
    let answer = get(&rendered(record), &format!("/openstack/latest/{name}"));
    assert_eq!(answer.status().0, 200, "{name}");
    serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
}

fn text(answer: &Response) -> String {
    String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
}

#[test]
fn disks_and_files_are_listed_and_files_are_served() {
    let mut record = full();
    record["disks"] = json!([
        {"type": "disk", "bus": "scsi", "address": "1:0:2:0", "serial": "d1", "tags": ["db"]},
        {"type": "disk", "bus": "virtio", "address": "none"},
    ]);
    record["files"] = json!([
        {"path": "/etc/a", "base64": "AP8="},
        {"path": "/etc/b", "base64": ""},
    ]);
    let meta_data = document(&record, "meta_data.json");
    let devices = json!([
        {"type": "disk", "bus": "scsi", "address": "1:0:2:0", "serial": "d1", "tags": ["db"]},
        {"type": "disk", "bus": "virtio", "address": "none", "tags": []},
    ]);
    assert_eq!(meta_data["devices"], devices);
    let files = json!([
        {"path": "/etc/a", "content_path": "/content/0000"},
        {"path": "/etc/b", "content_path": "/content/0001"},
    ]);
    assert_eq!(meta_data["files"], files);
    let responses = rendered(&record);
    assert_eq!(get(&responses, "/openstack/content/0000").body().to_bytes(), &[0, 0xff][..]);
    assert_eq!(get(&responses, "/openstack/content/0001").status().0, 200);
    for path in ["/openstack/content", "/openstack/content/0002", "/openstack/content/0"] {
        assert_eq!(get(&responses, path).status().0, 404, "{path}");
    }
}

#[test]
fn a_password_of_the_record_does_not_reach_proxies() {
    let mut record = full();
    assert_eq!(document(&record, "meta_data.json").get("admin_pass"), None);
    record["metadata"]["admin_pass"] = json!("the tenant's");
    assert_eq!(document(&record, "meta_data.json")["meta"]["admin_pass"], "the tenant's");
    record["admin"]["password"] = json!("s3cret");
    let meta_data = document(&record, "meta_data.json");
    assert_eq!((&meta_data["admin_pass"], &meta_data["meta"]), (&json!("s3cret"), &json!({"role": "web"})));
    assert!(!format!("{:?}", rendered(&record)).contains("s3cret"), "a password is in the debug output");
    let forwarded = [("X-Forwarded-For", "")];
    let path = "/openstack/latest/meta_data.json";
    assert_eq!(ask_with(&rendered(&record), Method::Get, path, &forwarded, b"").status().0, 403);
    assert_eq!(ask_with(&rendered(&full()), Method::Get, path, &forwarded, b"").status().0, 200);
}

#[test]
fn absent_documents_are_neither_listed_nor_served() {
    let mut record = full();
    let names =
        |record: &Value, version: &str| text(&get(&rendered(record), &format!("/openstack/{version}")));
    let whole = "meta_data.json\npassword\nuser_data\nvendor_data.json\nnetwork_data.json\nvendor_data2.json";
    assert_eq!(names(&record, "latest"), whole);
    assert_eq!(names(&record, "2012-08-10"), whole.replace("password\n", ""));
    for field in ["user_data", "ssh_keys", "metadata", "random_seed", "vendor_data"] {
        record.as_object_mut().expect("a mapping").remove(field);
    }
    record["network"] = json!({"mode": "none"});
    assert_eq!(names(&record, "latest"), "meta_data.json\npassword\nvendor_data.json\nvendor_data2.json");
    let responses = rendered(&record);
    for name in ["user_data", "network_data.json"] {
        assert_eq!(get(&responses, &format!("/openstack/latest/{name}")).status().0, 404, "{name}");
    }
    let meta_data = document(&record, "meta_data.json");
    let keys: Vec<_> = meta_data.as_object().expect("an object").keys().map(String::as_str).collect();
    let always = [
        "availability_zone",
        "dedicated_cpus",
        "devices",
        "hostname",
        "launch_index",
        "name",
        "project_id",
        "uuid",
    ];
    assert_eq!(keys, always);
    assert_eq!(document(&record, "vendor_data.json"), json!({}));
}

#[test]
fn a_network_is_complete_or_absent() {
    let mut record = full();
    for network in
        [json!({"mode": "none", "nics": record["network"]["nics"]}), json!({}), json!({"nics": []})]
    {
        record["network"] = network;
        assert_eq!(get(&rendered(&record), "/openstack/latest/network_data.json").status().0, 404);
    }
    record["network"] = json!({
        "mode": "raw",
        "raw": {"version": 2},
        "nics": [{"id": "a", "mac": "52:54:00:00:00:01", "addresses": [{"method": "dhcp4"}]}],
    });
    let document = document(&record, "network_data.json");
    assert_eq!(
        document["networks"],
        json!([{"id": "network0", "link": "a", "network_id": "a", "type": "ipv4_dhcp"}])
    );
    assert_eq!(document["links"][0]["mtu"], Value::Null);
    assert_eq!(document["services"], json!([]));
}

#[test]
fn network_data_of_the_record_is_served_unchanged() {
    let mut record = full();
    let nics = record["network"]["nics"].clone();
    // Text keeps its spaces and its order.
    let text = r#"{ "networks": [], "links": [{"type": "phy", "id": "l"}], "services": [] }"#;
    let mapping = json!({"links": [{"id": "l"}], "networks": [], "own": 1});
    for (given, body) in [
        (json!(text), text.to_owned()),
        (mapping.clone(), serde_json::to_string_pretty(&mapping).expect("JSON")),
    ] {
        record["network"] = json!({"mode": "raw", "network_data": given, "nics": nics});
        let responses = rendered(&record);
        let answer = get(&responses, "/openstack/latest/network_data.json");
        assert_eq!(answer.field("Content-Type"), Some("application/json"));
        let value = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let found = self::text(&answer);
        assert_eq!(value(&found), value(&body));
        assert!(given.is_object() || found == body, "{found}");
        assert!(self::text(&get(&responses, "/openstack/latest")).contains("network_data.json"));
        // NoCloud does not serve `network_data`.
        assert_eq!(get(&responses, "/v1/network-config").status().0, 204);
    }
}

#[test]
fn bonds_vlans_and_every_method_of_addressing_are_listed() {
    let mut record = full();
    record["network"] = json!({"dns": ["2001:db8::53"], "nics": [
        {"id": "a", "mac": "52:54:00:00:00:01"},
        {"id": "b", "mac": "52:54:00:00:00:02"},
        {"id": "bond", "mtu": 9000, "bond": {"links": ["a", "b"], "mode": "802.3ad", "miimon": 100,
            "xmit_hash_policy": "layer3+4", "lacp_rate": "fast"},
         "addresses": [{"method": "slaac"}, {"method": "dhcp6"}, {"method": "dhcp4", "gateway": "10.0.0.1"}],
         "routes": [{"to": "10.1.2.3/8", "via": "10.0.0.9"}]},
        {"id": "v", "vlan": {"link": "bond", "id": 7},
         "addresses": [{"method": "static", "address": "2001:db8::5/56", "gateway": "fe80::1"}],
         "routes": [{"to": "2001:db8:1::1/48", "via": "2001:db8::9", "metric": 5},
                    {"to": "0.0.0.0/0", "via": "10.0.0.1"}]},
    ]});
    let document = document(&record, "network_data.json");
    let links = json!([
        {"id": "a", "type": "phy", "vif_id": "a", "mtu": null, "ethernet_mac_address": "52:54:00:00:00:01"},
        {"id": "b", "type": "phy", "vif_id": "b", "mtu": null, "ethernet_mac_address": "52:54:00:00:00:02"},
        {"id": "bond", "type": "bond", "mtu": 9000, "ethernet_mac_address": "52:54:00:00:00:01",
         "bond_links": ["a", "b"], "bond_mode": "802.3ad", "bond_miimon": "100",
         "bond_xmit_hash_policy": "layer3+4", "bond_lacp_rate": "fast"},
        {"id": "v", "type": "vlan", "mtu": null, "vlan_link": "bond", "vlan_id": 7,
         "vlan_mac_address": "52:54:00:00:00:01"},
    ]);
    assert_eq!(document["links"], links);
    let dns = json!([{"type": "dns", "address": "2001:db8::53"}]);
    let networks = json!([
        {"id": "network0", "link": "bond", "network_id": "bond", "type": "ipv6_slaac"},
        {"id": "network1", "link": "bond", "network_id": "bond", "type": "ipv6_dhcp"},
        {"id": "network2", "link": "bond", "network_id": "bond", "type": "ipv4_dhcp",
         "routes": [{"network": "10.0.0.0", "netmask": "255.0.0.0", "gateway": "10.0.0.9"}]},
        {"id": "network3", "link": "v", "network_id": "v", "type": "ipv6", "ip_address": "2001:db8::5",
         "netmask": "ffff:ffff:ffff:ff00::", "services": dns,
         "routes": [{"network": "::", "netmask": "::", "gateway": "fe80::1"},
                    {"network": "2001:db8:1::", "netmask": "ffff:ffff:ffff::", "gateway": "2001:db8::9",
                     "metric": 5}]},
    ]);
    assert_eq!(document["networks"], networks);
    assert_eq!(document["services"], dns);
}

#[test]
fn vendor_data_is_text_wrapped_or_left_out() {
    let mut record = full();
    record["vendor_data"] = json!({"base64": "H4sI"});
    record["vendor_data2"] = json!({"base64": "//4="});
    let first = document(&record, "vendor_data.json")["cloud-init"].as_str().map(str::to_owned);
    assert!(first.expect("text").starts_with("MIME-Version: 1.0\nContent-Type: application/gzip\n"));
    assert_eq!(document(&record, "vendor_data2.json"), json!({}));
    record["vendor_data"] = json!({"source": {"file": "vd"}});
    record["user_data"] = json!({"source": {"file": "ud"}});
    for name in ["vendor_data.json", "user_data"] {
        assert_eq!(get(&rendered(&record), &format!("/openstack/latest/{name}")).status().0, 503, "{name}");
    }
}

#[test]
fn a_password_is_posted_once_and_not_to_the_first_version() {
    let responses = rendered(&full());
    let long = vec![b'x'; 1_021];
    let later = "/openstack/2013-04-04/password";
    for (method, path, fields, body, status, said) in [
        (Method::Get, later, &[][..], &b""[..], 200, ""),
        (Method::Post, later, &[], b"", 400, "Bad Request\n"),
        (Method::Post, later, &[], &long, 400, "Bad Request\n"),
        (Method::Post, "/openstack/2012-08-10/password", &[], b"a", 404, "Not Found\n"),
        (Method::Get, "/openstack/2012-08-10/password", &[], b"", 404, "Not Found\n"),
        (Method::Post, later, &[("X-Forwarded-For", "a")], b"a", 403, "Forbidden\n"),
        (Method::Post, later, &[], &long[..1_020], 200, ""),
        (Method::Post, later, &[], b"a", 409, "Conflict\n"),
        (Method::Delete, later, &[], b"", 405, "Method Not Allowed\n"),
        (Method::Get, later, &[("X-Forwarded-For", "")], b"", 403, "Forbidden\n"),
    ] {
        let answer = ask_with(&responses, method, path, fields, body);
        assert_eq!((answer.status().0, text(&answer).as_str()), (status, said), "{method:?} {path}");
    }
    let kept = get(&responses, "/openstack/latest/password");
    assert_eq!(kept.body().to_bytes(), long[..1_020]);
    assert_eq!(ask_with(&responses, Method::Head, later, &[], b""), kept);
}

#[test]
fn a_record_of_eve_alone_lists_only_latest() {
    let versions = |dialects: Value| {
        let mut record = full();
        record["serve"]["dialects"] = dialects;
        text(&get(&rendered(&record), "/openstack"))
    };
    assert_eq!(versions(json!(["eve"])), "latest\n");
    assert!(versions(json!(["eve", "openstack"])).ends_with("\n2025-04-04\nlatest"));
}
