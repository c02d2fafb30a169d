//! Parses a request head from bytes (RFC 9112 §2 to §6).
//!
//! [`Scanner`] finds the end of the head. It examines each byte once and refuses the head at the first invalid byte,
//! so the answer does not depend on how the network segments the request. [`RequestHead::parse`] then parses the
//! complete head.
//!
//! Where the RFC leaves a choice, this parser accepts a bare LF as a line end (§2.2), skips empty lines before the
//! request line (§2.2), and refuses a folded field (§5.2).

use super::target::host_of;
use super::{Headers, Method, RequestError};

/// Maximum length of a request target, in bytes.
pub const TARGET_MAX: usize = 2048;
/// Maximum length of all header fields of a request in bytes, line ends included.
pub const FIELDS_MAX: usize = 8192;
/// Maximum number of header fields of a request.
pub const FIELD_COUNT_MAX: usize = 64;
/// Maximum length of a method, in bytes.
const METHOD_MAX: usize = 32;
/// Maximum bytes of empty lines skipped before a request line.
const LEADING_MAX: usize = 8;
/// Length of `HTTP/1.1`, in bytes.
const VERSION_LEN: usize = 8;

/// Bytes of a request in which [`path_in`] looks for the path.
const GLANCE: usize = 128;

/// Returns the path of a request that starts with these bytes, as a hint: nothing is checked. Empty if there is none.
#[must_use]
pub fn path_in(bytes: &[u8]) -> &str {
    let line = &bytes[..bytes.len().min(GLANCE)];
    let mut words = line.split(|byte| *byte == b' ');
    let (_method, target) = (words.next(), words.next());
    // Without a third word the target may go on.
    let Some(target) = target.filter(|_| words.next().is_some()) else { return "" };
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    let path = if path.len() > 1 { path.strip_suffix(b"/").unwrap_or(path) } else { path };
    std::str::from_utf8(path).unwrap_or_default()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the request line. True after a CR.
    Leading(bool),
    Method,
    Target,
    Version,
    /// At the line end after the version. True after a CR.
    LineEnd(bool),
    Fields,
}

/// Finds the end of a request head.
#[derive(Clone, Debug)]
pub struct Scanner {
    stage: Stage,
    /// Number of bytes examined.
    at: usize,
    /// Start of the current element; within the fields, start of the current line.
    start: usize,
    /// Start of the fields.
    fields: usize,
    major: u8,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { stage: Stage::Leading(false), at: 0, start: 0, fields: 0, major: 0 }
    }
}

impl Scanner {
    /// Examines the new bytes of `head`, which starts with the first byte of the request. Returns the length of the
    /// head once its end is found.
    ///
    /// # Errors
    ///
    /// Fails at the first byte that makes the head invalid.
    pub fn advance(&mut self, head: &[u8]) -> Result<Option<usize>, RequestError> {
        while self.at < head.len() {
            if self.stage == Stage::Fields {
                return self.fields(head);
            }
            if self.stage == Stage::Target {
                self.target(&head[self.at..])?;
                continue;
            }
            self.request_line(head[self.at])?;
        }
        Ok(None)
    }

    /// Takes what has arrived of the target, its longest part, at once. `bytes` is not empty.
    fn target(&mut self, bytes: &[u8]) -> Result<(), RequestError> {
        let run = bytes.iter().take_while(|byte| matches!(byte, 0x21..=0x7e)).count();
        self.at += run;
        let length = self.at - self.start;
        match bytes.get(run) {
            _ if length > TARGET_MAX => Err(RequestError::TargetTooLong),
            Some(b' ') if length > 0 => {
                self.enter(Stage::Version);
                self.at += 1;
                Ok(())
            }
            Some(_) => Err(RequestError::RequestLine),
            None => Ok(()),
        }
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.start = self.at + 1;
    }

