//! A node with one hostile guest, two ordinary guests, and a witness behind their taps.
//!
//! ```text
//!  attacker ── tap0 ─┐                    ┌─ capture
//!  guest 1 ─── tap1 ─┤ port ── bridge ────┤
//!  guest 2 ─── tap2 ─┘   │                └─ neighbour's tap
//!                      agent
//! ```
//!
//! After each case the arena checks four things. A frame for another address still reaches the bridge and the
//! neighbour. The bridge receives no other frames than this frame and those that the case expects. One of the other
//! guests gets an answer. The counters match the verdicts of the case.
#![expect(unsafe_code, reason = "packet sockets are bound with an address std does not know")]

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use metadata_common::verdict::Verdict;
use metadata_common::wire::{ethernet, ipv4, protocol};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::agent::{Agent, PortArgument};
use crate::answers::PATHS;
use crate::exposition::Counts;
use crate::guest::METADATA;
use crate::host::{BRIDGE, BRIDGE_MAC, Host};
use crate::raw::Reply;
use crate::record::Identity;
use crate::station::{Header, Station, is_tcp};
use crate::tap::{Shape, Tap};
use crate::{agent, answers, exposition, frames, station};

/// The number of the hostile guest.
pub const ATTACKER: u16 = 0;
/// The numbers of the other guests.
pub const OTHERS: [u16; 2] = [1, 2];
/// Destination of the frame that must always pass. No host has this address or MAC, so the bridge floods the frame.
const ELSEWHERE: (Ipv4Addr, Mac) = (Ipv4Addr::new(10, 0, 99, 99), Mac([0x52, 0x54, 0, 0x99, 0x99, 0x99]));
/// Limit until a written frame appears on the bridge. The kernel delivers it before `write` returns, unless a queue
/// holds it.
const PASSES: Duration = Duration::from_secs(2);

/// Pause between two requests of an ordinary guest. The rate stays below a VM's default limit of 100 per second.
const BETWEEN_REQUESTS: Duration = Duration::from_millis(20);

/// The node's devices and records, without an agent.
#[derive(Debug)]
pub struct Scene {
    host: Host,
    records: tempfile::TempDir,
    shape: Shape,
}

impl Scene {
    /// Creates a node with taps of this shape and a record for each guest.
    ///
    /// # Errors
    /// When a namespace or a file cannot be made.
    pub fn new(shape: Shape) -> Result<Self> {
        let scene = Self { host: Host::new()?, records: tempfile::tempdir()?, shape };
        for number in [ATTACKER].into_iter().chain(OTHERS) {
            Identity::of(number).write(scene.records.path(), 1)?;
        }
        Ok(scene)
    }

    /// The node.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The directory of the records.
    #[must_use]
    pub fn records(&self) -> &Path {
        self.records.path()
    }

    /// The command line for these ports and this configuration.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn words(&self, config: &str, ports: &[PortArgument]) -> Result<Vec<OsString>> {
        let file = self.records.path().join("agent.conf");
        std::fs::write(&file, config)?;
        let mut words = agent::arguments(self.records.path(), ports);
        words.extend(["--config".into(), file.into()]);
        Ok(words)
    }
}

/// A kind of frame that a guest receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// ARP.
    Arp,
    /// A neighbour advertisement.
    Advertisement,
    /// An echo reply of either family.
    Echo,
    /// SYN and ACK.
    SynAck,
    /// RST.
    Reset,
    /// ACK without payload.
    Ack,
    /// A segment with payload.
    Payload,
    /// FIN without payload.
    Fin,
    /// Anything else.
    Other,
}

impl Kind {
    /// The kind of a frame that a guest received.
    #[must_use]
    pub fn of(frame: &[u8]) -> Self {
        if is_tcp(frame) {
            let reply = Reply::read(frame);
            return match reply.flags {
                (true, ..) => Self::SynAck,
                (.., true) => Self::Reset,
                _ if !reply.payload.is_empty() => Self::Payload,
                (_, _, true, _) => Self::Fin,
                _ => Self::Ack,
            };
        }
        match (frame.get(12..14), frame.get(34), frame.get(54)) {
            (Some([0x08, 0x06]), ..) => Self::Arp,
            (Some([0x08, 0x00]), Some(0), _) if frame[23] == protocol::ICMP => Self::Echo,
            (Some([0x86, 0xdd]), _, Some(129)) if frame[20] == protocol::ICMPV6 => Self::Echo,
            (Some([0x86, 0xdd]), _, Some(136)) if frame[20] == protocol::ICMPV6 => Self::Advertisement,
            _ => Self::Other,
        }
    }
}

