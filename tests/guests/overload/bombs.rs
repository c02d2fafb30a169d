//! Requests that are too long, too many or ambiguous.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use metadata_content::account::BUFFERED_PER_VM;
use metadata_content::http::body::BODY_MAX;
use metadata_content::http::parse::{FIELDS_MAX, TARGET_MAX};
use metadata_content::mailbox::{ATTRIBUTE_BYTES, ATTRIBUTES_BYTES_PER_VM, ATTRIBUTES_PER_VM, WAITS_PER_VM};
use support::agent::Agent;
use support::answers::PATHS;
use support::arena::{ATTACKER, Arena, Scene, serves};
use support::eventually;
use support::record::Identity;
use support::station::{Mob, Station, Talk, answer};
use support::tap::Shape;
use support::{exposition, privileged};

use super::{Attack, RECOVERY, SERVICE, withstand};

/// Longest time to send an oversized request and receive its answer on a busy machine.
const MOST: Duration = Duration::from_secs(60);
/// Bytes the service may accept beyond a limit before its refusal arrives: one window.
const WINDOW: usize = 3_072;
/// Connections of one port.
const PER_PORT: usize = 128;
/// Bytes of a large request.
const LARGE: usize = 2 << 20;

/// The status of each answer on a connection, up to the first incomplete answer.
fn statuses(mut received: &[u8]) -> Vec<u16> {
    let mut found = Vec::new();
    while let Ok((status, rest)) = answer(received) {
        let head = &received[..received.len() - rest.len()];
        let length = std::str::from_utf8(head).ok().and_then(|head| {
            let field = head.lines().find(|line| line.to_ascii_lowercase().starts_with("content-length:"))?;
            field["content-length:".len()..].trim().parse::<usize>().ok()
        });
        let end = received.len() - rest.len() + length.unwrap_or(0);
        found.push(status);
        if end > received.len() {
            break;
        }
        received = &received[end..];
    }
    found
}

/// Sends `bytes` of a request over one connection.
///
/// The service must answer with `status` alone and close before it has accepted more than `limit` bytes.
fn expect_refusal(
    station: &mut Station,
    status: u16,
    limit: usize,
    bytes: usize,
    make: impl Fn(usize) -> u8,
) -> Result<()> {
    let mut mob = Mob::open(station, SERVICE, 1)?;
    let taken = mob.pour(bytes, MOST, make)? as usize;
    let over = mob.until(MOST, |talks| talks.iter().all(|talk| talk.ended || talk.reset))?;
    ensure!(over, "the connection does not end");
    let talk = &mob.talks[0];
    ensure!(statuses(&talk.received) == [status], "answered {:?}", statuses(&talk.received));
    ensure!(taken <= limit + WINDOW, "{taken} bytes were accepted; the limit is {limit}");
    mob.leave()
}

/// Sends one short request; its answers must have exactly these statuses.
fn expect_answers(station: &mut Station, bytes: &[u8], expected: &[u16]) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let said = talk.transmit(bytes);
    station.until(&mut talk, &said, |talk| talk.ended)?;
    station.transmit(&talk.finish())?;
    let found = statuses(&talk.received);
    ensure!(found == expected, "{:?} is answered {found:?}", String::from_utf8_lossy(bytes));
    Ok(())
}

/// The bytes of `start`, followed by `over` without end.
fn endless<'a>(start: &'a [u8], over: &'a [u8]) -> impl Fn(usize) -> u8 + 'a {
    move |at| start.get(at).copied().unwrap_or_else(|| over[(at - start.len()) % over.len()])
}

fn header(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    expect_refusal(station, 431, FIELDS_MAX + 64, LARGE, endless(b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"x"))
}

fn fields(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    expect_refusal(
        station,
        431,
        FIELDS_MAX + 64,
        10_000 * 6,
        endless(b"GET / HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n"),
    )
}

fn target(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    expect_refusal(station, 414, TARGET_MAX + 64, LARGE, endless(b"GET /", b"a/"))
}

fn method(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    expect_refusal(station, 400, 64, LARGE, endless(b"", b"A"))
}

