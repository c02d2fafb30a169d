//! No guest gets a byte of another guest's data, whatever it claims and whatever happens to its tap or record.

mod secrets;

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_common::mac::Mac;
use metadata_content::http::Method;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use support::agent::{Agent, IMPOSTOR, PortArgument};
use support::answers::PATHS;
use support::arena::serves;
use support::eventually;
use support::guest::METADATA;
use support::host::Host;
use support::netns::Namespace;
use support::question::{Question, TOKENS};
use support::record::{Identity, replace};
use support::station::{Station, Talk, answer, get};
use support::tap::{Shape, Tap};
use support::{agent, exposition, frames, privileged, question};

// VMs with unique values in every field of their records, and the marks that identify them.

/// A VM derived from its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vm(u32);

/// The VM that tries to read another's data.
const SPY: Vm = Vm(0x0012_3457);
/// The VM whose data must stay private.
const VICTIM: Vm = Vm(0x00c4_d5e6);

impl Vm {
    fn mac(self, nic: u8) -> Mac {
        let [_, a, b, c] = self.0.to_be_bytes();
        Mac([0x52, 0x54, nic, a, b, c])
    }

    fn address(self) -> Ipv4Addr {
        let [_, a, b, c] = self.0.to_be_bytes();
        Ipv4Addr::new(10, a, b, c)
    }

    fn address_v6(self) -> String {
        format!("2001:db8::{:x}:{:x}", self.0 >> 16, self.0 & 0xffff)
    }

    fn uuid(self) -> String {
        format!("7c0f1a52-3b5e-4d1a-9d2c-{:012x}", self.0)
    }

    /// The VM's record, with a unique secret in every field that may hold one.
    fn record(self) -> Value {
        let number = self.0;
        let mut record = question::typical_record(number, None);
        record["network"]["nics"][0]["addresses"][1]["address"] = json!(format!("{}/64", self.address_v6()));
        record["vendor_data"] = json!({ "text": format!("#cloud-config\n# vendor-data of {number}\n") });
        record["vendor_data2"] = json!({ "text": format!("#cloud-config\n# more of {number}\n") });
        record["admin"]["password"] = json!(format!("password-{number}"));
        record["random_seed"] =
            json!({ "base64": STANDARD.encode(format!("seed of {number} and no other")) });
        record["metadata"]["note"] = json!(format!("note of {number}"));
        record["labels"] = json!([format!("label-{number}")]);
        record["files"] =
            json!([{ "path": "/etc/secret", "base64": STANDARD.encode(format!("file of {number}")) }]);
        record["credentials"]["iam"]["session_token"] = json!(format!("session-{number}"));
        record["serve"] = json!({ "limits": { "burst": 1_000_000, "rps": 1_000_000 } });
        record
    }

    fn write(self, records: &std::path::Path, change: impl FnOnce(&mut Value)) -> Result<()> {
        let mut record = self.record();
        change(&mut record);
        replace(&self.path(records), &record.to_string())
    }

    /// File of the record.
    fn path(self, records: &std::path::Path) -> std::path::PathBuf {
        records.join(format!("vm-{}.json", self.0))
    }

    /// Texts that no other VM may receive: the number that the record repeats everywhere, in plain and in base64, and
    /// the parts of its addresses and UUID.
    fn marks(self) -> Marks {
        let Self(number) = self;
        let [_, a, b, c] = number.to_be_bytes();
        let text = number.to_string();
        let plain = vec![
            text.clone(),
            format!("{number:06x}"),
            format!("{a:02x}:{b:02x}:{c:02x}"),
            format!("{a}.{b}.{c}"),
            self.address_v6(),
        ];
        // A base64 group may start 0, 1 or 2 bytes before the text; drop edge characters shared with other bytes.
        let encoded = (0..3).map(|before| {
            let bytes = [vec![b'?'; before], text.clone().into_bytes(), vec![b'?'; 3]].concat();
            let whole = STANDARD.encode(bytes);
            let (first, last) = ((before * 8).div_ceil(6), (before + text.len()) * 8 / 6);
            whole[first..last].to_owned()
        });
        Marks { plain, encoded: encoded.collect() }
    }
}

/// Texts that identify a VM.
#[derive(Clone, Debug)]
struct Marks {
    plain: Vec<String>,
    encoded: Vec<String>,
}

impl Marks {
    fn add(&mut self, mark: impl Into<String>) {
        self.plain.push(mark.into());
    }

