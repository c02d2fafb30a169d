//! Moves frames between guests and their taps, and runs the guests' timers.

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use rustix::event::epoll;
use rustix::process::Signal;
use std::borrow::Borrow;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::pump::{Fate, Recent, Towards};
use support::tap::{Tap, VNET_HDR_LEN};

use super::super::cpu::WithoutAgent;
use super::answer::{Calls, Flooded, Tally};
use super::boot::Guest;
use super::tcp::{Ends, FRAME_MOST, Header, MILLISECOND, Nanos, SECOND, SYN};
use super::{Arrival, Flood, Kill, Orders, Plan, Planned, Requests, Stall, StallWatch, seconds, tcp};

/// Frames read from one tap before the next tap's turn. They are enough for a boot whose requests are answered at once.
/// With fewer, the time until the tap's next turn would count as the latency of a request.
const BATCH: usize = 512;
/// The most taps handled after one wait.
const EVENTS: usize = 256;
/// The largest frame of a tap: 64 KiB of merged segments, with headers.
const BUFFER: usize = 68 << 10;
/// Interval at which the guests' timers are checked.
const TICK: Nanos = 5 * MILLISECOND;
/// The longest wait in milliseconds while guests are still to begin.
const NEXT_ARRIVAL: i32 = 1;
/// Interval of progress reports.
const PROGRESS_INTERVAL: Nanos = SECOND / 2;
/// The longest time after the last boot for connections to end.
const LINGER: Nanos = SECOND;
/// The longest storm. A longer one is an error.
const LONGEST: Nanos = 600 * SECOND;
/// The least time between two boots of a guest, for each request of a boot. Without a pause, boots would be a flood. A
/// service that limits the frames of a guest (10,000 per second) would delay them.
const PAUSE: Nanos = MILLISECOND;

/// The guests of a plan on their taps.
pub(crate) struct Pump<'a> {
    taps: Vec<&'a Tap>,
    epoll: OwnedFd,
    guests: Vec<Guest>,
    requests: Requests,
    bodies: Vec<u8>,
    manner: Manner,
    buffer: Vec<u8>,
    scratch: Scratch,
    /// Recent segments and stall watch of each guest; empty if stalls are not watched.
    watches: Vec<(Recent, StallWatch)>,
}

/// A tap with simulated loss.
struct Port<'a> {
    tap: &'a Tap,
    loss: f64,
    dice: &'a mut fastrand::Rng,
    calls: &'a mut Calls,
    recent: Option<(&'a mut Recent, Nanos)>,
}

impl Port<'_> {
    fn note(&mut self, fate: Fate, frame: &[u8]) {
        if let Some((recent, now)) = &mut self.recent {
            note(recent, *now, Towards::Host, fate, self.tap, frame);
        }
    }
}

fn note(recent: &mut Recent, now: Nanos, towards: Towards, fate: Fate, tap: &Tap, frame: &[u8]) {
    let header = if tap.shape().vnet_hdr { VNET_HDR_LEN } else { 0 };
    recent.note(Duration::from_nanos(now), towards, fate, frame.get(header..).unwrap_or_default());
}

impl Transmit for Port<'_> {
    fn send(&mut self, frame: &[u8]) {
        if self.loss > 0.0 && self.dice.f64() < self.loss {
            return self.note(Fate::Lost, frame);
        }
        self.calls.writes += 1;
        // A frame that the device refuses is lost, as on any network. The guest sends it again.
        let taken = self.tap.send(0, frame).unwrap_or(false);
        self.note(if taken { Fate::Delivered } else { Fate::Refused }, frame);
    }
}

/// A storm under way.
struct Storm<'a> {
    orders: &'a Orders,
    clock: Instant,
    /// The start of each guest in the current wave, in reverse order of time.
    arrivals: Vec<(Nanos, usize)>,
    tally: Tally,
    calls: Calls,
    random: fastrand::Rng,
    dice: fastrand::Rng,
}

