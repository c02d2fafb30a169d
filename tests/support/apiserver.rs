//! A simulated Kubernetes API server for VMIs: paged lists, watches from a resource version, label selectors,
//! bookmarks, 410 for expired versions, pauses within an answer, and failures of real servers ([`Manner`]).
//!
//! It serves HTTP on the loopback and keeps everything in memory. Watch events follow the Kubernetes API
//! concepts (<https://kubernetes.io/docs/reference/using-api/api-concepts/>): an object with labels that start to match
//! is `ADDED`, and one with labels that stop matching is `DELETED`.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::Body;
use axum::extract::{Path as Named, Query, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, patch, post};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::net::TcpSocket;
use tokio::sync::{mpsc, watch};

use crate::netns::Namespace;
use crate::schema::Schemas;

/// Limit of connections that wait to be accepted.
const BACKLOG: u32 = 128;
/// Bytes of a chunk before the pause within it.
const PART: usize = 40;

/// The server's behaviour for VMI requests. A change to any value but [`Well`](Self::Well) ends all watches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Manner {
    /// Answers correctly.
    #[default]
    Well,
    /// 503, as from a load balancer without backends.
    Away,
    /// The connection breaks before the end of the answer.
    Breaking,
    /// 403: the agent's role is missing.
    Forbidding,
    /// 404: the cluster has no such kind.
    Lacking,
    /// Lists succeed. Every watch gets 200, and an event in the stream says that its version has expired.
    Expired,
    /// Lists succeed. Every watch gets the status 410.
    Gone,
    /// Lists succeed. Every watch ends at once.
    Brief,
}

/// A server, which stops when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// The bound socket, until the server listens.
    socket: Option<TcpSocket>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<Kept>,
    /// The newest resource version, and the number of outages.
    changed: watch::Sender<(u64, u64)>,
}

#[derive(Debug, Default)]
struct Kept {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Changes: the version, the object before and after.
    history: Vec<(u64, Option<Value>, Option<Value>)>,
    /// Watches from an older version get an event with 410.
    oldest: u64,
    /// The newest change that [`ApiServer::compact`] dropped.
    compacted: u64,
    manner: Manner,
    outages: u64,
    /// Number of requests for VMIs, with any answer.
    requests: u64,
    /// The credentials of the last request.
    authorization: Option<String>,
    /// Pause before each answer to a list.
    list_pause: Duration,
    /// Pause within each event of a watch.
    part_pause: Duration,
    bookmarks: u64,
    lists: u64,
    watches: u64,
    expired: u64,
    events: Vec<Value>,
    config_maps: BTreeMap<String, Value>,
}

impl ApiServer {
    /// Starts a server without objects.
    ///
    /// # Errors
    /// No port is free, or no thread can be started.
    pub fn start() -> Result<Self> {
        Self::on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot bind a port")?)
    }

