//! An HTTP client for the control socket.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metadata_common::run::SOCKET;

/// Longest silence of the agent.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a response: four times the status of a full node with every port.
const ANSWER_MAX: u64 = 64 << 20;
/// Most bytes of a response's head.
const HEAD_MAX: usize = 16 << 10;
/// Most header fields of a response.
const FIELDS: usize = 32;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent listens.
    #[error(
        "no agent runs with the run directory {}: {source}; start one with `systemctl start xdp-imds` or `xdp-imds serve`, or name its directory with --run", path.display()
    )]
    NoAgent {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The caller lacks permission.
    #[error(
        "not permitted to query the agent in {}: {source}; try as root, as the agent's user, or as a member of the \
         group that `api.group` of the configuration names", path.display()
    )]
    Forbidden {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The agent accepted the request but sent no valid response.
    #[error(
        "the agent does not answer: {}; its log may say why. The watchdog of systemd's unit and a probe of /healthz restart an \
         agent that hangs", silence(.0)
    )]
    Mute(io::Error),
    /// The agent sent a status other than success.
    #[error("{}", refusal(*status, text))]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The body as text.
        text: String,
    },
}

/// The end of a wait in words; other errors in those of the kernel.
fn silence(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it accepts a request and is silent".into(),
        io::ErrorKind::UnexpectedEof => "it closed the connection, as an agent that ends does".into(),
        io::ErrorKind::InvalidData => "it sent something other than HTTP".into(),
        _ => error.to_string(),
    }
}

/// What an answer without success means, and what to do, for people who do not speak HTTP.
pub(crate) fn refusal(status: u16, text: &str) -> String {
    match (status, text.trim_end()) {
        (404 | 405, "") => "the agent does not know this request, so it is probably of an earlier version than this \
                            command; `xdp-imds status` names the version that runs: restart the agent with this one"
            .into(),
        (200..=299, _) => "the agent's answer cannot be read, so it is probably of a different version than this \
                           command; `xdp-imds status` names the version that runs: use the command of that version, \
                           or restart the agent with this one"
            .into(),
        (503 | 504, text) => {
            let text = if text.is_empty() { "busy or ending" } else { text };
            format!("the agent cannot answer now: {text}; try again")
        }
        (500.., "") => "the agent failed at this request; its log (`journalctl -u xdp-imds`) says why".into(),
        (_, "") => "the agent refused the request; its log (`journalctl -u xdp-imds`) says why".into(),
        (_, text) => format!("the agent refused the request: {text}"),
    }
}

/// A request.
#[derive(Debug)]
pub struct StatusRequest<'a> {
    /// `GET`, `PUT`, …
    pub method: &'a str,
    /// The path with its query.
    pub path: &'a str,
    /// Header fields, without line ends.
    pub fields: &'a [String],
    /// The request body.
    pub body: &'a [u8],
    /// Longest silence of the agent.
    pub timeout: Duration,
}

/// A response.
#[derive(Debug)]
pub struct StatusResponse {
    /// The HTTP status.
    pub status: u16,
    /// The response body.
    pub body: Vec<u8>,
}

/// Sends `GET path` to the control socket of a run directory and returns the body.
///
/// # Errors
/// [`ClientError`] without a successful response.
pub fn get(run: &Path, path: &str) -> Result<Vec<u8>, ClientError> {
    get_within(run, path, TIMEOUT)
}

/// As [`get`], for a caller that waits no longer than `timeout` for an agent that is silent.
///
/// # Errors
/// [`ClientError`] without a successful response.
pub fn get_within(run: &Path, path: &str, timeout: Duration) -> Result<Vec<u8>, ClientError> {
    let question = StatusRequest { method: "GET", path, fields: &[], body: &[], timeout };
    let StatusResponse { status, body } = ask(run, &question)?;
    if status == 200 {
        return Ok(body);
    }
    Err(ClientError::Refused { status, text: String::from_utf8_lossy(&body).trim_end().into() })
}

/// Sends a request and returns the response, whatever its status.
///
/// # Errors
/// [`ClientError`] without a response.
pub fn ask(run: &Path, question: &StatusRequest<'_>) -> Result<StatusResponse, ClientError> {
    let answer = open(run, question)?;
    let status = answer.status;
    let body = answer.rest(ANSWER_MAX).map_err(ClientError::Mute)?;
    Ok(StatusResponse { status, body })
}

/// An answer whose body has not been read. The body ends with the stream.
#[derive(Debug)]
pub struct StreamedResponse {
    /// The HTTP status.
    pub status: u16,
    /// The part of the body that arrived with the head.
    pub begun: Vec<u8>,
    /// The stream of the rest.
    pub stream: UnixStream,
    /// True if the whole request was sent.
    sent: bool,
    /// The length of the body, if the head has it.
    length: Option<u64>,
}

