//! Connections that are too many, too slow, silent or invalid.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use smoltcp::wire::TcpControl;
use support::agent::Agent;
use support::books::total;
use support::eventually::eventually;
use support::mob::Mob;
use support::raw::Segment;
use support::station::{Station, Talk, answer, get};

use super::Attack;
use super::SERVICE;
use super::withstand;

/// Connections one port may have (`StackConfig::connections_per_port`).
const PER_PORT: usize = 128;
/// Connections that a guest tries to hoard.
const HOARD: usize = 300;
/// Size of the smallest full segment that the service sends, for any announced MSS (RFC 9293 §3.7.1).
const SAFE_SEGMENT: usize = 536;
/// Maximum number of window probes within [`CLOSED`], of one byte each. The shortest timeout allows one per 200 ms;
/// the limit is doubled for a slow machine.
const PROBES: usize = 40;
/// How long a window stays closed.
const CLOSED: Duration = Duration::from_secs(4);
/// Longest time until the service times out; it waits 10 s for a request's head.
const HEAD_PATIENCE: Duration = Duration::from_secs(40);
/// Time in which a port's token bucket fills; it holds the frames of 200 ms.
const REFILL: Duration = Duration::from_millis(250);
/// Longest time until a worker has counted all frames.
const COUNTED: Duration = Duration::from_secs(10);
/// Length of the attacker's user-data, in bytes.
pub(crate) const USER_DATA: usize = 60_000;
const LARGE: &str = "/v1/user-data";

fn gauge(agent: &Agent<'_>, name: &str) -> Result<u64> {
    Ok(total(&agent.metrics()?, &format!("xdp_imds_stack_{name}"), None))
}

/// A connection takes room from its first byte; connections beyond the port's limit are refused.
fn hoarding(station: &mut Station, agent: &Agent<'_>) -> Result<()> {
    let refused = gauge(agent, "refused_port_connections_total")?;
    let mut mob = Mob::open(station, SERVICE, HOARD)?;
    for talk in &mut mob.talks {
        let said = talk.transmit(b"G");
        said.iter().try_for_each(|segment| mob.station.transmit(segment))?;
    }
    let begun = |mob: &Mob<'_>| mob.talks.iter().filter(|talk| talk.in_flight() == 0).count();
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        mob.listen(Duration::from_millis(20), true)?;
    }
    ensure!(begun(&mob) == PER_PORT, "{} connections have begun, not {PER_PORT}", begun(&mob));
    let refused = gauge(agent, "refused_port_connections_total")? - refused;
    ensure!(refused >= (HOARD - PER_PORT) as u64, "{refused} connections were refused");
    mob.leave()
}

/// Sends a head on every connection, one byte per `each`; all must end with 408 within [`HEAD_PATIENCE`].
fn timed_out(mob: &mut Mob<'_>, each: Duration, bytes: &[u8]) -> Result<()> {
    let start = Instant::now();
    let mut said = 0;
    while start.elapsed() < HEAD_PATIENCE && mob.talks.iter().any(|talk| !talk.ended && !talk.reset) {
        if said < bytes.len() && start.elapsed() >= each * said as u32 {
            for talk in mob.talks.iter_mut().filter(|talk| talk.is_live()) {
                let part = talk.transmit(&bytes[said..=said]);
                part.iter().try_for_each(|segment| mob.station.transmit(segment))?;
            }
            said += 1;
        }
        mob.listen(Duration::from_millis(20), true)?;
    }
    for talk in &mob.talks {
        let (status, _) = answer(&talk.received).with_context(|| format!("{:?}", talk.local))?;
        ensure!(status == 408 && talk.ended, "{:?} was answered {status}", talk.local);
    }
    Ok(())
}

fn incomplete_heads(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
    timed_out(&mut mob, Duration::ZERO, b"GE")?;
    mob.leave()
}

fn slow_writers(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
    timed_out(&mut mob, Duration::from_secs(1), b"GET /a-path-that-never-ends-at-this-pace")?;
    mob.leave()
}

/// Opens connections and requests a large answer on each.
fn asking<'s>(station: &'s mut Station, count: usize, change: impl Fn(&mut Talk)) -> Result<Mob<'s>> {
    let mut mob = Mob::open_with(station, SERVICE, count, change)?;
    for talk in &mut mob.talks {
        let said = talk.transmit(&get(LARGE));
        said.iter().try_for_each(|segment| mob.station.transmit(segment))?;
    }
    Ok(mob)
}

/// A window that stays closed receives only probes of one byte.
fn closed_windows(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut mob = asking(station, PER_PORT, |talk| talk.window = 0)?;
    mob.until(CLOSED, |_| false)?;
    for talk in &mob.talks {
        let came = talk.received.len();
        ensure!(came <= PROBES, "{came} bytes arrived through a closed window");
    }
    mob.leave()
}

