//! Each resource that one VM can use is limited. Refusals are counted and affect only that VM.

use metadata_common::maps::Slot;
use metadata_content::account::{
    BUFFERED_PER_VM, COMPUTED_PER_VM, CONNECTIONS_PER_VM, HELD_PER_VM, Resource,
};
use metadata_content::dialect;
use metadata_content::http::body::BODY_MAX;
use metadata_content::http::{Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Record;
use metadata_content::store::{
    Endpoint, Host, Interner, LiveOutcome, LiveRequest, LiveRoute, Responses, Route, Store, VmState,
};
use metadata_datapath::stack::{Stack, StackConfig};
use metadata_user::service::MetadataService;
use serde_json::{Value, json};
use smoltcp::wire::TcpControl::Rst;
use std::sync::Arc;
use std::time::Duration;
use support::raw::{Raw, Reply, Segment};
use support::record::Identity;

/// Bytes of payload in one segment.
const SEGMENT: usize = 1460;
const GET: &[u8] = b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n";

struct Node {
    raw: Raw<MetadataService>,
    content: Arc<OnDemand>,
}

impl Node {
    fn new(config: StackConfig) -> Self {
        let content = Arc::new(OnDemand::new(Store::new(64)));
        let stack = Stack::new(config, MetadataService::new(Arc::clone(&content)));
        Self { raw: Raw::new(stack), content }
    }

    /// Publishes the responses of a VM in a slot.
    fn serve(&self, slot: Slot, vm: &VmState, record: &Record) {
        let responses = dialect::render(record, &mut Interner::new(), vm.clone());
        self.content.store().publish(slot, Arc::new(responses)).expect("a slot");
    }

    /// Sends bytes on a new connection of a slot. Returns the immediate replies.
    fn send(&mut self, slot: Slot, port: u16, bytes: &[u8]) -> Vec<Reply> {
        self.raw.slot = slot;
        let next = self.raw.connect(port);
        let mut replies = Vec::new();
        for (n, part) in bytes.chunks(SEGMENT).enumerate() {
            let seq = 1001 + (n * SEGMENT) as u32;
            replies.extend(self.raw.send(&Segment::ack(port, seq, next).with(part)));
        }
        replies
    }

    /// The status of the immediate answer; 0 if there is none yet.
    fn ask(&mut self, slot: Slot, port: u16, bytes: &[u8]) -> u16 {
        status(&self.send(slot, port, bytes))
    }
}

fn status(replies: &[Reply]) -> u16 {
    let answer = replies.iter().find(|reply| !reply.payload.is_empty());
    let text = answer.map(|reply| String::from_utf8_lossy(&reply.payload[9..12]).into_owned());
    text.map_or(0, |text| text.parse().expect("a status"))
}

fn record(number: u16, change: impl FnOnce(&mut Value)) -> Record {
    let mut value = serde_json::from_str(&Identity::of(number).record(1)).expect("JSON");
    change(&mut value);
    Record::parse("r.yaml", &value.to_string()).expect("a good record").0
}

/// The VM of a record, as the agent creates it.
fn vm(record: &Record) -> VmState {
    let alone = VmState::alone(record.vm.uuid.as_str());
    VmState::of(record, alone.keyring, alone.mailbox)
}

#[test]
fn the_connection_limit_of_a_record_applies_to_all_nics_of_the_vm_together() {
    let mut node = Node::new(StackConfig::default());
    let few = record(0, |record| record["serve"] = json!({ "limits": { "conns": 5 } }));
    let (limited, other) = (vm(&few), vm(&record(1, |_| ())));
    node.serve(1, &limited, &few);
    node.serve(2, &limited, &few);
    node.serve(3, &other, &record(1, |_| ()));
    for (slot, port) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)] {
        assert_eq!(node.ask(slot, port, GET), 200, "{slot} {port}");
    }
    for slot in [1, 2] {
        assert!(node.send(slot, 10, GET).is_empty(), "above the limit");
    }
    assert_eq!(node.raw.stack.stats().refused_vm_connections, 2);
    assert_eq!(node.ask(3, 1, GET), 200, "another VM is served");
    node.raw.slot = 1;
    node.raw.send(&Segment::ack(1, 1001 + GET.len() as u32, 0).control(Rst));
    assert_eq!(node.ask(2, 11, GET), 200, "another connection has ended");
    node.raw.stack.forget(1);
    node.raw.stack.forget(2);
    assert_eq!(limited.mailbox.account().used(Resource::Connections), 0);
    assert_eq!(CONNECTIONS_PER_VM, StackConfig::default().connections_per_port);
}

