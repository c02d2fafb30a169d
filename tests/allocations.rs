//! Receiving a frame allocates nothing, even if it starts a connection or asks for a rendered document. Observation of
//! the agent allocates nothing either: a probe, or the auditing of a request.

use std::alloc::System;
use std::sync::Arc;
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_content::dialect;
use metadata_content::http::{Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Record;
use metadata_content::sink::Outbox;
use metadata_content::source::RecordSource;
use metadata_content::store::{Endpoint, Host, Interner, Responses, Route, Store, VmState};
use metadata_content::token::Keyring;
use metadata_datapath::stack::{
    ConnectionAction, Exchange as _, Service as _, Stack, StackConfig, TIME_WAITS_PER_PORT, Transmit,
};
use metadata_datapath::worker::Heartbeat;
use metadata_feed::state::mailboxes::Mailboxes;
use metadata_user::agent::Health;
use metadata_user::service::MetadataService;
use metadata_user::service::audit::Tape;
use smoltcp::wire::TcpControl::{Fin, Rst};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use support::pattern::stack;
use support::question;
use support::raw::{Raw, Reply, Segment};
use support::wire::at;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Discards all frames.
struct Nowhere;

impl Transmit for Nowhere {
    fn send(&mut self, _: &[u8]) {}
}

/// One test, because the counts are those of all threads, and each test has a thread.
#[test]
fn neither_receiving_nor_observing_allocates() {
    frames_that_start_no_connection_or_request_allocate_nothing();
    a_connection_that_fetches_a_rendered_document_allocates_nothing_between_syn_and_the_last_acknowledgement(
    );
    a_probe_and_the_auditing_of_a_request_allocate_nothing();
}

fn frames_that_start_no_connection_or_request_allocate_nothing() {
    const GET: &[u8] = b"GET /some HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut raw = Raw::new(stack(StackConfig::default()).0);
    let next = raw.connect(1);
    let replies = raw.send(&Segment::ack(1, 1001, next).with(GET));
    let answered = |reply: &Reply| reply.seq.wrapping_add(reply.payload.len() as u32);
    let (seq, end) = (1001 + GET.len() as u32, answered(&replies[0]));
    let frames = [
        ("a SYN", Segment::syn(2, 5)),
        (
            "a SYN for a closed port",
            Segment { destination: (Segment::syn(2, 5).destination.0, 81), ..Segment::syn(2, 5) },
        ),
        ("the end of a handshake", Segment::ack(1, 1001, next)),
        ("a segment of no connection", Segment::ack(3, 5, 5).with(b"x")),
        ("an acknowledgement of part of an answer", Segment::ack(1, seq, end - 5)),
        ("a repeated acknowledgement", Segment::ack(1, seq, end - 5)),
        ("an acknowledgement of bytes that were not sent", Segment::ack(1, seq, end + 5)),
        ("a repeated request", Segment::ack(1, 1001, next).with(GET)),
        ("a segment after a gap", Segment::ack(1, seq + 10, end).with(b"x")),
        ("an acknowledgement of the whole answer", Segment::ack(1, seq, end)),
        ("a stray reset", Segment::ack(1, seq + 1, end).control(Rst)),
        ("a FIN", Segment::ack(1, seq, end).control(Fin)),
    ];
    for (name, segment) in frames {
        let frame = segment.frame(raw.slot);
        let region = Region::new(ALLOCATOR);
        raw.stack.receive(at(raw.now), raw.slot, &frame, &mut Nowhere);
        assert_eq!(region.change().allocations + region.change().reallocations, 0, "{name}");
    }
    let region = Region::new(ALLOCATOR);
    for _ in 0..100 {
        raw.now += Duration::from_millis(50);
        raw.stack.step(at(raw.now), &mut Nowhere);
    }
    assert_eq!(region.change().allocations, 0, "timers");
}

/// What a guest reads in the service's frames.
#[derive(Default)]
struct Seen {
    /// The next sequence number, after the last frame sent.
    next: u32,
    /// How many segments begin with the status line of a document.
    documents: u32,
}

impl Transmit for Seen {
    fn send(&mut self, frame: &[u8]) {
        const TCP: usize = 14 + 20;
        let number = |at: usize| u32::from_be_bytes([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
        let payload = &frame[TCP + usize::from(frame[TCP + 12] >> 4) * 4..];
        let (fin, syn) = (frame[TCP + 13] & 1, frame[TCP + 13] >> 1 & 1);
        let length = payload.len() as u32 + u32::from(fin) + u32::from(syn);
        self.next = number(TCP + 4).wrapping_add(length);
        self.documents += u32::from(payload.starts_with(b"HTTP/1.1 200 "));
    }
}

fn a_connection_that_fetches_a_rendered_document_allocates_nothing_between_syn_and_the_last_acknowledgement()
{
    const GET: &[u8] = b"GET /v1/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n";
    /// As many flows as a slot may have in TIME-WAIT.
    const WARM: u16 = TIME_WAITS_PER_PORT as u16;
    let mut stack = Stack::new(StackConfig::default(), MetadataService::new(typical_guest()));
    let (mut allocations, mut seen) = (0, Seen::default());
    // The first connections render the document and fill the tables of their slot.
    for port in 1..=WARM + 20 {
        let now = at(Duration::from_millis(u64::from(port)));
        let end = 1001 + GET.len() as u32;
        for step in 0..5 {
            let segment = match step {
                0 => Segment::syn(port, 1000),
                1 => Segment::ack(port, 1001, seen.next),
                2 => Segment::ack(port, 1001, seen.next).with(GET),
                3 => Segment::ack(port, end, seen.next).control(Fin),
                _ => Segment::ack(port, end + 1, seen.next),
            };
            let frame = segment.frame(0);
            let region = Region::new(ALLOCATOR);
            stack.receive(now, 0, &frame, &mut seen);
            let change = region.change();
            allocations += if port > WARM { change.allocations + change.reallocations } else { 0 };
        }
    }
    assert_eq!(seen.documents, u32::from(WARM) + 20);
    assert_eq!(allocations, 0);
}

/// A slot with a typical record, rendered.
fn typical_guest() -> Arc<OnDemand> {
    let record = question::typical_record(0, None);
    let record = Arc::new(Record::parse("vm.json", &record.to_string()).expect("a good record").0);
    let mailboxes = Mailboxes::in_memory(Outbox::detached());
    let vm = VmState::of(
        &record,
        Arc::new(Keyring::ephemeral()),
        mailboxes.for_record(RecordSource::File, "vm.json", &record),
    );
    let answers = OnDemand::new(Store::new(1));
    let responses = dialect::render(&record, &mut Interner::new(), vm);
    answers.store().publish(0, Arc::new(responses)).expect("a slot of the table");
    Arc::new(answers)
}

/// A request over a connection of its own.
const REQUEST: &[u8] =
    b"GET /latest/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\nConnection: close\r\n\r\n";

/// The number of allocations for one request over a connection of its own.
fn request(serve: &mut MetadataService) -> usize {
    let connection = Connection {
        slot: 0,
        local: ([169, 254, 169, 254].into(), 80),
        remote: ([10, 0, 0, 1].into(), 40_000),
    };
    let region = Region::new(ALLOCATOR);
    let mut exchange = serve.open(at(Duration::ZERO), connection);
    assert_eq!(exchange.receive(at(Duration::ZERO), REQUEST), REQUEST.len());
    let mut sent = 0;
    while let ConnectionAction::Send(bytes) = exchange.next(at(Duration::ZERO)) {
        sent += bytes.len();
    }
    drop(exchange);
    serve.turned(Duration::from_micros(3));
    let change = region.change();
    assert!(sent > 300, "{sent} bytes");
    change.allocations + change.reallocations
}

fn a_probe_and_the_auditing_of_a_request_allocate_nothing() {
    let health = Health::new(vec![(0, Heartbeat::default())]);
    health.set_records_read();
    health.set_ports_settled();
    let region = Region::new(ALLOCATOR);
    let troubles = health.deadly().count() + health.hindering().count();
    assert_eq!((troubles, region.change().allocations), (0, 0));

    let content = Arc::new(OnDemand::new(Store::new(1)));
    let mut responses = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
    let answer = Response::new(StatusCode(200), Some("text/plain"), &[], vec![b'x'; 300]);
    responses.add(Host::Metadata, "/latest/meta-data", Route::new("ec2", Endpoint::Fixed(answer)));
    content.store().publish(0, Arc::new(responses.build())).expect("a slot of the table");
    let mut plain = MetadataService::new(Arc::clone(&content));
    let tape = Tape::new(16);
    tape.turn_on();
    let mut audited = MetadataService::audited(content, Some(tape));
    // The first request also renders the date.
    request(&mut plain);
    let expected = request(&mut plain);
    for _ in 0..100 {
        assert_eq!(request(&mut audited), expected);
    }
    let counted: u64 = audited.tally().answers().map(|(.., count)| count).sum();
    assert_eq!(counted, 100);
}
