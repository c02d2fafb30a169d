//! A KubeVirt node, its pods and its agent.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use metadata_control::instances::Instance;
use metadata_control::status::AgentStatus;
use metadata_feed::pods::{NicNames, names_of};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use support::agent::{self, Agent};
use support::apiserver::ApiServer;
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, Route, Spec};
use support::host::{self, Host};
use support::netns::Namespace;
use support::pod::{
    Binding, Cgroups, How, Kubelet, Launcher, Plugin, PodNetwork, fresh_uid, is_there, vmi_uid,
};
use support::privileged;
use support::record::Identity;
use support::tap::{Shape, Tap};
use tempfile::TempDir;

/// Bound on one request: longer than a few TCP retransmissions of the guest.
pub(crate) const REQUEST: Duration = Duration::from_secs(60);
/// Bound on each wait; generous, because only a failing test waits this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// Names of this node and another.
pub(crate) const HERE: &str = "n1";
pub(crate) const ELSEWHERE: &str = "n2";
/// Labels of a VMI: the node it runs on, and the node it migrates to.
pub(crate) const RUNS_ON: &str = "kubevirt.io/nodeName";
pub(crate) const MIGRATES_TO: &str = "kubevirt.io/migrationTargetNodeName";

/// The environment of the agent.
pub(crate) struct Node {
    pub(crate) server: ApiServer,
    pub(crate) kubelet: Kubelet,
    pub(crate) cgroups: Cgroups,
    room: TempDir,
    bpffs: Bpffs,
    pub(crate) host: Host,
}

impl Node {
    pub(crate) fn new() -> Self {
        let host = Host::new().expect("a node");
        let server = ApiServer::start_in(host.ns()).expect("an API server");
        let kubelet = Kubelet::new().expect("a directory");
        let room = tempfile::tempdir().expect("a directory");
        symlink(kubelet.pods(), room.path().join("pods")).expect("kubelet's directory");
        server.write_kubeconfig(&room.path().join("kubeconfig")).expect("a kubeconfig");
        let cgroups = Cgroups::new().expect("control groups");
        let node = Self { server, kubelet, cgroups, room, bpffs: Bpffs::mount().expect("a bpffs"), host };
        node.configure(&json!({}));
        node
    }

    /// Writes the configuration for agents started later, with more options of the feed.
    pub(crate) fn configure(&self, more: &Value) {
        let mut options = json!({
            "node": HERE,
            "kubelet": self.room.path(),
            "cgroups": self.cgroups.root(),
            "kubeconfig": self.path("kubeconfig"),
        });
        let more = more.as_object().expect("options").clone();
        options.as_object_mut().expect("options").extend(more);
        let config = json!({"kubevirt": options}).to_string();
        std::fs::write(self.path("config.yaml"), config).expect("a configuration");
    }

    /// A file in the node's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    pub(crate) fn agent(&self) -> Agent<'_> {
        self.agent_with(&[])
    }

    /// Starts an agent whose only source is KubeVirt.
    pub(crate) fn agent_with(&self, more: &[&str]) -> Agent<'_> {
        self.agent_as(agent::arguments_with_pins(self.room.path(), &[], &self.bpffs.pins()), more)
    }

    /// Starts an agent that pins nothing.
    pub(crate) fn agent_without_pins(&self) -> Agent<'_> {
        self.agent_as(agent::arguments(self.room.path(), &[]), &[])
    }

    fn agent_as(&self, mut words: Vec<OsString>, more: &[&str]) -> Agent<'_> {
        let records = words.iter().position(|word| word == "--records").expect("a word");
        words.drain(records..records + 2);
        words.extend(["--config".into(), self.path("config.yaml").into()]);
        words.extend(more.iter().map(Into::into));
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    /// The VMIs that an agent saves for its successor.
    pub(crate) fn saved_vmis(&self) -> String {
        std::fs::read_to_string(self.path("state/kubevirt.vmis")).unwrap_or_default()
    }

    /// Number of pinned links that attach programs to taps.
    pub(crate) fn links(&self) -> usize {
        self.bpffs.port_links().len()
    }

    /// Runs a verb with `--json` and parses its output.
    fn verb<T: DeserializeOwned>(&self, words: &[&str]) -> Result<T> {
        let mut command = Command::new(agent::binary()?);
        let run = self.path("run");
        let Output { stdout, stderr, .. } =
            command.args(words).arg("--json").arg("--run").arg(run).output()?;
        let output = || String::from_utf8_lossy(&[&stdout[..], &stderr].concat()).into_owned();
        serde_json::from_slice(&stdout).with_context(output)
    }

    /// The instances that `ls` lists.
    pub(crate) fn instances(&self) -> Result<Vec<Instance>> {
        self.verb(&["ls", "--source", "kubevirt"])
    }

    pub(crate) fn status(&self) -> Result<AgentStatus> {
        self.verb(&["status"])
    }

    pub(crate) fn every_port(&self) -> Result<AgentStatus> {
        self.verb(&["status", "--all"])
    }

    /// Creates a pod with a NIC but without launcher and tap.
    pub(crate) fn pod(&self, number: u16) -> Pod<'_> {
        self.pod_on(number, Identity::of(number).mac)
    }

    /// Like [`Node::pod`], with a NIC of a MAC other than the guest's.
    pub(crate) fn pod_on(&self, number: u16, nic: Mac) -> Pod<'_> {
        let identity = Identity::of(number);
        let network = PodNetwork::new(self.host.ns()).expect("a namespace");
        let outer = network.add_nic(&primary(), nic).expect("a NIC");
        let uid = fresh_uid();
        let vmi_uid = vmi_uid(&uid);
        Pod { node: self, uid, vmi_uid, identity, network, outer, launcher: None }
    }
}

