//! `/metadata/attested/document`: a statement about the VM that the operator's certificate signs (PKCS#7).
//!
//! The guest's `nonce` and the signer's times are in the statement, so that an old one is useless to others. Without a
//! nonce the signer puts the time in its place, as Azure does. Azure's nonces have ten digits; longer ones are taken.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::super::identity::{SigningOutcome, ask};
use super::Parameters;
use super::{DOCUMENT, bad, later, subscription, too_many};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::identity::{Nonce, SigningRequest, TokenRefusal, VmIssuer};
use crate::record::Record;
use crate::record::values::Line;
use crate::record::vm::Image;
use crate::store::{LiveOutcome, LiveRequest, LiveRoute};

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
        match ask(call, &self.issuer, &SigningRequest::Attested { statement, nonce }) {
            SigningOutcome::Token(token) => {
                let text = String::from_utf8_lossy(&token.text);
                let document = json!({ "encoding": "pkcs7", "signature": &*text });
                let answer = Response::new(StatusCode(200), Some(DOCUMENT), &[], document.to_string());
                answer.within(self.issuer.hop_limit()).into()
            }
            SigningOutcome::Refused(TokenRefusal::TooMany) => too_many().into(),
            SigningOutcome::Refused(TokenRefusal::Audience | TokenRefusal::Unavailable) => {
                later("No document is signed at the moment").into()
            }
            SigningOutcome::Wait(parked) => LiveOutcome::Park(parked),
        }
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
mod tests;
