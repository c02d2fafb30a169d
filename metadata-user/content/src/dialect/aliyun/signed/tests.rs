use serde_json::{Value, json};

use super::super::super::guest::{DialectGuest, Orders, bare, full, issued, ordered, sign, text};
use super::super::{TOKEN, TTL};
use crate::http::{Method, Response};
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

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
