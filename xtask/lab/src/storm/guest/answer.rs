//! Checks answers as they arrive: status, length and every byte.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::super::cpu::{Distribution, WithoutAgent};
use super::Stalls;

/// Bytes of the longest accepted response head.
const HEAD_MOST: usize = 8 << 10;
/// Bytes of the longest accepted token.
const TOKEN_MOST: usize = 4 << 10;

/// The answer that a request must get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) status: u16,
    pub(crate) body: Body,
}

/// The body that an answer must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Body {
    /// These bytes of the file of bodies.
    Exactly { offset: u64, length: u64 },
    /// Any bytes.
    Any,
    /// A token, which the guest sends with the following requests.
    Token,
}

/// The state of an answer after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    More,
    /// The answer is complete and right. `keep`: the server keeps the connection.
    Done {
        keep: bool,
    },
    Wrong(Failure),
}

/// An answer that is being read.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    head: Vec<u8>,
    /// The announced and the received bytes of the body, once the head is complete.
    body: Option<(usize, usize)>,
    keep: bool,
    by_kernel: bool,
    token: Vec<u8>,
}

impl Answer {
    /// Resets everything but the token, for the next answer.
    pub(crate) fn reset(&mut self) {
        self.head.clear();
        self.body = None;
    }

    /// Returns the last token received.
    pub(crate) fn token(&self) -> &[u8] {
        &self.token
    }

    /// Whether the agent's kernel part has given the answer: it leaves out `Server`, which workers send.
    pub(crate) fn is_by_kernel(&self) -> bool {
        self.by_kernel
    }

    /// Checks the next bytes. `bodies` is the content of the file of bodies.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], expected: &Expected, bodies: &[u8]) -> Progress {
        if self.body.is_none() {
            let before = self.head.len();
            self.head.extend_from_slice(&bytes[..bytes.len().min(HEAD_MOST - before)]);
            let Some(end) = find_end(&self.head, before) else {
                let full = self.head.len() == HEAD_MOST;
                return if full { Progress::Wrong(Failure::Head) } else { Progress::More };
            };
            bytes = &bytes[end - before..];
            self.head.truncate(end);
            let Some(head) = Head::parse(&self.head) else { return Progress::Wrong(Failure::Head) };
            if head.status != expected.status {
                return Progress::Wrong(Failure::Status);
            }
            let length = head.length.unwrap_or(0);
            if head.length.is_none() && head.status != 204 || !fits(length, expected.body) {
                return Progress::Wrong(Failure::Length);
            }
            (self.keep, self.by_kernel) = (head.keep, !head.names_server);
            self.body = Some((length, 0));
            if expected.body == Body::Token {
                self.token.clear();
            }
        }
        self.feed_body(bytes, expected.body, bodies)
    }

    fn feed_body(&mut self, bytes: &[u8], expected: Body, bodies: &[u8]) -> Progress {
        let Some((length, seen)) = &mut self.body else { return Progress::More };
        if *seen + bytes.len() > *length {
            return Progress::Wrong(Failure::Length);
        }
        match expected {
            Body::Exactly { offset, .. } => {
                let from = offset as usize + *seen;
                if bodies.get(from..from + bytes.len()) != Some(bytes) {
                    return Progress::Wrong(Failure::Body);
                }
            }
            Body::Any => {}
            Body::Token => self.token.extend_from_slice(bytes),
        }
        *seen += bytes.len();
        if *seen == *length { Progress::Done { keep: self.keep } } else { Progress::More }
    }
}

fn fits(length: usize, expected: Body) -> bool {
    match expected {
        Body::Exactly { length: exactly, .. } => length as u64 == exactly,
        Body::Any => true,
        Body::Token => (1..=TOKEN_MOST).contains(&length),
    }
}

/// Returns the end of the blank line. Only its last three bytes can be before `from`.
fn find_end(head: &[u8], from: usize) -> Option<usize> {
    let from = from.saturating_sub(3);
    head[from..].windows(4).position(|four| four == b"\r\n\r\n").map(|at| from + at + 4)
}

struct Head {
    status: u16,
    /// The Content-Length. It is missing in answers without one and in chunked answers.
    length: Option<usize>,
    keep: bool,
    names_server: bool,
}

