//! The agent answers the instances of an OpenStack compute node: ports and projects from a real `ovsdb-server` with the
//! schemas of Open vSwitch and OVN, answers from Nova itself. In [`ovn`] OVN itself fills the databases.

mod answers;
mod nova;
mod ovn;

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_control::status::AgentStatus;
use nova::{Nova, SECRET};
use serde_json::{Value, json};
use support::agent::{self, Agent};
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::{self, Host};
use support::netns::{Namespace, run};
use support::packages::{Packages, With};
use support::process::terminate;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

/// Longest wait for the agent to notice a change.
const NOTICE: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(40);
const CHASSIS: &str = "node-1";
const META_DATA: &str = "/openstack/latest/meta_data.json";
const PASSWORD: &str = "/openstack/latest/password";
/// The fixed address of all instances: each is in a network of its own.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 16, 7);

/// What is unpacked and not installed, because it would start services.
const PACKAGES: [&str; 4] = ["openvswitch-switch", "ovn-central", "ovn-common", "ovn-host"];

/// A database of `ovsdb-server`, which is installed.
struct Database {
    server: Child,
    socket: PathBuf,
}

impl Database {
    fn create(room: &Path, name: &str, schema: &Path) -> Result<Self> {
        Self::make(room, name, |tool, file| _ = tool.arg("create").args([file, schema]))
    }

    /// A cluster of two servers.
    fn cluster(room: &Path, schema: &Path) -> Result<[Self; 2]> {
        let of = |name: &str| format!("unix:{}", room.join(name).display());
        let make = |tool: &mut Command, file: &Path| {
            _ = tool.arg("create-cluster").args([file, schema]).arg(of("raft-1"))
        };
        let first = Self::make(room, "cluster-1", make)?;
        let join = |tool: &mut Command, file: &Path| {
            _ = tool.arg("join-cluster").arg(file).args(["OVN_Southbound", &of("raft-2"), &of("raft-1")]);
        };
        let second = Self::make(room, "cluster-2", join)?;
        eventually(NOTICE, || {
            run(Command::new("ovsdb-client").args(["dump", &second.remote(), "OVN_Southbound", "Chassis"]))
        })?;
        Ok([first, second])
    }

    fn make(room: &Path, name: &str, words: impl FnOnce(&mut Command, &Path)) -> Result<Self> {
        let (file, socket) = (room.join(format!("{name}.db")), room.join(format!("{name}.sock")));
        let mut tool = Command::new("ovsdb-tool");
        words(&mut tool, &file);
        run(&mut tool)?;
        let server = Self::serve(&file, &socket, |command| Ok(command.spawn()?))?;
        Ok(Self { server, socket })
    }

    fn serve(file: &Path, socket: &Path, spawn: impl FnOnce(&mut Command) -> Result<Child>) -> Result<Child> {
        let mut command = Command::new("ovsdb-server");
        command.arg(format!("--remote=punix:{}", socket.display()));
        command.arg(format!("--unixctl={}.ctl", socket.display())).arg("--no-chdir").arg(file);
        let server = spawn(command.stdout(Stdio::null()).stderr(Stdio::null()));
        let server = server.context("`apt-get install openvswitch-common` installs ovsdb-server")?;
        eventually(NOTICE, || {
            run(Command::new("ovsdb-client").arg("list-dbs").arg(format!("unix:{}", socket.display())))
        })?;
        Ok(server)
    }

    fn stop(&mut self) -> Result<()> {
        terminate(self.server.id())?;
        self.server.wait()?;
        Ok(())
    }

