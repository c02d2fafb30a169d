//! Observation of the agent allocates no memory: a probe allocates nothing, and an audited request allocates no more
//! than a request that is not audited.

use std::alloc::System;
use std::sync::Arc;
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_content::http::{Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::store::{Endpoint, Host, Responses, Route, Store, VmState};
use metadata_datapath::stack::{ConnectionAction, Exchange as _, Service as _};
use metadata_datapath::worker::Heartbeat;
use metadata_user::agent::Health;
use metadata_user::service::MetadataService;
use metadata_user::service::audit::Tape;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use support::wire::at;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const GET: &[u8] = b"GET /latest/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\nConnection: close\r\n\r\n";

/// The number of allocations for one request over a connection of its own.
fn request(serve: &mut MetadataService) -> usize {
    let connection = Connection {
        slot: 0,
        local: ([169, 254, 169, 254].into(), 80),
        remote: ([10, 0, 0, 1].into(), 40_000),
    };
    let region = Region::new(ALLOCATOR);
    let mut exchange = serve.open(at(Duration::ZERO), connection);
    assert_eq!(exchange.receive(at(Duration::ZERO), GET), GET.len());
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

#[test]
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
