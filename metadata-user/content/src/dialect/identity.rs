//! `/v1/identity/jwt`: a token by which others recognise the VM. It belongs to no cloud's dialect.
//!
//! Requests need the header field of kubevirt-imds' credentials, must not come through a proxy, and the answer does not
//! leave the guest's first hop. So neither a web application that is made to fetch a URL nor a container gets a token.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;

use super::route_builder::{JSON, RouteBuilder, TEXT};
use super::tokens::UNPROXIED;
use crate::http::{Response, StatusCode};
use crate::identity::{IssuedToken, IssuerResponse, SigningRequest, TokenRefusal, VmIssuer};
use crate::record::identity::Audience;
use crate::store::{
    Condition, EVERY_DIALECT, LiveOutcome, LiveRequest, LiveRoute, Methods, ParkedCall, RequestGuard,
};

const PATH: &str = "/v1/identity/jwt";
/// Media type of a JWT (RFC 7519 section 10.3.1).
const JWT: &str = "application/jwt";
/// Maximum number of query parameters that are read.
const PARAMETERS: usize = 16;
/// Length of a line of PEM (RFC 7468 section 2).
const LINE: usize = 64;
/// How long a request waits for its token. A signature takes milliseconds.
pub(super) const SIGN_WITHIN: Duration = Duration::from_secs(2);

static GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    let needed = Condition::HeaderIs { name: "Metadata", value: "true" };
    let missing = error(StatusCode(400), &[], "missing_header", "Metadata: true header is required");
    [UNPROXIED[0].clone(), RequestGuard { condition: needed, otherwise: missing }]
});

static BAD_AUDIENCE: LazyLock<Response> = LazyLock::new(|| {
    let why = format!("expected one parameter `audience` of {}", Audience::FORM);
    error(StatusCode(400), &[], "invalid_audience", &why)
});
static REFUSED: LazyLock<Response> = LazyLock::new(|| {
    error(StatusCode(403), &[], "audience_not_allowed", "the VM's record does not list this audience")
});
static TOO_MANY: LazyLock<Response> = LazyLock::new(|| {
    error(
        StatusCode(429),
        &[("Retry-After", "1")],
        "too_many_requests",
        "use a token again until half of its lifetime",
    )
});
static UNAVAILABLE: LazyLock<Response> = LazyLock::new(|| {
    error(StatusCode(503), &[("Retry-After", "1")], "token_unavailable", "no token is signed at the moment")
});

fn error(status: StatusCode, fields: &[(&str, &str)], name: &str, message: &str) -> Response {
    let document = serde_json::json!({ "error": name, "message": message });
    Response::new(status, Some(JSON), fields, format!("{document}\n"))
}

/// Adds the path, on a node with an issuer.
pub(super) fn render(sheet: &mut RouteBuilder<'_>) {
    sheet.begin(EVERY_DIALECT);
    sheet.live(PATH, Methods::READ, &*GUARDS, Jwt);
}

#[derive(Debug)]
struct Jwt;

/// Returns the only parameter `audience`.
pub(super) fn audience(query: &str) -> Option<Audience> {
    let parameters = form_urlencoded::parse(query.as_bytes()).take(PARAMETERS);
    let mut audiences = parameters.filter(|(name, _)| name == "audience").map(|(_, value)| value);
    let audience = Audience::parse(&audiences.next()?);
    audience.filter(|_| audiences.next().is_none())
}

impl LiveRoute for Jwt {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let Some(issuer) = &call.vm.issuer else { return UNAVAILABLE.clone().into() };
        let Some(audience) = audience(call.request.target.query) else { return BAD_AUDIENCE.clone().into() };
        let token = |token: IssuedToken| Response::new(StatusCode(200), Some(JWT), &[], token.text);
        let refused = |why| match why {
            TokenRefusal::Audience => REFUSED.clone(),
            TokenRefusal::TooMany => TOO_MANY.clone(),
            TokenRefusal::Unavailable => UNAVAILABLE.clone(),
        };
        issue(call, issuer, &SigningRequest::token(&audience), token, refused)
    }

    fn about(&self) -> &'static str {
        "an identity token for an audience"
    }
}

static FORBIDDEN: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(403), &[]));
static NOT_SIGNED: LazyLock<Response> =
    LazyLock::new(|| Response::error(StatusCode(503), &[("Retry-After", "1")]));
static ASKS_LESS: LazyLock<Response> =
    LazyLock::new(|| Response::error(StatusCode(429), &[("Retry-After", "1")]));

/// Answers with a signed document as text: a signature in one line, PKCS#7 in lines as PEM has them.
pub(super) fn signed(call: &LiveRequest<'_>, issuer: &Arc<VmIssuer>, wanted: &SigningRequest) -> LiveOutcome {
    let document = |token: IssuedToken| {
        let text = if let SigningRequest::Signature(_) = wanted { token.text } else { lines(&token.text) };
        Response::new(StatusCode(200), Some(TEXT), &[], text)
    };
    let refused = |why| match why {
        TokenRefusal::Audience => FORBIDDEN.clone(),
        TokenRefusal::TooMany => ASKS_LESS.clone(),
        TokenRefusal::Unavailable => NOT_SIGNED.clone(),
    };
    issue(call, issuer, wanted, document, refused)
}

/// Breaks base64 into lines. The last one has no line break.
fn lines(text: &[u8]) -> Bytes {
    text.chunks(LINE).collect::<Vec<_>>().join(&b'\n').into()
}

/// Answers a request of any dialect by what it wants: with a token or document, which does not leave the guest's first
/// hops, or with a refusal. Parks it until then; a request that has waited for [`SIGN_WITHIN`] is refused.
pub(super) fn issue(
    call: &LiveRequest<'_>,
    issuer: &Arc<VmIssuer>,
    wanted: &SigningRequest,
    issued: impl FnOnce(IssuedToken) -> Response,
    refused: impl FnOnce(TokenRefusal) -> Response,
) -> LiveOutcome {
    let state = issuer.number();
    let has_waited = call.parked.is_some_and(|parked| parked.state == state);
    match issuer.ask_for(call.connection.slot, wanted, call.now, has_waited) {
        IssuerResponse::Token(token) => issued(token).within(issuer.hop_limit()).into(),
        IssuerResponse::Refused(refusal) => refused(refusal).into(),
        IssuerResponse::Wait => match call.parked {
            Some(parked) if parked.wait.is_ended() || parked.until <= call.now.mono => {
                refused(TokenRefusal::Unavailable).into()
            }
            Some(parked) => LiveOutcome::Park(ParkedCall { state, ..parked.clone() }),
            None => {
                let (until, wait) = (call.now.mono + SIGN_WITHIN, call.vm.mailbox.wait());
                LiveOutcome::Park(ParkedCall { until, has_answer: false, state, wait })
            }
        },
    }
}

#[cfg(test)]
mod tests;