    fn remote(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    /// Runs a transaction, whose first element is the database's name.
    fn transact(&self, transaction: &Value) -> Result<Value> {
        let text = transaction.to_string();
        let answer = run(Command::new("ovsdb-client").arg("transact").args([self.remote(), text]))?;
        let answer: Value = serde_json::from_str(&answer)?;
        let failed = answer.as_array().into_iter().flatten().find(|result| !result["error"].is_null());
        ensure!(failed.is_none(), "{failed:?}");
        Ok(answer)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        _ = self.server.kill();
        _ = self.server.wait();
    }
}

/// A compute node, and the parts of its cloud that it depends on.
struct Node {
    host: Host,
    room: tempfile::TempDir,
    ovs: Database,
    southbound: Database,
    /// The datapath of all ports, and this node's chassis.
    datapath: String,
    chassis: String,
    nova: Nova,
    /// Packages with the schemas.
    schemas: PathBuf,
}

/// An instance with one port.
struct Instance {
    identity: Identity,
    port: String,
    project: String,
    guest: Guest,
}

impl Node {
    fn or_skip() -> Option<Self> {
        let schemas = Packages::or_skip("bookworm", &PACKAGES, With::Nothing)?;
        Some(Self::new(schemas.root(), Nova::or_skip()?).expect("a node"))
    }

