//! Delivers messages from guests to sinks.

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use metadata_common::share::{FairQueue, FairShare, ShareError, Tenant};
use metadata_content::record::Sink;
use metadata_content::sink::{Message, Outbox, WAITING};
use metadata_feed::state::private_file::PRIVATE;
use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::{Id, JoinSet};

/// Attempts to deliver a message to a socket, unless the receiver refuses it for good.
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
        "expected to append to the file, found: {0}; make its directory, as the package's unit makes /var/log/xdp-imds"
    )]
    NoDirectory(io::Error),
    #[error(
        "expected to append to the file, found: {0}; check its path and permissions; the package's unit lets the agent write to /var/log/xdp-imds, and for another directory add `ReadWritePaths=` with `systemctl edit xdp-imds`"
    )]
    File(io::Error),
    #[error("expected a regular file, found another kind; name a file, or `unix:` and a socket")]
    NotAFile,
    #[error("expected a file below {limit} bytes, found it full; rotate it", limit = SINK_FILE_BYTES)]
    Full,
    #[error("expected a file with room for the tenant, found: {0}; rotate it")]
    Share(ShareError),
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

impl SinkError {
    /// Returns whether another attempt may succeed. A receiver that refuses what a guest wrote would refuse it again, and
    /// all messages behind it would wait.
    fn may_pass(&self) -> bool {
        match self {
            Self::Status(status) => !status.is_client_error() || matches!(status.as_u16(), 408 | 429),
            Self::Request(_) => false,
            _ => true,
        }
    }
}

/// The receiving end of an [`Outbox`], which [`deliver()`] takes.
#[derive(Debug)]
pub struct Deliveries {
    queue: UnboundedReceiver<Box<Message>>,
}

/// Returns an outbox and its receiving end. The queue between them is bounded by
/// [`WAITING`] and [`WAITING_PER_VM`](metadata_content::sink::WAITING_PER_VM).
#[must_use]
pub fn outbox() -> (Outbox, Deliveries) {
    let (sender, queue) = unbounded_channel();
    (Outbox::new(move |message| sender.send(message).is_ok()), Deliveries { queue })
}

