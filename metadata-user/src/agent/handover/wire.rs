//! The takeover protocol: one JSON object per line, over a Unix socket.
//!
//! Unknown fields and messages are ignored, so either agent may be the newer one. Each change of what is sent needs a
//! new [`VERSION`]; [`OLDEST`] stays as long as the messages of an older agent suffice.

use std::io;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::service::{Answer, HandedRequest};
use metadata_common::addresses::Connection;
use metadata_content::account::COMPUTED_PER_VM;
use metadata_content::http::{Method, Response, StatusCode};
use metadata_content::store::LiveOutcome;

/// The version of the protocol. Version 2 has longer lines ([`line_max`]).
pub(crate) const VERSION: u32 = 2;

/// The oldest version of the protocol that this agent supports.
pub(crate) const OLDEST: u32 = 1;

/// The remedy if two agents have no version in common.
pub(crate) const REMEDY: &str =
    "stop the running agent and start the new one; with pins, ports stay closed in between and guests retry";

/// Limit on a line, in bytes: the longest answer in base64 and the JSON around it.
pub(crate) const LINE_MAX: usize = 6 << 20;

/// Limit on a line of version 1.
const LINE_MAX_1: usize = 4 << 20;

/// Room in a line for all of an answer but its body: the head of the response, addresses and names of fields.
const AROUND: usize = 64 << 10;

// A guest gets no computed answer whose body is longer, and the previous agent counts every passed one as computed.
const _: () = assert!(COMPUTED_PER_VM.div_ceil(3) * 4 + AROUND <= LINE_MAX, "the longest answer fits a line");

/// The limit on a line that an agent of this version accepts.
fn line_max(version: u32) -> usize {
    if version < 2 { LINE_MAX_1 } else { LINE_MAX }
}

/// Bytes read at a time.
const READ: usize = 64 << 10;

/// Time limit for writing a line. The other agent reads lines as they arrive.
const WRITE_WITHIN: Duration = Duration::from_secs(5);

/// Messages of the next agent.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(crate) enum NextAgentMessage {
    /// The first message: the versions that the next agent supports.
    Hello {
        /// The oldest version.
        oldest: u32,
        /// The newest version.
        newest: u32,
        /// Its release.
        #[serde(default)]
        release: String,
    },
    /// The next agent is ready. The previous agent claims its connections, saves what guests wrote and changes no port.
    Drain,
    /// The next agent has read what was saved and asks for the ports.
    Take,
    /// The next agent has the ports.
    Serving,
    /// An answer to [`PreviousAgentMessage::Ask`].
    Answer(WireAnswer),
    /// A message of another version.
    #[serde(other)]
    Unknown,
}

/// Messages of the previous agent.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(crate) enum PreviousAgentMessage {
    /// The answer to [`NextAgentMessage::Hello`].
    Welcome {
        /// The version used from now on.
        version: u32,
        /// Its side of hubs; the other one is free.
        side: u32,
        /// Its release.
        #[serde(default)]
        release: String,
    },
    /// The previous agent refuses to hand over, or stops the handover, and continues as before.
    No {
        /// The reason, for people.
        reason: String,
    },
    /// The answer to [`NextAgentMessage::Drain`]: connections are claimed and data of guests is saved.
    Draining {
        /// Number of connections claimed.
        #[serde(default)]
        connections: u64,
    },
    /// The answer to [`NextAgentMessage::Take`]: the previous agent does not continue, whatever happens.
    Yours,
    /// A question of the previous agent's guest that only the next agent can answer.
    Ask(WireRequest),
    /// The connections of the previous agent have ended, and it ends.
    Done {
        /// Number of connections cut off.
        #[serde(default)]
        cut: u64,
    },
    /// A message of another version.
    #[serde(other)]
    Unknown,
}

/// A [`HandedRequest`] on the wire.
#[derive(Serialize, Deserialize, PartialEq)]
pub(crate) struct WireRequest {
    connection: (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)),
    mark: u64,
    method: String,
    path: String,
    query: String,
    headers: Vec<(String, String)>,
    body: String,
}

/// The answer to a [`WireRequest`].
#[derive(Serialize, Deserialize, PartialEq)]
pub(crate) struct WireAnswer {
    connection: (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)),
    mark: u64,
    /// `None` while no answer is known.
    answer: Option<PassedResponse>,
}

#[derive(Serialize, Deserialize, PartialEq)]
struct PassedResponse {
    status: u16,
    head: String,
    body: String,
    #[serde(default)]
    closes: bool,
    #[serde(default)]
    hop_limit: Option<u8>,
}

