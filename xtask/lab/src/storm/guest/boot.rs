//! One guest: who has the metadata address, then a request after the other, each on a connection of its own.

use super::answer::{Answer, Progress};
use super::plan::Planned;
use super::request::Requests;
use super::tally::{Failure, Tally};
use super::tcp::{Connection, Due, Event, MILLISECOND, Nanos, SECOND, Send};
use super::wire::{self, Ends, FRAME_MOST, Header, Incoming};
use metadata_common::mac::Mac;
use std::net::Ipv4Addr;

/// Octets of `struct virtio_net_hdr` (Linux: include/uapi/linux/virtio_net.h).
const VNET: usize = support::tap::VNET_HDR_LEN;
/// VIRTIO_NET_HDR_F_NEEDS_CSUM.
const NEEDS_CHECKSUM: u8 = 1;
/// Where a TCP checksum begins and where in the TCP header it is.
const CHECKSUM_START: u16 = 34;
const CHECKSUM_OFFSET: u16 = 16;

/// Until ARP is asked again, and how often (Linux's retrans_time and mcast_solicit).
const ARP_AGAIN: Nanos = SECOND;
const ARP_TRIES: u8 = 5;
/// Without an octet, an answer is given up: cloud-init's time limits are 2 to 50 s.
const SILENCE: Nanos = 10 * SECOND;
/// Closed connections whose end is waited for; the oldest makes room.
const CLOSING_MOST: usize = 64;
/// First port a guest connects from, and how many it uses (Linux's ip_local_port_range).
const FIRST_PORT: u16 = 32_768;
const PORTS: u16 = 28_232;
/// Until a request that has failed is asked again.
const RETRY_PAUSE: Nanos = SECOND;
/// Between two requests of a guest that is alone.
const LONE_PAUSE: Nanos = 2 * MILLISECOND;

/// Takes frames to the network.
pub(super) trait Transmit {
    /// Sends a frame, virtio header and all if the tap has one.
    fn send(&mut self, frame: &[u8]);
}

/// How guests behave.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner {
    /// Frames begin with a virtio header, and checksums are left to the device.
    pub(super) vnet: bool,
    pub(super) keep_alive: bool,
    /// A pause between two requests.
    pub(super) lone: bool,
    /// The service closes a connection first: the guest reads on behind its answer, to the end.
    pub(super) to_the_end: bool,
    /// Times a request that has failed is asked again.
    pub(super) retries: u8,
}

/// What all guests share while frames are handled.
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

/// Buffers used for one frame.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    frame: Vec<u8>,
    request: Vec<u8>,
    sacks: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Has not begun, or has finished.
    Off,
    /// ARP was asked so often.
    Resolving(u8),
    Asking,
    /// Before the next request.
    Pausing,
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) plan: Planned,
    ends: Ends,
    slow: bool,
    state: State,
    /// The request being asked.
    at: usize,
    answer: Answer,
    /// The answer is there, and the end of its connection is waited for.
    is_answered: bool,
    connection: Option<Connection>,
    closing: Vec<Connection>,
    ports_used: u16,
    began_at: Nanos,
    /// Something of this boot has failed.
    failed: bool,
    /// Times the present request was asked again.
    tries: u8,
    asked_at: Nanos,
    heard_at: Nanos,
    /// When [`State::Resolving`] or [`State::Pausing`] goes on.
    on_at: Nanos,
    /// When [`Guest::due`] wants to be called.
    pub(super) wake_at: Nanos,
}

impl Guest {
    pub(super) fn new(plan: Planned, server: Ipv4Addr) -> Self {
        let ends = Ends { mac: plan.mac(), address: plan.address, server, server_mac: Mac([0; 6]) };
        Self {
            plan,
            ends,
            slow: false,
            state: State::Off,
            at: 0,
            answer: Answer::default(),
            is_answered: false,
            connection: None,
            closing: Vec::new(),
            ports_used: 0,
            began_at: 0,
            failed: false,
            tries: 0,
            asked_at: 0,
            heard_at: 0,
            on_at: 0,
            wake_at: Nanos::MAX,
        }
    }

    /// Whether it is not booting.
    pub(super) fn is_off(&self) -> bool {
        self.state == State::Off
    }

