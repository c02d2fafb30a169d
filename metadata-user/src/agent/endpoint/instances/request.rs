//! Requests about instances: as read from the URL and the head, and as passed to the control loop.

use axum::http::{HeaderMap, Method, Uri, header};
use metadata_common::time::span;
use metadata_content::record::Record;
use metadata_content::record::event::EventRefused;
use metadata_content::source::RecordSource;
use metadata_control::instances::{ACKNOWLEDGED_WITHIN, ApiProblem, Instance, NAME_MAX, Page, is_name};
use metadata_feed::registry::RecordId;
use percent_encoding::percent_decode_str;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

use super::representation::{bad_request, forbidden, none, precondition};
use super::{EVENTS, GUEST_DATA, PREFIX, WAIT, WAIT_MOST};
use crate::agent::node::{ChangedEvents, ClearedData, EventChange, Node, RegistrationConflict, TaggedRecord};

/// A request to the control loop about instances, with the channel for the answer.
pub(crate) enum InstanceRequest {
    /// The instances after a name, of one source or of all.
    List {
        source: Option<RecordSource>,
        /// The name; `None` for the first page.
        after: Option<RecordId>,
        reply: oneshot::Sender<Page>,
    },
    /// An instance, and its last valid record.
    Look { id: RecordId, reply: oneshot::Sender<Option<(Instance, Option<Arc<Record>>)>> },
    /// The entity tag of a registered record.
    Tag { id: RecordId, reply: oneshot::Sender<Option<Arc<str>>> },
    /// The entity tag of a registered record, and whether another may replace it.
    Check {
        id: RecordId,
        record: Arc<Record>,
        /// Whether the client will wait until the ports of the record are attached.
        waits: bool,
        reply: oneshot::Sender<CheckedRegistration>,
    },
    /// Registers a record.
    Put { id: RecordId, tagged: TaggedRecord, reply: oneshot::Sender<Instance> },
    /// Removes a record.
    Remove {
        id: RecordId,
        /// Sent once the record is removed.
        reply: oneshot::Sender<()>,
    },
    /// Changes or reads the events of a record's VM.
    Events {
        id: RecordId,
        change: EventChange,
        /// `None` if there is no such record.
        reply: oneshot::Sender<Option<Result<ChangedEvents, EventRefused>>>,
    },
    /// Removes what the guest of a record's VM wrote.
    Clear {
        id: RecordId,
        /// The result; `None` if there is no such record.
        reply: oneshot::Sender<Option<ClearedData>>,
    },
    /// Waits until all ports of a record are attached. No answer comes if the record is removed before.
    Wait {
        id: RecordId,
        /// The instance, once attached.
        reply: oneshot::Sender<Instance>,
    },
}

/// The registered record of a name, and whether another may replace it.
#[derive(Debug)]
pub(crate) struct CheckedRegistration {
    /// The entity tag of the registered record.
    pub tag: Option<Arc<str>>,
    /// The owner of the registered record.
    pub owner: Option<String>,
    /// The reason why another record may not replace it.
    pub admitted: Result<(), RegistrationConflict>,
}

impl fmt::Debug for InstanceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::List { .. } => "List",
            Self::Look { .. } => "Look",
            Self::Tag { .. } => "Tag",
            Self::Check { .. } => "Check",
            Self::Put { .. } => "Put",
            Self::Remove { .. } => "Remove",
            Self::Events { .. } => "Events",
            Self::Clear { .. } => "Clear",
            Self::Wait { .. } => "Wait",
        })
    }
}

