//! What two agents say to each other: one JSON object a line, over a Unix socket.
//!
//! Unknown fields, and unknown words, are ignored, so that either agent may be the newer; what changes the meaning of what is
//! there gets a new [`VERSION`].

use std::io;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use metadata_base::connection::Connection;
use metadata_content::http::{Method, Response, Status};
use metadata_content::store::Outcome;
use metadata_serve::{Answer, Question};

/// The protocol spoken here.
pub(in crate::agent) const VERSION: u32 = 1;

/// Octets of a line: the longest answer there is, as base64, and what surrounds it.
pub(in crate::agent) const LINE_MAX: usize = 4 << 20;

/// Octets read at a time.
const READ: usize = 64 << 10;

/// Longest a line may take to be written: the other agent reads as it comes.
const WRITE_WITHIN: Duration = Duration::from_secs(5);

/// What the agent that takes over says.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(in crate::agent) enum Taker {
    /// First: the versions it speaks, and what it is.
    Hello {
        /// The oldest.
        oldest: u32,
        /// The newest.
        newest: u32,
        /// Its release.
        #[serde(default)]
        release: String,
    },
    /// It has everything ready: claim your connections, save what guests wrote, change no port.
    Drain,
    /// It has read what was saved and takes the ports: from here on there is no way back.
    Take,
    /// The ports are its.
    Serving,
    /// An answer to [`Giver::Ask`].
    Answer(Told),
    /// A word of another version.
    #[serde(other)]
    Unknown,
}

/// What the agent that is taken over from says.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(in crate::agent) enum Giver {
    /// To [`Taker::Hello`].
    Welcome {
        /// The version spoken from now on.
        version: u32,
        /// Its side: the other one is free.
        side: u32,
        /// Its release.
        #[serde(default)]
        release: String,
    },
    /// It does not hand over, or not any more, and why. It goes on as before.
    No {
        /// For people.
        reason: String,
    },
    /// To [`Taker::Drain`]: all is claimed and saved.
    Draining {
        /// Connections claimed.
        #[serde(default)]
        connections: u64,
    },
    /// To [`Taker::Take`]: it will not go on, whatever happens.
    Yours,
    /// A guest of its own asks what only the other agent knows now.
    Ask(Asked),
    /// Its guests are served, and it ends.
    Done {
        /// Connections cut off.
        #[serde(default)]
        cut: u64,
    },
    /// A word of another version.
    #[serde(other)]
    Unknown,
}

/// A [`Question`], as text.
#[derive(Serialize, Deserialize, PartialEq)]
pub(in crate::agent) struct Asked {
    connection: (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)),
    mark: u64,
    method: String,
    path: String,
    query: String,
    headers: Vec<(String, String)>,
    body: String,
}

/// What is to be said to an [`Asked`].
#[derive(Serialize, Deserialize, PartialEq)]
pub(in crate::agent) struct Told {
    connection: (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)),
    mark: u64,
    /// `None` while there is nothing to say yet.
    answer: Option<ToldAnswer>,
}

#[derive(Serialize, Deserialize, PartialEq)]
struct ToldAnswer {
    status: u16,
    head: String,
    body: String,
    #[serde(default)]
    closes: bool,
    #[serde(default)]
    hop_limit: Option<u8>,
}

/// Without what guests say, and hear.
impl std::fmt::Debug for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asked").field("mark", &self.mark).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Told").field("mark", &self.mark).finish_non_exhaustive()
    }
}

fn connection_of(
    (slot, local, remote): (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)),
) -> Connection {
    Connection { slot, local, remote }
}

fn words_of(connection: &Connection) -> (u32, (std::net::IpAddr, u16), (std::net::IpAddr, u16)) {
    (connection.slot, connection.local, connection.remote)
}

impl From<&Question> for Asked {
    fn from(question: &Question) -> Self {
        let Question { connection, mark, method, path, query, headers, body } = question;
        let headers = headers.iter().map(|(name, value)| (name.clone(), STANDARD.encode(value)));
        Self {
            connection: words_of(connection),
            mark: *mark,
            method: method.as_str().into(),
            path: path.clone(),
            query: query.clone(),
            headers: headers.collect(),
            body: STANDARD.encode(body),
        }
    }
}

