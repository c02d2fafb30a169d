//! `xdp-imds webhook` sets the SMBIOS fields that point guests of new VMs to the metadata service, and gives their pods
//! the volumes that the agent reads. It is for clusters without this project's MutatingAdmissionPolicy.
//!
//! [`review`] decides, and reads and writes admission reviews. The server answers `POST /mutate` (VirtualMachines),
//! `POST /mutate-pods` (pods) and `GET /healthz` over TLS. It reloads its certificate, sends no requests and stores
//! nothing.

pub mod review;

pub use review::{DecideChanges, ReviewError, ReviewResponse, answer};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use metadata_feed::listen::{ConnectionLimit, EvictionGuard, WhenFull};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::{TlsAcceptor, rustls};
use tracing::{debug, info, warn};

use crate::config;
use crate::http_connection::{self, HttpLimits};

/// Maximum size of a review, in bytes. A review holds the object before and after the change, and the API server
/// limits the size of each.
pub const BODY_MAX: usize = 8 << 20;
/// Maximum number of connections. Beyond it, one that waits for its peer makes room: of the peer with the most
/// connections, the one that has waited longest. An API server keeps a few open, and opens another when it finds one
/// closed.
pub const CONNECTIONS: usize = 256;
/// Time limit for a TLS handshake. The API server waits 3 s for its answer (`timeoutSeconds`), so more is of no use.
pub const HANDSHAKE_WITHIN: Duration = Duration::from_secs(3);
/// Time limit from the handshake, or from an answer, to the end of the next request's head.
pub const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// Maximum size of a request's head, in bytes.
pub const HEAD_MAX: usize = 16 << 10;
/// Time limit for the receipt of a body.
pub const BODY_WITHIN: Duration = Duration::from_secs(3);
/// Time after which a connection ends with the answer to its present request.
pub const LIFE: Duration = Duration::from_secs(60);
/// Time limit for the rest of a connection after [`LIFE`].
pub const END_WITHIN: Duration = Duration::from_secs(5);
/// A body up to this size, in bytes, needs no place among [`LARGE_BODIES`].
pub const SMALL_BODY_MAX: usize = 64 << 10;
/// Maximum number of larger bodies that are in memory at the same time; further ones wait within [`BODY_WITHIN`].
pub const LARGE_BODIES: usize = 4;
/// Maximum number of lines that reviews cause in the log within [`LOG_INTERVAL`]: every pod of the cluster may send
/// reviews. The next line says how many were left out.
pub const LOG_LINES: u32 = 50;
/// The interval of [`LOG_LINES`].
pub const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum length of the reason why a review is refused, in bytes: it may repeat what the review has.
pub const REASON_MAX: usize = 200;
/// Interval between two checks of the certificate's files.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time that the server continues after SIGTERM, because the API server still sends reviews for a moment.
const LINGER: Duration = Duration::from_secs(5);

/// The options of `xdp-imds webhook`.
#[derive(Clone, Debug, clap::Args)]
pub struct WebhookArgs {
    /// The address to listen on.
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:8443", value_parser = config::socket_address)]
    pub listen: SocketAddr,
    /// The server's certificate chain, in PEM. The server reads it again when it changes.
    #[arg(long, value_name = "FILE")]
    pub certificate: PathBuf,
    /// The certificate's private key, in PEM. The server reads it again when it changes.
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
}

/// Serves until SIGINT, or until 5 s after SIGTERM.
///
/// # Errors
/// The certificate cannot be used, or the address cannot be bound.
pub fn run(arguments: &WebhookArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut stop = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let server = Server::new(arguments)?;
        let listener = TcpListener::bind(arguments.listen)
            .await
            .with_context(|| format!("cannot listen on {}", arguments.listen))?;
        info!(address = %listener.local_addr()?, "answering admission reviews");
        let stopped = async {
            tokio::select! {
                _ = stop.recv() => sleep(LINGER).await,
                _ = interrupt.recv() => {}
            }
        };
        tokio::select! {
            never = server.serve(listener) => match never {},
            () = stopped => Ok(()),
        }
    })
}

struct Server {
    certificate: Certificate,
    tls: TlsAcceptor,
}

impl Server {
    fn new(arguments: &WebhookArgs) -> anyhow::Result<Self> {
        let provider = Arc::new(ring::default_provider());
        let certificate = Certificate::read(&arguments.certificate, &arguments.key, &provider)?;
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(certificate.current());
        Ok(Self { certificate, tls: TlsAcceptor::from(Arc::new(config)) })
    }

