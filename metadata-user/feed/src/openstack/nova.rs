//! Asks Nova's metadata API as Neutron's agents do (neutron, `agent/metadata/proxy_base.py`; nova,
//! `api/metadata/handler.py`).
//!
//! Method, path, query and body are the guest's. No header field is: Nova believes `X-Instance-ID` and its signature.

use hmac::{Hmac, KeyInit as _, Mac as _};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use metadata_common::maps::Slot;
use metadata_common::printable::hex;
use metadata_common::share::FairQueue;
use metadata_content::http::StatusCode;
use metadata_content::upstream::{ORDERS_WAITING, UpstreamAnswer, UpstreamOrder};
use percent_encoding::{AsciiSet, CONTROLS, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::io::Errno;
use sha2::Sha256;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::health::{OpenstackHealth, OpenstackPeer};
use super::tls::ServerIdentity;
use super::{NovaOptions, TlsFiles};
use crate::FeedError;
use crate::record_part::read;

/// Most requests that Nova has at once.
pub const REQUESTS: usize = 64;
/// Most of them that no guest waits for.
const REQUESTS_AHEAD: usize = REQUESTS / 2;
/// Most bytes of an answer. Nova's user-data has at most 64 KiB in base64.
pub const ANSWER_BYTES: usize = 4 << 20;
/// How long a connection to Nova may take.
pub const CONNECTS_WITHIN: Duration = Duration::from_secs(3);
/// How long an answer may take. Dynamic vendor-data may take ten seconds in Nova, twice.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(28);
/// How long a request is tried again while Nova is away: cloud-init gives up after ten seconds and asks again.
pub const AWAY_FOR: Duration = Duration::from_secs(9);
/// How long a connection may be idle.
const IDLE_FOR: Duration = Duration::from_secs(30);
/// Failures in a row after which single requests try whether Nova is back.
pub const FAILURES: u32 = 3;
/// The shortest and the longest pause between these.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// How often Nova is asked for nobody while it is away or refuses the signature, so that status is right without guests.
const PROBES_EVERY: Duration = Duration::from_secs(5);
/// An instance that no cloud has: Nova checks its signature, and then knows no such instance.
const NOBODY: &str = "00000000-0000-0000-0000-000000000000";
/// Most bytes of the secret's file.
const SECRET_BYTES: usize = 4 << 10;
/// The bytes of a path that stand for themselves (RFC 3986 §3.3).
const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b':')
    .remove(b'@')
    .remove(b'!')
    .remove(b'$')
    .remove(b'&')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b'+')
    .remove(b',')
    .remove(b';')
    .remove(b'=');
/// The bytes of a query that do not stand for themselves, as clients encode them (URL Standard, §1.3): [`Uri`] refuses
/// them, or takes what follows for a fragment.
const NOT_OF_QUERY: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'#').add(b'<').add(b'>');

/// The secret that Nova and this agent share. It has no `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct NovaSecret(Vec<u8>);

impl NovaSecret {
    /// Reads the file; white space around the secret does not count.
    pub(super) fn read(path: &Path) -> Result<Self, FeedError> {
        let expected = "nova.conf's metadata_proxy_shared_secret of [neutron]";
        let found = read(path, SECRET_BYTES).and_then(|found| match found {
            Some(bytes) if bytes.trim_ascii().is_empty() => Err(std::io::Error::other("an empty file")),
            Some(bytes) if bytes.len() <= SECRET_BYTES => Ok(bytes.trim_ascii().to_owned()),
            Some(_) => Err(std::io::Error::other("a file that is too long")),
            None => Err(Errno::NOENT.into()),
        });
        match found {
            Ok(secret) => Ok(Self(secret)),
            Err(error) => Err(FeedError::Io { path: path.to_owned(), expected, error: error.into() }),
        }
    }

    /// The signature of an instance.
    pub(super) fn sign(&self, instance: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("any length is a key");
        mac.update(instance.as_bytes());
        hex(&mac.finalize().into_bytes())
    }
}

/// Who asks.
#[derive(Clone, Copy)]
struct Asking<'a> {
    instance: &'a str,
    project: &'a str,
    address: IpAddr,
}