    /// The first mark found in these bytes.
    fn within(&self, bytes: &[u8]) -> Option<&str> {
        let text: String = bytes.iter().map(|byte| char::from(*byte)).collect();
        let lower = text.to_ascii_lowercase();
        let plain = self.plain.iter().find(|mark| lower.contains(&mark.to_ascii_lowercase()));
        plain.or_else(|| self.encoded.iter().find(|mark| text.contains(mark.as_str()))).map(String::as_str)
    }
}

/// A node for two VMs with a tap each.
#[derive(Debug)]
struct Node {
    host: Host,
    records: tempfile::TempDir,
}

impl Node {
    /// Creates a node without records.
    fn new() -> Result<Self> {
        Ok(Self { host: Host::new()?, records: tempfile::tempdir()? })
    }

    /// Creates a VM's tap on the bridge.
    fn station(&self, name: &str, mac: Mac, address: Ipv4Addr, shape: Shape) -> Result<Station> {
        let tap = Tap::create(self.host.ns(), name, shape)?;
        self.host.ns().ip(&format!("link set {name} master br0 up"))?;
        Ok(Station::new(Arc::new(tap), mac, address))
    }

    /// Starts an agent that serves these ports.
    fn agent(&self, ports: &[PortArgument]) -> Result<Agent<'_>> {
        Agent::start(self.host.ns(), self.records.path(), ports)
    }

    /// Like [`Node::agent`], with `--steer`.
    fn agent_steering(&self, mode: &str, ports: &[PortArgument]) -> Result<Agent<'_>> {
        let mut words = agent::arguments(self.records.path(), ports);
        words.extend(["--steer".into(), mode.into()]);
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }
}

/// A request as bytes, with more fields. Adds a `Host` unless a field has that name.
fn bytes(question: &Question, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut request = format!("{} {} HTTP/1.1\r\n", question.method.as_str(), question.target).into_bytes();
    if fields.iter().all(|(name, _)| *name != "Host") {
        request.extend(b"Host: x\r\n");
    }
    let mut field = |name: &str, value: &[u8]| {
        request.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
    };
    question.fields.iter().for_each(|(name, value)| field(name, value));
    fields.iter().for_each(|(name, value)| field(name, value.as_bytes()));
    if !question.body.is_empty() {
        field("Content-Length", question.body.len().to_string().as_bytes());
    }
    field("Connection", b"close");
    request.extend(b"\r\n");
    request.extend(&question.body);
    request
}

/// Sends a request; returns status and body.
fn ask(station: &mut Station, question: &Question, fields: &[(&str, &str)]) -> Result<(u16, Vec<u8>)> {
    let mut talk = station.talk(question.to);
    if question.source_port < 1024 {
        talk.local.1 = question.source_port;
    }
    let request = bytes(question, fields);
    let received = station.exchange(&mut talk, &request);
    let received = received.with_context(|| String::from_utf8_lossy(&request).into_owned())?;
    answer(received).with_context(|| format!("{} {}", question.method.as_str(), question.target))
}

/// One token of each kind, valid for `seconds`: a request that needs it, the field that carries it, and the token.
fn tokens(station: &mut Station, seconds: u32) -> Result<Vec<(Question, &'static str, String)>> {
    TOKENS
        .iter()
        .map(|(host, field, path, age)| {
            let put = Question::get(*path).by(Method::Put).at(*host);
            let (status, body) = ask(station, &put.with(age, seconds.to_string()), &[])?;
            if status != 200 {
                bail!("no token by {path}: {status}");
            }
            let good_at = match *field {
                "Metadata-Token" => "/v1/instance",
                _ => "/latest/meta-data/instance-id",
            };
            Ok((Question::get(good_at).at(*host), *field, String::from_utf8(body)?))
        })
        .collect()
}

// Taps that are removed, recreated for another guest, moved and changed, and records that change during a request.

/// Address and port of the service.
const SERVICE: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Bound on the time the agent takes to notice a change.
const NOTICE: Duration = Duration::from_secs(20);
/// How long to wait for an answer that must not come.
const IN_VAIN: Duration = Duration::from_millis(1_500);

/// A node with guests, each with its own tap and record.
struct Guests {
    node: Node,
    identities: Vec<Identity>,
    stations: Vec<Station>,
}

impl Guests {
    fn new(count: u16, shape: Shape) -> Self {
        let node = Node::new().expect("a node");
        let identities: Vec<_> = (0..count).map(Identity::of).collect();
        let stations = identities.iter().map(|identity| {
            identity.write(node.records.path(), 1).expect("a record");
            let tap = node.host.tap(identity, shape).expect("a tap");
            Station::new(tap, identity.mac, identity.address)
        });
        Self { stations: stations.collect(), identities, node }
    }

