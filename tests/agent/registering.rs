//! One API call registers a VM before it boots. The registration outlives a killed or replaced agent.

use anyhow::ensure;
use metadata_control::status::{AgentStatus, StatusRequest, StatusResponse, ask};
use serde_json::{Value, json};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::agent::Agent;
use support::bpffs::Bpffs;
use support::eventually;
use support::exposition::total;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};
use support::{agent, privileged};

/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit of one request of a guest.
const REQUEST: Duration = Duration::from_secs(5);
const PATH: &str = "/v1/user-data";
/// A group without members.
const GROUP: &str = "60123";

/// A node with agents that share their pins and their registered instances.
struct Node {
    room: tempfile::TempDir,
    bpffs: Bpffs,
    host: Host,
}

impl Node {
    fn new() -> Self {
        let room = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(room.path().join("records")).expect("a directory");
        Self { room, bpffs: Bpffs::mount().expect("a bpffs"), host: Host::new().expect("a node") }
    }

    fn records(&self) -> PathBuf {
        self.room.path().join("records")
    }

    fn run(&self) -> PathBuf {
        self.records().join("run")
    }

    /// Starts an agent with a directory of records.
    fn agent(&self, more: &[&str]) -> Agent<'_> {
        let mut words = agent::arguments_with_pins(&self.records(), &[], &self.bpffs.pins());
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary().expect("the agent is built"), self.host.ns(), words)
            .expect("an agent")
    }

    /// Starts an agent with a configuration that names no records.
    fn agent_with_config(&self, configuration: &str) -> Agent<'_> {
        let file = self.room.path().join("agent.yaml");
        replace(&file, configuration).expect("a configuration");
        let mut words = agent::arguments_with_pins(&self.records(), &[], &self.bpffs.pins());
        let records = words.iter().position(|word| word == "--records").expect("a word");
        words.drain(records..records + 2);
        words.extend(["--config".into(), file.into()]);
        Agent::start_binary(&agent::binary().expect("the agent is built"), self.host.ns(), words)
            .expect("an agent")
    }

    /// Sends a request to the agent's API; returns status and body.
    fn ask(&self, method: &str, path: &str, fields: &[&str], body: &str) -> (u16, Value) {
        let fields: Vec<_> = fields.iter().map(|&field| field.to_owned()).collect();
        let path = format!("/v1/instances{path}");
        let question =
            StatusRequest { method, path: &path, fields: &fields, body: body.as_bytes(), timeout: PATIENCE };
        let StatusResponse { status, body } = ask(&self.run(), &question).expect("an answer");
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// Runs a command of `xdp-imds`; returns its exit code and output.
    fn command(&self, words: &[&str]) -> (i32, String) {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        let Output { status, stdout, stderr } =
            command.args(words).arg("--run").arg(self.run()).output().expect("it runs");
        let said = String::from_utf8([stdout, stderr].concat()).expect("text");
        (status.code().expect("an exit code"), said)
    }

    fn status(&self) -> AgentStatus {
        let (_, text) = self.command(&["status", "--json"]);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

/// A guest's record with the name of its tap.
fn record(identity: &Identity, generation: u64) -> Value {
    let mut record: Value = serde_json::from_str(&identity.record(generation)).expect("a record");
    record["network"]["nics"][0]["port"] = json!({"ifname": Host::tap_name(identity)});
    record
}

/// Boots a guest on its tap; creates the tap unless it exists.
fn boot(node: &Node, identity: &Identity) -> Guest {
    Guest::boot(&node.host, &Spec::of(identity)).expect("a guest")
}

fn expect_user_data(guest: &Guest, text: &str) -> anyhow::Result<()> {
    let fetched = guest.fetch(PATH, REQUEST)?;
    anyhow::ensure!(fetched.text() == text, "{} {}", fetched.status, fetched.text());
    Ok(())
}

#[privileged::test]
fn a_vm_is_registered_with_one_call_before_it_boots() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let _agent = node.agent_with_config("api: {}");
    let tap = node.host.tap(&identity, Shape::default()).expect("a tap");
    let put = |generation, query: &str| {
        let mut record = record(&identity, generation);
        record["user_data"] = json!({"text": format!("number {generation}\n")});
        node.ask("PUT", &format!("/lab/vm-0{query}"), &[], &record.to_string())
    };
    let (status, instance) = put(1, "?wait=attached&timeout=20s");
    assert_eq!((status, &instance["state"]), (201, &json!("served")), "{instance:#}");
    assert_eq!(instance["ports"][0]["port"], "tap0");
    let ns = Namespace::new("guest").expect("a namespace");
    let guest = Guest::boot_on(tap, ns, &Spec::of(&identity)).expect("a guest");
    // The tap is attached, so the first request is answered.
    expect_user_data(&guest, "number 1\n").expect("the guest's own data");
    let (status, updated) = put(2, "");
    assert!(status == 200 && updated["etag"] != instance["etag"], "{status} {updated:#}");
    eventually(PATIENCE, || expect_user_data(&guest, "number 2\n")).expect("the update");
    let (status, same) = put(2, "?wait=attached");
    assert_eq!((status, &same["etag"]), (200, &updated["etag"]), "an equal record must not change the tag");
    let field = format!("If-Match: {}", instance["etag"].as_str().expect("a tag"));
    let (status, problem) = node.ask("PUT", "/lab/vm-0", &[&field], &record(&identity, 3).to_string());
    assert_eq!(status, 412, "{problem:#}");
    let (status, shown) = node.ask("GET", "/lab/vm-0", &[], "");
    assert_eq!((status, &shown["record"]["generation"]), (200, &json!(2)));
    assert!(!shown.to_string().contains("number 2"), "the API must not show user-data: {shown:#}");
    assert_eq!(node.ask("DELETE", "/lab/vm-0", &[], "").0, 204);
    eventually(PATIENCE, || {
        anyhow::ensure!(node.status().identities == 0);
        Ok(())
    })
    .expect("the instance is removed");
}

#[privileged::test]
fn a_waiting_call_is_answered_when_the_tap_appears_or_at_its_timeout() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let _agent = node.agent(&[]);
    let text = record(&identity, 1).to_string();
    let (status, problem) = node.ask("PUT", "/vm?wait=attached&timeout=500ms", &[], &text);
    assert_eq!((status, &problem["registered"]["state"]), (504, &json!("waiting")), "{problem:#}");
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains("no such interface")));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| node.ask("PUT", "/vm?wait=attached&timeout=30s", &[], &text));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!waits.is_finished(), "answered without a tap");
        let guest = boot(&node, &identity);
        let (status, instance) = waits.join().expect("an answer");
        assert_eq!((status, &instance["state"]), (200, &json!("served")), "{instance:#}");
        guest.fetch_own(PATH, REQUEST).expect("the guest's own data");
    });
}

