//! With `guard: all`, a guest without a record cannot reach a metadata address, but reaches everything else.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use metadata_common::mac::Mac;
use metadata_common::verdict::Fate;
use metadata_common::wire::{arp, ethernet};
use support::agent::{self, Agent, Sample};
use support::arena::Witness;
use support::eventually;
use support::frames::{self, SERVED_V4};
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

/// Bound on the time the agent takes to notice a change.
const NOTICE: Duration = Duration::from_secs(15);
/// Bound on one request.
const REQUEST: Duration = Duration::from_secs(2);
const PATH: &str = "/v1/user-data";
const GUARDED: &str = "drop_guarded";

fn words(records: &Path) -> Vec<OsString> {
    let mut words = agent::arguments(records, &[]);
    words.extend(["--guard".into(), "all".into()]);
    words
}

fn guarding<'a>(host: &'a Host, records: &Path) -> Agent<'a> {
    let binary = agent::binary().expect("the agent is built");
    Agent::start_binary(&binary, host.ns(), words(records)).expect("an agent")
}

/// True if a frame sent on the tap reaches the bridge or the neighbour.
fn reaches_bridge(tap: &Tap, witness: &mut Witness, frame: &[u8]) -> Result<bool> {
    witness.observe()?;
    ensure!(tap.send(0, frame)?, "the tap has no room");
    let seen = witness.observe()?;
    Ok(seen.bridge.iter().chain(&seen.neighbour).any(|seen| seen == frame))
}

fn ensure_closed(tap: &Tap, witness: &mut Witness) -> Result<()> {
    ensure!(!reaches_bridge(tap, witness, &frames::known_good())?, "{} is open", tap.name());
    Ok(())
}

/// Writes the guest's record with the name of its tap.
fn write(identity: &Identity, records: &Path) {
    let mut record: serde_json::Value = serde_json::from_str(&identity.record(1)).expect("JSON");
    record["network"]["nics"][0]["port"] = serde_json::json!({"ifname": Host::tap_name(identity)});
    replace(&identity.path(records), &record.to_string()).expect("a record");
}

#[privileged::test]
fn a_tap_without_a_record_blocks_metadata_traffic_and_nothing_else() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let mut witness = Witness::new(&host).expect("a witness");
    let before = host.tap(&Identity::of(0), Shape::default()).expect("a tap");
    assert!(
        reaches_bridge(&before, &mut witness, &frames::known_good()).expect("a frame"),
        "without an agent"
    );
    let agent = guarding(&host, records.path());
    let after = host.tap(&Identity::of(1), Shape::default()).expect("a tap");
    for tap in [&before, &after] {
        eventually(NOTICE, || ensure_closed(tap, &mut witness))
            .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    }
    let metrics = agent.metrics().expect("metrics");
    let closed = metrics.samples().iter().find(|sample| sample.labels.iter().any(|(_, is)| is == "closed"));
    // The witness's tap counts too: it has no record.
    assert_eq!(closed.map(|sample| sample.value), Some(3.0), "xdp_imds_taps{{state=\"closed\"}}");
    let counted = || agent.metrics().and_then(|metrics| metrics.frames(GUARDED)).expect("a count");
    for case in frames::cases() {
        let dropped = case.verdict.fate() != Fate::Pass && case.name != "arp_for_next_hop";
        let guarded = counted();
        let passed = reaches_bridge(&after, &mut witness, &case.frame).expect(case.name);
        assert!(!(dropped && passed), "{} left the tap", case.name);
        assert_eq!(counted() - guarded, u64::from(dropped), "{}", case.name);
    }
    let gateway = frames::frame(&[], ethernet::ARP, &frames::arp_request(support::host::ADDRESS));
    let elsewhere = frames::frame(&[], ethernet::IPV4, &frames::syn(frames::OTHER_V4, 80));
    let next_hop = frames::frame(&[], ethernet::ARP, &frames::arp_request(frames::NEXT_HOP));
    for frame in [gateway, elsewhere, next_hop] {
        assert!(
            reaches_bridge(&after, &mut witness, &frame).expect("a frame"),
            "other traffic: {frame:02x?}"
        );
    }
    agent.stop().expect("it stops");
    assert!(reaches_bridge(&after, &mut witness, &frames::known_good()).expect("a frame"), "after the agent");
}

