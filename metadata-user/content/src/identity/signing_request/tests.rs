use std::sync::Arc;

use serde_json::{Map, json};

use super::{CloudClaims, Nonce, SigningRequest};
use crate::record::identity::Audience;

fn token(audience: &str, form: Option<&'static str>) -> SigningRequest {
    let form = form.map(|name| Arc::new(CloudClaims { name, claims: Map::new() }));
    SigningRequest::Token { audience: Audience::parse(audience).expect("an audience"), form }
}

fn attested(nonce: Option<&str>) -> SigningRequest {
    SigningRequest::Attested { statement: Arc::default(), nonce: nonce.and_then(Nonce::parse) }
}

#[test]
fn one_answer_serves_only_what_is_the_same() {
    let all = [
        token("a", None),
        token("b", None),
        token("a", Some("google")),
        token("a", Some("google_full")),
        SigningRequest::Signature("{}".into()),
        SigningRequest::Envelope("{}".into()),
        SigningRequest::Detached { document: "{}".into(), audience: None },
        attested(None),
        attested(Some("1")),
        attested(Some("2")),
    ];
    for (n, one) in all.iter().enumerate() {
        for (m, other) in all.iter().enumerate() {
            assert_eq!(one.is_same(other), n == m, "{n} {m}");
        }
        assert_eq!(one.audience().is_some(), n < 4, "{n}");
    }
}

#[test]
fn a_nonce_is_short_and_plain() {
    let longest = "0".repeat(Nonce::BYTES);
    for good in ["1234567890", "a-B_9", &longest] {
        assert_eq!(Nonce::parse(good).expect(good).as_str(), good);
    }
    for bad in ["", " ", "a b", "\"", "ä", "a/b", &format!("{longest}0")] {
        assert_eq!(Nonce::parse(bad), None, "{bad}");
    }
}

#[test]
fn debug_output_shows_no_document() {
    let statement = Arc::new(json!({"vmId": "CANARY"}).as_object().expect("an object").clone());
    for wanted in [
        SigningRequest::Signature("{\"CANARY\":1}".into()),
        SigningRequest::Attested { statement, nonce: Nonce::parse("CANARY") },
    ] {
        assert!(!format!("{wanted:?}").contains("CANARY"));
    }
}
