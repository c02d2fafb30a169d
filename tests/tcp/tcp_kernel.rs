//! The kernel program answers and records acknowledgements in the stack's place, and never misleads the stack.

use std::sync::Arc;
use std::time::Duration;

use metadata_common::maps::AllSent;
use metadata_content::http::{Response, StatusCode};
use metadata_datapath::stack::{Stack, StackConfig};
use metadata_user::service::MetadataService;
use smoltcp::wire::TcpControl::{Fin, Rst};
use support::kernel::{Board, Kernel};
use support::pattern::{Pattern, bytes, responses};
use support::raw::{ACK, FIN_ACK, Raw, Reply, SYN_ACK, Segment};
use support::wire::{Client, Faults, Habits, Sent, World};

const GET: &[u8] = b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\n\r\n";
const GET_AND_CLOSE: &[u8] = b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
const PLACES: usize = 65_536;

fn stack(config: StackConfig, places: usize) -> (Stack<MetadataService<Pattern>, Board>, Kernel, Board) {
    let board = Board::new(places);
    let kernel = Kernel::new(board.clone(), config.cookie_key);
    let service = MetadataService::new(Arc::new(Pattern::default()));
    (Stack::with_ledger(config, service, board.clone()), kernel, board)
}

/// A guest that sends single segments, and the kernel program between it and the stack.
struct Guest {
    raw: Raw<MetadataService<Pattern>, Board>,
    kernel: Kernel,
    board: Board,
}

impl Guest {
    fn new(config: StackConfig) -> Self {
        Self::with_places(config, PLACES)
    }

    fn with_places(config: StackConfig, places: usize) -> Self {
        let (stack, kernel, board) = stack(config, places);
        Self { raw: Raw::new(stack), kernel, board }
    }

    /// Sends a request. Returns the guest's next sequence number, and the number that acknowledges the whole answer.
    fn ask(&mut self, port: u16, request: &[u8]) -> (u32, u32) {
        let next = self.raw.connect(port);
        let replies = self.raw.send(&Segment::ack(port, 1001, next).with(request));
        (1001 + request.len() as u32, end(&replies))
    }

    /// Sends a segment to the kernel. Returns its answers, or `None` if it passes the segment to the stack.
    fn try_kernel(&mut self, segment: &Segment) -> Option<Vec<Reply>> {
        let mut sent = Sent::default();
        let taken = self.kernel.takes(self.raw.slot, &segment.frame(self.raw.slot), &mut sent);
        taken.then(|| sent.0.iter().map(|frame| Reply::read(frame)).collect())
    }

    /// Sends a segment that the kernel must take. Returns its answers.
    fn send_to_kernel(&mut self, segment: &Segment) -> Vec<Reply> {
        let answered = self.try_kernel(segment);
        answered.unwrap_or_else(|| panic!("{segment:?} is not for the kernel: {:?}", self.board.entries()))
    }

    /// Sends a segment to the kernel, and to the stack if the kernel passes it. Returns the answers.
    fn send(&mut self, segment: &Segment) -> Vec<Reply> {
        self.try_kernel(segment).unwrap_or_else(|| self.raw.send(segment))
    }

    /// Opens a connection from `port` with this initial sequence number and sends a request. Returns the answers.
    fn reopen(&mut self, port: u16, isn: u32, request: &[u8]) -> Vec<Reply> {
        let opened = self.send(&Segment::syn(port, isn));
        assert_eq!((opened.len(), opened[0].flags, opened[0].ack), (1, SYN_ACK, isn + 1), "{opened:?}");
        let next = opened[0].seq.wrapping_add(1);
        let first = Segment::ack(port, isn + 1, next);
        assert_eq!(self.send(&first).len(), 0, "the end of a handshake needs no answer");
        self.send(&first.with(request))
    }
}

/// The sequence number after the last of these segments.
fn end(replies: &[Reply]) -> u32 {
    let last = replies.last().expect("an answer");
    last.seq.wrapping_add(last.payload.len() as u32 + u32::from(last.flags.2))
}

#[test]
fn an_answer_acknowledged_in_the_kernel_is_not_retransmitted() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET);
    assert!(guest.send_to_kernel(&Segment::ack(1, seq, next)).is_empty());
    assert!(guest.raw.wait(Duration::from_secs(70)).is_empty());
    assert_eq!((guest.raw.stack.stats().connections, guest.raw.stack.stats().stalled), (1, 0));
    let again = guest.raw.send(&Segment::ack(1, seq, next).with(GET));
    assert!(again.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 200 OK")), "{again:?}");
    let (seq, next) = (seq + GET.len() as u32, end(&again));
    guest.send_to_kernel(&Segment::ack(1, seq, next));
    assert!(guest.raw.wait(Duration::from_secs(70)).is_empty(), "the second answer is posted like the first");
    let idle = guest.raw.wait(Duration::from_secs(6));
    assert_eq!(idle[0].flags, FIN_ACK, "the idle timer keeps running");
}

