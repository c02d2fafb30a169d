//! `xdp-imds trace` shows the frames of one guest with their verdicts, without secrets. It costs the agent nothing
//! after its reader has exited.

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData, MapInfo};
use metadata_common::maps::name;
use metadata_common::wire::{ethernet, protocol};
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use support::agent::{self, Agent, PortArgument};
use support::eventually;
use support::frames::{self, SERVED_V4};
use support::guest::{Guest, Spec};
use support::host::Host;
use support::record::{self, Identity};
use support::tap::Shape;
use support::{privileged, process};

const PATIENCE: Duration = Duration::from_secs(20);
const REQUEST: Duration = Duration::from_secs(10);
const PATH: &str = "/v1/user-data";
/// A token that the printed lines must never contain.
const SECRET: &str = "a-token-nobody-may-see";

/// A node with an agent and two guests.
struct Scene {
    host: Host,
    records: tempfile::TempDir,
    guests: Vec<Guest>,
}

impl Scene {
    fn new() -> Self {
        let host = Host::new().expect("a node");
        let records = tempfile::tempdir().expect("a directory");
        let identities = [0, 1].map(Identity::of);
        let guests = identities.iter().map(|identity| {
            identity.write(records.path(), 1).expect("a record");
            Guest::boot(&host, &Spec::of(identity)).expect("a guest")
        });
        let guests = guests.collect();
        Self { host, records, guests }
    }

    fn agent(&self) -> Agent<'_> {
        let ports =
            self.guests.iter().map(|guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac));
        Agent::start(self.host.ns(), self.records.path(), &ports.collect::<Vec<_>>()).expect("an agent")
    }

    fn run(&self) -> PathBuf {
        self.records.path().join("run")
    }

    fn trace(&self, target: &str, more: &[&str]) -> Trace {
        Trace::start(&self.run(), target, more).expect("a trace")
    }

    /// Like [`Scene::trace`], with the MAC of a guest as target.
    fn trace_guest(&self, guest: &Guest, more: &[&str]) -> Trace {
        self.trace(&guest.identity().mac.to_string(), more)
    }
}

/// A running trace and its output.
struct Trace {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Trace {
    /// Starts a trace and waits until it is ready.
    fn start(run: &Path, target: &str, more: &[&str]) -> Result<Self> {
        let mut trace = Self::spawn(run, target, more)?;
        trace.wait_for("tracing ")?;
        Ok(trace)
    }

    fn spawn(run: &Path, target: &str, more: &[&str]) -> Result<Self> {
        let mut command = Command::new(agent::binary()?);
        command.args(["trace", target, "--run"]).arg(run).args(more);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let stdout: ChildStdout = child.stdout.take().context("standard output is piped")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines, seen: Vec::new() })
    }

    /// Reads lines until one contains `words`.
    fn wait_for(&mut self, words: &str) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                let mut stderr = String::new();
                self.child.kill()?;
                self.child.stderr.take().context("it is piped")?.read_to_string(&mut stderr)?;
                anyhow::bail!("no `{words}` in {:#?}; its standard error: {stderr}", self.seen);
            };
            let found = line.contains(words);
            self.seen.push(line);
            if found {
                return Ok(());
            }
        }
    }

    /// Waits until it exits. Returns its status, lines and standard error.
    fn finish(mut self) -> Result<(ExitStatus, Vec<String>, String)> {
        let mut stderr = String::new();
        self.child.stderr.take().context("standard error is piped")?.read_to_string(&mut stderr)?;
        let status = self.child.wait()?;
        self.seen.extend(self.lines.iter());
        Ok((status, std::mem::take(&mut self.seen), stderr))
    }

    /// Ends it with SIGTERM. Returns its lines.
    fn stop(self) -> Vec<String> {
        process::terminate(self.child.id()).expect("it lives");
        let (status, lines, stderr) = self.finish().expect("it ends");
        assert!(status.success(), "{status}: {stderr}");
        lines
    }

    fn kill(mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it lived");
    }
}

/// The index of the first line that contains all of these words.
#[track_caller]
fn at(lines: &[String], words: &[&str]) -> usize {
    let found = lines.iter().position(|line| words.iter().all(|word| line.contains(word)));
    found.unwrap_or_else(|| panic!("no line with {words:?} in {lines:#?}"))
}

