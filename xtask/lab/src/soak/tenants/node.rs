//! The node: an API server, kubelet's directory, Proxmox VE's directory, the pods of all tenants, and the agent in a
//! control group with a memory limit.

use anyhow::{Context as _, Result, bail, ensure};
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
use support::eventually::eventually;
use support::guest::{Guest, Route, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::pod::{Binding, Cgroups, How, Kubelet, Launcher, Plugin, PodNetwork, fresh_uid};
use support::process::write_script;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};
use support::tap_client::storm_until;
use support::{agent, host};
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

// A control group with the memory limit that the DaemonSet sets. Version 2 is used where it controls memory, and
// version 1 elsewhere.

/// The longest time until a group without processes can be removed.
const REMOVED_WITHIN: Duration = Duration::from_secs(10);

/// Names of groups begin with this; the id of the process that made the group follows.
const PREFIX: &str = "xdp-imds-soak-";

/// The version of control groups that limits memory on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A control group for the agent. Removed on drop.
#[derive(Debug)]
pub(super) struct MemoryGroup {
    path: PathBuf,
    version: Version,
}

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
        let (parent, version) = controller()?;
        sweep(&parent);
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make the control group {}", path.display()))?;
        let group = Self { path, version };
        let limits: &[&str] = match version {
            Version::One => &["memory.limit_in_bytes"],
            Version::Two => &["memory.max"],
        };
        for file in limits {
            group.write(file, &limit.to_string())?;
        }
        // As for a container of Kubernetes: no swap. A kernel may lack these files.
        let swap = match version {
            Version::One => group.write("memory.swappiness", "0"),
            Version::Two => group.write("memory.swap.max", "0"),
        };
        if let Err(error) = swap {
            eprintln!("swap stays as it is: {error:#}");
        }
        Ok(group)
    }

    /// Describes the limit for the report.
    pub(super) fn kind(&self) -> &'static str {
        match self.version {
            Version::One => "cgroup v1",
            Version::Two => "cgroup v2",
        }
    }

    /// The file that takes the ids of processes.
    pub(super) fn processes(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Reads the group's memory.
    pub(super) fn usage(&self) -> Result<Usage> {
        let stat = self.read("memory.stat")?;
        Ok(match self.version {
            Version::One => Usage {
                anonymous: field(&stat, "total_rss").context("memory.stat has no total_rss")?,
                peak: number(&self.read("memory.max_usage_in_bytes")?),
                killed: field(&self.read("memory.oom_control")?, "oom_kill").unwrap_or_default(),
            },
            Version::Two => Usage {
                anonymous: field(&stat, "anon").context("memory.stat has no anon")?,
                // Linux 5.19
                peak: self.read("memory.peak").map_or(0, |text| number(&text)),
                killed: field(&self.read("memory.events")?, "oom_kill").unwrap_or_default(),
            },
        })
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.path.join(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        if let Err(error) = eventually(REMOVED_WITHIN, || Ok(fs::remove_dir(&self.path)?)) {
            eprintln!("cannot remove the control group {}: {error:#}", self.path.display());
        }
    }
}

/// Removes groups whose process was killed. A group with processes stays.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let maker = name.strip_prefix(PREFIX).and_then(|pid| pid.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // An agent that outlived its maker is in it; its group is removed once it ends.
            _ = fs::remove_dir(entry.path());
        }
    }
}

/// Returns a directory for groups that can limit memory.
fn controller() -> Result<(PathBuf, Version)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    if let Some(root) = mount_point(&mounts, "cgroup2", "")
        && fs::read_to_string(root.join("cgroup.subtree_control"))
            .is_ok_and(|controllers| has_word(&controllers, "memory"))
    {
        return Ok((root, Version::Two));
    }
    match mount_point(&mounts, "cgroup", "memory") {
        Some(root) => Ok((root, Version::One)),
        None => bail!(
            "no control group limits memory here; mount cgroup2 with `+memory` in the root's cgroup.subtree_control"
        ),
    }
}

/// Finds a mount of a type with an option of the file system (proc_pid_mountinfo(5)).
fn mount_point(mounts: &str, kind: &str, option: &str) -> Option<PathBuf> {
    let found = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let is_kind = right.next() == Some(kind);
        let options = right.nth(1).unwrap_or_default();
        let fits = option.is_empty() || options.split(',').any(|word| word == option);
        (is_kind && fits).then(|| left.split(' ').nth(4)).flatten()
    });
    found.map(|path| Path::new(path).to_owned())
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|it| it == word)
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
pub(super) fn serve_new_vm(node: &Node, stop: &AtomicBool) -> Result<Duration> {
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
    use std::path::PathBuf;

    use super::{field, mount_point};

    #[test]
    fn the_mount_of_a_controller_is_found_by_type_and_option() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 25 0:27 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
                      32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(mounts, "cgroup", "memory"), Some(PathBuf::from("/sys/fs/cgroup/memory")));
        assert_eq!(mount_point(mounts, "cgroup2", ""), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(mount_point(mounts, "cgroup", "pids"), None);
    }

    #[test]
    fn a_field_is_read_by_its_whole_name() {
        let text = "rss 1\ntotal_rss 20\ntotal_rss_huge 3\n";
        assert_eq!(field(text, "total_rss"), Some(20));
        assert_eq!(field(text, "total"), None);
    }
}