    fn new(packages: &Path, nova: Nova) -> Result<Self> {
        let (host, room) = (Host::new()?, tempfile::tempdir()?);
        let schema = |path: &str| packages.join("usr/share").join(path);
        let ovs = Database::create(room.path(), "conf", &schema("openvswitch/vswitch.ovsschema"))?;
        let southbound = Database::create(room.path(), "ovnsb", &schema("ovn/ovn-sb.ovsschema"))?;
        let ids = json!(["map", [["system-id", CHASSIS], ["ovn-remote", southbound.remote()]]]);
        ovs.transact(&json!(["Open_vSwitch", insert("Open_vSwitch", json!({"external_ids": ids}))]))?;
        let made = add_chassis(&southbound)?;
        let uuid = |at: usize| made[at]["uuid"][1].as_str().unwrap_or_default().to_owned();
        let (datapath, chassis) = (uuid(0), uuid(2));
        nova.start(host.ns())?;
        replace(&room.path().join("secret"), SECRET)?;
        Ok(Self { host, room, ovs, southbound, datapath, chassis, nova, schemas: packages.to_owned() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    /// Boots an instance as Nova does. Instances with even numbers belong to one project, the others to another.
    fn boot(&self, number: u16) -> Result<Instance> {
        let instance = self.boot_unknown(Identity { address: ADDRESS, ..Identity::of(number) })?;
        self.nova.add(&instance)?;
        Ok(instance)
    }

    /// The instance's tap, its guest, and its port in the local OVSDB.
    fn boot_unknown(&self, identity: Identity) -> Result<Instance> {
        let number = identity.number;
        let port = format!("{number:08x}-1111-4222-8333-444444444444");
        let project = format!("{:032x}", number % 2);
        let name = format!("tap{}", &port[..11]);
        let tap = Tap::create(self.host.ns(), &name, Shape::virtio())?;
        self.host.ns().ip(&format!("link set {name} master {} up", host::BRIDGE))?;
        let spec = Spec { shape: Shape::virtio(), ..Spec::of(&identity) };
        let guest = Guest::boot_on(Arc::new(tap), Namespace::new("guest")?, &spec)?;
        let instance = Instance { identity, port, project, guest };
        self.plug(&instance, &name)?;
        Ok(instance)
    }

    /// What os-vif writes.
    fn plug(&self, instance: &Instance, name: &str) -> Result<()> {
        let ids = [
            ("iface-id", &*instance.port),
            ("attached-mac", &instance.identity.mac.to_string()),
            ("iface-status", "active"),
            ("vm-uuid", &instance.identity.instance_id),
        ];
        let ids: Vec<_> = ids.iter().map(|(key, value)| json!([key, value])).collect();
        self.ovs.transact(&json!([
            "Open_vSwitch",
            {"op": "insert", "table": "Interface", "uuid-name": "interface",
             "row": {"name": name, "external_ids": ["map", ids]}},
            {"op": "insert", "table": "Port", "uuid-name": "port",
             "row": {"name": name, "interfaces": ["named-uuid", "interface"]}},
            {"op": "insert", "table": "Bridge", "uuid-name": "bridge",
             "row": {"name": format!("br-{name}"), "ports": ["named-uuid", "port"]}},
            {"op": "mutate", "table": "Open_vSwitch", "where": [],
             "mutations": [["bridges", "insert", ["named-uuid", "bridge"]]]},
        ]))?;
        Ok(())
    }

    fn unplug(&self, instance: &Instance) -> Result<()> {
        let name = format!("br-tap{}", &instance.port[..11]);
        let found = json!(["Open_vSwitch", {"op": "select", "table": "Bridge", "where": [["name", "==", name]],
                           "columns": ["_uuid"]}]);
        let bridge = self.ovs.transact(&found)?[0]["rows"][0]["_uuid"].take();
        self.ovs.transact(&json!([
            "Open_vSwitch",
            {"op": "mutate", "table": "Open_vSwitch", "where": [],
             "mutations": [["bridges", "delete", ["set", [bridge]]]]},
        ]))?;
        Ok(())
    }

    /// What Neutron and ovn-controller write.
    fn bind(&self, instance: &Instance) -> Result<()> {
        let ids = [
            ("neutron:device_id", &*instance.identity.instance_id),
            ("neutron:project_id", &instance.project),
            ("neutron:cidrs", &format!("{}/16", instance.identity.address)),
        ];
        let ids: Vec<_> = ids.iter().map(|(key, value)| json!([key, value])).collect();
        self.southbound.transact(&json!([
            "OVN_Southbound",
            insert(
                "Port_Binding",
                json!({
                    "logical_port": instance.port, "datapath": ["uuid", self.datapath],
                    "tunnel_key": instance.identity.number + 1, "chassis": ["uuid", self.chassis],
                    "external_ids": ["map", ids],
                })
            )
        ]))?;
        Ok(())
    }

    /// Sets columns of an instance's binding.
    fn rebind(&self, instance: &Instance, columns: Value) -> Result<()> {
        let of_port = json!([["logical_port", "==", instance.port]]);
        let update = json!({"op": "update", "table": "Port_Binding", "where": of_port, "row": columns});
        self.southbound.transact(&json!(["OVN_Southbound", update])).map(drop)
    }

    fn configure(&self, nova: &str) -> Result<()> {
        configure(self.room.path(), &self.ovs, nova, None)
    }

    /// What `doctor` says in checks of this name.
    fn doctor(&self, about: &str) -> Result<Vec<Value>> {
        doctor(self.host.ns(), self.room.path(), about)
    }

    fn agent(&self) -> Result<Agent<'_>> {
        start_agent(self.host.ns(), self.room.path(), &self.ovs, None)
    }

    fn status(&self) -> Result<AgentStatus> {
        status(self.room.path())
    }

    fn has_problem(&self, words: &[&str]) -> Result<()> {
        has_problem(self.room.path(), words)
    }
}

fn configuration(room: &Path, ovs: &Database, nova: &str, southbound: Option<&str>) -> Value {
    json!({"openstack": {
        "nova": {"url": nova, "secret": room.join("secret")}, "ovsdb": ovs.remote(), "southbound": southbound,
    }})
}

fn configure(room: &Path, ovs: &Database, nova: &str, southbound: Option<&str>) -> Result<()> {
    replace(&room.join("agent.yaml"), &configuration(room, ovs, nova, southbound).to_string())
}

fn start_agent<'a>(
    ns: &'a Namespace,
    room: &Path,
    ovs: &Database,
    southbound: Option<&str>,
) -> Result<Agent<'a>> {
    start_agent_with(ns, room, &configuration(room, ovs, nova::URL, southbound))
}

fn start_agent_with<'a>(ns: &'a Namespace, room: &Path, configuration: &Value) -> Result<Agent<'a>> {
    replace(&room.join("agent.yaml"), &configuration.to_string())?;
    let mut words = agent::arguments(room, &[]);
    let records = words.iter().position(|word| word == "--records").context("a word")?;
    words.drain(records..records + 2);
    words.extend(["--config".into(), room.join("agent.yaml").into()]);
    Agent::start_binary(&agent::binary()?, ns, words)
}

fn doctor(ns: &Namespace, room: &Path, about: &str) -> Result<Vec<Value>> {
    let mut command = Command::new(agent::binary()?);
    command.args(["doctor", "--json", "--no-pins", "--config"]).arg(room.join("agent.yaml"));
    let output = ns.output(command.arg("--run").arg(room.join("run")))?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let checks = report["checks"].as_array().context("checks")?;
    Ok(checks.iter().filter(|check| check["name"] == about).cloned().collect())
}

