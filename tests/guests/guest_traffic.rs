//! The agent does not disturb its guests' other traffic, whether it serves, stops, crashes or starts again.

use anyhow::{Result, ensure};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, Spec};
use support::host::{self, EchoServer, Host};
use support::privileged;
use support::record::Identity;
use support::tap::{Backend, Shape};

const PINGS: u32 = 10;
const BYTES: usize = 1 << 20;
/// For connections beside an agent that starts.
const FEW_BYTES: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(10);
const SHAPES: [Shape; 3] =
    [Shape { queues: 1, vnet_hdr: false }, Shape::virtio(), Shape { queues: 2, vnet_hdr: true }];

/// A node and two guests, with an echo server on the gateway and on the second guest.
struct Neighbours {
    // Fields drop in order: servers before the namespaces they listen in.
    gateway: EchoServer,
    peer: EchoServer,
    guests: [Guest; 2],
    host: Host,
}

impl Neighbours {
    fn boot(shape: Shape) -> Result<Self> {
        let host = Host::new()?;
        let boot = |number| Guest::boot(&host, &Spec { shape, ..Spec::of(&Identity::of(number)) });
        let guests = [boot(0)?, boot(1)?];
        let gateway = host.server(7)?;
        let peer_address = SocketAddr::new(IpAddr::V4(guests[1].identity().address), 7);
        let peer = EchoServer::start(guests[1].ns(), peer_address)?;
        Ok(Self { gateway, peer, guests, host })
    }

    /// Checks that ping and TCP to the gateway and to the other guest lose nothing.
    fn talk(&self) -> Result<()> {
        let [one, other] = &self.guests;
        for to in [host::ADDRESS, other.identity().address] {
            let answers = one.ping(to, PINGS)?;
            ensure!(answers == PINGS, "{answers} of {PINGS} pings to {to} were answered");
        }
        one.echo(self.gateway.address(), BYTES)?;
        one.echo(self.peer.address(), BYTES)
    }

    fn ports(&self) -> Vec<PortArgument> {
        self.guests
            .iter()
            .map(|guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac))
            .collect()
    }

    fn tap_indexes(&self) -> Result<Vec<String>> {
        self.guests
            .iter()
            .map(|guest| {
                let shown = self.host.ns().ip(&format!("-o link show {}", guest.host_tap().name()))?;
                ensure!(shown.contains("LOWER_UP") && shown.contains("master br0"), "{shown}");
                Ok(shown.split(':').next().unwrap_or_default().to_owned())
            })
            .collect()
    }
}

#[privileged::test]
fn guests_reach_their_gateway_and_each_other_without_an_agent() {
    for shape in SHAPES {
        let neighbours = Neighbours::boot(shape).expect("two guests");
        neighbours.talk().unwrap_or_else(|error| panic!("{shape:?}: {error:#}"));
    }
}

#[privileged::test]
fn a_departing_guest_does_not_disturb_its_neighbours_gateway() {
    let host = Host::new().expect("a node");
    let guests: Vec<_> =
        (0..5).map(|number| Guest::boot(&host, &Spec::of(&Identity::of(number))).expect("a guest")).collect();
    let mut guests = guests.into_iter();
    let stays = guests.next().expect("the first");
    for gone in guests {
        drop(gone);
        assert_eq!(stays.ping(host::ADDRESS, PINGS).expect("a report"), PINGS);
    }
}

#[privileged::test]
fn guests_reach_their_gateway_and_each_other_while_the_agent_serves() {
    for shape in SHAPES {
        let neighbours = Neighbours::boot(shape).expect("two guests");
        let records = tempfile::tempdir().expect("a directory");
        let agent =
            Agent::start(neighbours.host.ns(), records.path(), &neighbours.ports()).expect("an agent");
        neighbours.talk().unwrap_or_else(|error| panic!("{shape:?}: {error:#}"));
        let passed =
            agent.metrics().and_then(|metrics| metrics.frames(support::agent::PASSED)).expect("a counter");
        assert!(passed > u64::from(PINGS), "{shape:?}: only {passed} frames went through the program");
    }
}

#[test]
fn agents_that_come_and_go_under_traffic_lose_none_of_it() {
    attach_under_traffic(Backend::Calls);
}

#[test]
fn agents_that_come_and_go_under_traffic_behind_vhost_net_lose_none_of_it() {
    attach_under_traffic(Backend::VhostNet);
}

