//! Tokens in the compact form (RFC 7515 section 7.1).

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

use crate::key::{SigningKey, SigningKeyError};

/// Longest lifetime of a token, in seconds.
pub const LIFETIME_MOST: u32 = 3_600;
/// Shortest lifetime of a token, in seconds.
pub const LIFETIME_LEAST: u32 = 10;
/// Claims that the signer sets. A request must not have them.
pub const OWN: [&str; 5] = ["iss", "iat", "nbf", "exp", "jti"];
/// Bytes of randomness in `jti`.
const ID_BYTES: usize = 16;

/// What the signer adds to each token.
#[derive(Clone, Copy, Debug)]
pub struct TokenTerms<'a> {
    /// `iss`.
    pub issuer: &'a str,
    /// Time of the signature, in Unix seconds.
    pub now_unix: u64,
    /// Lifetime in seconds; more than [`LIFETIME_MOST`] counts as that.
    pub lifetime: u32,
}

/// A token, and what it states about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedToken {
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
    Key(#[from] SigningKeyError),
}

/// Signs claims. `sub` and `aud` are required: a token without an audience would be valid everywhere.
///
/// # Errors
/// [`JwtError`].
pub fn sign(
    key: &SigningKey,
    terms: TokenTerms<'_>,
    mut claims: Map<String, Value>,
) -> Result<SignedToken, JwtError> {
    if let Some(own) = OWN.into_iter().find(|own| claims.contains_key(*own)) {
        return Err(JwtError::Own(own));
    }
    let is_text =
        |name: &&str| claims.get(*name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    if let Some(lacks) = ["sub", "aud"].into_iter().find(|name| !is_text(name)) {
        return Err(JwtError::Lacks(lacks));
    }
    let mut random = [0; ID_BYTES];
    SystemRandom::new().fill(&mut random).map_err(|_| SigningKeyError::Library)?;
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
    Ok(SignedToken { token, id, issued, expires })
}

// Sets of public keys (RFC 7517 section 5).

/// Maximum number of keys in a set that is joined from several: a thousand nodes with three keys each.
pub const JOINED_KEYS: usize = 4_096;

/// Members of private and symmetric keys (RFC 7518 section 6).
const PRIVATE: [&str; 8] = ["d", "p", "q", "dp", "dq", "qi", "oth", "k"];

/// Kinds of keys that may sign JWT-SVIDs (JWT-SVID section 2.1).
const SPIFFE_KINDS: [&str; 2] = ["EC", "RSA"];
/// How often verifiers should fetch a bundle, in seconds (SPIFFE Trust Domain and Bundle section 4.1.2).
const SPIFFE_REFRESH: u32 = 300;

/// Why sets cannot be joined. No error repeats the value of a member.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum JwksError {
    /// The text is not a set of keys.
    #[error("expected a JSON object with a list `keys` of objects, found something else")]
    Form,
    /// A key has no `kid`.
    #[error("expected a `kid` in key {0} of the set, found none")]
    NoKid(usize),
    /// A key has a private member.
    #[error(
        "expected public keys, found the private member `{member}` in key {at} of the set; remove it, and replace the key"
    )]
    Private {
        /// Position of the key, from 0.
        at: usize,
        /// Name of the member.
        member: &'static str,
    },
    /// Two different keys have one `kid`.
    #[error("expected one key for each `kid`, found two for `{0}`")]
    Twice(String),
    /// A key cannot sign JWT-SVIDs.
    #[error(
        "expected keys of kind `EC` or `RSA`, found `{kty}` for `{kid}`; SPIFFE has no EdDSA, so set \
         `identity.algorithm` to ES256"
    )]
    NotSpiffe {
        /// `kid` of the key.
        kid: String,
        /// Kind of the key.
        kty: String,
    },
    /// There are too many keys.
    #[error("expected at most {JOINED_KEYS} keys, found more")]
    TooMany,
}

/// Returns the public halves of keys as a set.
#[must_use]
pub fn of<'a>(keys: impl IntoIterator<Item = &'a SigningKey>) -> Value {
    json!({ "keys": keys.into_iter().map(SigningKey::jwk).collect::<Vec<_>>() })
}

/// A set joined from others.
#[derive(Debug, Default)]
pub struct JoinedKeySet(BTreeMap<String, Value>);

impl JoinedKeySet {
    /// Adds the keys of a set. Equal keys are added once.
    ///
    /// # Errors
    /// [`JwksError`]. Keys before the first bad one have been added.
    pub fn add(&mut self, set: &Value) -> Result<(), JwksError> {
        let keys = set.get("keys").and_then(Value::as_array).ok_or(JwksError::Form)?;
        for (at, key) in keys.iter().enumerate() {
            let members = key.as_object().ok_or(JwksError::Form)?;
            if let Some(member) = PRIVATE.into_iter().find(|member| members.contains_key(*member)) {
                return Err(JwksError::Private { at, member });
            }
            let kid = members.get("kid").and_then(Value::as_str).ok_or(JwksError::NoKid(at))?;
            match self.0.get(kid) {
                Some(known) if known != key => return Err(JwksError::Twice(kid.to_owned())),
                Some(_) => {}
                None if self.0.len() == JOINED_KEYS => return Err(JwksError::TooMany),
                None => _ = self.0.insert(kid.to_owned(), key.clone()),
            }
        }
        Ok(())
    }