fn status(room: &Path) -> Result<AgentStatus> {
    let mut command = Command::new(agent::binary()?);
    command.args(["status", "--all", "--json", "--run"]).arg(room.join("run"));
    Ok(serde_json::from_slice(&command.output()?.stdout)?)
}

/// Looks for a problem in the status with these words.
fn has_problem(room: &Path, words: &[&str]) -> Result<()> {
    let problems = status(room)?.troubles;
    let is_it = |problem: &String| words.iter().all(|word| problem.contains(word));
    ensure!(problems.iter().any(is_it), "{problems:?}");
    Ok(())
}

/// Adds a datapath and this node's chassis to a southbound database.
fn add_chassis(southbound: &Database) -> Result<Value> {
    southbound.transact(&json!([
        "OVN_Southbound",
        insert("Datapath_Binding", json!({"tunnel_key": 1})),
        {"op": "insert", "table": "Encap", "uuid-name": "encap",
         "row": {"type": "geneve", "ip": "192.0.2.1", "chassis_name": CHASSIS}},
        insert("Chassis", json!({"name": CHASSIS, "hostname": CHASSIS, "encaps": ["named-uuid", "encap"]})),
    ]))
}

fn insert(table: &str, row: Value) -> Value {
    json!({"op": "insert", "table": table, "row": row})
}

fn get(guest: &Guest, path: &str) -> Result<(u16, String)> {
    let fetched = guest.fetch(path, PATIENCE)?;
    Ok((fetched.status, fetched.text()))
}

fn gets(guest: &Guest, path: &str, status: u16, part: &str) -> Result<()> {
    let found = get(guest, path)?;
    ensure!(found.0 == status && found.1.contains(part), "{path}: {found:?}");
    Ok(())
}

#[test]
fn an_instance_is_known_by_its_port_alone() {
    let Some(node) = Node::or_skip() else { return };
    let instances = [0, 1].map(|number| node.boot(number).expect("an instance"));
    node.bind(&instances[0]).expect("bound");
    let _agent = node.agent().expect("an agent");
    node.bind(&instances[1]).expect("bound while the agent runs");
    for Instance { identity, guest, .. } in &instances {
        eventually(NOTICE, || gets(guest, META_DATA, 200, &identity.instance_id)).expect("meta-data");
        gets(guest, "/v1/events", 200, "incarnation").expect("the agent's own path");
    }
    let [Instance { guest, identity, project, .. }, other] = &instances;

    // Nothing that a guest says makes it another instance, or reaches Nova.
    let forged = [
        &*format!("-HX-Instance-ID: {}", other.identity.instance_id),
        &format!("-HX-Tenant-ID: {}", other.project),
        "-HX-Instance-ID-Signature: 00",
        "-HX-Metadata-Provider: lb",
        "-HX-Forwarded-For: 10.9.9.9",
        &format!("http://{METADATA}{META_DATA}?forged"),
    ];
    let fetched = guest.curl(&forged, PATIENCE).expect("an answer");
    assert!(fetched.status == 200 && fetched.text().contains(&identity.instance_id), "{}", fetched.text());
    for request in node.nova.requests().expect("requests") {
        let fields = request["fields"].as_object().expect("a mapping");
        let mut names: Vec<_> = fields.keys().map(String::as_str).collect();
        names.sort_unstable();
        let of_agent = ["HOST", "X_FORWARDED_FOR", "X_INSTANCE_ID", "X_INSTANCE_ID_SIGNATURE", "X_TENANT_ID"];
        assert_eq!(names, of_agent, "{request}");
        assert_eq!(fields["X_FORWARDED_FOR"], ADDRESS.to_string());
        let is_first = fields["X_INSTANCE_ID"] == *identity.instance_id;
        assert_eq!(is_first, fields["X_TENANT_ID"] == **project, "{request}");
    }

    node.unplug(other).expect("unplugged");
    eventually(NOTICE, || {
        let instances = node.status()?.instances;
        let count: u64 = instances.iter().filter(|of| of.source == "openstack").map(|of| of.count).sum();
        ensure!(count == 1, "{count} are served");
        Ok(())
    })
    .expect("one instance is left");
}

