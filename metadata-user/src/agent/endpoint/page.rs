//! The live view as a page: `/` of the metrics address, and `/events`, the stream of documents that it shows.
//!
//! The page is one file without parts from elsewhere. Its policy allows its own script and style by their digests, and
//! requests to its own origin alone. It only reads.
//!
//! A browser may be led here by a page from elsewhere, through a port that is forwarded to the user's machine. So the
//! page answers only to names that nobody else can point here (`Host`, see [`PageHosts`]), and the stream, which
//! takes a seat, only to its own page.

use std::cmp::Reverse;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, Query, Request as HttpRequest, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::stream::unfold;
use metadata_common::printable::Printable;
use metadata_control::top::TopQuery;
use metadata_feed::listen::ConnectionHolder;
use sha2::{Digest as _, Sha256};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::{Agent, ControlRequest, LongLivedAnswer, TEXT, refusal};

/// Limit on viewers at the same time.
pub(super) const VIEWERS: usize = 4;
/// How often a viewer gets the documents.
const EVERY: Duration = Duration::from_secs(1);
/// Limit on the duration of a stream. The browser then asks again.
const STREAM_MOST: Duration = Duration::from_secs(3_600);

/// Characters of a refused host that the answer repeats.
const HOST_SHOWN: usize = 128;
/// What a viewer is told whose seat another gets.
const LOST: &str = "Another viewer has this page's place now: the agent serves 4 at a time, and the longest of the \
                    peer with the most makes room. Reload to take one back, or use `xdp-imds top` on the node.";

const PAGE: &str = include_str!("page.html");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
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

/// The hosts that the page answers to: addresses, `localhost`, the node's name and those of `page_hosts`. Somebody
/// else's name can lead a browser to any address (DNS rebinding), but a browser sends that name in `Host`.
#[derive(Clone, Debug)]
pub(crate) struct PageHosts(Arc<[String]>);

impl PageHosts {
    /// The hosts that a configuration allows, and the node's own name.
    pub(crate) fn new(configured: &[String]) -> Self {
        let node = rustix::system::uname().nodename().to_string_lossy().to_ascii_lowercase();
        let names = configured.iter().map(|name| name.trim_end_matches('.').to_ascii_lowercase());
        Self(names.chain([node]).filter(|name| !name.is_empty()).collect())
    }

    fn allow(&self, authority: &Authority) -> bool {
        let host = authority.host();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let name = bare.trim_end_matches('.').to_ascii_lowercase();
        bare.parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || self.0.contains(&name)
    }
}

/// Answers only requests for an allowed host. A request names it in `Host` and, for a proxy, in its target.
async fn check_host(Extension(hosts): Extension<PageHosts>, request: HttpRequest, next: Next) -> Response {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let mut named: Vec<_> = request.headers().get_all(header::HOST).iter().map(text).collect();
    named.extend(request.uri().authority().map(ToString::to_string));
    let refused = match &*named {
        [] => Some("none"),
        named => named
            .iter()
            .map(String::as_str)
            .find(|name| !name.parse::<Authority>().is_ok_and(|it| hosts.allow(&it))),
    };
    let Some(refused) = refused else { return next.run(request).await };
    let shown: String = refused.chars().take(HOST_SHOWN).collect();
    let text = format!(
        "invalid Host: expected localhost, an IP address or this node's name, found `{}`; to use another name, add it \
         to `page_hosts` of the agent's configuration\n",
        Printable(&shown)
    );
    (StatusCode::MISDIRECTED_REQUEST, [(header::CONTENT_TYPE, TEXT)], text).into_response()
}

/// Refuses a stream to the page of another origin (<https://www.w3.org/TR/fetch-metadata/>, and `Origin` of RFC 6454
/// for older browsers). Clients that are no browsers do not send the fields.
async fn check_site(request: HttpRequest, next: Next) -> Response {
    if is_own_page(request.headers()) {
        return next.run(request).await;
    }
    let text = "another site's page may not watch this node: open the page at this address itself\n";
    (StatusCode::FORBIDDEN, [(header::CONTENT_TYPE, TEXT)], text).into_response()
}

