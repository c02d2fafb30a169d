//! The loop that accepts connections, with a limit on concurrent connections.
//!
//! A connection either waits for its peer (a handshake, the next request, the rest of a body, room for an answer), or
//! the peer waits for us: it is [held](EvictionGuard::hold). When the table is full, a connection that waits for its
//! peer makes room ([`WhenFull::Evict`]), so idle and slow peers cannot keep others out. The peer with the most
//! connections loses one first, so a peer with few keeps them.
//!
//! The loop logs the first of consecutive errors of `accept`, pauses for [`PAUSE`] after each, and continues.
//! Without the pause it would use all CPU time while the process has no free file descriptor.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tracing::{debug, warn};

/// Pause after an error that does not concern only one connection.
pub const PAUSE: Duration = Duration::from_millis(100);
/// How long a new connection waits for a place while every other is held. Then it is closed.
pub const PLACE_WITHIN: Duration = Duration::from_secs(1);
/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Who has a connection, so that each gets a share of the places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ConnectionHolder {
    /// Nobody is told apart.
    #[default]
    Unknown,
    /// A host, by its IPv4 address or the /64 of its IPv6 address, which is what one host is given (RFC 6177).
    Host(IpAddr),
    /// A user of this machine.
    User(u32),
}

impl ConnectionHolder {
    /// The holder of a connection from an address.
    #[must_use]
    pub fn at(address: IpAddr) -> Self {
        Self::Host(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                IpAddr::V6(network.into())
            }
            v4 => v4,
        })
    }
}

/// A socket that accepts connections.
pub trait Listener: Send + Sync {
    /// The type of a connection.
    type Stream: Send + 'static;

    /// Waits for the next connection. Dropping the future loses no connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// Who has a connection.
    fn holder(_: &Self::Stream) -> ConnectionHolder {
        ConnectionHolder::Unknown
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }

    fn holder(stream: &TcpStream) -> ConnectionHolder {
        stream.peer_addr().map_or(ConnectionHolder::Unknown, |address| ConnectionHolder::at(address.ip()))
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }

    fn holder(stream: &UnixStream) -> ConnectionHolder {
        stream.peer_cred().map_or(ConnectionHolder::Unknown, |peer| ConnectionHolder::User(peer.uid()))
    }
}

/// What happens to a new connection beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It is closed.
    Refuse,
    /// It replaces a connection that is not [held](EvictionGuard::hold), which is closed: of the peer with the most
    /// connections the one that has waited longest for its peer. If all are held, the new one waits for
    /// [`PLACE_WITHIN`] and is closed then.
    Evict,
}

/// The limit on concurrent connections of one listener.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimit {
    /// The listener's name in the log.
    pub name: &'static str,
    /// Maximum number of connections.
    pub most: usize,
    /// What happens to further connections.
    pub when_full: WhenFull,
}

/// Protects a connection from being closed for a new one ([`WhenFull::Evict`]) while its peer waits for us. The caller
/// limits how long and how many connections it holds.
#[derive(Clone, Debug)]
pub struct EvictionGuard(Arc<EvictionState>);

#[derive(Debug)]
struct EvictionState {
    /// Number of reasons to hold the connection.
    holds: AtomicUsize,
    /// Milliseconds from `begun` to the last time when the connection ceased to be held.
    waits_since: AtomicU64,
    begun: Instant,
}

impl Default for EvictionGuard {
    fn default() -> Self {
        let (holds, waits_since) = Default::default();
        Self(Arc::new(EvictionState { holds, waits_since, begun: Instant::now() }))
    }
}

impl EvictionGuard {
    /// Holds the connection until the result is dropped.
    #[must_use]
    pub fn hold(&self) -> EvictionHold {
        self.keep();
        EvictionHold(self.clone())
    }

    /// Holds the connection until it ends.
    pub fn keep(&self) {
        self.0.holds.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the connection is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.holds.load(Ordering::Relaxed) > 0
    }

    /// Since when the connection waits for its peer, if it is not held.
    fn waits_since(&self) -> Instant {
        self.0.begun + Duration::from_millis(self.0.waits_since.load(Ordering::Relaxed))
    }
}

/// Holds a connection until it is dropped.
#[derive(Debug)]
pub struct EvictionHold(EvictionGuard);

