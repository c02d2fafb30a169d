//! Accepts connections to the endpoints, within limits on their number, duration and size.
//!
//! A slow client occupies one place, for a limited time. When all places are taken, the oldest connection is closed. Probes
//! and scrapers are therefore served, however many slow clients there are.

use std::collections::VecDeque;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::Method;
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, info};

/// Limit on connections of one listener. Beyond it the oldest is closed.
pub(super) const CONNECTIONS: usize = 32;
/// Limit from the start of a connection, or the end of an answer, to the end of the next request's head.
pub(super) const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Limit on a request's head, in octets.
pub(super) const HEAD_MAX: usize = 16 << 10;
/// Limit on the duration of a connection, unless its answer is [`Lasting`].
pub(super) const LIFE: Duration = Duration::from_secs(30);

/// A response extension for an answer that lasts until the client closes it. The connection is closed neither after
/// [`LIFE`] nor for others. The handler limits the number of such answers.
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
    /// True for root and the agent's own user, who can read its memory and write its files in any case.
    #[must_use]
    pub(crate) fn is_owner(self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        matches!(self, Self::Process { uid, .. } if uid == 0 || uid == own)
    }
}

/// In every request's extensions: keeps the connection while a handler makes its client wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stay(Arc<AtomicBool>);

impl Stay {
    /// Until the result is dropped, the connection is closed neither for others nor after [`LIFE`]. The handler limits the
    /// number of such connections.
    pub(crate) fn hold(&self) -> Staying {
        self.0.store(true, Ordering::Relaxed);
        Staying(self.clone())
    }
}

/// Keeps a connection until it is dropped.
#[derive(Debug)]
pub(crate) struct Staying(Stay);

impl Drop for Staying {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Relaxed);
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
pub(crate) trait PeerListener: Listener {
    /// The peer of a connection.
    fn peer(io: &Self::Io) -> Peer;
}

impl PeerListener for TcpListener {
    fn peer(_: &TcpStream) -> Peer {
        Peer::Network
    }
}

impl PeerListener for UnixListener {
    fn peer(io: &UnixStream) -> Peer {
        io.peer_cred().map_or(Peer::Network, |peer| Peer::Process {
            uid: peer.uid(),
            gid: peer.gid(),
            pid: peer.pid(),
        })
    }
}

/// Serves the connections of a listener until the task ends.
pub(crate) async fn serve<L: PeerListener>(mut listener: L, app: Router) -> anyhow::Result<()> {
    let mut places = Places::default();
    loop {
        tokio::select! {
            (io, _) = listener.accept() => places.seat(L::peer(&io), TokioIo::new(io), &app),
            Some(_) = places.tasks.join_next() => {}
        }
    }
}

/// The connections of a listener.
#[derive(Default)]
struct Places {
    /// Oldest first, each with whether it must stay. Ended ones are removed when the next connection arrives.
    taken: VecDeque<(AbortHandle, Arc<AtomicBool>)>,
    tasks: JoinSet<()>,
}

impl Places {
    fn seat<I>(&mut self, peer: Peer, io: TokioIo<I>, app: &Router)
    where
        I: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        self.taken.retain(|(task, _)| !task.is_finished());
        if self.taken.len() >= CONNECTIONS {
            let oldest = self.taken.iter().position(|(_, lasts)| !lasts.load(Ordering::Relaxed));
            let Some((task, _)) = oldest.and_then(|at| self.taken.remove(at)) else {
                debug!(%peer, "a connection is refused: {CONNECTIONS} others must stay");
                return;
            };
            task.abort();
        }
        let lasts = Arc::new(AtomicBool::new(false));
        let task = self.tasks.spawn(attend(peer, io, app.clone(), Arc::clone(&lasts)));
        self.taken.push_back((task, lasts));
    }
}

/// Serves one connection from its first request to its last.
async fn attend<I>(peer: Peer, io: TokioIo<I>, app: Router, lasts: Arc<AtomicBool>)
where
    I: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            info!(by = %peer, method = %request.method(), path = request.uri().path(), "request for a change");
        }
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(Stay(Arc::clone(&lasts)));
        let answer = TowerToHyperService::new(app.clone()).call(request);
        let lasts = &lasts;
        async move {
            let answer = answer.await?;
            lasts.fetch_or(answer.extensions().get::<Lasting>().is_some(), Ordering::Relaxed);
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_buf_size(HEAD_MAX);
    let mut connection = pin!(http.serve_connection(io, service));
    loop {
        match tokio::time::timeout(LIFE, connection.as_mut()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => return debug!(%peer, "a connection ended: {error}"),
            Err(_) if lasts.load(Ordering::Relaxed) => {}
            Err(_) => return debug!(%peer, "a connection lasted longer than {LIFE:?}"),
        }
    }
}
