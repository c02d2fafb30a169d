//! The host and port of a `Host` field and of a target in absolute form (RFC 9110 §7.2, RFC 3986 §3.2.2).
//!
//! The agent checks only the form of the host, as RFC 9112 §3.2 requires. It identifies the VM by its port and ignores
//! which host a request names.

use std::net::Ipv6Addr;

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
    use super::host_of;

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
