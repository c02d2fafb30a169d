//! Properties that the vectors do not cover.

use std::sync::Arc;

use serde_json::{Value, json};

use super::EXPIRY;
use crate::dialect::render as render_for;
use crate::dialect::tests::{ask_with, full, parse, rendered};
use crate::http::{Method, Response};
use crate::store::{Interner, Responses, VmState};
use crate::token::{Keyring, TokenKind};

fn put(responses: &Responses, fields: &[(&str, &str)]) -> Response {
    ask_with(responses, Method::Put, "/v1/token", fields, b"")
}

fn get(responses: &Responses, path: &str, token: &str) -> Response {
    ask_with(responses, Method::Get, path, &[("Metadata-Token", token), ("Accept", "application/json")], b"")
}

fn token(responses: &Responses) -> String {
    let answer = put(responses, &[(EXPIRY, "300")]);
    String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
}

fn document(record: &Value, name: &str) -> Value {
    let responses = rendered(record);
    let answer = get(&responses, &format!("/v1/{name}"), &token(&responses));
    serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
}

#[test]
fn tokens_live_one_second_to_one_day_and_travel_one_hop() {
    let mut record = full();
    record["serve"]["hop_limit"] = json!(3);
    let responses = rendered(&record);
    for (seconds, status) in [
        ("1", 200),
        ("86400", 200),
        ("0", 400),
        ("86401", 400),
        ("", 400),
        ("-1", 400),
        ("+300", 400),
        ("300s", 400),
        ("99999999999999999999", 400),
    ] {
        assert_eq!(put(&responses, &[(EXPIRY, seconds)]).status().0, status, "{seconds}");
    }
    assert_eq!(put(&responses, &[]).status().0, 400);
    assert_eq!(put(&responses, &[(EXPIRY, "300"), ("X-Forwarded-For", "")]).status().0, 403);
    let answer = put(&responses, &[(EXPIRY, "300")]);
    assert_eq!((answer.hop_limit(), answer.field(EXPIRY)), (Some(3), Some("300")));
}

#[test]
fn tokens_of_another_vm_or_dialect_are_refused() {
    let keyring = Arc::new(Keyring::ephemeral());
    let vms = ["7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3e"].map(|uuid| {
        let mut record = full();
        record["vm"]["uuid"] = json!(uuid);
        let vm = VmState { keyring: Arc::clone(&keyring), ..VmState::alone(uuid) };
        render_for(&parse(&record), &mut Interner::new(), vm)
    });
    let own = token(&vms[0]);
    let aws = keyring.mint(TokenKind::Aws, "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", 300, u64::MAX / 2);
    for path in ["/v1/instance", "/v1/network", "/v1/ssh-keys", "/v1/user-data"] {
        assert_eq!(get(&vms[0], path, &own).status().0, 200, "{path}");
        for (vm, token) in [(&vms[1], own.as_str()), (&vms[0], aws.as_str()), (&vms[0], "")] {
            assert_eq!(get(vm, path, token).status().0, 401, "{path}");
        }
    }
}

#[test]
fn user_data_without_a_token_is_noclouds_or_refused() {
    let mut record = full();
    let ask = |record: &Value| ask_with(&rendered(record), Method::Get, "/v1/user-data", &[], b"");
    assert!(ask(&record).body().to_bytes().starts_with(b"#cloud-config"));
    record["serve"]["dialects"] = json!(["akamai"]);
    assert_eq!(ask(&record).status().0, 401);
}

#[test]
fn keys_are_listed_by_account() {
    let mut record = full();
    record["ssh_keys"] = json!([
        {"name": "a", "key": "ssh-rsa A"},
        {"name": "b", "key": "ssh-rsa B", "user": "alice"},
        {"name": "c", "key": "ssh-rsa C"},
    ]);
    let users = json!({"users": {"alice": ["ssh-rsa B"], "root": ["ssh-rsa A", "ssh-rsa C"]}});
    assert_eq!(document(&record, "ssh-keys"), users);
    record["ssh_keys"] = json!([]);
    assert_eq!(document(&record, "ssh-keys"), json!({"users": {"root": []}}));
}

