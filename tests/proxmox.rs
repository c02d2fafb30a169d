//! The agent serves the VMs of a Proxmox VE node from their configurations, while these come, change and go.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_control::status::Status;
use support::agent::{self, Agent};
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::host::{self, Host};
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

/// Longest wait for the agent to notice a change.
const NOTICE: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(30);

/// A node with a directory that stands for `/etc/pve`.
struct Node {
    host: Host,
    room: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let node =
            Self { host: Host::new().expect("a node"), room: tempfile::tempdir().expect("a directory") };
        fs::create_dir(node.path("qemu-server")).expect("a directory");
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    fn configuration(&self, vmid: u32) -> PathBuf {
        self.path(&format!("qemu-server/{vmid}.conf"))
    }

    /// Boots a guest on the tap that qemu-server makes for the first NIC of a VM.
    fn guest(&self, vmid: u32, identity: &Identity) -> Result<Guest> {
        let tap = Tap::create(self.host.ns(), &format!("tap{vmid}i0"), Shape::virtio())?;
        self.host.ns().ip(&format!("link set {} master {} up", tap.name(), host::BRIDGE))?;
        let spec = Spec { shape: Shape::virtio(), ..Spec::of(identity) };
        Guest::boot_on(Arc::new(tap), Namespace::new("guest")?, &spec)
    }

    fn agent(&self) -> Result<Agent<'_>> {
        let pve = |name: &str| self.path(name).display().to_string();
        let text = format!(
            "proxmox: {{directory: {}, files: {}, storages: {}, resolv_conf: {}}}\n",
            pve("qemu-server"),
            pve("parts"),
            pve("storage.cfg"),
            pve("resolv.conf")
        );
        replace(&self.path("agent.yaml"), &text)?;
        let mut words = agent::arguments(self.room.path(), &[]);
        let records = words.iter().position(|word| word == "--records").context("a word")?;
        words.drain(records..records + 2);
        words.extend(["--config".into(), self.path("agent.yaml").into()]);
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }

    fn status(&self) -> Result<Status> {
        let mut command = Command::new(agent::binary()?);
        command.args(["status", "--all", "--json", "--run"]).arg(self.path("run"));
        Ok(serde_json::from_slice(&command.output()?.stdout)?)
    }

    fn served(&self) -> Result<u64> {
        let instances = self.status()?.instances;
        Ok(instances.iter().filter(|of| of.source == "proxmox").map(|of| of.count).sum())
    }
}

/// The configuration of a VM with one NIC.
fn configuration(name: &str, identity: &Identity) -> String {
    let Identity { mac, address, instance_id, .. } = identity;
    format!(
        "ciuser: alice\nipconfig0: ip={address}/16,gw={}\nname: {name}\nnameserver: 192.0.2.53\n\
         net0: virtio={},bridge=vmbr0,firewall=1,tag=7\nostype: l26\nsearchdomain: example\n\
         smbios1: uuid={instance_id}\n\n[PENDING]\nname: pending\n",
        host::ADDRESS,
        mac.to_string().to_uppercase()
    )
}

fn has(guest: &Guest, path: &str, part: &str) -> Result<()> {
    let fetched = guest.fetch(path, PATIENCE)?;
    let text = fetched.text();
    ensure!(fetched.status == 200 && text.contains(part), "{path}: {} {text}", fetched.status);
    Ok(())
}

#[test]
fn a_vm_is_served_while_its_configuration_is_on_the_node() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new();
    let (first, second) = (Identity::of(0), Identity::of(1));
    let guest = node.guest(100, &first).expect("a guest");
    replace(&node.configuration(100), &configuration("web-1", &first)).expect("written");
    replace(&node.configuration(9000), "template: 1\n").expect("written");
    let _agent = node.agent().expect("an agent");
    eventually(NOTICE, || has(&guest, "/v1/user-data", "fqdn: web-1.example\nuser: alice\n"))
        .expect("user-data");
    has(&guest, "/v1/network-config", &format!("mac_address: '{}'", first.mac)).expect("network-config");
    has(&guest, "/openstack/latest/meta_data.json", "web-1.example").expect("OpenStack's meta-data");
    assert_eq!(node.served().expect("a status"), 1, "templates are not served");

    replace(&node.configuration(100), &configuration("web-2", &first)).expect("written");
    eventually(NOTICE, || has(&guest, "/v1/meta-data", "local-hostname: web-2.example"))
        .expect("the new name");

    // A VM arrives by live migration: its tap exists before its configuration does.
    let other = node.guest(101, &second).expect("a guest");
    replace(&node.configuration(101), &configuration("web-3", &second)).expect("written");
    eventually(NOTICE, || has(&other, "/v1/meta-data", "local-hostname: web-3.example"))
        .expect("the second VM");
    fs::remove_file(node.configuration(101)).expect("it leaves");
    eventually(NOTICE, || {
        let served = node.served()?;
        ensure!(served == 1, "{served} are served");
        Ok(())
    })
    .expect("one VM is left");
}

#[test]
fn vms_are_served_while_the_clusters_file_system_is_away() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new();
    let identity = Identity::of(0);
    let guest = node.guest(100, &identity).expect("a guest");
    replace(&node.configuration(100), &configuration("web-1", &identity)).expect("written");
    let agent = node.agent().expect("an agent");
    let is_served = || has(&guest, "/v1/meta-data", "local-hostname: web-1.example");
    eventually(NOTICE, is_served).expect("it is served");

    let (there, away) = (node.path("qemu-server"), node.path("unmounted"));
    let moved = |from: &Path, to: &Path| fs::rename(from, to).expect("moved");
    moved(&there, &away);
    let is_told = || {
        let told = node.status()?.proxmox.context("a section")?.failing;
        told.context("no failure").map(|_| ())
    };
    eventually(NOTICE, is_told).expect("status tells of it");
    is_served().expect("the last good record");
    agent.stop().expect("the agent stops");

    // The records come from the snapshot.
    let _agent = node.agent().expect("an agent starts without the mount");
    eventually(NOTICE, is_served).expect("the snapshot is served");
    moved(&away, &there);
    eventually(NOTICE, || {
        let status = node.status()?;
        ensure!(!status.from_snapshot, "the records still come from the snapshot");
        Ok(())
    })
    .expect("the records are back");
    is_served().expect("it is served");
}
