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
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metadata_listen::{Places, WhenFull};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tracing::{debug, info, warn};

use certificate::Certificate;
pub use certificate::CertificateError;
pub use review::{Judge, ReviewError, Reviewed, answer};

/// Maximum size of a review, in octets. A review holds the object before and after the change, and the API server
/// limits the size of each.
pub const BODY_MAX: usize = 8 << 20;
/// Maximum number of connections; further ones wait. An API server keeps a few open.
pub const CONNECTIONS: usize = 256;
/// Time limit for a TLS handshake.
pub const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the receipt of a body.
pub const BODY_WITHIN: Duration = Duration::from_secs(5);
/// Maximum lifetime of a connection.
pub const LIFE: Duration = Duration::from_secs(600);
/// Interval between two checks of the certificate's files.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time that the server continues after SIGTERM, because the API server still sends reviews for a moment.
const LINGER: Duration = Duration::from_secs(5);

/// The options of `xdp-imds webhook`.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
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
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
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
    fn new(arguments: &Arguments) -> anyhow::Result<Self> {
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
        let places = Places { name: "the webhook", most: CONNECTIONS, when_full: WhenFull::Wait };
        let attend = |stream, _| attend(stream, tls.clone(), app.clone());
        let mut serving = pin!(metadata_listen::serve(&listener, places, attend));
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
    let vms = async |fields: HeaderMap, body: Body| mutate(fields, body, rules::judge).await;
    let pods = async |fields: HeaderMap, body: Body| mutate(fields, body, pods::judge_made).await;
    Router::new()
        .route("/mutate", post(vms))
        .route("/mutate-pods", post(pods))
        .route("/healthz", get(async || "ok\n"))
}

async fn mutate(fields: HeaderMap, body: Body, judge: Judge) -> Response {
    let announced =
        fields.get(header::CONTENT_LENGTH).and_then(|text| text.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|octets| octets > BODY_MAX) {
        return too_large();
    }
    let body = match timeout(BODY_WITHIN, to_bytes(body, BODY_MAX)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => return too_large(),
        Err(_) => return (StatusCode::REQUEST_TIMEOUT, "the body is late\n").into_response(),
    };
    match answer(&body, judge) {
        Ok(Reviewed { body, changed }) => {
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
    (StatusCode::PAYLOAD_TOO_LARGE, format!("expected at most {BODY_MAX} octets\n")).into_response()
}

async fn attend(stream: TcpStream, tls: TlsAcceptor, app: Router) {
    let peer = stream.peer_addr().ok();
    let stream = match timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return debug!(?peer, "no TLS: {error}"),
        Err(_) => return debug!(?peer, "no TLS within {HANDSHAKE_WITHIN:?}"),
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(LIFE);
    let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    match timeout(LIFE, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(?peer, "a connection ended: {error}"),
        Err(_) => debug!(?peer, "a connection lasted longer than {LIFE:?}"),
    }
}
