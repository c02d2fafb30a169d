//! The server of KubeVirt's node hook: virt-handler calls it before a VMI runs (KubeVirt 1.9, gate `Plugins`).
//!
//! It is the gRPC service `kubevirt.hooks.plugins.v1alpha1.NodeHookService` on a Unix socket. Its only method takes one
//! message and returns an empty one, so HTTP/2 and two structs replace a gRPC library.
//!
//! | hook point | effect | answered |
//! |---|---|---|
//! | `PreVMStart` | the feed serves the VMI | once its record is published, at the latest after [`WAIT`] |
//! | `PreMigrationSource` | nothing, or the [hold](MigrationHold) | at once, or once the guest has acknowledged the migration |
//! | `PreMigrationTarget` | the feed serves the VMI as soon as its tap exists | at once |
//! | `PostVMStop` | the hook no longer names the VMI of this UID | at once |
//! | any other | nothing | at once |
//!
//! No call waits until the agent has attached to a tap. The agent attaches within moments after the record, while QEMU
//! starts, and a faster guest gets its answer when its TCP retransmits.
//!
//! If the record is not ready after [`WAIT`], the call returns `UNAVAILABLE`, and at once if the agent refuses the VMI:
//! it is beyond its namespace's share, or names the pod of another VMI. The `Plugin` object decides the effect.
//! With `failureStrategy: Ignore` the VM starts, and the agent holds its requests until the record arrives. With `Fail`
//! virt-handler calls again, and the VM starts once its metadata is ready. virt-handler may repeat every call.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fs, io};

use crate::listen::{ConnectionHolder, ConnectionLimit, EvictionGuard, Listener, WhenFull};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::Vmi;
use super::translate::events::migration_id;
use crate::FeedError;
use crate::hold::{self, GuestReadiness};
use crate::state::mailboxes::Mailboxes;

/// Longest wait for a VMI's record.
pub const WAIT: Duration = Duration::from_secs(2);
/// Most connections. Beyond it, one without a whole call makes room.
pub const CALLS: usize = 64;
/// Longest life of a connection, beside the hold of a migration.
pub const LIFE: Duration = Duration::from_secs(8);
/// How many migrations the hold remembers, so that a call that is repeated does not begin it again.
pub const MIGRATIONS: usize = 256;
/// Most bytes of a call. etcd accepts objects of 1.5 MiB, and JSON needs more bytes for the same object.
pub const BYTES: usize = 4 << 20;
/// How often the agent looks whether somebody still listens on the socket's path.
const LOOK: Duration = Duration::from_secs(2);

/// The path of the only method.
const METHOD: &str = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook";
/// Bytes before a message: one for compression, four for its length.
const PREFIX: usize = 5;

#[derive(Clone, PartialEq, prost::Message)]
struct NodeContext {
    #[prost(string, tag = "1")]
    node_name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ExecuteNodeHookRequest {
    #[prost(string, tag = "1")]
    hook_point: String,
    #[prost(bytes = "bytes", tag = "2")]
    vmi: Bytes,
    #[prost(message, optional, tag = "3")]
    node_context: Option<NodeContext>,
}

/// A call of the hook, for the feed.
#[derive(Debug)]
pub struct HookCall {
    /// The VMI.
    pub vmi: Box<Vmi>,
    /// The hook point.
    pub point: Point,
    /// The feed answers this once the VM may start, and drops it if it refuses the VMI.
    pub done: oneshot::Sender<()>,
}

/// The hook points that have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// `PreVMStart`: the VM is about to run.
    Starts,
    /// `PreMigrationSource`: the VM is about to leave for another node.
    Leaves,
    /// `PreMigrationTarget`: the VM is about to arrive from another node.
    Comes,
    /// `PostVMStop`: the VM has ended.
    Stopped,
}

impl Point {
    fn of(name: &str) -> Option<Self> {
        match name {
            "PreVMStart" => Some(Self::Starts),
            "PreMigrationSource" => Some(Self::Leaves),
            "PreMigrationTarget" => Some(Self::Comes),
            "PostVMStop" => Some(Self::Stopped),
            _ => None,
        }
    }
}

