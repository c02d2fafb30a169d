//! Properties that the vectors do not cover.

use serde_json::{Value, json};

use crate::dialect::render as render_for;
use crate::dialect::tests::{TestRequest, full, parse, rendered};
use crate::http::{Method, Response};
use crate::mailbox::Mailbox;
use crate::sink;
use crate::store::{Interner, Responses, VmState};

const V4: &str = "169.254.42.42";

fn get(responses: &Responses, address: &str, source_port: u16, path: &str) -> Response {
    let request = TestRequest::new(Method::Get, path, &[]);
    TestRequest { local: (address, 80), source_port, ..request }.answer(responses)
}

fn conf(nic: Value) -> Value {
    let mut record = full();
    record["network"]["nics"] = json!([nic]);
    let answer = get(&rendered(&record), "fd00:42::42", 40_000, "/conf?format=json");
    serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
}

/// Returns `public_ips`, and asserts that the lists by family have the same entries.
fn addresses(nic: Value) -> Value {
    let conf = conf(nic);
    for (name, family) in [("public_ips_v4", "inet"), ("public_ips_v6", "inet6")] {
        let all = conf["public_ips"].as_array().expect("a list").iter();
        let expected: Value = all.filter(|entry| entry["family"] == family).cloned().collect();
        assert_eq!(conf[name], expected, "{name}");
    }
    conf["public_ips"].clone()
}

#[test]
fn the_old_ipv6_address_has_a_gateway() {
    let nic = |gateway: Option<&str>| {
        let mut entry = json!({"method": "static", "address": "2001:db8::5/64"});
        if let Some(gateway) = gateway {
            entry["gateway"] = gateway.into();
        }
        json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [entry]})
    };
    let with = json!({"address": "2001:db8::5", "gateway": "fe80::1", "netmask": "64"});
    assert_eq!(conf(nic(Some("fe80::1")))["ipv6"], with);
    assert_eq!(conf(nic(None))["ipv6"], Value::Null);
}

#[test]
fn the_keys_of_user_data_are_listed_in_json() {
    let mut record = full();
    let keys = |record: &Value, path: &str| {
        let answer = get(&rendered(record), V4, 1, path);
        (answer.closes(), serde_json::from_slice::<Value>(&answer.body().to_bytes()).ok())
    };
    let listed = |keys: Value| (true, Some(json!({ "user_data": keys })));
    assert_eq!(keys(&record, "/user_data?format=json"), listed(json!(["cloud-init"])));
    assert_eq!(keys(&record, "/vendor_data?format=json"), (true, None));
    record.as_object_mut().expect("an object").remove("user_data");
    assert_eq!(keys(&record, "/user_data?format=json"), listed(json!([])));
}

#[test]
fn an_unknown_lease_is_the_address_from_which_the_guest_asks() {
    let leased = json!({"method": "dhcp4"});
    let fixed = json!({"method": "static", "address": "2001:db8::5/64", "gateway": "fe80::1"});
    for (list, count) in [(json!([leased]), 1), (json!([leased, fixed]), 2), (json!([fixed]), 1)] {
        let is_leased = list[0] == leased;
        let found = addresses(json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": list}));
        let found = found.as_array().expect("a list");
        assert_eq!(found.len(), count, "{list}");
        let lease = json!({
            "address": "10.0.2.15", "dynamic": false, "family": "inet", "gateway": "",
            "id": "eni-d4dd82cf2995e2454", "netmask": "32", "provisioning_mode": "dhcp",
        });
        assert_eq!(found[0] == lease, is_leased, "{list}");
    }
}

#[test]
fn ipv6_addresses_follow_the_leased_one() {
    let found = addresses(json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
        {"method": "static", "address": "2001:db8::5/64", "gateway": "fe80::1"},
        {"method": "static", "address": "10.0.0.5/24"},
        {"method": "dhcp4", "address": "10.0.1.5/24"},
    ]}));
    let order: Vec<&Value> =
        found.as_array().expect("a list").iter().map(|entry| &entry["address"]).collect();
    assert_eq!(order, ["10.0.1.5", "10.0.0.5", "2001:db8::5"]);
}

