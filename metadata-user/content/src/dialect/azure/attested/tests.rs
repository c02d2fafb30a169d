use serde_json::{Value, json};

use super::super::super::guest::{DialectGuest, full, issued, text};
use crate::identity::SigningJob;
use crate::store::LiveOutcome;

const PATH: &str = "/metadata/attested/document?api-version=2020-09-01";
const HELD: [(&str, &str); 1] = [("Metadata", "true")];

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
        let (work, answer) = guest.served(&format!("{PATH}{more}"), &HELD, &orders);
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
        guest.served(&format!("{PATH}&nonce={nonce}"), &HELD, &orders);
    }
    assert_eq!(guest.got(&format!("{PATH}&nonce=1"), &HELD).status().0, 200);
    assert!(matches!(guest.get(PATH, &HELD, None), LiveOutcome::Park(_)), "no nonce is another, too");
}

#[test]
fn bad_requests_are_refused_as_elsewhere_below_metadata() {
    let (guest, orders) = issued(&full(), true);
    let long = format!("{PATH}&nonce={}", "1".repeat(33));
    let proxied = [HELD[0], ("X-Forwarded-For", "10.0.0.1")];
    for (target, fields) in [
        (PATH, &[][..]),
        (PATH, &[("Metadata", "false")]),
        (PATH, &proxied),
        ("/metadata/attested/document", &HELD),
        ("/metadata/attested/document?api-version=latest", &HELD),
        (&long, &HELD),
        (&format!("{PATH}&nonce=a%22b"), &HELD),
        (&format!("{PATH}&nonce=1&nonce=2"), &HELD),
    ] {
        assert_eq!(guest.got(target, fields).status().0, 400, "{target} {fields:?}");
    }
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
}

#[test]
fn a_node_without_a_certificate_has_no_such_path() {
    for guest in [DialectGuest::of(&full()), issued(&full(), false).0] {
        assert_eq!(guest.got(PATH, &HELD).status().0, 404);
    }
}
