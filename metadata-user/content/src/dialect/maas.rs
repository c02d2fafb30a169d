//! MAAS, below the path that the guest's configuration names (cloud-init, `DataSourceMAAS`): five documents per
//! version, and messages.
//!
//! Optional documents are empty if the record lacks them: a 404 costs the client a second. If the record has
//! credentials, requests must be signed with them by OAuth 1.0's PLAINTEXT (RFC 5849 section 3.4.4). After a 401 the
//! client corrects its timestamps by the answer's `Date`.

use bytes::Bytes;
use percent_encoding::percent_decode;
use sha2::{Digest as _, Sha256};

use super::common::text_form;
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

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    // No request can have a malformed path.
    let Ok(base) = normalise(record.serve.maas_path.as_str()) else { return };
    let keys: String = record.ssh_keys.iter().map(|key| format!("{}\n", key.key)).collect();
    let tree = Tree {
        signature: record.credentials.maas.as_deref().map(Signature::of),
        instance_id: routes.found(TEXT, record.vm.uuid.as_str().to_owned()),
        local_hostname: routes.found(TEXT, record.hostname.fqdn()),
        public_keys: routes.found(TEXT, keys),
        vendor_data: vendor_data(record.vendor_data.as_ref(), routes),
        user_data: match &record.user_data {
            Some(payload) => routes.payload(payload),
            None => routes.found(BYTES, ""),
        },
    };
    let methods = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    routes.live_below(base.target().path.to_owned(), methods, &[], tree);
}

/// Returns whether the tree is below the mount, as it is unless the record names another path.
pub(super) fn is_mounted(record: &Record) -> bool {
    let Ok(base) = normalise(record.serve.maas_path.as_str()) else { return true };
    DIALECT.mounts.iter().any(|mount| mount.holds(base.target().path))
}

