use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::{Mutex, mpsc};
use tokio::time::Instant;

use super::{Listener, PAUSE, Places, Stay, WhenFull, serve};

/// Accepts the connections and errors that the test sends.
struct Queue {
    queue: Mutex<mpsc::UnboundedReceiver<io::Result<DuplexStream>>>,
    accepts: Arc<AtomicUsize>,
}

impl Listener for Queue {
    type Stream = DuplexStream;

    async fn accept(&self) -> io::Result<DuplexStream> {
        match self.queue.lock().await.recv().await {
            Some(next) => {
                self.accepts.fetch_add(1, Ordering::Relaxed);
                next
            }
            None => std::future::pending().await,
        }
    }
}

struct Server {
    connect: mpsc::UnboundedSender<io::Result<DuplexStream>>,
    accepts: Arc<AtomicUsize>,
}

/// Starts a server that writes one octet to each connection, and one for each octet it reads. Octet `h` holds the
/// connection.
fn server(most: usize, when_full: WhenFull) -> Server {
    let (connect, queue) = mpsc::unbounded_channel();
    let accepts = Arc::<AtomicUsize>::default();
    let listener = Queue { queue: Mutex::new(queue), accepts: Arc::clone(&accepts) };
    let attend = async |mut stream: DuplexStream, stay: Stay| {
        let (mut octet, mut held) = ([0], Vec::new());
        stream.write_all(b"!").await.expect("the client is there");
        while matches!(stream.read(&mut octet).await, Ok(1)) {
            held.extend((octet == *b"h").then(|| stay.hold()));
            stream.write_all(b"!").await.expect("the client is there");
        }
    };
    tokio::spawn(async move {
        let places = Places { name: "test", most, when_full };
        serve(&listener, places, attend).await
    });
    Server { connect, accepts }
}

impl Server {
    fn connect(&self) -> DuplexStream {
        let (client, server) = duplex(16);
        self.connect.send(Ok(server)).expect("the server runs");
        client
    }

    async fn served(&self) -> DuplexStream {
        let mut client = self.connect();
        assert!(is_answered(&mut client).await, "a connection is not served");
        client
    }
}

/// Waits for the server's octet; returns false if the connection is closed instead.
async fn is_answered(client: &mut DuplexStream) -> bool {
    client.read_u8().await.is_ok()
}

#[tokio::test]
async fn a_new_connection_replaces_the_oldest_that_is_not_held() {
    let server = server(2, WhenFull::EndOldest);
    let (mut first, mut second) = (server.served().await, server.served().await);
    first.write_all(b"h").await.expect("it is served");
    assert!(is_answered(&mut first).await);
    let mut third = server.served().await;
    assert!(!is_answered(&mut second).await, "the second is the oldest that is not held");
    third.write_all(b"h").await.expect("it is served");
    assert!(is_answered(&mut third).await);
    assert!(!is_answered(&mut server.connect()).await, "all are held");
    drop(first);
    while !is_answered(&mut server.connect()).await {}
}

#[tokio::test]
async fn a_connection_beyond_the_limit_is_closed_or_waits() {
    let refusing = server(1, WhenFull::Refuse);
    let mut first = refusing.served().await;
    assert!(!is_answered(&mut refusing.connect()).await);
    first.write_all(b"x").await.expect("the first is still served");
    assert!(is_answered(&mut first).await);

    let waiting = server(1, WhenFull::Wait);
    let first = waiting.served().await;
    let mut second = waiting.connect();
    tokio::task::yield_now().await;
    assert_eq!(waiting.accepts.load(Ordering::Relaxed), 1, "the second is accepted before the first ends");
    drop(first);
    assert!(is_answered(&mut second).await);
}

#[tokio::test(start_paused = true)]
async fn only_errors_of_the_process_pause_the_loop() {
    let (server, begun) = (server(1, WhenFull::Wait), Instant::now());
    for error in [io::ErrorKind::ConnectionAborted.into(), io::Error::from_raw_os_error(24)] {
        server.connect.send(Err(error)).expect("the server runs");
    }
    let _served = server.served().await;
    let (least, most) = (PAUSE, PAUSE + Duration::from_millis(1));
    assert!((least..=most).contains(&begun.elapsed()), "{:?}", begun.elapsed());
}
