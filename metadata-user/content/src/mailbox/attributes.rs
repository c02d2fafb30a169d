//! Guest attributes: namespace and key to octets.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::state::Octets;

/// Most attributes of one VM, in all namespaces.
pub const ATTRIBUTES_PER_VM: usize = 64;
/// Most octets of one attribute.
pub const ATTRIBUTE_OCTETS: usize = 32 << 10;
/// Most octets of all attributes of one VM together, with their names: what a guest has to say of itself is a few
/// host keys and a state or two.
pub const ATTRIBUTES_OCTETS_PER_VM: usize = 256 << 10;
/// Longest namespace and longest key: 1 to 255 of letters, digits, `.`, `_`, `:` and `-`.
pub const NAME_CHARS: usize = 255;

/// Why an attribute is not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributeRefused {
    /// The namespace or key.
    #[error("expected a namespace and a key of 1 to {NAME_CHARS} letters, digits, `.`, `_`, `:` and `-`")]
    Name,
    /// The value.
    #[error("expected at most {ATTRIBUTE_OCTETS} octets, found more")]
    TooLarge,
    /// They are too long together.
    #[error(
        "expected at most {ATTRIBUTES_OCTETS_PER_VM} octets in all attributes, found more; delete one first"
    )]
    TooMuch,
    /// There are as many as are kept.
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

    /// True when this changed something.
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

    /// False when there was none.
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

    pub(super) fn list(&self) -> Vec<(String, Vec<String>)> {
        let named = |(namespace, keys): (&String, &BTreeMap<String, Octets>)| {
            (namespace.clone(), keys.keys().cloned().collect())
        };
        self.namespaces.iter().map(named).collect()
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Octets of all attributes, each with its names.
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
