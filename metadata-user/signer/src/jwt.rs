//! Tokens in the compact form (RFC 7515 section 7.1).

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde_json::{Map, Value, json};

use crate::key::{Key, KeyError};

/// Longest lifetime of a token, in seconds.
pub const LIFETIME_MOST: u32 = 3_600;
/// Shortest lifetime of a token, in seconds.
pub const LIFETIME_LEAST: u32 = 10;
/// Claims that the signer sets. A request must not have them.
pub const OWN: [&str; 5] = ["iss", "iat", "nbf", "exp", "jti"];
/// Octets of randomness in `jti`.
const ID_OCTETS: usize = 16;

/// What the signer adds to each token.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// `iss`.
    pub issuer: &'a str,
    /// Time of the signature, in Unix seconds.
    pub now_unix: u64,
    /// Lifetime in seconds; more than [`LIFETIME_MOST`] counts as that.
    pub lifetime: u32,
}

/// A token, and what it states about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The token.
    pub token: String,
    /// `jti`.
    pub id: String,
    /// `iat`, in Unix seconds.
    pub issued: u64,
    /// `exp`, in Unix seconds.
    pub expires: u64,
}

/// Why a token is not signed.
#[derive(Debug, thiserror::Error)]
pub enum JwtError {
    /// The request sets a claim of the signer.
    #[error("expected claims without `{0}`, which the signer sets, found it")]
    Own(&'static str),
    /// The request lacks a claim.
    #[error("expected the claim `{0}` as text, found none")]
    Lacks(&'static str),
    /// The key cannot sign.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// Signs claims. `sub` and `aud` are required: a token without an audience would be valid everywhere.
///
/// # Errors
/// [`JwtError`].
pub fn sign(key: &Key, terms: Terms<'_>, mut claims: Map<String, Value>) -> Result<Signed, JwtError> {
    if let Some(own) = OWN.into_iter().find(|own| claims.contains_key(*own)) {
        return Err(JwtError::Own(own));
    }
    let is_text =
        |name: &&str| claims.get(*name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    if let Some(lacks) = ["sub", "aud"].into_iter().find(|name| !is_text(name)) {
        return Err(JwtError::Lacks(lacks));
    }
    let mut random = [0; ID_OCTETS];
    SystemRandom::new().fill(&mut random).map_err(|_| KeyError::Library)?;
    let id = URL_SAFE_NO_PAD.encode(random);
    let issued = terms.now_unix;
    let expires = issued.saturating_add(terms.lifetime.min(LIFETIME_MOST).into());
    claims.insert("iss".into(), terms.issuer.into());
    claims.insert("iat".into(), issued.into());
    claims.insert("nbf".into(), issued.into());
    claims.insert("exp".into(), expires.into());
    claims.insert("jti".into(), id.as_str().into());
    let header = json!({ "alg": key.algorithm().name(), "kid": key.kid(), "typ": "JWT" });
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let mut token = format!("{}.{}", part(&header), part(&Value::Object(claims)));
    let signature = key.sign(token.as_bytes())?;
    token.push('.');
    URL_SAFE_NO_PAD.encode_string(signature, &mut token);
    Ok(Signed { token, id, issued, expires })
}

#[cfg(test)]
mod tests {
    use super::{JwtError, LIFETIME_MOST, OWN, Terms, sign};
    use crate::key::{Algorithm, Key};
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::{Map, Value, json};

    fn claims(more: Value) -> Map<String, Value> {
        let mut claims = json!({"sub": "vm:1", "aud": "vault"}).as_object().expect("claims").clone();
        claims.extend(more.as_object().expect("claims").clone());
        claims
    }

    fn key() -> Key {
        Key::parse(Algorithm::Es256, &Key::generate(Algorithm::Es256).expect("made")).expect("a key")
    }

    #[test]
    fn the_signer_sets_the_times_and_no_token_lives_longer_than_an_hour() {
        let key = key();
        for (lifetime, expected) in [(60, 60), (3_600, 3_600), (u32::MAX, LIFETIME_MOST)] {
            let terms = Terms { issuer: "https://i", now_unix: 1_000, lifetime };
            let signed = sign(&key, terms, claims(json!({"vm": {"name": "web"}}))).expect("signed");
            let [header, body, _] = signed.token.split('.').collect::<Vec<_>>()[..] else {
                panic!("three parts")
            };
            let part = |text| -> Value {
                serde_json::from_slice(&URL_SAFE_NO_PAD.decode(text).expect("base64url")).expect("JSON")
            };
            assert_eq!(part(header), json!({"alg": "ES256", "kid": key.kid(), "typ": "JWT"}));
            let body = part(body);
            assert_eq!(
                (&body["iss"], &body["iat"], &body["nbf"]),
                (&json!("https://i"), &json!(1_000), &json!(1_000))
            );
            assert_eq!(body["exp"], json!(1_000 + expected));
            assert_eq!((&body["jti"], signed.expires), (&json!(signed.id), u64::from(1_000 + expected)));
        }
    }

    #[test]
    fn claims_of_the_signer_and_missing_ones_are_refused() {
        let (key, terms) = (key(), Terms { issuer: "https://i", now_unix: 0, lifetime: 60 });
        for own in OWN {
            let refused = sign(&key, terms, claims(json!({own: 1})));
            assert!(matches!(refused, Err(JwtError::Own(found)) if found == own), "{own}");
        }
        for (without, value) in [("sub", json!(null)), ("aud", json!("")), ("aud", json!(["a"]))] {
            let refused = sign(&key, terms, claims(json!({without: value})));
            assert!(matches!(refused, Err(JwtError::Lacks(found)) if found == without), "{without}");
        }
    }
}
