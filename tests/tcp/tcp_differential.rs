//! A guest receives the same answers from the kernel and the stack together as from the stack alone.
//!
//! Each script of connections from one guest runs twice over a link that loses, duplicates and reorders frames: with
//! and without the code that answers in the kernel. Entries of the shared table collide. Ports and
//! initial sequence numbers are reused. Some numbers are chosen so that an acknowledgement in the middle of an
//! answer looks like the end of a handshake. `PROPTEST_CASES` sets the number of scripts.

use metadata_common::cookie::{CookieCheck, CookieKey, Flow, TcpOptions, check, issue};
use metadata_common::maps::{ALL_SENT, Slot};
use metadata_content::http::{Response, StatusCode};
use metadata_datapath::stack::{AckLedger, NoLedger, Stack, StackConfig};
use metadata_user::service::MetadataService;
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};
use smoltcp::wire::TcpControl;
use std::cell::Cell;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use support::kernel::{Board, Kernel};
use support::pattern::{Pattern, bytes, responses};
use support::raw::{Reply, SYN_ACK, Segment};
use support::wire::{CLIENT, Faults, Link, Rng, SERVICE, Sent, at};

/// Number of scripts if `PROPTEST_CASES` is not set.
const CASES: u32 = 2_000;

fn runner() -> TestRunner {
    let cases = std::env::var_os("PROPTEST_CASES").map_or(CASES, |_| ProptestConfig::default().cases);
    TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
}

/// Asserts that each connection ended as its plan requires, with all its answers.
fn assert_whole(script: &Script, outcomes: &Outcomes) -> Result<(), TestCaseError> {
    for (plans, outcomes) in script.lanes.iter().zip(outcomes) {
        prop_assert_eq!(plans.len(), outcomes.len(), "connections begun");
        for (plan, outcome) in plans.iter().zip(outcomes) {
            let Some(Outcome { received, how }) = outcome else {
                return Err(fail(format!("{plan:?} hangs")));
            };
            let expected =
                if matches!(plan.end, End::Reboot(_) | End::Abort(_)) { How::Left } else { How::Closed };
            prop_assert_eq!(*how, expected, "{:?}", plan);
            prop_assert!(
                expected == How::Left || responses(received, &[]).len() == plan.requests,
                "{:?}",
                plan
            );
        }
    }
    Ok(())
}

/// Status and body of all answers, without their dates.
fn bodies(outcomes: &Outcomes) -> Vec<(u16, Vec<u8>)> {
    let received = outcomes.iter().flatten().flatten().map(|outcome| &outcome.received);
    received
        .flat_map(|received| responses(received, &[]))
        .map(|answer| (answer.status, answer.body))
        .collect()
}

fn fail(reason: String) -> TestCaseError {
    TestCaseError::fail(reason)
}

/// Runs a script with and without the kernel. Returns how many SYNs, acknowledgements, FINs and requests the kernel took.
fn compare(script: &Script, kernel: impl Fn(Board) -> Kernel) -> Result<[u64; 4], TestCaseError> {
    let (alone, left) = World::new(script, NoLedger, None).run();
    assert_whole(script, &alone).map_err(|error| fail(format!("the stack alone: {error}")))?;
    prop_assert_eq!(left, 0, "the stack alone keeps connections");
    let board = Board::new(script.places);
    let mut world = World::new(script, board.clone(), Some(kernel(board.clone())));
    let (both, left) = world.run();
    assert_whole(script, &both).map_err(|error| fail(format!("with the kernel: {error}")))?;
    prop_assert!(bodies(&alone) == bodies(&both), "the guest receives something else with the kernel");
    prop_assert_eq!((left, board.held(), board.entries().len()), (0, 0, 0), "connections are kept");
    Ok(world.kernel.map(|kernel| kernel.taken).unwrap_or_default())
}

#[test]
fn a_guest_receives_the_same_with_and_without_the_kernels_answers() {
    receives_the_same(3, any_script(), |board| Kernel::new(board, KEY));
}