impl InstanceRequest {
    /// Answers from the node. Returns true if records have changed. The answer is dropped if the client has
    /// disconnected.
    pub(crate) fn answer(self, node: &mut Node) -> bool {
        let mut changes = matches!(self, Self::Put { .. } | Self::Remove { .. });
        match self {
            Self::List { source, after, reply } => _ = reply.send(node.view().page(source, after.as_ref())),
            Self::Look { id, reply } => {
                let found =
                    node.view().instance(&id).map(|instance| (instance, node.catalogue.last_record(&id)));
                _ = reply.send(found);
            }
            Self::Tag { id, reply } => _ = reply.send(node.catalogue.etag_of(&id)),
            Self::Check { id, record, waits, reply } => {
                let checked = CheckedRegistration {
                    tag: node.catalogue.etag_of(&id),
                    owner: node.catalogue.last_record(&id).map(|record| record.owner_text().to_owned()),
                    admitted: node.catalogue.check_admission(&id, &record, waits),
                };
                _ = reply.send(checked);
            }
            Self::Put { id, tagged, reply } => {
                node.register(&id, tagged);
                // A record that was just registered exists.
                if let Some(instance) = node.view().instance(&id) {
                    _ = reply.send(instance);
                }
            }
            Self::Remove { id, reply } => {
                node.unregister(&id);
                _ = reply.send(());
            }
            Self::Events { id, change, reply } => {
                let done = node.change_events(&id, change);
                changes = matches!(&done, Some(Ok(ChangedEvents { changed: true, .. })));
                _ = reply.send(done);
            }
            Self::Clear { id, reply } => _ = reply.send(node.catalogue.clear_guest_data(&id)),
            Self::Wait { id, reply } => node.wait_for(id, reply),
        }
        changes
    }
}

/// A request about one name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) id: RecordId,
    pub(super) wait: Option<PortWait>,
}

/// A client that waits until all ports are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortWait {
    /// Limit on the time it waits.
    pub(super) timeout: Duration,
}

/// Reads the URL of a request about what a guest wrote.
pub(super) fn read_guest_data(uri: &Uri) -> Result<RecordId, ApiProblem> {
    let name = name(uri, GUEST_DATA)?;
    let mut source = RecordSource::Api;
    for (key, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        match key.as_ref() {
            "source" => source = source_of(&value)?,
            _ => return Err(unknown(&Method::DELETE, &key)),
        }
    }
    id(source, &name)
}

/// A request about the events of a record's VM.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NamedEvent {
    pub(super) id: RecordId,
    /// The event's id.
    pub(super) event: Option<String>,
    /// How long the client waits until the guest has acknowledged the event.
    pub(super) wait: Option<Duration>,
}

/// Reads the URL of a request about events.
pub(super) fn read_event(uri: &Uri, method: &Method) -> Result<NamedEvent, ApiProblem> {
    let name = name(uri, EVENTS)?;
    let (mut source, mut event, mut waits, mut timeout) = (RecordSource::Api, None, false, None);
    for (key, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        match (key.as_ref(), value.as_ref()) {
            ("source", name) => source = source_of(name)?,
            ("id", id) if *method != Method::PUT => event = Some(id.to_owned()),
            ("wait", "acknowledged") if *method == Method::GET => waits = true,
            ("timeout", text) if *method == Method::GET => {
                let within = span(text).filter(|timeout| *timeout <= ACKNOWLEDGED_WITHIN);
                let expected =
                    format!("a timeout of at most {} s, such as `30s`", ACKNOWLEDGED_WITHIN.as_secs());
                timeout = Some(within.ok_or_else(|| bad_request(&expected, "another value"))?);
            }
            _ => {
                let expected =
                    "`source=`, `id=`, or `wait=acknowledged` with `timeout=` of a GET in the query";
                return Err(bad_request(expected, "another parameter, or another value of it"));
            }
        }
    }
    if (waits || *method == Method::DELETE) && event.is_none() {
        return Err(bad_request("the id of an event as `id=` in the query", "none"));
    }
    if timeout.is_some() && !waits {
        return Err(bad_request("`wait=acknowledged` beside `timeout`", "`timeout` alone"));
    }
    let wait = waits.then(|| timeout.unwrap_or(ACKNOWLEDGED_WITHIN));
    Ok(NamedEvent { id: id(source, &name)?, event, wait })
}

fn name<'a>(uri: &'a Uri, prefix: &str) -> Result<Cow<'a, str>, ApiProblem> {
    let name = uri.path().strip_prefix(prefix).unwrap_or_default();
    percent_decode_str(name).decode_utf8().map_err(|_| bad_request("a name in UTF-8", "other bytes"))
}