impl Head {
    fn parse(head: &[u8]) -> Option<Self> {
        let mut lines = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii_end);
        let first = lines.next()?;
        let (version, status) = (first.get(..9)?, first.get(9..12)?);
        let keep = version == b"HTTP/1.1 ";
        let mut parsed = Self { status: number(status)? as u16, length: None, keep, names_server: false };
        if !version.starts_with(b"HTTP/1.") {
            return None;
        }
        for line in lines.take_while(|line| !line.is_empty()) {
            let colon = line.iter().position(|&byte| byte == b':')?;
            let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
            if name.eq_ignore_ascii_case(b"content-length") {
                parsed.length = Some(number(value)?);
            } else if name.eq_ignore_ascii_case(b"connection") {
                parsed.keep = value.eq_ignore_ascii_case(b"keep-alive");
            } else if name.eq_ignore_ascii_case(b"server") {
                parsed.names_server = true;
            }
        }
        Some(parsed)
    }
}

fn number(digits: &[u8]) -> Option<usize> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

// The counts, failures and times that guests record.

/// Buckets for each doubling of a time, so that the bounds of neighbouring buckets differ by 1/32.
const STEPS: u64 = 32;

/// The reason for which a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// ARP got no reply.
    Arp,
    /// No connection was established.
    Connect,
    /// No byte arrived for too long.
    Silence,
    /// An RST arrived.
    Reset,
    /// The connection ended before the answer did.
    Cut,
    /// The answer is not an HTTP/1.x response.
    Head,
    /// The answer has another status.
    Status,
    /// The answer has another length, or announces none.
    Length,
    /// The body has wrong bytes, perhaps another guest's.
    Body,
    /// A frame had a wrong checksum. It is discarded, and the request may still succeed.
    Checksum,
}

/// Times, counted in buckets whose width grows with the time.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    max_ns: u64,
}

impl Histogram {
    pub(crate) fn add(&mut self, ns: u64) {
        let bucket = bucket(ns);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Returns the model's form: bounds in microseconds, without empty buckets.
    fn distribution(&self) -> Distribution {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Distribution {
            buckets: filled.map(|(bucket, &count)| (bound(bucket) as f64 / 1e3, count)).collect(),
            max_us: self.max_ns as f64 / 1e3,
        }
    }
}

/// Returns the bucket of a value. Values below 2 × [`STEPS`] have a bucket each, and each further doubling has
/// [`STEPS`] buckets.
fn bucket(value: u64) -> usize {
    let shift = u64::from((value | STEPS).ilog2() - STEPS.ilog2());
    (shift * STEPS + (value >> shift)) as usize
}

/// Returns the greatest value of a bucket.
fn bound(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / STEPS).saturating_sub(1);
    ((bucket - shift * STEPS + 1) << shift) - 1
}

/// The counts of one storm.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) boots: u64,
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) reasons: BTreeMap<Failure, u64>,
    pub(crate) retransmissions: u64,
    /// Requests repeated after a failure.
    pub(crate) retries: u64,
    pub(crate) request: Histogram,
    /// Requests that the agent's kernel part has answered.
    pub(crate) kernel: Histogram,
    pub(crate) boot: Histogram,
    /// What became of requests since the agent was killed, if it was.
    pub(crate) without_agent: Option<WithoutAgent>,
    /// The time at which each boot of the first wave finished, since the storm's start.
    pub(crate) finished: Vec<u64>,
    pub(crate) calls: Calls,
    pub(crate) stalls: Stalls,
}

/// Numbers of system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Calls {
    /// Frames written to taps.
    pub(crate) writes: u64,
    /// Reads of taps, including those without a frame.
    pub(crate) reads: u64,
    /// Waits for taps.
    pub(crate) waits: u64,
}

impl Tally {
    /// Counts an answer that took this time.
    pub(crate) fn answered(&mut self, took: u64, by_kernel: bool) {
        self.requests += 1;
        self.request.add(took);
        if by_kernel {
            self.kernel.add(took);
            self.without_agent.iter_mut().for_each(|it| it.answered += 1);
        }
    }

    /// Counts a request without an answer, if the agent was killed.
    pub(crate) fn unanswered(&mut self, was_published: bool) {
        if let Some(without_agent) = &mut self.without_agent {
            let count = if was_published { &mut without_agent.missed } else { &mut without_agent.waiting };
            *count += 1;
        }
    }

    pub(crate) fn fail(&mut self, reason: Failure) {
        self.failed += 1;
        self.note(reason);
    }

    /// Counts a reason without a failed request.
    pub(crate) fn note(&mut self, reason: Failure) {
        *self.reasons.entry(reason).or_default() += 1;
    }