/// A VM's pod on the node.
pub(crate) struct Pod<'a> {
    pub(crate) node: &'a Node,
    pub(crate) uid: String,
    /// The UID of the VMI that its launcher runs.
    pub(crate) vmi_uid: String,
    pub(crate) identity: Identity,
    pub(crate) network: PodNetwork<'a>,
    /// The node's end of the pod's NIC, which exists as long as the pod's namespace.
    outer: String,
    launcher: Option<Launcher>,
}

impl<'a> Pod<'a> {
    pub(crate) fn key(&self) -> String {
        format!("shop/{}", self.identity.hostname)
    }

    /// The VMI of a VM that runs here, with its user-data in a Secret.
    pub(crate) fn vmi(&self) -> Value {
        let mut vmi = vmi(&self.identity, &self.uid);
        vmi["metadata"]["uid"] = self.vmi_uid.as_str().into();
        vmi["spec"]["volumes"] = json!([{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]);
        vmi
    }

    /// [`Pod::vmi`] without `macAddress`, as KubeVirt has it once the domain runs: the status has the guest's MAC.
    pub(crate) fn vmi_without_mac(&self, binding: Binding) -> Value {
        let mut vmi = self.vmi();
        let binding = match binding {
            Binding::Masquerade => "masquerade",
            Binding::Bridge => "bridge",
        };
        vmi["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", binding: {}}]);
        vmi["status"]["phase"] = "Running".into();
        vmi["status"]["interfaces"] = json!([{
            "infoSource": "domain", "ipAddress": "10.244.1.20", "ipAddresses": ["10.244.1.20"], "linkState": "up",
            "mac": self.identity.mac.to_string(), "name": "default", "podInterfaceName": "eth0", "queueCount": 1,
        }]);
        vmi
    }

    /// Writes the Secret as kubelet does.
    pub(crate) fn secret(&self, text: &str) {
        let keys = [("userdata", text.as_bytes())];
        self.write(Plugin::Secret, "ci-udata", &keys);
    }

    pub(crate) fn write(&self, plugin: Plugin, volume: &str, keys: &[(&str, &[u8])]) {
        self.node.kubelet.write(&self.uid, plugin, volume, keys).expect("a volume");
    }

    /// The node's end of the pod's NIC.
    pub(crate) fn outer(&self) -> &str {
        &self.outer
    }

    pub(crate) fn launch(&mut self) {
        let Node { kubelet, cgroups, .. } = self.node;
        let (ns, how) = (self.network.ns(), How::default());
        let launcher = Launcher::start_for(&self.vmi_uid, ns, kubelet, cgroups, &self.uid, how);
        self.launcher = Some(launcher.expect("a launcher"));
    }

    /// Creates the tap as KubeVirt does, and boots the guest behind it.
    pub(crate) fn boot(&self) -> Guest {
        self.boot_as(Binding::Masquerade, Route::OnLink)
    }

    pub(crate) fn boot_as(&self, binding: Binding, route: Route) -> Guest {
        let tap = self.network.bind(&primary(), binding, Shape::virtio()).expect("a tap");
        if binding == Binding::Masquerade {
            // The guest's gateway, which does not forward.
            let gateway = format!("addr add {}/16 dev {}", host::ADDRESS, primary().bridge);
            self.network.ns().ip(&gateway).expect("an address");
        }
        self.guest_on(tap, route)
    }

    pub(crate) fn guest_on(&self, tap: Arc<Tap>, route: Route) -> Guest {
        let spec = Spec { route, shape: Shape::virtio(), ..Spec::of(&self.identity) };
        Guest::boot_on(tap, Namespace::new("guest").expect("a namespace"), &spec).expect("a guest")
    }

    /// Writes the Secret, starts the launcher, boots the guest and creates the VMI.
    pub(crate) fn run(&mut self, user_data: &str) -> Guest {
        self.secret(user_data);
        self.launch();
        let guest = self.boot();
        self.node.server.put(self.vmi());
        guest
    }

    /// Ends the guest and the launcher. Returns the node's end of the pod's NIC, which exists as long as the namespace.
    pub(crate) fn end(self, guest: Guest) -> String {
        drop(guest);
        self.end_alone()
    }

    /// Like [`Pod::end`], for a pod without a guest behind a tap.
    pub(crate) fn end_alone(mut self) -> String {
        assert!(is_there(self.node.host.ns(), &self.outer));
        let launcher = self.launcher.take().expect("a launcher");
        self.network.leave_to_its_processes().expect("the name is removed");
        launcher.end().expect("it ran until now");
        self.outer
    }
}

