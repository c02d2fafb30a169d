//! An agent takes over the ports of another agent under load, and no guest notices. If either agent dies, guests are
//! served again after the next start at the latest.

use anyhow::Context as _;
use aya::maps::{Array, HashMap, Map, MapData};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::answers::PATHS;
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};
use support::tap_client::{Tally, crowd};
use support::{agent, privileged, process};

// A node with pinned maps and the agents that run on it.

/// Limit for each wait. Only a failure reaches it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time until the previous agent exits: 30 s for its guests, and a margin.
const LEAVES_WITHIN: Duration = Duration::from_secs(40);

/// A node with pinned maps, and the records of its guests.
struct Node {
    records: tempfile::TempDir,
    bpffs: Bpffs,
    host: Host,
}

impl Node {
    fn new() -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let bpffs = Bpffs::mount().expect("a bpffs");
        Self { records, bpffs, host: Host::new().expect("a node") }
    }

    fn write(&self, identity: &Identity, change: impl FnOnce(&mut Value)) {
        let mut record = serde_json::from_str(&identity.record(1)).expect("a record");
        change(&mut record);
        replace(&identity.path(self.records.path()), &record.to_string()).expect("a record file");
    }

    fn agent(&self, guests: &[Identity], more: &[&str]) -> Agent<'_> {
        let port = |guest: &Identity| PortArgument::new(Host::tap_name(guest), guest.mac);
        self.agent_in(self.host.ns(), guests.iter().map(port).collect(), more)
    }

    /// Starts an agent in its own namespace, as in a pod. The taps are in another namespace.
    fn pod<'a>(&self, ns: &'a Namespace, guests: &[Identity], more: &[&str]) -> Agent<'a> {
        let port =
            |guest: &Identity| PortArgument::new(Host::tap_name(guest), guest.mac).within(self.host.ns());
        self.agent_in(ns, guests.iter().map(port).collect(), more)
    }

    fn agent_in<'a>(&self, ns: &'a Namespace, ports: Vec<PortArgument>, more: &[&str]) -> Agent<'a> {
        let mut words = agent::arguments_with_pins(self.records.path(), &ports, &self.bpffs.pins());
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary().expect("the agent is built"), ns, words).expect("an agent")
    }

    /// Slot, hub and draining hub of each identity in the kernel's table, by key.
    fn identities(&self) -> BTreeMap<[u8; 16], [u32; 3]> {
        let map = MapData::from_pin(self.bpffs.pins().join("v1/maps/IDENTITIES")).expect("a pinned map");
        let map: HashMap<_, [u8; 16], [u32; 4]> =
            HashMap::try_from(Map::HashMap(map)).expect("a table of identities");
        let entries = map.iter().map(|entry| entry.expect("an entry"));
        entries.map(|(key, [slot, hub, drain, _])| (key, [slot, hub, drain])).collect()
    }

    fn claims(&self) -> usize {
        let map = MapData::from_pin(self.bpffs.pins().join("v1/maps/DRAINING")).expect("a pinned map");
        let map: HashMap<_, u64, u32> = HashMap::try_from(Map::HashMap(map)).expect("a table of claims");
        map.keys().count()
    }

    /// The connections that agents hold, by the counts that the kernel reads.
    fn held(&self) -> u64 {
        let map = MapData::from_pin(self.bpffs.pins().join("v1/maps/ALL_SENT")).expect("a pinned map");
        let map: Array<_, [u64; 4]> = Array::try_from(Map::Array(map)).expect("a table of connections");
        // `held` is the last field of the third word (`metadata_common::maps::AllSent`).
        map.iter().map(|entry| entry.expect("an entry")[2].to_ne_bytes()).map(held_of).sum()
    }

    fn socket(&self) -> PathBuf {
        self.records.path().join("run/takeover.sock")
    }

    fn taker(&self) -> Taker {
        let stream = UnixStream::connect(self.socket()).expect("an agent listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Taker(BufReader::new(stream))
    }
}

fn held_of([_, _, _, _, held @ ..]: [u8; 8]) -> u64 {
    u32::from_ne_bytes(held).into()
}

/// Where the taps are.
enum Place {
    /// In the agents' namespace.
    Home,
    /// In another namespace. The agents steer with classifiers, because XDP cannot redirect out of that namespace.
    Pod(Namespace),
}

impl Place {
    fn pod() -> Self {
        Self::Pod(Namespace::new("agent").expect("a namespace"))
    }

