//! `/metadata/identity/oauth2/token`: the managed identity's token.
//!
//! An identity without a token gets one of the node's issuer, for the `resource` as its audience. Its claims are `sub`,
//! as in `/v1/identity/jwt`, and `appid`, the record's `client_id`. Records have no tenant and no object id, so the
//! token has none of Azure's other claims.

use serde_json::{Map, Value};
use std::fmt;
use std::sync::Arc;

use super::super::tokens::issue;
use super::{DOCUMENT, Parameters, bad, error, later, subscription, too_many};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::identity::{CloudClaims, IssuedToken, Nonce, SigningRequest, TokenRefusal, VmIssuer};
use crate::record::Record;
use crate::record::identity::Audience;
use crate::record::values::Line;
use crate::record::vm::{Image, ManagedIdentity};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute};

/// Why a token may be there later.
const NOT_YET: &str = "The identity has no valid token yet";
/// Parameters that name an identity by means other than its client id. Records have none of them.
const OTHER_NAMES: [&str; 3] = ["object_id", "msi_res_id", "mi_res_id"];

/// Serves the tokens of one VM.
pub(super) struct Tokens {
    identity: Option<ManagedIdentity>,
    /// Issues the tokens of an identity that has none.
    issued: Option<(Arc<VmIssuer>, Arc<CloudClaims>)>,
}

/// Omits tokens.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

impl Tokens {
    pub(super) fn new(record: &Record, issuer: Option<&Arc<VmIssuer>>) -> Self {
        let identity = record.credentials.managed_identity.as_deref().cloned();
        let without = identity.as_ref().filter(|identity| !identity.has_token());
        let form = |identity: &ManagedIdentity| {
            let claims = [("appid".to_owned(), identity.client_id.as_str().into())];
            Arc::new(CloudClaims { name: "azure", claims: claims.into_iter().collect() })
        };
        let issued = without.zip(issuer).map(|(identity, issuer)| (Arc::clone(issuer), form(identity)));
        Self { identity, issued }
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

    fn token(&self, call: &LiveRequest<'_>, parameters: &Parameters<'_>) -> LiveOutcome {
        let Some(resource) = parameters.get("resource").filter(|resource| !resource.is_empty()) else {
            return refused("Required query variable 'resource' is missing").into();
        };
        let Some(identity) = self.named(parameters) else {
            return refused("Identity not found").into();
        };
        let now_unix = call.now.unix_seconds;
        match (&self.issued, &identity.text, &identity.expires) {
            (Some((issuer, form)), ..) => issued(call, issuer, form, identity, resource),
            (None, Some(text), Some(expires)) => {
                given(identity, resource, text.expose(), expires.unix_seconds(), now_unix).into()
            }
            (None, ..) if !identity.has_token() => refused("Identity not found").into(),
            (None, ..) => later(NOT_YET).into(),
        }
    }
}

/// Answers with a token of the issuer, or parks the request while the token is signed.
fn issued(
    call: &LiveRequest<'_>,
    issuer: &Arc<VmIssuer>,
    form: &Arc<CloudClaims>,
    identity: &ManagedIdentity,
    resource: &str,
) -> LiveOutcome {
    let Some(audience) = Audience::parse(resource) else {
        return refused(&format!("Expected a 'resource' of {}", Audience::FORM)).into();
    };
    let wanted = SigningRequest::Token { audience, form: Some(Arc::clone(form)) };
    let token = |token: IssuedToken| {
        let expires = i64::try_from(token.expires).unwrap_or(i64::MAX);
        let text = String::from_utf8_lossy(&token.text);
        given(identity, resource, &text, expires, call.now.unix_seconds)
    };
    issue(call, issuer, &wanted, token, |why| match why {
        TokenRefusal::Audience => refused("The record does not list the resource"),
        TokenRefusal::TooMany => too_many(),
        TokenRefusal::Unavailable => later(NOT_YET),
    })
}

/// Builds the answer with a token.
fn given(identity: &ManagedIdentity, resource: &str, text: &str, expires: i64, now_unix: u64) -> Response {
    let remaining = expires.saturating_sub_unsigned(now_unix);
    if remaining <= 0 {
        return later(NOT_YET);
    }
    let document = json!({
        "access_token": text,
        "client_id": identity.client_id.as_str(),
        "expires_in": remaining.to_string(),
        "expires_on": expires.to_string(),
        "not_before": now_unix.to_string(),
        "resource": resource,
        "token_type": "Bearer",
    });
    Response::new(StatusCode(200), Some(DOCUMENT), &[], document.to_string())
}

fn refused(why: &str) -> Response {
    error(&json!({ "error": "invalid_request", "error_description": why }))
}

impl LiveRoute for Tokens {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        match Parameters::parse(call.request.target.query) {
            Ok(parameters) => self.token(call, &parameters),
            Err(refused) => refused.into(),
        }
    }