/// A frame to send, with its header and queue.
#[derive(Clone, Debug)]
pub struct Shot {
    /// The frame, from the destination MAC.
    pub frame: Vec<u8>,
    /// The header before it on a tap with virtio headers; `None` for the sender's default.
    pub header: Option<Header>,
    /// The tap's queue.
    pub queue: usize,
}

impl From<Vec<u8>> for Shot {
    fn from(frame: Vec<u8>) -> Self {
        Self { frame, header: None, queue: 0 }
    }
}

/// All effects of the frames that the attacker sends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Frames by verdict.
    pub counts: Vec<(Verdict, u64)>,
    /// Frames that the attacker receives, by kind.
    pub hears: Vec<(Kind, usize)>,
    /// Frames that reach the bridge.
    pub leaves: usize,
    /// Frames that the tap itself refuses.
    pub refused: usize,
}

/// The attacker's frames and their expected outcome.
#[derive(Clone, Debug, Default)]
pub struct Case {
    /// The case's name.
    pub name: String,
    /// The frames to send.
    pub shots: Vec<Shot>,
    /// The expected outcome.
    pub outcome: Outcome,
    /// The verdict of all frames under the classifier, if it differs.
    pub verdict_by_tcx: Option<Verdict>,
    /// The outcome under the classifier, if it differs.
    pub by_tcx: Option<Outcome>,
}

impl Case {
    /// A case with one verdict for all frames. They get no answer and do not reach the bridge.
    #[must_use]
    pub fn of(name: impl Into<String>, frames: Vec<Vec<u8>>, verdict: Verdict) -> Self {
        let outcome = Outcome { counts: vec![(verdict, frames.len() as u64)], ..Outcome::default() };
        let shots = frames.into_iter().map(Shot::from).collect();
        Self { name: name.into(), shots, outcome, ..Self::default() }
    }

    /// The case with these answers.
    #[must_use]
    pub fn answered(mut self, hears: &[(Kind, usize)]) -> Self {
        self.outcome.hears = hears.to_vec();
        self
    }

    /// The case with this many frames that reach the bridge.
    #[must_use]
    pub fn leaving(mut self, leaves: usize) -> Self {
        self.outcome.leaves = leaves;
        self
    }

    /// The case with all frames refused by the tap.
    #[must_use]
    pub fn refused(mut self) -> Self {
        self.outcome = Outcome { refused: self.shots.len(), ..Outcome::default() };
        self
    }

    /// The case with another verdict for all frames under the classifier.
    #[must_use]
    pub fn by_tcx(mut self, verdict: Verdict) -> Self {
        self.verdict_by_tcx = Some(verdict);
        self
    }

    /// The expected outcome under the classifier if `is_tcx`, else under the XDP program.
    fn outcome(&self, is_tcx: bool) -> Outcome {
        match (&self.by_tcx, self.verdict_by_tcx) {
            (Some(outcome), _) if is_tcx => outcome.clone(),
            (None, Some(verdict)) if is_tcx => {
                Outcome { counts: vec![(verdict, self.shots.len() as u64)], ..self.outcome.clone() }
            }
            _ => self.outcome.clone(),
        }
    }

    /// The case with each shot changed by `how`.
    #[must_use]
    pub fn sent(mut self, how: impl Fn(&mut Shot)) -> Self {
        self.shots.iter_mut().for_each(how);
        self
    }
}

/// A node with its agent running.
#[derive(Debug)]
pub struct Arena<'a> {
    /// The agent.
    pub agent: Agent<'a>,
    /// The hostile guest.
    pub attacker: Station,
    /// The ordinary guests.
    pub others: Vec<(Identity, Station)>,
    /// The witness behind the taps.
    pub witness: Witness,
    /// True if a tcx classifier steers. It does not count ordinary IPv4 frames.
    pub is_tcx: bool,
    turn: usize,
}

