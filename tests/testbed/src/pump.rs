//! Carries frames between a guest's NIC and its tap, like QEMU or vhost. Here both are taps, and a test can cause
//! faults between them.
#![expect(unsafe_code, reason = "poll has no safe form in std")]

use crate::tap::{Tap, VNET_HDR_LEN};
use anyhow::{Result, ensure};
use fastrand::Rng;
use smoltcp::wire::{IpProtocol, Ipv4Packet, TcpPacket};
use std::collections::VecDeque;
use std::fmt;
use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest frame of a tap in bytes: a 64 KiB segment with Ethernet and virtio headers.
const FRAME_MAX: usize = 65_536 + 256;
/// Maximum number of frames moved from one queue before the next queue's turn.
const BURST: usize = 64;

/// A kind of frame that a test can lose on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A SYN.
    Syn,
    /// A SYN with an acknowledgement.
    SynAck,
    /// An acknowledgement without payload.
    Ack,
    /// A segment with payload.
    Payload,
    /// A FIN without payload.
    Fin,
}

impl Kind {
    /// The kind of an Ethernet frame, if it carries TCP over IPv4.
    #[must_use]
    pub fn of(frame: &[u8]) -> Option<Self> {
        let ip = Ipv4Packet::new_checked(frame.get(14..).filter(|_| frame[12..14] == [8, 0])?).ok()?;
        let tcp =
            TcpPacket::new_checked(ip.payload()).ok().filter(|_| ip.next_header() == IpProtocol::Tcp)?;
        Some(match (tcp.syn(), tcp.ack(), tcp.payload().is_empty(), tcp.fin()) {
            (true, false, ..) => Self::Syn,
            (true, true, ..) => Self::SynAck,
            (_, _, false, _) => Self::Payload,
            (_, _, _, true) => Self::Fin,
            _ => Self::Ack,
        })
    }
}

/// Faults of one direction. Chances are from 0 to 1 per frame.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Lose only the nth frame of this kind.
    pub lose: Option<(Kind, u32)>,
    /// Chance that a frame is lost.
    pub loss: f64,
    /// Chance that a frame arrives twice.
    pub duplicate: f64,
    /// Chance that the next frame overtakes this one.
    pub reorder: f64,
}

impl Faults {
    /// Loses this share of frames, without other faults.
    #[must_use]
    pub const fn loss(share: f64) -> Self {
        Self { lose: None, loss: share, duplicate: 0.0, reorder: 0.0 }
    }
}

/// Two taps to connect.
#[derive(Debug)]
pub struct Wire {
    /// The guest's NIC: a tap in the guest's namespace.
    pub guest: Arc<Tap>,
    /// The hypervisor's tap, to which XDP is attached.
    pub host: Arc<Tap>,
    /// Faults of frames that the guest sends.
    pub to_host: Faults,
    /// Faults of frames that the guest receives.
    pub to_guest: Faults,
    /// Seed of the faults: the same seed and the same frames give the same faults.
    pub seed: u64,
    /// Buffer for the last segments, and the instant from which their times count.
    pub recent: Option<(Arc<Mutex<Recent>>, Instant)>,
}

impl Wire {
    /// A wire without faults.
    #[must_use]
    pub fn new(guest: Arc<Tap>, host: Arc<Tap>) -> Self {
        Self { guest, host, to_host: Faults::default(), to_guest: Faults::default(), seed: 0, recent: None }
    }
}

/// Frame counts of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Frames written to the far tap, including duplicates.
    pub delivered: u64,
    /// Frames lost by the faults.
    pub lost: u64,
    /// Frames the far tap refused: no room, down, or deleted.
    pub refused: u64,
}

#[derive(Debug, Default)]
struct Counts {
    delivered: AtomicU64,
    lost: AtomicU64,
    refused: AtomicU64,
}