impl StreamedResponse {
    /// Returns the whole body. Reads at most `limit` more bytes.
    ///
    /// # Errors
    /// The connection fails or ends early, or the agent is silent for too long.
    pub fn rest(self, limit: u64) -> io::Result<Vec<u8>> {
        let mut body = self.begun;
        let read = self.stream.take(limit).read_to_end(&mut body);
        // The agent may refuse a request before it has arrived in full. The refusal is then the answer, although the
        // connection fails afterwards.
        if self.sent {
            let is_at_end = (read? as u64) < limit;
            // The connection of an agent that is killed ends as that of one that has sent everything.
            if is_at_end && self.length.is_some_and(|length| (body.len() as u64) < length) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(body)
    }
}

/// Sends a request, and reads the head of the answer.
///
/// # Errors
/// [`ClientError`] without an answer.
pub fn open(run: &Path, question: &StatusRequest<'_>) -> Result<StreamedResponse, ClientError> {
    let stream = UnixStream::connect(run.join(SOCKET)).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::Forbidden { path: run.into(), source },
        _ => ClientError::NoAgent { path: run.into(), source },
    })?;
    exchange(stream, question).map_err(ClientError::Mute)
}

fn exchange(mut stream: UnixStream, question: &StatusRequest<'_>) -> io::Result<StreamedResponse> {
    stream.set_read_timeout(Some(question.timeout))?;
    stream.set_write_timeout(Some(question.timeout))?;
    let sent = stream.write_all(&head(question)).and_then(|()| stream.write_all(question.body));
    match read_head(&mut stream) {
        Ok((ResponseHead { status, length, .. }, begun)) => {
            Ok(StreamedResponse { status, begun, stream, sent: sent.is_ok(), length })
        }
        Err(error) => Err(sent.err().unwrap_or(error)),
    }
}

/// The head of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ResponseHead {
    /// The HTTP status.
    status: u16,
    /// Bytes of the head itself.
    bytes: usize,
    /// The length of the body, if the head has it. A trace has none.
    length: Option<u64>,
}