impl<'a> Arena<'a> {
    /// Creates the taps of a scene and starts the agent with this configuration.
    ///
    /// # Errors
    /// When a tap cannot be made or the agent does not start.
    pub fn open(scene: &'a Scene, config: &str) -> Result<Self> {
        let station = |number| -> Result<(Identity, Station)> {
            let identity = Identity::of(number);
            let tap = scene.host.tap(&identity, scene.shape)?;
            let station = Station::new(tap, identity.mac, identity.address);
            Ok((identity, station))
        };
        let (_, attacker) = station(ATTACKER)?;
        let others = OTHERS.map(station).into_iter().collect::<Result<Vec<_>>>()?;
        let witness = Witness::new(&scene.host)?;
        let ports: Vec<_> = [ATTACKER]
            .into_iter()
            .chain(OTHERS)
            .map(|number| PortArgument::new(format!("tap{number}"), Identity::of(number).mac))
            .collect();
        let words = scene.words(config, &ports)?;
        let agent = Agent::start_binary(&agent::binary()?, scene.host.ns(), words)?;
        let mut arena =
            Self { agent, attacker, others, witness, is_tcx: config.contains("steer: tcx"), turn: 0 };
        arena.others_are_served().context("before any case")?;
        Ok(arena)
    }

    /// Checks that every other guest gets answers from its own record only.
    ///
    /// # Errors
    /// When an answer is missing or wrong.
    pub fn others_are_served(&mut self) -> Result<()> {
        for index in 0..self.others.len() {
            self.is_served(index)?;
        }
        Ok(())
    }

    /// Checks that one of the other guests gets an answer from its own record.
    ///
    /// # Errors
    /// When its answer is missing or wrong.
    pub fn is_served(&mut self, index: usize) -> Result<()> {
        self.turn += 1;
        let (identity, station) = &mut self.others[index];
        let path = PATHS[self.turn % PATHS.len()];
        serves(identity, station, path)
    }

    /// Runs an attack while every other guest sends requests. Returns the attack's result and each guest's number of
    /// answered requests.
    ///
    /// # Errors
    /// The error of the attack, or of another guest's first failed request.
    pub fn meanwhile<T>(
        &mut self,
        attack: impl FnOnce(&mut Station, &Agent<'_>) -> Result<T>,
    ) -> Result<(T, Vec<usize>)> {
        let Self { agent, attacker, others, .. } = self;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let crawls: Vec<_> = others
                .iter_mut()
                .map(|(identity, station)| scope.spawn(|| crawl(identity, station, &stop)))
                .collect();
            let done = attack(attacker, agent);
            stop.store(true, Ordering::Relaxed);
            let answered: Result<Vec<usize>> = crawls
                .into_iter()
                .map(|crawl| crawl.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            Ok((done.context("the attack")?, answered?))
        })
    }

    /// Total number of frames that the guests' taps accepted.
    #[must_use]
    pub fn sent(&self) -> u64 {
        let others = self.others.iter().map(|(_, station)| station.sent.get().0);
        self.attacker.sent.get().0 + others.sum::<u64>()
    }

    /// Runs a case and checks everything that must hold after it.
    ///
    /// # Errors
    /// The first check that failed.
    pub fn run(&mut self, case: &Case) -> Result<()> {
        let outcome = case.outcome(self.is_tcx);
        self.attacker.receive()?;
        self.witness.observe()?;
        let before = exposition::verdicts(&self.agent)?;
        let mut refused = 0;
        for shot in &case.shots {
            let header = shot.header.unwrap_or(self.attacker.header);
            refused += usize::from(!self.attacker.send_on(shot.queue, &header, &shot.frame)?);
        }
        ensure!(refused == outcome.refused, "{refused} frames refused by the tap, not {}", outcome.refused);
        self.pass_one(outcome.leaves)?;
        let counted = exposition::since(&before, &exposition::verdicts(&self.agent)?);
        // The other guest's request passes the same rings after the attacker's frames. Its answer therefore shows that
        // those frames have been processed.
        let next = self.turn % self.others.len();
        self.is_served(next).context("another guest")?;
        let heard = self.attacker.receive()?;
        check_counts(&outcome, counted, self.is_tcx)?;
        check_heard(&outcome, &heard)
    }

    /// Sends a frame for another address. Checks that it and exactly `leaves` other frames pass the tap.
    fn pass_one(&mut self, leaves: usize) -> Result<()> {
        let frame = self.passing();
        ensure!(self.attacker.send(&frame)?, "the tap has no room for the frame to another address");
        let end = std::time::Instant::now() + PASSES;
        let (mut seen, mut is_seen) = (Seen::default(), false);
        while !is_seen && std::time::Instant::now() < end {
            let more = self.witness.observe()?;
            seen.bridge.extend(more.bridge);
            seen.neighbour.extend(more.neighbour);
            is_seen = seen.bridge.contains(&frame) && seen.neighbour.contains(&frame);
        }
        ensure!(is_seen, "the frame to another address did not reach both observers: {seen:02x?}");
        seen.bridge.retain(|other| *other != frame);
        seen.neighbour.retain(|other| *other != frame);
        ensure!(
            seen.bridge.len() == leaves,
            "{} frames got to the bridge, not {leaves}: {:02x?}",
            seen.bridge.len(),
            seen.bridge
        );
        // A large frame reaches the neighbour in segments.
        ensure!(leaves > 0 || seen.neighbour.is_empty(), "the neighbour got {:02x?}", seen.neighbour);
        Ok(())
    }

