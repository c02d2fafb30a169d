//! Unmodified clients react to what the host announces: a handler of termination notices and a library of EC2 from their
//! package registry, Pacemaker's resource agent for Azure from Debian, and a unit of systemd that asks by curl.

use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{fs, thread};

use anyhow::ensure;
use metadata_content::source::RecordSource;
use metadata_control::instances::{add_event, events, wait_for_acknowledgement};
use serde_json::{Value, json};
use support::agent::Agent;
use support::eventually;
use support::exposition::total;
use support::guest::event_unit_file;
use support::inside::{self, Libraries, SCRIPT_SECONDS};
use support::packages::{Packages, With};
use support::privileged;
use support::process::write_script;
use support::scene::OneGuest;
use tempfile::TempDir;

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

/// A cluster of the guest, `node-a`, and another node. Stand-ins for Pacemaker's tools keep it in a directory.
struct Cluster<'a> {
    node: &'a OneGuest,
    packages: &'a Packages,
    directory: TempDir,
}

impl<'a> Cluster<'a> {
    fn new(node: &'a OneGuest, packages: &'a Packages) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["crm_attribute", "crm_node", "crm_resource", "crm_simulate"] {
            write_script(&directory.path().join(name), include_str!("pacemaker.sh")).expect("a script");
        }
        Self { node, packages, directory }
    }

    /// Runs the resource agent's action `monitor` once, for events of these types, while the guest's resource is in
    /// this state. Pacemaker repeats that every 10 s.
    fn monitor(&self, types: &str, resource: &str) {
        let directory = self.directory.path();
        let line =
            format!("web (ocf::heartbeat:nginx): Started: web_start_0 (node=node-a, call=9): {resource}\n");
        fs::write(directory.join("operations"), line).expect("a file");
        let root = self.packages.root().join("usr/lib/ocf");
        let mut command = inside::command(directory, SCRIPT_SECONDS).expect("a command");
        command.args(["unshare", "--uts", "sh", "-ec", "hostname node-a; exec \"$1\" monitor", "sh"]);
        command.arg(root.join("resource.d/heartbeat/azure-events-az"));
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", directory.display());
        command.env("PATH", path).env("CLUSTER", directory).env("OCF_ROOT", &root);
        command.env("OCF_RESKEY_eventTypes", types).env("PYTHONDONTWRITEBYTECODE", "1");
        let output = self.node.guest.ns().output(&mut command).expect("it runs");
        assert!(output.status.success() && output.stderr.is_empty(), "{types} {resource}: {output:?}");
    }

    /// The state of the guest's node by the resource agent, whether the node's health forbids resources there, and
    /// whether the guest has acknowledged an event.
    fn seen(&self, id: &str) -> (String, bool, bool) {
        let attribute = |name: &str| fs::read_to_string(self.directory.path().join(format!("node-a.{name}")));
        let health = attribute("#health-azure").unwrap_or_default();
        let document = events(&self.node.file("run"), RecordSource::File, &name(self.node)).expect("events");
        let event = document.find(id).expect("an event");
        let state = attribute("azure-events-az_curNodeState").unwrap_or_default();
        (state.trim().to_owned(), health.starts_with('-'), event.acknowledged.is_some())
    }
}

#[test]
fn pacemaker_moves_resources_away_before_it_lets_azure_go_on() {
    let Some(packages) = Packages::or_skip("bookworm", &["resource-agents"], With::Nothing) else { return };
    let node = OneGuest::with_record(|record| record["serve"] = json!({"dialects": ["azure"]}));
    let _agent = node.agent();
    let cluster = Cluster::new(&node, &packages);
    let default = "Reboot,Redeploy";
    let others = ["freeze", "terminate", "preempt"];
    for kind in others {
        announce(&node, json!({"id": kind, "kind": kind}));
        cluster.monitor(default, "complete");
        assert_eq!(cluster.seen(kind), (String::new(), false, false), "{kind}");
    }
    for (kind, types) in [("reboot", default), ("redeploy", default), ("freeze", "Freeze")] {
        // What the host announces, and what the cluster does with the guest's resource.
        for (step, (event, resource, expected)) in [
            ("scheduled", "pending", ("STOPPING", false, false)),
            ("scheduled", "complete", ("STOPPING", true, false)),
            ("scheduled", "pending", ("STOPPING", true, false)),
            ("scheduled", "complete", ("IN_EVENT", true, true)),
            ("started", "complete", ("IN_EVENT", true, true)),
            ("completed", "pending", ("IN_EVENT", true, true)),
            ("completed", "complete", ("AVAILABLE", false, true)),
        ]
        .into_iter()
        .enumerate()
        {
            announce(&node, json!({"id": kind, "kind": kind, "state": event}));
            cluster.monitor(types, resource);
            let (state, is_leaving, is_acknowledged) = cluster.seen(kind);
            assert_eq!((&*state, is_leaving, is_acknowledged), expected, "{kind}, step {step}");
        }
    }
    for kind in ["terminate", "preempt"] {
        assert!(!cluster.seen(kind).2, "{kind}");
    }
}

/// A program in the guest, which ends with the test.
struct Unit(Child);

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[privileged::test]
fn a_unit_that_waits_by_curl_saves_its_work_before_the_host_goes_on() {
    let node = OneGuest::with_record(|_| {});
    let agent = node.agent();
    let (save, saved, off) = (node.file("save"), node.file("saved"), node.file("off"));
    write_script(&save, &format!("#!/bin/sh\necho \"$1\" >> {}\n", saved.display())).expect("a script");
    // It saves and powers off nothing but the guest.
    let script = event_unit_file("/usr/local/sbin/host-events").expect("the page has it");
    let script = script.replace("/usr/local/sbin/save", &save.display().to_string());
    let script = script.replace("systemctl poweroff", &format!("echo off >> {}", off.display()));
    assert!(!script.contains("systemctl") && !script.contains("/usr/"), "{script}");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).stdin(Stdio::null()).stderr(Stdio::null());
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
        let done = fs::read_to_string(&saved).expect("the guest saved its work");
        assert_eq!(done.lines().last(), Some(id), "it is ready before it has saved");
    }
    let all = fs::read_to_string(&saved).expect("the guest saved its work");
    assert_eq!(all.lines().collect::<Vec<_>>(), ["drain-1", "stop"], "each once");
    assert!(!off.exists(), "its end has not begun");
    announce(&node, json!({"id": "stop", "kind": "terminate", "state": "started"}));
    eventually(PATIENCE, || {
        ensure!(off.exists(), "it goes on");
        Ok(())
    })
    .expect("it powers itself off");
}
