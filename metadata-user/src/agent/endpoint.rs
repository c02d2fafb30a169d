//! The agent's HTTP endpoints for probes, scrapers and operators.
//!
//! | | metrics address | control socket |
//! |---|---|---|
//! | `GET /metrics`, `/healthz`, `/readyz` | yes | yes |
//! | `GET /.well-known/openid-configuration`, `/.well-known/jwks.json`, on a node that issues identity tokens | yes | |
//! | `GET /v1/status` | | yes |
//! | `GET /v1/trace` | | yes |
//! | `GET /v1/top` | | yes |
//! | `GET /` and `/events`, with `page` in the configuration | yes | |
//! | `/v1/instances` and below ([`instances`]), `GET /v1/openapi.json` | | yes |
//!
//! The control socket is `<run>/control.sock`, for users who may enter the agent's run directory (mode 0700, or 0750
//! for the group of the configuration). It serves HTTP over a Unix socket, as for `curl --unix-socket`. Requests that
//! change something are logged with the peer's credentials.
//!
//! `/healthz` and `/readyz` read only flags and heartbeats ([`Health`]). Every other request goes to the control loop
//! through a queue of [`QUEUE`]. The answer is 503 if the queue is full or the loop takes longer than
//! [`ANSWER_WITHIN`]. Anybody on the network may reach the metrics address, so its requests have a queue of their own
//! ([`NETWORK_QUEUE`]), which the loop reads last, and follow one another at [`NETWORK_EVERY`].

pub(super) mod instances;
mod listen;
mod page;
mod trace;