#[privileged::test]
fn a_trace_shows_the_frames_of_one_guest_in_order_with_their_verdicts() {
    let scene = Scene::new();
    let _agent = scene.agent();
    let [traced, other] = &scene.guests[..] else { panic!("two guests") };
    let mut trace = scene.trace_guest(traced, &[]);
    for guest in [traced, other, traced] {
        guest.fetch_own(PATH, REQUEST).expect("an answer");
    }
    trace.wait_for("HTTP/1.1 200").expect("the first answer");
    trace.wait_for("HTTP/1.1 200").expect("the second answer");
    let lines = trace.stop();
    assert!(
        lines[0].contains(&format!("{} on {}", traced.identity().mac, traced.host_tap().name())),
        "{lines:#?}"
    );
    let steps = [
        at(&lines, &["guest→", "answered by the kernel: syn", "169.254.169.254:80 SYN "]),
        at(&lines, &["→guest", "answered by the kernel: syn", "SYN ACK"]),
        at(&lines, &["guest→", "steered to the agent: ipv4 tcp", "GET /v1/user-data"]),
        at(&lines, &["→guest", "delivered to the guest", "HTTP/1.1 200"]),
    ];
    assert!(steps.is_sorted(), "{steps:?}: {lines:#?}");
    let address = other.identity().address.to_string();
    assert!(!lines.iter().any(|line| line.contains(&format!("{address}:"))), "{lines:#?}");
    let table = at(&lines, &["frames", "bytes", "verdict"]);
    let frames =
        lines[..table].iter().filter(|line| line.contains("guest→") || line.contains("→guest")).count();
    assert!(lines.iter().any(|line| line.trim() == format!("{frames}  frames seen, 0 lost")), "{lines:#?}");
}

#[privileged::test]
fn a_trace_in_json_has_a_line_for_each_frame_and_a_last_one() {
    let scene = Scene::new();
    let _agent = scene.agent();
    let traced = &scene.guests[0];
    let mut trace =
        Trace::spawn(&scene.run(), &traced.identity().mac.to_string(), &["--json"]).expect("a trace");
    trace.wait_for("\"begin\"").expect("the first line");
    traced.fetch_own(PATH, REQUEST).expect("an answer");
    trace.wait_for("HTTP/1.1 200").expect("the answer");
    let lines = trace.stop();
    let lines: Vec<serde_json::Value> = lines
        .iter()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let [begin, frames @ .., end] = &lines[..] else { panic!("{lines:#?}") };
    assert_eq!((&begin["kind"], &begin["schema"]), (&"begin".into(), &"trace-lines/1".into()));
    assert!(
        frames.iter().all(|line| line["kind"] == "frame" && line["mac"] == traced.identity().mac.to_string())
    );
    let request = frames
        .iter()
        .find(|line| line["message"].as_str().is_some_and(|text| text.starts_with(&format!("GET {PATH}"))));
    let request = request.unwrap_or_else(|| panic!("no request in {frames:#?}"));
    assert_eq!(
        (&request["to_guest"], &request["words"]),
        (&false.into(), &"steered to the agent: ipv4 tcp".into())
    );
    assert_eq!(
        (&end["kind"], &end["frames"], &end["lost"]),
        (&"end".into(), &frames.len().into(), &0.into())
    );
    let counted: u64 =
        end["verdicts"].as_array().expect("a list").iter().filter_map(|row| row["frames"].as_u64()).sum();
    assert_eq!(counted, frames.len() as u64);
}

#[privileged::test]
fn a_port_trace_shows_the_dropped_frames_of_an_impostor() {
    let scene = Scene::new();
    let _agent = scene.agent();
    let port = scene.guests[0].host_tap().name().to_owned();
    let mut trace = scene.trace(&port, &[]);
    scene.guests[0].ns().ip("link set eth0 address 52:54:00:ba:db:ad").expect("another MAC");
    scene.guests[0].fetch(PATH, Duration::from_secs(2)).expect_err("no answer");
    trace.wait_for("DROPPED: unknown mac").expect("a drop");
    let lines = trace.stop();
    assert!(
        lines.iter().any(|line| line.starts_with("note: ") && line.contains("trace the guest's MAC")),
        "{lines:#?}"
    );
}

