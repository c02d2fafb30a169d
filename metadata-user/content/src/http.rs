//! HTTP/1.0 and 1.1 as a metadata service needs it (RFC 9110, RFC 9112): a parsed request, and why one is refused.

pub mod body;
pub mod parse;
mod response;
pub mod target;

pub(crate) use response::ResponseHead;
pub use response::{Body, Persistence, Response, StatusCode, tail};

use body::BODY_MAX;
use parse::{FIELD_COUNT_MAX, FIELDS_MAX, TARGET_MAX};
use std::fmt;

// A parsed request, borrowed from the connection's receive buffer.

/// Request methods that metadata clients use (RFC 9110 §9). Every other token is [`Method::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// GET.
    Get,
    /// HEAD; gets the answer to GET without the body.
    Head,
    /// POST.
    Post,
    /// PUT.
    Put,
    /// PATCH.
    Patch,
    /// DELETE.
    Delete,
    /// OPTIONS.
    Options,
    /// Any other method.
    Other,
}

impl Method {
    /// Parses a method token, case-sensitively (RFC 9110 §9.1).
    #[must_use]
    pub fn from_token(token: &str) -> Self {
        match token {
            "GET" => Self::Get,
            "HEAD" => Self::Head,
            "POST" => Self::Post,
            "PUT" => Self::Put,
            "PATCH" => Self::Patch,
            "DELETE" => Self::Delete,
            "OPTIONS" => Self::Options,
            _ => Self::Other,
        }
    }
}

impl Method {
    /// Returns the method token; `?` for [`Method::Other`].
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
            Self::Options => "OPTIONS",
            Self::Other => "?",
        }
    }
}

/// Header fields of a request, in the order received.
#[derive(Clone, Copy)]
pub struct Headers<'a> {
    fields: &'a [httparse::Header<'a>],
}

impl fmt::Debug for Headers<'_> {
    /// Prints field names only: values may be tokens and signatures.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.fields.iter().map(|field| field.name)).finish()
    }
}

impl<'a> Headers<'a> {
    /// Wraps parsed fields.
    #[must_use]
    pub fn new(fields: &'a [httparse::Header<'a>]) -> Self {
        Self { fields }
    }

    /// Returns the first value of a field, without surrounding white space. Names are case-insensitive (RFC 9110 §5.1).
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.fields.iter().find(|f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value.trim_ascii())
    }

    /// Returns every value of a field in the order received, without surrounding white space.
    pub fn all<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'a [u8]> + 's {
        self.fields.iter().filter(move |f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value.trim_ascii())
    }

    /// Returns whether a comma-separated list field (RFC 9110 §5.6.1) contains `token`, ignoring case.
    #[must_use]
    pub fn has_token(&self, name: &str, token: &str) -> bool {
        let mut items = self.all(name).flat_map(|value| value.split(|byte| *byte == b','));
        items.any(|item| item.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
    }

    /// Returns all fields as received.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a [u8])> {
        self.fields.iter().map(|field| (field.name, field.value))
    }

    /// Returns whether the field is present; an empty value counts.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }
}

/// A request target after normalisation: without empty segments, with escapes decoded, and with the query split off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTarget<'a> {
    /// Path: `/` for the root, else `/a/b` without a trailing slash.
    pub path: &'a str,
    /// Text after the first `?`, not decoded; empty if there is none.
    pub query: &'a str,
}

/// One complete request.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Request method.
    pub method: Method,
    /// Normalised request target.
    pub target: RequestTarget<'a>,
    /// Header fields in the order received.
    pub headers: Headers<'a>,
    /// Body; empty if the request has none.
    pub body: &'a [u8],
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, target, headers, body } = self;
        let mut shown = f.debug_struct("Request");
        shown.field("method", method).field("target", target).field("headers", headers);
        shown.field("body_bytes", &body.len()).finish()
    }
}

// Reasons to refuse a request.

/// Why a request is refused before its route is looked up. The connection closes after the answer, because the start
/// of the next request is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request line is not `method SP target SP HTTP/x.y` (RFC 9112 §3).
    #[error("expected a request line of method, target and version")]
    RequestLine,
    /// The target is longer than [`TARGET_MAX`].
    #[error("expected a target of at most {TARGET_MAX} bytes")]
    TargetTooLong,
    /// The target is neither in origin-form nor an absolute `http` URL, or it contains a bad escape, NUL, an encoded
    /// slash or a dot segment.
    #[error("expected a path without dot segments, with escapes of two hex digits")]
    Target,
    /// The version is not HTTP/1.x.
    #[error("expected HTTP/1.0 or HTTP/1.1")]
    Version,
    /// The header fields exceed [`FIELDS_MAX`] bytes.
    #[error("expected at most {FIELDS_MAX} bytes of header fields")]
    FieldsTooLarge,
    /// There are more than [`FIELD_COUNT_MAX`] header fields.
    #[error("expected at most {FIELD_COUNT_MAX} header fields")]
    TooManyFields,
    /// A header field is not `name: value`.
    #[error("expected header fields of the form `name: value`")]
    Field,
    /// `Host` is missing in HTTP/1.1, or it is repeated or malformed in any version (RFC 9112 §3.2).
    #[error("expected one Host field with a host and an optional port")]
    Host,
    /// `Content-Length` is not a number, has several different values, or stands beside `Transfer-Encoding`; or the
    /// transfer codings do not end in one chunked (RFC 9112 §6.3).
    #[error("expected one way to determine the length of the body")]
    Length,
    /// Another transfer coding precedes chunked (RFC 9112 §6.1).
    #[error("expected no transfer coding other than chunked")]
    Coding,
    /// A chunk is malformed (RFC 9112 §7.1).
    #[error("expected chunks with sizes in hex and CRLF after each")]
    Chunk,
    /// The body is longer than [`BODY_MAX`].
    #[error("expected a body of at most {BODY_MAX} bytes")]
    BodyTooLarge,
    /// `Expect` has a value other than 100-continue.
    #[error("expected no expectation other than 100-continue")]
    Expectation,
    /// The guest closed its side before the request was complete.
    #[error("expected the rest of the request before the end of the connection")]
    Truncated,
    /// The rest of the request did not arrive in time.
    #[error("expected the rest of the request within the time limit")]
    Timeout,
}

impl RequestError {
    /// Returns the status of the answer.
    #[must_use]
    pub fn status(self) -> StatusCode {
        StatusCode(match self {
            Self::RequestLine
            | Self::Target
            | Self::Field
            | Self::Host
            | Self::Length
            | Self::Chunk
            | Self::Truncated => 400,
            Self::Timeout => 408,
            Self::BodyTooLarge => 413,
            Self::TargetTooLong => 414,
            Self::Expectation => 417,
            Self::FieldsTooLarge | Self::TooManyFields => 431,
            Self::Coding => 501,
            Self::Version => 505,
        })
    }
}
