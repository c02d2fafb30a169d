//! Answers of many segments in one frame, which are cut behind the hub.

use metadata_common::addresses::Connection;
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use metadata_datapath::GROUP;
use metadata_datapath::stack::{
    ConnectionAction, Exchange, FramePreview, GuestDevices, LONG_MAX, Long, Service, Stack, StackConfig,
    Transmit,
};
use metadata_user::service::MetadataService;
use smoltcp::wire::TcpControl::{Fin, None as NoControl, None as Plain, Rst};
use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;
use support::checksum::{self, cut};
use support::pattern::{Pattern, bytes, responses, stack};
use support::raw::{Reply, SYN_ACK, Segment};
use support::seed;
use support::wire::{CLIENT_V6, Client, Faults, Habits, SERVICE, Sent, World, at};

const SLOT: u32 = 3;
/// Payload of a full segment over IPv4.
const SEGMENT: u32 = 1_460;
/// The initial window (RFC 6928).
const FIRST_FLIGHT: u32 = 10 * SEGMENT;

/// A stack's configuration in which the devices of these slots take long frames.
fn taking(slots: &[u32]) -> StackConfig {
    let devices = GuestDevices::new(8);
    slots.iter().for_each(|slot| devices.set_takes_long(*slot, true));
    StackConfig { guest_devices: devices, ..StackConfig::default() }
}

/// What a stack sent, oldest first.
#[derive(Debug, Default)]
struct Recorder(Vec<SentLong>);

#[derive(Debug)]
struct SentLong {
    is_long: bool,
    segments: Vec<Reply>,
}

impl SentLong {
    fn bytes(&self) -> u32 {
        self.segments.iter().map(|reply| reply.payload.len() as u32).sum()
    }
}

impl Transmit for Recorder {
    fn send(&mut self, frame: &[u8]) {
        self.0.push(SentLong { is_long: false, segments: vec![Reply::read(frame)] });
    }

    fn send_long(&mut self, frame: &Long<'_>) {
        let segments = cut(frame).iter().map(|frame| Reply::read(frame)).collect();
        self.0.push(SentLong { is_long: true, segments });
    }
}

