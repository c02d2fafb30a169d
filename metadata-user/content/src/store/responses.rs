//! All a VM can be answered: host, path and method to response.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use super::datasource::Datasource;
use super::guard::Guard;
use super::live::{Call, Live, Outcome, Parked, Vm};
use super::path::{Canonical, Host, hash};
use crate::http::{Headers, Method, Request, Response, Status};
use metadata_base::connection::Connection;
use metadata_base::time::Now;

/// Levels above a path that are looked at for a route that takes all below it. No path served is deeper.
const LEVELS: usize = 32;

static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(Status(404), &[]));
static READ_ONLY: LazyLock<Response> = LazyLock::new(|| refusal(Methods::READ.iter()));

/// `405` with `Allow`, each method once.
fn refusal(methods: impl Iterator<Item = Method>) -> Response {
    let mut allow: Vec<&str> = Vec::new();
    for name in methods.map(Method::as_str) {
        if !allow.contains(&name) {
            allow.push(name);
        }
    }
    Response::error(Status(405), &[("Allow", &allow.join(", "))])
}

/// The methods of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Methods([Option<Method>; Self::MOST]);

impl Methods {
    /// The most methods of one route: all there are.
    pub const MOST: usize = 8;

    /// GET and HEAD.
    pub const READ: Self = Self::of(&[Method::Get, Method::Head]);

    /// These, [`MOST`](Self::MOST) at most, in the order `Allow` names them. HEAD comes with GET.
    ///
    /// # Panics
    /// With more than there are.
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

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Method> {
        self.0.into_iter().flatten()
    }

    /// True for one of them.
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

/// Where a route's answer comes from.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// Computed beforehand.
    Fixed(Response),
    /// Computed when it is asked for.
    Live(Arc<dyn Live>),
}

/// How one path is answered.
#[derive(Clone, Debug)]
pub struct Route {
    endpoint: Endpoint,
    /// A VM has a hundred routes and a node ten thousand VMs, with the same terms nearly all.
    pub(super) terms: Arc<Terms>,
}

/// Where a route is, and who may come to it by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    path: Cow<'static, str>,
    /// The path's hash, which stands for all of the terms: few paths are served on different ones.
    hash: u32,
    dialect: &'static str,
    datasource: Datasource,
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

/// Guards are compared by where they are: each is written down once.
#[derive(Clone, Copy, Debug)]
struct Guards(&'static [Guard]);

impl PartialEq for Guards {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Guards {}

impl Route {
    /// A route of a dialect, for GET and HEAD, without conditions.
    #[must_use]
    pub fn new(dialect: &'static str, endpoint: Endpoint) -> Self {
        Self::of(dialect, Datasource::named(dialect), endpoint)
    }

    /// The same, where the dialect's number is known already.
    pub(crate) fn of(dialect: &'static str, datasource: Datasource, endpoint: Endpoint) -> Self {
        let terms = Terms {
            path: Cow::Borrowed("/"),
            hash: hash(["/"]),
            dialect,
            datasource,
            guards: Guards(&[]),
            header: None,
            methods: Methods::READ,
            below: false,
        };
        Self { endpoint, terms: Arc::new(terms) }
    }

    /// The same route at a normalised path.
    #[must_use]
    pub(crate) fn at(self, path: impl Into<Cow<'static, str>>) -> Self {
        let mut path = path.into();
        if let Cow::Owned(path) = &mut path {
            path.shrink_to_fit();
        }
        self.on(|terms| (terms.hash, terms.path) = (hash([path.as_ref()]), path))
    }

    /// Where it is.
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

    /// The same route with these conditions; the first that fails decides.
    #[must_use]
    pub fn guarded(self, guards: &'static [Guard]) -> Self {
        self.on(|terms| terms.guards = Guards(guards))
    }

    /// The same route for these methods.
    #[must_use]
    pub fn methods(self, methods: Methods) -> Self {
        self.on(|terms| terms.methods = methods)
    }

    /// The same route for requests with this header field only, before those for any request.
    #[must_use]
    pub fn when(self, header: &'static str) -> Self {
        self.on(|terms| terms.header = Some(header))
    }

    /// The same route for all paths below it, too.
    #[must_use]
    pub fn and_below(self) -> Self {
        self.on(|terms| terms.below = true)
    }

    /// The dialect's name.
    #[must_use]
    pub fn dialect(&self) -> &'static str {
        self.terms.dialect
    }

    /// Where the answer comes from.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The conditions, in order.
    #[must_use]
    pub fn guards(&self) -> &'static [Guard] {
        self.terms.guards.0
    }

    /// The methods it answers.
    #[must_use]
    pub fn allowed(&self) -> Methods {
        self.terms.methods
    }

    /// The header field a request must have to be the route's at all.
    #[must_use]
    pub fn header(&self) -> Option<&'static str> {
        self.terms.header
    }

    /// True when it answers all paths below its own.
    #[must_use]
    pub fn takes_below(&self) -> bool {
        self.terms.below
    }

    /// True when the route is for requests with these headers, whatever their method.
    fn is_for(&self, headers: &Headers<'_>) -> bool {
        self.terms.header.is_none_or(|header| headers.contains(header))
    }

    /// True when nothing that comes to `other`, at the same path, is left by this route.
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

