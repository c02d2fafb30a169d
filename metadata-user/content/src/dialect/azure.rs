//! Azure: the instance metadata service below `/metadata`, the wireserver at its own address, and the host plug-in at
//! a port of that address.
//!
//! cloud-init reports to the wireserver when it has finished. Before that it requests the goal state, and retries for
//! 20 minutes. So a VM has either both services or neither.
//!
//! All scalars are strings, except those of `extended`. Property names match in any case.

#[cfg(test)]
mod agent_tests;
mod attested;
mod goal_state;
mod host_plugin;
mod identity;
mod instance;
mod query;
#[cfg(test)]
mod tests;
mod wireserver;

use std::fmt;
use std::sync::LazyLock;

use bytes::Bytes;
use serde_json::Value;

use super::document::{Document, Form, Node};
use super::sheet::{JSON, Sheet, TEXT};
use super::{Access, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Body, Response, Status};
use crate::record::Record;
use crate::store::{Call, Condition, Guard, Host, Live, Methods, Outcome};
use query::{Format, Parameters, Query};

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/metadata").needs(Access::Field("Metadata", "true")),
        Mount::open("/").at(Host::Wireserver),
        Mount::open("/").at(Host::HostPlugin),
    ],
    "`DataSourceAzure`; azure-identity; ohai; systemd-imdsd; WALinuxAgent 2.2.47, 2.7.3 and 2.12",
    render,
)
.remark(
    "`instance`, `versions`, `loadbalancer`, `scheduledevents`, `identity/oauth2/token`; `attested/document` with \
     `identity.certificate`; the wireserver and its host plug-in",
);

/// Content type of documents. That of errors has no charset.
const DOCUMENT: &str = "application/json; charset=utf-8";

/// Versions of the interface, newest last. Any date from the first one on is accepted.
const VERSIONS: [&str; 35] = [
    "2017-03-01",
    "2017-04-02",
    "2017-08-01",
    "2017-10-01",
    "2017-12-01",
    "2018-02-01",
    "2018-04-02",
    "2018-10-01",
    "2019-02-01",
    "2019-03-11",
    "2019-04-30",
    "2019-06-01",
    "2019-06-04",
    "2019-08-01",
    "2019-08-15",
    "2019-11-01",
    "2020-06-01",
    "2020-07-15",
    "2020-09-01",
    "2020-10-01",
    "2020-12-01",
    "2021-01-01",
    "2021-02-01",
    "2021-03-01",
    "2021-05-01",
    "2021-08-01",
    "2021-10-01",
    "2021-11-01",
    "2021-11-15",
    "2021-12-13",
    "2023-07-01",
    "2023-11-15",
    "2024-03-15",
    "2024-07-17",
    "2025-04-07",
];

static VERSIONS_DOCUMENT: LazyLock<Bytes> =
    LazyLock::new(|| json!({ "apiVersions": VERSIONS.as_slice() }).to_string().into());
const NO_BALANCER: &str = r#"{"error":"No load balancer metadata is found. Check if your virtual machine is using any nonbasic SKU load balancer and retry later."}"#;
const NO_EVENTS: &str = r#"{"DocumentIncarnation":1,"Events":[]}"#;

static GUARDS: LazyLock<[Guard; 2]> = LazyLock::new(|| {
    [
        Guard {
            condition: Condition::HeaderIs { name: "Metadata", value: "true" },
            otherwise: bad("Required metadata header not specified or is incorrect"),
        },
        Guard {
            condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
            otherwise: bad("X-Forwarded-For header not allowed"),
        },
    ]
});

/// Builds a 400 with the reason.
fn bad(reason: &str) -> Response {
    error(&json!({ "error": format!("Bad request. {reason}") }))
}

/// Builds a 400 with this document.
fn error(document: &Value) -> Response {
    Response::new(Status(400), Some(JSON), &[], document.to_string())
}

/// Answers for `/metadata/loadbalancer` what Azure does for a VM without a load balancer.
#[derive(Debug)]
struct NoBalancer;

impl Live for NoBalancer {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        match Parameters::parse(call.request.target.query) {
            Ok(_) => Response::new(Status(404), Some(JSON), &[], NO_BALANCER).into(),
            Err(refused) => refused.into(),
        }
    }

    fn about(&self) -> &'static str {
        "the VM has no load balancer"
    }
}

/// Returns the subscription of a VM.
fn subscription(record: &Record) -> String {
    format!("00000000-0000-0000-0000-{}", record.vm.project.account)
}

/// Builds the 503 for what may be there later. Azure's libraries retry any 5xx and finally raise an error with this
/// text (RFC 6749 section 4.1.2.1 defines the first word).
fn later(why: &str) -> Response {
    let document = json!({ "error": "temporarily_unavailable", "error_description": why });
    Response::new(Status(503), Some(JSON), &[("Retry-After", "1")], document.to_string())
}

