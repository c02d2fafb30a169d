//! If either agent dies during a takeover, guests are served again after the next start at the latest. A refused
//! takeover changes nothing.

use std::time::Duration;

use serde_json::json;
use support::eventually::eventually;
use support::privileged;

use super::node::{LEAVES_WITHIN, PATIENCE, one_guest};
use super::talk::{Client, says_close};

#[test]
fn an_agent_keeps_serving_if_its_successor_dies_before_the_promise() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let agent = node.agent(&[guest.identity().clone()], &[]);
    for phase in ["hello", "drain"] {
        let mut kept = Client::connect(&guest);
        kept.transmit("GET /v1/meta-data HTTP/1.1\r\nHos");
        let mut taker = node.taker();
        taker.go(phase);
        drop(taker);
        std::thread::sleep(Duration::from_millis(500));
        eventually(PATIENCE, || agent.metrics().map(drop)).expect("metrics are available again");
        kept.transmit("t: x\r\n\r\n");
        let (status, head, _) = kept.answer();
        assert_eq!((status, says_close(&head)), (200, false), "{phase}");
        assert_eq!(kept.ask("GET /v1/meta-data", "").0, 200, "{phase}: the connection still works");
        assert_eq!(node.claims(), 0, "{phase}");
    }
    assert!(node.identities().values().all(|[_, hub, drain]| (*hub, *drain) == (0, 0)));
    // The agent accepts the next takeover.
    let _next = node.agent(&[guest.identity().clone()], &["--takeover"]);
    assert!(agent.ended(LEAVES_WITHIN).expect("it exits").0.success());
}

#[test]
fn a_successor_dead_after_the_promise_leaves_ports_closed_until_the_next_start() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    let agent = node.agent(&guests, &[]);
    let before = node.identities();
    let mut taker = node.taker();
    taker.go("take");
    drop(taker);
    assert!(agent.ended(LEAVES_WITHIN).expect("it exits").0.success());
    assert_eq!(node.bpffs.port_links().len(), 1, "its port is closed");
    assert!(guest.fetch("/v1/meta-data", Duration::from_secs(2)).is_err(), "no agent answers");
    let _next = node.agent(&guests, &["--takeover"]);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
    assert_eq!(node.identities(), before);
}

#[test]
fn an_agent_that_dies_while_draining_harms_no_other_guest() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|record| {
        record["user_data"] = json!({"text": "x".repeat(1 << 20)});
        record["serve"] = json!({"limits": {"user_data": 1 << 20}});
    });
    let guests = [guest.identity().clone()];
    let first = node.agent(&guests, &[]);
    let mut slow = Client::connect(&guest);
    slow.transmit("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    std::thread::sleep(Duration::from_millis(500));
    let second = node.agent(&guests, &["--takeover"]);
    first.kill().expect("it still serves the slow guest");
    let fetched = guest.fetch("/v1/meta-data", PATIENCE).expect("the second agent serves");
    assert_eq!(fetched.status, 200);
    let cleared = || {
        anyhow::ensure!(node.identities().values().all(|[.., drain]| *drain == 0) && node.claims() == 0);
        Ok(())
    };
    eventually(PATIENCE, cleared).expect("no entry refers to the dead agent");
    assert!(second.eventually_logs("ended before its connections did"), "{}", second.log());
}

#[test]
fn a_newer_protocol_and_a_second_takeover_are_refused_with_advice() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let _agent = node.agent(&[guest.identity().clone()], &[]);
    let mut newer = node.taker();
    newer.transmit(&json!({"say": "hello", "oldest": 3, "newest": 7, "release": "99.0"}));
    let refused = newer.receive();
    assert_eq!(refused["say"], "no");
    assert!(
        refused["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("stop the running agent and start the new one"))
    );
    let mut first = node.taker();
    first.go("hello");
    let mut second = node.taker();
    second.transmit(&json!({"say": "hello", "oldest": 1, "newest": 9, "hats": 3}));
    assert!(second.receive()["reason"].as_str().is_some_and(|reason| reason.contains("under way")));
    drop(first);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[test]
fn the_next_agent_of_each_release_is_handed_the_ports() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let guests = [guest.identity().clone()];
    for sample in golden::all("handover") {
        let agent = node.agent(&guests, &[]);
        assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
        let before = node.identities();
        let text = String::from_utf8(sample.bytes).expect("text");
        let said = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["say"].clone();
        let mut taker = node.taker();
        // The messages after these belong to connections that the previous agent still serves; here it has none.
        for line in text.lines().take_while(|line| !line.contains(r#""say":"ask""#)) {
            match line.split_once(' ').expect("an agent and its message") {
                ("next", message) => taker.transmit(&serde_json::from_str(message).expect("JSON")),
                (_, message) => assert_eq!(taker.receive()["say"], said(message), "{}", sample.release),
            }
        }
        assert_eq!(taker.receive()["say"], "done", "{}", sample.release);
        assert!(agent.ended(LEAVES_WITHIN).expect("it exits").0.success());
        assert_eq!(node.identities(), before, "{}", sample.release);
    }
    let _next = node.agent(&guests, &[]);
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}

#[test]
fn a_takeover_without_a_running_agent_is_a_plain_start() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|_| {});
    let agent = node.agent(&[guest.identity().clone()], &["--takeover"]);
    assert!(agent.eventually_logs("nothing to take over"), "{}", agent.log());
    assert!(guest.fetch("/v1/meta-data", PATIENCE).is_ok());
}
