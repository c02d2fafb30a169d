//! All a VM can be answered: path to response.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use crate::http::{Method, Request, Response, Status};

/// What `Allow` says: reading is all that is served.
const ALLOW: (&str, &str) = ("Allow", "GET, HEAD");

static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(Status(404), &[]));
static METHOD_NOT_ALLOWED: LazyLock<Response> = LazyLock::new(|| Response::error(Status(405), &[ALLOW]));

/// Something a request must satisfy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// A header field must be there with this value; name and value are compared case-insensitively.
    HeaderIs {
        /// The field's name.
        name: &'static str,
        /// The value wanted.
        value: &'static str,
    },
    /// A header field must not be there, not even empty.
    HeaderAbsent {
        /// The field's name.
        name: &'static str,
    },
}

impl Condition {
    fn holds(self, request: &Request<'_>) -> bool {
        match self {
            Self::HeaderIs { name, value } => {
                request.headers.get(name).is_some_and(|found| found.eq_ignore_ascii_case(value.as_bytes()))
            }
            Self::HeaderAbsent { name } => !request.headers.contains(name),
        }
    }
}

/// A condition, and the answer to requests that do not meet it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// What must hold.
    pub condition: Condition,
    /// The answer when it does not.
    pub otherwise: Response,
}

/// How one path is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    response: Response,
    guards: Option<Arc<[Guard]>>,
}

impl Route {
    /// Answers every reader.
    #[must_use]
    pub fn open(response: Response) -> Self {
        Self { response, guards: None }
    }

    /// Answers readers who pass `guards`; the first guard that fails decides.
    #[must_use]
    pub fn guarded(response: Response, guards: Arc<[Guard]>) -> Self {
        Self { response, guards: Some(guards) }
    }

    /// The response behind the guards.
    #[must_use]
    pub fn response(&self) -> &Response {
        &self.response
    }

    /// The guards, in order.
    #[must_use]
    pub fn guards(&self) -> &[Guard] {
        self.guards.as_deref().unwrap_or_default()
    }

    fn answer(&self, request: &Request<'_>) -> Response {
        let refusing = self.guards().iter().find(|guard| !guard.condition.holds(request));
        refusing.map_or(&self.response, |guard| &guard.otherwise).clone()
    }
}