    fn ports(&self) -> Vec<PortArgument> {
        let named = |identity: &Identity| PortArgument::new(Host::tap_name(identity), identity.mac);
        self.identities.iter().map(named).collect()
    }
}

fn assert_served(identity: &Identity, station: &mut Station) {
    eventually(NOTICE, || serves(identity, station, PATHS[1]))
        .unwrap_or_else(|error| panic!("{}: {error:#}", identity.hostname));
}

/// Sends a SYN and a request, and checks that no answer arrives.
fn gets_no_answer(station: &mut Station) -> Result<()> {
    station.receive()?;
    let mut talk = station.talk(SERVICE);
    station.transmit(&talk.syn())?;
    station.wait(IN_VAIN);
    // `segments` leaves out frames that the bridge floods.
    let answers = station.segments()?;
    ensure!(answers.is_empty(), "received {answers:?}");
    talk.open = true;
    let segments = talk.transmit(&get(PATHS[1]));
    segments.iter().try_for_each(|segment| station.transmit(segment))?;
    station.wait(IN_VAIN);
    let answers = station.segments()?;
    ensure!(answers.is_empty(), "received {answers:?}");
    Ok(())
}

/// Opens a connection and sends half a request.
fn send_half(station: &mut Station) -> Talk {
    let mut talk = station.open(SERVICE).expect("a connection");
    let segments = talk.transmit(&get(PATHS[1])[..10]);
    station.until(&mut talk, &segments, |talk| talk.in_flight() == 0).expect("half a request");
    talk
}

#[privileged::test]
fn a_recreated_tap_with_the_same_name_and_index_serves_its_new_guest() {
    const IFINDEX: u32 = 4_711;
    let node = Node::new().expect("a node");
    let identities: Vec<_> = (0..4).map(Identity::of).collect();
    // Every guest may use this port.
    let ports: Vec<_> = identities.iter().map(|identity| PortArgument::new("tap", identity.mac)).collect();
    let agent = node.agent(&ports).expect("an agent");
    let mut previous: Option<(Talk, Identity)> = None;
    for identity in &identities {
        // The previous guest's record is removed along with its tap.
        if let Some((_, gone)) = &previous {
            std::fs::remove_file(gone.path(node.records.path())).expect("a record is removed");
        }
        identity.write(node.records.path(), 1).expect("a record");
        let make = || Tap::create_at(node.host.ns(), "tap", Shape::default(), IFINDEX);
        let tap = eventually(NOTICE, make).expect("the same index is free again");
        node.host.ns().ip("link set tap master br0 up").expect("it comes up");
        let mut station = Station::new(Arc::new(tap), identity.mac, Identity::of(0).address);
        assert_served(identity, &mut station);
        if let Some((talk, gone)) = &mut previous {
            // Continue the previous guest's connection with its exact sequence numbers.
            let rest = talk.transmit(&get(PATHS[1])[10..]);
            rest.iter().try_for_each(|segment| station.transmit(segment)).expect("it is sent");
            station.wait(IN_VAIN);
            for reply in station.segments().expect("received segments") {
                assert!(reply.payload.is_empty(), "{} receives {:?}", identity.hostname, reply.payload);
            }
            // The previous guest's own MAC gets nothing either: its record is gone.
            let mut stale = Station::new(Arc::clone(station.tap()), gone.mac, gone.address);
            let received = stale.ask(SERVICE, &get(PATHS[1])).and_then(|bytes| answer(&bytes));
            let refused = received.map_or(true, |(status, body)| {
                (status == 404 || status == 503) && !body.windows(5).any(|part| part == b"guest")
            });
            assert!(refused, "{}'s MAC is still served", gone.hostname);
        }
        previous = Some((send_half(&mut station), identity.clone()));
    }
    exposition::balance(&agent, 0).expect("every frame is accounted for");
}

