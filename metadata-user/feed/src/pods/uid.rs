//! Checks names that become parts of paths.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Most octets of a pod's UID: a UUID has 36, the hash of a static pod 32.
const UID_MAX: usize = 64;
/// Most octets of a volume's name (a DNS label has 63, a subdomain 253).
const VOLUME_MAX: usize = 253;

/// A pod's UID, which names kubelet's directories: letters, digits and hyphens, at most 64 octets.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

/// Why a text is not a pod's UID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a pod's UID of 1 to {UID_MAX} letters, digits and hyphens, found `{}`", found.escape_default())]
pub struct NotAPod {
    found: String,
}

impl PodUid {
    /// The uid as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PodUid {
    type Err = NotAPod;

    fn from_str(text: &str) -> Result<Self, NotAPod> {
        let fits = (1..=UID_MAX).contains(&text.len()) && !text.starts_with('-');
        if fits && text.bytes().all(|octet| octet.is_ascii_alphanumeric() || octet == b'-') {
            return Ok(Self(text.into()));
        }
        Err(NotAPod { found: text.chars().take(UID_MAX).collect() })
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// True for a volume name that Kubernetes accepts: lower-case letters, digits, hyphens and dots, without a leading dot.
pub(super) fn is_volume(name: &str) -> bool {
    let allowed =
        |octet: u8| octet.is_ascii_lowercase() || octet.is_ascii_digit() || matches!(octet, b'-' | b'.');
    (1..=VOLUME_MAX).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::{PodUid, UID_MAX, VOLUME_MAX, is_volume};

    #[test]
    fn only_what_kubelet_names_directories_by_is_a_uid() {
        let longest = "a".repeat(UID_MAX);
        for text in
            ["6f1b0c1e-8a55-4c8e-9d53-0a5a3f0e7b11", "0d1c5b0f9f0f4f5f8c9e0a1b2c3d4e5f", "A", &longest]
        {
            assert_eq!(text.parse::<PodUid>().expect(text).as_str(), text);
        }
        let too_long = "a".repeat(UID_MAX + 1);
        for text in ["", ".", "..", "a/b", "../a", "a\0", "-a", "a b", "ä", &too_long] {
            let error = text.parse::<PodUid>().expect_err(text);
            assert!(error.to_string().contains("hyphens"), "{error}");
        }
    }

    #[test]
    fn only_what_kubernetes_takes_is_a_volume() {
        let longest = "v".repeat(VOLUME_MAX);
        for name in ["imds-token", "cloudinit-udata", "v1.2", &longest] {
            assert!(is_volume(name), "{name}");
        }
        for name in ["", ".", "..", "..data", ".a", "a/b", "A", "a_b", "a\0", &"v".repeat(VOLUME_MAX + 1)] {
            assert!(!is_volume(name), "{name}");
        }
    }
}
