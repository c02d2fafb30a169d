//! The agent beside OVN itself: northd, ovn-controller, and Open vSwitch with its datapath in user space, in a namespace.
//! The tests do what Neutron and Nova do: logical switches and ports by `ovn-nbctl`, taps in `br-int` by `ovs-vsctl`.
//! Nova is a stand-in, which says as whom it was asked.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use support::agent::Agent;
use support::eventually;
use support::guest::{Guest, Spec};
use support::netns::{Namespace, run};
use support::packages::{NEUTRON, Packages, With};
use support::process::terminate;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

use super::nova::{SECRET, URL};
use super::{
    ADDRESS, Database, META_DATA, NOTICE, PACKAGES, configure, doctor, get, gets, has_problem, start_agent,
    start_agent_with, status,
};

/// `system-id`, by which OVN knows the chassis, and the name by which Neutron and Nova know the host.
const SYSTEM_ID: &str = "3f1de0a9-6a4b-4f0e-9a53-6f1c2f8f5a11";
const HOST: &str = "compute-1";
const OTHER_HOST: &str = "compute-2";
const OTHER_SYSTEM_ID: &str = "8b0c2a55-3d7e-4c2e-8a60-0d5f0b1e7c22";

/// A process that ends with the test.
struct Daemon(Child);

