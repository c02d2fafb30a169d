//! The agent answers the instances of an OpenStack compute node without OVN: ports and projects from libvirt's running
//! domains, answers from a server that stands for Nova and says whom it was asked as.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_control::status::{AgentStatus, PortState};
use serde_json::{Value, json};
use support::agent::{self, Agent};
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::{self, Host};
use support::libvirt::{self, Libvirt};
use support::netns::Namespace;
use support::privileged;
use support::record::{Identity, replace};
use support::tap::{Shape, Tap};

/// Longest wait for the agent to notice a change.
const NOTICE: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(40);
const SECRET: &str = "s3cr3t";
const PATH: &str = "/latest/meta-data/instance-id";

/// Answers with the instance, the project and the address of a request, as Nova checks its signature.
const NOVA: &str = r#"
import hashlib, hmac, http.server
class Nova(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        asked = [self.headers.get(name, "-") for name in ("X-Instance-ID", "X-Tenant-ID", "X-Forwarded-For")]
        signature = hmac.new(b"s3cr3t", asked[0].encode(), hashlib.sha256).hexdigest()
        is_good = self.headers.get("X-Instance-ID-Signature") == signature
        body = " ".join(asked).encode()
        self.send_response(200 if is_good else 403)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 8775), Nova).serve_forever()
"#;

/// A compute node.
struct Node {
    nova: Child,
    host: Host,
    room: tempfile::TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        _ = self.nova.kill();
        _ = self.nova.wait();
    }
}

impl Node {
    fn new() -> Result<Self> {
        let (host, room) = (Host::new()?, tempfile::tempdir()?);
        let mut command = Command::new("python3");
        command.args(["-c", NOVA]).stdout(Stdio::null()).stderr(Stdio::null());
        let nova = host.ns().spawn(&mut command)?;
        replace(&room.path().join("secret"), SECRET)?;
        Ok(Self { nova, host, room })
    }

    fn agent(&self, domains: &Path) -> Result<Agent<'_>> {
        let configuration = json!({"openstack": {
            "nova": {"secret": self.room.path().join("secret")}, "instances": "libvirt", "domains": domains,
        }});
        let file = self.room.path().join("agent.yaml");
        replace(&file, &configuration.to_string())?;
        let mut words = agent::arguments(self.room.path(), &[]);
        let records = words.iter().position(|word| word == "--records").context("a word")?;
        words.drain(records..records + 2);
        words.extend(["--config".into(), file.into()]);
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }

    /// What a verb of the agent's program prints.
    fn verb(&self, words: &[&str]) -> Result<Value> {
        let mut command = Command::new(agent::binary()?);
        command.args(words).arg("--json").arg("--run").arg(self.room.path().join("run"));
        Ok(serde_json::from_slice(&self.host.ns().output(&mut command)?.stdout)?)
    }

    fn status(&self) -> Result<AgentStatus> {
        Ok(serde_json::from_value(self.verb(&["status", "--all"])?)?)
    }

    /// Waits until exactly these taps are served.
    fn serves(&self, taps: &[&str]) {
        eventually(NOTICE, || {
            let ports = self.status()?.ports.listed;
            let attached = ports.iter().filter(|port| port.state == PortState::Attached);
            let mut names: Vec<_> = attached.map(|port| port.name.as_str()).collect();
            names.sort_unstable();
            ensure!(names == taps, "{ports:?}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{taps:?}: {error:#}"));
    }
}

/// An instance with one port.
struct Instance {
    identity: Identity,
    project: String,
    port: String,
}

impl Instance {
    /// Those with even numbers belong to one project, the others to another. All have the same address.
    fn of(number: u16) -> Self {
        let identity = Identity { address: [10, 0, 16, 7].into(), ..Identity::of(number) };
        let port = format!("{number:08x}-1111-4222-8333-444444444444");
        Self { identity, project: format!("{:032x}", number % 2), port }
    }

    fn tap(&self) -> String {
        format!("tap{}", &self.port[..11])
    }

    /// Nova's element for these ports of the instance.
    fn metadata(&self, ports: &[&str]) -> String {
        let first = u32::from(self.identity.address);
        let ports = (first..).zip(ports).map(|(address, port)| {
            let address = Ipv4Addr::from(address);
            format!("<nova:port uuid='{port}'><nova:ip type='fixed' address='{address}' ipVersion='4'/></nova:port>")
        });
        format!(
            "<nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'>\
             <nova:name>web&lt;/nova:name&gt;&lt;nova:owner/&gt;</nova:name><nova:owner>\
             <nova:project uuid='{}'>demo</nova:project></nova:owner><nova:ports>{}</nova:ports></nova:instance>",
            self.project,
            ports.collect::<String>()
        )
    }

    /// A domain that boots no further than its firmware.
    fn domain(&self) -> String {
        format!(
            "<domain type='qemu'><name>instance-{:08x}</name><uuid>{}</uuid><metadata>{}</metadata>\
             <memory unit='MiB'>32</memory><vcpu>1</vcpu><os><type arch='x86_64' machine='pc'>hvm</type></os>\
             <features><acpi/></features><devices>{}<memballoon model='none'/></devices></domain>",
            self.identity.number,
            self.identity.instance_id,
            self.metadata(&[&self.port]),
            interface(&self.tap(), &self.identity.mac.to_string())
        )
    }
}

