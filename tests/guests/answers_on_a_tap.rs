//! On a tap the kernel answers everything that needs no state, so the agent sees about one frame per small request.
//! The loss of any single frame is recovered.

use anyhow::{Context as _, Result, ensure};
use std::net::IpAddr;
use std::time::Duration;
use support::agent::{ABSORBED, ANSWERED, Agent, Metrics, PortArgument, STEERED};
use support::answers::PATHS;
use support::eventually;
use support::guest::{Fetched, METADATA, Route, Spec};
use support::host::Host;
use support::pump::{Faults, Kind};
use support::raw::{ACK, FIN_ACK};
use support::record::Identity;
use support::scene::OneGuest;
use support::station::{Station, Talk};
use support::tap::{Backend, Shape};
use support::{privileged, vhost};

const PATIENCE: Duration = Duration::from_secs(10);
const FETCHES: u64 = 10;

/// Which side closes the connection last.
#[derive(Clone, Copy, Debug)]
enum Last {
    /// The client sends `Connection: close`, so the service closes first.
    Guest,
    /// The client sends `Connection: keep-alive` and closes first, as most clients do.
    Service,
}

fn scene(change: impl FnOnce(Spec) -> Spec) -> OneGuest {
    let scene = OneGuest::boot(&Identity::of(0), change);
    scene.write(1, |_| {});
    scene
}

/// What the kernel counts as dropped of the frames that the guest sent.
fn rx_dropped(scene: &OneGuest) -> Result<u64> {
    let shown = scene.host.ns().ip(&format!("-j -s link show dev {}", scene.guest.host_tap().name()))?;
    let links: serde_json::Value = serde_json::from_str(&shown)?;
    links[0]["stats64"]["rx"]["dropped"].as_u64().with_context(|| shown.clone())
}

/// Sends one request on a new connection.
fn ask(scene: &OneGuest, last: Last) -> Result<Fetched> {
    let url = format!("http://{METADATA}{}", PATHS[0]);
    let header = match last {
        Last::Guest => "Connection: close",
        Last::Service => "Connection: keep-alive",
    };
    scene.guest.curl(&["-H", header, &url], PATIENCE)
}

fn frames(metrics: &Metrics, beginning: &str) -> u64 {
    metrics.frames(beginning).expect("a counter")
}

#[test]
fn the_agent_sees_one_frame_of_a_small_request() {
    the_agent_sees_one_frame(Backend::Calls);
}

#[test]
fn the_agent_sees_one_frame_of_a_small_request_behind_vhost_net() {
    the_agent_sees_one_frame(Backend::VhostNet);
}