#[track_caller]
fn attach_under_traffic(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let host = Host::new().expect("a node");
    let identity = Identity::of(0);
    let records = tempfile::tempdir().expect("a directory");
    identity.write(records.path(), 1).expect("a record");
    let spec = Spec { backend, shape: Shape::virtio(), ..Spec::of(&identity) };
    let guest = Guest::boot(&host, &spec).expect("a guest");
    let server = host.server(7).expect("a server");
    let ports = [PortArgument::new(guest.host_tap().name(), identity.mac)];
    let over = AtomicBool::new(false);
    let serve = || -> Result<()> {
        for path in support::answers::PATHS {
            let agent = Agent::start(host.ns(), records.path(), &ports)?;
            guest.fetch_own(path, PATIENCE)?;
            agent.kill()?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| -> Result<u32> {
            let mut connections = 0;
            while !over.load(Ordering::Relaxed) {
                // ping sends 50 requests a second, which leaves an emulated processor time for the agent's start.
                let answers = guest.ping(host::ADDRESS, PINGS)?;
                ensure!(answers == PINGS, "{answers} of {PINGS} pings were answered");
                guest.echo(server.address(), FEW_BYTES)?;
                connections += 1;
            }
            Ok(connections)
        });
        let served = serve();
        over.store(true, Ordering::Relaxed);
        let connections = traffic.join().expect("the traffic's thread ends").expect("traffic");
        served.expect("an answer under traffic");
        assert!(connections > 0, "no connection was complete");
    });
}

#[privileged::test]
fn a_guest_steered_by_a_classifier_gets_its_own_metadata_and_reaches_its_neighbours() {
    for shape in SHAPES {
        let neighbours = Neighbours::boot(shape).expect("two guests");
        let records = tempfile::tempdir().expect("a directory");
        for guest in &neighbours.guests {
            guest.identity().write(records.path(), 1).expect("a record");
        }
        let mut words = support::agent::arguments(records.path(), &neighbours.ports());
        words.extend(["--steer".into(), "tcx".into()]);
        let binary = support::agent::binary().expect("the agent is built");
        let _agent = Agent::start_binary(&binary, neighbours.host.ns(), words).expect("an agent");
        let shown = neighbours.host.ns().ip("link show tap0").expect("the tap");
        assert!(!shown.contains("xdp"), "{shape:?}: XDP on a tap steered by tcx: {shown}");
        for guest in &neighbours.guests {
            guest.fetch_own("/v1/meta-data", PATIENCE).unwrap_or_else(|error| panic!("{shape:?}: {error:#}"));
        }
        neighbours.talk().unwrap_or_else(|error| panic!("{shape:?}: {error:#}"));
    }
}

#[privileged::test]
fn an_agent_crash_disturbs_no_guest_and_the_next_agent_serves_again() {
    let neighbours = Neighbours::boot(Shape::virtio()).expect("two guests");
    let records = tempfile::tempdir().expect("a directory");
    for guest in &neighbours.guests {
        guest.identity().write(records.path(), 1).expect("a record");
    }
    let before = neighbours.tap_indexes().expect("taps");
    let start = || Agent::start(neighbours.host.ns(), records.path(), &neighbours.ports()).expect("an agent");
    for round in 0..3 {
        let agent = start();
        for guest in &neighbours.guests {
            guest
                .fetch_own("/v1/meta-data", PATIENCE)
                .unwrap_or_else(|error| panic!("round {round}: {error:#}"));
        }
        agent.kill().expect("it was running");
        neighbours.talk().unwrap_or_else(|error| panic!("round {round}, after the crash: {error:#}"));
        assert_eq!(neighbours.tap_indexes().expect("taps"), before, "round {round}");
    }
}

#[privileged::test]
fn a_stopped_agent_leaves_no_program_and_no_device_behind() {
    let neighbours = Neighbours::boot(Shape::default()).expect("two guests");
    let records = tempfile::tempdir().expect("a directory");
    let links = || neighbours.host.ns().links().expect("links");
    let before = links();
    let agent = Agent::start(neighbours.host.ns(), records.path(), &neighbours.ports()).expect("an agent");
    let shown = neighbours.host.ns().ip("link show tap0").expect("the tap");
    assert!(shown.contains("xdp"), "no program on a served port: {shown}");
    let status = agent.stop().expect("it stops");
    assert!(status.success(), "{status}");
    let shown = neighbours.host.ns().ip("link show tap0").expect("the tap");
    assert!(!shown.contains("xdp"), "{shown}");
    assert_eq!(links(), before);
    neighbours.talk().expect("traffic after the agent");
}
