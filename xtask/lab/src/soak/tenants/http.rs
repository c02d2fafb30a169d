//! Requests of guests, by the Linux stack of their namespace.

use anyhow::{Context as _, Result};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use support::guest::METADATA;
use support::netns::Namespace;

/// The longest time for one request of a guest.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most bytes of an answer that are read.
const ANSWER_MAX: u64 = 4 << 20;

/// An answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: String,
}

/// Connects to the metadata service. The calling thread must be in a guest's namespace.
pub(super) fn connect() -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The bytes of a request.
pub(super) fn request(line: &str, fields: &[&str], body: &str) -> String {
    let mut text = format!("{line} HTTP/1.1\r\nHost: {METADATA}\r\n");
    for field in fields {
        text += field;
        text += "\r\n";
    }
    text + &format!("Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Sends one request from a guest's namespace, as `GET /path`.
pub(super) fn ask(ns: &Namespace, line: &str, fields: &[&str], body: &str) -> Result<Answer> {
    let fields: Vec<&str> = fields.iter().copied().chain(["Connection: close"]).collect();
    let text = request(line, &fields, body);
    let answer = ns.run_in(|| -> Result<Vec<u8>> {
        let mut stream = connect()?;
        stream.write_all(text.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
        Ok(answer)
    })?;
    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").with_context(|| format!("{line}: no whole answer"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Answer { status: status.with_context(|| format!("{line}: no status"))?, body: body.to_owned() })
}