    pub(crate) fn outcome(mut self, wall_ns: u64) -> Outcome {
        self.finished.sort_unstable();
        Outcome {
            boots: self.boots,
            requests: self.requests,
            failures: self.failed,
            reasons: self.reasons,
            retransmissions: self.retransmissions,
            retries: self.retries,
            wall_us: wall_ns as f64 / 1e3,
            request: self.request.distribution(),
            kernel: self.kernel.distribution(),
            without_agent: self.without_agent,
            boot: self.boot.distribution(),
            finished: curve(&self.finished),
            calls: self.calls,
            flood: None,
        }
    }
}

/// The most points of a curve of finished boots, without the last one.
const CURVE_POINTS: usize = 200;

/// Returns about [`CURVE_POINTS`] points, always including the last.
fn curve(finished: &[u64]) -> Vec<(f64, u32)> {
    let step = finished.len().div_ceil(CURVE_POINTS).max(1);
    let point = |n: usize| (finished[n - 1] as f64 / 1e3, n as u32);
    let mut points: Vec<_> = (1..=finished.len()).filter(|n| n % step == 0).map(point).collect();
    if !finished.len().is_multiple_of(step) {
        points.push(point(finished.len()));
    }
    points
}

/// The generator's report on one storm.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) boots: u64,
    pub(crate) requests: u64,
    pub(crate) failures: u64,
    pub(crate) reasons: BTreeMap<Failure, u64>,
    pub(crate) retransmissions: u64,
    #[serde(default)]
    pub(crate) retries: u64,
    pub(crate) wall_us: f64,
    pub(crate) request: Distribution,
    pub(crate) kernel: Distribution,
    pub(crate) boot: Distribution,
    pub(crate) without_agent: Option<WithoutAgent>,
    pub(crate) finished: Vec<(f64, u32)>,
    pub(crate) calls: Calls,
    pub(crate) flood: Option<Flooded>,
}

/// The counts of the flooding guest.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Flooded {
    pub(crate) frames: u64,
    pub(crate) wall_us: f64,
    pub(crate) cpu_us: f64,
}

#[cfg(test)]
mod tests {
    use super::{
        Answer, Body, Expected, Failure, Histogram, Progress, Tally, WithoutAgent, bound, bucket, curve,
    };

    const BODIES: &[u8] = b"....right body....";
    const RIGHT: Expected = Expected { status: 200, body: Body::Exactly { offset: 4, length: 10 } };
    const DONE: Progress = Progress::Done { keep: true };

    fn judged(answer: &str, expected: &Expected, step: usize) -> Progress {
        let mut reader = Answer::default();
        let mut progress = Progress::More;
        for part in answer.as_bytes().chunks(step) {
            assert_eq!(progress, Progress::More, "bytes after the end");
            progress = reader.feed(part, expected, BODIES);
            if matches!(progress, Progress::Wrong(_)) {
                break;
            }
        }
        progress
    }

    #[test]
    fn a_right_answer_is_accepted_however_it_is_split() {
        let answer = "HTTP/1.1 200 OK\r\nServer: x\r\ncontent-LENGTH: 10\r\n\r\nright body";
        for step in 1..=answer.len() {
            assert_eq!(judged(answer, &RIGHT, step), DONE, "{step} bytes at a time");
        }
    }

    #[test]
    fn each_wrong_answer_is_reported_with_its_fault() {
        let ok = |rest: &str| format!("HTTP/1.1 200 OK\r\n{rest}");
        for (answer, fault) in [
            (ok("Content-Length: 10\r\n\r\nwrong body"), Failure::Body),
            (ok("Content-Length: 10\r\n\r\nright bodY"), Failure::Body),
            (ok("Content-Length: 10\r\n\r\nright body and more"), Failure::Length),
            (ok("Content-Length: 9\r\n\r\nright bod"), Failure::Length),
            (ok("Transfer-Encoding: chunked\r\n\r\n"), Failure::Length),
            ("HTTP/1.1 404 Not Found\r\nContent-Length: 10\r\n\r\n".into(), Failure::Status),
            ("HTTP/1.1 OK\r\n\r\n".into(), Failure::Head),
            ("SMTP/1.1 200 OK\r\n\r\n".into(), Failure::Head),
            (ok(&"X: y\r\n".repeat(2_000)), Failure::Head),
        ] {
            assert_eq!(judged(&answer, &RIGHT, 1_460), Progress::Wrong(fault), "{answer:.60}");
        }
    }

