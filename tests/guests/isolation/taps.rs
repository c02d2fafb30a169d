//! Taps that are removed, recreated for another guest, moved and changed, and records that change during a request.

use anyhow::{Result, ensure};
use serde_json::Value;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::answers::PATHS;
use support::arena::serves;
use support::books;
use support::eventually::eventually;
use support::guest::METADATA;
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::station::{Station, Talk, answer, get};
use support::tap::{Shape, Tap};

use super::vm::Node;

/// Address and port of the service.
pub(crate) const SERVICE: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Bound on the time the agent takes to notice a change.
pub(crate) const NOTICE: Duration = Duration::from_secs(20);
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

#[test]
fn a_recreated_tap_with_the_same_name_and_index_serves_its_new_guest() {
    const IFINDEX: u32 = 4_711;
    if !privileged::or_skip() {
        return;
    }
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
    books::balance(&agent, 0).expect("every frame is accounted for");
}

#[test]
fn a_moved_tap_is_no_longer_served_and_its_name_serves_its_successor() {
    if !privileged::or_skip() {
        return;
    }
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
    books::balance(&agent, 0).expect("every frame is accounted for");
}

/// Writes a record whose NIC names its port.
fn write_on_port(identity: &Identity, records: &std::path::Path, port: &str) -> Result<()> {
    let mut record: Value = serde_json::from_str(&identity.record(2))?;
    record["network"]["nics"][0]["port"] = serde_json::json!({ "ifname": port });
    replace(&identity.path(records), &record.to_string())
}

#[test]
fn taps_that_swap_names_serve_no_guest_the_others_record() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn an_answer_in_progress_comes_from_one_record_whatever_happens_to_it() {
    const BYTES: usize = 60_000;
    if !privileged::or_skip() {
        return;
    }
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
    books::balance(&agent, 0).expect("every frame is accounted for");
}

#[test]
fn a_port_keeps_serving_its_guest_while_its_device_changes() {
    if !privileged::or_skip() {
        return;
    }
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
        books::balance(&agent, 0).expect("every frame is accounted for");
    }
}

#[test]
fn a_queue_added_later_is_served_like_the_first() {
    if !privileged::or_skip() {
        return;
    }
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
        books::balance(&agent, 0).expect("every frame is accounted for");
    }
}

/// The segments received on one queue.
fn queue_received(queue: &Station) -> Result<Vec<support::raw::Reply>> {
    let mut other = Station::new(Arc::clone(queue.tap()), queue.mac, queue.address);
    other.segments()
}
