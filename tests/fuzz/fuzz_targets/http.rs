//! Laws of the HTTP server, which hold for every sequence of bytes on a connection, however the network splits it.
//!
//! The fuzz target and the test that replays its corpus share this file. The first eight bytes of an input seed the
//! random splits of the rest.
#![cfg_attr(not(test), no_main)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::http::body::BODY_MAX;
use metadata_content::http::parse::{FIELD_COUNT_MAX, TARGET_MAX};
use metadata_content::http::{Request, Response, StatusCode};
use metadata_content::store::{LiveOutcome, ParkedCall};
use metadata_datapath::stack::{ConnectionAction, Exchange, Service};
use metadata_user::service::{Answer, AnswerOrigin, AnswerSource, MetadataService};

/// Bytes of empty lines that the server skips before a request.
const LEADING_MAX: usize = 8;
/// Bytes of an input that seed the splits.
const CUTS: usize = 8;
/// Longest piece in bytes.
const PIECE_MAX: usize = 48;
/// How long a request for `/park` waits.
const PARKED: Duration = Duration::from_secs(1);
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Echoes and records each request.
#[derive(Debug, Default)]
struct Echo(Mutex<Vec<String>>);

impl AnswerSource for Echo {
    fn answer(
        &self,
        now: Now,
        _: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (Answer, AnswerOrigin) {
        (self.echo(now, request, parked), AnswerOrigin::NONE)
    }
}

impl Echo {
    fn echo(&self, now: Now, request: &Request<'_>, parked: Option<&ParkedCall>) -> Answer {
        let target = request.target;
        assert!(target.path.len() <= TARGET_MAX && target.path.starts_with('/'), "{target:?}");
        let mut segments = target.path[1..].split('/');
        let plain = target.path == "/" || segments.all(|segment| !matches!(segment, "" | "." | ".."));
        assert!(plain, "{target:?} is not normalised");
        assert!(request.body.len() <= BODY_MAX, "a body of {} bytes", request.body.len());
        match (target.path, parked) {
            ("/later", _) => return Answer::NotYet,
            ("/busy", _) => return Answer::TooMany,
            ("/nobody", _) => return Answer::Unknown,
            ("/park", None) => {
                let until = now.mono + PARKED;
                return Answer::Known(LiveOutcome::Park(ParkedCall {
                    until,
                    has_answer: true,
                    state: 7,
                    wait: Arc::default(),
                }));
            }
            ("/park", Some(parked)) if now.mono < parked.until => {
                return Answer::Known(LiveOutcome::Park(parked.clone()));
            }
            _ => {}
        }
        let output = format!("{:?} {target:?} {:?}", request.method, request.body);
        self.0.lock().expect("no panic").push(output.clone());
        let response = match target.path {
            "/none" => Response::new(StatusCode(204), None, &[], ""),
            "/close" => Response::new(StatusCode(200), None, &[], output).and_close(),
            _ => Response::new(StatusCode(200), Some("text/plain; charset=utf-8"), &[], output),
        };
        Answer::Known(response.into())
    }
}

/// The bytes sent to the guest, and the requests that reached the dialects.
#[derive(Debug, PartialEq, Eq)]
struct Transcript {
    output: Vec<u8>,
    asked: Vec<String>,
}

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let (cuts, bytes) = input.split_at(input.len().min(CUTS));
    let mut seed = [0; CUTS];
    seed[..cuts.len()].copy_from_slice(cuts);
    let mut random = fastrand::Rng::with_seed(u64::from_le_bytes(seed));
    let whole = run_exchange(bytes, || usize::MAX);
    assert_eq!(run_exchange(bytes, || random.usize(1..PIECE_MAX)), whole, "the answers depend on the splits");
    assert_eq!(run_exchange(bytes, || 1), whole, "the answers depend on the splits");
}

