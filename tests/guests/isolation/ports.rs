//! The MAC on its port identifies a guest, even if everything else is equal.

use anyhow::Result;
use metadata_common::mac::Mac;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::sync::Arc;
use support::agent::{Agent, IMPOSTOR, PortArgument};
use support::answers::PATHS;
use support::arena::serves;
use support::books;
use support::frames;
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::station::{Station, get};
use support::tap::{Shape, Tap};

use super::vm::Node;

/// Writes a guest's record with a change.
fn write(identity: &Identity, records: &std::path::Path, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut record: Value = serde_json::from_str(&identity.record(1))?;
    change(&mut record);
    replace(&identity.path(records), &record.to_string())
}

fn assert_served(identity: &Identity, station: &mut Station) {
    for path in PATHS {
        serves(identity, station, path).unwrap_or_else(|error| panic!("{}: {error:#}", identity.hostname));
    }
}

#[test]
fn two_macs_on_one_port_are_two_guests() {
    if !privileged::or_skip() {
        return;
    }
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
        assert_served(&one, &mut stations[0]);
        assert_served(&other, &mut stations[1]);
    }
    // Interleave two requests on the same four-tuple.
    let [first, second] = &mut stations;
    let to = super::taps::SERVICE;
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
    books::balance(&agent, 0).expect("every frame is accounted for");
}

#[test]
fn each_nic_of_a_guest_is_served_only_on_its_own_tap() {
    if !privileged::or_skip() {
        return;
    }
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
                assert_served(&one, &mut station);
                continue;
            }
            station.drain().expect("silence");
            let refused = agent.metrics().and_then(|metrics| metrics.frames(IMPOSTOR)).expect("a counter");
            let syn = station.talk(super::taps::SERVICE).syn();
            station.transmit(&syn).expect("it is sent");
            let now = agent.metrics().and_then(|metrics| metrics.frames(IMPOSTOR)).expect("a counter");
            assert_eq!(now, refused + 1, "the MAC of NIC {nic} on the tap of NIC {at}");
            assert!(station.receive().expect("received frames").is_empty(), "the SYN must get no answer");
        }
    }
}

#[test]
fn one_mac_in_two_namespaces_is_two_guests() {
    if !privileged::or_skip() {
        return;
    }
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
            support::eventually::eventually(super::taps::NOTICE, || serves(identity, station, PATHS[1]))
                .unwrap_or_else(|error| panic!("{}: {error:#}", identity.hostname));
        }
    }
    books::balance(&agent, 0).expect("every frame is accounted for");
}

#[test]
fn every_queue_of_a_tap_serves_its_guest() {
    const QUEUES: usize = 4;
    if !privileged::or_skip() {
        return;
    }
    for mode in ["xdp", "tcx"] {
        let node = Node::new().expect("a node");
        let identities = [0, 1].map(Identity::of);
        let shape = Shape { queues: QUEUES, vnet_hdr: true };
        let mut stations = identities.each_ref().map(|identity| {
            identity.write(node.records.path(), 1).expect("a record");
            let tap = node.host.tap(identity, shape).expect("a tap");
            Station::new(tap, identity.mac, identity.address)
        });
        let ports: Vec<_> = identities
            .iter()
            .map(|identity| PortArgument::new(Host::tap_name(identity), identity.mac))
            .collect();
        let agent = node.agent_steering(mode, &ports).expect("an agent");
        for queue in 0..QUEUES {
            for (identity, station) in identities.iter().zip(&mut stations) {
                station.queue = queue;
                assert_served(identity, station);
            }
            // A foreign MAC is refused on every queue.
            let (mac, before) = (identities[1].mac, books::verdicts(&agent).expect("counters"));
            let syn = stations[0].talk(super::taps::SERVICE).syn();
            let stolen = frames::with(stations[0].frame(&syn), 6, &mac.0);
            assert!(stations[0].send(&stolen).expect("it is sent"));
            let counted = books::since(&before, &books::verdicts(&agent).expect("counters"));
            assert_eq!(counted.into_iter().collect::<Vec<_>>(), [(IMPOSTOR, 1)], "{mode}, queue {queue}");
        }
        books::balance(&agent, 0).expect("every frame is accounted for");
    }
}

#[test]
fn a_guest_with_another_guests_address_gets_its_own_record() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new().expect("a node");
    let identities = [0, 1].map(Identity::of);
    let mut stations = identities.each_ref().map(|identity| {
        identity.write(node.records.path(), 1).expect("a record");
        let tap = node.host.tap(identity, Shape::default()).expect("a tap");
        Station::new(tap, identity.mac, identity.address)
    });
    let ports: Vec<_> =
        identities.iter().map(|identity| PortArgument::new(Host::tap_name(identity), identity.mac)).collect();
    let _agent = node.agent(&ports).expect("an agent");
    let [spy, victim] = &mut stations;
    let addresses = [
        victim.address,
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::new(169, 254, 169, 253),
        Ipv4Addr::new(8, 8, 8, 8),
        Ipv4Addr::new(10, 0, 2, 2),
    ];
    for address in addresses {
        assert_served(&identities[1], victim);
        victim.drain().expect("silence");
        spy.address = address;
        assert_served(&identities[0], spy);
        assert!(
            victim.receive().expect("received frames").is_empty(),
            "the victim received something for {address}"
        );
    }
}
