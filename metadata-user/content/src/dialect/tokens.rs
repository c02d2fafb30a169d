//! Session tokens of EC2 and AliYun at `PUT /latest/api/token`, and tokens and documents that the node's issuer signs
//! for any dialect.

use bytes::Bytes;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::route_builder::{JSON, RouteBuilder, TEXT, computed};
use crate::http::{Method, Request, Response, StatusCode};
use crate::identity::{IssuedToken, IssuerResponse, SigningRequest, TokenRefusal, VmIssuer};
use crate::record::identity::Audience;
use crate::store::path::Canonical;
use crate::store::{
    Condition, EVERY_DIALECT, Host, LiveOutcome, LiveRequest, LiveRoute, Methods, ParkedCall, RequestGuard,
};
use crate::token::TokenKind;

/// Path of tokens. The same path below another version answers 403.
const PATH: &str = "/latest/api/token";
/// Path of Akamai's tokens.
pub(super) const AKAMAI_PATH: &str = "/v1/token";
const METHODS: Methods = Methods::of(&[Method::Options, Method::Put]);
pub(super) const EVERY_METHOD: Methods = Methods::of(&[
    Method::Get,
    Method::Head,
    Method::Post,
    Method::Put,
    Method::Patch,
    Method::Delete,
    Method::Options,
]);

static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(404), &[]));
static OPTIONS: LazyLock<Response> =
    LazyLock::new(|| Response::new(StatusCode(204), None, &[("Allow", &METHODS.to_string())], ""));

/// Refuses requests through a proxy: one in the guest that forwards outside requests must not get a token for them.
pub(super) static UNPROXIED: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| {
    [RequestGuard {
        condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
        otherwise: Response::error(StatusCode(403), &[]),
    }]
});

/// Refuses requests without a valid token in this header field.
pub(super) fn required(name: &'static str, kind: TokenKind) -> RequestGuard {
    RequestGuard {
        condition: Condition::TokenNeeded { name, kind },
        otherwise: Response::error(StatusCode(401), &[]),
    }
}

/// Refuses requests with an invalid token in this header field.
pub(super) fn optional(name: &'static str, kind: TokenKind) -> RequestGuard {
    RequestGuard { condition: Condition::TokenGood { name, kind }, ..required(name, kind) }
}

/// Adds the token route. `ttl` names the header field with the requested seconds; `hop_limit` is the TTL of the
/// response's packets.
pub(super) fn present(routes: &mut RouteBuilder<'_>, kind: TokenKind, ttl: &'static str, hop_limit: u8) {
    routes.live(PATH, METHODS, &*UNPROXIED, Tokens { kind, ttl, hop_limit });
}

/// Adds a token route that answers 404 to every method. Clients that can work without a token then do so.
pub(super) fn absent(routes: &mut RouteBuilder<'_>) {
    routes.live(PATH, EVERY_METHOD, &[], computed("404: no session tokens", |_| NOT_FOUND.clone()));
}

/// Returns whether the request asks for a session token of any dialect.
pub(super) fn is_asked_for(host: Host, request: &Request<'_>) -> bool {
    let path = Canonical::of(host, request.target.path);
    request.method == Method::Put
        && match host {
            Host::Metadata => path.is(PATH) || path.is(AKAMAI_PATH),
            Host::AliYun => path.is(PATH),
            Host::Wireserver | Host::Scaleway | Host::Password | Host::HostPlugin => false,
        }
}

#[derive(Debug)]
struct Tokens {
    kind: TokenKind,
    ttl: &'static str,
    hop_limit: u8,
}

/// Returns the requested lifetime of a token in seconds, from the header field; `None` outside the kind's range.
pub(super) fn requested_ttl(call: &LiveRequest<'_>, field: &str, kind: TokenKind) -> Option<u32> {
    let digits = call.request.headers.get(field)?;
    let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok().filter(|ttl| (1..=kind.longest_ttl_seconds()).contains(ttl))
}

/// Describes what a request for a token lacks without [`requested_ttl`].
pub(super) fn lacks_ttl(
    call: &LiveRequest<'_>,
    field: &str,
    kind: TokenKind,
) -> Option<(String, StatusCode)> {
    if requested_ttl(call, field, kind).is_some() {
        return None;
    }
    let most = kind.longest_ttl_seconds();
    Some((format!("the field `{field}` with 1 to {most} seconds"), StatusCode(400)))
}

