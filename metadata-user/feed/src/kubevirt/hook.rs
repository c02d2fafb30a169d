//! KubeVirt's node hook: virt-handler tells of a VMI before it runs (KubeVirt 1.9, gate `Plugins`).
//!
//! A gRPC service, `kubevirt.hooks.plugins.v1alpha1.NodeHookService`, on a Unix socket. It has one method that takes one
//! message and gives an empty one back, so HTTP/2 and two structs are all of gRPC that is needed.
//!
//! | hook point | what is done | answered |
//! |---|---|---|
//! | `PreVMStart` | the VMI is served | once its record has been told, at the latest after [`WAIT`] |
//! | `PreMigrationTarget` | the VMI is served as soon as its tap is there | at once |
//! | `PostVMStop` | the hook's word for it ends | at once |
//! | any other | nothing | at once |
//!
//! Nothing waits for a tap to be attached: that follows the record within moments, while QEMU starts, and a guest that is
//! faster is answered when its TCP asks again.
//!
//! A VMI that is not ready after [`WAIT`] is answered `UNAVAILABLE`. What that means for the VM is said in the `Plugin`:
//! with `failureStrategy: Ignore` it starts, and what it asks is held until there is an answer; with `Fail` virt-handler
//! calls again, and the VM starts once its metadata is there. Calls may come again and again.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use metadata_listen::{Places, WhenFull};
use prost::Message as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tracing::debug;

use super::Vmi;
use crate::FeedError;

/// Longest wait for a VMI's record.
pub const WAIT: Duration = Duration::from_secs(2);
/// Calls at once; more wait for their turn.
pub const CALLS: usize = 64;
/// Octets of a call: etcd takes objects of 1.5 MiB, and JSON says the same at more length.
pub const OCTETS: usize = 4 << 20;

/// The only method.
const METHOD: &str = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook";
/// Octets before a message: whether it is compressed, and its length.
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

/// What the hook tells the feed.
#[derive(Debug)]
pub struct Call {
    /// The VMI.
    pub vmi: Box<Vmi>,
    /// What becomes of it.
    pub point: Point,
    /// Answered once there is nothing to wait for.
    pub done: oneshot::Sender<()>,
}

/// The hook points that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// It is about to run.
    Starts,
    /// It is about to come from another node.
    Comes,
    /// It has ended.
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

/// How a call ends, in gRPC's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok = 0,
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Unavailable = 14,
}

/// A call that is not answered with [`Status::Ok`], and why.
type Refusal = (Status, String);

