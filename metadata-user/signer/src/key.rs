//! One key: its private half, which signs, and its public half as a JSON Web Key.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use pem::{EncodeConfig, LineEnding, Pem};
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// The label of a PEM file that holds an unencrypted PKCS#8 key (RFC 7468 section 10).
pub(crate) const LABEL: &str = "PRIVATE KEY";

/// A signature algorithm (RFC 7518 section 3.1, RFC 8037 section 3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum Algorithm {
    /// ECDSA with P-256 and SHA-256.
    #[default]
    #[serde(rename = "ES256")]
    Es256,
    /// RSASSA-PKCS1-v1_5 with SHA-256, for verifiers that know no other.
    #[serde(rename = "RS256")]
    Rs256,
    /// Ed25519.
    #[serde(rename = "EdDSA")]
    EdDsa,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 3] = [Self::Es256, Self::Rs256, Self::EdDsa];

    /// Returns the name in a JWT's header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Es256 => "ES256",
            Self::Rs256 => "RS256",
            Self::EdDsa => "EdDSA",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a key cannot be used or made. No error repeats a part of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SigningKeyError {
    /// The text is not one PEM block of the right kind.
    #[error(
        "expected one PEM block `{LABEL}` (PKCS#8, not encrypted), found something else; `openssl pkcs8 -topk8 -nocrypt` \
         converts other forms"
    )]
    Form,
    /// The block is a key of another kind.
    #[error("expected a key for {0}, found another; set `identity.algorithm`, or replace the key")]
    Kind(Algorithm),
    /// The block is not an RSA key, or one of another length.
    #[error("expected an RSA key of 2,048 to 4,096 bits, found another")]
    NotRsa,
    /// RSA keys come from elsewhere.
    #[error(
        "RS256 keys are not made here; run `(umask 077; openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:3072 \
         -out FILE.pem)`"
    )]
    NotMade,
    /// The system's random numbers failed, or a key refused to sign.
    #[error("the cryptographic library failed")]
    Library,
}

enum KeyPair {
    Es256(EcdsaKeyPair),
    Rs256(RsaKeyPair),
    EdDsa(Ed25519KeyPair),
}

/// A key that signs.
pub struct SigningKey {
    pair: KeyPair,
    kid: String,
    /// Members of the public key in the form of RFC 7517, without `kid`, `alg` and `use`.
    public: Value,
    random: SystemRandom,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("kid", &self.kid).finish_non_exhaustive()
    }
}