#[test]
fn an_unacknowledged_answer_is_retransmitted_even_if_the_table_is_wrong() {
    type Spoil = fn(&mut AllSent);
    let spoils: [(&str, Spoil); 4] = [
        ("nothing", |_| {}),
        ("the entry of another connection", |entry| entry.flow ^= 1),
        ("an older number", |entry| entry.acknowledged = entry.sent - 5),
        ("an end of another connection", |entry| entry.closed = entry.sent - 5),
    ];
    for (name, spoil) in spoils {
        let mut guest = Guest::new(StackConfig::default());
        guest.ask(1, GET);
        guest.board.spoil(spoil);
        let again = guest.raw.wait(Duration::from_secs(1));
        assert!(again.iter().any(|reply| !reply.payload.is_empty()), "{name}: {again:?}");
    }
}

#[test]
fn the_stack_sends_nothing_for_a_connection_that_ended_in_the_kernel() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET_AND_CLOSE);
    let bye = guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
    assert_eq!((bye[0].flags, bye[0].seq, bye[0].ack), (ACK, next, seq + 1));
    assert_eq!(guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin)), bye, "a repeated FIN");
    assert!(guest.raw.wait(Duration::from_secs(1)).is_empty());
    assert_eq!((guest.raw.stack.stats().connections, guest.raw.stack.time_waits()), (0, 1));
    assert_eq!(guest.board.entries(), [], "the entry is withdrawn");
    let late = guest.raw.send(&Segment::ack(1, seq, next).control(Fin));
    assert_eq!(
        (late[0].flags, late[0].seq, late[0].ack),
        (ACK, next, seq + 1),
        "the stack answers after that"
    );
}

#[test]
fn a_stack_that_ends_while_guests_have_not_closed_leaves_their_ends_and_new_connections_to_the_kernel() {
    let mut guest = Guest::new(StackConfig::default());
    guest.ask(2, GET);
    let (seq, next) = guest.ask(1, GET_AND_CLOSE);
    assert!(guest.send_to_kernel(&Segment::ack(1, seq, next)).is_empty());
    assert_eq!(guest.board.held(), 2);
    assert!(guest.try_kernel(&Segment::syn(2, 5_000)).is_none(), "it is held");
    guest.raw.stack.end();
    assert_eq!((guest.board.held(), guest.raw.stack.left()), (0, 0));
    guest.raw.stack.end();
    let bye = guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
    assert_eq!((bye[0].flags, bye[0].seq, bye[0].ack), (ACK, next, seq + 1));
    assert_eq!(guest.send_to_kernel(&Segment::syn(2, 5_000))[0].flags, SYN_ACK);
}

#[test]
fn an_idle_connection_ends_in_the_kernel_with_the_fin_of_its_guest() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET);
    let bye = guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
    assert_eq!((bye[0].flags, bye[0].seq, bye[0].ack), (FIN_ACK, next, seq + 1));
    assert!(guest.send_to_kernel(&Segment::ack(1, seq + 1, next + 1)).is_empty());
    assert!(guest.raw.wait(Duration::from_secs(1)).is_empty());
    assert_eq!((guest.raw.stack.stats().connections, guest.raw.stack.time_waits()), (0, 1));
}

#[test]
fn a_lost_fin_of_the_kernel_is_retransmitted_by_kernel_and_stack() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET);
    let fin = Segment::ack(1, seq, next).control(Fin);
    let lost = guest.send_to_kernel(&fin);
    assert_eq!((lost[0].flags, lost[0].seq, lost[0].ack), (FIN_ACK, next, seq + 1));
    assert_eq!(guest.send(&fin), lost, "while the connection is posted");
    assert!(guest.raw.wait(Duration::from_secs(1)).is_empty());
    assert_eq!((guest.raw.stack.stats().connections, guest.raw.stack.time_waits()), (0, 1));
    assert_eq!(guest.send(&fin), lost, "after the stack has closed the connection");
    let answer = guest.raw.send(&Segment::ack(1, seq, next + 1).control(Fin));
    assert_eq!(
        (answer[0].flags, answer[0].seq),
        (ACK, next + 1),
        "a guest that has acknowledged the service's FIN gets only an acknowledgement"
    );
}