fn is_own_page(fields: &HeaderMap) -> bool {
    let field = |name: &HeaderName| fields.get(name).map(HeaderValue::as_bytes);
    let site = field(&SEC_FETCH_SITE).is_none_or(|site| site == b"same-origin" || site == b"none");
    let origin = field(&header::ORIGIN).is_none_or(|origin| {
        let origin = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
        origin.is_some() && origin == field(&header::HOST)
    });
    site && origin
}

/// The viewers. When all seats are taken, a new viewer gets that of another: of the peer with the most seats, the
/// oldest. So one peer cannot keep the page from the others, and a forgotten browser cannot from anybody.
#[derive(Clone, Debug, Default)]
struct ViewerSeats(Arc<SeatTable>);

#[derive(Debug, Default)]
struct SeatTable {
    /// The number of the next seat; later seats have greater numbers.
    next: AtomicU64,
    taken: Mutex<Vec<Seat>>,
}

#[derive(Debug)]
struct Seat {
    number: u64,
    holder: ConnectionHolder,
    /// Tells the viewer that it has lost its seat.
    lost: oneshot::Sender<()>,
}

/// A viewer's seat; dropping it frees it.
struct TakenSeat {
    seats: ViewerSeats,
    number: u64,
    lost: oneshot::Receiver<()>,
}

impl ViewerSeats {
    fn lock(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, holder: ConnectionHolder) -> TakenSeat {
        let mut seats = self.lock();
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let (lost, is_lost) = oneshot::channel();
        seats.push(Seat { number, holder, lost });
        if seats.len() > VIEWERS {
            let count = |holder| seats.iter().filter(|seat| seat.holder == holder).count();
            let others = seats.iter().enumerate().filter(|(_, seat)| seat.number != number);
            let loser = others.min_by_key(|(_, seat)| (Reverse(count(seat.holder)), seat.number));
            if let Some((at, _)) = loser {
                // The viewer may have left at the same moment.
                _ = seats.remove(at).lost.send(());
            }
        }
        drop(seats);
        TakenSeat { seats: self.clone(), number, lost: is_lost }
    }
}

impl Drop for TakenSeat {
    fn drop(&mut self) {
        self.seats.lock().retain(|seat| seat.number != self.number);
    }
}

/// Adds the page and its stream.
pub(super) fn routes(router: Router<Agent>, hosts: PageHosts) -> Router<Agent> {
    let page = Router::new()
        .route("/", get(page))
        .route("/events", get(events).layer(middleware::from_fn(check_site)))
        .layer(middleware::from_fn(check_host))
        .layer(Extension(hosts))
        .layer(Extension(ViewerSeats::default()))
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
    Extension(seats): Extension<ViewerSeats>,
    Extension(holder): Extension<ConnectionHolder>,
    Query(query): Query<TopQuery>,
) -> Response {
    if let Some(refusal) = refusal(&query) {
        return refusal;
    }
    let now = Instant::now();
    let seat = seats.take(holder);
    let viewer = Viewer { agent, query, next: now, until: now + STREAM_MOST, seat };
    let stream = unfold(Some(viewer), |viewer| async move {
        let mut viewer = viewer?;
        let has_lost = tokio::select! {
            biased;
            _ = &mut viewer.seat.lost => true,
            () = sleep_until(viewer.next) => false,
        };
        if has_lost {
            return Some((Ok(Bytes::from(event("lost", &LOST))), None));
        }
        viewer.next = (viewer.next + EVERY).max(Instant::now());
        let text = viewer.events().await;
        (viewer.next < viewer.until).then_some((Ok::<_, Infallible>(Bytes::from(text)), Some(viewer)))
    });
    let mut answer = Body::from_stream(stream).into_response();
    answer.headers_mut().insert(header::CONTENT_TYPE, EVENT_STREAM);
    answer.extensions_mut().insert(LongLivedAnswer);
    answer
}

