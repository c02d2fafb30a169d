//! Laws of the record parser, which hold for every text an operator may submit.
//!
//! The fuzz target and the test that replays its corpus share this file. Each input is parsed as YAML and as JSON.
#![cfg_attr(not(test), no_main)]

use metadata_content::dialect;
use metadata_content::http::Response;
use metadata_content::record::Record;
use metadata_content::store::{Interner, VmState};
use serde_json::Value;
use support::question::{Insider, quoted};

/// Paths of secrets in a record; every text below them is secret.
const SECRETS: [&str; 9] = [
    "/user_data",
    "/vendor_data",
    "/vendor_data2",
    "/admin/password",
    "/random_seed",
    "/credentials/iam/secret_access_key",
    "/credentials/iam/session_token",
    "/credentials/service_account/token/text",
    "/credentials/maas/token_secret",
];
/// Values that our messages give as examples; they are no secrets.
const EXAMPLES: [&str; 1] = ["7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"];
/// Leading characters of a secret to search for; a shorter match may be a coincidence.
const SECRET_PREFIX: usize = 16;

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let secrets = secrets(text);
    for source in ["record.yaml", "record.json"] {
        match Record::parse(source, text) {
            Err(error) => assert_no_secret(&secrets, &format!("{error} {error:?}")),
            Ok((record, warnings)) => {
                warnings
                    .iter()
                    .for_each(|warning| assert_no_secret(&secrets, &format!("{warning} {warning:?}")));
                assert_no_secret(&secrets, &format!("{record:?}"));
                assert_served(&record);
            }
        }
    }
}

/// The first characters of each secret that occurs only once in the text.
fn secrets(text: &str) -> Vec<String> {
    // JSON is YAML except for some escapes, which no secret here needs.
    let Ok(value) = serde_yaml::from_str::<Value>(text) else { return Vec::new() };
    let mut all = Vec::new();
    SECRETS.iter().filter_map(|way| value.pointer(way)).for_each(|value| strings(value, &mut all));
    let prefixes: Vec<_> =
        all.into_iter().map(|secret| secret.chars().take(SECRET_PREFIX).collect::<String>()).collect();
    let once = |secret: &String| text.matches(secret.as_str()).count() == 1;
    let example = |secret: &String| EXAMPLES.iter().any(|example| example.contains(secret.as_str()));
    prefixes
        .into_iter()
        .filter(|secret| secret.chars().count() == SECRET_PREFIX && once(secret) && !example(secret))
        .collect()
}

/// Collects all text in a value except the names of files.
fn strings(value: &Value, all: &mut Vec<String>) {
    match value {
        Value::String(text) => all.push(text.clone()),
        Value::Array(members) => members.iter().for_each(|member| strings(member, all)),
        Value::Object(members) => {
            let members = members.iter().filter(|(name, _)| *name != "source");
            members.for_each(|(_, member)| strings(member, all));
        }
        _ => {}
    }
}

fn assert_no_secret(secrets: &[String], message: &str) {
    let found = secrets.iter().find(|secret| message.contains(secret.as_str()));
    assert_eq!(found, None, "a secret is in {message}");
}

/// Renders the record and requests every route.
fn assert_served(record: &Record) {
    let vm = VmState::alone(record.vm.uuid.as_str());
    let responses = dialect::render(record, &mut Interner::new(), vm);
    let insider = Insider::of(&responses);
    for (host, path, route) in responses.routes() {
        let below = if route.takes_below() { &["", "/x", "/0?recursive=true"][..] } else { &[""] };
        for rest in below {
            let target = format!("{}{rest}", quoted(path));
            let answer = insider.get(host, &target);
            let good = answer.status().0 < 500 || may_fail(record, &target, &answer);
            assert!(good, "{target} is {:?}", answer.status());
        }
    }
}

/// A payload that is not read yet, or credentials without a source or expired, may cause a server error.
fn may_fail(record: &Record, target: &str, answer: &Response) -> bool {
    let payloads = record.payloads();
    let unread = payloads.iter().any(|(_, payload)| payload.is_some_and(|p| p.source().is_some()));
    let credentials = target.contains("service-accounts") || target.contains("security-credentials");
    match answer.status().0 {
        500 => answer.body().to_bytes().starts_with(br#"{"error":"token_unavailable""#),
        503 => (unread || credentials) && answer.field("Retry-After").is_some(),
        _ => false,
    }
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
