//! Collects the routes that dialects add.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use super::document::JsonDocument;
use super::{claims, yaml};
use crate::http::{Body, Request, Response, StatusCode};
use crate::identity::VmIssuer;
use crate::record::event::EventDocument;
use crate::record::vm::Payload;
use crate::store::{
    Datasource, Endpoint, Host, Interner, LiveOutcome, LiveRequest, LiveRoute, Methods, Notation,
    RequestGuard, RequestLimit, Responses, ResponsesBuilder, Route, VmState,
};

/// Type of text bodies. Without the charset some clients assume ISO-8859-1.
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
/// Type of YAML documents.
pub(super) const YAML: &str = "text/yaml; charset=utf-8";
/// Type of JSON documents.
pub(super) const JSON: &str = "application/json";
/// Type of opaque bytes.
pub(super) const BYTES: &str = "application/octet-stream";

/// Routes of one VM while they are collected. Equal responses of different VMs are stored once.
pub(super) struct RouteBuilder<'a> {
    interner: &'a mut Interner,
    routes: ResponsesBuilder,
    dialect: &'static str,
    datasource: Datasource,
    host: Host,
    issuer: Option<Arc<VmIssuer>>,
    events: EventDocument,
    /// Payloads added before, with their responses.
    payloads: Vec<(Bytes, Response)>,
}

impl<'a> RouteBuilder<'a> {
    pub(super) fn new(interner: &'a mut Interner, vm: VmState) -> Self {
        Self {
            interner,
            issuer: vm.issuer.clone(),
            events: vm.mailbox.events().document(),
            routes: Responses::builder(vm),
            dialect: "",
            datasource: Datasource::NONE,
            host: Host::Metadata,
            payloads: Vec::new(),
        }
    }

    /// Returns the issuer of the VM's identity tokens; `None` on a node without an issuer.
    pub(super) fn issuer(&self) -> Option<&Arc<VmIssuer>> {
        self.issuer.as_ref()
    }

    /// Returns the events of the VM.
    pub(super) fn events(&self) -> &EventDocument {
        &self.events
    }

    /// Starts a dialect: later routes belong to it, at 169.254.169.254.
    pub(super) fn begin(&mut self, dialect: &'static str) {
        (self.dialect, self.host) = (dialect, Host::Metadata);
        self.datasource = Datasource::named(dialect);
    }

    /// Sets the host of later routes.
    pub(super) fn at(&mut self, host: Host) {
        self.host = host;
    }

    /// Sets the VM's rate limit.
    pub(super) fn limit(&mut self, limit: RequestLimit) {
        self.routes.limit(limit);
    }

    pub(super) fn finish(self) -> Responses {
        self.interner.responses(self.routes.build())
    }

    /// Builds a 200.
    pub(super) fn found(&mut self, content_type: &'static str, body: impl Into<Body>) -> Response {
        self.interner.found(content_type, body.into())
    }

    /// Builds a 200 that is unique to the VM, without a search for an equal stored one.
    pub(super) fn own(&mut self, content_type: &'static str, body: impl Into<Body>) -> Response {
        let body = body.into();
        Response::sharing(self.interner.found_head(content_type, &body), body)
    }

    /// Stores a response, or returns an equal stored one.
    pub(super) fn share(&mut self, response: Response) -> Response {
        self.interner.response(response)
    }

    /// Stores bytes, or returns equal stored ones.
    pub(super) fn bytes(&mut self, bytes: impl Into<Bytes>) -> Bytes {
        self.interner.bytes(bytes.into())
    }

    /// Stores a text as a YAML scalar, or returns an equal stored one.
    pub(super) fn yaml_scalar(&mut self, text: &str) -> Bytes {
        self.interner.written(Notation::Yaml, text, || yaml::scalar(text).into_bytes())
    }

    /// Builds a JSON document that shares its long strings with those of other VMs.
    pub(super) fn document(&mut self, value: &Value) -> JsonDocument {
        JsonDocument::new(value, self.interner)
    }

    /// Builds a 200 with a JSON document that is unique to the VM.
    pub(super) fn json(&mut self, value: &Value) -> Response {
        let body = self.document(value).body();
        self.own(JSON, body)
    }

    /// Builds a 200 with a payload; [`unread`](Self::unread) until its source has been read.
    pub(super) fn payload(&mut self, payload: &Payload) -> Response {
        let Some(bytes) = payload.bytes() else { return self.unread() };
        let is_this = |known: &Bytes| std::ptr::eq::<[u8]>(&**known, &*bytes);
        if let Some((_, response)) = self.payloads.iter().find(|(known, _)| is_this(known)) {
            return response.clone();
        }
        let shared = self.interner.payload(bytes.clone());
        let response = self.found(BYTES, shared);
        self.payloads.push((bytes, response.clone()));
        response
    }