/// The record of a source with this name. The names of sources other than the API may have any letters, such as those
/// of a file.
fn id(source: RecordSource, name: &str) -> Result<RecordId, ApiProblem> {
    if source == RecordSource::Api && !is_name(name) {
        let expected = format!(
            "a name of 1 to {NAME_MAX} letters, digits, `-`, `.`, `_`, `~`, `:` and `@`, in parts joined by `/`, \
             none of them `.` or `..`"
        );
        return Err(bad_request(&expected, &format!("{} bytes that are none", name.len())));
    }
    Ok(RecordId::new(source, name))
}

/// Reads the URL of a request about one name.
pub(super) fn read(uri: &Uri, method: &Method) -> Result<Named, ApiProblem> {
    let name = name(uri, PREFIX)?;
    let (mut source, mut waits, mut timeout) = (RecordSource::Api, false, None);
    for (key, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        match (key.as_ref(), value.as_ref()) {
            ("source", name) => source = source_of(name)?,
            ("wait", "attached") if *method == Method::PUT => waits = true,
            ("timeout", text) if *method == Method::PUT => timeout = Some(timeout_of(text)?),
            _ => return Err(unknown(method, &key)),
        }
    }
    let id = id(source, &name)?;
    if *method != Method::GET && !source.is_kept() {
        let detail = format!("records of the source {} are changed where they come from", source.name());
        return Err(forbidden(&detail));
    }
    if timeout.is_some() && !waits {
        return Err(bad_request("`wait=attached` beside `timeout`", "`timeout` alone"));
    }
    let wait = waits.then(|| PortWait { timeout: timeout.unwrap_or(WAIT) });
    Ok(Named { id, wait })
}

/// Reads the query of a request for a list.
pub(super) fn range(uri: &Uri) -> Result<(Option<RecordSource>, Option<RecordId>), ApiProblem> {
    let (mut source, mut after) = (None, None);
    for (key, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        match key.as_ref() {
            "source" => source = Some(source_of(&value)?),
            "after" => {
                let (name, key) = value.split_once('/').unwrap_or((&value, ""));
                let source = RecordSource::of(name).ok_or_else(|| {
                    bad_request(
                        "`after=` with `next` of the previous page, such as `api/web-1`",
                        "another value",
                    )
                })?;
                after = Some(RecordId::new(source, key));
            }
            _ => return Err(unknown(&Method::GET, &key)),
        }
    }
    Ok((source, after))
}

fn source_of(name: &str) -> Result<RecordSource, ApiProblem> {
    RecordSource::of(name).ok_or_else(|| {
        let names = RecordSource::ALL.map(RecordSource::name).join(", ");
        bad_request(&format!("one of the sources {names}"), "another word")
    })
}

fn unknown(method: &Method, key: &str) -> ApiProblem {
    let expected = match *method {
        Method::PUT => "`wait=attached`, `timeout=` or `source=` in the query",
        _ => "`source=` (or `after=`, of a list) in the query",
    };
    let key: String = key.chars().take(32).filter(|c| !c.is_control()).collect();
    bad_request(expected, &format!("`{key}`, or another value of it"))
}

/// Parses a time such as `5s`, `500ms`, `1m` or `5`, as the verbs do.
fn timeout_of(text: &str) -> Result<Duration, ApiProblem> {
    span(text).filter(|timeout| *timeout <= WAIT_MOST).ok_or_else(|| {
        let expected = format!("a timeout such as `500ms`, `5s` or `5`, at most {} s", WAIT_MOST.as_secs());
        bad_request(&expected, "another value")
    })
}

// Conditions: `If-Match` and `If-None-Match` (RFC 9110 §13.1).

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RequestConditions {
    matches: Option<Tags>,
    differs: Option<Tags>,
}

/// The value of a field.
#[derive(Debug, PartialEq, Eq)]
enum Tags {
    /// `*`: any entity tag.
    Any,
    These(Vec<String>),
}

impl RequestConditions {
    pub(super) fn read(head: &HeaderMap) -> Result<Self, ApiProblem> {
        Ok(Self { matches: tags(head, header::IF_MATCH)?, differs: tags(head, header::IF_NONE_MATCH)? })
    }

