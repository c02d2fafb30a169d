//! The agent detaches XDP from a quiet guest in a pod, still answers it, and attaches XDP again when the guest boots.

use anyhow::ensure;
use std::time::Duration;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::record::Identity;
use support::tap::Shape;
use support::{exposition, privileged};

const PATH: &str = "/v1/meta-data";
/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait until a guest counts as quiet, which takes 30 s.
const QUIET_WITHIN: Duration = Duration::from_secs(90);

/// A pod with a guest, and a namespace for agents.
struct Node {
    guest: Guest,
    pod: Host,
    home: Namespace,
    records: tempfile::TempDir,
    bpffs: Bpffs,
}

impl Node {
    fn new() -> Self {
        let (pod, home) = (Host::new().expect("a pod"), Namespace::new("agent").expect("a namespace"));
        let records = tempfile::tempdir().expect("a directory");
        let bpffs = Bpffs::mount().expect("a bpffs");
        let identity = Identity::of(0);
        identity.write(records.path(), 1).expect("a record");
        let spec = Spec { shape: Shape::virtio(), ..Spec::of(&identity) };
        let guest = Guest::boot(&pod, &spec).expect("a guest");
        Self { guest, pod, home, records, bpffs }
    }

    fn agent(&self, more: &[&str]) -> Agent<'_> {
        let port =
            PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac).within(self.pod.ns());
        let mut words = agent::arguments_with_pins(self.records.path(), &[port], &self.bpffs.pins());
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary().expect("the agent is built"), &self.home, words)
            .expect("an agent")
    }

    fn assert_gets_own(&self) {
        self.guest.fetch_own(PATH, PATIENCE).expect("the guest's own metadata");
    }

    /// Waits until XDP is attached to the tap (`xdp`) or detached.
    fn wait_for_xdp(&self, xdp: bool, patience: Duration, mut meanwhile: impl FnMut()) {
        let reached = eventually(patience, || {
            meanwhile();
            let shown = self.pod.ns().ip("link show tap0")?;
            ensure!(shown.contains("xdp") == xdp, "{shown}");
            Ok(())
        });
        reached.unwrap_or_else(|error| panic!("XDP on the tap should be {xdp}: {error:#}"));
    }
}

fn frames(agent: &Agent<'_>, verdict: &str) -> u64 {
    agent.metrics().and_then(|metrics| metrics.frames(verdict)).expect("a counter")
}

#[privileged::test]
fn xdp_is_detached_from_a_quiet_guest_and_attached_when_it_boots() {
    let node = Node::new();
    let agent = node.agent(&[]);
    node.assert_gets_own();
    assert_eq!(frames(&agent, "ring_"), 0, "XDP must steer a booting guest");
    node.wait_for_xdp(false, QUIET_WITHIN, || {});
    node.assert_gets_own();
    let taken = frames(&agent, "ring_delivered");
    assert!(taken > 0, "the first frames of a quiet guest must arrive through the ring");
    exposition::balance(&agent, 0).expect("every frame is accounted for");
    node.wait_for_xdp(true, PATIENCE, || (0..8).for_each(|_| node.assert_gets_own()));
    exposition::balance(&agent, 0).expect("every frame is accounted for");
    assert_eq!(frames(&agent, "ring_drop_"), 0);
}

#[privileged::test]
fn the_next_agent_answers_a_quiet_guests_request_sent_while_no_agent_ran() {
    let node = Node::new();
    let agent = node.agent(&["--steer", "tcx"]);
    node.assert_gets_own();
    agent.kill().expect("killed");
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| node.guest.fetch_own(PATH, PATIENCE));
        let agent = node.agent(&["--steer", "tcx"]);
        asking.join().expect("no panic").expect("the guest's own metadata");
        assert!(frames(&agent, "ring_delivered") > 0);
        assert_eq!(frames(&agent, "socket_delivered"), 0);
    });
    node.wait_for_xdp(false, PATIENCE, || {});
}
