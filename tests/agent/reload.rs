//! An agent completes its answers before it stops, and applies a changed configuration while it serves.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument};
use support::eventually;
use support::exposition::total;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::record::{Identity, replace};
use support::{privileged, process};

const PATIENCE: Duration = Duration::from_secs(30);
/// Length of an answer that takes its reader some time, in bytes.
const LONG: usize = 1 << 20;

/// A node, a guest with large user-data, and a directory for a configuration.
struct Node {
    guest: Guest,
    host: Host,
    room: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let room = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guest = Guest::boot(&host, &Spec::of(&Identity::of(0))).expect("a guest");
        let node = Self { guest, host, room };
        node.write_record(&node.room.path().join("records"), "x");
        node
    }

    fn write_record(&self, directory: &Path, letter: &str) {
        std::fs::create_dir_all(directory).expect("a directory");
        let identity = self.guest.identity();
        let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
        record["user_data"] = json!({"text": letter.repeat(LONG)});
        record["serve"] = json!({"limits": {"user_data": LONG}});
        replace(&identity.path(directory), &record.to_string()).expect("a record file");
    }

    fn configure(&self, text: &str) {
        replace(&self.room.path().join("agent.yaml"), text).expect("a configuration");
    }

    /// Starts an agent with the configuration `text`, which names records and ports.
    fn agent(&self, text: &str) -> Agent<'_> {
        self.configure(text);
        let mut words = agent::arguments(&self.room.path().join("records"), &[]);
        let records = words.iter().position(|word| word == "--records").expect("a word");
        words.drain(records..records + 2);
        words.extend(["--config".into(), self.room.path().join("agent.yaml").into()]);
        Agent::start_binary(&agent::binary().expect("the agent is built"), self.host.ns(), words)
            .expect("an agent")
    }

    /// A configuration with `records`, the guest's port and `more`.
    fn config_text(&self, records: &str, more: &str) -> String {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        let (ifname, mac) = (port.ifname, self.guest.identity().mac);
        let records = self.room.path().join(records);
        format!("records: {}\nports:\n- {{ifname: {ifname}, mac: \"{mac}\"}}\n{more}\n", records.display())
    }

    fn connect(&self) -> TcpStream {
        let stream = self.guest.ns().run_in(|| {
            TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), PATIENCE).expect("a connection")
        });
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    }

    fn user_data(&self) -> anyhow::Result<String> {
        let fetched = self.guest.fetch("/v1/user-data", PATIENCE)?;
        anyhow::ensure!(fetched.status == 200, "answered {}", fetched.status);
        Ok(fetched.text())
    }
}

/// All bytes until the service closes.
fn read_to_end_of(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("an end without a reset");
    rest
}

