//! Where dialects write their routes.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;

use crate::http::{Response, Status};
use crate::record::vm::Payload;
use crate::store::{Guard, Interner, RequestLimit, Responses, ResponsesBuilder, Route};

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
}

impl<'a> Sheet<'a> {
    pub(super) fn new(interner: &'a mut Interner) -> Self {
        Self { interner, routes: Responses::builder() }
    }

    /// Sets how often the VM may ask.
    pub(super) fn limit(&mut self, limit: RequestLimit) {
        self.routes.limit(limit);
    }

    pub(super) fn finish(self) -> Responses {
        self.routes.build()
    }

    /// A 200.
    pub(super) fn found(&mut self, content_type: &str, body: impl Into<Bytes>) -> Response {
        let body = self.interner.body(body.into());
        self.share(Response::new(Status(200), Some(content_type), &[], body))
    }

    /// Another status with a body.
    pub(super) fn share(&mut self, response: Response) -> Response {
        self.interner.response(response)
    }

    /// The octets of a payload; 503 while they are still to be read, which clients repeat until they are.
    pub(super) fn payload(&mut self, payload: &Payload) -> Response {
        match payload.bytes() {
            Some(octets) => self.found(OCTETS, octets),
            None => self.share(Response::error(Status(503), &[("Retry-After", "1")])),
        }
    }

    /// Answers every reader of `path`.
    pub(super) fn open(&mut self, path: impl Into<Cow<'static, str>>, response: Response) {
        self.routes.add(path, Route::open(response));
    }

    /// Answers readers of `path` who pass the guards.
    pub(super) fn guarded(
        &mut self,
        path: impl Into<Cow<'static, str>>,
        guards: &Arc<[Guard]>,
        response: Response,
    ) {
        self.routes.add(path, Route::guarded(response, Arc::clone(guards)));
    }
}
