//! Accepts connections to the endpoints, within limits on their number, duration and size.
//!
//! A slow client occupies one connection for a limited time. At the limit on connections, the oldest is closed. Probes
//! and scrapers are therefore served, however many slow clients there are.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Method;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
pub(crate) use metadata_listen::Stay;
use metadata_listen::{Listener, Places, WhenFull};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tracing::{debug, info};

/// Limit on connections of one listener. Beyond it the oldest is closed.
pub(super) const CONNECTIONS: usize = 32;
/// Limit from the start of a connection, or the end of an answer, to the end of the next request's head.
pub(super) const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Limit on a request's head, in octets.
pub(super) const HEAD_MAX: usize = 16 << 10;
/// Limit on the duration of a connection, unless its answer is [`Lasting`].
pub(super) const LIFE: Duration = Duration::from_secs(30);

/// A response extension for an answer that lasts until the client closes it. Its connection is not closed for a new
/// connection, and after [`LIFE`] only if the client has read nothing for so long. The handler limits the number of such
/// answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lasting;

/// The peer of a connection, in every request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A client on the network.
    Network,
    /// A process of this machine, by its credentials (unix(7), `SO_PEERCRED`).
    Process {
        /// Its user ID.
        uid: u32,
        /// Its group ID.
        gid: u32,
        /// Its PID, if it is visible in the agent's PID namespace.
        pid: Option<i32>,
    },
}

impl Peer {
    /// True for root and the agent's own user, who can read the agent's memory and write its files anyway.
    #[must_use]
    pub(crate) fn is_owner(self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        matches!(self, Self::Process { uid, .. } if uid == 0 || uid == own)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network => f.write_str("the network"),
            Self::Process { uid, gid, pid } => {
                write!(f, "user {uid}, group {gid}, process {}", pid.unwrap_or_default())
            }
        }
    }
}

/// A listener that knows the peers of its connections.
pub(crate) trait PeerListener: Listener<Stream: AsyncRead + AsyncWrite + Unpin> {
    /// Its name in the log.
    const NAME: &str;

    /// The peer of a connection.
    fn peer(stream: &Self::Stream) -> Peer;
}

impl PeerListener for TcpListener {
    const NAME: &str = "the metrics address";

    fn peer(_: &TcpStream) -> Peer {
        Peer::Network
    }
}

impl PeerListener for UnixListener {
    const NAME: &str = "the control socket";

    fn peer(stream: &UnixStream) -> Peer {
        stream.peer_cred().map_or(Peer::Network, |peer| Peer::Process {
            uid: peer.uid(),
            gid: peer.gid(),
            pid: peer.pid(),
        })
    }
}

/// Serves the connections of a listener until the task ends. Handlers find [`Peer`] and [`Stay`] in a request's
/// extensions.
pub(crate) async fn serve<L: PeerListener>(listener: L, app: Router) -> anyhow::Result<()> {
    let places = Places { name: L::NAME, most: CONNECTIONS, when_full: WhenFull::EndOldest };
    let attend = |stream, stay| attend(L::peer(&stream), TokioIo::new(stream), app.clone(), stay);
    match metadata_listen::serve(&listener, places, attend).await {}
}

/// Serves one connection from its first request to its last.
async fn attend<I>(peer: Peer, io: TokioIo<I>, app: Router, stay: Stay)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // Of a lasting answer: whether the client has made room for more of it.
    let goes_on = OnceLock::<Arc<AtomicBool>>::new();
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            info!(by = %peer, method = %request.method(), path = request.uri().path(), "request for a change");
        }
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(stay.clone());
        let answer = TowerToHyperService::new(app.clone()).call(request);
        let (stay, goes_on) = (&stay, &goes_on);
        async move {
            let answer = answer.await?;
            if answer.extensions().get::<Lasting>().is_none() {
                return Ok::<_, std::convert::Infallible>(answer);
            }
            stay.keep();
            let goes_on = Arc::clone(goes_on.get_or_init(Arc::default));
            let note = move |frame| {
                goes_on.store(true, Ordering::Relaxed);
                frame
            };
            Ok(answer.map(|body| Body::new(body.map_frame(note))))
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_buf_size(HEAD_MAX);
    let mut connection = pin!(http.serve_connection(io, service));
    loop {
        match tokio::time::timeout(LIFE, connection.as_mut()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => return debug!(%peer, "a connection ended: {error}"),
            Err(_) if stay.is_held() && goes_on.get().is_none_or(|it| it.swap(false, Ordering::Relaxed)) => {}
            Err(_) => {
                return debug!(%peer, "a connection lasted longer than {LIFE:?}, or its client reads nothing");
            }
        }
    }
}