impl Drop for EvictionHold {
    fn drop(&mut self) {
        let state = &self.0.0;
        let elapsed = u64::try_from(state.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        state.waits_since.store(elapsed, Ordering::Relaxed);
        state.holds.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts connections and runs `attend` for each as a task. Dropping the future ends all tasks.
pub async fn serve<L, F>(
    listener: &L,
    places: ConnectionLimit,
    mut attend: impl FnMut(L::Stream, EvictionGuard) -> F,
) -> Infallible
where
    L: Listener,
    F: Future<Output = ()> + Send + 'static,
{
    let mut taken = OpenConnections::default();
    let mut failing = false;
    loop {
        tokio::select! {
            Some(_) = taken.tasks.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok(stream) => {
                    failing = false;
                    if taken.find_room(places).await {
                        let (stay, holder) = (EvictionGuard::default(), L::holder(&stream));
                        let task = taken.tasks.spawn(attend(stream, stay.clone()));
                        taken.places.push(Place { task, stay, holder });
                    }
                }
                Err(error) if is_of_one_connection(&error) => debug!("{}: {error}", places.name),
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        warn!("{}: cannot accept a connection: {error}", places.name);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

/// An open connection.
struct Place {
    task: AbortHandle,
    stay: EvictionGuard,
    holder: ConnectionHolder,
}

#[derive(Default)]
struct OpenConnections {
    places: Vec<Place>,
    tasks: JoinSet<()>,
}

impl OpenConnections {
    /// Makes room for a new connection, and waits a while if there is none. Returns false if the new connection is to
    /// be closed instead.
    async fn find_room(&mut self, limit: ConnectionLimit) -> bool {
        let until = Instant::now() + PLACE_WITHIN;
        loop {
            if self.make_room(limit) {
                return true;
            }
            if limit.when_full == WhenFull::Refuse || Instant::now() >= until {
                debug!("{}: refused a connection: {} are open", limit.name, limit.most);
                return false;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn make_room(&mut self, limit: ConnectionLimit) -> bool {
        self.places.retain(|place| !place.task.is_finished());
        if self.places.len() < limit.most {
            return true;
        }
        if limit.when_full == WhenFull::Refuse {
            return false;
        }
        let mut counts = HashMap::<ConnectionHolder, usize>::new();
        for place in &self.places {
            *counts.entry(place.holder).or_default() += 1;
        }
        let waiting = self.places.iter().enumerate().filter(|(_, place)| !place.stay.is_held());
        let victim = waiting.min_by_key(|(_, Place { stay, holder, .. })| {
            (Reverse(counts.get(holder).copied().unwrap_or_default()), stay.waits_since())
        });
        let Some((at, _)) = victim else { return false };
        let Place { task, .. } = self.places.remove(at);
        task.abort();
        debug!("{}: a connection that waited for its peer made room: {} are open", limit.name, limit.most);
        true
    }
}

/// True if the client closed its connection before it was accepted (accept(2)). The next connection is not affected.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::sync::{Mutex, mpsc};
    use tokio::time::Instant;

    use super::{
        ConnectionHolder, ConnectionLimit, EvictionGuard, EvictionHold, Listener, PAUSE, WhenFull, serve,
    };

    /// Accepts the connections and errors that the test sends.
    struct Queue {
        queue: Mutex<mpsc::UnboundedReceiver<io::Result<Connection>>>,
    }

    /// A connection of a user.
    struct Connection(DuplexStream, u32);

    impl Listener for Queue {
        type Stream = Connection;

        async fn accept(&self) -> io::Result<Connection> {
            match self.queue.lock().await.recv().await {
                Some(next) => next,
                None => std::future::pending().await,
            }
        }

        fn holder(stream: &Connection) -> ConnectionHolder {
            ConnectionHolder::User(stream.1)
        }
    }

    struct Server {
        connect: mpsc::UnboundedSender<io::Result<Connection>>,
    }

    /// Starts a server that writes one byte to each connection, and one for each byte it reads. Byte `h` holds the
    /// connection, and `f` frees it.
    fn server(most: usize, when_full: WhenFull) -> Server {
        let (connect, queue) = mpsc::unbounded_channel();
        let listener = Queue { queue: Mutex::new(queue) };
        let attend = async |Connection(mut stream, _): Connection, stay: EvictionGuard| {
            let (mut byte, mut held) = ([0], None::<EvictionHold>);
            stream.write_all(b"!").await.expect("the client is there");
            while matches!(stream.read(&mut byte).await, Ok(1)) {
                match &byte {
                    b"h" => held = Some(stay.hold()),
                    b"f" => drop(held.take()),
                    _ => {}
                }
                stream.write_all(b"!").await.expect("the client is there");
            }
        };
        tokio::spawn(async move {
            let places = ConnectionLimit { name: "test", most, when_full };
            serve(&listener, places, attend).await
        });
        Server { connect }
    }

    impl Server {
        fn connect(&self, user: u32) -> DuplexStream {
            let (client, server) = duplex(16);
            self.connect.send(Ok(Connection(server, user))).expect("the server runs");
            client
        }

        async fn served(&self, user: u32) -> DuplexStream {
            let mut client = self.connect(user);
            assert!(is_answered(&mut client).await, "a connection is not served");
            client
        }
    }

    /// Sends a byte, and waits for the answer.
    async fn ask(client: &mut DuplexStream, byte: &[u8; 1]) -> bool {
        client.write_all(byte).await.is_ok() && is_answered(client).await
    }

    /// Waits for the server's byte; returns false if the connection is closed instead.
    async fn is_answered(client: &mut DuplexStream) -> bool {
        client.read_u8().await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_replaces_the_one_that_waits_longest_for_its_peer() {
        let server = server(3, WhenFull::Evict);
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(server.served(0).await);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        // The first has the oldest connection, and has asked last.
        assert!(ask(&mut clients[0], b"h").await && ask(&mut clients[0], b"f").await);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(ask(&mut clients[1], b"h").await);
        clients.push(server.served(0).await);
        assert!(!is_answered(&mut clients[2]).await, "it has waited longest of those that are not held");
        for at in [0, 1, 3] {
            assert!(ask(&mut clients[at], b"h").await, "{at}");
        }
        assert!(!is_answered(&mut server.connect(0)).await, "all are held");
        let (mut new, freed) = (server.connect(0), ask(&mut clients[1], b"f"));
        let (served, freed) = tokio::join!(is_answered(&mut new), freed);
        assert!(served && freed, "a new connection waits a moment while all are held");
    }

    #[tokio::test(start_paused = true)]
    async fn the_peer_with_the_most_connections_loses_one_first() {
        let server = server(4, WhenFull::Evict);
        let mut few = server.served(1).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut many = Vec::new();
        for _ in 0..8 {
            many.push(server.served(2).await);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!(ask(&mut few, b"x").await, "the oldest connection is that of the peer with one");
        for (at, client) in many.iter_mut().enumerate() {
            assert_eq!(ask(client, b"x").await, at >= 5, "{at}");
        }
    }

    #[test]
    fn hosts_are_told_apart_by_what_one_host_is_given() {
        let at = |text: &str| ConnectionHolder::at(text.parse().expect("an address"));
        for (one, other, same) in [
            ("10.0.0.1", "10.0.0.2", false),
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("2001:db8::1", "2001:db8::ffff:0:0:1", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
        ] {
            assert_eq!(at(one) == at(other), same, "{one} {other}");
        }
    }

    #[tokio::test]
    async fn a_connection_beyond_the_limit_is_closed() {
        let refusing = server(1, WhenFull::Refuse);
        let mut first = refusing.served(0).await;
        assert!(!is_answered(&mut refusing.connect(0)).await);
        assert!(ask(&mut first, b"x").await, "the first is still served");
    }

    #[tokio::test(start_paused = true)]
    async fn only_errors_of_the_process_pause_the_loop() {
        let (server, begun) = (server(1, WhenFull::Evict), Instant::now());
        for error in [io::ErrorKind::ConnectionAborted.into(), io::Error::from_raw_os_error(24)] {
            server.connect.send(Err(error)).expect("the server runs");
        }
        let _served = server.served(0).await;
        let (least, most) = (PAUSE, PAUSE + Duration::from_millis(1));
        assert!((least..=most).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}
