//! Identity tokens: starts the signer, passes orders to it, and publishes its keys.
//!
//! ```text
//!  worker ── Order ──► run() ── Request ──► signer (a process of its own, with the keys)
//!         ◄── wake ──  loop  ◄── Event ──  run()  ◄── Reply ──
//! ```
//!
//! The signer must start before the sandbox, which forbids to start processes. So the agent cannot start another one:
//! if the signer ends, guests get 503 until the agent is restarted, and log, status and metrics say so.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use metadata_common::maps::Slot;
use metadata_content::identity::{IssuedToken, Issuer, Order, SigningJob};
use metadata_signer::wire::{
    PACKET_BYTES, PublishedKeys, SignOperation, decode, encode, receive_packet, send_packet,
};
use metadata_signer::{Algorithm, CertificateFiles, Setup, SignRequest, SignerReply};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::absolute;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::UnixDatagram;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tracing::{error, warn};

use crate::config::{IdentityConfig, Sandbox};
use crate::logging;

/// Maximum number of requests that the signer has at once. Their replies fit in the socket, so it never waits for the
/// agent.
pub const IN_FLIGHT: usize = 32;

/// The agent's side of a signer that has started.
#[derive(Debug)]
pub struct SigningClient {
    socket: OwnedFd,
    issuer: Issuer,
    orders: UnboundedReceiver<Box<Order>>,
    publication: Arc<Publication>,
}

/// The end of an order.
#[derive(Debug)]
pub struct SigningEvent {
    /// The slot whose request waits.
    pub slot: Slot,
    /// What was signed; `None` if nothing was.
    pub signed: Option<SignedItem>,
}

/// A token or document that was signed, without its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedItem {
    /// What it is ([`Order::kind`]).
    pub kind: &'static str,
    /// Owner of the VM.
    pub vm: String,
    /// Name of the VM.
    pub name: String,
    /// MAC of the NIC that asked.
    pub mac: Option<String>,
    /// `jti`; `None` for a document.
    pub token: Option<String>,
    /// `kid`, or the thumbprint of the certificate that signed a document.
    pub key: String,
    /// The VM's subject.
    pub subject: String,
    /// `aud`; `None` for a document.
    pub audience: Option<String>,
    /// Time of the signature, in Unix seconds.
    pub issued: u64,
    /// End of its validity, in Unix seconds.
    pub expires: u64,
}

impl SignedItem {
    fn of(order: &Order, token: Option<String>, key: String, issued: u64, expires: u64) -> Self {
        let (vm, name) = order.vm();
        Self {
            kind: order.kind(),
            vm: vm.to_owned(),
            name: name.to_owned(),
            mac: order.mac().map(|mac| mac.to_string()),
            token,
            key,
            subject: order.subject().to_owned(),
            audience: order.audience().map(str::to_owned),
            issued,
            expires,
        }
    }
}

impl SigningClient {
    fn new(socket: OwnedFd, trust_domain: Option<&str>, publication: Arc<Publication>) -> Self {
        // The issuer bounds the number of orders.
        let (sender, orders) = unbounded_channel();
        let issuer = Issuer::new(trust_domain, move |order| sender.send(order).is_ok());
        issuer.set_signs_documents(publication.has_certificate());
        Self { socket, issuer, orders, publication }
    }

    /// Returns the issuer, which the VMs' own issuers use.
    #[must_use]
    pub fn issuer(&self) -> &Issuer {
        &self.issuer
    }

    /// Returns the public keys and their state.
    #[must_use]
    pub fn publication(&self) -> &Arc<Publication> {
        &self.publication
    }

    /// Passes orders to the signer until it ends, then fails those that are left and all later ones.
    ///
    /// # Errors
    /// If the socket cannot be used. The agent goes on without tokens if the signer ends.
    pub async fn run(self, events: UnboundedSender<SigningEvent>) -> anyhow::Result<()> {
        let Self { socket, orders, publication, issuer } = self;
        // Only its name says datagram: its methods send and receive packets.
        let socket = UnixDatagram::from_std(socket.into())?;
        let mut dispatcher =
            Dispatcher { waiting: HashMap::new(), orders, events, publication, issuer, id: 0 };
        let reason = dispatcher.serve(&socket).await;
        let reason =
            reason.err().map_or_else(|| "it closed its socket".to_owned(), |error| error.to_string());
        error!(
            "the signer of identity tokens has ended ({reason}): guests get none until the agent is restarted"
        );
        dispatcher.publication.set_ended();
        dispatcher.close();
        Ok(())
    }
}