fn chunks(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head = b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk = [&b"400\r\n"[..], &[b'x'; 0x400], b"\r\n"].concat();
    expect_refusal(station, 413, head.len() + BODY_MAX * 2, LARGE, endless(head, &chunk))
}

fn chunks_of_one_byte(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head = b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    expect_refusal(station, 413, head.len() + BODY_MAX * 6, LARGE, endless(head, b"1\r\nx\r\n"))
}

fn extensions(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head = b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;";
    expect_refusal(station, 400, head.len() + 4_096, LARGE, endless(head, b"a=b;"))
}

fn lengths(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    for length in ["65537", "2147483648", "18446744073709551616", "99999999999999999999999999999999"] {
        let request = format!("PUT /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        expect_answers(station, request.as_bytes(), &[413])?;
    }
    Ok(())
}

/// The bytes after a request with two framings must not count as another request.
fn smuggling(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let hidden = "GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n";
    let framings = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length : 5\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding:\r\n chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    ];
    for framing in framings {
        let request = format!("PUT /v1/x HTTP/1.1\r\nHost: x\r\n{framing}\r\n0\r\n\r\n{hidden}");
        let mut talk = station.open(SERVICE)?;
        let said = talk.transmit(request.as_bytes());
        station.until(&mut talk, &said, |talk| talk.ended)?;
        station.transmit(&talk.finish())?;
        let found = statuses(&talk.received);
        ensure!(matches!(found[..], [400 | 501]), "{framing:?} is answered {found:?}");
    }
    Ok(())
}

fn control_characters(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let lines: [&[u8]; 10] = [
        b"GET /v1/\0user-data HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/user-data\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/\x7f HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/a\rb HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/user-data\tHTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
        b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\nA: b\rB: c\r\n\r\n",
        b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\0: c\r\n\r\n",
    ];
    lines.iter().try_for_each(|line| expect_answers(station, line, &[400]))
}

/// Percent-encoded line ends in a path must not add a header field to the answer.
fn encoded_line_ends(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let path = "/v1/%0d%0aSet-Cookie:%20a=b%0d%0a%0d%0a<html>";
    let said = talk.transmit(&support::station::get(path));
    station.until(&mut talk, &said, |talk| talk.ended)?;
    station.transmit(&talk.finish())?;
    let text = String::from_utf8_lossy(&talk.received).to_ascii_lowercase();
    ensure!(statuses(&talk.received) == [404] && !text.contains("cookie"), "{text}");
    Ok(())
}

fn deep_paths(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let paths = [
        ("/a".repeat(1_000), 404),
        ("/".repeat(2_000), 200),
        (format!("/v1{}", "/user-data".repeat(150)), 404),
        ("/%61".repeat(500), 404),
        ("/latest".repeat(280), 404),
        ("/v1/..".repeat(300), 400),
        ("/%2e%2e/%2e%2e/etc/passwd".to_owned(), 400),
        ("/..%2f..%2fetc%2fpasswd".to_owned(), 400),
        (format!("/?{}", "a=b&".repeat(450)), 200),
    ];
    for (path, status) in paths {
        let mut talk = station.open(SERVICE)?;
        let said = talk.transmit(&support::station::get(&path));
        station.until(&mut talk, &said, |talk| talk.ended)?;
        station.transmit(&talk.finish())?;
        let (found, body) = answer(&talk.received)?;
        ensure!(found == status, "{path:.60} is answered {found}");
        ensure!(found != 404 || body.len() < 64, "{path:.60}: {} bytes of error", body.len());
    }
    Ok(())
}

