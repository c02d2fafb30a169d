//! The handlers in front of a control loop that holds only records and their tags.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};

use super::super::listen::{self, CONTROL_CONNECTIONS, LIFE};
use super::super::{ControlRequest, ControlRequests, Routers, SocketListener};
use super::{BODY_MAX, CheckedRegistration, EVENT_WAITS, InstanceRequest, OPENAPI, Registrar, WAITS, routes};
use crate::agent::Health;
use crate::agent::node::{ChangedEvents, ClearedData, RegistrationConflict, TaggedRecord};
use crate::agent::registration_store::RegistrationStore;
use crate::agent::slots::IdentityName;
use crate::config::Config;
use metadata_common::port::PortName;
use metadata_content::mailbox::Mailbox;
use metadata_content::record::event::EVENTS_PER_VM;
use metadata_content::record::{Record, RecordLimits};
use metadata_content::sink::Outbox;
use metadata_content::source::RecordSource;
use metadata_control::instances::{Instance, InstancePort, NAME_MAX, Page};
use metadata_control::status::{GuestState, InstanceState};
use metadata_feed::memory_budget::MemoryExhausted;
use metadata_feed::registry::RecordId;
use metadata_feed::state::save_queue::{SaveQueue, StateFile};

const PATIENCE: Duration = Duration::from_secs(20);

/// The state of the control loop.
#[derive(Default)]
struct Book {
    registered: BTreeMap<RecordId, TaggedRecord>,
    /// The result of the next check.
    clash: Option<RegistrationConflict>,
    /// All ports are attached.
    attached: bool,
    /// Requests that wait until all ports are attached.
    waiting: Vec<InstanceRequest>,
    /// Writes what guests wrote.
    saves: SaveQueue,
    mailbox: Option<Arc<Mailbox>>,
}

impl Book {
    fn instance(&self, id: &RecordId) -> Option<Instance> {
        let TaggedRecord { etag, .. } = self.registered.get(id)?;
        let (state, bound) = match self.attached {
            true => (InstanceState::Served, GuestState::Served),
            false => (InstanceState::Waiting, GuestState::Unbound),
        };
        Some(Instance {
            name: id.key.to_string(),
            source: id.source,
            state,
            in_force: true,
            shadowed_by: None,
            refused: None,
            etag: Some(etag.to_string()),
            generation: Some(1),
            vm: None,
            ports: vec![InstancePort {
                port: "tap0".into(),
                mac: "52:54:00:00:00:01".into(),
                state: bound,
                held_by: None,
                reason: None,
            }],
            change: None,
            record: None,
            withheld: None,
        })
    }

    fn answer(&mut self, ask: InstanceRequest) {
        match ask {
            InstanceRequest::List { reply, .. } => {
                let instances = self.registered.keys().filter_map(|id| self.instance(id)).collect();
                reply.send(Page { instances, next: None }).unwrap_or_default();
            }
            InstanceRequest::Look { id, reply } => {
                let record = self.registered.get(&id).map(|tagged| Arc::clone(&tagged.record));
                _ = reply.send(self.instance(&id).map(|instance| (instance, record)));
            }
            InstanceRequest::Tag { id, reply } => {
                _ = reply.send(self.registered.get(&id).map(|t| Arc::clone(&t.etag)))
            }
            InstanceRequest::Check { id, reply, .. } => {
                let tag = self.registered.get(&id).map(|tagged| Arc::clone(&tagged.etag));
                _ = reply.send(CheckedRegistration {
                    tag,
                    owner: None,
                    admitted: self.clash.take().map_or(Ok(()), Err),
                });
            }
            InstanceRequest::Put { id, tagged, reply } => {
                self.registered.insert(id.clone(), tagged);
                _ = reply.send(self.instance(&id).expect("it was just put in"));
            }
            InstanceRequest::Remove { id, reply } => {
                self.registered.remove(&id);
                self.waiting
                    .retain(|ask| !matches!(ask, InstanceRequest::Wait { id: waits, .. } if *waits == id));
                reply.send(()).unwrap_or_default();
            }
            InstanceRequest::Events { id, change, reply } => {
                let record = self.registered.get(&id).map(|tagged| &tagged.record);
                let mailbox =
                    self.mailbox.get_or_insert_with(|| Mailbox::new("vm", &Outbox::detached()).into());
                let done = record.map(|record| {
                    let changed = change.apply(mailbox.events(), record.instance_id(), 0)?;
                    let (mailbox, saves) = (Arc::clone(mailbox), self.saves.clone());
                    Ok(ChangedEvents { changed, mailbox, vm: record.owner(), saves })
                });
                _ = reply.send(done);
            }
            InstanceRequest::Clear { id, reply } => {
                let cleared = self.registered.get(&id).map(|tagged| ClearedData {
                    vm: tagged.record.owner(),
                    found: true,
                    saves: self.saves.clone(),
                });
                _ = reply.send(cleared);
            }
            InstanceRequest::Wait { id, reply } if self.attached => {
                _ = reply.send(self.instance(&id).expect("it is there"))
            }
            wait @ InstanceRequest::Wait { .. } => self.waiting.push(wait),
        }
    }

