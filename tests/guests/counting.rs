//! Each metric changes when the event it counts happens to a guest on a real tap. A strict parser accepts the whole
//! exposition.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use support::agent::{self, Agent, PortArgument};
use support::eventually::eventually;
use support::exposition::{self, Family, sum};
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::tap::set_gro;

const PATIENCE: Duration = Duration::from_secs(20);

/// A node and a guest without a record.
struct Scene {
    guest: Guest,
    host: Host,
    records: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guest = Guest::boot(&host, &Spec::of(&Identity::of(0))).expect("a guest");
        Self { guest, host, records }
    }

    fn served() -> Self {
        let scene = Self::new();
        scene.guest.identity().write(scene.records.path(), 1).expect("a record");
        scene
    }

    fn agent(&self) -> Agent<'_> {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        Agent::start(self.host.ns(), self.records.path(), &[port]).expect("an agent")
    }

    /// Runs curl with these arguments before the URL; returns the status.
    fn curl(&self, words: &[&str], path: &str) -> u16 {
        let url = format!("http://{METADATA}{path}");
        self.guest.curl(&[words, &[url.as_str()]].concat(), PATIENCE).expect("an answer").status
    }
}

fn families(agent: &Agent<'_>) -> BTreeMap<String, Family> {
    let (status, text) = agent.ask("/metrics").expect("metrics");
    assert_eq!(status, 200);
    exposition::read(&text).unwrap_or_else(|error| panic!("{error:#}\n{text}"))
}

/// Waits until a sum reaches a value; workers publish some counters once a second.
fn wait_for_sum(agent: &Agent<'_>, name: &str, labels: &[(&str, &str)], expected: f64) {
    let reached = eventually(PATIENCE, || {
        let found = sum(&families(agent), name, labels)?;
        ensure!(found == expected, "{name}{labels:?} is {found}, not {expected}");
        Ok(())
    });
    reached.unwrap_or_else(|error| panic!("{error:#}"));
}

#[test]
fn answers_are_counted_by_dialect_and_status_with_the_time_they_took() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::served();
    let agent = scene.agent();
    let asked = [
        (&[][..], "/latest/meta-data/instance-id", 200, "ec2"),
        (&[], "/latest/meta-data/hostname", 200, "ec2"),
        (&["-X", "DELETE"], "/latest/meta-data/hostname", 405, "ec2"),
        (&[], "/v1/meta-data", 200, "nocloud"),
        (&[], "/no/such/path", 404, "none"),
        (&["-X", "POST"], "/no/such/path", 405, "none"),
        (&["--path-as-is"], "/latest/../latest", 400, "none"),
        (&[], "/", 200, "any"),
    ];
    for (words, path, status, _) in asked {
        assert_eq!(scene.curl(words, path), status, "{words:?} {path}");
    }
    for (_, _, status, datasource) in asked {
        let alike =
            asked.iter().filter(|(_, _, code, other)| (*code, *other) == (status, datasource)).count();
        let labels = [("datasource", datasource), ("code", &status.to_string())];
        wait_for_sum(&agent, "xdp_imds_requests_total", &labels, alike as f64);
    }
    wait_for_sum(&agent, "xdp_imds_requests_total", &[], asked.len() as f64);
    wait_for_sum(&agent, "xdp_imds_request_duration_seconds", &[], asked.len() as f64);
    let durations = &families(&agent)["xdp_imds_request_duration_seconds"];
    let (_, _, slow) = durations
        .samples
        .iter()
        .find(|(_, labels, _)| labels.get("le").is_some_and(|le| le == "1"))
        .expect("a bucket");
    assert_eq!(*slow, asked.len() as f64, "no request took a second: {durations:?}");
    let (_, _, total) = durations.samples.iter().find(|(name, ..)| name.ends_with("_sum")).expect("a sum");
    assert!(*total > 0.0, "every request takes some time");
}

#[test]
fn a_waiting_request_is_counted_while_it_waits_and_by_its_outcome() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let agent = scene.agent();
    let waits =
        |expected| wait_for_sum(&agent, "xdp_imds_parked_requests", &[("reason", "record")], expected);
    let ended = |outcome, expected| {
        wait_for_sum(
            &agent,
            "xdp_imds_parked_total",
            &[("reason", "record"), ("outcome", outcome)],
            expected,
        );
    };
    waits(0.0);
    assert_eq!(scene.curl(&[], "/metadata/v1.json"), 503, "the request waits 1.5 s");
    ended("expired", 1.0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| scene.curl(&[], "/openstack/latest/meta_data.json"));
        waits(1.0);
        scene.guest.identity().write(scene.records.path(), 1).expect("a record");
        assert_eq!(waiting.join().expect("an answer"), 200);
    });
    ended("released", 1.0);
    waits(0.0);
    let change = "/computeMetadata/v1/instance/?recursive=true&wait_for_change=true&timeout_sec=60";
    let (url, flavor) = (format!("http://{METADATA}{change}"), "Metadata-Flavor: Google");
    scene
        .guest
        .curl(&["--max-time", "1", "-H", flavor, &url], PATIENCE)
        .expect_err("curl gives up after 1 s");
    wait_for_sum(&agent, "xdp_imds_parked_total", &[("reason", "change"), ("outcome", "left")], 1.0);
    let families = families(&agent);
    let late = families["xdp_imds_request_duration_seconds"]
        .samples
        .iter()
        .find(|(name, ..)| name.ends_with("_sum"));
    let (_, _, total) = late.expect("a sum");
    assert!(*total > 1.5, "the duration of a request includes its wait: {total}");
}

