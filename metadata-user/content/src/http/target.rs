//! Normalises a request target into the path that is looked up, and checks the form of a host.
//!
//! The steps, in this order: drop scheme and authority of an absolute form, split off the query at the first `?`, split
//! the path at `/`, drop empty segments, and decode each segment. Segments are decoded after the split, so that an
//! escape cannot turn one path into another.

use std::borrow::Cow;
use std::net::Ipv6Addr;

use super::RequestTarget;
use super::parse::TARGET_MAX;

/// Why a target has no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Neither origin-form nor absolute form, a scheme other than `http`, no host, a bad escape, NUL, an encoded
    /// slash, or a dot segment. The answer is 400.
    #[error("expected a path without dot segments, with escapes of two hex digits")]
    Malformed,
    /// Well formed, but not UTF-8. The answer is 404, because every served path is UTF-8.
    #[error("expected a path in UTF-8")]
    NotText,
}

/// A normalised target. Owns its path only if the client wrote another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Normal<'a> {
    path: Cow<'a, str>,
    query: &'a str,
}

impl Normal<'_> {
    /// Returns the target.
    #[must_use]
    pub fn target(&self) -> RequestTarget<'_> {
        RequestTarget { path: &self.path, query: self.query }
    }
}

/// Normalises a target.
///
/// # Errors
///
/// See [`TargetError`]. If both apply, the error is `Malformed`.
pub fn normalise(target: &str) -> Result<Normal<'_>, TargetError> {
    let target = origin(target).filter(|t| t.len() <= TARGET_MAX).ok_or(TargetError::Malformed)?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let path = if is_normal(path) { path.into() } else { decoded(path)?.into() };
    Ok(Normal { path, query })
}

/// Returns whether decoding would not change the path, as for nearly all requests.
fn is_normal(path: &str) -> bool {
    let mut before = None;
    let has_only_plain_bytes = path.bytes().all(|byte| {
        let is_plain = match byte {
            b'%' => false,
            // An empty segment, or perhaps a dot segment.
            b'/' | b'.' => before != Some(b'/'),
            _ => before.is_some(),
        };
        before = Some(byte);
        is_plain
    });
    has_only_plain_bytes && (path == "/" || !path.ends_with('/')) && path.starts_with('/')
}

/// Decodes a path without its empty segments.
fn decoded(path: &str) -> Result<String, TargetError> {
    let mut bytes = Vec::with_capacity(path.len().max(1));
    for segment in path.split('/').filter(|segment| !segment.is_empty()) {
        bytes.push(b'/');
        let start = bytes.len();
        decode(segment.as_bytes(), &mut bytes)?;
        if matches!(&bytes[start..], b"." | b"..") {
            return Err(TargetError::Malformed);
        }
    }
    if bytes.is_empty() {
        bytes.push(b'/');
    }
    String::from_utf8(bytes).map_err(|_| TargetError::NotText)
}

/// Returns the origin-form of a target (RFC 9112 §3.2.1, §3.2.2), without a leading slash if it has no path.
fn origin(target: &str) -> Option<&str> {
    if target.starts_with('/') {
        return Some(target);
    }
    let (scheme, rest) = target.split_once("://")?;
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    // Refuse other schemes (RFC 9110 §7.4) and an empty host (§4.2.1).
    let names_host = host_of(authority.as_bytes()).is_some_and(|host| !host.is_empty());
    (scheme.eq_ignore_ascii_case("http") && names_host).then_some(path)
}

/// Appends the bytes of a segment.
fn decode(segment: &[u8], bytes: &mut Vec<u8>) -> Result<(), TargetError> {
    let mut encoded = segment.iter();
    while let Some(&byte) = encoded.next() {
        bytes.push(if byte == b'%' {
            let mut digit = || {
                let digit = encoded.next().and_then(|d| char::from(*d).to_digit(16));
                digit.ok_or(TargetError::Malformed)
            };
            let decoded = (digit()? << 4 | digit()?) as u8;
            if matches!(decoded, 0 | b'/') {
                return Err(TargetError::Malformed);
            }
            decoded
        } else {
            byte
        });
    }
    Ok(())
}

