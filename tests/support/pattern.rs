//! Predictable answers, for tests of the layers below.

use bytes::Bytes;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::http::{Method, Request, Response, StatusCode};
use metadata_content::store::ParkedCall;
use metadata_datapath::stack::{Stack, StackConfig};
use metadata_user::service::{Answer, AnswerOrigin, AnswerSource, MetadataService};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Answers by path:
///
/// * `/bytes/<n>`: n bytes, see [`bytes()`];
/// * `/echo`: method, path, query and body, one per line;
/// * `/close`: closes the connection after the answer;
/// * `/some`: a few bytes;
/// * `/none`: 204, which closes the connection.
///
/// All other paths get 404. No path has an answer while [`Pattern::ready`] or [`Pattern::known`] is false.
#[derive(Debug)]
pub struct Pattern {
    /// False until the record has arrived.
    pub ready: AtomicBool,
    /// False if the slot is unknown.
    pub known: AtomicBool,
}

/// The body of `/bytes/<n>`.
#[must_use]
pub fn bytes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
}

impl AnswerSource for Pattern {
    fn answer(
        &self,
        _: Now,
        _: &Connection,
        request: &Request<'_>,
        _: Option<&ParkedCall>,
    ) -> (Answer, AnswerOrigin) {
        (self.reply(request), AnswerOrigin::NONE)
    }
}

impl Pattern {
    fn reply(&self, request: &Request<'_>) -> Answer {
        if !self.known.load(Ordering::Relaxed) {
            return Answer::Unknown;
        }
        if !self.ready.load(Ordering::Relaxed) {
            return Answer::NotYet;
        }
        let response = match (request.method, request.target.path) {
            (Method::Other, _) => Response::error(StatusCode(405), &[("Allow", "GET, HEAD")]),
            (_, "/some") => Response::new(StatusCode(200), None, &[], Bytes::from_static(b"some\n")),
            (_, "/none") => Response::new(StatusCode(204), None, &[], Bytes::new()),
            (_, "/close") => {
                Response::new(StatusCode(200), None, &[], Bytes::from_static(b"bye\n")).and_close()
            }
            (method, "/echo") => {
                let mut body = format!("{method:?}\n{}\n{}\n", request.target.path, request.target.query);
                body.push_str(&String::from_utf8_lossy(request.body));
                Response::new(StatusCode(200), Some("text/plain; charset=utf-8"), &[], body)
            }
            (_, path) => match path.strip_prefix("/bytes/").and_then(|n| n.parse().ok()) {
                Some(n) => Response::new(StatusCode(200), Some("application/octet-stream"), &[], bytes(n)),
                None => Response::error(StatusCode(404), &[]),
            },
        };
        Answer::Known(response.into())
    }
}

impl Default for Pattern {
    fn default() -> Self {
        Self { ready: AtomicBool::new(true), known: AtomicBool::new(true) }
    }
}

/// Returns a stack that serves [`Pattern`], and the pattern.
#[must_use]
pub fn stack(config: StackConfig) -> (Stack<MetadataService<Pattern>>, Arc<Pattern>) {
    let pattern = Arc::new(Pattern::default());
    (Stack::new(config, MetadataService::new(Arc::clone(&pattern))), pattern)
}

/// A parsed response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The status code.
    pub status: u16,
    /// Status line and fields.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

impl Answered {
    /// The fields' names and values, in the order received.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.head.lines().skip(1).filter_map(|line| line.split_once(": "))
    }

    /// The first value of a field; its name is case-insensitive.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

/// Parses responses. `heads[i]` is true if request i was a HEAD. Requests beyond the list count as GET. An incomplete
/// last response is ignored.
#[must_use]
pub fn responses(mut received: &[u8], heads: &[bool]) -> Vec<Answered> {
    let mut all = Vec::new();
    while let Some(end) = received.windows(4).position(|four| four == b"\r\n\r\n") {
        let head = String::from_utf8_lossy(&received[..end + 2]).into_owned();
        let status = head[9..12].parse().expect("a status of three digits");
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let is_head = heads.get(all.len()).copied().unwrap_or(false);
        let length = length.filter(|_| !is_head).map_or(0, |l| l.parse().expect("a decimal length"));
        let rest = &received[end + 4..];
        if rest.len() < length {
            break;
        }
        all.push(Answered { status, head, body: rest[..length].to_vec() });
        received = &rest[length..];
    }
    all
}
