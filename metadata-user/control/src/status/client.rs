//! An HTTP client for the control socket.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metadata_base::run::SOCKET;

/// Longest silence of the agent.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most octets of a response; that of a full node with every port takes a quarter.
const ANSWER_MAX: u64 = 64 << 20;
/// Most header fields of a response.
const FIELDS: usize = 32;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent listens.
    #[error(
        "no agent serves with the run directory {}: {source}; start one with `xdp-imds serve`, or name its directory with --run", path.display()
    )]
    NoAgent {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The caller lacks permission.
    #[error("may not ask the agent of {}: {source}; try as root, or as the agent's user", path.display())]
    Forbidden {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The agent accepted the request but sent no valid response.
    #[error("the agent does not answer: {0}; its log may say why, and a probe of /healthz would restart it")]
    Mute(io::Error),
    /// The agent sent another status than success.
    #[error("the agent answered {status}: {text}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The body as text.
        text: String,
    },
}

/// A request.
#[derive(Debug)]
pub struct Question<'a> {
    /// `GET`, `PUT`, …
    pub method: &'a str,
    /// The path with its query.
    pub path: &'a str,
    /// Header fields, one a line, without line ends.
    pub fields: &'a [String],
    /// The request body.
    pub body: &'a [u8],
    /// Longest silence of the agent.
    pub patience: Duration,
}

/// A response.
#[derive(Debug)]
pub struct Reply {
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
    let question = Question { method: "GET", path, fields: &[], body: &[], patience: PATIENCE };
    let Reply { status, body } = ask(run, &question)?;
    if status == 200 {
        return Ok(body);
    }
    Err(ClientError::Refused { status, text: String::from_utf8_lossy(&body).trim_end().into() })
}

/// Sends a request and returns the response, whatever its status.
///
/// # Errors
/// [`ClientError`] without a response.
pub fn ask(run: &Path, question: &Question<'_>) -> Result<Reply, ClientError> {
    let stream = UnixStream::connect(run.join(SOCKET)).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::Forbidden { path: run.into(), source },
        _ => ClientError::NoAgent { path: run.into(), source },
    })?;
    let answer = exchange(stream, question).map_err(ClientError::Mute)?;
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut head = httparse::Response::new(&mut fields);
    let broken = || ClientError::Mute(io::ErrorKind::InvalidData.into());
    let Ok(httparse::Status::Complete(length)) = head.parse(&answer) else { return Err(broken()) };
    let status = head.code.ok_or_else(broken)?;
    Ok(Reply { status, body: answer[length..].to_vec() })
}

fn exchange(mut stream: UnixStream, question: &Question<'_>) -> io::Result<Vec<u8>> {
    let Question { method, path, fields, body, patience } = question;
    stream.set_read_timeout(Some(*patience))?;
    stream.set_write_timeout(Some(*patience))?;
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n");
    fields.iter().for_each(|field| head.extend([field, "\r\n"]));
    if !body.is_empty() {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    let written = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    let mut answer = Vec::new();
    let read = stream.take(ANSWER_MAX).read_to_end(&mut answer);
    // The agent may refuse before it has read everything; its response then matters.
    if written.is_ok() || answer.is_empty() {
        written.and(read)?;
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::{ClientError, get};
    use metadata_base::run::SOCKET;
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
    fn an_answer_is_its_body_and_a_refusal_says_so() {
        let run = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(run.path().join(SOCKET)).expect("a socket");
        let answers = [("200 OK", "{}"), ("503 Service Unavailable", "busy\n"), ("nonsense", "")];
        let serving = std::thread::spawn(move || {
            for (status, body) in answers {
                let (mut stream, _) = listener.accept().expect("a client");
                let mut asked = [0; 25];
                stream.read_exact(&mut asked).expect("a question");
                assert_eq!(&asked, b"GET /v1/status HTTP/1.1\r\n");
                stream.set_nonblocking(true).expect("a flag");
                // Closing before all is read would reset the connection.
                while stream.read(&mut asked).is_ok_and(|length| length > 0) {}
                stream.set_nonblocking(false).expect("a flag");
                write!(stream, "HTTP/1.1 {status}\r\n\r\n{body}").expect("an answer");
            }
        });
        assert_eq!(get(run.path(), "/v1/status").expect("an answer"), b"{}");
        let error = get(run.path(), "/v1/status").expect_err("a refusal");
        assert!(matches!(&error, ClientError::Refused { status: 503, text } if text == "busy"), "{error}");
        let error = get(run.path(), "/v1/status").expect_err("no answer");
        assert!(matches!(error, ClientError::Mute(_)), "{error}");
        serving.join().expect("three clients");
    }
}
