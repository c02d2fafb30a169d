//! The CPU time of a request from its bytes to the pieces of its answer, without TCP:
//! `cargo bench -p xdp-imds-tests --bench serve_cost`.
//!
//! The guests send cloud-init's requests in turn. The responses of a VM have therefore left the CPU's cache before its
//! next request, as in a boot storm.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_content::dialect;
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Record;
use metadata_content::sink::Outbox;
use metadata_content::store::{Interner, Store, VmState};
use metadata_content::token::Keyring;
use metadata_datapath::stack::{ConnectionAction, Exchange as _, Service as _};
use metadata_feed::state::mailboxes::Mailboxes;
use metadata_user::service::MetadataService;
use support::question;
use support::wire::at;

/// Approximate number of requests in one measurement.
const REQUESTS: u32 = 400_000;
const PATHS: [&str; 4] = [
    "/v1/meta-data",
    "/openstack/2018-08-27/meta_data.json",
    "/2009-04-04/meta-data/block-device-mapping/ami",
    "/latest/user-data",
];

/// CPU time of this thread. Other load on the machine affects it only through the caches.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat of the kernel");
    let first = stat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(first.expect("nanoseconds on the CPU"))
}

fn content(guests: u32) -> Arc<OnDemand> {
    let store = Store::new(guests);
    let (keyring, mut interner) = (Arc::new(Keyring::ephemeral()), Interner::new());
    let mailboxes = Mailboxes::in_memory(Outbox::detached());
    for slot in 0..guests {
        let mut record = question::typical_record(slot, None);
        record["serve"]["limits"] = serde_json::json!({ "rps": 1_000_000, "burst": 1_000_000 });
        let record = Arc::new(Record::parse("vm.json", &record.to_string()).expect("a good record").0);
        let vm = VmState::of(
            &record,
            Arc::clone(&keyring),
            mailboxes.for_record(metadata_content::source::RecordSource::File, "vm.json", &record),
        );
        let responses = Arc::new(dialect::render(&record, &mut interner, vm));
        store.publish(slot, responses).expect("a slot of the table");
    }
    Arc::new(OnDemand::new(store))
}

fn main() {
    for guests in [1, 100, 1_000, 4_000] {
        let mut serve = MetadataService::new(content(guests));
        // The time continues from path to path, because the guests' token buckets keep their state.
        let mut now = Duration::ZERO;
        for path in PATHS {
            let get = format!(
                "GET {path} HTTP/1.1\r\nHost: 169.254.169.254\r\nUser-Agent: Cloud-Init/25.1\r\n\
                 Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n"
            );
            let rounds = (REQUESTS / guests).max(1);
            let start = on_cpu();
            let mut bytes = 0;
            for _ in 0..rounds {
                now += Duration::from_millis(1);
                for slot in 0..guests {
                    bytes += ask(&mut serve, slot, at(now), get.as_bytes());
                }
            }
            let requests = f64::from(rounds) * f64::from(guests);
            let ns = on_cpu().saturating_sub(start).as_nanos() as f64 / requests;
            println!(
                "{guests:5} guests, {path:48} {ns:5.0} ns per request, {:5.0} bytes",
                bytes as f64 / requests
            );
        }
    }
}

/// Sends one request over its own connection; returns the length of the answer in bytes.
fn ask(serve: &mut MetadataService, slot: u32, now: metadata_common::time::Now, get: &[u8]) -> usize {
    let connection =
        Connection { slot, local: ([169, 254, 169, 254].into(), 80), remote: ([10, 0, 0, 1].into(), 40_000) };
    let mut exchange = serve.open(now, connection);
    assert_eq!(exchange.receive(now, get), get.len());
    let mut sent = 0;
    loop {
        match black_box(exchange.next(now)) {
            ConnectionAction::Send(bytes) | ConnectionAction::SendWithin { bytes, .. } => sent += bytes.len(),
            ConnectionAction::Wait { .. } | ConnectionAction::Close | ConnectionAction::Abort => return sent,
        }
    }
}
