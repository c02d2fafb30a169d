//! A node of KubeVirt from end to end: the real agent learns of VMs from an API server, finds their launchers, and
//! serves guests behind taps in their pods' namespaces.
//!
//! The API server, launchers and kubelet are `support`'s; everything else is what runs on a node.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use metadata_common::mac::Mac;
use metadata_user::feed::pods::names_of;
use serde_json::{Value, json};
use support::agent::{self, Agent};
use support::apiserver::ApiServer;
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::pod::network::is_there;
use support::pod::{Binding, Cgroups, How, Kubelet, Launcher, Plugin, PodNetwork, fresh_uid};
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use tempfile::TempDir;

/// For one request: longer than any is held.
const REQUEST: Duration = Duration::from_secs(15);
/// For what must come: generous, since it is waited out only in failure.
const PATIENCE: Duration = Duration::from_secs(30);

/// Everything around the agent.
struct Node {
    server: ApiServer,
    kubelet: Kubelet,
    cgroups: Cgroups,
    room: TempDir,
    bpffs: Bpffs,
    host: Host,
}

impl Node {
    fn new() -> Self {
        let host = Host::new().expect("a node");
        let server = ApiServer::start_in(host.ns()).expect("an API server");
        let kubelet = Kubelet::new().expect("a directory");
        let room = tempfile::tempdir().expect("a directory");
        symlink(kubelet.pods(), room.path().join("pods")).expect("kubelet's directory");
        server.write_kubeconfig(&room.path().join("kubeconfig")).expect("a kubeconfig");
        let cgroups = Cgroups::new().expect("control groups");
        let config = json!({"kubevirt": {
            "node": "n1",
            "kubelet": room.path(),
            "cgroups": cgroups.root(),
            "kubeconfig": room.path().join("kubeconfig"),
        }});
        std::fs::write(room.path().join("config.yaml"), config.to_string()).expect("a configuration");
        std::fs::create_dir(room.path().join("records")).expect("a directory");
        Self { server, kubelet, cgroups, room, bpffs: Bpffs::mount().expect("a bpffs"), host }
    }

    fn agent(&self) -> Agent<'_> {
        let records = self.room.path().join("records");
        let mut words = agent::arguments_with_pins(&records, &[], &self.bpffs.pins());
        words.extend(["--config".into(), self.room.path().join("config.yaml").into()]);
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    /// The VMIs an agent keeps for its successor.
    fn kept(&self) -> PathBuf {
        self.room.path().join("records/state/kubevirt.vmis")
    }

    fn pod(&self, number: u16) -> Pod<'_> {
        let identity = Identity::of(number);
        let network = PodNetwork::new(self.host.ns()).expect("a namespace");
        let outer = network.add_nic(&names_of("default", None)[0], identity.mac).expect("a NIC");
        Pod { node: self, uid: fresh_uid(), identity, network, outer, launcher: None }
    }
}

/// A VM's pod on the node.
struct Pod<'a> {
    node: &'a Node,
    uid: String,
    identity: Identity,
    network: PodNetwork<'a>,
    /// The node's end of its NIC, which goes with its namespace.
    outer: String,
    launcher: Option<Launcher>,
}

impl Pod<'_> {
    fn key(&self) -> String {
        format!("shop/{}", self.identity.hostname)
    }

    /// Its VMI, which runs here; its user-data is in a Secret.
    fn vmi(&self) -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {
                "name": self.identity.hostname, "namespace": "shop", "uid": self.uid,
                "labels": {"kubevirt.io/nodeName": "n1"},
            },
            "spec": {
                "domain": {
                    "firmware": {"uuid": self.identity.instance_id},
                    "devices": {"interfaces": [
                        {"name": "default", "masquerade": {}, "macAddress": self.identity.mac.to_string()},
                    ]},
                },
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}],
            },
            "status": {"phase": "Scheduled", "activePods": {&self.uid: "n1"}},
        })
    }

    fn secret(&self, text: &str) {
        let keys = [("userdata", text.as_bytes())];
        self.node.kubelet.write(&self.uid, Plugin::Secret, "ci-udata", &keys).expect("a Secret");
    }

    fn launch(&mut self) {
        let Node { kubelet, cgroups, .. } = self.node;
        let launcher = Launcher::start(self.network.ns(), kubelet, cgroups, &self.uid, How::default());
        self.launcher = Some(launcher.expect("a launcher"));
    }

    /// The guest, behind a tap that is made now.
    fn boot(&self, mac: Mac) -> Guest {
        let names = &names_of("default", None)[0];
        let tap = self.network.bind(names, Binding::Masquerade, Shape::default()).expect("a tap");
        let spec = Spec { mac, ..Spec::of(&self.identity) };
        Guest::boot_on(tap, Namespace::new("guest").expect("a namespace"), &spec).expect("a guest")
    }

    /// All of it at once.
    fn run(&mut self, user_data: &str) -> Guest {
        self.secret(user_data);
        self.launch();
        let guest = self.boot(self.identity.mac);
        self.node.server.put(self.vmi());
        guest
    }
}

