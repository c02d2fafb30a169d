//! After a takeover: an agent that is there, and serves nobody any more.
//!
//! Some supervisors start what has ended again, as kubelet does with every container of a DaemonSet, and an agent started
//! with `--takeover` would take the ports back. With `--linger` the one that was taken over from waits until it is told to
//! end, and answers `/healthz` meanwhile, so that nobody takes it for dead.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tracing::info;

use super::endpoint;
use super::signals::Stop;

/// Before it listens: in one namespace with the other agent the address is that one's, which opens it once it serves.
const LISTENS_AFTER: Duration = Duration::from_secs(5);

/// What it answers.
const TAKEN_OVER: &str = "another agent serves the ports of this one\n";

/// What lingering takes, made while the agent may still make it.
pub(super) struct Lingering {
    runtime: Runtime,
    /// Has heard what came while the agent served, too.
    stop: Stop,
}

impl Lingering {
    pub(super) fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = {
            let _inside = runtime.enter();
            Stop::new()?
        };
        Ok(Self { runtime, stop })
    }

    /// Answers at the metrics address, if no other agent does there, until SIGTERM or SIGINT.
    pub(super) fn until_stopped(self, metrics: Option<SocketAddr>) -> anyhow::Result<()> {
        let Self { runtime, mut stop } = self;
        runtime.block_on(async {
            info!("taken over from: lingering until SIGTERM");
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
            info!("not listening on {addr}, where the other agent may: {error}");
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
