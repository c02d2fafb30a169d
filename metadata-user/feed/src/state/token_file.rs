//! The file of the keys that sign session tokens.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metadata_common::run::unit_hint;
use metadata_content::token::{Keyring, KeysInUse, TokenKeys};

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

/// What the log, the status and `doctor` say of a file of keys that operators maintain and that does not exist. If its
/// keys are in use, that is a problem, because the next start would be without them. Until it exists, each node has a
/// key of its own, which ends only the tokens of VMs that migrate: that is a warning.
#[must_use]
pub fn missing(path: &Path, is_used: bool) -> String {
    let path = path.display();
    if is_used {
        format!("{path}, the file of `token_key`, is missing: restore it before this agent is restarted")
    } else {
        format!(
            "{path}, the file of `token_key`, does not exist: the agent uses a key of this node, so a session token \
             ends when its VM migrates"
        )
    }
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
    rotate_in_turn(keyring, &keyring.in_use(), path, age, now_unix)
}

/// Like [`rotate_if_older`], for a call that comes late: does nothing if the keyring has other keys than `in_use` by now,
/// such as those of a file that an operator maintains.
///
/// # Errors
/// The errors of [`open`].
pub fn rotate_in_use(
    keyring: &Keyring,
    in_use: &KeysInUse,
    path: &Path,
    age: Duration,
    now_unix: u64,
) -> Result<bool, TokenKeyError> {
    let _turn = take_turn(path)?;
    if keyring.still_uses(in_use) { rotate_in_turn(keyring, in_use, path, age, now_unix) } else { Ok(false) }
}