// The host and port of a `Host` field and of a target in absolute form (RFC 9110 §7.2, RFC 3986 §3.2.2).
//
// The agent checks only the form of the host, as RFC 9112 §3.2 requires. It identifies the VM by its port and ignores
// which host a request names.

/// Returns the host of `host [":" port]`; it may be empty. Returns `None` if the text has another form.
///
/// The zone of an IPv6 address may follow `%` or `%25` (RFC 6874 §2): HTTP libraries send both.
#[must_use]
pub fn host_of(text: &[u8]) -> Option<&[u8]> {
    let end = match text.strip_prefix(b"[") {
        Some(rest) => {
            let length = rest.iter().position(|byte| *byte == b']')?;
            is_literal(&rest[..length]).then_some(length + 2)?
        }
        None => {
            let length = text.iter().position(|byte| *byte == b':').unwrap_or(text.len());
            is_name(&text[..length]).then_some(length)?
        }
    };
    let (host, port) = text.split_at(end);
    let is_port = port.is_empty() || port[0] == b':' && port[1..].iter().all(u8::is_ascii_digit);
    is_port.then_some(host)
}

/// Returns whether the text is a `reg-name` (RFC 3986 §3.2.2). Every IPv4 address is one.
fn is_name(text: &[u8]) -> bool {
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        let fits = match byte {
            b'%' => [bytes.next(), bytes.next()].iter().all(|d| d.is_some_and(u8::is_ascii_hexdigit)),
            byte => is_unreserved(*byte) || is_delimiter(*byte),
        };
        if !fits {
            return false;
        }
    }
    true
}

/// Returns whether the text may stand in brackets: an IPv6 address with an optional zone, or an `IPvFuture`.
fn is_literal(text: &[u8]) -> bool {
    if let Some(later) = text.strip_prefix(b"v").or_else(|| text.strip_prefix(b"V")) {
        let Some(dot) = later.iter().position(|byte| *byte == b'.') else { return false };
        let (version, address) = (&later[..dot], &later[dot + 1..]);
        let fits = |byte: &u8| is_unreserved(*byte) || is_delimiter(*byte) || *byte == b':';
        return !version.is_empty()
            && version.iter().all(u8::is_ascii_hexdigit)
            && !address.is_empty()
            && address.iter().all(fits);
    }
    let Ok(text) = std::str::from_utf8(text) else { return false };
    let (address, zone) = text.split_once('%').map_or((text, None), |(address, zone)| (address, Some(zone)));
    let is_zone = |zone: &str| !zone.is_empty() && zone.bytes().all(|o| is_unreserved(o) || o == b'%');
    address.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(is_zone)
}

/// `unreserved` of RFC 3986 §2.3.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

