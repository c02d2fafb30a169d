//! An agent reports its state to probes, to scrapers and to operators.

use anyhow::ensure;
use metadata_control::status::{AgentStatus, GuestState, GuestStatus as KnownGuest, PortState};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use support::agent::{Agent, PortArgument};
use support::eventually;
use support::exposition::{Family, sum};
use support::guest::METADATA;
use support::host::Host;
use support::netns::Namespace;
use support::process::Stopped;
use support::record::{Identity, replace};
use support::scene::OneGuest;
use support::tap::set_gro;
use support::{agent, exposition, privileged, process};

const PATIENCE: Duration = Duration::from_secs(20);

/// Starts an agent that writes an audit log.
fn audited<'a>(scene: &'a OneGuest, words: &[&str]) -> Agent<'a> {
    scene.agent_with(&[&["--audit", &log(scene).to_string_lossy()], words].concat())
}

fn log(scene: &OneGuest) -> PathBuf {
    scene.file("audit.log")
}

/// Runs `xdp-imds status`; returns its exit code and output.
fn status_text(scene: &OneGuest, words: &[&str]) -> (i32, String) {
    let Output { status, stdout, stderr } = run_status(&scene.file("run"), words);
    let said = [stdout, stderr].concat();
    (status.code().expect("an exit code"), String::from_utf8(said).expect("text"))
}

fn status(scene: &OneGuest) -> (i32, AgentStatus) {
    let (code, text) = status_text(scene, &["--json"]);
    (code, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// Runs curl with these arguments before the URL; returns status and body.
fn curl(scene: &OneGuest, words: &[&str], path: &str) -> (u16, String) {
    let url = format!("http://{METADATA}{path}");
    scene.curl(&[words, &[url.as_str()]].concat())
}

/// Waits until the audit log has `count` lines.
fn lines(scene: &OneGuest, count: usize) -> Vec<Value> {
    let lines = eventually(PATIENCE, || {
        let text = fs::read_to_string(log(scene))?;
        let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        ensure!(lines.len() == count, "{} lines instead of {count}:\n{text}", lines.len());
        Ok(lines)
    });
    lines.unwrap_or_else(|error| panic!("{error:#}"))
}

fn run_status(run: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    command.arg("status").args(words).arg("--run").arg(run).output().expect("the verb runs")
}

#[test]
fn status_reports_that_no_agent_serves() {
    let run = tempfile::tempdir().expect("a directory");
    let Output { status, stderr, .. } = run_status(run.path(), &[]);
    let said = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(5), "{said}");
    assert!(said.contains("no agent runs with the run directory"), "{said}");
}

#[privileged::test]
fn a_healthy_agent_reports_its_ports_and_guests() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    let identity = scene.guest.identity();
    let (code, status) = status(&scene);
    assert_eq!((code, &status.troubles), (0, &vec![]), "{status:?}");
    assert_eq!((status.pid, status.live, status.ready, status.identities), (agent.pid(), true, true, 1));
    assert_eq!(status.ports.counts[&PortState::Attached], 1);
    assert_eq!((status.workers.len(), status.workers[0].device.is_empty()), (1, false));
    let (code, table) = status_text(&scene, &[]);
    assert!(code == 0 && table.contains("healthy") && table.contains("1 served (file)"), "{table}");

    let url = format!("http://{METADATA}/v1/meta-data");
    scene.guest.curl(&[&url], PATIENCE).expect("an answer");
    for name in
        [scene.guest.host_tap().name(), &identity.mac.to_string(), &identity.hostname, &identity.instance_id]
    {
        let (code, text) = status_text(&scene, &[name, "--json"]);
        let guests: Vec<KnownGuest> =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!((code, guests.len()), (0, 1), "{name}: {text}");
        assert_eq!(guests[0].state, GuestState::Served, "{name}");
        assert_eq!(guests[0].vm.as_ref(), Some(&identity.hostname), "{name}");
        assert!(guests[0].held.is_some() && guests[0].slot.is_some(), "{name}: {text}");
    }
    let (code, said) = status_text(&scene, &["nobody"]);
    assert!(
        code == 7 && said.contains("no guest is known as nobody") && said.contains("xdp-imds ls"),
        "{said}"
    );
    agent.stop().expect("the agent stops");
    let (code, _) = status_text(&scene, &[]);
    assert_eq!(code, 5, "the agent has ended");
}

