use serde_json::{Value, json};

use super::super::super::guest::{DialectGuest, NOW, full, issued, parsed, text};
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

const PATH: &str = "/metadata/identity/oauth2/token?api-version=2018-02-01";
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
    let subject = format!("vm:{}", parsed(&record).vm.uuid);
    for more in ["", "&client_id=C-1"] {
        let (guest, orders) = issued(&record, false);
        let target = format!("{PATH}&resource=api%3A%2F%2Fvault{more}");
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
        assert_eq!(guest.got(&format!("{PATH}{query}"), fields).status().0, 400, "{query} {fields:?}");
    }
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
    let target = format!("{PATH}&resource=api://vault");
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
    let target = format!("{PATH}&resource=any");
    for (record, status) in [(&literal, 200), (&sourced, 503)] {
        let (with, without) = (issued(record, false).0, DialectGuest::of(record));
        let (with, without) = (with.got(&target, &HELD), without.got(&target, &HELD));
        assert_eq!((with.status().0, text(&with)), (status, text(&without)));
    }
    assert_eq!(DialectGuest::of(&tokenless()).got(&target, &HELD).status().0, 400, "no issuer, no token");
}