/// Renders vendor-data as a YAML mapping with the member `cloud-init`, the only one that the client reads. A script by
/// itself would be invalid YAML, and a cloud-config by itself a mapping without that member.
fn vendor_data(payload: Option<&Payload>, routes: &mut RouteBuilder<'_>) -> Response {
    let Some(payload) = payload else { return routes.found(YAML, "") };
    let Some(bytes) = payload.bytes() else { return routes.unread() };
    let Some(text) = text_form(&bytes) else { return routes.found(YAML, "") };
    let scalar = routes.yaml_scalar(&text);
    let (before, newline) = (Bytes::from_static(b"cloud-init: "), Bytes::from_static(b"\n"));
    routes.found(YAML, Body::join([before, scalar, newline]))
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, parse, rendered};
    use crate::http::{Method, Response};
    use crate::mailbox::Mailbox;
    use crate::sink::unattended;
    use crate::store::{Interner, Responses, VmState};
    use crate::token::Keyring;

    const BASE: &str = "/MAAS/metadata/2012-03-01";

    fn get(responses: &Responses, path: &str, fields: &[(&str, &str)]) -> Response {
        ask_with(responses, Method::Get, path, fields, b"")
    }

    fn text(answer: &Response) -> String {
        String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
    }

    /// The full record with credentials whose secret needs encoding.
    fn signed() -> Value {
        let mut record = full();
        record["credentials"]["maas"] =
            json!({"consumer_key": "ck", "token_key": "tk", "token_secret": "s %&é"});
        record
    }

    /// `Authorization` in the form that cloud-init's library writes.
    const GOOD: &str = "OAuth oauth_nonce=\"1\", oauth_timestamp=\"2\", oauth_version=\"1.0\", \
                    oauth_signature_method=\"PLAINTEXT\", oauth_consumer_key=\"ck\", oauth_token=\"tk\", \
                    oauth_signature=\"%26s%2520%2525%2526%25C3%25A9\"";

    #[test]
    fn every_version_has_all_documents_and_absent_values_are_empty() {
        let mut record = full();
        record["ssh_keys"] = json!([{"name": "a", "key": "ssh-a"}, {"name": "b", "key": "ssh-b"}]);
        let responses = rendered(&record);
        for (path, wanted) in [
            ("/MAAS/metadata", "2012-03-01\nlatest"),
            ("/MAAS/metadata/2012-03-01", "meta-data\nuser-data"),
            ("/MAAS/metadata/latest/meta-data/local-hostname", "web-1.example.internal"),
            ("/MAAS/metadata/2012-03-01/meta-data/public-keys", "ssh-a\nssh-b\n"),
            ("/MAAS/metadata/2012-03-01/user-data", "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"),
        ] {
            assert_eq!(text(&get(&responses, path, &[])), wanted, "{path}");
        }
        let vendor_data = text(&get(&responses, &format!("{BASE}/meta-data/vendor-data"), &[]));
        let vendor_data: Value = serde_yaml::from_str(&vendor_data).expect("YAML");
        assert_eq!(vendor_data, json!({"cloud-init": "#cloud-config\n{}\n"}));
        for field in ["user_data", "vendor_data", "ssh_keys"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        let responses = rendered(&record);
        for path in ["meta-data/public-keys", "meta-data/vendor-data", "user-data"] {
            let answer = get(&responses, &format!("{BASE}/{path}"), &[]);
            assert_eq!((answer.status().0, text(&answer).as_str()), (200, ""), "{path}");
        }
        for path in ["/MAAS", "/MAAS/metadata/2012-03-02/user-data", "/MAAS/metadata/latest/meta-data/x"] {
            assert_eq!(get(&responses, path, &[]).status().0, 404, "{path}");
        }
    }

    #[test]
    fn the_record_sets_the_path() {
        let mut record = full();
        record["serve"]["maas_path"] = json!("//my//m%41as/");
        assert_eq!(get(&rendered(&record), "/my/mAas/latest/meta-data/instance-id", &[]).status().0, 200);
        assert_eq!(get(&rendered(&record), &format!("{BASE}/user-data"), &[]).status().0, 404);
    }

    #[test]
    fn requests_must_be_signed_with_the_records_credentials() {
        let responses = rendered(&signed());
        let path = format!("{BASE}/user-data");
        assert_eq!(
            get(&responses, &path, &[("authorization", GOOD), ("X-Forwarded-For", "a")]).status().0,
            200
        );
        assert_eq!(get(&responses, &path, &[("Authorization", &GOOD.replace(", ", ","))]).status().0, 200);
        assert_eq!(
            get(&responses, &path, &[("Authorization", &GOOD.replacen("OAuth", "oauth", 1))]).status().0,
            200
        );
        for (found, other) in [
            ("\"ck\"", "\"cK\""),
            ("\"tk\"", "\"\""),
            ("%26s", "s"),
            ("%26s", "%26%26s"),
            ("%25A9", "%25A8"),
            ("PLAINTEXT", "HMAC-SHA1"),
            ("OAuth", "Basic"),
            ("oauth_token=", "oauth_tok="),
            ("oauth_version=\"1.0\"", "oauth_token=\"tk\""),
            ("oauth_nonce=\"1\"", "oauth_nonce=1"),
        ] {
            let header = GOOD.replacen(found, other, 1);
            let answer = get(&responses, &path, &[("Authorization", &header)]);
            assert_eq!(answer.status().0, 401, "{header}");
        }
        let answer = get(&responses, &path, &[]);
        assert_eq!((answer.status().0, answer.field("WWW-Authenticate")), (401, Some("OAuth")));
        assert_eq!(ask_with(&responses, Method::Post, BASE, &[], b"op=signal").status().0, 401);
        assert!(!format!("{responses:?}").contains("s %&"), "a secret is in the debug output");
    }

    #[test]
    fn signals_are_accepted_and_forwarded() {
        let mut record = full();
        record["sinks"] = json!({"events": "file:/nowhere/events.jsonl"});
        let record = parse(&record);
        let outbox = unattended();
        let mailbox = Arc::new(Mailbox::new(record.vm.uuid.as_str(), &outbox));
        let vm = VmState::of(&record, Arc::new(Keyring::ephemeral()), mailbox);
        let responses = crate::dialect::render(&record, &mut Interner::new(), vm);
        let parts = b"--x\r\nContent-Disposition: form-data; name=\"op\"\r\n\r\nsignal\r\n--x--\r\n";
        let other = b"--x\r\nContent-Disposition: form-data; name=\"op\"\r\n\r\nnetboot_off\r\n--x--\r\n";
        for (path, body, wanted) in [
            (BASE, &b"op=signal&status=OK"[..], "OK"),
            (BASE, parts, "OK"),
            ("/MAAS/metadata/status/abc", b"{}", "OK"),
            (BASE, other, "Bad Request\n"),
            (BASE, b"", "Bad Request\n"),
            ("/MAAS/metadata/2012-03-01/user-data", b"op=signal", "Method Not Allowed\n"),
        ] {
            let answer = ask_with(&responses, Method::Post, path, &[], body);
            assert_eq!(text(&answer), wanted, "{path} {}", String::from_utf8_lossy(body));
        }
        assert_eq!(outbox.counts().waiting, 3);
        assert_eq!(get(&responses, "/MAAS/metadata/status/abc", &[]).field("Allow"), Some("POST"));
    }
}
