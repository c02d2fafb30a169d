//! Requests that are too long, too many, or two things at once.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use metadata_content::account::BUFFERED_PER_VM;
use metadata_content::http::body::BODY_MAX;
use metadata_content::http::parse::{FIELDS_MAX, TARGET_MAX};
use metadata_content::mailbox::{
    ATTRIBUTE_OCTETS, ATTRIBUTES_OCTETS_PER_VM, ATTRIBUTES_PER_VM, WAITS_PER_VM,
};
use support::agent::Agent;
use support::answers::PATHS;
use support::arena::{ATTACKER, Arena, Scene, serves};
use support::books;
use support::eventually::eventually;
use support::mob::Mob;
use support::privileged;
use support::record::Identity;
use support::station::{Station, Talk, answer};
use support::tap::Shape;

use crate::Attack;
use crate::RECOVERY;
use crate::SERVICE;
use crate::withstand;

/// For a bomb to be poured out, and its answer to come: on a busy machine, all take their turns.
const MOST: Duration = Duration::from_secs(60);
/// What the service has taken in beyond a limit before its refusal is heard: one window.
const WINDOW: usize = 3_072;
/// Connections of one port.
const PER_PORT: usize = 128;
/// A bomb of the larger kind.
const LARGE: usize = 2 << 20;

/// The answers on a connection: each status, until one is not whole.
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

/// Pours `octets` of a request over one connection: it is answered with `status` alone, and closed, before more
/// than `limit` octets were taken.
fn refused(
    station: &mut Station,
    status: u16,
    limit: usize,
    octets: usize,
    make: impl Fn(usize) -> u8,
) -> Result<()> {
    let mut mob = Mob::open(station, SERVICE, 1)?;
    let taken = mob.pour(octets, MOST, make)? as usize;
    let over = mob.until(MOST, |talks| talks.iter().all(|talk| talk.ended || talk.reset))?;
    ensure!(over, "the connection goes on");
    let talk = &mob.talks[0];
    ensure!(statuses(&talk.received) == [status], "answered {:?}", statuses(&talk.received));
    ensure!(taken <= limit + WINDOW, "{taken} octets were taken, of {limit} allowed");
    mob.leave()
}

/// One short request, answered with these statuses and nothing else.
fn asked(station: &mut Station, octets: &[u8], expected: &[u16]) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let said = talk.say(octets);
    station.until(&mut talk, &said, |talk| talk.ended)?;
    station.say(&talk.finish())?;
    let found = statuses(&talk.received);
    ensure!(found == expected, "{:?} is answered {found:?}", String::from_utf8_lossy(octets));
    Ok(())
}

/// A beginning, and then the same over and over.
fn endless<'a>(start: &'a [u8], over: &'a [u8]) -> impl Fn(usize) -> u8 + 'a {
    move |at| start.get(at).copied().unwrap_or_else(|| over[(at - start.len()) % over.len()])
}

fn header(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    refused(station, 431, FIELDS_MAX + 64, LARGE, endless(b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"x"))
}

fn fields(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    refused(station, 431, FIELDS_MAX + 64, 10_000 * 6, endless(b"GET / HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n"))
}

fn target(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    refused(station, 414, TARGET_MAX + 64, LARGE, endless(b"GET /", b"a/"))
}

fn method(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    refused(station, 400, 64, LARGE, endless(b"", b"A"))
}

fn chunks(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head = b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk = [&b"400\r\n"[..], &[b'x'; 0x400], b"\r\n"].concat();
    refused(station, 413, head.len() + BODY_MAX * 2, LARGE, endless(head, &chunk))
}

fn chunks_of_one_octet(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head = b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    refused(station, 413, head.len() + BODY_MAX * 6, LARGE, endless(head, b"1\r\nx\r\n"))
}

fn extensions(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head = b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;";
    refused(station, 400, head.len() + 4_096, LARGE, endless(head, b"a=b;"))
}

fn lengths(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    for length in ["65537", "2147483648", "18446744073709551616", "99999999999999999999999999999999"] {
        let request = format!("PUT /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        asked(station, request.as_bytes(), &[413])?;
    }
    Ok(())
}

/// What follows a request with two framings is not taken for another one.
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
        let said = talk.say(request.as_bytes());
        station.until(&mut talk, &said, |talk| talk.ended)?;
        station.say(&talk.finish())?;
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
    lines.iter().try_for_each(|line| asked(station, line, &[400]))
}

