//! The webhook and the policy set the SMBIOS of annotated VMs, so that the guests find the service. One table
//! of cases states the results of both. API servers reach the webhook over TLS, with a certificate that changes at run
//! time.

use anyhow::{Context as _, Result, bail, ensure};
use metadata_user::verbs::webhook::review::{AdmissionOperation, judge_pod, judge_vm};
use regex::Regex;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use support::agent;
use support::eventually;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const POLICY: &str = include_str!("../../deploy/kustomize/parts/policy/policy.yaml");
const WEBHOOK: &str = include_str!("../../deploy/kustomize/parts/webhook/webhook.yaml");
const PATIENCE: Duration = Duration::from_secs(20);
const NAME: &str = "xdp-imds-webhook.xdp-imds.svc";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    #[serde(default = "create")]
    operation: String,
    annotations: Option<Value>,
    domain: Value,
    /// The domain before an update; `domain` if absent.
    old: Option<Value>,
    serial: Option<String>,
    asset: Option<String>,
}

fn create() -> String {
    "CREATE".into()
}

impl Case {
    fn all() -> Vec<Self> {
        serde_yaml::from_str(include_str!("../injection/cases.yaml")).expect("a table of cases")
    }

    fn vm(&self, domain: &Value) -> Value {
        let metadata = match &self.annotations {
            Some(annotations) => json!({"annotations": annotations, "labels": {"a": "b"}}),
            None => json!({}),
        };
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm-a"},
            "spec": {"template": {"metadata": metadata, "spec": {"domain": domain, "networks": []}}}})
    }

    fn before(&self) -> Value {
        self.vm(&self.domain)
    }

    fn old(&self) -> Value {
        match &*self.operation {
            "CREATE" => Value::Null,
            _ => self.vm(self.old.as_ref().unwrap_or(&self.domain)),
        }
    }

    fn after(&self) -> Value {
        let mut domain = self.domain.clone();
        for (part, field, text) in [("firmware", "serial", &self.serial), ("chassis", "asset", &self.asset)] {
            if let Some(text) = text {
                domain[part][field] = json!(text);
            }
        }
        self.vm(&domain)
    }
}

/// Applies a patch of `add` operations on members of objects and ends of lists (RFC 6902 §4.1).
fn apply(object: &mut Value, patch: &Value) -> Result<()> {
    for change in patch.as_array().context("a patch is a list")? {
        ensure!(change["op"] == "add", "{change}");
        let path = change["path"].as_str().context("a path")?;
        let (parent, member) = path.rsplit_once('/').context("a pointer")?;
        let parent = object.pointer_mut(parent).with_context(|| format!("nothing is at {parent}"))?;
        match parent {
            Value::Array(list) if member == "-" => list.push(change["value"].clone()),
            parent => {
                _ = parent
                    .as_object_mut()
                    .context("an object")?
                    .insert(member.into(), change["value"].clone())
            }
        }
    }
    Ok(())
}

#[test]
fn the_webhook_gives_the_results_in_the_table() {
    for case in Case::all() {
        let operation =
            if case.operation == "CREATE" { AdmissionOperation::Create } else { AdmissionOperation::Update };
        let judged = judge_vm(operation, &case.before(), &case.old());
        let mut vm = case.before();
        apply(&mut vm, &serde_json::to_value(&judged.changes).expect("JSON")).expect("it applies");
        assert_eq!(vm, case.after(), "{}", case.name);
    }
}

/// Finds a document of a manifest by kind and name.
fn document(text: &str, kind: &str, name: &str) -> Value {
    let documents: Vec<Value> = serde_yaml::from_multiple(text).expect("YAML");
    let is_it = |document: &Value| document["kind"] == kind && document["metadata"]["name"] == name;
    documents.into_iter().find(is_it).expect(name)
}

/// A CEL evaluator with the variables an API server provides.
struct Cel(cel::Context<'static, 'static>);

