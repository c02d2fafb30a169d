//! The file of the keys that sign session tokens.

#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metadata_common::run::unit_hint;
use metadata_content::token::{Keyring, TokenKeys};

use crate::state::private_file;

/// Most bytes to read from a key file; a valid one has about 200.
const FILE_BYTES: usize = 4_096;
/// How many unusable files are kept beside a key file.
const ASIDE_MOST: usize = 4;

/// Whose file of keys it is, which decides what its faults call for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFile {
    /// The agent's own, in its directory of state.
    Own,
    /// One that an operator maintains (`token_key` of the configuration).
    Given,
    /// The one that a new key is to come after.
    Present,
}

impl KeyFile {
    const fn remedy_of_access(self) -> &'static str {
        match self {
            Self::Own => {
                "run chmod 0600 on it if nobody else has read it; otherwise remove it, and a new key is made (guests then \
                 fetch new tokens)"
            }
            Self::Given => {
                "run chmod 0600 on it (in a Secret's volume: `defaultMode: 0400`); if others may have read it, replace it by \
                 the output of `xdp-imds token-key`"
            }
            Self::Present => "run chmod 0600 on it",
        }
    }

    const fn remedy_of_version(self) -> &'static str {
        match self {
            Self::Own => {
                "start a release that reads it, or remove it to have a new key made (guests then fetch new tokens)"
            }
            Self::Given | Self::Present => "use the release that wrote it",
        }
    }

    const fn remedy_of_form(self) -> &'static str {
        match self {
            Self::Own => "remove it to have a new key made",
            Self::Given => "name another file, or write one with `xdp-imds token-key`",
            Self::Present => "name the file that `token_key` of the configuration names",
        }
    }
}

/// Why the keys are unavailable.
#[derive(Debug, thiserror::Error)]
pub enum TokenKeyError {
    /// The kernel refused an access.
    #[error(
        "cannot {action} the token keys at {}: {source}; check the path and its permissions{}", path.display(),
        unit_hint(source)
    )]
    Io {
        /// The failed action.
        action: &'static str,
        /// The key file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Other users may read or change the file.
    #[error(
        "expected {} to be accessible only to its owner, found mode {mode:04o}; {}", path.display(), of.remedy_of_access()
    )]
    Exposed {
        /// The key file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// Whose it is.
        of: KeyFile,
    },
    /// Another release wrote the file, in a version that this one does not read.
    #[error(
        "expected token keys of version {} at {}, found version {found}, which another release wrote; {}",
        TokenKeys::VERSION, path.display(), of.remedy_of_version()
    )]
    Version {
        /// The key file, which stays unchanged.
        path: PathBuf,
        /// The version found.
        found: u32,
        /// Whose it is.
        of: KeyFile,
    },
    /// The file is not a key file.
    #[error(
        "expected a file of xdp-imds token keys at {}, found something else; {}", path.display(), of.remedy_of_form()
    )]
    Malformed {
        /// The key file.
        path: PathBuf,
        /// Whose it is.
        of: KeyFile,
    },
}

/// Reads the keys at `path`, or creates the file with mode 0600. Its directory must exist. In this module `now_unix` is
/// in Unix seconds.
///
/// A file that is empty or damaged is set aside ([`aside`]) with a warning, and replaced by one with a new key.
///
/// # Errors
/// [`TokenKeyError`] if other users have access, if another release wrote it, or if it cannot be read or created.
pub fn open(path: &Path, now_unix: u64) -> Result<Keyring, TokenKeyError> {
    let _turn = take_turn(path)?;
    let keys = match read_or_set_aside(path)? {
        Some(keys) => keys,
        None => {
            let keys = TokenKeys::new(now_unix);
            write(path, &keys)?;
            keys
        }
    };
    Ok(Keyring::with(keys))
}

/// Reads keys from a file that others maintain, such as a mounted Secret; `None` if it does not exist.
///
/// # Errors
/// [`TokenKeyError`] if other users have access, if it is not a key file, or if it cannot be read.
pub fn given(path: &Path) -> Result<Option<Keyring>, TokenKeyError> {
    Ok(read(path, KeyFile::Given)?.map(Keyring::with))
}

/// Checks the agent's own keys without changing them. A missing file is not a fault.
///
/// # Errors
/// The errors of [`given`].
pub fn check_own(path: &Path) -> Result<(), TokenKeyError> {
    read(path, KeyFile::Own).map(drop)
}

/// Loads the current keys from a file that others maintain. If it is missing or invalid, the keys stay unchanged. Returns
/// false if it is missing.
///
/// # Errors
/// The errors of [`given`].
pub fn follow(keyring: &Keyring, path: &Path) -> Result<bool, TokenKeyError> {
    let keys = read(path, KeyFile::Given)?;
    let is_there = keys.is_some();
    keys.into_iter().for_each(|keys| keyring.set(keys));
    Ok(is_there)
}

