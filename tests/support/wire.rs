//! A simulated link with faults, and a world of one stack and one smoltcp client at its two ends.
//!
//! Time is virtual and every fault depends on a seed, so a failure can be repeated exactly.

use metadata_common::maps::Slot;
use metadata_common::stamp::stamp;
use metadata_common::time::Now;
use metadata_datapath::stack::{AckLedger, Long, NoLedger, Service, Stack, Transmit};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpAddress, IpCidr};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::checksum::cut;
use crate::kernel::Kernel;

/// Virtual unix time at the start of a world: 2026-01-01T00:00:00Z.
pub const EPOCH: u64 = 1_767_225_600;

/// Maximum number of turns at one virtual time. More turns mean an endless loop.
const TURNS_PER_INSTANT: usize = 10_000;

/// splitmix64, a small generator that suffices for faults.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed, or with that of `XDP_IMDS_SEED`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let set = std::env::var("XDP_IMDS_SEED").ok().and_then(|text| text.parse().ok());
        Self(set.unwrap_or(seed))
    }

    /// A generator with this seed, regardless of the environment.
    #[must_use]
    pub fn exactly(seed: u64) -> Self {
        Self(seed)
    }

    /// A separate generator, seeded by this one.
    pub fn fork(&mut self) -> Self {
        Self(self.draw())
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit
    }

    /// True with this probability, in percent.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

/// The faults of a link; probabilities in percent.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Loss.
    pub loss: u64,
    /// Duplication.
    pub duplicate: u64,
    /// Additional delay of up to 20 times `delay`, so that later frames overtake.
    pub reorder: u64,
    /// Delay in one direction.
    pub delay: Duration,
    /// Maximum length of a delivered frame, in bytes.
    pub longest: usize,
}

impl Faults {
    /// A perfect link with a delay of 100 µs in each direction.
    pub const NONE: Self =
        Self { loss: 0, duplicate: 0, reorder: 0, delay: Duration::from_micros(100), longest: usize::MAX };
}

/// One direction of a link.
#[derive(Debug)]
pub struct Link {
    faults: Faults,
    rng: Rng,
    due: BTreeMap<(Duration, u64), Vec<u8>>,
    count: u64,
}

impl Link {
    /// An empty link.
    #[must_use]
    pub fn new(faults: Faults, rng: Rng) -> Self {
        Self { faults, rng, due: BTreeMap::new(), count: 0 }
    }

    /// Sends a frame along the link.
    pub fn push(&mut self, now: Duration, frame: &[u8]) {
        if self.rng.percent(self.faults.loss) || frame.len() > self.faults.longest {
            return;
        }
        let copies = if self.rng.percent(self.faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let extra = if self.rng.percent(self.faults.reorder) { self.rng.below(20) as u32 } else { 0 };
            self.count += 1;
            self.due.insert((now + self.faults.delay * (1 + extra), self.count), frame.to_vec());
        }
    }

    /// The next frame that has arrived.
    pub fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
        let entry = self.due.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(entry.remove())
    }

    /// When the next frame arrives.
    #[must_use]
    pub fn next_at(&self) -> Option<Duration> {
        self.due.first_key_value().map(|(key, _)| key.0)
    }
}

/// Collects the frames that a stack sends.
#[derive(Debug, Default)]
pub struct Sent(pub Vec<Vec<u8>>);

impl Transmit for Sent {
    fn send(&mut self, frame: &[u8]) {
        self.0.push(frame.to_vec());
    }

    fn send_long(&mut self, frame: &Long<'_>) {
        self.0.extend(cut(frame));
    }
}

/// One stack, one client, the link between them, and virtual time.
pub struct World<S: Service, L = NoLedger> {
    /// The stack under test.
    pub stack: Stack<S, L>,
    /// Its guest.
    pub client: Client,
    /// Every frame that the stack has sent, including lost ones; `None` to keep none.
    pub sent: Option<Vec<Vec<u8>>>,
    /// A kernel that answers in front of the stack, if there is one.
    pub kernel: Option<Kernel>,
    slot: Slot,
    now: Duration,
    up: Link,
    down: Link,
    wake: Option<Duration>,
}

