//! Sets of public keys (RFC 7517 section 5).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::key::Key;

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
pub fn of<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Value {
    json!({ "keys": keys.into_iter().map(Key::jwk).collect::<Vec<_>>() })
}

/// A set joined from others.
#[derive(Debug, Default)]
pub struct Joined(BTreeMap<String, Value>);

impl Joined {
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
    use super::{Joined, JwksError};
    use serde_json::json;

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
            let mut joined = Joined::default();
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
        let joined = |set: serde_json::Value| {
            let mut joined = Joined::default();
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