/// A kernel that answers about half of the requests with answers of one segment, so that the stack adopts connections.
fn with_documents(board: Board) -> Kernel {
    let mut kernel = Kernel::new(board, KEY);
    for (body, length) in BODIES.into_iter().enumerate().take(OF_ONE_SEGMENT) {
        let content = bytes(length);
        let response = Response::new(StatusCode(200), Some("application/octet-stream"), &[], content.clone());
        kernel.publish(&Plan { body, ..ordinary() }.request(), response.head(), &content);
    }
    kernel
}

#[test]
fn a_guest_receives_the_same_from_published_documents() {
    // A tap keeps the order of frames. The kernel does not tell a late copy of a SYN and its request from new ones. The
    // entry of an ended connection is free at once: if the last acknowledgement was lost and another connection has the
    // entry, the guest's next FIN gets a reset. So either frames are lost or entries collide. A guest that reboots with the
    // same port and initial number is not served until the entry is idle, if a SYN of another connection with this entry
    // comes between its SYN and its request.
    let scripts = any_script().prop_map(|script| {
        let faults = Faults { reorder: 0, ..script.faults };
        let places = if faults.loss == 0 { script.places } else { ALL_SENT as usize };
        Script { faults, places, ..script }
    });
    receives_the_same(4, scripts, with_documents);
}

#[test]
fn a_guest_that_reboots_and_reuses_its_numbers_is_served_where_the_kernel_has_answered() {
    // Both requests have the same length, and the kernel has no answer to the second one.
    let plan = |isn, body, end| Plan { isn, body, end, resets: false, ..ordinary() };
    let isns = 0..ORDINARY.len() + UNLUCKY;
    let mut answered = 0;
    for isn in isns {
        let lane = vec![plan(isn, 1, End::Reboot(0)), plan(isn, 2, End::HalfCloseLater)];
        let script = Script { lanes: vec![lane], faults: Faults::NONE, seed: 0, places: 1 };
        let [.., requests] =
            compare(&script, with_documents).unwrap_or_else(|error| panic!("{isn}: {error}"));
        answered += requests;
    }
    assert!(answered > 0, "the kernel answered a guest that rebooted");
}

/// Compares, and checks that the kernel had work of the first `kinds` kinds.
fn receives_the_same(kinds: usize, scripts: impl Strategy<Value = Script>, kernel: impl Fn(Board) -> Kernel) {
    let taken = Cell::new([0; 4]);
    let outcome = runner().run(&scripts, |script| {
        let more = compare(&script, &kernel)?;
        let sum = taken.get();
        taken.set(std::array::from_fn(|kind| sum[kind] + more[kind]));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    println!("the kernel took {:?} SYNs, acknowledgements, FINs and requests", taken.get());
    assert!(taken.get()[..kinds].iter().all(|taken| *taken > 100), "the kernel has work: {:?}", taken.get());
}

#[test]
fn the_comparison_detects_a_kernel_that_ignores_held_connections() {
    let outcome = runner().run(&any_script(), |script| {
        let careless = |board| {
            let mut kernel = Kernel::new(board, KEY);
            kernel.ignores_held = true;
            kernel
        };
        compare(&script, careless).map(drop)
    });
    assert!(matches!(outcome, Err(TestError::Fail(..))), "{outcome:?}");
}

// The actions of a guest in one run, which proptest draws and shrinks.

const KEY: CookieKey = CookieKey([0x1234_5678_9abc_def0, 0x0fed_cba9_8765_4321]);

/// The port of the first lane; each further lane has the next one.
const FIRST_PORT: u16 = 40_000;

/// Bytes of the requested bodies: within one segment, within the initial window, and far beyond it.
const BODIES: [usize; 5] = [10, 1_000, 9_000, 40_000, 70_000];

/// The answer of the first has room in the frame of its request, that of the second has not.
const OF_ONE_SEGMENT: usize = 2;

/// Segment size that guests announce.
const SEGMENT: u16 = 1460;

/// The ordinary initial sequence numbers, the same for each lane. A lane also has [`UNLUCKY`] unlucky ones.
const ORDINARY: [u32; 2] = [1_000, u32::MAX - 20];
const UNLUCKY: usize = 4;
/// Numbers searched. About one in 500 is unlucky, so these include enough.
const TRIED: u32 = 1_000_000;

/// Upper bound of the time a frame is in transit: 20 delays and a margin.
const GONE: Duration = Duration::from_millis(5);

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The guest closes once it has the answer.
    GuestFirst,
    /// The guest half-closes with its request and reads to the end.
    HalfClose,
    /// The guest half-closes some time after it acknowledged the answer, and reads to the end.
    HalfCloseLater,
    /// The request asks the service to close.
    ServiceFirst,
    /// The guest reboots after this many segments with payload.
    Reboot(usize),
    /// The guest resets the connection after this many segments with payload.
    Abort(usize),
}

/// One connection.
#[derive(Clone, Debug)]
struct Plan {
    /// Index of the lane's initial sequence number.
    isn: usize,
    body: usize,
    end: End,
    /// Number of sequential requests.
    requests: usize,
    /// Whether the guest delays acknowledgements: it acknowledges every other segment, and the last after a delay.
    delays: bool,
    /// Whether to reset invalid segments in SYN-SENT, as RFC 9293 §3.10.7.3 requires. Small stacks do not.
    resets: bool,
    pause: u64,
}

/// The sequential connections of one port.
type Lane = Vec<Plan>;

/// One run.
#[derive(Clone, Debug)]
struct Script {
    lanes: Vec<Lane>,
    faults: Faults,
    seed: u64,
    /// Number of entries in the table that stack and kernel share.
    places: usize,
}

impl Plan {
    fn request(&self) -> Vec<u8> {
        let close = if self.end == End::ServiceFirst { "Connection: close\r\n" } else { "" };
        let last = format!("GET /bytes/{} HTTP/1.1\r\nHost: a\r\n{close}\r\n", BODIES[self.body]);
        last.into_bytes()
    }

    fn isn(&self, lane: usize) -> u32 {
        match self.isn.checked_sub(ORDINARY.len()) {
            None => ORDINARY[self.isn],
            Some(unlucky) => unlucky_numbers(lane)[unlucky],
        }
    }

    fn pause(&self) -> Duration {
        GONE + Duration::from_millis(self.pause)
    }
}

/// Initial sequence numbers for which an acknowledgement in the middle of the longest answer looks like the end of a
/// handshake, because its 16-bit mark matches.
fn unlucky_numbers(lane: usize) -> &'static [u32] {
    static FOUND: LazyLock<Vec<Vec<u32>>> = LazyLock::new(|| (0..LANES).map(search).collect());
    &FOUND[lane]
}

