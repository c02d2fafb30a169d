//! What is wrong with a request.

use super::Status;
use super::body::BODY_MAX;
use super::parse::{FIELD_COUNT_MAX, FIELDS_MAX, TARGET_MAX};

/// Why a request is refused before anyone looks at what it asks. The connection closes after the answer,
/// since where the next request would start is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not `method SP target SP HTTP/x.y`.
    #[error("expected a request line of method, target and version")]
    RequestLine,
    /// Longer than [`TARGET_MAX`].
    #[error("expected a target of at most {TARGET_MAX} octets")]
    TargetTooLong,
    /// Neither origin-form nor `http` in absolute form, a bad escape, NUL, an encoded slash or a dot segment.
    #[error("expected a path without dot segments, with escapes of two hex digits")]
    Target,
    /// Not HTTP/1.
    #[error("expected HTTP/1.0 or HTTP/1.1")]
    Version,
    /// More than [`FIELDS_MAX`] octets of header fields.
    #[error("expected at most {FIELDS_MAX} octets of header fields")]
    FieldsTooLarge,
    /// More than [`FIELD_COUNT_MAX`] header fields.
    #[error("expected at most {FIELD_COUNT_MAX} header fields")]
    TooManyFields,
    /// Not `name: value`.
    #[error("expected header fields of the form `name: value`")]
    Field,
    /// No `Host` in HTTP/1.1, or in any version more than one, or one that is no host (RFC 9112 §3.2).
    #[error("expected one Host field, of a host and perhaps a port")]
    Host,
    /// `Content-Length` that is no number, or several that differ, or beside `Transfer-Encoding`; transfer codings
    /// that do not end in one chunked (RFC 9112 §6.3).
    #[error("expected one length of the body")]
    Length,
    /// A transfer coding before chunked (RFC 9112 §6.1).
    #[error("expected no transfer coding but chunked")]
    Coding,
    /// Chunks that are none.
    #[error("expected chunks with sizes in hex and CRLF after each")]
    Chunk,
    /// More than [`BODY_MAX`].
    #[error("expected a body of at most {BODY_MAX} octets")]
    BodyTooLarge,
    /// An expectation other than 100-continue.
    #[error("expected no expectation but 100-continue")]
    Expectation,
    /// The guest closed its side in the middle of a request.
    #[error("expected the rest of the request before the end of the connection")]
    Truncated,
    /// The rest of the request did not come in time.
    #[error("expected the rest of the request sooner")]
    Timeout,
}

impl RequestError {
    /// The status it is answered with.
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
