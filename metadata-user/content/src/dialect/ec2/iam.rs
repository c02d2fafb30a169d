//! IAM role and credentials of a VM.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::super::route_builder::TEXT;
use super::super::tokens::UNPROXIED;
use super::tree::Tree;
use super::{REFUSED, TOKEN};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::record::values::Timestamp;
use crate::record::vm::Iam;
use crate::record::{Dialect, Imdsv2, Record};
use crate::store::{Condition, LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};
use crate::token::TokenKind;
use metadata_common::time::Now;

const CREDENTIALS: &str = "/latest/meta-data/iam/security-credentials";
/// Stated lifetime of credentials without an expiry, in seconds; the same as AWS's. Clients then refresh them.
const LASTING_SECONDS: i64 = 6 * 3_600;

static WITH_TOKEN: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    let condition = Condition::TokenNeeded { name: TOKEN, kind: TokenKind::Aws };
    [UNPROXIED.clone(), RequestGuard { condition, otherwise: REFUSED.clone() }]
});
static WITHOUT_TOKEN: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    let condition = Condition::TokenGood { name: TOKEN, kind: TokenKind::Aws };
    [UNPROXIED.clone(), RequestGuard { condition, otherwise: REFUSED.clone() }]
});

/// Returns the guards of what must not reach a proxy.
pub(super) fn guards(needs_token: bool) -> &'static [RequestGuard] {
    if needs_token { &*WITH_TOKEN } else { &*WITHOUT_TOKEN }
}

/// Adds `iam/` if the record serves EC2.
///
/// If credentials need a token and tokens are off, requests for them get 401 and `iam/` does not list them.
pub(super) fn render(record: &Record, tree: &mut Tree<'_, '_>) {
    let serve = &record.serve;
    let Some(iam) = record.credentials.iam.as_ref().filter(|_| serve.serves(Dialect::Ec2)) else { return };
    let open = serve.imdsv1_credentials && serve.imdsv2 != Imdsv2::Required;
    let guards = guards(!open);
    tree.text("/latest/meta-data/iam/info", info(record, iam).to_string());
    if open || serve.imdsv2 != Imdsv2::Off {
        tree.directory(CREDENTIALS, guards, iam.role.to_string());
    } else {
        let listing = tree.sheet().found(TEXT, iam.role.to_string());
        tree.sheet().guarded(CREDENTIALS, guards, listing);
    }
    let path = format!("{CREDENTIALS}/{}", iam.role);
    let sheet = tree.sheet();
    match credentials(iam) {
        None => {
            let response = sheet.unread();
            sheet.guarded(path, guards, response);
        }
        Some(document) if document.contains_key("Expiration") => {
            let response = sheet.found(TEXT, Value::from(document).to_string());
            sheet.guarded(path, guards, response);
        }
        Some(document) => sheet.live(path, Methods::READ, guards, EternalCredentials { document }),
    }
}

fn info(record: &Record, iam: &Iam) -> Value {
    let account = &record.vm.project.account;
    json!({
        "Code": "Success",
        "InstanceProfileArn": format!("arn:aws:iam::{account}:instance-profile/{}", iam.role),
        "InstanceProfileId": record.instance_profile_id(iam),
        "LastUpdated": iam.updated.as_ref().map_or(super::EPOCH, |time| time.as_str()),
    })
}

/// Returns the document of a role; `None` while its source cannot be read. The answer is then 503, which AWS clients
/// retry a few times before they continue without credentials. Crawlers do not request it.
fn credentials(iam: &Iam) -> Option<Map<String, Value>> {
    let (id, secret) = (iam.access_key_id.as_ref()?, iam.secret_access_key.as_ref()?);
    let mut document = Map::new();
    let mut own = |key: &str, value: &str| document.insert(key.to_owned(), value.into());
    own("AccessKeyId", id.as_str());
    own("Code", "Success");
    own("LastUpdated", iam.updated.as_ref().map_or(super::EPOCH, |time| time.as_str()));
    own("SecretAccessKey", secret.expose());
    own("Token", iam.session_token.as_ref().map_or("", |token| token.expose()));
    own("Type", "AWS-HMAC");
    if let Some(expires) = &iam.expires {
        own("Expiration", expires.as_str());
    }
    Some(document)
}

/// Serves credentials without an expiry. Clients require one, so each answer states a time six hours ahead.
struct EternalCredentials {
    document: Map<String, Value>,
}

impl std::fmt::Debug for EternalCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lasting(…)")
    }
}

impl LiveRoute for EternalCredentials {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let mut document = self.document.clone();
        document.insert("Expiration".into(), in_a_while(call.now).into());
        Response::new(StatusCode(200), Some(TEXT), &[], Value::from(document).to_string()).into()
    }

    fn about(&self) -> &'static str {
        "credentials with an expiry six hours from now"
    }
}

fn in_a_while(now: Now) -> String {
    let seconds = i64::try_from(now.unix_seconds).unwrap_or(0).saturating_add(LASTING_SECONDS);
    Timestamp::at(seconds).map_or_else(|| super::EPOCH.to_owned(), |time| time.as_str().to_owned())
}