#[test]
fn records_ports_and_identities_are_counted_by_state() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::served();
    let agent = scene.agent();
    wait_for_sum(&agent, "xdp_imds_instances", &[("source", "file"), ("state", "served")], 1.0);
    wait_for_sum(&agent, "xdp_imds_taps", &[("state", "attached")], 1.0);
    wait_for_sum(&agent, "xdp_imds_ports", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_identities", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_attached_total", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_registration_lag_seconds", &[], 1.0);
    wait_for_sum(&agent, "xdp_imds_build_info", &[], 1.0);
    // A second guest's record names no port, so the instance is `unplaced`.
    let other = Identity::of(1);
    other.write(scene.records.path(), 1).expect("a record");
    wait_for_sum(&agent, "xdp_imds_instances", &[("state", "unplaced")], 1.0);
    replace(&other.path(scene.records.path()), "schema: vmrecord/9\n").expect("a bad record");
    wait_for_sum(&agent, "xdp_imds_records_rejected_total", &[], 1.0);
    let mut elsewhere: serde_json::Value = serde_json::from_str(&other.record(2)).expect("a record");
    elsewhere["network"]["nics"][0]["port"] = serde_json::json!({"ifname": "tap4711"});
    replace(&other.path(scene.records.path()), &elsewhere.to_string()).expect("a record");
    wait_for_sum(&agent, "xdp_imds_instances", &[("state", "waiting")], 1.0);
    wait_for_sum(&agent, "xdp_imds_taps", &[("state", "waiting")], 1.0);
}

#[test]
fn a_bare_veth_of_another_namespace_is_not_served_until_it_has_gro() {
    if !privileged::or_skip() {
        return;
    }
    let records = tempfile::tempdir().expect("a directory");
    let (host, pod) = (Host::new().expect("a node"), Namespace::new("pod").expect("a pod"));
    let (far, identity) = (Namespace::new("far").expect("a guest"), Identity::of(0));
    pod.ip(&format!("link add tap0 type veth peer name eth0 netns {}", far.name())).expect("a veth");
    pod.ip("link set tap0 up").expect("up");
    far.ip("link set eth0 up").expect("up");
    identity.write(records.path(), 1).expect("a record");
    let port = PortArgument::new("tap0", identity.mac).within(&pod);
    let agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    let state = |served: bool| {
        let (instance, tap) = if served { ("served", "attached") } else { ("waiting", "error") };
        wait_for_sum(&agent, "xdp_imds_instances", &[("source", "file"), ("state", instance)], 1.0);
        wait_for_sum(&agent, "xdp_imds_taps", &[("state", tap)], 1.0);
    };
    let status = || {
        let mut command = Command::new(agent::binary().expect("the agent"));
        command.args(["status", "--run"]).arg(records.path().join("run"));
        let output = host.ns().output(&mut command).expect("a status");
        String::from_utf8(output.stdout).expect("text")
    };
    state(false);
    let output = status();
    let line = format!("tap0@{}  error", pod.name());
    assert!(output.contains(&line) && output.contains("ethtool -K PEER gro on"), "{output}");
    set_gro(&far, "eth0", true).expect("GRO");
    state(true);
    assert!(!status().contains(&line), "{}", status());
    set_gro(&far, "eth0", false).expect("no GRO");
    state(false);
}

#[test]
fn a_frame_with_a_foreign_mac_is_counted_as_a_mismatch() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::served();
    let agent = scene.agent();
    assert_eq!(scene.curl(&[], "/v1/meta-data"), 200);
    wait_for_sum(&agent, "xdp_imds_identity_mismatch_total", &[], 0.0);
    scene.guest.ns().ip("link set eth0 address 52:54:00:ff:ff:ff").expect("another MAC");
    let url = format!("http://{METADATA}/v1/meta-data");
    scene.guest.curl(&["--max-time", "2", &url], PATIENCE).expect_err("no answer to an impostor");
    let counted = sum(&families(&agent), "xdp_imds_identity_mismatch_total", &[]).expect("a count");
    assert!(counted >= 1.0, "{counted}");
    wait_for_sum(&agent, "xdp_imds_requests_total", &[], 1.0);
}

#[test]
fn metrics_cover_the_process_and_its_workers() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::served();
    let agent = scene.agent();
    assert_eq!(scene.curl(&[], "/v1/meta-data"), 200);
    let families = families(&agent);
    for (name, least) in [
        ("process_resident_memory_bytes", 1e6),
        ("process_virtual_memory_bytes", 1e6),
        ("process_open_fds", 10.0),
        ("process_max_fds", 1_024.0),
        ("process_threads", 2.0),
        ("process_start_time_seconds", 1.7e9),
        ("process_cpu_seconds_total", 0.0),
        ("xdp_imds_worker_seconds_total", 0.01),
        ("xdp_imds_frames_total", 1.0),
    ] {
        let found = sum(&families, name, &[]).unwrap_or_else(|error| panic!("{error:#}"));
        assert!(found >= least, "{name} is {found}");
    }
    assert!(!families.contains_key("xdp_imds_audit_lines_total"), "there is no audit log");
}