impl<'a> Pump<'a> {
    /// Makes a pump for these taps, without guests.
    pub(crate) fn new<T: Borrow<Tap>>(taps: &'a [T]) -> Result<Self> {
        let taps: Vec<&Tap> = taps.iter().map(Borrow::borrow).collect();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (number, tap) in taps.iter().enumerate() {
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(&epoll, tap, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            taps,
            epoll,
            guests: Vec::new(),
            requests: Requests::new(&[]),
            bodies: Vec::new(),
            manner: Manner::default(),
            buffer: vec![0; BUFFER],
            scratch: Scratch::default(),
            watches: Vec::new(),
        })
    }

    /// Replaces the plan.
    pub(crate) fn load(&mut self, plan: Plan) -> Result<()> {
        ensure!(plan.guests.len() <= self.taps.len(), "the plan has more guests than there are taps");
        let wrong = plan.guests.iter().any(|guest| guest.answers.len() != plan.requests.len());
        ensure!(!wrong, "a guest's number of answers differs from the number of requests");
        self.bodies = std::fs::read(&plan.bodies)
            .with_context(|| format!("cannot read bodies from {}", plan.bodies.display()))?;
        self.requests = Requests::new(&plan.requests);
        self.guests = plan.guests.into_iter().map(|planned| Guest::new(planned, plan.server)).collect();
        Ok(())
    }