    fn agent<'a>(&'a self, node: &'a Node, guests: &[Identity], more: &[&str]) -> Agent<'a> {
        match self {
            Self::Home => node.agent(guests, more),
            Self::Pod(ns) => node.pod(ns, guests, &[more, &["--steer", "tcx"]].concat()),
        }
    }
}

/// A node with one guest and its record. The guest uses the TCP of its kernel.
fn one_guest(change: impl FnOnce(&mut Value)) -> (Node, Guest) {
    let node = Node::new();
    let guest = Guest::boot(&node.host, &Spec::of(&Identity::of(0))).expect("a guest");
    node.write(guest.identity(), change);
    (node, guest)
}

// Both ends of the conversations in these tests: a successor on the socket, and a guest on TCP.

/// A successor that sends protocol messages one by one.
struct Taker(BufReader<UnixStream>);

impl Taker {
    fn transmit(&mut self, word: &Value) {
        writeln!(self.0.get_mut(), "{word}").expect("sent");
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Sends the messages of a takeover up to and including `until`, and asserts each answer.
    fn go(&mut self, until: &str) {
        let hello = json!({"say": "hello", "oldest": 1, "newest": 1});
        for (word, answer) in
            [(hello, "welcome"), (json!({"say": "drain"}), "draining"), (json!({"say": "take"}), "yours")]
        {
            self.transmit(&word);
            assert_eq!(self.receive()["say"], answer);
            if word["say"] == until {
                return;
            }
        }
        panic!("unknown message: {until}");
    }
}

/// A connection of a guest to the service.
struct Client(TcpStream);

impl Client {
    fn connect(guest: &Guest) -> Self {
        let stream = guest.ns().run_in(|| {
            TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), PATIENCE).expect("a connection")
        });
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self(stream)
    }

    fn transmit(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).expect("sent");
    }

    fn ask(&mut self, line: &str, fields: &str) -> (u16, String, Vec<u8>) {
        self.transmit(&format!("{line} HTTP/1.1\r\nHost: {METADATA}\r\n{fields}\r\n"));
        self.answer()
    }

    /// Status, head and body of one answer.
    fn answer(&mut self) -> (u16, String, Vec<u8>) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("a head in time");
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).expect("text").to_ascii_lowercase();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let length = field("content-length:").map_or(0, |length| length.parse().expect("a number"));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).expect("a body in time");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, head, body)
    }

    /// Whether the service closes without a reset.
    fn ends(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0))
    }
}

fn says_close(head: &str) -> bool {
    head.contains("\r\nconnection: close\r\n")
}

// Connections and writes that are under way when an agent is taken over are finished.

#[privileged::test]
fn long_connections_finish_at_their_agent_and_their_writes_survive() {
    long_connections_finish(&Place::Home);
}

#[privileged::test]
fn long_connections_of_a_pod_with_classifiers_finish_and_their_writes_survive() {
    long_connections_finish(&Place::pod());
}

