use std::sync::Arc;

use serde_json::{Value, json};

use crate::dialect::tests::{ask_with, full, parse, rendered};
use crate::http::{Method, Response};
use crate::mailbox::Mailbox;
use crate::sink::unattended;
use crate::store::{Interner, Responses, VmState};
use crate::token::Keyring;

const BASE: &str = "/MAAS/metadata/2012-03-01";

fn get(responses: &Responses, path: &str, fields: &[(&str, &str)]) -> Response {
    ask_with(responses, Method::Get, path, fields, b"")
}

fn text(answer: &Response) -> String {
    String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
}

/// The full record with credentials whose secret needs encoding.
fn signed() -> Value {
    let mut record = full();
    record["credentials"]["maas"] = json!({"consumer_key": "ck", "token_key": "tk", "token_secret": "s %&é"});
    record
}

/// `Authorization` in the form that cloud-init's library writes.
const GOOD: &str = "OAuth oauth_nonce=\"1\", oauth_timestamp=\"2\", oauth_version=\"1.0\", \
                    oauth_signature_method=\"PLAINTEXT\", oauth_consumer_key=\"ck\", oauth_token=\"tk\", \
                    oauth_signature=\"%26s%2520%2525%2526%25C3%25A9\"";

#[test]
fn every_version_has_all_documents_and_absent_values_are_empty() {
    let mut record = full();
    record["ssh_keys"] = json!([{"name": "a", "key": "ssh-a"}, {"name": "b", "key": "ssh-b"}]);
    let responses = rendered(&record);
    for (path, wanted) in [
        ("/MAAS/metadata", "2012-03-01\nlatest"),
        ("/MAAS/metadata/2012-03-01", "meta-data\nuser-data"),
        ("/MAAS/metadata/latest/meta-data/local-hostname", "web-1.example.internal"),
        ("/MAAS/metadata/2012-03-01/meta-data/public-keys", "ssh-a\nssh-b\n"),
        ("/MAAS/metadata/2012-03-01/user-data", "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"),
    ] {
        assert_eq!(text(&get(&responses, path, &[])), wanted, "{path}");
    }
    let vendor_data = text(&get(&responses, &format!("{BASE}/meta-data/vendor-data"), &[]));
    let vendor_data: Value = serde_yaml::from_str(&vendor_data).expect("YAML");
    assert_eq!(vendor_data, json!({"cloud-init": "#cloud-config\n{}\n"}));
    for field in ["user_data", "vendor_data", "ssh_keys"] {
        record.as_object_mut().expect("a mapping").remove(field);
    }
    let responses = rendered(&record);
    for path in ["meta-data/public-keys", "meta-data/vendor-data", "user-data"] {
        let answer = get(&responses, &format!("{BASE}/{path}"), &[]);
        assert_eq!((answer.status().0, text(&answer).as_str()), (200, ""), "{path}");
    }
    for path in ["/MAAS", "/MAAS/metadata/2012-03-02/user-data", "/MAAS/metadata/latest/meta-data/x"] {
        assert_eq!(get(&responses, path, &[]).status().0, 404, "{path}");
    }
}

#[test]
fn the_record_sets_the_path() {
    let mut record = full();
    record["serve"]["maas_path"] = json!("//my//m%41as/");
    assert_eq!(get(&rendered(&record), "/my/mAas/latest/meta-data/instance-id", &[]).status().0, 200);
    assert_eq!(get(&rendered(&record), &format!("{BASE}/user-data"), &[]).status().0, 404);
}

#[test]
fn requests_must_be_signed_with_the_records_credentials() {
    let responses = rendered(&signed());
    let path = format!("{BASE}/user-data");
    assert_eq!(get(&responses, &path, &[("authorization", GOOD), ("X-Forwarded-For", "a")]).status().0, 200);
    assert_eq!(get(&responses, &path, &[("Authorization", &GOOD.replace(", ", ","))]).status().0, 200);
    assert_eq!(
        get(&responses, &path, &[("Authorization", &GOOD.replacen("OAuth", "oauth", 1))]).status().0,
        200
    );
    for (found, other) in [
        ("\"ck\"", "\"cK\""),
        ("\"tk\"", "\"\""),
        ("%26s", "s"),
        ("%26s", "%26%26s"),
        ("%25A9", "%25A8"),
        ("PLAINTEXT", "HMAC-SHA1"),
        ("OAuth", "Basic"),
        ("oauth_token=", "oauth_tok="),
        ("oauth_version=\"1.0\"", "oauth_token=\"tk\""),
        ("oauth_nonce=\"1\"", "oauth_nonce=1"),
    ] {
        let header = GOOD.replacen(found, other, 1);
        let answer = get(&responses, &path, &[("Authorization", &header)]);
        assert_eq!(answer.status().0, 401, "{header}");
    }
    let answer = get(&responses, &path, &[]);
    assert_eq!((answer.status().0, answer.field("WWW-Authenticate")), (401, Some("OAuth")));
    assert_eq!(ask_with(&responses, Method::Post, BASE, &[], b"op=signal").status().0, 401);
    assert!(!format!("{responses:?}").contains("s %&"), "a secret is in the debug output");
}

#[test]
fn signals_are_accepted_and_forwarded() {
    let mut record = full();
    record["sinks"] = json!({"events": "file:/nowhere/events.jsonl"});
    let record = parse(&record);
    let outbox = unattended();
    let mailbox = Arc::new(Mailbox::new(record.vm.uuid.as_str(), &outbox));
    let vm = VmState::of(&record, Arc::new(Keyring::ephemeral()), mailbox);
    let responses = crate::dialect::render(&record, &mut Interner::new(), vm);
    let parts = b"--x\r\nContent-Disposition: form-data; name=\"op\"\r\n\r\nsignal\r\n--x--\r\n";
    let other = b"--x\r\nContent-Disposition: form-data; name=\"op\"\r\n\r\nnetboot_off\r\n--x--\r\n";
    for (path, body, wanted) in [
        (BASE, &b"op=signal&status=OK"[..], "OK"),
        (BASE, parts, "OK"),
        ("/MAAS/metadata/status/abc", b"{}", "OK"),
        (BASE, other, "Bad Request\n"),
        (BASE, b"", "Bad Request\n"),
        ("/MAAS/metadata/2012-03-01/user-data", b"op=signal", "Method Not Allowed\n"),
    ] {
        let answer = ask_with(&responses, Method::Post, path, &[], body);
        assert_eq!(text(&answer), wanted, "{path} {}", String::from_utf8_lossy(body));
    }
    assert_eq!(outbox.counts().waiting, 3);
    assert_eq!(get(&responses, "/MAAS/metadata/status/abc", &[]).field("Allow"), Some("POST"));
}
