//! One agent takes the ports of another over under load, and no guest notices; whichever dies, guests are served.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aya::maps::{HashMap, Map, MapData};
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument};
use support::answers::PATHS;
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::tap::Shape;
use support::tap_client::{Tally, crowd};

/// Far more than anything here takes: reached only when something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest an agent that was taken over from may stay: 30 s for its guests, and some.
const LEAVES_WITHIN: Duration = Duration::from_secs(40);

/// A guest's pause from one round to the next: below what a VM may ask.
const PAUSE: Duration = Duration::from_millis(100);

/// Guests of the crowd; `XDP_IMDS_TAKEOVER_GUESTS` says otherwise.
fn crowd_size() -> u16 {
    let set = std::env::var("XDP_IMDS_TAKEOVER_GUESTS").ok().and_then(|text| text.parse().ok());
    set.unwrap_or(64)
}

/// A node with pins, and the records of its guests.
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

    /// An agent in a namespace of its own, as in a pod: the taps are in another.
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

    /// Each identity of the kernel's table, by its key: slot, hub, draining hub.
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

    fn socket(&self) -> PathBuf {
        self.records.path().join("run/takeover.sock")
    }

    fn taker(&self) -> Taker {
        let stream = UnixStream::connect(self.socket()).expect("an agent listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Taker(BufReader::new(stream))
    }
}

/// An agent that takes over, made of its words.
struct Taker(BufReader<UnixStream>);

impl Taker {
    fn say(&mut self, word: &Value) {
        writeln!(self.0.get_mut(), "{word}").expect("said");
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Says what comes before `until`, with its answers.
    fn go(&mut self, until: &str) {
        let hello = json!({"say": "hello", "oldest": 1, "newest": 1});
        for (word, answer) in
            [(hello, "welcome"), (json!({"say": "drain"}), "draining"), (json!({"say": "take"}), "yours")]
        {
            self.say(&word);
            assert_eq!(self.hear()["say"], answer);
            if word["say"] == until {
                return;
            }
        }
        panic!("no such word: {until}");
    }
}

/// Where the taps are.
enum Place {
    /// In the agents' namespace.
    Home,
    /// In another than the agents', which steer by classifiers: no redirect of theirs leads out of there.
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

/// A guest that speaks TCP by its kernel, its record, and its node.
fn one_guest(change: impl FnOnce(&mut Value)) -> (Node, Guest) {
    let node = Node::new();
    let guest = Guest::boot(&node.host, &Spec::of(&Identity::of(0))).expect("a guest");
    node.write(guest.identity(), change);
    (node, guest)
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

    fn say(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).expect("said");
    }

    fn ask(&mut self, line: &str, fields: &str) -> (u16, String, Vec<u8>) {
        self.say(&format!("{line} HTTP/1.1\r\nHost: {METADATA}\r\n{fields}\r\n"));
        self.answer()
    }

    /// Status, head and body of one answer.
    fn answer(&mut self) -> (u16, String, Vec<u8>) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut octet = [0];
            self.0.read_exact(&mut octet).expect("a head in time");
            head.push(octet[0]);
        }
        let head = String::from_utf8(head).expect("text").to_ascii_lowercase();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let length = field("content-length:").map_or(0, |length| length.parse().expect("a number"));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).expect("a body in time");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, head, body)
    }

    /// True when the service closes without a reset.
    fn ends(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0))
    }
}

fn says_close(head: &str) -> bool {
    head.contains("\r\nconnection: close\r\n")
}

#[test]
fn a_crowd_of_guests_is_taken_over_twice_without_a_failure_or_a_reset() {
    if !privileged::or_skip() {
        return;
    }
    for workers in ["1", "2"] {
        crowd_is_taken_over(workers, &Place::Home);
    }
}

#[test]
fn a_crowd_in_a_pod_steered_by_classifiers_is_taken_over_without_a_failure_or_a_reset() {
    if !privileged::or_skip() {
        return;
    }
    for workers in ["1", "2"] {
        crowd_is_taken_over(workers, &Place::pod());
    }
}

