//! One guest's attempt to overwhelm the service costs only that guest.
//!
//! The other guests are served meanwhile, every frame is accounted for, and the attacker is served again once it stops.

mod bombs;

use anyhow::{Context as _, Result, ensure};
use metadata_common::addresses::METADATA_LINK_LOCAL;
use metadata_common::mac::Mac;
use metadata_common::wire::{arp, ethernet, ipv4, protocol};
use smoltcp::wire::TcpControl;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::answers::PATHS;
use support::arena::{ATTACKER, Arena, Scene, serves};
use support::eventually;
use support::exposition::{self, total};
use support::frames::{self, SERVED_V4, SERVED_V6, SOLICITED, with};
use support::guest::METADATA;
use support::raw::Segment;
use support::record::Identity;
use support::station::{Mob, Station, Talk, answer, get};
use support::tap::Shape;
use support::{SEED, privileged, seed};

/// Address and port of the service.
const SERVICE: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Longest time until an attacker that has stopped is served again.
///
/// Its token bucket fills within a second; the connections it left open take longer to end.
const RECOVERY: Duration = Duration::from_secs(60);

/// One attempt to overwhelm the service.
struct Attack {
    name: &'static str,
    /// Carries out the attack and checks the answers to the attacker.
    run: fn(&mut Station, &Agent<'_>) -> Result<()>,
    /// True if frames of the attack may reach the bridge, because some are not for a metadata address.
    leaves: bool,
}

/// Runs the attacks of one group, one after another, on one agent.
fn withstand(label: &str, config: &str, attacks: &[Attack]) {
    if !privileged::or_skip() {
        return;
    }
    let seed = seed();
    fastrand::seed(seed);
    let scene = Scene::new(Shape::default()).expect("a node");
    let attacker = Identity::of(ATTACKER).with_user_data_of(USER_DATA);
    attacker.write(scene.records(), 2).expect("a record");
    let mut arena = Arena::open(&scene, config).expect("an arena");
    let mut failures = Vec::new();
    for attack in attacks {
        let start = Instant::now();
        match withstand_one(&mut arena, attack) {
            Ok(answered) => {
                let took = start.elapsed();
                eprintln!("{label}/{}: {answered:?} requests of others, {took:.1?}", attack.name);
            }
            Err(error) => failures.push(format!("{label}/{}: {error:#}", attack.name)),
        }
    }
    if let Err(error) = has_no_connections(&arena.agent) {
        failures.push(format!("{label}: {error:#}"));
    }
    assert!(
        failures.is_empty(),
        "the agent did not withstand {} of {} attacks ({SEED}={seed}):\n{}\n{}",
        failures.len(),
        attacks.len(),
        failures.join("\n"),
        arena.agent.log()
    );
}

fn withstand_one(arena: &mut Arena<'_>, attack: &Attack) -> Result<Vec<usize>> {
    arena.witness.observe()?;
    arena.attacker.receive()?;
    let (before, sent) = (exposition::verdicts(&arena.agent)?, arena.sent());
    let heard = (arena.attacker.sent.get().1, arena.attacker.received.1);
    let ((), answered) = arena.meanwhile(attack.run)?;
    let counted: u64 = exposition::since(&before, &exposition::verdicts(&arena.agent)?).values().sum();
    let sent = arena.sent() - sent;
    let seen = arena.witness.observe()?;
    // A classifier does not count ordinary IPv4 frames; the bridge shows that these left.
    let uncounted = if arena.is_tcx && attack.leaves { seen.bridge.len() as u64 } else { 0 };
    ensure!(
        (counted..=counted + uncounted).contains(&sent),
        "{counted} of {sent} frames have a verdict, and {} left",
        seen.bridge.len()
    );
    ensure!(attack.leaves || seen.bridge.is_empty(), "frames reached the bridge: {:02x?}", seen.bridge);
    eprintln!(
        "{}: {} bytes sent, {} received",
        attack.name,
        arena.attacker.sent.get().1 - heard.0,
        arena.attacker.received.1 - heard.1
    );
    recovers(arena)?;
    exposition::balance(&arena.agent, 0)?;
    Ok(answered)
}

/// Waits until the attacker, which has stopped, is served again.
fn recovers(arena: &mut Arena<'_>) -> Result<()> {
    let identity = Identity::of(ATTACKER);
    let attacker = &mut arena.attacker;
    eventually(RECOVERY, || serves(&identity, attacker, PATHS[0]))
        .context("the attacker is not served after it stopped")
}

/// Waits until the agent has no connection.
///
/// The kernel ends connections by itself. The agent notices when it needs the room, or after half a minute.
fn has_no_connections(agent: &Agent<'_>) -> Result<()> {
    eventually(RECOVERY, || {
        let remaining = total(&agent.metrics()?, "xdp_imds_stack_connections", None);
        ensure!(remaining == 0, "{remaining} connections remain");
        Ok(())
    })
}

// Connections that are too many, too slow, silent or invalid.

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
const USER_DATA: usize = 60_000;
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

fn connection_attacks() -> Vec<Attack> {
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
    withstand("connections", "", &connection_attacks());
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

// Floods of frames, sent as fast as the tap accepts them.

/// Frames of one flood, which fill a token bucket several times.
const FRAMES: usize = 20_000;
/// Garbled frames of one flood; most of them have no valid destination.
const GARBAGE: usize = 100_000;
/// Number of frames after which the guest reads the answers.
const BURST: usize = 64;

/// Sends `count` frames and receives the answers, which must not have more bytes than the frames.
fn flood(station: &mut Station, count: usize, make: impl Fn(&Station, usize) -> Vec<u8>) -> Result<()> {
    let (sent, heard) = (station.sent.get().1, station.received.1);
    for number in 0..count {
        station.send(&make(station, number))?;
        if number % BURST == 0 {
            station.receive()?;
        }
    }
    station.receive()?;
    let (sent, heard) = (station.sent.get().1 - sent, station.received.1 - heard);
    ensure!(heard <= sent, "{heard} bytes of answers to {sent} bytes");
    Ok(())
}

/// A segment to the service from a random address and port.
fn any(v6: bool, control: TcpControl) -> Segment {
    let (from, to): (IpAddr, IpAddr) = if v6 {
        (Ipv6Addr::from_bits(fastrand::u128(..) >> 16 | 0xfe80 << 112).into(), METADATA_LINK_LOCAL.into())
    } else {
        (Ipv4Addr::from_bits(fastrand::u32(..) >> 8 | 10 << 24).into(), SERVICE.0)
    };
    Segment {
        to: Mac::SERVICE,
        source: (from, fastrand::u16(1..)),
        destination: (to, 80),
        window: fastrand::u16(..),
        control,
        ..Segment::ack(0, fastrand::u32(..), fastrand::u32(..))
    }
}

fn opening(v6: bool) -> Segment {
    Segment { ack: None, mss: Some(1400), ..any(v6, TcpControl::Syn) }
}

/// A frame for the service with random bytes changed, removed or appended.
fn garbled(station: &Station) -> Vec<u8> {
    let whole = match fastrand::u8(..4) {
        0 => frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, fastrand::u8(..))),
        1 => frames::frame(&[], ethernet::IPV6, &frames::tcp6(SERVED_V6, fastrand::u8(..))),
        2 => frames::frame(&[], ethernet::ARP, &frames::arp_request(SERVED_V4)),
        _ => frames::frame(&[], ethernet::IPV6, &frames::introduced(SOLICITED, SERVED_V6)),
    };
    let mut frame = with(whole, ethernet::SOURCE, &station.mac.0);
    for _ in 0..fastrand::usize(1..6) {
        let at = fastrand::usize(ethernet::HEADER..frame.len());
        frame[at] = fastrand::u8(..);
    }
    frame.truncate(fastrand::usize(ethernet::HEADER..=frame.len()));
    let more = if fastrand::bool() { fastrand::usize(..1_200) } else { 0 };
    frame.extend(std::iter::repeat_with(|| fastrand::u8(..)).take(more));
    frame
}

