//! On a tap in the agent's namespace a large answer takes few frames. The guest's own TCP receives them.

use anyhow::{Result, bail};
use metadata_datapath::worker::PUBLISH_EVERY;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::eventually;
use support::guest::{Guest, METADATA, NIC, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::pump::{Faults, Kind};
use support::record::Identity;
use support::scene::OneGuest;
use support::station::Station;
use support::tap::{Backend, Shape, Tap};
use support::{agent, privileged};

const PATIENCE: Duration = Duration::from_secs(180);
/// Bytes of user-data.
const BYTES: usize = 512 << 10;
/// Segments of an answer with so much user-data.
const SEGMENTS: u64 = BYTES as u64 / 1_460;
const SHAPES: [Shape; 3] =
    [Shape { queues: 1, vnet_hdr: false }, Shape::virtio(), Shape { queues: 2, vnet_hdr: true }];

/// What the agents here serve.
const CONFIG: &str = "addresses: [169.254.169.254, 'fe80::a9fe:a9fe']\n";

/// A VM with much user-data.
fn scene(change: impl FnOnce(Spec) -> Spec) -> OneGuest {
    let scene = OneGuest::boot(&Identity::of(0).with_user_data_of(BYTES), change);
    scene.write(1, permit);
    scene
}

/// Permits a record to have so much user-data.
fn permit(record: &mut Value) {
    record["serve"] = json!({ "limits": { "user_data": BYTES } });
}

/// Fetches the user-data and checks it. Returns how many frames of many segments the agent sent, and how many frames in
/// all.
fn fetch(agent: &Agent<'_>, guest: &Guest, host: &str, name: &str) -> (u64, u64) {
    let before = settled(agent);
    let url = format!("http://{host}/v1/user-data");
    let fetched = guest.curl(&["-g", &url], PATIENCE).unwrap_or_else(|error| panic!("{name}: {error:#}"));
    assert_eq!((fetched.status, fetched.body.len()), (200, BYTES), "{name}");
    assert!(fetched.body == guest.identity().user_data.as_bytes(), "{name}: other bytes");
    let after = settled(agent);
    (after.0 - before.0, after.1 - before.1)
}

/// The frames of many segments and all frames that the agent has sent, once the worker has published both.
fn settled(agent: &Agent<'_>) -> (u64, u64) {
    std::thread::sleep(3 * PUBLISH_EVERY);
    let metrics = agent.metrics().expect("metrics");
    let total = |name| {
        let of_name = metrics.samples().iter().filter(|sample| sample.name == name);
        of_name.map(|sample| sample.value as u64).sum()
    };
    (total("xdp_imds_sent_long_frames_total"), total("xdp_imds_sent_frames_total"))
}

#[test]
fn a_large_answer_takes_few_frames_over_either_family_and_any_tap() {
    takes_few_frames(Backend::Calls);
}

#[test]
fn a_large_answer_behind_vhost_net_takes_few_frames_over_either_family() {
    takes_few_frames(Backend::VhostNet);
}

#[track_caller]
fn takes_few_frames(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    for shape in SHAPES.into_iter().filter(|shape| backend.takes(*shape)) {
        let scene = scene(|spec| Spec { shape, backend, ..spec });
        scene.guest.enable_ipv6().expect("IPv6");
        let agent = scene.configured(CONFIG);
        for host in [METADATA.to_string(), format!("[fe80::a9fe:a9fe%25{NIC}]")] {
            let name = format!("{shape:?}, {host}");
            let (long, all) = fetch(&agent, &scene.guest, &host, &name);
            // A guest without offloads acknowledges every other segment, and each acknowledgement makes room for two.
            let most = if shape.vnet_hdr { SEGMENTS / 2 } else { SEGMENTS };
            assert!(long > 0 && all < most, "{name}: {long} long frames of {all}");
        }
    }
}

#[test]
fn a_lost_long_frame_is_sent_again_in_segments() {
    sends_a_lost_frame_again(Backend::Calls);
}

#[test]
fn a_lost_long_frame_behind_vhost_net_is_sent_again_in_segments() {
    sends_a_lost_frame_again(Backend::VhostNet);
}

#[track_caller]
fn sends_a_lost_frame_again(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    for nth in 1..=3 {
        let to_guest = Faults { lose: Some((Kind::Payload, nth)), ..Faults::default() };
        let scene = scene(|spec| Spec { to_guest, backend, shape: Shape::virtio(), ..spec });
        let agent = scene.configured(CONFIG);
        fetch(&agent, &scene.guest, &METADATA.to_string(), &format!("frame {nth} is lost"));
        assert_eq!(scene.guest.got().lost, 1);
    }
}

#[test]
fn a_guest_of_another_namespace_gets_large_answers_segment_by_segment() {
    gets_segments(Backend::Calls);
}

#[test]
fn a_guest_of_another_namespace_behind_vhost_net_gets_large_answers_segment_by_segment() {
    gets_segments(Backend::VhostNet);
}

#[track_caller]
fn gets_segments(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let host = Host::new().expect("a node");
    let pod = Namespace::new("pod").expect("a namespace");
    let identity = Identity::of(0).with_user_data_of(BYTES);
    let tap = std::sync::Arc::new(Tap::create(&pod, "tap0", Shape::virtio()).expect("a tap"));
    pod.ip("link set tap0 up").expect("the tap goes up");
    let ns = Namespace::new("guest").expect("a namespace");
    let guest = Guest::boot_on(tap, ns, &Spec { backend, ..Spec::of(&identity) }).expect("a guest");
    let node = OneGuest { guest, host, records: tempfile::tempdir().expect("a directory") };
    node.write(1, permit);
    let agent = node.configured_on(PortArgument::new("tap0", identity.mac).within(&pod), CONFIG);
    let (long, all) = fetch(&agent, &node.guest, &METADATA.to_string(), "in a pod");
    assert!(long == 0 && all >= SEGMENTS, "{long} long frames of {all}");
}

// A guest behind a lossy link gets complete answers.

/// The largest user-data a record may hold by default.
const LOSSY_BYTES: usize = 64 * 1024;
const FETCHES: usize = 4;

#[test]
fn large_user_data_survives_a_link_that_loses_every_fifth_frame() {
    fetch_user_data_over(Faults::loss(0.2));
}

#[test]
fn large_user_data_survives_a_link_that_loses_duplicates_and_reorders() {
    fetch_user_data_over(Faults { loss: 0.1, duplicate: 0.1, reorder: 0.2, ..Faults::default() });
}

#[privileged::test]
fn large_user_data_passes_a_tap_with_a_smaller_mtu_than_the_guests_nic() {
    let node = OneGuest::boot(&Identity::of(0).with_user_data_of(LOSSY_BYTES), |spec| spec);
    node.write(1, |_| {});
    let tap = node.guest.host_tap().name();
    // The guest's NIC keeps an MTU of 1,500, as the NIC of a container behind the guest would.
    node.host.ns().ip(&format!("link set {tap} mtu 1450")).expect("a narrow tap");
    let agent = node.agent();
    let fetched = node.guest.fetch_own("/v1/user-data", PATIENCE);
    fetched.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

fn fetch_user_data_over(faults: Faults) {
    if !privileged::or_skip() {
        return;
    }
    let seed = support::seed();
    let identity = Identity::of(0).with_user_data_of(LOSSY_BYTES);
    let node = OneGuest::boot(&identity, |spec| Spec { to_host: faults, to_guest: faults, seed, ..spec });
    node.write(1, |_| {});
    let guest = &node.guest;
    // Frames of address resolution are lost as well. The default of three attempts would fail too often.
    for kind in ["mcast_solicit", "ucast_solicit"] {
        guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/{kind}"), "20").expect("a setting");
    }
    guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/retrans_time_ms"), "100").expect("a setting");
    let agent = node.agent();
    for fetch in 0..FETCHES {
        guest
            .fetch_own("/v1/user-data", PATIENCE)
            .unwrap_or_else(|error| panic!("fetch {fetch}, seed {seed}: {error:#}\n{}", agent.log()));
    }
    let harm = |moved: support::pump::Moved| moved.lost;
    assert!(harm(guest.sent()) > 0 && harm(guest.got()) > 0, "seed {seed}: one direction lost nothing");
}

// On a tap with a small MTU, a guest that does not know the MTU gets only segments that fit.

const NARROW_BYTES: usize = 16 * 1024;
/// Bytes of a frame's headers over IPv4 and over IPv6, without options.
const HEADERS: [usize; 2] = [14 + 20 + 20, 14 + 40 + 20];
/// MTUs, each with the segment sizes announced and used, over IPv4 and over IPv6.
const SIZES: [(u16, [(u16, usize); 2]); 4] = [
    (1_400, [(1_360, 1_360), (1_340, 1_340)]),
    (1_280, [(1_240, 1_220), (1_220, 1_220)]),
    (1_450, [(1_410, 1_400), (1_390, 1_380)]),
    (1_500, [(1_460, 1_460), (1_440, 1_440)]),
];

/// The MSS that the answer to a SYN announces.
fn announced(station: &mut Station, to: (IpAddr, u16)) -> Result<Option<u16>> {
    let talk = station.talk(to);
    station.receive()?;
    station.transmit(&talk.syn())?;
    station.wait(Duration::from_secs(1));
    let replies = station.segments()?;
    Ok(replies.iter().find(|reply| talk.is_theirs(reply) && reply.flags.0).and_then(|reply| reply.mss))
}

#[privileged::test]
fn all_segments_fit_the_mtu_of_a_tap_even_after_it_changes() {
    let binary = agent::binary().expect("the agent is built");
    let services = ["169.254.169.254", "fd00:ec2::254"].map(|text| (text.parse().expect("an address"), 80));
    for config in ["", "answer_in_kernel: false\n", "steer: tcx\n"] {
        let host = Host::new().expect("a node");
        let records = tempfile::tempdir().expect("a directory");
        let identity = Identity::of(0).with_user_data_of(NARROW_BYTES);
        identity.write(records.path(), 1).expect("a record");
        let tap = host.tap(&identity, Shape::default()).expect("a tap");
        let set = |mtu| host.ns().ip(&format!("link set {} mtu {mtu}", tap.name())).expect("an MTU");
        // The first MTU is set before the agent attaches.
        set(SIZES[0].0);
        let file = records.path().join("agent.conf");
        std::fs::write(&file, config).expect("a configuration");
        let mut words = agent::arguments(records.path(), &[PortArgument::new(tap.name(), identity.mac)]);
        words.extend(["--config".into(), file.into()]);
        let _agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");
        let mut station = Station::new(std::sync::Arc::clone(&tap), identity.mac, identity.address);
        station.remembers = true;
        for (mtu, sizes) in SIZES {
            set(mtu);
            for ((to, (size, used)), headers) in services.into_iter().zip(sizes).zip(HEADERS) {
                let name = format!("{config:?}, an MTU of {mtu}, {}", to.0);
                // The agent notices a change with some delay.
                eventually(PATIENCE, || match announced(&mut station, to)? {
                    Some(found) if found == size => Ok(()),
                    found => bail!("the announced size is {found:?}, not {size}"),
                })
                .unwrap_or_else(|error| panic!("{name}: {error:#}"));
                station.drain().expect("the station is silent");
                station.transcript();
                let request = b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
                let answer = station.ask(to, request).unwrap_or_else(|error| panic!("{name}: {error:#}"));
                assert!(answer.len() > NARROW_BYTES, "{name}: {} bytes", answer.len());
                let longest = station.transcript().iter().map(Vec::len).max();
                assert_eq!(longest, Some(headers + used), "{name}");
            }
        }
    }
}