/// Holds live migrations until their guests have acknowledged them, so that a guest may save its work before it is
/// frozen. virt-handler asks before it tells the launcher to migrate. The answer is always that it may: a silent guest
/// delays its migration by the limit, once.
#[derive(Debug)]
pub struct MigrationHold {
    limit: Duration,
    mailboxes: Arc<Mailboxes>,
    /// The last migrations that were held, by the ids of their events, and when that began. virt-handler may repeat a
    /// call.
    begun: Mutex<VecDeque<(String, Instant)>>,
}

impl MigrationHold {
    /// A hold of this limit; zero for none.
    #[must_use]
    pub fn new(limit: Duration, mailboxes: Arc<Mailboxes>) -> Self {
        Self { limit, mailboxes, begun: Mutex::default() }
    }

    /// Waits until the guest has acknowledged its migration.
    async fn wait(&self, vmi: &Vmi) {
        let Some(event) = vmi.status.migration_state.as_ref().and_then(migration_id) else { return };
        // Nobody tells the guest of a VM that is not served.
        let Some(mailbox) = self.mailboxes.loaded(&vmi.owner()) else { return };
        let left = self.left(&event);
        if left.is_zero() {
            return;
        }
        // The watch may announce the migration later than virt-handler knows of it.
        let told = hold::within(left, || {
            (GuestReadiness::of(mailbox.events(), &event) == GuestReadiness::Ready).then_some(())
        });
        if told.await.is_none() {
            info!(vmi = vmi.key(), event, "the guest has not acknowledged its migration, which continues");
        }
    }

    /// How long a migration may still be held.
    fn left(&self, event: &str) -> Duration {
        if self.limit.is_zero() {
            return Duration::ZERO;
        }
        let (mut begun, now) = (self.begun.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        if let Some((_, since)) = begun.iter().find(|(known, _)| known == event) {
            return self.limit.saturating_sub(now - *since);
        }
        if begun.len() == MIGRATIONS {
            begun.pop_front();
        }
        begun.push_back((event.to_owned(), now));
        self.limit
    }
}

/// The gRPC status of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok = 0,
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Unavailable = 14,
}

/// A status other than [`Status::Ok`] with its message.
type Refusal = (Status, String);

/// The hook's socket, which an agent replaces when it starts, before it has taken over. If it then fails, its
/// predecessor makes the socket again: virt-handler would reach nobody until the next agent starts.
#[derive(Debug)]
pub struct HookSocket {
    path: PathBuf,
    bound: watch::Sender<Arc<BoundSocket>>,
}

#[derive(Debug)]
struct BoundSocket {
    listener: UnixListener,
    /// Device and number of its file.
    inode: (u64, u64),
}

impl BoundSocket {
    /// Replaces the socket at this path in one step, so that it always exists, and has its mode from the start. Any
    /// other file stays.
    fn bind(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let aside = path.with_file_name(format!(".hook.{}", std::process::id()));
        match fs::remove_file(&aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&aside)?;
        fs::set_permissions(&aside, fs::Permissions::from_mode(0o600))?;
        let inode = inode(&aside)?;
        fs::rename(&aside, path)?;
        Ok(Self { listener, inode })
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

impl HookSocket {
    /// Makes the socket again, at intervals, if nobody listens on its path any more.
    async fn keep(&self) -> Infallible {
        let mut is_failing = false;
        loop {
            tokio::time::sleep(LOOK).await;
            let restored = self.restore().await;
            let was_failing = std::mem::replace(&mut is_failing, restored.is_err());
            if let Err(error) = restored
                && !was_failing
            {
                let socket = self.path.display();
                warn!(%socket, "nobody listens on it any more, and the agent cannot make it again: {error}");
            }
        }
    }

    /// Makes the socket again if nobody listens on its path any more.
    async fn restore(&self) -> io::Result<()> {
        if self.is_served().await {
            return Ok(());
        }
        self.bound.send_replace(Arc::new(BoundSocket::bind(&self.path)?));
        warn!(socket = %self.path.display(), "nobody listened on it any more; the agent made it again");
        Ok(())
    }

    /// True while this agent or another one listens on the path.
    async fn is_served(&self) -> bool {
        let own = self.bound.borrow().inode;
        if inode(&self.path).is_ok_and(|found| found == own) {
            return true;
        }
        match UnixStream::connect(&self.path).await {
            Ok(_) => true,
            Err(error) => !matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound),
        }
    }
}

impl Listener for HookSocket {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        let mut current = self.bound.subscribe();
        loop {
            let bound = Arc::clone(&current.borrow_and_update());
            tokio::select! {
                accepted = bound.listener.accept() => return accepted.map(|(stream, _)| stream),
                Ok(()) = current.changed() => {}
            }
        }
    }

