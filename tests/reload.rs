//! An agent that is stopped gives whole answers first, and one whose configuration changes takes up what it can while it
//! serves.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument};
use support::books::total;
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::privileged;
use support::process;
use support::record::{Identity, replace};

const PATIENCE: Duration = Duration::from_secs(30);
/// Octets of an answer that takes a reader a while.
const LONG: usize = 1 << 20;

/// A node, a guest with much to read, and room for a configuration.
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

    /// An agent with this configuration; records and ports are in it.
    fn agent(&self, text: &str) -> Agent<'_> {
        self.configure(text);
        let mut words = agent::arguments(&self.room.path().join("records"), &[]);
        let records = words.iter().position(|word| word == "--records").expect("a word");
        words.drain(records..records + 2);
        words.extend(["--config".into(), self.room.path().join("agent.yaml").into()]);
        Agent::start_binary(&agent::binary().expect("the agent is built"), self.host.ns(), words)
            .expect("an agent")
    }

    /// A configuration with records and the guest's port, and `more`.
    fn usual(&self, records: &str, more: &str) -> String {
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

/// All that comes until the service closes.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("an end without a reset");
    rest
}

#[test]
fn a_guest_with_a_question_under_way_gets_a_whole_answer_from_an_agent_that_is_stopped() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new();
    let agent = node.agent(&node.usual("records", "drain_seconds: 600"));
    let mut reader = node.connect();
    reader.write_all(b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n").expect("said");
    let mut asking = node.connect();
    asking.write_all(b"GET /v1/meta-data HTTP/1.1\r\nHo").expect("said");
    let mut idle = node.connect();
    idle.write_all(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n").expect("said");
    eventually(PATIENCE, || {
        let held = total(&agent.metrics()?, "xdp_imds_stack_connections", None);
        ensure!(held == 3, "{held} connections have begun");
        Ok(())
    })
    .expect("the agent has heard all three");
    process::terminate(agent.pid()).expect("asked to stop");
    assert!(rest(&mut idle).starts_with(b"HTTP/1.1 404"), "and then closed");
    asking.write_all(b"st: x\r\n\r\n").expect("said");
    let answer = String::from_utf8(rest(&mut asking)).expect("text").to_ascii_lowercase();
    assert!(answer.starts_with("http/1.1 200") && answer.contains("\r\nconnection: close\r\n"), "{answer}");
    let answer = rest(&mut reader);
    assert!(answer.len() > LONG && answer.ends_with(&[b'x'; LONG]), "{} octets", answer.len());
    drop((reader, asking, idle));
    let (status, said) = agent.ended(PATIENCE).expect("then it ends");
    assert!(status.success() && !said.contains("cut off"), "{status}\n{said}");
}

#[test]
fn nobody_is_waited_for_longer_than_the_configuration_says_and_a_second_signal_ends_the_wait() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new();
    for (seconds, signals) in [(1, 1), (600, 2)] {
        let agent = node.agent(&node.usual("records", &format!("drain_seconds: {seconds}")));
        let mut stuck = node.connect();
        stuck.write_all(b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n").expect("said");
        assert_eq!(stuck.peek(&mut [0]).expect("the beginning of an answer"), 1);
        for _ in 0..signals {
            process::terminate(agent.pid()).expect("asked to stop");
            std::thread::sleep(Duration::from_millis(500));
        }
        let (status, said) = agent.ended(PATIENCE).expect("it ends");
        assert!(status.success() && said.contains("cut off"), "{seconds}: {status}\n{said}");
    }
    let agent = node.agent(&node.usual("records", "drain_seconds: 600"));
    assert!(agent.stop().expect("without guests it ends at once").success());
}

#[test]
fn what_can_change_does_and_a_bad_configuration_changes_nothing() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new();
    node.write_record(&node.room.path().join("others"), "y");
    let mut agent = node.agent(&node.usual("records", ""));
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
        (node.usual("nowhere", ""), "nowhere"),
        (node.usual("others", "drain_seconds: soon"), "drain_seconds"),
    ] {
        let before = reloads(&agent, "failed");
        node.configure(&bad);
        agent.reload().expect("asked");
        let refused = || {
            anyhow::ensure!(reloads(&agent, "failed") == before + 1);
            let said = agent.said();
            let last = said.lines().rfind(|line| line.contains("stays as it was")).unwrap_or_default();
            anyhow::ensure!(last.contains(error), "the log says {last:?}");
            Ok(())
        };
        eventually(PATIENCE, refused).expect("refused");
        assert!(node.user_data().expect("an answer").starts_with('x'), "{bad}");
    }

    node.configure(&node.usual("others", "workers: 2\nlog: debug"));
    agent.reload().expect("asked");
    eventually(PATIENCE, || {
        let data = node.user_data()?;
        anyhow::ensure!(data.starts_with('y'));
        anyhow::ensure!(agent.said().contains("workers: restart the agent"), "{}", agent.said());
        Ok(())
    })
    .expect("records of the other directory");
    assert_eq!(reloads(&agent, "done"), 1);
    lasting.write_all(b"GET /v1/meta-data HTTP/1.0\r\n\r\n").expect("said");
    assert!(rest(&mut lasting).starts_with(b"HTTP/1.1 200"), "connections outlast a reload");

    node.configure(&node.usual("others", "limits: {frames_per_second: 1, burst: 1}"));
    agent.reload().expect("asked");
    let starved = || {
        let fetched = node.guest.fetch("/v1/meta-data", Duration::from_secs(2));
        anyhow::ensure!(fetched.is_err(), "answered");
        Ok(())
    };
    eventually(PATIENCE, starved).expect("a frame a second answers nobody");
    node.configure(&node.usual("others", ""));
    agent.reload().expect("asked");
    eventually(PATIENCE, || node.user_data()).expect("and the usual limits everybody");

    let none = node.room.path().join("none");
    std::fs::create_dir(&none).expect("a directory");
    node.configure(&format!("records: {}\n", none.display()));
    agent.reload().expect("asked");
    let gone = || {
        let metrics = agent.metrics()?;
        let ports = metrics.samples().iter().find(|sample| sample.name == "xdp_imds_ports");
        anyhow::ensure!(ports.is_some_and(|sample| sample.value == 0.0));
        Ok(())
    };
    eventually(PATIENCE, gone).expect("the port is given up");
}