    /// Like [`start`](Self::start), on the loopback of a namespace.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_in(ns: &Namespace) -> Result<Self> {
        Self::on(ns.run_in(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).context("cannot bind a port")?)
    }

    /// Reserves a port that refuses connections until the server [listens](Self::listen).
    ///
    /// # Errors
    /// No port is free.
    pub fn start_refusing() -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((Ipv4Addr::LOCALHOST, 0).into()).context("cannot bind a port")?;
        let mut server = Self::at(socket.local_addr()?);
        server.socket = Some(socket);
        Ok(server)
    }

    /// Starts to accept connections.
    ///
    /// # Errors
    /// The server already listens, or no thread can be started.
    pub fn listen(&mut self) -> Result<()> {
        let socket = self.socket.take().context("expected a server that does not listen")?;
        self.serve(socket.listen(BACKLOG)?.into_std()?)
    }

    fn on(listener: TcpListener) -> Result<Self> {
        let mut server = Self::at(listener.local_addr()?);
        server.serve(listener)?;
        Ok(server)
    }

    fn at(address: SocketAddr) -> Self {
        let state = Mutex::new(Kept { version: 1, ..Kept::default() });
        let shared = Arc::new(Shared { state, changed: watch::Sender::new((1, 0)) });
        Self { address, shared, socket: None, stop: None, thread: None }
    }

    fn serve(&mut self, listener: TcpListener) -> Result<()> {
        listener.set_nonblocking(true)?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let served = Arc::clone(&self.shared);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("apiserver".into()).spawn(move || {
            runtime.block_on(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                let app = Router::new()
                    .route("/apis/kubevirt.io/v1/virtualmachineinstances", get(vmis))
                    .route("/api/v1/namespaces/{namespace}/events", post(events))
                    .route("/api/v1/namespaces/{namespace}/configmaps/{name}", patch(config_map))
                    .with_state(served);
                tokio::select! {
                    _ = axum::serve(listener, app) => {}
                    _ = stopped => {}
                }
            });
        })?;
        (self.stop, self.thread) = (Some(stop), Some(thread));
        Ok(())
    }

    /// Writes a kubeconfig for this server.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        self.write_kubeconfig_as(path, &json!({}))
    }

    /// Like [`write_kubeconfig`](Self::write_kubeconfig), with a user's credentials.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_kubeconfig_as(&self, path: &Path, user: &Value) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.address)}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": user}],
        });
        std::fs::write(path, config.to_string()).with_context(|| format!("writing {}", path.display()))
    }

    /// Creates or replaces an object.
    ///
    /// # Panics
    /// The object violates KubeVirt's published schema, so that a cluster would reject it.
    pub fn put(&self, object: Value) {
        let found = Schemas::published().findings(&object);
        assert!(found.is_empty(), "{}: {found:?}", name(&object));
        self.put_as_it_is(object);
    }

    /// Like [`put`](Self::put) without a check of the schema, for objects of other KubeVirt versions.
    pub fn put_as_it_is(&self, mut object: Value) {
        let mut state = self.shared.lock();
        state.version += 1;
        let version = state.version;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let before = state.objects.insert(name(&object), object.clone());
        state.history.push((version, before, Some(object)));
        self.shared.tell(&state);
    }

    /// Deletes an object by `namespace/name`.
    pub fn delete(&self, key: &str) {
        let mut state = self.shared.lock();
        let before = state.objects.remove(key);
        state.version += 1;
        let version = state.version;
        state.history.push((version, before, None));
        self.shared.tell(&state);
    }

    /// Drops the history. Watches that start from an older version get an event with 410.
    pub fn forget(&self) {
        let mut state = self.shared.lock();
        state.history.clear();
        state.oldest = state.version;
    }

    /// Drops the history but for the newest `keep` changes, as a server compacts its store. Watches that have not seen
    /// the dropped ones get an event with 410.
    pub fn compact(&self, keep: usize) {
        let mut state = self.shared.lock();
        let dropped = state.history.len().saturating_sub(keep);
        let last = state.history.drain(..dropped).next_back().map(|(version, ..)| version);
        if let Some(version) = last {
            (state.oldest, state.compacted) = (state.oldest.max(version), version);
        }
    }

    /// If `away`, ends all watches and answers all requests with 503. Otherwise serves again.
    pub fn be_away(&self, away: bool) {
        self.behave(if away { Manner::Away } else { Manner::Well });
    }

    /// Sets the server's behaviour.
    pub fn behave(&self, manner: Manner) {
        let mut state = self.shared.lock();
        state.manner = manner;
        state.outages += u64::from(manner != Manner::Well);
        self.shared.tell(&state);
    }

    /// Ends all watches and drops the history, as in a restart. Adds an object that no watch has reported.
    pub fn restart_with(&self, mut object: Value) {
        let mut state = self.shared.lock();
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        state.objects.insert(name(&object), object);
        state.history.clear();
        state.oldest = state.version;
        state.outages += 1;
        self.shared.tell(&state);
    }

    /// Ends all current watches.
    pub fn cut(&self) {
        let mut state = self.shared.lock();
        state.outages += 1;
        self.shared.tell(&state);
    }

    /// Sets the pauses before each list and within each event of a watch.
    pub fn be_slow(&self, list: Duration, part: Duration) {
        let mut state = self.shared.lock();
        (state.list_pause, state.part_pause) = (list, part);
    }

    /// Sends bookmarks to all watches.
    pub fn bookmark(&self) {
        let mut state = self.shared.lock();
        state.version += 1;
        state.bookmarks += 1;
        let version = state.version;
        state.history.push((version, None, None));
        self.shared.tell(&state);
    }

    /// Numbers of answered lists, started watches, and watches that got an event with 410.
    #[must_use]
    pub fn counts(&self) -> (u64, u64, u64) {
        let state = self.shared.lock();
        (state.lists, state.watches, state.expired)
    }

    /// Number of requests for VMIs, with any answer.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.shared.lock().requests
    }

    /// The credentials of the last request for VMIs.
    #[must_use]
    pub fn authorization(&self) -> Option<String> {
        self.shared.lock().authorization.clone()
    }

    /// Returns and forgets the number of created Events.
    #[must_use]
    pub fn take_events(&self) -> usize {
        std::mem::take(&mut self.shared.lock().events).len()
    }

    /// The created Events, as `reason namespace/name`.
    #[must_use]
    pub fn events(&self) -> Vec<String> {
        let text = |event: &Value| {
            let on = &event["involvedObject"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            format!("{} {}/{}", text(&event["reason"]), text(&on["namespace"]), text(&on["name"]))
        };
        self.shared.lock().events.iter().map(text).collect()
    }

    /// The Events about an object in order: reason and message.
    #[must_use]
    pub fn events_on(&self, name: &str) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let shared = self.shared.lock();
        let events = shared.events.iter().filter(|event| event["involvedObject"]["name"] == name);
        events.map(|event| (text(&event["reason"]), text(&event["message"]))).collect()
    }

    /// The ConfigMap that was applied last under `namespace/name`.
    #[must_use]
    pub fn config_map(&self, name: &str) -> Option<Value> {
        self.shared.lock().config_maps.get(name).cloned()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop.take().map(|stop| stop.send(()));
        self.thread.take().map(std::thread::JoinHandle::join);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, state: &Kept) {
        self.changed.send_replace((state.version, state.outages));
    }
}