impl Cel {
    fn of(object: &Value, old: &Value, operation: &str) -> Result<Self> {
        let mut context = cel::Context::default();
        let add = |context: &mut cel::Context<'static, 'static>, name: &'static str, value: Value| {
            context.add_variable(name, value).map_err(|error| anyhow::anyhow!("{name}: {error:?}"))
        };
        add(&mut context, "object", object.clone())?;
        add(&mut context, "oldObject", old.clone())?;
        add(&mut context, "request", json!({"operation": operation}))?;
        Ok(Self(context))
    }

    fn value(&self, expression: &str) -> Result<Value> {
        // Kubernetes types of patches and objects have the same fields as plain maps, so read them as maps.
        let typed = Regex::new(r"\b(JSONPatch|Object(\.[A-Za-z]+)*)\{")?.replace_all(expression, "{");
        let expression = Regex::new(r"([{,]\s*)([a-z][A-Za-z]*):\s")?.replace_all(&typed, "$1'$2': ");
        let program =
            cel::Program::compile(&expression).map_err(|error| anyhow::anyhow!("{expression}: {error:?}"))?;
        let value = program.execute(&self.0).map_err(|error| anyhow::anyhow!("{expression}: {error:?}"))?;
        value.json().map_err(|error| anyhow::anyhow!("{expression}: {error:?}"))
    }

    /// Adds a policy's variables; each may use the earlier ones.
    fn with_variables(mut self, variables: &Value) -> Result<Self> {
        let mut values = serde_json::Map::new();
        for variable in variables.as_array().context("variables")? {
            let [name, expression] =
                ["name", "expression"].map(|field| variable[field].as_str().unwrap_or_default());
            self.set_variables(&values)?;
            values.insert(name.into(), self.value(expression)?);
        }
        self.set_variables(&values)?;
        Ok(self)
    }

    fn set_variables(&mut self, values: &serde_json::Map<String, Value>) -> Result<()> {
        self.0.add_variable("variables", json!(values)).map_err(|error| anyhow::anyhow!("{error:?}"))
    }

    /// True if every condition is true.
    fn matches(&self, conditions: &Value) -> Result<bool> {
        for condition in conditions.as_array().context("conditions")? {
            // Like the API server, stop at the first false condition.
            match self.value(condition["expression"].as_str().context("an expression")?)? {
                Value::Bool(true) => {}
                Value::Bool(false) => return Ok(false),
                other => bail!("{} is {other}", condition["name"]),
            }
        }
        Ok(true)
    }
}

/// Applies a policy to an object. Each mutation sees the result of the previous one.
fn by_policy(policy: &Value, before: &Value, old: &Value, operation: &str) -> Result<Value> {
    let spec = &policy["spec"];
    let mut object = before.clone();
    if !Cel::of(before, old, operation)?.matches(&spec["matchConditions"])? {
        return Ok(object);
    }
    for mutation in spec["mutations"].as_array().context("mutations")? {
        let cel = Cel::of(&object, old, operation)?.with_variables(&spec["variables"])?;
        let expression = mutation["jsonPatch"]["expression"].as_str().context("an expression")?;
        apply(&mut object, &cel.value(expression)?)?;
        // The API server has Go types for Pods, whose empty lists it omits. Custom resources keep theirs.
        if object["kind"] == "Pod" {
            omit_empty_lists(&mut object);
        }
    }
    Ok(object)
}

fn omit_empty_lists(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| member.as_array().is_none_or(|list| !list.is_empty()));
            members.values_mut().for_each(omit_empty_lists);
        }
        Value::Array(list) => list.iter_mut().for_each(omit_empty_lists),
        _ => {}
    }
}

#[test]
fn the_policy_gives_the_results_in_the_same_table() {
    let policy = document(POLICY, "MutatingAdmissionPolicy", "xdp-imds");
    for case in Case::all() {
        let vm = by_policy(&policy, &case.before(), &case.old(), &case.operation)
            .unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
        assert_eq!(vm, case.after(), "{}", case.name);
    }
}

