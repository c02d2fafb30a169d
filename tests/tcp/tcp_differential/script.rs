//! The actions of a guest in one run, which proptest draws and shrinks.

use std::sync::LazyLock;
use std::time::Duration;

use metadata_common::cookie::{CookieCheck, CookieKey, Flow, TcpOptions, check, issue};
use proptest::prelude::*;
use support::client::{CLIENT, SERVICE};
use support::wire::Faults;

use super::guest::SLOT;

pub(super) const KEY: CookieKey = CookieKey([0x1234_5678_9abc_def0, 0x0fed_cba9_8765_4321]);

/// The port of the first lane; each further lane has the next one.
pub(super) const FIRST_PORT: u16 = 40_000;

/// Bytes of the requested bodies: within one segment, within the initial window, and far beyond it.
const BODIES: [usize; 4] = [10, 9_000, 40_000, 70_000];

/// Segment size that guests announce.
pub(super) const SEGMENT: u16 = 1460;

/// The ordinary initial sequence numbers, the same for each lane. A lane also has [`UNLUCKY`] unlucky ones.
const ORDINARY: [u32; 2] = [1_000, u32::MAX - 20];
const UNLUCKY: usize = 4;
/// Numbers searched. About one in 500 is unlucky, so these include enough.
const TRIED: u32 = 1_000_000;

/// Upper bound of the time a frame is in transit: 20 delays and a margin.
const GONE: Duration = Duration::from_millis(5);

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
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
pub(super) struct Plan {
    /// Index of the lane's initial sequence number.
    isn: usize,
    body: usize,
    pub(super) end: End,
    /// Number of sequential requests.
    pub(super) requests: usize,
    /// Whether the guest delays acknowledgements: it acknowledges every other segment, and the last after a delay.
    pub(super) delays: bool,
    /// Whether to reset invalid segments in SYN-SENT, as RFC 9293 §3.10.7.3 requires. Small stacks do not.
    pub(super) resets: bool,
    pause: u64,
}

/// The sequential connections of one port.
pub(super) type Lane = Vec<Plan>;

/// One run.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) lanes: Vec<Lane>,
    pub(super) faults: Faults,
    pub(super) seed: u64,
    /// Number of entries in the table that stack and kernel share.
    pub(super) places: usize,
}

impl Plan {
    pub(super) fn request(&self) -> Vec<u8> {
        let close = if self.end == End::ServiceFirst { "Connection: close\r\n" } else { "" };
        let last = format!("GET /bytes/{} HTTP/1.1\r\nHost: a\r\n{close}\r\n", BODIES[self.body]);
        last.into_bytes()
    }

    pub(super) fn isn(&self, lane: usize) -> u32 {
        match self.isn.checked_sub(ORDINARY.len()) {
            None => ORDINARY[self.isn],
            Some(unlucky) => unlucky_numbers(lane)[unlucky],
        }
    }

    pub(super) fn pause(&self) -> Duration {
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

pub(super) fn any_script() -> impl Strategy<Value = Script> {
    let lanes = prop::collection::vec(prop::collection::vec(any_plan(), 1..4), 1..=LANES);
    let places = prop_oneof![Just(1_usize), Just(2), Just(65_536)];
    (lanes, any_faults(), any::<u64>(), places).prop_map(|(lanes, faults, seed, places)| Script {
        lanes,
        faults,
        seed,
        places,
    })
}