#[privileged::test]
fn a_registered_record_shadows_a_file_and_each_replaces_the_other_without_a_gap() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let guest = boot(&node, &identity);
    let mut file = record(&identity, 1);
    file["user_data"] = json!({"text": "file"});
    replace(&identity.path(&node.records()), &file.to_string()).expect("a record file");
    let agent = node.agent(&[]);
    eventually(PATIENCE, || expect_user_data(&guest, "file")).expect("the data of the file");
    let mut registered = record(&identity, 2);
    registered["user_data"] = json!({"text": "api"});
    let failed = AtomicBool::new(false);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let fetched = guest.fetch(PATH, REQUEST);
                let good =
                    fetched.as_ref().is_ok_and(|fetched| matches!(fetched.text().as_str(), "file" | "api"));
                if !good {
                    failed.store(true, Ordering::Relaxed);
                    return eprintln!("{fetched:?}");
                }
            }
        });
        for _ in 0..3 {
            assert_eq!(node.ask("PUT", "/vm?wait=attached", &[], &registered.to_string()).0, 201);
            eventually(PATIENCE, || expect_user_data(&guest, "api")).expect("the registered data");
            let status = node.status();
            let [shadowed] = status.shadowed.as_slice() else { panic!("{status:?}") };
            assert_eq!((shadowed.record.as_str(), shadowed.by.as_str()), ("guest-0.yaml", "api/vm"));
            assert!(status.troubles.is_empty(), "{status:?}");
            let metrics = agent.metrics().expect("metrics");
            let count = |source: &str, state: &str| {
                let is = |name, value| move |s: &&agent::Sample| s.label(name) == Some(value);
                let all = metrics.samples().iter().filter(|s| s.name == "xdp_imds_instances");
                all.filter(is("source", source)).find(is("state", state)).map(|sample| sample.value)
            };
            assert_eq!((count("api", "served"), count("file", "shadowed")), (Some(1.0), Some(1.0)));
            assert_eq!(count("file", "served"), Some(0.0));
            assert_eq!(node.ask("DELETE", "/vm", &[], "").0, 204);
            eventually(PATIENCE, || expect_user_data(&guest, "file")).expect("the data of the file again");
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(!failed.load(Ordering::Relaxed), "a request failed");
}