/// Opens the socket, for root alone: virt-handler is.
///
/// # Errors
/// There is no such directory, or something else has the name.
pub fn open(path: &Path) -> Result<UnixListener, FeedError> {
    let bound = || -> io::Result<UnixListener> {
        // A socket of an agent before; anything else in its place stays.
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

/// Answers calls until nobody listens any more.
pub async fn serve(listener: UnixListener, calls: mpsc::Sender<Call>) {
    let places = Places { name: "the node hook's socket", most: CALLS, when_full: WhenFull::Wait };
    let attend = |stream, _| attend(stream, calls.clone());
    tokio::select! {
        never = metadata_listen::serve(&listener, places, attend) => match never {},
        () = calls.closed() => {}
    }
}

async fn attend(stream: UnixStream, calls: mpsc::Sender<Call>) {
    let answer = service_fn(move |request| answer(request, calls.clone()));
    let mut server = http2::Builder::new(TokioExecutor::new());
    server.max_concurrent_streams(1);
    let conversation = server.serve_connection(TokioIo::new(stream), answer);
    if let Ok(Err(error)) = tokio::time::timeout(WAIT * 4, conversation).await {
        debug!("a caller of the node hook: {error}");
    }
}

async fn answer(
    request: Request<Incoming>,
    calls: mpsc::Sender<Call>,
) -> Result<Response<impl Body<Data = Bytes, Error = Infallible>>, Infallible> {
    let (status, message) = match handle(request, &calls).await {
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
    // An empty message has no octets behind its prefix.
    let message = (status == Status::Ok).then(|| Frame::data(Bytes::from_static(&[0; PREFIX])));
    let frames = message.into_iter().chain([Frame::trailers(trailers)]).map(Ok);
    // Of no length that would be stated: some clients end with the last octet of the body, and the status comes after it.
    let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}

async fn handle(request: Request<Incoming>, calls: &mpsc::Sender<Call>) -> Result<(), Refusal> {
    if request.uri().path() != METHOD {
        return Err((Status::Unimplemented, format!("expected {METHOD}")));
    }
    let body = Limited::new(request.into_body(), OCTETS + PREFIX).collect().await;
    let body = body.map_err(|_| (Status::ResourceExhausted, format!("expected at most {OCTETS} octets")))?;
    let asked = read(&body.to_bytes())?;
    let Some(point) = Point::of(&asked.hook_point) else { return Ok(()) };
    let vmi = Vmi::read(&asked.vmi).map_err(|error| (Status::InvalidArgument, error.to_string()))?;
    let key = vmi.key();
    let (done, told) = oneshot::channel();
    let call = Call { vmi: Box::new(vmi), point, done };
    let unavailable = |why: &str| (Status::Unavailable, format!("{key}: {why}"));
    calls.send(call).await.map_err(|_| unavailable("the agent is about to end"))?;
    if point != Point::Starts {
        return Ok(());
    }
    match tokio::time::timeout(WAIT, told).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(unavailable("its metadata is not ready yet; what it asks is held until it is")),
    }
}

/// The one message of a call.
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
        Bytes, Call, ExecuteNodeHookRequest, METHOD, NodeContext, OCTETS, Point, Vmi, WAIT, open, serve,
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

    /// The message of a call as virt-handler sends it (gRPC over HTTP/2, "Length-Prefixed-Message").
    fn message(point: &str, vmi: &[u8]) -> Bytes {
        let node_context = Some(NodeContext { node_name: "n1".into() });
        let vmi = Bytes::copy_from_slice(vmi);
        let message = ExecuteNodeHookRequest { hook_point: point.into(), vmi, node_context }.encode_to_vec();
        let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
        [&[0][..], &length, &message].concat().into()
    }

    /// The socket of a hook, and the calls that come by it.
    fn hook() -> (tempfile::TempDir, PathBuf, mpsc::Receiver<Call>) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("hook.sock");
        let (calls, told) = mpsc::channel(4);
        tokio::spawn(serve(open(&path).expect("a socket"), calls));
        (dir, path, told)
    }

    /// Calls as virt-handler does. Returns the status of gRPC and the octets of the answer.
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
    async fn a_vm_starts_once_its_record_has_been_told() {
        let (_dir, socket, mut calls) = hook();
        let asked = tokio::spawn(async move { call(&socket, METHOD, message("PreVMStart", VMI)).await });
        let Call { vmi, point, done } = calls.recv().await.expect("a call");
        assert_eq!((point, vmi.key().as_str()), (Point::Starts, "shop/web-1"));
        assert_eq!(*vmi, Vmi::read(VMI).expect("a VMI"));
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!asked.is_finished(), "it is answered before there is a record");
        done.send(()).expect("it is waited for");
        assert_eq!(asked.await.expect("an answer"), (0, 5), "an empty message");
    }

    #[tokio::test]
    async fn a_vm_that_is_not_ready_is_unavailable_after_a_while() {
        let (_dir, socket, mut calls) = hook();
        let begun = Instant::now();
        let asked = tokio::spawn(async move { call(&socket, METHOD, message("PreVMStart", VMI)).await });
        let _held = calls.recv().await.expect("a call");
        assert_eq!(asked.await.expect("an answer"), (14, 0));
        assert!(begun.elapsed() >= WAIT);
    }

    #[tokio::test]
    async fn what_needs_no_waiting_is_answered_at_once() {
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
    async fn what_is_no_call_is_refused() {
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
            ("too much", METHOD, vec![0; OCTETS + 6].into(), 8),
        ];
        for (what, method, body, status) in cases {
            assert_eq!(call(&socket, method, body).await, (status, 0), "{what}");
        }
        assert!(calls.try_recv().is_err(), "nothing of it is told");
    }

    #[tokio::test]
    async fn a_socket_of_an_agent_before_is_replaced_and_anything_else_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("hook.sock");
        drop(open(&path).expect("a socket"));
        drop(open(&path).expect("in the place of the one before"));
        std::fs::remove_file(&path).expect("the socket");
        std::fs::write(&path, "precious").expect("a file");
        let error = open(&path).expect_err("a file is in the way").to_string();
        assert!(error.contains("node hook") && path.is_file(), "{error}");
    }
}
