//! An OpenStack compute node, and on it the peer `neutron`: Neutron's own metadata agent for OVN with the haproxies
//! that it starts, as Debian packages them.
//!
//! ```text
//!  guests' taps ── bridge ── veth ── ovnmeta-… haproxy ─► neutron-ovn-metadata-agent ─► Nova
//!                                                          │ whose is this address?
//!                              ovsdb-server: local, OVN's southbound database
//! ```
//!
//! The agent runs unmodified in mount and process namespaces of its own, over the packages' files, with a `/run` and a
//! `/var` of its own. What it makes for a network it makes in the node's network namespace, as on a compute node.
//!
//! Three things differ from a compute node, and each favours the peer. Kernel bridges join taps and networks, in place
//! of Open vSwitch: its `ovs-vswitchd` runs with dummy devices, since the agent waits for it. OVN's daemons are left
//! out: the rows are written as they, Neutron and Nova write them. The southbound database has the ports of this node
//! only, where Neutron's agent reads those of the whole cloud, and looks through them at each request.
//!
//! Nova is nginx with the guests' documents as files, the same for Neutron's agent and for ours: Nova itself would take
//! all of the machine. Its time does not count as the host's.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use shell::tools;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::eventually;
use support::guest::METADATA;
use support::netns::Namespace;
use support::packages::{NEUTRON as COMPUTE_NODE, Packages, With};

use super::servers::{COUNTS, Listen, spawn};
use super::{
    Answers, Networks, PeerSite, Running, Scene, Server, Subject, Tenant, command, neighbour_lines, pinned,
    shares,
};

/// The names of the subject in tables and files: with 2 workers, the default of this release, and with 4. Without any,
/// the default of later releases, this one answers nobody: its only process waits for the event of a started worker.
pub(crate) const NEUTRON: &str = "neutron";
pub(crate) const NEUTRON_4: &str = "neutron-4";

/// Debian's release. Its packages are unpacked and not installed, because they would start services.
const SUITE: &str = "bookworm";
const AGENT: &str = "neutron-ovn-metadata-agent";
/// What is installed.
const TOOLS: &[tools::Tool] = &[("ovsdb-server", "openvswitch-common")];
/// Nova's metadata API, in the node's namespace.
const NOVA: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8775);
/// `metadata_proxy_shared_secret`.
const SECRET: &str = "s3cr3t";
/// `system-id`, by which OVN knows the chassis.
const CHASSIS: &str = "3f1de0a9-6a4b-4f0e-9a53-6f1c2f8f5a11";
/// The prefix of all guests' addresses, and the address of each network's metadata port.
const PREFIX: u8 = 16;
const METADATA_PORT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// The longest time until the agent serves a network, and until it has started.
const NETWORK: Duration = Duration::from_secs(3);
const START: Duration = Duration::from_secs(90);
/// The longest time until its processes have ended, once they were killed.
const END: Duration = Duration::from_secs(10);

/// The documents of Nova, and where the databases are.
pub(crate) struct ComputeSite {
    site: PeerSite,
    packages: Packages,
    networks: usize,
}

/// The databases of a compute node, and Nova. They end when the value is dropped.
pub(crate) struct ComputeNode {
    _databases: [Server; 2],
    _nova: Server,
    node: Namespace,
}

impl ComputeSite {
    pub(crate) fn lay_out(tenants: &[Tenant], networks: usize) -> Result<Self> {
        tools::ensure(TOOLS)?;
        let packages = Packages::get(SUITE, &COMPUTE_NODE, With::Dependencies)?;
        let site = Self { site: PeerSite::lay_out(tenants)?, packages, networks };
        fs::write(site.file("secret"), SECRET)?;
        Ok(site)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.site.directory().join(name)
    }

    /// The section `openstack` of the agent's configuration.
    pub(crate) fn section(&self) -> Value {
        let ovsdb = format!("unix:{}", self.file("local.sock").display());
        json!({"openstack": {
            "ovsdb": ovsdb, "nova": {"url": format!("http://{NOVA}"), "secret": self.file("secret")},
        }})
    }

