//! All responses for one VM, by host, path and method.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use super::path::{Canonical, Endpoint, Host, Methods, Route};
use super::{Datasource, LiveOutcome, LiveRequest, ParkedCall, VmState};
use crate::http::{Method, Request, Response, StatusCode};
use crate::record::{Dialects, Record};
use metadata_common::addresses::Connection;
use metadata_common::time::Now;

/// Maximum number of ancestors searched for a route that answers all paths below it. No served path is deeper.
const LEVELS: usize = 32;

static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(404), &[]));
static READ_ONLY: LazyLock<Response> = LazyLock::new(|| refusal(Methods::READ.iter()));

/// Builds a 405 with `Allow` that lists each method once.
fn refusal(methods: impl Iterator<Item = Method>) -> Response {
    let mut allow: Vec<&str> = Vec::new();
    for name in methods.map(Method::as_str) {
        if !allow.contains(&name) {
            allow.push(name);
        }
    }
    Response::error(StatusCode(405), &[("Allow", &allow.join(", "))])
}

/// Result of a look-up.
#[derive(Clone, Copy, Debug)]
enum Found<'r, 'p> {
    /// A route, and the part of the path below it.
    Route(&'r Route, &'p str),
    /// Routes of the path that do not match the request's method or header fields.
    Others(&'r [Route]),
    /// No route.
    Nothing,
}

/// Result of a look-up, for reports to people.
#[derive(Clone, Debug)]
pub enum LookupExplanation<'r, 'p> {
    /// A route matches: its endpoint answers, or the first of its conditions that fails.
    Route {
        /// Path of the route.
        path: &'r str,
        /// The route that matched.
        route: &'r Route,
        /// Part of the request's path below the route.
        rest: &'p str,
    },
    /// The path has routes, but none for the method.
    Others {
        /// The routes with their paths.
        routes: Vec<(&'r str, &'r Route)>,
    },
    /// No route matches.
    Nothing,
}

/// The responses for one VM: all of them, or those of the dialects that its guest has asked for.
#[derive(Clone, Debug)]
pub struct Responses {
    /// By host; sorted by path hash, then path. Routes of one path that require a header come first.
    pub(super) routes: [Box<[Route]>; Host::ALL.len()],
    /// Path hashes of `routes`, in their order. VMs with the same paths share them, so that they stay in the CPU cache.
    pub(super) hashes: [Arc<[u32]>; Host::ALL.len()],
    pub(super) limit: RequestLimit,
    pub(super) vm: VmState,
    unrendered: Option<UnrenderedDialects>,
}

/// Dialects of a record that nobody has asked for yet.
#[derive(Clone, Debug)]
pub(crate) struct UnrenderedDialects {
    pub(crate) record: Arc<Record>,
    /// The dialects whose routes are here.
    pub(crate) rendered: Dialects,
    /// The dialects whose routes are not.
    pub(crate) missing: Dialects,
}

/// Rate limit of a VM. A request above it waits, then gets 429.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestLimit {
    /// Sustained requests per second; 0 means no limit.
    pub per_second: u32,
    /// Requests that may arrive at once after a pause.
    pub burst: u32,
}

impl Responses {
    /// Starts an empty set for the VM.
    #[must_use]
    pub fn builder(vm: VmState) -> ResponsesBuilder {
        ResponsesBuilder { routes: Default::default(), limit: RequestLimit::default(), vm }
    }

