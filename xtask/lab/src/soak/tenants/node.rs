//! The node: an API server, kubelet's directory, Proxmox VE's directory, the pods of all tenants, and the agent in a
//! control group with a memory limit.

use super::limit::MemoryGroup;
use anyhow::{Context as _, Result, ensure};
use metadata_feed::pods::{NicNames, names_of};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use support::agent::{self, Agent};
use support::apiserver::ApiServer;
use support::bpffs::Bpffs;
use support::guest::{Guest, Route, Spec};
use support::host::{self, Host};
use support::netns::Namespace;
use support::pod::{Binding, Cgroups, How, Kubelet, Launcher, Plugin, PodNetwork, fresh_uid};
use support::process::write_script;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};
use tempfile::TempDir;

/// The name of the node.
const NODE: &str = "n1";
/// Guests have numbers below this one, and use them in turn.
const NUMBERS: u16 = 15_000;
/// The issuer of identity tokens.
pub(super) const ISSUER: &str = "https://imds.soak.example";
/// The file in a Secret that holds the user-data.
const USER_DATA: &str = "userdata";

/// Everything outside the agent.
pub(super) struct Node {
    pub(super) server: ApiServer,
    kubelet: Kubelet,
    cgroups: Cgroups,
    pub(super) files: TempDir,
    bpffs: Bpffs,
    pub(super) memory: MemoryGroup,
    pub(super) host: Host,
    agent: PathBuf,
    numbers: AtomicU16,
}

impl Node {
    /// Makes the node without an agent.
    pub(super) fn new(agent: PathBuf, limit: u64) -> Result<Self> {
        let host = Host::new()?;
        let server = ApiServer::start_in(host.ns())?;
        let kubelet = Kubelet::new()?;
        let files = tempfile::Builder::new().prefix("xdp-imds-tenants-").tempdir()?;
        symlink(kubelet.pods(), files.path().join("pods"))?;
        for directory in ["qemu-server", "parts", "keys"] {
            fs::create_dir(files.path().join(directory))?;
        }
        for file in ["storage.cfg", "resolv.conf"] {
            fs::write(files.path().join(file), "")?;
        }
        server.write_kubeconfig(&files.path().join("kubeconfig"))?;
        let cgroups = Cgroups::new()?;
        let node = Self {
            server,
            kubelet,
            cgroups,
            files,
            bpffs: Bpffs::mount()?,
            memory: MemoryGroup::new(limit)?,
            host,
            agent,
            numbers: AtomicU16::new(0),
        };
        node.make_key()?;
        node.configure()?;
        node.wrap(limit)?;
        Ok(node)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Makes the key that signs identity tokens.
    fn make_key(&self) -> Result<()> {
        let mut command = Command::new(&self.agent);
        let output =
            command.args(["identity", "key"]).arg(self.path("keys")).stdin(Stdio::null()).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`xdp-imds identity key`: {}: {errors}", output.status);
        Ok(())
    }

    /// Writes the configuration: both feeds whose records tenants write, and all taps guarded.
    fn configure(&self) -> Result<()> {
        let config = json!({
            "guard": "all",
            "identity": {"issuer": ISSUER, "keys": self.path("keys")},
            "kubevirt": {
                "node": NODE,
                "kubelet": self.files.path(),
                "cgroups": self.cgroups.root(),
                "kubeconfig": self.path("kubeconfig"),
            },
            "proxmox": {
                "directory": self.path("qemu-server"),
                "files": self.path("parts"),
                "storages": self.path("storage.cfg"),
                "resolv_conf": self.path("resolv.conf"),
            },
        });
        Ok(fs::write(self.path("config.yaml"), config.to_string())?)
    }

    /// Writes the program that starts the agent inside the control group, with the limit in the variable that the
    /// DaemonSet sets.
    fn wrap(&self, limit: u64) -> Result<()> {
        let script = format!(
            "#!/bin/sh\necho $$ > '{}' || exit 1\nXDP_IMDS_MEMORY_LIMIT={limit} exec '{}' \"$@\"\n",
            self.memory.processes().display(),
            self.agent.display()
        );
        write_script(&self.path("agent"), &script)
    }

    /// Starts the agent. It has the id of the process that entered the control group.
    pub(super) fn start(&self) -> Result<Agent<'_>> {
        let mut words: Vec<OsString> = agent::arguments_with_pins(self.files.path(), &[], &self.bpffs.pins());
        let records = words.iter().position(|word| word == "--records").context("no --records")?;
        words.drain(records..records + 2);
        words.extend(["--config".into(), self.path("config.yaml").into()]);
        Agent::start_binary(&self.path("agent"), self.host.ns(), words)
    }