    fn attach(&mut self) {
        self.attached = true;
        std::mem::take(&mut self.waiting).into_iter().for_each(|ask| self.answer(ask));
    }
}

/// A control socket and a simulated control loop.
struct Bench {
    room: tempfile::TempDir,
    registrar: Arc<Registrar>,
    book: Arc<Mutex<Book>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Bench {
    fn new() -> Self {
        let room = tempfile::tempdir().expect("a directory");
        let config = Config { state: Some(room.path().into()), ..Config::default() };
        let registrar = Registrar::new(&config);
        let Routers { control, requests, .. } =
            Routers::new(Health::new(vec![]), Arc::clone(&registrar), None);
        let listener = UnixListener::bind(room.path().join("socket")).expect("a socket");
        let listener = SocketListener::from(listener);
        let door = tokio::spawn(async { listen::serve(listener, control).await.expect("a door stays open") });
        let book = Arc::new(Mutex::new(Book::default()));
        let control = tokio::spawn(work(requests, Arc::clone(&book)));
        Self { room, registrar, book, tasks: vec![door, control] }
    }

    fn socket(&self) -> PathBuf {
        self.room.path().join("socket")
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().expect("nobody died with it")
    }

    fn kept(&self) -> Vec<RecordId> {
        let records = RegistrationStore::below(Some(self.room.path())).read(&RecordLimits::DEFAULT);
        records.into_iter().map(|(id, _)| id).collect()
    }

    async fn ask(&self, method: &str, path: &str, fields: &[&str], body: &str) -> Said {
        ask(&self.socket(), method, path, fields, body).await
    }

    async fn put(&self, name: &str, fields: &[&str], generation: u64) -> Said {
        self.ask("PUT", &format!("/v1/instances/{name}"), fields, &record(generation)).await
    }
}

async fn work(mut requests: ControlRequests, book: Arc<Mutex<Book>>) {
    while let Some(request) = requests.recv().await {
        let ControlRequest::Instances(ask) = request else { panic!("{request:?}") };
        book.lock().expect("nobody died with it").answer(ask);
    }
}

/// An answer.
#[derive(Debug)]
struct Said {
    status: u16,
    head: String,
    body: Value,
}

impl Said {
    fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    fn etag(&self) -> &str {
        self.field("etag").expect("a tag")
    }
}

async fn ask(socket: &PathBuf, method: &str, path: &str, fields: &[&str], body: &str) -> Said {
    let mut stream = UnixStream::connect(socket).await.expect("a connection");
    let length = body.len();
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    fields.iter().for_each(|field| text.extend([field, "\r\n"]));
    if method != "GET" {
        text.push_str(&format!("Content-Length: {length}\r\n"));
    }
    text.push_str("\r\n");
    text.push_str(body);
    // The answer may arrive before the whole request is sent.
    stream.write_all(text.as_bytes()).await.unwrap_or_default();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    read.expect("an answer in time").unwrap_or_default();
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(body.is_empty() || body.ends_with('\n'), "{method} {path}: no newline after {body}");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Said { status, head: head.into(), body: serde_json::from_str(body).unwrap_or_default() }
}

fn record(generation: u64) -> String {
    json!({
        "schema": "vmrecord/1", "generation": generation,
        "vm": {"uuid": "7c0f1a52-3b5e-4d1a-9d2c-00000000000a", "name": "web",
               "project": {"id": "p", "number": 1, "account": "000000000000"}},
        "hostname": {"short": "web"}, "placement": {"region": "r", "zone": "z"},
        "user_data": {"text": "Password-0"},
    })
    .to_string()
}

#[tokio::test]
async fn a_record_is_stored_before_it_is_in_force_and_shown_without_secrets() {
    let bench = Bench::new();
    let id = RecordId::new(RecordSource::Api, "ns/web");
    let first = bench.put("ns/web", &[], 1).await;
    assert_eq!((first.status, first.body["name"].as_str()), (201, Some("ns/web")), "{first:?}");
    assert_eq!(bench.kept(), [id]);
    let again = bench.put("ns/web", &["Content-Type: application/yaml"], 1).await;
    assert_eq!((again.status, again.etag()), (200, first.etag()), "the same in another form is the same");
    let second = bench.put("ns%2Fweb", &[], 2).await;
    assert!(second.status == 200 && second.etag() != first.etag(), "{second:?}");
    let seen = bench.ask("GET", "/v1/instances/ns/web", &[], "").await;
    assert_eq!((seen.status, seen.etag()), (200, second.etag()));
    assert_eq!(seen.body["record"]["generation"], 2);
    assert_eq!(seen.body["withheld"], json!(["user_data"]));
    assert!(!seen.body.to_string().contains("Password"), "{seen:?}");
    let known =
        bench.ask("GET", "/v1/instances/ns/web", &[&format!("If-None-Match: {}", seen.etag())], "").await;
    assert_eq!((known.status, known.body), (304, Value::Null));
    for _ in 0..2 {
        assert_eq!(bench.ask("DELETE", "/v1/instances/ns/web", &[], "").await.status, 204);
    }
    assert_eq!(bench.kept(), []);
    assert_eq!(bench.ask("GET", "/v1/instances/ns/web", &[], "").await.status, 404);
}

#[tokio::test]
async fn exactly_one_of_several_clients_that_make_the_same_change_succeeds() {
    let bench = Bench::new();
    let first = bench.put("web", &[], 1).await;
    for (name, field) in [("web", format!("If-Match: {}", first.etag())), ("new", "If-None-Match: *".into())]
    {
        let mut clients = JoinSet::new();
        for n in 0..8 {
            let (socket, field, path) = (bench.socket(), field.clone(), format!("/v1/instances/{name}"));
            clients.spawn(async move { ask(&socket, "PUT", &path, &[&field], &record(10 + n)).await.status });
        }
        let mut statuses = clients.join_all().await;
        statuses.sort_unstable();
        let won = if name == "web" { 200 } else { 201 };
        assert_eq!(statuses, [&[won][..], &[412; 7]].concat(), "{name}");
    }
    let stale = bench.ask("DELETE", "/v1/instances/web", &[&format!("If-Match: {}", first.etag())], "").await;
    assert_eq!((stale.status, stale.body["type"].as_str()), (412, Some("urn:xdp-imds:precondition")));
    assert_eq!(bench.kept().len(), 2);
}

#[tokio::test]
async fn a_conflict_is_reported_and_nothing_changes() {
    let by = RecordId::new(RecordSource::File, "web.yaml");
    let identity = IdentityName { port: PortName::local("tap0"), mac: Default::default() };
    let tenant = metadata_common::share::Tenant::Operator;
    let no_room =
        MemoryExhausted { wants: 3 << 20, used: 0, limit: 1 << 20, tenant, held: 0, share: 1 << 20 };
    for (clash, status, said) in [
        (RegistrationConflict::Taken { identity, by: by.clone() }, 409, "on port tap0 belongs to web.yaml"),
        (RegistrationConflict::SameVm { by }, 409, "registered as web.yaml"),
        (RegistrationConflict::Full { most: 2 }, 507, "at most 2 instances"),
        (RegistrationConflict::Memory(no_room), 507, "web: it would take 3 MiB"),
        (RegistrationConflict::Unplaced, 422, "network.nics[].port"),
    ] {
        let bench = Bench::new();
        let named = if status == 409 { json!({"source": "file", "name": "web.yaml"}) } else { Value::Null };
        bench.book().clash = Some(clash);
        let refused = bench.put("web", &[], 1).await;
        assert_eq!(refused.status, status, "{refused:?}");
        assert!(refused.body["detail"].as_str().is_some_and(|text| text.contains(said)), "{refused:?}");
        assert_eq!(refused.body["conflict"], named);
        assert_eq!((bench.kept(), bench.book().registered.len()), (vec![], 0));
    }
}

#[tokio::test]
async fn a_record_that_cannot_be_stored_does_not_come_into_force() {
    let bench = Bench::new();
    std::fs::write(bench.room.path().join("instances"), "in the way").expect("written");
    let refused = bench.put("web", &[], 1).await;
    assert_eq!((refused.status, refused.body["type"].as_str()), (507, Some("urn:xdp-imds:not-kept")));
    assert!(bench.book().registered.is_empty());
}

#[tokio::test]
async fn a_waiting_client_is_answered_once_ports_are_attached() {
    let bench = Bench::new();
    let socket = bench.socket();
    let waits = tokio::spawn(async move {
        ask(&socket, "PUT", "/v1/instances/web?wait=attached&timeout=15s", &[], &record(1)).await
    });
    while bench.book().waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    assert!(!waits.is_finished(), "answered before");
    bench.book().attach();
    let answer = waits.await.expect("an answer");
    assert_eq!((answer.status, answer.body["state"].as_str()), (201, Some("served")));
}

#[tokio::test]
async fn a_wait_that_is_too_long_is_an_error_and_the_record_stays() {
    let bench = Bench::new();
    let start = Instant::now();
    let answer = bench.ask("PUT", "/v1/instances/web?wait=attached&timeout=300ms", &[], &record(1)).await;
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert_eq!((answer.status, answer.body["type"].as_str()), (504, Some("urn:xdp-imds:not-attached")));
    assert_eq!(answer.body["registered"]["state"], "waiting");
    assert!(answer.body["detail"].as_str().is_some_and(|text| text.contains("tap0")), "{answer:?}");
    assert_eq!(bench.kept().len(), 1);
    let gone = bench.socket();
    let waits = tokio::spawn(async move {
        ask(&gone, "PUT", "/v1/instances/web?wait=attached&timeout=15s", &[], &record(1)).await
    });
    while bench
        .book()
        .waiting
        .iter()
        .all(|ask| matches!(ask, InstanceRequest::Wait { reply, .. } if reply.is_closed()))
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.ask("DELETE", "/v1/instances/web", &[], "").await.status, 204);
    assert_eq!(waits.await.expect("an answer").status, 404, "the record was removed");
}

