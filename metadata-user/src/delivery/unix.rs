//! Sinks that are HTTP servers on a Unix socket.
//!
//! The client is hyper's, because the agent already contains hyper as an HTTP server.

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

/// Time limit for one attempt, from the connection to the head of the answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends one POST and waits for a 2xx.
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
    // This task runs the connection. It ends when the set is dropped, on every path out of this function.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let status = sender.send_request(request).await.map_err(SinkError::Http)?.status();
    if status.is_success() { Ok(()) } else { Err(SinkError::Status(status)) }
}
