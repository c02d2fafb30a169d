//! The first line of an HTTP message, reduced to what may be shown.
//!
//! Header fields, bodies and queries may contain tokens and passwords. The output has the path, and a mark for a query.

/// Most bytes of a path to show.
const PATH_MOST: usize = 120;
/// The methods of guests. Other text may be the middle of a body.
const METHODS: [&str; 7] = ["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"];
/// Digits of a status.
const STATUS: usize = 3;

/// The first line of a message that starts here: the status line if it goes to the guest, else the request line.
#[must_use]
pub fn line(payload: &[u8], to_guest: bool) -> Option<String> {
    if to_guest { status(payload) } else { request(payload) }
}

fn status(payload: &[u8]) -> Option<String> {
    let rest = payload.strip_prefix(b"HTTP/1.")?;
    let [minor @ (b'0' | b'1'), b' ', digits @ ..] = rest else { return None };
    let digits = digits.get(..STATUS).filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    Some(format!("HTTP/1.{} {}", char::from(*minor), std::str::from_utf8(digits).ok()?))
}

fn request(payload: &[u8]) -> Option<String> {
    let space = payload.iter().take(8).position(|byte| *byte == b' ')?;
    let (method, rest) = payload.split_at(space);
    let method = METHODS.into_iter().find(|known| known.as_bytes() == method)?;
    let rest = &rest[1..];
    // The capture may cut the path, but only a complete line is certainly a request.
    let end = rest.iter().position(|byte| *byte == b'\r' || *byte == b'\n');
    let target = match end {
        Some(end) => {
            let line = &rest[..end];
            let version = line.iter().rposition(|byte| *byte == b' ')?;
            line[version..].starts_with(b" HTTP/1.").then_some(&line[..version])?
        }
        None => rest.split(|byte| *byte == b' ').next()?,
    };
    let path = path(std::str::from_utf8(target).ok()?)?;
    let cut = if end.is_none() { "…" } else { "" };
    Some(format!("{method} {path}{cut}"))
}

/// The path of a request target. It omits the authority of an absolute URL, which may contain a user and a password.
fn path(target: &str) -> Option<String> {
    let path = match target.split_once("://") {
        Some(("http" | "https", rest)) => rest.find('/').map_or("/", |at| &rest[at..]),
        _ if target.starts_with('/') => target,
        _ => return None,
    };
    let (path, query) = path.split_once('?').map_or((path, ""), |(path, _)| (path, "?…"));
    if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    Some(match path.get(..PATH_MOST) {
        Some(beginning) if beginning.len() < path.len() => format!("{beginning}…"),
        _ => format!("{path}{query}"),
    })
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn a_request_shows_method_and_path_and_nothing_else() {
        let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(200));
        let cut = format!("GET /{}…", "a".repeat(119));
        let cases: [(&str, Option<&str>); 14] = [
            (
                "GET /latest/meta-data/ HTTP/1.1\r\nX-aws-ec2-metadata-token: SECRET\r\n\r\n",
                Some("GET /latest/meta-data/"),
            ),
            ("PUT /latest/api/token HTTP/1.1\r\n", Some("PUT /latest/api/token")),
            ("GET /a?token=SECRET HTTP/1.1\r\n", Some("GET /a?…")),
            ("GET http://user:SECRET@169.254.169.254/a HTTP/1.1\r\n", Some("GET /a")),
            ("GET http://user:SECRET@host HTTP/1.1\r\n", Some("GET /")),
            ("GET /openstack/latest/meta_da", Some("GET /openstack/latest/meta_da…")),
            (&long, Some(&cut)),
            ("POST password=SECRET", None),
            ("GET user:SECRET@host HTTP/1.1\r\n", None),
            ("password: SECRET\n", None),
            ("GET /SECRET of a body\n", None),
            ("GET /\u{1b}[2J HTTP/1.1\r\n", None),
            ("HTTP/1.1 200 OK\r\n", None),
            ("", None),
        ];
        for (payload, expected) in cases {
            let shown = line(payload.as_bytes(), false);
            assert_eq!(shown.as_deref(), expected, "{payload:?}");
            assert!(!shown.unwrap_or_default().contains("SECRET"), "{payload:?}");
        }
    }

    #[test]
    fn an_answer_shows_its_status() {
        let cases = [
            ("HTTP/1.1 200 OK\r\nServer: x\r\n\r\nSECRET", Some("HTTP/1.1 200")),
            ("HTTP/1.0 404 Not Found\r\n", Some("HTTP/1.0 404")),
            ("HTTP/1.1 2", None),
            ("HTTP/1.1 SEC", None),
            ("SECRET", None),
            ("GET / HTTP/1.1\r\n", None),
        ];
        for (payload, expected) in cases {
            assert_eq!(line(payload.as_bytes(), true).as_deref(), expected, "{payload:?}");
        }
    }
}
