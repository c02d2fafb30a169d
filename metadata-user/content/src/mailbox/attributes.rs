//! Guest attributes: octets by namespace and key.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::state::Octets;

/// Maximum number of attributes of one VM, over all namespaces.
pub const ATTRIBUTES_PER_VM: usize = 64;
/// Maximum length of an attribute's value, in octets.
pub const ATTRIBUTE_OCTETS: usize = 32 << 10;
/// Maximum total octets of all attributes of one VM, names included. Guests typically store a few host keys and states.
pub const ATTRIBUTES_OCTETS_PER_VM: usize = 256 << 10;
/// Maximum length of a namespace and of a key in characters: letters, digits, `.`, `_`, `:` and `-`.
pub const NAME_CHARS: usize = 255;

/// Why an attribute is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributeRefused {
    /// The namespace or key is malformed.
    #[error("expected a namespace and a key of 1 to {NAME_CHARS} letters, digits, `.`, `_`, `:` and `-`")]
    Name,
    /// The value exceeds [`ATTRIBUTE_OCTETS`].
    #[error("expected at most {ATTRIBUTE_OCTETS} octets, found more")]
    TooLarge,
    /// All attributes together would exceed [`ATTRIBUTES_OCTETS_PER_VM`].
    #[error(
        "expected at most {ATTRIBUTES_OCTETS_PER_VM} octets in all attributes, found more; delete one first"
    )]
    TooMuch,
    /// The VM already has [`ATTRIBUTES_PER_VM`] attributes.
    #[error("expected at most {ATTRIBUTES_PER_VM} attributes, found one more; delete one first")]
    Full,
}

/// The attributes of one VM.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Attributes {
    namespaces: BTreeMap<String, BTreeMap<String, Octets>>,
    #[serde(skip)]
    version: u64,
}

impl Attributes {
    pub(super) fn get(&self, namespace: &str, key: &str) -> Option<Bytes> {
        self.namespaces.get(namespace)?.get(key).map(|octets| octets.0.clone())
    }

    /// Returns whether the value changed.
    pub(super) fn set(
        &mut self,
        namespace: &str,
        key: &str,
        octets: &[u8],
    ) -> Result<bool, AttributeRefused> {
        if !is_name(namespace) || !is_name(key) {
            return Err(AttributeRefused::Name);
        }
        if octets.len() > ATTRIBUTE_OCTETS {
            return Err(AttributeRefused::TooLarge);
        }
        match self.namespaces.get(namespace).and_then(|keys| keys.get(key)) {
            Some(before) if before.0 == octets => return Ok(false),
            None if self.len() >= ATTRIBUTES_PER_VM => return Err(AttributeRefused::Full),
            _ => {}
        }
        let others = self.octets() - self.octets_of(namespace, key);
        if others + namespace.len() + key.len() + octets.len() > ATTRIBUTES_OCTETS_PER_VM {
            return Err(AttributeRefused::TooMuch);
        }
        let octets = Octets(Bytes::copy_from_slice(octets));
        self.namespaces.entry(namespace.to_owned()).or_default().insert(key.to_owned(), octets);
        self.version += 1;
        Ok(true)
    }

    /// Returns false if there was no such attribute.
    pub(super) fn remove(&mut self, namespace: &str, key: &str) -> bool {
        let Some(keys) = self.namespaces.get_mut(namespace) else { return false };
        if keys.remove(key).is_none() {
            return false;
        }
        if keys.is_empty() {
            self.namespaces.remove(namespace);
        }
        self.version += 1;
        true
    }

    pub(super) fn clear(&mut self) {
        self.namespaces.clear();
        self.version += 1;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
    }

    pub(super) fn list(&self) -> Vec<(String, Vec<String>)> {
        let named = |(namespace, keys): (&String, &BTreeMap<String, Octets>)| {
            (namespace.clone(), keys.keys().cloned().collect())
        };
        self.namespaces.iter().map(named).collect()
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the octets of all attributes, names included.
    fn octets(&self) -> usize {
        let each = self.namespaces.iter().flat_map(|(namespace, keys)| {
            keys.iter().map(|(key, octets)| namespace.len() + key.len() + octets.0.len())
        });
        each.sum()
    }

    fn octets_of(&self, namespace: &str, key: &str) -> usize {
        self.get(namespace, key).map_or(0, |octets| namespace.len() + key.len() + octets.len())
    }

    fn len(&self) -> usize {
        self.namespaces.values().map(BTreeMap::len).sum()
    }
}

fn is_name(text: &str) -> bool {
    (1..=NAME_CHARS).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
}
