//! A cheap simulated guest: a user-space TCP client that owns its tap's descriptor.
//!
//! One thread drives any number of clients, so that a boot storm fits on one machine. Each client behaves like a guest
//! at boot: it resolves the metadata address by ARP, then opens one connection per file.

use crate::guest::METADATA;
use crate::pump::wait_for;
use crate::record::Identity;
use crate::tap::{Tap, VNET_HDR_LEN};
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use metadata_common::wire::ethernet;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as Moment;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr, IpEndpoint, IpProtocol, Ipv4Packet, TcpPacket};
use std::collections::HashMap;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Ethernet header and the usual MTU.
const FRAME_MAX: usize = 1_514;
/// Receive buffer of a client, in bytes.
const RECEIVE_BUFFER: usize = 32_768;
/// Maximum size of a request, in bytes.
const SEND_BUFFER: usize = 1_024;
/// Maximum size of an answer with its head, in bytes.
const ANSWER_MAX: usize = 1 << 20;
/// First source port of a client (RFC 6335 §6).
const FIRST_PORT: u16 = 49_152;
/// Number of source ports, which the client uses in turn.
const PORTS: u16 = 16_000;

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The requested path.
    pub path: String,
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub body: Vec<u8>,
}

/// The result of one guest.
#[derive(Debug)]
pub struct Outcome {
    /// The guest.
    pub identity: Identity,
    /// Its answers in the order of the requests, one connection each. The first failure ends the list.
    pub answers: Result<Vec<Answer>>,
    /// Time from the start of the storm to the guest's last answer.
    pub took: Duration,
}

/// Boots all guests at once. Each fetches the paths in order, on one connection per path.
///
/// Returns when all guests are done or `patience` is over. Guests that are not done by then have failed.
#[must_use]
pub fn storm(guests: Vec<(Identity, Arc<Tap>)>, paths: &[&str], patience: Duration) -> Vec<Outcome> {
    impatient_storm(guests, paths, patience, patience)
}

/// Like [`storm`], but a guest opens another connection if it has no complete answer within `attempt`. The time then
/// depends on the service and not on the guest's retransmission timer.
#[must_use]
pub fn impatient_storm(
    guests: Vec<(Identity, Arc<Tap>)>,
    paths: &[&str],
    patience: Duration,
    attempt: Duration,
) -> Vec<Outcome> {
    storm_until(guests, paths, patience, attempt, &AtomicBool::new(false))
}

/// Like [`storm`], but each frame of the guests has this VLAN tag.
#[must_use]
pub fn tagged_storm(
    guests: Vec<(Identity, Arc<Tap>)>,
    paths: &[&str],
    patience: Duration,
    tag: [u8; ethernet::TAG],
) -> Vec<Outcome> {
    let started = Instant::now();
    let mut clients: Vec<Client> =
        guests.into_iter().map(|(identity, tap)| Client::new(identity, tap, paths, started)).collect();
    clients.iter_mut().for_each(|client| client.device.tag = Some(tag));
    run(clients, started, patience, &AtomicBool::new(false))
}

/// Like [`impatient_storm`], and ends within an attempt after `stop`.
#[must_use]
pub fn storm_until(
    guests: Vec<(Identity, Arc<Tap>)>,
    paths: &[&str],
    patience: Duration,
    attempt: Duration,
    stop: &AtomicBool,
) -> Vec<Outcome> {
    let started = Instant::now();
    let mut clients: Vec<Client> =
        guests.into_iter().map(|(identity, tap)| Client::new(identity, tap, paths, started)).collect();
    clients.iter_mut().for_each(|client| client.attempt = attempt);
    run(clients, started, patience, stop)
}

fn run(mut clients: Vec<Client>, started: Instant, patience: Duration, stop: &AtomicBool) -> Vec<Outcome> {
    while started.elapsed() < patience && !stop.load(Ordering::Relaxed) {
        let now = moment(started);
        for client in clients.iter_mut().filter(|client| client.is_due(now)) {
            client.turn(now, started);
        }
        if !clients.iter().any(Client::is_busy) {
            break;
        }
        sleep_until_due(&mut clients, started, patience);
    }
    clients.into_iter().map(|client| client.outcome(patience)).collect()
}