#[privileged::test]
fn a_refused_record_is_reported_until_it_is_corrected() {
    let scene = OneGuest::with_record(|_| {});
    let _agent = scene.agent();
    let path = scene.guest.identity().path(scene.records.path());
    replace(&path, "schema: vmrecord/9\n").expect("a bad record");
    let degraded = eventually(PATIENCE, || {
        let (code, status) = status(&scene);
        anyhow::ensure!(code == 1, "{code}: {status:?}");
        Ok(status)
    });
    let degraded = degraded.expect("the status reports the refusal");
    assert_eq!(degraded.troubles, ["1 record refused"]);
    assert_eq!(degraded.refused[0].record, "guest-0.yaml");
    assert!(degraded.lately.iter().any(|said| said.text.contains("guest-0.yaml")), "{:?}", degraded.lately);
    assert_eq!(
        degraded.instances.iter().map(|instances| instances.count).sum::<u64>(),
        1,
        "the last good record must stay"
    );
    scene.guest.identity().write(scene.records.path(), 2).expect("a good record");
    let healthy = eventually(PATIENCE, || {
        let (code, status) = status(&scene);
        anyhow::ensure!(code == 0, "{code}: {status:?}");
        Ok(())
    });
    healthy.expect("the status is healthy again");
}

#[privileged::test]
fn an_absent_port_is_reported_as_waiting_and_not_as_trouble() {
    let scene = OneGuest::with_record(|_| {});
    let absent = PortArgument { ifname: "tap9999".into(), mac: None, ..scene.port() };
    let _agent =
        Agent::start(scene.host.ns(), scene.records.path(), &[scene.port(), absent]).expect("an agent");
    let (code, status) = status(&scene);
    assert_eq!((code, status.ports.counts[&PortState::Waiting]), (0, 1), "{status:?}");
    assert_eq!((status.ports.listed[0].name.as_str(), status.ports.listed.len()), ("tap9999", 1));
}

#[privileged::test]
fn the_metrics_address_serves_probes_and_metrics_but_no_status() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/v1/status", 404)] {
        assert_eq!(agent.ask(path).expect("an answer").0, status, "{path}");
    }
}

#[privileged::test]
fn healthz_names_a_worker_while_it_is_stuck() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    assert_eq!(agent.ask("/healthz").expect("an answer"), (200, "ok\n".into()));
    let stopped = Stopped::thread(agent.pid(), "imds-hub-0").expect("a worker to stop");
    let (begun, mut report) = (Instant::now(), None);
    while report.is_none() && begun.elapsed() < PATIENCE {
        let (status, body) = agent.ask("/healthz").expect("an answer while a worker is stuck");
        report = (status == 503).then_some(body);
        std::thread::sleep(Duration::from_millis(100));
    }
    let body = report.expect("the stuck worker is reported");
    assert!(body.starts_with("worker 0 has not responded for ") && body.lines().count() == 1, "{body}");
    assert!(begun.elapsed() > Duration::from_secs(3), "reported after {:?}", begun.elapsed());
    assert_eq!(agent.ask("/readyz").expect("an answer").0, 503);
    assert_eq!(
        agent.ask("/metrics").expect("an answer").0,
        200,
        "the metrics published last must still be served"
    );
    let (code, status) = status(&scene);
    assert!(code == 1 && !status.live, "{status:?}");
    drop(stopped);
    let answered = eventually(PATIENCE, || {
        let (status, body) = agent.ask("/healthz")?;
        anyhow::ensure!(status == 200, "{body}");
        Ok(())
    });
    answered.expect("the worker continues");
}

#[privileged::test]
fn a_stopped_process_answers_no_probe() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    process::signal(agent.pid(), libc::SIGSTOP).expect("a process to stop");
    let asked = agent.ask("/healthz");
    process::signal(agent.pid(), libc::SIGCONT).expect("a process to continue");
    let error = asked.expect_err("a stopped process");
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    assert_eq!(kind, Some(std::io::ErrorKind::WouldBlock), "{error:#}");
    let answered = eventually(PATIENCE, || {
        let (status, body) = agent.ask("/healthz")?;
        anyhow::ensure!(status == 200, "{body}");
        Ok(())
    });
    answered.expect("the process continues");
}

// Every request writes one audit line. Audit log, log, metrics and status contain no secret.

/// Prefix of every secret in this file.
const CANARY: &str = "canary7f3";