pub(super) use instances::Registrar;
pub(super) use listen::{ControlSocket, gid_of, make_run, serve};
pub(crate) use listen::{SocketError, SocketListener};
pub(super) use page::PageHosts;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{HeaderValue, Method, Request, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use instances::{InstanceRequest, RefusalReason};
use listen::{LongLivedAnswer, Peer};
use metadata_control::status::{AgentStatus, GuestStatus, PortFilter};
use metadata_control::top::{Top, TopQuery, VmPage, WORDS_MOST};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tracing::info;

use super::health::{Health, HealthProblem};
use super::node::{StartedTrace, TraceRefusal, TraceTarget};
use crate::metrics;

/// Limit on requests that wait for the control loop; further ones are answered 503.
pub(super) const QUEUE: usize = 8;
/// The same for requests of the metrics address.
pub(super) const NETWORK_QUEUE: usize = 4;
/// Least time between two requests of the metrics address to the control loop; further ones wait.
pub(super) const NETWORK_EVERY: Duration = Duration::from_millis(100);
/// Limit on the time the control loop may take for an answer.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Limit on a request's body, in bytes.
pub(super) const BODY_MAX: usize = 256 << 10;

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const JSON_LINES: HeaderValue = HeaderValue::from_static("application/x-ndjson");

/// A request to the control loop, with the channel for the answer.
#[derive(Debug)]
pub(super) enum ControlRequest {
    /// The metrics, as exposition text.
    Metrics(oneshot::Sender<String>),
    /// The status of the agent.
    Status(PortFilter, oneshot::Sender<Box<AgentStatus>>),
    /// The guests of a port, a MAC or a VM.
    Guests(String, oneshot::Sender<Vec<GuestStatus>>),
    /// The live view of the node.
    Top(TopQuery, oneshot::Sender<Box<Top>>),
    /// The live view of the VMs of a name.
    VmPages(String, oneshot::Sender<Vec<VmPage>>),
    /// A request about instances.
    Instances(InstanceRequest),
    /// A trace of one guest.
    Trace(TraceTarget, oneshot::Sender<Result<Box<StartedTrace>, TraceRefusal>>),
}

/// What all handlers share.
#[derive(Clone)]
struct Agent {
    health: Arc<Health>,
    registrar: Arc<Registrar>,
    requests: mpsc::Sender<ControlRequest>,
    /// For the metrics address.
    pace: Option<Arc<Pace>>,
}

/// Makes requests follow one another at [`NETWORK_EVERY`].
#[derive(Debug, Default)]
struct Pace(tokio::sync::Mutex<Option<tokio::time::Instant>>);

impl Pace {
    /// Waits for the turn of a request. A client that goes away before its turn does not move the next one.
    async fn turn(&self) {
        let mut next = self.0.lock().await;
        if let Some(at) = *next {
            tokio::time::sleep_until(at).await;
        }
        *next = Some(tokio::time::Instant::now() + NETWORK_EVERY);
    }
}

/// The requests of both listeners, those of the control socket first.
#[derive(Debug)]
pub(super) struct ControlRequests {
    control: mpsc::Receiver<ControlRequest>,
    network: mpsc::Receiver<ControlRequest>,
}

impl ControlRequests {
    /// Waits for the next request; `None` once both routers are dropped. No request is lost if the wait is given up.
    pub(super) async fn recv(&mut self) -> Option<ControlRequest> {
        tokio::select! {
            biased;
            Some(request) = self.control.recv() => Some(request),
            Some(request) = self.network.recv() => Some(request),
            else => None,
        }
    }
}

/// The routers of both listeners, and the receiver of their requests.
pub(super) struct Routers {
    /// For the metrics address.
    pub(super) metrics: Router,
    /// For the control socket.
    pub(super) control: Router,
    /// The requests of both.
    pub(super) requests: ControlRequests,
}

impl Routers {
    /// With `page`, the metrics address also has the page with the live view, for these hosts.
    pub(super) fn new(health: Arc<Health>, registrar: Arc<Registrar>, page: Option<PageHosts>) -> Self {
        let (sender, control) = mpsc::channel(QUEUE);
        let (network_sender, network) = mpsc::channel(NETWORK_QUEUE);
        let requests = ControlRequests { control, network };
        let agent = Agent { health, registrar, requests: sender, pace: None };
        let for_network = Agent { requests: network_sender, pace: Some(Arc::default()), ..agent.clone() };
        let both = Router::new()
            .route("/metrics", get(scrape))
            .route("/healthz", get(live))
            .route("/readyz", get(ready))
            .layer(DefaultBodyLimit::max(BODY_MAX));
        let control = both.clone().route("/v1/status", get(status)).route("/v1/trace", get(trace::trace));
        let control = control.route("/v1/top", get(top));
        let routes = instances::routes().into_iter();
        let control = routes.fold(control, |control, (path, methods)| control.route(path, methods));
        let control = control.fallback(instances::no_path).method_not_allowed_fallback(instances::no_method);
        let control = control.layer(middleware::from_fn(log_refusal));
        let metrics = match page {
            Some(hosts) => page::routes(both, hosts),
            None => both,
        };
        Self { metrics: metrics.with_state(for_network), control: control.with_state(agent), requests }
    }
}

impl Agent {
    /// Sends a request to the control loop and waits for the answer. Fails at once if the queue is full. One of the
    /// metrics address first waits for its turn.
    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> ControlRequest,
    ) -> Result<T, ControlLoopBusy> {
        if let Some(pace) = &self.pace {
            tokio::time::timeout(ANSWER_WITHIN, pace.turn()).await.map_err(|_| ControlLoopBusy)?;
        }
        let (reply, answer) = oneshot::channel();
        self.requests.try_send(question(reply)).map_err(|_| ControlLoopBusy)?;
        match tokio::time::timeout(ANSWER_WITHIN, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            _ => Err(ControlLoopBusy),
        }
    }

    /// Like [`Agent::ask`], but waits for a place in the queue.
    async fn ask_in_turn<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> ControlRequest,
    ) -> Result<T, ControlLoopBusy> {
        tokio::time::timeout(ANSWER_WITHIN, self.ask_patiently(question))
            .await
            .unwrap_or(Err(ControlLoopBusy))
    }

    /// Like [`Agent::ask_in_turn`], without a time limit, because a change must not be abandoned half-way.
    async fn ask_patiently<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> ControlRequest,
    ) -> Result<T, ControlLoopBusy> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(question(reply)).await.map_err(|_| ControlLoopBusy)?;
        answer.await.map_err(|_| ControlLoopBusy)
    }
}

/// The control loop does not accept or answer the request in time.
struct ControlLoopBusy;

impl IntoResponse for ControlLoopBusy {
    fn into_response(self) -> Response {
        let head = [(header::CONTENT_TYPE, TEXT), (header::RETRY_AFTER, "1")];
        (StatusCode::SERVICE_UNAVAILABLE, head, "busy\n").into_response()
    }
}