#[test]
fn guests_are_served_through_outages_and_status_names_who_is_away() {
    let Some(mut node) = Node::or_skip() else { return };
    let instance = node.boot(0).expect("an instance");
    node.bind(&instance).expect("bound");
    replace(&node.path("secret"), "another").expect("written");
    let status = |node: &Node, words: &[&str]| eventually(NOTICE, || node.has_problem(words));
    let (guest, id) = (&instance.guest, &instance.identity.instance_id);
    {
        let agent = node.agent().expect("an agent");
        eventually(NOTICE, || gets(guest, META_DATA, 403, "")).expect("a signature that Nova refuses");
        status(&node, &["403", "metadata_proxy_shared_secret", "secret"]).expect("a problem");
        replace(&node.path("secret"), SECRET).expect("written");
        eventually(NOTICE, || gets(guest, META_DATA, 200, id)).expect("no restart is needed");

        node.nova.stop();
        gets(guest, META_DATA, 200, id).expect("what is kept");
        gets(guest, "/openstack/latest/user_data?new", 503, "").expect("what is not");
        status(&node, &["Nova's metadata API", "has not answered"]).expect("a problem");
        node.nova.start(node.host.ns()).expect("the same Nova");
        eventually(NOTICE, || gets(guest, "/openstack/latest/user_data?new", 200, "#cloud-config"))
            .expect("Nova is back");
        // It writes the snapshot.
        assert!(agent.stop().expect("stopped").success());
    }
    // The southbound database is away when the agent starts: it starts with the snapshot.
    node.southbound.stop().expect("stopped");
    let _agent = node.agent().expect("an agent");
    eventually(NOTICE, || gets(guest, META_DATA, 200, id)).expect("an instance of the snapshot");
    status(&node, &["southbound database", "has been away"]).expect("a problem");
}

#[test]
fn a_server_that_has_lost_its_cluster_is_left_for_another() {
    let Some(node) = Node::or_skip() else { return };
    let schema = node.schemas.join("usr/share/ovn/ovn-sb.ovsschema");
    let [first, mut second] = Database::cluster(node.room.path(), &schema).expect("a cluster");
    // It knows the chassis, and nothing of the instance.
    add_chassis(&first).expect("a chassis");
    let remotes = format!("{},{}", first.remote(), node.southbound.remote());
    let ids = json!(["map", [["system-id", CHASSIS], ["ovn-remote", remotes]]]);
    let update = json!({"op": "update", "table": "Open_vSwitch", "where": [], "row": {"external_ids": ids}});
    node.ovs.transact(&json!(["Open_vSwitch", update])).expect("both servers");
    let instance = node.boot(0).expect("an instance");
    node.bind(&instance).expect("bound");
    let _agent = node.agent().expect("an agent");
    let all = node.doctor("openstack.southbound").expect("a report");
    assert!(all.len() == 2 && all.iter().all(|check| check["status"] == "ok"), "{all:?}");
    let instances = || -> Result<u64> {
        let of = node.status()?.instances;
        Ok(of.iter().filter(|of| of.source == "openstack").map(|of| of.count).sum())
    };
    assert_eq!(instances().expect("a status"), 0, "the first server is followed");

    second.stop().expect("stopped");
    let served = || gets(&instance.guest, META_DATA, 200, &instance.identity.instance_id);
    eventually(NOTICE, || {
        ensure!(instances()? == 1, "the instance is not known");
        Ok(())
    })
    .expect("the other server is followed");
    eventually(NOTICE, served).expect("meta-data");
    let found = node.doctor("openstack.southbound").expect("a report");
    let has = |status: &str, word: &str| {
        found.iter().any(|check| check["status"] == status && check["found"].to_string().contains(word))
    };
    assert!(has("warn", "has lost its cluster") && has("ok", "it has the chassis"), "{found:?}");
}