#[privileged::test]
fn every_request_writes_one_audit_line() {
    let scene = OneGuest::with_record(|_| {});
    let _agent = audited(&scene, &[]);
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
    let bodies: Vec<_> = asked.iter().map(|(words, path, ..)| curl(&scene, words, path)).collect();
    let lines = lines(&scene, asked.len());
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
    assert_eq!(fs::metadata(log(&scene)).expect("a file").permissions().mode() & 0o777, 0o600);
}

#[privileged::test]
fn no_secret_appears_in_the_audit_log_the_log_the_metrics_or_the_status() {
    let secret = |what: &str| format!("{CANARY}-{what}");
    let scene = OneGuest::with_record(|record| {
        record["user_data"] = json!({"text": format!("#cloud-config\n# {}\n", secret("user-data"))});
        record["vendor_data"] = json!({"text": format!("#cloud-config\n# {}\n", secret("vendor-data"))});
        record["admin"] = json!({"user": "alice", "password": secret("password")});
        record["ssh_keys"] = json!([{"name": "default", "key": format!("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 {}", secret("key"))}]);
        record["credentials"] = json!({"iam": {
            "role": "app", "access_key_id": secret("id"), "secret_access_key": secret("secret"),
            "expires": "2030-01-01T00:00:00Z",
        }});
    });
    let agent = audited(&scene, &["--log", "trace"]);
    let shown = |words: &[&str]| {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.args(words).args(["--json", "--run"]).arg(scene.file("run"));
        let text = String::from_utf8(command.output().expect("the verb runs").stdout).expect("text");
        assert!(text.contains(&scene.guest.identity().mac.to_string()) || words[0] == "status", "{text}");
        text
    };
    // From now on the live view follows the guest.
    shown(&["top"]);
    let mut requests = 0;
    let mut ask = |words: &[&str], path: &str| {
        requests += 1;
        curl(&scene, words, path)
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
    lines(&scene, requests);
    let (_, metrics) = agent.ask("/metrics").expect("metrics");
    let status = shown(&["status", "--all"]);
    assert!(status.contains("schema"), "{status}");
    let view = shown(&["top"]) + &shown(&["top", &scene.guest.identity().mac.to_string()]);
    assert!(view.contains("/latest/meta-data"), "{view}");
    let audit = fs::read_to_string(log(&scene)).expect("an audit log");
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

#[privileged::test]
fn a_stalled_disk_drops_audit_lines_and_no_request() {
    let scene = OneGuest::with_record(|_| {});
    let made = Command::new("mkfifo").arg(log(&scene)).status().expect("mkfifo runs");
    assert!(made.success());
    // The pipe is open at both ends and nothing reads it.
    let pipe = fs::OpenOptions::new().read(true).write(true).open(log(&scene)).expect("a pipe");
    let agent = audited(&scene, &[]);
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

#[privileged::test]
fn audit_lines_go_to_the_new_file_after_a_rotation() {
    let scene = OneGuest::with_record(|_| {});
    let agent = audited(&scene, &[]);
    curl(&scene, &[], "/v1/meta-data");
    lines(&scene, 1);
    fs::rename(log(&scene), scene.records.path().join("audit.old")).expect("renamed");
    process::signal(agent.pid(), libc::SIGHUP).expect("a signal");
    let reloaded = eventually(PATIENCE, || {
        let (_, text) = agent.ask("/metrics")?;
        let done = sum(&exposition::read(&text)?, "xdp_imds_config_reloads_total", &[("outcome", "done")])?;
        ensure!(done == 1.0, "{done} reloads");
        Ok(())
    });
    reloaded.expect("a reload");
    curl(&scene, &[], "/v1/user-data");
    let lines = lines(&scene, 1);
    assert_eq!(lines[0]["path"], "/v1/user-data");
}

// Each metric changes when the event it counts happens to a guest on a real tap. A strict parser accepts the whole
// exposition.

fn families(agent: &Agent<'_>) -> BTreeMap<String, Family> {
    let (status, text) = agent.ask("/metrics").expect("metrics");
    assert_eq!(status, 200);
    exposition::read(&text).unwrap_or_else(|error| panic!("{error:#}\n{text}"))
}

/// Waits until a sum reaches a value; workers publish some counters once a second.
fn wait_for_sum(agent: &Agent<'_>, name: &str, labels: &[(&str, &str)], expected: f64) {
    let reached = eventually(PATIENCE, || {
        let found = sum(&families(agent), name, labels)?;
        ensure!(found == expected, "{name}{labels:?} is {found}, not {expected}");
        Ok(())
    });
    reached.unwrap_or_else(|error| panic!("{error:#}"));
}

#[privileged::test]
fn answers_are_counted_by_dialect_and_status_with_the_time_they_took() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    let asked = [
        (&[][..], "/latest/meta-data/instance-id", 200, "ec2"),
        (&[], "/latest/meta-data/hostname", 200, "ec2"),
        (&["-X", "DELETE"], "/latest/meta-data/hostname", 405, "ec2"),
        (&[], "/v1/meta-data", 200, "nocloud"),
        (&[], "/no/such/path", 404, "none"),
        (&["-X", "POST"], "/no/such/path", 405, "none"),
        (&["--path-as-is"], "/latest/../latest", 400, "none"),
        (&[], "/", 200, "any"),
    ];
    for (words, path, status, _) in asked {
        assert_eq!(curl(&scene, words, path).0, status, "{words:?} {path}");
    }
    for (_, _, status, datasource) in asked {
        let alike =
            asked.iter().filter(|(_, _, code, other)| (*code, *other) == (status, datasource)).count();
        let labels = [("datasource", datasource), ("code", &status.to_string())];
        wait_for_sum(&agent, "xdp_imds_requests_total", &labels, alike as f64);
    }
    wait_for_sum(&agent, "xdp_imds_requests_total", &[], asked.len() as f64);
    wait_for_sum(&agent, "xdp_imds_request_duration_seconds", &[], asked.len() as f64);
    let durations = &families(&agent)["xdp_imds_request_duration_seconds"];
    let (_, _, slow) = durations
        .samples
        .iter()
        .find(|(_, labels, _)| labels.get("le").is_some_and(|le| le == "1"))
        .expect("a bucket");
    assert_eq!(*slow, asked.len() as f64, "no request took a second: {durations:?}");
    let (_, _, total) = durations.samples.iter().find(|(name, ..)| name.ends_with("_sum")).expect("a sum");
    assert!(*total > 0.0, "every request takes some time");
}

#[privileged::test]
fn a_waiting_request_is_counted_while_it_waits_and_by_its_outcome() {
    let scene = OneGuest::boot(&Identity::of(0), |spec| spec);
    let agent = scene.agent();
    let waits =
        |expected| wait_for_sum(&agent, "xdp_imds_parked_requests", &[("reason", "record")], expected);
    let ended = |outcome, expected| {
        wait_for_sum(
            &agent,
            "xdp_imds_parked_total",
            &[("reason", "record"), ("outcome", outcome)],
            expected,
        );
    };
    waits(0.0);
    assert_eq!(curl(&scene, &[], "/metadata/v1.json").0, 503, "the request waits 1.5 s");
    ended("expired", 1.0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| curl(&scene, &[], "/openstack/latest/meta_data.json").0);
        waits(1.0);
        scene.guest.identity().write(scene.records.path(), 1).expect("a record");
        assert_eq!(waiting.join().expect("an answer"), 200);
    });
    ended("released", 1.0);
    waits(0.0);
    let change = "/computeMetadata/v1/instance/?recursive=true&wait_for_change=true&timeout_sec=60";
    let (url, flavor) = (format!("http://{METADATA}{change}"), "Metadata-Flavor: Google");
    scene
        .guest
        .curl(&["--max-time", "1", "-H", flavor, &url], PATIENCE)
        .expect_err("curl gives up after 1 s");
    wait_for_sum(&agent, "xdp_imds_parked_total", &[("reason", "change"), ("outcome", "left")], 1.0);
    let families = families(&agent);
    let late = families["xdp_imds_request_duration_seconds"]
        .samples
        .iter()
        .find(|(name, ..)| name.ends_with("_sum"));
    let (_, _, total) = late.expect("a sum");
    assert!(*total > 1.5, "the duration of a request includes its wait: {total}");
}

