//! Responses rendered in advance.
//!
//! Everything but `Date`, `Connection` and the blank line is rendered once. All VMs and connections that send the bytes
//! share them by reference count.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;

/// A response status (RFC 9110 §15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StatusCode(pub u16);

impl StatusCode {
    /// Returns the reason phrase, which is also the text body of an error.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self.0 {
            100 => "Continue",
            200 => "OK",
            201 => "Created",
            204 => "No Content",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            409 => "Conflict",
            410 => "Gone",
            413 => "Content Too Large",
            414 => "URI Too Long",
            415 => "Unsupported Media Type",
            417 => "Expectation Failed",
            429 => "Too Many Requests",
            431 => "Request Header Fields Too Large",
            500 => "Internal Server Error",
            501 => "Not Implemented",
            502 => "Bad Gateway",
            503 => "Service Unavailable",
            504 => "Gateway Timeout",
            505 => "HTTP Version Not Supported",
            _ => "Status",
        }
    }
}

/// Body of a response: one piece, or several that it can share with other responses.
///
/// A document with a long shared part, such as vendor-data that all VMs have, consists of the text before it, the
/// shared bytes, and the text after it. So the shared part is stored once and not per VM.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// One piece, possibly empty.
    One(Bytes),
    /// Pieces in order, none of them empty.
    Many(Arc<[Bytes]>),
}

impl std::fmt::Debug for Body {
    /// Prints only the length, to keep user-data, tokens and passwords out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Body({} bytes)", self.len())
    }
}

impl Body {
    /// Joins `pieces` without copying; omits empty ones.
    #[must_use]
    pub fn join(pieces: impl IntoIterator<Item = Bytes>) -> Self {
        let mut pieces: Vec<Bytes> = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        match pieces.len() {
            0 => Self::default(),
            1 => Self::One(pieces.remove(0)),
            _ => Self::Many(pieces.into()),
        }
    }

    /// Returns the pieces in order.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces().iter().map(Bytes::len).sum()
    }

    /// Returns whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all bytes in one piece; copies them if there are several pieces.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match self {
            Self::One(piece) => piece.clone(),
            Self::Many(pieces) => pieces.concat().into(),
        }
    }
}

impl Default for Body {
    fn default() -> Self {
        Self::One(Bytes::new())
    }
}

impl<T: Into<Bytes>> From<T> for Body {
    fn from(bytes: T) -> Self {
        Self::One(bytes.into())
    }
}

/// A rendered response. Cloning increments one reference count.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Response(Arc<Rendered>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rendered {
    head: Arc<ResponseHead>,
    body: Body,
}

/// Everything but the body; many responses share one head.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ResponseHead {
    bytes: Bytes,
    status: StatusCode,
    closes: bool,
    hop_limit: Option<u8>,
}

impl Response {
    /// Replaces each piece of the body that is not shared by the result of `charge`; returns `None` if `charge` refuses
    /// a piece. A response that was rendered in advance is shared and does not change.
    pub fn charged(self, mut charge: impl FnMut(Bytes) -> Option<Bytes>) -> Option<Self> {
        let rendered = match Arc::try_unwrap(self.0) {
            Ok(rendered) => rendered,
            Err(shared) => return Some(Self(shared)),
        };
        let mut one = |piece: Bytes| if piece.is_unique() { charge(piece) } else { Some(piece) };
        let body = match rendered.body {
            Body::One(piece) => Body::One(one(piece)?),
            Body::Many(mut pieces) => match Arc::get_mut(&mut pieces) {
                Some(own) => {
                    for piece in own {
                        *piece = one(std::mem::take(piece))?;
                    }
                    Body::Many(pieces)
                }
                None => Body::Many(pieces),
            },
        };
        Some(Self(Arc::new(Rendered { head: rendered.head, body })))
    }
}

impl std::fmt::Debug for ResponseHead {
    /// Prints no fields: the answer to a login contains a cookie.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Head").field("status", &self.status).finish_non_exhaustive()
    }
}

