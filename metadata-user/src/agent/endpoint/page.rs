//! The live view as a page: `/` of the metrics address, and `/events`, the stream of documents that it shows.
//!
//! The page is one file without parts from elsewhere. Its policy allows its own script and style by their digests, and
//! requests to its own origin alone. It only reads.

use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::stream::unfold;
use metadata_control::top::TopQuery;
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::top::refusal;
use super::{Agent, Lasting, Request, TEXT};

/// Limit on viewers at the same time.
pub(super) const VIEWERS: usize = 4;
/// How often a viewer gets the documents.
const EVERY: Duration = Duration::from_secs(1);
/// Limit on the duration of a stream. The browser then asks again.
const STREAM_MOST: Duration = Duration::from_secs(3_600);

const PAGE: &str = include_str!("page.html");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");

/// The policy of the page (<https://www.w3.org/TR/CSP3/>).
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let digest = |tag: &str| STANDARD.encode(Sha256::digest(inner(tag)));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        digest("script"),
        digest("style")
    );
    HeaderValue::try_from(policy).unwrap_or_else(|_| HeaderValue::from_static("default-src 'none'"))
});

/// The text between the tags of the page's only element of a name.
fn inner(tag: &str) -> &'static str {
    let begins = PAGE.split_once(&format!("<{tag}>")).map_or("", |(_, rest)| rest);
    begins.split_once(&format!("</{tag}>")).map_or("", |(text, _)| text)
}

/// Limits the viewers.
type Seats = Arc<Semaphore>;

/// Adds the page and its stream.
pub(super) fn routes(router: Router<Agent>) -> Router<Agent> {
    let seats: Seats = Arc::new(Semaphore::new(VIEWERS));
    let page = Router::new()
        .route("/", get(page))
        .route("/events", get(events))
        .layer(Extension(seats))
        .layer(middleware::map_response(closed));
    router.merge(page)
}

async fn page() -> Response {
    let mut answer = Body::from(PAGE).into_response();
    answer.headers_mut().insert(header::CONTENT_TYPE, HTML);
    answer.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY.clone());
    answer
}

/// Adds the fields that keep browsers from guessing, storing, and telling others.
async fn closed(mut answer: Response) -> Response {
    let fields: [(HeaderName, &str); 3] = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in fields {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

async fn events(
    State(agent): State<Agent>,
    Extension(seats): Extension<Seats>,
    Query(query): Query<TopQuery>,
) -> Response {
    if let Some(refusal) = refusal(&query) {
        return refusal;
    }
    let Ok(seat) = seats.try_acquire_owned() else {
        let head = [(header::CONTENT_TYPE, TEXT), (header::RETRY_AFTER, "10")];
        let text = format!("{VIEWERS} viewers are the limit: close another, or use `xdp-imds top`\n");
        return (StatusCode::SERVICE_UNAVAILABLE, head, text).into_response();
    };
    let now = Instant::now();
    let viewer = Viewer { agent, query, next: now, until: now + STREAM_MOST, _seat: seat };
    let stream = unfold(viewer, |mut viewer| async move {
        sleep_until(viewer.next).await;
        viewer.next = (viewer.next + EVERY).max(Instant::now());
        let text = viewer.events().await;
        (viewer.next < viewer.until).then_some((Ok::<_, Infallible>(Bytes::from(text)), viewer))
    });
    let mut answer = Body::from_stream(stream).into_response();
    answer.headers_mut().insert(header::CONTENT_TYPE, EVENT_STREAM);
    answer.extensions_mut().insert(Lasting);
    answer
}

/// A browser that reads the stream.
struct Viewer {
    agent: Agent,
    query: TopQuery,
    next: Instant,
    until: Instant,
    _seat: OwnedSemaphorePermit,
}

impl Viewer {
    /// The events of one second: the node's, and those of the VM that the page shows. A comment if the agent is busy.
    async fn events(&self) -> String {
        let query = self.query.clone();
        let Ok(node) = self.agent.ask(|reply| Request::Top(query, reply)).await else {
            return ": busy\n\n".into();
        };
        let mut text = event("top", &node);
        if let Some(name) = self.query.guest.clone()
            && let Ok(pages) = self.agent.ask(|reply| Request::VmPages(name, reply)).await
        {
            text.push_str(&event("vm", &pages));
        }
        text
    }
}

/// An event (<https://html.spec.whatwg.org/multipage/server-sent-events.html>). JSON has no line feed outside of
/// strings, and escapes those inside.
fn event<T: serde::Serialize>(name: &str, document: &T) -> String {
    let json = serde_json::to_string(document).unwrap_or_default();
    format!("event: {name}\ndata: {json}\n\n")
}

#[cfg(test)]
mod tests {
    use super::{PAGE, POLICY, inner};

    #[test]
    fn the_page_has_one_script_and_one_style_and_loads_nothing() {
        for tag in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "{tag}");
            assert!(!inner(tag).is_empty(), "{tag}");
        }
        for load in ["src=", "href=", "url(", "@import", "http:", "https:", "innerHTML", "style="] {
            assert!(!PAGE.contains(load), "{load}");
        }
        let policy = POLICY.to_str().expect("text");
        assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
    }
}
