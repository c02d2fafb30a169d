//! `identity`: tokens of the node's issuer in the form of Google's, for a service account without a token of its own.
//!
//! | Claim | Value | In |
//! |---|---|---|
//! | `aud` | the parameter `audience` | each |
//! | `sub`, `azp` | the VM's subject, as in `/v1/identity/jwt` | each |
//! | `email`, `email_verified` | the account's `email`, if the record has it; `true` | `format=full` |
//! | `google.compute_engine` | project, zone, and the VM's id and name, as in the tree | `format=full` |
//!
//! Google puts the account's number into `sub` and `azp`. An account here has no number, and several VMs may have one
//! account. Records state neither a time of creation nor licences, so these claims are absent, also with
//! `licenses=TRUE`.

use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value};

use super::super::identity::{SigningOutcome, ask};
use super::super::route_builder::TEXT;
use super::Query;
use super::tree::Etag;
use super::{PLAIN, flavoured, found, refusal};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::identity::{CloudClaims, SigningRequest, TokenRefusal, VmIssuer};
use crate::record::Record;
use crate::record::identity::Audience;
use crate::store::{LiveOutcome, LiveRequest};

pub(super) static NO_AUDIENCE: LazyLock<Response> =
    LazyLock::new(|| flavoured(StatusCode(400), TEXT, &[], "non-empty audience parameter required\n"));
static BAD_AUDIENCE: LazyLock<Response> = LazyLock::new(|| {
    flavoured(StatusCode(400), TEXT, &[], format!("expected an audience of {}\n", Audience::FORM))
});

/// The forms of one VM's tokens.
pub(super) struct GceTokenFormats {
    issuer: Arc<VmIssuer>,
    standard: Arc<CloudClaims>,
    full: Arc<CloudClaims>,
}

impl GceTokenFormats {
    pub(super) fn new(record: &Record, issuer: &Arc<VmIssuer>) -> Self {
        let mut claims = Map::new();
        claims.insert("azp".to_owned(), issuer.subject().into());
        let standard = CloudClaims { name: "google", claims: claims.clone() };
        let account = record.credentials.service_account.as_ref();
        if let Some(email) = account.and_then(|account| account.email.as_ref()) {
            claims.insert("email".to_owned(), email.as_str().into());
            claims.insert("email_verified".to_owned(), true.into());
        }
        claims.insert("google".to_owned(), json!({ "compute_engine": compute_engine(record) }));
        let full = CloudClaims { name: "google_full", claims };
        Self { issuer: Arc::clone(issuer), standard: standard.into(), full: full.into() }
    }

    /// Answers a request for a token, or parks it while the token is signed.
    pub(super) fn answer(&self, call: &LiveRequest<'_>, query: &Query) -> LiveOutcome {
        let Some(audience) = query.audience.as_deref().filter(|audience| !audience.is_empty()) else {
            return NO_AUDIENCE.clone().into();
        };
        let Some(audience) = Audience::parse(audience) else { return BAD_AUDIENCE.clone().into() };
        let form = if query.full { &self.full } else { &self.standard };
        match ask(call, &self.issuer, &SigningRequest::Token { audience, form: Some(Arc::clone(form)) }) {
            SigningOutcome::Token(token) => {
                let etag = Etag::of(&token.text.clone().into());
                found(PLAIN, etag, token.text).within(self.issuer.hop_limit()).into()
            }
            SigningOutcome::Refused(refusal) => refused(refusal).into(),
            SigningOutcome::Wait(parked) => LiveOutcome::Park(parked),
        }
    }
}

/// Builds a refusal. Google's libraries retry a 429 and a 503.
fn refused(why: TokenRefusal) -> Response {
    match why {
        TokenRefusal::Audience => refusal(StatusCode(403), &[]),
        TokenRefusal::TooMany => refusal(StatusCode(429), &[("Retry-After", "1")]),
        TokenRefusal::Unavailable => refusal(StatusCode(503), &[("Retry-After", "1")]),
    }
}

fn compute_engine(record: &Record) -> Value {
    json!({
        "instance_id": record.numeric_id().to_string(),
        "instance_name": record.vm.name.as_str(),
        "project_id": record.vm.project.id.as_str(),
        "project_number": record.vm.project.number,
        "zone": record.placement.zone.as_str(),
    })
}

#[cfg(test)]
mod tests;