fn long_connections_finish(place: &Place) {
    const LONG: usize = 1 << 20;
    let (node, guest) = one_guest(|record| {
        record["user_data"] = json!({"text": "x".repeat(LONG)});
        record["serve"] = json!({"limits": {"user_data": LONG}});
        record["metadata"] = json!({"colour": "red"});
    });
    let guests = [guest.identity().clone()];
    let first = place.agent(&node, &guests, &[]);
    let google = "Metadata-Flavor: Google\r\n";
    let attribute = "/computeMetadata/v1/instance/guest-attributes/a";
    let put = |client: &mut Client, name: &str, value: &str| {
        let fields = format!("{google}Content-Length: {}\r\n\r\n{value}", value.len());
        client.transmit(&format!("PUT {attribute}/{name} HTTP/1.1\r\nHost: x\r\n{fields}"));
        client.answer().0
    };
    let get = |client: &mut Client, name: &str| client.ask(&format!("GET {attribute}/{name}"), google);

    let mut kept = Client::connect(&guest);
    assert_eq!(put(&mut kept, "before", "1"), 200);
    let ttl = "X-aws-ec2-metadata-token-ttl-seconds: 600\r\nContent-Length: 0\r\n";
    let (status, _, token) = Client::connect(&guest).ask("PUT /latest/api/token", ttl);
    assert_eq!(status, 200);
    let mut slow = Client::connect(&guest);
    slow.transmit("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut parked = Client::connect(&guest);
    parked.transmit(&format!(
        "GET /computeMetadata/v1/instance/attributes/colour?wait_for_change=true&timeout_sec=600 HTTP/1.1\r\nHost: x\r\n{google}\r\n"
    ));
    // This write is in progress during the takeover.
    let mut writing = Client::connect(&guest);
    writing.transmit(&format!(
        "PUT {attribute}/during HTTP/1.1\r\nHost: x\r\n{google}Content-Length: 4\r\n\r\nha"
    ));
    std::thread::sleep(Duration::from_secs(1));

    let _second = place.agent(&node, &guests, &["--takeover"]);
    let (status, head, body) = parked.answer();
    assert_eq!(
        (status, says_close(&head), &body[..]),
        (200, true, &b"red"[..]),
        "answered with the current value"
    );
    assert!(kept.ends(), "an idle connection is closed, not reset");
    assert_eq!(
        get(&mut Client::connect(&guest), "before").2,
        b"1",
        "written through the first agent, read through the second"
    );
    writing.transmit("lf");
    let (status, head, _) = writing.answer();
    assert_eq!((status, says_close(&head)), (200, true));
    assert_eq!(get(&mut Client::connect(&guest), "during").2, b"half", "written during the takeover");
    let token = format!("X-aws-ec2-metadata-token: {}\r\n", String::from_utf8(token).expect("text"));
    assert_eq!(Client::connect(&guest).ask("GET /latest/meta-data/hostname", &token).0, 200);
    let (status, head, body) = slow.answer();
    assert_eq!((status, says_close(&head), body.len()), (200, false, LONG), "requested before the takeover");
    assert!(slow.ends());
    drop((parked, writing, slow, kept));
    let (status, said) = first.ended(LEAVES_WITHIN).expect("the previous agent exits");
    assert!(status.success() && !said.contains("cut off"), "{status}\n{said}");
}

#[privileged::test]
fn a_connection_whose_guest_has_not_closed_counts_no_more_once_its_agent_has_ended() {
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    let mut kept = Client::connect(&guest);
    assert_eq!(kept.ask("GET /v1/meta-data", "").0, 200);
    assert_eq!(node.held(), 1);
    let _second = node.agent(&guests, &["--takeover"]);
    assert!(kept.ends(), "the agent has closed it, and the guest has not");
    let (status, said) = first.ended(LEAVES_WITHIN).expect("the previous agent exits");
    assert!(status.success() && !said.contains("cut off"), "{status}\n{said}");
    assert_eq!(node.held(), 0);
    drop(kept);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[privileged::test]
fn a_port_is_released_while_the_previous_agent_drains() {
    let (node, guest) = one_guest(|record| {
        record["network"]["nics"][0]["port"] = json!({"ifname": Host::tap_name(&Identity::of(0))});
        record["user_data"] = json!({"text": "x".repeat(1 << 20)});
        record["serve"] = json!({"limits": {"user_data": 1 << 20}});
    });
    let first = node.agent(&[], &[]);
    eventually(PATIENCE, || guest.fetch("/v1/meta-data", PATIENCE).map(drop)).expect("served");
    let mut slow = Client::connect(&guest);
    slow.transmit("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    std::thread::sleep(Duration::from_millis(500));
    let _second = node.agent(&[], &["--takeover"]);
    std::fs::remove_file(guest.identity().path(node.records.path())).expect("a record");
    let tap = guest.host_tap().name();
    eventually(LEAVES_WITHIN / 4, || {
        let shown = node.host.ns().ip(&format!("link show {tap}"))?;
        anyhow::ensure!(!shown.contains("xdp"), "{shown}");
        Ok(())
    })
    .expect("its program is detached from the tap");
    assert!(!first.log().contains("leaving"), "the previous agent has exited:\n{}", first.log());
}

// Crowds of guests send requests while agents take over from each other, and no request fails.

/// A guest's pause between two rounds. It keeps the guest below the request limit of a VM.
const PAUSE: Duration = Duration::from_millis(100);

/// Number of guests in the crowd; `XDP_IMDS_TAKEOVER_GUESTS` overrides it.
fn crowd_size() -> u16 {
    let set = std::env::var("XDP_IMDS_TAKEOVER_GUESTS").ok().and_then(|text| text.parse().ok());
    set.unwrap_or(64)
}

/// A node with the records and taps of a crowd.
fn node_with_crowd() -> (Node, Vec<Identity>, Vec<Arc<Tap>>) {
    let mut node = Node::new();
    let guests: Vec<Identity> =
        (0..crowd_size()).map(|number| Identity::of(number).with_user_data_of(2_000)).collect();
    for guest in &guests {
        guest.write(node.records.path(), 1).expect("a record");
    }
    let taps = node.host.rack(&guests, Shape::default()).expect("taps");
    (node, guests, taps)
}

#[privileged::test]
fn two_takeovers_cause_no_failure_or_reset_in_a_crowd_of_guests() {
    for workers in ["1", "2"] {
        crowd_is_taken_over(workers, &Place::Home);
    }
}

#[privileged::test]
fn two_takeovers_of_a_pod_with_classifiers_cause_no_failure_or_reset() {
    for workers in ["1", "2"] {
        crowd_is_taken_over(workers, &Place::pod());
    }
}

fn crowd_is_taken_over(workers: &str, place: &Place) {
    let (node, guests, taps) = node_with_crowd();
    let mut running = place.agent(&node, &guests, &["--workers", workers]);
    let before = node.identities();
    assert_eq!(before.len(), guests.len());
    let stop = AtomicBool::new(false);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let crowd =
            scope.spawn(|| crowd(guests.iter().cloned().zip(taps).collect(), &PATHS, PAUSE, &stop, PATIENCE));
        // Ends the crowd even if an assertion fails.
        let _stop = Stop(&stop);
        std::thread::sleep(Duration::from_secs(1));
        for side in [1, 0] {
            let next = place.agent(&node, &guests, &["--workers", workers, "--takeover"]);
            let (status, said) =
                std::mem::replace(&mut running, next).ended(LEAVES_WITHIN).expect("the previous agent exits");
            assert!(status.success(), "{status}\n{said}");
            assert!(!said.contains("cut off"), "{said}");
            let cleared = || {
                let now = node.identities();
                anyhow::ensure!(now.values().all(|[.., drain]| *drain == 0) && node.claims() == 0);
                Ok(now)
            };
            let now = eventually(PATIENCE, cleared).expect("no entry refers to the previous agent");
            assert!(now.values().all(|[_, hub, _]| hub / 32 == side), "hubs of side {side}: {now:?}");
            let slots = |all: &BTreeMap<[u8; 16], [u32; 3]>| {
                all.iter().map(|(key, [slot, ..])| (*key, *slot)).collect::<Vec<_>>()
            };
            assert_eq!(slots(&now), slots(&before), "every guest keeps its slot");
            std::thread::sleep(Duration::from_millis(500));
        }
        stop.store(true, Ordering::Relaxed);
        crowd.join().expect("the crowd")
    });
    let failures: Vec<_> = tallies.iter().filter(|tally| tally.rounds.is_err()).collect();
    assert!(failures.is_empty(), "{failures:?}");
    let rounds: usize = tallies.iter().map(|tally| *tally.rounds.as_ref().expect("rounds")).sum();
    let [resets, resent] = [|tally: &Tally| tally.resets, |tally: &Tally| tally.resent]
        .map(|count| tallies.iter().map(count).sum::<usize>());
    println!("{workers} workers: {rounds} rounds, {resets} resets, {resent} segments sent again");
    assert!(rounds >= 2 * guests.len(), "{rounds} rounds: too few for a result");
    assert_eq!(resets, 0);
    // These guests retransmit after as little as 10 ms, and a busy machine sometimes takes longer to answer. One
    // segment per guest and takeover is acceptable.
    assert!(resent <= 2 * guests.len(), "{resent} segments sent again");
}

/// Stops a crowd when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[privileged::test]
fn the_pod_of_a_previous_agent_stays_alive_until_sigterm() {
    let (node, guests, taps) = node_with_crowd();
    let pods = ["old", "new"].map(|name| Namespace::new(name).expect("a namespace"));
    let words = ["--takeover", "--linger"];
    let first = node.pod(&pods[0], &guests, &words);
    let stop = AtomicBool::new(false);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let crowd =
            scope.spawn(|| crowd(guests.iter().cloned().zip(taps).collect(), &PATHS, PAUSE, &stop, PATIENCE));
        let _stop = Stop(&stop);
        std::thread::sleep(Duration::from_secs(1));
        let second = node.pod(&pods[1], &guests, &words);
        let alive = || {
            anyhow::ensure!(first.log().contains("lingering until SIGTERM"));
            first.ask("/healthz")
        };
        let (status, body) = eventually(PATIENCE, alive).expect("it lingers");
        assert_eq!((status, body.trim()), (200, "another agent serves the ports of this one"));
        assert_eq!(first.ask("/readyz").expect("an answer").0, 503);
        assert_eq!(second.ask("/readyz").expect("an answer").0, 200);
        let status = first.stop().expect("it ends on SIGTERM");
        assert!(status.success(), "{status}");
        assert_eq!(second.ask("/readyz").expect("an answer").0, 200);
        std::thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::Relaxed);
        crowd.join().expect("the crowd")
    });
    let failures: Vec<_> = tallies.iter().filter(|tally| tally.rounds.is_err() || tally.resets > 0).collect();
    assert!(failures.is_empty(), "{failures:?}");
    assert!(
        tallies.iter().all(|tally| tally.rounds.as_ref().is_ok_and(|rounds| *rounds >= 2)),
        "{tallies:?}"
    );
}

