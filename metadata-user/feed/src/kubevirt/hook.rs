//! The server of KubeVirt's node hook: virt-handler calls it before a VMI runs (KubeVirt 1.9, gate `Plugins`).
//!
//! It is the gRPC service `kubevirt.hooks.plugins.v1alpha1.NodeHookService` on a Unix socket. Its only method takes one
//! message and returns an empty one, so HTTP/2 and two structs replace a gRPC library.
//!
//! | hook point | effect | answered |
//! |---|---|---|
//! | `PreVMStart` | the feed serves the VMI | once its record is published, at the latest after [`WAIT`] |
//! | `PreMigrationTarget` | the feed serves the VMI as soon as its tap exists | at once |
//! | `PostVMStop` | the hook no longer names the VMI | at once |
//! | any other | nothing | at once |
//!
//! No call waits until the agent has attached to a tap. The agent attaches within moments after the record, while QEMU
//! starts, and a faster guest gets its answer when its TCP retransmits.
//!
//! If the record is not ready after [`WAIT`], the call returns `UNAVAILABLE`. The `Plugin` object decides the effect.
//! With `failureStrategy: Ignore` the VM starts, and the agent holds its requests until the record arrives. With `Fail`
//! virt-handler calls again, and the VM starts once its metadata is ready. virt-handler may repeat every call.

use std::convert::Infallible;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use crate::listen::{ConnectionLimit, EvictionGuard, WhenFull};
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
use tokio::sync::{mpsc, oneshot};
use tracing::debug;

use super::Vmi;
use crate::FeedError;

/// Longest wait for a VMI's record.
pub const WAIT: Duration = Duration::from_secs(2);
/// Most connections. Beyond it, one without a whole call makes room.
pub const CALLS: usize = 64;
/// Longest life of a connection.
pub const LIFE: Duration = Duration::from_secs(8);
/// Most bytes of a call. etcd accepts objects of 1.5 MiB, and JSON needs more bytes for the same object.
pub const BYTES: usize = 4 << 20;

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
    /// The feed answers this once the VM may start.
    pub done: oneshot::Sender<()>,
}

/// The hook points that have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// `PreVMStart`: the VM is about to run.
    Starts,
    /// `PreMigrationTarget`: the VM is about to arrive from another node.
    Comes,
    /// `PostVMStop`: the VM has ended.
    Stopped,
}

impl Point {
    fn of(name: &str) -> Option<Self> {
        match name {
            "PreVMStart" => Some(Self::Starts),
            "PreMigrationTarget" => Some(Self::Comes),
            "PostVMStop" => Some(Self::Stopped),
            _ => None,
        }
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

/// Opens the socket. Only root may connect, and virt-handler runs as root.
///
/// # Errors
/// The directory does not exist, or a file that is no socket has the name.
pub fn open(path: &Path) -> Result<UnixListener, FeedError> {
    let bound = || -> io::Result<UnixListener> {
        // Remove a previous agent's socket; keep any other file.
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    bound().map_err(|error| FeedError::Io {
        path: path.into(),
        expected: "a place for the socket of KubeVirt's node hook",
        error: Arc::new(error),
    })
}

/// Serves calls until the receiver is dropped.
pub async fn serve(listener: UnixListener, calls: mpsc::Sender<HookCall>) {
    let places = ConnectionLimit { name: "the node hook's socket", most: CALLS, when_full: WhenFull::Evict };
    let attend = |stream, stay| attend(stream, calls.clone(), stay);
    tokio::select! {
        never = crate::listen::serve(&listener, places, attend) => match never {},
        () = calls.closed() => {}
    }
}

async fn attend(stream: UnixStream, calls: mpsc::Sender<HookCall>, stay: EvictionGuard) {
    let answer = service_fn(move |request| answer(request, calls.clone(), stay.clone()));
    let mut server = http2::Builder::new(TokioExecutor::new());
    server.max_concurrent_streams(1);
    let conversation = server.serve_connection(TokioIo::new(stream), answer);
    if let Ok(Err(error)) = tokio::time::timeout(LIFE, conversation).await {
        debug!("a caller of the node hook: {error}");
    }
}

async fn answer(
    request: Request<Incoming>,
    calls: mpsc::Sender<HookCall>,
    stay: EvictionGuard,
) -> Result<Response<impl Body<Data = Bytes, Error = Infallible>>, Infallible> {
    let (status, message) = match handle(request, &calls, &stay).await {
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
    calls: &mpsc::Sender<HookCall>,
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
        _ => Err(unavailable("the VM's metadata is not ready yet; the agent holds its requests until then")),
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
        BYTES, Bytes, CALLS, ExecuteNodeHookRequest, HookCall, METHOD, NodeContext, Point, Vmi, WAIT, open,
        serve,
    };
    use http_body_util::{BodyExt as _, Full};
    use hyper::Request;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use prost::Message as _;
    use std::path::{Path, PathBuf};
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
        tokio::spawn(serve(open(&path).expect("a socket"), calls));
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
    async fn other_hook_points_are_answered_at_once() {
        let (_dir, socket, mut calls) = hook();
        for (name, point) in [
            ("PreMigrationTarget", Some(Point::Comes)),
            ("PostVMStop", Some(Point::Stopped)),
            ("PostVMStart", None),
            ("PreVMStop", None),
            ("SomethingNew", None),
        ] {
            assert_eq!(call(&socket, METHOD, message(name, VMI)).await, (0, 5), "{name}");
            assert_eq!(calls.try_recv().ok().map(|call| call.point), point, "{name}");
        }
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