#[privileged::test]
fn a_moved_tap_is_no_longer_served_and_its_name_serves_its_successor() {
    let mut guests = Guests::new(2, Shape::default());
    let ports = guests.ports();
    let elsewhere = Host::inside(Namespace::new("pod").expect("a namespace")).expect("a pod");
    let agent = guests.node.agent(&ports).expect("an agent");
    let [moved, stays] = &mut guests.stations[..] else { panic!("two guests") };
    assert_served(&guests.identities[0], moved);
    let mut talk = send_half(moved);
    guests.node.host.ns().ip(&format!("link set tap0 netns {}", elsewhere.ns().name())).expect("it moves");
    elsewhere.ns().ip("link set tap0 master br0 up").expect("it comes up");
    eventually(NOTICE, || gets_no_answer(moved)).expect("no answer");
    let rest = talk.transmit(&get(PATHS[1])[10..]);
    rest.iter().try_for_each(|segment| moved.transmit(segment)).expect("it is sent");
    moved.wait(IN_VAIN);
    assert!(
        moved.segments().expect("received segments").is_empty(),
        "the rest of the request gets no answer there"
    );
    assert_served(&guests.identities[1], stays);
    // Another guest's tap takes over the name.
    let heir = Identity::of(2);
    heir.write(guests.node.records.path(), 1).expect("a record");
    std::fs::remove_file(guests.identities[0].path(guests.node.records.path())).expect("a record is removed");
    write_on_port(&heir, guests.node.records.path(), "tap0").expect("a record");
    let tap = Tap::create(guests.node.host.ns(), "tap0", Shape::default()).expect("a tap");
    guests.node.host.ns().ip("link set tap0 master br0 up").expect("it comes up");
    let mut station = Station::new(Arc::new(tap), heir.mac, heir.address);
    assert_served(&heir, &mut station);
    gets_no_answer(moved).expect("still no answer");
    exposition::balance(&agent, 0).expect("every frame is accounted for");
}

/// Writes a record whose NIC names its port.
fn write_on_port(identity: &Identity, records: &std::path::Path, port: &str) -> Result<()> {
    let mut record: Value = serde_json::from_str(&identity.record(2))?;
    record["network"]["nics"][0]["port"] = serde_json::json!({ "ifname": port });
    replace(&identity.path(records), &record.to_string())
}

#[privileged::test]
fn taps_that_swap_names_serve_no_guest_the_others_record() {
    let mut guests = Guests::new(2, Shape::default());
    let ports = guests.ports();
    let _agent = guests.node.agent(&ports).expect("an agent");
    let swap = |ns: &Namespace| {
        for (from, to) in [("tap0", "aside"), ("tap1", "tap0"), ("aside", "tap1")] {
            ns.ip(&format!("link set {from} down")).expect("it goes down");
            ns.ip(&format!("link set {from} name {to}")).expect("it is renamed");
            ns.ip(&format!("link set {to} up")).expect("it comes up");
        }
    };
    for round in 0..3 {
        for (identity, station) in guests.identities.iter().zip(&mut guests.stations) {
            assert_served(identity, station);
        }
        let mut talks: Vec<_> = guests.stations.iter_mut().map(send_half).collect();
        swap(guests.node.host.ns());
        // A guest is unknown on a port with another guest's name. Neither the rest of its request nor a new request
        // gets an answer.
        for (talk, station) in talks.iter_mut().zip(&mut guests.stations) {
            let settled = eventually(NOTICE, || gets_no_answer(station));
            settled.unwrap_or_else(|error| panic!("round {round}: {error:#}"));
            let rest = talk.transmit(&get(PATHS[1])[10..]);
            rest.iter().try_for_each(|segment| station.transmit(segment)).expect("it is sent");
            station.wait(IN_VAIN);
            assert!(station.segments().expect("received segments").is_empty(), "round {round}");
        }
        swap(guests.node.host.ns());
    }
}

