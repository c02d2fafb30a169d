//! An AF_XDP socket on a hub's veth delivers every frame whole and in order, or counts it as lost.
//!
//! ```text
//!  AF_PACKET ── outer ═══ veth ═══ inner ── XDP `socket` ── AF_XDP
//! ```

use aya::Ebpf;
use aya::maps::XskMap;
use aya::programs::{Xdp, xdp::XdpMode};
use metadata_common::maps::{Slot, name, program};
use metadata_common::stamp::stamp;
use metadata_common::time::Now;
use metadata_datapath::afxdp::{AfxdpError, Socket, SocketConfig, SocketStats};
use metadata_datapath::link::HubTap;
use metadata_datapath::stack::Transmit;
use metadata_datapath::worker::{Engine, WorkerConfig, WorkerLauncher};
use smoltcp::phy::{Device as _, Medium, RawSocket, RxToken as _, TxToken as _};
use smoltcp::time::Instant as SmolInstant;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};
use support::netns::Namespace;
use support::tap::{Shape, Tap};
use support::{privileged, seed};

const OBJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
/// Upper bound on each wait; far longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// Frames in flight at once; the veth's own queue holds 256 and drops the rest.
const BURST: usize = 100;
/// The rings are small, so that one burst reaches the limits.
const SMALL: SocketConfig = SocketConfig { rx_ring: 64, chunks: 64, chunk_size: 2_048 };

/// Runs `test` on a thread inside a namespace with a veth; skips it without privileges.
#[track_caller]
fn with_veth(test: impl FnOnce(&Namespace, &mut Veth) + Send) {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("afxdp").expect("a namespace");
    // Keep the kernel's own IPv6 frames off the wire.
    ns.sysctl("ipv6/conf/default/disable_ipv6", "1").expect("a setting");
    ns.ip_batch(
        "link add outer mtu 3000 type veth peer name inner mtu 3000\n\
         link set outer up\nlink set inner up\n",
    )
    .expect("a veth");
    ns.run_in(|| test(&ns, &mut Veth::new(&ns)));
}

/// A veth whose inner end runs the program `socket`. Stays on the thread inside its namespace.
struct Veth {
    ebpf: Ebpf,
    outer: RawSocket,
    inner: u32,
}

impl Veth {
    /// Must run on a thread inside `ns`.
    fn new(ns: &Namespace) -> Self {
        let mut ebpf = Ebpf::load_file(OBJECT).expect("the committed object");
        let program: &mut Xdp =
            ebpf.program_mut(program::SOCKET).expect("the program").try_into().expect("an XDP program");
        program.load().expect("the verifier accepts it");
        program.attach("inner", XdpMode::Driver).expect("XDP on a veth");
        let outer = RawSocket::new("outer", Medium::Ethernet).expect("a packet socket");
        // `2: inner@outer: <BROADCAST…`
        let shown = ns.ip("-o link show inner").expect("the device");
        let (inner, _) = shown.split_once(':').expect("an index");
        let inner = inner.parse().expect("a number");
        Self { ebpf, outer, inner }
    }

    fn bind(&mut self, config: &SocketConfig) -> Socket {
        let socket = Socket::bind(self.inner, 0, config).expect("a bound socket");
        self.sockets().set(0, socket.as_fd(), 0).expect("room in the map");
        socket
    }

    fn sockets(&mut self) -> XskMap<&mut aya::maps::MapData> {
        self.ebpf.map_mut(name::SOCKETS).expect("the map").try_into().expect("an XSKMAP")
    }

    fn send(&mut self, frame: &[u8]) {
        let token = self.outer.transmit(SmolInstant::ZERO).expect("a packet socket always has a token");
        token.consume(frame.len(), |buffer| buffer.copy_from_slice(frame));
    }
}

/// Frames of random length and content.
fn frames(count: usize, lengths: std::ops::RangeInclusive<usize>) -> Vec<Vec<u8>> {
    let mut rng = fastrand::Rng::with_seed(seed());
    let frame = |_| {
        let mut frame = vec![0; rng.usize(lengths.clone())];
        rng.fill(&mut frame);
        frame
    };
    (0..count).map(frame).collect()
}