/// A window that closes after the first segments receives nothing more but probes.
fn closing_windows(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    const FIRST: u16 = 3_000;
    let mut mob = asking(station, PER_PORT, |talk| talk.window = FIRST)?;
    for talk in &mut mob.talks {
        talk.window = 0;
    }
    mob.until(CLOSED, |_| false)?;
    for talk in &mob.talks {
        let came = talk.received.len();
        ensure!(came <= usize::from(FIRST) + PROBES, "{came} bytes arrived through a window of {FIRST}");
    }
    mob.leave()
}

fn windows_of_one_byte(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut mob = asking(station, 16, |talk| talk.window = 1)?;
    mob.until(Duration::from_secs(5), |talks| talks.iter().all(|talk| talk.received.len() > 200))?;
    for talk in &mob.talks {
        ensure!(talk.received.starts_with(b"H"), "nothing arrived through a window of one byte");
        ensure!(
            b"HTTP/1.1 200 OK\r\n".starts_with(&talk.received[..talk.received.len().min(17)]),
            "not an answer"
        );
    }
    mob.leave()
}

/// A guest that announces a tiny MSS receives segments of the size that every host must accept.
fn tiny_segments(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    for mss in [0, 1, 48, 64] {
        let mut talk = station.talk(SERVICE);
        talk.mss = Some(mss);
        let syn = talk.syn();
        station.until(&mut talk, &[syn], |talk| talk.open)?;
        let heard = station.received.0;
        let said = talk.transmit(&get(LARGE));
        station.until(&mut talk, &said, |talk| talk.ended)?;
        station.transmit(&talk.finish())?;
        let (status, body) = answer(&talk.received)?;
        ensure!((status, body.len()) == (200, USER_DATA), "mss {mss}: {status}, {} bytes", body.len());
        let segments = (station.received.0 - heard) as usize;
        // The limit is doubled, because a busy machine causes retransmissions.
        let most = 2 * (talk.received.len() / SAFE_SEGMENT + 8);
        ensure!(segments <= most, "mss {mss}: {segments} segments for {} bytes", talk.received.len());
    }
    Ok(())
}

/// Resets a connection once the port's token bucket admits the reset.
fn hang_up(station: &Station, talk: &Talk) -> Result<()> {
    std::thread::sleep(REFILL);
    station.transmit(&talk.reset())
}

/// Repeated acknowledgements must not cause more bytes of retransmissions than they contain.
fn repeated_acks(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    const TIMES: usize = 2_000;
    let mut talk = station.open(SERVICE)?;
    let said = talk.transmit(&get(LARGE));
    station.until(&mut talk, &said, |talk| talk.received.len() > 1_000)?;
    let (sent, heard) = (station.sent.get().1, station.received.1);
    let stale = talk.ack();
    for _ in 0..TIMES {
        station.transmit(&stale)?;
        station.receive()?;
    }
    let (sent, heard) = (station.sent.get().1 - sent, station.received.1 - heard);
    ensure!(heard <= sent + 2 * USER_DATA as u64, "{heard} bytes for {sent} of old acknowledgements");
    hang_up(station, &talk)
}

/// Sends acknowledgements of bytes before and after the service's window.
fn invalid_acks(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let said = talk.transmit(&get(LARGE));
    station.until(&mut talk, &said, |talk| talk.received.len() > 1_000)?;
    let (sent, heard) = (station.sent.get().1, station.received.1);
    for _ in 0..2_000 {
        let ahead = [1, 7, 700, 70_000, 1 << 30, 1 << 31, u32::MAX - 4_000][fastrand::usize(..7)];
        station.transmit(&Segment { ack: Some(talk.ack.wrapping_add(ahead)), ..talk.ack() })?;
        station.receive()?;
    }
    let (sent, heard) = (station.sent.get().1 - sent, station.received.1 - heard);
    ensure!(heard <= sent + 2 * USER_DATA as u64, "{heard} bytes for {sent} of invalid acknowledgements");
    hang_up(station, &talk)
}

/// Resets and SYNs with a wrong sequence number do not change a connection (RFC 5961 §3 and §4).
fn near_misses(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let begun = talk.transmit(b"GET /v1/meta-data HTTP/1.1\r\nHost: x\r\n");
    station.until(&mut talk, &begun, |talk| talk.in_flight() == 0)?;
    for number in 1..2_000u32 {
        let miss = if number % 2 == 0 { number } else { number.wrapping_neg() };
        let control = if number % 3 == 0 { TcpControl::Syn } else { TcpControl::Rst };
        let seq = talk.seq.wrapping_add(miss);
        let ack = (control == TcpControl::Rst).then_some(talk.ack);
        station.transmit(&Segment { seq, ack, ..talk.ack().control(control) })?;
        station.receive()?;
    }
    let rest = talk.transmit(b"Connection: close\r\n\r\n");
    station.until(&mut talk, &rest, |talk| talk.ended)?;
    ensure!(answer(&talk.received)?.0 == 200, "not answered");
    station.transmit(&talk.finish())
}