#[privileged::test]
fn an_answer_in_progress_comes_from_one_record_whatever_happens_to_it() {
    const BYTES: usize = 60_000;
    let mut guests = Guests::new(1, Shape::default());
    let ports = guests.ports();
    let first = guests.identities[0].clone().with_user_data_of(BYTES);
    first.write(guests.node.records.path(), 2).expect("a record");
    let agent = guests.node.agent(&ports).expect("an agent");
    let station = &mut guests.stations[0];
    // Another VM with the same MAC on the same port.
    let other = Identity { mac: first.mac, ..Identity::of(9).with_user_data_of(BYTES) };
    let swaps: [(&str, &dyn Fn()); 3] = [
        ("it changes", &|| {
            let changed = Identity { user_data: other.user_data.clone(), ..first.clone() };
            changed.write(guests.node.records.path(), 3).expect("a record");
        }),
        ("it is removed", &|| std::fs::remove_file(first.path(guests.node.records.path())).expect("removed")),
        ("another takes its place", &|| {
            std::fs::remove_file(first.path(guests.node.records.path())).expect("removed");
            other.write(guests.node.records.path(), 1).expect("a record");
        }),
    ];
    for (generation, (name, swap)) in swaps.into_iter().enumerate() {
        let _ = std::fs::remove_file(other.path(guests.node.records.path()));
        first.write(guests.node.records.path(), 10 + generation as u64 * 10).expect("a record");
        eventually(NOTICE, || serves(&first, station, PATHS[1])).expect(name);
        let mut talk = station.talk(SERVICE);
        talk.window = 3_000;
        station.begin(&mut talk).expect("a connection");
        let segments = talk.transmit(&get(PATHS[1]));
        // Read only the first few segments, and acknowledge nothing after them.
        station.until(&mut talk, &segments, |talk| talk.received.len() > 2_000).expect("a beginning");
        swap();
        eventually(NOTICE, || {
            let gone = serves(&first, station, PATHS[1]).is_err();
            ensure!(gone, "a new request still gets the old record");
            Ok(())
        })
        .expect(name);
        talk.window = u16::MAX;
        let open = talk.ack();
        station.until(&mut talk, &[open], |talk| talk.ended).expect(name);
        station.transmit(&talk.finish()).expect(name);
        let (status, body) = answer(&talk.received).expect(name);
        assert!(status == 200 && body == first.user_data.as_bytes(), "{name}: the answer is a mixture");
    }
    exposition::balance(&agent, 0).expect("every frame is accounted for");
}

#[privileged::test]
fn a_port_keeps_serving_its_guest_while_its_device_changes() {
    let shape = Shape { queues: 2, vnet_hdr: true };
    for mode in ["xdp", "tcx"] {
        let mut guests = Guests::new(2, shape);
        let ports = guests.ports();
        let agent = guests.node.agent_steering(mode, &ports).expect("an agent");
        let ns = guests.node.host.ns();
        let changes: [(&str, &str); 10] = [
            ("released from the bridge", "link set tap0 nomaster"),
            ("enslaved again", "link set tap0 master br0"),
            ("with a small mtu", "link set tap0 mtu 1280"),
            ("with its mtu again", "link set tap0 mtu 1500"),
            ("with a larger mtu", "link set tap0 mtu 3000"),
            ("with its mtu once more", "link set tap0 mtu 1500"),
            ("with a long queue", "link set tap0 txqueuelen 5000"),
            ("in promiscuous mode", "link set tap0 promisc on"),
            ("with another mac of its own", "link set tap0 address 02:00:00:00:00:77"),
            ("with an alias", "link set tap0 alias guest"),
        ];
        for (name, words) in changes {
            let mut talk = send_half(&mut guests.stations[0]);
            ns.ip(words).unwrap_or_else(|error| panic!("{mode}, {name}: {error:#}"));
            let station = &mut guests.stations[0];
            let rest = talk.transmit(&get(PATHS[1])[10..]);
            station
                .until(&mut talk, &rest, |talk| talk.ended)
                .unwrap_or_else(|error| panic!("{mode}, {name}: {error:#}\n{}", agent.log()));
            station.transmit(&talk.finish()).expect("it is sent");
            assert!(talk.received.ends_with(guests.identities[0].user_data.as_bytes()), "{mode}, {name}");
            for (identity, station) in guests.identities.iter().zip(&mut guests.stations) {
                serves(identity, station, PATHS[1])
                    .unwrap_or_else(|error| panic!("{mode}, {name}: {error:#}\n{}", agent.log()));
            }
        }
        exposition::balance(&agent, 0).expect("every frame is accounted for");
    }
}

#[privileged::test]
fn a_queue_added_later_is_served_like_the_first() {
    for mode in ["xdp", "tcx"] {
        let mut guests = Guests::new(1, Shape { queues: 2, vnet_hdr: true });
        let ports = guests.ports();
        let agent: Agent<'_> = guests.node.agent_steering(mode, &ports).expect("an agent");
        let identity = &guests.identities[0];
        assert_served(identity, &mut guests.stations[0]);
        for more in 0..3 {
            let queue = guests.stations[0].tap().another_queue(guests.node.host.ns()).expect("a queue");
            let queue = Station::new(Arc::new(queue), identity.mac, identity.address);
            // Send on the new queue; the answer may arrive on any queue.
            let old = &mut guests.stations[0];
            let mut talk = old.talk(SERVICE);
            talk.local.1 += 1_000 * (more + 1);
            let answered = eventually(NOTICE, || {
                queue.transmit(&talk.syn())?;
                queue.wait(Duration::from_millis(50));
                let received = [old.segments()?, queue_received(&queue)?].concat();
                ensure!(received.iter().any(|reply| talk.is_theirs(reply)), "no answer by queue {more}");
                Ok(())
            });
            answered.unwrap_or_else(|error| panic!("{mode}: {error:#}"));
        }
        exposition::balance(&agent, 0).expect("every frame is accounted for");
    }
}