#[tokio::test]
async fn clients_wait_up_to_the_limit_and_others_are_served_meanwhile() {
    let bench = Bench::new();
    let mut waiting = JoinSet::new();
    for n in 0..WAITS {
        let (socket, path) = (bench.socket(), format!("/v1/instances/web-{n}?wait=attached&timeout=15s"));
        waiting.spawn(async move { ask(&socket, "PUT", &path, &[], &record(1)).await.status });
    }
    while bench.book().waiting.len() < WAITS {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let path = "/v1/instances/more?wait=attached&timeout=15s";
    let refused = bench.ask("PUT", path, &[], &record(1)).await;
    assert_eq!((refused.status, refused.field("retry-after")), (503, Some("1")), "{refused:?}");
    assert_eq!(bench.ask("GET", "/v1/instances/more", &[], "").await.status, 404, "nothing was changed");
    // More other clients connect than the limit allows, and no waiting client loses its connection.
    let mut idle = Vec::new();
    for _ in 0..2 * CONTROL_CONNECTIONS {
        idle.push(UnixStream::connect(bench.socket()).await.expect("a connection"));
        assert_eq!(bench.put("other", &[], 1).await.status / 100, 2);
    }
    bench.book().attach();
    assert_eq!(waiting.join_all().await, [201; WAITS]);
    assert_eq!(bench.ask("PUT", path, &[], &record(1)).await.status, 201, "there is room again");
}

#[tokio::test]
async fn a_waiting_client_keeps_its_connection_beyond_its_life() {
    let bench = Bench::new();
    tokio::time::pause();
    let socket = bench.socket();
    let waits = tokio::spawn(async move {
        let mut stream = UnixStream::connect(&socket).await.expect("a connection");
        let body = record(1);
        let head =
            "PUT /v1/instances/web?wait=attached&timeout=60s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
        let text = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(text.as_bytes()).await.expect("room");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        answer
    });
    // Writing to disk takes real time, and the runtime's clock stands still meanwhile.
    while bench.book().waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    tokio::time::advance(LIFE + Duration::from_secs(5)).await;
    bench.book().attach();
    let answer = waits.await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
}

#[tokio::test]
async fn a_record_of_another_media_type_is_refused() {
    let bench = Bench::new();
    let long = format!("/v1/instances/{}", "a".repeat(NAME_MAX + 1));
    let huge = " ".repeat(BODY_MAX + 1);
    for (path, field, body, status) in [
        ("/v1/instances/a", "Content-Type: text/csv", "a,b", 415),
        ("/v1/instances/a", "X: y", "{", 400),
        ("/v1/instances/a", "If-Match: 1", &record(1), 400),
        ("/v1/instances/a", "X: y", r#"{"schema": "vmrecord/2"}"#, 422),
        ("/v1/instances/a", "X: y", huge.as_str(), 413),
        ("/v1/instances/a?source=file", "X: y", &record(1), 403),
        (&long, "X: y", &record(1), 400),
    ] {
        let refused = bench.ask("PUT", path, &[field], body).await;
        assert_eq!(refused.status, status, "{field} {refused:?}");
        assert_eq!(refused.field("content-type"), Some("application/problem+json"));
        assert_eq!(refused.body["status"], status);
    }
    assert_eq!(bench.kept(), []);
}

fn document() -> Value {
    serde_json::from_str(OPENAPI).expect("JSON")
}

#[tokio::test]
async fn the_openapi_document_has_exactly_the_routes_and_their_methods() {
    let bench = Bench::new();
    let document = document();
    let described = document["paths"].as_object().expect("paths");
    let real: BTreeSet<_> = routes().map(|(path, _)| path.replace("{*", "{")).into();
    assert_eq!(described.keys().cloned().collect::<BTreeSet<_>>(), real);
    for (path, item) in described {
        let example = path.replace("{name}", "x");
        for method in [Method::GET, Method::PUT, Method::DELETE, Method::POST, Method::PATCH] {
            let is_described = item.get(method.as_str().to_ascii_lowercase()).is_some();
            let answered = bench.ask(method.as_str(), &example, &[], "{}").await.status != 405;
            assert_eq!(answered, is_described, "{method} {path}");
        }
    }
    let served = bench.ask("GET", "/v1/openapi.json", &[], "").await;
    assert_eq!((served.status, served.body), (200, document));
}

#[tokio::test]
async fn what_the_socket_does_not_have_is_refused_with_a_reason_and_a_last_newline() {
    let bench = Bench::new();
    for (method, path, status, reason) in [
        ("GET", "/v1/nothing", 404, "there is no /v1/nothing"),
        ("POST", "/v1/instances/x", 405, "/v1/instances/x does not take POST"),
        ("PUT", "/v1/status", 405, "/v1/status does not take PUT"),
    ] {
        let refused = bench.ask(method, path, &[], "{}").await;
        let kinds = &document()["components"]["schemas"]["Problem"]["properties"]["type"]["enum"];
        assert!(kinds.as_array().is_some_and(|kinds| kinds.contains(&refused.body["type"])), "{refused:?}");
        assert_eq!(
            (refused.status, refused.field("content-type")),
            (status, Some("application/problem+json"))
        );
        assert!(
            refused.body["detail"].as_str().is_some_and(|detail| detail.starts_with(reason)),
            "{refused:?}"
        );
        assert_eq!(refused.field("allow").is_some(), status == 405, "{refused:?}");
    }
}

#[tokio::test]
async fn answers_match_the_openapi_document() {
    let bench = Bench::new();
    let document = document();
    let by = RecordId::new(RecordSource::Api, "x");
    let (good, two) = (record(1), record(2));
    let (web, data) = ("/v1/instances/{name}", "/v1/guest-data/{name}");
    let events = "/v1/events/{name}";
    let event =
        r#"{"id": "e", "kind": "freeze", "not_before": "2030-01-01T00:00:00Z", "description": "why"}"#;
    let wait = "?wait=attached&timeout=1ms";
    let mut seen = BTreeSet::new();
    for (method, path, query, field, body, clash, expected) in [
        ("PUT", web, "", "X: y", good.as_str(), None, 201),
        ("PUT", web, "", "X: y", &good, None, 200),
        ("PUT", web, wait, "X: y", &two, None, 504),
        ("PUT", web, "", "If-Match: \"0\"", &good, None, 412),
        ("PUT", web, "", "X: y", &good, Some(RegistrationConflict::SameVm { by }), 409),
        ("PUT", web, "", "X: y", &good, Some(RegistrationConflict::Full { most: 1 }), 507),
        ("PUT", web, "", "X: y", "{}", None, 422),
        ("PUT", web, "", "Content-Type: a/b", &good, None, 415),
        ("PUT", web, "?wait=x", "X: y", &good, None, 400),
        ("PUT", web, "?source=file", "X: y", &good, None, 403),
        ("GET", web, "", "X: y", "", None, 200),
        ("GET", web, "", "If-None-Match: *", "", None, 304),
        ("GET", web, "?source=hook", "X: y", "", None, 404),
        ("GET", web, "?x=y", "X: y", "", None, 400),
        ("GET", "/v1/instances", "", "X: y", "", None, 200),
        ("GET", "/v1/instances", "?x=y", "X: y", "", None, 400),
        ("DELETE", web, "", "If-Match: \"0\"", "", None, 412),
        ("GET", events, "", "X: y", "", None, 200),
        ("PUT", events, "", "X: y", event, None, 200),
        ("PUT", events, "", "X: y", r#"{"id": "e", "kind": "fire"}"#, None, 422),
        ("PUT", events, "?id=e", "X: y", event, None, 400),
        ("PUT", events, "?source=file", "X: y", event, None, 404),
        ("GET", events, "?id=e&wait=acknowledged&timeout=1ms", "X: y", "", None, 504),
        ("GET", events, "?id=x", "X: y", "", None, 404),
        ("GET", events, "?id=e&wait=acknowledged&timeout=31s", "X: y", "", None, 400),
        ("GET", events, "?wait=acknowledged", "X: y", "", None, 400),
        ("DELETE", events, "?id=x", "X: y", "", None, 404),
        ("DELETE", events, "", "X: y", "", None, 400),
        ("DELETE", events, "?id=e", "X: y", "", None, 200),
        ("DELETE", data, "", "X: y", "", None, 204),
        ("DELETE", data, "?source=file", "X: y", "", None, 404),
        ("DELETE", data, "?x=y", "X: y", "", None, 400),
        ("DELETE", web, "", "X: y", "", None, 204),
        ("GET", "/v1/openapi.json", "", "X: y", "", None, 200),
    ] {
        bench.book().clash = clash;
        let said =
            bench.ask(method, &format!("{}{query}", path.replace("{name}", "web")), &[field], body).await;
        assert_eq!(said.status, expected, "{method} {path}{query} {field}: {said:?}");
        let operation = &document["paths"][path][method.to_ascii_lowercase()];
        let described = resolved(&document, &operation["responses"][said.status.to_string()]);
        assert!(!described.is_null(), "{method} {path} does not describe {expected}");
        let content = described["content"].as_object();
        let media = said.field("content-type");
        assert_eq!(
            content.map(|content| content.keys().next().map(String::as_str)),
            media.map(Some),
            "{said:?}"
        );
        if let Some(media) = media {
            let schema = &described["content"][media]["schema"];
            if let Err(reason) = fits(&document, schema, &said.body) {
                panic!("{method} {path} {expected}: {reason} in {:#}", said.body);
            }
        }
        seen.insert((method, path, expected));
    }
    let ours: Value = serde_json::from_str(&good).expect("JSON");
    fits(&document, &document["components"]["schemas"]["Record"], &ours).expect("a record");
    fits(&document, &document["components"]["schemas"]["Instance"], &json!({"name": "x"}))
        .expect_err("half an instance");
    assert_eq!(seen.len(), 33);
}

#[tokio::test]
async fn events_of_the_record_are_its_sources_and_added_ones_have_a_limit() {
    let bench = Bench::new();
    assert_eq!(bench.put("web", &[], 1).await.status, 201);
    let mut with_event: Value = serde_json::from_str(&record(1)).expect("JSON");
    with_event["events"] = json!([{"id": "of-record", "kind": "freeze"}]);
    let (with_event, _) = Record::parse("web.json", &with_event.to_string()).expect("a record");
    assert_eq!(bench.ask("GET", "/v1/events/web", &[], "").await.status, 200);
    let mailbox = bench.book().mailbox.clone().expect("somebody asked for the events");
    mailbox.events().note_record(with_event.instance_id(), &with_event.events, 0);
    let put = async |id: &str| {
        bench.ask("PUT", "/v1/events/web", &[], &json!({"id": id, "kind": "reboot"}).to_string()).await
    };
    let refused = put("of-record").await;
    assert_eq!((refused.status, &refused.body["type"]), (409, &json!("urn:xdp-imds:clash")));
    assert_eq!(bench.ask("DELETE", "/v1/events/web?id=of-record", &[], "").await.status, 409);
    for n in 0..EVENTS_PER_VM {
        assert_eq!(put(&format!("e{n}")).await.status, 200, "{n}");
    }
    let refused = put("more").await;
    assert_eq!((refused.status, &refused.body["type"]), (507, &json!("urn:xdp-imds:full")));
    let one = bench.ask("GET", "/v1/events/web?id=e3", &[], "").await;
    assert_eq!(one.body["events"].as_array().map(Vec::len), Some(1), "{one:?}");
}

#[tokio::test]
async fn clients_that_wait_for_guests_leave_room_for_others_and_free_their_place_when_they_go() {
    let bench = Bench::new();
    assert_eq!(bench.put("web", &[], 1).await.status, 201);
    let event = json!({"id": "e", "kind": "freeze"}).to_string();
    assert_eq!(bench.ask("PUT", "/v1/events/web", &[], &event).await.status, 200);
    let path = "/v1/events/web?id=e&wait=acknowledged&timeout=30s";
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut waiting = Vec::new();
    for _ in 0..EVENT_WAITS {
        let mut stream = UnixStream::connect(bench.socket()).await.expect("a connection");
        stream.write_all(head.as_bytes()).await.expect("room");
        waiting.push(stream);
    }
    let free = async |places: usize| {
        let is_free = async {
            while bench.registrar.event_waits.available_permits() != places {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, is_free).await.is_ok()
    };
    assert!(free(0).await, "all of them wait");
    let refused = bench.ask("GET", path, &[], "").await;
    assert_eq!((refused.status, &refused.body["type"]), (503, &json!("urn:xdp-imds:busy")), "{refused:?}");
    for n in 0..8 {
        assert_eq!(bench.ask("GET", "/v1/events/web", &[], "").await.status, 200, "{n}");
    }
    // A hook that is killed closes its socket and says nothing more.
    waiting.truncate(EVENT_WAITS / 2);
    assert!(free(EVENT_WAITS / 2).await, "the places of those who went");
    let mailbox = bench.book().mailbox.clone().expect("a mailbox");
    mailbox.events().acknowledge("e", 60);
    for mut stream in waiting {
        let mut status = [0; 12];
        let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut status)).await;
        read.expect("an answer in time").expect("an answer");
        assert_eq!(&status, b"HTTP/1.1 200");
    }
    assert!(free(EVENT_WAITS).await, "nobody waits any more");
}

/// The schema a `$ref` refers to.
fn resolved<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(way) => document.pointer(way.trim_start_matches('#')).expect("what is referred to is there"),
        None => value,
    }
}