fn encoded(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

impl SigningKey {
    /// Reads a key from the text of a PEM file.
    ///
    /// # Errors
    /// [`SigningKeyError`] if the text is not PKCS#8, or the key is not for `algorithm`. RSA keys have 2,048 to 4,096
    /// bits.
    pub fn parse(algorithm: Algorithm, text: &str) -> Result<Self, SigningKeyError> {
        let block = pem::parse(text).map_err(|_| SigningKeyError::Form)?;
        if block.tag() != LABEL {
            return Err(SigningKeyError::Form);
        }
        Self::from_pkcs8(algorithm, block.contents())
    }

    fn from_pkcs8(algorithm: Algorithm, bytes: &[u8]) -> Result<Self, SigningKeyError> {
        let (random, kind) = (SystemRandom::new(), |_| SigningKeyError::Kind(algorithm));
        let pair = match algorithm {
            Algorithm::Es256 => {
                EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, bytes, &random).map(KeyPair::Es256)
            }
            Algorithm::Rs256 => RsaKeyPair::from_pkcs8(bytes).map(KeyPair::Rs256),
            // OpenSSL writes version 1, which has no public key to compare.
            Algorithm::EdDsa => Ed25519KeyPair::from_pkcs8_maybe_unchecked(bytes).map(KeyPair::EdDsa),
        }
        .map_err(kind)?;
        let public = public(&pair);
        Ok(Self { kid: thumbprint(&pair), public, pair, random })
    }

    /// Returns the text of a PEM file with a new key.
    ///
    /// # Errors
    /// [`SigningKeyError::NotMade`] for RS256.
    pub fn generate(algorithm: Algorithm) -> Result<String, SigningKeyError> {
        let random = SystemRandom::new();
        let document = match algorithm {
            Algorithm::Es256 => EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random),
            Algorithm::EdDsa => Ed25519KeyPair::generate_pkcs8(&random),
            Algorithm::Rs256 => return Err(SigningKeyError::NotMade),
        };
        let document = document.map_err(|_| SigningKeyError::Library)?;
        let config = EncodeConfig::new().set_line_ending(LineEnding::LF);
        Ok(pem::encode_config(&Pem::new(LABEL, document.as_ref()), config))
    }

    /// Returns the thumbprint of the public key (RFC 7638), which is its `kid`.
    #[must_use]
    pub fn kid(&self) -> &str {
        &self.kid
    }

    /// Returns the algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        match self.pair {
            KeyPair::Es256(_) => Algorithm::Es256,
            KeyPair::Rs256(_) => Algorithm::Rs256,
            KeyPair::EdDsa(_) => Algorithm::EdDsa,
        }
    }

    /// Returns the public key as a JSON Web Key (RFC 7517).
    #[must_use]
    pub fn jwk(&self) -> Value {
        let mut jwk = self.public.clone();
        jwk["kid"] = self.kid.as_str().into();
        jwk["alg"] = self.algorithm().name().into();
        jwk["use"] = "sig".into();
        jwk
    }

    /// Signs bytes.
    ///
    /// # Errors
    /// [`SigningKeyError::Library`], if there are no random numbers.
    pub fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, SigningKeyError> {
        match &self.pair {
            KeyPair::Es256(pair) => {
                let signature = pair.sign(&self.random, bytes).map_err(|_| SigningKeyError::Library)?;
                Ok(signature.as_ref().to_vec())
            }
            KeyPair::Rs256(pair) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &self.random, bytes, &mut signature)
                    .map_err(|_| SigningKeyError::Library)?;
                Ok(signature)
            }
            KeyPair::EdDsa(pair) => Ok(pair.sign(bytes).as_ref().to_vec()),
        }
    }
}

/// Returns both halves of an uncompressed point (SEC 1 section 2.3.3).
fn point(pair: &EcdsaKeyPair) -> (String, String) {
    let bytes = pair.public_key().as_ref();
    let (x, y) = bytes[1..].split_at((bytes.len() - 1) / 2);
    (encoded(x), encoded(y))
}

/// Returns exponent and modulus.
fn numbers(pair: &RsaKeyPair) -> (String, String) {
    let numbers = ring::rsa::PublicKeyComponents::<Vec<u8>>::from(pair.public());
    (encoded(&numbers.e), encoded(&numbers.n))
}

fn public(pair: &KeyPair) -> Value {
    match pair {
        KeyPair::Es256(pair) => {
            let (x, y) = point(pair);
            json!({ "kty": "EC", "crv": "P-256", "x": x, "y": y })
        }
        KeyPair::Rs256(pair) => {
            let (e, n) = numbers(pair);
            json!({ "kty": "RSA", "e": e, "n": n })
        }
        KeyPair::EdDsa(pair) => {
            json!({ "kty": "OKP", "crv": "Ed25519", "x": encoded(pair.public_key().as_ref()) })
        }
    }
}