#[test]
fn the_webhook_is_called_for_every_vm_that_it_would_change() {
    let webhook = document(WEBHOOK, "MutatingWebhookConfiguration", "imds-vm-defaults");
    let policy = document(POLICY, "MutatingAdmissionPolicy", "xdp-imds");
    assert_eq!(webhook["webhooks"][0]["matchConditions"], policy["spec"]["matchConditions"]);
    for case in Case::all() {
        let cel = Cel::of(&case.before(), &case.old(), &case.operation).expect("variables");
        let asked = cel.matches(&webhook["webhooks"][0]["matchConditions"]).expect(&case.name);
        assert!(asked || case.before() == case.after(), "{}", case.name);
    }
    // Webhooks run in order of their names; this one must precede KubeVirt's own, which gives every VM a serial.
    let name = webhook["metadata"]["name"].as_str().expect("a name");
    assert!(name < "virt-api-mutator", "{name}");
    for (field, expected) in
        [("failurePolicy", "Ignore"), ("sideEffects", "None"), ("reinvocationPolicy", "Never")]
    {
        assert_eq!(webhook["webhooks"][0][field], expected, "{field}");
    }
    assert_eq!(policy["spec"]["failurePolicy"], "Ignore");
}

/// A launcher pod, and the volumes it must get.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PodCase {
    name: String,
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    volumes: Vec<String>,
    /// The pod has no volumes and no mounts.
    #[serde(default)]
    bare: bool,
    /// Index of `compute` among the containers.
    #[serde(default = "second")]
    compute_at: usize,
    #[serde(default)]
    gets: BTreeMap<String, Source>,
}

fn second() -> usize {
    1
}

/// The source of a volume.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
enum Source {
    ServiceAccountToken(String),
    Secret(String),
    ConfigMap(String),
}

impl Source {
    fn volume(&self, name: &str) -> Value {
        match self {
            Self::ServiceAccountToken(path) => {
                let token = json!({"path": path, "expirationSeconds": 3_600});
                json!({"name": name, "projected": {"sources": [{"serviceAccountToken": token}], "defaultMode": 256}})
            }
            Self::Secret(secret) => {
                json!({"name": name, "secret": {"secretName": secret, "defaultMode": 256}})
            }
            Self::ConfigMap(map) => json!({"name": name, "configMap": {"name": map, "defaultMode": 256}}),
        }
    }
}

impl PodCase {
    fn all() -> Vec<Self> {
        let table: Value = serde_yaml::from_str(include_str!("../injection/pods.yaml")).expect("YAML");
        serde_json::from_value(table).expect("a table of cases")
    }

    /// A launcher pod as KubeVirt creates it, with other containers and volumes.
    fn before(&self) -> Value {
        let mut metadata =
            json!({"generateName": "virt-launcher-vm-a-", "labels": {"kubevirt.io": "virt-launcher"}});
        if let Some(annotations) = &self.annotations {
            metadata["annotations"] = json!(annotations);
        }
        let mut volumes = vec![json!({"name": "private", "emptyDir": {}})];
        volumes.extend(self.volumes.iter().map(|name| json!({"name": name, "emptyDir": {}})));
        let mut containers: Vec<_> =
            (0..self.compute_at).map(|n| json!({"name": format!("other-{n}")})).collect();
        containers.extend(["compute", "guest-console-log"].map(|name| json!({"name": name})));
        if self.bare {
            return json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}});
        }
        let mounts = json!([{"name": "private", "mountPath": "/var/run/kubevirt-private"}]);
        containers.iter_mut().for_each(|container| container["volumeMounts"] = mounts.clone());
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {"volumes": volumes, "containers": containers}})
    }

    fn after(&self) -> Value {
        let mut pod = self.before();
        let mounts = format!("/spec/containers/{}/volumeMounts", self.compute_at);
        for (name, source) in &self.gets {
            let mount =
                json!({"name": name, "mountPath": format!("/var/run/xdp-imds/{name}"), "readOnly": true});
            for (list, item) in [("/spec/volumes", source.volume(name)), (&*mounts, mount)] {
                let (parent, field) = list.rsplit_once('/').expect("a pointer");
                let list = &mut pod.pointer_mut(parent).expect("an object")[field];
                match list.as_array_mut() {
                    Some(list) => list.push(item),
                    None => *list = json!([item]),
                }
            }
        }
        pod
    }
}

