//! `dynamic/instance-identity`: the identity document, and its signature by the operator's certificate.
//!
//! `pkcs7` does not have the document within. `audience=` becomes the document's last member, which the verifier adds
//! to its copy (<https://www.alibabacloud.com/help/en/ecs/user-guide/use-instance-identities>). The directory exists
//! only on a node with a certificate. The signature is refused through a proxy and does not leave the guest's first
//! hop.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use serde_json::{Value, json};

use super::super::identity::{audience, signed};
use super::super::route_builder::{RouteBuilder, TEXT};
use super::super::tokens::UNPROXIED;
use super::{OPTIONAL, REQUIRED};
use crate::http::{Response, StatusCode};
use crate::identity::{SigningRequest, VmIssuer};
use crate::record::{Dialect, Imdsv2, Record};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};

const DIRECTORY: &str = "/latest/dynamic/instance-identity";

static BAD_AUDIENCE: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(400), &[]));

static WITH_TOKEN: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| [UNPROXIED.clone(), REQUIRED[0].clone()]);
static WITHOUT_TOKEN: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED.clone(), OPTIONAL[0].clone()]);

/// Adds the directory; returns false on a node that signs no documents.
pub(super) fn render(record: &Record, sheet: &mut RouteBuilder<'_>, guards: &'static [RequestGuard]) -> bool {
    let serves = record.serve.serves(Dialect::AliYun);
    let Some(issuer) = sheet.issuer().filter(|issuer| issuer.signs_documents() && serves).cloned() else {
        return false;
    };
    let text: Bytes = document(record).to_string().into();
    let listings = [("/latest/dynamic", "instance-identity/"), (DIRECTORY, "document\npkcs7")];
    for (path, listing) in listings {
        let response = sheet.found(TEXT, listing);
        sheet.guarded(path, guards, response);
    }
    let response = sheet.found(TEXT, text.clone());
    sheet.guarded(format!("{DIRECTORY}/document"), guards, response);
    let guards = if record.serve.imdsv2 == Imdsv2::Required { &*WITH_TOKEN } else { &*WITHOUT_TOKEN };
    sheet.live(format!("{DIRECTORY}/pkcs7"), Methods::READ, guards, Signed { issuer, document: text });
    true
}

fn document(record: &Record) -> Value {
    let mut document = json!({
        "instance-id": record.ec2_id(),
        "instance-type": record.instance_type(),
        "owner-account-id": record.vm.project.account.as_str(),
        "region-id": record.placement.region.as_str(),
        "serial-number": record.unique_uuid(),
        "zone-id": record.placement.zone.as_str(),
    });
    let nics = &record.network.nics;
    if let Some(id) = record.ami_id() {
        document["image-id"] = id.into();
    }
    if let Some(mac) = nics.iter().find(|nic| nic.is_physical()).and_then(|nic| nic.mac) {
        document["mac"] = mac.to_string().into();
    }
    if let Some(cidr) = nics.first().and_then(|nic| nic.ipv4().next()) {
        document["private-ipv4"] = cidr.address.to_string().into();
    }
    document
}

#[derive(Debug)]
struct Signed {
    issuer: Arc<VmIssuer>,
    document: Bytes,
}

impl Signed {
    /// Returns what a query wants to be signed; `None` if its audience is malformed.
    fn wanted(&self, query: &str) -> Option<SigningRequest> {
        if query.is_empty() {
            return Some(SigningRequest::Detached { document: self.document.clone(), audience: None });
        }
        let audience = audience(query)?;
        let mut text = self.document[..self.document.len() - 1].to_vec();
        text.extend_from_slice(format!(",\"audience\":{}}}", Value::from(audience.as_str())).as_bytes());
        Some(SigningRequest::Detached { document: text.into(), audience: Some(audience) })
    }
}

impl LiveRoute for Signed {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let Some(wanted) = self.wanted(call.request.target.query) else { return BAD_AUDIENCE.clone().into() };
        signed(call, &self.issuer, &wanted)
    }

    fn lacks(&self, call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        let is_refused = self.wanted(call.request.target.query).is_none();
        is_refused.then(|| ("no query, or `audience` with a value of its form".into(), StatusCode(400)))
    }

    fn about(&self) -> &'static str {
        "the signature of the identity document by the operator's certificate"
    }
}

#[cfg(test)]
mod tests;
