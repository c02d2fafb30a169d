use serde_json::{Value, json};

use super::super::super::guest::{DialectGuest, full, issued, parsed, text};
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

const ACCOUNT: &str = "/computeMetadata/v1/instance/service-accounts/default";
const FLAVOUR: [(&str, &str); 1] = [("Metadata-Flavor", "Google")];

/// Returns the full record with a service account without a token.
fn tokenless() -> Value {
    let mut record = full();
    record["credentials"] = json!({"service_account": {"name": "web", "email": "web@p1.example"}});
    record["identity"] = json!({"audiences": ["https://a/b?c=d", "vault"]});
    record
}

fn claims(work: SigningJob) -> Value {
    let SigningJob::Jwt(claims) = work else { panic!("{work:?}") };
    claims.into()
}

#[test]
fn each_format_has_googles_claims() {
    let record = tokenless();
    let parsed = parsed(&record);
    let subject = format!("vm:{}", parsed.vm.uuid);
    let standard = json!({"aud": "https://a/b?c=d", "azp": subject, "sub": subject});
    let mut whole = standard.clone();
    whole["email"] = json!("web@p1.example");
    whole["email_verified"] = json!(true);
    whole["google"] = json!({"compute_engine": {
        "instance_id": parsed.numeric_id().to_string(),
        "instance_name": record["vm"]["name"],
        "project_id": record["vm"]["project"]["id"],
        "project_number": record["vm"]["project"]["number"],
        "zone": record["placement"]["zone"],
    }});
    for (more, expected) in [
        ("", &standard),
        ("&format=standard", &standard),
        ("&format=other", &standard),
        ("&format=standard&licenses=TRUE", &standard),
        ("&format=full", &whole),
        ("&format=FULL&licenses=TRUE", &whole),
    ] {
        let (guest, orders) = issued(&record, false);
        let target = format!("{ACCOUNT}/identity?audience=https%3A%2F%2Fa%2Fb%3Fc%3Dd{more}");
        let (work, answer) = guest.served(&target, &FLAVOUR, &orders);
        assert_eq!(claims(work), *expected, "{more}");
        assert_eq!((answer.status().0, answer.hop_limit(), &*text(&answer)), (200, Some(1), "SIGNED"));
        assert_eq!(answer.field("Metadata-Flavor"), Some("Google"));
    }
}

#[test]
fn a_format_has_its_own_token_and_an_account_only_the_email_of_its_record() {
    let mut record = tokenless();
    record["credentials"]["service_account"].as_object_mut().expect("a mapping").remove("email");
    let (guest, orders) = issued(&record, false);
    let target = |format: &str| format!("{ACCOUNT}/identity?audience=vault&format={format}");
    let (standard, _) = guest.served(&target("standard"), &FLAVOUR, &orders);
    let (whole, _) = guest.served(&target("full"), &FLAVOUR, &orders);
    assert!(claims(standard).get("google").is_none());
    let whole = claims(whole);
    assert!(whole.get("google").is_some() && whole.get("email").is_none(), "{whole}");
    assert_eq!(guest.got(&target("full"), &FLAVOUR).status().0, 200, "the second request needs no order");
    assert!(orders.lock().expect("sound").is_empty());
}

#[test]
fn the_account_lists_what_it_serves() {
    let (own, without) = (full(), tokenless());
    let mut absent = full();
    absent["credentials"] = json!({});
    let own_lists = "aliases\nemail\nidentity\nscopes\ntoken\n";
    for (record, issuer, listing, identity, token) in [
        (&own, false, Some(own_lists), 200, 200),
        (&own, true, Some(own_lists), 200, 200),
        (&without, false, Some("aliases\nemail\nscopes\n"), 404, 404),
        (&without, true, Some("aliases\nemail\nidentity\nscopes\n"), 403, 404),
        (&absent, true, None, 404, 404),
    ] {
        let guest = if issuer { issued(record, false).0 } else { DialectGuest::of(record) };
        let listed = guest.got(ACCOUNT, &FLAVOUR);
        assert_eq!((listed.status().0 == 200).then(|| text(&listed)).as_deref(), listing, "{record}");
        let refused = guest.got(&format!("{ACCOUNT}/identity?audience=refused"), &FLAVOUR);
        assert_eq!(refused.status().0, identity, "{record}");
        assert_eq!(guest.got(&format!("{ACCOUNT}/token"), &FLAVOUR).status().0, token, "{record}");
    }
    let (guest, _) = issued(&own, false);
    let answer = guest.got(&format!("{ACCOUNT}/identity?audience=any"), &FLAVOUR);
    let literal = own["credentials"]["service_account"]["token"]["text"].as_str();
    assert_eq!(Some(&*text(&answer)), literal, "the record's token stays");
}

#[test]
fn a_request_needs_the_flavour_and_one_good_audience() {
    let (guest, orders) = issued(&tokenless(), false);
    let proxied = [FLAVOUR[0], ("X-Forwarded-For", "10.0.0.1")];
    let long = format!("audience={}", "x".repeat(256));
    type Fields<'a> = &'a [(&'a str, &'a str)];
    let cases: [(&str, Fields<'_>, u16); 9] = [
        ("audience=vault", &[], 403),
        ("audience=vault", &[("Metadata-Flavor", "Microsoft")], 403),
        ("audience=vault", &proxied, 403),
        ("", &FLAVOUR, 400),
        ("audience=", &FLAVOUR, 400),
        ("audience=a%20b", &FLAVOUR, 400),
        (&long, &FLAVOUR, 400),
        ("audience=other", &FLAVOUR, 403),
        ("audience=vault&wait_for_change=true", &[], 403),
    ];
    for (query, fields, status) in cases {
        let answer = guest.got(&format!("{ACCOUNT}/identity?{query}"), fields);
        assert_eq!(answer.status().0, status, "{query} {fields:?}");
        assert_eq!(answer.field("Metadata-Flavor"), Some("Google"), "{query} {fields:?}");
    }
    let other = ACCOUNT.replace("default", "other");
    assert_eq!(guest.got(&format!("{other}/identity?audience=vault"), &FLAVOUR).status().0, 404);
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
}

#[test]
fn a_lost_order_gets_503_with_the_flavour() {
    let (guest, orders) = issued(&tokenless(), false);
    let target = format!("{ACCOUNT}/identity?audience=vault");
    let LiveOutcome::Park(parked) = guest.get(&target, &FLAVOUR, None) else { panic!("not parked") };
    orders.lock().expect("sound").clear();
    let LiveOutcome::Ready(answer) = guest.get(&target, &FLAVOUR, Some(&parked)) else { panic!("not ready") };
    assert_eq!((answer.status().0, answer.field("Retry-After")), (503, Some("1")));
    assert_eq!(answer.field("Metadata-Flavor"), Some("Google"));
}
