//! Laws of identity tokens: no value of a record changes the form of a subject, no set of keys that is published has a
//! private member, and the signer's packets are read as they are written.
//!
//! The fuzz target and the test that replays its corpus share this file. An input is text: a line with a template of a
//! subject, a line with a VM's name, a line with its namespace, then JSON.
#![cfg_attr(not(test), no_main)]

use metadata_content::identity::Nonce;
use metadata_content::record::Record;
use metadata_content::record::identity::{AUDIENCE_BYTES, Audience};
use metadata_signer::jwt::JoinedKeySet;
use metadata_signer::wire::{Setup, SignRequest, SignerReply, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Members of a key that are private (RFC 7518 section 6).
const PRIVATE: [&str; 8] = ["d", "p", "q", "dp", "dq", "qi", "oth", "k"];

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut lines = text.splitn(4, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let (template, name, namespace, rest) = (line(), line(), line(), line());
    keeps_its_segments(template, name, namespace);
    is_bounded(name);
    if let Ok(set) = serde_json::from_str(rest) {
        publishes_nothing_private(&set);
    }
    is_read_as_written::<Setup>(rest);
    is_read_as_written::<SignRequest>(rest);
    is_read_as_written::<SignerReply>(rest);
}

/// A subject has the segments of its template, whatever the values are.
fn keeps_its_segments(template: &str, name: &str, namespace: &str) {
    let project = json!({"id": "p1", "number": 1, "account": "000000000000"});
    let record = json!({
        "schema": "vmrecord/1", "generation": 1,
        "vm": {"uuid": UUID, "name": name, "namespace": namespace, "project": project},
        "hostname": {"short": "web-1", "domain": "example.internal"},
        "placement": {"region": "local", "zone": "local-a", "fault_domain": "0"},
        "identity": {"subject": template},
    });
    let parsed = Record::parse("record.json", &record.to_string());
    let is_plain =
        |text: &str| (1..20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_lowercase());
    if [template, name, namespace].into_iter().all(is_plain) {
        assert!(parsed.is_ok(), "{parsed:?}");
    }
    let Ok((record, _)) = parsed else { return };
    let subject =
        record.identity.as_ref().and_then(|identity| identity.subject.as_ref()).expect("it was given");
    assert_eq!(subject.to_string(), template, "a template is read as it is written");
    let Ok(filled) = subject.fill(&record) else { return };
    assert_eq!(filled.matches('/').count(), template.matches('/').count(), "`{filled}` of `{template}`");
    for segment in filled.split('/') {
        assert!(!matches!(segment, "" | "." | ".."), "`{filled}` of `{template}`");
    }
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._~:/-%".contains(&byte);
    assert!(filled.bytes().all(is_good), "`{filled}` of `{template}`");
}

/// What a guest may write into a token is short and visible.
fn is_bounded(text: &str) {
    if let Some(audience) = Audience::parse(text) {
        assert!(audience.as_str() == text && (1..=AUDIENCE_BYTES).contains(&text.len()));
        assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
    }
    if let Some(nonce) = Nonce::parse(text) {
        assert!(nonce.as_str() == text && (1..=Nonce::BYTES).contains(&text.len()));
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)), "{text}");
    }
}

fn publishes_nothing_private(set: &Value) {
    let mut joined = JoinedKeySet::default();
    let added = joined.add(set);
    let published = joined.into_set();
    let keys = published["keys"].as_array().expect("a list");
    for key in keys {
        assert!(PRIVATE.iter().all(|member| key.get(*member).is_none()), "{key}");
    }
    assert!(keys.is_sorted_by_key(|key| key["kid"].as_str().map(str::to_owned)), "{published}");
    let mut again = JoinedKeySet::default();
    again.add(&published).expect("what is published can be joined");
    assert_eq!(again.into_set(), published);
    if let (Err(error), Some(keys)) = (added, set["keys"].as_array()) {
        let text = error.to_string();
        for value in keys.iter().flat_map(|key| PRIVATE.iter().filter_map(|member| key[*member].as_str())) {
            assert!(value.len() < 8 || !text.contains(value), "the error repeats a private member");
        }
    }
}

fn is_read_as_written<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(text: &str) {
    let Ok(packet) = decode::<T>(text.as_bytes()) else { return };
    let written = encode(&packet).expect("a packet that was read fits");
    assert_eq!(decode::<T>(&written).expect("it is read again"), packet);
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