/// Line ends in an escape stay where they are: no answer has a field a guest made.
fn encoded_line_ends(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut talk = station.open(SERVICE)?;
    let path = "/v1/%0d%0aSet-Cookie:%20a=b%0d%0a%0d%0a<html>";
    let said = talk.say(&support::station::get(path));
    station.until(&mut talk, &said, |talk| talk.ended)?;
    station.say(&talk.finish())?;
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
        let said = talk.say(&support::station::get(&path));
        station.until(&mut talk, &said, |talk| talk.ended)?;
        station.say(&talk.finish())?;
        let (found, body) = answer(&talk.received)?;
        ensure!(found == status, "{path:.60} is answered {found}");
        ensure!(found != 404 || body.len() < 64, "{path:.60}: {} octets of error", body.len());
    }
    Ok(())
}

/// Ten thousand requests in one go: answered in order, none beyond what a VM may ask for.
fn pipelining(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    const REQUESTS: usize = 10_000;
    // What a record allows a VM by default.
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
    ensure!(found.len() <= most, "{} answers in {took:.1?}, {most} at most", found.len());
    mob.leave()
}

/// The largest bodies there may be on all connections there may be: as many are taken in at a time as one guest may
/// have kept, and the others are asked to come again. How many are taken in all depends on how their segments fall, and
/// a guest that gets too little time to send a body in is told so (408); one without a definite answer there is not.
fn bodies(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let head =
        format!("PUT /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {BODY_MAX}\r\n\r\n");
    let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
    mob.pour(head.len() + BODY_MAX, Duration::from_secs(60), endless(head.as_bytes(), b"x"))?;
    let over = mob.until(MOST, |talks| talks.iter().all(|talk| talk.ended || talk.reset))?;
    ensure!(over, "some bodies are not answered");
    let held_most = BUFFERED_PER_VM + PER_PORT * WINDOW;
    ensure!(mob.most_held <= held_most, "{} octets are held at once, {held_most} allowed", mob.most_held);
    let found: Vec<_> = mob.talks.iter().map(|talk| statuses(&talk.received)).collect();
    let count = |status| found.iter().filter(|found| **found == [status]).count();
    let (taken, put_off, late) = (count(405), count(503), count(408));
    let others: Vec<_> =
        mob.talks.iter().zip(&found).filter(|(_, it)| !matches!(it[..], [405 | 408 | 503])).collect();
    ensure!(others.is_empty(), "{taken} taken, {put_off} put off, {late} late, others: {others:?}");
    eprintln!("{taken} taken, {put_off} put off, {late} late; {} octets held at once", mob.most_held);
    ensure!(taken > 0 && put_off > 0, "{taken} taken, {put_off} put off, {late} late");
    mob.leave()
}

fn attribute(method: &str, path: &str, body: usize) -> Vec<u8> {
    let head = format!(
        "{method} /computeMetadata/v1/instance/guest-attributes/{path} HTTP/1.1\r\nHost: x\r\nMetadata-Flavor: Google\r\n\
         Connection: close\r\nContent-Length: {body}\r\n\r\n"
    );
    [head.into_bytes(), vec![b'x'; body]].concat()
}

/// The status a request gets on a connection of its own.
fn status_of(station: &mut Station, request: &[u8]) -> Result<u16> {
    let mut mob = Mob::open(station, SERVICE, 1)?;
    mob.pour(request.len(), MOST, |at| request[at])?;
    mob.until(MOST, |talks| talks[0].ended || talks[0].reset)?;
    let found = statuses(&mob.talks[0].received);
    mob.leave()?;
    ensure!(found.len() == 1, "answered {found:?}");
    Ok(found[0])
}

/// How many of so many attributes of this size are kept; the others are refused.
fn kept(station: &mut Station, name: &str, keys: usize, octets: usize) -> Result<usize> {
    let mut kept = 0;
    for key in 0..keys {
        let status = status_of(station, &attribute("PUT", &format!("flood/{name}-{key}"), octets))?;
        ensure!(status < 500, "{name} {key} is answered {status}");
        kept += usize::from(status < 300);
    }
    Ok(kept)
}