/// Reads the head of an answer. Returns it and the part of the body that arrived with it.
fn read_head(stream: &mut impl io::Read) -> io::Result<(ResponseHead, Vec<u8>)> {
    let (mut answer, mut piece) = (Vec::new(), [0; 4_096]);
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => answer.extend_from_slice(&piece[..bytes]),
            // The kernel does not restart a read that has a timeout (signal(7)).
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        if let Some(head) = parse_head(&answer)? {
            return Ok((head, answer.split_off(head.bytes)));
        }
        if answer.len() > HEAD_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// The head of a request. It uses HTTP/1.0, so that the answer is not chunked and ends with the connection.
fn head(question: &StatusRequest<'_>) -> Vec<u8> {
    let StatusRequest { method, path, fields, body, .. } = question;
    let mut head = format!("{method} {path} HTTP/1.0\r\nHost: agent\r\n");
    for field in *fields {
        head.extend([field, "\r\n"]);
    }
    if !body.is_empty() {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    head.into_bytes()
}

/// Parses the head of an answer; `None` while the head is incomplete.
fn parse_head(answer: &[u8]) -> io::Result<Option<ResponseHead>> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut head = httparse::Response::new(&mut fields);
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    match head.parse(answer).map_err(|_| broken())? {
        httparse::Status::Partial => Ok(None),
        httparse::Status::Complete(bytes) => {
            let status = head.code.ok_or_else(broken)?;
            let field = head.headers.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
            let length = field.and_then(|field| std::str::from_utf8(field.value).ok()?.trim().parse().ok());
            Ok(Some(ResponseHead { status, bytes, length }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ClientError, ResponseHead, StatusRequest, ask, get, read_head};
    use metadata_common::run::SOCKET;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    #[test]
    fn without_an_agent_the_error_says_what_to_do() {
        let run = tempfile::tempdir().expect("a directory");
        let error = get(run.path(), "/v1/status").expect_err("nobody is there");
        assert!(matches!(error, ClientError::NoAgent { .. }), "{error}");
        assert!(error.to_string().contains("xdp-imds serve"), "{error}");
    }

    #[test]
    fn a_success_returns_its_body_and_a_refusal_is_an_error() {
        let run = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(run.path().join(SOCKET)).expect("a socket");
        let answers = [("200 OK", "{}"), ("503 Service Unavailable", "busy\n"), ("nonsense", "")];
        let serving = std::thread::spawn(move || {
            for (status, body) in answers {
                let (mut stream, _) = listener.accept().expect("a client");
                let mut asked = [0; 25];
                stream.read_exact(&mut asked).expect("a question");
                assert_eq!(&asked, b"GET /v1/status HTTP/1.0\r\n");
                stream.set_nonblocking(true).expect("a flag");
                // Closing before all is read would reset the connection.
                while stream.read(&mut asked).is_ok_and(|length| length > 0) {}
                stream.set_nonblocking(false).expect("a flag");
                // In one piece: a client closes once it has read what is not HTTP.
                let answer = format!("HTTP/1.1 {status}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).expect("an answer");
            }
        });
        assert_eq!(get(run.path(), "/v1/status").expect("an answer"), b"{}");
        let error = get(run.path(), "/v1/status").expect_err("a refusal");
        assert!(matches!(&error, ClientError::Refused { status: 503, text } if text == "busy"), "{error}");
        let error = get(run.path(), "/v1/status").expect_err("no answer");
        assert!(matches!(error, ClientError::Mute(_)), "{error}");
        serving.join().expect("three clients");
    }

    #[test]
    fn a_refusal_names_cause_and_remedy_and_no_status_of_http() {
        for (status, text, said) in [
            (404, "", "does not know this request, so it is probably of an earlier version"),
            (404, "no guest is called x", "refused the request: no guest is called x"),
            (200, "<html>", "cannot be read, so it is probably of a different version"),
            (503, "busy\n", "cannot answer now: busy; try again"),
            (503, "", "busy or ending; try again"),
            (500, "", "journalctl -u xdp-imds"),
            (400, "", "journalctl -u xdp-imds"),
        ] {
            for error in [
                ClientError::Refused { status, text: text.into() }.to_string(),
                crate::instances::RegistrationError::Strange { status, text: text.into() }.to_string(),
            ] {
                assert!(error.contains(said), "{status}: {error}");
                assert!(!error.contains(&status.to_string()), "{status}: {error}");
            }
        }
    }

    #[test]
    fn an_agent_that_hangs_is_told_in_words_once_the_patience_is_over() {
        let run = tempfile::tempdir().expect("a directory");
        // Nobody accepts; the kernel takes the connection and the request.
        let _listener = UnixListener::bind(run.path().join(SOCKET)).expect("a socket");
        let error = super::get_within(run.path(), "/v1/status", std::time::Duration::from_millis(10))
            .expect_err("no answer");
        let text = error.to_string();
        assert!(matches!(error, ClientError::Mute(_)) && text.contains("is silent"), "{text}");
        assert!(text.contains("watchdog") && !text.contains("os error"), "{text}");
    }

    #[test]
    fn an_agent_that_ends_is_told_apart_from_one_that_speaks_no_http() {
        for (mut answer, said) in
            [(&b"HTTP/1.1 2"[..], "closed the connection"), (b"\0\0", "other than HTTP")]
        {
            let text = ClientError::Mute(read_head(&mut answer).expect_err("no answer")).to_string();
            assert!(text.contains(said), "{text}");
        }
    }

    #[test]
    fn a_signal_does_not_end_the_wait_for_an_answer() {
        /// Yields its pieces, each after an interrupted read.
        struct Interrupted(Vec<&'static [u8]>, bool);
        impl std::io::Read for Interrupted {
            fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
                self.1 = !self.1;
                if self.1 {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
                let piece = self.0.remove(0);
                into[..piece.len()].copy_from_slice(piece);
                Ok(piece.len())
            }
        }
        let mut stream = Interrupted(vec![b"HTTP/1.1 200 OK\r\n", b"\r\n{", b""], false);
        let head = ResponseHead { status: 200, bytes: 19, length: None };
        assert_eq!(read_head(&mut stream).expect("an answer"), (head, b"{".to_vec()));
    }

    #[test]
    fn an_answer_that_ends_before_its_length_is_no_answer() {
        let run = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(run.path().join(SOCKET)).expect("a socket");
        // The last one does not say its length, as a trace.
        let answers = [("content-length: 2\r\n", "[]"), ("Content-Length: 9\r\n", "[{\"a\": 1"), ("", "[{")];
        let expected = [Some("[]"), None, Some("[{")];
        let serving = std::thread::spawn(move || {
            for (field, body) in answers {
                let (mut stream, _) = listener.accept().expect("a client");
                let mut asked = Vec::new();
                // Closing before all is read would reset the connection.
                while !asked.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).expect("a question");
                    asked.extend(byte);
                }
                let answer = format!("HTTP/1.0 200 OK\r\n{field}\r\n{body}");
                stream.write_all(answer.as_bytes()).expect("an answer");
            }
        });
        for expected in expected {
            let answer = get(run.path(), "/v1/top");
            match expected {
                Some(body) => assert_eq!(answer.expect("an answer"), body.as_bytes()),
                None => {
                    let error = answer.expect_err("a part of an answer");
                    assert!(matches!(error, ClientError::Mute(_)), "{error}");
                    assert!(error.to_string().contains("closed the connection"), "{error}");
                }
            }
        }
        serving.join().expect("three clients");
    }

    #[test]
    fn a_refusal_that_comes_before_all_is_sent_is_the_answer() {
        let run = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(run.path().join(SOCKET)).expect("a socket");
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            stream.read_exact(&mut [0; 10]).expect("a question");
            // In two pieces: the head does not end with the first.
            for piece in ["HTTP/1.0 413 Content Too Large\r\nContent-Le", "ngth: 9\r\n\r\ntoo large"] {
                stream.write_all(piece.as_bytes()).expect("an answer");
            }
        });
        let body = vec![b'x'; 4 << 20];
        let timeout = super::TIMEOUT;
        let question = StatusRequest { method: "PUT", path: "/", fields: &[], body: &body, timeout };
        let reply = ask(run.path(), &question).expect("an answer");
        assert_eq!((reply.status, &*reply.body), (413, &b"too large"[..]));
        serving.join().expect("a client");
    }
}