impl Daemon {
    /// Ends it at once, as a crash does, or by SIGTERM.
    fn end(mut self, by_signal: bool) -> Result<()> {
        if by_signal {
            terminate(self.0.id())?;
        } else {
            self.0.kill()?;
        }
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// A compute node with OVN, and OVN's central part.
struct OvnNode {
    // Dropped in this order.
    northd: RefCell<Option<Daemon>>,
    controller: RefCell<Option<Daemon>>,
    _vswitchd: Daemon,
    _nova: Daemon,
    northbound: Database,
    southbound: Database,
    ovs: Database,
    ns: Namespace,
    programs: PathBuf,
    room: tempfile::TempDir,
}

/// A port of an instance, and the guest on its tap.
struct OvnPort {
    id: String,
    instance: Identity,
    guest: Guest,
}

impl OvnNode {
    fn or_skip() -> Option<Self> {
        let packages = Packages::or_skip("bookworm", &PACKAGES, With::Nothing)?;
        Some(Self::new(packages.root()).expect("a node"))
    }

    fn new(packages: &Path) -> Result<Self> {
        let (ns, room) = (Namespace::new("ovn")?, tempfile::tempdir()?);
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let database =
            |name, schema| Database::create(room.path(), name, &packages.join("usr/share").join(schema));
        let ovs = database("conf", "openvswitch/vswitch.ovsschema")?;
        let northbound = database("nb", "ovn/ovn-nb.ovsschema")?;
        let southbound = database("sb", "ovn/ovn-sb.ovsschema")?;
        let programs = packages.join("usr");
        let mut vswitchd = Command::new(programs.join("lib/openvswitch-switch/ovs-vswitchd"));
        let vswitchd = daemon(&ns, room.path(), vswitchd.arg(ovs.remote()))?;
        let nova = include_str!("echo_nova.py");
        let nova = daemon(&ns, room.path(), Command::new("python3").args(["-c", nova]))?;
        let (northd, controller) = (RefCell::default(), RefCell::default());
        let node = Self {
            northd,
            controller,
            _vswitchd: vswitchd,
            _nova: nova,
            northbound,
            southbound,
            ovs,
            ns,
            programs,
            room,
        };
        replace(&node.room.path().join("secret"), SECRET)?;
        let ids = format!(
            "external_ids={{system-id={SYSTEM_ID},hostname={HOST},ovn-remote=\"{}\",ovn-encap-type=geneve,\
             ovn-encap-ip=127.0.0.1,ovn-bridge-datapath-type=netdev}}",
            node.southbound.remote()
        );
        node.vsctl(&["--no-wait", "--", "init"])?;
        node.vsctl(&["set", "Open_vSwitch", ".", &ids])?;
        node.start_northd()?;
        node.start_controller()?;
        eventually(NOTICE, || node.vsctl(&["br-exists", "br-int"]))?;
        Ok(node)
    }

    fn start_northd(&self) -> Result<()> {
        let mut command = Command::new(self.programs.join("bin/ovn-northd"));
        let [north, south] = [&self.northbound, &self.southbound].map(Database::remote);
        command.args([format!("--ovnnb-db={north}"), format!("--ovnsb-db={south}")]);
        *self.northd.borrow_mut() = Some(daemon(&self.ns, self.room.path(), &mut command)?);
        Ok(())
    }

    fn start_controller(&self) -> Result<()> {
        let mut command = Command::new(self.programs.join("bin/ovn-controller"));
        let controller = daemon(&self.ns, self.room.path(), command.arg(self.ovs.remote()))?;
        *self.controller.borrow_mut() = Some(controller);
        Ok(())
    }

    /// Ends ovn-controller as its service does: it takes its chassis and all bindings away first.
    fn stop_controller(&self) -> Result<()> {
        let mut controller = self.controller.borrow_mut().take().context("it runs")?;
        let socket = self.room.path().join(format!("ovn-controller.{}.ctl", controller.0.id()));
        run(Command::new(self.programs.join("bin/ovn-appctl")).arg("-t").arg(socket).arg("exit"))?;
        controller.0.wait()?;
        Ok(())
    }

    fn tool(&self, name: &str, database: &Database, words: &[&str]) -> Result<String> {
        let mut command = Command::new(self.programs.join("bin").join(name));
        run(command.arg(format!("--db={}", database.remote())).arg("--timeout=30").args(words))
    }

    fn vsctl(&self, words: &[&str]) -> Result<String> {
        self.tool("ovs-vsctl", &self.ovs, words)
    }

    fn nbctl(&self, words: &[&str]) -> Result<String> {
        self.tool("ovn-nbctl", &self.northbound, words)
    }

    fn sbctl(&self, words: &[&str]) -> Result<String> {
        self.tool("ovn-sbctl", &self.southbound, words)
    }

    /// Boots an instance whose port is in a network of its own.
    fn boot(&self, number: u16) -> Result<OvnPort> {
        self.attach(&Identity { address: ADDRESS, ..Identity::of(number) }, number)
    }

    /// Creates a network and a port as Neutron does, and plugs the port into an instance as Nova does.
    fn attach(&self, instance: &Identity, number: u16) -> Result<OvnPort> {
        let id = format!("{number:08x}-1111-4222-8333-444444444444");
        let (tap, mac) = (tap_of(&id), Identity::of(number).mac);
        let network = format!("neutron-{number:08x}-aaaa-4bbb-8ccc-dddddddddddd");
        let switch = "external_ids={\"neutron:network_name\"=net,\"neutron:mtu\"=\"1442\",\"neutron:revision_number\"=\"1\"}";
        let addresses = format!("{mac} {ADDRESS}");
        let port = format!(
            "external_ids={{\"neutron:device_id\"=\"{}\",\"neutron:project_id\"=\"{}\",\"neutron:cidrs\"=\"{ADDRESS}/16\",\
             \"neutron:device_owner\"=\"compute:nova\",\"neutron:network_name\"=\"{network}\",\"neutron:port_name\"=\"\",\
             \"neutron:revision_number\"=\"1\"}}",
            instance.instance_id,
            project_of(instance)
        );
        let requested = format!("options:requested-chassis={HOST}");
        self.nbctl(&["ls-add", &network, "--", "set", "Logical_Switch", &network, switch])?;
        self.nbctl(&[
            "lsp-add",
            &network,
            &id,
            "--",
            "lsp-set-addresses",
            &id,
            &addresses,
            "--",
            "lsp-set-port-security",
            &id,
            &addresses,
            "--",
            "set",
            "Logical_Switch_Port",
            &id,
            &port,
            &requested,
        ])?;
        // os-vif is first, and the tap is made by QEMU.
        let ids = format!(
            "external_ids={{iface-id=\"{id}\",attached-mac=\"{mac}\",iface-status=active,vm-uuid=\"{}\"}}",
            instance.instance_id
        );
        self.vsctl(&[
            "--no-wait",
            "--",
            "--may-exist",
            "add-port",
            "br-int",
            &tap,
            "--",
            "set",
            "Interface",
            &tap,
            &ids,
        ])?;
        let made = Tap::create(&self.ns, &tap, Shape::virtio())?;
        self.ns.ip(&format!("link set {tap} up"))?;
        let spec = Spec { shape: Shape::virtio(), mac, ..Spec::of(instance) };
        let guest = Guest::boot_on(Arc::new(made), Namespace::new("guest")?, &spec)?;
        Ok(OvnPort { id, instance: instance.clone(), guest })
    }

    /// Unplugs a port as Nova does.
    fn unplug(&self, port: &OvnPort) -> Result<()> {
        self.vsctl(&["--if-exists", "del-port", "br-int", &tap_of(&port.id)]).map(drop)
    }

    /// Binds a port to hosts, as Neutron does.
    fn request(&self, port: &OvnPort, hosts: &str) -> Result<()> {
        self.nbctl(&["lsp-set-options", &port.id, &format!("requested-chassis={hosts}")]).map(drop)
    }

    /// The UUID of the chassis of a port.
    fn chassis_of(&self, port: &OvnPort) -> Result<String> {
        let of = format!("logical_port={}", port.id);
        Ok(self.sbctl(&["--bare", "--columns=chassis", "find", "Port_Binding", &of])?.trim().to_owned())
    }

    /// The UUID of this node's chassis.
    fn chassis(&self) -> Result<String> {
        let of = format!("name={SYSTEM_ID}");
        Ok(self.sbctl(&["--bare", "--columns=_uuid", "find", "Chassis", &of])?.trim().to_owned())
    }

    fn agent(&self) -> Result<Agent<'_>> {
        start_agent(&self.ns, self.room.path(), &self.ovs, None)
    }

    /// Waits until OVN has bound a port here and its guest gets answers as what it is.
    fn serves(&self, port: &OvnPort) -> Result<()> {
        eventually(NOTICE, || {
            let (own, of_port) = (self.chassis()?, self.chassis_of(port)?);
            ensure!(
                !own.is_empty() && own == of_port,
                "the port is on {of_port:?}, and this chassis is {own:?}"
            );
            port.is_served()
        })
    }

    /// Waits until that many ports are served.
    fn serves_as_many(&self, count: u64) -> Result<()> {
        eventually(NOTICE, || {
            let identities = status(self.room.path())?.identities;
            ensure!(identities == count, "{identities} are served");
            Ok(())
        })
    }
}

impl OvnPort {
    fn is_served(&self) -> Result<()> {
        let whose = format!("{} {} {ADDRESS}", self.instance.instance_id, project_of(&self.instance));
        gets(&self.guest, META_DATA, 200, &whose)
    }
}

/// Starts a program of OVS or OVN, whose sockets and files are in `room`.
fn daemon(ns: &Namespace, room: &Path, command: &mut Command) -> Result<Daemon> {
    for name in
        ["OVS_RUNDIR", "OVN_RUNDIR", "OVS_LOGDIR", "OVN_LOGDIR", "OVS_DBDIR", "OVN_DBDIR", "OVS_SYSCONFDIR"]
    {
        command.env(name, room);
    }
    Ok(Daemon(
        ns.spawn(command.current_dir(room).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))?,
    ))
}

