//! Records in requests and in answers.

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use metadata_content::parser;
use metadata_content::record::event::EventRefused;
use metadata_content::record::{Credential, Record, RecordError, RecordLimits};
use metadata_content::source::RecordSource;
use metadata_control::instances::{ApiProblem, Instance};
use metadata_feed::registry::RecordId;
use metadata_feed::state::save_queue::UnsavedFiles;
use serde::Serialize;
use serde_json::{Map, Value};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::super::listen::Peer;
use super::super::{ControlLoopBusy, JSON};
use super::{EVENT_WAITS, WAITS, blocking};
use crate::agent::node::{RegistrationConflict, name_of};

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
        if error.source().is_some_and(|source| source.is::<http_body_util::LengthLimitError>()) {
            too_large(BODY_MAX)
        } else {
            bad_request("a complete record", "a truncated one")
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
            _ => invalid_record(error.to_string()),
        })?;
    let payloads =
        record.payloads().into_iter().any(|(_, payload)| payload.is_some_and(|p| p.source().is_some()));
    let credentials =
        Credential::ALL.into_iter().any(|credential| record.credentials.source(credential).is_some());
    if payloads || credentials || record.signing.is_some() {
        return Err(invalid_record(
            "expected a record without `source`, found one: the agent opens no files for clients that register VMs; \
             `xdp-imds register` replaces each `source` with the content of its file"
                .into(),
        ));
    }
    if record.sinks != Default::default() && !peer.is_owner() {
        return Err(forbidden(
            "only root and the agent's own user may name `sinks`, because the agent writes to them: leave them out, or \
             register as root",
        ));
    }
    let json = record.to_json().map_err(|error| not_kept(&error.into()))?;
    Ok(ValidRecord { record: record.into(), json })
}

/// True if the text is a mapping, though not a valid record.
fn is_mapping(json: bool, text: &str) -> bool {
    if json {
        parser::json::<Map<String, Value>>(text).is_ok()
    } else {
        parser::yaml::<Map<String, Value>>(text).is_ok()
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
        if SHOWN.contains(&field.as_str()) {
            shown.insert(field, value);
        } else if is_there {
            withheld.push(field);
        }
    }
    (Value::Object(shown), withheld)
}

// Answers in JSON, and problems (RFC 9457).

const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
/// The prefix of problem types.
const KIND: &str = "urn:xdp-imds:";

pub(super) fn json<T: Serialize>(status: StatusCode, value: &T) -> Response {
    match super::super::json_line(value) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, JSON)], bytes).into_response(),
        Err(error) => {
            let fault = problem(StatusCode::INTERNAL_SERVER_ERROR, "fault", "A fault", error.to_string());
            ProblemResponse::from(fault).into_response()
        }
    }
}

/// Why a request is refused, for the log.
#[derive(Clone, Debug)]
pub(in super::super) struct RefusalReason(pub(in super::super) Arc<str>);

/// A problem as an answer.
pub(super) struct ProblemResponse(ApiProblem);

impl<T: Into<ApiProblem>> From<T> for ProblemResponse {
    fn from(problem: T) -> Self {
        Self(problem.into())
    }
}