    /// Boots the guests as ordered. `report` gets the numbers of finished boots and of failures.
    pub(crate) fn storm(
        &mut self,
        orders: &Orders,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<(Tally, Nanos)> {
        let mut storm = self.begin(orders)?;
        let (mut ticked, mut reported, mut first_wave) = (0, 0, None);
        storm.wave(0);
        let (mut wave, pause) = (0, PAUSE * self.requests.len() as Nanos);
        let wall = loop {
            let now = storm.now();
            self.arrive(&mut storm, now);
            self.turn(&mut storm)?;
            let now = storm.now();
            if now >= ticked + TICK {
                ticked = now;
                self.tick(&mut storm, now);
                storm.kill(now)?;
                let guests = &self.guests[..orders.guests];
                if storm.tally.without_agent.is_some()
                    && storm.is_over(now)
                    && guests.iter().all(|guest| guest.is_off() || guest.is_stuck(now))
                {
                    break now;
                }
                if guests.iter().all(Guest::is_off) && storm.arrivals.is_empty() {
                    first_wave.get_or_insert(storm.tally.finished.len());
                    let last = storm.tally.finished.last().copied().unwrap_or(now);
                    if storm.is_over(last) {
                        break last;
                    }
                    wave = now.max(wave + pause);
                    storm.wave(wave);
                }
            }
            if now >= reported + PROGRESS_INTERVAL {
                reported = now;
                report(storm.tally.finished.len() as u64, storm.tally.failed);
            }
            ensure!(now < LONGEST, "the storm is not over after {} s", LONGEST / SECOND);
        };
        self.linger(&mut storm)?;
        let mut tally = storm.tally;
        self.guests[..orders.guests].iter().for_each(|guest| guest.give_up(&mut tally));
        tally.finished.truncate(first_wave.unwrap_or(0));
        tally.calls = storm.calls;
        Ok((tally, wall))
    }

    /// Resets the guests for a storm.
    fn begin<'o>(&mut self, orders: &'o Orders) -> Result<Storm<'o>> {
        ensure!(
            (1..=self.guests.len()).contains(&orders.guests),
            "the plan has {} guests, but {} are ordered",
            self.guests.len(),
            orders.guests
        );
        let vnet = self.taps[0].shape().vnet_hdr;
        let lone = orders.arrival == Arrival::Lone;
        let Orders { keep_alive, to_the_end, any_bytes, retries, .. } = *orders;
        self.manner = Manner { vnet, keep_alive, lone, to_the_end, any_bytes, retries };
        let mut random = fastrand::Rng::with_seed(orders.seed);
        self.drain()?;
        for (number, guest) in self.guests.iter_mut().enumerate() {
            guest.forget(number < orders.slow, &mut random);
        }
        self.watches.clear();
        if orders.stall > 0.0 {
            self.watches.resize_with(self.guests.len(), Default::default);
        }
        Ok(Storm {
            orders,
            clock: Instant::now(),
            arrivals: Vec::new(),
            tally: Tally::default(),
            calls: Calls::default(),
            dice: random.fork(),
            random,
        })
    }

    /// Starts the boots that are due.
    fn arrive(&mut self, storm: &mut Storm<'_>, now: Nanos) {
        let lone = storm.orders.arrival == Arrival::Lone;
        while (!lone || self.guests.iter().all(Guest::is_off))
            && let Some((_, number)) = storm.arrivals.pop_if(|(at, _)| *at <= now)
        {
            self.with(number, storm, now, Guest::boot);
        }
    }

    /// Waits for frames and gives them to the guests.
    fn turn(&mut self, storm: &mut Storm<'_>) -> Result<()> {
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; EVENTS];
        let milliseconds = if storm.arrivals.is_empty() { (TICK / MILLISECOND) as i32 } else { NEXT_ARRIVAL };
        let patience =
            rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(milliseconds) * MILLISECOND as i64 };
        storm.calls.waits += 1;
        let ready = match epoll::wait(&self.epoll, &mut events[..], Some(&patience)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &events[..ready] {
            self.take(event.data.u64() as usize, storm)?;
        }
        Ok(())
    }

    /// Reads the frames of one tap.
    fn take(&mut self, number: usize, storm: &mut Storm<'_>) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..BATCH {
            storm.calls.reads += 1;
            let Some(length) = self.taps[number].receive(0, &mut buffer)? else { break };
            let lost = storm.orders.loss > 0.0 && storm.dice.f64() < storm.orders.loss;
            let now = storm.now();
            if let Some((recent, _)) = self.watches.get_mut(number) {
                let fate = if lost { Fate::Lost } else { Fate::Delivered };
                note(recent, now, Towards::Guest, fate, self.taps[number], &buffer[..length]);
            }
            if !lost && number < self.guests.len() {
                self.with(number, storm, now, |guest, world| guest.receive(&buffer[..length], world));
            }
        }
        self.buffer = buffer;
        Ok(())
    }

    fn tick(&mut self, storm: &mut Storm<'_>, now: Nanos) {
        for (guest, (recent, watch)) in self.guests.iter().zip(&mut self.watches) {
            let Some((since, port)) = guest.waits() else { continue };
            let waited = now.saturating_sub(since);
            let Some(lost) = watch.overdue(waited, recent.lost, storm.limit()) else { continue };
            let stall = Stall {
                connection: format!("{}:{port}", guest.plan.address),
                answers: guest.answered(),
                seconds: seconds(waited),
                lost,
                segments: recent.lines(),
                sockets: String::new(),
            };
            watch.stalls(stall, &mut storm.tally.stalls);
        }
        for number in 0..self.guests.len() {
            if self.guests[number].wake_at <= now {
                self.with(number, storm, now, Guest::due);
            }
        }
    }

    fn with(
        &mut self,
        number: usize,
        storm: &mut Storm<'_>,
        now: Nanos,
        act: impl FnOnce(&mut Guest, &mut World<'_>),
    ) {
        let limit = storm.limit();
        let mut watch = self.watches.get_mut(number);
        let (waited, lost) =
            (self.guests[number].waits(), watch.as_ref().map_or(0, |(recent, _)| recent.lost));
        let mut port = Port {
            tap: self.taps[number],
            loss: storm.orders.loss,
            dice: &mut storm.dice,
            calls: &mut storm.calls,
            recent: watch.as_mut().map(|(recent, _)| (recent, now)),
        };
        let mut world = World {
            now,
            manner: self.manner,
            requests: &self.requests,
            bodies: &self.bodies,
            tally: &mut storm.tally,
            out: &mut port,
            scratch: &mut self.scratch,
            random: &mut storm.random,
        };
        let guest = &mut self.guests[number];
        act(guest, &mut world);
        if let Some((_, watch)) = watch
            && let Some((since, _)) = waited.filter(|_| guest.waits() != waited)
        {
            watch.progressed(now.saturating_sub(since), lost, limit, &mut storm.tally.stalls);
        }
    }

    /// Lets closed connections end.
    fn linger(&mut self, storm: &mut Storm<'_>) -> Result<()> {
        let until = storm.now() + LINGER;
        while !self.guests.iter().all(Guest::is_quiet) && storm.now() < until {
            self.turn(storm)?;
            let now = storm.now();
            self.tick(storm, now);
        }
        Ok(())
    }

    /// Discards frames that an earlier subject left in the taps.
    fn drain(&mut self) -> Result<()> {
        for tap in &self.taps {
            while tap.receive(0, &mut self.buffer)?.is_some() {}
        }
        Ok(())
    }
}