    /// Answers a request. Increments reference counts, and allocates only if the route is live or the answer is a 405.
    ///
    /// A method that the path does not have gets 405 with `Allow`. On an unknown path, GET and HEAD get 404, and other
    /// methods 405. HEAD gets the answer to GET; the sender omits the body (RFC 9110 §9.3.2).
    #[must_use]
    pub fn answer(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> LiveOutcome {
        self.answer_of(now, connection, request, parked).0
    }

    /// Like [`answer`](Self::answer), plus the dialect of the route.
    #[must_use]
    pub fn answer_of(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (LiveOutcome, Datasource) {
        self.answer_found(self.find(Host::at(connection.local), request), now, connection, request, parked)
    }

    /// Like [`answer_of`](Self::answer_of); `None` if a dialect that is not rendered might answer instead. Nearly all
    /// requests are for a path with a route, which tells.
    pub(crate) fn answer_if_rendered(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> Option<(LiveOutcome, Datasource)> {
        let host = Host::at(connection.local);
        let path = Canonical::of(host, request.target.path);
        let here = self.at(host, &path);
        if let Some(unrendered) = &self.unrendered
            && !here.first().is_some_and(|route| route.claims().and(unrendered.missing).is_empty())
        {
            return None;
        }
        let found = self.find_from(host, path, here, request);
        Some(self.answer_found(found, now, connection, request, parked))
    }

    fn answer_found(
        &self,
        found: Found<'_, '_>,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (LiveOutcome, Datasource) {
        match found {
            Found::Route(route, rest) => {
                let call = LiveRequest { now, connection, request, rest, vm: &self.vm, parked };
                (route.answer(&call), route.datasource())
            }
            Found::Others(others) => {
                let datasource = others.first().map_or(Datasource::NONE, |other| other.datasource());
                (refusal(others.iter().flat_map(|other| other.allowed().iter())).into(), datasource)
            }
            Found::Nothing if Methods::READ.contain(request.method) => {
                (NOT_FOUND.clone().into(), Datasource::NONE)
            }
            Found::Nothing => (READ_ONLY.clone().into(), Datasource::NONE),
        }
    }

    /// Returns whether equal requests get equal answers as long as these responses are published.
    pub(crate) fn is_lasting(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.find(Host::at(connection.local), request) {
            Found::Route(route, _) => match route.endpoint() {
                Endpoint::Fixed(_) => true,
                Endpoint::Live(live) => live.is_lasting(),
            },
            Found::Others(_) | Found::Nothing => true,
        }
    }

    /// Returns whether the answer is rendered in advance. Then it does not depend on what the guest wrote.
    #[must_use]
    pub fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.find(Host::at(connection.local), request) {
            Found::Route(route, _) => matches!(route.endpoint(), Endpoint::Fixed(_)),
            Found::Others(_) | Found::Nothing => true,
        }
    }

    /// Returns the route that answers a request, for reports to people.
    #[must_use]
    pub fn explain<'p>(&self, host: Host, request: &Request<'p>) -> LookupExplanation<'_, 'p> {
        match self.find(host, request) {
            Found::Route(route, rest) => LookupExplanation::Route { path: route.path(), route, rest },
            Found::Others(others) => LookupExplanation::Others {
                routes: others.iter().map(|route| (route.path(), route)).collect(),
            },
            Found::Nothing => LookupExplanation::Nothing,
        }
    }

    /// Returns whether the host has any route.
    #[must_use]
    pub fn has(&self, host: Host) -> bool {
        !self.routes[host.index()].is_empty()
    }

    /// Returns the dialects that are not rendered; `None` if all are.
    pub(crate) fn unrendered(&self) -> Option<&UnrenderedDialects> {
        self.unrendered.as_ref()
    }

    /// Notes the dialects that are not rendered.
    pub(crate) fn without(self, unrendered: UnrenderedDialects) -> Self {
        Self { unrendered: Some(unrendered).filter(|rest| !rest.missing.is_empty()), ..self }
    }

    /// Returns the VM's rate limit.
    #[must_use]
    pub fn limit(&self) -> RequestLimit {
        self.limit
    }

    /// Returns the VM of these responses.
    #[must_use]
    pub fn vm(&self) -> &VmState {
        &self.vm
    }

    /// Finds the first route of the path whose header and method match. If the path has none for these headers, tries
    /// the nearest ancestor with routes that answer all paths below them.
    fn find<'p>(&self, host: Host, request: &Request<'p>) -> Found<'_, 'p> {
        let whole = Canonical::of(host, request.target.path);
        self.find_from(host, whole, self.at(host, &whole), request)
    }

    /// Like [`find`](Self::find), with the routes of the path.
    fn find_from<'r, 'p>(
        &'r self,
        host: Host,
        whole: Canonical<'p>,
        mut here: &'r [Route],
        request: &Request<'p>,
    ) -> Found<'r, 'p> {
        let mut at = whole;
        for level in 0..=LEVELS {
            let mut asked = here
                .iter()
                .filter(|route| (level == 0 || route.takes_below()) && route.is_for(&request.headers))
                .peekable();
            if asked.peek().is_some() {
                return match asked.find(|route| route.allowed().contain(request.method)) {
                    Some(route) => Found::Route(route, at.rest_of(&whole)),
                    None => Found::Others(here),
                };
            }
            let Some(parent) = at.parent() else { break };
            at = parent;
            here = self.at(host, &at);
        }
        Found::Nothing
    }

    fn at(&self, host: Host, path: &Canonical<'_>) -> &[Route] {
        let (routes, hashes, hash) = (&self.routes[host.index()], &self.hashes[host.index()], path.hash());
        let start = hashes.partition_point(|known| *known < hash);
        let alike = hashes[start..].iter().take_while(|known| **known == hash).count();
        let alike = &routes[start..start + alike];
        let Some(first) = alike.iter().position(|known| path.is(known.path())) else { return &[] };
        let others = alike[first + 1..].iter().take_while(|known| path.is(known.path())).count();
        &alike[first..=first + others]
    }

    /// Returns all routes with host and path, sorted by path within a host.
    pub fn routes(&self) -> impl Iterator<Item = (Host, &str, &Route)> {
        let of = |host: Host| {
            let mut routes: Vec<&Route> = self.routes[host.index()].iter().collect();
            routes.sort_by(|a, b| a.path().cmp(b.path()));
            routes.into_iter().map(move |route| (host, route.path(), route))
        };
        Host::ALL.into_iter().flat_map(of)
    }
}

/// Collects the routes of one VM.
#[derive(Debug)]
pub struct ResponsesBuilder {
    routes: [Vec<Route>; Host::ALL.len()],
    limit: RequestLimit,
    vm: VmState,
}

impl ResponsesBuilder {
    /// Sets the VM's rate limit.
    pub fn limit(&mut self, limit: RequestLimit) {
        self.limit = limit;
    }