/// A VMI with one pod on this node and no volumes.
pub(crate) fn vmi(identity: &Identity, pod: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": identity.hostname, "namespace": "shop", "uid": vmi_uid(pod),
            "labels": {RUNS_ON: HERE},
        },
        "spec": {
            "domain": {
                "firmware": {"uuid": identity.instance_id},
                "devices": {"interfaces": [
                    {"name": "default", "masquerade": {}, "macAddress": identity.mac.to_string()},
                ]},
            },
            "networks": [{"name": "default", "pod": {}}],
        },
        "status": {"phase": "Scheduled", "activePods": {pod: HERE}},
    })
}

/// Names of the devices of a pod's first network.
pub(crate) fn primary() -> NicNames {
    names_of("default", None).remove(0)
}

/// Waits until `look` succeeds; a failure shows the agent's log.
#[track_caller]
pub(crate) fn wait_for<T>(agent: &Agent<'_>, what: &str, look: impl FnMut() -> Result<T>) -> T {
    eventually(PATIENCE, look).unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", agent.log()))
}

/// Waits until a guest gets an answer that contains `wanted`.
#[track_caller]
pub(crate) fn eventually_gets(agent: &Agent<'_>, guest: &Guest, path: &str, wanted: &str) {
    wait_for(agent, path, || gets(guest, path, wanted));
}

/// Checks that a guest gets an answer that contains `wanted`.
pub(crate) fn gets(guest: &Guest, path: &str, wanted: &str) -> Result<()> {
    let fetched = guest.fetch(path, REQUEST)?;
    let (status, text) = (fetched.status, fetched.text());
    ensure!(status == 200 && text.contains(wanted), "expected `{wanted}`, got {status}: {text}");
    Ok(())
}

/// Waits until the pod's namespace, and with it the node's end of its NIC, is gone.
#[track_caller]
pub(crate) fn wait_until_namespace_is_gone(agent: &Agent<'_>, node: &Node, outer: &str) {
    wait_for(agent, "the end of the pod's namespace", || {
        ensure!(!is_there(node.host.ns(), outer), "the node's end of the NIC still exists");
        Ok(())
    });
}

/// How often the agent's log contains `text`.
pub(crate) fn times_logged(agent: &Agent<'_>, text: &str) -> usize {
    agent.log().matches(text).count()
}

/// True if the test can run here.
#[track_caller]
pub(crate) fn may_run() -> bool {
    let missing = privileged::missing().map(str::to_owned).or_else(Cgroups::missing);
    privileged::or_skip_for(missing.as_deref())
}
