//! Instances: the JSON types of the agent's API at `/v1/instances`.
//!
//! The agent and its clients use these types on the control socket. `openapi.json` beside the agent's handlers
//! describes them.

use metadata_content::record::event::{EventDocument, ScheduledEvent};
use metadata_content::source::RecordSource;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

use crate::status::{ClientError, GuestState, InstanceState, StatusRequest, StatusResponse, ask, refusal};

/// Most instances in one response; [`Page::next`] continues the list.
pub const PAGE: usize = 512;

/// A record as the agent has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Its name within its source.
    pub name: String,
    /// The source that published it.
    pub source: RecordSource,
    /// The state of the record.
    pub state: InstanceState,
    /// True if the VM is served from this record.
    pub in_force: bool,
    /// The record that is in force instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadowed_by: Option<Name>,
    /// Why the latest version is refused. An earlier good version stays in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// The record's entity tag for `If-Match`; present for source `api` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// The generation of the good version, if one exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The VM of the good version, or of a refused one as far as its source tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<InstanceVm>,
    /// The ports of the record's NICs.
    pub ports: Vec<InstancePort>,
    /// What the registration did; only in its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<RegistrationOutcome>,
    /// The record's fields without secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<serde_json::Value>,
    /// Names of the record's other fields, whose values are secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Vec<String>>,
}

/// What a registration did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistrationOutcome {
    /// There was no record of this name.
    Registered,
    /// The record of this name was the same.
    Unchanged,
    /// It replaced an earlier record of the same VM.
    Replaced,
    /// It replaced the record of another VM, which is no longer registered.
    ReplacedAnother,
}

impl RegistrationOutcome {
    /// Returns the words that follow the record's name in messages.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Unchanged => "unchanged",
            Self::Replaced => "replaced",
            Self::ReplacedAnother => "replaced the record of another VM",
        }
    }
}

impl Instance {
    /// True if this is its own name, with or without its source.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        let (source, own) = (self.source.name(), &*self.name);
        own == name || name.strip_prefix(source).and_then(|rest| rest.strip_prefix('/')) == Some(own)
    }

    /// True if `xdp-imds ls` or `status` shows it by this name: its own, with or without its source; the name, UUID or
    /// owner of its VM; the port or MAC of a NIC; the path of its file.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        let is_vm = |vm: &InstanceVm| {
            vm.name == name || vm.uuid.eq_ignore_ascii_case(name) || !vm.owner.is_empty() && vm.owner == name
        };
        let is_port = |port: &InstancePort| {
            port.port == name
                || port.port.split('@').next() == Some(name)
                || port.mac.eq_ignore_ascii_case(name)
        };
        let is_file = self.source == RecordSource::File
            && name.starts_with('/')
            && name.rsplit('/').next() == Some(&self.name);
        !name.is_empty()
            && (self.is_named(name)
                || self.vm.as_ref().is_some_and(is_vm)
                || self.ports.iter().any(is_port)
                || is_file)
    }
}

/// The name of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// The record's source.
    pub source: RecordSource,
    /// The name within the source.
    pub name: String,
}

/// The VM of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceVm {
    /// Its name.
    pub name: String,
    /// The UUID of its firmware, which another VM may have too.
    pub uuid: String,
    /// The owner of what the agent keeps and derives for it.
    #[serde(default)]
    pub owner: String,
}

/// The port of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstancePort {
    /// `IFNAME`, or `IFNAME@NETNS`.
    pub port: String,
    /// The NIC's MAC.
    pub mac: String,
    /// How requests from this NIC are answered.
    pub state: GuestState,
    /// The other record that has this MAC on this port, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_by: Option<Name>,
    /// The fault of the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A page of instances, in the order of source and name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Page {
    /// At most [`PAGE`] instances.
    pub instances: Vec<Instance>,
    /// The parameter `after` for the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An error of the API (RFC 9457).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ApiProblem {
    /// The kind: `urn:xdp-imds:` and a word.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind in a few words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What was expected, what was found, and the remedy.
    pub detail: String,
    /// The conflicting record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conflict: Option<Name>,
    /// The instance as stored, if it is not attached as requested yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered: Option<Box<Instance>>,
}

// A client of the agent's `/v1/instances`.

/// Most bytes of a name.
pub const NAME_MAX: usize = 253;

/// Longest silence of the agent, beside the time it is asked to wait.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Characters to escape in a path.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b':')
    .remove(b'@')
    .remove(b'/');