#[test]
fn a_late_segment_does_not_prevent_the_retransmission_of_a_lost_fin() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET);
    let second = Segment::ack(1, seq, next).with(GET);
    let replies = guest.send(&second);
    let fin = Segment::ack(1, seq + GET.len() as u32, end(&replies)).control(Fin);
    let lost = guest.send_to_kernel(&fin);
    assert!(guest.raw.wait(Duration::from_secs(1)).is_empty());
    assert_eq!(guest.raw.stack.time_waits(), 1);
    assert_eq!(
        guest.send(&second),
        lost,
        "the stack repeats its FIN instead of only acknowledging the guest's"
    );
}

#[test]
fn immediately_reused_sequence_numbers_start_a_new_connection() {
    let mut guest = Guest::new(StackConfig::default());
    for accepted in 1..=3 {
        let replies = guest.reopen(1, 1_000, GET_AND_CLOSE);
        assert_eq!(guest.raw.stack.stats().accepted, accepted, "{replies:?}");
        let seq = 1_001 + GET_AND_CLOSE.len() as u32;
        let bye = guest.send(&Segment::ack(1, seq, end(&replies)).control(Fin));
        assert_eq!((bye.len(), bye[0].flags, bye[0].ack), (1, ACK, seq + 1), "{bye:?}");
        // The stack has time to read the end of the first connection only.
        guest.raw.wait(Duration::from_millis(if accepted == 1 { 300 } else { 0 }));
    }
}

#[test]
fn a_repeated_first_segment_of_a_closed_connection_is_ignored() {
    let mut guest = Guest::new(StackConfig::default());
    let next = guest.send_to_kernel(&Segment::syn(1, 1_000))[0].seq.wrapping_add(1);
    let first = Segment::ack(1, 1_001, next).with(GET_AND_CLOSE);
    let replies = guest.send(&first);
    let seq = 1_001 + GET_AND_CLOSE.len() as u32;
    guest.send(&Segment::ack(1, seq, end(&replies)).control(Fin));
    guest.raw.wait(Duration::from_millis(300));
    assert_eq!(
        guest.send(&first),
        [],
        "a guest that opens a new connection would mistake a reply for its own"
    );
    assert_eq!(guest.raw.stack.stats().accepted, 1);
}

#[test]
fn a_rebooted_guest_that_reuses_port_and_number_is_always_served() {
    const LONG: &[u8] = b"GET /bytes/200000 HTTP/1.1\r\nHost: a\r\n\r\n";
    // The guest reboots during an answer, after an acknowledged answer, and after an unacknowledged one.
    for (request, acknowledges) in [(LONG, false), (GET, true), (GET, false)] {
        for places in [PLACES, 1] {
            let mut guest = Guest::with_places(StackConfig::default(), places);
            for superseded in 0..4 {
                let replies = guest.reopen(1, 1_000, request);
                let answered = replies.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 200 OK"));
                assert!(answered, "after {superseded} resets: {replies:?}");
                assert_eq!(guest.raw.stack.stats().superseded, superseded);
                if acknowledges {
                    guest.send(&Segment::ack(1, 1_001 + request.len() as u32, end(&replies)));
                }
                guest.raw.wait(Duration::from_millis(700));
            }
            assert_eq!((guest.raw.stack.stats().connections, guest.board.held()), (1, 1));
        }
    }
}