/// Waits until `done` holds, at most [`PATIENCE`]. Yields, so that the kernel's thread can run.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Receives in batches of 64 until `count` frames have arrived.
fn collect(socket: &mut Socket, count: usize) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    until("receiving", || {
        socket.receive(64, |group| got.extend(group.iter().map(|frame| frame.to_vec())));
        got.len() >= count
    });
    got
}

fn stats(socket: &Socket) -> SocketStats {
    socket.stats().expect("counters")
}

#[test]
fn every_frame_arrives_whole_and_in_order() {
    with_veth(|_, veth| {
        let mut socket = veth.bind(&SocketConfig { chunk_size: 4_096, ..SMALL });
        // Enough to use every ring entry and chunk many times.
        let sent = frames(4_000, 60..=3_014);
        for burst in sent.chunks(32) {
            burst.iter().for_each(|frame| veth.send(frame));
            assert!(collect(&mut socket, burst.len()) == burst, "a burst arrived changed or out of order");
        }
        let stats = stats(&socket);
        assert_eq!((stats.frames, stats.bytes), (4_000, sent.iter().map(|frame| frame.len() as u64).sum()));
        let lost = SocketStats { frames: 0, bytes: 0, ..stats };
        assert_eq!(lost, SocketStats::default());
    });
}

#[test]
fn frames_beyond_the_rx_ring_are_counted_and_those_before_arrive() {
    with_veth(|_, veth| {
        let mut socket = veth.bind(&SocketConfig { chunks: 256, ..SMALL });
        let sent = frames(BURST, 60..=1_000);
        sent.iter().for_each(|frame| veth.send(frame));
        until("counting", || stats(&socket).ring_full == (BURST - 64) as u64);
        assert!(collect(&mut socket, 64) == sent[..64]);
        assert_eq!(stats(&socket).dropped, 0);
        // The socket keeps working.
        sent[..64].iter().for_each(|frame| veth.send(frame));
        assert!(collect(&mut socket, 64) == sent[..64]);
    });
}

#[test]
fn frames_beyond_the_last_chunk_are_counted_and_those_before_arrive() {
    with_veth(|_, veth| {
        let mut socket = veth.bind(&SMALL);
        let sent = frames(BURST, 60..=1_000);
        sent.iter().for_each(|frame| veth.send(frame));
        until("counting", || {
            let stats = stats(&socket);
            stats.dropped + stats.ring_full == (BURST - 64) as u64
        });
        assert!(stats(&socket).fill_ring_empty > 0);
        assert!(collect(&mut socket, 64) == sent[..64]);
        sent[..64].iter().for_each(|frame| veth.send(frame));
        assert!(collect(&mut socket, 64) == sent[..64]);
    });
}

#[test]
fn a_frame_longer_than_a_chunk_is_counted_and_harms_no_other() {
    with_veth(|_, veth| {
        let mut socket = veth.bind(&SMALL);
        for longest in [1_792, 3_014] {
            let before = stats(&socket).dropped;
            veth.send(&vec![1; 1_792]);
            veth.send(&vec![2; longest]);
            veth.send(&[3; 60]);
            let got = collect(&mut socket, if longest == 1_792 { 3 } else { 2 });
            assert_eq!(got.first().map(Vec::len), Some(1_792), "the longest that fits");
            assert_eq!(got.last(), Some(&vec![3; 60]));
            assert_eq!(stats(&socket).dropped - before, u64::from(longest > 1_792));
        }
        veth.send(&vec![4; 1_793]);
        until("counting", || stats(&socket).dropped == 2);
    });
}

#[test]
fn a_closed_sockets_queue_can_be_bound_again_at_once() {
    with_veth(|_, veth| {
        let sent = frames(10, 60..=1_000);
        for _ in 0..10 {
            let mut socket = veth.bind(&SMALL);
            sent.iter().for_each(|frame| veth.send(frame));
            assert!(collect(&mut socket, sent.len()) == sent);
        }
    });
}

