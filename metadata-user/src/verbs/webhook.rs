//! `xdp-imds webhook` sets the SMBIOS fields that point guests of new VMs to the metadata service, and gives their pods
//! the volumes that the agent reads. It is for clusters without this project's MutatingAdmissionPolicy.
//!
//! [`rules`] and [`pods`] decide, `review` reads and writes admission reviews, and `certificate` reloads the server's
//! certificate. The server answers `POST /mutate` (VirtualMachines), `POST /mutate-pods` (pods) and `GET /healthz` over
//! TLS. It sends no requests and stores nothing.

mod certificate;
pub mod pods;
mod review;
pub mod rules;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use metadata_feed::listen::{ConnectionLimit, EvictionGuard, WhenFull};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tracing::{debug, info, warn};

use crate::http_connection::{self, HttpLimits};
use certificate::Certificate;
pub use certificate::WebhookCertificateError;
pub use review::{DecideChanges, ReviewError, ReviewResponse, answer};

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
/// Interval between two checks of the certificate's files.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time that the server continues after SIGTERM, because the API server still sends reviews for a moment.
const LINGER: Duration = Duration::from_secs(5);

/// The options of `xdp-imds webhook`.
#[derive(Clone, Debug, clap::Args)]
pub struct WebhookArgs {
    /// The address to listen on.
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:8443")]
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
    let large = Arc::new(Semaphore::new(LARGE_BODIES));
    let by = |judge: DecideChanges| {
        let large = Arc::clone(&large);
        post(move |fields: HeaderMap, body: Body| async move { mutate(fields, body, &large, judge).await })
    };
    Router::new()
        .route("/mutate", by(rules::judge))
        .route("/mutate-pods", by(pods::judge_made))
        .route("/healthz", get(async || "ok\n"))
}

async fn mutate(fields: HeaderMap, body: Body, large: &Semaphore, judge: DecideChanges) -> Response {
    let announced =
        fields.get(header::CONTENT_LENGTH).and_then(|text| text.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > BODY_MAX) {
        return too_large();
    }
    let received = timeout(BODY_WITHIN, async {
        let place = match announced {
            Some(..=SMALL_BODY_MAX) => None,
            _ => large.acquire().await.ok(),
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
            if let Some((vm, paths)) = changed {
                info!(vm, ?paths, "set");
            }
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(error) => {
            warn!("a review is refused: {error}");
            (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response()
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
