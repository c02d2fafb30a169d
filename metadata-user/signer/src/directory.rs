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
    #[error("expected {} to be private, found mode {mode:o}; run: chmod 600 {}", path.display(), path.display())]
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

#[derive(Debug)]
struct KeyAndFile {
    birth_unix: u64,
    name: String,
    key: SigningKey,
}

/// A file as it was read. A change of its mode or owner alone changes `changed`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NamedFileIdentity {
    name: String,
    /// Seconds and nanoseconds of its content's last change.
    modified: (i64, i64),
    /// Seconds and nanoseconds of its last change of any kind.
    changed: (i64, i64),
    size: u64,
    inode: u64,
    mode: u32,
}

/// The keys of a directory.
#[derive(Debug)]
pub struct KeyDirectory {
    path: PathBuf,
    algorithm: Algorithm,
    rotation: Rotation,
    seen: Vec<NamedFileIdentity>,
    /// Why files were skipped.
    skipped: Vec<String>,
    /// The system refused to read a file, which may pass without a change of the file.
    is_incomplete: bool,
    /// The oldest first.
    keys: Vec<KeyAndFile>,
}

impl KeyDirectory {
    /// Names a directory; [`look`](Self::look) reads it.
    #[must_use]
    pub fn new(path: PathBuf, algorithm: Algorithm, rotation: Rotation) -> Self {
        let (seen, skipped, keys) = (Vec::new(), Vec::new(), Vec::new());
        Self { path, algorithm, rotation, seen, skipped, is_incomplete: false, keys }
    }

