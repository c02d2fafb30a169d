//! Many guests boot at once and each gets its own files.

use std::time::Duration;
use support::agent::{self, Agent, Metrics, PortArgument, Sample};
use support::answers::{self, PATHS};
use support::host::Host;
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use support::tap_client::{storm, tagged_storm};

const GUESTS: u16 = 256;
/// Ends the test if something hangs. Benchmarks measure the storm's speed, this test does not.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn guests_booting_at_once_all_get_their_own_files() {
    if privileged::or_skip() {
        all_get_their_own(1);
    }
}

#[privileged::test]
fn workers_share_the_guests_and_all_get_their_own_files() {
    let metrics = all_get_their_own(2);
    for hub in ["0", "1"] {
        let sample =
            |one: &&Sample| one.name == "xdp_imds_received_frames_total" && one.label("hub") == Some(hub);
        let frames = metrics.samples().iter().find(sample).expect("a sample for each worker").value;
        // Slots are assigned round-robin, so each worker has half of the guests; every request is at least one frame.
        let questions = PATHS.len() * usize::from(GUESTS) / 2;
        assert!(frames >= questions as f64, "worker {hub} had {frames} frames");
    }
}

#[privileged::test]
fn guests_that_send_priority_tags_are_served_by_each_program() {
    for (steer, shape) in [("xdp", Shape::default()), ("xdp", Shape::virtio()), ("tcx", Shape::virtio())] {
        let mut host = Host::new().expect("a node");
        let records = tempfile::tempdir().expect("a directory");
        let guest = Identity::of(0);
        guest.write(records.path(), 1).expect("a record");
        let taps = host.rack(std::slice::from_ref(&guest), shape).expect("a tap");
        let mut words =
            agent::arguments(records.path(), &[PortArgument::new(Host::tap_name(&guest), guest.mac)]);
        words.extend(["--steer".into(), steer.into()]);
        let binary = agent::binary().expect("the agent is built");
        let agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");
        let guests = || std::iter::once(guest.clone()).zip(taps.iter().cloned()).collect();
        // VLAN ID 0, with the priority of background traffic and of voice.
        for tag in [[0x81, 0, 0x20, 0], [0x81, 0, 0xa0, 0]] {
            for outcome in tagged_storm(guests(), &PATHS, PATIENCE, tag) {
                let answers = outcome.answers.unwrap_or_else(|error| panic!("{steer}, {tag:x?}: {error:#}"));
                for one in answers {
                    answers::check(&guest, &one.path, one.status, &one.body).expect(steer);
                }
            }
        }
        let dropped = agent.metrics().and_then(|metrics| metrics.frames("drop_vlan")).expect("a count");
        assert_eq!(dropped, 0, "{steer}");
    }
}

/// Boots all guests on an agent with `workers` workers, checks every answer, and returns the agent's metrics.
fn all_get_their_own(workers: u16) -> Metrics {
    let mut host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let guests: Vec<Identity> = (0..GUESTS)
        .map(|number| Identity::of(number).with_user_data_of(1_000 + usize::from(number)))
        .collect();
    for guest in &guests {
        guest.write(records.path(), 1).expect("a record");
    }
    let taps = host.rack(&guests, Shape::default()).expect("taps");
    let ports: Vec<_> =
        guests.iter().map(|guest| PortArgument::new(Host::tap_name(guest), guest.mac)).collect();
    let mut words = agent::arguments(records.path(), &ports);
    words.extend(["--workers".into(), workers.to_string().into()]);
    let binary = agent::binary().expect("the agent is built");
    let agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");

    let outcomes = storm(guests.into_iter().zip(taps).collect(), &PATHS, PATIENCE);

    let mut failures = Vec::new();
    for outcome in outcomes {
        let checked = outcome.answers.and_then(|all| {
            all.iter().try_for_each(|one| answers::check(&outcome.identity, &one.path, one.status, &one.body))
        });
        if let Err(error) = checked {
            failures.push(format!("{}: {error:#}", outcome.identity.hostname));
        }
    }
    assert!(failures.is_empty(), "{} of {GUESTS} guests failed:\n{}", failures.len(), failures.join("\n"));
    agent.metrics().expect("metrics")
}