/// Returns the text of a key file with a new key. Tokens of the key in `former` stay valid until they expire.
///
/// # Errors
/// [`TokenKeyError`] if `former` is unusable.
pub fn generate(former: Option<&Path>, now_unix: u64) -> Result<String, TokenKeyError> {
    let keys = match former {
        Some(path) => must_read(path)?.rotated(now_unix),
        None => TokenKeys::new(now_unix),
    };
    Ok(keys.text())
}

/// Creates a new key if the one at `path` is at least `age` old, and returns true if it did. The least effective age is
/// [`SHORTEST_ROTATION`](metadata_content::token::SHORTEST_ROTATION).
///
/// Loads a key that another agent has put into the file. A damaged file is set aside like by [`open`], and the keys in
/// memory are written again, so that tokens stay valid. An error leaves the keys unchanged.
///
/// # Errors
/// The errors of [`open`].
pub fn rotate_if_older(
    keyring: &Keyring,
    path: &Path,
    age: Duration,
    now_unix: u64,
) -> Result<bool, TokenKeyError> {
    let _turn = take_turn(path)?;
    let found = match read(path, KeyFile::Own) {
        Err(TokenKeyError::Malformed { .. }) => {
            set_aside(path)?;
            let keys = keyring.keys();
            write(path, &keys)?;
            Some(keys)
        }
        found => found?,
    };
    // If the file was removed, create a new key, because the removal may be meant to revoke the key in memory.
    let rotates = found.as_ref().is_none_or(|keys| keys.older_than(age, now_unix));
    let keys = match found {
        Some(keys) if rotates => keys.rotated(now_unix),
        Some(keys) => keys,
        None => TokenKeys::new(now_unix),
    };
    if rotates {
        write(path, &keys)?;
    }
    keyring.set(keys);
    Ok(rotates)
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TokenKeyError {
    move |source| TokenKeyError::Io { action, path: path.to_owned(), source }
}

/// Where the last unusable file at `path` was set aside. The ones before it have higher numbers.
#[must_use]
pub fn aside(path: &Path) -> PathBuf {
    numbered(path, 1)
}

fn numbered(path: &Path, number: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".bad.{number}"));
    name.into()
}

/// Renames an unusable key file, and forgets the oldest of [`ASIDE_MOST`] earlier ones.
fn set_aside(path: &Path) -> Result<(), TokenKeyError> {
    let rename = |from: &Path, to: &Path| match fs::rename(from, to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("set aside", path)(error)),
        _ => Ok(()),
    };
    for number in (1..ASIDE_MOST).rev() {
        rename(&numbered(path, number), &numbered(path, number + 1))?;
    }
    rename(path, &aside(path))?;
    tracing::warn!(
        file = %path.display(),
        aside = %aside(path).display(),
        "expected token keys, found something else: the file is set aside, and rewritten"
    );
    Ok(())
}

/// Reads the keys at `path`; `None` if the file does not exist, or was unusable and is set aside.
fn read_or_set_aside(path: &Path) -> Result<Option<TokenKeys>, TokenKeyError> {
    match read(path, KeyFile::Own) {
        Err(TokenKeyError::Malformed { .. }) => set_aside(path).map(|()| None),
        read => read,
    }
}

/// Locks out the node's other agents until the result is dropped.
fn take_turn(path: &Path) -> Result<File, TokenKeyError> {
    let directory = File::open(private_file::directory(path));
    directory.and_then(|dir| dir.lock().map(|()| dir)).map_err(io_error("lock the directory of", path))
}

/// Reads the keys at `path`; `None` if the file does not exist.
fn read(path: &Path, of: KeyFile) -> Result<Option<TokenKeys>, TokenKeyError> {
    let Some(file) = private_file::open(path).map_err(io_error("open", path))? else { return Ok(None) };
    let status = file.metadata().map_err(io_error("inspect", path))?;
    let mode = status.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(TokenKeyError::Exposed { path: path.to_owned(), mode, of });
    }
    let malformed = || TokenKeyError::Malformed { path: path.to_owned(), of };
    let text = private_file::read_within(file, FILE_BYTES).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => malformed(),
        _ => io_error("read", path)(error),
    })?;
    if let Some(found) = TokenKeys::version_of(&text).filter(|found| *found != TokenKeys::VERSION) {
        return Err(TokenKeyError::Version { path: path.to_owned(), found, of });
    }
    // The parser's message could repeat a key.
    TokenKeys::parse(&text).map(Some).ok_or_else(malformed)
}

/// Reads the present keys at `path`, which must exist.
fn must_read(path: &Path) -> Result<TokenKeys, TokenKeyError> {
    let missing = || fs::metadata(path).err().unwrap_or_else(|| io::ErrorKind::NotFound.into());
    read(path, KeyFile::Present)?.ok_or_else(|| io_error("open", path)(missing()))
}

/// Writes `keys` to the file at `path`.
fn write(path: &Path, keys: &TokenKeys) -> Result<(), TokenKeyError> {
    private_file::replace(path, keys.text().as_bytes()).map_err(io_error("write", path))
}