/// Handshakes without data take no room, however many.
fn bare_handshakes(station: &mut Station, agent: &Agent<'_>) -> Result<()> {
    let refused = gauge(agent, "refused_port_connections_total")?;
    let mob = Mob::open(station, SERVICE, 500)?;
    let refused = gauge(agent, "refused_port_connections_total")? - refused;
    ensure!(refused == 0, "{refused} connections were refused although none takes room");
    mob.leave()
}

/// The service closes connections that the guest closes right after the handshake.
fn closed_at_once(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    for _ in 0..4 {
        let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
        for talk in &mob.talks {
            mob.transmit(&talk.finish())?;
        }
        for talk in &mut mob.talks {
            talk.seq = talk.seq.wrapping_add(1);
        }
        let ended = mob.until(Duration::from_secs(5), |talks| talks.iter().all(|talk| talk.ended))?;
        ensure!(ended, "the service does not close a connection that its guest has closed");
    }
    Ok(())
}

/// Payload after a missing first byte is dropped.
fn first_byte_missing(station: &mut Station, agent: &Agent<'_>) -> Result<()> {
    const COUNT: u64 = 500;
    // 16 bits of a SYN cookie cover the guest's sequence number, so one segment in 65,536 counts as a first one.
    const BY_CHANCE: u64 = 3;
    let early = gauge(agent, "dropped_early_total")?;
    let mut mob = Mob::open(station, SERVICE, COUNT as usize)?;
    for talk in &mob.talks {
        let ahead = Segment { seq: talk.seq.wrapping_add(1), ..talk.ack() };
        mob.transmit(&ahead.with(b"ET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n"))?;
    }
    eventually(COUNTED, || {
        let early = gauge(agent, "dropped_early_total")? - early;
        ensure!(early >= COUNT - BY_CHANCE, "{early} segments were dropped as early");
        Ok(())
    })?;
    mob.listen(Duration::from_millis(500), true)?;
    let answered = mob.talks.iter().filter(|talk| !talk.received.is_empty()).count() as u64;
    ensure!(answered <= BY_CHANCE, "{answered} connections were answered");
    mob.leave()
}

/// A retransmission with other bytes does not replace the bytes received first.
fn changed_retransmissions(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let first = talk.transmit(b"GET /v1/meta-data HTTP/1.1\r\nHost: x\r\nA: ");
    station.until(&mut talk, &first, |talk| talk.in_flight() == 0)?;
    let again = Segment { seq: first[0].seq, ..talk.ack() };
    let again = again.with(b"PUT /v1/user-data HTTP/1.0\r\nHost: x\r\nB: x\r\nConnection: close\r\n\r\n");
    station.transmit(&again)?;
    talk.seq = again.seq.wrapping_add(again.payload.len() as u32);
    station.until(&mut talk, &[], |talk| talk.ended)?;
    let (status, body) = answer(&talk.received)?;
    ensure!(status == 200 && body.windows(11).any(|at| at == b"instance-id"), "answered {status}");
    station.transmit(&talk.finish())
}

/// Opens and resets connections of one four-tuple again and again.
fn one_port_again_and_again(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let template = station.talk(SERVICE);
    for _ in 0..300 {
        let mut talk = Talk::new(template.local, template.remote);
        let syn = talk.syn();
        station.until(&mut talk, &[syn], |talk| talk.open)?;
        let said = talk.transmit(&get("/v1/meta-data")[..20]);
        station.until(&mut talk, &said, |talk| talk.in_flight() == 0)?;
        station.transmit(&talk.reset())?;
    }
    Ok(())
}

fn attacks() -> Vec<Attack> {
    let attack = |name, run| Attack { name, run, leaves: false };
    vec![
        attack("hoarding", hoarding),
        attack("handshakes without data", bare_handshakes),
        attack("closed at once", closed_at_once),
        attack("the first byte missing", first_byte_missing),
        attack("tiny segments", tiny_segments),
        attack("windows of one byte", windows_of_one_byte),
        attack("closed windows", closed_windows),
        attack("closing windows", closing_windows),
        attack("repeated acknowledgements", repeated_acks),
        attack("invalid acknowledgements", invalid_acks),
        attack("resets and syns with wrong sequence numbers", near_misses),
        attack("retransmissions with other bytes", changed_retransmissions),
        attack("one port again and again", one_port_again_and_again),
    ]
}

#[test]
fn invalid_connections_cost_only_their_sender() {
    withstand("connections", "", &attacks());
}

#[test]
fn slow_requests_get_408_and_cost_only_their_sender() {
    let attack = |name, run| Attack { name, run, leaves: false };
    withstand(
        "slow",
        "",
        &[attack("an incomplete head", incomplete_heads), attack("a byte a second", slow_writers)],
    );
}
