//! Normalises a request target into the path that is looked up.
//!
//! The steps, in this order: drop scheme and authority of an absolute form, split off the query at the first `?`, split
//! the path at `/`, drop empty segments, and decode each segment. Segments are decoded after the split, so that an
//! escape cannot turn one path into another.

use super::Target;
use super::host::host_of;
use super::parse::TARGET_MAX;

/// Why a target has no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Neither origin-form nor absolute form, another scheme than `http`, no host, a bad escape, NUL, an encoded
    /// slash, or a dot segment. The answer is 400.
    #[error("expected a path without dot segments, with escapes of two hex digits")]
    Malformed,
    /// Well formed, but not UTF-8. The answer is 404, because every served path is UTF-8.
    #[error("expected a path in UTF-8")]
    NotText,
}

/// Normalises `target` and decodes it into `buffer`.
///
/// # Errors
///
/// See [`TargetError`]. If both apply, the error is `Malformed`.
pub fn normalise<'a>(target: &'a str, buffer: &'a mut [u8; TARGET_MAX]) -> Result<Target<'a>, TargetError> {
    let target = origin(target).filter(|t| t.len() <= TARGET_MAX).ok_or(TargetError::Malformed)?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut end = 0;
    for segment in path.split('/').filter(|segment| !segment.is_empty()) {
        buffer[end] = b'/';
        let start = end + 1;
        end = decode(segment.as_bytes(), buffer, start)?;
        if matches!(&buffer[start..end], b"." | b"..") {
            return Err(TargetError::Malformed);
        }
    }
    if end == 0 {
        return Ok(Target { path: "/", query });
    }
    let path = std::str::from_utf8(&buffer[..end]).map_err(|_| TargetError::NotText)?;
    Ok(Target { path, query })
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

/// Decodes one segment to `buffer[at..]` and returns its end. The result fits, because decoding never adds octets.
fn decode(segment: &[u8], buffer: &mut [u8; TARGET_MAX], mut at: usize) -> Result<usize, TargetError> {
    let mut octets = segment.iter();
    while let Some(&octet) = octets.next() {
        buffer[at] = if octet == b'%' {
            let mut digit = || {
                let digit = octets.next().and_then(|d| char::from(*d).to_digit(16));
                digit.ok_or(TargetError::Malformed)
            };
            let decoded = (digit()? << 4 | digit()?) as u8;
            if matches!(decoded, 0 | b'/') {
                return Err(TargetError::Malformed);
            }
            decoded
        } else {
            octet
        };
        at += 1;
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::{TARGET_MAX, Target, TargetError, normalise};

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
            let mut buffer = [0; TARGET_MAX];
            let expected = expected.map(|(path, query)| Target { path, query });
            assert_eq!(normalise(target, &mut buffer), expected, "{target}");
        }
    }

    #[test]
    fn the_longest_target_fits_the_buffer() {
        let mut buffer = [0; TARGET_MAX];
        let target = format!("/{}", "a".repeat(TARGET_MAX - 1));
        assert_eq!(normalise(&target, &mut buffer).map(|t| t.path.len()), Ok(TARGET_MAX));
    }
}