fn crowd_is_taken_over(workers: &str, place: &Place) {
    let mut node = Node::new();
    let guests: Vec<Identity> =
        (0..crowd_size()).map(|number| Identity::of(number).with_user_data_of(2_000)).collect();
    for guest in &guests {
        guest.write(node.records.path(), 1).expect("a record");
    }
    let taps = node.host.rack(&guests, Shape::default()).expect("taps");
    let mut running = place.agent(&node, &guests, &["--workers", workers]);
    let before = node.identities();
    assert_eq!(before.len(), guests.len());
    let stop = AtomicBool::new(false);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let crowd =
            scope.spawn(|| crowd(guests.iter().cloned().zip(taps).collect(), &PATHS, PAUSE, &stop, PATIENCE));
        // So that it ends also when something here fails.
        let _stop = Stop(&stop);
        std::thread::sleep(Duration::from_secs(1));
        for side in [1, 0] {
            let next = place.agent(&node, &guests, &["--workers", workers, "--takeover"]);
            let (status, said) =
                std::mem::replace(&mut running, next).ended(LEAVES_WITHIN).expect("the agent before leaves");
            assert!(status.success(), "{status}\n{said}");
            assert!(!said.contains("cut off"), "{said}");
            let cleared = || {
                let now = node.identities();
                anyhow::ensure!(now.values().all(|[.., drain]| *drain == 0) && node.claims() == 0);
                Ok(now)
            };
            let now = eventually(PATIENCE, cleared).expect("no trace of the agent before");
            assert!(now.values().all(|[_, hub, _]| hub / 32 == side), "hubs of side {side}: {now:?}");
            let slots = |all: &BTreeMap<[u8; 16], [u32; 3]>| {
                all.iter().map(|(key, [slot, ..])| (*key, *slot)).collect::<Vec<_>>()
            };
            assert_eq!(slots(&now), slots(&before), "everybody keeps their slot");
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
    assert!(rounds >= 2 * guests.len(), "{rounds} rounds: too few to say anything");
    assert_eq!(resets, 0);
    // These guests send again after 10 ms at the least, which a busy machine takes now and then: one segment for each guest
    // and takeover is no storm.
    assert!(resent <= 2 * guests.len(), "{resent} segments sent again");
}

/// Stops a crowd, whatever else happens.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn connections_that_last_end_where_they_began_and_what_was_said_on_them_holds() {
    if !privileged::or_skip() {
        return;
    }
    for place in [Place::Home, Place::pod()] {
        connections_that_last_end_where_they_began(&place);
    }
}

