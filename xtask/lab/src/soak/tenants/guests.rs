//! Attacks by guests, some of them with a record that their tenant wrote.

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host;
use support::netns::Namespace;
use support::record::Identity;
use support::tap::{Shape, Tap};
use support::tap_client::impatient_storm;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::Ground;
use super::node::{Pod, TenantsNode, from_secret};
use crate::soak::{Shared, tenants};

/// The longest time until a guest of an attack is served the first time.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// The longest time for which a victim may get no answer at all.
const SILENCE: Duration = Duration::from_secs(15);
/// Pause between two rounds of a duel.
const ROUND: Duration = Duration::from_millis(500);

const GOOGLE: &str = "Metadata-Flavor: Google";
const ATTRIBUTE: &str = "/computeMetadata/v1/instance/guest-attributes/hostkeys/ssh";
const PASSWORD: &str = "/openstack/latest/password";
const TOKEN: &str = "/v1/identity/jwt?audience=https://soak.example";
const DOCUMENT: &str = "/latest/dynamic/instance-identity/document";
/// What the victim writes, and what the attacker writes.
const VICTIMS: &str = "state-of-the-victim";
const FORGED: &str = "state-of-the-attacker";

/// Two VMs of different tenants with one UUID. Neither may see or change what belongs to the other.
pub(super) struct Duel<'a> {
    /// What the two have in common, for messages.
    pub(super) what: &'static str,
    pub(super) victim: &'a Namespace,
    pub(super) attacker: &'a Namespace,
}

impl Duel<'_> {
    /// Fights until the ground says that it is over.
    pub(super) fn fight(&self, ground: &Ground<'_>) -> Result<()> {
        for ns in [self.victim, self.attacker] {
            let served = eventually(SERVED_WITHIN, || {
                let answer = ask(ns, "GET /v1/user-data", &[], "")?;
                ensure!(answer.status == 200 || ground.is_over(), "answered {}", answer.status);
                Ok(())
            });
            if let Err(error) = served {
                ground.attacks.breach(format!("{}: a VM is not served: {error:#}", self.what));
                return Ok(());
            }
        }
        ground.wait_for_start();
        let mut found = Findings { what: self.what, shared: ground.attacks, known: BTreeSet::new() };
        // Errors of transport count by the victim's silence below.
        _ = ask(self.victim, &format!("PUT {ATTRIBUTE}"), &[GOOGLE], VICTIMS);
        _ = ask(self.victim, &format!("POST {PASSWORD}"), &[], VICTIMS);
        let mut answered = Instant::now();
        while !ground.is_over() {
            self.attack(&mut found);
            ground.act();
            if self.check_victim(&mut found).is_ok() {
                answered = Instant::now();
            }
            found.check("the victim gets no answer any more", answered.elapsed() > SILENCE);
            ground.sleep(ROUND);
        }
        Ok(())
    }

    fn attack(&self, found: &mut Findings<'_>) {
        let read = |path: &str, fields: &[&str]| {
            ask(self.attacker, &format!("GET {path}"), fields, "").unwrap_or_default()
        };
        found.check(
            "the attacker reads the victim's attribute",
            read(ATTRIBUTE, &[GOOGLE]).body.contains(VICTIMS),
        );
        found.check("the attacker reads the victim's password", read(PASSWORD, &[]).body.contains(VICTIMS));
        _ = ask(self.attacker, &format!("PUT {ATTRIBUTE}"), &[GOOGLE], FORGED);
        _ = ask(self.attacker, &format!("POST {PASSWORD}"), &[], FORGED);
        let of_victim = |path: &str, fields: &[&str]| {
            ask(self.victim, &format!("GET {path}"), fields, "").unwrap_or_default()
        };
        let field = &["Metadata: true"];
        let subjects = [read(TOKEN, field), of_victim(TOKEN, field)].map(|answer| subject(&answer.body));
        found.check("both get tokens with one subject", subjects[0].is_some() && subjects[0] == subjects[1]);
        let ids = [read(DOCUMENT, &[]), of_victim(DOCUMENT, &[])].map(|answer| instance_id(&answer.body));
        found.check("both are the same EC2 instance", ids[0].is_some() && ids[0] == ids[1]);
    }

    /// Checks what the victim reads. An error means that it got no answer.
    fn check_victim(&self, found: &mut Findings<'_>) -> Result<()> {
        let answer = ask(self.victim, &format!("GET {ATTRIBUTE}"), &[GOOGLE], "")?;
        found.check("the victim reads a forged attribute", answer.body.contains(FORGED));
        if answer.status == 404 {
            // It could not be written yet, or is lost.
            let written = ask(self.victim, &format!("PUT {ATTRIBUTE}"), &[GOOGLE], VICTIMS)?;
            ensure!(written.status < 300, "answered {}", written.status);
        }
        let password = ask(self.victim, &format!("GET {PASSWORD}"), &[], "")?;
        found.check("the victim reads a forged password", password.body.contains(FORGED));
        Ok(())
    }
}

