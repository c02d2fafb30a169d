//! The orderly stop: guests get complete answers to requests they have begun.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::time::Instant;
use tracing::{info, warn};

use super::endpoint;
use super::node::Workers;
use super::service_manager::Stop;

/// How often to check how many connections remain.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// How long to wait for workers after the drain's limit. At the limit they cut off the remaining connections.
const GRACE: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainResult {
    /// Every connection has ended in time.
    Whole,
    /// Number of connections that remained at the limit or at a second signal; 0 if they were not drained.
    Cut(u64),
}

/// Serves open connections for at most `limit`, or until `enough` completes. New connections are left to the next
/// agent. Returns at once if `limit` is zero.
pub(super) async fn drain(
    workers: &Workers,
    limit: Duration,
    enough: impl Future<Output = &'static str>,
) -> DrainResult {
    let end = Instant::now() + limit;
    if limit.is_zero() {
        return DrainResult::Cut(0);
    }
    if let Err(error) = workers.drain(limit) {
        warn!("open requests are not answered: {error}");
        return DrainResult::Cut(0);
    }
    tokio::pin!(enough);
    let mut last = 0;
    loop {
        let remaining = workers.remaining();
        match remaining {
            // At the limit the workers cut off what remains.
            Some(0) if Instant::now() >= end => return DrainResult::Cut(last),
            Some(0) => return DrainResult::Whole,
            Some(connections) => {
                if last == 0 {
                    info!(connections, "waiting at most {limit:?} until open requests are answered");
                }
                last = connections;
            }
            None => {}
        }
        tokio::select! {
            () = tokio::time::sleep(CHECK_EVERY) => {}
            name = &mut enough => {
                warn!("{name} again: stopping at once");
                return DrainResult::Cut(remaining.unwrap_or(0));
            }
        }
        if Instant::now() >= end + GRACE {
            return DrainResult::Cut(workers.remaining().unwrap_or(0));
        }
    }
}

// Keeps the process alive after a takeover, without serving guests.
//
// Some supervisors restart a process that has ended, such as kubelet for containers of a DaemonSet. An agent restarted
// with `--takeover` would take the ports back. With `--linger` the previous agent waits for SIGTERM instead.
// Meanwhile it answers `/healthz`, so that its supervisor does not consider it dead.

/// How long to wait before listening. By then, a next agent in the same network namespace listens on the address.
const LISTENS_AFTER: Duration = Duration::from_secs(5);

/// The body of every answer.
const TAKEN_OVER: &str = "another agent serves the ports of this one\n";

/// What lingering needs. It is created before the sandbox forbids the system calls for it.
pub(super) struct LingerResources {
    runtime: Runtime,
    /// Includes signals that arrived while the agent served.
    stop: Stop,
}

impl LingerResources {
    pub(super) fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = {
            let _inside = runtime.enter();
            Stop::new()?
        };
        Ok(Self { runtime, stop })
    }

    /// Answers at the metrics address, unless another agent listens there, until SIGTERM or SIGINT.
    pub(super) fn until_stopped(self, metrics: Option<SocketAddr>) -> anyhow::Result<()> {
        let Self { runtime, mut stop } = self;
        runtime.block_on(async {
            info!("another agent has taken over: lingering until SIGTERM");
            tokio::select! {
                ended = answer(metrics) => ended,
                name = stop.recv() => {
                    info!("{name}: stopping");
                    Ok(())
                }
            }
        })
    }
}

async fn answer(metrics: Option<SocketAddr>) -> anyhow::Result<()> {
    let Some(addr) = metrics else { return std::future::pending().await };
    tokio::time::sleep(LISTENS_AFTER).await;
    match TcpListener::bind(addr).await {
        Ok(listener) => endpoint::serve(listener, router()).await,
        Err(error) => {
            info!("not listening on {addr}, where the other agent may listen: {error}");
            std::future::pending().await
        }
    }
}

fn router() -> Router {
    let head = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    let elsewhere = (StatusCode::SERVICE_UNAVAILABLE, head.clone(), TAKEN_OVER);
    Router::new()
        .route("/healthz", get(async move || (StatusCode::OK, head, TAKEN_OVER)))
        .fallback(async move || elsewhere)
}