impl LiveRoute for Tokens {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if call.request.target.path != PATH {
            return Response::error(StatusCode(403), &[]).into();
        }
        if call.request.method == Method::Options {
            return OPTIONS.clone().into();
        }
        let Some(ttl) = requested_ttl(call, self.ttl, self.kind) else {
            return Response::error(StatusCode(400), &[]).into();
        };
        let token = call.vm.keyring.mint(self.kind, &call.vm.owner, ttl, call.now.unix_seconds);
        let response = Response::new(StatusCode(200), Some(TEXT), &[(self.ttl, &ttl.to_string())], token);
        response.within(self.hop_limit).into()
    }

    fn lacks(&self, call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        if call.request.target.path != PATH {
            return Some((format!("the path `{PATH}`"), StatusCode(403)));
        }
        if call.request.method == Method::Options {
            return None;
        }
        lacks_ttl(call, self.ttl, self.kind)
    }

    fn about(&self) -> &'static str {
        "a session token"
    }
}

// `/v1/identity/jwt`: a token by which others recognise the VM. It belongs to no cloud's dialect.
//
// Requests need the header field of kubevirt-imds' credentials, must not come through a proxy, and the answer does not
// leave the guest's first hop. So neither a web application that is made to fetch a URL nor a container gets a token.

const JWT_PATH: &str = "/v1/identity/jwt";
/// Media type of a JWT (RFC 7519 section 10.3.1).
const JWT: &str = "application/jwt";
/// Maximum number of query parameters that are read.
const PARAMETERS: usize = 16;
/// Length of a line of PEM (RFC 7468 section 2).
const LINE: usize = 64;
/// How long a request waits for its token. A signature takes milliseconds.
pub(super) const SIGN_WITHIN: Duration = Duration::from_secs(2);

static JWT_GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
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
pub(super) fn render(routes: &mut RouteBuilder<'_>) {
    routes.begin(EVERY_DIALECT);
    let jwt = computed("an identity token for an audience", answer_jwt);
    routes.live(JWT_PATH, Methods::READ, &*JWT_GUARDS, jwt);
}

/// Returns the only parameter `audience`.
pub(super) fn audience(query: &str) -> Option<Audience> {
    let parameters = form_urlencoded::parse(query.as_bytes()).take(PARAMETERS);
    let mut audiences = parameters.filter(|(name, _)| name == "audience").map(|(_, value)| value);
    let audience = Audience::parse(&audiences.next()?);
    audience.filter(|_| audiences.next().is_none())
}

