//! A response rendered before it is asked for.
//!
//! Everything but `Date`, `Connection` and the blank line is computed once; the bytes are shared by
//! reference count between all VMs and connections that send them.

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
            204 => "No Content",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            409 => "Conflict",
            413 => "Content Too Large",
            414 => "URI Too Long",
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

/// A rendered response. Cloning copies two reference counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    status: Status,
    head: Bytes,
    body: Bytes,
    closes: bool,
}

impl Response {
    /// Renders status line, `Server`, `Cache-Control: no-store`, `Accept-Ranges: none`, `Content-Type`,
    /// `Content-Length` (none on 204) and `fields`.
    #[must_use]
    pub fn new(status: Status, content_type: Option<&str>, fields: &[(&str, &str)], body: Bytes) -> Self {
        use std::fmt::Write as _;
        let mut head = String::with_capacity(256);
        let mut field = |name: &str, value: &dyn std::fmt::Display| {
            write!(head, "{name}: {value}\r\n").expect("writing to a String cannot fail");
        };
        if !fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("server")) {
            field("Server", &"metadata");
        }
        field("Cache-Control", &"no-store");
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
        let head = format!("HTTP/1.1 {} {}\r\n{head}", status.0, status.reason());
        Self { status, head: head.into(), body, closes: false }
    }

    /// The short text error every dialect without a form of its own uses: the reason phrase and a newline.
    #[must_use]
    pub fn error(status: Status, fields: &[(&str, &str)]) -> Self {
        let body = format!("{}\n", status.reason());
        Self::new(status, Some("text/plain; charset=utf-8"), fields, body.into())
    }

    /// The same response, after which the connection closes: our FIN goes with the last of it, so that
    /// TIME-WAIT is ours and the client can use its port again at once.
    #[must_use]
    pub fn and_close(self) -> Self {
        Self { closes: true, ..self }
    }

    /// True when the connection closes after this response, whatever the client would like.
    #[must_use]
    pub fn closes(&self) -> bool {
        self.closes
    }

    /// The status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status
    }

    /// Status line and fields, each ended by CRLF, without `Date`, `Connection` and the final blank line.
    #[must_use]
    pub fn head(&self) -> &Bytes {
        &self.head
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.body
    }
}
