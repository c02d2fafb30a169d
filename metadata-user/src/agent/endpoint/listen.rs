//! Accepts connections to the endpoints, within limits on their number, duration and size.
//!
//! A slow client occupies one connection for a limited time. At the limit on connections, one that waits for its client
//! is closed. Probes and scrapers are therefore served, however many slow clients there are.

use std::fmt;
use std::time::Duration;

use axum::Router;
use axum::http::Method;
use hyper::Request;
use hyper::body::Incoming;
pub(crate) use metadata_feed::listen::EvictionGuard;
use metadata_feed::listen::{ConnectionLimit, Listener, WhenFull};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tracing::info;

pub(super) use crate::http_connection::LongLivedAnswer;
use crate::http_connection::{self, HttpLimits};

/// Limit on connections of one listener. Beyond it one that waits for its client is closed.
pub(super) const CONNECTIONS: usize = 32;
/// Time limit from the start of a connection, or the end of an answer, to the end of the next request's head.
pub(super) const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Limit on a request's head, in bytes.
pub(super) const HEAD_MAX: usize = 16 << 10;
/// Limit on the duration of a connection, unless its answer is [`LongLivedAnswer`].
pub(super) const LIFE: Duration = Duration::from_secs(30);

/// Limit on the time to finish the present request at the end of [`LIFE`].
pub(super) const END_WITHIN: Duration = Duration::from_secs(5);

const LIMITS: HttpLimits =
    HttpLimits { head_within: HEAD_WITHIN, head_max: HEAD_MAX, life: LIFE, end_within: END_WITHIN };

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

/// Serves the connections of a listener until the task ends. Handlers find [`Peer`], [`EvictionGuard`] and the
/// connection's [`Holder`](metadata_feed::listen::ConnectionHolder) in a request's extensions.
pub(crate) async fn serve<L: PeerListener>(listener: L, app: Router) -> anyhow::Result<()> {
    let places = ConnectionLimit { name: L::NAME, most: CONNECTIONS, when_full: WhenFull::Evict };
    let attend = |stream, stay: EvictionGuard| {
        let (peer, holder) = (L::peer(&stream), L::holder(&stream));
        let for_handlers = stay.clone();
        let prepare = move |request: &mut Request<Incoming>| {
            if !matches!(*request.method(), Method::GET | Method::HEAD) {
                info!(by = %peer, method = %request.method(), path = request.uri().path(), "request for a change");
            }
            let extensions = request.extensions_mut();
            extensions.insert(peer);
            extensions.insert(holder);
            extensions.insert(for_handlers.clone());
        };
        http_connection::serve(stream, app.clone(), LIMITS, stay, prepare)
    };
    match metadata_feed::listen::serve(&listener, places, attend).await {}
}