#[test]
fn a_late_syn_does_not_disturb_its_live_connection() {
    let mut guest = Guest::new(StackConfig::default());
    let first = Segment::ack(1, 1_001, guest.raw.connect(1)).with(GET);
    let (seq, next) = (1_001 + GET.len() as u32, end(&guest.send(&first)));
    let answer = guest.send(&Segment::syn(1, 1_000));
    assert_eq!((answer[0].flags, answer[0].ack), (SYN_ACK, 1_001));
    // A guest with an open connection answers this way (RFC 5961 §4). Its first segment is late too.
    guest.send(&Segment::ack(1, seq, next));
    guest.send(&first);
    assert_eq!(guest.raw.stack.stats().superseded, 0);
    let again = guest.send(&Segment::ack(1, seq, next).with(GET));
    assert!(again.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 200 OK")), "{again:?}");
}

#[test]
fn an_end_that_the_table_lost_is_learnt_from_the_guests_next_segment() {
    // The guest has already sent its last acknowledgement, or sends it after the retransmission.
    for is_retransmitted in [false, true] {
        let mut guest = Guest::new(StackConfig::default());
        let (seq, next) = guest.ask(1, GET);
        let bye = guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
        assert_eq!(bye[0].flags, FIN_ACK);
        guest.board.spoil(|entry| entry.flow ^= 1);
        if is_retransmitted {
            let again = guest.raw.wait(Duration::from_millis(300));
            assert!(again.iter().any(|reply| !reply.payload.is_empty()), "{again:?}");
        }
        assert!(guest.raw.send(&Segment::ack(1, seq + 1, next + 1)).is_empty());
        assert_eq!((guest.raw.stack.stats().connections, guest.raw.stack.time_waits()), (0, 1));
        let late = guest.raw.send(&Segment::ack(1, seq, next).control(Fin));
        assert_eq!((late[0].flags, late[0].seq, late[0].ack), (FIN_ACK, next, seq + 1));
    }
}

#[test]
fn an_end_is_read_before_another_connection_overwrites_its_entry() {
    // An acknowledged answer is not retransmitted.
    for is_acknowledged in [false, true] {
        let mut guest = Guest::with_places(StackConfig::default(), 1);
        let (seq, next) = guest.ask(1, GET);
        if is_acknowledged {
            guest.send_to_kernel(&Segment::ack(1, seq, next));
            assert!(guest.raw.wait(Duration::from_secs(1)).is_empty());
        }
        guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
        guest.ask(2, GET);
        let stats = guest.raw.stack.stats();
        assert_eq!(
            (stats.connections, guest.raw.stack.time_waits()),
            (1, 1),
            "acknowledged: {is_acknowledged}"
        );
    }
}

#[test]
fn the_stack_waits_for_the_guests_fin_after_its_own_is_acknowledged() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET_AND_CLOSE);
    guest.send_to_kernel(&Segment::ack(1, seq, next));
    assert!(guest.raw.wait(Duration::from_secs(20)).is_empty());
    guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
    assert!(guest.raw.wait(Duration::from_secs(20)).is_empty(), "no reset: the kernel has received the end");
    assert_eq!((guest.raw.stack.stats().connections, guest.raw.stack.stats().stalled), (0, 0));
}

#[test]
fn a_connection_that_the_guest_closes_first_can_end_in_the_kernel() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET);
    let bye = guest.raw.send(&Segment::ack(1, seq, next).control(Fin));
    assert_eq!(bye[0].flags, FIN_ACK);
    assert!(guest.board.entries().iter().all(|entry| entry.finished == 0), "its FIN has arrived");
    guest.send_to_kernel(&Segment::ack(1, seq + 1, end(&bye)));
    assert!(guest.raw.wait(Duration::from_secs(1)).is_empty());
    assert_eq!(guest.raw.stack.stats().connections, 0);
}

#[test]
fn connections_that_ended_in_the_kernel_free_their_place_at_once() {
    for config in [
        StackConfig { connections_per_port: 5, ..StackConfig::default() },
        StackConfig { connections: 5, ..StackConfig::default() },
    ] {
        let mut guest = Guest::new(config);
        for port in 1..=50 {
            let (seq, next) = guest.ask(port, GET_AND_CLOSE);
            guest.send_to_kernel(&Segment::ack(port, seq, next).control(Fin));
        }
        let stats = guest.raw.stack.stats();
        assert_eq!((stats.accepted, stats.refused_connections, stats.refused_port_connections), (50, 0, 0));
    }
}

#[test]
fn a_guest_with_sequential_connections_holds_one_at_a_time() {
    let mut guest = Guest::new(StackConfig::default());
    for port in 1..=50 {
        let (seq, next) = guest.ask(port, GET);
        guest.send_to_kernel(&Segment::ack(port, seq, next).control(Fin));
        assert_eq!((guest.raw.stack.stats().connections, guest.board.held()), (1, 1), "port {port}");
    }
}

#[test]
fn a_four_tuple_reused_after_an_unread_end_starts_a_new_connection() {
    let mut guest = Guest::new(StackConfig::default());
    let (seq, next) = guest.ask(1, GET_AND_CLOSE);
    guest.send_to_kernel(&Segment::ack(1, seq, next).control(Fin));
    let replies = guest.reopen(1, 77_000, GET);
    assert!(replies[0].payload.starts_with(b"HTTP/1.1 200 OK"), "{replies:?}");
    assert_eq!((guest.raw.stack.stats().superseded, guest.raw.stack.stats().connections), (1, 1));
}

