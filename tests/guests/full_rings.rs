//! A FIN that a full tap ring drops is sent again.
//!
//! A full ring silently drops the frames that XDP returns to its tap. Behind vhost-net the guest's own ring is filled
//! first, and then what vhost-net has in hand.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use support::agent::{Agent, PortArgument};
use support::answers::PATHS;
use support::eventually::eventually;
use support::guest::METADATA;
use support::host::Host;
use support::raw::{ACK, FIN_ACK};
use support::record::Identity;
use support::station::{Station, Talk};
use support::tap::Backend;
use support::vhost;

const TO: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Frames that the tap queues for a guest that does not read.
const RING: usize = 8;
/// Frames that vhost-net takes from the tap at once (`VHOST_NET_BATCH` in drivers/vhost/net.c).
const VHOST_BATCH: usize = 64;
const PATIENCE: Duration = Duration::from_secs(10);
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
