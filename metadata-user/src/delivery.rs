//! Delivers messages from guests to sinks.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use metadata_content::record::Sink;
use metadata_content::sink::{Message, Outbox};
use metadata_feed::state::private_file::PRIVATE;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::OpenOptions;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::{Id, JoinSet};

/// Attempts to deliver a message to a socket.
const TRIES: u32 = 2;
/// Maximum number of concurrent deliveries; each uses a file descriptor.
pub(super) const CONCURRENT: usize = 128;
/// Maximum number of sinks recorded as failing. Failures of further sinks are counted but not logged.
const FAILING: usize = 1_024;
/// Pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The reason why a message is lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum SinkError {
    #[error(
        "expected to append to the file, found: {0}; check its path and permissions; the package's unit lets the agent write to /var/log/xdp-imds, and for another directory add `ReadWritePaths=` with `systemctl edit xdp-imds`"
    )]
    File(io::Error),
    #[error("expected a regular file, found another kind; name a file, or `unix:` and a socket")]
    NotAFile,
    #[error("expected a file below {limit} bytes, found it full; rotate it", limit = SINK_FILE_BYTES)]
    Full,
    #[error("expected a receiver that listens, found: {0}; start the receiver")]
    Socket(io::Error),
    #[error("expected an answer to a POST, found: {0}; check that the receiver speaks HTTP/1.1")]
    Http(hyper::Error),
    #[error("expected a valid request path, found: {0}; check the path")]
    Request(hyper::http::Error),
    #[error("expected a 2xx answer, found {0}; read the receiver's log")]
    Status(hyper::StatusCode),
    #[error("expected an answer in {limit} s, found none; read the receiver's log", limit = TIMEOUT.as_secs())]
    Late,
}

/// The receiving end of an [`Outbox`], which [`deliver()`] takes.
#[derive(Debug)]
pub struct Deliveries {
    queue: UnboundedReceiver<Box<Message>>,
}

/// Returns an outbox and its receiving end. The queue between them is bounded by
/// [`WAITING`](metadata_content::sink::WAITING) and [`WAITING_PER_VM`](metadata_content::sink::WAITING_PER_VM).
#[must_use]
pub fn outbox() -> (Outbox, Deliveries) {
    let (sender, queue) = unbounded_channel();
    (Outbox::new(move |message| sender.send(message).is_ok()), Deliveries { queue })
}

/// Delivers messages until every [`Outbox`] is dropped and the queue is empty.
///
/// Sinks are served concurrently. Each sink receives its messages in the order they were queued, so the messages of
/// one VM stay in order, and a receiver that hangs delays only its own messages.
pub async fn deliver(mut deliveries: Deliveries) {
    let mut queues = Queues::new(deliver_one);
    let mut open = true;
    while open || !queues.tasks.is_empty() {
        tokio::select! {
            next = deliveries.queue.recv(), if open => match next {
                Some(message) => queues.push(message),
                None => open = false,
            },
            Some(done) = queues.tasks.join_next_with_id() => {
                match done {
                    Ok((id, taken)) => queues.ended(id, Some(taken)),
                    Err(error) => queues.ended(error.id(), None),
                }
            }
        }
    }
}

/// One queue of messages for each sink. A task delivers the first message of each queue. The outbox bounds the number
/// of messages in all queues.
struct Queues<F> {
    /// Messages that wait until an earlier message of the same sink is delivered.
    waiting: HashMap<Sink, VecDeque<Box<Message>>>,
    sinks: HashMap<Id, Sink>,
    tasks: JoinSet<Result<(), SinkError>>,
    /// Sinks whose most recent message was lost.
    failing: HashSet<Sink>,
    at_once: Arc<Semaphore>,
    deliver_one: F,
}