    /// Starts databases with the rows of this node, and Nova.
    pub(crate) fn start(&self, scene: &Scene<'_>) -> Result<ComputeNode> {
        let [local, southbound] =
            [("local", "openvswitch/vswitch"), ("southbound", "ovn/ovn-sb")].map(|(name, schema)| {
                let schema = self.packages.root().join(format!("usr/share/{schema}.ovsschema"));
                self.database(scene.node, name, &schema)
            });
        let databases = [local?, southbound?];
        let remote = format!("unix:{}", self.file("southbound.sock").display());
        transact(&self.file("local.sock"), "Open_vSwitch", local_rows(scene.tenants, &remote))?;
        let shares = shares(scene.tenants.len(), self.networks)?;
        transact(&self.file("southbound.sock"), "OVN_Southbound", southbound_rows(scene.tenants, &shares))?;
        let nova = spawn(scene, &self.site, Listen::Agents(NOVA))?;
        let node = Namespace::open(scene.node.name())?;
        Ok(ComputeNode { _databases: databases, _nova: nova, node })
    }

    fn database(&self, ns: &Namespace, name: &str, schema: &Path) -> Result<Server> {
        let (file, socket) = (self.file(&format!("{name}.db")), self.file(&format!("{name}.sock")));
        let _ = fs::remove_file(&file);
        support::netns::run(Command::new("ovsdb-tool").arg("create").args([&file, schema]))?;
        let mut server = command("ovsdb-server", None)?;
        server.arg(format!("--remote=punix:{}", socket.display()));
        server.arg(format!("--unixctl={}.ctl", socket.display())).arg("--no-chdir").arg(&file);
        Server::start(
            "ovsdb-server",
            ns,
            &mut server,
            self.file(&format!("{name}.log")),
            &Answers::On(&socket),
        )
    }
}

impl ComputeNode {
    /// How many requests Nova has had, without those of this question.
    pub(crate) fn asked_of_nova(&self) -> Result<u64> {
        let mut said = String::new();
        self.node.run_in(|| -> Result<()> {
            let mut stream = TcpStream::connect(NOVA)?;
            write!(stream, "GET {COUNTS} HTTP/1.0\r\n\r\n")?;
            stream.read_to_string(&mut said)?;
            Ok(())
        })?;
        requests(&said).context("nginx does not say how many requests it had")
    }
}

/// The number of requests in nginx's status, which counts this one.
fn requests(status: &str) -> Option<u64> {
    let (_, counts) = status.split_once("server accepts handled requests\n")?;
    counts.split_whitespace().nth(2)?.parse::<u64>().ok()?.checked_sub(1)
}

/// Runs a transaction, which must not fail.
fn transact(socket: &Path, database: &str, operations: Vec<Value>) -> Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    let parameters: Vec<_> = std::iter::once(json!(database)).chain(operations).collect();
    stream.write_all(&serde_json::to_vec(&json!({"method": "transact", "params": parameters, "id": 0}))?)?;
    let mut replies = serde_json::Deserializer::from_reader(stream).into_iter::<Value>();
    let reply = replies.next().context("ovsdb-server has closed the connection")??;
    let results = reply["result"].as_array().with_context(|| format!("{database}: {}", reply["error"]))?;
    let failed = results.iter().find(|result| !result["error"].is_null());
    ensure!(failed.is_none(), "{database}: {failed:?}");
    Ok(())
}

// What the databases of a compute node say.

fn instance(number: usize) -> String {
    format!("7c0f1a52-3b5e-4d1a-9d2c-{number:012x}")
}

/// The id of a guest's port in Neutron.
fn port(number: usize) -> String {
    format!("{number:08x}-1111-4222-8333-444444444444")
}

fn network(number: usize) -> String {
    format!("{number:08x}-aaaa-4bbb-8ccc-dddddddddddd")
}

/// A device of Neutron's agent: 0 is the node's end of a network's veth pair, and 1 the other.
fn veth(number: usize, end: u8) -> String {
    format!("tap{}{end}", &network(number)[..10])
}