#[test]
fn a_connection_is_not_posted_while_data_is_queued() {
    let mut guest = Guest::new(StackConfig::default());
    guest.ask(1, b"GET /bytes/200000 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(guest.board.entries(), []);
    guest.ask(2, GET);
    assert_eq!(guest.board.entries().len(), 1);
    guest.raw.stack.forget(guest.raw.slot);
    assert_eq!(guest.board.entries(), []);
}

#[test]
fn every_answer_arrives_whole_over_a_bad_link_with_kernel_and_stack() {
    const BODY: usize = 20_000;
    let bad = Faults { loss: 10, duplicate: 10, reorder: 10, ..Faults::NONE };
    let mut taken = [0; 3];
    for (places, faults) in [(PLACES, Faults::NONE), (PLACES, bad), (2, bad)] {
        for seed in 0..10 {
            let (stack, kernel, board) = stack(StackConfig::default(), places);
            let mut world = World::new(stack, Client::new(3, Habits::default()), faults, seed);
            world.kernel = Some(kernel);
            let one = format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\n\r\n");
            let last = format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            for port in 0..6 {
                let request = if port % 2 == 0 { format!("{one}{last}") } else { last.clone() };
                world.client.begin(40_000 + port, request.as_bytes());
            }
            let ended = |world: &mut World<_, _>| world.client.talks.iter().all(|talk| talk.ended);
            assert!(world.run(Duration::from_secs(600), ended), "{places} places, seed {seed}");
            for (port, talk) in world.client.talks.iter().enumerate() {
                let answers = responses(&talk.received, &[]);
                assert_eq!(answers.len(), 2 - port % 2, "{places} places, seed {seed}");
                assert!(answers.iter().all(|answer| answer.body == bytes(BODY)), "seed {seed}");
            }
            for talk in 0..6 {
                world.client.close(talk);
            }
            world.wait(Duration::from_secs(600));
            let stats = world.stack.stats();
            assert_eq!((stats.connections, stats.ports), (0, 0), "{places} places, seed {seed}: {stats:?}");
            assert_eq!(board.entries(), [], "{places} places, seed {seed}");
            let kernel = world.kernel.expect("it is there");
            taken.iter_mut().zip(kernel.taken).for_each(|(sum, taken)| *sum += taken);
        }
    }
    assert!(taken.iter().all(|taken| *taken > 50), "the kernel has work: {taken:?}");
}

/// A connection that the kernel has answered: the guest has asked once from port 1, and has acknowledged the answer. Returns
/// the guest's next sequence number, and the number that it acknowledges.
fn answered_by_the_kernel(guest: &mut Guest) -> (u32, u32) {
    let content = bytes(10);
    let response = Response::new(StatusCode(200), None, &[], content.clone());
    guest.kernel.publish(GET, response.head(), &content);
    let answer = guest.reopen(1, 1001, GET);
    assert_eq!(guest.kernel.taken[3], 1, "the kernel has answered");
    let (seq, next) = (1002 + GET.len() as u32, end(&answer));
    assert!(guest.send_to_kernel(&Segment::ack(1, seq, next)).is_empty());
    (seq, next)
}

#[test]
fn a_guest_that_probes_a_connection_of_the_kernel_hears_that_it_exists() {
    for byte in [&b""[..], b"x"] {
        let mut guest = Guest::new(StackConfig::default());
        let (seq, next) = answered_by_the_kernel(&mut guest);
        let replies = guest.send(&Segment::ack(1, seq - 1, next).with(byte));
        let [reply] = &replies[..] else { panic!("{byte:?}: {replies:?}") };
        assert_eq!((reply.flags, reply.seq, reply.ack), (ACK, next, seq), "{byte:?}");
        let answer = guest.send(&Segment::ack(1, seq, next).with(GET_AND_CLOSE));
        assert!(answer.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 200 OK")), "{answer:?}");
    }
}

#[test]
fn a_connection_of_the_kernel_waits_until_the_stack_has_room_for_it() {
    let mut guest = Guest::new(StackConfig { connections_per_port: 1, ..StackConfig::default() });
    let (seq, next) = answered_by_the_kernel(&mut guest);
    let busy = guest.raw.connect(2);
    guest.raw.send(&Segment::ack(2, 1001, busy).with(&GET[..20]));
    let request = Segment::ack(1, seq, next).with(GET_AND_CLOSE);
    assert_eq!(guest.send(&request).len(), 0, "the only place is taken");
    assert_eq!(guest.raw.stack.stats().refused_port_connections, 1);
    guest.raw.send(&Segment::ack(2, 1021, busy).control(Rst));
    let answer = guest.send(&request);
    assert!(answer.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 200 OK")), "{answer:?}");
}