/// Hashes the required members, in the order of their names and without white space (RFC 7638 section 3).
fn thumbprint(pair: &KeyPair) -> String {
    let text = match pair {
        KeyPair::Es256(pair) => {
            let (x, y) = point(pair);
            format!(r#"{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}"#)
        }
        KeyPair::Rs256(pair) => {
            let (e, n) = numbers(pair);
            format!(r#"{{"e":"{e}","kty":"RSA","n":"{n}"}}"#)
        }
        KeyPair::EdDsa(pair) => {
            let x = encoded(pair.public_key().as_ref());
            format!(r#"{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}"#)
        }
    };
    encoded(digest(&SHA256, text.as_bytes()).as_ref())
}

// An RSA key that signs bytes: RSASSA-PKCS1-v1_5 with SHA-256, which each verifier of clouds' documents knows.

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
    /// [`SigningKeyError`] if the text is neither PKCS#8 nor PKCS#1, or the key is another.
    pub fn parse(text: &str) -> Result<Self, SigningKeyError> {
        let block = pem::parse(text).map_err(|_| SigningKeyError::Form)?;
        let pair = match block.tag() {
            LABEL => RsaKeyPair::from_pkcs8(block.contents()),
            PKCS1 => RsaKeyPair::from_der(block.contents()),
            _ => return Err(SigningKeyError::Form),
        };
        Ok(Self { pair: pair.map_err(|_| SigningKeyError::NotRsa)?, random: SystemRandom::new() })
    }

    /// Returns the public key (RFC 8017 appendix A.1.1).
    #[must_use]
    pub fn public(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    /// Signs bytes.
    ///
    /// # Errors
    /// [`SigningKeyError::Library`], if there are no random numbers.
    pub fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, SigningKeyError> {
        let mut signature = vec![0; self.pair.public().modulus_len()];
        let signed = self.pair.sign(&RSA_PKCS1_SHA256, &self.random, bytes, &mut signature);
        signed.map(|()| signature).map_err(|_| SigningKeyError::Library)
    }
}

#[cfg(test)]
mod tests {
    use ring::signature::{ECDSA_P256_SHA256_FIXED, ED25519, UnparsedPublicKey, VerificationAlgorithm};

    use super::{Algorithm, SigningKey, SigningKeyError};

    /// The private key of RFC 8037 appendix A.1 in PKCS#8, version 1, as OpenSSL writes it.
    const RFC_8037: &str = "-----BEGIN PRIVATE KEY-----\n\
         MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n-----END PRIVATE KEY-----\n";

    #[test]
    fn the_thumbprint_is_that_of_the_standard() {
        // RFC 8037 appendix A.3.
        let key = SigningKey::parse(Algorithm::EdDsa, RFC_8037).expect("a key");
        assert_eq!(key.kid(), "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k");
        assert_eq!(key.jwk()["x"], "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo");
    }

    #[test]
    fn a_new_key_signs_what_its_public_key_verifies() {
        type Case = (Algorithm, &'static dyn VerificationAlgorithm);
        let cases: [Case; 2] = [(Algorithm::Es256, &ECDSA_P256_SHA256_FIXED), (Algorithm::EdDsa, &ED25519)];
        for (algorithm, verifies) in cases {
            let key =
                SigningKey::parse(algorithm, &SigningKey::generate(algorithm).expect("made")).expect("a key");
            let bytes = match &key.pair {
                super::KeyPair::Es256(pair) => ring::signature::KeyPair::public_key(pair).as_ref().to_vec(),
                super::KeyPair::EdDsa(pair) => ring::signature::KeyPair::public_key(pair).as_ref().to_vec(),
                super::KeyPair::Rs256(_) => unreachable!("no RSA key is made"),
            };
            let signature = key.sign(b"bytes").expect("signed");
            UnparsedPublicKey::new(verifies, bytes).verify(b"bytes", &signature).expect("verified");
            assert_eq!((key.algorithm(), &key.jwk()["alg"]), (algorithm, &algorithm.name().into()));
        }
    }

    #[test]
    fn other_texts_are_refused_and_not_repeated() {
        let ec = SigningKey::generate(Algorithm::Es256).expect("made");
        let public = ec.replace("PRIVATE", "PUBLIC");
        for (algorithm, text, expected) in [
            (Algorithm::EdDsa, ec.as_str(), SigningKeyError::Kind(Algorithm::EdDsa)),
            (Algorithm::Rs256, &ec, SigningKeyError::Kind(Algorithm::Rs256)),
            (Algorithm::Es256, RFC_8037, SigningKeyError::Kind(Algorithm::Es256)),
            (Algorithm::Es256, &public, SigningKeyError::Form),
            (Algorithm::Es256, "", SigningKeyError::Form),
            (Algorithm::Es256, "MC4CAQAwBQYDK2Vw", SigningKeyError::Form),
        ] {
            let error = SigningKey::parse(algorithm, text).expect_err(text);
            assert_eq!(error, expected, "{text}");
            assert!(!error.to_string().contains("MC4C"), "{error}");
        }
        assert_eq!(SigningKey::generate(Algorithm::Rs256), Err(SigningKeyError::NotMade));
    }
}
