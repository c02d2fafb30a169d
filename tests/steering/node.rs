//! A node that runs steering, and the frames its guests send and receive.

use metadata_common::cookie::CookieKey;
use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_common::stamp::stamp;
use metadata_common::verdict::Verdict;
use metadata_steer::{PortLimits, SteerConfig, SteerError, Steering, SteeringMode};
use std::fs::File;
use std::io::Write as _;
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;
use support::netns::Namespace;
use support::tap::{Shape, Tap};

pub(crate) const ALICE: Mac = Mac([0x52, 0x54, 0, 0, 0, 0xa1]);
pub(crate) const BOB: Mac = Mac([0x52, 0x54, 0, 0, 0, 0xb0]);
pub(crate) const SERVED: [u8; 4] = [169, 254, 169, 254];
/// An address the service does not serve.
pub(crate) const ELSEWHERE: [u8; 4] = [10, 0, 2, 99];

/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Wait after which something counts as not happening.
const MOMENT: Duration = Duration::from_millis(50);

pub(crate) fn config() -> SteerConfig {
    SteerConfig {
        hub: "imds".into(),
        served: vec![SERVED.into()],
        arp_only: Vec::new(),
        limits: PortLimits::default(),
        mode: SteeringMode::Xdp,
        ..SteerConfig::default()
    }
}

/// The agent's namespace, with steering running in it.
pub(crate) struct Node {
    // Must be dropped before its namespace.
    pub(crate) steering: Steering,
    hub_tap: File,
    pub(crate) ns: Namespace,
}

impl Node {
    pub(crate) fn start() -> Self {
        Self::start_with(&config())
    }

    pub(crate) fn start_with(config: &SteerConfig) -> Self {
        let ns = Namespace::new("steer").expect("a namespace");
        let mut steering = start_in(&ns, config).expect("steering starts");
        let hub_tap = steering.take_tap(0).into();
        Self { steering, hub_tap, ns }
    }

    /// Writes an answer for `slot` to the hub's tap.
    pub(crate) fn answer(&mut self, slot: u32) {
        let answer = frame(stamp(slot), Mac::SERVICE, SERVED);
        self.hub_tap.write_all(&answer).expect("the hub's tap accepts a frame");
    }

    /// Waits until `verdict` has been counted `frames` times; panics if the count is exceeded or not reached.
    pub(crate) fn expect_count(&self, verdict: Verdict, frames: u64) {
        let mut seen = 0;
        let reached = within(PATIENCE, || {
            seen = self.steering.counters().expect("counters").get(verdict);
            (seen >= frames).then_some(())
        });
        let all: Vec<_> =
            self.steering.counters().expect("counters").iter().filter(|(_, n)| *n > 0).collect();
        assert!(reached.is_some() && seen == frames, "{verdict:?}: {seen}, expected {frames}; all: {all:?}");
    }
}

pub(crate) fn start_in(ns: &Namespace, config: &SteerConfig) -> Result<Steering, SteerError> {
    ns.run_in(|| Steering::start(config))
}

/// Creates a tap in `ns` and sets it up; also returns the port name by which the agent in `node` reaches it.
pub(crate) fn port(ns: &Namespace, ifname: &str, node: &Namespace) -> (Tap, PortName) {
    let tap = Tap::create(ns, ifname, Shape::default()).expect("a tap");
    ns.ip(&format!("link set {ifname} up")).expect("the tap goes up");
    let netns = (ns.name() != node.name()).then(|| ns.name().to_owned());
    (tap, PortName { ifname: ifname.into(), netns })
}

/// Deletes a tap, as a hypervisor does when its guest ends.
///
/// Closing the descriptor is not enough: a process that another test is starting may hold a copy for a moment.
pub(crate) fn delete(tap: Tap, ns: &Namespace) {
    ns.ip(&format!("link del {}", tap.name())).expect("the tap is deleted");
}

/// Sends an ARP request (RFC 826) for the metadata address, which is the first frame of a guest.
pub(crate) fn ask(tap: &Tap, mac: Mac) {
    ask_for(tap, mac, SERVED);
}

/// Sends an ARP request for `address`.
pub(crate) fn ask_for(tap: &Tap, mac: Mac, address: [u8; 4]) {
    assert!(tap.send(0, &frame(Mac::BROADCAST, mac, address)).expect("the tap accepts a frame"));
}

