//! The agent follows taps and records that appear, change and vanish while it runs.

use anyhow::{Result, ensure};
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::scene::ManyNamespaces;
use support::tap::Shape;

/// Time limit of one request. It is short, so that a repeated request soon shows a change.
const REQUEST: Duration = Duration::from_secs(2);
/// Longest wait for the agent to notice a change.
const NOTICE: Duration = Duration::from_secs(15);
const PATH: &str = "/v1/user-data";

fn port_of(identity: &Identity) -> PortArgument {
    PortArgument::new(Host::tap_name(identity), identity.mac)
}

fn fetch_own(guest: &Guest) -> Result<()> {
    guest.fetch_own(PATH, REQUEST).map(drop)
}

/// Sends one request of a guest that must already be served.
fn is_served(guest: &Guest) -> Result<()> {
    guest.fetch_own(PATH, NOTICE).map(drop)
}

#[privileged::test]
fn a_tap_that_appears_later_is_served_and_so_is_the_next_of_its_name() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0);
    identity.write(records.path(), 1).expect("a record");
    let agent = Agent::start(host.ns(), records.path(), &[port_of(&identity)]).expect("an agent");
    for life in 0..4 {
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        eventually(NOTICE, || fetch_own(&guest))
            .unwrap_or_else(|error| panic!("life {life}: {error:#}\n{}", agent.log()));
    }
}

#[privileged::test]
fn the_end_of_one_guest_does_not_affect_the_others() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identities: Vec<_> = (0..3).map(Identity::of).collect();
    for identity in &identities {
        identity.write(records.path(), 1).expect("a record");
    }
    let ports: Vec<_> = identities.iter().map(port_of).collect();
    let stays = Guest::boot(&host, &Spec::of(&identities[0])).expect("a guest");
    let goes = Guest::boot(&host, &Spec::of(&identities[1])).expect("a guest");
    let _agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
    is_served(&stays).expect("an answer before");
    is_served(&goes).expect("an answer before");
    drop(goes);
    is_served(&stays).expect("an answer right after");
    let comes = Guest::boot(&host, &Spec::of(&identities[2])).expect("a guest");
    eventually(NOTICE, || fetch_own(&comes)).expect("an answer to the new guest");
    is_served(&stays).expect("an answer at the end");
}

#[privileged::test]
fn a_tap_in_another_namespace_is_served() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let pods: Vec<_> =
        (0..2).map(|_| Host::inside(Namespace::new("pod").expect("a namespace")).expect("a pod")).collect();
    let identities: Vec<_> = (0..2).map(Identity::of).collect();
    // Both namespaces have the same names and indexes of interfaces: only the namespace distinguishes the guests.
    let tap = |pod: &Host, identity: &Identity| {
        let tap = support::tap::Tap::create(pod.ns(), "tap", Shape::virtio()).expect("a tap");
        pod.ns().ip("link set tap up").expect("the tap goes up");
        Guest::boot_on(
            std::sync::Arc::new(tap),
            Namespace::new("guest").expect("a namespace"),
            &Spec { shape: Shape::virtio(), ..Spec::of(identity) },
        )
        .expect("a guest")
    };
    let guests: Vec<_> = pods.iter().zip(&identities).map(|(pod, identity)| tap(pod, identity)).collect();
    let ports: Vec<_> = pods
        .iter()
        .zip(&identities)
        .map(|(pod, identity)| PortArgument::new("tap", identity.mac).within(pod.ns()))
        .collect();
    for identity in &identities {
        identity.write(records.path(), 1).expect("a record");
    }
    let agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
    for guest in &guests {
        fetch_own(guest).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    }
}

#[privileged::test]
fn the_agent_follows_a_record_that_appears_changes_and_vanishes() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let first = Identity::of(0);
    let guest = Guest::boot(&host, &Spec::of(&first)).expect("a guest");
    let agent = Agent::start(host.ns(), records.path(), &[port_of(&first)]).expect("an agent");

    first.write(records.path(), 1).expect("a record");
    eventually(NOTICE, || fetch_own(&guest)).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));

    let second = first.clone().with_user_data_of(5_000);
    second.write(records.path(), 2).expect("a newer record");
    eventually(NOTICE, || {
        let fetched = guest.fetch(PATH, REQUEST)?;
        support::answers::check(&second, PATH, fetched.status, &fetched.body)
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));

    std::fs::remove_file(second.path(records.path())).expect("the record is removed");
    eventually(NOTICE, || {
        let status = guest.fetch(PATH, REQUEST)?.status;
        ensure!(status == 404, "a guest without a record gets status {status}");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

#[privileged::test]
fn an_invalid_record_keeps_its_last_good_state_and_is_logged() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0);
    identity.write(records.path(), 1).expect("a record");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let agent = Agent::start(host.ns(), records.path(), &[port_of(&identity)]).expect("an agent");
    is_served(&guest).expect("the good record");

    let path = identity.path(records.path());
    replace(&path, "schema: vmrecord/1\ngeneration: two\n").expect("a bad record");
    let name = path.file_name().expect("a name").to_string_lossy().into_owned();
    eventually(NOTICE, || {
        // The log names file and line in a compiler's format.
        ensure!(agent.log().contains(&format!("{name}:2")), "the log does not name {name}:2");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    is_served(&guest).expect("the last good record");

    identity.write(records.path(), 3).expect("a corrected record");
    is_served(&guest).expect("the corrected record");
}

// VMs in a hundred namespaces: the agent serves each in its namespace, and the next agent serves all after a kill.

const NAMESPACES: u16 = 100;
/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest waits for an answer on one connection.
const ATTEMPT: Duration = Duration::from_secs(1);

#[privileged::test]
fn the_next_agent_answers_guests_of_a_hundred_namespaces_after_a_kill() {
    for steer in ["auto", "tcx"] {
        let node = ManyNamespaces::new(NAMESPACES, &["--steer", steer]).expect("a node");
        let agent = node.agent().expect("an agent");
        node.all_ask(PATIENCE).unwrap_or_else(|error| panic!("{steer}: {error:#}"));
        agent.kill().expect("killed");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| node.all_ask_again(PATIENCE, ATTEMPT));
            let _agent = node.agent().expect("the next agent");
            let asked = asking.join().expect("no panic");
            asked.unwrap_or_else(|error| panic!("{steer}: {error:#}"));
        });
    }
}
