//! The state that outlives the agent, and its text form.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Document;
use super::attributes::Attributes;
use crate::record::values::is_uuid;

/// Octets whose text form is base64.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Octets(pub(super) Bytes);

impl Serialize for Octets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Octets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let octets = STANDARD.decode(text).map_err(|_| de::Error::custom("expected base64"))?;
        Ok(Self(octets.into()))
    }
}

/// State that one guest wrote or confirmed. It has no `Debug`, because it contains passwords.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    pub(super) version: Version,
    /// The owner, unless that is a UUID: the file's name has a hash of it then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<Box<str>>,
    /// With what the digest of the record's password is salted, if not with the owner: an earlier release used the UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) salt: Option<Box<str>>,
    /// Instance-id of the guest that wrote this; `None` until its record is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance: Option<Box<str>>,
    /// Digest of the record's password that the guest saved.
    pub(super) taken_password: Option<Octets>,
    pub(super) posted_password: Option<Octets>,
    pub(super) attributes: Attributes,
    pub(super) documents: BTreeMap<Document, Octets>,
}

impl State {
    /// Returns the owner that the file names; `None` if the file's name is the owner.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    pub(super) fn set_owner(&mut self, owner: &str) {
        self.owner = (!is_uuid(owner)).then(|| owner.into());
    }

    /// Removes everything that a guest wrote. Returns false if there was nothing.
    pub(super) fn clear(&mut self) -> bool {
        let Self { version: _, owner: _, salt: _, instance: _, taken_password, posted_password, .. } = &*self;
        let was_empty = taken_password.is_none()
            && posted_password.is_none()
            && self.attributes.is_empty()
            && self.documents.is_empty();
        if was_empty {
            return false;
        }
        (self.taken_password, self.posted_password) = (None, None);
        self.attributes.clear();
        self.documents.clear();
        true
    }

    /// Sets the instance-id of the guest. What a guest of another instance-id wrote is removed; returns true if there was
    /// something. A state without an instance-id keeps what it has.
    pub(super) fn set_instance(&mut self, instance: &str) -> bool {
        let last = self.instance.replace(instance.into());
        last.is_some_and(|last| *last != *instance) && self.clear()
    }

    /// Returns the state for another owner than the UUID by which an earlier release kept it. A password that the guest
    /// has confirmed stays confirmed.
    #[must_use]
    pub fn taken_over(mut self, uuid: &str, owner: &str) -> Self {
        self.salt.get_or_insert_with(|| uuid.into());
        self.set_owner(owner);
        self
    }

    /// The version of the file format.
    pub const VERSION: u32 = 1;

    /// The version of a file that begins with these octets, [`State::PREFIX`] at most; `None` if they are not a mailbox's.
    #[must_use]
    pub fn version_of(octets: &[u8]) -> Option<u32> {
        let digits = octets.strip_prefix(br#"{"version":"#)?;
        let end = digits.iter().position(|octet| !octet.is_ascii_digit())?;
        std::str::from_utf8(&digits[..end]).ok()?.parse().ok()
    }

    /// Octets from which [`State::version_of`] reads the version.
    pub const PREFIX: usize = 32;
}

/// Version of the file format, [`State::VERSION`].
#[derive(Clone, Default)]
pub(super) struct Version;

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(State::VERSION)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            State::VERSION => Ok(Self),
            _ => Err(de::Error::custom("expected another version")),
        }
    }
}
