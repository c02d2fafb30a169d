//! A rack of guests boots at once and each gets its own files.

use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::answers::{self, PATHS};
use support::host::Host;
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use support::tap_client::storm;

const GUESTS: u16 = 256;
/// A hang must end the test; how fast a storm is, benchmarks say.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn guests_booting_at_once_all_get_their_own_files() {
    if !privileged::or_skip() {
        return;
    }
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
    let _agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");

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
}