/// Delivers messages until every [`Outbox`] is dropped and the queue is empty.
///
/// Sinks are served concurrently, so a receiver that hangs delays only its own messages. At each sink tenants take turns.
/// A sink receives the messages of one tenant, and so of one VM, in the order they were queued.
pub async fn deliver(mut deliveries: Deliveries) {
    let files = Arc::new(SinkFiles::default());
    let mut queues = Queues::new(move |message| deliver_one(Arc::clone(&files), message));
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
    waiting: HashMap<Sink, FairQueue<Box<Message>>>,
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
            Some(waiting) => {
                let tenant = message.tenant().clone();
                // Each tenant has room for all messages: the outbox has already seen to the shares.
                let _ = waiting.push(&tenant, message);
            }
            None => {
                self.waiting.insert(message.sink().clone(), FairQueue::new(WAITING, WAITING));
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
        match self.waiting.get_mut(&sink).and_then(FairQueue::pop) {
            Some((_, message)) => self.send(message),
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
async fn deliver_one(files: Arc<SinkFiles>, message: Box<Message>) -> Result<(), SinkError> {
    let json = Bytes::from(message.json());
    let taken = match message.sink() {
        Sink::File(path) => append(files, path, message.tenant(), json).await,
        Sink::Unix { socket, path } => {
            let mut taken = post(socket, path, json.clone()).await;
            for _ in 1..TRIES {
                if !taken.as_ref().is_err_and(SinkError::may_pass) {
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

/// Maximum size of a sink's file, in bytes (16 MiB), so that guests cannot fill the disk. Tenants share it.
pub const SINK_FILE_BYTES: u64 = 16 << 20;
/// Bytes of a file that a tenant gets while anything is left.
const SINK_FILE_FLOOR: usize = 64 << 10;
/// Maximum number of files of which the shares are known.
const SHARED_FILES: usize = 1_024;

/// Who wrote how much of each file.
#[derive(Debug, Default)]
struct SinkFiles(Mutex<HashMap<PathBuf, FairShare>>);

impl SinkFiles {
    fn with<T>(&self, path: &Path, act: impl FnOnce(&mut FairShare) -> T) -> T {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if files.len() >= SHARED_FILES && !files.contains_key(path) {
            // What is in the files then counts as the operator's, as after a restart.
            files.clear();
        }
        act(files.entry(path.to_owned()).or_insert_with(file_share))
    }

    /// Fails if a tenant's share has no room for `more` bytes in a file of this length. What is in the file and was not
    /// written by this agent counts as the operator's. A file that is shorter than before was rotated or emptied.
    fn check(&self, path: &Path, length: u64, tenant: &Tenant, more: usize) -> Result<(), SinkError> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        self.with(path, |share| {
            if length < share.used() {
                *share = file_share();
            }
            let others = length - share.used();
            share.charge(&Tenant::Operator, others);
            if more > share.free_for(tenant) {
                return Err(SinkError::Share(share.refuse(tenant, more)));
            }
            Ok(())
        })
    }

    /// Counts what a tenant has written.
    fn written(&self, path: &Path, tenant: &Tenant, more: usize) {
        self.with(path, |share| share.charge(tenant, more));
    }
}

fn file_share() -> FairShare {
    FairShare::new(usize::try_from(SINK_FILE_BYTES).unwrap_or(usize::MAX), SINK_FILE_FLOOR)
}

/// Appends one line, on a thread for blocking calls.
async fn append(files: Arc<SinkFiles>, path: &Path, tenant: &Tenant, line: Bytes) -> Result<(), SinkError> {
    let (path, tenant) = (PathBuf::from(path), tenant.clone());
    let written = tokio::task::spawn_blocking(move || append_line(&files, &path, &tenant, &line));
    written.await.map_err(|error| SinkError::File(io::Error::other(error)))?
}

/// Creates the file with mode 0600 if it does not exist.
fn append_line(files: &SinkFiles, path: &Path, tenant: &Tenant, line: &[u8]) -> Result<(), SinkError> {
    let line = [line, b"\n"].concat();
    let mut options = OpenOptions::new();
    // Without O_NONBLOCK, open(2) of a FIFO without a reader waits for ever.
    options.append(true).create(true).mode(PRIVATE).custom_flags(libc::O_NONBLOCK);
    let mut file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => SinkError::NoDirectory(error),
        _ => SinkError::File(error),
    })?;
    let status = file.metadata().map_err(SinkError::File)?;
    if !status.is_file() {
        return Err(SinkError::NotAFile);
    }
    if status.len() + line.len() as u64 > SINK_FILE_BYTES {
        return Err(SinkError::Full);
    }
    files.check(path, status.len(), tenant, line.len())?;
    file.write_all(&line).map_err(SinkError::File)?;
    files.written(path, tenant, line.len());
    Ok(())
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use axum::Router;
    use axum::extract::State;
    use axum::http::{HeaderMap, StatusCode, Uri};
    use serde_json::{Value, json};
    use tokio::net::UnixListener;
    use tokio::task::JoinHandle;

    use super::*;
    use metadata_content::mailbox::Mailbox;
    use metadata_content::record::Sink;
    use metadata_content::record::vm::Sinks;
    use metadata_content::sink::{MessageKind, Outbox, SinkCounts, WAITING_PER_VM};

    const NOW: u64 = 1_790_000_000;

    fn file(path: &Path) -> Sink {
        Sink::File(path.to_owned())
    }

    fn socket(socket: &Path) -> Sink {
        Sink::Unix { socket: socket.to_owned(), path: "/guests?a=b".to_owned() }
    }

    fn events(sink: Sink) -> Sinks {
        Sinks { events: Some(Box::new(sink)), ..Sinks::default() }
    }

    fn uuid(n: usize) -> String {
        format!("7c0f1a52-3b5e-4d1a-9d2c-{n:012x}")
    }

    fn vm(n: usize, outbox: &Outbox) -> Mailbox {
        let mailbox = Mailbox::new(&uuid(n), outbox);
        mailbox.note_record(&format!("vm-{n}"), None);
        mailbox
    }

    fn room() -> (tempfile::TempDir, PathBuf) {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("sink");
        (room, path)
    }

    fn lines(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).expect("the file");
        assert!(text.ends_with('\n'));
        text.lines().map(|line| serde_json::from_str(line).expect("one object per line")).collect()
    }

    /// Waits until the counters reach a state; panics if they do not reach it.
    async fn until(outbox: &Outbox, reached: impl Fn(SinkCounts) -> bool) -> SinkCounts {
        for _ in 0..10_000 {
            if reached(outbox.counts()) {
                return outbox.counts();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never reached: {:?}", outbox.counts());
    }

    type Taken = Arc<Mutex<Vec<(String, Option<String>, Value)>>>;

    /// Starts a receiver that answers `status`. Returns path, content type and body of each request, and its task.
    fn receiver(path: &Path, status: StatusCode) -> (Taken, JoinHandle<()>) {
        let taken = Taken::default();
        let listener = UnixListener::bind(path).expect("bound");
        let take = move |State(taken): State<Taken>, uri: Uri, headers: HeaderMap, body: String| async move {
            let kind = headers.get("content-type").map(|kind| kind.to_str().expect("text").to_owned());
            let body = serde_json::from_str(&body).expect("JSON");
            taken.lock().expect("sound").push((uri.to_string(), kind, body));
            status
        };
        let router = Router::new().fallback(axum::routing::post(take)).with_state(Arc::clone(&taken));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.expect("serves") });
        (taken, server)
    }

    #[tokio::test]
    async fn a_file_takes_one_object_per_line_and_is_private() {
        let (_room, path) = room();
        let (outbox, deliveries) = outbox();
        let every = Some(Box::new(file(&path)));
        let sinks =
            Sinks { ready: every.clone(), phone_home: every.clone(), events: every.clone(), password: every };
        let vm = vm(1, &outbox);
        let form = b"pub_key_rsa=ssh-rsa+AAAA%2B&instance_id=i-1&hostname=web&fqdn=N%2FA&hostname=second";
        let nested = format!("{}{}", "[".repeat(4_000), "]".repeat(4_000));
        let cases: [(MessageKind, &[u8], Value); 10] = [
            (
                MessageKind::PhoneHome,
                form,
                json!({
                    "pub_key_rsa": "ssh-rsa AAAA+", "instance_id": "i-1", "hostname": "web", "fqdn": "N/A",
                }),
            ),
            (MessageKind::PhoneHome, b"", json!({})),
            (MessageKind::Event, br#"{"name": "init", "n": 1}"#, json!({"name": "init", "n": 1})),
            (MessageKind::Event, b"[1]", json!([1])),
            (MessageKind::Event, b"12", json!("12")),
            (MessageKind::Event, b"two\nlines", json!("two\nlines")),
            (MessageKind::Event, &[0xff, 0], json!({"base64": "/wA="})),
            (MessageKind::Event, nested.as_bytes(), json!(nested)),
            (MessageKind::Ready, b"<Health/>", json!("<Health/>")),
            (MessageKind::Password, b"[1]", json!("[1]")),
        ];
        for (kind, body, _) in &cases {
            vm.send(&sinks, *kind, body, NOW);
        }
        assert_eq!(outbox.counts().waiting, cases.len() as u64);
        let counts = outbox.clone();
        drop((vm, outbox));
        let task = tokio::spawn(deliver(deliveries));
        assert_eq!(until(&counts, |c| c.waiting == 0).await.delivered, cases.len() as u64);
        drop(counts);
        task.await.expect("ends with the last outbox");
        let expected: Vec<_> = cases
        .into_iter()
        .map(|(kind, _, body)| {
            json!({
                "vm": uuid(1), "name": "vm-1", "kind": kind.name(), "time": "2026-09-21T14:13:20Z", "body": body,
            })
        })
        .collect();
        assert_eq!(lines(&path), expected);
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, 0o600);
    }

    #[tokio::test]
    async fn a_socket_takes_one_post_per_message() {
        let (_room, path) = room();
        let (taken, server) = receiver(&path, StatusCode::NO_CONTENT);
        let (outbox, deliveries) = outbox();
        let vm = vm(1, &outbox);
        vm.send(&events(socket(&path)), MessageKind::Event, b"{\"a\":1}", NOW);
        drop((vm, outbox));
        deliver(deliveries).await;
        let body = json!({
            "vm": uuid(1), "name": "vm-1", "kind": "event", "time": "2026-09-21T14:13:20Z", "body": {"a": 1},
        });
        let expected = ("/guests?a=b".to_owned(), Some("application/json".to_owned()), body);
        assert_eq!(*taken.lock().expect("sound"), [expected]);
        server.abort();
    }

    #[tokio::test]
    async fn messages_of_a_vm_arrive_in_order() {
        const EACH: usize = 50;
        let (_room, path) = room();
        let (taken, server) = receiver(&path, StatusCode::OK);
        let (outbox, deliveries) = outbox();
        let sinks = events(socket(&path));
        let vms: Vec<_> = (0..5).map(|n| vm(n, &outbox)).collect();
        let task = tokio::spawn(deliver(deliveries));
        for n in 0..EACH {
            for vm in &vms {
                vm.send(&sinks, MessageKind::Event, format!("[{n}]").as_bytes(), NOW);
            }
            tokio::task::yield_now().await;
        }
        drop((vms, outbox));
        task.await.expect("delivered");
        let mut seen: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for (_, _, body) in taken.lock().expect("sound").iter() {
            let vm = body["vm"].as_str().expect("text").to_owned();
            seen.entry(vm).or_default().push(body["body"][0].clone());
        }
        let in_order: Vec<Value> = (0..EACH).map(Value::from).collect();
        assert_eq!(seen, (0..5).map(|n| (uuid(n), in_order.clone())).collect());
        server.abort();
    }

    #[tokio::test]
    async fn a_failing_sink_is_tried_again_and_counted_and_others_continue() {
        let (room, path) = room();
        let refusing = room.path().join("refusing");
        let (asked, server) = receiver(&refusing, StatusCode::INTERNAL_SERVER_ERROR);
        // This receiver accepts each connection and closes it without an answer.
        let closing = room.path().join("closing");
        let listener = UnixListener::bind(&closing).expect("bound");
        let closer = tokio::spawn(async move {
            loop {
                drop(listener.accept().await);
            }
        });
        let pipe = room.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a pipe");
        let bad = [
            socket(&refusing),
            socket(&closing),
            socket(&room.path().join("nobody")),
            file(room.path()),
            file(&room.path().join("no/such/directory")),
            file(&pipe),
        ];
        let (outbox, deliveries) = outbox();
        let vm = vm(1, &outbox);
        for sink in &bad {
            vm.send(&events(sink.clone()), MessageKind::Event, b"lost", NOW);
        }
        vm.send(&events(file(&path)), MessageKind::Event, b"arrives", NOW);
        let task = tokio::spawn(deliver(deliveries));
        let counts = until(&outbox, |c| c.waiting == 0).await;
        assert_eq!((counts.delivered, counts.failed, counts.dropped), (1, bad.len() as u64, 0));
        let loss = outbox.last_loss().expect("the last of them");
        assert!(bad.iter().any(|sink| loss.reason.starts_with(&format!("{sink}: expected "))), "{loss:?}");
        vm.send(&events(file(&path)), MessageKind::Event, &[b'x'; (64 << 10) + 1], NOW);
        let loss = outbox.last_loss().expect("a message that is too large");
        assert!(outbox.counts().dropped == 1 && loss.reason.contains("larger than the limit"), "{loss:?}");
        assert_eq!(lines(&path)[0]["body"], "arrives");
        assert_eq!(asked.lock().expect("sound").len(), 2, "tries");
        for task in [task, server, closer] {
            task.abort();
        }
    }

    #[tokio::test]
    async fn what_a_receiver_refuses_for_good_is_not_sent_again() {
        let (room, _) = room();
        let cases: [(u16, usize); 7] = [(400, 1), (404, 1), (422, 1), (408, 2), (429, 2), (500, 2), (503, 2)];
        let (outbox, deliveries) = outbox();
        let vm = vm(1, &outbox);
        let receivers: Vec<_> = cases
            .iter()
            .map(|(status, tries)| {
                let path = room.path().join(status.to_string());
                let status = StatusCode::from_u16(*status).expect("a status");
                let (asked, server) = receiver(&path, status);
                vm.send(&events(socket(&path)), MessageKind::Event, b"{}", NOW);
                (status, *tries, asked, server)
            })
            .collect();
        drop((vm, outbox));
        deliver(deliveries).await;
        for (status, tries, asked, server) in receivers {
            assert_eq!(asked.lock().expect("sound").len(), tries, "{status}");
            server.abort();
        }
    }

    #[tokio::test]
    async fn tenants_take_turns_at_a_sink() {
        let (outbox, mut deliveries) = outbox();
        let sinks = events(Sink::File("/sink".into()));
        let arrived = Arc::new(Mutex::new(Vec::new()));
        let arrivals = Arc::clone(&arrived);
        let mut queues = Queues::new(move |message: Box<Message>| {
            let (arrivals, tenant) = (Arc::clone(&arrivals), message.tenant().to_string());
            async move {
                arrivals.lock().expect("sound").push(tenant);
                Ok(())
            }
        });
        for (n, namespace, messages) in [(1, "loud", 10), (2, "loud", 10), (3, "quiet", 2), (4, "other", 1)] {
            let vm = vm(n, &outbox);
            vm.note_tenant(Tenant::namespace(namespace));
            for _ in 0..messages {
                vm.send(&sinks, MessageKind::Event, b"{}", NOW);
                queues.push(deliveries.queue.try_recv().expect("a message"));
            }
        }
        while let Some(done) = queues.tasks.join_next_with_id().await {
            let (id, taken) = done.expect("no panic");
            queues.ended(id, Some(taken));
        }
        let arrived = arrived.lock().expect("sound");
        assert_eq!(arrived.len(), 23);
        let last = |tenant: &str| arrived.iter().rposition(|found| found.ends_with(tenant));
        assert_eq!((last("other"), last("quiet")), (Some(3), Some(5)), "{arrived:?}");
    }

    #[test]
    fn one_tenant_cannot_take_the_places_of_others_in_the_queue() {
        let (_room, path) = room();
        let (outbox, _deliveries) = outbox();
        let sinks = events(file(&path));
        let send_all = |n: usize, tenant: &str| {
            let vm = vm(n, &outbox);
            vm.note_tenant(Tenant::namespace(tenant));
            let before = outbox.counts().waiting;
            for _ in 0..WAITING_PER_VM {
                vm.send(&sinks, MessageKind::Event, b"{}", NOW);
            }
            outbox.counts().waiting - before
        };
        let loud: u64 = (0..WAITING / WAITING_PER_VM * 2).map(|n| send_all(n, "loud")).sum();
        assert_eq!(loud, WAITING as u64 / 2);
        assert_eq!(send_all(1_000, "quiet"), WAITING_PER_VM as u64);
    }

    #[tokio::test]
    async fn one_tenant_cannot_fill_the_file_of_others() {
        let (_room, path) = room();
        let (outbox, deliveries) = outbox();
        let sinks = events(file(&path));
        let task = tokio::spawn(deliver(deliveries));
        let (loud, quiet) = (vm(1, &outbox), vm(2, &outbox));
        // Each control character is an escape of six bytes.
        for _ in 0..40 {
            loud.send(&sinks, MessageKind::Event, &[1; 64 << 10], NOW);
            until(&outbox, |c| c.waiting == 0).await;
        }
        let half = SINK_FILE_BYTES / 2;
        let length = fs::metadata(&path).expect("there").len();
        assert!((half - (400 << 10)..=half).contains(&length), "{length}");
        let loss = outbox.last_loss().expect("of the loud one").reason;
        assert!(loss.contains("its share"), "{loss}");
        let before = outbox.counts().delivered;
        quiet.send(&sinks, MessageKind::Event, &[1; 64 << 10], NOW);
        assert_eq!(until(&outbox, |c| c.waiting == 0).await.delivered, before + 1);
        // An emptied file has room for everybody again.
        fs::File::options().write(true).truncate(true).open(&path).expect("emptied");
        loud.send(&sinks, MessageKind::Event, &[1; 64 << 10], NOW);
        assert_eq!(until(&outbox, |c| c.waiting == 0).await.delivered, before + 2);
        task.abort();
    }

    #[tokio::test]
    async fn a_receiver_that_hangs_delays_only_its_own_messages_until_the_limit() {
        let (room, path) = room();
        let silent = room.path().join("silent");
        // The kernel completes connections, but nobody accepts them.
        let _listener = UnixListener::bind(&silent).expect("bound");
        let (outbox, deliveries) = outbox();
        let (held, other) = (vm(1, &outbox), vm(2, &outbox));
        for _ in 0..3 {
            held.send(&events(socket(&silent)), MessageKind::Event, b"held", NOW);
        }
        other.send(&events(file(&path)), MessageKind::Event, b"arrives", NOW);
        let task = tokio::spawn(deliver(deliveries));
        let counts = until(&outbox, |c| c.delivered == 1).await;
        assert_eq!((counts.waiting, counts.failed), (3, 0));
        // All tasks only wait from here on, so the runtime may advance its clock.
        tokio::time::pause();
        assert_eq!(until(&outbox, |c| c.waiting == 2).await.failed, 1);
        assert_eq!(until(&outbox, |c| c.waiting == 0).await.failed, 3);
        task.abort();
    }

    #[tokio::test]
    async fn concurrent_deliveries_stay_within_their_limit() {
        const SINKS: usize = CONCURRENT + WAITING_PER_VM;
        let (_room, path) = room();
        let listener = UnixListener::bind(&path).expect("bound");
        let (outbox, deliveries) = outbox();
        for n in 0..SINKS {
            let sink = Sink::Unix { socket: path.clone(), path: format!("/{n}") };
            vm(n, &outbox).send(&events(sink), MessageKind::Event, b"held", NOW);
        }
        let task = tokio::spawn(deliver(deliveries));
        let mut held = Vec::new();
        // The test accepts each connection and never answers.
        while let Ok(Ok((stream, _))) =
            tokio::time::timeout(Duration::from_millis(500), listener.accept()).await
        {
            held.push(stream);
        }
        assert_eq!(held.len(), CONCURRENT);
        tokio::time::pause();
        assert_eq!(until(&outbox, |c| c.waiting == 0).await.failed, SINKS as u64);
        task.abort();
    }

    #[test]
    fn one_vm_cannot_take_the_places_of_others_in_the_queue() {
        let (_room, path) = room();
        let (outbox, _deliveries) = outbox();
        let sinks = events(file(&path));
        let (loud, quiet) = (vm(1, &outbox), vm(2, &outbox));
        for _ in 0..WAITING * 2 {
            loud.send(&sinks, MessageKind::Event, b"{}", NOW);
        }
        quiet.send(&sinks, MessageKind::Event, b"{}", NOW);
        let counts = outbox.counts();
        assert_eq!(counts.waiting, WAITING_PER_VM as u64 + 1);
        assert_eq!(counts.dropped, (WAITING * 2 - WAITING_PER_VM) as u64);
    }

    #[tokio::test]
    async fn all_vms_stay_within_the_queue_and_delivery_frees_a_place() {
        let (_room, path) = room();
        let (outbox, deliveries) = outbox();
        let sinks = events(file(&path));
        let vms: Vec<_> = (0..=WAITING / WAITING_PER_VM).map(|n| vm(n, &outbox)).collect();
        for vm in &vms {
            for _ in 0..WAITING_PER_VM {
                vm.send(&sinks, MessageKind::Event, b"{}", NOW);
            }
        }
        let full = outbox.counts();
        assert_eq!((full.waiting, full.dropped), (WAITING as u64, WAITING_PER_VM as u64));
        let task = tokio::spawn(deliver(deliveries));
        until(&outbox, |c| c.waiting == 0).await;
        for vm in &vms {
            vm.send(&sinks, MessageKind::Event, b"{}", NOW);
        }
        let counts = until(&outbox, |c| c.waiting == 0).await;
        assert_eq!(counts.delivered, (WAITING + vms.len()) as u64);
        assert_eq!(counts.dropped, full.dropped);
        task.abort();
    }

    #[test]
    fn a_body_beyond_its_limit_is_dropped_and_counted() {
        let (_room, path) = room();
        let every = Some(Box::new(file(&path)));
        let sinks =
            Sinks { ready: every.clone(), phone_home: every.clone(), events: every.clone(), password: every };
        for kind in [MessageKind::Ready, MessageKind::PhoneHome, MessageKind::Event, MessageKind::Password] {
            let (outbox, _deliveries) = outbox();
            let vm = vm(1, &outbox);
            vm.send(&sinks, kind, &vec![b'x'; kind.most_bytes()], NOW);
            assert_eq!((outbox.counts().waiting, outbox.counts().dropped), (1, 0), "{kind:?}");
            vm.send(&sinks, kind, &vec![b'x'; kind.most_bytes() + 1], NOW);
            assert_eq!((outbox.counts().waiting, outbox.counts().dropped), (1, 1), "{kind:?}");
        }
    }

    #[test]
    fn a_message_is_ignored_without_a_sink_and_dropped_without_an_agent() {
        let outbox = Outbox::detached();
        let vm = vm(1, &outbox);
        vm.send(&Sinks::default(), MessageKind::Ready, b"", NOW);
        assert_eq!(outbox.counts(), SinkCounts::default());
        vm.send(&events(file(Path::new("/nowhere"))), MessageKind::Event, b"", NOW);
        assert_eq!(outbox.counts(), SinkCounts { dropped: 1, ..SinkCounts::default() });
    }

    #[tokio::test]
    async fn a_file_grows_to_its_limit_and_no_further() {
        let (_room, path) = room();
        let (outbox, deliveries) = outbox();
        let vm = vm(1, &outbox);
        let sinks = events(file(&path));
        let task = tokio::spawn(deliver(deliveries));
        vm.send(&sinks, MessageKind::Event, b"{}", NOW);
        until(&outbox, |c| c.delivered == 1).await;
        let line = fs::metadata(&path).expect("there").len();
        let grow = |to: u64| fs::File::options().write(true).open(&path).expect("open").set_len(to);
        grow(SINK_FILE_BYTES - line).expect("grown");
        vm.send(&sinks, MessageKind::Event, b"{}", NOW);
        until(&outbox, |c| c.delivered == 2).await;
        assert_eq!(fs::metadata(&path).expect("there").len(), SINK_FILE_BYTES);
        vm.send(&sinks, MessageKind::Event, b"{}", NOW);
        let counts = until(&outbox, |c| c.waiting == 0).await;
        assert_eq!((counts.delivered, counts.failed), (2, 1));
        assert_eq!(fs::metadata(&path).expect("there").len(), SINK_FILE_BYTES);
        task.abort();
    }

    #[tokio::test]
    async fn a_panic_in_one_delivery_does_not_stop_the_messages_behind_it() {
        let (outbox, mut deliveries) = outbox();
        let mailbox = Mailbox::new("", &outbox);
        let sinks = Sinks { events: Some(Box::new(Sink::File("/sink".into()))), ..Sinks::default() };
        let arrived = Arc::new(Mutex::new(Vec::new()));
        let arrivals = Arc::clone(&arrived);
        let mut queues = Queues::new(move |message: Box<Message>| {
            let arrivals = Arc::clone(&arrivals);
            async move {
                let json: Value = serde_json::from_str(&message.json()).expect("JSON");
                assert_ne!(json["body"], "fault", "as meant");
                arrivals.lock().expect("sound").push(json["body"].clone());
                Ok(())
            }
        });
        for body in ["first", "fault", "last"] {
            mailbox.send(&sinks, MessageKind::Event, body.as_bytes(), 0);
            queues.push(deliveries.queue.try_recv().expect("a message"));
        }
        while let Some(done) = queues.tasks.join_next_with_id().await {
            match done {
                Ok((id, taken)) => queues.ended(id, Some(taken)),
                Err(error) => queues.ended(error.id(), None),
            }
        }
        assert_eq!(*arrived.lock().expect("sound"), ["first", "last"]);
        assert_eq!(outbox.counts().waiting, 0, "the message still counts as waiting");
        assert!(queues.waiting.is_empty() && queues.sinks.is_empty(), "an empty queue is kept");
    }
}