#[test]
fn a_launcher_pod_gets_the_volumes_that_its_annotations_name() {
    for case in PodCase::all() {
        let judged = judge_pod(AdmissionOperation::Create, &case.before(), &Value::Null);
        let mut pod = case.before();
        apply(&mut pod, &serde_json::to_value(&judged.changes).expect("JSON")).expect("it applies");
        assert_eq!(pod, case.after(), "{}", case.name);
        // A second run adds nothing.
        assert!(
            judge_pod(AdmissionOperation::Create, &pod, &Value::Null).changes.is_empty(),
            "{}",
            case.name
        );
        assert!(
            judge_pod(AdmissionOperation::Update, &case.before(), &case.before()).changes.is_empty(),
            "{}",
            case.name
        );
    }
}

/// kubelet mounts only volumes that a container mounts, so without `compute` a volume would be useless.
#[test]
fn the_policy_adds_no_volume_if_it_finds_no_compute_container() {
    let policy = document(POLICY, "MutatingAdmissionPolicy", "xdp-imds-pods");
    for mut case in PodCase::all() {
        // The index of `compute` is beyond the indexes of containers that the policy lists.
        case.compute_at = 8;
        let beyond = case.before();
        let mut without = beyond.clone();
        without["spec"]["containers"].as_array_mut().expect("a list").remove(8);
        for before in [beyond, without] {
            let pod = by_policy(&policy, &before, &Value::Null, "CREATE");
            let pod = pod.unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
            assert_eq!(pod, before, "{}", case.name);
        }
    }
}

#[test]
fn the_policy_for_pods_gives_the_results_in_the_same_table() {
    let policy = document(POLICY, "MutatingAdmissionPolicy", "xdp-imds-pods");
    for case in PodCase::all() {
        let pod = by_policy(&policy, &case.before(), &Value::Null, "CREATE");
        let pod = pod.unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
        assert_eq!(pod, case.after(), "{}", case.name);
    }
    let webhook = document(WEBHOOK, "MutatingWebhookConfiguration", "imds-vm-defaults");
    let webhook = &webhook["webhooks"][1];
    let spec = &policy["spec"];
    assert_eq!(webhook["matchConditions"], spec["matchConditions"]);
    assert_eq!(webhook["objectSelector"], spec["matchConstraints"]["objectSelector"]);
    assert_eq!(webhook["clientConfig"]["service"]["path"], "/mutate-pods");
}

/// Writes a self-signed certificate for [`NAME`] to the files that the webhook reads.
fn certify(room: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed([NAME.to_owned()]).expect("a certificate");
    // Like kubelet with a Secret's directory, replace both files with one rename.
    let aside = room.join("aside");
    fs::create_dir_all(&aside).expect("a directory");
    fs::write(aside.join("tls.crt"), made.cert.pem()).expect("written");
    fs::write(aside.join("tls.key"), made.signing_key.serialize_pem()).expect("written");
    let data = room.join("data");
    if data.exists() {
        fs::remove_dir_all(&data).expect("the old one is removed");
    }
    fs::rename(aside, data).expect("renamed");
    made.cert.der().clone()
}

/// The running webhook; killed on drop.
struct Webhook {
    child: Child,
    address: SocketAddr,
    lines: Receiver<String>,
}