/// Breaches, each reported once.
struct Findings<'a> {
    what: &'static str,
    shared: &'a Shared,
    known: BTreeSet<&'static str>,
}

impl Findings<'_> {
    fn check(&mut self, finding: &'static str, is_so: bool) {
        // Once the agent has ended, or the attacks are over, silence says nothing.
        if is_so && !self.shared.is_over() && self.known.insert(finding) {
            self.shared.breach(format!("{}: {finding}", self.what));
        }
    }
}

/// The subject of a token, without a check of its signature.
fn subject(token: &str) -> Option<String> {
    let claims = URL_SAFE_NO_PAD.decode(token.trim().split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    claims["sub"].as_str().map(str::to_owned)
}

fn instance_id(document: &str) -> Option<String> {
    let document: Value = serde_json::from_str(document).ok()?;
    document["instanceId"].as_str().map(str::to_owned)
}

fn served<'a>(ground: &Ground<'a>, namespace: &str, uuid: Option<&str>) -> Result<(Pod<'a>, Guest)> {
    let pod = ground.node.pod(namespace)?;
    pod.user_data(format!("#cloud-config\n# {}\n", pod.uid).as_bytes())?;
    let guest = pod.guest()?;
    let mut vmi = pod.vmi(&from_secret());
    if let Some(uuid) = uuid {
        vmi["spec"]["domain"]["firmware"]["uuid"] = uuid.into();
    }
    pod.put(vmi);
    Ok((pod, guest))
}

pub(super) fn equal_uuid(ground: &Ground<'_>) -> Result<()> {
    let (victim, guest) = served(ground, "victim", None)?;
    let (attacker, copy) = served(ground, "mallory", Some(&victim.identity.instance_id))?;
    let duel = Duel { what: "two VMIs with one firmware UUID", victim: guest.ns(), attacker: copy.ns() };
    duel.fight(ground)?;
    drop((guest, copy));
    attacker.end()?;
    victim.end()
}

pub(super) fn render_bomb(ground: &Ground<'_>) -> Result<()> {
    let pod = ground.node.pod("renders")?;
    let tap = pod.tap(Shape::default())?;
    ground.wait_for_start();
    for turn in 0_u64.. {
        if ground.is_over() {
            break;
        }
        // A changed record is rendered again.
        let text = format!("# {turn}\n{}", tenants::bomb(tenants::MEDIUM));
        pod.put(pod.vmi(&with_network(&text)));
        let guests = vec![(pod.identity.clone(), Arc::clone(&tap))];
        // The answer does not matter.
        drop(impatient_storm(guests, &["/v1/metadata"], Duration::from_secs(5), Duration::from_secs(2)));
        ground.act();
        ground.sleep(Duration::from_secs(2));
    }
    drop(tap);
    pod.end()
}

