//! The state that outlives the agent, and its text form.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Document;
use super::attributes::Attributes;

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
    /// Digest of the record's password that the guest saved.
    pub(super) taken_password: Option<Octets>,
    pub(super) posted_password: Option<Octets>,
    pub(super) attributes: Attributes,
    pub(super) documents: BTreeMap<Document, Octets>,
}

/// Version of the file format: 1.
#[derive(Clone, Default)]
pub(super) struct Version;

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(1)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u8::deserialize(deserializer)? {
            1 => Ok(Self),
            _ => Err(de::Error::custom("expected version 1")),
        }
    }
}