    #[test]
    fn an_answer_with_any_bytes_needs_status_and_length() {
        let any = Expected { body: Body::Any, ..RIGHT };
        let ok = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        for (answer, progress) in [
            (format!("{ok}other"), DONE),
            (format!("{ok}othe"), Progress::More),
            (format!("{ok}others"), Progress::Wrong(Failure::Length)),
            (ok.replace("200", "404"), Progress::Wrong(Failure::Status)),
        ] {
            assert_eq!(judged(&answer, &any, 1_460), progress, "{answer}");
        }
    }

    #[test]
    fn the_end_of_a_connection_is_read_from_the_head() {
        for (line, keep) in
            [("HTTP/1.1", true), ("HTTP/1.0", false), ("HTTP/1.1 200 OK\r\nConnection: close", false)]
        {
            let first = if line.contains("200") { line.to_owned() } else { format!("{line} 200 OK") };
            let answer = format!("{first}\r\nContent-Length: 10\r\n\r\nright body");
            assert_eq!(judged(&answer, &RIGHT, 1_460), Progress::Done { keep }, "{line}");
        }
    }

    #[test]
    fn an_answer_without_server_is_the_kernels() {
        for (fields, is_by_kernel) in [("", true), ("SERVER: x\r\n", false)] {
            let mut reader = Answer::default();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n{fields}\r\nright body");
            assert_eq!(reader.feed(answer.as_bytes(), &RIGHT, BODIES), DONE);
            assert_eq!(reader.is_by_kernel(), is_by_kernel, "{fields}");
        }
    }

    #[test]
    fn only_a_published_request_is_missed_and_only_after_the_end_of_the_agent() {
        let mut tally = Tally::default();
        let ask = |tally: &mut Tally| {
            tally.answered(1, true);
            tally.answered(1, false);
            tally.unanswered(true);
            tally.unanswered(false);
        };
        ask(&mut tally);
        assert_eq!(tally.without_agent, None);
        tally.without_agent = Some(WithoutAgent::default());
        ask(&mut tally);
        assert_eq!(tally.without_agent, Some(WithoutAgent { answered: 1, waiting: 1, missed: 1 }));
        assert_eq!((tally.requests, tally.kernel.distribution().count()), (4, 2));
    }

    #[test]
    fn a_token_is_kept_for_the_following_requests() {
        let mut reader = Answer::default();
        let token = Expected { status: 200, body: Body::Token };
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde";
        assert_eq!(reader.feed(answer, &token, &[]), DONE);
        reader.reset();
        assert_eq!(reader.token(), b"abcde");
        let nothing = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(reader.feed(nothing, &token, &[]), Progress::Wrong(Failure::Length));
    }

    #[test]
    fn no_content_needs_no_length() {
        let none = Expected { status: 204, body: Body::Exactly { offset: 0, length: 0 } };
        assert_eq!(judged("HTTP/1.1 204 No Content\r\n\r\n", &none, 1_460), DONE);
    }

    #[test]
    fn the_next_bucket_begins_after_the_bound_of_a_bucket() {
        for n in 0..1_500 {
            assert_eq!(bucket(bound(n)), n);
            assert_eq!(bucket(bound(n) + 1), n + 1);
        }
        for value in [64, 1_000, 123_456_789, u64::from(u32::MAX) * 1_000] {
            let above = bound(bucket(value)) as f64 / value as f64;
            assert!((1.0..1.0 + 1.0 / 32.0).contains(&above), "{value}: {above}");
        }
    }

    #[test]
    fn a_histogram_keeps_every_time_and_the_longest_exactly() {
        let mut histogram = Histogram::default();
        (1..=1_000).for_each(|us| histogram.add(us * 1_000));
        let times = histogram.distribution();
        assert_eq!(times.count(), 1_000);
        assert_eq!(times.max_us, 1_000.0);
        let median = times.quantile(0.5).expect("times");
        assert!((500.0..517.0).contains(&median), "{median}");
    }

    #[test]
    fn a_curve_ends_with_the_last_boot() {
        for boots in [0, 1, 199, 200, 201, 4_000, 4_001] {
            let finished: Vec<u64> = (0..boots).map(|n| n * 1_000).collect();
            let points = curve(&finished);
            assert!(points.len() <= 201, "{}", points.len());
            assert_eq!(points.last().map(|(_, n)| u64::from(*n)).unwrap_or(0), boots);
            assert!(points.is_sorted());
        }
    }
}