    async fn serve(mut self, listener: TcpListener) -> Infallible {
        let (app, tls) = (app(), self.tls.clone());
        let places = ConnectionLimit { name: "the webhook", most: CONNECTIONS, when_full: WhenFull::Evict };
        let attend = |stream, stay| attend(stream, tls.clone(), app.clone(), stay);
        let mut serving = pin!(metadata_feed::listen::serve(&listener, places, attend));
        let mut check = interval(CHECK_INTERVAL);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failing = false;
        loop {
            tokio::select! {
                never = &mut serving => match never {},
                _ = check.tick() => failing = self.renew(failing),
            }
        }
    }

    /// Reloads a changed certificate. Returns true while the files cannot be used. Only the first of consecutive
    /// failures is logged.
    fn renew(&mut self, failing: bool) -> bool {
        match self.certificate.reload() {
            Ok(false) => failing,
            Ok(true) => {
                info!("loaded a new certificate");
                false
            }
            Err(error) => {
                if !failing {
                    warn!("the previous certificate stays in use: {error}");
                }
                true
            }
        }
    }
}

fn app() -> Router {
    let shared = Arc::new(Shared {
        large: Semaphore::new(LARGE_BODIES),
        log: Mutex::new(LogLimit::new(Instant::now())),
    });
    let by = |judge: DecideChanges| {
        let shared = Arc::clone(&shared);
        post(move |fields: HeaderMap, body: Body| async move { mutate(fields, body, &shared, judge).await })
    };
    Router::new()
        .route("/mutate", by(review::judge_vm))
        .route("/mutate-pods", by(review::judge_pod))
        .route("/healthz", get(async || "ok\n"))
}

/// What all requests share.
struct Shared {
    /// Places for large bodies.
    large: Semaphore,
    log: Mutex<LogLimit>,
}

impl Shared {
    /// Returns whether another line about a review may be written. Writes how many were left out before.
    fn may_log(&self) -> bool {
        let permit = self.log.lock().unwrap_or_else(PoisonError::into_inner).next(Instant::now());
        if let Some(omitted @ 1..) = permit {
            warn!(omitted, "lines about reviews were left out; let only the API server reach the webhook");
        }
        permit.is_some()
    }
}

/// Limits the lines that reviews cause in the log.
struct LogLimit {
    begun: Instant,
    /// Lines since `begun`.
    written: u32,
    /// Lines that were left out since one was last written.
    omitted: u64,
}

impl LogLimit {
    fn new(now: Instant) -> Self {
        Self { begun: now, written: 0, omitted: 0 }
    }

    /// Returns how many lines were left out before, if another one may be written now.
    fn next(&mut self, now: Instant) -> Option<u64> {
        if now.saturating_duration_since(self.begun) >= LOG_INTERVAL {
            (self.begun, self.written) = (now, 0);
        }
        if self.written >= LOG_LINES {
            self.omitted = self.omitted.saturating_add(1);
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.omitted))
    }
}

async fn mutate(fields: HeaderMap, body: Body, shared: &Shared, judge: DecideChanges) -> Response {
    let announced =
        fields.get(header::CONTENT_LENGTH).and_then(|text| text.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > BODY_MAX) {
        return too_large();
    }
    let received = timeout(BODY_WITHIN, async {
        let place = match announced {
            Some(..=SMALL_BODY_MAX) => None,
            _ => shared.large.acquire().await.ok(),
        };
        (to_bytes(body, BODY_MAX).await, place)
    });
    let (body, _place) = match received.await {
        Ok((Ok(body), place)) => (body, place),
        Ok((Err(_), _)) => return too_large(),
        Err(_) => return (StatusCode::REQUEST_TIMEOUT, "the body is late\n").into_response(),
    };
    match answer(&body, judge) {
        Ok(ReviewResponse { body, changed }) => {
            if let Some((vm, paths)) = changed
                && shared.may_log()
            {
                info!(vm, ?paths, "set");
            }
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(error) => {
            let error = error.to_string();
            let reason = review::cut(&error, REASON_MAX);
            if shared.may_log() {
                warn!("a review is refused: {reason}");
            }
            (StatusCode::BAD_REQUEST, format!("{reason}\n")).into_response()
        }
    }
}

fn too_large() -> Response {
    (StatusCode::PAYLOAD_TOO_LARGE, format!("expected at most {BODY_MAX} bytes\n")).into_response()
}

async fn attend(stream: TcpStream, tls: TlsAcceptor, app: Router, stay: EvictionGuard) {
    const LIMITS: HttpLimits =
        HttpLimits { head_within: HEAD_WITHIN, head_max: HEAD_MAX, life: LIFE, end_within: END_WITHIN };
    let peer = stream.peer_addr().ok();
    match timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
        Ok(Ok(stream)) => http_connection::serve(stream, app, LIMITS, stay, |_| {}).await,
        Ok(Err(error)) => debug!(?peer, "no TLS: {error}"),
        Err(_) => debug!(?peer, "no TLS within {HANDSHAKE_WITHIN:?}"),
    }
}

