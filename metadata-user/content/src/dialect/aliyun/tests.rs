//! Properties of AliYun that the vectors do not cover.

use serde_json::{Value, json};

use super::{TOKEN, TTL};
use crate::dialect::tests::{DialectGuest, Orders, bare, full, issued, nic, ordered, sign, text};
use crate::http::{Method, Response};
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

const TREE: &str = "/2016-01-01/meta-data";

fn ask(guest: &DialectGuest, path: &str, fields: &[(&str, &str)]) -> Response {
    guest.ask_at(("100.100.100.200", 80), Method::Get, path, fields)
}

fn put(guest: &DialectGuest) -> Response {
    guest.ask_at(("100.100.100.200", 80), Method::Put, "/latest/api/token", &[(TTL, "60")])
}

fn all(guest: &DialectGuest) -> Value {
    let response = ask(guest, &format!("{TREE}/all"), &[]);
    serde_json::from_slice(&response.body().to_bytes()).expect("JSON")
}

/// Crawls a directory of the tree and rebuilds the JSON value that it shows.
fn crawled(guest: &DialectGuest, directory: &str) -> Value {
    let mut value = json!({});
    for line in text(&ask(guest, directory, &[])).lines() {
        let name = line.trim_end_matches('/');
        let path = format!("{directory}/{name}");
        value[name] = match line.ends_with('/') {
            true => crawled(guest, &path),
            false => text(&ask(guest, &path, &[])).into(),
        };
    }
    value
}

#[test]
fn the_tree_equals_the_document() {
    let mut keys = full();
    keys["ssh_keys"] = (0..12)
        .map(|n| json!({ "name": format!("k{n}"), "key": format!("k {}", "x".repeat(600)) }))
        .collect();
    for record in [full(), bare(), keys] {
        let guest = DialectGuest::of(&record);
        assert_eq!(crawled(&guest, TREE), all(&guest));
    }
    let guest = DialectGuest::of(&full());
    for absent in ["/nope", "/instance/nope", "/instance-id/nope", "/all/nope", "/network/interfaces/macs/0"]
    {
        assert_eq!(ask(&guest, &format!("{TREE}{absent}"), &[]).status().0, 404, "{absent}");
    }
}

#[test]
fn absent_values_are_not_in_the_document() {
    let document = all(&DialectGuest::of(&bare()));
    for absent in
        ["dns-conf", "eipv4", "image-id", "mac", "network", "private-ipv4", "public-ipv4", "public-keys"]
    {
        assert!(document.get(absent).is_none(), "{absent}");
    }
    let mut record = full();
    record["network"]["nics"] =
        json!([nic(1, &json!([{ "method": "static", "address": "2001:db8::5/64" }]))]);
    let document = all(&DialectGuest::of(&record));
    let interfaces = &document["network"]["interfaces"]["macs"];
    let names: Vec<_> = interfaces["52:54:00:00:00:01"].as_object().expect("an interface").keys().collect();
    assert_eq!(
        names,
        [
            "ipv6-gateway",
            "ipv6s",
            "network-interface-id",
            "vpc-id",
            "vpc-ipv6-cidr-blocks",
            "vswitch-ipv6-cidr-block"
        ]
    );
    assert!(document.get("private-ipv4").is_none());
}

#[test]
fn all_addresses_and_resolvers_are_listed() {
    let mut record = full();
    record["network"]["dns"] = json!(["10.0.0.1", "2001:db8::53"]);
    record["network"]["nics"] = json!([nic(
        1,
        &json!([
            { "method": "static", "address": "10.0.0.5/22" },
            { "method": "slaac", "gateway": "fe80::1" },
            { "method": "static", "address": "10.0.1.5/22", "gateway": "10.0.0.2" },
            { "method": "static", "address": "2001:db8::5/64" },
            { "method": "static", "address": "2001:db8::6/64" },
        ])
    )]);
    record["network"]["nics"][0]["network_id"] = json!("net-1");
    let document = all(&DialectGuest::of(&record));
    assert_eq!(document["dns-conf"]["nameservers"], "10.0.0.1\r\n2001:db8::53");
    let expected = json!({
        "gateway": "10.0.0.2",
        "ipv6-gateway": "fe80::1",
        "ipv6s": "[2001:db8::5,2001:db8::6]",
        "netmask": "255.255.252.0",
        "network-interface-id": document["network"]["interfaces"]["macs"]["52:54:00:00:00:01"]["network-interface-id"],
        "primary-ip-address": "10.0.0.5",
        "private-ipv4s": r#"["10.0.0.5","10.0.1.5"]"#,
        "vpc-cidr-block": "10.0.0.0/22",
        "vpc-id": document["vpc-id"],
        "vpc-ipv6-cidr-blocks": "2001:db8::/64",
        "vswitch-cidr-block": "10.0.0.0/22",
        "vswitch-id": document["vswitch-id"],
        "vswitch-ipv6-cidr-block": "2001:db8::/64",
    });
    assert!(text(&ask(&DialectGuest::of(&record), &format!("{TREE}/vswitch-id"), &[])).starts_with("vsw-"));
    assert_eq!(document["network"]["interfaces"]["macs"]["52:54:00:00:00:01"], expected);
}