fn rotate_in_turn(
    keyring: &Keyring,
    in_use: &KeysInUse,
    path: &Path,
    age: Duration,
    now_unix: u64,
) -> Result<bool, TokenKeyError> {
    let found = match read(path, KeyFile::Own) {
        Err(TokenKeyError::Malformed { .. }) => {
            set_aside(path)?;
            let keys = in_use.keys();
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
    keyring.replace(in_use, keys);
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
    let malformed = || TokenKeyError::Malformed { path: path.to_owned(), of };
    // The remedy of an open file would close a directory to those who need it.
    if !status.is_file() {
        return Err(malformed());
    }
    let mode = status.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(TokenKeyError::Exposed { path: path.to_owned(), mode, of });
    }
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

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;
    use std::time::Duration;

    use metadata_content::token::{Keyring, SHORTEST_ROTATION, TokenKind};

    use super::{
        TokenKeyError, TokenKeys, follow, generate, given, private_file, rotate_if_older, rotate_in_use,
    };

    const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const KINDS: [TokenKind; 3] = [TokenKind::Aws, TokenKind::AliYun, TokenKind::Akamai];
    const NOW: u64 = 1_790_000_000;
    const MONTH: Duration = Duration::from_secs(30 * 86_400);

    fn room() -> (tempfile::TempDir, PathBuf) {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token-keys");
        (room, path)
    }

    fn open(path: &std::path::Path) -> Keyring {
        super::open(path, NOW).expect("keys")
    }

    #[test]
    fn tokens_survive_a_restart() {
        let (_room, path) = room();
        let token = open(&path).mint(TokenKind::Aws, VM, 60, NOW);
        assert!(open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW));
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn formats_of_every_release_are_read() {
        let (_room, path) = room();
        let text = r#"{"form":"xdp-imds token keys 1","since_unix":1789999000,"current":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=","previous":"ICECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}"#;
        let keys = TokenKeys::parse(text.as_bytes()).expect("keys");
        golden::check("token.key", TokenKeys::VERSION, keys.text().as_bytes());
        let token = Keyring::with(keys).mint(TokenKind::Aws, VM, 60, NOW);
        for sample in golden::all("token.key") {
            private_file::replace(&path, &sample.bytes).expect("written");
            assert!(open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "{}", sample.release);
        }
    }

    #[test]
    fn keys_of_a_later_version_are_refused_with_a_remedy_and_stay() {
        let (_room, path) = room();
        let text = br#"{"form":"xdp-imds token keys 2","keys":[{"bytes":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}]}"#;
        private_file::replace(&path, text).expect("written");
        let errors = [
            super::open(&path, NOW).err(),
            super::check_own(&path).err(),
            rotate_if_older(&Keyring::ephemeral(), &path, MONTH, NOW).err(),
        ];
        for error in errors {
            let error = error.expect("a refusal").to_string();
            for part in ["version 1 at", "found version 2", "start a release that reads it", "remove it"] {
                assert!(error.contains(part) && !error.contains("AAEC"), "no `{part}` in: {error}");
            }
        }
        assert_eq!(fs::read(&path).expect("it is there"), text);
    }

    #[test]
    fn a_file_that_an_earlier_agent_wrote_is_read() {
        let (_room, path) = room();
        let text = r#"{"form":"xdp-imds token keys 1","since_unix":1789999000,"current":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=","previous":null}"#;
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("a mode");
        let token = b"AQEAAAAAarE7vAAAAAAAAAAAOLqMUFJbwcaBYIQywBlo5ubXQ+f+9QUU";
        assert!(open(&path).verify(TokenKind::Aws, VM, token, NOW));
        assert_eq!(fs::read_to_string(&path).expect("read"), text, "the file has changed");
    }

    #[test]
    fn a_former_key_is_accepted_for_the_longest_token_life_across_restarts() {
        let (_room, path) = room();
        let keyring = open(&path);
        let later = NOW + MONTH.as_secs();
        let end_of_month = |kind| (kind, keyring.mint(kind, VM, 86_400, later));
        let tokens = KINDS.map(end_of_month);
        assert!(!rotate_if_older(&keyring, &path, MONTH, later - 1).expect("not yet due"));
        assert!(rotate_if_older(&keyring, &path, MONTH, later).expect("due"));
        let reopened = open(&path);
        for (kind, token) in &tokens {
            let end = later + u64::from(kind.longest_ttl_seconds());
            for ring in [&keyring, &reopened] {
                assert!(ring.verify(*kind, VM, token.as_bytes(), end - 1), "{kind:?}");
                assert!(!ring.verify(*kind, VM, token.as_bytes(), end), "{kind:?}");
                let fresh = ring.mint(*kind, VM, 60, later);
                assert!(keyring.verify(*kind, VM, fresh.as_bytes(), later), "{kind:?}");
            }
        }
    }

    #[test]
    fn a_former_key_is_refused_after_the_overlap() {
        let (_room, path) = room();
        let keyring = open(&path);
        let rotated = NOW + MONTH.as_secs();
        let end = rotated + u64::from(TokenKind::Aws.longest_ttl_seconds());
        // An attacker with the former key signs a token that is valid long after the key's end.
        let stolen = keyring.mint(TokenKind::Aws, VM, 21_600, end);
        assert!(rotate_if_older(&keyring, &path, MONTH, rotated).expect("due"));
        assert!(keyring.verify(TokenKind::Aws, VM, stolen.as_bytes(), end - 1));
        assert!(!keyring.verify(TokenKind::Aws, VM, stolen.as_bytes(), end));
    }

    #[test]
    fn a_second_rotation_waits_until_no_token_of_the_first_key_can_live() {
        let (_room, path) = room();
        let keyring = open(&path);
        let day = SHORTEST_ROTATION.as_secs();
        assert!(!rotate_if_older(&keyring, &path, Duration::ZERO, NOW + day - 1).expect("not yet due"));
        assert!(rotate_if_older(&keyring, &path, Duration::ZERO, NOW + day).expect("due"));
    }

    #[test]
    fn an_agent_takes_over_the_key_another_one_began() {
        let (_room, path) = room();
        let (one, other) = (open(&path), open(&path));
        let later = NOW + MONTH.as_secs();
        assert!(rotate_if_older(&one, &path, MONTH, later).expect("due"));
        assert!(!rotate_if_older(&other, &path, MONTH, later).expect("done by the other"));
        let token = one.mint(TokenKind::Aws, VM, 60, later);
        assert!(other.verify(TokenKind::Aws, VM, token.as_bytes(), later));
    }

    #[test]
    fn a_late_rotation_does_not_replace_keys_that_were_set_meanwhile() {
        let due = NOW + MONTH.as_secs();
        for text in [None, Some("damaged")] {
            let (_room, path) = room();
            let keyring = open(&path);
            let own = keyring.in_use();
            if let Some(text) = text {
                fs::write(&path, text).expect("written");
            }
            let before = fs::read(&path).expect("a file");
            keyring.set(TokenKeys::new(NOW));
            let token = keyring.mint(TokenKind::Aws, VM, 60, due);
            assert!(!rotate_in_use(&keyring, &own, &path, MONTH, due).expect("nothing to do"), "{text:?}");
            assert!(keyring.verify(TokenKind::Aws, VM, token.as_bytes(), due), "{text:?}");
            assert!(!keyring.replace(&own, TokenKeys::new(NOW)), "{text:?}");
            assert!(keyring.verify(TokenKind::Aws, VM, token.as_bytes(), due), "{text:?}");
            assert_eq!(fs::read(&path).expect("a file"), before, "{text:?}");
            let current = keyring.in_use();
            assert!(rotate_in_use(&keyring, &current, &path, MONTH, due).is_ok(), "{text:?}");
        }
    }

    #[test]
    fn a_removed_key_file_ends_all_tokens() {
        let (_room, path) = room();
        let keyring = open(&path);
        let token = keyring.mint(TokenKind::Aws, VM, 60, NOW);
        fs::remove_file(&path).expect("removed");
        assert!(rotate_if_older(&keyring, &path, MONTH, NOW).expect("made again"));
        assert!(!keyring.verify(TokenKind::Aws, VM, token.as_bytes(), NOW));
    }

    #[test]
    fn a_key_file_open_to_others_is_refused_with_the_remedy() {
        let (_room, path) = room();
        drop(open(&path));
        for mode in [0o640, 0o604, 0o620, 0o666] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("changed");
            let error = super::open(&path, NOW).expect_err("open to others");
            assert!(matches!(error, TokenKeyError::Exposed { mode: found, .. } if found == mode), "{error}");
            assert!(error.to_string().contains("chmod 0600"), "{error}");
        }
    }

    #[test]
    fn no_remedy_of_a_file_that_somebody_keeps_is_to_remove_it() {
        let (_room, path) = room();
        let later = r#"{"form":"xdp-imds token keys 2","keys":[]}"#;
        for (text, mode) in [("{}", 0o640), ("hunter2", 0o600), (later, 0o600)] {
            private_file::replace(&path, text.as_bytes()).expect("written");
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("changed");
            for error in [given(&path).err(), generate(Some(&path), NOW).err()] {
                let error = error.expect("a refusal").to_string();
                assert!(!error.contains("remove") && error.contains("; "), "{error}");
            }
        }
    }

    #[test]
    fn a_directory_is_no_key_file_and_keeps_its_mode() {
        let (room, _) = room();
        fs::set_permissions(room.path(), Permissions::from_mode(0o755)).expect("changed");
        for error in [given(room.path()).err(), generate(Some(room.path()), NOW).err()] {
            let error = error.expect("a refusal").to_string();
            assert!(error.contains("found something else") && !error.contains("chmod"), "{error}");
        }
    }

    #[test]
    fn a_pipe_without_a_writer_is_no_key_file_and_holds_nobody() {
        let (_room, path) = room();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
        for error in [given(&path).err(), generate(Some(&path), NOW).err()] {
            let error = error.expect("a refusal").to_string();
            assert!(error.contains("found something else"), "{error}");
        }
    }

    /// Texts that are no key file, each made of a good one.
    fn damaged(good: &str) -> [(&'static str, String); 7] {
        [
            ("empty", String::new()),
            ("cut", good[..good.len() - 2].to_owned()),
            ("another form", good.replace("token keys 1", "session keys 1")),
            ("no version", good.replace("token keys 1", "token keys one")),
            ("a short key", good.replacen("\"current\":\"", "\"current\":\"AAAA", 1)),
            ("an unknown field", good.replacen('{', "{\"more\":1,", 1)),
            ("endless", " ".repeat(10_000) + good),
        ]
    }

    /// The files that were set aside, the last one first.
    fn set_aside(path: &std::path::Path) -> Vec<String> {
        let texts = (1..).map_while(|n| fs::read_to_string(super::numbered(path, n)).ok());
        texts.collect()
    }

    #[test]
    fn a_damaged_key_file_is_set_aside_and_a_new_key_made() {
        let (room, path) = room();
        drop(open(&path));
        let good = fs::read_to_string(&path).expect("read");
        let mut last = Vec::new();
        for (case, text) in damaged(&good) {
            fs::write(&path, &text).expect("written");
            let token = open(&path).mint(TokenKind::Aws, VM, 60, NOW);
            assert!(
                open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW),
                "{case}: the new key is not on disk"
            );
            last.insert(0, text);
            last.truncate(super::ASIDE_MOST);
            assert_eq!(set_aside(&path), last, "{case}");
            for file in fs::read_dir(room.path()).expect("listed") {
                let mode = file.expect("a file").metadata().expect("there").permissions().mode() & 0o7777;
                assert_eq!(mode, 0o600, "{case}");
            }
        }
    }

    #[test]
    fn a_key_file_damaged_while_an_agent_runs_is_restored_and_tokens_stay_valid() {
        let (_room, path) = room();
        let keyring = open(&path);
        let token = keyring.mint(TokenKind::Aws, VM, 3_600, NOW);
        let good = fs::read_to_string(&path).expect("read");
        for (case, text) in damaged(&good) {
            fs::write(&path, &text).expect("written");
            assert!(!rotate_if_older(&keyring, &path, MONTH, NOW).expect("restored"), "{case}");
            assert_eq!(fs::read_to_string(&path).expect("read"), good, "{case}");
            assert!(open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "{case}");
            assert_eq!(set_aside(&path)[0], text, "{case}");
        }
    }

    #[test]
    fn a_damaged_file_that_the_operator_maintains_is_refused_and_left_alone() {
        let (_room, path) = room();
        drop(open(&path));
        let good = fs::read_to_string(&path).expect("read");
        for (case, text) in damaged(&good) {
            fs::write(&path, &text).expect("written");
            for error in [given(&path).err(), follow(&Keyring::ephemeral(), &path).err()] {
                let error = error.expect(case);
                assert!(matches!(error, TokenKeyError::Malformed { .. }), "{case}: {error}");
            }
            assert_eq!(fs::read_to_string(&path).expect("read"), text, "{case}");
        }
    }

    #[test]
    fn agents_with_a_shared_key_file_accept_each_others_tokens_and_its_next_key() {
        let (_room, path) = room();
        assert!(given(&path).expect("no file is no error").is_none());
        let give = |text: &str| {
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("a mode");
        };
        give(&generate(None, NOW).expect("a key"));
        let [here, there] = [0, 1].map(|_| given(&path).expect("a key file").expect("keys"));
        let token = here.mint(TokenKind::Aws, VM, 3_600, NOW);
        assert!(there.verify(TokenKind::Aws, VM, token.as_bytes(), NOW));
        let next = generate(Some(&path), NOW).expect("a key after the other");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("a mode");
        give(&next);
        assert!(follow(&there, &path).expect("the next key"));
        assert!(there.verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "a token of the former key");
        let newer = there.mint(TokenKind::Aws, VM, 3_600, NOW);
        assert!(!here.verify(TokenKind::Aws, VM, newer.as_bytes(), NOW), "the key is another");
        fs::remove_file(&path).expect("removed");
        assert!(!follow(&there, &path).expect("it stays unchanged"));
        assert!(there.verify(TokenKind::Aws, VM, newer.as_bytes(), NOW));
    }
}