/// What there is for a request.
#[derive(Clone, Copy, Debug)]
enum Found<'r, 'p> {
    /// A route, and what of the path lies below it.
    Route(&'r Route, &'p str),
    /// Routes of the path for other methods, and for requests that are not like this one.
    Others(&'r [Route]),
    /// No route.
    Nothing,
}

/// What there is for a request, for people.
#[derive(Clone, Debug)]
pub enum Explained<'r, 'p> {
    /// A route answers it, or one of the route's conditions does.
    Route {
        /// Where the route is.
        path: &'r str,
        /// The route.
        route: &'r Route,
        /// What of the request's path lies below.
        rest: &'p str,
    },
    /// Only routes for other methods are there.
    Others {
        /// They, with their paths.
        routes: Vec<(&'r str, &'r Route)>,
    },
    /// Nothing is there.
    Nothing,
}

/// Everything one VM can be answered.
#[derive(Clone, Debug)]
pub struct Responses {
    /// By host, then sorted by the hash of their path, and by path; of one path those that want a header first.
    routes: [Box<[Route]>; Host::ALL.len()],
    /// The hashes of all, in their order. VMs with the same paths share them, so that a look-up is in the cache
    /// already, whoever asks.
    pub(super) hashes: [Arc<[u32]>; Host::ALL.len()],
    limit: RequestLimit,
    vm: Vm,
}

/// How often a VM may ask. What is above waits, then is answered 429.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestLimit {
    /// Requests a second in the long run; 0 means no limit.
    pub per_second: u32,
    /// Requests at once after a pause.
    pub burst: u32,
}

impl Responses {
    /// Starts an empty set.
    #[must_use]
    pub fn builder(vm: Vm) -> ResponsesBuilder {
        ResponsesBuilder { routes: Default::default(), limit: RequestLimit::default(), vm }
    }

    /// The answer to a request. Copies reference counts, and allocates nothing unless the route is live.
    ///
    /// A method the route does not take is 405 with `Allow`, as is writing to an unknown path; other unknown
    /// paths are 404. HEAD gets the answer to GET: whoever sends it leaves the body out (RFC 9110 §9.3.2).
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

    /// The same, and the dialect it is of.
    #[must_use]
    pub fn answer_of(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&Parked>,
    ) -> (Outcome, Datasource) {
        match self.find(Host::at(connection.local), request) {
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

    /// True when the answer was computed beforehand: nothing a guest has written or waits for is in it.
    #[must_use]
    pub fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.find(Host::at(connection.local), request) {
            Found::Route(route, _) => matches!(route.endpoint, Endpoint::Fixed(_)),
            Found::Others(_) | Found::Nothing => true,
        }
    }

    /// Which route answers a request.
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

    /// True when anything is answered at this host.
    #[must_use]
    pub fn has(&self, host: Host) -> bool {
        !self.routes[host.index()].is_empty()
    }

    /// How often the VM may ask.
    #[must_use]
    pub fn limit(&self) -> RequestLimit {
        self.limit
    }

    /// The VM they are for.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// The route that answers a request: the first at its path, or the first that takes all below the nearest
    /// path above, whose header and method it has.
    fn find<'p>(&self, host: Host, request: &Request<'p>) -> Found<'_, 'p> {
        let whole = Canonical::of(host, request.target.path);
        let mut at = whole;
        for level in 0..=LEVELS {
            let here = self.at(host, &at);
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
            match at.parent() {
                Some(parent) => at = parent,
                None => break,
            }
        }
        Found::Nothing
    }

    /// The routes of a path.
    fn at(&self, host: Host, path: &Canonical<'_>) -> &[Route] {
        let (routes, hashes, hash) = (&self.routes[host.index()], &self.hashes[host.index()], path.hash());
        let start = hashes.partition_point(|known| *known < hash);
        let alike = hashes[start..].iter().take_while(|known| **known == hash).count();
        let alike = &routes[start..start + alike];
        let Some(first) = alike.iter().position(|known| path.is(known.path())) else { return &[] };
        let others = alike[first + 1..].iter().take_while(|known| path.is(known.path())).count();
        &alike[first..=first + others]
    }

    /// All hosts, paths and routes, by path.
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
    /// Sets how often the VM may ask.
    pub fn limit(&mut self, limit: RequestLimit) {
        self.limit = limit;
    }

    /// The VM they are for.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Adds the route of a normalised path: `/`, or `/a/b` without a trailing slash.
    ///
    /// A path may have several routes. Those that want a header come first, then those added earlier: of two
    /// for the same requests the first is kept, so dialects listed earlier win.
    pub fn add(&mut self, host: Host, path: impl Into<Cow<'static, str>>, route: Route) {
        self.place(host, route.at(path));
    }

    /// Adds a route where it says it is.
    pub(crate) fn place(&mut self, host: Host, route: Route) {
        self.routes[host.index()].push(route);
    }

    /// Finishes.
    #[must_use]
    pub fn build(self) -> Responses {
        let routes = self.routes.map(sorted);
        let hashes = std::array::from_fn(|host| routes[host].iter().map(Route::hash).collect());
        Responses { routes, hashes, limit: self.limit, vm: self.vm }
    }
}

/// In the order they are looked up in, without those that can never be reached.
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