impl<F: Fn(Box<Message>) -> D, D: Future<Output = Result<(), SinkError>> + Send + 'static> Queues<F> {
    fn new(deliver_one: F) -> Self {
        let at_once = Arc::new(Semaphore::new(CONCURRENT));
        let (waiting, sinks, failing) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { waiting, sinks, tasks: JoinSet::new(), failing, at_once, deliver_one }
    }

    fn push(&mut self, message: Box<Message>) {
        match self.waiting.get_mut(message.sink()) {
            Some(waiting) => waiting.push_back(message),
            None => {
                self.waiting.insert(message.sink().clone(), VecDeque::new());
                self.send(message);
            }
        }
    }

    /// Ends the task `done` and starts the delivery of its sink's next message. `taken` is `None` if the task panicked.
    fn ended(&mut self, done: Id, taken: Option<Result<(), SinkError>>) {
        let Some(sink) = self.sinks.remove(&done) else { return };
        match taken {
            Some(Err(error)) => self.fails(&sink, &error),
            _ => drop(self.failing.remove(&sink)),
        }
        match self.waiting.get_mut(&sink).and_then(VecDeque::pop_front) {
            Some(message) => self.send(message),
            None => drop(self.waiting.remove(&sink)),
        }
    }

    /// Logs only the first of consecutive failures, so that guests cannot fill the log.
    fn fails(&mut self, sink: &Sink, error: &SinkError) {
        if self.failing.len() < FAILING && self.failing.insert(sink.clone()) {
            tracing::warn!(%sink, %error, "messages from guests are lost");
        }
    }

    fn send(&mut self, message: Box<Message>) {
        let (sink, at_once) = (message.sink().clone(), Arc::clone(&self.at_once));
        let delivery = (self.deliver_one)(message);
        let task = self.tasks.spawn(async move {
            // This does not fail, because the semaphore is never closed.
            let _permit = at_once.acquire_owned().await;
            delivery.await
        });
        self.sinks.insert(task.id(), sink);
    }
}

/// Delivers one message to its sink and counts the outcome.
async fn deliver_one(message: Box<Message>) -> Result<(), SinkError> {
    let json = Bytes::from(message.json());
    let taken = match message.sink() {
        Sink::File(path) => append(path, json).await,
        Sink::Unix { socket, path } => {
            let mut taken = post(socket, path, json.clone()).await;
            for _ in 1..TRIES {
                if taken.is_ok() {
                    break;
                }
                tokio::time::sleep(RETRY_PAUSE).await;
                taken = post(socket, path, json.clone()).await;
            }
            taken
        }
    };
    message.end(taken.as_ref().copied());
    taken
}

// Sinks that are files.

/// Maximum size of a sink's file, in bytes (16 MiB), so that guests cannot fill the disk.
pub const SINK_FILE_BYTES: u64 = 16 << 20;

/// Appends one line, on a thread for blocking calls.
async fn append(path: &Path, line: Bytes) -> Result<(), SinkError> {
    let path = PathBuf::from(path);
    let written = tokio::task::spawn_blocking(move || append_line(&path, &line));
    written.await.map_err(|error| SinkError::File(io::Error::other(error)))?
}

/// Creates the file with mode 0600 if it does not exist.
fn append_line(path: &Path, line: &[u8]) -> Result<(), SinkError> {
    let line = [line, b"\n"].concat();
    let mut options = OpenOptions::new();
    // Without O_NONBLOCK, open(2) of a FIFO without a reader waits for ever.
    options.append(true).create(true).mode(PRIVATE).custom_flags(libc::O_NONBLOCK);
    let mut file = options.open(path).map_err(SinkError::File)?;
    let status = file.metadata().map_err(SinkError::File)?;
    if !status.is_file() {
        return Err(SinkError::NotAFile);
    }
    if status.len() + line.len() as u64 > SINK_FILE_BYTES {
        return Err(SinkError::Full);
    }
    file.write_all(&line).map_err(SinkError::File)
}

// Sinks that are HTTP servers on a Unix socket.
//
// The client is hyper's, because the agent already contains hyper as an HTTP server.

/// Time limit for one attempt, from the connection to the head of the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends one POST and waits for a 2xx.
async fn post(socket: &Path, path: &str, json: Bytes) -> Result<(), SinkError> {
    tokio::time::timeout(TIMEOUT, exchange(socket, path, json)).await.unwrap_or(Err(SinkError::Late))
}

async fn exchange(socket: &Path, path: &str, json: Bytes) -> Result<(), SinkError> {
    let request = Request::post(path)
        .header(HOST, "localhost")
        .header(CONTENT_TYPE, "application/json")
        .header(CONNECTION, "close")
        .body(Full::new(json))
        .map_err(SinkError::Request)?;
    let stream = UnixStream::connect(socket).await.map_err(SinkError::Socket)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(SinkError::Http)?;
    // This task runs the connection. It ends when the set is dropped, on every path out of this function.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let status = sender.send_request(request).await.map_err(SinkError::Http)?.status();
    if status.is_success() { Ok(()) } else { Err(SinkError::Status(status)) }
}