fn insert(table: &str, name: &str, row: Value) -> Value {
    json!({"op": "insert", "table": table, "uuid-name": name, "row": row})
}

fn map(pairs: &[(&str, &str)]) -> Value {
    json!(["map", pairs.iter().map(|(key, value)| json!([key, value])).collect::<Vec<_>>()])
}

fn named(name: &str) -> Value {
    json!(["named-uuid", name])
}

/// The local OVSDB: the integration bridge with the taps, as Nova (os-vif) plugs them.
fn local_rows(tenants: &[Tenant], southbound: &str) -> Vec<Value> {
    let (mut rows, mut ports) = (Vec::new(), Vec::new());
    for (number, tenant) in tenants.iter().enumerate() {
        let ids = map(&[
            ("iface-id", &port(number)),
            ("attached-mac", &tenant.mac.to_string()),
            ("iface-status", "active"),
            ("vm-uuid", &instance(number)),
        ]);
        let (interface, plugged) = (format!("interface{number}"), format!("port{number}"));
        rows.push(insert("Interface", &interface, json!({"name": tenant.tap, "external_ids": ids})));
        let row = json!({"name": tenant.tap, "interfaces": named(&interface)});
        rows.push(insert("Port", &plugged, row));
        ports.push(named(&plugged));
    }
    rows.push(insert("Bridge", "bridge", json!({"name": "br-int", "ports": ["set", ports]})));
    let ids = map(&[
        ("system-id", CHASSIS),
        ("hostname", "compute-1"),
        ("ovn-remote", southbound),
        ("ovn-bridge", "br-int"),
    ]);
    rows.push(insert("Open_vSwitch", "switch", json!({"bridges": named("bridge"), "external_ids": ids})));
    rows
}

/// OVN's southbound database: the chassis, and each network with its metadata port and the ports of its guests, as
/// Neutron, ovn-northd and ovn-controller write them.
fn southbound_rows(tenants: &[Tenant], shares: &[Range<usize>]) -> Vec<Value> {
    let encap = json!({"type": "geneve", "ip": "192.0.2.1", "chassis_name": CHASSIS});
    let chassis = json!({"name": CHASSIS, "hostname": "compute-1", "encaps": named("encap")});
    let mut rows = vec![
        insert("SB_Global", "global", json!({})),
        insert("Encap", "encap", encap),
        insert("Chassis", "chassis", chassis),
        insert("Chassis_Private", "private", json!({"name": CHASSIS, "chassis": named("chassis")})),
    ];
    for (number, share) in shares.iter().enumerate() {
        let (id, datapath) = (network(number), format!("datapath{number}"));
        let ids = map(&[("name", &format!("neutron-{id}")), ("name2", "net"), ("logical-switch", &id)]);
        rows.push(insert(
            "Datapath_Binding",
            &datapath,
            json!({"tunnel_key": number + 1, "external_ids": ids}),
        ));
        let [high, low] = u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes();
        let ids = map(&[
            ("neutron:cidrs", &format!("{METADATA_PORT}/{PREFIX}")),
            ("neutron:device_id", &format!("ovnmeta-{id}")),
            ("neutron:device_owner", "network:distributed"),
        ]);
        let row = json!({
            "logical_port": format!("{number:08x}-3333-4222-8333-444444444444"), "type": "localport",
            "datapath": named(&datapath), "tunnel_key": 1, "external_ids": ids,
            "mac": format!("fa:16:3e:ff:{high:02x}:{low:02x} {METADATA_PORT}"),
        });
        rows.push(insert("Port_Binding", &format!("metadata{number}"), row));
        for (key, guest) in share.clone().enumerate() {
            let Tenant { mac, address, .. } = &tenants[guest];
            let ids = map(&[
                ("neutron:cidrs", &format!("{address}/{PREFIX}")),
                ("neutron:device_id", &instance(guest)),
                ("neutron:project_id", &format!("{number:032x}")),
                ("neutron:device_owner", "compute:nova"),
            ]);
            let row = json!({
                "logical_port": port(guest), "datapath": named(&datapath), "tunnel_key": key + 2,
                "chassis": named("chassis"), "mac": format!("{mac} {address}"), "external_ids": ids,
            });
            rows.push(insert("Port_Binding", &format!("guest{guest}"), row));
        }
    }
    rows
}