/// Builds the 429 for a VM that asks too often.
fn too_many() -> Response {
    let document = json!({ "error": "too_many_requests", "error_description": "Use an answer again" });
    Response::new(Status(429), Some(JSON), &[("Retry-After", "1")], document.to_string())
}

fn render(record: &Record, sheet: &mut Sheet<'_>) {
    let versions = sheet.found(DOCUMENT, VERSIONS_DOCUMENT.clone());
    sheet.guarded("/metadata/versions", &*GUARDS, versions);
    let events = sheet.found(DOCUMENT, NO_EVENTS);
    sheet.guarded("/metadata/scheduledevents", &*GUARDS, events);
    sheet.live("/metadata/loadbalancer", Methods::READ, &*GUARDS, NoBalancer);
    let instance = Instance {
        document: sheet.document(&instance::whole(record)),
        unread: record.user_data.as_ref().is_some_and(|payload| payload.bytes().is_none()),
    };
    sheet.live_below("/metadata/instance", Methods::READ, &*GUARDS, instance);
    if let Some(issuer) = sheet.issuer().filter(|issuer| issuer.signs_documents()).cloned() {
        let attested = attested::Attested::new(record, issuer);
        sheet.live("/metadata/attested/document", Methods::READ, &*GUARDS, attested);
    }
    let identity = identity::Tokens::new(record, sheet.issuer());
    sheet.live("/metadata/identity/oauth2/token", Methods::READ, &*GUARDS, identity);
    sheet.at(Host::Wireserver);
    wireserver::render(record, sheet);
    sheet.at(Host::HostPlugin);
    host_plugin::render(sheet);
}

/// Serves `/metadata/instance` of one VM.
struct Instance {
    document: Document,
    /// The source of the user-data has not been read yet.
    unread: bool,
}

/// Omits user-data.
impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instance").finish_non_exhaustive()
    }
}

/// Returns the visible members of the root: `extended` only on request.
fn shown<'a>(root: Node<'a>, query: &Query) -> Vec<(std::borrow::Cow<'a, str>, Node<'a>)> {
    let mut members = root.members();
    members.retain(|(name, _)| query.extended || name != "extended");
    members
}

impl Instance {
    fn read(&self, path: &str, query: &Query) -> Response {
        let path: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        let mut members = shown(self.document.root(), query);
        let mut at = None;
        for segment in &path {
            let named = members.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(segment));
            let Some((_, node)) = named else { return Response::error(Status(404), &[]) };
            members = node.members();
            at = Some(node);
        }
        if self.unread && holds_user_data(&path, query) {
            // Clients retry a 503. Without the user-data they would boot unconfigured.
            return Response::error(Status(503), &[("Retry-After", "1")]);
        }
        let (kind, body) = match (at, query.format) {
            (Some(node), Format::Text) if node.form() == Form::Scalar => (TEXT, node.text()),
            (Some(node), Format::Json) if node.form() == Form::Scalar => {
                return bad("Use format=text for a leaf");
            }
            (Some(node), Format::Json) => (DOCUMENT, node.json()),
            (None, Format::Json) => (DOCUMENT, object(&members)),
            (_, Format::Text) => (TEXT, listing(&members).into()),
        };
        Response::new(Status(200), Some(kind), &[], body)
    }
}

/// Returns whether the answer contains the user-data.
fn holds_user_data(path: &[&str], query: &Query) -> bool {
    let above = ["compute", "userData"];
    path.iter().zip(above).all(|(segment, name)| segment.eq_ignore_ascii_case(name))
        && (query.format == Format::Json || path.len() == above.len())
}

/// Returns an object of these members without copying long ones.
fn object(members: &[(std::borrow::Cow<'_, str>, Node<'_>)]) -> Body {
    let mut pieces = vec![Bytes::from_static(b"{")];
    for (n, (name, node)) in members.iter().enumerate() {
        let comma = if n == 0 { "" } else { "," };
        pieces.push(format!("{comma}{}:", Value::from(name.as_ref())).into());
        pieces.extend(node.json().pieces().iter().cloned());
    }
    pieces.push(Bytes::from_static(b"}"));
    Body::join(pieces)
}

/// Returns one name per line. Names with members below end with a slash.
fn listing(members: &[(std::borrow::Cow<'_, str>, Node<'_>)]) -> String {
    let line = |(name, node): &(std::borrow::Cow<'_, str>, Node<'_>)| {
        let slash = if node.form() == Form::Scalar { "" } else { "/" };
        format!("{name}{slash}")
    };
    members.iter().map(line).collect::<Vec<_>>().join("\n")
}

impl Live for Instance {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        match Query::parse(call.request.target.query) {
            Ok(query) => self.read(call.rest, &query).into(),
            Err(refused) => refused.into(),
        }
    }

    fn about(&self) -> &'static str {
        "the part of the document at the path; needs an api-version"
    }
}