#[test]
fn addresses_are_listed_as_public_or_private_and_every_list_exists() {
    let mut record = full();
    let network = document(&record, "network");
    let v4 =
        json!({"private": ["10.0.2.15/32", "192.168.7.5/32"], "public": ["203.0.113.7/32"], "shared": []});
    assert_eq!(network["ipv4"], v4);
    let interfaces = json!([
        {"id": 1, "ipam_address": null, "label": "net-a", "purpose": "public"},
        {"id": 2, "ipam_address": "192.168.7.5/24", "label": "net-b", "purpose": "vlan"},
    ]);
    assert_eq!(network["interfaces"], interfaces);
    record["network"]["nics"] = json!([{"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
        {"method": "slaac", "address": "2001:db8::15/64"}, {"method": "static", "address": "2001:db8::16/64"}]}]);
    let network = document(&record, "network");
    assert_eq!(network["ipv4"], json!({"private": [], "public": [], "shared": []}));
    assert_eq!(
        (&network["ipv6"]["slaac"], &network["ipv6"]["ranges"]),
        (&json!("2001:db8::15/128"), &json!(["2001:db8::16/128"]))
    );
}

#[test]
fn unread_user_data_is_503() {
    let mut record = full();
    record["user_data"] = json!({"source": {"file": "user-data"}});
    let responses = rendered(&record);
    assert_eq!(get(&responses, "/v1/user-data", &token(&responses)).status().0, 503);
}

#[test]
fn a_document_is_text_unless_the_request_accepts_json() {
    let mut record = full();
    record["ssh_keys"] = json!([
        {"name": "a", "key": "ssh-rsa A"},
        {"name": "b", "key": "ssh-rsa B", "user": "alice"},
        {"name": "c", "key": "ssh-rsa C"},
    ]);
    let responses = rendered(&record);
    let token = token(&responses);
    let answer = |name: &str, accepted: &str| {
        let fields = [("Metadata-Token", token.as_str()), ("Accept", accepted)];
        let answer = ask_with(&responses, Method::Get, &format!("/v1/{name}"), &fields, b"");
        (answer.field("Content-Type").map(str::to_owned), answer.body().to_bytes())
    };
    let text = "users.alice: ssh-rsa B\nusers.root: ssh-rsa A\nusers.root: ssh-rsa C\n";
    for accepted in ["", "*/*", "text/plain", "text/plain, */*;q=0.1", "application/jsonlines"] {
        let (kind, body) = answer("ssh-keys", accepted);
        assert_eq!(kind.as_deref(), Some("text/plain; charset=utf-8"), "{accepted}");
        assert_eq!(body, text, "{accepted}");
    }
    for accepted in
        ["application/json", "text/html, Application/JSON;q=0.9", "application/json;charset=utf-8"]
    {
        let (kind, body) = answer("ssh-keys", accepted);
        assert_eq!(kind.as_deref(), Some("application/json"), "{accepted}");
        assert!(serde_json::from_slice::<Value>(&body).is_ok(), "{accepted}");
    }
    let (_, body) = answer("network", "");
    let lines = String::from_utf8(body.to_vec()).expect("text");
    for line in ["interfaces.1.ipam_address: 192.168.7.5/24", "ipv4.public: 203.0.113.7/32"] {
        assert!(lines.lines().any(|found| found == line), "{line}: {lines}");
    }
    let put = put(&responses, &[(EXPIRY, "300"), ("Accept", "application/json")]);
    let token: Vec<String> = serde_json::from_slice(&put.body().to_bytes()).expect("a list");
    assert_eq!(get(&responses, "/v1/instance", &token[0]).status().0, 200);
}

#[test]
fn the_link_local_address_is_that_of_the_first_mac() {
    let network = document(&full(), "network");
    assert_eq!(network["ipv6"]["link_local"], json!("fe80::5054:ff:fe12:3456/128"));
}
