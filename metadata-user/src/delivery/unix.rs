//! Sinks that are HTTP servers on a Unix socket.
//!
//! hyper is in the tree for the administration's server, so its client costs one feature, and reads answers
//! that a few lines of our own would not (interim ones, chunks, early ends).

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

/// For one try: connecting, sending and the answer's head.
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
    // The connection does the work; dropping the set ends it, however this ends.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let status = sender.send_request(request).await.map_err(SinkError::Http)?.status();
    if status.is_success() { Ok(()) } else { Err(SinkError::Status(status)) }
}
