//! The key file: JSON with the current key, when it began, and the key before it.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::{KEY_OCTETS, Key, Keys};
use metadata_state::private_file;

/// Most octets of a key file that are read; ours has about 200.
const FILE_OCTETS: u64 = 4_096;
const FORM: &str = "xdp-imds token keys 1";

/// Why the keys cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The system refused.
    #[error(
        "expected to {action} the token keys at {path}, found: {source}; check the directory and its rights"
    )]
    Io {
        /// What was tried.
        action: &'static str,
        /// The key file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Others may read or change the keys.
    #[error(
        "expected {path} to be for its owner alone, found mode {mode:04o}; remove it, and a new key is made \
         (guests then fetch new tokens)"
    )]
    Exposed {
        /// The key file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It holds something else.
    #[error(
        "expected a file of xdp-imds token keys at {path}, found something else; name another file, or remove \
         it to have a new key made"
    )]
    Malformed {
        /// The key file.
        path: PathBuf,
    },
}

/// What the file says. No `Debug`: these are the keys.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    form: String,
    since_unix: u64,
    current: String,
    previous: Option<String>,
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KeyError {
    move |source| KeyError::Io { action, path: path.to_owned(), source }
}

/// Keeps other agents of this node from the file until the result is dropped.
pub(super) fn take_turn(path: &Path) -> Result<File, KeyError> {
    let directory = File::open(private_file::directory(path));
    directory.and_then(|dir| dir.lock().map(|()| dir)).map_err(io_error("lock the directory of", path))
}

/// The keys at `path`; none when there is no file.
pub(super) fn read(path: &Path) -> Result<Option<Keys>, KeyError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(io_error("open", path))?,
    };
    let status = file.metadata().map_err(io_error("inspect", path))?;
    let mode = status.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyError::Exposed { path: path.to_owned(), mode });
    }
    let mut text = Vec::new();
    file.take(FILE_OCTETS).read_to_end(&mut text).map_err(io_error("read", path))?;
    // The parser's own words may repeat a key.
    parse(&text).map(Some).ok_or_else(|| KeyError::Malformed { path: path.to_owned() })
}

/// The keys at `path`, where a file is expected.
pub(super) fn must_read(path: &Path) -> Result<Keys, KeyError> {
    read(path)?.ok_or_else(|| io_error("open", path)(io::ErrorKind::NotFound.into()))
}

fn parse(text: &[u8]) -> Option<Keys> {
    let text: Text = serde_json::from_slice(text).ok().filter(|text: &Text| text.form == FORM)?;
    let previous = match &text.previous {
        Some(previous) => Some(key(previous)?),
        None => None,
    };
    Some(Keys { current: key(&text.current)?, since_unix: text.since_unix, previous })
}

fn key(text: &str) -> Option<Key> {
    let octets: [u8; KEY_OCTETS] = STANDARD.decode(text).ok()?.try_into().ok()?;
    Some(Key::new(octets))
}

/// Puts `keys` into the file at `path`.
pub(super) fn write(path: &Path, keys: &Keys) -> Result<(), KeyError> {
    private_file::replace(path, text(keys).as_bytes()).map_err(io_error("write", path))
}

/// What a file of these keys says.
pub(super) fn text(keys: &Keys) -> String {
    let text = Text {
        form: FORM.to_owned(),
        since_unix: keys.since_unix,
        current: STANDARD.encode(keys.current.octets),
        previous: keys.previous.as_ref().map(|key| STANDARD.encode(key.octets)),
    };
    serde_json::to_string(&text).expect("strings and numbers are JSON")
}