impl<S: Service, L: AckLedger> World<S, L> {
    /// A world at time zero.
    pub fn new(stack: Stack<S, L>, client: Client, faults: Faults, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let (up, down) = (Rng::new(rng.draw()), Rng::new(rng.draw()));
        Self {
            stack,
            slot: client.slot(),
            client,
            sent: None,
            kernel: None,
            now: Duration::ZERO,
            up: Link::new(faults, up),
            down: Link::new(faults, down),
            wake: None,
        }
    }

    /// The virtual time.
    pub fn now(&self) -> Now {
        at(self.now)
    }

    /// Advances time until `done` returns true, by `limit` at most. Returns the last result of `done`.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        let mut turns = 0;
        loop {
            if done(self) {
                return true;
            }
            self.turn();
            let next = [self.up.next_at(), self.down.next_at(), self.wake, self.client.wake_at(self.now)];
            match next.into_iter().flatten().min() {
                Some(next) if next > end => {
                    self.now = end;
                    return done(self);
                }
                Some(next) if next > self.now => {
                    self.now = next;
                    turns = 0;
                }
                Some(_) => {
                    turns += 1;
                    assert!(turns < TURNS_PER_INSTANT, "no progress at {:?}", self.now);
                }
                None => {
                    self.now = end;
                    return done(self);
                }
            }
        }
    }

    /// Advances time while the link to the client holds all frames, and delivers them afterwards.
    pub fn hold_down(&mut self, time: Duration) {
        let (now, end) = (self.now, self.now + time);
        let held =
            std::mem::replace(&mut self.down, Link::new(Faults { delay: time, ..Faults::NONE }, Rng::new(0)));
        self.wait(time);
        let mut late = std::mem::replace(&mut self.down, held);
        let mut frames = std::mem::take(&mut self.down.due);
        frames.extend(std::mem::take(&mut late.due));
        // The frames keep their order.
        let mut frames: Vec<_> = frames.into_iter().collect();
        frames.sort_by_key(|((due, count), _)| (*due >= now + time, *count));
        for (_, frame) in frames {
            self.down.count += 1;
            self.down.due.insert((end, self.down.count), frame);
        }
    }

    /// Advances time.
    pub fn wait(&mut self, time: Duration) {
        self.run(time, |_| false);
    }

    /// Processes everything due at this time.
    fn turn(&mut self) {
        let now = at(self.now);
        while let Some(frame) = self.down.pop(self.now) {
            self.client.deliver(frame);
        }
        for frame in self.client.poll(self.now) {
            self.up.push(self.now, &frame);
        }
        let mut sent = Sent::default();
        while let Some(frame) = self.up.pop(self.now) {
            if self.kernel.as_mut().is_some_and(|kernel| kernel.takes(self.slot, &frame, &mut sent)) {
                continue;
            }
            self.stack.receive(now, self.slot, &frame, &mut sent);
        }
        self.wake = self.stack.step(now, &mut sent);
        for frame in sent.0 {
            if let Some(kept) = &mut self.sent {
                kept.push(frame.clone());
            }
            self.down.push(self.now, &frame);
        }
    }
}

/// An instant of virtual time.
#[must_use]
pub fn at(mono: Duration) -> Now {
    Now { mono, unix_seconds: EPOCH + mono.as_secs() }
}

// A smoltcp guest: the peer of the stack in tests without a kernel.

/// The service's address.
pub const SERVICE: [u8; 4] = [169, 254, 169, 254];
/// The client's address, on the same link.
pub const CLIENT: [u8; 4] = [169, 254, 10, 1];
/// The client's IPv6 address, on the same link.
pub const CLIENT_V6: [u16; 8] = [0xfe80, 0, 0, 0, 0, 0, 0, 0x10];

