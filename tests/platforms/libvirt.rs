//! The agent serves domains of Debian's libvirt from start to end.
//!
//! A failure of our hook prevents neither the start nor the end of a domain.

use anyhow::{Context as _, Result, ensure};
use metadata_control::status::{AgentStatus, PortState};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::agent::{self, Agent};
use support::eventually;
use support::host::{self, Host};
use support::libvirt::{self, Libvirt};
use support::privileged;
use support::process::write_script;

/// Longest wait for the agent to notice a change.
const NOTICE: Duration = Duration::from_secs(15);
/// Longest a hook may take: its own limit of 5 s, and 5 s to start a process on a busy machine.
const HOOK: Duration = Duration::from_secs(5 + 5);

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const MAC: &str = "52:54:00:12:34:56";

/// A domain on the node's bridge that boots no further than its firmware.
fn domain(metadata: &str) -> String {
    format!(
        "<domain type='qemu'><name>web-1</name><uuid>{UUID}</uuid><metadata>{metadata}</metadata>\
         <memory unit='MiB'>32</memory><vcpu>1</vcpu><os><type arch='x86_64' machine='pc'>hvm</type></os>\
         <devices><interface type='bridge'><mac address='{MAC}'/><source bridge='{}'/><model type='virtio'/>\
         <rom enabled='no'/></interface><memballoon model='none'/></devices></domain>",
        host::BRIDGE
    )
}

fn instance_element(children: &str) -> String {
    format!("<imds:instance xmlns:imds='{}'>{children}</imds:instance>", libvirt::NAMESPACE)
}

/// A node with a libvirt daemon that runs our hook.
struct Node {
    // Must be dropped before its namespace.
    libvirt: Libvirt,
    host: Host,
    room: tempfile::TempDir,
}

impl Node {
    fn new() -> Result<Self> {
        let host = Host::new()?;
        let room = tempfile::tempdir()?;
        let (run, files) = (room.path().join("run"), room.path().join("files"));
        let libvirt = Libvirt::start(host.ns(), &libvirt::hook(&agent::binary()?, &run, &files))?;
        Ok(Self { libvirt, host, room })
    }

    fn record(&self) -> PathBuf {
        self.room.path().join(format!("run/hook.d/{UUID}.json"))
    }

    fn agent(&self) -> Result<Agent<'_>> {
        // The agent's run directory, to which the hook writes the domain's record, is `run` in this directory.
        Agent::start(self.host.ns(), self.room.path(), &[])
    }

    fn status(&self) -> Result<AgentStatus> {
        let mut command = Command::new(agent::binary()?);
        command.args(["status", "--all", "--json", "--run"]).arg(self.room.path().join("run"));
        Ok(serde_json::from_slice(&command.output()?.stdout)?)
    }

    /// The name of the only port; an error unless it is attached.
    fn port(&self) -> Result<String> {
        let ports = self.status()?.ports.listed;
        let [port] = &ports[..] else { anyhow::bail!("expected one port, found {ports:?}") };
        ensure!(port.state == PortState::Attached, "{port:?}");
        Ok(port.name.clone())
    }
}

fn or_skip() -> bool {
    privileged::or_skip_for(privileged::missing().map(str::to_owned).or_else(libvirt::missing).as_deref())
}

#[test]
fn a_domain_is_served_from_start_to_end_across_restarts_of_libvirtd() {
    if !or_skip() {
        return;
    }
    let mut node = Node::new().expect("a node");
    let words = "<imds:hostname>web-1.example</imds:hostname><imds:user-data>#!/bin/sh\n</imds:user-data>";
    {
        let _agent = node.agent().expect("an agent");
        node.libvirt.boot("web-1", &domain(&instance_element(words))).expect("the domain starts");
        let record: Value =
            serde_json::from_slice(&fs::read(node.record()).expect("a record")).expect("in JSON");
        assert_eq!(record["hostname"]["domain"], "example");
        assert_eq!(record["user_data"]["text"], "#!/bin/sh\n");
        let tap = record["network"]["nics"][0]["port"]["ifname"].as_str().expect("a tap").to_owned();
        let mode = fs::metadata(node.record()).expect("the record exists").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o600);
        let port = eventually(NOTICE, || node.port()).expect("the domain's tap is attached");
        assert_eq!(port, tap);
        let sources: Vec<_> = node.status().expect("a status").instances;
        assert!(sources.iter().any(|of| of.source == "hook" && of.count == 1), "{sources:?}");
    }

    // Stopping the agent and restarting libvirtd must not change the record of the domain.
    let before = fs::read(node.record()).expect("a record");
    node.libvirt.restart().expect("libvirtd restarts");
    assert_eq!(node.libvirt.status_of("web-1").expect("the domain is known"), "VM status: running");
    assert_eq!(fs::read(node.record()).expect("a record"), before, "the record changed without a reason");

    let _agent = node.agent().expect("an agent");
    eventually(NOTICE, || node.port()).expect("the domain's tap is attached");
    node.libvirt.virsh(&["destroy", "web-1"]).expect("the domain ends");
    assert!(!node.record().exists());
    eventually(NOTICE, || {
        let ports = node.status()?.ports.listed;
        ensure!(ports.is_empty(), "the agent still has {ports:?}");
        Ok(())
    })
    .expect("the domain's port is detached");
}

