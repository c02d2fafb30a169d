//! Connections and writes that are under way when an agent is taken over are finished.

use std::time::Duration;

use serde_json::json;
use support::eventually::eventually;
use support::host::Host;
use support::privileged;
use support::record::Identity;

use super::node::{LEAVES_WITHIN, PATIENCE, Place, one_guest};
use super::talk::{Client, says_close};

#[test]
fn long_connections_finish_at_their_agent_and_their_writes_survive() {
    if !privileged::or_skip() {
        return;
    }
    long_connections_finish(&Place::Home);
}

#[test]
fn long_connections_of_a_pod_with_classifiers_finish_and_their_writes_survive() {
    if !privileged::or_skip() {
        return;
    }
    long_connections_finish(&Place::pod());
}

fn long_connections_finish(place: &Place) {
    const LONG: usize = 1 << 20;
    let (node, guest) = one_guest(|record| {
        record["user_data"] = json!({"text": "x".repeat(LONG)});
        record["serve"] = json!({"limits": {"user_data": LONG}});
        record["metadata"] = json!({"colour": "red"});
    });
    let guests = [guest.identity().clone()];
    let first = place.agent(&node, &guests, &[]);
    let google = "Metadata-Flavor: Google\r\n";
    let attribute = "/computeMetadata/v1/instance/guest-attributes/a";
    let put = |client: &mut Client, name: &str, value: &str| {
        let fields = format!("{google}Content-Length: {}\r\n\r\n{value}", value.len());
        client.transmit(&format!("PUT {attribute}/{name} HTTP/1.1\r\nHost: x\r\n{fields}"));
        client.answer().0
    };
    let get = |client: &mut Client, name: &str| client.ask(&format!("GET {attribute}/{name}"), google);

    let mut kept = Client::connect(&guest);
    assert_eq!(put(&mut kept, "before", "1"), 200);
    let ttl = "X-aws-ec2-metadata-token-ttl-seconds: 600\r\nContent-Length: 0\r\n";
    let (status, _, token) = Client::connect(&guest).ask("PUT /latest/api/token", ttl);
    assert_eq!(status, 200);
    let mut slow = Client::connect(&guest);
    slow.transmit("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut parked = Client::connect(&guest);
    parked.transmit(&format!(
        "GET /computeMetadata/v1/instance/attributes/colour?wait_for_change=true&timeout_sec=600 HTTP/1.1\r\nHost: x\r\n{google}\r\n"
    ));
    // This write is in progress during the takeover.
    let mut writing = Client::connect(&guest);
    writing.transmit(&format!(
        "PUT {attribute}/during HTTP/1.1\r\nHost: x\r\n{google}Content-Length: 4\r\n\r\nha"
    ));
    std::thread::sleep(Duration::from_secs(1));

    let _second = place.agent(&node, &guests, &["--takeover"]);
    let (status, head, body) = parked.answer();
    assert_eq!(
        (status, says_close(&head), &body[..]),
        (200, true, &b"red"[..]),
        "answered with the current value"
    );
    assert!(kept.ends(), "an idle connection is closed, not reset");
    assert_eq!(
        get(&mut Client::connect(&guest), "before").2,
        b"1",
        "written through the first agent, read through the second"
    );
    writing.transmit("lf");
    let (status, head, _) = writing.answer();
    assert_eq!((status, says_close(&head)), (200, true));
    assert_eq!(get(&mut Client::connect(&guest), "during").2, b"half", "written during the takeover");
    let token = format!("X-aws-ec2-metadata-token: {}\r\n", String::from_utf8(token).expect("text"));
    assert_eq!(Client::connect(&guest).ask("GET /latest/meta-data/hostname", &token).0, 200);
    let (status, head, body) = slow.answer();
    assert_eq!((status, says_close(&head), body.len()), (200, false, LONG), "requested before the takeover");
    assert!(slow.ends());
    drop((parked, writing, slow, kept));
    let (status, said) = first.ended(LEAVES_WITHIN).expect("the previous agent exits");
    assert!(status.success() && !said.contains("cut off"), "{status}\n{said}");
}

#[test]
fn a_port_is_released_while_the_previous_agent_drains() {
    if !privileged::or_skip() {
        return;
    }
    let (node, guest) = one_guest(|record| {
        record["network"]["nics"][0]["port"] = json!({"ifname": Host::tap_name(&Identity::of(0))});
        record["user_data"] = json!({"text": "x".repeat(1 << 20)});
        record["serve"] = json!({"limits": {"user_data": 1 << 20}});
    });
    let first = node.agent(&[], &[]);
    eventually(PATIENCE, || guest.fetch("/v1/meta-data", PATIENCE).map(drop)).expect("served");
    let mut slow = Client::connect(&guest);
    slow.transmit("GET /v1/user-data HTTP/1.1\r\nHost: x\r\n\r\n");
    std::thread::sleep(Duration::from_millis(500));
    let _second = node.agent(&[], &["--takeover"]);
    std::fs::remove_file(guest.identity().path(node.records.path())).expect("a record");
    let tap = guest.host_tap().name();
    eventually(LEAVES_WITHIN / 4, || {
        let shown = node.host.ns().ip(&format!("link show {tap}"))?;
        anyhow::ensure!(!shown.contains("xdp"), "{shown}");
        Ok(())
    })
    .expect("its program is detached from the tap");
    assert!(!first.log().contains("leaving"), "the previous agent has exited:\n{}", first.log());
}