fn tap_of(port: &str) -> String {
    format!("tap{}", &port[..11])
}

fn project_of(instance: &Identity) -> String {
    format!("{:032x}", instance.number)
}

#[test]
fn what_ovn_controller_binds_is_served_until_it_is_unplugged() {
    let Some(node) = OvnNode::or_skip() else { return };
    let one = node.boot(0).expect("an instance");
    let _agent = node.agent().expect("an agent");
    let other = node.boot(1).expect("an instance of another project, with the same address");
    let second = node.attach(&one.instance, 2).expect("a second port");
    for port in [&one, &other, &second] {
        node.serves(port).unwrap_or_else(|error| panic!("{}: {error:#}", port.id));
    }
    node.serves_as_many(3).expect("all ports");
    for (left, port) in [(2, &second), (1, &other)] {
        node.unplug(port).expect("unplugged");
        node.serves_as_many(left).expect("the others");
    }
    one.is_served().expect("it has lost one of two ports");
}

#[test]
fn guests_are_served_while_parts_of_ovn_are_away_and_new_ones_once_they_are_back() {
    type Step = fn(&OvnNode) -> Result<()>;
    let away: [(&str, Step, Step); 4] = [
        ("northd", |node| node.northd.take().context("it runs")?.end(true), OvnNode::start_northd),
        (
            "a crashed ovn-controller",
            |node| node.controller.take().context("it runs")?.end(false),
            OvnNode::start_controller,
        ),
        ("ovn-controller", OvnNode::stop_controller, OvnNode::start_controller),
        // ovn-controller registers it anew at once.
        ("the chassis", |node| node.sbctl(&["chassis-del", SYSTEM_ID]).map(drop), |_| Ok(())),
    ];
    let Some(node) = OvnNode::or_skip() else { return };
    let first = node.boot(0).expect("an instance");
    let second = node.attach(&first.instance, 1).expect("its second port");
    let mut agent = node.agent().expect("an agent");
    let mut ports = vec![first, second];
    for (number, (what, go, come)) in (2..).zip(away) {
        ports.iter().for_each(|port| node.serves(port).unwrap_or_else(|error| panic!("{what}: {error:#}")));
        go(&node).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        node.serves_as_many(ports.len() as u64).expect(what);
        ports.iter().for_each(|port| port.is_served().expect(what));
        // The next agent finds the databases as they are.
        assert!(agent.stop().expect("stopped").success());
        agent = node.agent().expect("an agent");
        ports.iter().for_each(|port| eventually(NOTICE, || port.is_served()).expect(what));
        ports.push(node.boot(number).expect("an instance"));
        come(&node).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        node.serves(&ports[ports.len() - 1]).unwrap_or_else(|error| panic!("{what}: {error:#}"));
    }
    node.serves_as_many(ports.len() as u64).expect("all ports");
}

