//! Laws of the path from the wire through the rings and the link into the stack, for every sequence of frames.
//!
//! The fuzz target and the test that replays its corpus share this file. An input is a sequence of actions: one
//! byte selects the action, one the guest, and two give a number:
//!
//! | low three bits | action |
//! |---|---|
//! | 0, 1 | deliver a frame of the next bytes, as many as the number says. Bit 3: its source is no stamp. Bit 4: correct its checksums. Bit 5: make it too long for a chunk |
//! | 2 | deliver a SYN; the number selects the port |
//! | 3 | deliver a segment that follows what the guest last received: the high five bits are its flags, the number selects its payload |
//! | 4 | receive at most `number` frames |
//! | 5 | advance time by `number` units of 16 ms |
//! | 6 | forget or wake the slot |
//! | 7 | deliver a descriptor the kernel must not send |
#![cfg_attr(not(test), no_main)]

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::Duration;

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::stamp::{slot_of, stamp};
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::afxdp::model::{FrameFate, ModelRig};
use metadata_datapath::link::{FrameSource, HEADER_LEN, LinkReceiver, MAX_FRAME};
use metadata_datapath::stack::{Stack, StackConfig, StackStats};
use metadata_user::service::MetadataService;
use smoltcp::wire::TcpControl;
use support::checksum;
use support::pattern::{self, Pattern};
use support::raw::{Reply, Segment};
use support::wire::{Sent, at};

/// Number of guests; the stack has room for one fewer.
const GUESTS: u32 = 6;
const CHUNKS: u32 = 8;
const CHUNK: u32 = 2048;
const RX_RING: u32 = 4;
/// Ring cursors start near the wrap.
const START: u32 = u32::MAX - 9;
/// Maximum number of actions in one input.
const ACTIONS: usize = 512;
/// Maximum number of the stack's turns at one virtual time.
const TURNS: usize = 64;
const REQUESTS: [&[u8]; 6] = [
    b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /bytes/9000 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /close HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /none HTTP/1.1\r\nHost: x\r\n\r\nGET /echo HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET ",
    b"",
];
/// Descriptors the kernel must never send: beyond the region, at the highest address, longer than a chunk.
const BAD_DESCRIPTORS: [(u64, u32); 3] = [((CHUNKS * CHUNK) as u64, 60), (u64::MAX, 60), (1 << 40, 4096)];

/// The ring model as a source of frames.
struct Source {
    rig: Rc<RefCell<ModelRig>>,
    /// The trait needs a descriptor; nothing waits on it.
    descriptor: std::fs::File,
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl FrameSource for Source {
    fn receive(&mut self, max: usize, f: impl FnMut(&[&[u8]])) -> usize {
        self.rig.borrow_mut().receive(max, f)
    }

    fn stats(&self) -> Option<SocketStats> {
        None
    }
}

/// A guest's state of its last connection.
#[derive(Clone, Copy, Default)]
struct Flow {
    port: u16,
    ours: u32,
    theirs: u32,
    /// True once the stack has received a frame from the guest, so that it may send to it.
    known: bool,
}

/// Everything between the wire and the service.
struct Scene {
    rig: Rc<RefCell<ModelRig>>,
    link: LinkReceiver<Source>,
    stack: Stack<MetadataService<Pattern>>,
    config: StackConfig,
    now: Duration,
    flows: [Flow; GUESTS as usize],
    /// Frames the kernel queued, descriptors it must not send, and frames handed to the stack.
    queued: u64,
    bad: u64,
    handed: u64,
}

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let mut scene = Scene::new();
    let mut rest = input;
    for _ in 0..ACTIONS {
        let Some((&[action, who, high, low], after)) = rest.split_first_chunk() else { break };
        rest = after;
        let number = u16::from_be_bytes([high, low]);
        let slot = Slot::from(who) % GUESTS;
        match action & 7 {
            0 | 1 => {
                let (bytes, after) = rest.split_at(rest.len().min(number.into()));
                rest = after;
                scene.frame(action, slot, bytes);
            }
            2 => scene.syn(slot, number),
            3 => scene.segment(action >> 3, slot, number),
            4 => scene.receive(usize::from(low)),
            5 => scene.pass(Duration::from_millis(16) * u32::from(number)),
            6 => scene.forget_or_wake(slot, low & 1 == 0),
            _ => {
                let (addr, len) = BAD_DESCRIPTORS[usize::from(low) % BAD_DESCRIPTORS.len()];
                scene.bad += u64::from(scene.rig.borrow_mut().deliver_descriptor(addr, len));
            }
        }
        scene.assert_invariants();
    }
    scene.end();
}

