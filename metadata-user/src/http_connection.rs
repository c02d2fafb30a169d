//! HTTP/1.1 on one connection of a listener, within limits on time and size.
//!
//! The connection is held ([`EvictionGuard`]) only from the moment when a request has arrived whole until the handler
//! has answered. While it waits for its peer, it makes room for a new connection when the listener is full.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::Request;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metadata_feed::listen::{EvictionGuard, EvictionHold};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tracing::debug;

/// How long a peer may occupy a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpLimits {
    /// From the start of a connection, or the end of an answer, to the end of the next request's head.
    pub(crate) head_within: Duration,
    /// Maximum size of a request's head, in bytes.
    pub(crate) head_max: usize,
    /// After it the connection ends with the answer to its present request, unless that is [`LongLivedAnswer`].
    pub(crate) life: Duration,
    /// From the end of `life` to the end of the connection, unless we still owe an answer.
    pub(crate) end_within: Duration,
}

/// A response extension for an answer that lasts until the client closes it. Its connection is not closed for a new
/// connection, and after [`HttpLimits::life`] only if the client has read nothing for so long. The handler limits the
/// number of such answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LongLivedAnswer;

/// The body of a request. At its end the request has arrived whole, and the connection is held.
struct ArrivingBody {
    body: Incoming,
    hold: RequestHold,
}

/// Holds the connection from the end of a request to its answer.
#[derive(Clone)]
struct RequestHold {
    stay: EvictionGuard,
    held: Arc<Mutex<Option<EvictionHold>>>,
}

impl RequestHold {
    fn begin(&self) {
        if let Ok(mut held) = self.held.lock() {
            held.get_or_insert_with(|| self.stay.hold());
        }
    }

    fn end(&self) {
        if let Ok(mut held) = self.held.lock() {
            *held = None;
        }
    }
}

impl hyper::body::Body for ArrivingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) || (frame.is_ready() && self.body.is_end_stream()) {
            self.hold.begin();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves a connection from its first request to its last. `prepare` is called for each request; handlers find what it
/// puts into the request's extensions.
pub(crate) async fn serve<I>(
    io: I,
    app: Router,
    limits: HttpLimits,
    stay: EvictionGuard,
    prepare: impl Fn(&mut Request<Incoming>) + Send + Sync,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // Of a lasting answer: whether the client has made room for more of it.
    let goes_on = OnceLock::<Arc<AtomicBool>>::new();
    let service = service_fn(|mut request: Request<Incoming>| {
        prepare(&mut request);
        let hold = RequestHold { stay: stay.clone(), held: Arc::default() };
        if request.body().is_end_stream() {
            hold.begin();
        }
        let arriving = hold.clone();
        let request = request.map(|body| Body::new(ArrivingBody { body, hold: arriving }));
        let answer = TowerToHyperService::new(app.clone()).call(request);
        let (stay, goes_on) = (&stay, &goes_on);
        async move {
            let answer = answer.await;
            hold.end();
            let answer = answer?;
            if answer.extensions().get::<LongLivedAnswer>().is_none() {
                return Ok::<_, Infallible>(answer);
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
    let HttpLimits { head_within, head_max, life, end_within } = limits;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_within).max_buf_size(head_max);
    let mut connection = pin!(http.serve_connection(TokioIo::new(io), service));
    let (mut within, mut ends) = (life, false);
    loop {
        match timeout(within, connection.as_mut()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => return debug!("a connection ended: {error}"),
            Err(_) => match goes_on.get() {
                Some(read) if read.swap(false, Ordering::Relaxed) => {}
                Some(_) => return debug!("the client of a streamed answer does not read it"),
                // A request that has arrived whole gets its answer, whose time its handler limits.
                None if !ends || stay.is_held() => {
                    connection.as_mut().graceful_shutdown();
                    (within, ends) = (end_within, true);
                }
                None => return debug!("a connection lasted longer than {life:?}"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{HttpLimits, serve};
    use axum::Router;
    use axum::routing::{get, post};
    use bytes::Bytes;
    use metadata_feed::listen::EvictionGuard;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::sync::Notify;
    use tokio::time::{Instant, sleep};

    const LIMITS: HttpLimits = HttpLimits {
        head_within: Duration::from_secs(3),
        head_max: 8 << 10,
        life: Duration::from_secs(20),
        end_within: Duration::from_secs(2),
    };
    /// With time paused, everything else has run when it has passed.
    const MOMENT: Duration = Duration::from_millis(1);
    const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

    fn start(app: Router) -> (DuplexStream, EvictionGuard) {
        let (client, server) = duplex(4_096);
        let stay = EvictionGuard::default();
        tokio::spawn(serve(server, app, LIMITS, stay.clone(), |_| {}));
        (client, stay)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_held_from_a_whole_request_to_its_answer() {
        let go = Arc::new(Notify::new());
        let waits = Arc::clone(&go);
        let answer = move |body: Bytes| async move {
            waits.notified().await;
            body
        };
        let (mut client, stay) = start(Router::new().route("/", post(answer)));
        let head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n";
        for (sent, held) in [(&head[..9], false), (&head[9..], false), (b"a", false), (b"b", true)] {
            client.write_all(sent).await.expect("room");
            sleep(MOMENT).await;
            assert_eq!(stay.is_held(), held, "after {:?}", String::from_utf8_lossy(sent));
        }
        go.notify_one();
        let (mut answer, mut piece) = (Vec::new(), [0; 4_096]);
        while !answer.ends_with(b"ab") {
            let length = client.read(&mut piece).await.expect("an answer");
            answer.extend_from_slice(&piece[..length]);
        }
        assert!(!stay.is_held(), "the answer is the client's to read");
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_or_half_request_ends_the_connection_in_seconds() {
        for sent in [&b""[..], b"GET / HT", GET] {
            let (mut client, _stay) = start(Router::new().route("/", get(async || "ok")));
            client.write_all(sent).await.expect("room");
            let begun = Instant::now();
            client.read_to_end(&mut Vec::new()).await.expect("an end");
            let range = LIMITS.head_within..LIMITS.head_within + Duration::from_secs(1);
            assert!(range.contains(&begun.elapsed()), "{:?} after {sent:?}", begun.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_connection_ends_after_its_life_with_a_whole_answer() {
        let (mut client, _stay) = start(Router::new().route("/", get(async || "ok")));
        let begun = Instant::now();
        let mut received = Vec::new();
        loop {
            // The server may have closed.
            let sent = client.write_all(GET).await;
            sleep(Duration::from_secs(1)).await;
            let mut piece = [0; 4_096];
            match client.read(&mut piece).await {
                Ok(length @ 1..) if sent.is_ok() => received.extend_from_slice(&piece[..length]),
                _ => break,
            }
        }
        assert!(received.ends_with(b"ok"), "{}", String::from_utf8_lossy(&received));
        let most = LIMITS.life + LIMITS.end_within + Duration::from_secs(1);
        assert!((LIMITS.life..=most).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}