/// What a guest gets, once it gets this.
fn eventually_gets(guest: &Guest, path: &str, wanted: &str) {
    let look = || {
        let fetched = guest.fetch(path, REQUEST)?;
        ensure!(
            fetched.status == 200 && fetched.text().contains(wanted),
            "{}: {}",
            fetched.status,
            fetched.text()
        );
        Ok(())
    };
    eventually(PATIENCE, look).unwrap_or_else(|error| panic!("{path}: {error:#}"));
}

fn needs() -> Option<String> {
    privileged::missing().map(str::to_owned).or_else(Cgroups::missing)
}

/// True when the test may go on.
#[track_caller]
fn may_run() -> bool {
    privileged::or_skip_for(needs().as_deref())
}

#[test]
fn a_guest_in_a_pod_is_told_its_own_in_every_dialect_and_its_namespace_goes_with_it() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("#cloud-config\n# its own\n");
    let id = pod.identity.instance_id.clone();
    for (path, wanted) in [
        ("/v1/user-data", "# its own"),
        ("/v1/meta-data", id.as_str()),
        ("/latest/user-data", "# its own"),
        ("/latest/meta-data/local-hostname", "guest-1"),
        ("/openstack/latest/user_data", "# its own"),
        ("/openstack/latest/meta_data.json", id.as_str()),
    ] {
        eventually_gets(&guest, path, wanted);
    }
    // A new Secret is served without anybody's asking.
    pod.secret("#cloud-config\n# another\n");
    eventually_gets(&guest, "/v1/user-data", "# another");
    let (outer, launcher) = (pod.outer.clone(), pod.launcher.take().expect("a launcher"));
    assert!(is_there(node.host.ns(), &outer));
    drop(guest);
    pod.network.leave_to_its_processes().expect("the name is taken off");
    launcher.end().expect("it ran until now");
    let gone = || {
        ensure!(!is_there(node.host.ns(), &outer), "the pod's namespace is still there");
        Ok(())
    };
    eventually(PATIENCE, gone).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.said()));
}

#[test]
fn guests_of_one_mac_in_two_pods_are_told_apart() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let _agent = node.agent();
    let mut pods = [node.pod(1), node.pod(2)];
    pods[1].identity.mac = pods[0].identity.mac;
    let guests = [pods[0].run("# first\n"), pods[1].run("# second\n")];
    eventually_gets(&guests[0], "/v1/user-data", "# first");
    eventually_gets(&guests[1], "/v1/user-data", "# second");
}

#[test]
fn a_tap_that_comes_after_its_vmi_is_served() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let _agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# late\n");
    node.server.put(pod.vmi());
    pod.launch();
    // Long enough that the agent has looked, and has not found anything.
    std::thread::sleep(Duration::from_secs(1));
    let guest = pod.boot(pod.identity.mac);
    eventually_gets(&guest, "/v1/user-data", "# late");
}

#[test]
fn a_request_before_the_secret_is_there_is_held_until_it_is() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.launch();
    let guest = pod.boot(pod.identity.mac);
    node.server.put(pod.vmi());
    let attached = || {
        ensure!(agent.said().contains("attached"), "no port yet");
        Ok(())
    };
    eventually(PATIENCE, attached).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.said()));
    let begun = Instant::now();
    let fetched = std::thread::scope(|scope| {
        let asked = scope.spawn(|| guest.fetch("/v1/user-data", REQUEST));
        std::thread::sleep(Duration::from_secs(1));
        pod.secret("# at last\n");
        asked.join().expect("no panic")
    });
    let fetched = fetched.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.said()));
    assert_eq!((fetched.status, fetched.text().as_str()), (200, "# at last\n"));
    assert!(begun.elapsed() >= Duration::from_secs(1), "it was answered before there was an answer");
}

#[test]
fn while_the_api_server_is_away_guests_are_served_also_by_an_agent_that_was_killed_and_started_anew() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# known\n");
    eventually_gets(&guest, "/v1/user-data", "# known");
    let kept = || {
        let text = std::fs::read_to_string(node.kept())?;
        ensure!(text.contains(&pod.identity.hostname), "{} is not kept yet", pod.key());
        Ok(())
    };
    eventually(PATIENCE, kept).expect("VMIs are kept");
    node.server.be_away(true);
    eventually_gets(&guest, "/v1/user-data", "# known");
    agent.kill().expect("it ran until now");
    let agent = node.agent();
    eventually_gets(&guest, "/v1/user-data", "# known");
    pod.secret("# new\n");
    eventually_gets(&guest, "/v1/user-data", "# new");
    node.server.be_away(false);
    let mut next = node.pod(2);
    let other = next.run("# other\n");
    eventually_gets(&other, "/v1/user-data", "# other");
    drop(agent);
}

#[test]
fn the_target_of_a_migration_answers_the_guests_first_packet() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let _agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# moved\n");
    pod.launch();
    let guest = pod.boot(pod.identity.mac);
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] =
        json!({"kubevirt.io/nodeName": "n2", "kubevirt.io/migrationTargetNodeName": "n1"});
    node.server.put(vmi);
    eventually_gets(&guest, "/v1/user-data", "# moved");
    node.server.put(pod.vmi());
    std::thread::sleep(Duration::from_secs(1));
    let fetched: Result<_> = guest.fetch("/v1/user-data", REQUEST);
    assert_eq!(fetched.expect("an answer").text(), "# moved\n");
}