    fn holder(stream: &UnixStream) -> ConnectionHolder {
        UnixListener::holder(stream)
    }
}

/// Opens the socket. Only root may connect, and virt-handler runs as root.
///
/// # Errors
/// The directory does not exist, or a file that is not a socket has the name.
pub fn open(path: &Path) -> Result<HookSocket, FeedError> {
    let bound = BoundSocket::bind(path).map_err(|error| FeedError::Io {
        path: path.into(),
        expected: "a place for the socket of KubeVirt's node hook",
        error: Arc::new(error),
    })?;
    Ok(HookSocket { path: path.into(), bound: watch::channel(Arc::new(bound)).0 })
}

/// Serves calls until the receiver is dropped.
pub async fn serve(socket: HookSocket, calls: mpsc::Sender<HookCall>, hold: Arc<MigrationHold>) {
    let places = ConnectionLimit { name: "the node hook's socket", most: CALLS, when_full: WhenFull::Evict };
    let attend = |stream, stay| attend(stream, (calls.clone(), Arc::clone(&hold)), stay);
    tokio::select! {
        never = crate::listen::serve(&socket, places, attend) => match never {},
        never = socket.keep() => match never {},
        () = calls.closed() => {}
    }
}

/// Who answers calls: the feed, and the hold of migrations.
type HookHandlers = (mpsc::Sender<HookCall>, Arc<MigrationHold>);

async fn attend(stream: UnixStream, handlers: HookHandlers, stay: EvictionGuard) {
    let life = LIFE + handlers.1.limit;
    let answer = service_fn(move |request| answer(request, handlers.clone(), stay.clone()));
    let mut server = http2::Builder::new(TokioExecutor::new());
    server.max_concurrent_streams(1);
    let conversation = server.serve_connection(TokioIo::new(stream), answer);
    if let Ok(Err(error)) = tokio::time::timeout(life, conversation).await {
        debug!("a connection to the node hook failed: {error}");
    }
}

async fn answer(
    request: Request<Incoming>,
    handlers: HookHandlers,
    stay: EvictionGuard,
) -> Result<Response<impl Body<Data = Bytes, Error = Infallible>>, Infallible> {
    let (status, message) = match handle(request, &handlers, &stay).await {
        Ok(()) => (Status::Ok, String::new()),
        Err(refusal) => refusal,
    };
    if status != Status::Ok {
        debug!(?status, "node hook: {message}");
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from(status as u16));
    if let Ok(message) = HeaderValue::from_str(&message) {
        trailers.insert("grpc-message", message);
    }
    // The prefix of an empty message is all zeros.
    let message = (status == Status::Ok).then(|| Frame::data(Bytes::from_static(&[0; PREFIX])));
    let frames = message.into_iter().chain([Frame::trailers(trailers)]).map(Ok);
    // Send no content-length: some clients stop after the last byte of the body and miss the status, which follows in
    // the trailers.
    let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}