impl Storm<'_> {
    fn now(&self) -> Nanos {
        self.clock.elapsed().as_nanos() as Nanos
    }

    /// Whether no further boot begins.
    fn is_over(&self, now: Nanos) -> bool {
        now as f64 >= self.orders.seconds * 1e9
    }

    /// Kills the agent when it is due. Its parent must not have waited for it.
    fn kill(&mut self, now: Nanos) -> Result<()> {
        if let Some(Kill { pid, after }) = self.orders.kill
            && self.tally.without_agent.is_none()
            && now as f64 >= after * 1e9
        {
            support::process::signal(pid, Signal::KILL.as_raw())?;
            self.tally.without_agent = Some(WithoutAgent::default());
        }
        Ok(())
    }

    /// Returns the wait that counts as a stall.
    fn limit(&self) -> Nanos {
        (self.orders.stall * SECOND as f64) as Nanos
    }

    /// Plans the start of each guest.
    fn wave(&mut self, from: Nanos) {
        let guests = self.orders.guests;
        let mut at = 0.0;
        self.arrivals = (0..guests)
            .map(|number| {
                let after = match self.orders.arrival {
                    Arrival::AtOnce | Arrival::Lone => 0.0,
                    Arrival::Ramp(seconds) => seconds * number as f64 / guests as f64,
                    Arrival::Poisson(rate) => {
                        at -= (1.0 - self.random.f64()).ln() / rate;
                        at
                    }
                };
                (from + (after * 1e9) as Nanos, number)
            })
            .collect();
        self.arrivals.reverse();
    }
}

// The flooding guest. It sends as fast as a core can: SYNs to the metadata address, or as many frames to others.

/// Frames between two checks of the stop flag.
const BURST: usize = 256;
/// The destination MAC of ordinary frames, which no device has.
const NOBODY: Mac = Mac([0x02, 0, 0, 0xff, 0xff, 0xff]);
/// An address for documentation (RFC 5737).
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Floods until `stop` is set.
pub(super) fn run(
    tap: &Tap,
    guest: &Planned,
    server: Ipv4Addr,
    flood: Flood,
    stop: &AtomicBool,
) -> Result<Flooded> {
    let began = Instant::now();
    let mut done = Flooded::default();
    let mut frames = frames(tap, guest, server, flood);
    while !stop.load(Ordering::Relaxed) {
        for frame in frames.iter_mut() {
            done.frames += u64::from(tap.send(0, frame).unwrap_or(false));
        }
    }
    done.wall_us = began.elapsed().as_micros() as f64;
    done.cpu_us = thread_cpu_us()?;
    Ok(done)
}

