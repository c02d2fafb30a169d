//! Connections to the control side: how many, for how long, and with what.
//!
//! A client that is slow to ask or to read holds a place and nothing else, and not for long: when all places are
//! taken the connection that has been there longest makes room. So whoever probes or scrapes gets in, however many
//! others dawdle.

use std::fmt;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::http::Method;
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

/// Connections to one door at a time; the oldest makes room for another.
pub const CONNECTIONS: usize = 32;
/// Longest from the start of a connection, or the end of an answer, to the end of a request's head.
pub const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Octets of a request's head.
pub const HEAD_MAX: usize = 16 << 10;
/// Longest a connection may last, answers [`Lasting`] excepted.
pub const LIFE: Duration = Duration::from_secs(30);

/// Put into a response's extensions by a handler whose answer goes on until the client has enough: its connection
/// does not end after [`LIFE`], and makes no room for others. Who gives such answers limits how many there are.
#[derive(Clone, Copy, Debug)]
pub struct Lasting;

/// Who is at the other end of a connection, in every request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
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
    pub fn is_owner(self) -> bool {
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

/// A listener that knows who connects.
pub(crate) trait Door: Listener<Stream: AsyncRead + AsyncWrite + Unpin> {
    /// Its name in the log.
    const NAME: &str;

    /// Who is at the other end.
    fn peer(stream: &Self::Stream) -> Peer;
}

impl Door for TcpListener {
    const NAME: &str = "the metrics address";

    fn peer(_: &TcpStream) -> Peer {
        Peer::Network
    }
}

impl Door for UnixListener {
    const NAME: &str = "the control socket";

    fn peer(stream: &UnixStream) -> Peer {
        stream.peer_cred().map_or(Peer::Network, |peer| Peer::Process {
            uid: peer.uid(),
            gid: peer.gid(),
            pid: peer.pid(),
        })
    }
}

/// Answers whoever comes to a door, until the task ends. Handlers find [`Peer`] and [`Stay`] in a request's extensions.
pub(crate) async fn serve<D: Door>(door: D, app: Router) -> anyhow::Result<()> {
    let places = Places { name: D::NAME, most: CONNECTIONS, when_full: WhenFull::EndOldest };
    let attend = |stream, stay| attend(D::peer(&stream), TokioIo::new(stream), app.clone(), stay);
    match metadata_listen::serve(&door, places, attend).await {}
}

/// One connection, from its first request to its last.
async fn attend<I>(peer: Peer, io: TokioIo<I>, app: Router, stay: Stay)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            info!(by = %peer, method = %request.method(), path = request.uri().path(), "asked to change something");
        }
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(stay.clone());
        let answer = TowerToHyperService::new(app.clone()).call(request);
        let stay = &stay;
        async move {
            let answer = answer.await?;
            if answer.extensions().get::<Lasting>().is_some() {
                stay.keep();
            }
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
            Err(_) if stay.is_held() => {}
            Err(_) => return debug!(%peer, "a connection lasted longer than {LIFE:?}"),
        }
    }
}