    fn about(&self) -> &'static str {
        "the managed identity's token for a resource"
    }
}

// `/metadata/attested/document`: a statement about the VM that the operator's certificate signs (PKCS#7).
//
// The guest's `nonce` and the signer's times are in the statement, so that an old one is useless to others. Without a
// nonce the signer puts the time in its place, as Azure does. Azure's nonces have ten digits; longer ones are taken.

/// Serves the statements of one VM.
#[derive(Debug)]
pub(super) struct AttestedDocuments {
    issuer: Arc<VmIssuer>,
    statement: Arc<Map<String, Value>>,
}

impl AttestedDocuments {
    pub(super) fn new(record: &Record, issuer: Arc<VmIssuer>) -> Self {
        Self { issuer, statement: Arc::new(statement(record)) }
    }

    fn read(&self, call: &LiveRequest<'_>, parameters: &Parameters<'_>) -> LiveOutcome {
        let nonce = parameters.get("nonce").filter(|nonce| !nonce.is_empty()).map(Nonce::parse);
        let nonce = match nonce {
            Some(None) => return bad("nonce must be at most 32 letters, digits, - and _").into(),
            Some(nonce) => nonce,
            None => None,
        };
        let statement = Arc::clone(&self.statement);
        let wanted = SigningRequest::Attested { statement, nonce };
        let document = |token: IssuedToken| {
            let text = String::from_utf8_lossy(&token.text);
            let document = json!({ "encoding": "pkcs7", "signature": &*text });
            Response::new(StatusCode(200), Some(DOCUMENT), &[], document.to_string())
        };
        issue(call, &self.issuer, &wanted, document, |why| match why {
            TokenRefusal::TooMany => too_many(),
            TokenRefusal::Audience | TokenRefusal::Unavailable => {
                later("No document is signed at the moment")
            }
        })
    }
}

