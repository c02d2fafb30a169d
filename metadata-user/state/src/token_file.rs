//! The file of the keys that sign session tokens.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metadata_content::token::{Keyring, Keys};

use crate::private_file;

/// Most octets of a key file that are read; ours has about 200.
const FILE_OCTETS: usize = 4_096;

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

/// The keys in the file at `path`, which is made, with mode 0600, when there is none. Its directory must exist. `now_unix`
/// is in Unix seconds, here and below.
///
/// # Errors
/// [`KeyError`] when the file is open to others, is no key file, or cannot be read or made.
pub fn open(path: &Path, now_unix: u64) -> Result<Keyring, KeyError> {
    let _turn = take_turn(path)?;
    let keys = match read(path)? {
        Some(keys) => keys,
        None => {
            let keys = Keys::new(now_unix);
            write(path, &keys)?;
            keys
        }
    };
    Ok(Keyring::with(keys))
}

/// The keys in a file that others look after, such as a mounted Secret; `None` when there is none.
///
/// # Errors
/// [`KeyError`] when the file is open to others, is no key file, or cannot be read.
pub fn given(path: &Path) -> Result<Option<Keyring>, KeyError> {
    Ok(read(path)?.map(Keyring::with))
}

/// Takes over what is in such a file by now. On an error, and when it is gone, the keys stay as they are.
///
/// # Errors
/// As for [`given`].
pub fn follow(keyring: &Keyring, path: &Path) -> Result<(), KeyError> {
    if let Some(keys) = read(path)? {
        keyring.set(keys);
    }
    Ok(())
}

/// The text of a key file with a new key in it. Tokens of the key in `former` stay good until they expire.
///
/// # Errors
/// [`KeyError`] when `former` cannot be used.
pub fn generate(former: Option<&Path>, now_unix: u64) -> Result<String, KeyError> {
    let keys = match former {
        Some(path) => must_read(path)?.rotated(now_unix),
        None => Keys::new(now_unix),
    };
    Ok(keys.text())
}

/// Begins a new key when the one in the file at `path` is at least `age` old, which is taken as
/// [`SHORTEST_ROTATION`](metadata_content::token::SHORTEST_ROTATION) at least. True when it did.
///
/// A key that another agent put into the file is taken over. On an error the keys stay as they are.
///
/// # Errors
/// [`KeyError`], as for [`open`].
pub fn rotate_if_older(
    keyring: &Keyring,
    path: &Path,
    age: Duration,
    now_unix: u64,
) -> Result<bool, KeyError> {
    let _turn = take_turn(path)?;
    // A file somebody removed is made anew: the key in memory may be why it was removed.
    let found = read(path)?;
    let rotates = found.as_ref().is_none_or(|keys| keys.older_than(age, now_unix));
    let keys = match found {
        Some(keys) if rotates => keys.rotated(now_unix),
        Some(keys) => keys,
        None => Keys::new(now_unix),
    };
    if rotates {
        write(path, &keys)?;
    }
    keyring.set(keys);
    Ok(rotates)
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KeyError {
    move |source| KeyError::Io { action, path: path.to_owned(), source }
}

/// Keeps other agents of this node from the file until the result is dropped.
fn take_turn(path: &Path) -> Result<File, KeyError> {
    let directory = File::open(private_file::directory(path));
    directory.and_then(|dir| dir.lock().map(|()| dir)).map_err(io_error("lock the directory of", path))
}

/// The keys at `path`; none when there is no file.
fn read(path: &Path) -> Result<Option<Keys>, KeyError> {
    let Some(file) = private_file::open(path).map_err(io_error("open", path))? else { return Ok(None) };
    let status = file.metadata().map_err(io_error("inspect", path))?;
    let mode = status.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyError::Exposed { path: path.to_owned(), mode });
    }
    let malformed = || KeyError::Malformed { path: path.to_owned() };
    let text = private_file::read_within(file, FILE_OCTETS).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => malformed(),
        _ => io_error("read", path)(error),
    })?;
    // The parser's own words may repeat a key.
    Keys::parse(&text).map(Some).ok_or_else(malformed)
}

/// The keys at `path`, where a file is expected.
fn must_read(path: &Path) -> Result<Keys, KeyError> {
    read(path)?.ok_or_else(|| io_error("open", path)(io::ErrorKind::NotFound.into()))
}

/// Puts `keys` into the file at `path`.
fn write(path: &Path, keys: &Keys) -> Result<(), KeyError> {
    private_file::replace(path, keys.text().as_bytes()).map_err(io_error("write", path))
}
