//! Properties that hold for every record, in addition to the test vectors.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::render as render_for;
use crate::http::{Headers, Method, Request, RequestTarget, Response};
use crate::record::{RESERVED_KEYS, Record};
use crate::store::{Endpoint, Interner, LiveOutcome, Responses, VmState};
use metadata_common::addresses::Connection;
use metadata_common::time::Now;

const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");
/// Time of requests: 2026-11-21T00:00:00Z.
pub(super) const NOW_UNIX: u64 = 1_795_219_200;

fn ask(responses: &Responses, method: Method, path: &str) -> Response {
    ask_with(responses, method, path, &[("Metadata", "true")], b"")
}

/// Sends a request with these header fields and this body.
pub(super) fn ask_with(
    responses: &Responses,
    method: Method,
    path: &str,
    fields: &[(&str, &str)],
    body: &[u8],
) -> Response {
    ask_at(("169.254.169.254", 40_000), responses, method, path, fields, body)
}

/// Like [`ask_with`], to another address and from another port.
pub(super) fn ask_at(
    (address, source_port): (&str, u16),
    responses: &Responses,
    method: Method,
    path: &str,
    fields: &[(&str, &str)],
    body: &[u8],
) -> Response {
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let target = RequestTarget { path, query };
    let request = Request { method, target, headers: Headers::new(&fields), body };
    let address = address.parse().expect("an address");
    let remote = "10.0.2.15".parse().expect("an address");
    let connection = Connection { slot: 0, local: (address, 80), remote: (remote, source_port) };
    let now = Now { mono: std::time::Duration::ZERO, unix_seconds: NOW_UNIX };
    match responses.answer(now, &connection, &request, None) {
        LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
        LiveOutcome::Park(parked) => panic!("{path} is parked: {parked:?}"),
    }
}

pub(super) fn render(record: &Record, interner: &mut Interner) -> Responses {
    render_for(record, interner, VmState::alone(record.vm.uuid.as_str()))
}

pub(super) fn full() -> Value {
    serde_yaml::from_str(FULL).expect("the full record is YAML")
}

pub(super) fn parse(value: &Value) -> Record {
    Record::parse("test.json", &value.to_string()).expect("a good record").0
}

/// Returns the full record with a field replaced.
pub(super) fn with(field: &str, value: Value) -> Record {
    let mut record = full();
    record[field] = value;
    parse(&record)
}

#[test]
fn user_data_that_a_thousand_vms_share_is_stored_once() {
    let mut interner = Interner::new();
    let user_data = STANDARD.encode(vec![7_u8; 60_000]);
    let vms: Vec<Responses> = (0..1_000)
        .map(|n| {
            let mut record = full();
            record["vm"]["name"] = json!(format!("web-{n}"));
            record["vm"]["uuid"] = json!(format!("7c0f1a52-3b5e-4d1a-9d2c-{n:012}"));
            record["user_data"] = json!({ "base64": user_data });
            render(&parse(&record), &mut interner)
        })
        .collect();
    let first = ask(&vms[0], Method::Get, "/v1/user-data");
    for vm in &vms {
        let next = ask(vm, Method::Get, "/v1/user-data");
        assert_eq!(next.body().pieces()[0].as_ptr(), first.body().pieces()[0].as_ptr());
        assert_eq!(next.head().as_ptr(), first.head().as_ptr());
    }
    let meta_data = |n: usize| ask(&vms[n], Method::Get, "/v1/meta-data");
    assert_ne!(meta_data(0).body(), meta_data(1).body(), "the names differ");
    drop((vms, first));
    interner.sweep();
    assert!(interner.is_empty(), "{} entries outlive their VMs", interner.len());
}

#[test]
fn only_listed_dialects_are_served() {
    let paths = |dialects: Value| -> Vec<String> {
        let record = with("serve", json!({ "dialects": dialects }));
        render(&record, &mut Interner::new()).routes().map(|(_, path, _)| path.to_owned()).collect()
    };
    let always = ["/", "/v1/events", "/v1/phone-home"];
    let of = |dialects: Value| -> Vec<String> {
        paths(dialects).into_iter().filter(|path| !always.contains(&path.as_str())).collect()
    };
    let nocloud = ["/v1/meta-data", "/v1/network-config", "/v1/user-data", "/v1/vendor-data"];
    assert_eq!(of(json!(["nocloud"])), nocloud);
    assert_eq!(of(json!(["kubevirt"])), ["/healthz", "/v1/identity", "/v1/token"]);
    assert_eq!(of(json!(["maas"])), ["/MAAS/metadata"]);
    assert_eq!(paths(json!([])), always);
}

#[test]
fn unread_user_data_is_503() {
    let record = with("user_data", json!({ "source": { "file": "user-data" } }));
    let answer = ask(&render(&record, &mut Interner::new()), Method::Get, "/v1/user-data");
    assert_eq!(answer.status().0, 503);
    let head = String::from_utf8_lossy(answer.head()).into_owned();
    assert!(head.contains("\r\nRetry-After: 1\r\n"), "{head}");
}