    /// Checks the conditions of a change against the entity tag of the registered record, if there is one.
    ///
    /// # Errors
    /// If a condition does not hold.
    pub(super) fn check(&self, id: &RecordId, etag: Option<&str>) -> Result<(), ApiProblem> {
        let found =
            || etag.map_or_else(|| format!("{id} does not exist"), |etag| format!("{id} has the tag {etag}"));
        if let (Some(Tags::Any), None) = (&self.matches, etag) {
            return Err(precondition(none(id)));
        }
        if self.matches.as_ref().is_some_and(|tags| !tags.have(etag)) {
            let advice = "read it again (`xdp-imds get`, GET) before another change";
            return Err(precondition(format!(
                "If-Match (`--if-match`) does not hold: {}; {advice}",
                found()
            )));
        }
        if self.differs.as_ref().is_some_and(|tags| tags.have(etag)) {
            let advice = "choose another name, or leave `--new` out to replace what is registered";
            return Err(precondition(format!(
                "`--new` (If-None-Match) does not hold: {}; {advice}",
                found()
            )));
        }
        Ok(())
    }

    /// True if the client of a GET has the record with this entity tag.
    pub(super) fn is_known(&self, etag: Option<&str>) -> bool {
        self.differs.as_ref().is_some_and(|tags| tags.have(etag))
    }
}

impl Tags {
    fn have(&self, etag: Option<&str>) -> bool {
        match self {
            Self::Any => etag.is_some(),
            Self::These(tags) => etag.is_some_and(|etag| tags.iter().any(|tag| tag == etag)),
        }
    }
}

