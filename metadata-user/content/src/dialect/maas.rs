//! MAAS, below the path that the guest's configuration names (cloud-init, `DataSourceMAAS`): five documents per
//! version, and messages.
//!
//! Optional documents are empty if the record lacks them: a 404 costs the client a second. If the record has
//! credentials, requests must be signed with them by OAuth 1.0's PLAINTEXT (RFC 5849 section 3.4.4). After a 401 the
//! client corrects its timestamps by the answer's `Date`.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use percent_encoding::percent_decode;
use sha2::{Digest as _, Sha256};

use super::record_values::text_form;
use super::route_builder::{BYTES, RouteBuilder, TEXT, YAML};
use super::{AccessCondition, Description, Mount};
use crate::http::target::normalise;
use crate::http::{Body, Headers, Method, Response, StatusCode};
use crate::record::Record;
use crate::record::vm::{Maas, Payload};
use crate::sink::MessageKind;
use crate::store::{LiveOutcome, LiveRequest, LiveRoute, Methods};

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/MAAS/metadata").needs(AccessCondition::Signature)],
    "`DataSourceMAAS`",
    render,
)
.remark("the path is `serve.maas_path`");

/// Versions that clients request.
const VERSIONS: [&str; 2] = ["2012-03-01", "latest"];

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    // No request can have a malformed path.
    let Ok(base) = normalise(record.serve.maas_path.as_str()) else { return };
    let keys: String = record.ssh_keys.iter().map(|key| format!("{}\n", key.key)).collect();
    let tree = Tree {
        signature: record.credentials.maas.as_deref().map(Signature::of),
        instance_id: sheet.found(TEXT, record.vm.uuid.as_str().to_owned()),
        local_hostname: sheet.found(TEXT, record.hostname.fqdn()),
        public_keys: sheet.found(TEXT, keys),
        vendor_data: vendor_data(record.vendor_data.as_ref(), sheet),
        user_data: match &record.user_data {
            Some(payload) => sheet.payload(payload),
            None => sheet.found(BYTES, ""),
        },
    };
    let methods = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    sheet.live_below(base.target().path.to_owned(), methods, &[], tree);
}

/// Renders vendor-data as a YAML mapping with the member `cloud-init`, the only one that the client reads. A script by
/// itself would be invalid YAML, and a cloud-config by itself a mapping without that member.
fn vendor_data(payload: Option<&Payload>, sheet: &mut RouteBuilder<'_>) -> Response {
    let Some(payload) = payload else { return sheet.found(YAML, "") };
    let Some(bytes) = payload.bytes() else { return sheet.unread() };
    let Some(text) = text_form(&bytes) else { return sheet.found(YAML, "") };
    let scalar = sheet.yaml_scalar(&text);
    let (before, newline) = (Bytes::from_static(b"cloud-init: "), Bytes::from_static(b"\n"));
    sheet.found(YAML, Body::join([before, scalar, newline]))
}

/// Serves everything below the path.
#[derive(Debug)]
struct Tree {
    signature: Option<Signature>,
    instance_id: Response,
    local_hostname: Response,
    public_keys: Response,
    vendor_data: Response,
    user_data: Response,
}

impl LiveRoute for Tree {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if let Some(signature) = &self.signature
            && !signature.signs(&call.request.headers)
        {
            return Response::error(StatusCode(401), &[("WWW-Authenticate", "OAuth")]).into();
        }
        let rest = call.rest.trim_start_matches('/');
        let (version, path) = rest.split_once('/').unwrap_or((rest, ""));
        let is_version = VERSIONS.contains(&version);
        let is_status = version == "status" && !path.is_empty();
        match call.request.method {
            Method::Post if is_status || (is_version && path.is_empty()) => accept(call, is_status),
            Method::Post => Response::error(StatusCode(405), &[("Allow", "GET, HEAD")]).into(),
            _ if is_status => Response::error(StatusCode(405), &[("Allow", "POST")]).into(),
            _ if is_version => self.document(path).into(),
            _ if rest.is_empty() => text(VERSIONS.join("\n")).into(),
            _ => Response::error(StatusCode(404), &[]).into(),
        }
    }

    fn about(&self) -> &'static str {
        "five documents for each version, and op=signal"
    }
}

impl Tree {
    fn document(&self, path: &str) -> Response {
        match path {
            "" => text("meta-data\nuser-data".to_owned()),
            "meta-data" => text("instance-id\nlocal-hostname\npublic-keys\nvendor-data".to_owned()),
            "meta-data/instance-id" => self.instance_id.clone(),
            "meta-data/local-hostname" => self.local_hostname.clone(),
            "meta-data/public-keys" => self.public_keys.clone(),
            "meta-data/vendor-data" => self.vendor_data.clone(),
            "user-data" => self.user_data.clone(),
            _ => Response::error(StatusCode(404), &[]),
        }
    }
}

/// Accepts a message: `op=signal` to a version, in either encoding of forms, or a report to `status/<id>`.
fn accept(call: &LiveRequest<'_>, is_status: bool) -> LiveOutcome {
    let request = call.request;
    if !is_status && !is_signal(request.target.query.as_bytes()) && !is_signal(request.body) {
        return Response::error(StatusCode(400), &[]).into();
    }
    call.vm.mailbox.send(&call.vm.sinks, MessageKind::Event, request.body, call.now.unix_seconds);
    text("OK".to_owned()).into()
}

/// Returns whether a form has `op=signal`: URL-encoded, or multipart (RFC 7578), where the name is a parameter and
/// the value follows an empty line.
fn is_signal(form: &[u8]) -> bool {
    let parts = |form: &[u8]| {
        let text = String::from_utf8_lossy(form);
        let mut after = text.split("name=\"op\"").skip(1);
        after.any(|part| part.trim_start().trim_start_matches("\r\n").starts_with("signal"))
    };
    form_urlencoded::parse(form).any(|(name, value)| name == "op" && value == "signal") || parts(form)
}

fn text(text: String) -> Response {
    Response::new(StatusCode(200), Some(TEXT), &[], Bytes::from(text))
}

// Checks OAuth 1.0 PLAINTEXT signatures in `Authorization` (RFC 5849 sections 3.4.4 and 3.5.1).

/// Maximum number of parameters read from the header field. A signed request has seven, and the realm.
const PARAMETERS: usize = 16;

/// Digest of the expected credentials. Only digests are compared, so the time of a comparison reveals nothing of the
/// secret.
#[derive(PartialEq, Eq)]
struct Signature([u8; 32]);

impl std::fmt::Debug for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signature(…)")
    }
}

impl Signature {
    /// Returns the signature of a record's credentials.
    fn of(credentials: &Maas) -> Self {
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
    fn signs(&self, headers: &Headers<'_>) -> bool {
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
        let equals = part.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&part[..equals], &part[equals + 1..]);
        let value = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        Some((percent_decode(name).collect(), percent_decode(value).collect()))
    };
    rest.split(|byte| *byte == b',').take(PARAMETERS).map(parameter).collect()
}