#[test]
fn a_port_that_moves_to_another_chassis_is_served_until_it_is_unplugged() {
    let Some(node) = OvnNode::or_skip() else { return };
    node.sbctl(&["chassis-add", OTHER_SYSTEM_ID, "geneve", "192.0.2.2"]).expect("another chassis");
    node.sbctl(&["set", "Chassis", OTHER_SYSTEM_ID, &format!("hostname={OTHER_HOST}")]).expect("its name");
    let port = node.boot(0).expect("an instance");
    let _agent = node.agent().expect("an agent");
    node.serves(&port).expect("bound here");

    node.request(&port, &format!("{HOST},{OTHER_HOST}")).expect("a live migration");
    eventually(NOTICE, || {
        let document: Value = serde_json::from_str(&get(&port.guest, "/v1/events")?.1)?;
        ensure!(document["events"][0]["state"] == "scheduled", "{document}");
        Ok(())
    })
    .expect("its guest is told");
    node.request(&port, OTHER_HOST).expect("moved");
    eventually(NOTICE, || {
        let chassis = node.chassis_of(&port)?;
        ensure!(chassis.is_empty(), "it is on {chassis}");
        Ok(())
    })
    .expect("ovn-controller lets it go");
    node.sbctl(&["lsp-bind", &port.id, OTHER_SYSTEM_ID]).expect("bound there");
    port.is_served().expect("its guest may run until the tap is unplugged");
    node.unplug(&port).expect("unplugged");
    node.serves_as_many(0).expect("nobody");
}

/// What Neutron's agent cache reads of a node (`MetadataAgent` of `neutron_agent.py`, `ovn_bridge` of `utils.py`). The id
/// is `uuid.uuid5(uuid.UUID(SYSTEM_ID), "metadata_agent")` of Python.
fn listed(nb_cfg: &str) -> Value {
    json!([
        ["neutron:ovn-bridge", "br-int"],
        ["neutron:ovn-metadata-id", "dbf8652a-fc9d-5a54-875c-e82902f15447"],
        ["neutron:ovn-metadata-sb-cfg", nb_cfg],
    ])
}

impl OvnNode {
    fn is_listed_as(&self, pairs: &Value) -> Result<()> {
        let select = json!({
            "op": "select", "table": "Chassis_Private", "where": [["name", "==", SYSTEM_ID]],
            "columns": ["external_ids"],
        });
        let found = self.southbound.transact(&json!(["OVN_Southbound", select]))?;
        let found = &found[0]["rows"][0]["external_ids"][1];
        ensure!(found == pairs, "{found} instead of {pairs}");
        Ok(())
    }

    /// Looks for one check of the doctor that Neutron may list the agent.
    fn doctor_finds(&self, state: &str, words: &str) -> Result<()> {
        let checks = doctor(&self.ns, self.room.path(), "openstack.listed")?;
        ensure!(checks.len() == 1 && checks[0]["status"] == state, "{checks:?}");
        ensure!(checks[0]["found"].to_string().contains(words), "{checks:?}");
        Ok(())
    }
}

#[test]
fn neutron_lists_the_agent_as_alive() {
    let Some(node) = OvnNode::or_skip() else { return };
    configure(node.room.path(), &node.ovs, URL, None).expect("a configuration");
    eventually(NOTICE, || node.doctor_finds("ok", "can show this agent")).expect("it may be listed");
    node.is_listed_as(&json!([])).expect("the doctor has written nothing");
    let _agent = node.agent().expect("an agent");
    eventually(NOTICE, || node.is_listed_as(&listed("0"))).expect("registered");
    // Neutron asks whether all agents are alive.
    node.nbctl(&["--wait=sb", "sync"]).expect("another nb_cfg");
    eventually(NOTICE, || node.is_listed_as(&listed("1"))).expect("alive");
    node.stop_controller().expect("stopped");
    node.start_controller().expect("started");
    eventually(NOTICE, || node.is_listed_as(&listed("1"))).expect("registered with the new chassis");
}

