//! Checks answers as they arrive: status, length and every byte.

use super::tally::Failure;
use serde::{Deserialize, Serialize};

/// Bytes of the longest accepted response head.
const HEAD_MOST: usize = 8 << 10;
/// Bytes of the longest accepted token.
const TOKEN_MOST: usize = 4 << 10;

/// The answer that a request must get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) status: u16,
    pub(crate) body: Body,
}

/// The body that an answer must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Body {
    /// These bytes of the file of bodies.
    Exactly { offset: u64, length: u64 },
    /// Any bytes.
    Any,
    /// A token, which the guest sends with the following requests.
    Token,
}

/// The state of an answer after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    More,
    /// The answer is complete and right. `keep`: the server keeps the connection.
    Done {
        keep: bool,
    },
    Wrong(Failure),
}

/// An answer that is being read.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    head: Vec<u8>,
    /// The announced and the received bytes of the body, once the head is complete.
    body: Option<(usize, usize)>,
    keep: bool,
    token: Vec<u8>,
}

impl Answer {
    /// Resets everything but the token, for the next answer.
    pub(crate) fn reset(&mut self) {
        self.head.clear();
        self.body = None;
    }

    /// Returns the last token received.
    pub(crate) fn token(&self) -> &[u8] {
        &self.token
    }

    /// Checks the next bytes. `bodies` is the content of the file of bodies.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], expected: &Expected, bodies: &[u8]) -> Progress {
        if self.body.is_none() {
            let before = self.head.len();
            self.head.extend_from_slice(&bytes[..bytes.len().min(HEAD_MOST - before)]);
            let Some(end) = find_end(&self.head, before) else {
                let full = self.head.len() == HEAD_MOST;
                return if full { Progress::Wrong(Failure::Head) } else { Progress::More };
            };
            bytes = &bytes[end - before..];
            self.head.truncate(end);
            let Some(head) = Head::parse(&self.head) else { return Progress::Wrong(Failure::Head) };
            if head.status != expected.status {
                return Progress::Wrong(Failure::Status);
            }
            let length = head.length.unwrap_or(0);
            if head.length.is_none() && head.status != 204 || !fits(length, expected.body) {
                return Progress::Wrong(Failure::Length);
            }
            self.keep = head.keep;
            self.body = Some((length, 0));
            if expected.body == Body::Token {
                self.token.clear();
            }
        }
        self.feed_body(bytes, expected.body, bodies)
    }

    fn feed_body(&mut self, bytes: &[u8], expected: Body, bodies: &[u8]) -> Progress {
        let Some((length, seen)) = &mut self.body else { return Progress::More };
        if *seen + bytes.len() > *length {
            return Progress::Wrong(Failure::Length);
        }
        match expected {
            Body::Exactly { offset, .. } => {
                let from = offset as usize + *seen;
                if bodies.get(from..from + bytes.len()) != Some(bytes) {
                    return Progress::Wrong(Failure::Body);
                }
            }
            Body::Any => {}
            Body::Token => self.token.extend_from_slice(bytes),
        }
        *seen += bytes.len();
        if *seen == *length { Progress::Done { keep: self.keep } } else { Progress::More }
    }
}

fn fits(length: usize, expected: Body) -> bool {
    match expected {
        Body::Exactly { length: exactly, .. } => length as u64 == exactly,
        Body::Any => true,
        Body::Token => (1..=TOKEN_MOST).contains(&length),
    }
}

/// Returns the end of the blank line. Only its last three bytes can be before `from`.
fn find_end(head: &[u8], from: usize) -> Option<usize> {
    let from = from.saturating_sub(3);
    head[from..].windows(4).position(|four| four == b"\r\n\r\n").map(|at| from + at + 4)
}

struct Head {
    status: u16,
    /// The Content-Length. It is missing in answers without one and in chunked answers.
    length: Option<usize>,
    keep: bool,
}

impl Head {
    fn parse(head: &[u8]) -> Option<Self> {
        let mut lines = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii_end);
        let first = lines.next()?;
        let (version, status) = (first.get(..9)?, first.get(9..12)?);
        let mut parsed = Self { status: number(status)? as u16, length: None, keep: version == b"HTTP/1.1 " };
        if !version.starts_with(b"HTTP/1.") {
            return None;
        }
        for line in lines.take_while(|line| !line.is_empty()) {
            let colon = line.iter().position(|&byte| byte == b':')?;
            let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
            if name.eq_ignore_ascii_case(b"content-length") {
                parsed.length = Some(number(value)?);
            } else if name.eq_ignore_ascii_case(b"connection") {
                parsed.keep = value.eq_ignore_ascii_case(b"keep-alive");
            }
        }
        Some(parsed)
    }
}

