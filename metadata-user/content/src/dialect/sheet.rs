//! Where dialects write their routes.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use super::document::Document;
use super::yaml;
use crate::http::{Body, Response, Status};
use crate::record::vm::Payload;
use crate::store::{
    Datasource, Endpoint, Guard, Host, Interner, Live, Methods, Notation, RequestLimit, Responses,
    ResponsesBuilder, Route, Vm,
};

/// Type of text bodies. Without the charset some clients read ISO-8859-1.
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
/// Type of YAML documents.
pub(super) const YAML: &str = "text/yaml; charset=utf-8";
/// Type of JSON documents.
pub(super) const JSON: &str = "application/json";
/// Type of octets that are nobody's business.
pub(super) const OCTETS: &str = "application/octet-stream";

/// The routes of one VM while they are written, each response shared with the VMs that have the same.
pub(super) struct Sheet<'a> {
    interner: &'a mut Interner,
    routes: ResponsesBuilder,
    dialect: &'static str,
    datasource: Datasource,
    host: Host,
    /// Payloads, and the responses they are.
    payloads: Vec<(Bytes, Response)>,
}

impl<'a> Sheet<'a> {
    pub(super) fn new(interner: &'a mut Interner, vm: Vm) -> Self {
        Self {
            interner,
            routes: Responses::builder(vm),
            dialect: "",
            datasource: Datasource::NONE,
            host: Host::Metadata,
            payloads: Vec::new(),
        }
    }

    /// Begins a dialect: from here on routes are its own, at 169.254.169.254.
    pub(super) fn begin(&mut self, dialect: &'static str) {
        (self.dialect, self.host) = (dialect, Host::Metadata);
        self.datasource = Datasource::named(dialect);
    }

    /// From here on routes are of this host.
    pub(super) fn at(&mut self, host: Host) {
        self.host = host;
    }

    /// Sets how often the VM may ask.
    pub(super) fn limit(&mut self, limit: RequestLimit) {
        self.routes.limit(limit);
    }

    pub(super) fn finish(self) -> Responses {
        self.interner.responses(self.routes.build())
    }

    /// A 200.
    pub(super) fn found(&mut self, content_type: &'static str, body: impl Into<Body>) -> Response {
        self.interner.found(content_type, body.into())
    }

    /// A 200 that no other VM has, so that looking for one would be in vain.
    pub(super) fn own(&mut self, content_type: &'static str, body: impl Into<Body>) -> Response {
        let body = body.into();
        Response::sharing(self.interner.found_head(content_type, &body), body)
    }

    /// Any response.
    pub(super) fn share(&mut self, response: Response) -> Response {
        self.interner.response(response)
    }

    /// Octets that others may have, too.
    pub(super) fn octets(&mut self, octets: impl Into<Bytes>) -> Bytes {
        self.interner.octets(octets.into())
    }

    /// A text as YAML's scalar, which others may have, too.
    pub(super) fn yaml_scalar(&mut self, text: &str) -> Bytes {
        self.interner.written(Notation::Yaml, text, || yaml::scalar(text).into_bytes())
    }

    /// A JSON document whose long strings are shared with the documents of other VMs.
    pub(super) fn document(&mut self, value: &Value) -> Document {
        Document::new(value, self.interner)
    }

    /// A 200 with a JSON document, which is the VM's own.
    pub(super) fn json(&mut self, value: &Value) -> Response {
        let body = self.document(value).body();
        self.own(JSON, body)
    }

    /// The octets of a payload; 503 while they are still to be read, which clients repeat until they are.
    pub(super) fn payload(&mut self, payload: &Payload) -> Response {
        let Some(octets) = payload.bytes() else { return self.unread() };
        let is_this = |known: &Bytes| std::ptr::eq::<[u8]>(&**known, &*octets);
        if let Some((_, response)) = self.payloads.iter().find(|(known, _)| is_this(known)) {
            return response.clone();
        }
        let shared = self.octets(octets.clone());
        let response = self.found(OCTETS, shared);
        self.payloads.push((octets, response.clone()));
        response
    }

    /// What is said of something whose source is still to be read.
    pub(super) fn unread(&mut self) -> Response {
        self.share(Response::error(Status(503), &[("Retry-After", "1")]))
    }

    fn add(&mut self, path: impl Into<Cow<'static, str>>, route: Route) {
        let route = self.interner.route(route.at(path));
        self.routes.place(self.host, route);
    }

    /// Answers every reader of `path`.
    pub(super) fn open(&mut self, path: impl Into<Cow<'static, str>>, response: Response) {
        self.guarded(path, &[], response);
    }

    /// Answers every reader of `path` with a line of text.
    pub(super) fn text(&mut self, path: impl Into<Cow<'static, str>>, text: impl Into<String>) {
        let response = self.found(TEXT, text.into());
        self.open(path, response);
    }

    /// Answers readers of `path` who pass the guards.
    pub(super) fn guarded(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        guards: &'static [Guard],
        response: Response,
    ) {
        let route = Route::of(self.dialect, self.datasource, Endpoint::Fixed(response)).guarded(guards);
        self.add(path, route);
    }

    /// Answers `methods` on `path` when they come, for those who pass the guards.
    pub(super) fn live(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        methods: Methods,
        guards: &'static [Guard],
        live: impl Live + 'static,
    ) {
        let route = Route::of(self.dialect, self.datasource, Endpoint::Live(Arc::new(live)));
        self.add(path, route.guarded(guards).methods(methods));
    }

    /// The same for `path` and every path below it that has no route of its own.
    pub(super) fn live_below(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        methods: Methods,
        guards: &'static [Guard],
        live: impl Live + 'static,
    ) {
        let route = Route::of(self.dialect, self.datasource, Endpoint::Live(Arc::new(live)));
        self.add(path, route.guarded(guards).methods(methods).and_below());
    }

    /// Answers readers of `path` who send `header` and pass the guards; those without it get what else there
    /// is at `path`.
    pub(super) fn guarded_when(
        &mut self,
        header: &'static str,
        path: impl Into<Cow<'static, str>>,
        guards: &'static [Guard],
        response: Response,
    ) {
        let route =
            Route::of(self.dialect, self.datasource, Endpoint::Fixed(response)).guarded(guards).when(header);
        self.add(path, route);
    }
}