// The server's certificate, which is reloaded while the server runs.

/// Maximum size of either file, in bytes.
const FILE_MAX: u64 = 256 << 10;
/// Maximum number of certificates in a chain.
const CHAIN_MAX: usize = 16;

/// The reason why a certificate cannot be used, without the content of its files.
#[derive(Debug, thiserror::Error)]
pub enum WebhookCertificateError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file is longer than any certificate or key.
    #[error("expected {} to have at most {FILE_MAX} bytes, found {found}", path.display())]
    Long {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
    },
    /// The file has no certificates in PEM, or too many.
    #[error("expected 1 to {CHAIN_MAX} certificates in PEM in {}, found {found}", path.display())]
    Chain {
        /// The file.
        path: PathBuf,
        /// The number of certificates found, or the error of the PEM parser.
        found: String,
    },
    /// The file has no private key in PEM.
    #[error("expected a private key in PEM (PKCS#8, PKCS#1 or SEC1) in {}, found none", path.display())]
    Key {
        /// The file.
        path: PathBuf,
    },
    /// Key and certificate do not match, or their type is not supported.
    #[error("the key does not match the certificate: {0}; both are read again when they change")]
    Mismatch(rustls::Error),
}

/// A certificate and its key, from two files.
#[derive(Debug)]
struct Certificate {
    files: Files,
    seen: Vec<u8>,
    current: Arc<CurrentCertificate>,
}

#[derive(Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
}