/// The result of one guest of a crowd.
#[derive(Debug)]
pub struct Tally {
    /// The guest.
    pub identity: Identity,
    /// Number of completed rounds, or the failure that ended the guest.
    pub rounds: Result<usize>,
    /// Number of received segments with RST.
    pub resets: usize,
    /// Number of retransmitted segments with payload, SYN or FIN.
    pub resent: usize,
}

/// Makes all guests fetch the paths in order, on one connection per path, in rounds with a pause between them. Every
/// round must have the same answers as the first one. After `stop`, each guest completes its current round.
///
/// Returns when all guests are done, or `patience` after the stop. Guests that are not done by then have failed.
#[must_use]
pub fn crowd(
    guests: Vec<(Identity, Arc<Tap>)>,
    paths: &[&str],
    pause: Duration,
    stop: &AtomicBool,
    patience: Duration,
) -> Vec<Tally> {
    const LOOK: Duration = Duration::from_millis(50);
    let started = Instant::now();
    let mut clients: Vec<Client> =
        guests.into_iter().map(|(identity, tap)| Client::new(identity, tap, paths, started)).collect();
    clients.iter_mut().for_each(|client| client.again = Some(pause));
    let mut end = None;
    while end.is_none_or(|end| Instant::now() < end) && clients.iter().any(Client::is_busy) {
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + patience);
            clients.iter_mut().for_each(|client| client.again = None);
        }
        let now = moment(started);
        for client in clients.iter_mut().filter(|client| client.is_due(now)) {
            client.turn(now, started);
        }
        sleep_until_due(&mut clients, started, started.elapsed() + LOOK);
    }
    clients.into_iter().map(Client::tally).collect()
}