#[test]
fn a_vm_at_its_limit_loses_an_idle_connection_of_the_same_nic() {
    let mut node = Node::new(StackConfig::default());
    let few = record(0, |record| record["serve"] = json!({ "limits": { "conns": 3 } }));
    let vm = vm(&few);
    for slot in [1, 2] {
        node.serve(slot, &vm, &few);
    }
    for port in 1..=3 {
        let replies = node.send(1, port, GET);
        assert_eq!(status(&replies), 200);
        let end = replies.last().map(|reply| reply.seq.wrapping_add(reply.payload.len() as u32));
        node.raw.send(&Segment::ack(port, 1001 + GET.len() as u32, end.expect("an answer")));
    }
    assert!(node.send(2, 1, GET).is_empty(), "the other NIC has no idle connection");
    for (port, gone) in [(11, 1), (12, 2), (13, 3)] {
        let replies = node.send(1, port, GET);
        let reset = replies.iter().find(|reply| reply.flags.3).expect("a reset");
        assert_eq!((reset.ports.1, status(&replies)), (gone, 200));
    }
    let stats = node.raw.stack.stats();
    assert_eq!((stats.refused_vm_connections, stats.connections_evicted), (1, 3));
}

#[test]
fn requests_beyond_the_waiting_limit_of_a_vm_without_a_record_get_503() {
    let mut node = Node::new(StackConfig::default());
    for slot in [1, 2] {
        node.content.store().expect(slot).expect("a slot");
    }
    for port in 0..HELD_PER_VM as u16 {
        assert_eq!(node.ask(1, 1 + port, GET), 0, "{port} waits");
    }
    assert_eq!(node.ask(1, 1000, GET), 503);
    let put = b"PUT /latest/api/token HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
    let replies = node.send(1, 1001, put);
    assert_eq!(status(&replies), 0, "a client that requests a token gives up on any error");
    assert!(replies.iter().any(|reply| reply.flags.1), "the service closes: {replies:?}");
    assert_eq!(node.raw.stack.stats().refused.held, 2);
    assert_eq!(node.ask(2, 1, GET), 0, "another VM's request waits");
    let known = record(0, |_| ());
    node.serve(1, &vm(&known), &known);
    node.raw.slot = 1;
    let answers = node.raw.wake();
    assert_eq!(
        answers.iter().filter(|reply| reply.payload.starts_with(b"HTTP/1.1 200")).count(),
        HELD_PER_VM
    );
}

#[test]
fn the_buffer_limit_for_half_received_requests_is_per_vm() {
    let mut node = Node::new(StackConfig::default());
    let known = [0, 1].map(|number| record(number, |_| ()));
    let vms = [vm(&known[0]), vm(&known[1])];
    for slot in 0..2 {
        node.serve(slot as Slot, &vms[slot], &known[slot]);
    }
    // The request lacks the last byte of the largest body.
    let mut half =
        format!("POST /v1/phone-home HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_MAX}\r\n\r\n").into_bytes();
    half.resize(half.len() + BODY_MAX - 1, b'x');
    let mut taken = 0;
    while node.ask(0, 1 + taken, &half) == 0 {
        taken += 1;
    }
    assert_eq!(usize::from(taken), BUFFERED_PER_VM / half.len());
    assert_eq!(node.raw.stack.stats().refused.buffered, 1);
    let used = vms[0].mailbox.account().used(Resource::Buffered);
    assert!((BUFFERED_PER_VM - half.len()..=BUFFERED_PER_VM).contains(&used), "{used}");
    assert_eq!(node.ask(1, 1, &half), 0, "another VM's request is accepted");
    assert_eq!(node.ask(0, 1000, GET), 200, "requests without a body are served");
    node.raw.stack.forget(0);
    assert_eq!(vms[0].mailbox.account().used(Resource::Buffered), 0);
}

/// Answers with this many bytes, which are computed for each request.
#[derive(Debug)]
struct Large(usize);

impl LiveRoute for Large {
    fn answer(&self, _: &LiveRequest<'_>) -> LiveOutcome {
        Response::new(StatusCode(200), None, &[], vec![b'.'; self.0]).into()
    }

    fn about(&self) -> &'static str {
        "something large"
    }
}

