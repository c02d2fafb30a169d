//! `GET /metrics` for Prometheus, on the control side.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Scrapes waiting for the agent; further ones are answered 503.
const QUEUE: usize = 8;

/// A scrape, to be answered with the exposition text.
pub struct MetricsRequest {
    /// Where the text goes.
    pub reply: oneshot::Sender<String>,
}

/// Serves on `listener`; the requests come out of the receiver.
pub(super) fn listen(
    listener: TcpListener,
    tasks: &mut JoinSet<anyhow::Result<()>>,
) -> mpsc::Receiver<MetricsRequest> {
    let (requests, receiver) = mpsc::channel(QUEUE);
    let app = Router::new().route("/metrics", get(scrape)).with_state(requests);
    tasks.spawn(async move { Ok(axum::serve(listener, app).await?) });
    receiver
}

async fn scrape(State(requests): State<mpsc::Sender<MetricsRequest>>) -> impl IntoResponse {
    let (reply, answer) = oneshot::channel();
    let text = match requests.try_send(MetricsRequest { reply }) {
        Ok(()) => answer.await.ok(),
        Err(_) => None,
    };
    match text {
        Some(text) => {
            (StatusCode::OK, [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
        }
        None => (StatusCode::SERVICE_UNAVAILABLE, [(header::CONTENT_TYPE, "text/plain")], "busy\n".into()),
    }
}