/// Makes SYNs from different ports.
fn frames(tap: &Tap, guest: &Planned, server: Ipv4Addr, flood: Flood) -> Vec<Vec<u8>> {
    let (server, server_mac) = match flood {
        // Any MAC reaches the service, because frames are steered by their destination address.
        Flood::Syn => (server, Mac([0x02, 0, 0xa9, 0xfe, 0, 0])),
        Flood::Ordinary => (ELSEWHERE, NOBODY),
    };
    let ends = Ends { mac: guest.mac(), address: guest.address, server, server_mac };
    (0..BURST as u16)
        .map(|n| {
            let mut frame = vec![0; if tap.shape().vnet_hdr { VNET_HDR_LEN } else { 0 }];
            let port = 1_024 + n;
            let header =
                Header { port, seq: 1, ack: 0, flags: SYN, window: 64_240, timestamps: Some((1, 0)) };
            tcp::segment(&mut frame, &ends, &header, &[], &[], false);
            frame
        })
        .collect()
}

/// Returns the CPU time of the calling thread in microseconds, exact where /proc's ticks are not (Linux:
/// Documentation/scheduler/sched-stats.rst).
fn thread_cpu_us() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let ns: u64 = text.split_whitespace().next().unwrap_or("0").parse()?;
    Ok(ns as f64 / 1e3)
}

// The state that guests share while they handle a frame, and the frames that they send.

/// Bytes of `struct virtio_net_hdr` (Linux: include/uapi/linux/virtio_net.h).
pub(super) const VNET: usize = VNET_HDR_LEN;
/// VIRTIO_NET_HDR_F_NEEDS_CSUM.
pub(super) const NEEDS_CHECKSUM: u8 = 1;
/// The start of the TCP checksum's range in a frame, and the checksum's offset in the TCP header.
const CHECKSUM_START: u16 = 34;
const CHECKSUM_OFFSET: u16 = 16;

/// Sends frames to the network.
pub(super) trait Transmit {
    /// Sends a frame, with its virtio header if the tap has one.
    fn send(&mut self, frame: &[u8]);
}

/// The behaviour of all guests of a storm.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner {
    /// Frames begin with a virtio header, and the device computes checksums.
    pub(super) vnet: bool,
    pub(super) keep_alive: bool,
    /// The guest pauses between two requests.
    pub(super) lone: bool,
    /// The service closes connections first, so the guest reads beyond its answer to the end of the connection.
    pub(super) to_the_end: bool,
    /// Answers may have any bytes.
    pub(super) any_bytes: bool,
    /// How often a failed request is repeated.
    pub(super) retries: u8,
}

/// The state that all guests share while frames are handled.
pub(super) struct World<'a> {
    pub(super) now: Nanos,
    pub(super) manner: Manner,
    pub(super) requests: &'a Requests,
    pub(super) bodies: &'a [u8],
    pub(super) tally: &'a mut Tally,
    pub(super) out: &'a mut dyn Transmit,
    pub(super) scratch: &'a mut Scratch,
    pub(super) random: &'a mut fastrand::Rng,
}

/// Buffers that are used for one frame.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    frame: Vec<u8>,
    pub(super) request: Vec<u8>,
    pub(super) sacks: Vec<(u32, u32)>,
}

impl World<'_> {
    fn begin(&mut self, virtio: [u8; VNET]) {
        self.scratch.frame.clear();
        self.scratch.frame.reserve(VNET + FRAME_MOST);
        if self.manner.vnet {
            self.scratch.frame.extend(virtio);
        }
    }

    pub(super) fn arp(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.begin([0; VNET]);
        write(&mut self.scratch.frame);
        self.out.send(&self.scratch.frame);
    }

    pub(super) fn segment(&mut self, ends: &Ends, header: &Header) {
        let [start, offset] = [CHECKSUM_START, CHECKSUM_OFFSET].map(u16::to_ne_bytes);
        // Flags, GSO type, header length, GSO size, checksum start and offset.
        self.begin([NEEDS_CHECKSUM, 0, 0, 0, 0, 0, start[0], start[1], offset[0], offset[1]]);
        let Scratch { frame, request, sacks } = self.scratch;
        tcp::segment(frame, ends, header, sacks, request, self.manner.vnet);
        self.out.send(frame);
    }
}