fn name(object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    format!("{}/{}", text("namespace"), text("name"))
}

/// Whether the object matches a selector `key=value`, the only form that clients use.
fn matches(object: &Value, selector: &str) -> bool {
    match selector.split_once('=') {
        Some((label, value)) => object["metadata"]["labels"][label] == value,
        None => true,
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason})
}

fn answer(code: u16, body: &Value) -> Response {
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (code, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

async fn vmis(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let asked = |name: &str| query.get(name).map(String::as_str).unwrap_or_default();
    // Both are read under one lock, so that an outage ends each watch requested before it.
    let (manner, outages) = {
        let mut state = shared.lock();
        state.requests += 1;
        let authorization = headers.get(AUTHORIZATION).and_then(|text| text.to_str().ok());
        state.authorization = authorization.map(str::to_owned);
        (state.manner, state.outages)
    };
    let is_watch = matches!(asked("watch"), "true" | "1");
    match manner {
        Manner::Away => return answer(503, &status(503, "ServiceUnavailable")),
        Manner::Breaking => return broken(),
        Manner::Forbidding => return answer(403, &status(403, "Forbidden")),
        // The path of an unknown kind gets no Status object.
        Manner::Lacking => return (StatusCode::NOT_FOUND, "404 page not found\n").into_response(),
        Manner::Expired if is_watch => return expired(&mut shared.lock()),
        Manner::Gone if is_watch => return answer(410, &status(410, "Expired")),
        Manner::Brief if is_watch => return Body::empty().into_response(),
        Manner::Well | Manner::Expired | Manner::Gone | Manner::Brief => {}
    }
    if is_watch {
        let [selector, from, seconds] = ["labelSelector", "resourceVersion", "timeoutSeconds"].map(asked);
        return watched(shared, outages, selector, from, seconds);
    }
    let pause = shared.lock().list_pause;
    tokio::time::sleep(pause).await;
    list(&shared, asked("labelSelector"), asked("limit"), asked("continue"))
}

fn list(shared: &Shared, selector: &str, limit: &str, from: &str) -> Response {
    let mut state = shared.lock();
    state.lists += 1;
    let from: usize = from.parse().unwrap_or(0);
    let limit: usize = limit.parse().ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let all: Vec<_> = state.objects.values().filter(|object| matches(object, selector)).collect();
    let page: Vec<_> = all.iter().skip(from).take(limit).collect();
    let next = (from + page.len() < all.len()).then(|| (from + page.len()).to_string());
    answer(
        200,
        &json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceList",
            "metadata": {"resourceVersion": state.version.to_string(), "continue": next.unwrap_or_default()},
            "items": page,
        }),
    )
}

/// The end of a watch from an expired version.
fn expired(state: &mut Kept) -> Response {
    state.expired += 1;
    answer(200, &json!({"type": "ERROR", "object": status(410, "Expired")}))
}

