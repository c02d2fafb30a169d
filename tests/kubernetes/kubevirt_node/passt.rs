//! VMs on passt: instead of a tap they use sockets in the pod's namespace, like any process of the pod. The agent
//! serves them through an inlet, a veth pair in that namespace.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use metadata_common::addresses;
use metadata_control::status::{GuestWay, PortState};
use metadata_links::inlet;
use serde_json::{Value, json};
use support::agent::Agent;
use support::guest::{METADATA, curl_in};
use support::netns::Namespace;
use support::privileged;

use super::node::{Node, PATIENCE, Pod, may_run, wait_for, wait_until_namespace_is_gone};

/// Bound on a request that must get no answer.
const NOTHING: Duration = Duration::from_secs(3);
/// Bound on one request. TCP takes only seconds to resend frames that were lost while an inlet was created.
const REQUEST: Duration = Duration::from_secs(20);

/// A node whose agents serve passt, with more options.
fn node_with_passt(more: &Value) -> Node {
    let node = Node::new();
    let mut options = json!({"passt": "listen"});
    options.as_object_mut().expect("options").extend(more.as_object().expect("options").clone());
    node.configure(&options);
    node
}

/// Creates a pod with a launcher, addresses and user-data, and its VMI with this NIC.
fn pod<'a>(node: &'a Node, number: u16, binding: &Value) -> (Pod<'a>, Value) {
    let mut pod = node.pod(number);
    let host = number + 1;
    pod.network
        .ns()
        .ip_batch(&format!(
            "link set lo up\naddr add 10.77.0.{host}/24 dev eth0\naddr add fd77::{host}/64 dev eth0 nodad\n"
        ))
        .expect("addresses");
    pod.secret(&pod.identity.user_data);
    pod.launch();
    let mut nic = json!({"name": "default", "macAddress": pod.identity.mac.to_string()});
    nic.as_object_mut().expect("a NIC").extend(binding.as_object().expect("a binding").clone());
    let mut vmi = pod.vmi();
    vmi["spec"]["domain"]["devices"]["interfaces"] = json!([nic]);
    (pod, vmi)
}

/// Creates a pod and its VMI on the node.
fn start_pod<'a>(node: &'a Node, number: u16) -> Pod<'a> {
    let (pod, vmi) = pod(node, number, &json!({"passtBinding": {}}));
    node.server.put(vmi);
    pod
}

/// Sends a request from a namespace; returns status and body.
fn fetch(ns: &Namespace, to: impl Into<SocketAddr>, path: &str, patience: Duration) -> Result<(u16, String)> {
    let fetched = curl_in(ns, &[&format!("http://{}{path}", to.into())], patience)?;
    Ok((fetched.status, fetched.text()))
}

/// Checks that a pod's sockets get the documents of its VM.
fn check_own_documents(pod: &Pod<'_>, address: IpAddr) -> Result<()> {
    let (status, text) = fetch(pod.network.ns(), (address, 80), "/v1/user-data", REQUEST)?;
    let wanted = &pod.identity.user_data;
    ensure!(status == 200 && text == *wanted, "{address}: expected `{wanted}`, got {status}: {text}");
    Ok(())
}

#[track_caller]
fn wait_until_served(agent: &Agent<'_>, pod: &Pod<'_>) {
    wait_for(agent, &pod.key(), || check_own_documents(pod, METADATA.into()));
}

fn inlet_devices(pod: &Pod<'_>) -> Vec<String> {
    let links = pod.network.ns().links().expect("links");
    let names = links.iter().filter_map(|link| link["ifname"].as_str().map(str::to_owned));
    names.filter(|name| [inlet::POD_END, inlet::PORT].contains(&name.as_str())).collect()
}

/// Number of rules in a pod's namespace beyond the kernel's default ones.
fn rules(pod: &Pod<'_>) -> usize {
    let rules = pod.network.ns().ip("rule show").expect("rules");
    rules
        .lines()
        .filter(|rule| !["0:", "32766:", "32767:"].iter().any(|usual| rule.starts_with(usual)))
        .count()
}

