//! Reasons to refuse a request.

use super::Status;
use super::body::BODY_MAX;
use super::parse::{FIELD_COUNT_MAX, FIELDS_MAX, TARGET_MAX};

/// Why a request is refused before its route is looked up. The connection closes after the answer, because the start
/// of the next request is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request line is not `method SP target SP HTTP/x.y` (RFC 9112 §3).
    #[error("expected a request line of method, target and version")]
    RequestLine,
    /// The target is longer than [`TARGET_MAX`].
    #[error("expected a target of at most {TARGET_MAX} octets")]
    TargetTooLong,
    /// The target is neither in origin-form nor an absolute `http` URL, or it contains a bad escape, NUL, an encoded
    /// slash or a dot segment.
    #[error("expected a path without dot segments, with escapes of two hex digits")]
    Target,
    /// The version is not HTTP/1.x.
    #[error("expected HTTP/1.0 or HTTP/1.1")]
    Version,
    /// The header fields exceed [`FIELDS_MAX`] octets.
    #[error("expected at most {FIELDS_MAX} octets of header fields")]
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
    #[error("expected no transfer coding but chunked")]
    Coding,
    /// A chunk is malformed (RFC 9112 §7.1).
    #[error("expected chunks with sizes in hex and CRLF after each")]
    Chunk,
    /// The body is longer than [`BODY_MAX`].
    #[error("expected a body of at most {BODY_MAX} octets")]
    BodyTooLarge,
    /// `Expect` has a value other than 100-continue.
    #[error("expected no expectation but 100-continue")]
    Expectation,
    /// The guest closed its side before the request was complete.
    #[error("expected the rest of the request before the end of the connection")]
    Truncated,
    /// The rest of the request did not arrive in time.
    #[error("expected the rest of the request sooner")]
    Timeout,
}

impl RequestError {
    /// Returns the status of the answer.
    #[must_use]
    pub fn status(self) -> Status {
        Status(match self {
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