fn number(digits: &[u8]) -> Option<usize> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Answer, Body, Expected, Failure, Progress};

    const BODIES: &[u8] = b"....right body....";
    const RIGHT: Expected = Expected { status: 200, body: Body::Exactly { offset: 4, length: 10 } };
    const DONE: Progress = Progress::Done { keep: true };

    fn judged(answer: &str, expected: &Expected, step: usize) -> Progress {
        let mut reader = Answer::default();
        let mut progress = Progress::More;
        for part in answer.as_bytes().chunks(step) {
            assert_eq!(progress, Progress::More, "bytes after the end");
            progress = reader.feed(part, expected, BODIES);
            if matches!(progress, Progress::Wrong(_)) {
                break;
            }
        }
        progress
    }

    #[test]
    fn a_right_answer_is_accepted_however_it_is_split() {
        let answer = "HTTP/1.1 200 OK\r\nServer: x\r\ncontent-LENGTH: 10\r\n\r\nright body";
        for step in 1..=answer.len() {
            assert_eq!(judged(answer, &RIGHT, step), DONE, "{step} bytes at a time");
        }
    }

    #[test]
    fn each_wrong_answer_is_reported_with_its_fault() {
        let ok = |rest: &str| format!("HTTP/1.1 200 OK\r\n{rest}");
        for (answer, fault) in [
            (ok("Content-Length: 10\r\n\r\nwrong body"), Failure::Body),
            (ok("Content-Length: 10\r\n\r\nright bodY"), Failure::Body),
            (ok("Content-Length: 10\r\n\r\nright body and more"), Failure::Length),
            (ok("Content-Length: 9\r\n\r\nright bod"), Failure::Length),
            (ok("Transfer-Encoding: chunked\r\n\r\n"), Failure::Length),
            ("HTTP/1.1 404 Not Found\r\nContent-Length: 10\r\n\r\n".into(), Failure::Status),
            ("HTTP/1.1 OK\r\n\r\n".into(), Failure::Head),
            ("SMTP/1.1 200 OK\r\n\r\n".into(), Failure::Head),
            (ok(&"X: y\r\n".repeat(2_000)), Failure::Head),
        ] {
            assert_eq!(judged(&answer, &RIGHT, 1_460), Progress::Wrong(fault), "{answer:.60}");
        }
    }

    #[test]
    fn an_answer_with_any_bytes_needs_status_and_length() {
        let any = Expected { body: Body::Any, ..RIGHT };
        let ok = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        for (answer, progress) in [
            (format!("{ok}other"), DONE),
            (format!("{ok}othe"), Progress::More),
            (format!("{ok}others"), Progress::Wrong(Failure::Length)),
            (ok.replace("200", "404"), Progress::Wrong(Failure::Status)),
        ] {
            assert_eq!(judged(&answer, &any, 1_460), progress, "{answer}");
        }
    }

    #[test]
    fn the_end_of_a_connection_is_read_from_the_head() {
        for (line, keep) in
            [("HTTP/1.1", true), ("HTTP/1.0", false), ("HTTP/1.1 200 OK\r\nConnection: close", false)]
        {
            let first = if line.contains("200") { line.to_owned() } else { format!("{line} 200 OK") };
            let answer = format!("{first}\r\nContent-Length: 10\r\n\r\nright body");
            assert_eq!(judged(&answer, &RIGHT, 1_460), Progress::Done { keep }, "{line}");
        }
    }

    #[test]
    fn a_token_is_kept_for_the_following_requests() {
        let mut reader = Answer::default();
        let token = Expected { status: 200, body: Body::Token };
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde";
        assert_eq!(reader.feed(answer, &token, &[]), DONE);
        reader.reset();
        assert_eq!(reader.token(), b"abcde");
        let nothing = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(reader.feed(nothing, &token, &[]), Progress::Wrong(Failure::Length));
    }

    #[test]
    fn no_content_needs_no_length() {
        let none = Expected { status: 204, body: Body::Exactly { offset: 0, length: 0 } };
        assert_eq!(judged("HTTP/1.1 204 No Content\r\n\r\n", &none, 1_460), DONE);
    }
}
