//! Checks OAuth 1.0 PLAINTEXT signatures in `Authorization` (RFC 5849 sections 3.4.4 and 3.5.1).

use percent_encoding::percent_decode;
use sha2::{Digest as _, Sha256};

use crate::http::Headers;
use crate::record::vm::Maas;

/// Maximum number of parameters read from the header field. A signed request has seven, and the realm.
const PARAMETERS: usize = 16;

/// Digest of the expected credentials. Only digests are compared, so the time of a comparison reveals nothing of the
/// secret.
#[derive(PartialEq, Eq)]
pub(super) struct Signature([u8; 32]);

impl std::fmt::Debug for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signature(…)")
    }
}

impl Signature {
    /// Returns the signature of a record's credentials.
    pub(super) fn of(credentials: &Maas) -> Self {
        let Maas { consumer_key, token_key, token_secret } = credentials;
        Self::new(
            consumer_key.as_str().as_bytes(),
            token_key.as_str().as_bytes(),
            token_secret.expose().as_bytes(),
        )
    }

    fn new(consumer_key: &[u8], token_key: &[u8], token_secret: &[u8]) -> Self {
        let mut digest = Sha256::new();
        for part in [consumer_key, token_key, token_secret] {
            digest.update(part.len().to_be_bytes());
            digest.update(part);
        }
        Self(digest.finalize().into())
    }

    /// Returns whether a request with these header fields is signed. MAAS's consumer has no secret, so the signature
    /// is `&` and the token's secret.
    pub(super) fn signs(&self, headers: &Headers<'_>) -> bool {
        let found = || {
            let parameters = parameters(headers.get("Authorization")?)?;
            let get = |wanted: &str| {
                let mut of_name = parameters.iter().filter(|(name, _)| name == wanted.as_bytes());
                of_name.next().map(|(_, value)| value.as_slice()).filter(|_| of_name.next().is_none())
            };
            let method = get("oauth_signature_method")?;
            // The secret is percent-encoded twice: as part of the signature, and as a parameter.
            let secret: Vec<u8> = percent_decode(get("oauth_signature")?.strip_prefix(b"&")?).collect();
            let signature = Self::new(get("oauth_consumer_key")?, get("oauth_token")?, &secret);
            (method == b"PLAINTEXT").then_some(signature)
        };
        found().is_some_and(|found| found == *self)
    }
}

type Parameter = (Vec<u8>, Vec<u8>);

/// Returns the decoded parameters of `OAuth name="value", …`.
fn parameters(value: &[u8]) -> Option<Vec<Parameter>> {
    let (scheme, rest) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"OAuth ") {
        return None;
    }
    let parameter = |part: &[u8]| {
        let part = part.trim_ascii();
        let equals = part.iter().position(|octet| *octet == b'=')?;
        let (name, value) = (&part[..equals], &part[equals + 1..]);
        let value = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        Some((percent_decode(name).collect(), percent_decode(value).collect()))
    };
    rest.split(|octet| *octet == b',').take(PARAMETERS).map(parameter).collect()
}
