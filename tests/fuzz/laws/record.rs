//! What holds for every text an operator may hand in as a record.
//!
//! Shared by the fuzz target and the test that replays its corpus. An input is read as YAML and as JSON.

use metadata_content::dialect;
use metadata_content::http::Response;
use metadata_content::record::Record;
use metadata_content::store::{Interner, Vm};
use serde_json::Value;
use support::question::{Insider, quoted};

/// Where secrets are in a record: everything below these that is text.
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
/// What messages of ours give as an example: no secret, whatever a text says.
const EXAMPLES: [&str; 1] = ["7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"];
/// How much of a secret is looked for, in characters: less may be a coincidence.
const TELLING: usize = 16;

/// Asserts every law on one input.
///
/// # Panics
/// When one is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let secrets = secrets(text);
    for source in ["record.yaml", "record.json"] {
        match Record::parse(source, text) {
            Err(error) => quiet(&secrets, &format!("{error} {error:?}")),
            Ok((record, warnings)) => {
                warnings.iter().for_each(|warning| quiet(&secrets, &format!("{warning} {warning:?}")));
                quiet(&secrets, &format!("{record:?}"));
                served(&record);
            }
        }
    }
}

/// The beginnings of the text's secrets, of those that are nowhere else in it.
fn secrets(text: &str) -> Vec<String> {
    // JSON is YAML, but for escapes no secret here has to have.
    let Ok(value) = serde_yaml::from_str::<Value>(text) else { return Vec::new() };
    let mut all = Vec::new();
    SECRETS.iter().filter_map(|way| value.pointer(way)).for_each(|value| strings(value, &mut all));
    let told: Vec<_> =
        all.into_iter().map(|secret| secret.chars().take(TELLING).collect::<String>()).collect();
    let once = |secret: &String| text.matches(secret.as_str()).count() == 1;
    let example = |secret: &String| EXAMPLES.iter().any(|example| example.contains(secret.as_str()));
    told.into_iter()
        .filter(|secret| secret.chars().count() == TELLING && once(secret) && !example(secret))
        .collect()
}

/// All text in a value, but for the names of files.
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

fn quiet(secrets: &[String], said: &str) {
    let told = secrets.iter().find(|secret| said.contains(secret.as_str()));
    assert_eq!(told, None, "a secret is in {said}");
}

/// Renders the record and asks every route.
fn served(record: &Record) {
    let vm = Vm::alone(record.vm.uuid.as_str());
    let responses = dialect::render(record, &mut Interner::new(), vm);
    let insider = Insider::of(&responses);
    for (host, path, route) in responses.routes() {
        let below = if route.takes_below() { &["", "/x", "/0?recursive=true"][..] } else { &[""] };
        for rest in below {
            let target = format!("{}{rest}", quoted(path));
            let answer = insider.get(host, &target);
            let good = answer.status().0 < 500 || excused(record, &target, &answer);
            assert!(good, "{target} is {:?}", answer.status());
        }
    }
}

/// What is still to be read, has no source or has expired may be a server's error.
fn excused(record: &Record, target: &str, answer: &Response) -> bool {
    let payloads = record.payloads();
    let unread = payloads.iter().any(|(_, payload)| payload.is_some_and(|p| p.source().is_some()));
    let credentials = target.contains("service-accounts") || target.contains("security-credentials");
    match answer.status().0 {
        500 => answer.body().to_bytes().starts_with(br#"{"error":"token_unavailable""#),
        503 => (unread || credentials) && answer.field("Retry-After").is_some(),
        _ => false,
    }
}