impl OvnNode {
    /// Who is alive in the list of agents, by Neutron's own code as Debian packages it: ovn-controller, and the agent.
    fn agent_list(&self, neutron: &Packages) -> Result<[bool; 2]> {
        let nb_cfg = self.nbctl(&["get", "NB_Global", ".", "nb_cfg"])?;
        let mut python = Command::new(neutron.root().join("usr/bin/python3"));
        python.args(["-c", include_str!("agent_list.py"), &self.southbound.remote(), nb_cfg.trim()]);
        // Packages come without compiled modules, and nobody writes to them.
        python.env("PYTHONHOME", neutron.root().join("usr")).env("PYTHONPYCACHEPREFIX", self.room.path());
        let list: Value = serde_json::from_str(&run(&mut python)?)?;
        let alive = |binary: &str| {
            let agent = list.as_array()?.iter().find(|agent| agent["binary"] == binary)?;
            agent["alive"].as_bool().filter(|_| agent["host"] == HOST)
        };
        let both = ["ovn-controller", "neutron-ovn-metadata-agent"].map(alive);
        Ok([both[0].context(list.to_string())?, both[1].context(list.to_string())?])
    }
}

#[test]
fn neutrons_own_list_shows_the_agent_as_alive_until_it_has_ended() {
    let Some(neutron) = Packages::or_skip("bookworm", &NEUTRON, With::Dependencies) else { return };
    let Some(node) = OvnNode::or_skip() else { return };
    let agent = node.agent().expect("an agent");
    let ask_whether_all_are_alive = || node.nbctl(&["--wait=sb", "sync"]).expect("another nb_cfg");
    let shows = |alive| {
        eventually(NOTICE, || {
            let found = node.agent_list(&neutron)?;
            ensure!(found == alive, "{found:?}");
            Ok(())
        })
    };
    ask_whether_all_are_alive();
    ask_whether_all_are_alive();
    shows([true, true]).expect("alive");
    assert!(agent.stop().expect("stopped").success());
    ask_whether_all_are_alive();
    ask_whether_all_are_alive();
    shows([true, false]).expect("dead");
}

#[test]
fn a_database_that_lets_nobody_write_is_a_problem_and_guests_are_served() {
    let Some(node) = OvnNode::or_skip() else { return };
    let port = node.boot(0).expect("an instance");
    // A role, and no certificate by which a client could have it.
    let socket = node.room.path().join("role.sock");
    let listens = format!("punix:{}", socket.display());
    node.sbctl(&["set-connection", "role=ovn-controller", &listens]).expect("a connection");
    let control = node.room.path().join("sb.sock.ctl");
    run(Command::new("ovs-appctl")
        .arg("-t")
        .arg(control)
        .args(["ovsdb-server/add-remote", "db:OVN_Southbound,SB_Global,connections"]))
    .expect("the database listens there");
    let southbound = format!("unix:{}", socket.display());
    let agent = start_agent(&node.ns, node.room.path(), &node.ovs, Some(&southbound));
    let _agent = agent.expect("an agent");
    node.serves(&port).expect("served");
    let problem = ["agent list", "permission error", "guests are served"];
    eventually(NOTICE, || has_problem(node.room.path(), &problem)).expect("a problem");
    node.doctor_finds("warn", "permission error").expect("a warning");
    node.is_listed_as(&json!([])).expect("nothing is written");
}

/// Certificates as `ovs-pki` makes them: of the database, of this node's chassis, and of another's.
struct Pki(PathBuf);

impl Pki {
    fn make(room: &Path) -> Result<Self> {
        let pki = Self(room.join("pki"));
        std::fs::create_dir(&pki.0)?;
        pki.run(&["init"])?;
        for (name, authority) in [("sb", "controller"), (SYSTEM_ID, "switch"), (OTHER_SYSTEM_ID, "switch")] {
            pki.run(&["-u", "req+sign", name, authority])?;
        }
        Ok(pki)
    }