/// Waits for frames or the next deadline. Marks the clients that have frames.
fn sleep_until_due(clients: &mut [Client], started: Instant, patience: Duration) {
    let now = moment(started);
    let end = Moment::from_micros(patience.as_micros() as i64);
    let next =
        clients.iter().filter(|c| c.is_busy()).filter_map(|c| c.deadline).min().unwrap_or(end).min(end);
    let wait_ms = if next <= now { 0 } else { (next - now).total_millis().min(60_000) as i32 + 1 };
    let mut polled: Vec<libc::pollfd> = clients
        .iter()
        .map(|client| libc::pollfd {
            // poll(2) ignores a negative descriptor.
            fd: if client.is_busy() { client.device.tap.as_fd().as_raw_fd() } else { -1 },
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    if wait_for(&mut polled, wait_ms) {
        for (client, poll) in clients.iter_mut().zip(polled) {
            client.woken = poll.revents != 0;
        }
    }
}

fn moment(started: Instant) -> Moment {
    Moment::from_micros(started.elapsed().as_micros() as i64)
}

/// The network interface of a guest that has not sent anything yet.
fn interface(identity: &Identity, device: &mut TapDevice, now: Moment) -> Interface {
    let mut config = Config::new(EthernetAddress(identity.mac.0).into());
    config.random_seed = u64::from(identity.number) + 1 + now.total_micros().unsigned_abs();
    let mut interface = Interface::new(config, device, now);
    interface.update_ip_addrs(|addresses| {
        // All addresses are on-link, because smoltcp accepts ARP answers only from its own network.
        let own = IpCidr::new(IpAddress::Ipv4(identity.address), 0);
        addresses.push(own).expect("a new interface has room for an address");
    });
    interface
}

/// The stage of a client's connection.
enum Stage {
    /// No connection.
    Idle,
    /// The SYN is sent.
    Connecting,
    /// The request is sent.
    Receiving,
    /// The answer is complete; both ends are closing.
    Closing(Answer),
}

struct Client {
    identity: Identity,
    device: TapDevice,
    interface: Interface,
    sockets: SocketSet<'static>,
    socket: Option<SocketHandle>,
    paths: Vec<String>,
    stage: Stage,
    received: Vec<u8>,
    answers: Vec<Answer>,
    /// The pause before the next round, and the answers that each round must have.
    again: Option<Duration>,
    rests_until: Option<Moment>,
    expected: Option<Vec<Answer>>,
    rounds: usize,
    /// Connections begun.
    begun: u16,
    /// Limit for a connection until its answer is complete, and the deadline of the present one.
    attempt: Duration,
    gives_up: Option<Moment>,
    failure: Option<anyhow::Error>,
    woken: bool,
    deadline: Option<Moment>,
    took: Option<Duration>,
}

impl Client {
    fn new(identity: Identity, tap: Arc<Tap>, paths: &[&str], started: Instant) -> Self {
        let now = moment(started);
        let mut device = TapDevice::new(tap);
        let interface = interface(&identity, &mut device, now);
        Self {
            identity,
            device,
            interface,
            sockets: SocketSet::new(Vec::new()),
            socket: None,
            paths: paths.iter().map(|&path| path.to_owned()).collect(),
            stage: Stage::Idle,
            received: Vec::new(),
            answers: Vec::new(),
            again: None,
            rests_until: None,
            expected: None,
            rounds: 0,
            begun: 0,
            attempt: Duration::MAX,
            gives_up: None,
            failure: None,
            woken: true,
            deadline: None,
            took: None,
        }
    }

    fn is_busy(&self) -> bool {
        self.took.is_none()
    }

    fn is_due(&self, now: Moment) -> bool {
        self.is_busy() && (self.woken || self.deadline.is_some_and(|deadline| deadline <= now))
    }

    fn turn(&mut self, now: Moment, started: Instant) {
        if self.gives_up.is_some_and(|end| end <= now) {
            self.give_up(now);
        }
        loop {
            self.interface.poll(now, &mut self.device, &mut self.sockets);
            if self.rests_until.is_some_and(|until| now < until) {
                break;
            }
            match self.advance(now) {
                // The new stage may have data to send, so the loop polls again. It ends, because the stages are few.
                Ok(true) if self.answers.len() == self.paths.len() => {
                    self.end_round(now);
                    break;
                }
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.failure = Some(error);
                    break;
                }
            }
        }
        if self.failure.is_some() || self.answers.len() == self.paths.len() {
            self.took = Some(started.elapsed());
        }
        let timer = self.interface.poll_at(now, &self.sockets);
        let rests_until = self.rests_until.filter(|until| now < *until);
        self.deadline = timer.into_iter().chain(rests_until).chain(self.gives_up).min();
    }

    /// Drops the connection without sending a segment, and opens another one. A new interface asks for the address at
    /// once; the former one asks once a second.
    fn give_up(&mut self, now: Moment) {
        self.gives_up = None;
        self.interface = interface(&self.identity, &mut self.device, now);
        self.stage = Stage::Idle;
        if let Some(handle) = self.socket.take() {
            self.sockets.remove(handle);
        }
    }

    /// Compares the complete answers with the first round's, and starts the next round if there is one.
    fn end_round(&mut self, now: Moment) {
        self.rounds += 1;
        match &self.expected {
            Some(expected) if *expected != self.answers => {
                self.failure = Some(anyhow!("round {} had other answers than the first", self.rounds));
            }
            Some(_) => {}
            None => self.expected = Some(self.answers.clone()),
        }
        if let Some(pause) = self.again {
            self.answers.clear();
            self.rests_until = Some(now + pause.into());
        }
    }

    fn tally(self) -> Tally {
        let rounds = match (self.failure, self.took) {
            (Some(error), _) => Err(error),
            (None, None) => Err(anyhow!("{:?}: no whole answer in time", self.paths.get(self.answers.len()))),
            (None, Some(_)) => Ok(self.rounds),
        };
        let Watch { resets, resent, .. } = self.device.watch;
        Tally { identity: self.identity, rounds, resets, resent }
    }

    /// Advances to the next stage if possible. Returns true if it did.
    fn advance(&mut self, now: Moment) -> Result<bool> {
        let Some(path) = self.paths.get(self.answers.len()) else { return Ok(false) };
        let Some(handle) = self.socket else { return self.connect(now).map(|()| true) };
        let socket = self.sockets.get_mut::<Socket<'_>>(handle);
        let state = socket.state();
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Idle => bail!("{path}: a connection before its stage"),
            Stage::Connecting if socket.may_send() => {
                let request = format!("GET {path} HTTP/1.1\r\nHost: {METADATA}\r\nConnection: close\r\n\r\n");
                let sent = socket.send_slice(request.as_bytes()).context("send")?;
                ensure!(sent == request.len(), "the request for {path} is longer than {SEND_BUFFER} bytes");
                self.stage = Stage::Receiving;
                return Ok(true);
            }
            Stage::Connecting => {
                ensure!(state != State::Closed, "{path}: connection refused");
                self.stage = Stage::Connecting;
            }
            Stage::Receiving => {
                while socket.can_recv() {
                    let received = &mut self.received;
                    socket.recv(|data| (data.len(), received.extend_from_slice(data))).context("recv")?;
                    ensure!(received.len() <= ANSWER_MAX, "{path}: more than {ANSWER_MAX} bytes");
                }
                if let Some(answer) = parse(path, &self.received)? {
                    socket.close();
                    self.gives_up = None;
                    self.stage = Stage::Closing(answer);
                    return Ok(true);
                }
                ensure!(
                    socket.may_recv(),
                    "{path}: the connection ended ({state}) after {} bytes",
                    self.received.len()
                );
                self.stage = Stage::Receiving;
            }
            Stage::Closing(answer) if matches!(state, State::Closed | State::TimeWait) => {
                self.sockets.remove(handle);
                self.socket = None;
                self.answers.push(answer);
                return Ok(true);
            }
            Stage::Closing(answer) => self.stage = Stage::Closing(answer),
        }
        Ok(false)
    }

    fn connect(&mut self, now: Moment) -> Result<()> {
        let buffer = |len| SocketBuffer::new(vec![0; len]);
        let mut socket = Socket::new(buffer(RECEIVE_BUFFER), buffer(SEND_BUFFER));
        let port = FIRST_PORT + self.begun % PORTS;
        self.begun = self.begun.wrapping_add(1);
        let to = IpEndpoint::new(METADATA.into(), 80);
        socket.connect(self.interface.context(), to, port).context("connect")?;
        self.socket = Some(self.sockets.add(socket));
        let micros = u64::try_from(self.attempt.as_micros()).ok();
        self.gives_up = micros.map(|micros| now + smoltcp::time::Duration::from_micros(micros));
        self.received.clear();
        self.stage = Stage::Connecting;
        Ok(())
    }

    fn outcome(self, patience: Duration) -> Outcome {
        let missing = self.paths.get(self.answers.len());
        let answers = match (self.failure, missing) {
            (Some(error), _) => Err(error),
            (None, Some(path)) => {
                Err(anyhow!("{path}: {} bytes, no whole answer in {patience:?}", self.received.len()))
            }
            (None, None) => Ok(self.answers),
        };
        Outcome { identity: self.identity, answers, took: self.took.unwrap_or(patience) }
    }
}

