//! `metadata`: custom keys of a VM, and the restrictions that dialects put on them.

use serde::de::Deserializer;
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use super::Record;
use super::dialects::DateTree;
use super::dialects::Dialect;
use super::parse::way;
use super::validate::{ValidationResult, Validator};
use super::values::{LINE_CHARS, TextForm, excerpt, text};

/// Keys that NoCloud's meta-data reserves. It omits entries of `metadata` with these names.
pub const RESERVED_KEYS: [&str; 9] = [
    "instance-id",
    "local-hostname",
    "public-keys",
    "dsmode",
    "seedfrom",
    "network-interfaces",
    "availability-zone",
    "region",
    "instance-type",
];

/// Keys that Oracle's `metadata` reserves. It omits entries of the record's `metadata` with these names.
pub const ORACLE_KEYS: [&str; 2] = ["ssh_authorized_keys", "user_data"];

/// Attributes that GCE reserves. It omits entries of `metadata` with these names.
pub const GCE_ATTRIBUTES: [&str; 3] = ["ssh-keys", "user-data", "user-data-encoding"];

/// Returns whether a key can be the last segment of a URL path. GCE serves each attribute at such a path.
#[must_use]
pub fn is_segment(key: &str) -> bool {
    !matches!(key, "." | "..")
}

/// Maximum length of a `metadata` key that EC2 serves as an instance tag, in characters.
const TAG_CHARS: usize = 128;

/// Returns whether EC2 can serve an entry of `metadata` as an instance tag.
///
/// A key must fit a listing and a path, and a value must be one line. Clients parse a listed `0=name` as a public key
/// and a value of several lines as a list.
#[must_use]
pub fn is_instance_tag(key: &str, value: &str) -> bool {
    let clean = |b: u8| b.is_ascii_alphanumeric() || b"+-=.,_:@".contains(&b);
    let numbered = key.split_once('=').is_some_and(|(number, _)| number.bytes().all(|b| b.is_ascii_digit()));
    (1..=TAG_CHARS).contains(&key.len())
        && key.bytes().all(clean)
        && !numbered
        && !matches!(key, "." | ".." | "_index")
        && !value.contains('\n')
}

impl Validator<'_> {
    /// Checks keys and values against the limits. Warns of each entry that a dialect omits.
    pub(super) fn metadata(&mut self, record: &Record) -> ValidationResult {
        let entries = &record.metadata.0;
        let has_password = record.admin.as_ref().is_some_and(|admin| admin.password.is_some());
        self.at_most(&way!["metadata"], self.limits.metadata_keys, entries.len(), "keys")?;
        for (key, value) in entries {
            let here = way!["metadata", key.as_str()];
            let named = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
            if key.is_empty() || key.len() > self.limits.metadata_chars || !key.bytes().all(named) {
                let found = format!("`{}`", excerpt(key));
                let expected =
                    format!("a key of 1 to {} letters, digits, `.`, `_` and `-`", self.limits.metadata_chars);
                return Err(self.refuse(&here, expected, found, "rename it"));
            }
            self.at_most(&here, self.limits.metadata_chars, value.chars().count(), "characters")?;
            if RESERVED_KEYS.contains(&key.as_str()) {
                let message = "NoCloud's meta-data reserves this key and omits this value; rename it";
                self.warn(&here, message);
            }
            if key == "admin_pass" && has_password && record.serve.serves(Dialect::OpenStack) {
                let message =
                    "left out of OpenStack's meta: admin.password is served as `admin_pass`; rename it";
                self.warn(&here, message);
            }
            if ORACLE_KEYS.contains(&key.as_str()) && record.serve.serves(Dialect::Oracle) {
                let message = "Oracle's metadata reserves this key and omits this value; rename it";
                self.warn(&here, message);
            }
            if GCE_ATTRIBUTES.contains(&key.as_str()) && record.serve.serves(Dialect::Gce) {
                let message = "GCE reserves this attribute and omits this value; rename it";
                self.warn(&here, message);
            }
            if !is_segment(key) && record.serve.serves(Dialect::Gce) {
                self.warn(&here, "left out of GCE's attributes: no URL path can end in this key; rename it");
            }
            let tree = record.serve.date_tree == DateTree::Ec2 && record.serve.serves(Dialect::Ec2);
            if tree && !is_instance_tag(key, value) {
                let message = format!(
                    "not served as an instance tag by ec2: expected a key of at most {TAG_CHARS} characters other \
                     than `.`, `..` and `_index`, and a value of one line"
                );
                self.warn(&here, message);
            }
        }
        Ok(())
    }
}

// Destinations of the guest's messages.

/// Maximum length of a Unix socket's path in bytes (`sun_path` of unix(7) is 108 with the final zero).
const SOCKET_BYTES: usize = 107;

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

impl TextForm for Sink {
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
    let good = socket.len() <= SOCKET_BYTES && path.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
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
    use crate::record::values::TextForm as _;

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