#[privileged::test(may_run)]
fn a_pod_on_passt_gets_its_own_vms_documents_on_every_address() {
    let node = node_with_passt(&json!({}));
    let agent = node.agent();
    let core = start_pod(&node, 1);
    let (plugin, vmi) = pod(&node, 2, &json!({"binding": {"name": "passt"}}));
    node.server.put(vmi);
    for pod in [&core, &plugin] {
        wait_until_served(&agent, pod);
        for address in inlet::served(&addresses::ALL) {
            if ![IpAddr::from(METADATA), addresses::EC2.into()].contains(&address) {
                // Some addresses serve their own documents; it is enough that the service answers.
                let got = fetch(pod.network.ns(), (address, 80), "/", REQUEST);
                assert!(got.is_ok(), "{address}: {got:?}\n{}", agent.log());
                continue;
            }
            check_own_documents(pod, address).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
        }
    }
    let password = fetch(core.network.ns(), (METADATA, 8080), "/", REQUEST).expect("the password server");
    assert_eq!(password, (200, "bad_request".into()), "the password server requires its header");
    let status = node.status().expect("a status");
    assert_eq!(status.identities, 2, "{status:?}");
    let names: Vec<_> = node.instances().expect("instances").into_iter().map(|it| it.refused).collect();
    assert_eq!(names, [None, None]);
    let ports = node.every_port().expect("a status").ports.listed;
    let ways: Vec<_> = ports.iter().map(|port| (port.state, port.way)).collect();
    assert_eq!(ways, [(PortState::Attached, GuestWay::Inlet); 2], "{ports:?}");
}

/// A guest behind pasta, which is passt for a namespace: the same code runs between guest and sockets. Killed on
/// drop.
struct Pasta {
    child: Child,
    guest: Namespace,
}

impl Pasta {
    /// Runs pasta in a pod and forwards port 80 of the pod to the guest.
    fn run(pod: &Pod<'_>) -> Self {
        let guest = Namespace::new("guest").expect("a namespace");
        guest.ip("link set lo up").expect("up");
        let mut pasta = Command::new("pasta");
        pasta.args(["--foreground", "--runas", "0", "--config-net", "--interface", "eth0"]);
        pasta.args(["-t", "80", "-u", "none", "-T", "none", "-U", "none", "--netns"]).arg(guest.path());
        pasta.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = pod.network.ns().spawn(&mut pasta).expect("pasta starts");
        Self { child, guest }
    }
}

impl Drop for Pasta {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            eprintln!("cannot end process {}: {error}", self.child.id());
        }
    }
}