/// The TCP behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// The MTU in bytes, which determines the announced MSS.
    pub mtu: usize,
    /// Bytes of the receive buffer, which is the offered window.
    pub window: usize,
    /// Bytes per write. Each write is a segment of its own.
    pub write: usize,
    /// Bytes per read.
    pub read: usize,
    /// Pause between two reads.
    pub read_pause: Duration,
}

impl Default for Habits {
    fn default() -> Self {
        Self { mtu: 1500, window: 65_535, write: usize::MAX, read: usize::MAX, read_pause: Duration::ZERO }
    }
}

/// One connection: the bytes to send and the bytes received.
#[derive(Debug)]
pub struct Talk {
    handle: SocketHandle,
    outgoing: VecDeque<u8>,
    close_after_sending: bool,
    /// All bytes that the service has sent.
    pub received: Vec<u8>,
    /// Whether the service has closed its side.
    pub ended: bool,
    read_at: Duration,
}

/// A guest with one interface.
pub struct Client {
    slot: Slot,
    interface: Interface,
    sockets: SocketSet<'static>,
    queue: Queue,
    habits: Habits,
    /// Connections, in the order in which they began.
    pub talks: Vec<Talk>,
}

impl Client {
    /// A guest whose frames bear the stamp of `slot`.
    #[must_use]
    pub fn new(slot: Slot, habits: Habits) -> Self {
        Self::at(CLIENT.into(), 16, slot, habits)
    }

    /// A guest with this address. Addresses within its prefix are on its link.
    #[must_use]
    pub fn at(address: Ipv4Addr, prefix: u8, slot: Slot, habits: Habits) -> Self {
        let mut queue = Queue { mtu: habits.mtu, ..Queue::default() };
        let config = Config::new(HardwareAddress::Ethernet(EthernetAddress(stamp(slot).0)));
        let mut interface = Interface::new(config, &mut queue, Instant::ZERO);
        interface.update_ip_addrs(|list| {
            list.push(IpCidr::new(IpAddress::Ipv4(address), prefix)).expect("room for one address");
            list.push(IpCidr::new(IpAddress::from(IpAddr::from(CLIENT_V6)), 64)).expect("room for another");
        });
        Self { slot, interface, sockets: SocketSet::new(Vec::new()), queue, habits, talks: Vec::new() }
    }

    /// The slot whose stamp the frames bear.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Opens a connection from `port` and sends `bytes`. Returns the connection's index.
    pub fn begin(&mut self, port: u16, bytes: &[u8]) -> usize {
        self.begin_to((IpAddr::from(SERVICE), 80), port, bytes)
    }

    /// Like [`begin`](Self::begin), to another address or port.
    pub fn begin_to(&mut self, remote: (IpAddr, u16), port: u16, bytes: &[u8]) -> usize {
        let buffer = |bytes| SocketBuffer::new(vec![0; bytes]);
        let mut socket = Socket::new(buffer(self.habits.window), buffer(65_535));
        socket.set_nagle_enabled(false);
        let remote = (IpAddress::from(remote.0), remote.1);
        socket.connect(self.interface.context(), remote, port).expect("an address to connect from");
        self.talks.push(Talk {
            handle: self.sockets.add(socket),
            outgoing: bytes.iter().copied().collect(),
            close_after_sending: false,
            received: Vec::new(),
            ended: false,
            read_at: Duration::ZERO,
        });
        self.talks.len() - 1
    }

    /// Sends more bytes.
    pub fn transmit(&mut self, talk: usize, bytes: &[u8]) {
        self.talks[talk].outgoing.extend(bytes);
    }

    /// Closes the client's side after everything is sent.
    pub fn close(&mut self, talk: usize) {
        self.talks[talk].close_after_sending = true;
    }

    /// Whether both sides of a connection are closed.
    #[must_use]
    pub fn is_over(&self, talk: usize) -> bool {
        matches!(self.state(talk), State::Closed | State::TimeWait)
    }