fn connections_that_last_end_where_they_began(place: &Place) {
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
        client.say(&format!("PUT {attribute}/{name} HTTP/1.1\r\nHost: x\r\n{fields}"));
        client.answer().0
    };
    let get = |client: &mut Client, name: &str| client.ask(&format!("GET {attribute}/{name}"), google);

    let mut kept = Client::connect(&guest);
    assert_eq!(put(&mut kept, "before", "1"), 200);
    let ttl = "X-aws-ec2-metadata-token-ttl-seconds: 600\r\nContent-Length: 0\r\n";
    let (status, _, token) = Client::connect(&guest).ask("PUT /latest/api/token", ttl);
    assert_eq!(status, 200);
    let mut slow = Client::connect(&guest);
    slow.say("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut parked = Client::connect(&guest);
    parked.say(&format!(
        "GET /computeMetadata/v1/instance/attributes/colour?wait_for_change=true&timeout_sec=600 HTTP/1.1\r\nHost: x\r\n{google}\r\n"
    ));
    // A write that is under way when the agent is taken over.
    let mut writing = Client::connect(&guest);
    writing
        .say(&format!("PUT {attribute}/during HTTP/1.1\r\nHost: x\r\n{google}Content-Length: 4\r\n\r\nha"));
    std::thread::sleep(Duration::from_secs(1));

    let _second = place.agent(&node, &guests, &["--takeover"]);
    let (status, head, body) = parked.answer();
    assert_eq!(
        (status, says_close(&head), &body[..]),
        (200, true, &b"red"[..]),
        "answered with what there is"
    );
    assert!(kept.ends(), "an idle connection is closed, not reset");
    assert_eq!(
        get(&mut Client::connect(&guest), "before").2,
        b"1",
        "written at the first, read at the second"
    );
    writing.say("lf");
    let (status, head, _) = writing.answer();
    assert_eq!((status, says_close(&head)), (200, true));
    assert_eq!(get(&mut Client::connect(&guest), "during").2, b"half", "written over the takeover");
    let token = format!("X-aws-ec2-metadata-token: {}\r\n", String::from_utf8(token).expect("text"));
    assert_eq!(Client::connect(&guest).ask("GET /latest/meta-data/hostname", &token).0, 200);
    let (status, head, body) = slow.answer();
    assert_eq!((status, says_close(&head), body.len()), (200, false, LONG), "asked for before");
    assert!(slow.ends());
    drop((parked, writing, slow, kept));
    let (status, said) = first.ended(LEAVES_WITHIN).expect("the agent before leaves");
    assert!(status.success() && !said.contains("cut off"), "{status}\n{said}");
}

#[test]
fn an_agent_whose_successor_dies_before_the_promise_goes_on_as_before() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let agent = node.agent(&[guest.identity().clone()], &[]);
    for phase in ["hello", "drain"] {
        let mut kept = Client::connect(&guest);
        kept.say("GET /v1/meta-data HTTP/1.1\r\nHos");
        let mut taker = node.taker();
        taker.go(phase);
        drop(taker);
        std::thread::sleep(Duration::from_millis(500));
        eventually(PATIENCE, || agent.metrics().map(drop)).expect("metrics are given again");
        kept.say("t: x\r\n\r\n");
        let (status, head, _) = kept.answer();
        assert_eq!((status, says_close(&head)), (200, false), "{phase}");
        assert_eq!(kept.ask("GET /v1/meta-data", "").0, 200, "{phase}: the connection is as good as new");
        assert_eq!(node.claims(), 0, "{phase}");
    }
    assert!(node.identities().values().all(|[_, hub, drain]| (*hub, *drain) == (0, 0)));
    // And is ready for the next who asks.
    let _next = node.agent(&[guest.identity().clone()], &["--takeover"]);
    assert!(agent.ended(LEAVES_WITHIN).expect("it leaves").0.success());
}

#[test]
fn when_the_successor_dies_after_the_promise_ports_stay_closed_and_the_next_start_goes_on() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let agent = node.agent(&guests, &[]);
    let before = node.identities();
    let mut taker = node.taker();
    taker.go("take");
    drop(taker);
    assert!(agent.ended(LEAVES_WITHIN).expect("it leaves").0.success());
    assert_eq!(node.bpffs.port_links().len(), 1, "its port is closed");
    assert!(guest.fetch("/v1/meta-data", Duration::from_secs(2)).is_err(), "nobody answers");
    let _next = node.agent(&guests, &["--takeover"]);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
    assert_eq!(node.identities(), before);
}

#[test]
fn an_agent_that_dies_while_it_serves_its_last_guests_takes_nobody_else_with_it() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|record| {
        record["user_data"] = json!({"text": "x".repeat(1 << 20)});
        record["serve"] = json!({"limits": {"user_data": 1 << 20}});
    });
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    let mut slow = Client::connect(&guest);
    slow.say("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    std::thread::sleep(Duration::from_millis(500));
    let second = node.agent(&guests, &["--takeover"]);
    first.kill().expect("it serves the slow one still");
    let fetched = guest.fetch("/v1/meta-data", PATIENCE).expect("the other serves");
    assert_eq!(fetched.status, 200);
    let cleared = || {
        anyhow::ensure!(node.identities().values().all(|[.., drain]| *drain == 0) && node.claims() == 0);
        Ok(())
    };
    eventually(PATIENCE, cleared).expect("no trace of the dead one");
    assert!(second.comes_to_say("ended before its guests were served"), "{}", second.said());
}