#[test]
fn unread_computed_answers_are_limited_and_shared_ones_are_free() {
    let mut node = Node::new(StackConfig::default());
    let vms = [0, 1].map(|number| vm(&record(number, |_| ())));
    for (slot, vm) in (0..).zip(&vms) {
        let mut builder = Responses::builder(vm.clone());
        builder.add(
            Host::Metadata,
            "/new",
            Route::new("t", Endpoint::Live(Arc::new(Large(COMPUTED_PER_VM / 4)))),
        );
        let shared = Response::new(StatusCode(200), None, &[], vec![b'.'; 1 << 20]);
        builder.add(Host::Metadata, "/old", Route::new("t", Endpoint::Fixed(shared)));
        node.content.store().publish(slot, Arc::new(builder.build())).expect("a slot");
    }
    let account = |slot: usize| vms[slot].mailbox.account().used(Resource::Computed);
    for port in 1..=64 {
        assert_eq!(node.ask(0, port, b"GET /old HTTP/1.1\r\nHost: x\r\n\r\n"), 200);
    }
    assert_eq!(account(0), 0, "64 slow readers of a shared MiB cost nothing");
    let new = b"GET /new HTTP/1.1\r\nHost: x\r\n\r\n";
    for port in 101..=104 {
        assert_eq!(node.ask(0, port, new), 200, "{port}");
    }
    assert_eq!((node.ask(0, 105, new), account(0)), (503, COMPUTED_PER_VM));
    assert_eq!(node.raw.stack.stats().refused.computed, 1);
    assert_eq!(node.ask(1, 1, new), 200, "another VM is served");
    node.raw.slot = 0;
    node.raw.send(&Segment::ack(101, 1001 + new.len() as u32, 0).control(Rst));
    assert_eq!(account(0), COMPUTED_PER_VM / 4 * 3);
    assert_eq!(node.ask(0, 106, new), 200, "another connection has ended");
    node.raw.stack.forget(0);
    assert_eq!(account(0), 0);
}

#[test]
fn connections_beyond_a_slots_share_are_displaced_for_other_slots() {
    for bytes in [&b"GET / HT"[..], GET] {
        let mut node = Node::new(StackConfig { connections: 20, share: 8, ..StackConfig::default() });
        let known = record(0, |_| ());
        node.serve(1, &vm(&known), &known);
        for port in 1..=20 {
            node.send(1, port, bytes);
            node.raw.now += Duration::from_millis(1);
        }
        for (slot, displaced) in (10..).zip(1..=12) {
            let replies = node.send(slot, 1, b"GET / HT");
            assert_eq!(replies.iter().filter(|reply| reply.flags.3).count(), 1, "one reset: {replies:?}");
            let stats = node.raw.stack.stats();
            assert_eq!((stats.connections_displaced, stats.connections_evicted), (displaced, 0));
        }
        assert!(node.send(40, 1, b"GET / HT").is_empty(), "the share of eight is protected");
        assert_eq!(node.raw.stack.stats().refused_connections, 1);
    }
}

#[test]
fn incomplete_requests_are_displaced_first_and_waiting_ones_keep_their_share() {
    let mut node = Node::new(StackConfig { connections: 12, share: 9, ..StackConfig::default() });
    node.content.store().expect(1).expect("a slot");
    for port in 1..=9 {
        node.send(1, port, GET);
    }
    for port in 10..=12 {
        node.raw.now += Duration::from_millis(10);
        node.send(1, port, b"GET / HT");
    }
    for (slot, port) in (10..).zip(10..=12) {
        let replies = node.send(slot, 1, b"GET / HT");
        let reset = replies.iter().find(|reply| reply.flags.3).expect("a reset");
        assert_eq!(reset.ports.1, port, "the earliest deadline");
    }
    assert!(node.send(20, 1, b"GET / HT").is_empty(), "nine requests wait for their record");
}

#[test]
fn two_slots_above_their_share_do_not_displace_each_other_endlessly() {
    let mut node = Node::new(StackConfig { connections: 24, ..StackConfig::default() });
    for (slot, count) in [(1, 14), (2, 10)] {
        for port in 1..=count {
            node.send(slot, port, b"GET / HT");
        }
    }
    for port in 11..=12 {
        assert!(!node.send(2, port, b"GET / HT").is_empty(), "{port}");
    }
    for slot in [1, 2] {
        assert!(node.send(slot, 30, b"GET / HT").is_empty(), "both hold twelve connections");
    }
    let stats = node.raw.stack.stats();
    assert_eq!((stats.connections_displaced, stats.refused_connections), (2, 2));
}