#[privileged::test]
fn a_takeover_loses_none_of_a_guests_other_traffic() {
    const PINGS: u32 = 1_000;
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    std::thread::scope(|scope| {
        let pings = scope.spawn(|| guest.ping(support::host::ADDRESS, PINGS));
        let _second = node.agent(&guests, &["--takeover"]);
        assert!(first.ended(LEAVES_WITHIN).expect("it exits").0.success());
        assert_eq!(pings.join().expect("pings").expect("an end"), PINGS);
    });
}

// If either agent dies during a takeover, guests are served again after the next start at the latest. A refused
// takeover changes nothing.

#[privileged::test]
fn an_agent_keeps_serving_if_its_successor_dies_before_the_promise() {
    let (node, guest) = one_guest(|_| {});
    let agent = node.agent(&[guest.identity().clone()], &[]);
    for phase in ["hello", "drain"] {
        let mut kept = Client::connect(&guest);
        kept.transmit("GET /v1/meta-data HTTP/1.1\r\nHos");
        let mut taker = node.taker();
        taker.go(phase);
        drop(taker);
        std::thread::sleep(Duration::from_millis(500));
        eventually(PATIENCE, || agent.metrics().map(drop)).expect("metrics are available again");
        kept.transmit("t: x\r\n\r\n");
        let (status, head, _) = kept.answer();
        assert_eq!((status, says_close(&head)), (200, false), "{phase}");
        assert_eq!(kept.ask("GET /v1/meta-data", "").0, 200, "{phase}: the connection still works");
        assert_eq!(node.claims(), 0, "{phase}");
    }
    assert!(node.identities().values().all(|[_, hub, drain]| (*hub, *drain) == (0, 0)));
    // The agent accepts the next takeover.
    let _next = node.agent(&[guest.identity().clone()], &["--takeover"]);
    assert!(agent.ended(LEAVES_WITHIN).expect("it exits").0.success());
}