/// Returns the signer's operation for the work of an order.
fn operation(work: SigningJob) -> SignOperation {
    match work {
        SigningJob::Jwt(claims) => SignOperation::Jwt(claims),
        SigningJob::Signature(document) => SignOperation::Signature(document),
        SigningJob::Envelope(document) => SignOperation::Envelope(document),
        SigningJob::Detached(document) => SignOperation::Detached(document),
        SigningJob::Attested(statement) => SignOperation::Attested(statement),
    }
}

/// Passes orders on and replies back.
struct Dispatcher {
    /// Orders that the signer has, by the number of the request.
    waiting: HashMap<u64, Box<Order>>,
    orders: UnboundedReceiver<Box<Order>>,
    events: UnboundedSender<SigningEvent>,
    publication: Arc<Publication>,
    issuer: Issuer,
    id: u64,
}

impl Dispatcher {
    async fn serve(&mut self, socket: &UnixDatagram) -> io::Result<()> {
        let mut buffer = vec![0; PACKET_BYTES];
        loop {
            let has_room = self.waiting.len() < IN_FLIGHT;
            tokio::select! {
                length = socket.recv(&mut buffer) => match length? {
                    0 => return Ok(()),
                    length => self.on_reply(decode(&buffer[..length])?),
                },
                Some(order) = self.orders.recv(), if has_room => self.pass_on(socket, order).await?,
            }
        }
    }

    async fn pass_on(&mut self, socket: &UnixDatagram, order: Box<Order>) -> io::Result<()> {
        self.id += 1;
        let packet = encode(&SignRequest { id: self.id, operation: operation(order.work()) })?;
        self.waiting.insert(self.id, order);
        socket.send(&packet).await?;
        Ok(())
    }

    fn on_reply(&mut self, reply: SignerReply) {
        match reply {
            SignerReply::Keys(published) => {
                if self.publication.set(published) {
                    self.issuer.revoke();
                }
            }
            SignerReply::Token { id, token, jti, kid, issued, expires } => {
                self.deliver(id, IssuedToken { text: token.into(), issued, expires }, Some(jti), kid);
            }
            SignerReply::Document { id, text, certificate, issued, expires } => {
                self.deliver(id, IssuedToken { text: text.into(), issued, expires }, None, certificate);
            }
            SignerReply::Refused { id, reason } => {
                let Some(order) = self.waiting.remove(&id) else { return };
                if self.publication.is_first_refusal() {
                    warn!("an identity token is not signed: {reason}");
                }
                self.fail(order);
            }
            SignerReply::Failed { reason, is_denied: _ } => {
                warn!("the signer of identity tokens fails: {reason}")
            }
        }
    }

    /// Hands a token or document over to the VM that ordered it.
    fn deliver(&mut self, id: u64, token: IssuedToken, jti: Option<String>, key: String) {
        let Some(order) = self.waiting.remove(&id) else { return };
        let signed = SignedItem::of(&order, jti, key, token.issued, token.expires);
        let slot = order.slot();
        order.signed(token);
        self.send(slot, Some(signed));
    }

    fn fail(&self, order: Box<Order>) {
        let slot = order.slot();
        drop(order);
        self.send(slot, None);
    }

    /// Wakes the request. Without a control loop the agent is ending.
    fn send(&self, slot: Slot, signed: Option<SignedItem>) {
        let _ = self.events.send(SigningEvent { slot, signed });
    }

    fn close(&mut self) {
        self.orders.close();
        for (_, order) in std::mem::take(&mut self.waiting) {
            self.fail(order);
        }
        while let Ok(order) = self.orders.try_recv() {
            self.fail(order);
        }
    }
}

