//! The node: an API server, kubelet's directory, Proxmox VE's directory, the pods of all tenants, and the agent in a
//! control group with a memory limit.

use anyhow::{Context as _, Result, ensure};
use metadata_feed::pods::{NicNames, names_of};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::apiserver::ApiServer;
use support::bpffs::Bpffs;
use support::guest::{Guest, Route, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::pod::{Binding, Cgroups, How, Kubelet, Launcher, Plugin, PodNetwork, fresh_uid, vmi_uid};
use support::process::write_script;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};
use support::tap_client::storm_until;
use support::{agent, host};
use tempfile::TempDir;

use crate::control_group::{CgroupVersion, ControlGroup};

/// The name of the node.
const NODE: &str = "n1";
/// Guests have numbers below this one, and use them in turn.
const NUMBERS: u16 = 15_000;
/// The issuer of identity tokens.
pub(super) const ISSUER: &str = "https://imds.soak.example";
/// The file in a Secret that holds the user-data.
const USER_DATA: &str = "userdata";

/// Everything outside the agent.
pub(super) struct TenantsNode {
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

impl TenantsNode {
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
            self.memory.0.processes().display(),
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
    node: &'a TenantsNode,
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
                "name": self.identity.hostname, "namespace": self.namespace, "uid": vmi_uid(&self.uid),
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

/// A control group for the agent, with the memory limit that the DaemonSet sets.
#[derive(Debug)]
pub(super) struct MemoryGroup(ControlGroup);

/// The memory of all processes of the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Anonymous memory, in bytes.
    pub(super) anonymous: u64,
    /// The most memory so far, with file cache and what the kernel charges, in bytes.
    pub(super) peak: u64,
    /// Processes that the kernel has killed because of the limit.
    pub(super) killed: u64,
}

impl MemoryGroup {
    /// Creates the group.
    pub(super) fn new(limit: u64) -> Result<Self> {
        let group = ControlGroup::new("memory", "tenants")?;
        let (most, swap) = match group.version {
            CgroupVersion::V1 => ("memory.limit_in_bytes", "memory.swappiness"),
            CgroupVersion::V2 => ("memory.max", "memory.swap.max"),
        };
        group.write(most, &limit.to_string())?;
        // As for a container of Kubernetes: no swap. A kernel may lack these files.
        if let Err(error) = group.write(swap, "0") {
            eprintln!("swap stays as it is: {error:#}");
        }
        Ok(Self(group))
    }

    /// Describes the limit for the report.
    pub(super) fn kind(&self) -> &'static str {
        match self.0.version {
            CgroupVersion::V1 => "cgroup v1",
            CgroupVersion::V2 => "cgroup v2",
        }
    }

    /// Reads the group's memory.
    pub(super) fn usage(&self) -> Result<Usage> {
        let stat = self.0.read("memory.stat")?;
        Ok(match self.0.version {
            CgroupVersion::V1 => Usage {
                anonymous: field(&stat, "total_rss").context("memory.stat has no total_rss")?,
                peak: number(&self.0.read("memory.max_usage_in_bytes")?),
                killed: field(&self.0.read("memory.oom_control")?, "oom_kill").unwrap_or_default(),
            },
            CgroupVersion::V2 => Usage {
                anonymous: field(&stat, "anon").context("memory.stat has no anon")?,
                // Linux 5.19
                peak: self.0.read("memory.peak").map_or(0, |text| number(&text)),
                killed: field(&self.0.read("memory.events")?, "oom_kill").unwrap_or_default(),
            },
        })
    }
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or_default()
}

// The modest tenant: its new VMs, one after the other, and the time until each has its own data.

/// The namespace of the modest tenant.
pub(super) const NAMESPACE: &str = "modest";
/// The longest time until a new VM is served. A VM that is not served by then counts with this time, and as a failure.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The time of one attempt of the guest, as a client of a cloud has it. A guest that boots asks again at once.
const ATTEMPT: Duration = Duration::from_millis(250);
const PATH: &str = "/v1/user-data";

/// Runs a new VM, and returns the time from its VMI and pod to the first answer with its own data. Its pod is complete
/// before: the time that the lab takes to make devices does not count. Gives up once `stop` is true.
pub(super) fn serve_new_vm(node: &TenantsNode, stop: &AtomicBool) -> Result<Duration> {
    let pod = node.pod(NAMESPACE)?;
    let text = format!("#cloud-config\n# {}\n", pod.uid);
    pod.user_data(text.as_bytes())?;
    let tap = pod.tap(Shape::default())?;
    let began = Instant::now();
    pod.put(pod.vmi(&from_secret()));
    let outcomes = storm_until(vec![(pod.identity.clone(), tap)], &[PATH], PATIENCE, ATTEMPT, stop);
    let took = began.elapsed();
    let key = pod.key();
    pod.end()?;
    let outcome = outcomes.into_iter().next().context("a storm of one guest has one outcome")?;
    let answers = outcome.answers.with_context(|| format!("{key} was not served within {PATIENCE:?}"))?;
    let answer = answers.first().context("no answer")?;
    let body = String::from_utf8_lossy(&answer.body);
    ensure!(answer.status == 200, "{key} got {}: {body}", answer.status);
    ensure!(body == text, "ISOLATION: {key} got data that is not its own: {body}");
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn a_field_is_read_by_its_whole_name() {
        let text = "rss 1\ntotal_rss 20\ntotal_rss_huge 3\n";
        assert_eq!(field(text, "total_rss"), Some(20));
        assert_eq!(field(text, "total"), None);
    }
}