#[privileged::test]
fn printed_lines_hold_no_token_and_files_only_with_the_payload_option() {
    let scene = Scene::new();
    let _agent = scene.agent();
    let guest = &scene.guests[0];
    for (payload, name) in [(false, "headers.pcapng"), (true, "payload.pcapng")] {
        let file = scene.records.path().join(name);
        let shown = file.display().to_string();
        let more = ["--write", &shown, "--payload"];
        let mut trace = scene.trace_guest(guest, &more[..if payload { 3 } else { 2 }]);
        let field = format!("X-aws-ec2-metadata-token: {SECRET}");
        guest.curl(&["-H", &field, "http://169.254.169.254/latest/meta-data/"], REQUEST).expect("an answer");
        trace.wait_for("HTTP/1.1 ").expect("an answer");
        let lines = trace.stop();
        at(&lines, &["GET /latest/meta-data/"]);
        assert!(!lines.join("\n").contains(SECRET), "{lines:#?}");
        let bytes = fs::read(&file).expect("a file");
        let holds = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
        assert_eq!(holds, payload, "{name}");
        assert_eq!(fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
        let frames = lines.iter().filter(|line| line.contains(" win ")).count();
        reads_back(&file, &lines[0], frames);
        let read = Command::new("tcpdump").args(["-nr", &shown]).output();
        if let Ok(output) = read {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("169.254.169.254.80: Flags [S]"), "{output:?}");
        }
    }
}

/// Asserts that a capture names the interface, and that every TCP segment has its verdict as a comment.
fn reads_back(file: &Path, first: &str, segments: usize) {
    let mut reader = PcapNgReader::new(File::open(file).expect("a file")).expect("pcapng");
    let (mut comments, mut who) = (Vec::new(), None);
    while let Some(block) = reader.next_block() {
        match block.expect("a block").into_owned() {
            Block::InterfaceDescription(interface) => {
                who = interface.options.iter().find_map(|option| match option {
                    InterfaceDescriptionOption::IfName(name) => Some(name.to_string()),
                    _ => None,
                });
            }
            Block::EnhancedPacket(packet) => {
                comments.extend(packet.options.iter().find_map(|option| match option {
                    EnhancedPacketOption::Comment(comment) => Some(comment.to_string()),
                    _ => None,
                }))
            }
            _ => {}
        }
    }
    assert!(who.as_ref().is_some_and(|who| first.contains(who.as_str())), "{who:?} in {first}");
    assert!(
        comments.iter().any(|comment| comment == "answer_syn (answered by the kernel: syn)"),
        "{comments:?}"
    );
    assert!(comments.len() >= segments && segments > 0, "{} of {segments}", comments.len());
}

#[privileged::test]
fn only_one_trace_runs_at_a_time_and_killing_its_reader_ends_it() {
    let scene = Scene::new();
    let agent = scene.agent();
    assert_eq!(filter(agent.pid()).expect("the filter"), [0; 5]);
    for _ in 0..3 {
        let trace = scene.trace_guest(&scene.guests[0], &[]);
        assert_ne!(filter(agent.pid()).expect("the filter"), [0; 5]);
        let second = Trace::spawn(&scene.run(), &scene.guests[1].identity().mac.to_string(), &[]);
        let (status, _, stderr) = second.and_then(Trace::finish).expect("it ends");
        assert!(!status.success() && stderr.contains("another trace is running"), "{status}: {stderr}");
        trace.kill();
        eventually(PATIENCE, || {
            ensure!(filter(agent.pid())? == [0; 5], "the filter is still set");
            Ok(())
        })
        .expect("the filter is cleared");
    }
    scene.trace_guest(&scene.guests[1], &[]).stop();
}

/// The trace filter in the kernel maps of a process.
fn filter(pid: u32) -> Result<[u32; 5]> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))?.flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        ids.extend(text.lines().find_map(|line| line.strip_prefix("map_id:")?.trim().parse::<u32>().ok()));
    }
    for id in ids {
        if MapInfo::from_id(id)?.name_as_str() == Some(name::TRACE) {
            let map = Map::Array(MapData::from_id(id)?);
            return Ok(Array::<_, [u32; 5]>::try_from(map)?.get(&0, 0)?);
        }
    }
    anyhow::bail!("process {pid} has no map {}", name::TRACE)
}