impl Webhook {
    fn start(room: &Path) -> Result<Self> {
        let [certificate, key]: [PathBuf; 2] = ["data/tls.crt", "data/tls.key"].map(|name| room.join(name));
        let mut command = Command::new(agent::binary()?);
        command.args(["webhook", "--listen", "127.0.0.1:0"]);
        command.arg("--certificate").arg(certificate).arg("--key").arg(key);
        let mut child = command.stderr(Stdio::piped()).stdin(Stdio::null()).spawn()?;
        let stderr = child.stderr.take().context("standard error is piped")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut this = Self { child, address: SocketAddr::from(([127, 0, 0, 1], 0)), lines };
        let line = this.wait_for("answering admission reviews")?;
        let address = line.split("address=").nth(1).with_context(|| line.clone())?;
        this.address = address.trim().parse().with_context(|| line.clone())?;
        Ok(this)
    }

    /// Waits for a log line that contains `part`.
    fn wait_for(&self, part: &str) -> Result<String> {
        loop {
            let line = self
                .lines
                .recv_timeout(PATIENCE)
                .with_context(|| format!("the webhook did not log {part:?}"))?;
            if line.contains(part) {
                return Ok(line);
            }
        }
    }

    /// A connection before its handshake, like that of an API server that trusts only this certificate.
    fn connect(&self, trusted: &CertificateDer<'static>) -> Result<StreamOwned<ClientConnection, TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(trusted.clone())?;
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let tls = ClientConnection::new(Arc::new(config), ServerName::try_from(NAME)?)?;
        let tcp = TcpStream::connect(self.address)?;
        tcp.set_read_timeout(Some(PATIENCE))?;
        Ok(StreamOwned::new(tls, tcp))
    }

    /// Sends a request like an API server that trusts only this certificate.
    fn ask(&self, trusted: &CertificateDer<'static>, request: &str) -> Result<String> {
        let mut stream = self.connect(trusted)?;
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            // A close without a TLS close_notify still ends a complete answer.
            Err(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => return Err(error.into()),
            _ => {}
        }
        Ok(String::from_utf8(answer)?)
    }

    fn post(&self, trusted: &CertificateDer<'static>, body: &str) -> Result<String> {
        self.post_to("/mutate", trusted, body)
    }

    fn post_to(&self, path: &str, trusted: &CertificateDer<'static>, body: &str) -> Result<String> {
        let fields = "Host: x\r\nConnection: close\r\nContent-Type: application/json\r\n";
        let head = format!("POST {path} HTTP/1.1\r\n{fields}");
        self.ask(trusted, &format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()))
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("cannot end process {}: {error}", self.child.id());
        }
    }
}

#[test]
fn the_webhook_answers_over_tls_with_the_certificate_now_in_its_files() {
    let room = tempfile::tempdir().expect("a directory");
    let first = certify(room.path());
    let webhook = Webhook::start(room.path()).expect("a webhook");
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u-1", "operation": "CREATE", "namespace": "n", "name": "vm-a",
        "object": {"spec": {"template": {"metadata": {"annotations": {"imds.kubevirt.io/enabled": "true"}},
            "spec": {"domain": {"devices": {}}}}}}}});
    let asks = |trusted: &CertificateDer<'static>| -> Result<()> {
        let answer = webhook.post(trusted, &review.to_string())?;
        ensure!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let body: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap_or_default())?;
        ensure!(body["response"]["uid"] == "u-1" && body["response"]["patch"].is_string(), "{body}");
        Ok(())
    };
    asks(&first).expect("an answer");
    webhook.wait_for("n/vm-a").expect("it logs what it set");
    let second = certify(room.path());
    eventually(PATIENCE, || asks(&second)).expect("the new certificate");
    let error = asks(&first).expect_err("the old certificate is no longer used").to_string();
    assert!(error.contains("certificate"), "{error}");
    let pod = json!({"metadata": {"generateName": "virt-launcher-vm-a-", "labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"imds.kubevirt.io/enabled": "true"}}, "spec": {"containers": [{"name": "compute"}]}});
    let mut of_pod = review.clone();
    of_pod["request"]["object"] = pod;
    of_pod["request"]["name"] = json!("");
    let answer = webhook.post_to("/mutate-pods", &second, &of_pod.to_string()).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\"patch\""), "{answer}");
    webhook.wait_for("n/virt-launcher-vm-a-").expect("it logs what it set");
    // With a key that does not match, the webhook keeps the last good pair.
    fs::write(room.path().join("data/tls.key"), "nothing").expect("written");
    webhook.wait_for("the previous certificate stays in use").expect("it logs that");
    asks(&second).expect("it still answers");
}