/// An instance that does not exist.
const UNKNOWN: Asking<'static> =
    Asking { instance: NOBODY, project: NOBODY, address: IpAddr::V4(Ipv4Addr::LOCALHOST) };

/// A request that lacks only its signature.
type UnsignedRequest = Request<Full<Bytes>>;

/// A client of Nova's metadata API.
pub(super) struct NovaClient {
    options: NovaOptions,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    secret: Mutex<Option<NovaSecret>>,
    breaker: Mutex<CircuitBreaker>,
    health: Arc<OpenstackHealth>,
}

/// Nova has given no answer.
#[derive(Debug)]
pub(super) struct NovaError {
    pub(super) reason: String,
    /// Nova has not got the request.
    is_unsent: bool,
}

impl NovaClient {
    /// Reads the TLS files. The secret is read with the first request.
    pub(super) fn new(options: NovaOptions, health: Arc<OpenstackHealth>) -> Result<Self, FeedError> {
        let wrong = |found: &str| FeedError::Vm {
            reason: format!(
                "openstack.nova.url: expected `http://HOST:PORT` or `https://HOST:PORT`, found `{found}`"
            ),
        };
        let uri: Uri = options.url.parse().map_err(|_| wrong(&options.url))?;
        let has_host = uri.host().is_some_and(|host| !host.is_empty());
        let is_usable = has_host && matches!(uri.path(), "" | "/") && uri.query().is_none();
        let is_secure = match uri.scheme_str() {
            Some("https") if is_usable => true,
            Some("http") if is_usable => false,
            _ => return Err(wrong(&options.url)),
        };
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECTS_WITHIN));
        let tls = match is_secure {
            true => options.tls.read(ServerIdentity::Name),
            false => TlsFiles::unused(),
        };
        let tls = tls.map_err(|error| FeedError::Vm { reason: error.to_string() })?;
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_FOR)
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(REQUESTS)
            .build(connector.wrap_connector(http));
        let (secret, breaker) = (Mutex::default(), Mutex::default());
        Ok(Self { options, client, secret, breaker, health })
    }

    /// Answers orders until no more can come. Guests come before what is asked ahead of them, and projects take turns.
    /// An order is not sent once its guest has given up. What is asked ahead for an instance waits for its first answer:
    /// until then, each request has Nova read the instance from its databases and from Neutron.
    pub(super) async fn serve(
        self: Arc<Self>,
        mut orders: UnboundedReceiver<UpstreamOrder>,
        wakes: UnboundedSender<Vec<Slot>>,
    ) {
        // The number of orders is limited where they are made, and tenants share it there.
        let queue = || FairQueue::<UpstreamOrder>::new(ORDERS_WAITING, ORDERS_WAITING);
        let (mut asked, mut ahead) = (queue(), queue());
        let mut held: HashMap<String, Vec<UpstreamOrder>> = HashMap::new();
        let mut requests = JoinSet::new();
        let mut probes = interval(PROBES_EVERY);
        probes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while requests.len() < REQUESTS {
                let may_ask_ahead = requests.len() < REQUESTS_AHEAD;
                let next = asked.pop().or_else(|| may_ask_ahead.then(|| ahead.pop()).flatten());
                let Some((_, order)) = next else { break };
                let Some(order) = order.if_awaited(unix_now()) else { continue };
                let (client, wakes) = (Arc::clone(&self), wakes.clone());
                requests.spawn(async move {
                    let ahead_of = order.is_ahead().then(|| order.instance().to_owned());
                    // Without a receiver the agent is ending.
                    _ = wakes.send(client.fetch(order).await);
                    ahead_of
                });
            }
            tokio::select! {
                order = orders.recv() => match order {
                    Some(order) if order.is_ahead() => match held.entry(order.instance().to_owned()) {
                        Entry::Occupied(mut others) => others.get_mut().push(order),
                        Entry::Vacant(first) => {
                            first.insert(Vec::new());
                            enqueue(&mut ahead, order);
                        }
                    },
                    Some(order) => enqueue(&mut asked, order),
                    None => return,
                },
                Some(done) = requests.join_next(), if !requests.is_empty() => {
                    let others: Vec<_> = match done {
                        Ok(instance) => instance.and_then(|of| held.remove(&of)).unwrap_or_default(),
                        // After a panic nobody knows whose request it was.
                        Err(_) => std::mem::take(&mut held).into_values().flatten().collect(),
                    };
                    others.into_iter().for_each(|order| enqueue(&mut ahead, order));
                }
                // The first comes at once.
                _ = probes.tick(), if requests.is_empty() && !self.health.is_nova_well() => {
                    let client = Arc::clone(&self);
                    requests.spawn(async move {
                        _ = client.probe().await;
                        None
                    });
                }
            }
        }
    }

    /// Fetches the answer to an order. Returns the slots to wake.
    async fn fetch(&self, order: UpstreamOrder) -> Vec<Slot> {
        // What cannot be a request is not sent, and says nothing of Nova.
        let Some(request) = self.request_for(&order) else {
            return order.answered(plain(StatusCode(400)), unix_now());
        };
        let until = Instant::now() + AWAY_FOR;
        loop {
            let pause = self.breaker().wait(Instant::now());
            if let Some(pause) = pause {
                if pause > until {
                    return order.failed(unix_now());
                }
                sleep_until(pause).await;
                continue;
            }
            match self.signed(order.instance(), &request).await {
                Ok(answer) => {
                    self.breaker().close();
                    return order.answered(answer, unix_now());
                }
                Err(error) => {
                    self.breaker().fail(Instant::now());
                    if !(order.is_safe() || error.is_unsent) || Instant::now() >= until {
                        return order.failed(unix_now());
                    }
                }
            }
        }
    }

    /// The request of an order; `None` if its parts cannot be a request of HTTP.
    fn request_for(&self, order: &UpstreamOrder) -> Option<UnsignedRequest> {
        let asking =
            Asking { instance: order.instance(), project: order.project(), address: order.address() };
        let mut target = utf8_percent_encode(order.path(), PATH).to_string();
        if !order.query().is_empty() {
            target = format!("{target}?{}", utf8_percent_encode(order.query(), NOT_OF_QUERY));
        }
        self.request(asking, (order.method().as_str(), &target, order.body().clone()))
    }

    fn request(
        &self,
        asking: Asking<'_>,
        (method, target, body): (&str, &str, Bytes),
    ) -> Option<UnsignedRequest> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{target}", self.options.url.trim_end_matches('/')))
            .header("X-Instance-ID", asking.instance)
            .header("X-Tenant-ID", asking.project)
            .header("X-Forwarded-For", asking.address.to_string())
            .body(Full::new(body));
        request.ok()
    }

    /// A request for an instance that does not exist.
    fn trial(&self) -> Result<UnsignedRequest, NovaError> {
        let request = self.request(UNKNOWN, ("GET", "/openstack", Bytes::new()));
        request.ok_or_else(|| unsent(format!("{} makes no request", self.options.url)))
    }

    /// Asks for an instance that does not exist: 404 says that the signature is good.
    pub(super) async fn probe(&self) -> Result<StatusCode, NovaError> {
        let answer = self.signed(NOBODY, &self.trial()?).await;
        match answer.is_ok() {
            true => self.breaker().close(),
            false => self.breaker().fail(Instant::now()),
        }
        answer.map(|answer| answer.status)
    }

    /// Asks for the same with the signature of something else: Nova answers 403, and a server that is not Nova as before.
    pub(super) async fn probe_with_wrong_signature(&self) -> Result<StatusCode, NovaError> {
        self.exchange("nobody", self.trial()?).await.map(|answer| answer.status)
    }

    /// Asks for an instance. Somebody may have changed the secret on both sides: if Nova forbids a request, which then
    /// has changed nothing, it is signed by another secret if there is one.
    async fn signed(&self, instance: &str, request: &UnsignedRequest) -> Result<UpstreamAnswer, NovaError> {
        let answer = self.reported(instance, request.clone()).await?;
        if answer.status == StatusCode(403) && self.is_secret_new() {
            return self.reported(instance, request.clone()).await;
        }
        Ok(answer)
    }

    /// Asks once, and notes how that went.
    async fn reported(&self, instance: &str, request: UnsignedRequest) -> Result<UpstreamAnswer, NovaError> {
        let answer = timeout(ANSWERS_WITHIN, self.exchange(instance, request)).await;
        let late = || NovaError {
            reason: format!("no answer within {} s", ANSWERS_WITHIN.as_secs()),
            is_unsent: false,
        };
        let answer = answer.unwrap_or_else(|_| Err(late()));
        match &answer {
            Ok(answer) => self.health.on_nova_answer(answer.status),
            Err(error) => self.health.on_failure(OpenstackPeer::Nova, error.reason.clone()),
        }
        answer
    }

    /// Sends a request with the signature of `signed`: the instance, or for a trial something else.
    async fn exchange(
        &self,
        signed: &str,
        mut request: UnsignedRequest,
    ) -> Result<UpstreamAnswer, NovaError> {
        let secret = self.known_secret().map_err(|error| unsent(error.to_string()))?;
        let signature = HeaderValue::try_from(secret.sign(signed)).expect("hex digits");
        request.headers_mut().insert("x-instance-id-signature", signature);
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| NovaError { is_unsent: error.is_connect(), reason: with_causes(&error) })?;
        let (head, body) = response.into_parts();
        let status = match head.status.as_u16() {
            status @ (200 | 400 | 403 | 404 | 409 | 502 | 503 | 504) => StatusCode(status),
            // As Neutron's agents have it.
            _ => StatusCode(500),
        };
        let body = Limited::new(body, ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| NovaError { reason: error.to_string(), is_unsent: false })?;
        let content_type = head.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        Ok(UpstreamAnswer { status, content_type: content_type.map(str::to_owned), body: body.to_bytes() })
    }

    fn breaker(&self) -> MutexGuard<'_, CircuitBreaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn secret(&self) -> MutexGuard<'_, Option<NovaSecret>> {
        self.secret.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_secret(&self) -> Result<NovaSecret, FeedError> {
        let mut known = self.secret();
        match &*known {
            Some(secret) => Ok(secret.clone()),
            None => Ok(known.insert(NovaSecret::read(&self.options.secret)?).clone()),
        }
    }

    /// Reads the secret again; true if it is another one.
    fn is_secret_new(&self) -> bool {
        let mut known = self.secret();
        let now = NovaSecret::read(&self.options.secret).ok();
        let is_new = now.is_some() && now != *known;
        if is_new {
            *known = now;
        }
        is_new
    }
}