    /// Returns the VM of these responses.
    #[must_use]
    pub fn vm(&self) -> &VmState {
        &self.vm
    }

    /// Adds a route at a normalised path: `/`, or `/a/b` without a trailing slash.
    ///
    /// A path can have several routes. Those that require a header precede the others, and earlier ones precede later
    /// ones. Of two routes for the same requests only the first stays, so a dialect listed earlier wins.
    pub fn add(&mut self, host: Host, path: impl Into<Cow<'static, str>>, route: Route) {
        self.place(host, route.at(path));
    }

    /// Adds a route at its own path.
    pub(crate) fn place(&mut self, host: Host, route: Route) {
        self.routes[host.index()].push(route);
    }

    /// Sorts the routes and drops those that no request can reach.
    #[must_use]
    pub fn build(self) -> Responses {
        let routes = self.routes.map(sorted);
        let hashes = std::array::from_fn(|host| routes[host].iter().map(Route::hash).collect());
        Responses { routes, hashes, limit: self.limit, vm: self.vm, unrendered: None }
    }
}

/// Sorts routes for the look-up and drops those that no request can reach.
fn sorted(mut routes: Vec<Route>) -> Box<[Route]> {
    fn key(route: &Route) -> (u32, &str, bool) {
        (route.hash(), route.path(), route.header().is_none())
    }
    routes.sort_by(|a, b| key(a).cmp(&key(b)));
    let mut kept: Vec<Route> = Vec::with_capacity(routes.len());
    for route in routes {
        let mut earlier = kept.iter().rev().take_while(|other| other.path() == route.path());
        if !earlier.any(|other| other.covers(&route)) {
            kept.push(route);
        }
    }
    kept.into()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, LazyLock};

    use super::{Endpoint, Host, LiveOutcome, Methods, Responses, Route, VmState};
    use crate::http::{Headers, Method, Request, RequestTarget, Response, StatusCode};
    use crate::store::{Condition, LiveRequest, LiveRoute, RequestGuard};
    use metadata_common::addresses::Connection;
    use metadata_common::time::Now;

    fn text(body: &'static str) -> Endpoint {
        Endpoint::Fixed(Response::new(StatusCode(200), Some("text/plain; charset=utf-8"), &[], body))
    }

    /// Answers with the part of the path below its route.
    #[derive(Debug)]
    struct Below;

    impl LiveRoute for Below {
        fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
            Response::new(StatusCode(200), None, &[], format!("[{}]", call.rest)).into()
        }