#[test]
fn a_queue_in_use_is_refused_after_a_bounded_wait() {
    with_veth(|_, veth| {
        let mut holder = veth.bind(&SMALL);
        let begun = Instant::now();
        let refused = Socket::bind(veth.inner, 0, &SMALL).expect_err("a refusal");
        assert!(begun.elapsed() < PATIENCE);
        assert!(matches!(refused, AfxdpError::Busy { queue: 0, .. }), "{refused}");
        veth.send(&[7; 60]);
        assert_eq!(collect(&mut holder, 1), [vec![7; 60]], "the holder still receives");
    });
}

#[test]
fn an_absent_interface_or_queue_is_refused_at_once() {
    with_veth(|_, veth| {
        for (ifindex, queue) in [(veth.inner + 1_000, 0), (veth.inner, 4_000)] {
            let refused = Socket::bind(ifindex, queue, &SMALL).expect_err("a refusal");
            assert!(matches!(refused, AfxdpError::Bind { .. }), "{refused}");
        }
    });
}

/// Returns each frame unchanged.
struct Echo;

impl Engine for Echo {
    type Stats = ();

    fn receive(&mut self, _: Now, _: Slot, frame: &[u8], out: &mut dyn Transmit) {
        out.send(frame);
    }

    fn step(&mut self, _: Now, _: &mut dyn Transmit) -> Option<Duration> {
        None
    }

    fn forget(&mut self, _: Slot) {}

    fn wake(&mut self, _: Now, _: Slot, _: &mut dyn Transmit) {}

    fn stats(&self) {}
}

/// Frames stamped with slot 7, as the program `port` leaves them.
fn stamped(count: usize) -> Vec<Vec<u8>> {
    let mut frames = frames(count, 60..=1_514);
    for frame in &mut frames {
        frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        frame[6..12].copy_from_slice(&stamp(7).0);
        // An EtherType that nothing here parses.
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    }
    frames
}

/// Captures `count` frames on `tap` with a packet socket.
fn captured(tap: &mut RawSocket, count: usize) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    until("capturing", || {
        while let Some((frame, _)) = tap.receive(SmolInstant::ZERO) {
            got.push(frame.consume(<[u8]>::to_vec));
        }
        got.len() >= count
    });
    got
}

#[test]
fn a_sleeping_worker_wakes_for_each_frame_and_answers_through_the_tap() {
    with_veth(|ns, veth| {
        let tap = Tap::create(ns, "hub", Shape::default()).expect("a tap");
        ns.ip("link set hub up").expect("up");
        let fd = tap.as_fd().try_clone_to_owned().expect("a descriptor");
        let mut wire = RawSocket::new("hub", Medium::Ethernet).expect("a packet socket");
        let sent = stamped(50);
        let socket = veth.bind(&SMALL);
        let config = WorkerConfig { spin: Duration::ZERO, ..WorkerConfig::default() };
        let worker = WorkerLauncher::spawn(config, socket, HubTap::new(fd), Echo).expect("a worker");
        for frame in &sent {
            veth.send(frame);
            assert_eq!(captured(&mut wire, 1), [&frame[..]]);
        }
        until("publishing", || worker.stats().tap.frames == 50);
        let stats = worker.stats();
        assert_eq!((stats.socket.frames, stats.link, stats.socket.dropped), (50, Default::default(), 0));
        assert!(stats.turns.sleeps > 0, "{stats:?}");
        worker.stop().expect("a clean end");
    });
}

#[test]
fn frames_to_a_tap_that_is_down_or_gone_are_lost_and_counted() {
    with_veth(|ns, _| {
        let tap = Tap::create(ns, "hub", Shape::default()).expect("a tap");
        let mut hub = HubTap::new(tap.as_fd().try_clone_to_owned().expect("a descriptor"));
        hub.send(&[1; 60]);
        assert_eq!((hub.stats().down, hub.stats().frames), (1, 0), "down");
        ns.ip("link set hub up").expect("up");
        hub.send(&[1; 60]);
        assert_eq!((hub.stats().down, hub.stats().frames), (1, 1), "up");
        ns.ip("link del hub").expect("gone");
        hub.send(&[1; 60]);
        assert_eq!((hub.stats().down, hub.stats().frames), (2, 1), "gone");
    });
}
