//! A guest behind a lossy link gets complete answers.

use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, NIC, Spec};
use support::host::Host;
use support::privileged;
use support::pump::Faults;
use support::record::Identity;

/// The largest user-data a record may hold by default.
const USER_DATA: usize = 64 * 1024;
const FETCHES: usize = 4;
/// Longest time of one fetch.
///
/// A fetch takes some 50 segments, and the link loses at most one frame in five, retransmissions included. A lost SYN
/// or request costs seconds, because the guest backs off exponentially. The sum stays far below this bound.
const PATIENCE: Duration = Duration::from_secs(180);

#[test]
fn large_user_data_survives_a_link_that_loses_every_fifth_frame() {
    fetch_user_data_over(Faults::loss(0.2));
}

#[test]
fn large_user_data_survives_a_link_that_loses_duplicates_and_reorders() {
    fetch_user_data_over(Faults { loss: 0.1, duplicate: 0.1, reorder: 0.2, ..Faults::default() });
}

#[test]
fn large_user_data_passes_a_tap_with_a_smaller_mtu_than_the_guests_nic() {
    if !privileged::or_skip() {
        return;
    }
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0).with_user_data_of(USER_DATA);
    identity.write(records.path(), 1).expect("a record");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let tap = guest.host_tap().name();
    // The guest's NIC keeps an MTU of 1,500, as the NIC of a container behind the guest would.
    host.ns().ip(&format!("link set {tap} mtu 1450")).expect("a narrow tap");
    let agent = Agent::start(host.ns(), records.path(), &[PortArgument::new(tap, identity.mac)]);
    let agent = agent.expect("an agent");
    let fetched = guest.fetch_own("/v1/user-data", PATIENCE);
    fetched.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

fn fetch_user_data_over(faults: Faults) {
    if !privileged::or_skip() {
        return;
    }
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0).with_user_data_of(USER_DATA);
    identity.write(records.path(), 1).expect("a record");
    let seed = support::seed::seed();
    let spec = Spec { to_host: faults, to_guest: faults, seed, ..Spec::of(&identity) };
    let guest = Guest::boot(&host, &spec).expect("a guest");
    // Frames of address resolution are lost as well. The default of three attempts would fail too often.
    for kind in ["mcast_solicit", "ucast_solicit"] {
        guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/{kind}"), "20").expect("a setting");
    }
    guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/retrans_time_ms"), "100").expect("a setting");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    for fetch in 0..FETCHES {
        guest
            .fetch_own("/v1/user-data", PATIENCE)
            .unwrap_or_else(|error| panic!("fetch {fetch}, seed {seed}: {error:#}\n{}", agent.log()));
    }
    let harm = |moved: support::pump::Moved| moved.lost;
    assert!(harm(guest.sent()) > 0 && harm(guest.got()) > 0, "seed {seed}: one direction lost nothing");
}