// Starts the signer as a process of its own.

/// The program of this process, even after an upgrade has replaced its file.
const SELF: &str = "/proc/self/exe";
/// How long the signer may take to read its keys.
const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// Why the signer does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The process or its socket cannot be made.
    #[error("cannot start the signer of identity tokens: {0}")]
    Process(#[from] io::Error),
    /// The signer has no key.
    #[error("the signer of identity tokens does not start: {0}")]
    Keys(String),
    /// The signer may not read its keys or its certificate.
    #[error("the signer of identity tokens does not start: {0}")]
    Denied(String),
    /// The signer says nothing.
    #[error("expected the keys of the signer in {} s, found none; read its lines in the log", STARTS_WITHIN.as_secs())]
    Silent,
}

/// Returns what the signer needs, with absolute paths: it does not run in the agent's directory.
fn setup(config: &IdentityConfig) -> io::Result<Setup> {
    let certificate = config.certificate.as_ref().map(|CertificateFiles { chain, key }| {
        Ok::<_, io::Error>(CertificateFiles { chain: absolute(chain)?, key: absolute(key)? })
    });
    Ok(Setup {
        issuer: config.issuer.clone(),
        keys: absolute(&config.keys)?,
        algorithm: config.algorithm,
        lifetime: config.lifetime_seconds,
        publish_for: u64::from(config.publish_hours) * 3_600,
        rotate_after: (config.rotate_days > 0).then(|| u64::from(config.rotate_days) * 86_400),
        certificate: certificate.transpose()?,
    })
}

/// Starts the signer and waits for its keys. Call it before the sandbox, which forbids to start processes, and on the
/// thread that lives as long as the agent: the signer ends with that.
///
/// # Errors
/// [`StartError`].
pub fn start(config: &IdentityConfig, sandbox: Sandbox) -> Result<SigningClient, StartError> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.map_err(io::Error::from)?;
    let mut command = Command::new(SELF);
    command.arg0("xdp-imds").args(["identity", "signer", "--sandbox", sandbox.name()]).env_clear();
    command.envs(logging::environment());
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).current_dir("/");
    command.spawn()?;
    // Otherwise this process would hold the signer's end open.
    drop(command);
    send_packet(&ours, &setup(config)?)?;
    let publication = Arc::new(Publication::new(config));
    match first(&ours)? {
        Some(SignerReply::Keys(published)) => _ = publication.set(published),
        Some(SignerReply::Failed { reason, is_denied: true }) => return Err(StartError::Denied(reason)),
        Some(SignerReply::Failed { reason, is_denied: false }) => return Err(StartError::Keys(reason)),
        _ => return Err(StartError::Silent),
    }
    fcntl_setfl(&ours, OFlags::NONBLOCK).map_err(io::Error::from)?;
    Ok(SigningClient::new(ours, config.trust_domain.as_deref(), publication))
}

/// Waits for the first packet; `None` if none comes.
fn first(socket: &OwnedFd) -> io::Result<Option<SignerReply>> {
    let limit = Timespec::try_from(STARTS_WITHIN).map_err(|_| io::ErrorKind::InvalidInput)?;
    let ready = poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)], Some(&limit))?;
    if ready == 0 {
        return Ok(None);
    }
    receive_packet(socket, &mut vec![0; PACKET_BYTES])
}

// The public keys, as OpenID Connect Discovery and JWKS.

/// How long verifiers may keep the keys: a new key is published much longer before it signs.
const CACHE: &str = "public, max-age=300";
const JSON: &str = "application/json";
/// The claims of tokens: those of each, of the node's own, of GCE's and of Azure's.
const CLAIMS: [&str; 13] = [
    "aud",
    "exp",
    "iat",
    "iss",
    "jti",
    "nbf",
    "sub",
    "vm",
    "azp",
    "email",
    "email_verified",
    "google",
    "appid",
];
/// Media type of a JWK Set (RFC 7517 section 8.5).
const JWKS: &str = "application/jwk-set+json";