#[privileged::test]
fn a_vm_that_claims_the_mac_and_port_of_another_is_refused() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let guest = boot(&node, &identity);
    replace(&identity.path(&node.records()), &record(&identity, 1).to_string()).expect("a record file");
    let _agent = node.agent(&[]);
    eventually(PATIENCE, || guest.fetch_own(PATH, REQUEST)).expect("the guest's own data");
    let mut other = record(&Identity::of(1), 1);
    other["network"]["nics"][0]["mac"] = identity.mac.to_string().into();
    other["network"]["nics"][0]["port"] = json!({"ifname": "tap0"});
    let (status, problem) = node.ask("PUT", "/thief", &[], &other.to_string());
    assert_eq!((status, &problem["conflict"]), (409, &json!({"source": "file", "name": "guest-0.yaml"})));
    other["network"]["nics"][0]["port"] = json!({"ifname": "tap1"});
    assert_eq!(node.ask("PUT", "/honest", &[], &other.to_string()).0, 201, "the same MAC on another port");
    let (status, problem) = node.ask("PUT", "/twice", &[], &other.to_string());
    assert_eq!((status, &problem["conflict"]["name"]), (409, &json!("honest")), "{problem:#}");
    guest.fetch_own(PATH, REQUEST).expect("the guest's own data as before");
}

#[privileged::test]
fn only_one_of_several_clients_changes_the_same_version() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let _agent = node.agent(&[]);
    let (_, first) = node.ask("PUT", "/vm", &[], &record(&identity, 1).to_string());
    let field = format!("If-Match: {}", first["etag"].as_str().expect("a tag"));
    let mut statuses = std::thread::scope(|scope| {
        let put = |n| node.ask("PUT", "/vm", &[&field], &record(&identity, n).to_string()).0;
        let clients: Vec<_> = (2..10).map(|n| scope.spawn(move || put(n))).collect();
        clients.into_iter().map(|client| client.join().expect("an answer")).collect::<Vec<_>>()
    });
    statuses.sort_unstable();
    assert_eq!(statuses, [&[200][..], &[412; 7]].concat());
}

#[privileged::test]
fn registered_instances_outlive_a_killed_agent() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let agent = node.agent_with_config("api: {}");
    let guest = boot(&node, &identity);
    let put = |name, n| node.ask("PUT", name, &[], &record(&Identity::of(n), 1).to_string());
    let (_, before) = put("/lab/vm-0", 0);
    put("/vm-1", 1);
    assert_eq!(node.ask("DELETE", "/vm-1", &[], "").0, 204);
    // The agent is killed at once, because an answer means that the change is on disk.
    agent.kill().expect("killed");
    let again = node.agent_with_config("api: {}");
    eventually(PATIENCE, || guest.fetch_own(PATH, REQUEST)).expect("the guest's own data");
    let (_, listed) = node.ask("GET", "?source=api", &[], "");
    let [after] = listed["instances"].as_array().expect("a list").as_slice() else { panic!("{listed:#}") };
    assert_eq!((&after["name"], &after["etag"]), (&before["name"], &before["etag"]));
    let kept = node.records().join("state/instances");
    for file in std::fs::read_dir(&kept).expect("a directory") {
        let mode = file.expect("a file").metadata().expect("there").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o600);
    }
    drop(again);
}

#[privileged::test]
fn registered_instances_and_ports_move_to_an_agent_that_takes_over() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let first = node.agent(&[]);
    let guest = boot(&node, &identity);
    assert_eq!(node.ask("PUT", "/vm-0?wait=attached", &[], &record(&identity, 1).to_string()).0, 201);
    let second = node.agent(&["--takeover"]);
    first.ended(Duration::from_secs(60)).expect("the first agent ends");
    guest.fetch_own(PATH, REQUEST).expect("the guest's own data");
    let (status, instance) = node.ask("GET", "/vm-0", &[], "");
    assert_eq!((status, &instance["state"]), (200, &json!("served")), "{instance:#}");
    let mut changed = record(&identity, 2);
    changed["user_data"] = json!({"text": "changed"});
    assert_eq!(
        node.ask("PUT", "/vm-0", &[], &changed.to_string()).0,
        200,
        "the second agent must accept changes"
    );
    eventually(PATIENCE, || expect_user_data(&guest, "changed")).expect("the change");
    drop(second);
}

#[privileged::test]
fn register_with_wait_waits_for_an_agent_that_is_still_starting() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let file = node.room.path().join("vm.yaml");
    replace(&file, &record(&identity, 1).to_string()).expect("a record");
    let _tap = node.host.tap(&identity, Shape::default()).expect("a tap");
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    command.args(["register", "--wait", "--timeout", "60", "-f"]).arg(&file).arg("--run").arg(node.run());
    let mut early = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    assert_eq!(early.try_wait().expect("a state"), None, "there is no agent yet");
    let _agent = node.agent_with_config("api: {}");
    let Output { status, stdout, stderr } = early.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    assert!(status.code() == Some(0) && said.contains("guest-0: registered, served"), "{status} {said}");
}

