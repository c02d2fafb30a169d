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
//! [`ANSWER_WITHIN`].

pub(super) mod instances;
mod listen;
mod page;
mod trace;

#[cfg(test)]
mod tests;

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
}

/// The routers of both listeners, and the receiver of their requests.
pub(super) struct Routers {
    /// For the metrics address.
    pub(super) metrics: Router,
    /// For the control socket.
    pub(super) control: Router,
    /// The requests of both.
    pub(super) requests: mpsc::Receiver<ControlRequest>,
}

impl Routers {
    /// With `page`, the metrics address also has the page with the live view, for these hosts.
    pub(super) fn new(health: Arc<Health>, registrar: Arc<Registrar>, page: Option<PageHosts>) -> Self {
        let (sender, requests) = mpsc::channel(QUEUE);
        let agent = Agent { health, registrar, requests: sender };
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
        Self { metrics: metrics.with_state(agent.clone()), control: control.with_state(agent), requests }
    }
}

impl Agent {
    /// Sends a request to the control loop and waits for the answer. Fails at once if the queue is full.
    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> ControlRequest,
    ) -> Result<T, ControlLoopBusy> {
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
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
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