/// Why the agent did not carry out a request.
#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    /// The client got no response.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The agent refused the request.
    #[error("{}", .0.detail)]
    Problem(Box<ApiProblem>),
    /// The response is not one of the API.
    #[error("{}", refusal(*status, text))]
    Strange {
        /// The HTTP status.
        status: u16,
        /// The body as text.
        text: String,
    },
}

impl RegistrationError {
    /// The HTTP status, if a response arrived.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Client(_) => None,
            Self::Problem(problem) => Some(problem.status),
            Self::Strange { status, .. } => Some(*status),
        }
    }
}

/// True for a valid name: 1 to [`NAME_MAX`] letters, digits and some signs, in parts joined by `/`.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let is_good = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~' | b':' | b'@'))
    };
    name.len() <= NAME_MAX && name.split('/').all(is_good)
}

/// The URL path of an instance.
#[must_use]
pub fn path_of(source: RecordSource, name: &str) -> String {
    let query =
        if source == RecordSource::Api { String::new() } else { format!("?source={}", source.name()) };
    format!("/v1/instances/{}{query}", utf8_percent_encode(name, PLAIN))
}

/// Removes what the guest of an instance wrote.
pub fn clear(run: &Path, source: RecordSource, name: &str) -> Result<(), RegistrationError> {
    let path = path_of(source, name).replacen("/v1/instances/", "/v1/guest-data/", 1);
    let question = StatusRequest { method: "DELETE", path: &path, fields: &[], body: &[], timeout: TIMEOUT };
    let reply = ask(run, &question)?;
    if reply.status == 204 { Ok(()) } else { Err(failure(reply)) }
}

/// Longest time a client may wait for a guest to acknowledge an event.
pub const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(30);

/// The URL path of the events of an instance's VM, with the event's id if one is meant.
fn events_path(source: RecordSource, name: &str, id: Option<&str>) -> String {
    let path = path_of(source, name).replacen("/v1/instances/", "/v1/events/", 1);
    let Some(id) = id else { return path };
    let sign = if path.contains('?') { '&' } else { '?' };
    format!("{path}{sign}id={}", utf8_percent_encode(id, PLAIN))
}

/// Reads the events of an instance's VM.
pub fn events(run: &Path, source: RecordSource, name: &str) -> Result<EventDocument, RegistrationError> {
    read(get(run, &events_path(source, name, None))?, &[200])
}

/// Adds an event, or changes the one of its id.
pub fn add_event(
    run: &Path,
    source: RecordSource,
    name: &str,
    event: &ScheduledEvent,
) -> Result<EventDocument, RegistrationError> {
    let (path, body) = (events_path(source, name, None), serde_json::json!(event).to_string());
    let fields = ["Content-Type: application/json".to_owned()];
    let question = StatusRequest {
        method: "PUT",
        path: &path,
        fields: &fields,
        body: body.as_bytes(),
        timeout: TIMEOUT,
    };
    read(ask(run, &question)?, &[200])
}

/// Cancels an event.
pub fn cancel_event(
    run: &Path,
    source: RecordSource,
    name: &str,
    id: &str,
) -> Result<EventDocument, RegistrationError> {
    let path = events_path(source, name, Some(id));
    let question = StatusRequest { method: "DELETE", path: &path, fields: &[], body: &[], timeout: TIMEOUT };
    read(ask(run, &question)?, &[200])
}

/// Waits until the guest has acknowledged an event or the event is over, at most [`ACKNOWLEDGED_WITHIN`].
pub fn wait_for_acknowledgement(
    run: &Path,
    source: RecordSource,
    name: &str,
    id: &str,
    wait: Duration,
) -> Result<EventDocument, RegistrationError> {
    let millis = wait.as_micros().div_ceil(1_000);
    let path = format!("{}&wait=acknowledged&timeout={millis}ms", events_path(source, name, Some(id)));
    let question =
        StatusRequest { method: "GET", path: &path, fields: &[], body: &[], timeout: TIMEOUT + wait };
    read(ask(run, &question)?, &[200])
}

/// The conditions of a registration.
#[derive(Debug, Default)]
pub struct RegistrationConditions<'a> {
    /// Replace only the record with this entity tag; `*` means any.
    pub matches: Option<&'a str>,
    /// Register only if no record of the name exists.
    pub is_new: bool,
    /// Wait until all ports are attached, at most this long.
    pub wait: Option<Duration>,
}