#[privileged::test]
fn records_ports_and_identities_are_counted_by_state() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    wait_for_sum(&agent, "xdp_imds_instances", &[("source", "file"), ("state", "served")], 1.0);
    wait_for_sum(&agent, "xdp_imds_taps", &[("state", "attached")], 1.0);
    wait_for_sum(&agent, "xdp_imds_ports", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_identities", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_attached_total", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_registration_lag_seconds", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_build_info", &[], 1.0);
    // A second guest's record names no port, so the instance is `unplaced`.
    let other = Identity::of(1);
    other.write(scene.records.path(), 1).expect("a record");
    wait_for_sum(&agent, "xdp_imds_instances", &[("state", "unplaced")], 1.0);
    replace(&other.path(scene.records.path()), "schema: vmrecord/9\n").expect("a bad record");
    wait_for_sum(&agent, "xdp_imds_records_rejected_total", &[], 1.0);
    let mut elsewhere: Value = serde_json::from_str(&other.record(2)).expect("a record");
    elsewhere["network"]["nics"][0]["port"] = serde_json::json!({"ifname": "tap4711"});
    replace(&other.path(scene.records.path()), &elsewhere.to_string()).expect("a record");
    wait_for_sum(&agent, "xdp_imds_instances", &[("state", "waiting")], 1.0);
    wait_for_sum(&agent, "xdp_imds_taps", &[("state", "waiting")], 1.0);
}