// Debug output leaves out what guests send and receive.
impl std::fmt::Debug for WireRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PassedQuestion").field("mark", &self.mark).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for WireAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PassedAnswer").field("mark", &self.mark).finish_non_exhaustive()
    }
}

fn connection_of(
    (slot, local, remote): (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)),
) -> Connection {
    Connection { slot, local, remote }
}

fn tuple_of(connection: &Connection) -> (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)) {
    (connection.slot, connection.local, connection.remote)
}

impl From<&HandedRequest> for WireRequest {
    fn from(question: &HandedRequest) -> Self {
        let HandedRequest { connection, mark, method, path, query, headers, body } = question;
        let headers = headers.iter().map(|(name, value)| (name.clone(), STANDARD.encode(value)));
        Self {
            connection: tuple_of(connection),
            mark: *mark,
            method: method.as_str().into(),
            path: path.clone(),
            query: query.clone(),
            headers: headers.collect(),
            body: STANDARD.encode(body),
        }
    }
}

impl WireRequest {
    /// Returns the question, or `None` if it is malformed.
    #[must_use]
    pub(crate) fn question(self) -> Option<HandedRequest> {
        let Self { connection, mark, method, path, query, headers, body } = self;
        let headers = headers.into_iter().map(|(name, value)| Some((name, STANDARD.decode(value).ok()?)));
        Some(HandedRequest {
            connection: connection_of(connection),
            mark,
            method: Method::from_token(&method),
            path,
            query,
            headers: headers.collect::<Option<_>>()?,
            body: STANDARD.decode(body).ok()?,
        })
    }
}

impl WireAnswer {
    /// The answer to a question. Without a response, the question is to be passed on again.
    #[must_use]
    pub(crate) fn new(question: &HandedRequest, response: Option<&Response>) -> Self {
        let answer = response.map(|response| PassedResponse {
            status: response.status().0,
            head: STANDARD.encode(response.head()),
            body: STANDARD.encode(response.body().to_bytes()),
            closes: response.closes(),
            hop_limit: response.hop_limit(),
        });
        Self { connection: tuple_of(&question.connection), mark: question.mark, answer }
    }

    /// Returns the connection and the mark of the question, and the answer.
    #[must_use]
    pub(crate) fn answer(self) -> (Connection, u64, Option<Answer>) {
        let Self { connection, mark, answer } = self;
        let response = answer.and_then(|PassedResponse { status, head, body, closes, hop_limit }| {
            let (head, body) = (STANDARD.decode(head).ok()?, STANDARD.decode(body).ok()?);
            Some(Response::from_parts(head.into(), StatusCode(status), closes, hop_limit, body.into()))
        });
        let answer = response.map(|response| Answer::Known(LiveOutcome::Ready(response)));
        (connection_of(connection), mark, answer)
    }
}

/// Why the exchange of messages has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// The other agent has closed the connection.
    #[error("the other agent has closed the connection")]
    Gone,
    /// A line is longer than its limit.
    #[error("expected lines of at most {0} bytes, found a longer one")]
    TooLong(usize),
    /// A line is not a message of the protocol.
    #[error("expected a message of the takeover protocol, found something else at column {column} of a line")]
    Other {
        /// Where the line is malformed.
        column: usize,
    },
    /// No line arrived in time.
    #[error("the other agent sent nothing for {0:?}")]
    Silent(Duration),
    /// The socket failed.
    #[error("the socket to the other agent: {0}")]
    Io(#[from] io::Error),
}

/// The connection to the other agent.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    /// Bytes read and not yet returned.
    read: Vec<u8>,
    /// Number of bytes of `read` without an end of line.
    scanned: usize,
    /// The longest line that the other agent accepts.
    longest: usize,
}