impl Counts {
    fn read(&self) -> Moved {
        Moved {
            delivered: self.delivered.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

/// A thread that carries frames over any number of wires until it is dropped.
///
/// It keeps its taps open. A tap is deleted when its last owner is dropped.
#[derive(Debug)]
pub struct Pump {
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
    counts: Vec<[Arc<Counts>; 2]>,
}

impl Pump {
    /// Starts the thread.
    ///
    /// # Errors
    /// Fails if only one end of a wire has a virtio header, because frames would be misread.
    pub fn start(wires: Vec<Wire>) -> Result<Self> {
        let (stopped, stop) = pipe()?;
        let mut lanes = Vec::new();
        let mut counts = Vec::new();
        for wire in wires {
            ensure!(
                wire.guest.shape().vnet_hdr == wire.host.shape().vnet_hdr,
                "either both or neither of {} and {} must have a virtio header",
                wire.guest.name(),
                wire.host.name()
            );
            let pair = [Arc::new(Counts::default()), Arc::new(Counts::default())];
            let ends = [
                (&wire.guest, &wire.host, wire.to_host, wire.seed, Towards::Host),
                (&wire.host, &wire.guest, wire.to_guest, !wire.seed, Towards::Guest),
            ];
            for ((from, to, faults, seed, towards), counts) in ends.into_iter().zip(&pair) {
                for queue in 0..from.shape().queues {
                    lanes.push(Lane {
                        from: Arc::clone(from),
                        to: Arc::clone(to),
                        queue,
                        faults,
                        rng: Rng::with_seed(seed.wrapping_add(queue as u64)),
                        held: None,
                        counts: Arc::clone(counts),
                        towards,
                        recent: wire.recent.clone(),
                    });
                }
            }
            counts.push(pair);
        }
        let thread = std::thread::Builder::new().name("pump".into()).spawn(move || carry(lanes, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread), counts })
    }

    /// Counts of frames from the guest to the host of a wire, by its index in the list.
    #[must_use]
    pub fn to_host(&self, wire: usize) -> Moved {
        self.counts[wire][0].read()
    }

    /// Counts of frames from the host to the guest of a wire.
    #[must_use]
    pub fn to_guest(&self, wire: usize) -> Moved {
        self.counts[wire][1].read()
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        // Closing the pipe wakes the thread.
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("the pump thread panicked");
        }
    }
}

/// One queue in one direction.
struct Lane {
    from: Arc<Tap>,
    to: Arc<Tap>,
    queue: usize,
    faults: Faults,
    rng: Rng,
    /// A frame that waits until the next one has overtaken it.
    held: Option<Vec<u8>>,
    counts: Arc<Counts>,
    towards: Towards,
    recent: Option<(Arc<Mutex<Recent>>, Instant)>,
}

impl Lane {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.from.descriptors().nth(self.queue).expect("the lane's queue is one of its tap's")
    }