fn search(lane: usize) -> Vec<u32> {
    let [high, low] = (FIRST_PORT + lane as u16).to_be_bytes();
    let flow = Flow::v4(&KEY, SLOT, CLIENT, SERVICE, [high, low, 0, 80]);
    let said = TcpOptions { segment: SEGMENT, scale: None };
    let longest = Plan { body: BODIES.len() - 1, ..ordinary() };
    let request = longest.request().len() as u32;
    let segments = BODIES[longest.body] as u32 / u32::from(SEGMENT);
    let is_unlucky = |isn: &u32| {
        let first = issue(&KEY, flow, *isn, said).wrapping_add(1);
        let seq = isn.wrapping_add(1 + request);
        (1..segments).any(|n| {
            let ack = first.wrapping_add(n * u32::from(SEGMENT));
            matches!(check(&KEY, flow, seq, ack), CookieCheck::First(_))
        })
    };
    let found: Vec<u32> =
        (0..TRIED).map(|n| n.wrapping_mul(0x9e37_79b1)).filter(is_unlucky).take(UNLUCKY).collect();
    assert_eq!(found.len(), UNLUCKY, "lane {lane}");
    found
}

fn ordinary() -> Plan {
    Plan { isn: 0, body: 0, end: End::GuestFirst, requests: 1, delays: false, resets: true, pause: 0 }
}

const LANES: usize = 3;

fn any_end() -> impl Strategy<Value = End> {
    prop_oneof![
        3 => Just(End::GuestFirst),
        3 => Just(End::HalfClose),
        3 => Just(End::HalfCloseLater),
        2 => Just(End::ServiceFirst),
        2 => (0..40_usize).prop_map(End::Reboot),
        1 => (0..40_usize).prop_map(End::Abort),
    ]
}

