//! The host announces an event to each of many VMs, whose guests wait for news.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use metadata_content::source::RecordSource;
use metadata_control::instances::add_event;
use serde_json::{Value, json};
use support::agent::{Agent, PortArgument};
use support::eventually::eventually;
use support::exposition::total;
use support::host::Host;
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use support::tap_client::storm;

/// Ends the test if something hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Other numbers of guests and of clients that announce, to measure with; the times are printed.
const GUESTS: &str = "XDP_IMDS_DRAIN_GUESTS";
const CLIENTS: &str = "XDP_IMDS_DRAIN_CLIENTS";

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[privileged::test]
fn each_vm_of_a_node_that_is_drained_is_told_its_own_event() {
    let (count, clients) = (number(GUESTS, 64), number(CLIENTS, 4));
    let mut host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let guests: Vec<_> = (0..u16::try_from(count).expect("few")).map(Identity::of).collect();
    guests.iter().for_each(|guest| guest.write(records.path(), 1).expect("a record"));
    let taps = host.rack(&guests, Shape::default()).expect("taps");
    let ports: Vec<_> = guests.iter().map(|it| PortArgument::new(Host::tap_name(it), it.mac)).collect();
    let agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
    let (run, told) = (records.path().join("run"), channel());

    let outcomes = thread::scope(|scope| {
        let all = guests.iter().cloned().zip(taps).collect();
        let begun = Instant::now();
        let storm = scope.spawn(|| storm(all, &["/v1/events?incarnation=1&timeout=600"], PATIENCE));
        eventually(PATIENCE, || {
            let waiting = total(&agent.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change")));
            ensure!(waiting == count as u64, "{waiting} guests wait");
            Ok(())
        })
        .expect("every guest waits");
        for client in 0..clients {
            let (guests, run, told) = (&guests, &run, told.0.clone());
            scope.spawn(move || {
                for guest in guests.iter().skip(client).step_by(clients) {
                    let event = json!({"id": guest.hostname, "kind": "freeze", "description": "drain"});
                    let event = serde_json::from_value(event).expect("an event");
                    let name = format!("{}.yaml", guest.hostname);
                    let asked = begun.elapsed();
                    add_event(run, RecordSource::File, &name, &event).expect("it is announced");
                    told.send((guest.number, asked, begun.elapsed())).expect("somebody counts");
                }
            });
        }
        storm.join().expect("the guests")
    });
    drop(told.0);
    let mut asked: Vec<_> = told.1.iter().collect();
    asked.sort_unstable();
    assert_eq!(asked.len(), count);

    let mut delays = Vec::new();
    for (outcome, (_, asked, _)) in outcomes.into_iter().zip(&asked) {
        let name = &outcome.identity.hostname;
        let answers = outcome.answers.unwrap_or_else(|error| panic!("{name}: {error:#}"));
        let [answer] = &answers[..] else { panic!("{name}: {answers:?}") };
        let told: Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert_eq!((answer.status, told["events"].as_array().map(Vec::len)), (200, Some(1)), "{told}");
        assert_eq!(told["events"][0]["id"], **name, "another guest's event");
        delays.push(outcome.took.saturating_sub(*asked));
    }
    delays.sort_unstable();
    let at = |share: usize| delays[(delays.len() - 1) * share / 100];
    let first = asked.iter().map(|(_, asked, _)| *asked).min().unwrap_or_default();
    let last = asked.iter().map(|(.., done)| *done).max().unwrap_or_default();
    eprintln!(
        "{count} guests, {clients} clients: event to guest p50 {:?}, p99 {:?}, most {:?}; all announced and stored in {:?}",
        at(50),
        at(99),
        at(100),
        last.saturating_sub(first)
    );
}