    fn run(&self, words: &[&str]) -> Result<String> {
        let of = |option: &str, name: &str| format!("--{option}={}", self.0.join(name).display());
        let mut command = Command::new("ovs-pki");
        run(command.current_dir(&self.0).args([of("dir", "authorities"), of("log", "log")]).args(words))
    }

    /// The private key of a name, its certificate, and the authority of whom it talks to.
    fn files(&self, name: &str, peers: &str) -> [String; 3] {
        let own = |what: &str| self.0.join(format!("{name}-{what}.pem")).display().to_string();
        let authority = self.0.join(format!("authorities/{peers}ca/cacert.pem")).display().to_string();
        [own("privkey"), own("cert"), authority]
    }
}

impl OvnNode {
    /// Has the southbound database listen with TLS and roles too, as the packages of OVN start it, and ovn-controller
    /// connect to it there.
    fn secure(&mut self) -> Result<Pki> {
        const REMOTE: &str = "ssl:127.0.0.1:6642";
        let pki = Pki::make(self.room.path())?;
        let [key, certificate, authority] = pki.files("sb", "switch");
        self.sbctl(&["set-ssl", &key, &certificate, &authority])?;
        self.sbctl(&["set-connection", "role=ovn-controller", "pssl:6642:127.0.0.1"])?;
        self.southbound.stop()?;
        let (file, socket) = (self.room.path().join("sb.db"), self.southbound.socket.clone());
        self.southbound.server = Database::serve(&file, &socket, |command| {
            for (option, column) in
                [("private-key", "private_key"), ("certificate", "certificate"), ("ca-cert", "ca_cert")]
            {
                command.arg(format!("--{option}=db:OVN_Southbound,SSL,{column}"));
            }
            command.arg("--remote=db:OVN_Southbound,SB_Global,connections");
            self.ns.spawn(command)
        })?;
        let [key, certificate, authority] = pki.files(SYSTEM_ID, "controller");
        self.vsctl(&["set-ssl", &key, &certificate, &authority])?;
        self.vsctl(&["set", "Open_vSwitch", ".", &format!("external_ids:ovn-remote=\"{REMOTE}\"")])?;
        Ok(pki)
    }

    /// Starts an agent that shows a certificate of a name to the database at `ovn-remote`.
    fn agent_as(&self, pki: &Pki, name: &str) -> Result<Agent<'_>> {
        let [key, certificate, ca] = pki.files(name, "controller");
        start_agent_with(
            &self.ns,
            self.room.path(),
            &json!({"openstack": {
                "nova": {"url": URL, "secret": self.room.path().join("secret")}, "ovsdb": self.ovs.remote(),
                "tls": {"ca": ca, "certificate": certificate, "key": key},
            }}),
        )
    }
}

#[test]
fn a_chassis_has_its_own_certificate_and_writes_its_own_row_only() {
    let Some(mut node) = OvnNode::or_skip() else { return };
    let pki = node.secure().expect("TLS and roles");
    let port = node.boot(0).expect("an instance");
    let agent = node.agent_as(&pki, OTHER_SYSTEM_ID).expect("an agent");
    node.serves(&port).expect("served");
    let problem = ["agent list", "permission error", "guests are served"];
    eventually(NOTICE, || has_problem(node.room.path(), &problem)).expect("a problem");
    node.doctor_finds("warn", "permission error").expect("a warning");
    node.is_listed_as(&json!([])).expect("nothing is written");
    assert!(agent.stop().expect("stopped").success());

    let _agent = node.agent_as(&pki, SYSTEM_ID).expect("an agent");
    node.serves(&port).expect("served");
    eventually(NOTICE, || node.is_listed_as(&listed("0"))).expect("registered");
    node.doctor_finds("ok", "can show this agent").expect("nothing to say");
}

#[test]
fn a_database_of_another_authority_is_not_believed() {
    let Some(mut node) = OvnNode::or_skip() else { return };
    let pki = node.secure().expect("TLS and roles");
    let [key, certificate, own] = pki.files(SYSTEM_ID, "switch");
    let configuration = json!({"openstack": {
        "nova": {"url": URL, "secret": node.room.path().join("secret")}, "ovsdb": node.ovs.remote(),
        "tls": {"ca": own, "certificate": certificate, "key": key},
    }});
    replace(&node.room.path().join("agent.yaml"), &configuration.to_string()).expect("a configuration");
    let checks = doctor(&node.ns, node.room.path(), "openstack.southbound").expect("a report");
    let said = checks[0]["found"].to_string();
    assert!(checks[0]["status"] == "fail" && said.contains("invalid peer certificate"), "{checks:?}");
}
