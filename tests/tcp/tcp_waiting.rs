//! A parked exchange costs no time, wakes when its answer changes, and ends with its guest's connection.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use metadata_common::maps::Slot;
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::link::{FrameSource, HubTap};
use metadata_datapath::stack::StackConfig;
use metadata_datapath::worker::{WorkerConfig, WorkerLauncher};
use smoltcp::wire::TcpControl::{Fin, Rst};
use support::raw::{FIN_ACK, Raw, Reply, Segment};
use support::toy::{self, Board, Toy};

/// Limit for each wait. Only a failure reaches it.
const PATIENCE: Duration = Duration::from_secs(20);
/// Seconds to park: longer than any client's long poll.
const LONG: u64 = 600;

fn raw() -> (Raw<Toy>, Arc<Board>) {
    let (stack, board) = toy::stack(StackConfig::default());
    (Raw::new(stack), board)
}

/// Opens a connection and sends an order. Returns the next sequence numbers of guest and service, and the replies.
fn order(raw: &mut Raw<Toy>, port: u16, order: &str) -> (u32, u32, Vec<Reply>) {
    let next = raw.connect(port);
    let replies = raw.send(&Segment::ack(port, 1001, next).with(order.as_bytes()));
    (1001 + order.len() as u32, next, replies)
}

/// Opens a connection that waits. Returns the next sequence numbers of guest and service.
fn park(raw: &mut Raw<Toy>, port: u16) -> (u32, u32) {
    let (seq, next, replies) = order(raw, port, &format!("park {LONG}\n"));
    assert!(replies.iter().all(|reply| reply.payload.is_empty()), "{replies:?}");
    (seq, next)
}

/// The guest's port and the text of each reply with payload.
fn said(replies: &[Reply]) -> Vec<(u16, String)> {
    let spoken = replies.iter().filter(|reply| !reply.payload.is_empty());
    let mut said: Vec<_> = spoken
        .map(|reply| (reply.ports.1, String::from_utf8_lossy(&reply.payload).trim().to_owned()))
        .collect();
    said.sort();
    said
}

/// Number of live exchanges. Each holds one reference to the board, as do the service and the test.
fn exchanges(board: &Arc<Board>) -> usize {
    Arc::strong_count(board) - 2
}

#[test]
fn a_parked_exchange_outlives_every_timeout_and_answers_at_its_deadline() {
    for seconds in [60, LONG] {
        let (mut raw, _board) = raw();
        order(&mut raw, 1, &format!("park {seconds}\n"));
        let silence = raw.wait(Duration::from_secs(seconds) - Duration::from_millis(1));
        assert!(silence.is_empty(), "{seconds} s: {silence:?}");
        let stats = raw.stack.stats();
        assert_eq!((stats.connections, stats.stalled, stats.woken), (1, 0, 0), "{seconds} s");
        assert_eq!(said(&raw.wait(Duration::from_millis(2))), [(1, "0".to_owned())], "{seconds} s");
    }
}

#[test]
fn a_slot_with_only_parked_exchanges_rarely_wakes_before_the_deadline() {
    let (mut raw, _board) = raw();
    park(&mut raw, 1);
    let (mut sent, mut times) = (support::wire::Sent::default(), 0);
    let deadline = raw.now + Duration::from_secs(LONG);
    while raw.now < deadline {
        raw.now = raw.stack.step(support::wire::at(raw.now), &mut sent).expect("a deadline");
        times += 1;
    }
    assert_eq!((raw.now, sent.0.len()), (deadline, 0));
    // The timer wheel visits a distant timer a few times. The count includes the idle timer of the port.
    assert!(times < 10, "{times} times in {LONG} s");
}

#[test]
fn waking_a_slot_runs_all_its_waiting_connections_and_no_others() {
    let (mut raw, board) = raw();
    let slots: [Slot; 2] = [7, 8];
    for slot in slots {
        raw.slot = slot;
        park(&mut raw, 1);
        park(&mut raw, 2);
        board.write(slot, 5);
    }
    raw.slot = 7;
    raw.now += Duration::from_secs(30);
    assert_eq!(said(&raw.wake()), [(1, "5".to_owned()), (2, "5".to_owned())]);
    assert_eq!(raw.stack.stats().woken, 2);
    raw.slot = 8;
    assert_eq!(said(&raw.wake()).len(), 2);
}

#[test]
fn waking_without_a_change_keeps_the_deadline() {
    let (mut raw, _board) = raw();
    park(&mut raw, 1);
    for _ in 0..10 {
        raw.now += Duration::from_secs(10);
        assert!(raw.wake().is_empty());
    }
    assert!(raw.wait(Duration::from_secs(LONG - 101)).is_empty());
    assert_eq!(said(&raw.wait(Duration::from_secs(1))), [(1, "0".to_owned())]);
}

#[test]
fn waking_a_slot_without_waiting_connections_does_nothing() {
    let (mut raw, _board) = raw();
    for slot in [7, 1_000_000, Slot::MAX] {
        raw.slot = slot;
        assert!(raw.wake().is_empty());
    }
    raw.slot = 7;
    raw.send(&Segment::syn(1, 1000));
    assert!(raw.wake().is_empty(), "a handshake under way");
    raw.stack.forget(7);
    assert!(raw.wake().is_empty());
    assert_eq!((raw.stack.stats().woken, raw.stack.stats().faults), (0, 0));
}