fn any_plan() -> impl Strategy<Value = Plan> {
    let isn = 0..ORDINARY.len() + UNLUCKY;
    let pause = prop_oneof![Just(0), Just(300), Just(1_500)];
    let words = (any_end(), 1..3_usize, any::<bool>(), any::<bool>(), pause);
    (isn, 0..BODIES.len(), words).prop_map(|(isn, body, (end, requests, delays, resets, pause))| {
        let requests = if matches!(end, End::ServiceFirst | End::HalfClose) { 1 } else { requests };
        Plan { isn, body, end, requests, delays, resets, pause }
    })
}

fn any_faults() -> impl Strategy<Value = Faults> {
    let bad = (0..8_u64, 0..10_u64, 0..20_u64);
    let bad = bad.prop_map(|(loss, duplicate, reorder)| Faults { loss, duplicate, reorder, ..Faults::NONE });
    prop_oneof![Just(Faults::NONE), bad]
}

fn any_script() -> impl Strategy<Value = Script> {
    let lanes = prop::collection::vec(prop::collection::vec(any_plan(), 1..4), 1..=LANES);
    let places = prop_oneof![Just(1_usize), Just(2), Just(65_536)];
    (lanes, any_faults(), any::<u64>(), places).prop_map(|(lanes, faults, seed, places)| Script {
        lanes,
        faults,
        seed,
        places,
    })
}

// A minimal TCP for a guest.
//
// It has one connection at a time per port, and keeps no segments that arrive out of order. It retransmits after
// 200 ms, and doubles this time with each retransmission (RFC 6298).

const SLOT: Slot = 7;

const RTO: Duration = Duration::from_millis(200);
const RTO_MAX: Duration = Duration::from_secs(2);
const WINDOW: u16 = u16::MAX;
const DELAYED_ACK: Duration = Duration::from_millis(40);
/// Time from the end of an answer to the guest's FIN. The stack has not yet read the kernel's table by then.
const LATER: Duration = Duration::from_millis(100);

/// The outcome of a connection, as the guest's program sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome {
    /// The bytes received. Empty if the guest abandoned the connection, because their number is then random.
    received: Vec<u8>,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Both sides have sent a FIN, and the service has acknowledged the guest's.
    Closed,
    /// The service has reset the connection.
    Reset,
    /// The guest has abandoned the connection.
    Left,
}

/// One connection.
struct Talk {
    plan: Plan,
    port: u16,
    /// The guest's sequence numbers: first unacknowledged, next to send, and next to queue.
    una: u32,
    nxt: u32,
    end: u32,
    /// The sequence number of the first byte to send, and the bytes.
    first: u32,
    bytes: Vec<u8>,
    /// Whether a FIN follows the bytes.
    closing: bool,
    /// The next expected sequence number; `None` before the service's SYN.
    rcv: Option<u32>,
    received: Vec<u8>,
    /// Number of answers with a complete head, and the offset at which the last of them ends.
    answers: (usize, usize),
    segments: usize,
    peer_closed: bool,
    timer: Option<Duration>,
    backoff: u32,
    ack_at: Option<Duration>,
    close_at: Option<Duration>,
    how: Option<How>,
}

impl Talk {
    fn begin(plan: Plan, port: u16, isn: u32, now: Duration) -> Self {
        let mut talk = Self {
            port,
            una: isn,
            nxt: isn,
            end: isn.wrapping_add(1),
            first: isn.wrapping_add(1),
            bytes: Vec::new(),
            closing: false,
            rcv: None,
            received: Vec::new(),
            answers: (0, 0),
            segments: 0,
            peer_closed: false,
            timer: Some(now),
            backoff: 0,
            ack_at: None,
            close_at: None,
            how: None,
            plan,
        };
        talk.ask();
        if talk.plan.end == End::HalfClose {
            talk.close();
        }
        talk
    }

    /// `None` while the connection is open.
    fn outcome(&self) -> Option<Outcome> {
        let received = |how| if how == How::Left { Vec::new() } else { self.received.clone() };
        self.how.map(|how| Outcome { received: received(how), how })
    }

    fn wake_at(&self) -> Option<Duration> {
        [self.timer, self.ack_at, self.close_at].into_iter().flatten().min()
    }

    fn ask(&mut self) {
        self.bytes.extend(self.plan.request());
        self.end = self.first.wrapping_add(self.bytes.len() as u32);
    }

    fn close(&mut self) {
        if !self.closing {
            self.closing = true;
            self.end = self.end.wrapping_add(1);
        }
    }