#[privileged::test]
fn the_commands_report_their_outcome_and_a_remedy() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let file = node.room.path().join("vm.yaml");
    let file_name = file.to_str().expect("text");
    std::fs::write(node.room.path().join("user-data"), "beside the record").expect("a file");
    let mut record_text = record(&identity, 1);
    record_text["user_data"] = json!({"source": {"file": "user-data"}});
    replace(&file, &record_text.to_string()).expect("a record");
    let (code, said) = node.command(&["register", "-f", file_name]);
    assert!(code == 5 && said.contains("xdp-imds serve"), "{code} {said}");
    let _agent = node.agent_with_config("api: {instances: 2}");
    let (code, said) = node.command(&["register", "-f", file_name, "--wait", "--timeout", "500ms"]);
    assert!(code == 3 && said.contains("no such interface"), "{code} {said}");
    let guest = boot(&node, &identity);
    let (code, said) = node.command(&["register", "-f", file_name, "--wait", "--timeout", "20"]);
    assert!(code == 0 && said.contains("guest-0: unchanged, served"), "{code} {said}");
    expect_user_data(&guest, "beside the record").expect("the data of the file");
    let mut changed = record_text.clone();
    changed["generation"] = json!(2);
    let mut other_vm = changed.clone();
    other_vm["vm"]["uuid"] = json!("11111111-2222-4333-8444-555555555555");
    let again = node.room.path().join("again.yaml");
    for (text, change) in
        [(&changed, "replaced"), (&other_vm, "replaced_another"), (&record_text, "replaced_another")]
    {
        replace(&again, &text.to_string()).expect("a record");
        let (code, said) = node.command(&["register", "-f", again.to_str().expect("text"), "--json"]);
        let answer: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!((code, answer["change"].as_str()), (0, Some(change)), "{said}");
    }
    let (code, said) = node.command(&["register", "-f", file_name]);
    assert!(code == 0 && said.contains("guest-0: unchanged, "), "{code} {said}");
    replace(&again, &other_vm.to_string()).expect("a record");
    let (code, said) = node.command(&["register", "-f", again.to_str().expect("text")]);
    assert!(code == 0 && said.contains("guest-0: replaced the record of another VM, "), "{code} {said}");
    let (code, said) = node.command(&["register", "-f", file_name, "--wait", "--timeout", "20"]);
    assert!(
        code == 0 && said.contains("guest-0: replaced the record of another VM, served"),
        "{code} {said}"
    );
    let (code, said) = node.command(&["register", "-f", file_name, "--new"]);
    assert!(code == 4 && said.contains("If-None-Match"), "{code} {said}");
    let (code, said) = node.command(&["register", "-f", file_name, "--name", "other", "--json"]);
    let problem: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &problem["conflict"]["name"]), (4, &json!("guest-0")), "{said}");
    let (code, said) = node.command(&["ls"]);
    assert!(code == 0 && said.lines().any(|line| line == "guest-0  api     served  guest-0  tap0"), "{said}");
    let (code, said) = node.command(&["get", "guest-0"]);
    assert!(code == 0 && said.contains("withheld    user_data"), "{said}");
    // A shell takes the quotes of a tag away.
    let tag = said.lines().find_map(|line| line.strip_prefix("etag")).expect("a tag").trim().to_owned();
    for (tag, expected) in [("\"0\"", 4), ("0", 4), (&*tag, 0), (tag.trim_matches('"'), 0)] {
        let (code, said) = node.command(&["register", "-f", file_name, "--if-match", tag]);
        assert_eq!(code, expected, "{tag}: {said}");
        assert!(expected == 0 || said.contains("--if-match"), "{said}");
    }
    // The limit admits a second instance but not a third.
    for (n, expected) in [(1, 0), (2, 1)] {
        replace(&file, &record(&Identity::of(n), 1).to_string()).expect("a record");
        let (code, said) = node.command(&["register", "-f", file_name]);
        assert!(code == expected && (n == 1 || said.contains("at most 2 instances")), "{code} {said}");
    }
    let (code, said) = node.command(&["rm", "guest-0"]);
    assert_eq!((code, &*said), (0, "guest-0: removed\n"));
    let (code, said) = node.command(&["rm", "guest-0"]);
    assert!(code == 7 && said.contains("no instance of the source api is called `guest-0`"), "{code} {said}");
    let (code, said) = node.command(&["rm", "guest-0", "--json"]);
    let problem: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, problem["status"].as_u64()), (7, Some(404)), "{said}");
    assert_eq!(node.command(&["rm", "guest-0", "--if-match", "0"]).0, 4);
    for name in ["guest-0", "no name"] {
        let (code, said) = node.command(&["rm", name, "--force"]);
        assert_eq!((code, said), (0, format!("{name}: nothing to remove, no instance has this name\n")));
    }
    for words in [
        &["get", "guest-0"][..],
        &["clear", "guest-0"],
        &["status", "guest-0"],
        &["trace", "guest-0", "--seconds", "1"],
        &["top", "guest-0", "--once"],
        &["top", "guest-0", "--json"],
    ] {
        let (code, said) = node.command(words);
        assert!(code == 7 && said.contains("guest-0"), "{words:?}: {code} {said}");
    }
}

