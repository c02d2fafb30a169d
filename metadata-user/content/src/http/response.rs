//! A response rendered before it is asked for.
//!
//! Everything but `Date`, `Connection` and the blank line is computed once; the bytes are shared by
//! reference count between all VMs and connections that send them.

use std::sync::Arc;

use bytes::Bytes;

/// A response status (RFC 9110 §15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Status(pub u16);

impl Status {
    /// The reason phrase, also the first line of an error's text body.
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
            503 => "Service Unavailable",
            505 => "HTTP Version Not Supported",
            _ => "Status",
        }
    }
}

/// What a response says: one piece, or several that other responses may have too.
///
/// A document that holds something long and shared (a vendor-data all VMs have) is sent as what comes before
/// it, the shared octets, and what comes after, and so is not held once per VM.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// One piece, possibly empty.
    One(Bytes),
    /// Pieces sent one after the other, none of them empty.
    Many(Arc<[Bytes]>),
}

impl std::fmt::Debug for Body {
    /// Its length only: user-data, tokens and passwords are not for logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Body({} octets)", self.len())
    }
}

impl Body {
    /// A body of `pieces`; empty ones are left out.
    #[must_use]
    pub fn join(pieces: impl IntoIterator<Item = Bytes>) -> Self {
        let mut pieces: Vec<Bytes> = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        match pieces.len() {
            0 => Self::default(),
            1 => Self::One(pieces.remove(0)),
            _ => Self::Many(pieces.into()),
        }
    }

    /// The pieces, in order.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }

    /// Length in octets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces().iter().map(Bytes::len).sum()
    }

    /// True without octets.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All octets in one piece; copies when there are several.
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
    fn from(octets: T) -> Self {
        Self::One(octets.into())
    }
}

/// A rendered response. Cloning copies one reference count.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Response(Arc<Rendered>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rendered {
    head: Arc<Head>,
    body: Body,
}

/// All but the body: many responses have the same.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Head {
    octets: Bytes,
    status: Status,
    closes: bool,
    hop_limit: Option<u8>,
}

impl Response {
    /// The same response with each piece of its body that nobody else has put on an account; `None` when `charge`
    /// refuses one. A response that others have, because it was rendered before it was asked for, is left as it is.
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

impl std::fmt::Debug for Head {
    /// Without its fields: an answer to a login has a cookie.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Head").field("status", &self.status).finish_non_exhaustive()
    }
}

impl Response {
    /// Renders status line, `Server`, `Cache-Control: no-store`, `Accept-Ranges: none`, `Content-Type`,
    /// `Content-Length` (none on 204) and `fields`, which win over the first two.
    #[must_use]
    pub fn new(
        status: Status,
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
        if status != Status(204) {
            field("Content-Length", &body.len());
        }
        let octets = format!("HTTP/1.1 {} {}\r\n{head}", status.0, status.reason()).into();
        let head = Head { octets, status, closes: false, hop_limit: None };
        Self(Arc::new(Rendered { head: Arc::new(head), body }))
    }

    /// The short text error every dialect without a form of its own uses: the reason phrase and a newline.
    #[must_use]
    pub fn error(status: Status, fields: &[(&str, &str)]) -> Self {
        let body = format!("{}\n", status.reason());
        Self::new(status, Some("text/plain; charset=utf-8"), fields, body)
    }

    /// A response of a head and a body that others hold, too.
    #[must_use]
    pub(crate) fn sharing(head: Arc<Head>, body: Body) -> Self {
        Self(Arc::new(Rendered { head, body }))
    }

    /// A response another process rendered: its [`head`](Self::head), body, and what else it says of itself.
    #[must_use]
    pub fn from_parts(head: Bytes, status: Status, closes: bool, hop_limit: Option<u8>, body: Bytes) -> Self {
        Self::sharing(Arc::new(Head { octets: head, status, closes, hop_limit }), body.into())
    }

    /// The same response with another head.
    fn with_head(self, change: impl FnOnce(&mut Head)) -> Self {
        let mut head = (*self.0.head).clone();
        change(&mut head);
        Self(Arc::new(Rendered { head: Arc::new(head), body: self.0.body.clone() }))
    }

    /// All but the body, to be shared.
    #[must_use]
    pub(crate) fn shared_head(&self) -> &Arc<Head> {
        &self.0.head
    }

    /// The same response, after which the connection closes: our FIN goes with the last of it, so that
    /// TIME-WAIT is ours and the client can use its port again at once.
    #[must_use]
    pub fn and_close(self) -> Self {
        self.with_head(|head| head.closes = true)
    }

    /// The same response in packets of this TTL or hop limit, so that it gets no further than so many hops.
    #[must_use]
    pub fn within(self, hop_limit: u8) -> Self {
        self.with_head(|head| head.hop_limit = Some(hop_limit))
    }

    /// True when the connection closes after this response, whatever the client would like.
    #[must_use]
    pub fn closes(&self) -> bool {
        self.0.head.closes
    }

    /// The TTL or hop limit of its packets, when it is not the usual one.
    #[must_use]
    pub fn hop_limit(&self) -> Option<u8> {
        self.0.head.hop_limit
    }

    /// The status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.0.head.status
    }

    /// Status line and fields, each ended by CRLF, without `Date`, `Connection` and the final blank line.
    #[must_use]
    pub fn head(&self) -> &Bytes {
        &self.0.head.octets
    }

    /// The value of a field of the head, as it is written.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        let head = std::str::from_utf8(self.head()).ok()?;
        let mut fields = head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> &Body {
        &self.0.body
    }

    /// True when nobody else holds this very response.
    #[must_use]
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}