/// `sub-delims` of RFC 3986 §2.2.
fn is_delimiter(byte: u8) -> bool {
    b"!$&'()*+,;=".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::{Normal, TARGET_MAX, TargetError, decoded, host_of, is_normal, normalise};

    /// Path and query, or the error.
    type Outcome = Result<(&'static str, &'static str), TargetError>;

    #[test]
    fn targets_are_normalised_as_in_the_table() {
        use TargetError::{Malformed, NotText};
        let cases: &[(&str, Outcome)] = &[
            ("/", Ok(("/", ""))),
            ("/latest", Ok(("/latest", ""))),
            ("/latest/", Ok(("/latest", ""))),
            ("//latest///x", Ok(("/latest/x", ""))),
            ("///", Ok(("/", ""))),
            ("/a?b", Ok(("/a", "b"))),
            ("/a/?b/c?d", Ok(("/a", "b/c?d"))),
            ("/?", Ok(("/", ""))),
            ("/a%3Fb", Ok(("/a?b", ""))),
            ("/%41%7a", Ok(("/Az", ""))),
            ("/caf%C3%a9", Ok(("/café", ""))),
            ("/a%2eb", Ok(("/a.b", ""))),
            ("/...", Ok(("/...", ""))),
            ("http://169.254.169.254/x", Ok(("/x", ""))),
            ("HTTP://[fe80::a9fe:a9fe%25eth0]:80/x?y", Ok(("/x", "y"))),
            ("http://host", Ok(("/", ""))),
            ("http://host?q", Ok(("/", "q"))),
            ("/a%2Fb", Err(Malformed)),
            ("/a%00", Err(Malformed)),
            ("/%", Err(Malformed)),
            ("/%4", Err(Malformed)),
            ("/%4g", Err(Malformed)),
            ("/%+1", Err(Malformed)),
            ("/a%4/1", Err(Malformed)),
            ("/.", Err(Malformed)),
            ("/a/../b", Err(Malformed)),
            ("/a/%2e%2E", Err(Malformed)),
            ("/%ff/..", Err(Malformed)),
            ("/%ff", Err(NotText)),
            ("/%c3", Err(NotText)),
            ("*", Err(Malformed)),
            ("host:80", Err(Malformed)),
            ("latest/meta-data", Err(Malformed)),
            ("://host/", Err(Malformed)),
            ("1http://host/", Err(Malformed)),
            ("https://host/", Err(Malformed)),
            ("http://", Err(Malformed)),
            ("http:///x", Err(Malformed)),
            ("http://:80/x", Err(Malformed)),
            ("http://user@host/x", Err(Malformed)),
        ];
        for (target, expected) in cases {
            let expected = expected.map(|(path, query)| Normal { path: path.into(), query });
            assert_eq!(normalise(target), expected, "{target}");
        }
    }

    #[test]
    fn a_target_may_have_the_maximum_length_and_no_more() {
        let target = format!("/{}", "a".repeat(TARGET_MAX - 1));
        assert_eq!(normalise(&target).map(|normal| normal.path.len()), Ok(TARGET_MAX));
        assert_eq!(normalise(&format!("{target}a")), Err(TargetError::Malformed));
    }

    #[test]
    fn a_path_is_normal_if_decoding_does_not_change_it() {
        let bytes = ["/", ".", "%41", "a", "?", "é"];
        for number in 0..bytes.len().pow(5) {
            let path: String =
                (0..5).map(|place| bytes[number / bytes.len().pow(place) % bytes.len()]).collect();
            let is_same = decoded(&path).is_ok_and(|decoded| decoded == path);
            assert!(!is_normal(&path) || is_same, "{path}");
            // A dot at the start of a segment is left to the decoder.
            assert!(is_normal(&path) || !is_same || path.contains("/."), "{path}");
        }
    }

    #[test]
    fn a_host_is_split_from_its_port_as_in_the_table() {
        let cases = [
            ("", Some("")),
            (":80", Some("")),
            ("metadata.google.internal", Some("metadata.google.internal")),
            ("169.254.169.254:80", Some("169.254.169.254")),
            ("x:", Some("x")),
            ("a%2Db", Some("a%2Db")),
            ("[fd00:ec2::254]:80", Some("[fd00:ec2::254]")),
            ("[fe80::1%25eth0]", Some("[fe80::1%25eth0]")),
            ("[fe80::1%eth0]", Some("[fe80::1%eth0]")),
            ("[v1.x:y]:1", Some("[v1.x:y]")),
            ("x:80:80", None),
            ("x:a", None),
            ("user@x", None),
            ("a%2", None),
            ("fe80::1", None),
            ("[fe80::1", None),
            ("[fe80::1]80", None),
            ("[fe80::1%]", None),
            ("[x]", None),
            ("[v1]", None),
            ("[v.x]", None),
            ("[v1.]", None),
        ];
        for (text, host) in cases {
            assert_eq!(host_of(text.as_bytes()), host.map(str::as_bytes), "{text}");
        }
        assert_eq!(host_of(b"[\xff]"), None);
    }
}