impl RegistrationConditions<'_> {
    fn fields(&self) -> Vec<String> {
        let matches = self.matches.map(|tag| format!("If-Match: {tag}"));
        matches.into_iter().chain(self.is_new.then(|| "If-None-Match: *".to_owned())).collect()
    }
}

/// Registers a record in JSON. The second value is true if the name is new.
pub fn put(
    run: &Path,
    name: &str,
    json: &str,
    conditions: &RegistrationConditions<'_>,
) -> Result<(Instance, bool), RegistrationError> {
    let mut path = path_of(RecordSource::Api, name);
    if let Some(wait) = conditions.wait {
        let millis = wait.as_micros().div_ceil(1_000);
        path.push_str(&format!("?wait=attached&timeout={millis}ms"));
    }
    let mut fields = conditions.fields();
    fields.push("Content-Type: application/json".into());
    let timeout = TIMEOUT + conditions.wait.unwrap_or_default();
    let question =
        StatusRequest { method: "PUT", path: &path, fields: &fields, body: json.as_bytes(), timeout };
    let reply = ask(run, &question)?;
    let created = reply.status == 201;
    Ok((read(reply, &[200, 201])?, created))
}

/// Removes an instance.
pub fn remove(
    run: &Path,
    name: &str,
    conditions: &RegistrationConditions<'_>,
) -> Result<(), RegistrationError> {
    let (path, fields) = (path_of(RecordSource::Api, name), conditions.fields());
    let question =
        StatusRequest { method: "DELETE", path: &path, fields: &fields, body: &[], timeout: TIMEOUT };
    let reply = ask(run, &question)?;
    if reply.status == 204 { Ok(()) } else { Err(failure(reply)) }
}

/// Reads one instance.
pub fn look(run: &Path, source: RecordSource, name: &str) -> Result<Instance, RegistrationError> {
    read(get(run, &path_of(source, name))?, &[200])
}

/// Lists the instances of one source, or of all.
pub fn list(run: &Path, source: Option<RecordSource>) -> Result<Vec<Instance>, RegistrationError> {
    let mut instances = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let mut query = form_urlencoded::Serializer::new(String::new());
        if let Some(source) = source {
            query.append_pair("source", source.name());
        }
        if let Some(after) = &after {
            query.append_pair("after", after);
        }
        let page: Page = read(get(run, &format!("/v1/instances?{}", query.finish()))?, &[200])?;
        let ends = page.instances.is_empty();
        instances.extend(page.instances);
        match page.next {
            Some(next) if !ends => after = Some(next),
            _ => return Ok(instances),
        }
    }
}

fn get(run: &Path, path: &str) -> Result<StatusResponse, ClientError> {
    ask(run, &StatusRequest { method: "GET", path, fields: &[], body: &[], timeout: TIMEOUT })
}

fn read<T: DeserializeOwned>(reply: StatusResponse, good: &[u16]) -> Result<T, RegistrationError> {
    if !good.contains(&reply.status) {
        return Err(failure(reply));
    }
    serde_json::from_slice(&reply.body).map_err(|_| strange(&reply))
}

fn failure(reply: StatusResponse) -> RegistrationError {
    match serde_json::from_slice(&reply.body) {
        Ok(problem) => RegistrationError::Problem(problem),
        Err(_) => strange(&reply),
    }
}

fn strange(reply: &StatusResponse) -> RegistrationError {
    let text: String = String::from_utf8_lossy(&reply.body).chars().take(200).collect();
    RegistrationError::Strange { status: reply.status, text }
}

#[cfg(test)]
mod tests {
    use metadata_content::source::RecordSource;

    use super::{NAME_MAX, is_name, path_of};

    #[test]
    fn a_name_is_a_path_and_never_leads_out_of_it() {
        let long = "a".repeat(NAME_MAX);
        for name in ["a", "ns/web-1", "A.b_c~1:2@3", &long] {
            assert!(is_name(name), "{name}");
            assert_eq!(path_of(RecordSource::Api, name), format!("/v1/instances/{name}"));
        }
        assert_eq!(path_of(RecordSource::File, "a b?.yaml"), "/v1/instances/a%20b%3F.yaml?source=file");
        for name in ["", "/", "a/", "/a", "a//b", ".", "a/../b", "a b", "a?b", "ü", &format!("{long}a")] {
            assert!(!is_name(name), "{name}");
        }
    }
}