impl Asked {
    /// The question; `None` when it is none.
    #[must_use]
    pub(in crate::agent) fn question(self) -> Option<Question> {
        let Self { connection, mark, method, path, query, headers, body } = self;
        let headers = headers.into_iter().map(|(name, value)| Some((name, STANDARD.decode(value).ok()?)));
        Some(Question {
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

impl Told {
    /// What is said to a question; `None` when it has to be asked again.
    #[must_use]
    pub(in crate::agent) fn new(question: &Question, response: Option<&Response>) -> Self {
        let answer = response.map(|response| ToldAnswer {
            status: response.status().0,
            head: STANDARD.encode(response.head()),
            body: STANDARD.encode(response.body().to_bytes()),
            closes: response.closes(),
            hop_limit: response.hop_limit(),
        });
        Self { connection: words_of(&question.connection), mark: question.mark, answer }
    }

    /// To whom, and what.
    #[must_use]
    pub(in crate::agent) fn answer(self) -> (Connection, u64, Option<Answer>) {
        let Self { connection, mark, answer } = self;
        let response = answer.and_then(|ToldAnswer { status, head, body, closes, hop_limit }| {
            let (head, body) = (STANDARD.decode(head).ok()?, STANDARD.decode(body).ok()?);
            Some(Response::from_parts(head.into(), Status(status), closes, hop_limit, body.into()))
        });
        let answer = response.map(|response| Answer::Known(Outcome::Ready(response)));
        (connection_of(connection), mark, answer)
    }
}

/// Why nothing more is heard.
#[derive(Debug, thiserror::Error)]
pub(in crate::agent) enum WireError {
    /// The other agent has gone.
    #[error("the other agent has gone")]
    Gone,
    /// It said something too long.
    #[error("expected lines of at most {LINE_MAX} octets, found a longer one")]
    TooLong,
    /// It said something else.
    #[error("expected a word of the takeover protocol, found something else at column {column} of a line")]
    Other {
        /// Where.
        column: usize,
    },
    /// It said nothing in time.
    #[error("the other agent said nothing for {0:?}")]
    Silent(Duration),
    /// The socket failed.
    #[error("the socket to the other agent: {0}")]
    Io(#[from] io::Error),
}

/// Lines to and from the other agent.
#[derive(Debug)]
pub(in crate::agent) struct Wire {
    stream: UnixStream,
    /// Read and not yet taken.
    read: Vec<u8>,
    /// Octets of it known to hold no end of a line.
    looked_at: usize,
}

impl Wire {
    /// A conversation over a stream.
    #[must_use]
    pub(in crate::agent) fn new(stream: UnixStream) -> Self {
        Self { stream, read: Vec::new(), looked_at: 0 }
    }

    /// The next line. Nothing is lost when this is cancelled.
    ///
    /// # Errors
    /// [`WireError`], [`WireError::Gone`] at the end.
    pub(in crate::agent) async fn hear<M: DeserializeOwned>(&mut self) -> Result<M, WireError> {
        loop {
            if let Some(end) = self.read[self.looked_at..].iter().position(|octet| *octet == b'\n') {
                let line: Vec<u8> = self.read.drain(..=self.looked_at + end).collect();
                self.looked_at = 0;
                // Its own words may repeat what a guest said.
                let other = |error: serde_json::Error| WireError::Other { column: error.column() };
                return serde_json::from_slice(&line).map_err(other);
            }
            self.looked_at = self.read.len();
            if self.read.len() > LINE_MAX {
                return Err(WireError::TooLong);
            }
            self.stream.readable().await?;
            let mut buffer = vec![0; READ];
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return Err(WireError::Gone),
                Ok(octets) => self.read.extend_from_slice(&buffer[..octets]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(WireError::Gone),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next line, if it comes in time.
    ///
    /// # Errors
    /// As for [`Wire::hear`], and [`WireError::Silent`].
    pub(in crate::agent) async fn hear_within<M: DeserializeOwned>(
        &mut self,
        limit: Duration,
    ) -> Result<M, WireError> {
        tokio::time::timeout(limit, self.hear()).await.unwrap_or(Err(WireError::Silent(limit)))
    }

    /// Says a line.
    ///
    /// # Errors
    /// [`WireError`]: it may have been said in part.
    pub(in crate::agent) async fn say<M: Serialize>(&mut self, word: &M) -> Result<(), WireError> {
        let mut line = serde_json::to_vec(word).map_err(io::Error::from)?;
        line.push(b'\n');
        if line.len() > LINE_MAX {
            return Err(WireError::TooLong);
        }
        let write = async {
            let mut rest = &line[..];
            while !rest.is_empty() {
                self.stream.writable().await?;
                match self.stream.try_write(rest) {
                    Ok(octets) => rest = &rest[octets..],
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
    use super::{Asked, Giver, LINE_MAX, Taker, Told, Wire, WireError};
    use metadata_base::connection::Connection;
    use metadata_content::http::{Method, Response, Status};
    use metadata_content::store::Outcome;
    use metadata_serve::{Answer, Question};
    use std::time::Duration;
    use tokio::net::UnixStream;

    fn pair() -> (Wire, Wire) {
        let (a, b) = UnixStream::pair().expect("a pair");
        (Wire::new(a), Wire::new(b))
    }

    fn question() -> Question {
        let local = ("fe80::1".parse().expect("an address"), 80);
        Question {
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
    async fn what_is_said_is_heard_as_it_was_said() {
        let (mut a, mut b) = pair();
        for word in [Taker::Drain, Taker::Take, Taker::Hello { oldest: 1, newest: 3, release: "1.2".into() }]
        {
            a.say(&word).await.expect("said");
            assert_eq!(b.hear::<Taker>().await.expect("heard"), word);
        }
        b.say(&Giver::Ask(Asked::from(&question()))).await.expect("said");
        let Giver::Ask(asked) = a.hear().await.expect("heard") else { panic!("a question") };
        assert_eq!(asked.question(), Some(question()));
    }

    #[tokio::test]
    async fn an_answer_keeps_every_part_of_itself() {
        let response =
            Response::new(Status(201), Some("x/y"), &[("ETag", "1")], "body").within(1).and_close();
        let (connection, mark, answer) = Told::new(&question(), Some(&response)).answer();
        assert_eq!((connection, mark), (question().connection, u64::MAX));
        let Some(Answer::Known(Outcome::Ready(told))) = answer else { panic!("an answer") };
        assert_eq!(told, response);
        assert!(Told::new(&question(), None).answer().2.is_none());
    }

    #[tokio::test]
    async fn words_and_fields_of_another_version_are_ignored() {
        let (a, mut b) = pair();
        let lines =
            b"{\"say\":\"sing\",\"song\":1}\n{\"say\":\"hello\",\"oldest\":1,\"newest\":2,\"shoes\":[]}\n";
        a.stream.try_write(lines).expect("room");
        assert_eq!(b.hear::<Taker>().await.expect("heard"), Taker::Unknown);
        let hello = Taker::Hello { oldest: 1, newest: 2, release: String::new() };
        assert_eq!(b.hear::<Taker>().await.expect("heard"), hello);
    }

    #[tokio::test]
    async fn a_line_that_has_no_end_is_not_read_for_ever() {
        let (a, mut b) = pair();
        let flood = async {
            loop {
                a.stream.writable().await.expect("a socket");
                let _ = a.stream.try_write(&[b'x'; 65_536]);
            }
        };
        let heard = tokio::select! {
            heard = b.hear::<Taker>() => heard,
            () = flood => unreachable!("it has no end"),
        };
        assert!(matches!(heard, Err(WireError::TooLong)), "{heard:?}");
        assert!(b.read.len() < LINE_MAX + 2 * super::READ);
        let long = Giver::No { reason: "x".repeat(LINE_MAX) };
        assert!(matches!(b.say(&long).await, Err(WireError::TooLong)));
    }

    #[tokio::test]
    async fn what_makes_no_sense_the_end_and_silence_are_told_apart() {
        let (a, mut b) = pair();
        a.stream.try_write(b"{\"say\":\"answer\",\"body\":\"secret\"}\n").expect("room");
        let error = b.hear::<Taker>().await.expect_err("no such word");
        assert!(matches!(error, WireError::Other { .. }) && !error.to_string().contains("secret"), "{error}");
        let silent = b.hear_within::<Taker>(Duration::from_millis(10)).await;
        assert!(matches!(silent, Err(WireError::Silent(_))));
        drop(a);
        assert!(matches!(b.hear::<Taker>().await, Err(WireError::Gone)));
    }

    #[test]
    fn what_guests_say_is_not_in_debug_output() {
        let asked = Asked::from(&question());
        let told = Told::new(&question(), Some(&Response::new(Status(200), None, &[], "secret")));
        for text in [format!("{asked:?}"), format!("{told:?}")] {
            assert!(!text.contains("c2VjcmV0") && text.contains(&u64::MAX.to_string()), "{text}");
        }
    }
}
