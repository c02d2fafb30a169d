//! Session tokens of EC2 and AliYun: `PUT /latest/api/token`.

use std::sync::LazyLock;

use super::sheet::{Sheet, TEXT};
use crate::http::{Method, Response, Status};
use crate::store::{Call, Condition, Guard, Live, Methods, Outcome};
use crate::token::Kind;

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

/// A proxy in the guest that forwards outside requests must not get a token for them.
static GUARDS: LazyLock<[Guard; 1]> = LazyLock::new(|| [UNPROXIED.clone()]);
static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(Status(404), &[]));
static OPTIONS: LazyLock<Response> =
    LazyLock::new(|| Response::new(Status(204), None, &[("Allow", &METHODS.to_string())], ""));

/// Refuses requests through a proxy.
pub(super) static UNPROXIED: LazyLock<Guard> = LazyLock::new(|| Guard {
    condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
    otherwise: Response::error(Status(403), &[]),
});

/// Adds the token route. `ttl` names the header field with the requested seconds; `hop_limit` is the TTL of the
/// response's packets.
pub(super) fn present(sheet: &mut Sheet<'_>, kind: Kind, ttl: &'static str, hop_limit: u8) {
    sheet.live(PATH, METHODS, &*GUARDS, Tokens { kind, ttl, hop_limit });
}

/// Adds a token route that answers 404 to every method. Clients that can work without a token then do so.
pub(super) fn absent(sheet: &mut Sheet<'_>) {
    sheet.live(PATH, EVERY_METHOD, &[], NoTokens);
}

#[derive(Debug)]
struct Tokens {
    kind: Kind,
    ttl: &'static str,
    hop_limit: u8,
}

impl Tokens {
    /// Returns the requested lifetime in seconds.
    fn ttl(&self, call: &Call<'_>) -> Option<u32> {
        let digits = call.request.headers.get(self.ttl)?;
        let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b.is_ascii_digit()))?;
        digits.parse().ok().filter(|ttl| (1..=self.kind.longest_ttl_seconds()).contains(ttl))
    }
}

impl Live for Tokens {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        if call.request.target.path != PATH {
            return Response::error(Status(403), &[]).into();
        }
        if call.request.method == Method::Options {
            return OPTIONS.clone().into();
        }
        let Some(ttl) = self.ttl(call) else { return Response::error(Status(400), &[]).into() };
        let token = call.vm.keyring.mint(self.kind, &call.vm.owner, ttl, call.now.unix_seconds);
        let response = Response::new(Status(200), Some(TEXT), &[(self.ttl, &ttl.to_string())], token);
        response.within(self.hop_limit).into()
    }

    fn about(&self) -> &'static str {
        "a session token"
    }
}

#[derive(Debug)]
struct NoTokens;

impl Live for NoTokens {
    fn answer(&self, _: &Call<'_>) -> Outcome {
        NOT_FOUND.clone().into()
    }

    fn about(&self) -> &'static str {
        "404: no session tokens"
    }
}