/// Sends the bytes in pieces of the lengths that `piece` returns, and returns the transcript.
fn run_exchange(bytes: &[u8], mut piece: impl FnMut() -> usize) -> Transcript {
    let answers = Arc::new(Echo::default());
    let (here, there) = ([169, 254, 169, 254].into(), [10, 0, 2, 15].into());
    let connection = Connection { slot: 0, local: (here, 80), remote: (there, 40_000) };
    let mut now = Now { mono: Duration::ZERO, unix_seconds: 1_795_219_200 };
    let mut talk = MetadataService::new(Arc::clone(&answers)).open(now, connection);
    let (mut output, mut start, mut at) = (Vec::new(), 0, 0_usize);
    // A waiting request is tried again twenty times a second.
    let turns = bytes.len() * (1 + 20 * 45) + 1;
    for _ in 0..=turns {
        let offered = &bytes[at..bytes.len().min(at.saturating_add(piece()))];
        let mut taken = 0;
        if offered.is_empty() {
            talk.finish(now);
        } else {
            taken = talk.receive(now, offered);
            assert!(taken <= offered.len(), "{taken} bytes taken of {}", offered.len());
            at += taken;
        }
        let (group, last) = take_output(&mut talk, now);
        let idle = taken == 0 && group.is_empty();
        if is_answer(&group, &bytes[start..at]) {
            start = at;
        }
        output.extend(group);
        match last {
            ConnectionAction::Wait { until: Some(until) } if idle => {
                assert!(until > now.mono, "the exchange waits until a time in the past");
                now.mono = until;
            }
            ConnectionAction::Wait { until } => {
                assert!(until.is_some(), "the exchange waits without a limit")
            }
            _ => {
                let asked = answers.0.lock().expect("no panic").clone();
                return Transcript { output, asked };
            }
        }
    }
    panic!("no end after {turns} turns");
}

/// The bytes sent now, and the step that ends them.
fn take_output(talk: &mut impl Exchange, now: Now) -> (Vec<u8>, ConnectionAction) {
    let mut output = Vec::new();
    loop {
        match talk.next(now) {
            ConnectionAction::Send(piece) => output.extend(piece),
            ConnectionAction::SendWithin { .. } => panic!("the echo restricts no answer to the first hop"),
            last => return (output, last),
        }
    }
}

/// True if `output` is the answer to `request`, false if nothing is sent yet. Anything else breaks a law.
fn is_answer(output: &[u8], request: &[u8]) -> bool {
    let output = output.strip_prefix(CONTINUE).unwrap_or(output);
    if output.is_empty() {
        return false;
    }
    let end = output.windows(4).position(|four| four == b"\r\n\r\n").expect("a head has an end");
    let head = std::str::from_utf8(&output[..end]).expect("a head is text");
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).expect("a status line");
    let status: u16 = status[..3].parse().expect("a status");
    let known = [200, 204, 400, 404, 408, 413, 414, 417, 429, 431, 501, 503, 505];
    assert!(known.contains(&status), "{head}");
    let mut names = Vec::new();
    let mut length = None;
    for (name, value) in lines.map(|line| line.split_once(": ").expect("a field")) {
        assert!(name.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-'), "{head}");
        assert!(value.bytes().all(|b| b == b' ' || b.is_ascii_graphic()), "{head}");
        assert!(!names.contains(&name), "{name} occurs twice: {head}");
        names.push(name);
        if name == "Content-Length" {
            length = Some(value.parse::<usize>().expect("a length"));
        }
    }
    assert!(names.contains(&"Date") && !names.contains(&"Transfer-Encoding"), "{head}");
    assert_eq!(length.is_none(), status == 204, "{head}");
    // A HEAD after a bare CR or too many empty lines is refused before its method is parsed.
    let mut line = request;
    while let Some(rest) = line.strip_prefix(b"\r\n").or_else(|| line.strip_prefix(b"\n")) {
        line = rest;
    }
    let body = &output[end + 4..];
    if request.len() - line.len() <= LEADING_MAX && line.starts_with(b"HEAD ") {
        assert!(body.is_empty(), "a body with {head}");
    } else {
        assert_eq!(body.len(), length.unwrap_or(0), "the body does not have the stated length: {head}");
    }
    let lines = request.iter().filter(|byte| **byte == b'\n').count();
    assert!(status != 431 || lines > FIELD_COUNT_MAX || request.len() > TARGET_MAX, "{head}");
    true
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
