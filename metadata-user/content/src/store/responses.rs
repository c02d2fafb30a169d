//! All responses for one VM, by host, path and method.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use super::datasource::Datasource;
use super::guard::Guard;
use super::live::{Call, Live, Outcome, Parked, Vm};
use super::path::{Canonical, Host, hash};
use crate::http::{Headers, Method, Request, Response, Status};
use crate::record::{Dialects, Record};
use metadata_base::connection::Connection;
use metadata_base::time::Now;

/// Maximum number of ancestors searched for a route that answers all paths below it. No served path is deeper.
const LEVELS: usize = 32;

static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(Status(404), &[]));
static READ_ONLY: LazyLock<Response> = LazyLock::new(|| refusal(Methods::READ.iter()));

/// Builds a 405 with `Allow` that lists each method once.
fn refusal(methods: impl Iterator<Item = Method>) -> Response {
    let mut allow: Vec<&str> = Vec::new();
    for name in methods.map(Method::as_str) {
        if !allow.contains(&name) {
            allow.push(name);
        }
    }
    Response::error(Status(405), &[("Allow", &allow.join(", "))])
}

/// Methods that a route answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Methods([Option<Method>; Self::MOST]);

impl Methods {
    /// Maximum number of methods of a route: all variants of [`Method`].
    pub const MOST: usize = 8;

    /// GET and HEAD.
    pub const READ: Self = Self::of(&[Method::Get, Method::Head]);

    /// Builds a set of at most [`MOST`](Self::MOST) methods, in the order of `Allow`. List HEAD along with GET.
    ///
    /// # Panics
    /// Panics if there are more than [`MOST`](Self::MOST).
    #[must_use]
    pub const fn of(methods: &'static [Method]) -> Self {
        let mut all = [None; Self::MOST];
        let mut n = 0;
        while n < methods.len() {
            all[n] = Some(methods[n]);
            n += 1;
        }
        Self(all)
    }

    /// Returns each method in order.
    pub fn iter(self) -> impl Iterator<Item = Method> {
        self.0.into_iter().flatten()
    }

    /// Returns whether the set contains the method.
    #[must_use]
    pub fn contain(self, method: Method) -> bool {
        self.0.contains(&Some(method))
    }
}

impl std::fmt::Display for Methods {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, method) in self.iter().enumerate() {
            write!(f, "{}{}", if n == 0 { "" } else { ", " }, method.as_str())?;
        }
        Ok(())
    }
}

/// Source of a route's answer.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// Rendered when the record is published.
    Fixed(Response),
    /// Computed per request.
    Live(Arc<dyn Live>),
}

/// Answers the requests of one path.
#[derive(Clone, Debug)]
pub struct Route {
    endpoint: Endpoint,
    /// Shared: a VM has about a hundred routes, and nearly all VMs of a node have the same terms.
    pub(super) terms: Arc<Terms>,
}

/// Path of a route, and the requests it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    path: Cow<'static, str>,
    /// Hash of the path. It also serves as the hash of the terms, because few paths have several terms.
    hash: u32,
    dialect: &'static str,
    datasource: Datasource,
    /// The dialects that may have routes at the path or above it.
    claims: Dialects,
    guards: Guards,
    header: Option<&'static str>,
    methods: Methods,
    below: bool,
}

impl std::hash::Hash for Terms {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u32(self.hash);
    }
}

