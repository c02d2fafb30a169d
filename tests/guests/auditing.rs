//! Every request writes one audit line. Audit log, log, metrics and status contain no secret.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument};
use support::eventually::eventually;
use support::exposition::{self, sum};
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::privileged;
use support::process;
use support::record::{Identity, replace};

const PATIENCE: Duration = Duration::from_secs(20);
/// Prefix of every secret in this file.
const CANARY: &str = "canary7f3";

/// A node, a guest and its record.
struct Scene {
    guest: Guest,
    host: Host,
    records: tempfile::TempDir,
}

impl Scene {
    fn new(change: impl FnOnce(&mut Value)) -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let identity = Identity::of(0);
        let mut record = serde_json::from_str(&identity.record(1)).expect("a record");
        change(&mut record);
        replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        Self { guest, host, records }
    }

    fn log(&self) -> PathBuf {
        self.records.path().join("audit.log")
    }

    fn agent(&self, words: &[&str]) -> Agent<'_> {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        let mut all = agent::arguments(self.records.path(), &[port]);
        all.extend(["--audit".into(), self.log().into()]);
        all.extend(words.iter().map(Into::into));
        Agent::start_binary(&agent::binary().expect("the agent is built"), self.host.ns(), all)
            .expect("an agent")
    }

    /// Runs curl with these arguments before the URL; returns status and body.
    fn curl(&self, words: &[&str], path: &str) -> (u16, String) {
        let url = format!("http://{METADATA}{path}");
        let fetched = self.guest.curl(&[words, &[url.as_str()]].concat(), PATIENCE).expect("an answer");
        (fetched.status, fetched.text())
    }

    /// Waits until the audit log has `count` lines.
    fn lines(&self, count: usize) -> Vec<Value> {
        let lines = eventually(PATIENCE, || {
            let text = fs::read_to_string(self.log())?;
            let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
            ensure!(lines.len() == count, "{} lines instead of {count}:\n{text}", lines.len());
            Ok(lines)
        });
        lines.unwrap_or_else(|error| panic!("{error:#}"))
    }
}

#[test]
fn every_request_writes_one_audit_line() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(|_| {});
    let _agent = scene.agent(&[]);
    let asked = [
        (&[][..], "/v1/meta-data", "/v1/meta-data", "GET", 200, "nocloud"),
        (&["-I"], "/v1/user-data", "/v1/user-data", "HEAD", 200, "nocloud"),
        (&[], "/latest/meta-data/hostname?x=1", "/latest/meta-data/hostname", "GET", 200, "ec2"),
        (&[], "/latest/user%2ddata", "/latest/user%2ddata", "GET", 200, "ec2"),
        (
            &[],
            "/openstack/latest/meta_data.json",
            "/openstack/latest/meta_data.json",
            "GET",
            200,
            "openstack",
        ),
        (&["-X", "DELETE"], "/v1/meta-data", "/v1/meta-data", "DELETE", 405, "nocloud"),
        (&["-X", "BREW"], "/pot", "/pot", "?", 405, "none"),
        (&[], "/no/such/path", "/no/such/path", "GET", 404, "none"),
    ];
    let bodies: Vec<_> = asked.iter().map(|(words, path, ..)| scene.curl(words, path)).collect();
    let lines = scene.lines(asked.len());
    let identity = scene.guest.identity();
    for ((line, (_, _, path, method, status, dialect)), (got, body)) in lines.iter().zip(asked).zip(bodies) {
        let found = ["path", "method", "dialect"].map(|field| line[field].as_str().unwrap_or_default());
        assert_eq!((found, &line["status"]), ([path, method, dialect], &json!(status)), "{line}");
        assert_eq!(got, status, "{line}");
        let length = if method == "HEAD" { 0 } else { body.len() };
        assert_eq!(line["bytes"], length, "{line}");
        let who = ["vm", "name", "mac", "port"].map(|field| line[field].as_str().unwrap_or_default());
        let mac = identity.mac.to_string();
        assert_eq!(
            who,
            [&identity.instance_id, &identity.hostname, &mac, scene.guest.host_tap().name()],
            "{line}"
        );
        let client = line["client"].as_str().unwrap_or_default();
        assert!(client.starts_with(&format!("{}:", identity.address)), "{line}");
        assert!((1..1_000_000).contains(&line["us"].as_u64().unwrap_or_default()), "{line}");
        assert!(line["time"].as_str().is_some_and(|time| time.len() == 20 && time.ends_with('Z')), "{line}");
    }
    assert_eq!(fs::metadata(scene.log()).expect("a file").permissions().mode() & 0o777, 0o600);
}