#[test]
fn a_port_is_let_go_of_while_the_agent_before_still_serves_its_last_guests() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|record| {
        record["network"]["nics"][0]["port"] = json!({"ifname": Host::tap_name(&Identity::of(0))});
        record["user_data"] = json!({"text": "x".repeat(1 << 20)});
        record["serve"] = json!({"limits": {"user_data": 1 << 20}});
    });
    let first = node.agent(&[], &[]);
    eventually(PATIENCE, || guest.fetch("/v1/meta-data", PATIENCE).map(drop)).expect("served");
    let mut slow = Client::connect(&guest);
    slow.say("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    std::thread::sleep(Duration::from_millis(500));
    let _second = node.agent(&[], &["--takeover"]);
    std::fs::remove_file(guest.identity().path(node.records.path())).expect("a record");
    let tap = guest.host_tap().name();
    eventually(LEAVES_WITHIN / 4, || {
        let shown = node.host.ns().ip(&format!("link show {tap}"))?;
        anyhow::ensure!(!shown.contains("xdp"), "{shown}");
        Ok(())
    })
    .expect("its program is off the tap");
    assert!(!first.said().contains("leaving"), "the agent before had gone:\n{}", first.said());
}

#[test]
fn a_pod_takes_over_from_another_which_is_alive_until_it_is_told_to_end() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::new();
    let guests: Vec<Identity> =
        (0..crowd_size()).map(|number| Identity::of(number).with_user_data_of(2_000)).collect();
    for guest in &guests {
        guest.write(node.records.path(), 1).expect("a record");
    }
    let taps = node.host.rack(&guests, Shape::default()).expect("taps");
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
            anyhow::ensure!(first.said().contains("lingering until SIGTERM"));
            first.ask("/healthz")
        };
        let (status, body) = eventually(PATIENCE, alive).expect("it lingers");
        assert_eq!((status, body.trim()), (200, "another agent serves the ports of this one"));
        assert_eq!(first.ask("/readyz").expect("an answer").0, 503);
        assert_eq!(second.ask("/readyz").expect("an answer").0, 200);
        let status = first.stop().expect("it ends when told");
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

#[test]
fn a_newer_protocol_and_a_second_takeover_are_refused_with_what_to_do() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let _agent = node.agent(&[guest.identity().clone()], &[]);
    let mut newer = node.taker();
    newer.say(&json!({"say": "hello", "oldest": 2, "newest": 7, "release": "99.0"}));
    let refused = newer.hear();
    assert_eq!(refused["say"], "no");
    assert!(refused["reason"].as_str().is_some_and(|reason| reason.contains("stop it and start the other")));
    let mut first = node.taker();
    first.go("hello");
    let mut second = node.taker();
    second.say(&json!({"say": "hello", "oldest": 1, "newest": 9, "hats": 3}));
    assert!(second.hear()["reason"].as_str().is_some_and(|reason| reason.contains("under way")));
    drop(first);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[test]
fn without_an_agent_that_runs_a_takeover_is_a_start() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let agent = node.agent(&[guest.identity().clone()], &["--takeover"]);
    assert!(agent.comes_to_say("nothing to take over"), "{}", agent.said());
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[test]
fn guests_other_traffic_goes_on_through_a_takeover_without_a_loss() {
    const PINGS: u32 = 1_000;
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    std::thread::scope(|scope| {
        let pings = scope.spawn(|| guest.ping(support::host::ADDRESS, PINGS));
        let _second = node.agent(&guests, &["--takeover"]);
        assert!(first.ended(LEAVES_WITHIN).expect("it leaves").0.success());
        assert_eq!(pings.join().expect("pings").expect("an end"), PINGS);
    });
}