/// Returns the members of the statement without nonce and times. Azure serves empty strings for a customer's own image.
fn statement(record: &Record) -> Map<String, Value> {
    let image = |of: fn(&Image) -> &Option<Line>| {
        record.image.as_ref().and_then(|image| of(image).as_ref()).map_or("", Line::as_str)
    };
    let statement = json!({
        "licenseType": "",
        "plan": { "name": "", "product": "", "publisher": "" },
        "sku": image(|image| &image.sku),
        "subscriptionId": subscription(record),
        "vmId": record.unique_uuid(),
    });
    match statement {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

impl LiveRoute for AttestedDocuments {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        match Parameters::parse(call.request.target.query) {
            Ok(parameters) => self.read(call, &parameters),
            Err(refused) => refused.into(),
        }
    }

    fn about(&self) -> &'static str {
        "a dated statement, signed by the operator's certificate"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{DialectGuest, NOW, full, issued, parse, text};
    use crate::identity::SigningJob;
    use crate::store::LiveOutcome;

    const TOKEN: &str = "/metadata/identity/oauth2/token?api-version=2018-02-01";
    const ATTESTED: &str = "/metadata/attested/document?api-version=2020-09-01";
    const HELD: [(&str, &str); 1] = [("Metadata", "true")];

    /// Returns the full record with a managed identity without a token.
    fn tokenless() -> Value {
        let mut record = full();
        record["credentials"] = json!({"managed_identity": {"client_id": "c-1"}});
        record["identity"] = json!({"audiences": ["api://vault"]});
        record
    }

    #[test]
    fn an_identity_without_a_token_gets_one_of_the_issuer() {
        let record = tokenless();
        let subject = format!("vm:{}", parse(&record).vm.uuid);
        for more in ["", "&client_id=C-1"] {
            let (guest, orders) = issued(&record, false);
            let target = format!("{TOKEN}&resource=api%3A%2F%2Fvault{more}");
            let (work, answer) = guest.served(&target, &HELD, &orders);
            let claims = json!({"appid": "c-1", "aud": "api://vault", "sub": subject});
            assert_eq!(work, SigningJob::Jwt(claims.as_object().expect("claims").clone()));
            assert_eq!((answer.status().0, answer.hop_limit()), (200, Some(1)));
            let document: Value = serde_json::from_str(&text(&answer)).expect("JSON");
            let expected = json!({
                "access_token": "SIGNED", "client_id": "c-1", "expires_in": "60",
                "expires_on": (NOW + 60).to_string(), "not_before": NOW.to_string(),
                "resource": "api://vault", "token_type": "Bearer",
            });
            assert_eq!(document, expected);
        }
    }

    #[test]
    fn refusals_are_azures() {
        let (guest, orders) = issued(&tokenless(), false);
        for (query, fields) in [
            ("", &HELD[..]),
            ("&resource=", &HELD),
            ("&resource=a%20b", &HELD),
            ("&resource=other", &HELD),
            ("&resource=api://vault&client_id=other", &HELD),
            ("&resource=api://vault&object_id=o", &HELD),
            ("&resource=api://vault", &[]),
            ("&resource=api://vault", &[HELD[0], ("X-Forwarded-For", "10.0.0.1")]),
        ] {
            assert_eq!(guest.got(&format!("{TOKEN}{query}"), fields).status().0, 400, "{query} {fields:?}");
        }
        assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
        let target = format!("{TOKEN}&resource=api://vault");
        let LiveOutcome::Park(parked) = guest.get(&target, &HELD, None) else { panic!("not parked") };
        orders.lock().expect("sound").clear();
        let LiveOutcome::Ready(answer) = guest.get(&target, &HELD, Some(&parked)) else {
            panic!("not ready")
        };
        assert_eq!((answer.status().0, answer.field("Retry-After")), (503, Some("1")));
    }

    #[test]
    fn a_token_of_the_record_is_served_as_without_an_issuer() {
        let mut sourced = tokenless();
        sourced["credentials"]["managed_identity"]["source"] = json!({"file": "token"});
        let mut literal = tokenless();
        literal["credentials"]["managed_identity"]["text"] = json!("own");
        literal["credentials"]["managed_identity"]["expires"] = json!("2099-12-31T23:59:59Z");
        let target = format!("{TOKEN}&resource=any");
        for (record, status) in [(&literal, 200), (&sourced, 503)] {
            let (with, without) = (issued(record, false).0, DialectGuest::of(record));
            let (with, without) = (with.got(&target, &HELD), without.got(&target, &HELD));
            assert_eq!((with.status().0, text(&with)), (status, text(&without)));
        }
        assert_eq!(DialectGuest::of(&tokenless()).got(&target, &HELD).status().0, 400, "no issuer, no token");
    }

    #[test]
    fn a_statement_has_azures_members_and_the_guests_nonce() {
        let mut record = full();
        record["image"]["sku"] = json!("12-gen2");
        for (more, nonce) in [
            ("", None),
            ("&nonce=", None),
            ("&nonce=1234567890", Some("1234567890")),
            ("&NONCE=a-b_c", Some("a-b_c")),
        ] {
            let (guest, orders) = issued(&record, true);
            let (work, answer) = guest.served(&format!("{ATTESTED}{more}"), &HELD, &orders);
            let account = record["vm"]["project"]["account"].as_str().expect("text");
            let mut expected = json!({
                "licenseType": "",
                "plan": {"name": "", "product": "", "publisher": ""},
                "sku": "12-gen2",
                "subscriptionId": format!("00000000-0000-0000-0000-{account}"),
                "vmId": record["vm"]["uuid"],
            });
            if let Some(nonce) = nonce {
                expected["nonce"] = nonce.into();
            }
            let SigningJob::Attested(members) = work else { panic!("{work:?}") };
            assert_eq!(Value::from(members), expected, "{more}");
            assert_eq!((answer.status().0, answer.hop_limit()), (200, Some(1)));
            let document: Value = serde_json::from_str(&text(&answer)).expect("JSON");
            assert_eq!(document, json!({"encoding": "pkcs7", "signature": "SIGNED"}));
        }
    }

    #[test]
    fn another_nonce_is_another_statement() {
        let (guest, orders) = issued(&full(), true);
        for nonce in ["1", "2"] {
            guest.served(&format!("{ATTESTED}&nonce={nonce}"), &HELD, &orders);
        }
        assert_eq!(guest.got(&format!("{ATTESTED}&nonce=1"), &HELD).status().0, 200);
        assert!(matches!(guest.get(ATTESTED, &HELD, None), LiveOutcome::Park(_)), "no nonce is another, too");
    }

    #[test]
    fn bad_requests_are_refused_as_elsewhere_below_metadata() {
        let (guest, orders) = issued(&full(), true);
        let long = format!("{ATTESTED}&nonce={}", "1".repeat(33));
        let proxied = [HELD[0], ("X-Forwarded-For", "10.0.0.1")];
        for (target, fields) in [
            (ATTESTED, &[][..]),
            (ATTESTED, &[("Metadata", "false")]),
            (ATTESTED, &proxied),
            ("/metadata/attested/document", &HELD),
            ("/metadata/attested/document?api-version=latest", &HELD),
            (&long, &HELD),
            (&format!("{ATTESTED}&nonce=a%22b"), &HELD),
            (&format!("{ATTESTED}&nonce=1&nonce=2"), &HELD),
        ] {
            assert_eq!(guest.got(target, fields).status().0, 400, "{target} {fields:?}");
        }
        assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
    }

    #[test]
    fn a_node_without_a_certificate_has_no_such_path() {
        for guest in [DialectGuest::of(&full()), issued(&full(), false).0] {
            assert_eq!(guest.got(ATTESTED, &HELD).status().0, 404);
        }
    }
}