    fn request_line(&mut self, byte: u8) -> Result<(), RequestError> {
        let length = self.at - self.start;
        match (self.stage, byte) {
            (Stage::Leading(false), b'\r') if self.at < LEADING_MAX => self.stage = Stage::Leading(true),
            (Stage::Leading(_), b'\n') if self.at < LEADING_MAX => self.stage = Stage::Leading(false),
            (Stage::Leading(false), _) => {
                self.stage = Stage::Method;
                self.start = self.at;
                return self.request_line_method(byte, 0);
            }
            (Stage::Method, b' ') if length > 0 => self.enter(Stage::Target),
            (Stage::Method, _) => return self.request_line_method(byte, length),
            (Stage::Version, _) => self.version(byte, length)?,
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

    fn request_line_method(&mut self, byte: u8, length: usize) -> Result<(), RequestError> {
        if !is_token(byte) || length >= METHOD_MAX {
            return Err(RequestError::RequestLine);
        }
        self.at += 1;
        Ok(())
    }

    fn version(&mut self, byte: u8, length: usize) -> Result<(), RequestError> {
        let fits = match length {
            0..=4 => byte == b"HTTP/"[length],
            6 => byte == b'.',
            _ => byte.is_ascii_digit(),
        };
        if !fits {
            return Err(RequestError::RequestLine);
        }
        if length == 5 {
            self.major = byte;
        }
        if length + 1 == VERSION_LEN {
            self.enter(Stage::LineEnd(false));
        }
        Ok(())
    }

    /// Examines line by line until one is empty.
    fn fields(&mut self, head: &[u8]) -> Result<Option<usize>, RequestError> {
        let limit = self.fields + FIELDS_MAX + 2;
        while let Some(end) = head[self.at..].iter().position(|byte| *byte == b'\n') {
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

/// Returns whether a request, complete or not, is a HEAD. Even the answer to a refused HEAD has no body (RFC 9110
/// §9.3.2). Returns false for a HEAD after a bare CR or too many empty lines: the scanner refuses these earlier.
#[must_use]
pub fn is_head_request(bytes: &[u8]) -> bool {
    let mut line = bytes;
    while let Some(rest) = line.strip_prefix(b"\r\n").or_else(|| line.strip_prefix(b"\n")) {
        line = rest;
    }
    bytes.len() - line.len() <= LEADING_MAX && line.starts_with(b"HEAD ")
}

/// `tchar` of RFC 9110 §5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A request head, borrowed from the received bytes.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead<'a> {
    /// Request method.
    pub method: Method,
    /// Request target as received.
    pub target: &'a str,
    /// True for HTTP/1.1 and later 1.x (RFC 9110 §2.5), false for HTTP/1.0.
    pub is_1_1: bool,
    /// Header fields in the order received.
    pub headers: Headers<'a>,
}

impl<'a> RequestHead<'a> {
    /// Parses a head whose end [`Scanner`] has found.
    ///
    /// # Errors
    ///
    /// Fails if a header field is malformed or `fields` has too little room. Fails if `Host` is missing in HTTP/1.1, or
    /// repeated or malformed in any version (RFC 9112 §3.2).
    pub fn parse(bytes: &'a [u8], fields: &'a mut [httparse::Header<'a>]) -> Result<Self, RequestError> {
        let skipped = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        let bytes = &bytes[skipped..];
        let line_end = bytes.iter().position(|byte| *byte == b'\n').ok_or(RequestError::RequestLine)?;
        let line = std::str::from_utf8(&bytes[..line_end]).map_err(|_| RequestError::RequestLine)?;
        let mut parts = line.trim_end_matches('\r').splitn(3, ' ');
        let (Some(method), Some(target), Some(version)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(RequestError::RequestLine);
        };
        let headers = match httparse::parse_headers(&bytes[line_end + 1..], fields) {
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

    /// Returns whether the client wants the connection to stay open after the answer (RFC 9112 §9.3).
    #[must_use]
    pub fn keeps_alive(&self) -> bool {
        let has = |token| self.headers.has_token("connection", token);
        if self.is_1_1 { !has("close") } else { has("keep-alive") && !has("close") }
    }

    /// Returns whether the client waits for `100 Continue` before it sends the body (RFC 9110 §10.1.1).
    ///
    /// # Errors
    ///
    /// Fails on any other expectation.
    pub fn expects_continue(&self) -> Result<bool, RequestError> {
        match self.headers.get("expect") {
            Some(value) if value.eq_ignore_ascii_case(b"100-continue") => Ok(self.is_1_1),
            Some(_) => Err(RequestError::Expectation),
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{GLANCE, path_in};

    #[test]
    fn the_hint_is_the_path_of_a_complete_request_line_and_else_empty() {
        let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(GLANCE));
        for (bytes, path) in [
            ("GET / HTTP/1.1\r\n", "/"),
            ("GET /v1/meta-data HTTP/1.1\r\nHost: x\r\n", "/v1/meta-data"),
            ("PUT /latest/api/token HTTP/1.1\r\n", "/latest/api/token"),
            ("GET /a/b/ HTTP/1.1", "/a/b"),
            ("GET /a?b=/c HTTP/1.1", "/a"),
            ("GET /a", ""),
            ("GET", ""),
            ("", ""),
            (&long, ""),
        ] {
            assert_eq!(path_in(bytes.as_bytes()), path, "{bytes}");
        }
        assert_eq!(path_in(b"GET /\xff HTTP/1.1"), "");
    }
}