/// Whether a value fits a schema. Supports the keywords of JSON Schema that the document uses.
fn fits(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let schema = resolved(document, schema);
    for (word, wanted) in schema.as_object().expect("a schema") {
        let good = match word.as_str() {
            "type" => match wanted.as_str().expect("one type") {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "integer" => value.is_i64() || value.is_u64(),
                "boolean" => value.is_boolean(),
                other => panic!("the type {other}"),
            },
            "enum" => wanted.as_array().expect("values").contains(value),
            "const" => wanted == value,
            "minimum" => value.as_f64() >= wanted.as_f64(),
            "maxItems" => value.as_array().is_some_and(|items| Some(items.len() as u64) <= wanted.as_u64()),
            "required" => wanted
                .as_array()
                .expect("names")
                .iter()
                .all(|name| !value[name.as_str().expect("a name")].is_null()),
            "additionalProperties" => {
                let known = schema["properties"].as_object().expect("properties");
                value.as_object().is_some_and(|fields| fields.keys().all(|field| known.contains_key(field)))
            }
            "items" => {
                value.as_array().into_iter().flatten().try_for_each(|item| fits(document, wanted, item))?;
                true
            }
            "properties" => {
                for (name, schema) in wanted.as_object().expect("schemas") {
                    value.get(name).map_or(Ok(()), |value| fits(document, schema, value))?;
                }
                true
            }
            "description" => true,
            other => panic!("the word {other}"),
        };
        if !good {
            return Err(format!("{word}: {wanted}: {value}"));
        }
    }
    Ok(())
}

#[tokio::test]
async fn what_a_guest_wrote_is_removed_from_the_disk_before_the_answer() {
    let bench = Bench::new();
    bench.put("web", &[], 1).await;
    let vm = bench.book().registered.values().next().expect("a record").record.owner();
    let file = bench.room.path().join("written");
    let write = |fails: bool| {
        let file = file.clone();
        let write = move || {
            if fails { Err(std::io::ErrorKind::StorageFull.into()) } else { std::fs::write(&file, "") }
        };
        bench.book().saves.submit(StateFile::Mailbox(vm.as_str().into()), write);
    };
    write(true);
    let refused = bench.ask("DELETE", "/v1/guest-data/web", &[], "").await;
    assert_eq!(refused.status, 507, "{refused:?}");
    assert!(
        refused.body["detail"].as_str().is_some_and(|detail| detail.contains("tries again")),
        "{refused:?}"
    );
    write(false);
    assert_eq!(bench.ask("DELETE", "/v1/guest-data/web", &[], "").await.status, 204);
    assert!(file.exists(), "answered before it was written");
}