#[privileged::test]
fn a_bare_veth_of_another_namespace_is_not_served_until_it_has_gro() {
    let records = tempfile::tempdir().expect("a directory");
    let (host, pod) = (Host::new().expect("a node"), Namespace::new("pod").expect("a pod"));
    let (far, identity) = (Namespace::new("far").expect("a guest"), Identity::of(0));
    pod.ip(&format!("link add tap0 type veth peer name eth0 netns {}", far.name())).expect("a veth");
    pod.ip("link set tap0 up").expect("up");
    far.ip("link set eth0 up").expect("up");
    identity.write(records.path(), 1).expect("a record");
    let port = PortArgument::new("tap0", identity.mac).within(&pod);
    let agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    let state = |served: bool| {
        let (instance, tap) = if served { ("served", "attached") } else { ("waiting", "error") };
        wait_for_sum(&agent, "xdp_imds_instances", &[("source", "file"), ("state", instance)], 1.0);
        wait_for_sum(&agent, "xdp_imds_taps", &[("state", tap)], 1.0);
    };
    let status = || {
        let mut command = Command::new(agent::binary().expect("the agent"));
        command.args(["status", "--run"]).arg(records.path().join("run"));
        let output = host.ns().output(&mut command).expect("a status");
        String::from_utf8(output.stdout).expect("text")
    };
    state(false);
    let output = status();
    let line = format!("tap0@{}  error", pod.name());
    assert!(output.contains(&line) && output.contains("ethtool -K PEER gro on"), "{output}");
    set_gro(&far, "eth0", true).expect("GRO");
    state(true);
    assert!(!status().contains(&line), "{}", status());
    set_gro(&far, "eth0", false).expect("no GRO");
    state(false);
}

#[privileged::test]
fn a_frame_with_a_foreign_mac_is_counted_as_a_mismatch() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    assert_eq!(curl(&scene, &[], "/v1/meta-data").0, 200);
    wait_for_sum(&agent, "xdp_imds_identity_mismatch_total", &[], 0.0);
    scene.guest.ns().ip("link set eth0 address 52:54:00:ff:ff:ff").expect("another MAC");
    let url = format!("http://{METADATA}/v1/meta-data");
    scene.guest.curl(&["--max-time", "2", &url], PATIENCE).expect_err("no answer to an impostor");
    let counted = sum(&families(&agent), "xdp_imds_identity_mismatch_total", &[]).expect("a count");
    assert!(counted >= 1.0, "{counted}");
    wait_for_sum(&agent, "xdp_imds_requests_total", &[], 1.0);
}

#[privileged::test]
fn metrics_cover_the_process_and_its_workers() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    assert_eq!(curl(&scene, &[], "/v1/meta-data").0, 200);
    let families = families(&agent);
    for (name, least) in [
        ("process_resident_memory_bytes", 1e6),
        ("process_virtual_memory_bytes", 1e6),
        ("process_open_fds", 10.0),
        ("process_max_fds", 1_024.0),
        ("process_threads", 2.0),
        ("process_start_time_seconds", 1.7e9),
        ("process_cpu_seconds_total", 0.0),
        ("xdp_imds_worker_seconds_total", 0.01),
        ("xdp_imds_frames_total", 1.0),
    ] {
        let found = sum(&families, name, &[]).unwrap_or_else(|error| panic!("{error:#}"));
        assert!(found >= least, "{name} is {found}");
    }
    assert!(!families.contains_key("xdp_imds_audit_lines_total"), "there is no audit log");
}