/// An ARP request. It also serves as an answer, because steering reads only the addresses.
fn frame(destination: Mac, source: Mac, target: [u8; 4]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(42);
    frame.extend(destination.0);
    frame.extend(source.0);
    // EtherType ARP; Ethernet, IPv4, lengths 6 and 4, request.
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(source.0);
    frame.extend([10, 0, 2, 15]);
    frame.extend([0; 6]);
    frame.extend(target);
    frame
}

/// True when a frame to `mac` arrives; other frames that the host sends to its taps are ignored.
pub(crate) fn receives(tap: &Tap, mac: Mac) -> bool {
    within(PATIENCE, || received(tap, mac)).is_some()
}

/// True when no frame to `mac` arrives within [`MOMENT`].
pub(crate) fn receives_nothing(tap: &Tap, mac: Mac) -> bool {
    within(MOMENT, || received(tap, mac)).is_none()
}

fn received(tap: &Tap, mac: Mac) -> Option<()> {
    let mut buffer = [0; 2048];
    while let Some(len) = tap.receive(0, &mut buffer).expect("the tap is there") {
        if buffer[..len].starts_with(&mac.0) {
            return Some(());
        }
    }
    None
}

pub(crate) fn within<T>(limit: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(done) = attempt() {
            return Some(done);
        }
        if start.elapsed() > limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn pinned(bpffs: &Bpffs) -> SteerConfig {
    SteerConfig { pins: Some(bpffs.pins()), key: CookieKey([4, 2]), ..config() }
}

/// A node with two taps on a bridge. A broadcast from the first tap arrives at the second unless steering stops it.
pub(crate) struct Bridged {
    pub(crate) steering: Option<Steering>,
    pub(crate) from: Tap,
    pub(crate) to: Tap,
    pub(crate) name: PortName,
    pub(crate) ns: Namespace,
    pub(crate) bpffs: Bpffs,
}

impl Bridged {
    /// Starts an agent that has the first tap attached, with Alice bound on it as slot 7.
    pub(crate) fn start_with(change: impl FnOnce(&mut SteerConfig)) -> Self {
        let bpffs = Bpffs::mount().expect("a bpffs");
        let ns = Namespace::new("steer").expect("a namespace");
        let (from, name) = port(&ns, "tap0", &ns);
        let (to, _) = port(&ns, "tap1", &ns);
        ns.ip_batch(
            "link add br0 type bridge\nlink set br0 up\nlink set tap0 master br0\nlink set tap1 master br0\n",
        )
        .expect("a bridge");
        let mut config = pinned(&bpffs);
        change(&mut config);
        let mut steering = start_in(&ns, &config).expect("steering starts");
        ns.run_in(|| {
            steering.attach(&name).expect("attached");
            steering.bind(&name, ALICE, 7).expect("bound");
        });
        Self { steering: Some(steering), from, to, name, ns, bpffs }
    }

    pub(crate) fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub(crate) fn end(&mut self) {
        drop(self.steering.take());
    }

    pub(crate) fn restart(&mut self) -> &mut Steering {
        let next = start_in(&self.ns, &pinned(&self.bpffs)).expect("the next agent starts");
        self.steering.insert(next)
    }

    /// Asserts that no frame for a metadata address leaves the port, whoever sends it, and that other frames do.
    pub(crate) fn assert_closed(&self) {
        for mac in [ALICE, BOB] {
            ask(&self.from, mac);
            assert!(
                receives_nothing(&self.to, Mac::BROADCAST),
                "a request of {mac} for the service left the port"
            );
            ask_for(&self.from, mac, ELSEWHERE);
            assert!(
                receives(&self.to, Mac::BROADCAST),
                "an ordinary request of {mac} did not leave the port"
            );
        }
    }

    /// True once frames for a metadata address leave the port; the kernel detaches a program with some delay.
    pub(crate) fn is_open(&self) -> bool {
        let passed = || {
            ask(&self.from, ALICE);
            (!receives_nothing(&self.to, Mac::BROADCAST)).then_some(())
        };
        within(Duration::from_secs(5), passed).is_some()
    }
}

pub(crate) fn steered(steering: &Steering) -> u64 {
    steering.counters().expect("counters").get(Verdict::SteerArp)
}