    /// Runs the timers that are due.
    fn step(&mut self, now: Duration, out: &mut Vec<Segment>) {
        if self.timer.is_some_and(|timer| timer <= now) {
            self.timer = None;
            if self.nxt != self.una {
                self.backoff += 1;
                self.nxt = self.una;
            }
        }
        if self.close_at.is_some_and(|at| at <= now) {
            self.close_at = None;
            self.close();
        }
        self.send(now, out);
        if self.ack_at.is_some_and(|at| at <= now) {
            self.acknowledge(out);
        }
    }

    fn segment(&self, seq: u32) -> Segment {
        Segment { window: WINDOW, ..Segment::ack(self.port, seq, self.rcv.unwrap_or(0)) }
    }

    fn acknowledge(&mut self, out: &mut Vec<Segment>) {
        self.ack_at = None;
        out.push(self.segment(self.nxt));
    }

    /// Sends everything that is queued: the SYN, or the bytes and the FIN.
    fn send(&mut self, now: Duration, out: &mut Vec<Segment>) {
        let Some(_) = self.rcv else {
            if self.nxt == self.una && self.how.is_none() {
                out.push(Segment { mss: Some(SEGMENT), ..Segment::syn(self.port, self.una) });
                self.nxt = self.first;
                self.arm(now);
            }
            return;
        };
        if self.nxt == self.end {
            return;
        }
        let from = self.nxt.wrapping_sub(self.first) as usize;
        let mut segment = self.segment(self.nxt).with(self.bytes.get(from..).unwrap_or_default());
        if self.closing {
            segment = segment.control(TcpControl::Fin);
        }
        self.ack_at = None;
        out.push(segment);
        self.nxt = self.end;
        self.arm(now);
    }

    fn arm(&mut self, now: Duration) {
        self.timer = Some(now + (RTO * 2_u32.pow(self.backoff.min(6))).min(RTO_MAX));
    }

    /// Processes a segment.
    fn arrive(&mut self, now: Duration, reply: &Reply, out: &mut Vec<Segment>) {
        let Some(rcv) = self.rcv else { return self.arrive_in_syn_sent(now, reply, out) };
        let (syn, _, fin, rst) = reply.flags;
        if rst {
            if reply.seq == rcv && self.how.is_none() {
                self.how = Some(How::Reset);
                (self.timer, self.ack_at, self.close_at) = (None, None, None);
            }
            return;
        }
        match (self.how, self.plan.end) {
            (Some(How::Left), End::Reboot(_)) | (Some(How::Reset), _) => return,
            (Some(How::Left), _) => return out.push(self.segment(reply.ack).control(TcpControl::Rst)),
            _ if syn => return self.acknowledge(out),
            _ => {}
        }
        let length = reply.payload.len() as u32 + u32::from(fin);
        let ends_behind = before(rcv, reply.seq.wrapping_add(length));
        let ahead = reply.seq.wrapping_sub(rcv);
        // RFC 9293 §3.10.7.4: a segment outside the window is ignored, including its acknowledgement.
        if ahead >= WINDOW.into() && !(before(reply.seq, rcv) && ends_behind) {
            if length > 0 {
                self.acknowledge(out);
            }
            return;
        }
        let acked = reply.ack.wrapping_sub(self.una);
        if acked > 0 && acked <= self.end.wrapping_sub(self.una) {
            self.una = reply.ack;
            self.nxt = if before(self.nxt, self.una) { self.una } else { self.nxt };
            self.backoff = 0;
            self.timer = None;
            if self.una != self.nxt {
                self.arm(now);
            }
        }
        if !reply.payload.is_empty() || fin {
            self.take(now, reply, rcv, out);
        }
        self.decide(now, out);
        self.send(now, out);
    }

    fn arrive_in_syn_sent(&mut self, now: Duration, reply: &Reply, out: &mut Vec<Segment>) {
        if reply.ack != self.first {
            if self.plan.resets && !reply.flags.3 {
                out.push(
                    Segment { ack: None, ..Segment::ack(self.port, reply.ack, 0) }.control(TcpControl::Rst),
                );
            }
        } else if reply.flags == SYN_ACK {
            self.rcv = Some(reply.seq.wrapping_add(1));
            self.una = self.first;
            (self.timer, self.backoff) = (None, 0);
            self.acknowledge(out);
            self.send(now, out);
        } else if reply.flags.3 {
            self.how = Some(How::Reset);
            self.timer = None;
        }
    }

