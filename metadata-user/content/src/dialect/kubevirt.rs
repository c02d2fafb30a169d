//! The endpoints of kubevirt-imds: the VM's service account, its token, and a health check.

use std::sync::LazyLock;

use super::route_builder::{JSON, RouteBuilder, computed};
use super::tokens::UNPROXIED;
use super::{AccessCondition, Description, Mount};
use crate::http::{Response, StatusCode};
use crate::record::Record;
use crate::record::values::{Secret, Timestamp};
use crate::store::{Condition, Methods, RequestGuard};

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/v1/identity").needs(AccessCondition::Field("Metadata", "true")),
        Mount::open("/v1/token").needs(AccessCondition::Field("Metadata", "true")),
        Mount::open("/healthz"),
    ],
    "vectors",
    render,
);

/// Requests for credentials must have a header field and must not come through a proxy. So a web application in the
/// guest that an attacker makes fetch a URL gets no credentials.
static GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    let missing = r#"{"error":"missing_header","message":"Metadata: true header is required"}"#;
    [
        UNPROXIED[0].clone(),
        RequestGuard {
            condition: Condition::HeaderIs { name: "Metadata", value: "true" },
            otherwise: json(StatusCode(400), missing),
        },
    ]
});

fn json(status: StatusCode, document: &str) -> Response {
    Response::new(status, Some(JSON), &[], format!("{document}\n"))
}

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let identity = routes.found(JSON, format!("{}\n", identity(record)));
    routes.guarded("/v1/identity", &*GUARDS, identity);
    match token(record) {
        Some((text, expires)) => {
            let document = format!(
                r#"{{"token":{},"expirationTimestamp":{}}}"#,
                quoted(text.expose()),
                quoted(expires.as_str())
            );
            let current = routes.share(json(StatusCode(200), &document));
            let expired = routes.share(unavailable("the token has expired"));
            let expires = expires.unix_seconds();
            // A newer token comes with a newer record.
            let token = computed("the service account's token until it expires", move |call| {
                let now = i64::try_from(call.now.unix_seconds).unwrap_or(i64::MAX);
                if now < expires { current.clone() } else { expired.clone() }
            });
            routes.live("/v1/token", Methods::READ, &*GUARDS, token);
        }
        None => {
            let none = routes.share(unavailable("no token source"));
            routes.guarded("/v1/token", &*GUARDS, none);
        }
    }
    routes.text("/healthz", "OK");
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

fn token(record: &Record) -> Option<(&Secret, &Timestamp)> {
    let token = record.credentials.service_account.as_ref()?.token.as_ref()?;
    Some((token.text.as_ref()?, token.expires.as_ref()?))
}

fn unavailable(why: &str) -> Response {
    json(StatusCode(500), &format!(r#"{{"error":"token_unavailable","message":{}}}"#, quoted(why)))
}

fn quoted(text: &str) -> serde_json::Value {
    text.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::dialect::tests::{NOW, ask_with, full, rendered};
    use crate::http::Method;

    #[test]
    fn a_token_is_served_until_the_second_it_expires() {
        let expires = |unix: i64| {
            let time = time::OffsetDateTime::from_unix_timestamp(unix).expect("a time");
            time.format(&time::format_description::well_known::Rfc3339).expect("RFC 3339")
        };
        let now = i64::try_from(NOW).expect("this century");
        for (expires, status, wanted) in [
            (expires(now + 1), 200, "\"token\":\"t\""),
            (expires(now), 500, "\"error\":\"token_unavailable\",\"message\":\"the token has expired\""),
        ] {
            let mut record = full();
            record["credentials"]["service_account"]["token"] = json!({"text": "t", "expires": expires});
            let responses = rendered(&record);
            let answer = ask_with(&responses, Method::Get, "/v1/token", &[("metadata", "True")], b"");
            assert_eq!(answer.status().0, status, "{expires}");
            let body = String::from_utf8(answer.body().to_bytes().to_vec()).expect("text");
            assert!(body.contains(wanted), "{body}");
            let head = ask_with(&responses, Method::Head, "/v1/token", &[("Metadata", "true")], b"");
            assert_eq!(head, answer);
        }
    }
}