    /// A unique frame that is not for the metadata service.
    fn passing(&self) -> Vec<u8> {
        let mut frame = frames::frame(&[], ethernet::IPV4, &frames::datagram(ELSEWHERE.0, protocol::UDP));
        frame[..ethernet::SOURCE].copy_from_slice(&ELSEWHERE.1.0);
        frame[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&self.attacker.mac.0);
        // Each frame differs, so that a match is the frame just sent.
        frames::with(frame, ethernet::HEADER + ipv4::HEADER + 8, &fastrand::u64(..).to_be_bytes())
    }
}

/// Sends requests until `stop` is set. Returns the number of answers.
fn crawl(identity: &Identity, station: &mut Station, stop: &AtomicBool) -> Result<usize> {
    let mut answered = 0;
    while !stop.load(Ordering::Relaxed) || answered == 0 {
        serves(identity, station, PATHS[answered % PATHS.len()])
            .with_context(|| format!("after {answered} requests of {}", identity.hostname))?;
        answered += 1;
        std::thread::sleep(BETWEEN_REQUESTS);
    }
    Ok(answered)
}

/// Checks that a guest's request gets an answer from its own record.
///
/// # Errors
/// When the answer is missing or wrong.
pub fn serves(identity: &Identity, station: &mut Station, path: &str) -> Result<()> {
    let to = (IpAddr::V4(METADATA), 80);
    let (status, body) = station::answer(&station.ask(to, &station::get(path))?)?;
    answers::check(identity, path, status, &body)
}

/// Checks the counters against the case. The frame that [`Arena::pass_one`] sends is not part of the case. Classifiers
/// do not count ordinary IPv4 frames. Under a classifier only the witness shows which of them passed.
fn check_counts(outcome: &Outcome, mut counted: Counts, is_tcx: bool) -> Result<()> {
    let mut expected: Counts =
        outcome.counts.iter().map(|(verdict, frames)| (verdict.name(), *frames)).collect();
    let ordinary = Verdict::PassIpv4.name();
    if is_tcx {
        counted.remove(ordinary);
        expected.remove(ordinary);
    } else {
        let passed = counted.get_mut(ordinary).context("nothing passed")?;
        *passed -= 1;
    }
    counted.retain(|_, frames| *frames != 0);
    ensure!(counted == expected, "counted {counted:?}, not {expected:?}");
    Ok(())
}

fn check_heard(outcome: &Outcome, heard: &[Vec<u8>]) -> Result<()> {
    let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
    for frame in heard {
        *kinds.entry(Kind::of(frame)).or_default() += 1;
    }
    let expected: BTreeMap<Kind, usize> = outcome.hears.iter().copied().collect();
    ensure!(kinds == expected, "heard {kinds:?}, not {expected:?}: {heard:02x?}");
    Ok(())
}

/// Runs every case and panics with the names of those that failed. `seed` is the seed of their random values.
///
/// # Panics
/// When a case fails.
pub fn run_all(arena: &mut Arena<'_>, label: &str, seed: u64, cases: &[Case]) {
    let mut failures = Vec::new();
    for case in cases {
        if let Err(error) = arena.run(case) {
            failures.push(format!("{label}/{}: {error:#}", case.name));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} cases failed ({}={seed}):\n{}\n--- the agent's log ---\n{}",
        failures.len(),
        cases.len(),
        crate::SEED,
        failures.join("\n"),
        arena.agent.log()
    );
    eprintln!("{label}: {} cases succeeded", cases.len());
}

// The observers behind a guest's tap: the bridge, which receives every frame that passes the tap's program, and a
// neighbour, which receives the frames that the bridge floods.

/// Maximum length of a captured frame, in bytes; longer frames are cut off.
const LONGEST: usize = 65_549;
/// Receive buffer of the capture, in bytes: room for all frames of a flood that reach the bridge.
static ROOM: libc::c_int = 32 << 20;