impl Response {
    /// Renders status line, `Server`, `Cache-Control: no-store`, `Accept-Ranges: none`, `Content-Type`,
    /// `Content-Length` (except for 204) and `fields`, which can override `Server` and `Cache-Control`.
    ///
    /// The connection closes after a 204. Its end is that of its head (RFC 9112 §6.3), but clients such as iPXE, which
    /// look only at `Content-Length`, wait for a body until the connection ends.
    #[must_use]
    pub fn new(
        status: StatusCode,
        content_type: Option<&str>,
        fields: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Self {
        use std::fmt::Write as _;
        let body = body.into();
        let mut head = String::with_capacity(256);
        let mut field = |name: &str, value: &dyn std::fmt::Display| {
            write!(head, "{name}: {value}\r\n").expect("writing to a String cannot fail");
        };
        let given = |name: &str| fields.iter().any(|(given, _)| given.eq_ignore_ascii_case(name));
        for (name, value) in [("Server", "metadata"), ("Cache-Control", "no-store")] {
            if !given(name) {
                field(name, &value);
            }
        }
        field("Accept-Ranges", &"none");
        for (name, value) in fields {
            field(name, value);
        }
        if let Some(content_type) = content_type {
            field("Content-Type", &content_type);
        }
        if status != StatusCode(204) {
            field("Content-Length", &body.len());
        }
        let bytes = format!("HTTP/1.1 {} {}\r\n{head}", status.0, status.reason()).into();
        let head = ResponseHead { bytes, status, closes: status == StatusCode(204), hop_limit: None };
        Self(Arc::new(Rendered { head: Arc::new(head), body }))
    }

    /// Builds an error whose body is the reason phrase and a newline, for dialects that define no error format.
    #[must_use]
    pub fn error(status: StatusCode, fields: &[(&str, &str)]) -> Self {
        let body = format!("{}\n", status.reason());
        Self::new(status, Some("text/plain; charset=utf-8"), fields, body)
    }

    /// Builds a response from a shared head and a body.
    #[must_use]
    pub(crate) fn sharing(head: Arc<ResponseHead>, body: Body) -> Self {
        Self(Arc::new(Rendered { head, body }))
    }

    /// Builds a response that another process rendered. The parameters are what the methods of these names return.
    #[must_use]
    pub fn from_parts(
        head: Bytes,
        status: StatusCode,
        closes: bool,
        hop_limit: Option<u8>,
        body: Bytes,
    ) -> Self {
        Self::sharing(Arc::new(ResponseHead { bytes: head, status, closes, hop_limit }), body.into())
    }

    fn with_head(self, change: impl FnOnce(&mut ResponseHead)) -> Self {
        let mut head = (*self.0.head).clone();
        change(&mut head);
        Self(Arc::new(Rendered { head: Arc::new(head), body: self.0.body.clone() }))
    }

    #[must_use]
    pub(crate) fn shared_head(&self) -> &Arc<ResponseHead> {
        &self.0.head
    }

    /// Makes the connection close after this response. The last segment carries the agent's FIN, so TIME-WAIT is on the
    /// agent's side and the client can reuse its port at once.
    #[must_use]
    pub fn and_close(self) -> Self {
        self.with_head(|head| head.closes = true)
    }

    /// Sets the TTL or hop limit of the response's packets, so that they reach at most this many hops.
    #[must_use]
    pub fn within(self, hop_limit: u8) -> Self {
        self.with_head(|head| head.hop_limit = Some(hop_limit))
    }

    /// Returns whether the connection closes after this response even if the client wants to keep it.
    #[must_use]
    pub fn closes(&self) -> bool {
        self.0.head.closes
    }

    /// Returns the TTL or hop limit of the packets; `None` for the default.
    #[must_use]
    pub fn hop_limit(&self) -> Option<u8> {
        self.0.head.hop_limit
    }

    /// Returns the status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.0.head.status
    }

    /// Returns the status line and fields, each with CRLF, without `Date`, `Connection` and the final blank line.
    #[must_use]
    pub fn head(&self) -> &Bytes {
        &self.0.head.bytes
    }

    /// Returns the value of a field of the head.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        let head = std::str::from_utf8(self.head()).ok()?;
        let mut fields = head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Returns the body.
    #[must_use]
    pub fn body(&self) -> &Body {
        &self.0.body
    }

    /// Returns whether this is the only reference to the response.
    #[must_use]
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

// The part of a head that depends on time and connection: `Date`, `Connection` and the blank line. Each thread renders
// it once per second.

/// 9999-12-31T23:59:59Z, the last time an IMF-fixdate can express (RFC 9110 §5.6.7).
const LAST_SECOND: u64 = 253_402_300_799;

/// `Connection` field of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// No field: an HTTP/1.1 connection stays open.
    Implied,
    /// `Connection: keep-alive`, for an HTTP/1.0 client that requested it.
    KeepAlive,
    /// `Connection: close`: the agent closes the connection after the response.
    Close,
}

struct Tails {
    unix_seconds: u64,
    implied: Bytes,
    keep_alive: Bytes,
    close: Bytes,
}

impl Tails {
    fn at(unix_seconds: u64) -> Self {
        let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(unix_seconds.min(LAST_SECOND)));
        let tail = |connection| Bytes::from(format!("Date: {date}\r\n{connection}\r\n"));
        Self {
            unix_seconds,
            implied: tail(""),
            keep_alive: tail("Connection: keep-alive\r\n"),
            close: tail("Connection: close\r\n"),
        }
    }
}

thread_local! {
    static TAILS: RefCell<Option<Tails>> = const { RefCell::new(None) };
}

/// Returns `Date`, the `Connection` field if one is needed, and the blank line that ends a response head.
#[must_use]
pub fn tail(unix_seconds: u64, persistence: Persistence) -> Bytes {
    TAILS.with_borrow_mut(|tails| {
        let tails = match tails {
            Some(tails) if tails.unix_seconds == unix_seconds => tails,
            stale => stale.insert(Tails::at(unix_seconds)),
        };
        match persistence {
            Persistence::Implied => tails.implied.clone(),
            Persistence::KeepAlive => tails.keep_alive.clone(),
            Persistence::Close => tails.close.clone(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{LAST_SECOND, Persistence, tail};

    #[test]
    fn the_tail_contains_the_date_of_its_second() {
        assert_eq!(tail(784_111_777, Persistence::Implied), "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n");
        assert_eq!(
            tail(784_111_778, Persistence::Close),
            "Date: Sun, 06 Nov 1994 08:49:38 GMT\r\nConnection: close\r\n\r\n"
        );
    }

    #[test]
    fn a_time_beyond_the_date_format_becomes_its_last_second() {
        assert_eq!(tail(u64::MAX, Persistence::Implied), tail(LAST_SECOND, Persistence::Implied));
    }
}