/// What a guest may leave with the service is bounded in number, in size, and in all.
fn mailboxes(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let few = ATTRIBUTES_OCTETS_PER_VM / ATTRIBUTE_OCTETS;
    let large = kept(station, "large", 2 * few, ATTRIBUTE_OCTETS)?;
    // Names count as well.
    ensure!((few - 1..=few).contains(&large), "{large} large attributes were kept");
    let small = kept(station, "small", 2 * ATTRIBUTES_PER_VM, 1)?;
    ensure!(
        large + small == ATTRIBUTES_PER_VM,
        "{small} small attributes were kept beside {large} large ones"
    );
    let status = status_of(station, &attribute("PUT", "flood/large-0", ATTRIBUTE_OCTETS + 1))?;
    ensure!((400..500).contains(&status), "an attribute too large is answered {status}");
    Ok(())
}

/// Requests that wait for a change: a few are kept, and the oldest gives way.
fn waits(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let request = b"GET /computeMetadata/v1/instance/hostname?wait_for_change=true HTTP/1.1\r\nHost: x\r\n\
                    Metadata-Flavor: Google\r\nConnection: close\r\n\r\n";
    let mut mob = Mob::open(station, SERVICE, PER_PORT)?;
    // As every guest does, it repeats what nobody acknowledged: what exceeds the port's limit is dropped, and there is
    // no room for the last ones while resets that were dropped so leave connections to their time-out.
    mob.pour(request.len(), RECOVERY, |at| request[at])?;
    let ended = |talks: &[Talk]| talks.iter().filter(|talk| talk.ended).count();
    mob.until(MOST, |talks| ended(talks) >= PER_PORT - WAITS_PER_VM)?;
    mob.until(Duration::from_millis(500), |_| false)?;
    let ended = ended(&mob.talks);
    ensure!(
        ended == PER_PORT - WAITS_PER_VM,
        "{ended} of {PER_PORT} waits have ended; {WAITS_PER_VM} may go on"
    );
    mob.leave()
}

#[test]
fn requests_that_are_bombs_cost_nobody_else() {
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
            attack("endless chunks of one octet", chunks_of_one_octet),
            attack("an endless chunk extension", extensions),
            attack("a body as long as one cannot count", lengths),
            attack("smuggling", smuggling),
            attack("control characters", control_characters),
            attack("encoded line ends", encoded_line_ends),
            attack("deep paths", deep_paths),
            attack("10,000 requests in one go", pipelining),
            attack("the largest body on every connection", bodies),
            attack("a flood of guest attributes", mailboxes),
            attack("a flood of waits for a change", waits),
        ],
    );
}

#[test]
fn requests_held_for_a_record_that_never_comes_cost_nobody_else() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(Shape::default()).expect("a node");
    let identity = Identity::of(ATTACKER);
    std::fs::remove_file(identity.path(scene.records())).expect("no record for the attacker");
    let mut arena = Arena::open(&scene, "").expect("an arena");
    let ((), answered) = arena.meanwhile(held).expect("others are served");
    assert!(answered.iter().all(|count| *count > 5), "{answered:?} requests of others meanwhile");
    identity.write(scene.records(), 1).expect("the record comes after all");
    let attacker = &mut arena.attacker;
    eventually(MOST, || serves(&identity, attacker, PATHS[0])).expect("its own record");
    books::balance(&arena.agent, 0).expect("every frame is accounted for");
}

/// Twice as many requests as there may be connections: those that are held get 503 in the end. The others are held in
/// turn when places become free, and on a slow machine some of them get theirs before the last of the first.
fn held(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    let mut mob = Mob::open(station, SERVICE, 2 * PER_PORT)?;
    for talk in &mut mob.talks {
        let said = talk.say(&support::station::get("/v1/meta-data"));
        said.iter().try_for_each(|segment| mob.station.say(segment))?;
    }
    let ended = |talks: &[Talk]| talks.iter().filter(|talk| talk.ended).count();
    mob.until(MOST, |talks| ended(talks) >= PER_PORT)?;
    let found: Vec<_> = mob.talks.iter().flat_map(|talk| statuses(&talk.received)).collect();
    ensure!(found.len() >= PER_PORT && found.iter().all(|status| *status == 503), "{found:?}");
    mob.leave().context("leaving")
}