async fn scrape(State(agent): State<Agent>) -> Result<impl IntoResponse, ControlLoopBusy> {
    let text = agent.ask(ControlRequest::Metrics).await?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text))
}

async fn live(State(agent): State<Agent>) -> Response {
    verdict(agent.health.deadly())
}

async fn ready(State(agent): State<Agent>) -> Response {
    verdict(agent.health.hindering())
}

/// 200 `ok`, or 503 and a line for each problem.
fn verdict(problems: impl Iterator<Item = HealthProblem>) -> Response {
    let mut problems = problems.peekable();
    let head = [(header::CONTENT_TYPE, TEXT)];
    if problems.peek().is_none() {
        return (StatusCode::OK, head, "ok\n").into_response();
    }
    let lines: String = problems.map(|problem| format!("{problem}\n")).collect();
    (StatusCode::SERVICE_UNAVAILABLE, head, lines).into_response()
}

/// The query of `/v1/status`.
#[derive(Deserialize)]
struct StatusQuery {
    /// Shows the guests of this port, MAC or VM instead of the agent.
    guest: Option<String>,
    /// `all` lists every port instead of only those in trouble.
    ports: Option<String>,
}

async fn status(
    State(agent): State<Agent>,
    Query(query): Query<StatusQuery>,
) -> Result<Response, ControlLoopBusy> {
    let StatusQuery { guest, ports } = query;
    let about = if ports.as_deref() == Some("all") { PortFilter::EveryPort } else { PortFilter::Trouble };
    Ok(match guest {
        Some(name) => json(&agent.ask(|reply| ControlRequest::Guests(name, reply)).await?),
        None => json(&agent.ask(|reply| ControlRequest::Status(about, reply)).await?),
    })
}

/// A document with the newline that a terminal wants after it.
fn json_line<T: serde::Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Logs why a request for a change is refused.
async fn log_refusal(
    axum::Extension(peer): axum::Extension<Peer>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let (method, path) = (request.method().clone(), listen::beginning(request.uri().path()).to_owned());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    if !matches!(method, Method::GET | Method::HEAD)
        && let Some(RefusalReason(reason)) = response.extensions().get()
    {
        info!(by = %peer, %method, path, status, %reason, "refused a request for a change");
    }
    response
}