/// The segments received on one queue.
fn queue_received(queue: &Station) -> Result<Vec<support::raw::Reply>> {
    let mut other = Station::new(Arc::clone(queue.tap()), queue.mac, queue.address);
    other.segments()
}

// The MAC on its port identifies a guest, even if everything else is equal.

/// Writes a guest's record with a change.
fn write(identity: &Identity, records: &std::path::Path, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut record: Value = serde_json::from_str(&identity.record(1))?;
    change(&mut record);
    replace(&identity.path(records), &record.to_string())
}

fn assert_all_served(identity: &Identity, station: &mut Station) {
    for path in PATHS {
        serves(identity, station, path).unwrap_or_else(|error| panic!("{}: {error:#}", identity.hostname));
    }
}

#[privileged::test]
fn two_macs_on_one_port_are_two_guests() {
    let node = Node::new().expect("a node");
    let [one, other] = [0, 1].map(Identity::of);
    let tap = node.host.tap(&one, Shape::default()).expect("a tap");
    for identity in [&one, &other] {
        identity.write(node.records.path(), 1).expect("a record");
    }
    let ports = [&one, &other].map(|identity| PortArgument::new("tap0", identity.mac));
    let agent = node.agent(&ports).expect("an agent");
    // Both use one address; only the MAC differs.
    let mut stations = [&one, &other].map(|of| Station::new(Arc::clone(&tap), of.mac, one.address));
    for _ in 0..3 {
        assert_all_served(&one, &mut stations[0]);
        assert_all_served(&other, &mut stations[1]);
    }
    // Interleave two requests on the same four-tuple.
    let [first, second] = &mut stations;
    let to = SERVICE;
    let mut talks = [first.talk(to), first.talk(to)];
    talks[1].local = talks[0].local;
    first.begin(&mut talks[0]).expect("a handshake");
    second.begin(&mut talks[1]).expect("another");
    let request = get(PATHS[1]);
    let (start, rest) = request.split_at(9);
    let segments = talks[0].transmit(start);
    first.until(&mut talks[0], &segments, |talk| talk.in_flight() == 0).expect("half a request");
    let segments = talks[1].transmit(&request);
    second.until(&mut talks[1], &segments, |talk| talk.ended).expect("a whole one");
    let segments = talks[0].transmit(rest);
    first.until(&mut talks[0], &segments, |talk| talk.ended).expect("the other half");
    for (identity, talk) in [&one, &other].into_iter().zip(&talks) {
        assert!(talk.received.ends_with(identity.user_data.as_bytes()), "{}", identity.hostname);
    }
    exposition::balance(&agent, 0).expect("every frame is accounted for");
}

#[privileged::test]
fn each_nic_of_a_guest_is_served_only_on_its_own_tap() {
    let node = Node::new().expect("a node");
    let [one, other] = [0, 1].map(Identity::of);
    let macs = [one.mac, other.mac, Mac([0x52, 0x54, 0, 0x69, 0xff, 1])];
    let taps: Vec<_> = (0..macs.len())
        .map(|at| node.host.tap(&Identity::of(at as u16), Shape::default()).expect("a tap"))
        .collect();
    let nics = macs.map(|mac| json!({ "mac": mac.to_string() }));
    write(&one, node.records.path(), |record| {
        let own = record["network"]["nics"][0].clone();
        let nics = nics.iter().enumerate().map(|(at, nic)| {
            let mut whole = own.clone();
            whole["id"] = json!(format!("n{at}"));
            whole["name"] = json!(format!("eth{at}"));
            whole["mac"] = nic["mac"].clone();
            whole
        });
        record["network"]["nics"] = nics.collect();
    })
    .expect("a record");
    let ports: Vec<_> =
        macs.iter().enumerate().map(|(at, mac)| PortArgument::new(format!("tap{at}"), *mac)).collect();
    let agent = node.agent(&ports).expect("an agent");
    for (at, tap) in taps.iter().enumerate() {
        for (nic, mac) in macs.iter().enumerate() {
            let mut station = Station::new(Arc::clone(tap), *mac, one.address);
            if nic == at {
                assert_all_served(&one, &mut station);
                continue;
            }
            station.drain().expect("silence");
            let refused = agent.metrics().and_then(|metrics| metrics.frames(IMPOSTOR)).expect("a counter");
            let syn = station.talk(SERVICE).syn();
            station.transmit(&syn).expect("it is sent");
            let now = agent.metrics().and_then(|metrics| metrics.frames(IMPOSTOR)).expect("a counter");
            assert_eq!(now, refused + 1, "the MAC of NIC {nic} on the tap of NIC {at}");
            assert!(station.receive().expect("received frames").is_empty(), "the SYN must get no answer");
        }
    }
}

