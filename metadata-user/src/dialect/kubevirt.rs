//! The endpoints of kubevirt-imds: the VM's service account, its token, and a health check.

use std::sync::{Arc, LazyLock};

use super::Dialect;
use super::sheet::{JSON, Sheet, TEXT};
use crate::http::{Response, Status};
use crate::record::values::{Secret, Timestamp};
use crate::record::{self, Record};
use crate::store::{Condition, Guard};

pub(super) const DIALECT: Dialect = Dialect { name: record::Dialect::Kubevirt, render };

/// Credentials go to whoever can set a header, and not through a proxy: a guest's web application that is
/// tricked into fetching a URL can do neither.
static GUARDS: LazyLock<Arc<[Guard]>> = LazyLock::new(|| {
    let missing = r#"{"error":"missing_header","message":"Metadata: true header is required"}"#;
    Arc::new([
        Guard {
            condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
            otherwise: Response::error(Status(403), &[]),
        },
        Guard {
            condition: Condition::HeaderIs { name: "Metadata", value: "true" },
            otherwise: json(Status(400), missing),
        },
    ])
});

fn json(status: Status, document: &str) -> Response {
    Response::new(status, Some(JSON), &[], format!("{document}\n").into())
}

fn render(record: &Record, sheet: &mut Sheet<'_>) {
    let identity = sheet.found(JSON, format!("{}\n", identity(record)));
    sheet.guarded("/v1/identity", &GUARDS, identity);
    let token = sheet.share(token(record));
    sheet.guarded("/v1/token", &GUARDS, token);
    let health = sheet.found(TEXT, String::from("OK"));
    sheet.open("/healthz", health);
}

fn identity(record: &Record) -> String {
    let account = record.credentials.service_account.as_ref();
    let namespace = account.and_then(|account| account.namespace.as_ref());
    format!(
        r#"{{"namespace":{},"serviceAccountName":{},"vmName":{}}}"#,
        quoted(namespace.map_or(record.namespace(), |namespace| namespace.as_str())),
        quoted(account.map_or("", |account| account.name.as_str())),
        quoted(record.vm.name.as_str()),
    )
}

fn token(record: &Record) -> Response {
    let literal = || -> Option<(&Secret, &Timestamp)> {
        let token = record.credentials.service_account.as_ref()?.token.as_ref()?;
        Some((token.text.as_ref()?, token.expires.as_ref()?))
    };
    match literal() {
        Some((text, expires)) => {
            let (text, expires) = (quoted(text.expose()), quoted(expires.as_str()));
            json(Status(200), &format!(r#"{{"token":{text},"expirationTimestamp":{expires}}}"#))
        }
        None => json(Status(500), r#"{"error":"token_unavailable","message":"no token source"}"#),
    }
}

/// A JSON string.
fn quoted(text: &str) -> serde_json::Value {
    text.into()
}
