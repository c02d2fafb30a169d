//! Answers in JSON, and problems (RFC 9457).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::super::{ControlLoopBusy, JSON};
use super::WAITS;
use crate::agent::node::{RegistrationConflict, name_of};
use metadata_control::instances::{ApiProblem, Instance};
use metadata_feed::registry::RecordId;
use metadata_feed::state::save_queue::UnsavedFiles;

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
pub(super) fn record(reason: String) -> ApiProblem {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "record", "The record cannot be used", reason)
}

pub(super) fn absent(id: &RecordId) -> ApiProblem {
    problem(StatusCode::NOT_FOUND, "absent", "No such instance", none(id))
}

/// The error text for a name without a record. The command prints it too.
pub(super) fn none(id: &RecordId) -> String {
    format!("there is no {id}; `xdp-imds ls` lists all instances")
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
            return record(
                "expected a NIC with a port to wait for, found none; name it in network.nics[].port, or omit \
                 `wait`"
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
        "{} is registered, but not all of its ports were attached within {timeout:?}: {}",
        instance.name,
        missing.join(", ")
    );
    let problem =
        problem(StatusCode::GATEWAY_TIMEOUT, "not-attached", "Registered, and not attached yet", detail);
    ApiProblem { registered: Some(Box::new(instance)), ..problem }
}

pub(super) fn too_many() -> ApiProblem {
    let detail =
        format!("{WAITS} other clients wait for their ports; nothing was changed: try again, or omit `wait`");
    problem(StatusCode::SERVICE_UNAVAILABLE, "busy", "Too many clients wait", detail)
}

pub(super) fn busy() -> ApiProblem {
    let detail = "the agent is busy or ending; try again";
    problem(StatusCode::SERVICE_UNAVAILABLE, "busy", "Busy", detail.into())
}

pub(super) fn not_kept(error: &io::Error) -> ApiProblem {
    let detail =
        format!("nothing was changed, because the record cannot be written to the state directory: {error}");
    problem(StatusCode::INSUFFICIENT_STORAGE, "not-kept", "It cannot be stored", detail)
}

pub(super) fn still_on_disk(unsaved: &UnsavedFiles) -> ApiProblem {
    let detail = format!(
        "removed, and the guest no longer gets it, but the disk still has it, which the agent tries again: {unsaved}"
    );
    problem(StatusCode::INSUFFICIENT_STORAGE, "not-kept", "It cannot be stored", detail)
}

impl From<ControlLoopBusy> for ApiProblem {
    fn from(_: ControlLoopBusy) -> Self {
        busy()
    }
}