#[privileged::test]
fn each_verb_prints_one_document_for_a_call_with_json() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let _agent = node.agent_with_config("api: {}");
    let file = node.room.path().join("vm.yaml");
    replace(&file, &record(&identity, 1).to_string()).expect("a record");
    let file = file.to_str().expect("text");
    let (removed, name) = ("/removed", json!("guest-0"));
    for (words, at, expected) in [
        (&["register", "-f", file][..], "/change", json!("registered")),
        (&["register", "-f", file], "/change", json!("unchanged")),
        (&["register", "-f", file, "--name", "other"], "/conflict/name", name.clone()),
        (&["ls"], "/0/name", name.clone()),
        (&["get", "guest-0"], "/name", name.clone()),
        (&["get", "nobody"], "/status", json!(404)),
        (&["clear", "guest-0"], "/cleared", json!(true)),
        (&["rm", "guest-0"], removed, json!(true)),
        (&["rm", "guest-0"], "/status", json!(404)),
        (&["rm", "guest-0", "--force"], removed, json!(false)),
    ] {
        let (_, said) = node.command(&[words, &["--json"]].concat());
        let document: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
        assert_eq!(document.pointer(at), Some(&expected), "{words:?}: {said}");
    }
}

#[privileged::test]
fn a_name_that_nothing_has_is_refused_in_plain_words() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let mut record = record(&identity, 1);
    record["vm"]["name"] = json!("Windows Server");
    replace(&node.records().join("a b.json"), &record.to_string()).expect("a record");
    let _agent = node.agent(&[]);
    for name in ["nobody", "", "no name", "a//b", "../x", "/etc/x", "hook/x", "a?b", "a%b", "ü"] {
        for words in [
            &["get", name][..],
            &["get", name, "--source", "api"],
            &["get", name, "--source", "file"],
            &["clear", name],
            &["clear", name, "--source", "hook"],
            &["rm", name],
        ] {
            let (code, said) = node.command(words);
            assert!(
                code == 7 && said.contains("no instance") && said.contains(&format!("is called `{name}`")),
                "{words:?}: {code} {said}"
            );
            for word in ["404", "400", "GET", "bytes", "answer"] {
                assert!(!said.contains(word), "{words:?}: {said}");
            }
        }
    }
    // A file and a VM may have names that no registration can have.
    for name in ["a b.json", "file/a b.json", "Windows Server"] {
        let (code, said) = node.command(&["get", name]);
        assert!(code == 0 && said.contains("vm          Windows Server"), "{name}: {code} {said}");
    }
}

/// Runs curl on a control socket as a user whose only group is `gid`; returns the status.
fn curl(run: &Path, gid: &str, words: &[&str]) -> String {
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid",
        "65534",
        "--regid",
        gid,
        "--clear-groups",
        "curl",
        "-s",
        "-o",
        "-",
        "-w",
        "\n%{http_code}",
    ]);
    command.arg("--unix-socket").arg(run.join("control.sock")).args(words);
    let Output { stdout, .. } = command.output().expect("setpriv and curl are installed");
    String::from_utf8_lossy(&stdout).lines().last().unwrap_or_default().to_owned()
}

#[privileged::test]
fn a_permitted_group_registers_vms_and_reads_no_secrets() {
    let (node, identity) = (Node::new(), Identity::of(0));
    for path in [node.room.path().to_owned(), node.records()] {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).expect("a mode");
    }
    let agent = node.agent_with_config(&format!("api: {{group: \"{GROUP}\"}}"));
    let file = node.room.path().join("record");
    let write = |record: &Value| {
        std::fs::write(&file, record.to_string()).expect("written");
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).expect("a mode");
    };
    let body = file.to_str().expect("text");
    let url = "http://localhost/v1/instances/vm-0";
    let mut record = record(&identity, 1);
    write(&record);
    assert_eq!(curl(&node.run(), "65534", &["-T", body, url]), "000", "other groups must be refused");
    assert_eq!(curl(&node.run(), GROUP, &["-T", body, url]), "201");
    assert_eq!(curl(&node.run(), GROUP, &[url]), "200");
    assert!(agent.eventually_logs("registered by=user 65534, group 60123"), "{}", agent.log());
    let trace = "http://localhost/v1/trace?target=tap0&payload=true";
    assert_eq!(curl(&node.run(), GROUP, &["-m", "5", trace]), "403", "payloads may contain tokens");
    record["sinks"] = json!({"ready": "file:/etc/profile"});
    write(&record);
    assert_eq!(
        curl(&node.run(), GROUP, &["-T", body, url]),
        "403",
        "the agent would write to a file of root"
    );
    assert_eq!(node.ask("PUT", "/vm-0", &[], &record.to_string()).0, 200, "root may set a sink");
}