#[test]
fn a_change_by_one_connection_reaches_the_others_of_its_slot_at_once() {
    let (mut raw, _board) = raw();
    raw.slot = 8;
    park(&mut raw, 1);
    raw.slot = 7;
    park(&mut raw, 1);
    park(&mut raw, 2);
    let (_, _, replies) = order(&mut raw, 3, "write 9\n");
    let expected = [(1, "9".to_owned()), (2, "9".to_owned()), (3, "ok".to_owned())];
    assert_eq!(said(&replies), expected);
    assert_eq!(
        replies.iter().filter(|reply| !reply.payload.is_empty()).count(),
        3,
        "no other connection gets a reply"
    );
    assert!(said(&raw.wait(Duration::from_millis(100))).is_empty(), "no connection gets it twice");
}

#[test]
fn a_change_made_during_a_wake_reaches_connections_woken_earlier() {
    let (mut raw, board) = raw();
    // Connections run from the youngest to the oldest, so the others see the oldest one's change in a second round.
    order(&mut raw, 1, "storm\n");
    park(&mut raw, 2);
    let next = raw.connect(3);
    let replies =
        raw.send(&Segment::ack(3, 1001, next).with(format!("park {LONG}\npark {LONG}\n").as_bytes()));
    assert!(said(&replies).is_empty());
    board.write(7, 40);
    assert_eq!(said(&raw.wake()), [(2, "40".to_owned()), (3, "40".to_owned()), (3, "41".to_owned())]);
}

#[test]
fn exchanges_that_wake_each_other_endlessly_are_slowed_down_without_loss() {
    const STORMS: u64 = 10;
    const ROUNDS: u64 = 2;
    let (mut raw, board) = raw();
    for port in 1..=STORMS as u16 {
        order(&mut raw, port, "storm\n");
    }
    board.write(7, 1);
    raw.wake();
    assert_eq!(raw.stack.stats().woken, STORMS * ROUNDS, "no further turns at this instant");
    let at_once = board.read(7);
    raw.wait(Duration::from_micros(900));
    assert_eq!(board.read(7), at_once, "the turns pause");
    raw.wait(Duration::from_millis(10));
    assert!(board.read(7) > at_once, "the turns continue after the pause");
    assert!(raw.stack.stats().woken <= STORMS * ROUNDS * 12, "the turns continue at a reduced rate");
    raw.slot = 8;
    park(&mut raw, 1);
    board.write(8, 2);
    assert_eq!(said(&raw.wake()).len(), 1, "other slots are served");
}

#[test]
fn a_reset_while_parked_frees_everything_at_once() {
    let (mut raw, board) = raw();
    let (seq, _) = park(&mut raw, 1);
    park(&mut raw, 2);
    assert_eq!(exchanges(&board), 2);
    raw.send(&Segment::ack(1, seq, 0).control(Rst));
    assert_eq!((exchanges(&board), raw.stack.stats().connections), (1, 1));
}

#[test]
fn a_parked_exchange_is_notified_at_once_when_its_guest_closes() {
    let (mut raw, board) = raw();
    let (seq, next) = park(&mut raw, 1);
    let replies = raw.send(&Segment::ack(1, seq, next).control(Fin));
    assert!(replies.iter().any(|reply| reply.flags == FIN_ACK), "{replies:?}");
    raw.send(&Segment::ack(1, seq + 1, next.wrapping_add(1)));
    assert_eq!((exchanges(&board), raw.stack.stats().connections), (0, 0));
}

#[test]
fn forgetting_a_slot_drops_its_parked_exchanges() {
    let (mut raw, board) = raw();
    park(&mut raw, 1);
    park(&mut raw, 2);
    raw.stack.forget(raw.slot);
    assert_eq!((exchanges(&board), raw.stack.stats().connections), (0, 0));
    assert!(raw.wake().is_empty());
}

/// A frame source backed by a datagram socket.
struct Datagrams(UnixDatagram);

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl FrameSource for Datagrams {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let mut buffer = [0; 2_048];
        for lent in 0..max {
            let Ok(len) = self.0.recv(&mut buffer) else { return lent };
            f(&[&buffer[..len]]);
        }
        max
    }

    fn stats(&self) -> Option<SocketStats> {
        None
    }
}

#[test]
fn a_sleeping_worker_answers_a_parked_exchange_when_woken() {
    const SLOT: Slot = 7;
    let (source, guest) = UnixDatagram::pair().expect("a pair");
    let (tap, wire) = UnixDatagram::pair().expect("a pair");
    source.set_nonblocking(true).expect("a flag");
    tap.set_nonblocking(true).expect("a flag");
    wire.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let (stack, board) = toy::stack(StackConfig::default());
    let config = WorkerConfig { spin: Duration::ZERO, ..WorkerConfig::default() };
    let worker =
        WorkerLauncher::spawn(config, Datagrams(source), HubTap::new(tap.into()), stack).expect("a worker");

    let receive = || {
        let mut frame = [0; 2_048];
        let len = wire.recv(&mut frame).expect("a frame in time");
        Reply::read(&frame[..len])
    };
    guest.send(&Segment::syn(1, 1000).frame(SLOT)).expect("room");
    let next = receive().seq.wrapping_add(1);
    let order = format!("park {LONG}\n");
    guest.send(&Segment::ack(1, 1001, next).with(order.as_bytes()).frame(SLOT)).expect("room");
    assert!(receive().payload.is_empty(), "the order is acknowledged without an answer");
    board.write(SLOT, 5);
    worker.wake(SLOT).expect("room");
    assert_eq!(receive().payload, b"5\n");
    worker.stop().expect("a clean end");
}