#[track_caller]
fn the_agent_sees_one_frame(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let shapes = [Shape::default(), Shape::virtio(), Shape { queues: 2, vnet_hdr: true }];
    for shape in shapes.into_iter().filter(|shape| backend.takes(*shape)) {
        for (route, last) in [(Route::OnLink, Last::Guest), (Route::Gateway, Last::Service)] {
            let scene = scene(|spec| Spec { shape, route, backend, ..spec });
            let agent = scene.configured("");
            for _ in 0..FETCHES {
                let fetched = ask(&scene, last).unwrap_or_else(|error| panic!("{shape:?}: {error:#}"));
                assert_eq!(fetched.status, 200);
            }
            let metrics = agent.metrics().expect("metrics");
            let counted: Vec<_> = metrics.verdicts().filter(|(_, frames)| *frames != 0).collect();
            let tcp = frames(&metrics, "steer_ipv4_tcp");
            // One frame carries the request. On a busy machine the guest may time out and send a frame again.
            for frames in [tcp, frames(&metrics, "answer_syn")] {
                assert!((FETCHES..=FETCHES + 2).contains(&frames), "{shape:?}, {last:?}: {counted:?}");
            }
            let arps = u64::from(route == Route::OnLink);
            assert!(frames(&metrics, "answer_arp") >= arps, "{shape:?}, {last:?}: {counted:?}");
            assert_eq!(frames(&metrics, "steer_arp"), 0, "{shape:?}, {last:?}: {counted:?}");
            // What docs/src/operate/observe.md says of `rx_dropped`. A busy guest joins an acknowledgement with the frame
            // after it, so their number varies.
            eventually(PATIENCE, || {
                let absorbed = frames(&agent.metrics()?, ABSORBED);
                let dropped = rx_dropped(&scene)?;
                ensure!(absorbed > 0 && dropped == absorbed, "{absorbed} absorbed, {dropped} dropped");
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{shape:?}, {last:?}: {error:#}"));
        }
    }
}

#[test]
fn without_kernel_answers_every_frame_is_steered() {
    every_frame_is_steered(Backend::Calls);
}

#[test]
fn without_kernel_answers_every_frame_behind_vhost_net_is_steered() {
    every_frame_is_steered(Backend::VhostNet);
}

#[track_caller]
fn every_frame_is_steered(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let scene = scene(|spec| Spec { backend, shape: backend.plain(), ..spec });
    let agent = scene.configured("answer_in_kernel: false\n");
    ask(&scene, Last::Guest).expect("an answer");
    // ARP, SYN, acknowledgement, request, FIN. The FIN may still be in flight when curl has the answer.
    let metrics = eventually(PATIENCE, || {
        let metrics = agent.metrics()?;
        let steered = frames(&metrics, STEERED);
        ensure!(steered >= 5, "{steered} frames");
        Ok(metrics)
    });
    let metrics = metrics.expect("five frames");
    assert_eq!((frames(&metrics, ANSWERED), frames(&metrics, ABSORBED)), (0, 0));
}

#[privileged::test]
fn the_loss_of_any_one_frame_is_recovered() {
    let to_host = [(Kind::Syn, 1), (Kind::Ack, 1), (Kind::Ack, 2), (Kind::Payload, 1), (Kind::Fin, 1)];
    let to_guest = [(Kind::SynAck, 1), (Kind::Payload, 1), (Kind::Ack, 1), (Kind::Fin, 1)];
    let none = Faults::default();
    let ways = to_host.map(|lose| (Faults { lose: Some(lose), ..none }, none));
    let back = to_guest.map(|lose| (none, Faults { lose: Some(lose), ..none }));
    for (faults, last) in
        ways.into_iter().chain(back).flat_map(|way| [(way, Last::Guest), (way, Last::Service)])
    {
        let (to_host, to_guest) = faults;
        let scene = scene(|spec| Spec { to_host, to_guest, shape: Shape::virtio(), ..spec });
        let _agent = scene.configured("");
        let kind = (to_host.lose, to_guest.lose, last);
        for round in 0..3 {
            let fetched = ask(&scene, last);
            let fetched = fetched.unwrap_or_else(|error| panic!("{kind:?}, {round}: {error:#}"));
            assert_eq!(fetched.status, 200, "{kind:?}");
        }
        // The service's FIN travels alone if it answers the guest's FIN; otherwise it is part of the payload's segment.
        let absent = match last {
            Last::Guest => Kind::Fin,
            Last::Service => Kind::Ack,
        };
        let lost = scene.guest.sent().lost + scene.guest.got().lost;
        let expected = u64::from(to_guest.lose.is_none_or(|(kind, _)| kind != absent));
        assert_eq!(lost, expected, "{kind:?}");
    }
}

// A FIN that a full tap ring drops is retransmitted.
//
// A full ring silently drops the frames that XDP returns to its tap. Behind vhost-net the guest's own ring is filled
// first, and then what vhost-net has in hand.

const TO: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Frames that the tap queues for a guest that does not read.
const RING: usize = 8;
/// Frames that vhost-net takes from the tap at once (`VHOST_NET_BATCH` in drivers/vhost/net.c).
const VHOST_BATCH: usize = 64;
/// The agent learns of the end that the kernel has acknowledged when a timer of the connection is due. That is the
/// answer's retransmission, or, where filling the rings takes longer, the limit of idle connections (75 s).
const UNTIL_A_TIMER: Duration = Duration::from_secs(100);

/// Frames that wait for a guest which does not read.
fn room(backend: Backend) -> usize {
    match backend {
        Backend::Calls => RING,
        Backend::VhostNet => RING + VHOST_BATCH + usize::from(vhost::ENTRIES),
    }
}

/// Fills all of it with answers that the guest does not read, and with some more.
fn fill(station: &mut Station, room: usize) -> Result<()> {
    for _ in 0..room + 3 * RING {
        let stranger = station.talk(TO);
        station.transmit(&stranger.syn())?;
    }
    Ok(())
}

/// Opens a connection that has received and acknowledged one answer and waits for the next request.
fn idle_connection(station: &mut Station) -> Result<Talk> {
    let mut talk = station.open(TO)?;
    let request = format!("GET {} HTTP/1.1\r\nHost: metadata\r\n\r\n", PATHS[0]);
    let segments = talk.transmit(request.as_bytes());
    station.until(&mut talk, &segments, |talk| !talk.received.is_empty())?;
    station.drain()?;
    Ok(talk)
}

fn connections(agent: &Agent<'_>) -> Result<f64> {
    let metrics = agent.metrics()?;
    let held = metrics.samples().iter().filter(|sample| sample.name == "xdp_imds_stack_connections");
    Ok(held.map(|sample| sample.value).sum())
}

#[test]
fn a_fin_dropped_by_a_full_ring_is_resent_when_the_guest_repeats_its_own() {
    resends_a_fin(Backend::Calls);
}

#[test]
fn a_fin_dropped_by_a_full_ring_of_vhost_net_is_resent_when_the_guest_repeats_its_own() {
    resends_a_fin(Backend::VhostNet);
}

#[track_caller]
fn resends_a_fin(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0);
    identity.write(records.path(), 1).expect("a record");
    let tap = host.tap(&identity, backend.plain()).expect("a tap");
    if backend == Backend::VhostNet {
        tap.attach_vhost().expect("vhost-net takes the tap");
    }
    host.ns().ip(&format!("link set dev {} txqueuelen {RING}", tap.name())).expect("a small ring");
    let ports = [PortArgument::new(tap.name(), identity.mac)];
    let agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
    let mut station = Station::new(tap, identity.mac, identity.address);

    let mut talk = idle_connection(&mut station).expect("a connection");
    fill(&mut station, room(backend)).expect("SYNs");
    station.transmit(&talk.finish()).expect("a FIN");
    eventually(UNTIL_A_TIMER, || {
        let held = connections(&agent)?;
        let metrics = agent.metrics()?;
        let counted: Vec<_> = metrics.verdicts().filter(|(_, frames)| *frames != 0).collect();
        ensure!(held == 0.0, "{held} connections are held; {counted:?}");
        Ok(())
    })
    .expect("the agent ends the connection");
    let received = station.segments().expect("the frames that fitted into the ring");
    assert!(
        received.len() <= room(backend) && !received.iter().any(|reply| talk.is_theirs(reply)),
        "{received:?}"
    );

    let fin = talk.finish();
    let mut answers = Vec::new();
    station.transmit(&fin).expect("the FIN again");
    eventually(PATIENCE, || {
        answers.extend(station.segments()?.into_iter().filter(|reply| talk.is_theirs(reply)));
        ensure!(!answers.is_empty(), "no answer yet");
        Ok(())
    })
    .expect("an answer");
    assert_eq!(
        (answers[0].flags, answers[0].seq, answers[0].ack),
        (FIN_ACK, talk.ack, fin.seq.wrapping_add(1))
    );
    talk.take(&answers[0]);
    assert!(talk.ended, "the guest has the whole stream");

    // Once the guest has the FIN, a repeated FIN gets a plain acknowledgement.
    talk.seq = talk.seq.wrapping_add(1);
    station.transmit(&talk.ack()).expect("an acknowledgement");
    talk.seq = fin.seq;
    station.transmit(&talk.finish()).expect("a late FIN");
    let late = eventually(PATIENCE, || {
        let late = station.segments()?.into_iter().find(|reply| talk.is_theirs(reply));
        late.ok_or_else(|| anyhow::anyhow!("no answer yet"))
    });
    assert_eq!(late.expect("an answer").flags, ACK);
}