fn syns(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&opening(false)))
}

fn syns_v6(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&opening(true)))
}

fn syns_to_closed_ports(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, number| {
        let closed = Segment { destination: (SERVICE.0, number as u16 | 0x8000), ..opening(false) };
        station.frame(&closed)
    })
}

fn resets(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::Rst)))
}

fn fins(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::Fin)))
}

fn acks(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::None)))
}

fn acks_v6(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(true, TcpControl::None)))
}

fn unknown_payload(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::None).with(&[b'x'; 1_400])))
}

fn arps(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| {
        let request = with(frames::arp_request(SERVED_V4), arp::SENDER_IP, &fastrand::u32(..).to_be_bytes());
        with(frames::frame(&[], ethernet::ARP, &request), ethernet::SOURCE, &station.mac.0)
    })
}

fn solicitations(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| {
        let packet = frames::introduced(SOLICITED, SERVED_V6);
        with(frames::frame(&[], ethernet::IPV6, &packet), ethernet::SOURCE, &station.mac.0)
    })
}

fn pings(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, number| {
        let mut packet = frames::datagram(SERVED_V4, protocol::ICMP);
        packet[ipv4::HEADER] = 8;
        packet[ipv4::HEADER + 6..ipv4::HEADER + 8].copy_from_slice(&(number as u16).to_be_bytes());
        with(frames::frame(&[], ethernet::IPV4, &packet), ethernet::SOURCE, &station.mac.0)
    })
}

fn unknown_macs(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| {
        let [a, b, c, d] = fastrand::u32(..).to_be_bytes();
        with(station.frame(&opening(false)), ethernet::SOURCE, &[0x52, 0x54, a, b, c, d])
    })
}

fn garbage(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, GARBAGE, |station, _| garbled(station))
}

fn noise(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |_, _| {
        let length = fastrand::usize(14..1_514);
        // The destination is unicast, so that no other guest receives the frame.
        let mut frame: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(length).collect();
        frame[0] &= 0xfe;
        // The kernel drops a frame with a truncated VLAN tag before a classifier sees it.
        if matches!(frame[12..14], [0x81, 0] | [0x88, 0xa8]) {
            frame[13] ^= 1;
        }
        frame
    })
}

fn flood_attacks() -> Vec<Attack> {
    let attack = |name, run| Attack { name, run, leaves: false };
    vec![
        attack("a syn flood from any address", syns),
        attack("a syn flood by ipv6", syns_v6),
        attack("a syn flood to closed ports", syns_to_closed_ports),
        attack("a storm of resets", resets),
        attack("a storm of fins", fins),
        attack("a storm of acknowledgements", acks),
        attack("a storm of acknowledgements by ipv6", acks_v6),
        attack("payload on unknown connections", unknown_payload),
        attack("an arp flood", arps),
        attack("a flood of solicitations", solicitations),
        attack("a ping flood", pings),
        attack("a flood from any mac", unknown_macs),
        Attack { leaves: true, ..attack("garbled frames", garbage) },
        Attack { leaves: true, ..attack("noise", noise) },
    ]
}

#[test]
fn floods_starve_only_their_sender_with_xdp() {
    withstand("floods, xdp", "steer: xdp\n", &flood_attacks());
}

#[test]
fn floods_starve_only_their_sender_with_tcx() {
    withstand("floods, tcx", "steer: tcx\n", &flood_attacks());
}