    /// Accepts payload and FIN with the expected number, and acknowledges them.
    fn take(&mut self, now: Duration, reply: &Reply, rcv: u32, out: &mut Vec<Segment>) {
        let known = rcv.wrapping_sub(reply.seq) as usize;
        let news = reply.payload.get(known..).filter(|news| !news.is_empty() || reply.flags.2);
        let Some(news) = news.filter(|_| !self.peer_closed) else { return self.acknowledge(out) };
        self.segments += 1;
        self.received.extend_from_slice(news);
        self.peer_closed = reply.flags.2;
        self.rcv = Some(rcv.wrapping_add(news.len() as u32 + u32::from(self.peer_closed)));
        if self.plan.delays && self.ack_at.is_none() && !self.peer_closed {
            self.ack_at = Some(now + DELAYED_ACK);
        } else {
            self.acknowledge(out);
        }
    }

    /// Runs the next step of the guest's program.
    fn decide(&mut self, now: Duration, out: &mut Vec<Segment>) {
        match self.plan.end {
            End::Reboot(after) if self.segments >= after => return self.leave(),
            End::Abort(after) if self.segments >= after => {
                out.push(self.segment(self.nxt).control(TcpControl::Rst));
                return self.leave();
            }
            _ => {}
        }
        if self.has_answers() && self.plan.requests > self.answers.0 {
            return self.ask();
        }
        if self.peer_closed || (self.has_answers() && self.plan.end != End::ServiceFirst) {
            match self.plan.end {
                End::Reboot(_) | End::Abort(_) => return self.leave(),
                End::HalfCloseLater if !self.peer_closed => {
                    self.close_at = self.close_at.or(Some(now + LATER)).filter(|_| !self.closing);
                }
                _ => self.close(),
            }
        }
        if self.peer_closed && self.una == self.end {
            self.how = Some(How::Closed);
        }
    }

    fn leave(&mut self) {
        self.how = Some(How::Left);
        (self.timer, self.ack_at, self.close_at) = (None, None, None);
    }

    /// Whether all requests sent have complete answers.
    fn has_answers(&mut self) -> bool {
        loop {
            let (count, end) = self.answers;
            if self.received.len() < end {
                return false;
            }
            if count == self.sent_requests() {
                return true;
            }
            let rest = &self.received[end..];
            let Some(head) = rest.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
            let text = String::from_utf8_lossy(&rest[..head]);
            let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or(0);
            self.answers = (count + 1, end + head + 4 + length);
        }
    }

    fn sent_requests(&self) -> usize {
        self.bytes.len() / self.plan.request().len()
    }
}

fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

// Runs a script against a stack, with or without the kernel's answers in front of it.

/// Time for all connections of a script, including retransmissions.
const LIMIT: Duration = Duration::from_secs(300);
/// Time after which the stack has freed all state of a silent guest: it stops retransmitting and idle state expires.
const SETTLED: Duration = Duration::from_secs(300);
/// Maximum number of turns at one instant. More turns mean an endless loop.
const TURNS_PER_INSTANT: usize = 10_000;

fn config() -> StackConfig {
    StackConfig { cookie_key: KEY, ..StackConfig::default() }
}

/// The outcome of every connection, by lane; `None` for the first one that did not end in time and all after it.
type Outcomes = Vec<Vec<Option<Outcome>>>;

/// A port of the guest and its remaining connections.
struct RunningLane {
    number: usize,
    plans: std::vec::IntoIter<Plan>,
    talk: Option<Talk>,
    begins: Option<Duration>,
    next: Option<Plan>,
    outcomes: Vec<Option<Outcome>>,
}

impl RunningLane {
    fn port(&self) -> u16 {
        FIRST_PORT + self.number as u16
    }

    fn is_over(&self) -> bool {
        self.next.is_none() && self.outcomes.last().is_none_or(Option::is_some)
    }

