//! One guest with a Linux stack gets its own metadata by any route; only port and MAC are its identity.

use metadata_common::mac::Mac;
use std::time::Duration;
use support::agent::{ABSORBED, ANSWERED, Agent, IMPOSTOR, PortArgument, STEERED};
use support::answers::PATHS;
use support::guest::{Guest, Route, Spec};
use support::host::{self, Host};
use support::privileged;
use support::record::Identity;
use support::tap::{Backend, Shape};

const PATIENCE: Duration = Duration::from_secs(10);
/// Long enough for three SYNs of a guest that gets no answer (sent at 0, 1 and 3 s).
const THREE_SYNS: Duration = Duration::from_secs(4);

/// A node with records for guests 0 and 1.
fn node() -> (Host, tempfile::TempDir) {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    for number in 0..2 {
        Identity::of(number).write(records.path(), 1).expect("a record");
    }
    (host, records)
}

fn port(guest: &Guest) -> PortArgument {
    PortArgument::new(guest.host_tap().name(), guest.identity().mac)
}

#[test]
fn a_guest_gets_its_own_metadata_on_link_and_through_its_gateway() {
    gets_its_own_metadata(Backend::Calls);
}

#[test]
fn a_guest_behind_vhost_net_gets_its_own_metadata_on_link_and_through_its_gateway() {
    gets_its_own_metadata(Backend::VhostNet);
}

#[track_caller]
fn gets_its_own_metadata(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let shapes = [Shape::default(), Shape::virtio(), Shape { queues: 2, vnet_hdr: true }];
    for route in [Route::OnLink, Route::Gateway] {
        for shape in shapes.into_iter().filter(|shape| backend.takes(*shape)) {
            let (host, records) = node();
            let spec = Spec { route, shape, backend, ..Spec::of(&Identity::of(0)) };
            let guest = Guest::boot(&host, &spec).expect("a guest");
            let agent = Agent::start(host.ns(), records.path(), &[port(&guest)]).expect("an agent");
            for path in PATHS {
                let fetched = guest.fetch_own(path, PATIENCE);
                fetched.unwrap_or_else(|error| panic!("{route:?}, {shape:?}: {error:#}"));
            }
            let metrics = agent.metrics().expect("metrics");
            let ours: u64 = [STEERED, ANSWERED, ABSORBED]
                .map(|kind| metrics.frames(kind).expect("a counter"))
                .iter()
                .sum();
            // Each connection has at least a SYN, a request and a FIN.
            assert!(ours >= 3 * PATHS.len() as u64, "{route:?}, {shape:?}: {ours} frames");
        }
    }
}

#[test]
fn requests_with_a_foreign_mac_are_dropped_and_counted() {
    drops_a_foreign_mac(Backend::Calls);
}

#[test]
fn requests_with_a_foreign_mac_behind_vhost_net_are_dropped_and_counted() {
    drops_a_foreign_mac(Backend::VhostNet);
}

#[track_caller]
fn drops_a_foreign_mac(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let way = |spec| Spec { backend, shape: backend.plain(), ..spec };
    // An unknown MAC, and the MAC of another guest.
    for mac in [Mac([0x52, 0x54, 0, 0xba, 0xdb, 0xad]), Identity::of(1).mac] {
        let (host, records) = node();
        let spec = Spec { mac, route: Route::Gateway, ..Spec::of(&Identity::of(0)) };
        let impostor = Guest::boot(&host, &way(spec)).expect("a guest");
        let honest = Guest::boot(&host, &way(Spec::of(&Identity::of(1)))).expect("a guest");
        let ports = [port(&impostor), port(&honest)];
        let agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
        let before = agent.metrics().expect("metrics");

        let refusal = impostor.fetch("/v1/meta-data", THREE_SYNS).expect_err("no answer");
        assert!(format!("{refusal:#}").contains("timed out"), "{mac}: {refusal:#}");

        let after = agent.metrics().expect("metrics");
        let dropped = |metrics: &support::agent::Metrics| metrics.frames(IMPOSTOR).expect("a counter");
        assert!(dropped(&after) >= dropped(&before) + 3, "{mac}: {} SYNs counted", dropped(&after));
        assert_eq!(
            after.frames(STEERED).expect("a counter"),
            before.frames(STEERED).expect("a counter"),
            "{mac}"
        );
        honest.fetch_own("/v1/meta-data", PATIENCE).expect("the honest guest's answer");
    }
}

#[privileged::test]
fn other_traffic_with_an_unknown_mac_passes() {
    let (host, records) = node();
    let mac = Mac([0x52, 0x54, 0, 0xba, 0xdb, 0xad]);
    let impostor = Guest::boot(&host, &Spec { mac, ..Spec::of(&Identity::of(0)) }).expect("a guest");
    let _agent = Agent::start(host.ns(), records.path(), &[port(&impostor)]).expect("an agent");
    assert_eq!(impostor.ping(host::ADDRESS, 10).expect("a report"), 10);
}

#[privileged::test]
fn a_guest_with_another_guests_ip_address_gets_its_own_metadata() {
    let (host, records) = node();
    let stolen = Identity::of(1).address;
    let thief = Guest::boot(&host, &Spec { address: stolen, ..Spec::of(&Identity::of(0)) }).expect("a guest");
    let owner = Guest::boot(&host, &Spec::of(&Identity::of(1))).expect("a guest");
    let _agent = Agent::start(host.ns(), records.path(), &[port(&thief), port(&owner)]).expect("an agent");
    for guest in [&thief, &owner, &thief] {
        for path in PATHS {
            guest.fetch_own(path, PATIENCE).expect("its own record");
        }
    }
}

#[privileged::test]
fn forged_header_fields_do_not_change_the_answer() {
    let (host, records) = node();
    let guest = Guest::boot(&host, &Spec::of(&Identity::of(0))).expect("a guest");
    let _agent = Agent::start(host.ns(), records.path(), &[port(&guest)]).expect("an agent");
    let other = Identity::of(1);
    let forged = [
        format!("X-Forwarded-For: {}", other.address),
        format!("X-Instance-ID: {}", other.instance_id),
        format!("Host: {}", other.hostname),
    ];
    for header in forged {
        let url = "http://169.254.169.254/v1/meta-data";
        let answer = guest.curl(&["-H", &header, url], PATIENCE).expect("an answer");
        support::answers::check(guest.identity(), "/v1/meta-data", answer.status, &answer.body)
            .unwrap_or_else(|error| panic!("{header}: {error:#}"));
    }
}
