use serde_json::{Value, json};

use super::super::super::guest::{DialectGuest, full, issued, sign, text};
use super::super::{TOKEN, TTL};
use crate::http::Method;
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

const DIRECTORY: &str = "/latest/dynamic/instance-identity";
const NAMES: [&str; 3] = ["pkcs7", "rsa2048", "signature"];

fn serving(serve: Value, identity: Value) -> Value {
    let mut record = full();
    (record["serve"], record["identity"]) = (serve, identity);
    record
}

#[test]
fn the_signed_bytes_are_those_of_the_document() {
    for name in NAMES {
        let (guest, orders) = issued(&full(), true);
        let document = guest.text(&format!("{DIRECTORY}/document"));
        let (work, answer) = guest.served(&format!("{DIRECTORY}/{name}"), &[], &orders);
        match (name, work) {
            ("signature", SigningJob::Signature(signed))
            | ("pkcs7" | "rsa2048", SigningJob::Envelope(signed)) => {
                assert_eq!(signed, document, "{name}");
            }
            (_, other) => panic!("{name}: {other:?}"),
        }
        assert_eq!((answer.status().0, answer.hop_limit(), &*text(&answer)), (200, Some(1), "SIGNED"));
        assert_eq!(answer.field("Content-Type"), Some("text/plain; charset=utf-8"));
    }
}

#[test]
fn a_crawler_needs_two_signatures() {
    let (guest, orders) = issued(&full(), true);
    assert_eq!(guest.text(DIRECTORY), "document\npkcs7\nrsa2048\nsignature");
    let mut parked = Vec::new();
    for name in NAMES {
        let target = format!("{DIRECTORY}/{name}");
        let LiveOutcome::Park(wait) = guest.get(&target, &[], None) else { panic!("{name} is not parked") };
        parked.push((target, wait));
    }
    let orders: Vec<_> = orders.lock().expect("sound").drain(..).collect();
    assert_eq!(orders.len(), 2, "`pkcs7` and `rsa2048` are one");
    orders.into_iter().for_each(|order| sign(order, "SIGNED"));
    for (target, wait) in parked {
        assert!(matches!(guest.get(&target, &[], Some(&wait)), LiveOutcome::Ready(_)), "{target}");
    }
}

#[test]
fn names_are_listed_only_where_they_are_served() {
    let all = json!({"dialects": ["ec2", "openstack"]});
    let cases = [
        (true, true, all.clone(), json!({}), true),
        (true, true, all.clone(), json!({"audiences": ["vault"]}), true),
        (true, true, all.clone(), json!({"audiences": []}), false),
        (true, true, json!({"dialects": ["openstack"]}), json!({}), false),
        (true, false, all.clone(), json!({}), false),
        (false, false, all, json!({}), false),
    ];
    for (issuer, certificate, serve, identity, serves) in cases {
        let record = serving(serve.clone(), identity.clone());
        let guest = if issuer { issued(&record, certificate).0 } else { DialectGuest::of(&record) };
        let listing = if serves { "document\npkcs7\nrsa2048\nsignature" } else { "document" };
        assert_eq!(guest.text(DIRECTORY), listing, "{issuer} {certificate} {serve} {identity}");
        for name in NAMES.iter().filter(|_| !serves) {
            assert_eq!(guest.status(&format!("{DIRECTORY}/{name}"), &[]), 404, "{name} {serve} {identity}");
        }
    }
}

#[test]
fn the_guards_are_those_of_the_tree_and_no_proxy() {
    for (imdsv2, without, wrong, with) in [
        ("off", None, Some(401), Some(401)),
        ("optional", None, Some(401), None),
        ("required", Some(401), Some(401), None),
    ] {
        let (guest, orders) = issued(&serving(json!({"imdsv2": imdsv2}), json!({})), true);
        let token = text(&guest.ask(Method::Put, "/latest/api/token", &[(TTL, "60")]));
        for name in NAMES {
            let target = format!("{DIRECTORY}/{name}");
            let status = |fields: &[(&str, &str)]| match guest.get(&target, fields, None) {
                LiveOutcome::Ready(answer) => Some(answer.status().0),
                _ => None,
            };
            assert_eq!(status(&[]), without, "{imdsv2} {name}");
            assert_eq!(status(&[(TOKEN, "wrong")]), wrong, "{imdsv2} {name}");
            if with.is_none() {
                assert_eq!(status(&[(TOKEN, &token)]), None, "{imdsv2} {name}");
                let proxied = [(TOKEN, &*token), ("X-Forwarded-For", "10.0.0.1")];
                assert_eq!(status(&proxied), Some(403), "{imdsv2} {name}");
            }
        }
        orders.lock().expect("sound").clear();
    }
}

#[test]
fn a_lost_order_is_to_be_asked_for_again() {
    let (guest, orders) = issued(&full(), true);
    let target = format!("{DIRECTORY}/signature");
    let LiveOutcome::Park(parked) = guest.get(&target, &[], None) else { panic!("not parked") };
    orders.lock().expect("sound").clear();
    let LiveOutcome::Ready(answer) = guest.get(&target, &[], Some(&parked)) else { panic!("not ready") };
    assert_eq!((answer.status().0, answer.field("Retry-After")), (503, Some("1")));
}