#[privileged::test]
fn frames_that_arrive_faster_than_the_reader_reads_count_as_lost() {
    const FRAMES: u64 = 20_000;
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0);
    identity.write(records.path(), 1).expect("a record");
    let tap = host.tap(&identity, Shape::default()).expect("a tap");
    let ports = [PortArgument::new(tap.name(), identity.mac)];
    let _agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
    let trace = Trace::start(&records.path().join("run"), tap.name(), &[]).expect("a trace");
    let signal = |name: &str| {
        let done = Command::new("kill").args([name, &trace.child.id().to_string()]).status();
        assert!(done.expect("kill(1)").success());
    };
    signal("-STOP");
    let mut frame = frames::frame(&[], ethernet::IPV4, &frames::datagram(SERVED_V4, protocol::UDP));
    frame[ethernet::SOURCE..][..6].copy_from_slice(&identity.mac.0);
    for _ in 0..FRAMES {
        while !tap.send(0, &frame).expect("the tap is up") {
            std::thread::yield_now();
        }
    }
    signal("-CONT");
    std::thread::sleep(Duration::from_secs(2));
    let lines = trace.stop();
    at(&lines, &["--- lost ", "more arrived than the agent could read"]);
    let last = lines.last().expect("a table");
    let numbers: Vec<u64> =
        last.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let [seen, lost] = numbers[..] else { panic!("{last}") };
    assert!(seen > 0 && lost > 0 && seen + lost == FRAMES, "{last}");
}

#[privileged::test]
fn a_trace_ends_after_the_requested_frames_or_seconds() {
    let scene = Scene::new();
    let _agent = scene.agent();
    let started = Instant::now();
    let quiet = Trace::spawn(&scene.run(), &scene.guests[0].identity().mac.to_string(), &["--seconds", "1"]);
    let (status, lines, _) = quiet.and_then(Trace::finish).expect("it ends");
    assert!(status.success() && started.elapsed() >= Duration::from_secs(1));
    at(&lines, &["0  frames seen, 0 lost"]);
    let trace = scene.trace_guest(&scene.guests[0], &["--count", "3"]);
    scene.guests[0].fetch_own(PATH, REQUEST).expect("an answer");
    let (status, lines, _) = trace.finish().expect("it ends");
    assert!(status.success());
    at(&lines, &["3  frames seen, 0 lost"]);
}

#[test]
fn a_target_that_cannot_be_traced_is_refused_with_a_reason() {
    let room = tempfile::tempdir().expect("a directory");
    let refused = |run: &Path, target: &str| {
        let trace = Trace::spawn(run, target, &[]).and_then(Trace::finish);
        let (status, _, stderr) = trace.expect("it ends");
        assert!(!status.success(), "{stderr}");
        stderr
    };
    let stderr = refused(room.path(), "tap0");
    assert!(stderr.contains("no agent runs") && stderr.contains("--run"), "{stderr}");
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let _agent = scene.agent();
    let stderr = refused(&scene.run(), "no-such-tap");
    assert!(stderr.contains("no VM and no attached port is called no-such-tap"), "{stderr}");
    let gone = Identity::of(9);
    let record = gone.record(1).replace(r#""id": "n0""#, r#""id": "n0", "port": {"ifname": "absent0"}"#);
    record::replace(&gone.path(scene.records.path()), &record).expect("a record");
    eventually(PATIENCE, || {
        let stderr = refused(&scene.run(), &gone.hostname);
        stderr.contains("on absent0, which is not attached: ").then_some(()).context(stderr)
    })
    .expect("the port is named");
}

#[privileged::test]
fn a_vm_can_be_traced_by_each_name_that_status_shows() {
    let scene = Scene::new();
    let _agent = scene.agent();
    let identity = scene.guests[0].identity();
    let port = scene.guests[0].host_tap().name();
    for name in [&identity.hostname, &identity.instance_id, &identity.instance_id.to_uppercase()] {
        let mut trace = scene.trace(name, &[]);
        scene.guests[0].fetch_own(PATH, REQUEST).expect("an answer");
        trace.wait_for("HTTP/1.1 200").expect("the trace shows an answer");
        let lines = trace.stop();
        assert!(lines[0].contains(&format!("{name}, {} on {port}", identity.mac)), "{lines:#?}");
    }
}
