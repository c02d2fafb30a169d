//! A route: the answer to the requests of one path.

use std::borrow::Cow;
use std::sync::Arc;

use super::datasource::Datasource;
use super::guard::Guard;
use super::live::{Call, Live, Outcome};
use super::path::hash;
use crate::http::{Headers, Method, Response};
use crate::record::Dialects;

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
    pub(super) fn path(&self) -> &str {
        &self.terms.path
    }

    pub(super) fn hash(&self) -> u32 {
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

    /// Returns the dialect's number.
    pub(super) fn datasource(&self) -> Datasource {
        self.terms.datasource
    }

    /// Returns the dialects that may have routes at the path or above it.
    pub(super) fn claims(&self) -> Dialects {
        self.terms.claims
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
    pub(super) fn is_for(&self, headers: &Headers<'_>) -> bool {
        self.terms.header.is_none_or(|header| headers.contains(header))
    }

    /// Returns whether this route answers every request that `other`, at the same path, would answer.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let (own, others) = (&self.terms, &other.terms);
        own.header == others.header
            && (own.below || !others.below)
            && others.methods.iter().all(|method| own.methods.contain(method))
    }

    pub(super) fn answer(&self, call: &Call<'_>) -> Outcome {
        if let Some(guard) = self.guards().iter().find(|guard| !guard.condition.holds(call)) {
            return guard.otherwise.clone().into();
        }
        match &self.endpoint {
            Endpoint::Fixed(response) => response.clone().into(),
            Endpoint::Live(live) => live.answer(call),
        }
    }
}