#[test]
fn a_domain_runs_in_spite_of_bad_metadata_or_a_failing_hook() {
    if !or_skip() {
        return;
    }
    let mut node = Node::new().expect("a node");
    let good =
        libvirt::hook(&agent::binary().expect("built"), &node.room.path().join("run"), Path::new("/nowhere"));
    let in_the_way = node.room.path().join("file");
    fs::write(&in_the_way, "").expect("written");
    let hooks = [
        ("our element has an unknown child", good.clone()),
        ("the program does not exist", libvirt::HOOK.replace("/usr/bin/xdp-imds", "/nowhere/xdp-imds")),
        (
            "the program crashes",
            libvirt::HOOK.replace("/usr/bin/xdp-imds", &crashing_program(&node).display().to_string()),
        ),
        ("the run directory is a file", good.replace("/run", "/file")),
    ];
    for (case, hook) in hooks {
        node.libvirt.set_hook(&hook).expect("a hook");
        node.libvirt
            .boot("web-1", &domain(&instance_element("<imds:nonsense/>")))
            .unwrap_or_else(|e| panic!("{case}: {e:#}"));
        assert!(!node.record().exists(), "{case}");
        node.libvirt.restart().unwrap_or_else(|error| panic!("{case}: {error:#}"));
        assert_eq!(node.libvirt.status_of("web-1").expect(case), "VM status: running", "{case}");
        node.libvirt.virsh(&["destroy", "web-1"]).unwrap_or_else(|error| panic!("{case}: {error:#}"));
    }
}

/// Writes a program that prints output and crashes.
fn crashing_program(node: &Node) -> PathBuf {
    let path = node.room.path().join("crash");
    write_script(&path, "#!/bin/sh\necho '<domain/>'\nkill -SEGV $$\n").expect("a script");
    path
}

/// Runs the hook's program with `words` and `input` on its standard input; also returns how long it took.
fn run_hook(words: &[&str], input: &[u8]) -> Result<(Output, Duration)> {
    let mut command = Command::new(agent::binary()?);
    command.arg("libvirt-hook").args(words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Instant::now();
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().context("piped")?;
    // The program may end before it has read all input.
    let _ = stdin.write_all(input);
    drop(stdin);
    Ok((child.wait_with_output()?, started.elapsed()))
}

#[test]
fn the_hook_prints_nothing_and_exits_0_on_any_input() {
    let room = tempfile::tempdir().expect("a directory");
    let run = room.path().join("run").display().to_string();
    let file = room.path().join("file");
    fs::write(&file, "").expect("written");
    let file = file.display().to_string();
    let huge = vec![b'<'; 9 << 20];
    let deep = "<a>".repeat(1 << 20);
    let good = domain(&instance_element(""));
    let bad = domain(&instance_element("<imds:nonsense/>"));
    let start = ["web-1", "start", "begin", "-"];
    let cases: [(&str, &[&str], &[u8]); 13] = [
        ("good", &start, good.as_bytes()),
        ("bad metadata", &start, bad.as_bytes()),
        ("no input", &start, b""),
        ("no XML", &start, b"\xff\xfe\x00garbage"),
        ("too much", &start, &huge),
        ("deep", &start, deep.as_bytes()),
        ("a name like an option", &["--help", "start", "begin", "-"], good.as_bytes()),
        ("help", &["--help"], b""),
        ("version", &["--version"], b""),
        ("no words", &[], b""),
        ("an unknown option", &["--nonsense", "web-1", "start", "begin", "-"], b""),
        ("an unknown operation", &["web-1", "dance", "begin", "-"], b"\xff"),
        ("more words", &["web-1", "start", "begin", "-", "more"], good.as_bytes()),
    ];
    for (case, words, input) in cases {
        for run in [&run, &file] {
            let words = [&["--run", run, "--files", "/nowhere"], words].concat();
            let (output, took) = run_hook(&words, input).expect(case);
            assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b""[..]), "{case}");
            assert!(took < HOOK, "{case} took {took:?}");
        }
    }
    let (output, _) = run_hook(&[&["--run", &run, "--"], &start[..]].concat(), good.as_bytes()).expect("run");
    assert_eq!(output.stdout, b"");
    assert!(
        Path::new(&run).join(format!("hook.d/{UUID}.json")).exists(),
        "the valid domain must have a record"
    );
}

