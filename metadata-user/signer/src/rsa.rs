//! An RSA key that signs octets: RSASSA-PKCS1-v1_5 with SHA-256, which each verifier of clouds' documents knows.

use std::fmt;

use ring::rand::SystemRandom;
use ring::signature::{KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair};

use crate::key::{KeyError, LABEL};

/// The label of a PEM file with an unencrypted PKCS#1 key, the form of cert-manager's RSA keys.
const PKCS1: &str = "RSA PRIVATE KEY";

/// A key that signs.
pub struct RsaKey {
    pair: RsaKeyPair,
    random: SystemRandom,
}

impl fmt::Debug for RsaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RsaKey").finish_non_exhaustive()
    }
}

impl RsaKey {
    /// Reads a key of 2,048 to 4,096 bits from the text of a PEM file.
    ///
    /// # Errors
    /// [`KeyError`] if the text is neither PKCS#8 nor PKCS#1, or the key is another.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let block = pem::parse(text).map_err(|_| KeyError::Form)?;
        let pair = match block.tag() {
            LABEL => RsaKeyPair::from_pkcs8(block.contents()),
            PKCS1 => RsaKeyPair::from_der(block.contents()),
            _ => return Err(KeyError::Form),
        };
        Ok(Self { pair: pair.map_err(|_| KeyError::NotRsa)?, random: SystemRandom::new() })
    }

    /// Returns the public key (RFC 8017 appendix A.1.1).
    #[must_use]
    pub fn public(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    /// Signs octets.
    ///
    /// # Errors
    /// [`KeyError::Library`], if there are no random numbers.
    pub fn sign(&self, octets: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut signature = vec![0; self.pair.public().modulus_len()];
        let signed = self.pair.sign(&RSA_PKCS1_SHA256, &self.random, octets, &mut signature);
        signed.map(|()| signature).map_err(|_| KeyError::Library)
    }
}