        fn about(&self) -> &'static str {
            "what lies below"
        }
    }

    fn ask_at(
        responses: &Responses,
        local: (&str, u16),
        method: Method,
        path: &str,
        fields: &[(&str, &str)],
    ) -> Response {
        let fields: Vec<_> =
            fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
        let target = RequestTarget { path, query: "" };
        let request = Request { method, target, headers: Headers::new(&fields), body: b"" };
        let local = (local.0.parse().expect("an address"), local.1);
        let connection =
            Connection { slot: 0, local, remote: ("10.0.0.2".parse().expect("an address"), 40_000) };
        let now = Now { mono: std::time::Duration::ZERO, unix_seconds: 0 };
        match responses.answer(now, &connection, &request, None) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
            LiveOutcome::Park(parked) => panic!("{path} is parked: {parked:?}"),
        }
    }

    fn ask(responses: &Responses, method: Method, path: &str, fields: &[(&str, &str)]) -> Response {
        ask_at(responses, ("169.254.169.254", 80), method, path, fields)
    }

    static GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
        [
            RequestGuard {
                condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
                otherwise: Response::error(StatusCode(403), &[]),
            },
            RequestGuard {
                condition: Condition::HeaderIs { name: "Metadata", value: "true" },
                otherwise: Response::error(StatusCode(400), &[]),
            },
        ]
    });

    fn responses() -> Responses {
        let mut builder = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
        let put = Methods::of(&[Method::Options, Method::Put]);
        for (path, route) in [
            ("/b", Route::new("b", text("secret")).guarded(&*GUARDS)),
            ("/a", Route::new("a", text("open"))),
            ("/a", Route::new("late", text("later"))),
            ("/put", Route::new("a", text("made")).methods(put)),
            ("/tree", Route::new("a", Endpoint::Live(Arc::new(Below))).and_below()),
            ("/tree/leaf", Route::new("a", text("leaf"))),
            ("/latest/x", Route::new("a", text("of every date"))),
        ] {
            builder.add(Host::Metadata, path, route);
        }
        builder.add(Host::Scaleway, "/a", Route::new("scaleway", text("elsewhere")));
        builder.add(Host::Password, "/", Route::new("password", Endpoint::Live(Arc::new(Below))).and_below());
        builder.build()
    }

    fn body(response: &Response) -> String {
        String::from_utf8(response.body().to_bytes().to_vec()).expect("text")
    }

    #[test]
    fn known_paths_are_answered_and_others_not_found() {
        for (path, status, said) in [
            ("/a", 200, "open"),
            ("/", 404, "Not Found\n"),
            ("/a/b", 404, "Not Found\n"),
            ("/A", 404, "Not Found\n"),
            ("/tree", 200, "[]"),
            ("/tree/leaf", 200, "leaf"),
            ("/tree/other", 200, "[/other]"),
            ("/tree/leaf/below", 200, "[/leaf/below]"),
            ("/trees", 404, "Not Found\n"),
            ("/2021-03-23/x", 200, "of every date"),
            ("/ec2/1.0/x", 200, "of every date"),
        ] {
            let answer = ask(&responses(), Method::Get, path, &[]);
            assert_eq!((answer.status().0, body(&answer).as_str()), (status, said), "{path}");
        }
    }

    #[test]
    fn the_address_selects_the_host_before_the_path_is_looked_up() {
        for (local, path, status, said) in [
            (("169.254.42.42", 80), "/a", 200, "elsewhere"),
            (("fd00:42::42", 80), "/a", 200, "elsewhere"),
            (("169.254.42.42", 80), "/b", 404, "Not Found\n"),
            (("fe80::a9fe:a9fe", 80), "/a", 200, "open"),
            (("168.63.129.16", 80), "/a", 404, "Not Found\n"),
            (("100.100.100.200", 80), "/a", 404, "Not Found\n"),
            (("169.254.169.254", 8080), "/a", 200, "[/a]"),
            (("169.254.169.254", 8080), "/", 200, "[]"),
        ] {
            let answer = ask_at(&responses(), local, Method::Get, path, &[]);
            assert_eq!((answer.status().0, body(&answer).as_str()), (status, said), "{path} at {local:?}");
        }
    }

    #[test]
    fn a_path_deeper_than_any_served_is_not_found() {
        let deep = "/x".repeat(1_000);
        assert_eq!(ask(&responses(), Method::Get, &deep, &[]).status(), StatusCode(404));
    }

    #[test]
    fn a_method_that_a_route_does_not_answer_gets_405() {
        for (path, method, allow) in [
            ("/a", Method::Post, "GET, HEAD"),
            ("/b", Method::Put, "GET, HEAD"),
            ("/nope", Method::Patch, "GET, HEAD"),
            ("/a", Method::Delete, "GET, HEAD"),
            ("/a", Method::Options, "GET, HEAD"),
            ("/a", Method::Other, "GET, HEAD"),
            ("/put", Method::Get, "OPTIONS, PUT"),
            ("/put", Method::Head, "OPTIONS, PUT"),
        ] {
            let answer = ask(&responses(), method, path, &[]);
            assert_eq!(
                (answer.status(), answer.field("allow")),
                (StatusCode(405), Some(allow)),
                "{method:?} {path}"
            );
        }
        assert_eq!(body(&ask(&responses(), Method::Put, "/put", &[])), "made");
    }

    #[test]
    fn the_first_guard_that_fails_determines_the_answer() {
        let xff = ("x-forwarded-for", "");
        for (fields, status) in [
            (&[][..], 400),
            (&[("Metadata", "false")][..], 400),
            (&[("Metadata", "")][..], 400),
            (&[("metadata", "TRUE")][..], 200),
            (&[("Metadata", "True"), xff][..], 403),
            (&[xff][..], 403),
        ] {
            assert_eq!(ask(&responses(), Method::Get, "/b", fields).status().0, status, "{fields:?}");
        }
    }

    /// Routes of two dialects at one path: one for any reader, one for readers with a header, one for writers.
    fn shared() -> Responses {
        let mut builder = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
        let put = Methods::of(&[Method::Put]);
        for (path, route) in [
            ("/s", Route::new("first", text("plain"))),
            ("/s", Route::new("second", text("late"))),
            ("/s", Route::new("second", text("with header")).when("X-Token")),
            ("/s", Route::new("second", text("written")).methods(put)),
            ("/only", Route::new("second", text("only")).when("X-Token")),
            ("/tree", Route::new("first", text("leaf"))),
            ("/tree", Route::new("second", Endpoint::Live(Arc::new(Below))).and_below()),
        ] {
            builder.add(Host::Metadata, path, route);
        }
        builder.build()
    }

    #[test]
    fn a_path_has_a_route_for_each_header_and_method() {
        let token = &[("x-token", "")][..];
        for (method, path, fields, status, said) in [
            (Method::Get, "/s", &[][..], 200, "plain"),
            (Method::Get, "/s", token, 200, "with header"),
            (Method::Head, "/s", token, 200, "with header"),
            (Method::Put, "/s", &[], 200, "written"),
            (Method::Put, "/s", token, 200, "written"),
            (Method::Get, "/only", token, 200, "only"),
            (Method::Get, "/only", &[], 404, "Not Found\n"),
            (Method::Get, "/tree", &[], 200, "leaf"),
            (Method::Get, "/tree/a", &[], 200, "[/a]"),
        ] {
            let answer = ask(&shared(), method, path, fields);
            assert_eq!(
                (answer.status().0, body(&answer).as_str()),
                (status, said),
                "{method:?} {path} {fields:?}"
            );
        }
        assert_eq!(
            shared().routes().filter(|(_, path, _)| *path == "/s").count(),
            3,
            "the later route is dropped"
        );
    }

    #[test]
    fn allow_lists_the_methods_of_all_routes_of_a_path_once() {
        let token = &[("X-Token", "x")][..];
        for (path, fields, allow) in [
            ("/s", &[][..], "GET, HEAD, PUT"),
            ("/s", token, "GET, HEAD, PUT"),
            ("/only", token, "GET, HEAD"),
            ("/only", &[], "GET, HEAD"),
        ] {
            let answer = ask(&shared(), Method::Post, path, fields);
            assert_eq!(
                (answer.status(), answer.field("allow")),
                (StatusCode(405), Some(allow)),
                "{path} {fields:?}"
            );
        }
    }
}