#[privileged::test]
fn one_mac_in_two_namespaces_is_two_guests() {
    let node = Node::new().expect("a node");
    let pods = [0, 1].map(|_| Host::inside(Namespace::new("pod").expect("a namespace")).expect("a pod"));
    let identities = [0, 1].map(Identity::of);
    let (mac, address) = (identities[0].mac, identities[0].address);
    let mut stations = Vec::new();
    for (identity, pod) in identities.iter().zip(&pods) {
        // Name, index, MAC and address are equal in both namespaces.
        let tap = Tap::create_at(pod.ns(), "tap", Shape::default(), 777).expect("a tap");
        pod.ns().ip("link set tap master br0 up").expect("it comes up");
        stations.push(Station::new(Arc::new(tap), mac, address));
        write(identity, node.records.path(), |record| {
            let nic = &mut record["network"]["nics"][0];
            nic["mac"] = json!(mac.to_string());
            nic["port"] = json!({ "ifname": "tap", "netns": pod.ns().name() });
        })
        .expect("a record");
    }
    let agent = Agent::start(node.host.ns(), node.records.path(), &[]).expect("an agent");
    for _ in 0..3 {
        for (identity, station) in identities.iter().zip(&mut stations) {
            eventually(NOTICE, || serves(identity, station, PATHS[1]))
                .unwrap_or_else(|error| panic!("{}: {error:#}", identity.hostname));
        }
    }
    exposition::balance(&agent, 0).expect("every frame is accounted for");
}

#[privileged::test]
fn every_queue_of_a_tap_serves_its_guest() {
    const QUEUES: usize = 4;
    for mode in ["xdp", "tcx"] {
        let guests = Guests::new(2, Shape { queues: QUEUES, vnet_hdr: true });
        let ports = guests.ports();
        let Guests { node, identities, mut stations } = guests;
        let agent = node.agent_steering(mode, &ports).expect("an agent");
        for queue in 0..QUEUES {
            for (identity, station) in identities.iter().zip(&mut stations) {
                station.queue = queue;
                assert_all_served(identity, station);
            }
            // A foreign MAC is refused on every queue.
            let (mac, before) = (identities[1].mac, exposition::verdicts(&agent).expect("counters"));
            let syn = stations[0].talk(SERVICE).syn();
            let stolen = frames::with(stations[0].frame(&syn), 6, &mac.0);
            assert!(stations[0].send(&stolen).expect("it is sent"));
            let counted = exposition::since(&before, &exposition::verdicts(&agent).expect("counters"));
            assert_eq!(counted.into_iter().collect::<Vec<_>>(), [(IMPOSTOR, 1)], "{mode}, queue {queue}");
        }
        exposition::balance(&agent, 0).expect("every frame is accounted for");
    }
}

#[privileged::test]
fn a_guest_with_another_guests_address_gets_its_own_record() {
    let guests = Guests::new(2, Shape::default());
    let ports = guests.ports();
    let Guests { node, identities, mut stations } = guests;
    let _agent = node.agent(&ports).expect("an agent");
    let [spy, victim] = &mut stations[..] else { panic!("two guests") };
    let addresses = [
        victim.address,
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::new(169, 254, 169, 253),
        Ipv4Addr::new(8, 8, 8, 8),
        Ipv4Addr::new(10, 0, 2, 2),
    ];
    for address in addresses {
        assert_all_served(&identities[1], victim);
        victim.drain().expect("silence");
        spy.address = address;
        assert_all_served(&identities[0], spy);
        assert!(
            victim.receive().expect("received frames").is_empty(),
            "the victim received something for {address}"
        );
    }
}

// A token is valid only unchanged, for its VM and dialect, until it expires.

