//! `signature`, `pkcs7` and `rsa2048`: the identity document as the operator's certificate signs it.
//!
//! `signature` is over the bytes of `document`. The other two have the document within: both are the same, RSA with
//! SHA-256, while AWS's `pkcs7` is DSA. They are base64 in lines as PEM has them, without PEM's first and last line.
//!
//! They prove to others who the VM is, so they do not leave the guest's first hop and are refused through a proxy. A
//! record that requires session tokens requires them here too. The three exist only on a node with a certificate, and
//! only for records that serve EC2. cloud-init reads each listed name once at boot.

use std::sync::Arc;

use bytes::Bytes;

use super::super::identity::signed;
use super::iam;
use super::tree::Tree;
use crate::identity::{SigningRequest, VmIssuer};
use crate::record::{Dialect, Imdsv2, Record};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute};

/// Adds the signed forms of the document.
pub(super) fn render(record: &Record, tree: &mut Tree<'_, '_>, document: &Bytes) {
    let serve = &record.serve;
    let issuer =
        tree.sheet().issuer().filter(|issuer| issuer.signs_documents() && serve.serves(Dialect::Ec2));
    let Some(issuer) = issuer.cloned() else { return };
    let guards = iam::guards(serve.imdsv2 == Imdsv2::Required);
    for (path, wanted) in [
        ("/latest/dynamic/instance-identity/pkcs7", SigningRequest::Envelope(document.clone())),
        ("/latest/dynamic/instance-identity/rsa2048", SigningRequest::Envelope(document.clone())),
        ("/latest/dynamic/instance-identity/signature", SigningRequest::Signature(document.clone())),
    ] {
        tree.live(path, guards, Signed { issuer: Arc::clone(&issuer), wanted });
    }
}

#[derive(Debug)]
struct Signed {
    issuer: Arc<VmIssuer>,
    wanted: SigningRequest,
}

impl LiveRoute for Signed {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        signed(call, &self.issuer, &self.wanted)
    }

    fn about(&self) -> &'static str {
        "the identity document, signed by the operator's certificate"
    }
}

#[cfg(test)]
mod tests;
