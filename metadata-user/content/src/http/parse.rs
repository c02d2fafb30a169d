//! From octets to a request head (RFC 9112 §2 to §6).
//!
//! [`Scanner`] finds the end of the head octet by octet, each looked at once, and refuses at the first
//! octet that makes the head unacceptable; so what a request is answered with does not depend on how the
//! network cut it. [`Head::parse`] then reads the complete head.
//!
//! Where the RFC leaves a choice: one bare LF ends a line as CRLF does (§2.2), empty lines before the request
//! line are skipped, and a folded field is refused (§5.2).

use super::error::RequestError;
use super::host::host_of;
use super::{Headers, Method};

/// Octets of a request target.
pub const TARGET_MAX: usize = 2048;
/// Octets of all header fields of a request, line ends included.
pub const FIELDS_MAX: usize = 8192;
/// Header fields of a request.
pub const FIELD_COUNT_MAX: usize = 64;
/// Octets of a method.
const METHOD_MAX: usize = 32;
/// Octets of empty lines skipped before a request line.
const LEADING_MAX: usize = 8;
/// `HTTP/1.1`
const VERSION_LEN: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the request line; true once CR was seen.
    Leading(bool),
    Method,
    Target,
    Version,
    /// The line end after the version; true once CR was seen.
    LineEnd(bool),
    Fields,
}

/// Looks for the end of a request head.
#[derive(Clone, Debug)]
pub struct Scanner {
    stage: Stage,
    /// Octets looked at.
    at: usize,
    /// Where the current element starts; in the fields, where the current line does.
    start: usize,
    /// Where the fields start.
    fields: usize,
    major: u8,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { stage: Stage::Leading(false), at: 0, start: 0, fields: 0, major: 0 }
    }
}

impl Scanner {
    /// Looks at what is new in `head`, the request from its first octet on. Returns the head's length when
    /// its end has been found.
    ///
    /// # Errors
    ///
    /// At the first octet that no acceptable head can contain there.
    pub fn advance(&mut self, head: &[u8]) -> Result<Option<usize>, RequestError> {
        while self.at < head.len() {
            if self.stage == Stage::Fields {
                return self.fields(head);
            }
            self.request_line(head[self.at])?;
        }
        Ok(None)
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.start = self.at + 1;
    }

    fn request_line(&mut self, octet: u8) -> Result<(), RequestError> {
        let length = self.at - self.start;
        match (self.stage, octet) {
            (Stage::Leading(false), b'\r') if self.at < LEADING_MAX => self.stage = Stage::Leading(true),
            (Stage::Leading(_), b'\n') if self.at < LEADING_MAX => self.stage = Stage::Leading(false),
            (Stage::Leading(false), _) => {
                self.stage = Stage::Method;
                self.start = self.at;
                return self.request_line_method(octet, 0);
            }
            (Stage::Method, b' ') if length > 0 => self.enter(Stage::Target),
            (Stage::Method, _) => return self.request_line_method(octet, length),
            (Stage::Target, b' ') if length > 0 => self.enter(Stage::Version),
            (Stage::Target, 0x21..=0x7e) if length < TARGET_MAX => {}
            (Stage::Target, 0x21..=0x7e) => return Err(RequestError::TargetTooLong),
            (Stage::Version, _) => self.version(octet, length)?,
            (Stage::LineEnd(false), b'\r') => self.stage = Stage::LineEnd(true),
            (Stage::LineEnd(_), b'\n') => {
                if self.major != b'1' {
                    return Err(RequestError::Version);
                }
                self.fields = self.at + 1;
                self.enter(Stage::Fields);
            }
            _ => return Err(RequestError::RequestLine),
        }
        self.at += 1;
        Ok(())
    }

    fn request_line_method(&mut self, octet: u8, length: usize) -> Result<(), RequestError> {
        if !is_token(octet) || length >= METHOD_MAX {
            return Err(RequestError::RequestLine);
        }
        self.at += 1;
        Ok(())
    }

    fn version(&mut self, octet: u8, length: usize) -> Result<(), RequestError> {
        let fits = match length {
            0..=4 => octet == b"HTTP/"[length],
            6 => octet == b'.',
            _ => octet.is_ascii_digit(),
        };
        if !fits {
            return Err(RequestError::RequestLine);
        }
        if length == 5 {
            self.major = octet;
        }
        if length + 1 == VERSION_LEN {
            self.enter(Stage::LineEnd(false));
        }
        Ok(())
    }