impl Scene {
    fn new() -> Self {
        let config = StackConfig {
            slots: GUESTS - 1,
            ports: 3,
            connections: 4,
            connections_per_port: 2,
            ..StackConfig::default()
        };
        let rig = Rc::new(RefCell::new(ModelRig::new(CHUNKS, CHUNK, RX_RING, START)));
        let descriptor = std::fs::File::open("/dev/null").expect("a descriptor");
        Self {
            link: LinkReceiver::new(Source { rig: Rc::clone(&rig), descriptor }),
            rig,
            stack: pattern::stack(config.clone()).0,
            config,
            now: Duration::ZERO,
            flows: Default::default(),
            queued: 0,
            bad: 0,
            handed: 0,
        }
    }

    fn deliver(&mut self, frame: &[u8]) {
        let fate = self.rig.borrow_mut().deliver(frame);
        let [fill, list, waiting, _] = self.rig.borrow().places();
        match fate {
            FrameFate::Queued => self.queued += 1,
            FrameFate::TooLong => assert!(frame.len() > (CHUNK / 2) as usize, "{} bytes", frame.len()),
            FrameFate::NoChunk => assert_eq!((fill, list), (0, 0)),
            FrameFate::RingFull => assert_eq!(waiting, RX_RING as usize),
        }
    }

    /// Delivers a frame of arbitrary bytes.
    fn frame(&mut self, how: u8, slot: Slot, bytes: &[u8]) {
        let mut frame = Mac::SERVICE.0.to_vec();
        frame.extend(if how & 8 == 0 { stamp(slot).0 } else { [0x52, 0x54, 0, 1, 2, slot as u8] });
        frame.extend(bytes);
        if how & 16 != 0 {
            complete(&mut frame);
        }
        if how & 32 != 0 {
            frame.resize(CHUNK as usize, 0);
        }
        if how & 64 != 0 {
            frame.drain(..frame.len().min(usize::from(how >> 7) * 7 + 6));
        }
        self.deliver(&frame);
    }

    fn syn(&mut self, slot: Slot, number: u16) {
        let port = number % 4 + 1;
        let ours = u32::from(number) << 16;
        self.flows[slot as usize].port = port;
        self.deliver(&Segment::syn(port, ours).frame(slot));
    }

    fn segment(&mut self, flags: u8, slot: Slot, number: u16) {
        let Flow { port, ours, theirs, .. } = self.flows[slot as usize];
        let control = match flags & 3 {
            0 | 1 => TcpControl::None,
            2 => TcpControl::Fin,
            _ => TcpControl::Rst,
        };
        let payload = REQUESTS[usize::from(number) % REQUESTS.len()];
        // The sequence number is the expected number, or slightly lower or higher.
        let off = if flags & 4 != 0 { u32::from(number >> 4) } else { 0 };
        let seq = if flags & 8 != 0 { ours.wrapping_sub(off) } else { ours.wrapping_add(off) };
        let window = if flags & 16 != 0 { 0 } else { 4_000 };
        let segment = Segment { window, ..Segment::ack(port, seq, theirs).control(control).with(payload) };
        self.deliver(&segment.frame(slot));
    }

    /// Hands frames to the stack, as a worker does.
    fn receive(&mut self, most: usize) {
        let now = at(self.now);
        let (stack, flows, handed) = (&mut self.stack, &mut self.flows, &mut self.handed);
        let mut sent = Sent::default();
        self.link.receive(most, |group| {
            stack.read_ahead(group);
            for (slot, frame) in group {
                *handed += 1;
                let before = stack.stats();
                let first = sent.0.len();
                stack.receive(now, *slot, frame, &mut sent);
                assert_counted_once(&before, &stack.stats());
                if let Some(flow) = flows.get_mut(*slot as usize) {
                    flow.known = true;
                }
                sent.0[first..].iter().for_each(|frame| check_sent(flows, frame));
            }
        });
        self.step();
    }