/// An answer that breaks off.
fn broken() -> Response {
    let breaks = futures_util::stream::once(async { Err::<Bytes, _>(std::io::Error::other("broken off")) });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(breaks)).into_response()
}

fn watched(shared: Arc<Shared>, outages: u64, selector: &str, from: &str, seconds: &str) -> Response {
    let from: u64 = from.parse().unwrap_or(0);
    let until = Duration::from_secs(seconds.parse().unwrap_or(300));
    let selector = selector.to_owned();
    let (sender, mut chunks) = mpsc::channel::<Bytes>(16);
    {
        let mut state = shared.lock();
        state.watches += 1;
        if from < state.oldest {
            return expired(&mut state);
        }
    }
    tokio::spawn(async move {
        _ = tokio::time::timeout(until, tell(&shared, outages, &selector, from, &sender)).await;
    });
    let chunks = futures_util::stream::poll_fn(move |context| {
        chunks.poll_recv(context).map(|chunk| chunk.map(Ok::<_, Infallible>))
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(chunks)).into_response()
}

/// Sends the changes after a version to a watch, until the watch ends or the count of outages changes.
async fn tell(shared: &Shared, outages: u64, selector: &str, mut from: u64, sender: &mpsc::Sender<Bytes>) {
    let mut changed = shared.changed.subscribe();
    loop {
        let (lines, pause, ends) = {
            let state = shared.lock();
            if state.outages != outages {
                return;
            }
            let ends = from < state.compacted;
            let lines: Vec<_> = if ends {
                vec![json!({"type": "ERROR", "object": status(410, "Expired")})]
            } else {
                let new = state.history.iter().filter(|(version, ..)| *version > from);
                new.filter_map(|(version, before, after)| line(selector, *version, before, after)).collect()
            };
            from = from.max(state.version);
            (lines, state.part_pause, ends)
        };
        for line in lines {
            let text = Bytes::from(format!("{line}\n"));
            let at = if pause.is_zero() { text.len() } else { PART.min(text.len()) };
            for part in [text.slice(..at), text.slice(at..)] {
                if !part.is_empty() && sender.send(part).await.is_err() {
                    return;
                }
                tokio::time::sleep(pause).await;
            }
        }
        if ends {
            return;
        }
        tokio::select! {
            () = sender.closed() => return,
            gone = changed.changed() => if gone.is_err() { return },
        }
    }
}

fn line(selector: &str, version: u64, before: &Option<Value>, after: &Option<Value>) -> Option<Value> {
    let is = |object: &Option<Value>| object.as_ref().is_some_and(|object| matches(object, selector));
    let kind = match (is(before), is(after)) {
        (false, true) => "ADDED",
        (true, true) => "MODIFIED",
        (true, false) => "DELETED",
        (false, false) if before.is_none() && after.is_none() => {
            let metadata = json!({"resourceVersion": version.to_string()});
            let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": metadata});
            return Some(json!({"type": "BOOKMARK", "object": object}));
        }
        (false, false) => return None,
    };
    let mut object = if kind == "DELETED" { before.clone()? } else { after.clone()? };
    object["metadata"]["resourceVersion"] = version.to_string().into();
    Some(json!({"type": kind, "object": object}))
}

/// Server-side apply. Other kinds of patches are refused.
async fn config_map(
    State(shared): State<Arc<Shared>>,
    Named((namespace, name)): Named<(String, String)>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut state = shared.lock();
    if state.manner == Manner::Forbidding {
        return answer(403, &status(403, "Forbidden"));
    }
    let is_apply =
        headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/apply-patch+yaml");
    let Some(object) = serde_json::from_slice::<Value>(&body).ok().filter(|_| is_apply) else {
        return answer(415, &status(415, "UnsupportedMediaType"));
    };
    state.config_maps.insert(format!("{namespace}/{name}"), object.clone());
    answer(200, &object)
}

async fn events(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let mut state = shared.lock();
    if state.manner == Manner::Away {
        return answer(503, &status(503, "ServiceUnavailable"));
    }
    let Ok(mut event) = serde_json::from_slice::<Value>(&body) else {
        return answer(400, &status(400, "BadRequest"));
    };
    event["metadata"]["name"] = format!("e{}", state.events.len()).into();
    state.events.push(event.clone());
    answer(201, &event)
}
