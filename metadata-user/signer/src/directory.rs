//! The directory of keys: one PEM file for each.
//!
//! No file says which key signs. The age of the keys decides, so that agents of one directory agree, and so does an
//! agent that starts again:
//!
//! - A key's birth is the time in its file name (`20261123T100000Z.pem`), else the file's modification time.
//! - Every key is published. The newest key that has been published for long enough signs; if none has, the oldest.
//! - Rotation makes a key when the newest one is old. It deletes a key only when the successor of its successor signs,
//!   so that a step of the clock cannot take away a key whose tokens are valid.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use time::{Date, Month, OffsetDateTime, Time};

use crate::key::{Algorithm, SigningKey, SigningKeyError};

/// Maximum number of keys in a directory.
pub const KEYS: usize = 16;
/// Maximum size of a key file, in bytes. RSA keys of 4,096 bits take 3.3 KiB.
pub const KEY_BYTES: usize = 16 << 10;
/// Ending of key files. Other files are ignored.
const ENDING: &str = ".pem";

/// When a key signs, and when another is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Age at which a key begins to sign, in seconds.
    pub publish_for: u64,
    /// Age of the newest key at which another is made, in seconds; `None` leaves keys to others.
    pub after: Option<u64>,
}

/// Why a directory or a file in it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The file system refuses.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There are too many keys.
    #[error("expected at most {KEYS} keys in {}, found {found}; remove those whose tokens have expired", path.display())]
    TooMany {
        /// The directory.
        path: PathBuf,
        /// Number of key files.
        found: usize,
    },
    /// There is no usable key.
    #[error(
        "expected a key for {algorithm} in {}, found none that can be used; {}", path.display(), how_to_make(*algorithm, path)
    )]
    Empty {
        /// The directory.
        path: PathBuf,
        /// The configured algorithm.
        algorithm: Algorithm,
    },
    /// Other users can read a key.
    #[error("expected {} to be private, found mode {mode:o}; run: chmod 600 FILE", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file is too long or not a file.
    #[error("expected a regular file of at most {KEY_BYTES} bytes at {}, found something else", path.display())]
    NotAKeyFile {
        /// The file.
        path: PathBuf,
    },
    /// The file holds no usable key.
    #[error("{}: {source}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: SigningKeyError,
    },
}

/// A key and its file.
#[derive(Debug)]
struct KeyAndFile {
    birth_unix: u64,
    name: String,
    key: SigningKey,
}

/// A file as it was read: name, modification time, size, inode.
type NamedFileIdentity = (String, i64, i64, u64, u64);

/// The keys of a directory.
#[derive(Debug)]
pub struct KeyDirectory {
    path: PathBuf,
    algorithm: Algorithm,
    rotation: Rotation,
    seen: Vec<NamedFileIdentity>,
    /// The oldest first.
    keys: Vec<KeyAndFile>,
}

impl KeyDirectory {
    /// Names a directory; [`look`](Self::look) reads it.
    #[must_use]
    pub fn new(path: PathBuf, algorithm: Algorithm, rotation: Rotation) -> Self {
        Self { path, algorithm, rotation, seen: Vec::new(), keys: Vec::new() }
    }

    /// Reads the directory again if a file has changed. Returns the reasons why files are skipped, empty if nothing has
    /// changed.
    ///
    /// # Errors
    /// If the directory cannot be read or has too many keys. The keys then stay unchanged.
    pub fn look(&mut self) -> Result<Vec<DirectoryError>, DirectoryError> {
        let seen = self.list()?;
        if seen == self.seen {
            return Ok(Vec::new());
        }
        let (mut keys, mut skipped) = (Vec::new(), Vec::new());
        for (name, seconds, ..) in &seen {
            let birth_unix = birth(name).unwrap_or_else(|| u64::try_from(*seconds).unwrap_or(0));
            match self.read(name) {
                Ok(key) => keys.push(KeyAndFile { birth_unix, name: name.clone(), key }),
                Err(error) => skipped.push(error),
            }
        }
        keys.sort_by(|a, b| (a.birth_unix, &a.name).cmp(&(b.birth_unix, &b.name)));
        (self.keys, self.seen) = (keys, seen);
        Ok(skipped)
    }

    /// Makes a key if the newest one is old, and deletes keys that are no longer needed. Returns whether it did either;
    /// [`look`](Self::look) then finds the change. Does nothing if others look after the keys.
    ///
    /// # Errors
    /// If the directory cannot be changed.
    pub fn rotate(&self, now_unix: u64) -> Result<bool, DirectoryError> {
        let Some(after) = self.rotation.after else { return Ok(false) };
        let newest = self.keys.last().map(|dated| dated.birth_unix);
        let is_due = newest.is_none_or(|birth| now_unix.saturating_sub(birth) >= after);
        if is_due && self.seen.len() < KEYS {
            make(&self.path, self.algorithm, now_unix)?;
        }
        let last = self.signing_at(now_unix).unwrap_or(0).saturating_sub(1);
        // A file with another name is somebody else's.
        let unneeded: Vec<_> = self.keys[..last].iter().filter(|old| birth(&old.name).is_some()).collect();
        for old in &unneeded {
            let path = self.path.join(&old.name);
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        }
        Ok(is_due || !unneeded.is_empty())
    }

    /// Returns the key that signs; `None` without keys.
    #[must_use]
    pub fn signing(&self, now_unix: u64) -> Option<&SigningKey> {
        Some(&self.keys[self.signing_at(now_unix)?].key)
    }

