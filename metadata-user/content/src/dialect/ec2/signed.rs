//! `signature`, `pkcs7` and `rsa2048`: the identity document as the operator's certificate signs it.
//!
//! `signature` is over the octets of `document`. The other two have the document within: both are the same, RSA with
//! SHA-256, while AWS's `pkcs7` is DSA. They are base64 in lines as PEM has them, without PEM's first and last line.
//!
//! They prove to others who the VM is, so they do not leave the guest's first hop and are refused through a proxy. The
//! tree's guards apply as to `document`. They exist only on a node with a certificate, and only for records that serve
//! EC2. cloud-init reads each listed name once at boot.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;

use super::super::identity::{Got, ask, lines};
use super::super::sheet::TEXT;
use super::iam;
use super::tree::Tree;
use crate::http::{Response, Status};
use crate::identity::{Desk, Refusal, Wanted};
use crate::record::{Dialect, Imdsv2, Record};
use crate::store::{Call, Live, Outcome};

static LATER: LazyLock<Response> = LazyLock::new(|| Response::error(Status(503), &[("Retry-After", "1")]));
static TOO_MANY: LazyLock<Response> = LazyLock::new(|| Response::error(Status(429), &[("Retry-After", "1")]));

/// Adds the signed forms of the document.
pub(super) fn render(record: &Record, tree: &mut Tree<'_, '_>, document: &Bytes) {
    let serve = &record.serve;
    let desk = tree.sheet().desk().filter(|desk| desk.signs_documents() && serve.serves(Dialect::Ec2));
    let Some(desk) = desk.cloned() else { return };
    let guards = iam::guards(serve.imdsv2 == Imdsv2::Required);
    for (path, wanted) in [
        ("/latest/dynamic/instance-identity/pkcs7", Wanted::Envelope(document.clone())),
        ("/latest/dynamic/instance-identity/rsa2048", Wanted::Envelope(document.clone())),
        ("/latest/dynamic/instance-identity/signature", Wanted::Signature(document.clone())),
    ] {
        tree.live(path, guards, Signed { desk: Arc::clone(&desk), wanted });
    }
}

#[derive(Debug)]
struct Signed {
    desk: Arc<Desk>,
    wanted: Wanted,
}

impl Live for Signed {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        match ask(call, &self.desk, &self.wanted) {
            Got::Token(token) => {
                let text = match self.wanted {
                    Wanted::Envelope(_) => lines(&token.text),
                    _ => token.text,
                };
                Response::new(Status(200), Some(TEXT), &[], text).within(self.desk.hop_limit()).into()
            }
            Got::Refused(Refusal::TooMany) => TOO_MANY.clone().into(),
            Got::Refused(Refusal::Audience | Refusal::Unavailable) => LATER.clone().into(),
            Got::Wait(parked) => Outcome::Park(parked),
        }
    }

    fn about(&self) -> &'static str {
        "the identity document, signed by the operator's certificate"
    }
}

#[cfg(test)]
mod tests;