async fn handle(
    request: Request<Incoming>,
    (calls, hold): &HookHandlers,
    stay: &EvictionGuard,
) -> Result<(), Refusal> {
    if request.uri().path() != METHOD {
        return Err((Status::Unimplemented, format!("expected {METHOD}")));
    }
    let body = Limited::new(request.into_body(), BYTES + PREFIX).collect().await;
    let body = body.map_err(|_| (Status::ResourceExhausted, format!("expected at most {BYTES} bytes")))?;
    let _stay = stay.hold();
    let asked = read(&body.to_bytes())?;
    let Some(point) = Point::of(&asked.hook_point) else { return Ok(()) };
    let vmi = Vmi::read(&asked.vmi).map_err(|error| (Status::InvalidArgument, error.to_string()))?;
    if point == Point::Leaves {
        hold.wait(&vmi).await;
        return Ok(());
    }
    let key = vmi.key();
    let (done, told) = oneshot::channel();
    let call = HookCall { vmi: Box::new(vmi), point, done };
    let unavailable = |why: &str| (Status::Unavailable, format!("{key}: {why}"));
    calls.send(call).await.map_err(|_| unavailable("the agent is stopping"))?;
    if point != Point::Starts {
        return Ok(());
    }
    match tokio::time::timeout(WAIT, told).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(unavailable("the agent refuses to serve the VM; `xdp-imds status` has the reason")),
        Err(_) => {
            Err(unavailable("the VM's metadata is not ready yet; the agent holds its requests until then"))
        }
    }
}

/// Decodes the one message of a call.
fn read(body: &Bytes) -> Result<ExecuteNodeHookRequest, Refusal> {
    let refused = |why: &str| (Status::InvalidArgument, why.to_owned());
    let (&[compressed, a, b, c, d], message) =
        body.split_first_chunk::<PREFIX>().ok_or_else(|| refused("expected a message"))?;
    if compressed != 0 {
        return Err((Status::Unimplemented, "expected a message that is not compressed".into()));
    }
    if usize::try_from(u32::from_be_bytes([a, b, c, d])) != Ok(message.len()) {
        return Err(refused("expected one whole message"));
    }
    ExecuteNodeHookRequest::decode(message).map_err(|_| refused("expected an ExecuteNodeHookRequest"))
}

#[cfg(test)]
mod tests {
    use super::{
        BYTES, Bytes, CALLS, ExecuteNodeHookRequest, HookCall, METHOD, MigrationHold, NodeContext, Point,
        Vmi, WAIT, inode, open, serve,
    };
    use crate::listen::Listener as _;
    use crate::state::mailboxes::Mailboxes;
    use http_body_util::{BodyExt as _, Full};
    use hyper::Request;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use metadata_content::sink::Outbox;
    use prost::Message as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::{Duration, Instant};
    use tokio::net::UnixStream;
    use tokio::sync::mpsc;

    const VMI: &[u8] = include_bytes!("translate/fixtures/vmi.json");

    /// A call's message as virt-handler sends it (gRPC over HTTP/2, "Length-Prefixed-Message").
    fn message(point: &str, vmi: &[u8]) -> Bytes {
        let node_context = Some(NodeContext { node_name: "n1".into() });
        let vmi = Bytes::copy_from_slice(vmi);
        let message = ExecuteNodeHookRequest { hook_point: point.into(), vmi, node_context }.encode_to_vec();
        let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
        [&[0][..], &length, &message].concat().into()
    }

