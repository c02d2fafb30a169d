//! Destinations of the guest's messages.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::Deserializer;
use serde::{Deserialize, Serialize, Serializer};

use super::values::{LINE_CHARS, Text, text};

/// Maximum length of a Unix socket's path in octets (`sun_path` of unix(7) is 108 with the final zero).
const SOCKET_OCTETS: usize = 107;

/// A value of `sinks`: a file or a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Sink {
    /// Appends lines of JSON to a file: `file:/var/log/guests.jsonl`, or the path alone.
    File(PathBuf),
    /// Sends HTTP POST over a Unix socket: `unix:/run/sink.sock`, or `unix:/run/sink.sock:/path`.
    Unix {
        /// Path of the socket.
        socket: PathBuf,
        /// Path of the HTTP request; `/` by default.
        path: String,
    },
}

impl Text for Sink {
    const EXPECTED: &'static str = "`file:` or `unix:` and an absolute path, such as \
        `file:/var/log/xdp-imds/guests.jsonl`, `unix:/run/guests.sock` or `unix:/run/guests.sock:/http/path`";

    fn read(text: &str) -> Option<Self> {
        if text.chars().count() > LINE_CHARS || text.chars().any(char::is_control) {
            return None;
        }
        match text.strip_prefix("unix:") {
            Some(address) => unix(address),
            None => absolute(text.strip_prefix("file:").unwrap_or(text)).map(Self::File),
        }
    }
}

fn unix(address: &str) -> Option<Sink> {
    let (socket, path) = match address.split_once(":/") {
        Some((socket, rest)) => (socket, format!("/{rest}")),
        None => (address, "/".to_owned()),
    };
    let good = socket.len() <= SOCKET_OCTETS && path.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
    absolute(socket).filter(|_| good).map(|socket| Sink::Unix { socket, path })
}

/// Returns the path if it is absolute, names a file and has no `..`.
fn absolute(text: &str) -> Option<PathBuf> {
    let path = Path::new(text);
    let straight = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let file = path.file_name().is_some() && !text.ends_with('/');
    (path.is_absolute() && straight && file).then(|| path.to_owned())
}

impl fmt::Display for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Unix { socket, path } => write!(f, "unix:{}:{path}", socket.display()),
        }
    }
}

impl Serialize for Sink {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sink {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer)
    }
}

#[cfg(test)]
mod tests {
    use super::Sink;
    use crate::record::values::Text as _;

    #[test]
    fn a_sink_is_a_file_or_a_unix_socket() {
        let file = |path: &str| Some(Sink::File(path.into()));
        let unix =
            |socket: &str, path: &str| Some(Sink::Unix { socket: socket.into(), path: path.to_owned() });
        let long = format!("unix:/{}", "s".repeat(107));
        let cases = [
            ("file:/var/log/guests.jsonl", file("/var/log/guests.jsonl")),
            ("/var/log/guests.jsonl", file("/var/log/guests.jsonl")),
            ("unix:/run/s.sock", unix("/run/s.sock", "/")),
            ("unix:/run/s.sock:/", unix("/run/s.sock", "/")),
            ("unix:/run/s.sock:/v1/ready?a=b", unix("/run/s.sock", "/v1/ready?a=b")),
            ("", None),
            ("guests.jsonl", None),
            ("file:guests.jsonl", None),
            ("file:///var/log/guests.jsonl", file("/var/log/guests.jsonl")),
            ("/", None),
            ("/var/log/", None),
            ("/var/log/..", None),
            ("/var/../etc/passwd", None),
            ("unix:run/s.sock", None),
            ("unix:/run/s.sock:/a b", None),
            ("unix:", None),
            ("http://127.0.0.1/", None),
            (long.as_str(), None),
        ];
        for (text, expected) in cases {
            let read = Sink::read(text);
            // Paths that differ only in repeated slashes are equal, so `file:///x` is `file:/x`.
            assert_eq!(read, expected, "{text}");
            if let Some(sink) = read {
                assert_eq!(Sink::read(&sink.to_string()), Some(sink), "{text} does not read back");
            }
        }
    }
}