    /// Runs the timers that are due, and asserts that they make progress.
    fn step(&mut self) -> Option<Duration> {
        let mut sent = Sent::default();
        for _ in 0..TURNS {
            match self.stack.step(at(self.now), &mut sent) {
                Some(next) if next <= self.now => {}
                next => {
                    sent.0.iter().for_each(|frame| check_sent(&mut self.flows, frame));
                    return next;
                }
            }
        }
        panic!("after {TURNS} turns something is still due at {:?}", self.now);
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(next) = self.step().filter(|next| *next <= end) {
            assert!(next > self.now, "time does not advance");
            self.now = next;
        }
        self.now = end;
        self.step();
    }

    fn forget_or_wake(&mut self, slot: Slot, forget: bool) {
        if slot >= self.config.slots {
            return;
        }
        if forget {
            self.stack.forget(slot);
            return;
        }
        let mut sent = Sent::default();
        self.stack.wake(at(self.now), slot, &mut sent);
        sent.0.iter().for_each(|frame| check_sent(&mut self.flows, frame));
    }

    /// Asserts what holds between two actions.
    fn assert_invariants(&self) {
        let rig = self.rig.borrow();
        let (lent, _, bad) = rig.received();
        // A bad descriptor occupies a ring entry and no chunk.
        let [fill, list, waiting, pool] = rig.places();
        let waiting_bad = (self.bad - bad) as usize;
        assert_eq!(fill + list + waiting - waiting_bad + pool, CHUNKS as usize, "a chunk is lost or doubled");
        assert_eq!(self.queued, lent + (waiting - waiting_bad) as u64, "a frame is lost or doubled");
        let refused = self.link.stats();
        assert_eq!(lent, self.handed + refused.runt + refused.unstamped + refused.slot_out_of_range);
        let stats = self.stack.stats();
        assert_eq!(stats.received, self.handed);
        assert_eq!(stats.faults, 0, "an internal fault");
        assert!(stats.connections <= self.config.connections as u64, "{stats:?}");
        assert!(stats.ports <= self.config.ports as u64, "{stats:?}");
    }

    /// Asserts that nothing remains once the wire is silent.
    fn end(&mut self) {
        while self.rig.borrow().places()[2] > 0 {
            self.receive(usize::MAX);
        }
        self.assert_invariants();
        self.pass(Duration::from_secs(1_000));
        let stats = self.stack.stats();
        assert_eq!((stats.connections, stats.ports, self.stack.time_waits()), (0, 0, 0), "{stats:?}");
        self.rig.borrow().assert_conserved();
    }
}

/// Asserts that a frame increments at most one of these counters.
fn assert_counted_once(before: &StackStats, after: &StackStats) {
    let fates = |stats: &StackStats| {
        [
            stats.arp_answered,
            stats.neighbours_answered,
            stats.echoes_answered,
            stats.dropped_malformed,
            stats.dropped_checksum,
            stats.dropped_address,
            stats.dropped_fragment,
            stats.dropped_protocol,
            stats.dropped_slot,
            stats.handshakes,
            stats.accepted,
            stats.dropped_early,
            stats.unmatched,
            stats.refused_port_connections,
            stats.refused_connections,
            stats.refused_ports,
        ]
    };
    let more = fates(after).iter().sum::<u64>() - fates(before).iter().sum::<u64>();
    assert!(more <= 1, "one frame is counted {more} times: {before:?}, then {after:?}");
    assert_eq!(after.received, before.received + 1);
}

/// Asserts that a sent frame fits the guest's MTU and goes to a guest that has sent something.
fn check_sent(flows: &mut [Flow], frame: &[u8]) {
    assert!((HEADER_LEN..=MAX_FRAME).contains(&frame.len()), "{} bytes", frame.len());
    let to = Mac(frame[..6].try_into().expect("six bytes"));
    let flow = slot_of(to).and_then(|slot| flows.get_mut(slot as usize));
    let flow = flow.filter(|flow| flow.known).unwrap_or_else(|| panic!("a frame for {to}"));
    if frame[12..14] != [8, 0] || frame[23] != 6 {
        return;
    }
    let reply = Reply::read(frame);
    if reply.ports.1 == flow.port && !reply.flags.3 {
        let length = reply.payload.len() as u32 + u32::from(reply.flags.0) + u32::from(reply.flags.2);
        (flow.ours, flow.theirs) = (reply.ack, reply.seq.wrapping_add(length));
    }
}

/// Corrects the checksums of an IPv4 header and of the segment or message behind it.
fn complete(frame: &mut [u8]) {
    checksum::header(frame);
    checksum::complete(frame);
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