// Neutron's agent.

/// Makes the packages of `$1` the root, with the lab's directory `$2` at /run/lab, and then becomes the agent.
const INSIDE: &str = r#"
    root=$1
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    for state in run var tmp dev; do mount -t tmpfs tmpfs "$root/$state"; done
    mkdir -p "$root/run/netns" "$root/run/lab" "$root/var/lib/neutron" "$root/var/log"
    ln -s ../run "$root/var/run"
    for device in null zero full random urandom; do
        : > "$root/dev/$device"
        mount --bind /dev/$device "$root/dev/$device"
    done
    mount --bind "$2" "$root/run/lab"
    exec chroot "$root" "$AGENT" --config-file /run/lab/agent.ini
"#;

/// The subject with this number of workers.
pub(crate) struct Neutron {
    name: &'static str,
    workers: u32,
    networks: usize,
    site: Option<ComputeSite>,
}

impl Neutron {
    pub(crate) fn new(name: &'static str, workers: u32, networks: usize) -> Self {
        Self { name, workers, networks, site: None }
    }

    fn site(&self) -> Result<&ComputeSite> {
        self.site.as_ref().with_context(|| format!("`prepare` was not called for {}", self.name))
    }
}

/// The agent's configuration: what an operator sets, and that it is root already.
fn configuration(workers: u32) -> String {
    let mut text = format!(
        "[DEFAULT]\nstate_path = /var/lib/neutron\nmetadata_workers = {workers}\nnova_metadata_host = {}\n\
         nova_metadata_port = {}\nmetadata_proxy_shared_secret = {SECRET}\n[AGENT]\nroot_helper =\n\
         [ovs]\novsdb_connection = unix:/run/lab/local.sock\n\
         [ovn]\novn_sb_connection = unix:/run/lab/southbound.sock\n",
        NOVA.ip(),
        NOVA.port()
    );
    for context in ["privsep", "privsep_namespace", "privsep_link", "privsep_ovs_vsctl", "privsep_conntrack"]
    {
        text += &format!("[{context}]\nhelper_command = privsep-helper --config-file /run/lab/agent.ini\n");
    }
    text
}

impl Subject for Neutron {
    fn name(&self) -> &'static str {
        self.name
    }

    fn version(&self) -> Result<String> {
        let packages = &self.site()?.packages;
        let of = |name| format!("{name} {}", packages.version(name).unwrap_or("of an unknown version"));
        Ok(format!(
            "{}, {}, metadata_workers = {}, {} networks",
            of(AGENT),
            of("haproxy"),
            self.workers,
            self.networks
        ))
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        let site = ComputeSite::lay_out(scene.tenants, self.networks)?;
        fs::write(site.file("agent.ini"), configuration(self.workers))?;
        self.site = Some(site);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let site = self.site()?;
        let compute = site.start(scene)?;
        let control = site.file("vswitchd.ctl");
        let _ = fs::remove_file(&control);
        let mut switch = Command::new(site.packages.root().join("usr/lib/openvswitch-switch/ovs-vswitchd"));
        switch.args(["--enable-dummy=override", "--disable-system", "--no-chdir"]);
        switch.arg(format!("--unixctl={}", control.display())).env("OVS_RUNDIR", site.site.directory());
        switch.arg(format!("unix:{}", site.file("local.sock").display()));
        let log = site.file("vswitchd.log");
        let switch = Server::start("ovs-vswitchd", scene.node, &mut switch, log, &Answers::On(&control))?;
        let networks = Networks::awaiting(scene.node, scene.tenants, self.networks)?;
        let agent = NeutronProcess::start(site, scene)?;
        let mut serving = NeutronServing { agent, _switch: switch, compute, networks };
        serving.plug(&shares(scene.tenants.len(), self.networks)?, scene.tenants)?;
        Ok(Box::new(serving))
    }
}

