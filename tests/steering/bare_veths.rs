//! A guest behind a veth whose peer has neither XDP nor GRO. Such a device takes no redirected frames, so a
//! classifier delivers the answers.

use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};
use support::agent::{self, Agent};
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{METADATA, curl_in};
use support::host::{BRIDGE, Host};
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::tap::set_gro;

/// Bound on each wait; generous, because only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);
/// User-data of many segments.
const LARGE: usize = 64 << 10;

/// A node, an agent's directories, and a guest behind a veth.
struct Scene {
    room: tempfile::TempDir,
    bpffs: Bpffs,
    host: Host,
    /// Namespace of the host's end of the veth, unless it is the node's.
    pod: Option<Namespace>,
    guest: Namespace,
    identity: Identity,
}

impl Scene {
    fn new(pod: Option<Namespace>) -> Self {
        let host = Host::new().expect("a node");
        let (guest, identity) = (Namespace::new("guest").expect("a guest"), Identity::of(0));
        let (here, mac) = (pod.as_ref().unwrap_or(host.ns()), identity.mac);
        let peer = format!("peer name eth0 address {mac} netns {}", guest.name());
        here.ip(&format!("link add tap0 type veth {peer}")).expect("a veth");
        here.ip("link set tap0 up").expect("up");
        if pod.is_none() {
            here.ip(&format!("link set tap0 master {BRIDGE}")).expect("a port of the bridge");
        }
        guest.ip("link set eth0 up").expect("up");
        guest.ip(&format!("addr add {}/16 dev eth0", identity.address)).expect("an address");
        guest.ip(&format!("route add {METADATA} dev eth0 scope link")).expect("a route");
        let room = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(room.path().join("records")).expect("a directory");
        let identity = identity.with_user_data_of(LARGE);
        Self { room, bpffs: Bpffs::mount().expect("a bpffs"), host, pod, guest, identity }
    }

    /// Starts an agent with an API and no instances.
    fn agent(&self, more: &[&str]) -> Agent<'_> {
        let records = self.room.path().join("records");
        let file = self.room.path().join("agent.yaml");
        replace(&file, "api: {instances: 2}").expect("a configuration");
        let mut words = agent::arguments_with_pins(&records, &[], &self.bpffs.pins());
        words.extend(["--config".into(), file.into()]);
        words.extend(more.iter().map(Into::into));
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    fn verb(&self, words: &[&str]) -> (i32, String) {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.args(words).arg("--run").arg(self.room.path().join("records/run"));
        let output = self.host.ns().output(&mut command).expect("it runs");
        let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
        (output.status.code().expect("an exit code"), text)
    }

    /// Registers the guest and waits at most `seconds` until it is served.
    fn register(&self, seconds: &str) -> (i32, String) {
        let mut record: Value = serde_json::from_str(&self.identity.record(1)).expect("a record");
        let netns = self.pod.as_ref().map(Namespace::name);
        record["network"]["nics"][0]["port"] = json!({"ifname": "tap0", "netns": netns});
        let file = self.room.path().join("vm.yaml");
        replace(&file, &record.to_string()).expect("a record");
        let file = file.to_str().expect("text");
        self.verb(&["register", "-f", file, "--wait", "--timeout", seconds])
    }

    fn fetch(&self, path: &str) -> anyhow::Result<String> {
        let fetched = curl_in(&self.guest, &[&format!("http://{METADATA}{path}")], PATIENCE)?;
        ensure!(fetched.status == 200, "{path}: {}", fetched.status);
        Ok(String::from_utf8(fetched.body)?)
    }

    /// Checks that the guest gets a small and a large answer.
    #[track_caller]
    fn expect_served(&self, when: &str) {
        let small = self.fetch("/v1/meta-data").unwrap_or_else(|error| panic!("{when}: {error:#}"));
        assert!(small.contains(&self.identity.instance_id), "{when}: {small}");
        let large = self.fetch("/v1/user-data").unwrap_or_else(|error| panic!("{when}: {error:#}"));
        assert!(large == self.identity.user_data, "{when}: {} bytes", large.len());
    }

    /// Waits until the status says that a classifier delivers the port's answers, or no longer says so.
    fn expect_classifier(&self, expected: bool) {
        let found = eventually(PATIENCE, || {
            let (_, output) = self.verb(&["status", "tap0"]);
            ensure!(output.contains("a classifier delivers the answers") == expected, "{output}");
            ensure!(output.lines().any(|line| line.split_whitespace().eq(["state", "served"])), "{output}");
            Ok(())
        });
        found.unwrap_or_else(|error| panic!("{error:#}"));
    }
}

#[privileged::test]
fn a_guest_behind_a_bare_veth_gets_small_and_large_answers() {
    let scene = Scene::new(None);
    let _agent = scene.agent(&[]);
    let (code, output) = scene.register("20");
    assert!(code == 0 && output.contains("served"), "{code} {output}");
    scene.expect_classifier(true);
    scene.expect_served("bare");
}

#[privileged::test]
fn a_guest_stays_served_while_gro_is_switched_on_and_off() {
    let scene = Scene::new(None);
    let _agent = scene.agent(&[]);
    let (code, output) = scene.register("20");
    assert!(code == 0, "{code} {output}");
    scene.expect_served("before");
    for on in [true, false, true] {
        set_gro(&scene.guest, "eth0", on).expect("GRO");
        // The guest asks before the agent notices the change. TCP resends the frames that are lost until then.
        scene.expect_served(if on { "just on" } else { "just off" });
        scene.expect_classifier(!on);
        scene.expect_served(if on { "on" } else { "off" });
    }
}

#[privileged::test]
fn a_guest_behind_a_bare_veth_is_served_by_the_next_agent() {
    let scene = Scene::new(None);
    let first = scene.agent(&[]);
    let (code, output) = scene.register("20");
    assert!(code == 0, "{code} {output}");
    scene.expect_served("by the first");
    let second = scene.agent(&["--takeover"]);
    scene.expect_served("by the second during the drain");
    first.ended(PATIENCE).expect("the first agent has exited");
    scene.expect_classifier(true);
    scene.expect_served("alone");
    second.kill().expect("killed");
    let _third = scene.agent(&[]);
    scene.expect_classifier(true);
    scene.expect_served("after a crash");
}

#[privileged::test]
fn a_guest_behind_a_bare_veth_of_another_namespace_is_not_reported_served() {
    let scene = Scene::new(Some(Namespace::new("pod").expect("a pod")));
    let _agent = scene.agent(&[]);
    let (code, output) = scene.register("2");
    assert!(code == 3 && output.contains("ethtool -K PEER gro on"), "{code} {output}");
    set_gro(&scene.guest, "eth0", true).expect("GRO");
    let (code, output) = scene.register("20");
    assert!(code == 0 && output.contains("served"), "{code} {output}");
    scene.expect_served("with GRO");
}