fn json<T: serde::Serialize>(value: &T) -> Response {
    match json_line(value) {
        Ok(bytes) => ([(header::CONTENT_TYPE, JSON)], bytes).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

// `GET /v1/top`: the live view of the node, or of the VMs of one name.

async fn top(State(agent): State<Agent>, Query(query): Query<TopQuery>) -> Result<Response, ControlLoopBusy> {
    if let Some(refusal) = refusal(&query) {
        return Ok(refusal);
    }
    Ok(match query.guest.clone() {
        Some(name) => json(&agent.ask(|reply| ControlRequest::VmPages(name, reply)).await?),
        None => json(&agent.ask(|reply| ControlRequest::Top(query, reply)).await?),
    })
}

/// The answer to a query that is too long.
fn refusal(query: &TopQuery) -> Option<Response> {
    let longest = query.filter.len().max(query.guest.as_ref().map_or(0, String::len));
    let text = format!("expected a filter or a VM of at most {WORDS_MOST} bytes\n");
    (longest > WORDS_MOST)
        .then(|| (StatusCode::BAD_REQUEST, [(header::CONTENT_TYPE, TEXT)], text).into_response())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use axum::Router;
    use axum::response::IntoResponse as _;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
    use tokio::task::JoinHandle;

    use super::listen::{CONNECTIONS, HEAD_MAX, HEAD_WITHIN, LIFE, LongLivedAnswer, Peer, serve};
    use super::page::VIEWERS;
    use super::{
        ANSWER_WITHIN, ControlRequest, NETWORK_EVERY, NETWORK_QUEUE, Pace, PageHosts, Registrar, Routers,
        SocketListener,
    };
    use crate::agent::Health;
    use crate::config::Config;
    use metadata_control::status::{AgentStatus, PortFilter};
    use metadata_control::top::{Top, VmPage, VmRow, WORDS_MOST};

    /// Limit on every wait in these tests. A wait reaches it only if the test fails.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A metrics address before a control loop that gives a fixed answer.
    struct Bench {
        address: std::net::SocketAddr,
        health: Arc<Health>,
        tasks: Vec<JoinHandle<()>>,
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            self.tasks.iter().for_each(JoinHandle::abort);
        }
    }

    impl Bench {
        async fn new(answers: bool) -> Self {
            Self::with(answers, false).await
        }

        /// With `shows`, the metrics address has the page.
        async fn with(answers: bool, shows: bool) -> Self {
            let health = Health::new(vec![(0, Default::default())]);
            let page = shows.then(|| PageHosts::new(&[]));
            let Routers { metrics, mut requests, .. } =
                Routers::new(Arc::clone(&health), Registrar::new(&Config::default()), page);
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let door = tokio::spawn(async { serve(listener, metrics).await.expect("a door stays open") });
            let control = tokio::spawn(async move {
                if !answers {
                    // Requests stay in the queue.
                    std::future::pending::<()>().await;
                }
                while let Some(request) = requests.recv().await {
                    match request {
                        ControlRequest::Metrics(reply) => _ = reply.send("word 1\n".into()),
                        ControlRequest::Top(query, reply) => {
                            let name = (!query.filter.is_empty()).then_some(query.filter);
                            let row = VmRow { vm: name, ..VmRow::default() };
                            _ = reply.send(Box::new(Top { vms: vec![row], ..Top::default() }));
                        }
                        ControlRequest::VmPages(name, reply) => {
                            let page = VmPage { record: Some(name), ..VmPage::default() };
                            _ = reply.send(vec![page]);
                        }
                        other => panic!("{other:?} on the metrics address"),
                    }
                }
            });
            Self { address, health, tasks: vec![door, control] }
        }

        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.expect("a connection")
        }

        /// The head of an answer, in lower case.
        async fn head(&self, path: &str) -> String {
            self.stream(path, 0).await.to_lowercase()
        }

        /// The head of an answer, and its body up to the end of the `events`th event.
        async fn stream(&self, path: &str, events: usize) -> String {
            let mut stream = self.connect().await;
            let question = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            stream.write_all(question.as_bytes()).await.expect("room");
            let mut text = String::new();
            let reading = async {
                while !text.contains("\r\n\r\n") || text.matches("\n\n").count() < events {
                    let mut piece = [0; 4_096];
                    let length = stream.read(&mut piece).await.expect("an answer");
                    assert!(length > 0, "ended after {text}");
                    text.push_str(&String::from_utf8_lossy(&piece[..length]));
                }
            };
            tokio::time::timeout(PATIENCE, reading).await.expect("an answer in time");
            text
        }

        async fn ask(&self, path: &str) -> (u16, String) {
            ask(
                self.connect().await,
                &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
            )
            .await
        }
    }

    /// Sends bytes and returns the status and body of the answer.
    async fn ask(
        mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
        bytes: &str,
    ) -> (u16, String) {
        stream.write_all(bytes.as_bytes()).await.expect("room");
        let mut answer = String::new();
        let read = tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        read.expect("an answer in time").expect("text");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
        (status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
    }

    #[tokio::test]
    async fn probes_list_each_trouble_on_a_line() {
        let bench = Bench::new(true).await;
        assert_eq!(bench.ask("/healthz").await, (200, "ok\n".into()));
        let (status, body) = bench.ask("/readyz").await;
        assert_eq!((status, body.lines().count()), (503, 2), "{body}");
        bench.health.set_records_read();
        bench.health.set_ports_settled();
        assert_eq!(bench.ask("/readyz").await, (200, "ok\n".into()));
        bench.health.set_draining();
        let (status, body) = bench.ask("/readyz").await;
        assert!(status == 503 && body.starts_with("the agent is draining"), "{status} {body}");
        let (_, beat) = bench.health.workers().next().expect("a worker");
        beat.end();
        assert_eq!(bench.ask("/healthz").await, (503, "worker 0 has ended\n".into()));
    }

    #[tokio::test]
    async fn the_metrics_address_serves_metrics_and_nothing_of_guests() {
        let bench = Bench::new(true).await;
        assert_eq!(bench.ask("/metrics").await, (200, "word 1\n".into()));
        for path in ["/v1/status", "/v1/top", "/v1/instances/x", "/", "/events"] {
            assert_eq!(bench.ask(path).await.0, 404, "{path}");
        }
    }

    #[tokio::test]
    async fn the_page_is_there_only_on_request_and_its_policy_allows_nothing_from_elsewhere() {
        let bench = Bench::with(true, true).await;
        let head = bench.head("/").await;
        for field in [
            "content-type: text/html",
            "content-security-policy: default-src 'none'",
            "cache-control: no-store",
        ] {
            assert!(head.contains(field), "{field}: {head}");
        }
        for (path, status) in [("/v1/top", 404), ("/v1/status", 404), ("/metrics", 200)] {
            assert_eq!(bench.ask(path).await.0, status, "{path}");
        }
        let long = format!("/events?filter={}", "x".repeat(WORDS_MOST + 1));
        for (path, status) in [(&*long, 400), ("/events?sort=size", 400)] {
            assert_eq!(bench.ask(path).await.0, status, "{path}");
        }
    }

    #[tokio::test]
    async fn a_viewer_gets_the_node_and_the_vm_that_it_shows_each_second() {
        let bench = Bench::with(true, true).await;
        let text = bench.stream("/events?filter=web&guest=db", 2).await;
        for part in [
            "content-type: text/event-stream",
            "event: top\ndata: {",
            "\"vm\":\"web\"",
            "event: vm\ndata: [{",
            "\"record\":\"db\"",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[tokio::test]
    async fn a_viewer_beyond_the_limit_gets_the_seat_of_one_that_is_told() {
        let bench = Bench::with(true, true).await;
        let mut viewers = Vec::new();
        for _ in 0..VIEWERS {
            let mut stream = bench.connect().await;
            stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("room");
            stream.read_u8().await.expect("an answer");
            viewers.push(stream);
        }
        assert!(bench.stream("/events", 1).await.contains("event: top"), "the new one watches");
        let mut rest = String::new();
        let read = tokio::time::timeout(PATIENCE, viewers[0].read_to_string(&mut rest)).await;
        read.expect("an end in time").expect("text");
        let (_, told) = rest.rsplit_once("event: ").expect("a last event");
        assert!(told.starts_with("lost\ndata: \"") && told.contains("Reload"), "{told}");
    }

    #[tokio::test]
    async fn the_page_and_its_stream_refuse_hosts_and_sites_of_others() {
        let bench = Bench::with(true, true).await;
        for (path, fields, expected) in [
            ("/", "Host: 127.0.0.1:9177", 200),
            ("/", "Host: evil.example", 421),
            ("/events", "Host: evil.example:9177", 421),
            ("http://evil.example/", "Host: localhost", 421),
            ("/", "Host: localhost\r\nHost: evil.example", 421),
            ("/", "X: y", 421),
            ("/events?sort=size", "Host: localhost\r\nSec-Fetch-Site: same-origin", 400),
            ("/events?sort=size", "Host: localhost\r\nOrigin: http://localhost", 400),
            ("/events", "Host: localhost\r\nSec-Fetch-Site: cross-site", 403),
            ("/events", "Host: localhost\r\nOrigin: http://evil.example", 403),
            ("/events", "Host: localhost\r\nOrigin: null", 403),
            ("/metrics", "Host: prometheus.example", 200),
            ("/healthz", "Host: probe.example", 200),
        ] {
            let bytes = format!("GET {path} HTTP/1.1\r\n{fields}\r\nConnection: close\r\n\r\n");
            let (status, body) = ask(bench.connect().await, &bytes).await;
            assert_eq!(status, expected, "{path} {fields}: {body}");
            assert!(status != 421 || body.contains("`page_hosts`"), "{body}");
        }
    }

    #[tokio::test]
    async fn probes_are_answered_while_the_control_loop_is_busy() {
        let bench = Bench::new(false).await;
        let mut waiting = Vec::new();
        let start = Instant::now();
        for _ in 0..NETWORK_QUEUE {
            let mut stream = bench.connect().await;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("room");
            waiting.push(stream);
        }
        // Once the queue is full, one more request is refused at once.
        loop {
            let asked = Instant::now();
            let (status, body) = bench.ask("/metrics").await;
            assert_eq!((status, body.as_str()), (503, "busy\n"));
            if asked.elapsed() < ANSWER_WITHIN / 2 {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "the queue has no end");
        }
        assert_eq!(bench.ask("/healthz").await.0, 200);
        let mut answer = [0; 12];
        let read = tokio::time::timeout(PATIENCE, waiting[0].read_exact(&mut answer)).await;
        read.expect("an answer in time").expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 503");
        // The timer's clock is coarser than this one.
        let spent = start.elapsed() + Duration::from_millis(5);
        assert!(spent >= ANSWER_WITHIN, "given up after {spent:?}");
    }

    #[tokio::test]
    async fn scrapers_do_not_take_the_places_of_the_control_socket() {
        let Routers { metrics, control, mut requests } =
            Routers::new(Health::new(vec![]), Registrar::new(&Config::default()), None);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("socket");
        let socket = SocketListener::from(UnixListener::bind(&path).expect("a socket"));
        let doors = [tokio::spawn(serve(listener, metrics)), tokio::spawn(serve(socket, control))];
        let scrape = move || async move {
            let stream = TcpStream::connect(address).await.expect("a connection");
            ask(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await
        };
        // The control loop is busy, so the requests of scrapers stay in their queue.
        let mut scrapers = tokio::task::JoinSet::new();
        (0..CONNECTIONS / 2).for_each(|_| drop(scrapers.spawn(scrape())));
        let refused = scrapers.join_next().await.expect("a scraper").expect("no panic");
        assert_eq!(refused, (503, "busy\n".into()), "the queue is full");
        let asked = tokio::spawn(async move {
            let stream = UnixStream::connect(&path).await.expect("a connection");
            let bytes = "GET /v1/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
            ask(stream, bytes).await.0
        });
        while requests.control.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match requests.recv().await.expect("a question") {
            ControlRequest::Status(_, reply) => {
                reply.send(Box::new(AgentStatus::default())).expect("a client");
            }
            other => panic!("expected the status first, found {other:?}"),
        }
        assert_eq!(asked.await.expect("no panic"), 200);
        let queued = std::iter::from_fn(|| requests.network.try_recv().ok()).count();
        assert!(queued <= NETWORK_QUEUE, "{queued}");
        doors.iter().for_each(JoinHandle::abort);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_of_the_network_follow_one_another_at_intervals() {
        let (pace, begun) = (Pace::default(), tokio::time::Instant::now());
        let turns = || begun.elapsed().as_millis() / NETWORK_EVERY.as_millis();
        for n in 0..5 {
            pace.turn().await;
            assert_eq!(turns(), n, "the clock is coarse, but not that coarse");
        }
        // A client that goes away before its turn.
        assert!(tokio::time::timeout(NETWORK_EVERY / 2, pace.turn()).await.is_err());
        pace.turn().await;
        assert_eq!(turns(), 5);
    }

    #[tokio::test]
    async fn slow_clients_make_room_for_others() {
        let bench = Bench::new(true).await;
        let mut slow = Vec::new();
        for n in 0..2 * CONNECTIONS {
            let mut stream = bench.connect().await;
            stream.write_all(b"GET /metr").await.expect("room");
            slow.push(stream);
            assert_eq!(bench.ask("/healthz").await.0, 200, "behind {n} slow clients");
        }
        let mut byte = [0];
        assert_eq!(slow[0].read(&mut byte).await.unwrap_or(0), 0, "the first still has its place");
    }

    #[tokio::test]
    async fn a_head_that_is_late_or_too_long_ends_the_connection() {
        let bench = Bench::new(true).await;
        let (mut silent, start) = (bench.connect().await, Instant::now());
        silent.write_all(b"GET /metrics HTTP/1.1\r\n").await.expect("room");
        let mut rest = Vec::new();
        tokio::time::timeout(PATIENCE, silent.read_to_end(&mut rest))
            .await
            .expect("an end in time")
            .unwrap_or(0);
        assert!(start.elapsed() >= HEAD_WITHIN, "after {:?}", start.elapsed());
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(HEAD_MAX + 1));
        let mut stream = bench.connect().await;
        stream.write_all(long.as_bytes()).await.unwrap_or_default();
        let mut answer = Vec::new();
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
            .await
            .expect("an end in time")
            .unwrap_or(0);
        assert!(answer.starts_with(b"HTTP/1.1 431 "), "{}", String::from_utf8_lossy(&answer));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_after_its_life_unless_its_answer_lasts_and_is_read() {
        /// An answer of pieces, one a second.
        fn pieces(bytes: usize) -> axum::body::Body {
            let piece = bytes::Bytes::from(vec![b'.'; bytes]);
            axum::body::Body::from_stream(futures_util::stream::unfold(piece, |piece| async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Some((Ok::<_, std::io::Error>(piece.clone()), piece))
            }))
        }
        let app = Router::new()
            .route("/stuck", get(|| async { pieces(1) }))
            .route("/lasts", get(|| async { (axum::Extension(LongLivedAnswer), pieces(1)).into_response() }))
            .route(
                "/unread",
                get(|| async { (axum::Extension(LongLivedAnswer), pieces(1 << 20)).into_response() }),
            );
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("socket");
        let door =
            tokio::spawn(serve(SocketListener::from(UnixListener::bind(&path).expect("a socket")), app));
        let mut streams = Vec::new();
        for (asked, ends) in [("/stuck", true), ("/lasts", false), ("/unread", true)] {
            let mut stream = UnixStream::connect(&path).await.expect("a connection");
            let question = format!("GET {asked} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            stream.write_all(question.as_bytes()).await.expect("room");
            streams.push((asked, stream, ends));
        }
        tokio::time::sleep(3 * LIFE).await;
        for (asked, stream, ends) in streams {
            let mut buffer = vec![0; 1 << 20];
            // The socket keeps what was written before its end.
            let read = std::iter::from_fn(|| stream.try_read(&mut buffer).ok());
            assert_eq!(read.take(1_000).any(|length| length == 0), ends, "{asked}");
        }
        door.abort();
    }

    #[tokio::test]
    async fn requests_at_the_control_socket_carry_the_peers_credentials() {
        let app = Router::new()
            .route("/", get(|axum::Extension(peer): axum::Extension<Peer>| async move { peer.to_string() }));
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("socket");
        let door =
            tokio::spawn(serve(SocketListener::from(UnixListener::bind(&path).expect("a socket")), app));
        let stream = UnixStream::connect(&path).await.expect("a connection");
        let (_, said) = ask(stream, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
        let user = rustix::process::geteuid().as_raw();
        assert!(said.starts_with(&format!("user {user}, ")), "{said}");
        assert!(said.ends_with(&format!("process {}", std::process::id())), "{said}");
        door.abort();
    }

    #[tokio::test]
    async fn the_control_socket_serves_the_status() {
        let Routers { control, mut requests, .. } =
            Routers::new(Health::new(vec![]), Registrar::new(&Config::default()), None);
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("socket");
        let door =
            tokio::spawn(serve(SocketListener::from(UnixListener::bind(&path).expect("a socket")), control));
        let answers = tokio::spawn(async move {
            let mut asked = Vec::new();
            for _ in 0..3 {
                match requests.recv().await.expect("a question") {
                    ControlRequest::Status(about, reply) => {
                        asked.push(format!("{about:?}"));
                        reply
                            .send(Box::new(AgentStatus { pid: 42, ..AgentStatus::default() }))
                            .expect("a client");
                    }
                    ControlRequest::Guests(name, reply) => {
                        asked.push(name);
                        reply.send(vec![]).expect("a client");
                    }
                    other => panic!("nobody asked for {other:?}"),
                }
            }
            asked
        });
        for (path_asked, start) in [
            ("/v1/status", "{\"schema\""),
            ("/v1/status?ports=all", "{\"schema\""),
            ("/v1/status?guest=52%3a54", "[]"),
        ] {
            let stream = UnixStream::connect(&path).await.expect("a connection");
            let bytes = format!("GET {path_asked} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            let (status, body) = ask(stream, &bytes).await;
            assert!(status == 200 && body.starts_with(start), "{path_asked}: {status} {body}");
        }
        let asked = answers.await.expect("three questions");
        assert_eq!(
            asked,
            [format!("{:?}", PortFilter::Trouble), format!("{:?}", PortFilter::EveryPort), "52:54".into()]
        );
        door.abort();
    }
}