/// The agent, and all processes that it has started: they have a process namespace of their own.
struct NeutronProcess {
    child: Child,
    log: PathBuf,
    /// The first process of the namespace: the agent.
    first: u32,
}

impl NeutronProcess {
    fn start(site: &ComputeSite, scene: &Scene<'_>) -> Result<Self> {
        let log = site.file("agent.log");
        let output = File::create(&log)?;
        let mut command = pinned(Path::new("unshare"), scene.pinned);
        command.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]);
        command.args(["sh", "-ec", INSIDE, "sh"]).arg(site.packages.root()).arg(site.site.directory());
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        // The packages come without compiled modules. Later rounds find those of the first.
        command.env("AGENT", AGENT).env("PYTHONPYCACHEPREFIX", "/run/lab/modules");
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let mut process = Self { child: scene.node.spawn(&mut command)?, log, first: 0 };
        process.first = eventually(START, || {
            process.runs()?;
            super::super::cpu::child_of(process.child.id()).context("it has not started")
        })?;
        Ok(process)
    }

    fn runs(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let text = fs::read_to_string(&self.log).unwrap_or_default();
            let last: Vec<_> = text.lines().rev().take(5).collect();
            bail!("{AGENT} ended, {status}: {}", last.into_iter().rev().collect::<Vec<_>>().join("; "));
        }
        Ok(())
    }

    fn pids(&self) -> Vec<u32> {
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let Some(own) = namespace(self.first) else { return Vec::new() };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| namespace(*pid).as_ref() == Some(&own)).collect()
    }

    /// The namespace that it has made for a network. Its name is in the agent's own `/run`.
    fn namespace(&self, number: usize) -> Result<Namespace> {
        let names = Path::new("/proc").join(self.first.to_string()).join("root/run/netns");
        Namespace::open(&format!("{}/ovnmeta-{}", names.display(), network(number)))
    }
}

impl Drop for NeutronProcess {
    fn drop(&mut self) {
        let pids = self.pids();
        // The kernel ends the namespace with its first process.
        let ended = self.child.kill().and_then(|()| self.child.wait()).map_err(Into::into).and_then(|_| {
            eventually(END, || {
                let alive = pids.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).count();
                ensure!(alive == 0, "{alive} processes are left");
                Ok(())
            })
        });
        if let Err(error) = ended {
            eprintln!("cannot end {AGENT}: {error:#}");
        }
    }
}

/// A running agent of Neutron, its node and its bridges.
struct NeutronServing<'a> {
    // Dropped in this order.
    agent: NeutronProcess,
    _switch: Server,
    compute: ComputeNode,
    networks: Networks<'a>,
}

impl NeutronServing<'_> {
    /// Connects each network that the agent has made to its guests; returns when all of them are served.
    fn plug(&mut self, shares: &[Range<usize>], tenants: &[Tenant]) -> Result<()> {
        let patience = START + NETWORK * u32::try_from(shares.len())?;
        let mut awaited: Vec<_> = (0..shares.len()).collect();
        eventually(patience, || {
            if let Err(error) = self.agent.runs() {
                return Ok(Err(error));
            }
            let links = self.networks.node.links()?;
            let is_there = |number: &usize| links.iter().any(|link| link["ifname"] == *veth(*number, 0));
            let (made, rest): (Vec<_>, Vec<_>) = awaited.iter().copied().partition(is_there);
            awaited = rest;
            made.into_iter().try_for_each(|number| self.networks.plug(number, &veth(number, 0)))?;
            ensure!(
                awaited.is_empty(),
                "{AGENT} has not made {} of {} networks",
                awaited.len(),
                shares.len()
            );
            Ok(Ok(()))
        })??;
        for (number, share) in shares.iter().enumerate() {
            let address = SocketAddr::from((METADATA, 80));
            eventually(START, || {
                let inside = self.agent.namespace(number)?;
                inside.run_in(|| TcpStream::connect_timeout(&address, Duration::from_secs(1)))?;
                // OVN answers ARP for its ports by itself.
                inside.ip_batch(&neighbour_lines(&veth(number, 1), &tenants[share.clone()]))
            })
            .with_context(|| format!("{AGENT} does not serve network {}", network(number)))?;
        }
        Ok(())
    }
}