#[test]
fn the_doctor_takes_no_other_web_server_for_nova() {
    let Some(node) = Node::or_skip() else { return };
    let words = ["-m", "http.server", "--bind", "127.0.0.1", "8080"];
    let mut command = Command::new("python3");
    let server = node
        .host
        .ns()
        .spawn(command.args(words).current_dir(node.room.path()).stdout(Stdio::null()).stderr(Stdio::null()));
    let mut server = server.expect("a web server");
    for (url, status, found) in [
        (nova::URL, "ok", "accepts our signature"),
        ("http://127.0.0.1:8080", "fail", "404 to a wrong signature"),
    ] {
        node.configure(url).expect("a configuration");
        eventually(NOTICE, || {
            let checks = node.doctor("openstack.nova")?;
            let is_it =
                |check: &Value| check["status"] == status && check["found"].to_string().contains(found);
            ensure!(checks.len() == 1 && checks.iter().all(is_it), "{url}: {checks:?}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error:#}"));
    }
    server.kill().expect("it runs");
    server.wait().expect("it ends");
}

#[test]
fn a_guest_is_told_of_its_live_migration_in_time_and_of_its_end() {
    let Some(node) = Node::or_skip() else { return };
    let instance = node.boot(0).expect("an instance");
    node.bind(&instance).expect("bound");
    let there = node.southbound.transact(&json!([
        "OVN_Southbound",
        {"op": "insert", "table": "Encap", "uuid-name": "encap",
         "row": {"type": "geneve", "ip": "192.0.2.2", "chassis_name": "node-2"}},
        insert("Chassis", json!({"name": "node-2", "hostname": "node-2", "encaps": ["named-uuid", "encap"]})),
    ]));
    let there = there.expect("another chassis")[1]["uuid"].take();
    let _agent = node.agent().expect("an agent");
    let told = |state: Option<&str>| {
        eventually(NOTICE, || {
            let document: Value = serde_json::from_str(&get(&instance.guest, "/v1/events")?.1)?;
            let found = &document["events"][0];
            ensure!(found["state"].as_str() == state, "{document}");
            ensure!(state.is_none() || found["kind"] == "freeze", "{document}");
            Ok(())
        })
    };
    told(None).expect("nothing is planned");
    // What ovn-northd writes once Neutron has bound the port to both nodes, and then ovn-controller of the other node.
    node.rebind(&instance, json!({"requested_additional_chassis": there})).expect("bound there");
    told(Some("scheduled")).expect("the migration is prepared");
    node.rebind(&instance, json!({"additional_chassis": there})).expect("plugged there");
    told(Some("started")).expect("memory is sent");
    let rests = json!({"requested_additional_chassis": ["set", []], "additional_chassis": ["set", []]});
    node.rebind(&instance, rests).expect("it failed");
    told(None).expect("the guest stays");
}

#[test]
fn ports_of_other_nodes_cost_nothing() {
    /// Ports of the cloud on other nodes.
    const FOREIGN: usize = 10_000;
    /// What one transaction has of them.
    const AT_ONCE: usize = 250;
    let Some(node) = Node::or_skip() else { return };
    let instance = node.boot(0).expect("an instance");
    node.bind(&instance).expect("bound");
    let agent = node.agent().expect("an agent");
    let served = || gets(&instance.guest, META_DATA, 200, &instance.identity.instance_id);
    eventually(NOTICE, served).expect("meta-data");
    let memory = || -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    };
    let before = memory();
    for first in (0..FOREIGN).step_by(AT_ONCE) {
        let rows = (first..first + AT_ONCE).map(|n| {
            insert("Port_Binding", json!({
                "logical_port": format!("foreign-{n}"), "datapath": ["uuid", node.datapath], "tunnel_key": n + 100,
                "external_ids": ["map", [["neutron:device_id", "x"], ["neutron:project_id", "y"]]],
            }))
        });
        let all: Vec<_> = [json!("OVN_Southbound")].into_iter().chain(rows).collect();
        node.southbound.transact(&json!(all)).expect("inserted");
    }
    // The next change of the node comes after all of these.
    let later = node.boot(1).expect("an instance");
    node.bind(&later).expect("bound");
    eventually(NOTICE, || gets(&later.guest, META_DATA, 200, &later.identity.instance_id))
        .expect("meta-data");
    served().expect("meta-data");
    let grown = memory().saturating_sub(before);
    assert!(grown <= 1_024, "{FOREIGN} foreign ports took {grown} KiB");
}