    /// Records how the last connection ended, and begins the next one when it is due.
    fn step(&mut self, now: Duration, out: &mut Vec<Segment>) {
        if let Some(talk) = &mut self.talk {
            talk.step(now, out);
            if let Some(last) = self.outcomes.last_mut().filter(|last| last.is_none()) {
                *last = talk.outcome();
                if last.is_some() {
                    self.next = self.plans.next();
                    self.begins = self.next.as_ref().map(|plan| now + plan.pause());
                }
            }
        }
        if self.begins.is_some_and(|begins| begins <= now) {
            self.begins = None;
            if let Some(plan) = self.next.take() {
                let isn = plan.isn(self.number);
                let mut talk = Talk::begin(plan, self.port(), isn, now);
                talk.step(now, out);
                self.talk = Some(talk);
                self.outcomes.push(None);
            }
        }
    }

    fn wake_at(&self) -> Option<Duration> {
        let talk = self.talk.as_ref().and_then(Talk::wake_at);
        [talk, self.begins].into_iter().flatten().min()
    }
}

/// One guest, one stack, and the link between them.
struct World<L: AckLedger> {
    stack: Stack<MetadataService<Pattern>, L>,
    kernel: Option<Kernel>,
    lanes: Vec<RunningLane>,
    up: Link,
    down: Link,
    now: Duration,
}

impl<L: AckLedger> World<L> {
    fn new(script: &Script, ledger: L, kernel: Option<Kernel>) -> Self {
        let service = MetadataService::new(Arc::new(Pattern::default()));
        let mut rng = Rng::exactly(script.seed);
        let lanes = script.lanes.iter().enumerate().map(|(number, plans)| {
            let mut plans = plans.clone().into_iter();
            let next = plans.next();
            let begins = Some(Duration::ZERO);
            RunningLane { number, plans, talk: None, begins, next, outcomes: Vec::new() }
        });
        Self {
            stack: Stack::with_ledger(config(), service, ledger),
            kernel,
            lanes: lanes.collect(),
            up: Link::new(script.faults, rng.fork()),
            down: Link::new(script.faults, rng.fork()),
            now: Duration::ZERO,
        }
    }

    /// Runs the script and waits until the stack has settled. Returns the outcomes and the connections still held.
    fn run(&mut self) -> (Outcomes, u64) {
        self.until(LIMIT, |world| world.lanes.iter().all(RunningLane::is_over));
        let outcomes = self.lanes.iter().map(|lane| lane.outcomes.clone()).collect();
        self.until(self.now + SETTLED, |_| false);
        (outcomes, self.stack.stats().connections)
    }

    fn until(&mut self, end: Duration, done: impl Fn(&Self) -> bool) {
        let mut turns = 0;
        while !done(self) {
            let wake = self.turn();
            let lanes = self.lanes.iter().filter_map(RunningLane::wake_at);
            let next = lanes.chain(self.up.next_at()).chain(self.down.next_at()).chain(wake).min();
            match next.filter(|next| *next <= end) {
                Some(next) if next > self.now => (self.now, turns) = (next, 0),
                Some(_) => turns += 1,
                None => return self.now = end,
            }
            assert!(turns < TURNS_PER_INSTANT, "no progress at {:?}", self.now);
        }
    }

    /// Processes everything due at this instant. Returns when the stack must be called again.
    fn turn(&mut self) -> Option<Duration> {
        let mut said = Vec::new();
        while let Some(frame) = self.down.pop(self.now) {
            let reply = Reply::read(&frame);
            let lane = self.lanes.iter_mut().find(|lane| lane.port() == reply.ports.1);
            if let Some(talk) = lane.and_then(|lane| lane.talk.as_mut()) {
                talk.arrive(self.now, &reply, &mut said);
            }
        }
        self.lanes.iter_mut().for_each(|lane| lane.step(self.now, &mut said));
        said.iter().for_each(|segment| self.up.push(self.now, &segment.frame(SLOT)));
        let mut sent = Sent::default();
        while let Some(frame) = self.up.pop(self.now) {
            if !self.kernel.as_mut().is_some_and(|kernel| kernel.takes(SLOT, &frame, &mut sent)) {
                self.stack.receive(at(self.now), SLOT, &frame, &mut sent);
            }
        }
        let wake = self.stack.step(at(self.now), &mut sent);
        sent.0.iter().for_each(|frame| self.down.push(self.now, frame));
        wake
    }
}