/// A capture on the bridge, and a tap that the agent does not serve.
#[derive(Debug)]
pub struct Witness {
    bridge: File,
    neighbour: Tap,
    buffer: Vec<u8>,
}

/// Frames that passed the tap, by observer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Frames on the bridge, except the node's own.
    pub bridge: Vec<Vec<u8>>,
    /// Frames that the node itself sent through the bridge.
    pub node: Vec<Vec<u8>>,
    /// Frames on the neighbour's tap for unknown MACs and for groups, except the node's own.
    pub neighbour: Vec<Vec<u8>>,
}

impl Witness {
    /// Starts the capture. A host can have one witness.
    ///
    /// # Errors
    /// When the tap or the capture cannot be created.
    pub fn new(host: &Host) -> Result<Self> {
        let ns = host.ns();
        for family in ["iptables", "ip6tables", "arptables"] {
            let setting = format!("bridge/bridge-nf-call-{family}");
            // These filters (the module `br_netfilter`) drop and trim malformed packets.
            if Path::new("/proc/sys/net").join(&setting).exists() {
                ns.sysctl(&setting, "0")?;
            }
        }
        let neighbour = Tap::create(ns, "neighbour", Shape::default())?;
        ns.ip(&format!("link set {} master {BRIDGE} up", neighbour.name()))?;
        // In promiscuous mode the bridge also receives frames for other MACs.
        ns.ip(&format!("link set {BRIDGE} promisc on"))?;
        let shown: serde_json::Value = serde_json::from_str(&ns.ip(&format!("-j link show dev {BRIDGE}"))?)?;
        let ifindex = shown[0]["ifindex"].as_i64().context("`ip -j link` shows no ifindex")?;
        let bridge = ns.run_in(|| capture(i32::try_from(ifindex)?).context("a packet socket"))?;
        Ok(Self { bridge, neighbour, buffer: vec![0; LONGEST] })
    }

    /// All frames since the last call.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub fn observe(&mut self) -> Result<Seen> {
        let mut seen = Seen::default();
        loop {
            match self.bridge.read(&mut self.buffer) {
                Ok(len) => seen.bridge.push(self.buffer[..len].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The device went down and up again. No frame is lost.
                Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => {}
                Err(error) => return Err(error).context("reading the bridge's capture"),
            }
        }
        while let Some(len) = self.neighbour.receive(0, &mut self.buffer)? {
            seen.neighbour.push(self.buffer[..len].to_vec());
        }
        let is_own = |frame: &Vec<u8>| frame.get(6..12) == Some(&BRIDGE_MAC.0);
        (seen.node, seen.bridge) = seen.bridge.into_iter().partition(is_own);
        seen.neighbour.retain(|frame| !is_own(frame));
        Ok(seen)
    }
}

/// A packet socket (packet(7)) on a device of the calling thread's namespace.
fn capture(ifindex: i32) -> Result<File> {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // Protocol 0 receives nothing until the socket is bound, so it captures no frame of another device.
    // SAFETY: socket takes integers only.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the descriptor was just opened and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_ll is plain data, and all zeros are a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = ifindex;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is a whole sockaddr_ll that outlives the call, and its length is given.
    let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    if rc < 0 {
        return Err(io::Error::last_os_error().into());
    }
    let (room, length) = ((&raw const ROOM).cast(), size_of_val(&ROOM) as libc::socklen_t);
    let (level, option) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
    // SAFETY: the value is a whole int that outlives the call, and its length is given.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, room, length) };
    if rc < 0 { Err(io::Error::last_os_error().into()) } else { Ok(fd.into()) }
}

#[cfg(test)]
mod tests {
    use metadata_common::wire::ethernet;

    use super::Witness;
    use crate::host::Host;
    use crate::record::Identity;
    use crate::tap::Shape;
    use crate::{frames, privileged};

    #[privileged::test]
    fn a_frame_for_an_unknown_mac_reaches_the_bridge_and_the_neighbour() {
        let host = Host::new().expect("a node");
        let tap = host.tap(&Identity::of(0), Shape::default()).expect("a tap");
        let mut witness = Witness::new(&host).expect("a witness");
        witness.observe().expect("the frames");
        let frame = frames::frame(&[], ethernet::IPV4, &frames::syn(frames::OTHER_V4, 80));
        assert!(tap.send(0, &frame).expect("it is sent"));
        let seen = witness.observe().expect("the frames");
        assert_eq!((seen.bridge, seen.neighbour), (vec![frame.clone()], vec![frame]));
    }
}
