//! The public keys, as OpenID Connect Discovery and JWKS.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use metadata_signer::Algorithm;
use metadata_signer::wire::PublishedKeys;
use serde_json::{Value, json};

use crate::config::IdentityConfig;

/// How long verifiers may keep the keys: a new key is published much longer before it signs.
const CACHE: &str = "public, max-age=300";
const JSON: &str = "application/json";
/// The claims of tokens: those of each, of the node's own, of GCE's and of Azure's.
const CLAIMS: [&str; 13] = [
    "aud",
    "exp",
    "iat",
    "iss",
    "jti",
    "nbf",
    "sub",
    "vm",
    "azp",
    "email",
    "email_verified",
    "google",
    "appid",
];
/// Media type of a JWK Set (RFC 7517 section 8.5).
const JWKS: &str = "application/jwk-set+json";

/// The public keys, and the state of the signer.
#[derive(Debug)]
pub struct Publication {
    issuer: String,
    jwks_uri: String,
    algorithm: Algorithm,
    published: Mutex<PublishedKeys>,
    ended: AtomicBool,
    refused: AtomicBool,
}

/// The state of the signer, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignerReport {
    /// `iss` of tokens.
    pub issuer: String,
    /// The algorithm.
    pub algorithm: &'static str,
    /// Number of keys published.
    pub keys: u64,
    /// The `kid` of the key that signs; `None` without a key.
    pub signs: Option<String>,
    /// Time when the operator's certificate expires, in Unix seconds; `None` without one.
    pub certificate_expires: Option<u64>,
    /// The signer has ended.
    pub ended: bool,
}

impl Publication {
    /// Creates the publication of an issuer without keys.
    #[must_use]
    pub fn new(config: &IdentityConfig) -> Self {
        Self {
            issuer: config.issuer.clone(),
            jwks_uri: config.jwks_uri(),
            algorithm: config.algorithm,
            published: Mutex::default(),
            ended: AtomicBool::new(false),
            refused: AtomicBool::new(false),
        }
    }

    fn published(&self) -> MutexGuard<'_, PublishedKeys> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the keys. Returns true if one that was published is no longer.
    pub fn set(&self, published: PublishedKeys) -> bool {
        self.refused.store(false, Ordering::Relaxed);
        let mut own = self.published();
        let is_there = |key: &Value| has_key(&published.jwks, key);
        let is_one_gone = keys_of(&own.jwks).any(|key| !is_there(key));
        *own = published;
        is_one_gone
    }

    /// Returns whether the signer has a certificate, with which it signs documents.
    pub(super) fn has_certificate(&self) -> bool {
        self.published().certificate.is_some()
    }

    /// Records that the signer has ended.
    pub fn set_ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Returns true once between changes of the keys, so that refusals do not fill the log.
    pub(super) fn is_first_refusal(&self) -> bool {
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// Returns the state.
    #[must_use]
    pub fn report(&self) -> SignerReport {
        let published = self.published();
        SignerReport {
            issuer: self.issuer.clone(),
            algorithm: self.algorithm.name(),
            keys: published.count as u64,
            signs: published.signs.clone(),
            certificate_expires: published.certificate.as_ref().map(|certificate| certificate.until),
            ended: self.ended.load(Ordering::Relaxed),
        }
    }

    /// Returns the metadata of the issuer.
    #[must_use]
    pub fn configuration(&self) -> Value {
        configuration(&self.issuer, &self.jwks_uri, self.algorithm)
    }
}

fn keys_of(jwks: &Value) -> impl Iterator<Item = &Value> {
    jwks["keys"].as_array().into_iter().flatten()
}

fn has_key(jwks: &Value, key: &Value) -> bool {
    keys_of(jwks).any(|known| known == key)
}

/// Returns the metadata of an issuer (OpenID Connect Discovery 1.0 section 3).
#[must_use]
pub fn configuration(issuer: &str, jwks_uri: &str, algorithm: Algorithm) -> Value {
    json!({
        "issuer": issuer,
        "jwks_uri": jwks_uri,
        "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": [algorithm.name()],
        "claims_supported": CLAIMS,
    })
}

/// Returns the routes of the issuer's documents.
pub fn routes(publication: Arc<Publication>) -> Router {
    Router::new()
        .route("/.well-known/openid-configuration", get(get_configuration))
        .route("/.well-known/jwks.json", get(get_keys))
        .with_state(publication)
}

async fn get_configuration(State(publication): State<Arc<Publication>>) -> impl IntoResponse {
    let head = [(header::CONTENT_TYPE, JSON), (header::CACHE_CONTROL, CACHE)];
    (StatusCode::OK, head, format!("{}\n", publication.configuration()))
}

async fn get_keys(State(publication): State<Arc<Publication>>) -> impl IntoResponse {
    let head = [(header::CONTENT_TYPE, JWKS), (header::CACHE_CONTROL, CACHE)];
    (StatusCode::OK, head, format!("{}\n", publication.published().jwks))
}