/// Puts an order behind those of its project.
fn enqueue(queue: &mut FairQueue<UpstreamOrder>, order: UpstreamOrder) {
    let tenant = order.tenant().clone();
    // A queue has room for as many orders as there can be.
    _ = queue.push(&tenant, order);
}

fn unsent(reason: String) -> NovaError {
    NovaError { reason, is_unsent: true }
}

fn plain(status: StatusCode) -> UpstreamAnswer {
    UpstreamAnswer { status, content_type: None, body: Bytes::new() }
}

fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Keeps all but single requests from a service that is away.
#[derive(Debug, Default)]
struct CircuitBreaker {
    failures: u32,
    /// When the next request may try.
    next: Option<Instant>,
}

impl CircuitBreaker {
    /// When a request may go; `None` for now. While the service is away, whoever may go has the next pause to itself.
    fn wait(&mut self, now: Instant) -> Option<Instant> {
        match self.next {
            Some(next) if now < next => Some(next),
            Some(_) => {
                self.next = Some(now + self.pause());
                None
            }
            None => None,
        }
    }

    fn fail(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        if self.failures >= FAILURES {
            self.next = Some(now + self.pause());
        }
    }

    fn close(&mut self) {
        *self = Self::default();
    }

    fn pause(&self) -> Duration {
        let (least, most) = PAUSES;
        let doublings = self.failures.saturating_sub(FAILURES).min(8);
        (least * 2_u32.pow(doublings)).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::{CircuitBreaker, FAILURES, NovaClient, NovaSecret, PAUSES, REQUESTS, unix_now};
    use crate::openstack::NovaOptions;
    use crate::openstack::health::{OpenstackHealth, OpenstackPeer};
    use metadata_content::http::{Headers, Method, Request, RequestTarget, StatusCode};
    use metadata_content::record::{Record, RecordLimits};
    use metadata_content::upstream::{ANSWERED_WITHIN, ORDERS_PER_VM, Upstream, UpstreamOutcome, VmUpstream};
    use serde_json::json;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::mpsc::unbounded_channel;
    use tokio::time::{Instant, timeout};

    #[test]
    fn the_signature_is_that_of_neutron() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("secret");
        std::fs::write(&path, "s3cr3t\n").expect("written");
        let secret = NovaSecret::read(&path).expect("a secret");
        // hmac.new(b"s3cr3t", b"7c0f…", hashlib.sha256).hexdigest()
        assert_eq!(secret.sign("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"), SIGNATURE);
        for (text, words) in [("\n", "an empty file"), (&*"x".repeat(5_000), "too long")] {
            std::fs::write(&path, text).expect("written");
            let error = NovaSecret::read(&path).err().expect("no secret").to_string();
            assert!(error.contains(words) && error.contains("metadata_proxy_shared_secret"), "{error}");
        }
    }