pub(super) fn slow_connections(ground: &Ground<'_>) -> Result<()> {
    let (pod, guest) = served(ground, "slow", None)?;
    ground.wait_for_start();
    guest.ns().run_in(|| hold_slowly(ground));
    drop(guest);
    pod.end()
}

/// Holds connections whose requests never end. The calling thread must be in a guest's namespace.
fn hold_slowly(ground: &Ground<'_>) {
    const CONNECTIONS: usize = 140;
    let mut open: Vec<TcpStream> = Vec::new();
    while !ground.is_over() {
        while open.len() < CONNECTIONS && !ground.is_over() {
            let begun = connect().and_then(|mut stream| {
                stream.write_all(b"GET /v1/user-data HTTP/1.1\r\nHost: metadata\r\nX-Slow: ")?;
                stream.set_nonblocking(true)?;
                Ok(stream)
            });
            let Ok(stream) = begun else { break };
            open.push(stream);
            ground.act();
        }
        open.retain_mut(|stream| {
            let closed = matches!(stream.peek(&mut [0]), Ok(0));
            !closed && stream.write_all(b"x").is_ok()
        });
        ground.sleep(Duration::from_secs(1));
    }
}

pub(super) fn equal_uuid_slow(ground: &Ground<'_>) -> Result<()> {
    let (victim, guest) = served(ground, "victim", None)?;
    let (attacker, copy) = served(ground, "mallory", Some(&victim.identity.instance_id))?;
    ground.wait_for_start();
    std::thread::scope(|scope| {
        scope.spawn(|| copy.ns().run_in(|| hold_slowly(ground)));
        let mut found = Findings {
            what: "slow connections of a VM with the victim's UUID",
            shared: ground.attacks,
            known: BTreeSet::new(),
        };
        let mut answered = Instant::now();
        while !ground.is_over() {
            if ask(guest.ns(), "GET /v1/user-data", &[], "").is_ok_and(|answer| answer.status == 200) {
                answered = Instant::now();
            }
            found.check("the victim gets no answer any more", answered.elapsed() > SILENCE);
            ground.sleep(ROUND);
        }
    });
    drop((guest, copy));
    attacker.end()?;
    victim.end()
}

pub(super) fn attributes(ground: &Ground<'_>) -> Result<()> {
    let guests = [served(ground, "writers", None)?, served(ground, "writers", None)?];
    ground.wait_for_start();
    std::thread::scope(|scope| {
        for (_, guest) in &guests {
            scope.spawn(|| {
                guest.ns().run_in(|| {
                    while !ground.is_over() {
                        // A closed or refused connection begins again.
                        if write_attributes(ground).is_err() {
                            ground.sleep(Duration::from_millis(100));
                        }
                    }
                });
            });
        }
    });
    for (pod, guest) in guests {
        drop(guest);
        pod.end()?;
    }
    Ok(())
}

/// Writes attributes on one connection until it ends.
fn write_attributes(ground: &Ground<'_>) -> Result<()> {
    let mut stream = connect()?;
    let (value, mut answer) = ("v".repeat(3_500), [0; 2_048]);
    for number in 0_u64.. {
        if ground.is_over() {
            break;
        }
        let line = format!("PUT /computeMetadata/v1/instance/guest-attributes/soak/k{}", number % 64);
        stream.write_all(request(&line, &[GOOGLE], &value).as_bytes())?;
        let read = stream.read(&mut answer)?;
        ensure!(read > 0, "closed");
        ground.act();
    }
    Ok(())
}

// Attacks by what a tenant writes into VMIs and Secrets, and by devices in the namespace of a pod.

/// Bytes of a large key of a Secret: as many as Kubernetes accepts.
const SECRET_BYTES: usize = 1 << 20;
/// The annotation that a patch changes.
const ANNOTATION: &str = "example.com/turn";

/// Pods of one tenant in one namespace, without devices.
struct Crowd<'a> {
    // Dropped before the namespace.
    pods: Vec<Pod<'a>>,
    _ns: Namespace,
}