    /// Goes from line end to line end until a line is empty.
    fn fields(&mut self, head: &[u8]) -> Result<Option<usize>, RequestError> {
        let limit = self.fields + FIELDS_MAX + 2;
        while let Some(end) = head[self.at..].iter().position(|octet| *octet == b'\n') {
            let end = self.at + end;
            if end >= limit {
                break;
            }
            let line = &head[self.start..end];
            self.at = end + 1;
            self.start = self.at;
            if line.is_empty() || line == b"\r" {
                return Ok(Some(self.at));
            }
        }
        self.at = head.len();
        if self.at > limit { Err(RequestError::FieldsTooLarge) } else { Ok(None) }
    }
}

/// True when a request, complete or not, is a HEAD: even when it is refused, no body may follow the answer
/// (RFC 9110 §9.3.2). One behind a bare CR, or more empty lines than are skipped, was refused before it was seen.
#[must_use]
pub fn is_head_request(octets: &[u8]) -> bool {
    let mut line = octets;
    while let Some(rest) = line.strip_prefix(b"\r\n").or_else(|| line.strip_prefix(b"\n")) {
        line = rest;
    }
    octets.len() - line.len() <= LEADING_MAX && line.starts_with(b"HEAD ")
}

/// RFC 9110 §5.6.2.
fn is_token(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&octet)
}

/// A request head, borrowed from the octets it came in.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The method.
    pub method: Method,
    /// The target as received.
    pub target: &'a str,
    /// True for HTTP/1.1 (and any later 1.x, RFC 9110 §2.5), false for HTTP/1.0.
    pub is_1_1: bool,
    /// The header fields.
    pub headers: Headers<'a>,
}

impl<'a> Head<'a> {
    /// Reads a head whose end [`Scanner`] has found.
    ///
    /// # Errors
    ///
    /// When a header field is malformed or there are more than `fields` has room for; when HTTP/1.1 comes without
    /// `Host`, or any version with two of them or one that is malformed (RFC 9112 §3.2).
    pub fn parse(octets: &'a [u8], fields: &'a mut [httparse::Header<'a>]) -> Result<Self, RequestError> {
        let skipped = octets.iter().take_while(|octet| matches!(octet, b'\r' | b'\n')).count();
        let octets = &octets[skipped..];
        let line_end = octets.iter().position(|octet| *octet == b'\n').ok_or(RequestError::RequestLine)?;
        let line = std::str::from_utf8(&octets[..line_end]).map_err(|_| RequestError::RequestLine)?;
        let mut parts = line.trim_end_matches('\r').splitn(3, ' ');
        let (Some(method), Some(target), Some(version)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(RequestError::RequestLine);
        };
        let headers = match httparse::parse_headers(&octets[line_end + 1..], fields) {
            Ok(httparse::Status::Complete((_, headers))) => headers,
            Err(httparse::Error::TooManyHeaders) => return Err(RequestError::TooManyFields),
            Ok(httparse::Status::Partial) | Err(_) => return Err(RequestError::Field),
        };
        let (is_1_1, headers) = (version != "HTTP/1.0", Headers::new(headers));
        let mut hosts = headers.all("host");
        match (hosts.next(), hosts.next()) {
            (None, _) if is_1_1 => return Err(RequestError::Host),
            (Some(_), Some(_)) => return Err(RequestError::Host),
            (Some(host), None) if host_of(host).is_none() => return Err(RequestError::Host),
            _ => {}
        }
        Ok(Self { method: Method::from_token(method), target, is_1_1, headers })
    }

    /// True when the connection is to stay open after the answer (RFC 9112 §9.3).
    #[must_use]
    pub fn keeps_alive(&self) -> bool {
        let has = |token| self.headers.has_token("connection", token);
        if self.is_1_1 { !has("close") } else { has("keep-alive") && !has("close") }
    }

    /// True when the client waits for `100 Continue` before it sends the body (RFC 9110 §10.1.1).
    ///
    /// # Errors
    ///
    /// For any other expectation.
    pub fn expects_continue(&self) -> Result<bool, RequestError> {
        match self.headers.get("expect") {
            Some(value) if value.eq_ignore_ascii_case(b"100-continue") => Ok(self.is_1_1),
            Some(_) => Err(RequestError::Expectation),
            None => Ok(false),
        }
    }
}