#[test]
fn the_document_is_shell_syntax_unless_the_request_asks_for_json() {
    let mut record = full();
    record["ssh_keys"] = json!([
        {"name": "a", "key": "ssh-ed25519 AAAA alice's laptop"}, {"name": "b", "key": "ssh-ed25519 BBBB"},
    ]);
    let responses = rendered(&record);
    let answer = get(&responses, V4, 40_000, "/conf");
    assert_eq!(answer.field("Content-Type"), Some("text/plain; charset=utf-8"));
    let text = String::from_utf8(answer.body().to_bytes().to_vec()).expect("text");
    let lines: Vec<&str> = text.lines().collect();
    for line in [
        "HOSTNAME=web-1",
        "ID=7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
        "LOCATION=ZONE_ID",
        "LOCATION_ZONE_ID=local-a",
        "PRIVATE_IP=10.0.2.15",
        "PUBLIC_IP_ADDRESS=203.0.113.7",
        "SSH_PUBLIC_KEYS=2",
        "SSH_PUBLIC_KEYS_0_KEY='ssh-ed25519 AAAA alice'\"'\"'s laptop'",
        "SSH_PUBLIC_KEYS_1_KEY='ssh-ed25519 BBBB'",
        "TAGS_0=web",
        "VOLUMES=",
    ] {
        assert!(lines.contains(&line), "{line} in\n{text}");
    }
    for query in ["?format=json", "?format=JSON&x"] {
        let answer = get(&responses, V4, 40_000, &format!("/conf{query}"));
        assert_eq!(answer.field("Content-Type"), Some("application/json"), "{query}");
    }
}

#[test]
fn payloads_are_for_ports_below_1024_and_the_server_closes_the_connection() {
    let responses = rendered(&full());
    for path in ["/user_data", "/user_data/cloud-init", "/vendor_data", "/vendor_data/cloud-init"] {
        for port in [1, 2, 1_023] {
            let answer = get(&responses, V4, port, path);
            assert_eq!((answer.status().0, answer.closes()), (200, true), "{path} from {port}");
        }
        for port in [1_024, 65_535] {
            assert_eq!(get(&responses, V4, port, path).status().0, 403, "{path} from {port}");
        }
    }
    let other = get(&responses, V4, 1, "/user_data/other");
    assert_eq!((other.status().0, other.closes()), (404, true));
    assert_eq!(get(&responses, "169.254.169.254", 1, "/user_data").status().0, 404);
}

#[test]
fn payloads_without_a_text_form_are_empty_and_unread_ones_are_503() {
    let mut record = full();
    let mut user_data = |payload: Value| {
        record["user_data"] = payload;
        let answer = get(&rendered(&record), V4, 1, "/user_data/cloud-init");
        (answer.status().0, answer.closes(), answer.body().len())
    };
    assert_eq!(user_data(json!({"base64": "/wA="})), (200, true, 0));
    assert_eq!(user_data(json!({"text": "x"})), (200, true, 1));
    let (status, closes, _) = user_data(json!({"source": {"file": "user-data"}}));
    assert_eq!((status, closes), (503, true));
}