    /// A hook's socket, and the calls that arrive on it.
    fn hook() -> (tempfile::TempDir, PathBuf, mpsc::Receiver<HookCall>) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("hook.sock");
        let (calls, told) = mpsc::channel(4);
        let hold = MigrationHold::new(Duration::ZERO, Mailboxes::in_memory(Outbox::detached()).into());
        tokio::spawn(serve(open(&path).expect("a socket"), calls, hold.into()));
        (dir, path, told)
    }

    /// Calls as virt-handler does. Returns the gRPC status and the bytes of the response.
    async fn call(socket: &Path, method: &str, body: Bytes) -> (u32, usize) {
        let stream = UnixStream::connect(socket).await.expect("somebody listens");
        let (mut client, conversation) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .expect("HTTP/2");
        tokio::spawn(conversation);
        let request = Request::post(format!("http://localhost{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(body))
            .expect("a request");
        let response = client.send_request(request).await.expect("a response");
        assert_eq!(response.status(), 200);
        let kind = response.headers().get("content-type").map(|kind| kind.to_str().expect("text").to_owned());
        assert_eq!(kind.as_deref(), Some("application/grpc"));
        assert!(!response.headers().contains_key("content-length"), "the status comes after the body");
        let body = response.into_body().collect().await.expect("a whole response");
        let status = body.trailers().and_then(|trailers| trailers.get("grpc-status")).expect("a status");
        let status = status.to_str().expect("text").parse().expect("a number");
        (status, body.to_bytes().len())
    }

    #[tokio::test]
    async fn a_vm_starts_once_its_record_is_published() {
        let (_dir, socket, mut calls) = hook();
        let asked = tokio::spawn(async move { call(&socket, METHOD, message("PreVMStart", VMI)).await });
        let HookCall { vmi, point, done } = calls.recv().await.expect("a call");
        assert_eq!((point, vmi.key().as_str()), (Point::Starts, "shop/web-1"));
        assert_eq!(*vmi, Vmi::read(VMI).expect("a VMI"));
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!asked.is_finished(), "it is answered before there is a record");
        done.send(()).expect("it is waited for");
        assert_eq!(asked.await.expect("an answer"), (0, 5), "an empty message");
    }

    #[tokio::test]
    async fn a_vm_that_is_not_ready_is_unavailable_after_the_wait() {
        let (_dir, socket, mut calls) = hook();
        let begun = Instant::now();
        let asked = tokio::spawn(async move { call(&socket, METHOD, message("PreVMStart", VMI)).await });
        let _held = calls.recv().await.expect("a call");
        assert_eq!(asked.await.expect("an answer"), (14, 0));
        assert!(begun.elapsed() >= WAIT);
    }

    #[tokio::test]
    async fn a_vm_that_the_feed_refuses_is_unavailable_at_once() {
        let (_dir, socket, mut calls) = hook();
        let begun = Instant::now();
        let asked = tokio::spawn(async move { call(&socket, METHOD, message("PreVMStart", VMI)).await });
        drop(calls.recv().await.expect("a call"));
        assert_eq!(asked.await.expect("an answer"), (14, 0));
        assert!(begun.elapsed() < WAIT);
    }

    #[tokio::test]
    async fn other_hook_points_are_answered_at_once() {
        let (_dir, socket, mut calls) = hook();
        for (name, point) in [
            ("PreMigrationTarget", Some(Point::Comes)),
            ("PostVMStop", Some(Point::Stopped)),
            // The hold is off.
            ("PreMigrationSource", None),
            ("PostVMStart", None),
            ("PreVMStop", None),
            ("SomethingNew", None),
        ] {
            assert_eq!(call(&socket, METHOD, message(name, VMI)).await, (0, 5), "{name}");
            assert_eq!(calls.try_recv().ok().map(|call| call.point), point, "{name}");
        }
    }

    fn migrating(uid: &str) -> Vmi {
        let mut vmi: serde_json::Value = serde_json::from_slice(VMI).expect("JSON");
        vmi["status"]["migrationState"] = serde_json::json!({"migrationUid": uid});
        Vmi::from_value(vmi).expect("a VMI")
    }

    #[tokio::test(start_paused = true)]
    async fn a_migration_waits_for_its_guest_once_and_no_longer_than_the_limit() {
        const LIMIT: Duration = Duration::from_secs(30);
        let mailboxes = Arc::new(Mailboxes::in_memory(Outbox::detached()));
        let hold = MigrationHold::new(LIMIT, Arc::clone(&mailboxes));
        let took = async |vmi: &Vmi| {
            let start = tokio::time::Instant::now();
            hold.wait(vmi).await;
            start.elapsed()
        };
        assert_eq!(took(&migrating("a")).await, Duration::ZERO, "the VM is not served");
        let mailbox = mailboxes.get(&migrating("a").owner());
        assert_eq!(took(&migrating("a")).await, LIMIT, "the guest is silent");
        assert_eq!(took(&migrating("a")).await, Duration::ZERO, "virt-handler repeats its call");
        assert_eq!(took(&Vmi::read(VMI).expect("a VMI")).await, Duration::ZERO, "it does not migrate");
        let vmi = migrating("b");
        let announce = |state: &str| {
            let event = serde_json::json!({"id": "migration-b", "kind": "freeze", "state": state});
            mailbox.events().note_record("i", &[serde_json::from_value(event).expect("an event")], 0);
        };
        announce("scheduled");
        let guest = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            mailbox.events().acknowledge("migration-b", 1);
        };
        let (took_b, ()) = tokio::join!(took(&vmi), guest);
        assert!((Duration::from_secs(2)..Duration::from_secs(3)).contains(&took_b), "{took_b:?}");
        assert_eq!(took(&vmi).await, Duration::ZERO, "the guest is ready");
        let off = MigrationHold::new(Duration::ZERO, mailboxes);
        let start = tokio::time::Instant::now();
        off.wait(&migrating("c")).await;
        assert_eq!(start.elapsed(), Duration::ZERO, "it is off");
    }

    #[tokio::test]
    async fn idle_connections_make_room_for_a_call() {
        let (_dir, socket, _calls) = hook();
        let mut idle = Vec::new();
        for _ in 0..=CALLS {
            idle.push(UnixStream::connect(&socket).await.expect("a connection"));
        }
        assert_eq!(call(&socket, METHOD, message("PostVMStart", VMI)).await, (0, 5));
        let is_closed = |stream: &&UnixStream| {
            let reads = std::iter::from_fn(|| stream.try_read(&mut [0; 4_096]).ok());
            reads.take(64).any(|length| length == 0)
        };
        let closed = idle.iter().filter(is_closed).count();
        assert!(closed <= 2, "{closed} ended before the call: it waited for their limit");
    }

    #[tokio::test]
    async fn an_invalid_call_is_refused() {
        let (_dir, socket, mut calls) = hook();
        let good = message("PreVMStart", VMI);
        let mut compressed = good.to_vec();
        compressed[0] = 1;
        let cases: [(&str, &str, Bytes, u32); 7] = [
            ("another method", "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/Other", good.clone(), 12),
            ("nothing", METHOD, Bytes::new(), 3),
            ("half of it", METHOD, good.slice(..good.len() - 1), 3),
            ("a compressed message", METHOD, compressed.into(), 12),
            ("another message", METHOD, Bytes::from_static(&[0, 0, 0, 0, 1, 0xff]), 3),
            ("no VMI", METHOD, message("PreVMStart", b"[]"), 3),
            ("too much", METHOD, vec![0; BYTES + 6].into(), 8),
        ];
        for (what, method, body, status) in cases {
            assert_eq!(call(&socket, method, body).await, (status, 0), "{what}");
        }
        assert!(calls.try_recv().is_err(), "a refused call reached the feed");
    }

    #[tokio::test]
    async fn a_socket_whose_next_agent_failed_is_made_again_and_that_of_a_live_one_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("hook.sock");
        let socket = open(&path).expect("a socket");
        let next = open(&path).expect("the next agent's");
        let of_next = next.bound.borrow().inode;
        socket.restore().await.expect("nothing to do");
        assert_eq!(inode(&path).expect("a socket"), of_next, "the next agent listens");
        drop(next);
        for what in ["the next agent has failed", "somebody removed it"] {
            // Who waits for a connection gets that of the new socket too.
            let (accepted, connected) = tokio::join!(tokio::time::timeout(WAIT, socket.accept()), async {
                socket.restore().await.expect("a socket");
                UnixStream::connect(&path).await
            });
            assert!(matches!(accepted, Ok(Ok(_))) && connected.is_ok(), "{what}: {accepted:?} {connected:?}");
            let mode = std::fs::metadata(&path).expect("a socket").permissions().mode();
            let names = std::fs::read_dir(dir.path()).expect("listed").count();
            assert_eq!((mode & 0o777, names), (0o600, 1), "{what}");
            std::fs::remove_file(&path).expect("removed");
        }
        std::fs::write(&path, "precious").expect("a file");
        socket.restore().await.expect_err("a file is in the way");
        assert!(path.is_file());
    }

    #[tokio::test]
    async fn a_previous_agents_socket_is_replaced_and_another_file_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("hook.sock");
        drop(open(&path).expect("a socket"));
        drop(open(&path).expect("replaces the former socket"));
        std::fs::remove_file(&path).expect("the socket");
        std::fs::write(&path, "precious").expect("a file");
        let error = open(&path).expect_err("a file is in the way").to_string();
        assert!(error.contains("node hook") && path.is_file(), "{error}");
    }
}