/// A browser that reads the stream.
struct Viewer {
    agent: Agent,
    query: TopQuery,
    next: Instant,
    until: Instant,
    seat: TakenSeat,
}

impl Viewer {
    /// The events of one second: the node's, and those of the VM that the page shows. A comment if the agent is busy.
    async fn events(&self) -> String {
        let query = self.query.clone();
        let Ok(node) = self.agent.ask(|reply| ControlRequest::Top(query, reply)).await else {
            return ": busy\n\n".into();
        };
        let mut text = event("top", &node);
        if let Some(name) = self.query.guest.clone()
            && let Ok(pages) = self.agent.ask(|reply| ControlRequest::VmPages(name, reply)).await
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
    use super::{ConnectionHolder, PAGE, POLICY, PageHosts, TakenSeat, ViewerSeats, inner};

    #[test]
    fn the_page_answers_to_names_that_nobody_else_can_point_here() {
        let hosts = PageHosts::new(&["Imds.Example.org.".into()]);
        let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for (host, allowed) in [
            ("localhost", true),
            ("LocalHost:9177", true),
            ("a.localhost:1", true),
            ("127.0.0.1:9177", true),
            ("[::1]:9177", true),
            ("192.0.2.7", true),
            (&node, true),
            ("imds.example.org:443", true),
            ("imds.example.org.evil.example", false),
            ("evil.example:9177", false),
            ("localhost.evil.example", false),
            ("notlocalhost", false),
            ("1.2.3.4.evil.example", false),
        ] {
            assert_eq!(hosts.allow(&host.parse().expect("a host")), allowed, "{host}");
        }
    }

    #[test]
    fn a_new_viewer_gets_the_oldest_seat_of_the_peer_with_the_most() {
        let (seats, peer) = (ViewerSeats::default(), ConnectionHolder::User);
        // Each row: the peers that sit, in order; the peer that comes; the place of the seat that it gets.
        for (sitting, comes, loses) in [
            ([1, 2, 2, 3], 4, 1),
            ([1, 2, 3, 4], 5, 0),
            ([1, 2, 3, 2], 2, 1),
            ([1, 1, 1, 1], 1, 0),
            ([1, 2, 3, 4], 4, 3),
        ] {
            let mut taken: Vec<_> = sitting.map(|number| seats.take(peer(number))).into_iter().collect();
            taken.push(seats.take(peer(comes)));
            let has_lost = |(at, seat): (usize, &mut TakenSeat)| seat.lost.try_recv().is_ok().then_some(at);
            let lost: Vec<_> = taken.iter_mut().enumerate().filter_map(has_lost).collect();
            assert_eq!(lost, [loses], "{sitting:?}, then {comes}");
            drop(taken);
            assert!(seats.lock().is_empty());
        }
    }

    #[test]
    fn the_page_has_one_script_and_one_style_and_loads_nothing() {
        for tag in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "{tag}");
            assert!(!inner(tag).is_empty(), "{tag}");
        }
        for load in
            ["src=", "href=", "url(", "@import", "http:", "https:", "HTML", "style=", "insertAdjacent"]
        {
            assert!(!PAGE.contains(load), "{load}");
        }
        // What others wrote is shown by `set`, which makes controls visible, or goes through `printable`.
        let script = inner("script");
        assert_eq!(script.matches("one.textContent = text;").count(), 1);
        for field in [".textContent = ", ".title = ", ".data = ", ".innerText = "] {
            for (at, _) in script.match_indices(field) {
                let given = &script[at + field.len()..];
                let is_set = field == ".textContent = " && given.starts_with("text;");
                assert!(is_set || given.starts_with("printable("), "{field}{}", &given[..40]);
            }
        }
        let policy = POLICY.to_str().expect("text");
        assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
    }
}