    /// Moves the waiting frames, at most [`BURST`]. Returns false if the source tap is gone.
    fn turn(&mut self, buffer: &mut [u8]) -> bool {
        for _ in 0..BURST {
            match self.from.receive(self.queue, buffer) {
                Ok(Some(len)) => self.pass(&buffer[..len]),
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// True for the frame that [`Faults::lose`] selects.
    fn is_selected_loss(&mut self, frame: &[u8]) -> bool {
        let Some((kind, nth)) = self.faults.lose else { return false };
        let header = if self.from.shape().vnet_hdr { VNET_HDR_LEN } else { 0 };
        if frame.get(header..).and_then(Kind::of) != Some(kind) {
            return false;
        }
        self.faults.lose = (nth > 1).then_some((kind, nth - 1));
        nth == 1
    }

    fn pass(&mut self, frame: &[u8]) {
        if self.is_selected_loss(frame) || self.rng.f64() < self.faults.loss {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
            self.note(Fate::Lost, frame);
            return;
        }
        if self.held.is_none() && self.rng.f64() < self.faults.reorder {
            self.held = Some(frame.to_vec());
            return;
        }
        self.deliver(frame);
        if self.rng.f64() < self.faults.duplicate {
            self.deliver(frame);
        }
        if let Some(held) = self.held.take() {
            self.deliver(&held);
        }
    }

    fn deliver(&self, frame: &[u8]) {
        let queue = self.queue % self.to.shape().queues;
        let (count, fate) = match self.to.send(queue, frame) {
            Ok(true) => (&self.counts.delivered, Fate::Delivered),
            // If the host end is down or gone, the guest loses its frames, as on real hardware.
            Ok(false) | Err(_) => (&self.counts.refused, Fate::Refused),
        };
        count.fetch_add(1, Ordering::Relaxed);
        self.note(fate, frame);
    }

    fn note(&self, fate: Fate, frame: &[u8]) {
        let Some((recent, since)) = &self.recent else { return };
        let header = if self.from.shape().vnet_hdr { VNET_HDR_LEN } else { 0 };
        let mut recent = recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.note(since.elapsed(), self.towards, fate, frame.get(header..).unwrap_or_default());
    }
}

fn carry(mut lanes: Vec<Lane>, stopped: &PipeReader) {
    let mut buffer = vec![0; FRAME_MAX];
    while !lanes.is_empty() {
        let mut polled: Vec<libc::pollfd> =
            lanes.iter().map(Lane::descriptor).chain([stopped.as_fd()]).map(readable).collect();
        if !wait(&mut polled) || polled.last().is_some_and(|stop| stop.revents != 0) {
            return;
        }
        let mut results = polled.iter();
        lanes.retain_mut(|lane| {
            let woken = results.next().is_some_and(|poll| poll.revents != 0);
            !woken || lane.turn(&mut buffer)
        });
    }
}

/// Asks [`wait_for`] to wait until a descriptor is readable.
#[must_use]
pub fn readable(descriptor: BorrowedFd<'_>) -> libc::pollfd {
    libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// Waits until one descriptor is ready. Returns false if poll fails permanently.
fn wait(polled: &mut [libc::pollfd]) -> bool {
    wait_for(polled, -1)
}

/// Waits until one descriptor is ready or `timeout_ms` have passed (negative: no limit).
pub fn wait_for(polled: &mut [libc::pollfd], timeout_ms: i32) -> bool {
    let count = polled.len() as libc::nfds_t;
    // SAFETY: the pointer and count describe the slice, which this call alone borrows and may write.
    let rc = unsafe { libc::poll(polled.as_mut_ptr(), count, timeout_ms) };
    rc >= 0 || std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted
}

// The last TCP segments of a wire, to explain a stalled connection.

/// Number of segments to keep: enough for five retransmissions, their cause and their acknowledgements.
pub const KEPT: usize = 32;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    /// To the hypervisor.
    Host,
    /// To the guest.
    Guest,
}

/// Outcome of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was delivered.
    Delivered,
    /// A simulated fault dropped it.
    Lost,
    /// The far end refused it.
    Refused,
}

/// A recorded segment.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Duration,
    towards: Towards,
    fate: Fate,
    ports: (u16, u16),
    seq: u32,
    ack: u32,
    flags: (bool, bool, bool),
    payload: usize,
    window: u16,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (syn, fin, reset) = self.flags;
        let flag = |is_set, name| if is_set { name } else { "" };
        write!(
            f,
            "{:.6} {} {}>{}{}{}{} seq {} ack {} len {} win {}{}",
            self.at.as_secs_f64(),
            if self.towards == Towards::Host { "guest" } else { "host " },
            self.ports.0,
            self.ports.1,
            flag(syn, " SYN"),
            flag(fin, " FIN"),
            flag(reset, " RST"),
            self.seq,
            self.ack,
            self.payload,
            self.window,
            match self.fate {
                Fate::Delivered => "",
                Fate::Lost => " LOST",
                Fate::Refused => " REFUSED",
            }
        )
    }
}

/// The last segments of one wire, and the number of frames that its simulated faults dropped.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    seen: VecDeque<Seen>,
    /// Frames of any kind that the faults dropped.
    pub lost: u64,
}

impl Recent {
    /// Records an Ethernet frame; only TCP over IPv4 is kept.
    pub fn note(&mut self, at: Duration, towards: Towards, fate: Fate, frame: &[u8]) {
        self.lost += u64::from(fate == Fate::Lost);
        let ip = frame.get(ETHERNET..).and_then(|packet| Ipv4Packet::new_checked(packet).ok());
        let Some(ip) = ip.filter(|ip| ip.next_header() == IpProtocol::Tcp) else { return };
        let Ok(tcp) = TcpPacket::new_checked(ip.payload()) else { return };
        if self.seen.len() == KEPT {
            self.seen.pop_front();
        }
        self.seen.push_back(Seen {
            at,
            towards,
            fate,
            ports: (tcp.src_port(), tcp.dst_port()),
            seq: tcp.seq_number().0.cast_unsigned(),
            ack: tcp.ack_number().0.cast_unsigned(),
            flags: (tcp.syn(), tcp.fin(), tcp.rst()),
            payload: tcp.payload().len(),
            window: tcp.window_len(),
        });
    }