#[test]
fn guests_behind_real_passt_get_their_documents_while_it_forwards_port_80() {
    let missing = Command::new("pasta").arg("--version").output().err();
    let missing = missing.map(|error| format!("pasta cannot be run: {error}; install passt"));
    if !may_run() || !privileged::or_skip_for(missing.as_deref()) {
        return;
    }
    let node = node_with_passt(&json!({}));
    let agent = node.agent();
    let pods = [start_pod(&node, 1), start_pod(&node, 2)];
    for pod in &pods {
        // pasta copies the guest's addresses and routes from the pod's NIC.
        let ns = pod.network.ns();
        ns.ip_batch("route add default via 10.77.0.1\nroute add default via fd77::1\n").expect("routes");
    }
    let guests = pods.each_ref().map(Pasta::run);
    for (pod, pasta) in pods.iter().zip(&guests) {
        for address in [IpAddr::from(METADATA), addresses::EC2.into()] {
            wait_for(&agent, &format!("{address} by pasta"), || {
                let got = fetch(&pasta.guest, (address, 80), "/v1/user-data", REQUEST)?;
                ensure!(got == (200, pod.identity.user_data.clone()), "{got:?}");
                Ok(())
            });
        }
        // Connections that pasta forwards still reach the guest.
        let server = pasta.guest.run_in(|| TcpListener::bind("0.0.0.0:80")).expect("the guest's server");
        let to: SocketAddr = "127.0.0.1:80".parse().expect("an address");
        let _client =
            pod.network.ns().run_in(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("connected");
        server.set_nonblocking(true).expect("no waiting");
        wait_for(&agent, "it reaches the guest", || Ok(server.accept()?));
    }
}

#[privileged::test(may_run)]
fn a_vm_on_passt_without_the_option_is_reported_and_its_pod_left_alone() {
    let node = Node::new();
    let agent = node.agent();
    let pod = start_pod(&node, 1);
    wait_for(&agent, "the report", || {
        let refused = node.instances()?.into_iter().filter_map(|instance| instance.refused).next();
        let refused = refused.unwrap_or_default();
        ensure!(refused.contains("`passtBinding` is not served"), "{refused}");
        ensure!(refused.contains("passt: listen"), "{refused}");
        Ok(())
    });
    assert_eq!((inlet_devices(&pod), rules(&pod)), (vec![], 0));
}

#[privileged::test(may_run)]
fn port_80_bound_by_passt_on_every_address_stays_with_the_guest() {
    let node = node_with_passt(&json!({}));
    let agent = node.agent();
    let (pod, vmi) = pod(&node, 1, &json!({"passtBinding": {}}));
    let ns = pod.network.ns();
    // Like `passt --tcp-ports all`: one port is bound before the inlet exists, and one after.
    let before = ns.run_in(|| TcpListener::bind("0.0.0.0:80")).expect("port 80 is free");
    node.server.put(vmi);
    wait_until_served(&agent, &pod);
    let after = ns.run_in(|| TcpListener::bind("[::]:8080")).expect("port 8080 is free");
    for (listener, to) in [(&before, "10.77.0.2:80"), (&after, "[fd77::2]:8080")] {
        let to: SocketAddr = to.parse().expect("an address");
        let _client = ns.run_in(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("connected");
        listener.accept().expect("the guest's listener accepts");
    }
}

#[privileged::test(may_run)]
fn traffic_from_the_pods_network_never_reaches_an_inlet() {
    let node = node_with_passt(&json!({}));
    let agent = node.agent();
    let pod = start_pod(&node, 1);
    wait_until_served(&agent, &pod);
    let ns = pod.network.ns();
    for (name, value) in [("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")] {
        ns.sysctl(name, value).expect("it forwards");
    }
    // The neighbour is at the other end of the pod's NIC.
    let neighbour = Namespace::new("neighbour").expect("a namespace");
    let outer = pod.outer();
    node.host.ns().ip(&format!("link set {outer} netns {}", neighbour.name())).expect("moved");
    neighbour
        .ip_batch(&format!(
            "link set {outer} up\naddr add 10.77.0.200/24 dev {outer}\naddr add fd77::200/64 dev {outer} nodad\n\
             route add {METADATA} via 10.77.0.2\nroute add {} via fd77::2\n",
            addresses::EC2
        ))
        .expect("routes by the pod");
    // The neighbour reaches the pod itself.
    let listener = ns.run_in(|| TcpListener::bind("[::]:9000")).expect("a port");
    for to in ["10.77.0.2:9000", "[fd77::2]:9000"] {
        let to: SocketAddr = to.parse().expect("an address");
        neighbour.run_in(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("it reaches the pod");
        listener.accept().expect("accepted");
    }
    for address in [IpAddr::from(METADATA), addresses::EC2.into()] {
        let got = fetch(&neighbour, (address, 80), "/v1/user-data", NOTHING);
        assert!(got.is_err(), "{address}: {got:?}");
    }
    check_own_documents(&pod, METADATA.into()).expect("the pod is served as before");
    // Only the inlet's rule keeps the neighbour out: with a rule for all traffic, the neighbour gets an answer.
    let table = ns.ip("rule show").expect("rules");
    let table =
        table.lines().find(|rule| rule.contains("iif lo")).and_then(|rule| rule.split(' ').next_back());
    ns.ip(&format!("rule add to {METADATA} lookup {}", table.expect("the inlet's"))).expect("a rule");
    let got = fetch(&neighbour, (METADATA, 80), "/v1/user-data", REQUEST).expect("an answer");
    assert_eq!(got.1, pod.identity.user_data);
}

#[privileged::test(may_run)]
fn a_pod_on_passt_keeps_the_connection_limit_of_its_vm() {
    let node = node_with_passt(&json!({"serve": {"limits": {"conns": 4}}}));
    let agent = node.agent();
    let (pod, other) = (start_pod(&node, 1), start_pod(&node, 2));
    wait_until_served(&agent, &pod);
    wait_until_served(&agent, &other);
    let to = SocketAddr::from((METADATA, 80));
    let begin = || {
        let mut connection = pod.network.ns().run_in(|| TcpStream::connect_timeout(&to, PATIENCE))?;
        connection.write_all(b"GET /v1/user-data HTTP/1.1\r\n")?;
        Ok::<_, std::io::Error>(connection)
    };
    let _held: Vec<_> = (0..4).map(|n| begin().unwrap_or_else(|error| panic!("{n}: {error}"))).collect();
    wait_for(&agent, "four are held", || {
        let got = fetch(pod.network.ns(), to, "/v1/user-data", NOTHING);
        ensure!(got.is_err(), "a fifth connection is answered: {got:?}");
        Ok(())
    });
    check_own_documents(&other, METADATA.into()).expect("the other VM is served");
}

#[privileged::test(may_run)]
fn a_pod_on_passt_keeps_its_vms_rate_limit_and_is_audited_as_its_vm() {
    let node = node_with_passt(&json!({"serve": {"limits": {"rps": 1, "burst": 4}}}));
    let audit = node.path("audit.log");
    let agent = node.agent_with(&["--audit", audit.to_str().expect("text")]);
    let pod = start_pod(&node, 1);
    wait_until_served(&agent, &pod);
    let url = format!("http://{METADATA}/v1/user-data?[1-6]");
    let got = curl_in(pod.network.ns(), &[&url], PATIENCE).expect("six answers");
    assert_eq!(got.text(), pod.identity.user_data.repeat(6), "requests beyond the burst wait for their turn");
    let metrics = agent.metrics().expect("metrics");
    let waits = metrics
        .samples()
        .iter()
        .filter(|sample| sample.name == "xdp_imds_parked_total" && sample.label("reason") == Some("rate"));
    assert!(waits.map(|sample| sample.value).sum::<f64>() >= 2.0, "some waited");
    wait_for(&agent, "the audit log", || {
        let log = std::fs::read_to_string(&audit)?;
        let owner = format!("kubevirt/{}/vmi-{}", pod.key(), pod.uid);
        let mine = log.lines().filter(|line| line.contains(&owner)).count();
        ensure!(mine >= 6, "{mine} lines are of the VM: {log}");
        ensure!(log.contains(inlet::PORT), "the port is named: {log}");
        Ok(())
    });
}

#[privileged::test(may_run)]
fn an_opted_out_vm_loses_its_inlet_and_an_ended_one_frees_its_namespace() {
    let node = node_with_passt(&json!({}));
    let agent = node.agent();
    let (pod, ending) = (start_pod(&node, 1), start_pod(&node, 2));
    wait_until_served(&agent, &pod);
    wait_until_served(&agent, &ending);
    assert_eq!((inlet_devices(&pod).len(), rules(&pod)), (2, 1));
    let mut out = pod.vmi();
    out["metadata"]["annotations"] = json!({"imds.kubevirt.io/enabled": "false"});
    node.server.put(out);
    wait_for(&agent, "the inlet is removed", || {
        ensure!(
            (inlet_devices(&pod), rules(&pod)) == (vec![], 0),
            "{:?} {}",
            inlet_devices(&pod),
            rules(&pod)
        );
        Ok(())
    });
    let outer = ending.end_alone();
    wait_until_namespace_is_gone(&agent, &node, &outer);
    wait_for(&agent, "no port remains", || {
        ensure!(node.links() == 0 && node.status()?.identities == 0, "{} programs", node.links());
        Ok(())
    });
}

#[privileged::test(may_run)]
fn a_foreign_device_with_an_inlets_name_is_left_alone() {
    for options in [json!({"passt": "listen"}), json!({})] {
        let node = Node::new();
        node.configure(&options);
        let agent = node.agent();
        let (pod, vmi) = pod(&node, 1, &json!({"passtBinding": {}}));
        pod.network.ns().ip(&format!("link add {} type bridge", inlet::POD_END)).expect("a device");
        node.server.put(vmi);
        wait_for(&agent, "the report", || {
            let refused = node.instances()?.into_iter().filter_map(|instance| instance.refused).next();
            ensure!(refused.is_some(), "no instance is reported as refused yet");
            Ok(())
        });
        let listens = options == json!({"passt": "listen"});
        assert_eq!(
            agent.log().contains("found no imds0-port") || agent.log().contains("found a bridge"),
            listens,
            "{}",
            agent.log()
        );
        assert_eq!(
            (inlet_devices(&pod), rules(&pod)),
            (vec![inlet::POD_END.to_owned()], 0),
            "{}",
            agent.log()
        );
    }
}

#[privileged::test(may_run)]
fn an_inlet_is_closed_while_no_agent_runs_and_the_next_agent_reuses_it() {
    let node = node_with_passt(&json!({}));
    let first = node.agent();
    let pod = start_pod(&node, 1);
    wait_until_served(&first, &pod);
    let was = inlet_devices(&pod);
    first.kill().expect("killed");
    let closed = |pod: &Pod<'_>, when: &str| {
        let got = fetch(pod.network.ns(), (METADATA, 80), "/v1/user-data", NOTHING);
        assert!(got.is_err(), "{when}: {got:?}");
    };
    closed(&pod, "killed");
    let second = node.agent();
    wait_until_served(&second, &pod);
    assert_eq!((inlet_devices(&pod), rules(&pod)), (was, 1));
    second.stop().expect("stopped");
    closed(&pod, "stopped");
    node.configure(&json!({}));
    let third = node.agent();
    wait_for(&third, "an agent without the option removes it", || {
        ensure!(
            (inlet_devices(&pod), rules(&pod)) == (vec![], 0),
            "{:?} {}",
            inlet_devices(&pod),
            rules(&pod)
        );
        Ok(())
    });
}

#[privileged::test(may_run)]
fn an_inlet_keeps_serving_through_a_takeover() {
    let node = node_with_passt(&json!({}));
    let first = node.agent();
    let pod = start_pod(&node, 1);
    wait_until_served(&first, &pod);
    let was = inlet_devices(&pod);
    let second = node.agent_with(&["--takeover"]);
    check_own_documents(&pod, METADATA.into()).unwrap_or_else(|error| panic!("{error:#}\n{}", second.log()));
    first.ended(PATIENCE).expect("the first has ended");
    check_own_documents(&pod, METADATA.into()).unwrap_or_else(|error| panic!("{error:#}\n{}", second.log()));
    assert_eq!((inlet_devices(&pod), rules(&pod)), (was, 1));
}

#[privileged::test(may_run)]
fn passt_turned_on_by_a_rollout_serves_running_pods_and_warns_of_nothing() {
    let node = Node::new();
    let first = node.agent();
    let pods = [start_pod(&node, 1), start_pod(&node, 2)];
    wait_for(&first, "both are reported", || {
        let instances = node.instances()?;
        let refused = instances.iter().filter(|instance| instance.refused.is_some()).count();
        ensure!(refused == 2, "{instances:?}");
        Ok(())
    });
    node.configure(&json!({"passt": "listen"}));
    let second = node.agent_with(&["--takeover"]);
    for pod in &pods {
        wait_until_served(&second, pod);
    }
    first.ended(PATIENCE).expect("the first has ended");
    let log = second.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert!(warnings.is_empty(), "{warnings:#?}\n{log}");
}

#[privileged::test(may_run)]
fn an_agent_without_pins_removes_its_inlets_when_it_ends() {
    let node = node_with_passt(&json!({}));
    let agent = node.agent_without_pins();
    let pod = start_pod(&node, 1);
    wait_until_served(&agent, &pod);
    agent.stop().expect("stopped");
    assert_eq!((inlet_devices(&pod), rules(&pod)), (vec![], 0));
}