    /// Returns the set as a SPIFFE bundle (SPIFFE Trust Domain and Bundle section 4), in the order of `kid`. Its keys
    /// have another `use` than those of OpenID Connect, so no document is both.
    ///
    /// # Errors
    /// [`JwksError::NotSpiffe`].
    pub fn into_bundle(self) -> Result<Value, JwksError> {
        let keys = self.0.into_iter().map(|(kid, mut key)| {
            let kty = key["kty"].as_str().unwrap_or_default();
            if !SPIFFE_KINDS.contains(&kty) {
                return Err(JwksError::NotSpiffe { kty: kty.to_owned(), kid });
            }
            if let Some(members) = key.as_object_mut() {
                // Section 4.2 advises against members that it does not define.
                members.remove("alg");
                members.insert("use".to_owned(), "jwt-svid".into());
            }
            Ok(key)
        });
        Ok(json!({ "keys": keys.collect::<Result<Vec<_>, _>>()?, "spiffe_refresh_hint": SPIFFE_REFRESH }))
    }

    /// Returns the set, in the order of `kid`.
    #[must_use]
    pub fn into_set(self) -> Value {
        json!({ "keys": self.0.into_values().collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::{Map, Value, json};

    use super::{JoinedKeySet, JwksError, JwtError, LIFETIME_MOST, OWN, TokenTerms, sign};
    use crate::key::{Algorithm, SigningKey};

    fn claims(more: Value) -> Map<String, Value> {
        let mut claims = json!({"sub": "vm:1", "aud": "vault"}).as_object().expect("claims").clone();
        claims.extend(more.as_object().expect("claims").clone());
        claims
    }

    fn key() -> SigningKey {
        SigningKey::parse(Algorithm::Es256, &SigningKey::generate(Algorithm::Es256).expect("made"))
            .expect("a key")
    }

    #[test]
    fn the_signer_sets_the_times_and_no_token_lives_longer_than_an_hour() {
        let key = key();
        for (lifetime, expected) in [(60, 60), (3_600, 3_600), (u32::MAX, LIFETIME_MOST)] {
            let terms = TokenTerms { issuer: "https://i", now_unix: 1_000, lifetime };
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
        let (key, terms) = (key(), TokenTerms { issuer: "https://i", now_unix: 0, lifetime: 60 });
        for own in OWN {
            let refused = sign(&key, terms, claims(json!({own: 1})));
            assert!(matches!(refused, Err(JwtError::Own(found)) if found == own), "{own}");
        }
        for (without, value) in [("sub", json!(null)), ("aud", json!("")), ("aud", json!(["a"]))] {
            let refused = sign(&key, terms, claims(json!({without: value})));
            assert!(matches!(refused, Err(JwtError::Lacks(found)) if found == without), "{without}");
        }
    }

    #[test]
    fn sets_are_joined_by_kid_and_private_members_refused() {
        let key = |kid: &str, x: &str| json!({"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x});
        let cases = [
            (vec![json!({"keys": [key("b", "1")]}), json!({"keys": [key("a", "2"), key("b", "1")]})], Ok(2)),
            (vec![json!({"keys": []})], Ok(0)),
            (vec![json!([])], Err(JwksError::Form)),
            (vec![json!({"keys": [1]})], Err(JwksError::Form)),
            (vec![json!({"keys": [{"kty": "EC"}]})], Err(JwksError::NoKid(0))),
            (vec![json!({"keys": [key("a", "1"), key("a", "2")]})], Err(JwksError::Twice("a".into()))),
            (
                vec![json!({"keys": [{"kty": "oct", "kid": "a", "k": "c2VjcmV0"}]})],
                Err(JwksError::Private { at: 0, member: "k" }),
            ),
            (
                vec![json!({"keys": [key("a", "1"), {"kty": "RSA", "kid": "b", "d": "c2VjcmV0"}]})],
                Err(JwksError::Private { at: 1, member: "d" }),
            ),
        ];
        for (sets, expected) in cases {
            let mut joined = JoinedKeySet::default();
            let added = sets.iter().try_for_each(|set| joined.add(set));
            assert!(!format!("{added:?}").contains("c2VjcmV0"));
            let set = joined.into_set();
            let kids: Vec<_> =
                set["keys"].as_array().expect("a list").iter().map(|key| &key["kid"]).collect();
            assert!(kids.is_sorted_by_key(|kid| kid.as_str()), "{kids:?}");
            assert_eq!(added.map(|()| kids.len()), expected, "{sets:?}");
        }
    }

    #[test]
    fn a_bundle_has_spiffes_use_and_no_key_that_spiffe_forbids() {
        let joined = |set: Value| {
            let mut joined = JoinedKeySet::default();
            joined.add(&set).expect("public keys");
            joined
        };
        let ec = |key_use: &str| json!({"kty": "EC", "crv": "P-256", "kid": "a", "x": "1", "y": "2", "use": key_use});
        let mut published = ec("sig");
        published["alg"] = "ES256".into();
        let bundle = joined(json!({"keys": [published]})).into_bundle();
        assert_eq!(bundle, Ok(json!({"keys": [ec("jwt-svid")], "spiffe_refresh_hint": 300})));

        let other = json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "a", "x": "1"}]});
        let refused = JwksError::NotSpiffe { kid: "a".into(), kty: "OKP".into() };
        assert_eq!(joined(other).into_bundle(), Err(refused));
    }
}
