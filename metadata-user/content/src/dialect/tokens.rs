//! Session tokens of EC2 and AliYun: `PUT /latest/api/token`.

use std::sync::LazyLock;

use super::route_builder::{RouteBuilder, TEXT};
use crate::http::{Method, Response, StatusCode};
use crate::store::{Condition, LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};
use crate::token::TokenKind;

/// Path of tokens. The same path below another version answers 403.
const PATH: &str = "/latest/api/token";
const METHODS: Methods = Methods::of(&[Method::Options, Method::Put]);
const EVERY_METHOD: Methods = Methods::of(&[
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
pub(super) fn present(sheet: &mut RouteBuilder<'_>, kind: TokenKind, ttl: &'static str, hop_limit: u8) {
    sheet.live(PATH, METHODS, &*UNPROXIED, Tokens { kind, ttl, hop_limit });
}

/// Adds a token route that answers 404 to every method. Clients that can work without a token then do so.
pub(super) fn absent(sheet: &mut RouteBuilder<'_>) {
    sheet.live(PATH, EVERY_METHOD, &[], NoTokens);
}

#[derive(Debug)]
struct Tokens {
    kind: TokenKind,
    ttl: &'static str,
    hop_limit: u8,
}

impl Tokens {
    /// Returns the requested lifetime in seconds.
    fn ttl(&self, call: &LiveRequest<'_>) -> Option<u32> {
        let digits = call.request.headers.get(self.ttl)?;
        let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b.is_ascii_digit()))?;
        digits.parse().ok().filter(|ttl| (1..=self.kind.longest_ttl_seconds()).contains(ttl))
    }
}

impl LiveRoute for Tokens {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if call.request.target.path != PATH {
            return Response::error(StatusCode(403), &[]).into();
        }
        if call.request.method == Method::Options {
            return OPTIONS.clone().into();
        }
        let Some(ttl) = self.ttl(call) else { return Response::error(StatusCode(400), &[]).into() };
        let token = call.vm.keyring.mint(self.kind, &call.vm.owner, ttl, call.now.unix_seconds);
        let response = Response::new(StatusCode(200), Some(TEXT), &[(self.ttl, &ttl.to_string())], token);
        response.within(self.hop_limit).into()
    }

    fn lacks(&self, call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        if call.request.target.path != PATH {
            return Some((format!("the path `{PATH}`"), StatusCode(403)));
        }
        let is_refused = call.request.method != Method::Options && self.ttl(call).is_none();
        let (field, most) = (self.ttl, self.kind.longest_ttl_seconds());
        is_refused.then(|| (format!("the field `{field}` with 1 to {most} seconds"), StatusCode(400)))
    }

    fn about(&self) -> &'static str {
        "a session token"
    }
}

#[derive(Debug)]
struct NoTokens;

impl LiveRoute for NoTokens {
    fn answer(&self, _: &LiveRequest<'_>) -> LiveOutcome {
        NOT_FOUND.clone().into()
    }

    fn about(&self) -> &'static str {
        "404: no session tokens"
    }
}
