//! Unmodified clients react to what the host announces: a handler of termination notices and a library of EC2 from their
//! package registry, and a unit of systemd that asks by curl.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use metadata_content::source::RecordSource;
use metadata_control::instances::{add_event, wait_for_acknowledgement};
use serde_json::{Value, json};
use support::agent::Agent;
use support::eventually::eventually;
use support::exposition::total;
use support::inside::Libraries;
use support::privileged;
use support::process::write_script;
use support::scene::OneGuest;

const PATIENCE: Duration = Duration::from_secs(30);
/// Requests of a client that has looked and found nothing.
const LOOKS: u64 = 20;

fn name(node: &OneGuest) -> String {
    let path = node.guest.identity().path(node.records.path());
    path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned()
}

fn announce(node: &OneGuest, event: Value) {
    let event = serde_json::from_value(event).expect("an event");
    add_event(&node.file("run"), RecordSource::File, &name(node), &event).expect("it is announced");
}

/// Waits until the guest has sent this many requests.
fn looks(agent: &Agent<'_>, least: u64) {
    eventually(PATIENCE, || {
        let asked = total(&agent.metrics()?, "xdp_imds_requests_total", None);
        ensure!(asked >= least, "{asked} requests");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}: {}", agent.log()));
}

/// What a client prints that looks again and again, and ends once it is told.
fn told(script: &str, dialect: &str, events: &[Value]) -> Option<Value> {
    let libraries = Libraries::or_skip()?;
    let node = OneGuest::with_record(|record| record["serve"] = json!({"dialects": [dialect]}));
    let agent = node.agent();
    Some(thread::scope(|scope| {
        let client = scope.spawn(|| libraries.run(node.guest.ns(), script));
        looks(&agent, LOOKS);
        assert!(!client.is_finished(), "nothing was announced: {:?}", client.join().expect("no panic"));
        events.iter().for_each(|event| announce(&node, event.clone()));
        client.join().expect("no panic").expect("the client reacts")
    }))
}

#[test]
fn termination_handler_drains_its_node_at_a_notice_of_ec2_and_of_gce() {
    for dialect in ["ec2", "gce"] {
        let preempt = json!({"id": "p", "kind": "preempt"});
        let Some(answer) = told(include_str!("termination_handler.py"), dialect, &[preempt]) else { return };
        let drain = ["node", "drain", "-enable", "-self", "-force", "-ignore-system"];
        assert_eq!(answer, json!(drain), "{dialect}");
    }
}

#[test]
fn ec2_metadata_tells_of_a_preemption_and_of_a_termination() {
    let time = "2030-01-01T00:00:00Z";
    let events = [
        json!({"id": "p", "kind": "preempt", "not_before": time}),
        json!({"id": "t", "kind": "terminate", "state": "started"}),
    ];
    let Some(answer) = told(include_str!("ec2_events.py"), "ec2", &events) else { return };
    let expected =
        json!({"action": "terminate", "time": "2030-01-01T00:00:00+00:00", "lifecycle": "Terminated"});
    assert_eq!(answer, expected);
}

/// A program in the guest, which ends with the test.
struct Unit(Child);

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_unit_that_waits_by_curl_saves_its_work_before_the_host_goes_on() {
    if !privileged::or_skip() {
        return;
    }
    let node = OneGuest::with_record(|_| {});
    let agent = node.agent();
    let (save, saved) = (node.file("save"), node.file("saved"));
    write_script(&save, &format!("#!/bin/sh\necho \"$1\" >> {}\n", saved.display())).expect("a script");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/drain.sh");
    let mut command = Command::new("sh");
    command.arg(script).arg(&save).stdin(Stdio::null()).stderr(Stdio::null());
    let _unit = Unit(node.guest.ns().spawn(&mut command).expect("it runs"));
    eventually(PATIENCE, || {
        let waiting = total(&agent.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change")));
        ensure!(waiting == 1, "{waiting} requests wait");
        Ok(())
    })
    .expect("the unit waits");
    for (id, kind) in [("drain-1", "freeze"), ("stop", "terminate")] {
        announce(&node, json!({"id": id, "kind": kind, "description": "the host is drained"}));
        let limit = Duration::from_secs(30);
        let (run, name) = (node.file("run"), name(&node));
        let document = wait_for_acknowledgement(&run, RecordSource::File, &name, id, limit);
        let document = document.unwrap_or_else(|error| panic!("{id}: {error}"));
        assert!(document.events[0].acknowledged.is_some(), "{id}");
        let done = std::fs::read_to_string(&saved).expect("the guest saved its work");
        assert_eq!(done.lines().last(), Some(id), "it is ready before it has saved");
    }
    let all = std::fs::read_to_string(&saved).expect("the guest saved its work");
    assert_eq!(all.lines().collect::<Vec<_>>(), ["drain-1", "stop"], "each once");
}