/// Base64's alphabet (RFC 4648 §4).
const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Tokens that differ slightly from this one.
fn near(token: &str) -> Vec<(String, String)> {
    let mut tokens = Vec::new();
    for at in 0..token.len() {
        let value = ALPHABET.iter().position(|byte| *byte == token.as_bytes()[at]).expect("base64");
        for bit in 0..6 {
            let mut bytes = token.as_bytes().to_vec();
            bytes[at] = ALPHABET[value ^ 1 << bit];
            let name = format!("bit {bit} of character {at}");
            tokens.push((name, String::from_utf8(bytes).expect("base64 is text")));
        }
    }
    let swapped = token.chars().rev().collect();
    tokens.extend([
        ("nothing".into(), String::new()),
        ("one character less".into(), token[1..].into()),
        ("four characters less".into(), token[..token.len() - 4].into()),
        ("one character more".into(), format!("{token}A")),
        ("itself twice".into(), format!("{token}{token}")),
        ("itself twice in a list".into(), format!("{token}, {token}")),
        ("backwards".into(), swapped),
        ("padding".into(), "=".repeat(token.len())),
        ("zeroes".into(), "A".repeat(token.len())),
        ("in other case".into(), token.chars().map(flip_case).collect()),
    ]);
    tokens.retain(|(_, other)| other != token);
    tokens
}

fn flip_case(letter: char) -> char {
    if letter.is_ascii_lowercase() { letter.to_ascii_uppercase() } else { letter.to_ascii_lowercase() }
}

/// Sends a token in a field, and checks for a short refusal.
fn ensure_refused(station: &mut Station, question: &Question, field: &str, token: &str) -> Result<()> {
    let (status, body) = ask(station, question, &[(field, token)])?;
    ensure!(matches!(status, 400 | 401 | 403), "answered {status}");
    ensure!(body.len() < 256, "{} bytes of refusal", body.len());
    Ok(())
}

#[privileged::test]
fn a_guessed_stolen_or_expired_token_is_refused_in_every_dialect() {
    let node = Node::new().expect("a node");
    for vm in [SPY, VICTIM] {
        vm.write(node.records.path(), |record| record["serve"]["imdsv2"] = json!("required"))
            .expect("a record");
    }
    let station =
        |name, vm: Vm| node.station(name, vm.mac(0), vm.address(), Shape::default()).expect("a tap");
    let (mut spy, mut victim) = (station("tap0", SPY), station("tap1", VICTIM));
    let ports = [PortArgument::new("tap0", SPY.mac(0)), PortArgument::new("tap1", VICTIM.mac(0))];
    let _agent = node.agent(&ports).expect("an agent");

    let short = tokens(&mut spy, 1).expect("tokens for a second");
    let own = tokens(&mut spy, 300).expect("tokens");
    let stolen = tokens(&mut victim, 300).expect("tokens of the victim");
    std::thread::sleep(Duration::from_millis(2_100));
    for (at, (question, field, token)) in own.iter().enumerate() {
        let is_good = |station: &mut Station, token: &str| {
            ask(station, question, &[(field, token)]).expect("an answer").0 == 200
        };
        assert!(is_good(&mut spy, token), "{field}: its own token");
        assert!(is_good(&mut victim, &stolen[at].2), "{field}: the victim's token, by the victim");
        let mut others: Vec<(String, String)> = near(token);
        others.push(("the victim's".into(), stolen[at].2.clone()));
        others.push(("an expired one".into(), short[at].2.clone()));
        for (other, (_, of, token)) in own.iter().enumerate().filter(|(other, _)| *other != at) {
            others.push((format!("one for {of}"), token.clone()));
            others.push((format!("the victim's for {of}"), stolen[other].2.clone()));
        }
        for (name, token) in others {
            ensure_refused(&mut spy, question, field, &token)
                .unwrap_or_else(|error| panic!("{field}: {name}: {error:#}"));
        }
        assert!(is_good(&mut spy, token), "{field}: its own token, at the end");
    }
}

#[privileged::test]
fn no_token_is_issued_for_a_forwarded_request() {
    let node = Node::new().expect("a node");
    SPY.write(node.records.path(), |_| ()).expect("a record");
    let mut spy = node.station("tap0", SPY.mac(0), SPY.address(), Shape::default()).expect("a tap");
    let _agent = node.agent(&[PortArgument::new("tap0", SPY.mac(0))]).expect("an agent");
    for (host, field, path, age) in TOKENS {
        for name in ["X-Forwarded-For", "x-forwarded-for", "X-FORWARDED-FOR"] {
            for value in ["10.0.0.1", "", "unknown"] {
                let put = Question::get(path).by(Method::Put).at(host).with(age, "300");
                let (status, body) = ask(&mut spy, &put, &[(name, value)]).expect("an answer");
                assert_eq!(status, 403, "{field}: {name}: {value:?}: {:?}", String::from_utf8_lossy(&body));
            }
        }
    }
}