/// Everything one VM can be answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Responses {
    /// Sorted by path.
    routes: Box<[(Cow<'static, str>, Route)]>,
    limit: RequestLimit,
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
    pub fn builder() -> ResponsesBuilder {
        ResponsesBuilder::default()
    }

    /// The answer to a request. Copies reference counts, allocates nothing.
    ///
    /// Methods other than GET and HEAD are 405 with `Allow` on every path, known or not; unknown paths
    /// are 404. HEAD gets the answer to GET: whoever sends it leaves the body out (RFC 9110 §9.3.2).
    #[must_use]
    pub fn answer(&self, request: &Request<'_>) -> Response {
        if !matches!(request.method, Method::Get | Method::Head) {
            return METHOD_NOT_ALLOWED.clone();
        }
        self.route(request.target.path).map_or_else(|| NOT_FOUND.clone(), |route| route.answer(request))
    }

    /// How often the VM may ask.
    #[must_use]
    pub fn limit(&self) -> RequestLimit {
        self.limit
    }

    /// The route of a normalised path.
    #[must_use]
    pub fn route(&self, path: &str) -> Option<&Route> {
        let index = self.routes.binary_search_by(|(known, _)| known.as_ref().cmp(path)).ok()?;
        Some(&self.routes[index].1)
    }

    /// All paths and their routes, by path.
    pub fn routes(&self) -> impl ExactSizeIterator<Item = (&str, &Route)> {
        self.routes.iter().map(|(path, route)| (path.as_ref(), route))
    }
}

/// Collects the routes of one VM.
#[derive(Debug, Default)]
pub struct ResponsesBuilder {
    routes: Vec<(Cow<'static, str>, Route)>,
    limit: RequestLimit,
}

impl ResponsesBuilder {
    /// Sets how often the VM may ask.
    pub fn limit(&mut self, limit: RequestLimit) {
        self.limit = limit;
    }

    /// Adds the route of a normalised path: `/`, or `/a/b` without a trailing slash.
    ///
    /// A path added twice keeps the first route, so dialects listed earlier win.
    pub fn add(&mut self, path: impl Into<Cow<'static, str>>, route: Route) {
        self.routes.push((path.into(), route));
    }

    /// Finishes.
    #[must_use]
    pub fn build(self) -> Responses {
        let mut routes = self.routes;
        routes.sort_by(|(a, _), (b, _)| a.cmp(b));
        routes.dedup_by(|(later, _), (first, _)| later == first);
        Responses { routes: routes.into(), limit: self.limit }
    }
}

#[cfg(test)]
mod tests {
    use super::{Condition, Guard, Responses, Route};
    use crate::http::{Headers, Method, Request, Response, Status, Target};

    fn text(body: &'static str) -> Response {
        Response::new(Status(200), Some("text/plain; charset=utf-8"), &[], body.into())
    }

    fn ask(responses: &Responses, method: Method, path: &str, fields: &[(&str, &str)]) -> Response {
        let fields: Vec<_> =
            fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
        let target = Target { path, query: "" };
        responses.answer(&Request { method, target, headers: Headers::new(&fields), body: b"" })
    }

    fn guarded() -> Responses {
        let absent = Condition::HeaderAbsent { name: "X-Forwarded-For" };
        let flavour = Condition::HeaderIs { name: "Metadata", value: "true" };
        let guards = [
            Guard { condition: absent, otherwise: Response::error(Status(403), &[]) },
            Guard { condition: flavour, otherwise: Response::error(Status(400), &[]) },
        ];
        let mut builder = Responses::builder();
        builder.add("/b", Route::guarded(text("secret"), guards.into()));
        builder.add("/a", Route::open(text("open")));
        builder.add("/a", Route::open(text("later")));
        builder.build()
    }

    #[test]
    fn known_paths_are_answered_and_others_not_found() {
        let responses = guarded();
        for (path, status, body) in [
            ("/a", 200, "open"),
            ("/", 404, "Not Found\n"),
            ("/a/b", 404, "Not Found\n"),
            ("/A", 404, "Not Found\n"),
        ] {
            let answer = ask(&responses, Method::Get, path, &[]);
            assert_eq!((answer.status().0, answer.body().as_ref()), (status, body.as_bytes()), "{path}");
        }
    }

    #[test]
    fn head_gets_the_answer_to_get() {
        let responses = guarded();
        for path in ["/a", "/b", "/nope"] {
            assert_eq!(ask(&responses, Method::Head, path, &[]), ask(&responses, Method::Get, path, &[]));
        }
    }

    #[test]
    fn methods_that_write_are_not_allowed_on_any_path() {
        let methods =
            [Method::Post, Method::Put, Method::Patch, Method::Delete, Method::Options, Method::Other];
        for method in methods {
            for path in ["/a", "/b", "/nope"] {
                let answer = ask(&guarded(), method, path, &[]);
                assert_eq!(answer.status(), Status(405), "{method:?} {path}");
                let head = std::str::from_utf8(answer.head()).expect("heads are text");
                assert!(head.contains("\r\nAllow: GET, HEAD\r\n"), "{head}");
            }
        }
    }

    #[test]
    fn the_first_guard_that_fails_decides() {
        let xff = ("x-forwarded-for", "");
        for (fields, status) in [
            (&[][..], 400),
            (&[("Metadata", "false")][..], 400),
            (&[("Metadata", "")][..], 400),
            (&[("metadata", "TRUE")][..], 200),
            (&[("Metadata", "True"), xff][..], 403),
            (&[xff][..], 403),
        ] {
            assert_eq!(ask(&guarded(), Method::Get, "/b", fields).status().0, status, "{fields:?}");
        }
    }
}
