//! Records in requests and in answers.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, header};
use serde_json::{Map, Value};

use super::super::listen::Peer;
use super::answer::{bad_request, forbidden, media_type, not_kept, record as refused, too_large};
use super::blocking;
use metadata_content::parser;
use metadata_content::record::{Credential, Record, RecordError, RecordLimits};
use metadata_control::instances::ApiProblem;

/// Limit on a record in a request, in bytes: three payloads and the files at their limits, in base64.
pub(super) const BODY_MAX: usize = 8 << 20;

/// File names of a record in errors, by format.
const NAMES: [&str; 2] = ["record.json", "record.yaml"];
/// Fields of a record that answers show. Other fields are withheld, so that a new field is never shown by mistake.
const SHOWN: [&str; 13] = [
    "schema",
    "generation",
    "vm",
    "hostname",
    "placement",
    "instance_type",
    "arch",
    "image",
    "ssh_keys",
    "network",
    "labels",
    "disks",
    "serve",
];

/// A valid record, and its complete JSON.
#[derive(Debug)]
pub(super) struct ValidRecord {
    pub(super) record: Arc<Record>,
    pub(super) json: String,
}

/// Reads the record in the body of a request.
pub(super) async fn read(
    head: &HeaderMap,
    body: Body,
    limits: &RecordLimits,
    peer: Peer,
) -> Result<ValidRecord, ApiProblem> {
    let is_json = is_json(head)?;
    let bytes = to_bytes(body, BODY_MAX).await.map_err(|error| {
        let error: &dyn std::error::Error = &error;
        match error.source().is_some_and(|source| source.is::<http_body_util::LengthLimitError>()) {
            true => too_large(BODY_MAX),
            false => bad_request("a complete record", "a truncated one"),
        }
    })?;
    let within = RecordLimits { record_bytes: BODY_MAX, ..limits.clone() };
    // Large YAML takes long to parse.
    blocking(move || parse(&bytes, is_json, &within, peer)).await?
}

/// Whether the body is JSON; `None` if the request does not state a media type.
fn is_json(head: &HeaderMap) -> Result<Option<bool>, ApiProblem> {
    let Some(value) = head.get(header::CONTENT_TYPE) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    match text.to_ascii_lowercase().as_str() {
        "application/json" => Ok(Some(true)),
        "application/yaml" | "application/x-yaml" | "text/yaml" | "text/x-yaml" => Ok(Some(false)),
        _ => Err(media_type()),
    }
}

fn parse(
    bytes: &[u8],
    is_json: Option<bool>,
    limits: &RecordLimits,
    peer: Peer,
) -> Result<ValidRecord, ApiProblem> {
    let text = std::str::from_utf8(bytes).map_err(|_| bad_request("text in UTF-8", "other bytes"))?;
    let json = is_json.unwrap_or_else(|| text.trim_start().starts_with('{'));
    let (record, _) =
        Record::parse_within(limits, NAMES[usize::from(!json)], text).map_err(|error| match &error {
            RecordError::Unreadable { place, .. } if place.field.is_empty() && !is_mapping(json, text) => {
                bad_request("a record (vmrecord/1)", &error.to_string())
            }
            _ => refused(error.to_string()),
        })?;
    let payloads =
        record.payloads().into_iter().any(|(_, payload)| payload.is_some_and(|p| p.source().is_some()));
    let credentials =
        Credential::ALL.into_iter().any(|credential| record.credentials.source(credential).is_some());
    if payloads || credentials || record.signing.is_some() {
        return Err(refused(
            "expected a record without `source`, found one: the agent opens no files for clients that register VMs; \
             `xdp-imds register` replaces each `source` with the content of its file"
                .into(),
        ));
    }
    if record.sinks != Default::default() && !peer.is_owner() {
        return Err(forbidden(
            "only root and the agent's own user may name `sinks`: the agent writes to them",
        ));
    }
    let json = record.to_json().map_err(|error| not_kept(&error.into()))?;
    Ok(ValidRecord { record: record.into(), json })
}

/// True if the text is a mapping, though not a valid record.
fn is_mapping(json: bool, text: &str) -> bool {
    match json {
        true => parser::json::<Map<String, Value>>(text).is_ok(),
        false => parser::yaml::<Map<String, Value>>(text).is_ok(),
    }
}

/// The shown fields of a record, and the names of the withheld ones that it has.
pub(super) fn shown(record: &Record) -> (Value, Vec<String>) {
    let Ok(Value::Object(all)) = serde_json::to_value(record) else {
        return (Value::Object(Map::new()), Vec::new());
    };
    let (mut shown, mut withheld) = (Map::new(), Vec::new());
    for (field, value) in all {
        let is_there = match &value {
            Value::Null => false,
            Value::Array(values) => !values.is_empty(),
            Value::Object(fields) => fields.values().any(|value| !value.is_null()),
            _ => true,
        };
        match SHOWN.contains(&field.as_str()) {
            true => drop(shown.insert(field, value)),
            false if is_there => withheld.push(field),
            false => {}
        }
    }
    (Value::Object(shown), withheld)
}

#[cfg(test)]
mod tests {
    use super::super::super::listen::Peer;
    use super::{BODY_MAX, is_json, parse, read};
    use axum::body::Body;
    use axum::http::{HeaderMap, HeaderValue, header};
    use metadata_content::record::{Record, RecordLimits};
    use serde_json::{Value, json};

    const FULL: &str = include_str!("../../../../../tests/vectors/record.yaml");
    const NOBODY: Peer = Peer::Process { uid: 65_534, gid: 65_534, pid: None };
    const ROOT: Peer = Peer::Process { uid: 0, gid: 0, pid: None };

