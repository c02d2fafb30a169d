//! Crowds of guests send requests while agents take over from each other, and no request fails.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::answers::PATHS;
use support::eventually::eventually;
use support::netns::Namespace;
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use support::tap_client::{Tally, crowd};

use super::node::{LEAVES_WITHIN, Node, PATIENCE, Place, one_guest};

/// A guest's pause between two rounds. It keeps the guest below the request limit of a VM.
const PAUSE: Duration = Duration::from_millis(100);

/// Number of guests in the crowd; `XDP_IMDS_TAKEOVER_GUESTS` overrides it.
fn crowd_size() -> u16 {
    let set = std::env::var("XDP_IMDS_TAKEOVER_GUESTS").ok().and_then(|text| text.parse().ok());
    set.unwrap_or(64)
}

#[test]
fn two_takeovers_cause_no_failure_or_reset_in_a_crowd_of_guests() {
    if !privileged::or_skip() {
        return;
    }
    for workers in ["1", "2"] {
        crowd_is_taken_over(workers, &Place::Home);
    }
}

#[test]
fn two_takeovers_of_a_pod_with_classifiers_cause_no_failure_or_reset() {
    if !privileged::or_skip() {
        return;
    }
    for workers in ["1", "2"] {
        crowd_is_taken_over(workers, &Place::pod());
    }
}

fn crowd_is_taken_over(workers: &str, place: &Place) {
    let mut node = Node::new();
    let guests: Vec<Identity> =
        (0..crowd_size()).map(|number| Identity::of(number).with_user_data_of(2_000)).collect();
    for guest in &guests {
        guest.write(node.records.path(), 1).expect("a record");
    }
    let taps = node.host.rack(&guests, Shape::default()).expect("taps");
    let mut running = place.agent(&node, &guests, &["--workers", workers]);
    let before = node.identities();
    assert_eq!(before.len(), guests.len());
    let stop = AtomicBool::new(false);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let crowd =
            scope.spawn(|| crowd(guests.iter().cloned().zip(taps).collect(), &PATHS, PAUSE, &stop, PATIENCE));
        // Ends the crowd even if an assertion fails.
        let _stop = Stop(&stop);
        std::thread::sleep(Duration::from_secs(1));
        for side in [1, 0] {
            let next = place.agent(&node, &guests, &["--workers", workers, "--takeover"]);
            let (status, said) =
                std::mem::replace(&mut running, next).ended(LEAVES_WITHIN).expect("the previous agent exits");
            assert!(status.success(), "{status}\n{said}");
            assert!(!said.contains("cut off"), "{said}");
            let cleared = || {
                let now = node.identities();
                anyhow::ensure!(now.values().all(|[.., drain]| *drain == 0) && node.claims() == 0);
                Ok(now)
            };
            let now = eventually(PATIENCE, cleared).expect("no entry refers to the previous agent");
            assert!(now.values().all(|[_, hub, _]| hub / 32 == side), "hubs of side {side}: {now:?}");
            let slots = |all: &BTreeMap<[u8; 16], [u32; 3]>| {
                all.iter().map(|(key, [slot, ..])| (*key, *slot)).collect::<Vec<_>>()
            };
            assert_eq!(slots(&now), slots(&before), "every guest keeps its slot");
            std::thread::sleep(Duration::from_millis(500));
        }
        stop.store(true, Ordering::Relaxed);
        crowd.join().expect("the crowd")
    });
    let failures: Vec<_> = tallies.iter().filter(|tally| tally.rounds.is_err()).collect();
    assert!(failures.is_empty(), "{failures:?}");
    let rounds: usize = tallies.iter().map(|tally| *tally.rounds.as_ref().expect("rounds")).sum();
    let [resets, resent] = [|tally: &Tally| tally.resets, |tally: &Tally| tally.resent]
        .map(|count| tallies.iter().map(count).sum::<usize>());
    println!("{workers} workers: {rounds} rounds, {resets} resets, {resent} segments sent again");
    assert!(rounds >= 2 * guests.len(), "{rounds} rounds: too few for a result");
    assert_eq!(resets, 0);
    // These guests retransmit after as little as 10 ms, and a busy machine sometimes takes longer to answer. One
    // segment per guest and takeover is acceptable.
    assert!(resent <= 2 * guests.len(), "{resent} segments sent again");
}

/// Stops a crowd when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn the_pod_of_a_previous_agent_stays_alive_until_sigterm() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::new();
    let guests: Vec<Identity> =
        (0..crowd_size()).map(|number| Identity::of(number).with_user_data_of(2_000)).collect();
    for guest in &guests {
        guest.write(node.records.path(), 1).expect("a record");
    }
    let taps = node.host.rack(&guests, Shape::default()).expect("taps");
    let pods = ["old", "new"].map(|name| Namespace::new(name).expect("a namespace"));
    let words = ["--takeover", "--linger"];
    let first = node.pod(&pods[0], &guests, &words);
    let stop = AtomicBool::new(false);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let crowd =
            scope.spawn(|| crowd(guests.iter().cloned().zip(taps).collect(), &PATHS, PAUSE, &stop, PATIENCE));
        let _stop = Stop(&stop);
        std::thread::sleep(Duration::from_secs(1));
        let second = node.pod(&pods[1], &guests, &words);
        let alive = || {
            anyhow::ensure!(first.log().contains("lingering until SIGTERM"));
            first.ask("/healthz")
        };
        let (status, body) = eventually(PATIENCE, alive).expect("it lingers");
        assert_eq!((status, body.trim()), (200, "another agent serves the ports of this one"));
        assert_eq!(first.ask("/readyz").expect("an answer").0, 503);
        assert_eq!(second.ask("/readyz").expect("an answer").0, 200);
        let status = first.stop().expect("it ends on SIGTERM");
        assert!(status.success(), "{status}");
        assert_eq!(second.ask("/readyz").expect("an answer").0, 200);
        std::thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::Relaxed);
        crowd.join().expect("the crowd")
    });
    let failures: Vec<_> = tallies.iter().filter(|tally| tally.rounds.is_err() || tally.resets > 0).collect();
    assert!(failures.is_empty(), "{failures:?}");
    assert!(
        tallies.iter().all(|tally| tally.rounds.as_ref().is_ok_and(|rounds| *rounds >= 2)),
        "{tallies:?}"
    );
}

#[test]
fn a_takeover_loses_none_of_a_guests_other_traffic() {
    const PINGS: u32 = 1_000;
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    std::thread::scope(|scope| {
        let pings = scope.spawn(|| guest.ping(support::host::ADDRESS, PINGS));
        let _second = node.agent(&guests, &["--takeover"]);
        assert!(first.ended(LEAVES_WITHIN).expect("it exits").0.success());
        assert_eq!(pings.join().expect("pings").expect("an end"), PINGS);
    });
}