#[privileged::test]
fn a_tap_stays_closed_between_two_records() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0);
    let mut witness = Witness::new(&host).expect("a witness");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let agent = guarding(&host, records.path());
    // A foreign MAC is dropped both with and without a record.
    let stranger = Mac([0x52, 0x54, 0, 0xff, 0xff, 0xff]);
    let probe = frames::with(frames::known_good(), ethernet::SOURCE, &stranger.0);
    eventually(NOTICE, || ensure_closed(guest.host_tap(), &mut witness)).expect("closed at first");
    for life in 0..3 {
        let closed = |witness: &mut Witness| -> Result<()> {
            ensure!(!reaches_bridge(guest.host_tap(), witness, &probe)?, "the tap was open in round {life}");
            Ok(())
        };
        guest.fetch_own(PATH, REQUEST).expect_err("a guest without a record gets no answer");
        write(&identity, records.path());
        eventually(NOTICE, || {
            closed(&mut witness).expect("closed while the record is added");
            guest.fetch_own(PATH, REQUEST).map(drop)
        })
        .unwrap_or_else(|error| panic!("life {life}: {error:#}\n{}", agent.log()));
        std::fs::remove_file(identity.path(records.path())).expect("the record is removed");
        eventually(NOTICE, || {
            closed(&mut witness).expect("closed while the record is removed");
            let served = guest.fetch_own(PATH, Duration::from_millis(300)).is_ok();
            ensure!(!served, "the guest is still served");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("life {life}: {error:#}\n{}", agent.log()));
        eventually(NOTICE, || {
            let guarded = agent.metrics()?.frames(GUARDED)?;
            closed(&mut witness)?;
            ensure!(
                agent.metrics()?.frames(GUARDED)? > guarded,
                "no frame has been dropped by the guard yet"
            );
            Ok(())
        })
        .unwrap_or_else(|error| panic!("life {life}: {error:#}\n{}", agent.log()));
    }
    let seen = witness.observe().expect("received frames").bridge;
    let asks = |frame: &Vec<u8>| {
        frame.windows(4).any(|bytes| bytes == SERVED_V4.octets()) && frame.len() > ethernet::HEADER + arp::LEN
    };
    assert!(!seen.iter().any(asks), "a frame for a served address left the tap: {seen:02x?}");
}

#[privileged::test]
fn taps_are_guarded_in_a_namespace_while_it_has_a_served_instance() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let pod = Host::inside(Namespace::new("pod").expect("a namespace")).expect("a pod");
    let (served, other) = (Identity::of(0), Identity::of(1));
    let mut witness = Witness::new(&pod).expect("a witness");
    let _tap = pod.tap(&served, Shape::default()).expect("a tap");
    let tap = pod.tap(&other, Shape::default()).expect("a tap");
    let _agent = guarding(&host, records.path());
    assert!(
        reaches_bridge(&tap, &mut witness, &frames::known_good()).expect("a frame"),
        "no instance is served in the namespace"
    );
    let mut record: serde_json::Value = serde_json::from_str(&served.record(1)).expect("JSON");
    record["network"]["nics"][0]["port"] =
        serde_json::json!({"ifname": Host::tap_name(&served), "netns": pod.ns().path()});
    replace(&served.path(records.path()), &record.to_string()).expect("a record");
    eventually(NOTICE, || ensure_closed(&tap, &mut witness)).expect("closed");
    std::fs::remove_file(served.path(records.path())).expect("the record is removed");
    eventually(NOTICE, || {
        ensure!(reaches_bridge(&tap, &mut witness, &frames::known_good())?, "the tap is still closed");
        Ok(())
    })
    .expect("the tap is open again");
}

#[privileged::test]
fn taps_without_a_record_in_one_namespace_take_few_ports_of_the_node() {
    const MADE: usize = 150;
    const CLOSED: u64 = 64;
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let pod = Host::inside(Namespace::new("pod").expect("a namespace")).expect("a pod");
    let served = Identity::of(0);
    let _tap = pod.tap(&served, Shape::default()).expect("a tap");
    let lines = (0..MADE).map(|n| format!("tuntap add dev more{n} mode tap\n")).collect::<String>();
    pod.ns().ip_batch(&lines).expect("taps");
    let mut record: serde_json::Value = serde_json::from_str(&served.record(1)).expect("JSON");
    record["network"]["nics"][0]["port"] =
        serde_json::json!({"ifname": Host::tap_name(&served), "netns": pod.ns().path()});
    replace(&served.path(records.path()), &record.to_string()).expect("a record");
    let agent = guarding(&host, records.path());
    let count = |state: &str| {
        let metrics = agent.metrics()?;
        let of_state =
            |sample: &&Sample| sample.name == "xdp_imds_taps" && sample.label("state") == Some(state);
        let sample = metrics.samples().iter().find(of_state);
        Ok::<_, anyhow::Error>(sample.map_or(0, |sample| sample.value as u64))
    };
    eventually(NOTICE, || {
        let found = (count("closed")?, count("attached")?, count("error")?);
        ensure!(found.0 >= CLOSED && found.1 == 1 && found.2 == 1, "closed, attached, in error: {found:?}");
        Ok(())
    })
    .expect("the served tap is attached");
    assert!(
        agent.eventually_logs("at most 64 taps without a record in one network namespace"),
        "{}",
        agent.log()
    );
    assert_eq!(count("closed").expect("metrics"), CLOSED);
}

#[privileged::test]
fn a_device_that_is_no_tap_or_has_another_program_is_left_alone() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    host.ns().ip("tuntap add dev bare mode tun").expect("a tun");
    host.ns().ip("link add outer type veth peer name inner").expect("a veth");
    let agent = guarding(&host, records.path());
    let tap = host.tap(&Identity::of(0), Shape::default()).expect("a tap");
    let mut witness = Witness::new(&host).expect("a witness");
    eventually(NOTICE, || ensure_closed(&tap, &mut witness)).expect("closed");
    for device in ["bare", "outer", "inner", "br0", "lo"] {
        let shown = host.ns().ip(&format!("link show dev {device}")).expect(device);
        assert!(!shown.contains("xdp"), "{device} has a program: {shown}");
    }
    assert!(agent.log().lines().all(|line| !line.contains("WARN")), "{}", agent.log());
}