    /// Removes the pins, which outlive the agent.
    pub(super) fn release(&self) -> Result<()> {
        let mut command = Command::new(&self.agent);
        command.arg("release").arg("--pins").arg(self.bpffs.pins());
        let output = self.host.ns().output(&mut command)?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "`xdp-imds release`: {}: {errors}", output.status);
        Ok(())
    }

    /// The agent's file, for its other verbs.
    pub(super) fn binary(&self) -> &Path {
        &self.agent
    }

    /// Returns a guest with addresses that no other guest of now has.
    pub(super) fn identity(&self) -> Identity {
        Identity::of(self.numbers.fetch_add(1, Ordering::Relaxed) % NUMBERS)
    }

    /// Makes a pod with a NIC and a launcher, in a namespace of its own.
    pub(super) fn pod(&self, namespace: &str) -> Result<Pod<'_>> {
        let identity = self.identity();
        let network = PodNetwork::new(self.host.ns())?;
        network.add_nic(&primary(), identity.mac)?;
        self.pod_in(namespace, network.ns(), identity).map(|pod| Pod { network: Some(network), ..pod })
    }

    /// Makes a pod with a launcher and without devices, in a namespace that pods share.
    pub(super) fn bare_pod(&self, namespace: &str, shared: &Namespace) -> Result<Pod<'_>> {
        self.pod_in(namespace, shared, self.identity())
    }

    fn pod_in(&self, namespace: &str, ns: &Namespace, identity: Identity) -> Result<Pod<'_>> {
        let uid = fresh_uid();
        let launcher = Launcher::start(ns, &self.kubelet, &self.cgroups, &uid, How::default())?;
        Ok(Pod { node: self, namespace: namespace.into(), uid, identity, launcher, network: None })
    }

    /// Writes the configuration of a VM of Proxmox VE.
    pub(super) fn write_conf(&self, vmid: u32, text: &str) -> Result<()> {
        replace(&self.conf(vmid), text)
    }

    /// Removes the configuration of a VM of Proxmox VE, if there is one.
    pub(super) fn remove_conf(&self, vmid: u32) {
        // It may never have been written.
        _ = fs::remove_file(self.conf(vmid));
    }

    fn conf(&self, vmid: u32) -> PathBuf {
        self.path(&format!("qemu-server/{vmid}.conf"))
    }
}

/// A VM's pod.
pub(super) struct Pod<'a> {
    node: &'a Node,
    pub(super) namespace: String,
    pub(super) uid: String,
    pub(super) identity: Identity,
    launcher: Launcher,
    network: Option<PodNetwork<'a>>,
}

impl Pod<'_> {
    /// `namespace/name` of its VMI.
    pub(super) fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.identity.hostname)
    }

    /// Its namespace, if it has one of its own.
    pub(super) fn ns(&self) -> Result<&Namespace> {
        Ok(self.network.as_ref().context("the pod shares a namespace")?.ns())
    }

    /// The VMI, with these fields of `spec` besides its NIC.
    pub(super) fn vmi(&self, spec: &Value) -> Value {
        let mut vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {
                "name": self.identity.hostname, "namespace": self.namespace, "uid": format!("vmi-{}", self.uid),
                "labels": {"kubevirt.io/nodeName": NODE},
            },
            "spec": {
                "domain": {
                    "firmware": {"uuid": self.identity.instance_id},
                    "devices": {"interfaces": [
                        {"name": "default", "masquerade": {}, "macAddress": self.identity.mac.to_string()},
                    ]},
                },
                "networks": [{"name": "default", "pod": {}}],
            },
            "status": {"phase": "Scheduled", "activePods": {&self.uid: NODE}},
        });
        for (field, value) in spec.as_object().into_iter().flatten() {
            vmi["spec"][field] = value.clone();
        }
        vmi
    }

    /// Creates or replaces its VMI.
    pub(super) fn put(&self, vmi: Value) {
        self.node.server.put_as_it_is(vmi);
    }

    /// Writes a Secret's volume as kubelet does.
    pub(super) fn secret(&self, volume: &str, keys: &[(&str, &[u8])]) -> Result<()> {
        self.node.kubelet.write(&self.uid, Plugin::Secret, volume, keys)
    }

    /// Writes the Secret of the user-data.
    pub(super) fn user_data(&self, text: &[u8]) -> Result<()> {
        self.secret("ci-udata", &[(USER_DATA, text)])
    }

    /// Creates the tap as KubeVirt does.
    pub(super) fn tap(&self, shape: Shape) -> Result<Arc<Tap>> {
        let network = self.network.as_ref().context("the pod shares a namespace")?;
        let tap = network.bind(&primary(), Binding::Masquerade, shape)?;
        let gateway = format!("addr add {}/16 dev {}", host::ADDRESS, primary().bridge);
        network.ns().ip(&gateway)?;
        Ok(tap)
    }

    /// Boots a guest with a Linux network stack behind its tap.
    pub(super) fn guest(&self) -> Result<Guest> {
        let spec = Spec { route: Route::OnLink, shape: Shape::virtio(), ..Spec::of(&self.identity) };
        Guest::boot_on(self.tap(Shape::virtio())?, Namespace::new("guest")?, &spec)
    }

    /// Deletes the VMI, ends the launcher and removes the volumes.
    pub(super) fn end(self) -> Result<()> {
        self.node.server.delete(&self.key());
        drop(self.launcher);
        self.node.kubelet.remove(&self.uid)
    }
}

/// The fields of `spec` that name the Secret with the user-data.
pub(super) fn from_secret() -> Value {
    json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]})
}

/// Names of the devices of a pod's first network.
pub(super) fn primary() -> NicNames {
    names_of("default", None).remove(0)
}

/// Pause between two looks at something that other threads or the agent change.
pub(super) const LOOK: Duration = Duration::from_millis(100);