/// Pipelines ten thousand requests; the answers must be in order and stay within the VM's request limit.
fn pipelining(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    const REQUESTS: usize = 10_000;
    // The default request limit of a record.
    const BURST: usize = 400;
    const PER_SECOND: f64 = 100.0;
    let requests = [
        &b"GET /v1/meta-data HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    .concat();
    let start = Instant::now();
    let mut mob = Mob::open(station, SERVICE, 1)?;
    mob.pour(REQUESTS / 2 * requests.len(), Duration::from_secs(8), endless(b"", &requests))?;
    mob.until(MOST, |talks| statuses(&talks[0].received).len() >= BURST)?;
    let found = statuses(&mob.talks[0].received);
    ensure!(found.len() >= BURST, "{} answers", found.len());
    let in_order =
        found.iter().enumerate().all(|(at, status)| *status == if at % 2 == 0 { 200 } else { 404 });
    ensure!(in_order, "answers are out of order: {found:?}");
    let took = start.elapsed();
    let most = BURST + (PER_SECOND * took.as_secs_f64()).ceil() as usize;
    ensure!(found.len() <= most, "{} answers in {took:.1?}; the limit is {most}", found.len());
    mob.leave()
}

/// Sends a body of the largest size on every connection a port may have.
///
/// The service buffers as many bytes as one VM may use and answers the other requests with 503. How many bodies it
/// accepts in all depends on the order of their segments. A body that takes too long gets 408. No request lacks an
/// answer.
fn bodies(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head =
        format!("PUT /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {BODY_MAX}\r\n\r\n");
    let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
    mob.pour(head.len() + BODY_MAX, Duration::from_secs(60), endless(head.as_bytes(), b"x"))?;
    let over = mob.until(MOST, |talks| talks.iter().all(|talk| talk.ended || talk.reset))?;
    ensure!(over, "some bodies have no answer");
    let held_most = BUFFERED_PER_VM + PER_PORT * WINDOW;
    ensure!(
        mob.most_held <= held_most,
        "{} bytes are buffered at once; the limit is {held_most}",
        mob.most_held
    );
    let found: Vec<_> = mob.talks.iter().map(|talk| statuses(&talk.received)).collect();
    let count = |status| found.iter().filter(|found| **found == [status]).count();
    let (accepted, deferred, late) = (count(405), count(503), count(408));
    let others: Vec<_> =
        mob.talks.iter().zip(&found).filter(|(_, it)| !matches!(it[..], [405 | 408 | 503])).collect();
    ensure!(others.is_empty(), "{accepted} accepted, {deferred} deferred, {late} late, others: {others:?}");
    eprintln!(
        "{accepted} accepted, {deferred} deferred, {late} late; {} bytes buffered at once",
        mob.most_held
    );
    ensure!(accepted > 0 && deferred > 0, "{accepted} accepted, {deferred} deferred, {late} late");
    mob.leave()
}

fn attribute(method: &str, path: &str, body: usize) -> Vec<u8> {
    let head = format!(
        "{method} /computeMetadata/v1/instance/guest-attributes/{path} HTTP/1.1\r\nHost: x\r\nMetadata-Flavor: Google\r\n\
         Connection: close\r\nContent-Length: {body}\r\n\r\n"
    );
    [head.into_bytes(), vec![b'x'; body]].concat()
}

/// The status of a request on a connection of its own.
fn status_of(station: &mut Station, request: &[u8]) -> Result<u16> {
    let mut mob = Mob::open(station, SERVICE, 1)?;
    mob.pour(request.len(), MOST, |at| request[at])?;
    mob.until(MOST, |talks| talks[0].ended || talks[0].reset)?;
    let found = statuses(&mob.talks[0].received);
    mob.leave()?;
    ensure!(found.len() == 1, "answered {found:?}");
    Ok(found[0])
}

/// Writes `keys` attributes of `bytes` each; returns how many the service stores. It must refuse the others.
fn count_stored(station: &mut Station, name: &str, keys: usize, bytes: usize) -> Result<usize> {
    let mut stored = 0;
    for key in 0..keys {
        let status = status_of(station, &attribute("PUT", &format!("flood/{name}-{key}"), bytes))?;
        ensure!(status < 500, "{name} {key} is answered {status}");
        stored += usize::from(status < 300);
    }
    Ok(stored)
}

/// Guest attributes are limited in number, in size and in total.
fn mailboxes(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let few = ATTRIBUTES_BYTES_PER_VM / ATTRIBUTE_BYTES;
    let large = count_stored(station, "large", 2 * few, ATTRIBUTE_BYTES)?;
    // Names count towards the total.
    ensure!((few - 1..=few).contains(&large), "{large} large attributes were stored");
    let small = count_stored(station, "small", 2 * ATTRIBUTES_PER_VM, 1)?;
    ensure!(
        large + small == ATTRIBUTES_PER_VM,
        "{small} small attributes were stored beside {large} large ones"
    );
    let status = status_of(station, &attribute("PUT", "flood/large-0", ATTRIBUTE_BYTES + 1))?;
    ensure!((400..500).contains(&status), "an attribute too large is answered {status}");
    Ok(())
}

/// Only a few requests may wait for a change; each further one ends the oldest.
fn waits(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let request = b"GET /computeMetadata/v1/instance/hostname?wait_for_change=true HTTP/1.1\r\nHost: x\r\n\
                    Metadata-Flavor: Google\r\nConnection: close\r\n\r\n";
    let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
    // The guest retransmits unacknowledged segments, because frames beyond the port's limit are dropped. If a reset is
    // dropped, its connection remains until its timeout, and the last requests have no room until then.
    mob.pour(request.len(), RECOVERY, |at| request[at])?;
    let ended = |talks: &[Talk]| talks.iter().filter(|talk| talk.ended).count();
    mob.until(MOST, |talks| ended(talks) >= PER_PORT - WAITS_PER_VM)?;
    mob.until(Duration::from_millis(500), |_| false)?;
    let ended = ended(&mob.talks);
    ensure!(
        ended == PER_PORT - WAITS_PER_VM,
        "{ended} of {PER_PORT} waits have ended; {WAITS_PER_VM} may continue"
    );
    mob.leave()
}

#[test]
fn oversized_and_ambiguous_requests_cost_only_their_sender() {
    let attack = |name, run| Attack { name, run, leaves: false };
    withstand(
        "bombs",
        "",
        &[
            attack("a header of 2 MiB", header),
            attack("10,000 header fields", fields),
            attack("an endless target", target),
            attack("an endless method", method),
            attack("endless chunks", chunks),
            attack("endless chunks of one byte", chunks_of_one_byte),
            attack("an endless chunk extension", extensions),
            attack("a content length beyond all limits", lengths),
            attack("smuggling", smuggling),
            attack("control characters", control_characters),
            attack("encoded line ends", encoded_line_ends),
            attack("deep paths", deep_paths),
            attack("10,000 pipelined requests", pipelining),
            attack("the largest body on every connection", bodies),
            attack("a flood of guest attributes", mailboxes),
            attack("a flood of waits for a change", waits),
        ],
    );
}

#[privileged::test]
fn requests_held_for_a_missing_record_cost_only_their_sender() {
    let scene = Scene::new(Shape::default()).expect("a node");
    let identity = Identity::of(ATTACKER);
    std::fs::remove_file(identity.path(scene.records())).expect("no record for the attacker");
    let mut arena = Arena::open(&scene, "").expect("an arena");
    let ((), answered) = arena.meanwhile(held).expect("others are served");
    assert!(
        answered.iter().all(|count| *count > 5),
        "only {answered:?} requests of the other guests were answered meanwhile"
    );
    identity.write(scene.records(), 1).expect("a record for the attacker");
    let attacker = &mut arena.attacker;
    eventually(MOST, || serves(&identity, attacker, PATHS[0])).expect("the attacker gets its own record");
    exposition::balance(&arena.agent, 0).expect("every frame is accounted for");
}

/// Sends twice as many requests as a port may have connections; every held request must get 503 at its timeout.
///
/// The requests beyond the limit are held once earlier connections end. On a slow machine some of them get 503 before
/// the last of the earlier ones.
fn held(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut mob = Mob::open(station, SERVICE, 2 * PER_PORT)?;
    for talk in &mut mob.talks {
        let said = talk.transmit(&support::station::get("/v1/meta-data"));
        said.iter().try_for_each(|segment| mob.station.transmit(segment))?;
    }
    let ended = |talks: &[Talk]| talks.iter().filter(|talk| talk.ended).count();
    mob.until(MOST, |talks| ended(talks) >= PER_PORT)?;
    let found: Vec<_> = mob.talks.iter().flat_map(|talk| statuses(&talk.received)).collect();
    ensure!(found.len() >= PER_PORT && found.iter().all(|status| *status == 503), "{found:?}");
    mob.leave().context("leaving")
}
