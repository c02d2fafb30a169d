//! Sinks that are HTTP servers on a Unix socket.
//!
//! The agent's endpoints already depend on hyper, so its client costs only one feature. It handles interim responses,
//! chunked bodies and truncated answers.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST};
use hyper::{Request, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::SinkError;

/// Limit on one attempt: to connect, send the request and receive the answer's head.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends one POST. Any status but 2xx is an error.
pub(super) async fn post(socket: &Path, path: &str, json: Bytes) -> Result<(), SinkError> {
    tokio::time::timeout(TIMEOUT, exchange(socket, path, json)).await.unwrap_or(Err(SinkError::Late))
}

async fn exchange(socket: &Path, path: &str, json: Bytes) -> Result<(), SinkError> {
    let request = Request::post(path)
        .header(HOST, "localhost")
        .header(CONTENT_TYPE, "application/json")
        .header(CONNECTION, "close")
        .body(Full::new(json))
        .map_err(SinkError::Request)?;
    let stream = UnixStream::connect(socket).await.map_err(SinkError::Socket)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(SinkError::Http)?;
    // The task drives the connection. Dropping the set ends the task, also on an error.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let status = sender.send_request(request).await.map_err(SinkError::Http)?.status();
    if status.is_success() { Ok(()) } else { Err(SinkError::Status(status)) }
}