    /// Reads the directory again if a file has changed or could not be read. Returns the reasons why files are skipped,
    /// empty if nothing has changed.
    ///
    /// # Errors
    /// If the directory cannot be read or has too many keys. The keys then stay unchanged.
    pub fn look(&mut self) -> Result<Vec<DirectoryError>, DirectoryError> {
        let seen = self.list()?;
        if seen == self.seen && !self.is_incomplete {
            return Ok(Vec::new());
        }
        let (mut keys, mut skipped) = (Vec::new(), Vec::new());
        for NamedFileIdentity { name, modified: (seconds, _), .. } in &seen {
            let birth_unix = birth(name).unwrap_or_else(|| u64::try_from(*seconds).unwrap_or(0));
            match self.read(name) {
                Ok(key) => keys.push(KeyAndFile { birth_unix, name: name.clone(), key }),
                Err(error) => skipped.push(error),
            }
        }
        keys.sort_by(|a, b| (a.birth_unix, &a.name).cmp(&(b.birth_unix, &b.name)));
        self.is_incomplete = skipped.iter().any(|error| matches!(error, DirectoryError::Io { .. }));
        let reasons: Vec<String> = skipped.iter().map(ToString::to_string).collect();
        let is_new = seen != self.seen || reasons != self.skipped;
        (self.keys, self.seen, self.skipped) = (keys, seen, reasons);
        Ok(if is_new { skipped } else { Vec::new() })
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
            seen.push(NamedFileIdentity {
                name,
                modified: (status.mtime(), status.mtime_nsec()),
                changed: (status.ctime(), status.ctime_nsec()),
                size: status.size(),
                inode: status.ino(),
                mode: status.mode(),
            });
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
            "make one with `(umask 077; mkdir -p {directory}; openssl genpkey -algorithm RSA \
             -pkeyopt rsa_keygen_bits:3072 -out {directory}/$(date -u +%Y%m%dT%H%M%SZ).pem)`, \
             or set `identity.algorithm: ES256`"
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
mod tests {
    use super::{
        Algorithm, DirectoryError, KEYS, KeyDirectory, Rotation, SigningKey, birth, how_to_make, make, name,
    };
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    const DAY: u64 = 86_400;
    /// 2026-11-23 10:00:00 UTC.
    const NOW: u64 = 1_795_428_000;

    fn opened(path: &Path, after: Option<u64>) -> KeyDirectory {
        let rotation = Rotation { publish_for: DAY, after };
        KeyDirectory::new(path.to_owned(), Algorithm::Es256, rotation)
    }

    fn put(path: &Path, file: &str) -> String {
        let text = SigningKey::generate(Algorithm::Es256).expect("made");
        fs::write(path.join(file), &text).expect("written");
        fs::set_permissions(path.join(file), Permissions::from_mode(0o600)).expect("private");
        SigningKey::parse(Algorithm::Es256, &text).expect("a key").kid().to_owned()
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(path)
            .expect("read")
            .map(|entry| entry.expect("read").file_name().into_string().expect("text"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_time_in_a_name_is_read_back() {
        assert_eq!(name(NOW), "20261123T100000Z.pem");
        for (file, expected) in [
            ("20261123T100000Z.pem", Some(NOW)),
            ("19700101T000000Z.pem", Some(0)),
            ("20261323T100000Z.pem", None),
            ("20261123T250000Z.pem", None),
            ("+0261123T100000Z.pem", None),
            ("20261123T100000.pem", None),
            ("key.pem", None),
            ("20261123T100000Z.key", None),
        ] {
            assert_eq!(birth(file), expected, "{file}");
        }
    }

    #[test]
    fn the_newest_key_that_was_published_for_long_enough_signs() {
        let cases: [(&[u64], Option<usize>); 5] = [
            (&[], None),
            (&[NOW], Some(0)),
            (&[NOW - DAY + 1, NOW], Some(0)),
            (&[NOW - 9 * DAY, NOW - DAY, NOW - DAY + 1], Some(1)),
            (&[NOW - DAY, NOW + 400 * DAY], Some(0)),
        ];
        for (births, expected) in cases {
            let room = tempfile::tempdir().expect("a directory");
            let kids: Vec<_> = births.iter().map(|birth| put(room.path(), &name(*birth))).collect();
            let mut keys = opened(room.path(), None);
            assert!(keys.look().expect("read").is_empty());
            let found: Vec<_> = keys.keys().map(SigningKey::kid).collect();
            assert_eq!(found, kids, "every key is published");
            assert_eq!(
                keys.signing(NOW).map(SigningKey::kid),
                expected.map(|at| kids[at].as_str()),
                "{births:?}"
            );
            assert_eq!(keys.require_key().is_ok(), !births.is_empty());
        }
    }

    #[test]
    fn unusable_files_are_skipped_with_their_reason() {
        let room = tempfile::tempdir().expect("a directory");
        let kid = put(room.path(), "good.pem");
        put(room.path(), "open.pem");
        fs::set_permissions(room.path().join("open.pem"), Permissions::from_mode(0o640)).expect("a mode");
        put(room.path(), ".hidden.pem");
        put(room.path(), "other.key");
        put(room.path(), "text.pem");
        fs::write(room.path().join("text.pem"), "no key").expect("written");
        fs::create_dir(room.path().join("dir.pem")).expect("made");
        let mut keys = opened(room.path(), None);
        let skipped: Vec<_> = keys.look().expect("read").iter().map(ToString::to_string).collect();
        assert_eq!(keys.keys().map(SigningKey::kid).collect::<Vec<_>>(), [kid]);
        assert_eq!(skipped.len(), 3, "{skipped:?}");
        for (reason, text) in skipped.iter().zip(["dir.pem", "mode 640", "text.pem"]) {
            assert!(reason.contains(text), "{reason}");
        }
        assert!(keys.look().expect("read").is_empty(), "a reason is given once");
        fs::remove_file(room.path().join("good.pem")).expect("removed");
        keys.look().expect("read");
        assert!(matches!(keys.require_key(), Err(DirectoryError::Empty { .. })));
    }

    #[test]
    fn a_key_is_used_once_its_mode_is_private() {
        let room = tempfile::tempdir().expect("a directory");
        let kid = put(room.path(), "key.pem");
        let path = room.path().join("key.pem");
        let mut keys = opened(room.path(), None);
        for (mode, expected) in [(0o640, None), (0o600, Some(&kid)), (0o604, None), (0o400, Some(&kid))] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a mode");
            let skipped = keys.look().expect("read");
            assert_eq!(skipped.is_empty(), expected.is_some(), "{mode:o}: {skipped:?}");
            assert_eq!(keys.signing(NOW).map(SigningKey::kid), expected.map(String::as_str), "{mode:o}");
        }
    }

    #[test]
    fn a_file_that_the_system_refuses_is_tried_again_and_named_once() {
        let room = tempfile::tempdir().expect("a directory");
        let kid = put(room.path(), "key.pem");
        // Sockets cannot be opened.
        let _socket = std::os::unix::net::UnixListener::bind(room.path().join("socket.pem")).expect("bound");
        let mut keys = opened(room.path(), None);
        let skipped = keys.look().expect("read");
        assert!(matches!(&*skipped, [DirectoryError::Io { action: "open", .. }]), "{skipped:?}");
        assert!(keys.is_incomplete);
        assert!(keys.look().expect("read").is_empty(), "a reason is given once");
        assert_eq!(keys.signing(NOW).map(SigningKey::kid), Some(kid.as_str()));
    }

    #[test]
    fn an_error_about_a_missing_key_says_how_to_make_one_for_the_algorithm() {
        let room = tempfile::tempdir().expect("a directory");
        put(room.path(), "es256.pem");
        for (algorithm, has_key, parts) in [
            (Algorithm::Es256, true, &[][..]),
            (
                Algorithm::Rs256,
                false,
                &["a key for RS256 in ", "mkdir -p /", "openssl genpkey -algorithm RSA", "algorithm: ES256"],
            ),
            (
                Algorithm::EdDsa,
                false,
                &["a key for EdDSA in ", "xdp-imds identity key /", "--algorithm EdDSA"],
            ),
        ] {
            let rotation = Rotation { publish_for: DAY, after: None };
            let mut keys = KeyDirectory::new(room.path().to_owned(), algorithm, rotation);
            keys.look().expect("read");
            let found = keys.require_key();
            assert_eq!(found.is_ok(), has_key, "{algorithm}");
            let said = found.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(parts.iter().all(|part| said.contains(part)), "{algorithm}: {said}");
        }
        let makes_es256 = how_to_make(Algorithm::Es256, room.path());
        assert!(
            makes_es256.contains("xdp-imds identity key /") && !makes_es256.contains("openssl"),
            "{makes_es256}"
        );
    }

    #[test]
    fn too_many_keys_change_nothing() {
        let room = tempfile::tempdir().expect("a directory");
        let kid = put(room.path(), "a.pem");
        let mut keys = opened(room.path(), None);
        keys.look().expect("read");
        (0..KEYS).for_each(|n| drop(put(room.path(), &format!("b{n}.pem"))));
        assert!(matches!(keys.look(), Err(DirectoryError::TooMany { found, .. }) if found == KEYS + 1));
        assert_eq!(keys.signing(NOW).map(SigningKey::kid), Some(kid.as_str()));
    }

    #[test]
    fn rotation_publishes_before_it_signs_and_deletes_when_the_second_successor_signs() {
        let room = tempfile::tempdir().expect("a directory");
        put(room.path(), "operator.pem");
        fs::File::open(room.path().join("operator.pem"))
            .and_then(|file| file.set_modified(std::time::UNIX_EPOCH))
            .expect("an old key");
        let mut keys = opened(room.path(), Some(30 * DAY));
        let step = |keys: &mut KeyDirectory, now| {
            keys.look().expect("read");
            let changed = keys.rotate(now).expect("rotated");
            keys.look().expect("read");
            (changed, keys.signing(now).map(|key| key.kid().to_owned()))
        };
        let (changed, first) = step(&mut keys, NOW);
        assert!(changed && keys.keys().len() == 2);
        assert_eq!(step(&mut keys, NOW + DAY - 1), (false, first.clone()), "the new key is only published");
        let (changed, second) = step(&mut keys, NOW + DAY);
        assert!(!changed && second != first, "the new key signs");
        step(&mut keys, NOW + 30 * DAY);
        step(&mut keys, NOW + 31 * DAY);
        step(&mut keys, NOW + 60 * DAY);
        let (_, third) = step(&mut keys, NOW + 61 * DAY);
        let made = |days: u64| name(NOW + days * DAY);
        assert_eq!(
            names(room.path()),
            [made(30), made(60), "operator.pem".into()],
            "the operator's file stays"
        );
        // A clock that was a year ahead leaves every key that may have signed.
        step(&mut keys, NOW + 426 * DAY);
        assert_eq!(keys.signing(NOW + 61 * DAY).map(SigningKey::kid), third.as_deref());
    }

    #[test]
    fn a_key_is_made_private_and_never_replaced() {
        let room = tempfile::tempdir().expect("a directory");
        let below = room.path().join("keys");
        let path = make(&below, Algorithm::EdDsa, NOW).expect("made");
        assert_eq!(path, below.join("20261123T100000Z.pem"));
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&below)), (0o600, 0o700));
        let before = fs::read(&path).expect("read");
        assert!(make(&below, Algorithm::EdDsa, NOW).is_err());
        assert_eq!((fs::read(&path).expect("read"), names(&below).len()), (before, 1));
    }
}