#[test]
fn the_lease_is_first_and_other_addresses_have_their_own_prefix() {
    let listed = addresses(json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
        {"method": "static", "address": "198.51.100.9/24", "gateway": "198.51.100.1"},
        {"method": "slaac", "address": "2001:db8::15/64", "gateway": "fe80::1"},
        {"method": "static", "address": "2001:db8:1::15/64"},
        {"method": "dhcp4", "address": "10.0.2.15/24", "gateway": "10.0.2.2", "public": "203.0.113.7"},
        {"method": "dhcp6"},
    ]}));
    let entry = |address: &str, family: &str, gateway: &str, netmask: &str, mode: &str| {
        json!({
            "address": address, "dynamic": false, "family": family, "gateway": gateway,
            "id": "eni-d4dd82cf2995e2454", "netmask": netmask, "provisioning_mode": mode,
        })
    };
    let wanted = json!([
        entry("10.0.2.15", "inet", "10.0.2.2", "32", "dhcp"),
        entry("198.51.100.9", "inet", "198.51.100.1", "24", "manual"),
        entry("2001:db8::15", "inet6", "fe80::1", "64", "slaac"),
    ]);
    assert_eq!(listed, wanted, "an IPv6 address without a gateway would make an invalid route");
}

#[test]
fn a_state_reaches_the_sink_and_only_patch_sets_it() {
    let mut record = full();
    record["sinks"] = json!({"ready": "file:/var/log/guests.jsonl"});
    let record = parse(&record);
    let outbox = sink::unattended();
    let uuid = record.vm.uuid.as_str();
    let vm = VmState {
        mailbox: Mailbox::new(uuid, &outbox).into(),
        sinks: record.sinks.clone(),
        ..VmState::alone(uuid)
    };
    let responses = render_for(&record, &mut Interner::new(), vm);
    let patch = |method| {
        let (request, body) = (TestRequest::new(method, "/state", &[]), br#"{"state_detail":"booted"}"#);
        TestRequest { local: (V4, 80), body, ..request }.answer(&responses)
    };
    let answer = patch(Method::Patch);
    assert_eq!((answer.status().0, answer.body().to_bytes().as_ref()), (200, &b"{}"[..]));
    assert_eq!(outbox.counts().waiting, 1);
    let refused = patch(Method::Get);
    assert_eq!((refused.status().0, refused.field("Allow")), (405, Some("PATCH")));
    assert_eq!(outbox.counts().waiting, 1);
}

#[test]
fn old_names_of_addresses_are_null_for_cloud_init_only() {
    let document = |record: &Value, agent: &str| -> Value {
        let fields = [("User-Agent", agent)];
        let request = TestRequest::new(Method::Get, "/conf?format=json", &fields);
        let answer = TestRequest { local: (V4, 80), ..request }.answer(&rendered(record));
        serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
    };
    let v4 = json!({"method": "static", "address": "198.51.100.9/24"});
    let nat = json!({"method": "static", "address": "10.0.2.15/24", "public": "203.0.113.7"});
    let v6 = json!({"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"});
    let id = "eni-d4dd82cf2995e2454";
    let six = json!({"address": "2001:db8::15", "gateway": "fe80::1", "netmask": "64"});
    let public = |address: &str| json!({"address": address, "dynamic": false, "id": id});
    for (addresses, role, members) in [
        (json!([nat, v6]), "public", [json!("10.0.2.15"), public("203.0.113.7"), six]),
        (json!([v4]), "public", [json!(null), public("198.51.100.9"), json!(null)]),
        (json!([v4]), "private", [json!("198.51.100.9"), json!(null), json!(null)]),
        (json!([{"method": "dhcp4"}]), "public", [json!(null), json!(null), json!(null)]),
    ] {
        let mut record = full();
        record["network"]["nics"][0]["addresses"] = addresses;
        record["network"]["nics"][0]["role"] = role.into();
        let (mut others, mut cloud_init) =
            (document(&record, "curl/7.88.1"), document(&record, "Cloud-Init/22.4.2"));
        let names = ["private_ip", "public_ip", "ipv6"];
        let take = |document: &mut Value| {
            names.map(|name| document.as_object_mut().and_then(|members| members.remove(name)))
        };
        assert_eq!(take(&mut others), members.map(Some), "{record}");
        assert_eq!(take(&mut cloud_init), [const { Some(Value::Null) }; 3]);
        assert_eq!(cloud_init, others);
    }
}