#[test]
fn invalid_reviews_and_bodies_too_long_or_late_are_refused() {
    let room = tempfile::tempdir().expect("a directory");
    let trusted = certify(room.path());
    let webhook = Webhook::start(room.path()).expect("a webhook");
    let answer = webhook.post(&trusted, "{}").expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("AdmissionReview"), "{answer}");
    let claims = format!(
        "POST /mutate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        metadata_user::verbs::webhook::BODY_MAX + 1
    );
    let answer = webhook.ask(&trusted, &claims).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    let late = "POST /mutate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{";
    let answer = webhook.ask(&trusted, late).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    let health = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(webhook.ask(&trusted, health).expect("an answer").starts_with("HTTP/1.1 200 "));
    let mut plain = TcpStream::connect(webhook.address).expect("a connection");
    plain.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").expect("written");
    plain.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let mut answer = Vec::new();
    let read = plain.read_to_end(&mut answer);
    assert!(read.is_err() || !answer.starts_with(b"HTTP"), "{answer:?}");
}

/// What a peer sends that takes a place and asks for nothing.
#[derive(Clone, Copy, Debug)]
enum Squatter {
    /// Nothing after TCP's handshake.
    Silent,
    /// The first bytes of a ClientHello.
    HalfHandshake,
    /// Nothing after the handshake of TLS.
    Idle,
    /// A part of a request's head.
    HalfHead,
    /// A request's head and a part of its body.
    HalfBody,
}

impl Squatter {
    const ALL: [Self; 5] = [Self::Silent, Self::HalfHandshake, Self::Idle, Self::HalfHead, Self::HalfBody];

    fn sit(self, webhook: &Webhook, trusted: &CertificateDer<'static>) -> Result<TcpStream> {
        let mut stream = webhook.connect(trusted)?;
        match self {
            Self::Silent => {}
            Self::HalfHandshake => stream.sock.write_all(&[22, 3, 1, 2, 0, 1, 0])?,
            Self::Idle => _ = stream.conn.complete_io(&mut stream.sock)?,
            Self::HalfHead => stream.write_all(b"POST /mutate HTTP/1.1\r\nHost:")?,
            Self::HalfBody => {
                stream.write_all(b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")?;
            }
        }
        Ok(stream.sock)
    }
}

/// Returns true if the peer has closed the connection. Reads and drops what it has sent before.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a flag");
    let mut rest = [0; 4_096];
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn a_review_is_answered_while_idle_and_slow_peers_hold_every_connection() {
    let room = tempfile::tempdir().expect("a directory");
    let trusted = certify(room.path());
    let webhook = Webhook::start(room.path()).expect("a webhook");
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u-1", "operation": "CREATE", "object": {}}});
    let most = metadata_user::verbs::webhook::CONNECTIONS;
    for squatter in Squatter::ALL {
        let seats: Vec<_> =
            (0..most + 8).map(|_| squatter.sit(&webhook, &trusted).expect("a connection")).collect();
        let answer = webhook.post(&trusted, &review.to_string()).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{squatter:?}: {answer}");
        // The review did not wait until a time limit closed them all.
        let closed = seats.iter().filter(|seat| is_closed(seat)).count();
        assert!(closed < most / 2, "{squatter:?}: {closed} of {} were closed before", seats.len());
    }
}