#[test]
fn a_bare_record_has_no_server_error_except_for_its_missing_token() {
    let mut bare = full();
    let members = bare.as_object_mut().expect("a record is a mapping");
    members.retain(|field, _| {
        matches!(field.as_str(), "schema" | "generation" | "vm" | "hostname" | "placement")
    });
    let responses = render(&parse(&bare), &mut Interner::new());
    for (_, path, _) in responses.routes() {
        let answer = ask(&responses, Method::Get, path);
        let token =
            path == "/v1/token" && answer.body().to_bytes().starts_with(br#"{"error":"token_unavailable""#);
        assert!(answer.status().0 < 500 || token, "{path} is {}", answer.status().0);
    }
    for absent in ["/v1/user-data", "/v1/vendor-data", "/v1/network-config"] {
        assert_eq!(ask(&responses, Method::Get, absent).status().0, 204, "{absent}");
    }
}

#[test]
fn older_clients_get_debians_interfaces_if_the_record_asks_for_it() {
    let mut record = full();
    record["serve"]["legacy_eni"] = json!(true);
    record["network"]["nics"][1]["addresses"] = json!([
        { "method": "static", "address": "192.168.7.5/22", "gateway": "192.168.4.1" },
        { "method": "static", "address": "2001:db8::5/64" },
        { "method": "slaac" },
    ]);
    let responses = render(&parse(&record), &mut Interner::new());
    let body = ask(&responses, Method::Get, "/v1/meta-data");
    let meta_data: Value = serde_yaml::from_slice(&body.body().to_bytes()).expect("meta-data is YAML");
    let wanted = "auto lo\niface lo inet loopback\n\nauto eth0\niface eth0 inet dhcp\n    \
                  hwaddress ether 52:54:00:12:34:56\n    mtu 1500\n\nauto eth1\niface eth1 inet static\n    \
                  hwaddress ether 52:54:00:12:34:57\n    mtu 1500\n    address 192.168.7.5\n    \
                  netmask 255.255.252.0\n    gateway 192.168.4.1\n    dns-nameservers 10.0.2.3\n    \
                  dns-search example.internal\n\nauto eth1:1\niface eth1:1 inet6 static\n    \
                  hwaddress ether 52:54:00:12:34:57\n    mtu 1500\n    address 2001:db8::5\n    netmask 64\n    \
                  dns-nameservers 10.0.2.3\n    dns-search example.internal\n";
    assert_eq!(meta_data["network-interfaces"], wanted);
}

/// Any line that a record accepts.
fn line() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{1,40}"
}

fn metadata() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map("[A-Za-z0-9._-]{1,12}", any::<String>(), 0..10)
}

prop_compose! {
    /// A record with random user-data, metadata, names and keys, and random choices.
    fn records()(
        user_data in prop::option::of(prop::collection::vec(any::<u8>(), 0..2_000)),
        (name, id, kind) in (line(), line(), line()),
        metadata in metadata(),
        keys in prop::collection::vec(line(), 0..4),
        absent_seed in prop_oneof![Just(204), Just(404)],
        mode in prop_oneof![Just("auto"), Just("none")],
        legacy_eni in any::<bool>(),
    ) -> (Record, Option<Vec<u8>>, BTreeMap<String, String>) {
        let mut record = full();
        record["vm"]["name"] = json!(name);
        record["vm"]["instance_id"] = json!(id);
        record["instance_type"] = json!(kind);
        record["metadata"] = json!(metadata);
        record["ssh_keys"] = keys.iter().map(|key| json!({ "name": "k", "key": key })).collect();
        record["serve"]["absent_seed"] = json!(absent_seed);
        record["serve"]["legacy_eni"] = json!(legacy_eni);
        record["network"]["mode"] = json!(mode);
        record["user_data"] = json!(user_data.as_ref().map(|bytes| json!({ "base64": STANDARD.encode(bytes) })));
        (parse(&record), user_data, metadata)
    }
}

proptest! {
    #[test]
    fn user_data_arrives_byte_for_byte((record, user_data, _) in records()) {
        let answer = ask(&render(&record, &mut Interner::new()), Method::Get, "/v1/user-data");
        match user_data {
            Some(bytes) => prop_assert_eq!(answer.body().to_bytes(), bytes),
            None => prop_assert!(matches!(answer.status().0, 204 | 404)),
        }
    }

    #[test]
    fn meta_data_reads_back_as_the_record((record, _, metadata) in records()) {
        let answer = ask(&render(&record, &mut Interner::new()), Method::Get, "/v1/meta-data");
        let read: Value = serde_yaml::from_slice(&answer.body().to_bytes()).expect("meta-data is YAML");
        prop_assert_eq!(&read["instance-id"], record.instance_id());
        prop_assert_eq!(&read["instance-type"], record.instance_type());
        let keys: Vec<_> = record.ssh_keys.iter().map(|key| key.key.as_str()).collect();
        prop_assert_eq!(read.get("public-keys").cloned().unwrap_or(json!([])), json!(keys));
        for (key, value) in metadata.iter().filter(|(key, _)| !RESERVED_KEYS.contains(&key.as_str())) {
            prop_assert_eq!(&read[key], value, "{}", key);
        }
    }

    #[test]
    fn head_is_answered_as_get_on_every_path((record, _, _) in records(), other in "/[ -~]{0,20}") {
        let responses = render(&record, &mut Interner::new());
        for path in responses.routes().map(|(_, path, _)| path).chain([other.as_str()]) {
            prop_assert_eq!(ask(&responses, Method::Head, path), ask(&responses, Method::Get, path));
        }
    }

    #[test]
    fn every_route_has_a_normalised_path((record, _, _) in records()) {
        for (_, path, _) in render(&record, &mut Interner::new()).routes() {
            let segments = path.strip_prefix('/').expect("paths start with a slash");
            prop_assert!(path == "/" || segments.split('/').all(|s| !matches!(s, "" | "." | "..")), "{}", path);
        }
    }

    #[test]
    fn no_rendered_answer_is_a_server_error_if_there_is_a_token((record, _, _) in records()) {
        let responses = render(&record, &mut Interner::new());
        for (_, path, route) in responses.routes() {
            if let Endpoint::Fixed(response) = route.endpoint() {
                prop_assert!(response.status().0 < 500, "{}", path);
            }
        }
    }
}
