//! One guest: it resolves the metadata address by ARP, then makes one request after the other, each on a new connection
//! unless kept alive.

use metadata_common::mac::Mac;
use std::net::Ipv4Addr;

use super::Planned;
use super::answer::{Answer, Tally};
use super::pump::{NEEDS_CHECKSUM, VNET};
use super::tcp::{Due, Ends, Incoming, MILLISECOND, Nanos, SECOND};
use crate::storm::guest::answer::{Body, Failure, Progress};
use crate::storm::guest::pump::{Scratch, World};
use crate::storm::guest::tcp;
use crate::storm::guest::tcp::{Connection, Event, Header, Send};

/// The pause before ARP is repeated (Linux's retrans_time).
const ARP_AGAIN: Nanos = SECOND;
/// The number of tries of ARP.
const ARP_TRIES: u8 = 5;
/// An answer is given up after this time without a byte. cloud-init's own limits are 2 to 50 s.
const SILENCE: Nanos = 10 * SECOND;
/// The most closed connections whose end the guest awaits. Beyond it the oldest is dropped.
const CLOSING_MOST: usize = 64;
/// The first port a guest connects from (Linux's ip_local_port_range).
const FIRST_PORT: u16 = 32_768;
/// The number of ports a guest connects from.
const PORTS: u16 = 28_232;
/// The pause before a failed request is repeated.
const RETRY_PAUSE: Nanos = SECOND;
/// A guest that has no answer for this time gets none while no agent runs. TCP has sent its request again by then.
const STUCK: Nanos = 3 * SECOND;
/// The pause between two requests of a lone guest.
const LONE_PAUSE: Nanos = 2 * MILLISECOND;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The guest has not begun, or has finished.
    Off,
    /// ARP has been sent this many times.
    Resolving(u8),
    Asking,
    /// The guest waits before the next request.
    Pausing,
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) plan: Planned,
    ends: Ends,
    slow: bool,
    state: State,
    /// The index of the current request.
    at: usize,
    answer: Answer,
    /// The answer is complete, and the guest awaits the end of the connection.
    is_answered: bool,
    connection: Option<Connection>,
    closing: Vec<Connection>,
    ports_used: u16,
    began_at: Nanos,
    /// Some request of this boot has failed.
    failed: bool,
    /// How often the current request was repeated.
    tries: u8,
    /// The first 64 requests of a boot, as bits: those that the kernel has answered in this storm.
    published: u64,
    asked_at: Nanos,
    progress_at: Nanos,
    /// The time at which [`State::Resolving`] or [`State::Pausing`] continues.
    on_at: Nanos,
    /// The time at which [`Guest::due`] must be called.
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
            published: 0,
            asked_at: 0,
            progress_at: 0,
            on_at: 0,
            wake_at: Nanos::MAX,
        }
    }

    /// Whether the guest is not booting.
    pub(super) fn is_off(&self) -> bool {
        self.state == State::Off
    }

    /// Returns the time of the last progress of the current answer, and the port; `None` if the guest waits for no
    /// answer.
    pub(super) fn waits(&self) -> Option<(Nanos, u16)> {
        let connection = self.connection.as_ref().filter(|_| self.state == State::Asking)?;
        Some((self.progress_at, connection.port))
    }

    /// Whether the guest has waited for so long that only an agent can answer.
    pub(super) fn is_stuck(&self, now: Nanos) -> bool {
        matches!(self.state, State::Asking | State::Pausing) && self.progress_at + STUCK <= now
    }

    /// Counts the request that the guest has made without an answer, unless it has failed and was counted then.
    pub(super) fn give_up(&self, tally: &mut Tally) {
        if !self.is_off() && self.tries == 0 {
            tally.unanswered(self.published & self.bit() != 0);
        }
    }

    /// The current request in `published`.
    fn bit(&self) -> u64 {
        u32::try_from(self.at).ok().and_then(|at| 1_u64.checked_shl(at)).unwrap_or(0)
    }

    /// Returns the number of requests of this boot that have ended.
    pub(super) fn answered(&self) -> u64 {
        self.at as u64
    }

    /// Whether none of the guest's connections is open.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_off() && self.closing.is_empty()
    }

    /// Drops the state of earlier storms. The next subject has no state of them either.
    pub(super) fn forget(&mut self, slow: bool, random: &mut fastrand::Rng) {
        self.closing.clear();
        self.connection = None;
        self.state = State::Off;
        self.published = 0;
        self.slow = slow;
        self.ports_used = random.u16(..PORTS);
        self.wake_at = Nanos::MAX;
    }

    /// Starts a boot.
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
        world.arp(|out| tcp::who_has(out, &ends));
    }

    /// Handles a frame from the tap.
    pub(super) fn receive(&mut self, frame: &[u8], world: &mut World<'_>) {
        let (partial, frame) = if world.manner.vnet {
            let Some((head, frame)) = frame.split_at_checked(VNET) else { return };
            (head[0] & NEEDS_CHECKSUM != 0, frame)
        } else {
            (false, frame)
        };
        match tcp::read(frame, &self.ends, partial) {
            Incoming::WhoHas(mac, address) => {
                let ends = self.ends;
                world.arp(|out| tcp::is_at(out, &ends, mac, address));
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

    /// Handles the timers that have expired.
    pub(super) fn due(&mut self, world: &mut World<'_>) {
        match self.state {
            State::Resolving(tries) if self.on_at <= world.now => self.resolve(tries, world),
            State::Pausing if self.on_at <= world.now => self.ask(world),
            State::Asking if self.progress_at + SILENCE <= world.now => {
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
            State::Asking => self.progress_at + SILENCE,
        };
        let connections = self.connection.iter().chain(&self.closing).map(Connection::wake_at);
        self.wake_at = connections.fold(own, Nanos::min);
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

// The requests of a guest: it sends them, checks their answers, and closes or resets their connections.

impl Guest {
    /// Begins the next request, on the existing connection or on a new one.
    fn ask(&mut self, world: &mut World<'_>) {
        self.state = State::Asking;
        self.answer.reset();
        self.is_answered = false;
        self.progress_at = world.now;
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

    /// Resets a connection that the guest does not know (RFC 9293 §3.10.7.1). Otherwise a server would match its old
    /// state with the next connection from the same port.
    fn refuse(&self, header: &Header, world: &mut World<'_>) {
        if header.flags & tcp::ACK != 0 && header.flags & tcp::RST == 0 {
            let (port, seq) = (header.port, header.ack);
            world.scratch.request.clear();
            world.scratch.sacks.clear();
            world.segment(&self.ends, &Header { port, seq, flags: tcp::RST, ..Header::default() });
        }
    }

    /// Handles a segment of the current connection. Returns the outcome of the request if it ended.
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
            // The segment belongs to an old connection from the same port (RFC 9293 §3.10.7.3). The SYN will be sent
            // again.
            Event::Nothing if connection.is_opening() => self.refuse(header, world),
            Event::Nothing => {}
            Event::Reset if connection.is_opening() => return Some(Err(Failure::Connect)),
            Event::Reset => return Some(Err(Failure::Reset)),
            Event::Opened => {
                self.progress_at = world.now;
                self.send(Send::Ack, connection, world);
                self.send_request(connection, world);
                acknowledge = false;
            }
            Event::Data { skip } => {
                let bytes = &payload[skip..];
                outcome = self.feed(bytes, world);
                acknowledge |= connection.took(bytes.len(), world.now);
                while let (None, Some((seq, bytes))) = (outcome, connection.ripe()) {
                    let ripe = Header { seq, flags: tcp::ACK, ..*header };
                    if let (Event::Data { skip }, _) = connection.segment(&ripe, &bytes, world.now) {
                        outcome = self.feed(&bytes[skip..], world);
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

    fn feed(&mut self, bytes: &[u8], world: &mut World<'_>) -> Option<Result<bool, Failure>> {
        self.progress_at = world.now;
        let mut expected = self.plan.answers[self.at];
        if world.manner.any_bytes {
            expected.body = Body::Any;
        }
        match self.answer.feed(bytes, &expected, world.bodies) {
            Progress::More => None,
            Progress::Done { keep } => Some(Ok(keep)),
            Progress::Wrong(failure) => Some(Err(failure)),
        }
    }

    fn end_request(&mut self, outcome: Result<bool, Failure>, connection: Connection, world: &mut World<'_>) {
        match outcome {
            Ok(keep) => {
                let by_kernel = self.answer.is_by_kernel();
                world.tally.answered(world.now - self.asked_at, by_kernel);
                self.published |= if by_kernel { self.bit() } else { 0 };
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

    /// Gives the current request up, and repeats it or continues with the next one.
    fn fail(&mut self, failure: Failure, reset: bool, world: &mut World<'_>) {
        if let Some(mut connection) = self.connection.take()
            && reset
        {
            self.send(Send::Reset, &mut connection, world);
        }
        self.give_up(world.tally);
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
}