impl Wire {
    /// Exchanges messages over a stream.
    #[must_use]
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self { stream, read: Vec::new(), scanned: 0, longest: LINE_MAX_1 }
    }

    /// Sets the version that both agents use.
    pub(crate) fn set_version(&mut self, version: u32) {
        self.longest = line_max(version);
    }

    /// Sends the answer to a question. The guest is told to ask again if the answer is too long for the other agent:
    /// its next connection reaches this agent.
    ///
    /// # Errors
    /// The errors of [`Wire::send`], without [`WireError::TooLong`].
    pub(crate) async fn send_answer(
        &mut self,
        question: &HandedRequest,
        response: Option<&Response>,
    ) -> Result<(), WireError> {
        match self.send(&NextAgentMessage::Answer(WireAnswer::new(question, response))).await {
            Err(WireError::TooLong(_)) => {
                let again = Response::error(StatusCode(503), &[("Retry-After", "1")]).and_close();
                self.send(&NextAgentMessage::Answer(WireAnswer::new(question, Some(&again)))).await
            }
            sent => sent,
        }
    }

    /// Waits for the next message. Nothing is lost if this is cancelled.
    ///
    /// # Errors
    /// [`WireError`]; [`WireError::Gone`] at the end of the stream.
    pub(crate) async fn recv<M: DeserializeOwned>(&mut self) -> Result<M, WireError> {
        loop {
            if let Some(end) = self.read[self.scanned..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=self.scanned + end).collect();
                self.scanned = 0;
                // The message of serde_json may repeat what a guest sent.
                let other = |error: serde_json::Error| WireError::Other { column: error.column() };
                return serde_json::from_slice(&line).map_err(other);
            }
            self.scanned = self.read.len();
            if self.read.len() > LINE_MAX {
                return Err(WireError::TooLong(LINE_MAX));
            }
            self.stream.readable().await?;
            let mut buffer = vec![0; READ];
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return Err(WireError::Gone),
                Ok(bytes) => self.read.extend_from_slice(&buffer[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(WireError::Gone),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for the next message for at most `limit`.
    ///
    /// # Errors
    /// As for [`Wire::recv`], and [`WireError::Silent`].
    pub(crate) async fn recv_within<M: DeserializeOwned>(&mut self, limit: Duration) -> Result<M, WireError> {
        tokio::time::timeout(limit, self.recv()).await.unwrap_or(Err(WireError::Silent(limit)))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`WireError`]. A part of the message may have been sent.
    pub(crate) async fn send<M: Serialize>(&mut self, message: &M) -> Result<(), WireError> {
        let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
        line.push(b'\n');
        if line.len() > self.longest {
            return Err(WireError::TooLong(self.longest));
        }
        let write = async {
            let mut rest = &line[..];
            while !rest.is_empty() {
                self.stream.writable().await?;
                match self.stream.try_write(rest) {
                    Ok(bytes) => rest = &rest[bytes..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                        ) =>
                    {
                        return Err(WireError::Gone);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        };
        tokio::time::timeout(WRITE_WITHIN, write).await.unwrap_or(Err(WireError::Silent(WRITE_WITHIN)))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        AROUND, COMPUTED_PER_VM, LINE_MAX, NextAgentMessage, PreviousAgentMessage, Wire, WireAnswer,
        WireError, WireRequest,
    };
    use crate::service::{Answer, HandedRequest};
    use metadata_common::addresses::Connection;
    use metadata_content::http::{Method, Response, StatusCode};
    use metadata_content::store::LiveOutcome;
    use std::time::Duration;
    use tokio::net::UnixStream;

    fn pair() -> (Wire, Wire) {
        let (a, b) = UnixStream::pair().expect("a pair");
        (Wire::new(a), Wire::new(b))
    }

    fn question() -> HandedRequest {
        let local = ("fe80::1".parse().expect("an address"), 80);
        HandedRequest {
            connection: Connection { slot: 7, local, remote: ([10, 0, 0, 1].into(), 40_000) },
            mark: u64::MAX,
            method: Method::Put,
            path: "/a/\"b".into(),
            query: "c=d".into(),
            headers: vec![("X-Name".into(), b"\xff\x00".to_vec())],
            body: b"secret\n".to_vec(),
        }
    }

    #[tokio::test]
    async fn messages_arrive_as_they_were_sent() {
        let (mut a, mut b) = pair();
        for word in [
            NextAgentMessage::Drain,
            NextAgentMessage::Take,
            NextAgentMessage::Hello { oldest: 1, newest: 3, release: "1.2".into() },
        ] {
            a.send(&word).await.expect("sent");
            assert_eq!(b.recv::<NextAgentMessage>().await.expect("received"), word);
        }
        b.send(&PreviousAgentMessage::Ask(WireRequest::from(&question()))).await.expect("sent");
        let PreviousAgentMessage::Ask(passed) = a.recv().await.expect("received") else {
            panic!("a question")
        };
        assert_eq!(passed.question(), Some(question()));
    }

    #[tokio::test]
    async fn a_passed_answer_keeps_every_part_of_the_response() {
        let response =
            Response::new(StatusCode(201), Some("x/y"), &[("ETag", "1")], "body").within(1).and_close();
        let (connection, mark, answer) = WireAnswer::new(&question(), Some(&response)).answer();
        assert_eq!((connection, mark), (question().connection, u64::MAX));
        let Some(Answer::Known(LiveOutcome::Ready(passed))) = answer else { panic!("an answer") };
        assert_eq!(passed, response);
        assert!(WireAnswer::new(&question(), None).answer().2.is_none());
    }

    #[tokio::test]
    async fn messages_and_fields_of_another_version_are_ignored() {
        let (a, mut b) = pair();
        let lines =
            b"{\"say\":\"sing\",\"song\":1}\n{\"say\":\"hello\",\"oldest\":1,\"newest\":2,\"shoes\":[]}\n";
        a.stream.try_write(lines).expect("room");
        assert_eq!(b.recv::<NextAgentMessage>().await.expect("received"), NextAgentMessage::Unknown);
        let hello = NextAgentMessage::Hello { oldest: 1, newest: 2, release: String::new() };
        assert_eq!(b.recv::<NextAgentMessage>().await.expect("received"), hello);
    }

    #[tokio::test]
    async fn a_line_without_end_is_refused_at_the_limit() {
        let (a, mut b) = pair();
        let flood = async {
            loop {
                a.stream.writable().await.expect("a socket");
                let _ = a.stream.try_write(&[b'x'; 65_536]);
            }
        };
        let received = tokio::select! {
            received = b.recv::<NextAgentMessage>() => received,
            () = flood => unreachable!("it has no end"),
        };
        assert!(matches!(received, Err(WireError::TooLong(LINE_MAX))), "{received:?}");
        assert!(b.read.len() < LINE_MAX + 2 * super::READ);
        let long = PreviousAgentMessage::No { reason: "x".repeat(LINE_MAX) };
        assert!(matches!(b.send(&long).await, Err(WireError::TooLong(_))));
    }

    #[tokio::test]
    async fn the_longest_answer_is_passed_whole_and_a_longer_one_is_to_be_asked_again() {
        let lengths =
            [(1, (3 << 20) - AROUND, 200), (1, 4 << 20, 503), (2, COMPUTED_PER_VM, 200), (2, 5 << 20, 503)];
        for (version, length, expected) in lengths {
            let (mut next, mut previous) = pair();
            next.set_version(version);
            let body: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
            let response = Response::new(StatusCode(200), Some("x/y"), &[("ETag", "1")], body.clone());
            let asked = question();
            let sent = async { next.send_answer(&asked, Some(&response)).await };
            let (sent, received) = tokio::join!(sent, previous.recv::<NextAgentMessage>());
            sent.expect("sent");
            let NextAgentMessage::Answer(answer) = received.expect("received") else { panic!("an answer") };
            let (connection, mark, Some(Answer::Known(LiveOutcome::Ready(passed)))) = answer.answer() else {
                panic!("a response")
            };
            assert_eq!((connection, mark), (question().connection, question().mark));
            assert_eq!(passed.status(), StatusCode(expected), "version {version}, {length} bytes");
            if expected == 200 {
                assert!(passed == response, "version {version}, {length} bytes");
            } else {
                assert!(passed.closes() && passed.field("Retry-After").is_some());
            }
        }
    }

    #[tokio::test]
    async fn malformed_lines_the_end_and_silence_are_different_errors() {
        let (a, mut b) = pair();
        a.stream.try_write(b"{\"say\":\"answer\",\"body\":\"secret\"}\n").expect("room");
        let error = b.recv::<NextAgentMessage>().await.expect_err("no such message");
        assert!(matches!(error, WireError::Other { .. }) && !error.to_string().contains("secret"), "{error}");
        let silent = b.recv_within::<NextAgentMessage>(Duration::from_millis(10)).await;
        assert!(matches!(silent, Err(WireError::Silent(_))));
        drop(a);
        assert!(matches!(b.recv::<NextAgentMessage>().await, Err(WireError::Gone)));
    }

    #[test]
    fn debug_output_leaves_out_what_guests_send_and_receive() {
        let passed = WireRequest::from(&question());
        let answer = WireAnswer::new(&question(), Some(&Response::new(StatusCode(200), None, &[], "secret")));
        for text in [format!("{passed:?}"), format!("{answer:?}")] {
            assert!(!text.contains("c2VjcmV0") && text.contains(&u64::MAX.to_string()), "{text}");
        }
    }
}