#[privileged::test]
fn more_vms_than_may_wait_at_once_are_all_registered() {
    // Sixteen calls may wait at once; the others queue behind them until all taps appear.
    let node = Node::new();
    let _agent = node.agent(&[]);
    let guests = 20;
    let files: Vec<_> = (0..guests)
        .map(|n| {
            let file = node.room.path().join(format!("vm-{n}.yaml"));
            replace(&file, &record(&Identity::of(n), 1).to_string()).expect("a record");
            file
        })
        .collect();
    let taps = std::thread::scope(|scope| {
        let verbs: Vec<_> = files
            .iter()
            .map(|file| {
                let file = file.to_str().expect("text");
                let node = &node;
                scope.spawn(move || node.command(&["register", "-f", file, "--wait", "--timeout", "30"]))
            })
            .collect();
        std::thread::sleep(Duration::from_secs(1));
        let make = |n| node.host.tap(&Identity::of(n), Shape::default()).expect("a tap");
        let taps: Vec<Arc<_>> = (0..guests).map(make).collect();
        for verb in verbs {
            let (code, said) = verb.join().expect("it ends");
            assert_eq!(code, 0, "{said}");
        }
        taps
    });
    assert_eq!(node.status().identities, u64::from(guests));
    drop(taps);
}

#[privileged::test]
fn every_verb_finds_a_vm_that_is_not_served_and_gives_the_reason() {
    let node = Node::new();
    let [served, contested, unplaced, refused] = [0, 1, 2, 3].map(Identity::of);
    let _tap = node.host.tap(&served, Shape::default()).expect("a tap");
    let put = |identity: &Identity, change: &dyn Fn(&mut Value)| {
        let mut record = record(identity, 1);
        change(&mut record);
        replace(&identity.path(&node.records()), &record.to_string()).expect("a record file");
    };
    put(&served, &|_| {});
    put(&contested, &|record| {
        record["network"]["nics"][0] = self::record(&served, 1)["network"]["nics"][0].clone()
    });
    put(&unplaced, &|record| record["network"]["nics"][0]["port"] = Value::Null);
    put(&refused, &|record| record["schema"] = json!("vmrecord/9"));
    let _agent = node.agent(&[]);
    // A record of the API takes the place of the file.
    let registered = record(&served, 2).to_string();
    assert_eq!(node.ask("PUT", "/vm?wait=attached", &[], &registered).0, 201);

    let path = |identity: &Identity| identity.path(&node.records()).display().to_string();
    let file = |identity: &Identity| format!("{}.yaml", identity.hostname);
    let taken = "api/vm has this MAC on this port";
    let no_port = "no port is known for this NIC";
    let cases = [
        (contested.hostname.clone(), taken),
        (contested.instance_id.to_uppercase(), taken),
        (file(&contested), taken),
        (path(&contested), taken),
        (unplaced.hostname.clone(), no_port),
        (unplaced.instance_id.clone(), no_port),
        (file(&unplaced), no_port),
        (unplaced.mac.to_string(), no_port),
        (format!("file/{}", file(&unplaced)), no_port),
        (file(&refused), "its record is refused: "),
        (refused.hostname.clone(), "its record is refused: "),
        (refused.instance_id.clone(), "its record is refused: "),
        (path(&refused), "its record is refused: "),
        (file(&served), "api/vm is in force for this VM"),
    ];
    for (name, reason) in &cases {
        let (code, text) = node.command(&["status", name]);
        assert!(
            code == 1 && text.contains(reason) && text.contains("not served"),
            "status {name}: {code}: {text}"
        );
        let (_, text) = node.command(&["top", "--json", name]);
        assert!(text.contains(reason), "top {name}: {text}");
        // A trace of a MAC goes on, because frames may come from it.
        if *name == unplaced.mac.to_string() {
            continue;
        }
        let (code, text) = node.command(&["trace", name]);
        assert!(code != 0 && text.contains(reason), "trace {name}: {code}: {text}");
    }
    // Who asks for a VM that is served is not told of the file that another record replaces.
    for name in [served.hostname.clone(), served.instance_id.clone(), "vm".into(), "api/vm".into()] {
        let (code, text) = node.command(&["status", &name]);
        assert!(code == 0 && !text.contains("not served"), "status {name}: {code}: {text}");
    }
    // Both VMs that have the MAC and the port are shown.
    for name in [served.mac.to_string(), Host::tap_name(&served)] {
        let (code, text) = node.command(&["status", &name]);
        assert!(
            code == 1 && text.contains(taken) && text.contains("api/vm"),
            "status {name}: {code}: {text}"
        );
    }
    // `doctor`, which sees no record of the API by itself, has the conflicts from the agent.
    let (code, text) = node.command(&["doctor", "--no-pins"]);
    let line = text.lines().find(|line| line.starts_with("FAIL  records.mac"));
    let line = line.unwrap_or_else(|| panic!("no conflict in: {text}"));
    assert!(code == 1 && line.contains(&file(&contested)) && line.contains("belongs to api/vm"), "{line}");
    // `get` and `clear` take the names that other verbs print, if they mean one record.
    for (words, code, said) in [
        (["get", "api/vm"], 0, "served"),
        (["get", "file/guest-2.yaml"], 0, "unplaced"),
        (["get", "guest-1"], 0, "not served, held by api/vm"),
        (["get", "hook/guest-2"], 7, "no instance is called `hook/guest-2`"),
        (["get", "guest-2"], 0, "unplaced"),
        (["get", "guest-0"], 4, "2 instances are called guest-0: name one with `--source api vm`"),
        (["get", "nobody"], 7, "nobody"),
        (["clear", "guest-2.yaml"], 0, "removed what its guest wrote"),
        (["clear", "guest-2"], 0, "guest-2.yaml: removed what its guest wrote"),
        (["clear", &unplaced.instance_id], 0, "guest-2.yaml: removed what its guest wrote"),
        (["clear", "guest-0"], 4, "2 instances are called guest-0: name one with `--source api vm`"),
        (["get", &refused.hostname], 0, "rejected"),
        (["clear", &refused.hostname], 7, "has no good record"),
        (["rm", "guest-2"], 7, "file/guest-2.yaml comes from the source file"),
        (["rm", &served.instance_id], 7, "`xdp-imds rm vm` removes its record"),
    ] {
        let (exit, text) = node.command(&words);
        assert!(exit == code && text.contains(said), "{words:?}: {exit}: {text}");
    }
}