#[test]
fn the_hook_says_by_hand_what_it_did_and_who_may_read_its_files() {
    let room = tempfile::tempdir().expect("a directory");
    let (run, files) = (room.path().join("run").display().to_string(), room.path().join("files"));
    fs::create_dir(&files).expect("a directory");
    let own = files.join(format!("{UUID}.yaml"));
    let nic = "<model type='virtio'/>";
    let with = domain(&instance_element("")).replace(nic, &format!("<target dev='tap7'/>{nic}"));
    let without = domain("");
    let files = files.display().to_string();
    let exposed = format!("{} has mode 0644", own.display());
    for (words, xml, mode, said, not) in [
        ("start begin", &without, None, "has no record, because", "a record for"),
        ("start begin", &with, Some(0o640), "has a record for tap7", "has mode"),
        ("reconnect begin", &with, Some(0o640), "has an unchanged record for tap7", "has mode"),
        ("reconnect begin", &with, Some(0o640), "`virsh edit` changes only its next start", "has mode"),
        ("reconnect begin", &with, Some(0o644), &*exposed, "has a record for"),
        ("reconect begin", &with, None, "nothing is to be done at `reconect begin`", "record"),
        ("release end", &with, None, "its record is gone", "unchanged"),
        ("release end", &with, None, "it had no record", "unchanged"),
    ] {
        if let Some(mode) = mode {
            fs::write(&own, "").expect("written");
            fs::set_permissions(&own, fs::Permissions::from_mode(mode)).expect("a mode");
        }
        let (operation, suboperation) = words.split_once(' ').expect("two words");
        let words = ["--run", &run, "--files", &files, "web-1", operation, suboperation, "-"];
        let (output, _) = run_hook(&words, xml.as_bytes()).expect("run");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b""[..]), "{operation}: {text}");
        assert!(text.contains(said) && !text.contains(not), "{operation}: {text}");
    }
}

#[privileged::test]
fn a_domain_that_the_hook_refused_is_in_the_status_until_it_is_mended() {
    let (room, host) = (tempfile::tempdir().expect("a directory"), Host::new().expect("a node"));
    let _agent = Agent::start(host.ns(), room.path(), &[]).expect("an agent");
    let run = room.path().join("run").display().to_string();
    let hook = |operation: &str, children: &str| {
        let suboperation = if operation == "release" { "end" } else { "begin" };
        let words = ["--run", &run, "--files", "/nowhere", "web-1", operation, suboperation, "-"];
        run_hook(&words, domain(&instance_element(children)).as_bytes()).expect("run");
    };
    let verb = |words: &[&str]| {
        let mut command = Command::new(agent::binary().expect("built"));
        let output = command.args(words).args(["--run", &run]).output().expect("run");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let expect = |refused: bool, case: &str| {
        eventually(NOTICE, || {
            let (code, text) = verb(&["status"]);
            let is_named =
                text.contains(&format!("hook/{UUID}: domain web-1: ")) && text.contains("<nonsense>");
            ensure!(is_named == refused && code == Some(i32::from(refused)), "{case}: {code:?} {text}");
            // By its name as by its UUID, also if there never was a good record.
            for name in ["web-1", UUID].into_iter().filter(|_| refused) {
                let (_, text) = verb(&["status", name]);
                ensure!(text.contains("<nonsense>"), "{case}: status {name}: {text}");
                let (code, text) = verb(&["get", name]);
                ensure!(code == Some(0) && text.contains("web-1"), "{case}: get {name}: {code:?} {text}");
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error:#}"));
    };
    hook("start", "<imds:nonsense/>");
    expect(true, "there is no record");
    let (_, doctor) = verb(&["doctor", "--no-pins"]);
    assert!(doctor.contains("agent.refused") && doctor.contains("domain web-1: "), "{doctor}");
    hook("reconnect", "");
    expect(false, "it is fixed");
    hook("reconnect", "<imds:nonsense/>");
    expect(true, "there is a good record");
    hook("reconnect", "");
    expect(false, "the same record is good again");
    hook("reconnect", "<imds:nonsense/>");
    expect(true, "once more");
    hook("release", "<imds:nonsense/>");
    expect(false, "the domain has ended");
}

#[test]
fn the_hook_ends_although_its_input_does_not() {
    let mut command = Command::new(agent::binary().expect("built"));
    command.args(["libvirt-hook", "web-1", "start", "begin", "-"]);
    let started = Instant::now();
    let (reader, _writer) = std::io::pipe().expect("a pipe");
    command.stdin(reader).stdout(Stdio::piped()).stderr(File::create("/dev/null").expect("opened"));
    let output = command.output().expect("run");
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b""[..]));
    assert!(started.elapsed() < HOOK, "{:?}", started.elapsed());
}