    /// An empty answer, after which the next request comes by another connection.
    const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    const SIGNATURE: &str = "989c9e898c0357c75e741a3efe07192b7e02e85f31275c23b4e5b1185d914f6c";

    #[test]
    fn an_url_has_a_host_and_no_path() {
        let client = |url: &str| {
            let options = NovaOptions { url: url.to_owned(), ..NovaOptions::default() };
            NovaClient::new(options, Arc::new(OpenstackHealth::new())).map(drop)
        };
        for good in ["http://10.0.0.10:8775", "http://[fd00::1]:8775/"] {
            client(good).expect(good);
        }
        for bad in ["10.0.0.10:8775", "ftp://a", "http://", "http://a/b", "http://a?b"] {
            let error = client(bad).expect_err(bad).to_string();
            assert!(error.contains("openstack.nova.url"), "{error}");
        }
    }

    #[test]
    fn only_one_request_at_a_time_tries_whether_a_service_is_back() {
        let (mut breaker, start) = (CircuitBreaker::default(), Instant::now());
        for _ in 0..FAILURES {
            assert_eq!(breaker.wait(start), None);
            breaker.fail(start);
        }
        let next = start + PAUSES.0;
        assert_eq!(breaker.wait(start), Some(next));
        assert_eq!((breaker.wait(next), breaker.wait(next)), (None, Some(next + PAUSES.0)));
        for _ in 0..100 {
            breaker.fail(next);
        }
        assert_eq!(breaker.wait(next), Some(next + PAUSES.1));
        breaker.close();
        assert_eq!(breaker.wait(start), None);
    }