/// The public keys, and the state of the signer.
#[derive(Debug)]
pub struct Publication {
    issuer: String,
    jwks_uri: String,
    algorithm: Algorithm,
    published: Mutex<PublishedKeys>,
    ended: AtomicBool,
    refused: AtomicBool,
}

/// The state of the signer, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignerReport {
    /// `iss` of tokens.
    pub issuer: String,
    /// The algorithm.
    pub algorithm: &'static str,
    /// Number of keys published.
    pub keys: u64,
    /// The `kid` of the key that signs; `None` without a key.
    pub signs: Option<String>,
    /// Time when the operator's certificate expires, in Unix seconds; `None` without one.
    pub certificate_expires: Option<u64>,
    /// The signer has ended.
    pub ended: bool,
}

impl Publication {
    /// Creates the publication of an issuer without keys.
    #[must_use]
    pub fn new(config: &IdentityConfig) -> Self {
        Self {
            issuer: config.issuer.clone(),
            jwks_uri: config.jwks_uri(),
            algorithm: config.algorithm,
            published: Mutex::default(),
            ended: AtomicBool::new(false),
            refused: AtomicBool::new(false),
        }
    }

    fn published(&self) -> MutexGuard<'_, PublishedKeys> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the keys. Returns true if one that was published is no longer.
    pub fn set(&self, published: PublishedKeys) -> bool {
        self.refused.store(false, Ordering::Relaxed);
        let mut own = self.published();
        let is_there = |key: &Value| has_key(&published.jwks, key);
        let is_one_gone = keys_of(&own.jwks).any(|key| !is_there(key));
        *own = published;
        is_one_gone
    }

    /// Returns whether the signer has a certificate, with which it signs documents.
    fn has_certificate(&self) -> bool {
        self.published().certificate.is_some()
    }

    /// Records that the signer has ended.
    pub fn set_ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Returns true once between changes of the keys, so that refusals do not fill the log.
    fn is_first_refusal(&self) -> bool {
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// Returns the state.
    #[must_use]
    pub fn report(&self) -> SignerReport {
        let published = self.published();
        SignerReport {
            issuer: self.issuer.clone(),
            algorithm: self.algorithm.name(),
            keys: published.count as u64,
            signs: published.signs.clone(),
            certificate_expires: published.certificate.as_ref().map(|certificate| certificate.until),
            ended: self.ended.load(Ordering::Relaxed),
        }
    }

    /// Returns the metadata of the issuer.
    #[must_use]
    pub fn configuration(&self) -> Value {
        configuration(&self.issuer, &self.jwks_uri, self.algorithm)
    }
}

fn keys_of(jwks: &Value) -> impl Iterator<Item = &Value> {
    jwks["keys"].as_array().into_iter().flatten()
}

fn has_key(jwks: &Value, key: &Value) -> bool {
    keys_of(jwks).any(|known| known == key)
}

/// Returns the metadata of an issuer (OpenID Connect Discovery 1.0 section 3).
#[must_use]
pub fn configuration(issuer: &str, jwks_uri: &str, algorithm: Algorithm) -> Value {
    json!({
        "issuer": issuer,
        "jwks_uri": jwks_uri,
        "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": [algorithm.name()],
        "claims_supported": CLAIMS,
    })
}

/// Returns the routes of the issuer's documents.
pub fn routes(publication: Arc<Publication>) -> Router {
    Router::new()
        .route("/.well-known/openid-configuration", get(get_configuration))
        .route("/.well-known/jwks.json", get(get_keys))
        .with_state(publication)
}

async fn get_configuration(State(publication): State<Arc<Publication>>) -> impl IntoResponse {
    let head = [(header::CONTENT_TYPE, JSON), (header::CACHE_CONTROL, CACHE)];
    (StatusCode::OK, head, format!("{}\n", publication.configuration()))
}

async fn get_keys(State(publication): State<Arc<Publication>>) -> impl IntoResponse {
    let head = [(header::CONTENT_TYPE, JWKS), (header::CACHE_CONTROL, CACHE)];
    (StatusCode::OK, head, format!("{}\n", publication.published().jwks))
}
