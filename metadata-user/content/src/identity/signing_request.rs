//! What a guest may ask for, and what the signer gets.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::record::identity::Audience;

/// Claims in the words of a cloud. They come from the record, and replace the claim `vm` of our own tokens.
///
/// [`VmIssuer`](super::VmIssuer) adds `aud` and `sub`: a VM has one subject in every form, so that a verifier's rule on
/// it holds for each.
#[derive(Debug, PartialEq)]
pub struct CloudClaims {
    /// Name of the form. Two forms of one VM have different names.
    pub name: &'static str,
    /// The claims.
    pub claims: Map<String, Value>,
}

/// A guest's own part of a statement, which makes an old statement useless to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nonce(Box<str>);

impl Nonce {
    /// Maximum length, in bytes. Azure documents ten digits.
    pub const BYTES: usize = 32;

    /// Parses a nonce: letters, digits, `-` and `_`. `None` if the text has another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let fits = (1..=Self::BYTES).contains(&text.len());
        (fits && text.bytes().all(is_good)).then(|| Self(text.into()))
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a guest wants to be signed.
#[derive(Clone)]
pub enum SigningRequest {
    /// A token for an audience, with our own claims or those of a cloud.
    Token {
        /// The audience.
        audience: Audience,
        /// The cloud's claims.
        form: Option<Arc<CloudClaims>>,
    },
    /// The signature of a document, without the document.
    Signature(Bytes),
    /// A document within its signature (PKCS#7).
    Envelope(Bytes),
    /// The same form without the document, which may state an audience.
    Detached {
        /// The document.
        document: Bytes,
        /// Its audience.
        audience: Option<Audience>,
    },
    /// A statement within its signature (PKCS#7). The signer dates it.
    Attested {
        /// Members of the statement, without nonce and times.
        statement: Arc<Map<String, Value>>,
        /// The guest's nonce.
        nonce: Option<Nonce>,
    },
}

impl fmt::Debug for SigningRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wanted").field(&self.kind()).finish()
    }
}

impl SigningRequest {
    /// Returns a token with our own claims.
    #[must_use]
    pub fn token(audience: &Audience) -> Self {
        Self::Token { audience: audience.clone(), form: None }
    }

    /// Returns the audience; `None` for a document, which is for everybody.
    #[must_use]
    pub fn audience(&self) -> Option<&Audience> {
        match self {
            Self::Token { audience, .. } => Some(audience),
            Self::Detached { audience, .. } => audience.as_ref(),
            Self::Signature(_) | Self::Envelope(_) | Self::Attested { .. } => None,
        }
    }

    /// Returns the name of what is wanted, for reports.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Token { form: None, .. } => "token",
            Self::Token { form: Some(form), .. } => form.name,
            Self::Signature(_) => "signature",
            Self::Envelope(_) => "pkcs7",
            Self::Detached { .. } => "pkcs7_detached",
            Self::Attested { .. } => "attested",
        }
    }

    /// Returns whether one answer serves both requests of a VM. Documents and forms belong to its record.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Attested { nonce, .. }, Self::Attested { nonce: other, .. }) => nonce == other,
            _ => self.kind() == other.kind() && self.audience() == other.audience(),
        }
    }
}

/// What the signer gets. The agent passes each on as the signer's operation of this name.
#[derive(Debug, PartialEq)]
pub enum SigningJob {
    /// Claims of a JWT, without those of the signer.
    Jwt(Map<String, Value>),
    /// A JSON object whose bytes are signed.
    Signature(String),
    /// A JSON object whose bytes are signed, and kept within the signature.
    Envelope(String),
    /// A JSON object whose bytes are signed in the same form, but not kept.
    Detached(String),
    /// Members of a statement, without the signer's times.
    Attested(Map<String, Value>),
}

#[cfg(test)]
mod tests;