impl IntoResponse for ProblemResponse {
    fn into_response(self) -> Response {
        let Self(problem) = self;
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, &problem);
        response.headers_mut().insert(header::CONTENT_TYPE, PROBLEM);
        response.extensions_mut().insert(RefusalReason(problem.detail.into()));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

fn problem(status: StatusCode, kind: &str, title: &str, detail: String) -> ApiProblem {
    ApiProblem {
        kind: format!("{KIND}{kind}"),
        title: title.into(),
        status: status.as_u16(),
        detail,
        conflict: None,
        registered: None,
    }
}

pub(super) fn bad_request(expected: &str, found: &str) -> ApiProblem {
    let detail = format!("expected {expected}, found {found}");
    problem(StatusCode::BAD_REQUEST, "request", "The request is malformed", detail)
}

pub(super) fn forbidden(detail: &str) -> ApiProblem {
    problem(StatusCode::FORBIDDEN, "forbidden", "Not permitted here", detail.into())
}

pub(super) fn media_type() -> ApiProblem {
    let detail = "expected a record as application/json or application/yaml in Content-Type, found something else; \
                  curl -T sends none, which is accepted as well";
    problem(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media-type", "Not a record's media type", detail.into())
}

pub(super) fn too_large(most: usize) -> ApiProblem {
    let detail = format!("expected a record of at most {most} bytes, found more");
    problem(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The record is too large", detail)
}

/// Answers a request for a path that the control socket does not have.
pub(in super::super) async fn no_path(uri: Uri) -> Response {
    let path = uri.path();
    let detail = format!("there is no {path}; the documentation and /v1/openapi.json list the paths");
    ProblemResponse::from(problem(StatusCode::NOT_FOUND, "path", "No such path", detail)).into_response()
}

/// Answers a request with a method that its path does not take. `Allow` is added to it.
pub(in super::super) async fn no_method(method: Method, uri: Uri) -> Response {
    let detail = format!("{} does not take {method}; Allow lists the methods that it takes", uri.path());
    let problem = problem(StatusCode::METHOD_NOT_ALLOWED, "method", "Not a method of this path", detail);
    ProblemResponse::from(problem).into_response()
}

/// A record that cannot be used. `reason` must contain no secret.
fn invalid_record(reason: String) -> ApiProblem {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "record", "The record cannot be used", reason)
}

pub(super) fn absent(id: &RecordId) -> ApiProblem {
    problem(StatusCode::NOT_FOUND, "absent", "No such instance", none(id))
}

/// The error text for a name without a record. The command prints it too.
pub(super) fn none(id: &RecordId) -> String {
    let other = if id.source == RecordSource::Api { "; `?source=` names one of another source" } else { "" };
    format!("there is no {id}; `xdp-imds ls` lists all instances{other}")
}

pub(super) fn precondition(detail: String) -> ApiProblem {
    problem(StatusCode::PRECONDITION_FAILED, "precondition", "The condition does not hold", detail)
}

pub(super) fn clash(id: &RecordId, clash: RegistrationConflict) -> ApiProblem {
    let (by, detail) = match clash {
        RegistrationConflict::Taken { identity, by } => {
            let detail = format!(
                "{} on port {} belongs to {by}; give the NIC another MAC or port, or remove {by} first",
                identity.mac, identity.port
            );
            (by, detail)
        }
        RegistrationConflict::SameVm { by } => {
            let detail = format!(
                "the VM of {id} is registered as {by}; remove {by} first, or give the VM a vm.uuid or vm.owner of its own"
            );
            (by, detail)
        }
        RegistrationConflict::Full { most } => {
            let detail = format!("expected at most {most} instances, found one more; remove some first");
            return problem(StatusCode::INSUFFICIENT_STORAGE, "full", "No room for another instance", detail);
        }
        RegistrationConflict::Memory(no_room) => {
            let detail = format!("{id}: {no_room}");
            return problem(StatusCode::INSUFFICIENT_STORAGE, "full", "No memory for the record", detail);
        }
        RegistrationConflict::Unplaced => {
            return invalid_record(
                "expected a NIC with a port to wait for, found none; name it in network.nics[].port, or leave \
                 out `wait` (--wait)"
                    .into(),
            );
        }
    };
    let problem = problem(StatusCode::CONFLICT, "clash", "Another record is in the way", detail);
    ApiProblem { conflict: Some(name_of(&by)), ..problem }
}

pub(super) fn not_attached(instance: Instance, timeout: Duration) -> ApiProblem {
    let missing =
        instance.ports.iter().filter(|port| port.state != metadata_control::status::GuestState::Served);
    let missing: Vec<_> = missing
        .map(|port| format!("{} ({})", port.port, port.reason.as_deref().unwrap_or("not yet")))
        .collect();
    let detail = format!(
        "{} is registered, but not all of its ports were attached {}: {}",
        instance.name,
        within(timeout),
        missing.join(", ")
    );
    let problem =
        problem(StatusCode::GATEWAY_TIMEOUT, "not-attached", "Registered, and not attached yet", detail);
    ApiProblem { registered: Some(Box::new(instance)), ..problem }
}

fn within(timeout: Duration) -> String {
    if timeout.is_zero() { "at once".to_owned() } else { format!("within {timeout:?}") }
}

pub(super) fn event_refused(refused: &EventRefused) -> ApiProblem {
    let (status, kind, title) = match refused {
        EventRefused::Full => (StatusCode::INSUFFICIENT_STORAGE, "full", "No room for another event"),
        EventRefused::NotInForce => (StatusCode::CONFLICT, "clash", "The record is not in force"),
        EventRefused::Over(_) => (StatusCode::CONFLICT, "clash", "The event is over"),
        EventRefused::OfRecord(_) => (StatusCode::CONFLICT, "clash", "The record has this event"),
        EventRefused::Unknown(_) => (StatusCode::NOT_FOUND, "absent", "No such event"),
    };
    problem(status, kind, title, refused.to_string())
}

pub(super) fn invalid_event(reason: &str) -> ApiProblem {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "event", "The event cannot be used", reason.to_owned())
}

/// The guest has not acknowledged the event in time.
pub(super) fn not_acknowledged(event: &str, timeout: Duration) -> ApiProblem {
    let detail = format!(
        "the guest has not acknowledged the event `{event}` {}; continue without it",
        within(timeout)
    );
    problem(StatusCode::GATEWAY_TIMEOUT, "not-acknowledged", "Not acknowledged in time", detail)
}

pub(super) fn too_many_wait_for_guests() -> ApiProblem {
    let detail =
        format!("{EVENT_WAITS} other clients wait for guests; try again, or leave out `wait` (--wait)");
    problem(StatusCode::SERVICE_UNAVAILABLE, "busy", "Too many clients wait", detail)
}

pub(super) fn too_many() -> ApiProblem {
    let detail = format!(
        "{WAITS} other clients wait for their ports; nothing was changed: try again, or leave out `wait` (--wait)"
    );
    problem(StatusCode::SERVICE_UNAVAILABLE, "busy", "Too many clients wait", detail)
}

pub(super) fn busy() -> ApiProblem {
    let detail = "the agent is busy or ending; try again";
    problem(StatusCode::SERVICE_UNAVAILABLE, "busy", "Busy", detail.into())
}

pub(super) fn not_kept(error: &io::Error) -> ApiProblem {
    let detail = format!(
        "nothing was changed, because the record cannot be written to the state directory: {error}; make room there, or \
         correct its permissions"
    );
    problem(StatusCode::INSUFFICIENT_STORAGE, "not-kept", "It cannot be stored", detail)
}

pub(super) fn still_on_disk(unsaved: &UnsavedFiles) -> ApiProblem {
    let detail = format!(
        "removed, and the guest no longer gets it, but it is still on disk, and the agent tries again: {unsaved}"
    );
    problem(StatusCode::INSUFFICIENT_STORAGE, "not-kept", "It cannot be stored", detail)
}

pub(super) fn event_still_unwritten(unsaved: &UnsavedFiles) -> ApiProblem {
    let detail = format!("the guest is told, but it is not on disk, and the agent tries again: {unsaved}");
    problem(StatusCode::INSUFFICIENT_STORAGE, "not-kept", "It cannot be stored", detail)
}

impl From<ControlLoopBusy> for ApiProblem {
    fn from(_: ControlLoopBusy) -> Self {
        busy()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{HeaderMap, HeaderValue, header};
    use metadata_content::record::{Record, RecordLimits};
    use serde_json::{Value, json};
    use std::time::Duration;

    use super::super::super::listen::Peer;
    use super::{BODY_MAX, is_json, not_acknowledged, parse, read};

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
    fn a_refusal_says_how_long_the_client_has_waited() {
        for (timeout, said) in [
            (Duration::ZERO, "the event `e` at once; continue"),
            (Duration::from_millis(500), "the event `e` within 500ms; continue"),
        ] {
            let detail = not_acknowledged("e", timeout).detail;
            assert!(detail.contains(said), "{timeout:?}: {detail}");
        }
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
