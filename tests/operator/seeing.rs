//! An agent reports its state to probes, to scrapers and to operators.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use metadata_control::status::{AgentStatus, GuestState, GuestStatus as KnownGuest, PortState};
use support::agent::{self, Agent, PortArgument};
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::privileged;
use support::process::{self, Stopped};
use support::record::{Identity, replace};

const PATIENCE: Duration = Duration::from_secs(20);

/// A node, a guest and its record.
struct Scene {
    guest: Guest,
    host: Host,
    records: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let identity = Identity::of(0);
        identity.write(records.path(), 1).expect("a record");
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        Self { guest, host, records }
    }

    fn agent(&self) -> Agent<'_> {
        Agent::start(self.host.ns(), self.records.path(), &[self.port()]).expect("an agent")
    }

    fn port(&self) -> PortArgument {
        PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac)
    }

    /// Runs `xdp-imds status`; returns its exit code and output.
    fn run_status(&self, words: &[&str]) -> (i32, String) {
        let Output { status, stdout, stderr } = run_status(&self.records.path().join("run"), words);
        let said = [stdout, stderr].concat();
        (status.code().expect("an exit code"), String::from_utf8(said).expect("text"))
    }

    fn status(&self) -> (i32, AgentStatus) {
        let (code, text) = self.run_status(&["--json"]);
        (code, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }
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
    assert!(said.contains("no agent serves with the run directory"), "{said}");
}

#[test]
fn a_healthy_agent_reports_its_ports_and_guests() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let agent = scene.agent();
    let identity = scene.guest.identity();
    let (code, status) = scene.status();
    assert_eq!((code, &status.troubles), (0, &vec![]), "{status:?}");
    assert_eq!((status.pid, status.live, status.ready, status.identities), (agent.pid(), true, true, 1));
    assert_eq!(status.ports.counts[&PortState::Attached], 1);
    assert_eq!((status.workers.len(), status.workers[0].device.is_empty()), (1, false));
    let (code, table) = scene.run_status(&[]);
    assert!(code == 0 && table.contains("healthy") && table.contains("1 served (file)"), "{table}");

    let url = format!("http://{METADATA}/v1/meta-data");
    scene.guest.curl(&[&url], PATIENCE).expect("an answer");
    for name in
        [scene.guest.host_tap().name(), &identity.mac.to_string(), &identity.hostname, &identity.instance_id]
    {
        let (code, text) = scene.run_status(&[name, "--json"]);
        let guests: Vec<KnownGuest> =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!((code, guests.len()), (0, 1), "{name}: {text}");
        assert_eq!(guests[0].state, GuestState::Served, "{name}");
        assert_eq!(guests[0].vm.as_ref(), Some(&identity.hostname), "{name}");
        assert!(guests[0].held.is_some() && guests[0].slot.is_some(), "{name}: {text}");
    }
    let (code, said) = scene.run_status(&["nobody"]);
    assert!(
        code == 7 && said.contains("no guest is known as nobody") && said.contains("xdp-imds ls"),
        "{said}"
    );
    agent.stop().expect("the agent stops");
    let (code, _) = scene.run_status(&[]);
    assert_eq!(code, 5, "the agent has ended");
}

#[test]
fn a_refused_record_is_reported_until_it_is_corrected() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let _agent = scene.agent();
    let path = scene.guest.identity().path(scene.records.path());
    replace(&path, "schema: vmrecord/9\n").expect("a bad record");
    let degraded = eventually(PATIENCE, || {
        let (code, status) = scene.status();
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
        let (code, status) = scene.status();
        anyhow::ensure!(code == 0, "{code}: {status:?}");
        Ok(())
    });
    healthy.expect("the status is healthy again");
}

#[test]
fn an_absent_port_is_reported_as_waiting_and_not_as_trouble() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let absent = PortArgument { ifname: "tap9999".into(), mac: None, ..scene.port() };
    let _agent =
        Agent::start(scene.host.ns(), scene.records.path(), &[scene.port(), absent]).expect("an agent");
    let (code, status) = scene.status();
    assert_eq!((code, status.ports.counts[&PortState::Waiting]), (0, 1), "{status:?}");
    assert_eq!((status.ports.listed[0].name.as_str(), status.ports.listed.len()), ("tap9999", 1));
}

#[test]
fn the_metrics_address_serves_probes_and_metrics_but_no_status() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let agent = scene.agent();
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/v1/status", 404)] {
        assert_eq!(agent.ask(path).expect("an answer").0, status, "{path}");
    }
}

#[test]
fn healthz_names_a_worker_while_it_is_stuck() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
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
    assert!(body.starts_with("worker 0 has been silent for ") && body.lines().count() == 1, "{body}");
    assert!(begun.elapsed() > Duration::from_secs(3), "reported after {:?}", begun.elapsed());
    assert_eq!(agent.ask("/readyz").expect("an answer").0, 503);
    assert_eq!(
        agent.ask("/metrics").expect("an answer").0,
        200,
        "the metrics published last must still be served"
    );
    let (code, status) = scene.status();
    assert!(code == 1 && !status.live, "{status:?}");
    drop(stopped);
    let answered = eventually(PATIENCE, || {
        let (status, body) = agent.ask("/healthz")?;
        anyhow::ensure!(status == 200, "{body}");
        Ok(())
    });
    answered.expect("the worker continues");
}

#[test]
fn a_stopped_process_answers_no_probe() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
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
