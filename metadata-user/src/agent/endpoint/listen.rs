//! Connections to the control side: how many, for how long, and with what.
//!
//! A client that is slow to ask or to read holds a place and nothing else, and not for long: when all places are
//! taken the connection that has been there longest makes room. So whoever probes or scrapes gets in, however many
//! others dawdle.

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

/// Connections to one door at a time; the oldest makes room for another.
pub(super) const CONNECTIONS: usize = 32;
/// Longest from the start of a connection, or the end of an answer, to the end of a request's head.
pub(super) const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Octets of a request's head.
pub(super) const HEAD_MAX: usize = 16 << 10;
/// Longest a connection may last, answers [`Lasting`] excepted.
pub(super) const LIFE: Duration = Duration::from_secs(30);

/// Put into a response's extensions by a handler whose answer goes on until the client has enough: its connection
/// does not end after [`LIFE`], and makes no room for others. Who gives such answers limits how many there are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lasting;

/// Who is at the other end of a connection, in every request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Someone on the network.
    Network,
    /// A process of this machine, by what the kernel says it is.
    Process {
        /// Its user.
        uid: u32,
        /// Its group.
        gid: u32,
        /// Its id, if it is in a PID namespace we see.
        pid: Option<i32>,
    },
}

impl Peer {
    /// True for root and the agent's own user, who may read its memory and write its files anyway.
    #[must_use]
    pub(crate) fn is_owner(self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        matches!(self, Self::Process { uid, .. } if uid == 0 || uid == own)
    }
}

/// In every request's extensions: by it a handler that keeps its client waiting keeps the connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stay(Arc<AtomicBool>);

impl Stay {
    /// The connection makes no room for others, and does not end after [`LIFE`], until this is dropped. Who holds
    /// connections limits how many there are.
    pub(crate) fn hold(&self) -> Staying {
        self.0.store(true, Ordering::Relaxed);
        Staying(self.clone())
    }
}

/// A connection that stays.
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

/// A listener that knows who connects.
pub(crate) trait Door: Listener {
    /// Who is at the other end.
    fn peer(io: &Self::Io) -> Peer;
}

impl Door for TcpListener {
    fn peer(_: &TcpStream) -> Peer {
        Peer::Network
    }
}

impl Door for UnixListener {
    fn peer(io: &UnixStream) -> Peer {
        io.peer_cred().map_or(Peer::Network, |peer| Peer::Process {
            uid: peer.uid(),
            gid: peer.gid(),
            pid: peer.pid(),
        })
    }
}

/// Answers whoever comes to a door, until the task ends.
pub(crate) async fn serve<D: Door>(mut door: D, app: Router) -> anyhow::Result<()> {
    let mut places = Places::default();
    loop {
        tokio::select! {
            (io, _) = door.accept() => places.seat(D::peer(&io), TokioIo::new(io), &app),
            Some(_) = places.tasks.join_next() => {}
        }
    }
}

/// The connections of a door.
#[derive(Default)]
struct Places {
    /// Oldest first; those that are over are cleared away when room is needed.
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
                debug!(%peer, "a connection is refused: {CONNECTIONS} others last");
                return;
            };
            task.abort();
        }
        let lasts = Arc::new(AtomicBool::new(false));
        let task = self.tasks.spawn(attend(peer, io, app.clone(), Arc::clone(&lasts)));
        self.taken.push_back((task, lasts));
    }
}

/// One connection, from its first request to its last.
async fn attend<I>(peer: Peer, io: TokioIo<I>, app: Router, lasts: Arc<AtomicBool>)
where
    I: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            info!(by = %peer, method = %request.method(), path = request.uri().path(), "asked to change something");
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
