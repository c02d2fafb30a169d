//! Reading ahead what a group of frames will touch gives the service its hints and changes nothing.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use metadata_base::connection::Connection;
use metadata_base::time::Now;
use metadata_common::maps::Slot;
use metadata_datapath::GROUP;
use metadata_datapath::stack::{ConnectionAction, Exchange, FramePreview, Service, Stack, StackConfig};
use smoltcp::wire::TcpControl::{Fin, None as NoControl, Rst};
use support::client::{CLIENT_V6, SERVICE};
use support::pattern;
use support::raw::{Reply, SYN_ACK, Segment};
use support::wire::{Sent, at};
use support::{checksum, seed};

/// EC2's address over IPv6.
const SERVICE_V6: [u16; 8] = [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254];

type Seen = (Slot, (IpAddr, u16), Vec<u8>);

/// Records what the stack shows it before the frames are processed.
struct Recorder(Rc<RefCell<Vec<Seen>>>);

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

impl Service for Recorder {
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
    let stack = Stack::new(StackConfig::default(), Recorder(Rc::clone(&seen)));
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
    let mut rng = fastrand::Rng::with_seed(seed::seed());
    let config = StackConfig::default();
    let mut stacks = [(); 2].map(|()| pattern::stack(config.clone()).0);
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
