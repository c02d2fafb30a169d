use serde_json::{Value, json};

use crate::dialect::tests::{DialectGuest, NOW, full, issued, parse, text};
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

const TOKEN: &str = "/metadata/identity/oauth2/token?api-version=2018-02-01";
const ATTESTED: &str = "/metadata/attested/document?api-version=2020-09-01";
const HELD: [(&str, &str); 1] = [("Metadata", "true")];

/// Returns the full record with a managed identity without a token.
fn tokenless() -> Value {
    let mut record = full();
    record["credentials"] = json!({"managed_identity": {"client_id": "c-1"}});
    record["identity"] = json!({"audiences": ["api://vault"]});
    record
}

#[test]
fn an_identity_without_a_token_gets_one_of_the_issuer() {
    let record = tokenless();
    let subject = format!("vm:{}", parse(&record).vm.uuid);
    for more in ["", "&client_id=C-1"] {
        let (guest, orders) = issued(&record, false);
        let target = format!("{TOKEN}&resource=api%3A%2F%2Fvault{more}");
        let (work, answer) = guest.served(&target, &HELD, &orders);
        let claims = json!({"appid": "c-1", "aud": "api://vault", "sub": subject});
        assert_eq!(work, SigningJob::Jwt(claims.as_object().expect("claims").clone()));
        assert_eq!((answer.status().0, answer.hop_limit()), (200, Some(1)));
        let document: Value = serde_json::from_str(&text(&answer)).expect("JSON");
        let expected = json!({
            "access_token": "SIGNED", "client_id": "c-1", "expires_in": "60",
            "expires_on": (NOW + 60).to_string(), "not_before": NOW.to_string(),
            "resource": "api://vault", "token_type": "Bearer",
        });
        assert_eq!(document, expected);
    }
}

#[test]
fn refusals_are_azures() {
    let (guest, orders) = issued(&tokenless(), false);
    for (query, fields) in [
        ("", &HELD[..]),
        ("&resource=", &HELD),
        ("&resource=a%20b", &HELD),
        ("&resource=other", &HELD),
        ("&resource=api://vault&client_id=other", &HELD),
        ("&resource=api://vault&object_id=o", &HELD),
        ("&resource=api://vault", &[]),
        ("&resource=api://vault", &[HELD[0], ("X-Forwarded-For", "10.0.0.1")]),
    ] {
        assert_eq!(guest.got(&format!("{TOKEN}{query}"), fields).status().0, 400, "{query} {fields:?}");
    }
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
    let target = format!("{TOKEN}&resource=api://vault");
    let LiveOutcome::Park(parked) = guest.get(&target, &HELD, None) else { panic!("not parked") };
    orders.lock().expect("sound").clear();
    let LiveOutcome::Ready(answer) = guest.get(&target, &HELD, Some(&parked)) else { panic!("not ready") };
    assert_eq!((answer.status().0, answer.field("Retry-After")), (503, Some("1")));
}

#[test]
fn a_token_of_the_record_is_served_as_without_an_issuer() {
    let mut sourced = tokenless();
    sourced["credentials"]["managed_identity"]["source"] = json!({"file": "token"});
    let mut literal = tokenless();
    literal["credentials"]["managed_identity"]["text"] = json!("own");
    literal["credentials"]["managed_identity"]["expires"] = json!("2099-12-31T23:59:59Z");
    let target = format!("{TOKEN}&resource=any");
    for (record, status) in [(&literal, 200), (&sourced, 503)] {
        let (with, without) = (issued(record, false).0, DialectGuest::of(record));
        let (with, without) = (with.got(&target, &HELD), without.got(&target, &HELD));
        assert_eq!((with.status().0, text(&with)), (status, text(&without)));
    }
    assert_eq!(DialectGuest::of(&tokenless()).got(&target, &HELD).status().0, 400, "no issuer, no token");
}

#[test]
fn a_statement_has_azures_members_and_the_guests_nonce() {
    let mut record = full();
    record["image"]["sku"] = json!("12-gen2");
    for (more, nonce) in [
        ("", None),
        ("&nonce=", None),
        ("&nonce=1234567890", Some("1234567890")),
        ("&NONCE=a-b_c", Some("a-b_c")),
    ] {
        let (guest, orders) = issued(&record, true);
        let (work, answer) = guest.served(&format!("{ATTESTED}{more}"), &HELD, &orders);
        let account = record["vm"]["project"]["account"].as_str().expect("text");
        let mut expected = json!({
            "licenseType": "",
            "plan": {"name": "", "product": "", "publisher": ""},
            "sku": "12-gen2",
            "subscriptionId": format!("00000000-0000-0000-0000-{account}"),
            "vmId": record["vm"]["uuid"],
        });
        if let Some(nonce) = nonce {
            expected["nonce"] = nonce.into();
        }
        let SigningJob::Attested(members) = work else { panic!("{work:?}") };
        assert_eq!(Value::from(members), expected, "{more}");
        assert_eq!((answer.status().0, answer.hop_limit()), (200, Some(1)));
        let document: Value = serde_json::from_str(&text(&answer)).expect("JSON");
        assert_eq!(document, json!({"encoding": "pkcs7", "signature": "SIGNED"}));
    }
}

#[test]
fn another_nonce_is_another_statement() {
    let (guest, orders) = issued(&full(), true);
    for nonce in ["1", "2"] {
        guest.served(&format!("{ATTESTED}&nonce={nonce}"), &HELD, &orders);
    }
    assert_eq!(guest.got(&format!("{ATTESTED}&nonce=1"), &HELD).status().0, 200);
    assert!(matches!(guest.get(ATTESTED, &HELD, None), LiveOutcome::Park(_)), "no nonce is another, too");
}

#[test]
fn bad_requests_are_refused_as_elsewhere_below_metadata() {
    let (guest, orders) = issued(&full(), true);
    let long = format!("{ATTESTED}&nonce={}", "1".repeat(33));
    let proxied = [HELD[0], ("X-Forwarded-For", "10.0.0.1")];
    for (target, fields) in [
        (ATTESTED, &[][..]),
        (ATTESTED, &[("Metadata", "false")]),
        (ATTESTED, &proxied),
        ("/metadata/attested/document", &HELD),
        ("/metadata/attested/document?api-version=latest", &HELD),
        (&long, &HELD),
        (&format!("{ATTESTED}&nonce=a%22b"), &HELD),
        (&format!("{ATTESTED}&nonce=1&nonce=2"), &HELD),
    ] {
        assert_eq!(guest.got(target, fields).status().0, 400, "{target} {fields:?}");
    }
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
}

#[test]
fn a_node_without_a_certificate_has_no_such_path() {
    for guest in [DialectGuest::of(&full()), issued(&full(), false).0] {
        assert_eq!(guest.got(ATTESTED, &HELD).status().0, 404);
    }
}