/// Whether a process has a handler for SIGTERM (`SigCgt` in proc_pid_status(5)).
fn catches_sigterm(pid: u32) -> anyhow::Result<bool> {
    const SIGTERM: u32 = 15;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).context("no SigCgt")?;
    Ok(u64::from_str_radix(caught, 16)? & 1 << (SIGTERM - 1) != 0)
}

#[privileged::test]
fn an_agent_keeps_serving_if_its_successor_is_stopped_while_it_prepares() {
    let (node, guest) = one_guest(|_| {});
    let port = PortArgument::new(Host::tap_name(guest.identity()), guest.identity().mac);
    let mut agent = node.agent(&[guest.identity().clone()], &[]);
    // On a busy machine the signal may come too late, after the next agent has taken the ports. Such a round does not
    // count.
    let in_time = (0..10).filter(|_| {
        let pins = node.bpffs.pins();
        let words = agent::arguments_with_pins(node.records.path(), std::slice::from_ref(&port), &pins);
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.args(words).arg("--takeover").env("NO_COLOR", "1").stderr(Stdio::piped());
        let mut next = node.host.ns().spawn(&mut command).expect("it starts");
        let (mut log, said) = (next.stderr.take().expect("it is piped"), Mutex::new(String::new()));
        let (is_early, status) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut part = [0; 4_096];
                while let Ok(length @ 1..) = log.read(&mut part) {
                    said.lock().expect("no panic").push_str(&String::from_utf8_lossy(&part[..length]));
                }
            });
            // It catches the signal before it loads its programs, which takes longer than anything before.
            eventually(PATIENCE, || {
                anyhow::ensure!(catches_sigterm(next.id())?);
                Ok(())
            })
            .expect("it catches SIGTERM");
            process::terminate(next.id()).expect("a signal");
            let is_early = !said.lock().expect("no panic").contains("memory for records");
            (is_early, next.wait().expect("it ends"))
        });
        let said = said.into_inner().expect("no panic");
        assert!(status.success() && said.contains("SIGTERM: stopping"), "{status}: {said}");
        let patience = if is_early { PATIENCE } else { Duration::from_secs(5) };
        match guest.fetch("/v1/meta-data", patience) {
            Ok(fetched) => assert_eq!(fetched.status, 200, "{said}"),
            Err(error) if is_early => panic!("{error:#}: {said}"),
            Err(_) => agent = node.agent(&[guest.identity().clone()], &[]),
        }
        is_early
    });
    assert_eq!(in_time.take(3).count(), 3, "too few signals came before the programs were loaded");
    assert!(agent.stop().expect("it still ran").success());
}