    fn signing_at(&self, now_unix: u64) -> Option<usize> {
        let is_published = |dated: &KeyAndFile| {
            dated.birth_unix.checked_add(self.rotation.publish_for).is_some_and(|from| from <= now_unix)
        };
        let newest = self.keys.iter().rposition(is_published);
        newest.or((!self.keys.is_empty()).then_some(0))
    }

    /// Returns every key, the oldest first.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &SigningKey> {
        self.keys.iter().map(|dated| &dated.key)
    }

    /// Returns an error if there is no key.
    ///
    /// # Errors
    /// [`DirectoryError::Empty`].
    pub fn require_key(&self) -> Result<(), DirectoryError> {
        let (path, algorithm) = (self.path.clone(), self.algorithm);
        if self.keys.is_empty() { Err(DirectoryError::Empty { path, algorithm }) } else { Ok(()) }
    }

    fn list(&self) -> Result<Vec<NamedFileIdentity>, DirectoryError> {
        let failed = |source| DirectoryError::Io { action: "read", path: self.path.clone(), source };
        let mut seen = Vec::new();
        let mut found = 0;
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            if !name.ends_with(ENDING) || name.starts_with('.') {
                continue;
            }
            found += 1;
            if seen.len() == KEYS {
                continue;
            }
            // Follows links, because kubelet mounts Secrets as links. A file that was just removed is skipped.
            let Ok(status) = fs::metadata(entry.path()) else { continue };
            seen.push((name, status.mtime(), status.mtime_nsec(), status.size(), status.ino()));
        }
        if found > KEYS {
            return Err(DirectoryError::TooMany { path: self.path.clone(), found });
        }
        seen.sort();
        Ok(seen)
    }

    fn read(&self, name: &str) -> Result<SigningKey, DirectoryError> {
        let path = self.path.join(name);
        // A FIFO must not block the signer.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&path);
        let file = file.map_err(io_error("open", &path))?;
        let status = file.metadata().map_err(io_error("inspect", &path))?;
        if !status.is_file() || status.size() > KEY_BYTES as u64 {
            return Err(DirectoryError::NotAKeyFile { path });
        }
        let mode = status.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(DirectoryError::Exposed { path, mode });
        }
        let mut text = String::new();
        file.take(KEY_BYTES as u64).read_to_string(&mut text).map_err(io_error("read", &path))?;
        SigningKey::parse(self.algorithm, &text).map_err(|source| DirectoryError::Key { path, source })
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirectoryError {
    move |source| DirectoryError::Io { action, path: path.to_owned(), source }
}

/// Says how an operator makes a key for an algorithm in a directory, for the end of an error. RSA keys come from OpenSSL.
#[must_use]
pub fn how_to_make(algorithm: Algorithm, directory: &Path) -> String {
    let directory = directory.display();
    match algorithm {
        Algorithm::Rs256 => format!(
            "make one with `(umask 077; openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:3072 -out \
             {directory}/$(date -u +%Y%m%dT%H%M%SZ).pem)`, or set `identity.algorithm: ES256`"
        ),
        Algorithm::Es256 => format!("make one with `xdp-imds identity key {directory}`"),
        Algorithm::EdDsa => format!("make one with `xdp-imds identity key {directory} --algorithm EdDSA`"),
    }
}

/// Makes a key in a directory, which is created with mode 0700 if it is missing. Returns the new file, of mode 0600.
///
/// # Errors
/// If the key or the file cannot be made.
pub fn make(directory: &Path, algorithm: Algorithm, now_unix: u64) -> Result<PathBuf, DirectoryError> {
    let path = directory.join(name(now_unix));
    let text = SigningKey::generate(algorithm)
        .map_err(|source| DirectoryError::Key { path: path.clone(), source })?;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(io_error("create", directory))?;
    // Others see the file only once it is complete. A link does not replace the file of another agent.
    let aside = directory.join(format!(".{}.{}", name(now_unix), std::process::id()));
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::hard_link(&aside, &path)
    }();
    let removed = fs::remove_file(&aside);
    written.and(removed).map_err(io_error("write", &path))?;
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(io_error("write", directory))?;
    Ok(path)
}

/// Returns the name of the file of a key that is made at this time.
fn name(now_unix: u64) -> String {
    let time = i64::try_from(now_unix).ok().and_then(|now| OffsetDateTime::from_unix_timestamp(now).ok());
    let time = time.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (year, month, day) = time.to_calendar_date();
    let (hour, minute, second) = time.to_hms();
    format!("{year:04}{:02}{day:02}T{hour:02}{minute:02}{second:02}Z{ENDING}", u8::from(month))
}

/// Returns the time in a file name, in Unix seconds.
fn birth(name: &str) -> Option<u64> {
    let stem = name.strip_suffix(ENDING)?;
    let (date, time) = stem.strip_suffix('Z')?.split_once('T')?;
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if date.len() != 8 || time.len() != 6 || !is_number(date) || !is_number(time) {
        return None;
    }
    let two = |text: &str, at: usize| text[at..at + 2].parse::<u8>().ok();
    let month = Month::try_from(two(date, 4)?).ok()?;
    let date = Date::from_calendar_date(date[..4].parse().ok()?, month, two(date, 6)?).ok()?;
    let time = Time::from_hms(two(time, 0)?, two(time, 2)?, two(time, 4)?).ok()?;
    u64::try_from(OffsetDateTime::new_utc(date, time).unix_timestamp()).ok()
}

#[cfg(test)]
mod tests;