#[privileged::test]
fn a_stopping_agent_completes_the_answers_to_requests_in_progress() {
    let node = Node::new();
    let agent = node.agent(&node.config_text("records", "drain_seconds: 600"));
    let mut reader = node.connect();
    reader.write_all(b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
    let mut asking = node.connect();
    asking.write_all(b"GET /v1/meta-data HTTP/1.1\r\nHo").expect("sent");
    let mut idle = node.connect();
    idle.write_all(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
    eventually(PATIENCE, || {
        let held = total(&agent.metrics()?, "xdp_imds_stack_connections", None);
        ensure!(held == 3, "{held} connections have begun");
        Ok(())
    })
    .expect("the agent has all three connections");
    process::terminate(agent.pid()).expect("a signal");
    assert!(
        read_to_end_of(&mut idle).starts_with(b"HTTP/1.1 404"),
        "an idle connection must end after its answer"
    );
    asking.write_all(b"st: x\r\n\r\n").expect("sent");
    let answer = String::from_utf8(read_to_end_of(&mut asking)).expect("text").to_ascii_lowercase();
    assert!(answer.starts_with("http/1.1 200") && answer.contains("\r\nconnection: close\r\n"), "{answer}");
    let answer = read_to_end_of(&mut reader);
    assert!(answer.len() > LONG && answer.ends_with(&[b'x'; LONG]), "{} bytes", answer.len());
    drop((reader, asking, idle));
    let (status, said) = agent.ended(PATIENCE).expect("the agent ends");
    assert!(status.success() && !said.contains("cut off"), "{status}\n{said}");
}

#[privileged::test]
fn the_configured_time_or_a_second_signal_ends_draining() {
    let node = Node::new();
    for (seconds, signals) in [(1, 1), (600, 2)] {
        let agent = node.agent(&node.config_text("records", &format!("drain_seconds: {seconds}")));
        let mut stuck = node.connect();
        stuck.write_all(b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
        assert_eq!(stuck.peek(&mut [0]).expect("the beginning of an answer"), 1);
        for _ in 0..signals {
            process::terminate(agent.pid()).expect("a signal");
            std::thread::sleep(Duration::from_millis(500));
        }
        let (status, said) = agent.ended(PATIENCE).expect("the agent ends");
        assert!(status.success() && said.contains("cut off"), "{seconds}: {status}\n{said}");
    }
    let agent = node.agent(&node.config_text("records", "drain_seconds: 600"));
    assert!(agent.stop().expect("without connections the agent ends at once").success());
}

#[privileged::test]
fn a_reload_applies_what_it_can_and_a_bad_configuration_changes_nothing() {
    let node = Node::new();
    node.write_record(&node.room.path().join("others"), "y");
    let mut agent = node.agent(&node.config_text("records", ""));
    assert!(node.user_data().expect("an answer").starts_with('x'));
    let mut lasting = node.connect();

    let reloads = |agent: &Agent<'_>, outcome: &str| {
        let metrics = agent.metrics().expect("metrics");
        let mut samples = metrics.samples().iter();
        let sample = samples.find(|sample| {
            sample.name == "xdp_imds_config_reloads_total" && sample.label("outcome") == Some(outcome)
        });
        sample.expect("a sample").value as u64
    };
    for (bad, error) in [
        ("colour: red\n".to_owned(), "colour"),
        (node.config_text("nowhere", ""), "nowhere"),
        (node.config_text("others", "drain_seconds: soon"), "drain_seconds"),
    ] {
        let before = reloads(&agent, "failed");
        node.configure(&bad);
        agent.reload().expect("a reload");
        let refused = || {
            anyhow::ensure!(reloads(&agent, "failed") == before + 1);
            let said = agent.log();
            let last =
                said.lines().rfind(|line| line.contains("configuration stays unchanged")).unwrap_or_default();
            anyhow::ensure!(last.contains(error), "the last refusal does not name `{error}`: {last:?}");
            Ok(())
        };
        eventually(PATIENCE, refused).expect("refused");
        assert!(node.user_data().expect("an answer").starts_with('x'), "{bad}");
    }

    node.configure(&node.config_text("others", "workers: 2\nlog: debug"));
    agent.reload().expect("a reload");
    eventually(PATIENCE, || {
        let data = node.user_data()?;
        anyhow::ensure!(data.starts_with('y'));
        anyhow::ensure!(agent.log().contains("workers keeps its old value until"), "{}", agent.log());
        Ok(())
    })
    .expect("records of the other directory");
    assert_eq!(reloads(&agent, "done"), 1);
    lasting.write_all(b"GET /v1/meta-data HTTP/1.0\r\n\r\n").expect("sent");
    assert!(read_to_end_of(&mut lasting).starts_with(b"HTTP/1.1 200"), "a connection must outlast a reload");

    node.configure(&node.config_text("others", "limits: {frames_per_second: 1, burst: 1}"));
    agent.reload().expect("a reload");
    let starved = || {
        let fetched = node.guest.fetch("/v1/meta-data", Duration::from_secs(2));
        anyhow::ensure!(fetched.is_err(), "answered");
        Ok(())
    };
    eventually(PATIENCE, starved).expect("one frame per second must not suffice for an answer");
    node.configure(&node.config_text("others", ""));
    agent.reload().expect("a reload");
    eventually(PATIENCE, || node.user_data()).expect("an answer with the default limits");

    let none = node.room.path().join("none");
    std::fs::create_dir(&none).expect("a directory");
    node.configure(&format!("records: {}\n", none.display()));
    agent.reload().expect("a reload");
    let gone = || {
        let metrics = agent.metrics()?;
        let ports = metrics.samples().iter().find(|sample| sample.name == "xdp_imds_ports");
        anyhow::ensure!(ports.is_some_and(|sample| sample.value == 0.0));
        Ok(())
    };
    eventually(PATIENCE, gone).expect("the port is detached");
}

#[privileged::test]
fn a_refused_configuration_and_a_moved_directory_are_problems_until_they_are_mended() {
    let node = Node::new();
    let path = |name: &str| node.room.path().join(name);
    node.write_record(&path("vms"), "x");
    let good = node.config_text("vms", "");
    let mut agent = node.agent(&good);
    let run = path("records").join("run");
    let eventually_says = |text: Option<&str>| {
        let look = || {
            let mut command = std::process::Command::new(agent::binary()?);
            let output = command.args(["status", "--json", "--run"]).arg(&run).output()?;
            let status: Value = serde_json::from_slice(&output.stdout)?;
            let troubles = status["troubles"].to_string();
            match text {
                Some(text) => {
                    ensure!(output.status.code() == Some(1) && troubles.contains(text), "{troubles}")
                }
                None => ensure!(output.status.code() == Some(0), "{troubles}"),
            }
            Ok(())
        };
        eventually(PATIENCE, look).unwrap_or_else(|error| panic!("{text:?}: {error:#}"));
    };
    eventually_says(None);
    for (bad, word) in [
        (format!("{good}limit: {{}}\n"), "limit"),
        (format!("{good}log: verbose\n"), "verbose"),
        ("ports: []\n".to_owned(), "no records to serve"),
        (node.config_text("nowhere", ""), "nowhere"),
    ] {
        node.configure(&bad);
        agent.reload().expect("a signal");
        eventually_says(Some("the configuration was refused at the last reload"));
        eventually_says(Some(word));
    }
    node.configure(&good);
    agent.reload().expect("a signal");
    eventually_says(None);

    std::fs::rename(path("vms"), path("away")).expect("renamed");
    eventually_says(Some("was moved or deleted"));
    assert!(node.user_data().expect("an answer").starts_with('x'), "the last records stay in force");
    std::fs::rename(path("away"), path("vms")).expect("renamed");
    eventually_says(None);
    assert!(agent.eventually_logs("is back: its records are read again"), "{}", agent.log());
}