    fn full() -> Value {
        let mut record: Value = serde_yaml::from_str(FULL).expect("YAML");
        let fields = record.as_object_mut().expect("a mapping");
        for field in ["credentials", "signing", "sinks"] {
            fields.remove(field);
        }
        fields.insert("user_data".into(), json!({"text": "#cloud-config\n"}));
        fields.remove("vendor_data");
        fields.remove("vendor_data2");
        record
    }

    fn status(record: &Value, peer: Peer) -> Result<(), (u16, String)> {
        let parsed = parse(record.to_string().as_bytes(), Some(true), &RecordLimits::DEFAULT, peer);
        parsed.map(drop).map_err(|problem| (problem.status, problem.detail))
    }

    #[test]
    fn a_record_is_shown_without_its_secrets() {
        let mut record = full();
        let secrets = ["Pass-0", "Pass-1", "Pass-2", "Pass-3", "Pass-4", "UGFzcy01"];
        record["admin"] = json!({"user": "root", "password": secrets[0]});
        record["user_data"] = json!({"text": secrets[1]});
        record["metadata"] = json!({"startup": secrets[2]});
        record["credentials"] = json!({
            "maas": {"consumer_key": "c", "token_key": "t", "token_secret": secrets[3]},
            "service_account": {"name": "web", "token": {"text": secrets[4], "expires": "2030-01-01T00:00:00Z"}},
        });
        record["random_seed"] = json!({"base64": secrets[5]});
        let (parsed, _) = Record::parse("full.json", &record.to_string()).expect("a record");
        let (shown, withheld) = super::shown(&parsed);
        let text = shown.to_string();
        assert!(secrets.iter().all(|secret| !text.contains(secret)), "{text}");
        assert_eq!(shown["vm"]["uuid"].as_str(), Some(parsed.vm.uuid.as_str()));
        assert!(shown["network"]["nics"].is_array() && shown["ssh_keys"].is_array(), "{text}");
        for field in ["admin", "credentials", "metadata", "random_seed", "user_data"] {
            assert!(withheld.iter().any(|name| name == field), "{field}: {withheld:?}");
        }
        assert!(!withheld.iter().any(|field| field == "sinks"), "an empty one is not there: {withheld:?}");
        let again = status(&shown, ROOT);
        assert!(again.is_ok(), "what is shown is a record, though not the whole: {again:?}");
    }

    #[test]
    fn an_unusable_record_is_refused_with_the_reason() {
        assert_eq!(status(&full(), NOBODY), Ok(()));
        type Case = (&'static str, fn(&mut Value), u16, &'static str);
        let cases: [Case; 6] = [
            ("a MAC", |r| r["network"]["nics"][0]["mac"] = "x".into(), 422, "network.nics[0].mac"),
            ("a field", |r| r["colour"] = "red".into(), 422, "colour"),
            ("a payload's source", |r| r["user_data"] = json!({"source": {"file": "x"}}), 422, "source"),
            ("a key's source", |r| r["signing"] = json!({"source": {"file": "x"}}), 422, "source"),
            (
                "a credential's source",
                |r| r["credentials"] = json!({"iam": {"role": "r", "source": {"file": "x"}}}),
                422,
                "source",
            ),
            ("a sink", |r| r["sinks"] = json!({"ready": "file:/etc/passwd"}), 403, "sinks"),
        ];
        for (name, change, expected, said) in cases {
            let mut record = full();
            change(&mut record);
            let (found, detail) = status(&record, NOBODY).expect_err(name);
            assert_eq!(found, expected, "{name}: {detail}");
            assert!(detail.contains(said), "{name}: {detail}");
        }
        let mut record = full();
        record["sinks"] = json!({"ready": "file:/var/log/ready"});
        assert_eq!(status(&record, ROOT), Ok(()), "root can write anywhere");
        for bytes in [&b"{"[..], b"[]", b"\xff"] {
            let problem = parse(bytes, None, &RecordLimits::DEFAULT, ROOT).expect_err("no record");
            assert_eq!(problem.status, 400, "{bytes:?}: {}", problem.detail);
        }
    }

    #[test]
    fn only_json_and_yaml_are_accepted() {
        for (value, expected) in [
            ("application/json", Ok(Some(true))),
            ("application/json; charset=utf-8", Ok(Some(true))),
            ("Application/YAML", Ok(Some(false))),
            ("application/x-yaml", Ok(Some(false))),
            ("application/x-www-form-urlencoded", Err(415)),
            ("", Err(415)),
        ] {
            let head = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(value))]);
            assert_eq!(is_json(&head).map_err(|problem| problem.status), expected, "{value}");
        }
        assert_eq!(is_json(&HeaderMap::new()).map_err(|problem| problem.status), Ok(None));
        // Without a media type the format is guessed.
        let json = full().to_string();
        let yaml = serde_yaml::to_string(&full()).expect("YAML");
        for text in [json, yaml] {
            assert!(parse(text.as_bytes(), None, &RecordLimits::DEFAULT, ROOT).is_ok(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_record_beyond_the_limit_is_refused() {
        let record = full().to_string();
        for (bytes, expected) in [(BODY_MAX, Ok(())), (BODY_MAX + 1, Err(413))] {
            let body = Body::from(format!("{record}{}", " ".repeat(bytes - record.len())));
            let read = read(&HeaderMap::new(), body, &RecordLimits::DEFAULT, ROOT).await;
            assert_eq!(read.map(drop).map_err(|problem| problem.status), expected, "{bytes}");
        }
    }
}