impl<'a> Crowd<'a> {
    fn new(node: &'a TenantsNode, namespace: &str, count: usize) -> Result<Self> {
        let ns = Namespace::new("crowd")?;
        let pods = (0..count).map(|_| node.bare_pod(namespace, &ns)).collect::<Result<_>>()?;
        Ok(Self { pods, _ns: ns })
    }

    fn end(self) -> Result<()> {
        self.pods.into_iter().try_for_each(Pod::end)
    }
}

/// Puts VMIs that all have these fields of `spec`, waits, and deletes them; again and again.
fn repeat(
    ground: &Ground<'_>,
    namespace: &str,
    (count, hold, pause): (usize, Duration, Duration),
    prepare: impl Fn(&Pod<'_>) -> Result<Value>,
) -> Result<()> {
    let crowd = Crowd::new(ground.node, namespace, count)?;
    let vmis = crowd.pods.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    ground.wait_for_start();
    while !ground.is_over() {
        for (pod, vmi) in crowd.pods.iter().zip(&vmis) {
            pod.put(vmi.clone());
            ground.act();
        }
        ground.sleep(hold);
        for pod in &crowd.pods {
            ground.node.server.delete(&pod.key());
        }
        ground.sleep(pause);
    }
    crowd.end()
}

/// The fields of `spec` with a network document in the VMI itself.
pub(super) fn with_network(text: &str) -> Value {
    json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": "#cloud-config\n", "networkData": text}}]})
}

pub(super) fn yaml_bomb(ground: &Ground<'_>) -> Result<()> {
    let times = (1, Duration::from_secs(8), Duration::from_secs(2));
    repeat(ground, "bombs", times, |pod| Ok(pod.vmi(&with_network(&tenants::bomb(tenants::LARGE)))))
}

/// Writes Secrets of short lines as a pod's access credentials, and returns the fields of `spec` that name them.
fn with_keys(pod: &Pod<'_>, count: usize) -> Result<Value> {
    // A line of one character costs the agent most for each byte.
    let lines = b"a\n".repeat(SECRET_BYTES / 2);
    let mut credentials = Vec::new();
    for number in 0..count {
        let secret = format!("keys{number}");
        pod.secret(&format!("{secret}-access-cred"), &[("key", &lines)])?;
        credentials.push(json!({"sshPublicKey": {
            "source": {"secret": {"secretName": secret}}, "propagationMethod": {"noCloud": {}},
        }}));
    }
    let mut spec = json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": "#cloud-config\n"}}]});
    spec["accessCredentials"] = credentials.into();
    Ok(spec)
}

pub(super) fn ssh_keys(ground: &Ground<'_>) -> Result<()> {
    let times = (1, ground.hold(), Duration::from_secs(2));
    repeat(ground, "keys", times, |pod| Ok(pod.vmi(&with_keys(pod, 12)?)))
}

pub(super) fn patch_slowly(ground: &Ground<'_>) -> Result<()> {
    patch(ground, "patches", Duration::from_millis(1_500))
}

pub(super) fn patch_fast(ground: &Ground<'_>) -> Result<()> {
    // An API server limits a client to some dozens of writes a second.
    patch(ground, "flood", Duration::from_millis(25))
}

/// Changes one VMI with two large Secrets, with a pause between changes.
fn patch(ground: &Ground<'_>, namespace: &str, pause: Duration) -> Result<()> {
    let crowd = Crowd::new(ground.node, namespace, 1)?;
    for pod in &crowd.pods {
        let mut vmi = pod.vmi(&with_keys(pod, 2)?);
        ground.wait_for_start();
        for turn in 0_u64.. {
            if ground.is_over() {
                break;
            }
            vmi["metadata"]["annotations"] = json!({ANNOTATION: turn.to_string()});
            pod.put(vmi.clone());
            ground.act();
            ground.sleep(pause);
        }
    }
    crowd.end()
}

pub(super) fn vmi_bytes(ground: &Ground<'_>) -> Result<()> {
    /// A little less than etcd accepts for an object.
    const BYTES: usize = 1_400 << 10;
    let times = (22, ground.hold(), Duration::from_secs(5));
    repeat(ground, "bulky", times, |pod| {
        let text = format!("#cloud-config\n# {}\n", "x".repeat(BYTES));
        Ok(pod.vmi(&json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": text}}]})))
    })
}

pub(super) fn record_memory(ground: &Ground<'_>) -> Result<()> {
    let times = (80, ground.hold(), Duration::from_secs(5));
    repeat(ground, "greedy", times, |pod| {
        let mut text = format!("#cloud-config\n# {}\n", pod.uid);
        while text.len() < SECRET_BYTES {
            text += "# 0123456789 0123456789 0123456789 0123456789 0123456789\n";
        }
        text.truncate(SECRET_BYTES);
        pod.user_data(text.as_bytes())?;
        Ok(pod.vmi(&from_secret()))
    })
}

pub(super) fn taps(ground: &Ground<'_>) -> Result<()> {
    const TAPS: usize = 1_500;
    /// Taps of one batch. Each batch holds the kernel's lock of all network devices, and the modest tenant's devices need
    /// that lock, too: whoever makes taps for tenants makes them one after the other.
    const BATCH: usize = 20;
    const PAUSE: Duration = Duration::from_millis(200);
    while !ground.is_over() {
        let pod = ground.node.pod("taps")?;
        let tap = pod.tap(Shape::default())?;
        pod.put(pod.vmi(&json!({})));
        ground.wait_for_start();
        for first in (0..TAPS).step_by(BATCH) {
            if ground.is_over() {
                break;
            }
            let mut lines = String::new();
            for number in first..first + BATCH {
                writeln!(lines, "tuntap add name more{number} mode tap\nlink set more{number} up")?;
                ground.act();
            }
            pod.ns()?.ip_batch(&lines)?;
            ground.sleep(PAUSE);
        }
        ground.sleep(ground.hold());
        drop(tap);
        pod.end()?;
        ground.sleep(Duration::from_secs(5));
    }
    Ok(())
}

pub(super) fn events(ground: &Ground<'_>) -> Result<()> {
    let crowd = Crowd::new(ground.node, "complaints", 60)?;
    ground.wait_for_start();
    for turn in 0_u64.. {
        for pod in &crowd.pods {
            if ground.is_over() {
                return crowd.end();
            }
            // The volume of this Secret does not exist, and has another name each time.
            let mut vmi = pod.vmi(&from_secret());
            vmi["spec"]["volumes"][0]["name"] = format!("absent{turn}").into();
            pod.put(vmi);
            ground.act();
            ground.sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

pub(super) fn refused(ground: &Ground<'_>) -> Result<()> {
    const PODS: usize = 150;
    let crowd = Crowd::new(ground.node, "refused", PODS)?;
    ground.wait_for_start();
    for turn in 0_u64.. {
        for pod in &crowd.pods {
            if ground.is_over() {
                break;
            }
            // Each turn it is a VMI of another name, as after a controller's retry.
            let mut vmi = pod.vmi(&with_network("{"));
            vmi["metadata"]["name"] = format!("{}-{turn}", pod.identity.hostname).into();
            pod.put(vmi);
            ground.act();
            ground.sleep(Duration::from_millis(50));
        }
        for pod in &crowd.pods {
            ground.node.server.delete(&format!("{}-{turn}", pod.key()));
        }
        if ground.is_over() {
            break;
        }
    }
    crowd.end()
}

// Requests of guests, by the Linux stack of their namespace.

/// The longest time for one request of a guest.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most bytes of an answer that are read.
const ANSWER_MAX: u64 = 4 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HttpAnswer {
    pub(super) status: u16,
    pub(super) body: String,
}

/// Connects to the metadata service. The calling thread must be in a guest's namespace.
pub(super) fn connect() -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The bytes of a request.
pub(super) fn request(line: &str, fields: &[&str], body: &str) -> String {
    let mut text = format!("{line} HTTP/1.1\r\nHost: {METADATA}\r\n");
    for field in fields {
        text += field;
        text += "\r\n";
    }
    text + &format!("Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Sends one request from a guest's namespace, as `GET /path`.
pub(super) fn ask(ns: &Namespace, line: &str, fields: &[&str], body: &str) -> Result<HttpAnswer> {
    let fields: Vec<&str> = fields.iter().copied().chain(["Connection: close"]).collect();
    let text = request(line, &fields, body);
    let answer = ns.run_in(|| -> Result<Vec<u8>> {
        let mut stream = connect()?;
        stream.write_all(text.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
        Ok(answer)
    })?;
    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").with_context(|| format!("{line}: no whole answer"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(HttpAnswer { status: status.with_context(|| format!("{line}: no status"))?, body: body.to_owned() })
}

// The attack on the webhook: connections that shake hands and then say nothing, while an API server asks for reviews.

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

// Attacks by the configurations of VMs of Proxmox VE, which who may edit a VM's options writes.

const VICTIM: u32 = 9_001;
const ATTACKER: u32 = 9_002;
const BOMBER: u32 = 9_003;

/// The configuration of a VM with one NIC.
fn conf(vmid: u32, identity: &Identity, uuid: &str, description: &str) -> String {
    format!(
        "{description}ciuser: alice\nipconfig0: ip={}/16,gw={}\nname: vm-{vmid}\nnet0: virtio={},bridge=vmbr0\n\
         ostype: l26\nsmbios1: uuid={uuid}\n",
        identity.address,
        host::ADDRESS,
        identity.mac.to_string().to_uppercase()
    )
}

/// Boots a guest on the tap that Proxmox VE makes for the first NIC of a VM.
fn guest(ground: &Ground<'_>, vmid: u32, identity: &Identity) -> Result<Guest> {
    let ns = ground.node.host.ns();
    let tap = Tap::create(ns, &format!("tap{vmid}i0"), Shape::virtio())?;
    ns.ip(&format!("link set {} master {} up", tap.name(), host::BRIDGE))?;
    let spec = Spec { shape: Shape::virtio(), ..Spec::of(identity) };
    Guest::boot_on(Arc::new(tap), Namespace::new("guest")?, &spec)
}

pub(super) fn equal_smbios_uuid(ground: &Ground<'_>) -> Result<()> {
    let [victim, attacker] = [(); 2].map(|()| ground.node.identity());
    let guests = (guest(ground, VICTIM, &victim)?, guest(ground, ATTACKER, &attacker)?);
    ground.node.write_conf(VICTIM, &conf(VICTIM, &victim, &victim.instance_id, ""))?;
    ground.node.write_conf(ATTACKER, &conf(ATTACKER, &attacker, &victim.instance_id, ""))?;
    let duel = Duel {
        what: "two VMs of Proxmox VE with one smbios1 UUID",
        victim: guests.0.ns(),
        attacker: guests.1.ns(),
    };
    let fought = duel.fight(ground);
    [VICTIM, ATTACKER].into_iter().for_each(|vmid| ground.node.remove_conf(vmid));
    fought
}

pub(super) fn bomb(ground: &Ground<'_>) -> Result<()> {
    let identity = ground.node.identity();
    ground.wait_for_start();
    for turn in 0_u64.. {
        if ground.is_over() {
            break;
        }
        let members = tenants::anchors(tenants::LARGE).join(", ");
        let block = format!("```imds\nmetadata: {{n{turn}: x, {members}}}\n```");
        let description: String =
            block.lines().map(|line| format!("#{}\n", line.replace(':', "%3A"))).collect();
        ground.node.write_conf(BOMBER, &conf(BOMBER, &identity, &identity.instance_id, &description))?;
        ground.act();
        ground.sleep(Duration::from_secs(5));
    }
    ground.node.remove_conf(BOMBER);
    Ok(())
}