    /// Builds the 503 for a payload that has not been read from its source yet. Clients retry it.
    pub(super) fn unread(&mut self) -> Response {
        self.share(Response::error(StatusCode(503), &[("Retry-After", "1")]))
    }

    fn route(&self, endpoint: Endpoint) -> Route {
        Route::of(self.dialect, self.datasource, endpoint)
    }

    fn add(&mut self, path: impl Into<Cow<'static, str>>, route: Route) {
        let path = path.into();
        let claims = claims(self.host, &path);
        let route = self.interner.route(route.at(path).claimed_by(claims));
        self.routes.place(self.host, route);
    }

    /// Adds a route for GET and HEAD without conditions.
    pub(super) fn open(&mut self, path: impl Into<Cow<'static, str>>, response: Response) {
        self.guarded(path, &[], response);
    }

    /// Like [`open`](Self::open), with a text body.
    pub(super) fn text(&mut self, path: impl Into<Cow<'static, str>>, text: impl Into<String>) {
        let response = self.found(TEXT, text.into());
        self.open(path, response);
    }

    /// Adds a route for GET and HEAD with guards.
    pub(super) fn guarded(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        guards: &'static [RequestGuard],
        response: Response,
    ) {
        let route = self.route(Endpoint::Fixed(response));
        self.add(path, route.guarded(guards));
    }

    /// Adds a route with guards that is answered per request.
    pub(super) fn live(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        methods: Methods,
        guards: &'static [RequestGuard],
        live: impl LiveRoute + 'static,
    ) {
        let route = self.route(Endpoint::Live(Arc::new(live)));
        self.add(path, route.guarded(guards).methods(methods));
    }

    /// Like [`live`](Self::live), also for every path below it without a route.
    pub(super) fn live_below(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        methods: Methods,
        guards: &'static [RequestGuard],
        live: impl LiveRoute + 'static,
    ) {
        let route = self.route(Endpoint::Live(Arc::new(live)));
        self.add(path, route.guarded(guards).methods(methods).and_below());
    }

    /// Adds a route with guards for GET and HEAD with two responses: `first` to the requests that `takes_first`
    /// accepts by what they contain, `other` to the others.
    pub(super) fn either(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        guards: &'static [RequestGuard],
        about: &'static str,
        takes_first: fn(&Request<'_>) -> bool,
        first: Response,
        other: Response,
    ) {
        self.live(path, Methods::READ, guards, EitherRoute { about, takes_first, first, other });
    }

    /// Adds a route with guards for requests with the header field. Other requests get the path's other route, if
    /// any.
    pub(super) fn guarded_when(
        &mut self,
        header: &'static str,
        path: impl Into<Cow<'static, str>>,
        guards: &'static [RequestGuard],
        response: Response,
    ) {
        let route = self.route(Endpoint::Fixed(response));
        self.add(path, route.guarded(guards).when(header));
    }
}

/// A route with two responses.
#[derive(Debug)]
struct EitherRoute {
    about: &'static str,
    takes_first: fn(&Request<'_>) -> bool,
    first: Response,
    other: Response,
}

impl LiveRoute for EitherRoute {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let is_first = (self.takes_first)(call.request);
        if is_first { self.first.clone() } else { self.other.clone() }.into()
    }

    fn is_lasting(&self) -> bool {
        true
    }

    fn about(&self) -> &'static str {
        self.about
    }
}

/// Returns a live route with the answers of a function. `about` describes them for people.
pub(super) fn computed<R: Into<LiveOutcome>>(
    about: &'static str,
    answer: impl Fn(&LiveRequest<'_>) -> R + Send + Sync + 'static,
) -> impl LiveRoute {
    ComputedRoute { about, answer: move |call: &LiveRequest<'_>| answer(call).into() }
}

struct ComputedRoute<F> {
    about: &'static str,
    answer: F,
}

impl<F> fmt::Debug for ComputedRoute<F> {
    /// Leaves out what the function captures: it may be a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ComputedRoute").field("about", &self.about).finish_non_exhaustive()
    }
}

impl<F: Fn(&LiveRequest<'_>) -> LiveOutcome + Send + Sync> LiveRoute for ComputedRoute<F> {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        (self.answer)(call)
    }

    fn about(&self) -> &'static str {
        self.about
    }
}
