//! The public keys in the Secret of an access credential.
//!
//! The author of a VMI also writes its Secrets. A Secret of short lines would become hundreds of thousands of keys, each
//! with its own allocation, so parsing stops at the first key beyond a limit.

use super::Files;

/// Most public keys of one Secret.
pub const KEYS_PER_SECRET: usize = 256;
/// Most bytes of one public key. OpenSSH's longest, an RSA key of 16,384 bits, has 2.8 KiB; a certificate has more.
pub const KEY_BYTES: usize = 16 << 10;
/// Most public keys of one VM.
pub const KEYS_PER_VM: usize = 1_024;
/// Most bytes of all public keys of one VM.
pub const KEY_BYTES_PER_VM: usize = 512 << 10;

/// Why public keys are refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum KeyError {
    /// A Secret has too many keys.
    #[error("expected at most {KEYS_PER_SECRET} public keys, one a line, found more")]
    TooMany,
    /// A key is too long.
    #[error("expected public keys of at most {KEY_BYTES} bytes, found a longer line")]
    TooLong,
    /// All Secrets of the VM together have too many keys.
    #[error("expected at most {KEYS_PER_VM} public keys of one VM, found more")]
    TooManyOfVm,
    /// All keys of the VM together are too long.
    #[error("expected at most {KEY_BYTES_PER_VM} bytes of public keys of one VM, found more")]
    TooLongOfVm,
}

/// The public keys of one Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublicKeys {
    /// The keys, in the order of files and lines; none if a limit is exceeded.
    pub(super) keys: Vec<String>,
    /// The files that are no text.
    pub(super) other_files: Vec<String>,
    /// The limit that is exceeded.
    pub(super) error: Option<KeyError>,
}

impl PublicKeys {
    /// Parses the files of a Secret, one key a line. Empty lines, comments and kubelet's own files are skipped.
    #[must_use]
    pub fn parse(files: &Files) -> Self {
        let mut found = Self::default();
        for (file, bytes) in files.iter().filter(|(file, _)| !file.starts_with("..")) {
            let Ok(text) = std::str::from_utf8(bytes) else {
                found.other_files.push(file.clone());
                continue;
            };
            if let Err(error) = found.add(text) {
                return Self { keys: Vec::new(), error: Some(error), ..found };
            }
        }
        found
    }

    fn add(&mut self, text: &str) -> Result<(), KeyError> {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if self.keys.len() == KEYS_PER_SECRET {
                return Err(KeyError::TooMany);
            }
            if line.len() > KEY_BYTES {
                return Err(KeyError::TooLong);
            }
            self.keys.push(line.to_owned());
        }
        Ok(())
    }

    /// Bytes of all keys, with what each takes beside its text.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.keys.iter().chain(&self.other_files).map(|text| text.len() + size_of::<String>()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::{Files, KEY_BYTES, KEYS_PER_SECRET, KeyError, PublicKeys};

    fn parse(text: &str) -> PublicKeys {
        PublicKeys::parse(&Files::from([("keys".to_owned(), text.to_owned().into())]))
    }

    #[test]
    fn parsing_stops_at_the_first_key_beyond_a_limit() {
        let most = "k\n".repeat(KEYS_PER_SECRET);
        assert_eq!(parse(&most).keys.len(), KEYS_PER_SECRET);
        for (text, error) in [
            (format!("{most}one more"), KeyError::TooMany),
            ("k\n".repeat(1 << 19), KeyError::TooMany),
            (format!("short\n{}", "k".repeat(KEY_BYTES + 1)), KeyError::TooLong),
        ] {
            let found = parse(&text);
            assert_eq!((found.error, found.keys.len(), found.keys.capacity()), (Some(error), 0, 0));
        }
    }

    #[test]
    fn comments_and_empty_lines_are_no_keys() {
        assert_eq!(parse("# all\n\n  ssh-ed25519 A  \n\r\n").keys, ["ssh-ed25519 A"]);
        let files = Files::from([
            ("..data".to_owned(), "no".into()),
            ("a".to_owned(), bytes::Bytes::from_static(&[0xff])),
            ("b".to_owned(), "key".into()),
        ]);
        let found = PublicKeys::parse(&files);
        assert_eq!((found.keys, found.other_files), (vec!["key".to_owned()], vec!["a".to_owned()]));
    }
}