/// Parses an answer. Returns `None` while it is incomplete.
fn parse(path: &str, received: &[u8]) -> Result<Option<Answer>> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(received).map_err(|error| anyhow!("{path}: no HTTP answer: {error}"))?;
    let head = match parsed {
        httparse::Status::Partial => return Ok(None),
        httparse::Status::Complete(len) => len,
    };
    let status = response.code.context("a complete head has a status")?;
    let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = match length {
        Some(header) => std::str::from_utf8(header.value)?.parse().context("Content-Length")?,
        // RFC 9110 §8.6: a 204 has no length.
        None if status == 204 => 0,
        None => bail!("{path}: answered {status} without Content-Length"),
    };
    let body = &received[head..];
    ensure!(body.len() <= length, "{path}: {} bytes after a body of {length}", body.len() - length);
    let whole = body.len() == length;
    Ok(whole.then(|| Answer { path: path.to_owned(), status, body: body.to_vec() }))
}

/// A tap as smoltcp's device.
struct TapDevice {
    tap: Arc<Tap>,
    /// Size of the virtio header before each frame, in bytes.
    prefix: usize,
    /// The VLAN tag of sent frames.
    tag: Option<[u8; ethernet::TAG]>,
    buffer: Vec<u8>,
    watch: Watch,
}

