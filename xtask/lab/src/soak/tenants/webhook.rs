//! The attack on the webhook: connections that shake hands and then say nothing, while an API server asks for reviews.

use super::attack::Ground;
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// The webhook's name in its certificate.
const NAME: &str = "xdp-imds-webhook.xdp-imds.svc";
/// Idle connections that the attacker wants to hold.
const IDLE: usize = 300;
/// The longest time for a handshake of the attacker.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(2);
/// The longest time for a review: the time that the API server waits by default.
const REVIEWED_WITHIN: Duration = Duration::from_secs(10);
/// The longest time until the webhook says its address.
const STARTED_WITHIN: Duration = Duration::from_secs(30);
/// Reviews that may fail in a row: an API server asks again on a fresh connection.
const FAILURES: u32 = 2;

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// The running webhook; killed on drop.
struct Webhook {
    child: Child,
    address: SocketAddr,
    config: Arc<ClientConfig>,
}

impl Webhook {
    fn start(ground: &Ground<'_>) -> Result<Self> {
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
        let [certificate, key] = ["webhook.crt", "webhook.key"].map(|name| ground.node.path(name));
        std::fs::write(&certificate, made.cert.pem())?;
        std::fs::write(&key, made.signing_key.serialize_pem())?;
        let mut command = Command::new(ground.node.binary());
        command.args(["webhook", "--listen", "127.0.0.1:0", "--certificate"]).arg(certificate);
        command.arg("--key").arg(key).env("NO_COLOR", "1").stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = ground.node.host.ns().spawn(&mut command)?;
        let stderr = child.stderr.take().context("standard error is piped")?;
        let mut webhook = Self {
            child,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            config: trusting(made.cert.der().clone())?,
        };
        let (sender, address) = channel();
        std::thread::Builder::new().name("webhook-log".into()).spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some(address) = line.split("address=").nth(1).and_then(|text| text.trim().parse().ok())
                {
                    // After a failed start nobody waits for it.
                    _ = sender.send(address);
                }
            }
        })?;
        webhook.address =
            address.recv_timeout(STARTED_WITHIN).context("the webhook does not say its address")?;
        Ok(webhook)
    }

    /// Connects and completes the handshake. The calling thread must be in the node's namespace.
    fn connect(&self, within: Duration) -> Result<Tls> {
        let mut tcp = TcpStream::connect_timeout(&self.address, within)?;
        tcp.set_read_timeout(Some(within))?;
        tcp.set_write_timeout(Some(within))?;
        let mut tls = ClientConnection::new(Arc::clone(&self.config), ServerName::try_from(NAME)?)?;
        while tls.is_handshaking() {
            tls.complete_io(&mut tcp)?;
        }
        Ok(StreamOwned::new(tls, tcp))
    }

    /// Asks for a review as an API server does.
    fn review(&self) -> Result<()> {
        let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u-1", "operation": "CREATE", "namespace": "n", "name": "vm-a",
            "object": {"spec": {"template": {
                "metadata": {"annotations": {"imds.kubevirt.io/enabled": "true"}},
                "spec": {"domain": {"devices": {}}},
            }}},
        }})
        .to_string();
        let mut stream = self.connect(REVIEWED_WITHIN)?;
        let head =
            "POST /mutate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n";
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len())?;
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            // A close without TLS's close_notify still ends a complete answer.
            Err(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => return Err(error.into()),
            _ => {}
        }
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let body: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap_or_default())
            .with_context(|| format!("no review in {answer}"))?;
        ensure!(body["response"]["uid"] == "u-1", "{body}");
        Ok(())
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("cannot end process {}: {error}", self.child.id());
        }
    }
}

fn trusting(certificate: CertificateDer<'static>) -> Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate)?;
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

pub(super) fn idle(ground: &Ground<'_>) -> Result<()> {
    let webhook = Webhook::start(ground)?;
    ground.node.host.ns().run_in(|| webhook.review()).context("the webhook before the attack")?;
    ground.wait_for_start();
    std::thread::scope(|scope| {
        scope.spawn(|| ground.node.host.ns().run_in(|| hold(ground, &webhook)));
        scope.spawn(|| ground.node.host.ns().run_in(|| review(ground, &webhook)));
    });
    Ok(())
}

/// Holds idle connections, and replaces those that the webhook closes.
fn hold(ground: &Ground<'_>, webhook: &Webhook) {
    let mut held: Vec<Tls> = Vec::new();
    while !ground.is_over() {
        held.retain(|stream| {
            let idle = stream.sock.set_nonblocking(true).is_ok();
            let closed = matches!(stream.sock.peek(&mut [0]), Ok(0));
            idle && !closed
        });
        while held.len() < IDLE && !ground.is_over() {
            // At the webhook's limit a handshake does not complete.
            let Ok(stream) = webhook.connect(HANDSHAKE_WITHIN) else { break };
            held.push(stream);
            ground.act();
        }
        ground.sleep(Duration::from_secs(1));
    }
}

fn review(ground: &Ground<'_>, webhook: &Webhook) {
    let mut failures = 0;
    while !ground.is_over() {
        match webhook.review() {
            Ok(()) => failures = 0,
            Err(error) => {
                failures += 1;
                if failures == FAILURES {
                    ground.attacks.breach(format!("the webhook answers no review: {error:#}"));
                }
            }
        }
        ground.sleep(Duration::from_secs(2));
    }
}