/// The certificate and key for new handshakes.
#[derive(Debug)]
struct CurrentCertificate(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl Certificate {
    /// Reads both files.
    fn read(
        certificate: &Path,
        key: &Path,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, WebhookCertificateError> {
        let files =
            Files { certificate: certificate.into(), key: key.into(), provider: Arc::clone(provider) };
        let seen = files.digest()?;
        let current = Arc::new(CurrentCertificate(ArcSwap::from_pointee(files.load()?)));
        Ok(Self { files, seen, current })
    }

    /// The certificate for handshakes: the most recent valid one.
    fn current(&self) -> Arc<CurrentCertificate> {
        Arc::clone(&self.current)
    }

    /// Loads the files if they have changed; returns true if so. Invalid files are reported once, and the previous
    /// certificate stays in use.
    fn reload(&mut self) -> Result<bool, WebhookCertificateError> {
        let digest = self.files.digest()?;
        if digest == self.seen {
            return Ok(false);
        }
        // While kubelet replaces both files, they may not match. The next call then loads the matching pair.
        self.seen = digest;
        self.current.0.store(Arc::new(self.files.load()?));
        Ok(true)
    }
}

impl Files {
    /// A digest of both files' content.
    fn digest(&self) -> Result<Vec<u8>, WebhookCertificateError> {
        use sha2::Digest as _;
        let mut hash = sha2::Sha256::new();
        for path in [&self.certificate, &self.key] {
            let text = read(path)?;
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
        Ok(hash.finalize().to_vec())
    }

    fn load(&self) -> Result<CertifiedKey, WebhookCertificateError> {
        let chain = read(&self.certificate)?;
        let of_chain =
            |found: String| WebhookCertificateError::Chain { path: self.certificate.clone(), found };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&chain)
            .take(CHAIN_MAX + 1)
            .collect::<Result<_, _>>()
            .map_err(|error| of_chain(error.to_string()))?;
        if chain.is_empty() || chain.len() > CHAIN_MAX {
            return Err(of_chain(match chain.len() {
                0 => "none".into(),
                _ => format!("more than {CHAIN_MAX}"),
            }));
        }
        // The parser's error could contain a part of the key.
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| WebhookCertificateError::Key { path: self.key.clone() })?;
        CertifiedKey::from_der(chain, key, &self.provider).map_err(WebhookCertificateError::Mismatch)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, WebhookCertificateError> {
    let error = |source| WebhookCertificateError::Read { path: path.into(), source };
    let found = fs::metadata(path).map_err(error)?.len();
    if found > FILE_MAX {
        return Err(WebhookCertificateError::Long { path: path.into(), found });
    }
    fs::read(path).map_err(error)
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::{HeaderMap, StatusCode};
    use serde_json::json;
    use std::fs;
    use std::sync::{Arc, Mutex};
    use std::time::Instant;
    use tokio::sync::Semaphore;
    use tokio_rustls::rustls::crypto::ring::default_provider;

    use super::{
        Certificate, FILE_MAX, LARGE_BODIES, LOG_INTERVAL, LOG_LINES, LogLimit, REASON_MAX, Shared,
        WebhookCertificateError, mutate, review,
    };

    #[test]
    fn reviews_write_few_lines_and_the_next_says_how_many_were_left_out() {
        let begun = Instant::now();
        let mut limit = LogLimit::new(begun);
        for line in 0..LOG_LINES {
            assert_eq!(limit.next(begun), Some(0), "{line}");
        }
        for line in 0..7 {
            assert_eq!(limit.next(begun + LOG_INTERVAL / 2), None, "{line}");
        }
        assert_eq!(limit.next(begun + LOG_INTERVAL), Some(7));
        assert_eq!(limit.next(begun + LOG_INTERVAL), Some(0));
    }

    #[tokio::test]
    async fn the_reason_of_a_refusal_does_not_repeat_a_whole_review() {
        let log = Mutex::new(LogLimit::new(Instant::now()));
        let shared = Shared { large: Semaphore::new(LARGE_BODIES), log };
        let body = json!({"apiVersion": "v", "kind": "k", "request": "x".repeat(10_000)}).to_string();
        let refused = mutate(HeaderMap::new(), Body::from(body), &shared, review::judge_vm).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        let reason = to_bytes(refused.into_body(), 1 << 20).await.expect("a reason");
        assert!(reason.starts_with(b"expected an AdmissionReview"), "{reason:?}");
        assert!(reason.len() <= REASON_MAX + 1, "{} bytes", reason.len());
    }

    fn pair(name: &str) -> (String, String) {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).expect("a certificate");
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn a_mismatched_pair_leaves_the_previous_certificate_in_use() {
        let room = tempfile::tempdir().expect("a directory");
        let [certificate, key] = ["tls.crt", "tls.key"].map(|name| room.path().join(name));
        let [(first, first_key), (second, second_key)] = ["a.svc", "b.svc"].map(pair);
        fs::write(&certificate, &first).expect("written");
        fs::write(&key, &first_key).expect("written");
        let mut read = Certificate::read(&certificate, &key, &Arc::new(default_provider())).expect("a pair");
        let served = |read: &Certificate| read.current.0.load().cert[0].clone();
        let before = served(&read);
        assert!(!read.reload().expect("the same"), "nothing has changed");
        fs::write(&certificate, &second).expect("written");
        let refused = read.reload().expect_err("the key of another");
        assert!(matches!(refused, WebhookCertificateError::Mismatch(_)), "{refused}");
        assert_eq!(served(&read), before);
        assert!(!read.reload().expect("no second error"), "a failure is reported once");
        fs::write(&key, &second_key).expect("written");
        assert!(read.reload().expect("a pair"), "both are new");
        assert_ne!(served(&read), before);
        fs::remove_file(&key).expect("removed");
        assert!(matches!(read.reload(), Err(WebhookCertificateError::Read { .. })));
    }

    #[test]
    fn invalid_files_are_refused_without_their_content_in_the_error() {
        let room = tempfile::tempdir().expect("a directory");
        let [certificate, key] = ["tls.crt", "tls.key"].map(|name| room.path().join(name));
        let (good, good_key) = pair("a.svc");
        let long = "x".repeat(FILE_MAX as usize + 1);
        let chain = good.repeat(17);
        for (chain, key_text, expected) in [
            ("", &*good_key, "found none"),
            (&chain, &*good_key, "more than 16"),
            (&*good, "hunter2", "private key"),
            (&*long, &*good_key, "at most"),
        ] {
            fs::write(&certificate, chain).expect("written");
            fs::write(&key, key_text).expect("written");
            let provider = Arc::new(default_provider());
            let refused = Certificate::read(&certificate, &key, &provider).expect_err(expected).to_string();
            assert!(refused.contains(expected) && !refused.contains("hunter2"), "{refused}");
        }
    }
}