fn answer_jwt(call: &LiveRequest<'_>) -> LiveOutcome {
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
mod tests {
    use metadata_common::addresses::Connection;
    use metadata_common::time::Now;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::{JWT_PATH, LINE, SIGN_WITHIN, lines};
    use crate::dialect::tests::{DialectGuest, NOW, full, parse};
    use crate::http::{Headers, Method, Request, RequestTarget, Response};
    use crate::identity::{IssuedToken, Issuer, Order};
    use crate::store::{LiveOutcome, ParkedCall, VmState};

    type Orders = Arc<Mutex<Vec<Order>>>;

    const HELD: [(&str, &str); 1] = [("Metadata", "true")];

    fn guest() -> (DialectGuest, Orders) {
        let orders: Orders = Arc::default();
        let list = Arc::clone(&orders);
        let issuer = Issuer::new(None, move |order| {
            list.lock().expect("sound").push(*order);
            true
        });
        let mut record = full();
        record["identity"] = serde_json::json!({"audiences": ["vault", "https://a/b?c=d"]});
        let record = parse(&record);
        let vm = VmState::alone(record.vm.uuid.as_str()).issued_by(&issuer, &record);
        (DialectGuest::with(&record, vm), orders)
    }

    fn ask(
        guest: &DialectGuest,
        mono: Duration,
        query: &str,
        fields: &[(&str, &str)],
        parked: Option<&ParkedCall>,
    ) -> LiveOutcome {
        let fields: Vec<_> =
            fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
        let target = RequestTarget { path: JWT_PATH, query };
        let request = Request { method: Method::Get, target, headers: Headers::new(&fields), body: b"" };
        let at = |address: &str, port| (address.parse().expect("an address"), port);
        let connection =
            Connection { slot: 0, local: at("169.254.169.254", 80), remote: at("10.0.2.15", 40_000) };
        guest.responses().answer(Now { mono, unix_seconds: NOW }, &connection, &request, parked)
    }

    fn parked(outcome: LiveOutcome) -> ParkedCall {
        let LiveOutcome::Park(parked) = outcome else { panic!("{outcome:?}") };
        parked
    }

    fn ready(outcome: LiveOutcome) -> Response {
        let LiveOutcome::Ready(response) = outcome else { panic!("{outcome:?}") };
        response
    }

    #[test]
    fn a_request_waits_for_its_token_which_travels_one_hop() {
        let (guest, orders) = guest();
        let query = "format=full&audience=https%3A%2F%2Fa%2Fb%3Fc%3Dd";
        let first = parked(ask(&guest, Duration::ZERO, query, &HELD, None));
        assert_eq!(first.until, SIGN_WITHIN);
        let again = parked(ask(&guest, SIGN_WITHIN / 2, query, &HELD, Some(&first)));
        assert_eq!(again.until, SIGN_WITHIN, "the time is that of the first attempt");
        let order = orders.lock().expect("sound").pop().expect("an order");
        assert_eq!(order.audience(), Some("https://a/b?c=d"));
        order.signed(IssuedToken { text: "a.b.c".into(), issued: NOW, expires: NOW + 60 });
        let answer = ready(ask(&guest, SIGN_WITHIN / 2, query, &HELD, Some(&again)));
        assert_eq!((answer.status().0, answer.hop_limit()), (200, Some(1)));
        assert_eq!(
            (answer.field("Content-Type"), &*answer.body().to_bytes()),
            (Some("application/jwt"), &b"a.b.c"[..])
        );
    }

    #[test]
    fn a_request_whose_record_is_replaced_meanwhile_orders_again() {
        let orders: Orders = Arc::default();
        let list = Arc::clone(&orders);
        let issuer = Issuer::new(None, move |order| {
            list.lock().expect("sound").push(*order);
            true
        });
        let record = parse(&full());
        let of_version = || {
            DialectGuest::with(&record, VmState::alone(record.vm.uuid.as_str()).issued_by(&issuer, &record))
        };
        let (old, new) = (of_version(), of_version());
        let first = parked(ask(&old, Duration::ZERO, "audience=vault", &HELD, None));
        orders.lock().expect("sound").clear();
        let again = parked(ask(&new, SIGN_WITHIN / 2, "audience=vault", &HELD, Some(&first)));
        assert_eq!((again.until, orders.lock().expect("sound").len()), (SIGN_WITHIN, 1));
    }

    #[test]
    fn a_request_that_waited_long_enough_is_to_come_again() {
        let (guest, orders) = guest();
        let first = parked(ask(&guest, Duration::ZERO, "audience=vault", &HELD, None));
        let late = ready(ask(&guest, SIGN_WITHIN, "audience=vault", &HELD, Some(&first)));
        assert_eq!((late.status().0, late.field("Retry-After")), (503, Some("1")));
        orders.lock().expect("sound").clear();
        let failed = ready(ask(&guest, Duration::ZERO, "audience=vault", &HELD, Some(&first)));
        assert_eq!(failed.status().0, 503);
    }

    #[test]
    fn a_request_needs_the_field_and_one_allowed_audience() {
        let (guest, orders) = guest();
        let long = format!("audience={}", "x".repeat(256));
        type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], u16);
        let cases: [Case<'_>; 10] = [
            ("audience=vault", &[], 400),
            ("audience=vault", &[("Metadata", "false")], 400),
            ("audience=vault", &[("Metadata", "true"), ("X-Forwarded-For", "10.0.0.1")], 403),
            ("", &HELD, 400),
            ("audience=", &HELD, 400),
            ("audience=a%20b", &HELD, 400),
            ("audience=%ff", &HELD, 400),
            ("audience=vault&audience=other", &HELD, 400),
            (&long, &HELD, 400),
            ("audience=other", &HELD, 403),
        ];
        for (query, fields, status) in cases {
            let answer = ready(ask(&guest, Duration::ZERO, query, fields, None));
            assert_eq!(answer.status().0, status, "{query} {fields:?}");
        }
        assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
    }

    #[test]
    fn a_node_without_an_issuer_has_no_such_path() {
        assert_eq!(DialectGuest::of(&full()).status(JWT_PATH, &HELD), 404);
    }

    #[test]
    fn lines_are_those_of_pem() {
        for (bytes, expected) in [(0, 0), (1, 1), (LINE, 1), (LINE + 1, 2), (3 * LINE, 3)] {
            let text = lines(&vec![b'A'; bytes]);
            let found: Vec<_> = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
            assert_eq!(found.len(), expected);
            assert!(found.iter().all(|line| line.len() <= LINE) && !text.ends_with(b"\n"));
        }
    }
}