#[privileged::test]
fn a_successor_dead_after_the_promise_leaves_ports_closed_until_the_next_start() {
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let agent = node.agent(&guests, &[]);
    let before = node.identities();
    let mut taker = node.taker();
    taker.go("take");
    drop(taker);
    assert!(agent.ended(LEAVES_WITHIN).expect("it exits").0.success());
    assert_eq!(node.bpffs.port_links().len(), 1, "its port is closed");
    assert!(guest.fetch("/v1/meta-data", Duration::from_secs(2)).is_err(), "no agent answers");
    let _next = node.agent(&guests, &["--takeover"]);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
    assert_eq!(node.identities(), before);
}

#[privileged::test]
fn an_agent_that_dies_while_draining_harms_no_other_guest() {
    let (node, guest) = one_guest(|record| {
        record["user_data"] = json!({"text": "x".repeat(1 << 20)});
        record["serve"] = json!({"limits": {"user_data": 1 << 20}});
    });
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    let mut slow = Client::connect(&guest);
    slow.transmit("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    std::thread::sleep(Duration::from_millis(500));
    let second = node.agent(&guests, &["--takeover"]);
    first.kill().expect("it still serves the slow guest");
    let fetched = guest.fetch("/v1/meta-data", PATIENCE).expect("the second agent serves");
    assert_eq!(fetched.status, 200);
    let cleared = || {
        anyhow::ensure!(node.identities().values().all(|[.., drain]| *drain == 0) && node.claims() == 0);
        Ok(())
    };
    eventually(PATIENCE, cleared).expect("no entry refers to the dead agent");
    assert!(second.eventually_logs("ended before its connections did"), "{}", second.log());
}

#[privileged::test]
fn a_newer_protocol_and_a_second_takeover_are_refused_with_advice() {
    let (node, guest) = one_guest(|_| {});
    let _agent = node.agent(&[guest.identity().clone()], &[]);
    let mut newer = node.taker();
    newer.transmit(&json!({"say": "hello", "oldest": 3, "newest": 7, "release": "99.0"}));
    let refused = newer.receive();
    assert_eq!(refused["say"], "no");
    assert!(
        refused["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("stop the running agent and start the new one"))
    );
    let mut first = node.taker();
    first.go("hello");
    let mut second = node.taker();
    second.transmit(&json!({"say": "hello", "oldest": 1, "newest": 9, "hats": 3}));
    assert!(second.receive()["reason"].as_str().is_some_and(|reason| reason.contains("under way")));
    drop(first);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[privileged::test]
fn the_next_agent_of_each_release_is_handed_the_ports() {
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    for sample in golden::all("handover") {
        let agent = node.agent(&guests, &[]);
        assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
        let before = node.identities();
        let text = String::from_utf8(sample.bytes).expect("text");
        let said = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["say"].clone();
        let mut taker = node.taker();
        // The messages after these belong to connections that the previous agent still serves; here it has none.
        for line in text.lines().take_while(|line| !line.contains(r#""say":"ask""#)) {
            match line.split_once(' ').expect("an agent and its message") {
                ("next", message) => taker.transmit(&serde_json::from_str(message).expect("JSON")),
                (_, message) => assert_eq!(taker.receive()["say"], said(message), "{}", sample.release),
            }
        }
        assert_eq!(taker.receive()["say"], "done", "{}", sample.release);
        assert!(agent.ended(LEAVES_WITHIN).expect("it exits").0.success());
        assert_eq!(node.identities(), before, "{}", sample.release);
    }
    let _next = node.agent(&guests, &[]);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[privileged::test]
fn a_takeover_without_a_running_agent_is_a_plain_start() {
    let (node, guest) = one_guest(|_| {});
    let agent = node.agent(&[guest.identity().clone()], &["--takeover"]);
    assert!(agent.eventually_logs("nothing to take over"), "{}", agent.log());
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}
