//! Both ends of the conversations in these tests: a successor on the socket, and a guest on TCP.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};
use support::guest::{Guest, METADATA};

use super::node::PATIENCE;

/// A successor that sends protocol messages one by one.
pub(crate) struct Taker(pub(crate) BufReader<UnixStream>);

impl Taker {
    pub(crate) fn transmit(&mut self, word: &Value) {
        writeln!(self.0.get_mut(), "{word}").expect("sent");
    }

    pub(crate) fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Sends the messages of a takeover up to and including `until`, and asserts each answer.
    pub(crate) fn go(&mut self, until: &str) {
        let hello = json!({"say": "hello", "oldest": 1, "newest": 1});
        for (word, answer) in
            [(hello, "welcome"), (json!({"say": "drain"}), "draining"), (json!({"say": "take"}), "yours")]
        {
            self.transmit(&word);
            assert_eq!(self.receive()["say"], answer);
            if word["say"] == until {
                return;
            }
        }
        panic!("unknown message: {until}");
    }
}

/// A connection of a guest to the service.
pub(crate) struct Client(TcpStream);

impl Client {
    pub(crate) fn connect(guest: &Guest) -> Self {
        let stream = guest.ns().run_in(|| {
            TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), PATIENCE).expect("a connection")
        });
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self(stream)
    }

    pub(crate) fn transmit(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).expect("sent");
    }

    pub(crate) fn ask(&mut self, line: &str, fields: &str) -> (u16, String, Vec<u8>) {
        self.transmit(&format!("{line} HTTP/1.1\r\nHost: {METADATA}\r\n{fields}\r\n"));
        self.answer()
    }

    /// Status, head and body of one answer.
    pub(crate) fn answer(&mut self) -> (u16, String, Vec<u8>) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("a head in time");
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).expect("text").to_ascii_lowercase();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let length = field("content-length:").map_or(0, |length| length.parse().expect("a number"));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).expect("a body in time");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, head, body)
    }

    /// Whether the service closes without a reset.
    pub(crate) fn ends(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0))
    }
}

pub(crate) fn says_close(head: &str) -> bool {
    head.contains("\r\nconnection: close\r\n")
}