impl Running for NeutronServing<'_> {
    fn pids(&self) -> Vec<u32> {
        self.agent.pids()
    }

    fn asked_of_nova(&self) -> Result<Option<u64>> {
        self.compute.asked_of_nova().map(Some)
    }

    fn stop(self: Box<Self>) -> Result<()> {
        let Self { agent, _switch: switch, compute, networks } = *self;
        drop(agent);
        // The kernel deletes the veth pairs with the agent's namespaces, some time later. The next round has the same.
        eventually(END, || {
            let links = networks.node.links()?;
            let is_left = |number| links.iter().any(|link| link["ifname"] == *veth(number, 0));
            let left = (0..networks.links.len()).filter(|number| is_left(*number)).count();
            ensure!(left == 0, "{left} veth pairs of {AGENT} are left");
            Ok(())
        })?;
        switch.end()?;
        drop(compute);
        networks.remove()
    }
}

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;
    use serde_json::Value;
    use std::net::Ipv4Addr;

    use super::{Tenant, configuration, local_rows, requests, southbound_rows, veth};

    fn tenants() -> Vec<Tenant> {
        let tenant = |number: u8| Tenant {
            tap: format!("tap{number}"),
            mac: Mac([0x52, 0x54, 0, 0, 0, number]),
            address: Ipv4Addr::new(10, 0, 16, number),
            pages: Vec::new(),
        };
        (0..3).map(tenant).collect()
    }

    fn of<'a>(rows: &'a [Value], table: &str) -> Vec<&'a Value> {
        rows.iter().filter(|row| row["table"] == table).map(|row| &row["row"]).collect()
    }

    #[test]
    fn both_databases_name_the_same_port_and_instance_of_a_guest() {
        let (local, southbound) =
            (local_rows(&tenants(), "unix:sb"), southbound_rows(&tenants(), &[0..1, 1..3]));
        let interfaces = of(&local, "Interface");
        let bindings = of(&southbound, "Port_Binding");
        let guests: Vec<_> = bindings.iter().filter(|row| row["type"].is_null()).collect();
        assert_eq!((interfaces.len(), guests.len(), bindings.len()), (3, 3, 5), "two metadata ports");
        for (interface, binding) in interfaces.iter().zip(guests) {
            let id = |row: &Value, key: &str| {
                let pairs = row["external_ids"][1].as_array().expect("pairs").clone();
                pairs.into_iter().find(|pair| pair[0] == key).map(|pair| pair[1].clone())
            };
            assert_eq!(id(interface, "iface-id"), Some(binding["logical_port"].clone()));
            assert_eq!(id(interface, "vm-uuid"), id(binding, "neutron:device_id"));
            let mac = id(interface, "attached-mac").expect("a MAC");
            assert!(
                binding["mac"].as_str().is_some_and(|text| text.starts_with(mac.as_str().expect("text")))
            );
        }
    }

    #[test]
    fn devices_of_networks_have_distinct_names_that_linux_allows() {
        let names: std::collections::BTreeSet<_> = (0..4_096).map(|number| veth(number, 0)).collect();
        assert!(names.len() == 4_096 && names.iter().all(|name| name.len() < 16), "{names:?}");
    }

    #[test]
    fn the_count_of_requests_is_that_before_the_question() {
        let status = "Active connections: 1 \nserver accepts handled requests\n 16 16 31 \nReading: 0 \n";
        assert_eq!(requests(status), Some(30));
        assert_eq!(requests("404"), None);
    }

    #[test]
    fn the_number_of_workers_is_configured() {
        assert!(configuration(4).contains("\nmetadata_workers = 4\n"));
    }
}