    /// Since when it waits for the service to go on with the present answer, and on which port.
    pub(super) fn waits(&self) -> Option<(Nanos, u16)> {
        let connection = self.connection.as_ref().filter(|_| self.state == State::Asking)?;
        Some((self.heard_at, connection.port))
    }

    /// Requests of this boot that are over.
    pub(super) fn answered(&self) -> u64 {
        self.at as u64
    }

    /// Whether nothing of it is left on the network.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_off() && self.closing.is_empty()
    }

    /// Forgets what is left of earlier storms: the next subject knows nothing of it either.
    pub(super) fn forget(&mut self, slow: bool, random: &mut fastrand::Rng) {
        self.closing.clear();
        self.connection = None;
        self.state = State::Off;
        self.slow = slow;
        self.ports_used = random.u16(..PORTS);
        self.wake_at = Nanos::MAX;
    }

    /// Begins to boot.
    pub(super) fn boot(&mut self, world: &mut World<'_>) {
        world.tally.boots += 1;
        self.began_at = world.now;
        self.failed = false;
        self.tries = 0;
        self.at = 0;
        self.state = State::Resolving(0);
        self.resolve(0, world);
        self.plan_wake();
    }

    fn resolve(&mut self, tries: u8, world: &mut World<'_>) {
        if tries == ARP_TRIES {
            for _ in 0..world.requests.len() {
                world.tally.fail(Failure::Arp);
            }
            self.failed = true;
            self.finish(world);
            return;
        }
        if tries > 0 {
            world.tally.retransmissions += 1;
        }
        self.state = State::Resolving(tries + 1);
        self.on_at = world.now + ARP_AGAIN;
        let ends = self.ends;
        world.arp(|out| wire::who_has(out, &ends));
    }

    /// Takes a frame from the tap.
    pub(super) fn receive(&mut self, frame: &[u8], world: &mut World<'_>) {
        let (partial, frame) = if world.manner.vnet {
            let Some((head, frame)) = frame.split_at_checked(VNET) else { return };
            (head[0] & NEEDS_CHECKSUM != 0, frame)
        } else {
            (false, frame)
        };
        match wire::read(frame, &self.ends, partial) {
            Incoming::WhoHas(mac, address) => {
                let ends = self.ends;
                world.arp(|out| wire::is_at(out, &ends, mac, address));
            }
            Incoming::IsAt(mac) => {
                self.ends.server_mac = mac;
                if matches!(self.state, State::Resolving(_)) {
                    self.ask(world);
                }
            }
            Incoming::Tcp(header, payload) => self.segment(&header, payload, world),
            Incoming::Damaged => world.tally.note(Failure::Checksum),
            Incoming::Other => {}
        }
        self.plan_wake();
    }

    /// Does what the time wants.
    pub(super) fn due(&mut self, world: &mut World<'_>) {
        match self.state {
            State::Resolving(tries) if self.on_at <= world.now => self.resolve(tries, world),
            State::Pausing if self.on_at <= world.now => self.ask(world),
            State::Asking if self.heard_at + SILENCE <= world.now => {
                let opening = self.connection.as_ref().is_some_and(Connection::is_opening);
                self.fail(if opening { Failure::Connect } else { Failure::Silence }, true, world);
            }
            _ => {}
        }
        if let Some(mut connection) = self.connection.take() {
            match connection.due(world.now) {
                Due::GiveUp => {
                    self.connection = Some(connection);
                    self.fail(Failure::Connect, false, world);
                }
                due => {
                    self.send_due(due, &mut connection, world);
                    self.connection = Some(connection);
                }
            }
        }
        let mut closing = std::mem::take(&mut self.closing);
        closing.retain_mut(|connection| {
            let due = connection.due(world.now);
            self.send_due(due, connection, world);
            due != Due::GiveUp
        });
        self.closing = closing;
        self.plan_wake();
    }

    fn send_due(&self, due: Due, connection: &mut Connection, world: &mut World<'_>) {
        match due {
            Due::Nothing | Due::GiveUp => {}
            Due::Send(send) => self.send(send, connection, world),
            Due::Again(send) => {
                world.tally.retransmissions += 1;
                self.send(send, connection, world);
            }
        }
    }

    fn plan_wake(&mut self) {
        let own = match self.state {
            State::Off => Nanos::MAX,
            State::Resolving(_) | State::Pausing => self.on_at,
            State::Asking => self.heard_at + SILENCE,
        };
        let connections = self.connection.iter().chain(&self.closing).map(Connection::wake_at);
        self.wake_at = connections.fold(own, Nanos::min);
    }

    /// Asks the next request, on the connection there is or a new one.
    fn ask(&mut self, world: &mut World<'_>) {
        self.state = State::Asking;
        self.answer.reset();
        self.is_answered = false;
        self.heard_at = world.now;
        if self.tries == 0 {
            self.asked_at = world.now;
        }
        if let Some(mut connection) = self.connection.take() {
            self.send_request(&mut connection, world);
            self.connection = Some(connection);
            return;
        }
        self.ports_used = (self.ports_used + 1) % PORTS;
        let port = FIRST_PORT + self.ports_used;
        let mut connection = Connection::new(port, world.random.u32(..), self.slow, world.now);
        self.send(Send::Syn, &mut connection, world);
        self.connection = Some(connection);
    }

    fn send_request(&self, connection: &mut Connection, world: &mut World<'_>) {
        let length = world.requests.length(self.at, self.answer.token());
        connection.ask(length, world.now);
        self.send(Send::Request, connection, world);
    }

    fn send(&self, send: Send, connection: &mut Connection, world: &mut World<'_>) {
        let header = connection.header(send, world.now);
        let Scratch { request, sacks, .. } = world.scratch;
        request.clear();
        connection.sacks(sacks);
        if send == Send::Request {
            world.requests.write(request, self.at, self.ends.mac, self.answer.token());
        }
        world.segment(&self.ends, &header);
    }

    fn segment(&mut self, header: &Header, payload: &[u8], world: &mut World<'_>) {
        match self.connection.take() {
            Some(mut connection) if connection.port == header.port => {
                let over = self.advance(header, payload, &mut connection, world);
                match over {
                    None => self.connection = Some(connection),
                    Some(outcome) => self.end_request(outcome, connection, world),
                }
            }
            other => {
                self.connection = other;
                self.closing_segment(header, payload, world);
            }
        }
    }

    fn closing_segment(&mut self, header: &Header, payload: &[u8], world: &mut World<'_>) {
        let Some(at) = self.closing.iter().position(|closing| closing.port == header.port) else {
            self.refuse(header, world);
            return;
        };
        let mut connection = self.closing.swap_remove(at);
        let (event, acknowledge) = connection.segment(header, payload, world.now);
        if acknowledge {
            self.send(Send::Ack, &mut connection, world);
        }
        if event != Event::Reset && !connection.is_over() {
            self.closing.push(connection);
        }
    }

    /// Resets a connection that is not the guest's, or not any more (RFC 9293 §3.10.7.1): otherwise a server
    /// would hold what is left of it against the next one from the same port.
    fn refuse(&self, header: &Header, world: &mut World<'_>) {
        if header.flags & wire::ACK != 0 && header.flags & wire::RST == 0 {
            let (port, seq) = (header.port, header.ack);
            world.scratch.request.clear();
            world.scratch.sacks.clear();
            world.segment(&self.ends, &Header { port, seq, flags: wire::RST, ..Header::default() });
        }
    }

    /// Takes a segment of the present connection; how the request ended, if it did.
    fn advance(
        &mut self,
        header: &Header,
        payload: &[u8],
        connection: &mut Connection,
        world: &mut World<'_>,
    ) -> Option<Result<bool, Failure>> {
        let (event, mut acknowledge) = connection.segment(header, payload, world.now);
        let mut outcome = None;
        match event {
            // An old connection from the same port (RFC 9293 §3.10.7.3); the SYN will be sent again.
            Event::Nothing if connection.is_opening() => self.refuse(header, world),
            Event::Nothing => {}
            Event::Reset if connection.is_opening() => return Some(Err(Failure::Connect)),
            Event::Reset => return Some(Err(Failure::Reset)),
            Event::Opened => {
                self.heard_at = world.now;
                self.send(Send::Ack, connection, world);
                self.send_request(connection, world);
                acknowledge = false;
            }
            Event::Data { skip } => {
                let octets = &payload[skip..];
                outcome = self.feed(octets, world);
                acknowledge |= connection.took(octets.len(), world.now);
                while let (None, Some((seq, octets))) = (outcome, connection.ripe()) {
                    let ripe = Header { seq, flags: wire::ACK, ..*header };
                    if let (Event::Data { skip }, _) = connection.segment(&ripe, &octets, world.now) {
                        outcome = self.feed(&octets[skip..], world);
                    }
                    acknowledge = true;
                }
            }
            Event::Ended => {}
        }
        if matches!(outcome, Some(Ok(_))) && world.manner.to_the_end && !connection.is_ended() {
            self.is_answered = true;
            outcome = None;
        } else if connection.is_ended() && outcome.is_none() {
            outcome = Some(if self.is_answered { Ok(false) } else { Err(Failure::Cut) });
        }
        if acknowledge {
            self.send(Send::Ack, connection, world);
        }
        outcome
    }

    fn feed(&mut self, octets: &[u8], world: &mut World<'_>) -> Option<Result<bool, Failure>> {
        self.heard_at = world.now;
        let expected = &self.plan.answers[self.at];
        match self.answer.feed(octets, expected, world.bodies) {
            Progress::More => None,
            Progress::Done { keep } => Some(Ok(keep)),
            Progress::Wrong(failure) => Some(Err(failure)),
        }
    }

    fn end_request(&mut self, outcome: Result<bool, Failure>, connection: Connection, world: &mut World<'_>) {
        match outcome {
            Ok(keep) => {
                world.tally.requests += 1;
                world.tally.request.add(world.now - self.asked_at);
                if keep && world.manner.keep_alive && !connection.is_ended() {
                    self.connection = Some(connection);
                } else {
                    self.close(connection, world);
                }
                self.go_on(world);
            }
            Err(failure) => {
                let reset = !matches!(failure, Failure::Reset | Failure::Connect);
                self.connection = Some(connection);
                self.fail(failure, reset, world);
            }
        }
    }

    /// Gives up the present request, and asks it again or goes on with the next.
    fn fail(&mut self, failure: Failure, reset: bool, world: &mut World<'_>) {
        if let Some(mut connection) = self.connection.take()
            && reset
        {
            self.send(Send::Reset, &mut connection, world);
        }
        if self.tries < world.manner.retries {
            self.tries += 1;
            world.tally.retries += 1;
            world.tally.note(failure);
            self.state = State::Pausing;
            self.on_at = world.now + RETRY_PAUSE;
            return;
        }
        world.tally.fail(failure);
        self.failed = true;
        self.go_on(world);
    }

    fn close(&mut self, mut connection: Connection, world: &mut World<'_>) {
        connection.close(world.now);
        self.send(Send::Fin, &mut connection, world);
        if self.closing.len() == CLOSING_MOST {
            self.closing.remove(0);
        }
        self.closing.push(connection);
    }

    fn go_on(&mut self, world: &mut World<'_>) {
        self.at += 1;
        self.tries = 0;
        if self.at == world.requests.len() {
            if !self.failed {
                world.tally.boot.add(world.now - self.began_at);
            }
            self.finish(world);
        } else if world.manner.lone {
            self.state = State::Pausing;
            self.on_at = world.now + LONE_PAUSE;
        } else {
            self.ask(world);
        }
    }

    fn finish(&mut self, world: &mut World<'_>) {
        self.state = State::Off;
        if let Some(connection) = self.connection.take() {
            self.close(connection, world);
        }
        if !self.failed {
            world.tally.finished.push(world.now);
        }
    }
}

impl World<'_> {
    fn begin(&mut self, virtio: [u8; VNET]) {
        self.scratch.frame.clear();
        self.scratch.frame.reserve(VNET + FRAME_MOST);
        if self.manner.vnet {
            self.scratch.frame.extend(virtio);
        }
    }

    fn arp(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.begin([0; VNET]);
        write(&mut self.scratch.frame);
        self.out.send(&self.scratch.frame);
    }

    fn segment(&mut self, ends: &Ends, header: &Header) {
        let [start, offset] = [CHECKSUM_START, CHECKSUM_OFFSET].map(u16::to_ne_bytes);
        // Flags, GSO type, header length, GSO size, checksum start and offset.
        self.begin([NEEDS_CHECKSUM, 0, 0, 0, 0, 0, start[0], start[1], offset[0], offset[1]]);
        let Scratch { frame, request, sacks } = self.scratch;
        wire::segment(frame, ends, header, sacks, request, self.manner.vnet);
        self.out.send(frame);
    }
}