/// Guards. Two lists are equal if they have one address, because each list is defined once.
#[derive(Clone, Copy, Debug)]
struct Guards(&'static [Guard]);

impl PartialEq for Guards {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Guards {}

impl Route {
    /// Creates a route of a dialect for GET and HEAD, without conditions.
    #[must_use]
    pub fn new(dialect: &'static str, endpoint: Endpoint) -> Self {
        Self::of(dialect, Datasource::named(dialect), endpoint)
    }

    /// Like [`new`](Self::new), for a caller that already knows the dialect's number.
    pub(crate) fn of(dialect: &'static str, datasource: Datasource, endpoint: Endpoint) -> Self {
        let terms = Terms {
            path: Cow::Borrowed("/"),
            hash: hash(["/"]),
            dialect,
            datasource,
            claims: Dialects::NONE,
            guards: Guards(&[]),
            header: None,
            methods: Methods::READ,
            below: false,
        };
        Self { endpoint, terms: Arc::new(terms) }
    }

    /// Sets the route's path, which must be normalised.
    #[must_use]
    pub(crate) fn at(self, path: impl Into<Cow<'static, str>>) -> Self {
        let mut path = path.into();
        if let Cow::Owned(path) = &mut path {
            path.shrink_to_fit();
        }
        self.on(|terms| (terms.hash, terms.path) = (hash([path.as_ref()]), path))
    }

    /// Returns the path.
    fn path(&self) -> &str {
        &self.terms.path
    }

    fn hash(&self) -> u32 {
        self.terms.hash
    }

    fn on(mut self, change: impl FnOnce(&mut Terms)) -> Self {
        change(Arc::make_mut(&mut self.terms));
        self
    }

    /// Sets the dialects that may have routes at the path or above it.
    #[must_use]
    pub(crate) fn claimed_by(self, dialects: Dialects) -> Self {
        self.on(|terms| terms.claims = dialects)
    }

    /// Sets the conditions. The first one that fails determines the answer.
    #[must_use]
    pub fn guarded(self, guards: &'static [Guard]) -> Self {
        self.on(|terms| terms.guards = Guards(guards))
    }

    /// Sets the methods.
    #[must_use]
    pub fn methods(self, methods: Methods) -> Self {
        self.on(|terms| terms.methods = methods)
    }

    /// Limits the route to requests with this header field. It then precedes routes of the path that need no field.
    #[must_use]
    pub fn when(self, header: &'static str) -> Self {
        self.on(|terms| terms.header = Some(header))
    }

    /// Extends the route to all paths below its own.
    #[must_use]
    pub fn and_below(self) -> Self {
        self.on(|terms| terms.below = true)
    }

    /// Returns the dialect's name.
    #[must_use]
    pub fn dialect(&self) -> &'static str {
        self.terms.dialect
    }

    /// Returns the source of the answer.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the conditions in order.
    #[must_use]
    pub fn guards(&self) -> &'static [Guard] {
        self.terms.guards.0
    }

    /// Returns the methods that the route answers.
    #[must_use]
    pub fn allowed(&self) -> Methods {
        self.terms.methods
    }

    /// Returns the header field that requests of this route must have; `None` if any request matches.
    #[must_use]
    pub fn header(&self) -> Option<&'static str> {
        self.terms.header
    }

    /// Returns whether the route answers all paths below its own.
    #[must_use]
    pub fn takes_below(&self) -> bool {
        self.terms.below
    }

    /// Returns whether the route matches these headers; ignores the method.
    fn is_for(&self, headers: &Headers<'_>) -> bool {
        self.terms.header.is_none_or(|header| headers.contains(header))
    }

    /// Returns whether this route answers every request that `other`, at the same path, would answer.
    fn covers(&self, other: &Self) -> bool {
        let (own, others) = (&self.terms, &other.terms);
        own.header == others.header
            && (own.below || !others.below)
            && others.methods.iter().all(|method| own.methods.contain(method))
    }

    fn answer(&self, call: &Call<'_>) -> Outcome {
        if let Some(guard) = self.guards().iter().find(|guard| !guard.condition.holds(call)) {
            return guard.otherwise.clone().into();
        }
        match &self.endpoint {
            Endpoint::Fixed(response) => response.clone().into(),
            Endpoint::Live(live) => live.answer(call),
        }
    }
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
pub enum Explained<'r, 'p> {
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
    pub(super) vm: Vm,
    unrendered: Option<Unrendered>,
}

/// Dialects of a record that nobody has asked for yet.
#[derive(Clone, Debug)]
pub(crate) struct Unrendered {
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
    pub fn builder(vm: Vm) -> ResponsesBuilder {
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
        parked: Option<&Parked>,
    ) -> Outcome {
        self.answer_of(now, connection, request, parked).0
    }