fn interface(tap: &str, mac: &str) -> String {
    format!(
        "<interface type='bridge'><mac address='{mac}'/><source bridge='{}'/><target dev='{tap}'/>\
         <model type='virtio'/><rom enabled='no'/></interface>",
        host::BRIDGE
    )
}

#[test]
fn an_instance_without_ovn_is_known_by_its_port_alone() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new().expect("a node");
    let domains = node.room.path().join("qemu");
    fs::create_dir(&domains).expect("a directory");
    let instances = [0, 1].map(Instance::of);
    let guests = [0, 1].map(|at: usize| {
        let Instance { identity, .. } = &instances[at];
        let tap = Tap::create(node.host.ns(), &instances[at].tap(), Shape::virtio()).expect("a tap");
        let up = format!("link set {} master {} up", instances[at].tap(), host::BRIDGE);
        node.host.ns().ip(&up).expect("a port of the bridge");
        let spec = Spec { shape: Shape::virtio(), ..Spec::of(identity) };
        Guest::boot_on(Arc::new(tap), Namespace::new("guest").expect("a namespace"), &spec).expect("a guest")
    });
    let put = |name: &str, text: &str| replace(&domains.join(name), text).expect("written");
    put("instance-0.xml", &instances[0].domain());
    let _agent = node.agent(&domains).expect("an agent");
    put("instance-1.xml", &instances[1].domain());
    for (instance, guest) in instances.iter().zip(&guests) {
        let Instance { identity, project, .. } = instance;
        let expected = format!("{} {project} {}", identity.instance_id, identity.address);
        let other = &instances[usize::from(identity.number == 0)];
        // Nothing that a guest says makes it another instance.
        let forged = [
            &*format!("-HX-Instance-ID: {}", other.identity.instance_id),
            &format!("-HX-Tenant-ID: {}", other.project),
            "-HX-Forwarded-For: 10.9.9.9",
            &format!("http://{METADATA}{PATH}"),
        ];
        eventually(NOTICE, || {
            let fetched = guest.curl(&forged, PATIENCE)?;
            ensure!(fetched.status == 200 && fetched.text() == expected, "{}", fetched.text());
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{expected}: {error:#}"));
    }
    let config = node.room.path().join("agent.yaml").display().to_string();
    let report = node.verb(&["doctor", "--no-pins", "--config", &config]).expect("a report");
    for (name, found) in
        [("openstack.domains", "2 instances of Nova"), ("openstack.nova", "accepts our signature")]
    {
        let checks = report["checks"].as_array().expect("checks");
        let is_it = |check: &&Value| check["name"] == name && check["status"] == "ok";
        let check = checks.iter().find(is_it).unwrap_or_else(|| panic!("{name}: {report}"));
        assert!(check["found"].to_string().contains(found), "{check}");
    }
    // Another domain claims the same port and MAC: the first keeps them, and an operator is told.
    let twin = Instance { identity: Identity::of(2), ..Instance::of(0) };
    put(
        "instance-2.xml",
        &twin.domain().replace(&twin.identity.mac.to_string(), &instances[0].identity.mac.to_string()),
    );
    eventually(NOTICE, || {
        let conflicts = node.status()?.conflicts;
        ensure!(conflicts.iter().any(|text| text.contains(&twin.identity.instance_id)), "{conflicts:?}");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}"));
    let fetched = guests[0].fetch(PATH, PATIENCE).expect("an answer");
    assert!(fetched.text().starts_with(&instances[0].identity.instance_id), "{}", fetched.text());
    // It ends.
    fs::remove_file(domains.join("instance-1.xml")).expect("removed");
    node.serves(&[&instances[0].tap()]);
}

#[test]
fn ports_of_a_running_domain_come_and_go_as_libvirt_and_nova_say() {
    let missing = privileged::missing().map(str::to_owned).or_else(libvirt::missing);
    if !privileged::or_skip_for(missing.as_deref()) {
        return;
    }
    let node = Node::new().expect("a node");
    let mut libvirt = Libvirt::start(node.host.ns(), "#!/bin/sh\n").expect("libvirt");
    let domains: PathBuf = libvirt.running();
    let (instance, name) = (Instance::of(0), "instance-00000000");
    libvirt.boot(name, &instance.domain()).expect("the domain starts");
    let tap = instance.tap();
    let second = Instance::of(1);
    {
        let _agent = node.agent(&domains).expect("an agent");
        node.serves(&[&tap]);

        // Nova plugs an interface, and then writes its port.
        let file = node.room.path().join("nic.xml");
        replace(&file, &interface(&second.tap(), "fa:16:3e:00:00:02")).expect("written");
        libvirt.virsh(&["attach-device", name, &file.display().to_string(), "--live"]).expect("plugged");
        let say = |ports: &[&str]| {
            let words =
                ["metadata", name, "http://openstack.org/xmlns/libvirt/nova/1.1", "--key", "instance"];
            let element = instance.metadata(ports);
            let words = [&words[..], &["--live", "--set", &element]].concat();
            libvirt.virsh(&words).expect("Nova's metadata");
        };
        say(&[&instance.port, &second.port]);
        node.serves(&[&tap, &second.tap()]);
        // The firmware never lets go of the device: what Nova says last counts.
        say(&[&instance.port]);
        node.serves(&[&tap]);
    }
    libvirt.restart().expect("libvirtd restarts");
    let _agent = node.agent(&domains).expect("an agent");
    node.serves(&[&tap]);
    libvirt.virsh(&["destroy", name]).expect("the domain ends");
    node.serves(&[]);
}