#[privileged::test]
fn doctor_sees_ports_and_datasources_of_the_records_that_only_the_agent_has() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let _agent = node.agent_with_config("api: {}");
    let pod = Namespace::new("pod").expect("a namespace");
    // Tests run at the same time, so each needs a tap name of its own.
    let name = format!("api{}", std::process::id());
    let _tap = Tap::create(&pod, &name, Shape::virtio()).expect("a tap");
    let mut record = record(&identity, 1);
    record["network"]["nics"][0]["port"] = json!({"ifname": name});
    record["serve"]["smbios"] = json!("openstack");
    assert_eq!(node.ask("PUT", "/vm", &[], &record.to_string()).0, 201);
    let (code, text) = node.command(&["doctor", "--no-pins"]);
    let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_default();
    let port = line(&format!("FAIL  port.device {name}"));
    let remedy = format!("Write `port: {{ifname: {name}, netns: {}}}`", pod.name());
    assert!(code == 1 && port.contains(&remedy), "{text}");
    assert!(line("ok    guests openstack").contains("one record"), "{text}");
    // Beside the agent, other records are checked alone.
    let other = tempfile::tempdir().expect("a directory");
    let shown = other.path().display().to_string();
    let (_, text) = node.command(&["doctor", "--no-pins", "--records", &shown]);
    let agent = text.lines().find(|line| line.starts_with("ok    agent: ")).unwrap_or_default();
    assert!(agent.contains(&format!("{shown} is checked here")), "{text}");
    assert!(!text.contains(&name) && !text.contains("guests openstack"), "{text}");
}

#[privileged::test]
fn a_hub_device_that_somebody_sets_down_is_told_and_comes_up_again() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let guest = boot(&node, &identity);
    replace(&identity.path(&node.records()), &record(&identity, 1).to_string()).expect("a record file");
    let _agent = node.agent(&[]);
    eventually(PATIENCE, || guest.fetch_own(PATH, REQUEST)).expect("an answer");
    for device in ["imds-in", "imds-tap"] {
        node.host.ns().ip(&format!("link set {device} down")).expect("it goes down");
        eventually(PATIENCE, || {
            let shown = node.host.ns().ip(&format!("link show {device}"))?;
            anyhow::ensure!(shown.contains(",UP"), "{shown}");
            Ok(())
        })
        .expect("it is up again");
        let (code, text) = node.command(&["status"]);
        assert!(code == 1 && text.contains("set down"), "{text}");
        eventually(PATIENCE, || guest.fetch_own(PATH, REQUEST)).expect("an answer again");
    }
}