    /// Like [`answer`](Self::answer), plus the dialect of the route.
    #[must_use]
    pub fn answer_of(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&Parked>,
    ) -> (Outcome, Datasource) {
        self.answer_found(self.find(Host::at(connection.local), request), now, connection, request, parked)
    }

    /// Like [`answer_of`](Self::answer_of); `None` if a dialect that is not rendered might answer instead. Nearly all
    /// requests are for a path with a route, which tells.
    pub(crate) fn answer_if_rendered(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&Parked>,
    ) -> Option<(Outcome, Datasource)> {
        let host = Host::at(connection.local);
        let path = Canonical::of(host, request.target.path);
        let here = self.at(host, &path);
        if let Some(unrendered) = &self.unrendered
            && !here.first().is_some_and(|route| route.terms.claims.and(unrendered.missing).is_empty())
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
        parked: Option<&Parked>,
    ) -> (Outcome, Datasource) {
        match found {
            Found::Route(route, rest) => {
                let call = Call { now, connection, request, rest, vm: &self.vm, parked };
                (route.answer(&call), route.terms.datasource)
            }
            Found::Others(others) => {
                let datasource = others.first().map_or(Datasource::NONE, |other| other.terms.datasource);
                (refusal(others.iter().flat_map(|other| other.terms.methods.iter())).into(), datasource)
            }
            Found::Nothing if Methods::READ.contain(request.method) => {
                (NOT_FOUND.clone().into(), Datasource::NONE)
            }
            Found::Nothing => (READ_ONLY.clone().into(), Datasource::NONE),
        }
    }

    /// Returns whether the answer is rendered in advance. Then it does not depend on what the guest wrote.
    #[must_use]
    pub fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.find(Host::at(connection.local), request) {
            Found::Route(route, _) => matches!(route.endpoint, Endpoint::Fixed(_)),
            Found::Others(_) | Found::Nothing => true,
        }
    }

    /// Returns the route that answers a request, for reports to people.
    #[must_use]
    pub fn explain<'p>(&self, host: Host, request: &Request<'p>) -> Explained<'_, 'p> {
        match self.find(host, request) {
            Found::Route(route, rest) => Explained::Route { path: route.path(), route, rest },
            Found::Others(others) => {
                Explained::Others { routes: others.iter().map(|route| (route.path(), route)).collect() }
            }
            Found::Nothing => Explained::Nothing,
        }
    }

    /// Returns whether the host has any route.
    #[must_use]
    pub fn has(&self, host: Host) -> bool {
        !self.routes[host.index()].is_empty()
    }

    /// Returns what is not rendered yet; `None` if all is.
    pub(crate) fn unrendered(&self) -> Option<&Unrendered> {
        self.unrendered.as_ref()
    }

    /// Notes what is not rendered.
    pub(crate) fn without(self, unrendered: Unrendered) -> Self {
        Self { unrendered: Some(unrendered).filter(|rest| !rest.missing.is_empty()), ..self }
    }

    /// Returns the VM's rate limit.
    #[must_use]
    pub fn limit(&self) -> RequestLimit {
        self.limit
    }

    /// Returns the VM of these responses.
    #[must_use]
    pub fn vm(&self) -> &Vm {
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
                .filter(|route| (level == 0 || route.terms.below) && route.is_for(&request.headers))
                .peekable();
            if asked.peek().is_some() {
                return match asked.find(|route| route.terms.methods.contain(request.method)) {
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

    /// Returns the routes of a path.
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
    vm: Vm,
}

impl ResponsesBuilder {
    /// Sets the VM's rate limit.
    pub fn limit(&mut self, limit: RequestLimit) {
        self.limit = limit;
    }

    /// Returns the VM of these responses.
    #[must_use]
    pub fn vm(&self) -> &Vm {
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
        (route.hash(), route.path(), route.terms.header.is_none())
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
mod tests;