#[test]
fn the_record_decides_whether_tokens_exist_and_are_needed() {
    let paths =
        ["/latest", "/latest/meta-data", "/latest/meta-data/all", "/latest/user-data", "/latest/vendor-data"];
    for (mode, made, without) in [("off", 404, 200), ("optional", 200, 200), ("required", 200, 401)] {
        let mut record = full();
        record["serve"] = json!({ "imdsv2": mode, "hop_limit": 3 });
        let guest = DialectGuest::of(&record);
        let token = put(&guest);
        assert_eq!(token.status().0, made, "{mode}");
        for path in paths {
            assert_eq!(ask(&guest, path, &[]).status().0, without, "{path} under {mode}");
            assert_eq!(ask(&guest, path, &[(TOKEN, "bogus")]).status().0, 401, "{path} under {mode}");
            if made == 200 {
                assert_eq!(token.hop_limit(), Some(3));
                assert_eq!(
                    ask(&guest, path, &[(TOKEN, &text(&token))]).status().0,
                    200,
                    "{path} under {mode}"
                );
            }
        }
    }
}

#[test]
fn a_token_of_ec2_is_invalid_and_other_addresses_have_no_tree() {
    let guest = DialectGuest::of(&full());
    let aws = guest.ask(Method::Put, "/latest/api/token", &[("X-aws-ec2-metadata-token-ttl-seconds", "60")]);
    assert_eq!(ask(&guest, "/latest/user-data", &[(TOKEN, &text(&aws))]).status().0, 401);
    assert_eq!(guest.status("/latest/meta-data/all", &[]), 404);
    assert_eq!(guest.status("/latest/vendor-data", &[]), 404);
}

const ADDRESS: &str = "100.100.100.200";
const DIRECTORY: &str = "/latest/dynamic/instance-identity";

fn get(guest: &DialectGuest, path: &str, fields: &[(&str, &str)]) -> Response {
    guest.ask_at((ADDRESS, 80), Method::Get, path, fields)
}

/// Header fields, a query, and the status of the answer.
type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, u16);

/// Returns the bytes that are signed for a query.
fn signed(guest: &DialectGuest, orders: &Orders, query: &str) -> String {
    let target = format!("{DIRECTORY}/pkcs7{query}");
    let LiveOutcome::Park(parked) = guest.get_at(ADDRESS, &target, &[], None) else {
        panic!("{target} does not wait")
    };
    let order = ordered(orders);
    let SigningJob::Detached(document) = order.work() else { panic!("{:?}", order.work()) };
    sign(order, "SIGNED");
    match guest.get_at(ADDRESS, &target, &[], Some(&parked)) {
        LiveOutcome::Ready(answer) => {
            assert_eq!((answer.status().0, answer.hop_limit(), &*text(&answer)), (200, Some(1), "SIGNED"));
        }
        other => panic!("{target}: {other:?}"),
    }
    document
}

#[test]
fn the_signed_bytes_are_the_document_with_the_audience_as_its_last_member() {
    let (guest, orders) = issued(&full(), true);
    let document = text(&get(&guest, &format!("{DIRECTORY}/document"), &[]));
    assert_eq!(signed(&guest, &orders, ""), document);
    let expected =
        format!("{},\"audience\":\"https://a.example/b\"}}", document.strip_suffix('}').expect("an object"));
    assert_eq!(signed(&guest, &orders, "?audience=https://a.example/b"), expected);
    let quoted: Value = serde_json::from_str(&signed(&guest, &orders, "?audience=a%22,%22b")).expect("JSON");
    assert_eq!(quoted["audience"], json!("a\",\"b"), "no audience adds a member");
    assert_eq!(quoted.as_object().map(|members| members.contains_key("b")), Some(false));
    let fields: Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!(fields["serial-number"], full()["vm"]["uuid"]);
    let text = text(&get(&issued(&bare(), true).0, &format!("{DIRECTORY}/document"), &[]));
    assert!(!text.contains("\"mac\"") && text.contains("\"instance-id\""), "{text}");
}

#[test]
fn the_directory_exists_only_where_documents_are_signed() {
    for (signs, identity, served) in [
        (true, json!({}), true),
        (true, json!({"audiences": ["vault"]}), true),
        (true, json!({"audiences": []}), false),
        (false, json!({}), false),
    ] {
        let mut record = full();
        record["identity"] = identity;
        let (guest, _) = issued(&record, signs);
        assert_eq!(text(&get(&guest, "/latest", &[])).contains("dynamic"), served, "{record}");
        let status = get(&guest, &format!("{DIRECTORY}/document"), &[]).status().0;
        assert_eq!(status, if served { 200 } else { 404 }, "{record}");
    }
}

#[test]
fn a_signature_needs_the_token_an_allowed_audience_and_no_proxy() {
    let mut record = full();
    record["identity"] = json!({"audiences": ["vault"]});
    record["serve"] = json!({"imdsv2": "required"});
    let (guest, _) = issued(&record, true);
    let token = text(&guest.ask_at((ADDRESS, 80), Method::Put, "/latest/api/token", &[(TTL, "60")]));
    let held = [(TOKEN, &*token)];
    let proxied = [(TOKEN, &*token), ("X-Forwarded-For", "10.0.0.1")];
    let cases: [Case<'_>; 5] = [
        (&[], "", 401),
        (&proxied, "", 403),
        (&held, "?audience=other", 403),
        (&held, "?audience=", 400),
        (&held, "?audience=vault&audience=vault", 400),
    ];
    for (fields, query, status) in cases {
        match guest.get_at(ADDRESS, &format!("{DIRECTORY}/pkcs7{query}"), fields, None) {
            LiveOutcome::Ready(answer) => assert_eq!(answer.status().0, status, "{query} {fields:?}"),
            other => panic!("{query}: {other:?}"),
        }
    }
    let good = guest.get_at(ADDRESS, &format!("{DIRECTORY}/pkcs7?audience=vault"), &held, None);
    assert!(matches!(good, LiveOutcome::Park(_)), "{good:?}");
}