fn tags(head: &HeaderMap, field: header::HeaderName) -> Result<Option<Tags>, ApiProblem> {
    let mut these = Vec::new();
    for value in head.get_all(&field) {
        let text = value.to_str().unwrap_or_default().trim();
        if text == "*" {
            return Ok(Some(Tags::Any));
        }
        for tag in text.split(',').map(str::trim) {
            // Entity tags of this agent contain no comma.
            if tag.len() < 2 || !tag.trim_start_matches("W/").starts_with('"') || !tag.ends_with('"') {
                let expected = format!("`*` or entity tags in double quotes in {field}");
                return Err(bad_request(&expected, "something else"));
            }
            these.push(tag.to_owned());
        }
    }
    Ok((!these.is_empty()).then_some(Tags::These(these)))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
    use metadata_content::source::RecordSource;
    use metadata_feed::registry::RecordId;
    use std::time::Duration;

    use super::{Named, PortWait, RequestConditions, range, read};

    fn uri(text: &str) -> Uri {
        text.parse().expect("a URL")
    }

    #[test]
    fn a_url_has_name_source_and_wait() {
        let second = Duration::from_secs(1);
        for (path, source, name, timeout) in [
            ("web-1", RecordSource::Api, "web-1", None),
            ("ns/web-1", RecordSource::Api, "ns/web-1", None),
            ("ns%2Fweb%2d1?source=api", RecordSource::Api, "ns/web-1", None),
            ("a?wait=attached", RecordSource::Api, "a", Some(5 * second)),
            ("a?timeout=1500ms&wait=attached", RecordSource::Api, "a", Some(second * 3 / 2)),
            ("a?wait=attached&timeout=1m", RecordSource::Api, "a", Some(60 * second)),
            ("a?wait=attached&timeout=5", RecordSource::Api, "a", Some(5 * second)),
        ] {
            let named = read(&uri(&format!("/v1/instances/{path}")), &Method::PUT).expect(path);
            let wait = timeout.map(|timeout| PortWait { timeout });
            assert_eq!(named, Named { id: RecordId::new(source, name), wait }, "{path}");
        }
        let named = read(&uri("/v1/instances/a?source=file"), &Method::GET).expect("any source can be read");
        assert_eq!(named.id, RecordId::new(RecordSource::File, "a"));
        let named = read(&uri("/v1/instances/a%20b.yaml?source=file"), &Method::GET).expect("a file's name");
        assert_eq!(named.id, RecordId::new(RecordSource::File, "a b.yaml"));
    }

    #[test]
    fn an_invalid_url_is_refused_with_what_is_allowed() {
        let long = format!("{}?", "a".repeat(254));
        for (method, path, status, said) in [
            (Method::PUT, "a//b", 400, "joined by `/`"),
            (Method::PUT, "../b", 400, "joined by `/`"),
            (Method::PUT, "a%00", 400, "letters, digits"),
            (Method::PUT, "a%ff", 400, "UTF-8"),
            (Method::PUT, &long, 400, "1 to 253"),
            (Method::PUT, "a?wait=booted", 400, "wait=attached"),
            (Method::PUT, "a?timeout=5s", 400, "`timeout` alone"),
            (Method::PUT, "a?wait=attached&timeout=61s", 400, "at most 60 s"),
            (Method::PUT, "a?wait=attached&timeout=5d", 400, "500ms"),
            (Method::PUT, "a?wait=attached&timeout=4294967295m", 400, "at most 60 s"),
            (Method::PUT, "a?source=file", 403, "where they come from"),
            (Method::PUT, "a?source=hook", 403, "where they come from"),
            (Method::DELETE, "a?source=kubevirt", 403, "where they come from"),
            (Method::DELETE, "a?wait=attached", 400, "source="),
            (Method::GET, "a?source=post", 400, "api, file, hook, kubevirt, proxmox, openstack"),
        ] {
            let problem = read(&uri(&format!("/v1/instances/{path}")), &method).expect_err(path);
            assert_eq!(problem.status, status, "{path}");
            assert!(problem.detail.contains(said), "{path}: {}", problem.detail);
        }
    }

    #[test]
    fn a_list_continues_after_a_name() {
        let (source, after) = range(&uri("/v1/instances?source=api&after=api/ns/a")).expect("good");
        assert_eq!(
            (source, after),
            (Some(RecordSource::Api), Some(RecordId::new(RecordSource::Api, "ns/a")))
        );
        assert_eq!(range(&uri("/v1/instances")).expect("good"), (None, None));
        for (query, said) in [
            ("after=x/y", "`after=` with `next`"),
            ("after=web-1", "`after=` with `next`"),
            ("source=x", "one of the sources"),
            ("limit=5", "`limit`"),
        ] {
            let problem = range(&uri(&format!("/v1/instances?{query}"))).expect_err(query);
            assert_eq!(problem.status, 400, "{query}");
            assert!(problem.detail.contains(said), "{query}: {}", problem.detail);
        }
    }

    fn read_conditions(fields: &[(HeaderName, &'static str)]) -> Result<RequestConditions, u16> {
        let mut head = HeaderMap::new();
        for (field, value) in fields {
            head.append(field, HeaderValue::from_static(value));
        }
        RequestConditions::read(&head).map_err(|problem| problem.status)
    }

    #[test]
    fn a_change_is_made_when_its_conditions_hold() {
        let (is, not) = (header::IF_MATCH, header::IF_NONE_MATCH);
        let id = RecordId::new(RecordSource::Api, "a");
        for (fields, etag, holds) in [
            (&[][..], None, true),
            (&[], Some("\"1\""), true),
            (&[(is.clone(), "\"1\"")], Some("\"1\""), true),
            (&[(is.clone(), "\"0\", \"1\"")], Some("\"1\""), true),
            (&[(is.clone(), "\"0\""), (is.clone(), "\"1\"")], Some("\"1\""), true),
            (&[(is.clone(), "\"2\"")], Some("\"1\""), false),
            // A strong comparison: a weak tag matches nothing (RFC 9110 §13.1.1).
            (&[(is.clone(), "W/\"1\"")], Some("\"1\""), false),
            (&[(is.clone(), "\"1\"")], None, false),
            (&[(is.clone(), "*")], Some("\"1\""), true),
            (&[(is.clone(), "*")], None, false),
            (&[(not.clone(), "*")], None, true),
            (&[(not.clone(), "*")], Some("\"1\""), false),
            (&[(not.clone(), "\"1\"")], Some("\"1\""), false),
            (&[(not.clone(), "\"2\"")], Some("\"1\""), true),
        ] {
            let conditions = read_conditions(fields).expect("fields as they should be");
            assert_eq!(conditions.check(&id, etag).is_ok(), holds, "{fields:?} of {etag:?}");
        }
    }

    #[test]
    fn a_malformed_tag_is_refused() {
        for value in ["1", "\"1", "", "\"1\" \"2", "*, \"1\"x"] {
            assert_eq!(read_conditions(&[(header::IF_MATCH, value)]), Err(400), "{value}");
        }
    }
}