/// Counters of TCP segments on the tap.
#[derive(Debug, Default)]
struct Watch {
    resets: usize,
    resent: usize,
    /// The next sequence number, by source port.
    next: HashMap<u16, u32>,
}

impl Watch {
    /// A frame's segment with its flags and the length in sequence numbers. The IPv4 header has no options.
    fn segment(frame: &[u8]) -> Option<(TcpPacket<&[u8]>, u32)> {
        let ip = Ipv4Packet::new_checked(frame.get(14..)?).ok().filter(|_| frame[12..14] == [8, 0])?;
        let payload = frame.get(14 + usize::from(ip.header_len())..14 + usize::from(ip.total_len()))?;
        let tcp = TcpPacket::new_checked(payload).ok().filter(|_| ip.next_header() == IpProtocol::Tcp)?;
        let length = tcp.segment_len() as u32;
        Some((tcp, length))
    }

    fn received(&mut self, frame: &[u8]) {
        self.resets += usize::from(Self::segment(frame).is_some_and(|(tcp, _)| tcp.rst()));
    }

    fn sent(&mut self, frame: &[u8]) {
        let Some((tcp, length)) = Self::segment(frame).filter(|(_, length)| *length > 0) else { return };
        let (port, end) = (tcp.src_port(), (tcp.seq_number().0 as u32).wrapping_add(length));
        let is_new = self.next.get(&port).is_none_or(|next| end.wrapping_sub(*next) as i32 > 0);
        // Source ports are reused. The numbers of a new connection are unrelated to those of the previous one.
        if tcp.syn() && self.next.get(&port) != Some(&end) || is_new {
            self.next.insert(port, end);
        } else {
            self.resent += 1;
        }
    }
}

impl TapDevice {
    fn new(tap: Arc<Tap>) -> Self {
        let prefix = if tap.shape().vnet_hdr { VNET_HDR_LEN } else { 0 };
        Self { tap, prefix, tag: None, buffer: vec![0; prefix + FRAME_MAX], watch: Watch::default() }
    }
}

impl Device for TapDevice {
    type RxToken<'a> = Received<'a>;
    type TxToken<'a> = ToSend<'a>;

    fn receive(&mut self, _: Moment) -> Option<(Received<'_>, ToSend<'_>)> {
        // Every read from a deleted tap fails. The client then fails at its deadline.
        let len = self.tap.receive(0, &mut self.buffer).ok().flatten()?;
        let frame = self.buffer.get(self.prefix..len)?;
        self.watch.received(frame);
        let tag = self.tag;
        Some((Received(frame), ToSend { tap: &self.tap, prefix: self.prefix, tag, watch: &mut self.watch }))
    }

    fn transmit(&mut self, _: Moment) -> Option<ToSend<'_>> {
        Some(ToSend { tap: &self.tap, prefix: self.prefix, tag: self.tag, watch: &mut self.watch })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = FRAME_MAX;
        capabilities
    }
}

struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

struct ToSend<'a> {
    tap: &'a Tap,
    prefix: usize,
    tag: Option<[u8; ethernet::TAG]>,
    watch: &'a mut Watch,
}

impl TxToken for ToSend<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        // A virtio header of zeros means that nothing is offloaded and the frame is complete.
        let mut frame = vec![0; self.prefix + len];
        let result = f(&mut frame[self.prefix..]);
        self.watch.sent(&frame[self.prefix..]);
        if let Some(tag) = self.tag {
            let at = self.prefix + ethernet::TYPE;
            frame.splice(at..at, tag);
        }
        // A frame that does not fit into the tap is lost, and TCP sends it again.
        self.tap.send(0, &frame).unwrap_or_default();
        result
    }
}
