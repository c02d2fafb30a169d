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