    #[tokio::test]
    async fn what_is_asked_ahead_for_an_instance_waits_for_its_first_answer() {
        let (room, listener) = (tempfile::tempdir().expect("a directory"), listener().await);
        let client = client(room.path(), &listener);
        // So that nobody asks whether it is there.
        client.health.on_nova_answer(StatusCode(200));
        let (sender, orders) = unbounded_channel();
        let (wakes, _woken) = unbounded_channel();
        tokio::spawn(client.serve(orders, wakes));
        let upstream = Upstream::new(&["/1", "/2", "/3"], move |order| sender.send(order).is_ok());
        let _vm = vm(&upstream, "p1");

        let (mut first, _) = listener.accept().await.expect("a request");
        assert_eq!(asked(&mut first).await, "/1");
        let early = timeout(Duration::from_millis(100), listener.accept()).await;
        assert!(early.is_err(), "another one before the first is answered");
        first.write_all(OK).await.expect("sent");
        let mut others = Vec::new();
        for _ in 0..2 {
            let (mut other, _) = listener.accept().await.expect("a request");
            others.push((asked(&mut other).await, other));
        }
        others.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(others.iter().map(|(path, _)| &**path).collect::<Vec<_>>(), ["/2", "/3"], "at once");
    }

    async fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.expect("a socket")
    }

    /// A client of the Nova that listens there. The directory is for its secret.
    fn client(room: &Path, nova: &TcpListener) -> Arc<NovaClient> {
        let secret = room.join("secret");
        std::fs::write(&secret, "s3cr3t").expect("written");
        let url = format!("http://{}", nova.local_addr().expect("an address"));
        let options = NovaOptions { url, secret, ..NovaOptions::default() };
        Arc::new(NovaClient::new(options, Arc::new(OpenstackHealth::new())).expect("a client"))
    }

    /// A VM whose guest asks through slot 0.
    fn vm(upstream: &Upstream, project: &str) -> Arc<VmUpstream> {
        let record = json!({
            "schema": "vmrecord/1", "generation": 1, "hostname": {"short": "a"},
            "vm": {"uuid": "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", "name": "a", "namespace": project,
                   "project": {"id": project, "number": 1, "account": "000000000000"}},
            "placement": {"region": "local", "zone": "local-a"},
            "network": {"nics": [{"id": "n0", "name": "eth0", "mac": "52:54:00:12:34:56",
                                  "addresses": [{"method": "static", "address": "10.0.0.5/24"}]}]},
        });
        let parsed = Record::parse_within(&RecordLimits::DEFAULT, "a.json", &record.to_string());
        let vm = Arc::new(VmUpstream::new(upstream, &parsed.expect("a record").0));
        vm.set_nic(0, "52:54:00:12:34:56".parse().expect("a MAC"), 0);
        vm
    }

    /// What its guest gets for a request, or for one that is parked until the answer to this order is there.
    fn ask(vm: &Arc<VmUpstream>, (method, query): (Method, &str), parked: Option<u64>) -> UpstreamOutcome {
        ask_at(unix_now(), vm, (method, query), parked)
    }

    fn ask_at(
        now: u64,
        vm: &Arc<VmUpstream>,
        (method, query): (Method, &str),
        parked: Option<u64>,
    ) -> UpstreamOutcome {
        let target = RequestTarget { path: "/openstack", query };
        let request = Request { method, target, headers: Headers::new(&[]), body: &[] };
        vm.answer(0, &request, now, parked)
    }

    /// The next request to a Nova.
    async fn next(listener: &TcpListener) -> (String, TcpStream) {
        let accepted = timeout(Duration::from_secs(5), listener.accept()).await;
        let (mut stream, _) = accepted.expect("a request in time").expect("a connection");
        (asked(&mut stream).await, stream)
    }

    #[tokio::test]
    async fn projects_take_turns_for_the_requests_that_nova_has_at_once() {
        let (room, listener) = (tempfile::tempdir().expect("a directory"), listener().await);
        let client = client(room.path(), &listener);
        client.health.on_nova_answer(StatusCode(200));
        let (sender, orders) = unbounded_channel();
        let (wakes, _woken) = unbounded_channel();
        tokio::spawn(client.serve(orders, wakes));
        let upstream = Upstream::new(&[], move |order| sender.send(order).is_ok());
        let large: Vec<_> = (0..2 * REQUESTS / ORDERS_PER_VM).map(|_| vm(&upstream, "large")).collect();
        for vm in &large {
            for n in 0..ORDERS_PER_VM {
                let outcome = ask(vm, (Method::Get, &format!("large={n}")), None);
                assert!(matches!(outcome, UpstreamOutcome::Awaited(_)), "{outcome:?}");
            }
        }
        let small = vm(&upstream, "small");
        assert!(matches!(ask(&small, (Method::Get, "small"), None), UpstreamOutcome::Awaited(_)));
        let mut unanswered = Vec::new();
        for _ in 0..REQUESTS {
            unanswered.push(next(&listener).await.1);
        }
        // The project that has filled them is next, and then the other one.
        let mut asked = Vec::new();
        for mut stream in unanswered.drain(..2) {
            stream.write_all(OK).await.expect("sent");
            // A connection that ends would be asked for again.
            asked.push(next(&listener).await);
        }
        let paths: Vec<_> = asked.iter().map(|(path, _)| path).collect();
        assert!(paths.iter().any(|path| *path == "/openstack?small"), "{paths:?}");
    }

    #[tokio::test]
    async fn an_order_that_no_request_can_wait_for_any_more_is_not_asked() {
        let (room, listener) = (tempfile::tempdir().expect("a directory"), listener().await);
        let client = client(room.path(), &listener);
        client.health.on_nova_answer(StatusCode(200));
        let (sender, orders) = unbounded_channel();
        let (wakes, _woken) = unbounded_channel();
        tokio::spawn(client.serve(orders, wakes));
        let vm = vm(&Upstream::new(&[], move |order| sender.send(order).is_ok()), "p1");
        let long_ago = unix_now() - 2 * ANSWERED_WITHIN.as_secs();
        for (now, query) in [(long_ago, "old"), (unix_now(), "new")] {
            let outcome = ask_at(now, &vm, (Method::Get, query), None);
            assert!(matches!(outcome, UpstreamOutcome::Awaited(_)), "{query}: {outcome:?}");
        }
        let (path, _unanswered) = next(&listener).await;
        assert_eq!(path, "/openstack?new");
        let other = timeout(Duration::from_millis(100), listener.accept()).await;
        assert!(other.is_err(), "its guest had 503 long ago");
        assert!(matches!(ask(&vm, (Method::Get, "old"), None), UpstreamOutcome::Awaited(_)));
        assert_eq!(next(&listener).await.0, "/openstack?old", "the guest asks again");
    }

    #[tokio::test]
    async fn nova_gets_a_query_byte_for_byte_but_for_what_no_uri_has() {
        let (room, listener) = (tempfile::tempdir().expect("a directory"), listener().await);
        let client = client(room.path(), &listener);
        client.health.on_nova_answer(StatusCode(200));
        let (sender, orders) = unbounded_channel();
        let (wakes, _woken) = unbounded_channel();
        tokio::spawn(client.serve(orders, wakes));
        let vm = vm(&Upstream::new(&[], move |order| sender.send(order).is_ok()), "p1");
        for (query, expected) in [
            ("a=%20b&%C3%A4;c=?/:@", "a=%20b&%C3%A4;c=?/:@"),
            (r"100%&a+b='[{|}]'\^`~!$(*),.-_", r"100%&a+b='[{|}]'\^`~!$(*),.-_"),
            (r#"a="<b>""#, "a=%22%3Cb%3E%22"),
            ("a#b", "a%23b"),
        ] {
            let outcome = ask(&vm, (Method::Get, query), None);
            assert!(matches!(outcome, UpstreamOutcome::Awaited(_)), "{query}: {outcome:?}");
            let (path, mut stream) = next(&listener).await;
            assert_eq!(path, format!("/openstack?{expected}"));
            stream.write_all(OK).await.expect("sent");
        }
    }

    #[tokio::test]
    async fn what_cannot_be_a_request_is_refused_and_says_nothing_of_nova() {
        let (room, listener) = (tempfile::tempdir().expect("a directory"), listener().await);
        let client = client(room.path(), &listener);
        // It is away.
        drop(listener);
        client.health.on_failure(OpenstackPeer::Nova, "no".into());
        (0..FAILURES).for_each(|_| client.breaker().fail(Instant::now()));
        let (sender, mut orders) = unbounded_channel();
        let vm = vm(&Upstream::new(&[], move |order| sender.send(order).is_ok()), "p1");
        let outcome = ask(&vm, (Method::Other, ""), None);
        let UpstreamOutcome::Awaited(number) = outcome else { panic!("{outcome:?}") };
        let woken = client.fetch(orders.try_recv().expect("an order")).await;
        let outcome = ask(&vm, (Method::Other, ""), Some(number));
        let UpstreamOutcome::Ready(response) = outcome else { panic!("{outcome:?}") };
        assert_eq!((response.status(), woken), (StatusCode(400), vec![0]));
        assert!(!client.health.is_nova_well(), "nothing was sent");
        assert_eq!(client.breaker().failures, FAILURES, "nothing was sent");
    }

    /// The path of the request on a connection.
    async fn asked(stream: &mut TcpStream) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("a byte"));
        }
        String::from_utf8_lossy(&head).split(' ').nth(1).unwrap_or_default().to_owned()
    }
}
