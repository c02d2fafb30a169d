//! Each default address is served on-link and through a gateway. Frames to an address that the configuration leaves
//! out pass to its owner.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use metadata_common::addresses;
use support::agent::{self, Agent, Metrics, PortArgument, STEERED};
use support::guest::{Guest, NIC, Route, Spec};
use support::host::{self, BRIDGE, EchoServer, Host};
use support::netns::Namespace;
use support::record::Identity;
use support::{exposition, privileged};

const PATIENCE: Duration = Duration::from_secs(10);
/// Long enough for three neighbour requests of the guest (at 0, 1 and 2 s), or three SYNs.
const IN_VAIN: Duration = Duration::from_secs(4);
/// Addresses of the guest and its gateway in an ordinary IPv6 network.
const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 0, 0, 0, 0, 0x10);
const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 0, 0, 0, 0, 1);
const BYTES: usize = 100_000;

/// A dual-stack node and guest, and the guest's record.
struct Node {
    guest: Guest,
    host: Host,
    records: tempfile::TempDir,
}

impl Node {
    fn new(route: Route) -> Self {
        let host = Host::new().expect("a node");
        let identity = Identity::of(0);
        let records = tempfile::tempdir().expect("a directory");
        identity.write(records.path(), 1).expect("a record");
        let guest = Guest::boot(&host, &Spec { route, ..Spec::of(&identity) }).expect("a guest");
        for (ns, device, address) in [(host.ns(), BRIDGE, GATEWAY_V6), (guest.ns(), NIC, GUEST_V6)] {
            ns.sysctl(&format!("ipv6/conf/{device}/accept_dad"), "0").expect("a setting");
            ns.sysctl(&format!("ipv6/conf/{device}/disable_ipv6"), "0").expect("a setting");
            ns.ip(&format!("-6 addr add {address}/64 dev {device} nodad")).expect("an address");
        }
        let node = Self { guest, host, records };
        match route {
            Route::OnLink => node.route_on_link(&addresses::ALL),
            Route::Gateway => node.route_by_gateway(),
        }
        node
    }

    fn route_on_link(&self, to: &[IpAddr]) {
        for address in to {
            match address {
                // The guest has a route to the first; the link-local prefix covers the second.
                IpAddr::V4(addresses::METADATA) | IpAddr::V6(addresses::METADATA_LINK_LOCAL) => {}
                IpAddr::V4(v4) => self.guest_ip(&format!("route add {v4}/32 dev {NIC} scope link")),
                IpAddr::V6(v6) => self.guest_ip(&format!("-6 route add {v6}/128 dev {NIC}")),
            }
        }
    }

    /// Routes everything through the gateway. No route can do that for link-local addresses, so they get a neighbour
    /// entry with the gateway's MAC.
    fn route_by_gateway(&self) {
        self.guest_ip(&format!("-6 route add default via {GATEWAY_V6}"));
        let shown = self.host.ns().ip(&format!("-br link show {BRIDGE}")).expect("the bridge");
        let mac = shown.split_whitespace().nth(2).expect("the bridge's address");
        let link_local = addresses::METADATA_LINK_LOCAL;
        self.guest_ip(&format!("-6 neigh replace {link_local} lladdr {mac} nud permanent dev {NIC}"));
    }

    fn guest_ip(&self, words: &str) {
        self.guest.ns().ip(words).expect("a setting of the guest");
    }

    fn port(&self) -> PortArgument {
        PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac)
    }

    /// An agent in another namespace that steers with a classifier.
    fn agent_elsewhere<'a>(&self, ns: &'a Namespace) -> Agent<'a> {
        let mut words = agent::arguments(self.records.path(), &[self.port().within(self.host.ns())]);
        words.extend(["--steer".into(), "tcx".into()]);
        Agent::start_binary(&agent::binary().expect("the agent is built"), ns, words).expect("an agent")
    }

    fn agent(&self, config: Option<&str>) -> Agent<'_> {
        let port = self.port();
        let mut words = agent::arguments(self.records.path(), &[port]);
        let files = tempfile::tempdir().expect("a directory");
        if let Some(config) = config {
            let path = files.path().join("xdp-imds.yaml");
            std::fs::write(&path, config).expect("a configuration");
            words.extend(["--config".into(), path.into()]);
        }
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    /// Requests the root document of an address and returns the status.
    fn ask(&self, address: IpAddr, patience: Duration) -> anyhow::Result<u16> {
        Ok(self.guest.curl(&[&url(address)], patience)?.status)
    }

    /// An ordinary server on the node, on an address added to the bridge.
    fn server(&self, address: IpAddr) -> EchoServer {
        let nodad = if address.is_ipv6() { "nodad" } else { "" };
        self.host.ns().ip(&format!("addr add {address} dev {BRIDGE} {nodad}")).expect("an address");
        EchoServer::start(self.host.ns(), SocketAddr::new(address, 80)).expect("a server")
    }
}

fn url(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4 @ addresses::AZURE_WIRESERVER) => format!("http://{v4}/?comp=versions"),
        IpAddr::V4(v4 @ addresses::ALIYUN) => format!("http://{v4}/latest/meta-data"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => format!("http://[{v6}%25{NIC}]/"),
        IpAddr::V6(v6) => format!("http://[{v6}]/"),
        IpAddr::V4(v4) => format!("http://{v4}/"),
    }
}

fn frames(agent: &Agent<'_>, verdict: &str) -> u64 {
    agent.metrics().and_then(|metrics: Metrics| metrics.frames(verdict)).expect("a counter")
}

