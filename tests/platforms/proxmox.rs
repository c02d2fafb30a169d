//! The agent serves the VMs of a Proxmox VE node from their configurations, while these come, change and go.

mod fleet;

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use fleet::{STORAGE, Seat, Vm, fleet};
use metadata_control::status::{AgentStatus, PortState};
use rustix::mount::{MountFlags, UnmountFlags};
use serde_json::Value;
use support::agent::{self, Agent};
use support::cloudinit::{CloudInit, Release};
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::{self, Host};
use support::netns::Namespace;
use support::process::write_script;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};
use support::{privileged, seed};

/// Longest wait for the agent to notice a change.
const NOTICE: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(30);
const FUSE: &str = "/dev/fuse";

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

    /// A node with the VM 100, which is called web-1, and its guest.
    fn with_vm() -> (Self, Identity, Guest) {
        let (node, identity) = (Self::new(), Identity::of(0));
        let guest = node.guest(100, &identity).expect("a guest");
        replace(&node.configuration(100), &configuration("web-1", &identity)).expect("written");
        (node, identity, guest)
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

    /// Writes the configurations of VMs and the files that they name.
    fn write_fleet(&self, vms: &[Vm]) -> Result<()> {
        let storage = self.path(STORAGE);
        fs::create_dir_all(storage.join("snippets"))?;
        replace(&self.path("storage.cfg"), &format!("dir: {STORAGE}\n\tpath {}\n", storage.display()))?;
        replace(&self.path("resolv.conf"), "nameserver 192.0.2.53\n")?;
        for vm in vms {
            if let Some((name, text)) = vm.snippet() {
                replace(&storage.join("snippets").join(name), &text)?;
            }
            replace(&self.configuration(vm.vmid), &vm.configuration())?;
        }
        Ok(())
    }

    fn status(&self) -> Result<AgentStatus> {
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

#[privileged::test]
fn a_vm_is_served_while_its_configuration_is_on_the_node() {
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

#[privileged::test]
fn two_configurations_with_one_uuid_are_two_vms() {
    let node = Node::new();
    let victim = Identity::of(0);
    let attacker = Identity { instance_id: victim.instance_id.clone(), ..Identity::of(1) };
    let guests = [(100, &victim), (101, &attacker)].map(|(vmid, identity)| {
        replace(&node.configuration(vmid), &configuration(&format!("vm-{vmid}"), identity)).expect("written");
        node.guest(vmid, identity).expect("a guest")
    });
    let _agent = node.agent().expect("an agent");
    for (guest, name) in guests.iter().zip(["vm-100", "vm-101"]) {
        eventually(NOTICE, || has(guest, "/v1/meta-data", name)).expect("its own meta-data");
    }
    let ask = |guest: &Guest, words: &[&str], path: &str| {
        let url = format!("http://{METADATA}{path}");
        let words: Vec<_> = words.iter().copied().chain([&*url]).collect();
        let got = guest.curl(&words, PATIENCE).unwrap_or_else(|error| panic!("{path}: {error:#}"));
        (got.status, got.text())
    };
    let [victim, attacker] = &guests;
    let google = "-HMetadata-Flavor: Google";
    let attribute = "/computeMetadata/v1/instance/guest-attributes/hostkeys/ed25519";
    assert_eq!(ask(victim, &[google, "-XPUT", "-dvictims-key"], attribute).0, 200);
    assert_eq!(ask(attacker, &[google], attribute).0, 404);
    assert_eq!(ask(attacker, &[google, "-XPUT", "-dforged"], attribute).0, 200);
    assert_eq!(ask(victim, &[google], attribute).1, "victims-key");
    for path in ["/latest/meta-data/instance-id", "/latest/dynamic/instance-identity/document"] {
        let [first, second] = [victim, attacker].map(|guest| ask(guest, &[], path));
        assert_eq!((first.0, second.0), (200, 200), "{path}: {first:?} {second:?}");
        assert_ne!(first.1, second.1, "{path}");
    }
    let status = node.status().expect("a status");
    let [shared] = &status.shared_uuids[..] else { panic!("{:?}", status.shared_uuids) };
    assert_eq!(shared.records, ["proxmox/100", "proxmox/101"]);
}

#[privileged::test]
fn vms_are_served_while_the_clusters_file_system_is_away() {
    let (node, _, guest) = Node::with_vm();
    let agent = node.agent().expect("an agent");
    let is_served = || has(&guest, "/v1/meta-data", "local-hostname: web-1.example");
    eventually(NOTICE, is_served).expect("it is served");

    let (there, away) = (node.path("qemu-server"), node.path("unmounted"));
    let moved = |from: &Path, to: &Path| fs::rename(from, to).expect("moved");
    moved(&there, &away);
    let is_told = || {
        let told = node.status()?.sources.pop().context("a section")?.failing;
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

/// A FUSE mount whose server never answers, as pmxcfs while it waits for the cluster.
struct Silent {
    at: PathBuf,
    /// Accesses fail once the server's end is closed.
    server: Option<fs::File>,
}

impl Silent {
    fn mount(at: PathBuf) -> Result<Self> {
        let server = fs::File::options().read(true).write(true).open(FUSE)?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let options = CString::new(options)?;
        rustix::mount::mount("silent", &at, "fuse", MountFlags::NODEV, Some(options.as_c_str()))?;
        Ok(Self { at, server: Some(server) })
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.server = None;
        rustix::mount::unmount(&self.at, UnmountFlags::DETACH).expect("unmounted");
    }
}

#[test]
fn an_agent_starts_with_the_snapshot_while_the_file_system_does_not_answer() {
    let no_fuse = (!Path::new(FUSE).exists()).then_some("/dev/fuse is missing");
    if !privileged::or_skip_for(privileged::missing().or(no_fuse)) {
        return;
    }
    let (node, _, guest) = Node::with_vm();
    let agent = node.agent().expect("an agent");
    let is_served = || has(&guest, "/v1/meta-data", "local-hostname: web-1.example");
    eventually(NOTICE, is_served).expect("it is served");
    agent.stop().expect("the agent stops");

    let silent = Silent::mount(node.path("qemu-server")).expect("a mount");
    let _agent = node.agent().expect("an agent starts");
    eventually(NOTICE, is_served).expect("the snapshot is served");
    drop(silent);
    eventually(NOTICE, || {
        ensure!(!node.status()?.from_snapshot, "the records still come from the snapshot");
        Ok(())
    })
    .expect("the records are back");
    is_served().expect("it is served");
}

/// VMs of the large node.
const VMS: u16 = 200;
/// cloud-init's releases, one for each of the guests that boot at a time.
const RELEASES: [Release; 4] = [Release::Distribution, Release::Newer, Release::Distribution, Release::Newer];

/// Boots guests one after the other until all have booted. Returns what is wrong with them, and their instance ids.
fn boot(cloud_init: &CloudInit, vms: &[Vm], taps: &[Arc<Tap>], next: &AtomicUsize) -> Result<Vec<Outcome>> {
    let mut seat = Seat::new(cloud_init)?;
    let mut outcomes = Vec::new();
    while let (number, Some(vm)) = take(vms, next) {
        let crawls = seat.boot(vm, Arc::clone(&taps[number])).with_context(|| format!("VM {}", vm.vmid))?;
        let mut wrong: Vec<_> = crawls.iter().flat_map(|crawl| vm.wrong(crawl)).collect();
        let [one, other] = crawls.map(|crawl| crawl.instance_id);
        if one != other {
            wrong.push(format!("{} instance id: {one} of OpenStack, {other} of NoCloud", vm.vmid));
        }
        outcomes.push(Outcome { wrong, instance_id: one });
    }
    Ok(outcomes)
}

/// What came of one guest.
struct Outcome {
    wrong: Vec<String>,
    instance_id: String,
}

fn take<'a>(vms: &'a [Vm], next: &AtomicUsize) -> (usize, Option<&'a Vm>) {
    let number = next.fetch_add(1, Ordering::Relaxed);
    (number, vms.get(number))
}

#[test]
fn all_of_200_vms_end_with_what_their_configurations_say() {
    let Some(releases) = RELEASES.map(CloudInit::or_skip).into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    let vms = fleet(VMS, seed());
    let mut node = Node::new();
    node.write_fleet(&vms).expect("written");
    let names: Vec<_> = vms.iter().map(Vm::tap).collect();
    let taps = node.host.rack_of(&names, Shape::virtio()).expect("taps");
    let _agent = node.agent().expect("an agent");
    eventually(NOTICE, || {
        let attached = node.status()?.ports.counts.get(&PortState::Attached).copied().unwrap_or_default();
        ensure!(attached == u64::from(VMS), "{attached} ports are attached");
        Ok(())
    })
    .expect("every VM is served");

    let next = AtomicUsize::new(0);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let (vms, taps, next) = (&vms, &taps, &next);
        let seat = |release: &&'static CloudInit| {
            let release = *release;
            scope.spawn(move || boot(release, vms, taps, next).expect("the guests boot"))
        };
        let seats: Vec<_> = releases.iter().map(seat).collect();
        seats.into_iter().flat_map(|seat| seat.join().expect("no panic")).collect()
    });
    let wrong: Vec<_> = outcomes.iter().flat_map(|outcome| &outcome.wrong).cloned().collect();
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    let ids: BTreeSet<_> = outcomes.iter().map(|outcome| &outcome.instance_id).collect();
    assert_eq!(ids.len(), vms.len(), "each VM is an instance of its own");
}

/// Joins nodes to a cluster, whose nodes see each other's configurations.
fn join(nodes: &[Node]) -> tempfile::TempDir {
    let cluster = tempfile::tempdir().expect("a directory");
    for (n, node) in nodes.iter().enumerate() {
        let place = cluster.path().join(format!("node{n}"));
        fs::create_dir(&place).expect("a node");
        symlink(node.path("qemu-server"), place.join("qemu-server")).expect("a link");
        symlink(cluster.path(), node.path("nodes")).expect("a link");
    }
    cluster
}

#[privileged::test]
fn a_vm_that_migrates_is_served_on_both_nodes_until_its_configuration_has_moved() {
    let nodes = [Node::new(), Node::new()];
    let _cluster = join(&nodes);
    let identity = Identity::of(0);
    let here = nodes[0].guest(100, &identity).expect("a guest");
    replace(&nodes[0].configuration(100), &configuration("web-1", &identity)).expect("written");
    let _agents = nodes.each_ref().map(|node| node.agent().expect("an agent"));
    let is_served = |guest: &Guest| has(guest, "/v1/meta-data", "local-hostname: web-1.example");
    eventually(NOTICE, || is_served(&here)).expect("served by the first node");
    assert_eq!(nodes[1].served().expect("a status"), 0, "a VM without a tap is not this node's");

    // While memory is copied, the VM has a tap on both nodes.
    let there = nodes[1].guest(100, &identity).expect("a guest");
    eventually(NOTICE, || is_served(&there)).expect("served by the second node already");
    is_served(&here).expect("and by the first one still");

    // qemu-server moves the file when the VM runs on the other node, and ends QEMU on this one.
    fs::rename(nodes[0].configuration(100), nodes[1].configuration(100)).expect("moved");
    drop(here);
    eventually(NOTICE, || {
        let served = nodes[0].served()?;
        ensure!(served == 0, "{served} are served");
        Ok(())
    })
    .expect("the first node forgets it");
    is_served(&there).expect("the second node serves it all along");
    assert_eq!(nodes[1].served().expect("a status"), 1);
}

#[privileged::test]
fn a_vm_whose_migration_fails_is_forgotten_where_it_did_not_arrive() {
    let nodes = [Node::new(), Node::new()];
    let _cluster = join(&nodes);
    let identity = Identity::of(0);
    replace(&nodes[0].configuration(100), &configuration("web-1", &identity)).expect("written");
    let _agent = nodes[1].agent().expect("an agent");
    let served = |expected: u64| {
        eventually(NOTICE, || {
            let served = nodes[1].served()?;
            ensure!(served == expected, "{served} are served");
            Ok(())
        })
    };
    let there = nodes[1].guest(100, &identity).expect("a guest");
    served(1).expect("the tap is here");
    drop(there);
    served(0).expect("the tap is gone");
}

#[test]
fn the_service_starts_between_the_clusters_file_system_and_the_vms() {
    let unit = include_str!("../../deploy/systemd/xdp-imds.service");
    let of = |key: &str| -> BTreeSet<&str> {
        unit.lines().filter_map(|line| line.strip_prefix(key)).flat_map(str::split_whitespace).collect()
    };
    assert!(of("After=").contains("pve-cluster.service"), "{unit}");
    assert!(of("Before=").contains("pve-guests.service"), "{unit}");
}

// The hookscript of `deploy/proxmox` announces the end of a VM, and nothing that a guest does holds it up for long.

const HOOKSCRIPT: &str = include_str!("../../deploy/proxmox/xdp-imds");

impl Node {
    /// The hookscript of this node, which waits so long for guests.
    fn hookscript(&self, hold: &str) -> PathBuf {
        let agent = agent::binary().expect("the agent is built").display().to_string();
        let text = HOOKSCRIPT.replace("agent=/usr/bin/xdp-imds\n", &format!("agent={agent}\n"));
        let text = text.replace("\nhold=\n", &format!("\nhold={hold}\n"));
        let run = self.path("run").display().to_string();
        let text = text.replace("\noptions=\n", &format!("\noptions='--run {run}'\n"));
        let path = self.path("hookscript");
        write_script(&path, &text).expect("a script");
        path
    }

    /// Runs the hookscript as qemu-server does; true if it ended with 0.
    fn phase(&self, hold: &str, phase: &str) -> bool {
        Command::new(self.hookscript(hold)).args(["100", phase]).status().expect("it runs").success()
    }
}

fn events(guest: &Guest) -> Result<Vec<String>> {
    let fetched = guest.fetch("/v1/events", PATIENCE)?;
    let document: Value = serde_json::from_str(&fetched.text())?;
    let events = document["events"].as_array().cloned().unwrap_or_default().into_iter();
    let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
    let shown =
        events.map(|event| ["id", "kind", "state"].map(|name| text(&event, name)).join(" ")).collect();
    Ok(shown)
}

#[privileged::test]
fn a_vm_is_told_of_a_migration_and_of_its_end() {
    let (node, identity, guest) = Node::with_vm();
    let plain = configuration("web-1", &identity);
    let _agent = node.agent().expect("an agent");
    let shows = |expected: &[&str], what: &str| {
        eventually(NOTICE, || {
            let found = events(&guest)?;
            anyhow::ensure!(found == expected, "{found:?}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    };
    shows(&[], "nothing is planned");
    replace(&node.configuration(100), &format!("lock: migrate\n{plain}")).expect("written");
    shows(&["migration freeze started"], "the VM migrates");
    replace(&node.configuration(100), &plain).expect("written");
    shows(&[], "the migration has failed");
    assert!(node.phase("", "pre-start") && node.phase("", "post-start"));
    shows(&[], "it starts");
    assert!(node.phase("", "pre-stop"));
    shows(&["stop terminate started"], "the host stops it");
    assert!(node.phase("", "post-stop"));
    shows(&["stop terminate completed"], "it has ended");
    // Its host was lost while it stopped, and it starts again.
    assert!(node.phase("", "pre-stop") && node.phase("", "pre-start"));
    shows(&["stop terminate completed"], "it starts again");
}

#[privileged::test]
fn the_host_waits_for_the_guest_as_asked_and_in_no_fault_longer() {
    let (node, _, guest) = Node::with_vm();
    let agent = node.agent().expect("an agent");
    eventually(NOTICE, || events(&guest)).expect("it is served");
    assert!(node.phase("200ms", "pre-stop"), "a silent guest changes nothing");
    assert_eq!(events(&guest).expect("events"), ["stop terminate started"]);
    assert!(node.phase("", "post-stop"));

    // A guest that is ready ends the wait.
    let run = |script: &Path| {
        let mut command = Command::new(script);
        command.args(["100", "pre-stop"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("it runs")
    };
    let hold = || run(&node.hookscript("30s"));
    let told = |what: &str| {
        eventually(PATIENCE, || {
            let found = events(&guest)?;
            anyhow::ensure!(found == ["stop terminate scheduled"], "{found:?}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    };
    let ends = |mut waiting: std::process::Child, what: &str| {
        let end = eventually(Duration::from_secs(20), || {
            anyhow::ensure!(waiting.try_wait()?.is_some_and(|end| end.success()), "it still waits");
            Ok(())
        });
        let _ = waiting.kill();
        end.unwrap_or_else(|error| panic!("{what}: {error:#}"));
    };
    let waiting = hold();
    told("it stops");
    let url = format!("http://{METADATA}/v1/events/stop");
    assert_eq!(guest.curl(&["-X", "POST", &url], PATIENCE).expect("an answer").status, 204);
    ends(waiting, "the guest is ready");
    assert_eq!(events(&guest).expect("events"), ["stop terminate started"]);
    assert!(node.phase("", "post-stop"));

    // So does the end of the agent, and without one, or with one that cannot run, there is no wait.
    let waiting = hold();
    told("it stops again");
    agent.kill().expect("an agent to kill");
    ends(waiting, "the agent is killed");
    ends(hold(), "there is no agent");
    let script = node.hookscript("30s");
    let text = fs::read_to_string(&script).expect("the script");
    let agent = agent::binary().expect("built").display().to_string();
    let text = text.replace(&format!("agent={agent}\n"), "agent=/nowhere/xdp-imds\n");
    write_script(&script, &text).expect("a script");
    ends(run(&script), "it is not installed");
}