impl Recorder {
    /// The frames with payload since the last call: whether each is long, and its bytes of payload.
    fn take(&mut self) -> Vec<(bool, u32)> {
        let sent = std::mem::take(&mut self.0);
        sent.iter().map(|sent| (sent.is_long, sent.bytes())).filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// A connection on which the guest has asked for `bytes` bytes.
struct Talk<S: Service> {
    stack: Stack<S>,
    recorder: Recorder,
    now: Duration,
    /// The number of the answer's first byte, and the guest's next number.
    first: u32,
    next: u32,
}

impl Talk<MetadataService<Pattern>> {
    fn asking(bytes: usize) -> Self {
        Self::with(stack(taking(&[SLOT])).0, &format!("GET /bytes/{bytes} HTTP/1.1\r\nHost: x\r\n\r\n"))
    }
}

impl<S: Service> Talk<S> {
    fn with(mut stack: Stack<S>, request: &str) -> Self {
        let (mut recorder, now) = (Recorder::default(), Duration::ZERO);
        stack.receive(at(now), SLOT, &Segment::syn(40_000, 1000).frame(SLOT), &mut recorder);
        let first = recorder.0[0].segments[0].seq.wrapping_add(1);
        recorder.0.clear();
        let ask = Segment::ack(40_000, 1001, first).with(request.as_bytes());
        stack.receive(at(now), SLOT, &ask.frame(SLOT), &mut recorder);
        Self { stack, recorder, now, first, next: 1001 + request.len() as u32 }
    }

    /// Acknowledges the first `bytes` bytes of the answer.
    fn acknowledge(&mut self, bytes: u32) -> Vec<(bool, u32)> {
        let ack = Segment::ack(40_000, self.next, self.first.wrapping_add(bytes)).control(Plain);
        self.stack.receive(at(self.now), SLOT, &ack.frame(SLOT), &mut self.recorder);
        self.recorder.take()
    }

    /// Lets the retransmission timer expire.
    fn time_out(&mut self) -> Vec<(bool, u32)> {
        for _ in 0..100 {
            self.now += Duration::from_millis(100);
            self.stack.step(at(self.now), &mut self.recorder);
            let sent = self.recorder.take();
            if !sent.is_empty() {
                return sent;
            }
        }
        Vec::new()
    }
}

#[test]
fn only_devices_that_take_long_frames_get_them() {
    const BODY: usize = 1 << 20;
    for (slots, most, least) in [(&[SLOT][..], 60, 5), (&[SLOT + 1], 1_000, 700)] {
        let habits = Habits { window: 1 << 20, ..Habits::default() };
        let mut world = World::new(stack(taking(slots)).0, Client::new(SLOT, habits), Faults::NONE, 0);
        let talk =
            world.client.begin(40_000, format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let is_whole = |world: &mut World<_>| world.client.talks[talk].received.len() > BODY;
        assert!(world.run(Duration::from_secs(5), is_whole));
        assert!(responses(&world.client.talks[talk].received, &[])[0].body == bytes(BODY));
        let sent = world.stack.stats().sent;
        assert!(
            (least..=most).contains(&sent),
            "{sent} frames to slot {SLOT}, slots {slots:?} take long ones"
        );
    }
}

#[test]
fn a_long_frame_has_whole_segments_and_ends_an_answer_with_a_short_one() {
    let mut talk = Talk::asking(20_000);
    assert_eq!(talk.recorder.take(), [(true, FIRST_FLIGHT)]);
    let [(is_long, rest)] = talk.acknowledge(FIRST_FLIGHT)[..] else { panic!("one frame") };
    assert!(is_long && rest % SEGMENT != 0 && FIRST_FLIGHT + rest > 20_000, "{rest} bytes");
}

#[test]
fn an_answer_of_one_segment_is_no_long_frame() {
    let mut talk = Talk::asking(1_000);
    assert!(matches!(talk.recorder.take()[..], [(false, _)]));
}

#[test]
fn slow_start_counts_the_bytes_of_a_single_acknowledgement() {
    let mut talk = Talk::asking(1 << 20);
    let mut acknowledged = 0;
    let mut flight = FIRST_FLIGHT;
    assert_eq!(talk.recorder.take(), [(true, flight)]);
    for _ in 0..2 {
        acknowledged += flight;
        let sent = talk.acknowledge(acknowledged);
        let bytes: u32 = sent.iter().map(|(_, bytes)| bytes).sum();
        assert_eq!((bytes, sent.len()), (2 * flight, 1), "{sent:?}");
        flight = bytes;
    }
}

#[test]
fn a_retransmission_has_one_segment_and_new_data_is_long_again() {
    let mut talk = Talk::asking(1 << 20);
    assert_eq!(talk.recorder.take(), [(true, FIRST_FLIGHT)]);
    assert_eq!(talk.time_out(), [(false, SEGMENT)]);
    assert_eq!(talk.stack.stats().timed_out, 1);
    let sent = talk.acknowledge(FIRST_FLIGHT);
    assert!(matches!(sent[..], [(true, bytes)] if bytes >= 2 * SEGMENT), "{sent:?}");
}

#[test]
fn a_device_that_loses_long_frames_is_served_segment_by_segment() {
    let mut talk = Talk::asking(1 << 20);
    assert_eq!(talk.recorder.take(), [(true, FIRST_FLIGHT)]);
    for _ in 0..2 {
        assert!(matches!(talk.time_out()[..], [(false, _)]));
    }
    let mut acknowledged = FIRST_FLIGHT;
    for _ in 0..20 {
        let sent = talk.acknowledge(acknowledged);
        assert!(!sent.is_empty() && sent.iter().all(|(is_long, _)| !is_long), "{sent:?}");
        acknowledged += sent.iter().map(|(_, bytes)| bytes).sum::<u32>();
    }
}

#[test]
fn no_long_frame_exceeds_the_limit_of_a_packet() {
    let mut talk = Talk::asking(4 << 20);
    let (mut acknowledged, mut longest) = (0, 0);
    let mut sent = talk.recorder.take();
    for _ in 0..40 {
        longest = sent.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(longest);
        acknowledged += sent.iter().map(|(_, bytes)| bytes).sum::<u32>();
        // The guest's window is 64 KiB without the window scale option, which `Segment` lacks.
        sent = talk.acknowledge(acknowledged);
    }
    assert!(longest <= LONG_MAX && longest > LONG_MAX - SEGMENT, "{longest} bytes");
}

/// Sends three pieces in turn: one with a hop limit of 1 between two with the usual one.
struct Limited(usize);

impl Service for Limited {
    type Exchange = Self;

    fn listens(&self, _: u32, _: (IpAddr, u16)) -> bool {
        true
    }

    fn open(&mut self, _: Now, _: Connection) -> Self {
        Self(0)
    }
}

impl Exchange for Limited {
    fn receive(&mut self, _: Now, bytes: &[u8]) -> usize {
        bytes.len()
    }

    fn finish(&mut self, _: Now) {}

    fn next(&mut self, _: Now) -> ConnectionAction {
        self.0 += 1;
        let bytes = bytes(4_000).into();
        match self.0 {
            1 | 3 => ConnectionAction::Send(bytes),
            2 => ConnectionAction::SendWithin { bytes, hop_limit: 1 },
            _ => ConnectionAction::Wait { until: None },
        }
    }
}

#[test]
fn the_bytes_of_a_long_frame_share_one_hop_limit() {
    let talk = Talk::with(Stack::new(taking(&[SLOT]), Limited(0)), "x");
    let mut limited = 0;
    for SentLong { segments, .. } in &talk.recorder.0 {
        let limits: Vec<u8> = segments.iter().map(|reply| reply.ttl).collect();
        assert!(limits.iter().all(|limit| *limit == limits[0]), "{limits:?}");
        let bytes: usize = segments.iter().map(|reply| reply.payload.len()).sum();
        limited += if limits[0] == 1 { bytes } else { 0 };
    }
    assert!((4_000..4_000 + 2 * SEGMENT as usize).contains(&limited), "{limited} bytes with a limit of 1");
}

// Reading ahead what a group of frames will touch gives the service its hints and changes nothing.

/// EC2's address over IPv6.
const SERVICE_V6: [u16; 8] = [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254];

type Seen = (Slot, (IpAddr, u16), Vec<u8>);

/// Records what the stack shows it before the frames are processed.
struct SeenRecorder(Rc<RefCell<Vec<Seen>>>);

struct Silent;

impl Exchange for Silent {
    fn receive(&mut self, _: Now, bytes: &[u8]) -> usize {
        bytes.len()
    }

    fn finish(&mut self, _: Now) {}

    fn next(&mut self, _: Now) -> ConnectionAction {
        ConnectionAction::Wait { until: None }
    }
}

impl Service for SeenRecorder {
    type Exchange = Silent;

    fn listens(&self, _: Slot, _: (IpAddr, u16)) -> bool {
        true
    }

    fn open(&mut self, _: Now, _: Connection) -> Silent {
        Silent
    }

    fn read_ahead(&self, glimpses: &[FramePreview<'_>]) {
        let seen = glimpses.iter().map(|seen| (seen.slot, seen.local, seen.payload.to_vec()));
        self.0.borrow_mut().extend(seen);
    }
}

#[test]
fn the_service_sees_slot_destination_and_data_of_segments_that_have_data() {
    let seen = Rc::default();
    let stack = Stack::new(StackConfig::default(), SeenRecorder(Rc::clone(&seen)));
    let v4 = Segment::ack(1, 5, 5).with(b"GET /a");
    let v6 = Segment {
        source: (CLIENT_V6.into(), 2),
        destination: (SERVICE_V6.into(), 8080),
        ..Segment::ack(2, 5, 5).with(b"GET /b")
    };
    let mut tagged = v4.frame(4);
    tagged.splice(12..12, [0x81, 0, 0, 1]);
    let cut = v4.frame(5)[..40].to_vec();
    let frames =
        [v4.frame(1), v6.frame(2), Segment::syn(3, 5).frame(3), tagged, cut, vec![0; 14], Vec::new()];
    let group: Vec<(Slot, &[u8])> = (1..).zip(frames.iter().map(Vec::as_slice)).collect();
    stack.read_ahead(&group);
    let expected =
        [(1, (SERVICE.into(), 80), b"GET /a".to_vec()), (2, (SERVICE_V6.into(), 8080), b"GET /b".to_vec())];
    assert_eq!(*seen.borrow(), expected);
    seen.borrow_mut().clear();
    stack.read_ahead(&group[..1]);
    assert!(seen.borrow().is_empty(), "a single frame is not worth it");
}

/// A guest that sends random segments, and some requests that get an answer.
struct Guest {
    slot: Slot,
    next: u32,
}

impl Guest {
    fn frame(&self, rng: &mut fastrand::Rng) -> Vec<u8> {
        let (port, get) = (rng.u16(1..4), b"GET /bytes/300 HTTP/1.1\r\nHost: x\r\n\r\n");
        let ack = self.next.wrapping_add(rng.u32(0..3));
        let segment = match rng.u8(0..4) {
            0 => Segment::syn(port, 1_000),
            1 => Segment::ack(port, 1_001, self.next).with(get),
            2 => Segment::ack(port, 1_001 + get.len() as u32, ack).with(&get[..rng.usize(0..get.len())]),
            _ => {
                Segment::ack(port, rng.u32(..), ack).control(rng.choice([Fin, Rst, NoControl]).unwrap_or(Fin))
            }
        };
        let mut frame = segment.frame(self.slot);
        match rng.u8(0..8) {
            0 => frame.truncate(rng.usize(0..frame.len())),
            1 => {
                let place = rng.usize(12..frame.len());
                frame[place] ^= rng.u8(..);
                checksum::complete(&mut frame);
            }
            _ => {}
        }
        frame
    }
}

#[test]
fn reading_ahead_changes_no_answer() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let config = StackConfig::default();
    let mut stacks = [(); 2].map(|()| stack(config.clone()).0);
    let mut guests: Vec<Guest> = (0..5).map(|slot| Guest { slot, next: 0 }).collect();
    for round in 0..2_000 {
        let now = at(Duration::from_millis(20 * round));
        let frames: Vec<(Slot, Vec<u8>)> = (0..rng.usize(0..=GROUP))
            .map(|_| {
                let guest = &guests[rng.usize(..guests.len())];
                (guest.slot, guest.frame(&mut rng))
            })
            .collect();
        let group: Vec<(Slot, &[u8])> = frames.iter().map(|(slot, frame)| (*slot, &frame[..])).collect();
        stacks[0].read_ahead(&group);
        let [with, without] = stacks.each_mut().map(|stack| {
            let mut sent = Sent::default();
            group.iter().for_each(|(slot, frame)| stack.receive(now, *slot, frame, &mut sent));
            stack.step(now, &mut sent);
            sent.0
        });
        assert_eq!(with, without, "round {round}");
        for frame in with.iter().filter(|frame| frame[12..14] == [8, 0] && frame[23] == 6) {
            let reply = Reply::read(frame);
            let slot = metadata_common::stamp::slot_of(reply.macs.0).expect("a stamp");
            if reply.flags == SYN_ACK {
                guests[slot as usize].next = reply.seq.wrapping_add(1);
            }
        }
    }
    let [with, without] = stacks.map(|stack| stack.stats());
    assert_eq!(with, without);
    assert!(with.accepted > 100, "some requests are answered: {with:?}");
}