#[privileged::test]
fn every_default_address_is_served_on_link() {
    let node = Node::new(Route::OnLink);
    let agent = node.agent(None);
    for address in addresses::ALL {
        assert_eq!(node.ask(address, PATIENCE).expect("an answer"), 200, "{address}");
    }
    let asked = (frames(&agent, "answer_arp"), frames(&agent, "answer_neighbour"));
    assert!(asked.0 >= 4 && asked.1 >= 5, "each address was asked for by ARP or solicitation: {asked:?}");
}

#[privileged::test]
fn every_default_address_is_served_by_a_classifier_from_another_namespace() {
    let elsewhere = Namespace::new("agent").expect("a namespace");
    for route in [Route::OnLink, Route::Gateway] {
        let node = Node::new(route);
        let agent = node.agent_elsewhere(&elsewhere);
        let shown = node.host.ns().ip("link show tap0").expect("the tap");
        assert!(!shown.contains("xdp"), "{route:?}: {shown}");
        for address in addresses::ALL {
            assert_eq!(node.ask(address, PATIENCE).expect("an answer"), 200, "{route:?}, {address}");
        }
        let asked = (frames(&agent, "steer_arp"), frames(&agent, "steer_neighbour"));
        let due = if route == Route::OnLink { (4, 5) } else { (0, 0) };
        assert!(asked.0 >= due.0 && asked.1 >= due.1, "{route:?}: {asked:?}");
        exposition::balance(&agent, 0).expect("every frame is accounted for");
        assert!(
            frames(&agent, "ring_delivered") >= frames(&agent, STEERED),
            "every frame came through the ring"
        );
    }
}

#[privileged::test]
fn every_default_address_is_served_through_a_gateways_mac() {
    let node = Node::new(Route::Gateway);
    let agent = node.agent(None);
    for address in addresses::ALL {
        assert_eq!(node.ask(address, PATIENCE).expect("an answer"), 200, "{address}");
    }
    let asked = (frames(&agent, "answer_arp"), frames(&agent, "answer_neighbour"));
    assert_eq!(asked, (0, 0), "frames carry the gateway's MAC, so no address is resolved");
}

/// Addresses that [`OTHERS`] leaves out, one of each family.
const LEFT_OUT: [IpAddr; 2] = [IpAddr::V4(addresses::ALIYUN), IpAddr::V6(addresses::ORACLE)];
/// A configuration that serves only these addresses.
const OTHERS: &str = "addresses: [169.254.169.254, 'fe80::a9fe:a9fe', 'fd00:ec2::254']\n";

#[privileged::test]
fn an_address_left_out_is_silent_and_its_frames_pass() {
    for route in [Route::OnLink, Route::Gateway] {
        let node = Node::new(route);
        let agent = node.agent(Some(OTHERS));
        let before = frames(&agent, STEERED);
        let passed =
            if route == Route::OnLink { ["pass_arp", "pass_ipv6"] } else { ["pass_ipv4", "pass_ipv6"] };
        for (address, verdict) in LEFT_OUT.into_iter().zip(passed) {
            let seen = frames(&agent, verdict);
            let silence = node.ask(address, IN_VAIN);
            assert!(silence.is_err(), "{route:?}, {address}: answered {silence:?}");
            assert!(frames(&agent, verdict) >= seen + 2, "{route:?}, {address}: its frames did not pass");
        }
        assert_eq!(frames(&agent, STEERED), before, "{route:?}: none of their frames was steered");
        for kept in [addresses::METADATA.into(), addresses::EC2.into()] {
            assert_eq!(node.ask(kept, PATIENCE).expect("an answer"), 200, "{route:?}, {kept}");
        }
    }
}

#[privileged::test]
fn an_address_left_out_reaches_its_owner() {
    for route in [Route::OnLink, Route::Gateway] {
        let node = Node::new(route);
        let servers = LEFT_OUT.map(|address| node.server(address));
        let _agent = node.agent(Some(OTHERS));
        for server in &servers {
            node.guest.echo(server.address(), BYTES).unwrap_or_else(|error| panic!("{route:?}: {error:#}"));
        }
    }
}

#[privileged::test]
fn a_next_hop_resolves_while_its_own_traffic_passes() {
    const NEXT_HOP: Ipv4Addr = addresses::SCALEWAY_NEXT_HOP;
    let node = Node::new(Route::Gateway);
    // The same route that cloud-init's Scaleway datasource adds.
    node.guest_ip(&format!("route add {}/32 via {NEXT_HOP} dev {NIC} onlink", addresses::SCALEWAY));
    let server = node.server(NEXT_HOP.into());
    let agent = node.agent(None);
    assert_eq!(node.ask(addresses::SCALEWAY.into(), PATIENCE).expect("an answer"), 200);
    assert!(frames(&agent, "answer_arp") >= 1, "the next hop was asked for by ARP");
    let steered = frames(&agent, STEERED);
    node.guest.echo(server.address(), BYTES).expect("the next hop's own server, through the gateway");
    assert_eq!(node.guest.ping(NEXT_HOP, 5).expect("a report"), 5);
    assert_eq!(node.guest.ping(host::ADDRESS, 5).expect("a report"), 5);
    assert_eq!(frames(&agent, STEERED), steered, "none of this traffic was steered");
}

#[privileged::test]
fn an_unneeded_next_hop_is_not_answered() {
    let node = Node::new(Route::Gateway);
    node.guest_ip(&format!("route add {}/32 dev {NIC} scope link", addresses::SCALEWAY_NEXT_HOP));
    let agent = node.agent(Some(OTHERS));
    let silence = node.ask(addresses::SCALEWAY_NEXT_HOP.into(), IN_VAIN);
    assert!(silence.is_err(), "answered {silence:?}");
    assert_eq!((frames(&agent, "steer_arp"), frames(&agent, "answer_arp")), (0, 0));
}