#[test]
fn no_secret_appears_in_the_audit_log_the_log_the_metrics_or_the_status() {
    if !privileged::or_skip() {
        return;
    }
    let secret = |what: &str| format!("{CANARY}-{what}");
    let scene = Scene::new(|record| {
        record["user_data"] = json!({"text": format!("#cloud-config\n# {}\n", secret("user-data"))});
        record["vendor_data"] = json!({"text": format!("#cloud-config\n# {}\n", secret("vendor-data"))});
        record["admin"] = json!({"user": "alice", "password": secret("password")});
        record["ssh_keys"] = json!([{"name": "default", "key": format!("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 {}", secret("key"))}]);
        record["credentials"] = json!({"iam": {
            "role": "app", "access_key_id": secret("id"), "secret_access_key": secret("secret"),
            "expires": "2030-01-01T00:00:00Z",
        }});
    });
    let agent = scene.agent(&["--log", "trace"]);
    let shown = |words: &[&str]| {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.args(words).args(["--json", "--run"]).arg(scene.records.path().join("run"));
        let text = String::from_utf8(command.output().expect("the verb runs").stdout).expect("text");
        assert!(text.contains(&scene.guest.identity().mac.to_string()) || words[0] == "status", "{text}");
        text
    };
    // From now on the live view follows the guest.
    shown(&["top"]);
    let mut requests = 0;
    let mut ask = |words: &[&str], path: &str| {
        requests += 1;
        scene.curl(words, path)
    };
    let ttl = "X-aws-ec2-metadata-token-ttl-seconds: 60";
    let (status, token) = ask(&["-X", "PUT", "-H", ttl], "/latest/api/token");
    assert_eq!(status, 200);
    let with_token = format!("X-aws-ec2-metadata-token: {token}");
    let mut received = String::new();
    for path in [
        "/latest/user-data",
        "/v1/user-data",
        "/v1/vendor-data",
        "/latest/meta-data/public-keys/0/openssh-key",
        "/latest/meta-data/iam/security-credentials/app",
        "/openstack/latest/meta_data.json",
    ] {
        let (status, body) = ask(&["-H", &with_token], path);
        assert_eq!(status, 200, "{path}");
        received += &body;
    }
    for what in ["user-data", "vendor-data", "key", "secret"] {
        assert!(
            received.contains(&secret(what)),
            "the guest did not receive its {what}, so the search proves nothing"
        );
    }
    let (header, query) =
        (format!("Authorization: {}", secret("header")), format!("/v1/meta-data?{}", secret("query")));
    ask(&["-H", &header], &query);
    ask(&["-d", &format!("hostname={}", secret("body"))], "/v1/phone-home");
    ask(&["-H", "X-aws-ec2-metadata-token: forged"], "/latest/meta-data");
    let path = format!("http://user:{}@{METADATA}/v1/meta-data", secret("authority"));
    requests += 1;
    scene.guest.curl(&["--request-target", &path, &path], PATIENCE).expect("an answer");
    scene.lines(requests);
    let (_, metrics) = agent.ask("/metrics").expect("metrics");
    let status = shown(&["status", "--all"]);
    assert!(status.contains("schema"), "{status}");
    let view = shown(&["top"]) + &shown(&["top", &scene.guest.identity().mac.to_string()]);
    assert!(view.contains("/latest/meta-data"), "{view}");
    let audit = fs::read_to_string(scene.log()).expect("an audit log");
    for (name, text) in [
        ("audit", audit),
        ("metrics", metrics),
        ("status", status),
        ("live view", view),
        ("log", agent.log()),
    ] {
        assert!(!text.is_empty(), "there is no {name}");
        assert!(!text.contains(CANARY), "the {name} has a secret:\n{text}");
        assert!(!text.contains(&token), "the {name} has a token:\n{text}");
    }
}

#[test]
fn a_stalled_disk_drops_audit_lines_and_no_request() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(|_| {});
    let made = Command::new("mkfifo").arg(scene.log()).status().expect("mkfifo runs");
    assert!(made.success());
    // The pipe is open at both ends and nothing reads it.
    let pipe = fs::OpenOptions::new().read(true).write(true).open(scene.log()).expect("a pipe");
    let agent = scene.agent(&[]);
    let (begun, mut answered) = (Instant::now(), 0);
    let dropped = loop {
        let url = format!("http://{METADATA}/v1/meta-data?[1-200]");
        let words =
            ["-s", "-S", "--fail", "-o", "/dev/null", "--max-time", "10", "-w", "%{http_code}\n", &url];
        let output = scene.guest.ns().output(Command::new("curl").args(words)).expect("curl runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        answered += String::from_utf8_lossy(&output.stdout).lines().filter(|line| *line == "200").count();
        let (_, text) = agent.ask("/metrics").expect("metrics");
        let families = exposition::read(&text).expect("a good exposition");
        let counted = sum(&families, "xdp_imds_requests_total", &[]).expect("a count");
        assert_eq!(counted as usize, answered, "every request is answered and counted");
        let dropped =
            sum(&families, "xdp_imds_audit_dropped_total", &[("reason", "queue_full")]).expect("a count");
        if dropped > 0.0 || begun.elapsed() > 3 * PATIENCE {
            break dropped;
        }
    };
    assert!(dropped > 0.0, "nothing was dropped in {answered} requests");
    let health = agent.ask("/healthz").expect("an answer");
    assert_eq!(health, (200, "ok\n".into()));
    drop(pipe);
}

#[test]
fn audit_lines_go_to_the_new_file_after_a_rotation() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(|_| {});
    let agent = scene.agent(&[]);
    scene.curl(&[], "/v1/meta-data");
    scene.lines(1);
    fs::rename(scene.log(), scene.records.path().join("audit.old")).expect("renamed");
    process::signal(agent.pid(), libc::SIGHUP).expect("a signal");
    let reloaded = eventually(PATIENCE, || {
        let (_, text) = agent.ask("/metrics")?;
        let done = sum(&exposition::read(&text)?, "xdp_imds_config_reloads_total", &[("outcome", "done")])?;
        ensure!(done == 1.0, "{done} reloads");
        Ok(())
    });
    reloaded.expect("a reload");
    scene.curl(&[], "/v1/user-data");
    let lines = scene.lines(1);
    assert_eq!(lines[0]["path"], "/v1/user-data");
}