    /// Removes the last connection, so that its port is free.
    ///
    /// # Panics
    /// When `talk` is not the last.
    pub fn forget(&mut self, talk: usize) {
        assert_eq!(
            talk + 1,
            self.talks.len(),
            "only the last connection can be removed, because the others are known by index"
        );
        self.sockets.remove(self.talks.remove(talk).handle);
    }

    /// Resets a connection.
    pub fn abort(&mut self, talk: usize) {
        self.sockets.get_mut::<Socket<'_>>(self.talks[talk].handle).abort();
    }

    /// The state of a connection's socket.
    #[must_use]
    pub fn state(&self, talk: usize) -> State {
        self.sockets.get::<Socket<'_>>(self.talks[talk].handle).state()
    }

    /// Queues an arrived frame for the next poll.
    pub fn deliver(&mut self, frame: Vec<u8>) {
        self.queue.received.push_back(frame);
    }

    /// Processes arrived frames, reads, writes, and returns the frames to send.
    pub fn poll(&mut self, now: Duration) -> Vec<Vec<u8>> {
        let at = Instant::from_micros(now.as_micros() as i64);
        self.interface.poll(at, &mut self.queue, &mut self.sockets);
        for talk in &mut self.talks {
            let socket = self.sockets.get_mut::<Socket<'_>>(talk.handle);
            talk.read(now, &self.habits, socket);
            talk.write(self.habits.write, socket);
        }
        self.interface.poll(at, &mut self.queue, &mut self.sockets);
        std::mem::take(&mut self.queue.sent)
    }

    /// When to poll again.
    pub fn wake_at(&mut self, now: Duration) -> Option<Duration> {
        let at = Instant::from_micros(now.as_micros() as i64);
        let timer = self.interface.poll_at(at, &self.sockets);
        let timer = timer.map(|at| Duration::from_micros(at.total_micros() as u64).max(now));
        let reads = self.talks.iter().filter(|talk| talk.read_at > now).map(|talk| talk.read_at);
        timer.into_iter().chain(reads).min()
    }
}

impl Talk {
    fn read(&mut self, now: Duration, habits: &Habits, socket: &mut Socket<'_>) {
        if self.read_at <= now && socket.can_recv() {
            let received = &mut self.received;
            let most = habits.read;
            let _ = socket.recv(|bytes| {
                let taken = bytes.len().min(most);
                received.extend_from_slice(&bytes[..taken]);
                (taken, ())
            });
            self.read_at = now + habits.read_pause;
        }
        // Only a FIN counts as an end. After a reset the state is CLOSED.
        let fin =
            matches!(socket.state(), State::CloseWait | State::LastAck | State::Closing | State::TimeWait);
        self.ended |= fin && !socket.can_recv();
    }

    fn write(&mut self, most: usize, socket: &mut Socket<'_>) {
        // A limited write waits until the previous one is acknowledged, so that each write is one segment.
        if !self.outgoing.is_empty() && socket.can_send() && (most == usize::MAX || socket.send_queue() == 0)
        {
            let bytes: Vec<u8> = self.outgoing.iter().copied().take(most).collect();
            let taken = socket.send_slice(&bytes).unwrap_or(0);
            self.outgoing.drain(..taken);
        }
        if self.close_after_sending && self.outgoing.is_empty() && socket.may_send() {
            socket.close();
        }
    }
}

/// The client's device: two queues of frames.
#[derive(Debug, Default)]
struct Queue {
    mtu: usize,
    received: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
}

struct Rx(Vec<u8>);
struct Tx<'a>(&'a mut Vec<Vec<u8>>);

impl Device for Queue {
    type RxToken<'a> = Rx;
    type TxToken<'a> = Tx<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Rx, Tx<'_>)> {
        Some((Rx(self.received.pop_front()?), Tx(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Tx<'_>> {
        Some(Tx(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = self.mtu + 14;
        capabilities
    }
}

impl RxToken for Rx {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Tx<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.push(frame);
        result
    }
}