#[privileged::test]
fn doctor_says_that_an_agent_hangs() {
    let node = Node::new();
    let agent = node.agent(&[]);
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &agent.pid().to_string()]).status().expect("kill runs");
        assert!(sent.success(), "{name}");
    };
    signal("-STOP");
    let (code, text) = node.command(&["doctor", "--no-pins"]);
    signal("-CONT");
    let line = text.lines().find(|line| line.starts_with("FAIL  agent: ")).unwrap_or_default();
    let pid = format!("process {}", agent.pid());
    assert!(code == 1 && line.contains(&pid) && line.contains("is silent"), "{text}");
    eventually(PATIENCE, || {
        let (_, text) = node.command(&["doctor", "--no-pins"]);
        anyhow::ensure!(text.lines().any(|line| line.starts_with("ok    agent: ")), "{text}");
        Ok(())
    })
    .expect("it answers again");
}

#[privileged::test]
fn a_registration_whose_file_somebody_removed_is_written_again() {
    let (node, identity) = (Node::new(), Identity::of(0));
    let agent = node.agent(&[]);
    let text = record(&identity, 1).to_string();
    assert_eq!(node.ask("PUT", "/vm", &[], &text).0, 201);
    std::fs::remove_dir_all(node.records().join("state")).expect("it is removed");
    assert_eq!(node.ask("PUT", "/vm", &[], &text).0, 200);
    agent.kill().expect("an agent to kill");
    let _agent = node.agent(&[]);
    assert_eq!(node.ask("GET", "/vm", &[], "").0, 200, "the answer said that it is kept");
}

// The agent refuses records beyond its memory limit with a reason and continues to serve the others.

/// The smallest limit that can be configured, in bytes.
const MEMORY: u64 = 16 << 20;
/// Length of user-data in a large record, in bytes.
const LARGE: usize = 60_000;
/// Number of large records, which need several times the memory.
const OTHERS: u16 = 300;

fn user_data(guest: &Guest) -> anyhow::Result<String> {
    let fetched = guest.fetch("/v1/user-data", PATIENCE)?;
    ensure!(fetched.status == 200, "answered {}", fetched.status);
    Ok(fetched.text())
}

#[privileged::test]
fn records_beyond_the_memory_limit_are_refused_until_others_are_removed() {
    let room = tempfile::tempdir().expect("a directory");
    let records = room.path().join("records");
    std::fs::create_dir(&records).expect("a directory");
    let small = Identity::of(0);
    small.write(&records, 1).expect("a record");
    // Their names sort after the guest's, so the agent reads the guest's record first.
    let others: Vec<_> = (1..=OTHERS).map(|number| Identity::of(number).with_user_data_of(LARGE)).collect();
    others.iter().for_each(|other| other.write(&records, 1).expect("a record"));
    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&small)).expect("a guest");
    let config = room.path().join("agent.yaml");
    let (tap, mac) = (guest.host_tap().name(), small.mac);
    let text = format!("ports:\n- {{ifname: {tap}, mac: \"{mac}\"}}\nrecord_memory: {MEMORY}\n");
    replace(&config, &text).expect("a configuration");
    let mut words = agent::arguments(&records, &[]);
    words.extend(["--config".into(), config.into()]);
    let binary = agent::binary().expect("the agent is built");
    let agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");
    let count = |name: &str| total(&agent.metrics().expect("metrics"), name, None);

    assert_eq!(user_data(&guest).expect("an answer"), small.user_data);
    let (refused, taken) =
        (count("xdp_imds_record_memory_refused_total"), count("xdp_imds_record_memory_bytes"));
    assert!(refused > 200, "{refused} of {OTHERS} records were refused");
    assert!((MEMORY / 2..=MEMORY).contains(&taken), "the records take {taken} bytes");
    assert!(agent.log().contains("Raise `record_memory`"), "{}", agent.log());

    // The larger version of the guest's record is refused, and the smaller one is still served.
    let large = small.clone().with_user_data_of(LARGE);
    large.write(&records, 2).expect("a record");
    eventually(PATIENCE, || {
        ensure!(
            count("xdp_imds_record_memory_refused_total") > refused,
            "the larger version is not refused yet"
        );
        Ok(())
    })
    .expect("a refusal");
    assert_eq!(user_data(&guest).expect("an answer"), small.user_data);

    others.iter().for_each(|other| std::fs::remove_file(other.path(&records)).expect("removed"));
    eventually(PATIENCE, || {
        ensure!(user_data(&guest)? == large.user_data, "the small version is still served");
        Ok(())
    })
    .expect("there is room for the large version");
}