    /// One line per segment, the oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.seen.iter().map(Seen::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Fate, Faults, KEPT, Moved, Pump, Recent, Towards, Wire};
    use crate::eventually;
    use crate::netns::Namespace;
    use crate::privileged;
    use crate::tap::{Shape, Tap};
    use anyhow::ensure;
    use std::net::UdpSocket;
    use std::sync::Arc;
    use std::time::Duration;

    /// Fewer frames than a tap's queue holds (1,000), so that none is lost by accident.
    const FRAMES: u64 = 500;

    /// The counts after sending [`FRAMES`] frames over a wire with these faults.
    fn send_over(faults: Faults, seed: u64) -> Moved {
        let ns = [Namespace::new("pump").expect("a namespace"), Namespace::new("pump").expect("a namespace")];
        let ends = ns.each_ref().map(|ns| {
            ns.sysctl("ipv6/conf/default/disable_ipv6", "1").expect("a setting");
            let tap = Tap::create(ns, "tap", Shape::default()).expect("a tap");
            ns.ip_batch("link set tap up\naddr add 10.9.0.1/24 brd + dev tap\n").expect("an address");
            Arc::new(tap)
        });
        let [guest, host] = ends;
        let wire = Wire { to_host: faults, seed, ..Wire::new(guest, host) };
        let pump = Pump::start(vec![wire]).expect("a pump");
        ns[0].run_in(|| {
            let socket = UdpSocket::bind("10.9.0.1:9").expect("a socket");
            socket.set_broadcast(true).expect("broadcast");
            for _ in 0..FRAMES {
                socket.send_to(b"one frame", "10.9.0.255:9").expect("it is sent");
            }
        });
        eventually(Duration::from_secs(10), || {
            let moved = pump.to_host(0);
            ensure!(moved.delivered + moved.lost == FRAMES, "only {moved:?} so far");
            Ok(())
        })
        .expect("all frames are moved");
        assert_eq!(pump.to_guest(0), Moved::default());
        pump.to_host(0)
    }

    #[privileged::test]
    fn a_wire_without_faults_carries_everything_once() {
        let moved = send_over(Faults::default(), 1);
        assert_eq!(moved, Moved { delivered: FRAMES, lost: 0, refused: 0 });
    }

    #[privileged::test]
    fn the_same_seed_loses_the_same_frames() {
        let lost = [1, 1, 2].map(|seed| send_over(Faults::loss(0.2), seed));
        assert_eq!(lost[0], lost[1]);
        assert_ne!(lost[0], lost[2]);
        // 500 frames at one in five: 100, plus or minus five standard deviations of 9.
        assert!((55..=145).contains(&lost[0].lost), "{:?}", lost[0]);
    }

    /// A segment to port 80 that acknowledges byte 7, with a window of 65,535.
    fn segment(port: u16, seq: u32, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(20 + 20 + payload.len()).expect("a short segment").to_be_bytes();
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, length[0], length[1], 0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend([10, 0, 0, 2, 169, 254, 169, 254]);
        frame.extend([&port.to_be_bytes()[..], &80_u16.to_be_bytes(), &seq.to_be_bytes()].concat());
        frame.extend([0, 0, 0, 7, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn the_last_segments_are_kept_with_their_fates() {
        let mut recent = Recent::default();
        let fates = [Fate::Delivered, Fate::Lost, Fate::Refused];
        for number in 0..KEPT as u32 + 3 {
            let frame = segment(40_000, number, b"payload");
            let fate = fates[number as usize % 3];
            recent.note(Duration::from_millis(number.into()), Towards::Host, fate, &frame);
        }
        recent.note(Duration::ZERO, Towards::Guest, Fate::Lost, b"no segment");
        let lines = recent.lines();
        assert_eq!(lines.len(), KEPT);
        assert_eq!(lines[0], "0.003000 guest 40000>80 seq 3 ack 7 len 7 win 65535");
        assert!(lines[1].ends_with(" LOST") && lines[2].ends_with(" REFUSED"), "{lines:?}");
        let lost = (0..KEPT + 3).filter(|number| number % 3 == 1).count() + 1;
        assert_eq!(recent.lost, lost as u64);
    }
}
