//! `/metadata/identity/oauth2/token`: the managed identity's token.

use std::fmt;

use super::super::sheet::JSON;
use super::query::Parameters;
use super::{DOCUMENT, error};
use crate::dialect::json::json;
use crate::http::{Response, Status};
use crate::record::Record;
use crate::record::vm::ManagedIdentity;
use crate::store::{Call, Live, Outcome};

/// Parameters that name an identity by other means than its client id. Records have none of them.
const OTHER_NAMES: [&str; 3] = ["object_id", "msi_res_id", "mi_res_id"];

/// Serves the tokens of one VM.
pub(super) struct Tokens {
    identity: Option<ManagedIdentity>,
}

/// Omits tokens.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

impl Tokens {
    pub(super) fn new(record: &Record) -> Self {
        Self { identity: record.credentials.managed_identity.as_deref().cloned() }
    }

    /// Returns the requested identity; without a name, the only one.
    fn named(&self, parameters: &Parameters<'_>) -> Option<&ManagedIdentity> {
        let asked = parameters.get("client_id");
        let known = |identity: &&ManagedIdentity| {
            asked.is_none_or(|asked| asked.eq_ignore_ascii_case(identity.client_id.as_str()))
        };
        let by_client = OTHER_NAMES.iter().all(|name| parameters.get(name).is_none());
        self.identity.as_ref().filter(|identity| by_client && known(identity))
    }

    fn token(&self, parameters: &Parameters<'_>, now_unix: u64) -> Response {
        let Some(resource) = parameters.get("resource").filter(|resource| !resource.is_empty()) else {
            return refused("Required query variable 'resource' is missing");
        };
        let Some(identity) = self.named(parameters) else {
            return refused("Identity not found");
        };
        let (Some(text), Some(expires)) = (&identity.text, &identity.expires) else { return later() };
        let expires_on = expires.unix_seconds();
        let remaining = expires_on.saturating_sub_unsigned(now_unix);
        if remaining <= 0 {
            return later();
        }
        let document = json!({
            "access_token": text.expose(),
            "client_id": identity.client_id.as_str(),
            "expires_in": remaining.to_string(),
            "expires_on": expires_on.to_string(),
            "not_before": now_unix.to_string(),
            "resource": resource,
            "token_type": "Bearer",
        });
        Response::new(Status(200), Some(DOCUMENT), &[], document.to_string())
    }
}

fn refused(why: &str) -> Response {
    error(&json!({ "error": "invalid_request", "error_description": why }))
}

/// Builds the 503 for a token that its source may still deliver. Azure's libraries retry any 5xx and finally raise an
/// error with this text (RFC 6749 section 4.1.2.1 defines the first word).
fn later() -> Response {
    let why = "The identity has no valid token yet";
    let document = json!({ "error": "temporarily_unavailable", "error_description": why });
    Response::new(Status(503), Some(JSON), &[("Retry-After", "1")], document.to_string())
}

impl Live for Tokens {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        match Parameters::parse(call.request.target.query) {
            Ok(parameters) => self.token(&parameters, call.now.unix_seconds).into(),
            Err(refused) => refused.into(),
        }
    }

    fn about(&self) -> &'static str {
        "the managed identity's token for a resource"
    }
}
